//! Timer slack of threads (prctl(PR_SET_TIMERSLACK)), which CRIU does not carry: how late the kernel may wake them up.

use std::collections::HashMap;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use crate::affinity::{RestoredThreads, id_within, threads};

/// The slack of a thread that has not been given another one, in ns.
const USUAL: u64 = 50_000;

/// A thread with a slack of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimerSlack {
    /// Its process, as the container calls it.
    pub task: u32,
    /// The thread, as the container calls it.
    pub thread: u32,
    /// In ns.
    slack: u64,
}

fn file(thread: u32) -> String {
    format!("/proc/{thread}/timerslack_ns")
}

/// The threads of a process that have a slack of their own; the process is given by its pids here and in the container. That of real-time
/// threads is 0, and comes with their policy.
pub fn of(pid: u32, task: u32) -> Vec<TimerSlack> {
    let of_thread = |thread| {
        // It may have ended.
        let slack = fs::read_to_string(file(thread)).ok()?.trim().parse().ok()?;
        (!matches!(slack, 0 | USUAL)).then_some(())?;
        Some(TimerSlack { task, thread: id_within(pid, thread)?, slack })
    };
    threads(pid).filter_map(of_thread).collect()
}

/// Gives threads of restored processes their slack again, whose pids here `tasks` has by those in the container.
///
/// # Errors
/// There is no such thread, or the kernel refuses it.
pub fn set(slacks: &[TimerSlack], tasks: &HashMap<u32, u32>) -> io::Result<()> {
    let mut restored = RestoredThreads::of(tasks);
    slacks.iter().try_for_each(|TimerSlack { task, thread, slack }| {
        fs::write(file(restored.find(*task, *thread)?), slack.to_string())
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_slack_is_found_and_set_again() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id();
        assert_eq!(of(pid, 7), []);
        let own = id_within(pid, pid).unwrap();
        let slack = TimerSlack { task: 7, thread: own, slack: 123_456 };
        let done = set(std::slice::from_ref(&slack), &HashMap::from([(7, pid)]));
        let found = of(pid, 7);
        child.kill().unwrap();
        child.wait().unwrap();
        match done {
            Ok(()) => assert_eq!(found, [slack]),
            Err(error) => println!("skipped: {error}"),
        }
    }
}
