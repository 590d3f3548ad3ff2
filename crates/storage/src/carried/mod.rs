//! Directory trees on disk that move with their container: its writable layer, its volumes, directories of the node.
//!
//! ```text
//!  source                                             destination
//!  Source::open    (each tree cloned, followed)       Target::stage: an empty directory for each
//!  Source::pass ═══ operations and content ═════════▶ Replica::apply      while the container runs, as often as it pays
//!  ── freeze ──
//!  Source::finish ═ what has changed since ═════════▶ Replica::apply, Target::place, then the restore
//!  ── commit ──
//!  leave                                              flush, Target::settle
//! ```
//!
//! A directory of the node's own has the same path on both. It, and a volume, arrive in a directory beside their place, which takes it
//! only when it is complete, so that a move that fails leaves nothing behind. At the source it stays as it was at the freeze, with a mark. A
//! directory that is so marked, and was not changed since, may be replaced when its container comes back; no other one is.

mod source;
mod target;
mod verify;

use std::io;
use std::path::{Path, PathBuf};

use nix::sys::statfs::statfs;

use crate::copy::CopyError;
use crate::mounts;

pub use source::{Source, open};
pub use target::{Room, Target, leave, room};
pub use verify::{Digests, difference, digests};

/// Most files in one tree. Each costs both agents a few hundred bytes.
pub const MAX_FILES: usize = 1_000_000;

/// The extended attribute that says what a tree is to a move.
pub(crate) const MARK: &str = "trusted.tranship";

/// Filesystems that other nodes have, too, or that a program provides, by their magic numbers (statfs(2)).
const SHARED: [(i64, &str); 15] = [
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x00c3_6400, "Ceph"),
    (0x0102_1997, "9p"),
    (0x6573_5546, "FUSE or virtiofs"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x786f_4256, "vboxsf"),
    (0x7375_7245, "Coda"),
];

/// What kind of filesystem a directory is on, if it is one that is not the node's alone: such a directory is left alone.
///
/// # Errors
/// If it cannot be looked at.
pub fn shared_filesystem(path: &Path) -> Result<Option<&'static str>, CopyError> {
    let found = statfs(path).map_err(|e| CopyError::refused("look at the filesystem of", path, e))?;
    let magic = found.filesystem_type().0 & 0xffff_ffff;
    Ok(SHARED.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name))
}

/// Whether something is mounted on the directory itself.
///
/// # Errors
/// If the table of mounts cannot be read.
pub fn is_mount_point(path: &Path) -> Result<bool, crate::StorageError> {
    Ok(mounts::below(path)?.iter().any(|point| point == path))
}

/// Bytes of its disk that a tree takes.
///
/// # Errors
/// If it cannot be read.
pub fn disk_usage(path: &Path) -> Result<u64, CopyError> {
    Ok(crate::copy::Tree::read(&open(path)?, path, MAX_FILES)?.bytes)
}

/// Something that is mounted below a directory, which would not come along with it.
///
/// # Errors
/// If the table of mounts cannot be read.
pub fn mounted_below(path: &Path) -> Result<Option<PathBuf>, crate::StorageError> {
    Ok(mounts::below(path)?.into_iter().find(|point| point != path))
}

/// Has everything that was written to the filesystem of a directory brought to its disk.
///
/// # Errors
/// The disk's.
pub fn flush(path: &Path) -> Result<(), CopyError> {
    let refused = |e: io::Error| CopyError::refused("bring to the disk", path, e);
    let directory = std::fs::File::open(path).map_err(refused)?;
    rustix::fs::syncfs(&directory).map_err(|e| refused(e.into()))
}
