//! What has no safe wrapper: mappings, guards, poison, segments and fork. Nothing else in this program is unsafe.

use std::ffi::{c_int, c_void};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use anyhow::{Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};

/// Page size in bytes.
pub const PAGE: usize = 4096;
/// The size of a huge page in bytes.
pub const HUGE: usize = 2 << 20;

const GUARD_INSTALL: c_int = 102;
const GUARD_REMOVE: c_int = 103;

fn check(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// A mapping that lives as long as the program.
pub struct Memory {
    start: *mut c_void,
    length: usize,
}

impl Memory {
    /// Maps a file, or anonymous memory; `flags` are more flags of mmap.
    pub fn map(length: usize, file: Option<BorrowedFd<'_>>, shared: bool, flags: c_int) -> Result<Self> {
        let sharing = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, sharing | anonymous | flags);
        let fd = file.map_or(-1, |file| file.as_raw_fd());
        // SAFETY: the kernel chooses a free place, so no other memory is touched.
        let start = unsafe { libc::mmap(null_mut(), length, protection, flags, fd, 0) };
        ensure!(start != libc::MAP_FAILED, "mmap of {length} bytes: {}", io::Error::last_os_error());
        Ok(Self { start, length })
    }

    /// A System V segment; `flags` are more flags of shmget.
    pub fn segment(length: usize, flags: c_int) -> Result<Self> {
        // SAFETY: no memory is touched.
        let id = check(unsafe { libc::shmget(libc::IPC_PRIVATE, length, 0o600 | flags) })?;
        // SAFETY: the kernel chooses a free place.
        let start = unsafe { libc::shmat(id as c_int, null(), 0) };
        ensure!(start as isize != -1, "shmat: {}", io::Error::last_os_error());
        Ok(Self { start, length })
    }

    pub fn len(&self) -> usize {
        self.length
    }

    fn at(&self, offset: usize) -> *mut u64 {
        assert!(offset + 8 <= self.length && offset.is_multiple_of(8));
        self.start.wrapping_byte_add(offset).cast()
    }

    /// The word at `offset`. The page must be readable.
    pub fn read(&self, offset: usize) -> u64 {
        // SAFETY: within the mapping, which is never unmapped, and aligned.
        unsafe { self.at(offset).read_volatile() }
    }

    pub fn write(&self, offset: usize, word: u64) {
        // SAFETY: within the mapping, which is never unmapped, and aligned; nobody has a reference to it.
        unsafe { self.at(offset).write_volatile(word) }
    }

    /// The word at `offset`, or none where nobody may read.
    pub fn read_checked(&self, offset: usize) -> Option<u64> {
        let mut word = [0; 8];
        let remote = RemoteIoVec { base: self.at(offset) as usize, len: word.len() };
        let got = process_vm_readv(nix::unistd::getpid(), &mut [IoSliceMut::new(&mut word)], &[remote]);
        got.is_ok().then(|| u64::from_ne_bytes(word))
    }

    /// Makes a page a guard (its content is gone), or an ordinary page again.
    pub fn guard(&self, page: usize, install: bool) -> Result<()> {
        let advice = if install { GUARD_INSTALL } else { GUARD_REMOVE };
        // SAFETY: within the mapping, to which nobody has a reference.
        check(unsafe { libc::madvise(self.at(page * PAGE).cast(), PAGE, advice) })?;
        Ok(())
    }

    /// Moves the mapping to another place that the kernel chooses.
    pub fn move_away(&mut self) -> Result<()> {
        let place = Self::map(self.length, None, false, 0)?;
        self.move_to(&place)
    }

    /// The same with memory in huge pages.
    pub fn move_away_huge(&mut self) -> Result<()> {
        let place = Self::map(self.length, None, false, libc::MAP_HUGETLB | libc::MAP_NORESERVE)?;
        self.move_to(&place)
    }

    fn move_to(&mut self, place: &Self) -> Result<()> {
        let Self { start, length } = *place;
        // SAFETY: both are this program's own mappings, to which nobody has a reference.
        let moved =
            unsafe { libc::mremap(self.start, length, length, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, start) };
        ensure!(moved == start, "mremap: {}", io::Error::last_os_error());
        self.start = start;
        Ok(())
    }

    /// Makes the mapping larger or smaller, at another place if need be.
    pub fn resize(&mut self, length: usize) -> Result<()> {
        // SAFETY: this program's own mapping, to which nobody has a reference.
        let start = unsafe { libc::mremap(self.start, self.length, length, libc::MREMAP_MAYMOVE) };
        ensure!(start != libc::MAP_FAILED, "mremap to {length} bytes: {}", io::Error::last_os_error());
        (self.start, self.length) = (start, length);
        Ok(())
    }

    /// Makes a run of pages read-only, or writable again.
    pub fn protect(&self, pages: std::ops::Range<usize>, writable: bool) -> Result<()> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        assert!(pages.end * PAGE <= self.length);
        // SAFETY: within the mapping, to which nobody has a reference.
        check(unsafe { libc::mprotect(self.at(pages.start * PAGE).cast(), pages.len() * PAGE, protection) })?;
        Ok(())
    }

    /// Throws the content of a run of bytes away, which is zeros then.
    pub fn discard(&self, offset: usize, length: usize) -> Result<()> {
        assert!(offset + length <= self.length);
        // SAFETY: within the mapping, to which nobody has a reference.
        check(unsafe { libc::madvise(self.at(offset).cast(), length, libc::MADV_DONTNEED) })?;
        Ok(())
    }

    /// Poisons a page, so that nobody can read it any more.
    pub fn poison(&self, offset: usize) -> Result<()> {
        const UFFD_USER_MODE_ONLY: c_int = 1;
        const UFFDIO_API: u64 = 0xc018_aa3f;
        const UFFDIO_REGISTER: u64 = 0xc020_aa00;
        const UFFDIO_POISON: u64 = 0xc020_aa08;
        let page = self.at(offset) as u64;
        let (mut api, mut range, mut poison) = ([0xaa_u64, 0, 0], [page, PAGE as u64, 1, 0], [page, PAGE as u64, 0, 0]);
        // SAFETY: a new descriptor for this value alone.
        let fd = unsafe {
            let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
            OwnedFd::from_raw_fd(check(libc::syscall(libc::SYS_userfaultfd, flags))? as c_int)
        };
        for (request, argument) in [
            (UFFDIO_API, api.as_mut_ptr()),
            (UFFDIO_REGISTER, range.as_mut_ptr()),
            (UFFDIO_POISON, poison.as_mut_ptr()),
        ] {
            // SAFETY: each request's argument has its size; the page is this value's own.
            check(unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) })?;
        }
        Ok(())
    }
}

/// Forks, and has the child tell whether what it sees is right.
pub fn in_child(right: impl FnOnce() -> bool) -> Result<()> {
    // SAFETY: the program has one thread, so the child may do whatever its parent may.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        let status = i32::from(!right());
        // SAFETY: _exit has no preconditions.
        unsafe { libc::_exit(status) }
    }
    let mut status = 0;
    // SAFETY: the status is ours.
    check(unsafe { libc::waitpid(pid as c_int, &raw mut status, 0) })?;
    ensure!(status == 0, "status {status:#x}");
    Ok(())
}

/// Forks a child that looks again and again whether what it sees is right, and ends when it is not. Returns its pid.
pub fn watching_child(right: impl Fn() -> bool) -> Result<c_int> {
    // SAFETY: the program has one thread, so the child may do whatever its parent may.
    let pid = check(unsafe { libc::fork() })? as c_int;
    if pid == 0 {
        while right() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        // SAFETY: _exit has no preconditions.
        unsafe { libc::_exit(1) }
    }
    Ok(pid)
}

/// Whether a child has not ended.
pub fn lives(pid: c_int) -> bool {
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(pid, null_mut(), libc::WNOHANG) == 0 }
}
