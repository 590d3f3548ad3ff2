//! The tables by which the preloaded library knows what the memory plane moves: which pages criu must not see when it dumps,
//! and where shared memory is when it restores.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tranship_types::PageRange;

/// The environment variable that names the table's file.
pub const TABLE_VARIABLE: &str = "TRANSHIP_HIDDEN";

/// The environment variable with the inodes of sockets that the library makes regular files for a dump, with commas between them.
pub const STREAMS_VARIABLE: &str = "TRANSHIP_STREAMS";

/// The environment variable that names the list of processes that a signal has stopped, for a dump: their pids on the node, as JSON.
pub const STOPPED_VARIABLE: &str = "TRANSHIP_STOPPED";

/// The environment variable that names the table of shared memory for a restore.
pub const SHARED_VARIABLE: &str = "TRANSHIP_SHARED";

/// The environment variable that names the list of processes with mappings that may be joined, for a restore.
pub const JOINED_VARIABLE: &str = "TRANSHIP_JOINED";

/// The environment variable that has segments be found which the restore of another container has made.
pub const JOINED_IPC_VARIABLE: &str = "TRANSHIP_JOINED_IPC";

/// The list's name among the images.
pub const JOINED: &str = "joined";

/// Lists processes, by their pids in the container, of which parts of mappings may be joined again
/// ([`crate::smaps::has_protected_part`]). Older versions ignore it.
pub fn list_joined(images: &Path, pids: &[u32]) -> io::Result<()> {
    if pids.is_empty() {
        return Ok(());
    }
    std::fs::write(images.join(JOINED), pids.iter().map(|pid| format!("{pid}\n")).collect::<String>())
}

/// Writes the table: for each process (pid as criu sees it, i.e. on the node) the ranges that the memory plane moves, and
/// the shared memory that it moves (device and inode). It must be complete before criu is let go.
pub fn write(path: &Path, hidden: &[(u32, Vec<PageRange>)], objects: &[(u64, u64)]) -> io::Result<()> {
    let mut rows: Vec<(u32, PageRange)> =
        hidden.iter().flat_map(|(pid, ranges)| ranges.iter().map(|r| (*pid, *r))).collect();
    rows.sort_unstable();
    let mut bytes = Vec::with_capacity((rows.len() + objects.len()) * 24);
    for (pid, range) in rows {
        bytes.extend_from_slice(&u64::from(pid).to_le_bytes());
        bytes.extend_from_slice(&range.start.to_le_bytes());
        bytes.extend_from_slice(&range.end.to_le_bytes());
    }
    for (device, inode) in objects {
        bytes.extend_from_slice(&(1u64 << 32).to_le_bytes());
        bytes.extend_from_slice(&device.to_le_bytes());
        bytes.extend_from_slice(&inode.to_le_bytes());
    }
    std::fs::write(path, bytes)
}

/// Tells the library names of files whose name for the kernel is gone: device, inode, and a path that the file has in
/// the container. Beside the table, with `.renamed` appended, each as `DEVICE INODE PATH` and a zero. It must be
/// complete before criu is let go.
pub fn write_renamed<'f>(table: &Path, files: impl Iterator<Item = (u64, u64, &'f Path)>) -> io::Result<()> {
    let mut bytes = Vec::new();
    for (device, inode, path) in files {
        bytes.extend_from_slice(format!("{device} {inode} ").as_bytes());
        bytes.extend_from_slice(path.as_os_str().as_bytes());
        bytes.push(0);
    }
    if bytes.is_empty() { Ok(()) } else { std::fs::write(appended(table, ".renamed"), bytes) }
}

/// Shared memory that criu has made empty instead of taking what the memory plane has brought: keys in the table at
/// `table` whose image criu had (so that it made the object) and that the library was not asked for.
pub fn left_empty(table: &Path, images: &Path) -> Vec<u32> {
    let taken = std::fs::read(used(table)).unwrap_or_default();
    let keys: Vec<u32> = rows(table).into_iter().filter(|row| row.1 != PAGES).map(|row| row.0).collect();
    let is_taken = |key: u32| keys.iter().zip(&taken).any(|(k, taken)| *k == key && *taken != 0);
    let made = |key: u32| images.join(format!("pagemap-shmem-{key}.img")).exists();
    keys.iter().copied().filter(|key| made(*key) && !is_taken(*key)).collect()
}

/// What the table at `table` has of private pages of files: pid in the container and file, in the order in which they came.
pub fn pages(table: &Path) -> Vec<(u32, PathBuf)> {
    rows(table).into_iter().filter(|row| row.1 == PAGES).map(|row| (row.0, row.2)).collect()
}

/// A kind of lines that criu is not concerned with.
const PAGES: &str = "pages";

/// The lines of a table of shared memory: key, kind, file.
fn rows(table: &Path) -> Vec<(u32, String, PathBuf)> {
    parsed(&std::fs::read_to_string(table).unwrap_or_default())
}

pub(crate) fn parsed(table: &str) -> Vec<(u32, String, PathBuf)> {
    let row = |line: &str| {
        let mut words = line.splitn(3, ' ');
        Some((words.next()?.parse().ok()?, words.next()?.to_owned(), words.next()?.into()))
    };
    table.lines().filter_map(row).collect()
}

fn used(path: &Path) -> PathBuf {
    appended(path, ".used")
}

fn appended(path: &Path, suffix: &str) -> PathBuf {
    let mut appended = path.as_os_str().to_owned();
    appended.push(suffix);
    appended.into()
}

/// Whether the library has read the table, that is, was at work in the dump.
pub fn was_used(path: &Path) -> bool {
    used(path).exists()
}
