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
use crate::send::{self, CHUNK};
use crate::survey::Space;

/// Hashes of the pages of one chunk; 0 where nothing is known.
type Hashes = [u64; (CHUNK / PAGE_SIZE) as usize];

/// What was sent of a process.
#[derive(Debug)]
pub(super) struct ContentHash {
    seed: u64,
    /// By number of the chunk.
    sent: Mutex<HashMap<u64, Box<Hashes>>>,
}

impl ContentHash {
    pub fn new() -> Self {
        Self { seed: RandomState::new().hash_one(0), sent: Mutex::default() }
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
            let found = |start, end| pieces.extend(PageRange { start, end }.cut(CHUNK));
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

impl DirtyTracker for ContentHash {
    fn look(&mut self, space: &Space, found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        self.compare(space, true, &mut |mapping, run, differs| {
            if differs {
                found(mapping, run);
            }
        })
    }

    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        self.compare(space, false, there)
    }

    fn sent(&self, address: u64, pages: &[u8]) {
        let hashes: Vec<u64> = pages.chunks(PAGE_SIZE as usize).map(|page| self.hash(page)).collect();
        self.with_hashes(address, |known| known[..hashes.len()].copy_from_slice(&hashes));
    }
}
