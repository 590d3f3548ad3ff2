//! Pages of files in memory (tmpfs, memfd) that are charged to the memory cgroup of another process.
//!
//! The kernel charges such a page once, when it is allocated, to the memory cgroup of the process that allocates it
//! (`mem_cgroup_charge` in mm/shmem.c: of the owner of `current->mm`, which a thread of its own cgroup does not change).
//! So a process in the container's cgroup, the [`Allocator`], allocates the pages of a file with fallocate(2) for the
//! [`Charger`], which then writes their content. Both versions of cgroups do the same.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use nix::unistd::{Whence, lseek};

use crate::descriptor;

/// How long an allocation may take. A cgroup above `memory.high` delays its processes by up to 2 s each time.
const LIMIT: Duration = Duration::from_secs(30);
const PAGE_SIZE: u64 = 4096;
/// Pages that are looked for one by one.
const FEW: u64 = 64;
/// Bytes of a block, as `st_blocks` counts them.
const BLOCK: u64 = 512;

/// The end in the process that the pages are charged to.
#[derive(Debug)]
pub struct Allocator {
    listener: OwnedFd,
    client: Option<OwnedFd>,
}

impl Allocator {
    /// Listens at `path`, which appears when a client can connect.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let nascent = path.with_extension("nascent");
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        bind(listener.as_raw_fd(), &UnixAddr::new(&nascent)?)?;
        listen(&listener, Backlog::new(1)?)?;
        std::fs::rename(&nascent, path)?;
        Ok(Self { listener, client: None })
    }

    /// The descriptors to poll for input: the listener, and the client where there is one.
    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(self.listener.as_fd()), self.client.as_ref().map(AsFd::as_fd)].into_iter().flatten()
    }

    /// Accepts a client, which replaces the one before, and answers one request of it, as far as that needs no wait.
    pub fn serve(&mut self) {
        if readable(self.listener.as_fd(), Duration::ZERO)
            && let Ok(client) = descriptor::accept(self.listener.as_fd())
        {
            self.client = Some(client);
        }
        if let Some(client) = self.client.as_ref().map(AsFd::as_fd)
            && readable(client, Duration::ZERO)
            && answer(client).is_err()
        {
            self.client = None;
        }
    }
}

/// Allocates what one request names.
fn answer(client: BorrowedFd<'_>) -> io::Result<()> {
    let mut request = [0; 16];
    let (got, files) = descriptor::receive(client, &mut request)?;
    let file = files.first().filter(|_| got == request.len()).ok_or(io::ErrorKind::InvalidData)?;
    let word = |at: usize| i64::from_le_bytes(request[at..at + 8].try_into().expect("8 bytes"));
    let allocated = fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, word(0), word(8));
    let error = allocated.err().map_or(0, |errno| errno as i32);
    descriptor::send(client, &error.to_le_bytes(), &[]).map(drop)
}

fn readable(fd: BorrowedFd<'_>, wait: Duration) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut fds, wait) {
            Err(Errno::EINTR) => {}
            polled => return matches!(polled, Ok(1..)),
        }
    }
}

/// The end in the process that writes the content. Before it is connected, and once it is closed, pages are charged to
/// whoever writes them.
#[derive(Debug, Default)]
pub struct Charger {
    socket: Mutex<Option<OwnedFd>>,
}

impl Charger {
    /// Connects to the allocator that listens at `path`, in place of one before.
    ///
    /// # Errors
    /// If none listens there.
    pub fn connect(&self, path: &Path) -> io::Result<()> {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(fd);
        Ok(())
    }

    /// Needs no allocator any more.
    pub fn close(&self) {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Has the pages of a part of a file in memory allocated that are not there yet. The file's length stays.
    ///
    /// # Errors
    /// `OutOfMemory` if the limit of the allocator's cgroup forbids it; any other as fallocate(2).
    pub fn allocate(&self, file: &File, offset: u64, length: u64) -> io::Result<()> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = socket.as_ref().filter(|_| length > 0) else { return Ok(()) };
        if is_allocated(file, offset, length)? {
            return Ok(());
        }
        let request = [offset.to_le_bytes(), length.to_le_bytes()].concat();
        descriptor::send(socket.as_fd(), &request, &[file.as_fd()]).map_err(|_| killed())?;
        if !readable(socket.as_fd(), LIMIT) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("it was not allocated within {LIMIT:?}")));
        }
        let mut answer = [0; 4];
        match descriptor::receive(socket.as_fd(), &mut answer) {
            Ok((4, _)) => match i32::from_le_bytes(answer) {
                0 => Ok(()),
                errno if errno == Errno::ENOMEM as i32 => Err(limit_reached()),
                errno => Err(io::Error::from_raw_os_error(errno)),
            },
            _ => Err(killed()),
        }
    }
}

/// Whether a part of a file has all its pages. "No" costs no more than a request: it is the answer for long parts, too.
fn is_allocated(file: &File, offset: u64, length: u64) -> io::Result<bool> {
    let found = file.metadata()?;
    if offset + length > found.len() {
        return Ok(false);
    }
    if found.blocks() * BLOCK >= found.len().next_multiple_of(PAGE_SIZE) {
        return Ok(true);
    }
    // Not SEEK_HOLE: the kernel walks over all pages up to the next hole.
    let has = |at: u64| lseek(file, at.cast_signed(), Whence::SeekData) == Ok(at.cast_signed());
    let all = length <= FEW * PAGE_SIZE && (offset..offset + length).step_by(PAGE_SIZE as usize).all(has);
    lseek(file, 0, Whence::SeekSet)?;
    Ok(all)
}

fn limit_reached() -> io::Error {
    io::Error::new(
        io::ErrorKind::OutOfMemory,
        "the memory limit of the container's cgroup is reached on the destination; raise it, or free memory in the \
         container, and move it again",
    )
}

/// The allocator has ended. The kernel kills a process in a cgroup that reaches its limit.
fn killed() -> io::Error {
    io::Error::new(
        io::ErrorKind::OutOfMemory,
        "the CRIU shim, which allocates memory in the container's cgroup on the destination, was killed, as the kernel \
         does when the memory limit is reached; raise it, or free memory in the container, and move it again",
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn pages_are_allocated_by_the_other_end_and_the_length_stays() {
        let path = std::env::temp_dir().join(format!("charge-{}", std::process::id()));
        let mut allocator = Allocator::listen(&path).unwrap();
        let charger = Charger::default();
        let file = File::from(memfd_create(c"charged", MFdFlags::MFD_CLOEXEC).unwrap());
        charger.allocate(&file, 0, 4 * PAGE_SIZE).unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), 0, "there is no allocator yet");
        charger.connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        let server = std::thread::spawn(move || {
            while ended.try_recv().is_err() {
                let mut fds: Vec<_> = allocator.watched().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
                poll(&mut fds, PollTimeout::from(10u8)).unwrap();
                allocator.serve();
            }
        });
        charger.allocate(&file, PAGE_SIZE, 4 * PAGE_SIZE).unwrap();
        assert_eq!((file.metadata().unwrap().blocks(), file.metadata().unwrap().len()), (4 * 8, 0));
        file.write_all_at(&[7; 16384], PAGE_SIZE).unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), 4 * 8);
        done.send(()).unwrap();
        server.join().unwrap();
        assert_eq!(charger.allocate(&file, 0, PAGE_SIZE).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        charger.allocate(&file, PAGE_SIZE, 4 * PAGE_SIZE).expect("these pages are there, and need no allocator");
        charger.close();
        charger.allocate(&file, 0, PAGE_SIZE).unwrap();
    }
}
