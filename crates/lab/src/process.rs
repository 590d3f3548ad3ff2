//! Processes as /proc shows them, and waiting for things to come true.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// The kinds of namespaces that a node has of its own.
pub(crate) const NAMESPACES: [&str; 3] = ["net", "mnt", "pid"];

/// A process that cannot be mistaken for a later one with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub pid: u32,
    /// Start time in clock ticks since boot, field 22 of proc_pid_stat(5).
    pub start: u64,
}

impl Process {
    /// The process that has this pid now; `None` if there is none, or only its zombie.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, start) = parse_stat(&stat)?;
        (state != 'Z' && state != 'X').then_some(Self { pid, start })
    }

    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Whether it is in a pid namespace, and in none of these.
    pub fn pid_space_is_none_of(self, spaces: &BTreeSet<String>) -> bool {
        namespace(self.pid, "pid").is_some_and(|space| !spaces.contains(&space))
    }

    /// Sends SIGKILL, unless the process is gone already.
    pub fn kill(self) {
        if self.is_alive() {
            // It may go away by itself meanwhile; what counts is that it is gone, which callers wait for.
            let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
        }
    }
}

/// State and start time from the text of /proc/PID/stat; the name in it may hold blanks and parentheses.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// All pids, as this process sees them.
pub(crate) fn pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// The arguments of a process; empty for a zombie or a kernel thread.
pub(crate) fn arguments(pid: u32) -> Vec<String> {
    let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    raw.split(|b| *b == 0).filter(|a| !a.is_empty()).map(|a| String::from_utf8_lossy(a).into_owned()).collect()
}

/// Whether a process has a variable of this name in the environment it was started with.
pub(crate) fn has_variable(pid: u32, name: &str) -> bool {
    let raw = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    raw.split(|b| *b == 0).any(|v| v.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")))
}

/// The namespace of a kind (`net`, `mnt`, `pid` …) that a process is in, as `net:[4026531840]`.
pub(crate) fn namespace(pid: u32, kind: &str) -> Option<String> {
    Some(fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()?.to_str()?.to_owned())
}

/// In how many pid namespaces, from this process's own one inwards, a process has a pid; 0 if it is gone.
pub(crate) fn depth(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    pids.map_or(0, |pids| pids.split_whitespace().count())
}

/// What there is to know of a process that does not end: its state, where it waits, and its parent.
pub(crate) fn describe(pid: u32) -> String {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default().trim().to_owned();
    let status = read("status");
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map_or("?", str::trim).to_owned()
    };
    let parent = field("PPid");
    let parents = fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    let parent_state = fs::read_to_string(format!("/proc/{parent}/stat")).ok().and_then(|stat| parse_stat(&stat));
    format!(
        "process {pid} ({}), state {}, threads {}, waiting in {}, stack [{}], parent {parent} ({}, state {})",
        field("Name"),
        field("State"),
        field("Threads"),
        read("wchan"),
        read("stack").replace('\n', ", "),
        parents.trim(),
        parent_state.map_or('?', |(state, _)| state)
    )
}

/// The processes that are in one of these namespaces now.
pub(crate) fn inhabitants(namespaces: &BTreeSet<String>) -> Vec<Process> {
    let inside =
        |pid: &u32| NAMESPACES.iter().filter_map(|kind| namespace(*pid, kind)).any(|n| namespaces.contains(&n));
    pids().into_iter().filter(inside).filter_map(Process::of).collect()
}

/// How many times slower than an ordinary machine this one is, for being emulated, say: by the shortest of five starts of a process, which is
/// below 2 ms elsewhere. From 1 to 20.
pub fn slowness() -> f64 {
    static FOUND: OnceLock<f64> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let start = |_| {
            let begun = Instant::now();
            // One that fails takes as long.
            let _ = Command::new("/bin/true").status();
            begun.elapsed()
        };
        let shortest = (0..5).map(start).min().unwrap_or_default();
        (shortest.as_secs_f64() / 0.002).clamp(1.0, 20.0)
    })
}

/// How long to wait for what takes no longer than `limit` on an ordinary machine that is not busy: as many times longer as this one is
/// [slower](slowness), and as there are runnable tasks for each CPU, on the average of the last minute, at most 12; at most 40 times in all. Of no
/// time it makes none.
pub fn patience(limit: Duration) -> Duration {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = text.split(' ').next().and_then(|field| field.parse().ok()).unwrap_or(0.0);
    let cpus = std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
    limit.mul_f64((slowness() * (load / cpus).clamp(1.0, 12.0)).min(40.0))
}

/// Looks every few milliseconds whether something has come true; `None` when the time is over, which on a busy machine is
/// [later](patience).
pub(crate) fn wait_for<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        let waited = begun.elapsed();
        if waited >= limit && waited >= patience(limit) {
            return None;
        }
        std::thread::sleep(Duration::from_millis(4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 5 0 0 0 0 0 0 0 20 0 1 0 4711 9 9 9";
        assert_eq!(parse_stat(stat), Some(('S', 4711)));
        assert_eq!(parse_stat("7 (a"), None);
    }

    #[test]
    fn this_process_is_alive_and_not_another_with_its_pid() {
        let me = Process::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!Process { start: me.start + 1, ..me }.is_alive());
    }
}
