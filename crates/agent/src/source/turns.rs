//! A member of a group does not do each step at once, and where all of it move or none does, does not decide alone.

use std::time::{Duration, Instant};

use tranship_coordinator::group::Stage;
use tranship_coordinator::{Failure, SourceStep};
use tranship_sys::clock::monotonic_ns;
use tranship_types::Phase;
use tranship_wire::message::{Request, Response};

use super::{PREPARE, SourceRun};
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

    /// Little of its memory is left to send: where all of a group move or none does, waits until that is so for all, once.
    /// True if it has waited: what was written meanwhile is to be sent now.
    pub(super) fn settle_with_others(&mut self) -> Result<bool, Failure> {
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
