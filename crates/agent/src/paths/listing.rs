//! What all engines list at one time: who is on which bridge, and whether a container is there at all.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use tranship_coordinator::Failure;
use tranship_engine::{AttachedNetwork, Container, Engine, EngineError, State, Summary};
use tranship_network::{BridgePort, bridge_ports};
use tranship_types::{EngineName, PathEnd};

use super::record::Resident;
use crate::local_networks;
use crate::node::{Node, failed};

/// What is known of a container that was on a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Its engine does not have it any more.
    Gone,
    /// Its engine has it, and it does not run.
    Stopped,
    /// It runs.
    Running,
    /// Its engine does not answer, or says that it runs and not by which process.
    Unknown,
}

/// A container that runs and has interfaces on bridges of the node.
pub struct Running {
    /// The engine that it is of, and what that calls it.
    engine: EngineName,
    id: String,
    init: u32,
    ports: Vec<BridgePort>,
    /// What its engine has of it.
    pub container: Container,
    networks: Vec<AttachedNetwork>,
}

impl Running {
    /// Who it is on a bridge, if it is there.
    pub fn on(&self, bridge: &str) -> Option<Resident> {
        let here = self.ports.iter().filter(|port| port.bridge == bridge);
        let addresses = here.clone().flat_map(|port| &port.addresses);
        // The kernel makes link-local addresses by itself.
        let addresses: Vec<_> = addresses.filter(|address| !local_networks::is_link_local(address)).copied().collect();
        here.clone().next()?;
        let network = self.networks.iter().find(|network| network.addresses.iter().any(|one| addresses.contains(one)));
        let names = network.map(|network| network.names.clone()).unwrap_or_default();
        let end = PathEnd { container: self.container.name.clone(), names, addresses };
        Some(Resident { engine: self.engine, id: self.id.clone(), end, elsewhere: 0 })
    }
}

/// One answer of each engine.
#[derive(Default)]
pub struct Listing {
    /// Those of engines that have answered.
    engines: HashMap<EngineName, Vec<Summary>>,
    running: Vec<Arc<Running>>,
}

impl Listing {
    /// Asks each engine once for its containers, and for more of those on these bridges that `before` does not have. `None` where a
    /// container is being frozen, which does not wait.
    pub fn take(node: &Node, bridges: &BTreeSet<&str>, before: &Self) -> Option<Self> {
        let mut listing = Self::default();
        for engine in node.all_engines().filter(|engine| engine.is_present()) {
            if !node.is_quiet() {
                return None;
            }
            match of_engine(&**engine, bridges, before) {
                Ok((all, running)) => {
                    listing.engines.insert(engine.name(), all);
                    listing.running.extend(running);
                }
                Err(failure) => {
                    tracing::debug!(engine = %engine.name(), %failure, "an engine does not list its containers");
                }
            }
        }
        Some(listing)
    }

    /// Those on any of the bridges.
    pub fn running(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().map(|one| &**one)
    }

    /// Those that run and are on a bridge, in order.
    pub fn on(&self, bridge: &str) -> Vec<Resident> {
        self.running().filter_map(|one| one.on(bridge)).collect()
    }

    /// What is known of a container.
    pub fn presence(&self, resident: &Resident) -> Presence {
        let Some(all) = self.engines.get(&resident.engine) else { return Presence::Unknown };
        let is_it =
            |one: &&Summary| one.name == resident.end.container && (resident.id.is_empty() || one.id == resident.id);
        match all.iter().find(is_it) {
            None => Presence::Gone,
            Some(one) if one.init == 0 && one.state == State::Running => Presence::Unknown,
            Some(one) if one.init == 0 => Presence::Stopped,
            Some(_) => Presence::Running,
        }
    }
}

type Listed = (Vec<Summary>, Vec<Arc<Running>>);

fn of_engine(engine: &dyn Engine, bridges: &BTreeSet<&str>, before: &Listing) -> Result<Listed, Failure> {
    let (mut all, mut running) = (engine.list().map_err(failed)?, Vec::new());
    for one in all.iter_mut().filter(|one| one.init != 0) {
        let namespace = local_networks::namespace(one.init);
        let ports = match bridge_ports(&namespace) {
            Ok(ports) => ports,
            Err(error) if Path::new(&namespace).exists() => return Err(failed(error)),
            Err(_) => {
                // It has ended meanwhile.
                (one.init, one.state) = (0, State::Stopped);
                continue;
            }
        };
        if !ports.iter().any(|port| bridges.contains(port.bridge.as_str())) {
            continue;
        }
        let is_it = |known: &&Arc<Running>| {
            (known.engine, &known.id, &known.container.name) == (engine.name(), &one.id, &one.name)
                && known.init == one.init
                && known.ports == ports
        };
        if let Some(known) = before.running.iter().find(is_it) {
            running.push(Arc::clone(known));
            continue;
        }
        match engine.inspect(&one.name) {
            Ok(container) => {
                let (engine_name, networks) = (engine.name(), engine.networks(&container));
                let (id, init) = (one.id.clone(), one.init);
                running.push(Arc::new(Running { engine: engine_name, id, init, ports, container, networks }));
            }
            Err(EngineError::NoSuchContainer { .. }) => (one.init, one.state) = (0, State::Stopped),
            Err(error) => return Err(failed(error)),
        }
    }
    Ok((all, running))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tranship_engine::{Docker, Runc};

    use super::*;
    use crate::freeze_slots::Owner;

    #[test]
    fn engines_are_not_asked_while_a_container_is_frozen() {
        let directory = tempfile::tempdir().unwrap();
        let runc = Runc::new("runc".into(), Some(directory.path().join("runc")), None);
        let node = Node::for_test(directory.path(), "", vec![Arc::new(runc)]);
        let take = || Listing::take(&node, &BTreeSet::new(), &Listing::default()).is_some();
        assert!(take());
        for slots in [&node.leaving_slots, &node.arriving_slots] {
            let place = slots.queue(Owner::Move("m-1".parse().unwrap()));
            let slot = place.wait(Duration::from_secs(20), &|| false).ok().unwrap();
            assert!(!node.is_quiet() && !take());
            drop(slot);
            assert!(take());
        }
    }

    #[test]
    fn a_container_of_an_engine_that_is_away_is_not_gone() {
        let directory = tempfile::tempdir().unwrap();
        let runc = Runc::new("runc".into(), Some(directory.path().join("runc")), None);
        let dead = directory.path().join("docker.sock");
        let docker = Docker { socket: dead.clone(), runtime: String::new(), runc: runc.clone() };
        let node = Node::for_test(directory.path(), "", vec![Arc::new(runc), Arc::new(docker)]);
        let of = |engine| Resident {
            engine,
            id: String::new(),
            end: PathEnd { container: "db".to_owned(), names: Vec::new(), addresses: Vec::new() },
            elsewhere: 0,
        };
        let take = || Listing::take(&node, &BTreeSet::from(["br7"]), &Listing::default()).unwrap();
        // At boot there is no socket, and later one at which nobody listens.
        assert_eq!(take().presence(&of(EngineName::Docker)), Presence::Unknown);
        std::os::unix::net::UnixListener::bind(&dead).map(drop).unwrap();
        assert_eq!(take().presence(&of(EngineName::Docker)), Presence::Unknown);
        assert_eq!(take().presence(&of(EngineName::Runc)), Presence::Gone);
    }
}
