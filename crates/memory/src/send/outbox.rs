//! What is still to be sent when the tasks run on the other side already.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};
use tranship_wire::WriteError;

use super::{CHUNK, Chunk, Counters, SendError, Stream, Version};
use crate::page_set::PageSet;

/// Bytes that a stream takes off at a time: what is behind them on the way waits for as long as they take.
const PIECE: u64 = 128 << 10;

/// What still has to be sent of a frozen container's memory. Who sends takes it off first, so that a page travels once:
/// whether with the stream that it belongs to, or with the one for what the other side waits for. But one that is waited for
/// while it is on its way with its stream, behind all that fills the buffers, is sent once more, with nothing before it.
#[derive(Debug, Default)]
pub struct Outbox {
    unsent: Mutex<HashMap<AddressSpaceId, Unsent>>,
    /// Where the other side waited last: what follows is likely to be touched next.
    hint: AtomicU64,
    /// Whether the first stream is to send all of it while the others rest.
    alone: Mutex<bool>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Unsent {
    pid: u32,
    pages: PageSet,
    /// What the streams have taken. What of it is asked for has not come, or the answer would not be waited for.
    on_their_way: PageSet,
}

impl Outbox {
    /// Adds chunks, of which some may be on it.
    pub fn add(&self, chunks: &[Chunk]) {
        let mut unsent = self.unsent();
        for chunk in chunks {
            let space = unsent.entry(chunk.space).or_default();
            // The newest look tells whose memory it is: a process may have ended, and another have got its place.
            space.pid = chunk.pid;
            space.pages.insert(chunk.range);
        }
    }

    /// Takes off what is not there any more.
    pub fn drop_stale(&self, stale: &[(AddressSpaceId, PageRange)]) {
        let mut unsent = self.unsent();
        for (space, range) in stale {
            if let Some(unsent) = unsent.get_mut(space) {
                unsent.pages.remove(*range);
                unsent.on_their_way.remove(*range);
            }
        }
    }

    /// Bytes that are left.
    pub fn bytes(&self) -> u64 {
        self.unsent().values().map(|space| space.pages.bytes()).sum()
    }

    fn unsent(&self) -> MutexGuard<'_, HashMap<AddressSpaceId, Unsent>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The places of chunks in which something is left, as far as they belong to one of `count` streams.
    fn places(&self, number: usize, count: usize) -> BTreeSet<(u64, AddressSpaceId)> {
        // Of a copy, since who wants a page needs the list meanwhile.
        let unsent: Vec<_> = self.unsent().iter().map(|(space, unsent)| (*space, unsent.pages.clone())).collect();
        let mut places = BTreeSet::new();
        for (space, pages) in unsent {
            let chunks = |range: PageRange| range.start / CHUNK..range.end.div_ceil(CHUNK);
            let mut chunks: Vec<u64> = pages.all().into_iter().flat_map(chunks).collect();
            chunks.dedup();
            let own = chunks.into_iter().filter(|chunk| *chunk as usize % count == number);
            places.extend(own.map(|chunk| (chunk * CHUNK, space)));
        }
        places
    }

    /// Takes off what is left of `range`, for the stream that it belongs to.
    fn take(&self, space: AddressSpaceId, range: PageRange) -> Vec<Chunk> {
        let mut all = self.unsent();
        let Some(unsent) = all.get_mut(&space) else { return Vec::new() };
        let taken = unsent.pages.take(range);
        taken.iter().for_each(|range| unsent.on_their_way.insert(*range));
        let pid = unsent.pid;
        taken.into_iter().map(|range| Chunk { space, pid, range }).collect()
    }

    /// Takes off what is left of `range` or on its way, for whoever waits for it. The second time, nothing is.
    fn take_wanted(&self, space: AddressSpaceId, range: PageRange) -> Vec<Chunk> {
        let mut all = self.unsent();
        let Some(unsent) = all.get_mut(&space) else { return Vec::new() };
        let mut wanted = PageSet::default();
        for taken in unsent.pages.take(range).into_iter().chain(unsent.on_their_way.take(range)) {
            wanted.insert(taken);
        }
        let pid = unsent.pid;
        wanted.all().into_iter().map(|range| Chunk { space, pid, range }).collect()
    }

    /// Sends over one of `count` streams what belongs to it, beginning behind where the other side waited last, and ends the
    /// stream. While the first one's link is `narrow`, it sends what belongs to the others as well, and they rest.
    pub fn send<W: Write>(
        &self,
        (number, count): (usize, usize),
        stream: &mut Stream<W>,
        counters: &Counters,
        narrow: impl Fn(&W) -> bool,
    ) -> Result<(), SendError> {
        let sent = self.send_own((number, count), stream, counters, narrow);
        if number == 0 {
            self.set_alone(false);
        }
        sent?;
        stream.link().flush().map_err(WriteError::from)?;
        Ok(tranship_wire::write_end(&mut stream.outlet.link, stream.outlet.sent)?)
    }

    fn send_own<W: Write>(
        &self,
        (number, count): (usize, usize),
        stream: &mut Stream<W>,
        counters: &Counters,
        narrow: impl Fn(&W) -> bool,
    ) -> Result<(), SendError> {
        let mut own = self.places(number, count);
        let mut alone = false;
        loop {
            let hint = self.hint.load(Ordering::Relaxed);
            let next = own.range((hint, AddressSpaceId(0))..).next().or_else(|| own.iter().next());
            let Some(&(start, space)) = next else { return Ok(()) };
            own.remove(&(start, space));
            for piece in (PageRange { start, end: start + CHUNK }).cut(PIECE) {
                if number > 0 {
                    self.rest(stream)?;
                } else if narrow(stream.link()) != alone {
                    alone = !alone;
                    self.set_alone(alone);
                    if alone {
                        own = self.places(0, 1);
                    }
                }
                for chunk in self.take(space, piece) {
                    stream.send(&chunk, Version::Later, counters, None)?;
                }
            }
        }
    }

    fn set_alone(&self, alone: bool) {
        *self.alone.lock().unwrap_or_else(PoisonError::into_inner) = alone;
        self.changed.notify_all();
    }

    /// Waits for as long as the first stream is alone.
    fn rest<W: Write>(&self, stream: &mut Stream<W>) -> Result<(), WriteError> {
        let alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        if *alone {
            // What it has taken is not to wait with it.
            drop(alone);
            stream.link().flush()?;
            let alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.changed.wait_while(alone, |alone| *alone));
        }
        Ok(())
    }

    /// Sends what is left or on its way of pages that the other side waits for, and of those around them. The first of each range, which
    /// somebody waits for, leaves by itself: over a slow link those around it take many times as long.
    pub fn send_wanted<W: Write>(
        &self,
        space: AddressSpaceId,
        ranges: &[PageRange],
        stream: &mut Stream<W>,
        counters: &Counters,
    ) -> Result<(), SendError> {
        for range in ranges {
            self.hint.store(range.start & !(CHUNK - 1), Ordering::Relaxed);
            let second = range.end.min(range.start + PAGE_SIZE);
            let around = PageRange { start: second, end: range.end };
            for piece in [PageRange { end: second, ..*range }].into_iter().chain(around.cut(CHUNK)) {
                self.send_left(space, piece, stream, counters)?;
                stream.link().flush().map_err(WriteError::from)?;
            }
        }
        Ok(())
    }

    /// Sends what is left or on its way of pages for which the other side is going to ask, before it asks for each.
    pub fn send_ahead<W: Write>(
        &self,
        space: AddressSpaceId,
        ranges: &[PageRange],
        stream: &mut Stream<W>,
        counters: &Counters,
    ) -> Result<(), SendError> {
        for range in ranges {
            self.send_left(space, *range, stream, counters)?;
        }
        Ok(stream.link().flush().map_err(WriteError::from)?)
    }

    /// Sends what is left or on its way of `range`.
    fn send_left<W: Write>(
        &self,
        space: AddressSpaceId,
        range: PageRange,
        stream: &mut Stream<W>,
        counters: &Counters,
    ) -> Result<(), SendError> {
        self.take_wanted(space, range)
            .iter()
            .try_for_each(|chunk| stream.send(chunk, Version::Later, counters, None).map(drop))
    }
}
