//! The destination's half: trees that are made equal to their originals, operation by operation.
//!
//! The operations come from a peer. Whatever they say, nothing outside of a tree is touched: every path is made of names
//! that were checked, and resolved by the kernel beneath the tree's root without following a symlink or entering a mount.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::mount::{MsFlags, mount};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, IFlags, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid, XattrFlags,
    chmodat, chownat, fallocate, flistxattr, fremovexattr, fsetxattr, ftruncate, ioctl_getflags, ioctl_setflags,
    linkat, makedev, mkdirat, mknodat, openat, renameat_with, symlinkat, unlinkat, utimensat,
};

use tranship_sys::charge::Charger;
use tranship_sys::dirty_log::write_back;

use super::op::{Kind, Name, Op, Time};
use super::tree::{FLAGS, open_beneath};
use super::{CopyError, OWN_ATTRIBUTES, nonsense};
use crate::Root;
use crate::carried::{Digests, digests};
use crate::error::DEPTH_LIMIT;

/// The directory in which an inode is that has no name at the moment: no inode has this number.
const STAGING: u64 = u64::MAX;
const PAGE: u64 = 4 << 10;
/// Bytes that are written at once. The kernel makes folios of this size for them, and it deals with all blocks of a folio whenever one
/// is written: in larger ones a page that changes later takes several times as long.
const PIECE: usize = 64 << 10;
/// Bytes that are worth sending on their way to the disk before more have come.
const MUCH: u64 = 32 << 20;

/// The copies of a container's trees.
#[derive(Debug)]
pub struct Replica {
    copies: Vec<Copy>,
    current: Option<usize>,
}

impl Replica {
    /// Of trees that are empty.
    pub(crate) fn new(copies: Vec<Copy>) -> Self {
        Self { copies, current: None }
    }

    /// Has the pages of files, which are in memory, charged to whoever the charger is connected to.
    #[must_use]
    pub fn charged_by(mut self, charger: &Arc<Charger>) -> Self {
        self.copies.iter_mut().for_each(|copy| copy.charger = Some(Arc::clone(charger)));
        self
    }

    /// The digests of one of the trees.
    ///
    /// # Errors
    /// If something cannot be read, or there is no such tree.
    pub fn digests(&self, index: usize) -> Result<Digests, CopyError> {
        let copy = self.copies.get(index).ok_or_else(|| nonsense("a tree that was not offered"))?;
        let root = copy.root.try_clone().map_err(|e| CopyError::refused("open", &copy.point, e))?;
        digests(&Root::of_copy(root), &copy.point, &|| false)
    }

    /// Does one operation.
    ///
    /// # Errors
    /// If the system refuses, or the operation makes no sense. The copies are then of no use any more.
    pub fn apply(&mut self, op: Op) -> Result<(), CopyError> {
        if let Op::Mount { index, root } = op {
            let mount = self.copies.get_mut(index).ok_or_else(|| nonsense("a mount that was not offered"))?;
            self.current = Some(index);
            return mount.begin(root);
        }
        self.mount()?.apply(op)
    }

    /// Content of the file that is being written.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CopyError> {
        self.mount()?.data(offset, bytes)
    }

    /// Gives files and directories the flags that they had (FS_IOC_SETFLAGS): once whoever opens them for writing has done so.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set_flags(&mut self) -> Result<(), CopyError> {
        self.copies.iter_mut().try_for_each(Copy::set_flags)
    }

    /// Sends what was written so far on its way to the disk if it is much, so that the disk does not get all of it after the resume.
    pub fn flush(&mut self) {
        for copy in self.copies.iter_mut().filter(|copy| copy.unflushed >= MUCH) {
            copy.unflushed = 0;
            for ino in std::mem::take(&mut copy.written) {
                // A disk that fails is noticed at the end.
                let open = copy.path(ino).ok().and_then(|path| open_beneath(&copy.root, &path, OFlags::WRONLY).ok());
                let _ = open.map(|file| write_back(&file, false));
            }
        }
    }

    fn mount(&mut self) -> Result<&mut Copy, CopyError> {
        let current = self.current.and_then(|index| self.copies.get_mut(index));
        current.ok_or_else(|| nonsense("an operation without a mount"))
    }
}

/// The limits of a filesystem, which its copy gets when it is complete.
#[derive(Debug)]
pub(crate) struct Limits {
    /// Where it is mounted.
    pub path: PathBuf,
    /// As a remount takes them.
    pub options: String,
    /// It is read-only from then on.
    pub read_only: bool,
}

impl Limits {
    fn set(self) -> Result<(), CopyError> {
        if self.options.is_empty() && !self.read_only {
            return Ok(());
        }
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let flags = if self.read_only { flags | MsFlags::MS_RDONLY } else { flags };
        mount(None::<&str>, &self.path, None::<&str>, flags, Some(self.options.as_str()))
            .map_err(|e| CopyError::refused("give its limits to", &self.path, e))
    }
}

#[derive(Debug)]
struct Made {
    kind: Kind,
    /// Directories and names there.
    names: Vec<(u64, Vec<u8>)>,
}

#[derive(Debug)]
pub(crate) struct Copy {
    /// How people call it.
    point: PathBuf,
    root: OwnedFd,
    /// Most files that it may have.
    limit: usize,
    /// What is set at its end.
    limits: Option<Limits>,
    root_ino: u64,
    nodes: HashMap<u64, Made>,
    /// Name of the directory for inodes without a name, while there is one.
    staging: Option<Vec<u8>>,
    /// The directory that was used last.
    directory: Option<(u64, Arc<OwnedFd>)>,
    /// The file that is being written, and its size.
    file: Option<(File, u64)>,
    /// Files that were written since the last flush, and how many bytes.
    written: HashSet<u64>,
    unflushed: u64,
    ended: bool,
    /// Of files in memory: has their pages charged to the container.
    charger: Option<Arc<Charger>>,
    /// What inodes get in the end.
    flags: HashMap<u64, IFlags>,
}

impl Copy {
    /// Of the empty directory `root`.
    pub fn new(root: OwnedFd, point: PathBuf, limit: usize, limits: Option<Limits>) -> Self {
        Self {
            point,
            root,
            limit,
            limits,
            root_ino: 0,
            nodes: HashMap::new(),
            staging: None,
            directory: None,
            file: None,
            written: HashSet::new(),
            unflushed: 0,
            ended: false,
            charger: None,
            flags: HashMap::new(),
        }
    }

    fn begin(&mut self, root: u64) -> Result<(), CopyError> {
        if self.ended {
            return Err(nonsense("a mount goes on after its end"));
        }
        if self.nodes.is_empty() {
            self.root_ino = root;
            self.nodes.insert(root, Made { kind: Kind::Directory, names: Vec::new() });
        }
        if self.root_ino != root || root == STAGING {
            return Err(nonsense("a mount with another root"));
        }
        Ok(())
    }

    fn apply(&mut self, op: Op) -> Result<(), CopyError> {
        if self.ended {
            return Err(nonsense("a mount goes on after its end"));
        }
        if !matches!(op, Op::Zero { .. }) {
            self.file = None;
        }
        match op {
            Op::Mount { .. } => Err(nonsense("a mount within a mount")),
            Op::Park { ino, parent, name } => self.park(ino, &(parent, checked(name)?)),
            Op::Unname { ino, parent, name } => self.unname(ino, &(parent, checked(name)?)),
            Op::Make { ino, parent, name, kind } => self.make(ino, parent, checked(name)?, kind),
            Op::Name { ino, parent, name } => self.name(ino, parent, checked(name)?),
            Op::Unpark => self.unpark(),
            Op::Content { ino, size } => self.content(ino, size),
            Op::Zero { offset, length } => self.zero(offset, length),
            Op::Meta { ino, mode, uid, gid, atime, mtime, xattrs, allocated, flags } => {
                let flags = FLAGS & IFlags::from_bits_retain(flags);
                match flags.is_empty() {
                    true => self.flags.remove(&ino),
                    false => self.flags.insert(ino, flags),
                };
                self.allocate(ino, &allocated)?;
                self.attributes(ino, (mode, uid, gid), (atime, mtime), xattrs)
            }
            Op::PassEnd { last } => self.end(last),
        }
    }

    fn refused(&self, what: &'static str, path: &Path, why: impl Into<std::io::Error>) -> CopyError {
        let inner = path.strip_prefix(".").unwrap_or(path);
        CopyError::refused(what, &self.point.join(inner), why)
    }

    fn node(&self, ino: u64) -> Result<&Made, CopyError> {
        self.nodes.get(&ino).ok_or_else(|| nonsense(format!("inode {ino}, which was never made")))
    }

    /// Where an inode is, beneath the root.
    fn path(&self, ino: u64) -> Result<PathBuf, CopyError> {
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut at = ino;
        while at != self.root_ino {
            if at == STAGING {
                parts.push(self.staging.as_deref().ok_or_else(|| nonsense("an inode without a name"))?);
                break;
            }
            let (parent, name) = self.node(at)?.names.first().ok_or_else(|| nonsense("an inode without a name"))?;
            parts.push(name);
            at = *parent;
            if parts.len() > DEPTH_LIMIT + 1 {
                return Err(nonsense("directories without end"));
            }
        }
        let mut path = PathBuf::from(".");
        path.extend(parts.into_iter().rev().map(OsStr::from_bytes));
        Ok(path)
    }

    fn directory(&mut self, ino: u64) -> Result<Arc<OwnedFd>, CopyError> {
        if let Some((known, open)) = &self.directory
            && *known == ino
        {
            return Ok(Arc::clone(open));
        }
        if ino != STAGING && self.node(ino)?.kind != Kind::Directory {
            return Err(nonsense("a name in what is no directory"));
        }
        let path = self.path(ino)?;
        let open = open_beneath(&self.root, &path, OFlags::RDONLY | OFlags::DIRECTORY);
        let open = Arc::new(open.map_err(|e| self.refused("open the directory", &path, e))?);
        self.directory = Some((ino, Arc::clone(&open)));
        Ok(open)
    }

    /// Directory and name of an inode.
    fn place(&mut self, ino: u64) -> Result<(Arc<OwnedFd>, Vec<u8>), CopyError> {
        if ino == self.root_ino {
            return Ok((self.directory(ino)?, b".".to_vec()));
        }
        let first = self.node(ino)?.names.first().cloned();
        let (parent, name) = first.ok_or_else(|| nonsense("an inode without a name"))?;
        Ok((self.directory(parent)?, name))
    }

    fn park(&mut self, ino: u64, entry: &(u64, Vec<u8>)) -> Result<(), CopyError> {
        if self.staging.is_none() {
            let mut attempts = (0..1000).map(|n| format!(".tranship-parked-{n}").into_bytes());
            let made = attempts.find(|name| mkdirat(&self.root, name.as_slice(), Mode::RWXU).is_ok());
            self.staging = Some(made.ok_or_else(|| nonsense("a thousand directories that nobody makes"))?);
        }
        let is_parked = self.node(ino)?.names.first().is_some_and(|(parent, _)| *parent == STAGING);
        if is_parked || !self.node(ino)?.names.contains(entry) {
            return Err(nonsense("an inode that is parked already, or is not there"));
        }
        let (directory, name) = (self.directory(entry.0)?, entry.1.as_slice());
        let staging = self.directory(STAGING)?;
        let parked = ino.to_string().into_bytes();
        renameat_with(&directory, name, &staging, parked.as_slice(), RenameFlags::NOREPLACE)
            .map_err(|e| self.refused("move", Path::new(OsStr::from_bytes(name)), e))?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|known| known != entry);
            node.names.insert(0, (STAGING, parked));
        }
        Ok(())
    }

    fn unname(&mut self, ino: u64, entry: &(u64, Vec<u8>)) -> Result<(), CopyError> {
        let node = self.node(ino)?;
        if !node.names.contains(entry) {
            return Err(nonsense("a name that was never given"));
        }
        let is_directory = node.kind == Kind::Directory;
        let directory = self.directory(entry.0)?;
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(&directory, entry.1.as_slice(), flags)
            .map_err(|e| self.refused("remove", Path::new(OsStr::from_bytes(&entry.1)), e))?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|known| known != entry);
            if node.names.is_empty() {
                self.nodes.remove(&ino);
            }
        }
        if is_directory {
            self.directory = None;
        }
        Ok(())
    }

    fn make(&mut self, ino: u64, parent: u64, name: Vec<u8>, kind: Kind) -> Result<(), CopyError> {
        if ino == STAGING || self.nodes.contains_key(&ino) || parent == STAGING {
            return Err(nonsense(format!("inode {ino}, which is there already")));
        }
        if self.nodes.len() > self.limit {
            let what = format!("has more than {} files", self.limit);
            return Err(CopyError::TooMuch { point: self.point.clone(), what });
        }
        let directory = self.directory(parent)?;
        let mode = Mode::RUSR | Mode::WUSR;
        let node = |file_type: FileType, device| mknodat(&directory, name.as_slice(), file_type, mode, device);
        let made = match &kind {
            Kind::Directory => mkdirat(&directory, name.as_slice(), Mode::RWXU),
            Kind::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                openat(&directory, name.as_slice(), flags, mode).map(drop)
            }
            Kind::Symlink { target } => symlinkat(target.0.as_slice(), &directory, name.as_slice()),
            Kind::Fifo => node(FileType::Fifo, 0),
            Kind::Socket => node(FileType::Socket, 0),
            Kind::Character { major, minor } => node(FileType::CharacterDevice, makedev(*major, *minor)),
            Kind::Block { major, minor } => node(FileType::BlockDevice, makedev(*major, *minor)),
        };
        made.map_err(|e| self.refused("make", Path::new(OsStr::from_bytes(&name)), e))?;
        self.nodes.insert(ino, Made { kind, names: vec![(parent, name)] });
        Ok(())
    }

    fn name(&mut self, ino: u64, parent: u64, name: Vec<u8>) -> Result<(), CopyError> {
        let node = self.node(ino)?;
        let is_parked = node.names.first().is_some_and(|(parent, _)| *parent == STAGING);
        if ino == self.root_ino || parent == STAGING || (!is_parked && node.kind == Kind::Directory) {
            return Err(nonsense("a second name for a directory"));
        }
        let place = self.place(ino)?;
        let directory = self.directory(parent)?;
        if is_parked {
            renameat_with(&place.0, place.1.as_slice(), &directory, name.as_slice(), RenameFlags::NOREPLACE)
        } else {
            linkat(&place.0, place.1.as_slice(), &directory, name.as_slice(), AtFlags::empty())
        }
        .map_err(|e| self.refused("name", Path::new(OsStr::from_bytes(&name)), e))?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            if is_parked {
                node.names[0] = (parent, name);
            } else {
                node.names.push((parent, name));
            }
        }
        Ok(())
    }

    fn content(&mut self, ino: u64, size: u64) -> Result<(), CopyError> {
        if self.node(ino)?.kind != Kind::File {
            return Err(nonsense("content of what is no file"));
        }
        let path = self.path(ino)?;
        let file = open_beneath(&self.root, &path, OFlags::WRONLY).map_err(|e| self.refused("open", &path, e))?;
        ftruncate(&file, size).map_err(|e| self.refused("set the size of", &path, e))?;
        self.written.insert(ino);
        self.file = Some((file.into(), size));
        Ok(())
    }

    /// The file that is being written, if the part is within it.
    fn part(&self, offset: u64, length: u64) -> Result<&File, CopyError> {
        match &self.file {
            Some((file, size)) if offset.checked_add(length).is_some_and(|end| end <= *size) => Ok(file),
            _ => Err(nonsense("content beyond the end of a file, or of none")),
        }
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CopyError> {
        let file = self.part(offset, bytes.len() as u64)?;
        if let Some(charger) = &self.charger {
            let allocated = charger.allocate(file, offset, bytes.len() as u64);
            allocated.map_err(|e| self.refused("write to", Path::new("."), e))?;
        }
        for (at, piece) in (offset..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
            file.write_all_at(piece, at).map_err(|e| self.refused("write to", Path::new("."), e))?;
        }
        self.unflushed += bytes.len() as u64;
        Ok(())
    }

    fn zero(&mut self, offset: u64, length: u64) -> Result<(), CopyError> {
        let file = self.part(offset, length)?;
        // Of the last page also what lies beyond the end: cleared in part only it would stay, and need memory that the source's does not.
        let length = match self.file {
            Some((_, size)) if offset + length == size => length.next_multiple_of(PAGE),
            _ => length,
        };
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)
            .map_err(|e| self.refused("clear a part of a file in", Path::new("."), e))
    }

    /// Allocates blocks without content, and leaves the size.
    fn allocate(&mut self, ino: u64, parts: &[(u64, u64)]) -> Result<(), CopyError> {
        if parts.is_empty() {
            return Ok(());
        }
        if self.node(ino)?.kind != Kind::File
            || parts.iter().any(|(offset, length)| offset.checked_add(*length).is_none())
        {
            return Err(nonsense("blocks of what is no file, or beyond any"));
        }
        let path = self.path(ino)?;
        let file = open_beneath(&self.root, &path, OFlags::WRONLY).map_err(|e| self.refused("open", &path, e))?;
        let file = File::from(file);
        for (offset, length) in parts {
            if let Some(charger) = &self.charger {
                let allocated = charger.allocate(&file, *offset, *length);
                allocated.map_err(|e| self.refused("allocate blocks of", &path, e))?;
            }
            // What is allocated already stays.
            fallocate(&file, FallocateFlags::KEEP_SIZE, *offset, *length)
                .map_err(|e| self.refused("allocate blocks of", &path, e))?;
        }
        Ok(())
    }

    /// Gives inodes their flags: nothing can be written to many of them afterwards.
    fn set_flags(&mut self) -> Result<(), CopyError> {
        for (ino, flags) in std::mem::take(&mut self.flags) {
            if !self.nodes.get(&ino).is_some_and(|node| matches!(node.kind, Kind::File | Kind::Directory)) {
                continue;
            }
            let path = self.path(ino)?;
            let file = open_beneath(&self.root, &path, OFlags::RDONLY).map_err(|e| self.refused("open", &path, e))?;
            let set = ioctl_getflags(&file).and_then(|others| ioctl_setflags(&file, others | flags));
            set.map_err(|e| self.refused("set the flags of", &path, e))?;
        }
        Ok(())
    }

    fn attributes(
        &mut self,
        ino: u64,
        (mode, uid, gid): (u32, u32, u32),
        (atime, mtime): (Time, Time),
        xattrs: Option<Vec<(Name, Name)>>,
    ) -> Result<(), CopyError> {
        let kind = self.node(ino)?.kind.clone();
        let (directory, name) = self.place(ino)?;
        let name = name.as_slice();
        let here = Path::new(OsStr::from_bytes(name));
        // The owner first: changing it takes some permissions and attributes away.
        chownat(&directory, name, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.refused("set the owner of", here, e))?;
        if !matches!(kind, Kind::Symlink { .. }) {
            chmodat(&directory, name, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())
                .map_err(|e| self.refused("set the permissions of", here, e))?;
        }
        if let Some(xattrs) = xattrs
            && matches!(kind, Kind::File | Kind::Directory)
        {
            let path = self.path(ino)?;
            let open = open_beneath(&self.root, &path, OFlags::RDONLY).map_err(|e| self.refused("open", &path, e))?;
            extend(&open, &xattrs).map_err(|e| self.refused("set the attributes of", &path, e))?;
        }
        let time = |(seconds, nanos): Time| Timespec { tv_sec: seconds, tv_nsec: nanos.min(999_999_999).into() };
        let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
        utimensat(&directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.refused("set the times of", here, e))
    }

    fn unpark(&mut self) -> Result<(), CopyError> {
        self.directory = None;
        let name = self.staging.take().ok_or_else(|| nonsense("nothing is parked"))?;
        // Fails if something is left in it.
        unlinkat(&self.root, name.as_slice(), AtFlags::REMOVEDIR)
            .map_err(|e| self.refused("remove", Path::new(OsStr::from_bytes(&name)), e))
    }

    fn end(&mut self, last: bool) -> Result<(), CopyError> {
        self.directory = None;
        if self.staging.is_some() {
            return Err(nonsense("the end of a mount in which something is parked"));
        }
        if last {
            self.ended = true;
            if self.limits.as_ref().is_some_and(|limits| limits.read_only) {
                self.set_flags()?;
            }
            self.limits.take().map_or(Ok(()), Limits::set)?;
        }
        Ok(())
    }
}

/// Gives an open file these extended attributes, and no others. Those of this copy are not the peer's to give.
fn extend(file: &OwnedFd, wanted: &[(Name, Name)]) -> rustix::io::Result<()> {
    let mut list = vec![0; 64 << 10];
    let length = flistxattr(file, list.as_mut_slice())?;
    for name in list[..length].split(|b| *b == 0).filter(|n| !n.is_empty() && !OWN_ATTRIBUTES.contains(n)) {
        if !wanted.iter().any(|(known, _)| known.0 == name) {
            fremovexattr(file, name)?;
        }
    }
    let carried = wanted.iter().filter(|(name, _)| !OWN_ATTRIBUTES.contains(&name.0.as_slice()));
    carried.into_iter().try_for_each(|(name, value)| fsetxattr(file, name.0.as_slice(), &value.0, XattrFlags::empty()))
}

/// A name that can be given to a file.
fn checked(name: Name) -> Result<Vec<u8>, CopyError> {
    let bytes = name.0;
    if bytes.is_empty()
        || bytes.len() > 255
        || bytes == b"."
        || bytes == b".."
        || bytes.iter().any(|b| matches!(b, b'/' | 0))
    {
        return Err(nonsense("a name that no file can have"));
    }
    Ok(bytes)
}
