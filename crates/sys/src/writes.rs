//! Which pages of a running task were written since one looked last: userfaultfd in asynchronous write-protect mode
//! (Documentation/admin-guide/mm/userfaultfd.rst, "Write-protect notifications"), with PAGEMAP_SCAN to ask.
//!
//! The kernel resolves each first write to a watched page by itself and marks the page; nobody has to answer faults, and
//! if the descriptor is dropped, or its holder dies, the task goes on unwatched.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::remote::Stopped;

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

const _: () = assert!(size_of::<ApiArg>() == 24);
const _: () = assert!(size_of::<RegisterArg>() == 32);

const UFFDIO_API: u64 = nix::request_code_readwrite!(0xAA, 0x3F, size_of::<ApiArg>());
const UFFDIO_REGISTER: u64 = nix::request_code_readwrite!(0xAA, 0x00, size_of::<RegisterArg>());
const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_REGISTER == 0xc020_aa00);

const UFFD_API: u64 = 0xAA;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;
/// Lets a task without CAP_SYS_PTRACE open one; asynchronous write-protection never waits for anybody, so that this limits
/// nothing.
const USER_MODE_ONLY: u64 = 1;

/// The watch over one address space.
#[derive(Debug)]
pub struct WriteWatch {
    fd: OwnedFd,
}

impl WriteWatch {
    /// Has a process open a userfaultfd of its own address space, and takes that over. The process is stopped for about
    /// 0.3 ms. Fails with `Unsupported` on kernels before 6.7 and on other machines than x86-64.
    pub fn inject(process: u32) -> io::Result<Self> {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | USER_MODE_ONLY;
        let fd = Stopped::stop(process)?.open(libc::SYS_userfaultfd, [flags, 0, 0])?;
        let mut arg = ApiArg { api: UFFD_API, features: FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED, ioctls: 0 };
        // SAFETY: the argument is the structure that the request wants.
        if unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut arg) } < 0 {
            // The features are unknown to this kernel.
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { fd })
    }

    /// Watches a range that one or more mappings cover; watching what is watched already changes nothing. `false`: it
    /// cannot be watched (it is gone, or of a kind that cannot).
    pub fn watch(&self, start: u64, end: u64) -> io::Result<bool> {
        let mut arg = RegisterArg { start, len: end - start, mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the argument is the structure that the request wants; it names memory of another address space.
        if unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOMEM | libc::EBUSY | libc::EPERM) => Ok(false),
            // ESRCH: the address space itself is gone (the process has ended, or executed another program).
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::Pagemap;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

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
    fn the_process_goes_on_as_if_nothing_had_been() {
        let mut writer = Writer::start();
        for round in 0..50 {
            drop(WriteWatch::inject(writer.child.id()).unwrap());
            writer.write(round % PAGES);
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(WriteWatch::inject(child.id()).is_err());
    }
}
