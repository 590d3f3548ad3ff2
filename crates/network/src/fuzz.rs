//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use std::collections::HashMap;
use std::path::Path;

use netlink_packet_route::RouteNetlinkMessage;

use crate::capture::route;
use crate::conntrack::{Entry, chunks, node};
use crate::link::Link;
use crate::multicast::Membership;
use crate::reply::{Attributes, Messages, Pieces};
use crate::sockets::SocketState;
use crate::{HeldFrame, backlog, inject, multicast, neighbours, rtnl, rules, ruleset};

/// Bytes of a netlink header, and of `struct nfgenmsg` behind it.
const HEADERS: usize = 20;

/// Netlink's frame: messages, acknowledgements, attributes.
pub fn netlink(data: &[u8]) {
    let mut bytes = 0;
    for message in Messages(data) {
        bytes += message.payload.len();
        if let Some(Err(refusal)) = message.verdict() {
            assert!(refusal.to_string().len() <= 3 * data.len() + 256);
        }
        let attributes: usize = Attributes(message.payload).map(|(_, value)| value.len() + 4).sum();
        assert!(attributes <= message.payload.len());
        let pieces: usize = Pieces(message.payload).map(|(_, piece)| piece.len()).sum();
        assert!(pieces <= message.payload.len() && pieces >= attributes);
    }
    assert!(bytes <= data.len());
}

/// Lists of rtnetlink: interfaces, addresses, routes, rules, neighbours.
pub fn rtnetlink(data: &[u8]) {
    let names = HashMap::from([(1, "lo".to_owned()), (2, "eth0".to_owned())]);
    // Each message has the number that the first one has.
    let Some(sequence) = Messages(data).next().map(|message| message.sequence) else { return };
    let (mut all, mut consistent) = (Vec::new(), true);
    let _ = rtnl::listed(data, sequence, &mut all, &mut consistent);
    assert!(all.len() <= data.len() / 16);
    for message in &all {
        match message {
            RouteNetlinkMessage::NewLink(link) => drop(Link::read(link)),
            RouteNetlinkMessage::NewRule(rule) => drop(rules::read(rule)),
            RouteNetlinkMessage::NewRoute(one) => drop(route(Path::new("/n"), one, &names)),
            _ => {}
        }
    }
    assert!(neighbours::read(&all, &names).len() <= all.len());
}

/// The rules of nftables that a peer sends: what the kernel is told is well formed, and makes things only, none of them the gate's.
pub fn ruleset(data: &[u8]) {
    let Ok((transaction, last)) = ruleset::transaction(data) else { return };
    let all: Vec<_> = Messages(&transaction).collect();
    assert_eq!(all.len(), Messages(data).count() + 2);
    assert_eq!(
        all.iter().map(|message| message.payload.len().next_multiple_of(4) + 16).sum::<usize>(),
        transaction.len()
    );
    let (begin, rest) = all.split_first().expect("a transaction has a beginning");
    let (end, made) = rest.split_last().expect("a transaction has an end");
    assert_eq!((begin.kind, end.kind), (crate::nfnetlink::BATCH_BEGIN, crate::nfnetlink::BATCH_END));
    let making = [0, 3, 6, 9, 12, 18, 22].map(ruleset::kind);
    for (message, sequence) in made.iter().zip(2..) {
        assert!(making.contains(&message.kind), "{}", message.kind);
        assert_eq!(message.sequence, sequence);
        assert!(!ruleset::is_gate(message.payload[0], &message.payload[4..]), "a rule for the gate");
    }
    assert!(made.last().is_none_or(|message| message.sequence == last));
    assert!(transaction.len() <= 2 * data.len() + 64 * all.len());
}

/// Tracked connections, as the kernel lists them and as a peer sends them.
pub fn conntrack(data: &[u8]) {
    for message in Messages(data) {
        let Some((general, attributes)) = message.payload.split_at_checked(4) else { continue };
        if let Some(entry) = Entry::of(general[0], attributes) {
            let mut written = Vec::new();
            entry.write(&mut written, node::KEPT);
            let (chunks, count) = chunks(&written).expect("what is written is an entry");
            assert_eq!((chunks.len(), count), (1, 1));
        }
        let _ = node::plain(message.payload);
    }
    let Ok((chunks, count)) = chunks(data) else { return };
    assert_eq!(count, Messages(data).count());
    assert_eq!(chunks.iter().map(|(bytes, _)| Messages(bytes).count()).sum::<usize>(), count);
    assert!(chunks.iter().map(|(bytes, _)| bytes.len()).sum::<usize>() <= data.len() + HEADERS * count);
}

/// Answers of sock_diag(7) about connections.
pub fn backlog(data: &[u8]) {
    for message in Messages(data) {
        let socket = message.payload;
        let _ = (backlog::unread(socket), backlog::connection(6, socket));
        let _ = [backlog::queued, backlog::handshake, backlog::unfinished, backlog::unsent].map(|of| of(socket));
    }
}

/// `/proc/net/{igmp,igmp6,mcfilter,mcfilter6}`, and an address as setsockopt(2) has it.
pub fn multicast(data: &[u8], text: &str) {
    for read in [multicast::v4, multicast::v6] {
        let mut groups = read(text);
        assert!(groups.len() <= text.lines().count());
        multicast::add_sources(&mut groups, text);
    }
    let _ = multicast::decode(data);
}

/// Frames, states of sockets and memberships as a peer sends them: what is accepted survives another round.
pub fn peer(data: &[u8]) {
    if let Ok(frames) = serde_json::from_slice::<Vec<HeldFrame>>(data) {
        for frame in &frames {
            assert!(frame.bytes.len() <= crate::hold::LONGEST + 2);
            let _ = (frame.is_datagram(), frame.is_to_group(), inject::destination(&frame.bytes));
        }
        let text = serde_json::to_vec(&frames).expect("a frame is plain data");
        assert_eq!(serde_json::from_slice::<Vec<HeldFrame>>(&text).expect("a frame is read as it is written"), frames);
    }
    if let Ok(states) = serde_json::from_slice::<Vec<SocketState>>(data) {
        let text = serde_json::to_vec(&states).expect("a state is plain data");
        assert_eq!(
            serde_json::from_slice::<Vec<SocketState>>(&text).expect("a state is read as it is written"),
            states
        );
    }
    let _ = serde_json::from_slice::<Vec<Membership>>(data);
}
