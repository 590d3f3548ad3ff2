//! What is there, and what must never be.

use std::collections::BTreeSet;

use tranship_coordinator::{DestinationStep, Failure, SourceStep};
use tranship_types::Side;

/// The container's tasks where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Original {
    Running,
    Frozen,
    Gone,
}

/// The container's tasks where it goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    Absent,
    Held,
    Running,
}

/// Both nodes, as far as a migration touches them. What processes of their own hold, and so survives any agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    pub original: Original,
    pub restored: Restored,
    pub source_gate_open: bool,
    pub destination_gate_open: bool,
    /// What steps have made for the migration, by side.
    made: [BTreeSet<String>; 2],
    /// The decision to commit is in the source's journal.
    pub decided: bool,
    /// The source's journal says that it was given up.
    pub given_up: bool,
    /// When it was given up the restored copy ran, or was just being let run: nobody could know, and until the destination
    /// has heard that it is void, it may run beside the original.
    stray: bool,
    /// The restored tasks have been let run.
    resumed: bool,
}

impl World {
    pub fn new() -> Self {
        Self {
            original: Original::Running,
            restored: Restored::Absent,
            source_gate_open: true,
            destination_gate_open: false,
            made: Default::default(),
            decided: false,
            given_up: false,
            stray: false,
            resumed: false,
        }
    }

    /// The steps whose resources are still there.
    pub fn made(&self, side: Side) -> &BTreeSet<String> {
        &self.made[side as usize]
    }

    /// The rule of the design that is broken, if one is.
    pub fn broken_rule(&self) -> Option<&'static str> {
        let original_runs = self.original == Original::Running;
        let restored_runs = self.restored == Restored::Running;
        let rules = [
            (!(original_runs && restored_runs) || self.stray, "two copies run"),
            (!(self.source_gate_open && self.destination_gate_open) || self.given_up, "both gates are open"),
            (!restored_runs || self.decided, "the restored copy runs before the decision"),
            (!restored_runs || !self.given_up || self.stray, "a void copy was let run"),
            (!original_runs || !self.decided || self.given_up, "the original runs after the decision"),
            (self.original != Original::Gone || restored_runs, "the original is gone and no copy runs"),
            (self.original != Original::Gone || !self.given_up, "the original is gone after it was given up"),
            (!self.resumed || restored_runs || self.given_up, "the restored copy was taken away after it ran"),
            (
                !restored_runs || self.destination_gate_open || self.given_up,
                "the restored copy runs behind a closed gate",
            ),
        ];
        rules.into_iter().find(|(kept, _)| !kept).map(|(_, rule)| rule)
    }

    /// Exactly one copy runs, where the decision says, and nothing is left over.
    pub fn is_settled(&self) -> bool {
        let [source, destination] = &self.made;
        let place = if self.decided && !self.given_up {
            self.original == Original::Gone && self.restored == Restored::Running && self.destination_gate_open
        } else {
            self.original == Original::Running
                && self.source_gate_open
                && self.restored == Restored::Absent
                && !self.destination_gate_open
        };
        place && source.is_empty() && destination.is_empty()
    }

    /// It is in the source's journal that the migration is given up; the destination may be just handling the word to commit.
    pub fn give_up(&mut self, committing: bool) {
        self.stray = committing || self.restored == Restored::Running;
        self.given_up = true;
    }

    /// The destination's agent is dead: what does not run by now must not run any more, if it is void.
    pub fn destination_dies(&mut self) {
        self.stray &= self.restored == Restored::Running;
    }

    /// A step of the source has its effect.
    pub fn source_does(&mut self, step: SourceStep) {
        if SourceStep::BEFORE_COMMIT.contains(&step) {
            self.made[Side::Source as usize].insert(step.to_string());
        }
        match step {
            SourceStep::Freeze => self.original = Original::Frozen,
            SourceStep::CloseGate => self.source_gate_open = false,
            SourceStep::Release => {
                self.original = Original::Gone;
                self.made[Side::Source as usize].clear();
            }
            _ => {}
        }
    }

    /// A step of the source is undone; nothing happens where there is nothing to undo.
    pub fn source_undoes(&mut self, step: SourceStep) {
        self.made[Side::Source as usize].remove(&step.to_string());
        match step {
            SourceStep::Freeze if self.original == Original::Frozen => self.original = Original::Running,
            SourceStep::CloseGate => self.source_gate_open = true,
            _ => {}
        }
    }

    /// A step of the destination has its effect.
    pub fn destination_does(&mut self, step: DestinationStep) -> Result<(), Failure> {
        let undoable = [&DestinationStep::PREPARE[..], &DestinationStep::MAKE_READY].concat();
        if undoable.contains(&step) {
            self.made[Side::Destination as usize].insert(step.to_string());
        }
        match step {
            DestinationStep::Restore => self.restored = Restored::Held,
            DestinationStep::OpenGate => {
                assert!(!self.given_up || self.stray, "the gate of a void copy is opened");
                self.destination_gate_open = true;
            }
            DestinationStep::Resume if self.restored == Restored::Absent => {
                return Err(Failure::new("there is nothing to resume"));
            }
            DestinationStep::Resume => {
                self.restored = Restored::Running;
                self.resumed = true;
            }
            DestinationStep::Tidy => self.made[Side::Destination as usize].clear(),
            _ => {}
        }
        Ok(())
    }

    /// A step of the destination is undone; nothing happens where there is nothing to undo.
    pub fn destination_undoes(&mut self, step: DestinationStep) {
        self.made[Side::Destination as usize].remove(&step.to_string());
        match step {
            DestinationStep::OpenGate => {
                self.destination_gate_open = false;
                // Killed, behind the closed gate: it runs no more, and is still there.
                if self.restored == Restored::Running {
                    self.restored = Restored::Held;
                }
            }
            DestinationStep::Restore => {
                self.restored = Restored::Absent;
                self.stray = false;
            }
            DestinationStep::Network => self.destination_gate_open = false,
            _ => {}
        }
    }
}
