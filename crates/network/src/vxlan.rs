//! VXLAN devices that join a bridge of this node with one of another node, so that a container that has moved still
//! reaches those that stayed ([why](../../../docs/decisions/neighbours-on-a-bridge.md)).
//!
//! A device has one remote, the other node, and is a port of the bridge. It is isolated: the bridge forwards nothing
//! from one such port to another one, so that bridges of three nodes are never a loop. Both bridges have the address of
//! the gateway, so a table of nftables on the device (family netdev, named as the device) drops ARP and neighbour
//! discovery for it. A second table of that name (family inet) drops packets of this VXLAN that do not come from the
//! remote's address.

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoKind, InfoPortData, InfoPortKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage,
};
use nix::errno::Errno;

use crate::NetworkError;
use crate::link::{self, Link};
use crate::namespace;
use crate::nftables::{Batch, NFPROTO_NETDEV, Nftables, OF_SEGMENT};
use crate::reply::Refusal;
use crate::rtnl::Rtnl;

/// How the names of these devices begin; the network's number follows, in six hexadecimal digits.
const PREFIX: &str = "tship-";
/// The kernel's name of their kind.
const KIND: &str = "vxlan";
/// Bits of the number of a VXLAN.
pub const VXLAN_BITS: u32 = 24;

/// One of these devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vxlan {
    /// The number of the VXLAN (VNI), below 2^[`VXLAN_BITS`].
    pub id: u32,
    /// The UDP port, on both nodes.
    pub port: u16,
    /// This node's address.
    pub local: IpAddr,
    /// The other node's address.
    pub remote: IpAddr,
    /// This node's bridge.
    pub bridge: String,
    /// The addresses of both bridges, for which nothing crosses.
    pub guarded: Vec<IpAddr>,
}

/// The name of the device with this number.
pub fn vxlan_name(id: u32) -> String {
    format!("{PREFIX}{id:06x}")
}

/// The number in a device's name, if it is one of these.
pub fn vxlan_id(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(PREFIX).filter(|digits| digits.len() == 6)?;
    u32::from_str_radix(digits, 16).ok().filter(|id| vxlan_name(*id) == name)
}

pub(crate) fn is_vxlan(link: &Link) -> bool {
    link.kind == KIND && vxlan_id(&link.name).is_some()
}

pub(crate) fn open() -> Result<Rtnl, NetworkError> {
    Rtnl::open().map_err(|e| NetworkError::refused("open a netlink socket", e))
}

impl Vxlan {
    /// Its name.
    pub fn name(&self) -> String {
        vxlan_name(self.id)
    }

    /// Makes the device, with its tables, as a port of the bridge. One of this name is removed first.
    ///
    /// # Errors
    /// A bridge that is not there, a kernel without VXLAN, other refusals of the kernel. Nothing of it remains then.
    pub fn make(&self) -> Result<(), NetworkError> {
        remove_vxlan(self.id)?;
        let made = self.make_device();
        if made.is_err()
            && let Err(error) = remove_vxlan(self.id)
        {
            tracing::warn!(%error, "after a VXLAN device that could not be made");
        }
        made
    }

    fn make_device(&self) -> Result<(), NetworkError> {
        let (name, mut rtnl) = (self.name(), open()?);
        let bridge = bridge(&mut rtnl, &self.bridge)?;
        let what = || format!("make {name}, a VXLAN device to {} on bridge {}", self.remote, self.bridge);
        let refused = |e: Refusal| NetworkError::Refused {
            what: what(),
            remedy: match e.errno {
                Errno::EOPNOTSUPP => "a kernel with vxlan is needed (module `vxlan`)",
                Errno::EADDRINUSE => "another program has the UDP port; choose another one for `[network] path_port`",
                _ => "",
            },
            why: e.to_string(),
        };
        let attributes = [
            LinkAttribute::IfName(name.clone()),
            // A bridge without a MAC of its own takes the lowest one of its ports.
            LinkAttribute::Address(mac()?.to_vec()),
            // That of the bridge, which would get a lower one otherwise. Longer outer packets are sent in fragments.
            LinkAttribute::Mtu(bridge.mtu),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(self.data())]),
        ];
        let made = link::message(0, attributes);
        rtnl.change(RouteNetlinkMessage::NewLink(made), NLM_F_CREATE | NLM_F_EXCL).map_err(refused)?;
        self.guard()?;
        if let Err(error) = self.drop_others() {
            // A kernel without the family inet. The device takes what comes, as VXLAN does anywhere.
            tracing::warn!(%error, device = name, "packets of the VXLAN from other nodes are not dropped");
        }
        // Addresses of its own would be asked for on the other node.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        let mut attach = || -> Result<(), Refusal> {
            let own = link::by_name(&mut rtnl, &name)?.ok_or_else(|| Refusal::nonsense("it is gone"))?;
            let port = link::message(own.index, [LinkAttribute::Controller(bridge.index)]);
            rtnl.change(RouteNetlinkMessage::SetLink(port), 0)?;
            let isolated = LinkAttribute::LinkInfo(vec![
                LinkInfo::PortKind(InfoPortKind::Bridge),
                LinkInfo::PortData(InfoPortData::BridgePort(vec![InfoBridgePort::Isolated(true)])),
            ]);
            rtnl.change(RouteNetlinkMessage::NewLink(link::message(own.index, [isolated])), 0)?;
            link::set_up(&mut rtnl, own.index)
        };
        attach().map_err(refused)
    }

    fn data(&self) -> InfoData {
        let local = match self.local {
            IpAddr::V4(address) => InfoVxlan::Local(address),
            IpAddr::V6(address) => InfoVxlan::Local6(address),
        };
        let remote = match self.remote {
            IpAddr::V4(address) => InfoVxlan::Group(address),
            IpAddr::V6(address) => InfoVxlan::Group6(address),
        };
        InfoData::Vxlan(vec![
            InfoVxlan::Id(self.id),
            remote,
            local,
            InfoVxlan::Port(self.port),
            // There is one remote.
            InfoVxlan::Learning(false),
        ])
    }

    /// Replaces the filter of what crosses the device.
    fn guard(&self) -> Result<(), NetworkError> {
        self.filter(|batch| batch.guard_segment(&self.name(), &self.guarded))
    }

    /// Replaces the filter of what comes into the device.
    fn drop_others(&self) -> Result<(), NetworkError> {
        self.filter(|batch| batch.drop_vxlan_of_others(&self.name(), self.id, self.port, self.remote))
    }

    fn filter(&self, fill: impl FnOnce(&mut Batch)) -> Result<(), NetworkError> {
        let refused = |e: Refusal| NetworkError::refused(format!("make the filter of {}", self.name()), e);
        Nftables::open().map_err(Refusal::from).and_then(|mut nftables| nftables.transact(fill)).map_err(refused)
    }

    /// Compares the kernel's device and filters with this.
    ///
    /// # Errors
    /// The kernel's refusals.
    pub fn state(&self) -> Result<VxlanState, NetworkError> {
        if !self.is_there()? {
            return Ok(VxlanState::Missing);
        }
        Ok(if self.unfiltered()?.is_empty() { VxlanState::Whole } else { VxlanState::Unfiltered })
    }

    /// Makes again what the kernel lacks of the device and its filters; what it had lacked. The device itself stays where only a filter is made.
    ///
    /// # Errors
    /// As of [`Self::make`].
    pub fn ensure(&self) -> Result<VxlanState, NetworkError> {
        if !self.is_there()? {
            self.make()?;
            return Ok(VxlanState::Missing);
        }
        let mut lacked = VxlanState::Whole;
        for family in self.unfiltered()? {
            let made = if family == NFPROTO_NETDEV { self.guard() } else { self.drop_others() };
            match made {
                Ok(()) => lacked = VxlanState::Unfiltered,
                Err(error) if family == NFPROTO_NETDEV => return Err(error),
                Err(error) => tracing::debug!(%error, device = self.name(), "a kernel without the family inet"),
            }
        }
        Ok(lacked)
    }

    /// Whether the device is there as it is made: its addresses, up, and an isolated port of its bridge.
    fn is_there(&self) -> Result<bool, NetworkError> {
        let mut rtnl = open()?;
        let mut look = || -> Result<bool, Refusal> {
            let Some(bridge) = link::by_name(&mut rtnl, &self.bridge)? else { return Ok(false) };
            let question = link::message(0, [LinkAttribute::IfName(self.name())]);
            let message = match rtnl.get(RouteNetlinkMessage::GetLink(question)) {
                Ok(RouteNetlinkMessage::NewLink(message)) => message,
                Ok(_) => return Err(Refusal::nonsense("an answer that is no link")),
                Err(e) if e.errno == Errno::ENODEV => return Ok(false),
                Err(e) => return Err(e),
            };
            let own = Link::read(&message);
            Ok(own.kind == KIND && own.up && own.controller == Some(bridge.index) && self.fits(&message))
        };
        look().map_err(|e| NetworkError::refused(format!("look for {}", self.name()), e))
    }

    /// Whether the kernel's device has these addresses, and is isolated.
    fn fits(&self, message: &LinkMessage) -> bool {
        let InfoData::Vxlan(wanted) = self.data() else { return false };
        let (mut found, mut isolated) = (Vec::new(), false);
        for info in message.attributes.iter().filter_map(infos).flatten() {
            match info {
                LinkInfo::Data(InfoData::Vxlan(all)) => found.extend(all),
                LinkInfo::PortData(InfoPortData::BridgePort(port)) => {
                    isolated = port.contains(&InfoBridgePort::Isolated(true));
                }
                _ => {}
            }
        }
        isolated && wanted.iter().all(|one| found.contains(&one))
    }

    /// The families in which the filter is not as it is made.
    fn unfiltered(&self) -> Result<Vec<u8>, NetworkError> {
        let name = self.name();
        let mut wanted = Batch::new(0);
        wanted.guard_segment(&name, &self.guarded);
        let crossing = wanted.rules();
        let mut wanted = Batch::new(0);
        wanted.drop_vxlan_of_others(&name, self.id, self.port, self.remote);
        let [first, second] = OF_SEGMENT;
        let look = || -> Result<Vec<u8>, Refusal> {
            let mut nftables = Nftables::open()?;
            let mut differs = Vec::new();
            for (family, rules) in [(first, crossing), (second, wanted.rules())] {
                if nftables.rules(family, &name)? != rules {
                    differs.push(family);
                }
            }
            Ok(differs)
        };
        look().map_err(|e| NetworkError::refused(format!("read the filter of {name}"), e))
    }
}

/// How the kernel's device and filters compare with a [`Vxlan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VxlanState {
    /// Nothing is lacking.
    Whole,
    /// A filter is not there, or is another one.
    Unfiltered,
    /// The device is not there, or is another one.
    Missing,
}

pub(crate) fn infos(attribute: &LinkAttribute) -> Option<&Vec<LinkInfo>> {
    match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    }
}

/// One that is higher than those of other ports, also of those that moves have made.
fn mac() -> Result<[u8; 6], NetworkError> {
    let mut random = [0u8; 3];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    read.map_err(|e| NetworkError::refused("read /dev/urandom", e))?;
    let [a, b, c] = random;
    Ok([0xfe, 0xff, 0xff, a, b, c])
}

/// Removes a device and its tables. What is not there is no error; what has its name and is no VXLAN device is left
/// alone.
///
/// # Errors
/// The kernel's refusals.
pub fn remove_vxlan(id: u32) -> Result<(), NetworkError> {
    let (name, mut rtnl) = (vxlan_name(id), open()?);
    let mut remove = || -> Result<(), Refusal> {
        let Some(own) = link::by_name(&mut rtnl, &name)?.filter(is_vxlan) else { return Ok(()) };
        match rtnl.change(RouteNetlinkMessage::DelLink(link::message(own.index, [])), 0) {
            Err(e) if e.errno != Errno::ENODEV => Err(e),
            _ => Ok(()),
        }
    };
    remove().map_err(|e| NetworkError::refused(format!("remove {name}"), e))?;
    let refused = |e: Refusal| NetworkError::refused(format!("remove the filter of {name}"), e);
    let mut nftables =
        Nftables::open().map_err(|e| NetworkError::refused(format!("remove the filter of {name}"), e))?;
    for family in OF_SEGMENT {
        match nftables.transact(|batch| batch.delete_table_of(family, &name)) {
            Err(e) if ![Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT].contains(&e.errno) => {
                return Err(refused(e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The numbers of all devices of this kind that there are.
///
/// # Errors
/// The kernel's refusals.
pub fn vxlans() -> Result<Vec<u32>, NetworkError> {
    let links = link::links(&mut open()?).map_err(|e| NetworkError::refused("list the interfaces", e))?;
    Ok(links.iter().filter(|link| is_vxlan(link)).filter_map(|link| vxlan_id(&link.name)).collect())
}

/// Makes a VXLAN device in a network namespace that nobody sees, to tell whether the kernel has them.
///
/// # Errors
/// The kernel's refusal, with the remedy.
pub fn try_vxlan() -> Result<(), NetworkError> {
    namespace::in_a_new_one(|| {
        let data = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(vec![InfoVxlan::Id(1)]))];
        let name = LinkAttribute::IfName(vxlan_name(1));
        let made = link::message(0, [name, LinkAttribute::LinkInfo(data)]);
        open()?.change(RouteNetlinkMessage::NewLink(made), NLM_F_CREATE | NLM_F_EXCL).map_err(|e| {
            NetworkError::Refused {
                what: "make a VXLAN device".to_owned(),
                why: e.to_string(),
                remedy: "a kernel with vxlan is needed (module `vxlan`)",
            }
        })
    })
}

fn bridge(rtnl: &mut Rtnl, name: &str) -> Result<Link, NetworkError> {
    let found = link::by_name(rtnl, name).map_err(|e| NetworkError::refused(format!("look for bridge {name}"), e))?;
    found.filter(|link| link.kind == "bridge").ok_or_else(|| {
        NetworkError::refused(format!("look for bridge {name}"), "there is no bridge of that name".to_owned())
    })
}

/// Whether an address is one of the node's own.
///
/// # Errors
/// The kernel's refusals.
pub fn is_own_address(address: IpAddr) -> Result<bool, NetworkError> {
    let all = link::addresses(&mut open()?).map_err(|e| NetworkError::refused("list the node's addresses", e))?;
    Ok(all.iter().any(|(_, own, _)| *own == address))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::bridges;

    #[test]
    fn names_are_told_from_those_of_others() {
        assert_eq!(vxlan_name(0x1a2b3), "tship-01a2b3");
        assert_eq!(vxlan_id("tship-01a2b3"), Some(0x1a2b3));
        for other in ["tship-1a2b3", "tship-+1a2b3", "tship-01A2B3", "vxlan0", "tship-01a2b3c", "tship-é1"] {
            assert_eq!(vxlan_id(other), None, "{other}");
        }
    }

    fn ip(words: &str) {
        assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "ip {words}");
    }

    fn shown(program: &str, words: &str) -> String {
        String::from_utf8(Command::new(program).args(words.split(' ')).output().unwrap().stdout).unwrap()
    }

    #[test]
    fn a_device_is_an_isolated_port_and_goes_with_all_that_belongs_to_it() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return;
        }
        if let Err(error) = try_vxlan() {
            eprintln!("skipped: {error}");
            return;
        }
        let played = namespace::in_a_new_one(|| {
            for words in [
                "link set lo up",
                "link add br7 type bridge",
                "addr add 10.7.0.1/24 dev br7",
                "link set br7 up",
                "link add port7 address fe:70:00:00:00:01 type veth peer name end7",
                "link set port7 master br7",
            ] {
                ip(words);
            }
            let mac = || shown("ip", "-o link show br7").split("link/ether").nth(1).unwrap().to_owned();
            let before = mac();
            let own = on_br7();
            assert_eq!(own.state()?, VxlanState::Missing);
            own.make()?;
            own.make()?;
            assert_eq!((own.state()?, vxlans()?), (VxlanState::Whole, vec![7]));
            let link = shown("ip", "-d link show tship-000007");
            for word in ["mtu 1500", "master br7", "isolated on", "id 7 remote 127.0.0.2 local 127.0.0.1", "nolearning"]
            {
                assert!(link.contains(word), "{word:?} is not in {link}");
            }
            assert_eq!(mac(), before, "the bridge has another MAC");
            let found = bridges()?;
            assert!(
                found[0].ports == [("port7".to_owned(), false)] && found[0].has_subnet_of("10.7.0.9".parse().unwrap()),
                "{found:?}"
            );
            assert!(!crate::leads_beyond_node("br7", None)?, "it counts as a way out");
            assert!(is_own_address("10.7.0.1".parse().unwrap())? && !is_own_address("10.7.0.2".parse().unwrap())?);
            remove_vxlan(7)?;
            remove_vxlan(7)?;
            assert!(vxlans()?.is_empty() && own.state()? == VxlanState::Missing);
            let mut nftables = Nftables::open().unwrap();
            assert!(!nftables.has_chains("tship-000007").unwrap(), "its filter is there");
            let lost = Vxlan { bridge: "br8".to_owned(), ..own };
            assert!(lost.make().unwrap_err().to_string().contains("br8") && vxlans()?.is_empty());
            Ok(())
        });
        played.unwrap();
    }

    fn on_br7() -> Vxlan {
        Vxlan {
            id: 7,
            port: 7077,
            local: "127.0.0.1".parse().unwrap(),
            remote: "127.0.0.2".parse().unwrap(),
            bridge: "br7".to_owned(),
            guarded: vec!["10.7.0.1".parse().unwrap(), "fd07::1".parse().unwrap()],
        }
    }

    #[test]
    fn what_the_kernel_has_lost_of_a_device_is_made_again() {
        if !nix::unistd::geteuid().is_root() || try_vxlan().is_err() {
            eprintln!("skipped: network namespaces and VXLAN need root and a kernel with vxlan");
            return;
        }
        let nft = |words: &str| {
            assert!(Command::new("nft").args(words.split(' ')).status().unwrap().success(), "nft {words}");
        };
        let index = || shown("ip", "-o link show tship-000007").split(':').next().map(str::to_owned);
        let played = namespace::in_a_new_one(|| {
            ["link set lo up", "link add br7 type bridge", "link set br7 up"].iter().for_each(|words| ip(words));
            let mut own = on_br7();
            let check = |own: &Vxlan, lacks: VxlanState| -> Result<(), NetworkError> {
                assert_eq!((own.state()?, own.ensure()?), (lacks, lacks));
                assert_eq!((own.state()?, own.ensure()?), (VxlanState::Whole, VxlanState::Whole));
                Ok(())
            };
            check(&own, VxlanState::Missing)?;
            let first = shown("ip", "-o link show tship-000007");
            for words in [
                "flush ruleset",
                "flush table netdev tship-000007",
                "flush chain netdev tship-000007 egress",
                "delete table inet tship-000007",
                "add rule inet tship-000007 input accept",
            ] {
                nft(words);
                check(&own, VxlanState::Unfiltered)?;
            }
            own.guarded = vec!["10.7.0.2".parse().unwrap(), "fd07::1".parse().unwrap()];
            check(&own, VxlanState::Unfiltered)?;
            own.guarded.clear();
            check(&own, VxlanState::Unfiltered)?;
            assert_eq!(shown("ip", "-o link show tship-000007"), first, "a filter has cost the device");
            for words in [
                "link set tship-000007 down",
                "link set tship-000007 nomaster",
                "link set tship-000007 type bridge_slave isolated off",
                "link set tship-000007 type vxlan remote 127.0.0.3",
                "link delete tship-000007",
            ] {
                ip(words);
                check(&own, VxlanState::Missing)?;
            }
            let before = index();
            own.port = 7078;
            check(&own, VxlanState::Missing)?;
            own.remote = "127.0.0.3".parse().unwrap();
            check(&own, VxlanState::Missing)?;
            assert_ne!(index(), before);
            remove_vxlan(7)
        });
        played.unwrap();
    }
}
