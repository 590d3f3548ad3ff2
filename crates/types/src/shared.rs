use serde::{Deserialize, Serialize};

use crate::AddressSpaceId;

/// What kind of object shared memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedKind {
    /// A file in memory: a memfd, or what backs an anonymous shared mapping.
    File,
    /// A System V shared memory segment.
    Segment,
    /// Not shared at all, but moved the same way: the pages of one process that were a file's and are its own since they were
    /// written. Its key is the process's pid in the container, its offsets are addresses.
    Pages,
}

/// A piece of memory that several address spaces may map, or that exists by descriptors alone. Its content is addressed by
/// offsets from its beginning, in an address space of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedObject {
    /// What the page streams call it.
    pub space: AddressSpaceId,
    /// What CRIU's images call it: its inode number on the source (but for [`SharedKind::Pages`]).
    pub key: u32,
    /// What it is.
    pub kind: SharedKind,
    /// What `/proc/PID/maps` shows after `/memfd:`.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Whether seals can be added to it.
    pub sealable: bool,
    /// Size of the reserved huge pages (hugetlb) that a [`SharedKind::File`] consists of, in bytes; 0: it has ordinary pages.
    #[serde(default)]
    pub huge_page: u64,
}
