//! Rules about sockets of the internet (CRIU: sk-inet.c, sk-tcp.c).

use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{SocketType, sockopt};
use tranship_sys::{process, socket};

use super::super::Look;
use super::super::diag::{CLOSE, LISTEN, Sockets, TcpSocket};
use super::super::files::Descriptor;
use super::{blocker, elsewhere, not_taken};

const TCP: u32 = 6;
const UDP: u32 = 17;
const UDP_LITE: u32 = 136;
const MPTCP: u32 = 262;

/// Whether a raw socket is connected in a way that it does not tell (getpeername(2)), and so CRIU: the kernel's list shows its state alone.
fn is_connected_without_port(pid: u32, inode: u64, socket: &OwnedFd) -> bool {
    /// Fields of the list, counted from 0, and the state ESTABLISHED there.
    const STATE_AT: usize = 3;
    const INODE_AT: usize = 9;
    const CONNECTED: &str = "01";
    let is_listed = |list: &str| {
        let list = process::text(format!("/proc/{pid}/net/{list}")).unwrap_or_default();
        list.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>()).any(|fields| {
            fields.get(INODE_AT).is_some_and(|number| *number == inode.to_string())
                && fields.get(STATE_AT) == Some(&CONNECTED)
        })
    };
    !rustix::net::getpeername(socket).is_ok_and(|name| name.is_some()) && ["raw", "raw6"].into_iter().any(is_listed)
}

pub(super) fn check(
    known: &Sockets,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    (kind, protocol): (SocketType, u32),
    look: &mut Look,
) {
    // sk-inet.c, `can_dump_ipproto` and `can_dump_inet_sk`.
    let supported =
        matches!(kind, SocketType::STREAM | SocketType::DGRAM) && matches!(protocol, 0 | TCP | UDP | UDP_LITE);
    if kind == SocketType::RAW {
        if is_connected_without_port(d.task.pid, inode, socket) {
            let what = "is a raw socket that was connected without a port, of which CRIU restores no connection";
            look.block(blocker(d, what, "connect it with any port").allowable("raw-connections"));
        }
        return;
    }
    let listed = known.tcp.get(&inode);
    if protocol == MPTCP {
        multipath(listed, d, inode, look);
        return;
    }
    if !supported {
        let (what, remedy) = match protocol {
            1 | 58 => ("is a ping socket, which CRIU does not support".to_owned(), "end the ping and try again"),
            132 => ("is an SCTP socket, which CRIU does not support".to_owned(), "run the program over TCP"),
            33 => ("is a DCCP socket, which CRIU does not support".to_owned(), "run the program over TCP or UDP"),
            n => (format!("is a socket of IP protocol {n}, which CRIU does not support"), "run the program without it"),
        };
        look.block(blocker(d, &what, remedy));
        return;
    }
    if matches!(protocol, UDP | UDP_LITE) {
        datagrams(d, inode, socket, look);
        return;
    }
    if protocol != TCP {
        return;
    }
    if let Some(found) = not_taken(d, socket) {
        look.wait(inode, found);
    }
    let Some(s) = listed else {
        // Unconnected sockets are on no list; a listening one that is on none of ours is somebody else's.
        if sockopt::socket_acceptconn(socket).unwrap_or(false)
            || rustix::net::getpeername(socket).is_ok_and(|a| a.is_some())
        {
            look.wait(inode, elsewhere(d));
        }
        return;
    };
    match s.state {
        LISTEN => waiting(s, look),
        CLOSE => {}
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

fn waiting(s: &TcpSocket, look: &mut Look) {
    let TcpSocket { port, waiting, .. } = s;
    if *waiting > 0 {
        look.note(format!("{waiting} connections wait to be accepted on port {port}; CRIU cannot carry those that still wait at the freeze"));
    }
}

/// The kernel lists a socket of multipath TCP among those of TCP when it listens or is connected. The library that is preloaded into criu has
/// a listening one carried as one of TCP: so are the connections that it accepts from clients without multipath TCP.
fn multipath(listed: Option<&TcpSocket>, d: &Descriptor<'_>, inode: u64, look: &mut Look) {
    match listed {
        Some(s) if s.state == LISTEN => {
            waiting(s, look);
            look.change(format!(
                "{} listens on port {} for multipath TCP, and will listen for plain TCP after the move (SO_PROTOCOL 6 instead of 262)",
                d.name(),
                s.port
            ));
        }
        listed => {
            let port = listed.map_or(0, |s| s.port);
            let port = if port == 0 { String::new() } else { format!(" on port {port}") };
            let what = format!("is a multipath TCP socket{port} that does not listen, which CRIU does not support");
            let remedy = "let this connection end, or turn multipath TCP off at the end that asks for it (GODEBUG=multipathtcp=0 for a Go \
                          program, else in its settings)";
            look.wait(inode, blocker(d, &what, remedy));
        }
    }
}

fn datagrams(d: &Descriptor<'_>, inode: u64, socket: &OwnedFd, look: &mut Look) {
    const UDP_CORK: i32 = 1;
    const SOL_UDP: i32 = 17;
    let remedy = "let the program send the rest of the datagram, and try again";
    if socket::int_option(socket.as_fd(), SOL_UDP, UDP_CORK).is_ok_and(|corked| corked != 0) {
        look.wait(inode, blocker(d, "is a corked UDP socket (UDP_CORK), which CRIU does not support", remedy));
    } else if socket::unsent(socket.as_fd()).is_ok_and(|bytes| bytes > 0) {
        let what = "is a UDP socket with a datagram that is not complete yet (MSG_MORE)";
        look.wait(inode, blocker(d, what, remedy).allowable("unfinished-datagrams"));
    }
    if !socket::readiness(socket.as_fd()).is_ok_and(|socket| socket.error) {
        return;
    }
    // Which of the two it is shows only when it is taken.
    if has_error_queue(socket) {
        let what =
            "has an error to report that the program has not taken, or messages in its error queue (MSG_ERRQUEUE)";
        let remedy = "let the program read from the socket's error queue or close it, and try again";
        look.wait(inode, blocker(d, what, remedy).allowable("socket-errors"));
    } else {
        look.change(format!("{} has an error to report that the program has not taken, and a move drops it", d.name()));
    }
}

/// Whether errors, or the times at which datagrams were sent, are put into a queue with what they are about: by IP_RECVERR,
/// IPV6_RECVERR, SO_TIMESTAMPING or SO_ZEROCOPY.
fn has_error_queue(socket: &OwnedFd) -> bool {
    /// Of asm-generic/socket.h, linux/in.h and linux/in6.h.
    const OPTIONS: [(i32, i32); 4] = [(0, 11), (41, 25), (1, 37), (1, 60)];
    OPTIONS.iter().any(|(level, name)| socket::int_option(socket.as_fd(), *level, *name).is_ok_and(|value| value != 0))
}
