//! Settings of open files, epoll sets and terminals that CRIU does not carry.

use std::io;

use serde::{Deserialize, Serialize};
use tranship_sys::file_settings::{
    EpollParameters, epoll_parameters, is_exclusive, set_epoll_parameters, set_exclusive, set_write_hint, write_hint,
};
use tranship_sys::process::{OpenFiles, take_descriptor};

/// Paths of terminals begin so; `/dev/ptmx` is the master's.
const TERMINALS: [&str; 4] = ["/dev/pts/", "/dev/ptmx", "/dev/tty", "/dev/console"];

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

/// The setting of what process `task` (its pid in the container) has open as `descriptor`; `link` is the target of its link in
/// `/proc/PID/fd`. Takes three system calls where `link` is of a kind that has settings, and no other ones.
pub fn of(files: &OpenFiles, task: u32, descriptor: i32, link: &str) -> Option<FileSetting> {
    let taken = || files.take(descriptor).ok();
    let value = if link == "anon_inode:[eventpoll]" {
        let parameters = epoll_parameters(taken()?).ok()?;
        (parameters != EpollParameters::default()).then_some(Value::EpollParameters(parameters))
    } else if TERMINALS.iter().any(|terminal| link.starts_with(terminal)) {
        is_exclusive(taken()?).ok()?.then_some(Value::Exclusive)
    } else if link.starts_with('/') {
        let hint = write_hint(taken()?).ok()?;
        (hint != 0).then_some(Value::WriteHint(hint))
    } else {
        None
    };
    Some(FileSetting { task, descriptor, value: value? })
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
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_hint_is_found_and_given_to_another_file() {
        let [one, other] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let pid = std::process::id();
        let files = OpenFiles::of(pid).unwrap();
        let look = |file: &std::fs::File| of(&files, 7, file.as_raw_fd(), "/tmp/file");
        assert_eq!(look(&one), None);
        set_write_hint(&one, 4).unwrap();
        let mut found = look(&one).unwrap();
        found.descriptor = other.as_raw_fd();
        found.set(pid).unwrap();
        assert_eq!(look(&other), Some(found));
        assert_eq!(of(&files, 7, one.as_raw_fd(), "pipe:[7]"), None);
    }
}
