//! Descriptors that cross process boundaries.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, accept4, recvmsg, sendmsg};

/// Most descriptors that one message may bring.
pub const MAX_DESCRIPTORS: usize = 8;

/// Takes over a descriptor that the parent process left open under this number for us, as `criu swrk FD` does.
///
/// Fails if nothing is open there. Call it once for each number, before anything else could own it.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl does not touch memory.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("descriptor {number} is not open")));
    }
    // SAFETY: it is open, and by contract of this function nothing in this process owns it yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Sends bytes and descriptors as one message.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let control = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &control[..0] } else { &control[..] };
    Ok(sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?)
}

/// Sends bytes as one message if that can be done without waiting; false if not.
pub fn try_send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<bool> {
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], &[], flags, None) {
        Ok(_) => Ok(true),
        Err(nix::errno::Errno::EAGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Receives one message (or, on a stream, what is there): the number of bytes, and the descriptors that came along,
/// close-on-exec. Zero bytes mean that the peer has closed.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just installed these descriptors in our table, for us alone.
            descriptors.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.contains(MsgFlags::MSG_TRUNC) || message.flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message on a local socket was too long"));
    }
    Ok((message.bytes, descriptors))
}

/// A connected pair of local sockets that keep message boundaries, close-on-exec.
pub fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::sys::socket::socketpair(
        nix::sys::socket::AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Accepts a connection on a listening socket, close-on-exec.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the kernel has just installed it in our table, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let (a, b) = seqpacket_pair().unwrap();
        let (mut write_end, read_end) = {
            let (r, w) = io::pipe().unwrap();
            (w, r)
        };
        send(a.as_fd(), b"hello", &[read_end.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let (n, fds) = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"hello"[..], 1));
        write_end.write_all(b"x").unwrap();
        let mut one = [0; 1];
        assert_eq!(nix::unistd::read(&fds[0], &mut one).unwrap(), 1);
        drop(a);
        assert_eq!(receive(b.as_fd(), &mut buffer).unwrap().0, 0);
    }

    #[test]
    fn a_closed_number_is_refused() {
        assert!(inherited(9_999).is_err());
        assert!(inherited(-1).is_err());
    }
}
