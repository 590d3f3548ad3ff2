//! Memory in huge pages that were reserved for it (hugetlb): how many a container has, and how many a node has to give.
//!
//! CRIU carries their content. A restore makes the same mappings, and so needs as many free huge pages of the same size.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use nix::libc::{ENOENT, ESRCH};
use nix::sys::statfs::{HUGETLBFS_MAGIC, statfs};
use tranship_sys::process;

use crate::maps::Mapping;
use crate::survey::{field, status};

/// Where the kernel shows the huge pages of each size.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Huge pages that processes have or reserve: number by size in bytes. All pages of a mapping count, as the kernel
/// reserves them; of one that was inherited, the process's own copies.
///
/// # Errors
/// If the mappings of a process cannot be read.
pub fn needed(pids: &[u32]) -> io::Result<BTreeMap<u64, u64>> {
    let (mut sizes, mut shared) = (HashMap::new(), HashMap::new());
    let mut private: HashMap<u32, Vec<(Mapping, u64)>> = HashMap::new();
    for pid in pids {
        for mapping in mappings(*pid)? {
            let known = sizes.get(&mapping.device).copied();
            // Of one that is gone already another mapping may tell.
            let Some(size) = known.or_else(|| page_size(*pid, &mapping)) else { continue };
            sizes.insert(mapping.device, size);
            if size == 0 {
                continue;
            }
            if mapping.private {
                private.entry(*pid).or_default().push((mapping, size));
            } else {
                let end: &mut u64 = shared.entry((mapping.device, mapping.inode, size)).or_default();
                *end = (*end).max(mapping.offset + mapping.range.len());
            }
        }
    }
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for ((.., size), end) in shared {
        *all.entry(size).or_default() += end.div_ceil(size);
    }
    for (pid, mappings) in &private {
        let above = parent(*pid).and_then(|parent| private.get(&parent));
        for (mapping, size) in mappings {
            let inherited = above.is_some_and(|above| above.iter().any(|(other, _)| other.range == mapping.range));
            let bytes = if inherited { own_copies(*pid, mapping.range.start) } else { mapping.range.len() };
            *all.entry(*size).or_default() += bytes.div_ceil(*size);
        }
    }
    all.retain(|_, pages| *pages > 0);
    Ok(all)
}

/// The size of the huge pages of a mapping; 0 where it has none. The file is not opened.
fn page_size(pid: u32, mapping: &Mapping) -> Option<u64> {
    let range = mapping.range;
    let found = statfs(format!("/proc/{pid}/map_files/{:x}-{:x}", range.start, range.end).as_str()).ok()?;
    Some(if found.filesystem_type() == HUGETLBFS_MAGIC { found.block_size().cast_unsigned() } else { 0 })
}

/// The mappings of files of a process; none of one that has ended meanwhile.
fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    // Not those with an inode: that of a SysV segment is its id, which may be 0.
    let of_file = |line: String| Mapping::parse(&line).filter(|mapping| mapping.name.starts_with('/'));
    let read = || process::mappings(pid)?.filter_map(|line| line.map(of_file).transpose()).collect();
    match read() {
        Err(error) if matches!(error.raw_os_error(), Some(ENOENT | ESRCH)) => Ok(Vec::new()),
        read => read,
    }
}

fn parent(pid: u32) -> Option<u32> {
    field(&status(pid).ok()?, "PPid").parse().ok()
}

/// Bytes of huge pages in a private mapping that no other process has.
fn own_copies(pid: u32, start: u64) -> u64 {
    let smaps = std::fs::read(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut here = false;
    for line in String::from_utf8_lossy(&smaps).lines() {
        if let Some(mapping) = Mapping::parse(line) {
            here = mapping.range.start == start;
        } else if let Some(rest) = line.strip_prefix("Private_Hugetlb:").filter(|_| here) {
            return rest.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10;
        }
    }
    0
}

/// How many huge pages of a size, in bytes, this node can give.
pub fn free(size: u64) -> u64 {
    let pool = Path::new(POOLS).join(format!("hugepages-{}kB", size >> 10));
    let number = |name: &str| -> u64 {
        let text = std::fs::read_to_string(pool.join(name)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    let reserved = number("free_hugepages").saturating_sub(number("resv_hugepages"));
    reserved + number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"))
}

/// The file by which a node is given more of a size, in bytes.
pub fn setting(size: u64) -> PathBuf {
    Path::new(POOLS).join(format!("hugepages-{}kB", size >> 10)).join("nr_hugepages")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_huge_pages_needs_none() {
        assert_eq!(needed(&[std::process::id()]).unwrap(), BTreeMap::new());
    }

    #[test]
    fn a_process_that_has_ended_needs_none() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(needed(&[child.id()]).unwrap(), BTreeMap::new());
    }

    #[test]
    fn a_size_that_no_machine_has_is_not_free() {
        assert_eq!(free(3 << 20), 0);
    }
}
