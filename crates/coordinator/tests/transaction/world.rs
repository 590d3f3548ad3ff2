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

/// Migrations that one run can have, one after the other.
pub const MIGRATIONS: usize = 2;

/// What a migration has made on the destination, and what was decided about it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Copy {
    restored: Restored,
    gate_open: bool,
    /// The steps whose resources are there.
    made: BTreeSet<String>,
    /// The decision to commit is in the source's journal.
    decided: bool,
    /// The source's journal says that it was given up.
    given_up: bool,
    /// When it was given up the restored copy ran, or was just being let run: nobody could know, and until the destination
    /// has heard that it is void, it may run beside the original.
    stray: bool,
    /// The restored tasks have been let run.
    resumed: bool,
}

/// Both nodes, as far as migrations of one container touch them. What processes of their own hold, and so survives any agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    pub original: Original,
    pub source_gate_open: bool,
    /// What steps of the source have made.
    made: BTreeSet<String>,
    /// By the number of the migration.
    copies: [Copy; MIGRATIONS],
    /// Some migration was decided.
    pub decided: bool,
    /// Some migration was given up.
    pub given_up: bool,
}

impl World {
    pub fn new() -> Self {
        let copy = || Copy {
            restored: Restored::Absent,
            gate_open: false,
            made: BTreeSet::new(),
            decided: false,
            given_up: false,
            stray: false,
            resumed: false,
        };
        Self {
            original: Original::Running,
            source_gate_open: true,
            made: BTreeSet::new(),
            copies: std::array::from_fn(|_| copy()),
            decided: false,
            given_up: false,
        }
    }

    /// The steps of a migration whose resources are still there.
    pub fn made(&self, side: Side, migration: usize) -> &BTreeSet<String> {
        if side == Side::Source { &self.made } else { &self.copies[migration].made }
    }

    /// The rule of the design that is broken, if one is.
    pub fn broken_rule(&self) -> Option<&'static str> {
        let running = self.copies.iter().filter(|copy| copy.restored == Restored::Running);
        let rules = [
            (running.clone().count() <= 1, "two restored copies run"),
            (self.original != Original::Gone || running.clone().count() == 1, "the original is gone and no copy runs"),
            (
                self.original != Original::Gone || self.copies.iter().any(|copy| copy.decided && !copy.given_up),
                "the original is gone and nothing was decided, or all was given up",
            ),
        ];
        let of_copies = self.copies.iter().flat_map(|copy| self.rules_of(copy));
        rules.into_iter().chain(of_copies).find(|(kept, _)| !kept).map(|(_, rule)| rule)
    }

    fn rules_of(&self, copy: &Copy) -> [(bool, &'static str); 7] {
        let original_runs = self.original == Original::Running;
        let restored_runs = copy.restored == Restored::Running;
        [
            (!(original_runs && restored_runs) || copy.stray, "two copies run"),
            (!(self.source_gate_open && copy.gate_open) || copy.given_up, "both gates are open"),
            (!restored_runs || copy.decided, "the restored copy runs before the decision"),
            (!restored_runs || !copy.given_up || copy.stray, "a void copy was let run"),
            (!original_runs || !copy.decided || copy.given_up, "the original runs after the decision"),
            (!copy.resumed || restored_runs || copy.given_up, "the restored copy was taken away after it ran"),
            (!restored_runs || copy.gate_open || copy.given_up, "the restored copy runs behind a closed gate"),
        ]
    }

    /// Exactly one copy runs, where the decision says, and nothing is left over.
    pub fn is_settled(&self) -> bool {
        let has_moved = |copy: &Copy| copy.decided && !copy.given_up;
        let place = match self.copies.iter().any(has_moved) {
            true => self.original == Original::Gone,
            false => self.original == Original::Running && self.source_gate_open,
        };
        let copies = self.copies.iter().all(|copy| {
            let runs = copy.restored == Restored::Running && copy.gate_open;
            let is_absent = copy.restored == Restored::Absent && !copy.gate_open;
            copy.made.is_empty() && if has_moved(copy) { runs } else { is_absent }
        });
        place && copies && self.made.is_empty()
    }

    /// The decision to commit a migration is in the source's journal.
    pub fn decide(&mut self, migration: usize) {
        self.copies[migration].decided = true;
        self.decided = true;
    }

    /// Whether it is known that a migration was given up.
    pub fn was_given_up(&self, migration: usize) -> bool {
        self.copies[migration].given_up
    }

    /// It is in the source's journal that a migration is given up; the destination may be just handling the word to commit, or may get it yet.
    pub fn give_up(&mut self, migration: usize, committing: bool) {
        let copy = &mut self.copies[migration];
        copy.stray = committing || copy.restored == Restored::Running;
        copy.given_up = true;
        self.given_up = true;
    }

    /// The destination's agent is dead: what does not run by now must not run any more, if it is void.
    pub fn destination_dies(&mut self) {
        for copy in &mut self.copies {
            copy.stray &= copy.restored == Restored::Running;
        }
    }

    /// A step of the source has its effect.
    pub fn source_does(&mut self, step: SourceStep) {
        if SourceStep::BEFORE_COMMIT.contains(&step) {
            self.made.insert(step.to_string());
        }
        match step {
            SourceStep::Freeze => self.original = Original::Frozen,
            SourceStep::CloseGate => self.source_gate_open = false,
            SourceStep::Release => {
                self.original = Original::Gone;
                self.made.clear();
            }
            _ => {}
        }
    }

    /// A step of the source is undone; nothing happens where there is nothing to undo.
    pub fn source_undoes(&mut self, step: SourceStep) {
        self.made.remove(&step.to_string());
        match step {
            SourceStep::Freeze if self.original == Original::Frozen => self.original = Original::Running,
            SourceStep::CloseGate => self.source_gate_open = true,
            _ => {}
        }
    }

    /// A step of the destination has its effect.
    pub fn destination_does(&mut self, migration: usize, step: DestinationStep) -> Result<(), Failure> {
        // The container is there already: an offer that comes late.
        if step == DestinationStep::Check && self.copies.iter().any(|copy| copy.restored != Restored::Absent) {
            return Err(Failure::new("there is a container of this name"));
        }
        let copy = &mut self.copies[migration];
        let undoable = [&DestinationStep::PREPARE[..], &DestinationStep::MAKE_READY].concat();
        if undoable.contains(&step) {
            copy.made.insert(step.to_string());
        }
        match step {
            DestinationStep::Restore => copy.restored = Restored::Held,
            DestinationStep::OpenGate => {
                assert!(!copy.given_up || copy.stray, "the gate of a void copy is opened");
                copy.gate_open = true;
            }
            DestinationStep::Resume if copy.restored == Restored::Absent => {
                return Err(Failure::new("there is nothing to resume"));
            }
            DestinationStep::Resume => {
                copy.restored = Restored::Running;
                copy.resumed = true;
            }
            DestinationStep::Tidy => copy.made.clear(),
            _ => {}
        }
        Ok(())
    }

    /// A step of the destination is undone; nothing happens where there is nothing to undo.
    pub fn destination_undoes(&mut self, migration: usize, step: DestinationStep) {
        let copy = &mut self.copies[migration];
        copy.made.remove(&step.to_string());
        match step {
            DestinationStep::OpenGate => {
                copy.gate_open = false;
                // Killed, behind the closed gate: it runs no more, and is still there.
                if copy.restored == Restored::Running {
                    copy.restored = Restored::Held;
                }
            }
            DestinationStep::Restore => {
                copy.restored = Restored::Absent;
                copy.stray = false;
            }
            DestinationStep::Network => copy.gate_open = false,
            _ => {}
        }
    }
}
