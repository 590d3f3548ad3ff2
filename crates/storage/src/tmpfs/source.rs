//! The source's half: what is there, what of it has changed, and the operations that tell the destination.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use tranship_sys::mapping_log::{Mapped, MappingLog};

use super::MAX_FILES;
use super::find::{TmpfsMount, candidates, table};
use crate::Root;
use crate::copy::{Calls, CopyError, Device, Moved, Original, Place, Sink, Use, look, look_for_suspects};

/// Bytes in all mounts from which on it pays to know what calls write, rather than to compare what was written.
const WORTH_FOLLOWING: u64 = 16 << 20;

/// Which mounts CRIU shall leave alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// Numbers in the offer, and mount points.
    pub external: Vec<(usize, String)>,
    /// Mounts that are left to CRIU, and why.
    pub left: Vec<String>,
    /// Files in those that CRIU leaves alone of which the kernel has a name that is gone.
    pub renamed: Vec<Renamed>,
}

/// A file that a process has open or mapped by a name that is gone, and that has another name, as after sem_open(3),
/// which links a file to its name when it has been written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renamed {
    /// Its device, as in `st_dev` of stat(2).
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// A name that it has, in the container.
    pub path: PathBuf,
}

impl Renamed {
    /// The files of this mount that are used so; `None` if one of them is not found under a name by which CRIU, which
    /// looks for it below the root of process `init`, finds it.
    fn all(init: u32, mount: &TmpfsMount, state: &Original, found: &Use) -> Option<Vec<Self>> {
        let device = rustix::fs::makedev(state.device.0, state.device.1);
        let root = Path::new("/proc").join(init.to_string()).join("root");
        let anew = OnceCell::new();
        let one = |&(inode, opened_in): &(u64, u64)| {
            let path = Path::new(&mount.point).join(state.name_of(inode, &anew)?);
            let seen = rustix::fs::lstat(root.join(path.strip_prefix("/").ok()?)).ok()?;
            let is_found = opened_in == mount.id && (seen.st_dev, seen.st_ino) == (device, inode);
            is_found.then_some(Self { device, inode, path })
        };
        found.renamed.iter().map(one).collect()
    }
}

/// The tmpfs mounts of a container on the node that it leaves.
#[derive(Debug)]
pub struct Source {
    init: u32,
    mounts: Vec<Mounted>,
    /// Tells which files get shared mappings, where the kernel does.
    log: Option<MappingLog>,
    /// Files that had one at the last look.
    mapped: HashMap<Device, HashSet<u64>>,
    /// Tells what calls write, where the kernel does and it pays.
    calls: Option<Arc<Calls>>,
    /// How the frozen processes use the filesystems.
    uses: Option<HashMap<Device, Use>>,
}

#[derive(Debug)]
struct Mounted {
    mount: TmpfsMount,
    /// Or why it is left to CRIU.
    state: Result<Original, String>,
}

impl Source {
    /// Opens and watches the mounts that [`super::find`] found in the container whose first process is `init`. One that cannot
    /// be opened is left to CRIU; [`Self::decide`] says so.
    pub fn open(init: u32, found: &[TmpfsMount]) -> Self {
        let roots = match foreign_user_namespace(init) {
            true => Err("the container has a user namespace".to_owned()),
            false => clone_roots(init, found),
        };
        let states: Vec<Result<Original, String>> = match roots {
            Ok(roots) => {
                roots.into_iter().zip(found).map(|(root, mount)| root.and_then(|root| original(root, mount))).collect()
            }
            Err(why) => found.iter().map(|_| Err(why.clone())).collect(),
        };
        let mounts = found.iter().cloned().zip(states).map(|(mount, state)| Mounted { mount, state }).collect();
        let log = if found.is_empty() { None } else { MappingLog::start().ok() };
        let mut source = Self { init, mounts, log, mapped: HashMap::new(), calls: None, uses: None };
        if found.iter().filter(|mount| !mount.shared).map(|mount| mount.bytes).sum::<u64>() >= WORTH_FOLLOWING {
            source.follow();
        }
        source
    }

    /// Has the kernel tell what calls write.
    fn follow(&mut self) {
        // Of calls of other containers nothing is told.
        let own = self.mounts.iter().filter(|m| !m.mount.shared);
        let devices: Vec<Device> = own.filter_map(|m| m.state.as_ref().ok()).map(|state| state.device).collect();
        match Calls::start(self.init, devices.into_iter()) {
            Ok(calls) => {
                let calls = Arc::new(calls);
                self.mounts
                    .iter_mut()
                    .filter(|m| !m.mount.shared)
                    .filter_map(|m| m.state.as_mut().ok())
                    .for_each(|state| state.follow(&calls));
                self.calls = Some(calls);
            }
            Err(error) => {
                tracing::info!(%error, "files in tmpfs that are written are compared as a whole in the freeze");
            }
        }
    }

    /// How the processes use the filesystems, now and since the last look.
    fn look(&mut self, pids: &[u32]) -> HashMap<Device, Use> {
        // Read first: a mapping that comes and goes before the look is told next time.
        let mut since: HashSet<Mapped> = HashSet::new();
        let complete = self.log.as_mut().is_some_and(|log| {
            log.read(|mapped| {
                since.insert(mapped);
            })
        });
        let mut uses = look_for_suspects(pids, &self.devices(), &HashMap::new());
        for (device, found) in uses.iter_mut().filter(|_| complete) {
            let since = since.iter().filter(|mapped| mapped.device == *device).map(|mapped| mapped.ino);
            found.narrow(self.mapped.get(device), since);
        }
        self.mapped = uses.iter().map(|(device, found)| (*device, found.mapped.clone())).collect();
        uses
    }

    /// Sends what the peer does not have yet while the processes `pids` run. May be repeated.
    ///
    /// # Errors
    /// If something cannot be read, or the link breaks: the peer's copies are of no use then.
    pub fn pass(&mut self, pids: &[u32], sink: &mut dyn Sink) -> Result<Moved, CopyError> {
        let uses = self.look(pids);
        self.send(&uses, sink, false)
    }

    /// Decides, with the processes frozen, which mounts CRIU leaves alone: those that are still what they were, and in which CRIU
    /// has nothing to do itself. `others` are the processes of containers that have shared mounts, too.
    ///
    /// # Errors
    /// If the table of mounts cannot be read.
    pub fn decide(&mut self, pids: &[u32], others: &[u32]) -> Result<Decision, CopyError> {
        let now = candidates(&table(self.init)?, &[]);
        let alike = |mount: &TmpfsMount| now.iter().any(|m| m.identity == mount.identity);
        let uses = self.look(&[pids, others].concat());
        let mut decision = Decision::default();
        for (index, mounted) in self.mounts.iter_mut().enumerate() {
            if let Ok(state) = &mounted.state {
                let renamed = uses
                    .get(&state.device)
                    .map_or(Some(Vec::new()), |found| Renamed::all(self.init, &mounted.mount, state, found));
                let why = match (alike(&mounted.mount), renamed) {
                    (false, _) => Some("it was mounted or changed while its content was on its way"),
                    (_, None) => {
                        Some("a process has a file open by a name that is gone, which is not found under another one")
                    }
                    (_, Some(renamed)) => {
                        decision.renamed.extend(renamed);
                        None
                    }
                };
                if let Some(why) = why {
                    mounted.state = Err(why.to_owned());
                }
            }
            match &mounted.state {
                Ok(_) => decision.external.push((index, mounted.mount.point.clone())),
                Err(why) => decision.left.push(format!("{}: {why}", mounted.mount.point)),
            }
        }
        self.uses = Some(uses);
        Ok(decision)
    }

    /// Sends the rest, after [`Self::decide`] and with the processes still frozen: then the peer's copies are complete.
    ///
    /// # Errors
    /// As [`Self::pass`]; and if files change all the same.
    pub fn finish(&mut self, sink: &mut dyn Sink) -> Result<Moved, CopyError> {
        let uses = self.uses.take().unwrap_or_default();
        let moved = self.send(&uses, sink, true);
        // From here on it would only slow down system calls, CRIU's among them.
        if let Some(calls) = &self.calls {
            calls.end();
        }
        moved
    }

    /// Whether other containers have mount number `index`, too.
    pub fn is_shared(&self, index: usize) -> bool {
        self.mounts.get(index).is_some_and(|mounted| mounted.mount.shared)
    }

    fn devices(&self) -> Vec<Device> {
        self.mounts.iter().filter_map(|m| m.state.as_ref().ok()).map(|state| state.device).collect()
    }

    fn send(&mut self, uses: &HashMap<Device, Use>, sink: &mut dyn Sink, last: bool) -> Result<Moved, CopyError> {
        let mut moved = Moved::default();
        for (index, mounted) in self.mounts.iter_mut().enumerate() {
            let Ok(state) = &mut mounted.state else { continue };
            let found = uses.get(&state.device).cloned().unwrap_or_default();
            moved += state.pass(index, &found, &mut *sink, last)?;
        }
        Ok(moved)
    }
}

fn original(root: Root, mount: &TmpfsMount) -> Result<Original, String> {
    Original::in_memory(Place { root, point: PathBuf::from(&mount.point), limit: MAX_FILES })
}

fn foreign_user_namespace(init: u32) -> bool {
    let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user")).ok();
    of(&init.to_string()) != of("self")
}

/// Clones each mount without what is mounted on it, so that also what lies below other mounts is seen. This takes a thread that
/// is in the container's mount namespace.
fn clone_roots(init: u32, found: &[TmpfsMount]) -> Result<Vec<Result<Root, String>>, String> {
    let namespace =
        File::open(format!("/proc/{init}/ns/mnt")).map_err(|e| format!("its namespace cannot be opened: {e}"))?;
    let enter = || -> Result<Vec<Result<Root, String>>, String> {
        unshare(CloneFlags::CLONE_FS)
            .and_then(|()| setns(&namespace, CloneFlags::CLONE_NEWNS))
            .map_err(|e| format!("its namespace cannot be entered: {e}"))?;
        Ok(found.iter().map(|mount| clone_root(mount).map_err(|e| format!("it cannot be opened: {e}"))).collect())
    };
    std::thread::scope(|scope| {
        let entered = std::thread::Builder::new().name("tmpfs clone".into()).spawn_scoped(scope, enter);
        entered
            .map_err(|e| format!("no thread for it: {e}"))?
            .join()
            .unwrap_or_else(|_| Err("its clone failed".to_owned()))
    })
}

fn clone_root(mount: &TmpfsMount) -> rustix::io::Result<Root> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let seen = openat2(CWD, mount.point.as_str(), flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    if look(&seen, b"")?.stx_mnt_id != mount.id {
        // Something else is mounted over it.
        return Err(rustix::io::Errno::STALE);
    }
    Root::clone_of(seen)
}
