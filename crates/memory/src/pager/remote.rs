//! The pages of one address space that are still at the source.
//!
//! A page is named there by its address on the source, and needed at the address where the restored task has it now, which
//! is another one once the task has moved the mapping. Each page is needed at one place at most.

use tranship_types::PageRange;

use crate::index::{Extent, Index};
use crate::page_set::PageSet;

/// Pages that have not come yet.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    /// Their addresses on the source.
    missing: PageSet,
    /// Where the task has something → where the source has it. Of all memory, since the task moves few mappings of many pages.
    here: Index,
    /// Where the source has something → where the task has it.
    there: Index,
}

/// The extent with both sides exchanged.
fn turned(extent: &Extent) -> Extent {
    let (start, len) = (extent.offset, extent.range.len());
    Extent { range: PageRange { start, end: start + len }, offset: extent.range.start }
}

impl Remote {
    /// These pages, which are at the same addresses on both sides.
    pub fn new(missing: PageSet) -> Self {
        let mut here = Index::default();
        here.insert(Extent { range: PageRange::EVERYTHING, offset: PageRange::EVERYTHING.start });
        Self { missing, there: here.clone(), here }
    }

    /// Whether nothing is missing.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }

    /// Bytes that are missing.
    pub fn bytes(&self) -> u64 {
        self.missing.bytes()
    }

    /// The missing pages from `address` on, which is the task's, without a gap and in no more than `window` bytes; the extent's
    /// offset is the source's address.
    pub fn find(&self, address: u64, window: u64) -> Option<Extent> {
        let known = self.here.find(address)?;
        let start = known.offset + (address - known.range.start);
        let end = (start + window).min(known.offset + known.range.len());
        let run = self.missing.within(PageRange { start, end }).into_iter().next().filter(|run| run.start == start)?;
        Some(Extent { range: PageRange { start: address, end: address + run.len() }, offset: start })
    }

    /// What is missing of `range`; both are the task's addresses.
    pub fn within(&self, range: PageRange) -> Vec<PageRange> {
        let missing = |known: Extent| {
            let here = move |address: u64| known.range.start + (address - known.offset);
            let runs = self.missing.within(turned(&known).range).into_iter();
            runs.map(move |run| PageRange { start: here(run.start), end: here(run.end) })
        };
        self.here.within(range).into_iter().flat_map(missing).collect()
    }

    /// The task does not need the content of `range` any more.
    pub fn forget(&mut self, range: PageRange) {
        for known in self.here.within(range) {
            self.missing.remove(turned(&known).range);
        }
    }

    /// Pages of the source have come: returns where the task needs them, with the source's addresses as offsets.
    pub fn arrived(&mut self, source: PageRange) -> Vec<Extent> {
        let come = self.missing.take(source);
        come.into_iter().flat_map(|run| self.there.within(run)).map(|extent| turned(&extent)).collect()
    }

    /// What the task had at `[from, from + len)` it has at `to` now.
    pub fn shift(&mut self, from: u64, to: u64, len: u64) {
        for replaced in self.here.shift(from, to, len) {
            let source = turned(&replaced).range;
            self.missing.remove(source);
            self.there.remove(source);
        }
        let Some(target) = PageRange::new(to, to.saturating_add(len)) else { return };
        for moved in self.here.within(target) {
            self.there.insert(turned(&moved));
        }
    }

    /// All that is missing, by the source's addresses, in order.
    pub fn at_source(&self) -> Vec<PageRange> {
        self.missing.all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use tranship_types::PAGE_SIZE;

    const PAGES: u64 = 40;

    #[derive(Debug, Clone)]
    enum Deed {
        Forget(u64, u64),
        Arrived(u64, u64),
        Shift(u64, u64, u64),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        let page = 0..PAGES - 8;
        prop_oneof![
            (page.clone(), 1..8u64).prop_map(|(at, n)| Deed::Forget(at, n)),
            (page.clone(), 1..8u64).prop_map(|(at, n)| Deed::Arrived(at, n)),
            (page.clone(), page, 1..8u64).prop_map(|(from, to, n)| Deed::Shift(from, to, n)),
        ]
    }

    fn pages(at: u64, n: u64) -> PageRange {
        PageRange { start: at * PAGE_SIZE, end: (at + n) * PAGE_SIZE }
    }

    proptest! {
        /// The same deeds on a map of single pages, from the task's address to the source's, give the same answers.
        #[test]
        fn it_behaves_as_a_map_of_single_pages(first in 0..20u64, n in 1..20u64, deeds in proptest::collection::vec(deed(), 1..60)) {
            let mut missing = PageSet::default();
            missing.insert(pages(first, n));
            let mut remote = Remote::new(missing);
            let mut model: BTreeMap<u64, u64> = (first..first + n).map(|p| (p, p)).collect();
            for deed in deeds {
                match deed {
                    Deed::Forget(at, n) => {
                        remote.forget(pages(at, n));
                        (at..at + n).for_each(|p| { model.remove(&p); });
                    }
                    Deed::Arrived(at, n) => {
                        let mut wanted: Vec<(u64, u64)> = remote.arrived(pages(at, n)).iter().flat_map(|e| {
                            let (here, there) = (e.range.start / PAGE_SIZE, e.offset / PAGE_SIZE);
                            (0..e.range.pages()).map(move |i| (here + i, there + i))
                        }).collect();
                        wanted.sort_unstable();
                        let expected: Vec<(u64, u64)> =
                            model.iter().map(|(h, t)| (*h, *t)).filter(|(_, t)| (at..at + n).contains(t)).collect();
                        prop_assert_eq!(wanted, expected.clone());
                        expected.iter().for_each(|(here, _)| { model.remove(here); });
                    }
                    Deed::Shift(from, to, n) => {
                        remote.shift(from * PAGE_SIZE, to * PAGE_SIZE, n * PAGE_SIZE);
                        let moved: Vec<_> = (0..n).filter_map(|i| model.remove(&(from + i)).map(|v| (to + i, v))).collect();
                        (to..to + n).for_each(|p| { model.remove(&p); });
                        model.extend(moved);
                    }
                }
                prop_assert_eq!(remote.bytes(), model.len() as u64 * PAGE_SIZE);
                let at_source: u64 = remote.at_source().iter().map(PageRange::len).sum();
                prop_assert_eq!(at_source, remote.bytes());
                for page in 0..PAGES {
                    let found = remote.find(page * PAGE_SIZE, 3 * PAGE_SIZE);
                    let found = found.map(|e| (e.range.start / PAGE_SIZE, e.offset / PAGE_SIZE, e.range.pages()));
                    let source = model.get(&page).copied();
                    let follows = |i: &u64| model.get(&(page + i)).copied() == source.map(|source| source + i);
                    let expected = source.map(|source| (page, source, (0..3).take_while(follows).count() as u64));
                    prop_assert_eq!(found, expected, "page {}", page);
                    prop_assert_eq!(!remote.within(pages(page, 1)).is_empty(), source.is_some(), "page {}", page);
                }
            }
        }
    }
}
