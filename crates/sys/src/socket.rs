//! Options of sockets, by level and name (socket(7), ip(7), ipv6(7), tcp(7), udp(7)).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use nix::sched::{CloneFlags, setns};

use crate::launch;
use crate::own_process::{self, Task};

/// Families of sockets that an agent opens itself when it has a launcher.
const CONFINED: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The option of TCP whose value tells the kernel where in this process to put pages.
const TCP_ZEROCOPY_RECEIVE: i32 = 35;

/// Reads an option into `value`, which some options also take a question from. Returns how many bytes it has.
///
/// # Errors
/// The system's refusal; `ENOPROTOOPT` where such a socket has no such option. `TCP_ZEROCOPY_RECEIVE` is refused here.
pub fn option(socket: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    if (level, name) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: the kernel writes no more than `len` bytes, to `value` alone: the one option that names other memory is refused above.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut len) } {
        0 => Ok((len as usize).min(value.len())),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option.
///
/// # Errors
/// The system's refusal.
pub fn set_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let len = value.len() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, and changes no memory of this process.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An option whose value is an `int`.
///
/// # Errors
/// As [`option`].
pub fn int_option(socket: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = [0; 4];
    option(socket, level, name, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// What TCP_INFO tells of a socket of TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// Of the kernel's net/tcp_states.h.
    state: u8,
    /// The MTU of the path of its connection, or of the last one; 0 before the first.
    path_mtu: u32,
    /// The segment size that it has announced to its peer.
    announced_segment: u32,
}

impl TcpInfo {
    /// `None` of what is no socket of TCP.
    pub fn of(socket: BorrowedFd<'_>) -> Option<Self> {
        /// `struct tcp_info` of linux/tcp.h up to `tcpi_advmss`.
        const BYTES: usize = 88;
        let mut info = [0; BYTES];
        let length = option(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
        let number = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("4 bytes"));
        (length == BYTES).then(|| Self { state: info[0], path_mtu: number(60), announced_segment: number(84) })
    }

    /// Whether it has no connection: it listens, or is closed.
    pub fn is_unconnected(&self) -> bool {
        /// TCP_CLOSE and TCP_LISTEN.
        const CLOSED: u8 = 7;
        const LISTENS: u8 = 10;
        matches!(self.state, CLOSED | LISTENS)
    }

    /// Whether it has never had a connection.
    pub fn is_fresh(&self) -> bool {
        self.is_unconnected() && self.path_mtu == 0
    }

    /// The least of the largest windows that the kernel itself allows a connection with a receive buffer of so many bytes
    /// (`tcp_init_buffer_space`), where as much of the buffer counts for content as the kernel assumes at first.
    pub fn usual_window(&self, receive_buffer: u32) -> u32 {
        let (whole, two_segments) = (receive_buffer / 2, self.announced_segment.saturating_mul(2));
        if whole > two_segments { two_segments.max(whole - self.announced_segment) } else { whole }
    }
}

/// Whether a socket has no peer.
pub fn has_no_peer(socket: BorrowedFd<'_>) -> bool {
    nix::sys::socket::getpeername::<nix::sys::socket::SockaddrStorage>(socket.as_raw_fd())
        == Err(nix::errno::Errno::ENOTCONN)
}

/// A new socket of the calling thread's network namespace, by the numbers of its family, type and protocol.
///
/// # Errors
/// The system's refusal.
pub fn new(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    match launch::launcher() {
        // The agent's unit allows no others (`RestrictAddressFamilies=`).
        Some(_) if !CONFINED.contains(&family) => {
            let thread = nix::unistd::gettid().as_raw();
            own_process::run(Task::OpenSocket { process: std::process::id(), thread, socket: (family, kind, protocol) })
        }
        _ => open(family, kind, protocol),
    }
}

/// In a process of its own: a socket of the network namespace of a thread, which may open none itself.
pub(crate) fn open_of(process: u32, thread: i32, (family, kind, protocol): (i32, i32, i32)) -> io::Result<OwnedFd> {
    setns(File::open(format!("/proc/{process}/task/{thread}/ns/net"))?, CloneFlags::CLONE_NEWNET)?;
    open(family, kind, protocol)
}

fn open(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only and returns a new descriptor, owned by nobody else, or an error.
    match unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: as above.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// What poll(2) reports of a socket without changing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    /// There is something to read, or the end of the stream.
    pub readable: bool,
    /// An error waits to be reported, or the error queue has a message.
    pub error: bool,
    /// An urgent byte has come (MSG_OOB) that was not read.
    pub urgent: bool,
}

/// Asks whether a socket has something to read or an error to report; waits for nothing and takes nothing out.
///
/// # Errors
/// The system's refusal.
pub fn readiness(socket: BorrowedFd<'_>) -> io::Result<Readiness> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN | libc::POLLPRI, revents: 0 };
    // SAFETY: the one structure is ours.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        ..0 => Err(io::Error::last_os_error()),
        _ => {
            let has = |event| poll.revents & event != 0;
            Ok(Readiness { readable: has(libc::POLLIN), error: has(libc::POLLERR), urgent: has(libc::POLLPRI) })
        }
    }
}

/// Bytes that were sent and are still with the kernel (SIOCOUTQ); for datagrams, with what the kernel needs to keep them.
///
/// # Errors
/// The system's refusal: `EINVAL` of a socket of TCP that listens.
pub fn unsent(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes an int.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(u32::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The inode of the network namespace that a socket, or a tun device, belongs to: the number in the link `net:[…]` of `/proc/PID/ns/net`.
///
/// # Errors
/// The system's refusal: it takes CAP_NET_ADMIN in that namespace.
pub fn network_namespace(socket: BorrowedFd<'_>) -> io::Result<u64> {
    /// `SIOCGSKNS` of linux/sockios.h.
    const SIOCGSKNS: libc::c_ulong = 0x894c;
    // SAFETY: the request takes no memory, and returns a new descriptor or an error.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: as above; nobody else owns it.
        fd => Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }).metadata()?.ino()),
    }
}

/// The process that made the other end of a Unix connection, and its user (SO_PEERCRED); pid 0 where this process cannot see it.
///
/// # Errors
/// The system's refusal.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    // struct ucred: pid, uid, gid
    let mut credentials = [0; 12];
    option(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut credentials)?;
    let number = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| credentials[at + byte]));
    Ok((number(0), number(4)))
}
