//! Datagrams to groups (and to all) while a container changes its place: both places hear them.
//!
//! ```text
//! source       ──── held ───────────────────────────▶ forwarded ──── … ──── the last ones
//! destination        gate closed to groups: held, and kept ────────┐             │
//!                    what is forwarded is delivered ◀──────────────┼─────────────┘
//!                                            kept, but what came from the source ──▶ delivered, gate open
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

/// How long the next datagram is waited for before the gate is opened.
const PAUSE: Duration = Duration::from_millis(5);

/// Delivers datagrams to groups at the place that a container comes to, once each and in their order.
///
/// A frame to a group reaches every place that the switch knows a member at, or all. So from the takeover on it comes to the
/// destination by itself, and until its switch has heard of that, and longer, to the source. If both were let in, many would come
/// twice, and those that the source has held would come behind later ones. So for some milliseconds the gate stays closed to them
/// ([`Gate::open_but_to_groups`]): the source goes on forwarding what it hears, which is delivered at once, and what comes here by
/// itself is kept. When the source has forwarded its last ones, what was kept and is none of those is delivered, and the
/// gate opened. Frames are told by their bytes: of datagrams that are alike in these milliseconds one may be taken for another.
pub struct Groups {
    gate: Gate,
    hold: Hold,
    joined: Joined,
    /// What has been delivered for the source: where to, and how often.
    delivered: HashMap<String, HashMap<Vec<u8>, u32>>,
    begun: bool,
}

impl Groups {
    /// Opens what is needed in `netns`, which stays alive as long as the value is. `bound` is that of [`Hold::prepare`].
    ///
    /// # Errors
    /// As [`Hold::prepare`] and [`Gate::prepare`].
    pub fn prepare(netns: &Path, identity: &NetworkIdentity, bound: usize) -> Result<Self, NetworkError> {
        let gate = Gate::prepare(netns, &identity.names())?;
        let hold = Hold::prepare_for_groups(netns, identity, bound)?;
        let joined = inside(netns, || Joined::here(netns))?;
        Ok(Self { gate, hold, joined, delivered: HashMap::new(), begun: false })
    }

    /// Opens the gate; but to datagrams to groups, if programs have joined any. Returns whether that is so: then
    /// [`take_over`](Self::take_over) has to follow.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn open(&mut self) -> Result<bool, NetworkError> {
        self.begun = self.joined.any()?;
        match self.begun {
            true => self.hold.begin().and_then(|()| self.gate.open_but_to_groups())?,
            false => self.gate.open()?,
        }
        Ok(self.begun)
    }

    /// Whether [`take_over`](Self::take_over) has to follow.
    pub fn are_awaited(&self) -> bool {
        self.begun
    }

    /// Takes note of what the source has held and is delivered now.
    pub fn note(&mut self, frames: &[HeldFrame]) {
        for frame in frames.iter().filter(|frame| self.begun && frame.is_to_group()) {
            let of_interface = self.delivered.entry(frame.interface.clone()).or_default();
            *of_interface.entry(frame.bytes[OFFLOAD_HEADER..].to_vec()).or_default() += 1;
        }
    }

    /// Delivers what came here by itself and not from the source, and opens the gate.
    ///
    /// # Errors
    /// The first refusal of the system; the rest was tried all the same.
    pub fn take_over(mut self, injector: &mut Injector) -> Result<(), NetworkError> {
        let delivered = &mut self.delivered;
        let mut is_new = |frame: &HeldFrame| {
            let of_interface = delivered.get_mut(&frame.interface);
            !of_interface.is_some_and(|delivered| found(delivered, &frame.bytes[OFFLOAD_HEADER..]))
        };
        let inject = |mut frames: Vec<HeldFrame>| {
            frames.retain(&mut is_new);
            injector.inject(&frames).map(drop)
        };
        open_behind(&mut self.gate, &mut self.hold, inject)
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
    gate.open_but_to_groups()?;
    let delivered = injector.inject(held).map(drop);
    delivered.and(open_behind(gate, hold, |frames| injector.inject(&frames).map(drop)))
}

/// Opens a gate that is closed to groups, with `inject` for what was held of them: right behind one of them, since the next one is
/// then as far away as it can be. One that comes all the same while the gate is being opened is delivered late.
fn open_behind(
    gate: &mut Gate,
    hold: &mut Hold,
    mut inject: impl FnMut(Vec<HeldFrame>) -> Result<(), NetworkError>,
) -> Result<(), NetworkError> {
    let mut result = inject(hold.take_groups());
    let deadline = Instant::now() + PAUSE;
    let next = loop {
        let frames = hold.take_groups();
        let left = deadline.saturating_duration_since(Instant::now());
        if !frames.is_empty() || !hold.wait(left) {
            break frames;
        }
    };
    result = result.and(inject(next));
    let opened = gate.open();
    result.and(inject(hold.finish())).and(opened)
}
