use serde::{Deserialize, Serialize};

/// Bytes in a page. Both nodes must agree; only kernels with 4 KiB pages are supported.
pub const PAGE_SIZE: u64 = 4096;

/// One address space of the container: the pid of its thread group leader *inside the container's pid namespace*,
/// which is what CRIU's images and its lazy-pages socket call it and what stays the same across the move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AddressSpaceId(pub u32);

impl AddressSpaceId {
    /// Set in the ids of shared objects ([`crate::SharedObject`]), never in a pid.
    const OBJECT: u32 = 1 << 31;

    /// The address space that is shared object number `number` of a migration; `None` beyond 2^31.
    pub fn object(number: u32) -> Option<Self> {
        (number < Self::OBJECT).then_some(Self(number | Self::OBJECT))
    }

    /// Whether it is a shared object's.
    pub fn is_object(self) -> bool {
        self.0 & Self::OBJECT != 0
    }
}

/// A run of pages `[start, end)` in one address space; both page-aligned, `start < end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageRange {
    /// First byte's address.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
}

impl PageRange {
    /// Every page that there can be.
    pub const EVERYTHING: PageRange = PageRange { start: 0, end: !(PAGE_SIZE - 1) };

    /// The range, or `None` if it is empty, backwards or not page-aligned.
    pub fn new(start: u64, end: u64) -> Option<Self> {
        (start < end && start.is_multiple_of(PAGE_SIZE) && end.is_multiple_of(PAGE_SIZE)).then_some(Self { start, end })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Length in pages.
    pub fn pages(&self) -> u64 {
        self.len() / PAGE_SIZE
    }

    /// Whether `address` lies inside.
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// The part that both have in common.
    pub fn intersection(&self, other: &PageRange) -> Option<PageRange> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(PageRange { start, end })
    }

    /// Cuts it at the addresses that are multiples of `size`, which is one of the page size. In order.
    pub fn cut(self, size: u64) -> impl Iterator<Item = PageRange> {
        let piece = move |start: u64| {
            let end = self.end.min((start + 1).next_multiple_of(size));
            (start < end).then_some(PageRange { start, end })
        };
        std::iter::successors(piece(self.start), move |before| piece(before.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_multiples_of_their_size() {
        let cut = |start, end| PageRange { start, end }.cut(0x4000).map(|r| (r.start, r.end)).collect::<Vec<_>>();
        assert_eq!(cut(0x3000, 0x9000), [(0x3000, 0x4000), (0x4000, 0x8000), (0x8000, 0x9000)]);
        assert_eq!(cut(0x4000, 0x8000), [(0x4000, 0x8000)]);
    }

    #[test]
    fn only_aligned_forward_ranges_exist() {
        assert!(PageRange::new(0, 4096).is_some());
        for (s, e) in [(0, 0), (4096, 0), (1, 4096), (0, 4097)] {
            assert!(PageRange::new(s, e).is_none(), "{s}-{e}");
        }
    }
}
