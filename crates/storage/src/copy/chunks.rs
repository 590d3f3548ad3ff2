//! Sets of a file's chunks.

use std::collections::BTreeMap;
use std::ops::Range;

/// Chunks in one word: those of a large folio.
const WORD: u64 = u128::BITS as u64;

/// Numbers of chunks, neighbours in one word, so that large parts of a file take little memory.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Chunks(BTreeMap<u64, u128>);

impl Chunks {
    /// Adds those of a range.
    pub fn add(&mut self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let stop = range.end.min((at / WORD + 1) * WORD);
            let ones = u128::MAX >> (WORD - (stop - at));
            *self.0.entry(at / WORD).or_default() |= ones << (at % WORD);
            at = stop;
        }
    }

    /// Adds all of another set.
    pub fn merge(&mut self, other: &Self) {
        for (word, bits) in &other.0 {
            *self.0.entry(*word).or_default() |= bits;
        }
    }

    /// Those of a range that are in the set, in order.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        // Both ends in one word do for a range that is empty.
        let words = range.start / WORD..range.end.max(range.start).div_ceil(WORD).max(range.start / WORD);
        let each = self.0.range(words).flat_map(|(word, bits)| {
            (0..WORD).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| word * WORD + bit)
        });
        each.filter(move |chunk| range.contains(chunk))
    }

    /// Whether one of a range is in the set.
    pub fn meets(&self, range: Range<u64>) -> bool {
        self.within(range).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(
            added in proptest::collection::vec((0u64..600, 0u64..300), 0..8),
            more in proptest::collection::vec((0u64..600, 0u64..300), 0..4),
            (from, length) in (0u64..700, 0u64..400),
        ) {
            let (mut chunks, mut other, mut known) = (Chunks::default(), Chunks::default(), BTreeSet::new());
            for (set, ranges) in [(&mut chunks, &added), (&mut other, &more)] {
                for (start, length) in ranges {
                    set.add(*start..start + length);
                    known.extend(*start..start + length);
                }
            }
            chunks.merge(&other);
            let range = from..from + length;
            let expected: Vec<u64> = known.range(range.clone()).copied().collect();
            prop_assert_eq!(chunks.within(range.clone()).collect::<Vec<_>>(), expected.clone());
            prop_assert_eq!(chunks.meets(range), !expected.is_empty());
        }
    }
}
