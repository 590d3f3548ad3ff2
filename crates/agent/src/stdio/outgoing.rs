//! Standard streams on the node that a container leaves.

use std::io::{ErrorKind, IsTerminal};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use tranship_coordinator::Failure;
use tranship_engine::Container;
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind, MigrationId, NodeName, StdioKind, StdioStream, StdioTarget};

use super::alive;
use super::holder::{Plan, Planned};
use super::links::keep_linked;
use super::{of_left, start};
use crate::node::{Node, failed};

const O_ACCMODE: u32 = 0o3;
const O_WRONLY: u32 = 0o1;
const O_RDWR: u32 = 0o2;

/// What a move makes of the streams, for the plan and the report.
pub fn describe(streams: &[StdioStream], target: &StdioTarget, peer_of: &str) -> Vec<String> {
    let describe = |stream: &StdioStream| {
        let StdioStream { kind, name, .. } = stream;
        match target {
            _ if *kind == StdioKind::Null => None,
            StdioTarget::Keep if stream.removed => {
                Some(format!("stdio: {stream}, a file here that has no name any more, goes on in {name} there"))
            }
            StdioTarget::Keep if *kind == StdioKind::File => Some(format!("stdio: {stream} goes on in {name} there")),
            StdioTarget::Keep => {
                Some(format!("stdio: {stream} is relayed between there and the {kind} {name} of node {peer_of}"))
            }
            target => Some(format!("stdio: {stream}, the {kind} {name} here, goes to {target} there")),
        }
    };
    streams.iter().filter_map(describe).collect()
}

/// Streams that cannot be carried.
pub fn refused(container: &str, streams: &[StdioStream]) -> Vec<Blocker> {
    let is_refused = |stream: &&StdioStream| stream.kind == StdioKind::Fifo && stream.reads && stream.writes;
    let blocker = |stream: &StdioStream| {
        let cause =
            format!("{stream} of container {container} is the FIFO {}, opened for reading and writing", stream.name);
        Blocker::new(
            BlockerKind::Descriptor,
            cause,
            "start the container with a FIFO that is opened for one of the two",
        )
    };
    streams.iter().filter(is_refused).map(blocker).collect()
}

/// Where the streams are noted for [`leave`].
fn noted(root: &Path) -> std::path::PathBuf {
    root.join("stdio.json")
}

/// Notes in the migration's directory what is to be relayed.
pub fn note(root: &Path, streams: &[StdioStream], target: &StdioTarget) -> Result<(), Failure> {
    let relayed: Vec<_> = streams.iter().filter(|stream| stream.is_relayed()).collect();
    if relayed.is_empty() || !target.is_keep() {
        return Ok(());
    }
    std::fs::write(noted(root), serde_json::to_vec(&relayed).map_err(failed)?).map_err(failed)
}

/// Has a process take over what the frozen original has open, and links it with the destination.
/// Done once the decision is made; may be done again.
pub fn leave(
    node: &Arc<Node>,
    root: &Path,
    peer: &NodeName,
    id: &MigrationId,
    container: &Container,
) -> Result<(), Failure> {
    let text = match std::fs::read(noted(root)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.map_err(failed)?,
    };
    let streams: Vec<StdioStream> = serde_json::from_slice(&text).map_err(failed)?;
    let directory = of_left(node, id.as_str());
    if !alive::is_alive(&directory).map_err(failed)? {
        let pids = container.processes().map_err(failed)?;
        let runtime = runtime(container.init);
        let planned = streams.iter().map(|stream| planned(stream, &pids, runtime)).collect();
        let plan = Plan {
            relay: id.to_string(),
            container: container.name.clone(),
            is_source: true,
            peer: peer.clone(),
            streams: planned,
            target: StdioTarget::Keep,
            spill: std::path::PathBuf::new(),
            after: runtime,
        };
        start(&directory, &plan)?;
        keep_linked(node, directory);
    }
    // Once is enough, also after a restart of the agent.
    std::fs::remove_file(noted(root)).map_err(failed)
}

/// The `runc run` in the foreground that passes on what the container reads and writes, and ends
/// with it.
fn runtime(init: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{init}/stat")).ok()?;
    let parent: u32 = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    ["runc", "crun"].contains(&name.trim()).then_some(parent)
}

fn planned(stream: &StdioStream, pids: &[u32], runtime: Option<u32>) -> Planned {
    let (reading, writing) = open_at(stream, pids);
    // What the runtime in the foreground has under the same number: its other end of a pipe ends
    // with it.
    let of_runtime = |number: i32| runtime.filter(|_| stream.kind == StdioKind::Pipe).map(|pid| (pid, number));
    let number = stream.numbers.first().copied().map_or(1, i32::from);
    let mut planned = Planned { stream: stream.clone(), inputs: Vec::new(), output: None };
    // A shell at a terminal reads there, too.
    if stream.reads && stream.kind != StdioKind::Terminal {
        planned.inputs.extend(reading);
        planned.inputs.extend(of_runtime(0).filter(|place| !is_terminal(*place)));
    }
    if stream.writes {
        planned.output = of_runtime(number).or(writing);
    }
    planned
}

/// A process, and the number of one of its descriptors.
type Place = (u32, i32);

/// Whether a descriptor is a terminal: the shell that the runtime was started from reads there when
/// that has ended.
fn is_terminal((pid, number): Place) -> bool {
    take_descriptor(pid, number).is_ok_and(|descriptor| descriptor.is_terminal())
}

/// Where the container has a stream open for reading and for writing.
fn open_at(stream: &StdioStream, pids: &[u32]) -> (Option<Place>, Option<Place>) {
    let mut found = (None, None);
    for pid in pids {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            if !is_it(stream, *pid, number) {
                continue;
            }
            let mode = flags(*pid, number) & O_ACCMODE;
            if mode != O_WRONLY {
                found.0.get_or_insert((*pid, number));
            }
            if mode == O_WRONLY || mode == O_RDWR {
                found.1.get_or_insert((*pid, number));
            }
        }
    }
    found
}

fn is_it(stream: &StdioStream, pid: u32, number: i32) -> bool {
    let path = format!("/proc/{pid}/fd/{number}");
    let is_named = || std::fs::read_link(&path).is_ok_and(|link| link.as_os_str() == stream.name.as_str());
    match &stream.external {
        // By its inode: two files may have had one name.
        Some(external) if external.starts_with("file[") => {
            let inode = || std::fs::metadata(&path).ok().map(|seen| format!(":{:x}]", seen.ino()));
            is_named() && inode().is_some_and(|inode| external.ends_with(&inode))
        }
        _ => is_named(),
    }
}

fn flags(pid: u32, number: i32) -> u32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok()).unwrap_or_default()
}
