//! The destination's side: pages from the streams into the arena, and word of them to the pager.

use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tranship_sys::arena::Arena;
use tranship_types::PAGE_SIZE;
use tranship_wire::{FrameHeader, Kind, ReadError};

use crate::index::Extent;
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
}

impl Store {
    /// Makes a store of at most `capacity` bytes and hands it to the pager.
    pub fn new(capacity: u64, pager: PagerHandle) -> Result<Self, ControlError> {
        let arena = Arena::new(capacity)?;
        pager.arena(arena.file())?;
        Ok(Self { arena, pager: Mutex::new(pager), received: AtomicU64::new(0) })
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

    /// Receives one stream to its end. Several threads may do so at once.
    pub fn receive<R: Read>(&self, stream: &mut R) -> Result<(), ReceiveError> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut received = 0;
        loop {
            match tranship_wire::read_header(stream)? {
                FrameHeader::Pages { space, range } => {
                    let full = || ReceiveError::Full { capacity: self.arena.capacity() };
                    let mut slice = self.arena.allocate(range.len() as usize).ok_or_else(full)?;
                    stream.read_exact(&mut slice).map_err(ReadError::Io)?;
                    received += range.len();
                    self.received.fetch_add(range.len(), Ordering::Relaxed);
                    batch.push(StoredExtent { space, extent: Extent { range, offset: slice.offset() } });
                    if batch.len() == BATCH {
                        self.pager().extents(&batch)?;
                        batch.clear();
                    }
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

    /// Largest store that makes sense for a container of `memory` bytes on a node with `available` bytes to spare: room
    /// for growth until the freeze, in any case bounded.
    pub fn capacity_for(memory: u64, available: u64) -> io::Result<u64> {
        let wanted = (memory + memory / 4 + (64 << 20)).next_multiple_of(PAGE_SIZE);
        if memory > available { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(wanted.min(available.max(memory))) }
    }
}
