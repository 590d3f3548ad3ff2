//! Writes found by reading everything: a page counts as written if its content differs from what was sent.
//!
//! Of each page a hash of 64 bits is kept, 2 MiB for each GiB of memory: XXH3 with a seed that nobody outside knows, so that no
//! content can be made to collide. A page that was written is taken for one that was not with a probability of 2⁻⁶⁴; a move of
//! 1 TiB in 20 rounds has 5·10⁹ such chances, 3·10⁻¹⁰ in all.
//!
//! What counts is what the destination has: a page may be written between the look and its being read for the stream, and then
//! be given its old content back. So the hash is taken again of what was sent.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::{Mutex, PoisonError};

use tranship_sys::pagemap::Pagemap;
use tranship_types::{PAGE_SIZE, PageRange};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::DirtyTracker;
use crate::page_set::PageSet;
use crate::send::{self, CHUNK};
use crate::survey::Space;

/// Hashes of the pages of one chunk; 0 where nothing is known.
type Hashes = [u64; (CHUNK / PAGE_SIZE) as usize];

/// Of a sample: bytes that are looked at together.
const PIECE: u64 = 16 << 10;

/// What was sent of a process.
#[derive(Debug)]
pub(super) struct ContentHash {
    seed: u64,
    /// One of so many pieces is looked at: more than 1 where it is only to be known how much is written.
    every: u64,
    /// Of a sample: all that was there at the last look.
    there: PageSet,
    /// By number of the chunk.
    sent: Mutex<HashMap<u64, Box<Hashes>>>,
}

impl ContentHash {
    pub fn new(every: u64) -> Self {
        let seed = RandomState::new().hash_one(0);
        Self { seed, every: every.max(1), there: PageSet::default(), sent: Mutex::default() }
    }

    /// Works on the hashes of the chunk that contains an address, which begin with that of its page.
    fn with_hashes<R>(&self, address: u64, work: impl FnOnce(&mut [u64]) -> R) -> R {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let hashes = sent.entry(address / CHUNK).or_insert_with(|| Box::new([0; (CHUNK / PAGE_SIZE) as usize]));
        work(&mut hashes[(address % CHUNK / PAGE_SIZE) as usize..])
    }

    fn hash(&self, page: &[u8]) -> u64 {
        xxh3_64_with_seed(page, self.seed).max(1)
    }

    /// Tells of each page whether it differs from what was sent; with `take` that is taken for sent.
    fn compare(&self, space: &Space, take: bool, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        let mut pagemap = Pagemap::open(space.pid)?;
        let mut buffer = vec![0; CHUNK as usize];
        for mapping in &space.ranges {
            let mut pieces = Vec::new();
            let found = |start, end| match self.every {
                1 => pieces.extend(PageRange { start, end }.cut(CHUNK)),
                every => pieces.extend(sample(PageRange { start, end }, every)),
            };
            pagemap.populated(mapping.start, mapping.end, found)?;
            for piece in pieces {
                let pages = &mut buffer[..piece.len() as usize];
                if send::read(space.pid, piece.start, pages).is_err() {
                    // Some of it is gone just now. Who sends it finds out what.
                    there(mapping, piece, true);
                    continue;
                }
                let new: Vec<u64> = pages.chunks(PAGE_SIZE as usize).map(|page| self.hash(page)).collect();
                let differs: Vec<bool> = self.with_hashes(piece.start, |known| {
                    let differs = known.iter().zip(&new).map(|(known, new)| known != new).collect();
                    if take {
                        known[..new.len()].copy_from_slice(&new);
                    }
                    differs
                });
                let mut start = piece.start;
                for run in differs.chunk_by(|a, b| a == b) {
                    let end = start + run.len() as u64 * PAGE_SIZE;
                    there(mapping, PageRange { start, end }, run[0]);
                    start = end;
                }
            }
        }
        Ok(())
    }
}

/// One of each `every` pieces of the address space, drawn by their numbers: so much of it as is in `run`.
pub(super) fn sample(run: PageRange, every: u64) -> impl Iterator<Item = PageRange> {
    let stride = PIECE * every;
    (run.start / stride..run.end.div_ceil(stride)).filter_map(move |number| {
        let start = number * stride + drawn(number) % every * PIECE;
        let (start, end) = (start.max(run.start), (start + PIECE).min(run.end));
        (start < end).then_some(PageRange { start, end })
    })
}

/// The end of a round of SplitMix64 (Steele and others, 2014), so that what a program does at regular distances is met as often as all else.
fn drawn(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn bytes(runs: &[PageRange]) -> u64 {
    runs.iter().map(PageRange::len).sum()
}

impl DirtyTracker for ContentHash {
    fn look(&mut self, space: &Space, _pids: &[u32], found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        if self.every > 1 {
            let mut pagemap = Pagemap::open(space.pid)?;
            self.there = PageSet::default();
            for range in &space.ranges {
                pagemap.populated(range.start, range.end, |start, end| self.there.insert(PageRange { start, end }))?;
            }
        }
        self.compare(space, true, &mut |mapping, run, differs| {
            if differs {
                found(mapping, run);
            }
        })
    }

    fn left(&self, space: &Space) -> io::Result<u64> {
        let (mut written, mut new) = (0, 0);
        self.compare(space, false, &mut |_, run, differs| {
            let known = if self.every > 1 { bytes(&self.there.within(run)) } else { run.len() };
            written += if differs { self.every * known } else { 0 };
        })?;
        if self.every > 1 {
            // What was not there before has been written.
            let mut pagemap = Pagemap::open(space.pid)?;
            let mut found = |start, end| new += end - start - bytes(&self.there.within(PageRange { start, end }));
            space.ranges.iter().try_for_each(|range| pagemap.populated(range.start, range.end, &mut found))?;
        }
        Ok(written + new)
    }

    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        self.compare(space, false, there)
    }

    fn sent(&self, address: u64, pages: &[u8]) {
        let hashes: Vec<u64> = pages.chunks(PAGE_SIZE as usize).map(|page| self.hash(page)).collect();
        self.with_hashes(address, |known| known[..hashes.len()].copy_from_slice(&hashes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_its_part_of_all_that_there_is() {
        const EVERY: u64 = 16;
        let run = PageRange { start: 7 << 30, end: 8 << 30 };
        let all: Vec<PageRange> = sample(run, EVERY).collect();
        assert_eq!(bytes(&all), run.len() / EVERY);
        assert!(all.windows(2).all(|two| two[0].end <= two[1].start) && all[0].start >= run.start);
        // Whatever part of it is looked at: also every other piece.
        let odd = all.iter().filter(|piece| piece.start / PIECE % 2 == 1).count();
        assert!(odd.abs_diff(all.len() / 2) < all.len() / 10, "{odd} of {}", all.len());
        // Cut anywhere, it is the same sample.
        let middle = all[all.len() / 2].start + 4096;
        let parts = [PageRange { end: middle, ..run }, PageRange { start: middle, ..run }];
        let cut: u64 = parts.into_iter().map(|part| bytes(&sample(part, EVERY).collect::<Vec<_>>())).sum();
        assert_eq!(cut, run.len() / EVERY);
    }
}
