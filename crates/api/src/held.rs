use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tranship_types::{MigrationId, NodeName};
use utoipa::ToSchema;

/// The addresses that a node holds for a container that has left it: its IPAM gives them to no other one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldAddresses {
    /// The container.
    pub container: String,
    /// Where it is, as far as is known.
    pub node: NodeName,
    /// The migration by which it left.
    pub migration: MigrationId,
    /// When it left, in ms since the Unix epoch.
    pub since_unix_ms: u64,
    /// Networks and addresses.
    pub addresses: Vec<HeldAddress>,
    /// Why some of them are not held, and may be given to another container nevertheless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_held: Option<String>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldAddress {
    /// The network's name in the IPAM.
    pub network: String,
    /// The address.
    #[schema(value_type = String)]
    pub address: IpAddr,
}
