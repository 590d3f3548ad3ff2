//! Pipes, FIFOs, eventfds and epoll, with something waiting in them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use anyhow::{Result, ensure};
use nix::fcntl::{FcntlArg, OFlag};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::raw;
use crate::species::{Check, pattern};

/// Tokens that are kept in a channel: 4 KB.
const QUEUED: u64 = 512;

/// Keeps tokens queued between two ends: each check takes some old ones, compares, and adds as many new ones.
fn conveyor(mut into: impl Write + 'static, mut from: impl Read + 'static) -> Result<Check> {
    for token in 0..QUEUED {
        into.write_all(&pattern(token).to_le_bytes())?;
    }
    let mut next = 0u64;
    Ok(Box::new(move || {
        for _ in 0..7 {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes)?;
            let found = u64::from_le_bytes(bytes);
            ensure!(found == pattern(next), "token {next} came out as {found:#x}");
            into.write_all(&pattern(next + QUEUED).to_le_bytes())?;
            next += 1;
        }
        Ok(())
    }))
}

fn flags(fd: impl AsFd) -> Result<OFlag> {
    Ok(OFlag::from_bits_retain(nix::fcntl::fcntl(fd, FcntlArg::F_GETFL)?))
}

/// A pipe with data in it, of a size that is not the default, one end non-blocking.
pub fn pipe(_: &Path) -> Result<Check> {
    const SIZE: i32 = 128 << 10;
    let (from, into) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    nix::fcntl::fcntl(&into, FcntlArg::F_SETPIPE_SZ(SIZE))?;
    nix::fcntl::fcntl(&from, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    // Who else may open it by its descriptor.
    nix::sys::stat::fchmod(&from, nix::sys::stat::Mode::from_bits_truncate(0o640))?;
    let watched = from.try_clone()?;
    let mut moves_on = conveyor(File::from(into), File::from(from))?;
    Ok(Box::new(move || {
        let mode = nix::sys::stat::fstat(&watched)?.st_mode & 0o7777;
        ensure!(mode == 0o640, "the pipe's mode is {mode:o} instead of 640");
        let size = nix::fcntl::fcntl(&watched, FcntlArg::F_GETPIPE_SZ)?;
        ensure!(size == SIZE, "the pipe holds {size} bytes instead of {SIZE}");
        ensure!(flags(&watched)?.contains(OFlag::O_NONBLOCK), "the reading end is blocking");
        moves_on()
    }))
}

/// A FIFO with a name and data in it.
pub fn fifo(place: &Path) -> Result<Check> {
    let path = place.join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR)?;
    let both = File::options().read(true).write(true).open(&path)?;
    let into = File::options().write(true).open(&path)?;
    let from = File::open(&path)?;
    let mut moves_on = conveyor(into, from)?;
    Ok(Box::new(move || {
        ensure!(std::os::unix::fs::FileTypeExt::is_fifo(&std::fs::metadata(&path)?.file_type()), "no FIFO any more");
        ensure!(!flags(&both)?.contains(OFlag::O_NONBLOCK), "the FIFO became non-blocking");
        moves_on()
    }))
}

/// An eventfd with a value. Not one with `EFD_SEMAPHORE`: CRIU makes a plain counter of it.
pub fn eventfd(_: &Path) -> Result<Check> {
    let counter = EventFd::from_value_and_flags(1000, EfdFlags::EFD_NONBLOCK)?;
    let mut value = 1000;
    Ok(Box::new(move || {
        let found = counter.read()?;
        ensure!(found == value, "the counter says {found} instead of {value}");
        value += 1;
        counter.write(value)?;
        Ok(())
    }))
}

/// An epoll in an epoll: a ready pipe, a quiet pipe and a one-shot eventfd, each with data of its own.
pub fn epoll(_: &Path) -> Result<Check> {
    let inner = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let outer = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let (quiet, quiet_writer) = nix::unistd::pipe()?;
    let (ready, ready_writer) = nix::unistd::pipe()?;
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK)?;
    inner.add(&quiet, EpollEvent::new(EpollFlags::EPOLLIN, 0x1111_0000_0000_0001))?;
    inner.add(&ready, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, 0x2222_0000_0000_0002))?;
    inner.add(&event, EpollEvent::new(EpollFlags::EPOLLOUT, u64::MAX))?;
    outer.add(&inner.0, EpollEvent::new(EpollFlags::EPOLLIN, 0x3333))?;
    let mut ready_writer = File::from(ready_writer);
    ready_writer.write_all(b"x")?;
    let mut quiet_writer = File::from(quiet_writer);
    let mut quiet_reader = File::from(quiet.try_clone()?);
    let look = |epoll: &Epoll| -> Result<Vec<u64>> {
        let mut events = [EpollEvent::empty(); 8];
        let count = epoll.wait(&mut events, EpollTimeout::ZERO)?;
        let mut data: Vec<_> = events[..count].iter().map(EpollEvent::data).collect();
        data.sort_unstable();
        Ok(data)
    };
    Ok(Box::new(move || {
        let _held = (&quiet, &ready, &event, &ready_writer);
        let outside = look(&outer)?;
        ensure!(outside == [0x3333], "the outer epoll reports {outside:x?}");
        let usual = [0x2222_0000_0000_0002, u64::MAX];
        let found = look(&inner)?;
        ensure!(found == usual, "epoll reports {found:x?}");
        quiet_writer.write_all(b"y")?;
        let found = look(&inner)?;
        quiet_reader.read_exact(&mut [0])?;
        ensure!(found == [0x1111_0000_0000_0001, usual[0], usual[1]], "with the quiet pipe: epoll reports {found:x?}");
        Ok(())
    }))
}

/// An eventfd that gives out one at a time.
pub fn eventfd_semaphore(_: &Path) -> Result<Check> {
    const LEFT: u64 = 5;
    let semaphore = EventFd::from_value_and_flags(LEFT as u32, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_SEMAPHORE)?;
    Ok(Box::new(move || {
        for _ in 0..LEFT {
            let given = semaphore.read()?;
            ensure!(given == 1, "the semaphore gives {given} at once");
        }
        ensure!(semaphore.read() == Err(nix::Error::EAGAIN), "the semaphore had more than {LEFT}");
        semaphore.write(LEFT)?;
        Ok(())
    }))
}

/// A ring for asynchronous input and output.
pub fn io_uring(_: &Path) -> Result<Check> {
    let ring = raw::io_uring()?;
    Ok(Box::new(move || {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", ring.as_raw_fd()))?;
        ensure!(link.to_string_lossy() == "anon_inode:[io_uring]", "the ring is {}", link.display());
        Ok(())
    }))
}
