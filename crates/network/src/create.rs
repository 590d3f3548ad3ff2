use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, MacVlanMode};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use tranship_types::{Attachment, Interface, Neighbour, NetworkIdentity, ScopedAddress};

use crate::capture::{LOOPBACK_INDEX, open_rtnl};
use crate::inject::LOOPBACK;
use crate::link::{self, Link};
use crate::namespace::{self, Presence};
use crate::neighbours;
use crate::reply::Refusal;
use crate::routes;
use crate::rtnl::Rtnl;
use crate::ruleset;
use crate::sysctls;
use crate::{Gate, NetworkError};

/// Makes the network namespace `netns` with the given identity, attached to the calling thread's namespace, the node's,
/// and with its gate closed.
///
/// The source's copy of the identity is still in use: not one frame leaves or enters the new one before [`Gate::open`].
/// Hence the order: namespace, interfaces (down), gate, sysctls, interfaces up, addresses, routes, neighbours, rules of nftables. A macvlan is in mode vepa until
/// [`Announcer::announce`](crate::Announcer::announce), lest its neighbours on this node take it for the live one.
///
/// # Errors
/// [`NetworkError::Exists`] if there is something at that path, which is left alone;
/// [`NetworkError::Attachment`] if the node lacks the parent or bridge; the kernel's refusals. On any error nothing of
/// what was made remains.
pub fn create(netns: &Path, identity: &NetworkIdentity) -> Result<(), NetworkError> {
    let mut node = Node { namespace: namespace::own()?, rtnl: open_rtnl(netns)? };
    let plans: Vec<Plan<'_>> = identity.interfaces.iter().map(|i| node.plan(i)).collect::<Result<_, _>>()?;
    namespace::make(netns)?;
    let built = namespace::inside(netns, || build(netns, identity, &plans, &mut node));
    if built.is_err()
        && let Err(e) = remove(netns)
    {
        tracing::warn!("after a failed creation: {e}");
    }
    built
}

/// Looks whether [`create`] would find what the interfaces are to be attached to in the calling thread's namespace, the node's.
///
/// # Errors
/// [`NetworkError::Attachment`] for the first one that lacks it; the kernel's refusals.
pub fn attachable(identity: &NetworkIdentity) -> Result<(), NetworkError> {
    let rtnl = Rtnl::open().map_err(|e| NetworkError::refused("open a netlink socket", e))?;
    let mut node = Node { namespace: namespace::own()?, rtnl };
    identity.interfaces.iter().try_for_each(|interface| node.parent(interface).map(|_| ()))
}

/// Makes an empty network namespace `netns` into which somebody else will put interfaces of these names, and with their gate closed
/// already.
///
/// # Errors
/// [`NetworkError::Exists`] if there is something at that path, which is left alone; the kernel's refusals. On any error nothing of what
/// was made remains.
pub fn reserve(netns: &Path, interfaces: &[String]) -> Result<(), NetworkError> {
    namespace::share_names(netns)?;
    namespace::make(netns)?;
    let built = namespace::inside(netns, || {
        let mut rtnl = open_rtnl(netns)?;
        link::set_up(&mut rtnl, 1)
            .map_err(|e| NetworkError::refused(format!("set lo up in network namespace {}", netns.display()), e))?;
        Gate::ahead(netns, interfaces)?.close_ahead()
    });
    if built.is_err()
        && let Err(e) = remove(netns)
    {
        tracing::warn!("after a failed creation: {e}");
    }
    built
}

/// Closes the gate of a [reserved](reserve) network namespace for good, once the interfaces are there.
///
/// # Errors
/// An interface that is not there; the kernel's refusals.
pub fn close_attached(netns: &Path, interfaces: &[String]) -> Result<(), NetworkError> {
    Gate::prepare(netns, interfaces)?.close_attached()
}

/// Gives a network namespace, into which somebody else has put the interfaces, what there is of an identity beyond what is `attached`:
/// settings (sysctls), MTUs, addresses, routes and policy rules. Routes that a program has deleted or given another gateway are so there,
/// too; for those that the source's engine has given stand those that this node's has given, which may be `by_another`.
///
/// # Errors
/// If there is a setting that this node does not have, or something that the kernel refuses.
pub fn configure(
    netns: &Path,
    identity: &NetworkIdentity,
    attached: &NetworkIdentity,
    by_another: bool,
) -> Result<(), NetworkError> {
    namespace::inside(netns, || {
        sysctls::apply(netns, &identity.sysctls)?;
        sysctls::apply(netns, &identity.more_sysctls)?;
        let mut rtnl = open_rtnl(netns)?;
        for there in &attached.interfaces {
            let asked = identity.interfaces.iter().find(|asked| asked.name == there.name);
            // A larger one may be the source's network's, and not fit this node's.
            if let Some(mtu) = asked.map(|asked| asked.mtu).filter(|mtu| *mtu < there.mtu) {
                let change = RouteNetlinkMessage::SetLink(link::message(there.index, [LinkAttribute::Mtu(mtu)]));
                let what = format!("give {} an MTU of {mtu} in network namespace {}", there.name, netns.display());
                rtnl.change(change, 0).map_err(|e| NetworkError::refused(what, e))?;
            }
            let missing = asked.into_iter().flat_map(|asked| &asked.addresses);
            for (address, prefix) in missing.filter(|one| !there.addresses.contains(one)) {
                add_address(netns, &mut rtnl, (&there.name, there.index), &ScopedAddress::usual(*address, *prefix))?;
            }
        }
        let missing = identity.loopback.iter().filter(|one| !attached.loopback.contains(one));
        missing.into_iter().try_for_each(|one| add_address(netns, &mut rtnl, (LOOPBACK, LOOPBACK_INDEX), one))?;
        routes::change(netns, &mut rtnl, identity, (attached, by_another))?;
        routes::add_rules(netns, &mut rtnl, identity)
    })
}

/// Takes the name `netns` away from a namespace that has another one; success if it is gone already.
///
/// # Errors
/// The system's refusals.
pub fn unname(netns: &Path) -> Result<(), NetworkError> {
    namespace::unname(netns)
}

/// The processes in the network namespace `netns`, by their pids on this node, in no order.
///
/// # Errors
/// The system's refusals.
pub fn processes(netns: &Path) -> Result<Vec<u32>, NetworkError> {
    namespace::processes(netns)
}

/// Has the name `other`, which is another network namespace's until now, or none's, mean the network namespace `netns`, too.
///
/// # Errors
/// The kernel's refusal.
pub fn rename(netns: &Path, other: &Path) -> Result<(), NetworkError> {
    namespace::rename(netns, other)
}

/// Removes the network namespace `netns`, its interfaces and its name; success if it is gone already.
///
/// The gate is closed first, so that nothing that the kernel sends when connections and multicast memberships end
/// (FIN, RST, MLD reports) gets out under addresses that live elsewhere by now. Interfaces are deleted one by one, so
/// that they are gone from the node even if a process or socket keeps the namespace itself alive.
///
/// # Errors
/// [`NetworkError::NotANamespace`] if the path is something else, which is left alone; the system's refusals.
pub fn remove(netns: &Path) -> Result<(), NetworkError> {
    match namespace::presence(netns)? {
        Presence::Absent => return Ok(()),
        Presence::EmptyFile => {}
        Presence::Namespace => namespace::inside(netns, || delete_interfaces(netns))?,
    }
    namespace::unname(netns)
}

fn delete_interfaces(netns: &Path) -> Result<(), NetworkError> {
    let mut rtnl = open_rtnl(netns)?;
    let links = link::links(&mut rtnl).map_err(|e| {
        NetworkError::refused(format!("read the interfaces of network namespace {}", netns.display()), e)
    })?;
    let links: Vec<Link> = links.into_iter().filter(|l| !l.comes_with_the_namespace()).collect();
    let names: Vec<String> = links.iter().map(|l| l.name.clone()).collect();
    if let Err(e) = Gate::here(netns, &names).and_then(|mut gate| gate.close()) {
        // An interface may have gone this moment, or the kernel may have no nf_tables; removal goes on either way.
        tracing::warn!("{e}");
    }
    let mut failure = None;
    for link in links {
        match rtnl.change(RouteNetlinkMessage::DelLink(link::message(link.index, [])), 0) {
            Err(e) if e.errno != Errno::ENODEV => {
                let what = format!("delete interface {} in network namespace {}", link.name, netns.display());
                failure.get_or_insert(NetworkError::refused(what, e));
            }
            _ => {}
        }
    }
    failure.map_or(Ok(()), Err)
}

struct Node {
    namespace: File,
    rtnl: Rtnl,
}

/// An interface to be made, and what it will hang on.
struct Plan<'a> {
    interface: &'a Interface,
    parent: Link,
    /// Name and MAC of a veth's end on the node.
    end: (String, [u8; 6]),
}

impl Node {
    /// The node's interface that a container's interface is to be attached to.
    fn parent(&mut self, interface: &Interface) -> Result<Link, NetworkError> {
        let (name, kind) = match &interface.attachment {
            Attachment::Macvlan { parent } => (parent, None),
            Attachment::Bridge { bridge } => (bridge, Some("bridge")),
        };
        let missing =
            |why: String| NetworkError::Attachment { interface: interface.name.clone(), parent: name.clone(), why };
        let parent = link::by_name(&mut self.rtnl, name)
            .map_err(|e| NetworkError::refused(format!("look for interface {name} of the node"), e))?
            .ok_or_else(|| missing(format!("there is no interface {name}")))?;
        if kind.is_some_and(|kind| parent.kind != kind) {
            return Err(missing(format!("{name} is not a bridge")));
        }
        if !parent.up {
            return Err(missing(format!("{name} is down")));
        }
        Ok(parent)
    }

    fn plan<'a>(&mut self, interface: &'a Interface) -> Result<Plan<'a>, NetworkError> {
        let parent = self.parent(interface)?;
        let mut random = [0u8; 9];
        File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut random))
            .map_err(|e| NetworkError::refused("read /dev/urandom", e))?;
        let [a, b, c, d, e, f, g, h, i] = random;
        // A bridge takes the lowest MAC of its ports for its own; 0xfe keeps this one from ever being it.
        let end = (format!("veth{:08x}", u32::from_ne_bytes([a, b, c, d])), [0xfe, e, f, g, h, i]);
        Ok(Plan { interface, parent, end })
    }
}

fn build(netns: &Path, identity: &NetworkIdentity, plans: &[Plan<'_>], node: &mut Node) -> Result<(), NetworkError> {
    let mut rtnl = open_rtnl(netns)?;
    let failed =
        |what: String| move |e| NetworkError::refused(format!("{what} in network namespace {}", netns.display()), e);
    for plan in plans {
        let made = match make_interface(&mut rtnl, plan, node) {
            // A new namespace has none of that name or index, so it is the node that has one.
            Err(e) if e.errno == Errno::EEXIST && matches!(plan.interface.attachment, Attachment::Macvlan { .. }) => {
                make_macvlan_apart(plan, node)?
            }
            made => made,
        };
        made.map_err(failed(format!("make interface {}", plan.interface.name)))?;
    }
    let names: Vec<String> = identity.interfaces.iter().map(|i| i.name.clone()).collect();
    Gate::here(netns, &names)?.close_still()?;
    sysctls::apply(netns, &identity.sysctls)?;
    sysctls::apply(netns, &identity.more_sysctls)?;
    link::set_up(&mut rtnl, 1).map_err(failed("set lo up".into()))?;
    for plan in plans {
        let Interface { name, index, addresses, .. } = plan.interface;
        if matches!(plan.interface.attachment, Attachment::Bridge { .. }) {
            attach_to_bridge(&mut node.rtnl, plan)?;
        }
        link::set_up(&mut rtnl, *index).map_err(failed(format!("set interface {name} up")))?;
        for (address, prefix) in addresses {
            add_address(netns, &mut rtnl, (name, *index), &ScopedAddress::usual(*address, *prefix))?;
        }
    }
    add_to_loopback(netns, &mut rtnl, identity)?;
    routes::add(netns, &mut rtnl, &identity.interfaces, identity.routes.iter())?;
    routes::add_rules(netns, &mut rtnl, identity)?;
    for neighbour in &identity.neighbours {
        let Neighbour { address, interface: name, .. } = neighbour;
        let Some(interface) = identity.interfaces.iter().find(|i| i.name == *name) else { continue };
        let what = failed(format!("make neighbour {address} known on {name}"));
        neighbours::add(&mut rtnl, interface.index, neighbour).map_err(what)?;
    }
    ruleset::apply(netns, &identity.ruleset)
}

fn add_to_loopback(netns: &Path, rtnl: &mut Rtnl, identity: &NetworkIdentity) -> Result<(), NetworkError> {
    identity.loopback.iter().try_for_each(|one| add_address(netns, rtnl, (LOOPBACK, LOOPBACK_INDEX), one))
}

fn add_address(
    netns: &Path,
    rtnl: &mut Rtnl,
    (name, index): (&str, u32),
    one: &ScopedAddress,
) -> Result<(), NetworkError> {
    let message = RouteNetlinkMessage::NewAddress(address_message(index, one));
    rtnl.change(message, NLM_F_CREATE | NLM_F_EXCL).map_err(|e| {
        let what = format!("give interface {name} the address {}/{}", one.address, one.prefix);
        NetworkError::refused(format!("{what} in network namespace {}", netns.display()), e)
    })
}

fn make_interface(rtnl: &mut Rtnl, plan: &Plan<'_>, node: &Node) -> Result<(), Refusal> {
    let Interface { name, index, mac, mtu, attachment, .. } = plan.interface;
    let mut attributes =
        vec![LinkAttribute::IfName(name.clone()), LinkAttribute::Address(mac.to_vec()), LinkAttribute::Mtu(*mtu)];
    // The request comes from inside the new namespace: made from the node's, an index that is in use there is refused.
    match attachment {
        Attachment::Macvlan { .. } => {
            let id = link::ensure_namespace_id(rtnl, &node.namespace)?;
            attributes.push(LinkAttribute::Link(plan.parent.index));
            attributes.push(LinkAttribute::LinkNetNsId(id));
            attributes.push(link::macvlan(MacVlanMode::Vepa));
        }
        Attachment::Bridge { .. } => {
            let (end, end_mac) = &plan.end;
            let peer = link::message(
                0,
                [
                    LinkAttribute::IfName(end.clone()),
                    LinkAttribute::Address(end_mac.to_vec()),
                    LinkAttribute::Mtu(*mtu),
                    LinkAttribute::NetNsFd(node.namespace.as_raw_fd()),
                ],
            );
            attributes.push(LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]));
        }
    }
    rtnl.change(RouteNetlinkMessage::NewLink(link::message(*index, attributes)), NLM_F_CREATE | NLM_F_EXCL)
}

/// Makes a macvlan for the calling thread's namespace by way of a namespace that nobody else sees. Kernels before 6.15 look at the node's
/// names and indices, or make it among the node's interfaces first: there it cannot have a name or an index that is in use on the node.
fn make_macvlan_apart(plan: &Plan<'_>, node: &mut Node) -> Result<Result<(), Refusal>, NetworkError> {
    let (Interface { name, index, mac, mtu, .. }, (interim, _)) = (plan.interface, &plan.end);
    let target = namespace::own()?;
    namespace::in_a_new_one(|| {
        let apart = namespace::own()?;
        let made = [
            LinkAttribute::IfName(interim.clone()),
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(*mtu),
            LinkAttribute::Link(plan.parent.index),
            LinkAttribute::NetNsFd(apart.as_raw_fd()),
            link::macvlan(MacVlanMode::Vepa),
        ];
        let moved = [
            LinkAttribute::NetNsFd(target.as_raw_fd()),
            LinkAttribute::NewIfIndex(index.cast_signed()),
            LinkAttribute::IfName(name.clone()),
        ];
        let make = || -> Result<(), Refusal> {
            node.rtnl.change(RouteNetlinkMessage::NewLink(link::message(0, made)), NLM_F_CREATE | NLM_F_EXCL)?;
            let mut rtnl = Rtnl::open()?;
            let link = link::by_name(&mut rtnl, interim)?.ok_or_else(|| Refusal::nonsense("it is gone"))?;
            rtnl.change(RouteNetlinkMessage::SetLink(link::message(link.index, moved)), 0)
        };
        Ok(make())
    })
}

fn attach_to_bridge(node: &mut Rtnl, plan: &Plan<'_>) -> Result<(), NetworkError> {
    let (end, _) = &plan.end;
    let attach = |node: &mut Rtnl| {
        let link = link::by_name(node, end)?.ok_or_else(|| Refusal::nonsense("it is gone"))?;
        let port = link::message(link.index, [LinkAttribute::Controller(plan.parent.index)]);
        node.change(RouteNetlinkMessage::SetLink(port), 0)?;
        link::set_up(node, link.index)
    };
    attach(node).map_err(|e| NetworkError::refused(format!("make {end} a port of bridge {}", plan.parent.name), e))
}

fn address_message(index: u32, &ScopedAddress { address, prefix, scope }: &ScopedAddress) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = prefix;
    match address {
        IpAddr::V4(v4) => {
            message.header.family = AddressFamily::Inet;
            message.header.scope = scope.into();
            message.attributes.push(AddressAttribute::Local(address));
            message.attributes.push(AddressAttribute::Address(address));
            // As the CNI plugins and Docker do it.
            if prefix < 31 && index != LOOPBACK_INDEX {
                message.attributes.push(AddressAttribute::Broadcast(broadcast(v4, prefix)));
            }
        }
        IpAddr::V6(_) => {
            message.header.family = AddressFamily::Inet6;
            message.attributes.push(AddressAttribute::Local(address));
            message.attributes.push(AddressAttribute::Address(address));
            // Duplicate address detection would ask a network on which the duplicate is alive, and should be.
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
    }
    message
}

fn broadcast(address: Ipv4Addr, prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(address) | u32::MAX.checked_shr(u32::from(prefix)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_addresses_end_the_prefix() {
        let of = |a: &str, p| broadcast(a.parse().unwrap(), p).to_string();
        assert_eq!(of("10.1.2.3", 24), "10.1.2.255");
        assert_eq!(of("10.1.2.3", 30), "10.1.2.3");
        assert_eq!(of("10.1.2.3", 0), "255.255.255.255");
        assert_eq!(of("10.1.2.3", 32), "10.1.2.3");
    }

    #[test]
    fn a_macvlan_gets_a_name_and_an_index_that_the_node_uses() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return;
        }
        let made = namespace::in_a_new_one(|| {
            let mut node = Node { namespace: namespace::own()?, rtnl: Rtnl::open().unwrap() };
            for ends in [["eth0", "switch0"], ["eth1", "switch1"]] {
                let pair = ["link", "add", ends[0], "type", "veth", "peer", "name", ends[1]];
                assert!(std::process::Command::new("ip").args(pair).status().unwrap().success());
            }
            let parent = link::by_name(&mut node.rtnl, "eth0").unwrap().unwrap();
            let taken = link::by_name(&mut node.rtnl, "eth1").unwrap().unwrap().index;
            let interface = Interface {
                name: "eth0".to_owned(),
                index: taken,
                mac: [2, 0, 0, 0, 0, 7],
                mtu: 1400,
                attachment: Attachment::Macvlan { parent: "eth0".to_owned() },
                addresses: Vec::new(),
            };
            let plan = Plan { interface: &interface, parent, end: ("interim0".to_owned(), [0; 6]) };
            namespace::in_a_new_one(|| {
                make_macvlan_apart(&plan, &mut node)?.unwrap();
                Ok(link::by_index(&mut Rtnl::open().unwrap(), taken).unwrap().unwrap())
            })
        });
        let link = made.unwrap();
        assert_eq!((link.name.as_str(), link.mac, link.mtu), ("eth0", Some([2, 0, 0, 0, 0, 7]), 1400));
        assert_eq!(link.macvlan_mode, Some(MacVlanMode::Vepa));
    }
}
