//! What a holder has open of a stream: where it reads, and where it writes.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};
use rustix::fs::FileType;

/// The journal's socket for streams of services (systemd-journald.service(8)).
pub const JOURNAL: &str = "/run/systemd/journal/stdout";
/// Priorities of syslog.
const INFORMATION: u8 = 6;
const ERROR: u8 = 3;

/// Something open that never makes the holder wait.
#[derive(Debug)]
pub enum End {
    /// Of a socket of the node, which other processes may share.
    Shared(OwnedFd),
    /// Of a socket that the holder has made.
    Socket(OwnedFd),
    /// Of anything else.
    File(File),
    /// Of a regular file, from a position on.
    Rest(File, u64),
}

impl End {
    /// Opens what a descriptor refers to once more, so that its flags are the holder's alone. A
    /// regular file stays the same open file: its offset and `O_APPEND` are those of the processes
    /// that share it, and it never makes anybody wait.
    pub fn reading(descriptor: OwnedFd) -> io::Result<Self> {
        Self::again(descriptor, OpenOptions::new().read(true))
    }

    /// Has those that share a regular file be at its end: what they have not read is for the holder
    /// alone. One that is written, too, stays as it is.
    pub fn rest(self) -> io::Result<Self> {
        let Self::File(mut file) = self else { return Ok(self) };
        let mode = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?) & OFlag::O_ACCMODE;
        if !file.metadata()?.is_file() || mode != OFlag::O_RDONLY {
            return Ok(Self::File(file));
        }
        let position = file.stream_position()?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self::Rest(file, position))
    }

    /// Opens for writing what a descriptor refers to, as [`End::reading`] does.
    pub fn writing(descriptor: OwnedFd) -> io::Result<Self> {
        Self::again(descriptor, OpenOptions::new().write(true))
    }

    /// What the holder has made itself.
    pub fn own(descriptor: OwnedFd) -> io::Result<Self> {
        if FileType::from_raw_mode(rustix::fs::fstat(&descriptor)?.st_mode) == FileType::Socket {
            return Ok(Self::Socket(descriptor));
        }
        let flags = OFlag::from_bits_retain(fcntl(&descriptor, FcntlArg::F_GETFL)?);
        fcntl(&descriptor, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self::File(descriptor.into()))
    }

    fn again(descriptor: OwnedFd, options: &mut OpenOptions) -> io::Result<Self> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&descriptor)?.st_mode);
        match kind {
            FileType::Socket => return Ok(Self::Shared(descriptor)),
            FileType::RegularFile => return Ok(Self::File(descriptor.into())),
            _ => {}
        }
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        options.custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits()).open(path).map(Self::File)
    }

    /// A file at whose end output is put, made where it is not there.
    pub fn appending(path: &Path) -> io::Result<Self> {
        let flags = (OFlag::O_NOCTTY | OFlag::O_NONBLOCK).bits();
        OpenOptions::new().append(true).create(true).mode(0o640).custom_flags(flags).open(path).map(Self::File)
    }

    /// A stream of the journal, whose lines have this identifier.
    pub fn journal(identifier: &str, is_error: bool) -> io::Result<Self> {
        let mut socket = UnixStream::connect(JOURNAL)?;
        let priority = if is_error { ERROR } else { INFORMATION };
        // Identifier, unit, priority, level prefix, and whether lines go on to syslog, kmsg and the
        // console.
        socket.write_all(format!("{identifier}\n\n{priority}\n0\n0\n0\n0\n").as_bytes())?;
        Ok(Self::Socket(socket.into()))
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Shared(socket) | Self::Socket(socket) => {
                Ok(recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT)?)
            }
            Self::File(file) => file.read(buffer),
            Self::Rest(file, position) => {
                let count = file.read_at(buffer, *position)?;
                *position += count as u64;
                Ok(count)
            }
        }
    }

    /// Nothing more is written. A socket of the holder's may go on being read; shutdown(2) of one
    /// of the node's would end it for every process that shares it.
    pub fn finish(self) {
        if let Self::Socket(socket) = &self {
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Shared(socket) | Self::Socket(socket) => {
                Ok(send(socket.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?)
            }
            Self::File(file) => file.write(bytes),
            Self::Rest(..) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Shared(socket) | Self::Socket(socket) => socket.as_fd(),
            Self::File(file) | Self::Rest(file, _) => file.as_fd(),
        }
    }
}
