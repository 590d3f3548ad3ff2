//! System calls made in another process: the process is stopped for an instant with ptrace, made to execute one `syscall`
//! instruction that its own vdso contains, and let go as if nothing had happened. Nothing of its memory is written.
//!
//! While it is stopped all its signals are blocked, so that none is delivered in between, and its seccomp filters are
//! suspended (PTRACE_O_SUSPEND_SECCOMP). A system call that the stop interrupted is restarted by the kernel, from the
//! registers that are put back.

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// One thread of another process, stopped until this is dropped.
#[derive(Debug)]
pub struct Stopped {
    /// The process (thread group).
    process: u32,
    thread: Pid,
    #[cfg(target_arch = "x86_64")]
    saved: libc::user_regs_struct,
    mask: u64,
    instruction: u64,
    /// Only the thread that stopped it may deal with it: ptrace(2).
    of_this_thread: std::marker::PhantomData<*const ()>,
}

#[cfg(target_arch = "x86_64")]
const SYSCALL: &[u8] = &[0x0f, 0x05];

pub(crate) fn ptrace(request: libc::c_uint, thread: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the callers pass pointers to live values of the type that the request wants, or plain numbers.
    let done = unsafe { libc::ptrace(request, thread.as_raw(), address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(target_arch = "x86_64")]
impl Stopped {
    /// Stops one thread of a process. Fails for a process that another one traces already, and for one that is gone.
    pub fn stop(process: u32) -> io::Result<Self> {
        let instruction = instruction_of(process)?;
        let thread = live_thread(process)?;
        ptrace(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_SUSPEND_SECCOMP as usize)
            // A tracer that is confined itself may not suspend filters; most processes have none.
            .or_else(|_| ptrace(libc::PTRACE_SEIZE, thread, 0, 0))?;
        let prepared = || -> io::Result<(libc::user_regs_struct, u64)> {
            ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
            resume_to_stop(thread, WaitPidFlag::empty())?;
            let mut mask = 0u64;
            ptrace(libc::PTRACE_GETSIGMASK, thread, 8, &raw mut mask as usize)?;
            // SAFETY: plain integers; all zeros is a value.
            let mut saved: libc::user_regs_struct = unsafe { std::mem::zeroed() };
            ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut saved as usize)?;
            let all = u64::MAX;
            ptrace(libc::PTRACE_SETSIGMASK, thread, 8, &raw const all as usize)?;
            Ok((saved, mask))
        };
        match prepared() {
            Ok((saved, mask)) => {
                Ok(Self { process, thread, saved, mask, instruction, of_this_thread: std::marker::PhantomData })
            }
            Err(error) => {
                let _ = ptrace(libc::PTRACE_DETACH, thread, 0, 0);
                Err(error)
            }
        }
    }

    /// Has the thread make a system call; what it returns, errors as errors.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let mut registers = self.saved;
        registers.rip = self.instruction;
        registers.rax = number as u64;
        // No system call to be restarted.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        ptrace(libc::PTRACE_SETREGS, self.thread, 0, &raw const registers as usize)?;
        step(self.thread)?;
        ptrace(libc::PTRACE_GETREGS, self.thread, 0, &raw mut registers as usize)?;
        match registers.rax as i64 {
            error @ -4095..0 => Err(io::Error::from_raw_os_error(-error as i32)),
            value => Ok(value as u64),
        }
    }

    /// Has the process open a descriptor by a system call, and takes that over: the process itself keeps none.
    pub fn open(&mut self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<OwnedFd> {
        let theirs = self.call(number, arguments)?;
        let taken = crate::process::take_descriptor(self.process, theirs as i32);
        self.call(libc::SYS_close, [theirs, 0, 0])?;
        taken
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Stopped {
    fn drop(&mut self) {
        // If any of these fails the thread has died, and there is nothing to put back.
        let _ = ptrace(libc::PTRACE_SETREGS, self.thread, 0, &raw const self.saved as usize);
        let _ = ptrace(libc::PTRACE_SETSIGMASK, self.thread, 8, &raw const self.mask as usize);
        let _ = ptrace(libc::PTRACE_DETACH, self.thread, 0, 0);
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Stopped {
    /// System calls in other processes are made on x86-64 only.
    pub fn stop(_process: u32) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// See [`Stopped::stop`].
    pub fn open(&mut self, _number: libc::c_long, _arguments: [u64; 3]) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// In a wait's status: the stop of a seized thread that was asked for, or that of a process that a signal has stopped.
const PTRACE_EVENT_STOP: i32 = 128;

/// Has a stopped thread execute one instruction. Where a signal has stopped the process, the thread was in that stop when it was asked for
/// another one, which comes first.
fn step(thread: Pid) -> io::Result<()> {
    loop {
        ptrace(libc::PTRACE_SINGLESTEP, thread, 0, 0)?;
        match waitpid(thread, Some(WaitPidFlag::__WALL))? {
            WaitStatus::PtraceEvent(_, _, PTRACE_EVENT_STOP) => {}
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => return Ok(()),
        }
    }
}

/// Waits for the stop that a seized thread was asked for. A signal may have come between seizing and asking, and stops it first:
/// the thread gets that signal, and stops then, before its handler runs. False: it has not stopped yet, where `flags` has
/// `WNOHANG`. A thread that has died has stopped.
pub(crate) fn resume_to_stop(thread: Pid, flags: WaitPidFlag) -> io::Result<bool> {
    loop {
        match waitpid(thread, Some(WaitPidFlag::__WALL | flags)) {
            Ok(WaitStatus::StillAlive) => return Ok(false),
            // If it dies instead, it has done so at the next look.
            Ok(WaitStatus::Stopped(_, signal)) => drop(ptrace(libc::PTRACE_CONT, thread, 0, signal as usize)),
            Ok(_) | Err(Errno::ECHILD) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a thread is gone or a zombie.
pub(crate) fn is_dead(thread: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// A thread that has not exited; the first one may have, while others go on.
fn live_thread(process: u32) -> io::Result<Pid> {
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))?.flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
        if let (Some(b'R' | b'S' | b'D' | b'T' | b'I'), Some(tid)) =
            (state, entry.file_name().to_str().and_then(|n| n.parse().ok()))
        {
            return Ok(Pid::from_raw(tid));
        }
    }
    Err(io::Error::from_raw_os_error(libc::ESRCH))
}

/// Address of a system call instruction in the process's vdso.
#[cfg(target_arch = "x86_64")]
fn instruction_of(process: u32) -> io::Result<u64> {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let range = maps.lines().find(|l| l.ends_with("[vdso]")).and_then(|l| l.split_once(' ')?.0.split_once('-'));
    let parse = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = range
        .and_then(|(start, end)| Some((parse(start)?, parse(end)?)))
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "the process has no vdso"))?;
    let mut code = vec![0; (end - start) as usize];
    std::fs::File::open(format!("/proc/{process}/mem"))?.read_exact_at(&mut code, start)?;
    let at = code.windows(SYSCALL.len()).position(|w| w == SYSCALL);
    let at = at.ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "its vdso makes no system calls"))?;
    Ok(start + at as u64)
}
