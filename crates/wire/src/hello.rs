use std::fmt;
use std::io::{Read, Write};

use tranship_types::{MigrationId, NodeName};

use crate::{ReadError, WireError, WriteError};

/// The first bytes of every link, in both directions; they and the layout of the greeting never change.
pub const MAGIC: [u8; 4] = *b"TSHP";
/// Length of what precedes the body of a greeting: magic and the body's length.
pub const HELLO_PREFIX_LEN: usize = 6;
/// Most bytes in the body of a greeting.
pub const MAX_HELLO: usize = 1024;
const MAX_REASON: usize = 512;

/// A window of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl Versions {
    /// What this release speaks.
    pub const OURS: Versions = Versions { min: 1, max: 16 };
    /// The first in which pages may travel compressed ([`crate::Kind::Packed`]), and in which a source may ask why a stream
    /// failed ([`crate::message::Request::Streams`]).
    pub const PACKED: u16 = 2;
    /// The first in which pages may be said to be as another task's are ([`crate::Kind::Same`]), and which of them are in huge
    /// pages ([`crate::message::Request::HugePages`]).
    pub const SAME: u16 = 3;
    /// The first in which a network identity has policy rules, and routes of other tables than main.
    pub const ROUTING: u16 = 4;
    /// The first in which a network identity has what CNI plugins keep about it.
    pub const CNI: u16 = 5;
    /// The first in which a network identity has rules of nftables, and what the kernel tracks of connections comes with the skeleton.
    pub const RULESET: u16 = 6;
    /// The first in which shared memory may consist of reserved huge pages.
    pub const HUGE: u16 = 7;
    /// The first in which an agent whose journal is damaged may ask the other one what it knows ([`crate::message::Request::Known`]).
    pub const KNOWN: u16 = 8;
    /// The first in which sockets may have the options that [`crate::message::Offer::socket_options`] names.
    pub const OPTIONS: u16 = 9;
    /// The first in which calls of the API may be passed on ([`crate::message::Request::Api`]).
    pub const API: u16 = 10;
    /// The first in which files of Unix sockets may have other names than those that the sockets were bound to.
    pub const SOCKET_FILES: u16 = 10;
    /// The first in which standard streams may lead to objects of the node ([`crate::message::Offer::streams_of_node`]), and are relayed.
    pub const STDIO: u16 = 11;
    /// The first in which mounts may be behind symbolic links of the image.
    pub const LINKED_MOUNTS: u16 = 11;
    /// The first in which the loopback interface may have addresses besides its own.
    pub const LOOPBACK: u16 = 12;
    /// The first in which zombies may be listed beside CRIU's images, rather than be in them.
    pub const ZOMBIES: u16 = 12;
    /// The first in which terminals may be hung up, and sockets of netlink be connected to group 32.
    pub const HUNG_UP: u16 = 13;
    /// The first in which it may be listed how zombies ended that CRIU makes.
    pub const ENDS: u16 = 13;
    /// The first in which a node may be asked whether a container has its addresses still ([`crate::message::Request::Addresses`]).
    pub const ADDRESSES: u16 = 14;
    /// The first in which the addresses may be those of an engine with an IPAM of its own.
    pub const ENGINE_ADDRESSES: u16 = 15;
    /// The first in which the path between a container and those that stay may be kept
    /// ([`crate::message::Offer::paths`]).
    pub const PATHS: u16 = 16;
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{} to {}", self.min, self.max) }
    }
}

/// The newest version that both speak.
///
/// # Errors
/// [`WireError::Version`] if there is none, also where a window is empty.
pub fn negotiate(ours: Versions, theirs: Versions) -> Result<u16, WireError> {
    let version = ours.max.min(theirs.max);
    if version < ours.min || version < theirs.min || ours.min > ours.max || theirs.min > theirs.max {
        return Err(WireError::Version { ours, theirs });
    }
    Ok(version)
}

/// What a link is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Requests and responses.
    Control,
    /// One of the streams that carry memory.
    Pages {
        /// Which one; streams of a migration are numbered from 0.
        stream: u8,
    },
    /// Tells the source which pages are wanted: the listener writes, the dialler reads.
    Wants {
        /// Whether the listener shall begin with everything that it still lacks, because earlier links broke.
        resume: bool,
    },
    /// The content of tmpfs mounts.
    Files,
    /// The content of directory trees on disk.
    Trees,
    /// A container's image.
    Image,
    /// A container's log; only where [`crate::message::Response::Prepared`] takes it.
    Log,
}

/// The stream for pages that were asked for, beside those that are numbered from 0.
pub const URGENT_STREAM: u8 = u8::MAX;

/// What the dialling agent says first.
///
/// ```text
/// "TSHP" │ body length u16 │ version_min u16 │ version_max u16 │ purpose u8 │ stream u8
///        │ migration: length u8, text │ node: length u8, text │ (later versions may add to the end)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// What it speaks.
    pub versions: Versions,
    /// What the link is for.
    pub purpose: Purpose,
    /// Which migration it belongs to; `None` for questions that precede one.
    pub migration: Option<MigrationId>,
    /// Who it is. The listener checks that the certificate says the same.
    pub node: NodeName,
}

impl Hello {
    /// A greeting in our own versions.
    pub fn new(node: NodeName, purpose: Purpose, migration: Option<MigrationId>) -> Self {
        Self { versions: Versions::OURS, purpose, migration, node }
    }

    /// The bytes for the wire, magic and length included.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(128);
        body.extend(self.versions.min.to_le_bytes());
        body.extend(self.versions.max.to_le_bytes());
        match self.purpose {
            Purpose::Control => body.extend([1, 0]),
            Purpose::Pages { stream } => body.extend([2, stream]),
            Purpose::Wants { resume } => body.extend([3, u8::from(resume)]),
            Purpose::Files => body.extend([4, 0]),
            Purpose::Trees => body.extend([5, 0]),
            Purpose::Image => body.extend([6, 0]),
            Purpose::Log => body.extend([7, 0]),
        }
        for text in [self.migration.as_ref().map_or("", |m| m.as_str()), self.node.as_str()] {
            // The types allow 63 bytes at most, so the length fits its byte.
            body.push(text.len() as u8);
            body.extend(text.as_bytes());
        }
        framed(&body)
    }

    /// Reads the body of a greeting, i.e. what follows the prefix. Bytes after the last field are ignored: later versions
    /// may put something there.
    ///
    /// # Errors
    /// If it is too long, cut, or has a value that is not allowed.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(body)?;
        let versions = Versions { min: fields.u16("oldest version")?, max: fields.u16("newest version")? };
        let purpose = match (fields.u8("purpose")?, fields.u8("stream")?) {
            (1, 0) => Purpose::Control,
            (2, stream) => Purpose::Pages { stream },
            (3, resume @ (0 | 1)) => Purpose::Wants { resume: resume == 1 },
            (4, 0) => Purpose::Files,
            (5, 0) => Purpose::Trees,
            (6, 0) => Purpose::Image,
            (7, 0) => Purpose::Log,
            (1 | 3 | 4 | 5 | 6 | 7, stream) => {
                return Err(WireError::Unknown { field: "the stream of a greeting", value: stream.into() });
            }
            (other, _) => return Err(WireError::Unknown { field: "the purpose of a greeting", value: other.into() }),
        };
        let migration = match fields.text("migration id")? {
            "" => None,
            text => Some(text.parse::<MigrationId>().map_err(name_error)?),
        };
        let node = fields.text("node name")?.parse::<NodeName>().map_err(name_error)?;
        Ok(Self { versions, purpose, migration, node })
    }
}

/// Why a listener refuses a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// No common protocol version.
    Version,
    /// The greeting names another node than the certificate.
    Node,
    /// The greeting makes no sense to the listener.
    Greeting,
    /// The listener does not want it, e.g. it knows no such migration or is ending.
    Unwanted,
}

/// A refusal with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What for.
    pub kind: RefusalKind,
    /// In words; at most 512 bytes get across, without control characters.
    pub reason: String,
}

/// What the listening agent answers.
///
/// ```text
/// "TSHP" │ body length u16 │ 0 u8 │ version u16                          welcome
///        │                 │ 1 u8 │ kind u8 │ reason: length u16, UTF-8    refusal
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Welcome {
    /// The link is open and speaks this version.
    Accepted {
        /// The version.
        version: u16,
    },
    /// The link is being closed.
    Refused(Refusal),
}

impl Welcome {
    /// The bytes for the wire, magic and length included.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(16);
        match self {
            Welcome::Accepted { version } => {
                body.push(0);
                body.extend(version.to_le_bytes());
            }
            Welcome::Refused(Refusal { kind, reason }) => {
                body.push(1);
                body.push(match kind {
                    RefusalKind::Version => 1,
                    RefusalKind::Node => 2,
                    RefusalKind::Greeting => 3,
                    RefusalKind::Unwanted => 4,
                });
                let reason = printable(reason);
                body.extend((reason.len() as u16).to_le_bytes());
                body.extend(reason.as_bytes());
            }
        }
        framed(&body)
    }

    /// Reads the body of an answer. A refusal's reason comes without control characters: it will be shown on terminals.
    ///
    /// # Errors
    /// If it is too long, cut, or has a value that is not allowed.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(body)?;
        match fields.u8("verdict")? {
            0 => Ok(Welcome::Accepted { version: fields.u16("version")? }),
            1 => {
                let kind = match fields.u8("reason's kind")? {
                    1 => RefusalKind::Version,
                    2 => RefusalKind::Node,
                    3 => RefusalKind::Greeting,
                    // A later version may know more reasons; the words tell.
                    _ => RefusalKind::Unwanted,
                };
                let length = usize::from(fields.u16("reason")?);
                let reason = printable(&String::from_utf8_lossy(fields.take(length, "reason")?));
                Ok(Welcome::Refused(Refusal { kind, reason }))
            }
            other => Err(WireError::Unknown { field: "the answer to a greeting", value: other.into() }),
        }
    }
}

/// The length of the body that follows a prefix.
///
/// # Errors
/// [`WireError::Magic`] if this is another protocol, [`WireError::TooLong`] over [`MAX_HELLO`].
pub fn greeting_body_len(prefix: &[u8; HELLO_PREFIX_LEN]) -> Result<usize, WireError> {
    if prefix[..4] != MAGIC {
        return Err(WireError::Magic);
    }
    let length = usize::from(u16::from_le_bytes([prefix[4], prefix[5]]));
    if length > MAX_HELLO {
        return Err(WireError::TooLong { what: "a greeting", length: length as u64, limit: MAX_HELLO as u64 });
    }
    Ok(length)
}

/// Sends a greeting.
///
/// # Errors
/// Those of the stream.
pub fn write_hello<W: Write>(w: &mut W, hello: &Hello) -> Result<(), WriteError> {
    w.write_all(&hello.encode())?;
    Ok(w.flush()?)
}

/// Receives a greeting.
///
/// # Errors
/// Those of the stream, and a greeting that is not allowed.
pub fn read_hello<R: Read>(r: &mut R) -> Result<Hello, ReadError> {
    Ok(Hello::decode(&read_body(r)?)?)
}

/// Sends the answer to a greeting.
///
/// # Errors
/// Those of the stream.
pub fn write_welcome<W: Write>(w: &mut W, welcome: &Welcome) -> Result<(), WriteError> {
    w.write_all(&welcome.encode())?;
    Ok(w.flush()?)
}

/// Receives the answer to a greeting.
///
/// # Errors
/// Those of the stream, and an answer that is not allowed. A refusal is not an error here.
pub fn read_welcome<R: Read>(r: &mut R) -> Result<Welcome, ReadError> {
    Ok(Welcome::decode(&read_body(r)?)?)
}

fn read_body<R: Read>(r: &mut R) -> Result<Vec<u8>, ReadError> {
    let mut prefix = [0; HELLO_PREFIX_LEN];
    r.read_exact(&mut prefix).map_err(ReadError::Io)?;
    let mut body = vec![0; greeting_body_len(&prefix)?];
    r.read_exact(&mut body).map_err(ReadError::Io)?;
    Ok(body)
}

fn framed(body: &[u8]) -> Vec<u8> {
    debug_assert!(body.len() <= MAX_HELLO);
    let mut bytes = Vec::with_capacity(HELLO_PREFIX_LEN + body.len());
    bytes.extend(MAGIC);
    bytes.extend((body.len() as u16).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// The text without control characters, cut to [`MAX_REASON`] bytes at a character's end.
fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        if out.len() + c.len_utf8() > MAX_REASON {
            break;
        }
        out.push(c);
    }
    out
}

fn name_error(e: tranship_types::InvalidName) -> WireError {
    WireError::Name { what: e.what, name: e.name, why: e.why }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn new(body: &'a [u8]) -> Result<Self, WireError> {
        if body.len() > MAX_HELLO {
            let length = body.len() as u64;
            return Err(WireError::TooLong { what: "a greeting", length, limit: MAX_HELLO as u64 });
        }
        Ok(Self(body))
    }

    fn take(&mut self, n: usize, field: &'static str) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(WireError::Truncated { field })?;
        self.0 = tail;
        Ok(head)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(self.take(1, field)?[0])
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        let bytes = self.take(2, field)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn text(&mut self, field: &'static str) -> Result<&'a str, WireError> {
        let length = usize::from(self.u8(field)?);
        let bytes = self.take(length, field)?;
        std::str::from_utf8(bytes).map_err(|_| WireError::Name {
            what: field,
            name: String::from_utf8_lossy(bytes).chars().take(80).collect(),
            why: "it is not UTF-8",
        })
    }
}
