//! The little of nftables' netlink protocol that the gate needs: one table, base chains of the netdev family, a few rules,
//! and the transaction around them. Formats after the kernel's `include/uapi/linux/netfilter/nf_tables.h` and `nfnetlink.h`.

mod segment;

use std::io;

use netlink_sys::Socket;
use tranship_sys::packet::{IPV4, IPV4_PROTOCOL_AT, IPV6, IPV6_PROTOCOL_AT};

use crate::hold::{ICMP6, ICMP6_TYPE_AT, NEIGHBOUR_DISCOVERY};
use crate::inject::DELIVERED;
use crate::nfnetlink::{
    self, BATCH_BEGIN, BATCH_END, MSG_DONTWAIT, NESTED, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL,
    NLM_F_REQUEST, NLMSG_DONE, attribute, message, number, string,
};
use crate::reply::{HEADER, Messages, Refusal, value};

pub(crate) use segment::OF_SEGMENT;

const SUBSYSTEM: u16 = nfnetlink::NFTABLES;
const NEWTABLE: u16 = SUBSYSTEM << 8;
const DELTABLE: u16 = SUBSYSTEM << 8 | 2;
const NEWCHAIN: u16 = SUBSYSTEM << 8 | 3;
const GETCHAIN: u16 = SUBSYSTEM << 8 | 4;
const NEWRULE: u16 = SUBSYSTEM << 8 | 6;
const GETRULE: u16 = SUBSYSTEM << 8 | 7;
const DELRULE: u16 = SUBSYSTEM << 8 | 8;
pub(crate) const NFPROTO_NETDEV: u8 = 5;
/// The families whose hooks are those of a protocol, and need no device, with the hooks of what comes in and of what goes out: `inet`, which is
/// IPv4 and IPv6, and `arp`.
const OF_PROTOCOLS: [(u8, [(&str, u32); 2]); 2] =
    [(1, [("ingress", 0), ("egress", 3)]), (3, [("ingress", 0), ("egress", 1)])];

const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const HOOK_DEVICE: u16 = 3;

const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const META_REGISTER: u16 = 1;
const META_KEY: u16 = 2;
const META_PROTOCOL: u32 = 1;
const META_MARK: u32 = 3;
const META_L4PROTO: u32 = 16;
/// Marks the packets by which CRIU closes connections that it restores, in one direction or both (soccr.h, `SOCCR_MARK`).
const CRIU_MARK: u32 = 0xc114;
const COMPARE_REGISTER: u16 = 1;
const COMPARE_OPERATION: u16 = 2;
const COMPARE_DATA: u16 = 3;
const COMPARE_EQUAL: u32 = 0;
const COMPARE_UNEQUAL: u32 = 1;
const COMPARE_AT_MOST: u32 = 3;
const COMPARE_AT_LEAST: u32 = 5;
const PAYLOAD_REGISTER: u16 = 1;
const PAYLOAD_BASE: u16 = 2;
const PAYLOAD_OFFSET: u16 = 3;
const PAYLOAD_LENGTH: u16 = 4;
const PAYLOAD_LINK: u32 = 0;
const PAYLOAD_TRANSPORT: u32 = 2;
const BITWISE_SOURCE: u16 = 1;
const BITWISE_TARGET: u16 = 2;
const BITWISE_LENGTH: u16 = 3;
const BITWISE_MASK: u16 = 4;
const BITWISE_XOR: u16 = 5;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const REGISTER_VERDICT: u32 = 0;
const REGISTER: u32 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;

// What becomes of a frame: netfilter's verdicts.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;

/// A chain's place and purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nothing comes in.
    Ingress,
    /// Nothing goes out.
    Egress,
    /// What its rules name does not come in.
    Newcomers,
    /// The same, for packets that come by themselves.
    Packets,
    /// The same, for datagrams to groups.
    Groups,
    /// Nothing of TCP comes in.
    Segments,
}

impl Place {
    /// The name of the chain on `device`.
    pub(crate) fn chain(self, device: &str) -> String {
        match self {
            Place::Ingress => format!("ingress-{device}"),
            Place::Egress => format!("egress-{device}"),
            Place::Newcomers => format!("newcomers-{device}"),
            Place::Packets => format!("packets-{device}"),
            Place::Groups => format!("groups-{device}"),
            Place::Segments => format!("segments-{device}"),
        }
    }

    fn hook(self) -> u32 {
        match self {
            Place::Ingress | Place::Newcomers | Place::Packets | Place::Groups | Place::Segments => 0,
            Place::Egress => 1,
        }
    }

    /// Before whatever chains the container may have of its own.
    fn priority(self) -> i32 {
        match self {
            Place::Ingress | Place::Egress => -1000,
            Place::Newcomers | Place::Packets | Place::Groups | Place::Segments => -999,
        }
    }

    /// What becomes of a frame that no rule decides about.
    fn policy(self) -> u32 {
        match self {
            Place::Ingress | Place::Egress => DROP,
            Place::Newcomers | Place::Packets | Place::Groups | Place::Segments => ACCEPT,
        }
    }
}

/// A transaction under construction: all of it happens, or nothing.
pub(crate) struct Batch {
    bytes: Vec<u8>,
    first: u32,
    next: u32,
}

impl Batch {
    /// An empty one whose messages are numbered from `first`.
    pub(crate) fn new(first: u32) -> Self {
        let mut batch = Self { bytes: Vec::with_capacity(512), first, next: first };
        batch.message(BATCH_BEGIN, NLM_F_REQUEST, 0, SUBSYSTEM, |_| {});
        batch
    }

    /// Makes the table if it is not there.
    pub(crate) fn new_table(&mut self, table: &str) {
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        self.message(NEWTABLE, flags, NFPROTO_NETDEV, 0, |b| string(b, TABLE_NAME, table));
    }

    /// Deletes the table with everything in it.
    pub(crate) fn delete_table(&mut self, table: &str) {
        self.message(DELTABLE, NLM_F_REQUEST | NLM_F_ACK, NFPROTO_NETDEV, 0, |b| string(b, TABLE_NAME, table));
    }

    /// Makes the table in the families of protocols, with chains that drop whatever IPv4, IPv6 or ARP receives or sends, loopback included.
    pub(crate) fn drop_protocols(&mut self, table: &str) {
        for (family, hooks) in OF_PROTOCOLS {
            let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
            self.message(NEWTABLE, flags, family, 0, |b| string(b, TABLE_NAME, table));
            for (name, hook) in hooks {
                self.base_chain(flags, family, (table, name), (hook, Place::Ingress.priority(), None), DROP);
            }
        }
    }

    /// Takes [`Self::drop_protocols`] back, also where that was not done.
    pub(crate) fn pass_protocols(&mut self, table: &str) {
        for (family, _) in OF_PROTOCOLS {
            // One that is not there cannot be deleted.
            let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
            self.message(NEWTABLE, flags, family, 0, |b| string(b, TABLE_NAME, table));
            self.message(DELTABLE, NLM_F_REQUEST | NLM_F_ACK, family, 0, |b| string(b, TABLE_NAME, table));
        }
    }

    /// Makes a base chain on `device`, if it is not there.
    pub(crate) fn new_chain(&mut self, table: &str, device: &str, place: Place) {
        self.chain(table, device, place, 0);
    }

    /// Makes a base chain on `device`; that it is there already fails the transaction.
    pub(crate) fn first_chain(&mut self, table: &str, device: &str, place: Place) {
        self.chain(table, device, place, NLM_F_EXCL);
    }

    fn chain(&mut self, table: &str, device: &str, place: Place, flags: u16) {
        let flags = flags | NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        let hook = (place.hook(), place.priority(), Some(device));
        self.base_chain(flags, NFPROTO_NETDEV, (table, &place.chain(device)), hook, place.policy());
    }

    fn base_chain(
        &mut self,
        flags: u16,
        family: u8,
        (table, name): (&str, &str),
        (hook, priority, device): (u32, i32, Option<&str>),
        policy: u32,
    ) {
        self.message(NEWCHAIN, flags, family, 0, |b| {
            string(b, CHAIN_TABLE, table);
            string(b, CHAIN_NAME, name);
            attribute(b, CHAIN_HOOK | NESTED, |b| {
                number(b, HOOK_NUMBER, hook);
                number(b, HOOK_PRIORITY, priority as u32);
                if let Some(device) = device {
                    string(b, HOOK_DEVICE, device);
                }
            });
            number(b, CHAIN_POLICY, policy);
            string(b, CHAIN_TYPE, "filter");
        });
    }

    /// Adds a rule to the newcomers' chain of `device` that drops segments which ask for a new TCP connection: SYN without ACK.
    pub(crate) fn drop_new_connections(&mut self, table: &str, device: &str) {
        // The byte of flags in a TCP header, and in it.
        const FLAGS_AT: u32 = 13;
        const SYN: u8 = 0x02;
        const ACK: u8 = 0x10;
        self.drop(table, device, Place::Newcomers, |b| {
            meta(b, META_L4PROTO, &[TCP]);
            masked(b, PAYLOAD_TRANSPORT, FLAGS_AT, SYN | ACK, SYN);
        });
    }

    /// Gives the segments' chain of `device` its one rule, which drops TCP but for what CRIU sends to a socket of its own that it restores: the
    /// end of a stream that had come.
    pub(crate) fn drop_segments(&mut self, table: &str, device: &str) {
        self.message(DELRULE, NLM_F_REQUEST | NLM_F_ACK, NFPROTO_NETDEV, 0, |b| {
            string(b, RULE_TABLE, table);
            string(b, RULE_CHAIN, &Place::Segments.chain(device));
        });
        self.drop(table, device, Place::Segments, |b| {
            meta(b, META_L4PROTO, &[TCP]);
            expression(b, "meta", |b| {
                number(b, META_REGISTER, REGISTER);
                number(b, META_KEY, META_MARK);
            });
            expression(b, "cmp", |b| compare(b, COMPARE_UNEQUAL, &CRIU_MARK.to_ne_bytes()));
        });
    }

    /// Adds a rule to the newcomers' chain of `device` that drops UDP datagrams.
    pub(crate) fn drop_datagrams(&mut self, table: &str, device: &str) {
        self.drop(table, device, Place::Newcomers, |b| meta(b, META_L4PROTO, &[UDP]));
    }

    /// Adds rules to the packets' chain of `device` that drop IP, but for neighbour discovery, which does not come from the hardware address of
    /// what is delivered.
    pub(crate) fn drop_undelivered(&mut self, table: &str, device: &str) {
        self.rule(table, device, Place::Packets, ACCEPT, |b| {
            meta(b, META_PROTOCOL, &IPV6.to_be_bytes());
            payload(b, PAYLOAD_LINK, IPV6_PROTOCOL_AT as u32, 1);
            expression(b, "cmp", |b| compare(b, COMPARE_EQUAL, &[ICMP6]));
            payload(b, PAYLOAD_LINK, ICMP6_TYPE_AT as u32, 1);
            expression(b, "cmp", |b| compare(b, COMPARE_AT_LEAST, &[*NEIGHBOUR_DISCOVERY.start()]));
            expression(b, "cmp", |b| compare(b, COMPARE_AT_MOST, &[*NEIGHBOUR_DISCOVERY.end()]));
        });
        for protocol in [IPV4, IPV6] {
            self.drop(table, device, Place::Packets, |b| {
                meta(b, META_PROTOCOL, &protocol.to_be_bytes());
                undelivered(b);
            });
        }
    }

    /// Adds rules to the groups' chain of `device` that drop frames of UDP to a group of hardware addresses, or to all, which do not come from the
    /// hardware address of those that are delivered. The header of IP itself must say that it carries UDP, as [`Hold`](crate::Hold) goes by it.
    pub(crate) fn drop_undelivered_to_groups(&mut self, table: &str, device: &str) {
        // The first bit that is sent of a destination address.
        const TO_GROUP: u8 = 1;
        for (protocol, says_udp_at) in [(IPV4, IPV4_PROTOCOL_AT), (IPV6, IPV6_PROTOCOL_AT)] {
            self.drop(table, device, Place::Groups, |b| {
                meta(b, META_PROTOCOL, &protocol.to_be_bytes());
                masked(b, PAYLOAD_LINK, 0, TO_GROUP, TO_GROUP);
                payload(b, PAYLOAD_LINK, says_udp_at as u32, 1);
                expression(b, "cmp", |b| compare(b, COMPARE_EQUAL, &[UDP]));
                undelivered(b);
            });
        }
    }

    /// Adds a rule to a chain of `device` that drops packets that meet the conditions.
    fn drop(&mut self, table: &str, device: &str, place: Place, conditions: impl FnOnce(&mut Vec<u8>)) {
        self.rule(table, device, place, DROP, conditions);
    }

    /// Adds a rule to a chain of `device` with a verdict on packets that meet the conditions.
    fn rule(&mut self, table: &str, device: &str, place: Place, verdict: u32, conditions: impl FnOnce(&mut Vec<u8>)) {
        self.rule_of((NFPROTO_NETDEV, table, &place.chain(device)), verdict, conditions);
    }

    /// Adds a rule to a chain of a table of this family.
    fn rule_of(
        &mut self,
        (family, table, chain): (u8, &str, &str),
        verdict: u32,
        conditions: impl FnOnce(&mut Vec<u8>),
    ) {
        self.message(NEWRULE, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_APPEND, family, 0, |b| {
            string(b, RULE_TABLE, table);
            string(b, RULE_CHAIN, chain);
            attribute(b, RULE_EXPRESSIONS | NESTED, |b| {
                conditions(b);
                expression(b, "immediate", |b| {
                    number(b, IMMEDIATE_REGISTER, REGISTER_VERDICT);
                    attribute(b, IMMEDIATE_DATA | NESTED, |b| {
                        attribute(b, DATA_VERDICT | NESTED, |b| number(b, VERDICT_CODE, verdict));
                    });
                });
            });
        });
    }

    fn message(&mut self, kind: u16, flags: u16, family: u8, resource: u16, body: impl FnOnce(&mut Vec<u8>)) {
        message(&mut self.bytes, kind, flags, self.next, family, resource, body);
        self.next += 1;
    }

    /// The sequence numbers that are acknowledged when all went well, and the bytes.
    fn finish(mut self) -> (std::ops::Range<u32>, Vec<u8>) {
        let acknowledged = self.first + 1..self.next;
        self.message(BATCH_END, NLM_F_REQUEST, 0, SUBSYSTEM, |_| {});
        (acknowledged, self.bytes)
    }
}

fn expression(b: &mut Vec<u8>, name: &str, data: impl FnOnce(&mut Vec<u8>)) {
    attribute(b, LIST_ELEMENT | NESTED, |b| {
        string(b, EXPRESSION_NAME, name);
        attribute(b, EXPRESSION_DATA | NESTED, data);
    });
}

/// That what the kernel knows of a packet is this.
fn meta(b: &mut Vec<u8>, key: u32, is: &[u8]) {
    expression(b, "meta", |b| {
        number(b, META_REGISTER, REGISTER);
        number(b, META_KEY, key);
    });
    expression(b, "cmp", |b| compare(b, COMPARE_EQUAL, is));
}

/// That a frame's source is not the hardware address of what is delivered.
fn undelivered(b: &mut Vec<u8>) {
    const SOURCE_AT: u32 = 6;
    payload(b, PAYLOAD_LINK, SOURCE_AT, DELIVERED.len() as u32);
    expression(b, "cmp", |b| compare(b, COMPARE_UNEQUAL, &DELIVERED));
}

/// Puts bytes of a header into the register.
fn payload(b: &mut Vec<u8>, header: u32, at: u32, length: u32) {
    expression(b, "payload", |b| {
        number(b, PAYLOAD_REGISTER, REGISTER);
        number(b, PAYLOAD_BASE, header);
        number(b, PAYLOAD_OFFSET, at);
        number(b, PAYLOAD_LENGTH, length);
    });
}

/// That of the byte at this place of a header the bits of the mask are these.
fn masked(b: &mut Vec<u8>, header: u32, at: u32, mask: u8, bits: u8) {
    payload(b, header, at, 1);
    expression(b, "bitwise", |b| {
        number(b, BITWISE_SOURCE, REGISTER);
        number(b, BITWISE_TARGET, REGISTER);
        number(b, BITWISE_LENGTH, 1);
        attribute(b, BITWISE_MASK | NESTED, |b| attribute(b, DATA_VALUE, |b| b.push(mask)));
        attribute(b, BITWISE_XOR | NESTED, |b| attribute(b, DATA_VALUE, |b| b.push(0)));
    });
    expression(b, "cmp", |b| compare(b, COMPARE_EQUAL, &[bits]));
}

/// How the register compares to this value.
fn compare(b: &mut Vec<u8>, operation: u32, value: &[u8]) {
    number(b, COMPARE_REGISTER, REGISTER);
    number(b, COMPARE_OPERATION, operation);
    attribute(b, COMPARE_DATA | NESTED, |b| attribute(b, DATA_VALUE, |b| b.extend_from_slice(value)));
}

/// An nfnetlink socket in the namespace of the thread that opened it.
pub(crate) struct Nftables {
    socket: Socket,
    sequence: u32,
}

impl Nftables {
    /// Opens one in the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { socket: nfnetlink::open()?, sequence: 1 })
    }

    /// Has a transaction carried out.
    pub(crate) fn transact(&mut self, fill: impl FnOnce(&mut Batch)) -> Result<(), Refusal> {
        let mut batch = Batch::new(self.sequence);
        fill(&mut batch);
        let (acknowledged, bytes) = batch.finish();
        self.sequence = acknowledged.end + 1;
        let ours = acknowledged.start - 1..self.sequence;
        self.socket.send(&bytes, 0)?;
        // The kernel has queued every answer by the time that send returns.
        let mut missing = acknowledged.len();
        let mut refusal = None;
        while let Some(answer) = self.receive()? {
            for m in Messages(&answer).filter(|m| ours.contains(&m.sequence)) {
                match m.verdict() {
                    Some(Ok(())) if acknowledged.contains(&m.sequence) => missing -= 1,
                    Some(Err(e)) => {
                        refusal.get_or_insert(e);
                    }
                    _ => {}
                }
            }
        }
        match refusal {
            Some(refusal) => Err(refusal),
            None if missing > 0 => Err(Refusal::nonsense("no answer to a transaction")),
            None => Ok(()),
        }
    }

    /// The names of the chains of `table` that drop what no rule accepts.
    pub(crate) fn dropping_chains(&mut self, table: &str) -> Result<Vec<String>, Refusal> {
        self.list_chains(|attributes| dropping_chain(table, attributes))
    }

    /// Whether `table` has any chain.
    pub(crate) fn has_chains(&mut self, table: &str) -> Result<bool, Refusal> {
        let of_table = |attributes: &[u8]| (text(attributes, CHAIN_TABLE)? == table).then_some(());
        Ok(!self.list_chains(of_table)?.is_empty())
    }

    /// What `read` makes of the attributes of each chain that there is.
    fn list_chains<T>(&mut self, read: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>, Refusal> {
        let sequence = self.sequence;
        self.sequence += 1;
        let mut question = Vec::new();
        message(&mut question, GETCHAIN, NLM_F_REQUEST | NLM_F_DUMP, sequence, NFPROTO_NETDEV, 0, |_| {});
        self.socket.send(&question, 0)?;
        let mut chains = Vec::new();
        loop {
            let (answer, _) = self.socket.recv_from_full()?;
            for m in Messages(&answer).filter(|m| m.sequence == sequence) {
                match (m.kind, m.verdict()) {
                    (NLMSG_DONE, _) => return Ok(chains),
                    (_, Some(verdict)) => verdict?,
                    (NEWCHAIN, _) => chains.extend(read(m.payload.get(4..).unwrap_or_default())),
                    _ => {}
                }
            }
        }
    }

    fn receive(&self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = Vec::with_capacity(8192);
        match self.socket.recv(&mut buffer, MSG_DONTWAIT) {
            Ok(_) => Ok(Some(buffer)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// The name of the chain that the attributes describe, if it is one of `table` and drops by policy.
fn dropping_chain(table: &str, attributes: &[u8]) -> Option<String> {
    let dropping = value(attributes, CHAIN_POLICY)? == DROP.to_be_bytes();
    (text(attributes, CHAIN_TABLE)? == table && dropping && value(attributes, CHAIN_HOOK).is_some())
        .then(|| text(attributes, CHAIN_NAME).map(str::to_owned))?
}

fn text(attributes: &[u8], kind: u16) -> Option<&str> {
    Some(std::str::from_utf8(value(attributes, kind)?).ok()?.trim_end_matches('\0'))
}

// Keeps the arithmetic of `finish` and of the parser honest.
const _: () = assert!(HEADER == 16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::Attributes;
    use proptest::prelude::*;

    #[test]
    fn a_transaction_is_framed_by_begin_and_end_and_numbered_throughout() {
        let mut batch = Batch::new(7);
        batch.new_table("t");
        batch.new_chain("t", "eth0", Place::Egress);
        let (acknowledged, bytes) = batch.finish();
        assert_eq!(acknowledged, 8..10);
        let all: Vec<_> = Messages(&bytes).collect();
        assert_eq!(all.iter().map(|m| m.kind).collect::<Vec<_>>(), [BATCH_BEGIN, NEWTABLE, NEWCHAIN, BATCH_END]);
        assert_eq!(all.iter().map(|m| m.sequence).collect::<Vec<_>>(), [7, 8, 9, 10]);
        assert_eq!(all[0].payload, [0, 0, 0, 10], "begin names the subsystem, in network order");
        assert_eq!(all[1].payload[0], NFPROTO_NETDEV);
        let hook = Attributes(&all[2].payload[4..]).find(|(k, _)| *k == CHAIN_HOOK).unwrap().1;
        let hook: Vec<_> = Attributes(hook).collect();
        assert_eq!(hook[0], (HOOK_NUMBER, &[0, 0, 0, 1][..]));
        assert_eq!(hook[1], (HOOK_PRIORITY, &(-1000i32).to_be_bytes()[..]));
        assert_eq!(hook[2], (HOOK_DEVICE, &b"eth0\0"[..]));
    }

    proptest! {
        #[test]
        fn a_chain_that_was_encoded_is_recognised(table in "[a-z]{1,20}", device in "[a-zA-Z0-9.@_-]{1,15}") {
            let mut batch = Batch::new(1);
            batch.new_chain(&table, &device, Place::Ingress);
            let (_, bytes) = batch.finish();
            prop_assert_eq!(bytes.len() % 4, 0);
            let m = Messages(&bytes).nth(1).unwrap();
            prop_assert_eq!(dropping_chain(&table, &m.payload[4..]), Some(Place::Ingress.chain(&device)));
            prop_assert_eq!(dropping_chain("other table", &m.payload[4..]), None);
        }

        #[test]
        fn no_attributes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = dropping_chain("tranship", &bytes);
        }
    }
}
