//! Standard streams of the first process that lead outside of the container, where an agent gives
//! them new other ends.
//!
//! CRIU tells such objects apart by what they are: a pipe by its inode, everything that has a path
//! by its mount and inode (files-reg.c, `file[MOUNT:INODE]`), a terminal by its device (tty.c). So
//! a stream is carried wherever the container has it open, in whichever process and under whichever
//! number.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::SystemTime;

use rustix::fs::FileType;
use rustix::net::{AddressFamily, SocketType, getpeername, sockopt};
use rustix::termios::tcgetwinsize;
use tranship_sys::process::take_descriptor;
use tranship_types::{FileIdentity, FileOwner, StdioKind, StdioStream};

use super::Subject;
use super::container::Container;
use super::files::{BETWEEN_LOOKS, Descriptor, Files, Holder, LOOKS};
use super::paths::DELETED;
use super::pipes::is_other_end_open;
use super::sockets::is_elsewhere;

/// Device numbers of `/dev/null`.
const NULL: (u32, u32) = (1, 3);
/// Major number of the slaves of pseudo-terminals.
const SLAVES: u32 = 136;

/// The streams that are carried, each object once.
pub(super) fn streams(container: &Container, subject: &Subject, files: &Files<'_>) -> Vec<StdioStream> {
    if !subject.carries_stdio {
        return Vec::new();
    }
    let mut found: Vec<StdioStream> = Vec::new();
    for number in 0..3u8 {
        let now = files.all.iter().find(|d| d.task.pid == container.init && d.fd == i32::from(number));
        let is_carried = |d: &&Descriptor<'_>| kind(container, files, d).is_some();
        // A shell that redirects its own stdout keeps what it was under another number.
        let noted = || {
            let link = subject.stdio_noted.get(usize::from(number))?;
            files.all.iter().find(|d| d.link == *link)
        };
        let Some(d) = now.filter(is_carried).or_else(|| noted().filter(is_carried)) else { continue };
        match found.iter_mut().find(|stream| is_of(stream, d)) {
            Some(stream) => stream.numbers.push(number),
            None => found.extend(stream(container, files, d, number)),
        }
    }
    // A moved container's pipes are held by an agent's process, whatever their numbers are now.
    for d in files.all.iter().filter(|d| d.link.starts_with("pipe:[")) {
        let held = || matches!(files.holder(container, &d.link), Some(Holder::Outside(_, name)) if name == HOLDER);
        if !found.iter().any(|stream| is_of(stream, d)) && kind(container, files, d).is_some() && held() {
            let (reads, _) = d.info.ends();
            found.extend(stream(container, files, d, u8::from(!reads)));
        }
    }
    found
}

/// Name of the processes that hold the other ends of moved containers' standard streams.
pub const HOLDER: &str = "tranship-stdio";

/// Whether a descriptor refers to an object that is carried.
pub(super) fn is_carried(streams: &[StdioStream], d: &Descriptor<'_>) -> bool {
    streams.iter().any(|stream| is_of(stream, d))
}

fn is_of(stream: &StdioStream, d: &Descriptor<'_>) -> bool {
    match &stream.external {
        Some(external) => *external == external_of(stream.kind, d),
        None => stream.name == d.link,
    }
}

fn external_of(kind: StdioKind, d: &Descriptor<'_>) -> String {
    // As the kernel's `new_encode_dev` has it.
    let number =
        |(major, minor): (u32, u32)| u64::from(minor & 0xff) | u64::from(major) << 8 | u64::from(minor & !0xff) << 12;
    match kind {
        StdioKind::Terminal => format!("tty[{:x}:{:x}]", number(d.kind.stands_for), number(d.kind.device)),
        _ => format!("file[{:x}:{:x}]", d.info.mount, d.kind.inode),
    }
}

/// What an object is, if it lies outside of the container.
fn kind(container: &Container, files: &Files<'_>, d: &Descriptor<'_>) -> Option<StdioKind> {
    let is_of_node = d.link.starts_with('/') && !container.mount_ids.contains(&d.info.mount);
    match d.kind.kind {
        FileType::Fifo if d.link.starts_with("pipe:[") => {
            let ends = ends(files, d);
            // One whose other end nobody has is whole in CRIU's images, with what is in it.
            (ends.0 != ends.1 && has_other_end(d, ends.0)).then_some(StdioKind::Pipe)
        }
        FileType::Fifo if is_of_node => Some(StdioKind::Fifo),
        FileType::Socket => is_stream_of_node(container, d).then_some(StdioKind::Socket),
        FileType::RegularFile if is_of_node && !d.link.starts_with("/memfd:") => Some(StdioKind::File),
        FileType::CharacterDevice if is_of_node && d.kind.stands_for == NULL => Some(StdioKind::Null),
        FileType::CharacterDevice if is_of_node && d.kind.stands_for.0 == SLAVES => Some(StdioKind::Terminal),
        _ => None,
    }
}

/// Whether a socket is connected with one of the node's, made outside of the container.
fn is_stream_of_node(container: &Container, d: &Descriptor<'_>) -> bool {
    let Ok(socket) = taken_again(d) else { return false };
    let is_unix = sockopt::socket_domain(&socket).is_ok_and(|family| family == AddressFamily::UNIX);
    let is_stream = sockopt::socket_type(&socket).is_ok_and(|kind| kind == SocketType::STREAM);
    is_unix && is_stream && getpeername(&socket).is_ok() && is_elsewhere(container, &socket)
}

/// Takes a descriptor, also one that its program closes for a moment when it redirects a stream.
fn taken_again(d: &Descriptor<'_>) -> std::io::Result<std::os::fd::OwnedFd> {
    let mut taken = take_descriptor(d.task.pid, d.fd);
    for _ in 0..LOOKS {
        if taken.is_ok() {
            break;
        }
        std::thread::sleep(BETWEEN_LOOKS);
        taken = take_descriptor(d.task.pid, d.fd);
    }
    taken
}

/// Whether anybody has the other end of a pipe: also processes that this node's agent does not see.
fn has_other_end(d: &Descriptor<'_>, is_read: bool) -> bool {
    taken_again(d).is_ok_and(|pipe| is_other_end_open(&pipe, is_read))
}

/// Whether the container has the reading and the writing end of what a descriptor refers to.
fn ends(files: &Files<'_>, d: &Descriptor<'_>) -> (bool, bool) {
    let same = |other: &&Descriptor<'_>| {
        (&other.link, other.kind.inode, other.kind.device) == (&d.link, d.kind.inode, d.kind.device)
    };
    files.all.iter().filter(same).fold((false, false), |(reads, writes), other| {
        let of = other.info.ends();
        (reads | of.0, writes | of.1)
    })
}

fn stream(container: &Container, files: &Files<'_>, d: &Descriptor<'_>, number: u8) -> Option<StdioStream> {
    let kind = kind(container, files, d)?;
    let (reads, writes) = ends(files, d);
    let taken = || taken_again(d).ok();
    let plain = d.link.strip_suffix(DELETED).filter(|_| kind == StdioKind::File && d.kind.links == 0);
    let is_there = kind == StdioKind::File && plain.is_none();
    Some(StdioStream {
        kind,
        name: plain.unwrap_or(&d.link).to_owned(),
        external: (kind != StdioKind::Pipe).then(|| external_of(kind, d)),
        numbers: vec![number],
        reads,
        writes,
        flags: d.info.flags,
        position: d.info.number("pos").and_then(|at| u64::try_from(at).ok()).unwrap_or_default(),
        identity: is_there.then(|| taken().and_then(|file| identity(&file.into()))).flatten(),
        removed: plain.is_some(),
        owner: taken().and_then(|file| owner(&file)),
        window: (kind == StdioKind::Terminal).then(|| taken().and_then(window)).flatten(),
    })
}

fn owner(file: impl AsFd) -> Option<FileOwner> {
    let seen = rustix::fs::fstat(file).ok()?;
    Some(FileOwner { uid: seen.st_uid, gid: seen.st_gid, mode: seen.st_mode & 0o777 })
}

fn window(terminal: impl AsFd) -> Option<(u16, u16)> {
    let size = tcgetwinsize(terminal).ok()?;
    Some((size.ws_row, size.ws_col))
}

/// What tells a file from others of its name.
pub fn identity(file: &File) -> Option<FileIdentity> {
    use std::os::unix::fs::MetadataExt;
    let seen = file.metadata().ok()?;
    let born = seen.created().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let filesystem = rustix::fs::fstatfs(file).ok()?.f_type.cast_unsigned();
    let born_ns = born.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or_default());
    Some(FileIdentity { inode: seen.ino(), born_ns, filesystem, device: seen.dev(), boot: boot() })
}

/// The first half of the UUID that the kernel gives to each of its runs (random(4)).
fn boot() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or_default()
}
