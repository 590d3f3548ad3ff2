//! The container's own firewall: the rules of nftables (those of `iptables-nft` are such) inside its network namespace.
//!
//! What the kernel lists of a table, chain, set or rule is nearly what it takes to make one. So they are carried as the kernel tells
//! them, without what belongs to the namespace that they are in (handles, counts of users), and made again in one transaction. Nothing
//! here understands a rule, so there is none that cannot be carried; a kernel that lacks what a rule uses refuses it, before the freeze.
//! Formats after the kernel's `include/uapi/linux/netfilter/nf_tables.h`.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use netlink_sys::Socket;
use nix::sys::socket::{setsockopt, sockopt};

use crate::NetworkError;
use crate::gate::TABLE;
use crate::namespace;
use crate::nfnetlink::{
    self, BATCH_BEGIN, BATCH_END, GENERAL, Listed, NESTED, NFTABLES, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE,
    NLM_F_REQUEST, attribute, message, number,
};
use crate::reply::{Attributes, Messages, Pieces, Refusal, value};

/// A ruleset of more bytes is not carried: it travels in one message with all that is told of the container.
const MOST: usize = 384 << 10;

const NFPROTO_NETDEV: u8 = 5;
const NFPROTO_IPV6: u8 = 10;
pub(crate) const fn kind(number: u16) -> u16 {
    NFTABLES << 8 | number
}
const NEWTABLE: u16 = kind(0);
const NEWCHAIN: u16 = kind(3);
const NEWRULE: u16 = kind(6);
const NEWSET: u16 = kind(9);
const NEWSETELEM: u16 = kind(12);
const NEWOBJ: u16 = kind(18);
const NEWFLOWTABLE: u16 = kind(22);
/// What is listed, in the order in which it is made: number of the request, and the attributes that are not the thing's own but say
/// where in its namespace it is (handles, positions, users, owners, numbers of elements, padding).
const KINDS: [(u16, u16, &[u16]); 6] = [
    (NEWTABLE, kind(1), &[3, 4, 5, 7]),
    (NEWCHAIN, kind(4), &[2, 6, 9]),
    (NEWOBJ, kind(19), &[5, 6, 7]),
    (NEWSET, kind(10), &[14, 16, 19, 20]),
    (NEWFLOWTABLE, kind(23), &[4, 5, 6]),
    (NEWRULE, kind(7), &[3, 6, 8]),
];
const GETSETELEM: u16 = kind(13);

/// The attribute that every one of them begins with: its table's name, or its own if it is a table.
const OF_TABLE: u16 = 1;
const TABLE_FLAGS: u16 = 2;
const TABLE_DORMANT: u32 = 1;
const CHAIN_FLAGS: u16 = 10;
const CHAIN_BINDING: u32 = 4;
const SET_NAME: u16 = 2;
const SET_ID: u16 = 10;
const ELEMENTS: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_COMPAT: u16 = 5;

/// The rules of nftables in the network namespace `netns`, but for the gate's; empty where there are none.
///
/// # Errors
/// What cannot be made again, and the system's refusals.
pub fn capture(netns: &Path) -> Result<String, NetworkError> {
    let unsupported =
        |what: &str, remedy| NetworkError::Unsupported { netns: netns.to_owned(), what: what.to_owned(), remedy };
    let listed = namespace::inside(netns, || {
        let socket = nfnetlink::open().map_err(|e| unreadable(netns, &e.into()))?;
        list(&socket).map_err(|e| unreadable(netns, &e))
    })?;
    let mut bytes = Vec::new();
    for one in &listed {
        if flags(one, NEWCHAIN, CHAIN_FLAGS) & CHAIN_BINDING != 0 {
            return Err(unsupported("a rule of nftables with a chain that has no name", "give the chain a name"));
        }
        message(&mut bytes, one.kind, 0, 0, one.family, 0, |b| b.extend_from_slice(&one.attributes));
    }
    if bytes.len() > MOST {
        return Err(unsupported("a ruleset of nftables that is over 384 KiB", "delete rules, or elements of sets"));
    }
    Ok(STANDARD.encode(bytes))
}

/// What a user should know about rules that are not carried: those of iptables' own tables in the kernel (`iptables-legacy`).
///
/// # Errors
/// No such namespace.
pub fn remarks(netns: &Path) -> Result<Vec<String>, NetworkError> {
    let of = |family: &str| {
        std::fs::read_to_string(format!("/proc/thread-self/net/{family}_tables_names")).unwrap_or_default()
    };
    let tables = namespace::inside(netns, || Ok(["ip", "ip6", "arp"].map(|family| (family, of(family)))))?;
    let named =
        tables.iter().flat_map(|(family, names)| names.lines().map(move |name| format!("{name} ({family}tables)")));
    let named = named.collect::<Vec<_>>().join(", ");
    Ok(match named.is_empty() {
        true => Vec::new(),
        false => vec![format!(
            "rules in the tables {named} of iptables-legacy in network namespace {} are not made again: use nftables or iptables-nft \
             there",
            netns.display()
        )],
    })
}

fn unreadable(netns: &Path, refusal: &Refusal) -> NetworkError {
    NetworkError::refused(format!("read the rules of nftables of network namespace {}", netns.display()), refusal)
}

/// Everything that there is, in the order in which it is made.
fn list(socket: &Socket) -> Result<Vec<Listed>, Refusal> {
    let mut sequence = 0;
    let mut all = Vec::new();
    for (_, request, _) in KINDS {
        let listed = nfnetlink::list(socket, &mut sequence, request, 0, |_| {})?;
        let own = listed.into_iter().filter(|one| !is_gate(one.family, &one.attributes));
        for one in own {
            let elements = match one.kind {
                NEWSET => elements_of(socket, &mut sequence, &one)?,
                _ => Vec::new(),
            };
            all.push(one);
            all.extend(elements);
        }
        // A table without chains has no rules, and most namespaces have no table.
        if all.is_empty() {
            break;
        }
    }
    Ok(all)
}

fn elements_of(socket: &Socket, sequence: &mut u32, set: &Listed) -> Result<Vec<Listed>, Refusal> {
    let named = |b: &mut Vec<u8>| {
        for (_, piece) in Pieces(&set.attributes).filter(|(kind, _)| matches!(*kind, OF_TABLE | SET_NAME)) {
            b.extend_from_slice(piece);
        }
    };
    let mut elements = nfnetlink::list(socket, sequence, GETSETELEM, set.family, named)?;
    elements.retain(|one| value(&one.attributes, ELEMENTS).is_some_and(|elements| !elements.is_empty()));
    Ok(elements)
}

fn flags(one: &Listed, kind: u16, attribute: u16) -> u32 {
    let of_kind = value(&one.attributes, attribute).filter(|_| one.kind == kind);
    of_kind.and_then(|value| value.first_chunk()).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Whether it is the gate, or a part of it.
pub(crate) fn is_gate(family: u8, attributes: &[u8]) -> bool {
    let of_table = || Some(std::str::from_utf8(value(attributes, OF_TABLE)?).ok()?.trim_end_matches('\0'));
    family == NFPROTO_NETDEV && of_table() == Some(TABLE)
}

/// Makes the rules again for the calling thread's namespace, that of the container at `netns`.
pub(crate) fn apply(netns: &Path, ruleset: &str) -> Result<(), NetworkError> {
    if ruleset.is_empty() {
        return Ok(());
    }
    let failed = |refusal: Refusal| NetworkError::Refused {
        what: format!("make the rules of nftables in network namespace {}", netns.display()),
        why: refusal.to_string(),
        remedy: "the container's node has a kernel that knows all of them, and so must this one: see that it is as new, and load the \
                 same modules of nf_tables",
    };
    let messages = STANDARD.decode(ruleset).map_err(|e| failed(Refusal::nonsense(e.to_string())))?;
    let (transaction, last) = transaction(&messages).map_err(failed)?;
    let socket = nfnetlink::open().map_err(|e| failed(e.into()))?;
    // A transaction is one datagram.
    setsockopt(&socket, sockopt::SndBufForce, &(2 * transaction.len() + (64 << 10)))
        .map_err(|e| failed(std::io::Error::from(e).into()))?;
    nfnetlink::tell(&socket, &transaction, last).map_err(failed)
}

/// What the kernel is told to make what was listed, and the number of the last message.
pub(crate) fn transaction(messages: &[u8]) -> Result<(Vec<u8>, u32), Refusal> {
    let mut bytes = Vec::with_capacity(messages.len() + 1024);
    message(&mut bytes, BATCH_BEGIN, NLM_F_REQUEST, 1, 0, NFTABLES, |_| {});
    let count = Messages(messages).count();
    let last = count as u32 + 1;
    for (m, sequence) in Messages(messages).zip(2..) {
        let own = KINDS.iter().find(|(kind, ..)| *kind == m.kind).map(|(.., own)| *own);
        let (general, attributes) =
            m.payload.split_at_checked(GENERAL).ok_or_else(|| Refusal::nonsense("a rule that is cut"))?;
        // Another node has sent it.
        let not_own = match own {
            _ if is_gate(general[0], attributes) => return Err(Refusal::nonsense("a rule for the gate")),
            None if m.kind != NEWSETELEM => return Err(Refusal::nonsense("what is no rule of nftables")),
            own => own.unwrap_or_default(),
        };
        let acknowledge = if sequence == last { NLM_F_ACK } else { 0 };
        let append = if m.kind == NEWRULE { NLM_F_APPEND } else { 0 };
        let flags = NLM_F_REQUEST | NLM_F_CREATE | append | acknowledge;
        message(&mut bytes, m.kind, flags, sequence, general[0], 0, |b| {
            for (kind, piece) in Pieces(attributes).filter(|(kind, _)| !not_own.contains(kind)) {
                match (m.kind, kind) {
                    // A table that belongs to a program would go with this socket.
                    (NEWTABLE, TABLE_FLAGS) => {
                        let flags = piece.get(4..).and_then(|v| v.first_chunk()).map_or(0, |v| u32::from_be_bytes(*v));
                        number(b, TABLE_FLAGS, flags & TABLE_DORMANT);
                    }
                    _ => b.extend_from_slice(piece),
                }
            }
            match m.kind {
                NEWSET => number(b, SET_ID, sequence),
                NEWRULE => compat(b, general[0], attributes),
                _ => {}
            }
        });
    }
    message(&mut bytes, BATCH_END, NLM_F_REQUEST, last + 1, 0, NFTABLES, |_| {});
    Ok((bytes, last))
}

/// Adds which IP protocol a rule with matches or targets of iptables is for, which the kernel wants to be told and does not tell.
fn compat(b: &mut Vec<u8>, family: u8, rule: &[u8]) {
    const LIST_ELEMENT: u16 = 1;
    const NAME: u16 = 1;
    const DATA: u16 = 2;
    const META_KEY: u16 = 2;
    const META_L4PROTO: u32 = 16;
    const PAYLOAD: [u16; 3] = [2, 3, 4];
    const PAYLOAD_NETWORK: u32 = 1;
    const COMPARE_OPERATION: u16 = 2;
    const COMPARE_DATA: u16 = 3;
    const DATA_VALUE: u16 = 1;
    const COMPARE_NOT_EQUAL: u32 = 1;
    const COMPAT_PROTO: u16 = 1;
    const COMPAT_FLAGS: u16 = 2;
    const COMPAT_INVERTED: u32 = 2;
    let protocol_at = if family == NFPROTO_IPV6 { 6 } else { 9 };
    let (mut extended, mut loaded, mut protocol) = (false, false, None);
    let expressions = value(rule, RULE_EXPRESSIONS).unwrap_or_default();
    for (_, expression) in Attributes(expressions).filter(|(kind, _)| *kind == LIST_ELEMENT) {
        let data = value(expression, DATA).unwrap_or_default();
        let number = |kind| value(data, kind).and_then(|v| v.first_chunk()).map(|v| u32::from_be_bytes(*v));
        match value(expression, NAME).unwrap_or_default() {
            b"match\0" | b"target\0" => extended = true,
            b"meta\0" => loaded = number(META_KEY) == Some(META_L4PROTO),
            b"payload\0" => loaded = PAYLOAD.map(number) == [PAYLOAD_NETWORK, protocol_at, 1].map(Some),
            b"cmp\0" if loaded => {
                let compared = value(data, COMPARE_DATA).and_then(|data| value(data, DATA_VALUE)?.first().copied());
                let inverted = number(COMPARE_OPERATION) == Some(COMPARE_NOT_EQUAL);
                protocol = compared.map(|compared| (compared, if inverted { COMPAT_INVERTED } else { 0 }));
                loaded = false;
            }
            _ => loaded = false,
        }
    }
    if let Some((protocol, flags)) = protocol.filter(|_| extended) {
        attribute(b, RULE_COMPAT | NESTED, |b| {
            number(b, COMPAT_PROTO, u32::from(protocol));
            number(b, COMPAT_FLAGS, flags);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfnetlink::string;
    use proptest::prelude::*;

    fn table(family: u8, name: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        message(&mut bytes, NEWTABLE, 0, 0, family, 0, |b| {
            string(b, OF_TABLE, name);
            number(b, TABLE_FLAGS, 7);
            number(b, 3, 5);
        });
        bytes
    }

    #[test]
    fn a_table_is_made_without_its_owner_and_its_number_of_users() {
        let (bytes, last) = transaction(&table(1, "filter")).unwrap();
        let all: Vec<_> = Messages(&bytes).collect();
        assert_eq!(all.iter().map(|m| m.kind).collect::<Vec<_>>(), [BATCH_BEGIN, NEWTABLE, BATCH_END]);
        assert_eq!((all[1].sequence, all[1].flags & NLM_F_ACK), (last, NLM_F_ACK));
        let kept: Vec<_> = Attributes(&all[1].payload[GENERAL..]).collect();
        assert_eq!(kept, [(OF_TABLE, &b"filter\0"[..]), (TABLE_FLAGS, &[0, 0, 0, 1][..])]);
    }

    #[test]
    fn another_node_can_neither_open_the_gate_nor_delete_anything() {
        assert!(transaction(&table(NFPROTO_NETDEV, TABLE)).is_err());
        let mut bytes = Vec::new();
        message(&mut bytes, kind(2), 0, 0, 1, 0, |b| string(b, OF_TABLE, "filter"));
        assert!(transaction(&bytes).is_err());
    }

    #[test]
    fn a_message_that_ends_anywhere_hides_no_other_one() {
        // A rule for the gate, in the last attribute of a table: where that ends unaligned, the kernel would begin to read within it.
        let hidden = table(NFPROTO_NETDEV, TABLE);
        for cut in 1..4 {
            let mut bytes = Vec::new();
            message(&mut bytes, NEWTABLE, 0, 0, 1, 0, |b| {
                string(b, OF_TABLE, "filter");
                b.extend_from_slice(&(4 + hidden.len() as u16 - cut).to_ne_bytes());
                b.extend_from_slice(&[9, 0]);
                b.extend_from_slice(&hidden[..hidden.len() - usize::from(cut)]);
            });
            bytes.extend(table(1, "nat"));
            let (transaction, _) = transaction(&bytes).unwrap();
            let kinds: Vec<_> = Messages(&transaction).map(|m| m.kind).collect();
            assert_eq!(kinds, [BATCH_BEGIN, NEWTABLE, NEWTABLE, BATCH_END]);
            let length = |m: crate::reply::Message<'_>| (16 + m.payload.len()).next_multiple_of(4);
            assert_eq!(Messages(&transaction).map(length).sum::<usize>(), transaction.len());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256), family: u8) {
            let _ = transaction(&bytes);
            compat(&mut Vec::new(), family, &bytes);
        }
    }
}
