//! Writes found by userfaultfd: [`WriteWatch`].

use std::io;

use nix::errno::Errno;
use tranship_sys::pagemap::Pagemap;
use tranship_sys::writes::WriteWatch;
use tranship_types::PageRange;

use super::DirtyTracker;
use crate::page_set::PageSet;
use crate::survey::Space;

/// The watch over a process. The kernel forgets it when the process executes another program.
#[derive(Debug)]
pub(super) struct WriteProtect {
    watch: WriteWatch,
    /// Where marks of an earlier watch may stand: nothing is known of these mappings, though they are watched.
    doubtful: PageSet,
}

impl WriteProtect {
    /// Fails with `Unsupported` for a process that cannot be made to open a userfaultfd.
    pub fn begin(pid: u32) -> io::Result<Self> {
        Ok(Self { watch: WriteWatch::inject(pid)?, doubtful: PageSet::default() })
    }

    fn arm(&mut self, pid: u32, range: &PageRange) -> io::Result<bool> {
        match self.watch.watch(range.start, range.end) {
            // It has executed another program: this is a new address space.
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => {
                self.watch = WriteWatch::inject(pid)?;
                self.watch.watch(range.start, range.end)
            }
            armed => armed,
        }
    }

    /// Whether the marks of a mapping tell all that was written since they were set.
    fn tells(&self, pagemap: &Pagemap, range: &PageRange) -> bool {
        pagemap.is_watched(range.start, range.end) && self.doubtful.within(*range).is_empty()
    }
}

impl DirtyTracker for WriteProtect {
    fn look(&mut self, space: &Space, found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        let mut pagemap = Pagemap::open_writable(space.pid)?;
        for range in &space.ranges {
            let watched_all_along = self.tells(&pagemap, range);
            let armed = self.arm(space.pid, range)?;
            let found = |start, end| found(range, PageRange { start, end });
            if watched_all_along {
                pagemap.written(range.start, range.end, armed, found)?;
            } else {
                // Armed first: what is written after that is found by the next look. Until here no mark tells anything, and
                // what cannot be freed of them (it changes just now) tells nothing in the next look either.
                if self.watch.forget(range.start, range.end).is_ok() {
                    self.doubtful.remove(*range);
                } else if armed {
                    self.doubtful.insert(*range);
                }
                pagemap.written(range.start, range.end, armed, |_, _| {})?;
                pagemap.populated(range.start, range.end, found)?;
            }
        }
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
