//! Preloaded into criu: for a dump it hides the pages that the memory plane moves, and for a restore it puts shared memory
//! in place that the memory plane has brought ([`shared`]).
//! Where the agent has written what `/proc/PID/smaps` says, criu reads that file instead ([`smaps`]), and need not ask the
//! kernel of each mapping which file it is of ([`map_files`]).
//! Whether a task's sockets are those in its epoll sets it finds out faster than the kernel ([`epoll`]).
//! Segments that the containers of a pod share are made once ([`ipc`]).
//! Mappings that were parts of one it restores so that they can be one again ([`joined`]).
//! In nested tasks it replaces criu's own memory by copies ([`lineage`]).
//! At the end of a restore it keeps criu from waiting for each thread by itself ([`trace`]).
//!
//! System calls that a dump interrupts begin again where they can ([`interrupted`]), and end when they would have ended ([`waits`]).
//! What criu asks of sockets, and how it makes them anew, it puts right where needed ([`sockets`]), also where their files were renamed
//! ([`socket_files`]).
//! Sockets that are standard streams of a container it takes for files of the node ([`streams`]).
//! Tasks that a signal has stopped it has criu seize when their cgroup is thawed ([`stopped`]).
//! Processes that have ended it hides in a dump, and makes in a restore, where they are many ([`zombies`]). Of others it
//! keeps how they ended ([`ends`]).
//! What waits in terminals ([`terminals`]), errors of sockets ([`queues`]) and the marks of System V segments ([`segments`]) are after a dump
//! what they were before.
//!
//! Files whose name for the kernel is gone it knows by another one ([`renamed`]).
//! Directories that are roots of mounts it refers to and does not open ([`mount_points`]).
//!
//! It tells the resource limits of a task of another user where the kernel wants CAP_SYS_RESOURCE for that, from
//! `/proc/PID/limits`, which wants nothing.
//!
//! CRIU asks the kernel which pages of a task hold data: by the ioctl PAGEMAP_SCAN, or on kernels before 6.7 by reading
//! `/proc/PID/pagemap`. For the ranges listed in the file that `TRANSHIP_HIDDEN` names, this library answers "none", so
//! that criu neither drains nor writes those pages: its images hold the skeleton only.
//!
//! The file is a sequence of 24-byte records `{pid: u32, zero: u32, start: u64, end: u64}`, little endian, sorted by pid
//! and start, ranges not overlapping, written completely before criu is asked to dump. Once it has been loaded, a file of
//! the same name with `.used` appended shows the agent that the library is at work. A record with a 1 in the place of the
//! zero names shared memory of which no page shall be seen, by device and inode in the places of start and end.

mod ends;
mod epoll;
mod interrupted;
mod ipc;
mod joined;
mod lineage;
mod map_files;
mod mount_points;
mod queues;
mod renamed;
mod segments;
mod shared;
mod socket_files;
mod sockets;
mod stopped;
mod streams;
mod terminals;
mod texts;
mod trace;
mod waits;
mod zombies;

use std::ffi::{CStr, CString, OsString, c_int, c_long, c_ulong, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use texts::{Hidden, Table};

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGEMAP_SCAN: c_ulong = 0xc060_6610;
/// Guard pages have no content that could move: criu asks for them by themselves, and makes them anew.
const PAGE_IS_GUARD: u64 = 1 << 8;
const REGION_BYTES: u64 = 24;
const PAGE: u64 = 4096;
const _: () = assert!(size_of::<ScanArg>() == 96);

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Pread = unsafe extern "C" fn(c_int, *mut c_void, usize, i64) -> isize;

/// The next definition of `name` after this library's own.
fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string; dlsym returns an address or null.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // There is no way to go on without libc's own functions.
    if found.is_null() { std::process::abort() } else { found }
}

fn whole_table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let Some(path) = std::env::var_os("TRANSHIP_HIDDEN") else { return Table::default() };
        let Ok(bytes) = std::fs::read(&path) else { return Table::default() };
        let table = Table::read(&bytes);
        let mut used = path;
        used.push(".used");
        let _ = std::fs::write(used, b"");
        table
    })
}

/// Whether criu is to dump, and not to restore.
fn is_dump() -> bool {
    static DUMP: OnceLock<bool> = OnceLock::new();
    *DUMP.get_or_init(|| std::env::var_os("TRANSHIP_HIDDEN").is_some())
}

fn is_restore() -> bool {
    static RESTORE: OnceLock<bool> = OnceLock::new();
    *RESTORE.get_or_init(|| std::env::var_os("TRANSHIP_SHARED").is_some())
}

fn table() -> &'static [Hidden] {
    &whole_table().ranges
}

/// The pid whose pagemap the descriptor is, if it is one. Criu asks again and again about the same one.
fn pagemap_pid(fd: c_int) -> Option<u32> {
    static LAST: Mutex<Option<(Open, Option<u32>)>> = Mutex::new(None);
    let open = Open::of(fd)?;
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match *last {
        Some((known, pid)) if known == open => pid,
        _ => last.insert((open, read_pagemap_pid(fd))).1,
    }
}

/// A descriptor and the file behind it: its number may be another file's later on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Open {
    fd: c_int,
    device: u64,
    inode: u64,
}

impl Open {
    fn of(fd: c_int) -> Option<Self> {
        // SAFETY: plain integers; all zeros is a value, and the call fills it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours.
        let known = unsafe { libc::fstat(fd, &raw mut stat) } == 0;
        known.then_some(Self { fd, device: stat.st_dev, inode: stat.st_ino })
    }
}

fn read_pagemap_pid(fd: c_int) -> Option<u32> {
    let target = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    let text = target.to_str()?;
    let (_, pid) = text.strip_suffix("/pagemap")?.rsplit_once('/')?;
    pid.parse().ok()
}

/// The file that tells of a task's mappings, where there is one. The descriptor is of the task's directory in procfs.
fn smaps(directory: c_int) -> Option<CString> {
    smaps_of(std::fs::read_link(format!("/proc/self/fd/{directory}")).ok()?.file_name()?.to_str()?.parse().ok()?)
}

/// The file that tells of a task's mappings: beside the table, with `.smaps-PID` appended.
fn smaps_of(pid: u32) -> Option<CString> {
    static TABLE: OnceLock<Option<OsString>> = OnceLock::new();
    let table = TABLE.get_or_init(|| std::env::var_os("TRANSHIP_HIDDEN")).as_ref()?;
    let mut path = table.clone();
    path.push(format!(".smaps-{pid}"));
    CString::new(path.into_encoded_bytes()).ok()
}

/// The hidden ranges of `pid` that touch `[start, end)`.
fn hidden(pid: u32, start: u64, end: u64) -> &'static [Hidden] {
    let all = table();
    let from = all.partition_point(|h| (h.pid, h.end) <= (pid, start));
    let to = all.partition_point(|h| (h.pid, h.start) < (pid, end));
    &all[from..to.max(from)]
}

/// Answers PAGEMAP_SCAN without the hidden ranges: only the gaps between them are scanned.
///
/// # Safety
/// `arg` points to a valid `pm_scan_arg`, as the ioctl requires.
unsafe fn scan(fd: c_int, arg: *mut ScanArg, pid: u32, real: Ioctl) -> c_int {
    // SAFETY: by contract.
    let whole = unsafe { &mut *arg };
    let (start, end, vec, vec_len) = (whole.start, whole.end, whole.vec, whole.vec_len);
    let mut found: u64 = 0;
    let mut at = start;
    for hide in hidden(pid, start, end).iter().copied().chain([Hidden { pid, start: end, end }]) {
        let gap_end = hide.start.min(end);
        while at < gap_end {
            if found == vec_len {
                whole.walk_end = at;
                (whole.start, whole.end, whole.vec, whole.vec_len) = (start, end, vec, vec_len);
                return found as c_int;
            }
            whole.start = at;
            whole.end = gap_end;
            whole.vec = vec + found * REGION_BYTES;
            whole.vec_len = vec_len - found;
            // SAFETY: the caller's own vector, advanced by what is filled already.
            let count = unsafe { real(fd, PAGEMAP_SCAN, arg.cast()) };
            if count < 0 || whole.walk_end <= at {
                (whole.start, whole.end, whole.vec, whole.vec_len) = (start, end, vec, vec_len);
                return if count < 0 { count } else { found as c_int };
            }
            found += count as u64;
            at = whole.walk_end;
        }
        at = at.max(hide.end.min(end));
    }
    whole.walk_end = end;
    (whole.start, whole.end, whole.vec, whole.vec_len) = (start, end, vec, vec_len);
    found as c_int
}

/// Stands in for libc's `ioctl`.
///
/// # Safety
/// As libc's: the argument must fit the request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Ioctl = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"ioctl") as usize)) };
    if request == PAGEMAP_SCAN
        && !table().is_empty()
        // SAFETY: for this request the argument is a pm_scan_arg.
        && unsafe { (*argument.cast::<ScanArg>()).category_mask } != PAGE_IS_GUARD
        && let Some(pid) = pagemap_pid(fd)
    {
        // SAFETY: for this request the argument is a pm_scan_arg.
        return unsafe { scan(fd, argument.cast(), pid, real) };
    }
    // SAFETY: handed on as it came.
    let done = unsafe { real(fd, request, argument) };
    if request == socket_files::SIOCUNIXFILE && done >= 0 {
        socket_files::asked(fd, done);
    }
    done
}

/// Blanks the entries of hidden pages in what was read of a pagemap file.
fn blank(fd: c_int, buffer: *mut c_void, got: isize, offset: i64) {
    let (Ok(got), Ok(offset)) = (u64::try_from(got), u64::try_from(offset)) else { return };
    if got == 0 || table().is_empty() {
        return;
    }
    let Some(pid) = pagemap_pid(fd) else { return };
    let first = offset / 8 * PAGE;
    let last = (offset + got).div_ceil(8) * PAGE;
    for hide in hidden(pid, first, last) {
        let from = (hide.start / PAGE * 8).max(offset) - offset;
        let to = ((hide.end / PAGE * 8).min(offset + got)).saturating_sub(offset);
        if from < to {
            // SAFETY: `from..to` lies within the `got` bytes that the kernel has just written to the caller's buffer.
            unsafe { std::ptr::write_bytes(buffer.cast::<u8>().add(from as usize), 0, (to - from) as usize) };
        }
    }
}

macro_rules! pread {
    ($name:ident, $symbol:literal) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's: the buffer must hold `count` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, buffer: *mut c_void, count: usize, offset: c_long) -> isize {
            static REAL: OnceLock<usize> = OnceLock::new();
            // SAFETY: the symbol is libc's function of this type.
            let real: Pread = unsafe { std::mem::transmute(*REAL.get_or_init(|| next($symbol) as usize)) };
            // SAFETY: handed on as it came.
            let got = unsafe { real(fd, buffer, count, offset) };
            blank(fd, buffer, got, offset);
            got
        }
    };
}

pread!(pread, c"pread");
pread!(pread64, c"pread64");

type Syscall = unsafe extern "C" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

/// Stands in for libc's `syscall`, by which criu calls prlimit64 and kcmp.
///
/// # Safety
/// As libc's: the arguments must fit the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type; arguments beyond those of the call are ignored by the kernel.
    let real: Syscall = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"syscall") as usize)) };
    if number == libc::SYS_kcmp && c == epoll::KCMP_EPOLL_TFD && a == b && e != 0 {
        // SAFETY: for this comparison the fifth argument points to a slot, which is three u32.
        let slot = unsafe { std::ptr::with_exposed_provenance::<epoll::Slot>(e as usize).read_unaligned() };
        if epoll::is_socket_in(a as c_int, d, slot) {
            return 0;
        }
    }
    if number == libc::SYS_open_by_handle_at && a as c_int != libc::AT_FDCWD && mount_points::is_reference(a as c_int) {
        // SAFETY: for this call the second argument is a handle.
        return unsafe { mount_points::open_by_handle(a as c_int, b, c) };
    }
    // So criu opens it in each task, as the last thing before it leaves its own code.
    if number == libc::SYS_userfaultfd
        && a as c_int == libc::O_CLOEXEC | libc::O_NONBLOCK
        && is_restore()
        && let Err(error) = zombies::make()
    {
        shared::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
        return -1;
    }
    // SAFETY: handed on as it came.
    let done = unsafe { real(number, a, b, c, d, e, f) };
    if done == 0 && number == libc::SYS_clone3 {
        ends::begins();
    }
    let (pid, resource, new, old) = (a, b, c, d);
    if done == 0 || number != libc::SYS_prlimit64 || new != 0 || old == 0 {
        return done;
    }
    // SAFETY: libc's function has just set errno of this thread.
    if unsafe { *libc::__errno_location() } != libc::EPERM {
        return done;
    }
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits"));
    let limits = text.ok().zip(usize::try_from(resource).ok()).and_then(|(text, row)| texts::limits_row(&text, row));
    let Some(limits) = limits else {
        // SAFETY: errno of this thread; reading the file has changed it.
        unsafe { *libc::__errno_location() = libc::EPERM };
        return done;
    };
    // SAFETY: for this call the fourth argument points to a struct rlimit64, which is two u64.
    unsafe { std::ptr::with_exposed_provenance_mut::<[u64; 2]>(old as usize).write_unaligned(limits) };
    0
}

#[cfg(test)]
mod tests {
    use super::texts::limits_row;

    #[test]
    fn this_process_s_limits_are_those_that_the_kernel_tells() {
        let text = std::fs::read_to_string("/proc/self/limits").unwrap();
        for resource in 0..16 {
            let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the structure is ours.
            assert_eq!(unsafe { libc::getrlimit64(resource, &raw mut limit) }, 0);
            assert_eq!(limits_row(&text, resource as usize), Some([limit.rlim_cur, limit.rlim_max]));
        }
        assert_eq!(limits_row("", 3), None);
    }
}
