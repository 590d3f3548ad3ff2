//! Names everything inside a running container that CRIU cannot dump or restore, before anything is touched and without
//! stopping anything. A user gets one sentence for each: process, descriptor, cause, remedy.
//!
//! The rules are those of CRIU 4.1.1 and 4.2; where one is not obvious, a comment names the file of CRIU's source that has it.
//! What no look shows stays CRIU's to find: its dump fails then, and the move is undone.

mod container;
mod descriptors;
mod diag;
mod directories;
mod files;
#[doc(hidden)]
pub mod fuzz;
mod hidden;
mod hidden_files;
mod keyrings;
mod mappings;
mod mounts;
mod neighbours;
mod paths;
pub mod pipes;
mod processes;
mod procfs;
mod references;
mod scheduling;
mod segments;
mod semaphores;
mod sessions;
mod sharing;
mod sockets;
#[cfg(test)]
mod states;
mod stdio;
mod terminals;
#[cfg(test)]
mod tests;
mod timers;
mod watches;
pub mod zombies;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tranship_sys::kcmp::same_file;
use tranship_types::{Blocker, BlockerKind, StdioStream};

pub(crate) use procfs::{Mount, mount_of};

use crate::irmap::Watcher;
use container::{Container, Task};
pub use directories::{Sharer, sharers};
pub use mounts::has_message_queues;
pub use neighbours::{Depth, Namespaces, Neighbour};
pub use stdio::{HOLDER, identity as file_identity};

/// How long a state that usually passes (a task in uninterruptible sleep, data in a queue that CRIU cannot carry) may
/// last before it counts as a blocker.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked at again, at the least.
const LOOKS: u32 = 4;
/// Time between two looks at such a state.
const INTERVAL: Duration = Duration::from_millis(150);

/// What is to be inspected.
#[derive(Debug, Clone, Default)]
pub struct Subject {
    /// The container's first process, by its pid on this node.
    pub init_pid: u32,
    /// All processes of the container, by their pids on this node (from its cgroup: processes that entered later too).
    pub pids: Vec<u32>,
    /// Mount points inside the container that the engine hands to CRIU as external: its bind mounts.
    pub external_mounts: Vec<PathBuf>,
    /// Whether the engine connects the pipes that are the first process's stdin, stdout and stderr anew on restore (runc
    /// does: it keeps their names in `descriptors.json`).
    pub stdio_pipes_kept: bool,
    /// Whether standard streams that lead outside of the container are given new other ends by the agent.
    pub carries_stdio: bool,
    /// What the engine has noted of the first process's standard streams: `pipe:[INODE]` or a path, in their order.
    pub stdio_noted: Vec<String>,
    /// Whether the criu in use dumps 32-bit tasks (`criu check --feature compat_restore`).
    pub compat: bool,
    /// Whether the criu in use was built with libbpf, so that it carries BPF maps.
    pub bpf_maps: bool,
    /// Whether the library preloaded into criu answers for the resource limits of other users' processes (from
    /// /proc/PID/limits) where the kernel refuses them to criu. Else they are blockers where the agent lacks
    /// CAP_SYS_RESOURCE.
    pub limits_answered: bool,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// What stands in the way of a move; empty if nothing does.
    pub blockers: Vec<Blocker>,
    /// What a user should know although a move is possible: sentences without a full stop.
    pub notes: Vec<String>,
    /// What a move changes, although it loses nothing: sentences of the same kind, for the plan and the report.
    pub changes: Vec<String>,
    /// Processes, zombies included.
    pub tasks: usize,
    /// Threads, the processes' first ones included.
    pub threads: usize,
    /// Processes that have ended, and that nobody has waited for.
    pub zombies: usize,
    /// How many processes there are from the first one down to the last of its descendants.
    pub depth: usize,
    /// Bytes in the container's own tmpfs mounts (not in those the engine bound into it).
    pub tmpfs_bytes: u64,
    /// Bytes of private anonymous memory (resident or swapped out) and of shared memory, each shared region counted once.
    pub memory_bytes: u64,
    /// Those of them that are shared memory.
    pub shared_bytes: u64,
    /// What watches files by inotify of which CRIU has to be told the paths ([`irmap`](crate::irmap)).
    pub watchers: Vec<Watcher>,
    /// What the engine is to connect anew as stdin, stdout and stderr: `pipe:[INODE]` or a path. Where the first process has redirected
    /// one, the pipe that the engine made for it may be open under other numbers, and in other processes.
    pub stdio: Vec<String>,
    /// Pipes that lead out of the container and get new other ends, from the engine or the agent: `pipe:[INODE]`.
    pub carried_pipes: Vec<String>,
    /// What of the node the standard streams lead to, where [`Subject::carries_stdio`] is set.
    pub streams: Vec<StdioStream>,
    /// Whether files of Unix sockets are to get other names than CRIU gives them ([`socket_files`](crate::socket_files)).
    pub renamed_sockets: bool,
    /// TCP connections that must survive: every socket that is neither closed nor listening.
    pub tcp_connections: usize,
}

/// Why a container cannot be inspected.
#[derive(Debug, thiserror::Error)]
pub enum PreflightError {
    /// The first process is gone.
    #[error("the container's first process (pid {pid}) has ended; start the container and try again")]
    Gone {
        /// Its pid on this node.
        pid: u32,
    },
    /// Something of /proc cannot be read.
    #[error("cannot read {what} of pid {pid}: {source}; the agent must run as root on the node itself")]
    Unreadable {
        /// What was read, e.g. `mountinfo`.
        what: &'static str,
        /// Whose.
        pid: u32,
        /// The system's answer.
        source: io::Error,
    },
}

impl PreflightError {
    fn reading(what: &'static str, pid: u32) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::Gone { pid },
            _ if source.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Self::Gone { pid },
            _ => Self::Unreadable { what, pid, source },
        }
    }
}

/// What one look at the container has found.
#[derive(Debug, Default)]
struct Look {
    findings: Findings,
    /// Blockers that may pass by themselves, each with a number that is the same at the next look only if the same thing
    /// is still in the way: a socket's inode, a stuck thread's count of switches.
    passing: Vec<(u64, Blocker)>,
    /// Unix connections whose peer's credentials (SO_PEERCRED) are those of another user than root.
    peers_of_users: usize,
    /// What was named already, and shows in other places too.
    named: HashSet<(u32, &'static str)>,
    /// Unix sockets by the path that CRIU binds them to: their inodes, and whether their files have that name alone.
    bound: HashMap<Vec<u8>, Vec<(u64, bool)>>,
}

/// What is said of a process that a BPF iterator has failed to read: it may have what CRIU drops.
pub(crate) fn unread(pid: u32, name: &str, error: &io::Error) -> Blocker {
    let cause =
        format!("{name} may have what CRIU does not carry, and the kernel cannot be asked (BPF iterator): {error}");
    Blocker::new(BlockerKind::Process, cause, "try again; if that fails too, restart the agent").at(pid, None)
}

impl Look {
    fn block(&mut self, blocker: Blocker) {
        self.findings.blockers.push(blocker);
    }

    /// The same for something that shows in several places (a descriptor and a mapping): only the first of them is named.
    fn block_once(&mut self, pid: u32, what: &'static str, blocker: Blocker) {
        if self.named.insert((pid, what)) {
            self.block(blocker);
        }
    }

    /// Blocks a process of which the kernel does not tell what CRIU would drop; once for each process.
    fn block_unread(&mut self, task: &Task, error: &io::Error) {
        let blocker = unread(task.pid, &task.name(), error);
        self.block_once(task.pid, "unread", blocker);
    }

    fn wait(&mut self, identity: u64, blocker: Blocker) {
        self.passing.push((identity, blocker));
    }

    fn change(&mut self, change: String) {
        self.findings.changes.push(change);
    }

    fn note(&mut self, note: String) {
        if !self.findings.notes.contains(&note) {
            self.findings.notes.push(note);
        }
    }
}

/// Inspects a running container: reads /proc, lists sockets, stops and changes nothing. Takes milliseconds, and up to a
/// second where something that usually passes by itself has to be watched.
///
/// # Errors
/// The first process is gone, or /proc may not be read. Other processes may come and go meanwhile.
pub fn inspect(subject: &Subject) -> Result<Findings, PreflightError> {
    let mut look = examine(subject)?;
    let mut lasting = std::mem::take(&mut look.passing);
    // On a busy machine a single look may take longer than that.
    let (began, mut again) = (Instant::now(), 0);
    while !lasting.is_empty() && (began.elapsed() < PATIENCE || again < LOOKS) {
        again += 1;
        std::thread::sleep(INTERVAL);
        look = examine(subject)?;
        lasting.retain(|(identity, b)| {
            look.passing.iter().any(|(i, now)| i == identity && (b.pid, b.fd) == (now.pid, now.fd))
        });
    }
    let mut findings = look.findings;
    findings.blockers.extend(lasting.into_iter().map(|(_, b)| b.passing()));
    findings.blockers = in_order(once_for_all(findings.blockers));
    Ok(findings)
}

/// A descriptor that several processes have is named for the first of them, with the number of the others; of descriptors of one process for
/// the same reason, the first.
fn once_for_all(blockers: Vec<Blocker>) -> Vec<Blocker> {
    let mut once: Vec<(Blocker, BTreeSet<u32>)> = Vec::new();
    // By what is said of a file, and its name: those that were named.
    let mut known: HashMap<(String, String), Vec<usize>> = HashMap::new();
    for blocker in blockers {
        let place = blocker.pid.zip(blocker.fd);
        let file = place.and_then(|place| Some((place, what(&blocker, place)?)));
        let Some((place, what)) = file else {
            once.push((blocker, BTreeSet::new()));
            continue;
        };
        // Objects of the kernel all have the same few names.
        let is_anonymous = what.1.starts_with("anon_inode:");
        let named = known.entry(what).or_default();
        let is_same = |(first, pids): &(Blocker, BTreeSet<u32>)| {
            let is_of_process = first.pid == blocker.pid || pids.contains(&place.0);
            is_of_process || !is_anonymous || first.pid.zip(first.fd).is_some_and(|first| same_file(first, place))
        };
        match named.iter().find(|first| is_same(&once[**first])) {
            Some(first) => {
                once[*first].1.insert(place.0);
            }
            None => {
                named.push(once.len());
                once.push((blocker, BTreeSet::new()));
            }
        }
    }
    let with_others = |(mut blocker, mut pids): (Blocker, BTreeSet<u32>)| {
        blocker.pid.map(|pid| pids.remove(&pid));
        match pids.len() {
            0 => {}
            1 => blocker.cause.push_str("; another process has it too"),
            others => blocker.cause.push_str(&format!("; {others} other processes have it too")),
        }
        blocker
    };
    once.into_iter().map(with_others).collect()
}

/// What a blocker says of the file behind a descriptor, after the names of both, and the name that the file has.
fn what(blocker: &Blocker, (pid, fd): (u32, i32)) -> Option<(String, String)> {
    let (_, what) = blocker.cause.split_once(&format!("(pid {pid}) "))?;
    Some((what.to_owned(), procfs::link(format!("/proc/{pid}/fd/{fd}")).ok()?))
}

/// Each blocker once, and those that may be the cause of others first: of an odd process the descriptors and sockets are odd too.
fn in_order(blockers: Vec<Blocker>) -> Vec<Blocker> {
    let mut seen = HashSet::new();
    let mut once: Vec<Blocker> = blockers.into_iter().filter(|b| seen.insert((b.cause.clone(), b.pid, b.fd))).collect();
    once.sort_by_key(|b| match b.kind {
        BlockerKind::Process => 0,
        BlockerKind::Mount => 1,
        BlockerKind::Descriptor => 2,
        _ => 3,
    });
    once
}

fn examine(subject: &Subject) -> Result<Look, PreflightError> {
    let container = Container::read(subject)?;
    let mut look = Look::default();
    processes::check(&container, subject, &mut look);
    sharing::check(&container, &mut look);
    scheduling::check(&container, &mut look);
    hidden::check(&container, &mut look);
    semaphores::check(&container, &mut look);
    segments::check(&container, &mut look);
    timers::check(&container, &mut look);
    keyrings::check(&container, &mut look);
    let files = files::Files::read(&container);
    descriptors::check(&container, subject, &files, &mut look);
    terminals::check(&container, &files, &mut look);
    paths::check(&container, &files, &mut look);
    mounts::check(&container, subject, &mut look);
    watches::check(&container, &files, &mut look);
    sockets::check(&container, &files, &mut look)?;
    mappings::check(&container, &files, &mut look);
    Ok(look)
}
