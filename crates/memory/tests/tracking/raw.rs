//! What a subject does that has no safe wrapper. Nothing else in these tests is unsafe.

use std::ffi::{c_int, c_void};
use std::io;

use nix::unistd::Pid;

pub const PAGE: usize = 4096;
/// For those who want to map anywhere.
pub const ANYWHERE: usize = 0;
const HUGE: usize = 2 << 20;

fn check(result: i64) -> io::Result<i64> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Maps private zeros: anywhere, or at an address where there is nothing. With `huge` in huge pages.
pub fn map(address: usize, pages: usize, huge: bool) -> io::Result<usize> {
    let (room, place) = if huge { (HUGE, 0) } else { (0, if address == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE }) };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | place;
    let (address, protection) = (address as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping, which replaces nothing.
    let start = unsafe { libc::mmap(address, pages * PAGE + room, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if !huge {
        advise(start as usize, pages, libc::MADV_NOHUGEPAGE)?;
        return Ok(start as usize);
    }
    let start = (start as usize).next_multiple_of(HUGE);
    advise(start, pages, libc::MADV_HUGEPAGE)?;
    Ok(start)
}

pub fn unmap(address: usize, pages: usize) -> io::Result<()> {
    // SAFETY: subjects are told only of memory that they have mapped for this, and keep no references into it.
    check(unsafe { libc::munmap(address as *mut c_void, pages * PAGE) }.into()).map(drop)
}

/// Changes its length, and moves it, to a place of the kernel's choice or to one that is given.
pub fn remap(address: usize, pages: usize, new: usize, to: usize) -> io::Result<usize> {
    let flags = libc::MREMAP_MAYMOVE | if to == 0 { 0 } else { libc::MREMAP_FIXED };
    // SAFETY: as above, for both places.
    let start = unsafe { libc::mremap(address as *mut c_void, pages * PAGE, new * PAGE, flags, to as *mut c_void) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start as usize) }
}

pub fn advise(address: usize, pages: usize, advice: c_int) -> io::Result<()> {
    // SAFETY: as above.
    check(unsafe { libc::madvise(address as *mut c_void, pages * PAGE, advice) }.into()).map(drop)
}

pub fn protect(address: usize, pages: usize, protection: c_int) -> io::Result<()> {
    // SAFETY: as above.
    check(unsafe { libc::mprotect(address as *mut c_void, pages * PAGE, protection) }.into()).map(drop)
}

/// Writes a value to the beginning and the end of a page.
pub fn write(address: usize, value: u64) {
    for at in [address, address + PAGE - 8] {
        // SAFETY: as above; the place is aligned.
        unsafe { (at as *mut u64).write_volatile(value) }
    }
}

/// Writes one value after the other to a page, as long as the process lives.
pub fn write_on(address: usize) {
    let mut value = 0;
    loop {
        value += 1;
        write(address, value);
    }
}

/// Forks; the child does something, without allocating or printing, and ends. With `wait` the parent waits for that in the
/// kernel, without being interruptible.
pub fn fork(wait: bool, child: impl FnOnce()) -> io::Result<Pid> {
    let flags = libc::SIGCHLD | if wait { libc::CLONE_VFORK } else { 0 };
    // SAFETY: a child with a copy of all memory, which goes on in this thread alone and ends before it leaves the function.
    match check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })? {
        0 => {
            // SAFETY: numbers only; it ends with its parent.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            child();
            // SAFETY: _exit has no preconditions.
            unsafe { libc::_exit(0) }
        }
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// A process that has this one's memory, as one has that was vforked, and does nothing: a child, or a sibling.
pub fn share(sibling: bool) -> io::Result<Pid> {
    const STACK: usize = 4;
    extern "C" fn idle(_: *mut c_void) -> c_int {
        // SAFETY: numbers only; it ends with its parent.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            loop {
                libc::pause();
            }
        }
    }
    let stack = map(ANYWHERE, STACK, false)? + STACK * PAGE;
    let flags = libc::CLONE_VM | libc::SIGCHLD | if sibling { libc::CLONE_PARENT } else { 0 };
    // SAFETY: it runs on a stack of its own, which nobody else uses, and calls nothing but the kernel.
    let pid = unsafe { libc::clone(idle, stack as *mut c_void, flags, std::ptr::null_mut()) };
    check(pid.into()).map(|pid| Pid::from_raw(pid as i32))
}

/// From now on this process may read, write and end, and is killed for all else.
pub fn confine() -> io::Result<()> {
    let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Loads, comparisons and returns of classic BPF.
    let (load, equal, done) = (0x20, 0x15, 0x06);
    let allowed = [libc::SYS_read, libc::SYS_write, libc::SYS_exit_group];
    let mut filter = vec![statement(load, 0, 0, 0)];
    for (index, call) in allowed.iter().enumerate() {
        filter.push(statement(equal, (allowed.len() - index) as u8, 0, *call as u32));
    }
    filter.push(statement(done, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    filter.push(statement(done, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers, and a program that lives until the call returns.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program).into())?;
    }
    Ok(())
}
