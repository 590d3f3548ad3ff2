use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{GroupId, MigrationId, NodeName, Outcome, Phase};

/// How the moves of a group's containers follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum GroupOrder {
    /// In the order of what they depend on, with the stages of different moves overlapping where they do not slow each
    /// other down.
    #[default]
    Pipelined,
    /// In that order, each when the one before has ended.
    Sequential,
    /// All at the same time, in no order.
    AllAtOnce,
    /// All or none: all are frozen until a copy of each is complete, and then resumed in that order.
    Atomic,
}

impl fmt::Display for GroupOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GroupOrder::Pipelined => "pipelined",
            GroupOrder::Sequential => "sequential",
            GroupOrder::AllAtOnce => "all-at-once",
            GroupOrder::Atomic => "atomic",
        })
    }
}

/// What became of one container of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MemberOutcome {
    /// Its move has not begun.
    Waiting,
    /// Its move is under way.
    Running,
    /// It runs on the destination.
    Moved,
    /// It runs on the source: its move failed.
    Failed,
    /// It runs on the source: its move was given up after the commit point.
    GivenUp,
    /// It was moved, and ended on the destination before its last pages had followed it: it runs nowhere.
    Ended,
    /// It runs on the source: its move, or that of the group, was cancelled.
    Cancelled,
    /// It runs on the source: one without which it does not move has not moved, or the agent was restarted before its turn.
    Skipped,
}

impl From<Outcome> for MemberOutcome {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Running => Self::Running,
            Outcome::Moved => Self::Moved,
            Outcome::Failed => Self::Failed,
            Outcome::GivenUp => Self::GivenUp,
            Outcome::Ended => Self::Ended,
            Outcome::Cancelled => Self::Cancelled,
        }
    }
}

impl fmt::Display for MemberOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MemberOutcome::Waiting => "waiting",
            MemberOutcome::Running => "running",
            MemberOutcome::Moved => "moved",
            MemberOutcome::Failed => "failed",
            MemberOutcome::GivenUp => "given up",
            MemberOutcome::Ended => "ended",
            MemberOutcome::Cancelled => "cancelled",
            MemberOutcome::Skipped => "skipped",
        })
    }
}

/// A stretch of time that a container's move has spent in a phase; between two of them it waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Span {
    /// The phase.
    pub phase: Phase,
    /// When it began, in ms from the group's start.
    pub start_ms: f64,
    /// How long it took, in ms; absent while it lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
}

/// One container of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupMember {
    /// The container's name.
    pub container: String,
    /// Where to.
    pub destination: NodeName,
    /// The containers that move before it.
    pub after: Vec<String>,
    /// 0 where it waits for none, else one more than the highest of those.
    pub level: usize,
    /// Its migration, once that has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationId>,
    /// What became of it.
    pub outcome: MemberOutcome,
    /// Why it has not moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its blackout, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blackout_ms: Option<f64>,
    /// Bytes that its move has written to the wire.
    #[serde(default)]
    pub wire_bytes: u64,
    /// What its time was spent on, in order.
    pub spans: Vec<Span>,
}

impl GroupMember {
    /// From the begin of its first phase to the end of its last one, in ms; `None` before it has ended.
    pub fn total_ms(&self) -> Option<f64> {
        let (first, last) = (self.spans.first()?, self.spans.last()?);
        Some(last.start_ms + last.ms? - first.start_ms)
    }
}

/// Everything that is known about the move of a group: what `move-group` and `status` show. Of each container there is a
/// [`crate::Report`], too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupReport {
    /// Its id.
    pub id: GroupId,
    /// Where from.
    pub source: NodeName,
    /// In which order.
    pub order: GroupOrder,
    /// Once all have ended: `moved` if all have moved, else `cancelled` if one was cancelled, else `failed`.
    pub outcome: Outcome,
    /// Start, in ms since the Unix epoch.
    pub started_unix_ms: u64,
    /// From the request until the last move had ended, in ms.
    pub total_ms: Option<f64>,
    /// The containers, each after those that it depends on.
    pub members: Vec<GroupMember>,
    /// The agent was restarted before all had ended: those under way were finished or undone, the others did not begin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
}
