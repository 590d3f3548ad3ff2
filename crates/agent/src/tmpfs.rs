//! The content of tmpfs mounts, on a link of its own (`copying`).
//!
//! Up to the freeze nothing depends on this: whatever fails, the mounts stay with CRIU, and the report says so. In the freeze it is
//! decided which mounts criu leaves alone; it binds those into the container that the destination has made.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tranship_coordinator::Failure;
use tranship_criu::hidden;
use tranship_criu::rpc::ExternalMount;
use tranship_engine::{Container, Pod};
use tranship_storage::copy::{CopyError, Moved};
use tranship_storage::tmpfs::{self, Renamed, Source, TmpfsMount};
use tranship_sys::clock::monotonic_ns;
use tranship_transport::{Connection, Link};
use tranship_types::{Blocker, BlockerKind, MigrationId, NodeName};
use tranship_wire::Purpose;
use tranship_wire::message::Offer;

use crate::arrivals::Inbox;
use crate::copying::{Left, SYNC, Said, Sending, synced};
use crate::layout::{Layout, preload};
use crate::node::{Node, failed};

/// Most mounts of one container.
const MOUNTS: usize = 256;
/// Where programs share memory by files.
const SHARED_MEMORY: &str = "/dev/shm";

/// What a source offers: for [`Offer::tmpfs`]. The container brings the pod `brought` with it.
pub fn offered(container: &Container, brought: Option<&Pod>) -> Result<serde_json::Value, Failure> {
    let mut found = find(container, brought)?;
    found.truncate(MOUNTS);
    Ok(serde_json::to_value(found).unwrap_or_default())
}

/// The mounts that are the container's own: all but what the engine binds into it from elsewhere. (Paths that it masks are either
/// bound from /dev/null, which is no whole filesystem, or are an empty tmpfs of the container's own.) With a pod comes what its containers share.
fn find(container: &Container, brought: Option<&Pod>) -> Result<Vec<TmpfsMount>, Failure> {
    let of_pod = brought.and_then(|pod| pod.shared_memory(container));
    let own = container.own_shared_memory().or(of_pod.clone());
    let binds = container.bind_mounts().into_iter().map(|(_, inside)| inside);
    let foreign: Vec<_> = binds.filter(|inside| own.as_ref() != Some(inside)).collect();
    let mut found = tmpfs::find(container.init, &foreign).map_err(failed)?;
    let is_of_pod = |mount: &TmpfsMount| of_pod.as_ref().is_some_and(|inside| inside == Path::new(&mount.point));
    found.iter_mut().for_each(|mount| mount.shared = is_of_pod(mount));
    Ok(found)
}

/// What the container has in a `/dev/shm` that the engine binds into it stays behind, unless that is offered: CRIU carries no
/// such mount.
pub fn left_behind(container: &Container, offer: &Offer) -> Option<Blocker> {
    let offered = mounts(offer).is_ok_and(|mounts| mounts.iter().any(|mount| mount.point == SHARED_MEMORY));
    if offered { None } else { files_bound(container) }
}

/// The same for a container whose `/dev/shm` is others', too, and so is never offered.
pub fn foreign_files(container: &Container) -> Option<Blocker> {
    if container.own_shared_memory().is_some() { None } else { files_bound(container) }
}

/// The files in a `/dev/shm` that the engine binds into the container.
fn files_bound(container: &Container) -> Option<Blocker> {
    let bound = container.bind_mounts().iter().any(|(_, inside)| inside == Path::new(SHARED_MEMORY));
    (bound && has_files(&inside(container))).then(|| {
        let cause = format!("container {} has files in {SHARED_MEMORY}, which is not its own", container.name);
        Blocker::new(BlockerKind::Mount, cause, "start it with one of its own (`--tmpfs /dev/shm`)")
    })
}

/// Its `/dev/shm`, as this node sees it.
fn inside(container: &Container) -> PathBuf {
    format!("/proc/{}/root{SHARED_MEMORY}", container.init).into()
}

/// Whether there is anything but directories in a tree. What cannot be read is taken for something.
fn has_files(directory: &Path) -> bool {
    let Ok(mut entries) = std::fs::read_dir(directory) else { return true };
    entries.any(|entry| match entry.and_then(|entry| Ok((entry.file_type()?, entry.path()))) {
        Ok((kind, path)) if kind.is_dir() => has_files(&path),
        _ => true,
    })
}

fn mounts(offer: &Offer) -> Result<Vec<TmpfsMount>, Failure> {
    if offer.tmpfs.is_null() {
        return Ok(Vec::new());
    }
    let mounts: Vec<TmpfsMount> = serde_json::from_value(offer.tmpfs.clone())
        .map_err(|e| Failure::new(format!("the offered tmpfs mounts cannot be read: {e}; update both agents")))?;
    match mounts.len() > MOUNTS {
        true => {
            Err(Failure::new(format!("{} tmpfs mounts are more than the {MOUNTS} that are possible", mounts.len())))
        }
        false => Ok(mounts),
    }
}

/// Bytes of files in the offered mounts.
pub fn bytes(offer: &Offer) -> u64 {
    mounts(offer).unwrap_or_default().iter().fold(0, |sum, mount| sum.saturating_add(mount.bytes))
}

/// What CRIU's images call a mount.
fn key(index: usize) -> String {
    format!("tranship-tmpfs-{index}")
}

/// What criu is told for a restore; images that do not name such a mount do not care.
pub fn for_restore(layout: &Layout, offer: &Offer) -> Result<Vec<ExternalMount>, Failure> {
    let path = |index: usize| layout.tmpfs().join(index.to_string()).to_string_lossy().into_owned();
    let made = |index: &usize| Path::new(&path(*index)).exists();
    let external = |index| ExternalMount { key: key(index), val: path(index) };
    Ok((0..mounts(offer)?.len()).filter(made).map(external).collect())
}

/// Where the offered mounts are in the container, by what CRIU's images call them.
pub fn places(offer: &Offer) -> Result<HashMap<String, String>, Failure> {
    Ok(mounts(offer)?.into_iter().enumerate().map(|(index, mount)| (key(index), mount.point)).collect())
}

/// Where the content of the `/dev/shm` that a pod's containers share is, if this one brings it.
pub fn of_pod(layout: &Layout, offer: &Offer) -> Result<Option<PathBuf>, Failure> {
    let index = mounts(offer)?.iter().position(|mount| mount.shared);
    Ok(index.map(|index| layout.tmpfs().join(index.to_string())))
}

/// The content of a container's tmpfs mounts, on the node that it leaves.
pub struct Leaving {
    at_work: Result<(Source, Connection), String>,
    external: Vec<ExternalMount>,
    /// How many mounts are carried: those, and the one that is shared and that criu leaves alone anyway.
    carried: usize,
    ahead: Moved,
    /// The table of hidden pages, beside which names of files are told to criu.
    table: PathBuf,
    /// Where this node sees the container's `/dev/shm`, if the engine binds that into it: to CRIU it cannot be left.
    bound: Option<PathBuf>,
}

impl Leaving {
    /// Opens the link and the mounts; `None` if there are none.
    pub fn begin(
        node: &Node,
        peer: &NodeName,
        id: &MigrationId,
        (container, brought): (&Container, Option<&Pod>),
        offer: &Offer,
        table: PathBuf,
    ) -> Option<Self> {
        let offered = mounts(offer).unwrap_or_default();
        if offered.is_empty() {
            return None;
        }
        let begin = || -> Result<(Source, Connection), String> {
            // What was offered, with what identifies it here.
            let found = find(container, brought).map_err(|e| e.to_string())?;
            let same = |mount: &TmpfsMount| found.iter().find(|m| m.is_as_offered(mount)).unwrap_or(mount).clone();
            let found: Vec<TmpfsMount> = offered.iter().map(same).collect();
            let mut link = node.dial(peer, Purpose::Files, Some(id)).map_err(|e| e.to_string())?;
            link.set_timeout(Some(SYNC)).map_err(|e| e.to_string())?;
            Ok((Source::open(container.init, &found), link))
        };
        let of_pod = brought.and_then(|pod| pod.shared_memory(container));
        let bound = container.own_shared_memory().or(of_pod).map(|_| inside(container));
        Some(Self { at_work: begin(), external: Vec::new(), carried: 0, ahead: Moved::default(), table, bound })
    }

    /// Bounds what the link takes, in bytes a second.
    pub fn set_pace(&mut self, pace: Option<u64>) -> Result<(), Failure> {
        match &mut self.at_work {
            Ok((_, link)) => link.set_pace(pace).map_err(failed),
            Err(_) => Ok(()),
        }
    }

    /// Copies what the destination does not have yet, while the processes `pids` run. Returns how many bytes of content that
    /// was: none, too, if it failed, which leaves the mounts to criu.
    ///
    /// # Errors
    /// A lease that criu would break as well.
    pub fn pass(&mut self, pids: &[u32]) -> Result<u64, Failure> {
        let Ok((source, link)) = &mut self.at_work else { return Ok(0) };
        let mut leased = None;
        let passed = synced(link, |sink| {
            source.pass(pids, sink).inspect_err(|error| {
                leased = matches!(error, CopyError::Leased { .. }).then(|| error.to_string());
            })
        });
        if let Some(why) = leased {
            return Err(Failure::new(why));
        }
        Ok(match passed {
            Ok(moved) => {
                self.ahead += moved;
                moved.bytes
            }
            Err(why) => {
                tracing::warn!(why, "the content of tmpfs mounts is left to criu");
                self.at_work = Err(why);
                0
            }
        })
    }

    /// Decides which mounts criu leaves alone, with the processes `pids` and those of `others`, which have shared mounts, too, frozen. Returns the other
    /// ones, for the report.
    pub fn decide(&mut self, pids: &[u32], others: &[u32]) -> Result<Vec<String>, Failure> {
        let mut carried = false;
        let left = match &mut self.at_work {
            Ok((source, _)) => {
                let decision = source.decide(pids, others).map_err(failed)?;
                self.carried = decision.external.len();
                carried = decision.external.iter().any(|(_, point)| point == SHARED_MEMORY);
                let own = decision.external.into_iter().filter(|(index, _)| !source.is_shared(*index));
                self.external = own.map(|(index, point)| ExternalMount { key: point, val: key(index) }).collect();
                tell_renamed(&self.table, &decision.renamed)?;
                decision.left
            }
            Err(why) => vec![why.clone()],
        };
        match self.bound.as_deref().filter(|path| !carried && has_files(path)) {
            Some(_) => Err(Failure::new(format!("the files in {SHARED_MEMORY} cannot be moved: {}", left.join("; ")))),
            None => Ok(left.into_iter().map(|left| format!("tmpfs: by criu, {left}")).collect()),
        }
    }

    /// Whether the restore needs what is sent.
    pub fn is_needed(&self) -> bool {
        self.carried > 0
    }

    /// What criu is told for the dump.
    pub fn external(&self) -> Vec<ExternalMount> {
        self.external.clone()
    }

    /// Sends the rest of the mounts that were decided on. Nothing, if there are none. The watch over the mounts is kept: to end it
    /// takes tens of milliseconds, which the freeze has not got.
    pub fn finish(&mut self) -> Result<Left, Failure> {
        let start_ns = monotonic_ns();
        let (mut moved, mut wire_bytes) = (Moved::default(), 0);
        if let Ok((source, link)) = &mut self.at_work {
            moved = source.finish(&mut Sending(link)).map_err(failed)?;
            tranship_wire::write_message(link, &Said::End).map_err(failed)?;
            wire_bytes = link.bytes_sent();
        }
        let way = format!(
            "tmpfs: {} mounts, {} bytes ahead of the freeze and {} in it",
            self.carried, self.ahead.bytes, moved.bytes
        );
        Ok(Left { start_ns, end_ns: monotonic_ns(), wire_bytes, way })
    }
}

/// Tells criu names of files that are used by a name that is gone.
fn tell_renamed(table: &Path, files: &[Renamed]) -> Result<(), Failure> {
    let Some(first) = files.first() else { return Ok(()) };
    if preload().is_none() {
        return Err(Failure::new(format!(
            "a process uses {} by a name that is gone, as after sem_open, which takes the library that is preloaded into criu; \
             put libtranship_preload.so beside transhipd",
            first.path.display()
        )));
    }
    let files = files.iter().map(|file| (file.device, file.inode, file.path.as_path()));
    hidden::write_renamed(table, files)
        .map_err(|error| Failure::new(format!("names of files cannot be told to criu: {error}")))
}

/// Mounts what was offered, and lets the link come.
pub fn open(inbox: &Inbox, layout: &Layout, offer: &Offer, peer: &NodeName) -> Result<(), Failure> {
    let mounts = mounts(offer)?;
    if !mounts.is_empty() {
        let made = tmpfs::make(&layout.tmpfs(), &mounts).map_err(failed)?;
        inbox.tmpfs.open(made.charged_by(&inbox.charger), peer, false);
    }
    Ok(())
}
