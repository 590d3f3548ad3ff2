//! One migration's directory in memory, and the fronts and pager that live in it.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::Signal;
use tranship_coordinator::{Failure, Journal};
use tranship_criu::find::Criu;
use tranship_criu::front::{self, FrontHandle, FrontPlan, Given, HandleError, Mark, Order};
use tranship_criu::preflight::zombies;
use tranship_criu::rpc::Overrides;
use tranship_engine::{Freezer, Images};
use tranship_sys::launch::{Program, Started, Stream};
use tranship_sys::restart_blocks;
use tranship_types::{MigrationId, StdioStream};
use tranship_wire::message::Offer;

use crate::criu_log::{self, Cause};
use crate::interrupt::Interrupt;
use crate::program;

/// The copy of the first record of a migration's journal, in its directory.
pub const FIRST_RECORD: &str = "begin";
/// What is reported where neither log tells the cause.
pub const NO_WORDS: &str = "neither criu nor the engine has left a word in its log";
/// How long an engine may take until it asks criu for something.
const ENGINE_START: Duration = Duration::from_secs(30);
/// How long a killed criu and its front may take to end.
const DEATH: Duration = Duration::from_secs(5);
/// How long the tasks of a killed criu may take to stand still again.
const FROZEN_AGAIN: Duration = Duration::from_secs(1);
/// How long a front waits for its order before it gives up.
const FRONT_PATIENCE: Duration = Duration::from_secs(600);

/// Which of the two fronts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// On the source.
    Dump,
    /// On the destination.
    Restore,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Dump => "dump",
            Role::Restore => "restore",
        }
    }
}

/// Options of the tar with which CRIU packs a tmpfs that is left to it (tmpfs.c runs the one on PATH): they keep
/// extended attributes, access control lists and times to the nanosecond.
const PACKING: &str = "--format=posix --xattrs --xattrs-include=* --acls";
/// And unpacks: not what belongs to the security modules of a node.
const UNPACKING: &str =
    "--xattrs --xattrs-include=user.* --xattrs-include=trusted.* --xattrs-include=security.capability --acls";

/// The paths of one migration.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// The directory of migration `id` below the agent's run directory. Makes nothing.
    pub fn new(run_dir: &Path, id: &MigrationId) -> Self {
        Self { root: run_dir.join("migrations").join(id.as_str()) }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// What the source's kernel has tracked of the container's connections; comes with criu's images.
    pub fn conntrack(&self) -> PathBuf {
        self.images().join("conntrack")
    }

    /// What the source's node has tracked of them; comes with criu's images.
    pub fn node_conntrack(&self) -> PathBuf {
        self.images().join("conntrack-node")
    }

    pub fn work(&self) -> PathBuf {
        self.root.join("work")
    }

    /// Where the copies of the container's tmpfs mounts are mounted.
    pub fn tmpfs(&self) -> PathBuf {
        self.root.join("tmpfs")
    }

    /// The table of pages that criu must not see.
    pub fn hidden(&self) -> PathBuf {
        self.root.join("hidden")
    }

    /// The table of shared memory that has been brought, which the pager writes.
    pub fn shared(&self) -> PathBuf {
        self.root.join(tranship_memory::pager::SHARED_TABLE)
    }

    /// The note that the container was restored into the namespaces of its pod.
    pub fn in_pod(&self) -> PathBuf {
        self.root.join("in-pod")
    }

    /// The limit of the container's CPU time that it had before it was slowed down.
    pub fn cpu_limit(&self) -> PathBuf {
        self.root.join("cpu-limit")
    }

    /// The note of what the container may have of the CPUs, while that is lifted.
    pub fn cpu_share(&self) -> PathBuf {
        self.root.join("cpu-share.json")
    }

    /// The copy of the first record of the migration's journal, which outlasts the state directory.
    pub fn first_record(&self) -> PathBuf {
        self.root.join(FIRST_RECORD)
    }

    /// Makes that copy. A move goes on without it.
    pub fn keep_first_record(&self, journals: &Path, id: &MigrationId) {
        let kept = Journal::first_line(journals, id).and_then(|line| std::fs::write(self.first_record(), line));
        if let Err(error) = kept {
            tracing::warn!(%id, %error, "the first record of the journal is at two places only");
        }
    }

    /// The note of when the container on the source was made.
    pub fn original(&self) -> PathBuf {
        self.root.join("original")
    }

    /// The note of the freezer of the container on the source.
    pub fn freezer(&self) -> PathBuf {
        self.root.join("freezer.json")
    }

    /// The note of the original's processes that a signal had stopped before the freeze, if there were any.
    pub fn stopped(&self) -> PathBuf {
        self.root.join("stopped.json")
    }

    /// The note of the original's processes that got a SIGSTOP after the decision.
    pub fn stopped_by_us(&self) -> PathBuf {
        self.root.join("stopped-by-us.json")
    }

    /// The note of the node's own directories that move with the container, and stay behind.
    pub fn left_directories(&self) -> PathBuf {
        self.root.join("left-directories")
    }

    /// What the engine knows of the container that was restored.
    pub fn engine_state(&self) -> PathBuf {
        self.root.join("engine-state")
    }

    /// What CRIU has interrupted that waited for a limited time, among its images.
    pub fn waits(&self) -> PathBuf {
        self.images().join(restart_blocks::RECORD)
    }

    fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    fn plan(&self, role: Role) -> PathBuf {
        self.root.join(format!("{}.json", role.name()))
    }

    pub fn front_socket(&self, role: Role) -> PathBuf {
        self.root.join(format!("{}.sock", role.name()))
    }

    fn criu_log(&self, role: Role) -> PathBuf {
        self.work().join(format!("{}.log", role.name()))
    }

    /// Makes the directories: in memory (a tmpfs is mounted if need be), for root alone, the front in place.
    pub fn make(&self) -> Result<(), Failure> {
        let failed = |e: &dyn std::fmt::Display| {
            Failure::new(format!("the migration's directory {} cannot be made: {e}", self.root.display()))
        };
        let parent = self.root.parent().unwrap_or(&self.root);
        std::fs::create_dir_all(parent).map_err(|e| failed(&e))?;
        tranship_storage::ensure_tmpfs(parent, None).map_err(|e| failed(&e))?;
        let make = || -> io::Result<()> {
            use std::os::unix::fs::DirBuilderExt;
            let mut builder = std::fs::DirBuilder::new();
            builder.mode(0o700);
            for directory in [self.root.clone(), self.images(), self.work(), self.bin()] {
                builder.create(directory)?;
            }
            self.place_front()
        };
        make().map_err(|e| failed(&e))
    }

    /// Puts the front in place, unless it is there: this agent's own program, under criu's name.
    fn place_front(&self) -> io::Result<()> {
        let (program, front) = (program::path()?, self.bin().join("criu"));
        if std::fs::read_link(&front).is_ok_and(|target| target == program) {
            return Ok(());
        }
        let nascent = self.bin().join("criu.new");
        match std::fs::remove_file(&nascent) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::symlink(program, &nascent)?;
        std::fs::rename(nascent, front)
    }

    /// Removes them, whatever a killed process has left mounted there.
    pub fn remove(&self) -> Result<(), Failure> {
        let removed = || -> Result<(), tranship_storage::StorageError> {
            if self.root.exists() {
                tranship_storage::unmount_below(&self.root)?;
            }
            tranship_storage::remove_tree(&self.root)
        };
        removed().map_err(|e| Failure::new(e.to_string()))
    }

    /// Bytes of the skeleton's images.
    pub fn image_bytes(&self) -> u64 {
        let entries = std::fs::read_dir(self.images()).into_iter().flatten().flatten();
        entries.filter_map(|e| Some(e.metadata().ok()?.len())).sum()
    }

    /// Writes the options of a dump that CRIU's RPC does not know. Returns the file. To take the build ids of programs CRIU would open each
    /// file that is open, which breaks leases, and which who watches the file would notice.
    fn dump_options(&self) -> Result<String, Failure> {
        let file = self.plan(Role::Dump).with_extension("conf");
        std::fs::write(&file, "file-validation filesize\n")
            .map_err(|e| Failure::new(format!("criu's options cannot be written: {e}")))?;
        Ok(file.to_string_lossy().into_owned())
    }

    /// Writes a front's plan, for the container that is offered, with what a restore is given.
    pub fn write_plan(
        &self,
        role: Role,
        offer: &Offer,
        criu: &Criu,
        (log_level, given): (Option<i32>, Vec<Given>),
    ) -> Result<(), Failure> {
        let plain = |pairs: Vec<(OsString, OsString)>| -> Vec<(String, String)> {
            pairs.into_iter().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))).collect()
        };
        let common = Overrides {
            log_level: Some(log_level.unwrap_or(2)),
            // Engines have made the cgroups already.
            manage_cgroups_mode: Some(0),
            // The gate is closed; criu's own lock starts processes.
            network_lock: Some(3),
            ..Overrides::default()
        };
        let shown = |path: PathBuf| path.to_string_lossy().into_owned();
        let (waits, listed_zombies) = (shown(self.waits()), shown(self.images().join(zombies::FILE)));
        let (mut environment, overrides) = match role {
            Role::Dump => {
                let mut external = external_network(offer)?;
                external.extend(offer.streams_of_node.iter().filter_map(|stream| stream.external.clone()));
                let mut environment = preload().map(|p| plain(criu.environment(&p))).unwrap_or_default();
                environment.push((tranship_criu::hidden::TABLE_VARIABLE.to_owned(), shown(self.hidden())));
                let sockets: Vec<&str> = offer.streams_of_node.iter().filter_map(StdioStream::socket).collect();
                environment.push((tranship_criu::hidden::STREAMS_VARIABLE.to_owned(), sockets.join(",")));
                environment.push((tranship_criu::hidden::STOPPED_VARIABLE.to_owned(), shown(self.stopped())));
                environment.push((zombies::VARIABLE.to_owned(), listed_zombies));
                environment.push(("CRIU_CONFIG_FILE".to_owned(), self.dump_options()?));
                if let Ok(program) = restart_blocks::description() {
                    environment.push((restart_blocks::PROGRAM_VARIABLE.to_owned(), program));
                }
                environment.push((restart_blocks::RECORD_VARIABLE.to_owned(), waits));
                let dump = Overrides {
                    external,
                    leave_running: Some(true),
                    link_remap: Some(true),
                    ghost_limit: Some(u32::MAX),
                    // A handle without a path would lead to any other file on the destination.
                    force_irmap: Some(true),
                    tcp_skip_in_flight: Some(true),
                    ..common
                };
                (environment, dump)
            }
            Role::Restore => {
                let mut environment = preload().map(|p| plain(criu.environment(&p))).unwrap_or_default();
                environment.push((tranship_criu::hidden::SHARED_VARIABLE.to_owned(), shown(self.shared())));
                environment.push((restart_blocks::RECORD_VARIABLE.to_owned(), waits));
                let joined = shown(self.images().join(tranship_criu::hidden::JOINED));
                environment.push((tranship_criu::hidden::JOINED_VARIABLE.to_owned(), joined));
                environment.push((zombies::VARIABLE.to_owned(), listed_zombies));
                let ends = shown(self.images().join(zombies::ENDS));
                environment.push((zombies::ENDS_VARIABLE.to_owned(), ends));
                if offer.shares_memory {
                    environment.push((tranship_criu::hidden::JOINED_IPC_VARIABLE.to_owned(), "1".to_owned()));
                }
                (environment, Overrides { lazy_pages: Some(true), ..common })
            }
        };
        let tar = if role == Role::Dump { PACKING } else { UNPACKING };
        // In a locale of another encoding tar would change names.
        let pairs = [("TAR_OPTIONS", tar), ("LC_ALL", "C")];
        environment.extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
        let plan = FrontPlan {
            criu: criu.path.clone(),
            environment,
            socket: self.front_socket(role),
            overrides,
            network: offer.network_path().cloned(),
            patience_ms: FRONT_PATIENCE.as_millis() as u64,
            given,
        };
        let text = serde_json::to_vec(&plan).map_err(|e| Failure::new(e.to_string()))?;
        std::fs::write(self.plan(role), text)
            .map_err(|e| Failure::new(format!("the front's plan cannot be written: {e}")))
    }

    /// Lets an engine use the images through the front.
    pub fn with_images<T>(&self, role: Role, ask: impl FnOnce(Images<'_>) -> T) -> T {
        let (images, work, front, plan) = (self.images(), self.work(), self.bin(), self.plan(role));
        ask(Images { images: &images, work: &work, front: &front, plan: &plan })
    }

    /// Starts an engine's command and waits until its front is waiting, or until `interrupt` is raised. The engine survives this agent.
    pub fn start_front(
        &self,
        role: Role,
        mut command: Program,
        interrupt: Option<&Interrupt>,
    ) -> Result<Front, Failure> {
        // Without the front the engine would find the real criu, which does not know of the pages that are elsewhere.
        self.place_front().map_err(|e| Failure::new(format!("the CRIU front cannot be put in place: {e}")))?;
        // What criu says is said of this start, not of one before it.
        let _ = std::fs::remove_file(self.criu_log(role));
        let log = std::fs::File::create(self.work().join("engine.log"));
        let log = log.map_err(|e| Failure::new(format!("the engine's log cannot be made: {e}")))?;
        command.stdin(Stream::Null).stdout(Stream::Null).stderr(log).detach().with_usual_umask();
        let program = command.program().to_owned();
        let mut engine =
            command.spawn().map_err(|e| Failure::new(format!("{} cannot be run: {e}", program.display())))?;
        let check = || interrupt.map_or(Ok(()), Interrupt::check);
        match self.meet_front(role, &mut engine, &check) {
            Ok((handle, criu)) => Ok(Front { handle, criu, engine: Some(engine) }),
            Err(failure) => {
                // Its front gives up when nobody comes; the engine must not wait for that.
                let _ = crate::node::reap(engine, Duration::ZERO);
                Err(failure)
            }
        }
    }

    fn meet_front(&self, role: Role, engine: &mut Started, check: Check<'_>) -> Result<(FrontHandle, u32), Failure> {
        let deadline = Instant::now() + ENGINE_START;
        let socket = self.front_socket(role);
        let silent = |why: String| Failure::new(format!("the engine did not ask for criu: {why}"));
        match await_path(&socket, ENGINE_START, engine, check)? {
            Ok(true) => {}
            Ok(false) => return Err(silent(self.last_words(role))),
            Err(e) => return Err(silent(e.to_string())),
        }
        let mut handle = FrontHandle::connect(&socket).map_err(|e| Failure::new(e.to_string()))?;
        while handle.is_quiet() && Instant::now() < deadline {
            check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        match handle.next(ENGINE_START) {
            Ok(Mark::Waiting { criu, .. }) => Ok((handle, criu)),
            Ok(other) => Err(Failure::new(format!("the CRIU front is in an unexpected state: {other:?}"))),
            Err(e) => Err(Failure::new(e.to_string())),
        }
    }

    /// Starts the pager and waits until it listens. It survives this agent.
    pub fn start_pager(&self) -> Result<Started, Failure> {
        let failed = |e: &dyn std::fmt::Display| Failure::new(format!("the pager cannot be started: {e}"));
        let log = std::fs::File::create(self.work().join("pager.log")).map_err(|e| failed(&e))?;
        let mut command = Program::new(program::path().map_err(|e| failed(&e))?);
        command.arg("pager").arg(&self.root).arg(self.work());
        command.stdin(Stream::Null).stdout(Stream::Null).stderr(log).detach();
        let mut pager = command.spawn().map_err(|e| failed(&e))?;
        let socket = self.root.join(tranship_memory::pager::CONTROL_SOCKET);
        match await_path(&socket, ENGINE_START, &mut pager, &|| Ok(()))? {
            Ok(true) => Ok(pager),
            Ok(false) => {
                Err(failed(&std::fs::read_to_string(self.work().join("pager.log")).unwrap_or_default().trim()))
            }
            Err(e) => {
                let _ = crate::node::reap(pager, Duration::ZERO);
                Err(failed(&e))
            }
        }
    }

    /// Ends a front that may or may not be there, from whichever agent, and waits until it and its criu are gone. A
    /// dump that is under way is let finish, even if its front was killed: criu must not be killed in the middle of
    /// one, and puts the tasks back into the state in which it found them. What somebody has stopped goes on for that.
    pub fn end_front(&self, role: Role, timeout: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + timeout;
        let socket = self.front_socket(role);
        let busy = || Failure::new(format!("criu is still at work after {timeout:?}: {}", self.last_words(role)));
        front::signal_criu(&socket, Signal::SIGCONT);
        if let Ok(mut handle) = FrontHandle::connect(&socket) {
            handle.wake();
            // If it waits for an order, this is it; if it is at work, the connection ends when it does.
            let _ = handle.order(&Order::Abort);
            loop {
                match handle.next(deadline.saturating_duration_since(Instant::now())) {
                    Ok(_) => {}
                    Err(HandleError::Broken(e))
                        if matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) =>
                    {
                        return Err(busy());
                    }
                    Err(_) => break,
                }
            }
        }
        while front::criu_lives(&socket) {
            if Instant::now() > deadline {
                return Err(busy());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Ends a dump that nobody waits for any more. It may finish, and put the tasks back into their state; a criu that has not after
    /// `patience` is killed. CRIU lets the cgroup's tasks run while it traces them, so that they are frozen again before it is killed: a
    /// task that finds its connections in repair mode closes them.
    pub fn end_dump(&self, patience: Duration, freezer: Option<&Freezer>) -> Result<(), Failure> {
        let socket = self.front_socket(Role::Dump);
        let ended = self.end_front(Role::Dump, patience);
        if ended.is_ok() || !front::criu_lives(&socket) {
            return ended;
        }
        tracing::warn!(?patience, directory = %self.root.display(), "criu is killed in the middle of its dump");
        let hold = |patience| {
            if let Some(Err(error)) = freezer.filter(|one| one.is_there()).map(|one| one.hold(patience)) {
                tracing::warn!(%error, "the tasks of a dump that is ended run");
            }
        };
        hold(Duration::ZERO);
        front::signal_criu(&socket, Signal::SIGKILL);
        let ended = self.end_front(Role::Dump, DEATH);
        hold(FROZEN_AGAIN);
        ended
    }

    /// Keeps criu's log beside the reports in `history`, where there is one; says where.
    pub fn keep_log(&self, role: Role, history: &Path, id: &MigrationId) -> Option<PathBuf> {
        criu_log::keep(&self.criu_log(role), history, &format!("{id}.{}.log", role.name()))
    }

    /// What criu, or failing that the engine, said last: for error messages.
    pub fn last_words(&self, role: Role) -> String {
        let log = std::fs::read(self.criu_log(role)).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        if let Some(cause) = Cause::in_log(&log) {
            return match role {
                Role::Dump => cause.told(),
                // The processes that criu was making are gone.
                Role::Restore => format!("criu says: {}", cause.words),
            };
        }
        let engine = std::fs::read_to_string(self.work().join("engine.log")).unwrap_or_default();
        let none = || format!("{NO_WORDS}; they may have been killed");
        engine.lines().last().map_or_else(none, |line| format!("the engine says: {}", line.trim()))
    }
}

/// The container's network namespace as what criu is to leave alone, under the key by which runc names it at a restore.
/// Not every engine has told its runc of it.
fn external_network(offer: &Offer) -> Result<Vec<String>, Failure> {
    let Some(path) = offer.network_path() else { return Ok(Vec::new()) };
    let namespace = std::fs::metadata(path)
        .map_err(|e| Failure::new(format!("the network namespace {} cannot be looked at: {e}", path.display())))?;
    Ok(vec![format!("net[{}]:extRootNetNS", std::os::unix::fs::MetadataExt::ino(&namespace))])
}

/// A front that waits or works, and the engine that started it.
#[derive(Debug)]
pub struct Front {
    pub handle: FrontHandle,
    /// Pid of the real criu.
    pub criu: u32,
    /// The engine's process, if this agent started it.
    pub engine: Option<Started>,
}

/// Fails where a wait is to end.
type Check<'a> = &'a dyn Fn() -> Result<(), Failure>;

/// Waits until `path` exists; false if `process` ends first.
///
/// # Errors
/// That of `check`; within the result what the system refused, or that `timeout` is over.
fn await_path(
    path: &Path,
    timeout: Duration,
    process: &mut Started,
    check: Check<'_>,
) -> Result<io::Result<bool>, Failure> {
    let watched = || -> io::Result<Inotify> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        inotify.add_watch(directory, AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO)?;
        Ok(inotify)
    };
    let inotify = match watched() {
        Ok(inotify) => inotify,
        Err(error) => return Ok(Err(error)),
    };
    let deadline = Instant::now() + timeout;
    loop {
        check()?;
        match look_for(path, deadline, process, &inotify) {
            Ok(None) => {}
            Ok(Some(there)) => return Ok(Ok(there)),
            Err(error) => return Ok(Err(error)),
        }
    }
}

/// One look, which waits a moment for a change.
fn look_for(path: &Path, deadline: Instant, process: &mut Started, inotify: &Inotify) -> io::Result<Option<bool>> {
    if path.exists() {
        return Ok(Some(true));
    }
    if process.try_wait()?.is_some() {
        return Ok(Some(path.exists()));
    }
    if Instant::now() > deadline {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // The process's end shows at the latest after this many ms.
    let mut fds = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::from(50u8)).map_err(io::Error::from)?;
    let _ = inotify.read_events();
    Ok(None)
}

/// The preloaded library: beside this program, or where packages put it.
pub fn preload() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.with_file_name("libtranship_preload.so");
    [beside, PathBuf::from("/usr/lib/tranship/libtranship_preload.so")].into_iter().find(|p| p.exists())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tranship_types::MoveOptions;

    use super::*;
    use crate::interrupt::Cause;

    /// Raises a cancel while an engine that does nothing is waited for.
    fn cancelled(layout: &Layout) {
        let mut engine = Program::new("sleep").arg("600").spawn().unwrap();
        let interrupt = Interrupt::new(&MoveOptions::default());
        let (cancel, begun) = (Arc::clone(&interrupt), Instant::now());
        let raised = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            cancel.raise(Cause::Cancelled)
        });
        let met = layout.meet_front(Role::Dump, &mut engine, &|| interrupt.check());
        raised.join().unwrap();
        engine.kill().unwrap();
        engine.wait().unwrap();
        let failure = met.unwrap_err();
        assert!(failure.cancelled && begun.elapsed() < ENGINE_START / 3, "{failure} after {:?}", begun.elapsed());
    }

    #[test]
    fn a_cancel_ends_the_wait_for_an_engine() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout { root: directory.path().to_owned() };
        // It does not ask for criu.
        cancelled(&layout);
        // It has asked, and its front is silent.
        let _silent = std::os::unix::net::UnixListener::bind(layout.front_socket(Role::Dump)).unwrap();
        cancelled(&layout);
    }
}
