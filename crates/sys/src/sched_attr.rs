//! Scheduling attributes of a thread: sched_getattr(2).

use std::io;

/// `SCHED_ATTR_SIZE_VER1` of linux/sched/types.h.
const SIZE: u32 = 56;

/// `struct sched_attr` of linux/sched/types.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct SchedulingAttributes {
    size: u32,
    /// `SCHED_OTHER` (0), `SCHED_FIFO` (1), `SCHED_RR` (2), `SCHED_BATCH` (3), `SCHED_IDLE` (5), `SCHED_DEADLINE` (6).
    pub policy: u32,
    /// `SCHED_FLAG_…`
    pub flags: u64,
    nice: i32,
    priority: u32,
    /// With `SCHED_DEADLINE` the CPU time of a period, else the slice, in ns.
    pub runtime: u64,
    deadline: u64,
    period: u64,
    /// Least and most utilisation that the thread is taken to have, of 1024.
    pub clamps: [u32; 2],
}

const _: () = assert!(size_of::<SchedulingAttributes>() == SIZE as usize, "struct sched_attr of linux/sched/types.h");

/// The attributes of a thread; 0 stands for the calling one.
///
/// # Errors
/// There is no such thread.
pub fn scheduling_attributes(thread: u32) -> io::Result<SchedulingAttributes> {
    let mut attributes = SchedulingAttributes::default();
    // SAFETY: the kernel writes `SIZE` bytes at most to `attributes`, which has as many, all of which may have any value.
    let answer = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, SIZE, 0) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(attributes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_attributes() {
        let own = scheduling_attributes(0).unwrap();
        assert!(own.size >= 48 && own.policy < 7, "{own:?}");
        assert!(scheduling_attributes(u32::MAX >> 1).is_err());
    }
}
