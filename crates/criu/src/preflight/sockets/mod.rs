//! Rules about sockets (CRIU: sockets.c).

use std::cell::OnceCell;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{AddressFamily, SocketType, sockopt};
use tranship_sys::process::take_descriptor;
use tranship_sys::socket::{network_namespace, option, readiness};
use tranship_types::{Blocker, BlockerKind};

use super::container::Container;
use super::diag::{self, ClosedConnection, Sockets};
use super::files::{Descriptor, Files};
use super::hidden_files::Known;
use super::procfs::bracketed;
use super::{Look, PreflightError, stdio};

mod hidden;
mod inet;
mod names;
pub(super) mod netlink;
mod queues;
mod unix;

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    d.blocker(BlockerKind::Socket, what, remedy)
}

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) -> Result<(), PreflightError> {
    let known = sockets(container)?;
    known.closed.iter().for_each(|connection| closed(connection, look));
    let (mut seen, mut hidden_files) = (HashSet::new(), Known::default());
    let joined_twice = OnceCell::new();
    for d in &files.all {
        let Some(inode) = bracketed(&d.link, "socket").filter(|i| seen.insert(*i)) else { continue };
        if stdio::is_carried(&look.findings.streams, d) {
            continue;
        }
        if known.unix.contains_key(&inode) {
            unix::check(container, files, &known, d, inode, look);
            if let Ok(socket) = borrow(d, inode) {
                filtered(d, &socket, look);
                unix::borrowed(container, files, &known.unix[&inode], d, inode, &socket, look);
            }
        } else if let Some(socket) = known.netlink.get(&inode) {
            netlink::listed(socket, d, inode, look);
            netlink::packets(container, socket, d, look);
        } else if let Ok(socket) = borrow(d, inode) {
            filtered(d, &socket, look);
            other(container, &known, d, inode, &socket, look);
            packet(container, d, inode, &socket, &joined_twice, look);
            hidden::check(&mut hidden_files, &known, d, inode, &socket, look);
        }
    }
    if look.peers_of_users > 0 {
        let count = look.peers_of_users;
        look.change(format!("SO_PEERCRED of {count} Unix connections names root after the move, no longer the user"));
    }
    Ok(())
}

/// The sockets of all network namespaces that the container's processes live in.
fn sockets(container: &Container) -> Result<Sockets, PreflightError> {
    let mut all = Sockets::default();
    let mut seen = HashSet::new();
    for task in container.tasks.values() {
        let Some(namespace) = task.namespaces.get("net").filter(|n| seen.insert(n.as_str())) else { continue };
        let found = File::open(format!("/proc/{}/ns/net", task.pid)).and_then(|f| diag::sockets(&f));
        match found {
            Ok(sockets) => all.extend(sockets),
            Err(e) if task.pid == container.init => {
                return Err(PreflightError::reading("the network namespace's sockets", task.pid)(e));
            }
            Err(_) => tracing::debug!(pid = task.pid, namespace, "its network namespace is gone"),
        }
    }
    Ok(all)
}

/// A second reference to the process's socket, to ask the socket what it is; the process does not notice.
fn borrow(d: &Descriptor<'_>, inode: u64) -> io::Result<OwnedFd> {
    let socket = take_descriptor(d.task.pid, d.fd)?;
    // The number may stand for something else by now.
    let same = File::from(socket.try_clone()?).metadata()?.ino() == inode;
    if same { Ok(socket) } else { Err(io::ErrorKind::NotFound.into()) }
}

fn other(container: &Container, known: &Sockets, d: &Descriptor<'_>, inode: u64, socket: &OwnedFd, look: &mut Look) {
    if is_elsewhere(container, socket) {
        look.block(elsewhere(d));
        return;
    }
    let Ok(family) = sockopt::socket_domain(socket) else { return };
    let Ok(kind) = sockopt::socket_type(socket) else { return };
    let protocol = sockopt::socket_protocol(socket).ok().flatten().map_or(0, |p| p.as_raw().get());
    if is_unread_lost(family, kind, protocol) && ioctl_fionread(socket).is_ok_and(|bytes| bytes > 0) {
        let what = "has packets that wait unread, which would be lost";
        look.wait(inode, blocker(d, what, "let the program read them, and try again").allowable("unread-packets"));
    }
    match family {
        AddressFamily::INET | AddressFamily::INET6 => inet::check(known, d, inode, socket, (kind, protocol), look),
        AddressFamily::PACKET => {}
        // The kernel lists a netlink socket when it is bound.
        AddressFamily::NETLINK => netlink::unbound(d, inode, socket, look),
        // The list may have missed one that was being connected.
        AddressFamily::UNIX => look.wait(inode, elsewhere(d)),
        family => {
            let name = match family.as_raw() {
                21 => "an RDS socket".to_owned(),
                29 => "a CAN socket".to_owned(),
                30 => "a TIPC socket".to_owned(),
                31 => "a Bluetooth socket".to_owned(),
                38 => "a socket of the kernel's cryptography (AF_ALG)".to_owned(),
                40 => "a socket to a virtual machine or its host (AF_VSOCK)".to_owned(),
                41 => "a kernel connection multiplexor (AF_KCM)".to_owned(),
                43 => "an SMC socket".to_owned(),
                44 => "an express data path socket (AF_XDP)".to_owned(),
                n => format!("a socket of address family {n}"),
            };
            look.block(blocker(d, &format!("is {name}, which CRIU does not support"), "run the program without it"));
        }
    }
}

/// Whether neither CRIU nor the move carries what waits in a socket. Datagrams of UDP the move carries.
fn is_unread_lost(family: AddressFamily, kind: SocketType, protocol: u32) -> bool {
    const UDP_LITE: u32 = 136;
    match family {
        AddressFamily::PACKET => true,
        AddressFamily::INET | AddressFamily::INET6 => kind == SocketType::RAW || protocol == UDP_LITE,
        _ => false,
    }
}

/// sockets.c, `dump_socket_filter`: the kernel shows filters that were made of classic BPF.
fn filtered(d: &Descriptor<'_>, socket: &OwnedFd, look: &mut Look) {
    const SOL_SOCKET: i32 = 1;
    const SO_GET_FILTER: i32 = 26;
    // EPERM would be the answer of somebody else.
    let asked = option(socket.as_fd(), SOL_SOCKET, SO_GET_FILTER, &mut []);
    if asked.is_err_and(|e| e.raw_os_error() == Some(Errno::ACCESS.raw_os_error())) {
        let what = "is a socket with a filter of eBPF (SO_ATTACH_BPF), which CRIU does not support";
        look.block(blocker(d, what, "run the program without the filter, or with one of classic BPF"));
    }
}

/// sk-packet.c, `packet_save_mreqs`: "Multiple MC membership not supported". Asked only where there is a packet socket.
fn packet(
    container: &Container,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    joined_twice: &OnceCell<HashSet<u64>>,
    look: &mut Look,
) {
    if !sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::PACKET) {
        return;
    }
    let ask = || File::open(format!("/proc/{}/ns/net", container.init)).and_then(|f| diag::joined_twice(&f));
    if joined_twice.get_or_init(|| ask().unwrap_or_default()).contains(&inode) {
        let what =
            "is a packet socket that has asked twice for the same (PACKET_ADD_MEMBERSHIP), which CRIU does not support";
        look.block(blocker(d, what, "let the program ask once"));
    }
}

/// Whether a socket belongs to a network namespace that no process of the container lives in. CRIU lists the sockets of those alone.
pub(super) fn is_elsewhere(container: &Container, socket: &OwnedFd) -> bool {
    let Ok(namespace) = network_namespace(socket.as_fd()) else { return false };
    let link = format!("net:[{namespace}]");
    container.tasks.values().all(|task| task.namespaces.get("net").is_none_or(|own| *own != link))
}

fn elsewhere(d: &Descriptor<'_>) -> Blocker {
    blocker(
        d,
        "is a socket of another network namespace, made outside of the container",
        "let the program make its sockets itself instead of inheriting them",
    )
}

/// The kernel goes on sending what a program has written before it closed the connection. CRIU sees the sockets of programs alone.
fn closed(connection: &ClosedConnection, look: &mut Look) {
    let ClosedConnection { local, remote, left } = connection;
    let mut identity = DefaultHasher::new();
    (local, remote).hash(&mut identity);
    let cause =
        format!("a connection from {local} to {remote} that its program has closed has {left} bytes left to send");
    let remedy = "try again when the peer has taken them";
    let blocker = Blocker::new(BlockerKind::Socket, cause, remedy).allowable("closed-connections");
    look.wait(identity.finish(), blocker);
}

/// What a socket has for the program besides data, and CRIU drops.
fn not_taken(d: &Descriptor<'_>, socket: &OwnedFd) -> Option<Blocker> {
    let ready = readiness(socket.as_fd()).ok()?;
    if ready.error {
        let what = "has an error to report that the program has not taken (its connection was reset, say)";
        let remedy = "let the program read from the socket or close it, and try again";
        return Some(blocker(d, what, remedy).allowable("socket-errors"));
    }
    let what = "has an urgent byte (MSG_OOB) that the program has not read";
    ready.urgent.then(|| blocker(d, what, "let the program read it, and try again").allowable("urgent-data"))
}
