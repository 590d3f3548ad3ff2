//! Programs into which system calls are injected. Each notices what must not happen to it, and says so on its standard output.

use std::arch::{asm, global_asm};
use std::io::Write;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::calls;

/// The first argument of a subject; the second is its name, the rest is its own.
pub const ARGUMENT: &str = "subject";

/// What one says when it has begun.
pub const READY: &str = "ready";

pub fn main(arguments: &[&str]) {
    match arguments {
        ["dispositions"] => dispositions(),
        ["call", name] => call(name),
        ["sleep", milliseconds] => sleep(milliseconds.parse().unwrap()),
        ["queue", count] => queue(count.parse().unwrap()),
        ["registers"] => registers(),
        ["sequence"] => sequence(),
        ["steps"] => steps(),
        ["forks"] => forks(),
        ["executes"] => {
            say(READY);
            executes();
        }
        ["executes", "again"] => executes(),
        ["vfork", threads] => vfork(threads.parse().unwrap()),
        ["full"] => full(),
        ["vdso-file", path] => vdso_file(path),
        ["injects", pid] => loop {
            let _ = tranship_sys::writes::WriteWatch::inject(pid.parse().unwrap());
        },
        ["injects", pid, "once"] => drop(tranship_sys::writes::WriteWatch::inject(pid.parse().unwrap()).unwrap()),
        _ => panic!("{arguments:?}"),
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{text}").and_then(|()| out.flush()).unwrap();
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

extern "C" fn ignore(_: i32) {}

fn handle(signal: i32, handler: usize, flags: i32) {
    // SAFETY: the handlers of this program are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &raw const action, null_mut()), 0);
    }
}

fn block(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: the set is plain memory.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        assert_eq!(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, null_mut()), 0);
        set
    }
}

/// Executes itself for ever.
fn executes() {
    use std::os::unix::process::CommandExt;
    let error = std::process::Command::new("/proc/self/exe").args([ARGUMENT, "executes", "again"]).exec();
    panic!("{error}");
}

/// Has a handler for some signals, ignores some, blocks some, and has some pending.
fn dispositions() {
    let all = (1..=64).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP, 32, 33].contains(signal));
    for signal in all {
        match signal % 3 {
            0 => handle(signal, libc::SIG_IGN, 0),
            1 => handle(signal, ignore as *const () as usize, libc::SA_RESTART),
            _ => {}
        }
    }
    handle(libc::SIGTRAP, ignore as *const () as usize, 0);
    let pending = [libc::SIGTRAP, libc::SIGUSR2, libc::SIGSYS, 40, 50];
    block(&pending);
    // SAFETY: the calls take numbers.
    unsafe {
        for signal in pending {
            libc::kill(libc::getpid(), signal);
        }
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), libc::SIGTRAP);
        say(READY);
        loop {
            libc::pause();
        }
    }
}

/// Makes one system call that waits, and tells what it returns.
fn call(name: &str) {
    block(&[libc::SIGUSR2]);
    handle(libc::SIGUSR1, ignore as *const () as usize, libc::SA_RESTART);
    say(READY);
    let returned = calls::call(name);
    say(&format!("{name} has returned {returned}, errno {}", errno()));
}

/// Sleeps, and tells how long that took and what it returned.
fn sleep(milliseconds: u64) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: (milliseconds * 1_000_000) as i64 };
    say(READY);
    let begin = Instant::now();
    // SAFETY: the call reads its argument.
    let returned = unsafe { libc::nanosleep(&raw const time, null_mut()) };
    say(&format!("{returned} {}", begin.elapsed().as_millis()));
}

static COUNT: AtomicU64 = AtomicU64::new(0);

extern "C" fn take(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo.
    let value = unsafe { (*info).si_value().sival_ptr as u64 };
    let expected = COUNT.load(Relaxed);
    if value != expected || signal != libc::SIGRTMIN() {
        // SAFETY: async-signal-safe.
        unsafe {
            libc::write(1, b"wrong\n".as_ptr().cast(), 6);
            libc::_exit(1);
        }
    }
    COUNT.store(expected + 1, Relaxed);
}

/// Takes signals that were queued with the numbers from 0 on, and says when it has taken all.
fn queue(count: u64) {
    handle(libc::SIGRTMIN(), take as *const () as usize, libc::SA_SIGINFO | libc::SA_RESTART);
    say(READY);
    while COUNT.load(Relaxed) < count {
        std::hint::spin_loop();
    }
    say("all");
}

/// Fills registers with what it knows, and ends with SIGILL if one has changed. Never calls the system.
fn registers() {
    say(READY);
    // SAFETY: all that is changed is named, or pushed and popped.
    unsafe {
        asm!(
            "push rbx",
            "mov rax, 0x1111111111111111",
            "mov rbx, 0x2222222222222222",
            "mov rcx, 0x3333333333333333",
            "mov rdx, 0x4444444444444444",
            "mov rsi, 0x5555555555555555",
            "mov rdi, 0x6666666666666666",
            "mov r8, 0x7777777777777777",
            "mov r9, 0x8888888888888888",
            "mov r10, 0x9999999999999999",
            "mov r11, 0xaaaaaaaaaaaaaaa",
            "movq xmm0, rax",
            "movq xmm7, rbx",
            "movq xmm15, rcx",
            "2:",
            "mov r12, 0x1111111111111111",
            "cmp rax, r12",
            "jne 3f",
            "movq r13, xmm0",
            "cmp r13, r12",
            "jne 3f",
            "mov r12, 0x2222222222222222",
            "cmp rbx, r12",
            "jne 3f",
            "movq r13, xmm7",
            "cmp r13, r12",
            "jne 3f",
            "mov r12, 0x3333333333333333",
            "cmp rcx, r12",
            "jne 3f",
            "movq r13, xmm15",
            "cmp r13, r12",
            "jne 3f",
            "mov r12, 0x4444444444444444",
            "cmp rdx, r12",
            "jne 3f",
            "mov r12, 0x5555555555555555",
            "cmp rsi, r12",
            "jne 3f",
            "mov r12, 0x6666666666666666",
            "cmp rdi, r12",
            "jne 3f",
            "mov r12, 0x7777777777777777",
            "cmp r8, r12",
            "jne 3f",
            "mov r12, 0x8888888888888888",
            "cmp r9, r12",
            "jne 3f",
            "mov r12, 0x9999999999999999",
            "cmp r10, r12",
            "jne 3f",
            "mov r12, 0xaaaaaaaaaaaaaaa",
            "cmp r11, r12",
            "jne 3f",
            "jmp 2b",
            "3:",
            "ud2",
            options(noreturn)
        );
    }
}

// A restartable sequence that goes on until it is aborted, which it counts. The kernel takes its pointer away when it finds the thread
// outside of it; to come back into it then is what must not happen.
global_asm!(
    ".pushsection .data, \"aw\"",
    ".balign 32",
    "tranship_test_sequence:",
    ".long 0, 0",
    ".quad 1f, 2f - 1f, 4f",
    ".popsection",
    ".globl tranship_test_run",
    // rdi: the thread's struct rseq; rsi: a counter of aborts.
    "tranship_test_run:",
    "0:",
    "lea rax, [rip + tranship_test_sequence]",
    "mov [rdi + 8], rax",
    "1:",
    "cmp qword ptr [rdi + 8], 0",
    "jne 1b",
    "2:",
    "ud2",
    // What precedes an abort handler: RSEQ_SIG, as an instruction that is never executed.
    ".byte 0x0f, 0xb9, 0x3d",
    ".long 0x53053053",
    "4:",
    "lock inc qword ptr [rsi]",
    "jmp 0b",
);

unsafe extern "C" {
    fn tranship_test_run(rseq: *mut u8, aborts: *const AtomicU64) -> !;
    static __rseq_offset: isize;
}

fn sequence() {
    static ABORTS: AtomicU64 = AtomicU64::new(0);
    let child = std::thread::spawn(|| {
        // SAFETY: glibc has registered a structure at this offset from the thread pointer; the sequence touches only that and the counter.
        unsafe {
            let thread: *mut u8;
            asm!("mov {}, fs:0", out(reg) thread, options(nostack, readonly));
            tranship_test_run(thread.offset(__rseq_offset), &raw const ABORTS)
        }
    });
    say(READY);
    for _ in std::io::stdin().lines() {
        assert!(!child.is_finished());
        say(&ABORTS.load(Relaxed).to_string());
    }
}

extern "C" fn step(_: i32) {
    COUNT.fetch_add(1, Relaxed);
}

/// Executes one instruction at a time, which is not to be told from being traced by oneself.
fn steps() {
    handle(libc::SIGTRAP, step as *const () as usize, 0);
    say(READY);
    let begin = Instant::now();
    // SAFETY: the flag makes the kernel send a signal after each instruction, whose handler returns.
    unsafe { asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    let mut turns = 0u64;
    while begin.elapsed() < Duration::from_secs(2) {
        turns += 1;
    }
    // SAFETY: the same flag.
    unsafe { asm!("pushfq", "and qword ptr [rsp], -257", "popfq") };
    say(if COUNT.load(Relaxed) > turns { "stepped" } else { "steps are missing" });
}

/// Whether a process has a userfaultfd open.
pub fn has_userfaultfd(process: &str) -> bool {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|kind| kind.ends_with("anon_inode:[userfaultfd]"))
}

/// Forks all the time, from several threads; each child says if it has a userfaultfd some time later.
fn forks() {
    say(READY);
    let forker = || loop {
        // SAFETY: the child only looks, says and ends; nothing else of this program allocates while it is forked.
        unsafe {
            if libc::fork() == 0 {
                libc::usleep(30_000);
                if has_userfaultfd("self") {
                    libc::write(1, b"a child has a userfaultfd\n".as_ptr().cast(), 26);
                }
                libc::_exit(0);
            }
            libc::usleep(200);
            while libc::waitpid(-1, null_mut(), libc::WNOHANG) > 0 {}
        }
    };
    std::thread::spawn(forker);
    forker();
}

/// Waits for a child that it has vforked, in as many threads as told; one more waits for its input.
fn vfork(threads: u32) {
    let wait = || {
        // SAFETY: as vfork does, by a call that needs no other stack: the child only sleeps and ends.
        unsafe {
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            let child: i64;
            asm!(
                "syscall", "test rax, rax", "jnz 2f",
                // In the child: nanosleep for 600 s, then exit.
                "mov rdi, {time}", "xor esi, esi", "mov eax, 35", "syscall", "xor edi, edi", "mov eax, 60", "syscall",
                "2:",
                time = in(reg) &libc::timespec { tv_sec: 600, tv_nsec: 0 },
                inout("rax") libc::SYS_clone => child, inout("rdi") i64::from(flags) => _, inout("rsi") 0u64 => _,
                inout("rdx") 0u64 => _, in("r10") 0, in("r8") 0, out("rcx") _, out("r11") _,
            );
            say(&format!("its child {child} is gone"));
        }
    };
    for _ in 1..threads {
        std::thread::spawn(wait);
    }
    if threads > 1 {
        say(READY);
        let _ = std::io::stdin().lines().next();
    } else {
        say(READY);
        wait();
    }
}

/// Has as many descriptors as it may.
fn full() {
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    // SAFETY: the calls take numbers and a live structure.
    unsafe {
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        while libc::dup(0) >= 0 {}
    }
    say(READY);
    let _ = std::io::stdin().lines().next();
}

/// Maps a huge file that is named like the vdso, below all else.
fn vdso_file(path: &str) {
    let file = std::fs::File::options().create(true).truncate(false).read(true).write(true).open(path).unwrap();
    const SIZE: usize = 1_100_000_000_000;
    file.set_len(SIZE as u64).unwrap();
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    let place = std::ptr::without_provenance_mut(0x1_0000_0000);
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: nothing is mapped there.
    let mapped = unsafe { libc::mmap(place, SIZE, protection, flags, std::os::fd::AsRawFd::as_raw_fd(&file), 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    say(READY);
    let _ = std::io::stdin().lines().next();
}
