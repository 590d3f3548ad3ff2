//! Datagrams that have come and no program has read: CRIU drops what is in the queues of UDP sockets.

use std::collections::HashMap;
use std::fs;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};
use tranship_sys::packet::{IPV4, IPV6, OFFLOAD_HEADER};
use tranship_sys::process::take_descriptor;
use tranship_sys::socket;
use tranship_types::{Interface, NetworkIdentity};

use crate::NetworkError;
use crate::announce::{fold, group_mac};
use crate::backlog::{Backlog, Receiver};
use crate::capture::link_local;
use crate::hold::HeldFrame;
use crate::inject::{LOOPBACK, LOOPBACK_MAC};

/// Room for the longest datagram, or for as many as the kernel merges (`UDP_GRO`).
const LONGEST: usize = 64 << 10;
/// Room for what the kernel tells of a datagram, also where a program has asked for all that there is.
const CONTROL: usize = 1 << 10;
/// Errors of earlier sends that a socket tells before it gives a datagram: one, as a rule.
const ERRORS: u32 = 8;
/// Who frames are from: a hardware address that nobody has (locally administered).
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 0];

const SO_PEEK_OFF: i32 = 42;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
const ETHERNET_HEADER: usize = 14;
const DONT_FRAGMENT: u16 = 0x4000;
/// How many times a datagram may be forwarded yet, where the kernel does not tell (RFC 1700).
const HOPS: u8 = 64;
/// Of `struct virtio_net_hdr`: the checksum is to be computed, and the datagram to be cut into fragments.
const NEEDS_CHECKSUM: u8 = 1;
const FRAGMENTS: u8 = 3;

/// What no program of a container has read.
#[derive(Debug, Default)]
pub struct Unread {
    /// The datagrams as frames, those of each socket in their order, for an [`Injector`](crate::Injector).
    pub frames: Vec<HeldFrame>,
    /// How many sockets have datagrams that are not among them.
    pub left: u32,
}

/// Datagrams of one socket.
struct Datagram {
    from: SocketAddr,
    to: IpAddr,
    /// The index of the interface that it came by, 0 where that is not known.
    interface: u32,
    /// Time to live, or hop limit.
    hops: u8,
    /// Type of service, or traffic class.
    class: u8,
    payload: Vec<u8>,
}

/// Looks for datagrams that no program has read, in the namespace that `backlog` and `identity` are of, in sockets of the processes `pids`,
/// which must stand still: these sockets have other options for the time of the look. What is found stays in its queue, so that a container which goes on where
/// it is has lost nothing. `bound` is how many bytes of frames there may be.
///
/// Not among them is what a socket of the container's has sent to a group, or to an address that is its own on one link only (`fe80::`), and was
/// brought back to it.
///
/// # Errors
/// The system's refusal to list sockets.
pub fn unread(
    backlog: &mut Backlog,
    identity: &NetworkIdentity,
    pids: &[u32],
    bound: usize,
) -> Result<Unread, NetworkError> {
    let receivers = backlog.unread()?;
    let mut all = Unread::default();
    if receivers.is_empty() {
        return Ok(all);
    }
    let sockets = descriptors(pids, &receivers);
    // A datagram to a group is delivered to all sockets that are in it, however many have a copy.
    let (mut to_groups, mut bytes) = (HashMap::<HeldFrame, u32>::new(), 0);
    for receiver in &receivers {
        let peeked = sockets.get(&receiver.inode).map(|socket| peek(socket.as_fd(), bound - bytes));
        let Some(Ok((datagrams, mut complete))) = peeked else {
            all.left += 1;
            continue;
        };
        let mut of_this = HashMap::<HeldFrame, u32>::new();
        for datagram in &datagrams {
            let frame = frame(datagram, receiver, identity).filter(|frame| bytes + frame.bytes.len() <= bound);
            let Some(frame) = frame else {
                complete = false;
                continue;
            };
            if frame.is_to_group() {
                let (here, before) =
                    (of_this.entry(frame.clone()).or_default(), to_groups.entry(frame.clone()).or_default());
                *here += 1;
                if *here <= *before {
                    continue;
                }
                *before = *here;
            }
            bytes += frame.bytes.len();
            all.frames.push(frame);
        }
        all.left += u32::from(!complete);
    }
    Ok(all)
}

/// A second descriptor of each of these sockets, by its inode.
fn descriptors(pids: &[u32], receivers: &[Receiver]) -> HashMap<u32, OwnedFd> {
    let mut found = HashMap::new();
    for pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let inode = || {
                let target = fs::read_link(entry.path()).ok()?;
                target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u32>().ok()
            };
            let Some(inode) = inode().filter(|inode| receivers.iter().any(|receiver| receiver.inode == *inode)) else {
                continue;
            };
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(socket) = number.and_then(|number| take_descriptor(*pid, number).ok()) {
                found.entry(inode).or_insert(socket);
            }
        }
    }
    found
}

/// Options that a socket has for the time of a look; then it has again what it had.
struct Asked<'a> {
    socket: BorrowedFd<'a>,
    before: Vec<(i32, i32, i32)>,
}

impl<'a> Asked<'a> {
    /// Has the kernel go from datagram to datagram, and tell what there is to know of each.
    fn all(socket: BorrowedFd<'a>) -> io::Result<Self> {
        const V4: [(i32, i32, i32); 3] = [
            (libc::IPPROTO_IP, libc::IP_PKTINFO, 1),
            (libc::IPPROTO_IP, libc::IP_RECVTTL, 1),
            (libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
        ];
        const V6: [(i32, i32, i32); 3] = [
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
        ];
        let is_v6 = socket::int_option(socket, libc::SOL_SOCKET, libc::SO_DOMAIN)? == libc::AF_INET6;
        let mut asked = Self { socket, before: Vec::new() };
        asked.set((libc::SOL_SOCKET, SO_PEEK_OFF, 0))?;
        // One of IPv6 receives datagrams of IPv4, too.
        V4.iter().chain(V6.iter().filter(|_| is_v6)).try_for_each(|option| asked.set(*option))?;
        Ok(asked)
    }

    fn set(&mut self, (level, name, value): (i32, i32, i32)) -> io::Result<()> {
        let before = socket::int_option(self.socket, level, name)?;
        if before != value {
            socket::set_option(self.socket, level, name, &value.to_ne_bytes())?;
        }
        // The kernel moves on how far it has got.
        if before != value || name == SO_PEEK_OFF {
            self.before.push((level, name, before));
        }
        Ok(())
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        for (level, name, value) in &self.before {
            if let Err(error) = socket::set_option(self.socket, *level, *name, &value.to_ne_bytes()) {
                tracing::warn!(level, name, %error, "a socket has not got an option back");
            }
        }
    }
}

/// The datagrams in a socket's queue, which stay there: all, or the first ones up to `room` bytes; and whether it is all. The kernel begins with the first
/// one each time, so that the time grows with the square of their number.
fn peek(socket: BorrowedFd<'_>, room: usize) -> io::Result<(Vec<Datagram>, bool)> {
    let _asked = Asked::all(socket)?;
    let (mut buffer, mut control) = (vec![0; LONGEST], vec![0; CONTROL]);
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let (mut found, mut bytes, mut errors) = (Vec::new(), 0, 0);
    while bytes <= room {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let message = match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN) => return Ok((found, true)),
            // What became of an earlier send.
            Err(_) if errors < ERRORS => {
                errors += 1;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let from = message.address.as_ref().and_then(sender).ok_or(io::ErrorKind::InvalidData)?;
        let about = about(message.cmsgs()?);
        let length = message.bytes;
        bytes += length;
        let to = about.to.ok_or(io::ErrorKind::InvalidData)?;
        // A merged one is as many as it was merged from.
        let payload = &buffer[..length];
        let each = about.segment.filter(|segment| *segment > 0).unwrap_or(length).max(1);
        let mut pieces: Vec<&[u8]> = payload.chunks(each).collect();
        if pieces.is_empty() {
            pieces.push(payload);
        }
        let About { interface, hops, class, .. } = about;
        found.extend(pieces.into_iter().map(|piece| Datagram {
            from,
            to,
            interface,
            hops,
            class,
            payload: piece.to_vec(),
        }));
    }
    Ok((found, false))
}

/// What the kernel tells besides a datagram.
struct About {
    to: Option<IpAddr>,
    interface: u32,
    hops: u8,
    class: u8,
    /// Bytes of each of those that were merged.
    segment: Option<usize>,
}

fn about(messages: impl Iterator<Item = ControlMessageOwned>) -> About {
    let mut about = About { to: None, interface: 0, hops: HOPS, class: 0, segment: None };
    for message in messages {
        match message {
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                about.to = Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes()));
                about.interface = u32::try_from(info.ipi_ifindex).unwrap_or(0);
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                about.to = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                about.interface = info.ipi6_ifindex;
            }
            ControlMessageOwned::Ipv4Ttl(hops) | ControlMessageOwned::Ipv6HopLimit(hops) => {
                about.hops = u8::try_from(hops).unwrap_or(HOPS);
            }
            ControlMessageOwned::Ipv4Tos(class) => about.class = class,
            ControlMessageOwned::Ipv6TClass(class) => about.class = u8::try_from(class).unwrap_or(0),
            ControlMessageOwned::UdpGroSegments(segment) => about.segment = usize::try_from(segment).ok(),
            _ => {}
        }
    }
    about
}

fn sender(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = || address.as_sockaddr_in().map(|v4| SocketAddr::new(v4.ip().into(), v4.port()));
    let v6 = || address.as_sockaddr_in6().map(|v6| SocketAddr::new(v6.ip().to_canonical(), v6.port()));
    v4().or_else(v6)
}

/// The frame in which a datagram comes; `None` where there is no way in for it.
fn frame(datagram: &Datagram, receiver: &Receiver, identity: &NetworkIdentity) -> Option<HeldFrame> {
    let (from, to) = (datagram.from.ip(), datagram.to);
    let owner =
        |address: IpAddr| identity.interfaces.iter().find(|i| i.addresses.iter().any(|(own, _)| *own == address));
    let on_a_link = |address: IpAddr| identity.interfaces.iter().any(|i| address == link_local(i.mac));
    let is_own = |address: IpAddr| address.is_loopback() || owner(address).is_some() || on_a_link(address);
    if is_own(from) {
        // An address on a link is none without the link.
        let comes_back = is_own(to) && !matches!(to, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let packet = packet(datagram, receiver.port, u32::MAX)?;
        return comes_back.then(|| framed(LOOPBACK, LOOPBACK_MAC, packet));
    }
    let by_index = |index| identity.interfaces.iter().find(|interface| interface.index == index);
    let interface: &Interface = by_index(datagram.interface)
        .or_else(|| by_index(receiver.interface))
        .or_else(|| owner(to))
        .or_else(|| identity.interfaces.first())?;
    let hardware = match to {
        group if group.is_multicast() => group_mac(group),
        IpAddr::V4(_) if owner(to).is_none() => [0xff; 6],
        _ => interface.mac,
    };
    Some(framed(&interface.name, hardware, packet(datagram, receiver.port, interface.mtu)?))
}

/// A packet of IP behind the kernel's note on what is still to be done with it.
type Packet = ([u8; OFFLOAD_HEADER], Vec<u8>);

fn framed(interface: &str, to: [u8; 6], (note, packet): Packet) -> HeldFrame {
    let protocol = if packet[0] >> 4 == 4 { IPV4 } else { IPV6 };
    let bytes = [&note[..], &to, &SENDER, &protocol.to_be_bytes(), &packet].concat();
    HeldFrame { interface: interface.to_owned(), bytes }
}

/// The datagram as a packet of IP. What is longer than `mtu` bytes is marked so that the kernel fragments it, and computes its checksum.
fn packet(datagram: &Datagram, port: u16, mtu: u32) -> Option<Packet> {
    let Datagram { from, to, hops, class, payload, .. } = datagram;
    let length = u16::try_from(UDP_HEADER + payload.len()).ok()?;
    let ports = [from.port().to_be_bytes(), port.to_be_bytes()].concat();
    let mut udp = [&ports[..], &length.to_be_bytes(), &[0, 0], payload].concat();
    let (addresses, mut header, fragment) = match (from.ip(), to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let addresses = [from.octets(), to.octets()].concat();
            let whole = length.checked_add(20)?;
            let fits = u32::from(whole) <= mtu;
            // Fragments are told by their number, which no two datagrams of a sender have at once.
            let number = if fits { 0 } else { fold(&udp) };
            let mut header = [&[0x45, *class][..], &whole.to_be_bytes(), &number.to_be_bytes()].concat();
            header.extend(if fits { DONT_FRAGMENT } else { 0 }.to_be_bytes());
            header.extend([*hops, UDP, 0, 0]);
            header.extend(&addresses);
            let sum = !fold(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            (addresses, header, (!fits).then(|| mtu - 20))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let addresses = [from.octets(), to.octets()].concat();
            let first = (6 << 28) | (u32::from(*class) << 20);
            let mut header = [&first.to_be_bytes()[..], &length.to_be_bytes(), &[UDP, *hops]].concat();
            header.extend(&addresses);
            let fits = u32::from(length) + 40 <= mtu;
            // Each has a header of its own for that.
            (addresses, header, (!fits).then(|| mtu - 48))
        }
        _ => return None,
    };
    let pseudo = [&addresses[..], &u32::from(length).to_be_bytes(), &[0, 0, 0, UDP]].concat();
    let (mut note, start) = ([0; OFFLOAD_HEADER], header.len());
    let sum = match fragment {
        // Zero stands for none.
        None => match !fold(&[&pseudo[..], &udp].concat()) {
            0 => u16::MAX,
            sum => sum,
        },
        Some(size) => {
            let numbers = [start + ETHERNET_HEADER + UDP_HEADER, size as usize & !7, start + ETHERNET_HEADER, 6];
            (note[0], note[1]) = (NEEDS_CHECKSUM, FRAGMENTS);
            for (place, number) in note[2..].chunks_exact_mut(2).zip(numbers) {
                place.copy_from_slice(&(number as u16).to_ne_bytes());
            }
            fold(&pseudo)
        }
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    header.extend(udp);
    Some((note, header))
}
