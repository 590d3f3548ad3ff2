//! All open descriptors of a container, read once for all rules.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use tranship_types::{Blocker, BlockerKind};

use super::container::{Container, Task};
use super::procfs::{self, FdInfo};

/// What the file behind a path or descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    pub kind: FileType,
    pub inode: u64,
    /// Device that the file lies on.
    pub device: (u32, u32),
    /// Device that the file stands for, if it is one.
    pub stands_for: (u32, u32),
    /// Bytes that the file takes up.
    pub bytes: u64,
    /// Names that the file has.
    pub links: u32,
}

impl Kind {
    /// Looks without asking a server, so that a dead network filesystem cannot hold us up.
    pub(super) fn of(path: impl AsRef<Path>) -> Option<Self> {
        Self::at(path, AtFlags::empty()).ok()
    }

    /// The same with flags of statx(2).
    pub(super) fn at(path: impl AsRef<Path>, flags: AtFlags) -> rustix::io::Result<Self> {
        let s = statx(CWD, path.as_ref(), AtFlags::STATX_DONT_SYNC | flags, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            kind: FileType::from_raw_mode(s.stx_mode.into()),
            inode: s.stx_ino,
            device: (s.stx_dev_major, s.stx_dev_minor),
            stands_for: (s.stx_rdev_major, s.stx_rdev_minor),
            bytes: s.stx_blocks * 512,
            links: s.stx_nlink,
        })
    }
}

/// One descriptor.
#[derive(Debug, Clone)]
pub(super) struct Descriptor<'a> {
    pub task: &'a Task,
    pub fd: i32,
    /// Where /proc/PID/fd/FD points.
    pub link: String,
    pub info: FdInfo,
    pub kind: Kind,
}

impl Descriptor<'_> {
    /// How a sentence names it: `stdout of redis-server (pid 812)`.
    pub(super) fn name(&self) -> String {
        let which = match self.fd {
            0 => "stdin".to_owned(),
            1 => "stdout".to_owned(),
            2 => "stderr".to_owned(),
            n => format!("descriptor {n}"),
        };
        format!("{which} of {}", self.task.name())
    }

    /// What is in the way of a move in this descriptor: a sentence that begins with its name.
    pub(super) fn blocker(&self, kind: BlockerKind, what: &str, remedy: &str) -> Blocker {
        Blocker::new(kind, format!("{} {what}", self.name()), remedy).at(self.task.pid, Some(self.fd))
    }

    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", self.task.pid, self.fd)
    }
}

/// All descriptors of a container.
#[derive(Debug)]
pub(super) struct Files<'a> {
    pub all: Vec<Descriptor<'a>>,
    /// Inodes of sockets that some process of the container holds.
    pub sockets: HashSet<u64>,
    /// Made only when it is asked for: it takes a look at every process of the node.
    holders: OnceCell<HashMap<String, Holder>>,
}

/// How often a standard stream that is missing is looked for again, and how long each wait is.
pub(super) const LOOKS: usize = 30;
pub(super) const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

impl<'a> Files<'a> {
    pub(super) fn read(container: &'a Container) -> Self {
        let mut all = Vec::new();
        for task in container.tasks.values() {
            for fd in procfs::numbers(format!("/proc/{}/fd", task.pid)).unwrap_or_default() {
                all.extend(i32::try_from(fd).ok().and_then(|fd| read(task, fd)));
            }
        }
        if let Some(first) = container.tasks.get(&container.init) {
            all.extend(missing_streams(first, &all));
        }
        let sockets = all.iter().filter_map(|d| procfs::bracketed(&d.link, "socket")).collect();
        Self { all, sockets, holders: OnceCell::new() }
    }

    /// Who holds a pipe or socket, if anybody does.
    pub(super) fn holder(&self, container: &Container, link: &str) -> Option<&Holder> {
        self.holders.get_or_init(|| holders(container)).get(link)
    }
}

/// Standard streams that a process had none of when its descriptors were read: a shell that redirects one closes it for a moment.
fn missing_streams<'a>(task: &'a Task, all: &[Descriptor<'_>]) -> Vec<Descriptor<'a>> {
    let is_missing = |fd: &i32| !all.iter().any(|d| d.task.pid == task.pid && d.fd == *fd);
    let again = |fd: i32| {
        (0..LOOKS).find_map(|_| {
            std::thread::sleep(BETWEEN_LOOKS);
            read(task, fd)
        })
    };
    (0..3).filter(is_missing).filter_map(again).collect()
}

/// A descriptor that is closed while it is being read is none.
fn read(task: &Task, fd: i32) -> Option<Descriptor<'_>> {
    let path = format!("/proc/{}/fd/{fd}", task.pid);
    let link = procfs::link(&path).ok()?;
    let info = FdInfo::parse(&procfs::text(format!("/proc/{}/fdinfo/{fd}", task.pid)).ok()?);
    let kind = Kind::of(&path)?;
    // Else it is another one by now.
    let is_same = procfs::link(&path).is_ok_and(|now| now == link);
    is_same.then_some(Descriptor { task, fd, link, info, kind })
}

/// Who holds a pipe or socket that the container uses one end of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    /// A process of the container, maybe one that was born after the list of processes was made.
    Inside,
    /// A process outside of it: pid and name.
    Outside(u32, String),
}

/// Holders by link (`pipe:[…]`, `socket:[…]`) among all processes of the node but this one.
fn holders(container: &Container) -> HashMap<String, Holder> {
    let own = std::process::id();
    let mut all = HashMap::new();
    for pid in procfs::numbers("/proc").unwrap_or_default().into_iter().filter(|p| *p != own) {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let links: Vec<String> = entries.flatten().filter_map(|e| procfs::link(e.path()).ok()).collect();
        let links: Vec<String> =
            links.into_iter().filter(|l| l.starts_with("pipe:[") || l.starts_with("socket:[")).collect();
        if links.is_empty() {
            continue;
        }
        let holder = match container.owns(pid) {
            true => Holder::Inside,
            false => match procfs::Status::read(pid, None) {
                Ok(status) => Holder::Outside(pid, status.name),
                // It has ended, and holds nothing any more.
                Err(_) => continue,
            },
        };
        for link in links {
            // Both ends of a pipe have one name, so the container's own end says nothing; of a socket there is but one.
            let decides = if link.starts_with("pipe:") { holder != Holder::Inside } else { holder == Holder::Inside };
            if decides || !all.contains_key(&link) {
                all.insert(link, holder.clone());
            }
        }
    }
    all
}
