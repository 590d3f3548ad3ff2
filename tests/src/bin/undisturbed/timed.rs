//! System calls that wait for a limited time for what never comes: what each returns, and how long it takes.

use std::arch::asm;
use std::io::Error;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// Their names.
pub const TIMED: [&str; 18] = [
    "nanosleep",
    "nanosleep_registers",
    "clock_nanosleep",
    "clock_nanosleep_realtime",
    "clock_nanosleep_until",
    "poll",
    "poll_registers",
    "ppoll",
    "select",
    "pselect",
    "futex",
    "futex_until",
    "epoll_wait",
    "epoll_pwait2",
    "sigtimedwait",
    "semtimedop",
    "recv",
    "accept",
];

/// How a call has ended.
pub struct Ended {
    pub returned: isize,
    pub errno: i32,
    pub after: Duration,
}

/// Makes one of them, which waits so many seconds.
pub fn call(name: &str, seconds: i64) -> Ended {
    let begun = Instant::now();
    let returned = wait(name, seconds);
    let errno = Error::last_os_error().raw_os_error().unwrap_or(0);
    Ended { returned, errno, after: begun.elapsed() }
}

fn wait(name: &str, seconds: i64) -> isize {
    let time = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
    let limit = libc::timeval { tv_sec: seconds, tv_usec: 0 };
    let milliseconds = seconds as i32 * 1000;
    // SAFETY: each call gets what it wants; all pointers are to live values of this frame.
    unsafe {
        let (mut pipe, mut pair) = ([0; 2], [0; 2]);
        libc::pipe(pipe.as_mut_ptr());
        libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr());
        let mut poll = libc::pollfd { fd: pipe[0], events: libc::POLLIN, revents: 0 };
        let mut usr2: libc::sigset_t = zeroed();
        libc::sigaddset(&raw mut usr2, libc::SIGUSR2);
        let mut event: libc::epoll_event = zeroed();
        let epoll = libc::epoll_create1(0);
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, pipe[0], &raw mut event);
        let until = |clock| {
            let mut until = time;
            libc::clock_gettime(clock, &raw mut until);
            until.tv_sec += seconds;
            until
        };
        let limited = |fd| {
            let length = size_of::<libc::timeval>() as u32;
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const limit).cast(), length);
            fd
        };
        let word = AtomicU32::new(0);
        let mut readable: libc::fd_set = zeroed();
        libc::FD_SET(pipe[0], &raw mut readable);
        let mut left = time;
        match name {
            "nanosleep" => libc::nanosleep(&raw const time, &raw mut left) as isize,
            "nanosleep_registers" => by_registers(libc::SYS_nanosleep, [&raw const time as u64, 0, 77]),
            // These return the error.
            "clock_nanosleep" => {
                -libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const time, &raw mut left) as isize
            }
            "clock_nanosleep_realtime" => {
                -libc::clock_nanosleep(libc::CLOCK_REALTIME, 0, &raw const time, null_mut()) as isize
            }
            "clock_nanosleep_until" => {
                let until = until(libc::CLOCK_MONOTONIC);
                let flags = libc::TIMER_ABSTIME;
                -libc::clock_nanosleep(libc::CLOCK_MONOTONIC, flags, &raw const until, null_mut()) as isize
            }
            "poll" => libc::poll(&raw mut poll, 1, milliseconds) as isize,
            "poll_registers" => by_registers(libc::SYS_poll, [&raw mut poll as u64, 1, milliseconds as u64]),
            "ppoll" => libc::ppoll(&raw mut poll, 1, &raw const time, null()) as isize,
            "select" => {
                let mut limit = limit;
                libc::select(pipe[0] + 1, &raw mut readable, null_mut(), null_mut(), &raw mut limit) as isize
            }
            "pselect" => {
                let readable = &raw mut readable;
                libc::pselect(pipe[0] + 1, readable, null_mut(), null_mut(), &raw const time, null()) as isize
            }
            "futex" => libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 0, &raw const time) as isize,
            "futex_until" => {
                let (until, operation) = (until(libc::CLOCK_MONOTONIC), libc::FUTEX_WAIT_BITSET);
                let none = null::<u32>();
                libc::syscall(libc::SYS_futex, word.as_ptr(), operation, 0, &raw const until, none, u32::MAX) as isize
            }
            "epoll_wait" => libc::epoll_wait(epoll, &raw mut event, 1, milliseconds) as isize,
            "epoll_pwait2" => {
                let none = null::<libc::sigset_t>();
                libc::syscall(libc::SYS_epoll_pwait2, epoll, &raw mut event, 1, &raw const time, none, 8) as isize
            }
            "sigtimedwait" => libc::sigtimedwait(&raw const usr2, null_mut(), &raw const time) as isize,
            "semtimedop" => {
                let set = libc::semget(libc::IPC_PRIVATE, 1, 0o600);
                let mut operation = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
                libc::syscall(libc::SYS_semtimedop, set, &raw mut operation, 1, &raw const time) as isize
            }
            "recv" => {
                let mut byte = 0u8;
                libc::recv(limited(pair[0]), (&raw mut byte).cast(), 1, 0)
            }
            "accept" => {
                let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
                let address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: zeroed() };
                libc::bind(fd, (&raw const address).cast(), 2);
                libc::listen(fd, 1);
                libc::accept(limited(fd), null_mut(), null_mut()) as isize
            }
            other => panic!("{other}"),
        }
    }
}

/// Makes a system call as compilers inline it, which rely on its arguments being in their registers afterwards. -1000 if one is not.
fn by_registers(number: libc::c_long, arguments: [u64; 3]) -> isize {
    let mut returned = number;
    let mut after = arguments;
    // SAFETY: the callers pass what the call wants.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") returned,
            inlateout("rdi") after[0],
            inlateout("rsi") after[1],
            inlateout("rdx") after[2],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if after == arguments { returned as isize } else { -1000 }
}
