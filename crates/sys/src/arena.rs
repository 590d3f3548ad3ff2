//! Memory that is filled by one process and read by another: an unnamed file in memory with a bump allocator.
//!
//! The agent receives pages into slices of the arena; the pager, which has the same file, copies them from there into
//! the restored tasks. Nothing in it can reach a disk (but for swap, see `docs/failure-model.md`).

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use self::ahead::Ahead;

mod ahead;

const PAGE: u64 = 4096;
/// Threads that take memory ahead.
const TAKERS: usize = 4;
/// Memory that comes faster than so many bytes in that time is waited for, at most so long.
const FAST: u64 = 50_000_000;
const LOOK: Duration = Duration::from_millis(50);
const MOST: Duration = Duration::from_secs(3);
/// How much longer an arena's file is than what it can hold at a time.
const SPAN: u64 = 16;

/// A shared mapping of a whole file, unmapped on drop.
#[derive(Debug)]
struct Mapping {
    start: NonNull<libc::c_void>,
    len: usize,
}

// SAFETY: the mapping is plain memory that stays valid until drop; who may touch which bytes is decided by the types
// that hold it (`Slice` is the only owner of its range, `View` hands out addresses only).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: BorrowedFd<'_>, len: u64, protection: ProtFlags) -> io::Result<Self> {
        let size =
            usize::try_from(len).ok().and_then(std::num::NonZeroUsize::new).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no memory that anyone holds.
        let start = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE, file, 0)? };
        // Kept out of swap as it is touched, where the limits allow: a container's memory must not reach a disk.
        // SAFETY: locking changes neither content nor validity of the range that was mapped just now.
        unsafe { libc::mlock2(start.as_ptr(), size.get(), libc::MLOCK_ONFAULT) };
        // And so must no core dump of whoever has it mapped.
        // SAFETY: the advice changes neither content nor validity of the range that was mapped just now.
        unsafe { libc::madvise(start.as_ptr(), size.get(), libc::MADV_DONTDUMP) };
        Ok(Self { start, len: size.get() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped; every borrower holds an `Arc` of the mapping or a reference to it.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// The writing side: hands out slices that nobody else has.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    mapping: Mapping,
    capacity: u64,
    /// Where the next slice begins. What was released is not handed out again: the file is longer than the capacity, and
    /// takes memory only for what is in use.
    next: AtomicU64,
    /// Bytes in use.
    live: AtomicU64,
    ahead: Ahead,
    /// Held while bytes that were written before are replaced.
    replacing: Mutex<()>,
    /// The slices that there are: where each begins and ends.
    slices: Mutex<BTreeMap<u64, u64>>,
}

impl Arena {
    /// An arena that can hold `capacity` bytes (rounded up to pages). Memory is taken as it is written, not here.
    pub fn new(capacity: u64) -> io::Result<Arc<Self>> {
        let capacity = capacity.max(PAGE).next_multiple_of(PAGE);
        let span = capacity.checked_mul(SPAN).ok_or(io::ErrorKind::InvalidInput)?;
        let file = memfd_create(c"tranship-pages", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&file, span.try_into().map_err(|_| io::ErrorKind::InvalidInput)?)?;
        Self::over(file, span, capacity, 0)
    }

    /// The arena in a file that another process has kept, of which the first `used` bytes have been handed out.
    pub fn attach(file: OwnedFd, used: u64) -> io::Result<Arc<Self>> {
        let span = u64::try_from(nix::sys::stat::fstat(&file)?.st_size).map_err(|_| io::ErrorKind::InvalidInput)?;
        Self::over(file, span, span / SPAN, used.next_multiple_of(PAGE))
    }

    fn over(file: OwnedFd, span: u64, capacity: u64, used: u64) -> io::Result<Arc<Self>> {
        let mapping = Mapping::new(file.as_fd(), span, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        let (next, live) = (AtomicU64::new(used), AtomicU64::new(0));
        let (replacing, slices) = (Mutex::new(()), Mutex::default());
        Ok(Arc::new(Self { file, mapping, capacity, next, live, ahead: Ahead::default(), replacing, slices }))
    }

    /// The file, to be passed to the reading process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes that can be held.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes handed out so far, those that were released included.
    pub fn used(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Begins to take the memory for the first `len` bytes, beside the caller, so that writing them later neither waits for it nor fails for want
    /// of it. [`Self::allocate`] waits until there is some. It ends with the arena.
    pub fn populate(self: &Arc<Self>, len: u64) -> io::Result<()> {
        self.ahead.want(len.min(self.capacity).next_multiple_of(PAGE));
        let takers = thread::available_parallelism().map_or(1, |most| most.get().min(TAKERS));
        for taker in 0..takers {
            let arena = Arc::downgrade(self);
            match thread::Builder::new().name("populate".into()).spawn(move || take_ahead(&arena)) {
                Err(error) if taker == 0 => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until all the memory that was to be taken is there. Fails with `OutOfMemory` where there is not enough.
    pub fn populated(&self) -> io::Result<()> {
        self.ahead.wait(u64::MAX, None).map(drop)
    }

    /// Waits for it until then: whether it is there.
    pub fn populated_until(&self, deadline: Instant) -> io::Result<bool> {
        self.ahead.wait(u64::MAX, Some(deadline))
    }

    /// Nobody needs the memory that is being taken: no more is, and those who wait for it are told `Interrupted`.
    pub fn stop_populating(&self) {
        self.ahead.cancel();
    }

    /// The same as [`Self::populated`], but for three seconds at the most, and only while the memory comes fast.
    pub fn populated_or_slow(&self) -> io::Result<()> {
        let (began, mut before) = (Instant::now(), self.ahead.there());
        while !self.ahead.wait(u64::MAX, Some(Instant::now() + LOOK))? {
            let there = self.ahead.there();
            if began.elapsed() >= MOST || there - before < FAST {
                break;
            }
            before = there;
        }
        Ok(())
    }

    /// Takes the memory for a part of the file.
    fn take(&self, offset: u64, len: u64) -> io::Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.mapping.len as u64), "beyond the end");
        // SAFETY: the range lies within the mapping; populating changes no content.
        let done = unsafe {
            let start = self.mapping.start.as_ptr().cast::<u8>().add(offset as usize);
            libc::madvise(start.cast(), len as usize, libc::MADV_POPULATE_WRITE)
        };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // A kernel before 5.14 takes the memory as it is written.
            Some(libc::EINVAL) => Ok(()),
            Some(libc::EFAULT | libc::ENOMEM) => Err(io::ErrorKind::OutOfMemory.into()),
            _ => Err(error),
        }
    }

    fn slices(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.slices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of `[offset, offset + len)`; `None` if that was not allocated.
    ///
    /// # Panics
    /// There is a slice that has some of these bytes. (There will be none: what was handed out is not handed out again.)
    fn written(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len as u64)?;
        let slices = self.slices();
        if end > self.used() {
            return None;
        }
        let has_some = slices.range(..end).next_back().is_some_and(|(_, slice_end)| *slice_end > offset);
        assert!(!has_some, "bytes at {offset} are being written");
        // SAFETY: within the mapping, which is at least as long as what was handed out.
        Some(unsafe { self.mapping.start.as_ptr().cast::<u8>().add(offset as usize) })
    }

    /// Replaces `bytes.len()` bytes from `offset` on: false if they were not allocated.
    ///
    /// # Panics
    /// There is a slice that has some of these bytes.
    pub fn replace(&self, offset: u64, bytes: &[u8]) -> bool {
        let _one_at_a_time = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = self.written(offset, bytes.len()) else { return false };
        // SAFETY: the range lies within the mapping, no slice has it, and replacing and reading are done by one thread at a time.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        true
    }

    /// Reads bytes from `offset` on: false if they were not allocated.
    ///
    /// # Panics
    /// There is a slice that has some of these bytes.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let _one_at_a_time = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = self.written(offset, into.len()) else { return false };
        // SAFETY: as in `replace`; `into` is no part of the mapping, of which there are references to slices only.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Gives the memory of `[offset, offset + len)` back to the system; it is not handed out again. Slices read as zeros there.
    pub fn release(&self, offset: u64, len: u64) -> io::Result<()> {
        punch(&self.file, offset, len)?;
        self.live.fetch_sub(len.min(self.live.load(Ordering::Relaxed)), Ordering::Relaxed);
        Ok(())
    }

    /// A slice of `len` bytes (rounded up to pages) for the caller alone. Waits for its memory if that is being taken; where that has failed, it is
    /// tried once more, since there may be some again.
    ///
    /// # Errors
    /// `StorageFull` when the arena is full, `OutOfMemory` if the memory could not be taken.
    pub fn allocate(self: &Arc<Self>, len: usize) -> io::Result<Slice> {
        let size = (len as u64).next_multiple_of(PAGE);
        let fits = |most: u64| move |now: u64| now.checked_add(size).filter(|end| *end <= most);
        let update = |of: &AtomicU64, most| {
            let before = of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits(most));
            before.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))
        };
        update(&self.live, self.capacity)?;
        let slice = {
            let mut slices = self.slices();
            let offset = update(&self.next, self.mapping.len as u64)?;
            slices.insert(offset, offset + size);
            Slice { arena: Arc::clone(self), offset, len }
        };
        if self.ahead.wait(slice.offset + size, None).is_err() {
            self.take(slice.offset, size)?;
        }
        Ok(slice)
    }
}

/// Takes memory ahead, one of several threads, until there is enough or nobody has the arena any more.
fn take_ahead(arena: &Weak<Arena>) {
    while let Some(arena) = arena.upgrade()
        && let Some((offset, len)) = arena.ahead.next()
    {
        arena.ahead.done(offset, &arena.take(offset, len));
    }
}

/// A part of an arena that nobody else has; dereferences to its bytes.
#[derive(Debug)]
pub struct Slice {
    arena: Arc<Arena>,
    offset: u64,
    len: usize,
}

impl Slice {
    /// Where in the file it begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.arena.slices().remove(&self.offset);
    }
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `allocate` gave [offset, offset + len) of the live mapping to this value alone, and the file is never
        // shrunk, so the bytes exist.
        unsafe {
            std::slice::from_raw_parts(
                self.arena.mapping.start.as_ptr().cast::<u8>().add(self.offset as usize),
                self.len,
            )
        }
    }
}

impl DerefMut for Slice {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive. The reading process is told of the range only
        // after the slice is gone.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.arena.mapping.start.as_ptr().cast::<u8>().add(self.offset as usize),
                self.len,
            )
        }
    }
}

/// The reading side: knows addresses for the kernel to copy from, and gives memory back.
#[derive(Debug)]
pub struct View {
    file: OwnedFd,
    mapping: Mapping,
}

impl View {
    /// Maps an arena's file that was received from another process. Fails unless the file is sealed in size by nature:
    /// it must be a non-empty regular file in memory.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let stat = nix::sys::stat::fstat(&file)?;
        let len = u64::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::new(file.as_fd(), len, ProtFlags::PROT_READ)?;
        Ok(Self { file, mapping })
    }

    /// The address of `[offset, offset + len)` in this process, for the kernel to read from; `None` if out of bounds.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Option<u64> {
        let end = offset.checked_add(len)?;
        (end <= self.mapping.len as u64).then(|| self.mapping.start.as_ptr() as u64 + offset)
    }

    /// The file, to be passed to a writing process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes that it spans.
    #[allow(clippy::len_without_is_empty, reason = "a view is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len as u64
    }

    /// Gives the memory of `[offset, offset + len)` back to the system; reads as zeros afterwards.
    pub fn release(&self, offset: u64, len: u64) -> io::Result<()> {
        punch(&self.file, offset, len)
    }

    /// Bytes of memory that the file occupies now.
    pub fn resident(&self) -> io::Result<u64> {
        Ok(nix::sys::stat::fstat(&self.file)?.st_blocks.unsigned_abs() * 512)
    }
}

fn punch(file: &OwnedFd, offset: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    fallocate(file, flags, offset.try_into().map_err(invalid)?, len.try_into().map_err(invalid)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn what_one_side_writes_the_other_sees_until_it_releases_it() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut slice = arena.allocate(8192).unwrap();
        slice.fill(7);
        assert_eq!(slice.offset(), 0);
        drop(slice);
        let mut read = [0; 4];
        assert!(arena.read(8188, &mut read) && read == [7; 4]);
        assert!(!arena.read(8189, &mut read) && !arena.read(u64::MAX, &mut read));
        let view = View::new(arena.file().try_clone_to_owned().unwrap()).unwrap();
        assert!(view.resident().unwrap() >= 8192);
        assert!(view.address(0, SPAN << 20).is_some());
        assert!(view.address(1, SPAN << 20).is_none());
        assert!(view.address(u64::MAX, 2).is_none());
        view.release(0, 8192).unwrap();
        assert!(arena.read(8188, &mut read) && read == [0; 4]);
    }

    #[test]
    fn what_a_slice_has_is_neither_read_nor_replaced() {
        let arena = Arena::new(1 << 20).unwrap();
        let (first, second) = (arena.allocate(8192).unwrap(), arena.allocate(1).unwrap());
        let replaces = |offset| catch_unwind(AssertUnwindSafe(|| arena.replace(offset, &[1; 4]))).is_ok();
        assert!(!replaces(0) && !replaces(8190) && !replaces(8192));
        drop(first);
        assert!(replaces(0) && replaces(8188) && !replaces(8190));
        drop(second);
        assert!(replaces(8190));
    }

    #[test]
    fn a_full_arena_refuses_and_says_so() {
        let arena = Arena::new(8192).unwrap();
        arena.allocate(4097).unwrap();
        assert_eq!(arena.allocate(1).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(arena.used(), 8192);
        arena.release(0, 4096).unwrap();
        assert_eq!(arena.allocate(1).unwrap().offset(), 8192);

        let again = Arena::attach(arena.file().try_clone_to_owned().unwrap(), arena.used()).unwrap();
        assert_eq!((again.capacity(), again.allocate(1).unwrap().offset()), (8192, 12288));
    }

    #[test]
    fn memory_that_is_taken_ahead_is_there_when_it_is_allocated() {
        const LEN: u64 = 64 << 20;
        let arena = Arena::new(LEN).unwrap();
        arena.populate(LEN).unwrap();
        arena.populated_or_slow().unwrap();
        let view = View::new(arena.file().try_clone_to_owned().unwrap()).unwrap();
        arena.allocate((LEN / 2) as usize).unwrap();
        assert!(view.resident().unwrap() >= LEN / 2);
        arena.populated().unwrap();
        assert_eq!(view.resident().unwrap(), LEN);
    }
}
