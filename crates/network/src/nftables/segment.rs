//! What crosses a VXLAN device between two bridges, and what comes into it.

use std::net::IpAddr;

use tranship_sys::packet::{IPV6, IPV6_PROTOCOL_AT};

use super::{
    ACCEPT, Batch, COMPARE_DATA, COMPARE_EQUAL, COMPARE_UNEQUAL, DATA_VALUE, DELTABLE, DROP, EXPRESSION_DATA,
    EXPRESSION_NAME, GETRULE, META_L4PROTO, META_PROTOCOL, NEWRULE, NEWTABLE, NFPROTO_NETDEV, Nftables, PAYLOAD_LINK,
    PAYLOAD_TRANSPORT, RULE_CHAIN, RULE_EXPRESSIONS, RULE_TABLE, TABLE_NAME, UDP, compare, expression, meta, payload,
    text,
};
use crate::hold::{ICMP6, ICMP6_TYPE_AT};
use crate::nfnetlink::{self, GENERAL, NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, string};
use crate::reply::{Attributes, Message, Messages, Refusal, value};

const NFPROTO_INET: u8 = 1;
/// The families in which a device has a table of its name.
pub(crate) const OF_SEGMENT: [u8; 2] = [NFPROTO_NETDEV, NFPROTO_INET];

const META_NFPROTO: u32 = 15;
const PAYLOAD_NETWORK: u32 = 1;
const ARP: u16 = 0x0806;
/// Before whatever the node has of its own.
const PRIORITY: i32 = -1000;

/// Where a frame of ARP over Ethernet has the sender's address, and the target's (RFC 826).
const ARP_ADDRESSES: [u32; 2] = [14 + 14, 14 + 24];
/// Where a packet of IPv6 has its source, and neighbour discovery the address that it is about (RFC 4861, section 4).
const DISCOVERY_ADDRESSES: [u32; 2] = [14 + 8, 14 + 40 + 8];
/// Solicitation and advertisement of a neighbour.
const NEIGHBOUR: [u8; 2] = [135, 136];
/// Solicitation and advertisement of a router, and redirect.
const ROUTER: [u8; 3] = [133, 134, 137];

impl Batch {
    /// Replaces the table of a device's name, which drops, in both directions, ARP and neighbour discovery for these
    /// addresses, and router discovery. Without addresses there is no table.
    pub(crate) fn guard_segment(&mut self, device: &str, guarded: &[IpAddr]) {
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        self.remove_table_of(NFPROTO_NETDEV, device);
        if guarded.is_empty() {
            return;
        }
        self.message(NEWTABLE, flags, NFPROTO_NETDEV, 0, |b| string(b, TABLE_NAME, device));
        for (chain, hook) in [("ingress", 0), ("egress", 1)] {
            self.base_chain(flags, NFPROTO_NETDEV, (device, chain), (hook, PRIORITY, Some(device)), ACCEPT);
            let place = (NFPROTO_NETDEV, device, chain);
            guarded.iter().for_each(|address| self.drop_questions(place, *address));
            // Where one bridge alone has routers, they are those of both.
            ROUTER.into_iter().for_each(|kind| self.rule_of(place, DROP, |b| discovery(b, kind)));
        }
    }

    /// Drops ARP or neighbour discovery for an address.
    fn drop_questions(&mut self, place: (u8, &str, &str), address: IpAddr) {
        match address {
            IpAddr::V4(address) => {
                for at in ARP_ADDRESSES {
                    self.rule_of(place, DROP, |b| {
                        meta(b, META_PROTOCOL, &ARP.to_be_bytes());
                        is(b, PAYLOAD_LINK, at, &address.octets());
                    });
                }
            }
            IpAddr::V6(address) => {
                for (kind, at) in NEIGHBOUR.into_iter().flat_map(|kind| DISCOVERY_ADDRESSES.map(|at| (kind, at))) {
                    self.rule_of(place, DROP, |b| {
                        discovery(b, kind);
                        is(b, PAYLOAD_LINK, at, &address.octets());
                    });
                }
            }
        }
    }

    /// Replaces the node's table of a device's name, which drops packets of this VXLAN which do not come from its remote.
    pub(crate) fn drop_vxlan_of_others(&mut self, device: &str, id: u32, port: u16, remote: IpAddr) {
        const LOCAL_IN: u32 = 1;
        // From the beginning of UDP's header: its target port, and the VXLAN's number (RFC 7348, section 5).
        const PORT_AT: u32 = 2;
        const NUMBER_AT: u32 = 8 + 4;
        // The families of IP have the numbers of their sockets' families.
        const V4: u8 = 2;
        const V6: u8 = 10;
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        self.remove_table_of(NFPROTO_INET, device);
        self.message(NEWTABLE, flags, NFPROTO_INET, 0, |b| string(b, TABLE_NAME, device));
        self.base_chain(flags, NFPROTO_INET, (device, "input"), (LOCAL_IN, PRIORITY, None), ACCEPT);
        for family in [V4, V6] {
            self.rule_of((NFPROTO_INET, device, "input"), DROP, |b| {
                meta(b, META_NFPROTO, &[family]);
                meta(b, META_L4PROTO, &[UDP]);
                is(b, PAYLOAD_TRANSPORT, PORT_AT, &port.to_be_bytes());
                is(b, PAYLOAD_TRANSPORT, NUMBER_AT, &id.to_be_bytes()[1..]);
                match remote {
                    IpAddr::V4(remote) if family == V4 => is_not_from(b, 12, &remote.octets()),
                    IpAddr::V6(remote) if family == V6 => is_not_from(b, 8, &remote.octets()),
                    _ => {}
                }
            });
        }
    }

    /// Deletes a table of this family, also where it is not there.
    fn remove_table_of(&mut self, family: u8, table: &str) {
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        // One that is not there cannot be deleted.
        self.message(NEWTABLE, flags, family, 0, |b| string(b, TABLE_NAME, table));
        self.delete_table_of(family, table);
    }

    /// The rules that it adds.
    pub(crate) fn rules(&self) -> Vec<Rule> {
        let new = |m: &Message| m.kind == NEWRULE;
        Messages(&self.bytes).filter(new).filter_map(|m| Rule::read(m.payload.get(GENERAL..)?)).collect()
    }

    /// Deletes a table of this family.
    pub(crate) fn delete_table_of(&mut self, family: u8, table: &str) {
        self.message(DELTABLE, NLM_F_REQUEST | NLM_F_ACK, family, 0, |b| string(b, TABLE_NAME, table));
    }
}

/// A rule, as far as rules of these tables differ from each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    table: String,
    chain: String,
    /// The values that its expressions compare with.
    compared: Vec<Vec<u8>>,
}

impl Rule {
    /// Reads one from its attributes, as they are sent to the kernel and as the kernel lists them.
    fn read(attributes: &[u8]) -> Option<Self> {
        let compared = |expression: &[u8]| {
            let comparison =
                value(expression, EXPRESSION_DATA).filter(|_| text(expression, EXPRESSION_NAME) == Some("cmp"))?;
            Some(value(value(comparison, COMPARE_DATA)?, DATA_VALUE)?.to_vec())
        };
        let expressions = Attributes(value(attributes, RULE_EXPRESSIONS)?);
        Some(Self {
            table: text(attributes, RULE_TABLE)?.to_owned(),
            chain: text(attributes, RULE_CHAIN)?.to_owned(),
            compared: expressions.filter_map(|(_, expression)| compared(expression)).collect(),
        })
    }
}

impl Nftables {
    /// The rules of a table of this family; none where there is no such table.
    pub(crate) fn rules(&mut self, family: u8, table: &str) -> Result<Vec<Rule>, Refusal> {
        let listed =
            nfnetlink::list(&self.socket, &mut self.sequence, GETRULE, family, |b| string(b, RULE_TABLE, table))?;
        self.sequence += 1;
        let of_table = |rule: &Rule| rule.table == table;
        let rules = listed.iter().filter(|one| one.kind == NEWRULE && one.family == family);
        Ok(rules.filter_map(|one| Rule::read(&one.attributes)).filter(of_table).collect())
    }
}

/// That bytes of a header are these.
fn is(b: &mut Vec<u8>, header: u32, at: u32, bytes: &[u8]) {
    payload(b, header, at, bytes.len() as u32);
    expression(b, "cmp", |b| compare(b, COMPARE_EQUAL, bytes));
}

/// That a packet's source address, which is at this place, is not this one.
fn is_not_from(b: &mut Vec<u8>, at: u32, address: &[u8]) {
    payload(b, PAYLOAD_NETWORK, at, address.len() as u32);
    expression(b, "cmp", |b| compare(b, COMPARE_UNEQUAL, address));
}

/// That a packet is neighbour discovery's of this type.
fn discovery(b: &mut Vec<u8>, kind: u8) {
    meta(b, META_PROTOCOL, &IPV6.to_be_bytes());
    is(b, PAYLOAD_LINK, IPV6_PROTOCOL_AT as u32, &[ICMP6]);
    is(b, PAYLOAD_LINK, ICMP6_TYPE_AT as u32, &[kind]);
}
