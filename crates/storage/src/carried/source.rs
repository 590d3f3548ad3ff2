//! The source's half.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use nix::sys::statfs::{EXT4_SUPER_MAGIC, TMPFS_MAGIC, fstatfs};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use tranship_sys::mapping_log::MappingLog;
use tranship_types::{CarriedTree, TreeKind};

use super::MAX_FILES;
use super::verify::{Digests, digests};
use crate::Root;
use crate::copy::{CopyError, Device, Layer, Moved, Original, Place, Sink, Trail, Use, look, look_for_suspects};

/// CRIU would give such a file a name of its own, in the directory, for the time of the dump alone.
const RENAMED: &str = "or another directory on its disk has a file that a process of the container has open by a name which is \
                       gone, while another name of it is there; have the process open it again";

/// The trees of a container on the node that it leaves.
#[derive(Debug)]
pub struct Source {
    originals: Vec<(CarriedTree, Original)>,
    /// The device of the container's root, where that is an overlay over one of the trees.
    merged: Option<Device>,
    mappings: Mappings,
    /// How it is known which parts of files were written.
    pub way: String,
}

impl Source {
    /// Opens the trees of the container whose first process is `init`.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub fn open(init: u32, trees: &[CarriedTree]) -> Result<Self, CopyError> {
        let (trail, way) = match Trail::start() {
            Ok(trail) => (Some(Arc::new(trail)), "files that change are read in parts, as the kernel tells which"),
            Err(error) => {
                tracing::warn!(%error, "the kernel does not tell which parts of files are written");
                (
                    None,
                    "files that change are read as a whole: this kernel does not tell which parts of them are written",
                )
            }
        };
        let log = trail.as_ref().and_then(|_| MappingLog::start().ok());
        let originals = trees.iter().map(|tree| Ok((tree.clone(), original(tree, trail.as_ref())?)));
        let originals = originals.collect::<Result<Vec<_>, CopyError>>()?;
        let has_layer = trees.iter().any(|tree| tree.kind == TreeKind::WritableLayer);
        let root = std::fs::File::open(format!("/proc/{init}/root")).ok().filter(|_| has_layer);
        let merged = root.and_then(|root| look(&root, b"").ok()).map(|stat| (stat.stx_dev_major, stat.stx_dev_minor));
        let mut source =
            Self { originals, merged, mappings: Mappings { log, first: HashMap::new() }, way: way.to_owned() };
        if source.mappings.log.is_some() {
            let uses = source.look(&everybody()).into_iter();
            source.mappings.first = uses.map(|(device, found)| (device, found.mapped)).collect();
        }
        Ok(source)
    }

    /// Sends what the peer does not have yet while the processes `pids` run. May be repeated.
    ///
    /// # Errors
    /// If something cannot be read, or the link breaks: the peer's copies are of no use then.
    pub fn pass(&mut self, pids: &[u32], sink: &mut dyn Sink) -> Result<Moved, CopyError> {
        self.send(pids, sink, false)
    }

    /// Sends the rest, with the processes frozen: then the peer's copies are complete.
    ///
    /// # Errors
    /// As [`Self::pass`]; and if files change all the same.
    pub fn finish(&mut self, pids: &[u32], sink: &mut dyn Sink) -> Result<Moved, CopyError> {
        self.send(pids, sink, true)
    }

    /// How many files and directories there are, as the last pass found them.
    pub fn entries(&self) -> usize {
        self.originals.iter().filter_map(|(_, original)| original.tree()).map(|tree| tree.nodes.len()).sum()
    }

    /// The digests of all trees; `stops` is asked after each piece of a file whether nobody waits for them any more.
    ///
    /// # Errors
    /// If something cannot be read; if it was stopped.
    pub fn digests(&self, stops: &dyn Fn() -> bool) -> Result<Vec<Digests>, CopyError> {
        self.originals.iter().map(|(tree, original)| digests(original.root(), &tree.path, stops)).collect()
    }

    /// How the processes use the filesystems.
    fn look(&self, pids: &[u32]) -> HashMap<Device, Use> {
        let devices: Vec<Device> = self.originals.iter().map(|(_, original)| original.device).collect();
        let layer = self.originals.iter().find(|(tree, _)| tree.kind == TreeKind::WritableLayer);
        let merged = self.merged.zip(layer).map(|(device, (_, original))| (device, Layer(original.root())));
        look_for_suspects(pids, &devices, &merged.into_iter().collect::<HashMap<_, _>>())
    }

    fn send(&mut self, pids: &[u32], sink: &mut dyn Sink, last: bool) -> Result<Moved, CopyError> {
        // Read before the look: a mapping that comes and goes between the two is told next time.
        let since = self.mappings.since();
        let uses = self.look(pids);
        let mut moved = Moved::default();
        for (index, (tree, original)) in self.originals.iter_mut().enumerate() {
            let mut found = uses.get(&original.device).cloned().unwrap_or_default();
            if !found.renamed.is_empty() {
                return Err(CopyError::Unfit { path: tree.path.clone(), why: RENAMED });
            }
            let at_first = self.mappings.first.get(&original.device).into_iter().flatten();
            found.mapped.extend(at_first);
            match &since {
                Some(since) => {
                    found.mapped.extend(since.get(&original.device).into_iter().flatten());
                    // By the overlay's own numbers its files are not known here.
                    found.unsure_of_mappings = tree.kind == TreeKind::WritableLayer
                        && self.merged.is_none_or(|merged| since.contains_key(&merged));
                }
                None => found.unsure_of_mappings = true,
            }
            moved += original.pass(index, &found, &mut *sink, last)?;
        }
        Ok(moved)
    }
}

/// Which files are written through shared mappings, perhaps by others than the container.
#[derive(Debug)]
struct Mappings {
    /// Tells which files get one, where the kernel does.
    log: Option<MappingLog>,
    /// Files that had one when the log began.
    first: HashMap<Device, HashSet<u64>>,
}

impl Mappings {
    /// Files that got one since the last call; none if that is not known of all.
    fn since(&mut self) -> Option<HashMap<Device, HashSet<u64>>> {
        let mut since: HashMap<Device, HashSet<u64>> = HashMap::new();
        let complete = self.log.as_mut()?.read(|mapped| {
            since.entry(mapped.device).or_default().insert(mapped.ino);
        });
        complete.then_some(since)
    }
}

/// All processes of the machine.
fn everybody() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Opens the directory of a copy without following a symlink, in a clone of its mount on which nothing else is mounted.
pub(super) fn open_copy(path: &Path) -> Result<OwnedFd, CopyError> {
    open(path)?.open(".", OFlags::DIRECTORY).map_err(|e| CopyError::refused("open the directory", path, e))
}

/// Opens a directory without following a symlink, in a clone of its mount on which nothing else is mounted.
///
/// # Errors
/// If that is refused.
pub fn open(path: &Path) -> Result<Root, CopyError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        .and_then(Root::clone_of)
        .map_err(|e| CopyError::refused("open the directory", path, e))
}

fn original(tree: &CarriedTree, trail: Option<&Arc<Trail>>) -> Result<Original, CopyError> {
    let root = open(&tree.path)?;
    let found = fstatfs(&root).map_err(|e| CopyError::refused("look at the filesystem of", &tree.path, e))?;
    let place = Place { root, point: tree.path.clone(), limit: MAX_FILES };
    let kind = found.filesystem_type();
    let made = if kind == TMPFS_MAGIC {
        Original::in_memory(place)
    } else {
        // Of ext4 it is known that all writes are told of, but with these options.
        let told = kind == EXT4_SUPER_MAGIC && !has_option(&place.root, &["data=journal", "dax", "dax=always"]);
        Original::on_disk(place, trail.filter(|_| told).cloned())
    };
    made.map_err(|why| CopyError::refused("watch", &tree.path, std::io::Error::other(why)))
}

/// Whether the filesystem of an open file is mounted with one of these options; also if that cannot be told.
fn has_option(file: &Root, options: &[&str]) -> bool {
    let (Ok(stat), Ok(table)) = (look(file, b""), tranship_sys::process::text("/proc/self/mountinfo")) else {
        return true;
    };
    let device = format!("{}:{}", stat.stx_dev_major, stat.stx_dev_minor);
    let line = table.lines().find(|line| line.split(' ').nth(2) == Some(&device));
    let own = line.and_then(|line| line.rsplit(' ').next());
    own.is_none_or(|own| own.split(',').any(|option| options.contains(&option)))
}
