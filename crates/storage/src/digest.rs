use std::collections::{BTreeMap, HashSet};
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::error::DEPTH_LIMIT;
use crate::{Root, StorageError, mounts};
use tranship_sys::threads::{self, Beside};

/// Names that a [`TreeDigest`] carries at most, so that it stays small on the wire.
const NAMES: usize = 4096;
const THREADS: usize = 2;

/// What two nodes compare to see that they hold the same files: a hash over the metadata of a whole tree, and the hashes
/// of its upper two levels, so that a difference can be named.
///
/// Each entry counts with its path, type, mode, owner, group, modification time in seconds, and by type its size, link
/// target or device number. What differs between equal trees on two hosts does not count: access and change times, inode
/// numbers, hard links, sizes of directories, and the modification time of the root itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeDigest {
    /// BLAKE3 of everything, in hexadecimal.
    pub hash: String,
    /// Number of entries, the root not counted.
    pub entries: u64,
    /// The entries of the root by name; `None` if there were too many.
    pub subtrees: Option<BTreeMap<String, Subtree>>,
}

/// An entry of the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subtree {
    /// First 64 bits of the hash of the entry and all below it, in hexadecimal.
    pub hash: String,
    /// The same for its own entries by name; `None` if there were too many, empty if it is no directory.
    pub entries: Option<BTreeMap<String, String>>,
}

impl TreeDigest {
    /// Where `other`, the destination's, differs from this one, the source's: one clause naming a path. `None` if they
    /// are equal.
    pub fn difference(&self, other: &TreeDigest) -> Option<String> {
        if self.hash == other.hash {
            return None;
        }
        let (Some(ours), Some(theirs)) = (&self.subtrees, &other.subtrees) else {
            return Some(format!("the trees differ ({} and {} entries)", self.entries, other.entries));
        };
        let Some((name, difference)) = first_difference(ours, theirs) else {
            return Some("owner or mode of the root directory differs".into());
        };
        let (a, b) = match difference {
            Difference::Missing(side) => return Some(format!("{name} is only on the {side}")),
            Difference::Value(a, b) => (a, b),
        };
        let (Some(a), Some(b)) = (&a.entries, &b.entries) else { return Some(format!("{name} differs")) };
        Some(match first_difference(a, b) {
            Some((child, Difference::Missing(side))) => format!("{name}/{child} is only on the {side}"),
            Some((child, Difference::Value(..))) => format!("{name}/{child} differs"),
            None if a.is_empty() => format!("{name} differs"),
            None => format!("owner, mode or modification time of {name} differs"),
        })
    }
}

enum Difference<'a, T> {
    Missing(&'static str),
    Value(&'a T, &'a T),
}

fn first_difference<'a, T: PartialEq>(
    ours: &'a BTreeMap<String, T>,
    theirs: &'a BTreeMap<String, T>,
) -> Option<(&'a str, Difference<'a, T>)> {
    let ours_only = ours.keys().find(|k| !theirs.contains_key(*k)).map(|k| (k, Difference::Missing("source")));
    let theirs_only =
        || theirs.keys().find(|k| !ours.contains_key(*k)).map(|k| (k, Difference::Missing("destination")));
    let differs =
        || ours.iter().find_map(|(k, a)| theirs.get(k).filter(|b| *b != a).map(|b| (k, Difference::Value(a, b))));
    ours_only.or_else(theirs_only).or_else(differs).map(|(k, d)| (k.as_str(), d))
}

/// Computes the digest of the tree at `root`. Does not descend into what is mounted below it: of a mount point only its
/// name counts.
///
/// `ignore` names paths relative to the root that do not count at all, such as mount points that an engine makes in the
/// root filesystem; the modification time of the directory that one is in does not count either, since making it
/// changes that.
///
/// # Errors
/// The system's refusal; [`StorageError::TooDeep`]. Entries that vanish meanwhile do not count.
pub fn digest(root: &Path, ignore: &[PathBuf]) -> Result<TreeDigest, StorageError> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC;
    let seen = open(root, flags, Mode::empty()).map_err(|e| StorageError::refused("open the directory", root, e))?;
    let clone = Root::clone_of(&seen).map_err(|e| StorageError::refused("look at the mount of", root, e))?;
    let root_fd = clone.open(".", OFlags::DIRECTORY);
    let root_fd = root_fd.map_err(|e| StorageError::refused("open the directory", root, e))?;
    let stat = fstat(&root_fd).map_err(|e| StorageError::refused("look at", root, e))?;
    let walk = Walk::new(clone, root, ignore)?;

    // The upper two levels are read here, all trees below them by several threads; then they are put together.
    let mut level_one = Vec::new();
    let mut level_two = Vec::new();
    for entry in walk.list(&root_fd, Path::new(""))? {
        let first = level_two.len();
        if let Some(name) = entry.directory()
            && let Some(fd) = walk.open(&root_fd, name, &entry.path)?
        {
            level_two.extend(walk.list(&fd, &entry.path)?);
        }
        level_one.push((entry, first..level_two.len()));
    }
    let below = walk.run(&root_fd, &level_two)?;

    let mut total = Sum::default();
    let mut subtrees = BTreeMap::new();
    let mut names = level_one.len();
    for (entry, range) in &level_one {
        let mut sum = Sum::default();
        let mut entries = BTreeMap::new();
        for (child, below) in level_two[range.clone()].iter().zip(&below[range.clone()]) {
            entries.insert(child.shown(), short(&child.hash(below)));
            sum.add(child, below);
        }
        names += entries.len();
        let hash = entry.hash(&sum);
        subtrees.insert(entry.shown(), Subtree { hash: short(&hash), entries: (names <= NAMES).then_some(entries) });
        total.add(entry, &sum);
    }
    let mut hasher = blake3::Hasher::new();
    for value in [stat.st_mode, stat.st_uid, stat.st_gid] {
        hasher.update(&value.to_le_bytes());
    }
    hasher.update(blake3::hash(&total.hashes).as_bytes());
    Ok(TreeDigest {
        hash: hasher.finalize().to_hex().to_string(),
        entries: total.entries,
        subtrees: (level_one.len() <= NAMES).then_some(subtrees),
    })
}

fn short(hash: &blake3::Hash) -> String {
    hash.to_hex()[..16].to_owned()
}

/// What is below a directory: its entries in the order of their names.
#[derive(Default)]
struct Sum {
    /// Their hashes one after the other. No hasher here: it takes 2 KiB, and there is one of these per level on the stack.
    hashes: Vec<u8>,
    entries: u64,
}

impl Sum {
    fn add(&mut self, entry: &Entry, below: &Sum) {
        self.hashes.extend_from_slice(entry.hash(below).as_bytes());
        self.entries += 1 + below.entries;
    }
}

struct Entry {
    name: CString,
    path: PathBuf,
    /// Everything that counts of it, its name first.
    record: Vec<u8>,
    is_directory: bool,
}

impl Entry {
    /// Its name if it is to be descended into.
    fn directory(&self) -> Option<&CStr> {
        self.is_directory.then_some(self.name.as_c_str())
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(self.name.to_bytes()).into_owned()
    }

    #[inline(never)]
    fn hash(&self, below: &Sum) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.record);
        if self.is_directory {
            hasher.update(blake3::hash(&below.hashes).as_bytes());
        }
        hasher.finalize()
    }
}

struct Walk {
    clone: Root,
    root: PathBuf,
    mounts: HashSet<PathBuf>,
    ignore: HashSet<PathBuf>,
    /// Directories whose modification time does not count.
    timeless: HashSet<PathBuf>,
}

impl Walk {
    fn new(clone: Root, root: &Path, ignore: &[PathBuf]) -> Result<Self, StorageError> {
        let real = root.canonicalize().map_err(|e| StorageError::refused("find", root, e))?;
        let mounts = mounts::below(&real)?;
        let mounts = mounts.iter().filter_map(|m| Some(m.strip_prefix(&real).ok()?.to_owned())).collect();
        let relative =
            |path: &PathBuf| -> PathBuf { path.components().filter(|c| matches!(c, Component::Normal(_))).collect() };
        let ignore: HashSet<PathBuf> = ignore.iter().map(relative).collect();
        let timeless = ignore.iter().filter_map(|p| p.parent().map(Path::to_owned)).collect();
        Ok(Self { clone, root: real, mounts, ignore, timeless })
    }

    fn refused(&self, what: &'static str, path: &Path, e: Errno) -> StorageError {
        StorageError::refused(what, &self.root.join(path), e)
    }

    /// Opens a directory; `None` if it has vanished.
    fn open(&self, parent: &impl AsFd, name: &CStr, path: &Path) -> Result<Option<OwnedFd>, StorageError> {
        match self.clone.open_in(parent, name, OFlags::DIRECTORY) {
            Ok(fd) => Ok(Some(fd)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(self.refused("open the directory", path, Errno::from_raw(e.raw_os_error()))),
        }
    }

    /// The entries of a directory, sorted by name.
    fn list(&self, directory: &OwnedFd, path: &Path) -> Result<Vec<Entry>, StorageError> {
        let again = directory.try_clone().map_err(|e| StorageError::refused("read the directory", path, e))?;
        let mut reader = Dir::from_fd(again).map_err(|e| self.refused("read the directory", path, e))?;
        let mut names = Vec::new();
        for entry in reader.iter() {
            let entry = entry.map_err(|e| self.refused("read the directory", path, e))?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort_unstable();
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            let path = path.join(OsStr::from_bytes(name.to_bytes()));
            if self.ignore.contains(&path) {
                continue;
            }
            match fstatat(directory, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(stat) => entries.extend(self.entry(directory, name, path, &stat)?),
                Err(Errno::ENOENT) => {}
                Err(e) => return Err(self.refused("look at", &path, e)),
            }
        }
        Ok(entries)
    }

    fn entry(
        &self,
        parent: &OwnedFd,
        name: CString,
        path: PathBuf,
        stat: &FileStat,
    ) -> Result<Option<Entry>, StorageError> {
        let kind = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
        let mut record = Vec::with_capacity(64 + name.as_bytes().len());
        let mut put = |bytes: &[u8]| record.extend_from_slice(bytes);
        put(&(name.as_bytes().len() as u32).to_le_bytes());
        put(name.as_bytes());
        if self.mounts.contains(&path) {
            put(b"mount point");
            return Ok(Some(Entry { name, path, record, is_directory: false }));
        }
        put(&stat.st_mode.to_le_bytes());
        put(&stat.st_uid.to_le_bytes());
        put(&stat.st_gid.to_le_bytes());
        let is_directory = kind == SFlag::S_IFDIR;
        let mtime = if is_directory && self.timeless.contains(&path) { 0 } else { stat.st_mtime };
        put(&mtime.to_le_bytes());
        match kind {
            SFlag::S_IFREG => put(&stat.st_size.to_le_bytes()),
            SFlag::S_IFCHR | SFlag::S_IFBLK => put(&stat.st_rdev.to_le_bytes()),
            SFlag::S_IFLNK => match readlinkat(parent, name.as_c_str()) {
                Ok(target) => put(&target.into_vec()),
                Err(Errno::ENOENT) => return Ok(None),
                Err(e) => return Err(self.refused("read the symlink", &path, e)),
            },
            _ => {}
        }
        Ok(Some(Entry { name, path, record, is_directory }))
    }

    /// Everything below `entry`, which is opened as `name` in `parent`.
    fn below(&self, parent: &OwnedFd, name: &CStr, entry: &Entry, depth: usize) -> Result<Sum, StorageError> {
        let mut sum = Sum::default();
        if !entry.is_directory {
            return Ok(sum);
        }
        if depth == DEPTH_LIMIT {
            return Err(StorageError::TooDeep { path: self.root.join(&entry.path), limit: DEPTH_LIMIT });
        }
        let Some(fd) = self.open(parent, name, &entry.path)? else { return Ok(sum) };
        for child in self.list(&fd, &entry.path)? {
            let below = self.below(&fd, &child.name, &child, depth + 1)?;
            sum.add(&child, &below);
        }
        Ok(sum)
    }

    /// What is below each of the entries, found by several threads.
    fn run(&self, root: &OwnedFd, entries: &[Entry]) -> Result<Vec<Sum>, StorageError> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(entry) = entries.get(index) else { return Ok(found) };
                let path = CString::new(entry.path.as_os_str().as_bytes()).unwrap_or_default();
                found.push((index, self.below(root, &path, entry, 2)?));
            }
        };
        let found = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| threads::beside(scope, "digest", work)).collect();
            threads.into_iter().map(Beside::join).collect::<Result<Vec<_>, _>>()
        })?;
        let mut found: Vec<(usize, Sum)> = found.into_iter().flatten().collect();
        found.sort_unstable_by_key(|(index, _)| *index);
        Ok(found.into_iter().map(|(_, sum)| sum).collect())
    }
}
