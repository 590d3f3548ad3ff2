//! Events of a whole machine from perf_event_open(2): a ring for each processor, which the kernel writes and this process reads.
//! Nothing is left of it when the reader dies.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;
/// Bytes of each processor's ring: some ten thousand events.
const RING: usize = 1 << 20;

/// The first version of `struct perf_event_attr` (linux/perf_event.h); the kernel takes the rest for zero.
#[repr(C)]
pub(crate) struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

const DISABLED: u64 = 1;
const WATERMARK: u64 = 1 << 14;
const FLAG_CLOEXEC: libc::c_ulong = 1 << 3;
const RECORD_LOST: u32 = 2;
const IOC_ENABLE: libc::c_ulong = 0x2400;
const IOC_SET_OUTPUT: libc::c_ulong = 0x2405;
/// Offsets of the positions in the ring's first page.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

impl Attributes {
    /// Of an event that is still off, each occurrence of which counts.
    pub fn new(kind: u32, config: u64, sample_type: u64, flags: u64) -> Self {
        Self {
            kind,
            size: size_of::<Attributes>() as u32,
            config,
            sample_period: 1,
            sample_type,
            read_format: 0,
            flags: flags | DISABLED | WATERMARK,
            wakeup: (RING / 4) as u32,
            breakpoint: 0,
            config1: 0,
        }
    }
}

/// Opens an event of everything that runs on a processor.
pub(crate) fn open(attributes: &Attributes, cpu: i32) -> io::Result<OwnedFd> {
    // SAFETY: the attributes are the structure that the call wants, of the size that they say; it returns a new descriptor that
    // nobody else owns, or an error.
    unsafe {
        let fd = libc::syscall(libc::SYS_perf_event_open, &raw const *attributes, -1, cpu, -1, FLAG_CLOEXEC);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}

/// What a request answered.
pub(crate) fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// One processor's events, in the order in which they came.
#[derive(Debug)]
pub(crate) struct Ring {
    base: *mut u8,
    events: Vec<OwnedFd>,
}

// SAFETY: the mapping belongs to this value alone, and is the same in every thread.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring for `first` into which the others write, too. All of them begin.
    pub fn new(first: OwnedFd, others: impl IntoIterator<Item = OwnedFd>) -> io::Result<Self> {
        let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, Self::LENGTH);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, first.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut ring = Self { base: base.cast(), events: vec![first] };
        for other in others {
            // SAFETY: the request takes a descriptor.
            checked(unsafe { libc::ioctl(other.as_raw_fd(), IOC_SET_OUTPUT, ring.events[0].as_raw_fd()) })?;
            ring.events.push(other);
        }
        for event in &ring.events {
            // SAFETY: the request takes no argument but this 0.
            checked(unsafe { libc::ioctl(event.as_raw_fd(), IOC_ENABLE, 0) })?;
        }
        Ok(ring)
    }

    const LENGTH: usize = PAGE + RING;

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: within the mapping's first page, aligned to 8; the kernel, too, reads and writes it as a whole.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// Copies bytes out of the ring.
    fn copy(&self, position: u64, into: &mut [u8]) {
        for (at, byte) in (position..).zip(into) {
            // SAFETY: within the mapping's data, which the kernel does not write between tail and head.
            *byte = unsafe { self.base.add(PAGE + (at as usize & (RING - 1))).read_volatile() };
        }
    }

    /// Gives each record's kind and what follows its header; what `tell` returns, and whether any were lost, decides whether
    /// that was all.
    pub fn read(&mut self, mut tell: impl FnMut(u32, &[u8]) -> bool) -> bool {
        let head = self.position(DATA_HEAD).load(Ordering::Acquire);
        let mut tail = self.position(DATA_TAIL).load(Ordering::Relaxed);
        let (mut complete, mut record) = (true, Vec::new());
        while head.wrapping_sub(tail) >= 8 {
            let mut header = [0; 8];
            self.copy(tail, &mut header);
            let [a, b, c, d, _, _, low, high] = header;
            let (kind, size) = (u32::from_ne_bytes([a, b, c, d]), u64::from(u16::from_ne_bytes([low, high])));
            if size < 8 {
                return false;
            }
            record.resize(size as usize - 8, 0);
            self.copy(tail + 8, &mut record);
            complete &= kind != RECORD_LOST && tell(kind, &record);
            tail = tail.wrapping_add(size);
        }
        self.position(DATA_TAIL).store(tail, Ordering::Release);
        complete
    }
}

impl AsFd for Ring {
    /// What polls as readable when it is filling up.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events[0].as_fd()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nobody refers to it any more.
        unsafe { libc::munmap(self.base.cast(), Self::LENGTH) };
    }
}
