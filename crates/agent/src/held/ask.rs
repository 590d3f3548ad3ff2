//! Asks the nodes that containers moved to whether these have their addresses still.

use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_types::{AddressState, NodeName};
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions};

use super::record::HeldRecord;
use super::{changing, end, restore};
use crate::node::{Node, failed};

/// How often they are asked.
const INTERVAL: Duration = Duration::from_secs(10);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// Over how many nodes a container is followed at a time: what is beyond them is found the next time.
const HOPS: usize = 8;

/// Asks for all records, again and again, until the agent stops. A node that does not answer is asked again.
pub fn watch(node: &Node) {
    while node.pause(INTERVAL) {
        let asked = HeldRecord::all(node).and_then(|records| {
            records.into_iter().for_each(|record| follow(node, record));
            restore(node)
        });
        if let Err(failure) = asked {
            tracing::warn!(%failure, "addresses of containers that have left");
        }
    }
}

/// Asks for one, and notes the answer.
fn follow(node: &Node, record: HeldRecord) {
    let (known, state) = locate(node, &record);
    let noted = match state {
        Ok(AddressState::Gone) => {
            let _changing = changing();
            let (container, migration) = (&record.container, &record.migration);
            tracing::info!(container, %migration, "it is gone from node {known}: its addresses are released");
            end(node, &record)
        }
        Ok(_) if known != record.node => {
            let _changing = changing();
            // It may have come back, or have been released, meanwhile.
            match HeldRecord::read(node, &record.migration) {
                Ok(Some(_)) => HeldRecord { node: known, ..record }.write(node),
                other => other.map(drop),
            }
        }
        Ok(_) => Ok(()),
        Err(failure) => {
            tracing::debug!(container = record.container, %failure, "its node does not tell whether it is there");
            Ok(())
        }
    };
    if let Err(failure) = noted {
        tracing::warn!(%failure, "what became of addresses of a container that has left was not noted");
    }
}

/// The last node that the container is known to have been on, and what that answers.
fn locate(node: &Node, record: &HeldRecord) -> (NodeName, Result<AddressState, Failure>) {
    let mut place = record.node.clone();
    for _ in 0..HOPS {
        match ask(node, &place, record) {
            Ok(AddressState::Moved { to }) if to != node.config.node => place = to,
            state => return (place, state),
        }
    }
    (place, Ok(AddressState::Unknown))
}

/// The node that answers that the container has its addresses there.
pub fn place_of(node: &Node, record: &HeldRecord) -> Option<NodeName> {
    let (place, state) = locate(node, record);
    (state.ok()? == AddressState::Here).then_some(place)
}

fn ask(node: &Node, peer: &NodeName, record: &HeldRecord) -> Result<AddressState, Failure> {
    let mut link = node.dial_within(ANSWER, peer, Purpose::Control, None)?;
    if link.version() < Versions::ADDRESSES {
        return Ok(AddressState::Unknown);
    }
    tranship_transport::Link::set_timeout(&mut link, Some(ANSWER)).map_err(failed)?;
    let HeldRecord { container, engine, addresses, .. } = record.clone();
    tranship_wire::write_message(&mut link, &Request::Addresses { container, engine, addresses }).map_err(failed)?;
    match tranship_wire::read_message(&mut link).map_err(failed)? {
        Response::Addresses { state } => Ok(state),
        Response::Failed { message, .. } => Err(Failure::new(message)),
        other => Err(failed(format!("node {peer} gave an answer that does not fit: {other:?}"))),
    }
}
