//! Settings of open files, epoll sets and terminals that CRIU does not carry.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::{Deserialize, Serialize};
use tranship_sys::file_settings::{
    EpollParameters, content_of, epoll_parameters, hang_up, is_exclusive, is_hung_up, is_master, set_epoll_parameters,
    set_exclusive, set_write_hint, write_hint,
};
use tranship_sys::process::{OpenFiles, take_descriptor, text};
use tranship_types::{Blocker, BlockerKind};

use crate::preflight::Mount;

/// Paths of terminals begin so; `/dev/ptmx` is the master's.
const TERMINALS: [&str; 4] = ["/dev/pts/", "/dev/ptmx", "/dev/tty", "/dev/console"];

/// Filesystems whose servers are asked when a descriptor is closed: their names begin so.
const SERVED: [&str; 13] = [
    "fuse",
    "virtiofs",
    "nfs",
    "cifs",
    "smb",
    "9p",
    "ceph",
    "afs",
    "orangefs",
    "lustre",
    "beegfs",
    "glusterfs",
    "gpfs",
];

/// Whether a filesystem has a server, which may not answer.
pub(crate) fn is_served(mount: &Mount) -> bool {
    SERVED.iter().any(|name| mount.fstype.starts_with(name))
}

/// The devices of filesystems that have servers, which may not answer: their files are not looked at.
#[derive(Debug, Default)]
pub struct Served(HashSet<String>);

impl Served {
    /// Those that are mounted in the container whose first process is `init`.
    pub fn of(init: u32) -> Self {
        let mounts = Mount::parse_all(&text(format!("/proc/{init}/mountinfo")).unwrap_or_default());
        Self(mounts.into_iter().filter(is_served).map(|mount| mount.device).collect())
    }

    /// Whether the file is on one of them. Does not ask a server.
    fn has(&self, pid: u32, descriptor: i32) -> bool {
        let path = format!("/proc/{pid}/fd/{descriptor}");
        !self.0.is_empty()
            && statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())
                .map_or(true, |file| self.0.contains(&format!("{}:{}", file.stx_dev_major, file.stx_dev_minor)))
    }
}

/// Whether a process can write to what it has open, by the mode of the link.
fn is_for_writing(pid: u32, descriptor: i32) -> bool {
    const WRITE: u32 = 0o200;
    let link = std::fs::symlink_metadata(format!("/proc/{pid}/fd/{descriptor}"));
    link.is_ok_and(|link| link.mode() & WRITE != 0)
}

/// A process whose open files are looked at, by its pids here and in the container.
#[derive(Debug)]
pub struct Process<'a> {
    /// Here.
    pub pid: u32,
    /// In the container.
    pub task: u32,
    /// Its open files.
    pub files: OpenFiles,
    /// What is mounted in its container.
    pub served: &'a Served,
}

/// What is set, with its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Value {
    /// How long data written to the file is expected to live (`F_SET_RW_HINT`).
    WriteHint(u64),
    /// How the epoll set polls network devices (`EPIOCSPARAMS`).
    EpollParameters(EpollParameters),
    /// The terminal is in exclusive mode (`TIOCEXCL`).
    Exclusive,
    /// It is the master of a pseudo-terminal whose slaves all have been closed.
    HungUp,
}

/// A setting that a new file of the kind does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSetting {
    /// A process that has the file open, by its pid in the container.
    pub task: u32,
    /// Under which number.
    pub descriptor: i32,
    value: Value,
}

/// The settings of what a process has open as `descriptor`; `link` is the target of its link in `/proc/PID/fd`. Takes up to
/// five system calls where `link` is of a kind that has settings, and no other ones. Hints are for who writes: files that are
/// open for reading alone are left out.
pub fn of(process: &Process<'_>, descriptor: i32, link: &str) -> Vec<FileSetting> {
    let &Process { pid, task, ref files, served } = process;
    let take = || files.take(descriptor).ok();
    let values = if link == "anon_inode:[eventpoll]" {
        let parameters = take().and_then(|taken| epoll_parameters(taken).ok());
        [parameters.filter(|found| *found != EpollParameters::default()).map(Value::EpollParameters), None]
    } else if TERMINALS.iter().any(|terminal| link.starts_with(terminal)) {
        let taken = take();
        let is =
            |look: fn(&OwnedFd) -> io::Result<bool>| taken.as_ref().is_some_and(|file| look(file).unwrap_or(false));
        // A slave is hung up when its master is closed.
        let is_left = is(|file| Ok(is_hung_up(file)? && is_master(file)));
        [is(|file| is_exclusive(file)).then_some(Value::Exclusive), is_left.then_some(Value::HungUp)]
    } else if link.starts_with('/') && is_for_writing(pid, descriptor) && !served.has(pid, descriptor) {
        let hint = take().and_then(|taken| write_hint(taken).ok());
        [hint.filter(|hint| *hint != 0).map(Value::WriteHint), None]
    } else {
        [None, None]
    };
    values.into_iter().flatten().map(|value| FileSetting { task, descriptor, value }).collect()
}

impl FileSetting {
    /// Sets it for the process that has this pid here.
    ///
    /// # Errors
    /// There is no such descriptor; the system's.
    pub fn set(&self, pid: u32) -> io::Result<()> {
        let file = take_descriptor(pid, self.descriptor)?;
        match self.value {
            Value::WriteHint(hint) => set_write_hint(file, hint),
            Value::EpollParameters(parameters) => set_epoll_parameters(file, &parameters),
            Value::Exclusive => set_exclusive(file),
            Value::HungUp => hang_up(file),
        }
    }

    /// Whether it is that a terminal's slaves all have been closed.
    pub fn is_hung_up(&self) -> bool {
        matches!(self.value, Value::HungUp)
    }
}

/// What is in the way of the master of a terminal whose slaves all have been closed: CRIU does not look what waits in it.
/// The container stands still: a slave is opened for that.
pub fn content(pid: u32, descriptor: i32) -> Option<Blocker> {
    let sides = take_descriptor(pid, descriptor).and_then(content_of);
    match sides {
        Ok([false, false]) => None,
        Ok([false, true]) => Some(left_input(pid, descriptor)),
        _ => Some(closed_terminal(pid, descriptor)),
    }
}

/// Of a terminal whose slaves all have been closed, and in which lines wait that no process can read.
fn left_input(pid: u32, descriptor: i32) -> Blocker {
    let what = "closed before they had read all that was written to it, which CRIU does not carry";
    of_closed_terminal((pid, descriptor), what, "let the program close the terminal")
}

/// Of a terminal whose slaves all have been closed, and in which something waits.
pub(crate) fn closed_terminal(pid: u32, descriptor: i32) -> Blocker {
    let what = "closed, and in which something waits to be read, which CRIU does not carry";
    of_closed_terminal((pid, descriptor), what, "let the program read it, and try again").passing()
}

fn of_closed_terminal((pid, descriptor): (u32, i32), what: &str, remedy: &str) -> Blocker {
    let name = tranship_sys::process::name(pid).unwrap_or_default();
    let cause = format!(
        "descriptor {descriptor} of {name} (pid {pid}) is the master of a terminal whose other side all processes have {what}"
    );
    Blocker::new(BlockerKind::Descriptor, cause, remedy).at(pid, Some(descriptor)).allowable("closed-terminals")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_hint_is_found_and_given_to_another_file() {
        let [one, other] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let pid = std::process::id();
        let mut served = Served::of(pid);
        let of = |served: &Served, file: &std::fs::File, link: &str| {
            of(&Process { pid, task: 7, files: OpenFiles::of(pid).unwrap(), served }, file.as_raw_fd(), link)
        };
        let look = |file: &std::fs::File| of(&Served::default(), file, "/tmp/file");
        assert_eq!(look(&one), []);
        set_write_hint(&one, 4).unwrap();
        let mut found = look(&one).remove(0);
        found.descriptor = other.as_raw_fd();
        found.set(pid).unwrap();
        assert_eq!(look(&other), [found]);
        assert_eq!(of(&served, &one, "pipe:[7]"), []);
        let metadata = one.metadata().unwrap();
        let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        served.0.insert(format!("{major}:{minor}"));
        assert_eq!(of(&served, &one, "/tmp/file"), []);
    }
}
