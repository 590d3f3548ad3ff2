//! Which resources of the kernel tasks share: kcmp(2). It stops and changes nothing.

use std::cmp::Ordering;

/// What tasks may have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Memory (`CLONE_VM`).
    Memory,
    /// Table of descriptors (`CLONE_FILES`).
    Descriptors,
    /// Working directory, root and umask (`CLONE_FS`).
    Directories,
}

/// What an epoll watches: the descriptor under which it was added, and how many it had been given under that number before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct EpollTarget {
    /// The epoll's own descriptor.
    pub epoll: u32,
    /// The descriptor that was added.
    pub descriptor: u32,
    /// Which one of those that were added under that number.
    pub offset: u32,
}

const _: () = assert!(size_of::<EpollTarget>() == 12, "struct kcmp_epoll_slot of linux/kcmp.h");

fn ordering(answer: libc::c_long) -> Option<Ordering> {
    match answer {
        0 => Some(Ordering::Equal),
        1 => Some(Ordering::Less),
        2 => Some(Ordering::Greater),
        _ => None,
    }
}

/// How the kernel orders the resources of two tasks, in an order of its own: equal if they share them. `None` if one of them has
/// ended, or there is no kcmp(2).
pub fn compare(one: u32, other: u32, resource: Resource) -> Option<Ordering> {
    // linux/kcmp.h: KCMP_VM, KCMP_FILES, KCMP_FS.
    let kind: libc::c_int = match resource {
        Resource::Memory => 1,
        Resource::Descriptors => 2,
        Resource::Directories => 3,
    };
    // SAFETY: the call takes numbers only.
    ordering(unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind, 0, 0) })
}

/// Whether descriptors (process and number) are of one open file.
pub fn same_file(one: (u32, i32), other: (u32, i32)) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    // SAFETY: the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, KCMP_FILE, one.1, other.1) == 0 }
}

/// Whether a process has, under `descriptor`, the file that one of its epolls watches. `None` if the epoll watches it no more.
pub fn is_watched(pid: u32, descriptor: u32, target: EpollTarget) -> Option<bool> {
    const KCMP_EPOLL_TFD: libc::c_int = 7;
    // SAFETY: the kernel reads a `kcmp_epoll_slot` at the last argument, which `target` is and outlives the call.
    let answer = unsafe {
        libc::syscall(libc::SYS_kcmp, pid, pid, KCMP_EPOLL_TFD, libc::c_ulong::from(descriptor), &raw const target)
    };
    match answer {
        0 => Some(true),
        1.. => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn threads_share_and_other_processes_do_not() {
        let me = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        for resource in [Resource::Memory, Resource::Descriptors, Resource::Directories] {
            let thread = std::thread::spawn(move || {
                // SAFETY: gettid takes nothing and cannot fail.
                let thread = unsafe { libc::gettid() };
                compare(me, u32::try_from(thread).unwrap(), resource)
            });
            assert_eq!(thread.join().unwrap(), Some(Ordering::Equal), "{resource:?}");
            assert_ne!(compare(me, child.id(), resource), Some(Ordering::Equal), "{resource:?}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_target_of_an_epoll_is_found_under_another_number() {
        use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        epoll.add(&read, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        let number = |fd: &dyn AsRawFd| u32::try_from(fd.as_raw_fd()).unwrap();
        let target = EpollTarget { epoll: number(&epoll.0), descriptor: number(&read), offset: 0 };
        let copy = read.try_clone().unwrap();
        let me = std::process::id();
        assert_eq!(is_watched(me, number(&read), target), Some(true));
        drop(read);
        assert_eq!(is_watched(me, number(&copy), target), Some(true));
        assert_eq!(is_watched(me, number(&write), target), Some(false));
        assert_eq!(is_watched(me, number(&copy), EpollTarget { offset: 1, ..target }), None);
    }
}
