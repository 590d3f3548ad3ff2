//! System calls that a stop interrupts.
//!
//! The kernel goes on with most of them by itself, so that the program does not notice. A few fail with EINTR although no handler has
//! run (signal(7), "Interruption of system calls and library functions by stop signals"), and a few return that part was done.

#[cfg(target_arch = "x86_64")]
use crate::tracee::Registers;
use crate::tracee::Tracee;

/// `ERESTARTNOHAND` of include/linux/errno.h: the system call begins again, unless a handler runs first; then it fails with EINTR.
#[cfg(target_arch = "x86_64")]
const ERESTARTNOHAND: i64 = 514;

/// System calls that fail with EINTR when a stop interrupts them, always or on a socket with a timeout, and have then done nothing.
#[cfg(target_arch = "x86_64")]
const FAIL: [libc::c_long; 23] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
];

/// `ERESTART_RESTARTBLOCK` of include/linux/errno.h: the system call goes on with what is left of its time, as the kernel has noted it.
/// Where it has no such note any more, the call fails with EINTR.
#[cfg(target_arch = "x86_64")]
const ERESTART_RESTARTBLOCK: i64 = 516;

/// System calls that the kernel goes on with by its note of them. CRIU makes them fail with EINTR (compel's `compel_get_task_regs`).
#[cfg(target_arch = "x86_64")]
const NOTED: [libc::c_long; 4] = [libc::SYS_poll, libc::SYS_nanosleep, libc::SYS_clock_nanosleep, libc::SYS_futex];

/// System calls that may have done a part, and then return that when they are interrupted.
#[cfg(target_arch = "x86_64")]
const IN_PARTS: [libc::c_long; 13] = [
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_copy_file_range,
    libc::SYS_getrandom,
];

/// How much it matters to a thread that it is stopped; the least first.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Disturbance {
    /// It runs, or the kernel goes on with its system call.
    None,
    /// Its system call begins again by [`begin_again`], where it has a timeout with all of that.
    Timeout,
    /// Its system call may return that a part was done.
    Part,
}

/// How much it would matter, by the text of `/proc/PID/task/TID/syscall`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn disturbance(text: &str) -> Disturbance {
    let mut words = text.split_ascii_whitespace();
    let Some(number) = words.next().and_then(|word| word.parse::<libc::c_long>().ok()) else {
        return Disturbance::None;
    };
    let arguments: Vec<u64> = words.filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect();
    let waits_for_all = |argument: usize| arguments.get(argument).is_some_and(|f| f & libc::MSG_WAITALL as u64 != 0);
    match number {
        libc::SYS_recvfrom if waits_for_all(3) => Disturbance::Part,
        libc::SYS_recvmsg if waits_for_all(2) => Disturbance::Part,
        number if IN_PARTS.contains(&number) => Disturbance::Part,
        number if FAIL.contains(&number) => Disturbance::Timeout,
        _ => Disturbance::None,
    }
}

/// Whether a thread is in a system call that may have failed only because it was stopped.
#[cfg(target_arch = "x86_64")]
pub(crate) fn may_fail(process: u32, thread: nix::unistd::Pid) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/syscall")).unwrap_or_default();
    let number = text.split(' ').next().and_then(|word| word.parse().ok());
    number.is_some_and(|number: libc::c_long| FAIL.contains(&number) || NOTED.contains(&number))
}

/// Which these are is known for x86-64 only.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn may_fail(_process: u32, _thread: nix::unistd::Pid) -> bool {
    false
}

/// Has the kernel begin a system call again that has failed only because the thread was stopped. If a signal's handler runs first, it
/// fails with EINTR as it would have done. `false`: it needs nothing.
#[cfg(target_arch = "x86_64")]
pub(crate) fn begin_again(registers: &mut Registers) -> bool {
    if !is_64_bit(registers) || registers.rax as i64 != i64::from(-libc::EINTR) {
        return false;
    }
    let number = registers.orig_rax as libc::c_long;
    let code = match () {
        () if FAIL.contains(&number) => ERESTARTNOHAND,
        () if NOTED.contains(&number) => ERESTART_RESTARTBLOCK,
        () => return false,
    };
    registers.rax = -code as u64;
    true
}

/// Ends the tracing of a thread that stands still at a trap, and whose registers are its own.
pub(crate) fn let_go(tracee: Tracee) {
    #[cfg(target_arch = "x86_64")]
    if let Ok(mut registers) = tracee.registers()
        && begin_again(&mut registers)
    {
        // It fails if the thread has ended.
        let _ = tracee.set_registers(&registers);
    }
    tracee.detach();
}

/// Whether a thread runs 64-bit code: `__USER_CS` of asm/segment.h.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_64_bit(registers: &Registers) -> bool {
    registers.cs == 0x33
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn threads_are_ranked_by_what_they_would_notice() {
        let of = |number: libc::c_long, rest: &str| disturbance(&format!("{number} {rest} 0x7ffd 0x7f12\n"));
        assert_eq!(disturbance("running\n"), Disturbance::None);
        assert_eq!(disturbance("-1 0x7ffd 0x7f12\n"), Disturbance::None);
        assert_eq!(of(libc::SYS_futex, "0x1 0x2 0x3 0x4 0x5 0x6"), Disturbance::None);
        assert_eq!(of(libc::SYS_epoll_wait, "0x1 0x2 0x3 0x4 0x5 0x6"), Disturbance::Timeout);
        assert_eq!(of(libc::SYS_recvfrom, "0x1 0x2 0x3 0x0 0x5 0x6"), Disturbance::Timeout);
        assert_eq!(of(libc::SYS_recvfrom, "0x1 0x2 0x3 0x100 0x5 0x6"), Disturbance::Part);
        assert_eq!(of(libc::SYS_write, "0x1 0x2 0x3 0x4 0x5 0x6"), Disturbance::Part);
    }
}
