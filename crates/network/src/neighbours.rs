//! The neighbour table: whoever the container talks to it need not ask for again.

use std::collections::HashMap;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourHeader, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::RouteType;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tranship_types::Neighbour;

use crate::reply::Refusal;
use crate::rtnl::Rtnl;

/// More than these are not carried; whoever is missing is asked for when it is needed. (Half of what the kernel keeps.)
const MOST: usize = 512;

/// The neighbours whose MAC is known, by the interfaces of these indices and names.
pub(crate) fn known(rtnl: &mut Rtnl, names: &HashMap<u32, String>) -> Result<Vec<Neighbour>, Refusal> {
    Ok(read(&rtnl.list(&RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()))?, names))
}

pub(crate) fn read(answers: &[RouteNetlinkMessage], names: &HashMap<u32, String>) -> Vec<Neighbour> {
    let of = |message: &NeighbourMessage| {
        let permanent = message.header.state == NeighbourState::Permanent;
        let usable = matches!(
            message.header.state,
            NeighbourState::Reachable | NeighbourState::Stale | NeighbourState::Delay | NeighbourState::Probe
        );
        if !permanent && !usable {
            return None;
        }
        let address = message.attributes.iter().find_map(|a| match a {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => Some(IpAddr::V4(*a)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => Some(IpAddr::V6(*a)),
            _ => None,
        })?;
        let mac = message.attributes.iter().find_map(|a| match a {
            NeighbourAttribute::LinkLocalAddress(mac) => mac.as_slice().try_into().ok(),
            _ => None,
        })?;
        Some(Neighbour { address, mac, interface: names.get(&message.header.ifindex)?.clone(), permanent })
    };
    let mut all: Vec<Neighbour> = answers
        .iter()
        .filter_map(|answer| match answer {
            RouteNetlinkMessage::NewNeighbour(message) => of(message),
            _ => None,
        })
        .collect();
    // Those that somebody has set are to be kept in any case.
    all.sort_by_key(|n| (!n.permanent, n.address));
    all.truncate(MOST);
    all
}

/// Makes a neighbour known on the interface of this index: for good if somebody has set it so, else until it is asked again.
pub(crate) fn add(rtnl: &mut Rtnl, index: u32, neighbour: &Neighbour) -> Result<(), Refusal> {
    let mut message = NeighbourMessage::default();
    message.header = NeighbourHeader {
        family: if neighbour.address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet },
        ifindex: index,
        state: if neighbour.permanent { NeighbourState::Permanent } else { NeighbourState::Stale },
        kind: RouteType::Unspec,
        ..NeighbourHeader::default()
    };
    message.attributes = vec![
        NeighbourAttribute::Destination(neighbour.address.into()),
        NeighbourAttribute::LinkLocalAddress(neighbour.mac.to_vec()),
    ];
    rtnl.change(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
}
