//! The table that tells the preloaded library which pages criu must not see.

use std::io;
use std::path::Path;

use tranship_types::PageRange;

/// The environment variable that names the table's file.
pub const TABLE_VARIABLE: &str = "TRANSHIP_HIDDEN";

/// Writes the table: for each process (pid as criu sees it, i.e. on the node) the ranges that the memory plane moves.
/// It must be complete before criu is let go.
pub fn write(path: &Path, hidden: &[(u32, Vec<PageRange>)]) -> io::Result<()> {
    let mut rows: Vec<(u32, PageRange)> =
        hidden.iter().flat_map(|(pid, ranges)| ranges.iter().map(|r| (*pid, *r))).collect();
    rows.sort_unstable();
    let mut bytes = Vec::with_capacity(rows.len() * 24);
    for (pid, range) in rows {
        bytes.extend_from_slice(&u64::from(pid).to_le_bytes());
        bytes.extend_from_slice(&range.start.to_le_bytes());
        bytes.extend_from_slice(&range.end.to_le_bytes());
    }
    std::fs::write(path, bytes)
}

/// Whether the library has read the table, that is, was at work in the dump.
pub fn was_used(path: &Path) -> bool {
    let mut used = path.as_os_str().to_owned();
    used.push(".used");
    Path::new(&used).exists()
}
