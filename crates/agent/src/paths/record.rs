//! Records of kept paths: a file for each VXLAN in the state directory, written before its device is made.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranship_api::{KeptContainer, KeptPath};
use tranship_coordinator::Failure;
use tranship_network::{Vxlan, vxlan_name};
use tranship_types::{MigrationId, NodeName, PathEnd};

use crate::node::Node;
use crate::record_files;

/// A container for which a path is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// What it is called, and what its network knows it by.
    pub end: PathEnd,
    /// The node on which those stayed that it reaches by the path.
    pub home: NodeName,
    /// By which it left that node.
    pub migration: MigrationId,
}

/// One path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRecord {
    /// The number of its VXLAN.
    pub id: u32,
    pub port: u16,
    pub peer: NodeName,
    pub network: String,
    /// The bridge of this node.
    pub bridge: String,
    pub local: IpAddr,
    pub remote: IpAddr,
    pub guarded: Vec<IpAddr>,
    /// Those that moved.
    pub members: Vec<Member>,
    /// Those whose moves have not ended.
    pub pending: Vec<Member>,
    /// Who was seen on this node's bridge.
    pub here: Vec<String>,
    /// Who is on the other node's bridge, as it has answered last.
    pub beyond: Vec<PathEnd>,
}

/// Where the records are.
pub fn directory(node: &Node) -> PathBuf {
    node.config.state_dir.join("paths")
}

impl PathRecord {
    fn file(node: &Node, id: u32) -> PathBuf {
        directory(node).join(format!("{id:06x}.json"))
    }

    /// Writes it, or replaces it, so that it outlasts the host.
    pub fn write(&self, node: &Node) -> Result<(), Failure> {
        record_files::write(&directory(node), &Self::file(node, self.id), self)
    }

    /// That of a number, if there is one.
    pub fn read(node: &Node, id: u32) -> Result<Option<Self>, Failure> {
        record_files::read(&Self::file(node, id))
    }

    /// All of this node that can be read: one that cannot is no reason not to move other containers.
    pub fn readable(node: &Node) -> Vec<Self> {
        let read = |read: Result<Self, Failure>| {
            read.inspect_err(|failure| tracing::error!(%failure, "see `tranship doctor`")).ok()
        };
        Self::each(node).unwrap_or_default().into_iter().filter_map(read).collect()
    }

    /// All of this node; an error if one of them cannot be read.
    pub fn all(node: &Node) -> Result<Vec<Self>, Failure> {
        Self::each(node)?.into_iter().collect()
    }

    fn each(node: &Node) -> Result<Vec<Result<Self, Failure>>, Failure> {
        let names = record_files::names(&directory(node))?;
        let ids = names.iter().filter_map(|name| u32::from_str_radix(name, 16).ok());
        Ok(ids.filter_map(|id| Self::read(node, id).transpose()).collect())
    }

    /// Removes it. Success if it is not there.
    pub fn remove(&self, node: &Node) -> Result<(), Failure> {
        record_files::remove(&Self::file(node, self.id))
    }

    /// Its device.
    pub fn device(&self) -> Vxlan {
        Vxlan {
            id: self.id,
            port: self.port,
            local: self.local,
            remote: self.remote,
            bridge: self.bridge.clone(),
            guarded: self.guarded.clone(),
        }
    }

    /// Whether nobody has it any more.
    pub fn is_unused(&self) -> bool {
        self.members.is_empty() && self.pending.is_empty()
    }

    /// Puts a move that has ended among the members; whether there was one.
    pub fn confirm(&mut self, migration: &MigrationId) -> bool {
        let Some(at) = self.pending.iter().position(|one| one.migration == *migration) else { return false };
        let member = self.pending.remove(at);
        self.members.retain(|one| one.end.container != member.end.container);
        self.members.push(member);
        true
    }

    /// As the API tells it; `here` is this node.
    pub fn info(&self, here: &NodeName, trouble: Option<String>) -> KeptPath {
        let container = |member: &Member| KeptContainer {
            container: member.end.container.clone(),
            node: if member.home == *here { self.peer.clone() } else { here.clone() },
        };
        KeptPath {
            network: self.network.clone(),
            bridge: self.bridge.clone(),
            peer: self.peer.clone(),
            device: vxlan_name(self.id),
            containers: self.members.iter().map(container).collect(),
            trouble,
        }
    }
}
