//! Rules about mounts (CRIU: mount.c, `validate_mounts` and `resolve_shared_mounts`).

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{statfs, statvfs};
use tranship_types::{Blocker, BlockerKind};

use super::container::Container;
use super::procfs::{Mount, inside};
use super::{Look, Subject};

/// Filesystems of which CRIU can make a new instance (filesystems.c). It lists `btrfs` and `fuse` too, but the one only
/// for comparing devices, and the other always fails; an `overlay` is mounted before its directories are there; `autofs` needs its daemon inside, with nothing in its pipe.
const KNOWN: [&str; 16] = [
    "proc",
    "sysfs",
    "devtmpfs",
    "binfmt_misc",
    "tmpfs",
    "devpts",
    "simfs",
    "pstore",
    "mqueue",
    "securityfs",
    "fusectl",
    "debugfs",
    "tracefs",
    "cgroup",
    "cgroup2",
    "aufs",
];

fn mount(point: &str, what: &str, remedy: impl Into<String>) -> Blocker {
    Blocker::new(BlockerKind::Mount, format!("the mount at {point} {what}"), remedy)
}

pub(super) fn check(container: &Container, subject: &Subject, look: &mut Look) {
    let mounts = &container.mounts;
    for blocker in unsupported(&container.all_mounts, &subject.external_mounts) {
        look.block(blocker);
    }
    for m in container.all_mounts.iter().filter(|m| !external(m, mounts, &subject.external_mounts)) {
        if let Some(path) = replaced(container, m) {
            let what = format!("shows the file that was {path}, where another one is now");
            look.block(mount(&m.point, &what, "unmount it, or remove what has taken its place"));
        } else if let Some(what) = unlike(container, m) {
            look.block(mount(&m.point, &what, "unmount it"));
        }
        if let Some(option) = lost_option(m).filter(|_| !is_root(m, &container.all_mounts)) {
            // systemd makes such mounts for the credentials of units; nobody can put a symbolic link there.
            if option == "nosymfollow" && m.options.split(',').any(|option| option == "ro") {
                look.change(format!("the mount at {} loses the option nosymfollow", m.point));
                continue;
            }
            let what = format!("has the option {option}, which CRIU does not carry");
            look.block(mount(&m.point, &what, "mount it without the option").allowable("mount-options"));
        }
    }
    // That of the root stays: the destination has one.
    let mut counted: HashSet<&String> = mounts.iter().filter(|m| is_root(m, mounts)).map(|m| &m.device).collect();
    for m in mounts.iter().filter(|m| !container.covered.contains(&m.id)) {
        let path = inside(container.init, &m.place);
        match m.fstype.as_str() {
            "tmpfs" if !external(m, mounts, &subject.external_mounts) && counted.insert(&m.device) => {
                look.findings.tmpfs_bytes += used(&path);
            }
            // filesystems.c, `dump_empty_fs`.
            "mqueue" if has_message_queues(&path) => look.block_once(
                0,
                "mqueue",
                mount(
                    &m.point,
                    "holds POSIX message queues, which CRIU does not support",
                    "remove them (mq_unlink), or use another means of communication",
                ),
            ),
            _ => {}
        }
    }
}

/// A single file that a mount of the container's own shows, and would not show after a restore: one that was removed is made anew without
/// content (mount-v2.c), and a socket is made by another name (sk-unix.c).
fn unlike(container: &Container, m: &Mount) -> Option<String> {
    // Mounts of other namespaces are not at their place here.
    if m.root == "/" || container.covered.contains(&m.id) || container.mounts.iter().all(|own| own.id != m.id) {
        return None;
    }
    let file = inside(container.init, &m.place).symlink_metadata().ok()?;
    if file.file_type().is_socket() {
        return Some(format!("shows the Unix socket {}, which CRIU does not support", m.root));
    }
    let removed = m.root.strip_suffix("//deleted").filter(|_| file.is_file() && file.len() > 0)?;
    Some(format!("shows the file {removed}, which was removed, and CRIU drops what is in it"))
}

/// An option of a mount that CRIU drops (mount.c, `mnt_opt2flag` of proc_parse.c).
fn lost_option(m: &Mount) -> Option<&str> {
    m.options.split(',').find(|option| matches!(*option, "nosymfollow" | "idmapped"))
}

/// The filesystem of POSIX message queues (`MQUEUE_MAGIC` of the kernel's ipc/mqueue.c).
pub(super) const MQUEUE_MAGIC: u64 = 0x1980_0202;

/// Whether a path is on a filesystem of this kind, by its magic number.
pub(super) fn is_of(path: impl AsRef<Path>, magic: u64) -> bool {
    statfs(path.as_ref()).is_ok_and(|s| u64::try_from(s.f_type) == Ok(magic))
}

/// Whether there are POSIX message queues in a filesystem of them. Its root is larger for each (ipc/mqueue.c); to read it would be noticed by
/// who watches it.
pub fn has_message_queues(root: &Path) -> bool {
    const EMPTY: u64 = 40;
    is_of(root, MQUEUE_MAGIC) && fs::symlink_metadata(root).is_ok_and(|is| is.len() > EMPTY)
}

/// The path of the removed file that a mount shows, if there is another one now (mount-v2.c, `restore_one_sharing`).
fn replaced(container: &Container, m: &Mount) -> Option<String> {
    let path = m.root.strip_suffix("//deleted")?;
    let whole = container.mounts.iter().find(|t| t.device == m.device && t.root == "/")?;
    let place = inside(container.init, &whole.place.join(path.trim_start_matches('/')));
    place.symlink_metadata().is_ok().then(|| format!("{}{path}", whole.point))
}

/// Bytes in use in the tmpfs at `path`; 0 if it is something else by now.
fn used(path: &Path) -> u64 {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    if is_of(path, TMPFS_MAGIC) {
        return statvfs(path).map_or(0, |s| (s.f_blocks - s.f_bfree) * s.f_frsize);
    }
    0
}

fn is_root(m: &Mount, mounts: &[Mount]) -> bool {
    mounts.iter().all(|p| p.id != m.parent)
}

fn is_sub_path(path: &str, of: &str) -> bool {
    Path::new(path).starts_with(of)
}

/// External itself, or a part of what an external mount shows (`mnt_is_external_bind`).
fn external(m: &Mount, mounts: &[Mount], points: &[impl AsRef<Path>]) -> bool {
    let listed = |m: &Mount| points.iter().any(|p| p.as_ref() == Path::new(&m.point));
    mounts.iter().any(|e| e.device == m.device && is_sub_path(&m.root, &e.root) && listed(e))
}

/// Pure part: mounts that CRIU can neither make nor find.
fn unsupported(mounts: &[Mount], points: &[impl AsRef<Path>]) -> Vec<Blocker> {
    let mut blockers = Vec::new();
    for m in mounts {
        let twin = mounts.iter().find(|t| t.id < m.id && t.parent == m.parent && t.point == m.point);
        if twin.is_some() {
            // Impossible since Linux 4.11, except by propagation into an older tree.
            let what = "exists twice, one beside the other";
            blockers.push(mount(&m.point, what, format!("unmount {} once inside the container", m.point)));
            continue;
        }
        // proc_parse.c, `cure_path`, knows spaces, tabs and backslashes only.
        if m.point.contains('\n') || m.root.contains('\n') {
            let what = "has a line feed in its path, which CRIU does not understand";
            blockers.push(mount(&m.point, what, "mount it at another path"));
            continue;
        }
        let of_root =
            mounts.iter().any(|r| is_root(r, mounts) && r.device == m.device && is_sub_path(&m.root, &r.root));
        // The engine tells CRIU of cgroup mounts in its own way.
        if of_root || external(m, mounts, points) || m.fstype.starts_with("cgroup") {
            continue;
        }
        // mount-v2.c: neither a process nor the directories of an overlay are there when mounts are restored.
        let process = m.root.trim_start_matches('/').split('/').next().filter(|name| name.parse::<u32>().is_ok());
        if m.fstype == "proc" && process.is_some_and(|pid| pid != "1") {
            let what = format!("shows {} of /proc, which is that of a process", m.root);
            blockers.push(mount(&m.point, &what, "unmount it"));
            continue;
        }
        if let Some(master) = m.master {
            let inside = mounts.iter().any(|t| t.id != m.id && t.shared == Some(master));
            if !inside {
                let what =
                    "receives mounts from outside of the container (it is a slave of a shared mount of the host)";
                let remedy = "make it private (mount --make-private), or give it to the engine as a bind mount";
                blockers.push(mount(&m.point, what, remedy));
                continue;
            }
        }
        if m.root == "/" {
            if !KNOWN.contains(&m.fstype.as_str()) {
                let what = format!("is a {} filesystem that was mounted inside the container", m.fstype);
                let remedy = "unmount it, or mount it on the host and give it to the engine as a bind mount";
                blockers.push(mount(&m.point, &what, remedy));
            }
        } else if !mounts.iter().any(|t| t.device == m.device && t.root == "/") {
            let what = format!("shows {} of a filesystem ({}) that is not mounted in the container", m.root, m.source);
            blockers.push(mount(&m.point, &what, "unmount it, or give it to the engine as a bind mount"));
        }
    }
    blockers
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNC: &str = "\
600 500 0:50 / / ro,relatime - overlay overlay rw,lowerdir=/l
601 600 0:51 / /proc rw,nosuid - proc proc rw
602 600 0:52 / /dev rw,nosuid - tmpfs tmpfs rw
603 602 0:53 / /dev/pts rw - devpts devpts rw
604 602 0:54 / /dev/mqueue rw - mqueue mqueue rw
605 600 0:55 / /sys ro - sysfs sysfs ro
606 605 0:30 /c /sys/fs/cgroup ro master:11 - cgroup2 cgroup rw
607 601 0:51 /sys /proc/sys ro - proc proc rw
608 601 0:52 /null /proc/kcore rw - tmpfs tmpfs rw
609 600 8:1 /etc/hosts /etc/hosts rw,relatime master:1 - ext4 /dev/sda1 rw
610 600 8:1 /srv /srv rw,relatime - ext4 /dev/sda1 rw
";

    fn causes(text: &str, external: &[&str]) -> Vec<String> {
        unsupported(&Mount::parse_all(text), external).into_iter().map(|b| b.cause).collect()
    }

    #[test]
    fn mounts_of_an_ordinary_container_pass() {
        assert_eq!(causes(RUNC, &["/etc/hosts", "/srv"]), [""; 0]);
    }

    #[test]
    fn binds_that_the_engine_does_not_know_are_named() {
        let found = causes(RUNC, &["/etc/hosts"]);
        assert_eq!(
            found,
            ["the mount at /srv shows /srv of a filesystem (/dev/sda1) that is not mounted in the container"]
        );
        let found = causes(RUNC, &["/srv"]);
        assert!(found.len() == 1 && found[0].contains("/etc/hosts receives mounts from outside"), "{found:?}");
    }

    #[test]
    fn binds_of_the_root_filesystem_itself_pass() {
        let text =
            "600 500 8:1 /rootfs / rw - ext4 /dev/sda1 rw\n601 600 8:1 /rootfs/a /b rw master:1 - ext4 /dev/sda1 rw\n";
        assert_eq!(causes(text, &[]), [""; 0]);
        assert_eq!(causes(&text.replace("/rootfs/a", "/rootfs2"), &[]).len(), 1);
    }

    #[test]
    fn filesystems_that_criu_cannot_make_are_named_unless_external() {
        for fstype in ["fuse", "fuse.sshfs", "nfs4", "cifs", "autofs", "hugetlbfs", "ext4", "btrfs", "overlay"] {
            let text = format!("{RUNC}700 600 0:99 / /data rw - {fstype} src rw\n");
            let found = causes(&text, &["/etc/hosts", "/srv"]);
            assert_eq!(
                found,
                [format!("the mount at /data is a {fstype} filesystem that was mounted inside the container")]
            );
            assert_eq!(causes(&text, &["/etc/hosts", "/srv", "/data"]), [""; 0]);
        }
    }

    #[test]
    fn parts_of_proc_that_are_of_processes_and_odd_paths_are_named() {
        let text = format!("{RUNC}700 601 0:51 /6/fd /x rw - proc proc rw\n701 600 0:98 / /y\\012z rw - tmpfs t rw\n");
        let found = causes(&text, &["/etc/hosts", "/srv"]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("shows /6/fd of /proc") && found[1].contains("has a line feed in its path"),
            "{found:?}"
        );
        let text = format!("{RUNC}700 601 0:51 /1/fd /x rw - proc proc rw\n");
        assert_eq!(causes(&text, &["/etc/hosts", "/srv"]), [""; 0]);
    }

    #[test]
    fn a_point_mounted_twice_under_one_parent_is_named_once() {
        let text = format!("{RUNC}700 600 0:99 / /x rw - tmpfs t rw\n701 600 0:98 / /x rw - tmpfs t rw\n");
        assert_eq!(causes(&text, &["/etc/hosts", "/srv"]), ["the mount at /x exists twice, one beside the other"]);
    }
}
