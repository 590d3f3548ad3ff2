//! Directory trees on disk that move with their container, on a link of their own (`copying`).
//!
//! They are part of the container: where they cannot be carried, it is not moved.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Engine, EngineError, TreePlace};
use tranship_storage::carried::{self, Room, Source, Target};
use tranship_storage::copy::{CopyError, Moved};
use tranship_sys::clock::monotonic_ns;
use tranship_transport::{Connection, Link};
use tranship_types::{Blocker, BlockerKind, CarriedTree, MigrationId, MoveOptions, NodeName, TreeKind};
use tranship_wire::Purpose;
use tranship_wire::message::Offer;

use crate::copying::{Arriving, Left, SYNC, Said, Sending, synced};
use crate::interrupt::Interrupt;
use crate::node::{Node, failed};

/// Where notes of copies are, below the directory for what lasts.
const NOTES: &str = "copies";
/// Most trees of one container.
pub const TREES: usize = 256;

/// Which trees of a container move with it, and what there is to say about the others.
#[derive(Default)]
pub struct Choice {
    pub trees: Vec<CarriedTree>,
    pub blockers: Vec<Blocker>,
    pub notes: Vec<String>,
}

/// Decides it.
pub fn choose(container: &Container, options: &MoveOptions) -> Result<Choice, Failure> {
    let mut choice = Choice::default();
    for tree in &container.trees {
        if tree.kind != TreeKind::WritableLayer
            && let Some(kind) = carried::shared_filesystem(&tree.path).map_err(failed)?
        {
            choice.notes.push(format!("{tree} is on {kind}, which other nodes see as well: it is left where it is"));
        } else if tree.kind == TreeKind::Bind && !options.with_binds {
            choice.notes.push(format!("{tree} is not carried; the destination must have it (--with-binds carries it)"));
        } else if tree.kind == TreeKind::Volume && carried::is_mount_point(&tree.path).map_err(failed)? {
            let cause = format!("the {tree} is mounted from elsewhere on this node, and cannot be carried");
            let remedy = "use a volume of the driver local without options, or one on a filesystem that every node has";
            choice.blockers.push(Blocker::new(BlockerKind::Mount, cause, remedy));
        } else if !choice.trees.iter().any(|other| other.path == tree.path) {
            let bytes = carried::disk_usage(&tree.path).map_err(failed)?;
            choice.trees.push(CarriedTree { bytes, ..tree.clone() });
        }
    }
    for (at, tree) in choice.trees.iter().enumerate() {
        let mut block = |cause: String, remedy: &str| {
            choice.blockers.push(Blocker::new(BlockerKind::Mount, cause, remedy));
        };
        if let Some(point) = carried::mounted_below(&tree.path).map_err(failed)? {
            let cause =
                format!("something is mounted on {}, within the {tree}, and would stay behind", point.display());
            block(cause, "unmount it, or mount it into the container as a volume of its own");
        }
        if let Some(other) =
            choice.trees[at + 1..].iter().find(|o| o.path.starts_with(&tree.path) || tree.path.starts_with(&o.path))
        {
            block(
                format!("the {tree} and the {other} lie one in the other"),
                "mount only the outer one into the container",
            );
        }
    }
    if choice.trees.len() > TREES {
        let cause = format!(
            "the container has {} directory trees, more than the {TREES} that are possible",
            choice.trees.len()
        );
        choice.blockers.push(Blocker::new(BlockerKind::Mount, cause, "mount fewer of them"));
    }
    Ok(choice)
}

/// The trees of a container, on the node that it leaves.
pub struct Leaving {
    source: Source,
    link: Connection,
    ahead: Moved,
    verify: bool,
}

impl Leaving {
    /// Opens the link and the trees; `None` if there are none.
    pub fn begin(
        node: &Node,
        peer: &NodeName,
        id: &MigrationId,
        container: &Container,
        (offer, verify): (&Offer, bool),
    ) -> Result<Option<Self>, Failure> {
        if offer.trees.is_empty() {
            return Ok(None);
        }
        let mut link = node.dial(peer, Purpose::Trees, Some(id))?;
        link.set_timeout(Some(SYNC)).map_err(failed)?;
        let source = Source::open(container.init, &offer.trees).map_err(failed)?;
        Ok(Some(Self { source, link, ahead: Moved::default(), verify }))
    }

    /// Bounds what the link takes, in bytes a second.
    pub fn set_pace(&mut self, pace: Option<u64>) -> Result<(), Failure> {
        self.link.set_pace(pace).map_err(failed)
    }

    /// Copies what the destination does not have yet, while the processes `pids` run. Returns how many bytes of content that was.
    pub fn pass(&mut self, pids: &[u32]) -> Result<u64, Failure> {
        let Self { source, link, ahead, .. } = self;
        let moved = synced(link, |sink| source.pass(pids, sink)).map_err(failed)?;
        *ahead += moved;
        Ok(moved.bytes)
    }

    /// Sends the rest, with the processes `pids` frozen.
    pub fn finish(&mut self, pids: &[u32], interrupt: &Interrupt) -> Result<Left, Failure> {
        let start_ns = monotonic_ns();
        let moved = self.source.finish(pids, &mut Sending(&mut self.link)).map_err(failed)?;
        if self.verify {
            for (index, digests) in
                self.source.digests(&|| interrupt.is_raised()).map_err(failed)?.into_iter().enumerate()
            {
                tranship_wire::write_message(&mut self.link, &Said::Digests { index, digests }).map_err(failed)?;
            }
        }
        tranship_wire::write_message(&mut self.link, &Said::End).map_err(failed)?;
        let way = format!(
            "files: {}, {} bytes ahead of the freeze, and {} bytes of {} files in it{}; {}",
            self.source.entries(),
            self.ahead.bytes,
            moved.bytes,
            moved.files,
            if self.verify { ", compared on both nodes" } else { "" },
            self.source.way
        );
        Ok(Left { start_ns, end_ns: monotonic_ns(), wire_bytes: self.link.bytes_sent(), way })
    }
}

/// The directory on this node that an offered tree gets.
fn directory(engine: &dyn Engine, offer: &Offer, tree: &CarriedTree) -> Result<PathBuf, EngineError> {
    match tree.kind {
        TreeKind::Bind => Ok(tree.path.clone()),
        _ => engine.tree_directory(&offer.container, tree),
    }
}

/// The places of the offered trees on this node. Those of the engine's own are there for as long as the container is that it has
/// made.
pub fn targets(engine: &dyn Engine, id: &MigrationId, offer: &Offer) -> Result<Vec<Target>, Failure> {
    let target = |tree| Ok(Target::new(tree, directory(engine, offer, tree).map_err(failed)?, id.as_str()));
    offer.trees.iter().map(target).collect()
}

/// The places of those that are still there, once the container may be gone.
pub fn targets_left(engine: &dyn Engine, id: &MigrationId, offer: &Offer) -> Result<Vec<Target>, Failure> {
    let target = |tree| match directory(engine, offer, tree) {
        Ok(path) => Some(Ok(Target::new(tree, path, id.as_str()))),
        Err(EngineError::NoSuchContainer { .. }) => None,
        Err(error) => Some(Err(failed(error))),
    };
    offer.trees.iter().filter_map(target).collect()
}

/// A note of the copies that a move makes on this node, besides its journal: it is what tells of them where that is lost.
///
/// It is there from before the first of them is until after the last.
#[derive(Debug, Serialize, Deserialize)]
pub struct Note {
    /// The trees, and the directories that they are to be in.
    copies: Vec<(CarriedTree, PathBuf)>,
}

impl Note {
    fn file(node: &Node, id: &MigrationId) -> PathBuf {
        node.config.state_dir.join(NOTES).join(format!("{id}.json"))
    }

    /// Writes it, so that it outlasts the host.
    pub fn write(node: &Node, id: &MigrationId, targets: &[Target], offer: &Offer) -> Result<(), Failure> {
        if targets.is_empty() {
            return Ok(());
        }
        let copies = offer.trees.iter().cloned().zip(targets.iter().map(|target| target.path().to_owned())).collect();
        let file = Self::file(node, id);
        let written = || -> std::io::Result<()> {
            let directory = node.config.state_dir.join(NOTES);
            std::fs::create_dir_all(&directory)?;
            let mut to = File::create(&file)?;
            to.write_all(&serde_json::to_vec(&Self { copies })?)?;
            to.sync_all()?;
            File::open(directory)?.sync_all()
        };
        written().map_err(|e| Failure::new(format!("the note {} cannot be written: {e}", file.display())))
    }

    /// The places that the note of a migration names.
    pub fn read(node: &Node, id: &MigrationId) -> Result<Vec<Target>, Failure> {
        let file = Self::file(node, id);
        let unreadable = |e: &dyn std::fmt::Display| Failure::new(format!("{} cannot be read: {e}", file.display()));
        let text = std::fs::read(&file).map_err(|e| unreadable(&e))?;
        let note: Self = serde_json::from_slice(&text).map_err(|e| unreadable(&e))?;
        Ok(note.copies.into_iter().map(|(tree, path)| Target::new(&tree, path, id.as_str())).collect())
    }

    /// Removes it, if it is there.
    pub fn remove(node: &Node, id: &MigrationId) -> Result<(), Failure> {
        match std::fs::remove_file(Self::file(node, id)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(failed(e)),
            _ => Ok(()),
        }
    }

    /// The migrations that there are notes of.
    pub fn all(node: &Node) -> Vec<MigrationId> {
        let entries = std::fs::read_dir(node.config.state_dir.join(NOTES)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect()
    }
}

/// Lets the link come, once the engine has begun with the container.
pub fn open(arriving: &Arriving, targets: &[Target], offer: &Offer, peer: &NodeName) -> Result<(), Failure> {
    if !targets.is_empty() {
        arriving.open(Target::open_all(targets, &offer.trees).map_err(failed)?, peer, true);
    }
    Ok(())
}

/// A directory of the filesystem that the container's log will be on: engines keep it beside the writable layer.
fn log_directory(engine: &dyn Engine, offer: &Offer) -> Result<PathBuf, EngineError> {
    let (kind, inside, path) = (TreeKind::WritableLayer, "/".into(), PathBuf::new());
    let layer = CarriedTree { kind, inside, path, bytes: 0 };
    let (TreePlace::There(path) | TreePlace::Below(path)) =
        engine.tree_place(&offer.container, &offer.parameters, &layer)?;
    Ok(path)
}

/// What of the offered trees, and of the log, stands in the way on this node.
pub fn check(node: &Node, engine: &dyn Engine, offer: &Offer) -> Vec<Blocker> {
    let here = &node.config.node;
    let blocker = |cause: String, remedy: &str| Blocker::new(BlockerKind::Mount, cause, remedy);
    let mend = |error: &dyn std::fmt::Display| blocker(format!("{error} (on node {here})"), "mend it there");
    let mut blockers = Vec::new();
    // What each filesystem has to take.
    let mut needs: HashMap<u64, (Room, u64, PathBuf)> = HashMap::new();
    for tree in offer.trees.iter().take(TREES) {
        let climbs = tree.path.components().any(|part| part == std::path::Component::ParentDir);
        if !tree.path.is_absolute() || climbs {
            blockers.push(blocker(format!("{tree} is not named by an absolute path"), "update both agents"));
            continue;
        }
        let place = match tree.kind {
            TreeKind::Bind => Ok(TreePlace::There(tree.path.clone())),
            _ => engine.tree_place(&offer.container, &offer.parameters, tree),
        };
        let path = match place {
            Ok(TreePlace::There(path)) => {
                match Target::new(tree, path.clone(), "check").obstacle() {
                    Ok(None) => {}
                    Ok(Some((cause, remedy))) => blockers.push(blocker(format!("{cause} (on node {here})"), remedy)),
                    Err(error) => blockers.push(mend(&error)),
                }
                path
            }
            Ok(TreePlace::Below(path)) => path,
            Err(error) => {
                blockers.push(mend(&error));
                continue;
            }
        };
        match carried::room(&path) {
            Ok(room) => needs.entry(room.device).or_insert((room, 0, path)).1 += tree.bytes,
            Err(error) => blockers.push(mend(&error)),
        }
    }
    if let Some(log) = &offer.log {
        match log_directory(engine, offer).map(|path| Ok::<_, CopyError>((carried::room(&path)?, path))) {
            Ok(Ok((room, path))) => needs.entry(room.device).or_insert((room, 0, path)).1 += log.bytes,
            Ok(Err(error)) => blockers.push(mend(&error)),
            Err(error) => blockers.push(mend(&error)),
        }
    }
    // An engine unpacks an image from a file of its own.
    if let Ok(Some(image)) = engine.missing_image(&offer.container, &offer.parameters)
        && let Ok(room) = carried::room(&image.directory)
    {
        needs.entry(room.device).or_insert((room, 0, image.directory)).1 += 2 * image.bytes;
    }
    for (room, needed, path) in needs.into_values() {
        let path = path.display();
        if room.read_only {
            let cause = format!("the filesystem of {path} on node {here} is mounted read-only");
            blockers.push(blocker(cause, "mount it there to be written to"));
        } else if needed > room.bytes {
            let (need, have) = (needed.div_ceil(1 << 20), room.bytes >> 20);
            let cause = format!(
                "container {} needs {need} MiB for its files, but the filesystem of {path} on node {here} has only {have} MiB to spare",
                offer.container
            );
            blockers.push(blocker(cause, "free some there, or choose another node"));
        }
    }
    blockers
}

/// The directories among the trees that stay behind at the source: those that do not go with the container.
pub fn own_directories(offer: &Offer) -> Vec<PathBuf> {
    let own = offer.trees.iter().filter(|tree| tree.kind != TreeKind::WritableLayer);
    own.map(|tree| tree.path.clone()).collect()
}
