//! Mappings that were parts of one, and may be one again.
//!
//! Criu maps all private mappings writable in one place, moves them to where they belong, and takes the permission to write
//! from those that had none. If a mapping has no `anon_vma` by then the kernel takes `VM_ACCOUNT` from it, too
//! (`mprotect_fixup` in mm/mprotect.c), and does not join it with its neighbours any more when it becomes writable again:
//! mremap(2) across them fails. Criu by itself has put pages in place before; here they come later. So each mapping of the
//! processes concerned, whose pids are in the file that `TRANSHIP_JOINED` names, gets its `anon_vma` as it is mapped.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

const PAGE: usize = 4096;
/// Since Linux 6.13. To install guards gives a mapping an `anon_vma` without a page.
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

/// Pids in the container.
static PIDS: OnceLock<Vec<u32>> = OnceLock::new();

/// Reads the list, once it is there: it comes while criu waits for the images. Tasks, which do not see the file, have what
/// the process has read that they were forked from.
fn load() {
    if PIDS.get().is_none()
        && let Some(path) = std::env::var_os("TRANSHIP_JOINED")
        && let Ok(text) = std::fs::read_to_string(path)
    {
        let _ = PIDS.set(text.lines().filter_map(|line| line.parse().ok()).collect());
    }
}

/// Whether this process, in which criu makes a mapping, is one of those.
fn is_concerned() -> bool {
    PIDS.get().is_some_and(|pids| pids.contains(&std::process::id()))
}

/// Gives a mapping that criu has just made an `anon_vma`, where that is of use.
pub(crate) fn prepare(mapped: *mut c_void, protection: c_int, flags: c_int) {
    let kind = libc::MAP_TYPE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_LOCKED | libc::MAP_HUGETLB;
    // Criu has few of these, which its tasks share, and makes some before it forks the first one.
    if flags & libc::MAP_TYPE == libc::MAP_SHARED && flags & libc::MAP_ANONYMOUS != 0 {
        load();
    }
    let is_private = flags & kind == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    if !is_private || protection & libc::PROT_WRITE == 0 || !is_concerned() {
        return;
    }
    let advise = |advice| {
        // SAFETY: the first page of a mapping that was just made, and has no content.
        unsafe { libc::madvise(mapped, PAGE, advice) == 0 }
    };
    if advise(MADV_GUARD_INSTALL) {
        advise(MADV_GUARD_REMOVE);
    } else if advise(libc::MADV_POPULATE_WRITE) {
        advise(libc::MADV_DONTNEED);
    }
}
