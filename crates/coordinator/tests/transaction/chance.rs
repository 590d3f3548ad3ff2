//! Any number of deaths and cuts at any time, in any order of both agents' actions.
//!
//! A run that goes wrong is shown as the smallest `Case` that does, with its log; give that `Case` to `stage::run` in a
//! test to see it again. `PROPTEST_CASES` sets how many are tried, `PROPTEST_RNG_SEED` which.

use proptest::prelude::*;
use tranship_types::Side;

use crate::stage::{Case, Mishap, run};

fn mishap() -> impl Strategy<Value = (usize, Mishap)> {
    let what = prop_oneof![
        Just(Mishap::Kill(Side::Source)),
        Just(Mishap::Kill(Side::Destination)),
        Just(Mishap::Cut),
        Just(Mishap::GiveUp),
    ];
    (1..300usize, what)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_dies_one_copy_runs_and_nothing_is_left(
        seed in any::<u64>(),
        mishaps in proptest::collection::vec(mishap(), 0..8),
        torn in any::<bool>(),
    ) {
        let case = Case { seed, mishaps, torn, ..Case::default() };
        println!("{case:?}");
        run(&case);
    }
}
