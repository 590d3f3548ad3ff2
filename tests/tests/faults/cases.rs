//! The fault matrix: every step of both sides, before and after, with everything that can go wrong there.

use tranship_coordinator::{DestinationStep, SourceStep};
use tranship_e2e::MODES;
use tranship_types::{Mode, Side};

/// One fault at one place, and where the container must be afterwards.
#[derive(Debug, Clone)]
pub struct Case {
    /// The side whose agent the fault is injected into.
    pub side: Side,
    /// The step, or one of the pseudo-steps `commit` and `ready`.
    pub step: String,
    /// `before` or `after`.
    pub when: &'static str,
    /// `error`, `panic`, `die`, `kill-criu` or `cut`.
    pub what: &'static str,
    /// How the container is moved.
    pub mode: Mode,
    /// On which side exactly one copy runs when all is quiet again.
    pub ends_on: Side,
}

impl Case {
    /// Its name: what happens, and in which mode.
    pub fn name(&self) -> String {
        format!("{}.{}", self.spec(), self.mode)
    }

    /// As an agent's TRANSHIP_FAULTS has it.
    pub fn spec(&self) -> String {
        format!("{}.{}", self.place(), self.what)
    }

    /// Where it happens: side, step, and before or after it.
    pub fn place(&self) -> String {
        let side = match self.side {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        format!("{side}.{}.{}", self.step, self.when)
    }
}

/// The cases in several modes: each in one of them, in turn, so that every fault and every step meets every mode; or each
/// in all of them, which takes four times as long.
pub fn in_modes(cases: &[Case], all: bool) -> Vec<Case> {
    let in_mode = |case: &Case, mode| Case { mode, ..case.clone() };
    if all {
        return cases.iter().flat_map(|case| MODES.map(|mode| in_mode(case, mode))).collect();
    }
    // A step's faults come one after the other, and there are as many as modes: so the next step begins with another mode.
    let turn = |number: usize| MODES[(number + number / MODES.len()) % MODES.len()];
    cases.iter().enumerate().map(|(number, case)| in_mode(case, turn(number))).collect()
}

/// Of each step half of the cases: one kind of fault before it, the other after it, in the next step the other way round; around the
/// decision all. Between what comes after a step and what comes before the next one little happens.
pub fn half(cases: &[Case]) -> Vec<Case> {
    let steps: Vec<&[Case]> = cases.chunk_by(|a, b| a.step == b.step).collect();
    let chosen = |number: usize, case: &Case| {
        let other = number % 2 + usize::from(case.when == "after") + usize::from(matches!(case.what, "die" | "cut"));
        ["ready", "commit"].contains(&case.step.as_str()) || other.is_multiple_of(2)
    };
    let of_step = |(number, step): (usize, &&[Case])| -> Vec<Case> {
        step.iter().filter(|case| chosen(number, case)).cloned().collect()
    };
    steps.iter().enumerate().flat_map(of_step).collect()
}

/// A place where a fault can happen, in the order in which a move comes by.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    step: String,
    when: &'static str,
}

fn places(steps: impl IntoIterator<Item = String>) -> Vec<Place> {
    let both = |step: String| ["before", "after"].map(|when| Place { step: step.clone(), when });
    steps.into_iter().flat_map(both).collect()
}

/// Where a place lies among the others.
fn index(all: &[Place], step: &impl ToString, when: &str) -> usize {
    let step = step.to_string();
    all.iter().position(|p| p.step == step && p.when == when).unwrap_or_else(|| panic!("no place {step}.{when}"))
}

/// All faults of the source's agent.
pub fn of_the_source() -> Vec<Case> {
    let names = |steps: &[SourceStep]| steps.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (before, after) = (names(&SourceStep::BEFORE_COMMIT), names(&SourceStep::AFTER_COMMIT));
    let all = places(before.into_iter().chain(["commit".to_owned()]).chain(after));
    let at = |step: SourceStep, when| index(&all, &step, when);
    let decided = index(&all, &"commit", "after");
    // There is no link to cut yet, or none that is needed: the decision goes over a new one.
    let linked = at(SourceStep::Connect, "after")..=at(SourceStep::AwaitReady, "before");
    // From the moment at which criu waits until its dump is done.
    let dumping = at(SourceStep::Arm, "after")..=at(SourceStep::Transfer, "before");
    let mut cases = Vec::new();
    for (i, place) in all.iter().enumerate() {
        for what in ["error", "die", "kill-criu", "cut"] {
            let undone = match what {
                "cut" => linked.contains(&i),
                "kill-criu" if !dumping.contains(&i) => continue,
                _ => i < decided,
            };
            let ends_on = if undone { Side::Source } else { Side::Destination };
            cases.push(Case {
                side: Side::Source,
                step: place.step.clone(),
                when: place.when,
                what,
                mode: Mode::Cold,
                ends_on,
            });
        }
    }
    cases
}

/// All faults of the destination's agent.
pub fn of_the_destination() -> Vec<Case> {
    let names = |steps: &[DestinationStep]| steps.iter().map(ToString::to_string).collect::<Vec<_>>();
    let pseudo = |name: &str| vec![name.to_owned()];
    let all = places(
        [
            names(&DestinationStep::PREPARE),
            names(&DestinationStep::MAKE_READY),
            pseudo("ready"),
            pseudo("commit"),
            names(&DestinationStep::COMMIT),
            names(&DestinationStep::DRAIN),
        ]
        .concat(),
    );
    let at = |step: DestinationStep, when| index(&all, &step, when);
    let decided = index(&all, &"commit", "before");
    // From the moment at which criu waits until the tasks run.
    let restoring = at(DestinationStep::Engine, "after")..=at(DestinationStep::Resume, "before");
    // Then the copy is complete, and is made again from what is in memory.
    let complete = at(DestinationStep::Restore, "after");
    let mut cases = Vec::new();
    for (i, place) in all.iter().enumerate() {
        for what in ["error", "die", "kill-criu", "cut"] {
            let undone = match what {
                "kill-criu" if !restoring.contains(&i) => continue,
                "kill-criu" => i < complete,
                _ => i < decided,
            };
            let ends_on = if undone { Side::Source } else { Side::Destination };
            cases.push(Case {
                side: Side::Destination,
                step: place.step.clone(),
                when: place.when,
                what,
                mode: Mode::Cold,
                ends_on,
            });
        }
    }
    cases
}
