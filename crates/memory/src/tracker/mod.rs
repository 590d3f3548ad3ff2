//! What has to be sent while the container runs, round after round: the dirty set.
//!
//! For each address space the tracker knows what has been sent. A round asks what was written since the round before, and
//! has what is written after that found by the next round. Processes and mappings come and go meanwhile: what was not watched
//! all along counts as written. The last round, on the frozen container, also tells what was sent and is not there any more, so
//! that the destination does not take stale pages for content.
//!
//! How writes are found out differs between kernels: [`DirtyTracker`] is what a [`Method`] has to do for one address space.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tranship_sys::pagemap::Pagemap;
use tranship_sys::process::Memories;
use tranship_sys::standstill;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use crate::page_set::PageSet;
use crate::send::{self, Chunk, Plan, Witness};
use crate::survey::{Space, SurveyError, survey};

mod content_hash;
mod method;
mod soft_dirty;
mod write_protect;

pub use method::{Method, UnknownMethod};

/// How long the processes may take to stand still for a look, where the method needs that.
pub(crate) const STANDSTILL: Duration = Duration::from_millis(200);

/// Bytes that are read to estimate how much of a container's memory is zeros.
const SAMPLED: u64 = 16 << 20;

/// How writes to one address space are found out. `found` and `there` get the mapping, as the space lists it, and a run of
/// pages in it that hold data.
///
/// # Errors
/// All: the process ends or executes another program at just this moment, or somebody else traces it. The next look
/// then finds what this one has not told.
trait DirtyTracker: std::fmt::Debug + Send + Sync {
    /// Finds the pages that may have been written since the last look, at the first one all; what is written from now on is
    /// found by the next look. `pids`: the processes that may have the same memory.
    fn look(&mut self, space: &Space, pids: &[u32], found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()>;

    /// Finds all pages, and whether a look would find them now. Changes nothing.
    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()>;

    /// How many bytes a look would find now. Changes nothing.
    fn left(&self, space: &Space) -> io::Result<u64> {
        let mut left = 0;
        self.peek(space, &mut |_, run, written| left += if written { run.len() } else { 0 })?;
        Ok(left)
    }

    /// Finds, if that takes little time, the pages of a process's range that were written since the last look, which has found all
    /// of them. Changes nothing: the next look finds them.
    fn again(&self, _pid: u32, _range: PageRange, _found: &mut dyn FnMut(PageRange)) -> io::Result<()> {
        Ok(())
    }

    /// The destination gets these pages, as they were read at this address some time after the last look.
    fn sent(&self, _address: u64, _pages: &[u8]) {}
}

/// Runs of fewer pages are sent although they were written again: to leave them out would cost more than it spares.
const LEAST_RUN: u64 = 16 * PAGE_SIZE;

/// Tracking that does not work.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
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
}

#[derive(Debug)]
struct Watched {
    pid: u32,
    tracker: Box<dyn DirtyTracker>,
    /// What the destination has, in whatever version.
    sent: PageSet,
    /// What it has not got since it was last found to be written: it could not be read, or was written again first.
    missed: Mutex<PageSet>,
}

/// The watch over a container's memory.
#[derive(Debug)]
pub struct Tracker {
    method: Method,
    /// One of so many pieces of the memory is compared.
    every: u64,
    /// Some process's writes had to be found by another method.
    also: Option<Method>,
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
    /// What any of the processes writes from now on is found.
    pub complete: bool,
}

/// What is sent while the tasks run is taken down here. If pages that could not be read are there at the end they are sent
/// then, whoever wrote them.
impl Witness for Tracker {
    /// A container that writes all its memory faster than it can be read has next to nothing sent twice so.
    fn due(&self, chunk: &Chunk) -> Vec<PageRange> {
        let (space, range) = chunk.pages();
        let Some(watched) = self.spaces.get(&space) else { return vec![range] };
        let (mut due, mut at) = (Vec::new(), range.start);
        let mut found = |again: PageRange| {
            if again.len() < LEAST_RUN {
                return;
            }
            watched.missed.lock().unwrap_or_else(PoisonError::into_inner).insert(again);
            due.extend((at < again.start).then_some(PageRange { start: at, end: again.start }));
            at = again.end;
        };
        // It is ending, or executing another program: reading it tells.
        let _ = watched.tracker.again(watched.pid, range, &mut found);
        due.extend((at < range.end).then_some(PageRange { start: at, end: range.end }));
        due
    }

    fn read(&self, space: AddressSpaceId, address: u64, pages: &[u8]) {
        if let Some(watched) = self.spaces.get(&space) {
            watched.tracker.sent(address, pages);
        }
    }

    fn missed(&self, chunk: &Chunk) {
        let (space, range) = chunk.pages();
        if let Some(watched) = self.spaces.get(&space) {
            watched.missed.lock().unwrap_or_else(PoisonError::into_inner).insert(range);
        }
    }
}

impl Tracker {
    /// Nothing is watched yet. The method must be [available](Method::available).
    pub fn new(method: Method) -> Self {
        Self { method, every: 1, also: None, spaces: HashMap::new() }
    }

    /// Compares the content of one of `every` pieces of the memory: to know how much is [left](Self::left) after a first round, and for nothing else. It
    /// reads, and changes nothing in the processes: none of them stops or makes a system call.
    pub fn of_sample(every: u64) -> Self {
        Self { every, ..Self::new(Method::Hash) }
    }

    /// How writes are found, for people.
    pub fn way(&self) -> String {
        match self.also {
            Some(also) => format!("writes are found by {}, of some processes by {also}", self.method),
            None => format!("writes are found by {}", self.method),
        }
    }

    /// A round on the running container: what was written since the last one (at first, everything).
    pub fn round(&mut self, pids: &[u32]) -> Result<Round, TrackError> {
        if self.method.needs_standstill() {
            // If they do not stand still, everything that was found is found again by the next round.
            standstill::during(pids, STANDSTILL, |stopped| self.look_at(pids, stopped.is_ok()))
        } else {
            self.look_at(pids, true)
        }
    }

    /// The address spaces of the processes, one of each memory: two watches over one, as of a process and a child that it has vforked, would each take from the
    /// other what was written. If one is watched already, that one.
    fn each_space(&self, pids: &[u32]) -> impl Iterator<Item = Space> + use<> {
        let watched: HashSet<u32> = self.spaces.values().map(|watched| watched.pid).collect();
        let mut pids = pids.to_vec();
        pids.sort_by_key(|pid| !watched.contains(pid));
        let mut memories = Memories::default();
        // A process may end at any time; the next round does not see it.
        let spaces = pids.into_iter().flat_map(|pid| survey(&[pid]).unwrap_or_default());
        spaces.filter(move |space| memories.add(space.pid) != Some(false))
    }

    fn look_at(&mut self, pids: &[u32], rearm: bool) -> Result<Round, TrackError> {
        let mut round = Round::default();
        let (mut watched, mut failure) = (0, None);
        for space in self.each_space(pids) {
            match self.look(&space, pids, rearm, &mut round.plan) {
                Ok(()) => watched += 1,
                // It is ending, or executing another program at just this moment, or somebody else traces it: the next round
                // tries again, and what is not watched at the end is sent as a whole.
                Err(source) => failure = Some(TrackError::Watch { pid: space.pid, source }),
            }
            round.spaces.push(space);
        }
        round.complete = rearm && failure.is_none();
        match failure {
            Some(error) if watched == 0 => Err(error),
            _ => Ok(round),
        }
    }

    fn look(&mut self, space: &Space, pids: &[u32], rearm: bool, plan: &mut Plan) -> io::Result<()> {
        // The same id with another pid is a new process: what was sent for the old one is replaced or stale.
        if self.spaces.get(&space.id).is_none_or(|watched| watched.pid != space.pid) {
            let (tracker, method) = self.method.begin(space.pid, self.every)?;
            self.also = self.also.or((method != self.method).then_some(method));
            let sent = self.spaces.remove(&space.id).map(|w| w.sent).unwrap_or_default();
            self.spaces.insert(space.id, Watched { pid: space.pid, tracker, sent, missed: Mutex::default() });
        }
        let Watched { tracker, sent, missed, .. } = self.spaces.get_mut(&space.id).expect("it was put there just now");
        let missed = missed.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut found = |mapping: &PageRange, run: PageRange| {
            sent.insert(run);
            missed.remove(run);
            Chunk::cut(space, run, plan.list(space, mapping));
        };
        if rearm {
            return tracker.look(space, pids, &mut found);
        }
        tracker.peek(space, &mut |mapping, run, written| {
            if written {
                found(mapping, run);
            }
        })
    }

    /// Bytes that a round would find now, of a sample as many as it stands for. Nothing is re-armed, so that the round finds them all the same.
    pub fn left(&self, pids: &[u32]) -> u64 {
        let left = |space: Space| {
            if let Some(watched) = self.watched(&space) {
                return watched.tracker.left(&space);
            }
            let mut there = 0;
            self.peek(&space, &mut |_, run, _| there += run.len()).map(|()| there)
        };
        // What ends or goes meanwhile is not left.
        self.each_space(pids).filter_map(|space| left(space).ok()).sum()
    }

    /// How many bytes of those that a round would find now are zeros, which do not travel: an estimate, from a sample of a large container's pages.
    pub fn zeros(&self, pids: &[u32]) -> u64 {
        let (every, mut zeros) = (self.left(pids).div_ceil(SAMPLED).max(1), 0);
        let mut buffer = Vec::new();
        for space in self.each_space(pids) {
            let mut runs = Vec::new();
            let looked = self.peek(&space, &mut |_, run, written| runs.extend(Some(run).filter(|_| written)));
            if looked.is_err() {
                continue;
            }
            for piece in runs.into_iter().flat_map(|run| content_hash::sample(run, every)) {
                buffer.resize(piece.len() as usize, 0);
                if send::read(space.pid, piece.start, &mut buffer).is_ok() {
                    let empty = buffer.chunks(PAGE_SIZE as usize).filter(|page| page.iter().all(|byte| *byte == 0));
                    zeros += empty.count() as u64 * PAGE_SIZE * every;
                }
            }
        }
        zeros
    }

    fn watched(&self, space: &Space) -> Option<&Watched> {
        self.spaces.get(&space.id).filter(|watched| watched.pid == space.pid)
    }

    /// Finds all pages, and whether they were written since they were looked at; of a process at which nobody has looked, all.
    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        if let Some(watched) = self.watched(space) {
            return watched.tracker.peek(space, there);
        }
        let mut pagemap = Pagemap::open(space.pid)?;
        for range in &space.ranges {
            pagemap.populated(range.start, range.end, |start, end| there(range, PageRange { start, end }, true))?;
        }
        Ok(())
    }

    /// The last round, on the frozen container: what is still to be sent, and what is not there any more. The watches stay
    /// until the tracker is dropped; dropping it may take time for each page, so not in the freeze.
    pub fn last_round(&mut self, pids: &[u32]) -> Result<Round, TrackError> {
        let mut round = Round { spaces: survey(pids)?, ..Round::default() };
        let mut gone: HashMap<AddressSpaceId, PageSet> =
            self.spaces.iter().map(|(id, watched)| (*id, watched.sent.clone())).collect();
        for space in &round.spaces {
            let (mut there, mut due) = (PageSet::default(), PageSet::default());
            // One walk of the page table, for what is there and for what of it was written.
            let mut touching: Option<PageRange> = None;
            let mut found = |_: &PageRange, run: PageRange, written: bool| {
                if written {
                    due.insert(run);
                }
                touching = Some(match touching {
                    Some(before) if before.end == run.start => PageRange { end: run.end, ..before },
                    before => {
                        before.into_iter().for_each(|before| there.insert(before));
                        run
                    }
                });
            };
            self.peek(space, &mut found).map_err(|source| TrackError::Watch { pid: space.pid, source })?;
            touching.into_iter().for_each(|last| there.insert(last));
            gone.entry(space.id).or_default().remove_all(&there);
            // What was neither written nor ever sent has come here by other means (mremap on older kernels).
            let mut never = there.clone();
            if let Some(watched) = self.spaces.get(&space.id) {
                never.remove_all(&watched.sent);
                let missed = watched.missed.lock().unwrap_or_else(PoisonError::into_inner).all();
                missed.into_iter().flat_map(|missed| there.within(missed)).for_each(|run| due.insert(run));
            }
            never.all().into_iter().for_each(|run| due.insert(run));
            for run in space.executable.iter().flat_map(|range| due.take(*range)) {
                Chunk::cut(space, run, &mut round.plan.first);
            }
            due.all().into_iter().for_each(|run| Chunk::cut(space, run, &mut round.plan.rest));
        }
        round.stale = gone.into_iter().flat_map(|(id, set)| set.all().into_iter().map(move |r| (id, r))).collect();
        Ok(round)
    }
}
