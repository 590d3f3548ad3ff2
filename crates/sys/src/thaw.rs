//! Frozen processes go on as if they had not been stopped.
//!
//! A freeze, and CRIU's stop after it, interrupt system calls. Some fail with EINTR then, for no other reason; and those that wait for a
//! limited time begin again with all of it, where CRIU has given their threads other registers. So these threads are stopped once more
//! when they come out of the freezer, before they run any code of their own, and are put right. This is done by a process that does
//! nothing else ([`crate::own_process`]), so that no thread keeps foreign registers, whatever becomes of this one.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::interrupted::{let_go, may_fail};
use crate::own_process::{self, Task};
use crate::restart_blocks::Wait;
use crate::standstill::ask;
use crate::tracee::{Tracee, threads};

/// How long it may take until all threads have come to their stop.
const TO_STOP: Duration = Duration::from_secs(1);

/// A thread that is to be put right.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Interrupted {
    process: u32,
    thread: i32,
    wait: Option<Wait>,
}

/// Does `resume`, which lets these frozen processes run. System calls that fail with EINTR for no other reason than the freeze begin again,
/// and `waits`, which CRIU has interrupted, end when they would have ended.
pub fn resume<R>(processes: &[u32], waits: &[Wait], resume: impl FnOnce() -> R) -> R {
    let interrupted: Vec<_> = processes.iter().flat_map(|process| interrupted(*process, waits)).collect();
    let (mut resume, mut result) = (Some(resume), None);
    if !interrupted.is_empty() {
        let meanwhile = || result = resume.take().map(|resume| resume());
        // Where it fails, system calls end too early or too late.
        let _ = own_process::run_in_two_steps(Task::PutRight(interrupted.clone()), meanwhile);
    }
    if !interrupted.is_empty() && resume.is_some() {
        // Where no process can be started, or there is no descriptor to hear of it, this one does it.
        let (left, done) = (Cell::new(resume.take()), Cell::new(None));
        let asked = || done.set(left.take().map(|resume| resume()));
        let _ = put_right(&interrupted, &asked, std::thread::sleep);
        (resume, result) = (left.take(), done.take());
    }
    result.unwrap_or_else(|| resume.take().expect("it was not done")())
}

fn interrupted(process: u32, waits: &[Wait]) -> Vec<Interrupted> {
    let thread = |thread: Pid| {
        let wait = waits.iter().find(|wait| i64::from(wait.thread) == i64::from(thread.as_raw())).copied();
        (wait.is_some() || may_fail(process, thread)).then_some(Interrupted { process, thread: thread.as_raw(), wait })
    };
    threads(process).unwrap_or_default().into_iter().filter_map(thread).collect()
}

/// Stops the threads when they come out of the freezer, which happens once `asked` is called, and puts them right.
pub(crate) fn put_right(
    interrupted: &[Interrupted],
    asked: &dyn Fn(),
    nap: fn(Duration),
) -> io::Result<std::os::fd::OwnedFd> {
    let traced = |one: &Interrupted| {
        // One that another process traces is that one's.
        let tracee = ask(one.process, Pid::from_raw(one.thread)).ok()??;
        Some((tracee, *one))
    };
    let stopping: Vec<(Tracee, Interrupted)> = interrupted.iter().filter_map(traced).collect();
    asked();
    let deadline = Instant::now() + TO_STOP;
    for (tracee, one) in stopping {
        // One that has ended, or is frozen again, needs nothing.
        if !tracee.wait_for_trap(Some(deadline), nap).is_ok_and(|stopped| stopped) {
            continue;
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(wait) = one.wait
            && crate::waits::go_on(one.process, tracee, &wait).is_ok_and(|done| done)
        {
            continue;
        }
        let_go(tracee);
    }
    Ok(File::open("/dev/null")?.into())
}
