//! Queues of inotify(7) and fanotify(7) events.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::fanotify::Fanotify;
use nix::sys::inotify::Inotify;

/// Which kind of queue a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// Of inotify.
    Inotify,
    /// Of fanotify.
    Fanotify,
}

impl QueueKind {
    /// The kind of a descriptor with this link in `/proc/PID/fd`; `None` of what is no such queue.
    #[must_use]
    pub fn of(link: &str) -> Option<Self> {
        match link {
            "anon_inode:inotify" => Some(Self::Inotify),
            "anon_inode:[fanotify]" => Some(Self::Fanotify),
            _ => None,
        }
    }
}

/// Takes all events from a queue, and closes the files that come with them. Never waits.
///
/// # Errors
/// The system's.
pub fn empty(queue: OwnedFd, kind: QueueKind) -> io::Result<()> {
    match kind {
        QueueKind::Inotify => {
            // SAFETY: the descriptor is an inotify queue, which the caller has looked up.
            let queue = unsafe { Inotify::from_owned_fd(queue) };
            while rustix::io::ioctl_fionread(&queue)? > 0 {
                queue.read_events()?;
            }
        }
        QueueKind::Fanotify => {
            // SAFETY: the descriptor is a fanotify queue, which the caller has looked up.
            let queue = unsafe { Fanotify::from_owned_fd(queue) };
            while rustix::io::ioctl_fionread(&queue)? > 0 {
                queue.read_events()?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sys::fanotify::{EventFFlags, InitFlags as FanotifyFlags, MarkFlags, MaskFlags};
    use nix::sys::inotify::{AddWatchFlags, InitFlags};
    use rustix::io::ioctl_fionread;

    use super::*;

    #[test]
    fn no_event_stays_in_a_queue_and_later_ones_come() {
        let directory = tempfile::tempdir().unwrap();
        let inotify = Inotify::init(InitFlags::empty()).unwrap();
        inotify.add_watch(directory.path(), AddWatchFlags::IN_ALL_EVENTS).unwrap();
        // More than are read at once.
        (0..500).for_each(|n| std::fs::write(directory.path().join(n.to_string()), "x").unwrap());
        let other: OwnedFd = std::os::fd::AsFd::as_fd(&inotify).try_clone_to_owned().unwrap();
        assert!(ioctl_fionread(&inotify).unwrap() > 4096);
        empty(other.try_clone().unwrap(), QueueKind::Inotify).unwrap();
        assert_eq!(ioctl_fionread(&inotify).unwrap(), 0);
        empty(other, QueueKind::Inotify).unwrap();
        std::fs::remove_file(directory.path().join("7")).unwrap();
        assert_eq!(inotify.read_events().unwrap().len(), 1);
    }

    #[test]
    fn files_that_come_with_events_are_closed() {
        let directory = tempfile::tempdir().unwrap();
        let Ok(group) = Fanotify::init(FanotifyFlags::FAN_CLASS_NOTIF, EventFFlags::O_RDONLY) else {
            println!("skipped: this machine does not have fanotify");
            return;
        };
        let mask = MaskFlags::FAN_OPEN | MaskFlags::FAN_EVENT_ON_CHILD;
        group.mark(MarkFlags::FAN_MARK_ADD, mask, nix::fcntl::AT_FDCWD, Some(directory.path())).unwrap();
        std::fs::write(directory.path().join("one"), "x").unwrap();
        let queue: OwnedFd = std::os::fd::AsFd::as_fd(&group).try_clone_to_owned().unwrap();
        assert!(ioctl_fionread(&queue).unwrap() > 0);
        empty(queue.try_clone().unwrap(), QueueKind::Fanotify).unwrap();
        assert_eq!(ioctl_fionread(&queue).unwrap(), 0);
        let is_of_file = |entry: std::fs::DirEntry| {
            std::fs::read_link(entry.path()).is_ok_and(|link| link == directory.path().join("one"))
        };
        assert!(!std::fs::read_dir("/proc/self/fd").unwrap().flatten().any(is_of_file));
    }
}
