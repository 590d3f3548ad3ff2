//! What a move waits for before its steps: freeze slots, and in a group the other members. Where all of a group move or
//! none does, it does not decide alone.

use std::time::{Duration, Instant};

use tranship_coordinator::group::Stage;
use tranship_coordinator::{Failure, SourceStep};
use tranship_sys::clock::monotonic_ns;
use tranship_types::Phase;
use tranship_wire::message::{Request, Response};

use super::{PREPARE, SourceRun};
use crate::freeze_slots::{Owner, Place, Slot};
use crate::groups::Turn;

/// After how long of waiting the destination is asked whether it is still there.
const ASK_AFTER: Duration = Duration::from_secs(5);

/// How often it is asked while the container is frozen, and how long the answer may take.
const ASK_HELD: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(5);
/// How long a frozen container waits for the others of its group at most.
const HOLD: Duration = Duration::from_secs(60);
/// How long one that may be resumed waits for those that are to be resumed before it.
const ORDER: Duration = Duration::from_secs(2);

/// How long a move waits for its freeze slots in all, and for one of them before it sends what was written meanwhile.
const SLOT: Duration = Duration::from_secs(60);
const ASK_SLOT: Duration = Duration::from_secs(1);
/// The same where the others of the group wait for it, each with little left to send.
const SLOT_OF_GROUP: Duration = Duration::from_secs(3);
/// What takes no longer than this and two round trips is no wait.
const NO_WAIT: Duration = Duration::from_millis(10);

/// The freeze slots of a move.
#[derive(Default)]
pub(super) struct Slots {
    /// It has them, or has waited for long enough.
    done: bool,
    /// The destination gives slots, too.
    peer_gives: bool,
    /// Since when it waits.
    begun: Option<Instant>,
    place: Option<Place>,
    here: Option<Slot>,
}

impl Slots {
    /// Notes whether the destination gives slots.
    pub(super) fn of_peer(&mut self, gives: bool) {
        self.peer_gives = gives;
    }

    /// The container runs on the destination.
    pub(super) fn linger(&self) {
        self.here.iter().for_each(Slot::linger);
    }

    /// Gives this node's slot back. The destination's is given back there.
    pub(super) fn give_back(&mut self) {
        (self.place, self.here) = (None, None);
    }
}

/// Whether a step as a whole takes processors from containers that are frozen.
pub(super) fn is_preparation(step: SourceStep) -> bool {
    // Release waits for its own, and the destination for what an offer has it do.
    matches!(step, SourceStep::Inspect | SourceStep::Arm)
}

/// The stage that begins with a step.
fn stage(step: SourceStep) -> Option<Stage> {
    match step {
        SourceStep::Precopy => Some(Stage::Send),
        SourceStep::Freeze => Some(Stage::Freezing),
        SourceStep::CloseGate => Some(Stage::Frozen),
        SourceStep::Transfer => Some(Stage::Locked),
        SourceStep::Drain => Some(Stage::Resumed),
        SourceStep::Release => Some(Stage::Release),
        _ => None,
    }
}

impl SourceRun {
    /// Waits until it is this member's turn to do a step. Meanwhile the destination, which may be prepared already, is kept
    /// from thinking that nobody is there, and its loss is noticed.
    pub(super) fn take_turn(&mut self, step: SourceStep) -> Result<(), Failure> {
        let Some(turn) = self.turn.clone() else { return Ok(()) };
        if let Some(stage) = stage(step) {
            self.wait_for(&turn, stage)?;
        }
        // The link has an answer to come by now, and cannot be asked meanwhile.
        if step == SourceStep::AwaitReady && turn.is_shared() && !turn.enter(Stage::Dumped, HOLD)? {
            return Err(Failure::new(format!(
                "a container that shares the network of {} was not dumped within {} s in which both were frozen; try again",
                self.name,
                HOLD.as_secs()
            )));
        }
        if step == SourceStep::Deliver && turn.is_shared() {
            // Not one that waits for a destination that was lost meanwhile.
            turn.enter(Stage::Resuming, ORDER)?;
        }
        turn.spends_on(step.phase());
        Ok(())
    }

    /// Waits until it may enter a stage.
    fn wait_for(&mut self, turn: &Turn, stage: Stage) -> Result<(), Failure> {
        while !turn.enter(stage, ASK_AFTER)? {
            self.ask_there(PREPARE)?;
        }
        Ok(())
    }

    /// Asks the destination whether it is still there.
    fn ask_there(&mut self, patience: Duration) -> Result<(), Failure> {
        match self.ask(&Request::Clock, patience)? {
            Response::Clock { .. } => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Little of its memory is left to send: waits for the others of its group, and for its freeze slots. True if it
    /// has waited: what was written meanwhile is to be sent now, and then this is to be called again.
    pub(super) fn settle_with_others(&mut self) -> Result<bool, Failure> {
        Ok(self.settle_with_group()? || self.take_slots()?)
    }

    /// Takes the freeze slot of this node, then that of the destination. True if it has waited.
    fn take_slots(&mut self) -> Result<bool, Failure> {
        if self.slots.done || self.interrupt.hurries() {
            self.slots.place = None;
            return Ok(false);
        }
        let begun = *self.slots.begun.get_or_insert_with(Instant::now);
        let group = self.turn.as_ref().filter(|turn| turn.is_shared() || turn.unit().is_some()).map(Turn::group);
        let start = monotonic_ns();
        if self.slots.here.is_none() {
            let owner = || group.clone().map_or_else(|| Owner::Move(self.id.clone()), Owner::Group);
            let place = self.slots.place.take().unwrap_or_else(|| self.node.leaving_slots.queue(owner()));
            match place.wait(ASK_SLOT, &|| self.interrupt.is_raised() || self.interrupt.hurries()) {
                Ok(slot) => self.slots.here = Some(slot),
                Err(place) => self.slots.place = Some(place),
            }
            self.interrupt.check()?;
        }
        let mut taken = self.slots.here.is_some();
        if taken && self.slots.peer_gives {
            taken = match self.ask(&Request::FreezeSlot { group }, PREPARE)? {
                Response::FreezeSlot { taken } => taken,
                other => return Err(self.unexpected(&other)),
            };
        } else if !taken {
            self.ask_there(PREPARE)?;
        }
        let now = monotonic_ns();
        // The error of the clock is half of a round trip.
        let round_trips = Duration::from_nanos(4 * self.clock.error_ns);
        let waited = Duration::from_nanos(now.saturating_sub(start)) > NO_WAIT + round_trips;
        if waited {
            self.timeline.note("wait: for other moves to be frozen", start, now);
        }
        let shared = self.turn.as_ref().is_some_and(Turn::is_shared);
        if taken || begun.elapsed() > if shared { SLOT_OF_GROUP } else { SLOT } {
            (self.slots.done, self.slots.place) = (true, None);
            return Ok(waited);
        }
        Ok(true)
    }

    /// The same for the others of a group that moves as a whole, once.
    fn settle_with_group(&mut self) -> Result<bool, Failure> {
        let Some(turn) = self.turn.clone().filter(|turn| turn.is_shared() && !self.poised) else { return Ok(false) };
        self.poised = true;
        turn.enter(Stage::Settled, ASK_AFTER)?;
        self.wait_for(&turn, Stage::Poised)?;
        turn.spends_on(Phase::Precopy);
        Ok(true)
    }

    /// The copy is held: where all of a group move or none does, waits for their decision. True if all move.
    pub(super) fn agree_with_others(&mut self) -> Result<bool, Failure> {
        let Some(turn) = self.turn.clone().filter(Turn::is_shared) else { return Ok(false) };
        let deadline = Instant::now() + HOLD;
        while !turn.agree(ASK_HELD)? {
            let late = (Instant::now() > deadline).then(|| turn.not_held()).flatten();
            let seen = match late {
                Some(name) => Err(Failure::new(format!(
                    "container {name} was not ready within {} s in which others of its group were frozen; move them in a mode \
                     in which memory does not travel in the freeze, or one by one",
                    HOLD.as_secs()
                ))),
                None => self.ask_there(ANSWER).and_then(|()| self.still_frozen()),
            };
            if let Err(failure) = seen {
                return turn.leave(failure).map(|()| true);
            }
        }
        let now = monotonic_ns();
        if let Some(ready) = self.ready_ns.replace(now) {
            self.timeline.note("decision: of the group", ready, now);
        }
        Ok(true)
    }
}
