//! The one clock of a node.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC: the same for every process of this node, so that marks taken by an agent, a front and
/// a pager can be compared.
pub fn monotonic_ns() -> u64 {
    // CLOCK_MONOTONIC exists on every Linux; there is no error to handle.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}
