//! When pre-copy has done its part: pure, from what the rounds so far have shown.

use std::time::Duration;

/// What one round has shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundSeen {
    /// Bytes that it sent.
    pub bytes: u64,
    /// How long sending them took.
    pub took: Duration,
}

/// What the user wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long what is sent in the freeze may take.
    pub budget: Duration,
    /// Rounds at most.
    pub max_rounds: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { budget: Duration::from_millis(10), max_rounds: 12 }
    }
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Another round: it will leave less.
    Another,
    /// Freeze: what is left fits the budget.
    Converged,
    /// Freeze, or finish otherwise: rounds no longer help.
    Diverging,
}

/// A round must leave at most this share of what the one before left, or it was of little use.
const USEFUL: f64 = 0.8;

/// Decides after a round.
///
/// While a round's pages travel, the container writes new ones; to first order what the next round finds shrinks by the
/// ratio of dirty rate to link rate, so that the last round's size is an upper estimate of what a freeze now would leave.
/// Two rounds of little use in a row are divergence: one alone may be a burst.
pub fn decide(rounds: &[RoundSeen], limits: Limits) -> Verdict {
    let Some(last) = rounds.last() else { return Verdict::Another };
    // The best rate that was seen: small rounds are all latency.
    let rate = |r: &RoundSeen| r.bytes as f64 / r.took.as_secs_f64().max(1e-6);
    let best = rounds.iter().map(rate).fold(0.0, f64::max);
    if rounds.len() > 1 && last.bytes as f64 <= best * limits.budget.as_secs_f64() {
        return Verdict::Converged;
    }
    if rounds.len() as u32 >= limits.max_rounds {
        return Verdict::Diverging;
    }
    let of_little_use = |pair: &[RoundSeen]| pair[1].bytes as f64 > pair[0].bytes as f64 * USEFUL;
    let recent = &rounds[rounds.len().saturating_sub(3)..];
    if recent.len() == 3 && recent.windows(2).all(of_little_use) {
        return Verdict::Diverging;
    }
    Verdict::Another
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MB: u64 = 1_000_000;

    /// A container that writes `dirty` bytes a second over `working` bytes, moved over a link of `link` bytes a second.
    fn simulate(total: u64, working: u64, dirty: f64, link: f64, limits: Limits) -> (Vec<RoundSeen>, Verdict) {
        let mut rounds = Vec::new();
        let mut bytes = total;
        loop {
            let took = bytes as f64 / link;
            rounds.push(RoundSeen { bytes, took: Duration::from_secs_f64(took) });
            match decide(&rounds, limits) {
                Verdict::Another => bytes = ((dirty * took) as u64).min(working),
                verdict => return (rounds, verdict),
            }
        }
    }

    #[test]
    fn an_idle_container_takes_two_rounds() {
        let (rounds, verdict) = simulate(1000 * MB, 1000 * MB, 1e3, 1e9, Limits::default());
        assert_eq!((rounds.len(), verdict), (2, Verdict::Converged));
    }

    #[test]
    fn one_that_writes_faster_than_the_link_is_given_up_soon() {
        let (rounds, verdict) = simulate(4000 * MB, 4000 * MB, 8e8, 1.2e8, Limits::default());
        assert_eq!(verdict, Verdict::Diverging);
        assert!(rounds.len() <= 4, "{}", rounds.len());
    }

    #[test]
    fn one_that_writes_at_half_the_link_s_rate_converges() {
        let (_, verdict) = simulate(1000 * MB, 1000 * MB, 5e8, 1e9, Limits::default());
        assert_eq!(verdict, Verdict::Converged);
    }

    proptest! {
        #[test]
        fn it_always_ends_and_never_beyond_the_limit(
            total in 1u64..1 << 36, share in 0.0f64..1.0, dirty in 0.0f64..1e10, link in 1e5f64..1e10, max in 1u32..40
        ) {
            let limits = Limits { max_rounds: max, ..Limits::default() };
            let (rounds, verdict) = simulate(total, (total as f64 * share) as u64, dirty, link, limits);
            prop_assert!(rounds.len() as u32 <= max);
            if verdict == Verdict::Converged {
                let last = rounds.last().unwrap();
                prop_assert!(last.bytes as f64 / link <= limits.budget.as_secs_f64() * 1.01 + 1e-6);
            }
        }
    }
}
