//! System calls made in another process: one of its threads is stopped with ptrace, given registers with which it executes a `syscall`
//! instruction of its vdso, and given its own registers back. Nothing of its memory is written.
//!
//! ```text
//!           the thread                                     its registers
//!  seized, interrupted                                     its own
//!    │ trap: in the kernel, where signals are delivered    its own, kept here
//!    │ SETREGS, PTRACE_SYSCALL                             redirected ┐
//!    ├─ a signal is due: SETREGS, the signal, trap, again  its own    │ the process that
//!    │ enters the system call, PTRACE_SYSCALL              redirected │ traces it stays
//!    │ leaves the system call, SETREGS                     its own    ┘
//!    │ INTERRUPT, PTRACE_CONT
//!    │ trap: in the same place as the first one            its own
//!  detached
//! ```
//!
//! The thread is stopped and let go at the same place, with the same registers, `orig_rax` among them. So the kernel does there what it
//! would have done without all this: it delivers the signals that came meanwhile, in their order and with what was sent along, and it
//! goes on with the system call that the stop interrupted. No signal is raised for it, none is blocked, and no handler ever runs on
//! foreign registers. What the kernel would do differently is made up for:
//!
//! - A thread inside of a restartable sequence is sent to its abort handler ([`crate::rseq`]).
//! - A system call that fails with EINTR because of the stop begins again ([`crate::interrupted`]).
//! - Seccomp filters are suspended (PTRACE_O_SUSPEND_SECCOMP); a thread whose system calls are dispatched to itself (prctl(2),
//!   PR_SET_SYSCALL_USER_DISPATCH) is left alone; TF is not set while it is redirected.
//! - A child that another thread forks between the two system calls inherits the descriptor, and is made to close it
//!   ([`crate::siblings`]).
//!
//! **If the tracer dies**, the kernel lets the thread go on with the registers that it has. While they are its own nothing is lost but
//! perhaps a descriptor that stays open. While they are redirected (some tens of microseconds in each
//! system call) the thread would go on in the vdso and crash. No order of steps avoids that, since the kernel offers no way to change
//! both at once. So this runs in a process that does nothing else ([`crate::own_process`]), which does not end in between, whoever has
//! started it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::interrupted::{Disturbance, begin_again, disturbance, is_64_bit, let_go};
use crate::own_process::{self, Task, nap};
use crate::process::{OpenFiles, is_unused_userfaultfd, is_userfaultfd};
use crate::rseq;
use crate::seccomp::{self, Rule, allow};
use crate::siblings::Siblings;
use crate::tracee::{Registers, Stop, Tracee, state, threads};
use crate::vdso::Vdso;

/// What is needed while a thread is stopped, beside memory.
const CALLS: &[Rule] = &[
    allow(libc::SYS_ptrace),
    allow(libc::SYS_wait4),
    allow(libc::SYS_rt_sigtimedwait),
    allow(libc::SYS_pidfd_getfd),
    allow(libc::SYS_kcmp),
    allow(libc::SYS_openat),
    allow(libc::SYS_statx),
    allow(libc::SYS_fstat),
    allow(libc::SYS_newfstatat),
    allow(libc::SYS_lseek),
    allow(libc::SYS_pread64),
    allow(libc::SYS_getdents64),
    allow(libc::SYS_readlinkat),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_readlink),
    allow(libc::SYS_sendmsg),
];
/// How long it may take until a thread of the process stands still.
const TO_STOP: Duration = Duration::from_secs(3);
/// How long one thread may take. One that waits in the kernel without being interruptible takes as long as that wait.
const ONE_TO_STOP: Duration = Duration::from_millis(100);
/// How long is waited for a thread that notices nothing of it.
const CHOOSY: Duration = Duration::from_secs(1);
/// How long a redirected thread may take to its system call before it is given its own registers back: its cgroup may be frozen.
const TO_CALL: Duration = Duration::from_millis(500);
/// How often it is done again if whoever does it is killed.
const KILLED: u32 = 2;
/// A program uses a userfaultfd that it has opened within less.
const MOMENT: Duration = Duration::from_millis(20);
/// How often a signal may come just before the system call.
const ATTEMPTS: u32 = 1000;
const PAGE: u64 = 4096;
/// The trap flag: an exception after each instruction.
const TRAP_FLAG: u64 = 1 << 8;

/// Has a process open a userfaultfd of its own address space, and takes that over: the process itself keeps none. Where whoever does this
/// is killed, it is done again.
///
/// # Errors
/// `Unsupported`: this process cannot be made to do that, whenever it is tried. `TimedOut`: none of its threads could be stopped in
/// time, as while they all wait for children that they have vforked. All else: it has ended, or another process traces it.
pub(crate) fn open_userfaultfd(process: u32, flags: u64) -> io::Result<OwnedFd> {
    let mut killed = 0;
    loop {
        let before = open_numbers(process)?;
        let opened = own_process::run(Task::OpenUserfaultfd { process, flags });
        match opened {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && killed < KILLED => {
                killed += 1;
                close_left(process, &before)?;
            }
            opened => return opened,
        }
    }
}

/// In a process of its own: has the process open one and close it again; the one that is taken over.
pub(crate) fn open_once(process: u32, flags: u64) -> io::Result<OwnedFd> {
    let files = OpenFiles::of(process)?;
    let mut stopped = StoppedThread::stop(process)?;
    // Not before: the kernel lets no process suspend the filters of another that has one itself. What is forbidden fails, since the
    // thread would crash if its tracer were killed.
    if let Err(error) = seccomp::refuse_others(&[seccomp::BASE, CALLS]) {
        stopped.release();
        return Err(error);
    }
    let siblings = Siblings::of(process, stopped.tracee.thread());
    let taken = take(&mut stopped, &files, flags);
    let instruction = stopped.instruction;
    stopped.release();
    // If nothing was taken, the siblings go on when this process ends.
    let (fd, number) = taken?;
    siblings.let_go(&fd, number, |child| {
        let mut stopped = StoppedThread { tracee: child, own: own_registers(child)?, instruction };
        let closed = stopped.call(libc::SYS_close, [number as u64, 0, 0]).map(drop);
        closed.and(child.set_registers(&stopped.own))
    });
    Ok(fd)
}

/// Has the process close a userfaultfd that it has opened for one that was killed before that one had it closed. (One that the program itself
/// has just opened is in use, see [`is_unused_userfaultfd`], a moment later.)
fn close_left(process: u32, before: &[i32]) -> io::Result<()> {
    let is_left = |number: &i32| !before.contains(number) && is_unused_userfaultfd(process, *number);
    let mut left = open_numbers(process)?;
    left.retain(is_left);
    if left.is_empty() {
        return Ok(());
    }
    std::thread::sleep(MOMENT);
    left.retain(is_left);
    for number in left {
        own_process::run(Task::CloseUserfaultfd { process, number })?;
    }
    Ok(())
}

/// In a process of its own: has the process close an unused userfaultfd; that is returned.
pub(crate) fn close_one(process: u32, number: i32) -> io::Result<OwnedFd> {
    let taken = OpenFiles::of(process)?.take(number)?;
    let mut stopped = StoppedThread::stop(process)?;
    let closed = match is_unused_userfaultfd(process, number) {
        true => seccomp::refuse_others(&[seccomp::BASE, CALLS])
            .and_then(|()| stopped.call(libc::SYS_close, [number as u64, 0, 0])),
        false => Ok(0),
    };
    stopped.release();
    closed.map(|_| taken)
}

/// The numbers under which a process has something open.
fn open_numbers(process: u32) -> io::Result<Vec<i32>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

fn take(stopped: &mut StoppedThread, files: &OpenFiles, flags: u64) -> io::Result<(OwnedFd, i32)> {
    let opened = stopped.call(libc::SYS_userfaultfd, [flags, 0, 0]).map_err(|error| match error.raw_os_error() {
        // Its descriptors are used up, or it may not have one of these.
        Some(errno @ (libc::EMFILE | libc::ENFILE | libc::EPERM | libc::ENOSYS)) => {
            let why = io::Error::from_raw_os_error(errno);
            io::Error::new(io::ErrorKind::Unsupported, format!("the process cannot open a userfaultfd: {why}"))
        }
        _ => error,
    })?;
    let number = i32::try_from(opened).map_err(|_| io::Error::other("the process opened an impossible descriptor"))?;
    let taken = files.take(number);
    // What is not ours is left open.
    if taken.as_ref().is_ok_and(|fd| !is_userfaultfd(fd.as_raw_fd())) {
        return Err(io::Error::other(format!("descriptor {number}, which the process opened, is no userfaultfd")));
    }
    stopped.call(libc::SYS_close, [opened, 0, 0])?;
    Ok((taken?, number))
}

/// One thread of another process, stopped. Only the thread that stopped it may deal with it, and if it is not [released](Self::release)
/// it goes on when that one ends.
#[derive(Debug)]
pub(crate) struct StoppedThread {
    pub(crate) tracee: Tracee,
    /// Its registers.
    pub(crate) own: Registers,
    /// Address of a `syscall` instruction.
    pub(crate) instruction: u64,
}

impl StoppedThread {
    /// Stops the thread of a process that notices the least of it.
    fn stop(process: u32) -> io::Result<Self> {
        let vdso = Vdso::of(process)?;
        let begin = Instant::now();
        let (mut tried, mut late, mut refusal) = (Vec::new(), Vec::<Tracee>::new(), None);
        while begin.elapsed() < TO_STOP {
            let in_the_end = |tracee: &Tracee| tracee.wait_for_trap(Some(Instant::now()), nap).unwrap_or(false);
            if let Some(number) = late.iter().position(in_the_end) {
                match Self::prepare(process, late.swap_remove(number), &vdso) {
                    Ok(stopped) => return Ok(stopped),
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => refusal = Some(error),
                }
            }
            let mut candidates = Vec::new();
            let threads = threads(process)?;
            if threads.is_empty() {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            for thread in threads {
                // One that waits in the kernel without being interruptible would not stop. Most wait for a moment only.
                if !tried.contains(&thread) && state(process, thread) != Some(b'D') {
                    let text = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/syscall"));
                    candidates.push((disturbance(&text.unwrap_or_default()), thread));
                }
            }
            candidates.retain(|(disturbance, _)| *disturbance < Disturbance::Part || begin.elapsed() > CHOOSY);
            let Some((_, thread)) = candidates.into_iter().min() else {
                if late.is_empty()
                    && let Some(error) = refusal
                {
                    return Err(error);
                }
                nap(Duration::from_millis(1));
                continue;
            };
            let attempt = Self::ask(process, thread).and_then(|(tracee, is_in_time)| {
                if is_in_time { Self::prepare(process, tracee, &vdso).map(Ok) } else { Ok(Err(tracee)) }
            });
            match attempt {
                Ok(Ok(stopped)) => return Ok(stopped),
                Ok(Err(tracee)) => {
                    tried.push(thread);
                    late.push(tracee);
                }
                // It has ended, and so may the process have.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => {
                    tried.push(thread);
                    refusal = Some(error);
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "no thread of the process stops: each waits in the kernel"))
    }

    /// Asks a thread to stop: whether it does so in time. Otherwise it may do so later.
    fn ask(process: u32, thread: Pid) -> io::Result<(Tracee, bool)> {
        let tracee = Tracee::seize(thread, 0)?;
        tracee.interrupt()?;
        let begin = Instant::now();
        while !tracee.wait_for_trap(Some(Instant::now() + ONE_TO_STOP), nap)? {
            // One that only waits for a processor stops when it gets one.
            if state(process, thread) != Some(b'R') || begin.elapsed() > TO_STOP {
                return Ok((tracee, false));
            }
        }
        Ok((tracee, true))
    }

    /// Of a thread that has stopped.
    fn prepare(process: u32, tracee: Tracee, vdso: &Vdso) -> io::Result<Self> {
        let thread = tracee.thread();
        // Suspended while it stands still, so that it makes no system call unseen but ours. A tracer that is confined itself may not do
        // that; most processes have no filters.
        let prepared = if tracee.set_options(Tracee::SUSPEND_SECCOMP).is_ok() || !is_filtered(process, thread) {
            own_registers(tracee).and_then(|own| {
                // Before it stood still it may have executed another program, whose vdso is elsewhere.
                let moved = if vdso.is_in(process) { None } else { Some(Vdso::of(process)?) };
                let instruction = moved.as_ref().unwrap_or(vdso).syscall_instruction();
                Ok(Self { tracee, own, instruction })
            })
        } else {
            Err(unsupported("a seccomp filter sees the process's system calls"))
        };
        if prepared.is_err() {
            let_go(tracee);
        }
        prepared
    }

    /// Has the thread, which is in a trap, make a system call, and be in a trap again: what it returns, errors as errors.
    fn call<const N: usize>(&mut self, number: libc::c_long, arguments: [u64; N]) -> io::Result<u64> {
        for _ in 0..ATTEMPTS {
            let mut redirected = self.own;
            redirected.rip = self.instruction;
            redirected.rax = number as u64;
            // No system call to be begun again.
            redirected.orig_rax = u64::MAX;
            redirected.eflags &= !TRAP_FLAG;
            let Registers { rdi, rsi, rdx, r10, r8, r9, .. } = &mut redirected;
            for (register, argument) in [rdi, rsi, rdx, r10, r8, r9].into_iter().zip(arguments) {
                *register = argument;
            }
            self.tracee.set_registers(&redirected)?;
            if self.enters(number as u64, self.instruction)? {
                return match self.leaves()? as i64 {
                    error @ -4095..0 => Err(io::Error::from_raw_os_error(-error as i32)),
                    value => Ok(value as u64),
                };
            }
        }
        self.tracee.set_registers(&self.own)?;
        Err(io::Error::new(io::ErrorKind::TimedOut, "signals come to the process without a pause"))
    }

    /// Lets the redirected thread run until it enters the system call. `false`: it got a signal first, and is in a trap, with registers
    /// of its own.
    fn enters(&mut self, number: u64, instruction: u64) -> io::Result<bool> {
        let mut deadline = Some(Instant::now() + TO_CALL);
        self.tracee.resume_to_syscall()?;
        loop {
            match self.tracee.wait(deadline, nap)? {
                Some(Stop::Syscall) => break,
                Some(Stop::Signal(signal)) => {
                    let is_ours = self.tracee.fault_address()? == Some(instruction);
                    self.tracee.set_registers(&self.own)?;
                    if is_ours {
                        return Err(unsupported("the process has a vdso that it cannot execute"));
                    }
                    self.tracee.interrupt()?;
                    self.tracee.resume(signal)?;
                    self.tracee.wait_for_trap(None, nap)?;
                    self.own = own_registers(self.tracee)?;
                    return Ok(false);
                }
                // Its process was stopped, or continued. Such a stop also is what it was interrupted for.
                Some(Stop::Trap | Stop::Event(_)) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {
                    self.tracee.resume_to_syscall()?;
                }
                Some(Stop::Trap | Stop::Event(_)) => {
                    self.tracee.set_registers(&self.own)?;
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "the process is kept from running"));
                }
                // However long it takes: it must not run with these registers.
                None => {
                    deadline = None;
                    self.tracee.interrupt()?;
                }
            }
        }
        let mut registers = self.tracee.registers()?;
        if registers.orig_rax == number && registers.rip == instruction + 2 {
            return Ok(true);
        }
        // The program has changed its vdso. The kernel skips this one.
        registers.orig_rax = u64::MAX;
        self.tracee.set_registers(&registers)?;
        self.leaves()?;
        Err(unsupported("the process has a vdso of its own making"))
    }

    /// Lets the thread, which enters a system call, leave it, and gives it its own registers back: what the call returns.
    fn leaves(&mut self) -> io::Result<u64> {
        self.tracee.resume_to_syscall()?;
        // Nothing else comes before that, but it may come late: the process's cgroup may be frozen.
        while self.tracee.wait(None, nap)? != Some(Stop::Syscall) {
            self.tracee.resume_to_syscall()?;
        }
        let returned = self.tracee.registers()?.rax;
        self.tracee.set_registers(&self.own)?;
        self.tracee.interrupt()?;
        self.tracee.resume(0)?;
        self.tracee.wait_for_trap(None, nap)?;
        // A signal may have come before the trap.
        self.own = self.tracee.registers()?;
        Ok(returned)
    }

    /// Has the thread map a page of memory that can be written to, and that nothing else knows: its address.
    pub(crate) fn map_page(&mut self) -> io::Result<u64> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        self.call(libc::SYS_mmap, [0, PAGE, protection as u64, flags as u64, u64::MAX, 0])
    }

    /// Has the thread unmap it.
    pub(crate) fn unmap_page(&mut self, address: u64) -> io::Result<()> {
        self.call(libc::SYS_munmap, [address, PAGE]).map(drop)
    }

    /// Has the thread make the system call with these registers, whose instruction pointer is at a `syscall` instruction, and be interrupted
    /// in it: with which registers it is in a trap again. `None`: it got a signal first, and has registers of its own.
    pub(crate) fn begin_and_interrupt(&mut self, with: &Registers, number: u64) -> io::Result<Option<Registers>> {
        self.tracee.set_registers(with)?;
        if !self.enters(number, with.rip)? {
            return Ok(None);
        }
        self.tracee.interrupt()?;
        self.tracee.resume(0)?;
        self.tracee.wait_for_trap(None, nap)?;
        self.tracee.registers().map(Some)
    }

    /// Lets it go.
    pub(crate) fn release(self) {
        // If it has died there is nothing to let go. What it is to go on with was not given to it where nothing was called.
        let _ = self.tracee.set_registers(&self.own);
        self.tracee.detach();
    }
}

/// The registers with which a thread, which is in a trap, is to go on.
fn own_registers(tracee: Tracee) -> io::Result<Registers> {
    let mut own = tracee.registers()?;
    if !is_64_bit(&own) {
        return Err(unsupported("the process runs 32-bit code"));
    }
    if dispatches_to_itself(tracee) {
        return Err(unsupported("the process dispatches its system calls to itself"));
    }
    begin_again(&mut own);
    own.rip = rseq::resumption(tracee, own.rip)?;
    Ok(own)
}

fn unsupported(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}

/// Whether a thread has seccomp filters, or may have.
fn is_filtered(process: u32, thread: Pid) -> bool {
    let status = crate::process::text(format!("/proc/{process}/task/{thread}/status")).unwrap_or_default();
    !status.lines().any(|line| line == "Seccomp:\t0")
}

/// Whether the kernel turns system calls of the thread into signals (prctl(2), PR_SET_SYSCALL_USER_DISPATCH).
fn dispatches_to_itself(tracee: Tracee) -> bool {
    const GET_CONFIGURATION: libc::c_uint = 0x4211;
    // Mode, selector, offset, length; older kernels do not tell.
    let mut configuration = [0u64; 4];
    // SAFETY: the request takes the structure's size; it consists of numbers.
    unsafe { tracee.describe(GET_CONFIGURATION, &mut configuration).is_ok() && configuration[0] != 0 }
}
