//! What criu does not carry of a container's descriptors, threads and shared memory segments: looked for beside its dump, and put right in the held tasks.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{Mode, fstatat};
use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_criu::affinity::{self, BoundThread};
use tranship_criu::file_settings::{self, FileSetting, Served};
use tranship_criu::preflight::pipes::{self, LeadsOut, Pipes};
use tranship_criu::settings::{self, Setting};
use tranship_criu::socket_files::{Found, Places, SocketFile};
use tranship_criu::timers::{self, PeriodicTimer};
use tranship_criu::undo;
use tranship_criu::watch_flags::{self, FlaggedWatch};
use tranship_engine::{Container, Pod};
use tranship_memory::survey;
use tranship_network::{Dropped, NetworkError, OpenSocket, SocketState};
use tranship_sys::message_queue::{self, Rooms};
use tranship_sys::process::{self, OpenFiles};
use tranship_sys::segment::{self, Marked};
use tranship_sys::unix_socket::is_connection;
use tranship_types::{Allowances, Blocker, BlockerKind};

use crate::node::failed;
use crate::unread::{Queues, is_queue};
use crate::{pods, tmpfs};

/// Its name among criu's images.
pub const FILE: &str = "uncarried.json";

/// What is lacking after criu's restore.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uncarried {
    sockets: Vec<SocketState>,
    timers: Vec<PeriodicTimer>,
    #[serde(default)]
    threads: Vec<BoundThread>,
    #[serde(default)]
    settings: Vec<Setting>,
    #[serde(default)]
    pipes: Vec<OwnedPipe>,
    /// Segments that were removed while they were attached: CRIU makes ones that stay.
    #[serde(default)]
    removed_segments: Vec<i32>,
    /// Segments that are locked in memory.
    #[serde(default)]
    locked_segments: Vec<i32>,
    #[serde(default)]
    rooms: Rooms,
    /// Queues of inotify and fanotify: processes that have them, and under which numbers.
    #[serde(default)]
    queues: Vec<(u32, i32)>,
    #[serde(default)]
    files: Vec<FileSetting>,
    #[serde(default)]
    watches: Vec<FlaggedWatch>,
    #[serde(default)]
    socket_files: Vec<SocketFile>,
    /// Whether programs of other containers in the same network have joined multicast groups.
    #[serde(skip)]
    others_have_groups: bool,
}

/// A pipe that others than root may open by `/proc/PID/fd` (`/dev/stdout`): runc gives those of a container's standard streams to its user. CRIU
/// restores all as root's.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct OwnedPipe {
    /// The process that has it, by its pid in the container.
    task: u32,
    descriptor: i32,
    /// As the node knows them.
    uid: u32,
    gid: u32,
    mode: u32,
}

/// Whose network a container lives in.
#[derive(Debug, Default)]
pub struct Network<'a> {
    /// Other containers that live in it and move with this one, which owns it.
    pub others: &'a [Container],
    /// Another container owns it, and whoever looks at that one sees which multicast groups have been joined in it.
    pub is_joined: bool,
    /// The pod whose containers move together.
    pub pod: Option<&'a Pod>,
    /// The files in the `/dev/shm` of that pod move.
    pub files_are_brought: bool,
}

/// Looks at all descriptors, threads and segments of a frozen container's processes, whose network namespace is at
/// `netns`. What stands in the way is a failure: groups that something else has joined, pipes that lead out of the
/// container but for `carried_pipes`, and what CRIU would drop of descriptors. `network` gives the other containers
/// that live in the network.
pub fn look(
    container: &Container,
    network: &Network<'_>,
    netns: Option<&Path>,
    (carried_pipes, allowed): (&[String], Allowances),
) -> Result<Uncarried, Failure> {
    let Descriptors { sockets, timers, pipes, owned_pipes, queues, queues_of_tasks, files, closed, watches } =
        descriptors(container);
    let states = netns.map(|netns| tranship_network::socket_states(netns, &sockets)).transpose().map_err(failed)?;
    let mut states = states.unwrap_or_default();
    if network.is_joined {
        states.unclaimed.clear();
    }
    let others_have_groups = !network.others.is_empty() && !states.unclaimed.is_empty();
    if let Some(netns) = netns.filter(|_| others_have_groups) {
        let all = || all_sockets(container, network.others);
        states.unclaimed = tranship_network::unclaimed_groups(netns, all).map_err(failed)?;
    }
    let left_behind = pods::left_behind(network.pod, container)
        .into_iter()
        .chain(tmpfs::foreign_files(container).filter(|_| !network.files_are_brought))
        .chain(network.pod.and_then(|pod| pods::removed_files(pod, container, network.others)));
    let joined = states.unclaimed.iter().map(|group| joined_by_others(&container.name, group));
    let dropped = states.dropped.iter().map(|(socket, what)| dropped(socket, *what));
    let processes = container.processes().unwrap_or_default();
    let undone = undo::blockers(&processes);
    let lead_out = lead_out(&pipes, carried_pipes, (&processes, &sockets));
    let (socket_files, lost) = socket_files(container, &sockets);
    let contents = closed.iter().filter_map(|(pid, descriptor)| file_settings::content(*pid, *descriptor));
    let found = joined
        .chain(dropped)
        .chain(queues.unread())
        .chain(left_behind)
        .chain(undone)
        .chain(lost)
        .chain(lead_out)
        .chain(contents);
    let (blockers, _) = allowed.part(found.collect());
    Failure::blocked(blockers).map_or(Ok(()), Err)?;
    let (segments, rooms) = match container.has_namespace("ipc") {
        true => (segments(container).map_err(failed)?, message_queue::unusual_rooms(container.init).map_err(failed)?),
        false => Default::default(),
    };
    Ok(Uncarried {
        sockets: states.sockets,
        timers,
        threads: of_processes(container, affinity::bound),
        settings: of_processes(container, settings::of),
        pipes: owned_pipes,
        others_have_groups,
        removed_segments: segments.removed,
        locked_segments: segments.locked,
        rooms,
        queues: queues_of_tasks,
        files,
        watches,
        socket_files,
    })
}

/// Pipes that lead out of the container although its inspection has found none such: a program may have got one since
/// (`SCM_RIGHTS`), or may have moved one to another number while its descriptors were read.
fn lead_out(pipes: &Pipes, carried: &[String], (processes, sockets): (&[u32], &[OpenSocket])) -> Vec<Blocker> {
    let is_carried = |link: &str| carried.iter().any(|carried| carried == link);
    let is_inside = |pid: u32| processes.contains(&pid);
    // CRIU has descriptors of the processes that it dumps, also those that are on their way through a socket.
    let is_dumper = |pid: u32| processes.iter().any(|task| pipes::tracer(*task) == Some(pid));
    let sockets = || sockets.iter().map(|socket| (socket.pid, socket.descriptor)).collect();
    let blocker = |LeadsOut { ends, holder, .. }| {
        let ((pid, descriptor), end) = (ends.place, if ends.reads { "writing" } else { "reading" });
        let name = process::name(pid).unwrap_or_default();
        let holder = match holder {
            Some(holder) => format!("{} (pid {holder})", process::name(holder).unwrap_or_default()),
            None => "a process that is not seen".to_owned(),
        };
        let cause = format!(
            "descriptor {descriptor} of {name} (pid {pid}) is a pipe whose {end} end is held by {holder} outside of the container, \
             which was not so when the container was inspected"
        );
        Blocker::new(BlockerKind::Descriptor, cause, "try again (--retry)").at(pid, Some(descriptor)).passing()
    };
    pipes.lead_out(is_carried, (is_inside, is_dumper), sockets).into_iter().map(blocker).collect()
}

/// Files of Unix sockets that have other names than CRIU gives them, and what cannot be given to them.
fn socket_files(container: &Container, sockets: &[OpenSocket]) -> (Vec<SocketFile>, Vec<Blocker>) {
    let (mut files, mut lost) = (Vec::new(), Vec::new());
    let list = std::fs::read(format!("/proc/{}/net/unix", container.init)).unwrap_or_default();
    let named: HashSet<String> = String::from_utf8_lossy(&list).lines().filter_map(named_socket).collect();
    let pids = container.processes().unwrap_or_default();
    let Ok(places) = Places::of(container.init, pids) else { return (files, lost) };
    for &OpenSocket { pid, task, descriptor } in sockets.iter().filter(|_| !named.is_empty()) {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).unwrap_or_default();
        let Some(socket) = link.to_str().filter(|link| named.contains(*link)) else { continue };
        let Ok(taken) = process::take_descriptor(pid, descriptor) else { continue };
        match places.find(taken.as_fd()) {
            found @ Found::Named { .. } => files.extend(SocketFile::of(&found, (task, descriptor), taken.as_fd())),
            Found::Lost(_) if !is_connection(taken.as_fd()) => {
                let name = process::name(pid).unwrap_or_default();
                let what = format!("is the Unix socket {socket}, whose file was renamed");
                let cause = format!("descriptor {descriptor} of {name} (pid {pid}) {what}");
                lost.push(
                    Blocker::new(BlockerKind::Socket, cause, "try again")
                        .at(pid, Some(descriptor))
                        .allowable("socket-files"),
                );
            }
            _ => {}
        }
    }
    (files, lost)
}

/// A socket with a name in a filesystem as `/proc/PID/fd` shows it, given its line of `/proc/net/unix`.
fn named_socket(line: &str) -> Option<String> {
    let (inode, name) = line.splitn(7, ' ').nth(6)?.trim_start().split_once(' ')?;
    (!name.starts_with('@')).then(|| format!("socket:[{inode}]"))
}

/// Segments that are locked, or were removed while they were attached. Of a namespace that containers share, those that this one's processes have
/// attached: others may not be attached yet when this one is restored, and would go away if they are removed then.
fn segments(container: &Container) -> io::Result<Marked> {
    let mut marked = segment::marked(container.init)?;
    if container.joins_namespace("ipc") {
        let attached = segment::attached(&container.processes().map_err(io::Error::other)?);
        marked.removed.retain(|id| attached.contains(id));
        marked.locked.retain(|id| attached.contains(id));
    }
    Ok(marked)
}

/// What will stand in the way of it, as far as can be told while the container runs.
pub fn obstacles(container: &Container, unit: &[Container], netns: &Path) -> Result<Vec<Blocker>, NetworkError> {
    let unclaimed = tranship_network::unclaimed_groups(netns, || all_sockets(container, unit))?;
    Ok(unclaimed.iter().map(|group| joined_by_others(&container.name, group)).collect())
}

/// What programs call those options of its sockets that older nodes cannot set, as far as that can be told while the container runs.
pub fn newer_options(container: &Container, netns: &Path) -> Result<Vec<String>, NetworkError> {
    // Few containers have sockets with such options.
    let lists = ["packet", "raw6", "udplite", "udplite6"];
    let has_any = |list: &str| {
        let list = std::fs::read_to_string(format!("/proc/{}/net/{list}", container.init));
        list.is_ok_and(|list| list.lines().nth(1).is_some())
    };
    if !lists.into_iter().any(has_any) {
        return Ok(Vec::new());
    }
    let found = tranship_network::newer_options(netns, &all_sockets(container, &[]))?;
    Ok(found.into_iter().map(str::to_owned).collect())
}

/// The sockets of a container, and of others in its network.
fn all_sockets(container: &Container, unit: &[Container]) -> Vec<OpenSocket> {
    [container].into_iter().chain(unit).flat_map(|one| descriptors(one).sockets).collect()
}

/// What there is of descriptors: sockets and pipes of others than root, each once, all pipes, periodic timers, inotify
/// queues, watches with flags and settings of files.
#[derive(Default)]
struct Descriptors {
    sockets: Vec<OpenSocket>,
    timers: Vec<PeriodicTimer>,
    pipes: Pipes,
    owned_pipes: Vec<OwnedPipe>,
    queues: Queues,
    /// The same, by the pids in the container.
    queues_of_tasks: Vec<(u32, i32)>,
    files: Vec<FileSetting>,
    /// Masters of terminals whose slaves all have been closed: processes that have them, and under which numbers.
    closed: Vec<(u32, i32)>,
    watches: Vec<FlaggedWatch>,
}

fn descriptors(container: &Container) -> Descriptors {
    let (mut all, mut seen) = (Descriptors::default(), HashSet::new());
    let served = Served::of(container.init);
    // Processes end, and descriptors are closed.
    for pid in container.processes().unwrap_or_default() {
        let Ok(task) = survey::id_of(pid).map(|id| id.0) else { continue };
        let path = format!("/proc/{pid}/fd");
        let Ok(mut open) = Dir::open(path.as_str(), OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()) else {
            continue;
        };
        let process = OpenFiles::of(pid).ok().map(|files| file_settings::Process { pid, task, files, served: &served });
        let numbers: Vec<_> = open.iter().flatten().map(|entry| entry.file_name().to_owned()).collect();
        for name in numbers {
            let number = name.to_str().ok().and_then(|name| name.parse().ok());
            let (Some(descriptor), Ok(target)) = (number, readlinkat(&open, name.as_c_str())) else { continue };
            match target.to_str() {
                Some("anon_inode:[timerfd]") => all.timers.extend(timers::periodic(pid, task, descriptor)),
                Some(queue) if is_queue(queue) => {
                    all.queues.add(pid, descriptor);
                    all.queues_of_tasks.push((task, descriptor));
                    all.watches.extend(watch_flags::of(pid, task, descriptor));
                }
                Some(socket) if socket.starts_with("socket:") && seen.insert(target.clone()) => {
                    all.sockets.push(OpenSocket { pid, task, descriptor });
                }
                Some(pipe) if is_pipe(pipe) => {
                    let link = fstatat(&open, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
                    let Ok(link) = link else { continue };
                    all.pipes.add(pipe, (pid, descriptor), pipes::ends_of(link.st_mode));
                    if seen.insert(target.clone()) {
                        let path = format!("{path}/{descriptor}");
                        all.owned_pipes.extend(OwnedPipe::at(Path::new(&path), task, descriptor));
                    }
                }
                link => {
                    // Only a path may be no text.
                    let link = link.unwrap_or("/");
                    let settings = process.iter().flat_map(|process| file_settings::of(process, descriptor, link));
                    for setting in settings {
                        all.closed.extend(setting.is_hung_up().then_some((pid, descriptor)));
                        all.files.push(setting);
                    }
                }
            }
        }
    }
    all
}

/// Whether a link in `/proc/PID/fd` stands for a pipe without a name.
fn is_pipe(target: &str) -> bool {
    target.starts_with("pipe:")
}

impl OwnedPipe {
    /// `None` if it is as CRIU will make it.
    fn at(path: &Path, task: u32, descriptor: i32) -> Option<Self> {
        let is = std::fs::metadata(path).ok()?;
        let (uid, gid, mode) = (is.uid(), is.gid(), is.mode() & 0o7777);
        (uid != 0 || gid != 0 || mode != 0o600).then_some(Self { task, descriptor, uid, gid, mode })
    }

    /// Gives it back to whom it belongs; `pid` has it here.
    fn give(&self, pid: u32) -> io::Result<()> {
        let path = PathBuf::from(format!("/proc/{pid}/fd/{}", self.descriptor));
        // What stands here for a standard stream may be something of the node's.
        if std::fs::read_link(&path)?.to_str().is_some_and(is_pipe) {
            chown(&path, Some(self.uid), Some(self.gid))?;
            std::fs::set_permissions(&path, PermissionsExt::from_mode(self.mode))?;
        }
        Ok(())
    }
}

/// What is found of each process, by its pids here and in the container.
fn of_processes<T>(container: &Container, find: impl Fn(u32, u32) -> Vec<T>) -> Vec<T> {
    let processes = container.processes().unwrap_or_default().into_iter();
    processes.filter_map(|pid| Some(find(pid, survey::id_of(pid).ok()?.0))).flatten().collect()
}

/// Gives something to the restored process that has the pid `task` in the container: by its pid here.
fn to_process(tasks: &HashMap<u32, u32>, task: u32, give: impl FnOnce(u32) -> io::Result<()>) -> Result<(), String> {
    let pid = tasks.get(&task).ok_or("there is no such process")?;
    give(*pid).map_err(|error| error.to_string())
}

/// What a socket has got since the container was inspected, and CRIU drops.
fn dropped(socket: &OpenSocket, what: Dropped) -> Blocker {
    let (what, kind) = match what {
        Dropped::Error => ("has an error to report that the program has not taken", Some("socket-errors")),
        Dropped::UrgentByte => ("has an urgent byte (MSG_OOB) that the program has not read", Some("urgent-data")),
        Dropped::UnfinishedDatagram => {
            ("is a UDP socket with a datagram that is not complete yet (MSG_MORE)", Some("unfinished-datagrams"))
        }
        Dropped::EmptyDatagram => ("has a datagram without data to read", None),
    };
    let OpenSocket { pid, descriptor, .. } = socket;
    let name = process::name(*pid).unwrap_or_default();
    let cause = format!("descriptor {descriptor} of {name} (pid {pid}) {what}");
    let blocker = Blocker::new(BlockerKind::Socket, cause, "try again").at(*pid, Some(*descriptor));
    match kind {
        Some(kind) => blocker.allowable(kind),
        None => blocker,
    }
}

/// What is in a container's network and none of its processes has.
fn joined_by_others(container: &str, (interface, group): &(String, IpAddr)) -> Blocker {
    Blocker::new(
        BlockerKind::Network,
        format!(
            "in the network of container {container} something has joined the multicast group {group} on {interface} that is none of \
             its processes, and does not move"
        ),
        "end it, or let the container's own program join the group",
    )
}

impl Uncarried {
    /// Whether any socket in its network is in a multicast group.
    pub fn has_groups(&self) -> bool {
        self.others_have_groups || self.sockets.iter().any(SocketState::has_groups)
    }

    /// Whether files of its Unix sockets have other names than CRIU gives them.
    pub fn has_socket_files(&self) -> bool {
        !self.socket_files.is_empty()
    }

    /// What programs call those options of its sockets that older nodes cannot set.
    pub fn newer_options(&self) -> Vec<String> {
        self.sockets.iter().flat_map(SocketState::newer_options).map(str::to_owned).collect()
    }

    /// A state of its descriptors that older agents do not give them.
    pub fn newer_state(&self) -> Option<&'static str> {
        if self.files.iter().any(FileSetting::is_hung_up) {
            return Some("a terminal whose other side all processes have closed");
        }
        let is_connected = self.sockets.iter().any(SocketState::has_netlink_peer);
        is_connected.then_some("a netlink socket that is connected to group 32")
    }

    /// Puts it among the images, where there is any.
    pub fn write(&self, images: &Path) -> Result<(), Failure> {
        if *self == Self::default() {
            return Ok(());
        }
        std::fs::write(images.join(FILE), serde_json::to_vec(self).map_err(failed)?).map_err(failed)
    }

    /// What is among the images; `None` where nothing is.
    pub fn read(images: &Path) -> Result<Option<Self>, Failure> {
        match std::fs::read(images.join(FILE)) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(failed),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives it to the restored tasks, of which `init` is the first; `tasks` has their pids here by those in the container.
    pub fn restore(&self, init: u32, tasks: &HashMap<u32, u32>) -> Result<(), String> {
        let netns = PathBuf::from(format!("/proc/{init}/ns/net"));
        tranship_network::set_socket_states(&netns, &self.sockets, |task| tasks.get(&task).copied())
            .map_err(|error| format!("a socket cannot be restored: {error}"))?;
        for timer in &self.timers {
            let PeriodicTimer { task, descriptor, .. } = timer;
            to_process(tasks, *task, |pid| timer.go_on(pid).map(drop))
                .map_err(|why| format!("timer descriptor {descriptor} of process {task} cannot be restored: {why}"))?;
        }
        let free = affinity::bind(&self.threads, tasks)
            .map_err(|error| format!("a thread cannot be bound to its processors again: {error}"))?;
        for thread in free {
            tracing::warn!(?thread, "none of the processors that it was bound to is here; it may run on all");
        }
        settings::set(&self.settings, tasks).map_err(|error| format!("a setting cannot be restored: {error}"))?;
        for pipe in &self.pipes {
            let OwnedPipe { task, descriptor, .. } = pipe;
            to_process(tasks, *task, |pid| pipe.give(pid)).map_err(|why| {
                format!("the pipe at descriptor {descriptor} of process {task} cannot be given to its owner: {why}")
            })?;
        }
        for file in &self.files {
            let FileSetting { task, descriptor, .. } = file;
            to_process(tasks, *task, |pid| file.set(pid)).map_err(|why| {
                format!("the setting of descriptor {descriptor} of process {task} cannot be restored: {why}")
            })?;
        }
        for file in &self.socket_files {
            let SocketFile { task, descriptor, .. } = file;
            to_process(tasks, *task, |pid| file.set(init, pid)).map_err(|why| {
                format!(
                    "the file of the Unix socket at descriptor {descriptor} of process {task} cannot be renamed: {why}"
                )
            })?;
        }
        watch_flags::set(&self.watches, init, tasks)
            .map_err(|error| format!("the flags of an inotify watch cannot be restored: {error}"))?;
        if !self.locked_segments.is_empty() {
            segment::lock(init, &self.locked_segments)
                .map_err(|error| format!("a shared memory segment cannot be locked again: {error}"))?;
        }
        if !self.removed_segments.is_empty() {
            segment::remove(init, &self.removed_segments).map_err(|error| {
                format!("a shared memory segment that was removed already cannot be removed again: {error}")
            })?;
        }
        if !self.rooms.is_empty() {
            message_queue::set_rooms(init, &self.rooms)
                .map_err(|error| format!("a message queue cannot be given its room again: {error}"))?;
        }
        Ok(())
    }

    /// The queues of inotify and fanotify that the restored tasks have, by their pids here.
    pub fn queues(&self, tasks: &HashMap<u32, u32>) -> Vec<(u32, i32)> {
        self.queues.iter().filter_map(|(task, descriptor)| Some((*tasks.get(task)?, *descriptor))).collect()
    }
}
