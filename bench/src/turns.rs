//! The systems take turns, so that whatever else goes on in the machine hits all of them, and take turns in going first.
//!
//! ```text
//! a turn: lab up → container into its stride → run, run, … there and back → lab down
//!                                                └ a run that fails ends its lab; the turn's next one gets another
//! ```
//!
//! A workload that can be moved again is filled twice for each system, however often it is moved; one that cannot, or a
//! system that moves nothing, has turns of one run.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::row::Failure;
use crate::run::{Sample, Stand};
use crate::say;
use crate::suite::{Case, System};

/// How often a system's turn comes, where a turn is of several runs.
const TURNS: u32 = 2;

/// Some runs, counted from 1, of the system with this index.
#[derive(Debug, PartialEq, Eq)]
struct Turn {
    system: usize,
    runs: RangeInclusive<u32>,
}

/// Who performs which runs, in their order; `systems` are runs in all, and in one turn.
fn plan(systems: &[(u32, u32)]) -> Vec<Turn> {
    let mut turns = Vec::new();
    let mut done = vec![0; systems.len()];
    for round in 0.. {
        let before = turns.len();
        let mut order: Vec<_> = (0..systems.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for system in order {
            let (all, each) = systems[system];
            let last = all.min(done[system] + each);
            if last > done[system] {
                turns.push(Turn { system, runs: done[system] + 1..=last });
                done[system] = last;
            }
        }
        if turns.len() == before {
            break;
        }
    }
    turns
}

/// How many runs a turn has.
fn runs_of_a_turn(case: &Case, system: System, runs: u32) -> u32 {
    if case.load.lasts() && system.returns() { runs.div_ceil(TURNS) } else { 1 }
}

/// All runs of one case. Samples are by system.
pub fn measure(
    case: &'static Case,
    systems: &[(System, u32)],
    limit: Duration,
    interrupted: &AtomicBool,
) -> (Vec<Vec<Sample>>, Vec<Failure>) {
    let mut samples: Vec<Vec<Sample>> = systems.iter().map(|_| Vec::new()).collect();
    let mut failures = Vec::new();
    let counts: Vec<_> = systems.iter().map(|(s, runs)| (*runs, runs_of_a_turn(case, *s, *runs))).collect();
    for turn in plan(&counts) {
        let (system, runs) = systems[turn.system];
        let last = *turn.runs.end();
        let mut stand = None;
        for run in turn.runs {
            let outcome = perform(case, system, &mut stand, run == last, limit);
            // Once a signal has come, the thread that took it takes the lab down and ends the process.
            while interrupted.load(Ordering::SeqCst) {
                std::thread::park();
            }
            let what = format!("{:<20} {:<10} run {run}/{runs}", case.name(), system.name());
            match outcome {
                Ok(sample) => {
                    say(&format!("  {what}  {sample}"));
                    samples[turn.system].push(sample);
                }
                Err(e) => {
                    let error = format!("{e:#}");
                    say(&format!("  {what}  FAILED: {error}"));
                    failures.push(Failure { workload: case.name(), system: system.name(), run, error });
                }
            }
        }
    }
    (samples, failures)
}

/// One run in the lab that is up, or in a new one; after the last run of a turn, and after one that failed, none is.
fn perform(
    case: &'static Case,
    system: System,
    stand: &mut Option<Stand>,
    is_last: bool,
    limit: Duration,
) -> anyhow::Result<Sample> {
    let mut up = match stand.take() {
        Some(up) => up,
        None => Stand::up(case, system)?,
    };
    let sample = up.measure(limit)?;
    if is_last {
        up.check_all()?;
        up.down()?;
    } else {
        *stand = Some(up);
    }
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(system: usize, runs: RangeInclusive<u32>) -> Turn {
        Turn { system, runs }
    }

    #[test]
    fn systems_take_turns_and_in_going_first() {
        let expected = [turn(0, 1..=15), turn(1, 1..=3), turn(1, 4..=5), turn(0, 16..=30)];
        assert_eq!(plan(&[(30, 15), (5, 3)]), expected);
    }

    #[test]
    fn what_cannot_be_moved_again_takes_turns_run_by_run() {
        let expected = [turn(0, 1..=1), turn(1, 1..=1), turn(1, 2..=2), turn(0, 2..=2), turn(0, 3..=3)];
        assert_eq!(plan(&[(3, 1), (2, 1)]), expected);
    }

    #[test]
    fn every_run_is_performed_once() {
        for (runs, each) in [(1, 1), (5, 3), (30, 15), (7, 1)] {
            let all: Vec<u32> = plan(&[(runs, each)]).into_iter().flat_map(|turn| turn.runs).collect();
            assert_eq!(all, (1..=runs).collect::<Vec<_>>());
        }
        assert_eq!(plan(&[]), []);
    }
}
