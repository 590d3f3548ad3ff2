//! The rule about semaphore operations that are undone when their process ends.

use super::Look;
use super::container::Container;
use crate::undo;

pub(super) fn check(container: &Container, look: &mut Look) {
    let pids: Vec<u32> = container.tasks.values().filter(|task| !task.zombie()).map(|task| task.pid).collect();
    let found = undo::processes(&pids).unwrap_or_else(|error| {
        look.block_unread(container.first(), &error);
        Vec::new()
    });
    for pid in found {
        // A program may hold a semaphore for a moment only.
        look.wait(pid.into(), undo::blocker(pid, &container.tasks[&pid].name()));
    }
}
