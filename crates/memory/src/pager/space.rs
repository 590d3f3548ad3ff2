//! One address space that is being served.

use std::io;

use tranship_sys::arena::View;
use tranship_sys::userfault::{Event, Filled, Userfault};
use tranship_types::{PAGE_SIZE, PageRange};

use crate::index::{Extent, Index};

/// Bytes supplied around a fault: the neighbours of a page are likely to be touched next.
const FAULT_AROUND: u64 = 16 * PAGE_SIZE;

/// An address space whose missing pages are supplied from the store.
#[derive(Debug)]
pub(super) struct Space {
    pub userfault: Userfault,
    /// Stored pages that are not in place yet.
    pub pending: Index,
    /// Faulting addresses for which nothing is stored, while pages still may come.
    pub waiting: Vec<u64>,
    /// Where the sweep that fills everything is.
    sweep: u64,
    /// The address space is gone.
    pub gone: bool,
}

/// What an answer took.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub installed: u64,
    pub faults: u64,
    /// A task forked: its child's address space.
    pub child: Option<Space>,
    /// Stored pages that nobody will ask for again.
    pub freed: Vec<Extent>,
}

impl Space {
    pub fn new(userfault: Userfault, pending: Index) -> Self {
        Self { userfault, pending, waiting: Vec::new(), sweep: 0, gone: false }
    }

    /// Reads and answers one event. `None`: there was none.
    pub fn answer(&mut self, store: &View, complete: bool) -> io::Result<Option<Work>> {
        let Some(event) = self.userfault.next_event()? else { return Ok(None) };
        let mut work = Work::default();
        match event {
            Event::Fault { address } => {
                work.faults = 1;
                self.supply(address & !(PAGE_SIZE - 1), store, complete, &mut work)?;
            }
            Event::Fork(userfault) => {
                // The child's page table is a copy: what was missing here is missing there.
                work.child = Some(Space::new(userfault, self.pending.clone()));
            }
            Event::Remap { from, to, len } => work.freed = self.pending.shift(from, to, len),
            Event::Remove { start, end } | Event::Unmap { start, end } => {
                if let Some(range) = PageRange::new(start, end) {
                    work.freed = self.pending.remove(range);
                }
            }
        }
        Ok(Some(work))
    }

    /// Supplies the page at `address`, for which a thread waits.
    pub fn supply(&mut self, address: u64, store: &View, complete: bool, work: &mut Work) -> io::Result<()> {
        let Some(stored) = self.pending.find(address) else {
            if !complete {
                self.waiting.push(address);
                return Ok(());
            }
            // What is not stored was never written: zeros. If it is there already, whoever waits has been woken.
            match self.userfault.zero(address, PAGE_SIZE)? {
                Filled::Gone => self.gone = true,
                Filled::UntilChange(_) => self.waiting.push(address),
                _ => {}
            }
            return Ok(());
        };
        let window = PageRange { start: address, end: address + FAULT_AROUND };
        let range = stored.range.intersection(&window).expect("the extent contains the address");
        let before = work.installed;
        self.install(range, store, work)?;
        if work.installed == before && !self.gone && self.pending.find(address).is_some() {
            // Nothing could be put in place because the address space is changing: once its events are read.
            self.waiting.push(address);
        }
        Ok(())
    }

    /// Puts up to `budget` bytes in place, in address order, going round. Returns whether anything is left to do.
    pub fn fill(&mut self, budget: u64, store: &View, work: &mut Work) -> io::Result<bool> {
        let Some(stored) = self.pending.next_from(self.sweep) else { return Ok(false) };
        let end = stored.range.end.min(stored.range.start + budget);
        self.install(PageRange { start: stored.range.start, end }, store, work)?;
        self.sweep = end;
        Ok(!self.pending.is_empty() && !self.gone)
    }

    /// Copies a range that lies within one stored extent, and takes out of the index what is settled.
    fn install(&mut self, range: PageRange, store: &View, work: &mut Work) -> io::Result<()> {
        let mut at = range.start;
        let mut chunk = range.len();
        while at < range.end {
            let Some(stored) = self.pending.find(at) else { return Ok(()) };
            let len = chunk.min(range.end - at).min(stored.range.end - at);
            let offset = stored.offset + (at - stored.range.start);
            let filled = self.userfault.copy(at, store, offset, len)?;
            let (done, settled) = match filled {
                Filled::All => (len, len),
                // The page was put in place before, by a fault or by criu: it is newer, ours is not needed.
                Filled::UntilPresent(done) => (done, done + PAGE_SIZE),
                Filled::UntilChange(done) => (done, done),
                // A copy must lie within one mapping; a smaller one may. A single page that cannot be placed is no
                // longer mapped.
                Filled::UntilUnmapped(done) if len == PAGE_SIZE => (done, PAGE_SIZE),
                Filled::UntilUnmapped(done) => {
                    chunk = (len / 2).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE);
                    (done, done)
                }
                Filled::Gone => {
                    self.gone = true;
                    work.freed.extend(self.pending.remove(PageRange::EVERYTHING));
                    return Ok(());
                }
            };
            work.installed += done;
            if settled > 0 {
                let settled = PageRange { start: at, end: at + settled.min(len) };
                work.freed.extend(self.pending.remove(settled));
                at = settled.end;
            } else if matches!(filled, Filled::UntilChange(_)) {
                return Ok(());
            }
        }
        Ok(())
    }
}
