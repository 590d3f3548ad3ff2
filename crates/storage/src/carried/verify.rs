//! Whether two trees are equal in everything that a program can see of them but access and change times.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::OFlags;

use super::MAX_FILES;
use crate::Root;
use crate::copy::{CopyError, Kind, Tree, extended};

/// Names that are told of a tree at most; with more, they are summed up in groups.
const NAMES: usize = 4096;

/// BLAKE3 of everything below each entry of a tree's root, in hexadecimal, by its name; `.` is the root itself.
pub type Digests = BTreeMap<String, String>;

/// Reads a whole tree. `point` is for messages; `stops` is asked after each piece of a file whether the digests are still waited for.
///
/// # Errors
/// If something cannot be read; if it was stopped.
pub fn digests(root: &Root, point: &Path, stops: &dyn Fn() -> bool) -> Result<Digests, CopyError> {
    let tree = Tree::read(root, point, MAX_FILES)?;
    let mut paths: HashMap<u64, Vec<u8>> = HashMap::from([(tree.root, b".".to_vec())]);
    let mut all = BTreeMap::from([(b".".to_vec(), tree.root)]);
    // Directories come before what is in them.
    for entry in &tree.order {
        let (Some(ino), Some(parent)) = (tree.names.get(entry), paths.get(&entry.0)) else { continue };
        let path = [parent.as_slice(), &entry.1].join(&b'/');
        paths.entry(*ino).or_insert_with(|| path.clone());
        all.insert(path, *ino);
    }
    let many = tree.order.iter().filter(|(parent, _)| *parent == tree.root).count() > NAMES;
    let mut first: HashMap<u64, &[u8]> = HashMap::new();
    let mut sums: BTreeMap<String, blake3::Hasher> = BTreeMap::new();
    for (path, ino) in &all {
        let node = &tree.nodes[ino];
        let group = path.split(|b| *b == b'/').nth(1).unwrap_or(b".");
        let group = if many { &group[..1] } else { group };
        let sum = sums.entry(String::from_utf8_lossy(group).into_owned()).or_default();
        let linked = *first.entry(*ino).or_insert(path);
        let record = (&node.kind, node.mode, node.uid, node.gid, node.size, node.mtime, path, linked);
        sum.update(format!("{record:?}").as_bytes());
        if linked == path && matches!(node.kind, Kind::File | Kind::Directory) {
            let refused = |what, e: std::io::Error| CopyError::refused(what, &point.join(OsStr::from_bytes(path)), e);
            let file = root.open(path.as_slice(), OFlags::empty()).map_err(|e| refused("open", e.into()))?;
            let mut attributes = extended(&file).map_err(|e| refused("read the attributes of", e.into()))?;
            attributes.sort();
            sum.update(format!("{attributes:?}").as_bytes());
            if node.kind == Kind::File {
                content(file.as_fd().try_clone_to_owned().map_err(|e| refused("open", e))?, sum, stops)
                    .map_err(|e| refused("read", e))?;
            }
        }
    }
    Ok(sums.into_iter().map(|(name, sum)| (name, sum.finalize().to_hex().to_string())).collect())
}

fn content(file: OwnedFd, sum: &mut blake3::Hasher, stops: &dyn Fn() -> bool) -> std::io::Result<()> {
    let (mut file, mut buffer) = (std::fs::File::from(file), vec![0; 1 << 20]);
    loop {
        if stops() {
            return Err(std::io::Error::other("it was stopped"));
        }
        match file.read(&mut buffer)? {
            0 => return Ok(()),
            got => drop(sum.update(&buffer[..got])),
        }
    }
}

/// The first entry of a tree's root in which two trees differ.
pub fn difference<'a>(ours: &'a Digests, theirs: &'a Digests) -> Option<&'a str> {
    let differs = |(name, hash): &(&'a String, &'a String)| theirs.get(*name) != Some(*hash);
    let missing = || theirs.keys().find(|name| !ours.contains_key(*name)).map(String::as_str);
    ours.iter().find(differs).map(|(name, _)| name.as_str()).or_else(missing)
}
