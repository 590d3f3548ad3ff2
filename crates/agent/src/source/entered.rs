//! Processes that an engine has started in the container by exec, health checks among them. Their
//! parents are outside of the container, where they would stay behind: the move waits until they
//! have ended, and is refused if that takes too long.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_engine::{Container, Freezer};
use tranship_sys::process;
use tranship_types::{Blocker, BlockerKind};

use super::{SourceRun, failed};
use crate::inspection::Inspection;

/// How long a move waits for them before the freeze.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it waits in all for those that begin in the last moment, between two attempts to
/// freeze: new connections wait, too.
const LAST: Duration = Duration::from_secs(1);
/// How often they are looked for meanwhile: the next one may begin soon.
const LOOK: Duration = Duration::from_millis(1);

/// Which processes of a container need no further look, and how long the move has waited in the
/// last moment.
#[derive(Debug, Default)]
pub(super) struct Entered {
    born_inside: BTreeSet<u32>,
    waited: Duration,
}

impl Entered {
    /// A process of the container that was started by exec. One that has its parent inside is not
    /// looked at again.
    fn find(&mut self, container: &Container) -> Result<Option<u32>, Failure> {
        let pids: BTreeSet<u32> = container.processes().map_err(failed)?.into_iter().collect();
        for pid in pids.iter().filter(|pid| **pid != container.init) {
            if self.born_inside.contains(pid) {
                continue;
            }
            match process::parent(*pid) {
                Some(parent) if !pids.contains(&parent) => return Ok(Some(*pid)),
                _ => self.born_inside.insert(*pid),
            };
        }
        Ok(None)
    }

    /// The first in any of these containers.
    fn find_in(&mut self, containers: &[Container]) -> Result<Option<u32>, Failure> {
        containers.iter().find_map(|container| self.find(container).transpose()).transpose()
    }
}

/// What a process stands in the way of that was started by exec.
fn blocker(pid: u32) -> Blocker {
    let name = process::name(pid).unwrap_or_default();
    let cause = format!("{name} (pid {pid}) was started by exec, and did not end before the freeze");
    let remedy = "end it, or try again when it has ended (--retry)";
    Blocker::new(BlockerKind::Process, cause, remedy).at(pid, None).passing()
}

impl SourceRun {
    /// Repeats an inspection as long as all that stands in the way are processes that pass.
    pub(super) fn inspected_without_entered(
        &self,
        inspect: impl Fn() -> Result<Inspection, Failure>,
    ) -> Result<Inspection, Failure> {
        let begun = Instant::now();
        loop {
            let found = inspect()?;
            let passes = |blocker: &Blocker| blocker.passes && blocker.kind == BlockerKind::Process;
            if !found.blockers.iter().any(passes) || begun.elapsed() > PATIENCE {
                return Ok(found);
            }
            self.interrupt.check()?;
        }
    }

    /// Waits until no process is left that was started by exec, while the container runs.
    ///
    /// # Errors
    /// One that goes on for too long.
    pub(super) fn let_entered_end(&mut self) -> Result<(), Failure> {
        self.wait_for_entered(PATIENCE)
    }

    fn wait_for_entered(&mut self, patience: Duration) -> Result<(), Failure> {
        let containers = self.with_unit()?;
        let begun = Instant::now();
        while let Some(pid) = self.entered.find_in(&containers)? {
            self.interrupt.check()?;
            if begun.elapsed() > patience {
                return Failure::blocked(vec![blocker(pid)]).map_or(Ok(()), Err);
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Lets the frozen container run on if one has been started meanwhile, until that has ended.
    /// Says whether it did.
    pub(super) fn thaw_for_entered(&mut self, freezer: &Freezer) -> Result<bool, Failure> {
        let containers = self.with_unit()?;
        if self.entered.find_in(&containers)?.is_none() {
            return Ok(false);
        }
        self.thaw_unit(freezer)?;
        let begun = Instant::now();
        self.wait_for_entered(LAST.saturating_sub(self.entered.waited))?;
        self.entered.waited += begun.elapsed();
        Ok(true)
    }

    /// A process that entered the container at the moment of the freeze, where it is in the way of
    /// criu. Those that were seen before are not looked at again.
    pub(super) fn entered_in_the_freeze(&mut self) -> Option<Blocker> {
        let containers = self.with_unit().ok()?;
        self.entered.find_in(&containers).ok().flatten().map(blocker)
    }

    fn with_unit(&self) -> Result<Vec<Container>, Failure> {
        let own = self.inspected()?.0.clone();
        Ok([own].into_iter().chain(self.unit_containers()).collect())
    }
}
