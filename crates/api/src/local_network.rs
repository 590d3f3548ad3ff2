use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tranship_types::{EngineName, NodeName};
use utoipa::ToSchema;

/// A network of a container that ends at its node, with the containers there from which the move would part it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LocalNetwork {
    /// What the engine or CNI calls it; the bridge's name where neither knows it.
    pub name: String,
    /// The node's bridge.
    pub bridge: String,
    /// The containers that the move would part it from: those with open connections first.
    pub neighbours: Vec<NetworkNeighbour>,
    /// The containers that would have to move together so that no connection within the network is lost, the container
    /// itself included: all that are linked to it by connections, directly or through others; where there are none, all
    /// of `neighbours`.
    pub together: Vec<String>,
    /// Whether the move keeps the path to them, by a VXLAN between the two nodes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    pub kept: bool,
}

/// Another container on such a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkNeighbour {
    /// Its name.
    pub container: String,
    /// Its engine.
    pub engine: EngineName,
    /// Its addresses there.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// How many open connections the container has with it: of TCP, and connected sockets of UDP.
    pub connections: u64,
    /// The names under which the container finds it; empty where the network has no resolver.
    pub names: Vec<String>,
}

impl LocalNetwork {
    /// What the move of `container` to `to` would break, without a full stop.
    pub fn cause(&self, container: &str, to: &NodeName) -> String {
        let mut lost: Vec<String> = self.neighbours.iter().filter(|n| n.connections > 0).map(connections).collect();
        let names: Vec<&str> =
            self.neighbours.iter().flat_map(|neighbour| neighbour.names.iter().map(String::as_str)).collect();
        if !names.is_empty() {
            let word = if names.len() == 1 { "name" } else { "names" };
            lost.push(format!("the {word} that it resolves here ({})", names.join(", ")));
        }
        format!("network {self} ends at this node: on {to}, {container} would lose {}", join(&lost))
    }

    /// What the move of `container` from `from` to `to` keeps, where it keeps the path; without a full stop.
    pub fn kept(&self, container: &str, (from, to): (&NodeName, &NodeName)) -> String {
        let others: Vec<String> = self.neighbours.iter().map(|neighbour| neighbour.container.clone()).collect();
        let others = if others.is_empty() { "those that stay".to_owned() } else { join(&others) };
        format!(
            "network {self}: on {to}, {container} goes on reaching {others} on {from}, by a VXLAN between the nodes, which is not encrypted, until \
             they are on one node"
        )
    }

    /// What to type so that the containers stay together.
    pub fn remedy(&self, to: &NodeName) -> String {
        format!("tranship move-group --containers {} --to {to} --atomic", self.together.join(" "))
    }
}

impl fmt::Display for LocalNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.bridge == self.name { Ok(()) } else { write!(f, " (bridge {})", self.bridge) }
    }
}

fn connections(neighbour: &NetworkNeighbour) -> String {
    let NetworkNeighbour { container, connections, .. } = neighbour;
    match connections {
        1 => format!("the connection with {container}"),
        more => format!("the {more} connections with {container}"),
    }
}

fn join(parts: &[String]) -> String {
    match parts {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        _ => parts.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn neighbour(container: &str, connections: u64, names: &[&str]) -> NetworkNeighbour {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let addresses = vec!["10.78.0.5".parse().unwrap()];
        NetworkNeighbour { container: container.into(), engine: EngineName::Docker, addresses, connections, names }
    }

    #[test]
    fn what_a_move_would_break_and_what_to_type_is_one_sentence_each() {
        let to = "b".parse().unwrap();
        let mut network = LocalNetwork {
            name: "shop".into(),
            bridge: "br-15a3".into(),
            neighbours: vec![neighbour("db", 2, &["db", "postgres"]), neighbour("web", 1, &[])],
            together: vec!["app".into(), "db".into(), "web".into()],
            kept: false,
        };
        assert_eq!(
            network.cause("app", &to),
            "network shop (bridge br-15a3) ends at this node: on b, app would lose the 2 connections with db, the connection \
             with web and the names that it resolves here (db, postgres)"
        );
        assert_eq!(network.remedy(&to), "tranship move-group --containers app db web --to b --atomic");
        let from = "a".parse().unwrap();
        assert_eq!(
            network.kept("app", (&from, &to)),
            "network shop (bridge br-15a3): on b, app goes on reaching db and web on a, by a VXLAN between the nodes, which is not encrypted, \
             until they are on one node"
        );
        network.neighbours = vec![neighbour("web", 0, &["web"])];
        network.bridge = "shop".into();
        assert_eq!(
            network.cause("app", &to),
            "network shop ends at this node: on b, app would lose the name that it resolves here (web)"
        );
    }
}
