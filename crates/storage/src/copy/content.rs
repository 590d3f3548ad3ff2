//! A file's content, in chunks of pages that are known by their hashes.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Sink;
use super::chunks::Chunks;
use super::op::Op;

/// Bytes of a chunk: what is read at least of a file that changed.
pub(super) const CHUNK: u64 = 16 << 10;
/// Bytes that are sent at least.
const PAGE: usize = 4 << 10;
/// Bytes that are read at once.
const READ: u64 = 1 << 20;

/// Of a chunk's pages.
type Hashes = [u64; CHUNK as usize / PAGE];
/// Of a page of zeros, which no other one has.
const ZEROS: u64 = 0;

/// What was sent of a file.
#[derive(Debug, Default)]
pub(super) struct Sent {
    size: u64,
    /// Chunks that are not all zeros, by their number, in order.
    chunks: Vec<(u64, Hashes)>,
}

impl Sent {
    /// Notes that the peer's file has zeros in these whole pages now.
    pub fn zeroed(&mut self, start: u64, end: u64) {
        for (chunk, hashes) in &mut self.chunks {
            let first = *chunk * CHUNK;
            let pages = (0..).map(|number| first + number * PAGE as u64);
            hashes
                .iter_mut()
                .zip(pages)
                .filter(|(_, page)| (start..end).contains(page))
                .for_each(|(hash, _)| *hash = ZEROS);
        }
        self.chunks.retain(|(_, hashes)| *hashes != [ZEROS; _]);
    }
}

/// What came of sending a file.
pub(super) struct Outcome {
    /// Bytes that had to be sent.
    pub bytes: u64,
    /// The peer was told something, so that its file has another time now.
    pub touched: bool,
}

/// Which end failed.
pub(super) enum Trouble {
    /// The file.
    Read(io::Error),
    /// The link.
    Link(io::Error),
}

/// Which parts of a file were written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts<'a> {
    /// These, and no others.
    pub chunks: &'a Chunks,
    /// Those that became holes are among them.
    pub with_holes: bool,
}

/// Sends what of a file is not as `sent` says, which says so then. Where it is known which parts were written, `written`, only those
/// are read; what became a hole is seen all the same.
pub(super) fn send(
    file: &OwnedFd,
    ino: u64,
    size: u64,
    sent: &mut Sent,
    written: Option<Parts<'_>>,
    sink: &mut dyn Sink,
) -> Result<Outcome, Trouble> {
    let mut writer = Writer { sink, ino, size, begun: false, bytes: 0 };
    if std::mem::replace(&mut sent.size, size) != size {
        writer.begin().map_err(Trouble::Link)?;
    }
    let mut known = Known { chunks: &mut sent.chunks, more: Vec::new(), has_holes: false };
    let mut buffer = vec![0; READ.min(size.next_multiple_of(CHUNK)) as usize];
    // To look for holes the kernel goes through all pages.
    let next_extent = |position| match written {
        Some(Parts { with_holes: true, .. }) => Ok(Some((position, size)).filter(|_| position < size)),
        _ => data(file, position, size),
    };
    // All chunks before this one are dealt with.
    let mut next = 0;
    'extents: while let Some((start, end)) = next_extent(next * CHUNK).map_err(Trouble::Read)? {
        let extent = (start / CHUNK).max(next)..end.div_ceil(CHUNK);
        known.clear(next..extent.start, &mut writer).map_err(Trouble::Link)?;
        next = extent.end;
        // Nobody tells that a part of a chunk became a hole: where one begins or ends is compared.
        let edges = [start, end].map(|edge| Some(edge / CHUNK).filter(|_| edge % CHUNK != 0 && edge < size));
        for run in runs(written.map(|parts| parts.chunks), edges, extent) {
            let (mut position, stop) = (run.start * CHUNK, size.min(run.end * CHUNK));
            while position < stop {
                let want = (stop - position).min(READ) as usize;
                let got = fill(file, &mut buffer[..want], position).map_err(Trouble::Read)?;
                // What a file that was cut meanwhile has lost of its last chunk is zeros, for the peer, too, whose copy has the size of before.
                let full = got.next_multiple_of(CHUNK as usize).min(want);
                buffer[got..full].fill(0);
                compare(&buffer[..full], position, &mut known, &mut writer).map_err(Trouble::Link)?;
                position += want as u64;
                if got < want {
                    // It was cut meanwhile; the next pass sees that.
                    next = (position - (want - got) as u64).div_ceil(CHUNK);
                    break 'extents;
                }
            }
        }
    }
    known.clear(next..u64::MAX, &mut writer).map_err(Trouble::Link)?;
    known.settle();
    Ok(Outcome { bytes: writer.bytes, touched: writer.begun })
}

/// The parts of a file without content, by offset and length, in whole pages.
pub(super) fn holes(file: &OwnedFd, size: u64) -> io::Result<Vec<(u64, u64)>> {
    const PAGE_BYTES: u64 = PAGE as u64;
    let (mut next, mut holes) = (0, Vec::new());
    while let Some((start, end)) = data(file, next, size)? {
        holes.push((next, (start - start % PAGE_BYTES).saturating_sub(next)));
        next = end.next_multiple_of(PAGE_BYTES);
    }
    holes.push((next, size.next_multiple_of(PAGE_BYTES).saturating_sub(next)));
    holes.retain(|(_, length)| *length > 0);
    Ok(holes)
}

/// The parts of a file in memory whose blocks are allocated without content (fallocate(2)), by offset and length, given how many bytes its blocks
/// have. Which holes have blocks the kernel does not show: if not all of them have, it is assumed of the first ones.
pub(super) fn preallocated(file: &OwnedFd, size: u64, blocks: u64, sent: &Sent) -> io::Result<Vec<(u64, u64)>> {
    let filled = sent.chunks.iter().flat_map(|(_, pages)| pages).filter(|page| **page != ZEROS).count();
    if blocks <= (filled * PAGE) as u64 {
        return Ok(Vec::new());
    }
    let holes = holes(file, size)?;
    let end = size.next_multiple_of(PAGE as u64);
    let content = end - holes.iter().map(|(_, length)| length).sum::<u64>();
    let mut left = blocks.saturating_sub(content);
    let mut parts = Vec::new();
    for (offset, length) in holes.into_iter().chain([(end, u64::MAX)]) {
        let length = length.min(left);
        left -= length;
        parts.push((offset, length));
    }
    parts.retain(|(_, length)| *length > 0);
    Ok(parts)
}

/// The chunks of an extent that are to be read, those in a row in one: all, or what was written and the edges.
fn runs(written: Option<&Chunks>, edges: [Option<u64>; 2], extent: Range<u64>) -> Vec<Range<u64>> {
    let Some(written) = written else { return vec![extent] };
    let edges = edges.into_iter().flatten().filter(|chunk| extent.contains(chunk));
    let mut due: Vec<u64> = written.within(extent.clone()).chain(edges).collect();
    due.sort_unstable();
    let mut runs: Vec<Range<u64>> = Vec::new();
    for chunk in due {
        match runs.last_mut() {
            Some(run) if chunk <= run.end => run.end = chunk + 1,
            _ => runs.push(chunk..chunk + 1),
        }
    }
    runs
}

/// What the peer has of a file, as it changes; what it has is asked for once for each chunk, in order.
struct Known<'a> {
    chunks: &'a mut Vec<(u64, Hashes)>,
    /// Chunks that are new, in order.
    more: Vec<(u64, Hashes)>,
    /// Some are zeros now.
    has_holes: bool,
}

impl Known<'_> {
    /// Notes what a chunk is, and returns what it was.
    fn replace(&mut self, chunk: u64, hashes: Hashes) -> Hashes {
        match self.chunks.binary_search_by_key(&chunk, |(number, _)| *number) {
            Ok(at) => {
                self.has_holes |= hashes == [ZEROS; _];
                std::mem::replace(&mut self.chunks[at].1, hashes)
            }
            Err(_) => {
                if hashes != [ZEROS; _] {
                    self.more.push((chunk, hashes));
                }
                [ZEROS; _]
            }
        }
    }

    /// These are a hole, or beyond the end.
    fn clear(&mut self, range: Range<u64>, writer: &mut Writer<'_>) -> io::Result<()> {
        let first = self.chunks.partition_point(|(chunk, _)| *chunk < range.start);
        for (chunk, hashes) in self.chunks[first..].iter_mut().take_while(|(chunk, _)| *chunk < range.end) {
            writer.zero(*chunk * CHUNK, CHUNK)?;
            *hashes = [ZEROS; _];
            self.has_holes = true;
        }
        Ok(())
    }

    fn settle(self) {
        if self.has_holes {
            self.chunks.retain(|(_, hashes)| *hashes != [ZEROS; _]);
        }
        if self.chunks.is_empty() {
            *self.chunks = self.more;
        } else if !self.more.is_empty() {
            self.chunks.extend(self.more);
            self.chunks.sort_unstable_by_key(|(chunk, _)| *chunk);
        }
    }
}

/// Deals with what was read from `position` on.
fn compare(bytes: &[u8], position: u64, known: &mut Known<'_>, writer: &mut Writer<'_>) -> io::Result<()> {
    let mut segments = Segments::default();
    for (at, piece) in bytes.chunks(CHUNK as usize).enumerate() {
        let mut is: Hashes = [ZEROS; _];
        for (hash, page) in is.iter_mut().zip(piece.chunks(PAGE)) {
            *hash = hash_of(page);
        }
        let was = known.replace(position / CHUNK + at as u64, is);
        for (n, page) in piece.chunks(PAGE).enumerate() {
            let start = at * CHUNK as usize + n * PAGE;
            match is[n] {
                same if same == was[n] => {}
                ZEROS => segments.add(Segment::Zero, start, page.len()),
                _ => segments.add(Segment::Data, start, page.len()),
            }
        }
    }
    for (segment, start, end) in segments.0 {
        match segment {
            Segment::Data => writer.data(position + start as u64, &bytes[start..end])?,
            Segment::Zero => writer.zero(position + start as u64, (end - start) as u64)?,
        }
    }
    Ok(())
}

/// A page's hash, which means something in this process only. Its seed is drawn, so that nobody can make content that is taken for
/// another; this makes do with a hash that is as fast as memory.
fn hash_of(page: &[u8]) -> u64 {
    static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    if is_zero(page) { ZEROS } else { xxh3_64_with_seed(page, *SEED).max(1) }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|b| *b == 0)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Segment {
    Data,
    Zero,
}

/// What is to be said of a buffer, neighbours of one kind in one.
#[derive(Default)]
struct Segments(Vec<(Segment, usize, usize)>);

impl Segments {
    fn add(&mut self, segment: Segment, start: usize, length: usize) {
        match self.0.last_mut() {
            Some((known, _, end)) if *known == segment && *end == start => *end += length,
            _ => self.0.push((segment, start, start + length)),
        }
    }
}

/// Says which file it is about when there is something to say.
struct Writer<'a> {
    sink: &'a mut dyn Sink,
    ino: u64,
    size: u64,
    begun: bool,
    bytes: u64,
}

impl Writer<'_> {
    fn begin(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.begun, true) {
            self.sink.op(&Op::Content { ino: self.ino, size: self.size })?;
        }
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.begin()?;
        self.bytes += bytes.len() as u64;
        self.sink.data(offset, bytes)
    }

    fn zero(&mut self, offset: u64, length: u64) -> io::Result<()> {
        // What lies beyond the end went with the new size.
        if offset >= self.size {
            return Ok(());
        }
        self.begin()?;
        self.sink.op(&Op::Zero { offset, length: length.min(self.size - offset) })
    }
}

/// The next part of a file that is not a hole, from `position` on and before `size`.
fn data(file: &OwnedFd, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if position >= size {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(position)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    match seek(file, SeekFrom::Hole(start)) {
        // It was cut just now.
        Err(Errno::NXIO) => Ok(None),
        hole => Ok(Some((start, hole?.min(size)))),
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &OwnedFd, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match pread(file, &mut buffer[got..], position + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// The peer's copy of one file.
    #[derive(Default)]
    struct Copy(Vec<u8>);

    impl Sink for Copy {
        fn op(&mut self, op: &Op) -> io::Result<()> {
            match op {
                Op::Content { size, .. } => self.0.resize(*size as usize, 0),
                Op::Zero { offset, length } => self.0[*offset as usize..(*offset + *length) as usize].fill(0),
                other => panic!("{other:?}"),
            }
            Ok(())
        }

        fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.0[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_read_and_grows_again_leaves_nothing_of_before() {
        const SIZE: u64 = 187 * PAGE as u64;
        // In the middle of a chunk, and of a page.
        for cut in [98 * PAGE as u64, 98 * PAGE as u64 + 100, 1, CHUNK] {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&vec![7; SIZE as usize], 0).unwrap();
            let descriptor = OwnedFd::from(file.try_clone().unwrap());
            let (mut sent, mut copy) = (Sent::default(), Copy::default());
            let mut pass = || {
                send(&descriptor, 1, SIZE, &mut sent, None, &mut copy).map_err(|_| "it cannot be sent").unwrap();
            };
            pass();
            file.set_len(cut).unwrap();
            // Its size was asked for before.
            pass();
            file.set_len(SIZE).unwrap();
            pass();
            let mut is = vec![1; SIZE as usize];
            file.read_exact_at(&mut is, 0).unwrap();
            let wrong = (0..is.len()).find(|at| is[*at] != copy.0[*at]);
            assert_eq!(wrong, None, "cut at {cut}");
        }
    }
}
