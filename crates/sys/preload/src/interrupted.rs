//! System calls that are interrupted when criu stops a thread for a dump.
//!
//! Criu has most of them begin again, and makes those fail with EINTR that the kernel would go on with by a note of its own
//! (`ERESTART_RESTARTBLOCK`: `compel_get_task_regs` of compel's `infect.c`): `sleep(3)` returns too early, `poll(2)` fails though no signal
//! came. Others the kernel itself makes fail when a thread is stopped (signal(7), "Interruption of system calls and library functions by
//! stop signals"). Criu is told here that these begin again (`ERESTARTNOHAND`), as the calls that they were: whatever it does then with
//! the registers, in its images and with those of a thread that runs on, is right. How much is left of their time is recorded where the
//! kernel tells ([`waits`](super::waits)).
//!
//! Two kinds fail with EINTR as without this library: waits of which the kernel does not tell how much is left, and that last more than a
//! second, from which programs that work with timers find out for themselves how long they still have to wait; and those to which a
//! signal has come that the thread does not block.

use std::ffi::{c_int, c_long};

use super::trace::{Registers, real_ptrace};
use super::waits;

/// Places of registers in `struct user_regs_struct` of sys/user.h.
pub(crate) const R11: usize = 6;
pub(crate) const R10: usize = 7;
const R8: usize = 9;
pub(crate) const RAX: usize = 10;
pub(crate) const RCX: usize = 11;
pub(crate) const RDX: usize = 12;
pub(crate) const RSI: usize = 13;
pub(crate) const RDI: usize = 14;
pub(crate) const ORIG_RAX: usize = 15;
pub(crate) const RIP: usize = 16;
const CS: usize = 17;
pub(crate) const RSP: usize = 19;
/// `__USER_CS` of asm/segment.h: the thread runs 64-bit code.
const CODE_64: u64 = 0x33;

/// Of linux/errno.h, as the kernel leaves them in the register of the result.
const ERESTARTSYS: i64 = -512;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
const EINTR: i64 = -(libc::EINTR as i64);

/// The longest timeout, in milliseconds, with which a wait begins again with all of it.
const SHORT: i32 = 1000;
/// Of futex(2): what is not the operation.
const FUTEX_FLAGS: u64 = (libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME) as u64;

/// Which operation it is, by the argument of futex(2).
pub(crate) fn futex_operation(argument: u64) -> u64 {
    u64::from(argument as u32) & !FUTEX_FLAGS
}

/// Whether the result of an interrupted system call has the kernel begin it again, or go on with it.
pub(crate) fn is_restarted(result: i64) -> bool {
    (ERESTART_RESTARTBLOCK..=ERESTARTSYS).contains(&result)
}

/// Whether there is no timeout, or a short one.
fn is_short(milliseconds: u64) -> bool {
    // The kernel takes an int.
    (milliseconds as i32) <= SHORT
}

/// Whether an interrupted system call with these registers can begin again, where nothing but them is known.
fn may_begin_again(registers: &Registers) -> bool {
    match (registers[ORIG_RAX] as c_long, registers[RAX] as i64) {
        (libc::SYS_poll, ERESTART_RESTARTBLOCK) => is_short(registers[RDX]),
        // Its time is a point in time.
        (libc::SYS_futex, ERESTART_RESTARTBLOCK) => futex_operation(registers[RSI]) == libc::FUTEX_WAIT_BITSET as u64,
        (libc::SYS_epoll_wait | libc::SYS_epoll_pwait, EINTR) => is_short(registers[R10]),
        (libc::SYS_semop, EINTR) => true,
        (libc::SYS_epoll_pwait2 | libc::SYS_semtimedop, EINTR) => registers[R10] == 0,
        (libc::SYS_rt_sigtimedwait, EINTR) => registers[RDX] == 0,
        (libc::SYS_io_getevents, EINTR) => registers[R8] == 0,
        _ => false,
    }
}

/// `struct ptrace_peeksiginfo_args` of linux/ptrace.h.
#[repr(C)]
struct Peek {
    offset: u64,
    flags: u32,
    number: i32,
}

/// Whether a signal waits for a stopped thread that it does not block. `true` where that cannot be found out.
fn has_signal(thread: c_int) -> bool {
    /// So many are looked at in each of the two queues.
    const SIGNALS: usize = 32;
    /// `PTRACE_PEEKSIGINFO_SHARED`: those of the process.
    const SHARED: u32 = 1;
    let mut blocked = 0u64;
    if real_ptrace(libc::PTRACE_GETSIGMASK, thread, size_of::<u64>() as c_long, (&raw mut blocked) as c_long) != 0 {
        return true;
    }
    [0, SHARED].into_iter().any(|flags| {
        // SAFETY: integers and a union of such; all zeros is a value.
        let mut found: [libc::siginfo_t; SIGNALS] = unsafe { std::mem::zeroed() };
        let peek = Peek { offset: 0, flags, number: SIGNALS as i32 };
        let count =
            real_ptrace(libc::PTRACE_PEEKSIGINFO, thread, (&raw const peek) as c_long, found.as_mut_ptr() as c_long);
        let Ok(count) = usize::try_from(count) else { return true };
        count == SIGNALS || found[..count].iter().any(|signal| blocked >> (signal.si_signo - 1) & 1 == 0)
    })
}

/// Whether the thread's process has a handler for any of the signals that wait for it.
fn has_handler(thread: c_int) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let set = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        value.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0)
    };
    (set("SigPnd:") | set("ShdPnd:")) & !set("SigBlk:") & set("SigCgt:") != 0
}

/// What criu is told in a dump of a stopped thread whose registers it has read: see the module.
pub(crate) fn correct(thread: c_int, registers: &mut Registers) {
    let result = registers[RAX] as i64;
    if registers[CS] != CODE_64 || (registers[ORIG_RAX] as i64) < 0 {
        return;
    }
    if result == ERESTARTNOHAND {
        // The handler runs first, and then the call has failed: pause(2) would wait for another signal.
        if has_signal(thread) && has_handler(thread) {
            registers[RAX] = EINTR as u64;
        }
        return;
    }
    if !matches!(result, ERESTART_RESTARTBLOCK | EINTR) || has_signal(thread) {
        return;
    }
    let wait = (result == ERESTART_RESTARTBLOCK).then(|| waits::find(thread, registers)).flatten();
    match wait {
        Some(wait) if waits::record(thread, wait) => registers[ORIG_RAX] = wait.number as u64,
        _ if may_begin_again(registers) => {}
        _ => return,
    }
    registers[RAX] = ERESTARTNOHAND as u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_begin_again_where_they_last_little_longer_than_asked() {
        let of = |number: c_long, result: i64, arguments: &[(usize, u64)]| {
            let mut registers = [0; 27];
            (registers[ORIG_RAX], registers[RAX]) = (number as u64, result as u64);
            for (register, value) in arguments {
                registers[*register] = *value;
            }
            may_begin_again(&registers)
        };
        let forever = u64::from(u32::MAX);
        assert!(of(libc::SYS_epoll_wait, EINTR, &[(R10, forever)]));
        assert!(of(libc::SYS_epoll_wait, EINTR, &[(R10, 100)]));
        assert!(!of(libc::SYS_epoll_wait, EINTR, &[(R10, 60_000)]));
        assert!(!of(libc::SYS_epoll_wait, 1, &[(R10, forever)]));
        assert!(of(libc::SYS_poll, ERESTART_RESTARTBLOCK, &[(RDX, 1000)]));
        assert!(!of(libc::SYS_poll, ERESTART_RESTARTBLOCK, &[(RDX, 1001)]));
        assert!(of(libc::SYS_futex, ERESTART_RESTARTBLOCK, &[(RSI, 9 | 128 | 256)]));
        assert!(!of(libc::SYS_futex, ERESTART_RESTARTBLOCK, &[(RSI, 128)]));
        assert!(!of(libc::SYS_read, EINTR, &[]));
    }
}
