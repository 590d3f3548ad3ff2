use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tranship_sys::packet::{ALL, IPV4, IPV4_PROTOCOL_AT, IPV6, IPV6_PROTOCOL_AT, OFFLOAD_HEADER, PacketSocket};
use tranship_types::NetworkIdentity;

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::inject::DELIVERED;
use crate::link;
use crate::namespace::inside;

/// [`Hold::prepare`]'s bound where nobody has set another, in bytes for each interface: a full TCP receive window, or some
/// ten thousand small packets.
pub const HELD_BYTES: usize = 16 << 20;
/// Kernel memory for frames that passed the gate while it was closing, or after it was opened again.
const PASSED_BYTES: usize = 4 << 20;
/// The most that one [`Hold::collect`] takes over from the kernel for each interface; the rest stays for the next one.
const TAKE_FRAMES: usize = 16 << 10;
const TAKE_BYTES: usize = 16 << 20;
/// The longest frame without "big TCP": 64 KiB of IP, the Ethernet header, the offload header.
pub(crate) const LONGEST: usize = OFFLOAD_HEADER + 14 + (64 << 10);

/// A frame that reached the closed gate.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeldFrame {
    /// The interface of the container that it was for.
    pub interface: String,
    /// The frame from its Ethernet header on, behind the kernel's note (`struct virtio_net_hdr`, 10 bytes) of how large the
    /// packets in it are to be and which checksum is still to be computed. As text it is base64.
    #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
    pub bytes: Vec<u8>,
}

impl HeldFrame {
    /// Whether it carries a datagram.
    pub fn is_datagram(&self) -> bool {
        self.bytes.get(OFFLOAD_HEADER..).is_some_and(is_datagram)
    }

    /// Whether it carries a datagram to a group, or to all: one that reaches both places of a container that moves.
    pub fn is_to_group(&self) -> bool {
        self.bytes.get(OFFLOAD_HEADER..).is_some_and(is_to_group)
    }
}

/// What [`Gate::open_but_to_datagrams`](crate::Gate::open_but_to_datagrams) keeps out.
pub(crate) fn is_datagram(frame: &[u8]) -> bool {
    const UDP: u8 = 17;
    let protocol = match frame.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]])) {
        Some(IPV4) => frame.get(IPV4_PROTOCOL_AT),
        Some(IPV6) => frame.get(IPV6_PROTOCOL_AT),
        _ => None,
    };
    protocol == Some(&UDP)
}

/// What [`Gate::open_but_to_groups`](crate::Gate::open_but_to_groups) keeps out.
fn is_to_group(frame: &[u8]) -> bool {
    is_datagram(frame) && frame[0] & 1 == 1
}

impl std::fmt::Debug for HeldFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeldFrame({}, {} bytes)", self.interface, self.bytes.len())
    }
}

fn to_base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
    if text.len() > LONGEST.div_ceil(3) * 4 {
        return Err(serde::de::Error::custom("the frame is longer than frames can be"));
    }
    STANDARD.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

/// Keeps the frames that reach a container while its gate is closed, so that they can be delivered when it runs again, by
/// [`Injector`](crate::Injector), wherever that is: peers then need no retransmission timeout.
///
/// Each interface is listened to at two points of the kernel's receive path:
///
/// ```text
/// device ──▶ sockets for all protocols ──▶ gate (netdev ingress) ──▶ sockets for one protocol ──▶ IP
///                 `before`                   passes or drops            `behind`, IPv4 and IPv6
/// ```
///
/// What was seen before the gate and not behind it is what the gate has dropped. So the set of held frames is exact
/// whatever the order of events on other processors was: what the source's own kernel has processed is not held, whether
/// it came before the gate closed or after it was opened again; what it has not is. A frame that is between the two points
/// at the very moment of a look is kept until it is seen behind the gate by a later one ([`collect`](Self::collect)). The
/// last look after the gate was opened again ([`finish`](Self::finish)) waits until the kernel has nothing between the two
/// points. In doubt (too much passes at once) a frame is held, thus delivered twice, rather than lost.
///
/// ```text
///   prepared ──begin──▶ holding ──take──▶ holding           the gate stays closed here
///                          └────finish──▶ ended             the gate was opened again
/// ```
///
/// Held are IPv4, IPv6 and ARP (requests for the container's own addresses only), to the interface's MAC, to all, and to
/// groups. Before [`begin`](Self::begin) it costs the container's traffic nothing.
pub struct Hold {
    netns: PathBuf,
    lines: Vec<Line>,
    buffer: Vec<u8>,
    bound: usize,
    dropped: u64,
    begun: bool,
    scope: Scope,
}

/// What is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    Datagrams,
    /// All but datagrams to groups.
    Others,
}

struct Line {
    name: String,
    index: u32,
    mac: [u8; 6],
    addresses: Vec<Ipv4Addr>,
    before: PacketSocket,
    behind: [(u16, PacketSocket); 2],
    /// What was seen behind the gate and not yet found among what was seen before it.
    passed: HashMap<Vec<u8>, u32>,
    /// What was seen before the gate, is for the container, and was not found behind it so far.
    kept: Vec<Vec<u8>>,
    kept_bytes: usize,
}

impl Hold {
    /// Opens the sockets inside `netns`, which hear nothing yet. `bound` is what the frames held for one interface may occupy,
    /// in bytes, of kernel memory until they are collected, and of the process's after that. What arrives beyond it is
    /// dropped, the newest first, as by a switch whose buffer is full: what is kept is then without a gap. The value keeps the namespace alive; dropping it takes
    /// the kernel some milliseconds, so do it when time is cheap.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], an interface of the identity that is not there, the
    /// system's refusal.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity, bound: usize) -> Result<Self, NetworkError> {
        Self::prepare_for(netns, identity, bound, Scope::All)
    }

    /// The same for datagrams alone.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(crate) fn prepare_for_datagrams(
        netns: &Path,
        identity: &NetworkIdentity,
        bound: usize,
    ) -> Result<Self, NetworkError> {
        Self::prepare_for(netns, identity, bound, Scope::Datagrams)
    }

    fn prepare_for(netns: &Path, identity: &NetworkIdentity, bound: usize, scope: Scope) -> Result<Self, NetworkError> {
        let lines = inside(netns, || {
            let mut rtnl = open_rtnl(netns)?;
            let mut lines = Vec::new();
            for interface in &identity.interfaces {
                let what = || {
                    format!("prepare to hold packets for {} of network namespace {}", interface.name, netns.display())
                };
                let link = link::by_name(&mut rtnl, &interface.name)
                    .map_err(|e| NetworkError::refused(what(), e))?
                    .ok_or_else(|| NetworkError::refused(what(), "there is no such interface"))?;
                let open = |bytes: usize| {
                    let socket = match scope {
                        Scope::Datagrams => PacketSocket::open_for_datagrams()?,
                        Scope::All | Scope::Others => PacketSocket::open()?,
                    };
                    socket.receive_buffer(bytes)?;
                    Ok(socket)
                };
                let refused = |e: std::io::Error| NetworkError::refused(what(), e);
                lines.push(Line {
                    name: interface.name.clone(),
                    index: link.index,
                    mac: interface.mac,
                    addresses: interface
                        .addresses
                        .iter()
                        .filter_map(|(a, _)| match a {
                            IpAddr::V4(v4) => Some(*v4),
                            IpAddr::V6(_) => None,
                        })
                        .collect(),
                    before: open(bound).map_err(refused)?,
                    behind: [
                        (IPV4, open(PASSED_BYTES).map_err(refused)?),
                        (IPV6, open(PASSED_BYTES).map_err(refused)?),
                    ],
                    passed: HashMap::new(),
                    kept: Vec::new(),
                    kept_bytes: 0,
                });
            }
            Ok(lines)
        })?;
        Ok(Self { netns: netns.to_owned(), lines, buffer: vec![0; LONGEST], bound, dropped: 0, begun: false, scope })
    }

    /// Starts holding, right before [`Gate::close`](crate::Gate::close): what still passes until the gate is closed is
    /// recognised and left out. Takes microseconds; do not let much time pass between the two without
    /// [`collect`](Self::collect), which makes room. Once begun, it goes on.
    ///
    /// # Errors
    /// The system's refusal; the container is as it was, and the gate can be closed without a hold.
    pub fn begin(&mut self) -> Result<(), NetworkError> {
        if self.begun {
            return Ok(());
        }
        for line in &self.lines {
            // Behind the gate first: whatever is then seen before it and passes is seen behind it too.
            let begun = line.behind.iter().try_for_each(|(protocol, socket)| socket.listen(line.index, *protocol));
            begun.and_then(|()| line.before.listen(line.index, ALL)).map_err(|e| {
                let what = format!("hold packets for {} of network namespace {}", line.name, self.netns.display());
                NetworkError::refused(what, e)
            })?;
        }
        self.begun = true;
        Ok(())
    }

    /// Makes room in the kernel: looks through what came since the last time, and keeps what may have to be delivered.
    /// Never waits.
    pub fn collect(&mut self) {
        for line in &mut self.lines {
            line.collect(&mut self.buffer, self.bound, self.scope, &mut self.dropped);
        }
    }

    /// What was held since the last call, for each interface in the order of arrival. Never waits. For a gate that is closed
    /// and was so for some time (milliseconds, where processors are virtual ones): of a frame that another processor is just
    /// carrying past it, it is not known whether it passes.
    pub fn take(&mut self) -> Vec<HeldFrame> {
        self.collect();
        let mut held = Vec::new();
        for line in &mut self.lines {
            line.kept_bytes = 0;
            held.extend(line.kept.drain(..).map(|bytes| HeldFrame { interface: line.name.clone(), bytes }));
        }
        held
    }

    /// The datagrams among them, for a gate that is [closed to these alone](crate::Gate::open_but_to_datagrams). Never waits.
    pub(crate) fn take_datagrams(&mut self) -> Vec<HeldFrame> {
        self.take_if(is_datagram)
    }

    /// Those of them that are to one host.
    pub(crate) fn take_to_one(&mut self) -> Vec<HeldFrame> {
        self.take_if(|frame| is_datagram(frame) && !is_to_group(frame))
    }

    /// Those to groups, for a gate that is [closed to these alone](crate::Gate::open_but_to_groups). Never waits.
    pub(crate) fn take_groups(&mut self) -> Vec<HeldFrame> {
        self.take_if(is_to_group)
    }

    fn take_if(&mut self, is_wanted: fn(&[u8]) -> bool) -> Vec<HeldFrame> {
        self.collect();
        let mut held = Vec::new();
        for line in &mut self.lines {
            for bytes in line.kept.extract_if(.., |bytes| is_wanted(&bytes[OFFLOAD_HEADER..])) {
                line.kept_bytes -= bytes.len();
                held.push(HeldFrame { interface: line.name.clone(), bytes });
            }
        }
        held
    }

    /// Whether any datagrams are held.
    pub fn has_datagrams(&mut self) -> bool {
        self.collect();
        self.lines.iter().flat_map(|line| &line.kept).any(|bytes| is_datagram(&bytes[OFFLOAD_HEADER..]))
    }

    /// From now on datagrams to groups are not held any more: they reach the container elsewhere.
    pub fn leave_groups(&mut self) {
        self.take_groups();
        self.scope = Scope::Others;
    }

    /// Waits until a frame is seen, at most so long; whether one was.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let mut sockets: Vec<_> =
            self.lines.iter().map(|line| PollFd::new(line.before.as_fd(), PollFlags::POLLIN)).collect();
        let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
        poll(&mut sockets, patience).is_ok_and(|ready| ready > 0)
    }

    /// Ends the holding once the gate is open again: what was held since the last call and did not pass after all. Waits until
    /// the kernel has carried on what it had between the two points, some 20 ms.
    pub fn finish(&mut self) -> Vec<HeldFrame> {
        // Makes room for what passes while that is waited for.
        self.collect();
        if let Err(error) = self.lines.iter().try_for_each(|line| line.before.listen_no_more(line.index)) {
            tracing::warn!(netns = %self.netns.display(), %error, "held packets may be delivered twice");
        }
        self.take()
    }

    /// How many frames were lost because more came than the bound allows. As of the last look.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
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
    fn collect(&mut self, buffer: &mut [u8], bound: usize, scope: Scope, dropped: &mut u64) {
        // In this order, so that what was seen before the gate had its chance to be seen behind it.
        let seen = drain(&self.before, buffer, dropped);
        for (_, socket) in &self.behind {
            // A frame that is lost here is not one that the container lost.
            for frame in drain(socket, buffer, &mut 0) {
                *self.passed.entry(frame).or_default() += 1;
            }
        }
        for bytes in seen {
            if found(&mut self.passed, &bytes) || !self.wants(&bytes[OFFLOAD_HEADER..], scope) {
                continue;
            }
            if self.kept_bytes + bytes.len() > bound {
                *dropped += 1;
                continue;
            }
            self.kept_bytes += bytes.len();
            self.kept.push(bytes);
        }
        // What an earlier look found between the two points.
        let (passed, kept_bytes) = (&mut self.passed, &mut self.kept_bytes);
        if !passed.is_empty() {
            self.kept.retain(|bytes| {
                let has_passed = found(passed, bytes);
                *kept_bytes -= if has_passed { bytes.len() } else { 0 };
                !has_passed
            });
        }
        *dropped += u64::from(self.before.dropped().unwrap_or(0));
    }

    /// Whether a frame is for the container, and nothing that its twin says.
    fn wants(&self, frame: &[u8], scope: Scope) -> bool {
        let is_in_scope = match scope {
            Scope::All => true,
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
