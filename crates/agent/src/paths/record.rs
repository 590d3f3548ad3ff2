//! Records of kept paths: a file for each VXLAN in the state directory, written before its device is made. One that
//! nobody needs any more has no device; it stays until the names that belong to the path are out of all containers.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranship_api::{KeptContainer, KeptPath};
use tranship_coordinator::Failure;
use tranship_network::{Vxlan, vxlan_name};
use tranship_types::{EngineName, MigrationId, NodeName, PathEnd};

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
    /// Its engine on this node: the one that it left, or came to.
    #[serde(default)]
    pub engine: Option<EngineName>,
    /// What that engine called it when it left; empty for one that came.
    #[serde(default)]
    pub id: String,
}

/// A container of this node on the bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    pub engine: EngineName,
    /// What the engine calls it; empty where that is not known yet.
    pub id: String,
    /// Without addresses where it is stopped.
    pub end: PathEnd,
    /// In how many looks in a row it ran and was not on the bridge.
    #[serde(default)]
    pub elsewhere: u32,
}

impl Resident {
    /// Whether both are the same container.
    pub fn is(&self, other: &Self) -> bool {
        let same_id = self.id == other.id || self.id.is_empty() || other.id.is_empty();
        self.engine == other.engine && self.end.container == other.end.container && same_id
    }

    /// Whether a member is this container of this node.
    pub fn is_member(&self, member: &Member) -> bool {
        self.end.container == member.end.container && member.engine.is_none_or(|engine| engine == self.engine)
    }
}

fn yes() -> bool {
    true
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
    /// Who is on this node's bridge, or was and may come back, in order. The watch keeps it up to date.
    #[serde(default)]
    pub residents: Vec<Resident>,
    /// Whether the bridge has ports, whoever they belong to, or residents.
    #[serde(default = "yes")]
    pub occupied: bool,
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

    /// All of this node that can be read. One that cannot is no reason to leave others alone; `tranship doctor` shows it.
    pub fn readable(node: &Node) -> Vec<Self> {
        match Self::all_and_unreadable(node) {
            Ok((records, unreadable)) => {
                unreadable.iter().for_each(|failure| tracing::error!(%failure, "see `tranship doctor`"));
                records
            }
            Err(failure) => {
                tracing::error!(%failure, "kept paths are not known");
                Vec::new()
            }
        }
    }

    /// All of this node, and why others cannot be read.
    pub fn all_and_unreadable(node: &Node) -> Result<(Vec<Self>, Vec<Failure>), Failure> {
        let (mut all, mut unreadable) = (Vec::new(), Vec::new());
        for id in Self::ids(node)? {
            match Self::read(node, id) {
                Ok(record) => all.extend(record),
                Err(failure) => unreadable.push(failure),
            }
        }
        Ok((all, unreadable))
    }

    /// The numbers of all records, whether or not they can be read.
    pub fn ids(node: &Node) -> Result<Vec<u32>, Failure> {
        let names = record_files::names(&directory(node))?;
        let mut ids: Vec<u32> = names.iter().filter_map(|name| u32::from_str_radix(name, 16).ok()).collect();
        ids.sort_unstable();
        Ok(ids)
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

    /// Whether nobody needs the path any more.
    pub fn is_unused(&self) -> bool {
        self.members.is_empty() && self.pending.is_empty()
    }

    /// Puts a move that has ended among the members; whether there was one.
    pub fn confirm(&mut self, migration: &MigrationId) -> bool {
        let Some(at) = self.pending.iter().position(|one| one.migration == *migration) else { return false };
        let member = self.pending.remove(at);
        self.members.retain(|one| one.end.container != member.end.container || one.engine != member.engine);
        self.members.push(member);
        true
    }

    /// Who is on this node, for the other one, with those that are about to come.
    pub fn ends(&self) -> Vec<PathEnd> {
        let mut ends: Vec<PathEnd> = self.residents.iter().map(|one| one.end.clone()).collect();
        for coming in self.pending.iter().filter(|one| one.home == self.peer) {
            if !ends.iter().any(|end| end.container == coming.end.container) {
                ends.push(PathEnd { addresses: Vec::new(), ..coming.end.clone() });
            }
        }
        ends
    }

    /// That of node a with another one, for containers of Docker that have left a.
    #[cfg(test)]
    pub fn for_test(peer: &str, members: &[&str]) -> Self {
        let at: IpAddr = "127.0.0.1".parse().unwrap();
        let member = |name: &&str| Member {
            end: PathEnd {
                container: (*name).to_owned(),
                names: Vec::new(),
                addresses: vec!["10.79.0.6".parse().unwrap()],
            },
            home: "a".parse().unwrap(),
            migration: "m-1".parse().unwrap(),
            engine: Some(EngineName::Docker),
            id: String::new(),
        };
        Self {
            id: 1,
            port: 7077,
            peer: peer.parse().unwrap(),
            network: "shop".into(),
            bridge: "br-none".into(),
            local: at,
            remote: at,
            guarded: Vec::new(),
            members: members.iter().map(member).collect(),
            pending: Vec::new(),
            residents: Vec::new(),
            occupied: true,
            beyond: Vec::new(),
        }
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
