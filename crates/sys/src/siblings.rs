//! The other threads of a process one of whose threads has opened a descriptor for a moment: a child that one of them forks in that
//! moment inherits it.
//!
//! They are traced, which they do not notice, as they are not stopped; the kernel then tells of each fork, and holds parent and child
//! until they are let go.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::interrupted::let_go;
use crate::own_process::nap;
use crate::process::has_open;
use crate::tracee::{Stop, Tracee, state, threads};

/// How long it may take until a thread that runs has done what it just does.
const PATIENCE: Duration = Duration::from_millis(100);

/// The threads.
#[derive(Debug)]
pub(crate) struct Siblings {
    process: u32,
    threads: Vec<Tracee>,
}

impl Siblings {
    /// Those of this thread of the process.
    pub fn of(process: u32, one: Pid) -> Self {
        let others = threads(process).unwrap_or_default().into_iter().filter(|thread| *thread != one);
        // One that has ended, or that another process traces, is left out.
        Self { process, threads: others.filter_map(|thread| Tracee::seize(thread, Tracee::FORKS).ok()).collect() }
    }

    /// Lets them go after the descriptor was closed, and has each child that was forked meanwhile, and has the descriptor, `close` it.
    pub fn let_go(self, descriptor: &OwnedFd, number: i32, mut close: impl FnMut(Tracee) -> io::Result<()>) {
        // One that does not wait for anything may be forking; a fork that is interrupted begins again.
        let runs = |thread: &&Tracee| matches!(state(self.process, thread.thread()), Some(b'R' | b'D'));
        let running: Vec<Tracee> = self.threads.iter().filter(runs).copied().collect();
        running.iter().for_each(|thread| drop(thread.interrupt()));
        let (now, later) = (Instant::now(), Instant::now() + PATIENCE);
        for thread in self.threads {
            let deadline = if running.contains(&thread) { later } else { now };
            // Those that still run, or have ended, need nothing.
            match thread.wait(Some(deadline), nap) {
                Ok(Some(Stop::Trap)) => let_go(thread),
                Ok(Some(Stop::Signal(signal))) => thread.detach_with(signal),
                Ok(Some(Stop::Event(_))) => {
                    let child = thread.event_message().ok().map(|pid| Tracee::of_event(pid as i32));
                    thread.detach();
                    if let Some(child) = child
                        && child.wait_for_trap(Some(later), nap).is_ok_and(|stopped| stopped)
                    {
                        if has_open(child.thread().as_raw() as u32, number, descriptor) {
                            // If it has been killed there is nothing to close.
                            let _ = close(child);
                        }
                        let_go(child);
                    }
                }
                Ok(Some(Stop::Syscall)) => thread.detach(),
                Ok(None) | Err(_) => {}
            }
        }
    }
}
