//! A few pages of memory to try the kernel with.

use std::io;

const PAGE: usize = 4096;

/// A mapping of its own, zeros at first.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: *mut libc::c_void,
    pages: usize,
}

impl Scratch {
    /// Maps private or shared anonymous memory (`MAP_PRIVATE`, `MAP_SHARED`).
    pub fn map(pages: usize, kind: libc::c_int) -> io::Result<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
        if memory == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { memory, pages }) }
    }

    pub fn start(&self) -> u64 {
        self.memory as u64
    }

    pub fn end(&self) -> u64 {
        self.start() + (self.pages * PAGE) as u64
    }

    pub fn write(&self, page: usize) {
        assert!(page < self.pages);
        // SAFETY: the access lies in the mapping, to which there are no references.
        unsafe { self.memory.cast::<u8>().add(page * PAGE).write_volatile(1) }
    }

    /// Takes the first pages out of the page table.
    pub fn discard(&self, pages: usize) -> io::Result<()> {
        assert!(pages <= self.pages);
        // SAFETY: the range lies in the mapping, to which there are no references.
        match unsafe { libc::madvise(self.memory, pages * PAGE, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Numbers of the pages in a run of addresses.
    pub fn numbers(&self, from: u64, to: u64) -> impl Iterator<Item = usize> + use<> {
        let start = self.start();
        (from..to).step_by(PAGE).map(move |at| (at - start) as usize / PAGE)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made above, to which nobody has a reference.
        unsafe { libc::munmap(self.memory, self.pages * PAGE) };
    }
}
