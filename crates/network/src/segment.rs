//! Which of the node's bridges a container is attached to, and whether another node is on the same segment.

use std::net::IpAddr;
use std::path::Path;

use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::NetworkError;
use crate::backlog::Backlog;
use crate::capture::open_rtnl;
use crate::link::{self, Link};
use crate::namespace::{self, inside};
use crate::reply::Refusal;
use crate::rtnl::Rtnl;
use crate::vxlan::is_vxlan;

/// An interface of a container that is attached to a bridge of the node by a veth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgePort {
    /// The interface's name in the container.
    pub interface: String,
    /// The bridge's name on the node.
    pub bridge: String,
    /// The interface's addresses, those of the kernel's own making included.
    pub addresses: Vec<IpAddr>,
}

/// The interfaces in the network namespace at `netns` (any path to one) that are attached to bridges of the calling
/// thread's namespace, the node's.
///
/// # Errors
/// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the kernel's refusals.
pub fn bridge_ports(netns: &Path) -> Result<Vec<BridgePort>, NetworkError> {
    let refused = |e: Refusal| NetworkError::refused(format!("read the interfaces of {}", netns.display()), e);
    let node = namespace::own()?;
    let (inner, addresses, node_id) = inside(netns, || {
        let mut rtnl = open_rtnl(netns)?;
        let links = link::links(&mut rtnl).map_err(refused)?;
        let id = link::namespace_id(&mut rtnl, &node).map_err(refused)?;
        Ok((links, link::addresses(&mut rtnl).map_err(refused)?, id))
    })?;
    let mut rtnl = open_rtnl(netns)?;
    let mut ports = Vec::new();
    for link in inner.iter().filter(|link| link.kind == "veth") {
        let Some(below) = link.below.filter(|_| link.below_nsid.is_some() && link.below_nsid == node_id) else {
            continue;
        };
        let end = link::by_index(&mut rtnl, below).map_err(refused)?;
        let Some(controller) = end.and_then(|end| end.controller) else { continue };
        let Some(bridge) = link::by_index(&mut rtnl, controller).map_err(refused)?.filter(|b| b.kind == "bridge")
        else {
            continue;
        };
        let own = addresses.iter().filter(|(index, ..)| *index == link.index).map(|(_, address, _)| *address);
        ports.push(BridgePort { interface: link.name.clone(), bridge: bridge.name, addresses: own.collect() });
    }
    Ok(ports)
}

/// Whether the segment of a bridge of the node leads beyond the node: a port is neither a veth nor a tap device, or the
/// way to `peer`, another node's address, leaves by the bridge. A bridge that does not exist leads nowhere.
///
/// # Errors
/// The kernel's refusals.
pub fn leads_beyond_node(bridge: &str, peer: Option<IpAddr>) -> Result<bool, NetworkError> {
    let refused = |e: Refusal| NetworkError::refused(format!("read the ports of bridge {bridge}"), e);
    let mut rtnl = Rtnl::open().map_err(|e| refused(e.into()))?;
    let links = link::links(&mut rtnl).map_err(refused)?;
    let Some(own) = links.iter().find(|link| link.name == bridge).map(|link| link.index) else { return Ok(false) };
    // A path that was kept for a container that has moved leads to the other node's bridge alone.
    let is_local = |port: &Link| ["veth", "tun"].contains(&port.kind.as_str()) || is_vxlan(port);
    let leads_out = |port: &Link| port.controller == Some(own) && !is_local(port);
    if links.iter().any(leads_out) {
        return Ok(true);
    }
    match peer {
        // A node without a way to its peer is told so elsewhere.
        Some(peer) => Ok(interface_towards(&mut rtnl, peer).is_ok_and(|index| index == Some(own))),
        None => Ok(false),
    }
}

/// The index of the interface by which packets to an address leave.
fn interface_towards(rtnl: &mut Rtnl, address: IpAddr) -> Result<Option<u32>, Refusal> {
    let mut question = RouteMessage::default();
    let (family, length, address) = match address {
        IpAddr::V4(address) => (AddressFamily::Inet, 32, RouteAddress::Inet(address)),
        IpAddr::V6(address) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(address)),
    };
    (question.header.address_family, question.header.destination_prefix_length) = (family, length);
    question.attributes.push(RouteAttribute::Destination(address));
    let RouteNetlinkMessage::NewRoute(route) = rtnl.get(RouteNetlinkMessage::GetRoute(question))? else {
        return Err(Refusal::nonsense("an answer that is no route"));
    };
    Ok(route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    }))
}

/// The addresses that sockets in the network namespace at `netns` are connected to, one for each connection of TCP or
/// connected socket of UDP, those to the namespace itself included.
///
/// # Errors
/// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the kernel's refusals.
pub fn connected_addresses(netns: &Path) -> Result<Vec<IpAddr>, NetworkError> {
    let connections = Backlog::prepare(netns)?.connections()?;
    Ok(connections.into_iter().map(|connection| connection.remote.ip()).collect())
}
