//! Looking into the queue of a Unix socket without taking its error.
//!
//! Criu looks until there is no more (`dump_sk_queue` of sk-queue.c). The kernel then reports an error of the
//! connection, which is gone with that: at the end of the data of a stream, and before the data of a socket of
//! datagrams or packets (net/unix/af_unix.c, `unix_stream_read_generic`, `__unix_dgram_recvmsg`). Of a stream it is
//! known here where the data ends; of the others the dump fails before anything is taken. It fails, too, at a message without data, which
//! criu takes for the end.

use std::ffi::{c_int, c_ulong};

use libc::{msghdr, pollfd};

use crate::shared::set_errno;
use crate::sockets::{number, real, set_number};

/// Whether what is next in the queue of a Unix socket is a message without data, at which criu takes the queue to end (`dump_sk_queue`), and drops
/// what is behind it. `got` is what criu has looked at.
fn is_empty_message(fd: c_int, got: isize) -> bool {
    got == 0
        && number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_UNIX)
        && matches!(number(fd, libc::SOL_SOCKET, libc::SO_TYPE), Some(libc::SOCK_DGRAM | libc::SOCK_SEQPACKET))
}

/// Whether the peer of a socket of packets sends no more. The end of its connection then looks as a packet without data does.
fn has_end(fd: c_int) -> bool {
    if number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) != Some(libc::AF_UNIX)
        || number(fd, libc::SOL_SOCKET, libc::SO_TYPE) != Some(libc::SOCK_SEQPACKET)
    {
        return false;
    }
    let mut asked = pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the one structure is ours.
    unsafe { libc::poll(&raw mut asked, 1, 0) > 0 }
}

/// What is next in the queue of a socket of packets.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Data,
    Empty,
    End,
}

/// Looks at what is next in the queue of a socket of packets, and moves no offset: a packet comes with its sender's credentials where these are
/// asked for, and the end of a connection comes with nothing. The program, which stands still, finds the option as it was.
fn next_packet(fd: c_int, real: Recvmsg) -> Option<Next> {
    let before = number(fd, libc::SOL_SOCKET, libc::SO_PASSCRED)?;
    if before == 0 && !set_number(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, 1) {
        return None;
    }
    // Room for credentials, and for no descriptors, which would be opened here.
    let mut control = [0_u64; 4];
    // SAFETY: a message without parts is one of zeros.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message and its control buffer are ours.
    let got = unsafe { real(fd, &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    if before == 0 {
        set_number(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, 0);
    }
    match (got, message.msg_flags & libc::MSG_TRUNC != 0, message.msg_controllen > 0) {
        (0, true, _) => Some(Next::Data),
        (0, false, true) => Some(Next::Empty),
        (0, false, false) => Some(Next::End),
        _ => None,
    }
}

type Recvmsg = unsafe extern "C" fn(c_int, *mut msghdr, c_int) -> isize;

/// Why not to look any further at a Unix socket that has an error: an error number.
fn obstacle(fd: c_int) -> Option<c_int> {
    if number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) != Some(libc::AF_UNIX) {
        return None;
    }
    let mut asked = pollfd { fd, events: 0, revents: 0 };
    // SAFETY: the one structure is ours.
    let answered = unsafe { libc::poll(&raw mut asked, 1, 0) };
    if answered < 1 || asked.revents & libc::POLLERR == 0 {
        return None;
    }
    if number(fd, libc::SOL_SOCKET, libc::SO_TYPE) != Some(libc::SOCK_STREAM) {
        return Some(libc::EIO);
    }
    let mut left: c_int = 0;
    // SAFETY: the request writes an int.
    let counted = unsafe { libc::ioctl(fd, libc::FIONREAD as c_ulong, &raw mut left) } == 0;
    let looked_at = number(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    (counted && looked_at >= left).then_some(libc::EAGAIN)
}

/// Stands in for libc's `recvmsg`.
///
/// # Safety
/// As libc's: the message's parts must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    let real = real!(c"recvmsg", Recvmsg);
    if flags & libc::MSG_PEEK != 0
        && let Some(error) = obstacle(fd)
    {
        set_errno(error);
        return -1;
    }
    // Before a look marks the packet as one that was looked at.
    let next = if flags & libc::MSG_PEEK != 0 && has_end(fd) { next_packet(fd, real) } else { None };
    // SAFETY: handed on as it came.
    let got = if next == Some(Next::Empty) { 0 } else { unsafe { real(fd, message, flags) } };
    if flags & libc::MSG_PEEK != 0 && next != Some(Next::End) && is_empty_message(fd, got) {
        set_errno(libc::ENODATA);
        return -1;
    }
    got
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_error_of_a_stream_stays_when_its_data_has_been_looked_at() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        one.write_all(b"unread").unwrap();
        other.write_all(b"data").unwrap();
        drop(other);
        let fd = one.as_raw_fd();
        assert_eq!(obstacle(fd), None);
        let offset: c_int = 4;
        // SAFETY: the kernel reads an int that is ours.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, (&raw const offset).cast(), 4) };
        assert_eq!((set, obstacle(fd)), (0, Some(libc::EAGAIN)));
        let mut data = [0; 4];
        one.read_exact(&mut data).unwrap();
        assert_eq!(one.read(&mut data).unwrap_err().raw_os_error(), Some(libc::ECONNRESET));
        assert_eq!(obstacle(fd), None, "it has been taken");
    }

    #[test]
    fn a_message_without_data_is_not_the_end_of_a_queue() {
        for kind in [libc::SOCK_DGRAM, libc::SOCK_SEQPACKET, libc::SOCK_STREAM] {
            let mut ends = [0; 2];
            // SAFETY: the call fills in two numbers, and the others are made of what is ours.
            let looked_at = unsafe {
                assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()), 0);
                if kind == libc::SOCK_STREAM {
                    libc::shutdown(ends[0], libc::SHUT_WR);
                } else {
                    libc::send(ends[0], std::ptr::null(), 0, 0);
                }
                let mut message: msghdr = std::mem::zeroed();
                recvmsg(ends[1], &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT)
            };
            assert_eq!(looked_at, if kind == libc::SOCK_STREAM { 0 } else { -1 }, "{kind}");
            // SAFETY: they are ours.
            unsafe { assert_eq!(ends.map(|end| libc::close(end)), [0, 0]) };
        }
    }

    #[test]
    fn a_packet_without_data_before_the_end_is_told_from_the_end() {
        /// What looking at a queue of packets with an offset gives, one after the other.
        fn looks(packets: &[&[u8]]) -> Vec<isize> {
            let mut ends = [0; 2];
            // SAFETY: the calls fill in, read and write what is ours.
            unsafe {
                assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, ends.as_mut_ptr()), 0);
                for packet in packets {
                    let sent = libc::send(ends[0], packet.as_ptr().cast(), packet.len(), 0);
                    assert_eq!(sent, packet.len() as isize);
                }
                libc::close(ends[0]);
                assert!(set_number(ends[1], libc::SOL_SOCKET, libc::SO_PEEK_OFF, 0));
                let mut found = Vec::new();
                while !matches!(found.last(), Some(0 | -1)) {
                    let mut data = [0_u8; 16];
                    let mut part = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
                    let mut message: msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
                    found.push(recvmsg(ends[1], &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT));
                }
                assert_eq!(number(ends[1], libc::SOL_SOCKET, libc::SO_PASSCRED), Some(0));
                libc::close(ends[1]);
                found
            }
        }
        assert_eq!(looks(&[]), [0]);
        assert_eq!(looks(&[b"one", b"three"]), [3, 5, 0]);
        assert_eq!(looks(&[b"", b"dropped"]), [-1]);
        assert_eq!(looks(&[b"one", b"", b"dropped"]), [3, -1]);
        assert_eq!(looks(&[b"one", b""]), [3, -1]);
    }
}
