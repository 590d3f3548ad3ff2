use std::collections::HashMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressProtocol};
use netlink_packet_route::link::MacVlanMode;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tranship_types::{Attachment, Interface, NetworkIdentity, Route, Rule, ScopedAddress};

use crate::NetworkError;
use crate::link::{self, Link};
use crate::namespace;
use crate::neighbours;
use crate::reply::Refusal;
use crate::rtnl::Rtnl;
use crate::rules;
use crate::sysctls;

/// Of the loopback interface, in every network namespace (net/core/dev.c).
pub(crate) const LOOPBACK_INDEX: u32 = 1;

/// Table of the routes that the kernel makes for its own addresses.
const TABLE_LOCAL: u32 = 255;

/// Reads the network identity of the namespace at `netns`: its interfaces, addresses, routes, and what they hang on in
/// the calling thread's namespace, the node's.
///
/// The rules of nftables in there are not in it ([`ruleset::capture`](crate::ruleset::capture)), nor is what CNI keeps
/// ([`cni::attachments`](crate::cni::attachments)).
///
/// Addresses and routes that the kernel makes by itself are left out, it will make them again. IPv6 addresses and routes
/// that a router's advertisement gave are taken as if they had been configured, since connections may use them.
///
/// # Errors
/// [`NetworkError::UnsupportedInterface`] and [`NetworkError::Unsupported`] for what could not be made again on another
/// node, so that nothing is lost silently.
pub fn capture(netns: &Path) -> Result<NetworkIdentity, NetworkError> {
    let mut node = Node { namespace: namespace::own()?, rtnl: open_rtnl(netns)? };
    namespace::inside(netns, move || {
        let mut rtnl = open_rtnl(netns)?;
        let mut reader = Reader { netns, rtnl: &mut rtnl };
        let rules = reader.rules()?;
        let (links, mut addresses) = (reader.links()?, reader.addresses()?);
        let names: HashMap<_, _> = links.iter().map(|l| (l.index, l.name.clone())).collect();
        let routes = reader.routes(&names)?;
        let mut interfaces = Vec::new();
        for link in links.iter().filter(|l| !l.comes_with_the_namespace()) {
            let addresses = addresses.remove(&link.index).unwrap_or_default();
            interfaces.push(reader.interface(link, addresses, &mut node)?);
        }
        let loopback = addresses.remove(&LOOPBACK_INDEX).unwrap_or_default();
        let neighbours = neighbours::known(reader.rtnl, &names).map_err(|e| reader.unreadable("neighbours", &e))?;
        let (sysctls, more_sysctls) = sysctls::changed()?;
        Ok(NetworkIdentity {
            interfaces,
            loopback,
            routes,
            given_gateways: Vec::new(),
            given_by: None,
            rules,
            neighbours,
            sysctls,
            more_sysctls,
            ruleset: String::new(),
            cni: Vec::new(),
        })
    })
}

pub(crate) fn open_rtnl(netns: &Path) -> Result<Rtnl, NetworkError> {
    Rtnl::open().map_err(|e| NetworkError::refused(format!("open an rtnetlink socket for {}", netns.display()), e))
}

/// The node's side: its namespace and a socket in there.
struct Node {
    namespace: File,
    rtnl: Rtnl,
}

struct Reader<'a> {
    netns: &'a Path,
    rtnl: &'a mut Rtnl,
}

impl Reader<'_> {
    fn unreadable(&self, what: &str, refusal: &Refusal) -> NetworkError {
        NetworkError::refused(format!("read the {what} of network namespace {}", self.netns.display()), refusal)
    }

    fn unsupported(&self, what: impl Into<String>, remedy: &'static str) -> NetworkError {
        unsupported(self.netns, what, remedy)
    }

    fn links(&mut self) -> Result<Vec<Link>, NetworkError> {
        link::links(self.rtnl).map_err(|e| self.unreadable("interfaces", &e))
    }

    fn rules(&mut self) -> Result<Vec<Rule>, NetworkError> {
        let rules = rules::added(self.rtnl).map_err(|e| self.unreadable("policy rules", &e))?;
        rules.map_err(|what| self.unsupported(what, "delete it there (`ip rule` lists them)"))
    }

    /// The addresses of each interface, by its index, but for those that the kernel gives it by itself.
    fn addresses(&mut self) -> Result<HashMap<u32, Vec<ScopedAddress>>, NetworkError> {
        let messages = self
            .rtnl
            .list(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))
            .map_err(|e| self.unreadable("addresses", &e))?;
        let mut addresses: HashMap<u32, Vec<ScopedAddress>> = HashMap::new();
        for message in messages {
            let RouteNetlinkMessage::NewAddress(message) = message else { continue };
            let (mut local, mut peer, mut protocol) = (None, None, None);
            for attribute in &message.attributes {
                match attribute {
                    AddressAttribute::Local(a) => local = Some(*a),
                    AddressAttribute::Address(a) => peer = Some(*a),
                    AddressAttribute::Protocol(p) => protocol = Some(*p),
                    _ => {}
                }
            }
            let Some(address) = local.or(peer) else { continue };
            if peer.is_some_and(|p| p != address) {
                return Err(self.unsupported(
                    format!("the point-to-point address {address}"),
                    "give the interface an address with a prefix instead",
                ));
            }
            let by_kernel = matches!(protocol, Some(AddressProtocol::LinkLocal | AddressProtocol::Loopback))
                || is_of_every_namespace(address) && message.header.index == LOOPBACK_INDEX;
            if !by_kernel {
                let (prefix, scope) = (message.header.prefix_len, message.header.scope.into());
                let of_interface = addresses.entry(message.header.index).or_default();
                of_interface.push(ScopedAddress { address, prefix, scope });
            }
        }
        Ok(addresses)
    }

    fn interface(
        &mut self,
        link: &Link,
        addresses: Vec<ScopedAddress>,
        node: &mut Node,
    ) -> Result<Interface, NetworkError> {
        if !link.up {
            return Err(self.unsupported(format!("an interface {} that is down", link.name), "set it up, or delete it"));
        }
        let attachment = self.attachment(link, node)?;
        let Some(mac) = link.mac else { return Err(self.foreign(link, "an interface without a MAC address")) };
        // Kernels before 5.18 do not say who made an address.
        let addresses = addresses.into_iter().filter(|one| one.address != IpAddr::V6(link_local(mac)));
        let plain = |one: ScopedAddress| {
            // Of IPv6 the kernel makes the scope of the address itself, and ip(8) gives a link-local one of IPv4 none.
            let is_usual = one.address.is_ipv6() || one.scope == 0;
            if is_usual || one.scope == ScopedAddress::usual(one.address, one.prefix).scope {
                return Ok((one.address, one.prefix));
            }
            let what = format!("the address {} with a scope of its own ({})", one.address, one.scope);
            Err(self.unsupported(what, "add it without a scope (`ip addr` lists them)"))
        };
        let addresses = addresses.map(plain).collect::<Result<_, _>>()?;
        Ok(Interface { name: link.name.clone(), index: link.index, mac, mtu: link.mtu, addresses, attachment })
    }

    fn foreign(&self, link: &Link, kind: impl Into<String>) -> NetworkError {
        NetworkError::UnsupportedInterface {
            netns: self.netns.to_owned(),
            interface: link.name.clone(),
            kind: kind.into(),
        }
    }

    fn attachment(&mut self, link: &Link, node: &mut Node) -> Result<Attachment, NetworkError> {
        let unfit = match (link.kind.as_str(), link.macvlan_mode) {
            ("macvlan", Some(MacVlanMode::Bridge)) | ("veth", _) => None,
            ("macvlan", Some(mode)) => Some(format!("a macvlan in mode {mode:?}").to_lowercase()),
            ("", _) => Some("a device of the hardware".into()),
            (kind, _) => Some(format!("a {kind}")),
        };
        if let Some(kind) = unfit {
            return Err(self.foreign(link, kind));
        }
        // An index says nothing without the namespace that it counts in.
        let node_id = link::namespace_id(self.rtnl, &node.namespace);
        let node_id = node_id.map_err(|e| self.unreadable("id for the node's namespace", &e))?;
        let below = match link.below {
            Some(index) if link.below_nsid.is_some() && link.below_nsid == node_id => {
                link::by_index(&mut node.rtnl, index).map_err(|e| self.unreadable("parent interface", &e))?
            }
            _ => None,
        };
        let foreign = |kind: &str| Err(self.foreign(link, kind));
        match (link.kind.as_str(), below) {
            ("macvlan", Some(parent)) => Ok(Attachment::Macvlan { parent: parent.name }),
            ("macvlan", None) => foreign("a macvlan whose parent is not an interface of the node"),
            (_, None) => foreign("a veth whose other end is not on the node"),
            (_, Some(end)) => {
                let controller = match end.controller {
                    Some(index) => link::by_index(&mut node.rtnl, index).map_err(|e| self.unreadable("bridge", &e))?,
                    None => None,
                };
                match controller {
                    Some(bridge) if bridge.kind == "bridge" => Ok(Attachment::Bridge { bridge: bridge.name }),
                    Some(other) => foreign(&format!(
                        "a veth whose other end, {}, is a port of the {} {}",
                        end.name, other.kind, other.name
                    )),
                    None => foreign(&format!("a veth whose other end, {}, is a port of no bridge", end.name)),
                }
            }
        }
    }

    fn routes(&mut self, names: &HashMap<u32, String>) -> Result<Vec<Route>, NetworkError> {
        let messages = self
            .rtnl
            .list(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))
            .map_err(|e| self.unreadable("routes", &e))?;
        let mut routes = Vec::new();
        for message in messages {
            let RouteNetlinkMessage::NewRoute(message) = message else { continue };
            let made_by_kernel = matches!(message.header.protocol, RouteProtocol::Kernel | RouteProtocol::IcmpRedirect)
                || message.header.flags.contains(RouteFlags::Cloned);
            if !made_by_kernel {
                routes.push(route(self.netns, &message, names)?);
            }
        }
        Ok(routes)
    }
}

/// Whether the kernel gives the loopback interface this address when it is set up.
fn is_of_every_namespace(address: IpAddr) -> bool {
    [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)].contains(&address)
}

/// The route that the kernel lists in the network namespace `netns`, whose interfaces have these names.
pub(crate) fn route(netns: &Path, message: &RouteMessage, names: &HashMap<u32, String>) -> Result<Route, NetworkError> {
    let header = &message.header;
    let (mut table, mut target, mut interface) = (u32::from(header.table), None, None);
    let (mut gateway, mut metric, mut preferred_source, mut special) = (None, 0, None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(t) => table = *t,
            RouteAttribute::Destination(a) => target = ip(a),
            RouteAttribute::Gateway(a) => gateway = ip(a),
            RouteAttribute::PrefSource(a) => preferred_source = ip(a),
            RouteAttribute::Oif(index) => interface = names.get(index).cloned(),
            RouteAttribute::Priority(p) => metric = *p,
            RouteAttribute::MultiPath(_) => special = Some("several next hops"),
            RouteAttribute::Encap(_) => special = Some("an encapsulation"),
            RouteAttribute::Via(_) => special = Some("a next hop of the other address family"),
            RouteAttribute::Source(_) => special = Some("a source prefix"),
            _ => {}
        }
    }
    let v6 = header.address_family == AddressFamily::Inet6;
    let any = if v6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let length = header.destination_prefix_length;
    let shown = format!("{}/{length}", target.unwrap_or(any));
    let remedy = "delete the route inside the namespace";
    if header.kind != RouteType::Unicast {
        return Err(unsupported(netns, format!("a route of type {:?} to {shown}", header.kind).to_lowercase(), remedy));
    }
    // Unicast routes of the local table are the kernel's.
    if table == TABLE_LOCAL {
        return Err(unsupported(netns, format!("a route to {shown} in routing table {table}"), remedy));
    }
    if let Some(special) = special {
        return Err(unsupported(netns, format!("a route to {shown} with {special}"), remedy));
    }
    let Some(interface) = interface else {
        return Err(unsupported(netns, format!("a route to {shown} without an interface"), remedy));
    };
    // Without a gateway only the destination tells which family's default route it is.
    let destination = match (length, gateway) {
        (0, Some(_)) => None,
        _ => Some((target.unwrap_or(any), length)),
    };
    let onlink = header.flags.contains(RouteFlags::Onlink);
    Ok(Route { destination, gateway, interface, metric, preferred_source, onlink, table })
}

fn unsupported(netns: &Path, what: impl Into<String>, remedy: &'static str) -> NetworkError {
    NetworkError::Unsupported { netns: netns.to_owned(), what: what.into(), remedy }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some(IpAddr::V4(*a)),
        RouteAddress::Inet6(a) => Some(IpAddr::V6(*a)),
        _ => None,
    }
}

/// The link-local address that the kernel makes of a MAC (RFC 4291, appendix A).
pub(crate) fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_link_local_address_follows_from_the_mac() {
        let expected: Ipv6Addr = "fe80::8:2ff:fe00:a1b".parse().unwrap();
        assert_eq!(link_local([0x02, 0x08, 0x02, 0x00, 0x0a, 0x1b]), expected);
    }
}
