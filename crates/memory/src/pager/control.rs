//! What an agent and a pager say to each other: messages on a local socket that keeps their boundaries.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::SendTimeout;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, connect, listen, setsockopt, socket};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::{Deserialize, Serialize};
use tranship_sys::descriptor;
use tranship_types::{AddressSpaceId, Latencies, PAGE_SIZE, PageRange, SharedObject};

use crate::index::Extent;

/// Bytes of an extent in an `Extents` message.
const EXTENT_BYTES: usize = 24;
/// Extents in one message.
pub(super) const BATCH: usize = 1024;
/// Bytes of a range of pages in a message.
const RANGE_BYTES: usize = 16;
/// How long a pager may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Largest message.
const MESSAGE_CAP: usize = 1 + EXTENT_BYTES * BATCH;

/// Pages of one address space that are in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredExtent {
    /// Whose they are.
    pub space: AddressSpaceId,
    /// Where they belong and where they are.
    pub extent: Extent,
}

/// What a pager is told.
#[derive(Debug)]
pub(super) enum Message {
    /// The arena's file.
    Arena(OwnedFd),
    /// Pages that are in it now.
    Extents(Vec<StoredExtent>),
    /// These pages of an address space are zeros again.
    Gone(AddressSpaceId, PageRange),
    /// These pages of an address space come later; what there was of them is out of date.
    Later(AddressSpaceId, Vec<PageRange>),
    /// A piece of shared memory, and the file that its pages are written to: to be kept.
    Object(SharedObject, OwnedFd),
    /// Every page has come or been named as coming later: all others are zero.
    Named,
    /// Send what is wanted to this socket from now on, beginning with everything that somebody waits for.
    Subscribe,
    /// Say which pages have not come.
    Missing,
    /// Hand out the arena's file.
    Reattach,
    /// The tasks run: put every page in place.
    Fill,
    /// Say how things stand.
    Status,
    /// End now, whatever is left.
    Quit,
}

/// How things stand with a pager.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Whether every page has come or been named as coming later.
    pub named: bool,
    /// Whether criu has said that the restore is finished.
    pub restored: bool,
    /// Whether every page is where it belongs.
    pub drained: bool,
    /// Bytes that still have to be put into the tasks, at most: what is out of date and was not looked at yet counts, too.
    pub pending_bytes: u64,
    /// Bytes put into the tasks so far.
    pub installed_bytes: u64,
    /// Bytes that have not come from the source yet.
    pub remote_bytes: u64,
    /// Faults answered so far.
    pub faults: u64,
    /// How long threads waited for pages that had not come yet.
    pub remote_faults: Latencies,
    /// Faults that wait for a page that has not come.
    pub waiting: u64,
    /// Most bytes of memory that the store has occupied.
    pub peak_bytes: u64,
    /// Why a file of the pager's cannot be written, for as long as that is so. Pages are supplied meanwhile.
    #[serde(default)]
    pub trouble: Option<String>,
}

impl ControlError {
    /// Whether there is certainly no pager, nor a keeper that would start another one: nobody listens at the socket any more.
    pub fn is_gone(&self) -> bool {
        let gone = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
        matches!(self, Self::Absent { source, .. } if gone.contains(&source.kind()))
    }
}

impl Message {
    /// Whether it asks for something and changes nothing.
    pub fn is_question(&self) -> bool {
        matches!(self, Self::Status | Self::Missing | Self::Reattach | Self::Quit)
    }

    /// Whether a descriptor comes along, for keeping.
    pub fn brings_descriptor(bytes: &[u8]) -> bool {
        matches!(bytes.first(), Some(b'A' | b'O'))
    }
}

pub(super) fn encode(message: &Message) -> Vec<u8> {
    match message {
        Message::Arena(_) => vec![b'A'],
        Message::Gone(space, range) => {
            let mut bytes = vec![b'Z'];
            bytes.extend_from_slice(&u64::from(space.0).to_le_bytes());
            bytes.extend_from_slice(&range.start.to_le_bytes());
            bytes.extend_from_slice(&range.end.to_le_bytes());
            bytes
        }
        Message::Later(space, ranges) => {
            let mut bytes = Vec::with_capacity(5 + ranges.len() * RANGE_BYTES);
            bytes.push(b'L');
            bytes.extend_from_slice(&space.0.to_le_bytes());
            for range in ranges {
                bytes.extend_from_slice(&range.start.to_le_bytes());
                bytes.extend_from_slice(&range.end.to_le_bytes());
            }
            bytes
        }
        Message::Object(object, _) => {
            let mut bytes = vec![b'O'];
            bytes.extend(serde_json::to_vec(object).expect("a description is plain data"));
            bytes
        }
        Message::Named => vec![b'N'],
        Message::Subscribe => vec![b'W'],
        Message::Missing => vec![b'M'],
        Message::Reattach => vec![b'R'],
        Message::Fill => vec![b'F'],
        Message::Status => vec![b'S'],
        Message::Quit => vec![b'Q'],
        Message::Extents(extents) => {
            let mut bytes = Vec::with_capacity(1 + extents.len() * EXTENT_BYTES);
            bytes.push(b'I');
            for StoredExtent { space, extent } in extents {
                bytes.extend_from_slice(&space.0.to_le_bytes());
                bytes.extend_from_slice(&(extent.range.pages() as u32).to_le_bytes());
                bytes.extend_from_slice(&extent.range.start.to_le_bytes());
                bytes.extend_from_slice(&extent.offset.to_le_bytes());
            }
            bytes
        }
    }
}

pub(super) fn decode(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<Message> {
    let (kind, body) = bytes.split_first()?;
    Some(match (kind, body.len()) {
        (b'A', 0) => Message::Arena(descriptors.into_iter().next()?),
        (b'Z', 24) => {
            let word = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("8 bytes"));
            Message::Gone(AddressSpaceId(u32::try_from(word(0)).ok()?), PageRange::new(word(8), word(16))?)
        }
        (b'O', _) => Message::Object(serde_json::from_slice(body).ok()?, descriptors.into_iter().next()?),
        (b'N', 0) => Message::Named,
        (b'W', 0) => Message::Subscribe,
        (b'M', 0) => Message::Missing,
        (b'R', 0) => Message::Reattach,
        (b'L', len) if len >= 4 && (len - 4).is_multiple_of(RANGE_BYTES) => {
            let (space, ranges) = decode_ranges(body)?;
            Message::Later(space, ranges)
        }
        (b'F', 0) => Message::Fill,
        (b'S', 0) => Message::Status,
        (b'Q', 0) => Message::Quit,
        (b'I', len) if len.is_multiple_of(EXTENT_BYTES) => Message::Extents(
            body.chunks_exact(EXTENT_BYTES)
                .map(|row| {
                    let word = |at: usize| u64::from_le_bytes(row[at..at + 8].try_into().expect("8 bytes"));
                    let half = |at: usize| u32::from_le_bytes(row[at..at + 4].try_into().expect("4 bytes"));
                    let start = word(8);
                    let range = PageRange::new(start, start.checked_add(u64::from(half(4)) * PAGE_SIZE)?)?;
                    Some(StoredExtent { space: AddressSpaceId(half(0)), extent: Extent { range, offset: word(16) } })
                })
                .collect::<Option<_>>()?,
        ),
        _ => return None,
    })
}

/// An address space and ranges in it, as `Later` has them and as the pager names missing and wanted pages.
pub(super) fn encode_ranges(space: AddressSpaceId, ranges: &[PageRange]) -> Vec<u8> {
    encode(&Message::Later(space, ranges.to_vec())).split_off(1)
}

fn decode_ranges(bytes: &[u8]) -> Option<(AddressSpaceId, Vec<PageRange>)> {
    let (space, rows) = bytes.split_first_chunk::<4>()?;
    let word = |row: &[u8], at: usize| u64::from_le_bytes(row[at..at + 8].try_into().expect("8 bytes"));
    let ranges = rows.chunks_exact(RANGE_BYTES).map(|row| PageRange::new(word(row, 0), word(row, 8)));
    Some((AddressSpaceId(u32::from_le_bytes(*space)), ranges.collect::<Option<_>>()?))
}

/// A message that is still in its socket, so that it is not lost with this process.
pub(super) struct Peeked {
    /// What it says.
    pub message: Message,
    /// The same as it came.
    pub bytes: Vec<u8>,
    /// The number of the descriptor that came along.
    pub descriptor: Option<RawFd>,
}

impl Peeked {
    /// Takes it out of its socket.
    pub fn discard(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        descriptor::discard(socket, self.bytes.len())
    }
}

/// The next message, if there is one. `UnexpectedEof` when the peer has hung up.
///
/// # Errors
/// The peer has hung up or talks nonsense.
pub(super) fn peek(socket: BorrowedFd<'_>) -> io::Result<Option<Peeked>> {
    let mut bytes = vec![0; MESSAGE_CAP];
    let Some((got, descriptors)) = descriptor::peek(socket, &mut bytes)? else { return Ok(None) };
    bytes.truncate(got);
    if bytes.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let descriptor = descriptors.first().map(AsRawFd::as_raw_fd);
    let message = decode(&bytes, descriptors).ok_or_else(nonsense)?;
    Ok(Some(Peeked { message, bytes, descriptor }))
}

/// Makes the listening control socket. It gets its name only when it listens, so that who sees it can connect.
pub(super) fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let nascent = path.with_extension("nascent");
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(&nascent)?)?;
    listen(&fd, nix::sys::socket::Backlog::new(4)?)?;
    std::fs::rename(&nascent, path)?;
    Ok(fd)
}

/// What an agent can fail at with a pager.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No pager listens there.
    #[error("the pager does not answer at {path:?}: {source}")]
    Absent {
        /// Its control socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It broke off or did not answer in time.
    #[error("the pager broke off: {0}")]
    Broken(#[from] io::Error),
}

/// The agent's end of a pager.
#[derive(Debug)]
pub struct PagerHandle {
    socket: OwnedFd,
    directory: PathBuf,
}

impl PagerHandle {
    /// Connects to the pager of the migration whose directory is `directory`. What is sent then may take as long as it takes.
    ///
    /// # Errors
    /// There is no pager, or it does not take calls within a few seconds.
    pub fn connect(directory: &Path) -> Result<Self, ControlError> {
        let handle = Self::connect_within(directory, CONNECT)?;
        handle.limit_sending(Duration::ZERO)?;
        Ok(handle)
    }

    /// The same for questions: neither to connect nor to send any of them takes longer than `limit`. A pager that is stopped
    /// accepts no connection, and the queue of those that wait for that is short.
    ///
    /// # Errors
    /// There is no pager, or it does not take calls in time.
    pub fn connect_within(directory: &Path, limit: Duration) -> Result<Self, ControlError> {
        let path = directory.join(super::CONTROL_SOCKET);
        let go = || -> io::Result<Self> {
            let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
            let handle = Self { socket, directory: directory.to_owned() };
            handle.limit_sending(limit)?;
            connect(handle.socket.as_raw_fd(), &UnixAddr::new(&path)?)?;
            Ok(handle)
        };
        go().map_err(|source| ControlError::Absent { path: path.clone(), source })
    }

    /// `SO_SNDTIMEO`, which bounds connect as well (unix(7)); zero is no limit.
    fn limit_sending(&self, limit: Duration) -> io::Result<()> {
        let limit = TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX));
        Ok(setsockopt(&self.socket, SendTimeout, &limit)?)
    }

    /// Another way to the same pager: what is said here does not wait behind what is said there.
    pub fn another(&self) -> Result<Self, ControlError> {
        Self::connect(&self.directory)
    }

    fn send(&self, message: &Message) -> Result<(), ControlError> {
        let descriptors: &[BorrowedFd<'_>] = match message {
            Message::Arena(fd) | Message::Object(_, fd) => &[fd.as_fd()],
            _ => &[],
        };
        descriptor::send(self.socket.as_fd(), &encode(message), descriptors)?;
        Ok(())
    }

    /// Hands over the arena's file.
    pub fn arena(&self, file: BorrowedFd<'_>) -> Result<(), ControlError> {
        self.send(&Message::Arena(file.try_clone_to_owned()?))
    }

    /// Says that pages are in the arena.
    pub fn extents(&self, extents: &[StoredExtent]) -> Result<(), ControlError> {
        extents.chunks(BATCH).try_for_each(|batch| self.send(&Message::Extents(batch.to_vec())))
    }

    /// Says that pages are zeros again.
    pub fn gone(&self, space: AddressSpaceId, range: PageRange) -> Result<(), ControlError> {
        self.send(&Message::Gone(space, range))
    }

    /// Says that pages come later, and that what came of them before is out of date.
    pub fn later(&self, space: AddressSpaceId, ranges: &[PageRange]) -> Result<(), ControlError> {
        ranges.chunks(BATCH).try_for_each(|batch| self.send(&Message::Later(space, batch.to_vec())))
    }

    /// Hands over the file that becomes a piece of shared memory, for keeping.
    pub fn object(&self, object: &SharedObject, file: BorrowedFd<'_>) -> Result<(), ControlError> {
        self.send(&Message::Object(object.clone(), file.try_clone_to_owned()?))
    }

    /// Says that every page has come or been named as coming later.
    pub fn named(&self) -> Result<(), ControlError> {
        self.send(&Message::Named)
    }

    /// Has this handle be told which pages are wanted, from now on and first of all those that somebody waits for: see
    /// [`Self::wanted`]. It is then of no use for anything else.
    pub fn subscribe(&self) -> Result<(), ControlError> {
        self.send(&Message::Subscribe)
    }

    /// Waits for pages to be wanted, with the source's addresses; `None` if none are within `timeout`.
    pub fn wanted(&self, timeout: Duration) -> Result<Option<(AddressSpaceId, Vec<PageRange>)>, ControlError> {
        let mut buffer = [0; 4 + RANGE_BYTES];
        match self.receive(timeout, &mut buffer) {
            Ok((got, _)) => decode_ranges(&buffer[..got]).map(Some).ok_or_else(|| nonsense().into()),
            Err(ControlError::Broken(error)) if error.kind() == io::ErrorKind::TimedOut => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Asks which pages have not come, with the source's addresses.
    pub fn missing(&self, timeout: Duration) -> Result<Vec<(AddressSpaceId, Vec<PageRange>)>, ControlError> {
        self.ask(&Message::Missing)?;
        let mut all = Vec::new();
        let mut buffer = vec![0; MESSAGE_CAP];
        loop {
            let (got, _) = self.receive(timeout, &mut buffer)?;
            let (space, ranges) = decode_ranges(&buffer[..got]).ok_or_else(nonsense)?;
            if ranges.is_empty() {
                return Ok(all);
            }
            all.push((space, ranges));
        }
    }

    /// Asks for the arena's file, and how many bytes of it, from its beginning, are in use.
    pub fn reattach(&self, timeout: Duration) -> Result<(OwnedFd, u64), ControlError> {
        self.ask(&Message::Reattach)?;
        let mut used = [0; 8];
        let (got, descriptors) = self.receive(timeout, &mut used)?;
        match descriptors.into_iter().next() {
            Some(file) if got == used.len() => Ok((file, u64::from_le_bytes(used))),
            _ => Err(nonsense().into()),
        }
    }

    /// Says that the tasks run, so that every page shall be put in place.
    pub fn fill(&self) -> Result<(), ControlError> {
        self.send(&Message::Fill)
    }

    /// Ends the pager, whatever is left.
    pub fn quit(&self) -> Result<(), ControlError> {
        self.send(&Message::Quit)
    }

    /// Asks how things stand. The answer comes after everything that was said before has been dealt with.
    pub fn status(&self, timeout: Duration) -> Result<Status, ControlError> {
        self.ask(&Message::Status)?;
        self.answer(timeout)
    }

    /// Waits until every page is where it belongs; the pager says so by itself.
    pub fn drained(&self, timeout: Duration) -> Result<Status, ControlError> {
        self.answer(timeout)
    }

    /// Sends a question. What was not read until now does not answer it: a pager that takes over may answer an earlier
    /// question again.
    fn ask(&self, question: &Message) -> Result<(), ControlError> {
        let mut buffer = vec![0; MESSAGE_CAP];
        while self.receive(Duration::ZERO, &mut buffer).is_ok() {}
        self.send(question)
    }

    fn answer(&self, timeout: Duration) -> Result<Status, ControlError> {
        let mut buffer = [0; 8192];
        let (got, _) = self.receive(timeout, &mut buffer)?;
        Ok(serde_json::from_slice(&buffer[..got]).map_err(io::Error::from)?)
    }

    fn receive(&self, timeout: Duration, into: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), ControlError> {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        let wait = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, wait).map_err(io::Error::from)? == 0 {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        let (got, descriptors) = descriptor::receive(self.socket.as_fd(), into)?;
        if got == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok((got, descriptors))
    }
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its answer cannot be understood")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_message_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes, Vec::new());
        }

        #[test]
        fn extents_come_back(rows in proptest::collection::vec((any::<u32>(), 1u64..1000, 0u64..1 << 34, 0u64..1 << 34), 0..20)) {
            let extents: Vec<StoredExtent> = rows
                .into_iter()
                .map(|(space, pages, first, offset)| StoredExtent {
                    space: AddressSpaceId(space),
                    extent: Extent {
                        range: PageRange { start: first * PAGE_SIZE, end: (first + pages) * PAGE_SIZE },
                        offset: offset * PAGE_SIZE,
                    },
                })
                .collect();
            let Some(Message::Extents(back)) = decode(&encode(&Message::Extents(extents.clone())), Vec::new()) else {
                panic!("another kind");
            };
            prop_assert_eq!(back, extents);
        }
    }
}
