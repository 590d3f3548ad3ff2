//! Writes found by userfaultfd: [`WriteWatch`].

use std::io;

use nix::errno::Errno;
use tranship_sys::pagemap::Pagemap;
use tranship_sys::writes::WriteWatch;
use tranship_types::PageRange;

use super::DirtyTracker;

use crate::maps::Mapping;
use crate::page_set::PageSet;
use crate::register;
use crate::survey::Space;

/// The watch over a process. The kernel forgets it when the process executes another program.
#[derive(Debug)]
pub(super) struct WriteProtect {
    watch: WriteWatch,
    /// There was a look: what is watched now may be watched by this one.
    has_looked: bool,
    /// Where marks of another watch may stand: nothing is known of these mappings, though they may be watched.
    doubtful: PageSet,
}

impl WriteProtect {
    /// Fails with `Unsupported` for a process that cannot be made to open a userfaultfd.
    pub fn begin(pid: u32) -> io::Result<Self> {
        Ok(Self { watch: WriteWatch::inject(pid)?, has_looked: false, doubtful: PageSet::default() })
    }

    /// Registers the mappings that have pages in `ranges`, each as a whole. Returns them as they are at this moment, which may
    /// differ from `ranges`.
    fn register(&mut self, pid: u32, pids: &[u32], ranges: &[PageRange]) -> io::Result<Vec<PageRange>> {
        let mut places = PageSet::default();
        ranges.iter().for_each(|range| places.insert(*range));
        let wanted = |mapping: &Mapping| mapping.is_private_anonymous() && !places.within(mapping.range).is_empty();
        let registered = match register::whole_mappings(&self.watch, pid, pids, wanted) {
            // It has executed another program: this is a new address space.
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => {
                self.watch = WriteWatch::inject(pid)?;
                register::whole_mappings(&self.watch, pid, pids, wanted)?
            }
            registered => registered?,
        };
        Ok(registered.into_iter().map(|mapping| mapping.range).collect())
    }

    /// Frees a mapping that is registered now of the marks of an earlier watch, if there are any: whether there are none now. To take them away costs the
    /// kernel far more time than to find that there are none.
    fn has_no_marks(&self, pagemap: &Pagemap, range: &PageRange) -> bool {
        match pagemap.is_marked(range.start, range.end) {
            Ok(false) => true,
            _ => self.watch.forget(range.start, range.end).is_ok(),
        }
    }

    /// Whether the marks of a mapping tell all that was written since they were set.
    fn tells(&self, pagemap: &Pagemap, range: &PageRange) -> bool {
        self.has_looked && pagemap.is_watched(range.start, range.end) && self.doubtful.within(*range).is_empty()
    }
}

impl DirtyTracker for WriteProtect {
    fn look(&mut self, space: &Space, pids: &[u32], found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        let mut pagemap = Pagemap::open_writable(space.pid)?;
        let (told, untold): (Vec<PageRange>, Vec<_>) =
            space.ranges.iter().copied().partition(|range| self.tells(&pagemap, range));
        for range in told {
            // It is not registered again: if the kernel has ended its watch since it was asked, the marks are passed over now, and the next look
            // finds that it is not watched. Registered, it would be believed all that it has kept.
            pagemap.written(range.start, range.end, true, |start, end| found(&range, PageRange { start, end }))?;
        }
        let registered = if untold.is_empty() { Vec::new() } else { self.register(space.pid, pids, &untold)? };
        let mut rest = PageSet::default();
        untold.iter().for_each(|range| rest.insert(*range));
        registered.iter().for_each(|range| rest.remove(*range));
        for range in registered {
            let is_watched = pagemap.is_watched(range.start, range.end);
            if is_watched && self.has_no_marks(&pagemap, &range) {
                // What has no mark counts as written, and gets one in the instant in which it is found.
                self.doubtful.remove(range);
                pagemap.written(range.start, range.end, true, |start, end| found(&range, PageRange { start, end }))?;
            } else {
                // Armed first: what is written after that is found by the next look. What cannot be freed of its marks (it changes just now) tells
                // nothing in the next look either.
                self.doubtful.insert(range);
                pagemap.written(range.start, range.end, true, |_, _| {})?;
                pagemap.populated(range.start, range.end, |start, end| found(&range, PageRange { start, end }))?;
            }
        }
        // What is not registered, or was another mapping when it was: no mark tells anything.
        for range in rest.all() {
            self.doubtful.insert(range);
            pagemap.populated(range.start, range.end, |start, end| found(&range, PageRange { start, end }))?;
        }
        self.has_looked = true;
        Ok(())
    }

    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        let pagemap = Pagemap::open(space.pid)?;
        for range in &space.ranges {
            let watched_all_along = self.tells(&pagemap, range);
            pagemap.populated_or_written(range.start, range.end, |start, end, written| {
                there(range, PageRange { start, end }, written || !watched_all_along);
            })?;
        }
        Ok(())
    }

    fn again(&self, pid: u32, range: PageRange, found: &mut dyn FnMut(PageRange)) -> io::Result<()> {
        let pagemap = Pagemap::open(pid)?;
        if self.tells(&pagemap, &range) {
            pagemap.written(range.start, range.end, false, |start, end| found(PageRange { start, end }))?;
        }
        Ok(())
    }
}
