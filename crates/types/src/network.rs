use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The network identity of a container: what its network namespace must look like on any node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkIdentity {
    /// The interfaces but `lo`, in their order of index.
    pub interfaces: Vec<Interface>,
    /// The routes that were not made by the kernel itself.
    pub routes: Vec<Route>,
    /// The neighbours whose MAC the container knows.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
    /// The settings of the namespace that are not as in a new one, by their names below `/proc/sys/net`.
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
}

impl NetworkIdentity {
    /// The names of its interfaces.
    pub fn names(&self) -> Vec<String> {
        self.interfaces.iter().map(|interface| interface.name.clone()).collect()
    }
}

/// One interface inside the container's network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name inside the namespace, e.g. `eth0`.
    pub name: String,
    /// Index inside the namespace; restored sockets may be bound to it.
    pub index: u32,
    /// Hardware address.
    pub mac: [u8; 6],
    /// Maximum transmission unit in bytes.
    pub mtu: u32,
    /// Addresses with their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// How it hangs on the node.
    pub attachment: Attachment,
}

/// How an interface hangs on the node; the names are those of the node's own interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Attachment {
    /// A macvlan in bridge mode on `parent`.
    Macvlan {
        /// The node's interface, e.g. `eth0`.
        parent: String,
    },
    /// A veth whose other end is a port of `bridge`.
    Bridge {
        /// The node's bridge, e.g. `br0`.
        bridge: String,
    },
}

/// A route of the container's main table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination and prefix length; `None` is the default route.
    pub destination: Option<(IpAddr, u8)>,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Name of the interface it leaves by.
    pub interface: String,
    /// Priority; lower wins, 0 where none was set.
    pub metric: u32,
    /// The source address that packets without one of their own get on this route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferred_source: Option<IpAddr>,
    /// The next hop is taken to be on the link although no prefix of the interface covers it.
    #[serde(default)]
    pub onlink: bool,
}

/// A host on a link of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Name of the container's interface that it is reached by.
    pub interface: String,
    /// Whether somebody has set it for good, so that it is never asked again.
    pub permanent: bool,
}
