//! The skeleton: criu's images, which are sent as criu writes them.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tranship_coordinator::Failure;
use tranship_criu::front::{self, Mark, Order};
use tranship_criu::irmap;
use tranship_criu::preflight::zombies;
use tranship_criu::rpc::ExternalMount;
use tranship_engine::{Container, EtcFiles};
use tranship_network::{Conntrack, NetworkError, NodeConntrack};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads;
use tranship_transport::Link;
use tranship_types::{Allowances, Blocker};
use tranship_wire::message::Request;

use super::streams::{understands_options, understands_socket_files, understands_states};
use super::{FROZEN_PATIENCE, SourceRun, failed};
use crate::interrupt::{Interrupt, LOOK};
use crate::layout::Role;
use crate::tmpfs;
use crate::uncarried::{self, Network, Uncarried};

/// The images that criu has written completely. It opens each of them once.
#[derive(Debug)]
pub(super) struct Written {
    closed: Inotify,
    directory: PathBuf,
    /// What was sent, as it was then.
    sent: HashMap<PathBuf, Metadata>,
}

impl Written {
    fn watch(directory: PathBuf) -> Result<Self, Failure> {
        let closed = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(failed)?;
        closed.add_watch(&directory, AddWatchFlags::IN_CLOSE_WRITE).map_err(failed)?;
        Ok(Self { closed, directory, sent: HashMap::new() })
    }

    /// Waits until there are more, or the other descriptor has something to say. An error says that nobody waits any longer.
    fn wait(&self, other: BorrowedFd<'_>, interrupt: &Interrupt) -> Result<(), Failure> {
        let deadline = Instant::now() + FROZEN_PATIENCE;
        let mut fds = [self.closed.as_fd(), other].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let look = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
        loop {
            interrupt.check()?;
            match poll(&mut fds, look) {
                Ok(0) if Instant::now() > deadline => {
                    return Err(Failure::new(format!("criu has written nothing for {FROZEN_PATIENCE:?}")));
                }
                Ok(0) => {}
                Ok(_) | Err(nix::errno::Errno::EINTR) => return Ok(()),
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Those that have been completed since the last call. What an engine writes there is left for the end.
    fn take(&mut self) -> Result<Vec<PathBuf>, Failure> {
        let names = self.closed.read_events().unwrap_or_default().into_iter().filter_map(|event| event.name);
        let images =
            names.map(|name| self.directory.join(name)).filter(|path| path.extension().is_some_and(|e| e == "img"));
        let mut new = Vec::new();
        for path in images {
            if !self.sent.contains_key(&path) {
                let seen = path.metadata().map_err(failed)?;
                self.sent.insert(path.clone(), seen);
                new.push(path);
            }
        }
        Ok(new)
    }

    /// All that is there at the end and was not sent.
    fn rest(&self) -> Result<Vec<PathBuf>, Failure> {
        let same = |one: &Metadata, other: &Metadata| {
            let version = |of: &Metadata| (of.ino(), of.len(), of.mtime(), of.mtime_nsec());
            version(one) == version(other)
        };
        let mut rest = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed)?.flatten() {
            let path = entry.path();
            match self.sent.get(&path) {
                None => rest.push(path),
                Some(seen) if same(seen, &entry.metadata().map_err(failed)?) => {}
                Some(_) => return Err(changed(&path)),
            }
        }
        rest.sort();
        Ok(rest)
    }
}

/// What criu does not carry of the frozen container.
struct Found {
    uncarried: Uncarried,
    /// From when to when that was looked for.
    times: (u64, u64),
    /// What the kernel tracks of its connections inside its namespace.
    tracked: Option<Vec<u8>>,
    /// And outside of it, on the node.
    tracked_by_node: Vec<u8>,
}

/// Where the kernel tracks any connections, what tells which.
type Trackers = (Option<Conntrack>, Option<NodeConntrack>);

fn look(
    container: &Container,
    network: &Network<'_>,
    (carried_pipes, allowed): (&[String], Allowances),
    (inside, node): Trackers,
) -> Result<Found, Failure> {
    // Beside the dump, which takes longer.
    schedule::stand(Standing::Favoured);
    let begun = monotonic_ns();
    let uncarried =
        uncarried::look(container, network, container.network_namespace().as_deref(), (carried_pipes, allowed))?;
    if let Some(file) = EtcFiles::changed(container).first() {
        let file = file.display();
        return Err(Failure::new(format!(
            "{file} was written to in the container during the move, and is different at the destination; try again"
        )));
    }
    if tranship_engine::other_limits_were_changed(container) {
        return Err(Failure::new(super::LIMITS_CHANGED));
    }
    let tracked = inside.map(|mut conntrack| conntrack.entries()).transpose().map_err(failed)?;
    let mut tracked_by_node = Vec::new();
    if let Some(mut conntrack) = node {
        let _ = conntrack.entries(&mut tracked_by_node).inspect_err(not_carried);
    }
    Ok(Found { uncarried, times: (begun, monotonic_ns()), tracked, tracked_by_node })
}

/// Not all that this node tracks of the container's connections. Most nodes let packets pass without.
pub(super) fn not_carried(error: &NetworkError) {
    tracing::warn!(%error, "what this node tracks of the container's connections is not carried");
}

/// Of shared memory an image has its number for a name, and a System V segment's id may be the number of a file in memory.
fn changed(path: &Path) -> Failure {
    let path = path.display().to_string();
    let cause = match path.contains("-shmem-") {
        true => {
            "two of the container's shared memories have the same number, by which criu knows them; try again when one of them is gone"
        }
        false => "this version of criu needs another one of Tranship",
    };
    Failure::new(format!("criu wrote to its image {path} again when it had been sent: {cause}"))
}

/// A failure of criu's, and of a process that was started by exec at that moment, if there is one.
fn failure_to_dump(why: &str, log: &str, entered: Option<Blocker>) -> Failure {
    let beside = entered.as_ref().map(|blocker| format!(" ({})", blocker.cause)).unwrap_or_default();
    let message = format!(
        "the container could not be dumped: {why}{beside}{log}; `tranship move --dry-run` lists what is known to stand in the way"
    );
    Failure { blockers: entered.into_iter().collect(), ..Failure::new(message) }
}

impl SourceRun {
    /// Lets criu dump, and sends what it writes.
    pub(super) fn skeleton(
        &mut self,
        (external, needs_files): (Vec<ExternalMount>, bool),
        all_pages: bool,
    ) -> Result<(), Failure> {
        let start = monotonic_ns();
        self.control()?.set_timeout(Some(FROZEN_PATIENCE)).map_err(failed)?;
        let mut written = Written::watch(self.layout.images())?;
        let container = self.inspected()?.0.clone();
        if let Some(cache) = irmap::cache(container.init, &self.watchers).map_err(failed)? {
            std::fs::write(self.layout.work().join(irmap::FILE), cache).map_err(failed)?;
        }
        self.front()?.handle.order(&Order::Go { external }).map_err(failed)?;
        let trackers = self.trackers()?;
        let (carried_pipes, allowed) = (self.carried_pipes.clone(), self.report.read().options.allow);
        let (others, is_joined, pod) = (self.unit_containers(), self.joins_network(), self.pod.clone());
        // By this container's move, or by another one's, which fails if they cannot be.
        let has_pod_s = pod.as_ref().is_some_and(|pod| pod.shared_memory(&container).is_some());
        let files_are_brought = self.shares_memory()
            && has_pod_s
            && (is_joined || tmpfs::of_pod(&self.layout, &self.inspected()?.1)?.is_some());
        std::thread::scope(|scope| {
            let network = Network { others: &others, is_joined, pod: pod.as_ref(), files_are_brought };
            let found =
                threads::beside(scope, "look", move || look(&container, &network, (&carried_pipes, allowed), trackers));
            while !self.dumped(&written)? {
                let images = written.take()?;
                if !images.is_empty() {
                    self.send_images(&images, true, false)?;
                }
            }
            let Found { uncarried, times, tracked, tracked_by_node } = found.join()?;
            self.timeline.note("descriptors: what criu does not carry", times.0, times.1);
            self.has_groups = uncarried.has_groups();
            let version = self.control()?.version();
            understands_options(version, &self.peer, &uncarried.newer_options())?;
            understands_socket_files(version, &self.peer, uncarried.has_socket_files())?;
            understands_states(version, &self.peer, uncarried.newer_state())?;
            uncarried.write(&self.layout.images())?;
            tracked.map_or(Ok(()), |entries| std::fs::write(self.layout.conntrack(), entries)).map_err(failed)?;
            match tracked_by_node.is_empty() {
                true => Ok(()),
                false => std::fs::write(self.layout.node_conntrack(), tracked_by_node).map_err(failed),
            }
        })?;
        let dumped = monotonic_ns();
        self.timeline.note("skeleton: dump", start, dumped);
        if !tranship_criu::hidden::was_used(&self.layout.hidden()) {
            // Nobody has hidden them from criu.
            let _ = std::fs::remove_file(self.layout.images().join(zombies::FILE));
            self.zombies.show();
            self.zombies.list(&self.layout.images()).map_err(failed)?;
        }
        self.send_images(&written.rest()?, false, needs_files)?;
        self.written = Some(written);
        self.timeline.note("skeleton: sent", dumped, monotonic_ns());
        // Said now, so that the destination restores while memory is still on its way.
        self.say(&Request::Ready { all_pages })
    }

    /// Ends the watch over CRIU's images, which nobody waits for.
    pub(super) fn close_images(&mut self) {
        if let Some(written) = self.written.take() {
            let _ = threads::start("images", move || drop(written));
        }
    }

    /// Asks whether there is anything to ask for. Nothing passes the gate meanwhile.
    fn trackers(&mut self) -> Result<Trackers, Failure> {
        let mut inside = self.conntrack.take();
        let any = inside.as_mut().map_or(Ok(0), Conntrack::count).map_err(failed)? > 0;
        let mut node = self.node_conntrack.take();
        let any_by_node =
            node.as_mut().is_some_and(|conntrack| conntrack.any().inspect_err(not_carried).unwrap_or(false));
        Ok((inside.filter(|_| any), node.filter(|_| any_by_node)))
    }

    /// Waits until the dump is done (then true), or there are more images.
    fn dumped(&mut self, written: &Written) -> Result<bool, Failure> {
        let interrupt = Arc::clone(&self.interrupt);
        let handle = &mut self.front()?.handle;
        if handle.is_quiet() {
            written.wait(handle.as_fd(), &interrupt)?;
            if handle.is_quiet() {
                return Ok(false);
            }
        }
        match handle.next(FROZEN_PATIENCE) {
            Ok(Mark::Done { success: true, .. }) => Ok(true),
            Ok(Mark::Done { success: false, message, .. }) => Err(match front::killed(&message) {
                Some(killed) => failed(format!("{killed} while it dumped; try again")),
                None => self.not_dumped(),
            }),
            Err(_) => Err(self.not_dumped()),
            Ok(_) => Ok(false),
        }
    }

    /// Why criu has not dumped the container. Its log is kept with the report.
    fn not_dumped(&mut self) -> Failure {
        let entered = self.entered_in_the_freeze();
        let why = self.layout.last_words(Role::Dump);
        let kept = self.layout.keep_log(Role::Dump, &self.node.history(), &self.id);
        let log = kept.as_ref().map(|path| format!("; criu's log is {}", path.display())).unwrap_or_default();
        self.report.change(|r| r.criu_log = kept.map(|path| path.to_string_lossy().into_owned()));
        failure_to_dump(&why, &log, entered)
    }

    fn send_images(&mut self, images: &[PathBuf], early: bool, tmpfs: bool) -> Result<(), Failure> {
        let not_sent = |why: &dyn std::fmt::Display| Failure::new(format!("the skeleton cannot be sent: {why}"));
        self.say(&Request::Skeleton { files: images.len() as u32, early, tmpfs })?;
        let control = self.control()?;
        for image in images {
            tranship_wire::send_file(control, image, u64::MAX).map_err(|e| not_sent(&e))?;
        }
        control.flush().map_err(|e| not_sent(&e))
    }

    fn front(&mut self) -> Result<&mut crate::layout::Front, Failure> {
        self.front.as_mut().ok_or_else(|| failed("there is no front"))
    }
}

#[cfg(test)]
mod tests {
    use tranship_types::BlockerKind;

    use super::*;

    #[test]
    fn a_process_of_exec_does_not_hide_why_a_dump_failed() {
        let alone = failure_to_dump("criu says: no space", "; criu's log is /x", None);
        assert!(
            alone.blockers.is_empty() && alone.message.contains("criu says: no space; criu's log is /x"),
            "{alone}"
        );
        let entered = Blocker::new(BlockerKind::Process, "sh (pid 7) was started by exec", "wait").passing();
        let both = failure_to_dump("criu says: no space", "", Some(entered.clone()));
        assert!(both.message.contains("no space (sh (pid 7) was started by exec)"), "{both}");
        assert_eq!(both.blockers, [entered]);
    }
}
