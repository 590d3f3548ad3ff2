//! More links than one: what was sent on a link that is no more comes late, in another order, and twice, while the migration, or the next one of the
//! same container, goes on. The rules that each action is held against are those of all other tests here.
//!
//! `TRANSHIP_LINKS` sets how many runs are tried; `PROPTEST_RNG_SEED` which.

use proptest::prelude::*;
use tranship_types::Side;

use crate::stage::{Case, Mishap, run};

/// A run takes some 20 ms of CPU.
const RUNS: u32 = 200;

fn runs() -> u32 {
    std::env::var("TRANSHIP_LINKS").ok().and_then(|text| text.parse().ok()).unwrap_or(RUNS)
}

fn mishap() -> impl Strategy<Value = (usize, Mishap)> {
    // A cut is what makes words late.
    let what = prop_oneof![
        6 => Just(Mishap::Cut),
        2 => Just(Mishap::Kill(Side::Source)),
        1 => Just(Mishap::Kill(Side::Destination)),
        1 => Just(Mishap::GiveUp),
    ];
    (1..400usize, what)
}

/// Where the first migration may fail, so that a second one follows; mostly when the destination has something to undo.
fn faults() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(""),
        Just("source.commit.before.error"),
        Just("source.await-ready.after.error"),
        Just("source.freeze.after.cut"),
        Just("destination.restore.after.error"),
        Just("destination.ready.after.die"),
    ]
    .prop_map(str::to_owned)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: runs(), ..ProptestConfig::default() })]
    #[test]
    fn whatever_comes_late_one_copy_runs_and_nothing_is_left(
        seed in any::<u64>(),
        mishaps in proptest::collection::vec(mishap(), 1..8),
        faults in faults(),
        torn in any::<bool>(),
    ) {
        run(&Case { seed, mishaps, faults, torn, late: true, again: true, ..Case::default() });
    }
}

/// A link breaks at actions of a migration that fails and of the one that follows it, and what was sent on it comes late.
#[test]
fn a_cut_at_any_action_of_two_migrations() {
    // All seeds together take each action; without more runs asked for, it is each third one of one seed.
    let (seeds, stride) = if runs() > RUNS { (3, 1) } else { (1, 3) };
    let mut second = 0;
    for seed in 0..seeds {
        for at in (1..).step_by(stride) {
            let faults = "source.commit.before.error".to_owned();
            let mishaps = vec![(at, Mishap::Cut)];
            let end = run(&Case { seed, faults, mishaps, late: true, again: true, ..Case::default() });
            second += usize::from(end.endings.len() > 1 && end.world.decided);
            if end.actions < at {
                break;
            }
        }
    }
    assert!(second > 50, "{second} times the second migration moved the container");
}
