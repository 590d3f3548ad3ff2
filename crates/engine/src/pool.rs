//! Address pools of engines' networks: subnets, and the part of one from which a node gives out addresses.
//!
//! Engines give out addresses per node. A network that a node makes because a container moves to it gets an address
//! range of its own, so that the addresses that two nodes give out on one segment do not meet:
//!
//! ```text
//!  10.1.0.0/24   │ gateway, addresses of the node where the network was made first  …  │ node b │ … │ node c │
//!                0                                                                    128   parts of 16   256
//! ```

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::ifaddrs::getifaddrs;

/// The drivers whose networks are a node's own.
pub(crate) const DRIVERS: [&str; 3] = ["bridge", "macvlan", "ipvlan"];

/// Bits of a part's number: a subnet has this many at most, as powers of two.
const PART_BITS: u8 = 4;
/// Bits of an address within the smallest part.
const SMALLEST_PART: u8 = 3;

/// A subnet, or a range in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subnet {
    /// Its first address.
    first: u128,
    /// The prefix length.
    length: u8,
    /// Bits of an address: 32 or 128.
    width: u8,
}

fn number(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)), 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    }
}

impl Subnet {
    /// Reads `ADDRESS/LENGTH`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, length) = text.split_once('/')?;
        let ((address, width), length) = (number(address.parse().ok()?), length.parse().ok()?);
        let mut subnet = Self { first: 0, length, width };
        subnet.first = if length <= width { address & !subnet.host_mask() } else { return None };
        Some(subnet)
    }

    /// The range of one address.
    pub fn of_one(address: IpAddr) -> Self {
        let (first, width) = number(address);
        Self { first, length: width, width }
    }

    /// The bits that tell its addresses apart.
    fn host_mask(&self) -> u128 {
        u128::MAX.checked_shr(128 - u32::from(self.width - self.length)).unwrap_or(0)
    }

    fn address(&self, number: u128) -> IpAddr {
        match u32::try_from(number) {
            Ok(number) if self.width == 32 => Ipv4Addr::from(number).into(),
            _ => Ipv6Addr::from(number).into(),
        }
    }

    /// The first address that a host can have, which engines give to the gateway.
    pub fn first_host(&self) -> IpAddr {
        self.address(self.first | (1 & self.host_mask()))
    }

    /// Whether the address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (address, width) = number(address);
        width == self.width && address & !self.host_mask() == self.first
    }

    /// Whether an address is in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let mask = self.host_mask() | other.host_mask();
        self.width == other.width && self.first & !mask == other.first & !mask
    }

    /// The range in which a node of this name gives out addresses: one of the parts of the upper half, by a hash of the
    /// name, without the `fixed` addresses and, where another part is left, apart from the `others`' ranges. `None` for
    /// a subnet that is too small for parts.
    pub fn range_of(&self, node: &str, fixed: &[IpAddr], others: &[Self]) -> Option<Self> {
        let bits = PART_BITS.min((self.width - self.length).checked_sub(SMALLEST_PART)?);
        let upper = 1_u128 << bits.checked_sub(1)?;
        let shift = self.width - self.length - bits;
        let parts = (0..upper).map(|next| {
            let part = upper + (u128::from(hash(node)) + next) % upper;
            Self { first: self.first | (part << shift), length: self.length + bits, width: self.width }
        });
        let free: Vec<Self> = parts.filter(|part| !fixed.iter().any(|address| part.contains(*address))).collect();
        free.iter().find(|part| !others.iter().any(|other| part.overlaps(other))).or(free.first()).copied()
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(self.first), self.length)
    }
}

/// FNV-1a: the same on every node and in every version.
pub(crate) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// This node's host name.
pub(crate) fn host_name() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The subnets of the node's own interfaces, with their names.
pub(crate) fn subnets_of_node() -> Vec<(String, Subnet)> {
    let addresses = getifaddrs().into_iter().flatten().filter_map(|one| {
        let (address, mask) = (one.address?, one.netmask?);
        let (address, length) = match (address.as_sockaddr_in(), mask.as_sockaddr_in()) {
            (Some(address), Some(mask)) => (IpAddr::from(address.ip()), u32::from(mask.ip()).count_ones()),
            _ => (address.as_sockaddr_in6()?.ip().into(), u128::from(mask.as_sockaddr_in6()?.ip()).count_ones()),
        };
        Some((one.interface_name, Subnet::parse(&format!("{address}/{length}"))?))
    });
    addresses.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        Subnet::parse(text).unwrap()
    }

    #[test]
    fn subnets_are_read_and_compared() {
        assert_eq!(subnet("10.1.2.3/24").to_string(), "10.1.2.0/24");
        assert_eq!(subnet("fd00::1/64").to_string(), "fd00::/64");
        assert_eq!(subnet("fd00::/64").first_host().to_string(), "fd00::1");
        assert!(subnet("10.0.0.0/8").overlaps(&subnet("10.9.0.0/16")));
        assert!(
            subnet("10.9.0.0/16").overlaps(&subnet("10.0.0.0/8"))
                && subnet("0.0.0.0/0").overlaps(&subnet("1.1.1.1/32"))
        );
        assert!(
            !subnet("10.8.0.0/16").overlaps(&subnet("10.9.0.0/16")) && !subnet("::/0").overlaps(&subnet("0.0.0.0/0"))
        );
        assert!(subnet("10.1.0.0/24").contains("10.1.0.255".parse().unwrap()));
        assert!(["", "10.1.0.0", "10.1.0.0/33", "x/8", "::/129"].iter().all(|text| Subnet::parse(text).is_none()));
    }

    #[test]
    fn nodes_give_out_addresses_in_parts_of_the_upper_half() {
        let whole = subnet("172.18.0.0/16");
        let range = |node: &str| whole.range_of(node, &[], &[]).unwrap();
        assert_eq!((range("b"), range("b").length), (range("b"), 20));
        let different: std::collections::HashSet<String> =
            ["a", "b", "c", "d"].iter().map(|node| range(node).to_string()).collect();
        assert!(different.len() > 2, "{different:?}");
        assert!(different.iter().all(|range| subnet("172.18.128.0/17").overlaps(&subnet(range))), "{different:?}");
        assert!(subnet("fd00::8000:0:0:0/65").overlaps(&subnet("fd00::/64").range_of("b", &[], &[]).unwrap()));
    }

    #[test]
    fn a_range_keeps_off_fixed_addresses_and_other_ranges() {
        let whole = subnet("10.1.0.0/24");
        let usual = whole.range_of("b", &[], &[]).unwrap();
        assert_eq!(usual.length, 28);
        let besides = whole.range_of("b", &[usual.first_host()], &[]).unwrap();
        assert!(!besides.overlaps(&usual) && subnet("10.1.0.128/25").overlaps(&besides));
        assert!(!whole.range_of("b", &[], &[usual]).unwrap().overlaps(&usual));
        assert_eq!(whole.range_of("b", &[], &[whole]), Some(usual), "another node gives out all of them");
    }

    #[test]
    fn a_small_subnet_has_fewer_parts_or_none() {
        assert_eq!(subnet("10.1.0.0/28").range_of("b", &[], &[]).unwrap().to_string(), "10.1.0.8/29");
        assert_eq!(subnet("10.1.0.0/29").range_of("b", &[], &[]), None);
        assert_eq!(subnet("10.1.0.0/32").range_of("b", &[], &[]), None);
    }
}
