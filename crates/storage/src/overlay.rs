//! The overlay that an engine has mounted for a container, kept away while its upper directory is filled.
//!
//! The kernel does not say what an overlay shows of an upper directory that is changed beneath it. So nothing lies over the
//! directory until it is complete:
//!
//! ```text
//!  engine       mounts the overlay, and has the container restored
//!  set_aside    overlay ─▶ an empty tmpfs, in which a runtime may make the mount points that it wants
//!  …            the upper directory is filled
//!  put_back     the same overlay, wherever that tmpfs is mounted by then; criu takes it for the root
//! ```
//!
//! Where the engine has taken the tmpfs away meanwhile (it was restarted, or told to remove the container) nothing is mounted: its
//! directory must stay empty, or the engine cannot remove that.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, major, minor, mkdirat, open, openat, openat2};
use serde::{Deserialize, Serialize};

use crate::StorageError;
use crate::mounts::{self, Mounted};

/// What the filesystem in its place is called.
const PLACEHOLDER: &str = "tranship-root";
/// What the kernel shows among the options of a filesystem, and is none.
const SHOWN: [&str; 3] = ["rw", "ro", "seclabel"];

/// What something is mounted on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PointKind {
    /// A directory.
    Directory,
    /// A file.
    File,
}

/// An overlay that was set aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    point: PathBuf,
    options: String,
    wanted: Vec<(PathBuf, PointKind)>,
}

impl Overlay {
    /// Unmounts the overlay that is mounted on `point`, and mounts an empty tmpfs there; `None` if none is. In `wanted` are the places in
    /// it that something is to be mounted on, from its root on.
    ///
    /// # Errors
    /// If that is refused.
    pub fn set_aside(point: &Path, wanted: Vec<(PathBuf, PointKind)>) -> Result<Option<Self>, StorageError> {
        let table = mounts::table()?;
        let Some(there) = mounted_on(point, &table).filter(is_overlay) else { return Ok(None) };
        let own = |option: &&str| !SHOWN.contains(option);
        let options: Vec<&str> = there.options.split(',').filter(own).collect();
        let refused = |what, e: Errno| StorageError::refused(what, point, e);
        umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).map_err(|e| refused("unmount", e))?;
        mount(Some(PLACEHOLDER), point, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=755"))
            .map_err(|e| refused("mount a tmpfs on", e))?;
        Ok(Some(Self { point: point.to_owned(), options: options.join(","), wanted }))
    }

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Mounts it again, everywhere where what was put in its place is mounted, and makes what is missing in it of places to mount something
    /// on: where an engine has them by itself, in a layer of its own, they do not come with the container. May be repeated. Says whether
    /// the overlay is there: `false` if the engine has taken what was in its place away.
    ///
    /// # Errors
    /// If that is refused.
    pub fn put_back(&self) -> Result<bool, StorageError> {
        let table = mounts::table()?;
        if let Some(placeholder) = mounted_on(&self.point, &table).filter(|top| top.source == PLACEHOLDER) {
            self.replace(&placeholder.device, &table)?;
        }
        let Some(root) = self.root()? else { return Ok(false) };
        self.provide(&root).map(|()| true)
    }

    /// Mounts it wherever the filesystem of this device is mounted.
    fn replace(&self, placeholder: &str, table: &[Mounted]) -> Result<(), StorageError> {
        let refused = |what, point: &Path, e: Errno| StorageError::refused(what, point, e);
        let everywhere: Vec<&Mounted> = table.iter().filter(|mounted| mounted.device == placeholder).collect();
        for mounted in everywhere.iter().rev() {
            umount2(&mounted.point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)
                .map_err(|e| refused("unmount", &mounted.point, e))?;
        }
        self.mount()?;
        for mounted in everywhere.iter().filter(|mounted| mounted.point != self.point) {
            mount(Some(&self.point), &mounted.point, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .map_err(|e| refused("bind the container's root to", &mounted.point, e))?;
            // Docker's containers have roots that follow the node's; Podman's storage is nothing that can be followed.
            mount(None::<&str>, &mounted.point, None::<&str>, MsFlags::MS_SHARED, None::<&str>)
                .map_err(|e| refused("share", &mounted.point, e))?;
        }
        Ok(())
    }

    /// Its root, if it is mounted. That is the overlay's own also when the engine takes it away in the next moment.
    fn root(&self) -> Result<Option<OwnedFd>, StorageError> {
        let refused =
            |e: rustix::io::Errno| StorageError::refused("open", &self.point, Errno::from_raw(e.raw_os_error()));
        let root = match open(&self.point, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            opened => opened.map_err(refused)?,
        };
        let device = fstat(&root).map_err(refused)?.st_dev;
        let device = format!("{}:{}", major(device), minor(device));
        let table = mounts::table()?;
        Ok(mounted_on(&self.point, &table).filter(is_overlay).filter(|top| top.device == device).map(|_| root))
    }

    fn provide(&self, root: &OwnedFd) -> Result<(), StorageError> {
        let made = |e: rustix::io::Errno| {
            StorageError::refused("make mount points in", &self.point, Errno::from_raw(e.raw_os_error()))
        };
        // Its links lead nowhere but into it.
        let look = |path: &Path| {
            openat2(
                root,
                path,
                OFlags::PATH | OFlags::CLOEXEC,
                Mode::empty(),
                ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
            )
        };
        for (point, kind) in &self.wanted {
            let mut way: Vec<&Path> = point.ancestors().take_while(|part| part.parent().is_some()).collect();
            way.reverse();
            for (at, part) in way.iter().enumerate() {
                if look(part).is_ok() {
                    continue;
                }
                let (Some(parent), Some(name)) = (part.parent(), part.file_name()) else { continue };
                let parent = look(parent).map_err(made)?;
                match kind {
                    PointKind::File if at + 1 == way.len() => {
                        let new = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                        openat(&parent, name, new, Mode::from_raw_mode(0o755)).map(drop).map_err(made)?;
                    }
                    _ => mkdirat(&parent, name, Mode::from_raw_mode(0o755)).map_err(made)?,
                }
            }
        }
        Ok(())
    }

    /// An engine names the lower directories from its own directory on, two above the mount point, where they are too many for
    /// a page of options. The working directory is a thread's own for that.
    fn mount(&self) -> Result<(), StorageError> {
        let home = self.point.ancestors().nth(2).unwrap_or(&self.point);
        let mount_there = || {
            unshare(CloneFlags::CLONE_FS)?;
            nix::unistd::chdir(home)?;
            mount(Some("overlay"), &self.point, Some("overlay"), MsFlags::empty(), Some(self.options.as_str()))
        };
        let refused = |e: std::io::Error| StorageError::refused("mount the overlay on", &self.point, e);
        tranship_sys::threads::apart("overlay", mount_there).map_err(refused)?.map_err(|e| refused(e.into()))
    }
}

/// What is seen at this place.
fn mounted_on<'a>(point: &Path, table: &'a [Mounted]) -> Option<&'a Mounted> {
    table.iter().rfind(|mounted| mounted.point == point)
}

fn is_overlay(mounted: &&Mounted) -> bool {
    mounted.kind == "overlay"
}
