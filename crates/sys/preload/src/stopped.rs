//! Tasks that a signal has stopped, in a frozen cgroup of version 1.
//!
//! There the kernel ends PTRACE_SEIZE of such a task only when the cgroup is thawed, and criu thaws it only when it has
//! seized all tasks. So these are seized when the cgroup has been thawed: all others are traced by then, and a stopped
//! task does not run.
//!
//! ```text
//!   criu                                     the kernel
//!     SEIZE, INTERRUPT of each task            those that are stopped are put off
//!     writes THAWED
//!     waits for the first task                 SEIZE, INTERRUPT of those that were put off
//! ```
//!
//! A frozen task does not show that it is stopped. The agent has listed the stopped processes when it had frozen them, in the
//! file that `TRANSHIP_STOPPED` names.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::texts;
use super::trace::{PTRACE_EVENT_STOP, real_ptrace};

/// Threads that criu takes for seized.
static PUT_OFF: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

/// All threads of the processes that the agent has noted.
fn noted() -> &'static HashSet<c_int> {
    static NOTED: OnceLock<HashSet<c_int>> = OnceLock::new();
    NOTED.get_or_init(|| {
        let Some(path) = std::env::var_os("TRANSHIP_STOPPED") else { return HashSet::new() };
        let processes = texts::numbers(&std::fs::read_to_string(path).unwrap_or_default());
        let threads = |process: u32| std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let all = processes.into_iter().flat_map(threads);
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    })
}

/// Whether this is a part of seizing a stopped task, which is done later.
pub(crate) fn put_off(request: c_uint, thread: c_int) -> bool {
    let asked = [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT].contains(&request);
    if !asked || !super::is_dump() || !noted().contains(&thread) {
        return false;
    }
    let mut all = PUT_OFF.lock().unwrap_or_else(PoisonError::into_inner);
    match request {
        libc::PTRACE_SEIZE => all.push(thread),
        _ => return all.contains(&thread),
    }
    true
}

/// Seizes what was put off. One that somebody has let go on meanwhile is left out, so that the dump fails: it has run
/// since its memory was looked at.
pub(crate) fn seize() {
    if !super::is_dump() {
        return;
    }
    let all = std::mem::take(&mut *PUT_OFF.lock().unwrap_or_else(PoisonError::into_inner));
    for thread in all.into_iter().filter(|thread| is_stopped(*thread)) {
        if real_ptrace(libc::PTRACE_SEIZE, thread, 0, 0) == 0 {
            real_ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
        }
    }
}

/// Has criu take a task that the use of its terminal in the background has stopped (SIGTTIN, SIGTTOU) for one that
/// SIGSTOP has stopped, which it can stop again. A SIGCONT ends all of these in the same way.
pub(crate) fn correct(told: &mut libc::siginfo_t) {
    let is_stop = told.si_code >> 8 == PTRACE_EVENT_STOP;
    if super::is_dump() && is_stop && [libc::SIGTTIN, libc::SIGTTOU].contains(&told.si_signo) {
        told.si_signo = libc::SIGSTOP;
    }
}

fn is_stopped(thread: c_int) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}
