//! How a move would go: pure, from what was measured, by the same policy that the move itself follows.
//!
//! What matters of the container is one curve: how much it writes to in a given time. It rises steeply at first and flattens
//! where the container comes back to pages that it has written already, so that neither a rate nor the size of a working
//! set alone would do. It is measured by looks that lie further and further apart ([`crate::sample`]); between them it is
//! taken to be straight, and beyond the last one to go on as it did there. A round that takes a time t then leaves what
//! the curve says for t; what comes of it is for the policy to say.

use std::time::Duration;

use tranship_types::{Mode, MoveOptions, Prediction, RoundReport};

use crate::policy::{self, Limits, RoundSeen, Verdict};

/// What the container wrote to within a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Look {
    /// The time.
    pub window: Duration,
    /// Bytes of pages that were written to.
    pub bytes: u64,
}

/// What the cost of a move is apart from memory's way over the link; measured by earlier moves where there were some.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// The blackout of a move that has no memory to send in it.
    pub blackout: Duration,
    /// From the request to the first byte, and from the resume to the end, for a container without memory.
    pub around: Duration,
    /// What is added to `around` for each byte of memory: taking it there, putting it in place, giving it back here.
    pub around_per_byte: Duration,
    /// How many bytes that go.
    pub per: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            blackout: Duration::from_millis(90),
            around: Duration::from_millis(280),
            around_per_byte: Duration::from_millis(500),
            per: 1 << 30,
        }
    }
}

impl Costs {
    /// What a move of so much memory takes besides its rounds and its blackout.
    pub fn around(&self, memory: u64) -> Duration {
        self.around + self.around_per_byte.mul_f64(memory as f64 / self.per as f64)
    }
}

/// How many tasks a container has, and how they are related.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tasks {
    /// Processes that have not ended.
    pub processes: usize,
    /// Their threads, the first ones included.
    pub threads: usize,
    /// Processes that have ended, and that nobody has waited for.
    pub zombies: usize,
    /// How many processes there are from the first one down to the last of its descendants.
    pub depth: usize,
}

impl Tasks {
    /// The blackout of a container with so many tasks that has no memory to send in it, as `make bench SUITE=blackout ONLY=tasks` measures it
    /// on the development machine: criu stops, dumps and makes one after the other.
    pub fn blackout(&self) -> Duration {
        let count = |n: usize, ms: f64| n as f64 * ms;
        let further = self.processes.saturating_sub(1);
        let threads = self.threads.saturating_sub(self.processes);
        let ms = 20.0 + count(further, 3.9) + count(threads, 0.65) + count(self.zombies, 0.045);
        Duration::from_secs_f64(ms / 1e3)
    }
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Observed {
    /// Memory that rounds would move, in bytes.
    pub memory: u64,
    /// What travels in the freeze, whatever the mode, besides memory that rounds move, in bytes.
    pub frozen_content: u64,
    /// The looks, the shortest first.
    pub looks: Vec<Look>,
    /// How long one look takes.
    pub looking: Duration,
    /// For how long it was sampled.
    pub sampled: Duration,
    /// Bytes of pages a second.
    pub link_rate: f64,
    /// Round trip.
    pub round_trip: Duration,
    /// The rest.
    pub costs: Costs,
}

/// Of the shorter one of two things that are done at the same time, so much is added to the longer one: they share
/// processors and memory.
pub const IN_EACH_OTHERS_WAY: f64 = 0.2;
/// What a round takes at least.
const LEAST_ROUND: f64 = 0.000_3;
/// In so many steps it is worked out what of a round is written again before its turn.
const STEPS: u32 = 64;

impl Observed {
    /// Bytes that the container writes to within `seconds`.
    pub fn written_within(&self, seconds: f64) -> u64 {
        let (mut before, mut slope) = ((0.0, 0.0), 0.0);
        for look in &self.looks {
            // A later look that found less than an earlier one, over more time, has met a quiet moment.
            let at = (look.window.as_secs_f64(), (look.bytes as f64).max(before.1));
            if at.0 <= before.0 {
                continue;
            }
            slope = (at.1 - before.1) / (at.0 - before.0);
            if seconds <= at.0 {
                break;
            }
            before = at;
        }
        let bytes = before.1 + slope * (seconds - before.0).max(0.0);
        (bytes as u64).min(self.memory)
    }

    /// What a round sends of `found` bytes that it finds, at `rate` bytes a second, and the seconds that it takes: without what the
    /// container has written again before its turn. Only long runs are left out: of pages that were written anyhow the 16th power of
    /// their share. Writes are taken to be spread over all that was ever seen to be written.
    fn round(&self, found: u64, rate: f64) -> (u64, f64) {
        let step = found as f64 / f64::from(STEPS);
        let written = self.looks.iter().map(|look| look.bytes).fold(found, u64::max).max(1);
        let (mut sent, mut seconds) = (0.0, 0.0);
        for _ in 0..STEPS {
            let share = self.written_within(self.looking.as_secs_f64() + seconds) as f64 / written as f64;
            let again = share.min(1.0);
            let due = step * (1.0 - again.powi(16));
            sent += due;
            seconds += due / rate.max(1.0);
        }
        // Of nothing written again all of it is sent, however the steps were rounded.
        let sent = if sent > found as f64 - 1.0 { found } else { sent as u64 };
        (sent, seconds.max(LEAST_ROUND))
    }

    fn seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.link_rate.max(1.0)
    }

    /// The blackout if so many bytes are sent in it.
    fn blackout(&self, bytes: u64) -> f64 {
        let (memory, rest) = (self.seconds(bytes), self.costs.blackout.as_secs_f64());
        memory.max(rest) + IN_EACH_OTHERS_WAY * memory.min(rest)
    }
}

/// Foretells a move.
pub fn predict(observed: &Observed, options: &MoveOptions, limits: Limits) -> Prediction {
    let (mut rounds, mut seen, mut throttle) = (Vec::new(), Vec::new(), 0);
    let pace = options.bandwidth.map_or(f64::INFINITY, |b| b.bytes_per_second() as f64);
    let mut verdict = Verdict::Converged;
    // What a freeze now would leave.
    let mut left = observed.memory;
    if options.mode.has_rounds() {
        let mut dirty_rate = 0.0;
        // Rounds before this one were under another throttle.
        let mut counted = 0;
        loop {
            let (sent, took) = observed.round(left, observed.link_rate.min(pace));
            let within = Duration::from_secs_f64(took.min(1e9));
            seen.push(RoundSeen { bytes: left, pages: sent, content: sent, took: within });
            rounds.push(RoundReport { bytes: sent, ms: took * 1e3, dirty_rate });
            let between = took + observed.looking.as_secs_f64();
            // With less of the processors the container gets as far as it would in less time.
            left = observed.written_within(between * f64::from(100 - throttle) / 100.0);
            dirty_rate = left as f64 / between;
            verdict = match options.may_commit_early() {
                true => policy::decide_early(&seen, left, limits),
                false => policy::decide(&seen[counted..], limits),
            };
            let used_up = policy::used_up(&seen, options.max_rounds);
            match (verdict, policy::throttle_after(throttle)) {
                (Verdict::Another, _) if used_up => {
                    verdict = Verdict::Diverging;
                    break;
                }
                (Verdict::Another, _) => {}
                (Verdict::Diverging, Some(step)) if options.safe && !options.no_throttle && !used_up => {
                    throttle = step;
                    counted = seen.len() - 1;
                }
                _ => break,
            }
        }
    }
    let sent: u64 = rounds.iter().map(|r| r.bytes).sum();
    // Rounds that have brought it below the budget leave nothing worth committing early for.
    let early = options.may_commit_early() && (rounds.is_empty() || verdict == Verdict::Diverging);
    let (freeze_bytes, later_bytes) = if early { (0, left) } else { (left, 0) };
    let mode = Mode::taken(!rounds.is_empty(), early);
    let blackout = observed.blackout(freeze_bytes + observed.frozen_content);
    let rounds_took: f64 = rounds.iter().map(|r| r.ms / 1e3 + observed.looking.as_secs_f64()).sum();
    let around = observed.costs.around(observed.memory).as_secs_f64();
    let longest = observed.looks.last();
    Prediction {
        mode,
        converges: verdict != Verdict::Diverging,
        throttle_percent: throttle,
        rounds,
        freeze_bytes,
        later_bytes,
        bytes: sent + left,
        blackout_ms: blackout * 1e3,
        total_ms: (rounds_took + blackout + around + observed.seconds(later_bytes)) * 1e3,
        destination_bytes: observed.memory + observed.frozen_content,
        memory_bytes: observed.memory,
        dirty_rate: longest.map_or(0.0, |look| look.bytes as f64 / look.window.as_secs_f64().max(1e-6)),
        working_set_bytes: longest.map_or(0, |look| look.bytes),
        link_rate: observed.link_rate,
        round_trip_ms: observed.round_trip.as_secs_f64() * 1e3,
        sampled_ms: observed.sampled.as_secs_f64() * 1e3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MB: u64 = 1_000_000;

    fn idle() -> Observed {
        Observed {
            memory: 1000 * MB,
            frozen_content: 0,
            looks: vec![],
            looking: Duration::from_millis(2),
            sampled: Duration::from_secs(3),
            link_rate: 1e9,
            round_trip: Duration::from_micros(200),
            costs: Costs::default(),
        }
    }

    /// One that writes `rate` bytes a second, evenly over `working` bytes.
    fn writing(rate: f64, working: u64) -> Observed {
        let look = |ms: u64| {
            let bytes = (rate * ms as f64 / 1e3).min(working as f64) as u64;
            Look { window: Duration::from_millis(ms), bytes }
        };
        Observed { looks: [5, 10, 20, 40, 80, 160, 320, 640, 1280].map(look).to_vec(), ..idle() }
    }

    fn by(mode: Mode, observed: &Observed) -> Prediction {
        predict(observed, &MoveOptions::in_mode(mode), Limits::default())
    }

    #[test]
    fn an_idle_container_takes_two_rounds_and_the_least_blackout() {
        let seen = by(Mode::Precopy, &idle());
        assert_eq!((seen.rounds.len(), seen.converges, seen.mode), (2, true, Mode::Precopy));
        assert!((seen.blackout_ms - 90.0).abs() < 1.0, "{seen:?}");
        assert_eq!(seen.bytes, 1000 * MB);
    }

    #[test]
    fn cold_pays_for_every_byte_in_the_freeze() {
        let seen = by(Mode::Cold, &idle());
        assert_eq!((seen.rounds.len(), seen.freeze_bytes), (0, 1000 * MB));
        assert!((1000.0..1100.0).contains(&seen.blackout_ms), "{seen:?}");
    }

    #[test]
    fn one_that_writes_faster_than_the_link_diverges_and_auto_goes_on_without_it() {
        let busy = Observed { link_rate: 1.2e8, ..writing(8e8, 900 * MB) };
        let precopy = by(Mode::Precopy, &busy);
        assert!(!precopy.converges && precopy.blackout_ms > 5000.0, "{precopy:?}");
        let auto = by(Mode::Auto, &busy);
        assert_eq!(auto.mode, Mode::Hybrid);
        assert!(auto.blackout_ms < 100.0 && auto.later_bytes > 500 * MB, "{auto:?}");
        let safe = MoveOptions { safe: true, ..MoveOptions::in_mode(Mode::Auto) };
        let slowed = predict(&busy, &safe, Limits::default());
        assert!(slowed.mode == Mode::Precopy && slowed.throttle_percent >= 80, "{slowed:?}");
        let bounded = MoveOptions { max_rounds: Some(4), ..safe.clone() };
        let stopped = predict(&busy, &bounded, Limits { max_rounds: 4, ..Limits::default() });
        assert!(stopped.rounds.len() == 4 && !stopped.converges && stopped.throttle_percent > 0, "{stopped:?}");
        assert!(stopped.freeze_bytes > 0 && stopped.later_bytes == 0, "{stopped:?}");
        let refused = predict(&busy, &MoveOptions { no_throttle: true, ..safe }, Limits::default());
        assert!(!refused.converges && refused.throttle_percent == 0, "{refused:?}");
    }

    #[test]
    fn a_bandwidth_slows_the_rounds_and_not_the_freeze() {
        let bandwidth = Some(tranship_types::Bandwidth(800_000_000));
        let options = MoveOptions { bandwidth, ..MoveOptions::in_mode(Mode::Precopy) };
        let seen = predict(&idle(), &options, Limits::default());
        assert!((9900.0..10_100.0).contains(&seen.rounds[0].ms) && seen.blackout_ms < 100.0, "{seen:?}");
    }

    #[test]
    fn a_small_working_set_is_not_taken_for_a_rate() {
        // 4 GB a second, but always to the same 8 MB: what is left fits the budget.
        let seen = by(Mode::Precopy, &writing(4e9, 8 * MB));
        assert!(seen.converges && seen.rounds.len() == 2, "{seen:?}");
    }

    #[test]
    fn the_curve_is_straight_between_looks_and_goes_on_after_the_last() {
        let seen = writing(1e8, 64 * MB);
        assert_eq!(seen.written_within(0.015), 1_500_000);
        assert_eq!(seen.written_within(10.0), 64 * MB);
        let still_rising = writing(1e8, 640 * MB);
        assert_eq!(still_rising.written_within(2.56), 256 * MB);
        assert_eq!(still_rising.written_within(100.0), 1000 * MB, "never more than there is");
    }

    fn looks() -> impl Strategy<Value = Vec<Look>> {
        let look =
            (1u64..5_000_000, 0u64..1 << 36).prop_map(|(us, bytes)| Look { window: Duration::from_micros(us), bytes });
        proptest::collection::vec(look, 0..12).prop_map(|mut looks| {
            looks.sort_by_key(|l| l.window);
            looks
        })
    }

    proptest! {
        #[test]
        fn whatever_was_measured_the_numbers_hold_together(
            memory in 0u64..1 << 38, frozen_content in 0u64..1 << 34, looks in looks(), link_rate in 0.0f64..1e11,
            mode in proptest::sample::select(Mode::ALL.to_vec()), max in 1u32..40, budget in 1u64..60_000
        ) {
            let observed = Observed { memory, frozen_content, looks, link_rate, ..idle() };
            let limits = Limits { max_rounds: max, budget: Duration::from_millis(budget) };
            let seen = predict(&observed, &MoveOptions::in_mode(mode), limits);
            prop_assert!(seen.rounds.len() as u32 <= max);
            prop_assert_eq!(seen.rounds.is_empty(), !mode.has_rounds());
            let rounds: u64 = seen.rounds.iter().map(|r| r.bytes).sum();
            prop_assert_eq!(seen.bytes, rounds + seen.freeze_bytes + seen.later_bytes);
            prop_assert!(seen.bytes >= memory.min(seen.memory_bytes) / 2);
            prop_assert!(seen.blackout_ms.is_finite() && seen.blackout_ms > 0.0 && seen.total_ms >= seen.blackout_ms);
            prop_assert!(seen.later_bytes == 0 || MoveOptions::in_mode(seen.mode).may_commit_early());
        }

        #[test]
        fn more_time_never_leaves_less(memory in 0u64..1 << 38, looks in looks(), a in 0.0f64..20.0, b in 0.0f64..20.0) {
            let observed = Observed { memory, looks, ..idle() };
            prop_assert!(observed.written_within(a.min(b)) <= observed.written_within(a.max(b)));
        }

        #[test]
        fn a_faster_link_shortens_the_freeze_of_a_cold_move(memory in 1u64..1 << 38, rate in 1e5f64..1e10) {
            let slow = by(Mode::Cold, &Observed { memory, link_rate: rate, ..idle() });
            let fast = by(Mode::Cold, &Observed { memory, link_rate: rate * 2.0, ..idle() });
            prop_assert!(fast.blackout_ms <= slow.blackout_ms);
        }
    }
}
