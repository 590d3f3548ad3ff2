//! How fast a link may send that others shall not queue behind.

use std::time::Duration;

/// Between two looks at how a link fares. In less, a few segments more or less are too much of what was carried.
pub(crate) const LOOK: Duration = Duration::from_millis(20);
/// There is a queue if all segments between two looks have waited for so long beyond the shortest round trip, in seconds. For less, and for what so
/// many bytes of its own take up to so long, a segment may wait for what leaves together with it.
const QUEUE: f64 = 0.2e-3;
const TOGETHER: (f64, f64) = (8e3, 3e-3);
/// The first of these where segments are as large as the kernel makes them: there the receiver takes more at a time, too.
const FAST_QUEUE: f64 = 0.5e-3;
/// How long a segment may take at the pace, in seconds; and so many bytes it may have in any case.
const SEGMENT: f64 = 0.25e-3;
const LEAST_SEGMENT: f64 = 4e3;
/// The largest segment that the kernel makes, in bytes.
const LARGEST_SEGMENT: usize = 64 << 10;
/// A link over which less arrives at most, in bytes a second, is filled by one stream on any machine.
const NARROW: f64 = 160e6;
/// The part of what the link carries that is taken of it. The rest is for who comes between, and empties what he leaves behind.
const SHARE: f64 = 0.97;
/// In how much time a queue is to go away.
const EMPTY: Duration = Duration::from_millis(10);
/// The least part of it, while a queue is to go away; and the least part of the most that has ever arrived that it is taken to carry.
const LEAST: f64 = 0.5;
/// The least part of what it was taken to carry that it is taken to carry at the next look. Less may arrive because the sender did not get
/// its turn, or because others fill the queue, too; then less gets through the less is sent.
const DOUBT: f64 = 0.93;
/// Looks for which a pace is held before more is tried.
const HOLD: u32 = 12;
/// By how much more the pace rises with each look.
const GENTLY: f64 = 0.003;
/// So many looks with a queue although no more was tried tell that it is not of this link's making, or none at all: where the processor is
/// busy with others, a round trip takes longer, too.
const STUBBORN: f64 = 6.0;
/// One of them is forgotten in so many looks.
const FORGOTTEN: f64 = 25.0;
/// Looks for which nothing is held back then: enough to see what the link carries, and fewer than those after which others beside it would be let free
/// in their turn.
const FREE: u32 = 4;
/// Where it begins, in bytes a second.
const BEGINNING: f64 = 60e6;
/// By how much more it rises with each look until there has been a queue.
const QUICKLY: f64 = 3.0;

/// Finds the pace at which a link sends as much as it can without having a queue in front of it.
///
/// TCP by itself sends more and more until something is lost, so that the queue in front of the slowest part of the way is always full, and
/// a small answer on another connection waits behind all of it: half a megabyte, over 1 Gbit/s, is 4 ms. The queue shows as a round
/// trip that is longer than the shortest one (as for LEDBAT, RFC 6817), and while there is one, what arrives is what the link carries (as for
/// BBR). A little less than that empties it and keeps it empty.
///
/// ```text
///             a queue                 it is gone               after a while
///   Rising ────────────▶ Emptying ────────────────▶ Holding ────────────────▶ Rising
///                         │    ▲                       │
///    it stays or comes    │    │ a queue               │ a queue
///    back: it is another's▼    │ after a while         ▼
///                          Free                     Emptying
/// ```
///
/// What looks like a queue but is none must not slow it down for good: it never falls below half of the most that has arrived, and is let
/// free, which shows anew how much that is, as soon as there are more of these than its own rising explains.
#[derive(Debug)]
pub(crate) struct Pacer {
    state: State,
    /// Bytes a second.
    pace: f64,
    /// What the link carries, as far as that is known.
    carries: f64,
    /// The most that has arrived in a look, since nothing was held back.
    most: f64,
    stubborn: f64,
    /// Whether there have been queues on a link that is narrow.
    narrow: bool,
    /// The least that a segment has waited since the last look.
    wait: Option<Duration>,
}

/// How many bytes may leave in one segment at a pace in bytes a second. What comes next, on whatever connection, waits until all of it has left; and
/// where round trips are short the kernel makes segments as large as it can, whatever the pace: half a millisecond of a link of 1 Gbit/s.
/// `None` where that is as large as those.
pub(crate) fn segment(pace: u64) -> Option<usize> {
    Some((pace as f64 * SEGMENT).max(LEAST_SEGMENT) as usize).filter(|bytes| *bytes < LARGEST_SEGMENT)
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// By this part more with each look.
    Rising {
        step: f64,
    },
    Emptying,
    Holding {
        looks: u32,
    },
    Free {
        looks: u32,
    },
}

impl Pacer {
    pub fn new() -> Self {
        Self {
            state: State::Rising { step: QUICKLY },
            pace: BEGINNING,
            carries: 0.0,
            most: 0.0,
            stubborn: 0.0,
            narrow: false,
            wait: None,
        }
    }

    /// The pace in bytes a second; beyond any link's where nothing is to be held back.
    pub fn pace(&self) -> u64 {
        self.pace as u64
    }

    /// Whether there have been queues, and the link carries so little that one stream fills it.
    pub fn is_narrow(&self) -> bool {
        self.narrow
    }

    /// A round trip takes so much longer now than the shortest one. To be told with each segment: a queue keeps all of them waiting, a processor
    /// that is busy with others only some.
    pub fn note(&mut self, wait: Duration) {
        self.wait = Some(self.wait.map_or(wait, |least| least.min(wait)));
    }

    /// Nothing was to be sent for a while: what was noted tells nothing.
    pub fn rest(&mut self) {
        self.wait = None;
    }

    /// Since the last look so many bytes a second have arrived.
    pub fn look(&mut self, arrived: f64) {
        let wait = self.wait.take().unwrap_or_default();
        let (bytes, longest) = TOGETHER;
        let least = if segment(self.pace()).is_some() { QUEUE } else { FAST_QUEUE };
        let queue = wait.as_secs_f64() > least + (bytes / arrived).min(longest);
        let unexplained = queue && !matches!(self.state, State::Rising { .. });
        self.stubborn = if unexplained { self.stubborn + 1.0 } else { (self.stubborn - 1.0 / FORGOTTEN).max(0.0) };
        self.most = self.most.max(arrived);
        self.narrow = (self.narrow || queue) && self.most < NARROW;
        self.state = match (self.state, queue) {
            (State::Free { looks }, _) if looks < FREE => {
                self.stubborn = 0.0;
                State::Free { looks: looks + 1 }
            }
            (_, true) if self.stubborn > STUBBORN => {
                (self.pace, self.carries, self.most) = (f64::INFINITY, 0.0, 0.0);
                State::Free { looks: 0 }
            }
            (_, true) => {
                self.carries = arrived.max(self.carries * DOUBT).max(self.most * LEAST);
                self.pace = self.carries * (SHARE - wait.as_secs_f64() / EMPTY.as_secs_f64()).max(LEAST);
                State::Emptying
            }
            (State::Emptying, false) => {
                self.pace = self.carries * SHARE;
                State::Holding { looks: 0 }
            }
            (State::Holding { looks }, false) if looks < HOLD => State::Holding { looks: looks + 1 },
            (State::Holding { .. }, false) => State::Rising { step: GENTLY },
            (State::Rising { step }, false) => {
                // Nothing queues, at more than a narrow link carries.
                self.narrow &= self.pace < NARROW;
                self.pace *= 1.0 + step;
                State::Rising { step: (step + GENTLY).min(QUICKLY) }
            }
            (free @ State::Free { .. }, false) => {
                self.narrow = false;
                free
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one step of the simulation takes.
    const STEP: Duration = Duration::from_micros(500);
    const MICRO: f64 = 1e6;

    /// A link with a queue in front of it, and streams of which each has a pacer and a bound for what it has in the queue.
    struct Link {
        rate: f64,
        /// Bytes that it sends at once after a rest, as a token bucket does, and how many of these there are.
        bucket: f64,
        tokens: f64,
        /// What each stream has in the queue; the last is another's.
        queued: Vec<f64>,
        arrived: Vec<f64>,
        pacers: Vec<Pacer>,
        /// Bytes a second that somebody else sends, who never has more than so many bytes in the queue.
        other: (f64, f64),
        /// Or so many bytes at once, as soon as the last of these have left and so much time has passed.
        answers: Option<(f64, Duration)>,
        next_answer: Duration,
        answered: f64,
        now: Duration,
        /// The streams' processor does something else, on an average after so many seconds for so many seconds.
        busy: Option<(f64, f64)>,
        busy_until: Duration,
        /// Nothing is held back.
        free: bool,
        /// By how much longer, in seconds, round trips seem to take since then.
        late: f64,
        looked: Duration,
        seed: u64,
    }

    const IN_FLIGHT: f64 = 256e3;

    /// What an answer may wait for in one of 100 cases, in µs.
    fn bound(rate: f64) -> f64 {
        2000.0 + 200e3 / rate * MICRO
    }

    impl Link {
        fn new(rate: f64, bucket: f64, streams: usize) -> Self {
            Self {
                rate,
                bucket,
                tokens: bucket,
                queued: vec![0.0; streams + 1],
                arrived: vec![0.0; streams],
                pacers: (0..streams).map(|_| Pacer::new()).collect(),
                other: (0.0, 0.0),
                answers: None,
                next_answer: Duration::ZERO,
                answered: 0.0,
                now: Duration::ZERO,
                busy: None,
                busy_until: Duration::ZERO,
                free: false,
                late: 0.0,
                looked: Duration::ZERO,
                seed: 1,
            }
        }

        /// Whether the streams' processor does something else in this step. (Of the kernel's mean an eighth is what the last segments took.)
        fn is_busy(&mut self) -> bool {
            let Some((after, takes)) = self.busy else { return false };
            if self.now < self.busy_until {
                return true;
            }
            self.late *= 7.0 / 8.0;
            let begins = self.random() < STEP.as_secs_f64() / after;
            if begins {
                let takes = 2.0 * takes * self.random();
                self.busy_until = self.now + Duration::from_secs_f64(takes);
                self.late = self.late.max(takes);
            }
            begins
        }

        /// From 0 to 1: a linear congruential generator (Knuth's).
        fn random(&mut self) -> f64 {
            self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 11) as f64 / (1u64 << 53) as f64
        }

        /// How long a byte waits that comes now.
        fn wait(&self) -> Duration {
            Duration::from_secs_f64(self.queued.iter().sum::<f64>().max(0.0) / self.rate)
        }

        /// Goes on for so long: returns the bytes a second that the streams got through, and how long an answer would have waited in µs
        /// (the median and 99 of 100).
        fn run(&mut self, time: Duration) -> (f64, f64, f64) {
            let (end, mut through, mut waits) = (self.now + time, 0.0, Vec::new());
            while self.now < end {
                let step = STEP.as_secs_f64();
                let others = self.queued.len() - 1;
                let busy = self.is_busy();
                for (queued, pacer) in self.queued.iter_mut().zip(&self.pacers).filter(|_| !busy) {
                    let pace = if self.free { f64::INFINITY } else { pacer.pace };
                    *queued += (pace * step).min(IN_FLIGHT - *queued).max(0.0);
                }
                if let Some((bytes, rest)) = self.answers {
                    if self.queued[others] > 1.0 {
                        self.next_answer = self.now + rest;
                    } else if self.now >= self.next_answer {
                        self.queued[others] = bytes;
                        self.answered += bytes;
                    }
                }
                let (rate, most) = self.other;
                self.queued[others] += (rate * step).min(most - self.queued[others]).max(0.0);
                self.tokens = (self.tokens + self.rate * step).min(self.bucket + self.rate * step);
                let all: f64 = self.queued.iter().sum();
                let sent = all.min(self.tokens);
                self.tokens -= sent;
                for (number, queued) in self.queued.iter_mut().enumerate() {
                    let part = if all > 0.0 { sent * *queued / all } else { 0.0 };
                    *queued = (*queued - part).max(0.0);
                    if let Some(arrived) = self.arrived.get_mut(number) {
                        *arrived += part;
                        through += part;
                    }
                }
                waits.push(self.wait().as_secs_f64() * MICRO);
                self.now += STEP;
                let since = self.now - self.looked;
                let wait = self.wait() + Duration::from_secs_f64(self.late);
                self.pacers.iter_mut().filter(|_| !busy).for_each(|pacer| pacer.note(wait));
                if since >= LOOK && !busy {
                    self.looked = self.now;
                    for (pacer, arrived) in self.pacers.iter_mut().zip(&mut self.arrived) {
                        pacer.look(std::mem::take(arrived) / since.as_secs_f64());
                    }
                }
            }
            waits.sort_by(f64::total_cmp);
            (through / time.as_secs_f64(), waits[waits.len() / 2], waits[waits.len() * 99 / 100])
        }
    }

    #[test]
    fn an_answer_hardly_waits_and_the_link_is_used() {
        for (rate, bucket) in [(125e6, 250e3), (125e6, 0.0), (12.5e6, 128e3), (500e6, 0.0), (37e6, 500e3)] {
            for streams in [1, 2, 3] {
                let mut link = Link::new(rate, bucket, streams);
                link.run(Duration::from_millis(500));
                let (through, median, most) = link.run(Duration::from_secs(10));
                let case =
                    format!("{streams} streams on {rate:e} with {bucket:e}: {through:e}, {median} and {most} us");
                assert!(through > 0.95 * rate && median < 700.0 && most < bound(rate), "{case}");
            }
        }
    }

    #[test]
    fn a_narrow_link_is_told_from_others() {
        let mut link = Link::new(125e6, 250e3, 1);
        assert!(!link.pacers[0].is_narrow());
        for (rate, narrow) in [(125e6, true), (1.5e9, false), (37e6, true), (100e9, false), (125e6, true)] {
            link.rate = rate;
            link.run(Duration::from_secs(3));
            // Also when it is let free, by which others would begin in its turn.
            for _ in 0..500 {
                link.run(LOOK);
                assert_eq!(link.pacers[0].is_narrow(), narrow, "{rate:e}: {:?}", link.pacers[0]);
            }
        }
        link.pacers[0] = Pacer { state: State::Free { looks: 0 }, pace: f64::INFINITY, narrow: true, ..Pacer::new() };
        for _ in 0..100 {
            link.run(LOOK);
            assert!(link.pacers[0].is_narrow(), "{:?}", link.pacers[0]);
        }
    }

    #[test]
    fn a_link_that_never_has_a_queue_is_not_held_back() {
        let mut link = Link::new(100e9, 0.0, 2);
        link.run(Duration::from_millis(200));
        assert!(link.pacers.iter().all(|pacer| pacer.pace() > 10_000_000_000));
    }

    #[test]
    fn a_link_that_becomes_faster_or_slower_is_followed() {
        let mut link = Link::new(125e6, 250e3, 2);
        link.run(Duration::from_secs(2));
        for rate in [60e6, 250e6, 25e6, 125e6] {
            link.rate = rate;
            link.run(Duration::from_secs(3));
            let (through, _, most) = link.run(Duration::from_secs(5));
            assert!(through > 0.94 * rate && most < bound(rate), "{rate:e}: {through:e}, {most} us");
        }
    }

    #[test]
    fn a_busy_processor_s_delays_do_not_slow_it_down_for_good() {
        for rate in [12.5e6, 125e6, 1.5e9] {
            for (after, takes) in
                [(10, 2), (10, 5), (20, 4), (20, 10), (50, 4), (50, 20), (100, 20), (300, 10), (300, 40)]
            {
                let through = |paced: bool| {
                    let mut link = Link::new(rate, 0.0, 2);
                    link.busy = Some((f64::from(after) / 1e3, f64::from(takes) / 1e3));
                    link.free = !paced;
                    link.run(Duration::from_secs(18)).0
                };
                let share = through(true) / through(false);
                assert!(share > 0.5, "{rate:e}, each {after} ms for {takes} ms: {share} of what it would be");
            }
        }
    }

    #[test]
    fn the_last_stream_takes_what_the_others_leave() {
        let mut link = Link::new(125e6, 250e3, 2);
        link.run(Duration::from_secs(2));
        link.pacers.pop();
        link.queued = vec![0.0; 2];
        link.arrived.pop();
        link.run(Duration::from_millis(1500));
        let (through, _, _) = link.run(Duration::from_secs(3));
        assert!(through > 0.94 * 125e6, "{through:e}");
    }

    #[test]
    fn what_answers_leave_is_used() {
        for (rate, bucket) in [(125e6, 250e3), (125e6, 0.0), (25e6, 128e3)] {
            for rest in [500, 2000, 10_000] {
                let mut link = Link::new(rate, bucket, 2);
                link.answers = Some((32e3, Duration::from_micros(rest)));
                link.run(Duration::from_secs(1));
                link.answered = 0.0;
                let (through, median, most) = link.run(Duration::from_secs(10));
                let all = through + link.answered / 10.0;
                let case = format!("{rate:e} with {bucket:e}, {rest}: {all:e}, {median} and {most} us");
                assert!(all > 0.95 * rate && median < 200.0 + 25e9 / rate && most < bound(rate), "{case}");
            }
        }
    }

    #[test]
    fn a_queue_of_somebody_else_s_does_not_keep_a_stream_from_its_part() {
        let part = |paced: bool| {
            let mut link = Link::new(125e6, 250e3, 2);
            link.other = (1e9, IN_FLIGHT * 2.0);
            link.free = !paced;
            link.run(Duration::from_secs(10)).0
        };
        let (fair, paced) = (part(false), part(true));
        assert!(paced > 0.7 * fair, "{paced:e} of {fair:e}");
    }

    #[test]
    fn a_sender_that_is_slow_itself_does_not_make_the_link_narrow_for_good() {
        let mut pacer = Pacer::new();
        let mut look = |wait| {
            pacer.note(wait);
            pacer.look(80.0 * MICRO);
            pacer.is_narrow()
        };
        assert!(look(Duration::from_millis(5)), "what looks like a queue");
        assert!((0..60).any(|_| !look(Duration::ZERO)));
    }
}
