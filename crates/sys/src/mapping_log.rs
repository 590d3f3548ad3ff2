//! Which files got shared mappings, whoever made them and whether or not they are gone again: the kernel tells of each mapping of
//! data as it is made (`PERF_RECORD_MMAP2` of perf_event_open(2)). Writes through a mapping of a file in a tmpfs leave no other trace.
//! (mremap(2) and fork(2), which are not told, only make further mappings of what is mapped already.)

use std::io;

use crate::perf::{self, Attributes, Ring};
use crate::processors::{listed, online};

const TYPE_SOFTWARE: u32 = 1;
/// An event that never happens, so that there is nothing but the records that go with it.
const DUMMY: u64 = 9;
const MMAP_DATA: u64 = 1 << 17;
const MMAP2: u64 = 1 << 23;
const RECORD_MMAP2: u32 = 10;
/// Where in a record, behind its header, the file's device and inode, and the mapping's flags are.
const MAJOR: usize = 32;
const MINOR: usize = 36;
const INODE: usize = 40;
const FLAGS: usize = 60;

/// A file that got a shared mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapped {
    /// Major and minor number of its filesystem's device.
    pub device: (u32, u32),
    /// Its inode.
    pub ino: u64,
}

/// The log of a whole machine.
#[derive(Debug)]
pub struct MappingLog {
    rings: Vec<Ring>,
    online: String,
}

impl MappingLog {
    /// Begins it.
    ///
    /// # Errors
    /// If the kernel refuses: it takes CAP_PERFMON.
    pub fn start() -> io::Result<Self> {
        let online = online()?;
        let attributes = Attributes::new(TYPE_SOFTWARE, DUMMY, 0, MMAP_DATA | MMAP2);
        let ring = |cpu| Ring::new(perf::open(&attributes, cpu)?, None);
        let rings = listed(&online).into_iter().map(ring).collect::<io::Result<_>>()?;
        Ok(Self { rings, online })
    }

    /// Tells of every file that got a shared mapping since the last call. False: that was not all; any file may have got one.
    pub fn read(&mut self, mut tell: impl FnMut(Mapped)) -> bool {
        let mut complete = online().is_ok_and(|now| now == self.online);
        for ring in &mut self.rings {
            complete &= ring.read(|kind, record| {
                if kind != RECORD_MMAP2 {
                    return true;
                }
                let Some((mapped, shared)) = parse(record) else { return false };
                if shared {
                    tell(mapped);
                }
                true
            });
        }
        complete
    }
}

/// The file that was mapped, and whether the mapping is a shared one.
pub(crate) fn parse(record: &[u8]) -> Option<(Mapped, bool)> {
    let word = |at: usize| Some(u32::from_ne_bytes(record.get(at..at + 4)?.try_into().ok()?));
    let ino = u64::from_ne_bytes(record.get(INODE..INODE + 8)?.try_into().ok()?);
    let shared = word(FLAGS)? & libc::MAP_SHARED as u32 != 0;
    Some((Mapped { device: (word(MAJOR)?, word(MINOR)?), ino }, shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    fn map(file: &File, kind: libc::c_int, protection: libc::c_int) {
        // SAFETY: a new mapping at a place of the kernel's choice, which is taken away at once.
        unsafe {
            let base = libc::mmap(std::ptr::null_mut(), 4096, protection, kind, file.as_raw_fd(), 0);
            assert!(base != libc::MAP_FAILED);
            libc::munmap(base, 4096);
        }
    }

    /// Needs root, and a tmpfs, which /dev/shm is.
    #[test]
    fn just_the_files_that_got_shared_mappings_are_told() {
        let mut log = match MappingLog::start() {
            Ok(log) => log,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let files: Vec<File> = ["shared", "private", "read-only", "not"]
            .iter()
            .map(|name| {
                let path = format!("/dev/shm/mapping-log-{name}-{}", std::process::id());
                let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
                std::fs::remove_file(path).unwrap();
                file.set_len(4096).unwrap();
                file
            })
            .collect();
        let both = libc::PROT_READ | libc::PROT_WRITE;
        map(&files[0], libc::MAP_SHARED, both);
        map(&files[1], libc::MAP_PRIVATE, both);
        // It may be made writable later.
        map(&files[2], libc::MAP_SHARED, libc::PROT_READ);
        let mut told = Vec::new();
        assert!(log.read(|mapped| told.push(mapped)));
        let meta = files.iter().map(|file| file.metadata().unwrap()).collect::<Vec<_>>();
        let device = (rustix::fs::major(meta[0].dev()), rustix::fs::minor(meta[0].dev()));
        let is_told = meta.iter().map(|meta| told.contains(&Mapped { device, ino: meta.ino() })).collect::<Vec<_>>();
        assert_eq!(is_told, [true, false, true, false]);
        told.clear();
        assert!(log.read(|mapped| told.push(mapped)));
        assert!(!told.iter().any(|mapped| mapped.device == device && mapped.ino == meta[0].ino()), "told once");
    }
}
