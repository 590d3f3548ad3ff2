//! Paths between a container that has moved off a bridge of one node and those that have stayed there: a VXLAN device
//! on each node, as a port of the network's bridge ([why](../../../docs/decisions/neighbours-on-a-bridge.md)).
//!
//! ```text
//!              source                                        destination
//!   arm        record (pending), device                      record (pending), device     when it has made the network
//!   undo       pending away                                  the same
//!   release    pending ──▶ member                            pending ──▶ member           tidy
//!   afterwards each node asks the other one every 10 s: the path is needed while a member is where it went, and somebody is on the
//!              bridge of its home
//!   unused     neither pending nor member: the device goes at once, the record when no container has names of the path any more
//! ```
//!
//! A record is on the disk before its device is made, and goes after it. What no record names is removed at the agent's
//! start.
//!
//! The record is all that a node knows: what moves change is written to it, and the [watch] writes who is on the bridge.
//! Engines are asked by the watch alone, once each turn, without the lock: a turn whose record was changed meanwhile
//! changes nothing. So neither moves nor peers that ask wait for engines.

mod listing;
mod names;
mod offer;
mod record;
mod watch;

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tranship_api::{ErrorKind, HeldAddresses, KeptPath, Leftover, LeftoverKind, ServiceError};
use tranship_coordinator::Failure;
use tranship_engine::Container;
use tranship_network::{BridgePort, VxlanState, bridge_ports, remove_vxlan, vxlans};
use tranship_sys::threads;
use tranship_types::{EngineName, MigrationId, NodeName, OfferedPath, PathEnd};
use tranship_wire::message::{Offer, Response};

use crate::local_networks;
use crate::node::{Node, failed};
use offer::{bridge_of, obstacle};
pub use offer::{inspect, obstacles};
use record::{Member, PathRecord, Resident};

/// Whoever changes records or devices has it. It is not held while an engine or a peer is asked, and a move without paths does not take it.
static CHANGING: Mutex<()> = Mutex::new(());

fn changing() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the paths of an offer on the source, before the freeze. May be repeated.
pub fn arm(
    node: &Node,
    id: &MigrationId,
    peer: &NodeName,
    offer: &Offer,
    (engine, container): (EngineName, &Container),
) -> Result<(), Failure> {
    if offer.paths.is_empty() {
        return Ok(());
    }
    let ports = bridge_ports(&local_networks::namespace(container.init)).map_err(failed)?;
    for path in &offer.paths {
        let (end, bridge) = end_of(node, offer, path, &ports)?;
        let home = node.config.node.clone();
        let (engine, id_there) = (Some(engine), container.id.clone());
        let pending = Member { end, home, migration: id.clone(), engine, id: id_there };
        let route = Route { peer, bridge, local: path.source, remote: path.destination };
        join(node, path, route, pending, None)?;
    }
    Ok(())
}

/// Makes the paths of an offer on the destination, where the container's network namespace has its interfaces. May be
/// repeated.
pub fn arrive(
    node: &Node,
    id: &MigrationId,
    (peer, engine): (&NodeName, EngineName),
    offer: &Offer,
    netns: &Path,
) -> Result<(), Failure> {
    if offer.paths.is_empty() {
        return Ok(());
    }
    let ports = bridge_ports(netns).map_err(failed)?;
    let bridges = tranship_network::bridges().map_err(failed)?;
    for path in &offer.paths {
        let bridge = bridge_of(&bridges, &ports, &path.interface);
        if let Some(blocker) = obstacle(node, offer, path, bridge)? {
            return Err(Failure::blocked(vec![blocker]).unwrap_or_else(|| failed("no path")));
        }
        // What only one of the bridges has, all may ask for.
        let both = |address: &&IpAddr| path.guarded.contains(address);
        let own = bridge.into_iter().flat_map(|bridge| bridge.addresses.iter().map(|(address, _)| address));
        let guarded = own.filter(both).copied().collect();
        let (end, bridge) = end_of(node, offer, path, &ports)?;
        let (home, engine) = (peer.clone(), Some(engine));
        let pending = Member { end, home, migration: id.clone(), engine, id: String::new() };
        let route = Route { peer, bridge, local: path.destination, remote: path.source };
        join(node, path, route, pending, Some(guarded))?;
    }
    Ok(())
}

/// What the container of an offer is on one of its paths, and the bridge of this node.
fn end_of(node: &Node, offer: &Offer, path: &OfferedPath, ports: &[BridgePort]) -> Result<(PathEnd, String), Failure> {
    let port = ports.iter().find(|port| port.interface == path.interface).ok_or_else(|| {
        let (interface, container, here) = (&path.interface, &offer.container, &node.config.node);
        Failure::new(format!("interface {interface} of container {container} is on no bridge of node {here}"))
    })?;
    let addresses = port.addresses.iter().filter(|address| !local_networks::is_link_local(address)).copied().collect();
    Ok((PathEnd { container: offer.container.clone(), names: path.names.clone(), addresses }, port.bridge.clone()))
}

/// Where a path leads, as seen from this node.
struct Route<'a> {
    peer: &'a NodeName,
    bridge: String,
    local: IpAddr,
    remote: IpAddr,
}

/// Notes a move that is under way, and makes its path where there is none. `guarded` are the addresses of both bridges, which the
/// destination knows.
fn join(
    node: &Node,
    path: &OfferedPath,
    route: Route<'_>,
    pending: Member,
    guarded: Option<Vec<IpAddr>>,
) -> Result<(), Failure> {
    let Route { peer, bridge, local, remote } = route;
    let changing = changing();
    let mut record = match PathRecord::read(node, path.id)? {
        Some(record) if record.peer == *peer && record.bridge == bridge => record,
        Some(record) if !record.is_unused() => {
            return Err(Failure::new(format!(
                "the path cannot be kept: on node {}, VXLAN {} is already that of network {} with node {}",
                node.config.node, path.id, record.network, record.peer
            )));
        }
        _ => PathRecord {
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
            residents: Vec::new(),
            occupied: true,
            beyond: Vec::new(),
        },
    };
    (record.port, record.local, record.remote, record.occupied) = (path.port, local, remote, true);
    if let Some(guarded) = guarded {
        (record.guarded, record.beyond) = (guarded, path.ends.clone());
    }
    record.pending.retain(|one| one.migration != pending.migration);
    record.pending.push(pending);
    record.write(node)?;
    apply(&record)?;
    drop(changing);
    watch::look_soon();
    Ok(())
}

/// Makes the kernel's device match a record.
fn apply(record: &PathRecord) -> Result<(), Failure> {
    if record.is_unused() {
        return remove_vxlan(record.id).map_err(failed);
    }
    match record.device().ensure().map_err(failed)? {
        VxlanState::Whole => {}
        lacked => tracing::info!(device = record.device().name(), ?lacked, "a kept path was made in the kernel"),
    }
    Ok(())
}

/// Changes records; whether there were any to be changed. Whoever has none to change does not wait for the lock.
fn change(node: &Node, with: impl Fn(&mut PathRecord)) -> Result<bool, Failure> {
    let changed = |before: &PathRecord| {
        let mut after = before.clone();
        with(&mut after);
        (after != *before).then_some(after)
    };
    if !PathRecord::readable(node).iter().any(|record| changed(record).is_some()) {
        return Ok(false);
    }
    let _changing = changing();
    let mut done = Ok(());
    for record in PathRecord::readable(node).iter().filter_map(changed) {
        let mut written = record.write(node);
        if record.is_unused() {
            let removed = apply(&record);
            // Where there is no space for a record that says that it has ended, none says so, too.
            if let (Err(failure), Ok(())) = (&written, &removed) {
                tracing::warn!(network = record.network, %failure, "names of a path that has ended may stay in containers");
                written = record.remove(node);
            }
            written = written.and(removed);
        }
        done = done.and(written);
        watch::look_soon();
    }
    done.map(|()| true)
}

/// Takes back what a move has made that is undone. May be repeated.
pub fn undo(node: &Node, migration: &MigrationId) -> Result<(), Failure> {
    change(node, |record| record.pending.retain(|one| one.migration != *migration)).map(drop)
}

/// The container has left, and its original is about to be removed: keeps those paths that others on its bridges need.
/// May be repeated.
pub fn left(
    node: &Node,
    migration: &MigrationId,
    (engine, container): (EngineName, &str),
    netns: Option<&Path>,
) -> Result<(), Failure> {
    let records = PathRecord::readable(node);
    if records.is_empty() {
        return Ok(());
    }
    // Docker may have removed the namespace of a container that was killed, and its ports with it.
    let own = netns.and_then(|path| bridge_ports(path).ok()).unwrap_or_default();
    let mut without_ports = Vec::new();
    for record in records {
        let of_own = own.iter().filter(|port| port.bridge == record.bridge).count();
        if watch::ports(&record.bridge)? <= of_own {
            without_ports.push(record.id);
        }
    }
    let here = &node.config.node;
    change(node, |record| leave(record, (here, without_ports.contains(&record.id)), migration, (engine, container)))
        .map(drop)
}

/// What becomes of a record of node `own` when a container leaves; whether its bridge has no ports of others.
fn leave(
    record: &mut PathRecord,
    (own, without_ports): (&NodeName, bool),
    migration: &MigrationId,
    (engine, container): (EngineName, &str),
) {
    let is_it = |one: &Resident| one.engine == engine && one.end.container == container;
    let gone = Resident {
        engine,
        id: String::new(),
        end: PathEnd { container: container.to_owned(), names: Vec::new(), addresses: Vec::new() },
        elsewhere: 0,
    };
    let before = record.clone();
    record.residents.retain(|one| !is_it(one));
    if !record.confirm(migration) {
        // It is back where it came from, or on a third node.
        record.members.retain(|one| one.home == *own || !gone.is_member(one));
    }
    // Nobody has stayed.
    if *record != before && without_ports && record.residents.is_empty() {
        record.occupied = false;
        record.members.retain(|one| one.home != *own);
    }
}

/// The container has come from a node with these addresses, and nothing is left to do for its move. May be repeated.
pub fn arrived(
    node: &Node,
    migration: &MigrationId,
    (peer, engine): (&NodeName, EngineName),
    (container, addresses): (&str, Vec<IpAddr>),
) {
    let here = &node.config.node;
    let changed = change(node, |record| {
        if record.confirm(migration) {
            // Until the watch has seen it.
            let end = record.members.last().map(|member| member.end.clone());
            record.residents.extend(end.map(|end| Resident { engine, id: String::new(), end, elsewhere: 0 }));
        } else if record.peer == *peer {
            record.members.retain(|one| one.home != *here || !is_back(one, container, &addresses));
        }
    });
    // One that others had followed before, on the other node.
    watch::look_soon();
    if let Err(failure) = changed {
        tracing::warn!(container, %failure, "the record of a kept path stays as it was");
    }
}

/// Whether a container of this name with these addresses is the member.
fn is_back(member: &Member, container: &str, addresses: &[IpAddr]) -> bool {
    member.end.container == container && addresses.iter().any(|address| member.end.addresses.contains(address))
}

/// Removes what no record names, makes again what is lacking, and looks after all from now on.
pub fn start(node: &Arc<Node>) -> std::io::Result<()> {
    for id in strays(node) {
        tracing::warn!(device = tranship_network::vxlan_name(id), "a VXLAN device of no path is removed");
        if let Err(failure) = remove_stray(node, id) {
            tracing::error!(%failure, "it stays");
        }
    }
    watch::look_soon();
    let node = Arc::clone(node);
    threads::start("kept paths", move || watch::watch(&node)).map(drop)
}

/// Devices of which there is no record. One whose record cannot be read has one.
pub fn strays(node: &Node) -> Vec<u32> {
    let _changing = changing();
    let (Ok(devices), Ok(ids)) = (vxlans(), PathRecord::ids(node)) else { return Vec::new() };
    devices.into_iter().filter(|id| !ids.contains(id)).collect()
}

/// Removes a device of which there is still no record.
pub fn remove_stray(node: &Node, id: u32) -> Result<(), Failure> {
    let _changing = changing();
    if PathRecord::ids(node)?.contains(&id) { Ok(()) } else { remove_vxlan(id).map_err(failed) }
}

/// All paths that are kept here.
///
/// # Errors
/// A directory of records that cannot be read. [`notices`] has single records that cannot.
pub fn list(node: &Node) -> Result<Vec<KeptPath>, Failure> {
    let (records, _) = PathRecord::all_and_unreadable(node)?;
    let kept = records.iter().filter(|record| !record.members.is_empty());
    Ok(kept.map(|record| record.info(&node.config.node, trouble(node, record))).collect())
}

/// What is wrong with a path.
fn trouble(node: &Node, record: &PathRecord) -> Option<String> {
    match record.device().state() {
        Ok(VxlanState::Whole) => {}
        Ok(VxlanState::Unfiltered) => return Some("its filter is not there, and is made again".to_owned()),
        Ok(VxlanState::Missing) => {
            return Some("its device is not there, and is made again when the bridge is".to_owned());
        }
        Err(error) => return Some(error.to_string()),
    }
    let shared = |Resident { end, .. }: &Resident| {
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
    record.residents.iter().find_map(shared)
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
    let wrong = |failure: Failure| {
        let name = record::directory(node).display().to_string();
        Leftover { kind: LeftoverKind::Path, name, removed: false, warning: false, note: failure.message }
    };
    let unreadable =
        PathRecord::all_and_unreadable(node).map_or_else(|failure| vec![failure], |(_, failures)| failures);
    let kept = list(node).unwrap_or_default();
    kept.into_iter().map(told).chain(unreadable.into_iter().map(wrong)).collect()
}

/// The answer to another node that asks how a path stands at this one. It comes from the record: no engine is asked.
pub fn answer(node: &Node, peer: &NodeName, id: u32) -> Result<Response, Failure> {
    let record = PathRecord::read(node, id)?.filter(|record| record.peer == *peer && !record.is_unused());
    Ok(match record {
        Some(record) => Response::Path { kept: true, occupied: record.occupied, ends: record.ends() },
        None => Response::Path { kept: false, occupied: false, ends: Vec::new() },
    })
}

/// Ends the paths that are kept for a container, whatever the other node answers, unless it was refused to release its addresses.
/// What was `released`, which may be nothing where there was a path.
pub fn release(
    node: &Node,
    container: &str,
    released: Result<Vec<HeldAddresses>, ServiceError>,
) -> Result<Vec<HeldAddresses>, ServiceError> {
    match released {
        Err(refused) if refused.kind != ErrorKind::NotFound => return Err(refused),
        _ => {}
    }
    let ended = change(node, |record| record.members.retain(|one| one.end.container != container));
    match ended.map_err(|failure| ServiceError::new(ErrorKind::Internal, failure.message, "see the agent's log"))? {
        true => Ok(released.unwrap_or_default()),
        false => released,
    }
}

#[cfg(test)]
mod tests;
