//! Work in a short-lived process of its own, which a death of this process does not interrupt.
//!
//! The process is forked, not executed: it begins within a millisecond and needs no program of its own. It leads a session, blocks all
//! signals, closes all descriptors of its parent, keeps the capabilities to trace processes only, and ends itself when its work is done. It is in its parent's cgroup, so that only what
//! ends all of that (`systemctl kill`, `KillMode=control-group`, an out-of-memory killer that ends whole groups) or names its pid ends it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use serde::{Deserialize, Serialize};

use crate::message_queue::{self, Rooms};
use crate::privileges::{self, Capability};
use crate::thaw::{self, Interrupted};
use crate::{descriptor, hidden_states, launch, remote, segment, shared_namespaces, socket};

/// What it takes to trace any process, to suspend its filters, and to read what the system tells of it.
const KEPT: &[Capability] = &[Capability::SysPtrace, Capability::SysAdmin, Capability::DacOverride];
/// How long the result is waited for: more than any work takes that the kernel does not keep from going on.
const PATIENCE: Duration = Duration::from_secs(10);
/// The message, of one byte, that a first step is done.
const FIRST_STEP: u8 = 1;
/// Longest text of an error.
const LONGEST: usize = 500;

/// What such a process does. The launcher has it done for an agent whose filter would be in its way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Task {
    /// [`remote::open_once`].
    OpenUserfaultfd { process: u32, flags: u64 },
    /// [`remote::close_one`].
    CloseUserfaultfd { process: u32, number: i32 },
    /// [`thaw::put_right`].
    PutRight(Vec<Interrupted>),
    /// Opens the kernel's list of its symbols.
    OpenSymbols,
    /// [`socket::open_of`].
    OpenSocket { process: u32, thread: i32, socket: (i32, i32, i32) },
    /// [`shared_namespaces::host_name_of`].
    HostName { process: u32 },
    /// [`shared_namespaces::ipc_list_of`].
    IpcList { process: u32, list: String },
    /// [`segment::control_each`].
    ControlSegments { process: u32, ids: Vec<i32>, command: i32 },
    /// [`message_queue::unusual_rooms_of`].
    MessageRooms { process: u32 },
    /// [`message_queue::set_rooms_of`].
    SetMessageRooms { process: u32, rooms: Rooms },
    /// [`hidden_states::specimen`]: has no result, and needs all capabilities.
    Specimen,
}

impl Task {
    /// The name of its process.
    fn name(&self) -> &'static CStr {
        match self {
            Self::OpenUserfaultfd { .. } | Self::CloseUserfaultfd { .. } => c"tranship-inject",
            Self::PutRight(_) => c"tranship-thaw",
            Self::OpenSymbols => c"tranship-symbols",
            Self::OpenSocket { .. } => c"tranship-socket",
            Self::HostName { .. }
            | Self::IpcList { .. }
            | Self::ControlSegments { .. }
            | Self::MessageRooms { .. }
            | Self::SetMessageRooms { .. } => c"tranship-space",
            Self::Specimen => c"tranship-state",
        }
    }

    /// How long the launcher may take to begin it.
    pub(crate) fn patience(&self) -> Duration {
        match self {
            // Frozen processes wait for it, and the agent can do it itself for most of them.
            Self::PutRight(_) => Duration::from_millis(500),
            _ => launch::PATIENCE,
        }
    }

    /// The capabilities that it takes.
    fn capabilities(&self) -> &'static [Capability] {
        match self {
            Self::OpenSymbols => &[Capability::Syslog],
            Self::OpenSocket { .. } => &[Capability::SysAdmin, Capability::SysPtrace, Capability::NetRaw],
            Self::ControlSegments { .. } => &[Capability::SysAdmin, Capability::SysPtrace, Capability::IpcLock],
            Self::MessageRooms { .. } => &[Capability::SysAdmin, Capability::SysPtrace, Capability::IpcOwner],
            Self::SetMessageRooms { .. } => &[
                Capability::SysAdmin,
                Capability::SysPtrace,
                Capability::DacOverride,
                Capability::IpcOwner,
                Capability::SysResource,
            ],
            _ => KEPT,
        }
    }

    fn work(&self, first_step: &dyn Fn()) -> io::Result<OwnedFd> {
        match self {
            Self::OpenUserfaultfd { process, flags } => remote::open_once(*process, *flags),
            Self::CloseUserfaultfd { process, number } => remote::close_one(*process, *number),
            Self::PutRight(interrupted) => thaw::put_right(interrupted, first_step, nap),
            Self::OpenSymbols => Ok(std::fs::File::open("/proc/kallsyms")?.into()),
            Self::OpenSocket { process, thread, socket } => socket::open_of(*process, *thread, *socket),
            Self::HostName { process } => shared_namespaces::host_name_of(*process),
            Self::IpcList { process, list } => shared_namespaces::ipc_list_of(*process, list),
            Self::ControlSegments { process, ids, command } => segment::control_each(*process, ids, *command),
            Self::MessageRooms { process } => message_queue::unusual_rooms_of(*process),
            Self::SetMessageRooms { process, rooms } => message_queue::set_rooms_of(*process, rooms),
            Self::Specimen => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

/// Who does a task.
#[derive(Debug)]
pub(crate) enum Worker {
    /// A child of this process.
    Child(Pid),
    /// A child of the launcher.
    Launchers,
}

impl Worker {
    /// Waits for its end, if it is a child.
    pub(crate) fn reap(self) {
        if let Self::Child(pid) = self {
            reap(pid);
        }
    }
}

/// Has a process do the task, and waits for what it has opened.
///
/// # Errors
/// The task's. `TimedOut`: it takes longer than some seconds; it is still done to its end, for nobody. `BrokenPipe`: its process was
/// killed.
pub(crate) fn run(task: Task) -> io::Result<OwnedFd> {
    run_in_two_steps(task, || {})
}

/// The same for a task that has a first step: when that is done, this process does `meanwhile`.
pub(crate) fn run_in_two_steps(task: Task, meanwhile: impl FnOnce()) -> io::Result<OwnedFd> {
    let (worker, ours) = begin(task)?;
    await_result(worker, &ours, meanwhile)
}

/// Begins a task; its process has the other end of the socket that is returned.
pub(crate) fn begin(task: Task) -> io::Result<(Worker, OwnedFd)> {
    let (ours, theirs) = descriptor::seqpacket_pair()?;
    match launch::launcher() {
        Some(launcher) => launch::begin(launcher, task, theirs.as_fd()).map(|()| (Worker::Launchers, ours)),
        None => Ok((Worker::Child(fork_for(&task, theirs.as_fd())?), ours)),
    }
}

/// Forks a process that does the task, and has this end of the socket.
pub(crate) fn fork_for(task: &Task, socket: BorrowedFd<'_>) -> io::Result<Pid> {
    fork_to(task.name(), socket, |socket| match task {
        Task::Specimen => hidden_states::specimen(socket),
        task => {
            let confined = privileges::keep_capabilities(task.capabilities());
            let first_step = || drop(descriptor::send(socket, &[FIRST_STEP], &[]));
            send(socket, confined.and_then(|()| task.work(&first_step)));
        }
    })
}

/// `work` must not panic, log, or take a lock that another thread may hold. (It may allocate: glibc's fork(3) sees to that.)
fn fork_to(name: &CStr, socket: BorrowedFd<'_>, work: impl FnOnce(BorrowedFd<'_>)) -> io::Result<Pid> {
    // SAFETY: the child calls nothing that needs another thread of this process, and never returns.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            detach(name, socket.as_raw_fd());
            work(socket);
            // SAFETY: the call ends the process, without what its parent has registered for its own end.
            unsafe { libc::_exit(0) }
        }
    }
}

fn await_result(worker: Worker, socket: &OwnedFd, meanwhile: impl FnOnce()) -> io::Result<OwnedFd> {
    let result = receive(socket.as_fd(), meanwhile);
    if matches!(&result, Err(error) if error.kind() == io::ErrorKind::TimedOut) {
        // It ends some time. If no thread can be started it stays a zombie, until this process ends.
        let _ = std::thread::Builder::new().name("reaper".into()).spawn(move || worker.reap());
    } else {
        worker.reap();
    }
    result
}

/// Waits for the end of a child.
pub(crate) fn reap(child: Pid) {
    while waitpid(child, None) == Err(Errno::EINTR) {}
}

/// Makes the process independent of its parent, of which it keeps one descriptor.
fn detach(name: &CStr, kept: RawFd) {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: async-signal-safe calls, which touch no memory but the arguments.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        libc::setsid();
        // `nap` waits for this signal, which the kernel would not send if it were ignored.
        let _ = sigaction(Signal::SIGCHLD, &default);
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
        // Nothing is closed by that, as the parent has it open, and if it has died, all this should close.
        libc::syscall(libc::SYS_close_range, 3, kept - 1, 0);
        libc::syscall(libc::SYS_close_range, kept + 1, libc::c_uint::MAX, 0);
    }
    // Not the first to be ended where memory is short. Its parent may be allowed to set less.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

/// In a process that does a [`Task`]: passes a moment, at most so long, or until a tracee stops.
pub(crate) fn nap(longest: Duration) {
    let limit = libc::timespec {
        tv_sec: longest.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(longest.subsec_nanos() as i32),
    };
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    // SAFETY: the call reads its arguments, and writes no siginfo.
    unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &raw const limit) };
}

/// What kind of error a message tells of.
const KINDS: [io::ErrorKind; 3] = [io::ErrorKind::Unsupported, io::ErrorKind::TimedOut, io::ErrorKind::Other];

fn send(socket: BorrowedFd<'_>, result: io::Result<OwnedFd>) {
    // If nobody receives it, the descriptor is closed, and all is as it was.
    let _ = match result {
        Ok(fd) => descriptor::send(socket, &[0; 5], &[fd.as_fd()]),
        Err(error) => {
            let kind = KINDS.iter().position(|kind| *kind == error.kind()).unwrap_or(KINDS.len() - 1);
            let mut message = vec![kind as u8];
            message.extend(error.raw_os_error().unwrap_or(0).to_ne_bytes());
            message.extend(error.to_string().bytes().take(LONGEST));
            descriptor::send(socket, &message, &[])
        }
    };
}

fn receive(socket: BorrowedFd<'_>, meanwhile: impl FnOnce()) -> io::Result<OwnedFd> {
    let mut meanwhile = Some(meanwhile);
    let mut message = [0; 5 + LONGEST];
    let length = loop {
        await_message(socket)?;
        let (length, descriptors) = descriptor::receive(socket, &mut message)?;
        if let Some(fd) = descriptors.into_iter().next() {
            return Ok(fd);
        }
        match meanwhile.take_if(|_| message[..length] == [FIRST_STEP]) {
            Some(meanwhile) => meanwhile(),
            None => break length,
        }
    };
    let Some((head, text)) = message[..length].split_first_chunk::<5>() else {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the process that does this work has ended"));
    };
    let [kind, errno @ ..] = *head;
    Err(match i32::from_ne_bytes(errno) {
        0 => {
            let kind = KINDS.get(usize::from(kind)).copied().unwrap_or(io::ErrorKind::Other);
            io::Error::new(kind, String::from_utf8_lossy(text).into_owned())
        }
        errno => io::Error::from_raw_os_error(errno),
    })
}

fn await_message(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut ready = [PollFd::new(socket, PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut ready, limit) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the process is kept from running: is it frozen?"));
            }
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    fn run_in_two_steps(
        name: &CStr,
        work: impl FnOnce(&dyn Fn()) -> io::Result<OwnedFd>,
        meanwhile: impl FnOnce(),
    ) -> io::Result<OwnedFd> {
        let (ours, theirs) = descriptor::seqpacket_pair()?;
        let child = fork_to(name, theirs.as_fd(), |socket| {
            let confined = privileges::keep_capabilities(KEPT);
            let first_step = || drop(descriptor::send(socket, &[FIRST_STEP], &[]));
            send(socket, confined.and_then(|()| work(&first_step)));
        })?;
        drop(theirs);
        await_result(Worker::Child(child), &ours, meanwhile)
    }

    fn run(name: &CStr, work: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
        run_in_two_steps(name, |_| work(), || {})
    }

    #[test]
    fn what_it_opens_comes_back() {
        let fd = run(c"tranship-test", || {
            let own = std::fs::read_to_string("/proc/self/comm")?;
            assert_eq!(own.trim(), "tranship-test");
            Ok(File::open("/proc/sys/kernel/ostype")?.into())
        });
        let mut text = String::new();
        File::from(fd.unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text.trim(), "Linux");
    }

    #[test]
    fn it_has_the_capabilities_of_a_tracer_only() {
        let fd = run(c"tranship-test", || {
            let status = std::fs::read_to_string("/proc/self/status")?;
            let kept = format!("{:016x}", (1u64 << 1) | (1 << 19) | (1 << 21));
            for set in ["CapPrm", "CapEff", "CapBnd"] {
                assert!(status.lines().any(|line| line == format!("{set}:\t{kept}")), "{status}");
            }
            Ok(File::open("/dev/null")?.into())
        });
        fd.unwrap();
    }

    #[test]
    fn something_is_done_here_between_its_steps() {
        let file = || Ok(File::open("/proc/sys/kernel/ostype")?.into());
        let mut done = false;
        let two_steps = |step: &dyn Fn()| {
            step();
            file()
        };
        run_in_two_steps(c"tranship-test", two_steps, || done = true).unwrap();
        assert!(done);
        run_in_two_steps(c"tranship-test", |_| file(), || panic!("there is one step only")).unwrap();
    }

    #[test]
    fn errors_keep_what_they_are() {
        let error = run(c"tranship-test", || Err(io::Error::from_raw_os_error(libc::EPERM))).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        let why = "for this reason";
        let error = run(c"tranship-test", || Err(io::Error::new(io::ErrorKind::Unsupported, why))).unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (io::ErrorKind::Unsupported, why));
    }

    #[test]
    fn its_end_before_it_is_done_is_an_error() {
        // SAFETY: the call ends the process.
        let error = run(c"tranship-test", || unsafe { libc::_exit(1) }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
