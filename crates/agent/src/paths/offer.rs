//! Which paths a move is to keep, and what stands in their way on either node.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;

use tranship_coordinator::Failure;
use tranship_engine::EtcFiles;
use tranship_network::{
    Bridge, BridgePort, VXLAN_BITS, bridge_ports, connected_addresses, is_own_address, leads_beyond_node,
};
use tranship_types::{Attachment, Blocker, BlockerKind, MoveOptions, NodeName, OfferedPath, PathEnd};
use tranship_wire::message::Offer;

use super::record::{Member, PathRecord};
use crate::groups::Unit;
use crate::inspection::{self, Inspection};
use crate::local_networks;
use crate::node::{Node, failed};

fn blocker(cause: impl Into<String>, remedy: impl Into<String>) -> Blocker {
    Blocker::new(BlockerKind::Network, cause, remedy)
}

/// Everything that can be found out about a container's move to a node on this one, with the paths that the move is to
/// keep. The containers `at_once` move to the same node at the same moment, and need no path to this one.
pub fn inspect(
    node: &Node,
    name: &str,
    (to, options): (&NodeName, &MoveOptions),
    (unit, at_once): (Option<&Unit>, &BTreeSet<String>),
) -> Result<Inspection, Failure> {
    let mut found = inspection::inspect(node, name, options, unit)?;
    let notes = offer(node, &mut found, (to, options), at_once)?;
    found.findings.changes.extend(notes);
    Ok(found)
}

/// Adds the paths to an offer that the move to `to` is to keep, and what stands in their way to the blockers. Returns
/// what the user has to know besides.
fn offer(
    node: &Node,
    found: &mut Inspection,
    (to, options): (&NodeName, &MoveOptions),
    at_once: &BTreeSet<String>,
) -> Result<Vec<String>, Failure> {
    let is_asked = options.keep_path.unwrap_or(node.config.network.keep_path);
    // A container that joins another one's network comes with that one.
    if found.offer.network.is_none() || !node.peers().has(to) {
        return Ok(Vec::new());
    }
    let records = PathRecord::readable(node);
    // A move that has nothing to do with paths asks neither engines nor the kernel about them.
    if !is_asked && records.is_empty() {
        return Ok(Vec::new());
    }
    let own = local_networks::namespace(found.container.init);
    let ports = bridge_ports(&own).map_err(failed)?;
    let mut notes = Vec::new();
    let peer = local_networks::address_of(node, to);
    for bridge in ports.iter().map(|port| port.bridge.as_str()).collect::<BTreeSet<_>>() {
        if leads_beyond_node(bridge, peer).map_err(failed)? {
            continue;
        }
        let network = local_networks::name(found, &ports, bridge);
        let left = lost_beyond(&records, (bridge, to), found, &own)?;
        match (is_asked, left) {
            (true, Some(cause)) => {
                found.blockers.push(blocker(cause, "move it to that node first, or leave out --keep-path"));
                continue;
            }
            (false, Some(cause)) => notes.push(cause),
            _ => {}
        }
        if !is_asked {
            continue;
        }
        let ends = local_networks::ends(node, bridge, Some(&own))?.into_iter().map(|(_, end)| end);
        let ends: Vec<PathEnd> = ends.filter(|end| !at_once.contains(&end.container)).collect();
        if ends.is_empty() {
            continue;
        }
        match offered(node, found, (to, peer), (bridge, &network, &ports), (&records, ends))? {
            Ok(path) => found.offer.paths.push(path),
            Err(blocker) => found.blockers.push(blocker),
        }
    }
    // All at once: they replace those that were there.
    let beyond: Vec<PathEnd> = found.offer.paths.iter().flat_map(|path| path.ends.clone()).collect();
    EtcFiles::add_beyond(&mut found.offer.config, &beyond);
    if !found.offer.paths.is_empty()
        && let Err(error) = tranship_network::try_vxlan()
    {
        found.blockers.push(without_vxlan(&error.to_string(), &node.config.node));
    }
    Ok(notes)
}

fn without_vxlan(error: &str, node: &NodeName) -> Blocker {
    let (cause, remedy) = error.rsplit_once("; ").unwrap_or((error, "load the module `vxlan`"));
    blocker(format!("no path can be kept: {cause} (on node {node})"), format!("{remedy}, or leave out --keep-path"))
}

/// What a container on this bridge would lose that it reaches on other nodes than `to` by paths that are kept.
fn lost_beyond(
    records: &[PathRecord],
    (bridge, to): (&str, &NodeName),
    found: &Inspection,
    own: &Path,
) -> Result<Option<String>, Failure> {
    let name = &found.container.name;
    let is_other = |one: &&PathRecord| one.bridge == bridge && one.peer != *to && !one.is_unused();
    let others = records.iter().filter(is_other);
    let peers = connected_addresses(own).map_err(failed)?;
    for record in others {
        let is_same_engine = |one: &Member| one.engine.is_none_or(|engine| engine.as_str() == found.offer.engine);
        let came = |one: &Member| one.home == record.peer && one.end.container == *name && is_same_engine(one);
        let is_member = record.members.iter().any(came);
        let connected = |end: &&PathEnd| local_networks::count(&peers, &end.addresses) > 0;
        let beyond = record.members.iter().map(|one| &one.end).filter(|end| end.container != *name);
        let lost: Vec<&str> =
            record.beyond.iter().chain(beyond).filter(connected).map(|end| end.container.as_str()).collect();
        let lost = lost.into_iter().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" and ");
        if is_member || !lost.is_empty() {
            let (network, peer) = (&record.network, &record.peer);
            let whom = if lost.is_empty() { "those there".to_owned() } else { lost };
            return Ok(Some(format!(
                "network {network} is held together with node {peer}, and on {to}, {name} would not reach {whom} any more"
            )));
        }
    }
    Ok(None)
}

type Offered = Result<OfferedPath, Blocker>;

fn offered(
    node: &Node,
    found: &Inspection,
    (to, peer): (&NodeName, Option<IpAddr>),
    (bridge, network, ports): (&str, &str, &[BridgePort]),
    (records, ends): (&[PathRecord], Vec<PathEnd>),
) -> Result<Offered, Failure> {
    let here = &node.config.node;
    let own =
        tranship_network::bridges().map_err(failed)?.into_iter().find(|one| one.name == bridge).unwrap_or_default();
    if let Err(blocker) = joinable(node, &own) {
        return Ok(Err(blocker));
    }
    let known = records.iter().find(|one| one.bridge == bridge && one.peer == *to);
    let id = known.map_or_else(|| number(records, here, to, network), |record| record.id);
    if let Err(failure) = PathRecord::read(node, id) {
        return Ok(Err(blocker(failure.message, "see `tranship doctor`, or leave out --keep-path")));
    }
    let (udp_port, source, destination) = match route(node, known, (to, peer))? {
        Ok(route) => route,
        Err(blocker) => return Ok(Err(blocker)),
    };
    let on_bridge = ports.iter().filter(|port| port.bridge == bridge);
    let is_there = |one: &&tranship_engine::AttachedNetwork| {
        on_bridge.clone().any(|port| one.addresses.iter().any(|address| port.addresses.contains(address)))
    };
    Ok(Ok(OfferedPath {
        id,
        port: udp_port,
        network: network.to_owned(),
        interface: on_bridge.clone().map(|port| port.interface.clone()).next().unwrap_or_default(),
        names: found.networks.iter().find(is_there).map(|one| one.names.clone()).unwrap_or_default(),
        source,
        destination,
        guarded: own.addresses.iter().map(|(address, _)| *address).collect(),
        ends,
    }))
}

/// The UDP port of a path, this node's address and the other one's: those of the record where the path is there already, as
/// other ones would cut it off.
fn route(
    node: &Node,
    known: Option<&PathRecord>,
    (to, peer): (&NodeName, Option<IpAddr>),
) -> Result<Result<(u16, IpAddr, IpAddr), Blocker>, Failure> {
    let here = &node.config.node;
    if let Some(record) = known.filter(|record| !record.is_unused())
        && is_own_address(record.local).map_err(failed)?
    {
        return Ok(Ok((record.port, record.local, record.remote)));
    }
    let Some(destination) = peer else {
        let cause = format!("the address of node {to} is not known on node {here}");
        return Ok(Err(blocker(cause, "write it into [peers]")));
    };
    if destination.is_loopback() {
        let cause = format!("node {to} is called at {destination}, which leads to node {here} itself");
        return Ok(Err(blocker(cause, "write its own address into [peers], or leave out --keep-path")));
    }
    Ok(match address_towards(destination) {
        Ok(source) => Ok((node.config.network.path_port, source, destination)),
        Err(error) => {
            let cause = format!("node {here} has no way to {destination}, node {to}: {error}");
            Err(blocker(cause, "see `ip route`"))
        }
    })
}

/// Why a bridge of this node cannot be joined with another one.
fn joinable(node: &Node, bridge: &Bridge) -> Result<(), Blocker> {
    let (here, name) = (&node.config.node, &bridge.name);
    let cannot = |why: &str| format!("the path cannot be kept: bridge {name} on node {here} {why}");
    if !node.config.network.allow_paths {
        let cause = format!("node {here} lets none of its bridges be joined with another node's (allow_paths)");
        return Err(blocker(cause, "set allow_paths in [network] of its configuration, or leave out --keep-path"));
    }
    if bridge.spanning_tree {
        let cause = cannot("takes part in the spanning tree protocol");
        return Err(blocker(cause, format!("`ip link set {name} type bridge stp_state 0`, or leave out --keep-path")));
    }
    if bridge.vlans {
        return Err(blocker(cannot("tells VLANs apart"), "move the containers together, or leave out --keep-path"));
    }
    if let Some(port) = bridge.way_out() {
        let cause = cannot(&format!("leads out of the node by {port}"));
        return Err(blocker(cause, "move the containers together, or leave out --keep-path"));
    }
    Ok(())
}

/// This node's address towards another one; no packet is sent.
fn address_towards(peer: IpAddr) -> std::io::Result<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect((peer, 9))?;
    Ok(socket.local_addr()?.ip())
}

/// The number of a new path: by the nodes and the network the same on both, if no other path of this node has it.
fn number(records: &[PathRecord], one: &NodeName, other: &NodeName, network: &str) -> u32 {
    let (first, second) = if one.as_str() < other.as_str() { (one, other) } else { (other, one) };
    // FNV-1a.
    let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let text = format!("{first}\n{second}\n{network}");
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, add);
    let most = (1 << VXLAN_BITS) - 1;
    let first = (hash % most) as u32;
    let mut numbers = (0..most as u32).map(|more| (first + more) % most as u32 + 1);
    numbers.find(|id| !records.iter().any(|record| record.id == *id)).unwrap_or(1)
}

/// The bridge that an interface of a container is on.
pub fn bridge_of<'a>(bridges: &'a [Bridge], ports: &[BridgePort], interface: &str) -> Option<&'a Bridge> {
    let port = ports.iter().find(|port| port.interface == interface)?;
    bridges.iter().find(|bridge| bridge.name == port.bridge)
}

/// What stands in the way of an offer's paths on this node, which is the destination.
pub fn obstacles(node: &Node, offer: &Offer) -> Vec<Blocker> {
    let mut found = Vec::new();
    if !offer.paths.is_empty()
        && let Err(error) = tranship_network::try_vxlan()
    {
        found.push(without_vxlan(&error.to_string(), &node.config.node));
    }
    for path in &offer.paths {
        let looked = bridge_for(offer, path).and_then(|bridge| obstacle(node, offer, path, bridge.as_ref()));
        match looked {
            Ok(blocker) => found.extend(blocker),
            Err(failure) => found.push(blocker(failure.message, "see that node's agent's log")),
        }
    }
    found
}

/// The bridge that the container will be on: the one that it names where no engine attaches it, else the one that has
/// its subnet. None where it is still to be made.
fn bridge_for(offer: &Offer, path: &OfferedPath) -> Result<Option<Bridge>, Failure> {
    let Some((_, identity)) = &offer.network else { return Ok(None) };
    let Some(interface) = identity.interfaces.iter().find(|one| one.name == path.interface) else { return Ok(None) };
    let fits = |bridge: &Bridge| interface.addresses.iter().any(|(address, _)| bridge.has_subnet_of(*address));
    let by_name = |bridge: &Bridge| interface.attachment == Attachment::Bridge { bridge: bridge.name.clone() };
    let attaches = identity.given_by.is_some();
    let all = tranship_network::bridges().map_err(failed)?;
    Ok(all.into_iter().find(|bridge| if attaches { fits(bridge) } else { by_name(bridge) }))
}

/// What stands in the way of one path on this node.
pub fn obstacle(
    node: &Node,
    offer: &Offer,
    path: &OfferedPath,
    bridge: Option<&Bridge>,
) -> Result<Option<Blocker>, Failure> {
    let here = &node.config.node;
    if !is_own_address(path.destination).map_err(failed)? {
        let cause =
            format!("the path cannot be kept: node {here} is called at {}, which is not its own", path.destination);
        let remedy = "if the address was its own when the path was made, end the path with `tranship release`; else \
                      addresses are translated between the nodes: leave out --keep-path";
        return Ok(Some(blocker(cause, remedy)));
    }
    if is_own_address(path.source).map_err(failed)? {
        let cause =
            format!("the path cannot be kept: {}, from which it would come, is an address of node {here}", path.source);
        return Ok(Some(blocker(cause, "write the nodes' own addresses into [peers], or leave out --keep-path")));
    }
    let Some(bridge) = bridge else { return Ok(None) };
    if let Err(blocker) = joinable(node, bridge) {
        return Ok(Some(blocker));
    }
    let here_already: Vec<PathEnd> =
        local_networks::ends(node, &bridge.name, None)?.into_iter().map(|(_, end)| end).collect();
    let came = PathRecord::read(node, path.id)?.map(|record| came(&record, here)).unwrap_or_default();
    Ok(clash(&here_already, path, (&offer.container, &came)).map(|(end, other)| {
        let address = end.addresses.iter().find(|a| other.addresses.contains(a));
        let address = address.map(ToString::to_string).unwrap_or_default();
        let cause = format!(
            "the path cannot be kept: container {} on node {here} has {address}, as {} on the node that {} leaves",
            end.container, other.container, offer.container
        );
        blocker(cause, "give one of them another address, or leave out --keep-path")
    }))
}

/// The containers that came to node `own` by a path, or are about to.
fn came(record: &PathRecord, own: &NodeName) -> BTreeSet<String> {
    let all = record.members.iter().chain(&record.pending).filter(|one| one.home != *own);
    all.map(|one| one.end.container.clone()).collect()
}

/// A container of this node, and one that stays on the other node, with the same address. One that `came` after the other node
/// had looked is the same container.
fn clash<'a>(
    here: &'a [PathEnd],
    path: &'a OfferedPath,
    (moved, came): (&str, &BTreeSet<String>),
) -> Option<(&'a PathEnd, &'a PathEnd)> {
    let shares = |one: &PathEnd, other: &PathEnd| one.addresses.iter().any(|a| other.addresses.contains(a));
    let is_itself = |one: &PathEnd, other: &PathEnd| one.container == other.container && came.contains(&one.container);
    let taken = |end: &'a PathEnd| path.ends.iter().find(|other| shares(end, other) && !is_itself(end, other));
    here.iter().filter(|end| end.container != moved).find_map(|end| Some((end, taken(end)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_nodes_come_to_the_same_number() {
        let node = |name: &str| -> NodeName { name.parse().unwrap() };
        let of = |one: &str, other: &str, network: &str| number(&[], &node(one), &node(other), network);
        assert_eq!(of("a", "b", "shop"), of("b", "a", "shop"));
        assert_ne!(of("a", "b", "shop"), of("a", "b", "shop2"));
        assert_ne!(of("a", "b", "shop"), of("a", "c", "shop"));
        assert!((1..1 << VXLAN_BITS).contains(&of("a", "b", "shop")));
    }

    #[test]
    fn a_container_that_has_come_meanwhile_does_not_clash_with_itself() {
        let end = |name: &str, last: u8| PathEnd {
            container: name.to_owned(),
            names: Vec::new(),
            addresses: vec![IpAddr::from([10, 79, 0, last])],
        };
        let at = IpAddr::from([10, 0, 0, 1]);
        let path = OfferedPath {
            id: 1,
            port: 7077,
            network: "shop".to_owned(),
            interface: "eth0".to_owned(),
            names: Vec::new(),
            source: at,
            destination: at,
            guarded: Vec::new(),
            ends: vec![end("app", 6), end("web", 7)],
        };
        let clash = |here: &[PathEnd], came: &[&str]| {
            let came = came.iter().map(|name| (*name).to_owned()).collect();
            clash(here, &path, ("db", &came)).map(|(end, other)| (end.container.clone(), other.container.clone()))
        };
        assert_eq!(clash(&[end("app", 6)], &["app"]), None);
        assert_eq!(clash(&[end("app", 6)], &[]), Some(("app".to_owned(), "app".to_owned())), "another one of its name");
        assert_eq!(clash(&[end("app", 7)], &["app"]), Some(("app".to_owned(), "web".to_owned())));
        assert_eq!(clash(&[end("db", 6), end("cache", 8)], &[]), None);
    }

    #[test]
    fn a_path_that_is_there_is_offered_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let node = Node::for_test(directory.path(), "", Vec::new());
        let at = |text: &str| -> IpAddr { text.parse().unwrap() };
        let to: NodeName = "b".parse().unwrap();
        let mut record = PathRecord::for_test("b", &["app"]);
        (record.port, record.local, record.remote) = (7078, at("127.0.0.1"), at("192.0.2.7"));
        let route = |record: &PathRecord| route(&node, Some(record), (&to, Some(at("127.0.0.2")))).unwrap();
        assert_eq!(route(&record), Ok((7078, at("127.0.0.1"), at("192.0.2.7"))));
        // The node has another address by now.
        record.local = at("192.0.2.1");
        assert!(route(&record).unwrap_err().to_string().contains("127.0.0.2"), "not by the peer's address");
        (record.local, record.members) = (at("127.0.0.1"), Vec::new());
        assert!(route(&record).is_err(), "nobody needs that one any more");
    }
}
