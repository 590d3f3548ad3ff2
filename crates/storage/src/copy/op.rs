//! The operations that make a replica equal to its original.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes that need not be text: a file's name, a symlink's target, an extended attribute. Written as text, where every byte that
/// is not printable ASCII is `%` and two hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub Vec<u8>);

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.encode())
    }
}

impl Name {
    pub(super) fn encode(&self) -> String {
        let mut text = String::with_capacity(self.0.len());
        for byte in &self.0 {
            match byte {
                b'%' => text.push_str("%25"),
                b' '..=b'~' => text.push(char::from(*byte)),
                other => text.push_str(&format!("%{other:02x}")),
            }
        }
        text
    }

    pub(super) fn decode(text: &str) -> Option<Self> {
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text.bytes();
        while let Some(byte) = rest.next() {
            bytes.push(match byte {
                b'%' => {
                    let digit = |b: u8| char::from(b).to_digit(16);
                    (digit(rest.next()?)? * 16 + digit(rest.next()?)?) as u8
                }
                b' '..=b'~' => byte,
                _ => return None,
            });
        }
        Some(Self(bytes))
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.encode())
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::decode(&text).ok_or_else(|| serde::de::Error::custom("a name is not encoded as names are"))
    }
}

/// Seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// What an inode is. One whose kind differs is another inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Kind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink {
        /// What it says.
        target: Name,
    },
    /// A FIFO.
    Fifo,
    /// The name of a Unix socket.
    Socket,
    /// A character device.
    Character {
        /// Its numbers.
        major: u32,
        /// Its numbers.
        minor: u32,
    },
    /// A block device.
    Block {
        /// Its numbers.
        major: u32,
        /// Its numbers.
        minor: u32,
    },
}

/// One step. Inodes are called by the numbers that they have at the source, so that what was renamed is still itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum Op {
    /// What follows is about this mount.
    Mount {
        /// Its number in the offer.
        index: usize,
        /// The inode of its root directory.
        root: u64,
    },
    /// Takes a name of an inode away that has none which stays; it gets another one later in the pass.
    Park {
        /// The inode.
        ino: u64,
        /// The directory.
        parent: u64,
        /// The name.
        name: Name,
    },
    /// Removes a name, and with its last name the inode; a directory is empty by then.
    Unname {
        /// The inode.
        ino: u64,
        /// The directory.
        parent: u64,
        /// The name.
        name: Name,
    },
    /// A new inode.
    Make {
        /// The inode.
        ino: u64,
        /// The directory.
        parent: u64,
        /// Its name there.
        name: Name,
        /// What it is.
        #[serde(flatten)]
        kind: Kind,
    },
    /// Another name for an inode, or the new one of a parked inode.
    Name {
        /// The inode.
        ino: u64,
        /// The directory.
        parent: u64,
        /// Its name there.
        name: Name,
    },
    /// No inode is parked any more.
    Unpark,
    /// The file has this size; pieces of its content follow, and [`Op::Zero`]. What is not mentioned stays as it is.
    Content {
        /// The inode.
        ino: u64,
        /// Bytes.
        size: u64,
    },
    /// This part of the file reads as zeros.
    Zero {
        /// From this byte.
        offset: u64,
        /// So many.
        length: u64,
    },
    /// An inode's attributes. They follow everything that changes the inode or, in a directory, its entries.
    Meta {
        /// The inode.
        ino: u64,
        /// Permissions, 07777.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Last read.
        atime: Time,
        /// Last written.
        mtime: Time,
        /// All extended attributes, names and values; none if they are as they were.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        xattrs: Option<Vec<(Name, Name)>>,
        /// Of a file in memory: parts, each by offset and length, whose blocks are allocated without content. Older peers ignore it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        allocated: Vec<(u64, u64)>,
        /// In memory: its flags (FS_IOC_SETFLAGS). Older peers ignore it.
        #[serde(default, skip_serializing_if = "is_zero")]
        flags: u32,
    },
    /// The mount is complete.
    PassEnd {
        /// For good: nothing follows about it.
        last: bool,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(flags: &u32) -> bool {
    *flags == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_name_survives_the_wire(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let op = Op::Make { ino: u64::MAX, parent: 1, name: Name(bytes.clone()), kind: Kind::Symlink { target: Name(bytes) } };
            let text = serde_json::to_string(&op).unwrap();
            prop_assert_eq!(serde_json::from_str::<Op>(&text).unwrap(), op);
        }

        #[test]
        fn no_text_makes_a_name_panic(text in ".{0,40}") {
            let _ = Name::decode(&text);
        }
    }
}
