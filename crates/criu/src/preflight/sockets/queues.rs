//! Rules about what waits in Unix sockets (CRIU: sk-queue.c). Of each queue only the first message is looked at.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::FileType;
use rustix::net::{SocketType, sockopt};
use tranship_sys::kcmp::same_file;
use tranship_sys::socket::readiness;
use tranship_sys::unix_socket::first_message;

use super::super::Look;
use super::super::diag::UnixSocket;
use super::super::files::{Descriptor, Files, Kind};
use super::super::procfs;
use super::blocker;

/// Descriptors of one message that CRIU has room for (`CMSG_MAX_SIZE`).
const MOST_DESCRIPTORS: usize = 252;
/// Queues that CRIU sets when it has closed what no process has (fsnotify.c, timerfd.c).
const SET_LATE: [&str; 3] = ["anon_inode:inotify", "anon_inode:[fanotify]", "anon_inode:[timerfd]"];
/// Pseudo-terminals: the major number of their slaves, and the device of their masters.
const SLAVES: u32 = 136;
const PTMX: (u32, u32) = (5, 2);

const REMEDY: &str = "let the program read it, and try again";

pub(super) fn check(
    files: &Files<'_>,
    s: &UnixSocket,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    look: &mut Look,
) {
    // The kernel tells no length of a queue that begins with a message without data.
    let is_stream = sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::STREAM);
    if s.listening || !s.unread && (is_stream || !readiness(socket.as_fd()).is_ok_and(|ready| ready.readable)) {
        return;
    }
    let Ok(first) = first_message(socket.as_fd()) else { return };
    if s.is_datagram && first.is_empty {
        let what = "has a datagram without data to read, and CRIU drops it with all that follows";
        look.wait(inode, blocker(d, what, REMEDY));
        return;
    }
    if first.has_others {
        let what = "has something to read with what its program has asked for besides (SO_PASSCRED, SO_TIMESTAMP …), \
                    which CRIU does not support";
        look.wait(inode, blocker(d, what, REMEDY));
        return;
    }
    if s.is_datagram && first.has_named_sender {
        let what = "has a datagram to read whose sender has a name, and CRIU drops the name";
        look.wait(inode, blocker(d, what, REMEDY).allowable("datagram-senders"));
    }
    if first.descriptors.len() > MOST_DESCRIPTORS {
        let what =
            format!("has {} descriptors to receive with one message, more than CRIU carries", first.descriptors.len());
        look.wait(inode, blocker(d, &what, REMEDY));
    } else if let Some(what) = first.descriptors.iter().find_map(|sent| stuck(files, sent)) {
        let what = format!("has the descriptor of {what} to receive, which no process has, and CRIU cannot carry");
        look.wait(inode, blocker(d, &what, REMEDY));
    }
}

/// What a descriptor is that is on its way, if CRIU cannot carry it unless a process has it open, too.
fn stuck(files: &Files<'_>, sent: &OwnedFd) -> Option<String> {
    let own = (std::process::id(), sent.as_raw_fd());
    let link = procfs::link(format!("/proc/self/fd/{}", own.1)).ok()?;
    if SET_LATE.contains(&link.as_str()) {
        let is_held = files.all.iter().any(|d| d.link == link && same_file((d.task.pid, d.fd), own));
        return (!is_held).then(|| link.trim_start_matches("anon_inode:").trim_matches(['[', ']']).to_owned());
    }
    // tty.c: "No CTL for TTY dump, likely SCM case".
    let kind = Kind::of(format!("/proc/self/fd/{}", own.1))?;
    let is_terminal =
        kind.kind == FileType::CharacterDevice && (kind.stands_for.0 == SLAVES || kind.stands_for == PTMX);
    let is_held = || files.all.iter().any(|d| d.kind.stands_for == kind.stands_for && d.link == link);
    (is_terminal && !is_held()).then(|| format!("the terminal {link}"))
}
