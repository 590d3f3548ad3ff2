//! Which pages of a running task were written since one looked last: userfaultfd in asynchronous write-protect mode
//! (Documentation/admin-guide/mm/userfaultfd.rst, "Write-protect notifications"), with PAGEMAP_SCAN to ask.
//!
//! The kernel resolves each first write to a watched page by itself and marks the page; nobody has to answer faults, and
//! if the descriptor is dropped, or its holder dies, the task goes on unwatched.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use crate::pagemap::Pagemap;
use crate::scratch::Scratch;
use crate::userfault::{Event, Userfault};

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArg {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct ProtectArg {
    start: u64,
    len: u64,
    mode: u64,
}

const _: () = assert!(size_of::<ProtectArg>() == 24);
const _: () = assert!(size_of::<ApiArg>() == 24);
const _: () = assert!(size_of::<RegisterArg>() == 32);

pub(crate) const UFFDIO_API: u64 = nix::request_code_readwrite!(0xAA, 0x3F, size_of::<ApiArg>());
pub(crate) const UFFDIO_REGISTER: u64 = nix::request_code_readwrite!(0xAA, 0x00, size_of::<RegisterArg>());
const UFFDIO_WRITEPROTECT: u64 = nix::request_code_readwrite!(0xAA, 0x06, size_of::<ProtectArg>());
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xc018_aa06);
const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_REGISTER == 0xc020_aa00);

pub(crate) const UFFD_API: u64 = 0xAA;
const FEATURE_EVENT_FORK: u64 = 1 << 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
/// Lets a task without CAP_SYS_PTRACE open one; asynchronous write-protection never waits for anybody, so that this limits
/// nothing.
const USER_MODE_ONLY: u64 = 1;
const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | USER_MODE_ONLY;

/// The watch over one address space.
#[derive(Debug)]
pub struct WriteWatch {
    fd: Userfault,
}

impl AsFd for WriteWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl WriteWatch {
    /// Has a process open a userfaultfd of its own address space, and takes that over. One of its threads is stopped for about
    /// 0.3 ms. Fails with `Unsupported` on kernels before 6.7, on other machines than x86-64, and for a process that cannot do that.
    pub fn inject(process: u32) -> io::Result<Self> {
        Self::over(Self::open_in(process)?, 0)
    }

    /// The same, and [`Self::next_event`] returns an event each time the process forks, and each time it moves or unmaps a registered
    /// mapping or throws away pages of it or their content. The process waits until the event has been read.
    pub fn inject_telling_events(process: u32) -> io::Result<Self> {
        let events = FEATURE_EVENT_FORK | FEATURE_EVENT_REMAP | FEATURE_EVENT_REMOVE | FEATURE_EVENT_UNMAP;
        Self::over(Self::open_in(process)?, events)
    }

    #[cfg(target_arch = "x86_64")]
    fn open_in(process: u32) -> io::Result<OwnedFd> {
        crate::remote::open_userfaultfd(process, FLAGS)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn open_in(_process: u32) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn over(fd: OwnedFd, more: u64) -> io::Result<Self> {
        let features = FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED | more;
        let mut arg = ApiArg { api: UFFD_API, features, ioctls: 0 };
        // SAFETY: the argument is the structure that the request wants.
        if unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut arg) } < 0 {
            // The features are unknown to this kernel.
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { fd: fd.into() })
    }

    /// What has happened to the address space, if it tells.
    pub fn next_event(&self) -> io::Result<Option<Event>> {
        self.fd.next_event()
    }

    /// The watch of a child of which an event has told.
    ///
    /// # Errors
    /// There is no userfaultfd under that number.
    ///
    /// # Safety
    /// As of [`Userfault::child`].
    pub unsafe fn child(&self, number: RawFd) -> io::Result<Userfault> {
        // SAFETY: by contract of this function.
        unsafe { self.fd.child(number) }
    }

    /// Watches a range that one or more mappings cover; watching what is watched already changes nothing. `false`: it
    /// cannot be watched (it is gone, or of a kind that cannot). ESRCH: the whole address space is gone, because the process
    /// has ended or executed another program.
    pub fn watch(&self, start: u64, end: u64) -> io::Result<bool> {
        let mut arg = RegisterArg { start, len: end - start, mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the argument is the structure that the request wants; it names memory of another address space.
        if unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINVAL | libc::EBUSY | libc::EPERM) => Ok(false),
            // The kernel's word for an address space that is gone: the process has ended, or executed another program.
            Some(libc::ENOMEM) => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => Err(error),
        }
    }

    /// Write-protects pages of a range that is watched, also those that are not there yet: [`Pagemap::unproven`] tells of
    /// those that were written since.
    pub fn protect(&self, start: u64, end: u64) -> io::Result<()> {
        self.set_protection(start, end, WRITEPROTECT_MODE_WP)
    }

    /// Has all pages of a range that is watched count as written. Where the kernel ended an earlier watch by itself, pages
    /// kept their marks and became writable under them: such a page is never protected again, and tells of no write.
    pub fn forget(&self, start: u64, end: u64) -> io::Result<()> {
        self.set_protection(start, end, 0)
    }

    fn set_protection(&self, start: u64, end: u64, mode: u64) -> io::Result<()> {
        let mut arg = ProtectArg { start, len: end - start, mode };
        // SAFETY: the argument is the structure that the request wants; it names memory of another address space.
        match unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut arg) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether this kernel tells of writes to private memory, and processes can be made to open what it takes: Linux 6.7 on
    /// x86-64. Tried once, on this process.
    pub fn works_here() -> bool {
        static WORKS: OnceLock<bool> = OnceLock::new();
        *WORKS.get_or_init(|| cfg!(target_arch = "x86_64") && try_private().unwrap_or(false))
    }

    /// Whether this kernel tells all that there is to know of writes to shared memory: that a page was written also if it
    /// was thrown out of the page table since, and that one was not also if it was not there. Tried once, on this process.
    pub fn tells_of_shared_memory() -> bool {
        static TELLS: OnceLock<bool> = OnceLock::new();
        *TELLS.get_or_init(|| try_shared().unwrap_or(false))
    }

    /// One over this process.
    fn own() -> io::Result<Self> {
        // SAFETY: the call takes a number and returns a new descriptor, owned by nobody else, or an error.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, FLAGS);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd as i32)
        };
        Self::over(fd, FEATURE_EVENT_FORK)
    }
}

/// Writes to one of some pages that are watched.
fn try_private() -> io::Result<bool> {
    let scratch = Scratch::map(4, libc::MAP_PRIVATE)?;
    (0..4).for_each(|page| scratch.write(page));
    let watch = WriteWatch::own()?;
    let pagemap = Pagemap::open_writable(std::process::id())?;
    let armed = watch.watch(scratch.start(), scratch.end())?;
    pagemap.written(scratch.start(), scratch.end(), armed, |_, _| {})?;
    scratch.write(1);
    let mut written = Vec::new();
    pagemap.written(scratch.start(), scratch.end(), armed, |from, to| written.extend(scratch.numbers(from, to)))?;
    Ok(armed && written == [1])
}

/// Throws a page that was written and one that was not out of the page table; a third one is never touched.
fn try_shared() -> io::Result<bool> {
    let scratch = Scratch::map(4, libc::MAP_SHARED)?;
    let watch = WriteWatch::own()?;
    (0..2).for_each(|page| scratch.write(page));
    if !watch.watch(scratch.start(), scratch.end())? {
        return Ok(false);
    }
    watch.protect(scratch.start(), scratch.end())?;
    [0, 3].into_iter().for_each(|page| scratch.write(page));
    // The content of shared memory stays.
    scratch.discard(2)?;
    let mut written = Vec::new();
    let found = |from, to| written.extend(scratch.numbers(from, to));
    Pagemap::open(std::process::id())?.unproven(scratch.start(), scratch.end(), found)?;
    Ok(written == [0, 3])
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// A process that holds pages and writes to one of them each time it is told to.
    struct Writer {
        child: Child,
        start: u64,
    }

    const PAGES: u64 = 64;
    const PAGE: u64 = 4096;

    impl Writer {
        fn start() -> Self {
            let code = "
import ctypes, mmap, sys, os
n = 64; m = mmap.mmap(-1, (n + 2) * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
a = ctypes.addressof(ctypes.c_char.from_buffer(m))
for i in range(n): m[i * 4096] = 1
print(a, flush=True)
for line in sys.stdin:
    m[int(line) * 4096] = 2
    print('ok', flush=True)
";
            let mut child = Command::new("python3")
                .args(["-c", code])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            Self { child, start: line.trim().parse().unwrap() }
        }

        fn write(&mut self, page: u64) {
            writeln!(self.child.stdin.as_mut().unwrap(), "{page}").unwrap();
            let mut line = String::new();
            BufReader::new(self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line.trim(), "ok");
        }
    }

    impl Drop for Writer {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn just_what_was_written_between_two_looks_is_found() {
        let mut writer = Writer::start();
        let (start, end) = (writer.start, writer.start + PAGES * PAGE);
        let watch = WriteWatch::inject(writer.child.id()).unwrap();
        assert!(watch.watch(start, end).unwrap());
        let pagemap = Pagemap::open_writable(writer.child.id()).unwrap();
        let look = |rearm| {
            let mut pages = Vec::new();
            pagemap
                .written(start, end, rearm, |s, e| pages.extend((s..e).step_by(4096).map(|a| (a - start) / PAGE)))
                .unwrap();
            pages
        };
        assert_eq!(look(true).len() as u64, PAGES, "at first everything counts as written");
        assert!(look(true).is_empty());
        writer.write(3);
        writer.write(17);
        assert_eq!(look(false), [3, 17]);
        assert_eq!(look(true), [3, 17], "a look that does not re-arm changes nothing");
        writer.write(17);
        assert_eq!(look(true), [17]);
        drop(watch);
        writer.write(5);
    }

    #[test]
    fn this_kernel_tells_of_writes_to_shared_memory() {
        assert!(WriteWatch::tells_of_shared_memory());
    }

    #[test]
    fn the_process_goes_on_as_if_nothing_had_been() {
        let mut writer = Writer::start();
        for round in 0..50 {
            drop(WriteWatch::inject(writer.child.id()).unwrap());
            writer.write(round % PAGES);
        }
    }

    #[test]
    fn a_process_that_a_signal_has_stopped_is_watched_and_stays_stopped() {
        let mut writer = Writer::start();
        let pid = writer.child.id();
        let signal = |signal| kill(Pid::from_raw(pid as i32), signal).unwrap();
        let await_stop = || {
            let deadline = Instant::now() + Duration::from_secs(5);
            while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ") {
                assert!(Instant::now() < deadline, "it is not stopped");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for round in 0..20 {
            signal(Signal::SIGSTOP);
            await_stop();
            let watch = WriteWatch::inject(pid).unwrap();
            assert!(watch.watch(writer.start, writer.start + PAGES * PAGE).unwrap());
            await_stop();
            signal(Signal::SIGCONT);
            writer.write(round);
        }
    }

    #[test]
    fn an_address_space_that_was_left_for_another_program_is_an_error() {
        let mut child = Command::new("sh")
            .args(["-c", "read line; exec sleep 60"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // Its program is being loaded.
        let maps = loop {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
            if maps.contains("[vdso]") {
                break maps;
            }
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        };
        let watch = WriteWatch::inject(child.id()).unwrap();
        let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap().split(' ').next().unwrap();
        let (start, end) = stack.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        assert!(watch.watch(start, end).unwrap());
        writeln!(child.stdin.as_mut().unwrap()).unwrap();
        let name = format!("/proc/{}/comm", child.id());
        while std::fs::read_to_string(&name).unwrap().trim() != "sleep" {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        let error = watch.watch(start, end).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(WriteWatch::inject(child.id()).is_err());
    }
}
