//! System calls that change mappings, without safe wrappers: this program's subject is what they return.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::null_mut;

use nix::unistd::Pid;

/// Bytes of a page.
pub const PAGE: usize = 4096;
const RW: c_int = libc::PROT_READ | libc::PROT_WRITE;

fn address(result: *mut c_void) -> io::Result<usize> {
    if result == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

fn check(result: i64) -> io::Result<i64> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// What is mapped.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// Writes are seen by others.
    pub shared: bool,
    /// -1 for anonymous memory.
    pub fd: c_int,
    /// Page of the file.
    pub first: usize,
}

/// Maps pages: where the kernel likes, or at `at` in place of whatever is there.
pub fn map(at: usize, pages: usize, source: Source) -> io::Result<usize> {
    let kind = if source.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    let anonymous = if source.fd < 0 { libc::MAP_ANONYMOUS } else { 0 };
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    let (length, offset) = (pages * PAGE, (source.first * PAGE) as i64);
    // SAFETY: the callers replace only mappings of their own, into which there are no references.
    address(unsafe { libc::mmap(at as *mut c_void, length, RW, kind | anonymous | fixed, source.fd, offset) })
}

/// Addresses of which nobody makes use.
pub fn reserve(pages: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, which replaces nothing.
    address(unsafe { libc::mmap(null_mut(), pages * PAGE, libc::PROT_NONE, flags, -1, 0) })
}

/// munmap(2)
pub fn unmap(at: usize, pages: usize) -> io::Result<()> {
    // SAFETY: as for `map`.
    check(unsafe { libc::munmap(at as *mut c_void, pages * PAGE) }.into()).map(drop)
}

/// mremap(2): to `to` in place of whatever is there, or to where the kernel likes. With no `old` pages it maps a shared object again.
pub fn remap(at: usize, old: usize, new: usize, to: usize) -> io::Result<usize> {
    let flags = libc::MREMAP_MAYMOVE | if to == 0 { 0 } else { libc::MREMAP_FIXED };
    // SAFETY: as for `map`.
    address(unsafe { libc::mremap(at as *mut c_void, old * PAGE, new * PAGE, flags, to as *mut c_void) })
}

/// madvise(2)
pub fn advise(at: usize, pages: usize, advice: c_int) -> io::Result<()> {
    // SAFETY: as for `map`.
    check(unsafe { libc::madvise(at as *mut c_void, pages * PAGE, advice) }.into()).map(drop)
}

/// madvise(2) by another process.
pub fn advise_parent(at: usize, pages: usize, advice: c_int) -> io::Result<()> {
    let range = libc::iovec { iov_base: at as *mut c_void, iov_len: pages * PAGE };
    // SAFETY: numbers, and a range that the kernel reads.
    unsafe {
        let process = check(libc::syscall(libc::SYS_pidfd_open, libc::getppid(), 0))?;
        let done = check(libc::syscall(libc::SYS_process_madvise, process, &raw const range, 1, advice, 0));
        libc::close(process as c_int);
        done.map(drop)
    }
}

/// Makes pages read-only, or writable again.
pub fn protect(at: usize, pages: usize, writable: bool) -> io::Result<()> {
    let protection = if writable { RW } else { libc::PROT_READ };
    // SAFETY: as for `map`.
    check(unsafe { libc::mprotect(at as *mut c_void, pages * PAGE, protection) }.into()).map(drop)
}

/// Moves the end of the heap by so many pages; returns where it was.
pub fn move_break(pages: isize) -> io::Result<usize> {
    // SAFETY: whoever takes pages away has added them, and nobody else has since.
    address(unsafe { libc::sbrk(pages * PAGE as isize) })
}

/// A new System V segment, attached; it ends with its last user.
pub fn segment(pages: usize) -> io::Result<(usize, c_int)> {
    // SAFETY: numbers; a new mapping, which replaces nothing.
    unsafe {
        let id = check(libc::shmget(libc::IPC_PRIVATE, pages * PAGE, libc::IPC_CREAT | 0o600).into())? as c_int;
        Ok((attach(id)?, id))
    }
}

/// shmat(2)
pub fn attach(id: c_int) -> io::Result<usize> {
    // SAFETY: a new mapping, which replaces nothing.
    address(unsafe { libc::shmat(id, std::ptr::null(), 0) })
}

/// shmdt(2)
pub fn detach(at: usize) -> io::Result<()> {
    // SAFETY: as for `map`.
    check(unsafe { libc::shmdt(at as *const c_void) }.into()).map(drop)
}

/// The first and the last word of a page.
pub fn read(at: usize) -> [u64; 2] {
    // SAFETY: the page is mapped, and written by this process and its children alone.
    [at, at + PAGE - 8].map(|at| unsafe { (at as *const u64).read_volatile() })
}

/// Writes the first and the last word of a page.
pub fn write(at: usize, value: u64) {
    // SAFETY: as for `read`; no reference points there.
    [at, at + PAGE - 8].into_iter().for_each(|at| unsafe { (at as *mut u64).write_volatile(value) });
}

/// Starts a process that does something without allocating, and ends with its parent at the latest.
pub fn fork(child: impl FnOnce() -> bool) -> io::Result<Pid> {
    // SAFETY: the parent is one thread; the child leaves by `_exit`.
    match check(unsafe { libc::fork() }.into())? {
        0 => {
            // SAFETY: numbers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            let right = child();
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Waits for ever.
pub fn idle() -> ! {
    loop {
        // SAFETY: no preconditions.
        unsafe { libc::pause() };
    }
}
