//! The ways to find out what was written, and which of them a kernel has.

use std::fmt;
use std::io;
use std::str::FromStr;

use tranship_sys::soft_dirty;
use tranship_sys::writes::WriteWatch;

use super::DirtyTracker;
use super::content_hash::ContentHash;
use super::soft_dirty::SoftDirty;
use super::write_protect::WriteProtect;

/// How writes to memory are found out. `docs/decisions/track-by-write-protection.md` has what each costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The kernel write-protects pages and marks those that are written: userfaultfd in asynchronous mode, Linux 6.7.
    WriteProtect,
    /// The kernel has a bit for it in the page table: `CONFIG_MEM_SOFT_DIRTY`. All processes stand still for each look.
    SoftDirty,
    /// All memory is read at each look, and compared with hashes of what was sent. No kernel needs to know of it.
    Hash,
}

/// A method that there is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no way {0:?} to track writes; there are write-protect, soft-dirty, hash, and auto for the best that works"
)]
pub struct UnknownMethod(String);

impl Method {
    /// All, the best first.
    pub const ALL: [Self; 3] = [Self::WriteProtect, Self::SoftDirty, Self::Hash];

    /// The best that works here.
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|method| method.available().is_ok()).unwrap_or(Self::Hash)
    }

    /// Whether it works on this kernel, or why not. Tried on this process.
    pub fn available(self) -> Result<(), &'static str> {
        match self {
            Self::WriteProtect if !WriteWatch::works_here() => {
                Err("this kernel has no userfaultfd with asynchronous write-protection (Linux >= 6.7 on x86-64)")
            }
            Self::SoftDirty if !soft_dirty::works_here() => {
                Err("this kernel has no soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)")
            }
            _ => Ok(()),
        }
    }

    /// Whether no process may write while one looks.
    pub(super) fn needs_standstill(self) -> bool {
        self == Self::SoftDirty
    }

    /// Begins to watch a process: by this method, or by one that always works if the process has not got what it takes. By content, one of `every` pieces of
    /// its memory.
    pub(super) fn begin(self, pid: u32, every: u64) -> io::Result<(Box<dyn DirtyTracker>, Self)> {
        match self {
            Self::WriteProtect => match WriteProtect::begin(pid) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Self::Hash.begin(pid, every),
                watch => Ok((Box::new(watch?), self)),
            },
            Self::SoftDirty => Ok((Box::new(SoftDirty::default()), self)),
            Self::Hash => Ok((Box::new(ContentHash::new(every)), self)),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteProtect => "write-protect",
            Self::SoftDirty => "soft-dirty",
            Self::Hash => "hash",
        })
    }
}

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(text: &str) -> Result<Self, UnknownMethod> {
        let named = Self::ALL.into_iter().find(|method| method.to_string() == text);
        named.ok_or_else(|| UnknownMethod(text.to_owned()))
    }
}
