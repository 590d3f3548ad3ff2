use tokio::sync::watch;
use tranship_types::{Blocker, BlockerKind, GroupId, GroupReport, MigrationId, NodeName, Report};

use crate::{
    Begun, Companions, ContainerInfo, ErrorBody, GroupPlan, GroupRequest, HeldAddresses, KeptPath, Leftover,
    MoveRequest, NodeInfo, PassedAnswer, PassedCall, Plan, PlanRequest, RecoverRequest,
};

/// What the API asks of an agent. The calls may block (each runs on a thread of its own) and may come at the same time.
pub trait AgentService: Send + Sync + 'static {
    /// The node and its health.
    fn node(&self) -> Result<NodeInfo, ServiceError>;

    /// Names of the nodes that this one knows; they are not asked.
    fn peers(&self) -> Result<Vec<NodeName>, ServiceError>;

    /// Passes a call on to the agent of another node; `None` where the node is this one.
    fn pass_on(&self, node: &NodeName, call: PassedCall) -> Result<Option<PassedAnswer>, ServiceError>;

    /// The node's containers, by name.
    fn containers(&self) -> Result<Vec<ContainerInfo>, ServiceError>;

    /// Those of them that belong together where they leave for these nodes; of those that run.
    fn companions(&self, to: &[NodeName]) -> Result<Vec<Companions>, ServiceError>;

    /// Begins a move and returns at once, or, for a dry run, says what it would do. A dry run with blockers is a success
    /// whose plan lists them.
    fn begin_move(&self, request: MoveRequest) -> Result<Begun, ServiceError>;

    /// Says how a move would go, from what it measures for some seconds. Nothing is stopped or moved. Blockers are no error:
    /// the plan lists them.
    fn plan(&self, request: PlanRequest) -> Result<Plan, ServiceError>;

    /// Gives a migration up that waits for a lost destination after the commit point, and returns at once; refuses where it
    /// waits for nothing, or where the destination answers. The original runs when the report has ended.
    fn recover(&self, request: RecoverRequest) -> Result<Report, ServiceError>;

    /// Cancels a migration before its commit point, by its id or the name of its container, and returns at once; refuses after the
    /// commit point. The original runs when the report has ended.
    fn cancel(&self, named: &str) -> Result<Report, ServiceError>;

    /// Cancels the migrations of a group that are not past their commit points, and returns at once; refuses where all are.
    fn cancel_group(&self, id: &GroupId) -> Result<GroupReport, ServiceError>;

    /// What moves have left on this node that no move owns any more.
    fn leftovers(&self) -> Result<Vec<Leftover>, ServiceError>;

    /// Removes what moves have left; all that was found, with what could not be removed.
    fn remove_leftovers(&self) -> Result<Vec<Leftover>, ServiceError>;

    /// The addresses that this node holds for containers that have left it.
    fn held_addresses(&self) -> Result<Vec<HeldAddresses>, ServiceError>;

    /// Gives back what is held for a container. Refuses, unless told otherwise, where the node that has the container answers.
    fn release(&self, container: &str, even_if_alive: bool) -> Result<Vec<HeldAddresses>, ServiceError>;

    /// The bridge networks of this node that are held together with other nodes'.
    fn kept_paths(&self) -> Result<Vec<KeptPath>, ServiceError>;

    /// All migrations that this node knows, newest first.
    fn reports(&self) -> Result<Vec<Report>, ServiceError>;

    /// One migration.
    fn report(&self, id: &MigrationId) -> Result<Report, ServiceError>;

    /// One migration's reports as they change. The newest replaces one that nobody has read yet, so that a slow reader
    /// costs nothing. The sender sets the last report before it is dropped; for a migration that ended long ago, a channel
    /// that holds its report and has no sender any more is right.
    fn watch(&self, id: &MigrationId) -> Result<watch::Receiver<Report>, ServiceError>;

    /// Begins to move a group and returns at once; refuses, before anything is touched, what has no order, or names what
    /// there is not.
    fn begin_group(&self, request: GroupRequest) -> Result<GroupReport, ServiceError>;

    /// Says how each move of a group would go, one after the other. Nothing is stopped or moved. Blockers are no error: they
    /// are listed with the container that they are about.
    fn plan_group(&self, request: GroupRequest) -> Result<GroupPlan, ServiceError>;

    /// All groups that this node has moved, newest first.
    fn groups(&self) -> Result<Vec<GroupReport>, ServiceError>;

    /// One group.
    fn group(&self, id: &GroupId) -> Result<GroupReport, ServiceError>;

    /// One group's reports as they change; as [`AgentService::watch`].
    fn watch_group(&self, id: &GroupId) -> Result<watch::Receiver<GroupReport>, ServiceError>;
}

/// Why an agent refuses or fails; decides the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request makes no sense: 400.
    Invalid,
    /// The other node does not let this one control it: 403.
    Forbidden,
    /// No such migration or container: 404.
    NotFound,
    /// A move of the container is under way: 409.
    Busy,
    /// The migration has ended, or is past its commit point: 409.
    TooLate,
    /// Something about the container or the other node stands in the way: 422.
    Blocked,
    /// The agent of another node, to which a call was passed on, cannot be reached: 504.
    Unreachable,
    /// This node cannot move anything as it stands: 503.
    Unusable,
    /// What should not happen: 500.
    Internal,
}

/// A refusal or failure of an [`AgentService`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{body}")]
pub struct ServiceError {
    /// Its kind.
    pub kind: ErrorKind,
    /// What the user is told.
    pub body: ErrorBody,
}

impl ServiceError {
    /// An error without blockers.
    pub fn new(kind: ErrorKind, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        let body = ErrorBody { message: message.into(), remedy: remedy.into(), blockers: Vec::new() };
        Self { kind, body }
    }

    /// The error for an id that this node does not know.
    pub fn no_such_migration(id: &MigrationId) -> Self {
        Self::new(
            ErrorKind::NotFound,
            format!("this node knows no migration {id}"),
            "see `tranship history` for those that it knows",
        )
    }

    /// The error for an id of a group that this node does not know.
    pub fn no_such_group(id: &GroupId) -> Self {
        let remedy = "only the node that the group has left knows it; see `tranship status` there";
        Self::new(ErrorKind::NotFound, format!("this node knows no group {id}"), remedy)
    }

    /// The refusal of a move because of `blockers`, of which there must be at least one; the first decides the kind.
    pub fn blocked(container: &str, blockers: Vec<Blocker>) -> Self {
        let kind = match blockers.first().map(|b| b.kind) {
            Some(BlockerKind::NoSuchContainer) => ErrorKind::NotFound,
            Some(BlockerKind::Busy) => ErrorKind::Busy,
            _ => ErrorKind::Blocked,
        };
        let (message, remedy) = match blockers.as_slice() {
            [one] => (one.cause.clone(), one.remedy.clone()),
            many => (format!("{container} cannot be moved: {} things stand in the way", many.len()), String::new()),
        };
        Self { kind, body: ErrorBody { message, remedy, blockers } }
    }
}
