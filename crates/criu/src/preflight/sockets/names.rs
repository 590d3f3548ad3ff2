//! Rules about the files that Unix sockets are bound to (CRIU: sk-unix.c, `unix_resolve_name` and `bind_unix_sk`).
//!
//! CRIU binds each socket anew to the name that it was bound to, and removes a socket that is there. A file that was renamed, or has other names,
//! gets its names afterwards ([`socket_files`](crate::socket_files)).

use std::os::fd::{AsFd, OwnedFd};

use tranship_sys::unix_socket::path;
use tranship_types::Blocker;

use super::super::Look;
use super::super::container::Container;
use super::super::diag::UnixSocket;
use super::super::files::Descriptor;
use super::super::procfs;
use super::blocker;
use crate::socket_files::{Found, Lost, Places};

/// The longest name that CRIU restores: one that is longer has no zero byte at its end.
const LONGEST: usize = 107;

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
    let is_connection = !s.is_datagram && (s.peer != 0 || s.is_connection);
    if s.name.is_empty() || is_connection && s.name.starts_with('/') {
        return;
    }
    let Some(name) = path(socket.as_fd()).ok().filter(|name| !name.is_empty()) else { return };
    if name.len() > LONGEST {
        let shown = procfs::escaped(&name);
        let what = format!("is a Unix socket with the name {shown}, which is too long for CRIU by a byte");
        look.block(blocker(d, &what, "let the program use a shorter name"));
        return;
    }
    let Ok(places) = Places::of(container.init, container.tasks.keys().copied().collect()) else { return };
    let found = places.find(socket.as_fd());
    let place = match &found {
        Found::Named { place, .. } => place.clone(),
        Found::Usual | Found::Unknown => name.clone(),
        Found::Lost(lost) => {
            // A file that is looked at while it is renamed shows both names.
            match places.find(socket.as_fd()) == found {
                true => look.block(of_lost(d, &name, lost)),
                false => look.wait(inode, of_lost(d, &name, lost)),
            }
            return;
        }
    };
    if is_connection {
        return;
    }
    let is_usual = matches!(found, Found::Usual | Found::Unknown);
    look.findings.renamed_sockets |= !is_usual;
    let others = look.bound.entry(place).or_default();
    others.push((inode, is_usual));
    if others.iter().any(|(other, other_is_usual)| *other != inode && !(is_usual && *other_is_usual)) {
        let shown = procfs::escaped(&name);
        let what = format!("is a Unix socket that was bound to {shown}, as another one was whose file was renamed");
        look.block(blocker(d, &what, "restart the program, or let it bind the sockets to names of their own"));
    }
}

fn of_lost(d: &Descriptor<'_>, name: &[u8], lost: &Lost) -> Blocker {
    let (shown, escaped) = (procfs::escaped(name), |path: &Vec<u8>| procfs::escaped(path));
    let remedy = "restart the program, or let it bind the socket to the name that others connect to";
    match lost {
        Lost::Hidden { file, is_free } => {
            let what = format!("is a Unix socket whose file {} is hidden by a mount or by another root", escaped(file));
            allowable(blocker(d, &what, remedy), *is_free)
        }
        Lost::Occupied { file, place } => {
            let (file, place) = (escaped(file), escaped(place));
            let what = format!(
                "is a Unix socket that was bound to {shown}, and whose file is {file} now, while something else is at {place}"
            );
            blocker(d, &what, remedy)
        }
        Lost::Watched(place) => {
            let what = format!(
                "is a Unix socket that was bound to {shown}, and whose file was renamed; who watches the directory of {} by inotify \
                 would be told of a move",
                escaped(place)
            );
            blocker(d, &what, "end the watch, or restart the program")
        }
        Lost::Elsewhere { file, is_free } => {
            let file = escaped(file);
            let what = format!(
                "is a Unix socket at {file}, whose file has other names (hard links) that are not found beside it"
            );
            allowable(blocker(d, &what, "remove the other names"), *is_free)
        }
    }
}

/// A move may lose names of a file if CRIU can bind the socket.
fn allowable(blocker: Blocker, is_free: bool) -> Blocker {
    if is_free { blocker.allowable("socket-files") } else { blocker }
}
