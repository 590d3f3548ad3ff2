//! Writes found by userfaultfd: [`WriteWatch`].

use std::io;

use nix::errno::Errno;
use tranship_sys::huge::HUGE_PAGE;
use tranship_sys::pagemap::Pagemap;
use tranship_sys::writes::WriteWatch;
use tranship_types::PageRange;

use super::DirtyTracker;

use crate::page_set::PageSet;
use crate::survey::Space;

/// Of a sample: bytes that are watched together, where they are not in a huge page.
const PIECE: u64 = 64 << 10;

/// The watch over a process. The kernel forgets it when the process executes another program.
#[derive(Debug)]
pub(super) struct WriteProtect {
    watch: WriteWatch,
    /// There was a look: what is watched now may be watched by this one.
    has_looked: bool,
    /// Where marks of another watch may stand: nothing is known of these mappings, though they may be watched.
    doubtful: PageSet,
    /// Where it is only to be known how much is written.
    sample: Option<Sample>,
}

/// The watch over one of so many pieces of what was there at the last look.
#[derive(Debug, Default)]
struct Sample {
    every: u64,
    there: PageSet,
    /// The pieces.
    watched: PageSet,
}

impl WriteProtect {
    /// Watches one of `every` pieces of the memory. Fails with `Unsupported` for a process that cannot be made to open a userfaultfd.
    pub fn begin(pid: u32, every: u64) -> io::Result<Self> {
        let sample = (every > 1).then(|| Sample { every, ..Sample::default() });
        Ok(Self { watch: WriteWatch::inject(pid)?, has_looked: false, doubtful: PageSet::default(), sample })
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

    /// Frees a mapping that is armed now of the marks of an earlier watch, if there are any: whether there are none now. To take them away costs the kernel
    /// far more time than to find that there are none.
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

impl WriteProtect {
    /// Arms the pieces of a sample anew, and finds them.
    fn look_at_sample(
        &mut self,
        space: &Space,
        every: u64,
        found: &mut dyn FnMut(&PageRange, PageRange),
    ) -> io::Result<Sample> {
        let mut pagemap = Pagemap::open_writable(space.pid)?;
        let mut sample = Sample { every, ..Sample::default() };
        for range in &space.ranges {
            // What cannot be watched counts as written.
            if !self.arm(space.pid, range)? || !self.has_no_marks(&pagemap, range) {
                continue;
            }
            let (mut runs, mut huge) = (Vec::new(), PageSet::default());
            pagemap.huge(range.start, range.end, |start, end| huge.insert(PageRange { start, end }))?;
            pagemap.populated(range.start, range.end, |start, end| runs.push(PageRange { start, end }))?;
            for run in runs {
                // A part of a huge page is not watched without its being torn into small ones.
                let small = pieces(run, PIECE, every).filter(|piece| huge.within(*piece).is_empty());
                let large = huge.within(run).into_iter().flat_map(|run| pieces(run, HUGE_PAGE, every));
                for piece in small.chain(large) {
                    pagemap.written(piece.start, piece.end, true, |_, _| {})?;
                    sample.watched.insert(piece);
                    found(range, piece);
                }
                sample.there.insert(run);
            }
        }
        Ok(sample)
    }
}

/// One of each `every` pieces of the address space, drawn by their numbers: so much of it as is in `run`.
fn pieces(run: PageRange, piece: u64, every: u64) -> impl Iterator<Item = PageRange> {
    let stride = piece * every;
    (run.start / stride..run.end.div_ceil(stride)).filter_map(move |number| {
        let start = number * stride + drawn(number) % every * piece;
        let (start, end) = (start.max(run.start), (start + piece).min(run.end));
        (start < end).then_some(PageRange { start, end })
    })
}

/// The end of a round of SplitMix64 (Steele and others, 2014), so that what a program does at regular distances is met as often as all else.
fn drawn(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

impl DirtyTracker for WriteProtect {
    fn look(&mut self, space: &Space, found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        if let Some(every) = self.sample.as_ref().map(|sample| sample.every) {
            self.sample = Some(self.look_at_sample(space, every, found)?);
            self.has_looked = true;
            return Ok(());
        }
        let mut pagemap = Pagemap::open_writable(space.pid)?;
        for range in &space.ranges {
            let found = |start, end| found(range, PageRange { start, end });
            if self.tells(&pagemap, range) {
                // It is not armed again: if the kernel has ended its watch since it was asked, the marks are passed over now, and the next look finds
                // that it is not watched. Armed, it would be believed all that it has kept.
                pagemap.written(range.start, range.end, true, found)?;
                continue;
            }
            let armed = self.arm(space.pid, range)?;
            let is_watched = armed && pagemap.is_watched(range.start, range.end);
            if is_watched && self.has_no_marks(&pagemap, range) {
                // What has no mark counts as written, and gets one in the instant in which it is found.
                self.doubtful.remove(*range);
                pagemap.written(range.start, range.end, true, found)?;
            } else {
                // Armed first: what is written after that is found by the next look. Until here no mark tells anything, and
                // what cannot be freed of them (it changes just now), or is watched by somebody else, tells nothing in the next look either.
                self.doubtful.insert(*range);
                pagemap.written(range.start, range.end, armed, |_, _| {})?;
                pagemap.populated(range.start, range.end, found)?;
            }
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

    fn left(&self, space: &Space) -> io::Result<u64> {
        let mut left = 0;
        self.peek(space, &mut |_, run, written| {
            let bytes = |runs: Vec<PageRange>| runs.iter().map(PageRange::len).sum::<u64>();
            left += match &self.sample {
                _ if !written => 0,
                None => run.len(),
                // What was not there before has been written.
                Some(sample) => {
                    run.len() - bytes(sample.there.within(run)) + sample.every * bytes(sample.watched.within(run))
                }
            };
        })?;
        Ok(left)
    }

    fn again(&self, pid: u32, range: PageRange, found: &mut dyn FnMut(PageRange)) -> io::Result<()> {
        let pagemap = Pagemap::open(pid)?;
        if self.tells(&pagemap, &range) {
            pagemap.written(range.start, range.end, false, |start, end| found(PageRange { start, end }))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_its_part_of_all_that_there_is() {
        const EVERY: u64 = 16;
        let run = PageRange { start: 7 << 30, end: 8 << 30 };
        let all: Vec<PageRange> = pieces(run, PIECE, EVERY).collect();
        assert_eq!(all.iter().map(PageRange::len).sum::<u64>(), run.len() / EVERY);
        assert!(all.windows(2).all(|two| two[0].end <= two[1].start) && all[0].start >= run.start);
        // Whatever part of it is looked at: also every other 64 KiB.
        let odd = all.iter().filter(|piece| piece.start / PIECE % 2 == 1).count();
        assert!(odd.abs_diff(all.len() / 2) < all.len() / 10, "{odd} of {}", all.len());
        // Cut anywhere, it is the same sample.
        let middle = all[all.len() / 2].start + 4096;
        let parts = [PageRange { end: middle, ..run }, PageRange { start: middle, ..run }];
        let cut: u64 = parts.into_iter().flat_map(|part| pieces(part, PIECE, EVERY)).map(|piece| piece.len()).sum();
        assert_eq!(cut, run.len() / EVERY);
    }
}
