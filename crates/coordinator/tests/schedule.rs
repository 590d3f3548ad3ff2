//! Groups of any shape, with moves of any length and failures anywhere, under any limits: the order holds, limits are kept,
//! each stage is entered once, nothing waits for ever, and all together take no longer than one after the other.

use proptest::prelude::*;
use tranship_coordinator::group::{Answer, Limits, Schedule, Stage};
use tranship_types::GroupOrder;

const STAGES: [Stage; 5] = [Stage::Prepare, Stage::Send, Stage::Frozen, Stage::Resumed, Stage::Release];

/// A move as it would be alone.
#[derive(Debug, Clone)]
struct Move {
    after: Vec<usize>,
    /// How long each stage takes.
    takes: [u32; 5],
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

fn moves(failures: bool) -> impl Strategy<Value = Vec<Move>> {
    let one = move |rank: usize| {
        let after = prop::collection::btree_set(0..rank.max(1), 0..=rank.min(3));
        // Failures come before the commit point.
        let fails = prop::option::weighted(0.3, 0..3usize);
        (after, prop::array::uniform5(1..20u32), fails).prop_map(move |(after, takes, fails)| Move {
            after: after.into_iter().filter(|before| *before < rank).collect(),
            takes,
            fails: fails.filter(|_| failures),
        })
    };
    (1..9usize).prop_flat_map(move |count| (0..count).map(one).collect::<Vec<_>>())
}

fn limits() -> impl Strategy<Value = Limits> {
    (1..4usize, 1..4usize, 1..5usize).prop_map(|(links, frozen, under_way)| Limits { links, frozen, under_way })
}

fn kept(schedule: &Schedule, group: &[Move], limits: Limits) {
    let among = |from: Stage, to: Stage| (0..group.len()).filter(|m| (from..=to).contains(&schedule.stage(*m))).count();
    assert!(among(Stage::Send, Stage::Resumed) <= limits.links, "too many share the link: {schedule:?}");
    assert!(among(Stage::Frozen, Stage::Frozen) <= limits.frozen, "too many are frozen: {schedule:?}");
    assert!(among(Stage::Prepare, Stage::Release) <= limits.under_way, "too many are under way: {schedule:?}");
}

/// Lets a group move, a tick of time after the other.
fn play(group: &[Move], limits: Limits) -> Course {
    let mut schedule = Schedule::new(group.iter().map(|m| m.after.clone()), limits);
    let mut entered: Vec<Vec<(Stage, u32)>> = vec![Vec::new(); group.len()];
    let mut ended: Vec<Option<(Stage, u32)>> = vec![None; group.len()];
    // Until when each is busy with the stage that it is in.
    let mut busy: Vec<u32> = vec![0; group.len()];
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
                let failed = at > 0 && group[member].fails == Some(at - 1);
                if failed || at == STAGES.len() {
                    schedule.end(member, !failed);
                    ended[member] = Some((schedule.stage(member), now));
                    again = true;
                    continue;
                }
                match schedule.enter(member, STAGES[at]) {
                    Answer::Entered => {
                        entered[member].push((STAGES[at], now));
                        busy[member] = now + group[member].takes[at];
                        again = true;
                    }
                    Answer::NotYet => {}
                    Answer::Never(before) => {
                        assert!(group[member].after.contains(&before) && schedule.stage(before) == Stage::Stopped);
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
        assert!(STAGES.starts_with(&stages), "stages are entered once, in their order: {stages:?}");
        let end = if is_doomed(group, member) { Stage::Stopped } else { Stage::Moved };
        assert_eq!(course.ended[member].0, end, "member {member}");
        if own.fails.is_none() && end == Stage::Stopped {
            assert!(stages.len() <= 1, "member {member} has sent something in vain: {stages:?}");
        }
        for before in &own.after {
            for stage in [Stage::Send, Stage::Frozen, Stage::Resumed] {
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
    fn order_and_limits_hold_and_nothing_waits_for_ever(group in moves(true), limits in limits()) {
        holds(&group, limits);
    }

    #[test]
    fn together_takes_no_longer_than_one_after_the_other(group in moves(false), limits in limits()) {
        let alone: u32 = group.iter().flat_map(|m| m.takes).sum();
        prop_assert_eq!(play(&group, Limits::of(GroupOrder::Sequential)).makespan, alone);
        prop_assert!(play(&group, limits).makespan <= alone);
    }

    /// Nobody waits for a turn while frozen, or between the last round and the freeze.
    #[test]
    fn a_pipeline_lengthens_no_blackout(group in moves(false)) {
        let course = play(&group, Limits::of(GroupOrder::Pipelined));
        for (own, entered) in group.iter().zip(&course.entered) {
            let at = |n: usize| entered[n].1;
            prop_assert_eq!(at(2) - at(1), own.takes[1]);
            prop_assert_eq!(at(3) - at(2), own.takes[2]);
        }
    }
}

#[test]
fn a_pipeline_of_a_saturated_link_takes_as_long_as_the_link_needs() {
    let group = vec![Move { after: vec![], takes: [5, 20, 2, 1, 8], fails: None }; 6];
    let course = play(&group, Limits::of(GroupOrder::Pipelined));
    // The first preparation and the last release are all that the link waits for.
    assert_eq!(course.makespan, 5 + 6 * (20 + 2 + 1) + 8);
}
