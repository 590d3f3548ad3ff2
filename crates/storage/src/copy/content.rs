//! A file's content, in chunks of pages that are known by their hashes.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Sink;
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

/// What came of sending a file.
pub(super) struct Outcome {
    /// What the peer has now.
    pub sent: Sent,
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

/// Sends what of a file is not as `before` says. Where it is known which chunks were written, `written`, only those are read; what
/// became a hole is seen all the same.
pub(super) fn send(
    file: &OwnedFd,
    ino: u64,
    size: u64,
    before: &Sent,
    written: Option<&BTreeSet<u64>>,
    sink: &mut dyn Sink,
) -> Result<Outcome, Trouble> {
    let mut now = Sent { size, chunks: Vec::with_capacity(before.chunks.len()) };
    let mut writer = Writer { sink, ino, size, begun: false, bytes: 0 };
    if size != before.size {
        writer.begin().map_err(Trouble::Link)?;
    }
    let mut old = before.chunks.iter().peekable();
    let mut buffer = vec![0; READ.min(size.next_multiple_of(CHUNK)) as usize];
    let mut position = 0;
    while let Some((start, end)) = data(file, position, size).map_err(Trouble::Read)? {
        position = (start / CHUNK * CHUNK).max(position);
        // Nobody tells that a part of a chunk became a hole: where one begins or ends is compared.
        let edges = [start, end].map(|edge| Some(edge / CHUNK).filter(|_| edge % CHUNK != 0 && edge < size));
        let end = end.next_multiple_of(CHUNK).min(size);
        while position < end {
            let stop = match written {
                Some(written) => {
                    let due = run(written, edges, position / CHUNK, end.div_ceil(CHUNK));
                    keep(due.start, &mut old, &mut now, &mut writer, position / CHUNK).map_err(Trouble::Link)?;
                    position = due.start * CHUNK;
                    end.min(due.end * CHUNK)
                }
                None => end,
            };
            if position >= stop {
                break;
            }
            let want = (stop - position).min(READ) as usize;
            let got = fill(file, &mut buffer[..want], position).map_err(Trouble::Read)?;
            compare(&buffer[..got], position, &mut old, &mut now, &mut writer).map_err(Trouble::Link)?;
            // Where less came it was cut meanwhile; the next pass sees that.
            position = if got < want { size } else { position + want as u64 };
        }
    }
    old.try_for_each(|(chunk, _)| writer.zero(*chunk * CHUNK, CHUNK)).map_err(Trouble::Link)?;
    let (bytes, touched) = (writer.bytes, writer.begun);
    Ok(Outcome { sent: now, bytes, touched })
}

/// The first chunks in a row, of those from `from` to before `end`, that were written or are edges.
fn run(written: &BTreeSet<u64>, edges: [Option<u64>; 2], from: u64, end: u64) -> std::ops::Range<u64> {
    let edges = edges.into_iter().flatten();
    let is_due = |chunk: &u64| written.contains(chunk) || edges.clone().any(|edge| edge == *chunk);
    let first = written.range(from..end).next().copied().into_iter().chain(edges.clone());
    let first = first.filter(|chunk| (from..end).contains(chunk)).min().unwrap_or(end);
    first..(first + 1..end).find(|chunk| !is_due(chunk)).unwrap_or(end)
}

/// Leaves the chunks from `from` to before `end` as they are, and before those clears what is a hole now.
fn keep<'a>(
    end: u64,
    old: &mut std::iter::Peekable<impl Iterator<Item = &'a (u64, Hashes)>>,
    now: &mut Sent,
    writer: &mut Writer<'_>,
    from: u64,
) -> io::Result<()> {
    while let Some((chunk, hash)) = old.next_if(|(chunk, _)| *chunk < end) {
        match *chunk < from {
            true => writer.zero(chunk * CHUNK, CHUNK)?,
            false => now.chunks.push((*chunk, *hash)),
        }
    }
    Ok(())
}

/// Deals with what was read from `position` on.
fn compare<'a>(
    bytes: &[u8],
    position: u64,
    old: &mut std::iter::Peekable<impl Iterator<Item = &'a (u64, Hashes)>>,
    now: &mut Sent,
    writer: &mut Writer<'_>,
) -> io::Result<()> {
    let mut segments = Segments::default();
    for (at, piece) in bytes.chunks(CHUNK as usize).enumerate() {
        let chunk = position / CHUNK + at as u64;
        // What was sent for chunks that are a hole now.
        while let Some((earlier, _)) = old.next_if(|(n, _)| *n < chunk) {
            writer.zero(*earlier * CHUNK, CHUNK)?;
        }
        let was = old.next_if(|(n, _)| *n == chunk).map_or([ZEROS; _], |(_, hashes)| *hashes);
        let mut is: Hashes = [ZEROS; _];
        for (n, page) in piece.chunks(PAGE).enumerate() {
            is[n] = hash_of(page);
            let start = at * CHUNK as usize + n * PAGE;
            match is[n] {
                same if same == was[n] => {}
                ZEROS => segments.add(Segment::Zero, start, page.len()),
                _ => segments.add(Segment::Data, start, page.len()),
            }
        }
        if is != [ZEROS; _] {
            now.chunks.push((chunk, is));
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
