//! inotify and fanotify events that wait unread: CRIU drops them (fsnotify.c, `dump_one_inotify`, `dump_one_fanotify`).

use std::fs::DirEntry;

use tranship_engine::Container;
use tranship_sys::process::{self, take_descriptor};
use tranship_sys::watch_queue::QueueKind;
use tranship_types::{Blocker, BlockerKind};

/// The kind that `--allow` names.
pub const KIND: &str = "inotify-events";

/// Whether a link in `/proc/PID/fd` stands for an inotify or fanotify descriptor.
pub fn is_queue(target: &str) -> bool {
    QueueKind::of(target).is_some()
}

/// The inotify and fanotify descriptors of a container, or of several, as they are at one moment.
#[derive(Debug, Default)]
pub struct Queues(Vec<(u32, i32)>);

impl Queues {
    /// Those of all processes of these containers. Takes a microsecond for each descriptor.
    pub fn of<'a>(containers: impl IntoIterator<Item = &'a Container>) -> Self {
        let mut found = Vec::new();
        for pid in containers.into_iter().flat_map(|container| container.processes().unwrap_or_default()) {
            let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            let is_queue =
                |entry: &DirEntry| entry.path().read_link().is_ok_and(|link| link.to_str().is_some_and(is_queue));
            let queues = entries.filter(is_queue);
            found.extend(queues.filter_map(|entry| Some((pid, entry.file_name().to_str()?.parse().ok()?))));
        }
        Self(found)
    }

    /// One more, of this process.
    pub fn add(&mut self, pid: u32, descriptor: i32) {
        self.0.push((pid, descriptor));
    }

    /// The first with events that wait unread; nothing is taken from it.
    pub fn unread(&self) -> Option<Blocker> {
        let waits = |(pid, fd): &&(u32, i32)| {
            let taken = take_descriptor(*pid, *fd);
            taken.is_ok_and(|taken| rustix::io::ioctl_fionread(&taken).is_ok_and(|bytes| bytes > 0))
        };
        let (pid, fd) = *self.0.iter().find(waits)?;
        let name = process::name(pid).unwrap_or_default();
        let cause = format!(
            "descriptor {fd} of process {pid} ({name}) has inotify or fanotify events that wait unread, which would be lost"
        );
        let blocker = Blocker::new(BlockerKind::Descriptor, cause, "try again when the program has read them");
        Some(blocker.at(pid, Some(fd)).allowable(KIND))
    }
}
