//! What agents say to each other on a control link: requests of the source, answers of the destination.
//!
//! ```text
//!   Offer ──▶ Prepared │ Failed          (Check: the same without preparing)
//!   Clock ──▶ Clock                      several times, to compare the nodes' clocks
//!   Shared                               describes shared memory whose pages are to come; has no answer
//!   HugePages                            where there are huge pages, to be made anew; has no answer; from version 3 on
//!   ── files of the skeleton, then ──
//!   Ready? ─▶ Ready │ Failed             the pages come on links of their own meanwhile
//!   Commit ─▶ Running │ Failed           repeated over new links until it is answered
//!   Held                                 sent before READY is awaited, behind Commit without waiting, and again after Running; has no answer
//!   Abort ──▶ Aborted                    likewise
//!   Drained? ▶ Draining │ Drained │ Failed
//!   FreezeSlot ▶ FreezeSlot              before the freeze, repeated until the slot is taken; not known to older peers
//!   Holding? ▶ Holding                   before an operator gives a migration up that was committed
//!   Void ────▶ Voided                    after that; repeated like Commit
//!   Streams ▶ Streams │ Failed           why a stream was given up; from version 2 on
//!   Known? ──▶ Known                     by an agent whose journal is damaged, also of a destination; from version 8 on
//!   Stdio ──▶ Stdio │ Failed             then frames of standard streams; belongs to no migration; from version 11 on
//!   Addresses ▶ Addresses │ Failed       by a node that holds addresses; belongs to no migration; from version 14 on
//!   Path ────▶ Path │ Failed             by a node that keeps a path; belongs to no migration; from version 16 on
//!   Probe ──▶ Probed │ Failed            to measure the link; belongs to no migration
//!   Api ────▶ Api … Api │ Failed         a call of a user of the peer; belongs to no migration; from version 10 on
//! ```

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranship_types::{
    AddressState, Allowances, Blocker, CarriedTree, GroupId, HugePages, ImageToSend, Latencies, Mode, NetworkIdentity,
    OfferedPath, Part, PathEnd, Report, ReservedAddress, RoundReport, SharedObject, Side, StdioStream, StdioTarget,
    Waiting,
};

/// What a source offers: everything that the destination must know before the freeze.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The container's name.
    pub container: String,
    /// The engine it runs in.
    pub engine: String,
    /// How it shall move.
    pub mode: Mode,
    /// Its OCI configuration, root path absolute.
    pub config: serde_json::Value,
    /// What its engine needs besides to make it again, as that engine wrote it.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub parameters: serde_json::Value,
    /// What the first process's stdin, stdout and stderr are, where its engine connects them anew: `pipe:[INODE]` or a path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stdio: Vec<String>,
    /// Path of its network namespace and what is in it; `None` if it has none of its own name.
    pub network: Option<(PathBuf, NetworkIdentity)>,
    /// Path of the network namespace that it shares with a container which comes in the same group and brings that namespace; `network` is `None` then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_network: Option<PathBuf>,
    /// The container that brings that namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_owner: Option<String>,
    /// Whether other containers of the same group share its network namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub network_shared: bool,
    /// Whether `/dev/shm` and the IPC namespace are those of its pod, which the container that brings the network brings, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_memory: bool,
    /// Bytes of memory that it has now.
    pub memory_bytes: u64,
    /// Those of them that several processes may share; they are not kept in the page store.
    pub shared_bytes: u64,
    /// Reserved huge pages (hugetlb) that it needs: size in bytes, and number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub huge_pages: Vec<(u64, u64)>,
    /// Digest of its root filesystem, as its storage wrote it.
    pub rootfs: serde_json::Value,
    /// The source's CPU features, as found there.
    pub cpu: serde_json::Value,
    /// Bind mounts: paths that must exist on the destination too.
    pub binds: Vec<PathBuf>,
    /// Its tmpfs mounts whose content comes on a link of its own, as the source's storage describes them.
    #[serde(default)]
    pub tmpfs: serde_json::Value,
    /// Its directory trees on disk whose content comes on a link of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trees: Vec<CarriedTree>,
    /// How many links will bring pages.
    pub streams: u8,
    /// Version of the source's criu.
    pub criu: String,
    /// Options that its sockets have set, and that a destination which speaks a version before [`crate::Versions::OPTIONS`] cannot set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub socket_options: Vec<String>,
    /// Whether files of its Unix sockets have other names than those that the sockets were bound to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renamed_sockets: bool,
    /// Whether the source will say which packets are the last ones that it forwards ([`Request::Held`]).
    #[serde(default)]
    pub tells_last_datagrams: bool,
    /// State that the user allowed the move to lose.
    #[serde(default, skip_serializing_if = "Allowances::is_empty")]
    pub allow: Allowances,
    /// Files, pipes and the like of the source's node that the standard streams lead to. From version [`crate::Versions::STDIO`] on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub streams_of_node: Vec<StdioStream>,
    /// Where these go.
    #[serde(default, skip_serializing_if = "StdioTarget::is_keep")]
    pub stdio_target: StdioTarget,
    /// Its log, which comes on a link of its own where [`Response::Prepared`] takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<CarriedLog>,
    /// The AppArmor profiles that confine its processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<String>,
    /// The networks whose path between the two nodes is kept. From version [`crate::Versions::PATHS`] on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<OfferedPath>,
}

/// The log of a container that moves with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedLog {
    /// The engine's name of the log driver, whose format the files have.
    pub driver: String,
    /// Bytes of the files when they were looked at.
    pub bytes: u64,
}

impl Offer {
    /// Path of the network namespace that it lives in, whoever brings that; `None` if it has none of its own name.
    pub fn network_path(&self) -> Option<&PathBuf> {
        self.network.as_ref().map(|(path, _)| path).or(self.joined_network.as_ref())
    }
}

/// What a source asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    /// Could this container come?
    Check(Box<Offer>),
    /// This container comes: prepare.
    Offer(Box<Offer>),
    /// What time is it with you?
    Clock,
    /// Shared memory as it is now; its pages come on the links for pages and may overtake this. Whatever was described
    /// before and is not described again stays as it was. No answer.
    Shared {
        /// What is new or has another size.
        objects: Vec<SharedObject>,
    },
    /// So the container's memory lies in transparent huge pages, for the destination to make such ones anew when it has drained. No
    /// answer. From version [`crate::Versions::SAME`] on.
    HugePages {
        /// Of one task; there may be several messages for one.
        pages: HugePages,
    },
    /// Files of the skeleton follow.
    Skeleton {
        /// How many.
        files: u32,
        /// The dump goes on, and other files will follow in further messages; else these are the last ones.
        #[serde(default)]
        early: bool,
        /// It counts on the content of tmpfs mounts that comes on its own link.
        #[serde(default)]
        tmpfs: bool,
    },
    /// The skeleton is sent, and memory has been sent or named. Say when you hold a stopped copy.
    Ready {
        /// Not before every page has come. Else those that were named may follow the resume.
        all_pages: bool,
    },
    /// The decision is that the container runs with you.
    Commit,
    /// Packets that reached the container while it was stopped, or that it had not read before, as the source's network wrote them: deliver them as soon
    /// as the gate is open. No answer.
    Held {
        /// The frames, in their order.
        frames: serde_json::Value,
        /// No packets will follow but datagrams to groups: those that come to the destination by themselves are behind these.
        #[serde(default)]
        last_datagrams: bool,
        /// No datagrams to groups will follow: those that come to the destination by itself are the container's from now on.
        #[serde(default)]
        last_to_groups: bool,
    },
    /// The decision is that it does not.
    Abort,
    /// Is every page in place? The answer may take a second.
    Drained {
        /// The original is no more: with the answer that every page is, the destination may forget the migration.
        released: bool,
        /// What the source has measured; with `released`. Older peers leave it out, and ignore it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        account: Option<Box<Account>>,
    },
    /// Asks for the destination's freeze slot, so that containers that arrive there are not frozen at the same time.
    /// The answer comes when the slot is taken, or after up to 3 s. Only where [`Response::Prepared`] offers slots.
    FreezeSlot {
        /// The group that it is frozen together with.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<GroupId>,
    },
    /// What do you hold of the container?
    Holding,
    /// The migration was given up after the decision, the original runs again: remove the copy, even if it runs.
    Void,
    /// Has a stream of pages failed with you, and why? The answer comes when there is memory for all pages that are to come, or after half a minute. From version
    /// [`crate::Versions::PACKED`] on.
    Streams,
    /// What do you know of the migration? The asker's journal is damaged. From version [`crate::Versions::KNOWN`] on.
    Known {
        /// Which side of it the node that is asked has.
        of: Side,
        /// The container.
        container: String,
    },
    /// A call of the agent's API, from a user of the peer. The answer is one [`Response::Api`] or more, or [`Response::Failed`].
    /// From version [`crate::Versions::API`] on.
    Api {
        /// The method of HTTP.
        method: String,
        /// The path, with its query.
        path: String,
        /// The body, JSON or empty.
        body: String,
    },
    /// Connect this link with the process that holds the other ends of a moved container's standard streams. The answer is
    /// [`Response::Stdio`]; frames of that process follow in one direction. From version [`crate::Versions::STDIO`] on.
    Stdio {
        /// The migration that brought the container.
        relay: String,
        /// What the two links of a connection have in common.
        session: u64,
        /// Whether the dialler sends on this link; else it receives.
        sends: bool,
    },
    /// Does a container have these addresses still, which moved to you or through you? From version [`crate::Versions::ADDRESSES`] on.
    Addresses {
        /// The container.
        container: String,
        /// The engine that it ran in at the asker, or went to from there.
        engine: String,
        /// What the asker's IPAM had given it.
        addresses: Vec<ReservedAddress>,
    },
    /// How does the path with this number stand with you? From version [`crate::Versions::PATHS`] on.
    Path {
        /// The number of its VXLAN.
        id: u32,
    },
    /// So many bytes of noise follow, in frames of pages: say when they are in memory. They belong to nothing.
    Probe {
        /// How many.
        bytes: u64,
    },
}

/// What the source has measured of a migration, for the report that the destination keeps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// How it was done, where that differs from how it was asked for.
    pub mode_taken: Option<Mode>,
    /// From the first task frozen to the last task running, in ms.
    pub blackout_ms: Option<f64>,
    /// By how much that can be wrong, in ms.
    pub blackout_error_ms: Option<f64>,
    /// The steps on both nodes, on the source's clock.
    pub parts: Vec<Part>,
    /// The rounds of pre-copy.
    pub rounds: Vec<RoundReport>,
}

impl Account {
    /// That of a report.
    pub fn of(report: &Report) -> Self {
        Self {
            mode_taken: report.mode_taken,
            blackout_ms: report.blackout_ms,
            blackout_error_ms: report.blackout_error_ms,
            parts: report.parts.clone(),
            rounds: report.rounds.clone(),
        }
    }

    /// Puts it into a report.
    pub fn put(self, report: &mut Report) {
        report.mode_taken = self.mode_taken;
        (report.blackout_ms, report.blackout_error_ms) = (self.blackout_ms, self.blackout_error_ms);
        (report.parts, report.rounds) = (self.parts, self.rounds);
    }
}

/// What a destination has of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holding {
    /// It knows nothing of the migration.
    Nothing,
    /// A copy that is being made, or held, and does not run.
    Stopped,
    /// The container runs there.
    Running,
    /// The copy that it had was lost with its host's memory.
    Lost,
}

/// What a node knows of a migration, for the other one, which does not know any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Known {
    /// It has no record of it, nor of a container of that name that could have come from it.
    Nothing,
    /// Source: it goes on, and nothing is decided.
    Undecided,
    /// Source: the decision is to commit.
    Committed,
    /// Source: it was undone, or given up.
    TakenBack,
    /// Destination: no copy of it was ever ready, or it was undone.
    NeverReady,
    /// Destination: its journal is damaged too, but the copy does not run.
    Stopped,
    /// Destination: it holds a complete, stopped copy.
    Ready,
    /// Destination: the container runs, or ran, there.
    Running,
    /// Destination: the copy that it had was lost with its host's memory.
    Lost,
    /// It does not know either, or answers what this version does not know.
    #[serde(other)]
    Unknown,
}

/// What a destination answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "response")]
pub enum Response {
    /// What stands in the way; nothing, if it is empty.
    Checked {
        /// The blockers.
        blockers: Vec<Blocker>,
        /// What there is to say besides.
        #[serde(default)]
        notes: Vec<String>,
        /// The image that the destination lacks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<ImageToSend>,
    },
    /// Prepared, and waiting.
    Prepared {
        /// Whether shared memory may come as [`Request::Shared`]; otherwise it must be in the skeleton.
        shared: bool,
        /// Whether datagrams that come before READY are kept until the container runs.
        #[serde(default)]
        keeps_datagrams: bool,
        /// Whether containers can come that share a network namespace ([`Offer::joined_network`]).
        #[serde(default)]
        shares_networks: bool,
        /// Whether containers can come that share `/dev/shm` and an IPC namespace with what is in them ([`Offer::shares_memory`]).
        #[serde(default)]
        shares_memory: bool,
        /// Whether it gives freeze slots ([`Request::FreezeSlot`]).
        #[serde(default)]
        gives_slots: bool,
        /// Whether the container's log may come ([`Offer::log`]).
        #[serde(default)]
        keeps_log: bool,
    },
    /// Whether the freeze slot is taken for this migration.
    FreezeSlot {
        /// If not, it keeps its place in the queue, and is to ask again.
        taken: bool,
    },
    /// The destination's CLOCK_MONOTONIC in ns.
    Clock {
        /// Now.
        now_ns: u64,
    },
    /// A complete, stopped copy is held. Times are on the destination's clock, in ms of it.
    Ready {
        /// What was done meanwhile.
        parts: Vec<Part>,
    },
    /// The container runs.
    Running {
        /// When its last task was let go, on the destination's CLOCK_MONOTONIC, ns.
        resumed_ns: u64,
        /// What was done meanwhile.
        parts: Vec<Part>,
    },
    /// Nothing is left of it here.
    Aborted {
        /// What could not be tidied up.
        leftovers: Vec<String>,
    },
    /// What there is of the container.
    Holding {
        /// What.
        holding: Holding,
    },
    /// A part of the answer of the API.
    Api {
        /// The status of HTTP, the same in all parts.
        status: u16,
        /// A part of the body.
        part: String,
        /// No part follows.
        last: bool,
    },
    /// What is known of the migration.
    Known {
        /// What.
        known: Known,
    },
    /// Nothing is left of it here, of a void copy.
    Voided {
        /// It had run here up to now.
        ran: bool,
        /// What could not be tidied up.
        leftovers: Vec<String>,
    },
    /// The container runs, but not every page is in place.
    Draining {
        /// Bytes that have not come.
        remote_bytes: u64,
        /// Bytes that have come and are not in place.
        pending_bytes: u64,
        /// Faults that wait for pages from the source.
        waiting: u64,
        /// How long threads waited for pages from the source so far.
        remote_faults: Latencies,
        /// What is waited for. Older peers leave it out.
        #[serde(default)]
        waiting_for: Option<Waiting>,
    },
    /// Every page is in place.
    Drained {
        /// Faults that were answered.
        faults: u64,
        /// How long threads waited for pages from the source.
        remote_faults: Latencies,
        /// Most memory that the destination held besides the container, in bytes.
        peak_bytes: u64,
        /// What the source's user has to know of how it went there.
        #[serde(default)]
        remarks: Vec<String>,
        /// How the container ended there, if it did before every page had come. Older peers leave it out, and ignore it.
        #[serde(default)]
        ended: Option<String>,
    },
    /// No stream of pages has failed; one that has is answered by [`Response::Failed`].
    Streams,
    /// The link is connected with the container's standard streams.
    Stdio,
    /// Whether the container has its addresses still.
    Addresses {
        /// Whether.
        state: AddressState,
    },
    /// How the path stands.
    Path {
        /// Whether there is a record of it.
        kept: bool,
        /// Whether somebody is on the network's bridge, or was and is only stopped.
        occupied: bool,
        /// The containers on the bridge, and those that moved and are there, also where they do not run.
        ends: Vec<PathEnd>,
    },
    /// The noise was received, and forgotten.
    Probed,
    /// It could not be done.
    Failed {
        /// Why, in a sentence.
        message: String,
        /// What stood in the way.
        blockers: Vec<Blocker>,
        /// What is waited for, where it is that. Older peers leave it out, and ignore it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waiting: Option<Waiting>,
    },
}
