//! Settings of processes and threads that CRIU does not carry, and that one process can read of another and give it: how late a thread may
//! be woken up, how urgent its reads and writes of disks are, which memory a core dump has, how nice its session is.

use std::collections::HashMap;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};
use tranship_sys::io_priority::{CLASS_SHIFT, io_priority, set_io_priority};
use tranship_sys::process::text;

use crate::affinity::{RestoredThreads, id_within, threads};

/// What a setting is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// In ns: prctl(PR_SET_TIMERSLACK).
    TimerSlack,
    /// The class in bits 13 to 15, and the level: ioprio_set(2).
    IoPriority,
    /// `/proc/PID/coredump_filter`, as a number.
    CoreDump,
    /// `/proc/PID/autogroup`: of the process's session, -20 to 19.
    Autogroup,
}

/// Those of each thread; the others are of the process.
const OF_THREADS: [Kind; 2] = [Kind::TimerSlack, Kind::IoPriority];
const OF_PROCESSES: [Kind; 2] = [Kind::CoreDump, Kind::Autogroup];

/// A setting that differs from the usual one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its process, as the container calls it.
    pub task: u32,
    /// The thread, as the container calls it; of a process, the first.
    pub thread: u32,
    kind: Kind,
    value: i64,
}

/// The usual timer slack, in ns.
const SLACK: i64 = 50_000;
/// The usual filter of core dumps: anonymous memory, headers of ELF files, private huge pages.
const DUMPED: i64 = 0x33;

impl Kind {
    /// Nothing where a thread has the usual one, or has ended, or the kernel does not tell.
    fn read(self, thread: u32) -> Option<i64> {
        let file = |name: &str| text(format!("/proc/{thread}/{name}")).ok();
        match self {
            // That of real-time threads is 0, and comes with their policy.
            Self::TimerSlack => file("timerslack_ns")?.trim().parse().ok().filter(|slack| !matches!(*slack, 0 | SLACK)),
            Self::IoPriority => io_priority(thread).ok().filter(|priority| priority >> CLASS_SHIFT != 0),
            Self::CoreDump => {
                i64::from_str_radix(file("coredump_filter")?.trim(), 16).ok().filter(|filter| *filter != DUMPED)
            }
            // `/autogroup-25 nice 7`
            Self::Autogroup => file("autogroup")?.rsplit(' ').next()?.trim().parse().ok().filter(|nice| *nice != 0),
        }
    }

    fn give(self, thread: u32, value: i64) -> io::Result<()> {
        match self {
            Self::TimerSlack => fs::write(format!("/proc/{thread}/timerslack_ns"), value.to_string()),
            Self::IoPriority => set_io_priority(thread, value),
            Self::CoreDump => fs::write(format!("/proc/{thread}/coredump_filter"), format!("{value:#x}")),
            Self::Autogroup => fs::write(format!("/proc/{thread}/autogroup"), value.to_string()),
        }
    }
}

/// What a process and its threads have that is not usual; the process is given by its pids here and in the container.
pub fn of(pid: u32, task: u32) -> Vec<Setting> {
    let of_process =
        OF_PROCESSES.into_iter().filter_map(|kind| Some(Setting { task, thread: task, kind, value: kind.read(pid)? }));
    let of_thread = |thread, kind: Kind| {
        let value = kind.read(thread)?;
        Some(Setting { task, thread: id_within(pid, thread)?, kind, value })
    };
    let of_threads =
        threads(pid).flat_map(|thread| OF_THREADS.into_iter().filter_map(move |kind| of_thread(thread, kind)));
    of_process.chain(of_threads).collect()
}

/// Gives restored processes and threads their settings again; `tasks` has the processes' pids here by those in the container.
///
/// # Errors
/// There is no such thread, or the kernel refuses it.
pub fn set(settings: &[Setting], tasks: &HashMap<u32, u32>) -> io::Result<()> {
    let mut restored = RestoredThreads::of(tasks);
    settings.iter().try_for_each(|Setting { task, thread, kind, value }| {
        let give = |thread| kind.give(thread, *value);
        restored
            .find(*task, *thread)
            .and_then(give)
            .map_err(|error| io::Error::other(format!("{kind:?} of thread {thread} of process {task}: {error}")))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn settings_are_found_and_set_again() {
        // A session of its own, whose autogroup is not ours.
        let mut child = Command::new("setsid").args(["sleep", "100"]).spawn().unwrap();
        let pid = child.id();
        while text(format!("/proc/{pid}/comm")).unwrap() != "sleep\n" {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let own = id_within(pid, pid).unwrap();
        assert_eq!(of(pid, own), []);
        let setting = |kind, value| Setting { task: own, thread: own, kind, value };
        let mut all = vec![
            setting(Kind::CoreDump, 0x7f),
            setting(Kind::Autogroup, 5),
            setting(Kind::TimerSlack, 123_456),
            setting(Kind::IoPriority, 2 << CLASS_SHIFT | 3),
        ];
        // Where the kernel or this machine's user may not, that is all that may be missing.
        all.retain(|one| match set(std::slice::from_ref(one), &HashMap::from([(own, pid)])) {
            Ok(()) => true,
            Err(error) => {
                println!("skipped: {error}");
                false
            }
        });
        let found = of(pid, own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, all);
        assert!(all.iter().any(|one| one.kind == Kind::CoreDump));
    }
}
