//! Records of addresses of containers that have left: a file for each migration in the state directory.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranship_api::{HeldAddress, HeldAddresses};
use tranship_coordinator::Failure;
use tranship_types::{MigrationId, NodeName, ReservedAddress};

use crate::node::Node;
use crate::record_files;

/// The addresses of a container that has left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRecord {
    /// By which it left.
    pub migration: MigrationId,
    pub container: String,
    /// The engine that it ran in here.
    pub engine: String,
    /// The engine that it went to, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_engine: Option<String>,
    /// Where it is, as far as is known.
    pub node: NodeName,
    pub since_unix_ms: u64,
    pub addresses: Vec<ReservedAddress>,
    /// Its other addresses, which this node gives to no container by itself, so that they need not be held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<ReservedAddress>,
    /// Whether they are held here. Otherwise the record only says where the container went.
    pub held: bool,
    /// Why some are not held nevertheless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_held: Option<String>,
}

/// Where the records are.
pub fn directory(node: &Node) -> PathBuf {
    node.config.state_dir.join("held")
}

impl HeldRecord {
    fn file(node: &Node, id: &MigrationId) -> PathBuf {
        directory(node).join(format!("{id}.json"))
    }

    /// Writes it, or replaces it, so that it outlasts the host.
    pub fn write(&self, node: &Node) -> Result<(), Failure> {
        record_files::write(&directory(node), &Self::file(node, &self.migration), self)
    }

    /// That of a migration, if there is one.
    pub fn read(node: &Node, id: &MigrationId) -> Result<Option<Self>, Failure> {
        record_files::read(&Self::file(node, id))
    }

    /// All of this node that can be read: one that cannot must not keep the others from their addresses.
    pub fn all(node: &Node) -> Result<Vec<Self>, Failure> {
        Ok(Self::all_and_unreadable(node)?.0)
    }

    /// All of this node; none if one of them cannot be read.
    pub fn every(node: &Node) -> Result<Vec<Self>, Failure> {
        let (all, unreadable) = Self::all_and_unreadable(node)?;
        unreadable.into_iter().next().map_or(Ok(all), Err)
    }

    /// All of this node, and why others cannot be read.
    pub fn all_and_unreadable(node: &Node) -> Result<(Vec<Self>, Vec<Failure>), Failure> {
        let names = record_files::names(&directory(node))?;
        let ids = names.iter().filter_map(|name| name.parse().ok());
        let (mut all, mut unreadable) = (Vec::new(), Vec::new());
        for read in ids.filter_map(|id: MigrationId| Self::read(node, &id).transpose()) {
            match read {
                Ok(record) => all.push(record),
                Err(failure) => unreadable.push(failure),
            }
        }
        Ok((all, unreadable))
    }

    /// Removes it. Success if it is not there.
    pub fn remove(&self, node: &Node) -> Result<(), Failure> {
        record_files::remove(&Self::file(node, &self.migration))
    }

    /// Whether some of these addresses are its own.
    pub fn is_about(&self, addresses: &[ReservedAddress]) -> bool {
        let same = |a: &ReservedAddress, b: &ReservedAddress| a.network == b.network && a.address == b.address;
        self.all_addresses().any(|own| addresses.iter().any(|other| same(own, other)))
    }

    /// All addresses of the container, held or not.
    pub fn all_addresses(&self) -> impl Iterator<Item = &ReservedAddress> {
        self.addresses.iter().chain(&self.others)
    }

    /// Whether it is about a container of this name with some of these addresses.
    pub fn is_of(&self, container: &str, addresses: &[IpAddr]) -> bool {
        self.container == container && self.all_addresses().any(|own| addresses.contains(&own.address))
    }

    /// As the API tells it.
    pub fn info(&self) -> HeldAddresses {
        let told = |one: &ReservedAddress| HeldAddress { network: one.network.clone(), address: one.address };
        HeldAddresses {
            container: self.container.clone(),
            node: self.node.clone(),
            migration: self.migration.clone(),
            since_unix_ms: self.since_unix_ms,
            addresses: self.addresses.iter().map(told).collect(),
            not_held: self.not_held.clone(),
        }
    }
}
