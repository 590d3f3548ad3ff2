//! Which members of a group share a network namespace, and move as one unit.

use std::os::unix::fs::MetadataExt;

use tranship_coordinator::Failure;
use tranship_engine::Container;
use tranship_types::{EngineName, NodeName};

use crate::inspection;
use crate::node::Node;

/// A member's place among those that share its network namespace.
#[derive(Debug, Clone)]
pub struct Unit {
    /// The member whose migration moves the namespace; `None` if that is this one.
    pub owner: Option<String>,
    /// The other members of the unit.
    pub others: Vec<String>,
    engine: Option<EngineName>,
}

impl Unit {
    /// The other members' containers.
    pub fn containers(&self, node: &Node) -> Result<Vec<Container>, Failure> {
        self.others.iter().map(|name| Ok(inspection::find(node, name, self.engine)?.1)).collect()
    }
}

/// The unit of each member, by rank; `None` for one that shares nothing. The owner is the member of the lowest rank. Containers whose engine attaches
/// their network are in a unit only as members of a pod: these engines restore a container that has joined another one's network only when that one runs.
pub fn find(node: &Node, members: &[(&str, &NodeName)], engine: Option<EngineName>) -> Vec<Option<Unit>> {
    let identity = |path: String| std::fs::metadata(path).ok().map(|link| (link.dev(), link.ino()));
    let of_node = identity("/proc/self/ns/net".to_owned());
    let network = |name: &str| {
        let (engine, container) = inspection::find(node, name, engine).ok()?;
        // Of a pod, a further container holds the network.
        if engine.attaches_network() && engine.pod(&container).ok().flatten().is_none() {
            return None;
        }
        identity(format!("/proc/{}/ns/net", container.init)).filter(|network| Some(*network) != of_node)
    };
    let networks: Vec<_> = members.iter().map(|(name, to)| Some((network(name)?, *to))).collect();
    let unit = |rank: usize| {
        let own = networks[rank].as_ref()?;
        let shares = |other: &usize| networks[*other].as_ref() == Some(own);
        let all: Vec<usize> = (0..members.len()).filter(shares).collect();
        let name = |rank: usize| members[rank].0.to_owned();
        (all.len() > 1).then(|| Unit {
            owner: (all[0] != rank).then(|| name(all[0])),
            others: all.iter().filter(|other| **other != rank).map(|other| name(*other)).collect(),
            engine,
        })
    };
    (0..members.len()).map(unit).collect()
}
