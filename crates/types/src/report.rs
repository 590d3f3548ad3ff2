use serde::{Deserialize, Serialize};

use crate::{Blocker, GroupId, HugeReport, Latencies, MigrationId, Mode, MoveOptions, NodeName, Outcome, Phase};

/// Which side of a migration something happened on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The node that the container leaves.
    Source,
    /// The node that the container goes to.
    Destination,
}

/// One part of a migration's time, on the source's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Part {
    /// What was done, e.g. `skeleton: dump`.
    pub name: String,
    /// Where.
    pub side: Side,
    /// When it began, in ms from the start of the freeze; negative before it.
    pub start_ms: f64,
    /// How long it took, in ms. Parts may overlap.
    pub ms: f64,
}

/// What is known of a migration that is under way; made often, small.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Progress {
    /// Bytes of memory found to be moved.
    pub memory_bytes: u64,
    /// Bytes of memory moved so far (zero pages count as moved).
    pub moved_bytes: u64,
    /// Bytes written to the wire so far, framing and TLS included.
    pub wire_bytes: u64,
    /// Pages that travelled compressed with lz4, so far.
    #[serde(default)]
    pub lz4: Compressed,
    /// The same with zstd.
    #[serde(default)]
    pub zstd: Compressed,
    /// Bytes of pages that did not travel because another task has the same at the same address, so far.
    #[serde(default)]
    pub deduplicated_bytes: u64,
    /// Rate of the last interval in bytes a second.
    pub rate: f64,
    /// Rounds of pre-copy so far.
    #[serde(default)]
    pub rounds: u32,
    /// How fast the container writes to memory that was sent already, in bytes a second, as the last round found it.
    #[serde(default)]
    pub dirty_rate: f64,
    /// Bytes of memory that are not on the destination yet, as far as is known: of the round that is under way, and after
    /// the resume of the container's whole memory.
    #[serde(default)]
    pub remaining_bytes: u64,
    /// Pages that the resumed container has asked for before they had arrived, so far.
    #[serde(default)]
    pub remote_faults: u64,
}

/// Pages that travelled in fewer bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Compressed {
    /// Bytes of the pages.
    pub page_bytes: u64,
    /// Bytes that they took on the wire.
    pub wire_bytes: u64,
}

/// What it cost the resumed container that pages were still on the source.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FaultReport {
    /// How many faults were answered by the source.
    pub count: u64,
    /// Half of them took no longer than this, in µs, from the fault to the page's being in place.
    pub p50_us: f64,
    /// 99 of 100 took no longer than this, in µs.
    pub p99_us: f64,
    /// The longest took so long, in µs.
    pub max_us: f64,
    /// All of them.
    #[serde(default)]
    pub histogram: Latencies,
}

impl From<Latencies> for FaultReport {
    fn from(histogram: Latencies) -> Self {
        let at = |q| histogram.quantile(q).unwrap_or_default();
        Self { count: histogram.count(), p50_us: at(0.5), p99_us: at(0.99), max_us: at(1.0), histogram }
    }
}

/// One round of pre-copy.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RoundReport {
    /// Bytes of pages that were sent.
    pub bytes: u64,
    /// How long that took, in ms.
    pub ms: f64,
    /// How fast the container wrote since the round before, in bytes a second; 0 in the first.
    pub dirty_rate: f64,
}

/// What kind of thing a move waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WaitKind {
    /// Pages that are still on the source.
    Pages,
    /// Pages that have come are being put in place.
    Placing,
    /// The destination's pager does not answer.
    Pager,
    /// The destination's pager and its keeper are gone before every page was in place. This does not pass by itself.
    PagerGone,
    /// A filesystem has no space.
    Disk,
    /// The last step on the destination fails, and is repeated.
    Cleanup,
    /// The destination does not answer, or a step of the source fails, and is repeated.
    Source,
    /// Something that this version does not know.
    #[serde(other)]
    Other,
}

/// What a move waits for, since when, and what an operator can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Waiting {
    /// The kind of it.
    pub kind: WaitKind,
    /// What is waited for, in words.
    pub what: String,
    /// Since when, in ms since the Unix epoch.
    pub since_unix_ms: u64,
    /// What to do, with the command to type where there is one; empty where waiting is all there is to do.
    #[serde(default)]
    pub remedy: String,
}

/// What there is of the original on the source after a move that was undone, as it was found then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Original {
    /// It runs, with the first process that it had.
    Running,
    /// It runs, but its first process is another one than at the beginning of the move: it was started anew.
    Restarted,
    /// It is paused.
    Paused,
    /// It has ended.
    Stopped,
    /// The engine does not know it any more.
    Gone,
    /// It could not be looked at.
    #[serde(other)]
    Unknown,
}

/// Everything that is known about one migration: what `status`, `history` and `move --json` show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Report {
    /// Its id.
    pub id: MigrationId,
    /// The container's name.
    pub container: String,
    /// Where from.
    pub source: NodeName,
    /// Where to.
    pub destination: NodeName,
    /// The group that it is a member of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupId>,
    /// The container of the same group whose migration moves the network namespace that both share; `None` where it moves its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_owner: Option<String>,
    /// How it was asked for.
    pub mode: Mode,
    /// How it was done, where that differs (`auto` chooses, and rounds that do not help are given up).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode_taken: Option<Mode>,
    /// Everything that was asked for.
    #[serde(default)]
    pub options: MoveOptions,
    /// Where it stands.
    pub phase: Phase,
    /// How it ended.
    pub outcome: Outcome,
    /// Start, in ms since the Unix epoch.
    pub started_unix_ms: u64,
    /// From the request to done or undone, in ms.
    pub total_ms: Option<f64>,
    /// From the first task frozen to the last task running, in ms: on the source's clock, the destination's part placed
    /// by half the round trip. `None` where nothing was frozen.
    pub blackout_ms: Option<f64>,
    /// By how much `blackout_ms` can be wrong, in ms: half the round trip between the agents.
    pub blackout_error_ms: Option<f64>,
    /// The steps in the order in which they began.
    pub parts: Vec<Part>,
    /// The rounds of pre-copy.
    #[serde(default)]
    pub rounds: Vec<RoundReport>,
    /// Pages that came from the source after the resume because the container asked for them, if any did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_faults: Option<FaultReport>,
    /// Its transparent huge pages, if it had any: in the destination's report, once it has been tried to make them anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<HugeReport>,
    /// Amounts.
    pub progress: Progress,
    /// Bytes of the skeleton's images.
    pub skeleton_bytes: u64,
    /// Bytes of pages of shared memory, of files and in reserved huge pages that were sent while the container was frozen.
    #[serde(default)]
    pub frozen_bytes: u64,
    /// Most memory that the migration held on the source besides the container, in bytes.
    pub source_extra_bytes: u64,
    /// The same on the destination, the page store included.
    pub destination_extra_bytes: u64,
    /// Which way was taken where there are several ("memory: page store", "memory: criu", …), in words.
    pub ways: Vec<String>,
    /// Blockers, where they were the reason.
    pub blockers: Vec<Blocker>,
    /// State that the user allowed the move to lose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub allowed: Vec<Blocker>,
    /// The one sentence for the user, where it failed.
    pub error: Option<String>,
    /// What it waits for, while it does so for longer than a moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// How the container ended on the destination, if it did before its last pages had followed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// What there is of the original, where the move was undone: looked at afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<Original>,
    /// CRIU's log on the source, where its dump failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub criu_log: Option<String>,
    /// What could not be tidied up, and what to do about it.
    pub leftovers: Vec<String>,
}

impl Report {
    /// The report of a migration that was just asked for.
    pub fn new(
        id: MigrationId,
        container: String,
        source: NodeName,
        destination: NodeName,
        mode: Mode,
        started_unix_ms: u64,
    ) -> Self {
        Self {
            id,
            container,
            source,
            destination,
            group: None,
            network_owner: None,
            mode,
            mode_taken: None,
            options: MoveOptions::in_mode(mode),
            phase: Phase::Plan,
            outcome: Outcome::Running,
            started_unix_ms,
            total_ms: None,
            blackout_ms: None,
            blackout_error_ms: None,
            parts: Vec::new(),
            rounds: Vec::new(),
            remote_faults: None,
            huge_pages: None,
            progress: Progress::default(),
            skeleton_bytes: 0,
            frozen_bytes: 0,
            source_extra_bytes: 0,
            destination_extra_bytes: 0,
            ways: Vec::new(),
            blockers: Vec::new(),
            allowed: Vec::new(),
            error: None,
            waiting: None,
            ended: None,
            original: None,
            criu_log: None,
            leftovers: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_later_version_waits_for_is_read_as_something_else() {
        let later = r#"{"kind": "the-moon", "what": "the moon", "since_unix_ms": 1}"#;
        let waiting: Waiting = serde_json::from_str(later).unwrap();
        assert_eq!((waiting.kind, waiting.remedy.as_str()), (WaitKind::Other, ""));
        assert_eq!(serde_json::to_string(&WaitKind::PagerGone).unwrap(), r#""pager-gone""#);
        assert_eq!(serde_json::from_str::<Original>(r#""elsewhere""#).unwrap(), Original::Unknown);
    }
}
