//! Addresses that this node holds for containers that have left it, so that its IPAM gives them to no other container.
//!
//! A record is written before the original's reservations go, and each reservation is put into a holder's name (`tranship-holds-NAME`). The record
//! goes when the container comes back, when the node that has it answers that it has the addresses no more, or on `tranship release`.
//! An engine with an IPAM of its own has no such names: there a *holder*, a container that does nothing else, has the
//! addresses ([`holders`], [`making`]).
//! Nodes are asked: one that is away is asked again later. A container that moves on leaves a record on each node, also where that
//! holds nothing, which leads on to the next one.

mod ask;
mod engine_lock;
mod holders;
mod making;
mod record;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tranship_api::{ErrorKind, HeldAddresses, Leftover, LeftoverKind, ServiceError};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Engine};
use tranship_network::cni::{self, HeldReservation};
use tranship_sys::threads;
use tranship_types::{
    AddressState, CniAttachment, EngineName, MigrationId, NetworkIdentity, NodeName, Outcome, Report, ReservedAddress,
};

use crate::node::{Node, failed};
use crate::registry::unix_ms;
pub use holders::{StrayHolder, beside, make_way, note, remove_stray, strays};
pub use making::{PendingHolders, hold_left};
use record::HeldRecord;

/// Protects the records, and reservations in a holder's name. It is not held while an engine is asked.
static CHANGING: Mutex<()> = Mutex::new(());

fn changing() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn reserved(attachments: &[CniAttachment]) -> Vec<ReservedAddress> {
    attachments.iter().flat_map(CniAttachment::reserved).collect()
}

/// What a plan says will be held.
pub fn remark(
    node: &Node,
    engine: &dyn Engine,
    container: &Container,
    attachments: &[CniAttachment],
) -> Option<String> {
    if engine.holders().is_some() {
        return holders::remark(node, engine, container);
    }
    let addresses: Vec<String> =
        reserved(attachments).iter().map(|one| format!("{} of CNI's network {}", one.address, one.network)).collect();
    (node.config.network.hold_addresses && !addresses.is_empty()).then(|| {
        format!(
            "node {} keeps {} reserved for it until it comes back or is removed",
            node.config.node,
            addresses.join(", ")
        )
    })
}

/// The container leaves: has its reservations stay, in a holder's name. To be called before what CNI keeps of it is removed; may be repeated.
///
/// # Errors
/// A record that cannot be written, the system's refusals.
pub fn leave(
    node: &Node,
    id: &MigrationId,
    to: &NodeName,
    (container, engine): (&str, EngineName),
    attachments: &[CniAttachment],
) -> Result<(), Failure> {
    let _changing = changing();
    let record = match HeldRecord::read(node, id)? {
        // An agent that died then had written it: of reservations that are held already, the interfaces tell no more.
        Some(record) => record,
        None => {
            let record = HeldRecord {
                migration: id.clone(),
                container: container.to_owned(),
                engine: engine.to_string(),
                to_engine: None,
                node: to.clone(),
                since_unix_ms: unix_ms(),
                addresses: reserved(attachments),
                others: Vec::new(),
                not_held: None,
                held: node.config.network.hold_addresses,
            };
            if record.addresses.is_empty() {
                return Ok(());
            }
            record.write(node)?;
            record
        }
    };
    hold(&record)
}

fn hold(record: &HeldRecord) -> Result<(), Failure> {
    for reserved in record.addresses.iter().filter(|_| record.held) {
        if let Some(other) = cni::hold(&record.container, reserved).map_err(failed)? {
            let ReservedAddress { network, address, .. } = reserved;
            tracing::warn!(%address, network, container = record.container, other, "another container has the address");
        }
    }
    Ok(())
}

/// The container does not come after all: what was held for it is held again.
///
/// # Errors
/// Records that cannot be read, the system's refusals. That an engine cannot hold an address is noted, and no error.
pub fn hold_again(node: &Arc<Node>, container: &str, identity: &NetworkIdentity) -> Result<(), Failure> {
    for record in HeldRecord::all(node)?.into_iter().filter(|record| record.container == container) {
        if holders::is_of_engine(node, &record) {
            if let Err(failure) =
                hold_left(node, &record.migration).and_then(|made| made.map_or(Ok(()), PendingHolders::wait))
            {
                tracing::info!(container, %failure, "an address is not held yet");
            }
        } else if !identity.cni.is_empty() {
            let _changing = changing();
            hold(&record)?;
        }
    }
    Ok(())
}

/// The container has come back with this network: nothing is held for it any more.
pub fn returned(node: &Node, container: &str, identity: &NetworkIdentity) {
    let (own, addresses) = (reserved(&identity.cni), identity.addresses());
    let ended = HeldRecord::all(node).and_then(|records| {
        let back = |record: &&HeldRecord| match holders::is_of_engine(node, record) {
            true => record.is_of(container, &addresses),
            false => record.container == container && record.is_about(&own),
        };
        records.iter().filter(back).try_for_each(|record| {
            end(node, record, holders::COMMAND_PATIENCE).or_else(|failure| {
                // An engine that does not answer now. The container has its address, so that no holder has: what is left of one
                // `doctor` finds. A record that stayed would hold the address for ever, once the container is removed here.
                tracing::warn!(container, %failure, "holders of its addresses may be left");
                let _changing = changing();
                record.remove(node)
            })
        })
    });
    if let Err(failure) = ended {
        // The record leads to the node that it came from, which leads back here.
        tracing::warn!(container, %failure, "the record of its addresses stays");
    }
}

/// Gives back what is held, and then removes the record. `patience` limits the wait for an engine's lock.
fn end(node: &Node, record: &HeldRecord, patience: Duration) -> Result<(), Failure> {
    if holders::is_of_engine(node, record) {
        return holders::end(node, record, patience);
    }
    let _changing = changing();
    for ReservedAddress { network, address, .. } in &record.addresses {
        cni::release_held(&record.container, network, *address).map_err(failed)?;
    }
    record.remove(node)
}

/// Whether a container that has come to this engine with these addresses, as far as the asker knows, has them here still, for a node that holds them.
///
/// # Errors
/// Reservations or records that cannot be read, an engine that cannot be asked.
pub fn state(
    node: &Node,
    (container, engine): (&str, &str),
    addresses: &[ReservedAddress],
) -> Result<AddressState, Failure> {
    if engine.parse().is_ok_and(|engine| node.engine(engine).holders().is_some()) {
        return holders::state(node, (container, engine), addresses);
    }
    for ReservedAddress { network, owner, address, .. } in addresses {
        // A peer's names become names of files.
        if network.contains(['/', '\0']) || network.starts_with('.') {
            return Err(Failure::new(format!("{network:?} is no name of a network")));
        }
        if cni::owner(network, *address).map_err(failed)?.as_ref() == Some(owner) {
            return Ok(AddressState::Here);
        }
    }
    state_by_records(node, container, addresses)
}

/// Where a container went that does not have these addresses here.
fn state_by_records(node: &Node, container: &str, addresses: &[ReservedAddress]) -> Result<AddressState, Failure> {
    let left = |record: &&HeldRecord| record.container == container && record.is_about(addresses);
    // Without all records, a node that has lost one might say that the container is gone.
    let newest = HeldRecord::every(node)?;
    match newest.iter().filter(left).max_by_key(|record| record.since_unix_ms) {
        Some(record) => Ok(AddressState::Moved { to: record.node.clone() }),
        None => Ok(state_by_history(&node.registry.reports(), node.registry.is_full(), &node.config.node, container)),
    }
}

/// The same by the reports of a node that has no record of it, the newest first: an older agent wrote no records, and a node can have lost them. A
/// history that `is_full` no longer has all moves.
fn state_by_history(reports: &[Report], is_full: bool, here: &NodeName, container: &str) -> AddressState {
    let moved =
        |report: &&Report| report.container == container && matches!(report.outcome, Outcome::Moved | Outcome::Ended);
    match reports.iter().find(moved) {
        Some(last) if last.source == *here => AddressState::Moved { to: last.destination.clone() },
        Some(_) => AddressState::Gone,
        None if is_full => AddressState::Gone,
        None => AddressState::Unknown,
    }
}

/// Holds again what was lost, and asks the other nodes from now on.
pub fn start(node: &Arc<Node>) -> std::io::Result<()> {
    if let Err(failure) = restore(node) {
        tracing::error!(%failure, "not all addresses of containers that have left are held");
    }
    for HeldReservation { network, address, container } in unrecorded(node) {
        tracing::warn!(%address, network, container, "the address is held, and there is no record of that; see `tranship doctor`");
    }
    let node = Arc::clone(node);
    // Engines may be late when a host starts.
    let watch = move || {
        holders::sweep();
        holders::look_for_images(&node);
        if let Err(failure) = making::restore(&node) {
            tracing::error!(%failure, "not all addresses of containers that have left are held");
        }
        for leftover in notices(&node) {
            tracing::warn!(address = leftover.name, "{}", leftover.note);
        }
        ask::watch(&node);
    };
    threads::start("held addresses", watch).map(drop)
}

/// Holds again what nobody has, such as what somebody has removed from CNI's directory.
fn restore(node: &Node) -> Result<(), Failure> {
    let _changing = changing();
    let of_cni = |record: &&HeldRecord| record.held && !holders::is_of_engine(node, record);
    for record in HeldRecord::all(node)?.iter().filter(of_cni) {
        for reserved in &record.addresses {
            cni::hold_if_free(&record.container, reserved).map_err(failed)?;
        }
    }
    Ok(())
}

/// Addresses that should be held and that another container has, for an operator.
pub fn notices(node: &Node) -> Vec<Leftover> {
    let (records, unreadable) =
        HeldRecord::all_and_unreadable(node).unwrap_or_else(|failure| (Vec::new(), vec![failure]));
    let told = |failure: Failure| {
        let name = record::directory(node).display().to_string();
        Leftover { kind: LeftoverKind::Address, name, removed: false, warning: false, note: failure.message }
    };
    let lost = |record: &HeldRecord, one: &ReservedAddress| {
        let other = cni::owner(&one.network, one.address).ok()??;
        // The container itself, that is coming back.
        (other != cni::holder(&record.container) && other != one.owner).then(|| Leftover {
            kind: LeftoverKind::Address,
            name: format!("{} in CNI's network {}", one.address, one.network),
            removed: false,
            warning: true,
            note: format!(
                "container {} on node {} and container {other} on this one have this address; give one of them another",
                record.container, record.node
            ),
        })
    };
    let held = records.iter().filter(|record| record.held);
    let (of_engines, of_cni): (Vec<_>, Vec<_>) = held.partition(|record| holders::is_of_engine(node, record));
    let lost = of_cni.iter().flat_map(|record| record.addresses.iter().filter_map(|one| lost(record, one)));
    let lost = lost.chain(holders::notices(node, &of_engines));
    lost.chain(unreadable.into_iter().map(told)).collect()
}

/// Reservations in a holder's name of which there is no record.
pub fn unrecorded(node: &Node) -> Vec<HeldReservation> {
    let _changing = changing();
    // Without all records, nothing is to be given back.
    let (Ok(held), Ok(records)) = (cni::held(), HeldRecord::every(node)) else { return Vec::new() };
    let has = |record: &HeldRecord, held: &HeldReservation| {
        let is_it = |one: &ReservedAddress| one.network == held.network && one.address == held.address;
        record.container == held.container && record.addresses.iter().any(is_it)
    };
    held.into_iter().filter(|held| !records.iter().any(|record| has(record, held))).collect()
}

/// What is held here.
///
/// # Errors
/// Records that cannot be read.
pub fn list(node: &Node) -> Result<Vec<HeldAddresses>, Failure> {
    let records = HeldRecord::all(node)?;
    Ok(records.iter().filter(|record| record.held).map(HeldRecord::info).collect())
}

/// Gives back what is held for a container; unless `even_if_alive`, not where its node answers that it has the addresses.
pub fn release(node: &Node, container: &str, even_if_alive: bool) -> Result<Vec<HeldAddresses>, ServiceError> {
    let internal = |failure: Failure| ServiceError::new(ErrorKind::Internal, failure.message, "see the agent's log");
    let records = HeldRecord::all(node).map_err(internal)?;
    let records: Vec<HeldRecord> = records.into_iter().filter(|record| record.container == container).collect();
    if !records.iter().any(|record| record.held) {
        let message = format!("node {} holds no address for container {container:?}", node.config.node);
        return Err(ServiceError::new(ErrorKind::NotFound, message, "`tranship release` lists what it holds"));
    }
    for record in records.iter().filter(|_| !even_if_alive) {
        if let Some(place) = ask::place_of(node, record) {
            let addresses: Vec<IpAddr> = record.addresses.iter().map(|one| one.address).collect();
            let message = format!("container {container} has {addresses:?} on node {place}");
            let remedy = format!(
                "remove it there, which releases them; `tranship release --even-if-alive {container}` has this node give them to another container"
            );
            return Err(ServiceError::new(ErrorKind::Blocked, message, remedy));
        }
    }
    for record in &records {
        end(node, record, holders::COMMAND_PATIENCE).map_err(internal)?;
        tracing::info!(container, migration = %record.migration, "its addresses were released by command");
    }
    Ok(records.iter().filter(|record| record.held).map(HeldRecord::info).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::Mode;

    #[test]
    fn a_node_without_a_record_answers_by_its_history() {
        let node = |text: &str| -> NodeName { text.parse().unwrap() };
        let moved = |id: &str, name: &str, from: &str, to: &str, outcome| {
            let report = Report::new(id.parse().unwrap(), name.into(), node(from), node(to), Mode::Auto, 0);
            Report { outcome, ..report }
        };
        let came = moved("m-1", "web", "a", "b", Outcome::Moved);
        let failed = moved("m-2", "web", "b", "c", Outcome::Failed);
        let left = moved("m-3", "web", "b", "c", Outcome::Moved);
        let other = moved("m-4", "db", "b", "c", Outcome::Moved);
        let state = |reports: &[&Report], is_full| {
            let reports: Vec<Report> = reports.iter().map(|one| (*one).clone()).collect();
            state_by_history(&reports, is_full, &node("b"), "web")
        };
        assert_eq!(state(&[&failed, &came], false), AddressState::Gone);
        assert_eq!(state(&[&left, &came], false), AddressState::Moved { to: node("c") });
        assert_eq!(state(&[&came, &left], false), AddressState::Gone);
        assert_eq!((state(&[&other], false), state(&[&other], true)), (AddressState::Unknown, AddressState::Gone));
    }
}
