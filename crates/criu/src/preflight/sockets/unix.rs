//! Rules about Unix sockets (CRIU: sk-unix.c).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{SocketType, sockopt};
use tranship_sys::socket;

use super::super::Look;
use super::super::container::Container;
use super::super::diag::{Sockets, UnixSocket};
use super::super::files::{Descriptor, Files, Holder};
use super::{blocker, names, not_taken, queues};

pub(super) fn check(
    container: &Container,
    files: &Files<'_>,
    known: &Sockets,
    d: &Descriptor<'_>,
    inode: u64,
    look: &mut Look,
) {
    let s = &known.unix[&inode];
    if s.peer != 0 && !files.sockets.contains(&s.peer) {
        // sk-unix.c, `__dump_external_socket`; a peer in another network namespace is not even found.
        let name = match known.unix.get(&s.peer).map(|p| p.name.as_str()).filter(|n| !n.is_empty()) {
            Some(name) => format!(" at {name}"),
            None if !s.name.is_empty() => format!(" of a client of {}", s.name),
            None => String::new(),
        };
        let whose = match files.holder(container, &format!("socket:[{}]", s.peer)) {
            // Held by a process that was born a moment ago.
            Some(Holder::Inside) => return,
            Some(Holder::Outside(pid, program)) => format!("held by {program} (pid {pid}) outside of the container"),
            None => "held by nobody in the container".to_owned(),
        };
        let what = format!("is connected to a Unix socket{name} that is {whose}");
        let remedy = "close the connection (a host's socket such as /dev/log or docker.sock cannot move along)";
        // Sockets come and go between the listing of descriptors and that of sockets.
        look.wait(inode, blocker(d, &what, remedy));
    } else if known.unix.get(&s.peer).is_some_and(|p| p.peer != inode && p.name.is_empty()) {
        let what = "sends to a Unix socket that has neither a name nor a way back";
        look.wait(inode, blocker(d, what, "let the program bind the receiving socket to a name"));
    }
    if s.listening {
        waiting(known, d, inode, look);
    }
}

/// Connections that wait to be accepted, each by itself: a busy server has one or the other whenever somebody looks. Those whose clients have left have
/// no names.
fn waiting(known: &Sockets, d: &Descriptor<'_>, inode: u64, look: &mut Look) {
    let s = &known.unix[&inode];
    for client in &s.waiting {
        let what = match known.unix.get(client) {
            _ if *client == 0 => "has left",
            // sk-unix.c, `dump_one_unix_fd`: "Non-empty write queue on an in-flight socket".
            Some(socket) if socket.unsent => "has sent something",
            _ => continue,
        };
        let what = format!("listens at {} and has a connection waiting whose client {what}", s.name);
        let mut identity = DefaultHasher::new();
        (inode, client).hash(&mut identity);
        let remedy = "let the program accept its connections, then try again";
        look.wait(identity.finish(), blocker(d, &what, remedy));
    }
}

/// What only the socket itself can be asked.
pub(super) fn borrowed(
    container: &Container,
    files: &Files<'_>,
    s: &UnixSocket,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    look: &mut Look,
) {
    if let Some(mut found) = not_taken(d, socket) {
        // CRIU cannot look at what there is to read without taking the error, but for streams.
        let is_stream = sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::STREAM);
        if s.unread && !is_stream && found.allow.as_deref() == Some("socket-errors") {
            found.allow = None;
        }
        look.wait(inode, found);
        return;
    }
    names::check(container, s, d, inode, socket, look);
    queues::check(files, s, d, inode, socket, look);
    // A connection out of the container is named as such.
    if s.is_datagram || !files.sockets.contains(&s.peer) {
        return;
    }
    let Ok((pid, uid)) = socket::peer_credentials(socket.as_fd()) else { return };
    if !container.owns(pid) {
        let what = format!(
            "is a Unix connection made by a process that has ended (pid {pid}), and SO_PEERCRED would name another"
        );
        let remedy = "restart the program that holds it, or let it connect anew";
        look.wait(inode, blocker(d, &what, remedy).allowable("peer-credentials"));
    } else if uid != container.root {
        look.peers_of_users += 1;
    }
}
