//! What the IPC and UTS namespaces of a process hold.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;

use nix::sched::{CloneFlags, setns};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::own_process::{self, Task};
use crate::{launch, threads};

/// The kernel's lists of System V objects, which show the namespace of the process that reads them (proc(5)), and what they list.
const LISTS: [(&str, &str); 3] = [
    ("/proc/sysvipc/shm", "System V shared memory"),
    ("/proc/sysvipc/sem", "System V semaphores"),
    ("/proc/sysvipc/msg", "System V message queues"),
];

/// Has a thread of its own do something in a namespace of process `pid`.
pub(crate) fn inside<T: Send>(
    pid: u32,
    (link, kind): (&str, CloneFlags),
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let namespace = File::open(format!("/proc/{pid}/ns/{link}"))?;
    threads::apart("namespace", || {
        setns(&namespace, kind)?;
        work()
    })?
}

/// In a process of its own: enters the IPC namespace of process `pid`.
pub(crate) fn enter_ipc(pid: u32) -> io::Result<()> {
    Ok(setns(File::open(format!("/proc/{pid}/ns/ipc"))?, CloneFlags::CLONE_NEWIPC)?)
}

/// The kinds of System V objects that there are in the IPC namespace of a process.
pub fn ipc_objects(pid: u32) -> io::Result<Vec<&'static str>> {
    let mut found = Vec::new();
    for (list, what) in LISTS {
        // The first line is the heading.
        if ipc_list(pid, list)?.lines().count() > 1 {
            found.push(what);
        }
    }
    Ok(found)
}

/// What one of the lists in `/proc/sysvipc` says of the IPC namespace of a process.
pub(crate) fn ipc_list(pid: u32, list: &str) -> io::Result<String> {
    match launch::launcher() {
        Some(_) => {
            let file = own_process::run(Task::IpcList { process: pid, list: list.to_owned() })?;
            io::read_to_string(File::from(file))
        }
        None => inside(pid, ("ipc", CloneFlags::CLONE_NEWIPC), || std::fs::read_to_string(list)),
    }
}

/// In a process of its own: opens that list. It shows the namespace of who has opened it, whoever reads it.
pub(crate) fn ipc_list_of(pid: u32, list: &str) -> io::Result<OwnedFd> {
    if !LISTS.iter().any(|(known, _)| *known == list) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    enter_ipc(pid)?;
    Ok(File::open(list)?.into())
}

/// The host name in the UTS namespace of a process.
pub fn host_name(pid: u32) -> io::Result<String> {
    match launch::launcher() {
        Some(_) => {
            let mut file = File::from(own_process::run(Task::HostName { process: pid })?);
            file.rewind()?;
            io::read_to_string(file)
        }
        None => inside(pid, ("uts", CloneFlags::CLONE_NEWUTS), || Ok(own_host_name()?)),
    }
}

fn own_host_name() -> nix::Result<String> {
    Ok(nix::unistd::gethostname()?.to_string_lossy().into_owned())
}

/// In a process of its own: a file with that name.
pub(crate) fn host_name_of(pid: u32) -> io::Result<OwnedFd> {
    setns(File::open(format!("/proc/{pid}/ns/uts"))?, CloneFlags::CLONE_NEWUTS)?;
    let mut file = File::from(memfd_create("name", MemfdFlags::CLOEXEC)?);
    file.write_all(own_host_name()?.as_bytes())?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_is_in_namespaces_is_told_and_nothing_of_one_s_own() {
        let script = "hostname pod-a; ipcmk --queue > /dev/null; echo ready; read line";
        let program = Command::new("unshare")
            .args(["--ipc", "--uts", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut program = program.unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let found = ipc_objects(program.id()).and_then(|objects| Ok((objects, host_name(program.id())?)));
        drop(program.stdin.take());
        program.wait().unwrap();
        match line.is_empty() {
            true => eprintln!("skipped: no new namespaces here"),
            false => assert_eq!(found.unwrap(), (vec!["System V message queues"], "pod-a".to_owned())),
        }
    }
}
