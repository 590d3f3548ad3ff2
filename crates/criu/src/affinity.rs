//! Which processors threads may run on.
//!
//! CRIU does not carry it: a restored thread may run on all of its cgroup's. Programs that compute for days bind their threads to
//! processors, and would go on slower without a word.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tranship_sys::process::text;
use tranship_sys::processors;

/// A thread that is bound to some of the processors that its cgroup has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundThread {
    /// Its process, as the container calls it.
    pub task: u32,
    /// The thread, as the container calls it.
    pub thread: u32,
    /// The processors, by their numbers.
    processors: Vec<usize>,
}

fn all(set: &CpuSet) -> impl Iterator<Item = usize> {
    (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor))
}

/// Those of a list as the kernel writes it; nothing if there are none.
pub(crate) fn set(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    let listed = processors::listed(list).into_iter().filter_map(|processor| usize::try_from(processor).ok());
    listed.filter(|processor| *processor < CpuSet::MAX_CPU).for_each(|processor| set.set(processor));
    (set.count() > 0).then_some(set)
}

/// The directories of a process's cgroup for processors and of those above it, the nearest first; `cgroups` is its file of that name.
pub(crate) fn directories(cgroups: &str, root: &Path) -> Vec<PathBuf> {
    let of_line = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let roots = match controllers {
            "" => vec![root.to_owned(), root.join("unified")],
            _ if controllers.split(',').any(|one| one == "cpuset") => vec![root.join(controllers), root.join("cpuset")],
            _ => return None,
        };
        let above = Path::new(path.trim_start_matches('/')).ancestors();
        Some(above.flat_map(|path| roots.iter().map(|root| root.join(path)).collect::<Vec<_>>()).collect::<Vec<_>>())
    };
    cgroups.lines().filter_map(of_line).flatten().collect()
}

/// The processors that a process may run on whose threads are not bound.
fn unbound(pid: u32) -> Option<CpuSet> {
    let cgroups = text(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let files = ["cpuset.effective_cpus", "cpuset.cpus.effective"];
    let of_cgroup = directories(&cgroups, Path::new("/sys/fs/cgroup"))
        .into_iter()
        .find_map(|directory| files.iter().find_map(|file| set(&fs::read_to_string(directory.join(file)).ok()?)));
    of_cgroup.or_else(|| set(&processors::online().ok()?))
}

pub(crate) fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What the container calls a thread.
pub(crate) fn id_within(pid: u32, thread: u32) -> Option<u32> {
    let status = text(format!("/proc/{pid}/task/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

fn number(thread: u32) -> Option<Pid> {
    Pid::from_raw(thread.try_into().ok()?)
}

/// The bound threads of a process, given by its pids here and in the container.
pub fn bound(pid: u32, task: u32) -> Vec<BoundThread> {
    let mut unbound = None;
    let of_thread = |thread| {
        // It may have ended.
        let processors = sched_getaffinity(Some(number(thread)?)).ok()?;
        let free = unbound.get_or_insert_with(|| self::unbound(pid)).as_ref()?;
        if all(free).all(|processor| processors.is_set(processor)) {
            return None;
        }
        Some(BoundThread { task, thread: id_within(pid, thread)?, processors: all(&processors).collect() })
    };
    threads(pid).filter_map(of_thread).collect()
}

/// Finds threads of restored processes by what the container calls them. The threads of a process are listed once.
pub(crate) struct RestoredThreads<'a> {
    /// Pids here by those in the container.
    tasks: &'a HashMap<u32, u32>,
    /// Threads here by those in the container, by process.
    threads: HashMap<u32, HashMap<u32, u32>>,
}

impl<'a> RestoredThreads<'a> {
    pub fn of(tasks: &'a HashMap<u32, u32>) -> Self {
        Self { tasks, threads: HashMap::new() }
    }

    /// # Errors
    /// There is no such thread.
    pub fn find(&mut self, task: u32, thread: u32) -> io::Result<u32> {
        let here = self.tasks.get(&task).and_then(|pid| {
            let list = || threads(*pid).filter_map(|thread| Some((id_within(*pid, thread)?, thread))).collect();
            self.threads.entry(*pid).or_insert_with(list).get(&thread).copied()
        });
        here.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("there is no thread {thread} of process {task}"))
        })
    }
}

/// Binds threads of restored processes again, whose pids here `tasks` has by those in the container. A thread none of whose processors
/// is there may run on all that there are; those are returned.
///
/// # Errors
/// There is no such thread, or the kernel refuses to bind it.
pub fn bind<'a>(threads_bound: &'a [BoundThread], tasks: &HashMap<u32, u32>) -> io::Result<Vec<&'a BoundThread>> {
    let mut restored = RestoredThreads::of(tasks);
    let mut free = Vec::new();
    for bound in threads_bound {
        let thread = number(restored.find(bound.task, bound.thread)?).ok_or(io::ErrorKind::NotFound)?;
        let mut set = CpuSet::new();
        bound.processors.iter().filter(|one| **one < CpuSet::MAX_CPU).for_each(|one| set.set(*one));
        match sched_setaffinity(Some(thread), &set) {
            Ok(()) => {}
            Err(Errno::INVAL) => free.push(bound),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn these(processors: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        processors.iter().for_each(|processor| set.set(*processor));
        set
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(set("0-2,5\n"), Some(these(&[0, 1, 2, 5])));
        assert_eq!((set("\n"), set("x"), set("3-")), (None, None, None));
    }

    #[test]
    fn the_nearest_cgroup_for_processors_comes_first() {
        let text = "5:cpuset:/a/b\n4:memory:/m\n0::/a\n";
        let found = directories(text, Path::new("/c"));
        let expected = ["/c/cpuset/a/b", "/c/cpuset/a/b", "/c/cpuset/a", "/c/cpuset/a", "/c/cpuset/", "/c/cpuset/"];
        assert_eq!(found[..6], expected.map(PathBuf::from));
        assert_eq!(found[6..8], ["/c/a", "/c/unified/a"].map(PathBuf::from));
    }

    #[test]
    fn a_bound_thread_is_found_and_bound_again() {
        let me = std::process::id();
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let before = sched_getaffinity(None).unwrap();
            if before.count() < 2 {
                println!("skipped: there is one processor only, to which everything is bound");
                return;
            }
            let first = these(&[all(&before).next().unwrap()]);
            sched_setaffinity(None, &first).unwrap();
            tell.send((rustix::thread::gettid(), first, before)).unwrap();
            let _ = ended.recv();
        });
        if let Ok((id, first, before)) = told.recv() {
            let mine = |bound: &BoundThread| bound.thread == id.as_raw_nonzero().get() as u32;
            let found: Vec<_> = bound(me, 1).into_iter().filter(mine).collect();
            assert_eq!(found.len(), 1);
            // As CRIU leaves it.
            sched_setaffinity(Some(id), &before).unwrap();
            assert_eq!(bound(me, 1).iter().filter(|bound| mine(bound)).count(), 0);
            assert_eq!(bind(&found, &HashMap::from([(1, me)])).unwrap(), Vec::<&BoundThread>::new());
            assert_eq!(sched_getaffinity(Some(id)).unwrap(), first);
            let elsewhere = [BoundThread { processors: vec![CpuSet::MAX_CPU - 1], ..found[0].clone() }];
            assert_eq!(bind(&elsewhere, &HashMap::from([(1, me)])).unwrap(), [&elsewhere[0]]);
            assert!(bind(&found, &HashMap::new()).is_err());
            drop(end);
        }
        thread.join().unwrap();
    }
}
