//! Netlink as netfilter's subsystems speak it: framing, listing, and sending many things at once. Formats after the kernel's
//! `include/uapi/linux/netfilter/nfnetlink.h`.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

use crate::reply::{Message, Messages, Refusal};

pub(crate) const NLM_F_REQUEST: u16 = 1;
pub(crate) const NLM_F_ACK: u16 = 4;
pub(crate) const NLM_F_DUMP_INTR: u16 = 0x10;
pub(crate) const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLM_F_EXCL: u16 = 0x200;
pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_APPEND: u16 = 0x800;
pub(crate) const NLMSG_DONE: u16 = 3;
pub(crate) const MSG_DONTWAIT: i32 = 0x40;
pub(crate) const NESTED: u16 = 0x8000;

/// Number of the subsystem that tracks connections.
pub(crate) const CONNTRACK: u16 = 1;
/// Number of the subsystem nf_tables.
pub(crate) const NFTABLES: u16 = 10;
pub(crate) const BATCH_BEGIN: u16 = 0x10;
pub(crate) const BATCH_END: u16 = 0x11;

/// Bytes of `struct nfgenmsg`, which every message begins with: family, version, resource.
pub(crate) const GENERAL: usize = 4;

/// Opens a socket in the calling thread's namespace.
pub(crate) fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.set_cap_ack(true)?;
    socket.set_ext_ack(true)?;
    Ok(socket)
}

/// Fills up to where the next message or attribute begins. What another node has sent may end anywhere.
fn align(b: &mut Vec<u8>) {
    b.resize(b.len().next_multiple_of(4), 0);
}

/// Appends a message of one of netfilter's subsystems.
pub(crate) fn message(
    b: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    sequence: u32,
    family: u8,
    resource: u16,
    body: impl FnOnce(&mut Vec<u8>),
) {
    align(b);
    let start = b.len();
    b.extend_from_slice(&[0; 4]);
    b.extend_from_slice(&kind.to_ne_bytes());
    b.extend_from_slice(&flags.to_ne_bytes());
    b.extend_from_slice(&sequence.to_ne_bytes());
    b.extend_from_slice(&[0; 4]);
    b.extend_from_slice(&[family, 0]);
    b.extend_from_slice(&resource.to_be_bytes());
    body(b);
    let length = (b.len() - start) as u32;
    b[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    align(b);
}

/// Appends an attribute.
pub(crate) fn attribute(b: &mut Vec<u8>, kind: u16, value: impl FnOnce(&mut Vec<u8>)) {
    align(b);
    let start = b.len();
    b.extend_from_slice(&[0; 2]);
    b.extend_from_slice(&kind.to_ne_bytes());
    value(b);
    let length = (b.len() - start) as u16;
    b[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    align(b);
}

/// Appends an attribute that is a text.
pub(crate) fn string(b: &mut Vec<u8>, kind: u16, value: &str) {
    attribute(b, kind, |b| {
        b.extend_from_slice(value.as_bytes());
        b.push(0);
    });
}

/// Appends an attribute that is a number.
pub(crate) fn number(b: &mut Vec<u8>, kind: u16, value: u32) {
    attribute(b, kind, |b| b.extend_from_slice(&value.to_be_bytes()));
}

/// One thing that was listed.
pub(crate) struct Listed {
    /// Number of the message that tells it, subsystem included.
    pub kind: u16,
    /// The address family that it is for.
    pub family: u8,
    /// What there is to tell.
    pub attributes: Vec<u8>,
}

/// Lists what a request asks for, once more if it changed meanwhile.
pub(crate) fn list(
    socket: &Socket,
    sequence: &mut u32,
    kind: u16,
    family: u8,
    body: impl Fn(&mut Vec<u8>),
) -> Result<Vec<Listed>, Refusal> {
    for _ in 0..10 {
        *sequence += 1;
        let mut question = Vec::new();
        message(&mut question, kind, NLM_F_REQUEST | NLM_F_DUMP, *sequence, family, 0, &body);
        socket.send(&question, 0)?;
        if let Some(all) = listed(socket, *sequence)? {
            return Ok(all);
        }
    }
    Err(Refusal::nonsense("it changes faster than it can be read"))
}

/// Reads a list to its end; `None` if it is not consistent.
fn listed(socket: &Socket, sequence: u32) -> Result<Option<Vec<Listed>>, Refusal> {
    let (mut all, mut consistent) = (Vec::new(), true);
    loop {
        let (answer, _) = socket.recv_from_full()?;
        for m in Messages(&answer).filter(|m| m.sequence == sequence) {
            consistent &= m.flags & NLM_F_DUMP_INTR == 0;
            match (m.kind, m.verdict()) {
                (NLMSG_DONE, _) => return Ok(consistent.then_some(all)),
                (_, Some(verdict)) => verdict?,
                (kind, None) => all.extend(m.payload.split_at_checked(GENERAL).map(|(general, attributes)| Listed {
                    kind,
                    family: general[0],
                    attributes: attributes.to_vec(),
                })),
            }
        }
    }
}

/// Sends messages of which the last one, numbered `last`, asks for an acknowledgement; the kernel has done what they ask for when
/// this returns.
pub(crate) fn tell(socket: &Socket, messages: &[u8], last: u32) -> Result<(), Refusal> {
    socket.send(messages, 0)?;
    let mut acknowledged = false;
    let mut refusal = None;
    answers(socket, |m| match m.verdict() {
        Some(Ok(())) => acknowledged |= m.sequence == last,
        Some(Err(e)) => drop(refusal.get_or_insert(e)),
        None => {}
    })?;
    match refusal {
        Some(refusal) => Err(refusal),
        None if !acknowledged => Err(Refusal::nonsense("no answer")),
        None => Ok(()),
    }
}

/// Takes the answers to what has just been sent: all of them are queued by the time that send returns.
pub(crate) fn answers(socket: &Socket, mut each: impl FnMut(Message<'_>)) -> Result<(), Refusal> {
    let mut buffer = Vec::with_capacity(64 << 10);
    loop {
        buffer.clear();
        match socket.recv(&mut buffer, MSG_DONTWAIT) {
            Ok(_) => Messages(&buffer).for_each(&mut each),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}
