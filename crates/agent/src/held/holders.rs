//! Holders: containers that only keep addresses reserved, in engines with an IPAM of their own. [`making`] makes them.
//!
//! Every engine may hang, so every wait here ends. Calls to an engine have deadlines. The lock on the records is never
//! held during such a call; [`EngineLock`] is, and taking it has a deadline. No thread that has it waits for a
//! container that arrives: that container's own move needs the lock.
//!
//! [`making`]: super::making

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tranship_api::{Leftover, LeftoverKind};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Endpoint, Engine, EngineError, Holders};
use tranship_types::{AddressState, EngineName, MigrationId, NodeName, ReservedAddress};

use super::engine_lock::EngineLock;
use super::making::{clear_retries, hold, is_of, remove_all};
use super::record::HeldRecord;
use super::{changing, state_by_records};
use crate::node::{Node, failed};
use crate::registry::unix_ms;

/// How long a list of endpoints shows that an address is in use. That it is not in use only a new one shows.
const FRESH: Duration = Duration::from_secs(5);
/// How long a move waits for an engine's lock.
const MOVE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a command, and the thread that asks the peers, wait for it.
pub(super) const COMMAND_PATIENCE: Duration = Duration::from_secs(10);

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
pub(super) fn engine_of<'n>(node: &'n Node, record: &HeldRecord) -> Option<&'n Arc<dyn Engine>> {
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
    let _changing = changing();
    record.write(node)
}

/// Removes the holders of a record.
fn release(_: &EngineLock, record: &HeldRecord, engine: &dyn Engine) -> Result<(), Failure> {
    clear_retries(&record.migration);
    // One that is not installed any more holds nothing.
    let there = engine.is_present() || engine.why_absent().is_some();
    let Some(holders) = engine.holders().filter(|_| there) else { return Ok(()) };
    let mut own = holders.endpoints().map_err(failed)?;
    own.retain(|one| is_of(one, &record.container, record.migration.as_str()));
    if !own.is_empty() {
        images_to_remove(|engines| engines.push(engine.name()));
    }
    remove_all(holders, own.iter().map(|one| one.id.as_str())).map_err(failed)
}

/// Removes a record and its holders. No other thread makes these again meanwhile. `patience` limits the wait for the
/// engine's lock.
pub(super) fn end(node: &Node, record: &HeldRecord, patience: Duration) -> Result<(), Failure> {
    let engine = engine_of(node, record).filter(|_| record.held);
    let lock = engine.map(|engine| EngineLock::take(engine.name(), patience)).transpose()?;
    if let (Some(lock), Some(engine)) = (&lock, engine) {
        release(lock, record, &**engine)?;
    }
    let _changing = changing();
    record.remove(node)
}

/// Engines that may have the image of holders without a holder.
static IMAGES_TO_REMOVE: Mutex<Vec<EngineName>> = Mutex::new(Vec::new());

fn images_to_remove<T>(with: impl FnOnce(&mut Vec<EngineName>) -> T) -> T {
    with(&mut IMAGES_TO_REMOVE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Removes the image of holders from engines that have no holder any more. Where a container is arriving, or another
/// thread has the engine's lock, a later call does it.
pub(super) fn remove_images(node: &Node) {
    for name in images_to_remove(std::mem::take).into_iter().collect::<HashSet<_>>() {
        let Some(holders) = node.engine(name).holders() else { continue };
        let removed = EngineLock::take(name, Duration::ZERO).ok().map(|_lock| holders.remove_image());
        match removed {
            None | Some(Ok(false)) => images_to_remove(|engines| engines.push(name)),
            Some(Ok(true)) => {}
            // It is tried again when the next holder has gone.
            Some(Err(error)) => tracing::info!(%error, "the image of holders stays"),
        }
    }
}

/// Has the next [`remove_images`] look into all engines: an agent that died may have left the image.
pub(super) fn look_for_images(node: &Node) {
    let with_holders = node.engines().filter(|engine| engine.holders().is_some());
    images_to_remove(|engines| engines.extend(with_holders.map(|engine| engine.name())));
}

/// Removes what an agent that died has left of holders that it was starting.
pub(super) fn sweep() {
    // A move that this agent has taken up may be starting one.
    let Ok(_lock) = EngineLock::take(EngineName::Docker, MOVE_PATIENCE) else { return };
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
    let is_its = |record: &HeldRecord| record.held && record.engine == engine.name().as_str();
    let has_some = || HeldRecord::all(node).is_ok_and(|all| all.iter().any(is_its));
    if !engine.holders().is_some_and(Holders::loses_holders) || !has_some() {
        return make();
    }
    // Without the lock the engine may refuse; holders that it loses are made again by `making::restore`.
    let Ok(lock) = EngineLock::take(engine.name(), MOVE_PATIENCE) else { return make() };
    let held = || -> Result<Vec<Endpoint>, EngineError> {
        let all = engine.holders().map_or(Ok(Vec::new()), Holders::endpoints)?;
        Ok(all.into_iter().filter(|one| one.migration.is_some()).collect())
    };
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
        let mut records = HeldRecord::all(node)?.into_iter().filter(is_lost);
        records.try_for_each(|record| hold(&lock, node, &record).map(drop))
    };
    if let Err(failure) = again() {
        tracing::warn!(%failure, "addresses of containers that have left");
    }
    made
}

/// Removes the holders of a container's addresses just before `engine` starts it here. The records stay until it runs.
///
/// # Errors
/// The engine's refusal.
pub fn make_way(node: &Node, engine: &dyn Engine, container: &str, addresses: &[IpAddr]) -> Result<(), Failure> {
    for record in HeldRecord::all(node)?.iter().filter(|record| record.held && record.is_of(container, addresses)) {
        let Some(of_record) = engine_of(node, record) else { continue };
        let released =
            EngineLock::take(of_record.name(), MOVE_PATIENCE).and_then(|lock| release(&lock, record, &**of_record));
        match released {
            // A holder in another engine does not block this one.
            Err(failure) if of_record.name() != engine.name() => {
                tracing::warn!(container, %failure, "the holders in another engine stay until the container runs");
            }
            released => released?,
        }
    }
    Ok(())
}

/// The endpoints of this node's containers, but for holders, and when they were listed. A peer asks for all its records
/// at a time.
static LISTED: Mutex<Option<(Instant, Vec<Endpoint>)>> = Mutex::new(None);

/// [`super::state`] for the addresses of an engine with holders. A container of any name and engine that has one of
/// them counts.
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

/// Addresses of these records that are not held, for an operator. Each engine is asked once.
pub(super) fn notices(node: &Node, records: &[&HeldRecord]) -> Vec<Leftover> {
    let mut listed: HashMap<EngineName, Option<Vec<Endpoint>>> = HashMap::new();
    let mut found = Vec::new();
    for record in records.iter().filter(|record| record.held) {
        let Some(engine) = engine_of(node, record) else { continue };
        let list = || engine.holders().and_then(|holders| holders.endpoints().ok());
        let endpoints = listed.entry(engine.name()).or_insert_with(list);
        found.extend(record.addresses.iter().filter_map(|one| {
            let name = format!("{} in network {} of {}", one.address, one.network, engine.name());
            let note = lost(record, one, endpoints.as_deref())?;
            Some(Leftover { kind: LeftoverKind::Address, name, removed: false, warning: true, note })
        }));
    }
    found
}

/// Why an address of a record is not held, if these are all endpoints of the engine.
fn lost(record: &HeldRecord, one: &ReservedAddress, endpoints: Option<&[Endpoint]>) -> Option<String> {
    let has = |other: &&Endpoint| other.network == one.network && other.addresses.contains(&one.address);
    let Some(endpoints) = endpoints else { return Some(not_held(record)) };
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

fn not_held(record: &HeldRecord) -> String {
    let why = record.not_held.as_deref().unwrap_or("its holder has ended just now");
    format!(
        "it is not held for container {} on node {}, and may be given to another container here: {why}; this is tried \
         again, after 10 s to 10 min, `tranship release {}` ends it",
        record.container, record.node, record.container
    )
}

/// Holders of which there is no record.
pub fn strays(node: &Node) -> Vec<StrayHolder> {
    node.engines().flat_map(|engine| strays_of(node, &**engine)).collect()
}

fn strays_of(node: &Node, engine: &dyn Engine) -> Vec<StrayHolder> {
    // An engine that cannot be asked is told of elsewhere. Without all records, nothing is to be given back.
    let Some(Ok(endpoints)) = engine.holders().map(Holders::endpoints) else { return Vec::new() };
    let Ok(records) = HeldRecord::every(node) else { return Vec::new() };
    let stray = |one: Endpoint| {
        let container = one.holds_for?;
        let is_its = |record: &HeldRecord| {
            record.held
                && record.container == container
                && Some(record.migration.as_str()) == one.migration.as_deref()
                && record.engine == engine.name().as_str()
                && record.addresses.iter().any(|a| a.network == one.network)
        };
        let known = records.iter().any(is_its);
        (!known).then(|| StrayHolder { engine: engine.name(), id: one.id, name: one.container, container })
    };
    endpoints.into_iter().filter_map(stray).collect()
}

/// Removes a holder of which there is no record.
///
/// # Errors
/// The engine's refusal.
pub fn remove_stray(node: &Node, stray: &StrayHolder) -> Result<(), Failure> {
    let engine = node.engine(stray.engine);
    let _lock = EngineLock::take(stray.engine, COMMAND_PATIENCE)?;
    if !strays_of(node, &**engine).contains(stray) {
        return Ok(());
    }
    images_to_remove(|engines| engines.push(stray.engine));
    engine.holders().map_or(Ok(()), |holders| holders.remove_holder(&stray.id)).map_err(failed)
}
