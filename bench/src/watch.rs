//! What a move costs besides time, seen from outside and in the same way for every system: memory held on both nodes, and
//! bytes sent.
//!
//! Memory counted is everything in a node but the containers: the private memory of each process in the node's pid
//! namespace (`RssAnon`; containers' processes are in pid namespaces of their own, also while CRIU restores them), every
//! memfd that such a process has open, once, and what lies in the node's tmpfs mounts. Taken every 10 ms; what was there
//! before the move began, agents at rest above all, is subtracted.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::statvfs::statvfs;
use tranship_lab::Lab;

const PACE: Duration = Duration::from_millis(10);
/// A look takes longer the more processes there are, and takes time from what is measured: at most one part in so many.
const REST: u32 = 20;
/// The tmpfs mounts that each node has of its own.
const MOUNTS: [&str; 3] = ["/run", "/tmp", "/var/lib/tranship"];

/// The most that there was at any moment, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Peaks {
    /// Held on the source above what was held at the beginning.
    pub source: u64,
    /// The same on the destination.
    pub destination: u64,
    /// Resident memory of the source's agent but for memory that it shares with others, the page store above all.
    pub source_agent: u64,
    /// The same of the destination's.
    pub destination_agent: u64,
    /// The same of the destination's pager.
    pub pager: u64,
}

/// What a node holds at one moment, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    all: u64,
    agent: u64,
    pager: u64,
}

/// Samples the memory of two nodes until it is stopped.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Peaks>>,
}

impl Watch {
    /// Takes what there is as the level to count from, and begins.
    pub fn start(lab: &Lab, source: &str, destination: &str) -> Result<Self> {
        let (source, destination) = (NodeMemory::of(lab, source)?, NodeMemory::of(lab, destination)?);
        let (source_rest, destination_rest) = (source.held()?.all, destination.held()?.all);
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most = Peaks::default();
            while !flag.load(Ordering::Acquire) {
                let begin = Instant::now();
                let (here, there) = (source.held()?, destination.held()?);
                most = Peaks {
                    source: most.source.max(here.all.saturating_sub(source_rest)),
                    destination: most.destination.max(there.all.saturating_sub(destination_rest)),
                    source_agent: most.source_agent.max(here.agent),
                    destination_agent: most.destination_agent.max(there.agent),
                    pager: most.pager.max(there.pager),
                };
                let took = begin.elapsed();
                std::thread::sleep(PACE.saturating_sub(took).max(took * REST));
            }
            Ok(most)
        });
        Ok(Self { stop, thread })
    }

    /// Ends it, and returns the most that there was.
    pub fn stop(self) -> Result<Peaks> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("the thread that watches memory panicked"))?
    }
}

/// Where the memory of a node can be read.
struct NodeMemory {
    processes: PathBuf,
    mounts: Vec<PathBuf>,
}

impl NodeMemory {
    fn of(lab: &Lab, node: &str) -> Result<Self> {
        let mounts = MOUNTS.iter().map(|m| lab.path(node, m)).collect::<Result<_, _>>()?;
        Ok(Self { processes: lab.path(node, "/proc")?, mounts })
    }

    /// What is held now.
    fn held(&self) -> Result<Held> {
        let mut held = Held::default();
        for mount in &self.mounts {
            let numbers = statvfs(mount).with_context(|| format!("cannot see how full {} is", mount.display()))?;
            held.all += (numbers.blocks() - numbers.blocks_free()) * numbers.fragment_size();
        }
        let entries = fs::read_dir(&self.processes)
            .with_context(|| format!("cannot list {}", self.processes.display()))?
            .flatten();
        let mut memfds = HashMap::new();
        for entry in entries.filter(|e| e.file_name().as_encoded_bytes()[0].is_ascii_digit()) {
            // A process may end at any moment: then it holds nothing.
            let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
            if is_in_container(&status) {
                continue;
            }
            held.all += field(&status, "RssAnon:").unwrap_or(0);
            collect_memfds(&entry.path().join("fd"), &mut memfds);
            match part_of(&entry.path()) {
                Some(Part::Agent) => held.agent += unshared(&status),
                Some(Part::Pager) => held.pager += unshared(&status),
                None => {}
            }
        }
        held.all += memfds.values().sum::<u64>();
        Ok(held)
    }
}

/// Which of Tranship's long-lived programs a process is.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Agent,
    Pager,
}

fn part_of(process: &Path) -> Option<Part> {
    let program = fs::read_link(process.join("exe")).ok()?;
    let line = fs::read(process.join("cmdline")).ok()?;
    part_named(&program, &line)
}

/// By its executable and its arguments. The same executable is also CRIU's front, by that name.
fn part_named(program: &Path, arguments: &[u8]) -> Option<Part> {
    let mut words = arguments.split(|byte| *byte == 0);
    let name = Path::new(OsStr::from_bytes(words.next()?)).file_name()?;
    let is_front = name == "criu";
    let is_transhipd = program.file_name()?.as_encoded_bytes().starts_with(b"transhipd");
    (is_transhipd && !is_front).then(|| if words.next() == Some(b"pager") { Part::Pager } else { Part::Agent })
}

/// Resident memory of a process without that of files in memory, from the text of its /proc/PID/status.
fn unshared(status: &str) -> u64 {
    field(status, "RssAnon:").unwrap_or(0) + field(status, "RssFile:").unwrap_or(0)
}

/// Adds the memfds behind a process's descriptors by their inode, with their bytes.
fn collect_memfds(descriptors: &Path, memfds: &mut HashMap<(u64, u64), u64>) {
    for entry in fs::read_dir(descriptors).into_iter().flatten().flatten() {
        let is_memfd =
            fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"));
        if let (true, Ok(metadata)) = (is_memfd, fs::metadata(entry.path())) {
            memfds.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
        }
    }
}

/// Whether a process is in a pid namespace below the one of the /proc that its status was read from.
fn is_in_container(status: &str) -> bool {
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    pids.is_some_and(|pids| pids.split_whitespace().count() > 1)
}

/// Resident memory in bytes of the process on this machine that runs so, if there is just one.
pub fn resident(command: &[&str]) -> Result<u64> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")?.flatten() {
        let path = entry.path();
        let Ok(line) = fs::read(path.join("cmdline")) else { continue };
        if line.strip_suffix(b"\0") == Some(command.join("\0").as_bytes()) {
            let status = fs::read_to_string(path.join("status")).unwrap_or_default();
            found.push(field(&status, "VmRSS:").unwrap_or(0));
        }
    }
    match found.as_slice() {
        [one] => Ok(*one),
        many => bail!("there are {} processes `{}`, not one", many.len(), command.join(" ")),
    }
}

/// A field of /proc/PID/status in kB, as bytes.
pub fn field(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// The interface counters of some nodes at one moment.
pub struct Wire<const N: usize> {
    nodes: [&'static str; N],
    sent: u64,
}

impl<const N: usize> Wire<N> {
    /// Reads them.
    pub fn now(lab: &Lab, nodes: [&'static str; N]) -> Result<Self> {
        let mut sent = 0;
        for node in nodes {
            // The node's own /proc, whose process 1 is in the node's network namespace.
            let file = lab.path(node, "/proc/1/net/dev")?;
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            sent += sent_by(&text, "eth0").with_context(|| format!("node {node} has no eth0"))?;
        }
        Ok(Self { nodes, sent })
    }

    /// Bytes that these nodes have sent since.
    pub fn since(&self, lab: &Lab) -> Result<u64> {
        let later = Self::now(lab, self.nodes)?;
        match later.sent.checked_sub(self.sent) {
            Some(bytes) => Ok(bytes),
            None => bail!("the counters of the nodes' interfaces went backwards"),
        }
    }
}

/// Bytes that an interface has sent, from the text of /proc/net/dev.
fn sent_by(text: &str, interface: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    line.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nNSpid:\t7\t1\nVmRSS:\t    2048 kB\nRssAnon:\t     12 kB\n";

    #[test]
    fn a_nested_pid_namespace_is_a_container() {
        assert!(is_in_container(STATUS));
        assert!(!is_in_container("NSpid:\t7\n"));
    }

    #[test]
    fn agent_pager_and_front_are_told_apart() {
        let program = Path::new("/usr/bin/transhipd");
        assert_eq!(part_named(program, b"transhipd\0--config\0x\0"), Some(Part::Agent));
        assert_eq!(part_named(program, b"/proc/self/exe\0pager\0/run/x\0"), Some(Part::Pager));
        assert_eq!(part_named(program, b"/run/tranship/migrations/x/bin/criu\0swrk\0"), None);
        assert_eq!(part_named(Path::new("/usr/bin/redis-server"), b"redis-server\0"), None);
    }

    #[test]
    fn fields_are_in_bytes() {
        assert_eq!(field(STATUS, "RssAnon:"), Some(12 << 10));
        assert_eq!(field(STATUS, "VmSwap:"), None);
    }

    #[test]
    fn the_ninth_number_is_what_was_sent() {
        let text =
            "Inter-|\n face |\n    lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 11 1 0 0 0 0 0 0 4711 2 0 0 0 0 0 0\n";
        assert_eq!(sent_by(text, "eth0"), Some(4711));
        assert_eq!(sent_by(text, "eth1"), None);
    }

    #[test]
    fn a_memfd_counts_once_with_the_pages_that_it_has() {
        let memfd = nix::sys::memfd::memfd_create(c"bench-test", nix::sys::memfd::MFdFlags::empty()).unwrap();
        let file = fs::File::from(memfd);
        let second = file.try_clone().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&second, &[1; 8192], 1 << 20).unwrap();
        let mut found = HashMap::new();
        collect_memfds(Path::new("/proc/self/fd"), &mut found);
        let metadata = file.metadata().unwrap();
        assert_eq!(found.get(&(metadata.dev(), metadata.ino())), Some(&8192));
    }
}
