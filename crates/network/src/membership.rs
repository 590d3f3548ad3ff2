//! Membership reports: a switch that listens to IGMP and MLD (RFC 4541) sends a group's datagrams only where it has heard one from.
//!
//! The kernel sends its own when a socket joins a group, which a restored one does behind the closed gate, and once more at a time
//! within a second that it draws.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::announce::{ethernet, fold, group_mac, icmp_checksum};
use crate::multicast::Group;

/// Where reports of version 3 (IGMP) and 2 (MLD) go: all routers, and switches, that know of it.
const ALL_ROUTERS_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 22);
const ALL_ROUTERS_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// Types of records: all sources are wanted from now on, and these are wanted besides.
const CHANGE_TO_EXCLUDE: u8 = 4;
const ALLOW_NEW_SOURCES: u8 = 5;
const IGMP_V2_REPORT: u8 = 0x16;
const IGMP_V3_REPORT: u8 = 0x22;
const MLD_V1_REPORT: u8 = 131;
const MLD_V2_REPORT: u8 = 143;
/// Sources in one report, which fits into any MTU that IPv6 allows.
const SOURCES: usize = 64;

/// The addresses that an interface reports from.
pub(crate) struct Reporter {
    pub mac: [u8; 6],
    pub v4: Ipv4Addr,
    /// Of the link.
    pub v6: Ipv6Addr,
}

impl Reporter {
    /// The frames that make it known that `joined` is heard here. A group that is heard from all sources is reported in both versions, since
    /// the querier may be one of the older (RFC 3376, section 7; RFC 3810, section 8).
    pub(crate) fn reports(&self, joined: &Group) -> Vec<Vec<u8>> {
        match (joined.group, joined.sources()) {
            (group, _) if !is_reported(group) => Vec::new(),
            (group, Some(sources)) => {
                sources.chunks(SOURCES).map(|some| self.current(group, ALLOW_NEW_SOURCES, some)).collect()
            }
            (group, None) => vec![self.current(group, CHANGE_TO_EXCLUDE, &[]), self.older(group)],
        }
    }

    /// A report of one group, as IGMPv3 (RFC 3376, section 4.2) and MLDv2 (RFC 3810, section 5.2) have it.
    fn current(&self, group: IpAddr, record: u8, sources: &[IpAddr]) -> Vec<u8> {
        let mut body = vec![0, 0, 0, 1, record, 0];
        body.extend_from_slice(&(sources.len() as u16).to_be_bytes());
        [group].iter().chain(sources).for_each(|address| append(&mut body, *address));
        match group {
            IpAddr::V4(_) => self.igmp(ALL_ROUTERS_V4, IGMP_V3_REPORT, &body),
            IpAddr::V6(_) => self.mld(ALL_ROUTERS_V6, MLD_V2_REPORT, &body),
        }
    }

    /// The same in IGMPv2 (RFC 2236) and MLDv1 (RFC 2710): it goes to the group.
    fn older(&self, group: IpAddr) -> Vec<u8> {
        match group {
            IpAddr::V4(group) => self.igmp(group, IGMP_V2_REPORT, &group.octets()),
            IpAddr::V6(group) => self.mld(group, MLD_V1_REPORT, &[&[0; 4][..], &group.octets()].concat()),
        }
    }

    /// A message of IGMP; `body` is what follows its checksum.
    fn igmp(&self, to: Ipv4Addr, kind: u8, body: &[u8]) -> Vec<u8> {
        let mut message = [&[kind, 0, 0, 0], body].concat();
        let sum = !fold(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        // 24 bytes of header, of which four are the option "router alert"; internetwork control; one hop; protocol 2.
        let mut header = vec![0x46, 0xc0];
        header.extend_from_slice(&(24 + message.len() as u16).to_be_bytes());
        header.extend_from_slice(&[0, 0, 0x40, 0, 1, 2, 0, 0]);
        header.extend_from_slice(&self.v4.octets());
        header.extend_from_slice(&to.octets());
        header.extend_from_slice(&[0x94, 4, 0, 0]);
        let sum = !fold(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        let frame = ethernet(group_mac(to.into()), self.mac, 0x0800);
        let mut frame = [frame, header, message].concat();
        frame.resize(frame.len().max(60), 0);
        frame
    }

    /// A message of ICMPv6 as MLD sends them; `body` is what follows its checksum.
    fn mld(&self, to: Ipv6Addr, kind: u8, body: &[u8]) -> Vec<u8> {
        let mut message = [&[kind, 0, 0, 0], body].concat();
        let sum = icmp_checksum(self.v6, to, &message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = ethernet(group_mac(to.into()), self.mac, 0x86dd);
        frame.extend_from_slice(&[0x60, 0, 0, 0]);
        frame.extend_from_slice(&(8 + message.len() as u16).to_be_bytes());
        // Next come the options for every hop; one hop.
        frame.extend_from_slice(&[0, 1]);
        frame.extend_from_slice(&self.v6.octets());
        frame.extend_from_slice(&to.octets());
        // Next comes ICMPv6; router alert: MLD; padding.
        frame.extend_from_slice(&[58, 0, 5, 2, 0, 0, 1, 0]);
        frame.extend_from_slice(&message);
        frame
    }
}

fn append(bytes: &mut Vec<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => bytes.extend_from_slice(&v4.octets()),
        IpAddr::V6(v6) => bytes.extend_from_slice(&v6.octets()),
    }
}

/// Nobody reports the groups of all nodes, nor those that do not leave the node.
fn is_reported(group: IpAddr) -> bool {
    match group {
        IpAddr::V4(group) => group != Ipv4Addr::new(224, 0, 0, 1),
        IpAddr::V6(group) => group.octets()[1] & 0xf >= 2 && group != Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_carry_checksums_that_receivers_accept() {
        let reporter =
            Reporter { mac: [2, 0, 0, 0, 0, 9], v4: Ipv4Addr::new(10, 0, 0, 9), v6: "fe80::9".parse().unwrap() };
        let sources = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
        let v4 = "239.129.2.3".parse().unwrap();
        for frame in [reporter.current(v4, ALLOW_NEW_SOURCES, &sources), reporter.older(v4)] {
            let length = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
            assert_eq!((fold(&frame[14..38]), fold(&frame[38..14 + length])), (0xffff, 0xffff));
            assert!(frame.len() >= 60);
        }
        assert_eq!(reporter.older(v4)[..6], [1, 0, 0x5e, 1, 2, 3]);
        let v6: Ipv6Addr = "ff05::1:3".parse().unwrap();
        for (frame, to) in
            [(reporter.current(v6.into(), CHANGE_TO_EXCLUDE, &[]), ALL_ROUTERS_V6), (reporter.older(v6.into()), v6)]
        {
            assert!(matches!(icmp_checksum(reporter.v6, to, &frame[62..]), 0 | 0xffff));
            assert_eq!(usize::from(u16::from_be_bytes([frame[18], frame[19]])), frame.len() - 54);
        }
        assert_eq!(reporter.older(v6.into())[..6], [0x33, 0x33, 0, 1, 0, 3]);
    }

    #[test]
    fn what_is_everybodys_is_not_reported() {
        for (group, reported) in [
            ("224.0.0.1", false),
            ("224.0.0.251", true),
            ("ff02::1", false),
            ("ff01::77", false),
            ("ff02::1:ff00:9", true),
        ] {
            assert_eq!(is_reported(group.parse().unwrap()), reported, "{group}");
        }
    }
}
