//! Flags of inotify watches: CRIU makes watches anew with their events alone (fsnotify.c, `restore_one_inotify`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use nix::libc::{IN_ALL_EVENTS, IN_EXCL_UNLINK, IN_ONESHOT};
use serde::{Deserialize, Serialize};
use tranship_sys::file_settings;
use tranship_sys::process::{take_descriptor, text};

use crate::irmap::{Paths, Watch, with_directory};

/// The kernel keeps these with a watch, and shows them since Linux 5.19.
const FLAGS: u32 = IN_EXCL_UNLINK | IN_ONESHOT;

/// A watch with flags.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlaggedWatch {
    /// A process that has the inotify descriptor, by its pid in the container.
    pub task: u32,
    /// Under which number.
    pub descriptor: i32,
    /// The watch's own number.
    watch: i32,
    /// Its events and flags.
    mask: u32,
}

/// Those of an inotify descriptor of a process, which is given by its pids here and in the container.
pub fn of(pid: u32, task: u32, descriptor: i32) -> Vec<FlaggedWatch> {
    let info = text(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flagged = Watch::all(&info).filter(|watch| watch.number >= 0 && watch.mask & FLAGS != 0);
    let watch = |Watch { number, mask, .. }| FlaggedWatch {
        task,
        descriptor,
        watch: number,
        mask: mask & (FLAGS | IN_ALL_EVENTS),
    };
    flagged.map(watch).collect()
}

/// Gives the watches of a restored container, whose first process is `init`, their flags; `tasks` has the processes' pids here by those in the
/// container.
///
/// # Errors
/// A descriptor, a watch or the file that it watches is not there; the system's.
pub fn set(watches: &[FlaggedWatch], init: u32, tasks: &HashMap<u32, u32>) -> io::Result<()> {
    if watches.is_empty() {
        return Ok(());
    }
    let paths = Paths::of(init)?;
    with_directory(|| {
        // One after the other those of a descriptor, in which there may be thousands.
        watches.chunk_by(|a, b| (a.task, a.descriptor) == (b.task, b.descriptor)).try_for_each(|of_descriptor| {
            let FlaggedWatch { task, descriptor, .. } = of_descriptor[0];
            let told =
                |error: io::Error| io::Error::other(format!("descriptor {descriptor} of process {task}: {error}"));
            let pid = *tasks.get(&task).ok_or_else(|| told(missing("process")))?;
            let info = text(format!("/proc/{pid}/fdinfo/{descriptor}")).map_err(told)?;
            let restored: HashMap<i32, Watch> = Watch::all(&info).map(|watch| (watch.number, watch)).collect();
            let inotify = take_descriptor(pid, descriptor).map_err(told)?;
            of_descriptor.iter().try_for_each(|flagged| {
                flagged
                    .set(&paths, &restored, inotify.as_fd())
                    .map_err(|error| told(io::Error::other(format!("watch {}: {error}", flagged.watch))))
            })
        })
    })?
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("there is no such {what}"))
}

impl FlaggedWatch {
    fn set(&self, paths: &Paths, restored: &HashMap<i32, Watch>, inotify: BorrowedFd<'_>) -> io::Result<()> {
        let watch = restored.get(&self.watch).ok_or_else(|| missing("watch"))?;
        let file = paths.open(watch).ok_or_else(|| missing("file"))?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // A watch of another file would be a new one.
        match file_settings::watch(inotify, Path::new(&path), self.mask)? {
            number if number == self.watch => Ok(()),
            _ => Err(io::Error::other("another file is in the place of the watched one")),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::libc::IN_CREATE;
    use nix::sys::inotify::{InitFlags, Inotify};

    use super::*;

    #[test]
    fn a_watch_gets_its_flags_again() {
        let directory = tempfile::tempdir().unwrap();
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
        let mask = IN_CREATE | IN_EXCL_UNLINK | IN_ONESHOT;
        file_settings::watch(inotify.as_fd(), directory.path(), mask).unwrap();
        let (pid, descriptor) = (std::process::id(), inotify.as_fd().as_raw_fd());
        let found = of(pid, 7, descriptor);
        if found.is_empty() {
            println!("skipped: this kernel does not show flags of watches");
            return;
        }
        assert_eq!(found, [FlaggedWatch { task: 7, descriptor, watch: 1, mask }]);
        file_settings::watch(inotify.as_fd(), directory.path(), IN_CREATE).unwrap();
        assert_eq!(of(pid, 7, descriptor), []);
        set(&found, pid, &HashMap::from([(7, pid)])).unwrap();
        assert_eq!(of(pid, 7, descriptor), found);
        std::fs::write(directory.path().join("one"), "").unwrap();
        std::fs::write(directory.path().join("two"), "").unwrap();
        let names: Vec<_> = inotify.read_events().unwrap().into_iter().filter_map(|event| event.name).collect();
        assert_eq!(names, ["one"]);
    }
}
