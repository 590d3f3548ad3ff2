//! What a Unix socket has besides data: its file, and what comes with the first message in its queue (unix(7)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::socket::int_option;

/// So many descriptors come with one message at the most (`SCM_MAX_FD` of the kernel's net/scm.h).
const MOST_DESCRIPTORS: usize = 253;
/// A message with a pidfd of its sender (`SO_PASSPIDFD`).
const SCM_PIDFD: i32 = 4;

/// The file that a socket is bound to, as a reference (O_PATH) to it; nobody who watches it is told.
///
/// # Errors
/// The system's refusal: `ENOENT` of a socket without a file; it takes CAP_NET_ADMIN in the socket's network namespace.
pub fn bound_file(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// `SIOCUNIXFILE` of linux/un.h.
    const SIOCUNIXFILE: libc::c_ulong = 0x89e0;
    // SAFETY: the request takes no memory, and returns a new descriptor or an error.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: as above; nobody else owns it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// The name that a socket is bound to as a path, without the zero byte at its end; empty where it has none, or an abstract one. A name may fill
/// the whole of the address.
///
/// # Errors
/// The system's refusal.
pub fn path(socket: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    // SAFETY: plain integers; all zeros is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is ours and has that length.
    if unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let length = (length as usize).saturating_sub(size_of::<libc::sa_family_t>()).min(address.sun_path.len());
    Ok(address.sun_path[..length].iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect())
}

/// Whether a socket is one end of a connection, which its name does not lead to.
pub fn is_connection(socket: BorrowedFd<'_>) -> bool {
    const DATAGRAM: i32 = libc::SOCK_DGRAM;
    // SAFETY: plain integers; all zeros is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let is_datagram = int_option(socket, libc::SOL_SOCKET, libc::SO_TYPE).is_ok_and(|kind| kind == DATAGRAM);
    // SAFETY: the address is ours and has that length.
    !is_datagram && unsafe { libc::getpeername(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length) } == 0
}

/// The first message in a socket's queue.
#[derive(Debug, Default)]
pub struct FirstMessage {
    /// Whether it is a message without data; or the end of a stream or of a connection of packets.
    pub is_empty: bool,
    /// Whether its sender has a name.
    pub has_named_sender: bool,
    /// Whether it has control messages besides descriptors: credentials, the time of its arrival ….
    pub has_others: bool,
    /// Second references to the files whose descriptors are sent with it.
    pub descriptors: Vec<OwnedFd>,
}

/// A buffer for control messages: as many descriptors as there can be, and some others. As wide as `cmsghdr` asks for.
type Control = [u64; MOST_DESCRIPTORS.div_ceil(2) + 64];

/// Looks at the first message in a socket's queue, which stays there. A socket that reads from a place of its own (SO_PEEK_OFF) is not looked
/// at. The caller must know that the socket has no error to report, which this would take.
///
/// # Errors
/// The system's refusal, `EAGAIN` of an empty queue.
pub fn first_message(socket: BorrowedFd<'_>) -> io::Result<FirstMessage> {
    const SO_PEEK_OFF: i32 = 42;
    if int_option(socket, libc::SOL_SOCKET, SO_PEEK_OFF)? >= 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let (mut data, mut control): (u8, Control) = (0, [0; size_of::<Control>() / 8]);
    let mut part = libc::iovec { iov_base: (&raw mut data).cast(), iov_len: 1 };
    // SAFETY: plain integers and pointers; all zeros is a value.
    let (mut name, mut message): (libc::sockaddr_un, libc::msghdr) = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the name, the byte and the buffer are ours and have these lengths.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut first = FirstMessage {
        is_empty: got == 0,
        has_named_sender: message.msg_namelen as usize > size_of::<libc::sa_family_t>(),
        ..FirstMessage::default()
    };
    // SAFETY: the kernel has filled in the buffer and its length; the headers are walked as cmsg(3) tells.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers that are whole.
        let (level, kind, length) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        let is_rights = (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        first.has_others |= !is_rights;
        if is_rights || (level, kind) == (libc::SOL_SOCKET, SCM_PIDFD) {
            // SAFETY: pure arithmetic.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            for number in 0..length.saturating_sub(head) / size_of::<i32>() {
                // SAFETY: within the message's data, by its length.
                let fd = unsafe { libc::CMSG_DATA(header).cast::<i32>().add(number).read_unaligned() };
                if fd >= 0 {
                    // SAFETY: the kernel has just made it for this process.
                    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                    first.descriptors.extend(is_rights.then_some(fd));
                }
            }
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{IoSlice, Write};
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};

    use super::*;

    #[test]
    fn the_file_of_a_socket_is_that_which_it_was_bound_to() {
        let dir = std::env::temp_dir().join(format!("tranship-bound-file-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let (name, other) = (dir.join("name"), dir.join("other"));
        let listener = UnixListener::bind(&name).unwrap();
        let inode = fs::metadata(&name).unwrap().ino();
        fs::rename(&name, &other).unwrap();
        let is = File::from(bound_file(listener.as_fd()).unwrap()).metadata().unwrap();
        assert_eq!((is.ino(), is.nlink()), (inode, 1));
        assert_eq!(path(listener.as_fd()).unwrap(), name.as_os_str().as_encoded_bytes());
        let unbound = UnixDatagram::unbound().unwrap();
        assert_eq!(bound_file(unbound.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_first_message_is_told_and_stays() {
        let (mut one, other) = UnixStream::pair().unwrap();
        assert_eq!(first_message(other.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let null = File::open("/dev/null").unwrap();
        let sent = [null.as_raw_fd(); 3];
        sendmsg::<()>(
            one.as_raw_fd(),
            &[IoSlice::new(b"x")],
            &[ControlMessage::ScmRights(&sent)],
            MsgFlags::empty(),
            None,
        )
        .unwrap();
        one.write_all(b"rest").unwrap();
        for _ in 0..2 {
            let first = first_message(other.as_fd()).unwrap();
            assert_eq!(first.descriptors.len(), 3);
            assert!(!first.is_empty && !first.has_others && !first.has_named_sender);
        }
    }

    #[test]
    fn empty_messages_and_credentials_are_told() {
        let (one, other) = UnixDatagram::pair().unwrap();
        one.send(b"").unwrap();
        let first = first_message(other.as_fd()).unwrap();
        assert!(first.is_empty && !first.has_others);
        setsockopt(&other, sockopt::PassCred, &true).unwrap();
        assert!(first_message(other.as_fd()).unwrap().has_others);
        assert_eq!(other.recv(&mut [0; 9]).unwrap(), 0);
    }
}
