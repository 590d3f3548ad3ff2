//! When things happened, on one clock.

use tranship_sys::clock::monotonic_ns;
use tranship_types::{Part, Side};

/// The destination's clock as the source sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct ClockOffset {
    /// The destination's CLOCK_MONOTONIC minus the source's, in ns.
    offset_ns: i64,
    /// By how much that can be wrong, in ns: half the shortest round trip.
    pub error_ns: u64,
}

impl ClockOffset {
    /// The best of several round trips: `(sent, answered by the destination, received)` in ns. The shortest one errs least.
    pub fn from_round_trips(trips: &[(u64, u64, u64)]) -> Self {
        let best = trips.iter().min_by_key(|(sent, _, received)| received.saturating_sub(*sent));
        best.map_or_else(Self::default, |&(sent, theirs, received)| {
            let half = received.saturating_sub(sent) / 2;
            Self { offset_ns: theirs as i64 - (sent + half) as i64, error_ns: half }
        })
    }

    /// A time of the destination on the source's clock.
    pub fn to_source(self, destination_ns: u64) -> u64 {
        destination_ns.saturating_add_signed(-self.offset_ns)
    }
}

/// The parts of one side of a migration, in that side's clock until they are put together.
#[derive(Debug, Default)]
pub struct Timeline {
    rows: Vec<(String, u64, u64)>,
}

impl Timeline {
    /// Does something and notes how long it took.
    pub fn time<T>(&mut self, name: impl Into<String>, work: impl FnOnce() -> T) -> T {
        let start = monotonic_ns();
        let result = work();
        self.rows.push((name.into(), start, monotonic_ns()));
        result
    }

    /// Notes something that was timed elsewhere.
    pub fn note(&mut self, name: impl Into<String>, start_ns: u64, end_ns: u64) {
        self.rows.push((name.into(), start_ns, end_ns));
    }

    /// The parts, times in ms of this side's clock; empties the timeline.
    pub fn take(&mut self, side: Side) -> Vec<Part> {
        let part = |(name, start, end): (String, u64, u64)| Part {
            name,
            side,
            start_ms: start as f64 / 1e6,
            ms: end.saturating_sub(start) as f64 / 1e6,
        };
        self.rows.drain(..).map(part).collect()
    }
}

/// Puts the destination's parts on the source's clock, and all of them relative to the start of the freeze.
pub fn align(parts: &mut [Part], clock: ClockOffset, freeze_ns: u64) {
    for part in parts {
        if part.side == Side::Destination {
            part.start_ms -= clock.offset_ns as f64 / 1e6;
        }
        part.start_ms -= freeze_ns as f64 / 1e6;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_round_trip_tells_the_offset() {
        // The destination's clock is 1000 ahead; the second trip was delayed on the way back.
        let clock = ClockOffset::from_round_trips(&[(100, 1150, 200), (300, 1350, 900)]);
        assert_eq!(clock.to_source(1150), 150);
        assert_eq!(clock.error_ns, 50);
    }
}
