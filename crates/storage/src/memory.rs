use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};

use crate::StorageError;

const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// Makes sure that `dir` is there and in memory. Where it is not on a tmpfs or ramfs yet, a tmpfs of at most `size` bytes
/// (the kernel's default, half of the memory, if `None`), private to root, is mounted on it. Returns whether it mounted.
///
/// The tmpfs keeps its pages out of swap where the kernel can (Linux 6.4). Its mount is private: it does not propagate.
///
/// # Errors
/// The system's refusal.
pub fn ensure_tmpfs(dir: &Path, size: Option<u64>) -> Result<bool, StorageError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| StorageError::refused("make the directory", dir, e))?;
    let kind = statfs(dir).map_err(|e| StorageError::refused("look at the filesystem of", dir, e))?.filesystem_type();
    if kind == TMPFS_MAGIC || kind == RAMFS_MAGIC {
        return Ok(false);
    }
    let size = size.map_or(String::new(), |bytes| format!(",size={bytes}"));
    let attempt = |options: &str| {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("tranship"), dir, Some("tmpfs"), flags, Some(format!("mode=0700{size}{options}").as_str()))
    };
    match attempt(",noswap") {
        Err(Errno::EINVAL) => attempt(""),
        result => result,
    }
    .and_then(|()| mount(None::<&str>, dir, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>))
    .map_err(|e| StorageError::refused("mount a tmpfs on", dir, e))?;
    Ok(true)
}
