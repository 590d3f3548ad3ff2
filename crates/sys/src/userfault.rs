//! userfaultfd (Documentation/admin-guide/mm/userfaultfd.rst), the side that answers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;

use crate::arena::View;
use crate::process::is_userfaultfd;

#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct ZeroArg {
    start: u64,
    len: u64,
    mode: u64,
    zeropage: i64,
}

/// `struct uffd_msg`: the event in the first byte, padding, then 24 bytes that the event gives a meaning to.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message([u64; Message::WORDS]);

const _: () = assert!(size_of::<CopyArg>() == 40);
const _: () = assert!(size_of::<ZeroArg>() == 32);
const _: () = assert!(size_of::<Message>() == 32);
const _: () = assert!(cfg!(target_endian = "little"));

const UFFDIO_COPY: u64 = nix::request_code_readwrite!(0xAA, 0x03, size_of::<CopyArg>());
const UFFDIO_ZEROPAGE: u64 = nix::request_code_readwrite!(0xAA, 0x04, size_of::<ZeroArg>());
const UFFDIO_WAKE: u64 = nix::request_code_read!(0xAA, 0x02, size_of::<[u64; 2]>());
const _: () = assert!(UFFDIO_WAKE == 0x8010_aa02);
const _: () = assert!(UFFDIO_COPY == 0xc028_aa03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);

/// Where the addresses of user space end.
const USER_END: u64 = 0x7fff_ffff_f000;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

/// What happened in the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for the page that contains `address`.
    Fault {
        /// Where it touched memory.
        address: u64,
    },
    /// The task has changed it.
    Changed(Change),
}

/// What a task has done to its address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It forked; the child's address space is answered through the new descriptor, which has this number ([`Userfault::child`]).
    Fork(RawFd),
    /// `[from, from + len)` is now at `to`.
    Remap {
        /// Old start.
        from: u64,
        /// New start.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// The content of `[start, end)` was thrown away (madvise); it reads as zeros from now on.
    Remove {
        /// Start.
        start: u64,
        /// End.
        end: u64,
    },
    /// `[start, end)` is no longer mapped.
    Unmap {
        /// Start.
        start: u64,
        /// End.
        end: u64,
    },
}

/// How far an attempt to fill pages came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// All of it.
    All,
    /// The first `n` bytes; then there was a page already.
    UntilPresent(u64),
    /// The first `n` bytes; the address space is being changed: read the events, then try again.
    UntilChange(u64),
    /// The first `n` bytes; what follows is not mapped, or not ours.
    UntilUnmapped(u64),
    /// The address space is gone.
    Gone,
}

impl Message {
    /// Words that a message has.
    pub const WORDS: usize = 4;

    /// The message that consists of these words.
    pub fn of(words: [u64; Self::WORDS]) -> Self {
        Self(words)
    }

    /// The message that these bytes are, if they are as many.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 8 * Self::WORDS] = bytes.try_into().ok()?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        Some(Self(std::array::from_fn(word)))
    }

    /// Tells that the content of `[start, end)` was thrown away.
    pub fn removed(start: u64, end: u64) -> Self {
        Self([EVENT_REMOVE.into(), start, end, 0])
    }

    /// Its bytes.
    pub fn to_bytes(self) -> [u8; 8 * Self::WORDS] {
        let mut bytes = [0; 8 * Self::WORDS];
        bytes.chunks_exact_mut(8).zip(self.0).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0[0] as u8 == 0
    }

    /// What it tells.
    ///
    /// # Errors
    /// It is none of those that are known.
    pub fn event(&self) -> io::Result<Event> {
        let [event, a, b, c] = self.0;
        let change = match event as u8 {
            EVENT_PAGEFAULT => return Ok(Event::Fault { address: b }),
            EVENT_FORK => Change::Fork(a as u32 as RawFd),
            EVENT_REMAP => Change::Remap { from: a, to: b, len: c },
            EVENT_REMOVE => Change::Remove { start: a, end: b },
            EVENT_UNMAP => Change::Unmap { start: a, end: b },
            other => return Err(io::Error::other(format!("userfaultfd event {other:#x} is unknown"))),
        };
        Ok(Event::Changed(change))
    }
}

/// One address space whose missing pages this process supplies.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
}

impl From<OwnedFd> for Userfault {
    /// Takes a descriptor received from the task's side. If it is not a userfaultfd, every call on it fails.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Userfault {
    /// Takes over a descriptor that stands under this number in our table: one that was left by a
    /// process that had the table in common with this one and has ended.
    ///
    /// # Errors
    /// There is no userfaultfd under that number.
    ///
    /// # Safety
    /// Nothing else in this process owns or borrows the descriptor.
    pub unsafe fn adopt(number: RawFd) -> io::Result<Self> {
        if !is_userfaultfd(number) {
            return Err(io::Error::other(format!("descriptor {number} is no userfaultfd")));
        }
        // SAFETY: by contract of this function.
        Ok(Self { fd: unsafe { crate::descriptor::inherited(number)? } })
    }

    /// One that stands for an address space that is gone, and whose descriptor may be another one's by now. Every call on it fails.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn of_nobody() -> io::Result<Self> {
        Ok(Self { fd: std::fs::File::open("/dev/null")?.into() })
    }

    /// Whether it is a userfaultfd.
    pub fn is_one(&self) -> bool {
        is_userfaultfd(self.fd.as_raw_fd())
    }

    /// Its number in our table.
    pub fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Leaves the descriptor open: it is somebody else's.
    pub fn leave(self) {
        std::mem::forget(self.fd);
    }

    /// Reads the next message; false if there is none now. The descriptor must be non-blocking (CRIU opens it so).
    pub(crate) fn read_into(&self, message: &[AtomicU64; Message::WORDS]) -> io::Result<bool> {
        // SAFETY: atomics may be written to through a shared reference, and have the size given; the kernel writes whole messages only.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), message.as_ptr().cast_mut().cast(), size_of::<Message>()) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) };
        }
        match got as usize {
            0 => Ok(false),
            size if size == size_of::<Message>() => Ok(true),
            _ => Err(io::Error::other("short userfaultfd message")),
        }
    }

    /// The next event, or `None` if there is none now.
    pub fn next_event(&self) -> io::Result<Option<Event>> {
        let message = [const { AtomicU64::new(0) }; Message::WORDS];
        if !self.read_into(&message)? {
            return Ok(None);
        }
        let event = Message::of(message.map(AtomicU64::into_inner)).event()?;
        if matches!(event, Event::Changed(Change::Fork(_))) && !self.is_one() {
            return Err(io::Error::other("what told of a fork is no userfaultfd"));
        }
        Ok(Some(event))
    }

    /// The address space of a child that the task has forked, which the kernel has told by a number: [`Change::Fork`].
    ///
    /// # Errors
    /// There is no userfaultfd under that number.
    ///
    /// # Safety
    /// The number is that of an event of this userfaultfd for which this was not called yet.
    pub unsafe fn child(&self, number: RawFd) -> io::Result<Self> {
        // What is read from another kind of file is not the kernel's word.
        if !is_userfaultfd(self.fd.as_raw_fd()) {
            return Err(io::Error::other("a fork was told without the child's userfaultfd"));
        }
        // SAFETY: the kernel has installed it in our table with the event, for us alone.
        unsafe { Self::adopt(number) }
    }

    /// Fills `[address, address + len)` with `[offset, offset + len)` of `source`, and wakes who waits for it.
    pub fn copy(&self, address: u64, source: &View, offset: u64, len: u64) -> io::Result<Filled> {
        let src = source.address(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        let mut arg = CopyArg { dst: address, src, len, mode: 0, copy: 0 };
        // SAFETY: `src` is `len` readable bytes of the view, which outlives the call; `dst` lies in another address
        // space (or is refused), so no memory of this process is written but `arg`.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_COPY, &raw mut arg) };
        self.filled(result, arg.copy, len)
    }

    /// Fills `[address, address + len)` with zeros, and wakes who waits for it.
    pub fn zero(&self, address: u64, len: u64) -> io::Result<Filled> {
        let mut arg = ZeroArg { start: address, len, mode: 0, zeropage: 0 };
        // SAFETY: as in `copy`; the kernel writes nothing of ours but `arg`.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut arg) };
        self.filled(result, arg.zeropage, len)
    }

    /// Wakes who waits for a page in `[address, address + len)`, to look again.
    pub fn wake(&self, address: u64, len: u64) -> io::Result<()> {
        let mut range = [address, len];
        // SAFETY: the kernel reads the range and touches no memory of this process.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_WAKE, &raw mut range) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Wakes all who wait for a page, to look again: those whose faults were read by a process that has ended.
    pub fn wake_all(&self) -> io::Result<()> {
        let least =
            std::fs::read_to_string("/proc/sys/vm/mmap_min_addr").ok().and_then(|text| text.trim().parse().ok());
        let start = least.unwrap_or(0u64).next_multiple_of(4096).max(1 << 16);
        self.wake(start, USER_END - start)
    }

    /// Whether a change of the address space is under way, of which the event may not have been read yet. (The kernel looks for
    /// that before it looks at anything else that a request says.)
    fn is_changing(&self) -> bool {
        let mut nothing = CopyArg { dst: 0, src: 0, len: 0, mode: 0, copy: 0 };
        // SAFETY: a copy of no length is refused; the kernel writes nothing of ours but the argument.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_COPY, &raw mut nothing) };
        result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
    }

    fn filled(&self, result: i32, progress: i64, len: u64) -> io::Result<Filled> {
        if result == 0 {
            return Ok(Filled::All);
        }
        let error = io::Error::last_os_error();
        let done = u64::try_from(progress).unwrap_or(0).min(len);
        match error.raw_os_error() {
            Some(libc::EEXIST) => Ok(Filled::UntilPresent(done)),
            // A partial copy is reported as EAGAIN with the count; the reason shows when it is tried again.
            // Memory may be free again in a moment; to give up would leave pages of zeros where there was content.
            Some(libc::EAGAIN | libc::ENOMEM) => Ok(Filled::UntilChange(done)),
            // What is just being moved is no longer where it was before its event tells where it is.
            Some(libc::ENOENT | libc::EFAULT | libc::EINVAL) if self.is_changing() => Ok(Filled::UntilChange(done)),
            Some(libc::ENOENT | libc::EFAULT | libc::EINVAL) => Ok(Filled::UntilUnmapped(done)),
            Some(libc::ESRCH) => Ok(Filled::Gone),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::fd::FromRawFd;
    use std::time::Duration;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use crate::arena::Arena;
    use crate::scratch::Scratch;
    use crate::writes::{UFFD_API, UFFDIO_API, UFFDIO_REGISTER};

    #[test]
    fn a_message_has_its_own_length() {
        let message = Message::removed(4096, 8192);
        assert_eq!(Message::from_bytes(&message.to_bytes()), Some(message));
        assert_eq!([31, 33, 39].map(|length| Message::from_bytes(&vec![0; length])), [None; 3]);
    }

    #[test]
    fn a_file_that_tells_of_a_fork_is_not_believed() {
        use std::io::Write;
        let (read, mut write) = io::pipe().unwrap();
        let another = own();
        let message = [u64::from(EVENT_FORK), another.fd.as_raw_fd() as u64, 0, 0];
        write.write_all(&message.map(u64::to_ne_bytes).concat()).unwrap();
        assert!(Userfault::from(OwnedFd::from(read)).next_event().is_err());
        // SAFETY: no userfaultfd is open under these numbers.
        let children = [write.as_raw_fd(), -1].map(|number| unsafe { another.child(number) });
        assert!(children.iter().all(Result::is_err), "what it tells is no userfaultfd");
        assert!(another.next_event().unwrap().is_none(), "it is still open");
    }

    const PAGE: u64 = 4096;
    const FEATURE_EVENT_REMAP: u64 = 1 << 2;
    const REGISTER_MODE_MISSING: u64 = 1;

    /// One over this process that tells of moves.
    pub(crate) fn own() -> Userfault {
        let mut api = [UFFD_API, FEATURE_EVENT_REMAP, 0];
        // SAFETY: the call returns a new descriptor, owned by nobody else; the argument is what the request wants.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1);
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            assert_eq!(libc::ioctl(fd as i32, UFFDIO_API, &raw mut api), 0, "{}", io::Error::last_os_error());
            OwnedFd::from_raw_fd(fd as i32)
        };
        fd.into()
    }

    /// Registers missing pages of scratch memory.
    fn register(userfault: &Userfault, scratch: &Scratch) {
        let mut register = [scratch.start(), scratch.end() - scratch.start(), REGISTER_MODE_MISSING, 0];
        // SAFETY: the argument is what the request wants; nobody touches the scratch pages.
        let registered = unsafe { libc::ioctl(userfault.fd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
        assert_eq!(registered, 0, "{}", io::Error::last_os_error());
    }

    #[test]
    fn a_page_is_not_taken_for_unmapped_while_it_is_being_moved() {
        let (from, to) = (Scratch::map(2, libc::MAP_PRIVATE).unwrap(), Scratch::map(2, libc::MAP_PRIVATE).unwrap());
        let arena = Arena::new(1 << 20).unwrap();
        let content = arena.allocate(2 * PAGE as usize).unwrap();
        let store = View::new(arena.file().try_clone_to_owned().unwrap()).unwrap();
        let userfault = own();
        register(&userfault, &from);
        let (old, new) = (from.start(), to.start());
        let mover = std::thread::spawn(move || {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: both are scratch pages, to which nobody has a reference.
            let moved = unsafe { libc::mremap(old as *mut _, 8192, 8192, flags, new as *mut libc::c_void) };
            moved as u64
        });
        let mut ready = [PollFd::new(userfault.as_fd(), PollFlags::POLLIN)];
        let deadline = PollTimeout::try_from(Duration::from_secs(10)).unwrap();
        assert_eq!(poll(&mut ready, deadline).unwrap(), 1, "the move is told");
        assert_eq!(userfault.copy(old, &store, content.offset(), PAGE).unwrap(), Filled::UntilChange(0));
        let Some(Event::Changed(change)) = userfault.next_event().unwrap() else { panic!("the move is told") };
        assert!(matches!(change, Change::Remap { from, to, len } if (from, to, len) == (old, new, 2 * PAGE)));
        assert_eq!(mover.join().unwrap(), new);
        assert_eq!(userfault.copy(old, &store, content.offset(), PAGE).unwrap(), Filled::UntilUnmapped(0));
        assert_eq!(userfault.copy(new, &store, content.offset(), 2 * PAGE).unwrap(), Filled::All);
        // What was there is not there to be unmapped any more.
        std::mem::forget(from);
    }
}
