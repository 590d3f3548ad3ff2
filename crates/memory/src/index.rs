//! Where in the page store the pages of one address space are: a map from ranges of addresses to ranges of the arena.
//!
//! It follows what the restored task does to its address space (unmaps, remaps, forks), and the newest version of a page
//! wins over older ones.

use std::collections::BTreeMap;

use tranship_types::PageRange;

/// Pages that are in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Their addresses.
    pub range: PageRange,
    /// Where in the arena the first one is, in bytes.
    pub offset: u64,
}

impl Extent {
    /// Where in the arena they are.
    pub fn place(&self) -> PageRange {
        PageRange { start: self.offset, end: self.offset + self.range.len() }
    }
}

/// The stored pages of one address space that have not been handed to it yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    /// Start address → (end address, arena offset); ranges do not overlap.
    extents: BTreeMap<u64, (u64, u64)>,
    bytes: u64,
}

impl Index {
    /// Bytes that it lists.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// The extent that contains `address`.
    pub fn find(&self, address: u64) -> Option<Extent> {
        let (&start, &(end, offset)) = self.extents.range(..=address).next_back()?;
        (address < end).then_some(Extent { range: PageRange { start, end }, offset })
    }

    /// What lies in `range`, cut to it.
    pub fn within(&self, range: PageRange) -> Vec<Extent> {
        let first = self.extents.range(..range.start).next_back().map_or(range.start, |(start, _)| *start);
        let cut = |(&start, &(end, offset)): (&u64, &(u64, u64))| {
            let range = PageRange { start, end }.intersection(&range)?;
            Some(Extent { range, offset: offset + (range.start - start) })
        };
        self.extents.range(first..range.end).filter_map(cut).collect()
    }

    /// The first extent at or after `address`, else the first of all: for a sweep that goes round.
    pub fn next_from(&self, address: u64) -> Option<Extent> {
        let (&start, &(end, offset)) = self.extents.range(address..).next().or_else(|| self.extents.iter().next())?;
        Some(Extent { range: PageRange { start, end }, offset })
    }

    /// Adds pages; where there were older ones, these take their place, and the older ones are returned.
    pub fn insert(&mut self, extent: Extent) -> Vec<Extent> {
        let replaced = self.remove(extent.range);
        let Extent { range: PageRange { mut start, mut end }, mut offset } = extent;
        self.bytes += extent.range.len();
        // One entry for what follows on in both places keeps the map small and the copies large.
        if let Some((&first, &(last, before))) = self.extents.range(..start).next_back()
            && last == start
            && before + (last - first) == offset
        {
            (start, offset) = (first, before);
        }
        if let Some(&(last, after)) = self.extents.get(&end)
            && after == offset + (end - start)
        {
            self.extents.remove(&end);
            end = last;
        }
        self.extents.insert(start, (end, offset));
        replaced
    }

    /// Takes out what lies in `range` and returns it.
    pub fn remove(&mut self, range: PageRange) -> Vec<Extent> {
        let mut taken = Vec::new();
        let first = self.extents.range(..range.start).next_back().map_or(range.start, |(start, _)| *start);
        let touched: Vec<u64> = self.extents.range(first..range.end).map(|(start, _)| *start).collect();
        for start in touched {
            let (end, offset) = self.extents[&start];
            let Some(cut) = PageRange { start, end }.intersection(&range) else { continue };
            self.extents.remove(&start);
            self.bytes -= cut.len();
            if start < cut.start {
                self.extents.insert(start, (cut.start, offset));
            }
            if cut.end < end {
                self.extents.insert(cut.end, (end, offset + (cut.end - start)));
            }
            taken.push(Extent { range: cut, offset: offset + (cut.start - start) });
        }
        taken
    }

    /// What was at `[from, from + len)` is now at `to`; what was there before is gone (and returned).
    pub fn shift(&mut self, from: u64, to: u64, len: u64) -> Vec<Extent> {
        let (Some(source), Some(target)) =
            (PageRange::new(from, from.saturating_add(len)), PageRange::new(to, to.saturating_add(len)))
        else {
            return Vec::new();
        };
        let moved = self.remove(source);
        let replaced = self.remove(target);
        for extent in moved {
            let start = to + (extent.range.start - from);
            self.insert(Extent { range: PageRange { start, end: start + extent.range.len() }, ..extent });
        }
        replaced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tranship_types::PAGE_SIZE;

    const PAGES: u64 = 48;

    #[derive(Debug, Clone)]
    enum Deed {
        Insert(u64, u64),
        Remove(u64, u64),
        Shift(u64, u64, u64),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        let page = 0..PAGES - 8;
        prop_oneof![
            3 => (page.clone(), 1..8u64).prop_map(|(at, n)| Deed::Insert(at, n)),
            1 => (page.clone(), 1..8u64).prop_map(|(at, n)| Deed::Remove(at, n)),
            1 => (page.clone(), page, 1..8u64).prop_map(|(from, to, n)| Deed::Shift(from, to, n)),
        ]
    }

    fn pages(at: u64, n: u64) -> PageRange {
        PageRange { start: at * PAGE_SIZE, end: (at + n) * PAGE_SIZE }
    }

    proptest! {
        /// The same deeds on one entry a page give the same answers.
        #[test]
        fn it_behaves_as_a_map_of_single_pages(deeds in proptest::collection::vec(deed(), 1..60)) {
            let mut index = Index::default();
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            let mut next = 0;
            for deed in deeds {
                match deed {
                    Deed::Insert(at, n) => {
                        let old = index.insert(Extent { range: pages(at, n), offset: next * PAGE_SIZE });
                        let replaced: u64 = old.iter().map(|e| e.range.pages()).sum();
                        let expected = (at..at + n).filter(|p| model.contains_key(p)).count() as u64;
                        prop_assert_eq!(replaced, expected);
                        for i in 0..n {
                            model.insert(at + i, next + i);
                        }
                        next += n;
                    }
                    Deed::Remove(at, n) => {
                        index.remove(pages(at, n));
                        (at..at + n).for_each(|p| { model.remove(&p); });
                    }
                    Deed::Shift(from, to, n) => {
                        index.shift(from * PAGE_SIZE, to * PAGE_SIZE, n * PAGE_SIZE);
                        let moved: Vec<_> =
                            (0..n).filter_map(|i| model.remove(&(from + i)).map(|v| (to + i, v))).collect();
                        (to..to + n).for_each(|p| { model.remove(&p); });
                        model.extend(moved);
                    }
                }
                prop_assert_eq!(index.bytes(), model.len() as u64 * PAGE_SIZE);
                for page in 0..PAGES {
                    let address = page * PAGE_SIZE + 17;
                    let found = index.find(address).map(|e| (e.offset + page * PAGE_SIZE - e.range.start) / PAGE_SIZE);
                    prop_assert_eq!(found, model.get(&page).copied(), "page {}", page);
                }
            }
        }
    }
}
