//! Standard streams of containers that lead to files, pipes, sockets and terminals of the node.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where the output of a container without an engine of its own goes after a move.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum StdioTarget {
    /// To where it went before: the same path, or a relay to the reader on the source.
    #[default]
    Keep,
    /// To the journal of the destination.
    Journal,
    /// To this file of the destination, at its end.
    File(PathBuf),
    /// Nowhere.
    Null,
}

impl StdioTarget {
    /// Whether it is the default.
    pub fn is_keep(&self) -> bool {
        *self == StdioTarget::Keep
    }

    /// The file of the destination that it names.
    pub fn file(&self) -> Option<&Path> {
        match self {
            StdioTarget::File(path) => Some(path),
            _ => None,
        }
    }
}

/// Text that names no target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no target for standard streams; use keep, journal, null or file:PATH with an absolute path")]
pub struct InvalidStdioTarget(String);

impl FromStr for StdioTarget {
    type Err = InvalidStdioTarget;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_plain = |path: &str| {
            path.starts_with('/') && path.len() > 1 && !path.contains('\0') && !path.split('/').any(|part| part == "..")
        };
        match text {
            "keep" => Ok(StdioTarget::Keep),
            "journal" => Ok(StdioTarget::Journal),
            "null" => Ok(StdioTarget::Null),
            _ => match text.strip_prefix("file:").filter(|path| is_plain(path)) {
                Some(path) => Ok(StdioTarget::File(path.into())),
                None => Err(InvalidStdioTarget(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for StdioTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StdioTarget::Keep => f.pad("keep"),
            StdioTarget::Journal => f.pad("journal"),
            StdioTarget::Null => f.pad("null"),
            StdioTarget::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl Serialize for StdioTarget {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StdioTarget {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What a standard stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StdioKind {
    /// A regular file of the node.
    File,
    /// The node's null device.
    Null,
    /// A pipe whose other end is outside of the container.
    Pipe,
    /// A FIFO of the node.
    Fifo,
    /// A Unix stream socket whose other end is outside of the container.
    Socket,
    /// A terminal of the node.
    Terminal,
}

impl fmt::Display for StdioKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StdioKind::File => "file",
            StdioKind::Null => "null device",
            StdioKind::Pipe => "pipe",
            StdioKind::Fifo => "FIFO",
            StdioKind::Socket => "socket",
            StdioKind::Terminal => "terminal",
        })
    }
}

/// An object of the node that one or more standard streams of a container's first process lead to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdioStream {
    /// What it is.
    pub kind: StdioKind,
    /// Its name in `/proc/PID/fd`: a path, `pipe:[INODE]` or `socket:[INODE]`.
    pub name: String,
    /// How CRIU is told that it is outside of the container; `None` where it need not be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<String>,
    /// Which of the streams 0, 1 and 2 it is.
    pub numbers: Vec<u8>,
    /// The container reads from it.
    pub reads: bool,
    /// The container writes to it.
    pub writes: bool,
    /// Flags of the open file (open(2)).
    pub flags: u32,
    /// For a regular file: where the container reads or writes, in bytes from its start.
    #[serde(default)]
    pub position: u64,
    /// For a regular file: what tells it from another one of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<FileIdentity>,
    /// For a regular file: it has no name any more, and this is the one that it had.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removed: bool,
    /// Who may open it again through `/proc/self/fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<FileOwner>,
    /// For a terminal: rows and columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<(u16, u16)>,
}

impl StdioStream {
    /// Whether bytes that pass through it have to be passed on by a process, since its other end
    /// stays on the source.
    pub fn is_relayed(&self) -> bool {
        !matches!(self.kind, StdioKind::File | StdioKind::Null)
    }

    /// The inode of a socket.
    pub fn socket(&self) -> Option<&str> {
        self.name.strip_prefix("socket:[")?.strip_suffix(']').filter(|_| self.kind == StdioKind::Socket)
    }
}

impl fmt::Display for StdioStream {
    /// `stdout and stderr`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> =
            self.numbers.iter().map(|n| ["stdin", "stdout", "stderr"][usize::from(*n).min(2)]).collect();
        f.write_str(&names.join(" and "))
    }
}

/// Owner and permissions of a file (inode(7)), with the ids that the node has for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOwner {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its permissions, without set-user-ID, set-group-ID and sticky bit.
    pub mode: u32,
}

/// What tells a file from others, as far as a filesystem that is mounted on two nodes shows it to
/// both alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Its number.
    pub inode: u64,
    /// When it was made, in ns since 1970; 0 where the filesystem does not tell.
    pub born_ns: u64,
    /// The kind of its filesystem (statfs(2), `f_type`).
    pub filesystem: u64,
    /// The device that it lies on, which means something on its own machine only.
    #[serde(default)]
    pub device: u64,
    /// What tells this run of the machine's kernel from others; 0 where that is not known.
    #[serde(default)]
    pub boot: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_as_they_are_written() {
        for text in ["keep", "journal", "null", "file:/var/log/web.log"] {
            assert_eq!(text.parse::<StdioTarget>().unwrap().to_string(), text);
        }
        for text in ["", "file:", "file:log", "file:/", "file:/a/../b", "syslog"] {
            assert!(text.parse::<StdioTarget>().is_err(), "{text}");
        }
    }
}
