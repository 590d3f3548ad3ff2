//! Each agent dies, or the link is cut, at each single action in turn: before and after each effect, each message and
//! each record of a journal, in going forward as in undoing.

use tranship_coordinator::{DestinationStep, SourceStep};
use tranship_types::Side;

use crate::stage::{Case, Mishap, run};

const MISHAPS: [Mishap; 3] = [Mishap::Kill(Side::Source), Mishap::Kill(Side::Destination), Mishap::Cut];

/// Runs a case with a mishap at each action in turn, until the run ends before the mishap's time comes.
fn at_each_action(case: &Case, mishap: Mishap) {
    for at in 1.. {
        let mut mishaps = case.mishaps.clone();
        mishaps.push((at, mishap));
        if run(&Case { mishaps, ..case.clone() }).actions < at {
            return;
        }
    }
}

#[test]
fn at_each_action_of_a_move() {
    for mishap in MISHAPS {
        at_each_action(&Case { seed: 1, ..Case::default() }, mishap);
        at_each_action(&Case { seed: 2, torn: true, ..Case::default() }, mishap);
    }
}

#[test]
fn at_each_action_of_undoing() {
    for mishap in MISHAPS {
        let faults = "source.commit.before.error".to_owned();
        at_each_action(&Case { seed: 3, faults: faults.clone(), ..Case::default() }, mishap);
        at_each_action(&Case { seed: 4, faults, torn: true, ..Case::default() }, mishap);
    }
}

#[test]
fn at_each_action_around_an_undo_that_fails_at_first() {
    let cases = [
        (Side::Source, SourceStep::Freeze.to_string(), "source.commit.before.error"),
        (Side::Destination, DestinationStep::Network.to_string(), "destination.ready.after.error"),
    ];
    for (side, step, faults) in cases {
        let case = Case { seed: 6, failing_undo: Some((side, step)), faults: faults.into(), ..Case::default() };
        MISHAPS.iter().for_each(|mishap| at_each_action(&case, *mishap));
    }
}

#[test]
fn at_each_action_of_recovering_from_a_death() {
    for faults in ["source.commit.after.die", "source.await-ready.after.die", "destination.resume.before.die"] {
        for mishap in MISHAPS {
            at_each_action(&Case { seed: 5, faults: faults.into(), torn: true, ..Case::default() }, mishap);
        }
    }
}

#[test]
fn at_each_action_of_giving_up() {
    for faults in ["source.deliver.before.error", "source.drain.before.error", "destination.resume.before.die"] {
        for mishap in MISHAPS {
            let mishaps = vec![(1, Mishap::GiveUp)];
            at_each_action(&Case { seed: 8, faults: faults.into(), mishaps, torn: true, ..Case::default() }, mishap);
        }
    }
}

#[test]
fn an_operator_may_say_it_at_each_action() {
    for faults in ["", "source.commit.after.cut", "destination.open-gate.after.die", "destination.drain.before.die"] {
        at_each_action(&Case { seed: 9, faults: faults.into(), ..Case::default() }, Mishap::GiveUp);
    }
}
