//! How much a running container writes to in how much time.
//!
//! Nothing in the container changes: its memory is read, and compared with what it was. The first look takes hashes, and each one after it is twice as far
//! away from that as the one before; what differs was written since. Of a large container only a sample of pages is read, some 20 ms of a processor for
//! each look. The container runs all the time.

use std::time::{Duration, Instant};

use crate::predict::Look;
use crate::tracker::{Method, TrackError, Tracker};

/// The distance of the second look from the first.
const SHORTEST: Duration = Duration::from_millis(5);
/// So many bytes of a container are read in a look, about.
const READ: u64 = 16 << 20;
/// How many times it is tried to read every process, since one may be executing another program just then, and the pause between two.
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

/// Watches a container's writes for about `time`; a move would find them by `method`. `pids` gives its processes at each look; `pause` waits, and says whether to
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
    let memory = Tracker::new(Method::Hash).left(&pids()?);
    let all = began.elapsed();
    let every = memory.div_ceil(READ).max(1);
    let mut tracker = Tracker::of_sample(every);
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
        // To read and compare takes time.
        window = 2 * window.max(armed.elapsed());
    }
    let looks = u32::try_from(sample.looks.len().max(1)).unwrap_or(u32::MAX);
    sample.looking = match method {
        // A move reads all of it.
        Method::Hash => all.max(looking / looks * u32::try_from(every).unwrap_or(u32::MAX)),
        _ => all,
    };
    sample.sampled = began.elapsed();
    Ok(sample)
}
