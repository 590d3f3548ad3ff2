//! Allow lists of system calls (seccomp(2)), as classic BPF.
//!
//! A filter holds for all threads of the process, and for whatever they start. A call that is not in the list ends the process with
//! SIGSYS.

use std::io;

/// A call that a filter lets pass, or fail.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    call: libc::c_long,
    /// The position of an argument, and a value that its lower 32 bits have.
    only: Option<(u8, u32)>,
    action: u32,
}

/// The call, whatever its arguments.
pub const fn allow(call: libc::c_long) -> Rule {
    Rule { call, only: None, action: libc::SECCOMP_RET_ALLOW }
}

/// The call where the lower 32 bits of an argument (counted from 0) have a value.
pub const fn allow_if(call: libc::c_long, argument: u8, value: u32) -> Rule {
    Rule { call, only: Some((argument, value)), action: libc::SECCOMP_RET_ALLOW }
}

/// The call fails, and is not made.
pub const fn refuse(call: libc::c_long, errno: i32) -> Rule {
    Rule { call, only: None, action: libc::SECCOMP_RET_ERRNO | errno as u32 }
}

/// What the C library and the standard library need of the kernel for memory, locks, time, signals, and the end of a process; memory is
/// never made executable.
pub const BASE: &[Rule] = &[
    allow(libc::SYS_read),
    allow(libc::SYS_write),
    allow(libc::SYS_writev),
    allow(libc::SYS_close),
    allow_if(libc::SYS_mmap, 2, libc::PROT_NONE as u32),
    allow_if(libc::SYS_mmap, 2, libc::PROT_READ as u32),
    allow_if(libc::SYS_mmap, 2, (libc::PROT_READ | libc::PROT_WRITE) as u32),
    allow_if(libc::SYS_mprotect, 2, libc::PROT_NONE as u32),
    allow_if(libc::SYS_mprotect, 2, libc::PROT_READ as u32),
    allow_if(libc::SYS_mprotect, 2, (libc::PROT_READ | libc::PROT_WRITE) as u32),
    allow(libc::SYS_munmap),
    allow(libc::SYS_mremap),
    allow(libc::SYS_madvise),
    allow(libc::SYS_brk),
    allow(libc::SYS_futex),
    allow(libc::SYS_sched_yield),
    allow(libc::SYS_sched_getaffinity),
    allow(libc::SYS_getpid),
    allow(libc::SYS_gettid),
    allow(libc::SYS_clock_gettime),
    allow(libc::SYS_clock_nanosleep),
    allow(libc::SYS_nanosleep),
    allow(libc::SYS_restart_syscall),
    allow(libc::SYS_rt_sigaction),
    allow(libc::SYS_rt_sigprocmask),
    allow(libc::SYS_rt_sigreturn),
    allow(libc::SYS_sigaltstack),
    allow(libc::SYS_getrandom),
    allow(libc::SYS_exit),
    allow(libc::SYS_exit_group),
];

/// Threads. The C library falls back to clone(2) where clone3(2), whose flags a filter cannot see, is not there.
pub const THREADS: &[Rule] = &[
    refuse(libc::SYS_clone3, libc::ENOSYS),
    allow_if(libc::SYS_clone, 0, THREAD),
    allow(libc::SYS_set_robust_list),
    allow(libc::SYS_rseq),
    allow_if(libc::SYS_prctl, 0, libc::PR_SET_NAME as u32),
];

/// Data and descriptors over sockets that are there, and their general options.
pub const SOCKETS: &[Rule] = &[
    allow(libc::SYS_recvmsg),
    allow(libc::SYS_recvfrom),
    allow(libc::SYS_sendto),
    allow(libc::SYS_sendmsg),
    allow(libc::SYS_shutdown),
    allow_if(libc::SYS_setsockopt, 1, libc::SOL_SOCKET as u32),
];

/// No files: the C library may look how many processors there are, and goes on without knowing.
pub const NO_FILES: &[Rule] = &[refuse(libc::SYS_openat, libc::EACCES)];

/// What pager and keeper do: messages and faults, files of theirs, the store's memory, and forking each other. They open no sockets, execute
/// nothing, and load no BPF (its programs were loaded before; they are attached later).
pub const PAGER: &[Rule] = &[
    allow(libc::SYS_recvmsg),
    allow(libc::SYS_recvfrom),
    allow(libc::SYS_sendto),
    allow(libc::SYS_sendmsg),
    allow(libc::SYS_accept4),
    allow(libc::SYS_shutdown),
    allow(libc::SYS_getsockname),
    allow(libc::SYS_getsockopt),
    allow_if(libc::SYS_setsockopt, 1, libc::SOL_SOCKET as u32),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_poll),
    allow(libc::SYS_ppoll),
    allow(libc::SYS_ioctl),
    allow(libc::SYS_fcntl),
    allow(libc::SYS_dup),
    allow(libc::SYS_openat),
    allow(libc::SYS_statx),
    allow(libc::SYS_fstat),
    allow(libc::SYS_newfstatat),
    allow(libc::SYS_lseek),
    allow(libc::SYS_readv),
    allow(libc::SYS_pread64),
    allow(libc::SYS_pwrite64),
    allow(libc::SYS_ftruncate),
    allow(libc::SYS_fallocate),
    allow(libc::SYS_fsync),
    allow(libc::SYS_fdatasync),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_rename),
    allow(libc::SYS_renameat),
    allow(libc::SYS_renameat2),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_unlink),
    allow(libc::SYS_unlinkat),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_readlink),
    allow(libc::SYS_readlinkat),
    allow(libc::SYS_getdents64),
    allow(libc::SYS_umask),
    allow(libc::SYS_mlock),
    allow(libc::SYS_mlock2),
    allow(libc::SYS_munlock),
    allow(libc::SYS_mincore),
    allow(libc::SYS_msync),
    allow(libc::SYS_sched_setattr),
    allow(libc::SYS_sched_getattr),
    allow(libc::SYS_prlimit64),
    allow(libc::SYS_getppid),
    allow(libc::SYS_getuid),
    allow(libc::SYS_geteuid),
    allow(libc::SYS_pidfd_open),
    allow(libc::SYS_wait4),
    allow(libc::SYS_waitid),
    allow_if(libc::SYS_clone, 0, (libc::CLONE_FILES | libc::SIGCHLD) as u32),
    allow_if(libc::SYS_prctl, 0, libc::PR_SET_NAME as u32),
    // BPF_RAW_TRACEPOINT_OPEN, BPF_LINK_CREATE and BPF_ITER_CREATE of linux/bpf.h.
    allow_if(libc::SYS_bpf, 0, 17),
    allow_if(libc::SYS_bpf, 0, 28),
    allow_if(libc::SYS_bpf, 0, 33),
];

/// The flags of pthread_create(3) (glibc's sysdeps/unix/sysv/linux/createthread.c).
const THREAD: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as u32;

// Offsets in struct seccomp_data (linux/seccomp.h).
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// `AUDIT_ARCH_*` of linux/audit.h: the machine (linux/elf-em.h), 64 bits, little-endian.
#[cfg(target_arch = "x86_64")]
const OURS: u32 = 62 | 0xc000_0000;
#[cfg(target_arch = "aarch64")]
const OURS: u32 = 183 | 0xc000_0000;

fn load(offset: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: offset }
}

fn skip_unless_equal(value: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: 0, jf: skip, k: value }
}

fn give(action: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: action }
}

fn program(rules: &[&[Rule]], otherwise: u32) -> Vec<libc::sock_filter> {
    let killed = give(libc::SECCOMP_RET_KILL_PROCESS);
    // Numbers of another architecture mean other calls. (Those of x32 have a bit that no rule has.)
    let mut program = vec![load(ARCHITECTURE), skip_unless_equal(OURS, 1), load(NUMBER)];
    program.insert(2, libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JA) as u16, jt: 0, jf: 0, k: 1 });
    program.insert(3, killed);
    for rule in rules.iter().copied().flatten() {
        let call = rule.call as u32;
        match rule.only {
            None => program.extend([skip_unless_equal(call, 1), give(rule.action)]),
            Some((argument, value)) => program.extend([
                skip_unless_equal(call, 4),
                load(ARGUMENTS + 8 * u32::from(argument)),
                skip_unless_equal(value, 1),
                give(rule.action),
                load(NUMBER),
            ]),
        }
    }
    program.push(give(otherwise));
    program
}

/// Lets all threads of this process make the calls in these lists only, for good. It can gain no privileges any more by executing a
/// program (PR_SET_NO_NEW_PRIVS).
///
/// # Errors
/// The kernel's: it has no seccomp, or another thread has a filter of its own.
pub fn allow_only(rules: &[&[Rule]]) -> io::Result<()> {
    install(&program(rules, libc::SECCOMP_RET_KILL_PROCESS))
}

/// The same for a process on whose life a container depends: other calls fail with EPERM.
///
/// # Errors
/// As [`allow_only`].
pub fn refuse_others(rules: &[&[Rule]]) -> io::Result<()> {
    install(&program(rules, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32))
}

fn install(program: &[libc::sock_filter]) -> io::Result<()> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: prctl(2) with these arguments touches no memory; seccomp(2) reads the program, which outlives the call.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        match libc::syscall(libc::SYS_seccomp, mode, flags, &raw const filter) {
            0 => Ok(()),
            -1 => Err(io::Error::last_os_error()),
            thread => Err(io::Error::other(format!("thread {thread} has a seccomp filter of its own"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType};
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    /// How a process ends that has these rules and does this.
    fn confined(rules: &[&[Rule]], work: fn() -> bool) -> WaitStatus {
        forked(|| allow_only(rules).is_ok() && work())
    }

    /// How a process ends that does this.
    fn forked(work: impl FnOnce() -> bool) -> WaitStatus {
        // SAFETY: the child makes system calls, and never returns.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
            ForkResult::Child => {
                let code = i32::from(!work());
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(code) }
            }
        }
    }

    fn ends_well(status: WaitStatus) -> bool {
        matches!(status, WaitStatus::Exited(_, 0))
    }

    fn is_killed(status: WaitStatus) -> bool {
        matches!(status, WaitStatus::Signaled(_, Signal::SIGSYS, _))
    }

    #[test]
    fn a_call_that_is_not_in_the_list_ends_the_process() {
        assert!(is_killed(confined(&[BASE], || nix::unistd::getppid().as_raw() > 0)));
        assert!(ends_well(confined(&[BASE, &[allow(libc::SYS_getppid)]], || nix::unistd::getppid().as_raw() > 0)));
        assert!(is_killed(confined(&[BASE], || std::process::Command::new("/bin/true").status().is_ok())));
    }

    #[test]
    fn arguments_are_looked_at() {
        fn socket(domain: i32) -> bool {
            // SAFETY: the call touches no memory.
            unsafe { libc::socket(domain, libc::SOCK_STREAM, 0) >= 0 }
        }
        let local = &[allow_if(libc::SYS_socket, 0, libc::AF_UNIX as u32)];
        assert!(ends_well(confined(&[BASE, local], || socket(libc::AF_UNIX))));
        assert!(is_killed(confined(&[BASE, local], || socket(libc::AF_INET))));
        fn map(protection: i32) -> bool {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the mapping is a new one.
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) != libc::MAP_FAILED }
        }
        assert!(ends_well(confined(&[BASE], || map(libc::PROT_READ | libc::PROT_WRITE))));
        assert!(is_killed(confined(&[BASE], || map(libc::PROT_READ | libc::PROT_EXEC))));
    }

    #[test]
    fn other_calls_can_be_made_to_fail() {
        let others = || nix::sys::socket::socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::empty());
        let refused =
            move || refuse_others(&[BASE]).is_ok() && others().is_err_and(|error| error == nix::errno::Errno::EPERM);
        assert!(ends_well(forked(refused)));
    }

    #[test]
    fn what_is_refused_fails_and_no_more() {
        let rules: &[&[Rule]] = &[BASE, &[refuse(libc::SYS_openat, libc::EPERM)]];
        let denied = || std::fs::File::open("/").is_err_and(|e| e.raw_os_error() == Some(libc::EPERM));
        assert!(ends_well(confined(rules, denied)));
    }

    #[test]
    fn threads_can_be_started_where_they_are_allowed() {
        let start = || std::thread::Builder::new().name("x".into()).spawn(|| 7).is_ok_and(|t| t.join().unwrap() == 7);
        assert!(ends_well(confined(&[BASE, THREADS], start)));
        assert!(is_killed(confined(&[BASE], start)));
    }
}
