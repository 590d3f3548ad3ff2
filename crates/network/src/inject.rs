use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::libc;
use nix::sys::socket::{MsgFlags, SockaddrStorage, sendto};
use tranship_sys::packet::{OFFLOAD_HEADER, PacketSocket, TapDevice};
use tranship_sys::socket;
use tranship_types::{Attachment, NetworkIdentity};

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::hold::{HeldFrame, LONGEST, is_packet};
use crate::link;
use crate::namespace::{self, inside};
use crate::redirect;

/// The interface by which a namespace's own addresses reach each other.
pub(crate) const LOOPBACK: &str = "lo";
/// Its hardware address.
pub(crate) const LOOPBACK_MAC: [u8; 6] = [0; 6];

/// The hardware address that delivered packets come from: by it they pass a gate that is closed to those that come by themselves. No frame leaves with it.
pub(crate) const DELIVERED: [u8; 6] = [0x02, b't', b's', b'h', b'i', b'p'];

/// The one flag of the offload header that means something to a receiver that trusts nobody: this checksum is to be
/// computed. The other vouches for one that was verified.
const NEEDS_CHECKSUM: u8 = 1;

/// Delivers held frames to a container as if they arrived from the wire, on whichever node it runs on.
///
/// - A veth: sent out of its other end, the port of the node's bridge. That end leads nowhere but into the container.
/// - A macvlan: written to a tap device of ours on the node, from which everything is redirected (tc's mirred) to the
///   receiving side of the macvlan's parent. Nothing is sent there, so nothing can leak to the wire, whether the container
///   is there or not. The device vanishes with the injector and with its process.
///
/// - `lo`: what is behind the Ethernet header is sent inside the namespace by a raw socket. The kernel brings to `lo` what is sent to one of
///   its own addresses, whoever it is said to come from.
///
/// Frames to all or to a group go to the container's MAC instead: the parent's other macvlans have had theirs. Packets of IP come from a hardware
/// address of their own, and so pass a gate that is still closed to those that come by themselves.
///
/// The container's gate must be open, or [closed to what comes by itself alone](crate::Gate::open_but_to_packets).
pub struct Injector {
    netns: PathBuf,
    lines: Vec<Line>,
    buffer: Vec<u8>,
}

struct Line {
    name: String,
    mac: [u8; 6],
    outlet: Outlet,
}

enum Outlet {
    Veth(PacketSocket),
    Macvlan(TapDevice),
    Loopback(Loopback),
}

/// Raw sockets of IPv4 and IPv6 that send packets with their headers.
struct Loopback {
    v4: OwnedFd,
    v6: Option<OwnedFd>,
}

impl Loopback {
    fn open() -> io::Result<Self> {
        let raw = |family| socket::new(family, libc::SOCK_RAW | libc::SOCK_NONBLOCK, libc::IPPROTO_RAW);
        // A kernel without IPv6 has no packets of it.
        Ok(Self { v4: raw(libc::AF_INET)?, v6: raw(libc::AF_INET6).ok() })
    }

    /// Sends a packet of IP to where its header says.
    fn send(&self, packet: &[u8]) -> io::Result<()> {
        let (socket, to) = match (destination(packet), &self.v6) {
            (Some(to @ IpAddr::V4(_)), _) => (&self.v4, to),
            (Some(to @ IpAddr::V6(_)), Some(v6)) => (v6, to),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let to = SockaddrStorage::from(SocketAddr::new(to, 0));
        sendto(socket.as_raw_fd(), packet, &to, MsgFlags::empty())?;
        Ok(())
    }
}

/// Where a packet of IP goes, by its header; `None` if that is cut.
pub(crate) fn destination(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(Ipv4Addr::from(*packet.get(16..)?.first_chunk()?).into()),
        6 => Some(IpAddr::from(*packet.get(24..)?.first_chunk::<16>()?)),
        _ => None,
    }
}

impl Injector {
    /// Prepares the ways into `netns`, from the calling thread's namespace, the node's. Changes nothing about the
    /// container.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], an interface of the identity that is not there or hangs on
    /// something else; for macvlans also a kernel without tun, u32 or mirred. The container can be moved without: peers
    /// then wait for their retransmission timeouts.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity) -> Result<Self, NetworkError> {
        let node = namespace::own()?;
        let (below, loopback) = inside(netns, || {
            let mut rtnl = open_rtnl(netns)?;
            let failed = |e| NetworkError::refused(format!("look into network namespace {}", netns.display()), e);
            let node = link::namespace_id(&mut rtnl, &node).map_err(failed)?;
            let mut below = Vec::new();
            for interface in &identity.interfaces {
                let link = link::by_name(&mut rtnl, &interface.name).map_err(failed)?;
                below.push(link.and_then(|l| l.below.filter(|_| l.below_nsid.is_some() && l.below_nsid == node)));
            }
            let loopback = Loopback::open().map_err(|e| {
                NetworkError::refused(format!("open a raw socket in network namespace {}", netns.display()), e)
            })?;
            Ok((below, loopback))
        })?;
        let mut lines = vec![Line { name: LOOPBACK.to_owned(), mac: LOOPBACK_MAC, outlet: Outlet::Loopback(loopback) }];
        for (interface, below) in identity.interfaces.iter().zip(below) {
            let what =
                || format!("prepare to deliver packets to {} of network namespace {}", interface.name, netns.display());
            let below = below
                .ok_or_else(|| NetworkError::refused(what(), "there is no such interface that hangs on this node"))?;
            let refused = |e: io::Error| NetworkError::refused(what(), e);
            let outlet = match interface.attachment {
                Attachment::Bridge { .. } => {
                    let socket = PacketSocket::open().map_err(refused)?;
                    socket.listen(below, 0).map_err(refused)?;
                    Outlet::Veth(socket)
                }
                Attachment::Macvlan { .. } => {
                    let device = TapDevice::make("tranship%d").map_err(refused)?;
                    redirect::to_reception(&mut open_rtnl(netns)?, device.name(), below).map_err(|e| {
                        NetworkError::Refused {
                            what: what(),
                            why: e.to_string(),
                            remedy: "a kernel with CLS_U32 and NET_ACT_MIRRED is needed",
                        }
                    })?;
                    Outlet::Macvlan(device)
                }
            };
            lines.push(Line { name: interface.name.clone(), mac: interface.mac, outlet });
        }
        Ok(Self { netns: netns.to_owned(), lines, buffer: Vec::with_capacity(LONGEST) })
    }

    /// Delivers the frames in their order; returns how many. Frames for no interface of the container, and what is no
    /// frame, are left out. Some 5 µs a frame.
    ///
    /// # Errors
    /// The first refusal of the system; the rest was tried all the same.
    pub fn inject(&mut self, frames: &[HeldFrame]) -> Result<usize, NetworkError> {
        let (mut delivered, mut failure) = (0, None);
        for frame in frames {
            let Some(line) = self.lines.iter().find(|l| l.name == frame.interface) else { continue };
            if !(OFFLOAD_HEADER + 14..=LONGEST).contains(&frame.bytes.len()) {
                continue;
            }
            self.buffer.clear();
            self.buffer.extend_from_slice(&frame.bytes);
            self.buffer[0] &= NEEDS_CHECKSUM;
            let to = &mut self.buffer[OFFLOAD_HEADER..OFFLOAD_HEADER + 6];
            let to_many = to[0] & 1 == 1;
            if to != line.mac && !to_many {
                continue;
            }
            to.copy_from_slice(&line.mac);
            let frame = &mut self.buffer[OFFLOAD_HEADER..];
            if is_packet(frame) {
                frame[6..12].copy_from_slice(&DELIVERED);
            }
            let sent = match &line.outlet {
                Outlet::Veth(socket) => socket.send(&self.buffer),
                Outlet::Macvlan(device) => device.inject(&self.buffer),
                Outlet::Loopback(raw) => raw.send(&self.buffer[OFFLOAD_HEADER + 14..]),
            };
            match sent {
                Ok(()) => delivered += 1,
                Err(e) => {
                    let what =
                        format!("deliver a held packet to {} of network namespace {}", line.name, self.netns.display());
                    failure.get_or_insert(NetworkError::refused(what, e));
                }
            }
        }
        failure.map_or(Ok(delivered), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_that_a_peer_has_cut_goes_nowhere() {
        for (first, length, to) in [(0x45, 20, "7.7.7.7"), (0x60, 40, "707:707:707:707:707:707:707:707")] {
            let mut packet = vec![7; length];
            packet[0] = first;
            assert_eq!(destination(&packet), Some(to.parse().unwrap()));
            (0..length).for_each(|cut| assert_eq!(destination(&packet[..cut]), None, "{cut} bytes"));
        }
        assert_eq!(destination(&[7; 40]), None);
    }
}
