//! What a node's kernel has noted of a container's connections, where the node routes or bridges them under a firewall that goes by states.

use std::net::IpAddr;
use std::path::Path;

use netlink_sys::Socket;
use nix::errno::Errno;
use tranship_types::NetworkIdentity;

use super::{
    DESTINATION_TRANSLATED, Entry, GET, NEW, SOURCE_TRANSLATED, TIMEOUT, TUPLE_ORIGINAL, Tuple, ZONE, ask_count, chunks,
};
use crate::NetworkError;
use crate::backlog::{Backlog, Connection};
use crate::nfnetlink::{self, GENERAL, NLM_F_REQUEST, message};
use crate::reply::{Message, Messages, Refusal, value};

/// Connections that are asked for at once: their answers have to fit into a socket's buffer.
const AT_ONCE: usize = 64;
/// What is told of a connection as the kernel tells it, beside its state.
pub(crate) const KEPT: &[u16] = &[TUPLE_ORIGINAL, TIMEOUT];

/// Reads what the node's kernel has noted of a container's connections.
///
/// Asked for are those that sockets of the container have, one by one: the node's own table may be large, and all of it is none of the
/// container's business. Not told are those whose addresses the node translates, since their peers know them by another address, which
/// stays with the node, and those in a zone, which only the node's rules have a meaning for; for the same reason no marks and labels.
pub struct NodeConntrack {
    socket: Socket,
    sequence: u32,
    sockets: Backlog,
    addresses: Vec<IpAddr>,
}

impl NodeConntrack {
    /// Opens what is needed, for the container whose network namespace is at `netns`. The value holds a socket in there, which keeps the
    /// namespace alive.
    ///
    /// # Errors
    /// No such namespace; the system's refusal.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity) -> Result<Self, NetworkError> {
        let socket = nfnetlink::open().map_err(|e| unreadable(&e.into()))?;
        Ok(Self { socket, sequence: 0, sockets: Backlog::prepare(netns)?, addresses: addresses(identity) })
    }

    /// Whether the node tracks connections at all. Takes microseconds.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn any(&mut self) -> Result<bool, NetworkError> {
        ask_count(&self.socket, &mut self.sequence).map(|count| count > 0).map_err(|e| unreadable(&e))
    }

    /// Appends what is noted, for [`track`].
    ///
    /// # Errors
    /// The kernel's first refusal, with all that it tells appended all the same.
    pub fn entries(&mut self, bytes: &mut Vec<u8>) -> Result<(), NetworkError> {
        self.each(|entry| {
            if let Some(entry) = plain(entry) {
                entry.write(bytes, KEPT);
            }
        })
    }

    /// How many of the container's connections have addresses that this node translates: by way of a port that it
    /// publishes, or out by its own address. The kernel finds such a connection by the addresses that the container has
    /// of it, whichever side opened it.
    ///
    /// # Errors
    /// The kernel's first refusal.
    pub fn translated(&mut self) -> Result<u64, NetworkError> {
        let mut count = 0;
        self.each(|entry| count += u64::from(is_translated(entry)))?;
        Ok(count)
    }

    /// Looks up each of the container's connections that the node tracks.
    fn each(&mut self, mut take: impl FnMut(&[u8])) -> Result<(), NetworkError> {
        let mut connections = self.sockets.connections()?;
        connections.retain(|one| self.addresses.contains(&one.local.ip()));
        let told = connections.chunks(AT_ONCE).map(|some| self.look_up(some, &mut take));
        told.fold(Ok(()), Result::and).map_err(|e| unreadable(&e))
    }

    fn look_up(&mut self, connections: &[Connection], take: &mut impl FnMut(&[u8])) -> Result<(), Refusal> {
        let (mut questions, before) = (Vec::new(), self.sequence);
        for connection in connections {
            self.sequence += 1;
            ask(&mut questions, self.sequence, connection);
        }
        self.socket.send(&questions, 0)?;
        let mut refusal = None;
        nfnetlink::answers(&self.socket, |m| {
            if m.sequence > before
                && let Err(e) = answered(&m, take)
            {
                refusal.get_or_insert(e);
            }
        })?;
        refusal.map_or(Ok(()), Err)
    }
}

/// Has this node's kernel, the calling thread's, take the connections of a container for known; returns how many. Those that it knows already are as the source
/// says. They stay as long as they would at the source, also if the container does not come.
///
/// # Errors
/// What is no connection of the container's; the kernel's first refusal, with all others made known all the same.
pub fn track(identity: &NetworkIdentity, entries: &[u8]) -> Result<usize, NetworkError> {
    let failed = |e: &Refusal| NetworkError::refused("make a container's connections known to this node's kernel", e);
    let own: Vec<_> = addresses(identity).into_iter().map(octets).collect();
    let mut bytes = Vec::with_capacity(entries.len());
    // Another node has sent them.
    for m in Messages(entries) {
        let entry = plain(m.payload).filter(|entry| own.iter().any(|address| entry.original.has_end(address)));
        let entry = entry.ok_or_else(|| failed(&Refusal::nonsense("what is no connection of the container's")))?;
        entry.write(&mut bytes, KEPT);
    }
    let (chunks, count) = chunks(&bytes).map_err(|e| failed(&e))?;
    let socket = nfnetlink::open().map_err(|e| failed(&e.into()))?;
    let told: Vec<_> = chunks.iter().map(|(bytes, last)| nfnetlink::tell(&socket, bytes, *last)).collect();
    told.into_iter().collect::<Result<(), _>>().map(|()| count).map_err(|e| failed(&e))
}

fn addresses(identity: &NetworkIdentity) -> Vec<IpAddr> {
    identity.interfaces.iter().flat_map(|interface| &interface.addresses).map(|(address, _)| *address).collect()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn ask(questions: &mut Vec<u8>, sequence: u32, connection: &Connection) {
    let (source, destination) = (octets(connection.local.ip()), octets(connection.remote.ip()));
    let tuple = Tuple {
        source: &source,
        destination: &destination,
        protocol: connection.protocol,
        source_port: &connection.local.port().to_be_bytes(),
        destination_port: &connection.remote.port().to_be_bytes(),
    };
    let family = if source.len() == 16 { 10 } else { 2 };
    message(questions, GET, NLM_F_REQUEST, sequence, family, 0, |b| tuple.write(b, TUPLE_ORIGINAL));
}

/// Hands over the connection that an answer tells of.
fn answered(answer: &Message<'_>, take: &mut impl FnMut(&[u8])) -> Result<(), Refusal> {
    match answer.verdict() {
        // It is not noted.
        Some(Err(refusal)) if refusal.errno == Errno::ENOENT => Ok(()),
        Some(verdict) => verdict,
        None => {
            if answer.kind == NEW {
                take(answer.payload);
            }
            Ok(())
        }
    }
}

/// The connection that a message tells of, if its addresses are not translated and it is in no zone.
pub(crate) fn plain(message: &[u8]) -> Option<Entry<'_>> {
    let (general, attributes) = message.split_at_checked(GENERAL)?;
    let entry = Entry::of(general[0], attributes)?;
    let translated = entry.status & (SOURCE_TRANSLATED | DESTINATION_TRANSLATED) != 0;
    (!translated && value(attributes, ZONE).is_none()).then_some(entry)
}

/// Whether the addresses of the connection that a message tells of are translated.
fn is_translated(message: &[u8]) -> bool {
    let entry = message.split_at_checked(GENERAL).and_then(|(general, attributes)| Entry::of(general[0], attributes));
    entry.is_some_and(|entry| entry.status & (SOURCE_TRANSLATED | DESTINATION_TRANSLATED) != 0)
}

fn unreadable(refusal: &Refusal) -> NetworkError {
    NetworkError::refused("read the connections that this node tracks", refusal)
}

#[cfg(test)]
mod tests {
    use super::super::{ASSURED, SEEN_REPLY, STATUS, TUPLE_REPLY};
    use super::*;
    use crate::nfnetlink::{attribute, number};
    use crate::reply::HEADER;
    use proptest::prelude::*;
    use tranship_types::{Attachment, Interface};

    /// What is told of a connection to 10.0.0.1, with more attributes.
    fn entry(more: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
        let tuple = Tuple {
            source: &[10, 0, 0, 9],
            destination: &[10, 0, 0, 1],
            protocol: 6,
            source_port: &[200, 0],
            destination_port: &[0, 80],
        };
        let mut bytes = Vec::new();
        message(&mut bytes, NEW, 0, 0, 2, 0, |b| {
            tuple.write(b, TUPLE_ORIGINAL);
            tuple.inverted().write(b, TUPLE_REPLY);
            more(b);
        });
        bytes
    }

    #[test]
    fn another_node_can_tell_of_the_containers_own_connections_alone() {
        let container = |address: &str| NetworkIdentity {
            interfaces: vec![Interface {
                name: "eth0".into(),
                index: 2,
                mac: [2; 6],
                mtu: 1500,
                addresses: vec![(address.parse().unwrap(), 24)],
                attachment: Attachment::Bridge { bridge: "br0".into() },
            }],
            ..NetworkIdentity::default()
        };
        // Of another one's nothing is told the kernel: it would be refused without a privilege, too, but not in these words.
        let refusal = track(&container("10.0.0.2"), &entry(|_| {})).unwrap_err();
        assert!(refusal.to_string().contains("no connection of the container's"), "{refusal}");
        if let Err(refusal) = track(&container("10.0.0.1"), &[]) {
            assert!(!refusal.to_string().contains("no connection of the container's"), "{refusal}");
        }
    }

    #[test]
    fn what_is_translated_or_in_a_zone_is_left_alone() {
        let is_plain = |more: &dyn Fn(&mut Vec<u8>)| plain(&entry(more)[HEADER..]).is_some();
        assert!(is_plain(&|b| number(b, STATUS, ASSURED | SEEN_REPLY)));
        for bit in [SOURCE_TRANSLATED, DESTINATION_TRANSLATED] {
            assert!(!is_plain(&|b| number(b, STATUS, ASSURED | bit)));
            assert!(is_translated(&entry(|b| number(b, STATUS, ASSURED | bit))[HEADER..]));
        }
        assert!(!is_plain(&|b| attribute(b, ZONE, |b| b.extend_from_slice(&[0, 7]))));
    }

    #[test]
    fn what_is_not_noted_is_no_refusal_and_all_else_is() {
        // NLMSG_ERROR of linux/netlink.h.
        let answer = |errno: Errno| -> Vec<u8> {
            let mut bytes = Vec::new();
            message(&mut bytes, 2, 0, 1, 0, 0, |_| {});
            bytes[HEADER..].copy_from_slice(&(-(errno as i32)).to_ne_bytes());
            bytes
        };
        let mut found = 0;
        let all = [answer(Errno::ENOENT), answer(Errno::EPERM), entry(|_| {})].concat();
        let taken: Vec<_> = Messages(&all).map(|m| answered(&m, &mut |_| found += 1).map_err(|e| e.errno)).collect();
        assert_eq!(taken, [Ok(()), Err(Errno::EPERM), Ok(())]);
        assert_eq!(found, 1);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = (plain(&bytes), is_translated(&bytes));
        }
    }
}
