//! One address space that is being served.

use std::io;
use std::time::{Duration, Instant};

use tranship_sys::arena::View;
use tranship_sys::journal::Journal;
use tranship_sys::userfault::{Change, Event, Filled, Message, Userfault};
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use super::around::{Around, WANT_BESIDE};
use super::remote::Remote;
use super::takeover::CHANGE;
use crate::index::{Extent, Index};

/// Bytes supplied around a fault: the neighbours of a page are likely to be touched next.
const FAULT_AROUND: u64 = 16 * PAGE_SIZE;

/// An address space whose missing pages are supplied from the store.
#[derive(Debug)]
pub(super) struct Space {
    /// The address space of the source whose pages it has: a child's are its parent's.
    pub origin: AddressSpaceId,
    /// Which of all address spaces that were ever served this is.
    pub serial: u64,
    pub userfault: Userfault,
    /// Stored pages that are not in place yet. Where a newer version is still to come the older one may be among them: what is out
    /// of date is looked for just before pages are put in place, since to go through all of them takes longer than a restore.
    pub pending: Index,
    /// Pages that have not come yet.
    pub remote: Remote,
    around: Around,
    /// Faults that cannot be answered yet.
    pub waiting: Vec<Waiter>,
    /// One of them only because the address space was changing. It goes on changing for a moment after the event has been read,
    /// until the thread that changes it runs again, and nothing tells when that is: it must be tried again.
    pub changing: bool,
    /// What was moved away and is still to be told as unmapped, which the kernel does after each move.
    left: Vec<PageRange>,
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
        Self {
            origin,
            serial: 0,
            userfault,
            pending,
            remote,
            around: Around::default(),
            waiting: Vec::new(),
            changing: false,
            left: Vec::new(),
            sweep: 0,
            gone: false,
        }
    }

    /// Whether nothing is left to do here.
    pub fn is_done(&self) -> bool {
        self.pending.is_empty() && self.remote.is_empty() && self.waiting.is_empty()
    }

    /// Answers an event that was read into the journal.
    pub fn answer(&mut self, message: Message, store: &View, named: bool, journal: &Journal) -> io::Result<Work> {
        let mut work = Work::default();
        match message.event()? {
            Event::Fault { address } => {
                work.faults = 1;
                let waiter = Waiter { address: address & !(PAGE_SIZE - 1), since: Instant::now(), remote: false };
                self.supply(waiter, store, named, &mut work)?;
            }
            Event::Changed(change) => {
                journal.append(CHANGE, self.serial, &message.to_bytes());
                match change {
                    Change::Fork(number) => {
                        // SAFETY: of the event that was just read, of this userfaultfd.
                        let child = unsafe { self.userfault.child(number)? };
                        work.child = Some(self.child(child));
                    }
                    change => self.follow(change, &mut work),
                }
            }
        }
        Ok(work)
    }

    /// The address space of a child. Its page table is a copy: what was missing here is missing there.
    pub fn child(&self, userfault: Userfault) -> Self {
        Self::new(self.origin, userfault, self.pending.clone(), self.remote.clone())
    }

    /// Does what the task has done to its own address space.
    pub fn follow(&mut self, change: Change, work: &mut Work) {
        match change {
            Change::Fork(_) => {}
            Change::Remap { from, to, len } => {
                PageRange::new(to, to.saturating_add(len)).into_iter().for_each(|target| self.sift(target));
                work.freed = self.pending.shift(from, to, len);
                self.remote.shift(from, to, len);
                self.left.extend(PageRange::new(from, from.saturating_add(len)));
            }
            Change::Remove { start, end } => self.forget(start, end, work),
            Change::Unmap { start, end } => {
                // A move's last word, that its old place is unmapped, tells nothing new. It may be read after the word that
                // another thread has moved something there, which must stay. (A move that leaves its old place mapped, with
                // MREMAP_DONTUNMAP, never says it; then a later unmapping is passed over, which only has pages tried in vain.)
                match self.left.iter().position(|left| (left.start, left.end) == (start, end)) {
                    Some(told) => drop(self.left.swap_remove(told)),
                    None => self.forget(start, end, work),
                }
            }
        }
    }

    fn forget(&mut self, start: u64, end: u64, work: &mut Work) {
        if let Some(range) = PageRange::new(start, end) {
            self.sift(range);
            work.freed = self.pending.remove(range);
            self.remote.forget(range);
        }
    }

    /// Takes out of the list what of `range` is out of date. (Its place in the store is not given back: the newer version is put there.)
    fn sift(&mut self, range: PageRange) {
        if !self.remote.is_empty() {
            self.remote.within(range).into_iter().for_each(|stale| drop(self.pending.remove(stale)));
        }
    }

    /// Pages of the source have come into the store: those that are still missing here are now to be put in place.
    pub fn arrived(&mut self, extent: Extent) {
        for wanted in self.remote.arrived(extent.range) {
            let offset = extent.offset + (wanted.offset - extent.range.start);
            self.pending.insert(Extent { range: wanted.range, offset });
        }
    }

    /// Pages that were to come are no longer there: they read as zeros.
    pub fn gone(&mut self, range: PageRange) {
        for missed in self.remote.arrived(range) {
            self.pending.remove(missed.range);
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
        let window = PageRange { start: address, end: address + FAULT_AROUND };
        self.sift(window);
        if let Some(stored) = self.pending.find(address) {
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
            if work.installed == before && !self.changing && !self.gone {
                // It is there, or has become a guard while the thread waited, which has to see that.
                self.userfault.wake(address, PAGE_SIZE)?;
            }
            return Ok(());
        }
        if let Some(missing) = self.remote.find(address, WANT_BESIDE) {
            if !waiter.remote {
                let start = missing.offset;
                let len = self.around.wanted(missing.range).len();
                work.wanted.push((self.origin, PageRange { start, end: start + len }));
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
            // It was moved or unmapped, or has become a guard, while the thread waited, which has to see that.
            Filled::UntilUnmapped(_) | Filled::UntilPresent(_) => self.userfault.wake(address, PAGE_SIZE)?,
            Filled::All if waiter.remote => work.waited.push(waiter.since.elapsed()),
            _ => {}
        }
        Ok(())
    }

    /// Puts up to `budget` bytes in place, in address order, going round. Returns whether it came any further.
    pub fn fill(&mut self, budget: u64, store: &View, work: &mut Work) -> io::Result<bool> {
        let Some(PageRange { start, end }) = self.pending.next_from(self.sweep).map(|stored| stored.range) else {
            return Ok(false);
        };
        let before = self.pending.bytes();
        self.sweep = end.min(start + budget);
        self.place(PageRange { start, end: self.sweep }, store, work)?;
        Ok(self.pending.bytes() < before)
    }

    /// Puts in place what is stored of `range`, and not out of date.
    pub fn place(&mut self, range: PageRange, store: &View, work: &mut Work) -> io::Result<()> {
        self.sift(range);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_set::PageSet;

    /// A space whose pages 0 to 3 and 8 to 11 are stored, each at its own number in the store.
    fn space() -> Space {
        let nothing = std::fs::File::open("/dev/null").unwrap();
        let mut pending = Index::default();
        for first in [0, 8] {
            pending.insert(Extent { range: pages(first, 4), offset: first * PAGE_SIZE });
        }
        Space::new(
            AddressSpaceId(1),
            Userfault::from(std::os::fd::OwnedFd::from(nothing)),
            pending,
            Remote::new(PageSet::default()),
        )
    }

    fn pages(first: u64, count: u64) -> PageRange {
        PageRange { start: first * PAGE_SIZE, end: (first + count) * PAGE_SIZE }
    }

    fn moved(from: u64, to: u64, count: u64) -> Change {
        Change::Remap { from: from * PAGE_SIZE, to: to * PAGE_SIZE, len: count * PAGE_SIZE }
    }

    fn unmapped(first: u64, count: u64) -> Change {
        let PageRange { start, end } = pages(first, count);
        Change::Unmap { start, end }
    }

    /// The stored page that is to be put in place at each of the first 20.
    fn follow(space: &mut Space, changes: impl IntoIterator<Item = Change>) -> Vec<Option<u64>> {
        changes.into_iter().for_each(|change| space.follow(change, &mut Work::default()));
        let stored = |page: u64| {
            let extent = space.pending.find(page * PAGE_SIZE)?;
            Some((extent.offset + page * PAGE_SIZE - extent.range.start) / PAGE_SIZE)
        };
        (0..20).map(stored).collect()
    }

    #[test]
    fn what_another_thread_moves_to_where_something_was_moved_from_stays() {
        // One thread moves 0 to 16; before it says that 0 is unmapped, another one moves 8 there.
        let there = follow(&mut space(), [moved(0, 16, 4), moved(8, 0, 4), unmapped(0, 4), unmapped(8, 4)]);
        assert_eq!(there[..4], [Some(8), Some(9), Some(10), Some(11)]);
        assert_eq!(there[16..], [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(there[4..16], [None; 12]);
    }

    #[test]
    fn what_is_unmapped_after_a_move_is_forgotten() {
        let mut space = space();
        follow(&mut space, [moved(0, 16, 4), unmapped(0, 4), moved(16, 0, 4), unmapped(16, 4)]);
        assert_eq!(follow(&mut space, [unmapped(0, 4)])[..4], [None; 4]);
        assert!(space.left.is_empty());
    }

    #[test]
    fn what_is_out_of_date_is_left_out_until_it_has_come() {
        let mut space = space();
        let mut missing = PageSet::default();
        missing.insert(pages(1, 2));
        space.remote = Remote::new(missing);
        follow(&mut space, [moved(0, 16, 4)]);
        space.sift(pages(16, 4));
        assert_eq!(follow(&mut space, [])[16..], [Some(0), None, None, Some(3)]);
        space.arrived(Extent { range: pages(1, 1), offset: 30 * PAGE_SIZE });
        space.gone(pages(2, 1));
        space.sift(pages(16, 4));
        assert_eq!(follow(&mut space, [])[16..], [Some(0), Some(30), None, Some(3)]);
        assert!(space.remote.is_empty());
    }

    #[test]
    fn what_reads_as_zeros_at_the_source_is_not_supplied_from_an_older_version() {
        let mut space = space();
        let mut missing = PageSet::default();
        missing.insert(pages(0, 2));
        space.remote = Remote::new(missing);
        space.gone(pages(0, 1));
        assert_eq!(follow(&mut space, [])[..4], [None, Some(1), Some(2), Some(3)]);
    }

    #[test]
    fn the_place_of_what_is_out_of_date_is_not_given_back() {
        let mut space = space();
        let mut missing = PageSet::default();
        missing.insert(pages(1, 1));
        space.remote = Remote::new(missing);
        let mut work = Work::default();
        space.follow(unmapped(0, 4), &mut work);
        let places: Vec<PageRange> = work.freed.iter().map(Extent::place).collect();
        assert_eq!(places, [pages(0, 1), pages(2, 2)]);
    }
}
