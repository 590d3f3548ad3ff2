//! Threads that may be lacking: where a limit of processes is reached, to start one is an error, not a panic.
//!
//! What must be done while a container is frozen needs no new thread: it is done by threads that were made before and
//! wait ([`Waiting`]), or [`beside`] other work where a thread can be had, and else before it.

use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::schedule;

/// What to do where no thread, or process, can be started.
pub const REMEDY: &str =
    "raise TasksMax= of the agent's unit (pids.max of its cgroup), or the limit of processes (ulimit -u)";

/// An error of a start of a thread or a process, with the remedy where a limit was reached.
pub fn explained(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            io::Error::new(error.kind(), format!("no thread or process can be started: {error}; {REMEDY}"))
        }
        _ => error,
    }
}

/// Work that is taken once, by whoever does it.
struct Once<F>(Mutex<Option<F>>);

impl<F> Once<F> {
    fn new(work: F) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(work))))
    }

    fn take(&self) -> Option<F> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A thread that could not be started, and what it was to do.
#[derive(Debug)]
pub struct NotStarted<F> {
    /// Why, with a remedy.
    pub error: io::Error,
    /// The work.
    pub work: F,
}

/// Starts a thread of this name (15 bytes at most).
///
/// # Errors
/// Where the system has no thread to give; the work comes back.
pub fn start_or_back<T, F>(name: &str, work: F) -> Result<JoinHandle<T>, NotStarted<F>>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let once = Once::new(work);
    let taken = Arc::clone(&once);
    let run = move || taken.take().expect("the work of a thread that was started is there")();
    Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| NotStarted { error: explained(error), work: once.take().expect("no thread has taken it") })
}

/// Starts a thread of this name (15 bytes at most).
///
/// # Errors
/// Where the system has no thread to give.
pub fn start<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(work).map_err(explained)
}

/// Starts a thread of a scope.
///
/// # Errors
/// Where the system has no thread to give.
pub fn start_within<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.to_owned()).spawn_scoped(scope, work).map_err(explained)
}

/// Does something on a thread of its own, because it changes what belongs to a thread, and waits for it. A panic is
/// passed on.
///
/// # Errors
/// Where the system has no thread to give.
pub fn apart<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| Ok(joined(start_within(scope, name, work)?.join())))
}

/// What a thread has returned. Its panic is passed on.
pub fn joined<T>(result: std::thread::Result<T>) -> T {
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Work that is done beside other work.
#[derive(Debug)]
pub enum Beside<'scope, T> {
    /// By a thread.
    Thread(ScopedJoinHandle<'scope, T>),
    /// It was done when it was begun.
    Done(T),
}

/// Begins work beside that of the caller. Where there is no thread for it, it is done before this returns: it must not
/// wait for what the caller does later. The caller's place in the schedule stays what it is.
pub fn beside<'scope, T, F>(scope: &'scope Scope<'scope, '_>, name: &str, work: F) -> Beside<'scope, T>
where
    T: Send + 'scope,
    F: FnOnce() -> T + Send + 'scope,
{
    let once = Once::new(work);
    let taken = Arc::clone(&once);
    let run = move || taken.take().expect("the work of a thread that was started is there")();
    match start_within(scope, name, run) {
        Ok(thread) => Beside::Thread(thread),
        Err(_) => Beside::Done(schedule::keeping(once.take().expect("no thread has taken it"))),
    }
}

impl<T> Beside<'_, T> {
    /// Waits for its result. A panic of it is passed on.
    pub fn join(self) -> T {
        match self {
            Beside::Thread(thread) => joined(thread.join()),
            Beside::Done(result) => result,
        }
    }
}

/// Does work with all items, in at most so many parts of neighbours side by side, of which the caller does the first. Parts for which there is no thread
/// are done one after the other.
///
/// # Errors
/// The first of a part.
pub fn in_parts<I: Sync, E: Send>(
    name: &str,
    items: &[I],
    parts: usize,
    work: impl Fn(&[I]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let mut shares = items.chunks(items.len().div_ceil(parts.max(1)).max(1));
    let Some(own) = shares.next() else { return Ok(()) };
    std::thread::scope(|scope| {
        let work = &work;
        let others: Vec<_> = shares.map(|share| beside(scope, name, move || work(share))).collect();
        let done = work(own);
        others.into_iter().map(Beside::join).fold(done, Result::and)
    })
}

type Work = Box<dyn FnOnce() + Send>;

/// A thread that was made ahead, and waits for its work. Without any it ends with this value.
#[derive(Debug)]
pub struct Waiting {
    work: Sender<Work>,
    thread: JoinHandle<()>,
}

/// Work that such a thread does.
#[derive(Debug)]
pub struct Given<T> {
    result: Receiver<T>,
    thread: JoinHandle<()>,
}

impl Waiting {
    /// Makes one.
    ///
    /// # Errors
    /// Where the system has no thread to give.
    pub fn start(name: &str) -> io::Result<Self> {
        let (work, waiting) = mpsc::channel::<Work>();
        let wait = move || {
            if let Ok(work) = waiting.recv() {
                work();
            }
        };
        Ok(Self { work, thread: start(name, wait)? })
    }

    /// Gives it its work.
    pub fn give<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Given<T> {
        let (send, result) = mpsc::channel();
        // Whoever asked may not wait any more.
        let _ = self.work.send(Box::new(move || drop(send.send(work()))));
        Given { result, thread: self.thread }
    }
}

impl<T> Given<T> {
    /// Whether it has come to its end.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its result.
    ///
    /// # Errors
    /// The payload of its panic.
    pub fn join(self) -> std::thread::Result<T> {
        self.thread.join()?;
        self.result.recv().map_err(|_| Box::new("a thread ended without its result") as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::resource::{Resource, setrlimit};
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, Uid, fork};

    #[test]
    fn every_part_is_done_and_an_error_is_told() {
        let done = Mutex::new(Vec::new());
        let work = |part: &[u32]| {
            done.lock().unwrap().extend_from_slice(part);
            if part.contains(&4) { Err("four") } else { Ok(()) }
        };
        assert_eq!(in_parts("part", &[1, 2, 3], 2, work), Ok(()));
        assert_eq!(in_parts("part", &[4, 5, 6, 7, 8], 3, work), Err("four"));
        assert_eq!(in_parts("part", &[], 3, work), Ok(()));
        assert_eq!(in_parts("part", &[9], 0, work), Ok(()));
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    /// Does something in a process that can start no thread; its exit status is 0 if it returns true.
    fn without_threads(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child has one thread, and ends by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let limited = setrlimit(Resource::RLIMIT_NPROC, 0, 0).is_ok()
                    // The limit does not count for root.
                    && nix::unistd::setuid(Uid::from_raw(65534)).is_ok();
                let done = limited && work();
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(i32::from(!done)) }
            }
            ForkResult::Parent { child } => matches!(waitpid(child, None).unwrap(), WaitStatus::Exited(_, 0)),
        }
    }

    #[test]
    fn where_no_thread_can_be_started_there_is_an_error_with_a_remedy() {
        assert!(without_threads(|| {
            let refused = start_or_back("test", || 7).map(drop).unwrap_err();
            refused.error.to_string().ends_with(REMEDY) && (refused.work)() == 7 && Waiting::start("test").is_err()
        }));
    }

    #[test]
    fn work_beside_other_work_is_done_in_place_then() {
        let ten = || std::thread::scope(|scope| beside(scope, "test", || 10).join());
        assert_eq!(ten(), 10);
        assert!(without_threads(|| ten() == 10));
    }

    #[test]
    fn a_thread_that_was_made_before_needs_none_later() {
        let waiting = Waiting::start("test").unwrap();
        assert_eq!(waiting.give(|| 5).join().unwrap(), 5);
        let panicking = Waiting::start("test").unwrap().give(|| -> u8 { panic!("on purpose") });
        assert_eq!(panicking.join().unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
        drop(Waiting::start("test").unwrap());
    }
}
