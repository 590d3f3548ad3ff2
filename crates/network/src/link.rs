//! Interfaces as rtnetlink shows them, reduced to what matters here.

use std::net::IpAddr;
use std::os::fd::AsRawFd;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoMacVlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, MacVlanMode,
};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use nix::errno::Errno;

use crate::reply::Refusal;
use crate::rtnl::Rtnl;

/// One interface.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub index: u32,
    pub name: String,
    /// The kernel's name of its kind; empty for hardware.
    pub kind: String,
    pub mac: Option<[u8; 6]>,
    pub mtu: u32,
    pub up: bool,
    pub loopback: bool,
    /// What it sits on or, for a veth, its other end: an index in the namespace `below_nsid`.
    pub below: Option<u32>,
    /// Where `below` counts; `None` is the interface's own namespace.
    pub below_nsid: Option<i32>,
    /// The bridge or bond that it is a port of.
    pub controller: Option<u32>,
    pub macvlan_mode: Option<MacVlanMode>,
}

impl Link {
    pub(crate) fn read(message: &LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            up: flags.contains(LinkFlags::Up),
            loopback: flags.contains(LinkFlags::Loopback),
            ..Self::default()
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::Link(index) => link.below = Some(*index),
                LinkAttribute::LinkNetNsId(id) => link.below_nsid = Some(*id),
                LinkAttribute::Controller(index) => link.controller = Some(*index),
                LinkAttribute::LinkInfo(infos) => link.read_infos(infos),
                _ => {}
            }
        }
        link
    }

    fn read_infos(&mut self, infos: &[LinkInfo]) {
        for info in infos {
            match info {
                LinkInfo::Kind(kind) => self.kind = kind.to_string(),
                LinkInfo::Data(InfoData::MacVlan(data)) => {
                    self.macvlan_mode = data.iter().find_map(|d| match d {
                        InfoMacVlan::Mode(mode) => Some(*mode),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
    }

    /// Whether the kernel itself puts this interface into every new namespace, unused: `lo` and, on kernels with tunnel
    /// modules loaded, their fallback devices.
    pub(crate) fn comes_with_the_namespace(&self) -> bool {
        const FALLBACKS: [&str; 9] =
            ["tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"];
        self.loopback || (!self.up && FALLBACKS.contains(&self.name.as_str()))
    }
}

/// All interfaces, by index.
pub(crate) fn links(rtnl: &mut Rtnl) -> Result<Vec<Link>, Refusal> {
    let mut links: Vec<Link> = rtnl
        .list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?
        .iter()
        .filter_map(|m| match m {
            RouteNetlinkMessage::NewLink(link) => Some(Link::read(link)),
            _ => None,
        })
        .collect();
    links.sort_by_key(|l| l.index);
    Ok(links)
}

/// All addresses, each with the index of its interface and the length of its prefix.
pub(crate) fn addresses(rtnl: &mut Rtnl) -> Result<Vec<(u32, IpAddr, u8)>, Refusal> {
    let answers = rtnl.list(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    let address = |answer: &RouteNetlinkMessage| {
        let RouteNetlinkMessage::NewAddress(message) = answer else { return None };
        let address = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
        Some((message.header.index, address?, message.header.prefix_len))
    };
    Ok(answers.iter().filter_map(address).collect())
}

fn get(rtnl: &mut Rtnl, question: LinkMessage) -> Result<Option<Link>, Refusal> {
    match rtnl.get(RouteNetlinkMessage::GetLink(question)) {
        Ok(RouteNetlinkMessage::NewLink(link)) => Ok(Some(Link::read(&link))),
        Ok(_) => Err(Refusal::nonsense("an answer that is no link")),
        Err(e) if e.errno == Errno::ENODEV => Ok(None),
        Err(e) => Err(e),
    }
}

/// The interface of that index, if there is one.
pub(crate) fn by_index(rtnl: &mut Rtnl, index: u32) -> Result<Option<Link>, Refusal> {
    get(rtnl, message(index, []))
}

/// The interface of that name, if there is one.
pub(crate) fn by_name(rtnl: &mut Rtnl, name: &str) -> Result<Option<Link>, Refusal> {
    get(rtnl, message(0, [LinkAttribute::IfName(name.to_owned())]))
}

/// A link message; index 0 leaves the choice to the kernel.
pub(crate) fn message(index: u32, attributes: impl IntoIterator<Item = LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.extend(attributes);
    message
}

/// Sets an interface up.
pub(crate) fn set_up(rtnl: &mut Rtnl, index: u32) -> Result<(), Refusal> {
    let mut message = message(index, []);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    rtnl.change(RouteNetlinkMessage::SetLink(message), 0)
}

/// The attribute that makes a macvlan, or changes one, in `mode`.
pub(crate) fn macvlan(mode: MacVlanMode) -> LinkAttribute {
    LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::MacVlan),
        LinkInfo::Data(InfoData::MacVlan(vec![InfoMacVlan::Mode(mode)])),
    ])
}

/// Changes a macvlan's mode.
pub(crate) fn set_macvlan_mode(rtnl: &mut Rtnl, index: u32, mode: MacVlanMode) -> Result<(), Refusal> {
    rtnl.change(RouteNetlinkMessage::NewLink(message(index, [macvlan(mode)])), 0)
}

/// The id by which the namespace of `rtnl` knows `other`, if it knows it.
pub(crate) fn namespace_id(rtnl: &mut Rtnl, other: &impl AsRawFd) -> Result<Option<i32>, Refusal> {
    let mut question = NsidMessage::default();
    question.attributes.push(NsidAttribute::Fd(other.as_raw_fd() as u32));
    let RouteNetlinkMessage::NewNsId(answer) = rtnl.get(RouteNetlinkMessage::GetNsId(question))? else {
        return Err(Refusal::nonsense("an answer that is no namespace id"));
    };
    Ok(answer.attributes.iter().find_map(|a| match a {
        NsidAttribute::Id(id) if *id >= 0 => Some(*id),
        _ => None,
    }))
}

/// The same, giving it an id if it has none.
pub(crate) fn ensure_namespace_id(rtnl: &mut Rtnl, other: &impl AsRawFd) -> Result<i32, Refusal> {
    if let Some(id) = namespace_id(rtnl, other)? {
        return Ok(id);
    }
    let mut request = NsidMessage::default();
    request.attributes.push(NsidAttribute::Id(-1));
    request.attributes.push(NsidAttribute::Fd(other.as_raw_fd() as u32));
    rtnl.change(RouteNetlinkMessage::NewNsId(request), 0)?;
    namespace_id(rtnl, other)?.ok_or_else(|| Refusal::nonsense("no id for the node's namespace"))
}
