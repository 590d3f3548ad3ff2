//! Rules about who is told of what happens to files: watches and leases.

use std::cell::LazyCell;

use rustix::fs::FileType;
use rustix::io::ioctl_fionread;
use tranship_sys::descriptor::owner;
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind};

use super::Look;
use super::container::Container;
use super::files::{Descriptor, Files};
use crate::irmap::{Paths, Place, Watch};

/// Filesystems in which the kernel shows something of itself, and where they are.
const KERNEL: [(&str, &str); 4] =
    [("proc", "/proc"), ("sysfs", "/sys"), ("cgroup", "/sys/fs/cgroup"), ("cgroup2", "/sys/fs/cgroup")];

const FANOTIFY: &str = "anon_inode:[fanotify]";

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) {
    let in_memory = |d: &Descriptor<'_>| {
        let is_tmpfs = |id| container.mounts.iter().any(|m| m.id == id && m.fstype == "tmpfs");
        d.link.starts_with("/memfd:") || is_tmpfs(d.info.mount)
    };
    // Most containers watch nothing.
    let paths = LazyCell::new(|| Paths::of(container.init).ok());
    for d in &files.all {
        if d.link.starts_with("anon_inode:inotify") || d.link == FANOTIFY {
            look.passing.extend(unread(d).map(|blocker| (identity(d), blocker)));
            match of_kernel(container, d).or_else(|| of_filesystem(d)) {
                Some(blocker) => look.block(blocker),
                None => by_path(paths.as_ref(), d, look),
            }
        } else if d.kind.kind == FileType::Directory {
            directory(d).into_iter().for_each(|blocker| look.block(blocker));
        } else if in_memory(d) && has_lease_in_the_way(&d.info.text) {
            let what = format!(
                "has a write lease on {} (F_SETLEASE), or one that is being broken, which reading the file would break",
                d.link
            );
            look.block(blocker(d, &what, "have the program give it up, or keep the file where both nodes see it"));
        }
    }
}

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    d.blocker(BlockerKind::Descriptor, what, remedy)
}

fn identity(d: &Descriptor<'_>) -> u64 {
    u64::from(d.task.pid) << 32 | u64::from(d.fd.cast_unsigned())
}

/// By what a descriptor watches files.
fn system(d: &Descriptor<'_>) -> &'static str {
    if d.link == FANOTIFY { "fanotify" } else { "inotify" }
}

/// fsnotify.c, `dump_one_inotify` and `dump_one_fanotify`: "events will be dropped".
fn unread(d: &Descriptor<'_>) -> Option<Blocker> {
    let bytes = take_descriptor(d.task.pid, d.fd).ok().and_then(|taken| ioctl_fionread(&taken).ok())?;
    (bytes > 0).then(|| {
        let what = format!("has {} events that wait unread, which would be lost", system(d));
        blocker(d, &what, "have the program read them").allowable("inotify-events")
    })
}

/// fsnotify.c, `get_mark_path`: "Can't dump that handle", as files of the kernel's filesystems cannot be opened by handles.
fn of_kernel(container: &Container, d: &Descriptor<'_>) -> Option<Blocker> {
    let filesystem = |watch: Watch| {
        let device = watch.device();
        let of_kernel = container.all_mounts.iter().filter(|m| m.device == device);
        of_kernel.filter_map(|m| KERNEL.iter().find(|(kind, _)| *kind == m.fstype)).map(|(_, place)| *place).next()
    };
    Watch::all(&d.info.text).find_map(filesystem).map(|place| {
        let what = format!("watches files of {place} by {}, which CRIU does not support", system(d));
        blocker(d, &what, "let the program read them from time to time")
    })
}

/// proc_parse.c, `parse_fdinfo_pid_s`, knows marks of inodes and mounts.
fn of_filesystem(d: &Descriptor<'_>) -> Option<Blocker> {
    d.info.text.lines().any(|line| line.starts_with("fanotify sdev:")).then(|| {
        let what = "watches a whole filesystem by fanotify (FAN_MARK_FILESYSTEM), which CRIU does not carry";
        blocker(d, what, "let the program watch mounts or directories")
    })
}

/// CRIU puts a watch in place again by the path of its file: fsnotify.c, `check_open_handle`, and irmap.c, `irmap_lookup`.
fn by_path(paths: Option<&Paths>, d: &Descriptor<'_>, look: &mut Look) {
    let Some(paths) = paths else { return };
    if Watch::all(&d.info.text).any(|watch| paths.are_wanted(&watch)) {
        look.findings.watchers.push((d.task.pid, d.fd));
    }
    let watches: Vec<Watch> =
        Watch::all(&d.info.text).filter(|watch| paths.are_known(watch) || paths.are_wanted(watch)).collect();
    let by = system(d);
    let what = paths.find(&watches).into_iter().find_map(|place| match place {
        None => Some(format!("watches a file by {by} whose path is not found, which CRIU needs")),
        // The path is followed: the watch would be one of another file.
        Some(Place { path, kind: FileType::Symlink }) => {
            Some(format!("watches the symbolic link {} by {by}, which CRIU does not support", path.display()))
        }
        // The file is made anew when its socket is bound.
        Some(Place { path, kind: FileType::Socket }) => {
            Some(format!("watches the file {} of a Unix socket by {by}, which CRIU does not support", path.display()))
        }
        Some(_) => None,
    });
    if let Some(what) = what {
        look.wait(identity(d), blocker(d, &what, "let the program watch files and directories that have a name"));
    }
}

/// CRIU knows nothing of `F_NOTIFY`; the kernel does not show it, but for the owner of the descriptor, who is sent the signals.
fn directory(d: &Descriptor<'_>) -> Option<Blocker> {
    let taken = take_descriptor(d.task.pid, d.fd).ok()?;
    owner(&taken).ok().filter(|owner| *owner != 0).map(|_| {
        let what = format!("asks for signals about the directory {} (F_NOTIFY), which would be lost", d.link);
        blocker(d, &what, "let the program use inotify").allowable("directory-signals")
    })
}

/// Of the locks in `/proc/PID/fdinfo/FD`, such as `lock: 1: LEASE  ACTIVE    WRITE 31962 00:27:3 0 EOF`.
pub(super) fn has_lease_in_the_way(info: &str) -> bool {
    info.lines().filter_map(|line| line.strip_prefix("lock:")).any(|lock| {
        let words: Vec<&str> = lock.split_whitespace().collect();
        // One that is being broken is shown as what it becomes.
        words.get(1) == Some(&"LEASE") && (words.get(3) == Some(&"WRITE") || words.get(2) == Some(&"BREAKING"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_leases_are_told_from_other_locks() {
        assert!(has_lease_in_the_way("pos:\t0\nlock:\t1: LEASE  ACTIVE    WRITE 31962 00:27:3 0 EOF\n"));
        assert!(has_lease_in_the_way("pos:\t0\nlock:\t1: LEASE  BREAKING  READ 31962 00:27:3 0 EOF\n"));
        assert!(!has_lease_in_the_way("pos:\t0\nlock:\t1: LEASE  ACTIVE    READ 31962 00:27:3 0 EOF\n"));
        assert!(!has_lease_in_the_way("lock:\t1: FLOCK  ADVISORY  WRITE 31885 fe:00:56 0 EOF\n"));
    }
}
