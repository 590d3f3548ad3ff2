//! A member of a group does not do each step at once.

use std::time::Duration;

use tranship_coordinator::group::Stage;
use tranship_coordinator::{Failure, SourceStep};
use tranship_wire::message::{Request, Response};

use super::{PREPARE, SourceRun};

/// After how long of waiting the destination is asked whether it is still there.
const ASK_AFTER: Duration = Duration::from_secs(5);

/// The stage that begins with a step.
fn stage(step: SourceStep) -> Option<Stage> {
    match step {
        // What is armed (streams, copies of files, criu) is not left waiting: the link is free then.
        SourceStep::Arm => Some(Stage::Send),
        SourceStep::Freeze => Some(Stage::Frozen),
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
            while !turn.enter(stage, ASK_AFTER)? {
                match self.ask(&Request::Clock, PREPARE)? {
                    Response::Clock { .. } => {}
                    other => return Err(self.unexpected(&other)),
                }
            }
        }
        turn.spends_on(step.phase());
        Ok(())
    }
}
