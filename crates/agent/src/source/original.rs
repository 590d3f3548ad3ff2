//! The original after the decision: it is frozen, and it never runs again unless the migration is given up.
//!
//! The freezer is not enough for that: whoever may write to the cgroup, or ask the engine to resume the container, thaws it. So
//! each process has a SIGSTOP waiting for it as well, and stops before it has run a single instruction.

use tranship_coordinator::Failure;
use tranship_engine::{Container, Freezer};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::restart_blocks;

use super::{FREEZE, SourceRun, failed};
use crate::layout::Layout;
use crate::registry::write_whole;

impl SourceRun {
    /// Notes where the container is frozen, for an agent that finds it half frozen and can ask no engine then.
    pub(super) fn note_freezer(&self, freezer: &Freezer) -> Result<(), Failure> {
        let note = serde_json::to_vec(freezer).map_err(failed)?;
        std::fs::write(self.layout.freezer(), note).map_err(failed)
    }

    /// Lets a container run that an earlier agent was just freezing when it died. Before the decision it is to run anyway; after it, each
    /// of its processes gets a SIGSTOP first, and it is frozen again.
    pub(super) fn settle_freezer(&self, decided: bool) {
        let note = std::fs::read(self.layout.freezer()).ok();
        let Some(freezer) = note.and_then(|note| serde_json::from_slice::<Freezer>(&note).ok()) else { return };
        // Where the cgroup is gone there is nothing to settle.
        if freezer.is_half_frozen().unwrap_or(false) {
            tracing::warn!(id = %self.id, container = %self.name, decided, "an earlier agent has left it half frozen");
            let stopped = if decided { self.stop_beneath(&freezer) } else { Ok(()) };
            if let Err(error) = stopped.and_then(|()| freezer.thaw().map_err(failed)) {
                tracing::error!(id = %self.id, %error, "it stays half frozen");
            }
        }
    }

    /// They stay stopped, whatever becomes of the others.
    fn stopped_before(&self) -> Vec<u32> {
        let note = std::fs::read(self.layout.stopped()).unwrap_or_default();
        serde_json::from_slice(&note).unwrap_or_default()
    }

    /// What was sent is of no use if the original has run since: it would be a second, newer copy.
    pub(super) fn still_frozen(&self) -> Result<(), Failure> {
        if self.inspected()?.0.freezer.is_held().map_err(failed)? {
            return Ok(());
        }
        let name = &self.name;
        Err(Failure::new(format!("somebody resumed container {name} in the middle of its move; try again")))
    }

    /// The decision is on the disk. Returns since when nothing but the word to commit is lacking.
    pub(super) fn decided(&mut self) -> u64 {
        let start = monotonic_ns();
        if let Some(ready) = self.ready_ns.take() {
            self.timeline.note("decision: written", ready, start);
        }
        self.stop_original();
        self.timeline.note("original: kept", start, monotonic_ns());
        start
    }

    /// Keeps the original from running, whoever resumes it. May be done again.
    fn stop_original(&self) {
        let stop = |container: Container| self.stop_beneath(&container.freezer);
        if let Err(failure) = self.container().and_then(stop) {
            tracing::warn!(id = %self.id, %failure, "nothing but the freezer keeps the original from running");
        }
    }

    /// Sends SIGSTOP to all processes that no signal had stopped. Which these are is noted first: they alone may get a SIGCONT later.
    fn stop_beneath(&self, freezer: &Freezer) -> Result<(), Failure> {
        let before = self.stopped_before();
        let pids = freezer.processes().map_err(failed)?;
        let pids: Vec<u32> = pids.into_iter().filter(|pid| !before.contains(pid)).collect();
        let write = |note: Vec<u8>| write_whole(&self.layout.stopped_by_us(), &note).map_err(failed);
        let noted = serde_json::to_vec(&pids).map_err(failed).and_then(write);
        if let Err(failure) = noted {
            tracing::warn!(id = %self.id, %failure, "which processes are stopped is not noted");
        }
        freezer.stop_beneath(&before).map_err(failed)
    }

    /// Those that [`Self::stop_beneath`] has noted.
    fn stopped_by_us(&self) -> Vec<u32> {
        let note = std::fs::read(self.layout.stopped_by_us()).unwrap_or_default();
        serde_json::from_slice(&note).unwrap_or_default()
    }

    /// Lets the original run, also where it was kept from that after the decision.
    pub(super) fn let_original_run(&self, freezer: &Freezer) -> Result<(), Failure> {
        let was_stopped = self.given_up || self.stopped_beneath;
        if was_stopped {
            freezer.continue_beneath(&self.stopped_before(), &self.stopped_by_us()).map_err(failed)?;
        }
        let waits = restart_blocks::recorded(&self.layout.waits());
        match self.freezer.as_ref().map(|open| open.thaw_after_dump(&waits)) {
            Some(Ok(())) => {}
            // Where the container was started anew meanwhile, the cgroup that is open is gone, and another one has its name.
            _ => freezer.thaw_after_dump(&waits).map_err(failed)?,
        }
        // Without the note: in a frozen cgroup of version 1 tasks do not show that they have stopped.
        match was_stopped && !self.layout.stopped_by_us().exists() {
            true => freezer.continue_beneath(&self.stopped_before(), &[]).map_err(failed),
            false => Ok(()),
        }
    }

    /// Freezes the original again if somebody has resumed it, which has done no harm.
    pub(super) fn keep_frozen(&self) {
        if let Err(failure) = self.freeze_again() {
            tracing::warn!(id = %self.id, %failure, "whether the original is still frozen cannot be told");
        }
    }

    fn freeze_again(&self) -> Result<(), Failure> {
        let freezer = self.container()?.freezer;
        if freezer.is_held().map_err(failed)? {
            return Ok(());
        }
        let (name, node, to) = (&self.name, &self.node.config.node, &self.peer);
        tracing::warn!(id = %self.id, container = %name, "somebody resumed the original; it is frozen again");
        freezer.freeze(FREEZE).map_err(failed)?;
        let way = format!(
            "original: somebody resumed {name} on node {node} after its copy on {to} had begun to run; not a task of it ran, \
             and it was frozen again"
        );
        self.report.change(|r| {
            if !r.ways.contains(&way) {
                r.ways.push(way);
            }
        });
        Ok(())
    }
}

/// Notes which processes of a container a signal has stopped.
pub(super) fn note_stopped(freezer: &Freezer, layout: &Layout) -> Result<(), Failure> {
    let note = serde_json::to_vec(&freezer.stopped().map_err(failed)?).map_err(failed)?;
    std::fs::write(layout.stopped(), note).map_err(failed)
}
