//! The destination's half: one tmpfs for each mount.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use rustix::fs::{Mode, OFlags, open};

use super::MAX_FILES;
use super::find::TmpfsMount;
use crate::copy::{Copy, CopyError, Limits, Replica, nonsense};

/// Mounts one empty tmpfs for each of `mounts`, on directories below `below` that are called by their numbers. They are private,
/// and go with [`crate::unmount_below`].
///
/// # Errors
/// If one cannot be mounted, or has an option that is not known here.
pub fn make(below: &Path, mounts: &[TmpfsMount]) -> Result<Replica, CopyError> {
    let mut copies = Vec::new();
    for (index, mount) in mounts.iter().enumerate() {
        let path = below.join(index.to_string());
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .map_err(|e| CopyError::refused("make the directory", &path, e))?;
        copies.push(copy(path, mount)?);
    }
    Ok(Replica::new(copies))
}

fn copy(path: PathBuf, wanted: &TmpfsMount) -> Result<Copy, CopyError> {
    if !wanted.options.are_known() {
        return Err(nonsense(format!("options of {} that are not known here", wanted.point)));
    }
    // Nobody here shall run a container's programs, or use its devices, by accident. CRIU gives its mount the flags that it had.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = wanted.options.roomy();
    mount(Some(wanted.source.as_str()), &path, Some("tmpfs"), flags, Some(options.as_str()))
        .and_then(|()| mount(None::<&str>, &path, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>))
        .map_err(|e| CopyError::refused("mount a tmpfs on", &path, e))?;
    // A reference: a program that watches the directory is not told when it is closed.
    let root = open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let root = root.map_err(|e| CopyError::refused("open", &path, e))?;
    let limits = Limits { path, options: wanted.options.limits(), read_only: wanted.read_only };
    Ok(Copy::new(root, PathBuf::from(&wanted.point), MAX_FILES, Some(limits)))
}
