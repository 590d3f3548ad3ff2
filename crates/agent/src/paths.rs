//! Paths between a container that has moved off a bridge of one node and those that have stayed there: a VXLAN device
//! on each node, as a port of the network's bridge ([why](../../../docs/decisions/neighbours-on-a-bridge.md)).
//!
//! ```text
//!              source                                        destination
//!   arm        record (pending), device                      record (pending), device     when it has made the network
//!   undo       pending away; with the last one: the device   the same
//!   release    pending ──▶ member                            pending ──▶ member           tidy
//!   afterwards each node asks the other one every 10 s: the path is needed while a member is where it went, and somebody is on the
//!              bridge of its home; if not, each removes device and record
//! ```
//!
//! A record is on the disk before its device is made, and goes after it. What no record names is removed at the agent's
//! start.

mod record;
mod watch;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tranship_api::{ErrorKind, KeptPath, Leftover, LeftoverKind, ServiceError};
use tranship_coordinator::Failure;
use tranship_engine::EtcFiles;
use tranship_network::{
    Bridge, BridgePort, VXLAN_BITS, bridge_ports, connected_addresses, leads_beyond_node, remove_vxlan, vxlans,
};
use tranship_sys::threads;
use tranship_types::{Attachment, Blocker, BlockerKind, MigrationId, MoveOptions, NodeName, OfferedPath, PathEnd};
use tranship_wire::message::Offer;

use crate::groups::Unit;
use crate::inspection::{self, Inspection};
use crate::local_networks;
use crate::node::{Node, failed};
use record::{Member, PathRecord};
pub use watch::state;

/// Whoever changes records or devices has it.
static CHANGING: Mutex<()> = Mutex::new(());

fn changing() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn blocker(cause: impl Into<String>, remedy: impl Into<String>) -> Blocker {
    Blocker::new(BlockerKind::Network, cause, remedy)
}

/// Everything that can be found out about a container's move to a node on this one, with the paths that the move is to
/// keep.
pub fn inspect(
    node: &Node,
    name: &str,
    (to, options): (&NodeName, &MoveOptions),
    unit: Option<&Unit>,
) -> Result<Inspection, Failure> {
    let mut found = inspection::inspect(node, name, options, unit)?;
    let notes = offer(node, &mut found, to, options)?;
    found.findings.changes.extend(notes);
    Ok(found)
}

/// Adds the paths to an offer that the move to `to` is to keep, and what stands in their way to the blockers. Returns
/// what the user has to know besides.
fn offer(node: &Node, found: &mut Inspection, to: &NodeName, options: &MoveOptions) -> Result<Vec<String>, Failure> {
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
        let ends: Vec<PathEnd> =
            local_networks::ends(node, bridge, Some(&own))?.into_iter().map(|(_, end)| end).collect();
        if ends.is_empty() {
            continue;
        }
        match offered(node, found, (to, peer), (bridge, &network, &ports), (&records, ends))? {
            Ok(path) => {
                EtcFiles::add_beyond(&mut found.offer.config, &path.ends);
                found.offer.paths.push(path);
            }
            Err(blocker) => found.blockers.push(blocker),
        }
    }
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
    let others = records.iter().filter(|record| record.bridge == bridge && record.peer != *to);
    let peers = connected_addresses(own).map_err(failed)?;
    for record in others {
        let is_member = record.members.iter().any(|one| one.home == record.peer && one.end.container == *name);
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
    let (Some(destination), Some(port)) = (peer, ports.iter().find(|port| port.bridge == bridge)) else {
        return Ok(Err(blocker(
            format!("the address of node {to} is not known on node {here}"),
            "write it into [peers]",
        )));
    };
    if destination.is_loopback() {
        let cause = format!("node {to} is called at {destination}, which leads to node {here} itself");
        return Ok(Err(blocker(cause, "write its own address into [peers], or leave out --keep-path")));
    }
    let source = match address_towards(destination) {
        Ok(address) => address,
        Err(error) => {
            let cause = format!("node {here} has no way to {destination}, node {to}: {error}");
            return Ok(Err(blocker(cause, "see `ip route`")));
        }
    };
    let known = records.iter().find(|one| one.bridge == bridge && one.peer == *to);
    let id = known.map_or_else(|| number(records, here, to, network), |record| record.id);
    let is_there = |one: &&tranship_engine::AttachedNetwork| one.addresses.iter().any(|a| port.addresses.contains(a));
    Ok(Ok(OfferedPath {
        id,
        port: node.config.network.path_port,
        network: network.to_owned(),
        interface: port.interface.clone(),
        names: found.networks.iter().find(is_there).map(|one| one.names.clone()).unwrap_or_default(),
        source,
        destination,
        guarded: own.addresses.iter().map(|(address, _)| *address).collect(),
        ends,
    }))
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

fn obstacle(
    node: &Node,
    offer: &Offer,
    path: &OfferedPath,
    bridge: Option<&Bridge>,
) -> Result<Option<Blocker>, Failure> {
    let here = &node.config.node;
    if !tranship_network::is_own_address(path.destination).map_err(failed)? {
        let cause =
            format!("the path cannot be kept: node {here} is called at {}, which is not its own", path.destination);
        return Ok(Some(blocker(cause, "addresses are translated between the nodes; leave out --keep-path")));
    }
    if tranship_network::is_own_address(path.source).map_err(failed)? {
        let cause =
            format!("the path cannot be kept: {}, from which it would come, is an address of node {here}", path.source);
        return Ok(Some(blocker(cause, "write the nodes' own addresses into [peers], or leave out --keep-path")));
    }
    let Some(bridge) = bridge else { return Ok(None) };
    if let Err(blocker) = joinable(node, bridge) {
        return Ok(Some(blocker));
    }
    let taken = |end: &PathEnd| path.ends.iter().find(|one| one.addresses.iter().any(|a| end.addresses.contains(a)));
    let here_already = local_networks::ends(node, &bridge.name, None)?;
    let others = here_already.iter().map(|(_, end)| end).filter(|end| end.container != offer.container);
    let clash = others.filter_map(|end| taken(end).map(|other| (end, other))).next();
    Ok(clash.map(|(end, other)| {
        let address = end.addresses.iter().find(|a| other.addresses.contains(a));
        let address = address.map(ToString::to_string).unwrap_or_default();
        let cause = format!(
            "the path cannot be kept: container {} on node {here} has {address}, as {} on the node that {} leaves",
            end.container, other.container, offer.container
        );
        blocker(cause, "give one of them another address, or leave out --keep-path")
    }))
}

/// Makes the paths of an offer on the source, before the freeze. May be repeated.
pub fn arm(node: &Node, id: &MigrationId, peer: &NodeName, offer: &Offer, init: u32) -> Result<(), Failure> {
    if offer.paths.is_empty() {
        return Ok(());
    }
    let ports = bridge_ports(&local_networks::namespace(init)).map_err(failed)?;
    for path in &offer.paths {
        let home = node.config.node.clone();
        join(node, (id, peer), (offer, path, &ports), (home, path.source, path.destination), Vec::new())?;
    }
    Ok(())
}

/// Makes the paths of an offer on the destination, where the container's network namespace has its interfaces. May be
/// repeated.
pub fn arrive(node: &Node, id: &MigrationId, peer: &NodeName, offer: &Offer, netns: &Path) -> Result<(), Failure> {
    if offer.paths.is_empty() {
        return Ok(());
    }
    let ports = bridge_ports(netns).map_err(failed)?;
    let bridges = tranship_network::bridges().map_err(failed)?;
    for path in &offer.paths {
        let port = ports.iter().find(|port| port.interface == path.interface);
        let bridge = port.and_then(|port| bridges.iter().find(|bridge| bridge.name == port.bridge));
        if let Some(blocker) = obstacle(node, offer, path, bridge)? {
            return Err(Failure::blocked(vec![blocker]).unwrap_or_else(|| failed("no path")));
        }
        // What only one of the bridges has, all may ask for.
        let both = |address: &&IpAddr| path.guarded.contains(address);
        let own = bridge.into_iter().flat_map(|bridge| bridge.addresses.iter().map(|(address, _)| address));
        let guarded = own.filter(both).copied().collect();
        join(node, (id, peer), (offer, path, &ports), (peer.clone(), path.destination, path.source), guarded)?;
    }
    Ok(())
}

fn join(
    node: &Node,
    (id, peer): (&MigrationId, &NodeName),
    (offer, path, ports): (&Offer, &OfferedPath, &[BridgePort]),
    (home, local, remote): (NodeName, IpAddr, IpAddr),
    guarded: Vec<IpAddr>,
) -> Result<(), Failure> {
    let here = &node.config.node;
    let port = ports.iter().find(|port| port.interface == path.interface).ok_or_else(|| {
        let (interface, container) = (&path.interface, &offer.container);
        Failure::new(format!("interface {interface} of container {container} is on no bridge of node {here}"))
    })?;
    let addresses = port.addresses.iter().filter(|address| !local_networks::is_link_local(address)).copied().collect();
    let end = PathEnd { container: offer.container.clone(), names: path.names.clone(), addresses };
    let (is_source, bridge) = (home == *here, port.bridge.clone());
    let pending = Member { end, home, migration: id.clone() };
    let _changing = changing();
    let mut record = match PathRecord::read(node, path.id)? {
        Some(record) if record.peer == *peer && record.bridge == bridge => record,
        Some(record) => {
            return Err(Failure::new(format!(
                "the path cannot be kept: on node {here}, VXLAN {} is already that of network {} with node {}",
                path.id, record.network, record.peer
            )));
        }
        None => PathRecord {
            id: path.id,
            port: path.port,
            peer: peer.clone(),
            network: path.network.clone(),
            bridge,
            local,
            remote,
            guarded: Vec::new(),
            members: Vec::new(),
            pending: Vec::new(),
            here: Vec::new(),
            beyond: Vec::new(),
        },
    };
    let before = record.device();
    (record.port, record.local, record.remote) = (path.port, local, remote);
    match is_source {
        true => record.here = path.ends.iter().map(|end| end.container.clone()).collect(),
        false => (record.guarded, record.beyond) = (guarded, path.ends.clone()),
    }
    record.pending.retain(|one| one.migration != *id);
    record.pending.push(pending);
    record.write(node)?;
    if record.device() == before { ensure(&record) } else { record.device().make().map_err(failed) }
}

/// Makes the device of a record where it is not there, if its bridge is.
fn ensure(record: &PathRecord) -> Result<(), Failure> {
    let device = record.device();
    if device.is_there().map_err(failed)? {
        return Ok(());
    }
    device.make().map_err(failed)
}

/// Removes a path: the device first.
fn end(node: &Node, record: &PathRecord) -> Result<(), Failure> {
    remove_vxlan(record.id).map_err(failed)?;
    record.remove(node)
}

/// Takes back what a move has made that is undone. May be repeated.
pub fn undo(node: &Node, migration: &MigrationId) -> Result<(), Failure> {
    change(node, |record| {
        let before = record.pending.len();
        record.pending.retain(|one| one.migration != *migration);
        record.pending.len() != before
    })
}

/// Changes the records that `with` returns true for, and removes those that nobody has any more.
fn change(node: &Node, mut with: impl FnMut(&mut PathRecord) -> bool) -> Result<(), Failure> {
    let _changing = changing();
    for mut record in PathRecord::readable(node) {
        if !with(&mut record) {
            continue;
        }
        if record.is_unused() {
            end(node, &record)?;
        } else {
            record.write(node)?;
        }
        watch::look_soon();
    }
    Ok(())
}

/// The container has left, and its original is about to be removed: keeps those paths that others on its bridges need.
/// May be repeated.
pub fn left(node: &Node, migration: &MigrationId, container: &str, netns: Option<&Path>) -> Result<(), Failure> {
    let records = PathRecord::readable(node);
    if records.is_empty() {
        return Ok(());
    }
    // Docker may have removed the namespace of a container that was killed, and its ports with it.
    let own = netns.and_then(|path| bridge_ports(path).ok()).unwrap_or_default();
    let here = &node.config.node;
    let mut occupied = Vec::new();
    for record in records {
        let of_own = own.iter().filter(|port| port.bridge == record.bridge).count();
        let may_return = |name: &String| name != container && watch::exists(node, name) != Some(false);
        occupied.push((record.id, watch::ports(&record.bridge)? > of_own || record.here.iter().any(may_return)));
    }
    change(node, |record| {
        let before = record.clone();
        record.here.retain(|name| name != container);
        if !record.confirm(migration) {
            // It is back where it came from, or on a third node.
            record.members.retain(|one| one.end.container != container);
        }
        // Nobody has stayed.
        if occupied.contains(&(record.id, false)) {
            record.members.retain(|one| one.home != *here);
        }
        *record != before
    })
}

/// The container has come, and nothing is left to do for its move. May be repeated.
pub fn arrived(node: &Node, migration: &MigrationId, container: &str) {
    let here = &node.config.node;
    let changed = change(node, |record| {
        let before = record.clone();
        if !record.confirm(migration) {
            record.members.retain(|one| one.home != *here || one.end.container != container);
        }
        *record != before
    });
    // One that others had followed before, on the other node.
    watch::look_soon();
    if let Err(failure) = changed {
        tracing::warn!(container, %failure, "the record of a kept path stays as it was");
    }
}

/// Removes what no record names, makes again what is lacking, and looks after all from now on.
pub fn start(node: &Arc<Node>) -> std::io::Result<()> {
    for id in strays(node) {
        tracing::warn!(device = tranship_network::vxlan_name(id), "a VXLAN device of no path is removed");
        if let Err(error) = remove_vxlan(id) {
            tracing::error!(%error, "it stays");
        }
    }
    watch::look_soon();
    let node = Arc::clone(node);
    threads::start("kept paths", move || watch::watch(&node)).map(drop)
}

/// Devices of which there is no record. Without all records, none is known to be one.
pub fn strays(node: &Node) -> Vec<u32> {
    let _changing = changing();
    let (Ok(devices), Ok(records)) = (vxlans(), PathRecord::all(node)) else { return Vec::new() };
    devices.into_iter().filter(|id| !records.iter().any(|record| record.id == *id)).collect()
}

/// All paths that are kept here.
///
/// # Errors
/// Records that cannot be read.
pub fn list(node: &Node) -> Result<Vec<KeptPath>, Failure> {
    let records = PathRecord::all(node)?;
    let kept = records.iter().filter(|record| !record.members.is_empty());
    Ok(kept.map(|record| record.info(&node.config.node, trouble(node, record))).collect())
}

/// What is wrong with a path.
fn trouble(node: &Node, record: &PathRecord) -> Option<String> {
    match record.device().is_there() {
        Ok(true) => {}
        Ok(false) => return Some("its device is not there, and is made again when the bridge is".to_owned()),
        Err(error) => return Some(error.to_string()),
    }
    let here = local_networks::ends(node, &record.bridge, None).ok()?;
    let shared = |(_, end): &(_, PathEnd)| {
        let of_both = |other: &&PathEnd| end.addresses.iter().any(|address| other.addresses.contains(address));
        let other = record.beyond.iter().find(of_both)?;
        let address = end.addresses.iter().find(|address| other.addresses.contains(address))?;
        let (peer, here) = (&record.peer, &node.config.node);
        // One that is just moving.
        (other.container != end.container).then(|| {
            format!(
                "container {} on node {here} and {} on node {peer} both have {address}: give one of them another address",
                end.container, other.container
            )
        })
    };
    here.iter().find_map(shared)
}

/// The same for `tranship doctor`.
pub fn notices(node: &Node) -> Vec<Leftover> {
    let told = |path: KeptPath| Leftover {
        kind: LeftoverKind::Path,
        name: path.device.clone(),
        removed: false,
        warning: true,
        note: path.to_string(),
    };
    match list(node) {
        Ok(paths) => paths.into_iter().map(told).collect(),
        Err(failure) => {
            let name = record::directory(node).display().to_string();
            vec![Leftover { kind: LeftoverKind::Path, name, removed: false, warning: false, note: failure.message }]
        }
    }
}

/// Ends the paths that are kept for a container, whatever the other node says; whether there were any.
pub fn release(node: &Node, container: &str) -> Result<bool, ServiceError> {
    let mut found = false;
    let ended = change(node, |record| {
        let before = record.members.len();
        record.members.retain(|one| one.end.container != container);
        found |= record.members.len() != before;
        record.members.len() != before
    });
    ended.map_err(|failure| ServiceError::new(ErrorKind::Internal, failure.message, "see the agent's log"))?;
    Ok(found)
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
}
