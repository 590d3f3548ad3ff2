//! Images of containers that travel with a move.

use serde::{Deserialize, Serialize};

/// A container image that the destination lacks and that is sent before the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageToSend {
    /// Its name on the source.
    pub name: String,
    /// Bytes of all its layers, unpacked: the most that is sent.
    pub bytes: u64,
    /// Number of its layers.
    pub layers: u64,
    /// Number of layers that the destination has and that are not sent.
    pub known_layers: u64,
}
