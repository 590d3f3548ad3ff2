//! The source's side: finds the pages that hold data, reads them from the stopped tasks, streams them.
//!
//! Memory goes from the task's pages to one buffer a stream and from there into TLS; nothing is queued. Several streams
//! take chunks from one list, so that a slow one does not hold up the others.

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use tranship_sys::pagemap::Pagemap;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};
use tranship_wire::WriteError;

use crate::survey::Space;

/// Bytes read at a time: also the largest frame.
const CHUNK: u64 = 1 << 20;

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
}

/// Lists the pages of the (stopped) tasks that hold data.
pub fn plan(spaces: &[Space]) -> Result<Plan, SendError> {
    let mut plan = Plan::default();
    for space in spaces {
        let failed = |address| move |source| SendError::Read { pid: space.pid, address, source };
        let mut pagemap = Pagemap::open(space.pid).map_err(failed(0))?;
        for range in &space.ranges {
            let list = if space.executable.contains(range) { &mut plan.first } else { &mut plan.rest };
            let found = |start: u64, end: u64| {
                let mut at = start;
                while at < end {
                    let next = end.min(at + CHUNK);
                    list.push(Chunk { space: space.id, pid: space.pid, range: PageRange { start: at, end: next } });
                    at = next;
                }
            };
            pagemap.populated(range.start, range.end, found).map_err(failed(range.start))?;
        }
    }
    Ok(plan)
}

/// Sends chunks over all the streams at once. The streams stay open: [`finish`] ends them.
pub fn send<W: Write + Send>(chunks: &[Chunk], streams: &mut [Stream<W>], counters: &Counters) -> Result<(), SendError> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = streams
            .iter_mut()
            .map(|stream| {
                let next = &next;
                scope.spawn(move || -> Result<(), SendError> {
                    while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                        stream.send(chunk, counters).inspect_err(|_| {
                            // No use in going on elsewhere.
                            next.store(chunks.len(), Ordering::Relaxed);
                        })?;
                    }
                    stream.link.flush().map_err(WriteError::from)?;
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().expect("a sender does not panic")).collect()
    })
}

/// Tells the other side, on every stream, that nothing more will come.
pub fn finish<W: Write>(streams: &mut [Stream<W>]) -> Result<(), SendError> {
    streams.iter_mut().try_for_each(|s| Ok(tranship_wire::write_end(&mut s.link, s.sent)?))
}

/// One stream of pages, and the buffer they pass through.
#[derive(Debug)]
pub struct Stream<W> {
    link: W,
    buffer: Vec<u8>,
    sent: u64,
}

impl<W: Write> Stream<W> {
    /// A stream over a link; its buffer is allocated and touched here, before the freeze.
    pub fn new(link: W) -> Self {
        Self { link, buffer: vec![1; CHUNK as usize], sent: 0 }
    }

    /// The link below.
    pub fn link(&mut self) -> &mut W {
        &mut self.link
    }

    fn send(&mut self, chunk: &Chunk, counters: &Counters) -> Result<(), SendError> {
        let Chunk { space, pid, range } = *chunk;
        let pages = &mut self.buffer[..range.len() as usize];
        read(pid, range.start, pages)?;
        counters.read.fetch_add(range.len(), Ordering::Relaxed);
        for (first, run) in runs_with_data(pages) {
            tranship_wire::write_pages(&mut self.link, space, range.start + first, run)?;
            self.sent += run.len() as u64;
            counters.sent.fetch_add(run.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Reads memory of another process.
fn read(pid: u32, address: u64, into: &mut [u8]) -> Result<(), SendError> {
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
mod tests {
    use super::*;

    #[test]
    fn zero_pages_are_left_out_and_runs_kept_whole() {
        let size = PAGE_SIZE as usize;
        let mut pages = vec![0u8; 6 * size];
        pages[size] = 1;
        pages[3 * size - 1] = 1;
        pages[5 * size + 7] = 1;
        let runs: Vec<(u64, usize)> = runs_with_data(&pages).map(|(at, run)| (at / PAGE_SIZE, run.len() / size)).collect();
        assert_eq!(runs, [(1, 2), (5, 1)]);
        assert_eq!(runs_with_data(&pages[..size]).count(), 0);
    }
}
