use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::memory::{Draw, Rewritten, WORDS, fill};

/// Bytes of a page.
const PAGE: usize = WORDS * 8;
/// Bytes that are written or read at a time where all are.
const BATCH: usize = 256 * PAGE;

/// The pages of a large file: the same as [`crate::Pages`], on a disk.
#[derive(Debug)]
pub struct FilePages {
    file: File,
    count: usize,
    written: u64,
    draw: Draw,
}

impl FilePages {
    /// Makes a file of so many pages of 4 KiB, all of version 0.
    ///
    /// # Errors
    /// If there is one already, or it cannot be written.
    pub fn new(path: &Path, count: usize) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        let mut writer = BufWriter::with_capacity(BATCH, &file);
        for number in 0..count {
            writer.write_all(&version_of(number, 0))?;
        }
        writer.flush()?;
        drop(writer);
        // Else whoever writes next has to wait for the disk.
        file.sync_all()?;
        Ok(Self { file, count, written: 0, draw: Draw::new() })
    }
}

impl Rewritten for FilePages {
    fn rewrite_one(&mut self) -> io::Result<()> {
        let number = self.draw.one_of(self.count);
        let at = (number * PAGE) as u64;
        let mut version = [0; 8];
        self.file.read_exact_at(&mut version, at)?;
        self.file.write_all_at(&version_of(number, u64::from_ne_bytes(version) + 1), at)?;
        self.written += 1;
        Ok(())
    }

    fn written(&self) -> u64 {
        self.written
    }

    fn mismatches(&mut self) -> io::Result<(u64, u64)> {
        let (mut wrong, mut versions) = (0, 0u64);
        let mut batch = vec![0; BATCH];
        for first in (0..self.count).step_by(BATCH / PAGE) {
            let pages = (self.count - first).min(BATCH / PAGE);
            let batch = &mut batch[..pages * PAGE];
            self.file.read_exact_at(batch, (first * PAGE) as u64)?;
            for (page, number) in batch.chunks_exact(PAGE).zip(first..) {
                let version = page.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
                wrong += u64::from(page != version_of(number, version));
                versions = versions.wrapping_add(version);
            }
        }
        Ok((wrong, versions.abs_diff(self.written)))
    }
}

fn version_of(number: usize, version: u64) -> [u8; PAGE] {
    let (mut words, mut bytes) = ([0; WORDS], [0; PAGE]);
    fill(&mut words, number as u64, version);
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_and_old_versions_in_the_file_are_seen() {
        let path = std::env::temp_dir().join(format!("tranship-pages-{}", std::process::id()));
        let mut pages = FilePages::new(&path, 600).unwrap();
        std::fs::remove_file(&path).unwrap();
        (0..2000).for_each(|_| pages.rewrite_one().unwrap());
        assert_eq!((pages.written(), pages.mismatches().unwrap()), (2000, (0, 0)));
        let last = (599 * PAGE) as u64;
        let mut version = [0; 8];
        pages.file.read_exact_at(&mut version, last).unwrap();
        pages.file.write_all_at(&version_of(599, 0), last).unwrap();
        assert!(version != [0; 8], "2000 rewrites of 600 pages reach the last one");
        assert_eq!(pages.mismatches().unwrap(), (0, u64::from_ne_bytes(version)));
        pages.file.write_all_at(&[1], last + 100).unwrap();
        assert_eq!(pages.mismatches().unwrap().0, 1);
    }
}
