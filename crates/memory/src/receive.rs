//! The destination's side: pages from the streams into the arena, and word of them to the pager.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tranship_sys::arena::Arena;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};
use tranship_wire::{FrameHeader, Kind, ReadError};

use crate::index::{Extent, Index};
use crate::pager::{ControlError, PagerHandle, StoredExtent};

/// Extents that are told to the pager at a time.
const BATCH: usize = 256;

/// Pages that cannot be received or stored.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The stream broke, or what came is not allowed.
    #[error("memory cannot be received: {0}")]
    Receive(#[from] ReadError),
    /// More came than was announced.
    #[error("the page store of {capacity} bytes is full: the container grew after it was measured; try again")]
    Full {
        /// Its size.
        capacity: u64,
    },
    /// The pager is gone.
    #[error(transparent)]
    Pager(#[from] ControlError),
}

/// The page store as the agent sees it: an arena to write to, and the pager that reads from it.
#[derive(Debug)]
pub struct Store {
    arena: Arc<Arena>,
    pager: Mutex<PagerHandle>,
    received: AtomicU64,
    /// Where in the arena each page is, to put newer versions there.
    places: Mutex<HashMap<AddressSpaceId, Index>>,
}

impl Store {
    /// Makes a store of at most `capacity` bytes and hands it to the pager.
    pub fn new(capacity: u64, pager: PagerHandle) -> Result<Self, ControlError> {
        let arena = Arena::new(capacity)?;
        pager.arena(arena.file())?;
        Ok(Self { arena, pager: Mutex::new(pager), received: AtomicU64::new(0), places: Mutex::default() })
    }

    /// Takes the memory for so many bytes now, before the freeze.
    pub fn populate(&self, bytes: u64) -> io::Result<()> {
        self.arena.populate(bytes)
    }

    /// Bytes of pages received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// The pager.
    pub fn pager(&self) -> std::sync::MutexGuard<'_, PagerHandle> {
        self.pager.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands everything that has come to another pager, after the first one was killed. All pages must have come, and none
    /// must have been given back: that is, the tasks do not run yet.
    pub fn replace_pager(&self, pager: PagerHandle) -> Result<(), ControlError> {
        pager.arena(self.arena.file())?;
        let all = PageRange { start: 0, end: !(PAGE_SIZE - 1) };
        for (space, index) in self.places().iter() {
            let rows = index.within(all).into_iter().map(|extent| StoredExtent { space: *space, extent });
            pager.extents(&rows.collect::<Vec<_>>())?;
        }
        pager.complete()?;
        *self.pager() = pager;
        Ok(())
    }

    /// Receives one stream to its end. Several threads may do so at once.
    pub fn receive<R: Read>(&self, stream: &mut R) -> Result<(), ReceiveError> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut buffer = Vec::new();
        let mut received = 0;
        loop {
            match tranship_wire::read_header(stream)? {
                FrameHeader::Pages { space, range } => {
                    received += range.len();
                    self.received.fetch_add(range.len(), Ordering::Relaxed);
                    match self.place_of(space, range) {
                        Some(offset) => {
                            // A newer version takes the older one's place; the pager knows where that is.
                            buffer.resize(range.len() as usize, 0);
                            stream.read_exact(&mut buffer).map_err(ReadError::Io)?;
                            self.arena.replace(offset, &buffer);
                        }
                        None => batch.push(self.store(stream, space, range)?),
                    }
                    if batch.len() == BATCH {
                        self.pager().extents(&batch)?;
                        batch.clear();
                    }
                }
                FrameHeader::Zero { space, range } => {
                    // In their order: the pager must not hear of a page's end before its beginning.
                    self.pager().extents(&batch)?;
                    batch.clear();
                    let replaced = self.places().entry(space).or_default().remove(range);
                    self.give_back(&replaced);
                    self.pager().gone(space, range)?;
                }
                FrameHeader::End { total } if total == received => {
                    self.pager().extents(&batch)?;
                    return Ok(());
                }
                FrameHeader::End { total } => return Err(ReadError::Incomplete { sent: total, received }.into()),
                other => return Err(ReadError::Unexpected { expected: Kind::Pages, found: other.kind() }.into()),
            }
        }
    }

    fn places(&self) -> std::sync::MutexGuard<'_, HashMap<AddressSpaceId, Index>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where in the arena the older version of just these pages is, in one piece.
    fn place_of(&self, space: AddressSpaceId, range: PageRange) -> Option<u64> {
        let found = self.places().get(&space)?.find(range.start)?;
        (range.end <= found.range.end).then(|| found.offset + (range.start - found.range.start))
    }

    /// Receives pages into a new place. Older versions of some of them, elsewhere, are given up.
    fn store<R: Read>(
        &self,
        stream: &mut R,
        space: AddressSpaceId,
        range: PageRange,
    ) -> Result<StoredExtent, ReceiveError> {
        let full = || ReceiveError::Full { capacity: self.arena.capacity() };
        let mut slice = self.arena.allocate(range.len() as usize).ok_or_else(full)?;
        stream.read_exact(&mut slice).map_err(ReadError::Io)?;
        let extent = Extent { range, offset: slice.offset() };
        drop(slice);
        let replaced = self.places().entry(space).or_default().insert(extent);
        self.give_back(&replaced);
        Ok(StoredExtent { space, extent })
    }

    fn give_back(&self, replaced: &[Extent]) {
        for extent in replaced {
            // Memory that cannot be given back now goes with the store.
            let _ = self.arena.release(extent.offset, extent.range.len());
        }
    }

    /// Largest store that makes sense for a container of `memory` bytes on a node with `available` bytes to spare: room
    /// for growth until the freeze, in any case bounded.
    pub fn capacity_for(memory: u64, available: u64) -> io::Result<u64> {
        let wanted = (memory + memory / 4 + (64 << 20)).next_multiple_of(PAGE_SIZE);
        if memory > available { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(wanted.min(available.max(memory))) }
    }
}
