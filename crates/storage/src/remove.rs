use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::error::DEPTH_LIMIT;
use crate::{StorageError, mounts};

/// Deletes `path` and everything below it. Symlinks are deleted, never followed; success if the path is gone already.
///
/// # Errors
/// [`StorageError::Mounted`] before anything is deleted if something is mounted at or below the path; also if a mount
/// appears while deleting: no other mount is ever entered. Else the system's refusal; then part may be deleted.
pub fn remove_tree(path: &Path) -> Result<(), StorageError> {
    if let Some(mount_point) = mounts::below(path)?.into_iter().next() {
        return Err(StorageError::Mounted { path: path.to_owned(), mount_point });
    }
    let Some(real) = mounts::real(path)? else { return Ok(()) };
    let (Some(parent), Some(name)) = (real.parent(), real.file_name()) else {
        return Err(StorageError::refused("delete", path, io::Error::from(io::ErrorKind::InvalidInput)));
    };
    let parent_fd = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(parent)
        .map_err(|e| StorageError::refused("open the directory", parent, e))?;
    let name = CString::new(name.as_bytes()).map_err(|e| StorageError::refused("delete", path, io::Error::from(e)))?;
    let is_directory = match fstatat(&parent_fd, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => kind(stat.st_mode) == SFlag::S_IFDIR,
        Err(Errno::ENOENT) => return Ok(()),
        Err(e) => return Err(StorageError::refused("look at", path, e)),
    };
    let mut removal = Removal { root: real.clone(), at: real.clone(), depth: 0, guard: Guard::best() };
    removal.remove(&parent_fd, &name, is_directory)
}

/// Deletes everything below the directory `path`, which stays.
///
/// # Errors
/// As [`remove_tree`].
pub(crate) fn empty(path: &Path) -> Result<(), StorageError> {
    if let Some(mount_point) = mounts::below(path)?.into_iter().find(|point| point != path) {
        return Err(StorageError::Mounted { path: path.to_owned(), mount_point });
    }
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(path)
        .map_err(|e| StorageError::refused("open the directory", path, e))?;
    let path = path.to_owned();
    Removal { root: path.clone(), at: path, depth: 0, guard: Guard::best() }.empty(directory.into())
}

/// Deletes the directory `name` in `parent`, which is at `path`, and everything below it, if `is_meant` says so of it when it is open.
/// What is deleted is what was open: another directory that has got its name meanwhile stays. False: it is not meant, and stays.
///
/// # Errors
/// As [`remove_tree`].
pub(crate) fn remove_if(
    path: &Path,
    parent: &OwnedFd,
    name: &CStr,
    is_meant: impl FnOnce(&OwnedFd) -> bool,
) -> Result<bool, StorageError> {
    let refused = |what, e: Errno| StorageError::refused(what, path, e);
    let directory = match openat2(parent, name, how()) {
        Ok(directory) => directory,
        Err(Errno::ENOENT) => return Ok(true),
        Err(Errno::ENOTDIR | Errno::ELOOP) => return Ok(false),
        Err(Errno::EXDEV) => return Err(StorageError::Mounted { path: path.to_owned(), mount_point: path.to_owned() }),
        Err(e) => return Err(refused("open the directory", e)),
    };
    if !is_meant(&directory) {
        return Ok(false);
    }
    if let Some(mount_point) = mounts::below(path)?.into_iter().next() {
        return Err(StorageError::Mounted { path: path.to_owned(), mount_point });
    }
    let identity = |stat: nix::sys::stat::FileStat| (stat.st_dev, stat.st_ino);
    let meant = identity(fstat(&directory).map_err(|e| refused("look at", e))?);
    let root = path.to_owned();
    Removal { root: root.clone(), at: root, depth: 0, guard: Guard::best() }.empty(directory)?;
    match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(now) if identity(now) == meant => {
            unlinkat(parent, name, UnlinkatFlags::RemoveDir).map_err(|e| refused("delete", e)).map(|()| true)
        }
        Ok(_) => Ok(false),
        Err(Errno::ENOENT) => Ok(true),
        Err(e) => Err(refused("look at", e)),
    }
}

fn kind(mode: u32) -> SFlag {
    SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits())
}

/// What keeps a descent within one mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// The kernel refuses to cross (openat2, Linux 5.6).
    Kernel,
    /// Device and mount id are compared after opening.
    Comparison,
}

impl Guard {
    fn best() -> Self {
        // ENOSYS from old kernels, EPERM from seccomp filters that do not know the call.
        match File::open("/").map(|root| openat2(&root, c".", how())) {
            Ok(Err(Errno::ENOSYS | Errno::EPERM)) => Self::Comparison,
            _ => Self::Kernel,
        }
    }

    /// Opens the directory `name` in `parent` if it is one of the same mount; `EXDEV` if it is not.
    fn enter(self, parent: &impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
        match self {
            Self::Kernel => openat2(parent, name, how()),
            Self::Comparison => {
                let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
                let child = openat(parent, name, flags, Mode::empty())?;
                if fstat(parent)?.st_dev != fstat(&child)?.st_dev || mount_id(parent)? != mount_id(&child)? {
                    return Err(Errno::EXDEV);
                }
                Ok(child)
            }
        }
    }
}

fn how() -> OpenHow {
    OpenHow::new()
        .flags(OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_RDONLY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_BENEATH)
}

/// The mount that a descriptor is on (proc_pid_fdinfo(5)).
fn mount_id(fd: &impl AsFd) -> nix::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd()));
    let text = text.map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
    text.lines().find_map(|l| l.strip_prefix("mnt_id:")?.trim().parse().ok()).ok_or(Errno::EIO)
}

struct Removal {
    root: PathBuf,
    /// Where the walk is, for messages only; everything is done relative to open directories.
    at: PathBuf,
    depth: usize,
    guard: Guard,
}

impl Removal {
    fn error(&self, what: &'static str, e: Errno) -> StorageError {
        match e {
            Errno::EXDEV | Errno::EBUSY => {
                StorageError::Mounted { path: self.root.clone(), mount_point: self.at.clone() }
            }
            e => StorageError::refused(what, &self.at, e),
        }
    }

    fn remove(&mut self, parent: &impl AsFd, name: &CStr, is_directory: bool) -> Result<(), StorageError> {
        if is_directory {
            match self.guard.enter(parent, name) {
                Ok(directory) => self.empty(directory)?,
                Err(Errno::ENOENT) => return Ok(()),
                Err(e) => return Err(self.error("open the directory", e)),
            }
        }
        let flag = if is_directory { UnlinkatFlags::RemoveDir } else { UnlinkatFlags::NoRemoveDir };
        match unlinkat(parent, name, flag) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(e) => Err(self.error("delete", e)),
        }
    }

    fn empty(&mut self, directory: OwnedFd) -> Result<(), StorageError> {
        if self.depth == DEPTH_LIMIT {
            return Err(StorageError::TooDeep { path: self.at.clone(), limit: DEPTH_LIMIT });
        }
        self.depth += 1;
        let mut directory = Dir::from_fd(directory).map_err(|e| self.error("read the directory", e))?;
        // Read to the end first: deleting while reading may hide entries on some filesystems.
        let entries: nix::Result<Vec<_>> =
            directory.iter().map(|e| e.map(|e| (e.file_name().to_owned(), e.file_type()))).collect();
        for (name, kind_hint) in entries.map_err(|e| self.error("read the directory", e))? {
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.at.push(std::ffi::OsStr::from_bytes(name.to_bytes()));
            let is_directory = match kind_hint {
                Some(hint) => hint == Type::Directory,
                None => match fstatat(&directory, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
                    Ok(stat) => kind(stat.st_mode) == SFlag::S_IFDIR,
                    Err(e) => return Err(self.error("look at", e)),
                },
            };
            self.remove(&directory, &name, is_directory)?;
            self.at.pop();
        }
        self.depth -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_guards_enter_a_plain_directory_and_refuse_another_mount() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let parent = File::open(dir.path()).unwrap();
        let root = File::open("/").unwrap();
        for guard in [Guard::Kernel, Guard::Comparison] {
            assert!(guard.enter(&parent, c"sub").is_ok(), "{guard:?}");
            assert_eq!(guard.enter(&root, c"proc").unwrap_err(), Errno::EXDEV, "{guard:?}");
        }
        std::os::unix::fs::symlink("/etc", dir.path().join("link")).unwrap();
        for guard in [Guard::Kernel, Guard::Comparison] {
            assert!(guard.enter(&parent, c"link").is_err(), "{guard:?}");
        }
    }
}
