//! What has no safe wrapper: fork, mappings, signal handlers and queues, SysV objects, seccomp. Nothing else in this
//! program is unsafe.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::unistd::Pid;

/// Page size in bytes.
pub const PAGE: usize = 4096;
/// Words in a page.
pub const PAGE_WORDS: usize = PAGE / 8;

fn check(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Forks; the child runs `child` and ends with the status that it returns. Only for processes with one thread.
pub fn fork(child: impl FnOnce() -> i32) -> Result<Pid> {
    ensure!(std::fs::read_dir("/proc/self/task")?.count() == 1, "a process with several threads does not fork");
    // SAFETY: the process has one thread (just checked, and only this thread could start another), so the child may do
    // whatever its parent may.
    match check(unsafe { libc::fork() })? {
        0 => {
            let status = child();
            // SAFETY: _exit has no preconditions.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(Pid::from_raw(i32::try_from(pid)?)),
    }
}

/// A mapping of its own, seen as words that anybody may change at any time.
pub struct Region {
    start: *mut libc::c_void,
    length: usize,
}

// SAFETY: the memory stays mapped as long as the value lives and is only reached through atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Whether writes are seen by others who map the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    Private,
    Shared,
}

impl Region {
    /// Maps zeros, readable and writable; memory is taken only where it is written.
    pub fn anonymous(length: usize, sharing: Sharing) -> Result<Self> {
        Self::map(length, sharing, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// Maps the first `length` bytes of a file, readable and writable. The file must not be made shorter.
    pub fn of_file(file: BorrowedFd, length: usize, sharing: Sharing) -> Result<Self> {
        Self::map(length, sharing, 0, file.as_raw_fd())
    }

    fn map(length: usize, sharing: Sharing, flags: c_int, fd: c_int) -> Result<Self> {
        assert_eq!(length % PAGE, 0);
        let sharing = if sharing == Sharing::Shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        Self::map_as(length, libc::PROT_READ | libc::PROT_WRITE, sharing | flags, fd)
    }

    /// Reserves addresses for what may be put there later. Nothing of it may be read or written.
    pub fn reserved(length: usize) -> Result<Self> {
        Self::map_as(length, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn map_as(length: usize, protection: c_int, flags: c_int, fd: c_int) -> Result<Self> {
        // SAFETY: the kernel chooses a free place, so no other memory is touched.
        let start = unsafe { libc::mmap(null_mut(), length, protection, flags, fd, 0) };
        ensure!(start != libc::MAP_FAILED, "mmap of {length} bytes: {}", io::Error::last_os_error());
        Ok(Self { start, length })
    }

    /// The memory as words. Reading needs `PROT_READ`, writing `PROT_WRITE`; without them the process gets SIGSEGV.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the range is mapped until drop, page-aligned, any bytes are a valid u64, and atomics may be shared
        // with other threads and processes.
        unsafe { std::slice::from_raw_parts(self.start.cast::<AtomicU64>(), self.length / 8) }
    }

    /// Writes `word(i)` into every word of the pages `pages`.
    pub fn fill(&self, pages: impl IntoIterator<Item = usize>, word: impl Fn(u64) -> u64) {
        for page in pages {
            for i in page * PAGE_WORDS..(page + 1) * PAGE_WORDS {
                self.words()[i].store(word(i as u64), Ordering::Relaxed);
            }
        }
    }

    /// Compares every word of `page` with `word(i)`.
    pub fn verify(&self, page: usize, word: impl Fn(u64) -> u64) -> Result<()> {
        for i in page * PAGE_WORDS..(page + 1) * PAGE_WORDS {
            let (found, right) = (self.words()[i].load(Ordering::Relaxed), word(i as u64));
            ensure!(
                found == right,
                "page {page} of {} at {:p}, word {}: {found:#x} instead of {right:#x}",
                self.pages(),
                self.start,
                i % PAGE_WORDS
            );
        }
        Ok(())
    }

    pub fn pages(&self) -> usize {
        self.length / PAGE
    }

    /// Sets the protection to `libc::PROT_…`.
    pub fn protect(&self, protection: c_int) -> Result<()> {
        // SAFETY: the range is this value's own mapping.
        check(unsafe { libc::mprotect(self.start, self.length, protection) })?;
        Ok(())
    }

    /// Puts `pages` of reserved addresses to use: they can be read and written from now on, and are a mapping of their own.
    pub fn commit(&self, pages: std::ops::Range<usize>) -> Result<()> {
        assert!(pages.end <= self.pages());
        let (start, length) = (self.start.wrapping_byte_add(pages.start * PAGE), pages.len() * PAGE);
        // SAFETY: the range is a part of this value's own mapping.
        check(unsafe { libc::mprotect(start, length, libc::PROT_READ | libc::PROT_WRITE) })?;
        Ok(())
    }

    /// Keeps the pages in memory.
    pub fn lock(&self) -> Result<()> {
        // SAFETY: the range is this value's own mapping.
        check(unsafe { libc::mlock(self.start, self.length) })?;
        Ok(())
    }

    /// The permissions (as `rw-p`) and the flags (as `rd wr mr …`) of the mapping, from `/proc/self/smaps`.
    pub fn kernel_view(&self) -> Result<(String, String)> {
        // The file is read in parts; after a move between two of them they do not fit together, so look once more.
        self.look_up().or_else(|_| self.look_up())
    }

    fn look_up(&self) -> Result<(String, String)> {
        let smaps = std::fs::read_to_string("/proc/self/smaps")?;
        let begin = format!("{:x}-", self.start as usize);
        let mut lines = smaps.lines().skip_while(|l| !l.starts_with(&begin));
        let permissions = lines.next().and_then(|l| l.split(' ').nth(1)).map(str::to_owned);
        let flags = lines.find_map(|l| l.strip_prefix("VmFlags: ")).map(str::to_owned);
        match (permissions, flags) {
            (Some(permissions), Some(flags)) => Ok((permissions, flags)),
            _ => anyhow::bail!("no mapping begins at {:p}", self.start),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping and no reference to it outlives the value.
        unsafe { libc::munmap(self.start, self.length) };
    }
}

static SIGNALS: [AtomicU64; 65] = [const { AtomicU64::new(0) }; 65];

extern "C" fn count(signal: c_int) {
    if let Some(counter) = usize::try_from(signal).ok().and_then(|s| SIGNALS.get(s)) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts the signal from now on instead of its default action.
pub fn count_signal(signal: c_int) -> Result<()> {
    // SAFETY: zeros are a valid sigaction.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = count as extern "C" fn(c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler only adds to an atomic, which is async-signal-safe.
    check(unsafe { libc::sigaction(signal, &raw const action, null_mut()) })?;
    Ok(())
}

/// How often a counted signal has arrived.
pub fn signal_count(signal: c_int) -> u64 {
    SIGNALS[usize::try_from(signal).unwrap_or(0)].load(Ordering::Relaxed)
}

fn signal_set(signals: &[c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set; sigaddset gets an initialised one.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

/// Blocks the signals in this thread.
pub fn block(signals: &[c_int]) -> Result<()> {
    let set = signal_set(signals);
    // SAFETY: the set is initialised; the old one is not asked for.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut()) };
    ensure!(error == 0, "pthread_sigmask: {}", io::Error::from_raw_os_error(error));
    Ok(())
}

/// Takes one pending signal of these that are blocked; its number and the value sent with it. Never waits.
pub fn take_signal(signals: &[c_int]) -> Result<Option<(c_int, i32)>> {
    let set = signal_set(signals);
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: zeros are a valid siginfo_t; set and timeout are initialised.
    let (signal, info) = unsafe {
        let mut info: libc::siginfo_t = zeroed();
        (libc::sigtimedwait(&raw const set, &raw mut info, &raw const now), info)
    };
    match check(signal) {
        // SAFETY: for a signal that was sent (not a fault) the kernel fills in the value; else it is zero.
        Ok(_) => Ok(Some((signal, unsafe { info.si_value() }.sival_ptr as usize as i32))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Queues a signal with a value to this process.
pub fn queue_signal(signal: c_int, value: i32) -> Result<()> {
    let value = libc::sigval { sival_ptr: value as usize as *mut libc::c_void };
    // SAFETY: the value is never used as a pointer.
    check(unsafe { libc::sigqueue(libc::getpid(), signal, value) })?;
    Ok(())
}

/// Sets an interval timer (`libc::ITIMER_…`).
pub fn set_interval_timer(which: c_int, first: Duration, interval: Duration) -> Result<()> {
    let time = |d: Duration| libc::timeval { tv_sec: d.as_secs().cast_signed(), tv_usec: i64::from(d.subsec_micros()) };
    let new = libc::itimerval { it_value: time(first), it_interval: time(interval) };
    // SAFETY: SYS_setitimer reads one itimerval and may write none.
    check(unsafe { libc::syscall(libc::SYS_setitimer, which, &raw const new, null::<libc::itimerval>()) })?;
    Ok(())
}

/// What is left of an interval timer, and its interval.
pub fn interval_timer(which: c_int) -> Result<(Duration, Duration)> {
    let time = |t: libc::timeval| Duration::new(t.tv_sec.cast_unsigned(), t.tv_usec as u32 * 1000);
    // SAFETY: zeros are a valid itimerval; SYS_getitimer writes one.
    let now = unsafe {
        let mut now: libc::itimerval = zeroed();
        check(libc::syscall(libc::SYS_getitimer, which, &raw mut now))?;
        now
    };
    Ok((time(now.it_value), time(now.it_interval)))
}

/// A new SysV shared memory segment of `length` bytes.
pub fn shm_create(length: usize) -> Result<c_int> {
    // SAFETY: shmget touches no memory.
    Ok(check(unsafe { libc::shmget(libc::IPC_PRIVATE, length, 0o600) })? as c_int)
}

/// Attaches a segment; it must be at least `length` bytes long, and stays attached as long as the process lives.
pub fn shm_attach(id: c_int, length: usize) -> Result<&'static [AtomicU64]> {
    // SAFETY: the kernel chooses a free place.
    let start = unsafe { libc::shmat(id, null(), 0) };
    ensure!(start as isize != -1, "shmat: {}", io::Error::last_os_error());
    let size = shm_info(id)?.shm_segsz;
    ensure!(size >= length, "the segment has {size} bytes");
    // SAFETY: the range is mapped and never detached; atomics may be shared with other processes.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), length / 8) })
}

/// Has a segment go away when nobody has it attached any more.
pub fn shm_remove(id: c_int) -> Result<()> {
    // SAFETY: IPC_RMID touches no memory.
    check(unsafe { libc::shmctl(id, libc::IPC_RMID, null_mut()) })?;
    Ok(())
}

/// Whether it will.
pub fn shm_is_removed(id: c_int) -> Result<bool> {
    const SHM_DEST: u32 = 0o1000;
    Ok(u32::from(shm_info(id)?.shm_perm.mode) & SHM_DEST != 0)
}

/// What the kernel knows of a segment.
fn shm_info(id: c_int) -> Result<libc::shmid_ds> {
    // SAFETY: zeros are a valid shmid_ds; IPC_STAT writes one.
    unsafe {
        let mut info: libc::shmid_ds = zeroed();
        check(libc::shmctl(id, libc::IPC_STAT, &raw mut info))?;
        Ok(info)
    }
}

/// A new set of SysV semaphores with these values.
pub fn sem_create(values: &[u16]) -> Result<c_int> {
    // SAFETY: semget touches no memory.
    let id = check(unsafe { libc::semget(libc::IPC_PRIVATE, c_int::try_from(values.len())?, 0o600) })? as c_int;
    for (number, value) in values.iter().enumerate() {
        // SAFETY: SETVAL takes an int and touches no memory.
        check(unsafe { libc::semctl(id, c_int::try_from(number)?, libc::SETVAL, c_int::from(*value)) })?;
    }
    Ok(id)
}

/// The value of one semaphore.
pub fn sem_value(id: c_int, number: usize) -> Result<u16> {
    // SAFETY: GETVAL touches no memory.
    Ok(u16::try_from(check(unsafe { libc::semctl(id, c_int::try_from(number)?, libc::GETVAL) })?)?)
}

/// Adds to one semaphore without waiting.
pub fn sem_add(id: c_int, number: u16, add: i16) -> Result<()> {
    let mut operation = libc::sembuf { sem_num: number, sem_op: add, sem_flg: libc::IPC_NOWAIT as i16 };
    // SAFETY: one operation is passed and lives across the call.
    check(unsafe { libc::semop(id, &raw mut operation, 1) })?;
    Ok(())
}

/// A message of a SysV queue.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    kind: libc::c_long,
    body: [u8; 64],
}

/// A new SysV message queue.
pub fn msg_create() -> Result<c_int> {
    // SAFETY: msgget touches no memory.
    Ok(check(unsafe { libc::msgget(libc::IPC_PRIVATE, 0o600) })? as c_int)
}

/// Sends a message without waiting.
pub fn msg_send(id: c_int, kind: i64, body: [u8; 64]) -> Result<()> {
    let message = Message { kind, body };
    // SAFETY: the message is as long as is said.
    check(unsafe { libc::msgsnd(id, (&raw const message).cast(), 64, libc::IPC_NOWAIT) })?;
    Ok(())
}

/// Takes the first message of a kind (0: of any) without waiting.
pub fn msg_receive(id: c_int, kind: i64) -> Result<(i64, [u8; 64])> {
    let mut message = Message { kind: 0, body: [0; 64] };
    // SAFETY: there is room for as many bytes as is said.
    let length = check(unsafe { libc::msgrcv(id, (&raw mut message).cast(), 64, kind, libc::IPC_NOWAIT) } as i64)?;
    ensure!(length == 64, "a message of {length} bytes");
    Ok((message.kind, message.body))
}

/// Lets the system call `number` fail with `errno` from now on, in this process.
pub fn deny_system_call(number: libc::c_long, errno: c_int) -> Result<()> {
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::try_from(number)?, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno.cast_unsigned(), 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    nix::sys::prctl::set_no_new_privs()?;
    // SAFETY: the program points to as many instructions as it says, and the kernel copies it.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) })?;
    Ok(())
}

/// Gives up one capability (its number) of this thread: effective, permitted and inheritable.
pub fn drop_capability(number: u32) -> Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = [VERSION_3, 0];
    let mut sets = [0u32; 6];
    // SAFETY: version 3 reads and writes two structures of three words.
    check(unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) })?;
    for set in &mut sets[number as usize / 32 * 3..][..3] {
        *set &= !(1 << (number % 32));
    }
    // SAFETY: as above.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()) })?;
    Ok(())
}

/// Sets the nice value of this process.
pub fn set_nice(value: c_int) -> Result<()> {
    // SAFETY: setpriority touches no memory.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) })?;
    Ok(())
}

/// Columns and rows of a terminal.
pub fn window_size(terminal: BorrowedFd) -> Result<(u16, u16)> {
    // SAFETY: zeros are a valid winsize; TIOCGWINSZ writes one.
    let size = unsafe {
        let mut size: libc::winsize = zeroed();
        check(libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size))?;
        size
    };
    Ok((size.ws_col, size.ws_row))
}

/// A descriptor that has just been received in a message, as a file.
pub fn received_file(fd: std::os::fd::RawFd) -> std::fs::File {
    // SAFETY: the kernel has just made this descriptor for the receiver and nobody else knows its number.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

/// A new io_uring with eight entries.
pub fn io_uring() -> Result<std::os::fd::OwnedFd> {
    // struct io_uring_params of linux/io_uring.h.
    let mut parameters = [0u8; 120];
    // SAFETY: the kernel reads and writes one io_uring_params, which is as long as this.
    let fd = check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, parameters.as_mut_ptr()) })?;
    // SAFETY: the kernel has just made this descriptor and nobody else knows its number.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(i32::try_from(fd)?) })
}

fn set_ip_option<T>(socket: BorrowedFd<'_>, name: c_int, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `value`, which lives through the call.
    let done =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, name, (&raw const *value).cast(), length) };
    check(done).map(drop)
}

/// Joins a multicast group, for what one source sends only, on the interface that has this address as well.
pub fn join_source(socket: BorrowedFd<'_>, group: Ipv4Addr, source: Ipv4Addr) -> io::Result<()> {
    let address = |of: Ipv4Addr| libc::in_addr { s_addr: u32::from_ne_bytes(of.octets()) };
    let request = libc::ip_mreq_source {
        imr_multiaddr: address(group),
        imr_interface: address(source),
        imr_sourceaddr: address(source),
    };
    set_ip_option(socket, libc::IP_ADD_SOURCE_MEMBERSHIP, &request)
}

/// Has a socket send to groups on the interface that has this address.
pub fn send_multicast_from(socket: BorrowedFd<'_>, address: Ipv4Addr) -> io::Result<()> {
    set_ip_option(socket, libc::IP_MULTICAST_IF, &address.octets())
}
