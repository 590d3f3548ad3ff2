use std::io;
use std::path::PathBuf;

use crate::{Codec, Kind, Versions};

/// Bytes that are not of this protocol, or a value that it cannot carry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not [`crate::MAGIC`].
    #[error("the peer does not speak Tranship's protocol; check that the address is that of a Tranship agent")]
    Magic,
    /// A length is over its limit.
    #[error("{what} of {length} bytes is over the limit of {limit} bytes")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length in bytes.
        length: u64,
        /// The most that is allowed, in bytes.
        limit: u64,
    },
    /// The greeting ends before its last field does.
    #[error("a greeting ends in the middle of its {field}; the peer is not a Tranship agent, or a faulty one")]
    Truncated {
        /// The field that is cut.
        field: &'static str,
    },
    /// A field has a value that the protocol does not know.
    #[error("{field} has the unknown value {value}; the peer is faulty or of another version")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A field that must be zero in a frame of this kind is not.
    #[error("{field} of a {kind} frame is {value} and must be 0; the peer is faulty or of another version")]
    NotZero {
        /// The frame's kind.
        kind: Kind,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A frame that carries something carries nothing.
    #[error("a {kind} frame is empty; the peer is faulty")]
    Empty {
        /// The frame's kind.
        kind: Kind,
    },
    /// Pages that do not lie on page boundaries.
    #[error("a {kind} frame for {length} bytes at {address:#x} does not consist of whole pages; the peer is faulty")]
    Unaligned {
        /// The frame's kind.
        kind: Kind,
        /// Address of the first byte.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Pages beyond [`crate::USER_ADDRESS_END`].
    #[error("a {kind} frame for {length} bytes at {address:#x} leaves the address space of a task; the peer is faulty")]
    OutOfRange {
        /// The frame's kind.
        kind: Kind,
        /// Address of the first byte.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A list of pages that breaks off within a number, or has one that is too large.
    #[error("the list of pages in a {kind} frame cannot be understood; the peer is faulty")]
    Runs {
        /// The frame's kind.
        kind: Kind,
    },
    /// Compressed pages that do not come out as what was announced.
    #[error(
        "pages compressed with {codec} do not come out as the {length} bytes that were announced; the peer is faulty"
    )]
    Packed {
        /// How they are said to be compressed.
        codec: Codec,
        /// Bytes of the pages.
        length: u64,
    },
    /// A name in a greeting or a file's name is not usable.
    #[error("{what} {name:?} is not usable: {why}")]
    Name {
        /// What is named.
        what: &'static str,
        /// The name, cut to 80 characters.
        name: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// The windows of versions do not overlap.
    #[error("this agent speaks protocol versions {ours}, the peer {theirs}; install the same release on both nodes")]
    Version {
        /// What we speak.
        ours: Versions,
        /// What they speak.
        theirs: Versions,
    },
    /// A payload is not the JSON that was expected.
    #[error("a {kind} frame cannot be understood ({why}); the peer is faulty or of another version")]
    Json {
        /// The frame's kind.
        kind: Kind,
        /// What the parser said.
        why: String,
    },
}

/// Reading a frame failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The stream ended between two frames: the peer has closed it.
    #[error("the peer has closed the link")]
    Closed,
    /// The stream broke, ended inside a frame, or timed out.
    #[error("reading from the peer failed")]
    Io(#[source] io::Error),
    /// What arrived is not of the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A frame of another kind than the protocol has at this place.
    #[error("the peer sent a {found} frame where {expected} was due; it is faulty or of another version")]
    Unexpected {
        /// What was due.
        expected: Kind,
        /// What came.
        found: Kind,
    },
    /// The sender's count at the end of a stream differs from ours.
    #[error("the peer says it sent {sent} bytes and {received} arrived; the stream is not complete")]
    Incomplete {
        /// Payload bytes that the sender counted.
        sent: u64,
        /// Payload bytes that we counted.
        received: u64,
    },
}

impl ReadError {
    /// Whether the time allowed ran out, as opposed to a broken or wrong stream.
    pub fn is_timeout(&self) -> bool {
        matches!(self, ReadError::Io(e) if matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock))
    }
}

/// Writing a frame failed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The stream broke or timed out.
    #[error("writing to the peer failed")]
    Io(#[from] io::Error),
    /// What was to be sent does not fit the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// A file could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file or directory on this node.
    #[error("cannot {action} {}", path.display())]
    Local {
        /// What was tried, e.g. `create`.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file is shorter than it was when its sending began.
    #[error("{} became shorter while it was sent; something else writes to it", path.display())]
    Shrunk {
        /// Which file.
        path: PathBuf,
    },
    /// Reading from the peer.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Writing to the peer.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl From<WireError> for FileError {
    fn from(e: WireError) -> Self {
        FileError::Read(ReadError::Wire(e))
    }
}
