//! Content of pseudo-terminals.
//!
//! Criu has no way to look at what waits in a terminal: it reads all of it, and writes it again at the other end, in a
//! dump if the tasks go on, and in a restore (`tty_dump_queued_data`, `pty_restore_queued_data` of tty.c). What is
//! written passes through the terminal's line discipline once more: it is echoed, becomes signals, gets more carriage
//! returns, and a line that is not finished, which criu does not read, comes before the others. In packet mode criu
//! reads marks as data.
//!
//! ```text
//!          read (criu) ◀── copy ◀─┐        ┌─▶ put back, in a plain mode: the lines as they were, no echo, no signals
//!  master ────────────────────────┴─ take ─┴──────────────────────────── slave
//! ```
//!
//! Here a terminal is emptied and filled again at once, when criu reads from one of its ends for the first time; criu
//! gets copies, and what it writes in a dump is ignored. In its images the end of a line without a character of its own
//! is the terminal's VEOF, and a line that is not finished is the last one. In a restore this is put in place in the
//! same plain mode.

use std::ffi::{c_int, c_ulong, c_void};
use std::io;
use std::sync::{Mutex, PoisonError};

use libc::{pollfd, termios2};

use crate::sockets::real;
use crate::{Open, is_dump, is_restore};

type Read = unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize;
type Write = unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;
type Fcntl = unsafe extern "C" fn(c_int, c_int, usize) -> c_int;

/// The most that is read at once. A line is shorter.
const PIECE: usize = 4096;
/// How long the kernel may take to pass on what is written, in milliseconds.
const PATIENCE: c_int = 2000;
/// More than this waits in a terminal only where its writer cannot go on (`N_TTY_BUF_SIZE` of the kernel's n_tty.c,
/// less some).
const NEARLY_FULL: c_int = 4000;

/// One end of a pseudo-terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Master(u32),
    Slave(u32),
}

impl End {
    /// Of a descriptor; `None` where it is of something else.
    fn of(fd: c_int) -> Option<Self> {
        /// Of admin-guide/devices.txt: Unix98 slaves, 256 for each number, and the multiplexor.
        const SLAVES: std::ops::Range<u32> = 136..144;
        const MULTIPLEXOR: (u32, u32) = (5, 2);
        // SAFETY: plain integers; all zeros is a value, and the call fills it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 || stat.st_mode & libc::S_IFMT != libc::S_IFCHR {
            return None;
        }
        match (libc::major(stat.st_rdev), libc::minor(stat.st_rdev)) {
            (major, minor) if SLAVES.contains(&major) => Some(Self::Slave((major - SLAVES.start) << 8 | minor)),
            MULTIPLEXOR => get::<c_int>(fd, libc::TIOCGPTN).ok().map(|number| Self::Master(number as u32)),
            _ => None,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Master(number) => Self::Slave(number),
            Self::Slave(number) => Self::Master(number),
        }
    }

    /// A descriptor of this process that is of this end.
    fn find(self) -> Option<c_int> {
        let descriptors = std::fs::read_dir("/proc/self/fd").ok()?.flatten();
        descriptors.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|fd| Self::of(*fd) == Some(self))
    }
}

/// What criu has still to read of an end, and knows it by.
struct Copy {
    of: Open,
    bytes: Vec<u8>,
}

static COPIES: Mutex<Vec<Copy>> = Mutex::new(Vec::new());

fn ioctl<T>(fd: c_int, request: c_ulong, argument: *mut T) -> io::Result<()> {
    // SAFETY: the callers pass what the request reads or writes.
    match unsafe { libc::ioctl(fd, request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn get<T>(fd: c_int, request: c_ulong) -> io::Result<T> {
    // SAFETY: integers, and structures of such; all zeros is a value.
    let mut value: T = unsafe { std::mem::zeroed() };
    ioctl(fd, request, &raw mut value).map(|()| value)
}

/// The mode of a terminal, by either end.
fn mode(fd: c_int) -> io::Result<termios2> {
    get(fd, libc::TCGETS2)
}

fn set_mode(fd: c_int, mode: &termios2) -> io::Result<()> {
    let mut mode = *mode;
    ioctl(fd, libc::TCSETS2, &raw mut mode)
}

fn reads_lines(mode: &termios2) -> bool {
    mode.c_lflag & (libc::ICANON | libc::EXTPROC) == libc::ICANON
}

/// The same mode, in which what is written to the slave arrives as it is.
fn plain_output(mode: &termios2) -> termios2 {
    termios2 { c_oflag: 0, ..*mode }
}

/// The same mode, in which what is written to the master arrives as it is, in lines where the mode has lines. Without a
/// character that stops the output IXON changes nothing, and to turn it off would let stopped output go on.
fn plain_input(mode: &termios2) -> termios2 {
    let mut plain = plain_output(mode);
    plain.c_iflag &= libc::IXON;
    plain.c_lflag = if reads_lines(mode) { mode.c_lflag & (libc::ICANON | libc::IEXTEN) } else { 0 };
    for (index, character) in plain.c_cc.iter_mut().enumerate() {
        if !reads_lines(mode) || ![libc::VEOF, libc::VEOL, libc::VEOL2].contains(&index) {
            *character = 0;
        }
    }
    plain
}

/// The same mode without lines, in which a read returns as soon as there is anything.
fn without_lines(mode: &termios2) -> termios2 {
    let mut without = termios2 { c_lflag: mode.c_lflag & !libc::ICANON, ..*mode };
    (without.c_cc[libc::VMIN], without.c_cc[libc::VTIME]) = (1, 0);
    without
}

fn poll(fd: c_int, event: i16, milliseconds: c_int) -> bool {
    let mut asked = pollfd { fd, events: event, revents: 0 };
    // SAFETY: the one structure is ours.
    unsafe { libc::poll(&raw mut asked, 1, milliseconds) == 1 && asked.revents & event != 0 }
}

fn fcntl_flags(fd: c_int, command: c_int, flags: c_int) -> c_int {
    let real = real!(c"fcntl64", Fcntl);
    // SAFETY: numbers only.
    unsafe { real(fd, command, flags as usize) }
}

/// Reads until nothing is left; each piece goes to `each`.
fn read_all(fd: c_int, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let real = real!(c"read", Read);
    let mut piece = [0u8; PIECE];
    while poll(fd, libc::POLLIN, 0) {
        // SAFETY: the buffer is ours.
        match usize::try_from(unsafe { real(fd, piece.as_mut_ptr().cast(), PIECE) }) {
            Ok(size) => each(&piece[..size]),
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => break,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Writes all; the terminal makes room within a moment.
fn write_all(fd: c_int, mut bytes: &[u8]) -> io::Result<()> {
    let real = real!(c"write", Write);
    while !bytes.is_empty() {
        // SAFETY: the bytes are ours.
        match usize::try_from(unsafe { real(fd, bytes.as_ptr().cast(), bytes.len()) }) {
            Ok(size) => bytes = &bytes[size..],
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => {
                if !poll(fd, libc::POLLOUT, PATIENCE) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Takes what waits in the slave, which is in this mode: complete lines, and what is not complete yet. The mode is
/// another one afterwards.
fn take_input(slave: c_int, mode: &termios2) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if reads_lines(mode) {
        let ends = [b'\n', mode.c_cc[libc::VEOL], mode.c_cc[libc::VEOL2]];
        read_all(slave, |line| {
            bytes.extend(line);
            if !line.last().is_some_and(|last| *last != 0 && ends.contains(last)) {
                bytes.push(mode.c_cc[libc::VEOF]);
            }
        })?;
    }
    set_mode(slave, &without_lines(mode))?;
    read_all(slave, |piece| bytes.extend(piece))?;
    Ok(bytes)
}

/// What waits at the master and at the slave. It waits there afterwards, too.
fn look(master: c_int, slave: c_int) -> io::Result<[Vec<u8>; 2]> {
    let packets: c_int = get(master, libc::TIOCGPKT)?;
    if packets != 0 && poll(master, libc::POLLPRI, 0) {
        return Err(io::Error::other("a change of the terminal's state waits to be read"));
    }
    let waits: c_int = get(master, libc::FIONREAD)?;
    if waits > 0 && waits < NEARLY_FULL && !poll(slave, libc::POLLOUT, 0) {
        return Err(io::Error::other("the terminal's output is stopped"));
    }
    let mode = mode(slave)?;
    let flags = [master, slave].map(|fd| (fd, fcntl_flags(fd, libc::F_GETFL, 0)));
    for (fd, flags) in flags {
        fcntl_flags(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
    let set_packets = |mut on: c_int| ioctl(master, libc::TIOCPKT, &raw mut on);
    let copied = (|| {
        if packets != 0 {
            set_packets(0)?;
        }
        let mut output = Vec::new();
        read_all(master, |piece| output.extend(piece))?;
        let input = take_input(slave, &mode)?;
        set_mode(slave, &plain_input(&mode))?;
        // Both, whatever becomes of the first one.
        let put = [write_all(slave, &output), write_all(master, &input)];
        put.into_iter().collect::<io::Result<()>>()?;
        settle(slave);
        Ok([output, input])
    })();
    let ended = set_mode(slave, &mode);
    if packets != 0 {
        set_packets(packets)?;
    }
    for (fd, flags) in flags {
        fcntl_flags(fd, libc::F_SETFL, flags);
    }
    ended.and(copied)
}

/// Has the kernel pass on what was written to the master: what it means depends on the mode at that time.
fn settle(slave: c_int) {
    poll(slave, libc::POLLIN, 0);
}

/// The first look at an end; `None` where criu reads from something else.
fn copies(fd: c_int) -> Option<io::Result<[Copy; 2]>> {
    let end = End::of(fd)?;
    let other = end.other().find()?;
    let (master, slave) = if matches!(end, End::Master(_)) { (fd, other) } else { (other, fd) };
    let of = [Open::of(master)?, Open::of(slave)?];
    Some(look(master, slave).map(|bytes| {
        let [output, input] = bytes;
        [Copy { of: of[0], bytes: output }, Copy { of: of[1], bytes: input }]
    }))
}

/// What criu gets instead of what it reads in a dump: so many bytes, or an error; `None` where it reads from something
/// else.
fn answer(fd: c_int, buffer: &mut [u8]) -> Option<io::Result<usize>> {
    let open = Open::of(fd)?;
    let mut all = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
    if !all.iter().any(|copy| copy.of == open) {
        match copies(fd)? {
            Ok(copies) => all.extend(copies),
            Err(error) => return Some(Err(error)),
        }
    }
    let copy = all.iter_mut().find(|copy| copy.of == open)?;
    if copy.bytes.is_empty() {
        return Some(Err(io::ErrorKind::WouldBlock.into()));
    }
    let size = copy.bytes.len().min(buffer.len());
    buffer[..size].copy_from_slice(&copy.bytes[..size]);
    copy.bytes.drain(..size);
    Some(Ok(size))
}

/// Puts in place what a dump has read at the other end.
fn put(fd: c_int, end: End, bytes: &[u8]) -> io::Result<()> {
    let mode = mode(fd)?;
    let packets: c_int = if matches!(end, End::Master(_)) { get(fd, libc::TIOCGPKT)? } else { 0 };
    let set_packets = |mut on: c_int| ioctl(fd, libc::TIOCPKT, &raw mut on);
    if packets != 0 {
        set_packets(0)?;
    }
    let plain = if matches!(end, End::Master(_)) { plain_input(&mode) } else { plain_output(&mode) };
    let put = set_mode(fd, &plain).and_then(|()| write_all(fd, bytes));
    if matches!(end, End::Master(_)) {
        // SAFETY: the request takes flags, and returns a new descriptor, which is closed at once.
        let peer = unsafe { libc::ioctl(fd, libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) };
        if peer >= 0 {
            settle(peer);
            // SAFETY: it is ours.
            unsafe { libc::close(peer) };
        }
    }
    let ended = set_mode(fd, &mode);
    if packets != 0 {
        set_packets(packets)?;
    }
    put.and(ended)
}

/// Stands in for libc's `read`.
///
/// # Safety
/// As libc's: the buffer must hold `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize {
    // A terminal has a mode.
    if is_dump() && count > 0 && mode(fd).is_ok() {
        // SAFETY: by contract.
        let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.cast(), count) };
        match answer(fd, buffer) {
            Some(Ok(size)) => return size as isize,
            Some(Err(error)) => {
                crate::shared::set_errno(match error.kind() {
                    io::ErrorKind::WouldBlock => libc::EAGAIN,
                    _ => error.raw_os_error().unwrap_or(libc::EIO),
                });
                return -1;
            }
            None => {}
        }
    }
    let real = real!(c"read", Read);
    // SAFETY: handed on as it came.
    unsafe { real(fd, buffer, count) }
}

/// Stands in for libc's `write`.
///
/// # Safety
/// As libc's: the buffer must hold `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize {
    if (is_dump() || is_restore())
        && mode(fd).is_ok()
        && let Some(end) = End::of(fd)
    {
        // SAFETY: by contract.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast(), count) };
        if is_dump() || put(fd, end, bytes).is_ok() {
            return count as isize;
        }
        crate::shared::set_errno(libc::EIO);
        return -1;
    }
    let real = real!(c"write", Write);
    // SAFETY: handed on as it came.
    unsafe { real(fd, buffer, count) }
}

/// Stands in for libc's function of this name, by which criu has reads from terminals return at once. They do.
///
/// # Safety
/// As libc's: the argument must fit the command.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    const UNBLOCKED: usize = (libc::O_RDWR | libc::O_NONBLOCK) as usize;
    if command == libc::F_SETFL && argument == UNBLOCKED && is_dump() && End::of(fd).is_some() {
        return 0;
    }
    let real = real!(c"fcntl64", Fcntl);
    // SAFETY: handed on as it came.
    unsafe { real(fd, command, argument) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_in_a_terminal_is_there_after_each_look() {
        let (mut master, mut slave) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are ours; nothing else is asked for.
        assert_eq!(unsafe { libc::openpty(&raw mut master, &raw mut slave, none, none.cast(), none.cast()) }, 0);
        let mut lines = mode(slave).unwrap();
        (lines.c_iflag, lines.c_oflag, lines.c_lflag) = (0, 0, libc::ICANON | libc::ECHO);
        set_mode(slave, &lines).unwrap();
        write_all(master, b"one\n\x04unfin").unwrap();
        while get::<c_int>(master, libc::FIONREAD).unwrap() < 9 {
            settle(slave);
        }
        for _ in 0..3 {
            assert_eq!(look(master, slave).unwrap(), [&b"one\nunfin"[..], b"one\n\x04unfin"]);
        }
        write_all(master, b"ished\n").unwrap();
        settle(slave);
        let mut pieces = Vec::new();
        read_all(slave, |piece| pieces.push(piece.to_vec())).unwrap();
        assert_eq!(pieces, [&b"one\n"[..], b"", b"unfinished\n"]);
    }
}
