//! The source's side: finds the objects, and sends what has changed of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{Whence, lseek};
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange, SharedKind, SharedObject};
use tranship_wire::WriteError;
use xxhash_rust::xxh3::xxh3_64;

use crate::index::PageSet;
use crate::maps::Mapping;
use crate::send::{CHUNK, Counters, SendError, Stream};
use crate::shared::watch::{View, Watches};

/// Pages in a chunk.
const CHUNK_PAGES: usize = (CHUNK / PAGE_SIZE) as usize;
/// Objects whose length is not a number of whole pages and less than this are left to criu, which also carries what lies
/// behind their end in the last page.
const SMALL: u64 = 1 << 20;

/// Objects of which less than this part holds data are not watched if they are larger than [`LARGE`]: the watch takes memory
/// for page tables, 1/512 of what is watched, and there is little to compare.
const SPARSE: u64 = 8;
/// See [`SPARSE`].
const LARGE: u64 = 1 << 30;

/// Shared memory that cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// A process cannot be looked at.
    #[error("the shared memory of process {pid} cannot be found: {source}")]
    Find {
        /// Pid on this node.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// An object cannot be looked at.
    #[error("shared memory {name:?} cannot be read: {source}")]
    Read {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// Where objects are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In mappings and among the open descriptors.
    Everywhere,
    /// In mappings only; what was found by its descriptor before is taken to be there still. Many descriptors take long to
    /// look at, too long for the freeze.
    Mappings,
}

/// Whether the last look at the container is followed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The container runs: what is written from now on shall be found by the next look.
    Round,
    /// It is frozen.
    Last,
}

/// Pages of an object that may have changed since they were sent.
#[derive(Debug, Clone)]
enum Changed {
    Any,
    These(PageSet),
}

/// In the place of the hash of a page of which nobody knows what it is on the destination.
const UNKNOWN: u64 = u64::MAX;

/// Hashes of the pages of one chunk as they were last sent; 0 is a page of zeros, which was perhaps never sent.
type Hashes = Box<[u64; CHUNK_PAGES]>;

#[derive(Debug)]
struct Object {
    described: SharedObject,
    /// Our own descriptor, open for reading only.
    file: File,
    /// Some task may run code in it. CRIU borrows executable memory for a moment while it dumps, so that it must be read
    /// before that begins.
    executable: bool,
    mapped: bool,
    open: bool,
    /// Where it is mapped so that it can be written.
    views: Vec<View>,
    /// The addresses of the views at the last look: by process, and by where its first byte would be.
    looked: HashMap<(u32, u64), PageSet>,
    /// There was a last look.
    is_watched: bool,
    changed: Changed,
    /// Its length has changed since the last look, which may have found pages behind the end that was known then.
    resized: bool,
    /// By number of the chunk; what is not listed is zeros.
    sent: Mutex<BTreeMap<u64, Hashes>>,
}

impl Object {
    fn failed(&self, source: impl Into<io::Error>) -> SharedError {
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
            all.entry((view.pid, view.range.start.wrapping_sub(view.offset))).or_default().insert(view.range);
        }
        all
    }

    /// Whether something may have been written to it that no page table tells of.
    fn is_doubtful(&self, unsure: &HashSet<u32>, viewed: &HashMap<(u32, u64), PageSet>) -> bool {
        let vanished = |(key, before): (&(u32, u64), &PageSet)| {
            let mut before = before.clone();
            let now = viewed.get(key).map(|now| now.within(PageRange::EVERYTHING)).unwrap_or_default();
            now.into_iter().for_each(|range| drop(before.remove(range)));
            !before.is_empty()
        };
        !self.is_watched || self.looked.keys().any(|(pid, _)| unsure.contains(pid)) || self.looked.iter().any(vanished)
    }

    /// Finds out which pages may have changed since the last look, and has the next one find out the same.
    fn look(&mut self, watches: &Watches, unsure: &HashSet<u32>, look: Look) {
        let (viewed, worth) = (self.viewed(), self.is_worth_watching());
        let mut doubtful = !worth || self.is_doubtful(unsure, &viewed);
        let mut changed = PageSet::default();
        let mut written: HashMap<u32, Vec<PageRange>> = HashMap::new();
        for view in &self.views {
            let list = written.entry(view.pid).or_default();
            let known = !doubtful
                && watches.written(view, |start, end| {
                    list.push(PageRange { start, end });
                    changed.insert(view.inside(start, end));
                });
            doubtful |= !known;
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
            written.iter().for_each(|(pid, ranges)| watches.arm(*pid, ranges));
        }
        (self.looked, self.is_watched) = (viewed, worth);
        self.changed =
            if std::mem::take(&mut self.resized) || doubtful { Changed::Any } else { Changed::These(changed) };
    }

    /// Whether the page tables can tell: whoever has it open, or may attach it, may map it for a moment.
    fn is_worth_watching(&self) -> bool {
        let (size, segment) = (self.described.size, self.described.kind == SharedKind::Segment);
        let data = self.file.metadata().map_or(0, |found| found.blocks() * 512);
        !self.open && !segment && (size <= LARGE || data >= size / SPARSE)
    }

    /// The runs of pages to be compared with what was sent, each within one chunk.
    fn pieces(&self) -> io::Result<Vec<PageRange>> {
        // Of an object that has grown meanwhile, the destination would drop what is behind the end that it knows.
        let end = self.described.size.next_multiple_of(PAGE_SIZE);
        match &self.changed {
            Changed::Any => {
                let chunk = |number: u64| PageRange::new(number * CHUNK, end.min((number + 1) * CHUNK));
                Ok(self.chunks()?.into_iter().filter_map(chunk).collect())
            }
            Changed::These(pages) => {
                Ok(pages.within(PageRange { start: 0, end }).into_iter().flat_map(|run| run.cut(CHUNK)).collect())
            }
        }
    }

    fn sent(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Hashes>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The destination cuts its file off at this length, but pages from before may still be on their way to it: so what was
    /// sent from there on counts for nothing, should the object grow again.
    fn forget_behind(&self, size: u64) {
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
fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
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
struct Piece<'a> {
    object: &'a Object,
    range: PageRange,
}

impl Piece<'_> {
    /// Which of `streams` carries it. Newer versions of a page must not overtake older ones, so it depends on nothing but
    /// where the page is.
    fn route(&self, streams: usize) -> usize {
        (self.range.start / CHUNK + u64::from(self.object.described.space.0)) as usize % streams
    }
}

/// The shared memory of a container that is to be moved.
#[derive(Debug)]
pub struct SharedMemory {
    /// Of the kernel's own tmpfs, in which all such objects are.
    device: u64,
    /// By inode.
    objects: BTreeMap<u64, Object>,
    next: u32,
    /// `None`: nothing can be watched.
    watches: Option<Watches>,
}

impl SharedMemory {
    /// Nothing found yet.
    pub fn new() -> io::Result<Self> {
        let probe = File::from(memfd_create(c"tranship-probe", MFdFlags::MFD_CLOEXEC)?);
        Ok(Self { device: probe.metadata()?.dev(), objects: BTreeMap::new(), next: 0, watches: Watches::new()? })
    }

    /// Looks for the objects of the processes with these pids on this node. Returns those that the destination must be told
    /// of: new ones, and those whose length has changed.
    pub fn find(&mut self, pids: &[u32], places: Where) -> Result<Vec<SharedObject>, SharedError> {
        for object in self.objects.values_mut() {
            (object.mapped, object.executable) = (false, false);
            object.views.clear();
            object.open &= places == Where::Mappings;
        }
        let mut known: HashSet<AddressSpaceId> = self.objects.values().map(|o| o.described.space).collect();
        let mut programs = HashSet::new();
        for &pid in pids {
            if let Ok(program) = std::fs::metadata(format!("/proc/{pid}/exe"))
                && program.dev() == self.device
            {
                programs.insert(program.ino());
            }
            let looked = self.find_mapped(pid).and_then(|()| match places {
                Where::Everywhere => self.find_open(pid),
                Where::Mappings => Ok(()),
            });
            // A process may end at any time.
            if let Err(source) = looked
                && std::fs::read(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty())
            {
                return Err(SharedError::Find { pid, source });
            }
        }
        // A program that runs from a memfd cannot be written to; criu knows how to make one.
        self.objects.retain(|inode, object| (object.mapped || object.open) && !programs.contains(inode));
        let mut described = Vec::new();
        for object in self.objects.values_mut() {
            let size = object.file.metadata().map_err(|e| object.failed(e))?.len();
            if known.insert(object.described.space) || size != object.described.size {
                object.described.size = size;
                object.resized = true;
                object.forget_behind(size);
                described.push(object.described.clone());
            }
        }
        Ok(described)
    }

    fn find_mapped(&mut self, pid: u32) -> io::Result<()> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        for mapping in maps.lines().filter_map(Mapping::parse) {
            if mapping.device != self.device || mapping.inode == 0 {
                continue;
            }
            let PageRange { start, end } = mapping.range;
            let path = PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}"));
            match self.meet(mapping.inode, &path) {
                Ok(Some(object)) => {
                    object.mapped = true;
                    if !mapping.private {
                        object.views.push(View { pid, range: mapping.range, offset: mapping.offset });
                    }
                    object.executable |= mapping.executable;
                }
                Ok(None) => {}
                // Unmapped just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn find_open(&mut self, pid: u32) -> io::Result<()> {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            let path = entry.path();
            let Ok(link) = std::fs::read_link(&path) else { continue };
            if !["/memfd:", "/dev/zero (deleted)", "/SYSV"]
                .iter()
                .any(|p| link.as_os_str().as_encoded_bytes().starts_with(p.as_bytes()))
            {
                continue;
            }
            let Ok(found) = std::fs::metadata(&path) else { continue };
            if found.dev() != self.device {
                continue;
            }
            match self.meet(found.ino(), &path) {
                Ok(Some(object)) => object.open = true,
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The object with this inode, opened through `path` if it is new. `None`: it is left to criu.
    fn meet(&mut self, inode: u64, path: &Path) -> io::Result<Option<&mut Object>> {
        use std::collections::btree_map::Entry;
        match self.objects.entry(inode) {
            Entry::Occupied(entry) => Ok(Some(entry.into_mut())),
            Entry::Vacant(entry) => {
                let (Ok(key), Some(space)) = (u32::try_from(inode), AddressSpaceId::object(self.next)) else {
                    return Ok(None);
                };
                let link = std::fs::read_link(path)?;
                let Some(link) = link.to_str() else { return Ok(None) };
                let link = link.strip_suffix(" (deleted)").unwrap_or(link);
                let file = File::open(path)?;
                let found = file.metadata()?;
                let small = !found.len().is_multiple_of(PAGE_SIZE) && found.len() < SMALL;
                if found.dev() != self.device || found.ino() != inode || small {
                    return Ok(None);
                }
                let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
                let described = SharedObject {
                    space,
                    key,
                    kind: if link.starts_with("/SYSV") { SharedKind::Segment } else { SharedKind::File },
                    name: link.strip_prefix("/memfd:").unwrap_or(link).to_owned(),
                    size: found.len(),
                    sealable: seals != SealFlag::F_SEAL_SEAL,
                };
                self.next += 1;
                let sent = Mutex::default();
                let object = Object {
                    described,
                    file,
                    executable: false,
                    mapped: false,
                    open: false,
                    views: Vec::new(),
                    looked: HashMap::new(),
                    is_watched: false,
                    changed: Changed::Any,
                    resized: false,
                    sent,
                };
                Ok(Some(entry.insert(object)))
            }
        }
    }

    /// Finds out which pages may have changed since the last look, of what [`Self::find`] has just found. To be followed by
    /// [`Self::send`].
    pub fn look(&mut self, look: Look) {
        let Some(watches) = &self.watches else { return };
        let unsure = watches.take_unsure();
        self.objects.values_mut().for_each(|object| object.look(watches, &unsure, look));
        let pids = self.objects.values().flat_map(|object| object.views.iter().map(|view| view.pid)).collect();
        watches.keep(&pids);
    }

    /// How many objects there are.
    pub fn count(&self) -> usize {
        self.objects.len()
    }

    /// The objects that criu must see empty: device and inode.
    pub fn hidden(&self) -> Vec<(u64, u64)> {
        self.objects.keys().map(|inode| (self.device, *inode)).collect()
    }

    /// Sends what has changed of the objects in which code may run, which must be done before criu is let go.
    pub fn send_executable<W: Write + Send>(
        &self,
        streams: &mut [Stream<W>],
        counters: &Counters,
    ) -> Result<(), SendError> {
        self.send_those(|object| object.executable, streams, counters)
    }

    /// Sends what has changed of all objects since they were last sent, over all the streams at once. What `counters` is
    /// told as read was compared; what it is told as sent had changed.
    pub fn send<W: Write + Send>(&self, streams: &mut [Stream<W>], counters: &Counters) -> Result<(), SendError> {
        self.send_those(|_| true, streams, counters)
    }

    fn send_those<W: Write + Send>(
        &self,
        which: impl Fn(&Object) -> bool,
        streams: &mut [Stream<W>],
        counters: &Counters,
    ) -> Result<(), SendError> {
        let mut pieces = Vec::new();
        for object in self.objects.values().filter(|o| which(o)) {
            let ranges = object.pieces().map_err(|e| object.failed(e))?;
            pieces.extend(ranges.into_iter().map(|range| Piece { object, range }));
        }
        let (broken, count) = (AtomicBool::new(false), streams.len());
        std::thread::scope(|scope| {
            let (pieces, broken) = (&pieces, &broken);
            let workers: Vec<_> = streams
                .iter_mut()
                .enumerate()
                .map(|(number, stream)| {
                    scope.spawn(move || -> Result<(), SendError> {
                        for piece in pieces.iter().filter(|p| p.route(count) == number) {
                            if broken.load(Ordering::Relaxed) {
                                break;
                            }
                            send_piece(piece, stream, counters)
                                .inspect_err(|_| broken.store(true, Ordering::Relaxed))?;
                        }
                        stream.link().flush().map_err(WriteError::from)?;
                        Ok(())
                    })
                })
                .collect();
            workers.into_iter().try_for_each(|w| w.join().expect("a sender does not panic"))
        })
    }
}

/// 0 for a page of zeros, something else but `UNKNOWN` for any other.
fn hash(page: &[u8]) -> u64 {
    if page.iter().fold(0, |all, byte| all | byte) == 0 { 0 } else { xxh3_64(page).clamp(1, UNKNOWN - 1) }
}

/// Sends the pages of a piece that are not as they were last sent.
fn send_piece<W: Write>(piece: &Piece<'_>, stream: &mut Stream<W>, counters: &Counters) -> Result<(), SendError> {
    let Piece { object, range } = *piece;
    let (outlet, buffer) = stream.parts();
    let pages = &mut buffer[..range.len() as usize];
    object.read(range, pages).map_err(|e| object.failed(e))?;
    counters.read.fetch_add(range.len(), Ordering::Relaxed);
    let chunk = range.start / CHUNK;
    // Nobody else looks at this chunk: all of it goes over this stream.
    let mut hashes = object.sent().remove(&chunk).unwrap_or_else(|| Box::new([0; CHUNK_PAGES]));
    let known = &mut hashes[(range.start % CHUNK / PAGE_SIZE) as usize..][..range.pages() as usize];
    let size = PAGE_SIZE as usize;
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
