//! Taking a lab down, and what is known when something of it stays.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::cgroup;
use crate::error::{LabError, Result};
use crate::lab::LOCK_LIMIT;
use crate::process::{
    NAMESPACES, Process, arguments, depth, describe, inhabitants, namespace, patience, pids, wait_for,
};
use crate::state::{DIRECTORY, Lock, State};

/// How long the kernel may take to end a node while nothing changes in it.
const NODE_LIMIT: Duration = Duration::from_secs(15);
/// The same, when ever fewer processes are left in the nodes.
const NODES_LIMIT: Duration = Duration::from_secs(120);
/// After how long without a change the parents outside of the nodes are killed.
const UNREAPED: Duration = Duration::from_secs(2);

/// The init processes of this lab: those in its state, and those that an `up` started that was then killed.
fn init_processes() -> Vec<Process> {
    let state = State::load().ok().flatten().unwrap_or_default();
    let mut found: Vec<_> = state.nodes.iter().map(|n| n.init).filter(|p| p.is_alive()).collect();
    for pid in pids() {
        let arguments = arguments(pid);
        let [program, verb, _, _, disk, ..] = arguments.as_slice() else { continue };
        // Labs in other namespaces of this machine have other directories, and pid namespaces of greater depth.
        let own = state.disk.as_ref().map_or_else(|| depth(pid) == 2, |own| Path::new(disk).starts_with(own));
        if verb == "hold" && own && Path::new(program).file_name().is_some_and(|n| n == "tranship-lab") {
            found.extend(Process::of(pid).filter(|p| !found.contains(p)));
        }
    }
    found
}

/// Takes down the lab that this process brought up, if it is still there; for when its [`Lab`] is out of reach, as in
/// the handler of a signal. Waits for an `up` that is under way.
///
/// # Errors
/// [`LabError::Leftovers`] names what could not be removed.
pub fn take_down_own() -> Result<()> {
    let lock = Lock::acquire(LOCK_LIMIT)?;
    let owner = State::load()?.and_then(|state| state.owner);
    drop(lock);
    if owner.is_some() && owner == Process::of(std::process::id()) { take_down().map(drop) } else { Ok(()) }
}

/// Takes down whatever lab there is on this machine, also one that is only half there. Returns whether there was one.
///
/// # Errors
/// [`LabError::Leftovers`] names what could not be removed.
pub fn take_down() -> Result<bool> {
    let lock = Lock::acquire(LOCK_LIMIT)?;
    let inits = init_processes();
    let mut leftovers = Vec::new();
    let existed = lock.is_some() || !inits.is_empty();

    let own: BTreeSet<_> = NAMESPACES.iter().filter_map(|kind| namespace(std::process::id(), kind)).collect();
    let spaces: BTreeSet<_> = inits
        .iter()
        .flat_map(|init| NAMESPACES.iter().filter_map(|kind| namespace(init.pid, kind)))
        .filter(|space| !own.contains(space))
        .collect();
    // Whom to ask afterwards: the kernel gives the number of a namespace that is gone to the next one at once.
    let inside = inhabitants(&spaces);
    // With process 1 of a pid namespace the kernel kills all others in it, and ends it when they are gone and reaped.
    inits.iter().for_each(|init| init.kill());
    leftovers.extend(await_end(&inits, &inside, &spaces));
    if wait_for(NODE_LIMIT, || cgroup::remove().is_empty().then_some(())).is_none() {
        leftovers.extend(cgroup::remove().iter().map(|c| format!("cgroup {} is busy", c.display())));
    }
    let state = State::load().ok().flatten().unwrap_or_default();
    for directory in &state.made {
        match remove_mount_point(directory) {
            Err(e) if e.kind() != ErrorKind::NotFound => leftovers.push(format!("{}: {e}", directory.display())),
            _ => {}
        }
    }
    // Nothing is mounted there but in the nodes, which are gone.
    if let Some(Err(e)) = state.disk.map(fs::remove_dir_all).filter(|r| !is_missing(r)) {
        leftovers.push(format!("the nodes' files on disk: {e}"));
    }
    leftovers.extend(remove_directory());
    drop(lock);
    if leftovers.is_empty() { Ok(existed) } else { Err(LabError::Leftovers(leftovers)) }
}

/// Waits until the nodes have ended, and all that was in their namespaces; returns what stays.
fn await_end(inits: &[Process], inside: &[Process], spaces: &BTreeSet<String>) -> Vec<String> {
    let begun = Instant::now();
    let (mut left, mut changed) = (usize::MAX, begun);
    loop {
        // A task that the freezer of version 1 holds does not even die.
        cgroup::thaw();
        let alive: Vec<_> = inits.iter().chain(inside).filter(|process| process.is_alive()).collect();
        if alive.is_empty() {
            return Vec::new();
        }
        // A process that was started from outside (nsenter) stays until its parent has reaped it, which a stopped one does not:
        // whoever inherits the process does.
        if changed.elapsed() > UNREAPED {
            alive.iter().filter(|process| process.pid_space_is_none_of(spaces)).for_each(|process| process.kill());
        }
        let now = alive.len();
        if now < left {
            (left, changed) = (now, Instant::now());
        }
        if changed.elapsed() > patience(NODE_LIMIT) || begun.elapsed() > NODES_LIMIT {
            break;
        }
        std::thread::sleep(Duration::from_millis(4));
    }
    let staying = inits.iter().filter(|process| process.is_alive());
    let mut leftovers: Vec<String> =
        staying.map(|p| format!("process {}, the init process of a node, does not die", p.pid)).collect();
    // Zombies, too: the init process waits until their parents have reaped them.
    let within = pids().into_iter().filter(|pid| namespace(*pid, "pid").is_some_and(|space| spaces.contains(&space)));
    let outside = inside.iter().filter(|p| p.is_alive()).map(|p| p.pid);
    let all: BTreeSet<u32> = within.chain(outside).collect();
    leftovers.extend(all.into_iter().map(|pid| format!("in a node's namespaces is still {}", describe(pid))));
    leftovers
}

/// Removes an empty directory, unless something is mounted on it: in another mount namespace, that of another lab, it
/// would be unmounted.
fn remove_mount_point(directory: &Path) -> io::Result<()> {
    let is_mounted = |pid: u32| {
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        mounts.lines().filter_map(|line| line.split(' ').nth(4)).any(|point| Path::new(point) == directory)
    };
    if pids().into_iter().any(is_mounted) { Ok(()) } else { fs::remove_dir(directory) }
}

fn is_missing(result: &io::Result<()>) -> bool {
    result.as_ref().is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

/// Removes the lab's directory, if nothing is mounted below it: nothing is ever deleted across a mount.
fn remove_directory() -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    if let Some(point) = points.into_iter().find(|p| Path::new(p).starts_with(DIRECTORY)) {
        return Some(format!("something is mounted on {point}; unmount it and say `tranship-lab down` again"));
    }
    match fs::remove_dir_all(DIRECTORY) {
        Err(e) if e.kind() != ErrorKind::NotFound => Some(format!("{DIRECTORY}: {e}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_another_lab_has_mounted_stays_mounted() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: mount namespaces need root");
            return;
        }
        let directory = std::env::temp_dir().join(format!("tranship-lab-test-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        // As the other lab has it, in a mount namespace of its own, which says whether it still has it when its input
        // ends.
        let script = "mount -t tmpfs tmpfs \"$0\" && echo mounted && cat && mountpoint -q \"$0\" && echo still";
        let mut other = Command::new("unshare");
        other.args(["--mount", "--propagation", "private", "sh", "-c", script]).arg(&directory);
        let mut other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(other.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "mounted");
        remove_mount_point(&directory).unwrap();
        assert!(directory.exists(), "the mount point of another lab was removed");
        drop(other.stdin.take());
        assert_eq!(said.next().unwrap().unwrap(), "still");
        assert!(other.wait().unwrap().success());
        remove_mount_point(&directory).unwrap();
        assert!(!directory.exists());
    }
}
