//! Memory that nobody can read, not even its own process: what has it cannot be moved, and is refused by name.
//!
//! Guard pages (`MADV_GUARD_INSTALL`) are none of it: they have no content, and CRIU makes them anew.

use std::io;

use tranship_sys::pagemap::Pagemap;
use tranship_sys::process;
use tranship_types::PAGE_SIZE;

use crate::maps::Mapping;
use crate::send;
use crate::survey::Space;

/// A page that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "process {pid} has memory at {address:#x} that cannot be read (it was poisoned, or the kernel keeps others from reading it)"
)]
pub struct Unreadable {
    /// Pid on this node.
    pub pid: u32,
    /// Where.
    pub address: u64,
}

/// The first page of an address space that cannot be read, if there is one. The process may run meanwhile.
///
/// Pages that are there are readable, unless their mapping's protection keeps everybody off; those that are in swap space are taken to be. So this
/// looks at marks in the page table, and at one page of each mapping that its own process may not read.
pub fn find(space: &Space) -> Option<Unreadable> {
    let Space { pid, ranges, files, .. } = space;
    // A process that ends meanwhile has none.
    let mut pagemap = Pagemap::open(*pid).ok()?;
    let mut suspects = Vec::new();
    for range in ranges.iter().chain(files) {
        let _ = pagemap.marks(range.start, range.end, |address| suspects.push(address));
    }
    let maps = process::mappings(*pid).ok()?.map_while(Result::ok).filter_map(|line| Mapping::parse(&line));
    for mapping in maps.filter(|m| !m.readable && m.is_private_anonymous()) {
        suspects.extend(pagemap.first_populated(mapping.range.start, mapping.range.end).ok().flatten());
    }
    let address =
        suspects.into_iter().find(|address| !is_readable(*pid, *address) && is_there(&mut pagemap, *address))?;
    Some(Unreadable { pid: *pid, address })
}

fn is_readable(pid: u32, address: u64) -> bool {
    send::read(pid, address, &mut [0; PAGE_SIZE as usize]).is_ok()
}

/// What was unmapped or made a guard since is no obstacle.
fn is_there(pagemap: &mut Pagemap, address: u64) -> bool {
    let there = |pagemap: &mut Pagemap| -> io::Result<bool> {
        let mut marked = false;
        pagemap.marks(address, address + PAGE_SIZE, |_| marked = true)?;
        Ok(marked || pagemap.first_populated(address, address + PAGE_SIZE)?.is_some())
    };
    there(pagemap).unwrap_or(false)
}
