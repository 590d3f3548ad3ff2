use serde::{Deserialize, Serialize};

use crate::AddressSpaceId;

/// Transparent huge pages of one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Whose they are.
    pub space: AddressSpaceId,
    /// Runs of them: the number of the first one, which is its address in units of 2 MiB, and how many there are.
    pub runs: Vec<(u64, u64)>,
}

/// What became of the transparent huge pages that a container had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HugeReport {
    /// Huge pages that it had on the source.
    pub found: u64,
    /// Those that it has on the destination again.
    pub restored: u64,
}
