use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use netlink_sys::{Socket, protocols::NETLINK_SOCK_DIAG};

use crate::NetworkError;
use crate::namespace::inside;
use crate::reply::Messages;

const TCPDIAG_GETSOCK: u16 = 18;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_DONE: u16 = 3;
const REQUEST_AND_DUMP: u16 = 0x301;
const INET_DIAG_INFO: u8 = 2;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP: u8 = 6;
const UDP: u8 = 17;
// net/tcp_states.h
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
const SYN_RECV: u8 = 3;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const LISTEN: u8 = 10;
const CLOSING: u8 = 11;

/// What the kernel has in a network namespace between programs and the network, as far as CRIU cannot carry it: connections that
/// wait to be accepted, datagrams that wait to be read, the end of connections that programs have closed.
pub struct Backlog {
    netns: PathBuf,
    socket: Socket,
    sequence: u32,
    /// Tells how many connections on this host no program has any more.
    statistics: Option<File>,
}

/// A socket with datagrams that no program has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Receiver {
    /// What its descriptors are links to, in `/proc/PID/fd`.
    pub inode: u32,
    /// The port that they were sent to.
    pub port: u16,
    /// The index of the interface that it is bound to, 0 where it is to none.
    pub interface: u32,
}

/// A connection that a socket has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Connection {
    /// The number of its protocol.
    pub protocol: u8,
    /// Its own end.
    pub local: SocketAddr,
    /// The peer's.
    pub remote: SocketAddr,
}

/// What to list.
#[derive(Clone, Copy)]
enum Sockets {
    /// Those of TCP in these states (bits), of both address families: the kernel goes through the whole host's table of connections for
    /// it, some hundred thousand places, so once.
    Tcp(u32),
    /// The same, with what `struct tcp_info` has of them.
    TcpInDetail(u32),
    /// Those of UDP, of an address family.
    Udp(u8),
}

impl Sockets {
    /// The kind of message that asks for them, and its payload.
    fn request(self) -> (u16, Vec<u8>) {
        match self {
            Self::Tcp(states) => Self::request_for(states, 0),
            Self::TcpInDetail(states) => Self::request_for(states, 1 << (INET_DIAG_INFO - 1)),
            // struct inet_diag_req_v2: family, protocol, no extensions, states, any socket.
            Self::Udp(family) => {
                (SOCK_DIAG_BY_FAMILY, [&[family, UDP, 0, 0][..], &u32::MAX.to_ne_bytes(), &[0; 48]].concat())
            }
        }
    }

    /// struct inet_diag_req of linux/inet_diag.h, whose family the kernel takes for any: family, lengths of addresses, extensions, any socket,
    /// states, no cursor.
    fn request_for(states: u32, extensions: u8) -> (u16, Vec<u8>) {
        (TCPDIAG_GETSOCK, [&[AF_INET, 0, 0, extensions][..], &[0; 48], &states.to_ne_bytes(), &[0; 4]].concat())
    }
}

impl Backlog {
    /// Opens a socket inside `netns`, which keeps the namespace alive.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the system's refusal.
    pub fn prepare(netns: &Path) -> Result<Self, NetworkError> {
        let socket = inside(netns, || {
            let open = || {
                let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
                socket.bind_auto()?;
                socket.connect(&netlink_sys::SocketAddr::new(0, 0))?;
                Ok(socket)
            };
            open().map_err(|e: std::io::Error| {
                NetworkError::refused(format!("open a socket in network namespace {}", netns.display()), e)
            })
        })?;
        let statistics = File::open("/proc/self/net/sockstat").ok();
        Ok(Self { netns: netns.to_owned(), socket, sequence: 0, statistics })
    }

    /// How many connections wait to be accepted.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn waiting(&mut self) -> Result<u32, NetworkError> {
        self.count(Sockets::Tcp(1 << LISTEN), queued)
    }

    /// The sockets that have datagrams which no program has read.
    ///
    /// # Errors
    /// The system's refusal.
    pub(crate) fn unread(&mut self) -> Result<Vec<Receiver>, NetworkError> {
        let mut found = Vec::new();
        for family in [AF_INET, AF_INET6] {
            self.list(Sockets::Udp(family), |socket| found.extend(unread(socket)))?;
        }
        Ok(found)
    }

    /// The connections of TCP that a program can have, and those of connected sockets of UDP.
    ///
    /// # Errors
    /// The system's refusal.
    pub(crate) fn connections(&mut self) -> Result<Vec<Connection>, NetworkError> {
        let states = [ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING];
        let states = states.iter().fold(0, |all, state| all | 1 << state);
        let mut found = Vec::new();
        self.list(Sockets::Tcp(states), |socket| found.extend(connection(TCP, socket)))?;
        for family in [AF_INET, AF_INET6] {
            self.list(Sockets::Udp(family), |socket| found.extend(connection(UDP, socket)))?;
        }
        Ok(found)
    }

    /// How many connections are in the middle of their handshake: the client has not acknowledged yet that it was let in.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn handshakes(&mut self) -> Result<u32, NetworkError> {
        self.count(Sockets::Tcp(1 << SYN_RECV), handshake)
    }

    /// How many connections that no program has any more still have something to send, or to be acknowledged: a program that
    /// closes a connection leaves the rest to the kernel.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn unfinished(&mut self) -> Result<u32, NetworkError> {
        if self.statistics.as_ref().and_then(orphans) == Some(0) {
            return Ok(0);
        }
        self.count(Sockets::Tcp((1 << FIN_WAIT1) | (1 << LAST_ACK) | (1 << CLOSING)), unfinished)
    }

    /// How many of those have something that was never sent, or was lost on its way.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn unsent(&mut self) -> Result<u32, NetworkError> {
        self.count(Sockets::TcpInDetail((1 << FIN_WAIT1) | (1 << LAST_ACK) | (1 << CLOSING)), unsent)
    }

    /// The sum of what these sockets count for.
    fn count(&mut self, sockets: Sockets, of: fn(&[u8]) -> u32) -> Result<u32, NetworkError> {
        let mut count = 0;
        self.list(sockets, |socket| count += of(socket)).map(|()| count)
    }

    fn list(&mut self, sockets: Sockets, each: impl FnMut(&[u8])) -> Result<(), NetworkError> {
        self.ask(sockets, each).map_err(|e| {
            NetworkError::refused(format!("list the sockets of network namespace {}", self.netns.display()), e)
        })
    }

    fn ask(&mut self, sockets: Sockets, mut each: impl FnMut(&[u8])) -> std::io::Result<()> {
        self.sequence += 1;
        let (kind, request) = sockets.request();
        let mut message = Vec::with_capacity(16 + request.len());
        message.extend_from_slice(&(16 + request.len() as u32).to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&REQUEST_AND_DUMP.to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(&request);
        self.socket.send(&message, 0)?;
        loop {
            let (answer, _) = self.socket.recv_from_full()?;
            for m in Messages(&answer).filter(|m| m.sequence == self.sequence) {
                match (m.kind, m.verdict()) {
                    (NLMSG_DONE, _) => return Ok(()),
                    (_, Some(verdict)) => verdict.map_err(|refusal| std::io::Error::other(refusal.to_string()))?,
                    (answered, None) if answered == kind => each(m.payload),
                    _ => {}
                }
            }
        }
    }
}

/// How many connections of this host belong to no program any more, whatever their network namespace.
fn orphans(statistics: &File) -> Option<u32> {
    let mut text = [0; 512];
    let read = statistics.read_at(&mut text, 0).ok()?;
    let text = str::from_utf8(&text[..read]).ok()?;
    let tcp = text.lines().find_map(|line| line.strip_prefix("TCP: "))?;
    tcp.split(' ').skip_while(|word| *word != "orphan").nth(1)?.parse().ok()
}

/// Of a socket that listens (struct inet_diag_msg): the connections in its queue.
pub(crate) fn queued(socket: &[u8]) -> u32 {
    match socket.get(1) {
        Some(&LISTEN) => word(socket, 56).unwrap_or(0),
        _ => 0,
    }
}

/// What there is to know of it, if it has datagrams to read.
pub(crate) fn unread(socket: &[u8]) -> Option<Receiver> {
    word(socket, 56).filter(|bytes| *bytes > 0)?;
    let port = u16::from_be_bytes(*socket.get(4..)?.first_chunk()?);
    Some(Receiver { inode: word(socket, 68)?, port, interface: word(socket, 40)? })
}

/// Where it leads, if it is connected. A socket for both address families can be connected by either.
pub(crate) fn connection(protocol: u8, socket: &[u8]) -> Option<Connection> {
    let end = |port: usize, address: usize| {
        let bytes: &[u8; 16] = socket.get(address..)?.first_chunk()?;
        let address = match socket[0] {
            AF_INET => IpAddr::V4(Ipv4Addr::from(*bytes.first_chunk::<4>()?)),
            _ => Ipv6Addr::from(*bytes).to_canonical(),
        };
        Some(SocketAddr::new(address, u16::from_be_bytes(*socket.get(port..)?.first_chunk()?)))
    };
    let (local, remote) = (end(4, 8)?, end(6, 24)?);
    (remote.port() != 0).then_some(Connection { protocol, local, remote })
}

/// One, if it is in the middle of its handshake.
pub(crate) fn handshake(socket: &[u8]) -> u32 {
    u32::from(socket.get(1) == Some(&SYN_RECV))
}

/// One, if it belongs to no file and has bytes to send or to be acknowledged.
pub(crate) fn unfinished(socket: &[u8]) -> u32 {
    let (queue, inode) = (word(socket, 60), word(socket, 68));
    u32::from(inode == Some(0) && queue.is_some_and(|bytes| bytes > 0))
}

/// One, if it is [`unfinished`], and not only for want of an acknowledgement.
pub(crate) fn unsent(socket: &[u8]) -> u32 {
    // struct inet_diag_msg, and behind it the attributes; struct tcp_info of linux/tcp.h.
    const RETRANSMITS_AT: usize = 3;
    const ATTRIBUTES_AT: usize = 72;
    const NOT_SENT_AT: usize = 144;
    let mut rest = socket.get(ATTRIBUTES_AT..).unwrap_or_default();
    let mut not_sent = None;
    while let (Some(header), None) = (word(rest, 0), not_sent) {
        let (length, kind) = ((header & 0xffff) as usize, header >> 16);
        let Some(value) = rest.get(4..length) else { break };
        if kind == u32::from(INET_DIAG_INFO) {
            not_sent = word(value, NOT_SENT_AT);
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    let lost = socket.get(RETRANSMITS_AT).is_some_and(|times| *times > 0);
    // An older kernel does not say how much was not sent.
    if lost || not_sent.is_none_or(|bytes| bytes > 0) { unfinished(socket) } else { 0 }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn connections_wait_until_they_are_accepted() {
        // The sockets of other tests of this machine are in the same namespace: only this one's change is looked at.
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let clients: Vec<_> = (0..50).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
        assert!(backlog.waiting().unwrap() >= 50);
        let accepted: Vec<_> = (0..50).map(|_| listener.accept().unwrap()).collect();
        assert!(backlog.waiting().unwrap() < 50);
        drop((clients, accepted));
    }

    #[test]
    fn connections_of_both_families_are_told_at_once() {
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        let before = backlog.waiting().unwrap();
        let listeners = ["127.0.0.1:0", "[::1]:0"].map(|address| TcpListener::bind(address).unwrap());
        let mut clients = Vec::new();
        for listener in &listeners {
            clients.extend((0..40).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()));
        }
        // Of one family only it would be 40; other tests have fewer.
        assert!(backlog.waiting().unwrap() >= before.saturating_sub(50) + 80);
    }

    #[test]
    fn orphans_are_counted() {
        let statistics = File::open("/proc/self/net/sockstat").unwrap();
        let before = orphans(&statistics).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut sender, reader) =
            (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap());
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[7; 1 << 16]).is_ok() {}
        drop(sender);
        assert!(orphans(&statistics).unwrap() > 0, "{before} before");
        drop(reader);
    }

    #[test]
    fn sockets_are_named_until_their_datagrams_are_read() {
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).unwrap();
            let link = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
            let mut ports = || {
                let found = backlog.unread().unwrap().into_iter();
                let this = found.filter(|found| link.to_str() == Some(&format!("socket:[{}]", found.inode)));
                this.map(|found| (found.port, found.interface)).collect::<Vec<_>>()
            };
            let own = socket.local_addr().unwrap();
            assert_eq!(ports(), []);
            assert_eq!(socket.send_to(b"x", own).unwrap(), 1);
            assert_eq!(ports(), [(own.port(), 0)]);
            assert_eq!(socket.recv(&mut [0; 4]).unwrap(), 1);
            assert_eq!(ports(), []);
        }
    }

    #[test]
    fn a_closed_connection_is_unfinished_until_all_is_acknowledged() {
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut pairs: Vec<_> = (0..20)
            .map(|_| (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0))
            .collect();
        // More than the readers' buffers take.
        for (_, server) in &mut pairs {
            server.set_nonblocking(true).unwrap();
            while server.write(&[7; 1 << 16]).is_ok() {}
        }
        assert!(backlog.unfinished().unwrap() < 20, "they are open");
        let clients: Vec<TcpStream> = pairs.into_iter().map(|(client, _)| client).collect();
        assert!(backlog.unfinished().unwrap() >= 20, "they are closed, and have not sent all");
        for mut client in clients {
            client.read_to_end(&mut Vec::new()).unwrap();
        }
        assert!(backlog.unfinished().unwrap() < 20, "all has been read");
    }

    #[test]
    fn connections_of_both_protocols_and_families_are_told_as_the_network_sees_them() {
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        let wildcard = TcpListener::bind("[::]:0").unwrap();
        let mapped = TcpStream::connect(("127.0.0.1", wildcard.local_addr().unwrap().port())).unwrap();
        let mapped = (wildcard.accept().unwrap().0, mapped);
        let (one, other) = (UdpSocket::bind("[::1]:0").unwrap(), UdpSocket::bind("[::1]:0").unwrap());
        one.connect(other.local_addr().unwrap()).unwrap();
        let (local, remote) = (mapped.1.peer_addr().unwrap(), mapped.1.local_addr().unwrap());
        let expected = [
            Connection { protocol: TCP, local, remote },
            Connection { protocol: TCP, local: remote, remote: local },
            Connection { protocol: UDP, local: one.local_addr().unwrap(), remote: other.local_addr().unwrap() },
        ];
        let found = backlog.connections().unwrap();
        assert!(expected.iter().all(|one| found.contains(one)), "{expected:?} of {found:?}");
        let listening = [wildcard.local_addr().unwrap().port(), other.local_addr().unwrap().port()];
        assert!(!found.iter().any(|one| listening.contains(&one.local.port()) && one.remote.port() == 0));
    }

    #[test]
    fn cut_messages_stand_for_nothing() {
        assert_eq!((queued(&[2, LISTEN]), unread(&[]), unfinished(&[2, LAST_ACK])), (0, None, 0));
        assert_eq!((connection(TCP, &[]), connection(TCP, &[2; 30])), (None, None));
        let mut request = vec![0; 72];
        request[1] = SYN_RECV;
        assert_eq!((queued(&request), unread(&request), handshake(&request)), (0, None, 1));
    }
}
