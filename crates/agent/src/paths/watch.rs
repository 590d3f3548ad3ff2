//! Keeps paths as long as they are needed: asks the other node of each, and removes what nobody needs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_engine::name_beyond;
use tranship_transport::Link;
use tranship_types::{BlockerKind, NodeName, PathEnd};
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions};

use super::record::PathRecord;
use super::{changing, end, ensure};
use crate::local_networks;
use crate::node::{Node, failed};

/// How often the other nodes are asked, in steps of a [`STEP`].
const INTERVAL: u32 = 10;
const STEP: Duration = Duration::from_secs(1);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(5);

/// Something has changed that may end a path, or the names that belong to it.
static CHANGED: AtomicBool = AtomicBool::new(false);

/// Has the paths looked at soon.
pub fn look_soon() {
    CHANGED.store(true, Ordering::Relaxed);
}

/// Looks at all paths, again and again, until the agent stops.
pub fn watch(node: &Node) {
    let mut left = 0u32;
    while node.pause(STEP) {
        left = if CHANGED.swap(false, Ordering::Relaxed) { 0 } else { left.saturating_sub(1) };
        if left > 0 {
            continue;
        }
        left = INTERVAL;
        match PathRecord::all(node) {
            Ok(records) => records.iter().for_each(|record| {
                if let Err(failure) = look(node, record) {
                    tracing::warn!(network = record.network, peer = %record.peer, %failure, "a kept path was not looked at");
                }
            }),
            Err(failure) => tracing::warn!(%failure, "kept paths are not looked at"),
        }
    }
}

/// How a path stands at one of its ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathState {
    /// There is a record.
    pub kept: bool,
    /// Somebody is on the bridge, or was and is stopped.
    pub occupied: bool,
    /// Who.
    pub ends: Vec<PathEnd>,
}

impl PathState {
    /// As it is told to the other node.
    pub fn response(self) -> Response {
        let Self { kept, occupied, ends } = self;
        Response::Path { kept, occupied, ends }
    }
}

/// Whether a container is there; `None` where that cannot be told.
pub fn exists(node: &Node, container: &str) -> Option<bool> {
    match node.find(container, None) {
        Ok(_) => Some(true),
        Err(blocker) if blocker.kind == BlockerKind::NoSuchContainer => Some(false),
        Err(_) => None,
    }
}

/// How many ports the bridge has that belong to no path.
pub fn ports(bridge: &str) -> Result<usize, Failure> {
    let all = tranship_network::bridges().map_err(failed)?;
    Ok(all.iter().find(|one| one.name == bridge).map_or(0, |one| one.ports.len()))
}

/// Whether somebody is on this node's bridge, or was and is only stopped.
fn is_occupied(node: &Node, record: &PathRecord) -> Result<bool, Failure> {
    let may_return = |name: &String| exists(node, name) != Some(false);
    Ok(ports(&record.bridge)? > 0 || record.here.iter().any(may_return))
}

/// How a path stands at this node, for the other one.
pub fn state(node: &Node, peer: &NodeName, id: u32) -> Result<PathState, Failure> {
    let Some(record) = PathRecord::read(node, id)?.filter(|record| record.peer == *peer) else {
        return Ok(PathState { kept: false, occupied: false, ends: Vec::new() });
    };
    let mut ends = ends(node, &record)?;
    // Those that went there and are stopped, or are about to come.
    for member in record.members.iter().chain(&record.pending).filter(|member| member.home == *peer) {
        let name = &member.end.container;
        if !ends.iter().any(|end| end.container == *name) && exists(node, name) != Some(false) {
            ends.push(PathEnd { addresses: Vec::new(), ..member.end.clone() });
        }
    }
    Ok(PathState { kept: true, occupied: is_occupied(node, &record)?, ends })
}

fn ends(node: &Node, record: &PathRecord) -> Result<Vec<PathEnd>, Failure> {
    let found = local_networks::ends(node, &record.bridge, None)?;
    Ok(found.into_iter().map(|(_, end)| end).collect())
}

fn ask(node: &Node, record: &PathRecord) -> Result<PathState, Failure> {
    let mut link = node.dial_within(ANSWER, &record.peer, Purpose::Control, None)?;
    if link.version() < Versions::PATHS {
        return Err(Failure::new(format!("the agent of node {} is too old to answer", record.peer)));
    }
    link.set_timeout(Some(ANSWER)).map_err(failed)?;
    tranship_wire::write_message(&mut link, &Request::Path { id: record.id }).map_err(failed)?;
    match tranship_wire::read_message(&mut link).map_err(failed)? {
        Response::Path { kept, occupied, ends } => Ok(PathState { kept, occupied, ends }),
        Response::Failed { message, .. } => Err(Failure::new(message)),
        other => Err(failed(format!("node {} gave an answer that does not fit: {other:?}", record.peer))),
    }
}

/// Looks at one path: makes its device again where somebody has removed it, removes it where nobody needs it, and has
/// the names of those on the other node known.
fn look(node: &Node, record: &PathRecord) -> Result<(), Failure> {
    let here = ends(node, record)?;
    let occupied = is_occupied(node, record)?;
    // A move under way has it in any case, also one that brings a container back.
    let asked = (!is_in_use(node, record)).then(|| ask(node, record));
    let changing = changing();
    let Some(mut record) = PathRecord::read(node, record.id)? else { return Ok(()) };
    let before = record.clone();
    settle_pending(node, &mut record);
    if !here.is_empty() {
        record.here = here.iter().map(|end| end.container.clone()).collect();
    }
    if !is_in_use(node, &record) {
        match asked {
            Some(Ok(beyond)) => {
                let settled = settle(&node.config.node, record, (&here, occupied), &beyond, |name| exists(node, name));
                record = settled;
            }
            Some(Err(failure)) => {
                tracing::debug!(peer = %record.peer, %failure, "the other end of a path does not answer");
            }
            None => {}
        }
    }
    if record.is_unused() {
        tracing::info!(network = record.network, peer = %record.peer, "nobody needs the path any more");
        end(node, &record)?;
    } else {
        if record != before {
            record.write(node)?;
        }
        ensure(&record)?;
    }
    drop(changing);
    name_all(node, &record.bridge)
}

/// Whether a move of a container that the path is for is under way.
fn is_in_use(node: &Node, record: &PathRecord) -> bool {
    let is_moving = |member: &super::Member| node.busy_with(&member.end.container).is_some();
    !record.pending.is_empty() || record.members.iter().any(is_moving)
}

/// Takes moves that have ended without a word for what they have become: an agent may have died.
fn settle_pending(node: &Node, record: &mut PathRecord) {
    let ended: Vec<_> = record
        .pending
        .iter()
        .filter(|one| {
            let journal = node.journals().join(format!("{}.jsonl", one.migration));
            node.busy_with(&one.end.container).is_none() && !journal.exists()
        })
        .cloned()
        .collect();
    for one in ended {
        // It is where it went, or still at home.
        let here = exists(node, &one.end.container);
        let has_moved = if one.home == node.config.node { Some(false) } else { Some(true) };
        if here.is_none() || here == has_moved {
            record.confirm(&one.migration);
        } else {
            record.pending.retain(|other| other.migration != one.migration);
        }
    }
}

/// What becomes of a record by what is `here` and `beyond`; without members where nobody needs it.
fn settle(
    own: &NodeName,
    mut record: PathRecord,
    (here, occupied): (&[PathEnd], bool),
    beyond: &PathState,
    exists: impl Fn(&str) -> Option<bool>,
) -> PathRecord {
    record.beyond.clone_from(&beyond.ends);
    if !beyond.kept {
        record.members.clear();
        return record;
    }
    record.members.retain(|member| {
        let is_it = |end: &PathEnd| end.container == member.end.container;
        if member.home == *own {
            let is_back = |end: &PathEnd| is_it(end) && end.addresses.iter().any(|a| member.end.addresses.contains(a));
            occupied && beyond.ends.iter().any(is_it) && !here.iter().any(is_back)
        } else {
            beyond.occupied && exists(&member.end.container) != Some(false)
        }
    });
    record
}

/// Has the containers on a bridge know the names of those on other nodes that they can reach: one that moved those that
/// stayed, and the others the one that moved.
pub fn name_all(node: &Node, bridge: &str) -> Result<(), Failure> {
    let own = &node.config.node;
    let records: Vec<PathRecord> =
        PathRecord::all(node)?.into_iter().filter(|record| record.bridge == bridge).collect();
    for (engine, end) in local_networks::ends(node, bridge, None)? {
        if node.busy_with(&end.container).is_some() {
            continue;
        }
        let mut beyond = Vec::new();
        for record in &records {
            let has_come = |one: &super::Member| one.home != *own && one.end.container == end.container;
            if record.members.iter().any(has_come) {
                beyond.extend(record.beyond.clone());
            }
            let away = record.members.iter().filter(|one| one.home == *own && one.end.container != end.container);
            beyond.extend(away.map(|one| one.end.clone()));
        }
        let Ok(container) = engine.inspect(&end.container) else { continue };
        if let Err(error) = name_beyond(&container, &beyond) {
            tracing::warn!(container = end.container, %error, "names of containers on another node are not in its /etc/hosts");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::record::Member;
    use std::slice;

    use super::*;

    fn end(name: &str, address: &str) -> PathEnd {
        PathEnd { container: name.to_owned(), names: Vec::new(), addresses: vec![address.parse().unwrap()] }
    }

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    /// On node a, of `app`, which has this home.
    fn record(home: &str) -> PathRecord {
        let peer = node("b");
        let member = Member { end: end("app", "10.79.0.6"), home: node(home), migration: "m-1".parse().unwrap() };
        let at: std::net::IpAddr = "10.0.0.1".parse().unwrap();
        PathRecord {
            id: 1,
            port: 7077,
            peer,
            network: "shop".into(),
            bridge: "br1".into(),
            local: at,
            remote: at,
            guarded: Vec::new(),
            members: vec![member],
            pending: Vec::new(),
            here: Vec::new(),
            beyond: Vec::new(),
        }
    }

    fn is_kept(home: &str, here: &[PathEnd], beyond: (bool, bool, &[PathEnd]), exists: Option<bool>) -> bool {
        let (kept, occupied, ends) = beyond;
        let beyond = PathState { kept, occupied, ends: ends.to_vec() };
        let own = (here, !here.is_empty());
        !settle(&node("a"), record(home), own, &beyond, |_| exists).is_unused()
    }

    #[test]
    fn a_path_is_kept_while_one_has_moved_and_others_have_stayed() {
        let (app, db) = (end("app", "10.79.0.6"), end("db", "10.79.0.5"));
        let stopped = PathEnd { addresses: Vec::new(), ..app.clone() };
        let others = [db.clone()];
        // It is on b, and db has stayed.
        assert!(is_kept("a", &others, (true, true, slice::from_ref(&app)), Some(false)));
        assert!(is_kept("a", &others, (true, true, &[stopped]), Some(false)));
        assert!(!is_kept("a", &[], (true, true, slice::from_ref(&app)), Some(false)), "db has followed, or is gone");
        assert!(!is_kept("a", &others, (true, false, &[]), Some(false)), "it is gone from b");
        assert!(!is_kept("a", &others, (false, false, &[]), Some(false)), "b keeps no path");
        assert!(
            !is_kept("a", &[db.clone(), app.clone()], (true, true, slice::from_ref(&app)), Some(true)),
            "it is back"
        );
        let other = end("app", "10.79.0.9");
        assert!(
            is_kept("a", &[db.clone(), other], (true, true, slice::from_ref(&app)), Some(true)),
            "another one of its name"
        );
        // It came from b.
        assert!(is_kept("b", slice::from_ref(&app), (true, true, &others), Some(true)));
        assert!(is_kept("b", slice::from_ref(&app), (true, true, &others), None), "its engine does not answer");
        assert!(!is_kept("b", &[], (true, true, &others), Some(false)), "it is gone");
        assert!(!is_kept("b", &[app], (true, false, &[]), Some(true)), "nobody is on b any more");
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
