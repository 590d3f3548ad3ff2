//! The way back: what was done is undone, after a failure before the decision as well as when an operator has given the
//! migration up after it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tranship_coordinator::{Failure, SourceStep};
use tranship_engine::{EngineError, State};
use tranship_network::{Announcer, Gate};
use tranship_types::Original;
use tranship_wire::Purpose;
use tranship_wire::message::{Request, Response};

use super::{SourceRun, failed};
use crate::cpu_share;
use crate::groups::Turn;
use crate::layout::Role;
use crate::node;
use crate::paths;
use crate::stdio;

/// How long a dump that is under way is let finish when it is no longer wanted.
const DUMP_END: Duration = Duration::from_secs(60);
/// The least of that, and where the migration was interrupted: a dump takes tens of milliseconds, and one that is killed in the middle
/// leaves more to be put right.
const LEAST_DUMP_END: Duration = Duration::from_secs(1);
const DUMP_END_AT_ONCE: Duration = Duration::from_millis(500);
/// How long the destination may take to answer a call, and to undo everything before it is asked again.
const DIAL: Duration = Duration::from_secs(5);
const UNDO: Duration = Duration::from_secs(15);
/// The same where the migration was interrupted, and somebody waits for its end.
const AT_ONCE: (Duration, Duration) = (Duration::from_millis(300), Duration::from_millis(500));

/// Claims the addresses of the container with this network namespace.
pub(super) fn announce(namespace: &Path) -> Result<(), Failure> {
    let identity = tranship_network::capture(namespace).map_err(failed)?;
    Announcer::prepare(namespace, &identity).and_then(|mut announcer| announcer.announce()).map_err(failed)
}

impl SourceRun {
    /// Undoes one step.
    pub(super) fn take_back(&mut self, step: SourceStep) -> Result<(), Failure> {
        match step {
            SourceStep::Inspect | SourceStep::Connect | SourceStep::AwaitReady => Ok(()),
            SourceStep::Offer => {
                // The container does not depend on it: the destination is told in the background until it has heard.
                let patience = if self.interrupt.is_raised() { AT_ONCE } else { (DIAL, UNDO) };
                if let Err(failure) = self.confirm_undone_within(patience) {
                    tracing::info!(id = %self.id, %failure, "the destination does not know yet that it is off");
                }
                Ok(())
            }
            SourceStep::Precopy => {
                (self.tracker, self.shared) = (None, None);
                self.unthrottle()
            }
            SourceStep::Arm => {
                let ended = self.layout.end_front(Role::Dump, DUMP_END);
                self.end_engine(DUMP_END);
                self.streams.clear();
                self.crew.clear();
                (self.demand, self.files, self.trees, self.log) = (None, None, None, None);
                // It is noted there what is still to be given back.
                let given = cpu_share::give_back(&self.layout);
                let parted = paths::undo(&self.node, &self.id);
                ended.and(parted).and(given.and_then(|()| self.layout.remove()))
            }
            SourceStep::Freeze => {
                self.turn.iter().for_each(Turn::leaves_unit);
                // Needs neither engine nor thaw, which may fail: later undo removes the note.
                let given = cpu_share::give_back(&self.layout);
                // The container does not wait for its engine, which may be silent; or there is no process to ask it
                // with.
                let freezer = match &self.inspection {
                    Some((container, _)) => container.freezer.clone(),
                    None => match self.engine.inspect(&self.name) {
                        Ok(container) => container.freezer,
                        Err(EngineError::NoSuchContainer { .. }) => return Ok(()),
                        Err(error) => return Err(failed(error)),
                    },
                };
                if !freezer.is_there() {
                    // It has ended.
                    return Ok(());
                }
                self.let_original_run(&freezer)?;
                self.close_images();
                // It may have been closed to new connections, and no further.
                self.open_gate_again().and(given)
            }
            SourceStep::CloseGate => self.open_gate_again(),
            // A dump must have ended before the tasks are let go.
            SourceStep::Transfer => {
                self.push = None;
                let container = self.container();
                let freezer = container.as_ref().ok().map(|container| &container.freezer);
                self.layout.end_dump(self.patience_with_dump(), freezer)?;
                // A criu that was killed has left them in it.
                let pids = container.and_then(|container| container.processes().map_err(failed));
                let ended = tranship_network::end_repair(&pids.unwrap_or_default());
                if ended > 0 {
                    tracing::warn!(id = %self.id, ended, "connections were taken out of repair mode");
                }
                Ok(())
            }
            SourceStep::Deliver | SourceStep::Drain => {
                stdio::end(&stdio::of_left(&self.node, self.id.as_str()));
                self.give_up();
                Ok(())
            }
            SourceStep::Release => Err(failed("this cannot be undone")),
        }
    }

    /// What there is of the original now.
    pub fn look_at_original(&self) -> Original {
        let before = self.inspection.as_ref().map(|(container, _)| container.init);
        match self.engine.inspect(&self.name) {
            Err(EngineError::NoSuchContainer { .. }) => Original::Gone,
            Err(_) => Original::Unknown,
            Ok(found) => match found.state {
                State::Running if before.is_some_and(|init| ![0, found.init].contains(&init)) => Original::Restarted,
                // Its engine may not have noticed yet.
                State::Running if found.init != 0 && !node::is_alive(found.init) => Original::Stopped,
                State::Running => Original::Running,
                State::Paused => Original::Paused,
                State::Stopped | State::Created => Original::Stopped,
            },
        }
    }

    /// How long a dump that nobody waits for may go on: the container is frozen meanwhile.
    fn patience_with_dump(&self) -> Duration {
        match self.interrupt.is_raised() {
            true => DUMP_END_AT_ONCE,
            false => self.interrupt.freeze_left().clamp(LEAST_DUMP_END, DUMP_END),
        }
    }

    /// From now on everything is undone of a migration that was decided.
    pub fn give_up(&mut self) {
        (self.given_up, self.push, self.control) = (true, None, None);
    }

    fn open_gate_again(&mut self) -> Result<(), Failure> {
        let namespace = self.namespace_here();
        if let Some(path) = &namespace {
            if self.given_up {
                tranship_network::step_forward(path).map_err(failed)?;
            }
            if self.gate.is_none() {
                let identity = tranship_network::capture(path).map_err(failed)?;
                self.gate = Some(Gate::prepare(path, &identity.names()).map_err(failed)?);
            }
        }
        self.open_gate_in_order()?;
        if let Some(path) = namespace.filter(|_| self.given_up) {
            // The network may have heard that it is on the destination.
            announce(&path)?;
        }
        self.deliver_here();
        Ok(())
    }

    /// The network namespace that it owns, if that is there.
    fn namespace_here(&self) -> Option<PathBuf> {
        if self.joins_network() {
            return None;
        }
        self.container().ok().and_then(|c| c.network_namespace()).filter(|path| path.exists())
    }

    /// Tells the destination that the migration is off, until it has undone everything. Always over a new link: on the
    /// old one answers to earlier requests may be on their way, and its end tells the destination to give up waiting.
    pub fn confirm_undone(&mut self) -> Result<(), Failure> {
        self.confirm_undone_within((DIAL, UNDO))
    }

    fn confirm_undone_within(&mut self, (dial, undo): (Duration, Duration)) -> Result<(), Failure> {
        self.control = None;
        if !self.offered || self.undo_confirmed {
            return Ok(());
        }
        self.control = Some(self.node.dial_within(dial, &self.peer, Purpose::Control, Some(&self.id))?);
        let request = if self.given_up { Request::Void } else { Request::Abort };
        let leftovers = match self.ask(&request, undo)? {
            Response::Aborted { leftovers } if !self.given_up => leftovers,
            Response::Voided { ran, leftovers } if self.given_up => {
                self.stray_removed |= ran;
                // It may have answered for the addresses until just now.
                if let Some(path) = self.namespace_here().filter(|_| ran)
                    && let Err(failure) = announce(&path)
                {
                    tracing::warn!(id = %self.id, %failure, "the addresses could not be claimed again");
                }
                leftovers
            }
            other => return Err(self.unexpected(&other)),
        };
        if leftovers.is_empty() {
            self.undo_confirmed = true;
            return Ok(());
        }
        Err(Failure::new(format!("node {} could not undo everything: {}", self.peer, leftovers.join("; "))))
    }
}
