//! Rules about the paths of open files, programs and working directories (CRIU: files-reg.c, `check_path_remap`).

use std::collections::BTreeMap;
use std::path::Path;

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;
use tranship_types::{Blocker, BlockerKind};

use super::Look;
use super::container::{Container, Task};
use super::files::{Descriptor, Files, Kind};
use super::mappings::mount_of;
use super::procfs;

/// What the kernel appends to the path of a file without a name.
pub(super) const DELETED: &str = " (deleted)";

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) {
    for d in &files.all {
        if let Some(found) = replaced(container, d) {
            look.wait(d.kind.inode, found);
        }
    }
    for task in container.tasks.values().filter(|task| !task.zombie()) {
        program(task, look);
        directory(container, task, look);
    }
    nested(container, files, look);
}

/// A file that has names, but the one that it was opened by is now that of another file, or cannot be reached.
fn replaced(container: &Container, d: &Descriptor<'_>) -> Option<Blocker> {
    let named = matches!(d.kind.kind, FileType::RegularFile | FileType::Directory | FileType::Symlink | FileType::Fifo);
    let mount = container.mounts.iter().find(|m| m.id == d.info.mount)?;
    let by_path = !matches!(mount.fstype.as_str(), "proc" | "devpts" | "sysfs" | "cgroup" | "cgroup2");
    if !named || !by_path || d.kind.links == 0 || !d.link.starts_with('/') || container.covered.contains(&mount.id) {
        return None;
    }
    // The path as bytes: it need not be UTF-8.
    let link = std::fs::read_link(d.path()).ok()?;
    let root = std::path::PathBuf::from(format!("/proc/{}/root", container.init));
    let path = root.join(link.strip_prefix("/").ok()?);
    let what = match Kind::at(&path, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT) {
        Ok(now) if (now.inode, now.device) == (d.kind.inode, d.kind.device) => return None,
        // CRIU gives it another name for as long as it needs one, in the directory that is there.
        Err(Errno::NOENT) if above(&path).is_none_or(|mount| mount == d.info.mount) => return None,
        Err(Errno::NOENT) => format!("is the file {}, which another mount hides", d.link),
        Ok(_) => format!("is the file that was {}, where another one is now", d.link),
        Err(error) => format!("is the file {}, to which no path leads any more ({error})", d.link),
    };
    let remedy = "let the program open it again, or restart the program";
    Some(d.blocker(BlockerKind::Descriptor, &what, remedy))
}

/// The mount of the nearest directory above a path that is there.
fn above(path: &Path) -> Option<u32> {
    path.ancestors().skip(1).find_map(mount_of)
}

/// A program in a memfd has no file of which a restore could map it (files-reg.c, `collect_filemap`).
fn program(task: &Task, look: &mut Look) {
    let link = procfs::link(format!("/proc/{}/exe", task.pid)).unwrap_or_default();
    if let Some(name) = link.strip_prefix("/memfd:") {
        let name = name.strip_suffix(DELETED).unwrap_or(name);
        let what = format!("runs a program that lies in memory alone (memfd {name})");
        look.block(task.blocker(&what, "start the program from a file"));
    }
}

/// The working directory must lie on a mount that the container can see, as each file must.
fn directory(container: &Container, task: &Task, look: &mut Look) {
    let path = format!("/proc/{}/cwd", task.pid);
    let (Ok(link), Some(mount)) = (procfs::link(&path), mount_of(&path)) else { return };
    let what = if container.covered.contains(&mount) {
        format!("works in {link}, on a mount that another mount hides")
    } else if !container.mount_ids.contains(&mount) {
        format!("works in {link}, a directory that is not on any mount of the container")
    } else {
        return;
    };
    look.block(task.blocker(&what, "start it in a directory of the container"));
}

/// Of removed directories that are in use none may be within another one: a restore makes the inner one within the outer one, and
/// cannot remove that then.
fn nested(container: &Container, files: &Files<'_>, look: &mut Look) {
    let mut removed: BTreeMap<String, (&Task, String, Option<i32>)> = BTreeMap::new();
    let of_files = files.all.iter().filter(|d| d.kind.kind == FileType::Directory && d.kind.links == 0);
    let of_files = of_files.map(|d| (d.link.clone(), d.task, d.name(), Some(d.fd)));
    let working = container.tasks.values().filter(|task| !task.zombie()).filter_map(|task| {
        let path = format!("/proc/{}/cwd", task.pid);
        let link = procfs::link(&path).ok().filter(|link| link.ends_with(DELETED))?;
        (Kind::of(&path)?.links == 0).then(|| (link, task, format!("the working directory of {}", task.name()), None))
    });
    for (link, task, name, fd) in of_files.chain(working) {
        if let Some(path) = link.strip_suffix(DELETED) {
            removed.entry(path.to_owned()).or_insert((task, name, fd));
        }
    }
    for (path, (task, name, fd)) in &removed {
        let inner = format!("{path}/");
        if let Some((below, _)) = removed.range(inner.clone()..).next().filter(|(below, _)| below.starts_with(&inner)) {
            let cause =
                format!("{name} is the removed directory {path}, in which {below} was removed and is in use too");
            let remedy = "let the program leave one of them";
            look.block(Blocker::new(BlockerKind::Descriptor, cause, remedy).at(task.pid, *fd));
        }
    }
}
