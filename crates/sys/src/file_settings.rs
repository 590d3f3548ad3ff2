//! Settings of open files and of what they refer to, which the kernel shows and sets by fcntl(2) and ioctl(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Of linux/fcntl.h.
const F_GET_RW_HINT: libc::c_int = 1035;
const F_SET_RW_HINT: libc::c_int = 1036;
/// Of linux/eventpoll.h.
const EPIOCSPARAMS: libc::c_ulong = 0x4008_8a01;
const EPIOCGPARAMS: libc::c_ulong = 0x8008_8a02;
/// Of asm-generic/ioctls.h.
const TIOCGEXCL: libc::c_ulong = 0x8004_5440;

/// `struct epoll_params` of linux/eventpoll.h: microseconds, a number of packets, a flag, and padding that is 0.
pub type EpollParameters = [u8; 8];

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// How long data written to a file is expected to live (`RWH_WRITE_LIFE_…`); 0 where nothing is set.
///
/// # Errors
/// The system's.
pub fn write_hint(file: impl AsFd) -> io::Result<u64> {
    let mut hint = 0u64;
    // SAFETY: the kernel writes 8 bytes, which are ours.
    checked(unsafe { libc::fcntl(file.as_fd().as_raw_fd(), F_GET_RW_HINT, &raw mut hint) })?;
    Ok(hint)
}

/// Sets it.
///
/// # Errors
/// The system's.
pub fn set_write_hint(file: impl AsFd, hint: u64) -> io::Result<()> {
    // SAFETY: the kernel reads 8 bytes, which live as long as the call.
    checked(unsafe { libc::fcntl(file.as_fd().as_raw_fd(), F_SET_RW_HINT, &raw const hint) }).map(drop)
}

/// How an epoll set polls network devices (Linux 6.9).
///
/// # Errors
/// The system's: ENOTTY, EINVAL where the kernel has no such parameters.
pub fn epoll_parameters(set: impl AsFd) -> io::Result<EpollParameters> {
    let mut parameters = EpollParameters::default();
    // SAFETY: the kernel writes 8 bytes, which are ours.
    checked(unsafe { libc::ioctl(set.as_fd().as_raw_fd(), EPIOCGPARAMS, parameters.as_mut_ptr()) })?;
    Ok(parameters)
}

/// Sets them.
///
/// # Errors
/// The system's.
pub fn set_epoll_parameters(set: impl AsFd, parameters: &EpollParameters) -> io::Result<()> {
    // SAFETY: the kernel reads 8 bytes, which live as long as the call.
    checked(unsafe { libc::ioctl(set.as_fd().as_raw_fd(), EPIOCSPARAMS, parameters.as_ptr()) }).map(drop)
}

/// Whether a terminal is in exclusive mode (`TIOCEXCL`).
///
/// # Errors
/// The system's: ENOTTY of what is no terminal.
pub fn is_exclusive(terminal: impl AsFd) -> io::Result<bool> {
    let mut exclusive: libc::c_int = 0;
    // SAFETY: the kernel writes an int, which is ours.
    checked(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), TIOCGEXCL, &raw mut exclusive) })?;
    Ok(exclusive != 0)
}

/// Puts a terminal into exclusive mode: only CAP_SYS_ADMIN may open it from then on.
///
/// # Errors
/// The system's.
pub fn set_exclusive(terminal: impl AsFd) -> io::Result<()> {
    // SAFETY: the request takes no argument.
    checked(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCEXCL) }).map(drop)
}

/// Whether a change of a pseudo-terminal's state waits to be read at its master, which is in packet mode (`TIOCPKT`). Takes nothing.
///
/// # Errors
/// The system's: ENOTTY of what is no master.
pub fn has_state_to_read(master: impl AsFd) -> io::Result<bool> {
    let mut packets: libc::c_int = 0;
    let master = master.as_fd().as_raw_fd();
    // SAFETY: the kernel writes an int, which is ours.
    checked(unsafe { libc::ioctl(master, libc::TIOCGPKT, &raw mut packets) })?;
    let mut poll = libc::pollfd { fd: master, events: libc::POLLPRI, revents: 0 };
    // SAFETY: the one structure is ours.
    Ok(packets != 0 && checked(unsafe { libc::poll(&raw mut poll, 1, 0) })? > 0 && poll.revents & libc::POLLPRI != 0)
}

/// Whether a terminal's other side was closed (POLLHUP): for a master, as long as nobody opens a slave again. Takes nothing.
///
/// # Errors
/// The system's.
pub fn is_hung_up(terminal: impl AsFd) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: terminal.as_fd().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the one structure is ours.
    Ok(checked(unsafe { libc::poll(&raw mut poll, 1, 0) })? > 0 && poll.revents & libc::POLLHUP != 0)
}

/// Whether it is the master of a pseudo-terminal.
pub fn is_master(terminal: impl AsFd) -> bool {
    let mut number: libc::c_int = 0;
    // SAFETY: the kernel writes an int, which is ours.
    unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGPTN, &raw mut number) == 0 }
}

/// Whether anything waits to be read at the master's and at the slave's side of a pseudo-terminal whose slaves all are
/// closed, by its master: bytes, and at the slave's side complete lines. A slave is opened for that and closed again.
///
/// # Errors
/// The system's.
pub fn content_of(master: impl AsFd) -> io::Result<[bool; 2]> {
    let waits = |fd: BorrowedFd<'_>| {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes an int, which is ours.
        checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut bytes) }).map(|_| bytes > 0)
    };
    Ok([waits(master.as_fd())?, waits(slave_of(master.as_fd())?.as_fd())?])
}

/// Makes a pseudo-terminal by its master one whose slaves all have been closed.
///
/// # Errors
/// The system's.
pub fn hang_up(master: impl AsFd) -> io::Result<()> {
    slave_of(master.as_fd()).map(drop)
}

/// A new descriptor of a master's slave, also where that is locked. It does not become a session's terminal by that.
fn slave_of(master: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let master = master.as_raw_fd();
    let lock = |mut is_locked: libc::c_int| {
        // SAFETY: the kernel reads an int, which is ours.
        checked(unsafe { libc::ioctl(master, libc::TIOCSPTLCK, &raw mut is_locked) })
    };
    let mut is_locked: libc::c_int = 0;
    // SAFETY: the kernel writes an int, which is ours.
    checked(unsafe { libc::ioctl(master, libc::TIOCGPTLCK, &raw mut is_locked) })?;
    if is_locked != 0 {
        lock(0)?;
    }
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the request takes flags.
    let slave = checked(unsafe { libc::ioctl(master, libc::TIOCGPTPEER, flags) });
    // SAFETY: it is new, and nobody else owns it.
    let slave = slave.map(|slave| unsafe { OwnedFd::from_raw_fd(slave) });
    if is_locked != 0 {
        lock(is_locked)?;
    }
    slave
}

/// Has an inotify descriptor watch the file at `path` for the events in `mask`, in place of those that it watches that file for already.
/// Returns the number of the watch.
///
/// # Errors
/// The system's.
pub fn watch(inotify: BorrowedFd<'_>, path: &Path, mask: u32) -> io::Result<i32> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    // SAFETY: the path is a C string that lives as long as the call.
    checked(unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), mask) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_read() {
        let file = nix::sys::memfd::memfd_create(c"file", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        assert_eq!(write_hint(&file).unwrap(), 0);
        set_write_hint(&file, 3).unwrap();
        assert_eq!(write_hint(&file).unwrap(), 3);
        assert!(is_exclusive(&file).is_err() && epoll_parameters(&file).is_err());

        // SAFETY: no pointer is passed, and the descriptor is new.
        let set = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        match epoll_parameters(&set) {
            Err(error) => println!("skipped: epoll sets have no parameters here: {error}"),
            Ok(parameters) => {
                assert_eq!(parameters, [0; 8]);
                let other = [100, 0, 0, 0, 8, 0, 1, 0];
                set_epoll_parameters(&set, &other).unwrap();
                assert_eq!(epoll_parameters(&set).unwrap(), other);
            }
        }
    }

    #[test]
    fn a_terminal_becomes_exclusive() {
        let pair = nix::pty::openpty(None, None).unwrap();
        assert!(!is_exclusive(&pair.slave).unwrap());
        set_exclusive(&pair.slave).unwrap();
        assert!(is_exclusive(&pair.slave).unwrap());
        assert!(has_state_to_read(&pair.slave).is_err() && !has_state_to_read(&pair.master).unwrap());
    }
}
