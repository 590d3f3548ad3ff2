//! Which containers of this node belong together: those that share namespaces, and those on one network that ends here.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use tranship_api::{Companions, ErrorKind, ServiceError};
use tranship_engine::{Engine, Pod, State, Summary};
use tranship_types::NodeName;

use crate::local_networks::{self, Link};
use crate::node::Node;
use crate::service::unusable;

/// Namespaces without which one of two containers does not live.
const SHARED: [&str; 3] = ["net", "ipc", "pid"];

/// The containers that belong together where they leave for these nodes: of those that run, of all engines.
///
/// # Errors
/// An engine that does not answer, bridges that cannot be looked at.
pub fn find(node: &Node, to: &[NodeName]) -> Result<Vec<Companions>, ServiceError> {
    let mut running: Vec<(Arc<dyn Engine>, Summary)> = Vec::new();
    for engine in node.engines().filter(|engine| engine.is_present()) {
        let list = engine.list().map_err(|error| unusable(&error))?;
        let runs = |one: &Summary| matches!(one.state, State::Running | State::Paused) && one.init != 0;
        running.extend(list.into_iter().filter(runs).map(|one| (Arc::clone(engine), one)));
    }
    // A name that two engines have is in no set: a group could not name its container.
    let is_unique = |name: &str| running.iter().filter(|(_, one)| one.name == name).count() == 1;
    let names: Vec<&str> = running.iter().map(|(_, one)| one.name.as_str()).filter(|name| is_unique(name)).collect();
    let mut whole = Sets::new(&names);
    let mut made_anew = BTreeSet::new();
    let sharing = sharing(&running);
    for shared in &sharing {
        whole.join(shared);
    }
    for pod in pods(&running, &sharing) {
        let infra = pod.infra.map(|infra| infra.name);
        whole.join(&pod.members.iter().chain(&infra).map(String::as_str).collect::<Vec<_>>());
        made_anew.extend(infra);
    }
    let links = local_networks::links(node, &running, to)
        .map_err(|failure| ServiceError::new(ErrorKind::Internal, failure.message, "see the agent's log"))?;
    for Link { ends: [one, other], .. } in links.iter().filter(|link| link.is_connected) {
        whole.join(&[one, other]);
    }
    let mut all = whole.clone();
    for Link { ends: [one, other], .. } in &links {
        all.join(&[one, other]);
    }
    let whole = whole.of_several();
    let companions = |containers: Vec<String>| Companions {
        as_a_whole: whole.iter().filter(|set| containers.contains(&set[0])).cloned().collect(),
        made_anew: containers.iter().filter(|name| made_anew.contains(*name)).cloned().collect(),
        containers,
    };
    Ok(all.of_several().into_iter().map(companions).collect())
}

/// The names of those that live in one namespace, for each that is not the node's own.
fn sharing(running: &[(Arc<dyn Engine>, Summary)]) -> Vec<Vec<&str>> {
    let identity = |pid: &str, kind: &str| {
        let link = std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok()?;
        Some((link.dev(), link.ino()))
    };
    let mut found = Vec::new();
    for kind in SHARED {
        // The agent may have namespaces of its own; the node's first process has the node's.
        let of_node = [identity("self", kind), identity("1", kind)];
        let mut lives_in: BTreeMap<(u64, u64), Vec<&str>> = BTreeMap::new();
        for (_, one) in running {
            match identity(&one.init.to_string(), kind) {
                namespace if of_node.contains(&namespace) => {}
                Some(namespace) => lives_in.entry(namespace).or_default().push(&one.name),
                None => {}
            }
        }
        found.extend(lives_in.into_values().filter(|names| names.len() > 1));
    }
    found
}

/// The pods of the containers that share namespaces, each once. To inspect a container takes Podman a second on a busy machine.
fn pods(running: &[(Arc<dyn Engine>, Summary)], sharing: &[Vec<&str>]) -> Vec<Pod> {
    let mut found: Vec<Pod> = Vec::new();
    let mut inspected: BTreeSet<&str> = BTreeSet::new();
    for name in sharing.iter().flatten().filter(|name| inspected.insert(name)) {
        let is_known = |pod: &Pod| pod.members.iter().any(|member| member == name);
        let Some((engine, _)) = running.iter().find(|(_, one)| one.name == *name) else { continue };
        if !found.iter().any(is_known) {
            // One that has ended meanwhile is in none; the infra container's own pod is found by its members.
            let pod = engine.inspect(name).and_then(|container| engine.pod(&container)).ok().flatten();
            found.extend(pod.filter(is_known));
        }
    }
    found
}

/// Names, each in one set.
#[derive(Clone)]
struct Sets<'a>(BTreeMap<&'a str, usize>);

impl<'a> Sets<'a> {
    /// Each in a set of its own.
    fn new(names: &[&'a str]) -> Self {
        Self(names.iter().enumerate().map(|(number, name)| (*name, number)).collect())
    }

    /// Makes one set of those that have these names; names that are in no set do not count.
    fn join(&mut self, names: &[&str]) {
        let sets: Vec<usize> = names.iter().filter_map(|name| self.0.get(name).copied()).collect();
        let Some(first) = sets.first() else { return };
        self.0.values_mut().filter(|set| sets.contains(set)).for_each(|set| *set = *first);
    }

    /// The sets of two names and more.
    fn of_several(&self) -> Vec<Vec<String>> {
        let mut sets: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for (name, set) in &self.0 {
            sets.entry(*set).or_default().push((*name).to_owned());
        }
        sets.into_values().filter(|names| names.len() > 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_one_set() {
        let mut sets = Sets::new(&["app", "cache", "db", "job", "web"]);
        sets.join(&["app", "db"]);
        sets.join(&["web", "gone"]);
        assert_eq!(sets.of_several(), [["app", "db"]]);
        sets.join(&["web", "cache"]);
        let parted = sets.clone();
        sets.join(&["cache", "db"]);
        assert_eq!(sets.of_several(), [["app", "cache", "db", "web"]]);
        assert_eq!(parted.of_several(), [["app", "db"], ["cache", "web"]]);
    }
}
