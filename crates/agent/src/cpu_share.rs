//! What a container may have of the CPUs, lifted while CRIU works in its cgroup.
//!
//! CRIU's parasite, and all that a restore does, runs in the container's own tasks and cgroup: where that has a small limit,
//! or little weight beside others on a busy node, the blackout lasts ten times as long. What the container had is noted
//! first, so that it gets it back whatever happens.

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_engine::{Cpu, Share};

use crate::layout::Layout;
use crate::node::failed;
use crate::registry::write_whole;

/// The note of what is given back.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    cpu: Cpu,
    share: Share,
}

/// Lifts it. Where that fails the container has what it had.
///
/// # Errors
/// What it has cannot be read, noted or changed.
pub fn lift(layout: &Layout, cpu: &Cpu) -> Result<(), Failure> {
    let path = layout.cpu_share();
    let noted = std::fs::read(&path).ok().and_then(|note| serde_json::from_slice::<Note>(&note).ok());
    if noted.is_some_and(|noted| noted.cpu == *cpu) {
        if cpu.is_lifted().map_err(failed)? {
            // By an earlier agent.
            return Ok(());
        }
        // In part: what is lifted must not be noted as what it had.
        give_back(layout)?;
    }
    let note = Note { cpu: cpu.clone(), share: cpu.share().map_err(failed)? };
    write_whole(&path, &serde_json::to_vec(&note).map_err(failed)?).map_err(failed)?;
    cpu.lift().map_err(failed).or_else(|failure| give_back(layout).and(Err(failure)))
}

/// Whether somebody has changed what the container may have since it was lifted, if it was.
pub fn was_changed(layout: &Layout, cpu: &Cpu) -> bool {
    layout.cpu_share().exists() && !cpu.is_lifted().unwrap_or(true)
}

/// Gives back what was lifted, if anything was. One whose cgroup is gone needs nothing.
///
/// # Errors
/// It cannot be given back; the note stays.
pub fn give_back(layout: &Layout) -> Result<(), Failure> {
    let Ok(note) = std::fs::read(layout.cpu_share()) else { return Ok(()) };
    let Note { cpu, share } = serde_json::from_slice(&note).map_err(failed)?;
    cpu.give_back(&share).map_err(failed)?;
    std::fs::remove_file(layout.cpu_share()).map_err(failed)
}
