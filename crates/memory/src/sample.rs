//! How much a running container writes to in how much time: rounds that send nothing.
//!
//! The first look arms the watch, and each one after it waits twice as long as the one before; what it finds was written
//! meanwhile. The container runs all the time, but for the instants that the method takes for itself: in which each of its
//! processes opens a descriptor (0.3 ms), say. When the watch is dropped nothing is left in the tasks.

use std::time::{Duration, Instant};

use crate::predict::Look;
use crate::tracker::{Method, TrackError, Tracker};

/// The first look's distance.
const SHORTEST: Duration = Duration::from_millis(5);

/// What sampling has found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    /// Memory that rounds would move, in bytes.
    pub memory: u64,
    /// The looks, the shortest first.
    pub looks: Vec<Look>,
    /// How long a look took, on the average.
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
    let mut tracker = Tracker::new(method);
    let began = Instant::now();
    let mut sample = Sample { memory: tracker.round(&pids()?)?.plan.bytes(), ..Sample::default() };
    let (mut before, mut wait, mut looking) = (Instant::now(), SHORTEST, Duration::ZERO);
    while began.elapsed() < time && pause(wait.min(time.saturating_sub(began.elapsed()))) {
        let look = Instant::now();
        let bytes = tracker.round(&pids()?)?.plan.bytes();
        sample.looks.push(Look { window: before.elapsed(), bytes });
        before = Instant::now();
        looking += look.elapsed();
        wait *= 2;
    }
    sample.looking = looking / u32::try_from(sample.looks.len().max(1)).unwrap_or(u32::MAX);
    sample.sampled = began.elapsed();
    // The last one may have been cut short.
    sample.looks.sort_by_key(|look| look.window);
    Ok(sample)
}
