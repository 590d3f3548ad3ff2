//! Each step in turn, taken from the lists of steps, so that none is forgotten: what it fails with, and when.

use tranship_coordinator::{DestinationStep, Ending, SourceStep};
use tranship_types::Side;

use crate::stage::{Case, End, Mishap, run};

/// Where something can go wrong: a step, or a decision.
#[derive(Debug, Clone)]
struct Place {
    side: Side,
    name: String,
    /// Before the commit point.
    undone: bool,
    /// A step, which has an action that can fail.
    step: bool,
}

fn places() -> Vec<Place> {
    let place = |side, name: String, undone, step| Place { side, name, undone, step };
    let source = |steps: &[SourceStep], undone| {
        steps.iter().map(|s| place(Side::Source, s.to_string(), undone, true)).collect::<Vec<_>>()
    };
    let destination = |steps: &[DestinationStep], undone| {
        steps.iter().map(|s| place(Side::Destination, s.to_string(), undone, true)).collect::<Vec<_>>()
    };
    [
        source(&SourceStep::BEFORE_COMMIT, true),
        source(&SourceStep::AFTER_COMMIT, false),
        destination(&DestinationStep::PREPARE, true),
        destination(&DestinationStep::MAKE_READY, true),
        vec![place(Side::Destination, "ready".into(), true, false)],
        vec![place(Side::Destination, "commit".into(), false, false)],
        destination(&DestinationStep::COMMIT, false),
        destination(&DestinationStep::DRAIN, false),
    ]
    .concat()
}

fn spec(place: &Place, when: &str, what: &str) -> String {
    let side = if place.side == Side::Source { "source" } else { "destination" };
    format!("{side}.{}.{when}.{what}", place.name)
}

fn assert_ends(end: &End, undone: bool, case: &Case) {
    assert_eq!(end.world.decided, !undone, "{case:?}: {:?}", end.endings);
    let last = end.endings.last().expect("an ending");
    assert_eq!(matches!(last, Ending::Undone { .. }), undone, "{case:?}: {:?}", end.endings);
}

#[test]
fn without_mishaps_it_moves() {
    for seed in 0..20 {
        let end = run(&Case { seed, ..Case::default() });
        assert_eq!(end.endings, [Ending::Moved]);
    }
}

#[test]
fn an_error_at_any_step_undoes_before_the_commit_point_and_is_repeated_after_it() {
    for place in places() {
        for when in ["before", "after"] {
            let case = Case { faults: spec(&place, when, "error"), ..Case::default() };
            let end = run(&case);
            assert_ends(&end, place.undone, &case);
            if let Some(Ending::Undone { failure, leftovers }) = end.endings.last() {
                assert!(failure.message.contains(&place.name), "{case:?}: {failure}");
                assert_eq!(leftovers.len(), 0, "{case:?}");
            }
        }
    }
    let case = Case { faults: "source.commit.before.error".into(), ..Case::default() };
    assert_ends(&run(&case), true, &case);
    let case = Case { faults: "source.commit.after.error".into(), ..Case::default() };
    assert_ends(&run(&case), false, &case);
}

#[test]
fn an_action_that_fails_half_way_is_undone_or_repeated_too() {
    for place in places().into_iter().filter(|place| place.step) {
        let case = Case { failing_action: Some((place.side, place.name.clone())), ..Case::default() };
        assert_ends(&run(&case), place.undone, &case);
    }
}

#[test]
fn an_undo_that_fails_is_named_and_keeps_no_other_from_being_done() {
    for place in places().into_iter().filter(|place| place.undone && place.step) {
        let faults = match place.side {
            Side::Source => "source.commit.before.error",
            Side::Destination => "destination.ready.after.error",
        };
        let failing_undo = Some((place.side, place.name.clone()));
        let case = Case { failing_undo, faults: faults.into(), ..Case::default() };
        // That just this is left over, and that a second try removes it, is asserted by the agents and by `run`.
        let end = run(&case);
        let named = match (place.side, &end.endings[0]) {
            (Side::Source, Ending::Undone { leftovers, .. }) => leftovers,
            (Side::Destination, _) => &end.leftovers,
            (_, ending) => panic!("{case:?}: {ending:?}"),
        };
        assert_eq!(named[..], [format!("undoing {}: it is stuck", place.name)]);
    }
}

#[test]
fn a_panic_in_any_step_undoes_before_the_commit_point_and_is_repeated_after_it() {
    for place in places() {
        for when in ["before", "after"] {
            let case = Case { faults: spec(&place, when, "panic"), ..Case::default() };
            let end = run(&case);
            assert_ends(&end, place.undone, &case);
            if let Some(Ending::Undone { failure, leftovers }) = end.endings.last() {
                let cause = format!("failed internally in step {0}: an injected panic at {0}", place.name);
                assert!(failure.message.contains(&cause), "{case:?}: {failure}");
                assert_eq!(leftovers.len(), 0, "{case:?}");
            }
        }
    }
    for place in places().into_iter().filter(|place| place.step) {
        let failing_action = Some((place.side, place.name.clone()));
        let case = Case { failing_action, panics: true, ..Case::default() };
        assert_ends(&run(&case), place.undone, &case);
    }
    for (when, undone) in [("before", true), ("after", false)] {
        let case = Case { faults: format!("source.commit.{when}.panic"), ..Case::default() };
        assert_ends(&run(&case), undone, &case);
    }
}

#[test]
fn an_undo_that_panics_is_named_and_keeps_no_other_from_being_done() {
    for place in places().into_iter().filter(|place| place.undone && place.step) {
        let faults = match place.side {
            Side::Source => "source.commit.before.error",
            Side::Destination => "destination.ready.after.error",
        };
        let failing_undo = Some((place.side, place.name.clone()));
        let case = Case { failing_undo, panics: true, faults: faults.into(), ..Case::default() };
        let end = run(&case);
        let named = match (place.side, &end.endings[0]) {
            (Side::Source, Ending::Undone { leftovers, .. }) => leftovers,
            (Side::Destination, _) => &end.leftovers,
            (_, ending) => panic!("{case:?}: {ending:?}"),
        };
        let [named] = named.as_slice() else { panic!("{case:?}: {named:?}") };
        assert!(named.starts_with(&format!("undoing {}: ", place.name)), "{named}");
        assert!(named.contains("failed internally") && named.contains("it is stuck"), "{named}");
    }
}

#[test]
fn an_agent_may_die_around_each_step() {
    for place in places() {
        for when in ["before", "after"] {
            let case = Case { faults: spec(&place, when, "die"), torn: when == "after", ..Case::default() };
            assert_ends(&run(&case), place.undone, &case);
        }
    }
    for (when, undone) in [("before", true), ("after", false)] {
        let case = Case { faults: format!("source.commit.{when}.die"), ..Case::default() };
        assert_ends(&run(&case), undone, &case);
    }
}

#[test]
fn the_link_may_be_cut_around_each_step() {
    for place in places() {
        for when in ["before", "after"] {
            // Which way it ends depends on what was on its way; that it ends well is what `run` asserts.
            run(&Case { faults: spec(&place, when, "cut"), ..Case::default() });
        }
    }
    // Once READY has been said, the decision needs no link.
    let case = Case { faults: "source.commit.before.cut".into(), ..Case::default() };
    assert_ends(&run(&case), false, &case);
}

#[test]
fn an_agent_that_is_stopped_after_the_commit_point_goes_on_at_its_next_start() {
    for step in SourceStep::AFTER_COMMIT {
        let end =
            run(&Case { failing_action: Some((Side::Source, step.to_string())), stopping: true, ..Case::default() });
        assert_eq!(end.endings, [Ending::Suspended, Ending::Moved]);
    }
}

#[test]
fn what_waits_after_the_commit_point_can_be_given_up_until_the_original_is_removed() {
    for (step, given_up) in [(SourceStep::Deliver, true), (SourceStep::Drain, true), (SourceStep::Release, false)] {
        for when in ["before", "after"] {
            let faults = format!("source.{step}.{when}.error");
            let end = run(&Case { faults: faults.clone(), mishaps: vec![(1, Mishap::GiveUp)], ..Case::default() });
            assert_eq!(end.world.given_up, given_up, "{faults}: {:?}", end.endings);
            let [ending] = end.endings.as_slice() else { panic!("{faults}: {:?}", end.endings) };
            assert_eq!(matches!(ending, Ending::GivenUp { .. }), given_up, "{faults}: {ending:?}");
        }
    }
    // Before it there is nothing to give up: it heals by itself.
    let case =
        Case { faults: "source.commit.before.error".into(), mishaps: vec![(1, Mishap::GiveUp)], ..Case::default() };
    assert_ends(&run(&case), true, &case);
}

#[test]
fn a_destination_that_was_given_up_wherever_it_died_never_runs_its_copy_when_it_is_back() {
    let places = places().into_iter().filter(|place| place.side == Side::Destination && !place.undone);
    let (mut given_up, mut all) = (0, 0);
    for place in places {
        for when in ["before", "after"] {
            for seed in 0..4 {
                let (faults, mishaps) = (spec(&place, when, "die"), vec![(1, Mishap::GiveUp)]);
                // Whether the word is heard before the destination is back is drawn; that it ends well is what `run` asserts.
                let end = run(&Case { seed, faults, mishaps, ..Case::default() });
                given_up += usize::from(end.world.given_up);
                all += 1;
            }
        }
    }
    assert!(given_up * 2 > all, "given up in {given_up} of {all} cases");
}

#[test]
fn an_undo_that_fails_is_repeated_when_a_migration_is_given_up_too() {
    let source = SourceStep::BEFORE_COMMIT.iter().chain(&[SourceStep::Deliver, SourceStep::Drain]);
    let source = source.map(|step| (Side::Source, step.to_string()));
    let destination = [&DestinationStep::PREPARE[..], &DestinationStep::MAKE_READY, &DestinationStep::COMMIT].concat();
    let destination = destination.into_iter().map(|step| (Side::Destination, step.to_string()));
    for failing in source.chain(destination) {
        let case = Case {
            faults: "source.deliver.after.error".into(),
            mishaps: vec![(1, Mishap::GiveUp)],
            failing_undo: Some(failing.clone()),
            ..Case::default()
        };
        let end = run(&case);
        let named = match failing.0 {
            Side::Source => end.endings[0].leftovers(),
            Side::Destination => &end.leftovers,
        };
        assert_eq!(named[..], [format!("undoing {}: it is stuck", failing.1)]);
    }
}
