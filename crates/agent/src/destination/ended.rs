//! A copy that runs no more before the move is over: it has ended, or its memory is damaged.

use std::path::Path;
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_engine::{EngineError, Freezer, State};
use tranship_memory::pager::{self, PagerHandle};

use super::{DestinationRun, failed};
use crate::node;

/// How long the tasks of a damaged copy may take to stop.
const FREEZE: Duration = Duration::from_secs(5);
/// How long a pager that nobody needs may take to hear that, and then to end.
const PAGER_END: Duration = Duration::from_secs(2);

impl DestinationRun {
    /// How the container has ended here, if it has; `init` was its first process. While the engine does not answer, or processes
    /// of it are left, it has not.
    pub fn ended_there(&self, init: Option<u32>) -> Option<String> {
        let (name, node, engine) = (&self.offer.container, &self.node.config.node, self.engine.name());
        let ended = match init {
            Some(init) => format!("its first process (pid {init}) ended on node {node}"),
            None => format!("it ended on node {node}"),
        };
        match self.engine.inspect(name) {
            Err(EngineError::NoSuchContainer { .. }) => Some(format!("{ended}, and {engine} has removed it")),
            Err(_) => None,
            Ok(found) if !self.engine.is_made_from(&found, &self.bundle()) => {
                Some(format!("{ended}, and its name was given to another container"))
            }
            // Tasks that were never let go have not ended; who has started it anew has done so with no memory of before.
            Ok(found) if found.state == State::Running && init.is_some_and(|init| ![0, init].contains(&found.init)) => {
                Some(format!("{ended}, and {engine} has started it anew"))
            }
            Ok(found) if found.state == State::Running && init.is_none() => None,
            Ok(found) => {
                // A cgroup that is gone has no processes. While one that is there cannot be read, the container has not ended.
                let (Freezer::V1(cgroup) | Freezer::V2(cgroup)) = &found.freezer;
                let left = match cgroup.try_exists() {
                    Ok(false) => Vec::new(),
                    _ => found.processes().ok()?,
                };
                left.iter()
                    .all(|pid| !node::is_alive(*pid))
                    .then(|| ended + &killed_for_memory(found.memory_cgroup.as_deref()))
            }
        }
    }

    /// Keeps the tasks of a copy from going on with memory that was lost; false if there are none any more. May be done again.
    pub fn stop_damaged(&self) -> Result<bool, Failure> {
        let Some(copy) = self.own_container() else { return Ok(false) };
        if copy.state == State::Stopped || copy.processes().is_ok_and(|left| left.is_empty()) {
            return Ok(false);
        }
        if !copy.freezer.is_held().map_err(failed)? {
            copy.freezer.freeze(FREEZE).map_err(failed)?;
        }
        Ok(true)
    }

    /// Ends the pager of a container that has ended here: nobody needs the pages that are missing. Any other pager ends by itself, when its
    /// last word is written or its directory is gone. Until then an agent that is restarted must be able to ask it.
    pub(super) fn end_pager(&mut self) -> Result<(), Failure> {
        if self.ended.is_none() {
            return Ok(());
        }
        if !self.layout.root().join(pager::DRAINED_FILE).exists()
            && let Ok(pager) = PagerHandle::connect_within(self.layout.root(), PAGER_END)
            && let Err(error) = pager.quit()
        {
            tracing::warn!(id = %self.id, %error, "the pager of a container that has ended cannot be told to quit");
        }
        self.reap_pager()
    }

    /// Waits for the end of a pager that has nothing left to do.
    pub(super) fn reap_pager(&mut self) -> Result<(), Failure> {
        self.pager.take().map_or(Ok(()), |pager| node::reap(pager, PAGER_END)).map_err(failed)
    }
}

/// That the kernel has killed a process of the container because its memory limit was reached, if it has.
fn killed_for_memory(cgroup: Option<&Path>) -> String {
    let kills = |file: &str| {
        let text = std::fs::read_to_string(cgroup?.join(file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse::<u64>().ok()
    };
    match ["memory.events", "memory.oom_control"].into_iter().find_map(kills) {
        Some(kills) if kills > 0 => "; the kernel has killed a process of it for want of memory (oom_kill)".to_owned(),
        _ => String::new(),
    }
}
