//! The paths of files that are watched by inotify. The kernel tells of a watch the inode and a handle. CRIU opens the handle on a directory that is
//! mounted in the container, which an overlay does not allow, and a file that is mounted alone has no such directory. Then it searches for
//! the inode in a few directories (irmap.c) and in a cache: this makes the cache.
//!
//! ```text
//!  /proc/PID/fdinfo/FD   inotify wd:1 ino:2a sdev:3d … f_handle:…        on an overlay: the overlay's handle
//!    └── in it: the handle of the file in one of the overlay's layers    struct ovl_fb of the kernel's fs/overlayfs/overlayfs.h
//!          └── /var/lib/docker/overlay2/6f…/diff/usr/share/config        opened on the filesystems of the node
//!                └── /usr/share/config                                   the end of it that names inode 2a on device 3d
//! ```

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fstat, major, minor, open, openat2, statx,
};
use tranship_sys::file_handle::FileHandle;

use crate::file_settings::is_served;
use crate::preflight::Mount;

/// What CRIU calls the cache, in its working directory.
pub const FILE: &str = "irmap-cache";
/// `IMG_SERVICE_MAGIC` and `IRMAP_CACHE_MAGIC` of CRIU's magic.h.
const MAGIC: [u32; 2] = [0x5510_5940, 0x5700_4059];
/// Filesystems of a node that have handles: what is mounted in containers lies on them, and the layers of overlays.
const HOSTS: [&str; 8] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs"];

/// A file that is watched, as one line of a descriptor's `fdinfo` tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watch {
    /// Its number, by which events name it.
    pub(crate) number: i32,
    /// The events, and flags of inotify_add_watch(2).
    pub(crate) mask: u32,
    /// The device of its filesystem, as the kernel numbers it inside (20 bits for the minor number).
    device: u32,
    inode: u64,
    handle: FileHandle,
}

/// Where a file is that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// From the root of the container's mount namespace on.
    pub path: PathBuf,
    /// What it is there.
    pub kind: FileType,
}

/// An entry of CRIU's cache.
#[derive(Clone, PartialEq, prost::Message)]
struct CacheEntry {
    #[prost(uint32, required, tag = "1")]
    device: u32,
    #[prost(uint64, required, tag = "2")]
    inode: u64,
    /// From the root of the container's mount namespace on.
    #[prost(bytes = "vec", required, tag = "3")]
    path: Vec<u8>,
}

/// A descriptor of an inotify: a process's pid, and a number in its table.
pub type Watcher = (u32, i32);

impl Watch {
    /// Of a line such as `inotify wd:1 ino:2a sdev:3d mask:100 ignored_mask:0 fhandle-bytes:1c fhandle-type:f8 f_handle:00…`; that of a mark of
    /// fanotify is similar.
    fn of(line: &str) -> Option<Self> {
        let words = line.strip_prefix("inotify ").or_else(|| line.strip_prefix("fanotify "))?;
        let field = |name: &str| words.split(' ').find_map(|word| word.strip_prefix(name));
        let number = |name: &str| u64::from_str_radix(field(name)?, 16).ok();
        let digits = field("f_handle:").unwrap_or_default();
        let bytes: Option<Vec<u8>> = digits
            .as_bytes()
            .chunks(2)
            .map(|pair| {
                let digits = std::str::from_utf8(pair).ok().filter(|digits| !digits.starts_with('+'))?;
                u8::from_str_radix(digits, 16).ok()
            })
            .collect();
        let kind = number("fhandle-type:").and_then(|kind| i32::try_from(kind).ok()).unwrap_or(-1);
        Some(Self {
            // Marks of fanotify have none.
            number: number("wd:").and_then(|number| i32::try_from(number).ok()).unwrap_or(-1),
            mask: number("mask:")?.try_into().ok()?,
            device: number("sdev:")?.try_into().ok()?,
            inode: number("ino:")?,
            handle: FileHandle { kind, bytes: bytes.unwrap_or_default() },
        })
    }

    /// All of a descriptor.
    pub fn all(info: &str) -> impl Iterator<Item = Self> {
        info.lines().filter_map(Self::of)
    }

    /// `MAJOR:MINOR` of its filesystem.
    pub fn device(&self) -> String {
        format!("{}:{}", self.device >> 20, self.device & 0xf_ffff)
    }

    /// The file's number in that.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// The handle in the layer.
    pub(crate) fn in_layer(&self) -> Option<FileHandle> {
        // Version, magic, length of all, flags, type, and the filesystem's UUID; before it, three bytes where the type is this one.
        const ALIGNED: i32 = 0xf8;
        const HEAD: usize = 5 + 16;
        let all = self.handle.bytes.get(if self.handle.kind == ALIGNED { 3 } else { 0 }..)?;
        let &[0, 0xfb, length, _, kind, ..] = all else { return None };
        Some(FileHandle { kind: kind.into(), bytes: all.get(HEAD..length.into())?.to_vec() })
    }

    /// What is at a path, if this is it.
    fn at(&self, root: &OwnedFd, path: &Path) -> Option<FileType> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let is = openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT).and_then(fstat).ok()?;
        let device = format!("{}:{}", major(is.st_dev), minor(is.st_dev));
        (is.st_ino == self.inode && device == self.device()).then(|| FileType::from_raw_mode(is.st_mode))
    }

    /// Its place in the container, given what it is called on the node in a layer.
    fn seen_as(&self, in_layer: &Path, points: &[PathBuf], root: &OwnedFd) -> Option<Place> {
        let parts: Vec<_> = in_layer.components().skip(1).collect();
        let ends = (0..=parts.len()).map(|skipped| parts[skipped..].iter().collect::<PathBuf>());
        let candidates = ends.flat_map(|end| points.iter().map(move |point| point.join(&end)));
        candidates.map(|path| path.components().collect()).find_map(|path: PathBuf| {
            let kind = self.at(root, &path)?;
            Some(Place { path, kind })
        })
    }
}

/// The mounts of a container, and the filesystems of the node that may have what is mounted there.
pub struct Paths {
    root: OwnedFd,
    mounts: Vec<Mount>,
    hosts: Vec<Mount>,
    /// All devices of the node's filesystems.
    devices: HashSet<String>,
}

impl Paths {
    /// Those of a container whose first process is `init`.
    ///
    /// # Errors
    /// It has ended.
    pub fn of(init: u32) -> io::Result<Self> {
        let mounts = |pid: &str| -> io::Result<Vec<Mount>> {
            Ok(Mount::parse_all(&tranship_sys::process::text(format!("/proc/{pid}/mountinfo"))?))
        };
        let mut hosts = mounts("self")?;
        hosts.retain(|mount| HOSTS.contains(&mount.fstype.as_str()));
        let devices = hosts.iter().map(|mount| mount.device.clone()).collect();
        // Of a device, one that no other mount hides.
        hosts.retain(|mount| opened(None, mount).is_some());
        hosts.sort_by(|a, b| (a.fstype == "tmpfs", &a.device).cmp(&(b.fstype == "tmpfs", &b.device)));
        hosts.dedup_by(|a, b| a.device == b.device);
        let root = open(format!("/proc/{init}/root"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root, mounts: mounts(&init.to_string())?, hosts, devices })
    }

    /// Whether a file is on a filesystem that the first process has mounted.
    pub fn are_known(&self, watch: &Watch) -> bool {
        let device = watch.device();
        self.mounts.iter().any(|mount| mount.device == device && !is_served(mount))
    }

    /// Whether CRIU has to be told where a file is. In a tmpfs of the container's own it finds each file that has a path.
    pub fn are_wanted(&self, watch: &Watch) -> bool {
        let device = watch.device();
        let mut own = self.mounts.iter().filter(|mount| mount.device == device && !is_served(mount));
        self.devices.contains(&device) || own.any(|mount| mount.fstype != "tmpfs")
    }

    fn is_overlay(&self, device: &str) -> bool {
        self.mounts.iter().any(|mount| mount.device == device && mount.fstype == "overlay")
    }

    /// The file that is watched, opened with `O_PATH`: nobody is told of it. `None` where it is not found. Changes the working directory of this
    /// thread, see [`with_directory`].
    pub(crate) fn open(&self, watch: &Watch) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open_in_container =
            |path: &Path| openat2(&self.root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT).ok();
        if self.are_wanted(watch) {
            return open_in_container(&self.place(watch)?.path);
        }
        let device = watch.device();
        let points = self.mounts.iter().filter(|mount| mount.device == device).map(|mount| mount.place.as_path());
        points.filter_map(open_in_container).find_map(|directory| {
            nix::unistd::fchdir(directory).ok()?;
            watch.handle.open_on_working_directory().ok()
        })
    }

    /// Where files are in the container, in the order of the watches; `None` of one that is not found.
    pub fn find(&self, watches: &[Watch]) -> Vec<Option<Place>> {
        let found = with_directory(|| watches.iter().map(|watch| self.place(watch)).collect());
        found.unwrap_or_else(|_| vec![None; watches.len()])
    }

    fn place(&self, watch: &Watch) -> Option<Place> {
        let of_watch = watch.device();
        let is_overlay = self.is_overlay(&of_watch);
        let own: Vec<&Mount> = self.mounts.iter().filter(|mount| mount.device == of_watch).collect();
        let points: Vec<PathBuf> = own.iter().map(|mount| mount.place.clone()).collect();
        // A file that is mounted by itself may be on a filesystem that the node hides.
        let mounted = points.iter().find_map(|path| {
            let kind = watch.at(&self.root, path)?;
            Some(Place { path: path.clone(), kind })
        });
        if mounted.is_some() {
            return mounted;
        }
        let handle = if is_overlay { watch.in_layer()? } else { watch.handle.clone() };
        // An overlay itself opens none of its handles.
        let inside = own.iter().filter(|_| !is_overlay).filter_map(|mount| opened(Some(&self.root), mount));
        let hosts = self.hosts.iter().filter(|host| is_overlay || host.device == of_watch);
        inside.chain(hosts.filter_map(|host| opened(None, host))).find_map(|directory| {
            nix::unistd::fchdir(directory).ok()?;
            let file = handle.open_on_working_directory().ok()?;
            let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", file.as_raw_fd())).ok()?;
            watch.seen_as(&link, &points, &self.root)
        })
    }
}

/// Does something in a thread that has a working directory of its own.
///
/// # Errors
/// There can be no such thread.
pub(crate) fn with_directory<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    tranship_sys::threads::apart("directory", || {
        unshare(CloneFlags::CLONE_FS)?;
        Ok(work())
    })?
}

/// A reference to the root of a mount, at its place below `root` or on this node; `None` if that is no directory, or another mount hides it.
fn opened(root: Option<&OwnedFd>, mount: &Mount) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let point = mount.place.as_path();
    let directory = match root {
        Some(root) => openat2(root, point, flags, Mode::empty(), ResolveFlags::IN_ROOT),
        None => open(point, flags, Mode::empty()),
    };
    let directory = directory.ok()?;
    // Before Linux 5.8 the number of the mount is not told.
    let is = statx(&directory, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID).ok()?;
    let is_told = is.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    (!is_told || is.stx_mnt_id == u64::from(mount.id)).then_some(directory)
}

/// What CRIU is to find in its cache of the files that these descriptors watch; `None` without descriptors. Of a file that is not
/// found nothing is in it.
///
/// # Errors
/// The container has ended.
pub fn cache(init: u32, watchers: &[Watcher]) -> io::Result<Option<Vec<u8>>> {
    if watchers.is_empty() {
        return Ok(None);
    }
    let paths = Paths::of(init)?;
    let infos =
        watchers.iter().filter_map(|(pid, fd)| tranship_sys::process::text(format!("/proc/{pid}/fdinfo/{fd}")).ok());
    let watches: Vec<Watch> =
        infos.flat_map(|info| Watch::all(&info).collect::<Vec<_>>()).filter(|watch| paths.are_wanted(watch)).collect();
    let found = paths.find(&watches);
    let entries = watches.iter().zip(found).filter_map(|(watch, place)| {
        let path = place?.path.as_os_str().as_bytes().to_vec();
        Some(CacheEntry { device: watch.device, inode: watch.inode, path })
    });
    let mut image: Vec<u8> = MAGIC.iter().flat_map(|magic| magic.to_le_bytes()).collect();
    for entry in entries {
        let bytes = prost::Message::encode_to_vec(&entry);
        image.extend((bytes.len() as u32).to_le_bytes());
        image.extend(bytes);
    }
    Ok(Some(image))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "inotify wd:1 ino:2a sdev:3d mask:100 ignored_mask:0 fhandle-bytes:20 fhandle-type:f8 \
                        f_handle:00000000fb1d0001000102030405060708090a0b0c0d0e0f2a0000000700000000000000";

    #[test]
    fn the_handle_of_the_layer_is_in_that_of_the_overlay() {
        let watch = Watch::of(LINE).unwrap();
        assert_eq!((watch.device(), watch.inode), ("0:61".to_owned(), 0x2a));
        assert_eq!(watch.in_layer(), Some(FileHandle { kind: 1, bytes: vec![0x2a, 0, 0, 0, 7, 0, 0, 0] }));
    }

    #[test]
    fn what_is_no_handle_of_an_overlay_has_none_of_a_layer() {
        for handle in ["", "00", "00000000", "0000000", "zz", "00000000fbff0001", "00000000fc1d0001000102030405060708"]
        {
            let (before, _) = LINE.split_once("f_handle:").unwrap();
            assert_eq!(Watch::of(&format!("{before}f_handle:{handle}")).and_then(|watch| watch.in_layer()), None);
        }
        assert_eq!(Watch::all("pos:\t0\nflags:\t02000000\n").count(), 0);
    }

    #[test]
    fn marks_of_fanotify_are_read() {
        let mark = "fanotify ino:2a sdev:3d mflags:0 mask:8000002 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:2a00000007000000";
        let watch = Watch::of(mark).unwrap();
        assert_eq!((watch.device(), watch.inode, watch.number), ("0:61".to_owned(), 0x2a, -1));
        assert_eq!(Watch::of("fanotify mnt_id:2a mflags:0 mask:2 ignored_mask:0"), None);
    }

    #[test]
    fn where_nothing_is_watched_there_is_no_cache() {
        assert_eq!(cache(std::process::id(), &[]).unwrap(), None);
    }
}
