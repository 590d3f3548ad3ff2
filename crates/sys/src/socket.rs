//! Options of sockets, by level and name (socket(7), ip(7), ipv6(7), tcp(7), udp(7)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

/// A new socket, by the numbers of its family, type and protocol.
///
/// # Errors
/// The system's refusal.
pub fn new(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only and returns a new descriptor, owned by nobody else, or an error.
    match unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: as above.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}
