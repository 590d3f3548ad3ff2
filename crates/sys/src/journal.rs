//! A log in memory that a process shares with those that it forks: when one of them is killed, the next one finds what that one has appended.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::userfault::{Message, Userfault};

/// Bytes that it can hold; memory is taken for what is used.
const LIMIT: u64 = 1 << 30;
const HEADER: u64 = 4096;
const RECORD: u64 = 16;

/// What lies at its beginning.
#[repr(C)]
struct Header {
    /// Bytes of records.
    len: AtomicU64,
    /// Something did not fit, so that what follows is lacking.
    overflowed: AtomicU64,
    /// Nothing is left to be done.
    ended: AtomicU64,
    counters: [AtomicU64; 2],
    /// Bytes of records when the slot was put to use.
    slot_at: AtomicU64,
    slot_tag: AtomicU64,
    /// A message that has been read, and may not have been appended. Its first byte is zero where there is none.
    slot: [AtomicU64; Message::WORDS],
}

const _: () = assert!(size_of::<Header>() <= HEADER as usize);

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What it is.
    pub kind: u32,
    /// A number that goes with it.
    pub tag: u64,
    /// What it says.
    pub bytes: Vec<u8>,
}

/// The log. One process at a time appends; those that it forks see the same.
#[derive(Debug)]
pub struct Journal {
    start: NonNull<u8>,
    /// Held while a record is appended.
    appending: Mutex<()>,
}

// SAFETY: the header is reached through atomics only, and what was appended does not change any more.
unsafe impl Send for Journal {}
// SAFETY: as above; one thread of this process appends at a time, and one process, by contract of [`Journal::new`].
unsafe impl Sync for Journal {}

impl Journal {
    /// An empty one. Of the processes that a fork has made of one that has it, one at a time may append.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn new() -> io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), LIMIT as usize, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // The kernel writes messages there for a process that is being killed, which does not wait for a page any more.
        // SAFETY: locking changes no content; where it is not allowed, the page was touched at least.
        unsafe {
            libc::mlock(start, HEADER as usize);
            start.cast::<u8>().write_volatile(0);
        }
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, appending: Mutex::new(()) })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is aligned to pages, longer than a header, zeros at first, lives as long as `self`, and this part of it is only
        // ever reached through atomics (or by the kernel, for `read`, between two of their uses).
        unsafe { self.start.cast::<Header>().as_ref() }
    }

    fn len(&self) -> u64 {
        self.header().len.load(Ordering::Acquire)
    }

    /// Appends a record; whoever is killed in the middle has appended none.
    pub fn append(&self, kind: u32, tag: u64, bytes: &[u8]) {
        let _one_at_a_time = self.appending.lock().unwrap_or_else(PoisonError::into_inner);
        let at = HEADER + self.len();
        let size = RECORD + (bytes.len() as u64).next_multiple_of(8);
        if self.has_overflowed() || at + size > LIMIT {
            self.header().overflowed.store(1, Ordering::Release);
            return;
        }
        // SAFETY: the record lies within the mapping, behind all that may be read.
        unsafe {
            let target = self.start.as_ptr().add(at as usize);
            target.cast::<[u32; 2]>().write([kind, bytes.len() as u32]);
            target.add(8).cast::<u64>().write(tag);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.add(RECORD as usize), bytes.len());
        }
        self.header().len.store(at + size - HEADER, Ordering::Release);
    }

    /// All records, in order.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        let mut at = 0;
        let end = self.len();
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            // SAFETY: `at` is where a record begins that was appended as a whole, and does not change any more.
            let record = unsafe {
                let source = self.start.as_ptr().add((HEADER + at) as usize);
                let [kind, len] = source.cast::<[u32; 2]>().read();
                let bytes = std::slice::from_raw_parts(source.add(RECORD as usize), len as usize).to_vec();
                Record { kind, tag: source.add(8).cast::<u64>().read(), bytes }
            };
            at += RECORD + (record.bytes.len() as u64).next_multiple_of(8);
            Some(record)
        })
    }

    /// Reads a message of a userfaultfd, if there is one, so that it is not lost with this process: until the next record is appended it is
    /// [`Self::unfinished`].
    ///
    /// # Errors
    /// As the system's.
    pub fn read(&self, tag: u64, userfault: &Userfault) -> io::Result<Option<Message>> {
        let header = self.header();
        header.slot[0].store(0, Ordering::Release);
        header.slot_tag.store(tag, Ordering::Release);
        header.slot_at.store(self.len(), Ordering::Release);
        Ok(if userfault.read_into(&header.slot)? { Some(self.slot()) } else { None })
    }

    fn slot(&self) -> Message {
        Message::of(std::array::from_fn(|word| self.header().slot[word].load(Ordering::Acquire)))
    }

    /// A message that was read last, with its tag, after which nothing was appended.
    pub fn unfinished(&self) -> Option<(u64, Message)> {
        let header = self.header();
        let last = header.slot_at.load(Ordering::Acquire) == self.len();
        let message = self.slot();
        (last && !message.is_empty()).then(|| (header.slot_tag.load(Ordering::Acquire), message))
    }

    /// Whether something was to be appended that had no room.
    pub fn has_overflowed(&self) -> bool {
        self.header().overflowed.load(Ordering::Acquire) != 0
    }

    /// Counters that go on where another process does.
    pub fn counters(&self) -> &[AtomicU64; 2] {
        &self.header().counters
    }

    /// Nothing is left to be done.
    pub fn end(&self) {
        self.header().ended.store(1, Ordering::Release);
    }

    /// Whether nothing is left to be done.
    pub fn has_ended(&self) -> bool {
        self.header().ended.load(Ordering::Acquire) != 0
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; references to it borrow `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), LIMIT as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_has_appended_is_there() {
        let journal = Journal::new().unwrap();
        journal.append(1, 2, b"three");
        assert_eq!(journal.unfinished(), None);
        // SAFETY: the child calls nothing that another thread's lock could keep waiting.
        let child = unsafe { libc::fork() };
        if child == 0 {
            journal.append(4, 5, &[]);
            // SAFETY: it ends here.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None).unwrap();
        let record = |kind, tag, bytes: &[u8]| Record { kind, tag, bytes: bytes.to_vec() };
        assert_eq!(journal.records().collect::<Vec<_>>(), [record(1, 2, b"three"), record(4, 5, b"")]);
        assert!(!journal.has_overflowed() && !journal.has_ended());
    }
}
