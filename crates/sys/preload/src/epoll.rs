//! Sockets in an epoll set: criu asks of each one whether its descriptor is still the file that was added, and the kernel looks
//! through the whole set for each answer. For sockets the set's own list, read once, answers it: a socket has one file only,
//! so that the same inode is the same file.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Mutex, PoisonError};

use super::texts::{WatchedFile, watched_files};

/// `KCMP_EPOLL_TFD` of linux/kcmp.h.
pub(super) const KCMP_EPOLL_TFD: i64 = 7;

/// `struct kcmp_epoll_slot` of linux/kcmp.h: of the files that epoll set `efd` has under the number `tfd`, the one after `toff`
/// others.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Slot {
    efd: u32,
    tfd: u32,
    toff: u32,
}

/// What an epoll set of a task watches, by number and how many of that number come before it: device and inode.
struct Set {
    pid: c_int,
    efd: u32,
    files: HashMap<(u32, u32), WatchedFile>,
}

impl Set {
    /// Nothing where the kernel's list cannot be read.
    fn read(pid: c_int, efd: u32) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{efd}")).unwrap_or_default();
        Self { pid, efd, files: watched_files(&text) }
    }
}

/// Whether a task's descriptor is known to be a socket and the very file that the slot of its epoll set has. The task must not
/// run. Criu asks again and again about the same set.
pub(super) fn is_socket_in(pid: c_int, descriptor: i64, slot: Slot) -> bool {
    static LAST: Mutex<Option<Set>> = Mutex::new(None);
    let Ok(file) = std::fs::metadata(format!("/proc/{pid}/fd/{descriptor}")) else { return false };
    if !file.file_type().is_socket() {
        return false;
    }
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let set = match &*last {
        Some(set) if (set.pid, set.efd) == (pid, slot.efd) => set,
        _ => last.insert(Set::read(pid, slot.efd)),
    };
    set.files.get(&(slot.tfd, slot.toff)) == Some(&(libc::major(file.dev()), libc::minor(file.dev()), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixDatagram;

    use super::*;

    fn add(set: &OwnedFd, file: &impl AsRawFd) {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: the event is ours.
        let added = unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, file.as_raw_fd(), &raw mut event) };
        assert_eq!(added, 0);
    }

    #[test]
    fn the_answer_is_the_kernels() {
        // SAFETY: no pointer is passed, and the descriptor is new.
        let set = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let sockets: Vec<_> = (0..20).map(|_| UnixDatagram::unbound().unwrap()).collect();
        sockets.iter().for_each(|socket| add(&set, socket));
        // Of the first there is a duplicate; its own number becomes another's, which is added, too.
        let duplicate = sockets[0].try_clone().unwrap();
        // SAFETY: no pointer is passed; both are open, and stay so.
        assert!(unsafe { libc::dup2(sockets[1].as_raw_fd(), sockets[0].as_raw_fd()) } >= 0);
        add(&set, &sockets[0]);
        let (pipe, _writer) = std::io::pipe().unwrap();
        add(&set, &pipe);

        let pid = std::process::id() as c_int;
        let descriptors = sockets.iter().chain([&duplicate]).map(AsRawFd::as_raw_fd);
        let mut same = 0;
        for descriptor in descriptors {
            for (number, toff) in sockets.iter().map(AsRawFd::as_raw_fd).flat_map(|n| [(n, 0), (n, 1)]) {
                let slot = Slot { efd: set.as_raw_fd() as u32, tfd: number as u32, toff };
                // SAFETY: the slot is ours, and as the kernel wants it.
                let kernel =
                    unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, KCMP_EPOLL_TFD, descriptor, &raw const slot) };
                assert_eq!(is_socket_in(pid, descriptor.into(), slot), kernel == 0, "{descriptor}, {number}, {toff}");
                same += u32::from(kernel == 0);
            }
        }
        // Each by its own number; the second by two numbers in two places, which is three more; the duplicate by the first.
        assert_eq!(same, 19 + 3 + 1);
        // What is no socket is left to the kernel.
        let slot = Slot { efd: set.as_raw_fd() as u32, tfd: pipe.as_raw_fd() as u32, toff: 0 };
        assert!(!is_socket_in(pid, pipe.as_raw_fd().into(), slot));
    }
}
