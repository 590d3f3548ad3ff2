//! Priority of a thread's reads and writes of disks: ioprio_get(2) and ioprio_set(2).

use std::io;

/// IOPRIO_WHO_PROCESS of linux/ioprio.h, which stands for one thread.
const THREAD: i32 = 1;
/// IOPRIO_CLASS_SHIFT.
pub const CLASS_SHIFT: u32 = 13;

/// The priority of a thread: its class from bit 13 on, 0 where none was set, and below it the level.
///
/// # Errors
/// There is no such thread.
pub fn io_priority(thread: u32) -> io::Result<i64> {
    // SAFETY: takes numbers only.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, THREAD, thread) };
    if priority < 0 { Err(io::Error::last_os_error()) } else { Ok(priority) }
}

/// Gives a thread a priority, as [`io_priority`] tells it.
///
/// # Errors
/// There is no such thread, or the kernel refuses it.
pub fn set_io_priority(thread: u32, priority: i64) -> io::Result<()> {
    // SAFETY: takes numbers only.
    let answer = unsafe { libc::syscall(libc::SYS_ioprio_set, THREAD, thread, priority) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
