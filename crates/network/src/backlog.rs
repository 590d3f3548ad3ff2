use std::path::{Path, PathBuf};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

use crate::NetworkError;
use crate::namespace::inside;
use crate::reply::Messages;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_DONE: u16 = 3;
const REQUEST_AND_DUMP: u16 = 0x301;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP: u8 = 6;
const UDP: u8 = 17;
// net/tcp_states.h
const SYN_RECV: u8 = 3;
const FIN_WAIT1: u8 = 4;
const LAST_ACK: u8 = 9;
const LISTEN: u8 = 10;
const CLOSING: u8 = 11;

/// What the kernel has in a network namespace between programs and the network, as far as CRIU cannot carry it: connections that
/// wait to be accepted, datagrams that wait to be read, the end of connections that programs have closed.
pub struct Backlog {
    netns: PathBuf,
    socket: Socket,
    sequence: u32,
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
                socket.connect(&SocketAddr::new(0, 0))?;
                Ok(socket)
            };
            open().map_err(|e: std::io::Error| {
                NetworkError::refused(format!("open a socket in network namespace {}", netns.display()), e)
            })
        })?;
        Ok(Self { netns: netns.to_owned(), socket, sequence: 0 })
    }

    /// How many connections wait to be accepted, and how many sockets have datagrams that wait to be read.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn waiting(&mut self) -> Result<u32, NetworkError> {
        let listening = 1u32 << LISTEN;
        let kinds = [(AF_INET, TCP, listening), (AF_INET6, TCP, listening), (AF_INET, UDP, !0), (AF_INET6, UDP, !0)];
        self.count(&kinds, waiting)
    }

    /// How many connections are in the middle of their handshake: the client has not acknowledged yet that it was let in.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn handshakes(&mut self) -> Result<u32, NetworkError> {
        let begun = 1u32 << SYN_RECV;
        self.count(&[(AF_INET, TCP, begun), (AF_INET6, TCP, begun)], handshake)
    }

    /// How many connections that no program has any more still have something to send, or to be acknowledged: a program that
    /// closes a connection leaves the rest to the kernel.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn unfinished(&mut self) -> Result<u32, NetworkError> {
        let ending = (1u32 << FIN_WAIT1) | (1 << LAST_ACK) | (1 << CLOSING);
        self.count(&[(AF_INET, TCP, ending), (AF_INET6, TCP, ending)], unfinished)
    }

    fn count(&mut self, kinds: &[(u8, u8, u32)], of: fn(u8, &[u8]) -> u32) -> Result<u32, NetworkError> {
        let count = kinds.iter().try_fold(0, |sum, kind| Ok(sum + self.count_kind(*kind, of)?));
        count.map_err(|e: std::io::Error| {
            NetworkError::refused(format!("list the sockets of network namespace {}", self.netns.display()), e)
        })
    }

    /// The sum of what the sockets of an address family and protocol count for that are in these states.
    fn count_kind(&mut self, kind: (u8, u8, u32), of: fn(u8, &[u8]) -> u32) -> std::io::Result<u32> {
        let (family, protocol, states) = kind;
        self.sequence += 1;
        // struct inet_diag_req_v2 of linux/inet_diag.h: family, protocol, no extensions, states, any socket.
        let request = [&[family, protocol, 0, 0][..], &states.to_ne_bytes(), &[0; 48]].concat();
        let mut message = Vec::with_capacity(16 + request.len());
        message.extend_from_slice(&(16 + request.len() as u32).to_ne_bytes());
        message.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend_from_slice(&REQUEST_AND_DUMP.to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(&request);
        self.socket.send(&message, 0)?;
        let mut count = 0;
        loop {
            let (answer, _) = self.socket.recv_from_full()?;
            for m in Messages(&answer).filter(|m| m.sequence == self.sequence) {
                match (m.kind, m.verdict()) {
                    (NLMSG_DONE, _) => return Ok(count),
                    (_, Some(verdict)) => verdict.map_err(|refusal| std::io::Error::other(refusal.to_string()))?,
                    (SOCK_DIAG_BY_FAMILY, None) => count += of(protocol, m.payload),
                    _ => {}
                }
            }
        }
    }
}

/// What a socket (struct inet_diag_msg) counts for: one that listens for the connections in its queue, one of UDP for one if it
/// has anything to read.
fn waiting(protocol: u8, socket: &[u8]) -> u32 {
    let queue = word(socket, 56);
    match (socket.get(1), queue) {
        (Some(_), Some(bytes)) if protocol == UDP => u32::from(bytes > 0),
        (Some(&LISTEN), Some(connections)) => connections,
        _ => 0,
    }
}

/// One, if it is in the middle of its handshake.
fn handshake(_: u8, socket: &[u8]) -> u32 {
    u32::from(socket.get(1) == Some(&SYN_RECV))
}

/// One, if it belongs to no file and has bytes to send or to be acknowledged.
fn unfinished(_: u8, socket: &[u8]) -> u32 {
    let (queue, inode) = (word(socket, 60), word(socket, 68));
    u32::from(inode == Some(0) && queue.is_some_and(|bytes| bytes > 0))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

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
    fn datagrams_wait_until_they_are_read() {
        let mut backlog = Backlog::prepare(Path::new("/proc/thread-self/ns/net")).unwrap();
        let sockets: Vec<_> = (0..50).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        sockets.iter().for_each(|s| assert_eq!(s.send_to(b"x", s.local_addr().unwrap()).unwrap(), 1));
        assert!(backlog.waiting().unwrap() >= 50);
        sockets.iter().for_each(|s| assert_eq!(s.recv(&mut [0; 4]).unwrap(), 1));
        assert!(backlog.waiting().unwrap() < 50);
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
    fn cut_messages_stand_for_nothing() {
        assert_eq!(waiting(TCP, &[2, LISTEN]), 0);
        assert_eq!(waiting(UDP, &[]), 0);
        let mut request = vec![0; 72];
        request[1] = SYN_RECV;
        assert_eq!((waiting(TCP, &request), waiting(UDP, &request), handshake(TCP, &request)), (0, 0, 1));
    }
}
