//! System V shared memory segments, as the IPC namespace of a process has them.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

use nix::sched::CloneFlags;

use crate::own_process::{self, Task};
use crate::{launch, process, shared_namespaces};

/// Of the mode of a segment: it goes away when nobody has it attached any more.
const SHM_DEST: u32 = 0o1000;
/// Its pages are not swapped out.
const SHM_LOCKED: u32 = 0o2000;
/// Of linux/shm.h.
const SHM_LOCK: libc::c_int = 11;

/// The kernel's list of the segments (`/proc/sysvipc/shm`): the namespace in it is that of who asks.
pub fn list(pid: u32) -> io::Result<String> {
    shared_namespaces::ipc_list(pid, "/proc/sysvipc/shm")
}

/// The ids of all of them.
pub fn ids(pid: u32) -> io::Result<Vec<u64>> {
    Ok(list(pid)?.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect())
}

/// Segments in a state that CRIU does not carry, by their ids.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Marked {
    /// Those that were removed while they were attached: they go away with their last user.
    pub removed: Vec<i32>,
    /// Those that are locked in memory (`SHM_LOCK`).
    pub locked: Vec<i32>,
}

/// The segments in these states.
pub fn marked(pid: u32) -> io::Result<Marked> {
    Ok(marks(&list(pid)?))
}

pub(crate) fn marks(list: &str) -> Marked {
    let segment = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        Some((fields.next()?.parse().ok()?, u32::from_str_radix(fields.next()?, 8).ok()?))
    };
    let segments: Vec<(i32, u32)> = list.lines().filter_map(segment).collect();
    let with = |bit: u32| segments.iter().filter(|(_, mode)| mode & bit != 0).map(|(id, _)| *id).collect();
    Marked { removed: with(SHM_DEST), locked: with(SHM_LOCKED) }
}

/// The ids of those that some of these processes have attached.
pub fn attached(pids: &[u32]) -> HashSet<i32> {
    // Its name begins so, and its number is its id (proc_pid_maps(5)).
    let id = |line: io::Result<String>| {
        let line = line.ok()?;
        let mut fields = line.split_whitespace().skip(4);
        let id = fields.next()?.parse().ok()?;
        fields.next()?.starts_with("/SYSV").then_some(id)
    };
    pids.iter().filter_map(|pid| process::mappings(*pid).ok()).flatten().filter_map(id).collect()
}

fn control(id: i32, command: libc::c_int) -> io::Result<()> {
    // SAFETY: neither IPC_RMID nor SHM_LOCK touches memory of this process.
    match unsafe { libc::shmctl(id, command, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn control_all(pid: u32, ids: &[i32], command: libc::c_int) -> io::Result<()> {
    let each = || ids.iter().try_for_each(|id| control(*id, command));
    match launch::launcher() {
        Some(_) => own_process::run(Task::ControlSegments { process: pid, ids: ids.to_vec(), command }).map(drop),
        None => shared_namespaces::inside(pid, ("ipc", CloneFlags::CLONE_NEWIPC), each),
    }
}

/// In a process of its own: does this to segments of the IPC namespace of a process.
pub(crate) fn control_each(pid: u32, ids: &[i32], command: i32) -> io::Result<OwnedFd> {
    if ![libc::IPC_RMID, SHM_LOCK].contains(&command) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    shared_namespaces::enter_ipc(pid)?;
    ids.iter().try_for_each(|id| control(*id, command))?;
    Ok(File::open("/dev/null")?.into())
}

/// Removes segments: each goes away when nobody has it attached any more.
pub fn remove(pid: u32, ids: &[i32]) -> io::Result<()> {
    control_all(pid, ids, libc::IPC_RMID)
}

/// Locks segments in memory.
pub fn lock(pid: u32, ids: &[i32]) -> io::Result<()> {
    control_all(pid, ids, SHM_LOCK)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use super::*;

    /// Makes two segments and attaches them; removes the second one, and later detaches both.
    const USER: &str = "
import ctypes, sys
c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p; c.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
c.shmdt.argtypes = [ctypes.c_void_p]
ids = [c.shmget(0, 4096, 0o600) for _ in range(2)]; at = [c.shmat(i, None, 0) for i in ids]
assert c.shmctl(ids[1], 0, None) == 0
print(*ids, flush=True); sys.stdin.readline()
for a in at: assert c.shmdt(a) == 0
print('done', flush=True); sys.stdin.readline()
";

    #[test]
    fn what_was_removed_goes_away_with_its_last_user() {
        let mut user = Command::new("unshare")
            .args(["--ipc", "python3", "-c", USER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (pid, mut output) = (user.id(), BufReader::new(user.stdout.take().unwrap()));
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let ids: Vec<i32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(marked(pid).unwrap(), Marked { removed: ids[1..].to_vec(), locked: Vec::new() });
        lock(pid, &ids[..1]).unwrap();
        assert_eq!(marked(pid).unwrap(), Marked { removed: ids[1..].to_vec(), locked: ids[..1].to_vec() });
        assert_eq!(super::ids(pid).unwrap(), ids.iter().map(|id| u64::try_from(*id).unwrap()).collect::<Vec<_>>());
        assert_eq!(attached(&[pid]), ids.iter().copied().collect());
        remove(pid, &ids[..1]).unwrap();
        assert_eq!(marked(pid).unwrap().removed, ids);
        assert_eq!(list(pid).unwrap().lines().count(), 3, "a line above both");
        let mut input = user.stdin.take().unwrap();
        writeln!(input).unwrap();
        output.read_line(&mut line).unwrap();
        assert_eq!(list(pid).unwrap().lines().count(), 1);
        assert!(remove(pid, &ids).is_err());
        drop(input);
        user.wait().unwrap();
    }
}
