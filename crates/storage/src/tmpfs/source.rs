//! The source's half: what is there, what of it has changed, and the operations that tell the destination.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::mount::{OpenTreeFlags, open_tree};

use super::content::{self, Sent, Trouble};
use super::find::{TmpfsMount, candidates, table};
use super::op::{Kind, Name, Op};
use super::suspects::{self, Device, Use};
use super::tree::{Entry, Node, Tree, look, open_beneath};
use super::watch::{Events, Watch};
use super::{GRAIN, Sink, TmpfsError};

/// What a pass has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of content.
    pub bytes: u64,
    /// Files whose content was sent, or a part of it.
    pub files: u64,
}

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
    /// How the frozen processes use the filesystems.
    uses: Option<HashMap<Device, Use>>,
}

#[derive(Debug)]
struct Mounted {
    mount: TmpfsMount,
    /// Or why it is left to CRIU.
    state: Result<State, String>,
}

#[derive(Debug)]
struct State {
    /// The filesystem's root, in a clone of the mount on which nothing else is mounted, and that nobody else sees.
    root: OwnedFd,
    device: Device,
    watch: Watch,
    tree: Option<Tree>,
    sent: HashMap<u64, Sent>,
    /// Inodes whose ctime was too young to be believed when it was looked at.
    doubted: HashSet<u64>,
    /// Inodes that the peer has extended attributes of.
    attributed: HashSet<u64>,
}

impl Source {
    /// Opens and watches the mounts that [`super::find`] found in the container whose first process is `init`. One that cannot
    /// be opened is left to CRIU; [`Self::decide`] says so.
    pub fn open(init: u32, found: &[TmpfsMount]) -> Self {
        let roots = match foreign_user_namespace(init) {
            true => Err("the container has a user namespace".to_owned()),
            false => clone_roots(init, found),
        };
        let states: Vec<Result<State, String>> = match roots {
            Ok(roots) => roots.into_iter().map(|root| root.and_then(State::new)).collect(),
            Err(why) => found.iter().map(|_| Err(why.clone())).collect(),
        };
        let mounts = found.iter().cloned().zip(states).map(|(mount, state)| Mounted { mount, state }).collect();
        Self { init, mounts, uses: None }
    }

    /// Sends what the peer does not have yet while the processes `pids` run. May be repeated.
    ///
    /// # Errors
    /// If something cannot be read, or the link breaks: the peer's copies are of no use then.
    pub fn pass(&mut self, pids: &[u32], sink: &mut dyn Sink) -> Result<Moved, TmpfsError> {
        let uses = suspects::look(pids, &self.devices());
        self.send(&uses, sink, false)
    }

    /// Decides, with the processes frozen, which mounts CRIU leaves alone: those that are still what they were, and in which CRIU
    /// has nothing to do itself.
    ///
    /// # Errors
    /// If the table of mounts cannot be read.
    pub fn decide(&mut self, pids: &[u32]) -> Result<Decision, TmpfsError> {
        let now = candidates(&table(self.init)?, &[]);
        let alike = |mount: &TmpfsMount| now.iter().any(|m| m.identity == mount.identity);
        let uses = suspects::look(pids, &self.devices());
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
    pub fn finish(&mut self, sink: &mut dyn Sink) -> Result<Moved, TmpfsError> {
        let uses = self.uses.take().unwrap_or_default();
        self.send(&uses, sink, true)
    }

    fn devices(&self) -> Vec<Device> {
        self.mounts.iter().filter_map(|m| m.state.as_ref().ok()).map(|state| state.device).collect()
    }

    fn send(&mut self, uses: &HashMap<Device, Use>, sink: &mut dyn Sink, last: bool) -> Result<Moved, TmpfsError> {
        let mut moved = Moved::default();
        for (index, mounted) in self.mounts.iter_mut().enumerate() {
            let Ok(state) = &mut mounted.state else { continue };
            let found = uses.get(&state.device).cloned().unwrap_or_default();
            let point = PathBuf::from(&mounted.mount.point);
            let mut pass = Pass { state, point: &point, sink: &mut *sink, moved: Moved::default(), last };
            pass.run(index, &found)?;
            moved.bytes += pass.moved.bytes;
            moved.files += pass.moved.files;
        }
        Ok(moved)
    }
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
fn clone_roots(init: u32, found: &[TmpfsMount]) -> Result<Vec<Result<OwnedFd, String>>, String> {
    let namespace =
        File::open(format!("/proc/{init}/ns/mnt")).map_err(|e| format!("its namespace cannot be opened: {e}"))?;
    let enter = || -> Result<Vec<Result<OwnedFd, String>>, String> {
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

fn clone_root(mount: &TmpfsMount) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let seen = openat2(CWD, mount.point.as_str(), flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    if look(&seen, b"")?.stx_mnt_id != mount.id {
        // Something else is mounted over it.
        return Err(rustix::io::Errno::STALE);
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let clone = open_tree(&seen, "", flags)?;
    // Holds the clone for as long as it is open.
    open_beneath(&clone, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOATIME)
}

impl State {
    fn new(root: OwnedFd) -> Result<Self, String> {
        let stat = look(&root, b"").map_err(|e| format!("it cannot be looked at: {e}"))?;
        let watch = Watch::start(&root).map_err(|e| format!("it cannot be watched: {e}"))?;
        Ok(Self {
            root,
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            watch,
            tree: None,
            sent: HashMap::new(),
            doubted: HashSet::new(),
            attributed: HashSet::new(),
        })
    }
}

/// One pass over one mount.
struct Pass<'a> {
    state: &'a mut State,
    point: &'a Path,
    sink: &'a mut dyn Sink,
    moved: Moved,
    /// The container is frozen: nothing may change under this pass.
    last: bool,
}

impl Pass<'_> {
    fn op(&mut self, op: &Op) -> Result<(), TmpfsError> {
        self.sink.op(op).map_err(TmpfsError::Link)
    }

    fn run(&mut self, index: usize, found: &Use) -> Result<(), TmpfsError> {
        // Taken before the look, so that what happens during it counts for the next pass.
        let events = self.state.watch.take();
        let quiet = !events.any && found.suspects.is_empty() && !found.open_for_writing;
        if quiet && let Some(tree) = &self.state.tree {
            let root = tree.root;
            if self.last {
                self.op(&Op::Mount { index, root })?;
                self.op(&Op::PassEnd { last: true })?;
            }
            return Ok(());
        }
        let start = SystemTime::now();
        let new = Tree::read(&self.state.root, self.point)?;
        let old = self.state.tree.take().unwrap_or_else(|| Tree { root: new.root, ..Tree::default() });
        self.op(&Op::Mount { index, root: new.root })?;
        let parked = self.names(&old, &new)?;
        let touched = self.contents(&old, &new, found, &events)?;
        for (ino, node) in &new.nodes {
            let changed = old.nodes.get(ino).is_none_or(|was| was.kind != node.kind || node.differs(was));
            if changed || touched.contains(ino) || self.state.doubted.contains(ino) || (parked && *ino == new.root) {
                self.attributes(&new, *ino, node)?;
            }
        }
        self.op(&Op::PassEnd { last: self.last })?;
        let grain = start.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(GRAIN);
        let limit = (i64::try_from(grain.as_secs()).unwrap_or(i64::MAX), grain.subsec_nanos());
        let state = &mut *self.state;
        state.doubted = new.nodes.iter().filter(|(_, node)| node.ctime >= limit).map(|(ino, _)| *ino).collect();
        state.sent.retain(|ino, _| new.nodes.contains_key(ino));
        state.attributed.retain(|ino| new.nodes.contains_key(ino));
        state.tree = Some(new);
        Ok(())
    }

    /// Makes the peer's names equal. Returns whether inodes were parked.
    fn names(&mut self, old: &Tree, new: &Tree) -> Result<bool, TmpfsError> {
        let same = |ino: &u64| match (old.nodes.get(ino), new.nodes.get(ino)) {
            (Some(was), Some(is)) => was.kind == is.kind,
            _ => false,
        };
        let stays = |entry: &Entry, ino: &u64| new.names.get(entry) == Some(ino) && same(ino);
        // Inodes that keep a name need none to be held by.
        let mut held: HashSet<u64> = old.names.iter().filter(|(e, ino)| stays(e, ino)).map(|(_, ino)| *ino).collect();
        let mut parked = false;
        // What is in a directory comes before the directory, so that one that goes is empty by then.
        for entry in old.order.iter().rev() {
            let Some(ino) = old.names.get(entry) else { continue };
            if stays(entry, ino) {
                continue;
            }
            let (ino, parent, name) = (*ino, entry.0, Name(entry.1.clone()));
            if same(&ino) && held.insert(ino) {
                parked = true;
                self.op(&Op::Park { ino, parent, name })?;
            } else {
                self.op(&Op::Unname { ino, parent, name })?;
            }
        }
        let mut made = HashSet::new();
        for entry in &new.order {
            let Some(ino) = new.names.get(entry) else { continue };
            if old.names.get(entry) == Some(ino) && same(ino) {
                continue;
            }
            let (ino, parent, name) = (*ino, entry.0, Name(entry.1.clone()));
            if same(&ino) || !made.insert(ino) {
                self.op(&Op::Name { ino, parent, name })?;
            } else {
                self.state.sent.remove(&ino);
                self.state.attributed.remove(&ino);
                let kind = new.nodes[&ino].kind.clone();
                self.op(&Op::Make { ino, parent, name, kind })?;
            }
        }
        if parked {
            self.op(&Op::Unpark)?;
        }
        Ok(parked)
    }

    /// Makes the content of files equal. Returns those of which the peer's have another time since.
    fn contents(&mut self, old: &Tree, new: &Tree, found: &Use, events: &Events) -> Result<HashSet<u64>, TmpfsError> {
        let mut due: Vec<u64> = Vec::new();
        for (ino, node) in new.nodes.iter().filter(|(_, node)| node.kind == Kind::File) {
            let untold = events.lost || events.closed.contains(ino) || found.suspects.contains(ino);
            let changed = old.nodes.get(ino).is_none_or(|was| was.kind != Kind::File || node.content_differs(was));
            if untold || changed || self.state.doubted.contains(ino) || !self.state.sent.contains_key(ino) {
                due.push(*ino);
            }
        }
        // Those that shrink come first: what they leave may be what others need.
        let grown =
            |ino: &u64| new.nodes[ino].size.cast_signed() - old.nodes.get(ino).map_or(0, |n| n.size).cast_signed();
        due.sort_by_key(|ino| (grown(ino), *ino));
        let mut touched = HashSet::new();
        for ino in due {
            let path = new.path(ino);
            let full = || self.point.join(&path);
            let file = match open_beneath(&self.state.root, &path, OFlags::RDONLY | OFlags::NOATIME) {
                Ok(file) => file,
                Err(_) if !self.last => continue,
                Err(e) => return Err(TmpfsError::refused("open", &full(), e)),
            };
            let stat = look(&file, b"").map_err(|e| TmpfsError::refused("look at", &full(), e))?;
            if stat.stx_ino != ino {
                // Another one by the same name; the next pass sorts it out.
                if self.last {
                    return Err(TmpfsError::Changed { path: full() });
                }
                continue;
            }
            let before = self.state.sent.remove(&ino).unwrap_or_default();
            let outcome =
                content::send(&file, ino, stat.stx_size, &before, self.sink).map_err(|trouble| match trouble {
                    Trouble::Read(e) => TmpfsError::refused("read", &full(), e),
                    Trouble::Link(e) => TmpfsError::Link(e),
                })?;
            self.state.sent.insert(ino, outcome.sent);
            self.moved.bytes += outcome.bytes;
            if outcome.touched {
                self.moved.files += 1;
                touched.insert(ino);
            }
        }
        Ok(touched)
    }

    fn attributes(&mut self, tree: &Tree, ino: u64, node: &Node) -> Result<(), TmpfsError> {
        let mut xattrs = None;
        if matches!(node.kind, Kind::File | Kind::Directory) {
            let path = tree.path(ino);
            let full = || self.point.join(&path);
            match open_beneath(&self.state.root, &path, OFlags::RDONLY | OFlags::NOATIME) {
                Ok(file) => {
                    let all = extended(&file).map_err(|e| TmpfsError::refused("read the attributes of", &full(), e))?;
                    if !all.is_empty() || self.state.attributed.contains(&ino) {
                        xattrs = Some(all);
                        self.state.attributed.insert(ino);
                    }
                }
                Err(_) if !self.last => {}
                Err(e) => return Err(TmpfsError::refused("open", &full(), e)),
            }
        }
        let &Node { mode, uid, gid, atime, mtime, .. } = node;
        self.op(&Op::Meta { ino, mode, uid, gid, atime, mtime, xattrs })
    }
}

/// The extended attributes of an open file. Security labels are the host's policy's own.
fn extended(file: &OwnedFd) -> rustix::io::Result<Vec<(Name, Name)>> {
    use rustix::fs::{fgetxattr, flistxattr, flistxattr_query};
    if matches!(flistxattr_query(file), Ok(0) | Err(rustix::io::Errno::OPNOTSUPP)) {
        return Ok(Vec::new());
    }
    let mut list = vec![0; 64 << 10];
    let length = flistxattr(file, list.as_mut_slice())?;
    let mut all = Vec::new();
    for name in list[..length].split(|b| *b == 0).filter(|n| !n.is_empty() && *n != b"security.selinux") {
        let mut value = vec![0; 64 << 10];
        match fgetxattr(file, name, value.as_mut_slice()) {
            Ok(length) => all.push((Name(name.to_vec()), Name(value[..length].to_vec()))),
            // It was removed just now.
            Err(rustix::io::Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}
