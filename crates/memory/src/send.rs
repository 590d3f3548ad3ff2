//! The source's side: finds the pages that hold data, reads them from the stopped tasks, streams them.
//!
//! Memory goes from the task's pages to one buffer a stream and from there into TLS; nothing is queued. Which of several
//! streams carries a page depends on its address alone, so that no version of it overtakes another.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use tranship_sys::pagemap::Pagemap;
use tranship_sys::threads::{self, Beside};
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};
use tranship_wire::{FrameHeader, WriteError};

use crate::compress::Compressor;
use crate::deduplicate::Deduplicator;
use crate::survey::Space;

mod outbox;

pub use outbox::Outbox;

/// Bytes read at a time: also the largest frame.
pub(crate) const CHUNK: u64 = 1 << 20;

/// A piece of work: pages of one address space, at most 1 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    space: AddressSpaceId,
    pid: u32,
    range: PageRange,
}

/// What is to be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Executable memory: to be sent before CRIU is let go, which borrows a few bytes of it while it dumps.
    pub first: Vec<Chunk>,
    /// All the rest.
    pub rest: Vec<Chunk>,
}

impl Plan {
    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.first.iter().chain(&self.rest).map(|c| c.range.len()).sum()
    }
}

/// Memory that cannot be read or sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The page table or the memory of a process cannot be read.
    #[error("the memory of process {pid} at {address:#x} cannot be read: {source}")]
    Read {
        /// Pid on this node.
        pid: u32,
        /// Where.
        address: u64,
        /// Why.
        source: io::Error,
    },
    /// Shared memory cannot be read.
    #[error(transparent)]
    Shared(#[from] crate::shared::source::SharedError),
    /// The stream broke.
    #[error("memory cannot be sent: {0}")]
    Send(#[from] WriteError),
}

/// Amounts, counted while it goes on; other threads may look.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes of pages that were read.
    pub read: AtomicU64,
    /// Bytes of pages that were sent; the others were all zeros.
    pub sent: AtomicU64,
    /// Bytes of pages that were not even read, because their tasks had written them again before it was their turn.
    pub passed_over: AtomicU64,
}

impl Plan {
    /// The list for the chunks of one of the space's ranges.
    pub(crate) fn list(&mut self, space: &Space, range: &PageRange) -> &mut Vec<Chunk> {
        let is_code = space.executable.iter().any(|code| code.intersection(range).is_some());
        if is_code { &mut self.first } else { &mut self.rest }
    }
}

impl Chunk {
    /// Cuts a run of pages into chunks, at addresses that are multiples of their size: so a page is always in the same
    /// chunk's place, and travels on the same stream.
    pub(crate) fn cut(space: &Space, run: PageRange, into: &mut Vec<Chunk>) {
        into.extend(run.cut(CHUNK).map(|range| Chunk { space: space.id, pid: space.pid, range }));
    }

    /// Which of `streams` carries it. Newer versions of a page must not overtake older ones, so it depends on the address.
    fn route(&self, streams: usize) -> usize {
        (self.range.start / CHUNK) as usize % streams
    }

    /// Whose pages they are, and which.
    pub fn pages(&self) -> (AddressSpaceId, PageRange) {
        (self.space, self.range)
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.len()
    }
}

/// Lists the pages of the (stopped) tasks that hold data.
pub fn plan(spaces: &[Space]) -> Result<Plan, SendError> {
    let mut plan = Plan::default();
    for space in spaces {
        let failed = |address| move |source| SendError::Read { pid: space.pid, address, source };
        let mut pagemap = Pagemap::open(space.pid).map_err(failed(0))?;
        for range in &space.ranges {
            let list = plan.list(space, range);
            let found = |start, end| Chunk::cut(space, PageRange { start, end }, list);
            pagemap.populated(range.start, range.end, found).map_err(failed(range.start))?;
        }
    }
    Ok(plan)
}

/// Which version of their pages chunks have, which decides what has to be said of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The first that is sent: what is not sent reads as zeros there.
    First,
    /// A later one: zeros must be said, lest the older version stays.
    Later,
}

/// Sends chunks over all the streams at once. The streams stay open. The tasks must stand still: a page that cannot be read
/// is an error.
pub fn send<W: Write + Send>(
    chunks: &[Chunk],
    version: Version,
    streams: &mut [Stream<W>],
    counters: &Counters,
) -> Result<(), SendError> {
    send_all(chunks, version, streams, counters, None)
}

/// The same while the tasks run: they may unmap pages, execute other programs and exit before their pages are read. What
/// could not be read is left out, and the witness is told. So is what the witness knows to have been written again since it was
/// found: to send it now would be in vain.
pub fn send_running<W: Write + Send>(
    chunks: &[Chunk],
    version: Version,
    streams: &mut [Stream<W>],
    counters: &Counters,
    witness: &dyn Witness,
) -> Result<(), SendError> {
    send_all(chunks, version, streams, counters, Some(witness))
}

/// Who is told what becomes of chunks that are sent while the tasks run, by the threads of all streams at once.
pub trait Witness: Sync {
    /// Which of these pages are to be sent now, in order. It takes care itself of the others.
    fn due(&self, chunk: &Chunk) -> Vec<PageRange>;

    /// These pages were read at this address, all in one chunk, and are sent.
    fn read(&self, space: AddressSpaceId, address: u64, pages: &[u8]);

    /// This chunk could not be read, and is left out.
    fn missed(&self, chunk: &Chunk);
}

fn send_all<W: Write + Send>(
    chunks: &[Chunk],
    version: Version,
    streams: &mut [Stream<W>],
    counters: &Counters,
    witness: Option<&dyn Witness>,
) -> Result<(), SendError> {
    let (broken, count) = (AtomicBool::new(false), streams.len());
    let several_tasks = chunks.iter().any(|chunk| chunk.space != chunks[0].space);
    std::thread::scope(|scope| {
        let workers: Vec<_> = streams
            .iter_mut()
            .enumerate()
            .filter_map(|(number, stream)| {
                let broken = &broken;
                let own = move || chunks.iter().filter(move |c| c.route(count) == number);
                // In the freeze there may be nothing for a stream, and then nobody waits for a thread to get its turn.
                own().next()?;
                Some(threads::beside(scope, "send", move || -> Result<(), SendError> {
                    if let Some(table) = stream.deduplicator.as_mut().filter(|t| several_tasks || !t.is_empty()) {
                        own().for_each(|chunk| table.expect(chunk.space, chunk.range.start));
                    }
                    for chunk in own() {
                        if broken.load(Ordering::Relaxed) {
                            // No use in going on here.
                            break;
                        }
                        let sent = match witness {
                            Some(witness) => stream.send_due(chunk, version, counters, witness),
                            None => stream.send(chunk, version, counters, None),
                        };
                        sent.inspect_err(|_| broken.store(true, Ordering::Relaxed))?;
                    }
                    stream.link().flush().map_err(WriteError::from)?;
                    Ok(())
                }))
            })
            .collect();
        workers.into_iter().try_for_each(Beside::join)
    })
}

/// Says that pages that were sent before are gone: they read as zeros.
pub fn send_stale<W: Write>(stale: &[(AddressSpaceId, PageRange)], streams: &mut [Stream<W>]) -> Result<(), SendError> {
    let count = streams.len();
    for (space, range) in stale {
        for range in range.cut(CHUNK) {
            let piece = Chunk { space: *space, pid: 0, range };
            streams[piece.route(count)].gone(*space, range, Version::Later)?;
        }
    }
    Ok(())
}

/// Names pages that come later, each on the stream that will carry it.
pub fn name<W: Write>(plan: &Plan, streams: &mut [Stream<W>]) -> Result<(), SendError> {
    let count = streams.len();
    let mut lists: Vec<BTreeMap<AddressSpaceId, Vec<PageRange>>> = vec![BTreeMap::new(); count];
    for chunk in plan.first.iter().chain(&plan.rest) {
        lists[chunk.route(count)].entry(chunk.space).or_default().push(chunk.range);
    }
    for (stream, list) in streams.iter_mut().zip(lists) {
        for (space, mut ranges) in list {
            ranges.sort_unstable_by_key(|range| range.start);
            tranship_wire::runs::write_later(stream.link(), space, &ranges)?;
        }
        stream.link().flush().map_err(WriteError::from)?;
    }
    Ok(())
}

/// Says on every stream that all pages have been named that come later. From now on each is sent, whoever else has the same: they leave
/// the destination's store as they are put in place.
pub fn named<W: Write>(streams: &mut [Stream<W>]) -> Result<(), SendError> {
    for stream in streams {
        stream.deduplicator = None;
        tranship_wire::write_header(stream.link(), &FrameHeader::Named)?;
        stream.link().flush().map_err(WriteError::from)?;
    }
    Ok(())
}

/// The chunks for pages that the other side says it lacks. Spaces that are not among `spaces` have none here.
pub fn lacking(spaces: &[Space], missing: &[(AddressSpaceId, Vec<PageRange>)]) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (id, ranges) in missing {
        if let Some(space) = spaces.iter().find(|space| space.id == *id) {
            ranges.iter().for_each(|range| Chunk::cut(space, *range, &mut chunks));
        }
    }
    chunks
}

/// One stream of pages, and the buffer they pass through.
#[derive(Debug)]
pub struct Stream<W> {
    outlet: Outlet<W>,
    deduplicator: Option<Deduplicator>,
    buffer: Vec<u8>,
}

/// Where the pages of a stream leave.
#[derive(Debug)]
pub(crate) struct Outlet<W> {
    link: W,
    compressor: Option<Compressor>,
    /// Bytes of pages, which the stream's end will tell.
    sent: u64,
}

impl<W: Write> Outlet<W> {
    /// Sends pages with their content.
    pub(crate) fn pages(
        &mut self,
        space: AddressSpaceId,
        address: u64,
        pages: &[u8],
        counters: &Counters,
    ) -> Result<(), WriteError> {
        match &mut self.compressor {
            Some(compressor) => compressor.write(&mut self.link, space, address, pages)?,
            None => tranship_wire::write_pages(&mut self.link, space, address, pages)?,
        }
        self.sent += pages.len() as u64;
        counters.sent.fetch_add(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Says that pages are as those of another task.
    fn same(&mut self, space: AddressSpaceId, range: PageRange, other: AddressSpaceId) -> Result<(), WriteError> {
        tranship_wire::write_same(&mut self.link, space, (range.start, range.pages() as u32), other)
    }

    /// Says that pages are zero.
    pub(crate) fn zero(&mut self, space: AddressSpaceId, range: PageRange) -> Result<(), WriteError> {
        tranship_wire::write_zero(&mut self.link, space, range.start, range.pages() as u32)
    }
}

impl<W: Write> Stream<W> {
    /// A stream over a link; its buffer is allocated and touched here, before the freeze.
    pub fn new(link: W, compressor: Option<Compressor>) -> Self {
        Self { outlet: Outlet { link, compressor, sent: 0 }, deduplicator: None, buffer: vec![1; CHUNK as usize] }
    }

    /// Has pages not sent that another task has at the same address. The other side must understand [`tranship_wire::Kind::Same`].
    pub fn deduplicate(mut self, deduplicator: Deduplicator) -> Self {
        self.deduplicator = Some(deduplicator);
        self
    }

    /// The link below.
    pub fn link(&mut self) -> &mut W {
        &mut self.outlet.link
    }

    /// The buffer and where its pages leave: for pages that are not read from a process.
    pub(crate) fn parts(&mut self) -> (&mut Outlet<W>, &mut [u8]) {
        (&mut self.outlet, &mut self.buffer)
    }

    /// Pages are zeros, which has to be said unless this is the first version.
    fn gone(&mut self, space: AddressSpaceId, range: PageRange, version: Version) -> Result<(), WriteError> {
        if let Some(table) = &mut self.deduplicator {
            table.forget(space, range);
        }
        if version == Version::Later { self.outlet.zero(space, range) } else { Ok(()) }
    }

    /// Sends what a running task has not written again by now.
    fn send_due(
        &mut self,
        chunk: &Chunk,
        version: Version,
        counters: &Counters,
        witness: &dyn Witness,
    ) -> Result<(), SendError> {
        let mut passed_over = chunk.bytes();
        for range in witness.due(chunk) {
            passed_over -= range.len();
            self.send(&Chunk { range, ..*chunk }, version, counters, Some(witness))?;
        }
        counters.passed_over.fetch_add(passed_over, Ordering::Relaxed);
        Ok(())
    }

    fn send(
        &mut self,
        chunk: &Chunk,
        version: Version,
        counters: &Counters,
        witness: Option<&dyn Witness>,
    ) -> Result<(), SendError> {
        let Chunk { space, pid, range } = *chunk;
        let pages = &mut self.buffer[..range.len() as usize];
        if let Err(error) = read(pid, range.start, pages) {
            let Some(witness) = witness else { return Err(error) };
            let gone = matches!(&error, SendError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound);
            if gone || range.pages() == 1 {
                witness.missed(chunk);
                return Ok(());
            }
            // Perhaps one page of many is not there any more.
            let middle = range.start + range.pages() / 2 * PAGE_SIZE;
            for (start, end) in [(range.start, middle), (middle, range.end)] {
                self.send(&Chunk { range: PageRange { start, end }, ..*chunk }, version, counters, Some(witness))?;
            }
            return Ok(());
        }
        if let Some(witness) = witness {
            witness.read(space, range.start, pages);
        }
        counters.read.fetch_add(range.len(), Ordering::Relaxed);
        let mut told = range.start;
        // Taken for as long as its pages are looked at.
        let buffer = std::mem::take(&mut self.buffer);
        let mut sent = runs_with_data(&buffer[..range.len() as usize]).try_for_each(|(first, run)| {
            let start = range.start + first;
            if told < start {
                self.gone(space, PageRange { start: told, end: start }, version)?;
            }
            told = start + run.len() as u64;
            self.data(space, start, run, counters)
        });
        self.buffer = buffer;
        if told < range.end {
            sent = sent.and_then(|()| self.gone(space, PageRange { start: told, end: range.end }, version));
        }
        Ok(sent?)
    }

    /// Sends pages, but for those that another task has as well.
    fn data(
        &mut self,
        space: AddressSpaceId,
        address: u64,
        pages: &[u8],
        counters: &Counters,
    ) -> Result<(), WriteError> {
        let Some(table) = &mut self.deduplicator else { return self.outlet.pages(space, address, pages, counters) };
        for (run, other) in table.split(space, address, pages) {
            match other {
                Some(other) => self.outlet.same(space, run, other)?,
                None => {
                    let run_pages = &pages[(run.start - address) as usize..(run.end - address) as usize];
                    self.outlet.pages(space, run.start, run_pages, counters)?;
                }
            }
        }
        Ok(())
    }
}

/// Reads memory of another process.
pub(crate) fn read(pid: u32, address: u64, into: &mut [u8]) -> Result<(), SendError> {
    let mut done = 0;
    while done < into.len() {
        let at = address + done as u64;
        let remote = RemoteIoVec { base: at as usize, len: into.len() - done };
        match process_vm_readv(Pid::from_raw(pid as i32), &mut [IoSliceMut::new(&mut into[done..])], &[remote]) {
            Ok(got) if got > 0 => done += got,
            // Pages that their own task may not read (PROT_NONE) can be read through the file.
            _ => {
                File::open(format!("/proc/{pid}/mem"))
                    .and_then(|memory| memory.read_exact_at(&mut into[done..], at))
                    .map_err(|source| SendError::Read { pid, address: at, source })?;
                done = into.len();
            }
        }
    }
    Ok(())
}

/// The runs of pages that are not all zeros, with their offsets.
fn runs_with_data(pages: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let size = PAGE_SIZE as usize;
    let mut at = 0;
    std::iter::from_fn(move || {
        let zero = |at: usize| pages[at..at + size].iter().fold(0, |all, byte| all | byte) == 0;
        while at < pages.len() && zero(at) {
            at += size;
        }
        let start = at;
        while at < pages.len() && !zero(at) {
            at += size;
        }
        (start < at).then(|| (start as u64, &pages[start..at]))
    })
}

#[cfg(test)]
mod tests;
