//! What a process that needs little gives up (capabilities(7)).

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Capabilities of linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Capability {
    /// Reads and writes files of other users.
    DacOverride = 1,
    /// Opens raw and packet sockets.
    NetRaw = 13,
    /// Locks memory beyond its limit.
    IpcLock = 14,
    /// Reads and changes System V objects of other users.
    IpcOwner = 15,
    /// Traces processes of other users.
    SysPtrace = 19,
    /// Among much else, suspends seccomp filters of others.
    SysAdmin = 21,
    /// Gives threads a better priority.
    SysNice = 23,
    /// Exceeds limits of users and namespaces.
    SysResource = 24,
    /// Sees addresses of the kernel.
    Syslog = 34,
    /// Attaches BPF programs to tracepoints.
    Perfmon = 38,
    /// Uses BPF.
    Bpf = 39,
}

/// The user and group `nobody`.
const NOBODY: u32 = 65534;
/// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h.
const VERSION: u32 = 0x2008_0522;

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`; the second one has the capabilities from 32 on.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn check(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn prctl(option: i32, argument: u64) -> io::Result<()> {
    // SAFETY: the options used here take numbers, and touch no memory.
    check(unsafe { libc::prctl(option, argument, 0, 0, 0) }.into())
}

/// Leaves this thread with these capabilities at the most, and lets it get no others by executing a program. To be called before there
/// are other threads. A capability that it does not have it gets by no means.
///
/// # Errors
/// The kernel's: it takes CAP_SETPCAP.
pub fn keep_capabilities(kept: &[Capability]) -> io::Result<()> {
    let kept: u64 = kept.iter().map(|one| 1 << (*one as u32)).sum();
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    for number in (0..64).filter(|number| kept & (1 << number) == 0) {
        match prctl(libc::PR_CAPBSET_DROP, number) {
            // There are no more.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            done => done?,
        }
    }
    // Inheritable and ambient ones are none.
    let header = Header { version: VERSION, pid: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: capget(2) writes two sets of this version.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) })?;
    for (set, kept) in sets.iter_mut().zip([kept as u32, (kept >> 32) as u32]) {
        let left = set.permitted & kept;
        *set = Sets { effective: left, permitted: left, inheritable: 0 };
    }
    // SAFETY: capset(2) reads two sets of this version.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) })
}

/// Makes this process nobody's: an empty directory is its root, it is the user and group `nobody` without other groups, has no
/// capabilities and can get none, dumps no core and cannot be traced by other users, and may open no more than so many descriptors. To be
/// called before there are other threads.
///
/// # Errors
/// The kernel's: it takes CAP_SYS_CHROOT, CAP_SETUID, CAP_SETGID and CAP_SETPCAP.
pub fn become_nobody(root: &Path, descriptors: u64) -> io::Result<()> {
    let path = CString::new(root.as_os_str().as_bytes())?;
    let limit = |what, most: u64| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes its argument.
        check(unsafe { libc::getrlimit(what, &raw mut limit) }.into())?;
        limit.rlim_max = limit.rlim_max.min(most);
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the call reads its argument.
        check(unsafe { libc::setrlimit(what, &raw const limit) }.into())
    };
    limit(libc::RLIMIT_NOFILE, descriptors)?;
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_MEMLOCK, 0)?;
    // SAFETY: the calls read their arguments.
    unsafe {
        check(libc::chroot(path.as_ptr()).into())?;
        check(libc::chdir(c"/".as_ptr()).into())?;
        // The bounding set first: dropping from it takes a capability.
        for number in 0..64 {
            if prctl(libc::PR_CAPBSET_DROP, number).is_err_and(|e| e.raw_os_error() != Some(libc::EINVAL)) {
                return Err(io::Error::last_os_error());
            }
        }
        check(libc::setgroups(0, std::ptr::null()).into())?;
        check(libc::setresgid(NOBODY, NOBODY, NOBODY).into())?;
        check(libc::setresuid(NOBODY, NOBODY, NOBODY).into())?;
    }
    keep_capabilities_of_nobody()?;
    prctl(libc::PR_SET_DUMPABLE, 0)
}

/// A change of the user has taken the capabilities, unless securebits kept them.
fn keep_capabilities_of_nobody() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    let header = Header { version: VERSION, pid: 0 };
    // SAFETY: capset(2) reads two sets of this version.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, [Sets::default(); 2].as_ptr()) })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use nix::unistd::{ForkResult, fork, pipe};

    use super::*;

    /// What /proc/self/status says in a process that has done this.
    fn status(work: impl FnOnce() -> io::Result<()>) -> HashMap<String, String> {
        let (read, write) = pipe().unwrap();
        // SAFETY: the child makes system calls and allocates (glibc's fork(3) sees to that), and never returns.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                drop(write);
                let text = io::read_to_string(std::fs::File::from(read)).unwrap();
                nix::sys::wait::waitpid(child, None).unwrap();
                let pair = |line: &str| line.split_once(":\t").map(|(k, v)| (k.to_owned(), v.to_owned()));
                text.lines().filter_map(pair).collect()
            }
            ForkResult::Child => {
                let proc = std::fs::File::open("/proc/self/status").unwrap();
                let text = work().and_then(|()| io::read_to_string(proc)).unwrap_or_else(|e| e.to_string());
                let _ = nix::unistd::write(&write, text.as_bytes());
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(0) }
            }
        }
    }

    const NONE: &str = "0000000000000000";

    #[test]
    fn nobody_has_nothing() {
        let root = std::env::temp_dir().join(format!("tranship-nobody-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        let status = status(|| become_nobody(&root, 100));
        std::fs::remove_dir(&root).unwrap();
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set], NONE, "{set}");
        }
        assert_eq!((status["NoNewPrivs"].as_str(), status["Groups"].trim()), ("1", ""));
        for ids in ["Uid", "Gid"] {
            assert_eq!(status[ids], "65534\t65534\t65534\t65534");
        }
    }

    #[test]
    fn those_that_are_kept_are_all_that_is_left() {
        let status = status(|| keep_capabilities(&[Capability::SysPtrace, Capability::SysNice]));
        let kept = format!("{:016x}", 1u64 << 19 | 1 << 23);
        for (set, expected) in
            [("CapInh", NONE), ("CapPrm", &kept), ("CapEff", &kept), ("CapBnd", &kept), ("CapAmb", NONE)]
        {
            assert_eq!(status[set], expected, "{set}");
        }
        assert_eq!(status["NoNewPrivs"], "1");
    }
}
