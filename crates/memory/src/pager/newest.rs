//! Which pages have come last.

use std::collections::VecDeque;

use tranship_types::{AddressSpaceId, PageRange};

/// Bytes of pages that are remembered: they are put in place in a few milliseconds.
const BYTES: u64 = 4 << 20;
/// Most bytes that are put in place at once.
const PIECE: u64 = 64 << 10;

/// The pages that have come last, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Newest {
    ranges: VecDeque<(AddressSpaceId, PageRange)>,
    bytes: u64,
}

impl Newest {
    /// These have come now.
    pub fn push(&mut self, space: AddressSpaceId, range: PageRange) {
        let first = range.end.saturating_sub(BYTES).max(range.start);
        for start in (first..range.end).step_by(PIECE as usize) {
            let piece = PageRange { start, end: range.end.min(start + PIECE) };
            self.bytes += piece.len();
            self.ranges.push_back((space, piece));
        }
        while self.bytes > BYTES {
            self.bytes -= self.ranges.pop_front().map_or(0, |(_, range)| range.len());
        }
    }

    /// The newest that has not been taken yet.
    pub fn pop(&mut self) -> Option<(AddressSpaceId, PageRange)> {
        let newest = self.ranges.pop_back()?;
        self.bytes -= newest.1.len();
        Some(newest)
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_come_first_and_old_ones_are_forgotten() {
        let id = AddressSpaceId(1);
        let mut newest = Newest::default();
        newest.push(id, PageRange { start: 0, end: BYTES });
        newest.push(id, PageRange { start: 2 * BYTES, end: 2 * BYTES + PIECE + 4096 });
        assert_eq!(newest.pop(), Some((id, PageRange { start: 2 * BYTES + PIECE, end: 2 * BYTES + PIECE + 4096 })));
        assert_eq!(newest.pop(), Some((id, PageRange { start: 2 * BYTES, end: 2 * BYTES + PIECE })));
        assert_eq!(newest.pop(), Some((id, PageRange { start: BYTES - PIECE, end: BYTES })));
        let left: u64 = std::iter::from_fn(|| newest.pop()).map(|(_, range)| range.len()).sum();
        assert_eq!(left, BYTES - 3 * PIECE, "two whole pieces were forgotten for what came later");
        assert!(newest.is_empty());
    }
}
