//! System V message queues, as the IPC namespace of a process has them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;

use nix::sched::CloneFlags;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::own_process::{self, Task};
use crate::{launch, shared_namespaces};

/// The room that a new queue of the namespace gets, in bytes.
const ROOM: &str = "/proc/sys/kernel/msgmnb";

/// The room of message queues by their ids, in bytes of messages (`msg_qbytes`, msgctl(2)).
pub type Rooms = BTreeMap<i32, u64>;

fn inside<T: Send>(pid: u32, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    shared_namespaces::inside(pid, ("ipc", CloneFlags::CLONE_NEWIPC), work)
}

fn usual_room() -> io::Result<u64> {
    std::fs::read_to_string(ROOM)?.trim().parse().map_err(io::Error::other)
}

fn ids() -> io::Result<Vec<i32>> {
    let list = std::fs::read_to_string("/proc/sysvipc/msg")?;
    Ok(list.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect())
}

fn status(id: i32) -> io::Result<libc::msqid_ds> {
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut status: libc::msqid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours, and lives as long as the call.
    match unsafe { libc::msgctl(id, libc::IPC_STAT, &raw mut status) } {
        0 => Ok(status),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The queues whose room is not that of a new one, in the IPC namespace of a process.
///
/// # Errors
/// The system's.
pub fn unusual_rooms(pid: u32) -> io::Result<Rooms> {
    if launch::launcher().is_none() {
        return inside(pid, unusual_rooms_here);
    }
    let mut file = File::from(own_process::run(Task::MessageRooms { process: pid })?);
    file.rewind()?;
    Ok(serde_json::from_reader(file)?)
}

/// In a process of its own: a file with those queues.
pub(crate) fn unusual_rooms_of(pid: u32) -> io::Result<OwnedFd> {
    shared_namespaces::enter_ipc(pid)?;
    let mut file = File::from(memfd_create("rooms", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(&unusual_rooms_here()?)?)?;
    Ok(file.into())
}

fn unusual_rooms_here() -> io::Result<Rooms> {
    let usual = usual_room()?;
    let mut rooms = Rooms::new();
    for id in ids()? {
        match status(id) {
            Ok(status) if status.msg_qbytes != usual => drop(rooms.insert(id, status.msg_qbytes)),
            Ok(_) => {}
            // It was removed meanwhile.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIDRM)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rooms)
}

/// Gives queues their room, in the IPC namespace of a process. Owner and mode of a queue stay as they are.
///
/// # Errors
/// There is no such queue; the system's.
pub fn set_rooms(pid: u32, rooms: &Rooms) -> io::Result<()> {
    match launch::launcher() {
        Some(_) => own_process::run(Task::SetMessageRooms { process: pid, rooms: rooms.clone() }).map(drop),
        None => inside(pid, || set_rooms_here(rooms)),
    }
}

/// In a process of its own: gives queues their room.
pub(crate) fn set_rooms_of(pid: u32, rooms: &Rooms) -> io::Result<OwnedFd> {
    shared_namespaces::enter_ipc(pid)?;
    set_rooms_here(rooms)?;
    Ok(File::open("/dev/null")?.into())
}

fn set_rooms_here(rooms: &Rooms) -> io::Result<()> {
    let usual = usual_room()?;
    let most = rooms.values().copied().max().unwrap_or_default();
    // More than the namespace's limit only CAP_SYS_RESOURCE may set, which a node need not have.
    if most > usual {
        std::fs::write(ROOM, most.to_string())?;
    }
    let set = rooms.iter().try_for_each(|(id, room)| set_room(*id, *room));
    if most > usual {
        std::fs::write(ROOM, usual.to_string())?;
    }
    set
}

fn set_room(id: i32, room: u64) -> io::Result<()> {
    let mut status = status(id)?;
    status.msg_qbytes = room;
    // SAFETY: the kernel reads the structure, which lives as long as the call.
    match unsafe { libc::msgctl(id, libc::IPC_SET, &raw mut status) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn rooms_that_are_not_usual_are_found_and_set() {
        const USER: &str = "
import ctypes, sys
c = ctypes.CDLL(None)
print(*[c.msgget(0, 0o600) for _ in range(3)], flush=True); sys.stdin.readline()
";
        let mut user = Command::new("unshare")
            .args(["--ipc", "python3", "-c", USER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(user.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ids: Vec<i32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!((ids.len(), unusual_rooms(user.id()).unwrap()), (3, Rooms::new()));
        let usual = inside(user.id(), usual_room).unwrap();
        let rooms = Rooms::from([(ids[0], 777), (ids[2], usual * 3)]);
        set_rooms(user.id(), &rooms).unwrap();
        assert_eq!(unusual_rooms(user.id()).unwrap(), rooms);
        assert_eq!(inside(user.id(), usual_room).unwrap(), usual);
        assert!(set_rooms(user.id(), &Rooms::from([(4711, usual * 2)])).is_err());
        assert_eq!(inside(user.id(), usual_room).unwrap(), usual);
        drop(user.stdin.take());
        user.wait().unwrap();
    }
}
