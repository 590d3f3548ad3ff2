//! Which pages of a task hold data: PAGEMAP_SCAN (Documentation/admin-guide/mm/pagemap.rst), and the pagemap file itself
//! on kernels before 6.7, which do not have it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

const PAGE: u64 = 4096;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<ScanArg>() == 96);
const _: () = assert!(size_of::<PageRegion>() == 24);

const PAGEMAP_SCAN: u64 = nix::request_code_readwrite!(b'f', 16, size_of::<ScanArg>());
const _: () = assert!(PAGEMAP_SCAN == 0xc060_6610);

const WP_MATCHING: u64 = 1 << 0;
const CHECK_WPASYNC: u64 = 1 << 1;

const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;
const PAGE_IS_GUARD: u64 = 1 << 8;

/// [`PAGE_IS_GUARD`] where the kernel has that category (since 6.15), else 0. A guard page (`MADV_GUARD_INSTALL`) has an entry like one that is
/// swapped out, but no content: nobody can read it.
fn guards() -> u64 {
    static GUARDS: OnceLock<u64> = OnceLock::new();
    *GUARDS.get_or_init(|| {
        let question = ScanArg { return_mask: PAGE_IS_GUARD, category_mask: PAGE_IS_GUARD, ..ScanArg::default() };
        let known = Pagemap::open(std::process::id()).and_then(|own| own.regions(0, PAGE, &question, |_| {}));
        if known.is_ok() { PAGE_IS_GUARD } else { 0 }
    })
}

/// What a page table tells of a huge page under a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// It is there, and may have been written since it was protected.
    Written,
    /// It is there, and was not.
    Unwritten,
    /// It is not there, but protected; or it is there, and was not written.
    MarkOrUnwritten,
}

/// The page table of one task. Of anonymous mappings it is not asked whether a page is one of a file, because the kernel would
/// have to look at each page's own record for that, which takes ten times as long.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    scan: bool,
}

impl Pagemap {
    /// Opens `/proc/PID/pagemap`.
    pub fn open(pid: u32) -> io::Result<Self> {
        Ok(Self { file: File::open(format!("/proc/{pid}/pagemap"))?, scan: true })
    }

    /// Opens it so that [`Pagemap::written`] can re-arm the watch.
    pub fn open_writable(pid: u32) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/pagemap"))?;
        Ok(Self { file, scan: true })
    }

    /// Calls `found` with every run of private anonymous pages below `[start, end)` that hold data and were written since
    /// the watch over them ([`crate::writes::WriteWatch`]) was armed; what is not watched counts as written. With `rearm`
    /// the runs are armed again in the same instant, so that no write falls in between.
    pub fn written(&self, start: u64, end: u64, rearm: bool, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        let but = PAGE_IS_PFNZERO | guards();
        let arg = ScanArg {
            flags: if rearm { WP_MATCHING } else { 0 },
            category_inverted: but,
            category_mask: but | PAGE_IS_WRITTEN,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        self.scan(start, end, &arg, &mut found)
    }

    /// Whether there is a page in `[start, end)`, a part of one mapping, that has a mark: as if it had not been written since a watch over it was armed.
    pub fn is_marked(&self, start: u64, end: u64) -> io::Result<bool> {
        let mut marked = false;
        self.scan_holding(start, end, PAGE_IS_WRITTEN, &mut |_, _| marked = true)?;
        Ok(marked)
    }

    /// Whether the mapping `[start, end)`, one line of `maps`, is being watched. The kernel forgets the watch over a mapping that
    /// `mremap` has merged with its neighbour, but not the marks of its pages, which then tell of no write any more.
    pub fn is_watched(&self, start: u64, end: u64) -> bool {
        let arg = ScanArg {
            flags: CHECK_WPASYNC,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        // The check is one of the mapping, whatever its pages are: two of them are enough.
        [start, end - PAGE].into_iter().all(|page| self.regions(page, page + PAGE, &arg, |_| {}).is_ok())
    }

    /// Calls `found` with every run of private anonymous pages below `[start, end)`, a part of one mapping, that hold data, and
    /// whether they were written since the watch over them was armed. Nothing is re-armed.
    pub fn populated_or_written(&self, start: u64, end: u64, mut found: impl FnMut(u64, u64, bool)) -> io::Result<()> {
        // Most pages are there and were not written. To tell of a page takes the kernel longer than to pass it over, so it is
        // asked for all the others: what it does not tell of is such a page. It leaves out no part of a mapping.
        let arg = ScanArg {
            category_inverted: PAGE_IS_PRESENT,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_WRITTEN | PAGE_IS_PFNZERO,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_WRITTEN | PAGE_IS_PFNZERO | guards(),
            ..ScanArg::default()
        };
        let mut at = start;
        self.regions(start, end, &arg, |region| {
            if at < region.start {
                found(at, region.start, false);
            }
            let is = |category| region.categories & category != 0;
            if is(PAGE_IS_PRESENT | PAGE_IS_SWAPPED) && !is(PAGE_IS_PFNZERO | PAGE_IS_GUARD) {
                found(region.start, region.end, is(PAGE_IS_WRITTEN));
            }
            at = region.end;
        })?;
        if at < end {
            found(at, end, false);
        }
        Ok(())
    }

    /// Calls `found` with every run of pages in `[start, end)`, of shared memory say, that the page table does not prove to be
    /// unwritten since they were write-protected ([`crate::writes::WriteWatch::protect`]): also those that are not in the page
    /// table at all. The kernel answers just this question fast: 0.5 ms for a GiB.
    pub fn unproven(&self, start: u64, end: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        let arg = ScanArg { category_mask: PAGE_IS_WRITTEN, return_mask: PAGE_IS_WRITTEN, ..ScanArg::default() };
        self.scan(start, end, &arg, &mut found)
    }

    /// The same of memory in reserved huge pages (hugetlb). Of these the kernel does not say that a page was written which is
    /// not in the page table.
    pub fn unproven_huge(&self, start: u64, end: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        let known = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let arg = ScanArg {
            category_inverted: PAGE_IS_PRESENT,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_WRITTEN,
            return_mask: known | PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        self.regions(start, end, &arg, |region| {
            // A mark is an entry like one of a page that is swapped out.
            if region.categories & PAGE_IS_WRITTEN != 0 || region.categories & known == 0 {
                found(region.start, region.end);
            }
        })
    }

    /// Calls `found` with every run `[start, end)` of private anonymous pages below `[start, end)` that hold data: in
    /// memory or swapped out, and not the shared zero page. Runs come in order and do not overlap.
    pub fn populated(&mut self, start: u64, end: u64, found: impl FnMut(u64, u64)) -> io::Result<()> {
        self.holding(start, end, PAGE_IS_PFNZERO, found)
    }

    /// The same in a private mapping of a file: the pages that are not the file's any more, because they were written.
    pub fn copied(&mut self, start: u64, end: u64, found: impl FnMut(u64, u64)) -> io::Result<()> {
        self.holding(start, end, PAGE_IS_PFNZERO | PAGE_IS_FILE, found)
    }

    /// The same in a private mapping of reserved huge pages (hugetlb) over which there is a watch, with what the page table tells of each run.
    pub fn copied_huge(&self, start: u64, end: u64, mut found: impl FnMut(u64, u64, Copied)) -> io::Result<()> {
        let arg = ScanArg {
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        self.regions(start, end, &arg, |region| {
            let is = |category| region.categories & category != 0;
            // Such pages are never swapped out: it is a mark, or a page that the kernel is moving to another place.
            let copied = if is(PAGE_IS_WRITTEN) {
                Copied::Written
            } else if is(PAGE_IS_PRESENT) {
                Copied::Unwritten
            } else {
                Copied::MarkOrUnwritten
            };
            found(region.start, region.end, copied);
        })
    }

    /// Calls `found` with every run in `[start, end)` that is in huge pages as a whole. Kernels before 6.7 do not tell.
    pub fn huge(&self, start: u64, end: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        let arg = ScanArg { category_mask: PAGE_IS_HUGE, return_mask: PAGE_IS_HUGE, ..ScanArg::default() };
        self.scan(start, end, &arg, &mut found)
    }

    /// Calls `found` with every page in `[start, end)` that has an entry which is neither a page nor a place in swap space nor a guard: a mark, as of a
    /// page that was poisoned. (An entry that says in which of 16 and more swap areas a page is counts, too.)
    pub fn marks(&self, start: u64, end: u64, mut found: impl FnMut(u64)) -> io::Result<()> {
        const MARK: u64 = 16;
        const TYPE: u64 = 0b1_1111;
        let but = guards() | PAGE_IS_PRESENT;
        let question = ScanArg {
            category_inverted: but,
            category_mask: but | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_SWAPPED,
            ..ScanArg::default()
        };
        let mut runs = Vec::new();
        self.scan(start, end, &question, &mut |start, end| runs.push((start, end)))?;
        let mut entries = [0u8; 8 * 512];
        for (start, end) in runs {
            for at in (start..end).step_by(512 * PAGE as usize) {
                let want = (((end - at) / PAGE * 8) as usize).min(entries.len());
                self.file.read_exact_at(&mut entries[..want], at / PAGE * 8)?;
                for (page, entry) in entries[..want].chunks_exact(8).enumerate() {
                    if u64::from_le_bytes(entry.try_into().expect("chunks of 8")) & TYPE >= MARK {
                        found(at + page as u64 * PAGE);
                    }
                }
            }
        }
        Ok(())
    }

    /// The first page in `[start, end)` that [`Self::populated`] would find.
    pub fn first_populated(&mut self, start: u64, end: u64) -> io::Result<Option<u64>> {
        if !self.scan {
            let mut first = None;
            self.populated(start, end, |at, _| first = first.or(Some(at)))?;
            return Ok(first);
        }
        let but = PAGE_IS_PFNZERO | guards();
        let mut region = PageRegion::default();
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start,
            end,
            vec: &raw mut region as u64,
            vec_len: 1,
            max_pages: 1,
            category_inverted: but,
            category_mask: but,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArg::default()
        };
        // SAFETY: the kernel writes at most one region to `vec`, which points to one, and the argument has the size that the
        // request number states.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) } {
            0 => Ok(None),
            1 => Ok(Some(region.start)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn holding(&mut self, start: u64, end: u64, but: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        if self.scan {
            match self.scan_holding(start, end, but, &mut found) {
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.scan = false,
                done => return done,
            }
        }
        self.read_populated(start, end, &mut found)
    }

    fn scan_holding(&self, start: u64, end: u64, but: u64, found: &mut impl FnMut(u64, u64)) -> io::Result<()> {
        let but = but | guards();
        let arg = ScanArg {
            category_inverted: but,
            category_mask: but,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArg::default()
        };
        self.scan(start, end, &arg, found)
    }

    fn scan(&self, start: u64, end: u64, question: &ScanArg, found: &mut impl FnMut(u64, u64)) -> io::Result<()> {
        self.regions(start, end, question, |region| found(region.start, region.end))
    }

    fn regions(&self, start: u64, end: u64, question: &ScanArg, mut found: impl FnMut(&PageRegion)) -> io::Result<()> {
        let mut regions = [PageRegion::default(); 512];
        let mut at = start;
        while at < end {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: at,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                ..*question
            };
            // SAFETY: the kernel writes at most `vec_len` regions to `vec`, which points to that many, and the argument
            // has the size that the request number states.
            let count = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            regions[..count.min(regions.len())].iter().for_each(&mut found);
            if arg.walk_end <= at {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
            at = arg.walk_end;
        }
        Ok(())
    }

    fn read_populated(&self, start: u64, end: u64, found: &mut impl FnMut(u64, u64)) -> io::Result<()> {
        self.entries(start, end, 0, |start, end, _| found(start, end))
    }

    /// Calls `found` with every run of private anonymous pages below `[start, end)` that hold data, and whether they were
    /// written since the soft-dirty bits were cleared ([`crate::soft_dirty`]). Runs come in order and do not overlap.
    pub fn soft_dirty(&self, start: u64, end: u64, found: impl FnMut(u64, u64, bool)) -> io::Result<()> {
        const SOFT_DIRTY: u64 = 1 << 55;
        self.entries(start, end, SOFT_DIRTY, found)
    }

    /// Reads the entries themselves: the runs of pages that hold data, and whether they have `bit`.
    fn entries(&self, start: u64, end: u64, bit: u64, mut found: impl FnMut(u64, u64, bool)) -> io::Result<()> {
        let mut entries = [0u8; 8 * 4096];
        let mut runs = Runs::new(bit);
        let mut at = start;
        while at < end {
            let want = (((end - at) / PAGE * 8) as usize).min(entries.len());
            self.file.read_exact_at(&mut entries[..want], at / PAGE * 8)?;
            runs.take(at, &entries[..want], &mut found);
            at += want as u64 / 8 * PAGE;
        }
        runs.end(&mut found);
        Ok(())
    }
}

/// Runs of pages that hold data, out of entries of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
pub(crate) struct Runs {
    bit: u64,
    run: Option<(u64, u64, bool)>,
}

impl Runs {
    /// Pages with `bit` set are told from those without.
    pub fn new(bit: u64) -> Self {
        Self { bit, run: None }
    }

    /// Takes the entries of the pages from `at` on.
    pub fn take(&mut self, mut at: u64, entries: &[u8], found: &mut impl FnMut(u64, u64, bool)) {
        const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
        const FILE_OR_SHARED: u64 = 1 << 61;
        const GUARD: u64 = 1 << 58;
        for entry in entries.chunks_exact(8) {
            let entry = u64::from_le_bytes(entry.try_into().expect("chunks of 8"));
            if entry & PRESENT_OR_SWAPPED != 0 && entry & (FILE_OR_SHARED | GUARD) == 0 {
                let has = entry & self.bit != 0;
                self.run = match self.run {
                    Some((from, to, same)) if to == at && same == has => Some((from, at + PAGE, has)),
                    other => {
                        if let Some((from, to, had)) = other {
                            found(from, to, had);
                        }
                        Some((at, at + PAGE, has))
                    }
                };
            }
            at += PAGE;
        }
    }

    /// Gives the last run.
    pub fn end(self, found: &mut impl FnMut(u64, u64, bool)) {
        if let Some((from, to, has)) = self.run {
            found(from, to, has);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn collect(map: &mut Pagemap, start: u64, len: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        map.populated(start, start + len, |s, e| out.push((s - start, e - start))).unwrap();
        out
    }

    #[test]
    fn both_ways_find_just_the_pages_that_were_written() {
        // So much that the allocator maps it anew, whatever other tests have given back to it.
        let mut memory = vec![0u8; 64 << 20];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let skip = (start - memory.as_ptr() as u64) as usize;
        for page in [3usize, 4, 9] {
            memory[skip + page * PAGE as usize] = 1;
        }
        let mut map = Pagemap::open(std::process::id()).unwrap();
        let expected = vec![(3 * PAGE, 5 * PAGE), (9 * PAGE, 10 * PAGE)];
        assert_eq!(collect(&mut map, start, 32 * PAGE), expected);
        map.scan = false;
        assert_eq!(collect(&mut map, start, 32 * PAGE), expected);
    }

    #[test]
    fn both_ways_tell_pages_of_a_file_from_those_that_were_written() {
        use std::os::fd::AsFd;
        let path = std::env::temp_dir().join(format!("tranship-pagemap-{}", std::process::id()));
        std::fs::write(&path, vec![1; 8 * PAGE as usize]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), 8 * PAGE as usize, protection, flags, fd, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        for page in 0..8 {
            let at = memory.cast::<u8>().wrapping_add(page * PAGE as usize);
            // SAFETY: within the mapping, which nobody else knows.
            unsafe {
                assert_eq!(at.read_volatile(), 1);
                if [2, 5, 6].contains(&page) {
                    at.write_volatile(2);
                }
            }
        }
        let mut map = Pagemap::open(std::process::id()).unwrap();
        for scan in [true, false] {
            map.scan = scan;
            let (start, mut found) = (memory as u64, Vec::new());
            map.copied(start, start + 8 * PAGE, |s, e| found.push(((s - start) / PAGE, (e - start) / PAGE))).unwrap();
            assert_eq!(found, [(2, 3), (5, 7)]);
        }
        // SAFETY: exactly the mapping made above.
        unsafe { libc::munmap(memory, 8 * PAGE as usize) };
    }

    #[test]
    fn guard_pages_hold_nothing() {
        const GUARD_INSTALL: i32 = 102;
        let scratch = Scratch::map(8, libc::MAP_PRIVATE).unwrap();
        let start = scratch.start();
        for page in 0..8 {
            // SAFETY: within the scratch mapping.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>((start + page * PAGE) as usize).write_volatile(1) };
        }
        let guard = std::ptr::with_exposed_provenance_mut::<libc::c_void>((start + 2 * PAGE) as usize);
        // SAFETY: within the scratch mapping, to which nobody has a reference.
        if unsafe { libc::madvise(guard, PAGE as usize, GUARD_INSTALL) } != 0 || guards() == 0 {
            println!("skipped: this kernel has no guard pages, or does not tell of them");
            return;
        }
        let mut map = Pagemap::open(std::process::id()).unwrap();
        let expected = [(0, 2 * PAGE), (3 * PAGE, 8 * PAGE)];
        assert_eq!(collect(&mut map, start, 8 * PAGE), expected);
        let (mut written, mut either) = (Vec::new(), Vec::new());
        map.written(start, start + 8 * PAGE, false, |s, e| written.push((s - start, e - start))).unwrap();
        map.populated_or_written(start, start + 8 * PAGE, |s, e, _| either.push((s - start, e - start))).unwrap();
        assert_eq!((written.as_slice(), either.as_slice()), (&expected[..], &expected[..]));
        map.marks(start, start + 8 * PAGE, |address| panic!("{address:#x} is a guard page")).unwrap();
        assert_eq!(map.first_populated(start + 2 * PAGE, start + 8 * PAGE).unwrap(), Some(start + 3 * PAGE));
        map.scan = false;
        assert_eq!(collect(&mut map, start, 8 * PAGE), expected);
    }
}
