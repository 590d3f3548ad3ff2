//! Rules about the files that Unix sockets are bound to (CRIU: sk-unix.c, `unix_resolve_name` and `bind_unix_sk`).
//!
//! CRIU binds each socket anew to the name that it was bound to, and removes a socket that is there. It notes where the file of a socket with a
//! relative name is, and that a file was removed; not that it was renamed, or has other names.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat, fstat, open, openat2};
use tranship_sys::unix_socket::{bound_file, path};
use tranship_types::Blocker;

use super::super::Look;
use super::super::container::Container;
use super::super::diag::UnixSocket;
use super::super::files::Descriptor;
use super::super::procfs::{self, FdInfo};
use super::blocker;

/// The longest name that CRIU restores: one that is longer has no zero byte at its end.
const LONGEST: usize = 107;
const REMOVED: &str = " (deleted)";

/// Of a socket whose name is in a filesystem. A connection was not bound itself, but for a few, whose names CRIU drops: it has its listener's
/// name, also when its client has left.
pub(super) fn check(
    container: &Container,
    s: &UnixSocket,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    look: &mut Look,
) {
    let is_absolute = || s.name.starts_with('/');
    if s.name.is_empty() || !s.is_datagram && (s.peer != 0 || s.is_connection) && is_absolute() {
        return;
    }
    let Some(name) = path(socket.as_fd()).ok().filter(|name| !name.is_empty()) else { return };
    if name.len() > LONGEST {
        let shown = procfs::escaped(&name);
        let what = format!("is a Unix socket with the name {shown}, which is too long for CRIU by a byte");
        look.block(blocker(d, &what, "let the program use a shorter name"));
        return;
    }
    let Some(found) = obstacle(container, &name, d, socket) else { return };
    // A file that is looked at while it is renamed shows both names; one that has two may be about to lose one. All else lasts.
    if found.lasts && obstacle(container, &name, d, socket).as_ref() == Some(&found) {
        look.block(found.blocker);
    } else {
        look.wait(inode, found.blocker);
    }
}

/// What is the matter with a name.
#[derive(Debug, PartialEq)]
struct Obstacle {
    blocker: Blocker,
    /// It does not pass by itself.
    lasts: bool,
}

impl Obstacle {
    fn lasting(blocker: Blocker) -> Option<Self> {
        Some(Self { blocker, lasts: true })
    }
}

fn obstacle(container: &Container, name: &[u8], d: &Descriptor<'_>, socket: &OwnedFd) -> Option<Obstacle> {
    let shown = procfs::escaped(name);
    let file = bound_file(socket.as_fd()).ok()?;
    let bytes = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?.into_os_string().into_vec();
    let link = procfs::escaped(&bytes);
    let (is, mount) = (fstat(&file).ok()?, mount_of(&file)?);
    let remedy = "restart the program, or let it bind the socket to the name that others connect to";
    if let Some(path) = link.strip_suffix(REMOVED) {
        // CRIU does the same, where nobody can connect to it any more.
        let what = || format!("is a Unix socket at {path}, a name that was removed; its file has another one");
        return match is.st_nlink {
            0 => None,
            _ => Obstacle::lasting(blocker(d, &what(), remedy).allowable("socket-files")),
        };
    }
    if !name.starts_with(b"/") && !ends_with(&bytes, name) {
        let what = format!("is a Unix socket with the relative name {shown}, which CRIU does not find in {link}");
        return Obstacle::lasting(blocker(d, &what, "let the program bind it to an absolute name"));
    }
    // Files in other mount namespaces are not looked for.
    if container.mounts.iter().all(|m| m.id != mount) {
        return None;
    }
    if name.starts_with(b"/") {
        let root = format!("/proc/{}/root", container.init);
        let root = open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let there = at(&root, name);
        if there.is_none_or(|there| (there.st_dev, there.st_ino) != (is.st_dev, is.st_ino)) {
            let what = match bytes == name {
                true => format!("is a Unix socket whose file {link} is hidden by a mount or by another root"),
                false => format!("is a Unix socket that was bound to {shown}, and whose file is {link} now"),
            };
            let found = blocker(d, &what, remedy);
            // CRIU cannot bind it where something else is, or no directory.
            let parent = Path::new(OsStr::from_bytes(name)).parent();
            let is_free = there.is_none() && parent.is_some_and(|dir| at(&root, dir.as_os_str().as_bytes()).is_some());
            return Obstacle::lasting(if is_free { found.allowable("socket-files") } else { found });
        }
    }
    let what = || format!("is a Unix socket at {link}, whose file has other names, too (hard links)");
    let found = || blocker(d, &what(), "remove the other names").allowable("socket-files");
    (is.st_nlink > 1).then(|| Obstacle { blocker: found(), lasts: false })
}

/// What is at a path of a container.
fn at(root: &OwnedFd, path: &[u8]) -> Option<Stat> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT).and_then(fstat).ok()
}

/// The mount that a file was opened through.
fn mount_of(file: &OwnedFd) -> Option<u32> {
    Some(FdInfo::parse(&procfs::text(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?).mount)
}

/// Whether CRIU (util.c, `cut_path_ending`) finds a relative name in the path of the file.
fn ends_with(path: &[u8], name: &[u8]) -> bool {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    path.strip_suffix(name).is_some_and(|directory| directory.ends_with(b"/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_names_are_found_as_criu_finds_them() {
        for name in ["s", "./s", "b/s", "./b/s"] {
            assert!(ends_with(b"/a/b/s", name.as_bytes()), "{name}");
        }
        for name in ["../b/s", "t", "xs", "./../b/s", "/s", "y/s"] {
            assert!(!ends_with(b"/a/b/s", name.as_bytes()), "{name}");
        }
        assert!(!ends_with(b"/a/bs", b"s"));
    }
}
