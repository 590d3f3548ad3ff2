//! Where programs send records to, from all processors, in the order in which they came (Documentation/bpf/ringbuf.rst).

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{MAP_CREATE, MapCreate, made};

const MAP_RING: u32 = 27;
/// Bits of the length in a record's header (linux/bpf.h).
const RING_BUSY: u32 = 1 << 31;
const RING_DISCARDED: u32 = 1 << 30;
/// Bytes of the header.
const RING_HEADER: usize = 8;
const PAGE: usize = 4096;

/// The ring.
#[derive(Debug)]
pub(crate) struct RingBuffer {
    pub(super) map: OwnedFd,
    size: u32,
}

impl RingBuffer {
    /// `size` in bytes: a power of 2, and whole pages.
    pub fn new(size: u32) -> io::Result<Self> {
        let ring = MapCreate { map_type: MAP_RING, key_size: 0, value_size: 0, max_entries: size, map_flags: 0 };
        // SAFETY: the attribute consists of numbers.
        Ok(Self { map: unsafe { made(MAP_CREATE, &ring)? }, size })
    }

    /// What polls as readable when there is a record.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }

    /// What reads it; one at a time.
    pub fn reader(&self) -> io::Result<RingReader> {
        let map = |length: usize, protection, offset| {
            let (any, fd) = (std::ptr::null_mut(), self.map.as_raw_fd());
            // SAFETY: a new mapping at a place of the kernel's choice.
            let base = unsafe { libc::mmap(any, length, protection, libc::MAP_SHARED, fd, offset) };
            NonNull::new(base).filter(|_| base != libc::MAP_FAILED).ok_or_else(io::Error::last_os_error)
        };
        let consumed = map(PAGE, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        let mut reader = RingReader { consumed, produced: None, size: self.size as usize };
        reader.produced = Some(map(reader.produced_length(), libc::PROT_READ, PAGE as libc::off_t)?);
        Ok(reader)
    }
}

/// The mappings through which a ring buffer is read.
#[derive(Debug)]
pub(crate) struct RingReader {
    /// A page that begins with how far it was read.
    consumed: NonNull<c_void>,
    /// A page that begins with how far it was written, then the data, twice in a row.
    produced: Option<NonNull<c_void>>,
    size: usize,
}

// SAFETY: the mappings belong to this value alone, and are the same in every thread.
unsafe impl Send for RingReader {}

impl RingReader {
    fn produced_length(&self) -> usize {
        PAGE + 2 * self.size
    }

    /// Gives each new record.
    pub fn read(&mut self, mut tell: impl FnMut(&[u8])) {
        let Some(produced) = self.produced else { return };
        // SAFETY: both begin a page of the mappings, aligned to 8; the kernel, too, reads and writes them as a whole.
        let (read, written) = unsafe {
            (AtomicU64::from_ptr(self.consumed.as_ptr().cast()), AtomicU64::from_ptr(produced.as_ptr().cast()))
        };
        let mut at = read.load(Ordering::Relaxed);
        let end = written.load(Ordering::Acquire);
        while at < end {
            let offset = PAGE + (at as usize & (self.size - 1));
            // SAFETY: within the data, where a record's header of 8 bytes, aligned to 8, begins; the kernel changes its
            // first half as a whole.
            let header = unsafe { AtomicU32::from_ptr(produced.as_ptr().byte_add(offset).cast()) };
            let header = header.load(Ordering::Acquire);
            if header & RING_BUSY != 0 {
                // It is just being written.
                break;
            }
            let length = (header & !RING_DISCARDED) as usize;
            if header & RING_DISCARDED == 0 {
                // SAFETY: the record lies within the data, which is mapped twice in a row, and does not change until it
                // is read.
                tell(unsafe {
                    let record = produced.as_ptr().byte_add(offset + RING_HEADER).cast::<u8>();
                    std::slice::from_raw_parts(record, length.min(self.size))
                });
            }
            at += (RING_HEADER + length).next_multiple_of(8) as u64;
            read.store(at, Ordering::Release);
        }
    }
}

impl Drop for RingReader {
    fn drop(&mut self) {
        let length = self.produced_length();
        // SAFETY: exactly the mappings that were made for it, to which nobody refers any more.
        unsafe {
            libc::munmap(self.consumed.as_ptr(), PAGE);
            self.produced.map(|produced| libc::munmap(produced.as_ptr(), length));
        }
    }
}
