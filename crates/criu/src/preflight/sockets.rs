//! Rules about sockets (CRIU: sockets.c, sk-inet.c, sk-unix.c, sk-netlink.c).

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::net::{AddressFamily, SocketType, sockopt};
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind};

use super::container::Container;
use super::diag::{self, CLOSE, LISTEN, Sockets};
use super::files::{Descriptor, Files, Holder};
use super::procfs::bracketed;
use super::{Look, PreflightError};

const TCP: u32 = 6;
const MPTCP: u32 = 262;

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    Blocker::new(BlockerKind::Socket, format!("{} {what}", d.name()), remedy).at(d.task.pid, Some(d.fd))
}

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) -> Result<(), PreflightError> {
    if files.sockets.is_empty() {
        return Ok(());
    }
    let known = sockets(container)?;
    let mut seen = HashSet::new();
    for d in &files.all {
        let Some(inode) = bracketed(&d.link, "socket").filter(|i| seen.insert(*i)) else { continue };
        if known.unix.contains_key(&inode) {
            unix(container, files, &known, d, inode, look);
        } else if known.netlink.contains_key(&inode) {
            netlink(&known, d, inode, look);
        } else if let Ok(socket) = borrow(d, inode) {
            other(&known, d, inode, &socket, look);
        }
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

fn other(known: &Sockets, d: &Descriptor<'_>, inode: u64, socket: &OwnedFd, look: &mut Look) {
    let Ok(family) = sockopt::socket_domain(socket) else { return };
    let Ok(kind) = sockopt::socket_type(socket) else { return };
    let protocol = sockopt::socket_protocol(socket).ok().flatten().map_or(0, |p| p.as_raw().get());
    match family {
        AddressFamily::INET | AddressFamily::INET6 => inet(known, d, inode, socket, (kind, protocol), look),
        AddressFamily::PACKET => {}
        // Not among the network namespace's own, which is all that CRIU sees; unless the list has missed it, as it may one
        // that is being connected at the moment.
        AddressFamily::UNIX | AddressFamily::NETLINK => look.wait(inode, elsewhere(d)),
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

fn elsewhere(d: &Descriptor<'_>) -> Blocker {
    blocker(
        d,
        "is a socket of another network namespace, made outside of the container",
        "let the program make its sockets itself instead of inheriting them",
    )
}

fn inet(
    known: &Sockets,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    (kind, protocol): (SocketType, u32),
    look: &mut Look,
) {
    // sk-inet.c, `can_dump_ipproto` and `can_dump_inet_sk`.
    let supported = matches!(kind, SocketType::STREAM | SocketType::DGRAM) && matches!(protocol, 0 | TCP | 17 | 136);
    if kind == SocketType::RAW {
        return;
    }
    if !supported {
        let (what, remedy) = match protocol {
            MPTCP => {
                let port = known.tcp.get(&inode).map_or(0, |s| s.port);
                let port = if port == 0 { String::new() } else { format!(" on port {port}") };
                (
                    format!("is a multipath TCP socket{port}, which CRIU does not support"),
                    "start it with GODEBUG=multipathtcp=0 if it is a Go program, else turn MPTCP off in its settings",
                )
            }
            1 | 58 => ("is a ping socket, which CRIU does not support".to_owned(), "end the ping and try again"),
            132 => ("is an SCTP socket, which CRIU does not support".to_owned(), "run the program over TCP"),
            33 => ("is a DCCP socket, which CRIU does not support".to_owned(), "run the program over TCP or UDP"),
            n => (format!("is a socket of IP protocol {n}, which CRIU does not support"), "run the program without it"),
        };
        look.block(blocker(d, &what, remedy));
        return;
    }
    if protocol != TCP {
        return;
    }
    let Some(s) = known.tcp.get(&inode) else {
        // Unconnected sockets are on no list; a listening one that is on none of ours is somebody else's.
        if sockopt::socket_acceptconn(socket).unwrap_or(false)
            || rustix::net::getpeername(socket).is_ok_and(|a| a.is_some())
        {
            look.wait(inode, elsewhere(d));
        }
        return;
    };
    match s.state {
        LISTEN if s.waiting > 0 => {
            let (port, n) = (s.port, s.waiting);
            look.note(format!("{n} connections wait to be accepted on port {port}; CRIU cannot carry those that still wait at the freeze"));
        }
        LISTEN | CLOSE => {}
        // net/tcp_states.h: 1 established, 2 SYN_SENT, 4 and 5 FIN_WAIT, 8 CLOSE_WAIT, 9 LAST_ACK, 11 CLOSING.
        1 | 2 | 4 | 5 | 8 | 9 | 11 => look.findings.tcp_connections += 1,
        n => {
            look.wait(inode, blocker(d, &format!("is a TCP socket in state {n}, which CRIU cannot dump"), "try again"));
        }
    }
    if !s.ulp.is_empty() {
        let what = match s.ulp.as_str() {
            "tls" => "encrypts in the kernel (kTLS), and CRIU does not carry its keys".to_owned(),
            ulp => format!("has an upper layer in the kernel ({ulp}) that CRIU does not carry"),
        };
        look.block(blocker(d, &what, "turn kernel TLS off in the program's settings"));
    } else if s.md5 && s.state != CLOSE {
        let what = "is signed with TCP MD5 keys, which CRIU does not carry";
        look.block(blocker(d, what, "run the connection without MD5 signatures"));
    }
}

fn unix(container: &Container, files: &Files<'_>, known: &Sockets, d: &Descriptor<'_>, inode: u64, look: &mut Look) {
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
    if s.listening && s.waiting.contains(&0) {
        let what = format!("listens at {} and has a connection waiting whose client has left", s.name);
        look.wait(inode, blocker(d, &what, "let the program accept its connections, then try again"));
    }
}

fn netlink(known: &Sockets, d: &Descriptor<'_>, inode: u64, look: &mut Look) {
    let s = &known.netlink[&inode];
    let grouped = s.groups.iter().any(|b| *b != 0);
    if s.groups.iter().skip(4).any(|b| *b != 0) {
        let what = "is a netlink socket that listens to a multicast group above 32";
        look.block(blocker(d, what, "run the program without that subscription"));
    } else if grouped && s.port == 0 {
        let what = "is a netlink socket that listens to multicast groups without being bound";
        look.block(blocker(d, what, "let the program bind it"));
    }
    if s.waiting > 0 {
        let what = "is a netlink socket with messages that the program does not read";
        look.wait(inode, blocker(d, what, "try again when the program has read them"));
    }
}
