//! Names of containers on the other node, in `/etc/hosts` of those that reach them.

use tranship_coordinator::Failure;
use tranship_engine::{Container, EngineError, name_beyond};
use tranship_types::{NodeName, PathEnd};

use super::changing;
use super::listing::{Listing, Presence};
use super::record::{PathRecord, Resident};
use crate::node::{Node, failed};

/// Has each container on the bridge of a path, and each that was there `before`, name those on other nodes that it reaches, and no
/// others. Records that nobody needs go when that is done for all of theirs.
pub fn write(node: &Node, before: &[PathRecord], listing: &Listing) {
    let (own, records) = (&node.config.node, PathRecord::readable(node));
    let (mut seen, mut unnamed): (Vec<Resident>, Vec<Resident>) = (Vec::new(), Vec::new());
    let mut note = |resident: Resident, done: Result<(), Failure>| {
        if let Err(failure) = done {
            tracing::debug!(container = resident.end.container, %failure, "its /etc/hosts stays as it is");
            unnamed.push(resident);
        }
    };
    for running in listing.running() {
        let on: Vec<_> = records.iter().filter_map(|record| Some((record, running.on(&record.bridge)?))).collect();
        let Some((_, resident)) = on.first() else { continue };
        let all: Vec<PathEnd> = on.iter().flat_map(|(record, resident)| beyond(own, record, resident)).collect();
        seen.push(resident.clone());
        note(resident.clone(), name(node, &running.container, &all));
    }
    for resident in before.iter().chain(&records).flat_map(|record| &record.residents) {
        if seen.iter().any(|one| one.is(resident)) {
            continue;
        }
        let done = match listing.presence(resident) {
            // Its engine writes the file anew when it starts it.
            Presence::Gone | Presence::Stopped => Ok(()),
            Presence::Running => without_path(node, resident),
            Presence::Unknown => Err(Failure::new("its engine does not answer")),
        };
        seen.push(resident.clone());
        note(resident.clone(), done);
    }
    let is_named = |record: &PathRecord| {
        let were = before.iter().filter(|one| one.id == record.id).chain([record]);
        let mut residents = were.flat_map(|one| &one.residents);
        !residents.any(|resident| unnamed.iter().any(|one| one.is(resident)))
    };
    for record in records.iter().filter(|record| record.is_unused() && is_named(record)) {
        if let Err(failure) = forget(node, record) {
            tracing::warn!(network = record.network, %failure, "the record of a path that has ended stays");
        }
    }
}

/// Those that a container of node `own` reaches by a path: one that moved those that stayed, and the others the one that moved.
fn beyond(own: &NodeName, record: &PathRecord, resident: &Resident) -> Vec<PathEnd> {
    let has_come = record.members.iter().any(|one| one.home != *own && resident.is_member(one));
    let away = record.members.iter().filter(|one| one.home == *own && one.end.container != resident.end.container);
    let stayed = record.beyond.iter().filter(|_| has_come);
    away.map(|one| &one.end).chain(stayed).cloned().collect()
}

fn name(node: &Node, container: &Container, beyond: &[PathEnd]) -> Result<(), Failure> {
    match node.busy_with(&container.name) {
        Some(blocker) => Err(Failure::new(blocker.to_string())),
        None => name_beyond(container, beyond).map_err(failed),
    }
}

/// Takes the names out of a container that has left the bridge, and runs.
fn without_path(node: &Node, resident: &Resident) -> Result<(), Failure> {
    match node.engine(resident.engine).inspect(&resident.end.container) {
        Ok(container) => name(node, &container, &[]),
        Err(EngineError::NoSuchContainer { .. }) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Removes a record that nobody needs, unless it has changed.
fn forget(node: &Node, record: &PathRecord) -> Result<(), Failure> {
    let _changing = changing();
    match PathRecord::read(node, record.id)? {
        Some(now) if now == *record => record.remove(node),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tranship_types::EngineName;

    use super::*;

    #[test]
    fn names_cross_a_path_in_both_directions() {
        let end = |name: &str| PathEnd { container: name.to_owned(), names: Vec::new(), addresses: Vec::new() };
        let resident =
            |name: &str| Resident { engine: EngineName::Docker, id: String::new(), end: end(name), elsewhere: 0 };
        let mut record = PathRecord::for_test("b", &["app"]);
        record.beyond = vec![end("db"), end("web")];
        let of = |own: &str, name: &str, record: &PathRecord| -> Vec<String> {
            beyond(&own.parse().unwrap(), record, &resident(name)).into_iter().map(|end| end.container).collect()
        };
        // The container has left node a for node b.
        assert_eq!(of("a", "db", &record), ["app"]);
        assert_eq!(of("b", "app", &record), ["db", "web"]);
        assert!(of("b", "other", &record).is_empty());
        record.members.clear();
        assert!(of("a", "db", &record).is_empty() && of("b", "app", &record).is_empty());
    }
}
