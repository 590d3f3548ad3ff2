//! Attributes of a mount.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

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
    let attributes =
        MountAttributes { set: MOUNT_ATTR_NOATIME, clear: MOUNT_ATTR_ATIME, propagation: 0, user_namespace: 0 };
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
