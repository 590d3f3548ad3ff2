//! Asks the nodes that containers moved to whether these have their addresses still.

use std::collections::HashMap;
use std::time::Duration;

use tranship_coordinator::{self as coordinator, Failure};
use tranship_transport::{Connection, Link};
use tranship_types::{AddressState, MigrationId, NodeName};
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions};

use super::record::HeldRecord;
use super::{changing, end, holders, making, restore};
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
        let asked = coordinator::caught("the care of addresses of containers that have left", || {
            let mut links = Links::new(node);
            let restored = HeldRecord::all(node).and_then(|records| {
                records.iter().for_each(|record| follow(node, &mut links, record));
                restore(node)?;
                making::restore(node)
            });
            holders::remove_images(node);
            restored
        });
        if let Err(failure) = asked {
            tracing::warn!(%failure, "addresses of containers that have left");
        }
    }
}

/// Asks for one, and notes the answer.
fn follow(node: &Node, links: &mut Links<'_>, record: &HeldRecord) {
    let (place, state) = locate(&node.config.node, &record.node, |peer| links.ask(peer, record));
    if let Err(failure) = &state {
        tracing::debug!(container = record.container, %place, %failure, "the node does not answer whether it has the addresses");
    }
    let noted = match state {
        Ok(AddressState::Gone) => {
            let (container, migration) = (&record.container, &record.migration);
            tracing::info!(container, %migration, "it is gone from node {place}: its addresses are released");
            end(node, record, holders::COMMAND_PATIENCE)
        }
        _ if place == record.node => Ok(()),
        _ => note_place(node, &record.migration, place),
    };
    if let Err(failure) = noted {
        tracing::warn!(%failure, "what became of addresses of a container that has left was not noted");
    }
}

/// Notes where a container is, unless it has come back, or its addresses have been released, meanwhile.
fn note_place(node: &Node, id: &MigrationId, place: NodeName) -> Result<(), Failure> {
    let _changing = changing();
    HeldRecord::read(node, id)?.map_or(Ok(()), |record| HeldRecord { node: place, ..record }.write(node))
}

/// Follows a container from the node `first` on: the last one that it is known to have been on, and what that answers. What `here`
/// has is not asked for.
fn locate(
    here: &NodeName,
    first: &NodeName,
    mut ask: impl FnMut(&NodeName) -> Result<AddressState, Failure>,
) -> (NodeName, Result<AddressState, Failure>) {
    let mut place = first.clone();
    for _ in 0..HOPS {
        match ask(&place) {
            Ok(AddressState::Moved { to }) if to != *here => place = to,
            state => return (place, state),
        }
    }
    (place, Ok(AddressState::Unknown))
}

/// The node that answers that the container has its addresses there.
pub fn place_of(node: &Node, record: &HeldRecord) -> Option<NodeName> {
    let mut links = Links::new(node);
    let (place, state) = locate(&node.config.node, &record.node, |peer| links.ask(peer, record));
    (state.ok()? == AddressState::Here).then_some(place)
}

/// Links to the nodes that are asked, each dialled once. One that has failed is not dialled again.
struct Links<'n> {
    node: &'n Node,
    links: HashMap<NodeName, Option<Connection>>,
}

impl<'n> Links<'n> {
    fn new(node: &'n Node) -> Self {
        Self { node, links: HashMap::new() }
    }

    fn ask(&mut self, peer: &NodeName, record: &HeldRecord) -> Result<AddressState, Failure> {
        let mut link = match self.links.insert(peer.clone(), None) {
            Some(None) => return Err(Failure::new(format!("node {peer} has not answered just now"))),
            Some(Some(link)) => link,
            None => self.node.dial_within(ANSWER, peer, Purpose::Control, None)?,
        };
        let since = match holders::is_of_engine(self.node, record) {
            true => Versions::ENGINE_ADDRESSES,
            false => Versions::ADDRESSES,
        };
        let state = ask(&mut link, record, since)?;
        self.links.insert(peer.clone(), Some(link));
        state
    }
}

/// The answer of a node, which may be that it cannot tell: it does not before this version of the protocol.
///
/// # Errors
/// The link is of no use any more.
fn ask(link: &mut Connection, record: &HeldRecord, since: u16) -> Result<Result<AddressState, Failure>, Failure> {
    if link.version() < since {
        return Ok(Ok(AddressState::Unknown));
    }
    link.set_timeout(Some(ANSWER)).map_err(failed)?;
    let (container, engine) = (record.container.clone(), record.to_engine.as_ref().unwrap_or(&record.engine).clone());
    let addresses = record.all_addresses().cloned().collect();
    tranship_wire::write_message(link, &Request::Addresses { container, engine, addresses }).map_err(failed)?;
    match tranship_wire::read_message(link).map_err(failed)? {
        Response::Addresses { state } => Ok(Ok(state)),
        Response::Failed { message, .. } => Ok(Err(Failure::new(message))),
        other => Err(failed(format!("node {} gave an answer that does not fit: {other:?}", link.peer()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    /// What node a finds that was told that its container is on b.
    fn found(answers: &[(&str, Option<AddressState>)]) -> (String, Option<AddressState>, usize) {
        let answers: HashMap<NodeName, _> = answers.iter().cloned().map(|(node, state)| (name(node), state)).collect();
        let mut asked = 0;
        let (place, state) = locate(&name("a"), &name("b"), |peer| {
            asked += 1;
            answers[peer].clone().ok_or_else(|| Failure::new("it does not answer"))
        });
        (place.to_string(), state.ok(), asked)
    }

    #[test]
    fn a_container_is_followed_over_all_nodes_that_it_has_left() {
        let moved = |to: &str| Some(AddressState::Moved { to: name(to) });
        let (here, gone) = (Some(AddressState::Here), Some(AddressState::Gone));
        assert_eq!(found(&[("b", here.clone())]), ("b".to_owned(), here.clone(), 1));
        assert_eq!(found(&[("b", moved("c")), ("c", here.clone())]), ("c".to_owned(), here, 2));
        let chain = [("b", moved("c")), ("c", moved("d")), ("d", gone.clone())];
        assert_eq!(found(&chain), ("d".to_owned(), gone, 3));
        // One on the way is away: nothing is known, and it is asked first the next time.
        assert_eq!(found(&[("b", moved("c")), ("c", None)]), ("c".to_owned(), None, 2));
        // It has come back, or is about to.
        assert_eq!(found(&[("b", moved("a"))]), ("b".to_owned(), moved("a"), 1));
        let circle = found(&[("b", moved("c")), ("c", moved("b"))]);
        assert_eq!((circle.1, circle.2), (Some(AddressState::Unknown), HOPS));
    }
}
