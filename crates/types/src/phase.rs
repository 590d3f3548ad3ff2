use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a migration stands; the phases of the design in their order, then the ways it can end.
///
/// ```text
/// plan → prepare → precopy → freeze → transfer → ready → COMMIT → resume → drain → release → done
///   └───────┴─────────┴─────────┴────────┴─────────┘                 └───────┘ an operator's word that the destination is lost
///                      any failure: undo → undone (the source runs) ◀────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Looking for blockers; nothing has been touched on either node.
    Plan,
    /// The destination makes everything that can be made before the freeze.
    Prepare,
    /// Memory travels in rounds while the container runs.
    Precopy,
    /// The container's tasks are being stopped. The blackout begins.
    Freeze,
    /// Skeleton and memory travel; the destination restores, stopped.
    Transfer,
    /// The destination holds a complete, stopped copy.
    Ready,
    /// The decision is in the source's journal: from here on there is only forward.
    Commit,
    /// The destination's copy is being let go. The blackout ends.
    Resume,
    /// The container runs on the destination; pages that were not there at the resume follow. The source keeps the frozen
    /// original until the last one has arrived.
    Drain,
    /// The source removes the original.
    Release,
    /// The container runs on the destination and is gone from the source.
    Done,
    /// A failure before the commit point, or a migration that was given up after it, is being undone.
    Undo,
    /// The container runs on the source as if nothing had happened; if the migration was given up, as it was at the freeze.
    Undone,
    /// The agent found its journal damaged or gone at its start, and does not know yet what was decided; `Report::error` says what it
    /// waits for.
    Damaged,
    /// A phase that this version does not know.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Plan => "plan",
            Phase::Prepare => "prepare",
            Phase::Precopy => "precopy",
            Phase::Freeze => "freeze",
            Phase::Transfer => "transfer",
            Phase::Ready => "ready",
            Phase::Commit => "commit",
            Phase::Resume => "resume",
            Phase::Drain => "drain",
            Phase::Release => "release",
            Phase::Done => "done",
            Phase::Undo => "undo",
            Phase::Undone => "undone",
            Phase::Damaged => "damaged",
            Phase::Unknown => "unknown",
        })
    }
}

/// How a migration ended, or that it has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Still under way, or waiting for a node that is out of reach.
    Running,
    /// The container runs on the destination.
    Moved,
    /// The container runs on the source; `Report::error` says why.
    Failed,
    /// After the commit point an operator said that the destination is lost: the container runs on the source as it was at the
    /// freeze; `Report::error` says what that costs.
    #[serde(rename = "given-up")]
    GivenUp,
    /// The container was moved, and ended on the destination before its last pages had followed it: it runs nowhere. `Report::ended`
    /// says how.
    Ended,
    /// It was cancelled before the commit point: the container runs on the source.
    Cancelled,
}
