//! Groups of any shape, with moves of any length and failures anywhere, under any limits: the order holds, limits are kept,
//! each stage is entered once, nothing waits for ever, and all together take no longer than one after the other.

use proptest::prelude::*;
use tranship_coordinator::group::{Answer, Limits, Schedule, Stage};
use tranship_types::{GroupOrder, Mode};

/// The stages of a move that commits for itself.
const ALONE: &[Stage] = &[Stage::Prepare, Stage::Send, Stage::Freezing, Stage::Resumed, Stage::Release];
/// Those where all move or none does.
const TOGETHER: &[Stage] = &[
    Stage::Prepare,
    Stage::Send,
    Stage::Settled,
    Stage::Poised,
    Stage::Freezing,
    Stage::Frozen,
    Stage::Locked,
    Stage::Dumped,
    Stage::Held,
    Stage::Resuming,
    Stage::Resumed,
    Stage::Release,
];
/// How many of these come before the decision.
const UNDECIDED: usize = 9;

/// A move as it would be alone.
#[derive(Debug, Clone)]
struct Move {
    after: Vec<usize>,
    /// How long each stage takes.
    takes: [u32; 12],
    /// The stage in which it fails.
    fails: Option<usize>,
}

/// What came of a group.
struct Course {
    /// When each member entered each stage.
    entered: Vec<Vec<(Stage, u32)>>,
    /// When each had moved, or not.
    ended: Vec<(Stage, u32)>,
    /// When the last one had ended.
    makespan: u32,
}

/// Moves, of which some fail in one of the first so many stages.
fn moves(failures: usize) -> impl Strategy<Value = Vec<Move>> {
    let one = move |rank: usize| {
        let after = prop::collection::btree_set(0..rank.max(1), 0..=rank.min(3));
        let fails = prop::option::weighted(0.3, 0..failures.max(1));
        (after, prop::array::uniform12(1..20u32), fails).prop_map(move |(after, takes, fails)| Move {
            after: after.into_iter().filter(|before| *before < rank).collect(),
            takes,
            fails: fails.filter(|_| failures > 0),
        })
    };
    (1..9usize).prop_flat_map(move |count| (0..count).map(one).collect::<Vec<_>>())
}

fn limits() -> impl Strategy<Value = Limits> {
    let counts = (1..4usize, 1..4usize, 1..4usize, 1..5usize);
    (counts, any::<bool>()).prop_map(|((preparing, links, frozen, under_way), quiet)| Limits {
        preparing,
        links,
        frozen,
        quiet,
        under_way,
        together: false,
    })
}

fn kept(schedule: &Schedule, group: &[Move], limits: Limits) {
    let among = |from: Stage, to: Stage| (0..group.len()).filter(|m| (from..=to).contains(&schedule.stage(*m))).count();
    let last = if limits.together { Stage::Send } else { Stage::Resumed };
    assert!(among(Stage::Send, last) <= limits.links, "too many share the link: {schedule:?}");
    assert!(among(Stage::Freezing, Stage::Resuming) <= limits.frozen, "too many are frozen: {schedule:?}");
    assert!(among(Stage::Prepare, Stage::Release) <= limits.under_way, "too many are under way: {schedule:?}");
}

/// Lets a group move, a tick of time after the other.
fn play(group: &[Move], limits: Limits) -> Course {
    play_by(Schedule::new(group.iter().map(|m| m.after.clone()), limits), group, limits)
}

/// The same by a schedule of these limits.
fn play_by(mut schedule: Schedule, group: &[Move], limits: Limits) -> Course {
    let stages = if limits.together { TOGETHER } else { ALONE };
    let mut entered: Vec<Vec<(Stage, u32)>> = vec![Vec::new(); group.len()];
    let mut ended: Vec<Option<(Stage, u32)>> = vec![None; group.len()];
    // Until when each is busy with the stage that it is in.
    let mut busy: Vec<u32> = vec![0; group.len()];
    // For which stage each has asked last.
    let mut asked: Vec<Option<usize>> = vec![None; group.len()];
    let mut now = 0;
    while ended.iter().any(Option::is_none) {
        // Whatever one does may let another one in.
        let mut again = true;
        while std::mem::take(&mut again) {
            for member in 0..group.len() {
                if ended[member].is_some() || busy[member] > now {
                    continue;
                }
                let at = entered[member].len();
                // One that is held, and cannot go on, goes on all the same if all have been decided to move meanwhile.
                let failed = at > 0 && group[member].fails == Some(at - 1) && !schedule.is_decided();
                if failed || at == stages.len() {
                    schedule.end(member, !failed);
                    ended[member] = Some((schedule.stage(member), now));
                    again = true;
                    continue;
                }
                if schedule.is_unanimous() {
                    schedule.decide();
                }
                match schedule.enter(member, stages[at]) {
                    Answer::Entered => {
                        entered[member].push((stages[at], now));
                        busy[member] = now + group[member].takes[at];
                        again = true;
                    }
                    Answer::NotYet => again |= asked[member].replace(at) != Some(at),
                    Answer::Never(before) => {
                        assert_eq!(schedule.stage(before), Stage::Stopped);
                        // Where all wait for all, the one is named that has failed.
                        let is_why = match limits.together {
                            true => group[before].fails.is_some(),
                            false => group[member].after.contains(&before),
                        };
                        assert!(is_why, "{member} does not move because of {before}: {schedule:?}");
                        schedule.end(member, false);
                        ended[member] = Some((Stage::Stopped, now));
                        again = true;
                    }
                }
                kept(&schedule, group, limits);
            }
        }
        let next = (0..group.len()).filter(|m| ended[*m].is_none()).map(|m| busy[m]).filter(|t| *t > now).min();
        match next {
            Some(then) => now = then,
            None => assert!(ended.iter().all(Option::is_some), "all wait for each other: {schedule:?}"),
        }
    }
    Course { entered, ended: ended.into_iter().flatten().collect(), makespan: now }
}

/// Whether a member, or one that it comes after, fails.
fn is_doomed(group: &[Move], member: usize) -> bool {
    group[member].fails.is_some() || group[member].after.iter().any(|before| is_doomed(group, *before))
}

fn holds(group: &[Move], limits: Limits) {
    let course = play(group, limits);
    for (member, own) in group.iter().enumerate() {
        let entered = &course.entered[member];
        let stages: Vec<Stage> = entered.iter().map(|(stage, _)| *stage).collect();
        assert!(ALONE.starts_with(&stages), "stages are entered once, in their order: {stages:?}");
        let end = if is_doomed(group, member) { Stage::Stopped } else { Stage::Moved };
        assert_eq!(course.ended[member].0, end, "member {member}");
        if own.fails.is_none() && end == Stage::Stopped {
            assert!(stages.len() <= 1, "member {member} has sent something in vain: {stages:?}");
        }
        for before in &own.after {
            for stage in [Stage::Send, Stage::Freezing, Stage::Resumed] {
                let when = |m: usize| course.entered[m].iter().find(|(s, _)| *s == stage).map(|(_, t)| *t);
                let in_order = when(member).is_none_or(|own| when(*before).is_some_and(|other| other < own));
                assert!(in_order, "{member} came into {stage:?} before {before}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn order_and_limits_hold_and_nothing_waits_for_ever(group in moves(3), limits in limits()) {
        holds(&group, limits);
    }

    #[test]
    fn together_takes_no_longer_than_one_after_the_other(group in moves(0), limits in limits()) {
        let alone: u32 = group.iter().flat_map(|m| &m.takes[..ALONE.len()]).sum();
        prop_assert_eq!(play(&group, Limits::of(GroupOrder::Sequential, Mode::Auto)).makespan, alone);
        prop_assert!(play(&group, limits).makespan <= alone);
    }

    /// Nobody waits for a turn while frozen, or between the last round and the freeze.
    #[test]
    fn a_pipeline_lengthens_no_blackout(group in moves(0)) {
        let course = play(&group, Limits::of(GroupOrder::Pipelined, Mode::Auto));
        for (own, entered) in group.iter().zip(&course.entered) {
            let at = |n: usize| entered[n].1;
            prop_assert_eq!(at(2) - at(1), own.takes[1]);
            prop_assert_eq!(at(3) - at(2), own.takes[2]);
        }
    }

    /// Whatever fails, and whenever: all move, or none does; those that others depend on are frozen after them and resumed
    /// before them, and nobody is resumed before a copy of everybody is held.
    #[test]
    fn all_or_none(group in moves(UNDECIDED)) {
        let limits = Limits::of(GroupOrder::Atomic, Mode::Auto);
        let course = play(&group, limits);
        let end = course.ended[0].0;
        prop_assert!(course.ended.iter().all(|(stage, _)| *stage == end), "{:?}", course.ended);
        let moved = end == Stage::Moved;
        prop_assert!(moved || group.iter().any(|own| own.fails.is_some()));
        prop_assert!(!moved || group.iter().all(|own| own.fails.is_none_or(|at| TOGETHER[at] == Stage::Held)));
        let when = |m: usize, stage: Stage| course.entered[m].iter().find(|(s, _)| *s == stage).map(|(_, t)| *t);
        let held = (0..group.len()).map(|m| when(m, Stage::Held)).max().flatten();
        for (member, own) in group.iter().enumerate() {
            let resumed = when(member, Stage::Resuming);
            prop_assert_eq!(resumed.is_some(), moved);
            prop_assert!(resumed >= held || !moved, "{member} was resumed before all were held");
            for before in &own.after {
                if let Some(then) = when(*before, Stage::Freezing) {
                    prop_assert!(when(member, Stage::Frozen).is_some_and(|first| first <= then), "{before} was frozen first");
                }
                if let Some(then) = resumed {
                    let first = when(*before, Stage::Resumed);
                    prop_assert!(first.is_some_and(|first| first <= then), "{member} was resumed first");
                }
            }
        }
    }
}

proptest! {
    /// Levels for stopping, whatever depends on what.
    #[test]
    fn levels_for_stopping_hold(group in moves(0), levels in prop::array::uniform9(0..4usize)) {
        let limits = Limits::of(GroupOrder::Atomic, Mode::Auto);
        let before = |own: usize| (0..group.len()).filter(|m| levels[*m] < levels[own]).collect();
        let schedule = Schedule::new(group.iter().map(|m| m.after.clone()), limits);
        let course = play_by(schedule.stopping((0..group.len()).map(before).collect()), &group, limits);
        let when = |m: usize, stage: Stage| course.entered[m].iter().find(|(s, _)| *s == stage).map(|(_, t)| *t);
        for own in 0..group.len() {
            prop_assert_eq!(course.ended[own].0, Stage::Moved);
            for first in (0..group.len()).filter(|m| levels[*m] < levels[own]) {
                prop_assert!(when(first, Stage::Frozen) <= when(own, Stage::Freezing), "{own} was frozen before {first}");
            }
        }
    }
}

proptest! {
    /// Members that share a network namespace, whatever depends on what and whatever fails.
    #[test]
    fn a_unit_is_frozen_and_locked_by_its_owner_first(group in moves(UNDECIDED), unit in prop::array::uniform9(0..4usize)) {
        let limits = Limits::of(GroupOrder::Atomic, Mode::Auto);
        // Units 1 to 3; 0 is none.
        let owner = |own: usize| (0..own).find(|m| unit[own] > 0 && unit[*m] == unit[own]);
        let owners: Vec<_> = (0..group.len()).map(owner).collect();
        let schedule = Schedule::new(group.iter().map(|m| m.after.clone()), limits).sharing(&owners);
        let course = play_by(schedule, &group, limits);
        let end = course.ended[0].0;
        prop_assert!(course.ended.iter().all(|(stage, _)| *stage == end), "{:?}", course.ended);
        let when = |m: usize, stage: Stage| course.entered[m].iter().find(|(s, _)| *s == stage).map(|(_, t)| *t);
        for (own, owner) in owners.iter().enumerate().filter_map(|(own, owner)| Some((own, (*owner)?))) {
            for (stage, first) in [
                (Stage::Freezing, Stage::Frozen), (Stage::Locked, Stage::Locked), (Stage::Resuming, Stage::Resumed),
            ] {
                if let Some(then) = when(own, stage) {
                    prop_assert!(when(owner, first).is_some_and(|first| first <= then), "{own} came into {stage:?} before {owner}");
                }
            }
            if let Some(then) = when(owner, Stage::Dumped) {
                let dumped = when(own, Stage::Locked).map(|begun| begun + group[own].takes[6]);
                prop_assert!(dumped.is_some_and(|dumped| dumped <= then), "{own} was not dumped");
            }
            if let Some(then) = when(owner, Stage::Release) {
                prop_assert!(course.ended[own].1 <= then, "{own} was not released before {owner}");
            }
        }
    }
}

#[test]
fn a_pipeline_of_a_saturated_link_takes_as_long_as_the_link_needs() {
    let group = vec![Move { after: vec![], takes: [5, 20, 2, 1, 8, 0, 0, 0, 0, 0, 0, 0], fails: None }; 6];
    let course = play(&group, Limits::of(GroupOrder::Pipelined, Mode::Auto));
    // The first preparation and the last release are all that the link waits for.
    assert_eq!(course.makespan, 5 + 6 * (20 + 2 + 1) + 8);
}
