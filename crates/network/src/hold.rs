mod line;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tranship_sys::packet::{ALL, IPV4, IPV4_PROTOCOL_AT, IPV6, IPV6_PROTOCOL_AT, OFFLOAD_HEADER, PacketSocket};
use tranship_types::NetworkIdentity;

pub(crate) use line::found;

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::link;
use crate::namespace::inside;
use crate::queue::Queue;
use line::{Line, Scope};

/// [`Hold::prepare`]'s bound where nobody has set another, in bytes for each interface: a full TCP receive window, or some
/// hundred thousand small packets.
pub const HELD_BYTES: usize = 16 << 20;
/// Kernel memory for frames that passed the gate while it was closing, or after it was opened again.
const PASSED_BYTES: usize = 4 << 20;
/// How often it is looked at how full the kernel's buffers are: half of [`PASSED_BYTES`] comes in that time at 3 Gbit/s.
const LOOK: Duration = Duration::from_millis(5);
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
    /// Whether it carries a packet of IP, and not one of neighbour discovery.
    fn is_packet(&self) -> bool {
        self.bytes.get(OFFLOAD_HEADER..).is_some_and(is_packet)
    }

    /// Whether it carries a datagram.
    pub fn is_datagram(&self) -> bool {
        self.bytes.get(OFFLOAD_HEADER..).is_some_and(is_datagram)
    }

    /// Whether it carries a datagram to a group, or to all: one that reaches both places of a container that moves.
    pub fn is_to_group(&self) -> bool {
        self.bytes.get(OFFLOAD_HEADER..).is_some_and(is_to_group)
    }
}

/// What ICMP of IPv6 is to IP.
pub(crate) const ICMP6: u8 = 58;
/// Where in a frame it says what it is for, if no other header is before it.
pub(crate) const ICMP6_TYPE_AT: usize = 14 + 40;
/// What it says then in neighbour discovery (RFC 4861).
pub(crate) const NEIGHBOUR_DISCOVERY: RangeInclusive<u8> = 133..=137;

/// What [`Gate::open_but_to_packets`](crate::Gate::open_but_to_packets) keeps out.
pub(crate) fn is_packet(frame: &[u8]) -> bool {
    let discovers = |frame: &[u8]| {
        protocol(frame) == Some(ICMP6)
            && frame.get(ICMP6_TYPE_AT).is_some_and(|kind| NEIGHBOUR_DISCOVERY.contains(kind))
    };
    match kind(frame) {
        Some(IPV4) => true,
        Some(IPV6) => !discovers(frame),
        _ => false,
    }
}

pub(crate) fn is_datagram(frame: &[u8]) -> bool {
    const UDP: u8 = 17;
    protocol(frame) == Some(UDP)
}

fn kind(frame: &[u8]) -> Option<u16> {
    frame.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]]))
}

/// What IP says that it carries.
fn protocol(frame: &[u8]) -> Option<u8> {
    match kind(frame)? {
        IPV4 => frame.get(IPV4_PROTOCOL_AT).copied(),
        IPV6 => frame.get(IPV6_PROTOCOL_AT).copied(),
        _ => None,
    }
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
/// at the very moment of a look is kept until it is seen behind the gate by a later one. The
/// last look after the gate was opened again ([`finish`](Self::finish)) waits until the kernel has nothing between the two
/// points. In doubt (too much passes at once) a frame is held, thus delivered twice, rather than lost.
///
/// The kernel, when its buffers are full, can drop the newest frames only. So a thread looks every few milliseconds how full they are, and collects
/// what is there before they are; the [`Queue`] that it comes to then loses its oldest ones. A blackout in which no buffer becomes half full
/// never sees it at work.
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
    lines: Arc<Mutex<Lines>>,
    begun: bool,
    room: Room,
}

/// What the hold and the thread that makes room share.
struct Lines {
    lines: Vec<Line>,
    buffer: Vec<u8>,
    bound: usize,
    scope: Scope,
}

impl Lines {
    fn collect(&mut self) {
        for line in &mut self.lines {
            line.collect(&mut self.buffer, self.bound, self.scope);
        }
    }

    fn take(&mut self, is_wanted: fn(&HeldFrame) -> bool) -> Vec<HeldFrame> {
        self.lines.iter_mut().flat_map(|line| line.kept.take(is_wanted)).collect()
    }
}

impl Hold {
    /// Opens the sockets inside `netns`, which hear nothing yet. `bound` is what the frames held for one interface may occupy, in bytes, of the
    /// process's memory; while they wait to be collected they may occupy as much of the kernel's. When more comes the oldest are dropped, so that what is
    /// kept has no gap. The value keeps the namespace alive; dropping it takes the kernel some milliseconds, so do it when time is cheap.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], an interface of the identity that is not there, the
    /// system's refusal.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity, bound: usize) -> Result<Self, NetworkError> {
        Self::prepare_for(netns, identity, bound, Scope::All)
    }

    /// The same for a gate that is to be [closed to packets of IP alone](crate::Gate::open_but_to_packets).
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(crate) fn prepare_for_packets(
        netns: &Path,
        identity: &NetworkIdentity,
        bound: usize,
    ) -> Result<Self, NetworkError> {
        Self::prepare_for(netns, identity, bound, Scope::Packets)
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
                    let socket = PacketSocket::open()?;
                    socket.receive_buffer(bytes)?;
                    Ok(socket)
                };
                let refused = |e: io::Error| NetworkError::refused(what(), e);
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
                    kept: Queue::default(),
                    dropped: 0,
                });
            }
            Ok(lines)
        })?;
        let lines = Arc::new(Mutex::new(Lines { lines, buffer: vec![0; LONGEST], bound, scope }));
        let room = Room::prepare(Arc::clone(&lines)).map_err(|e| {
            NetworkError::refused(format!("prepare to hold packets of network namespace {}", netns.display()), e)
        })?;
        Ok(Self { netns: netns.to_owned(), lines, begun: false, room })
    }

    /// Starts holding, right before [`Gate::close`](crate::Gate::close): what still passes until the gate is closed is
    /// recognised and left out. Takes microseconds. Once begun, it goes on.
    ///
    /// # Errors
    /// The system's refusal; the container is as it was, and the gate can be closed without a hold.
    pub fn begin(&mut self) -> Result<(), NetworkError> {
        if self.begun {
            return Ok(());
        }
        for line in &self.lines().lines {
            // Behind the gate first: whatever is then seen before it and passes is seen behind it too.
            let begun = line.behind.iter().try_for_each(|(protocol, socket)| socket.listen(line.index, *protocol));
            begun.and_then(|()| line.before.listen(line.index, ALL)).map_err(|e| {
                let what = format!("hold packets for {} of network namespace {}", line.name, self.netns.display());
                NetworkError::refused(what, e)
            })?;
        }
        self.begun = true;
        self.room.begin();
        Ok(())
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room in the kernel where so much passes that this cannot be left to the thread. Never waits.
    pub fn collect(&mut self) {
        drop(self.collected());
    }

    /// Looks through what came since the last time, and keeps what may have to be delivered.
    fn collected(&self) -> MutexGuard<'_, Lines> {
        let mut lines = self.lines();
        lines.collect();
        lines
    }

    /// What was held since the last call, for each interface in the order of arrival. Never waits. For a gate that is closed
    /// and was so for some time (milliseconds, where processors are virtual ones): of a frame that another processor is just
    /// carrying past it, it is not known whether it passes.
    pub fn take(&mut self) -> Vec<HeldFrame> {
        self.take_if(|_| true)
    }

    /// The packets of IP among them, for a gate that is [closed to these alone](crate::Gate::open_but_to_packets). Never waits.
    pub(crate) fn take_packets(&mut self) -> Vec<HeldFrame> {
        self.take_if(HeldFrame::is_packet)
    }

    /// Those of them that are no datagrams to groups.
    pub(crate) fn take_to_one(&mut self) -> Vec<HeldFrame> {
        self.take_if(|frame| frame.is_packet() && !frame.is_to_group())
    }

    /// Datagrams to groups, for a gate that is [closed to these alone](crate::Gate::open_but_to_groups). Never waits.
    pub(crate) fn take_groups(&mut self) -> Vec<HeldFrame> {
        self.take_if(HeldFrame::is_to_group)
    }

    fn take_if(&mut self, is_wanted: fn(&HeldFrame) -> bool) -> Vec<HeldFrame> {
        self.collected().take(is_wanted)
    }

    /// Whether any datagrams are held.
    pub fn has_datagrams(&mut self) -> bool {
        self.collected().lines.iter().any(|line| line.kept.frames().any(HeldFrame::is_datagram))
    }

    /// From now on nothing but datagrams is held: the gate has been opened to all else. What else was held since the last call, without waiting for
    /// what another processor carries between the two points: it is better delivered twice than late.
    pub(crate) fn leave_all_but_datagrams(&mut self) -> Vec<HeldFrame> {
        let narrow = |sockets: fn(&Line) -> Vec<&PacketSocket>| {
            let lines = self.lines();
            for socket in lines.lines.iter().flat_map(sockets) {
                if let Err(error) = socket.only_datagrams() {
                    tracing::warn!(netns = %self.netns.display(), %error, "more than datagrams is looked through");
                }
            }
        };
        // In this order: what was seen before the gate has its chance to be seen behind it.
        narrow(|line| vec![&line.before]);
        let others = self.collected().take(|frame| !frame.is_datagram());
        narrow(|line| line.behind.iter().map(|(_, socket)| socket).collect());
        self.lines().scope = Scope::Datagrams;
        others
    }

    /// From now on datagrams to groups are not held any more: they reach the container elsewhere.
    pub fn leave_groups(&mut self) {
        self.take_groups();
        self.lines().scope = Scope::Others;
    }

    /// Waits until a frame is seen, at most so long; whether one was.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let lines = self.lines();
        let mut sockets: Vec<_> =
            lines.lines.iter().map(|line| PollFd::new(line.before.as_fd(), PollFlags::POLLIN)).collect();
        let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
        poll(&mut sockets, patience).is_ok_and(|ready| ready > 0)
    }

    /// Ends the holding once the gate is open again: what was held since the last call and did not pass after all. Waits until
    /// the kernel has carried on what it had between the two points, some 20 ms.
    pub fn finish(&mut self) -> Vec<HeldFrame> {
        // Makes room for what passes while that is waited for.
        let lines = self.collected();
        if let Err(error) = lines.lines.iter().try_for_each(|line| line.before.listen_no_more(line.index)) {
            tracing::warn!(netns = %self.netns.display(), %error, "held packets may be delivered twice");
        }
        drop(lines);
        self.take()
    }

    /// How many frames were lost because more came than the bound allows. As of the last look.
    pub fn dropped(&self) -> u64 {
        self.lines().lines.iter().map(Line::dropped).sum()
    }
}

/// The thread that makes room while there is something to hold; it ends with this value.
struct Room {
    /// Says that the holding begins; gone, it ends the thread.
    begin: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Room {
    fn prepare(lines: Arc<Mutex<Lines>>) -> io::Result<Self> {
        let (begin, begun) = channel();
        let thread = std::thread::Builder::new().name("hold".to_owned()).spawn(move || {
            let mut is_over = begun.recv().is_err();
            while !is_over {
                is_over = begun.recv_timeout(LOOK) == Err(RecvTimeoutError::Disconnected);
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.lines.iter().any(Line::is_filling) {
                    lines.collect();
                }
            }
        })?;
        Ok(Self { begin: Some(begin), thread: Some(thread) })
    }

    fn begin(&self) {
        if let Some(begin) = &self.begin {
            // Without the thread the kernel drops the newest frames, and nothing else is lost.
            let _ = begin.send(());
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.begin = None;
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}
