//! What has no safe wrapper: mappings that move and change, and fork. Nothing else in this program is unsafe.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use crate::page::Words;

/// Page size in bytes.
pub const PAGE: usize = 4096;
/// Words in a page.
pub const PAGE_WORDS: usize = PAGE / 8;
/// Size of a huge page in bytes.
pub const HUGE: usize = 2 << 20;

fn check(result: impl Into<i64>, what: &str) -> Result<i64> {
    match result.into() {
        -1 => Err(anyhow::anyhow!("{what}: {}", io::Error::last_os_error())),
        value => Ok(value),
    }
}

/// Forks; the child runs `child` and ends with the status that it returns. Of other threads' locks the child may need only
/// the allocator's, which glibc's fork leaves usable; so `child` must not print, panic or look at the environment.
pub fn fork(child: impl FnOnce() -> i32) -> Result<Pid> {
    // SAFETY: the child has a copy of all memory and goes on in this thread alone; what it may use is said above.
    match check(unsafe { libc::fork() }, "fork")? {
        0 => {
            let status = child();
            // SAFETY: _exit has no preconditions.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(Pid::from_raw(i32::try_from(pid)?)),
    }
}

/// What this process does in its last moment if it touches memory that is not there, given the address that it touched and
/// that of the instruction, relative to this program.
pub type LastWords = fn(usize, usize);

static LAST_WORDS: OnceLock<LastWords> = OnceLock::new();

extern "C" fn crash(_: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both; what they point to is on this stack. What is called may be what was interrupted: then
    // it waits for itself, and the alarm ends the process.
    unsafe {
        libc::alarm(3);
        let context = &*context.cast::<libc::ucontext_t>();
        let instruction = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
        if let Some(say) = LAST_WORDS.get() {
            say((*info).si_addr() as usize, instruction.wrapping_sub(crash as *const () as usize));
        }
        libc::_exit(1)
    }
}

/// Has `say` called if this process is about to end by SIGSEGV or SIGBUS.
pub fn on_crash(say: LastWords) -> Result<()> {
    // Only the first call counts, and all are the same.
    let _ = LAST_WORDS.set(say);
    // SAFETY: zeros are a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = crash as extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND;
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the handler has the signature that SA_SIGINFO asks for, and does not return.
        check(unsafe { libc::sigaction(signal, &raw const action, null_mut()) }, "sigaction")?;
    }
    Ok(())
}

/// The kernel's line about the mapping at an address.
pub fn mapping_of(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let covers = |line: &&str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let parse = |text: &str| usize::from_str_radix(text, 16).ok();
        range.and_then(|(start, end)| Some((parse(start)?..parse(end)?).contains(&address))).unwrap_or(false)
    };
    maps.lines().find(covers).unwrap_or("none").to_owned()
}

/// Mapped memory. It stays when the value is dropped, so that a forked child may simply forget what it does not care for:
/// [`unmap`](Area::unmap) says that it shall go.
#[derive(Debug)]
pub struct Area {
    start: *mut libc::c_void,
    pages: usize,
}

// SAFETY: the memory stays mapped as long as the value lives and is only reached through atomics.
unsafe impl Send for Area {}

impl Area {
    fn map(pages: usize, flags: c_int, fd: c_int) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free place, so no other memory is touched.
        let start = unsafe { libc::mmap(null_mut(), pages * PAGE, protection, flags, fd, 0) };
        ensure!(start != libc::MAP_FAILED, "mmap of {pages} pages: {}", io::Error::last_os_error());
        Ok(Self { start, pages })
    }

    /// Zeros of its own.
    pub fn private(pages: usize) -> Result<Self> {
        Self::map(pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// Zeros that forked children share.
    pub fn shared(pages: usize) -> Result<Self> {
        Self::map(pages, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// The first pages of a file, which must not become shorter than them.
    pub fn of_file(file: BorrowedFd, pages: usize, shared: bool) -> Result<Self> {
        Self::map(pages, if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }, file.as_raw_fd())
    }

    /// Zeros in which huge pages fit: the start is a multiple of their size.
    pub fn huge(pages: usize) -> Result<Self> {
        let whole = Self::private(pages + HUGE / PAGE)?;
        let before = ((whole.start as usize).next_multiple_of(HUGE) - whole.start as usize) / PAGE;
        let mut area = whole;
        if before > 0 {
            let rest = area.split(before);
            std::mem::replace(&mut area, rest).unmap()?;
        }
        if area.pages > pages {
            area.split(pages).unmap()?;
        }
        area.advise(0, pages, libc::MADV_HUGEPAGE)?;
        Ok(area)
    }

    /// A new SysV segment.
    pub fn of_segment(pages: usize) -> Result<(Self, c_int)> {
        // SAFETY: shmget touches no memory.
        let id = check(unsafe { libc::shmget(libc::IPC_PRIVATE, pages * PAGE, 0o600) }, "shmget")? as c_int;
        // SAFETY: the kernel chooses a free place.
        let start = unsafe { libc::shmat(id, null(), 0) };
        ensure!(start as isize != -1, "shmat: {}", io::Error::last_os_error());
        Ok((Self { start, pages }, id))
    }

    /// Detaches a segment and attaches it again, somewhere.
    pub fn attach_again(&mut self, id: c_int) -> Result<()> {
        // SAFETY: the address is that of this value's own attachment; nobody has a reference into it while it is borrowed
        // mutably.
        check(unsafe { libc::shmdt(self.start) }, "shmdt")?;
        // SAFETY: the kernel chooses a free place.
        let start = unsafe { libc::shmat(id, null(), 0) };
        ensure!(start as isize != -1, "shmat: {}", io::Error::last_os_error());
        self.start = start;
        Ok(())
    }

    /// Takes a segment away, for good.
    pub fn end_segment(self, id: c_int) -> Result<()> {
        // SAFETY: as above; the value is gone then.
        check(unsafe { libc::shmdt(self.start) }, "shmdt")?;
        // SAFETY: IPC_RMID touches no memory.
        check(unsafe { libc::shmctl(id, libc::IPC_RMID, null_mut()) }, "shmctl(IPC_RMID)")?;
        Ok(())
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    pub fn address(&self, page: usize) -> usize {
        self.start as usize + page * PAGE
    }

    /// A page's words. Reading needs `PROT_READ`, writing `PROT_WRITE`; without them the process gets SIGSEGV.
    pub fn words(&self, page: usize) -> &Words {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: the page lies within the mapping, is aligned, any bytes are valid words, and atomics may be shared.
        unsafe { &*self.start.cast::<[AtomicU64; PAGE_WORDS]>().add(page) }
    }

    fn range(&self, first: usize, pages: usize) -> (*mut libc::c_void, usize) {
        assert!(first + pages <= self.pages, "pages {first} and {pages} more of {}", self.pages);
        (self.start.wrapping_byte_add(first * PAGE), pages * PAGE)
    }

    pub fn protect(&self, first: usize, pages: usize, protection: c_int) -> Result<()> {
        let (start, length) = self.range(first, pages);
        // SAFETY: the range lies within this value's own mapping.
        check(unsafe { libc::mprotect(start, length, protection) }, "mprotect")?;
        Ok(())
    }

    pub fn advise(&self, first: usize, pages: usize, advice: c_int) -> Result<()> {
        let (start, length) = self.range(first, pages);
        // SAFETY: the range lies within this value's own mapping, whose content may change at any time.
        check(unsafe { libc::madvise(start, length, advice) }, "madvise")?;
        Ok(())
    }

    /// Keeps pages in memory, or no longer. It is no error if there is no permission.
    pub fn lock(&self, first: usize, pages: usize, lock: bool) {
        let (start, length) = self.range(first, pages);
        // SAFETY: the range lies within this value's own mapping; its content does not change.
        let _ = unsafe { if lock { libc::mlock(start, length) } else { libc::munlock(start, length) } };
    }

    /// Moves it to another place. `false`: not now, because the kernel has made several mappings of it.
    pub fn move_away(&mut self) -> Result<bool> {
        let mapping = mapping_of(self.start as usize);
        let end = mapping.split(['-', ' ']).nth(1).and_then(|end| usize::from_str_radix(end, 16).ok());
        if end.is_none_or(|end| end < self.address(self.pages)) {
            return Ok(false);
        }
        // A place that is free for sure: one that was just mapped, and is replaced. Should it not be replaced after all, it
        // must not be unmapped, because the kernel may have done so, and another thread may have mapped something there.
        let target = Self::private(self.pages)?;
        let (length, flags) = (self.pages * PAGE, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        // SAFETY: both ranges belong to this function alone; nobody has a reference into them.
        let start = unsafe { libc::mremap(self.start, length, length, flags, target.start) };
        self.remapped(start, self.pages)
    }

    /// Changes the length, in place or not, as the kernel likes. `false`: not now, as with `move_away`.
    pub fn resize(&mut self, pages: usize) -> Result<bool> {
        // SAFETY: the range is this value's own; nobody has a reference into it while it is borrowed mutably.
        let start = unsafe { libc::mremap(self.start, self.pages * PAGE, pages * PAGE, libc::MREMAP_MAYMOVE) };
        self.remapped(start, pages)
    }

    fn remapped(&mut self, start: *mut libc::c_void, pages: usize) -> Result<bool> {
        if start == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            ensure!(error.raw_os_error() == Some(libc::EFAULT), "mremap: {error}");
            return Ok(false);
        }
        (self.start, self.pages) = (start, pages);
        Ok(true)
    }

    /// Cuts it in two; returns what is behind the first `pages`.
    pub fn split(&mut self, pages: usize) -> Self {
        let (start, length) = self.range(pages, self.pages - pages);
        self.pages = pages;
        Self { start, pages: length / PAGE }
    }

    pub fn unmap(self) -> Result<()> {
        // SAFETY: the range is this value's own mapping and no reference to it outlives the value.
        check(unsafe { libc::munmap(self.start, self.pages * PAGE) }, "munmap")?;
        Ok(())
    }
}
