use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use netlink_packet_route::link::MacVlanMode;
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::sys::socket::{AddressFamily, MsgFlags, SockaddrLike, SockaddrStorage, bind, send};
use tranship_types::NetworkIdentity;

use crate::NetworkError;
use crate::capture::{link_local, open_rtnl};
use crate::link::{self, Link};
use crate::membership::Reporter;
use crate::multicast::Joined;
use crate::namespace::inside;
use crate::rtnl::Rtnl;

const BROADCAST: [u8; 6] = [0xff; 6];
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Tells the network where an identity lives now: to the switches, by any frame with its MAC; to the neighbours, by
/// gratuitous ARP (RFC 5227, section 3; both forms, since some listen to the one and some to the other only) and
/// unsolicited neighbour advertisements (RFC 4861, section 7.2.6); to switches that listen to IGMP or MLD, by reports of the multicast
/// groups that are joined there now.
pub struct Announcer {
    netns: PathBuf,
    outlets: Vec<Outlet>,
    joined: Joined,
    macvlans: Vec<Link>,
    rtnl: Rtnl,
}

/// The way out by one interface.
struct Outlet {
    name: String,
    index: u32,
    socket: OwnedFd,
    /// What tells of its addresses.
    frames: Vec<Vec<u8>>,
    /// Where reports come from.
    reporter: Reporter,
}

impl Announcer {
    /// Opens the sockets inside `netns` and builds the frames, so that [`announce`](Self::announce) only sends. The value
    /// holds sockets in the namespace, which keep the namespace alive.
    ///
    /// # Errors
    /// An interface of the identity that is not there, or the system's refusal.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity) -> Result<Self, NetworkError> {
        inside(netns, || {
            let refused = |what: String| {
                move |e: nix::Error| {
                    NetworkError::refused(format!("{what} in network namespace {}", netns.display()), e.desc())
                }
            };
            let addresses: Vec<_> = getifaddrs()
                .map_err(refused("list the interfaces".into()))?
                .filter_map(|i| Some((i.interface_name, i.address?)))
                .collect();
            let mut outlets = Vec::new();
            for interface in &identity.interfaces {
                let is_ours = |(name, address): &&(String, SockaddrStorage)| {
                    *name == interface.name && address.family() == Some(AddressFamily::Packet)
                };
                let Some(device) = addresses.iter().find(is_ours).and_then(|(_, a)| a.as_link_addr()) else {
                    return Err(refused(format!("find interface {}", interface.name))(nix::Error::ENODEV));
                };
                // Protocol 0: a socket for sending, which receives nothing.
                let open = || {
                    let fd = tranship_sys::socket::new(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
                    bind(fd.as_raw_fd(), device)?;
                    Ok::<_, std::io::Error>(fd)
                };
                let what =
                    || format!("open a packet socket on {} in network namespace {}", interface.name, netns.display());
                let socket = open().map_err(|e| NetworkError::refused(what(), e))?;
                outlets.push(Outlet {
                    name: interface.name.clone(),
                    index: device.ifindex() as u32,
                    socket,
                    frames: frames(interface.mac, &interface.addresses),
                    reporter: reporter(interface.mac, &interface.addresses),
                });
            }
            let joined = Joined::here(netns)?;
            let mut rtnl = open_rtnl(netns)?;
            let macvlans = macvlans(netns, &mut rtnl)?;
            Ok(Self { netns: netns.to_owned(), outlets, joined, macvlans, rtnl })
        })
    }

    /// Puts macvlans back into bridge mode and sends the announcements, after [`Gate::open`](crate::Gate::open). May be
    /// repeated; a recovery that finds the gate open must repeat it.
    ///
    /// # Errors
    /// The first refusal; the rest was tried all the same.
    pub fn announce(&mut self) -> Result<(), NetworkError> {
        // Before the frames, although it can wait for the kernel's rtnl lock: when a switch has learnt where the container is, it sends what comes from
        // a neighbour on this node nowhere any more. What goes to the container's old place meanwhile is forwarded.
        let switched = set_mode(&self.netns, &mut self.rtnl, &self.macvlans, MacVlanMode::Bridge);
        let (joined, mut failure) = match self.joined.read() {
            Ok(joined) => (joined, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        for Outlet { name, index, socket, frames, reporter } in &self.outlets {
            let reports = joined.iter().filter(|one| one.index == *index).flat_map(|one| reporter.reports(one));
            for frame in frames.iter().cloned().chain(reports) {
                if let Err(e) = send(socket.as_raw_fd(), &frame, MsgFlags::empty()) {
                    let what = format!("announce interface {name} of network namespace {}", self.netns.display());
                    failure.get_or_insert(NetworkError::refused(what, e.desc()));
                }
            }
        }
        failure.map_or(switched, Err)
    }
}

/// On the source, once the copy on the destination is the live one and this one's gate is closed for good: lets this
/// node's other macvlans on the same parent reach the live one. Until then the kernel delivers their frames to the copy
/// that is still here, since in bridge mode it knows the MAC for a local one. The way back is [`step_forward`].
///
/// # Errors
/// The kernel's refusal.
pub fn stand_aside(netns: &Path) -> Result<(), NetworkError> {
    switch_all(netns, MacVlanMode::Vepa)
}

/// Takes [`stand_aside`] back: the copy that is here is the live one again. Changes nothing where nothing stood aside.
///
/// # Errors
/// The kernel's refusal.
pub fn step_forward(netns: &Path) -> Result<(), NetworkError> {
    switch_all(netns, MacVlanMode::Bridge)
}

fn switch_all(netns: &Path, mode: MacVlanMode) -> Result<(), NetworkError> {
    inside(netns, || {
        let mut rtnl = open_rtnl(netns)?;
        let macvlans = macvlans(netns, &mut rtnl)?;
        set_mode(netns, &mut rtnl, &macvlans, mode)
    })
}

fn macvlans(netns: &Path, rtnl: &mut Rtnl) -> Result<Vec<Link>, NetworkError> {
    let all = link::links(rtnl).map_err(|e| {
        NetworkError::refused(format!("read the interfaces of network namespace {}", netns.display()), e)
    })?;
    Ok(all.into_iter().filter(|l| l.kind == "macvlan").collect())
}

fn set_mode(netns: &Path, rtnl: &mut Rtnl, macvlans: &[Link], mode: MacVlanMode) -> Result<(), NetworkError> {
    let mut result = Ok(());
    for link in macvlans {
        if let Err(e) = link::set_macvlan_mode(rtnl, link.index, mode) {
            let what = format!("set macvlan {} of network namespace {} to mode {mode:?}", link.name, netns.display());
            result = result.and(Err(NetworkError::refused(what, e)));
        }
    }
    result
}

/// The addresses that reports of memberships come from; none of IPv4 is one, too (RFC 3376, section 4.2.13).
fn reporter(mac: [u8; 6], addresses: &[(IpAddr, u8)]) -> Reporter {
    let v4 = addresses.iter().find_map(|(address, _)| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    let v6 = addresses.iter().find_map(|(address, _)| match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some(*v6),
        _ => None,
    });
    Reporter { mac, v4: v4.unwrap_or(Ipv4Addr::UNSPECIFIED), v6: v6.unwrap_or_else(|| link_local(mac)) }
}

fn frames(mac: [u8; 6], addresses: &[(IpAddr, u8)]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for (address, _) in addresses {
        match address {
            IpAddr::V4(v4) => {
                frames.push(arp(mac, *v4, 1));
                frames.push(arp(mac, *v4, 2));
            }
            IpAddr::V6(v6) => frames.push(neighbour_advertisement(mac, *v6)),
        }
    }
    if frames.is_empty() {
        // The one address that the kernel gives an interface by itself; in any case the switches learn the MAC.
        frames.push(neighbour_advertisement(mac, link_local(mac)));
    }
    frames
}

/// The hardware address of a group (RFC 1112, section 6.4; RFC 2464, section 7).
pub(crate) fn group_mac(group: IpAddr) -> [u8; 6] {
    match group {
        IpAddr::V4(group) => {
            let [_, a, b, c] = group.octets();
            [1, 0, 0x5e, a & 0x7f, b, c]
        }
        IpAddr::V6(group) => {
            let [.., a, b, c, d] = group.octets();
            [0x33, 0x33, a, b, c, d]
        }
    }
}

/// The header of a frame.
pub(crate) fn ethernet(destination: [u8; 6], source: [u8; 6], protocol: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(96);
    frame.extend_from_slice(&destination);
    frame.extend_from_slice(&source);
    frame.extend_from_slice(&protocol.to_be_bytes());
    frame
}

fn arp(mac: [u8; 6], address: Ipv4Addr, operation: u16) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, 0x0806);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4]);
    frame.extend_from_slice(&operation.to_be_bytes());
    frame.extend_from_slice(&mac);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&if operation == 1 { [0; 6] } else { BROADCAST });
    frame.extend_from_slice(&address.octets());
    frame.resize(60, 0);
    frame
}

fn neighbour_advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    // Type 136, override flag, target, and the option "target link-layer address".
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend_from_slice(&address.octets());
    message.extend_from_slice(&[2, 1]);
    message.extend_from_slice(&mac);
    let sum = icmp_checksum(address, ALL_NODES, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());

    let mut frame = ethernet(ALL_NODES_MAC, mac, 0x86dd);
    frame.extend_from_slice(&[0x60, 0, 0, 0]);
    frame.extend_from_slice(&(message.len() as u16).to_be_bytes());
    // Next header ICMPv6; hop limit 255, or receivers ignore it.
    frame.extend_from_slice(&[58, 255]);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&ALL_NODES.octets());
    frame.extend_from_slice(&message);
    frame
}

/// The checksum of a message of ICMPv6 in which it is still 0.
pub(crate) fn icmp_checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let mut bytes = [source.octets(), destination.octets()].concat();
    bytes.extend_from_slice(&(message.len() as u32).to_be_bytes());
    bytes.extend_from_slice(&[0, 0, 0, 58]);
    bytes.extend_from_slice(message);
    !fold(&bytes)
}

/// The internet checksum's sum in one's complement (RFC 1071).
pub(crate) fn fold(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c.get(1).copied().unwrap_or(0)]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn advertisements_carry_a_checksum_that_receivers_accept(mac: [u8; 6], address: u128) {
            let address = Ipv6Addr::from(address);
            let frame = neighbour_advertisement(mac, address);
            prop_assert_eq!(frame.len(), 14 + 40 + 32);
            let message = &frame[54..];
            prop_assert!(matches!(icmp_checksum(address, ALL_NODES, message), 0 | 0xffff));
        }
    }

    #[test]
    fn arp_frames_are_of_the_least_length_and_name_the_sender() {
        let mac = [2, 0, 0, 0, 0, 9];
        let frame = arp(mac, Ipv4Addr::new(10, 0, 0, 9), 2);
        assert_eq!(frame.len(), 60);
        assert_eq!(&frame[..14], [BROADCAST.as_slice(), &mac, &[8, 6]].concat());
        assert_eq!(&frame[20..32], [&[0, 2][..], &mac, &[10, 0, 0, 9]].concat());
    }
}
