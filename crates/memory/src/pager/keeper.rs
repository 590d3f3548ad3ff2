//! The keeper: the process that has everything open that the pager has open, so that nothing of it is closed when the pager is killed.
//!
//! ```text
//!    keeper ──forks, with one table of descriptors──▶ pager
//!      │ waits for its end                              │ waits for the keeper's end
//!      ▼                                                ▼
//!    forks another pager, which takes over            forks another keeper
//! ```
//!
//! When the last descriptor of a userfaultfd is closed, pages that are still missing read as zeros in the task. A table of descriptors lasts until the last
//! process that has it ends; so either process may be killed at any time, and the userfaultfds stay open. What the pager knows beside descriptors, and the
//! pages themselves, is in its journal ([`super::takeover`]). Tasks that touch a missing page in between wait.
//!
//! The keeper allocates nothing while it waits. Only if both are killed in one moment do the tasks lose memory.

use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tranship_sys::privileges::{self, Capability};
use tranship_sys::process;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::seccomp;

use super::serve::{Context, Pager, PagerError};

/// A pager that lived for so long is followed by another one at once.
const LONG: Duration = Duration::from_secs(1);
/// Else there is a pause, each time twice as long as the last one.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// At most.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How soon is tried again what the system had refused.
const REFUSED: Duration = Duration::from_millis(10);

/// Serves one migration as [`super::run`] does, in a process that is replaced when it is killed. The caller must have one thread.
///
/// # Errors
/// It cannot begin. Later on, nothing is given up.
pub fn keep(directory: &Path, work: &Path) -> Result<(), PagerError> {
    let context = Context::listen(directory, work)?;
    // To kill it would free no memory: the pages belong to both, and to the agent. Not everybody may ask for that.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    confine().map_err(|source| PagerError::Listen { directory: directory.to_owned(), source })?;
    match process::fork_sharing_descriptors()? {
        Some(pager) => watch(&context, pager),
        None => serve(&context),
    }
    Ok(())
}

/// Leaves this process, and those that it forks, with what pager and keeper need. A call that is forbidden fails: the tasks need the
/// process that makes it.
fn confine() -> std::io::Result<()> {
    privileges::keep_capabilities(&[Capability::SysNice, Capability::IpcLock, Capability::Perfmon, Capability::Bpf])?;
    seccomp::refuse_others(&[seccomp::BASE, seccomp::PAGER])
}

/// Waits for a pager's end, and starts another one unless it has nothing left to do.
fn watch(context: &Context, mut pager: u32) {
    process::set_name(c"keeper");
    let mut pause = Duration::ZERO;
    loop {
        let begun = Instant::now();
        await_end(pager);
        process::reap_children();
        if context.journal.has_ended() {
            return;
        }
        pause = match begun.elapsed() {
            lived if lived >= LONG => Duration::ZERO,
            _ if pause.is_zero() => FIRST_PAUSE,
            _ => LONGEST_PAUSE.min(pause * 2),
        };
        std::thread::sleep(pause);
        pager = loop {
            match process::fork_sharing_descriptors() {
                Ok(Some(pager)) => break pager,
                Ok(None) => serve(context),
                Err(_) => std::thread::sleep(REFUSED),
            }
        };
    }
}

fn await_end(pid: u32) {
    // One that cannot be found has ended.
    let Ok(process) = process::descriptor(pid) else { return };
    while poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) != Ok(1) {}
}

/// Is the pager, to the end of the process.
fn serve(context: &Context) -> ! {
    process::set_name(c"pager");
    // To unwind would close the userfaultfds, for the keeper as well.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(101);
    }));
    let keeper = process::descriptor(std::os::unix::process::parent_id()).ok();
    let mut pager = ManuallyDrop::new(Pager::new(context, keeper));
    match pager.take_over().and_then(|()| pager.serve()) {
        Ok(()) => context.journal.end(),
        Err(error) => {
            super::log(format_args!("{error}; another one takes over"));
            std::process::exit(1);
        }
    }
    std::process::exit(0)
}

/// Starts another keeper for this pager: its descriptor.
pub(super) fn start(context: &Context) -> std::io::Result<std::os::fd::OwnedFd> {
    process::reap_children();
    let pager = std::process::id();
    match process::fork_sharing_descriptors()? {
        Some(keeper) => process::descriptor(keeper),
        None => {
            schedule::stand(Standing::Ordinary);
            watch(context, pager);
            std::process::exit(0)
        }
    }
}
