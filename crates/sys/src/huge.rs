//! Transparent huge pages (Documentation/admin-guide/mm/transhuge.rst).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::process;

/// Bytes of a huge page, where pages have 4 KiB.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Whether this node's administrator wants none: `/sys/kernel/mm/transparent_hugepage/enabled` is `never`, or not there.
pub fn are_unwanted() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").map_or(true, |text| text.contains("[never]"))
}

/// Makes huge pages in another process.
#[derive(Debug)]
pub struct Collapser {
    process: OwnedFd,
}

impl Collapser {
    /// For one process.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { process: process::descriptor(pid)? })
    }

    /// Puts the small pages at `address`, a multiple of [`HUGE_PAGE`], into a huge one, content and all; takes about 0.6 ms, in which the
    /// process cannot change its mappings nor have pages supplied. Linux 6.1.
    ///
    /// # Errors
    /// ESRCH if the process is gone; others if these pages cannot be joined, now or ever.
    pub fn collapse(&self, address: u64) -> io::Result<()> {
        let range = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: HUGE_PAGE as usize };
        // SAFETY: the kernel reads one range, which names memory of the other process; its content stays what it is.
        let done = unsafe {
            let process = self.process.as_raw_fd();
            libc::syscall(libc::SYS_process_madvise, process, &raw const range, 1, libc::MADV_COLLAPSE, 0)
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
