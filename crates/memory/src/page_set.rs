//! A set of pages. What is scattered costs a bit for each page, what lies in a row costs nothing for each: a busy container has
//! written hundreds of thousands of single pages when it is frozen, and whoever lists them there keeps it waiting.

use std::collections::BTreeMap;

use tranship_types::{PAGE_SIZE, PageRange};

use crate::index::{Extent, Index};

/// Pages in a block: as many as one page of a page table lists.
const BLOCK_PAGES: usize = 512;
/// Bytes of a block.
const BLOCK: u64 = BLOCK_PAGES as u64 * PAGE_SIZE;

/// Some pages of one block, a bit each.
type Bits = [u64; BLOCK_PAGES / 64];

const NONE: Bits = [0; BLOCK_PAGES / 64];
const ALL: Bits = [u64::MAX; BLOCK_PAGES / 64];

/// A set of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageSet {
    /// Blocks of which all pages are in it, each stored at its own address.
    whole: Index,
    /// Those of which some are, by their addresses.
    parts: BTreeMap<u64, Bits>,
}

/// The block of a page.
fn block_of(address: u64) -> u64 {
    address & !(BLOCK - 1)
}

/// The blocks that lie in `range`, and what of it lies in others: in one at its start and one at its end, at most.
fn split(range: PageRange) -> (Option<PageRange>, impl Iterator<Item = PageRange>) {
    let first = range.start.checked_next_multiple_of(BLOCK).map_or(range.end, |first| first.min(range.end));
    let last = block_of(range.end).max(first);
    let ends = [PageRange::new(range.start, first), PageRange::new(last, range.end)];
    (PageRange::new(first, last), ends.into_iter().flatten())
}

/// The bits of pages that lie in one block.
fn bits_of(range: PageRange) -> Bits {
    let first = (range.start % BLOCK / PAGE_SIZE) as usize;
    let end = first + range.pages() as usize;
    std::array::from_fn(|word| {
        let [first, end] = [first, end].map(|page| page.saturating_sub(word * 64).min(64));
        let below = |page: usize| if page == 64 { u64::MAX } else { (1 << page) - 1 };
        below(end) & !below(first)
    })
}

/// The first page from `at` on whose bit is `set`.
fn seek(bits: &Bits, mut at: usize, set: bool) -> usize {
    while at < BLOCK_PAGES {
        let word = if set { bits[at / 64] } else { !bits[at / 64] } >> (at % 64);
        if word != 0 {
            return at + word.trailing_zeros() as usize;
        }
        at = (at / 64 + 1) * 64;
    }
    BLOCK_PAGES
}

/// The runs of pages of a block.
fn runs(block: u64, bits: Bits) -> impl Iterator<Item = PageRange> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let first = seek(&bits, at, true);
        at = seek(&bits, first, false);
        let address = |page: usize| block + page as u64 * PAGE_SIZE;
        (first < at).then(|| PageRange { start: address(first), end: address(at) })
    })
}

impl PageSet {
    /// Adds pages.
    pub fn insert(&mut self, range: PageRange) {
        let (blocks, ends) = split(range);
        blocks.into_iter().for_each(|blocks| self.insert_blocks(blocks));
        for end in ends {
            let block = block_of(end.start);
            if self.whole.find(block).is_some() {
                continue;
            }
            let part = self.parts.entry(block).or_insert(NONE);
            part.iter_mut().zip(bits_of(end)).for_each(|(word, more)| *word |= more);
            if *part == ALL {
                self.insert_blocks(PageRange { start: block, end: block + BLOCK });
            }
        }
    }

    fn insert_blocks(&mut self, range: PageRange) {
        self.drop_parts(range);
        self.whole.insert(Extent { range, offset: range.start });
    }

    fn drop_parts(&mut self, range: PageRange) {
        while let Some((&block, _)) = self.parts.range(range.start..range.end).next() {
            self.parts.remove(&block);
        }
    }

    /// Takes pages out.
    pub fn remove(&mut self, range: PageRange) {
        let (blocks, ends) = split(range);
        if let Some(blocks) = blocks {
            self.drop_parts(blocks);
            self.whole.remove(blocks);
        }
        ends.for_each(|end| self.remove_bits(block_of(end.start), &bits_of(end)));
    }

    fn remove_bits(&mut self, block: u64, bits: &Bits) {
        if self.whole.find(block).is_some() {
            self.whole.remove(PageRange { start: block, end: block + BLOCK });
            self.parts.insert(block, ALL);
        }
        if let Some(part) = self.parts.get_mut(&block) {
            part.iter_mut().zip(bits).for_each(|(word, less)| *word &= !less);
            if *part == NONE {
                self.parts.remove(&block);
            }
        }
    }

    /// Takes out all that are in another set.
    pub fn remove_all(&mut self, other: &PageSet) {
        other.whole.within(PageRange::EVERYTHING).into_iter().for_each(|extent| self.remove(extent.range));
        other.parts.iter().for_each(|(block, bits)| self.remove_bits(*block, bits));
    }

    /// Takes out what lies in `range`, and returns it in order.
    pub fn take(&mut self, range: PageRange) -> Vec<PageRange> {
        let taken = self.within(range);
        self.remove(range);
        taken
    }

    /// What lies in `range`, cut to it, in order, as runs that do not touch each other.
    pub fn within(&self, range: PageRange) -> Vec<PageRange> {
        let mut found: Vec<PageRange> = Vec::new();
        let mut add = |run: PageRange| match found.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => found.push(run),
        };
        let mut whole = self.whole.within(range).into_iter().map(|extent| extent.range).peekable();
        for (&block, &bits) in self.parts.range(block_of(range.start)..range.end) {
            while let Some(run) = whole.next_if(|run| run.start < block) {
                add(run);
            }
            runs(block, bits).filter_map(|run| run.intersection(&range)).for_each(&mut add);
        }
        whole.for_each(add);
        found
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<PageRange> {
        self.within(PageRange::EVERYTHING)
    }

    /// Takes out the blocks of 2 MiB of which all pages are in it, and returns them in order.
    pub fn take_blocks(&mut self) -> Vec<PageRange> {
        std::mem::take(&mut self.whole).within(PageRange::EVERYTHING).into_iter().map(|extent| extent.range).collect()
    }

    /// Bytes of the pages.
    pub fn bytes(&self) -> u64 {
        let parts: u64 = self.parts.values().flatten().map(|word| u64::from(word.count_ones())).sum();
        self.whole.bytes() + parts * PAGE_SIZE
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.parts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Not at the start of a block.
    const FIRST: u64 = 5 * BLOCK_PAGES as u64 - 300;

    fn pages(at: u64, n: u64) -> PageRange {
        PageRange { start: (FIRST + at) * PAGE_SIZE, end: (FIRST + at + n) * PAGE_SIZE }
    }

    fn numbers(runs: &[PageRange]) -> Vec<u64> {
        runs.iter()
            .flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE as usize))
            .map(|a| a / PAGE_SIZE - FIRST)
            .collect()
    }

    fn deeds() -> impl Strategy<Value = Vec<(bool, u64, u64)>> {
        let length = prop_oneof![1..4u64, 60..70u64, 500..1600u64];
        proptest::collection::vec((any::<bool>(), 0..2000u64, length), 1..40)
    }

    fn done(deeds: &[(bool, u64, u64)]) -> (PageSet, BTreeSet<u64>) {
        let (mut set, mut model) = (PageSet::default(), BTreeSet::new());
        for &(insert, at, n) in deeds {
            if insert {
                set.insert(pages(at, n));
                model.extend(at..at + n);
            } else {
                let taken = set.take(pages(at, n));
                let expected: Vec<u64> = (at..at + n).filter(|page| model.remove(page)).collect();
                assert_eq!(numbers(&taken), expected);
            }
        }
        (set, model)
    }

    proptest! {
        /// The same deeds on a set of single pages give the same answers.
        #[test]
        fn it_behaves_as_a_set_of_single_pages(first in deeds(), second in deeds(), from in 0..3000u64, n in 1..2000u64) {
            let (mut set, mut model) = done(&first);
            let (other, others) = done(&second);
            prop_assert_eq!(set.bytes(), model.len() as u64 * PAGE_SIZE);
            prop_assert_eq!(set.is_empty(), model.is_empty());
            let expected: Vec<u64> = model.range(from..from + n).copied().collect();
            prop_assert_eq!(numbers(&set.within(pages(from, n))), expected);
            set.remove_all(&other);
            model.retain(|page| !others.contains(page));
            let all = set.all();
            prop_assert_eq!(numbers(&all), model.iter().copied().collect::<Vec<_>>());
            prop_assert!(all.windows(2).all(|two| two[0].end < two[1].start), "runs do not touch");
            let mut again = PageSet::default();
            all.iter().rev().for_each(|run| again.insert(*run));
            prop_assert_eq!(again, set, "what has the same pages is equal");
        }
    }

    #[test]
    fn whole_blocks_are_taken_out_and_parts_stay() {
        let mut set = PageSet::default();
        let blocks = PageRange { start: 4 * BLOCK, end: 6 * BLOCK };
        set.insert(PageRange { start: blocks.start - PAGE_SIZE, end: blocks.end });
        assert_eq!(set.take_blocks(), [blocks]);
        assert_eq!(set.all(), [PageRange { start: blocks.start - PAGE_SIZE, end: blocks.start }]);
        assert!(set.take_blocks().is_empty());
    }

    #[test]
    fn all_that_there_can_be_takes_no_more_room_than_one_run() {
        let mut set = PageSet::default();
        set.insert(PageRange::EVERYTHING);
        assert_eq!(set.all(), [PageRange::EVERYTHING]);
        assert!(set.parts.len() <= 1);
        set.remove(PageRange::EVERYTHING);
        assert!(set.is_empty());
    }
}
