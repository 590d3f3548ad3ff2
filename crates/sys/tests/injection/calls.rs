//! System calls that wait for what never comes.

use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU32;

/// Their names.
pub const CALLS: [&str; 30] = [
    "pause",
    "nanosleep",
    "clock_nanosleep",
    "poll",
    "poll_timeout",
    "ppoll",
    "sigsuspend",
    "sigtimedwait",
    "futex",
    "futex_timeout",
    "accept",
    "accept_timeout",
    "read",
    "recv",
    "recv_timeout",
    "epoll_wait",
    "epoll_timeout",
    "epoll_pwait",
    "semop",
    "wait",
    "clock_nanosleep_relative",
    "select",
    "pselect",
    "futex_bitset",
    "epoll_pwait2",
    "semtimedop",
    "msgrcv",
    "write",
    "flock",
    "setlkw",
];

/// Makes one of them: what it returns. Some wait for ten minutes, the others for ever.
pub fn call(name: &str) -> isize {
    // SAFETY: each call gets what it wants; all pointers are to live values of this frame.
    unsafe {
        let (mut pipe, mut pair) = ([0; 2], [0; 2]);
        libc::pipe(pipe.as_mut_ptr());
        libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr());
        let timeout = libc::timeval { tv_sec: 600, tv_usec: 0 };
        let (long, forever) = (libc::timespec { tv_sec: 600, tv_nsec: 0 }, null::<libc::timespec>());
        let mut poll = libc::pollfd { fd: pipe[0], events: libc::POLLIN, revents: 0 };
        let mut byte = [0u8; 16];
        let mut usr2: libc::sigset_t = zeroed();
        libc::sigemptyset(&raw mut usr2);
        libc::sigaddset(&raw mut usr2, libc::SIGUSR2);
        // Another mask than that of the thread.
        let mut mask = usr2;
        libc::sigprocmask(libc::SIG_BLOCK, null(), &raw mut mask);
        libc::sigdelset(&raw mut mask, libc::SIGUSR2);
        let mut event: libc::epoll_event = zeroed();
        let epoll = libc::epoll_create1(0);
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, pipe[0], &raw mut event);
        let listener = || {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
            let address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: zeroed() };
            libc::bind(fd, (&raw const address).cast(), 2);
            libc::listen(fd, 1);
            fd
        };
        let set_timeout = |fd| {
            let length = size_of::<libc::timeval>() as u32;
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const timeout).cast(), length);
        };
        match name {
            "pause" => libc::pause() as isize,
            "nanosleep" => libc::nanosleep(&raw const long, null_mut()) as isize,
            "clock_nanosleep" => {
                let mut until = long;
                libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut until);
                until.tv_sec += 600;
                libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &raw const until, null_mut()) as isize
            }
            "clock_nanosleep_relative" => {
                libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const long, null_mut()) as isize
            }
            "poll" => libc::poll(&raw mut poll, 1, -1) as isize,
            "poll_timeout" => libc::poll(&raw mut poll, 1, 600_000) as isize,
            "ppoll" => libc::ppoll(&raw mut poll, 1, &raw const long, &raw const mask) as isize,
            "select" | "pselect" => {
                let mut set: libc::fd_set = zeroed();
                libc::FD_SET(pipe[0], &raw mut set);
                let mut timeout = timeout;
                match name {
                    "select" => {
                        libc::select(pipe[0] + 1, &raw mut set, null_mut(), null_mut(), &raw mut timeout) as isize
                    }
                    _ => {
                        let (set, mask) = (&raw mut set, &raw const mask);
                        libc::pselect(pipe[0] + 1, set, null_mut(), null_mut(), &raw const long, mask) as isize
                    }
                }
            }
            "sigsuspend" => libc::sigsuspend(&raw const mask) as isize,
            "sigtimedwait" => libc::sigtimedwait(&raw const usr2, null_mut(), &raw const long) as isize,
            "futex" => {
                let word = AtomicU32::new(0);
                libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 0, forever) as isize
            }
            "futex_timeout" => {
                let word = AtomicU32::new(0);
                libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 0, &raw const long) as isize
            }
            "futex_bitset" => {
                let word = AtomicU32::new(0);
                let mut until = long;
                libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut until);
                until.tv_sec += 600;
                futex_until(&word, &until)
            }
            "accept" => libc::accept(listener(), null_mut(), null_mut()) as isize,
            "accept_timeout" => {
                let fd = listener();
                set_timeout(fd);
                libc::accept(fd, null_mut(), null_mut()) as isize
            }
            "read" => libc::read(pipe[0], byte.as_mut_ptr().cast(), 1),
            "recv" => libc::recv(pair[0], byte.as_mut_ptr().cast(), 1, 0),
            "recv_timeout" => {
                set_timeout(pair[0]);
                libc::recv(pair[0], byte.as_mut_ptr().cast(), 1, 0)
            }
            "epoll_wait" => libc::epoll_wait(epoll, &raw mut event, 1, -1) as isize,
            "epoll_timeout" => libc::epoll_wait(epoll, &raw mut event, 1, 600_000) as isize,
            "epoll_pwait" => libc::epoll_pwait(epoll, &raw mut event, 1, -1, &raw const mask) as isize,
            "epoll_pwait2" => {
                libc::syscall(libc::SYS_epoll_pwait2, epoll, &raw mut event, 1, &raw const long, &raw const mask, 8)
                    as isize
            }
            "semop" | "semtimedop" => {
                let set = libc::semget(libc::IPC_PRIVATE, 1, 0o600);
                let mut operation = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
                let limit = if name == "semop" { null() } else { &raw const long };
                libc::syscall(libc::SYS_semtimedop, set, &raw mut operation, 1, limit) as isize
            }
            "msgrcv" => {
                let queue = libc::msgget(libc::IPC_PRIVATE, 0o600);
                libc::msgrcv(queue, byte.as_mut_ptr().cast(), 8, 0, 0)
            }
            "write" => {
                libc::fcntl(pipe[1], libc::F_SETPIPE_SZ, 4096);
                let page = [0u8; 4096];
                libc::write(pipe[1], page.as_ptr().cast(), page.len());
                libc::write(pipe[1], page.as_ptr().cast(), 1)
            }
            "flock" | "setlkw" => locked(name),
            "wait" => {
                if libc::fork() == 0 {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::sleep(600);
                    libc::_exit(0);
                }
                libc::wait(null_mut()) as isize
            }
            other => panic!("{other}"),
        }
    }
}

/// FUTEX_WAIT_BITSET, whose time is a point in time.
fn futex_until(word: &AtomicU32, until: &libc::timespec) -> isize {
    // SAFETY: the pointers are to live values.
    unsafe {
        let anything = u32::MAX;
        let none = null::<u32>();
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT_BITSET, 0, &raw const *until, none, anything)
            as isize
    }
}

/// Waits for a lock that a child holds, which ends with this process.
fn locked(name: &str) -> isize {
    let path = std::ffi::CString::new(format!("/tmp/lock-{name}")).unwrap();
    // SAFETY: plain system calls; the structure is ours.
    unsafe {
        let open = || libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o600);
        let mut whole: libc::flock = zeroed();
        whole.l_type = libc::F_WRLCK as libc::c_short;
        let (mut ready, own) = ([0; 2], open());
        libc::pipe(ready.as_mut_ptr());
        if libc::fork() == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            let mine = open();
            match name {
                "flock" => libc::flock(mine, libc::LOCK_EX),
                _ => libc::fcntl(mine, libc::F_SETLKW, &raw mut whole),
            };
            libc::write(ready[1], ready.as_ptr().cast(), 1);
            libc::pause();
            libc::_exit(0);
        }
        let mut byte = 0u8;
        libc::read(ready[0], (&raw mut byte).cast(), 1);
        match name {
            "flock" => libc::flock(own, libc::LOCK_EX) as isize,
            _ => libc::fcntl(own, libc::F_SETLKW, &raw mut whole) as isize,
        }
    }
}
