//! What the tests of copied trees have in common: a picture to compare, a sink that applies at once, and chance.

#![allow(dead_code, missing_docs)]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, mknod};
use tranship_storage::copy::{Op, Replica, Sink};

/// Applies what is sent at once, and counts.
pub struct Direct<'a> {
    pub replica: &'a mut Replica,
    pub ops: usize,
}

impl Sink for Direct<'_> {
    fn op(&mut self, op: &Op) -> io::Result<()> {
        self.ops += 1;
        let text = serde_json::to_string(op).unwrap();
        self.replica.apply(serde_json::from_str(&text).unwrap()).map_err(io::Error::other)
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.replica.data(offset, bytes).map_err(io::Error::other)
    }
}

/// Everything that a program can see in a tree, by path; hard links by the first path of the inode.
pub fn picture(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut seen = BTreeMap::new();
    let mut inodes = BTreeMap::new();
    look(root, root, &mut seen, &mut inodes);
    seen
}

fn look(root: &Path, path: &Path, seen: &mut BTreeMap<PathBuf, String>, inodes: &mut BTreeMap<u64, PathBuf>) {
    let stat = fs::symlink_metadata(path).unwrap();
    let name = path.strip_prefix(root).unwrap().to_owned();
    let first = inodes.entry(stat.ino()).or_insert_with(|| name.clone()).clone();
    let content = match stat.file_type() {
        t if t.is_file() => blake3::hash(&fs::read(path).unwrap()).to_hex().to_string(),
        t if t.is_symlink() => format!("{:?}", fs::read_link(path).unwrap()),
        _ => String::new(),
    };
    let mut xattrs: Vec<_> = xattrs(path);
    xattrs.sort();
    let size = if stat.is_dir() { 0 } else { stat.size() };
    seen.insert(
        name,
        format!(
            "{:o} {}:{} {size} {} {}.{} {:x} first {first:?} {content} {xattrs:?}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.nlink(),
            stat.mtime(),
            stat.mtime_nsec(),
            stat.rdev()
        ),
    );
    if stat.is_dir() {
        let mut entries: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for entry in entries {
            look(root, &entry, seen, inodes);
        }
    }
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut list = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap_or(0);
    let names = list[..length].split(|b| *b == 0).filter(|n| !n.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 4096];
            let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
            (name.to_vec(), value[..length].to_vec())
        })
        .collect()
}

/// A small generator, so that a seed says everything.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// Does something to the tree; what cannot be done is not done.
    pub fn change(&mut self, root: &Path) {
        let mut paths = vec![PathBuf::new()];
        collect(root, Path::new(""), &mut paths);
        let pick = |chance: &mut Self| root.join(&paths[chance.below(paths.len() as u64) as usize]);
        let (one, two) = (pick(self), pick(self));
        let fresh = pick(self).join(format!("n{}", self.below(12)));
        let amount = self.below(200_000);
        // Each may fail, as a program's calls may.
        let _ = match self.below(16) {
            0 | 1 => fs::create_dir(&fresh),
            2 | 3 => fs::File::create_new(&fresh).and_then(|f| f.write_all_at(&vec![amount as u8; amount as usize], 0)),
            4 => symlink(&one, &fresh),
            5 => fs::hard_link(&one, &fresh),
            6 | 7 => fs::rename(&one, &fresh),
            8 => fs::rename(&one, &two),
            9 => rustix::fs::renameat_with(
                rustix::fs::CWD,
                &one,
                rustix::fs::CWD,
                &two,
                rustix::fs::RenameFlags::EXCHANGE,
            )
            .map_err(Into::into),
            10 => fs::remove_file(&one),
            11 if one != root => fs::remove_dir_all(&one),
            12 => fs::set_permissions(&one, fs::Permissions::from_mode(0o600 | (amount as u32 & 0o177))),
            13 => plain(&one).and_then(|f| f.set_len(amount * 3)),
            14 => plain(&one).and_then(|f| f.write_all_at(&[1, 2, 3], amount)),
            _ => mknod(&fresh, SFlag::S_IFIFO, Mode::S_IRUSR, 0).map_err(Into::into),
        };
    }
}

/// A regular file, for writing.
fn plain(path: &Path) -> io::Result<fs::File> {
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fs::File::options().write(true).open(path)
}

fn collect(root: &Path, at: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(at)).into_iter().flatten().flatten() {
        let path = at.join(entry.file_name());
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect(root, &path, paths);
        }
        paths.push(path);
    }
}
