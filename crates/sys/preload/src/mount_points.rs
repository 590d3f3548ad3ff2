//! Roots of mounts, which criu opens to find files by their handles (mount.c, `__open_mountpoint`; fsnotify.c). Who watches such a directory
//! would be told that it was opened and closed; of a reference (`O_PATH`) nobody is told.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::OnceLock;

use super::{is_dump, next};

type Fdopendir = unsafe extern "C" fn(c_int) -> *mut c_void;

/// A reference to what is at a path, if criu is about to open the root of a mount there: by a path from the root of the namespace on, without flags.
pub(super) fn referred(dir: c_int, path: &CStr, flags: c_int) -> Option<c_int> {
    let name = path.to_bytes();
    if flags != libc::O_RDONLY || dir < 0 || !(name == b"." || name.starts_with(b"./")) || !is_dump() {
        return None;
    }
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::syscall(libc::SYS_openat, dir, path.as_ptr(), libc::O_PATH | libc::O_DIRECTORY) };
    let fd = c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    if is_root_of_mount(fd) {
        return Some(fd);
    }
    // SAFETY: the descriptor is this function's own.
    unsafe { libc::close(fd) };
    None
}

fn is_root_of_mount(fd: c_int) -> bool {
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut is: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the structure is ours, and the path is empty.
    let done = unsafe { libc::statx(fd, c"".as_ptr(), flags, 0, &raw mut is) };
    done == 0 && is.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0
}

pub(super) fn is_reference(fd: c_int) -> bool {
    // SAFETY: the call takes numbers only.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_PATH != 0
}

/// Opens a file by its handle on the filesystem of a reference, which open_by_handle_at(2) takes as the working directory only.
///
/// # Safety
/// `handle` is a `struct file_handle`.
pub(super) unsafe fn open_by_handle(reference: c_int, handle: c_long, flags: c_long) -> c_long {
    // SAFETY: the path is a C string; the descriptors are this function's own or the caller's.
    unsafe {
        let here = libc::open(c".".as_ptr(), libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if here < 0 {
            return -1;
        }
        let mut found = c_long::from(libc::fchdir(reference));
        if found == 0 {
            found = libc::syscall(libc::SYS_open_by_handle_at, libc::AT_FDCWD, handle, flags);
        }
        let error = *libc::__errno_location();
        // The directory that it came from can be entered again.
        libc::fchdir(here);
        libc::close(here);
        *libc::__errno_location() = error;
        found
    }
}

/// Stands in for libc's function: what is to be read has to be opened.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopendir(fd: c_int) -> *mut c_void {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Fdopendir = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"fdopendir") as usize)) };
    if is_dump() && is_reference(fd) {
        const DOT: *const c_char = c".".as_ptr();
        // SAFETY: the descriptors are the caller's or our own.
        unsafe {
            let opened = libc::openat(fd, DOT, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
            if opened < 0 {
                return std::ptr::null_mut();
            }
            libc::dup2(opened, fd);
            libc::close(opened);
        }
    }
    // SAFETY: handed on as it came.
    unsafe { real(fd) }
}
