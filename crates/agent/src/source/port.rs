//! What the coordinator asks of a source.

use std::time::Duration;

use tranship_coordinator::{self as coordinator, Failure, Fault, Retry, SourcePort, SourceStep};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::reserve;
use tranship_sys::schedule::{self, Standing};
use tranship_transport::Link;
use tranship_types::Phase;

use super::push::Push;
use super::{LAST_WORD, SourceRun, turns};
use crate::groups::Turn;
use crate::{node, space};

impl SourcePort for SourceRun {
    fn run(&mut self, step: SourceStep) -> Result<(), Failure> {
        let may_be_interrupted = step <= SourceStep::AwaitReady;
        if may_be_interrupted {
            self.interrupt.check()?;
        }
        self.take_turn(step).map_err(|failure| self.cause(failure))?;
        if step == SourceStep::Release {
            self.slots.give_back();
        }
        let _preparation =
            turns::is_preparation(step).then(|| self.node.leaving_slots.prepare(&|| self.interrupt.is_raised()));
        let start = monotonic_ns();
        // The container waits for it.
        let _reserve = (step == SourceStep::Deliver).then(reserve::open_if_needed);
        let mut done = self.perform(step).map_err(|failure| space::explained(&self.node, self.node.lacking(failure)));
        if may_be_interrupted {
            done = done.map_err(|failure| self.cause(failure)).and_then(|()| self.interrupt.check());
        }
        // Those in the blackout tell of what they do in finer parts.
        match step.phase() {
            Phase::Plan | Phase::Prepare | Phase::Precopy => {
                self.timeline.note(step.to_string(), start, monotonic_ns());
            }
            Phase::Drain | Phase::Release => {
                self.timeline.note(step.to_string(), start, monotonic_ns());
                self.report_parts();
            }
            _ => {}
        }
        done
    }

    fn undo(&mut self, step: SourceStep) -> Result<(), Failure> {
        schedule::stand(Standing::Ordinary);
        self.awake = None;
        let undone = self.take_back(step);
        if step <= SourceStep::Freeze {
            self.slots.give_back();
        }
        undone
    }

    fn agree(&mut self) -> Result<bool, Failure> {
        let agreed = coordinator::caught("the decision of the group", || self.agree_with_others());
        // A panic may have come when it was taken already.
        let agreed = agreed.or_else(|failure| match self.turn.as_ref().filter(|turn| turn.is_shared()) {
            Some(turn) => turn.leave(failure).map(|()| true),
            None => Err(failure),
        });
        if agreed.map_err(|failure| self.cause(failure))? {
            return Ok(true);
        }
        self.interrupt.decide().map(|()| false)
    }

    fn agreed(&mut self) {
        self.turn.iter().for_each(Turn::handed_down);
    }

    fn entered(&mut self, phase: Phase) {
        match phase {
            Phase::Undo => {
                match self.given_up {
                    true => self.interrupt.undoing(),
                    false => self.interrupt.not_decided(),
                }
                self.turn.iter().for_each(Turn::stops);
                self.reserve = reserve::open_if_needed();
            }
            Phase::Undone => self.reserve = None,
            _ => {}
        }
        if phase == Phase::Precopy && !self.report.read().mode.has_rounds() {
            return;
        }
        tracing::info!(id = %self.id, container = %self.name, %phase, "source");
        self.report.change(|r| r.phase = phase);
    }

    fn try_again(&mut self, step: SourceStep, failure: &Failure) -> Retry {
        tracing::warn!(id = %self.id, %step, %failure, "will be tried again");
        (self.control, self.awake) = (None, None);
        self.slots.give_back();
        self.attempts += 1;
        let (error, waiting) = (format!("after the commit point, still trying: {failure}"), self.waits(failure));
        self.report.change(|r| (r.error, r.waiting) = (Some(error), Some(waiting)));
        // A word to commit that arrived later would let a void copy run.
        if self.unanswered.is_none_or(|said| said.elapsed() > LAST_WORD)
            && let Some(word) = self.node.words.take(&self.id, step.phase())
        {
            return Retry::GiveUp(word);
        }
        match self.node.pause(Duration::from_millis(50 << self.attempts.min(6))) {
            true => Retry::Again,
            false => Retry::Stop,
        }
    }

    fn inject(&mut self, fault: Fault) {
        tracing::warn!(?fault, "injected on the source");
        match fault {
            Fault::Die => node::die(),
            Fault::Hold => node::hold(),
            Fault::KillCriu => {
                if let Some(front) = &self.front {
                    node::kill(front.criu);
                }
            }
            Fault::Cut => {
                // An answer that has come and was not read yet is lost with it.
                self.control.take().iter().for_each(|c| c.closer().close());
                self.streams.iter_mut().for_each(|s| s.link().closer().close());
                self.push.iter().for_each(Push::cut);
            }
            Fault::Delay(time) => self.interrupt.delay(time),
            Fault::Error | Fault::Panic => {}
        }
    }
}
