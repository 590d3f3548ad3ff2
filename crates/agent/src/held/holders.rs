//! Addresses that an engine gives out by itself: each network's are held by a holder, a container that does nothing else.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tranship_api::{Leftover, LeftoverKind};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Endpoint, Engine, EngineError, Holders, holder_name};
use tranship_types::{AddressState, EngineName, MigrationId, NodeName, ReservedAddress};

use super::record::HeldRecord;
use super::{changing, state_by_records};
use crate::node::{Node, failed};
use crate::program;
use crate::registry::unix_ms;

/// The interface of a holder.
const INTERFACE: &str = "eth0";
/// How long a list of endpoints shows that an address is in use. That it is not in use only a new one shows.
const FRESH: Duration = Duration::from_secs(5);
/// How many holders are made at most until an engine that takes no chosen address has given one the address.
const TRIES: usize = 8;

/// A container that holds an address of which there is no record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StrayHolder {
    pub engine: EngineName,
    pub id: String,
    pub name: String,
    /// The container that it holds the address for.
    pub container: String,
}

/// The engine in which a record's addresses are held, if it has holders.
fn engine_of<'n>(node: &'n Node, record: &HeldRecord) -> Option<&'n Arc<dyn Engine>> {
    let engine = node.engine(record.engine.parse().ok()?);
    engine.holders().is_some().then_some(engine)
}

/// Whether the record is of an engine that has holders.
pub fn is_of_engine(node: &Node, record: &HeldRecord) -> bool {
    engine_of(node, record).is_some()
}

/// What a plan says will be held.
pub fn remark(node: &Node, engine: &dyn Engine, container: &Container) -> Option<String> {
    let (given, _) = engine.holders()?.given_out(container).ok()?;
    let all: Vec<String> = given.iter().map(|one| format!("{} of network {}", one.address, one.network)).collect();
    (node.config.network.hold_addresses && !all.is_empty()).then(|| {
        format!(
            "node {} keeps {} reserved for it until it comes back or is removed: a container of {} holds each",
            node.config.node,
            all.join(", "),
            engine.name()
        )
    })
}

/// The container leaves: writes a record of its addresses, while the engine knows them. May be repeated.
///
/// # Errors
/// A record that cannot be written, an engine that cannot be asked.
pub fn note(
    node: &Node,
    (id, to, to_engine): (&MigrationId, &NodeName, Option<EngineName>),
    engine: &dyn Engine,
    container: &Container,
) -> Result<(), Failure> {
    let Some(holders) = engine.holders() else { return Ok(()) };
    let _changing = changing();
    if HeldRecord::read(node, id)?.is_some() {
        return Ok(());
    }
    let (addresses, others) = holders.given_out(container).map_err(failed)?;
    if addresses.is_empty() && others.is_empty() {
        return Ok(());
    }
    let record = HeldRecord {
        migration: id.clone(),
        container: container.name.clone(),
        engine: engine.name().to_string(),
        to_engine: to_engine.filter(|to| *to != engine.name()).map(|to| to.to_string()),
        node: to.clone(),
        since_unix_ms: unix_ms(),
        held: node.config.network.hold_addresses && !addresses.is_empty(),
        addresses,
        others,
        not_held: None,
    };
    record.write(node)
}

/// The container is gone: holds the addresses that were noted.
///
/// # Errors
/// Why not all of them are held, which is noted.
pub fn hold_left(node: &Node, id: &MigrationId) -> Result<(), Failure> {
    let _changing = changing();
    let Some(record) = HeldRecord::read(node, id)? else { return Ok(()) };
    match hold(node, record)? {
        Some(why) => Err(Failure::new(why)),
        None => Ok(()),
    }
}

/// Holds the addresses of a record that nobody has, and notes why others are not held. Says that.
pub(super) fn hold(node: &Node, record: HeldRecord) -> Result<Option<String>, Failure> {
    hold_by(node, record, &mut HashMap::new())
}

/// The same. `listed` are the endpoints of the engines that were asked for them already, or why these could not be.
fn hold_by(
    node: &Node,
    record: HeldRecord,
    listed: &mut HashMap<EngineName, Result<Vec<Endpoint>, String>>,
) -> Result<Option<String>, Failure> {
    let Some(engine) = engine_of(node, &record).filter(|_| record.held) else { return Ok(None) };
    let Some(holders) = engine.holders() else { return Ok(None) };
    let endpoints = listed.entry(engine.name()).or_insert_with(|| holders.endpoints().map_err(|e| e.to_string()));
    let not_held = match endpoints {
        Err(why) => Some(why.clone()),
        Ok(endpoints) => {
            let mut networks: BTreeMap<&str, Vec<IpAddr>> = BTreeMap::new();
            record.addresses.iter().for_each(|one| networks.entry(&one.network).or_default().push(one.address));
            let missing = networks.iter().filter_map(|(network, wanted)| {
                hold_in(holders, endpoints, (&record.container, network), wanted).err()
            });
            Some(missing.collect::<Vec<_>>().join("; ")).filter(|why| !why.is_empty())
        }
    };
    if not_held != record.not_held {
        if let Some(why) = &not_held {
            tracing::warn!(container = record.container, why, "an address of a container that has left is not held");
        }
        HeldRecord { not_held: not_held.clone(), ..record }.write(node)?;
    }
    Ok(not_held)
}

/// Holds a container's addresses in one network.
fn hold_in(
    holders: &dyn Holders,
    endpoints: &[Endpoint],
    (container, network): (&str, &str),
    wanted: &[IpAddr],
) -> Result<(), String> {
    let there: Vec<&Endpoint> = endpoints.iter().filter(|one| one.network == network).collect();
    let own = |one: &&&Endpoint| one.holds_for.as_deref() == Some(container);
    if there.iter().filter(own).any(|one| one.runs && wanted.iter().all(|ip| one.addresses.contains(ip))) {
        return Ok(());
    }
    let has_one = |one: &&Endpoint| wanted.iter().any(|ip| one.addresses.contains(ip));
    if let Some(other) = there.iter().find(|one| !own(one) && has_one(one)) {
        return match &other.holds_for {
            // It is there still, or comes back.
            None if other.container == container => Ok(()),
            None => Err(format!("container {} of this node has {wanted:?} in network {network}", other.container)),
            Some(holds_for) => Err(format!("{wanted:?} in network {network} is held for container {holds_for}")),
        };
    }
    let holding = || -> Result<(), EngineError> {
        there.iter().filter(own).try_for_each(|left| holders.remove_holder(&left.id))?;
        let name = holder_name(container, network);
        match start(holders, &name, (container, network), wanted) {
            Err(error) if holders.refuses_choice(&error) => wait_for(holders, &name, (container, network), wanted)
                .and_then(|held| if held { Ok(()) } else { Err(error) }),
            started => started.map(drop),
        }
    };
    holding().map_err(|error| format!("{wanted:?} in network {network}: {error}"))
}

/// Starts a holder behind a closed gate; its id.
fn start(holders: &dyn Holders, name: &str, holds: (&str, &str), addresses: &[IpAddr]) -> Result<String, EngineError> {
    let id = holders.make_holder(name, holds, addresses)?;
    let refused = |why: String| EngineError::Refused { engine: "tranship", what: "start", name: name.to_owned(), why };
    let starting = || -> Result<(), EngineError> {
        let program = program::path().map_err(|error| refused(error.to_string()))?;
        let Some(namespace) = holders.namespace(&id) else { return holders.start_holder(&id, &program) };
        let reserved = tranship_network::reserve(&namespace, &[INTERFACE.to_owned()]);
        let started =
            reserved.map_err(|error| refused(error.to_string())).and_then(|()| holders.start_holder(&id, &program));
        // It has lost this name where all went well.
        let removed = tranship_network::remove(&namespace).map_err(|error| refused(error.to_string()));
        started.and(removed)
    };
    match starting() {
        Ok(()) => Ok(id),
        Err(error) => {
            holders.remove_holder(&id)?;
            Err(error)
        }
    }
}

/// Has the engine, which takes no chosen address, give out its next ones until a holder has the addresses; false if none got them.
fn wait_for(holders: &dyn Holders, name: &str, holds: (&str, &str), wanted: &[IpAddr]) -> Result<bool, EngineError> {
    let mut others = Vec::new();
    let mut hold = || -> Result<bool, EngineError> {
        for number in 1..=TRIES {
            let id = start(holders, &format!("{name}.{number}"), holds, &[])?;
            let got = holders.endpoints()?.into_iter().find(|one| one.id == id);
            if got.is_some_and(|got| wanted.iter().all(|ip| got.addresses.contains(ip))) {
                return Ok(true);
            }
            others.push(id);
        }
        Ok(false)
    };
    let held = hold();
    others.iter().try_for_each(|other| holders.remove_holder(other))?;
    held
}

/// Removes the holders of a record.
pub(super) fn release(node: &Node, record: &HeldRecord) -> Result<(), Failure> {
    let Some(holders) = engine_of(node, record).and_then(|engine| engine.holders()).filter(|_| record.held) else {
        return Ok(());
    };
    let is_own = |one: &Endpoint| {
        one.holds_for.as_ref() == Some(&record.container)
            && record.addresses.iter().any(|reserved| reserved.network == one.network)
    };
    let own = holders.endpoints().map_err(failed)?.into_iter().filter(is_own);
    own.into_iter().try_for_each(|one| holders.remove_holder(&one.id)).map_err(failed)
}

/// Holds again whatever is not held, such as after a restart of an engine.
pub(super) fn restore(node: &Node) -> Result<(), Failure> {
    let _changing = changing();
    hold_all(node)
}

fn hold_all(node: &Node) -> Result<(), Failure> {
    let mut listed = HashMap::new();
    HeldRecord::all(node)?.into_iter().try_for_each(|record| hold_by(node, record, &mut listed).map(drop))
}

/// Removes what an agent that died has left of holders that it was starting.
pub(super) fn sweep() {
    let _changing = changing();
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten().map(|entry| entry.path());
    for path in entries.filter(|path| tranship_engine::is_holder_namespace(path)) {
        if let Err(error) = tranship_network::remove(&path) {
            tracing::warn!(%error, "a network namespace for a holder stays");
        }
    }
}

/// Has an engine make a container, and holds again what was lost by that.
///
/// # Errors
/// Those of `make`.
pub fn beside<T>(
    node: &Node,
    engine: &dyn Engine,
    make: impl FnOnce() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    if !engine.holders().is_some_and(Holders::loses_holders) {
        return make();
    }
    let _changing = changing();
    let made = make();
    if let Err(failure) = hold_all(node) {
        tracing::warn!(%failure, "addresses of containers that have left");
    }
    made
}

/// The container is about to be started here: removes the holders of its addresses. Their records stay until it has come.
///
/// # Errors
/// The engine's refusal.
pub fn make_way(node: &Node, container: &str, addresses: &[IpAddr]) -> Result<(), Failure> {
    let _changing = changing();
    let records = HeldRecord::all(node)?;
    records.iter().filter(|record| record.is_of(container, addresses)).try_for_each(|record| release(node, record))
}

/// The endpoints of this node's containers, but for holders, and when they were listed: a node asks for all its records at a time.
static LISTED: Mutex<Option<(Instant, Vec<Endpoint>)>> = Mutex::new(None);

/// [`super::state`] for the addresses of an engine with holders. Any container that has one of them has it, whatever its name and engine.
pub(super) fn state(
    node: &Node,
    (container, engine): (&str, &str),
    addresses: &[ReservedAddress],
) -> Result<AddressState, Failure> {
    let in_use = |endpoints: &[Endpoint]| {
        let is_it =
            |one: &Endpoint, a: &ReservedAddress| one.network == a.network && one.addresses.contains(&a.address);
        endpoints.iter().any(|one| addresses.iter().any(|reserved| is_it(one, reserved)))
    };
    let mut listed = LISTED.lock().unwrap_or_else(PoisonError::into_inner);
    if listed.as_ref().is_some_and(|(at, endpoints)| at.elapsed() < FRESH && in_use(endpoints)) {
        return Ok(AddressState::Here);
    }
    let at = Instant::now();
    let mut all = Vec::new();
    for one in node.all_engines() {
        match one.holders().map(Holders::endpoints) {
            Some(Ok(endpoints)) => all.extend(endpoints.into_iter().filter(|one| one.holds_for.is_none())),
            // Its daemon may be on its way.
            Some(Err(error)) if one.name().as_str() == engine => return Err(failed(error)),
            _ => {}
        }
    }
    let (_, endpoints) = listed.insert((at, all));
    if in_use(endpoints) {
        return Ok(AddressState::Here);
    }
    drop(listed);
    state_by_records(node, container, addresses)
}

/// Addresses of a record that its holders do not have, for an operator.
pub(super) fn notices(node: &Node, record: &HeldRecord) -> Vec<Leftover> {
    let Some(engine) = engine_of(node, record).filter(|_| record.held) else { return Vec::new() };
    let endpoints = engine.holders().map(Holders::endpoints);
    let lost = |one: &ReservedAddress| {
        let note = match &endpoints {
            Some(Ok(endpoints)) => {
                let has = |other: &&Endpoint| other.network == one.network && other.addresses.contains(&one.address);
                match endpoints.iter().filter(has).find(|other| other.runs || other.holds_for.is_none()) {
                    Some(other) if other.holds_for.as_ref() == Some(&record.container) => None,
                    // The container itself, that is coming back.
                    Some(other) if other.holds_for.is_none() && other.container == record.container => None,
                    Some(other) => Some(format!(
                        "container {} on node {} and container {} on this one have this address; give one of them another",
                        record.container, record.node, other.container
                    )),
                    None => Some(not_held(record)),
                }
            }
            _ => Some(not_held(record)),
        }?;
        let name = format!("{} in network {} of {}", one.address, one.network, engine.name());
        Some(Leftover { kind: LeftoverKind::Address, name, removed: false, warning: true, note })
    };
    record.addresses.iter().filter_map(lost).collect()
}

fn not_held(record: &HeldRecord) -> String {
    let why = record.not_held.as_deref().unwrap_or("its holder has ended just now");
    format!(
        "it is not held for container {} on node {}, and may be given to another container here: {why}; this is tried again every 10 s, \
         `tranship release {}` ends it",
        record.container, record.node, record.container
    )
}

/// Holders of which there is no record.
pub fn strays(node: &Node) -> Vec<StrayHolder> {
    let _changing = changing();
    let Ok(records) = HeldRecord::all(node) else { return Vec::new() };
    let mut found = Vec::new();
    for engine in node.engines() {
        // One that cannot be asked is told of elsewhere.
        let Some(Ok(endpoints)) = engine.holders().map(Holders::endpoints) else { continue };
        for one in endpoints {
            let Some(container) = one.holds_for else { continue };
            let is_of = |record: &&HeldRecord| {
                record.held && record.container == container && record.engine == engine.name().as_str()
            };
            if !records.iter().any(|record| is_of(&record) && record.addresses.iter().any(|a| a.network == one.network))
            {
                found.push(StrayHolder { engine: engine.name(), id: one.id, name: one.container, container });
            }
        }
    }
    found
}

/// Removes a holder of which there is no record.
///
/// # Errors
/// The engine's refusal.
pub fn remove_stray(node: &Node, stray: &StrayHolder) -> Result<(), Failure> {
    let _changing = changing();
    node.engine(stray.engine).holders().map_or(Ok(()), |holders| holders.remove_holder(&stray.id)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::{Path, PathBuf};

    use super::*;

    /// An engine that gives out the lowest free address, or the one that is asked for, unless it refuses that.
    #[derive(Default)]
    struct Fake {
        endpoints: RefCell<Vec<Endpoint>>,
        refuses_choice: bool,
    }

    const REFUSAL: &str = "only on chosen subnets";

    fn ip(last: u8) -> IpAddr {
        [10, 1, 0, last].into()
    }

    impl Fake {
        fn with(self, container: &str, holds_for: Option<&str>, last: u8, runs: bool) -> Self {
            self.endpoints.borrow_mut().push(Endpoint {
                id: container.to_owned(),
                container: container.to_owned(),
                holds_for: holds_for.map(str::to_owned),
                network: "lan".to_owned(),
                addresses: vec![ip(last)],
                runs,
            });
            self
        }

        /// Holds address 3 for `web`. What came of it, and who has which address afterwards.
        fn hold(&self) -> (Result<(), String>, Vec<(String, IpAddr)>) {
            let before = self.endpoints.borrow().clone();
            let held = hold_in(self, &before, ("web", "lan"), &[ip(3)]);
            let all = self.endpoints.borrow();
            (held, all.iter().filter(|one| one.runs).map(|one| (one.container.clone(), one.addresses[0])).collect())
        }
    }

    impl Holders for Fake {
        fn given_out(&self, _: &Container) -> Result<(Vec<ReservedAddress>, Vec<ReservedAddress>), EngineError> {
            Ok((Vec::new(), Vec::new()))
        }

        fn endpoints(&self) -> Result<Vec<Endpoint>, EngineError> {
            Ok(self.endpoints.borrow().clone())
        }

        fn make_holder(&self, name: &str, holds: (&str, &str), addresses: &[IpAddr]) -> Result<String, EngineError> {
            let mut all = self.endpoints.borrow_mut();
            let lowest = (2..).map(ip).find(|ip| all.iter().all(|one| !one.runs || one.addresses[0] != *ip));
            all.push(Endpoint {
                id: name.to_owned(),
                container: name.to_owned(),
                holds_for: Some(holds.0.to_owned()),
                network: holds.1.to_owned(),
                addresses: addresses.first().copied().or(lowest).into_iter().collect(),
                runs: !self.refuses_choice || addresses.is_empty(),
            });
            Ok(name.to_owned())
        }

        fn namespace(&self, _: &str) -> Option<PathBuf> {
            None
        }

        fn start_holder(&self, id: &str, _: &Path) -> Result<(), EngineError> {
            let runs = self.endpoints.borrow().iter().any(|one| one.id == id && one.runs);
            let (name, why) = (id.to_owned(), REFUSAL.to_owned());
            if runs { Ok(()) } else { Err(EngineError::Refused { engine: "fake", what: "start", name, why }) }
        }

        fn remove_holder(&self, id: &str) -> Result<(), EngineError> {
            self.endpoints.borrow_mut().retain(|one| one.id != id);
            Ok(())
        }

        fn loses_holders(&self) -> bool {
            false
        }

        fn refuses_choice(&self, error: &EngineError) -> bool {
            error.to_string().contains(REFUSAL)
        }
    }

    #[test]
    fn an_address_is_held_unless_somebody_has_it() {
        let directory = tempfile::tempdir().unwrap();
        program::keep(vec![directory.path().to_owned()]).unwrap();
        let holder = || ("tranship-holds-web.lan".to_owned(), ip(3));

        assert_eq!(Fake::default().hold(), (Ok(()), vec![holder()]));
        let held = Fake::default().with("own", Some("web"), 3, true);
        assert_eq!(held.hold(), (Ok(()), vec![("own".to_owned(), ip(3))]));
        let ended = Fake::default().with("own", Some("web"), 3, false);
        assert_eq!(ended.hold(), (Ok(()), vec![holder()]));
        let itself = Fake::default().with("web", None, 3, false);
        assert_eq!(itself.hold(), (Ok(()), vec![]), "it is coming back");
        let taken = Fake::default().with("other", None, 3, true);
        assert_eq!(taken.hold().0, Err("container other of this node has [10.1.0.3] in network lan".to_owned()));
        let for_another = Fake::default().with("holder", Some("db"), 3, true);
        assert_eq!(for_another.hold().0, Err("[10.1.0.3] in network lan is held for container db".to_owned()));

        // Where no address can be chosen, holders are made until one gets it; the others go.
        let mut unchosen = Fake { refuses_choice: true, ..Fake::default() };
        assert_eq!(unchosen.hold(), (Ok(()), vec![("tranship-holds-web.lan.2".to_owned(), ip(3))]));
        unchosen = Fake { refuses_choice: true, ..Fake::default() }.with("other", None, 4, true);
        assert_eq!(unchosen.hold().1.len(), 2);
        let full = (4..12).fold(Fake { refuses_choice: true, ..Fake::default() }, |fake, last| {
            fake.with(&last.to_string(), None, last, true)
        });
        let before = hold_in(&full, &[], ("web", "lan"), &[ip(40)]);
        assert!(before.unwrap_err().contains(REFUSAL));
        assert_eq!(full.endpoints.borrow().len(), 8, "holders without the address are left");
    }
}
