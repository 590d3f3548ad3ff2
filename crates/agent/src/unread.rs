//! inotify events that wait unread: CRIU drops them (fsnotify.c, `dump_one_inotify`).

use tranship_engine::Container;
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind};

/// The kind that `--allow` names.
pub const KIND: &str = "inotify-events";

/// The inotify descriptors of a container, as they are at one moment.
#[derive(Debug, Default)]
pub struct Queues(Vec<(u32, i32)>);

impl Queues {
    /// Those of all its processes. Takes a microsecond for each descriptor.
    pub fn of(container: &Container) -> Self {
        let mut found = Vec::new();
        for pid in container.processes().unwrap_or_default() {
            let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            let is_queue = |link: std::path::PathBuf| link.as_os_str() == "anon_inode:inotify";
            let queues = entries.filter(|entry| entry.path().read_link().is_ok_and(is_queue));
            found.extend(queues.filter_map(|entry| Some((pid, entry.file_name().to_str()?.parse().ok()?))));
        }
        Self(found)
    }

    /// The first with events that wait unread; nothing is taken from it.
    pub fn unread(&self) -> Option<Blocker> {
        let waits = |(pid, fd): &&(u32, i32)| {
            let taken = take_descriptor(*pid, *fd);
            taken.is_ok_and(|taken| rustix::io::ioctl_fionread(&taken).is_ok_and(|bytes| bytes > 0))
        };
        let (pid, fd) = *self.0.iter().find(waits)?;
        let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let comm = String::from_utf8_lossy(&comm).trim().to_owned();
        let cause = format!(
            "descriptor {fd} of process {pid} ({comm}) has inotify events that wait unread, which would be lost"
        );
        let blocker = Blocker::new(BlockerKind::Descriptor, cause, "try again when the program has read them");
        Some(blocker.at(pid, Some(fd)).allowable(KIND))
    }
}
