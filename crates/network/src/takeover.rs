//! Packets while a container changes its place: they come by two ways, and datagrams to groups (and to all) by both.
//!
//! ```text
//! source       ──── held ──────────────▶ forwarded ──── the last ones ─────── those to groups, forwarded ──── the last ones
//! destination        gate closed to packets: held, and kept ───┐  │                                            │
//!                    what is forwarded is delivered ◀──────────┼──┘                                            │
//!                              kept ──▶ delivered, gate closed to those to groups: held, and kept              │
//!                                                              kept, but what came from the source ──▶ delivered, gate open
//! ```

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use tranship_sys::packet::OFFLOAD_HEADER;
use tranship_types::NetworkIdentity;

use crate::hold::found;
use crate::multicast::Joined;
use crate::namespace::inside;
use crate::{Gate, HeldFrame, Hold, Injector, NetworkError};

/// How long the next packet is waited for before the gate is opened.
const PAUSE: Duration = Duration::from_millis(5);

/// Delivers packets at the place that a container comes to, in their order, and datagrams to groups once each.
///
/// From the takeover on, packets come to the destination by themselves, while the source still forwards those that it has held. If the gate
/// were open to both, those would come behind later ones, and a peer's TCP take them for lost. So it stays closed to packets at first
/// ([`Gate::open_but_to_packets`]): what is forwarded is delivered at once, and what comes by itself is kept. When the source has forwarded its last
/// ones, what was kept is delivered, and the gate opened.
///
/// A datagram to a group reaches every place that the switch knows a member at, or all: from the takeover on the destination, and until the
/// switch has heard of that, and longer, the source. If both were let in, many would come twice. So where programs have joined groups
/// the gate stays closed to those for some milliseconds more ([`Gate::open_but_to_groups`]), and of what was kept only that is
/// delivered which has not come from the source. Frames are told by their bytes: of datagrams that are alike in these
/// milliseconds one may be taken for another.
pub struct Takeover {
    gate: Gate,
    hold: Hold,
    joined: Joined,
    stage: Stage,
    /// Datagrams to groups that have been delivered for the source: where to, and how often.
    delivered: HashMap<String, HashMap<Vec<u8>, u32>>,
}

/// To what the gate is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    All,
    Packets { groups: bool },
    Groups,
    Nothing,
}

impl Takeover {
    /// Opens what is needed in `netns`, which stays alive as long as the value is. `bound` is that of [`Hold::prepare`].
    ///
    /// # Errors
    /// As [`Hold::prepare`] and [`Gate::prepare`].
    pub fn prepare(netns: &Path, identity: &NetworkIdentity, bound: usize) -> Result<Self, NetworkError> {
        let gate = Gate::prepare(netns, &identity.names())?;
        let hold = Hold::prepare_for_packets(netns, identity, bound)?;
        let joined = inside(netns, || Joined::here(netns))?;
        Ok(Self { gate, hold, joined, stage: Stage::All, delivered: HashMap::new() })
    }

    /// Opens the gate but to packets, if the source says which ones are its last (`in_order`); else but to those to groups, if programs have joined any.
    /// Returns whether anything is kept: then [`take_over`](Self::take_over) or [`take_over_groups`](Self::take_over_groups) has to follow.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn open(&mut self, in_order: bool) -> Result<bool, NetworkError> {
        let groups = self.joined.any()?;
        if in_order || groups {
            self.hold.begin()?;
        }
        self.stage = match (in_order, groups) {
            (true, groups) => self.gate.open_but_to_packets().map(|()| Stage::Packets { groups }),
            (false, true) => self.gate.open_but_to_groups().map(|()| Stage::Groups),
            (false, false) => self.gate.open().map(|()| Stage::Nothing),
        }?;
        Ok(self.are_awaited())
    }

    /// How many packets that came here by themselves were more than can be held.
    pub fn dropped(&self) -> u64 {
        self.hold.dropped()
    }

    /// Whether the source's last ones are waited for.
    pub fn are_awaited(&self) -> bool {
        matches!(self.stage, Stage::Packets { .. } | Stage::Groups)
    }

    /// Takes note of what the source has held and is delivered now.
    pub fn note(&mut self, frames: &[HeldFrame]) {
        let awaited = self.are_awaited();
        for frame in frames.iter().filter(|frame| awaited && frame.is_to_group()) {
            let of_interface = self.delivered.entry(frame.interface.clone()).or_default();
            *of_interface.entry(frame.bytes[OFFLOAD_HEADER..].to_vec()).or_default() += 1;
        }
    }

    /// The source forwards no more but to groups: delivers what came here by itself, and opens the gate to what is not to a group that programs
    /// have joined.
    ///
    /// # Errors
    /// The first refusal of the system; the rest was tried all the same.
    pub fn take_over(&mut self, injector: &mut Injector) -> Result<(), NetworkError> {
        let Stage::Packets { groups } = self.stage else { return Ok(()) };
        if !groups {
            return self.take_over_groups(injector);
        }
        self.stage = Stage::Groups;
        let mut inject = |frames: Vec<HeldFrame>| injector.inject(&frames).map(drop);
        let delivered = deliver_behind(&mut self.hold, Hold::take_to_one, &mut inject);
        let opened = self.gate.open_but_to_groups();
        delivered.and(inject(self.hold.leave_all_but_datagrams())).and(opened)
    }

    /// The source forwards no more at all: delivers what came here by itself and not from the source, and opens the gate.
    ///
    /// # Errors
    /// The first refusal of the system; the rest was tried all the same.
    pub fn take_over_groups(&mut self, injector: &mut Injector) -> Result<(), NetworkError> {
        if !self.are_awaited() {
            return Ok(());
        }
        let take = if self.stage == Stage::Groups { Hold::take_groups } else { Hold::take_packets };
        self.stage = Stage::Nothing;
        let delivered = &mut self.delivered;
        let mut is_new = |frame: &HeldFrame| {
            let of_interface = delivered.get_mut(&frame.interface).filter(|_| frame.is_to_group());
            !of_interface.is_some_and(|delivered| found(delivered, &frame.bytes[OFFLOAD_HEADER..]))
        };
        let inject = |mut frames: Vec<HeldFrame>| {
            frames.retain(&mut is_new);
            injector.inject(&frames).map(drop)
        };
        open_behind(&mut self.gate, &mut self.hold, take, inject)
    }
}

/// Opens the gate of a container that goes on where it was: what was `held` is delivered first, then what comes meanwhile.
///
/// # Errors
/// The first refusal of the system; the rest was tried all the same.
pub fn reopen(
    gate: &mut Gate,
    hold: &mut Hold,
    held: &[HeldFrame],
    injector: &mut Injector,
) -> Result<(), NetworkError> {
    gate.open_but_to_packets()?;
    let delivered = injector.inject(held).map(drop);
    delivered.and(open_behind(gate, hold, Hold::take_packets, |frames| injector.inject(&frames).map(drop)))
}

/// Opens a gate that is closed to what `take` takes, with `inject` for what was held. A datagram that comes while the gate is being opened is
/// delivered late; a packet that is none at once, and at times twice.
fn open_behind(
    gate: &mut Gate,
    hold: &mut Hold,
    take: fn(&mut Hold) -> Vec<HeldFrame>,
    mut inject: impl FnMut(Vec<HeldFrame>) -> Result<(), NetworkError>,
) -> Result<(), NetworkError> {
    let delivered = deliver_behind(hold, take, &mut inject);
    let opened = gate.open();
    delivered.and(inject(hold.leave_all_but_datagrams())).and(inject(hold.finish())).and(opened)
}

/// Has what is held delivered, and returns right behind a packet, since the next one is then as far away as it can be.
fn deliver_behind(
    hold: &mut Hold,
    take: fn(&mut Hold) -> Vec<HeldFrame>,
    mut inject: impl FnMut(Vec<HeldFrame>) -> Result<(), NetworkError>,
) -> Result<(), NetworkError> {
    let (mut result, deadline) = (Ok(()), Instant::now() + PAUSE);
    let mut has_waited = false;
    loop {
        let frames = take(hold);
        let (none, left) = (frames.is_empty(), deadline.saturating_duration_since(Instant::now()));
        result = result.and(inject(frames));
        match (none, has_waited) {
            // What came while others were delivered is delivered first.
            (true, _) if !left.is_zero() && hold.wait(left) => has_waited = true,
            (false, false) if !left.is_zero() => {}
            _ => return result,
        }
    }
}
