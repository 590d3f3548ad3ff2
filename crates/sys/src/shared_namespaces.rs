//! What the IPC and UTS namespaces of a process hold.

use std::fs::File;
use std::io;

use nix::sched::{CloneFlags, setns};

use crate::threads;

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

/// The kinds of System V objects that there are in the IPC namespace of a process.
pub fn ipc_objects(pid: u32) -> io::Result<Vec<&'static str>> {
    inside(pid, ("ipc", CloneFlags::CLONE_NEWIPC), || {
        let mut found = Vec::new();
        for (list, what) in LISTS {
            // The first line is the heading.
            if std::fs::read_to_string(list)?.lines().count() > 1 {
                found.push(what);
            }
        }
        Ok(found)
    })
}

/// The host name in the UTS namespace of a process.
pub fn host_name(pid: u32) -> io::Result<String> {
    inside(pid, ("uts", CloneFlags::CLONE_NEWUTS), || Ok(nix::unistd::gethostname()?.to_string_lossy().into_owned()))
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
