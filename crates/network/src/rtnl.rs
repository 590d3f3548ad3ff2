//! A blocking rtnetlink socket. Requests are answered by the kernel before `send` returns, so there is nothing that an
//! asynchronous runtime could do meanwhile, and a thread that has changed its namespace must not host one.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::reply::{Messages, Refusal};

const NLMSG_DONE: u16 = 3;
const NLM_F_DUMP_INTR: u16 = 0x10;

/// An rtnetlink socket in the namespace of the thread that opened it.
pub(crate) struct Rtnl {
    socket: Socket,
    sequence: u32,
}

impl Rtnl {
    /// Opens one in the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_cap_ack(true)?;
        socket.set_ext_ack(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<u32> {
        self.sequence += 1;
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | flags;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        Ok(self.sequence)
    }

    /// Has something changed; returns when it is.
    pub(crate) fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<(), Refusal> {
        let sequence = self.send(message, NLM_F_ACK | flags)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let verdict = Messages(&bytes).filter(|m| m.sequence == sequence).find_map(|m| m.verdict());
            if let Some(verdict) = verdict {
                return verdict;
            }
        }
    }

    /// Asks for one object.
    pub(crate) fn get(&mut self, message: RouteNetlinkMessage) -> Result<RouteNetlinkMessage, Refusal> {
        let sequence = self.send(message, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            if let Some(m) = Messages(&bytes).find(|m| m.sequence == sequence) {
                if let Some(verdict) = m.verdict() {
                    verdict?;
                    return Err(Refusal::nonsense("an answer without content"));
                }
                return decode(&bytes);
            }
        }
    }

    /// Lists all objects of a kind, once more if they changed meanwhile.
    pub(crate) fn list(&mut self, message: &RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Refusal> {
        for _ in 0..10 {
            if let Some(all) = self.list_once(message.clone())? {
                return Ok(all);
            }
        }
        Err(Refusal::nonsense("it changes faster than it can be read"))
    }

    fn list_once(&mut self, message: RouteNetlinkMessage) -> Result<Option<Vec<RouteNetlinkMessage>>, Refusal> {
        let sequence = self.send(message, NLM_F_DUMP)?;
        let mut all = Vec::new();
        let mut consistent = true;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            if listed(&bytes, sequence, &mut all, &mut consistent)? {
                return Ok(consistent.then_some(all));
            }
        }
    }
}

/// Takes one datagram of a list; true at the list's end.
pub(crate) fn listed(
    bytes: &[u8],
    sequence: u32,
    all: &mut Vec<RouteNetlinkMessage>,
    consistent: &mut bool,
) -> Result<bool, Refusal> {
    let mut rest = bytes;
    while let Some(m) = Messages(rest).next() {
        let this = rest;
        rest = rest.get((16 + m.payload.len()).div_ceil(4) * 4..).unwrap_or_default();
        if m.sequence != sequence {
            continue;
        }
        *consistent &= m.flags & NLM_F_DUMP_INTR == 0;
        match (m.kind, m.verdict()) {
            (NLMSG_DONE, _) => return Ok(true),
            (_, Some(verdict)) => verdict?,
            _ => all.push(decode(this)?),
        }
    }
    Ok(false)
}

fn decode(bytes: &[u8]) -> Result<RouteNetlinkMessage, Refusal> {
    // The decoder panics where an attribute has another length than the kernels have that it was made for.
    let decoded = std::panic::catch_unwind(|| NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes));
    match decoded.map_err(|_| Refusal::nonsense("an attribute of an unexpected length"))? {
        Ok(NetlinkMessage { payload: NetlinkPayload::InnerMessage(inner), .. }) => Ok(inner),
        Ok(_) => Err(Refusal::nonsense("an answer of an unexpected kind")),
        Err(e) => Err(Refusal::nonsense(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_of_another_length_is_an_error() {
        // A route (RTM_NEWROUTE) whose RTA_FLOW has one byte.
        let route = [&33u32.to_ne_bytes()[..], &[24, 0, 0, 0], &[0; 8], &[2; 12], &[5, 0, 11, 0, 1]].concat();
        assert!(decode(&route).unwrap_err().to_string().contains("unexpected length"));
    }
}
