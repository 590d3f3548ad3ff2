//! Which parts of files are being written, whoever writes them: the kernel's tracepoints tell of each folio of the page cache that
//! becomes dirty (`writeback:writeback_dirty_folio`), through a write or through a mapping, and of each write that goes past the
//! cache (`iomap:iomap_dio_rw_begin`). They are read with perf_event_open(2), so that nothing is left when the reader dies.
//!
//! A folio that is dirty already does not become so again. So whoever wants to know of later writes has to write the file back
//! first ([`write_back`]), and then to look at it.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::perf::{self, Attributes, Ring, checked, cpus, online};

const PAGE: u64 = 4096;

const TYPE_TRACEPOINT: u32 = 2;
const SAMPLE_RAW: u64 = 1 << 10;
const RECORD_SAMPLE: u32 = 9;
const IOC_SET_FILTER: libc::c_ulong = 0x4008_2406;

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
}

/// The log of a whole machine.
#[derive(Debug)]
pub struct DirtyLog {
    rings: Vec<Ring>,
    online: String,
    folio: Event<2>,
    direct: Event<3>,
    largest_folio: u64,
}

impl DirtyLog {
    /// Begins it.
    ///
    /// # Errors
    /// If the kernel lacks one of the tracepoints (Linux before 6.6, or configured so), or refuses: it takes CAP_PERFMON.
    pub fn start() -> io::Result<Self> {
        let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let tracing = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        let folio = Event::find(&tracing, "writeback/writeback_dirty_folio", ["ino", "index"])?;
        let direct = Event::find(&tracing, "iomap/iomap_dio_rw_begin", ["ino", "pos", "count"])?;
        let shift = Event::find(&tracing, "syscalls/sys_enter_fallocate", ["mode"])?;
        let online = online()?;
        let mut rings = Vec::new();
        for cpu in cpus(&online) {
            let first = open(folio.id, cpu)?;
            let others = [open(direct.id, cpu)?, open(shift.id, cpu)?];
            filter(&others[1], SHIFTS)?;
            rings.push(Ring::new(first, others)?);
        }
        let largest_folio = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(1 << 20);
        Ok(Self { rings, online, folio, direct, largest_folio })
    }

    /// What polls as readable when a ring is filling up.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(AsFd::as_fd)
    }

    /// Tells of everything since the last call. False: that was not all; anything may have been written.
    pub fn read(&mut self, mut tell: impl FnMut(Written)) -> bool {
        let (folio, direct, largest) = (self.folio, self.direct, self.largest_folio);
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
                    Written { ino, start, end: start.saturating_add(size) }
                } else if let Some([ino, start, count]) = direct.fields(raw) {
                    Written { ino, start, end: start.saturating_add(count) }
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

/// A tracepoint, and where in its records some fields are: offset and size.
#[derive(Debug, Clone, Copy)]
struct Event<const N: usize> {
    id: u16,
    fields: [(usize, usize); N],
}

impl<const N: usize> Event<N> {
    fn find(tracing: &OwnedFd, name: &str, fields: [&str; N]) -> io::Result<Self> {
        let path = format!("events/{name}/format");
        let mut text = String::new();
        let file = openat(tracing, path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        std::fs::File::from(file).read_to_string(&mut text)?;
        Self::parse(&text, fields).ok_or_else(|| io::Error::other(format!("the tracepoint {name} has another form")))
    }

    fn parse(text: &str, fields: [&str; N]) -> Option<Self> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID: ")?.trim().parse().ok())?;
        let mut found = [(0, 0); N];
        for (place, name) in found.iter_mut().zip(fields) {
            let line =
                text.lines().find(|line| line.split(';').next().is_some_and(|d| d.ends_with(&format!(" {name}"))))?;
            let number = |key: &str| line.split(';').find_map(|part| part.trim().strip_prefix(key)?.parse().ok());
            *place = (number("offset:")?, number("size:")?);
        }
        Some(Self { id, fields: found })
    }

    /// The fields of a record, if it is one of this event.
    fn fields(&self, raw: &[u8]) -> Option<[u64; N]> {
        if raw.get(..2)? != self.id.to_ne_bytes() {
            return None;
        }
        let mut values = [0; N];
        for (value, (offset, size)) in values.iter_mut().zip(self.fields) {
            *value = match raw.get(offset..offset + size)? {
                bytes if size == 8 => u64::from_ne_bytes(bytes.try_into().ok()?),
                bytes if size == 4 => u32::from_ne_bytes(bytes.try_into().ok()?).into(),
                _ => return None,
            };
        }
        Some(values)
    }
}

fn open(id: u16, cpu: i32) -> io::Result<OwnedFd> {
    perf::open(&Attributes::new(TYPE_TRACEPOINT, id.into(), SAMPLE_RAW, 0), cpu)
}

fn filter(event: &OwnedFd, text: &str) -> io::Result<()> {
    let text = std::ffi::CString::new(text)?;
    // SAFETY: the request takes a string that ends with a zero, and copies it.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), IOC_SET_FILTER, text.as_ptr()) })
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

    #[test]
    fn the_form_of_a_tracepoint_is_read() {
        let text = "name: x\nID: 1009\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
                    \tfield:char name[32];\toffset:8;\tsize:32;\tsigned:0;\n\tfield:ino_t ino;\toffset:40;\tsize:8;\tsigned:0;\n";
        let event = Event::parse(text, ["ino"]).unwrap();
        assert_eq!((event.id, event.fields), (1009, [(40, 8)]));
        assert!(Event::parse(text, ["index"]).is_none());
        let mut raw = [0; 48];
        raw[..2].copy_from_slice(&1009u16.to_ne_bytes());
        raw[40] = 7;
        assert_eq!(event.fields(&raw), Some([7]));
        assert_eq!(event.fields(&raw[..44]), None);
    }

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
