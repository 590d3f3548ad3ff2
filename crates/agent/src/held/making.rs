//! Makes holders for the addresses of containers that have left, and makes them again when they are lost.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_engine::{Endpoint, EngineError, Holders, Holding};
use tranship_sys::threads;
use tranship_types::{EngineName, MigrationId};

use super::changing;
use super::engine_lock::EngineLock;
use super::holders::{COMMAND_PATIENCE, engine_of};
use super::record::HeldRecord;
use crate::node::{Node, failed};
use crate::program;

/// The interface of a holder.
const INTERFACE: &str = "eth0";
/// How long after holders could not be made they are made again: the first time, and at most.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_secs(600);
/// How many holders are made at most until an engine that takes no chosen address has given one the address.
const TRIES: usize = 8;
/// How long the thread that makes holders waits for the engine's lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(60);
/// How long a move waits at its end for the holders of its container.
const MOVE_END_PATIENCE: Duration = Duration::from_secs(10);

/// Holders that a thread of their own is making, so that an engine that hangs holds up no move.
#[derive(Debug)]
#[must_use]
pub struct PendingHolders {
    engine: EngineName,
    made: Receiver<Result<Option<String>, Failure>>,
}

/// Starts to make holders for the addresses that [`note`](super::note) recorded. `None`: there are none.
///
/// # Errors
/// A record that cannot be read, no thread.
pub fn hold_left(node: &Arc<Node>, id: &MigrationId) -> Result<Option<PendingHolders>, Failure> {
    let record = HeldRecord::read(node, id)?.filter(|record| record.held);
    let Some(engine) = record.as_ref().and_then(|record| engine_of(node, record)) else { return Ok(None) };
    let (sender, made) = mpsc::channel();
    let (of_thread, id) = (Arc::clone(node), id.clone());
    threads::start("holder", move || sender.send(hold_noted(&of_thread, &id, LOCK_PATIENCE))).map_err(failed)?;
    Ok(Some(PendingHolders { engine: engine.name(), made }))
}

impl PendingHolders {
    /// Waits until they run, for 10 s at most.
    ///
    /// # Errors
    /// Why an address is not held. The record has it, too.
    pub fn wait(self) -> Result<(), Failure> {
        match self.made.recv_timeout(MOVE_END_PATIENCE) {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Failure::new(why)),
            Ok(Err(failure)) => Err(failure),
            Err(_) => {
                let engine = self.engine;
                let why = format!("{engine} did not start a holder within {MOVE_END_PATIENCE:?}; this is tried again");
                Err(Failure::new(why))
            }
        }
    }
}

/// Holds the addresses of a record, if there is one. Returns why some are not held. `patience` limits the wait for the
/// engine's lock.
fn hold_noted(node: &Node, id: &MigrationId, patience: Duration) -> Result<Option<String>, Failure> {
    let record = HeldRecord::read(node, id)?.filter(|record| record.held);
    let Some(engine) = record.as_ref().and_then(|record| engine_of(node, record)) else { return Ok(None) };
    let lock = EngineLock::take(engine.name(), patience)?;
    // A frozen container's move needs the processors. Freezes wait for a short time until the holders run.
    let _until_made = [&node.leaving_slots, &node.arriving_slots].map(|slots| slots.prepare(&|| false));
    // The container may have come back meanwhile.
    let record = HeldRecord::read(node, id)?;
    record.map_or(Ok(None), |record| hold(&lock, node, &record))
}

/// When holders that could not be made, or did not stay, are made again.
static RETRIES: Mutex<Option<Retries>> = Mutex::new(None);

/// By the record: when it is tried again, and how long after that once more.
#[derive(Debug, Default)]
struct Retries(HashMap<MigrationId, (Instant, Duration)>);

impl Retries {
    fn is_due(&self, id: &MigrationId, now: Instant) -> bool {
        self.0.get(id).is_none_or(|(at, _)| *at <= now)
    }

    /// Notes an attempt. Whether its holders stay, the next look at them shows.
    fn note_attempt(&mut self, id: &MigrationId, now: Instant) {
        let (at, next) = self.0.entry(id.clone()).or_insert((now, FIRST_RETRY));
        *at = now + *next;
        *next = (*next * 2).min(LAST_RETRY);
    }
}

fn retries<T>(with: impl FnOnce(&mut Retries) -> T) -> T {
    with(RETRIES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Forgets that holders of a record could not be made, or did not stay.
pub(super) fn clear_retries(id: &MigrationId) {
    retries(|retries| retries.0.remove(id));
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
pub(super) fn is_of(one: &Endpoint, container: &str, migration: &str) -> bool {
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
pub(super) fn hold(_: &EngineLock, node: &Node, record: &HeldRecord) -> Result<Option<String>, Failure> {
    let Some(engine) = engine_of(node, record).filter(|_| record.held) else { return Ok(None) };
    let Some(holders) = engine.holders() else { return Ok(None) };
    let not_held = match holders.endpoints() {
        Err(error) => Some(error.to_string()),
        Ok(endpoints) => {
            retries(|retries| retries.note_attempt(&record.migration, Instant::now()));
            let hold =
                |(holding, wanted): (Holding<'_>, Vec<IpAddr>)| hold_in(holders, &endpoints, holding, &wanted).err();
            let missing: Vec<String> = networks(record).into_iter().filter_map(hold).collect();
            Some(missing.join("; ")).filter(|why| !why.is_empty())
        }
    };
    note_not_held(node, &record.migration, not_held.clone())?;
    Ok(not_held)
}

/// Notes why addresses of a record are not held, if that is not known yet.
fn note_not_held(node: &Node, id: &MigrationId, not_held: Option<String>) -> Result<(), Failure> {
    let _changing = changing();
    let Some(record) = HeldRecord::read(node, id)?.filter(|record| record.not_held != not_held) else { return Ok(()) };
    if let Some(why) = &not_held {
        tracing::warn!(container = record.container, why, "an address of a container that has left is not held");
    }
    HeldRecord { not_held, ..record }.write(node)
}

/// Holds a container's addresses in one network. The error says why they are not held.
fn hold_in(
    holders: &dyn Holders,
    endpoints: &[Endpoint],
    holding: Holding<'_>,
    wanted: &[IpAddr],
) -> Result<(), String> {
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
        Found::Elsewhere(why) => Err(why),
        _ => hold().map_err(|error| format!("{wanted:?} in network {}: {error}", holding.network)),
    }
}

/// Removes holders, also where one of them stays.
pub(super) fn remove_all<'i>(holders: &dyn Holders, ids: impl Iterator<Item = &'i str>) -> Result<(), EngineError> {
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

/// Starts holders without a chosen address, which the engine refuses, until one got the wanted addresses, and removes
/// the others. False if none got them.
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
/// Holds again whatever is not held, such as after a restart of an engine.
pub(super) fn restore(node: &Node) -> Result<(), Failure> {
    let mut listed: HashMap<EngineName, Result<Vec<Endpoint>, String>> = HashMap::new();
    for record in HeldRecord::all(node)? {
        let Some(engine) = engine_of(node, &record).filter(|_| record.held) else { continue };
        let Some(holders) = engine.holders() else { continue };
        if !retries(|retries| retries.is_due(&record.migration, Instant::now())) {
            continue;
        }
        match listed.entry(engine.name()).or_insert_with(|| holders.endpoints().map_err(|e| e.to_string())) {
            Err(unlisted) => note_not_held(node, &record.migration, Some(unlisted.clone()))?,
            Ok(endpoints) if is_as_noted(endpoints, &record) => clear_retries(&record.migration),
            Ok(_) => match hold_noted(node, &record.migration, COMMAND_PATIENCE) {
                Ok(_) => drop(listed.remove(&engine.name())),
                // Others of this engine would wait as long; they have their turn the next time.
                Err(failure) => {
                    tracing::warn!(container = record.container, %failure, "the addresses are not held");
                    listed.insert(engine.name(), Err(failure.message));
                }
            },
        }
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::{Path, PathBuf};

    use tranship_engine::Container;
    use tranship_types::ReservedAddress;

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
        fn hold(&self) -> (Result<(), String>, Vec<(String, IpAddr)>) {
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

        fn remove_image(&self) -> Result<bool, EngineError> {
            Ok(true)
        }

        fn loses_holders(&self) -> bool {
            false
        }

        fn refuses_choice(&self, error: &EngineError) -> bool {
            error.to_string().contains(REFUSAL)
        }
    }

    #[test]
    fn holders_that_do_not_stay_are_made_less_and_less_often() {
        let (mut retries, start) = (Retries::default(), Instant::now());
        let (id, other): (MigrationId, MigrationId) = ("m-1".parse().unwrap(), "m-2".parse().unwrap());
        let mut now = start;
        let mut waits = Vec::new();
        for _ in 0..8 {
            retries.note_attempt(&id, now);
            let wait = (1..=600).find(|s| retries.is_due(&id, now + Duration::from_secs(*s))).unwrap();
            waits.push(wait);
            now += Duration::from_secs(wait);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        assert!(retries.is_due(&other, start));
        retries.0.remove(&id);
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
        let elsewhere = |why: &str| Err(why.to_owned());
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
        assert!(unmade.is_err_and(|why| why.contains(REFUSAL)));
        assert_eq!(full.endpoints.borrow().len(), 8, "holders without the address are left");
    }
}
