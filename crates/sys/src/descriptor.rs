//! Descriptors that cross process boundaries.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::sys::socket::sockopt::{AcceptConn, SockType as SockTypeOption};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, accept4, getsockopt, recv, recvmsg, sendmsg,
};

/// Most descriptors that one message may bring.
pub const MAX_DESCRIPTORS: usize = 8;

/// Takes over a descriptor that the parent process left open under this number for us, as `criu swrk FD` does.
///
/// # Errors
/// Nothing is open under the number.
///
/// # Safety
/// Nothing in this process owns or borrows the descriptor: nobody else opened or took it over under this number.
pub unsafe fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl does not touch memory.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("descriptor {number} is not open")));
    }
    // SAFETY: it is open, and by contract of this function nothing in this process owns it yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The process or process group that is sent signals about a descriptor (`F_GETOWN_EX`); 0 for none.
///
/// # Errors
/// The system's.
pub fn owner(descriptor: impl AsFd) -> io::Result<i32> {
    /// asm-generic/fcntl.h
    const F_GETOWN_EX: i32 = 16;
    // struct f_owner_ex: kind of the owner, and its number.
    let mut owner = [0i32; 2];
    // SAFETY: the kernel writes two numbers of 32 bits, which are ours.
    let done = unsafe { libc::fcntl(descriptor.as_fd().as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) };
    if done == 0 { Ok(owner[1]) } else { Err(io::Error::last_os_error()) }
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
    received(socket, buffer, MsgFlags::MSG_CMSG_CLOEXEC)
}

fn received(socket: BorrowedFd<'_>, buffer: &mut [u8], flags: MsgFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
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

/// What [`receive`] would receive now, which stays to be received; its descriptors are further ones of the same. Does not wait: `None` where
/// there is nothing.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    match received(socket, buffer, flags) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        peeked => peeked.map(Some),
    }
}

/// Receives `len` bytes of what was peeked at, and gives them up with what came along.
pub fn discard(socket: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    let mut bytes = vec![0; len];
    recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT)?;
    Ok(())
}

/// What a socket is that stands in our table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketKind {
    /// It keeps message boundaries.
    Seqpacket,
    /// It is a stream.
    Stream,
    /// It waits for connections, or is of another kind.
    Other,
}

/// The sockets that stand in our table, with their numbers.
pub fn sockets() -> io::Result<Vec<(RawFd, SocketKind)>> {
    let kind = |number: RawFd| {
        // SAFETY: the number is borrowed for two questions; a number that is not open any more is refused.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        Some(match (getsockopt(&socket, AcceptConn).ok()?, getsockopt(&socket, SockTypeOption).ok()?) {
            (false, SockType::SeqPacket) => SocketKind::Seqpacket,
            (false, SockType::Stream) => SocketKind::Stream,
            _ => SocketKind::Other,
        })
    };
    Ok(numbers()?.into_iter().filter_map(|number| Some((number, kind(number)?))).collect())
}

/// All numbers under which something is open.
pub fn numbers() -> io::Result<Vec<RawFd>> {
    let names = std::fs::read_dir("/proc/self/fd")?.flatten().map(|entry| entry.file_name());
    Ok(names.filter_map(|name| name.to_str()?.parse().ok()).collect())
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
    fn what_is_peeked_at_stays_until_it_is_discarded() {
        let (a, b) = seqpacket_pair().unwrap();
        let mut buffer = [0; 16];
        assert!(peek(b.as_fd(), &mut buffer).unwrap().is_none());
        send(a.as_fd(), b"first", &[a.as_fd()]).unwrap();
        send(a.as_fd(), b"second", &[]).unwrap();
        for _ in 0..2 {
            let (n, fds) = peek(b.as_fd(), &mut buffer).unwrap().unwrap();
            assert_eq!((&buffer[..n], fds.len()), (&b"first"[..], 1));
        }
        discard(b.as_fd(), 5).unwrap();
        let (n, fds) = peek(b.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"second"[..], 0));
        assert!(sockets().unwrap().contains(&(b.as_raw_fd(), SocketKind::Seqpacket)));
    }

    #[test]
    fn a_closed_number_is_refused() {
        // SAFETY: nothing is open under these numbers.
        unsafe { assert!(inherited(9_999).is_err() && inherited(-1).is_err()) };
    }
}
