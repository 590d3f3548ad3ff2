//! Files in which an engine keeps the log of a container.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The log of one container: the file that its engine writes to, and the files that it was rotated into.
///
/// ```text
///   NAME-json.log   NAME-json.log.1   NAME-json.log.2.gz          newest first; `.gz` where rotated files are compressed
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFiles {
    /// The engine's name of the log driver.
    pub driver: String,
    /// The file that the engine writes to.
    pub current: PathBuf,
    /// Most files that the engine reads, the current one included. 1: it reads no rotated files.
    pub most: usize,
    /// Bytes from which on the current file is rotated; `None`: never.
    pub max_bytes: Option<u64>,
    /// Whether rotated files are compressed (gzip).
    pub compressed: bool,
}

impl LogFiles {
    /// The path of rotated file `number` (1 is the newest).
    pub fn rotated(&self, number: usize, compressed: bool) -> PathBuf {
        beside(&self.current, &format!(".{number}{}", if compressed { ".gz" } else { "" }))
    }

    /// The rotated files that are there, the oldest first, and whether each is compressed.
    pub fn all_rotated(&self) -> Vec<(PathBuf, bool)> {
        // An engine that compresses one has both for a moment, the complete one without `.gz`.
        let file = |number| [false, true].map(|compressed| (self.rotated(number, compressed), compressed));
        (1..self.most).rev().filter_map(|number| file(number).into_iter().find(|(path, _)| path.is_file())).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        let rotated = self.all_rotated().into_iter().map(|(path, _)| path);
        let size = |path: PathBuf| path.metadata().map_or(0, |found| found.len());
        rotated.chain([self.current.clone()]).map(size).sum()
    }

    /// The directory that the files are in.
    pub fn directory(&self) -> &Path {
        self.current.parent().unwrap_or(&self.current)
    }
}

/// A path with something added to its last part.
fn beside(path: &Path, more: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(more);
    path.into()
}

/// Bytes of a size as Docker's log options have it: a number and `k`, `m`, `g`, decimal (`max-size=10m`).
pub(crate) fn bytes(size: &str) -> Option<u64> {
    let size = size.trim().to_ascii_lowercase();
    let digits = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
    let scale = match size[digits..].trim().trim_end_matches('b') {
        "" => 1,
        "k" => 1_000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        _ => return None,
    };
    size[..digits].parse::<u64>().ok()?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_docker_reads_them() {
        assert_eq!(
            ["10m", "64k", "1GB", "7", "-1", "x"].map(bytes),
            [Some(10_000_000), Some(64_000), Some(1_000_000_000), Some(7), None, None]
        );
    }

    #[test]
    fn rotated_files_are_found_oldest_first() {
        let directory = std::env::temp_dir().join(format!("tranship-logs-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let current = directory.join("x-json.log");
        let log = LogFiles { driver: "json-file".into(), current, most: 4, max_bytes: None, compressed: true };
        for (name, bytes) in [("x-json.log", 3), ("x-json.log.1", 5), ("x-json.log.1.gz", 1), ("x-json.log.2.gz", 7)] {
            std::fs::write(directory.join(name), vec![0; bytes]).unwrap();
        }
        assert_eq!(log.all_rotated(), [(log.rotated(2, true), true), (log.rotated(1, false), false)]);
        assert_eq!(log.bytes(), 15);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
