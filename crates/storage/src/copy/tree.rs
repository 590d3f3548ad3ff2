//! A filesystem's names and inodes, as they are at one moment, or nearly so where it is in use.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, IFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2, readlinkat, statx,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::CopyError;
use super::op::{Kind, Name, Time};
use super::suspects::Device;
use crate::Root;
use crate::error::DEPTH_LIMIT;

/// Longest path that the kernel takes in one call, with some room.
const PATH_LIMIT: usize = 4000;

const SUBVOLUME: &str =
    "is a subvolume of its own, whose files have the same numbers as others; mount it as a volume of its own";

/// Flags of inodes that statx(2) shows. They have the same numbers there as in ioctl_iflags(2).
pub(crate) const FLAGS: IFlags = IFlags::IMMUTABLE.union(IFlags::APPEND).union(IFlags::NODUMP);

/// What is known of an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// Those of [`FLAGS`] that are set.
    pub flags: u32,
    /// One of its names: directory, and name there.
    first: (u64, Vec<u8>),
}

impl Node {
    /// Whether anything that a program could see has changed, but for when it was last read.
    pub fn differs(&self, other: &Node) -> bool {
        let visible = |n: &Node| (n.mode, n.uid, n.gid, n.size, n.mtime, n.ctime);
        visible(self) != visible(other)
    }

    /// Whether its content may have changed, as far as times tell.
    pub fn content_differs(&self, other: &Node) -> bool {
        (self.size, self.mtime, self.ctime) != (other.size, other.mtime, other.ctime)
    }
}

/// A name in a directory.
pub(crate) type Entry = (u64, Vec<u8>);

/// What is known from an earlier look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before<'a> {
    pub tree: &'a Tree,
    /// Inodes whose ctime was too young to be believed then.
    pub doubted: &'a HashSet<u64>,
}

impl Before<'_> {
    /// The names in a directory, if they cannot have changed: whoever makes or removes one changes the directory's ctime.
    fn names(&self, now: &Node, ino: u64) -> Option<Vec<Vec<u8>>> {
        let was = self.tree.nodes.get(&ino)?;
        if was.kind != Kind::Directory || was.content_differs(now) || self.doubted.contains(&ino) {
            return None;
        }
        let first = (ino, Vec::new());
        let names = self.tree.names.range(first..).take_while(|((directory, _), _)| *directory == ino);
        Some(names.map(|((_, name), _)| name.clone()).collect())
    }
}

/// How a tree is looked at.
struct Walk<'a> {
    root: &'a Root,
    before: Option<&'a Before<'a>>,
}

/// The names in an open directory.
fn listed(directory: OwnedFd) -> rustix::io::Result<(OwnedFd, Vec<Vec<u8>>)> {
    // Not `Dir::read_from`, which opens the directory again.
    let copy = fcntl_dupfd_cloexec(&directory, 0)?;
    let mut names = Vec::new();
    for entry in Dir::new(copy)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(name.to_vec());
        }
    }
    Ok((directory, names))
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub root: u64,
    pub nodes: HashMap<u64, Node>,
    /// What is called by each name.
    pub names: BTreeMap<Entry, u64>,
    /// The names, directories before what is in them.
    pub order: Vec<Entry>,
    pub device: Device,
    /// Bytes of its disk that all of it takes.
    pub bytes: u64,
    /// Most inodes that it may have.
    pub limit: usize,
}

pub(crate) fn look(directory: impl AsFd, name: &[u8]) -> rustix::io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::empty() };
    statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
}

/// How a file of the container is opened: without a trace in its times, and never beyond the filesystem.
pub(crate) fn open_beneath(
    root: impl AsFd,
    path: impl rustix::path::Arg,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    // openat2(2) takes nothing else with O_PATH.
    let never_waits = match flags.contains(OFlags::PATH) {
        true => OFlags::empty(),
        false => OFlags::NONBLOCK | OFlags::NOCTTY,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | never_waits;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(root, path, flags, Mode::empty(), within)
}

impl Tree {
    /// Looks at everything below `root`, the root of a filesystem's clone, on which nothing is mounted. `point` is for messages.
    /// Entries that come, go or move meanwhile may be missed; a later look finds them.
    pub fn read(root: &Root, point: &Path, limit: usize) -> Result<Self, CopyError> {
        Self::read_again(root, point, limit, None)
    }

    /// The same, where some is known from before: a directory that has not changed since is not opened.
    pub fn read_again(root: &Root, point: &Path, limit: usize, before: Option<&Before<'_>>) -> Result<Self, CopyError> {
        let mut tree = Self { limit, ..Self::default() };
        let stat = look(root, b"").map_err(|e| CopyError::refused("look at", point, e))?;
        tree.root = stat.stx_ino;
        tree.device = (stat.stx_dev_major, stat.stx_dev_minor);
        tree.nodes.insert(tree.root, node(&stat, Kind::Directory, (0, Vec::new())));
        let mut at = point.to_owned();
        tree.descend(&Walk { root, before }, root.as_fd(), (b".", stat.stx_ino), &mut at, 0)?;
        Ok(tree)
    }

    /// Looks at what is in the directory `name` of `parent`, whose number is `ino` and which is called `at`.
    fn descend(
        &mut self,
        walk: &Walk<'_>,
        parent: BorrowedFd<'_>,
        (name, ino): (&[u8], u64),
        at: &mut PathBuf,
        depth: usize,
    ) -> Result<(), CopyError> {
        let too_much = |what: String| CopyError::TooMuch { point: at.clone(), what };
        if depth == DEPTH_LIMIT || at.as_os_str().len() > PATH_LIMIT {
            return Err(too_much(format!("is nested deeper than {DEPTH_LIMIT} levels or {PATH_LIMIT} bytes")));
        }
        let known = walk.before.and_then(|before| before.names(&self.nodes[&ino], ino));
        let opened = match known {
            Some(_) => open_beneath(parent, name, OFlags::PATH | OFlags::DIRECTORY),
            None => walk.root.open_in(parent, name, OFlags::DIRECTORY),
        };
        let directory = match opened {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if depth > 0 => return Ok(()),
            Err(e) => return Err(CopyError::refused("open", at, e)),
        };
        let (directory, names) = match known {
            Some(names) => (directory, names),
            None => listed(directory).map_err(|e| CopyError::refused("read the directory", at, e))?,
        };
        let mut below = Vec::new();
        for name in names {
            let stat = match look(&directory, &name) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(CopyError::refused("look at", &at.join(OsStr::from_bytes(&name)), e)),
            };
            if (stat.stx_dev_major, stat.stx_dev_minor) != self.device {
                return Err(CopyError::Unfit { path: at.join(OsStr::from_bytes(&name)), why: SUBVOLUME });
            }
            let kind = match kind(&directory, &name, &stat) {
                Ok(kind) => kind,
                Err(Errno::NOENT | Errno::INVAL) => continue,
                Err(e) => return Err(CopyError::refused("read", &at.join(OsStr::from_bytes(&name)), e)),
            };
            let number = stat.stx_ino;
            let is_directory = kind == Kind::Directory;
            if self.nodes.get(&number).is_some_and(|seen| is_directory || seen.kind != kind) {
                // A directory that was moved meanwhile, and has been seen where it was; or what has got the number of something that is gone.
                continue;
            }
            let entry = (ino, name);
            self.nodes.entry(number).or_insert_with(|| {
                self.bytes += stat.stx_blocks * 512;
                node(&stat, kind, entry.clone())
            });
            self.names.insert(entry.clone(), number);
            if is_directory {
                below.push((entry.1.clone(), number));
            }
            self.order.push(entry);
            if self.nodes.len() > self.limit {
                return Err(CopyError::TooMuch {
                    point: at.clone(),
                    what: format!("and what is beside it are more than {} files", self.limit),
                });
            }
        }
        for (name, number) in below {
            at.push(OsStr::from_bytes(&name));
            self.descend(walk, directory.as_fd(), (&name, number), at, depth + 1)?;
            at.pop();
        }
        Ok(())
    }

    /// The inodes of its regular files.
    pub fn files(&self) -> impl Iterator<Item = u64> {
        self.nodes.iter().filter(|(_, node)| node.kind == Kind::File).map(|(ino, _)| *ino)
    }

    /// Where an inode is, from the root on; `.` for the root.
    pub fn path(&self, ino: u64) -> PathBuf {
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut at = ino;
        while at != self.root
            && let Some(node) = self.nodes.get(&at)
            && parts.len() <= DEPTH_LIMIT
        {
            parts.push(&node.first.1);
            at = node.first.0;
        }
        let mut path = PathBuf::from(".");
        path.extend(parts.into_iter().rev().map(OsStr::from_bytes));
        path
    }
}

fn node(stat: &Statx, kind: Kind, first: Entry) -> Node {
    let time = |t: rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
    Node {
        kind,
        mode: u32::from(stat.stx_mode) & 0o7777,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        // That of a directory is its filesystem's business.
        size: if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::RegularFile { stat.stx_size } else { 0 },
        atime: time(stat.stx_atime),
        mtime: time(stat.stx_mtime),
        ctime: time(stat.stx_ctime),
        flags: (stat.stx_attributes.bits() & stat.stx_attributes_mask.bits()) as u32 & FLAGS.bits(),
        first,
    }
}

fn kind(directory: impl AsFd, name: &[u8], stat: &Statx) -> rustix::io::Result<Kind> {
    let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
    Ok(match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::Directory => Kind::Directory,
        FileType::RegularFile => Kind::File,
        FileType::Symlink => Kind::Symlink { target: Name(readlinkat(directory, name, Vec::new())?.into_bytes()) },
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::Character { major, minor },
        FileType::BlockDevice => Kind::Block { major, minor },
        FileType::Unknown => return Err(Errno::INVAL),
    })
}
