//! The source's half: what is there, what of it has changed, and the operations that tell the destination.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
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
        let apart = pids.iter().any(|pid| has_other_mounts(*pid, self.init));
        let mut decision = Decision::default();
        for (index, mounted) in self.mounts.iter_mut().enumerate() {
            if let Ok(state) = &mounted.state {
                let renamed = uses.get(&state.device).is_some_and(|found| found.renamed_by_criu);
                let why = match (alike(&mounted.mount), apart, renamed) {
                    (false, ..) => "it was mounted or changed while its content was on its way",
                    (_, true, _) => "a process has a mount namespace of its own",
                    (.., true) => "a process has a file open whose name is gone while it has another one",
                    _ => "",
                };
                if !why.is_empty() {
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

fn has_other_mounts(pid: u32, init: u32) -> bool {
    let of = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/mnt"));
    // One that cannot be told is a zombie, which has none.
    of(pid).is_ok_and(|own| of(init).is_ok_and(|theirs| own != theirs))
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
