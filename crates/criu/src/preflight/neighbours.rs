//! Processes outside of a container that live in its namespaces.
//!
//! A move takes the container's namespaces away: its interfaces leave, the members of its PID namespace are killed with its first process, and what
//! an IPC or a UTS namespace holds is copied. A process that stays behind would lose what it shares.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use super::procfs::{self, Status};
use super::{INTERVAL, PATIENCE};
use crate::front;

/// The kinds of namespaces: their links in `/proc/PID/ns`, and what a sentence calls them.
const KINDS: [(&str, &str); 10] = [
    ("net", "network"),
    ("pid", "PID"),
    ("pid_for_children", "PID"),
    ("ipc", "IPC"),
    ("uts", "UTS"),
    ("mnt", "mount"),
    ("user", "user"),
    ("cgroup", "cgroup"),
    ("time", "time"),
    ("time_for_children", "time"),
];
/// The kinds in which one thread alone can be elsewhere than its process (setns(2)).
const OF_THREADS: [&str; 6] = ["net", "pid_for_children", "ipc", "uts", "mnt", "cgroup"];
/// The kinds whose members lose something at once when the container leaves.
const VITAL: [&str; 3] = ["net", "pid", "ipc"];
/// Links that a directory has besides one for each thread: `.` and `..`.
const OWN_LINKS: u64 = 2;

/// A process outside of the container that shares namespaces with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its pid on this node.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
    /// What it shares: `network`, `PID`, `IPC` …
    pub kinds: Vec<&'static str>,
    /// Whether it descends from the container's first process, whose cgroup it has left.
    pub descends: bool,
}

/// How closely the node's processes are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Their first threads, in network, PID and IPC namespaces: some microseconds for each process.
    Processes,
    /// All their threads.
    Threads,
}

/// The namespaces of a container.
#[derive(Debug, Clone, Default)]
pub struct Namespaces {
    init: u32,
    /// Those that are not the node's, by their links (`net:[…]`), with their kinds.
    own: HashMap<String, &'static str>,
    /// The kinds that the first process shares with the node itself, by their links' names.
    of_node: Vec<&'static str>,
}

/// The namespaces of a process, or of a thread of it, by the name of their links.
fn links<'k>(directory: &str, kinds: impl IntoIterator<Item = &'k str>) -> Vec<(&'k str, String)> {
    kinds.into_iter().filter_map(|kind| Some((kind, procfs::link(format!("{directory}/{kind}")).ok()?))).collect()
}

fn all_links(pid: u32) -> Vec<(&'static str, String)> {
    links(&format!("/proc/{pid}/ns"), KINDS.map(|(link, _)| link))
}

fn kind_of(link: &str) -> &'static str {
    KINDS.iter().find(|(name, _)| *name == link).map_or("", |(_, kind)| kind)
}

/// Which file a process executes.
fn program(pid: u32) -> Option<(u64, u64)> {
    fs::metadata(format!("/proc/{pid}/exe")).ok().map(|file| (file.dev(), file.ino()))
}

/// Whether a process is Tranship's own: the CRIU shim and the criu that it runs wait in the container's network namespace.
fn is_ours(pid: u32) -> bool {
    let this = std::process::id();
    let own = program(this);
    let is_own = |pid: u32| program(pid).is_some_and(|its| own == Some(its) || front::is_program(its));
    is_own(pid) || Status::read(pid, None).is_ok_and(|status| status.ppid != this && is_own(status.ppid))
}

impl Namespaces {
    /// Those of the processes `pids`, of which `init` is the first. The node's are those of this process and of the first process of its PID namespace.
    pub fn of(init: u32, pids: &[u32]) -> Self {
        let node: HashSet<String> =
            [std::process::id(), 1].into_iter().flat_map(all_links).map(|(_, target)| target).collect();
        let of = pids.iter().copied().chain([init]).map(|pid| (pid, all_links(pid))).collect();
        Self::compare(init, &of, &node)
    }

    fn compare(init: u32, of: &BTreeMap<u32, Vec<(&'static str, String)>>, node: &HashSet<String>) -> Self {
        let is_node_s = |target: &String| node.contains(target);
        let first = of.get(&init).into_iter().flatten();
        let of_node = first.filter(|(_, target)| is_node_s(target)).map(|(link, _)| *link).collect();
        let own = of.values().flatten().filter(|(_, target)| !is_node_s(target));
        Self { init, own: own.map(|(link, target)| (target.clone(), kind_of(link))).collect(), of_node }
    }

    /// Whether the first process lives in the node's own namespace of a kind (`net`, `pid`, `ipc`, `uts` …).
    pub fn is_node_s(&self, link: &str) -> bool {
        self.of_node.contains(&link)
    }

    /// The kinds of those among these that are the container's.
    fn shared(&self, links: Vec<(&str, String)>) -> Vec<&'static str> {
        let mut kinds: Vec<&'static str> = Vec::new();
        for kind in links.into_iter().filter_map(|(_, target)| self.own.get(&target).copied()) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        kinds
    }

    /// Whether a process shares no other kinds of namespaces with the container.
    pub fn shares_at_most(&self, pid: u32, kinds: &[&str]) -> bool {
        let mut shared = self.shared(all_links(pid)).into_iter().chain(self.shared_by_threads(pid));
        shared.all(|shared| kinds.contains(&shared))
    }

    /// The processes that share a namespace with the container, and are not `inside` it: for longer than a program takes that
    /// enters for a moment (a monitor, an engine's `exec`). Looks once where there are none.
    pub fn neighbours(&self, depth: Depth, inside: impl Fn() -> Vec<u32>) -> Vec<Neighbour> {
        let began = Instant::now();
        let mut lasting = self.look(depth, &inside);
        while !lasting.is_empty() && began.elapsed() < PATIENCE {
            std::thread::sleep(INTERVAL);
            let now = self.look(depth, &inside);
            lasting.retain(|earlier| now.iter().any(|later| later.pid == earlier.pid));
        }
        lasting
    }

    fn look(&self, depth: Depth, inside: impl Fn() -> Vec<u32>) -> Vec<Neighbour> {
        let own = std::process::id();
        let all = procfs::numbers("/proc").unwrap_or_default();
        let mut found = Vec::new();
        for pid in all.into_iter().filter(|pid| *pid != own) {
            let kinds = match depth {
                Depth::Processes => self.shared(links(&format!("/proc/{pid}/ns"), VITAL)),
                Depth::Threads => self.shared(all_links(pid)),
            };
            let kinds = if kinds.is_empty() && depth == Depth::Threads { self.shared_by_threads(pid) } else { kinds };
            if !kinds.is_empty() {
                found.push((pid, kinds));
            }
        }
        // Asked last: what was born meanwhile is inside.
        let inside: HashSet<u32> = if found.is_empty() { HashSet::new() } else { inside().into_iter().collect() };
        found.retain(|(pid, _)| !inside.contains(pid) && !is_ours(*pid));
        found.into_iter().filter_map(|(pid, kinds)| self.neighbour(pid, kinds)).collect()
    }

    fn shared_by_threads(&self, pid: u32) -> Vec<&'static str> {
        let directory = format!("/proc/{pid}/task");
        if fs::metadata(&directory).map_or(0, |task| task.nlink()) <= OWN_LINKS + 1 {
            return Vec::new();
        }
        let threads = procfs::numbers(&directory).unwrap_or_default();
        let of_thread = |tid: u32| self.shared(links(&format!("{directory}/{tid}/ns"), OF_THREADS));
        threads.into_iter().map(of_thread).find(|kinds| !kinds.is_empty()).unwrap_or_default()
    }

    /// `None` if it has ended.
    fn neighbour(&self, pid: u32, kinds: Vec<&'static str>) -> Option<Neighbour> {
        let status = Status::read(pid, None).ok().filter(|status| !matches!(status.state, 'Z' | 'X'))?;
        Some(Neighbour { pid, kinds, descends: self.descends(status.ppid), name: status.name })
    }

    fn descends(&self, mut parent: u32) -> bool {
        for _ in 0..64 {
            match parent {
                0 | 1 => return false,
                pid if pid == self.init => return true,
                pid => parent = Status::read(pid, None).map_or(0, |status| status.ppid),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn namespaces(of: &[(u32, &[(&'static str, &str)])], node: &[&str]) -> Namespaces {
        let owned = |links: &[(&'static str, &str)]| links.iter().map(|(k, t)| (*k, (*t).to_owned())).collect();
        let of = of.iter().map(|(pid, links)| (*pid, owned(links))).collect();
        Namespaces::compare(7, &of, &node.iter().map(|target| (*target).to_owned()).collect())
    }

    #[test]
    fn a_namespace_of_the_node_makes_nobody_a_neighbour() {
        let own = namespaces(&[(7, &[("net", "net:[1]"), ("user", "user:[2]")])], &["user:[2]", "net:[9]"]);
        assert!(own.is_node_s("user") && !own.is_node_s("net"));
        let links = |net: &str| vec![("net", net.to_owned()), ("user", "user:[2]".to_owned())];
        assert_eq!(own.shared(links("net:[9]")), [""; 0]);
        assert_eq!(own.shared(links("net:[1]")), ["network"]);
    }

    #[test]
    fn each_kind_is_named_once_and_nested_ones_count() {
        let own = namespaces(&[(7, &[("pid", "pid:[1]")]), (8, &[("net", "net:[5]"), ("pid", "pid:[1]")])], &[]);
        let shared = [("pid", "pid:[1]"), ("pid_for_children", "pid:[1]"), ("net", "net:[5]"), ("ipc", "ipc:[0]")];
        let shared = shared.map(|(link, target)| (link, target.to_owned()));
        assert_eq!(own.shared(shared.into()), ["PID", "network"]);
    }

    /// A process that is killed on drop.
    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn run(program: &[&str]) -> Killed {
        let mut command = Command::new(program[0]);
        Killed(command.args(&program[1..]).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn wait(mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + std::time::Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "waited 20 s in vain");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_process_that_entered_is_found_also_by_one_thread_of_it() {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: not root");
            return;
        }
        let first = run(&["unshare", "--net", "--ipc", "sleep", "1000"]);
        let init = first.0.id();
        let is_own = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let node = is_own(std::process::id());
        wait(|| is_own(init) != node);
        let own = Namespaces::of(init, &[init]);
        assert!(own.is_node_s("pid") && !own.is_node_s("net") && !own.is_node_s("ipc"));
        assert_eq!(own.neighbours(Depth::Threads, || vec![init]), []);

        let entered = run(&["nsenter", "--net", "--target", &init.to_string(), "sleep", "1000"]);
        wait(|| is_own(entered.0.id()) == is_own(init));
        let found = own.neighbours(Depth::Processes, || vec![init]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].pid, found[0].kinds.as_slice(), found[0].descends),
            (entered.0.id(), &["network"][..], false)
        );
        assert_eq!(own.neighbours(Depth::Processes, || vec![init, entered.0.id()]), []);
        drop(entered);

        let script = "import ctypes, os, sys, threading, time\n\
                      def enter(): ctypes.CDLL(None).setns(os.open(sys.argv[1], os.O_RDONLY), 0); time.sleep(1000)\n\
                      threading.Thread(target=enter).start()";
        let threaded = run(&["python3", "-c", script, &format!("/proc/{init}/ns/net")]);
        let look = |depth| own.neighbours(depth, || vec![init]);
        wait(|| look(Depth::Threads).iter().any(|found| found.pid == threaded.0.id()));
        assert_eq!(look(Depth::Processes), []);
    }
}
