//! When pre-copy has done its part: pure, from what the rounds so far have shown.

use std::time::Duration;

/// What one round has shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundSeen {
    /// Bytes that it found to be sent: pages, and what else moves with them.
    pub bytes: u64,
    /// Bytes of those pages that were sent; not of those that did not travel, because another task has the same (what is sent after a freeze travels, all of
    /// it), or because they were written again before it was their turn (the next round finds them).
    pub pages: u64,
    /// Bytes of those that are not zeros.
    pub content: u64,
    /// How long it took to send them.
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

/// Less content disappears in buffers: how long it took tells nothing.
const TELLING: u64 = 16_000_000;

/// What the link carries, in bytes a second: as the round found it that had the most content of those after the first, which may have waited for the destination's
/// memory; as the first one did, if no other one tells; and if none does, as the largest did, pages of zeros included.
pub fn link_rate(rounds: &[RoundSeen]) -> f64 {
    let rate = |bytes: u64, round: &RoundSeen| bytes as f64 / round.took.as_secs_f64().max(1e-6);
    let telling = |rounds: &[RoundSeen]| {
        let most = rounds.iter().filter(|round| round.content >= TELLING).max_by_key(|round| round.content);
        most.map(|round| rate(round.content, round))
    };
    let largest = || rounds.iter().max_by_key(|round| round.pages).map(|round| rate(round.pages, round));
    let later = telling(rounds.get(1..).unwrap_or_default());
    later.or_else(|| telling(rounds)).or_else(largest).unwrap_or_default()
}

/// Decides after a round.
///
/// While a round's pages travel, the container writes new ones; to first order what the next round finds shrinks by the
/// ratio of dirty rate to link rate, so that the last round's size is an upper estimate of what a freeze now would leave.
/// Two rounds of little use in a row are divergence: one alone may be a burst.
pub fn decide(rounds: &[RoundSeen], limits: Limits) -> Verdict {
    let Some(last) = rounds.last() else { return Verdict::Another };
    if rounds.len() > 1 && last.bytes as f64 <= link_rate(rounds) * limits.budget.as_secs_f64() {
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

/// Decides after a round where pages may follow the resume: `left` is what the container has written since, in bytes.
///
/// One round of little use is then enough to stop: what follows the resume travels once, what another round sends may have
/// to travel again.
pub fn decide_early(rounds: &[RoundSeen], left: u64, limits: Limits) -> Verdict {
    let Some(last) = rounds.last() else { return Verdict::Another };
    if left as f64 <= link_rate(rounds) * limits.budget.as_secs_f64() {
        return Verdict::Converged;
    }
    if rounds.len() as u32 >= limits.max_rounds || left as f64 > last.bytes as f64 * USEFUL {
        return Verdict::Diverging;
    }
    Verdict::Another
}

/// Whether no further round is allowed: a number that the user has given counts all rounds, also those before the container was
/// slowed down.
pub fn used_up(rounds: &[RoundSeen], given: Option<u32>) -> bool {
    given.is_some_and(|most| rounds.len() as u32 >= most)
}

/// How much less CPU a container gets whose rounds diverge although every page shall precede the decision, in percent: the
/// step after `now`; `None` when nothing is left to take away.
pub fn throttle_after(now: u8) -> Option<u8> {
    [20, 40, 60, 80, 90, 95, 99].into_iter().find(|step| *step > now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MB: u64 = 1_000_000;

    fn seen(bytes: u64, pages: u64, took: Duration) -> RoundSeen {
        RoundSeen { bytes, pages, content: pages, took }
    }

    /// A container that writes `dirty` bytes a second over `working` bytes, moved over a link of `link` bytes a second.
    fn simulate(total: u64, working: u64, dirty: f64, link: f64, limits: Limits) -> (Vec<RoundSeen>, Verdict) {
        let mut rounds = Vec::new();
        let mut bytes = total;
        loop {
            let took = bytes as f64 / link;
            rounds.push(seen(bytes, bytes, Duration::from_secs_f64(took)));
            match decide(&rounds, limits) {
                Verdict::Another => bytes = ((dirty * took) as u64).min(working),
                verdict => return (rounds, verdict),
            }
        }
    }

    #[test]
    fn what_did_not_travel_tells_nothing_of_the_link() {
        let round = |mb: u64, content: u64| RoundSeen {
            content: content * MB,
            ..seen(mb * MB, mb * MB, Duration::from_secs(1))
        };
        assert_eq!(link_rate(&[round(8000, 40), round(5, 5)]), 40.0 * MB as f64);
        assert_eq!(link_rate(&[round(40, 40), round(8000, 60)]), 60.0 * MB as f64);
        assert_eq!(link_rate(&[round(12, 3), round(5, 5)]), 12.0 * MB as f64, "none has much content");
    }

    #[test]
    fn a_first_round_that_waited_for_memory_tells_nothing_of_the_link_if_another_does() {
        let round = |mb: u64, ms: u64| seen(mb * MB, mb * MB, Duration::from_millis(ms));
        let waited = round(4000, 8000);
        assert_eq!(link_rate(&[waited, round(1000, 1000), round(500, 100)]), 1000.0 * MB as f64);
        assert_eq!(link_rate(&[waited, round(10, 1)]), 500.0 * MB as f64, "what is small tells nothing");
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

    #[test]
    fn where_pages_may_follow_one_round_of_little_use_is_enough() {
        let seen = |mb: u64, s: f64| seen(mb * MB, mb * MB, Duration::from_secs_f64(s));
        let limits = Limits::default();
        assert_eq!(decide_early(&[], 7, limits), Verdict::Another);
        assert_eq!(decide_early(&[seen(4000, 32.0)], 3900 * MB, limits), Verdict::Diverging);
        assert_eq!(decide_early(&[seen(4000, 32.0)], 1000 * MB, limits), Verdict::Another);
        assert_eq!(decide_early(&[seen(4000, 4.0)], 9 * MB, limits), Verdict::Converged);
        let one = Limits { max_rounds: 1, ..limits };
        assert_eq!(decide_early(&[seen(4000, 32.0)], 1000 * MB, one), Verdict::Diverging);
    }

    #[test]
    fn throttling_goes_on_until_almost_nothing_is_left() {
        let steps: Vec<u8> = std::iter::successors(throttle_after(0), |now| throttle_after(*now)).collect();
        assert_eq!(steps, [20, 40, 60, 80, 90, 95, 99]);
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
