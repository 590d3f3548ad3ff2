//! Files found by their handles (open_by_handle_at(2)).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Longest handle, in bytes: the kernel's `MAX_HANDLE_SZ`.
const LONGEST: usize = 128;

/// A handle as the kernel shows it in `/proc/PID/fdinfo/FD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileHandle {
    /// Which kind of handle the filesystem has made.
    pub kind: i32,
    /// What the filesystem has written into it.
    pub bytes: Vec<u8>,
}

/// `struct file_handle`, with room for the longest one.
#[repr(C)]
struct Argument {
    length: u32,
    kind: i32,
    bytes: [u8; LONGEST],
}

impl FileHandle {
    /// The file with this handle on the filesystem that the thread's working directory is on, opened with `O_PATH`: nobody is told of it.
    ///
    /// # Errors
    /// ESTALE: there is no such file. EOPNOTSUPP: the filesystem knows no handles. EINVAL: it is too long.
    pub fn open_on_working_directory(&self) -> io::Result<OwnedFd> {
        let mut argument = Argument { length: self.bytes.len() as u32, kind: self.kind, bytes: [0; LONGEST] };
        argument.bytes.get_mut(..self.bytes.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(&self.bytes);
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        // SAFETY: the kernel reads the structure, whose length says how much of it is set, and returns a new descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, libc::AT_FDCWD, &raw mut argument, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}
