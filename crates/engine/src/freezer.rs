//! The cgroup freezer, versions 1 and 2: how a container is stopped, and kept stopped by nobody's grace.
//!
//! A frozen cgroup stays frozen whatever dies, which no tracer could promise: this is what keeps a container from
//! running twice. Freezing is polled tightly, since each millisecond is one of blackout.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, statfs};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tranship_sys::restart_blocks::Wait;
use tranship_sys::{process, thaw};

/// Between two looks at whether all tasks have stopped.
const LOOK: Duration = Duration::from_micros(50);
/// How long it is waited for tasks to stop before they are asked once more.
const AGAIN: Duration = Duration::from_millis(2);

/// The freezer's cgroup of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freezer {
    /// `freezer.state` below this directory.
    V1(PathBuf),
    /// `cgroup.freeze` and `cgroup.events` below this directory.
    V2(PathBuf),
}

/// A freezer that was opened before the freeze: to thaw by it needs no descriptor.
#[derive(Debug)]
pub struct OpenFreezer {
    freezer: Freezer,
    file: File,
}

/// What can go wrong with a freezer.
#[derive(Debug, thiserror::Error)]
pub enum FreezerError {
    /// A file of the cgroup cannot be used.
    #[error("the cgroup file {path:?} cannot be used: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It takes too long.
    #[error("the container in {cgroup:?} did not {what} within {waited:?}: a task of it is stuck in the kernel")]
    Stuck {
        /// Its cgroup.
        cgroup: PathBuf,
        /// What was wanted.
        what: &'static str,
        /// For how long.
        waited: Duration,
    },
}

impl Freezer {
    /// That of a container which does not run: nothing is in it.
    pub fn of_nothing() -> Self {
        Freezer::V2(PathBuf::new())
    }

    fn directory(&self) -> &Path {
        match self {
            Freezer::V1(path) | Freezer::V2(path) => path,
        }
    }

    /// Opens it, for a thaw for which there may be no descriptor.
    pub fn open(&self) -> Result<OpenFreezer, FreezerError> {
        let path = self.directory().join(self.switch_file());
        let file = File::options().write(true).open(&path).map_err(|source| FreezerError::File { path, source })?;
        Ok(OpenFreezer { freezer: self.clone(), file })
    }

    /// Whether its cgroup is there.
    pub fn is_there(&self) -> bool {
        self.directory().exists()
    }

    /// Stops all tasks; returns when every one of them has stopped. If that takes too long they run on.
    pub fn freeze(&self, timeout: Duration) -> Result<(), FreezerError> {
        self.switch(true)?;
        let mut asked = Instant::now();
        let frozen = self.wait("stop", timeout, || {
            // On version 1 one that begins to wait for a child that it has vforked, just when it is asked, does not stop before it is asked again.
            if asked.elapsed() > AGAIN {
                asked = Instant::now();
                self.switch(true)?;
            }
            self.is_frozen()
        });
        if frozen.is_err() {
            // While some have stopped and others have not, `runc state` waits for ever.
            let _ = self.thaw();
        }
        frozen
    }

    /// Asks all tasks to stop, and leaves it at that where some have not within `patience`.
    pub fn hold(&self, patience: Duration) -> Result<(), FreezerError> {
        self.switch(true)?;
        match self.wait("stop", patience, || self.is_frozen()) {
            Err(FreezerError::Stuck { .. }) => Ok(()),
            done => done,
        }
    }

    /// Lets all tasks run again, as if they had not been stopped: system calls that the freeze has interrupted begin again.
    pub fn thaw(&self) -> Result<(), FreezerError> {
        self.thaw_after_dump(&[])
    }

    /// The same after CRIU has interrupted `waits`, which end when they would have ended.
    pub fn thaw_after_dump(&self, waits: &[Wait]) -> Result<(), FreezerError> {
        let processes = self.processes().unwrap_or_default();
        thaw::resume(&processes, waits, || self.switch(false))
    }

    fn switch_file(&self) -> &'static str {
        match self {
            Freezer::V1(_) => "freezer.state",
            Freezer::V2(_) => "cgroup.freeze",
        }
    }

    fn word(&self, frozen: bool) -> &'static str {
        match (self, frozen) {
            (Freezer::V1(_), true) => "FROZEN",
            (Freezer::V1(_), false) => "THAWED",
            (Freezer::V2(_), true) => "1",
            (Freezer::V2(_), false) => "0",
        }
    }

    fn switch(&self, frozen: bool) -> Result<(), FreezerError> {
        let path = self.directory().join(self.switch_file());
        std::fs::write(&path, self.word(frozen)).map_err(|source| FreezerError::File { path, source })
    }

    /// Whether every task is stopped.
    pub fn is_frozen(&self) -> Result<bool, FreezerError> {
        let file = match self {
            Freezer::V1(_) => "freezer.state",
            Freezer::V2(_) => "cgroup.events",
        };
        let text = self.read(&self.directory().join(file))?;
        Ok(match self {
            Freezer::V1(_) => text.trim() == "FROZEN",
            Freezer::V2(_) => text.lines().any(|line| line == "frozen 1"),
        })
    }

    /// Whether it was asked to stop and has not: some tasks may stand still and others run. As long as that is so, runc waits for it whatever it is asked.
    pub fn is_half_frozen(&self) -> Result<bool, FreezerError> {
        Ok(self.is_held()? && !self.is_frozen()?)
    }

    /// Whether nobody has asked for its tasks to run since they were stopped.
    pub fn is_held(&self) -> Result<bool, FreezerError> {
        let (file, frozen) = match self {
            Freezer::V1(_) => ("freezer.self_freezing", "1"),
            Freezer::V2(_) => ("cgroup.freeze", "1"),
        };
        Ok(self.read(&self.directory().join(file))?.trim() == frozen)
    }

    fn read(&self, path: &Path) -> Result<String, FreezerError> {
        std::fs::read_to_string(path).map_err(|source| FreezerError::File { path: path.to_owned(), source })
    }

    /// All processes in it and below, by their pids on this node, in ascending order.
    pub fn processes(&self) -> Result<Vec<u32>, FreezerError> {
        let mut found = BTreeSet::new();
        let mut todo = vec![self.directory().to_owned()];
        while let Some(directory) = todo.pop() {
            let text = self.read(&directory.join("cgroup.procs"))?;
            // A process outside of this pid namespace reads as 0.
            found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid != 0));
            let below = std::fs::read_dir(&directory);
            let below = below.map_err(|source| FreezerError::File { path: directory.clone(), source })?;
            todo.extend(below.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
        }
        Ok(found.into_iter().collect())
    }

    /// Ends every process without letting any of them run: they are killed while frozen, so that the first thing each
    /// of them does when thawed is to die. Returns when none is left. A cgroup that is gone has none.
    pub fn kill_frozen(&self, timeout: Duration) -> Result<(), FreezerError> {
        if !self.directory().exists() {
            return Ok(());
        }
        let ended = self
            .signal(Signal::SIGKILL, |_| true)
            .and_then(|()| self.switch(false))
            .and_then(|()| self.wait("end", timeout, || Ok(self.processes()?.is_empty())));
        match ended {
            // A `runc run` in the foreground removes its container as soon as that has ended.
            Err(_) if !self.directory().exists() => Ok(()),
            ended => ended,
        }
    }

    /// Whether a thread waits for a child that it has vforked, which shares its memory until it calls exec. The two count as frozen, but no tracer
    /// can stop the one before the other has gone on: criu would try for ten seconds.
    pub fn is_vforking(&self) -> Result<bool, FreezerError> {
        let processes = self.processes()?;
        let threads = |pid: &u32| std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let waits = |thread: std::fs::DirEntry| {
            std::fs::read_to_string(thread.path().join("wchan")).is_ok_and(|place| process::waits_for_vforked(&place))
        };
        // To look at each thread takes 10 µs, and the container stands still.
        Ok(processes.len() > 1 && process::share_memory(&processes) && processes.iter().flat_map(threads).any(waits))
    }

    /// Waits until no thread is [waiting for a child](Self::is_vforking), or for so long; says whether there is none.
    pub fn await_vforks(&self, timeout: Duration) -> Result<bool, FreezerError> {
        match self.wait("call exec", timeout, || Ok(!self.is_vforking()?)) {
            Ok(()) => Ok(true),
            Err(FreezerError::Stuck { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The processes that a signal has stopped, also where they are frozen.
    pub fn stopped(&self) -> Result<Vec<u32>, FreezerError> {
        let is_stopped = |pid: &u32| {
            let stat = process::text(format!("/proc/{pid}/stat")).unwrap_or_default();
            match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
                Some('T') => true,
                // In a frozen cgroup of version 1 it shows as one that is frozen.
                Some('D') => std::fs::read_to_string(format!("/proc/{pid}/wchan"))
                    .is_ok_and(|place| process::is_stopped_at(&place)),
                _ => false,
            }
        };
        Ok(self.processes()?.into_iter().filter(is_stopped).collect())
    }

    /// Keeps all processes of a frozen cgroup from running even if somebody thaws it: the first thing that each of them does
    /// then is to stop. Those that were `stopped` before are left alone.
    pub fn stop_beneath(&self, stopped: &[u32]) -> Result<(), FreezerError> {
        self.signal(Signal::SIGSTOP, |pid| !stopped.contains(&pid))
    }

    /// Takes [`Self::stop_beneath`] back: of the processes with these pids, which it has stopped, and of others that show as stopped or whose SIGSTOP
    /// is still pending. A program notices a SIGCONT, so that no other process gets one.
    pub fn continue_beneath(&self, stopped: &[u32], by_us: &[u32]) -> Result<(), FreezerError> {
        let are_stopped = self.stopped()?;
        let is_stopped = |pid| by_us.contains(&pid) || are_stopped.contains(&pid) || has_pending_stop(pid);
        self.signal(Signal::SIGCONT, |pid| !stopped.contains(&pid) && is_stopped(pid))
    }

    /// Sends a signal to those processes; one that is gone is no error.
    fn signal(&self, signal: Signal, to: impl Fn(u32) -> bool) -> Result<(), FreezerError> {
        for pid in self.processes()?.into_iter().filter(|pid| to(*pid)) {
            match kill(Pid::from_raw(pid as i32), signal) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => {
                    return Err(FreezerError::File { path: self.directory().to_owned(), source: error.into() });
                }
            }
        }
        Ok(())
    }

    fn wait(
        &self,
        what: &'static str,
        timeout: Duration,
        mut done: impl FnMut() -> Result<bool, FreezerError>,
    ) -> Result<(), FreezerError> {
        let start = Instant::now();
        while !done()? {
            if start.elapsed() > timeout {
                return Err(FreezerError::Stuck { cgroup: self.directory().to_owned(), what, waited: timeout });
            }
            // The kernel offers no event for this on version 1. Each task stops by itself, for which it needs a CPU: to look
            // without a pause, before all ordinary threads, would take one of them away.
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl OpenFreezer {
    /// As [`Freezer::thaw_after_dump`].
    pub fn thaw_after_dump(&self, waits: &[Wait]) -> Result<(), FreezerError> {
        let (freezer, word) = (&self.freezer, self.freezer.word(false));
        let processes = freezer.processes().unwrap_or_default();
        let failed = |source| FreezerError::File { path: freezer.directory().join(freezer.switch_file()), source };
        thaw::resume(&processes, waits, || self.file.write_all_at(word.as_bytes(), 0).map_err(failed))
    }
}

/// How long killed processes may take to be gone.
const SWEEP: Duration = Duration::from_secs(10);

/// Whether a SIGSTOP waits for a process: so it is in a frozen cgroup.
fn has_pending_stop(pid: u32) -> bool {
    let status = process::text(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("ShdPnd:")?.trim(), 16).ok());
    pending.is_some_and(|pending| pending & 1 << (Signal::SIGSTOP as u32 - 1) != 0)
}

/// The cgroups of this path (below the root of each hierarchy) that there are. The root itself is everybody's, and
/// never one.
fn cgroups(path: &Path) -> Vec<PathBuf> {
    let Ok(relative) = path.strip_prefix("/") else { return Vec::new() };
    if relative.as_os_str().is_empty() || relative.components().any(|c| c == std::path::Component::ParentDir) {
        return Vec::new();
    }
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    hierarchies.chain([root.to_owned()]).map(|h| h.join(relative)).filter(|c| is_cgroup(c)).collect()
}

/// Whether it is a cgroup, and not just a directory: where no hierarchy is mounted, crun makes one, with `cgroup.procs` in it.
fn is_cgroup(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| [CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC].contains(&found.filesystem_type()))
}

/// Makes the cgroups of this path, in each hierarchy that there is, and returns them.
pub(crate) fn make(path: &Path) -> Result<Vec<PathBuf>, FreezerError> {
    let root = Path::new("/sys/fs/cgroup");
    let mounted = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let hierarchies: Vec<PathBuf> =
        if is_cgroup(root) { vec![root.to_owned()] } else { mounted.filter(|path| is_cgroup(path)).collect() };
    let made = hierarchies.into_iter().map(|mut cgroup| {
        for name in path.strip_prefix("/").unwrap_or(path) {
            let above = cgroup.clone();
            cgroup.push(name);
            make_one(&cgroup, &above).map_err(|source| FreezerError::File { path: cgroup.clone(), source })?;
        }
        Ok(cgroup)
    });
    made.collect()
}

fn make_one(cgroup: &Path, above: &Path) -> io::Result<()> {
    match std::fs::create_dir(cgroup) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // On version 1 it takes no process before it has processors and memory.
    for file in ["cpuset.cpus", "cpuset.mems"].map(|name| (cgroup.join(name), above.join(name))) {
        let (own, inherited) = file;
        if std::fs::read_to_string(&own).is_ok_and(|text| text.trim().is_empty())
            && let Ok(text) = std::fs::read_to_string(inherited)
        {
            std::fs::write(own, text)?;
        }
    }
    Ok(())
}

/// Whether a process is in any of the cgroups of this path.
pub(crate) fn occupied(path: &Path) -> bool {
    cgroups(path).into_iter().any(|cgroup| Freezer::V1(cgroup).processes().is_ok_and(|all| !all.is_empty()))
}

/// Ends every process in the cgroups of this path, and removes the cgroups.
pub(crate) fn sweep(path: &Path) -> Result<(), FreezerError> {
    let cgroups = cgroups(path);
    for cgroup in &cgroups {
        let freezer = if cgroup.join("freezer.state").exists() {
            Freezer::V1(cgroup.clone())
        } else if cgroup.join("cgroup.freeze").exists() {
            Freezer::V2(cgroup.clone())
        } else {
            continue;
        };
        freezer.kill_frozen(SWEEP)?;
    }
    // cgroup v1 has the same directory under several names.
    for cgroup in cgroups {
        match std::fs::remove_dir(&cgroup) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(FreezerError::File { path: cgroup, source: error });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cgroup of files, none of whose tasks ever stops.
    #[test]
    fn only_a_process_that_was_stopped_is_continued() {
        use std::io::{BufRead, BufReader, Read, Write};
        use std::process::{Command, Stdio};
        let script = "trap 'echo continued' CONT; echo ready; read end; echo ended";
        let start = || {
            let mut command = Command::new("bash");
            let command = command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut said = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n");
            (child, said)
        };
        let mut all = [start(), start()];
        let pids = all.each_ref().map(|(child, _)| child.id());
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("cgroup.procs"), pids.map(|pid| format!("{pid}\n")).concat()).unwrap();
        let freezer = Freezer::V2(directory.path().to_owned());
        freezer.stop_beneath(&pids[1..]).unwrap();
        freezer.continue_beneath(&[], &pids[..1]).unwrap();
        let said = all.each_mut().map(|(child, said)| {
            child.stdin.take().unwrap().write_all(b"end\n").unwrap();
            let mut text = String::new();
            said.read_to_string(&mut text).unwrap();
            child.wait().unwrap();
            text
        });
        assert_eq!(said, ["continued\nended\n", "ended\n"]);
    }

    /// As where the note of what was stopped was lost.
    #[test]
    fn a_process_that_shows_as_stopped_is_continued() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("cgroup.procs"), format!("{}\n", child.id())).unwrap();
        let freezer = Freezer::V2(directory.path().to_owned());
        let until = |stopped: &[u32]| {
            let deadline = Instant::now() + Duration::from_secs(20);
            while freezer.stopped().unwrap() != stopped {
                assert!(Instant::now() < deadline, "{:?} and not {stopped:?}", freezer.stopped());
                std::thread::sleep(LOOK);
            }
        };
        let pid = child.id();
        freezer.stop_beneath(&[]).unwrap();
        until(&[pid]);
        freezer.continue_beneath(&[pid], &[]).unwrap();
        assert_eq!(freezer.stopped().unwrap(), [pid], "it was stopped before");
        freezer.continue_beneath(&[], &[]).unwrap();
        until(&[]);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_does_not_stop_in_time_runs_on() {
        let cgroup = tempfile::tempdir().unwrap();
        std::fs::write(cgroup.path().join("cgroup.freeze"), "0").unwrap();
        std::fs::write(cgroup.path().join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        let freezer = Freezer::V2(cgroup.path().to_owned());
        let error = freezer.freeze(Duration::from_millis(10)).unwrap_err();
        assert!(matches!(error, FreezerError::Stuck { what: "stop", .. }), "{error}");
        assert_eq!(std::fs::read_to_string(cgroup.path().join("cgroup.freeze")).unwrap(), "0");
    }
}
