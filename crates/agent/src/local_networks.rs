//! What of a container's connections depends on this node: containers on a bridge whose segment ends here, and
//! addresses that the node translates.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tranship_api::{LocalNetwork, NetworkNeighbour};
use tranship_coordinator::Failure;
use tranship_engine::{AttachedNetwork, Engine, Summary};
use tranship_network::{BridgePort, NetworkError, NodeConntrack, bridge_ports, connected_addresses, leads_beyond_node};
use tranship_types::{NodeName, PathEnd};

use crate::inspection::Inspection;
use crate::node::{Node, failed};

/// A running container with interfaces on the container's bridges.
struct Other {
    name: String,
    engine: Arc<dyn Engine>,
    ports: Vec<BridgePort>,
    /// What its sockets are connected to.
    peers: Vec<IpAddr>,
}

impl Other {
    fn addresses(&self, bridge: &str) -> Vec<IpAddr> {
        addresses(&self.ports, bridge)
    }
}

fn addresses(ports: &[BridgePort], bridge: &str) -> Vec<IpAddr> {
    let here = ports.iter().filter(|port| port.bridge == bridge);
    // The kernel makes link-local addresses by itself.
    here.flat_map(|port| &port.addresses).filter(|address| !is_link_local(address)).copied().collect()
}

pub fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// How many of a container's connections are with one that has these addresses.
pub fn count(peers: &[IpAddr], addresses: &[IpAddr]) -> u64 {
    peers.iter().filter(|peer| addresses.contains(peer)).count() as u64
}

pub fn namespace(pid: u32) -> PathBuf {
    format!("/proc/{pid}/ns/net").into()
}

fn identity(namespace: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(namespace).ok().map(|link| (link.dev(), link.ino()))
}

/// The networks on which a container's move to `to` would part it from others. Those that `leave` for the same node
/// with it do not count as such.
pub fn find(
    node: &Node,
    found: &Inspection,
    to: &NodeName,
    leave: &BTreeSet<String>,
) -> Result<Vec<LocalNetwork>, Failure> {
    let container = &found.container;
    let own = namespace(container.init);
    let ports = bridge_ports(&own).map_err(failed)?;
    if ports.is_empty() {
        return Ok(Vec::new());
    }
    let peer = address_of(node, to);
    let mut bridges = BTreeSet::new();
    for bridge in ports.iter().map(|port| port.bridge.as_str()).collect::<BTreeSet<_>>() {
        if !leads_beyond_node(bridge, peer).map_err(failed)? {
            bridges.insert(bridge);
        }
    }
    if bridges.is_empty() {
        return Ok(Vec::new());
    }
    let peers = connected_addresses(&own).map_err(failed)?;
    let others = others(node, Some(&own), &bridges)?;
    let network = |bridge: &&str| {
        let here = |other: &&Other| other.ports.iter().any(|port| port.bridge == *bridge);
        let others: Vec<&Other> = others.iter().filter(here).collect();
        let own_addresses = addresses(&ports, bridge);
        let mut neighbours: Vec<NetworkNeighbour> = others
            .iter()
            .filter(|other| !leave.contains(&other.name))
            .map(|other| neighbour(other, bridge, &peers))
            .filter(|neighbour| neighbour.connections > 0 || !neighbour.names.is_empty())
            .collect();
        if neighbours.is_empty() {
            return None;
        }
        neighbours.sort_by(|a, b| (a.connections == 0, &a.container).cmp(&(b.connections == 0, &b.container)));
        let linked = linked((&own_addresses, &peers), &others, bridge);
        let mut together: Vec<String> = match linked.is_empty() {
            false => linked.into_iter().collect(),
            true => neighbours.iter().map(|neighbour| neighbour.container.clone()).collect(),
        };
        together.insert(0, container.name.clone());
        let name = name(found, &ports, bridge);
        Some(LocalNetwork { name, bridge: (*bridge).to_owned(), neighbours, together, kept: false })
    };
    Ok(bridges.iter().filter_map(network).collect())
}

/// Two containers on one network that ends at this node.
pub struct Link<'a> {
    /// Their names.
    pub ends: [&'a str; 2],
    /// Whether they have open connections with each other; else one can find the other by name.
    pub is_connected: bool,
}

/// The links between running containers, as far as these would be parted where one of them moves to one of the nodes `to`.
pub fn links<'a>(
    node: &Node,
    running: &'a [(Arc<dyn Engine>, Summary)],
    to: &[NodeName],
) -> Result<Vec<Link<'a>>, Failure> {
    let mut ends_here: BTreeMap<String, bool> = BTreeMap::new();
    let mut found: Vec<(&str, Other)> = Vec::new();
    for (engine, one) in running {
        let path = namespace(one.init);
        let looked = || -> Result<_, NetworkError> { Ok((bridge_ports(&path)?, connected_addresses(&path)?)) };
        let (mut ports, peers) = match looked() {
            Ok(looked) => looked,
            // It has ended meanwhile, or is moved by itself, as if it had no links.
            Err(error) => {
                tracing::warn!(container = one.name, %error, "its network cannot be looked at");
                continue;
            }
        };
        for BridgePort { bridge, .. } in &ports {
            if !ends_here.contains_key(bridge) {
                let leads = |to: &NodeName| leads_beyond_node(bridge, address_of(node, to)).map_err(failed);
                let leads: Vec<bool> = to.iter().map(leads).collect::<Result<_, Failure>>()?;
                ends_here.insert(bridge.clone(), leads.contains(&false));
            }
        }
        ports.retain(|port| ends_here[&port.bridge]);
        if !ports.is_empty() {
            found.push((&one.name, Other { name: one.name.clone(), engine: Arc::clone(engine), ports, peers }));
        }
    }
    let mut links = Vec::new();
    for bridge in ends_here.keys() {
        let here = |(_, other): &&(&str, Other)| other.ports.iter().any(|port| port.bridge == *bridge);
        let here: Vec<_> =
            found.iter().filter(here).map(|(name, other)| (*name, neighbour(other, bridge, &[]), other)).collect();
        for (number, (name, own, container)) in here.iter().enumerate() {
            for (other_name, other, other_container) in &here[number + 1..] {
                let connections =
                    count(&container.peers, &other.addresses) + count(&other_container.peers, &own.addresses);
                let is_connected = connections > 0;
                if is_connected || !own.names.is_empty() || !other.names.is_empty() {
                    links.push(Link { ends: [name, other_name], is_connected });
                }
            }
        }
    }
    Ok(links)
}

/// How many of the container's connections have addresses that this node translates.
pub fn translated(found: &Inspection) -> Result<u64, NetworkError> {
    let Some((path, identity)) = &found.offer.network else { return Ok(0) };
    let mut tracked = NodeConntrack::prepare(path, identity)?;
    if tracked.any()? { tracked.translated() } else { Ok(0) }
}

/// The address of another node's agent; `None` where it has a name that does not resolve.
pub fn address_of(node: &Node, peer: &NodeName) -> Option<IpAddr> {
    let table = node.peers();
    Some(table.address(peer)?.to_socket_addrs().ok()?.next()?.ip())
}

/// What the engine calls the network on a bridge, or else CNI, or else the node.
pub fn name(found: &Inspection, ports: &[BridgePort], bridge: &str) -> String {
    let here = addresses(ports, bridge);
    let of_engine =
        found.networks.iter().find(|network| network.addresses.iter().any(|address| here.contains(address)));
    if let Some(network) = of_engine {
        return network.name.clone();
    }
    let cni = found.offer.network.iter().flat_map(|(_, identity)| &identity.cni);
    let is_here = |interface: &str| ports.iter().any(|port| port.bridge == bridge && port.interface == interface);
    let of_cni = cni.filter(|one| is_here(&one.interface)).map(|one| one.network.clone()).next();
    of_cni.unwrap_or_else(|| bridge.to_owned())
}

/// The running containers of all engines with interfaces on these bridges, but for those in the network namespace
/// `own`.
fn others(node: &Node, own: Option<&Path>, bridges: &BTreeSet<&str>) -> Result<Vec<Other>, Failure> {
    let mut others = Vec::new();
    for engine in node.engines().filter(|engine| engine.is_present()) {
        for one in engine.list().map_err(failed)? {
            let path = namespace(one.init);
            let is_own = |other| own.is_some_and(|own| identity(own) == Some(other));
            if one.init == 0 || identity(&path).is_none_or(is_own) {
                continue;
            }
            let looked = || -> Result<_, NetworkError> {
                let ports = bridge_ports(&path)?;
                let here = ports.iter().any(|port| bridges.contains(port.bridge.as_str()));
                Ok(if here { Some((ports, connected_addresses(&path)?)) } else { None })
            };
            match looked() {
                Ok(Some((ports, peers))) => {
                    others.push(Other { name: one.name, engine: Arc::clone(engine), ports, peers });
                }
                Ok(None) => {}
                // It has ended meanwhile.
                Err(_) if identity(&path).is_none() => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
    Ok(others)
}

/// A container with an interface on a bridge, and its engine.
pub type End = (Arc<dyn Engine>, PathEnd);

/// The running containers with interfaces on a bridge, but for those in the network namespace `own`, each with its
/// engine.
pub fn ends(node: &Node, bridge: &str, own: Option<&Path>) -> Result<Vec<End>, Failure> {
    let end = |other: Other| {
        let NetworkNeighbour { container, names, addresses, .. } = neighbour(&other, bridge, &[]);
        (other.engine, PathEnd { container, names, addresses })
    };
    Ok(others(node, own, &BTreeSet::from([bridge]))?.into_iter().map(end).collect())
}

fn neighbour(other: &Other, bridge: &str, peers: &[IpAddr]) -> NetworkNeighbour {
    let addresses = other.addresses(bridge);
    // One that has ended meanwhile has no names any more.
    let networks = other.engine.inspect(&other.name).map(|inspected| other.engine.networks(&inspected));
    let here = |network: &AttachedNetwork| network.addresses.iter().any(|address| addresses.contains(address));
    let names = networks.unwrap_or_default().into_iter().find(here).map(|network| network.names);
    NetworkNeighbour {
        container: other.name.clone(),
        engine: other.engine.name(),
        connections: count(peers, &addresses),
        names: names.unwrap_or_default(),
        addresses,
    }
}

/// The names of those that are linked to the container by connections on the bridge, directly or through others.
fn linked((addresses, peers): (&[IpAddr], &[IpAddr]), others: &[&Other], bridge: &str) -> BTreeSet<String> {
    let nodes: BTreeMap<&str, (Vec<IpAddr>, &[IpAddr])> =
        others.iter().map(|other| (other.name.as_str(), (other.addresses(bridge), other.peers.as_slice()))).collect();
    let mut linked = BTreeSet::new();
    let mut frontier = vec![(addresses.to_vec(), peers)];
    while let Some((addresses, peers)) = frontier.pop() {
        for (name, (theirs, their_peers)) in &nodes {
            let connected = count(peers, theirs) > 0 || count(their_peers, &addresses) > 0;
            if connected && linked.insert((*name).to_owned()) {
                frontier.push((theirs.clone(), their_peers));
            }
        }
    }
    linked
}
