//! Attributes of a mount.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sched::{CloneFlags, setns, unshare};

use crate::threads;

/// struct mount_attr of linux/mount.h, as of Linux 5.12.
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

const _: () = assert!(size_of::<MountAttributes>() == 32);

/// Field of the attributes that says when times of reading are kept.
const MOUNT_ATTR_ATIME: u64 = 0x70;
const MOUNT_ATTR_NOATIME: u64 = 0x10;

/// Reading through this mount, which nobody else uses, leaves the times of reading alone.
///
/// # Errors
/// The system's.
pub fn forbid_atime(mount: BorrowedFd<'_>) -> io::Result<()> {
    change(mount, MOUNT_ATTR_NOATIME, MOUNT_ATTR_ATIME)
}

/// Options that take something from who uses a mount: `ro`, `nosuid`, `nodev`, `noexec`. Their bits are those of mount(2), and of mount_setattr(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restrictions(u32);

const RESTRICTIONS: [(&str, u32); 4] = [("ro", 1), ("nosuid", 2), ("nodev", 4), ("noexec", 8)];

impl Restrictions {
    /// Those among the flags of mount(2).
    #[must_use]
    pub fn of_flags(flags: u32) -> Self {
        Self(flags & RESTRICTIONS.iter().fold(0, |bits, (_, bit)| bits | bit))
    }

    /// Those among options with commas between them, as in `/proc/PID/mountinfo`.
    #[must_use]
    pub fn of_options(options: &str) -> Self {
        let bit = |option: &str| RESTRICTIONS.iter().find(|(name, _)| *name == option).map_or(0, |(_, bit)| *bit);
        Self(options.split(',').map(bit).fold(0, |bits, bit| bits | bit))
    }

    /// What both have.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// What the other one lacks.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether it is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Adds options to a mount of this thread's namespace.
///
/// # Errors
/// The system's.
pub fn restrict(mount: BorrowedFd<'_>, restrictions: Restrictions) -> io::Result<()> {
    change(mount, restrictions.0.into(), 0)
}

/// Has a thread of its own do something in the mount namespace of process `pid`, whose root is then its own.
///
/// # Errors
/// The namespace's, and those of the work.
pub fn inside<T: Send>(pid: u32, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = File::open(format!("/proc/{pid}/ns/mnt"))?;
    threads::apart("mounts", || {
        // The root directory and the working directory are the thread's own.
        unshare(CloneFlags::CLONE_FS)?;
        setns(&namespace, CloneFlags::CLONE_NEWNS)?;
        work()
    })?
}

fn change(mount: BorrowedFd<'_>, set: u64, clear: u64) -> io::Result<()> {
    let attributes = MountAttributes { set, clear, propagation: 0, user_namespace: 0 };
    // SAFETY: the path is a string with an end, and the structure is of the length that is told; the kernel only reads both.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
