//! How much a running container writes to in how much time.
//!
//! The first look arms the watch, and each one after it is twice as far away from that as the one before; what it finds was written
//! since. Nothing is armed again: so a page traps its first write and no more, however often it is looked at. And of a large container only a sample of
//! pages is watched, so that it loses no more by it than a small one. It runs all the time, but for the
//! instants that the method takes for itself: in which each of its processes opens a descriptor (0.3 ms), say. When the watch is dropped nothing is left in the tasks.

use std::time::{Duration, Instant};

use crate::predict::Look;
use crate::tracker::{Method, TrackError, Tracker};

/// The first look's distance from the arming.
const SHORTEST: Duration = Duration::from_millis(5);
/// So many bytes of a container are watched, about: 16,384 pages, which trap for some 20 ms in all.
const WATCHED: u64 = 64 << 20;
/// How many times it is tried to have every process watched, since one may be executing another program just then, and the pause between two.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(10);

/// What sampling has found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    /// Memory that rounds would move, in bytes.
    pub memory: u64,
    /// The looks, the shortest first.
    pub looks: Vec<Look>,
    /// How long a look at all of its memory takes.
    pub looking: Duration,
    /// How long it all took.
    pub sampled: Duration,
}

/// Watches a container's writes by `method` for about `time`. `pids` gives its processes at each look; `pause` waits, and says whether to
/// go on.
///
/// # Errors
/// Those of the tracker.
pub fn sample<E: From<TrackError>>(
    method: Method,
    time: Duration,
    mut pids: impl FnMut() -> Result<Vec<u32>, E>,
    mut pause: impl FnMut(Duration) -> bool,
) -> Result<Sample, E> {
    let began = Instant::now();
    let memory = Tracker::new(method).left(&pids()?);
    let all = began.elapsed();
    let mut tracker = Tracker::of_sample(method, memory.div_ceil(WATCHED));
    for left in (0..TRIES).rev() {
        match tracker.round(&pids()?) {
            Ok(round) if round.complete => break,
            Err(error) if left == 0 => return Err(error.into()),
            _ => {}
        }
        if !pause(PAUSE) {
            break;
        }
    }
    let mut sample = Sample { memory, ..Sample::default() };
    let (armed, mut window, mut looking) = (Instant::now(), SHORTEST, Duration::ZERO);
    let left = |of: Duration, since: Instant| of.saturating_sub(since.elapsed());
    while began.elapsed() < time && pause(left(window, armed).min(left(time, began))) {
        let look = Instant::now();
        let bytes = tracker.left(&pids()?);
        sample.looks.push(Look { window: armed.elapsed(), bytes });
        looking += look.elapsed();
        // Some methods read all memory in a look.
        window = 2 * window.max(armed.elapsed());
    }
    sample.looking = all.max(looking / u32::try_from(sample.looks.len().max(1)).unwrap_or(u32::MAX));
    sample.sampled = began.elapsed();
    Ok(sample)
}
