//! One address space that is being served.

use std::io;
use std::time::{Duration, Instant};

use tranship_sys::arena::View;
use tranship_sys::userfault::{Event, Filled, Userfault};
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use super::remote::Remote;
use crate::index::{Extent, Index};

/// Bytes supplied around a fault: the neighbours of a page are likely to be touched next.
const FAULT_AROUND: u64 = 16 * PAGE_SIZE;
/// Bytes asked for around a fault on a page that is still at the source: more would keep the first one waiting.
const WANT_AROUND: u64 = 8 * PAGE_SIZE;

/// An address space whose missing pages are supplied from the store.
#[derive(Debug)]
pub(super) struct Space {
    /// The address space of the source whose pages it has: a child's are its parent's.
    pub origin: AddressSpaceId,
    pub userfault: Userfault,
    /// Stored pages that are not in place yet.
    pub pending: Index,
    /// Pages that have not come yet.
    pub remote: Remote,
    /// Faults that cannot be answered yet.
    pub waiting: Vec<Waiter>,
    /// One of them only because the address space was changing. It goes on changing for a moment after the event has been read,
    /// until the thread that changes it runs again, and nothing tells when that is: it must be tried again.
    pub changing: bool,
    /// Where the sweep that fills everything is.
    sweep: u64,
    /// The address space is gone.
    pub gone: bool,
}

/// A thread that waits for a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiter {
    address: u64,
    since: Instant,
    /// The page was asked for at the source.
    remote: bool,
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
    /// Pages to be asked for, with the source's addresses.
    pub wanted: Vec<(AddressSpaceId, PageRange)>,
    /// How long threads waited for pages from the source.
    pub waited: Vec<Duration>,
}

impl Space {
    pub fn new(origin: AddressSpaceId, userfault: Userfault, pending: Index, remote: Remote) -> Self {
        Self { origin, userfault, pending, remote, waiting: Vec::new(), changing: false, sweep: 0, gone: false }
    }

    /// Whether nothing is left to do here.
    pub fn is_done(&self) -> bool {
        self.pending.is_empty() && self.remote.is_empty() && self.waiting.is_empty()
    }

    /// Reads and answers one event. `None`: there was none.
    pub fn answer(&mut self, store: &View, named: bool) -> io::Result<Option<Work>> {
        let Some(event) = self.userfault.next_event()? else { return Ok(None) };
        let mut work = Work::default();
        match event {
            Event::Fault { address } => {
                work.faults = 1;
                let waiter = Waiter { address: address & !(PAGE_SIZE - 1), since: Instant::now(), remote: false };
                self.supply(waiter, store, named, &mut work)?;
            }
            Event::Fork(userfault) => {
                // The child's page table is a copy: what was missing here is missing there.
                work.child = Some(Space::new(self.origin, userfault, self.pending.clone(), self.remote.clone()));
            }
            Event::Remap { from, to, len } => {
                work.freed = self.pending.shift(from, to, len);
                self.remote.shift(from, to, len);
            }
            Event::Remove { start, end } | Event::Unmap { start, end } => {
                if let Some(range) = PageRange::new(start, end) {
                    work.freed = self.pending.remove(range);
                    self.remote.forget(range);
                }
            }
        }
        Ok(Some(work))
    }

    /// Pages of the source have come into the store: those that are still missing here are now to be put in place.
    pub fn arrived(&mut self, extent: Extent) {
        for wanted in self.remote.arrived(extent.range) {
            let offset = extent.offset + (wanted.offset - extent.range.start);
            self.pending.insert(Extent { range: wanted.range, offset });
        }
    }

    /// Tries all faults again that could not be answered.
    pub fn retry(&mut self, store: &View, named: bool, work: &mut Work) -> io::Result<()> {
        self.changing = false;
        std::mem::take(&mut self.waiting).into_iter().try_for_each(|waiter| self.supply(waiter, store, named, work))
    }

    /// Has everything asked for again that somebody waits for.
    pub fn ask_again(&mut self) {
        self.waiting.iter_mut().for_each(|waiter| waiter.remote = false);
    }

    /// Supplies the page that a thread waits for.
    fn supply(&mut self, waiter: Waiter, store: &View, named: bool, work: &mut Work) -> io::Result<()> {
        let address = waiter.address;
        if let Some(stored) = self.pending.find(address) {
            let window = PageRange { start: address, end: address + FAULT_AROUND };
            let range = stored.range.intersection(&window).expect("the extent contains the address");
            let before = work.installed;
            self.install(range, store, work)?;
            if work.installed == before && !self.gone && self.pending.find(address).is_some() {
                // Nothing could be put in place because the address space is changing.
                self.changing = true;
                self.waiting.push(waiter);
            } else if waiter.remote {
                work.waited.push(waiter.since.elapsed());
            }
            return Ok(());
        }
        if let Some(missing) = self.remote.find(address, WANT_AROUND) {
            if !waiter.remote {
                let start = missing.offset;
                work.wanted.push((self.origin, PageRange { start, end: start + missing.range.len() }));
            }
            self.waiting.push(Waiter { remote: true, ..waiter });
            return Ok(());
        }
        if !named {
            self.waiting.push(waiter);
            return Ok(());
        }
        // What is neither stored nor to come was never written: zeros. If it is there already, whoever waits has been woken.
        match self.userfault.zero(address, PAGE_SIZE)? {
            Filled::Gone => self.gone = true,
            Filled::UntilChange(_) => {
                self.changing = true;
                self.waiting.push(waiter);
            }
            // It was moved or unmapped while the thread waited, which has to see that.
            Filled::UntilUnmapped(_) => self.userfault.wake(address, PAGE_SIZE)?,
            Filled::All if waiter.remote => work.waited.push(waiter.since.elapsed()),
            _ => {}
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

    /// Puts in place what is stored of `range`.
    pub fn place(&mut self, range: PageRange, store: &View, work: &mut Work) -> io::Result<()> {
        self.pending.within(range).into_iter().try_for_each(|stored| self.install(stored.range, store, work))
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
                // longer mapped, and whoever waited for it has to see that.
                Filled::UntilUnmapped(done) if len == PAGE_SIZE => {
                    self.userfault.wake(at, PAGE_SIZE)?;
                    (done, PAGE_SIZE)
                }
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
