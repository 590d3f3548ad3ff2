//! Keeps the cost of a restored task from growing with the number of its ancestors.
//!
//! CRIU forks each task from its parent, so that a task inherits the memory that CRIU had in every process above. Two things are left out here:
//!
//! - CRIU maps the private memory of a task into a reserved area before it forks the task's children, which take over from there what they share with their parent.
//!   It leaves the areas of all other ancestors mapped. Each task unmaps them as it begins.
//! - For each mapping that has pages of its own the kernel lists all processes above that had it (`anon_vma_chain`, mm/rmap.c), and fork(2) copies these lists. Every
//!   [`LEVELS`]th level replaces CRIU's own mappings by fresh ones with the same content, whose lists are empty. A mapping that cannot be replaced costs time and
//!   nothing else.

use std::arch::asm;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::next;
use super::texts::{Private, private_mappings};

/// Levels of processes between two replacements.
const LEVELS: u32 = 16;

/// The longest mapping of which a copy is made, in bytes: of a heap that holds the images of thousands of tasks each task on such a level would have its own, in the
/// memory that its container is charged for. One list more to be copied costs little.
const LARGEST: usize = 2 << 20;

type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
type Readlinkat = unsafe extern "C" fn(c_int, *const c_char, *mut c_char, usize) -> isize;

/// Levels above this process. Each child inherits the number of its parent.
static LEVEL: AtomicU32 = AtomicU32::new(0);

/// Memory reserved for the private mappings of this task and of its ancestors, as far as this process has it.
static AREAS: Mutex<Vec<Area>> = Mutex::new(Vec::new());

/// A part of the area of the task that is `level` levels below the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Area {
    level: u32,
    start: usize,
    end: usize,
}

fn areas() -> MutexGuard<'static, Vec<Area>> {
    AREAS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records a new mapping, where it is the area of a task.
pub(crate) fn mapped(start: usize, len: usize, protection: c_int, flags: c_int) {
    let reserves = protection == libc::PROT_NONE && flags == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    if reserves && super::is_restore() && super::ends::is_task() {
        areas().push(Area { level: LEVEL.load(Ordering::Relaxed), start, end: start + len });
    }
}

/// Records that an address range belongs to no area any more: something else may be mapped there.
fn unmapped(start: usize, len: usize) {
    let mut areas = areas();
    *areas = without(&areas, start, start.saturating_add(len));
}

/// What is left of the areas without `start..end`.
fn without(areas: &[Area], start: usize, end: usize) -> Vec<Area> {
    let parts = |area: &Area| {
        let (below, above) = (Area { end: area.end.min(start), ..*area }, Area { start: area.start.max(end), ..*area });
        if area.start < end && start < area.end { vec![below, above] } else { vec![*area] }
    };
    areas.iter().flat_map(parts).filter(|part| part.start < part.end).collect()
}

/// Unmaps the areas of all ancestors but the parent of this task, which is on this level.
fn unmap_older(level: u32) {
    areas().retain(|area| {
        // SAFETY: CRIU refers to the parent's area only, and nothing else has been mapped in what is left of the others.
        let unmap =
            || unsafe { call(libc::SYS_munmap, [area.start as c_long, (area.end - area.start) as c_long, 0, 0, 0, 0]) };
        area.level + 1 >= level || unmap() < 0
    });
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As libc's: nothing uses the range any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Munmap = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"munmap") as usize)) };
    // SAFETY: handed on as it came.
    let done = unsafe { real(address, len) };
    if done == 0 {
        unmapped(address as usize, len);
    }
    done
}

/// Stands in for libc's function of this name, which takes the last argument only with some flags.
///
/// # Safety
/// As libc's: nothing uses the range at its old place any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Mremap = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"mremap") as usize)) };
    // SAFETY: handed on as it came.
    let moved = unsafe { real(old, old_len, new_len, flags, new) };
    if moved != libc::MAP_FAILED && moved != old {
        unmapped(old as usize, old_len);
    }
    moved
}

/// Stands in for libc's function of this name: each task begins with the question which process it is.
///
/// # Safety
/// As libc's: the path is a C string, and the buffer holds `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlinkat(directory: c_int, path: *const c_char, buffer: *mut c_char, size: usize) -> isize {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Readlinkat = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"readlinkat") as usize)) };
    // SAFETY: handed on as it came.
    let got = unsafe { real(directory, path, buffer, size) };
    // SAFETY: by contract.
    if got > 0 && unsafe { CStr::from_ptr(path) } == c"self" && super::is_restore() {
        let level = LEVEL.fetch_add(1, Ordering::Relaxed) + 1;
        unmap_older(level);
        if level.is_multiple_of(LEVELS) {
            // What is left as it was costs time only.
            let _ = replace_all(directory);
        }
    }
    got
}

/// Replaces the private mappings of this process, which has one thread. `proc` is the node's procfs, as CRIU has it open: a container may show anything in its own.
///
/// # Errors
/// The mappings cannot be read, or copied.
fn replace_all(proc: c_int) -> io::Result<()> {
    // SAFETY: the path is a C string; a descriptor that is returned is new.
    let mut file = unsafe {
        match libc::openat(proc, c"self/smaps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) {
            fd if fd >= 0 => File::from(OwnedFd::from_raw_fd(fd)),
            _ => return Err(io::Error::last_os_error()),
        }
    };
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let areas = areas();
    let is_own = |mapping: &Private| areas.iter().all(|area| mapping.end <= area.start || area.end <= mapping.start);
    let is_small = |mapping: &Private| mapping.end - mapping.start <= LARGEST;
    let own: Vec<Private> = private_mappings(&text).into_iter().filter(is_small).filter(is_own).collect();
    // SAFETY: sets are plain integers, and all zeros is one; the calls fill them, or read them only. With all signals blocked
    // nothing but this thread writes to the mappings, and `replace` writes to its stack only, which is not among them.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        let replaced = own.iter().try_for_each(|mapping| replace(mapping));
        libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        replaced
    }
}

/// Puts a copy in the place of a mapping.
///
/// # Safety
/// The mapping is readable, private, not the stack's, and nobody else writes to it meanwhile.
unsafe fn replace(mapping: &Private) -> io::Result<()> {
    let (start, len) = (mapping.start as c_long, (mapping.end - mapping.start) as c_long);
    let writable = c_long::from(libc::PROT_READ | libc::PROT_WRITE);
    let flags = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let to = c_long::from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    // SAFETY: a new mapping of this length is filled from one of the same length, and moved to its place. From the copy until the
    // move nothing is written but registers and the stack.
    unsafe {
        let copy = call(libc::SYS_mmap, [0, len, writable, flags, -1, 0]);
        if copy < 0 {
            return Err(io::Error::from_raw_os_error(-copy as i32));
        }
        asm!("rep movsb", inout("rcx") len => _, inout("rsi") start => _, inout("rdi") copy => _, options(nostack, preserves_flags));
        let mut done = 0;
        if !mapping.is_writable {
            done = call(libc::SYS_mprotect, [copy, len, c_long::from(libc::PROT_READ), 0, 0, 0]);
        }
        if done == 0 {
            done = call(libc::SYS_mremap, [copy, len, len, to, start, 0]);
        }
        if done >= 0 {
            return Ok(());
        }
        call(libc::SYS_munmap, [copy, len, 0, 0, 0, 0]);
        Err(io::Error::from_raw_os_error(-done as i32))
    }
}

/// Calls the kernel without libc, whose functions write to `errno`.
///
/// # Safety
/// As the call's.
#[inline(always)]
unsafe fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    let result;
    // SAFETY: a system call changes these registers and what its arguments point to.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unmapped_belongs_to_no_area() {
        let area = |level, start, end| Area { level, start, end };
        let all = [area(1, 10, 20), area(2, 20, 40)];
        assert_eq!(without(&all, 40, 50), all);
        assert_eq!(without(&all, 18, 22), [area(1, 10, 18), area(2, 22, 40)]);
        assert_eq!(without(&all, 25, 30), [all[0], area(2, 20, 25), area(2, 30, 40)]);
        assert_eq!(without(&all, 0, 20), [all[1]]);
    }

    #[test]
    fn a_mapping_that_is_replaced_keeps_its_content_and_its_protection() {
        const LEN: usize = 5 * 4096;
        // SAFETY: the mapping is made here, used by nobody else, and removed at the end.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let address = libc::mmap(std::ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(address, libc::MAP_FAILED);
            let bytes = std::slice::from_raw_parts_mut(address.cast::<u8>(), LEN);
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
            let start = address as usize;
            let mapping = Private { start, end: start + LEN, is_writable: true };
            for is_writable in [true, false] {
                replace(&Private { is_writable, ..mapping }).unwrap();
                assert!((0..LEN).all(|at| *address.cast::<u8>().add(at) == (at / 7) as u8));
                let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
                let found = private_mappings(&smaps).into_iter().find(|one| one.start <= start && start < one.end);
                assert_eq!(found.map(|one| one.is_writable), Some(is_writable));
            }
            assert_eq!(libc::munmap(address, LEN), 0);
        }
    }
}
