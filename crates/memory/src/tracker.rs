//! What has to be sent while the container runs, round after round: the dirty set.
//!
//! For each address space the tracker knows what has been sent. A round asks the kernel what was written since the round
//! before, and re-arms the watch in the same instant, so that a write after that is found by the next round. Processes and
//! mappings come and go meanwhile: what is not watched yet counts as written. The last round, on the frozen container,
//! also tells what was sent and is not there any more, so that the destination does not take stale pages for content.

use std::collections::HashMap;
use std::io;

use tranship_sys::pagemap::Pagemap;
use tranship_sys::writes::WriteWatch;
use tranship_types::{AddressSpaceId, PageRange};

use crate::index::PageSet;
use crate::send::{Chunk, Plan, SendError};
use crate::survey::{Space, SurveyError, survey};

/// Tracking that does not work.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// The kernel or the machine cannot do it.
    #[error(
        "this kernel cannot tell which pages a running task writes: userfaultfd with asynchronous write-protection and \
             PAGEMAP_SCAN are needed (Linux >= 6.7 on x86-64)"
    )]
    Unsupported,
    /// A process cannot be looked at.
    #[error(transparent)]
    Survey(#[from] SurveyError),
    /// A process cannot be watched.
    #[error("process {pid} cannot be watched: {source}")]
    Watch {
        /// Pid on this node.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// Its page table cannot be read.
    #[error(transparent)]
    Read(#[from] SendError),
}

#[derive(Debug)]
struct Watched {
    pid: u32,
    watch: WriteWatch,
    /// What the destination has, in whatever version.
    sent: PageSet,
    /// What it has not got since it was last found to be written: it could not be read.
    missed: PageSet,
}

/// The watch over a container's memory.
#[derive(Debug, Default)]
pub struct Tracker {
    spaces: HashMap<AddressSpaceId, Watched>,
}

/// What a round has found.
#[derive(Debug, Default)]
pub struct Round {
    /// What is to be sent now.
    pub plan: Plan,
    /// What was sent in earlier rounds and is gone since: reads as zeros.
    pub stale: Vec<(AddressSpaceId, PageRange)>,
    /// The address spaces.
    pub spaces: Vec<Space>,
}

impl Tracker {
    /// Whether tracking works here, tried on this very process's page table.
    pub fn supported() -> bool {
        Pagemap::open(std::process::id()).is_ok_and(|map| map.written(0, 4096, false, |_, _| {}).is_ok())
    }

    /// A round on the running container: what was written since the last one (at first, everything).
    pub fn round(&mut self, pids: &[u32]) -> Result<Round, TrackError> {
        let mut round = Round::default();
        let (mut watched, mut failure) = (0, None);
        for &pid in pids {
            // A process may end at any time; the next round does not see it.
            match survey(&[pid]) {
                Ok(spaces) => round.spaces.extend(spaces),
                Err(_) => continue,
            }
            let Some(space) = round.spaces.last().filter(|s| s.pid == pid) else { continue };
            match self.look(space, &mut round.plan) {
                Ok(()) => watched += 1,
                // It is ending, or executing another program at just this moment, or somebody else traces it: the next round
                // tries again, and what is not watched at the end is sent as a whole.
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if watched == 0 => Err(error),
            _ => Ok(round),
        }
    }

    /// Bytes that a round would find now. Nothing is re-armed, so that the round finds them all the same.
    pub fn left(&self, pids: &[u32]) -> u64 {
        let mut left = 0;
        for space in pids.iter().flat_map(|pid| survey(&[*pid]).unwrap_or_default()) {
            let Ok(pagemap) = Pagemap::open(space.pid) else { continue };
            for range in &space.ranges {
                // What ends or goes meanwhile is not left.
                let _ = pagemap.written(range.start, range.end, false, |start, end| left += end - start);
            }
        }
        left
    }

    fn look(&mut self, space: &Space, plan: &mut Plan) -> Result<(), TrackError> {
        let pid = space.pid;
        let failed = |source| TrackError::Watch { pid, source };
        let inject = || match WriteWatch::inject(pid) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Err(TrackError::Unsupported),
            other => other.map_err(failed),
        };
        // The same id with another pid is a new process: what was sent for the old one is replaced or stale.
        if self.spaces.get(&space.id).is_none_or(|watched| watched.pid != pid) {
            let watch = inject()?;
            let sent = self.spaces.remove(&space.id).map(|w| w.sent).unwrap_or_default();
            self.spaces.insert(space.id, Watched { pid, watch, sent, missed: PageSet::default() });
        }
        let watched = self.spaces.get_mut(&space.id).expect("it was put there just now");
        let mut pagemap = Pagemap::open_writable(pid).map_err(failed)?;
        for range in &space.ranges {
            let watched_all_along = pagemap.is_watched(range.start, range.end);
            let armed = match watched.watch.watch(range.start, range.end) {
                Ok(armed) => armed,
                // It has executed another program: this is a new address space.
                Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32) => {
                    watched.watch = inject()?;
                    watched.watch.watch(range.start, range.end).map_err(failed)?
                }
                Err(error) => return Err(failed(error)),
            };
            let list = plan.list(space, range);
            let found = |start, end| {
                let run = PageRange { start, end };
                watched.sent.insert(run);
                watched.missed.remove(run);
                Chunk::cut(space, run, list);
            };
            if watched_all_along {
                pagemap.written(range.start, range.end, armed, found).map_err(failed)?;
            } else {
                // Armed first: what is written after that is found by the next look. Until here no mark tells anything.
                pagemap.written(range.start, range.end, armed, |_, _| {}).map_err(failed)?;
                pagemap.populated(range.start, range.end, found).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// These chunks of the round could not be read. If their pages are there at the end they are sent then, whoever wrote
    /// them.
    pub fn missed(&mut self, chunks: &[Chunk]) {
        for (id, range) in chunks.iter().map(Chunk::pages) {
            if let Some(watched) = self.spaces.get_mut(&id) {
                watched.missed.insert(range);
            }
        }
    }

    /// The last round, on the frozen container: what is still to be sent, and what is not there any more. The watches stay
    /// until the tracker is dropped; dropping it takes time for each page, so not in the freeze.
    pub fn last_round(&mut self, pids: &[u32]) -> Result<Round, TrackError> {
        let mut round = Round { spaces: survey(pids)?, ..Round::default() };
        let mut gone: HashMap<AddressSpaceId, PageSet> =
            self.spaces.iter().map(|(id, watched)| (*id, watched.sent.clone())).collect();
        for space in &round.spaces {
            let failed = |source| TrackError::Watch { pid: space.pid, source };
            let watched = self.spaces.get(&space.id);
            let stale = gone.entry(space.id).or_default();
            let pagemap = Pagemap::open(space.pid).map_err(failed)?;
            for range in &space.ranges {
                let list = round.plan.list(space, range);
                let mut found = PageSet::default();
                let watched_all_along = pagemap.is_watched(range.start, range.end);
                // One walk of the page table, for what was written and for what is there.
                let there = |start, end, written: bool| {
                    let run = PageRange { start, end };
                    stale.remove(run);
                    found.insert(run);
                    if !written && watched_all_along {
                        // What was neither written nor ever sent has come here by other means (mremap on older kernels).
                        for known in watched.map(|w| w.sent.within(run)).unwrap_or_default() {
                            found.remove(known);
                        }
                        for missed in watched.map(|w| w.missed.within(run)).unwrap_or_default() {
                            found.insert(missed);
                        }
                    }
                };
                pagemap.populated_or_written(range.start, range.end, there).map_err(failed)?;
                found.drain().into_iter().for_each(|run| Chunk::cut(space, run, list));
            }
        }
        round.stale = gone.into_iter().flat_map(|(id, set)| set.drain().into_iter().map(move |r| (id, r))).collect();
        Ok(round)
    }
}
