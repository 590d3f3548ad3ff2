//! Soft-dirty bits (Documentation/admin-guide/mm/soft-dirty.rst): the kernel sets one in the page table at the first write to a
//! page after they were cleared. They are read with [`Pagemap::soft_dirty`].
//!
//! To read them and to clear them are two steps, and clearing is for a whole address space: who wants to lose no write has its
//! writers stand still from the one to the other ([`crate::standstill`]).

use std::io;

use crate::pagemap::Pagemap;
use crate::scratch::Scratch;

/// Clears the bits of all pages of a process.
pub fn clear(process: u32) -> io::Result<()> {
    std::fs::write(format!("/proc/{process}/clear_refs"), "4")
}

/// Whether this kernel has them: without `CONFIG_MEM_SOFT_DIRTY` clearing succeeds and no bit is ever set. Tried on some pages of
/// this process.
pub fn works_here() -> bool {
    tried().unwrap_or(false)
}

fn tried() -> io::Result<bool> {
    let scratch = Scratch::map(4, libc::MAP_PRIVATE)?;
    (0..4).for_each(|page| scratch.write(page));
    let own = std::process::id();
    clear(own)?;
    scratch.write(1);
    let mut written = Vec::new();
    Pagemap::open(own)?.soft_dirty(scratch.start(), scratch.end(), |from, to, dirty| {
        if dirty {
            written.extend(scratch.numbers(from, to));
        }
    })?;
    Ok(written == [1])
}
