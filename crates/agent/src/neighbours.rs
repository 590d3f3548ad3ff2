//! Who else lives in a container's namespaces, and would lose them by its move.

use std::collections::BTreeMap;
use std::fs;

use tranship_criu::preflight::{self, Depth, Namespaces, Neighbour};
use tranship_engine::Container;
use tranship_types::{Blocker, BlockerKind, CarriedTree, TreeKind};

use crate::node::Node;

/// Where the kernel shows the SysV objects of an IPC namespace, those of the process that reads.
const SYSV: [&str; 3] = ["/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"];

/// Who else lives in them: a blocker for each container, and one for those that are in none. The containers of its `unit` may share namespaces of
/// these `kinds`.
pub fn obstacles(
    node: &Node,
    container: &Container,
    namespaces: &Namespaces,
    depth: Depth,
    (unit, kinds): (&[Container], &[&str]),
) -> Vec<Blocker> {
    let found = namespaces.neighbours(depth, || {
        let processes = container.processes().unwrap_or_default();
        // Only who shares more than these is of interest.
        let others = unit.iter().flat_map(|other| other.processes().unwrap_or_default());
        processes.into_iter().chain(others.filter(|pid| namespaces.shares_at_most(*pid, kinds))).collect()
    });
    if found.is_empty() {
        return Vec::new();
    }
    let known = Known::of(node);
    let mut of: BTreeMap<Option<&str>, Vec<&Neighbour>> = BTreeMap::new();
    for neighbour in &found {
        let name = known.container(neighbour.pid);
        of.entry(name.filter(|name| *name != container.name)).or_default().push(neighbour);
    }
    of.into_iter().map(|(whose, neighbours)| shared(&container.name, whose, &neighbours)).collect()
}

/// The cgroups of a process, as the kernel writes them.
fn cgroup(pid: u32) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{pid}/cgroup")).ok()
}

/// The containers of all engines, with the cgroups of their first processes.
struct Known(Vec<(String, Vec<u8>)>);

impl Known {
    fn of(node: &Node) -> Self {
        let listed = node.engines().filter_map(|engine| engine.list().ok()).flatten();
        let running = listed.filter(|one| one.init != 0);
        Self(running.filter_map(|one| Some((one.name, cgroup(one.init)?))).collect())
    }

    /// The name of the container that a process belongs to.
    fn container(&self, pid: u32) -> Option<&str> {
        let cgroup = cgroup(pid)?;
        self.0.iter().find(|(_, its)| *its == cgroup).map(|(name, _)| name.as_str())
    }
}

/// Who else has those of the node's directories mounted that move with the container.
pub fn of_directories(node: &Node, container: &Container, trees: &[CarriedTree]) -> Vec<Blocker> {
    let carried = trees.iter().filter(|tree| tree.kind == TreeKind::Bind);
    let directories: Vec<_> = carried.map(|tree| tree.inside.clone()).collect();
    if directories.is_empty() {
        return Vec::new();
    }
    let inside = container.processes().unwrap_or_default();
    let found = preflight::sharers(container.init, &inside, &directories);
    let known = if found.is_empty() { Known(Vec::new()) } else { Known::of(node) };
    let blocker = |found: preflight::Sharer| {
        let of = known.container(found.pid).map_or_else(String::new, |name| format!(" of container {name}"));
        let cause = format!(
            "process {} ({}){of} has the directory {} of container {}, too, and would go on with the old one",
            found.pid,
            found.name,
            found.directory.display(),
            container.name
        );
        let remedy = "stop it first, give each a directory of its own, or leave out --with-binds";
        Blocker::new(BlockerKind::Mount, cause, remedy).at(found.pid, None)
    };
    found.into_iter().map(blocker).collect()
}

fn shared(container: &str, whose: Option<&str>, neighbours: &[&Neighbour]) -> Blocker {
    let first = neighbours[0];
    let mut kinds: Vec<&str> = Vec::new();
    for kind in neighbours.iter().flat_map(|neighbour| &neighbour.kinds) {
        if !kinds.contains(kind) {
            kinds.push(kind);
        }
    }
    let namespaces = match kinds.as_slice() {
        [kind] => format!("{kind} namespace"),
        [all @ .., last] => format!("{} and {last} namespaces", all.join(", ")),
        [] => "namespaces".to_owned(),
    };
    let more = match neighbours.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let of = whose.map_or_else(String::new, |name| format!(" of container {name}"));
    let process = format!("process {} ({}){more}{of}", first.pid, first.name);
    let shares = if neighbours.len() == 1 { "shares" } else { "share" };
    let (effect, remedy) = match whose {
        _ if whose.is_none() && first.descends => (
            "but has left its cgroup, and would not be moved with it",
            "end it, or put it back into the container's cgroup, and try again".to_owned(),
        ),
        Some(name) if kinds == ["network"] => (
            "and would lose it",
            format!(
                "move the two together (`tranship move-group --atomic`) if both are runc's, stop container {name} first, or give each of \
                 the two namespaces of its own"
            ),
        ),
        Some(name) => {
            ("and would lose it", format!("stop container {name} first, or give each of the two namespaces of its own"))
        }
        None => ("and would lose it", "end it, or let it leave the namespace, and try again".to_owned()),
    };
    let kind = if kinds.contains(&"network") { BlockerKind::Network } else { BlockerKind::Process };
    let cause = format!("{process} {shares} the {namespaces} of container {container}, {effect}");
    Blocker::new(kind, cause, remedy).at(first.pid, None)
}

/// What of the node itself the container lives in, and cannot take along.
pub fn of_node(container: &Container, namespaces: &Namespaces) -> Vec<Blocker> {
    let name = &container.name;
    let blocker = |kind, cause: &str, what: &str| {
        Blocker::new(kind, format!("container {name} uses the {cause}"), format!("give it {what} of its own"))
    };
    let mut found = Vec::new();
    if namespaces.is_node_s("net") {
        let cause = "network of its node, which cannot move with it";
        found.push(blocker(BlockerKind::Network, cause, "a network namespace"));
    }
    if namespaces.is_node_s("pid") {
        let cause = "PID namespace of its node, and the destination may have its pids in use";
        found.push(blocker(BlockerKind::Process, cause, "a PID namespace"));
    }
    if namespaces.is_node_s("uts") {
        let cause = "UTS namespace of its node, and would find the destination's host name";
        found.push(blocker(BlockerKind::Process, cause, "a UTS namespace").allowable("node-host-name"));
    }
    if namespaces.is_node_s("ipc")
        && let Some(list) = SYSV.iter().find(|list| fs::read_to_string(list).is_ok_and(|text| text.lines().count() > 1))
    {
        let cause = format!("IPC namespace of its node, and would lose what it uses of that ({list})");
        found.push(blocker(BlockerKind::Process, &cause, "an IPC namespace").allowable("node-ipc"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn neighbour(pid: u32, kinds: &[&'static str], descends: bool) -> Neighbour {
        Neighbour { pid, name: "nginx".into(), kinds: kinds.to_vec(), descends }
    }

    #[test]
    fn a_neighbour_is_named_with_what_it_shares_and_what_to_do() {
        let one = neighbour(812, &["network"], false);
        let said = shared("app", Some("web"), &[&one]);
        assert_eq!(
            said.to_string(),
            "process 812 (nginx) of container web shares the network namespace of container app, and would lose it; \
             move the two together (`tranship move-group --atomic`) if both are runc's, stop container web first, or give each of the two namespaces of its own"
        );
        assert_eq!((said.kind, said.pid), (BlockerKind::Network, Some(812)));
        let two = neighbour(813, &["IPC", "UTS"], false);
        let said = shared("app", None, &[&one, &two]).to_string();
        assert!(
            said.starts_with("process 812 (nginx) and 1 more share the network, IPC and UTS namespaces of"),
            "{said}"
        );
        let said = shared("app", None, &[&neighbour(9, &["PID"], true)]);
        assert!(said.to_string().contains("left its cgroup") && said.kind == BlockerKind::Process, "{said}");
    }
}
