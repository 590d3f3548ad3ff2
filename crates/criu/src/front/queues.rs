//! Events of the restore itself in queues of inotify and fanotify. CRIU makes watches anew with the descriptors, and removes the names that it gave to
//! removed files after that, when it is told to let the tasks go: whoever watches a directory in which such a file was would be told of it. What waited
//! unread at the source CRIU has not carried, so that all events in a queue are of the restore.

use std::io;
use std::path::{Path, PathBuf};

use tranship_sys::process::take_descriptor;
use tranship_sys::watch_queue::{QueueKind, empty};

/// The file beside a restore front's socket that names the queues which the front empties right before the tasks run.
pub fn queues_note(socket: &Path) -> PathBuf {
    socket.with_extension("queues")
}

/// Has the front with this socket empty queues: each a process and the number of its descriptor.
///
/// # Errors
/// The file cannot be written.
pub fn note_queues(socket: &Path, queues: &[(u32, i32)]) -> io::Result<()> {
    if queues.is_empty() {
        return Ok(());
    }
    let lines: String = queues.iter().map(|(pid, descriptor)| format!("{pid} {descriptor}\n")).collect();
    std::fs::write(queues_note(socket), lines)
}

/// Empties the queues that the agent has noted. Nothing can be done here about one that cannot be emptied; it is told in the front's log.
pub(super) fn empty_queues(socket: &Path) {
    let Ok(lines) = std::fs::read_to_string(queues_note(socket)) else { return };
    let queue = |line: &str| {
        let (pid, descriptor) = line.split_once(' ')?;
        Some((pid.parse().ok()?, descriptor.parse().ok()?))
    };
    for (pid, descriptor) in lines.lines().filter_map(queue) {
        if let Err(error) = empty_queue(pid, descriptor) {
            eprintln!("descriptor {descriptor} of process {pid} may report events of the restore: {error}");
        }
    }
}

fn empty_queue(pid: u32, descriptor: i32) -> io::Result<()> {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{descriptor}"))?;
    let kind = link.to_str().and_then(QueueKind::of);
    let kind = kind.ok_or_else(|| io::Error::other("it is no queue of inotify or fanotify"))?;
    empty(take_descriptor(pid, descriptor)?, kind)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    use super::*;

    #[test]
    fn noted_queues_are_emptied_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("front");
        let watched = directory.path().join("watched");
        std::fs::create_dir(&watched).unwrap();
        let queue = || {
            let queue = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
            queue.add_watch(&watched, AddWatchFlags::IN_CREATE).unwrap();
            queue
        };
        let (noted, other) = (queue(), queue());
        std::fs::write(watched.join("ghost"), "").unwrap();
        empty_queues(&socket);
        let number = |queue: &Inotify| std::os::fd::AsFd::as_fd(queue).as_raw_fd();
        note_queues(&socket, &[(1, 4711), (std::process::id(), number(&noted))]).unwrap();
        empty_queues(&socket);
        assert!(noted.read_events().is_err());
        assert_eq!(other.read_events().unwrap().len(), 1);
    }
}
