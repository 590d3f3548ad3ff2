//! What sockets have for programs, or of them, that CRIU drops without a word.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::libc;
use tranship_sys::socket;
use tranship_sys::unix_socket::first_message;

use super::Sort;

/// How long a datagram that is complete may be on its way through the kernel.
const ON_ITS_WAY: Duration = Duration::from_millis(30);

/// Something that CRIU drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// An error that no program has taken, of a stream.
    Error,
    /// An urgent byte that no program has read.
    UrgentByte,
    /// A datagram of which only a part was sent yet (MSG_MORE).
    UnfinishedDatagram,
    /// A datagram without data, at which CRIU takes the queue of a Unix socket to end.
    EmptyDatagram,
}

impl Dropped {
    /// What CRIU drops of a socket of a container that stands still. Takes nothing out of it.
    pub(super) fn of(socket: BorrowedFd<'_>, sort: Option<Sort>) -> Option<Self> {
        let ready = socket::readiness(socket).ok()?;
        match sort {
            Some((libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, _)) => {
                is_unfinished(socket).then_some(Self::UnfinishedDatagram)
            }
            None | Some((libc::AF_UNIX | libc::AF_PACKET, ..) | (_, libc::SOCK_STREAM, _)) if ready.error => {
                Some(Self::Error)
            }
            Some((libc::AF_UNIX, libc::SOCK_DGRAM, _)) => (ready.readable
                && first_message(socket).is_ok_and(|first| first.is_empty))
            .then_some(Self::EmptyDatagram),
            None | Some((libc::AF_UNIX, ..) | (_, libc::SOCK_STREAM, _)) => ready.urgent.then_some(Self::UrgentByte),
            Some(_) => None,
        }
    }
}

/// The kernel counts what it still has of datagrams that were sent, and of one that is not complete: the latter stays.
fn is_unfinished(socket: BorrowedFd<'_>) -> bool {
    let begun = Instant::now();
    while socket::unsent(socket).is_ok_and(|bytes| bytes > 0) {
        if begun.elapsed() >= ON_ITS_WAY {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}
