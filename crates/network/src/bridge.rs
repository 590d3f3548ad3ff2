//! The node's bridges, as far as one of them can be joined with another node's.

use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{BridgeStpState, InfoBridge, InfoData, LinkInfo, LinkMessage};

use crate::NetworkError;
use crate::link::{self, Link};
use crate::reply::Refusal;
use crate::vxlan::{infos, is_vxlan, open};

/// A bridge of the node, as far as another one can be joined with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bridge {
    /// Its name.
    pub name: String,
    /// Its own addresses with their prefix lengths, those of the kernel's own making included.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Whether it takes part in the spanning tree protocol.
    pub spanning_tree: bool,
    /// Whether it tells VLANs apart.
    pub vlans: bool,
    /// Its ports but for those of kept paths: the name, and whether it leads out of the node as far as can be told.
    pub ports: Vec<(String, bool)>,
}

impl Bridge {
    /// The first port that leads out of the node.
    pub fn way_out(&self) -> Option<&str> {
        self.ports.iter().find(|(_, leads_out)| *leads_out).map(|(name, _)| name.as_str())
    }

    /// Whether the address is in a subnet of the bridge.
    pub fn has_subnet_of(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, prefix)| shares_prefix(*own, address, *prefix))
    }
}

fn shares_prefix(one: IpAddr, other: IpAddr, prefix: u8) -> bool {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    let ((one, length), (other, others)) = (bits(one), bits(other));
    length == others && (prefix == 0 || (one ^ other) >> (128 - u32::from(prefix.min(128))) == 0)
}

/// All bridges of the node.
///
/// # Errors
/// The kernel's refusals.
pub fn bridges() -> Result<Vec<Bridge>, NetworkError> {
    let mut rtnl = open()?;
    let mut read = || -> Result<Vec<Bridge>, Refusal> {
        let messages = rtnl.list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let addresses = link::addresses(&mut rtnl)?;
        let read = |answer: &RouteNetlinkMessage| match answer {
            RouteNetlinkMessage::NewLink(message) => Some((Link::read(message), settings(message))),
            _ => None,
        };
        let links: Vec<(Link, Settings)> = messages.iter().filter_map(read).collect();
        let bridge = |(bridge, settings): &(Link, Settings)| Bridge {
            name: bridge.name.clone(),
            addresses: addresses.iter().filter(|(of, ..)| *of == bridge.index).map(|(_, at, p)| (*at, *p)).collect(),
            spanning_tree: settings.spanning_tree,
            vlans: settings.vlans,
            ports: links
                .iter()
                .filter(|(port, _)| port.controller == Some(bridge.index) && !is_vxlan(port))
                .map(|(port, _)| (port.name.clone(), !["veth", "tun"].contains(&port.kind.as_str())))
                .collect(),
        };
        Ok(links.iter().filter(|(link, _)| link.kind == "bridge").map(bridge).collect())
    };
    read().map_err(|e| NetworkError::refused("read the node's bridges", e))
}

#[derive(Default)]
struct Settings {
    spanning_tree: bool,
    vlans: bool,
}

fn settings(message: &LinkMessage) -> Settings {
    let mut found = Settings::default();
    for info in message.attributes.iter().filter_map(infos).flatten() {
        let LinkInfo::Data(InfoData::Bridge(all)) = info else { continue };
        for one in all {
            match one {
                InfoBridge::StpState(state) => found.spanning_tree = *state != BridgeStpState::Disabled,
                InfoBridge::VlanFiltering(filters) => found.vlans = *filters,
                _ => {}
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_are_told_by_their_prefixes() {
        let at = |text: &str| -> IpAddr { text.parse().unwrap() };
        assert!(shares_prefix(at("10.79.0.1"), at("10.79.0.77"), 24));
        assert!(!shares_prefix(at("10.79.0.1"), at("10.79.1.77"), 24));
        assert!(shares_prefix(at("fd79::1"), at("fd79::77"), 64) && !shares_prefix(at("fd79::1"), at("fd78::1"), 64));
        assert!(!shares_prefix(at("10.79.0.1"), at("fd79::1"), 0));
    }
}
