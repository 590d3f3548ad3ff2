use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::NodeName;

/// The network identity of a container: what its network namespace must look like on any node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkIdentity {
    /// The interfaces but `lo`, in their order of index.
    pub interfaces: Vec<Interface>,
    /// Addresses of `lo` besides those that it has in every namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loopback: Vec<ScopedAddress>,
    /// The routes that were not made by the kernel itself.
    pub routes: Vec<Route>,
    /// The gateways that an engine has given the container: another node's engine may give others. Empty from an older peer, and where no
    /// engine has attached it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_gateways: Vec<IpAddr>,
    /// The engine that has given them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_by: Option<String>,
    /// The policy rules besides those that every new namespace has, in their order.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// The neighbours whose MAC the container knows.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
    /// The settings of the namespace that are not as in a new one, by their names below `/proc/sys/net`.
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
    /// The same of other parts than `core`, `ipv4` and `ipv6`, which older nodes would refuse; of this field they take no note.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub more_sysctls: BTreeMap<String, String>,
    /// The rules of nftables inside the namespace: base64 of the netlink messages that the kernel lists them in. Empty where there are
    /// none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ruleset: String,
    /// What CNI plugins keep on the node about its interfaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cni: Vec<CniAttachment>,
}

/// What a node's CNI plugins keep about an interface that they have attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniAttachment {
    /// By what name CNI's caller has attached the container.
    pub container: String,
    /// The network's name.
    pub network: String,
    /// The interface's name inside the namespace.
    pub interface: String,
    /// The addresses that the plugin host-local has reserved for it.
    pub addresses: Vec<IpAddr>,
    /// The result with the network's configuration, as libcni has cached it (JSON, kind `cniCacheV1`); `None` where the plugins were
    /// called by something that caches none.
    pub cached: Option<String>,
}

/// An address that an IPAM has given to a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedAddress {
    /// The network's name in the IPAM.
    pub network: String,
    /// What the IPAM calls the container.
    pub owner: String,
    /// The interface's name inside the container.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
}

/// Whether a container has its addresses still, as a node knows that it had moved to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum AddressState {
    /// The container has at least one of them on the node that was asked.
    Here,
    /// The container has left that node.
    Moved {
        /// Where it moved to.
        to: NodeName,
    },
    /// The container has none of them there, and has not moved on.
    Gone,
    /// What this version does not know.
    #[serde(other)]
    Unknown,
}

impl CniAttachment {
    /// The addresses that host-local has reserved for it.
    pub fn reserved(&self) -> impl Iterator<Item = ReservedAddress> {
        self.addresses.iter().map(|address| ReservedAddress {
            network: self.network.clone(),
            owner: self.container.clone(),
            interface: self.interface.clone(),
            address: *address,
        })
    }
}

impl NetworkIdentity {
    /// The names of its interfaces.
    pub fn names(&self) -> Vec<String> {
        self.interfaces.iter().map(|interface| interface.name.clone()).collect()
    }

    /// The addresses of its interfaces.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.interfaces.iter().flat_map(|interface| &interface.addresses).map(|(address, _)| *address).collect()
    }

    /// Whether it has policy rules, or routes outside of the main table.
    pub fn has_policy_routing(&self) -> bool {
        !self.rules.is_empty() || self.routes.iter().any(|route| route.table != MAIN_TABLE)
    }
}

/// An address of an interface, and how far it is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopedAddress {
    /// The address.
    pub address: IpAddr,
    /// The length of its prefix.
    pub prefix: u8,
    /// How far, as rtnetlink(7) has it in `ifa_scope`: 0 everywhere, 253 on the link, 254 on the host.
    pub scope: u8,
}

impl ScopedAddress {
    /// One with the scope that it has where nobody has chosen another one.
    pub fn usual(address: IpAddr, prefix: u8) -> Self {
        let is_link_local = match address {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let scope = match address.is_loopback() {
            true => 254,
            false if is_link_local => 253,
            false => 0,
        };
        Self { address, prefix, scope }
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

/// The routing table that is asked where no rule says otherwise.
pub const MAIN_TABLE: u32 = 254;

fn main_table() -> u32 {
    MAIN_TABLE
}

/// A route of the container's.
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
    /// Its routing table.
    #[serde(default = "main_table")]
    pub table: u32,
}

/// A policy rule (`ip rule`): what becomes of packets that meet all of its conditions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Whether it is for IPv6 rather than IPv4.
    pub ipv6: bool,
    /// The rules are asked in ascending order.
    pub priority: u32,
    /// What becomes of the packets.
    pub verdict: RuleVerdict,
    /// It is for packets that do *not* meet the conditions.
    pub inverted: bool,
    /// Condition: the source address and its prefix length.
    pub source: Option<(IpAddr, u8)>,
    /// Condition: the destination address and its prefix length.
    pub destination: Option<(IpAddr, u8)>,
    /// Condition: the packet's mark, under a mask.
    pub mark: Option<(u32, u32)>,
    /// Condition: name of the interface that the packet came in by; `lo` for the container's own.
    pub incoming: Option<String>,
    /// Condition: name of the interface that the socket is bound to.
    pub outgoing: Option<String>,
    /// Condition: type of service; 0 is any.
    pub type_of_service: u8,
    /// Condition: number of the IP protocol.
    pub protocol: Option<u8>,
    /// Condition: first and last source port.
    pub source_ports: Option<(u16, u16)>,
    /// Condition: first and last destination port.
    pub destination_ports: Option<(u16, u16)>,
    /// Condition: first and last user id.
    pub users: Option<(u32, u32)>,
    /// Routes whose prefix has this length, or a shorter one, do not count.
    pub suppressed: Option<u32>,
}

impl Rule {
    /// A rule for IPv4 without conditions.
    pub fn to_table(priority: u32, table: u32) -> Self {
        Self {
            ipv6: false,
            priority,
            verdict: RuleVerdict::Table(table),
            inverted: false,
            source: None,
            destination: None,
            mark: None,
            incoming: None,
            outgoing: None,
            type_of_service: 0,
            protocol: None,
            source_ports: None,
            destination_ports: None,
            users: None,
            suppressed: None,
        }
    }
}

/// What becomes of the packets that a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleVerdict {
    /// This routing table is asked.
    Table(u32),
    /// They are dropped.
    Blackhole,
    /// They are dropped, and their sender is told that there is no way.
    Unreachable,
    /// They are dropped, and their sender is told that it is forbidden.
    Prohibit,
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
