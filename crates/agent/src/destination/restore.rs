//! The restore: from the last named page to tasks that are held, complete.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_criu::front::{self, Mark, Order};
use tranship_criu::preflight::zombies;
use tranship_memory::shared::copies;
use tranship_memory::{arguments, survey};
use tranship_storage::carried::Target;
use tranship_storage::overlay::Overlay;
use tranship_sys::awake::Awake;
use tranship_sys::clock::monotonic_ns;
use tranship_sys::process;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads;
use tranship_wire::message::Offer;

use super::{DestinationRun, RESTORE};
use crate::layout::{Layout, Role};
use crate::node::failed;
use crate::uncarried::Uncarried;
use crate::{tmpfs, wrapper};

/// How long memory may take to arrive once the skeleton is there and nothing moves.
const MEMORY: Duration = Duration::from_secs(600);
/// CRIU's name for the moment when it has made the namespaces, and what is in them.
const NAMESPACES_MADE: &str = "post-setup-namespaces";
/// How long the pages that the kernel reads for others may keep the tasks waiting.
const ARGUMENTS: Duration = Duration::from_secs(1);

impl DestinationRun {
    /// Waits until it is known of every page whether it has come, comes later or is zero. A task that is restored
    /// before may be given an old page.
    fn pages_named(&mut self) -> Result<(), Failure> {
        match self.inbox.store() {
            Ok(store) => {
                self.inbox.wait_named(MEMORY)?;
                store.settle_shared().map_err(failed)?;
                store.pager().named().map_err(failed)
            }
            // A restore that is done again after a restart of the agent: the pager has known for long.
            Err(_) if self.pager_serves() => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Lets criu restore, and then waits for the rest of the memory: the tasks are stopped, and complete.
    pub(super) fn restore(&mut self) -> Result<(), Failure> {
        self.check_images()?;
        let begun = monotonic_ns();
        self.pages_named()?;
        let start = monotonic_ns();
        self.timeline.note("memory: all named", begun, start);
        if let Ok(store) = self.inbox.store() {
            // Its table of shared memory is complete when it has answered.
            let status = store.pager().status(RESTORE).map_err(failed)?;
            if let Some(trouble) = status.trouble {
                return Err(Failure::new(format!(
                    "the container cannot be restored on node {}: {trouble}",
                    self.node.config.node
                )));
            }
        }
        self.inbox.tmpfs.wait("tmpfs", MEMORY, &mut self.timeline)?;
        self.inbox.trees.wait("files", MEMORY, &mut self.timeline)?;
        self.inbox.log.wait(MEMORY, &mut self.timeline)?;
        // A restore that is done again after a restart of the agent finds them in their places.
        self.targets.iter().try_for_each(Target::place).map_err(failed)?;
        self.put_root_back()?;
        wrapper::check_mounts(&self.bundle()).map_err(|why| {
            Failure::new(format!(
                "on node {}, {why:#}; mount it there by a path without symbolic links",
                self.node.config.node
            ))
        })?;
        // Files in memory are complete, and the front has other work from now on.
        self.inbox.charger.close();
        let brings = self.enter_pod()?;
        let words = |done: Option<&str>| {
            let killed = done.and_then(front::killed).map(|killed| format!("{killed} while it restored"));
            let last = killed.unwrap_or_else(|| self.layout.last_words(Role::Restore));
            let here = &self.node.config.node;
            let kept = self.layout.keep_log(Role::Restore, &self.node.history(), &self.id);
            let log = kept.map(|path| format!("; criu's log is {} on node {here}", path.display())).unwrap_or_default();
            Failure::new(format!("the container could not be restored on node {here}: {last}{log}"))
        };
        let awake = Awake::keep();
        let front = self.front.as_mut().ok_or_else(|| failed("there is no front"))?;
        front.handle.order(&Order::Go { external: tmpfs::for_restore(&self.layout, &self.offer)? }).map_err(failed)?;
        let tracked = || track_connections(&self.layout, &self.offer);
        self.timeline.time("network: connections tracked", tracked)?;
        let deadline = Instant::now() + RESTORE;
        let init = loop {
            match front.handle.next(deadline.saturating_duration_since(Instant::now())) {
                Ok(Mark::Held { init, at_ns }) => {
                    self.timeline.note("skeleton: restore", start, at_ns);
                    break init;
                }
                // Where pages were lost, that is the cause of whatever criu says.
                Ok(Mark::Done { message, .. }) => {
                    return Err(self.inbox.failed().unwrap_or_else(|| words(Some(&message))));
                }
                Err(_) => return Err(self.inbox.failed().unwrap_or_else(|| words(None))),
                Ok(Mark::Stage { script, .. }) if brings && script == NAMESPACES_MADE => self.inbox.pod.end(Ok(())),
                Ok(_) => {}
            }
        };
        // Tasks that have been let on without their pages are of no use.
        self.inbox.failed().map_or(Ok(()), Err)?;
        let arguments = fetch_arguments(init);
        self.check_shared()?;
        let tasks = tasks(init)?;
        self.check_zombies(&tasks)?;
        self.place_pages(&tasks)?;
        self.restore_uncarried(init, &tasks)?;
        self.await_arguments(&arguments);
        self.remember_engine()?;
        if self.offer.shares_memory {
            std::fs::write(self.layout.in_pod(), b"").map_err(failed)?;
        }
        drop(awake);
        let waited = monotonic_ns();
        if self.all_pages && self.inbox.store().is_ok() {
            self.inbox.wait_complete(MEMORY)?;
        }
        if !self.pager_serves() {
            return Err(failed("the pager was killed in the middle of the restore"));
        }
        // The copy would not be its container: a daemon that was restarted knows nothing of it.
        if !self.is_awaited() {
            let (engine, here) = (self.engine.name(), &self.node.config.node);
            return Err(Failure::new(format!(
                "{engine} on node {here} has given up the start of the container, as it does when its daemon is restarted; try again"
            )));
        }
        self.timeline.note("memory: last pages", waited, monotonic_ns());
        Ok(())
    }

    /// Waits until what the containers of the pod share is there, where another one brings it. Where this one does, tells the others, or returns true if its
    /// restore has to make IPC objects first. What is there already is not made again: it may have changed, where the others run.
    fn enter_pod(&mut self) -> Result<bool, Failure> {
        if !self.offer.shares_memory {
            return Ok(false);
        }
        let is_again = self.layout.in_pod().exists();
        let bringer = self.offer.network_owner.as_ref().filter(|_| !is_again);
        if let Some(inbox) = bringer.and_then(|owner| self.node.arrivals.inbox_of(owner)) {
            let start = monotonic_ns();
            inbox.pod.wait(RESTORE)?;
            self.timeline.note("memory: of the pod", start, monotonic_ns());
        }
        let brings = self.offer.network_owner.is_none();
        let objects = ipc_images(&self.layout.images()).map_err(failed)?;
        if brings && !is_again && !objects.is_empty() {
            return Ok(true);
        }
        // Segments are found by their ids.
        let mut found = objects.iter().filter(|(kind, _)| kind != "shm");
        found.try_for_each(|(_, path)| std::fs::remove_file(path)).map_err(failed)?;
        if brings {
            self.inbox.pod.end(Ok(()));
        }
        Ok(false)
    }

    /// Mounts the overlay again that the runtime wrapper has set aside: its upper directory is complete.
    fn put_root_back(&self) -> Result<(), Failure> {
        let overlay: Overlay = match std::fs::read(self.bundle().join(wrapper::OVERLAY)) {
            Ok(note) => serde_json::from_slice(&note).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        if overlay.put_back().map_err(failed)? {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the container's root {} is not mounted any more on node {}: its start there was given up, by the engine or by \
             whoever removed it; move it again",
            overlay.point().display(),
            self.node.config.node
        )))
    }

    /// Whether criu has taken the shared memory that was brought: what it made instead is empty.
    fn check_shared(&self) -> Result<(), Failure> {
        let empty = tranship_criu::hidden::left_empty(&self.layout.shared(), &self.layout.images());
        if empty.is_empty() {
            return Ok(());
        }
        Err(Failure::new(format!(
            "criu on node {} did not take shared memory {empty:?} from the memory plane; put the libtranship_preload.so of \
             this version beside transhipd there",
            self.node.config.node
        )))
    }

    /// Puts the pages that were files' into the held tasks, before they run.
    fn place_pages(&mut self, tasks: &HashMap<u32, u32>) -> Result<(), Failure> {
        let objects = tranship_criu::hidden::pages(&self.layout.shared());
        if objects.is_empty() {
            return Ok(());
        }
        let start = monotonic_ns();
        let place = |(pid, path): &(u32, PathBuf)| {
            let place = || {
                let file = File::open(path)?;
                match tasks.get(pid) {
                    Some(task) => copies::place(&file, *task),
                    // It had ended before the freeze: a command that a shell has started, or a
                    // health check.
                    None if !self.layout.images().join(format!("core-{pid}.img")).exists() => Ok(0),
                    None => Err(io::Error::other("there is no such process")),
                }
            };
            place().map(drop).map_err(|error| {
                let node = &self.node.config.node;
                Failure::new(format!("the pages of process {pid} cannot be put in place on node {node}: {error}"))
            })
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        threads::in_parts("pages", &objects, cores, |part| part.iter().try_for_each(place))?;
        self.timeline.note("memory: pages of files", start, monotonic_ns());
        Ok(())
    }

    /// Waits for what the kernel tells of the tasks. They can do without it for a while.
    fn await_arguments(&mut self, fetched: &Receiver<io::Result<()>>) {
        let start = monotonic_ns();
        let failed = match fetched.recv_timeout(ARGUMENTS) {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("their pages do not come".to_owned()),
        };
        self.timeline.note("memory: arguments", start, monotonic_ns());
        if let Some(error) = failed {
            tracing::warn!(id = %self.id, error, "arguments and environment of processes may not be seen at once");
        }
    }

    /// Whether the zombies have been made that CRIU's images do not have.
    fn check_zombies(&self, tasks: &HashMap<u32, u32>) -> Result<(), Failure> {
        let listed = zombies::listed(&self.layout.images()).map_err(failed)?;
        let of = |(parent, all): (&u32, &BTreeSet<u32>)| {
            tasks.get(parent).map_or(all.len(), |parent| zombies::missing(*parent, all))
        };
        let missing: usize = listed.iter().map(of).sum();
        let changed = zombies::changed(&self.layout.images(), tasks.values().copied()).map_err(failed)?;
        if missing + changed == 0 {
            return Ok(());
        }
        Err(Failure::new(format!(
            "criu on node {} did not make {missing} of the container's zombies, and changed how {changed} ended; put the \
             libtranship_preload.so of this version beside transhipd there",
            self.node.config.node
        )))
    }

    /// Gives the held tasks what criu does not carry.
    fn restore_uncarried(&mut self, init: u32, tasks: &HashMap<u32, u32>) -> Result<(), Failure> {
        self.inbox.tmpfs.set_flags()?;
        let put_right = tranship_criu::mount_flags::put_right(&self.layout.images(), init);
        match put_right.map_err(|error| format!("the options of mounts cannot be restored: {error}")) {
            Ok(0) => {}
            Ok(mounts) => tracing::info!(id = %self.id, mounts, "mounts have their options again, which criu dropped"),
            Err(why) => return Err(Failure::new(format!("on node {}, {why}", self.node.config.node))),
        }
        let Some(uncarried) = Uncarried::read(&self.layout.images())? else { return Ok(()) };
        let start = monotonic_ns();
        let restored = uncarried.restore(init, tasks).and_then(|()| {
            let socket = self.layout.front_socket(Role::Restore);
            front::note_queues(&socket, &uncarried.queues(tasks))
                .map_err(|error| format!("its queues of inotify events cannot be noted: {error}"))
        });
        self.timeline.note("descriptors: what criu has not carried", start, monotonic_ns());
        restored.map_err(|why| Failure::new(format!("on node {}, {why}", self.node.config.node)))
    }
}

/// The images of System V objects, with their kinds; criu writes none where there are no objects.
fn ipc_images(images: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(images)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some((kind, _)) = name.strip_prefix("ipcns-").and_then(|rest| rest.split_once('-'))
            && ["shm", "sem", "msg"].contains(&kind)
        {
            found.push((kind.to_owned(), path));
        }
    }
    Ok(found)
}

/// Has what the kernel tells of the held tasks fetched, beside what else is done with them: from the source, where it has not come. A thread that
/// waits for a page ends with its pager.
fn fetch_arguments(init: u32) -> Receiver<io::Result<()>> {
    let (done, fetched) = mpsc::channel();
    let result = done.clone();
    let started = threads::start("arguments", move || {
        schedule::stand(Standing::Favoured);
        // Who waited for it may have given up.
        let _ = result.send(arguments::fetch_all(&process::family(init)));
    });
    started.err().into_iter().for_each(|error| drop(done.send(Err(error))));
    fetched
}

/// The pids here of restored tasks, by those that they have in the container.
fn tasks(init: u32) -> Result<HashMap<u32, u32>, Failure> {
    let tasks = process::family(init).into_iter().map(|pid| survey::id_of(pid).map(|id| (id.0, pid)));
    tasks.collect::<Result<_, _>>().map_err(failed)
}

/// Has the kernel know the connections that the source's kernel has tracked, while criu makes their sockets.
fn track_connections(layout: &Layout, offer: &Offer) -> Result<(), Failure> {
    let Some((path, identity)) = &offer.network else { return Ok(()) };
    if let Some(entries) = tracked(&layout.conntrack())? {
        tranship_network::track(path, &entries).map_err(failed)?;
    }
    if let Some(entries) = tracked(&layout.node_conntrack())?
        && let Err(error) = tranship_network::track_on_node(identity, &entries)
    {
        tracing::warn!(%error, "a firewall of this node that goes by states may stop connections of the container");
    }
    Ok(())
}

fn tracked(path: &Path) -> Result<Option<Vec<u8>>, Failure> {
    match std::fs::read(path) {
        Ok(entries) => Ok(Some(entries)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
