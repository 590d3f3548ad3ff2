//! Standard streams of containers that lead to files, pipes, sockets and terminals of the node.
//!
//! Engines with logs of their own connect theirs anew. Those of a bare runc container lead to
//! whatever runc was started with. A file is opened again on the destination. Everything else has
//! another end on the source's node, and bytes are relayed to it and from it by a process on each
//! node (`holder.rs`) that outlives the agents.
//!
//! ```text
//!   source                                       destination
//!   inspect: what there is, and where it goes
//!                                                engine: holder started; criu gets one end of each new pipe
//!   drain: holder started with what the frozen
//!          original has open; links dialled ───▶ resume: the holder closes what the container has
//!   release: the original is killed
//! ```

mod alive;
mod end;
mod flow;
mod frames;
mod holder;
mod line;
mod links;
mod outgoing;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tranship_api::{Leftover, LeftoverKind};
use tranship_coordinator::Failure;
use tranship_criu::front::Given;
use tranship_criu::preflight::file_identity;
use tranship_sys::launch::{Program, Stream};
use tranship_sys::threads;
use tranship_types::{
    Blocker, BlockerKind, FileIdentity, FileOwner, MigrationId, NodeName, StdioKind, StdioStream, StdioTarget,
};
use tranship_wire::message::Offer;

use self::holder::{Command, Plan, Planned, Status};
use crate::node::{Node, failed};
use crate::program;

pub use holder::run;
pub use links::{Sessions, answer, recover};
pub use outgoing::{describe, leave, note, refused};

/// The argument by which this program is the holder.
pub const ARGUMENT: &str = "stdio";
/// How long a holder may take to start.
const START: Duration = Duration::from_secs(10);
/// Filesystems that several nodes mount alike: NFS, SMB, Ceph, 9P, FUSE, GFS2, OCFS2, Lustre.
const SHARED: [u64; 9] =
    [0x6969, 0xff53_4d42, 0xfe53_4d42, 0x00c3_6400, 0x0102_1997, 0x6573_5546, 0x0116_1970, 0x7461_636f, 0x0bd0_0bd0];

/// Directories of holders.
fn directory(run_dir: &Path) -> PathBuf {
    run_dir.join("stdio")
}

/// The directory of the holder of a container that came to this node by a migration.
pub fn of_arrived(node: &Node, id: &str) -> PathBuf {
    directory(&node.config.run_dir).join(format!("{id}.in"))
}

/// The directory of the holder of a container that left it.
pub fn of_left(node: &Node, id: &str) -> PathBuf {
    directory(&node.config.run_dir).join(format!("{id}.out"))
}

/// What the container's streams are to be on this node: what criu is given, what is to stay open
/// until it has that, and what there is to say about it.
#[derive(Debug, Default)]
pub struct Prepared {
    pub given: Vec<Given>,
    pub files: Vec<OwnedFd>,
    pub remarks: Vec<String>,
}

/// How a stream is opened here.
enum Way {
    /// The same file as on the source, at the same place in it.
    Same(PathBuf),
    /// A file, at its end.
    Append(PathBuf),
    /// To be read or written without effect.
    Null,
    /// By the holder.
    Held,
}

fn way(stream: &StdioStream, target: &StdioTarget) -> Way {
    match (stream.kind, target) {
        (StdioKind::File, StdioTarget::Keep) if is_same(stream) || !stream.writes => {
            Way::Same(stream.name.clone().into())
        }
        (StdioKind::File, StdioTarget::Keep) => Way::Append(stream.name.clone().into()),
        (StdioKind::File, StdioTarget::File(path)) if stream.writes => Way::Append(path.clone()),
        (StdioKind::File, StdioTarget::Journal) if stream.writes => Way::Held,
        (StdioKind::File | StdioKind::Null, _) => Way::Null,
        _ => Way::Held,
    }
}

/// Whether the file of that name on this node is the one that the container has open on the source.
fn is_same(stream: &StdioStream) -> bool {
    let here = File::open(&stream.name).ok().and_then(|file| file_identity(&file));
    let (Some(here), Some(there)) = (here, stream.identity) else { return false };
    let looks_alike = |one: FileIdentity| (one.inode, one.born_ns, one.filesystem);
    // Machines made from one image have files that look alike, but not a kernel that runs.
    let is_one_machine = here.boot != 0 && (here.boot, here.device) == (there.boot, there.device);
    looks_alike(here) == looks_alike(there) && (is_one_machine || SHARED.contains(&here.filesystem))
}

/// Under which name criu's restore takes a descriptor in place of the stream. It opens a name that
/// begins with `file[` once more and goes to the same position; without the first letter it takes
/// the descriptor as it is (files-reg.c, `open_path`).
fn key(stream: &StdioStream, is_same: bool) -> String {
    match &stream.external {
        Some(external) if is_same || stream.kind == StdioKind::Terminal => external.clone(),
        Some(external) => external.chars().skip(1).collect(),
        None => stream.name.clone(),
    }
}

/// What stands in the way on this node.
pub fn obstacles(node: &Node, offer: &Offer) -> Vec<Blocker> {
    let here = &node.config.node;
    let blocker = |stream: &StdioStream, what: String| {
        let cause = format!("{stream} of container {} cannot go on node {here}: {what}", offer.container);
        let remedy = "make that possible there, or choose another way with --stdio journal, file:PATH or null";
        Blocker::new(BlockerKind::Descriptor, cause, remedy)
    };
    let obstacle = |stream: &StdioStream| {
        if offer.stdio_target == StdioTarget::Journal && stream.writes && !Path::new(end::JOURNAL).exists() {
            return Some(blocker(stream, format!("it has no journal ({})", end::JOURNAL)));
        }
        let is_there = |path: &Path| path.parent().is_some_and(Path::is_dir) && !path.is_dir();
        match way(stream, &offer.stdio_target) {
            Way::Same(path) if !stream.writes && !is_same(stream) => {
                Some(blocker(stream, format!("{} is not the file there that the container reads", path.display())))
            }
            Way::Append(path) if !is_there(&path) => {
                Some(blocker(stream, format!("{} cannot be made", path.display())))
            }
            _ => None,
        }
    };
    let missing = offer.stdio_target.file().filter(|path| !path.parent().is_some_and(Path::is_dir));
    let relayed = offer.streams_of_node.iter().filter(|stream| stream.is_relayed() && stream.writes);
    let held = relayed.filter_map(|stream| Some(blocker(stream, format!("{} cannot be made", missing?.display()))));
    offer.streams_of_node.iter().filter_map(obstacle).chain(held).collect()
}

/// Makes ready what the container's streams are to be on this node. May be done again for another
/// restore.
pub fn prepare(node: &Node, peer: &NodeName, id: &MigrationId, offer: &Offer) -> Result<Prepared, Failure> {
    let mut prepared = Prepared::default();
    let mut held = Vec::new();
    for stream in &offer.streams_of_node {
        let way = way(stream, &offer.stdio_target);
        let opened = match &way {
            Way::Held => {
                held.push(stream.clone());
                continue;
            }
            Way::Null => File::options().read(true).write(true).open("/dev/null"),
            Way::Same(path) => opened(stream, path, false),
            Way::Append(path) => {
                let (node, shown) = (&node.config.node, path.display());
                let removed = if stream.removed { ", and has no name any more" } else { "" };
                prepared.remarks.push(format!(
                    "stdio: {stream} goes on at the end of {shown} on node {node}, which is not the file that it \
                     was{removed}"
                ));
                opened(stream, path, true)
            }
        };
        let file: OwnedFd = opened
            .map_err(|error| Failure::new(format!("{stream} of {} cannot be opened: {error}", offer.container)))?
            .into();
        let is_same = matches!(way, Way::Same(_));
        prepared.given.push(Given { key: key(stream, is_same), pid: std::process::id(), number: file.as_raw_fd() });
        prepared.files.push(file);
    }
    if !held.is_empty() {
        prepared.given.extend(hold(node, peer, id, offer, held)?);
    }
    Ok(prepared)
}

fn opened(stream: &StdioStream, path: &Path, at_end: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(stream.reads).write(stream.writes).mode(0o640);
    // Of its flags only those that the kernel keeps with an open file.
    let kept = nix::fcntl::OFlag::O_APPEND | nix::fcntl::OFlag::O_NONBLOCK | nix::fcntl::OFlag::O_SYNC;
    let flags = nix::fcntl::OFlag::from_bits_truncate(stream.flags.cast_signed()) & kept;
    options.custom_flags((flags | nix::fcntl::OFlag::O_NOCTTY).bits());
    let mut file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && at_end && stream.writes => {
            let made = options.create_new(true).open(path)?;
            own(&made, stream)?;
            made
        }
        opened => opened?,
    };
    if at_end {
        io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
    }
    Ok(file)
}

/// Gives what was made for a stream to those that the original belongs to: programs open their
/// streams again under the names `/dev/stdout` and `/dev/stderr`.
fn own(made: impl AsFd, stream: &StdioStream) -> io::Result<()> {
    let Some(FileOwner { uid, gid, mode }) = stream.owner else { return Ok(()) };
    // The mode is what a peer says.
    rustix::fs::fchmod(&made, rustix::fs::Mode::from_bits_truncate(mode & 0o666))?;
    Ok(rustix::fs::fchown(&made, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid)))?)
}

/// Has a holder make the streams, unless it has already.
fn hold(
    node: &Node,
    peer: &NodeName,
    id: &MigrationId,
    offer: &Offer,
    streams: Vec<StdioStream>,
) -> Result<Vec<Given>, Failure> {
    let directory = of_arrived(node, id.as_str());
    let keys: Vec<String> = streams.iter().map(|stream| key(stream, false)).collect();
    if !alive::is_alive(&directory).map_err(failed)? {
        let planned = |stream| Planned { stream, inputs: Vec::new(), output: None };
        let plan = Plan {
            relay: id.to_string(),
            container: offer.container.clone(),
            is_source: false,
            peer: peer.clone(),
            streams: streams.into_iter().map(planned).collect(),
            target: offer.stdio_target.clone(),
            spill: node.config.state_dir.join("stdio").join(format!("{}.{id}.log", offer.container)),
            after: None,
        };
        start(&directory, &plan)?;
    }
    let (numbers, _) = holder::ask(&directory, &Command::Descriptors).map_err(failed)?;
    let numbers: Vec<i32> = serde_json::from_str(&numbers).map_err(failed)?;
    let pid = alive::pid(&directory).map_err(failed)?;
    Ok(keys.into_iter().zip(numbers).map(|(key, number)| Given { key, pid, number }).collect())
}

/// Starts a holder, which survives this agent.
fn start(directory: &Path, plan: &Plan) -> Result<(), Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::new(format!("the process that holds standard streams of {} cannot be started: {why}", plan.container))
    };
    std::fs::create_dir_all(directory).map_err(|e| failed(&e))?;
    let text = serde_json::to_vec(plan).map_err(|e| failed(&e))?;
    std::fs::write(holder::plan(directory), text).map_err(|e| failed(&e))?;
    let log = File::create(directory.join("log")).map_err(|e| failed(&e))?;
    let mut command = Program::new(program::path().map_err(|e| failed(&e))?);
    command.arg(ARGUMENT).arg(directory).stdin(Stream::Null).stdout(Stream::Null).stderr(log).detach();
    let mut child = command.spawn().map_err(|e| failed(&e))?;
    let noted = alive::note(directory, child.id());
    if let Err(error) = noted.and_then(|()| holder::await_holder(directory, &mut child, START)) {
        let said = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
        let _ = crate::node::reap(child, Duration::ZERO);
        let _ = std::fs::remove_dir_all(directory);
        return Err(failed(&format!("{error} {}", said.trim())));
    }
    // It is waited for when it ends, so that nothing of it stays.
    let reaper = move || drop(child.wait());
    threads::start("stdio holder", reaper).map(drop).map_err(|e| failed(&e))
}

/// The container runs: the holder closes what that has now. There is none where no stream needs
/// one.
pub fn begin(node: &Node, id: &MigrationId) {
    let directory = of_arrived(node, id.as_str());
    if directory.exists()
        && let Err(error) = holder::ask(&directory, &Command::Begin)
    {
        tracing::warn!(%id, %error, "the process that holds the container's standard streams does not answer");
    }
}

/// Ends a holder of which nothing is to be passed on.
pub fn end(directory: &Path) {
    if !directory.exists() || holder::ask(directory, &Command::End).is_ok() {
        return;
    }
    if let Err(error) = alive::kill(directory) {
        tracing::debug!(%error, directory = %directory.display(), "no process holds these standard streams");
    }
    let _ = std::fs::remove_dir_all(directory);
}

/// Streams that are not linked with the other node, for an operator.
pub fn notices(node: &Node) -> Vec<Leftover> {
    let entries = std::fs::read_dir(directory(&node.config.run_dir)).into_iter().flatten().flatten();
    entries.filter_map(|entry| notice(&entry.path())).collect()
}

fn notice(directory: &Path) -> Option<Leftover> {
    let plan: Plan = serde_json::from_slice(&std::fs::read(holder::plan(directory)).ok()?).ok()?;
    let (answer, _) = holder::ask(directory, &Command::Status).ok()?;
    let status: Status = serde_json::from_str(&answer).ok()?;
    let Plan { container, peer, .. } = plan;
    let note = match status.spilled {
        Some(path) => {
            format!("output of {container} goes to {} since node {peer} took none for too long", path.display())
        }
        None if status.linked || !plan.target.is_keep() => return None,
        None => format!(
            "standard streams of {container} are not linked with node {peer}; {} bytes wait; see that its \
             agent runs and can be reached",
            status.waiting
        ),
    };
    Some(Leftover { kind: LeftoverKind::Stream, name: container, removed: false, warning: true, note })
}
