//! Memory in huge pages that were reserved for it (hugetlb): how many a container has, and how many a node has to give.
//!
//! A restore makes the same mappings, and so needs as many free huge pages of the same size.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::libc::{ENOENT, ESRCH};
use nix::sys::memfd::MFdFlags;
use nix::sys::statfs::{HUGETLBFS_MAGIC, statfs};
use tranship_sys::pagemap::Pagemap;
use tranship_sys::{hugetlb, process};
use tranship_types::PageRange;

use crate::maps::Mapping;
use crate::survey::{field, status, survey};

/// Where the kernel shows the huge pages of each size.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Huge pages that processes have or reserve: number by size in bytes. All pages of a mapping count, as the kernel reserves them; where it
/// does not (`MAP_NORESERVE`, and what was inherited by fork), those that are there. What a process has inherited is its own after a restore.
///
/// # Errors
/// If the mappings of a process cannot be read.
pub fn needed(pids: &[u32]) -> io::Result<BTreeMap<u64, u64>> {
    let (mut sizes, mut shared) = (HashMap::new(), HashMap::new());
    let mut private: HashMap<u32, Vec<(Mapping, u64)>> = HashMap::new();
    let mut details = HashMap::new();
    for pid in pids {
        for mapping in mappings(*pid)? {
            let known = sizes.get(&mapping.device).copied();
            // Of one that is gone already another mapping may tell.
            let Some(size) = known.or_else(|| page_size(*pid, &mapping)) else { continue };
            sizes.insert(mapping.device, size);
            if size == 0 {
                continue;
            }
            let details = details.entry(*pid).or_insert_with(|| Detail::of(*pid));
            if mapping.private {
                private.entry(*pid).or_default().push((mapping, size));
                continue;
            }
            let bytes = match details.get(&mapping.range.start) {
                Some(Detail { reserves: false, .. }) => content(*pid, &mapping),
                _ => mapping.offset + mapping.range.len(),
            };
            let most: &mut u64 = shared.entry((mapping.device, mapping.inode, size)).or_default();
            *most = (*most).max(bytes);
        }
    }
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for ((.., size), bytes) in shared {
        *all.entry(size).or_default() += bytes.div_ceil(size);
    }
    for (pid, mappings) in &private {
        let above = parent(*pid).and_then(|parent| private.get(&parent));
        for (mapping, size) in mappings {
            let detail = details.get(pid).and_then(|details| details.get(&mapping.range.start));
            let inherited = above.is_some_and(|above| above.iter().any(|(other, _)| other.range == mapping.range));
            let bytes = match detail {
                Some(detail) if inherited || !detail.reserves => detail.bytes,
                _ => mapping.range.len(),
            };
            *all.entry(*size).or_default() += bytes.div_ceil(*size);
        }
    }
    all.retain(|_, pages| *pages > 0);
    Ok(all)
}

/// Bytes of private memory in huge pages. On its way to such pages it is in ordinary ones.
pub fn private(pids: &[u32]) -> u64 {
    let mut bytes = 0;
    for space in survey(pids).unwrap_or_default() {
        let Ok(mut pagemap) = Pagemap::open(space.pid) else { continue };
        for Mapping { range, .. } in &space.huge {
            let _ = pagemap.copied(range.start, range.end, |start, end| bytes += end - start);
        }
    }
    bytes
}

/// The kernel's own file systems for memory in huge pages, anonymous and of memfds and segments: size of a page by device.
pub fn devices() -> &'static HashMap<u64, u64> {
    static DEVICES: OnceLock<HashMap<u64, u64>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let pools = std::fs::read_dir(POOLS).into_iter().flatten().flatten();
        let device = |name: &str| {
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let probe = hugetlb::create(c"tranship-probe", kib << 10, MFdFlags::MFD_CLOEXEC).ok()?;
            Some((probe.metadata().ok()?.dev(), kib << 10))
        };
        pools.filter_map(|pool| device(pool.file_name().to_str()?)).collect()
    })
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

/// Bytes of the file behind a mapping that are there.
fn content(pid: u32, mapping: &Mapping) -> u64 {
    let PageRange { start, end } = mapping.range;
    std::fs::metadata(format!("/proc/{pid}/map_files/{start:x}-{end:x}")).map_or(0, |found| found.blocks() * 512)
}

/// What the kernel tells of a mapping in huge pages.
#[derive(Debug, Clone, Copy)]
struct Detail {
    /// Bytes that are in the page table.
    bytes: u64,
    /// The kernel reserves huge pages for all of it.
    reserves: bool,
}

impl Detail {
    /// Those of all mappings of a process, by their start.
    fn of(pid: u32) -> HashMap<u64, Self> {
        let smaps = std::fs::read(format!("/proc/{pid}/smaps")).unwrap_or_default();
        Self::parse(&String::from_utf8_lossy(&smaps))
    }

    fn parse(smaps: &str) -> HashMap<u64, Self> {
        let (mut details, mut start): (HashMap<u64, Self>, _) = (HashMap::new(), 0);
        for line in smaps.lines() {
            let detail = details.entry(start).or_insert(Self { bytes: 0, reserves: true });
            if let Some((name, value)) = line.split_once(':')
                && ["Private_Hugetlb", "Shared_Hugetlb"].contains(&name)
            {
                let kib = value.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok());
                detail.bytes = detail.bytes.saturating_add(kib.unwrap_or(0).saturating_mul(1024));
            } else if let Some(flags) = line.strip_prefix("VmFlags:") {
                detail.reserves = !flags.split_ascii_whitespace().any(|flag| flag == "nr");
            } else if let Some(mapping) = Mapping::parse(line) {
                start = mapping.range.start;
            }
        }
        details
    }
}

/// For the fuzz targets: reads the text of `/proc/PID/smaps`.
#[doc(hidden)]
pub fn fuzz_smaps(smaps: &str) {
    assert!(Detail::parse(smaps).len() <= smaps.lines().count());
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
