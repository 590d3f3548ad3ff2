//! Keeps paths as long as they are needed. Each turn compares the answers of engines and of the other nodes with the records, and the
//! records with the kernel.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tranship_coordinator::{self as coordinator, Failure};
use tranship_transport::{Connection, Link};
use tranship_types::{MigrationId, NodeName, PathEnd};
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions};

use super::listing::{Listing, Presence};
use super::record::{Member, PathRecord, Resident};
use super::{apply, changing, is_back, names};
use crate::node::{Node, failed};

/// How often the other nodes are asked, in steps of a [`STEP`].
const INTERVAL: u32 = 10;
const STEP: Duration = Duration::from_secs(1);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// In how many looks in a row a container that runs and was on the bridge counts as there, though it is not on it.
const ELSEWHERE: u32 = 3;

/// Something has changed that may end a path, or the names that belong to it.
static CHANGED: AtomicBool = AtomicBool::new(false);

/// Has the paths looked at soon.
pub fn look_soon() {
    CHANGED.store(true, Ordering::Relaxed);
}

/// Looks at all paths, again and again, until the agent stops.
pub fn watch(node: &Node) {
    let (mut left, mut listing) = (0u32, Listing::default());
    while node.pause(STEP) {
        left = if CHANGED.swap(false, Ordering::Relaxed) { 0 } else { left.saturating_sub(1) };
        // A container that is frozen needs the processors.
        if left > 0 || !node.is_quiet() {
            continue;
        }
        left = INTERVAL;
        let done = coordinator::caught("the care of kept paths", || {
            turn(node, &mut listing);
            Ok(())
        });
        if let Err(failure) = done {
            tracing::error!(%failure, "kept paths");
        }
    }
}

/// Looks at all paths. `listing` is that of the turn before.
pub fn turn(node: &Node, listing: &mut Listing) {
    let records = PathRecord::readable(node);
    if records.is_empty() {
        *listing = Listing::default();
        return;
    }
    let bridges: BTreeSet<&str> = records.iter().map(|record| record.bridge.as_str()).collect();
    let Some(now) = Listing::take(node, &bridges, listing) else { return look_soon() };
    let mut peers = Peers { node, links: HashMap::new() };
    for record in &records {
        if let Err(failure) = look(node, record, &now, &mut peers) {
            tracing::warn!(network = record.network, peer = %record.peer, %failure, "a kept path was not looked at");
        }
    }
    names::write(node, &records, &now);
    *listing = now;
}

/// How a path stands at the other node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathState {
    /// There is a record.
    pub kept: bool,
    /// Somebody is on the bridge, or was and is stopped.
    pub occupied: bool,
    /// Who.
    pub ends: Vec<PathEnd>,
}

/// How many ports the bridge has that belong to no path.
pub fn ports(bridge: &str) -> Result<usize, Failure> {
    let all = tranship_network::bridges().map_err(failed)?;
    Ok(all.iter().find(|one| one.name == bridge).map_or(0, |one| one.ports.len()))
}

/// Links to the nodes that are asked in a turn, each dialled once. One that has failed is not dialled again.
struct Peers<'n> {
    node: &'n Node,
    links: HashMap<NodeName, Option<Connection>>,
}

impl Peers<'_> {
    fn ask(&mut self, record: &PathRecord) -> Result<PathState, Failure> {
        let mut link = match self.links.insert(record.peer.clone(), None) {
            Some(None) => return Err(Failure::new(format!("node {} has not answered just now", record.peer))),
            Some(Some(link)) => link,
            None => self.node.dial_within(ANSWER, &record.peer, Purpose::Control, None)?,
        };
        if link.version() < Versions::PATHS {
            return Err(Failure::new(format!("the agent of node {} is too old to answer", record.peer)));
        }
        link.set_timeout(Some(ANSWER)).map_err(failed)?;
        tranship_wire::write_message(&mut link, &Request::Path { id: record.id }).map_err(failed)?;
        let answer = tranship_wire::read_message(&mut link).map_err(failed)?;
        self.links.insert(record.peer.clone(), Some(link));
        match answer {
            Response::Path { kept, occupied, ends } => Ok(PathState { kept, occupied, ends }),
            Response::Failed { message, .. } => Err(Failure::new(message)),
            other => Err(failed(format!("node {} gave an answer that does not fit: {other:?}", record.peer))),
        }
    }
}

/// Whether a move of a container that the path is for is under way.
fn is_in_use(node: &Node, record: &PathRecord) -> bool {
    let is_moving = |member: &Member| node.busy_with(&member.end.container).is_some();
    !record.pending.is_empty() || record.members.iter().any(is_moving)
}

/// Looks at one path: asks the other node, writes what has changed, and makes the kernel's device match.
fn look(node: &Node, record: &PathRecord, listing: &Listing, peers: &mut Peers<'_>) -> Result<(), Failure> {
    // A move under way needs it in any case, also one that brings a container back.
    let asked = (!record.is_unused() && !is_in_use(node, record)).then(|| peers.ask(record));
    if let Some(Err(failure)) = &asked {
        tracing::debug!(peer = %record.peer, %failure, "the other end of a path does not answer");
    }
    let answer = asked.and_then(Result::ok);
    let has_ended = |one: &&Member| {
        let journal = node.journals().join(format!("{}.jsonl", one.migration));
        node.busy_with(&one.end.container).is_none() && !journal.exists()
    };
    let ended: Vec<MigrationId> = record.pending.iter().filter(has_ended).map(|one| one.migration.clone()).collect();
    let seen = Seen {
        on: listing.on(&record.bridge),
        ports: ports(&record.bridge)?,
        ended: &ended,
        presence: &|resident| listing.presence(resident),
    };
    let after = next(&node.config.node, record, &seen, answer.as_ref());
    let _changing = changing();
    let is_as_it_was = PathRecord::read(node, record.id)?.as_ref() == Some(record);
    if !is_as_it_was || (answer.is_some() && is_in_use(node, record)) {
        // What was seen may be from before that.
        look_soon();
        return Ok(());
    }
    if after != *record {
        if after.is_unused() && !record.is_unused() {
            tracing::info!(network = record.network, peer = %record.peer, "nobody needs the path any more");
        }
        after.write(node)?;
    }
    apply(&after)
}

/// What a turn has seen of a path on this node.
struct Seen<'a> {
    /// Who runs on the bridge.
    on: Vec<Resident>,
    ports: usize,
    /// Moves that are pending in the record, and have ended: an agent died before it had noted how.
    ended: &'a [MigrationId],
    presence: &'a dyn Fn(&Resident) -> Presence,
}

/// What becomes of a record of node `own`; without members and moves where nobody needs the path. Without an answer of the other node,
/// members stay.
fn next(own: &NodeName, record: &PathRecord, seen: &Seen<'_>, answer: Option<&PathState>) -> PathRecord {
    let mut after = record.clone();
    after.residents = residents(record, seen);
    after.occupied = seen.ports > 0 || !after.residents.is_empty();
    for migration in seen.ended {
        settle_pending(own, &mut after, seen, migration);
    }
    let Some(answer) = answer else { return after };
    after.beyond.clone_from(&answer.ends);
    if !answer.kept {
        after.members.clear();
        return after;
    }
    let PathRecord { residents, occupied, .. } = &after;
    let (occupied, residents) = (*occupied, residents.clone());
    after.members.retain(|member| match member.home == *own {
        true => {
            let has_it = answer.ends.iter().any(|end| end.container == member.end.container);
            let is_back = |one: &Resident| is_back(member, &one.end.container, &one.end.addresses);
            occupied && has_it && !residents.iter().any(is_back)
        }
        false => answer.occupied && residents.iter().any(|one| one.is_member(member)),
    });
    after
}

/// Who is on the bridge by now, or was and may come back.
fn residents(record: &PathRecord, seen: &Seen<'_>) -> Vec<Resident> {
    let mut residents = seen.on.clone();
    for before in &record.residents {
        if residents.iter().any(|one| one.is(before)) {
            continue;
        }
        match (seen.presence)(before) {
            Presence::Unknown => residents.push(before.clone()),
            Presence::Stopped => {
                let end = PathEnd { addresses: Vec::new(), ..before.end.clone() };
                residents.push(Resident { end, elsewhere: 0, ..before.clone() });
            }
            // It is being started: Docker attaches networks when the first process is there. Or it was put on another network.
            Presence::Running if before.elsewhere < ELSEWHERE => {
                let end = PathEnd { addresses: Vec::new(), ..before.end.clone() };
                residents.push(Resident { end, elsewhere: before.elsewhere + 1, ..before.clone() });
            }
            Presence::Running | Presence::Gone => {}
        }
    }
    residents.sort_by(|one, other| {
        let key = |one: &Resident| (one.engine.as_str(), one.end.container.clone(), one.id.clone());
        key(one).cmp(&key(other))
    });
    residents
}

/// Takes a move that has ended without a word for what it has become: the container is where it went, or still at home.
fn settle_pending(own: &NodeName, record: &mut PathRecord, seen: &Seen<'_>, migration: &MigrationId) {
    let Some(member) = record.pending.iter().find(|one| one.migration == *migration).cloned() else { return };
    let Some(engine) = member.engine else { return };
    let container = Resident { engine, id: member.id.clone(), end: member.end.clone(), elsewhere: 0 };
    let is_here = match (seen.presence)(&container) {
        // It is looked at again.
        Presence::Unknown => return,
        Presence::Gone => false,
        Presence::Stopped | Presence::Running => true,
    };
    let has_come = member.home != *own && is_here;
    if has_come && !record.residents.iter().any(|one| one.is_member(&member)) {
        record.residents.push(container);
    }
    if has_come || (member.home == *own && !is_here) {
        record.confirm(migration);
    } else {
        record.pending.retain(|one| one.migration != *migration);
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use tranship_types::EngineName;

    use super::*;

    fn end(name: &str, address: &str) -> PathEnd {
        PathEnd { container: name.to_owned(), names: Vec::new(), addresses: vec![address.parse().unwrap()] }
    }

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn resident(name: &str, address: &str) -> Resident {
        Resident { engine: EngineName::Docker, id: format!("id of {name}"), end: end(name, address), elsewhere: 0 }
    }

    /// On node a, of `app`, which has this home.
    fn record(home: &str) -> PathRecord {
        let mut record = PathRecord::for_test("b", &["app"]);
        record.members[0].home = node(home);
        record
    }

    fn seen<'a>(on: &[Resident], presence: &'a dyn Fn(&Resident) -> Presence) -> Seen<'a> {
        Seen { on: on.to_vec(), ports: on.len(), ended: &[], presence }
    }

    fn is_kept(home: &str, here: &[Resident], beyond: (bool, bool, &[PathEnd])) -> bool {
        let (kept, occupied, ends) = beyond;
        let beyond = PathState { kept, occupied, ends: ends.to_vec() };
        !next(&node("a"), &record(home), &seen(here, &|_| Presence::Gone), Some(&beyond)).is_unused()
    }

    #[test]
    fn a_path_is_kept_while_one_has_moved_and_others_have_stayed() {
        let (app, db) = (end("app", "10.79.0.6"), end("db", "10.79.0.5"));
        let (app_here, db_here) = (resident("app", "10.79.0.6"), resident("db", "10.79.0.5"));
        let stopped = PathEnd { addresses: Vec::new(), ..app.clone() };
        let here = slice::from_ref(&db_here);
        // It is on b, and db has stayed.
        assert!(is_kept("a", here, (true, true, slice::from_ref(&app))));
        assert!(is_kept("a", here, (true, true, &[stopped])));
        assert!(!is_kept("a", &[], (true, true, slice::from_ref(&app))), "db has followed, or is gone");
        assert!(!is_kept("a", here, (true, false, &[])), "it is gone from b");
        assert!(!is_kept("a", here, (false, false, &[])), "b keeps no path");
        let back = [db_here.clone(), app_here.clone()];
        assert!(!is_kept("a", &back, (true, true, slice::from_ref(&app))), "it is back");
        let other = [db_here, resident("app", "10.79.0.9")];
        assert!(is_kept("a", &other, (true, true, slice::from_ref(&app))), "another one of its name");
        // It came from b.
        let (here, others) = (slice::from_ref(&app_here), slice::from_ref(&db));
        assert!(is_kept("b", here, (true, true, others)));
        assert!(!is_kept("b", &[], (true, true, others)), "it is gone");
        assert!(!is_kept("b", here, (true, false, others)), "nobody is on b any more");
        assert!(!is_kept("b", &[resident("web", "10.79.0.6")], (true, true, others)), "another one");
    }

    #[test]
    fn a_container_whose_engine_is_away_or_that_is_stopped_counts_as_there() {
        let mut record = record("b");
        let here = resident("app", "10.79.0.6");
        record.residents = vec![here.clone()];
        let beyond = PathState { kept: true, occupied: true, ends: vec![end("db", "10.79.0.5")] };
        let after = |presence: Presence| next(&node("a"), &record, &seen(&[], &move |_| presence), Some(&beyond));
        assert_eq!(after(Presence::Unknown).residents, slice::from_ref(&here));
        assert!(!after(Presence::Unknown).is_unused() && after(Presence::Unknown).occupied);
        let stopped = after(Presence::Stopped);
        assert!(!stopped.is_unused() && stopped.ends()[0].addresses.is_empty(), "{stopped:?}");
        assert!(after(Presence::Gone).is_unused() && !after(Presence::Gone).occupied);
        // It is being started, or was put on another network; that is seen after some looks.
        let mut moved = record.clone();
        for look in 0..ELSEWHERE {
            moved = next(&node("a"), &moved, &seen(&[], &|_| Presence::Running), Some(&beyond));
            assert!(!moved.is_unused() && moved.occupied, "look {look}");
        }
        let back = next(&node("a"), &moved, &seen(slice::from_ref(&here), &|_| Presence::Running), Some(&beyond));
        assert_eq!(back.residents, slice::from_ref(&here));
        let elsewhere = next(&node("a"), &moved, &seen(&[], &|_| Presence::Running), Some(&beyond));
        assert!(elsewhere.is_unused() && !elsewhere.occupied);
        // Another container has its name now.
        let new = Resident { id: "another id".to_owned(), ..here.clone() };
        record.residents = vec![here];
        let after = next(&node("a"), &record, &seen(slice::from_ref(&new), &|_| Presence::Gone), None);
        assert_eq!(after.residents, [new]);
    }

    #[test]
    fn a_node_that_does_not_answer_decides_nothing() {
        let before = record("a");
        let after = next(&node("a"), &before, &seen(&[], &|_| Presence::Gone), None);
        assert_eq!((after.members, after.occupied), (before.members, false));
    }

    #[test]
    fn a_move_whose_agent_died_is_what_the_engine_shows() {
        let of = |home: &str, presence: Presence| {
            let mut before = record(home);
            before.pending = std::mem::take(&mut before.members);
            let ended = [before.pending[0].migration.clone()];
            let seen = Seen { on: Vec::new(), ports: 1, ended: &ended, presence: &move |_| presence };
            let after = next(&node("a"), &before, &seen, None);
            (after.members.len(), after.pending.len())
        };
        // It was to leave a.
        assert_eq!(of("a", Presence::Gone), (1, 0));
        assert_eq!(of("a", Presence::Running), (0, 0));
        assert_eq!(of("a", Presence::Unknown), (0, 1));
        // It was to come to a.
        assert_eq!(of("b", Presence::Gone), (0, 0));
        assert_eq!(of("b", Presence::Stopped), (1, 0));
        assert_eq!(of("b", Presence::Unknown), (0, 1));
    }

    #[test]
    fn what_moves_again_is_one_member() {
        let mut record = record("a");
        let again = Member { home: node("b"), migration: "m-2".parse().unwrap(), ..record.members[0].clone() };
        record.pending.push(again.clone());
        assert!(record.confirm(&again.migration) && !record.confirm(&again.migration));
        assert_eq!((record.members, record.pending), (vec![again], Vec::new()));
    }
}
