//! The root of a tree in a private clone of its mount. What is opened through it is opened without an event for anybody.
//!
//! Whoever watches a file or directory with inotify(7), fanotify(7) or `F_NOTIFY` learns of every open, read and close, and a survey of a
//! container's files would be full of them. The kernel raises no event for a descriptor that it opens for a fanotify group itself. So a group
//! of ours asks for permission events of the clone, which nobody else has, and denies each open: the open fails before it raises an event, and the
//! descriptor that came with the question stays.
//!
//! It is an open all the same: it breaks a write lease, and a write lease cannot be taken meanwhile. See [`crate::leases`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::fanotify::{EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response};
use rustix::fs::OFlags;
use rustix::mount::{OpenTreeFlags, open_tree};

use crate::copy::open_beneath;

/// Longest wait for a descriptor that the group has been sent already.
const DELIVERY: Duration = Duration::from_secs(5);

/// The root of a tree, on which nothing else is mounted.
#[derive(Debug)]
pub struct Root {
    /// Holds the clone; of one, `O_PATH`.
    clone: OwnedFd,
    /// `None` where the kernel has no permission events.
    silent: Option<Silent>,
}

impl Root {
    /// Clones the mount that `directory` is on, with `directory` as its root.
    ///
    /// # Errors
    /// The system's: mounts of other mount namespaces cannot be cloned.
    pub fn clone_of(directory: impl AsFd) -> rustix::io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let clone = open_tree(directory, "", flags)?;
        // Without the times of reading, of symbolic links neither.
        if let Err(error) = tranship_sys::mount::forbid_atime(clone.as_fd()) {
            tracing::debug!(%error, "a clone of a mount keeps the times of reading");
        }
        let silent = Silent::start(&clone).inspect_err(|error| {
            tracing::info!(%error, "this kernel cannot open files without an event for whoever watches them");
        });
        Ok(Self { clone, silent: silent.ok() })
    }

    /// The root of a copy, which nobody watches.
    pub(crate) fn of_copy(directory: OwnedFd) -> Self {
        Self { clone: directory, silent: None }
    }

    /// Opens a file or directory below for reading, by its path from the root on.
    pub(crate) fn open(&self, path: impl rustix::path::Arg, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        self.open_in(&self.clone, path, flags)
    }

    /// Opens a file or directory below for reading, by its path from a directory of the clone on.
    pub(crate) fn open_in(
        &self,
        directory: impl AsFd,
        path: impl rustix::path::Arg,
        flags: OFlags,
    ) -> rustix::io::Result<OwnedFd> {
        let open = || open_beneath(directory, path, flags | OFlags::RDONLY | OFlags::NOATIME);
        match &self.silent {
            Some(silent) => silent.open(open),
            None => open(),
        }
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.clone.as_fd()
    }
}

/// Opens files of one mount without an event.
#[derive(Debug)]
struct Silent {
    opened: Mutex<Receiver<nix::Result<OwnedFd>>>,
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Silent {
    fn start(clone: &OwnedFd) -> nix::Result<Self> {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_NONBLOCK | InitFlags::FAN_CLOEXEC;
        let opened = EventFFlags::O_RDONLY
            | EventFFlags::O_LARGEFILE
            | EventFFlags::O_NOATIME
            | EventFFlags::O_NONBLOCK
            | EventFFlags::O_CLOEXEC;
        let group = Fanotify::init(flags, opened)?;
        let mark = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT;
        group.mark(mark, MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ONDIR, clone, Some("."))?;
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name("silent open".into())
            .spawn(move || answer(&group, &stopped, &sender))
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))?;
        Ok(Self { opened: Mutex::new(receiver), stop: Some(stop), thread: Some(thread) })
    }

    /// What `open` asks the kernel for.
    fn open(&self, open: impl FnOnce() -> rustix::io::Result<OwnedFd>) -> rustix::io::Result<OwnedFd> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        while opened.try_recv().is_ok() {}
        match open() {
            // Denied by the group, which has sent the descriptor before.
            Err(rustix::io::Errno::PERM) => match opened.recv_timeout(DELIVERY) {
                Ok(Ok(descriptor)) => Ok(descriptor),
                Ok(Err(error)) => Err(rustix::io::Errno::from_raw_os_error(error as i32)),
                Err(_) => Err(rustix::io::Errno::PERM),
            },
            other => other,
        }
    }
}

/// Denies every open, until the other end of `stopped` is closed. The kernel allows what is open when the group ends.
fn answer(group: &Fanotify, stopped: &OwnedFd, sender: &Sender<nix::Result<OwnedFd>>) {
    loop {
        let mut fds = [group.as_fd(), stopped.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(_) => return,
            Ok(_) if fds[1].any() != Some(false) => return,
            Ok(_) => {}
        }
        match group.read_events() {
            Ok(events) => {
                for fd in events.iter().filter_map(nix::sys::fanotify::FanotifyEvent::fd) {
                    let copy = fd.try_clone_to_owned();
                    let _ = sender.send(copy.map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or_default())));
                    let _ = group.write_response(FanotifyResponse::new(fd, Response::FAN_DENY));
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // The kernel has denied the open.
            Err(error) => drop(sender.send(Err(error))),
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
