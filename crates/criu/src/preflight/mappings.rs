//! Rules about memory mappings (CRIU: proc_parse.c, `handle_vma`), and how much shared memory there is.

use std::collections::HashSet;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, openat};
use rustix::net::{AddressFamily, sockopt};
use tranship_sys::process::{self, take_descriptor};
use tranship_types::Blocker;

use super::Look;
use super::container::{Container, Task};
use super::descriptors::{WITHOUT_IO_URING, shared_memory};
use super::files::{Descriptor, Files, Kind};
use super::procfs::{self, FdInfo, Mapping, bracketed};

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) {
    let mut shared = shared_memory(files);
    let mut seen = HashSet::new();
    let host_ipc = procfs::namespaces(std::process::id()).ok().and_then(|n| n.get("ipc").cloned());
    for task in container.tasks.values() {
        let Ok(maps) = process::mappings(task.pid) else { continue };
        for m in maps.map_while(Result::ok).filter_map(|line| Mapping::parse(&line)) {
            // One look for each file, however many processes map it. Kernel objects share one inode, so by name too.
            if m.name.starts_with('[') && !m.name.starts_with("[anon_shmem:") && m.name != "[uprobes]"
                || !seen.insert((m.file.clone(), m.name.clone()))
            {
                continue;
            }
            let in_host_ipc = task.namespaces.get("ipc") == host_ipc.as_ref();
            if let Some(found) = special(task, &m, in_host_ipc).or_else(|| socket(files, task, &m)) {
                match ["[io_uring]", "/secretmem"].into_iter().find(|part| m.name.contains(part)) {
                    Some(part) => look.block_once(task.pid, part, found),
                    None => look.block(found),
                }
            } else if kernel_memory(&m.name) {
                if let Some(kind) = Kind::of(map_file(task, &m)) {
                    shared.insert((kind.device, kind.inode), kind.bytes);
                }
            } else if m.name.starts_with('/') && !m.name.starts_with("/anon_hugepage") && !m.name.starts_with("/[aio]")
            {
                look.findings.blockers.extend(file(container, task, &m));
            }
        }
    }
    look.findings.shared_bytes += shared.values().sum::<u64>();
    look.findings.memory_bytes += look.findings.shared_bytes;
}

fn map_file(task: &Task, m: &Mapping) -> String {
    format!("/proc/{}/map_files/{}", task.pid, m.range)
}

/// Shared memory that lies on the kernel's own tmpfs: anonymous, memfd, System V.
fn kernel_memory(name: &str) -> bool {
    ["/dev/zero (deleted)", "/memfd:", "/SYSV", "[anon_shmem:"].iter().any(|p| name.starts_with(p))
}

fn special(task: &Task, m: &Mapping, in_host_ipc: bool) -> Option<Blocker> {
    if m.name.contains("[io_uring]") && !m.name.starts_with('/') {
        return Some(task.blocker("uses an io_uring, which CRIU does not support", WITHOUT_IO_URING));
    }
    if let Some(kind) = m.name.strip_prefix("anon_inode:") {
        let what = format!("maps a kernel object of the kind {kind}, which CRIU does not support");
        return Some(task.blocker(&what, "run the program without it"));
    }
    if m.name == "[uprobes]" {
        // VM_IO (proc_parse.c, `parse_vma_vmflags`).
        let what = "is being probed by a tracing tool of the host (uprobes)";
        return Some(task.blocker(what, "end the tracing (bpftrace, perf, …) and restart the program"));
    }
    if m.name.starts_with("/secretmem") {
        let what = "maps secret memory (memfd_secret), which nobody but itself can read";
        return Some(task.blocker(what, "run the program without secret memory"));
    }
    if m.name.starts_with("/SYSV") && in_host_ipc {
        // cr-dump.c: "doesn't live in IPC ns".
        let what = "uses System V shared memory of the host";
        return Some(task.blocker(what, "start the container with an IPC namespace of its own"));
    }
    None
}

/// Of sockets CRIU carries only the mapped rings of packet sockets that are open, and it aborts when it finds another one mapped.
fn socket(files: &Files<'_>, task: &Task, m: &Mapping) -> Option<Blocker> {
    bracketed(&m.name, "socket")?;
    let open = files.all.iter().find(|d| d.link == m.name);
    let is_packet_socket = |d: &Descriptor<'_>| {
        let taken = take_descriptor(d.task.pid, d.fd);
        taken.is_ok_and(|socket| sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::PACKET))
    };
    let (what, remedy) = match open {
        Some(d) if is_packet_socket(d) => return None,
        Some(d) => (
            format!(
                "maps a socket (descriptor {}) to receive without copying (TCP_ZEROCOPY_RECEIVE), which CRIU does not support",
                d.fd
            ),
            "turn zero-copy receive off in the program's settings",
        ),
        None => (
            "maps a socket that is not open any more, which CRIU does not support".to_owned(),
            "restart the program, or run it without memory-mapped sockets",
        ),
    };
    Some(task.blocker(&what, remedy))
}

fn file(container: &Container, task: &Task, m: &Mapping) -> Option<Blocker> {
    let path = map_file(task, m);
    let kind = Kind::of(&path)?;
    let name = m.name.strip_suffix(" (deleted)").unwrap_or(&m.name);
    match kind.kind {
        FileType::RegularFile => {}
        // /dev/zero is as good as anonymous memory.
        FileType::CharacterDevice if kind.stands_for == (1, 5) => return None,
        _ => {
            let what = format!("maps the device {name}, whose memory CRIU cannot carry");
            return Some(task.blocker(&what, "stop using the device, or run the program without it"));
        }
    }
    let mount = mount_of(&path)?;
    if container.mount_ids.contains(&mount) {
        return None;
    }
    let what = format!("maps {name}, a file that is not on any mount of the container");
    Some(task.blocker(&what, "restart the container with that file inside it or mounted into it"))
}

/// The mount that a file was opened through, found by a reference to it (`O_PATH`), which opens nothing.
pub(super) fn mount_of(path: impl AsRef<Path>) -> Option<u32> {
    let reference = openat(CWD, path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let info = procfs::text(format!("/proc/self/fdinfo/{}", reference.as_raw_fd())).ok()?;
    Some(FdInfo::parse(&info).mount)
}
