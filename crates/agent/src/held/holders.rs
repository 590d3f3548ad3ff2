//! Addresses that an engine gives out by itself: each network's are held by a holder, a container that does nothing else.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tranship_api::{Leftover, LeftoverKind};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Endpoint, Engine, EngineError, Holders, Holding};
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
/// How long after holders could not be made they are made again: the first time, and at most.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_secs(600);
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

/// Whether this node holds addresses of engines with an IPAM of their own.
fn is_on(node: &Node) -> bool {
    node.config.network.hold_addresses && node.config.network.hold_engine_addresses
}

/// What a plan says will be held.
pub fn remark(node: &Node, engine: &dyn Engine, container: &Container) -> Option<String> {
    if !is_on(node) {
        return None;
    }
    let (given, _) = engine.holders()?.given_out(container).ok()?;
    let all: Vec<String> = given.iter().map(|one| format!("{} of network {}", one.address, one.network)).collect();
    (!all.is_empty()).then(|| {
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
    let Some(holders) = engine.holders().filter(|_| is_on(node)) else { return Ok(()) };
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
        held: !addresses.is_empty(),
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

/// When holders that could not be made are made again.
static RETRIES: Mutex<Option<Retries>> = Mutex::new(None);

/// By the record: when it is tried again, and how long after that once more.
#[derive(Debug, Default)]
struct Retries(HashMap<MigrationId, (Instant, Duration)>);

impl Retries {
    fn is_due(&self, id: &MigrationId, now: Instant) -> bool {
        self.0.get(id).is_none_or(|(at, _)| *at <= now)
    }

    /// Notes what came of an attempt.
    fn note(&mut self, id: &MigrationId, made: bool, now: Instant) {
        if made {
            self.0.remove(id);
            return;
        }
        let (at, next) = self.0.entry(id.clone()).or_insert((now, FIRST_RETRY));
        *at = now + *next;
        *next = (*next * 2).min(LAST_RETRY);
    }
}

fn retries<T>(with: impl FnOnce(&mut Retries) -> T) -> T {
    with(RETRIES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// What there is of a record's addresses in one network.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// They are reserved for the container.
    Held,
    /// Another has one of them: why they are not held.
    Elsewhere(String),
    /// Nobody has them.
    Missing,
}

/// The networks of a record, and its addresses in each.
fn networks(record: &HeldRecord) -> Vec<(Holding<'_>, Vec<IpAddr>)> {
    let mut networks: BTreeMap<&str, Vec<IpAddr>> = BTreeMap::new();
    record.addresses.iter().for_each(|one| networks.entry(&one.network).or_default().push(one.address));
    let holding = |network| Holding { container: &record.container, migration: record.migration.as_str(), network };
    networks.into_iter().map(|(network, wanted)| (holding(network), wanted)).collect()
}

/// A record's own holders in a network: the good one, if it is there, and all others.
fn own<'e>(
    endpoints: &'e [Endpoint],
    holding: Holding<'_>,
    wanted: &[IpAddr],
) -> (Option<&'e Endpoint>, Vec<&'e Endpoint>) {
    let is_own = |one: &&Endpoint| one.network == holding.network && is_of(one, holding.container, holding.migration);
    let mut all: Vec<&Endpoint> = endpoints.iter().filter(is_own).collect();
    let is_good = |one: &&Endpoint| one.runs && !one.answers && wanted.iter().all(|ip| one.addresses.contains(ip));
    let good = all.iter().position(is_good).map(|at| all.remove(at));
    (good, all)
}

/// Whether it is a holder for the container that has left by this migration.
fn is_of(one: &Endpoint, container: &str, migration: &str) -> bool {
    one.holds_for.as_deref() == Some(container) && one.migration.as_deref() == Some(migration)
}

fn look(endpoints: &[Endpoint], holding: Holding<'_>, wanted: &[IpAddr]) -> Found {
    let Holding { container, network, migration } = holding;
    if own(endpoints, holding, wanted).0.is_some() {
        return Found::Held;
    }
    let has_one = |one: &&Endpoint| one.network == network && wanted.iter().any(|ip| one.addresses.contains(ip));
    let others = endpoints.iter().filter(|one| !is_of(one, container, migration));
    match others.filter(has_one).find(|one| one.runs || one.holds_for.is_none()) {
        None => Found::Missing,
        Some(other) => match &other.holds_for {
            // It is there still, or comes back.
            None if other.container == container => Found::Held,
            // It left another time, too.
            Some(holds_for) if holds_for == container => Found::Held,
            None => Found::Elsewhere(format!(
                "container {} of this node has {wanted:?} in network {network}",
                other.container
            )),
            Some(holds_for) => {
                Found::Elsewhere(format!("{wanted:?} in network {network} is held for container {holds_for}"))
            }
        },
    }
}

/// Holds the addresses of a record that nobody has, and notes why others are not held. Says that.
pub(super) fn hold(node: &Node, record: HeldRecord) -> Result<Option<String>, Failure> {
    let Some(engine) = engine_of(node, &record).filter(|_| record.held) else { return Ok(None) };
    let Some(holders) = engine.holders() else { return Ok(None) };
    let not_held = match holders.endpoints() {
        Err(error) => Some(error.to_string()),
        Ok(endpoints) => {
            let mut made = true;
            let mut missing = Vec::new();
            for (holding, wanted) in networks(&record) {
                let held = hold_in(holders, &endpoints, holding, &wanted);
                made &= !matches!(&held, Err(NotHeld::Unmade(_)));
                missing.extend(held.err().map(NotHeld::why));
            }
            retries(|retries| retries.note(&record.migration, made, Instant::now()));
            Some(missing.join("; ")).filter(|why| !why.is_empty())
        }
    };
    note_not_held(node, record, not_held.clone())?;
    Ok(not_held)
}

/// Why addresses are not held.
#[derive(Debug, PartialEq, Eq)]
enum NotHeld {
    /// Another has them.
    Elsewhere(String),
    /// There could be no holder.
    Unmade(String),
}

impl NotHeld {
    fn why(self) -> String {
        match self {
            Self::Elsewhere(why) | Self::Unmade(why) => why,
        }
    }
}

/// Notes why addresses of a record are not held, if that is not known yet.
fn note_not_held(node: &Node, record: HeldRecord, not_held: Option<String>) -> Result<(), Failure> {
    if not_held == record.not_held {
        return Ok(());
    }
    if let Some(why) = &not_held {
        tracing::warn!(container = record.container, why, "an address of a container that has left is not held");
    }
    HeldRecord { not_held, ..record }.write(node)
}

/// Holds a container's addresses in one network.
fn hold_in(
    holders: &dyn Holders,
    endpoints: &[Endpoint],
    holding: Holding<'_>,
    wanted: &[IpAddr],
) -> Result<(), NotHeld> {
    // Those that an agent that died has made, one that has ended, one that answers.
    let surplus = own(endpoints, holding, wanted).1.into_iter().map(|one| one.id.as_str());
    let hold = || -> Result<(), EngineError> {
        remove_all(holders, surplus)?;
        if look(endpoints, holding, wanted) == Found::Held {
            return Ok(());
        }
        match start(holders, &holding.name(), holding, wanted) {
            Err(error) if holders.refuses_choice(&error) => {
                wait_for(holders, holding, wanted).and_then(|held| if held { Ok(()) } else { Err(error) })
            }
            started => started.map(drop),
        }
    };
    match look(endpoints, holding, wanted) {
        Found::Elsewhere(why) => Err(NotHeld::Elsewhere(why)),
        _ => hold().map_err(|error| NotHeld::Unmade(format!("{wanted:?} in network {}: {error}", holding.network))),
    }
}

/// Removes holders, also where one of them stays.
fn remove_all<'i>(holders: &dyn Holders, ids: impl Iterator<Item = &'i str>) -> Result<(), EngineError> {
    ids.map(|id| holders.remove_holder(id)).fold(Ok(()), Result::and)
}

/// Starts a holder behind a closed gate; its id.
fn start(holders: &dyn Holders, name: &str, holds: Holding<'_>, addresses: &[IpAddr]) -> Result<String, EngineError> {
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
fn wait_for(holders: &dyn Holders, holds: Holding<'_>, wanted: &[IpAddr]) -> Result<bool, EngineError> {
    let mut others = Vec::new();
    let mut hold = || -> Result<bool, EngineError> {
        for number in 1..=TRIES {
            let id = start(holders, &format!("{}.{number}", holds.name()), holds, &[])?;
            others.push(id);
            let made = others.last();
            let got = holders.endpoints()?.into_iter().find(|one| Some(&one.id) == made);
            if got.is_some_and(|got| wanted.iter().all(|ip| got.addresses.contains(ip))) {
                others.pop();
                return Ok(true);
            }
        }
        Ok(false)
    };
    let held = hold();
    remove_all(holders, others.iter().map(String::as_str))?;
    held
}

/// Removes the holders of a record.
pub(super) fn release(node: &Node, record: &HeldRecord) -> Result<(), Failure> {
    retries(|retries| retries.note(&record.migration, true, Instant::now()));
    let engine = engine_of(node, record).filter(|_| record.held);
    // One that is not installed any more holds nothing.
    let Some(engine) = engine.filter(|engine| engine.is_present() || engine.why_absent().is_some()) else {
        return Ok(());
    };
    let Some(holders) = engine.holders() else { return Ok(()) };
    let mut own = holders.endpoints().map_err(failed)?;
    own.retain(|one| is_of(one, &record.container, record.migration.as_str()));
    remove_all(holders, own.iter().map(|one| one.id.as_str())).map_err(failed)
}

/// Holds again whatever is not held, such as after a restart of an engine. Moves go on between records.
pub(super) fn restore(node: &Node) -> Result<(), Failure> {
    let mut listed: HashMap<EngineName, Result<Vec<Endpoint>, String>> = HashMap::new();
    for record in HeldRecord::all(node)? {
        let Some(engine) = engine_of(node, &record).filter(|_| record.held) else { continue };
        let Some(holders) = engine.holders() else { continue };
        if !retries(|retries| retries.is_due(&record.migration, Instant::now())) {
            continue;
        }
        let endpoints = listed.entry(engine.name()).or_insert_with(|| holders.endpoints().map_err(|e| e.to_string()));
        let unlisted = endpoints.as_ref().err().cloned();
        if unlisted.is_some() && unlisted == record.not_held
            || endpoints.as_ref().is_ok_and(|endpoints| is_as_noted(endpoints, &record))
        {
            continue;
        }
        let _changing = changing();
        // It may have come back meanwhile.
        let Some(record) = HeldRecord::read(node, &record.migration)? else { continue };
        if unlisted.is_some() {
            note_not_held(node, record, unlisted)?;
            continue;
        }
        hold(node, record)?;
        listed.remove(&engine.name());
    }
    Ok(())
}

/// Whether nothing is to be done for a record, by what there is.
fn is_as_noted(endpoints: &[Endpoint], record: &HeldRecord) -> bool {
    let mut missing = Vec::new();
    for (holding, wanted) in networks(record) {
        match look(endpoints, holding, &wanted) {
            Found::Held if own(endpoints, holding, &wanted).1.is_empty() => {}
            Found::Elsewhere(why) => missing.push(why),
            Found::Held | Found::Missing => return false,
        }
    }
    Some(missing.join("; ")).filter(|why| !why.is_empty()) == record.not_held
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
    if !is_on(node) || !engine.holders().is_some_and(Holders::loses_holders) {
        return make();
    }
    let _changing = changing();
    let held = || -> Result<Vec<Endpoint>, EngineError> {
        let all = engine.holders().map_or(Ok(Vec::new()), Holders::endpoints)?;
        Ok(all.into_iter().filter(|one| one.migration.is_some()).collect())
    };
    // If they cannot be listed, what is lost is found by the next look at all.
    let mut lost = held().unwrap_or_default();
    let made = make();
    let mut again = || -> Result<(), Failure> {
        if lost.is_empty() {
            return Ok(());
        }
        let left = held().map_err(failed)?;
        lost.retain(|one| left.iter().all(|other| other.id != one.id));
        let is_lost =
            |record: &HeldRecord| lost.iter().any(|one| is_of(one, &record.container, record.migration.as_str()));
        let records = HeldRecord::all(node)?.into_iter().filter(is_lost);
        records.into_iter().try_for_each(|record| hold(node, record).map(drop))
    };
    if let Err(failure) = again() {
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
    let listed = || LISTED.lock().unwrap_or_else(PoisonError::into_inner);
    if listed().as_ref().is_some_and(|(at, endpoints)| at.elapsed() < FRESH && in_use(endpoints)) {
        return Ok(AddressState::Here);
    }
    let at = Instant::now();
    let mut all = Vec::new();
    let (named, others): (Vec<_>, Vec<_>) = node.all_engines().partition(|one| one.name().as_str() == engine);
    for one in named.into_iter().chain(others) {
        if in_use(&all) {
            break;
        }
        match one.holders().map(Holders::endpoints) {
            Some(Ok(endpoints)) => all.extend(endpoints.into_iter().filter(|one| one.holds_for.is_none())),
            // Its daemon may be on its way.
            Some(Err(error)) if one.name().as_str() == engine => return Err(failed(error)),
            _ => {}
        }
    }
    let is_here = in_use(&all);
    *listed() = Some((at, all));
    if is_here {
        return Ok(AddressState::Here);
    }
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
        "it is not held for container {} on node {}, and may be given to another container here: {why}; this is tried again, after 10 s to 10 min, \
         `tranship release {}` ends it",
        record.container, record.node, record.container
    )
}

/// Holders of which there is no record.
pub fn strays(node: &Node) -> Vec<StrayHolder> {
    let _changing = changing();
    // Without all records, nothing is to be given back.
    let Ok(records) = HeldRecord::every(node) else { return Vec::new() };
    let mut found = Vec::new();
    for engine in node.engines() {
        // One that cannot be asked is told of elsewhere.
        let Some(Ok(endpoints)) = engine.holders().map(Holders::endpoints) else { continue };
        for one in endpoints {
            let Some(container) = one.holds_for else { continue };
            let is_its = |record: &HeldRecord| {
                record.held
                    && record.container == container
                    && Some(record.migration.as_str()) == one.migration.as_deref()
                    && record.engine == engine.name().as_str()
                    && record.addresses.iter().any(|a| a.network == one.network)
            };
            if !records.iter().any(is_its) {
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

    const WEB: Holding<'_> = Holding { container: "web", migration: "m-1", network: "lan" };
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
                migration: holds_for.map(|_| "m-1".to_owned()),
                answers: false,
                network: "lan".to_owned(),
                addresses: vec![ip(last)],
                runs,
            });
            self
        }

        /// Holds address 3 for `web`. What came of it, and who has which address afterwards.
        fn hold(&self) -> (Result<(), NotHeld>, Vec<(String, IpAddr)>) {
            let before = self.endpoints.borrow().clone();
            let held = hold_in(self, &before, WEB, &[ip(3)]);
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

        fn make_holder(&self, name: &str, holds: Holding<'_>, addresses: &[IpAddr]) -> Result<String, EngineError> {
            let mut all = self.endpoints.borrow_mut();
            let lowest = (2..).map(ip).find(|ip| all.iter().all(|one| !one.runs || one.addresses[0] != *ip));
            all.push(Endpoint {
                id: name.to_owned(),
                container: name.to_owned(),
                holds_for: Some(holds.container.to_owned()),
                migration: Some(holds.migration.to_owned()),
                answers: false,
                network: holds.network.to_owned(),
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
    fn holders_that_cannot_be_made_are_tried_less_and_less() {
        let (mut retries, start) = (Retries::default(), Instant::now());
        let (id, other): (MigrationId, MigrationId) = ("m-1".parse().unwrap(), "m-2".parse().unwrap());
        let mut now = start;
        let mut waits = Vec::new();
        for _ in 0..8 {
            retries.note(&id, false, now);
            let wait = (1..=600).find(|s| retries.is_due(&id, now + Duration::from_secs(*s))).unwrap();
            waits.push(wait);
            now += Duration::from_secs(wait);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        assert!(retries.is_due(&other, start));
        retries.note(&id, true, now);
        assert!(retries.is_due(&id, now));
    }

    #[test]
    fn an_address_is_held_unless_somebody_has_it() {
        let directory = tempfile::tempdir().unwrap();
        program::keep(vec![directory.path().to_owned()]).unwrap();
        let holder = || ("tranship-holds-web.lan.m-1".to_owned(), ip(3));

        assert_eq!(Fake::default().hold(), (Ok(()), vec![holder()]));
        let held = Fake::default().with("own", Some("web"), 3, true);
        assert_eq!(held.hold(), (Ok(()), vec![("own".to_owned(), ip(3))]));
        let ended = Fake::default().with("own", Some("web"), 3, false);
        assert_eq!(ended.hold(), (Ok(()), vec![holder()]));
        let itself = Fake::default().with("web", None, 3, false);
        assert_eq!(itself.hold(), (Ok(()), vec![]), "it is coming back");
        let taken = Fake::default().with("other", None, 3, true);
        let elsewhere = |why: &str| Err(NotHeld::Elsewhere(why.to_owned()));
        assert_eq!(taken.hold().0, elsewhere("container other of this node has [10.1.0.3] in network lan"));
        let for_another = Fake::default().with("holder", Some("db"), 3, true);
        assert_eq!(for_another.hold().0, elsewhere("[10.1.0.3] in network lan is held for container db"));

        // What an agent that died has left, a holder that answers, and one of a namesake that left another time.
        let surplus = Fake::default().with("own", Some("web"), 3, true).with("left", Some("web"), 4, true);
        assert_eq!(surplus.hold(), (Ok(()), vec![("own".to_owned(), ip(3))]));
        let answering = Fake::default().with("own", Some("web"), 3, true);
        answering.endpoints.borrow_mut()[0].answers = true;
        assert_eq!(answering.hold(), (Ok(()), vec![holder()]));
        let namesake = Fake::default().with("its", Some("web"), 4, true);
        namesake.endpoints.borrow_mut()[0].migration = Some("m-2".to_owned());
        assert_eq!(namesake.hold(), (Ok(()), vec![("its".to_owned(), ip(4)), holder()]));

        // Where no address can be chosen, holders are made until one gets it; the others go.
        let mut unchosen = Fake { refuses_choice: true, ..Fake::default() };
        assert_eq!(unchosen.hold(), (Ok(()), vec![("tranship-holds-web.lan.m-1.2".to_owned(), ip(3))]));
        unchosen = Fake { refuses_choice: true, ..Fake::default() }.with("other", None, 4, true);
        assert_eq!(unchosen.hold().1.len(), 2);
        let full = (4..12).fold(Fake { refuses_choice: true, ..Fake::default() }, |fake, last| {
            fake.with(&last.to_string(), None, last, true)
        });
        let unmade = hold_in(&full, &[], WEB, &[ip(40)]);
        assert!(matches!(unmade, Err(NotHeld::Unmade(why)) if why.contains(REFUSAL)));
        assert_eq!(full.endpoints.borrow().len(), 8, "holders without the address are left");
    }
}
