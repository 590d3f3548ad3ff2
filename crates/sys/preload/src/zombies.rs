//! Processes that have ended, and that their parents have not waited for.
//!
//! Criu forks itself for each, with all its memory. The agent lists those that have nothing but a number, a name and an exit
//! status, in the file that `TRANSHIP_ZOMBIES` names. In a dump they are left out of what the kernel tells of a task's
//! children. In a restore their parent makes them, just before it leaves criu's code: each is a process that shares the
//! parent's memory (as of vfork), takes its name, and ends.
//!
//! The signals by which the kernel tells of their ends are taken before criu may see them: it would take them for failures.
//! One that tells of another process is given back.

use std::arch::asm;
use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use crate::texts::{self, Zombie};

/// `struct clone_args` of linux/sched.h.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const _: () = assert!(size_of::<CloneArguments>() == 88);

fn all() -> &'static [Zombie] {
    static ALL: OnceLock<Vec<Zombie>> = OnceLock::new();
    ALL.get_or_init(|| {
        let Some(path) = std::env::var_os("TRANSHIP_ZOMBIES") else { return Vec::new() };
        texts::zombies(&std::fs::read_to_string(path).unwrap_or_default())
    })
}

/// Their pids: as the node has them, and as the container has.
fn pids() -> &'static [HashSet<u32>; 2] {
    static PIDS: OnceLock<[HashSet<u32>; 2]> = OnceLock::new();
    PIDS.get_or_init(|| {
        [all().iter().map(|zombie| zombie.pid).collect(), all().iter().map(|zombie| zombie.own).collect()]
    })
}

/// Whether a file is of any procfs: files of tasks may have the name, too.
fn is_of_procfs(file: &std::fs::File) -> bool {
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) == 0 && found.f_type == libc::PROC_SUPER_MAGIC }
}

/// Whether a file is of the node's procfs. The numbers of zombies in the container criu finds out from the container's.
fn is_of_node(file: &std::fs::File) -> io::Result<bool> {
    Ok(file.metadata()?.dev() == std::fs::metadata("/proc")?.dev())
}

/// Has the list read, where the file can be found: a restored task has another root.
pub(crate) fn read() {
    all();
}

/// What criu is to read instead of a task's children, which the descriptor is of; `None` where it may read that.
///
/// # Errors
/// It cannot be read, or nothing be put in its place.
pub(crate) fn without(children: c_int) -> io::Result<Option<c_int>> {
    if all().is_empty() {
        return Ok(None);
    }
    // SAFETY: criu has just got it, and nobody else has it.
    let mut told = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(children) });
    if !is_of_procfs(&told) {
        return Ok(Some(told.into_raw_fd()));
    }
    let mut text = String::new();
    told.read_to_string(&mut text)?;
    let [of_node, of_container] = pids();
    let pids = if is_of_node(&told)? { of_node } else { of_container };
    let hidden = |word: &str| word.parse().is_ok_and(|pid| pids.contains(&pid));
    if !text.split_ascii_whitespace().any(hidden) {
        told.seek(SeekFrom::Start(0))?;
        return Ok(Some(told.into_raw_fd()));
    }
    let seen: String =
        text.split_ascii_whitespace().filter(|word| !hidden(word)).map(|pid| format!("{pid} ")).collect();
    const NAME: &CStr = c"children";
    // SAFETY: the name is a C string; the call returns a new descriptor.
    let fd = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is new.
    let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all(seen.as_bytes())?;
    file.seek(SeekFrom::Start(0))?;
    Ok(Some(file.into_raw_fd()))
}

/// Makes those whose parent this process is going to be.
///
/// # Errors
/// One cannot be made.
pub(crate) fn make() -> io::Result<()> {
    // SAFETY: no arguments.
    let own = unsafe { libc::getpid() };
    let mut mine = all().iter().filter(|zombie| zombie.parent == own as u32).peekable();
    if mine.peek().is_none() {
        return Ok(());
    }
    // SAFETY: sets are plain integers, and all zeros is one; the calls fill them, or read them only.
    unsafe {
        let (mut ends, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigemptyset(&raw mut ends);
        libc::sigaddset(&raw mut ends, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const ends, &raw mut before);
        let now: libc::timespec = std::mem::zeroed();
        let mut of_others = None;
        let made = mine.try_for_each(|zombie| {
            one(zombie)?;
            // One signal stands for all that come before it is taken.
            let mut told: libc::siginfo_t = std::mem::zeroed();
            let came = libc::sigtimedwait(&raw const ends, &raw mut told, &raw const now) > 0;
            if came && told.si_pid() as u32 != zombie.own {
                of_others = Some(told);
            }
            Ok(())
        });
        // That is criu's.
        if let Some(told) = of_others {
            libc::syscall(libc::SYS_rt_sigqueueinfo, own, libc::SIGCHLD, &raw const told);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        made
    }
}

/// Makes one, and waits until it has ended.
fn one(zombie: &Zombie) -> io::Result<()> {
    let mut name: [c_char; 16] = [0; 16];
    zombie.name.iter().take(15).zip(&mut name).for_each(|(byte, place)| *place = *byte as c_char);
    let wanted = zombie.own as c_int;
    let arguments = CloneArguments {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::CLONE_FS) as u64,
        exit_signal: libc::SIGCHLD as u64,
        set_tid: &raw const wanted as u64,
        set_tid_size: 1,
        ..CloneArguments::default()
    };
    // SAFETY: the arguments and the name live until the child has ended, which this thread waits for.
    let made = unsafe { fork_and_end(&arguments, &name, zombie.leads_group, zombie.status) };
    if made < 0 {
        return Err(io::Error::from_raw_os_error(-made as i32));
    }
    // SAFETY: nothing is filled.
    let seen = unsafe { libc::waitid(libc::P_PID, zombie.own, std::ptr::null_mut(), libc::WEXITED | libc::WNOWAIT) };
    if seen == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The child uses no memory but what it is given: it has the parent's stack, and the parent waits for it.
///
/// # Safety
/// The arguments make a child that the parent waits for (`CLONE_VFORK`), and live as long as this call.
unsafe fn fork_and_end(arguments: &CloneArguments, name: &[c_char; 16], leads_group: bool, status: u8) -> isize {
    let result: isize;
    // SAFETY: in the parent only the result and the registers that a system call changes are others afterwards. The child
    // makes system calls that read `name` alone, and ends.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov eax, {prctl}",
            "mov edi, {set_name}",
            "mov rsi, r12",
            "syscall",
            "test r13, r13",
            "jz 3f",
            "mov eax, {setpgid}",
            "xor edi, edi",
            "xor esi, esi",
            "syscall",
            "3:",
            "mov eax, {exit}",
            "mov rdi, r14",
            "syscall",
            "ud2",
            "2:",
            prctl = const libc::SYS_prctl,
            set_name = const libc::PR_SET_NAME,
            setpgid = const libc::SYS_setpgid,
            exit = const libc::SYS_exit_group,
            inlateout("rax") libc::SYS_clone3 as isize => result,
            in("rdi") std::ptr::from_ref(arguments),
            in("rsi") size_of::<CloneArguments>(),
            in("r12") name.as_ptr(),
            in("r13") u64::from(leads_group),
            in("r14") u64::from(status),
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zombie_has_its_name_and_its_status() {
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            println!("skipped: to choose a pid takes CAP_CHECKPOINT_RESTORE");
            return;
        }
        // SAFETY: the calls fill a structure of integers.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // A number that is free: that of a child that has just been waited for.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let own = child.id();
        let zombie =
            Zombie { pid: 1, parent: 1, own, status: 200, leads_group: true, name: b"a name of 15 ch".to_vec() };
        one(&zombie).unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{own}/stat")).unwrap();
        let expected = format!("{own} (a name of 15 ch) Z {} {own} ", std::process::id());
        assert!(stat.starts_with(&expected), "{stat} instead of {expected}");
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitid(libc::P_PID, own, &raw mut info, libc::WEXITED) }, 0);
        // SAFETY: it is of a child.
        assert_eq!((info.si_code, unsafe { info.si_status() }), (libc::CLD_EXITED, 200));
    }
}
