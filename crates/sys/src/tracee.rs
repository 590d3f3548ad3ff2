//! One thread of another process, traced (ptrace(2), `PTRACE_SEIZE`).
//!
//! If the thread that traces ends, the kernel detaches its tracees: they go on with the registers that they have.

use std::io;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

const EVENT_STOP: i32 = 128;
/// The signal number of a stop at a system call, with `PTRACE_O_TRACESYSGOOD`.
const AT_SYSCALL: i32 = libc::SIGTRAP | 0x80;

/// Why a tracee stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It was interrupted, or a signal has stopped its process (group-stop).
    Trap,
    /// It enters a system call, or leaves one.
    Syscall,
    /// It is about to get this signal. Resumed without that number, it never gets the signal.
    Signal(i32),
    /// Another event of ptrace.
    Event(i32),
}

/// A traced thread.
#[derive(Debug, PartialEq, Eq, Hash, Clone, Copy)]
pub(crate) struct Tracee(Pid);

/// Registers as `PTRACE_GETREGS` has them.
#[cfg(target_arch = "x86_64")]
pub(crate) type Registers = libc::user_regs_struct;

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

/// # Safety
/// `address` and `data` are numbers, or addresses of live values of the type that the request reads or writes in this process.
unsafe fn ptrace(request: libc::c_uint, thread: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: by contract of this function.
    let done = unsafe { libc::ptrace(request, thread.as_raw(), address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Tracee {
    /// An option of tracing: the thread stops when it forks, and the child is traced and stopped, too.
    pub const FORKS: libc::c_int = libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK | libc::PTRACE_O_TRACECLONE;
    /// An option of tracing: seccomp filters see none of its system calls.
    pub const SUSPEND_SECCOMP: libc::c_int = 1 << 21;

    /// Traces a thread, which goes on running.
    ///
    /// # Errors
    /// EPERM: another process traces it. ESRCH: it has ended.
    pub fn seize(thread: Pid, options: libc::c_int) -> io::Result<Self> {
        let options = libc::PTRACE_O_TRACESYSGOOD | options;
        // SAFETY: the request takes numbers.
        unsafe { ptrace(libc::PTRACE_SEIZE, thread, 0, options as usize) }?;
        Ok(Self(thread))
    }

    /// A thread of which the stop of another one has told.
    pub fn of_event(thread: i32) -> Self {
        Self(Pid::from_raw(thread))
    }

    /// Sets the options of a stopped thread.
    pub fn set_options(self, options: libc::c_int) -> io::Result<()> {
        // SAFETY: the request takes numbers.
        unsafe { ptrace(libc::PTRACE_SETOPTIONS, self.0, 0, (libc::PTRACE_O_TRACESYSGOOD | options) as usize) }
    }

    /// What the stop at an event tells: of a fork, the child's pid.
    pub fn event_message(self) -> io::Result<u64> {
        let mut message: libc::c_ulong = 0;
        // SAFETY: the structure is ours, and of the type that the request wants.
        unsafe { ptrace(libc::PTRACE_GETEVENTMSG, self.0, 0, &raw mut message as usize) }?;
        Ok(message)
    }

    /// The thread's number.
    pub fn thread(self) -> Pid {
        self.0
    }

    /// Asks for a stop. Where the thread stands still already, the stop comes after it was resumed, before it runs any code of its own.
    pub fn interrupt(self) -> io::Result<()> {
        // SAFETY: the request takes numbers.
        unsafe { ptrace(libc::PTRACE_INTERRUPT, self.0, 0, 0) }
    }

    /// Where the instruction is, or the memory, whose use has raised the signal that a stopped thread is about to get; `None` if the
    /// signal was sent.
    pub fn fault_address(self) -> io::Result<Option<u64>> {
        // SAFETY: plain integers; all zeros is a value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours, and of the type that the request wants.
        unsafe { ptrace(libc::PTRACE_GETSIGINFO, self.0, 0, &raw mut info as usize) }?;
        let by_fault = matches!(info.si_signo, libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGTRAP);
        // SAFETY: the kernel fills in the address of each of these signals that it raises itself.
        Ok((by_fault && info.si_code > 0).then(|| unsafe { info.si_addr() } as u64))
    }

    /// Lets a stopped thread run, with the signal that it was about to get, or 0.
    pub fn resume(self, signal: i32) -> io::Result<()> {
        // SAFETY: the request takes numbers.
        unsafe { ptrace(libc::PTRACE_CONT, self.0, 0, signal as usize) }
    }

    /// The same, until it enters or leaves a system call.
    pub fn resume_to_syscall(self) -> io::Result<()> {
        // SAFETY: the request takes numbers.
        unsafe { ptrace(libc::PTRACE_SYSCALL, self.0, 0, 0) }
    }

    /// Ends the tracing of a stopped thread, which goes on, or stays where a signal has stopped its process.
    pub fn detach(self) {
        self.detach_with(0);
    }

    /// The same, with the signal that it was about to get.
    pub fn detach_with(self, signal: i32) {
        // It fails if the thread has ended, and then there is nothing to end.
        // SAFETY: the request takes numbers.
        let _ = unsafe { ptrace(libc::PTRACE_DETACH, self.0, 0, signal as usize) };
    }

    /// The thread's stop, if it has come.
    ///
    /// # Errors
    /// ESRCH: the thread has ended.
    pub fn stop(self) -> io::Result<Option<Stop>> {
        let mut status = 0;
        // Not by nix, which does not know the stop of a real-time signal.
        // SAFETY: the call writes one integer, which is ours.
        match unsafe { libc::waitpid(self.0.as_raw(), &raw mut status, libc::__WALL | libc::WNOHANG) } {
            0 => return Ok(None),
            ..0 => {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    Some(libc::EINTR) => Ok(None),
                    Some(libc::ECHILD) => Err(gone()),
                    _ => Err(error),
                };
            }
            _ => {}
        }
        if !libc::WIFSTOPPED(status) {
            return Err(gone());
        }
        Ok(Some(match (libc::WSTOPSIG(status), status >> 16) {
            (_, EVENT_STOP) => Stop::Trap,
            (AT_SYSCALL, _) => Stop::Syscall,
            (signal, 0) => Stop::Signal(signal),
            (_, event) => Stop::Event(event),
        }))
    }

    /// Waits for the thread's next stop, until `deadline` if there is one; `None` if it does not come. `nap` passes a moment, at most so
    /// long.
    pub fn wait(self, deadline: Option<Instant>, nap: fn(Duration)) -> io::Result<Option<Stop>> {
        /// Where a nap does not end when the thread stops.
        const LONGEST: Duration = Duration::from_millis(2);
        loop {
            if let Some(stop) = self.stop()? {
                return Ok(Some(stop));
            }
            let left = deadline.map_or(LONGEST, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(None);
            }
            nap(left.min(LONGEST));
        }
    }

    /// Waits for the stop that the thread was asked for: whether it has come. Signals that come first are delivered.
    pub fn wait_for_trap(self, deadline: Option<Instant>, nap: fn(Duration)) -> io::Result<bool> {
        loop {
            match self.wait(deadline, nap)? {
                Some(Stop::Trap) => return Ok(true),
                // The number that was told keeps the signal's siginfo.
                Some(Stop::Signal(signal)) => self.resume(signal)?,
                Some(Stop::Syscall | Stop::Event(_)) => self.resume(0)?,
                None => return Ok(false),
            }
        }
    }

    /// A word of the memory of a stopped thread.
    pub fn peek(self, address: u64) -> io::Result<u64> {
        nix::errno::Errno::clear();
        // SAFETY: the call reads another process's memory; libc returns the word.
        let word = unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, self.0.as_raw(), address as usize, 0) };
        match nix::errno::Errno::last_raw() {
            0 => Ok(word as u64),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Writes a word to the memory of a stopped thread.
    pub fn poke(self, address: u64, word: u64) -> io::Result<()> {
        // SAFETY: the request takes numbers; an address is one in the other process.
        unsafe { ptrace(libc::PTRACE_POKEDATA, self.0, address as usize, word as usize) }
    }

    /// Has the kernel write a structure about a stopped thread that it describes by its size, as some requests do.
    ///
    /// # Safety
    /// The request takes the structure's size for `address`, and writes a `T` for which any bytes are a value.
    pub unsafe fn describe<T: Copy>(self, request: libc::c_uint, structure: &mut T) -> io::Result<()> {
        // SAFETY: by contract of this function.
        unsafe { ptrace(request, self.0, size_of::<T>(), &raw mut *structure as usize) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tracee {
    /// The registers of a stopped thread.
    pub fn registers(self) -> io::Result<Registers> {
        // SAFETY: plain integers; all zeros is a value.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours, and of the type that the request wants.
        unsafe { ptrace(libc::PTRACE_GETREGS, self.0, 0, &raw mut registers as usize) }?;
        Ok(registers)
    }

    /// Gives a stopped thread these registers. Of the floating point unit's nothing is changed.
    pub fn set_registers(self, registers: &Registers) -> io::Result<()> {
        // SAFETY: the structure is ours, and of the type that the request wants.
        unsafe { ptrace(libc::PTRACE_SETREGS, self.0, 0, &raw const *registers as usize) }
    }
}

/// The letter of a thread's state in `/proc/PID/task/TID/stat`; `None` if it is gone.
pub(crate) fn state(process: u32, thread: Pid) -> Option<u8> {
    let stat = std::fs::read(format!("/proc/{process}/task/{thread}/stat")).ok()?;
    // The name may contain anything.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

/// The threads of a process that have not ended. (The first one may have, while others go on.)
pub(crate) fn threads(process: u32) -> io::Result<Vec<Pid>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?.flatten();
    let threads = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    Ok(threads.filter(|thread| !matches!(state(process, *thread), None | Some(b'Z' | b'X'))).collect())
}
