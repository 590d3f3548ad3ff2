//! The source's half of one tree: what is there, what of it has changed, and the operations that tell the destination.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{IFlags, OFlags, ioctl_getflags};
use tranship_sys::dirty_log::write_back;

use super::calls::{Calls, Written};
use super::content::{self, Parts, Sent, Trouble};
use super::op::{Kind, Name, Op};
use super::suspects::{Device, Use};
use super::trail::{self, Part, Trail};
use super::tree::{Before, Entry, Node, Tree, look, open_beneath};
use super::watch::{Events, Watch};
use super::{CopyError, GRAIN, OWN_ATTRIBUTES, Sink};
use crate::Root;
use crate::leases::write_leases;

/// What a pass has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of content.
    pub bytes: u64,
    /// Files whose content was sent, or a part of it.
    pub files: u64,
}

impl std::ops::AddAssign for Moved {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.files += other.files;
    }
}

/// Where a tree is.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its root.
    pub root: Root,
    /// How people call it.
    pub point: PathBuf,
    /// Most files that it may have.
    pub limit: usize,
}

/// By whose account files change unseen by their times.
#[derive(Debug)]
enum Account {
    /// Of a whole tmpfs.
    Memory {
        watch: Watch,
        /// What calls write, where the kernel tells.
        calls: Option<Arc<Calls>>,
        /// How often that had lost something when it was asked last.
        losses: u64,
        /// Files that were last compared only where calls have written.
        in_parts: HashSet<u64>,
        /// Files that tasks outside of the container have begun to change, once. Nobody tells when they have done so, nor of each time that
        /// they begin.
        changed_elsewhere: HashSet<u64>,
        /// Files of which the last pass was told so, but not by the times: they have been read only, or changed after it looked.
        read_elsewhere: HashSet<u64>,
    },
    /// Of each file on a disk, where the kernel gives it.
    Disk {
        trail: Option<Arc<Trail>>,
        /// Files whose writes the trail tells of, since before they were read.
        tracked: HashSet<u64>,
        /// How often the trail had lost something when it was asked last.
        losses: u64,
        /// Files that had a shared mapping at the last look.
        mapped: HashSet<u64>,
    },
}

/// What a pass knows of how the content of files may have changed.
#[derive(Default)]
struct Told {
    /// Files that must be compared whatever their times say.
    suspects: HashSet<u64>,
    /// Anything may have changed.
    lost: bool,
    /// What of tracked files was written.
    written: HashMap<u64, trail::Told>,
    /// That is all that was written to files that are not suspects.
    is_all: bool,
}

impl Told {
    /// Whether a file may have changed anywhere, whatever is told of what was written.
    fn is_in_doubt(&self, ino: u64) -> bool {
        self.lost || self.suspects.contains(&ino)
    }
}

/// A tree on the node that its container leaves.
#[derive(Debug)]
pub(crate) struct Original {
    place: Place,
    pub device: Device,
    account: Account,
    tree: Option<Tree>,
    sent: HashMap<u64, Sent>,
    /// Inodes whose ctime was too young to be believed when it was looked at.
    doubted: HashSet<u64>,
    /// Inodes that the peer has extended attributes of.
    attributed: HashSet<u64>,
    /// Parts of files in memory that are allocated without content, of files that have any.
    preallocated: HashMap<u64, Vec<(u64, u64)>>,
    /// Of files in memory, their sizes and the bytes of their blocks when it was looked for those: where both are as they were, nothing was
    /// allocated. What has got content since is still in `preallocated`, to no harm.
    blocks: HashMap<u64, (u64, u64)>,
}

impl Original {
    /// All of a tmpfs.
    ///
    /// # Errors
    /// Why it cannot be watched, in words.
    pub fn in_memory(place: Place) -> Result<Self, String> {
        let watch = Watch::start(&place.root).map_err(|e| format!("it cannot be watched: {e}"))?;
        let (in_parts, changed_elsewhere, read_elsewhere) = Default::default();
        Self::new(place, Account::Memory { watch, calls: None, losses: 0, in_parts, changed_elsewhere, read_elsewhere })
    }

    /// From now on it is known what calls write to a tmpfs: before the first pass.
    pub fn follow(&mut self, following: &Arc<Calls>) {
        if let Account::Memory { calls, .. } = &mut self.account {
            *calls = Some(Arc::clone(following));
        }
    }

    /// A directory on a disk. A trail is given if it tells of all writes to files there.
    ///
    /// # Errors
    /// Why it cannot be read, in words.
    pub fn on_disk(place: Place, trail: Option<Arc<Trail>>) -> Result<Self, String> {
        let account = Account::Disk { trail, tracked: HashSet::new(), losses: 0, mapped: HashSet::new() };
        Self::new(place, account)
    }

    fn new(place: Place, account: Account) -> Result<Self, String> {
        let stat = look(&place.root, b"").map_err(|e| format!("it cannot be looked at: {e}"))?;
        Ok(Self {
            place,
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            account,
            tree: None,
            sent: HashMap::new(),
            doubted: HashSet::new(),
            attributed: HashSet::new(),
            preallocated: HashMap::new(),
            blocks: HashMap::new(),
        })
    }

    /// Its root.
    pub fn root(&self) -> &Root {
        &self.place.root
    }

    /// Its names and inodes, as the last pass found them.
    pub fn tree(&self) -> Option<&Tree> {
        self.tree.as_ref()
    }

    /// A name that an inode has at this moment, as a path below the root. What the last pass has not found there is
    /// looked for in `anew`, for which the names are read once more.
    pub fn name_of(&self, ino: u64, anew: &OnceCell<Option<Tree>>) -> Option<PathBuf> {
        let is_at = |path: &PathBuf| {
            let found = open_beneath(&self.place.root, path, OFlags::PATH).and_then(|file| look(file, b""));
            found.is_ok_and(|stat| stat.stx_ino == ino)
        };
        let named = |tree: &Tree| tree.nodes.contains_key(&ino).then(|| tree.path(ino)).filter(is_at);
        let read = || Tree::read(&self.place.root, &self.place.point, self.place.limit).ok();
        let path = self.tree.as_ref().and_then(named).or_else(|| anew.get_or_init(read).as_ref().and_then(named))?;
        path.strip_prefix(".").ok().map(Path::to_owned)
    }

    /// Sends what the peer does not have yet of tree number `index`, which is used so. `last`: the container is frozen, nothing may
    /// change meanwhile, and nothing follows.
    ///
    /// # Errors
    /// If something cannot be read, or the link breaks: the peer's copy is of no use then.
    pub fn pass(&mut self, index: usize, found: &Use, sink: &mut dyn Sink, last: bool) -> Result<Moved, CopyError> {
        let point = self.place.point.clone();
        let mut pass = Pass { state: self, point: &point, sink, moved: Moved::default(), last };
        pass.run(index, found)?;
        Ok(pass.moved)
    }
}

/// One pass over one tree.
pub(crate) struct Pass<'a> {
    state: &'a mut Original,
    point: &'a Path,
    sink: &'a mut dyn Sink,
    moved: Moved,
    /// The container is frozen: nothing may change under this pass.
    last: bool,
}

impl Pass<'_> {
    fn op(&mut self, op: &Op) -> Result<(), CopyError> {
        self.sink.op(op).map_err(CopyError::Link)
    }

    fn run(&mut self, index: usize, found: &Use) -> Result<(), CopyError> {
        // Taken before the look, so that what happens during it counts for the next pass.
        let events = match &self.state.account {
            Account::Memory { watch, .. } => watch.take(),
            Account::Disk { .. } => Events { any: true, ..Events::default() },
        };
        let quiet = !events.any && found.suspects.is_empty() && !found.open_for_writing && self.is_quiet_elsewhere();
        if quiet && let Some(tree) = &self.state.tree {
            let root = tree.root;
            if self.last {
                self.op(&Op::Mount { index, root })?;
                self.op(&Op::PassEnd { last: true })?;
            }
            return Ok(());
        }
        let start = SystemTime::now();
        let before = self.state.tree.as_ref().map(|tree| Before { tree, doubted: &self.state.doubted });
        let new = Tree::read_again(&self.state.place.root, self.point, self.state.place.limit, before.as_ref())?;
        let old = self.state.tree.take().unwrap_or_else(|| Tree { root: new.root, ..Tree::default() });
        self.op(&Op::Mount { index, root: new.root })?;
        let parked = self.names(&old, &new)?;
        let told = self.told(&old, &new, found, &events);
        let touched = self.contents(&old, &new, &told)?;
        for (ino, node) in &new.nodes {
            let changed = old.nodes.get(ino).is_none_or(|was| was.kind != node.kind || node.differs(was));
            if changed || touched.contains(ino) || self.state.doubted.contains(ino) || (parked && *ino == new.root) {
                self.attributes(&new, *ino, node)?;
            }
        }
        self.op(&Op::PassEnd { last: self.last })?;
        let grain = start.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(GRAIN);
        let limit = (i64::try_from(grain.as_secs()).unwrap_or(i64::MAX), grain.subsec_nanos());
        let state = &mut *self.state;
        state.doubted = new.nodes.iter().filter(|(_, node)| node.ctime >= limit).map(|(ino, _)| *ino).collect();
        state.sent.retain(|ino, _| new.nodes.contains_key(ino));
        state.attributed.retain(|ino| new.nodes.contains_key(ino));
        state.preallocated.retain(|ino, _| new.nodes.contains_key(ino));
        state.blocks.retain(|ino, _| new.nodes.contains_key(ino));
        state.tree = Some(new);
        Ok(())
    }

    /// Whether nobody outside of the container changes files, also in ways of which the watch has no events (io_submit(2)), as far as calls are followed.
    fn is_quiet_elsewhere(&self) -> bool {
        match &self.state.account {
            Account::Memory { calls: Some(calls), losses, changed_elsewhere, read_elsewhere, .. } => {
                changed_elsewhere.is_empty() && read_elsewhere.is_empty() && calls.is_quiet(self.state.device, *losses)
            }
            _ => true,
        }
    }

    /// What is known of how files were written since the last pass.
    fn told(&mut self, old: &Tree, new: &Tree, found: &Use, events: &Events) -> Told {
        match &mut self.state.account {
            Account::Memory { calls, losses, in_parts, changed_elsewhere, read_elsewhere, .. } => {
                let closed = events.closed.iter().filter(|_| !found.all);
                let mut suspects: HashSet<u64> = found.suspects.iter().chain(closed).copied().collect();
                let (lost, Written { parts, begun, all_begun }) =
                    calls.as_ref().map_or_else(Default::default, |calls| calls.take(self.state.device));
                changed_elsewhere.retain(|ino| new.nodes.contains_key(ino));
                let begun = if all_begun { new.nodes.keys().copied().collect() } else { begun };
                // Who only reads leaves these times alone. Who writes has changed them before that is told: it is seen now, in the next look if it came after this
                // one, or was in the one before, where it was young.
                let is_changed = |ino: &u64| {
                    let same = |(was, is): (&Node, &Node)| !is.content_differs(was);
                    !old.nodes.get(ino).zip(new.nodes.get(ino)).is_some_and(same) || self.state.doubted.contains(ino)
                };
                changed_elsewhere.extend(read_elsewhere.drain().filter(is_changed));
                let (changed, read): (HashSet<u64>, _) = begun.into_iter().partition(is_changed);
                changed_elsewhere.extend(changed);
                *read_elsewhere = read;
                suspects.extend(&*changed_elsewhere);
                let is_all = calls.is_some() && std::mem::replace(losses, lost) == lost;
                if !is_all {
                    // A call that was not told may have begun before they were compared, and changed them afterwards.
                    suspects.extend(in_parts.drain());
                }
                let told = |written| trail::Told { written, to_write_back: false };
                let written = parts.into_iter().filter(|_| is_all).map(|(ino, part)| (ino, told(part))).collect();
                Told { suspects, lost: events.lost, written, is_all }
            }
            Account::Disk { trail, tracked, losses, mapped } => {
                let before = std::mem::replace(mapped, found.mapped.clone());
                let mut written = HashMap::new();
                if let Some(trail) = trail {
                    trail.follow(new.files());
                    tracked.retain(|ino| new.nodes.get(ino).is_some_and(|node| node.kind == Kind::File));
                    let is_mapped = |ino| found.unsure_of_mappings || before.contains(&ino) || mapped.contains(&ino);
                    let (lost, parts) = trail.take(tracked, is_mapped);
                    if std::mem::replace(losses, lost) != lost {
                        tracked.clear();
                    } else {
                        written = parts;
                    }
                }
                let suspects = before.union(mapped).filter(|ino| !tracked.contains(ino)).copied().collect();
                Told { suspects, lost: false, written, is_all: false }
            }
        }
    }

    /// Makes the peer's names equal. Returns whether inodes were parked.
    fn names(&mut self, old: &Tree, new: &Tree) -> Result<bool, CopyError> {
        let same = |ino: &u64| match (old.nodes.get(ino), new.nodes.get(ino)) {
            (Some(was), Some(is)) => was.kind == is.kind,
            _ => false,
        };
        let stays = |entry: &Entry, ino: &u64| new.names.get(entry) == Some(ino) && same(ino);
        // Inodes that keep a name need none to be held by.
        let mut held: HashSet<u64> = old.names.iter().filter(|(e, ino)| stays(e, ino)).map(|(_, ino)| *ino).collect();
        let mut parked = false;
        // What is in a directory comes before the directory, so that one that goes is empty by then.
        for entry in old.order.iter().rev() {
            let Some(ino) = old.names.get(entry) else { continue };
            if stays(entry, ino) {
                continue;
            }
            let (ino, parent, name) = (*ino, entry.0, Name(entry.1.clone()));
            if same(&ino) && held.insert(ino) {
                parked = true;
                self.op(&Op::Park { ino, parent, name })?;
            } else {
                self.op(&Op::Unname { ino, parent, name })?;
            }
        }
        let mut made = HashSet::new();
        for entry in &new.order {
            let Some(ino) = new.names.get(entry) else { continue };
            if old.names.get(entry) == Some(ino) && same(ino) {
                continue;
            }
            let (ino, parent, name) = (*ino, entry.0, Name(entry.1.clone()));
            if same(&ino) || !made.insert(ino) {
                self.op(&Op::Name { ino, parent, name })?;
            } else {
                self.state.sent.remove(&ino);
                self.state.attributed.remove(&ino);
                let kind = new.nodes[&ino].kind.clone();
                self.op(&Op::Make { ino, parent, name, kind })?;
            }
        }
        if parked {
            self.op(&Op::Unpark)?;
        }
        Ok(parked)
    }

    /// Makes the content of files equal. Returns those of which the peer's have another time since.
    fn contents(&mut self, old: &Tree, new: &Tree, told: &Told) -> Result<HashSet<u64>, CopyError> {
        let mut due: Vec<u64> = Vec::new();
        for (ino, node) in new.nodes.iter().filter(|(_, node)| node.kind == Kind::File) {
            let written = told.is_in_doubt(*ino) || told.written.contains_key(ino);
            let changed = old.nodes.get(ino).is_none_or(|was| was.kind != Kind::File || node.content_differs(was));
            // What the container's calls write is told whatever the times say; what others do, by the times, has made suspects.
            let doubted = self.state.doubted.contains(ino);
            if written || changed || (doubted && !told.is_all) || !self.state.sent.contains_key(ino) {
                due.push(*ino);
            } else if doubted {
                self.compared(*ino, true);
            }
        }
        // Those that shrink come first: what they leave may be what others need.
        let grown =
            |ino: &u64| new.nodes[ino].size.cast_signed() - old.nodes.get(ino).map_or(0, |n| n.size).cast_signed();
        due.sort_by_key(|ino| (grown(ino), *ino));
        let mut touched = HashSet::new();
        let leases = if due.is_empty() { HashMap::new() } else { write_leases() };
        for ino in due {
            let path = new.path(ino);
            let full = || self.point.join(&path);
            if let Some(&holder) = leases.get(&(new.device, ino)) {
                return Err(CopyError::Leased { path: full(), holder });
            }
            let file = match self.state.place.root.open(&path, OFlags::empty()) {
                Ok(file) => file,
                Err(_) if !self.last => {
                    self.untrack(ino);
                    continue;
                }
                Err(e) => return Err(CopyError::refused("open", &full(), e)),
            };
            let stat = look(&file, b"").map_err(|e| CopyError::refused("look at", &full(), e))?;
            if stat.stx_ino != ino {
                // Another one by the same name; the next pass sorts it out.
                if self.last {
                    return Err(CopyError::Changed { path: full() });
                }
                self.untrack(ino);
                continue;
            }
            let parts = told.written.get(&ino);
            self.track(&file, ino, parts.is_some_and(|told| told.to_write_back));
            let before = self.state.sent.remove(&ino);
            // What changed without a word of where is compared as a whole.
            let written = match parts.filter(|_| before.is_some() && !told.is_in_doubt(ino)) {
                Some(trail::Told { written: Part::Chunks(chunks), .. }) => {
                    Some(Parts { chunks, with_holes: told.is_all })
                }
                _ => None,
            };
            self.compared(ino, written.is_some());
            let mut sent = before.unwrap_or_default();
            let outcome = content::send(&file, ino, stat.stx_size, &mut sent, written, self.sink).map_err(
                |trouble| match trouble {
                    Trouble::Read(e) => CopyError::refused("read", &full(), e),
                    Trouble::Link(e) => CopyError::Link(e),
                },
            )?;
            // Asked again: more may have been written since.
            let blocks = self.is_in_memory().then(|| look(&file, b"").map_or(0, |stat| stat.stx_blocks * 512));
            let told = blocks.map(|blocks| (stat.stx_size, blocks));
            if let Some((size, blocks)) = told
                && self.state.blocks.insert(ino, (size, blocks)) != told
            {
                let parts = content::preallocated(&file, size, blocks, &sent)
                    .map_err(|e| CopyError::refused("read", &full(), e))?;
                let before = match parts.is_empty() {
                    true => self.state.preallocated.remove(&ino),
                    false => self.state.preallocated.insert(ino, parts.clone()),
                };
                // The peer's file may have blocks that this one has not any more.
                if let Some(before) = before.filter(|before| *before != parts) {
                    self.release(&file, (ino, size), &before, &mut sent)?;
                    touched.insert(ino);
                }
            }
            self.state.sent.insert(ino, sent);
            self.moved.bytes += outcome.bytes;
            if outcome.touched {
                self.moved.files += 1;
                touched.insert(ino);
            }
        }
        Ok(touched)
    }

    /// Has the peer release blocks that were allocated without content: beyond the end of the file, and where it has no content.
    /// What became a hole since its content was sent counts as zeros in `sent` then.
    fn release(
        &mut self,
        file: &OwnedFd,
        (ino, size): (u64, u64),
        parts: &[(u64, u64)],
        sent: &mut Sent,
    ) -> Result<(), CopyError> {
        self.op(&Op::Content { ino, size })?;
        let holes = content::holes(file, size).unwrap_or_default();
        for (offset, length) in parts {
            for (hole, hole_length) in &holes {
                let (start, end) = ((*offset).max(*hole), size.min(offset + length).min(hole + hole_length));
                if start < end {
                    self.op(&Op::Zero { offset: start, length: end - start })?;
                    sent.zeroed(start, end);
                }
            }
        }
        Ok(())
    }

    fn is_in_memory(&self) -> bool {
        matches!(self.state.account, Account::Memory { .. })
    }

    /// Notes whether a file was compared only where calls have written.
    fn compared(&mut self, ino: u64, in_parts: bool) {
        if let Account::Memory { in_parts: known, .. } = &mut self.state.account {
            match in_parts {
                true => known.insert(ino),
                false => known.remove(&ino),
            };
        }
    }

    /// What the trail has told of a file was of no use.
    fn untrack(&mut self, ino: u64) {
        if let Account::Disk { tracked, .. } = &mut self.state.account {
            tracked.remove(&ino);
        }
    }

    /// Has the trail tell of every write to a file from now on, before it is read. It does so already of a tracked one that need not
    /// be written back for it.
    fn track(&mut self, file: &OwnedFd, ino: u64, to_write_back: bool) {
        let Account::Disk { trail: Some(_), tracked, .. } = &mut self.state.account else { return };
        if self.last || (tracked.contains(&ino) && !to_write_back) {
            return;
        }
        let journaled = ioctl_getflags(file).is_ok_and(|flags| flags.contains(IFlags::JOURNALING));
        if !journaled && write_back(file.as_fd(), true).is_ok() {
            tracked.insert(ino);
        } else {
            self.untrack(ino);
        }
    }

    fn attributes(&mut self, tree: &Tree, ino: u64, node: &Node) -> Result<(), CopyError> {
        let mut xattrs = None;
        if matches!(node.kind, Kind::File | Kind::Directory) {
            let path = tree.path(ino);
            let full = || self.point.join(&path);
            match open_beneath(&self.state.place.root, &path, OFlags::PATH) {
                Ok(file) => {
                    let all = extended(&file).map_err(|e| CopyError::refused("read the attributes of", &full(), e))?;
                    if !all.is_empty() || self.state.attributed.contains(&ino) {
                        xattrs = Some(all);
                        self.state.attributed.insert(ino);
                    }
                }
                Err(_) if !self.last => {}
                Err(e) => return Err(CopyError::refused("open", &full(), e)),
            }
        }
        let &Node { mode, uid, gid, atime, mtime, .. } = node;
        let flags = if self.is_in_memory() { node.flags } else { 0 };
        let allocated = self.state.preallocated.get(&ino).cloned().unwrap_or_default();
        self.op(&Op::Meta { ino, mode, uid, gid, atime, mtime, xattrs, allocated, flags })
    }
}

/// The extended attributes of a file that are its own. `O_PATH` is enough.
pub(crate) fn extended(file: &OwnedFd) -> rustix::io::Result<Vec<(Name, Name)>> {
    use rustix::fs::{getxattr, listxattr, listxattr_query};
    let file = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let file = file.as_str();
    if matches!(listxattr_query(file), Ok(0) | Err(rustix::io::Errno::OPNOTSUPP)) {
        return Ok(Vec::new());
    }
    let mut list = vec![0; 64 << 10];
    let length = listxattr(file, list.as_mut_slice())?;
    let mut all = Vec::new();
    for name in list[..length].split(|b| *b == 0).filter(|n| !n.is_empty() && !OWN_ATTRIBUTES.contains(n)) {
        let mut value = vec![0; 64 << 10];
        match getxattr(file, name, value.as_mut_slice()) {
            Ok(length) => all.push((Name(name.to_vec()), Name(value[..length].to_vec()))),
            // It was removed just now.
            Err(rustix::io::Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}
