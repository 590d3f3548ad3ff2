use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// A container on a network whose path between two nodes is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathEnd {
    /// Its name.
    pub container: String,
    /// The names under which its engine's resolver knows it there; empty where the network has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Its addresses there; empty where it does not run.
    pub addresses: Vec<IpAddr>,
}

/// A path between the two nodes of a move, for a network of the container that ends at its node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedPath {
    /// The number of the VXLAN.
    pub id: u32,
    /// Its UDP port.
    pub port: u16,
    /// What the source calls the network.
    pub network: String,
    /// The container's interface on it.
    pub interface: String,
    /// The names under which the source's resolver knows the container there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// The source's own address towards the destination.
    pub source: IpAddr,
    /// The destination's, as the source has it.
    pub destination: IpAddr,
    /// The addresses of the source's bridge.
    pub guarded: Vec<IpAddr>,
    /// The containers that stay on the source's bridge.
    pub ends: Vec<PathEnd>,
}
