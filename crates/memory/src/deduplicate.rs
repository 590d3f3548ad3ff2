//! Pages that need not be sent, because another task has the same at the same address: what forked tasks have in common.
//!
//! For each page that more than one task may have, a stream keeps the hash of what it sent last of each task. A page with the hash
//! of another task's is not sent: the destination is told whose it is like. Since which stream carries a page depends on its
//! address alone, and a stream keeps its order, that is what the destination received last for the other one.
//!
//! Where only one task has pages, nothing is hashed. The hash is BLAKE3, cut to 128 bits: the tasks of a container need not trust each
//! other, and none shall be given another one's page because it has made up one that collides.

use std::collections::HashMap;
use std::sync::Arc;

use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use crate::compress::Tally;
use crate::send::CHUNK;

/// Pages in a chunk.
const PAGES: usize = (CHUNK / PAGE_SIZE) as usize;
/// Chunks of a task of which one stream keeps the hashes: 4 KiB for each MiB, so 32 MiB for the 8 GiB that come first. What comes
/// after them is compared with these.
const MOST_CHUNKS: usize = 8192;

type Hash = [u8; 16];

/// Of a page that is zeros, or of which nothing is known. No page has it but with a probability of 2⁻¹²⁸.
const NONE: Hash = [0; 16];

/// What one stream has sent of pages that tasks may have in common.
#[derive(Debug)]
pub struct Deduplicator {
    /// By number of the chunk.
    places: HashMap<u64, Place>,
    /// Chunks of which hashes can still be kept.
    room: usize,
    tally: Arc<Tally>,
}

/// Addresses of one chunk.
#[derive(Debug)]
struct Place {
    /// The task that was found there first.
    first: AddressSpaceId,
    /// It is not the only one.
    is_shared: bool,
    /// What the destination has of each task.
    sent: Vec<(AddressSpaceId, Box<[Hash; PAGES]>)>,
}

impl Deduplicator {
    /// One for a stream; what it spares is counted in `tally`.
    pub fn new(tally: Arc<Tally>) -> Self {
        Self { places: HashMap::new(), room: MOST_CHUNKS, tally }
    }

    /// Whether no place is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Takes note that a task has pages in the chunk that contains `address`. To be told of all tasks before pages of one are
    /// sent, so that those are hashed.
    pub(crate) fn expect(&mut self, space: AddressSpaceId, address: u64) {
        let alone = || Place { first: space, is_shared: false, sent: Vec::new() };
        let place = self.places.entry(address / CHUNK).or_insert_with(alone);
        place.is_shared |= place.first != space;
    }

    /// Cuts pages of one chunk, which are sent now, into runs, each with the task that has the same there, if one does.
    pub(crate) fn split(
        &mut self,
        space: AddressSpaceId,
        address: u64,
        pages: &[u8],
    ) -> Vec<(PageRange, Option<AddressSpaceId>)> {
        let whole = PageRange { start: address, end: address + pages.len() as u64 };
        let place = self.places.get_mut(&(address / CHUNK)).filter(|place| place.is_shared);
        let Some(Place { sent, .. }) = place else { return vec![(whole, None)] };
        let known = sent.iter().position(|(of, _)| *of == space);
        let own = known.or_else(|| {
            self.room = self.room.checked_sub(1)?;
            sent.push((space, Box::new([NONE; PAGES])));
            Some(sent.len() - 1)
        });
        let mut runs: Vec<(PageRange, Option<AddressSpaceId>)> = Vec::new();
        for (page, start) in pages.chunks_exact(PAGE_SIZE as usize).zip((address..).step_by(PAGE_SIZE as usize)) {
            let (at, hash, end) = ((start % CHUNK / PAGE_SIZE) as usize, hash(page), start + PAGE_SIZE);
            let same = sent.iter().find(|(of, hashes)| *of != space && hashes[at] == hash).map(|(of, _)| *of);
            if let Some(own) = own {
                sent[own].1[at] = hash;
            }
            match runs.last_mut().filter(|(_, other)| *other == same) {
                Some((run, _)) => run.end = end,
                None => runs.push((PageRange { start, end }, same)),
            }
        }
        let spared = runs.iter().filter(|(_, same)| same.is_some()).map(|(run, _)| run.len()).sum();
        self.tally.add_deduplicated(spared);
        runs
    }

    /// Pages of a task are zeros now.
    pub(crate) fn forget(&mut self, space: AddressSpaceId, range: PageRange) {
        for piece in range.cut(CHUNK) {
            let sent = self.places.get_mut(&(piece.start / CHUNK)).map(|place| &mut place.sent);
            if let Some((_, hashes)) = sent.and_then(|sent| sent.iter_mut().find(|(of, _)| *of == space)) {
                let first = (piece.start % CHUNK / PAGE_SIZE) as usize;
                hashes[first..first + piece.pages() as usize].fill(NONE);
            }
        }
    }
}

fn hash(page: &[u8]) -> Hash {
    let whole: [u8; 32] = blake3::hash(page).into();
    *whole.first_chunk().expect("it is longer")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;
    const AT: u64 = 7 * CHUNK;
    const PARENT: AddressSpaceId = AddressSpaceId(1);
    const CHILD: AddressSpaceId = AddressSpaceId(9);

    fn page(number: u64) -> PageRange {
        PageRange { start: AT + number * PAGE_SIZE, end: AT + (number + 1) * PAGE_SIZE }
    }

    #[test]
    fn what_another_task_has_at_the_same_address_is_found_in_the_version_that_was_sent_last() {
        let tally = Arc::new(Tally::default());
        let mut table = Deduplicator::new(Arc::clone(&tally));
        let whole = PageRange { start: AT, end: AT + 3 * PAGE_SIZE };
        let mut pages = vec![1u8; 3 * PAGE];
        [PARENT, CHILD].into_iter().for_each(|space| table.expect(space, AT));
        assert_eq!(table.split(PARENT, AT, &pages), [(whole, None)]);
        pages[PAGE] = 2;
        let found = table.split(CHILD, AT, &pages);
        assert_eq!(found, [(page(0), Some(PARENT)), (page(1), None), (page(2), Some(PARENT))]);
        assert_eq!(tally.deduplicated(), 2 * PAGE_SIZE);
        // Now the parent gets what the child has, and the child what nobody has.
        assert_eq!(table.split(PARENT, page(1).start, &pages[PAGE..2 * PAGE]), [(page(1), Some(CHILD))]);
        assert_eq!(table.split(CHILD, page(2).start, &[3; PAGE]), [(page(2), None)]);
        assert_eq!(table.split(PARENT, page(2).start, &[3; PAGE]), [(page(2), Some(CHILD))]);
        table.forget(CHILD, whole);
        assert_eq!(table.split(PARENT, page(2).start, &[3; PAGE]), [(page(2), None)]);
    }

    #[test]
    fn where_a_task_is_alone_nothing_is_hashed_and_one_that_comes_later_finds_nothing() {
        let mut table = Deduplicator::new(Arc::default());
        let pages = vec![1u8; PAGE];
        table.expect(PARENT, AT);
        assert_eq!(table.split(PARENT, AT, &pages), [(page(0), None)]);
        table.expect(CHILD, AT);
        assert_eq!(table.split(CHILD, AT, &pages), [(page(0), None)]);
        assert_eq!(table.split(PARENT, AT, &pages), [(page(0), Some(CHILD))]);
    }

    #[test]
    fn a_full_table_is_still_compared_with() {
        let mut table = Deduplicator { room: 1, ..Deduplicator::new(Arc::default()) };
        let pages = vec![1u8; PAGE];
        [PARENT, CHILD].into_iter().for_each(|space| table.expect(space, AT));
        assert_eq!(table.split(PARENT, AT, &pages), [(page(0), None)]);
        for child in 0..2 {
            assert_eq!(table.split(CHILD, AT, &pages), [(page(0), Some(PARENT))], "{child}");
        }
    }
}
