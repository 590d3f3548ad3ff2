//! Rules about open files, devices, pipes and the kernel's anonymous files (CRIU: files.c, `dump_one_file`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::AsRawFd;

use rustix::fs::FileType;
use tranship_sys::kcmp::{self, EpollTarget};
use tranship_types::{Blocker, BlockerKind};

use super::container::Container;
use super::files::{Descriptor, Files, Holder, Kind};
use super::mounts::{MQUEUE_MAGIC, is_of};
use super::pipes::{LeadsOut, Pipes};
use super::procfs::{self, FdInfo, O_PATH, bracketed};
use super::{Look, Subject, stdio};

const O_DIRECT: u32 = 0o40000;
/// `PIDFD_THREAD` has the value of `O_EXCL`.
const O_EXCL: u32 = 0o200;
/// The highest number of a pseudo-terminal that CRIU carries (tty.c, `MAX_PTY_INDEX`).
const LAST_TERMINAL: u32 = 1000;

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    d.blocker(BlockerKind::Descriptor, what, remedy)
}

pub(super) fn check(container: &Container, subject: &Subject, files: &Files<'_>, look: &mut Look) {
    let namespaces = container.namespaces();
    look.findings.streams = stdio::streams(container, subject, files);
    for d in &files.all {
        if stdio::is_carried(&look.findings.streams, d) {
            look.findings.blockers.extend(packets(d));
            continue;
        }
        let found = match d.kind.kind {
            _ if d.info.flags & O_PATH != 0 && is_opened(d) => Some(reference(d)),
            // sockets.rs
            FileType::Socket => None,
            FileType::Fifo if d.link.starts_with("pipe:[") => packets(d),
            FileType::CharacterDevice => device(d).or_else(|| place(container, d)),
            FileType::BlockDevice => {
                let remedy = "close it, or run the program without access to the device";
                Some(blocker(d, &format!("is the block device {}", d.link), remedy))
            }
            _ if d.link == "anon_inode:[eventpoll]" => {
                let inherited = is_inherited(container, files, d);
                look.passing.extend((!inherited).then(|| watched(files, d)).flatten());
                None
            }
            _ if d.link.starts_with("anon_inode:") => anonymous(container, subject, d),
            _ if d.link.starts_with('/') => place(container, d),
            _ => namespace(&namespaces, d),
        };
        if let Some(found) = found {
            // What is mapped as well is named here.
            match named_elsewhere(d, &found) {
                Some((pid, part)) => look.block_once(pid, part, found),
                None => look.block(found),
            }
        }
    }
    pipes(container, subject, files, look);
    terminals(container, files, look);
}

/// What is named for a descriptor and shows in another place too: by process, or 0 for all.
fn named_elsewhere(d: &Descriptor<'_>, found: &Blocker) -> Option<(u32, &'static str)> {
    if found.cause.contains("is the POSIX message queue") {
        return Some((0, "mqueue"));
    }
    let part = ["[io_uring]", "/secretmem"].into_iter().find(|part| d.link.contains(part))?;
    Some((d.task.pid, part))
}

/// Whether CRIU takes what a reference (`O_PATH`) stands for as opened, which fails: pipes.c, sockets.c and tty.c.
fn is_opened(d: &Descriptor<'_>) -> bool {
    matches!(d.kind.kind, FileType::Fifo | FileType::Socket)
        || d.kind.kind == FileType::CharacterDevice && (d.link == "/dev/tty" || terminal(d))
}

fn reference(d: &Descriptor<'_>) -> Blocker {
    let kind = match d.kind.kind {
        FileType::Fifo => "FIFO",
        FileType::Socket => "Unix socket",
        _ => "terminal",
    };
    let what = format!("is a reference (O_PATH) to the {kind} {}, which CRIU does not support", d.link);
    blocker(d, &what, "let the program close it when it needs it no more, or restart the program")
}

/// Files must lie on a mount that the container can see (files-reg.c, `dump_one_reg_file`).
fn place(container: &Container, d: &Descriptor<'_>) -> Option<Blocker> {
    let path = d.link.strip_suffix(" (deleted)").unwrap_or(&d.link);
    if let Some(name) = path.strip_prefix("/secretmem") {
        let what = format!("is secret memory{name} (memfd_secret), which nobody but its process can read");
        return Some(blocker(d, &what, "run the program without secret memory"));
    }
    if path.starts_with("/dmabuf:") {
        return Some(blocker(d, "is a buffer of a device (dma-buf)", "run the program without the device"));
    }
    // memfd.c: by its device, which is that of the kernel's own tmpfs; so have anonymous huge pages theirs.
    if path.starts_with("/memfd:") || path.starts_with("/anon_hugepage") {
        return None;
    }
    // Anonymous shared memory that was opened by `/proc/PID/map_files`. The device of that name has names.
    if d.link == "/dev/zero (deleted)" && memory_device() == Some(d.kind.device) {
        return None;
    }
    if container.mount_ids.contains(&d.info.mount) {
        return container.covered.contains(&d.info.mount).then(|| {
            let what = format!("is {path}, on a mount that another mount hides");
            blocker(d, &what, "unmount what lies on top, or close the file")
        });
    }
    if is_of(d.path(), MQUEUE_MAGIC) {
        let what = format!("is the POSIX message queue {path}, which CRIU does not support");
        return Some(blocker(d, &what, "use another means of communication"));
    }
    let (thing, remedy) = match (d.kind.kind, d.fd) {
        (FileType::CharacterDevice, 0..=2) if terminal(d) => {
            ("terminal", "start the container detached, or with a terminal of its own")
        }
        (FileType::CharacterDevice, _) => ("device", "let the program open the container's own device"),
        (FileType::Directory, _) => ("directory", "close it before the program is started in the container"),
        (_, 0) => ("file", "start the container with stdin from /dev/null or a pipe"),
        (_, 1) => ("file", "start the container with stdout on a pipe"),
        (_, 2) => ("file", "start the container with stderr on a pipe"),
        _ => ("file", "close it before the program is started, or mount it into the container"),
    };
    Some(blocker(d, &format!("is the host {thing} {path}"), remedy))
}

/// The device of files in memory alone: of the kernel's own tmpfs.
fn memory_device() -> Option<(u32, u32)> {
    let file = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    Kind::of(format!("/proc/self/fd/{}", file.as_raw_fd())).map(|kind| kind.device)
}

fn terminal(d: &Descriptor<'_>) -> bool {
    // tty.c, `get_tty_driver`: consoles and serial lines, /dev/tty and /dev/ptmx, USB and other serial lines, ptys.
    matches!(d.kind.stands_for.0, 4 | 5 | 188 | 204 | 128..=143)
}

fn device(d: &Descriptor<'_>) -> Option<Blocker> {
    let (major, minor) = d.kind.stands_for;
    let known = match major {
        // Memory devices: null, zero, full, random, urandom, kmsg.
        1 => true,
        // Of the miscellaneous ones only autofs: CRIU carries tun where it makes the network namespace, and here it does not.
        10 => minor == 235,
        _ => terminal(d),
    };
    if known {
        return None;
    }
    let what = match (major, minor) {
        (10, 229) => "a connection to a FUSE filesystem that the program serves".to_owned(),
        (10, 200) => format!("the tun or tap device {}", d.link),
        (10, 232) => "the KVM device".to_owned(),
        (10, 196) => "a VFIO device".to_owned(),
        (226, _) => format!("the graphics device {}", d.link),
        (195, _) => format!("the NVIDIA device {}", d.link),
        (231, _) => format!("the InfiniBand device {}", d.link),
        _ => format!("the device {} ({major}:{minor})", d.link),
    };
    let remedy = "stop using the device, or run the program without it";
    Some(blocker(d, &format!("is {what}, whose state CRIU cannot carry"), remedy))
}

fn packets(d: &Descriptor<'_>) -> Option<Blocker> {
    // pipes.c, "packetized mode".
    (d.info.flags & O_DIRECT != 0)
        .then(|| blocker(d, "is a pipe in packet mode (O_DIRECT)", "let the program make its pipes without O_DIRECT"))
}

/// What to do about an io_uring.
pub(super) const WITHOUT_IO_URING: &str = "turn io_uring off in the program's settings (MariaDB: innodb_use_native_aio=0) and restart it, or start \
                                           the container with a seccomp profile that denies it; programs do without then";

fn anonymous(container: &Container, subject: &Subject, d: &Descriptor<'_>) -> Option<Blocker> {
    let kind = d.link.strip_prefix("anon_inode:").unwrap_or(&d.link).trim_matches(['[', ']']);
    match kind {
        // eventfd.c makes the eventfd with the flags of the open file, among which this one is not.
        "eventfd" if d.info.number("eventfd-semaphore").is_some_and(|n| n != 0) => {
            let what = "is an eventfd that counts as a semaphore (EFD_SEMAPHORE), which CRIU does not carry";
            Some(
                blocker(d, what, "let the program make its eventfds without EFD_SEMAPHORE")
                    .allowable("eventfd-semaphore"),
            )
        }
        "eventfd" | "signalfd" | "timerfd" | "inotify" | "fanotify" => None,
        "pidfd" => pidfd(container, d),
        "io_uring" => Some(blocker(d, "is an io_uring, which CRIU does not support", WITHOUT_IO_URING)),
        // bpfmap.c carries hash (1) and array (2) maps, where criu was built with libbpf, as distributions do not.
        "bpf-map" => (!subject.bpf_maps || !matches!(d.info.number("map_type"), Some(1 | 2)))
            .then(|| blocker(d, "is a BPF map, which the criu in use does not support", "run the program without it")),
        _ => {
            let what = match kind {
                "bpf-prog" | "bpf_link" | "bpf-link" | "btf" => "a loaded BPF program or a part of one".to_owned(),
                "perf_event" => "a performance counter (perf_event)".to_owned(),
                "userfaultfd" => "a userfaultfd".to_owned(),
                "seccomp notify" => "a listener for another process's system calls (seccomp notify)".to_owned(),
                "landlock-ruleset" => "a Landlock ruleset".to_owned(),
                k if k.starts_with("kvm") => "a virtual machine (KVM)".to_owned(),
                k => format!("a kernel object of the kind {k}"),
            };
            Some(blocker(
                d,
                &format!("is {what}, which CRIU does not support"),
                "close it, or run the program without it",
            ))
        }
    }
}

/// Whether a process has an open file from its parent, in which CRIU has met it already: under the same number it is the same file.
fn is_inherited(container: &Container, files: &Files<'_>, d: &Descriptor<'_>) -> bool {
    let Some(parent) = container.tasks.get(&d.task.status.ppid) else { return false };
    let there = files.all.iter().any(|f| f.task.pid == parent.pid && f.fd == d.fd && f.link == d.link);
    there && kcmp::same_file((parent.pid, d.fd), (d.task.pid, d.fd))
}

/// An epoll may go on watching a file whose descriptor is closed, if another one refers to it. CRIU looks for one in the process in
/// which it meets the epoll first (eventpoll.c).
fn watched(files: &Files<'_>, d: &Descriptor<'_>) -> Option<(u64, Blocker)> {
    let pid = d.task.pid;
    let own: Vec<&Descriptor<'_>> = files.all.iter().filter(|f| f.task.pid == pid).collect();
    let mut before: HashMap<i32, u32> = HashMap::new();
    let lost = d.info.epoll_targets().into_iter().find(|(number, inode)| {
        let offset = before.entry(*number).or_default();
        let target = EpollTarget { epoll: d.fd.unsigned_abs(), descriptor: number.unsigned_abs(), offset: *offset };
        *offset += 1;
        // Nearly always it is still open under that number; descriptors are in order.
        let same = own.binary_search_by_key(number, |f| f.fd).ok().map(|place| &own[place]);
        let there = same.into_iter().chain(own.iter().filter(|f| f.fd != *number));
        let candidates = there.filter(|f| f.kind.inode == *inode);
        // `None` is a file that is not watched any more.
        candidates.map(|f| kcmp::is_watched(pid, f.fd.unsigned_abs(), target)).all(|found| found == Some(false))
    })?;
    // Opened since the descriptors were listed, or closed and thereby out of the epoll?
    let there = Kind::of(format!("/proc/{pid}/fd/{}", lost.0)).map(|k| k.inode);
    let now = FdInfo::parse(&procfs::text(format!("/proc/{pid}/fdinfo/{}", d.fd)).ok()?).epoll_targets();
    if there == Some(lost.1) || !now.contains(&lost) {
        return None;
    }
    let what = format!(
        "is an epoll that watches a file (once descriptor {}) to which no descriptor of this process refers any more",
        lost.0
    );
    Some((lost.1, blocker(d, &what, "restart the program, or let it remove closed files from its epoll")))
}

fn pidfd(container: &Container, d: &Descriptor<'_>) -> Option<Blocker> {
    if d.info.flags & O_EXCL != 0 {
        return Some(blocker(
            d,
            "is a pidfd of a thread, which CRIU does not support",
            "let the program use pidfds of processes",
        ));
    }
    // pidfd.c: -1 is a process that has ended; 0 one that this /proc does not show.
    let pid = d.info.number("Pid")?;
    let known = pid < 0 || u32::try_from(pid).is_ok_and(|p| container.owns(p));
    (!known).then(|| blocker(d, "is a pidfd of a process outside of the container", "close it, or restart the program"))
}

fn namespace(namespaces: &HashSet<&str>, d: &Descriptor<'_>) -> Option<Blocker> {
    let kind = d.link.split(":[").next().unwrap_or_default();
    let known = matches!(kind, "net" | "mnt" | "pid" | "user" | "ipc" | "uts" | "cgroup" | "time");
    if !known || bracketed(&d.link, kind).is_none() {
        let what = format!("is {}, a kind of file that CRIU does not know", d.link);
        return Some(blocker(d, &what, "close it, or run the program without it"));
    }
    // namespaces.c, `dump_one_ns_file`: it must be one that a task of the container lives in.
    (!namespaces.contains(d.link.as_str())).then(|| {
        let what = format!("is a {kind} namespace that no process of the container lives in");
        blocker(d, &what, "close it, or restart the program")
    })
}

/// A pipe's other end outside of the container is lost by a dump: CRIU makes a new pipe with one end, without complaint.
fn pipes(container: &Container, subject: &Subject, files: &Files<'_>, look: &mut Look) {
    let mut pipes = Pipes::default();
    for d in files.all.iter().filter(|d| d.link.starts_with("pipe:[")) {
        pipes.add(&d.link, (d.task.pid, d.fd), d.info.ends());
    }
    look.findings.stdio = connected(container, subject, files, &pipes);
    let carried = look.findings.streams.iter().map(|stream| stream.name.as_str());
    let connected = look.findings.stdio.iter().map(String::as_str).filter(|_| subject.stdio_pipes_kept);
    let kept = carried.chain(connected).filter(|link| link.starts_with("pipe:["));
    look.findings.carried_pipes = kept.map(str::to_owned).collect();
    let sockets = || {
        let sockets = files.all.iter().filter(|d| d.kind.kind == FileType::Socket);
        sockets.map(|d| (d.task.pid, d.fd)).collect()
    };
    let is_carried = |link: &str| look.findings.carried_pipes.iter().any(|carried| carried == link);
    for LeadsOut { link, ends, holder } in pipes.lead_out(is_carried, (|pid| container.owns(pid), |_| false), sockets) {
        let Some(d) = files.all.iter().find(|d| (d.task.pid, d.fd) == ends.place) else { continue };
        let remedy = "use a socket or a FIFO in a shared directory, or end that process";
        match holder {
            Some(pid) => {
                let name = tranship_sys::process::name(pid).unwrap_or_default();
                let what = format!("is a pipe whose other end is held by {name} (pid {pid}) outside of the container");
                look.block(blocker(d, &what, remedy));
            }
            // A process that has just been born may have it.
            None => {
                let what = "is a pipe whose other end is open outside of the container, in a process that is not seen";
                look.wait(bracketed(&link, "pipe").unwrap_or_default(), blocker(d, what, remedy));
            }
        }
    }
}

/// The pipes that the engine made for the first process's standard streams, or what those are instead. A shell that redirects its own
/// stdout for a while keeps the pipe under a number from 10 on; a program may have moved it anywhere.
fn connected(container: &Container, subject: &Subject, files: &Files<'_>, pipes: &Pipes) -> Vec<String> {
    let half = |link: &str| pipes.ends(link).is_some_and(|ends| ends.reads != ends.writes);
    let mut streams: Vec<Option<String>> = (0..3)
        .map(|number| {
            let now = files.all.iter().find(|d| d.task.pid == container.init && d.fd == number);
            let now = now.map(|d| d.link.clone()).filter(|link| half(link));
            let noted = || subject.stdio_noted.get(number.unsigned_abs() as usize).filter(|link| half(link)).cloned();
            now.or_else(noted)
        })
        .collect();
    // What a restored container's runtime has noted are the pipes of another node: what is left is told by who holds the other ends,
    // and by the order in which they were made.
    let engine = container.first().status.ppid;
    let mut left: Vec<(u64, &str, bool)> = pipes
        .halves()
        .filter(|(link, _)| !streams.iter().flatten().any(|known| known == link))
        .filter(|(link, _)| matches!(files.holder(container, link), Some(Holder::Outside(pid, _)) if *pid == engine))
        .filter_map(|(link, ends)| Some((bracketed(link, "pipe")?, link, ends.reads)))
        .collect();
    left.sort_unstable();
    for (_, link, read) in left {
        let mut fitting = if read { 0..1 } else { 1..3 };
        if let Some(free) = fitting.find(|stream| streams[*stream].is_none()) {
            streams[free] = Some(link.to_owned());
        }
    }
    let path = |number: usize| {
        procfs::link(format!("/proc/{}/fd/{number}", container.init)).unwrap_or_else(|_| "/dev/null".into())
    };
    streams.into_iter().enumerate().map(|(number, stream)| stream.unwrap_or_else(|| path(number))).collect()
}

/// tty.c, `tty_verify_active_pairs`: the engine holds the master of one terminal, the container's console; any other
/// slave needs its master inside.
fn terminals(container: &Container, files: &Files<'_>, look: &mut Look) {
    let masters: HashSet<i64> = files.all.iter().filter_map(|d| d.info.number("tty-index")).collect();
    let mut slaves: BTreeMap<u32, &Descriptor<'_>> = BTreeMap::new();
    for d in &files.all {
        let (major, minor) = d.kind.stands_for;
        let slave = d.kind.kind == FileType::CharacterDevice && major == 136;
        if slave && container.mount_ids.contains(&d.info.mount) && !masters.contains(&i64::from(minor)) {
            slaves.entry(minor).or_insert(d);
        }
    }
    let number = |d: &Descriptor<'_>| match d.info.number("tty-index") {
        Some(index) => u32::try_from(index).ok(),
        None => (d.kind.kind == FileType::CharacterDevice && d.kind.stands_for.0 == 136).then_some(d.kind.stands_for.1),
    };
    let mut named = HashSet::new();
    for d in &files.all {
        if let Some(index) = number(d).filter(|index| *index > LAST_TERMINAL && named.insert(*index)) {
            let what = format!("is the pseudo-terminal {index}, and CRIU carries those up to {LAST_TERMINAL} only");
            look.block(blocker(d, &what, "close terminals that are not used, so that new ones get lower numbers"));
        }
    }
    for d in slaves.values().skip(1) {
        let what = format!("is the terminal {}, whose other side is outside of the container", d.link);
        look.block(blocker(d, &what, "end the session on that terminal and try again"));
    }
}

/// Bytes of shared memory behind descriptors (memfds), by device and inode, so that mappings of the same are not counted
/// again.
pub(super) fn shared_memory(files: &Files<'_>) -> HashMap<((u32, u32), u64), u64> {
    let memfds = files.all.iter().filter(|d| d.link.starts_with("/memfd:"));
    memfds.map(|d| ((d.kind.device, d.kind.inode), d.kind.bytes)).collect()
}
