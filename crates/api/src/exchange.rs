use serde::{Deserialize, Serialize};
use tranship_types::{Blocker, CarriedTree, ImageToSend, MigrationId, Mode, MoveOptions, NodeName, Prediction, Report};
use utoipa::ToSchema;

use crate::LocalNetwork;

/// Something that does not work, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What is wrong, without a full stop.
    pub cause: String,
    /// What the user can do, as an imperative without a full stop.
    pub remedy: String,
}

/// Which copy of a container goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// The one on the node that is asked.
    Here,
    /// The one on the other node.
    There,
}

/// The operator's word that the destination of a migration is lost for good, or which copy goes on where a journal is damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecoverRequest {
    /// The migration's id, or the container's name.
    pub migration: String,
    /// The operator knows that the destination's host is down, or was restarted since. Without that, a container that was
    /// heard to run there is not made to run here, too.
    #[serde(default)]
    pub host_is_down: bool,
    /// Which copy goes on, where the journal is damaged; absent, if the destination is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
}

/// A program that the node needs: criu, or an engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolInfo {
    /// What it is called, e.g. `runc`.
    pub name: String,
    /// The file that would be executed, where one was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Its version as it states it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why it cannot be used; absent where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

impl ToolInfo {
    /// Whether moves can rely on it.
    pub fn usable(&self) -> bool {
        self.problem.is_none()
    }
}

/// What is known of a peer's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PeerState {
    /// It answered, and both sides accept each other's certificate.
    Up,
    /// It did not answer or was refused; `problem` says why.
    Down,
    /// Nobody has asked it yet, or it is in a state that this version does not know.
    #[serde(other)]
    Unknown,
}

/// Another node that containers can be moved to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerInfo {
    /// Its name.
    pub name: NodeName,
    /// Where its agent listens, `host:port`.
    pub address: String,
    /// Whether it can be talked to.
    pub state: PeerState,
    /// Why it cannot be talked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// The node that the agent runs on, and whether it can take part in moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeInfo {
    /// Its name, as in its certificate.
    pub name: NodeName,
    /// The agent's version.
    pub version: String,
    /// Where the agent listens for other agents, `host:port`.
    pub listen: String,
    /// The criu that would be used.
    pub criu: ToolInfo,
    /// The engines on this node.
    pub engines: Vec<ToolInfo>,
    /// The nodes that it knows.
    pub peers: Vec<PeerInfo>,
}

/// What a container does, in the engine's eyes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ContainerState {
    /// Made but never started.
    Created,
    /// Running.
    Running,
    /// Frozen by its engine.
    Paused,
    /// Ended.
    Stopped,
    /// The engine says something else.
    #[serde(other)]
    Unknown,
}

/// A container of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContainerInfo {
    /// Its name, unique on the node.
    pub name: String,
    /// The engine that it belongs to, e.g. `runc`.
    pub engine: String,
    /// What it does.
    pub state: ContainerState,
    /// Pid of its first process as the node sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Resident memory of all its tasks in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// When it was made, in ms since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_unix_ms: Option<u64>,
    /// The migration that it takes part in at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationId>,
}

/// The wish to move a container. Fields that nobody knows are refused: a misspelt `dry_run` must not move anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// The container's name on this node.
    pub container: String,
    /// The node to move it to.
    pub to: NodeName,
    /// Only look: answer with a plan and touch nothing.
    #[serde(default)]
    #[schema(required = false)]
    pub dry_run: bool,
    /// How.
    #[serde(flatten)]
    pub options: MoveOptions,
}

impl MoveRequest {
    /// The wish to move `container` to `to` with everything else left to the agent.
    pub fn new(container: impl Into<String>, to: NodeName) -> Self {
        Self { container: container.into(), to, dry_run: false, options: MoveOptions::default() }
    }
}

/// The wish to know how a move would go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// The container's name on this node.
    pub container: String,
    /// The node to move it to.
    pub to: NodeName,
    /// For how long to watch what the container writes, in ms, 100 to 60,000; it runs all the time.
    #[serde(default = "PlanRequest::default_sample_ms")]
    #[schema(required = false)]
    pub sample_ms: u32,
    /// How it would be moved.
    #[serde(flatten)]
    pub options: MoveOptions,
}

impl PlanRequest {
    /// How long a container may be watched, in ms.
    pub const SAMPLE_MS: std::ops::RangeInclusive<u32> = 100..=60_000;

    /// The wish to know how `container` would move to `to`, with everything else left to the agent.
    pub fn new(container: impl Into<String>, to: NodeName) -> Self {
        let options = MoveOptions::default();
        Self { container: container.into(), to, sample_ms: Self::default_sample_ms(), options }
    }

    fn default_sample_ms() -> u32 {
        3000
    }
}

/// What a move would do, found out without touching anything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The container.
    pub container: String,
    /// Where from.
    pub from: NodeName,
    /// Where to.
    pub to: NodeName,
    /// How.
    pub mode: Mode,
    /// Memory that would move, in bytes.
    pub memory_bytes: u64,
    /// Tasks (threads) that would move.
    pub tasks: u64,
    /// Content of tmpfs mounts that would move, in bytes.
    pub tmpfs_bytes: u64,
    /// Files that would move: writable layer, volumes and, with `with_binds`, directories of the node; bytes of disk each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub trees: Vec<CarriedTree>,
    /// The container's log that would move, in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    pub log_bytes: u64,
    /// The image that the destination lacks and that would be sent before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageToSend>,
    /// How long no task would run anywhere, in ms, where that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimated_blackout_ms: Option<f64>,
    /// How long all of it would take, in ms, where that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimated_total_ms: Option<f64>,
    /// The whole prediction, where it was asked for and nothing stands in the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Box<Prediction>>,
    /// What stands in the way; empty where the move would be tried.
    pub blockers: Vec<Blocker>,
    /// State that the move would lose, as the user allowed it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub allowed: Vec<Blocker>,
    /// The networks that end at this node and on which the move would part the container from others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub local_networks: Vec<LocalNetwork>,
    /// How many of the container's connections have addresses that this node translates (published ports,
    /// masquerading), and end with the move.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    pub translated_connections: u64,
    /// What else the user should know, one sentence each.
    pub notes: Vec<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's interface
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What a [`MoveRequest`] leads to.
#[derive(Debug, Clone, PartialEq)]
pub enum Begun {
    /// The migration is under way; its first report.
    Started(Box<Report>),
    /// It was a dry run.
    Planned(Box<Plan>),
}

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// The error.
    pub error: ErrorBody,
}

/// What went wrong, for people; `blockers` for programs too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What failed, on what, and why, without a full stop.
    pub message: String,
    /// What the user can do, as an imperative without a full stop; empty where nothing helps.
    #[serde(default)]
    pub remedy: String,
    /// What stands in the way, where that is the reason.
    #[serde(default)]
    pub blockers: Vec<Blocker>,
}

impl std::fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tranship_types::{Bandwidth, Mode};

    use super::*;

    #[test]
    fn a_wish_is_one_flat_object_and_what_nobody_knows_is_refused() {
        let text = r#"{"container": "redis", "to": "b", "mode": "precopy", "max_rounds": 3, "bandwidth": 500000000}"#;
        let request: MoveRequest = serde_json::from_str(text).unwrap();
        let options = MoveOptions {
            max_rounds: Some(3),
            bandwidth: Some(Bandwidth(500_000_000)),
            ..MoveOptions::in_mode(Mode::Precopy)
        };
        assert_eq!(request, MoveRequest { options, ..MoveRequest::new("redis", "b".parse().unwrap()) });
        let there_and_back = serde_json::from_str(&serde_json::to_string(&request).unwrap());
        assert_eq!(request, there_and_back.unwrap());
        for misspelt in [r#""dryrun": true"#, r#""max-rounds": 3"#] {
            let text = format!(r#"{{"container": "redis", "to": "b", {misspelt}}}"#);
            assert!(serde_json::from_str::<MoveRequest>(&text).is_err(), "{misspelt}");
        }
    }
}
