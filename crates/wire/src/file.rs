use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde::{Deserialize, Serialize};

use crate::io::{read_json, write_frame};
use crate::{FileError, FrameHeader, Kind, MAX_FILE_DATA, ReadError, WireError, read_header};

/// The limit for one file that suits CRIU's images without pages, in bytes.
pub const MAX_FILE: u64 = 64 << 20;
const MAX_NAME: usize = 255;

/// Announces a file; [`FrameHeader::FileData`] frames with `size` bytes in all follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileBegin {
    /// Its name, without any directory.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its permission bits on the sender's side; for information, the receiver creates it 0600.
    pub mode: u32,
}

impl FileBegin {
    /// Whether a receiver takes it: a plain name, a size of `limit` bytes at most.
    ///
    /// # Errors
    /// [`WireError::Name`] or [`WireError::TooLong`].
    pub fn check(&self, limit: u64) -> Result<(), WireError> {
        check_name(&self.name)?;
        if self.size > limit {
            return Err(WireError::TooLong { what: "a file", length: self.size, limit });
        }
        if self.mode & !0o7777 != 0 {
            return Err(WireError::Unknown { field: "the mode of a file", value: self.mode.into() });
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), WireError> {
    let fail =
        |why| Err(WireError::Name { what: "the file name", name: name.chars().take(80).collect::<String>(), why });
    if name.is_empty() {
        return fail("it is empty");
    }
    if name.len() > MAX_NAME {
        return fail("it is too long");
    }
    if name == "." || name == ".." {
        return fail("it names a directory");
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')) {
        return fail("only letters, digits, '.', '_' and '-' are allowed");
    }
    Ok(())
}

/// Sends a regular file of at most `limit` bytes under its own name. Does not flush. Returns its size in bytes.
///
/// # Errors
/// If it is not a regular file (a symbolic link is not followed), its name or size is not allowed, it shrinks meanwhile,
/// and those of the stream; the stream is then in the middle of a file and of no more use.
pub fn send_file<W: Write>(w: &mut W, path: &Path, limit: u64) -> Result<u64, FileError> {
    let local = |action| move |source| FileError::Local { action, path: path.to_owned(), source };
    let mut file = File::options()
        .read(true)
        // O_NONBLOCK so that a FIFO of that name cannot make us wait; it means nothing for regular files.
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
        .map_err(local("open"))?;
    let metadata = file.metadata().map_err(local("examine"))?;
    if !metadata.is_file() {
        return Err(local("send")(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let begin = FileBegin { name, size: metadata.len(), mode: metadata.mode() & 0o7777 };
    begin.check(limit)?;
    let json = serde_json::to_vec(&begin).map_err(|e| WireError::Json { kind: Kind::FileBegin, why: e.to_string() })?;
    write_frame(w, &FrameHeader::file_begin(json.len())?, &json)?;

    let mut buffer = vec![0; begin.size.min(u64::from(MAX_FILE_DATA)) as usize];
    let mut offset = 0;
    while offset < begin.size {
        let piece = (begin.size - offset).min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..piece]).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => FileError::Shrunk { path: path.to_owned() },
            _ => local("read")(e),
        })?;
        write_frame(w, &FrameHeader::file_data(offset, piece)?, &buffer[..piece])?;
        offset += piece as u64;
    }
    Ok(begin.size)
}

/// Receives a file of at most `limit` bytes into the directory `into`, where nothing of its name may exist. It is created
/// with mode 0600; if it does not arrive whole it is removed.
///
/// # Errors
/// If the peer sends something else than a file or one that is not allowed, if it cannot be created, and those of the
/// stream.
pub fn receive_file<R: Read>(r: &mut R, into: &Path, limit: u64) -> Result<FileBegin, FileError> {
    let header = read_header(r)?;
    receive_file_after(&header, r, into, limit)
}

/// Receives the rest of a file whose first header was read with [`read_header`].
///
/// # Errors
/// As [`receive_file`].
pub fn receive_file_after<R: Read>(
    header: &FrameHeader,
    r: &mut R,
    into: &Path,
    limit: u64,
) -> Result<FileBegin, FileError> {
    let begin: FileBegin = read_json(header, Kind::FileBegin, r)?;
    begin.check(limit)?;

    let directory: OwnedFd = File::options()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(into)
        .map_err(|source| FileError::Local { action: "open the directory", path: into.to_owned(), source })?
        .into();
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let local = |action| {
        let path = into.join(&begin.name);
        move |source| FileError::Local { action, path, source }
    };
    let file = openat(&directory, begin.name.as_str(), flags, Mode::from_bits_truncate(0o600))
        .map_err(|e| local("create")(e.into()))?;
    let result = receive_content(r, &mut File::from(file), begin.size, || local("write to"));
    if result.is_err() {
        // The first error is the one to report; a file that stays is in a directory that the caller removes anyway.
        let _ = unlinkat(&directory, begin.name.as_str(), UnlinkatFlags::NoRemoveDir);
    }
    result.map(|()| begin)
}

fn receive_content<R: Read, E: FnOnce(io::Error) -> FileError>(
    r: &mut R,
    file: &mut File,
    size: u64,
    local: impl Fn() -> E,
) -> Result<(), FileError> {
    let mut received = 0;
    let mut buffer = Vec::new();
    while received < size {
        let (offset, length) = match read_header(r)? {
            FrameHeader::FileData { offset, length } => (offset, u64::from(length)),
            other => return Err(ReadError::Unexpected { expected: Kind::FileData, found: other.kind() }.into()),
        };
        if offset != received || length > size - received {
            return Err(WireError::OutOfRange { kind: Kind::FileData, address: offset, length }.into());
        }
        buffer.clear();
        r.by_ref().take(length).read_to_end(&mut buffer).map_err(ReadError::Io)?;
        if buffer.len() as u64 != length {
            return Err(ReadError::Io(ErrorKind::UnexpectedEof.into()).into());
        }
        file.write_all(&buffer).map_err(local())?;
        received += length;
    }
    Ok(())
}
