//! One object as the source sees it: which of its pages may have changed, and which of these have.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use nix::unistd::{Whence, lseek};
use tranship_types::{PAGE_SIZE, PageRange, SharedKind, SharedObject};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::source::{Look, SharedError};
use super::uses::Uses;
use super::watch::{Doubt, Seen, View, Watches};
use crate::page_set::PageSet;
use crate::send::{CHUNK, Counters, SendError, Stream};

/// Pages in a chunk.
const CHUNK_PAGES: usize = (CHUNK / PAGE_SIZE) as usize;

/// Objects of which less than this part holds data are not watched if they are larger than [`LARGE`]: the watch takes memory
/// for page tables, 1/512 of what is watched, and there is little to compare.
const SPARSE: u64 = 8;
/// See [`SPARSE`].
const LARGE: u64 = 1 << 30;

/// Pages of an object that may have changed since they were sent.
#[derive(Debug, Clone)]
enum Changed {
    Any,
    These(PageSet),
}

/// In the place of the hash of a page of which nobody knows what it is on the destination.
const UNKNOWN: u64 = u64::MAX;
/// Of the pages' hashes: known to nobody outside, so that no program can write pages that are taken for others.
static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));

/// Hashes of the pages of one chunk as they were last sent; 0 is a page of zeros, which was perhaps never sent.
type Hashes = Box<[u64; CHUNK_PAGES]>;

#[derive(Debug)]
pub(super) struct Object {
    pub described: SharedObject,
    /// Of the file system that it is on.
    pub device: u64,
    /// Our own descriptor, open for reading only.
    pub file: File,
    /// Some task may run code in it. CRIU borrows executable memory for a moment while it dumps, so that it must be read
    /// before that begins.
    pub executable: bool,
    pub mapped: bool,
    pub open: bool,
    /// A segment that processes of other containers have attached, whose page tables are not watched.
    pub of_others: bool,
    /// Where it is mapped so that it can be written.
    pub views: Vec<View>,
    /// The addresses of the views at the last look: by process, and by where its first byte would be.
    looked: HashMap<(u32, u64), PageSet>,
    /// There was a last look, which found every view registered. One that was registered only then may have been changed, or forked,
    /// between the moment when it was listed and that.
    is_watched: bool,
    /// How it had been used at the last look, watched since the mappings were listed for that.
    used: Option<Uses>,
    changed: Changed,
    /// Its length has changed since the last look, which may have found pages behind the end that was known then.
    pub resized: bool,
    /// Pages that were sent and are there no more, of [`SharedKind::Pages`].
    gone: PageSet,
    /// What cannot be read has been unmapped just now, and is looked at again; of [`SharedKind::Pages`].
    may_vanish: bool,
    /// What was to be sent and could not be read.
    missed: Mutex<PageSet>,
    /// By number of the chunk; what is not listed is zeros.
    sent: Mutex<BTreeMap<u64, Hashes>>,
}

impl Object {
    /// One that nothing is known of yet. `device`: of the file system that it is on; 0: of none.
    pub fn new(described: SharedObject, device: u64, file: File) -> Self {
        Self {
            described,
            device,
            file,
            executable: false,
            mapped: false,
            open: false,
            of_others: false,
            views: Vec::new(),
            looked: HashMap::new(),
            is_watched: false,
            used: None,
            changed: Changed::Any,
            resized: false,
            gone: PageSet::default(),
            may_vanish: false,
            missed: Mutex::default(),
            sent: Mutex::default(),
        }
    }

    /// Whether some task of the container was found to have it.
    pub fn is_there(&self) -> bool {
        self.mapped || self.open
    }

    pub fn failed(&self, source: impl Into<io::Error>) -> SharedError {
        SharedError::Read { name: self.described.name.clone(), source: source.into() }
    }

    /// The chunks that hold data or did when they were sent.
    fn chunks(&self) -> io::Result<BTreeSet<u64>> {
        let mut chunks: BTreeSet<u64> = self.sent().keys().copied().collect();
        let mut at = 0;
        while let Some((start, end)) = next_data(&self.file, at)? {
            chunks.extend(start / CHUNK..end.div_ceil(CHUNK));
            at = end;
        }
        Ok(chunks)
    }

    /// The views as [`Self::looked`] has them.
    fn viewed(&self) -> HashMap<(u32, u64), PageSet> {
        let mut all: HashMap<(u32, u64), PageSet> = HashMap::new();
        for view in &self.views {
            all.entry((view.pid, view.base())).or_default().insert(view.range);
        }
        all
    }

    /// Whether something may have been written to it that no page table tells of.
    fn is_doubtful(&self, doubts: &HashMap<u32, Doubt>, viewed: &HashMap<(u32, u64), PageSet>) -> bool {
        let size = self.described.size.next_multiple_of(PAGE_SIZE);
        let concerned = |(pid, base): &(u32, u64)| doubts.get(pid).is_some_and(|doubt| doubt.concerns(*base, size));
        let vanished = |(key, before): (&(u32, u64), &PageSet)| {
            let mut before = before.clone();
            viewed.get(key).into_iter().for_each(|now| before.remove_all(now));
            !before.is_empty()
        };
        !self.is_watched || self.looked.keys().any(concerned) || self.looked.iter().any(vanished)
    }

    /// Finds out which pages may have changed since the last look, and has the next one find out the same. `pids`: the processes that
    /// may have it. `uses`: how it has been used until now, if that is known, watched since its mappings were listed.
    pub fn look(
        &mut self,
        watches: &Watches,
        pids: &[u32],
        doubts: &HashMap<u32, Doubt>,
        uses: Option<Uses>,
        look: Look,
    ) {
        let unused = |(now, before): (Uses, Uses)| match self.is_within_reach() {
            true => now.none_since(&before),
            false => now.not_mapped_since(&before),
        };
        let used = !uses.zip(self.used).is_some_and(unused);
        self.used = uses;
        let (viewed, worth) = (self.viewed(), self.is_worth_watching());
        let mut doubtful = used || !worth || self.of_others || self.is_doubtful(doubts, &viewed);
        let mut changed = PageSet::default();
        let mut written: HashMap<u32, Vec<PageRange>> = HashMap::new();
        let mut new: HashMap<u32, Vec<View>> = HashMap::new();
        for view in &self.views {
            if doubtful && look == Look::Last {
                break;
            }
            let list = written.entry(view.pid).or_default();
            let seen = watches.written(view, !doubtful, |start, end| {
                list.push(PageRange { start, end });
                changed.insert(view.inside(start, end));
            });
            if seen == Seen::Unwatched {
                new.entry(view.pid).or_default().push(*view);
            }
            doubtful |= seen != Seen::Written;
        }
        if look == Look::Round && worth {
            if doubtful {
                let all = PageRange { start: 0, end: self.described.size.next_multiple_of(PAGE_SIZE) };
                written.clear();
                for view in &self.views {
                    written.entry(view.pid).or_default().extend(view.addresses(all));
                }
            }
            // Before the pages are read, so that what is written later is found by the next look.
            new.iter().for_each(|(pid, views)| watches.register(*pid, pids, views));
            written.iter().for_each(|(pid, ranges)| watches.arm(*pid, ranges));
        }
        (self.looked, self.is_watched) = (viewed, worth && new.is_empty());
        self.changed =
            if std::mem::take(&mut self.resized) || doubtful { Changed::Any } else { Changed::These(changed) };
    }

    /// The pages that were sent and are not known to be gone; of [`SharedKind::Pages`].
    pub fn brought(&self) -> PageSet {
        let mut brought = PageSet::default();
        for (chunk, hashes) in self.sent().iter() {
            for number in (0..CHUNK_PAGES).filter(|number| hashes[*number] != 0) {
                let start = chunk * CHUNK + number as u64 * PAGE_SIZE;
                brought.insert(PageRange { start, end: start + PAGE_SIZE });
            }
        }
        brought
    }

    /// For [`SharedKind::Pages`]: the pages that are there, those of them that may have changed, and those that were brought.
    pub fn holds(&mut self, there: &PageSet, mut changed: PageSet, mut brought: PageSet, look: Look) {
        for missed in std::mem::take(self.missed.get_mut().unwrap_or_else(PoisonError::into_inner)).all() {
            there.within(missed).into_iter().for_each(|run| changed.insert(run));
        }
        brought.remove_all(there);
        (self.gone, self.changed, self.may_vanish) = (brought, Changed::These(changed), look == Look::Round);
    }

    /// Whether it can be used without any of its mappings: through a descriptor, or by who attaches it.
    pub fn is_within_reach(&self) -> bool {
        self.open || self.described.kind == SharedKind::Segment
    }

    /// Whether a watch takes little memory for what it can spare.
    fn is_worth_watching(&self) -> bool {
        // Of huge pages the page tables are small.
        if self.described.huge_page > 0 {
            return true;
        }
        let size = self.described.size;
        let data = self.file.metadata().map_or(0, |found| found.blocks() * 512);
        size <= LARGE || data >= size / SPARSE
    }

    /// The runs of pages to be compared with what was sent.
    pub fn pieces(&self) -> io::Result<Vec<Piece<'_>>> {
        // Of an object that has grown meanwhile, the destination would drop what is behind the end that it knows.
        let end = self.described.size.next_multiple_of(PAGE_SIZE);
        let mut pieces = Vec::new();
        let mut add =
            |run: PageRange, gone| pieces.extend(run.cut(CHUNK).map(|range| Piece { object: self, range, gone }));
        match &self.changed {
            Changed::Any => {
                let chunk = |number: u64| PageRange::new(number * CHUNK, end.min((number + 1) * CHUNK));
                self.chunks()?.into_iter().filter_map(chunk).for_each(|run| add(run, false));
            }
            Changed::These(pages) => {
                pages.within(PageRange { start: 0, end }).into_iter().for_each(|run| add(run, false));
            }
        }
        self.gone.all().into_iter().for_each(|run| add(run, true));
        Ok(pieces)
    }

    /// 0 for a page of zeros (where that is what is not sent), something else but `UNKNOWN` for any other.
    fn hash(&self, page: &[u8]) -> u64 {
        let zeros = self.described.kind != SharedKind::Pages && page.iter().fold(0, |all, byte| all | byte) == 0;
        if zeros { 0 } else { xxh3_64_with_seed(page, *SEED).clamp(1, UNKNOWN - 1) }
    }

    fn sent(&self) -> MutexGuard<'_, BTreeMap<u64, Hashes>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The destination cuts its file off at this length, but pages from before may still be on their way to it: so what was
    /// sent from there on counts for nothing, should the object grow again.
    pub fn forget_behind(&self, size: u64) {
        for (chunk, hashes) in self.sent().iter_mut() {
            let first = (size.saturating_sub(chunk * CHUNK) / PAGE_SIZE) as usize;
            hashes.iter_mut().skip(first).filter(|hash| **hash != 0).for_each(|hash| *hash = UNKNOWN);
        }
    }

    /// Reads pages; what lies behind the end is zeros.
    fn read(&self, range: PageRange, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.file.read_at(&mut into[done..], range.start + done as u64) {
                Ok(0) => {
                    into[done..].fill(0);
                    return Ok(());
                }
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The first run of data at or after `at`.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let seek = |offset: u64, whence| lseek(file.as_fd(), offset.cast_signed(), whence).map(i64::cast_unsigned);
    let start = match seek(at, Whence::SeekData) {
        Err(nix::errno::Errno::ENXIO) => return Ok(None),
        start => start?,
    };
    match seek(start, Whence::SeekHole) {
        // It was cut off there just now.
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        end => Ok(Some((start, end?))),
    }
}

/// A run of pages within one chunk of one object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    object: &'a Object,
    range: PageRange,
    /// Its pages are there no more.
    gone: bool,
}

impl Piece<'_> {
    /// Which of `streams` carries it. Newer versions of a page must not overtake older ones, so it depends on nothing but
    /// where the page is.
    pub fn route(&self, streams: usize) -> usize {
        (self.range.start / CHUNK + u64::from(self.object.described.space.0)) as usize % streams
    }
}

/// Sends the pages of a piece that are not as they were last sent.
pub(super) fn send_piece<W: Write>(
    piece: &Piece<'_>,
    stream: &mut Stream<W>,
    counters: &Counters,
) -> Result<(), SendError> {
    let Piece { object, range, gone } = *piece;
    let (outlet, buffer) = stream.parts();
    let pages = &mut buffer[..range.len() as usize];
    if !gone {
        match object.read(range, pages) {
            Err(_) if object.may_vanish => {
                object.missed.lock().unwrap_or_else(PoisonError::into_inner).insert(range);
                return Ok(());
            }
            read => read.map_err(|e| object.failed(e))?,
        }
        counters.read.fetch_add(range.len(), Ordering::Relaxed);
    }
    let chunk = range.start / CHUNK;
    // Nobody else looks at this chunk: all of it goes over this stream.
    let mut hashes = object.sent().remove(&chunk).unwrap_or_else(|| Box::new([0; CHUNK_PAGES]));
    let known = &mut hashes[(range.start % CHUNK / PAGE_SIZE) as usize..][..range.pages() as usize];
    let size = PAGE_SIZE as usize;
    let hash = |page: &[u8]| if gone { 0 } else { object.hash(page) };
    let fresh: Vec<u64> = pages.chunks_exact(size).map(hash).collect();
    let mut at = 0;
    while at < fresh.len() {
        let differs = |i: &usize| fresh[*i] != known[*i] && (fresh[*i] == 0) == (fresh[at] == 0);
        let end = (at..fresh.len()).find(|i| !differs(i)).unwrap_or(fresh.len());
        if end == at {
            at += 1;
            continue;
        }
        let (space, address) = (object.described.space, range.start + (at * size) as u64);
        if fresh[at] == 0 {
            outlet.zero(space, PageRange { start: address, end: range.start + (end * size) as u64 })?;
        } else {
            outlet.pages(space, address, &pages[at * size..end * size], counters)?;
        }
        known[at..end].copy_from_slice(&fresh[at..end]);
        at = end;
    }
    if hashes.iter().any(|h| *h != 0) {
        object.sent().insert(chunk, hashes);
    }
    Ok(())
}
