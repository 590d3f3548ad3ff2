//! Rules about who is told of what happens to files: watches and leases.

use rustix::fs::FileType;
use rustix::io::ioctl_fionread;
use tranship_sys::descriptor::owner;
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind};

use super::Look;
use super::container::Container;
use super::files::{Descriptor, Files};

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) {
    let in_memory = |d: &Descriptor<'_>| {
        let is_tmpfs = |id| container.mounts.iter().any(|m| m.id == id && m.fstype == "tmpfs");
        d.link.starts_with("/memfd:") || is_tmpfs(d.info.mount)
    };
    for d in &files.all {
        if d.link.starts_with("anon_inode:inotify") {
            look.passing.extend(unread(d).map(|blocker| (identity(d), blocker)));
            look.findings.blockers.extend(of_processes(container, d));
        } else if d.kind.kind == FileType::Directory {
            directory(d).into_iter().for_each(|blocker| look.block(blocker));
        } else if in_memory(d) && has_write_lease(&d.info.text) {
            let what = format!("has a write lease on {} (F_SETLEASE), which reading the file would break", d.link);
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

/// fsnotify.c, `dump_one_inotify`: "events will be dropped".
fn unread(d: &Descriptor<'_>) -> Option<Blocker> {
    let bytes = take_descriptor(d.task.pid, d.fd).ok().and_then(|taken| ioctl_fionread(&taken).ok())?;
    (bytes > 0).then(|| {
        let what = "has inotify events that wait unread, which would be lost";
        blocker(d, what, "have the program read them").allowable("inotify-events")
    })
}

/// fsnotify.c, `get_mark_path`: "Can't dump that handle", as files of /proc cannot be opened by handles.
fn of_processes(container: &Container, d: &Descriptor<'_>) -> Option<Blocker> {
    let is_proc = |device: &str| container.all_mounts.iter().any(|m| m.fstype == "proc" && m.device == device);
    watched_devices(&d.info.text).any(|device| is_proc(&device)).then(|| {
        let what = "watches files of /proc by inotify, which CRIU does not support";
        blocker(d, what, "let the program read them from time to time")
    })
}

/// Devices, as `MAJOR:MINOR`, of what an inotify watches, from lines such as `inotify wd:1 ino:9 sdev:a7 mask:100 …`.
fn watched_devices(info: &str) -> impl Iterator<Item = String> {
    info.lines().filter_map(|line| {
        let device = line.strip_prefix("inotify ")?.split(' ').find_map(|word| word.strip_prefix("sdev:"))?;
        let device = u32::from_str_radix(device, 16).ok()?;
        Some(format!("{}:{}", device >> 20, device & 0xf_ffff))
    })
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
fn has_write_lease(info: &str) -> bool {
    info.lines().filter_map(|line| line.strip_prefix("lock:")).any(|lock| {
        let words: Vec<&str> = lock.split_whitespace().collect();
        words.get(1) == Some(&"LEASE") && words.get(3) == Some(&"WRITE")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_are_watched_are_read_from_the_kernel_s_lines() {
        let info = "pos:\t0\ninotify wd:2 ino:9 sdev:a7 mask:100 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:09\n\
                    inotify wd:1 ino:1 sdev:800001 mask:100 ignored_mask:0\n";
        assert_eq!(watched_devices(info).collect::<Vec<_>>(), ["0:167", "8:1"]);
    }

    #[test]
    fn write_leases_are_told_from_other_locks() {
        assert!(has_write_lease("pos:\t0\nlock:\t1: LEASE  ACTIVE    WRITE 31962 00:27:3 0 EOF\n"));
        assert!(!has_write_lease("pos:\t0\nlock:\t1: LEASE  ACTIVE    READ 31962 00:27:3 0 EOF\n"));
        assert!(!has_write_lease("lock:\t1: FLOCK  ADVISORY  WRITE 31885 fe:00:56 0 EOF\n"));
    }
}
