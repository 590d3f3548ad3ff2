//! Which parts of files are being written, whoever writes them: the kernel's tracepoints tell of each folio of the page cache that
//! becomes dirty (`writeback:writeback_dirty_folio`), through a write or through a mapping, and of each write that goes past the
//! cache, when it begins (`iomap:iomap_dio_rw_begin`) and when it has arrived (`iomap:iomap_dio_complete`): who reads between the two may
//! read what was there before. Of ext4 they tell of calls that clear a part (`ext4:ext4_punch_hole`, `ext4:ext4_zero_range`,
//! `ext4:ext4_truncate_enter`), since in large folios zeros may take the place of content without the folio's becoming dirty.
//! They are read with perf_event_open(2), so that nothing is left when the reader dies.
//!
//! A folio that is dirty already does not become so again. So whoever wants to know of later writes has to write the file back
//! first ([`write_back`]), and then to look at it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::perf::{Ring, checked};
use crate::processors::{listed, online};
use crate::tracepoint::{Event, RECORD_SAMPLE, filter, open, tracing};

const PAGE: u64 = 4096;

/// Shifting a file's content (`FALLOC_FL_COLLAPSE_RANGE`, `FALLOC_FL_INSERT_RANGE`) changes what no event tells of.
const SHIFTS: &str = "mode & 40";

/// A part of a file that may have been written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The file's inode, of whatever filesystem.
    pub ino: u64,
    /// From this byte.
    pub start: u64,
    /// To before this one.
    pub end: u64,
    /// It is a folio that became dirty, however little of it was written, and however that came about. Nothing more is told of it
    /// while it is dirty.
    pub folio: bool,
}

/// The log of a whole machine.
#[derive(Debug)]
pub struct DirtyLog {
    rings: Vec<Ring>,
    online: String,
    folio: Event<2>,
    direct: Event<3>,
    arrived: Event<3>,
    cleared: [Event<3>; 2],
    cut: Event<1>,
    largest_folio: u64,
}

impl DirtyLog {
    /// Begins it.
    ///
    /// # Errors
    /// If the kernel lacks one of the tracepoints (Linux before 6.6, without ext4, or configured so), or refuses: it takes CAP_PERFMON.
    pub fn start() -> io::Result<Self> {
        let tracing = tracing()?;
        let folio = Event::find(&tracing, "writeback/writeback_dirty_folio", ["ino", "index"])?;
        let direct = Event::find(&tracing, "iomap/iomap_dio_rw_begin", ["ino", "pos", "count"])?;
        let arrived = Event::find(&tracing, "iomap/iomap_dio_complete", ["ino", "pos", "ret"])?;
        let clear = |name| Event::find(&tracing, name, ["ino", "offset", "len"]);
        let cleared = [clear("ext4/ext4_punch_hole")?, clear("ext4/ext4_zero_range")?];
        let cut = Event::find(&tracing, "ext4/ext4_truncate_enter", ["ino"])?;
        let shift = Event::find(&tracing, "syscalls/sys_enter_fallocate", ["mode"])?;
        let online = online()?;
        let mut rings = Vec::new();
        for cpu in listed(&online) {
            let first = open(folio.id, cpu)?;
            let shift = open(shift.id, cpu)?;
            filter(&shift, SHIFTS)?;
            let others = [direct.id, arrived.id, cleared[0].id, cleared[1].id, cut.id].map(|id| open(id, cpu));
            let others = others.into_iter().chain([Ok(shift)]).collect::<io::Result<Vec<_>>>()?;
            rings.push(Ring::new(first, others)?);
        }
        let largest_folio = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(1 << 20);
        Ok(Self { rings, online, folio, direct, arrived, cleared, cut, largest_folio })
    }

    /// What polls as readable when a ring is filling up.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(AsFd::as_fd)
    }

    /// Tells of everything since the last call. False: that was not all; anything may have been written.
    pub fn read(&mut self, mut tell: impl FnMut(Written)) -> bool {
        let (folio, largest) = (self.folio, self.largest_folio);
        let (direct, arrived, cleared, cut) = (self.direct, self.arrived, self.cleared, self.cut);
        let mut complete = online().is_ok_and(|now| now == self.online);
        for ring in &mut self.rings {
            complete &= ring.read(|kind, record| {
                // The size of the raw bytes comes before them.
                let (RECORD_SAMPLE, Some(raw)) = (kind, record.get(4..)) else { return kind != RECORD_SAMPLE };
                let written = if let Some([ino, index]) = folio.fields(raw) {
                    let start = index.saturating_mul(PAGE);
                    // A folio's size is not told, but it is a power of two, and the folio aligned to it.
                    let size = match index {
                        0 => largest,
                        _ => (PAGE << index.trailing_zeros().min(32)).min(largest),
                    };
                    Written { ino, start, end: start.saturating_add(size), folio: true }
                } else if let Some([ino, start, count]) = direct.fields(raw) {
                    Written { ino, start, end: start.saturating_add(count), folio: false }
                } else if let Some([ino, end, bytes]) = arrived.fields(raw) {
                    // What failed, with a negative number, was told of when it began.
                    let bytes = u64::try_from(bytes.cast_signed()).unwrap_or(0);
                    Written { ino, start: end.saturating_sub(bytes), end, folio: false }
                } else if let Some([ino, start, length]) = cleared.iter().find_map(|event| event.fields(raw)) {
                    Written { ino, start, end: start.saturating_add(length), folio: false }
                } else if let Some([ino]) = cut.fields(raw) {
                    // It is not told where.
                    Written { ino, start: 0, end: u64::MAX, folio: false }
                } else {
                    // Content was shifted.
                    return false;
                };
                tell(written);
                true
            });
        }
        complete
    }
}

/// Has a file's dirty pages written to its disk, without a commit of the filesystem's journal. With `wait`, it returns when they
/// are clean, so that the next write to each is seen; else they are only on their way.
///
/// # Errors
/// The disk's, or the filesystem's.
pub fn write_back(file: impl AsFd, wait: bool) -> io::Result<()> {
    let and_wait = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let flags = libc::SYNC_FILE_RANGE_WRITE | if wait { and_wait } else { 0 };
    // SAFETY: the call takes numbers.
    checked(unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, flags) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// Needs root and a file on a disk, which the build's own directory is.
    #[test]
    fn writes_through_descriptors_and_mappings_are_told() {
        let directory = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let path = directory.join(format!("dirty-log-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut log = match DirtyLog::start() {
            Ok(log) => log,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        file.write_all_at(&vec![7; 64 << 12], 0).unwrap();
        write_back(&file, true).unwrap();
        let ino = file.metadata().unwrap().ino();
        log.read(|_| {});
        file.write_all_at(b"x", 5 << 12).unwrap();
        // SAFETY: a mapping of an open file's first pages, which is written within its bounds, and then taken away.
        unsafe {
            let length = 16 << 12;
            let flags = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(std::ptr::null_mut(), length, flags, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert!(base != libc::MAP_FAILED);
            base.cast::<u8>().add(11 << 12).write_volatile(9);
            libc::munmap(base, length);
        }
        let mut pages = BTreeSet::new();
        log.read(|w| {
            if w.ino == ino {
                pages.extend(w.start / PAGE..w.end / PAGE);
            }
        });
        assert!(pages.contains(&5) && pages.contains(&11), "{pages:?}");
    }
}
