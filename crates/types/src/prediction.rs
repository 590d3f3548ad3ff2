use serde::{Deserialize, Serialize};

use crate::{Mode, RoundReport};

/// How a move would go, foretold from what was measured on the running container and on the link, without moving anything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prediction {
    /// The mode that would be taken: where `auto` was asked for, what it comes to.
    pub mode: Mode,
    /// Whether rounds bring what is left below the blackout budget; true without rounds.
    pub converges: bool,
    /// By how many percent the container would have to be slowed down for that, where it must be.
    #[serde(default)]
    pub throttle_percent: u8,
    /// The rounds of pre-copy.
    pub rounds: Vec<RoundReport>,
    /// Bytes of pages that would be sent while the container is frozen.
    pub freeze_bytes: u64,
    /// Bytes of pages that would follow after the resume.
    pub later_bytes: u64,
    /// Bytes of pages that would be sent in all.
    pub bytes: u64,
    /// How long no task would run anywhere, in ms.
    pub blackout_ms: f64,
    /// From the request to done, in ms.
    pub total_ms: f64,
    /// Memory that the destination needs, in bytes; when the move is done the container has it.
    pub destination_bytes: u64,
    /// Memory that the rounds would move, in bytes.
    pub memory_bytes: u64,
    /// How fast the container writes to new pages, in bytes a second, over the longest look.
    pub dirty_rate: f64,
    /// What it wrote to during the longest look, in bytes: an estimate of its working set.
    pub working_set_bytes: u64,
    /// Pages that the link, the encryption and both ends' memory carry, in bytes a second.
    pub link_rate: f64,
    /// Round trip to the destination's agent, in ms.
    pub round_trip_ms: f64,
    /// For how long the container's writes were watched, in ms.
    pub sampled_ms: f64,
}
