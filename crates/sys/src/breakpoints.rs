//! Breakpoints that are set without a wait.
//!
//! The first breakpoint that a tracer sets, like every other event of perf that belongs to a task, has the kernel switch a branch in the
//! scheduler on and wait for a grace period of RCU (`accountevent` in kernel/events/core.c): up to tens of milliseconds on a busy
//! machine. Some time after the last one is gone it is switched off again. criu sets breakpoints in the freeze; while another
//! event is there, they cost nothing like that.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// `struct perf_event_attr` of linux/perf_event.h, in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint_type: u32,
    breakpoint: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

const TYPE_SOFTWARE: u32 = 1;
const COUNT_DUMMY: u64 = 9;
const DISABLED: u64 = 1;
const CLOSE_ON_EXEC: libc::c_ulong = 8;

/// Has the wait now: while the descriptor is open, breakpoints are set without one.
///
/// # Errors
/// The kernel has no perf, or grants this process no events: then breakpoints work all the same, after a wait.
pub fn prepare() -> io::Result<OwnedFd> {
    let size = size_of::<Attributes>() as u32;
    let nothing =
        Attributes { kind: TYPE_SOFTWARE, size, config: COUNT_DUMMY, flags: DISABLED, ..Attributes::default() };
    let nothing = std::ptr::from_ref(&nothing);
    // SAFETY: the structure is as large as its size field says, and the call reads it only. The event is this thread's own, on any
    // CPU, in no group.
    let event = unsafe { libc::syscall(libc::SYS_perf_event_open, nothing, 0, -1, -1, CLOSE_ON_EXEC) };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(event as i32) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    #[test]
    fn an_event_of_perf_is_held() {
        match super::prepare() {
            Ok(event) => {
                let link = std::fs::read_link(format!("/proc/self/fd/{}", event.as_raw_fd())).unwrap();
                assert_eq!(link.to_str(), Some("anon_inode:[perf_event]"));
            }
            Err(error) => println!("skipped: this kernel grants no events of perf: {error}"),
        }
    }
}
