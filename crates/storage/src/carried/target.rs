//! The destination's half: where a tree arrives, and how it takes its place.
//!
//! ```text
//!              stage, open_all    place            │ settle     │ undo, before and after place
//!  its place:  old, or an empty   new, marked      │ new        │ old or none, as it was
//!  beside it:  new, marked        old, or an empty │ (removed)  │ (removed)
//! ```
//!
//! Engines want the directory to be there before they restore: where there is none, an empty one keeps the place.
//!
//! Each step can be repeated, by an agent that knows no more than the paths and the migration: which of the directories is which,
//! their marks say.

use std::ffi::CString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::statvfs::{FsFlags, statvfs};
use rustix::fs::{
    CWD, Mode, OFlags, RenameFlags, ResolveFlags, XattrFlags, fgetxattr, fsetxattr, lgetxattr, lremovexattr, lsetxattr,
    openat2, renameat_with,
};
use rustix::io::Errno;
use tranship_types::{CarriedTree, TreeKind};

use super::source::{open, open_copy};
use super::{MARK, MAX_FILES};
use crate::copy::{Copy, CopyError, Replica, Tree};
use crate::remove::remove_if;
use crate::{Root, StorageError};

/// The place of one tree on the node that it comes to.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its directory in the end.
    path: PathBuf,
    /// The directory beside it in which it arrives; none for a writable layer, which goes with its container.
    staging: Option<PathBuf>,
    /// The mark of the new one.
    arrived: String,
    /// The mark of the empty one.
    keeper: String,
    /// The mark of what was replaced, once it is to be removed.
    replaced: String,
    /// The place is a volume, which its engine may fill with files of the image when it makes the container.
    filled_by_engine: bool,
}

impl Target {
    /// The place of a tree in the directory `path`, for a migration.
    pub fn new(tree: &CarriedTree, path: PathBuf, migration: &str) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let beside = path.with_file_name(format!(".{name}.tranship-{migration}"));
        let staging = Some(beside).filter(|_| tree.kind != TreeKind::WritableLayer);
        let [arrived, keeper, replaced] = ["arrived", "keeper", "replaced"].map(|what| format!("{what} {migration}"));
        Self { path, staging, arrived, keeper, replaced, filled_by_engine: tree.kind == TreeKind::Volume }
    }

    /// What stands in the way of a tree's taking this place: one clause, and a remedy.
    ///
    /// # Errors
    /// If it cannot be looked at.
    pub fn obstacle(&self) -> Result<Option<(String, &'static str)>, CopyError> {
        if self.staging.is_none() {
            return Ok(None);
        }
        let path = self.path.display();
        if let Err(CopyError::Refused { why, .. }) = Held::of(&self.path, &self.path)
            && why.raw_os_error() == Some(Errno::LOOP.raw_os_error())
        {
            return Ok(Some((format!("{path} leads through a symbolic link"), "name the directory that it leads to")));
        }
        match self.path.symlink_metadata() {
            Ok(found) if !found.is_dir() => {
                return Ok(Some((format!("{path} is there, but is no directory"), "remove it")));
            }
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let parent = self.path.parent().unwrap_or(&self.path);
                let missing = || (format!("{} does not exist", parent.display()), "make that directory");
                return Ok((!parent.is_dir()).then(missing));
            }
            Err(e) => return Err(CopyError::refused("look at", &self.path, e)),
        }
        if super::mounted_below(&self.path)
            .map_err(|e| CopyError::refused("look at", &self.path, io::Error::other(e)))?
            .is_some()
            || super::is_mount_point(&self.path).is_ok_and(|is_one| is_one)
        {
            return Ok(Some((format!("{path} is a mount point, or has one below it"), "unmount it")));
        }
        let root = open(&self.path)?;
        let tree = Tree::read(&root, &self.path, MAX_FILES)?;
        if tree.names.is_empty() {
            return Ok(None);
        }
        let remedy = "move it away or remove it there, if nobody needs it";
        let Some(left) = mark_of(&self.path).as_deref().and_then(left_at) else {
            return Ok(Some((format!("{path} exists already, with files in it"), remedy)));
        };
        let changed = changed_since(&tree, left);
        Ok(changed.then(|| (format!("{path}, the copy of an earlier move, was changed since"), remedy)))
    }

    /// Makes the empty directory that the tree arrives in; a writable layer's is the engine's.
    ///
    /// # Errors
    /// If that is refused; if something of that name is there.
    pub fn stage(&self) -> Result<(), CopyError> {
        let Some(staging) = &self.staging else { return Ok(()) };
        let held = Held::of(&self.path, staging)?;
        let make = |directory: &Path| DirBuilder::new().mode(0o700).create(directory);
        make(&held.staging).map_err(|e| CopyError::refused("make the directory", staging, e))?;
        mark(&held.staging, &self.arrived).map_err(|e| unmarked(staging, e))?;
        match make(&held.place) {
            Ok(()) => mark(&held.place, &self.keeper).map_err(|e| unmarked(&self.path, e)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(CopyError::refused("make the directory", &self.path, e)),
        }
    }

    /// Opens the directory that the tree arrives in. A writable layer's is emptied.
    fn open(&self, point: &Path) -> Result<Copy, CopyError> {
        if self.staging.is_none() {
            crate::remove::empty(&self.path).map_err(|e| storage(&self.path, e))?;
        }
        let directory = self.staging.as_ref().unwrap_or(&self.path);
        Ok(Copy::new(open_copy(directory)?, point.to_owned(), MAX_FILES, None))
    }

    /// Lets `trees` arrive in the directories that were made for them, one for each of `targets`. An engine must have begun with
    /// the container, and nothing lie over its layer: what it writes there when it begins is on the source as well, and is
    /// removed here.
    ///
    /// # Errors
    /// If that is refused.
    pub fn open_all(targets: &[Self], trees: &[CarriedTree]) -> Result<Replica, CopyError> {
        let copies = targets.iter().zip(trees).map(|(target, tree)| target.open(&tree.path));
        Ok(Replica::new(copies.collect::<Result<_, _>>()?))
    }

    /// Whether the new one has taken its place.
    pub fn is_placed(&self) -> bool {
        is_marked(&self.path, &self.arrived)
    }

    /// Gives the complete tree its place. What is there gets the other's.
    ///
    /// # Errors
    /// If that is refused.
    pub fn place(&self) -> Result<(), CopyError> {
        let Some(staging) = &self.staging else { return Ok(()) };
        let held = Held::of(&self.path, staging)?;
        if is_marked(&held.place, &self.arrived) {
            return Ok(());
        }
        let refused = |e: io::Error| CopyError::refused("put the files in their place,", &self.path, e);
        if !is_marked(&held.staging, &self.arrived) {
            return Err(refused(io::Error::other("what is in its place is not what has arrived")));
        }
        held.exchange().map_err(|e| refused(e.into()))
    }

    /// After the decision: what the tree has replaced is removed, and nothing tells any more of the move. What it has replaced stays, and
    /// is named, if files were put there since it was looked at ([`Target::obstacle`]); in a volume these are the engine's.
    ///
    /// # Errors
    /// If that is refused.
    pub fn settle(&self) -> Result<Option<PathBuf>, CopyError> {
        let Some(staging) = &self.staging else { return Ok(None) };
        let Some(held) = self.held(staging)? else { return Ok(None) };
        if !is_marked(&held.place, &self.arrived) {
            return Ok(None);
        }
        let is_keeper = |directory: &OwnedFd| has_mark(directory, &self.keeper) && is_empty(directory);
        let may_go = |directory: &OwnedFd| {
            self.filled_by_engine
                || is_keeper(directory)
                || is_empty(directory)
                || was_left(directory, staging).is_ok_and(|was_left| was_left)
        };
        // What it was cannot be seen any more when a part of it is removed.
        let is_replaceable = |directory: &OwnedFd| {
            has_mark(directory, &self.replaced)
                || may_go(directory)
                    && fsetxattr(directory, MARK, self.replaced.as_bytes(), XattrFlags::empty()).is_ok()
        };
        let removed = held.remove(staging, is_replaceable)?;
        match lremovexattr(&held.place, MARK) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(e) => return Err(CopyError::refused("remove the mark of", &self.path, e)),
        }
        Ok((!removed).then(|| staging.clone()))
    }

    /// Takes everything back. What this move has not made stays.
    ///
    /// # Errors
    /// If that is refused.
    pub fn undo(&self) -> Result<(), CopyError> {
        let Some(staging) = &self.staging else { return Ok(()) };
        let Some(held) = self.held(staging)? else { return Ok(()) };
        if is_marked(&held.place, &self.arrived) {
            held.exchange().map_err(|e| CopyError::refused("take back", &self.path, e))?;
        }
        if is_marked(&held.place, &self.keeper) {
            std::fs::remove_dir(&held.place).map_err(|e| CopyError::refused("remove", &self.path, e))?;
        }
        if !held.remove(staging, |directory| has_mark(directory, &self.arrived))? {
            // It was to be marked next, and is empty then; else it is not this move's.
            let _ = std::fs::remove_dir(&held.staging);
        }
        Ok(())
    }

    /// Removes what was copied, where nobody knows any more how the move ended: the copy as long as it has not taken its place,
    /// and the marks where it has and what it has replaced is gone. What was there before the move is never removed.
    ///
    /// # Errors
    /// If that is refused.
    pub fn discard(&self) -> Result<(), CopyError> {
        let Some(staging) = &self.staging else { return Ok(()) };
        if self.is_placed() {
            return if staging.exists() && !is_marked(staging, &self.replaced) {
                Ok(())
            } else {
                self.settle().map(drop)
            };
        }
        if is_marked(staging, &self.arrived) {
            return self.undo();
        }
        // It was to be marked next; else it is not what has arrived.
        std::fs::remove_dir(staging).or(Ok(()))
    }

    /// Place and staging; `None` where the directory that both were in is gone.
    fn held(&self, staging: &Path) -> Result<Option<Held>, CopyError> {
        match Held::of(&self.path, staging) {
            Err(_) if !self.path.parent().is_some_and(Path::exists) => Ok(None),
            held => held.map(Some),
        }
    }

    /// The directory beside its place in which the tree arrives; none for a writable layer.
    pub fn staging(&self) -> Option<&Path> {
        self.staging.as_deref()
    }

    /// Where the tree is at the end.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What a filesystem has to spare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Which filesystem (`st_dev`).
    pub device: u64,
    /// Bytes.
    pub bytes: u64,
    /// Nothing can be written to it.
    pub read_only: bool,
}

/// The room for a directory that may have to be made yet.
///
/// # Errors
/// If its filesystem cannot be looked at.
pub fn room(path: &Path) -> Result<Room, CopyError> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(path);
    let refused = |e: io::Error| CopyError::refused("look at the filesystem of", existing, e);
    let device = existing.metadata().map_err(refused)?.dev();
    let found = statvfs(existing).map_err(|e| refused(e.into()))?;
    let bytes = found.blocks_available() * found.fragment_size();
    Ok(Room { device, bytes, read_only: found.flags().contains(FsFlags::ST_RDONLY) })
}

fn storage(path: &Path, error: StorageError) -> CopyError {
    match error {
        StorageError::Refused { what, path, why } => CopyError::Refused { what, path, why },
        other => CopyError::refused("remove", path, io::Error::other(other)),
    }
}

/// A tree's place and the directory beside it, by the directory that both are in: whoever may write to one above cannot have others
/// taken for them.
struct Held {
    parent: OwnedFd,
    name: CString,
    place: PathBuf,
    staging: PathBuf,
}

impl Held {
    fn of(path: &Path, staging: &Path) -> Result<Self, CopyError> {
        let (directory, invalid) = (path.parent().unwrap_or(path), || io::Error::from(io::ErrorKind::InvalidInput));
        let refused = |e: io::Error| CopyError::refused("open the directory", directory, e);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = openat2(CWD, directory, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        let parent = parent.map_err(|e| refused(e.into()))?;
        let names = (path.file_name(), staging.file_name());
        let (Some(place), Some(beside)) = names else { return Err(refused(invalid())) };
        let name = CString::new(beside.as_encoded_bytes()).map_err(|_| refused(invalid()))?;
        let within = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd()));
        Ok(Self { name, place: within.join(place), staging: within.join(beside), parent })
    }

    fn exchange(&self) -> rustix::io::Result<()> {
        renameat_with(CWD, &self.staging, CWD, &self.place, RenameFlags::EXCHANGE)
    }

    /// Removes the directory beside the place, which is at `path`, if it is meant. False: it is not, and stays.
    fn remove(&self, path: &Path, is_meant: impl FnOnce(&OwnedFd) -> bool) -> Result<bool, CopyError> {
        remove_if(path, &self.parent, &self.name, is_meant).map_err(|e| storage(path, e))
    }
}

fn mark(directory: &Path, text: &str) -> rustix::io::Result<()> {
    lsetxattr(directory, MARK, text.as_bytes(), XattrFlags::empty())
}

fn unmarked(directory: &Path, error: Errno) -> CopyError {
    CopyError::refused("set an extended attribute (which its filesystem must have) of", directory, error)
}

/// The mark of what is at a path, by its name: a symbolic link is not followed.
fn mark_of(path: &Path) -> Option<String> {
    text_of(|value| lgetxattr(path, MARK, value))
}

/// The mark of an open directory.
fn mark_on(directory: &OwnedFd) -> Option<String> {
    text_of(|value| fgetxattr(directory, MARK, value))
}

fn text_of(read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>) -> Option<String> {
    let mut value = vec![0; 256];
    let length = read(&mut value).ok()?;
    value.truncate(length);
    String::from_utf8(value).ok()
}

fn is_marked(path: &Path, text: &str) -> bool {
    mark_of(path).is_some_and(|mark| mark == text)
}

fn has_mark(directory: &OwnedFd, text: &str) -> bool {
    mark_on(directory).is_some_and(|mark| mark == text)
}

fn is_empty(directory: &OwnedFd) -> bool {
    let named = |entry: rustix::io::Result<rustix::fs::DirEntry>| {
        entry.map_or(true, |entry| !matches!(entry.file_name().to_bytes(), b"." | b".."))
    };
    rustix::fs::Dir::read_from(directory).is_ok_and(|entries| !entries.into_iter().any(named))
}

/// Whether a directory is the copy that an earlier move has left, and was not changed since; `path` is where it is.
fn was_left(directory: &OwnedFd, path: &Path) -> Result<bool, CopyError> {
    let Some(time) = mark_on(directory).as_deref().and_then(left_at) else { return Ok(false) };
    let root = Root::clone_of(directory).map_err(|e| CopyError::refused("open the directory", path, e))?;
    Ok(!changed_since(&Tree::read(&root, path, MAX_FILES)?, time))
}

/// Whether something of a tree was changed after this time.
fn changed_since(tree: &Tree, left: (i64, u32)) -> bool {
    let time = |(ino, node): (&u64, &crate::copy::Node)| if *ino == tree.root { node.mtime } else { node.ctime };
    tree.nodes.iter().any(|node| time(node) > left)
}

/// Until when the tree that has left this directory may have changed it.
fn left_at(mark: &str) -> Option<(i64, u32)> {
    let (_, time) = mark.strip_prefix("left ")?.split_once(' ')?;
    let (seconds, nanos) = time.split_once('.')?;
    Some((seconds.parse().ok()?, nanos.parse().ok()?))
}

/// Marks the directory of a node that a container with its files has left: it may be replaced when they come back.
///
/// # Errors
/// If that is refused.
pub fn leave(path: &Path, migration: &str) -> Result<(), CopyError> {
    // The filesystem's own clock says when that is: by it the times of files are told.
    let mark = |text: &str| mark(path, text).map_err(|e| unmarked(path, e));
    mark("leaving")?;
    let now = crate::copy::look(CWD, path.as_os_str().as_encoded_bytes())
        .map_err(|e| CopyError::refused("look at", path, e))?
        .stx_ctime;
    mark(&format!("left {migration} {}.{}", now.tv_sec, now.tv_nsec))
}
