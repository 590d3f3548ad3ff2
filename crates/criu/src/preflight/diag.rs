//! Asks a network namespace for its sockets (sock_diag(7)), as CRIU does, without touching any of them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, send, socket_with,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A Unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UnixSocket {
    /// Inode of the socket at the other end, 0 for none.
    pub peer: u64,
    /// Address; abstract ones begin with `@`.
    pub name: String,
    /// Whether it sends and receives datagrams (SOCK_DGRAM).
    pub is_datagram: bool,
    /// Whether it has something to read.
    pub unread: bool,
    /// Whether it has sent something that was not read.
    pub unsent: bool,
    /// Whether it listens.
    pub listening: bool,
    /// Whether it is a connection, also one whose other end is closed.
    pub is_connection: bool,
    /// Inodes of connections that wait to be accepted; 0 where the other end is closed by now.
    pub waiting: Vec<u64>,
}

/// A TCP socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TcpSocket {
    /// Its state as the kernel numbers them (net/tcp_states.h).
    pub state: u8,
    /// Connections that wait to be accepted, for a listening one.
    pub waiting: u32,
    /// Local port.
    pub port: u16,
    /// Name of its upper layer protocol (`tls` …), empty for none.
    pub ulp: String,
    /// Whether it carries keys for MD5 signatures.
    pub md5: bool,
}

/// A connection of TCP that no program has any more, with bytes that its peer has not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ClosedConnection {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// So many bytes, the end of the stream counting for one.
    pub left: u32,
}

/// A netlink socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NetlinkSocket {
    pub port: u32,
    /// Multicast groups: one bit each.
    pub groups: Vec<u8>,
    /// Bytes that wait to be read.
    pub waiting: u32,
    pub protocol: u8,
    /// The group that it sends to, as it is connected; 0 for none.
    pub destination: u32,
}

/// The sockets of one network namespace, by inode.
#[derive(Debug, Clone, Default)]
pub(super) struct Sockets {
    pub unix: HashMap<u64, UnixSocket>,
    pub tcp: HashMap<u64, TcpSocket>,
    pub netlink: HashMap<u64, NetlinkSocket>,
    pub closed: Vec<ClosedConnection>,
}

impl Sockets {
    pub(super) fn extend(&mut self, other: Sockets) {
        self.unix.extend(other.unix);
        self.tcp.extend(other.tcp);
        self.netlink.extend(other.netlink);
        self.closed.extend(other.closed);
    }
}

/// State numbers that the rules speak of.
pub(super) const CLOSE: u8 = 7;
pub(super) const LISTEN: u8 = 10;
/// Likewise: it has, or had, another end.
const ESTABLISHED: u8 = 1;

/// Lists the sockets of the namespace that the file `namespace` (a /proc/PID/ns/net) stands for.
pub(super) fn sockets(namespace: &File) -> io::Result<Sockets> {
    inside(namespace, collect)
}

/// Asks from inside a network namespace. A thread of its own enters it, and ends there, so that nothing else of this program changes its place.
fn inside<T: Send>(namespace: &File, ask: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    tranship_sys::threads::apart("sockets", || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        ask()
    })?
}

/// Inodes of the packet sockets of a namespace that have joined something twice.
pub(super) fn joined_twice(namespace: &File) -> io::Result<HashSet<u64>> {
    const MEMBERSHIPS: u16 = 1;
    /// `struct packet_diag_mclist` of linux/packet_diag.h.
    const MEMBERSHIP: usize = 44;
    let mut found = HashSet::new();
    let request = [&[17, 0, 0, 0][..], &[0; 4], &2u32.to_ne_bytes(), &[0xff; 8]].concat();
    inside(namespace, || {
        dump(&request, |m| {
            let Some((inode, rest)) = u32_at(m, 4).zip(m.get(16..)) else { return };
            let all = attributes(rest).into_iter().filter(|(kind, _)| *kind == MEMBERSHIPS);
            let is_twice = |one: &[u8]| u32_at(one, 4).is_some_and(|count| count > 1);
            if all.flat_map(|(_, value)| value.chunks(MEMBERSHIP)).any(is_twice) {
                found.insert(u64::from(inode));
            }
        })
    })?;
    Ok(found)
}

fn collect() -> io::Result<Sockets> {
    let mut all = Sockets::default();
    // Requests after linux/unix_diag.h, linux/inet_diag.h and linux/netlink_diag.h; show name, peer, waiting connections, lengths of queues.
    let unix = [&[1, 0, 0, 0][..], &[0xff; 4], &[0; 4], &0x1du32.to_ne_bytes(), &[0xff; 8]].concat();
    dump(&unix, |m| drop(unix_socket(m).map(|(inode, s)| all.unix.insert(inode, s))))?;
    for family in [2u8, 10] {
        let request = [&[family, 6, 0, 0][..], &[0xff; 4], &[0; 40], &[0xff; 8]].concat();
        dump(&request, |m| {
            all.closed.extend(closed_connection(m));
            all.tcp.extend(tcp_socket(m));
        })?;
    }
    let netlink = [&[16, 255, 0, 0][..], &[0; 4], &0x03u32.to_ne_bytes(), &[0xff; 8]].concat();
    match dump(&netlink, |m| drop(netlink_socket(m).map(|(inode, s)| all.netlink.insert(inode, s)))) {
        // A kernel without this module cannot say more; `criu check` complains there in its own words.
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NOENT.raw_os_error()) => {}
        other => other?,
    }
    Ok(all)
}

/// Sends one dump request and hands each message's payload on.
fn dump(request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const REQUEST_AND_DUMP: u16 = 0x301;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
    let len = u32::try_from(16 + request.len()).map_err(io::Error::other)?;
    let mut message = Vec::with_capacity(16 + request.len());
    message.extend_from_slice(&len.to_ne_bytes());
    message.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend_from_slice(&REQUEST_AND_DUMP.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(request);
    send(&socket, &message, SendFlags::empty())?;
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let (_, got) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if each_message(&buffer[..got.min(buffer.len())], &mut each)? {
            return Ok(());
        }
    }
}

/// Walks the messages of one datagram; true when the dump is over.
pub(super) fn each_message(mut bytes: &[u8], each: &mut impl FnMut(&[u8])) -> io::Result<bool> {
    const ERROR: u16 = 2;
    const DONE: u16 = 3;
    while let (Some(len), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let len = len as usize;
        let Some(payload) = bytes.get(16..len) else { break };
        match kind {
            DONE => return Ok(true),
            ERROR => {
                let code = i32::from_ne_bytes(u32_at(payload, 0).unwrap_or(0).to_ne_bytes());
                return if code == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(-code)) };
            }
            _ => each(payload),
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

pub(super) fn unix_socket(m: &[u8]) -> Option<(u64, UnixSocket)> {
    const NAME: u16 = 0;
    const PEER: u16 = 2;
    const ICONS: u16 = 3;
    const LENGTHS: u16 = 4;
    const DATAGRAM: u8 = 2;
    let inode = u32_at(m, 4)?;
    let (kind, state) = (*m.get(1)?, *m.get(2)?);
    let mut s = UnixSocket {
        is_datagram: kind == DATAGRAM,
        listening: state == LISTEN,
        is_connection: kind != DATAGRAM && state == ESTABLISHED,
        ..UnixSocket::default()
    };
    for (kind, value) in attributes(m.get(16..)?) {
        match kind {
            NAME => s.name = String::from_utf8_lossy(value).trim_end_matches('\0').replace('\0', "@"),
            LENGTHS => {
                s.unread = u32_at(value, 0).is_some_and(|length| length > 0);
                s.unsent = u32_at(value, 4).is_some_and(|length| length > 0);
            }
            PEER => s.peer = u32_at(value, 0).unwrap_or(0).into(),
            ICONS => s.waiting = (0..value.len() / 4).filter_map(|i| u32_at(value, 4 * i).map(u64::from)).collect(),
            _ => {}
        }
    }
    Some((inode.into(), s))
}

pub(super) fn tcp_socket(m: &[u8]) -> Option<(u64, TcpSocket)> {
    const MD5SIG: u16 = 18;
    const ULP_INFO: u16 = 19;
    const ULP_INFO_NAME: u16 = 1;
    let mut s = TcpSocket {
        state: *m.get(1)?,
        port: u16::from_be_bytes(m.get(4..6)?.try_into().ok()?),
        waiting: u32_at(m, 56)?,
        ..TcpSocket::default()
    };
    let inode = u32_at(m, 68)?;
    for (kind, value) in attributes(m.get(72..)?) {
        match kind {
            MD5SIG => s.md5 = true,
            ULP_INFO => {
                let name = attributes(value).into_iter().find(|(k, _)| *k == ULP_INFO_NAME);
                let name = name.map_or(&[][..], |(_, v)| v);
                s.ulp = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
            }
            _ => {}
        }
    }
    Some((inode.into(), s))
}

/// In the states FIN_WAIT1, LAST_ACK and CLOSING the end of the stream is not acknowledged yet.
pub(super) fn closed_connection(m: &[u8]) -> Option<ClosedConnection> {
    let left = u32_at(m, 60)?;
    if !matches!(m.get(1)?, 4 | 9 | 11) || u32_at(m, 68)? != 0 || left == 0 {
        return None;
    }
    let end = |port: usize, address: usize| {
        let bytes: [u8; 16] = m.get(address..address + 16)?.try_into().ok()?;
        let address = match m.first()? {
            2 => IpAddr::from(<[u8; 4]>::try_from(&bytes[..4]).ok()?),
            _ => IpAddr::from(bytes).to_canonical(),
        };
        Some(SocketAddr::new(address, u16::from_be_bytes(m.get(port..port + 2)?.try_into().ok()?)))
    };
    Some(ClosedConnection { local: end(4, 8)?, remote: end(6, 24)?, left })
}

pub(super) fn netlink_socket(m: &[u8]) -> Option<(u64, NetlinkSocket)> {
    const MEMORY: u16 = 0;
    const GROUPS: u16 = 1;
    let mut s = NetlinkSocket {
        protocol: *m.get(2)?,
        port: u32_at(m, 4)?,
        destination: u32_at(m, 12)?,
        ..NetlinkSocket::default()
    };
    let inode = u32_at(m, 16)?;
    for (kind, value) in attributes(m.get(28..)?) {
        match kind {
            MEMORY => s.waiting = u32_at(value, 0).unwrap_or(0),
            GROUPS => s.groups = value.to_vec(),
            _ => {}
        }
    }
    Some((inode.into(), s))
}

/// Splits netlink attributes; the flags in the two highest bits of a type are dropped.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut all = Vec::new();
    while let (Some(len), Some(kind)) = (u16_at(bytes, 0), u16_at(bytes, 2)) {
        let len = usize::from(len);
        let Some(value) = bytes.get(4..len) else { break };
        all.push((kind & 0x3fff, value));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn inode(fd: impl AsFd) -> u64 {
        File::from(fd.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap().ino()
    }

    #[test]
    fn own_sockets_are_found_with_their_states_and_peers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (left, right) = UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let server = UnixListener::bind(dir.path().join("s")).unwrap();
        let waiting = UnixStream::connect(dir.path().join("s")).unwrap();
        let mut sender = UnixStream::connect(dir.path().join("s")).unwrap();
        io::Write::write_all(&mut sender, b"early").unwrap();

        let all = sockets(&File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
        let listening = &all.tcp[&inode(&listener)];
        assert_eq!((listening.state, listening.waiting), (LISTEN, 1));
        assert_eq!(listening.port, listener.local_addr().unwrap().port());
        assert_eq!(all.tcp[&inode(&client)].state, 1, "established");
        assert_eq!(all.tcp[&inode(&client)].ulp, "");
        assert_eq!(all.unix[&inode(&left)].peer, inode(&right));
        let server = &all.unix[&inode(&server)];
        assert!(server.listening && server.name.ends_with("/s"), "{server:?}");
        assert_eq!(server.waiting, [inode(&waiting), inode(&sender)]);
        assert_eq!((all.unix[&inode(&waiting)].unsent, all.unix[&inode(&sender)].unsent), (false, true));
    }

    #[test]
    fn netlink_sockets_tell_port_and_groups() {
        let s = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        bind(&s, &netlink::SocketAddrNetlink::new(0, 1)).unwrap();
        let all = sockets(&File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
        let found = &all.netlink[&inode(&s)];
        assert_ne!(found.port, 0);
        assert_eq!((found.groups[0], found.waiting), (1, 0));
    }

    #[test]
    fn cut_and_lying_messages_end_the_walk_without_a_panic() {
        for len in [0u32, 4, 15, 16, 17, 1000, u32::MAX] {
            let mut bytes = len.to_ne_bytes().to_vec();
            bytes.extend_from_slice(&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
            for cut in 0..=bytes.len() {
                let mut seen = 0;
                let walk = each_message(&bytes[..cut], &mut |_| seen += 1);
                assert!(!walk.unwrap() && seen <= 1);
            }
        }
        assert!(attributes(&[3, 0, 1, 0, 9]).is_empty());
        assert_eq!(unix_socket(&[1, 1]), None);
        assert_eq!(tcp_socket(&[2; 60]), None);
    }
}
