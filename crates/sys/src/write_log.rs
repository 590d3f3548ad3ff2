//! Which parts of files are written by calls, on ext4: its tracepoints tell of each piece that write(2) and its like have put into the
//! page cache (`ext4:ext4_da_write_end`, `ext4:ext4_write_end`), also where the folio was dirty already. What is changed in another way
//! they do not tell: that takes the [`crate::dirty_log`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::perf::Ring;
use crate::processors::{listed, online};
use crate::tracepoint::{Event, RECORD_SAMPLE, open, tracing};

/// A part of a file that a call has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrote {
    /// The file's inode, of whatever filesystem.
    pub ino: u64,
    /// From this byte.
    pub start: u64,
    /// To before this one.
    pub end: u64,
}

/// The log of a whole machine.
#[derive(Debug)]
pub struct WriteLog {
    rings: Vec<Ring>,
    online: String,
    wrote: [Event<3>; 2],
}

impl WriteLog {
    /// Begins it.
    ///
    /// # Errors
    /// If the kernel lacks one of the tracepoints (it has no ext4, or in another form), or refuses: it takes CAP_PERFMON.
    pub fn start() -> io::Result<Self> {
        let tracing = tracing()?;
        let write = |name| Event::find(&tracing, name, ["ino", "pos", "len"]);
        let wrote = [write("ext4/ext4_da_write_end")?, write("ext4/ext4_write_end")?];
        let online = online()?;
        let mut rings = Vec::new();
        for cpu in listed(&online) {
            rings.push(Ring::new(open(wrote[0].id, cpu)?, [open(wrote[1].id, cpu)?])?);
        }
        Ok(Self { rings, online, wrote })
    }

    /// What polls as readable when a ring is filling up.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(AsFd::as_fd)
    }

    /// Tells of everything since the last call. False: that was not all; there may have been any calls.
    pub fn read(&mut self, mut tell: impl FnMut(Wrote)) -> bool {
        let wrote = self.wrote;
        let mut complete = online().is_ok_and(|now| now == self.online);
        for ring in &mut self.rings {
            complete &= ring.read(|kind, record| {
                // The size of the raw bytes comes before them.
                let (RECORD_SAMPLE, Some(raw)) = (kind, record.get(4..)) else { return kind != RECORD_SAMPLE };
                let fields = wrote.iter().find_map(|event| event.fields(raw));
                let Some([ino, start, length]) = fields else { return false };
                tell(Wrote { ino, start, end: start.saturating_add(length) });
                true
            });
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// Needs root, and that the build's own directory is on ext4.
    #[test]
    fn each_write_is_told_also_to_what_is_dirty() {
        let directory = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let path = directory.join(format!("write-log-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut log = match WriteLog::start() {
            Ok(log) => log,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let ino = file.metadata().unwrap().ino();
        file.write_all_at(&vec![7; 64 << 10], 0).unwrap();
        assert!(log.read(|_| {}));
        file.write_all_at(b"abc", 20_000).unwrap();
        file.write_all_at(b"de", 20_001).unwrap();
        let mut told = Vec::new();
        assert!(log.read(|wrote| told.push(wrote)));
        // Two processors may have written them.
        told.sort_by_key(|wrote| wrote.start);
        told.retain(|wrote| wrote.ino == ino);
        assert_eq!(told, [(20_000, 20_003), (20_001, 20_003)].map(|(start, end)| Wrote { ino, start, end }));
    }
}
