//! One interface that is listened to.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use tranship_sys::packet::{IPV4, IPV6, OFFLOAD_HEADER, PacketSocket};

use super::{HeldFrame, is_datagram, is_packet, is_to_group};
use crate::inject::DELIVERED;
use crate::queue::Queue;

/// The most that one look takes over from the kernel for each interface; the rest stays for the next one.
const TAKE_FRAMES: usize = 16 << 10;
const TAKE_BYTES: usize = 16 << 20;

/// What is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    All,
    /// IP, but for neighbour discovery.
    Packets,
    Datagrams,
    /// All but datagrams to groups.
    Others,
}

pub(super) struct Line {
    pub(super) name: String,
    pub(super) index: u32,
    pub(super) mac: [u8; 6],
    pub(super) addresses: Vec<Ipv4Addr>,
    pub(super) before: PacketSocket,
    pub(super) behind: [(u16, PacketSocket); 2],
    /// What was seen behind the gate and not yet found among what was seen before it.
    pub(super) passed: HashMap<Vec<u8>, u32>,
    /// What was seen before the gate, is for the container, and was not found behind it so far.
    pub(super) kept: Queue,
    /// How many the kernel had no room for.
    pub(super) dropped: u64,
}

/// Whether a frame is among those that have passed; then it is so no more.
pub(crate) fn found(passed: &mut HashMap<Vec<u8>, u32>, bytes: &[u8]) -> bool {
    let Some(count) = passed.get_mut(bytes) else { return false };
    *count -= 1;
    if *count == 0 {
        passed.remove(bytes);
    }
    true
}

fn drain(socket: &PacketSocket, buffer: &mut [u8], too_long: &mut u64) -> Vec<Vec<u8>> {
    let (mut frames, mut bytes) = (Vec::new(), 0);
    while frames.len() < TAKE_FRAMES && bytes < TAKE_BYTES {
        match socket.receive(buffer) {
            Ok(Some(length)) if length > buffer.len() => *too_long += 1,
            Ok(Some(length)) if length < OFFLOAD_HEADER + 14 => {}
            Ok(Some(length)) => {
                bytes += length;
                frames.push(buffer[..length].to_vec());
            }
            Ok(None) => break,
            // Told once, when the interface goes down or away; what came before can still be read.
            Err(e) if e.raw_os_error() == Some(nix::errno::Errno::ENETDOWN as i32) => {}
            Err(e) => {
                tracing::warn!("held packets could not be read: {e}");
                break;
            }
        }
    }
    frames
}

impl Line {
    pub(super) fn collect(&mut self, buffer: &mut [u8], bound: usize, scope: Scope) {
        // In this order, so that what was seen before the gate had its chance to be seen behind it.
        let seen = drain(&self.before, buffer, &mut self.dropped);
        for (_, socket) in &self.behind {
            // A frame that is lost here is not one that the container lost.
            for frame in drain(socket, buffer, &mut 0) {
                *self.passed.entry(frame).or_default() += 1;
            }
        }
        for bytes in seen {
            if !found(&mut self.passed, &bytes) && self.wants(&bytes[OFFLOAD_HEADER..], scope) {
                self.kept.push(HeldFrame { interface: self.name.clone(), bytes }, bound);
            }
        }
        // What an earlier look found between the two points.
        let passed = &mut self.passed;
        if !(passed.is_empty() || self.kept.is_empty()) {
            self.kept.take(|frame| found(passed, &frame.bytes));
        }
        self.dropped += u64::from(self.before.dropped().unwrap_or(0));
    }

    /// Whether a buffer of the kernel's is half full. One that does not say may be.
    pub(super) fn is_filling(&self) -> bool {
        let behind = self.behind.iter().map(|(_, socket)| socket);
        behind.chain([&self.before]).any(|socket| socket.is_half_full().unwrap_or(true))
    }

    /// How many frames were lost for lack of room.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped + self.kept.dropped()
    }

    /// Whether a frame is for the container, and nothing that its twin says.
    fn wants(&self, frame: &[u8], scope: Scope) -> bool {
        let is_in_scope = match scope {
            Scope::All => true,
            Scope::Packets => is_packet(frame),
            Scope::Datagrams => is_datagram(frame),
            Scope::Others => !is_to_group(frame),
        };
        if !is_in_scope {
            return false;
        }
        let (to, from, protocol) = (&frame[..6], &frame[6..12], [frame[12], frame[13]]);
        if from == self.mac || from == DELIVERED || (to != self.mac && to[0] & 1 == 0) {
            return false;
        }
        match u16::from_be_bytes(protocol) {
            IPV4 | IPV6 => true,
            // The target's address is the last field but padding.
            0x0806 => frame.get(38..42).is_some_and(|t| self.addresses.iter().any(|a| a.octets() == t)),
            _ => false,
        }
    }
}
