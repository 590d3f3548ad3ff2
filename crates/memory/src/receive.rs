//! The destination's side: pages from the streams into the arena, and word of them to the pager.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_sys::arena::Arena;
use tranship_sys::charge::Charger;
use tranship_sys::promise::Promise;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange, SharedObject};
use tranship_wire::packed::Unpacker;
use tranship_wire::{Codec, FrameHeader, Kind, ReadError};

use crate::index::{Extent, Index};
use crate::page_set::PageSet;
use crate::pager::{ControlError, PagerHandle, StoredExtent};
use crate::shared::target::{SharedStore, StoreError};

/// Extents that are told to the pager at a time, while nobody waits for them.
const BATCH: usize = 256;
/// Bytes of pages that are told to the pager at a time, once somebody may wait for them.
const PROMPT: u64 = 64 << 10;
/// How long the pager may take to deal with what it was told.
const PAGER: Duration = Duration::from_secs(10);

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
    /// There is less memory than it seemed.
    #[error("there is not enough memory for the container's pages: {0}; free some, or choose another node")]
    NoMemory(#[source] io::Error),
    /// Pages that are said to be as others, which have not come.
    #[error(
        "the pages of process {space} at {address:#x} are said to be as those of process {other}, which have not come; the peer \
         is faulty"
    )]
    NeverCame {
        /// Whose pages they are, as a pid in the container.
        space: u32,
        /// Where the first one is.
        address: u64,
        /// Whose pages they should be like.
        other: u32,
    },
    /// Shared memory cannot be stored.
    #[error(transparent)]
    Shared(#[from] StoreError),
    /// The pager is gone.
    #[error(transparent)]
    Pager(#[from] ControlError),
}

/// The page store as the agent sees it: an arena to write to, and the pager that reads from it.
#[derive(Debug)]
pub struct Store {
    arena: Arc<Arena>,
    pager: Mutex<PagerHandle>,
    /// A way to the pager for pages that somebody waits for, which would queue behind all the others.
    urgent: Mutex<PagerHandle>,
    received: AtomicU64,
    held: Mutex<HashMap<AddressSpaceId, Held>>,
    /// Memory that tasks share, which is not kept in the arena.
    shared: SharedStore,
    /// Bytes that it occupies.
    shared_bytes: AtomicI64,
    /// Bytes of it that are still to come.
    shared_to_come: Promise,
}

/// What a stream carries from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carries {
    /// Pages as they are before all is named, newer versions of them, and what comes later.
    Versions,
    /// Pages that have been named: the source begins again, after a link broke or an agent was restarted.
    Named,
    /// Such pages, which somebody waits for.
    Wanted,
}

/// What is known of the pages of one address space.
#[derive(Debug, Default)]
struct Held {
    /// Where in the arena each page is, to put newer versions there.
    places: Index,
    /// Pages that come later.
    later: PageSet,
}

impl Held {
    /// The pages in `range` that have not come: that come later, or are not known at all (to an agent that was restarted).
    /// From now on they have.
    fn take_missing(&mut self, range: PageRange) -> Vec<PageRange> {
        let late = self.later.take(range);
        if late == [range] {
            return late;
        }
        let mut missing = PageSet::default();
        missing.insert(range);
        self.places.within(range).into_iter().for_each(|known| missing.remove(known.range));
        late.into_iter().for_each(|late| missing.insert(late));
        missing.all()
    }
}

/// Pages that come next on a stream.
struct Arriving<'a, R> {
    stream: &'a mut R,
    unpacker: &'a mut Unpacker,
    /// How they are compressed, and to how many bytes.
    packed: Option<(Codec, u32)>,
}

impl<R: Read> Arriving<'_, R> {
    /// Receives them to where they belong.
    fn read(self, pages: &mut [u8]) -> Result<(), ReadError> {
        match self.packed {
            Some((codec, length)) => self.unpacker.read(self.stream, codec, length, pages),
            None => self.stream.read_exact(pages).map_err(ReadError::Io),
        }
    }
}

/// What is told to the pager next.
#[derive(Debug, Default)]
struct Batch {
    /// Somebody waits for all of it.
    urgent: bool,
    extents: Vec<StoredExtent>,
    bytes: u64,
}

impl Store {
    /// Makes a store of at most `capacity` bytes and hands it to the pager.
    pub fn new(capacity: u64, pager: PagerHandle) -> Result<Self, ControlError> {
        let arena = Arena::new(capacity)?;
        pager.arena(arena.file())?;
        Self::over(arena, pager)
    }

    /// Has the pages of shared memory that come from now on charged to whoever the charger is connected to.
    #[must_use]
    pub fn charged_by(mut self, charger: Arc<Charger>) -> Self {
        self.shared.charger = charger;
        self
    }

    /// The store that the pager has kept, after the agent that had made it died.
    pub fn attach(pager: PagerHandle) -> Result<Self, ControlError> {
        let (file, used) = pager.reattach(PAGER)?;
        Self::over(Arena::attach(file, used)?, pager)
    }

    fn over(arena: Arc<Arena>, pager: PagerHandle) -> Result<Self, ControlError> {
        Ok(Self {
            arena,
            urgent: Mutex::new(pager.another()?),
            pager: Mutex::new(pager),
            received: AtomicU64::new(0),
            held: Mutex::default(),
            shared: SharedStore::default(),
            shared_bytes: AtomicI64::new(0),
            shared_to_come: Promise::default(),
        })
    }

    /// Begins to take the memory for so many bytes of pages. So many of shared memory, which has files of its own, are taken as they come; until
    /// then all are [promised](tranship_sys::promise::promised).
    pub fn populate(&self, bytes: u64, shared: u64) -> io::Result<()> {
        self.shared_to_come.add(shared);
        self.arena.populate(bytes)
    }

    /// Bytes of shared memory that have not come.
    pub fn shared_to_come(&self) -> u64 {
        self.shared_to_come.left()
    }

    /// Waits until the memory has been taken; or, if `rounds` bring all of it before the freeze, no longer than it comes fast, so that the link is not idle
    /// meanwhile.
    pub fn populated(&self, rounds: bool) -> io::Result<()> {
        if rounds { self.arena.populated_or_slow() } else { self.arena.populated() }
    }

    /// Waits for it until then: whether it is there.
    pub fn populated_until(&self, deadline: Instant) -> io::Result<bool> {
        self.arena.populated_until(deadline)
    }

    /// Nobody needs the memory any more: those who wait for it are told `Interrupted`.
    pub fn stop_populating(&self) {
        self.shared_to_come.end();
        self.arena.stop_populating();
    }

    /// Bytes of pages received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// The pager.
    pub fn pager(&self) -> MutexGuard<'_, PagerHandle> {
        self.pager.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn urgent(&self) -> MutexGuard<'_, PagerHandle> {
        self.urgent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands everything that has come, and the word of what has not, to another pager, after the first one was killed. All
    /// that comes later must have been named, and no page must have been given back: that is, the tasks do not run yet.
    pub fn replace_pager(&self, pager: PagerHandle) -> Result<(), ControlError> {
        // Held while it goes on, so that nothing that comes meanwhile is told to the one that is gone.
        let (mut old, mut urgent) = (self.pager(), self.urgent());
        pager.arena(self.arena.file())?;
        for (space, held) in self.held().iter() {
            let rows = held.places.within(PageRange::EVERYTHING).into_iter();
            pager.extents(&rows.map(|extent| StoredExtent { space: *space, extent }).collect::<Vec<_>>())?;
            pager.later(*space, &held.later.all())?;
        }
        self.shared.each(|object, file| pager.object(object, file))?;
        pager.named()?;
        *urgent = pager.another()?;
        *old = pager;
        Ok(())
    }

    /// Takes note of shared memory as the source describes it, and hands it to the pager, which keeps it for criu.
    pub fn describe_shared(&self, objects: &[SharedObject]) -> Result<(), ReceiveError> {
        self.shared.describe(objects, |object, file| Ok(self.pager().object(object, file)?))
    }

    /// Gives shared memory its final length, when every stream has named what comes later.
    pub fn settle_shared(&self) -> Result<(), ReceiveError> {
        self.shared_to_come.end();
        Ok(self.shared.settle()?)
    }

    /// Receives pages of shared memory.
    fn share<R: Read>(
        &self,
        pages: Arriving<'_, R>,
        buffer: &mut Vec<u8>,
        (space, range): (AddressSpaceId, PageRange),
    ) -> Result<(), ReceiveError> {
        buffer.resize(range.len() as usize, 0);
        pages.read(buffer)?;
        let grown = self.shared.write(space, range, buffer)?;
        self.shared_to_come.keep(grown.max(0).cast_unsigned());
        let occupied = self.shared_bytes.fetch_add(grown, Ordering::Relaxed) + grown;
        if self.arena.used() + occupied.max(0).cast_unsigned() > self.arena.capacity() {
            return Err(ReceiveError::Full { capacity: self.arena.capacity() });
        }
        Ok(())
    }

    /// Receives one stream to its end. Several threads may do so at once. Pages that are waited for are told to the pager one by
    /// one; `named` is called when the stream has named everything that comes later, and the pager knows.
    pub fn receive<R: Read>(&self, stream: &mut R, carries: Carries, named: impl Fn()) -> Result<(), ReceiveError> {
        let mut batch = Batch { urgent: carries == Carries::Wanted, ..Batch::default() };
        let received = self.receive_into(&mut batch, stream, carries, named);
        // Also where it broke: what has come whole is not sent again.
        let told = self.tell(&mut batch);
        received.and(told)
    }

    fn receive_into<R: Read>(
        &self,
        batch: &mut Batch,
        stream: &mut R,
        carries: Carries,
        named: impl Fn(),
    ) -> Result<(), ReceiveError> {
        let (mut prompt, mut buffer, mut received) = (carries != Carries::Versions, Vec::new(), 0);
        let mut unpacker = Unpacker::default();
        loop {
            match tranship_wire::read_header(stream)? {
                header @ (FrameHeader::Pages { space, range } | FrameHeader::Packed { space, range, .. }) => {
                    received += range.len();
                    self.received.fetch_add(range.len(), Ordering::Relaxed);
                    let packed = match header {
                        FrameHeader::Packed { codec, length, .. } => Some((codec, length)),
                        _ => None,
                    };
                    let pages = Arriving { stream, unpacker: &mut unpacker, packed };
                    if space.is_object() {
                        self.share(pages, &mut buffer, (space, range))?;
                        continue;
                    }
                    if prompt {
                        self.store_missing(pages, (space, range), batch, &mut buffer)?;
                    } else {
                        let (row, newer) = self.store(pages, (space, range), &mut buffer)?;
                        if !newer {
                            batch.add(row);
                        }
                    }
                    if batch.extents.len() >= BATCH || (prompt && batch.bytes >= PROMPT) || batch.urgent {
                        self.tell(batch)?;
                    }
                }
                // Later on, pages leave the store as they are put in place.
                FrameHeader::Same { space, range, other } if !prompt => {
                    self.copy(batch, (space, range), other, &mut unpacker)?;
                }
                FrameHeader::Zero { space, range } if space.is_object() => {
                    let grown = self.shared.zero(space, range)?;
                    self.shared_bytes.fetch_add(grown, Ordering::Relaxed);
                }
                FrameHeader::Zero { space, range } => {
                    // In their order: the pager must not hear of a page's end before its beginning.
                    self.tell(batch)?;
                    let replaced = {
                        let mut all = self.held();
                        let held = all.entry(space).or_default();
                        held.later.remove(range);
                        held.places.remove(range)
                    };
                    self.give_back(&replaced);
                    self.way(batch).gone(space, range)?;
                }
                header @ FrameHeader::Later { space, .. } => {
                    self.tell(batch)?;
                    let ranges = tranship_wire::runs::read_runs(&header, stream)?;
                    let mut all = self.held();
                    let held = all.entry(space).or_default();
                    ranges.iter().for_each(|range| held.later.insert(*range));
                    drop(all);
                    self.pager().later(space, &ranges)?;
                }
                FrameHeader::Named => {
                    self.tell(batch)?;
                    // Its answer comes after it has dealt with all that was said: from now on it uses no page that is named.
                    self.pager().status(PAGER)?;
                    prompt = true;
                    named();
                }
                FrameHeader::End { total } if total == received => return Ok(()),
                FrameHeader::End { total } => return Err(ReadError::Incomplete { sent: total, received }.into()),
                other => return Err(ReadError::Unexpected { expected: Kind::Pages, found: other.kind() }.into()),
            }
        }
    }

    /// The way to the pager for what is in this batch.
    fn way(&self, batch: &Batch) -> MutexGuard<'_, PagerHandle> {
        if batch.urgent { self.urgent() } else { self.pager() }
    }

    fn tell(&self, batch: &mut Batch) -> Result<(), ReceiveError> {
        if !batch.extents.is_empty() {
            self.way(batch).extents(&batch.extents)?;
        }
        batch.extents.clear();
        batch.bytes = 0;
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, HashMap<AddressSpaceId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where in the arena the older version of just these pages is, in one piece.
    fn place_of(&self, space: AddressSpaceId, range: PageRange) -> Option<u64> {
        let found = self.held().get(&space)?.places.find(range.start)?;
        (range.end <= found.range.end).then(|| found.offset + (range.start - found.range.start))
    }

    /// Takes for pages of one task what another one has there.
    fn copy(
        &self,
        batch: &mut Batch,
        (space, range): (AddressSpaceId, PageRange),
        other: AddressSpaceId,
        unpacker: &mut Unpacker,
    ) -> Result<(), ReceiveError> {
        let originals = self.held().get(&other).map(|held| held.places.within(range)).unwrap_or_default();
        if originals.iter().map(|extent| extent.range.len()).sum::<u64>() != range.len() {
            return Err(ReceiveError::NeverCame { space: space.0, address: range.start, other: other.0 });
        }
        let (mut content, mut buffer) = (Vec::new(), Vec::new());
        for Extent { range, offset } in originals {
            content.resize(range.len() as usize, 0);
            self.arena.read(offset, &mut content);
            let pages = Arriving { stream: &mut content.as_slice(), unpacker: &mut *unpacker, packed: None };
            let (row, newer) = self.store(pages, (space, range), &mut buffer)?;
            if !newer {
                batch.add(row);
            }
        }
        if batch.extents.len() >= BATCH {
            self.tell(batch)?;
        }
        Ok(())
    }

    /// Receives pages: into the older version's place, or into a new one. Older versions of some of them, elsewhere, are
    /// given up. Returns where they are, and whether that was known before.
    fn store<R: Read>(
        &self,
        pages: Arriving<'_, R>,
        (space, range): (AddressSpaceId, PageRange),
        buffer: &mut Vec<u8>,
    ) -> Result<(StoredExtent, bool), ReceiveError> {
        if let Some(offset) = self.place_of(space, range) {
            buffer.resize(range.len() as usize, 0);
            pages.read(buffer)?;
            self.arena.replace(offset, buffer);
            return Ok((StoredExtent { space, extent: Extent { range, offset } }, true));
        }
        let offset = self.read_anew(pages, range)?;
        let extent = Extent { range, offset };
        let replaced = self.held().entry(space).or_default().places.insert(extent);
        self.give_back(&replaced);
        Ok((StoredExtent { space, extent }, false))
    }

    /// Receives pages to a new place.
    fn read_anew<R: Read>(&self, pages: Arriving<'_, R>, range: PageRange) -> Result<u64, ReceiveError> {
        let mut slice = self.arena.allocate(range.len() as usize).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => ReceiveError::Full { capacity: self.arena.capacity() },
            _ => ReceiveError::NoMemory(error),
        })?;
        pages.read(&mut slice)?;
        Ok(slice.offset())
    }

    /// Receives pages once all is named. Such a page may come twice: with the stream that it belongs to, and before that
    /// because somebody waits for it; or again after a link broke. All have one content, the frozen one. The first that has come
    /// whole is kept, since the pager may be putting it in place (its memory, given back, would read as zeros there); where it
    /// is, the pager is told each time.
    fn store_missing<R: Read>(
        &self,
        pages: Arriving<'_, R>,
        (space, range): (AddressSpaceId, PageRange),
        batch: &mut Batch,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ReceiveError> {
        let older = self.place_of(space, range);
        let offset = match older {
            Some(offset) => {
                buffer.resize(range.len() as usize, 0);
                pages.read(buffer)?;
                offset
            }
            None => self.read_anew(pages, range)?,
        };
        let mut all = self.held();
        let held = all.entry(space).or_default();
        // Still behind the lock: nobody may be told of it before.
        let mut at = range.start;
        for piece in held.take_missing(range) {
            let extent = Extent { range: piece, offset: offset + (piece.start - range.start) };
            if older.is_some() {
                let within = (piece.start - range.start) as usize..(piece.end - range.start) as usize;
                self.arena.replace(extent.offset, &buffer[within]);
                continue;
            }
            self.give_back(&held.places.insert(extent));
            self.release(offset + (at - range.start), piece.start - at);
            at = piece.end;
        }
        let rows = held.places.within(range);
        drop(all);
        if older.is_none() {
            self.release(offset + (at - range.start), range.end - at);
        }
        rows.into_iter().for_each(|extent| batch.add(StoredExtent { space, extent }));
        Ok(())
    }

    fn give_back(&self, replaced: &[Extent]) {
        replaced.iter().for_each(|extent| self.release(extent.offset, extent.range.len()));
    }

    fn release(&self, offset: u64, len: u64) {
        if len > 0 {
            // Memory that cannot be given back now goes with the store.
            let _ = self.arena.release(offset, len);
        }
    }

    /// Largest store that makes sense for a container of `memory` bytes on a node with `available` bytes to spare: room
    /// for one that has only begun to grow, since memory is taken only for what comes; in any case bounded.
    pub fn capacity_for(memory: u64, available: u64) -> io::Result<u64> {
        let wanted = (memory * 2 + (1 << 30)).next_multiple_of(PAGE_SIZE);
        if memory > available { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(wanted.min(available.max(memory))) }
    }
}

impl Batch {
    fn add(&mut self, row: StoredExtent) {
        self.bytes += row.extent.range.len();
        self.extents.push(row);
    }
}

#[cfg(test)]
mod tests;
