//! The files of a log that an engine writes to, and rotates, while they are read.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use tranship_engine::LogFiles;

use super::{Part, Sending, read_full};

/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;
/// So many rotations are followed at once; what comes after them waits for the next look.
const ROTATIONS: usize = 16;
/// By so many bytes of its beginning a file is told from another one that the engine has begun in its place.
const BEGINNING: usize = 64;

/// Those of one container.
pub struct Original {
    files: LogFiles,
    /// Rotated files that were not sent yet, the oldest first.
    rotated: VecDeque<(File, Part)>,
    skipped_bytes: u64,
    /// What is sent now. It has no successor until the engine rotates it.
    current: File,
    inode: u64,
    /// How far it was read.
    at: u64,
    /// How it begins, as far as it was read, up to [`BEGINNING`].
    beginning: Vec<u8>,
    /// Whether what was sent of it ends in the middle of a line.
    is_torn: bool,
    /// The newest compressed file when rotations were looked for the last time.
    newest_compressed: Option<u64>,
    missed: bool,
    buffer: Vec<u8>,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(path)
}

fn inode(path: &Path) -> Option<u64> {
    path.symlink_metadata().ok().map(|found| found.ino())
}

/// Whether the current file is one that can be followed: it is there under its name, and no link.
pub fn is_there(files: &LogFiles) -> bool {
    open(&files.current).and_then(|file| file.metadata()).is_ok_and(|found| found.is_file())
}

impl Original {
    /// Opens all of them.
    pub fn open(files: LogFiles) -> io::Result<Self> {
        // A rotation meanwhile would have one of them twice, or not at all.
        for _ in 0..100 {
            let current = open(&files.current)?;
            let opened = current.metadata()?.ino();
            let rotated = files.all_rotated().into_iter().map(|(path, compressed)| {
                let file = open(&path)?;
                let bytes = file.metadata()?.len();
                Ok((file, Part { bytes, compressed }))
            });
            let rotated: io::Result<VecDeque<_>> = rotated.collect();
            let newest_compressed = inode(&files.rotated(1, true));
            match rotated {
                Ok(rotated) if inode(&files.current) == Some(opened) => {
                    let buffer = vec![0; PIECE];
                    return Ok(Self {
                        files,
                        rotated,
                        skipped_bytes: 0,
                        current,
                        inode: opened,
                        at: 0,
                        beginning: Vec::new(),
                        is_torn: false,
                        newest_compressed,
                        missed: false,
                        buffer,
                    });
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => std::thread::sleep(std::time::Duration::from_millis(10)),
            }
        }
        Err(io::Error::other("it is rotated all the time"))
    }

    /// What there is, the oldest first.
    pub fn parts(&self) -> io::Result<Vec<Part>> {
        let last = Part { bytes: self.current.metadata()?.len(), compressed: false };
        Ok(self.rotated.iter().map(|(_, part)| *part).chain([last]).collect())
    }

    /// Leaves out the oldest ones. The current one is never left out.
    pub fn skip(&mut self, count: usize) {
        let skipped = self.rotated.drain(..count.min(self.rotated.len()));
        self.skipped_bytes = skipped.map(|(_, part)| part.bytes).sum();
    }

    /// Bytes of those that were left out.
    pub fn skipped_bytes(&self) -> u64 {
        self.skipped_bytes
    }

    /// Whether a file may have been rotated and removed before it was read.
    pub fn missed(&self) -> bool {
        self.missed
    }

    /// Sends what was not sent yet. Returns how many bytes that was.
    pub fn send(&mut self, sink: &mut Sending<'_>) -> io::Result<u64> {
        let mut sent = 0;
        while let Some((file, part)) = self.rotated.pop_front() {
            sent += io::copy(&mut file.take(part.bytes), sink)?;
            sink.next()?;
        }
        sent += self.send_current(sink)?;
        // Between the two steps of a rotation there is none.
        for _ in 0..ROTATIONS {
            if inode(&self.files.current).is_none_or(|inode| inode == self.inode) {
                break;
            }
            // The engine writes no more to what it has rotated.
            sent += self.send_current(sink)?;
            let newer = self.successors();
            if newer.is_empty() {
                break;
            }
            for file in newer {
                self.begin(file)?;
                sent += self.send_current(sink)?;
            }
        }
        self.newest_compressed = inode(&self.files.rotated(1, true));
        Ok(sent)
    }

    /// Another file is the current one.
    fn begin(&mut self, file: File) -> io::Result<()> {
        (self.inode, self.at, self.current) = (file.metadata()?.ino(), 0, file);
        self.beginning.clear();
        self.is_torn = false;
        Ok(())
    }

    /// Whether the engine has begun anew in the same file, as it does where it may have one only, or somebody has
    /// emptied it.
    fn was_emptied(&self, bytes: u64) -> io::Result<bool> {
        let mut now = vec![0; self.beginning.len()];
        Ok(bytes < self.at || self.current.read_at(&mut now, 0)? < now.len() || now != self.beginning)
    }

    /// Sends what there is of the current file by now and was not sent yet.
    fn send_current(&mut self, sink: &mut impl Write) -> io::Result<u64> {
        let (bytes, mut sent) = (self.current.metadata()?.len(), 0);
        if self.was_emptied(bytes)? {
            // What came between the last look and that is gone.
            self.missed = true;
            if self.is_torn {
                sink.write_all(b"\n")?;
                sent += 1;
            }
            self.at = 0;
            self.beginning.clear();
        }
        self.current.seek(SeekFrom::Start(self.at))?;
        while self.at < bytes {
            let wanted = (bytes - self.at).min(PIECE as u64) as usize;
            let read = read_full(&mut self.current, &mut self.buffer[..wanted])?;
            let piece = &self.buffer[..read];
            sink.write_all(piece)?;
            if self.at < BEGINNING as u64 {
                let lacking = BEGINNING - self.beginning.len();
                self.beginning.extend(piece.iter().take(lacking));
            }
            self.is_torn = self.files.driver == "json-file" && piece.last().is_some_and(|last| *last != b'\n');
            (self.at, sent) = (self.at + read as u64, sent + read as u64);
            if read < wanted {
                break;
            }
        }
        Ok(sent)
    }

    /// The files that were made after the one that was sent last, the oldest first.
    fn successors(&mut self) -> Vec<File> {
        let mut newer: Vec<File> = open(&self.files.current).into_iter().collect();
        let mut before = newer.first().and_then(|file| file.metadata().ok()).map(|found| found.ino());
        for number in 1..self.files.most {
            let Ok(file) = open(&self.files.rotated(number, false)) else { continue };
            match file.metadata() {
                Ok(found) if found.ino() == self.inode => {
                    newer.reverse();
                    return newer;
                }
                // It was rotated between the two.
                Ok(found) if Some(found.ino()) == before => {}
                found => {
                    before = found.ok().map(|found| found.ino());
                    newer.push(file);
                }
            }
        }
        // It was compressed, removed, or made way for others.
        newer.reverse();
        if self.files.compressed {
            let compressed = (1..self.files.most).map_while(|number| inode(&self.files.rotated(number, true)));
            let new = compressed.take_while(|inode| Some(*inode) != self.newest_compressed).count();
            self.missed |= new > 1;
        } else {
            self.missed |= self.files.most > 1;
        }
        newer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a reader gets of a log that is written and rotated as dockerd does it.
    fn read(original: &mut Original) -> String {
        let mut got = Vec::new();
        original.send_current(&mut got).unwrap();
        while inode(&original.files.current) != Some(original.inode) {
            original.send_current(&mut got).unwrap();
            for file in original.successors() {
                original.begin(file).unwrap();
                original.send_current(&mut got).unwrap();
            }
        }
        String::from_utf8(got).unwrap()
    }

    #[test]
    fn a_log_is_followed_through_rotations() {
        let directory = std::env::temp_dir().join(format!("tranship-original-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let files = LogFiles {
            driver: "json-file".into(),
            current: directory.join("log"),
            most: 4,
            max_bytes: None,
            compressed: false,
        };
        let path = |number| if number == 0 { files.current.clone() } else { files.rotated(number, false) };
        let write = |text: &str| {
            let mut file = OpenOptions::new().append(true).create(true).open(path(0)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        let rotate = || (0..3).rev().for_each(|number| drop(std::fs::rename(path(number), path(number + 1))));
        write("1 ");
        rotate();
        write("2 ");
        let mut original = Original::open(files.clone()).unwrap();
        assert_eq!(original.parts().unwrap(), [2, 2].map(|bytes| Part { bytes, compressed: false }));
        original.skip(1);
        assert_eq!((original.skipped_bytes(), read(&mut original).as_str()), (2, "2 "));
        write("3 ");
        assert_eq!(read(&mut original), "3 ");
        write("4 ");
        rotate();
        write("5 ");
        rotate();
        write("6 ");
        assert_eq!(read(&mut original), "4 5 6 ");
        assert!(!original.missed());
        // Emptied, and longer again than it was; in the middle of a line.
        write("67");
        assert_eq!(read(&mut original), "67");
        File::create(path(0)).unwrap();
        write("89 10 11\n");
        assert_eq!(read(&mut original), "\n89 10 11\n");
        assert!(original.missed());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
