//! The source's side: finds the objects, and sends what has changed of them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use tranship_sys::process;
use tranship_sys::threads::{self, Beside};
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange, SharedKind, SharedObject};
use tranship_wire::WriteError;

use super::copies::{Copies, Watching};
use super::object::{Object, send_piece};
use super::uses::{Moment, Uses};
use super::watch::{View, Watches};
use crate::hugetlb;
use crate::maps::Mapping;
use crate::send::{Counters, SendError, Stream};
use crate::survey::survey;

/// Objects whose length is not a number of whole pages and less than this are left to criu, which also carries what lies
/// behind their end in the last page.
const SMALL: u64 = 1 << 20;

/// What the kernel calls anonymous memory in huge pages.
const ANONYMOUS_HUGE: &str = "/anon_hugepage";

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

/// Whose segments are looked for: an IPC namespace may be shared by containers that move together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Segments {
    /// Those that the container's own processes have attached.
    #[default]
    Own,
    /// Those that processes of the other containers have attached, too, which have these pids on this node.
    OfAll(Vec<u32>),
    /// None: another container's move brings all, of which these are there.
    BroughtByAnother(Vec<u64>),
}

/// Whether the last look at the container is followed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The container runs: what is written from now on shall be found by the next look.
    Round,
    /// It is frozen.
    Last,
}

/// What kind of object a mapping with this name is of, in the kernel's own tmpfs.
fn kind(name: &str) -> SharedKind {
    if name.starts_with("/SYSV") { SharedKind::Segment } else { SharedKind::File }
}

/// The shared memory of a container that is to be moved.
#[derive(Debug)]
pub struct SharedMemory {
    /// Of the kernel's own tmpfs, in which all such objects are but those in huge pages.
    device: u64,
    /// The destination can make objects in huge pages.
    huge: bool,
    /// By inode.
    objects: BTreeMap<u64, Object>,
    /// What is left to criu, by inode.
    left: HashMap<u64, SharedKind>,
    /// Those whose number one of another kind has got since.
    replaced: Vec<SharedObject>,
    /// By process.
    copies: BTreeMap<AddressSpaceId, Copies>,
    segments: Segments,
    next: u32,
    /// When the mappings were listed.
    listed: Option<Moment>,
    /// Of which processes.
    pids: Vec<u32>,
    /// `None`: nothing can be watched.
    watches: Option<Watches>,
}

impl SharedMemory {
    /// Nothing found yet. `huge`: the destination can make objects in reserved huge pages, which are left to criu else.
    pub fn new(huge: bool) -> io::Result<Self> {
        let probe = File::from(memfd_create(c"tranship-probe", MFdFlags::MFD_CLOEXEC)?);
        Ok(Self {
            device: probe.metadata()?.dev(),
            huge,
            objects: BTreeMap::new(),
            left: HashMap::new(),
            replaced: Vec::new(),
            copies: BTreeMap::new(),
            segments: Segments::Own,
            next: 0,
            listed: None,
            pids: Vec::new(),
            watches: Watches::new()?,
        })
    }

    /// From now on these segments are looked for.
    pub fn take_segments(&mut self, segments: Segments) {
        self.segments = segments;
    }

    /// A file in memory that has the number of one of these segments. Criu knows both by their numbers.
    pub fn has_number_of(&self, segments: &[u64]) -> Option<u64> {
        let files = self.objects.iter().filter(|(_, object)| object.described.kind == SharedKind::File);
        let left = self.left.iter().filter(|(_, kind)| **kind == SharedKind::File).map(|(inode, _)| *inode);
        files.map(|(inode, _)| *inode).chain(left).find(|inode| segments.contains(inode))
    }

    /// Looks for the objects of the processes with these pids on this node. Returns those that the destination must be told
    /// of: new ones, those whose length has changed, and those that are gone, as ones of no length.
    pub fn find(&mut self, pids: &[u32], places: Where) -> Result<Vec<SharedObject>, SharedError> {
        (self.listed, self.pids) = (Moment::now().ok(), pids.to_vec());
        for object in self.objects.values_mut() {
            (object.mapped, object.executable, object.of_others) = (false, false, false);
            object.views.clear();
            object.open &= places == Where::Mappings;
        }
        self.left.retain(|_, kind| places == Where::Mappings && *kind == SharedKind::File);
        self.copies.values_mut().for_each(|copies| copies.object.mapped = false);
        let mut known: HashSet<AddressSpaceId> = self.all().map(|o| o.described.space).collect();
        let mut programs = HashSet::new();
        for &pid in pids {
            if let Ok(program) = std::fs::metadata(format!("/proc/{pid}/exe"))
                && program.dev() == self.device
            {
                programs.insert(program.ino());
            }
            let looked = self.find_mapped(pid).and_then(|()| self.find_copies(pid)).and_then(|()| match places {
                Where::Everywhere => self.find_open(pid),
                Where::Mappings => Ok(()),
            });
            // A process may end at any time.
            if let Err(source) = looked
                && process::mappings(pid).is_ok_and(|mut maps| maps.next().is_some())
            {
                return Err(SharedError::Find { pid, source });
            }
        }
        if let Segments::OfAll(others) = self.segments.clone() {
            for pid in others {
                if let Err(source) = self.find_segments(pid)
                    && process::mappings(pid).is_ok_and(|mut maps| maps.next().is_some())
                {
                    return Err(SharedError::Find { pid, source });
                }
            }
        }
        let mut described: Vec<_> = self.replaced.drain(..).map(|gone| SharedObject { size: 0, ..gone }).collect();
        self.objects.retain(|inode, object| {
            // A program that runs from a memfd cannot be written to; criu knows how to make one.
            let stays = object.is_there() && !programs.contains(inode);
            if !stays && known.contains(&object.described.space) {
                // What has its number at the end, and is criu's, must not get what was sent of this one.
                described.push(SharedObject { size: 0, ..object.described.clone() });
            }
            stays
        });
        self.copies.retain(|_, copies| {
            if !copies.object.mapped && known.contains(&copies.object.described.space) {
                described.push(SharedObject { size: 0, ..copies.object.described.clone() });
            }
            copies.object.mapped
        });
        for Copies { object, .. } in self.copies.values() {
            if known.insert(object.described.space) {
                described.push(object.described.clone());
            }
        }
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
        for line in process::mappings(pid)? {
            let Some(mapping) = Mapping::parse(&line?) else { continue };
            let kind = kind(&mapping.name);
            let Some(huge_page) = self.page_size(mapping.device, kind) else { continue };
            // Each is a file of its own, which nobody else can have.
            let is_own = huge_page > 0 && mapping.private && mapping.name.starts_with(ANONYMOUS_HUGE);
            let is_elsewhere = kind == SharedKind::Segment && matches!(self.segments, Segments::BroughtByAnother(_));
            if is_own || is_elsewhere {
                continue;
            }
            let PageRange { start, end } = mapping.range;
            let path = PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}"));
            match self.meet((mapping.device, mapping.inode), kind, &path) {
                Ok(Some(object)) => {
                    object.mapped = true;
                    if !mapping.private {
                        let (inode, range, offset) = (mapping.inode, mapping.range, mapping.offset);
                        object.views.push(View { pid, inode, range, offset, huge: huge_page > 0, private: false });
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

    /// The segments that a process of another container has attached.
    fn find_segments(&mut self, pid: u32) -> io::Result<()> {
        for line in process::mappings(pid)? {
            let Some(mapping) = Mapping::parse(&line?) else { continue };
            if mapping.device != self.device || kind(&mapping.name) != SharedKind::Segment {
                continue;
            }
            let PageRange { start, end } = mapping.range;
            let path = PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}"));
            match self.meet((mapping.device, mapping.inode), SharedKind::Segment, &path) {
                Ok(Some(object)) => {
                    (object.mapped, object.of_others) = (true, true);
                    object.executable |= mapping.executable;
                }
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn find_copies(&mut self, pid: u32) -> io::Result<()> {
        let Some(space) = survey(&[pid]).map_err(|e| e.source)?.pop().filter(|space| !space.files.is_empty()) else {
            return Ok(());
        };
        let copies = match self.copies.entry(space.id) {
            Entry::Occupied(entry) => {
                let copies = entry.into_mut();
                copies.renew(space)?;
                copies
            }
            Entry::Vacant(entry) => {
                let Some(id) = AddressSpaceId::object(self.next) else { return Ok(()) };
                self.next += 1;
                entry.insert(Copies::of(space, id)?)
            }
        };
        copies.object.mapped = true;
        Ok(())
    }

    fn find_open(&mut self, pid: u32) -> io::Result<()> {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            let path = entry.path();
            let Ok(link) = std::fs::read_link(&path) else { continue };
            // A segment is never open.
            if !["/memfd:", "/dev/zero (deleted)"]
                .iter()
                .any(|p| link.as_os_str().as_encoded_bytes().starts_with(p.as_bytes()))
            {
                continue;
            }
            let Ok(found) = std::fs::metadata(&path) else { continue };
            if self.page_size(found.dev(), SharedKind::File).is_none() {
                continue;
            }
            match self.meet((found.dev(), found.ino()), SharedKind::File, &path) {
                Ok(Some(object)) => object.open = true,
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Of what objects on this device consist: the size of a huge page, or 0. `None`: no object is there that is ours.
    fn page_size(&self, device: u64, kind: SharedKind) -> Option<u64> {
        // The content of a segment is copied in the end.
        let ours = self.huge || kind == SharedKind::Segment;
        if device == self.device { Some(0) } else { hugetlb::devices().get(&device).copied().filter(|_| ours) }
    }

    /// The object with this device and inode, opened through `path`. `None`: it is left to criu.
    fn meet(&mut self, file: (u64, u64), kind: SharedKind, path: &Path) -> io::Result<Option<&mut Object>> {
        let (device, inode) = file;
        let of_another_kind = |known: &Object| known.described.kind != kind || known.device != device;
        let other = self.objects.get(&inode).is_some_and(|known| of_another_kind(known) && known.is_there());
        if other || self.left.get(&inode).is_some_and(|left| *left != kind) {
            return Err(io::Error::other(format!(
                "two files in memory (segments, memfds) have the same number {inode}, by which criu knows them; try again when \
                 one of them is gone"
            )));
        }
        // The number of a segment is its id, which is used again: what is met now may be another one.
        let known = self.objects.get(&inode).filter(|known| !of_another_kind(known));
        if known.is_some_and(|known| kind == SharedKind::File || known.mapped) {
            return Ok(self.objects.get_mut(&inode));
        }
        let Some((described, file)) = self.open((device, inode), kind, path)? else { return Ok(None) };
        Ok(Some(match self.objects.entry(inode) {
            Entry::Occupied(entry) if !of_another_kind(entry.get()) => {
                let object = entry.into_mut();
                object.file = file;
                object
            }
            entry => {
                self.next += 1;
                let new = Object::new(described, device, file);
                match entry {
                    Entry::Occupied(mut entry) => {
                        self.replaced.push(entry.insert(new).described);
                        entry.into_mut()
                    }
                    Entry::Vacant(entry) => entry.insert(new),
                }
            }
        }))
    }

    /// Opens what is behind `path`, and describes it. `None`: it is left to criu, or is another object by now.
    fn open(
        &mut self,
        (device, inode): (u64, u64),
        kind: SharedKind,
        path: &Path,
    ) -> io::Result<Option<(SharedObject, File)>> {
        let (Ok(key), Some(space)) = (u32::try_from(inode), AddressSpaceId::object(self.next)) else {
            return Ok(None);
        };
        let link = std::fs::read_link(path)?;
        let Some(link) = link.to_str() else { return Ok(None) };
        let link = link.strip_suffix(" (deleted)").unwrap_or(link);
        // Reading it shall not look as if it was used.
        let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NOATIME.bits()).open(path)?;
        let found = file.metadata()?;
        if (found.dev(), found.ino()) != (device, inode) {
            return Ok(None);
        }
        if !found.len().is_multiple_of(PAGE_SIZE) && found.len() < SMALL {
            self.left.insert(inode, kind);
            return Ok(None);
        }
        let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        let described = SharedObject {
            space,
            key,
            kind,
            name: link.strip_prefix("/memfd:").unwrap_or(link).to_owned(),
            size: found.len(),
            sealable: seals != SealFlag::F_SEAL_SEAL,
            huge_page: self.page_size(device, kind).unwrap_or(0),
        };
        Ok(Some((described, file)))
    }

    /// How the objects were used until now, where the kernel tells.
    fn uses(&self) -> HashMap<u64, Uses> {
        let Some(since) = self.listed else { return HashMap::new() };
        let (segments, files): (Vec<_>, Vec<_>) =
            self.objects.iter().partition(|(_, object)| object.described.kind == SharedKind::Segment);
        let user = segments.iter().find_map(|(_, object)| object.views.first());
        let segments = user.and_then(|view| Uses::of_segments(view.pid, since).ok()).unwrap_or_default();
        // Of an open file in huge pages they do not tell that a part of it was punched out.
        let files = files.into_iter().filter(|(_, object)| object.described.huge_page == 0 || !object.open);
        let file = |(inode, object): (&u64, &Object)| Some((*inode, Uses::of_file(&object.file, since).ok()?));
        files.filter_map(file).chain(segments).collect()
    }

    /// Finds out which pages may have changed since the last look, of what [`Self::find`] has just found. To be followed by
    /// [`Self::send`].
    ///
    /// # Errors
    /// A frozen process's page table that cannot be read.
    pub fn look(&mut self, look: Look) -> Result<(), SharedError> {
        let Some(watches) = &self.watches else {
            return self.copies.values_mut().try_for_each(|copies| copies.look(None, look));
        };
        let (doubts, uses) = (watches.take_doubts(), self.uses());
        for copies in self.copies.values_mut() {
            let doubt = doubts.get(&copies.space.pid);
            copies.look(Some(&Watching { watches, pids: &self.pids, doubt }), look)?;
        }
        for (inode, object) in &mut self.objects {
            object.look(watches, &self.pids, &doubts, uses.get(inode).copied(), look);
        }
        let views = self.objects.values().flat_map(|object| object.views.iter().copied());
        let huge = self.copies.values().flat_map(Copies::views);
        watches.keep(&views.chain(huge).map(|view| view.pid).collect());
        Ok(())
    }

    fn all(&self) -> impl Iterator<Item = &Object> {
        self.objects.values().chain(self.copies.values().map(|copies| &copies.object))
    }

    /// How many objects there are.
    pub fn count(&self) -> usize {
        self.objects.len()
    }

    /// The objects that criu must see empty: device and inode.
    pub fn hidden(&self) -> Vec<(u64, u64)> {
        let elsewhere = match &self.segments {
            Segments::BroughtByAnother(all) => all.as_slice(),
            _ => &[],
        };
        let own = self.objects.iter().map(|(inode, object)| (object.device, *inode));
        own.chain(elsewhere.iter().map(|inode| (self.device, *inode))).collect()
    }

    /// The addresses where criu must see no pages: by process (pid on this node).
    pub fn hidden_ranges(&self) -> impl Iterator<Item = (u32, Vec<PageRange>)> {
        self.copies.values().map(|copies| (copies.space.pid, copies.space.files.clone()))
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
        for object in self.all().filter(|o| which(o)) {
            pieces.extend(object.pieces().map_err(|e| object.failed(e))?);
        }
        let (broken, count) = (AtomicBool::new(false), streams.len());
        std::thread::scope(|scope| {
            let (pieces, broken) = (&pieces, &broken);
            let workers: Vec<_> = streams
                .iter_mut()
                .enumerate()
                .filter_map(|(number, stream)| {
                    let mut own = pieces.iter().filter(move |p| p.route(count) == number).peekable();
                    own.peek()?;
                    Some(threads::beside(scope, "send", move || -> Result<(), SendError> {
                        for piece in own {
                            if broken.load(Ordering::Relaxed) {
                                break;
                            }
                            send_piece(piece, stream, counters)
                                .inspect_err(|_| broken.store(true, Ordering::Relaxed))?;
                        }
                        stream.link().flush().map_err(WriteError::from)?;
                        Ok(())
                    }))
                })
                .collect();
            workers.into_iter().try_for_each(Beside::join)
        })
    }
}
