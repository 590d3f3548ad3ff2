//! The kernel's notes of the connections that pass a container's network namespace (conntrack): a rule there that lets through what
//! belongs to an established connection, or translates addresses, goes by them. Formats after the kernel's
//! `include/uapi/linux/netfilter/nfnetlink_conntrack.h`. Those of the node that a container is on: [`node`].

use std::path::{Path, PathBuf};

use netlink_sys::Socket;

use crate::NetworkError;
use crate::namespace;
use crate::nfnetlink::{
    self, CONNTRACK, GENERAL, Listed, NESTED, NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, attribute, message, number,
};
use crate::reply::{Messages, Pieces, Refusal, value};

pub(crate) mod node;

/// More than these are not carried: they travel while the container is frozen.
const MOST: u32 = 65536;
/// Bytes that are told the kernel at once.
const CHUNK: usize = 64 << 10;

const NEW: u16 = CONNTRACK << 8;
const GET: u16 = CONNTRACK << 8 | 1;
const GET_STATS: u16 = CONNTRACK << 8 | 5;
const STATS_ENTRIES: u16 = 1;

const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const NAT_SOURCE: u16 = 6;
const TIMEOUT: u16 = 7;
const MARK: u16 = 8;
const NAT_DESTINATION: u16 = 13;
const ZONE: u16 = 18;
const LABELS: u16 = 22;

const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PROTOCOL_SOURCE: u16 = 2;
const PROTOCOL_DESTINATION: u16 = 3;
const NAT_PROTOCOL: u16 = 3;
const PORT_MIN: u16 = 1;
const PORT_MAX: u16 = 2;

const PROTOINFO_TCP: u16 = 1;
const TCP_FLAGS_ORIGINAL: u16 = 4;
const TCP_FLAGS_REPLY: u16 = 5;
/// Segments are not held against the window.
const TCP_LIBERAL: u8 = 0x08;

const SEEN_REPLY: u32 = 1 << 1;
const ASSURED: u32 = 1 << 2;
const CONFIRMED: u32 = 1 << 3;
const SOURCE_TRANSLATED: u32 = 1 << 4;
const DESTINATION_TRANSLATED: u32 = 1 << 5;

/// Seconds that are left of a connection which only a flowtable counts.
const OFFLOADED: u32 = 120;
/// Those whose connections last: TCP, UDP, SCTP.
const PROTOCOLS: [u8; 3] = [6, 17, 132];

/// Reads what the kernel has noted in a container's network namespace.
pub struct Conntrack {
    socket: Socket,
    sequence: u32,
    netns: PathBuf,
}

impl Conntrack {
    /// Opens what is needed. The value holds a socket in the namespace, which keeps the namespace alive.
    ///
    /// # Errors
    /// No such namespace; the system's refusal.
    pub fn prepare(netns: &Path) -> Result<Self, NetworkError> {
        let opened = namespace::inside(netns, || nfnetlink::open().map_err(|e| unreadable(netns, &e.into())));
        Ok(Self { socket: opened?, sequence: 0, netns: netns.to_owned() })
    }

    /// How many connections are noted: none where no rule in the namespace asks for it. Takes microseconds.
    ///
    /// # Errors
    /// The kernel's refusal; more than can be carried.
    pub fn count(&mut self) -> Result<u32, NetworkError> {
        let count = ask_count(&self.socket, &mut self.sequence).map_err(|e| unreadable(&self.netns, &e))?;
        if count <= MOST {
            return Ok(count);
        }
        Err(NetworkError::Unsupported {
            netns: self.netns.clone(),
            what: format!("{count} tracked connections (conntrack), more than {MOST}"),
            remedy: "have its rules track fewer (`notrack`)",
        })
    }

    /// What is noted of connections over TCP, UDP and SCTP, for [`track`].
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn entries(&mut self) -> Result<Vec<u8>, NetworkError> {
        let listed = nfnetlink::list(&self.socket, &mut self.sequence, GET, 0, |_| {});
        let listed = listed.map_err(|e| unreadable(&self.netns, &e))?;
        let mut bytes = Vec::new();
        for entry in listed.iter().filter_map(Entry::read) {
            entry.write(&mut bytes, &[TUPLE_ORIGINAL, TIMEOUT, MARK, ZONE, LABELS]);
        }
        Ok(bytes)
    }
}

/// How many connections are noted in the namespace that the socket was opened in.
fn ask_count(socket: &Socket, sequence: &mut u32) -> Result<u32, Refusal> {
    *sequence += 1;
    let mut question = Vec::new();
    message(&mut question, GET_STATS, NLM_F_REQUEST, *sequence, 0, 0, |_| {});
    socket.send(&question, 0)?;
    loop {
        let (answer, _) = socket.recv_from_full()?;
        let Some(m) = Messages(&answer).find(|m| m.sequence == *sequence) else { continue };
        m.verdict().map_or(Ok(()), |verdict| verdict)?;
        let count = value(m.payload.get(GENERAL..).unwrap_or_default(), STATS_ENTRIES).and_then(|v| v.first_chunk());
        return count.map(|v| u32::from_be_bytes(*v)).ok_or_else(|| Refusal::nonsense("no number"));
    }
}

fn unreadable(netns: &Path, refusal: &Refusal) -> NetworkError {
    NetworkError::refused(format!("read the tracked connections of network namespace {}", netns.display()), refusal)
}

/// One end of a connection as the kernel notes it: addresses and, if it has them, ports.
struct Tuple<'a> {
    source: &'a [u8],
    destination: &'a [u8],
    protocol: u8,
    source_port: &'a [u8],
    destination_port: &'a [u8],
}

impl<'a> Tuple<'a> {
    fn read(tuple: &'a [u8], ipv6: bool) -> Option<Self> {
        let (source, destination) = if ipv6 { (3, 4) } else { (1, 2) };
        let (ip, protocol) = (value(tuple, TUPLE_IP)?, value(tuple, TUPLE_PROTOCOL)?);
        Some(Self {
            source: value(ip, source)?,
            destination: value(ip, destination)?,
            protocol: *value(protocol, PROTOCOL_NUMBER)?.first()?,
            source_port: value(protocol, PROTOCOL_SOURCE)?,
            destination_port: value(protocol, PROTOCOL_DESTINATION)?,
        })
    }

    /// That of the packets that come back.
    fn inverted(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            protocol: self.protocol,
            source_port: self.destination_port,
            destination_port: self.source_port,
        }
    }

    fn has_end(&self, address: &[u8]) -> bool {
        [self.source, self.destination].contains(&address)
    }

    fn write(&self, b: &mut Vec<u8>, kind: u16) {
        let (source, destination) = if self.source.len() == 16 { (3, 4) } else { (1, 2) };
        attribute(b, kind | NESTED, |b| {
            attribute(b, TUPLE_IP | NESTED, |b| {
                attribute(b, source, |b| b.extend_from_slice(self.source));
                attribute(b, destination, |b| b.extend_from_slice(self.destination));
            });
            attribute(b, TUPLE_PROTOCOL | NESTED, |b| {
                attribute(b, PROTOCOL_NUMBER, |b| b.push(self.protocol));
                attribute(b, PROTOCOL_SOURCE, |b| b.extend_from_slice(self.source_port));
                attribute(b, PROTOCOL_DESTINATION, |b| b.extend_from_slice(self.destination_port));
            });
        });
    }
}

/// A connection that lasts, as the kernel lists it.
pub(crate) struct Entry<'a> {
    family: u8,
    attributes: &'a [u8],
    original: Tuple<'a>,
    reply: Tuple<'a>,
    status: u32,
}

impl<'a> Entry<'a> {
    /// `None` for one of another protocol, which has no lasting connections.
    fn read(one: &'a Listed) -> Option<Self> {
        Self::of(one.family, &one.attributes)
    }

    pub(crate) fn of(family: u8, attributes: &'a [u8]) -> Option<Self> {
        let tuple = |kind| Tuple::read(value(attributes, kind)?, family == 10);
        let (original, reply) = (tuple(TUPLE_ORIGINAL)?, tuple(TUPLE_REPLY)?);
        let status = value(attributes, STATUS).and_then(|v| v.first_chunk()).map_or(0, |v| u32::from_be_bytes(*v));
        PROTOCOLS.contains(&original.protocol).then_some(Self { family, attributes, original, reply, status })
    }

    /// Appends what makes it again, with these of its attributes as they are.
    ///
    /// Of a connection whose addresses are translated the kernel lists where the answers come from, and takes what they are to be
    /// translated to: the answers' tuple becomes the plain inverse, and the translation is told beside it.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>, kept: &[u16]) {
        message(bytes, NEW, 0, 0, self.family, 0, |b| {
            for (kind, piece) in Pieces(self.attributes) {
                match kind {
                    PROTOINFO => protocol_state(b, piece),
                    kind if kept.contains(&kind) => b.extend_from_slice(piece),
                    _ => {}
                }
            }
            self.original.inverted().write(b, TUPLE_REPLY);
            number(b, STATUS, self.status & (SEEN_REPLY | ASSURED) | CONFIRMED);
            if value(self.attributes, TIMEOUT).is_none() {
                number(b, TIMEOUT, OFFLOADED);
            }
            if self.status & SOURCE_TRANSLATED != 0 {
                translation(b, NAT_SOURCE, self.reply.destination, self.reply.destination_port);
            }
            if self.status & DESTINATION_TRANSLATED != 0 {
                translation(b, NAT_DESTINATION, self.reply.source, self.reply.source_port);
            }
        });
    }
}

/// The state of a protocol. The kernel tells TCP's flags without a mask, and takes those that the mask covers. It does not tell how far
/// the sequence numbers are: they are not to be looked at any more, or what was on its way would be taken for invalid.
fn protocol_state(b: &mut Vec<u8>, piece: &[u8]) {
    let Some(tcp) = piece.get(4..).and_then(|info| value(info, PROTOINFO_TCP)) else {
        return b.extend_from_slice(piece);
    };
    attribute(b, PROTOINFO | NESTED, |b| {
        attribute(b, PROTOINFO_TCP | NESTED, |b| {
            for (kind, piece) in Pieces(tcp) {
                match (kind, piece.get(4)) {
                    (TCP_FLAGS_ORIGINAL | TCP_FLAGS_REPLY, Some(flags)) => {
                        attribute(b, kind, |b| b.extend_from_slice(&[*flags | TCP_LIBERAL, 0xff]));
                    }
                    _ => b.extend_from_slice(piece),
                }
            }
        });
    });
}

fn translation(b: &mut Vec<u8>, kind: u16, address: &[u8], port: &[u8]) {
    let (min, max) = if address.len() == 16 { (4, 5) } else { (1, 2) };
    attribute(b, kind | NESTED, |b| {
        attribute(b, min, |b| b.extend_from_slice(address));
        attribute(b, max, |b| b.extend_from_slice(address));
        attribute(b, NAT_PROTOCOL | NESTED, |b| {
            attribute(b, PORT_MIN, |b| b.extend_from_slice(port));
            attribute(b, PORT_MAX, |b| b.extend_from_slice(port));
        });
    });
}

/// Has the kernel take the connections for known in the network namespace `netns`, whose gate is closed; returns how many.
///
/// # Errors
/// No such namespace; the kernel's refusal.
pub fn track(netns: &Path, entries: &[u8]) -> Result<usize, NetworkError> {
    let failed = |refusal: Refusal| NetworkError::Refused {
        what: format!("make the tracked connections known in network namespace {}", netns.display()),
        why: refusal.to_string(),
        remedy: "this node needs a kernel with NF_CT_NETLINK and NF_NAT, and room in its table (net.netfilter.nf_conntrack_max)",
    };
    let (chunks, count) = chunks(entries).map_err(failed)?;
    namespace::inside(netns, || {
        let socket = nfnetlink::open().map_err(|e| failed(e.into()))?;
        chunks.iter().try_for_each(|(bytes, last)| nfnetlink::tell(&socket, bytes, *last)).map_err(failed)?;
        Ok(count)
    })
}

/// Messages of which the kernel acknowledges the last one, and that one's number.
pub(crate) type Chunk = (Vec<u8>, u32);

/// What the kernel is told, and how many entries there are.
pub(crate) fn chunks(entries: &[u8]) -> Result<(Vec<Chunk>, usize), Refusal> {
    let mut chunks = Vec::new();
    let (mut current, mut count) = (Vec::new(), 0);
    let mut all = Messages(entries).zip(1..).peekable();
    while let Some((m, sequence)) = all.next() {
        // Another node has sent it.
        let (general, attributes) = match m.payload.split_at_checked(GENERAL) {
            Some(parts) if m.kind == NEW => parts,
            _ => return Err(Refusal::nonsense("what is no tracked connection")),
        };
        let full = current.len() + attributes.len() > CHUNK || all.peek().is_none();
        let flags = NLM_F_REQUEST | NLM_F_CREATE | if full { NLM_F_ACK } else { 0 };
        message(&mut current, NEW, flags, sequence, general[0], 0, |b| b.extend_from_slice(attributes));
        count += 1;
        if full {
            chunks.push((std::mem::take(&mut current), sequence));
        }
    }
    Ok((chunks, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256), family: u8) {
            if let Some(entry) = Entry::of(family, &bytes) {
                entry.write(&mut Vec::new(), &[TUPLE_ORIGINAL]);
            }
            let _ = chunks(&bytes);
        }
    }

    #[test]
    fn the_last_message_of_each_piece_is_acknowledged_and_none_is_lost() {
        let mut bytes = Vec::new();
        for n in 0..1000u32 {
            message(&mut bytes, NEW, 0, 0, 2, 0, |b| {
                attribute(b, MARK, |b| b.extend_from_slice(&n.to_be_bytes().repeat(64)));
            });
        }
        let (chunks, count) = chunks(&bytes).unwrap();
        assert_eq!((count, chunks.len() > 1), (1000, true));
        assert_eq!(chunks.iter().map(|(bytes, _)| Messages(bytes).count()).sum::<usize>(), 1000);
        for (bytes, last) in chunks {
            let acknowledged: Vec<_> =
                Messages(&bytes).filter(|m| m.flags & NLM_F_ACK != 0).map(|m| m.sequence).collect();
            assert_eq!(acknowledged, [last]);
        }
    }
}
