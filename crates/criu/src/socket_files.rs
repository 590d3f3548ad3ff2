//! Files of Unix sockets that were renamed, or have other names. CRIU binds a socket to the name that it was bound to; its file gets the names that
//! it has from there.
//!
//! ```text
//!   source         bound to /run/s.tmp; its file is /run/s now, and /run/t
//!   criu           binds /run/s.tmp
//!   held tasks     /run/s.tmp ──link──▶ /run/s, /run/t; /run/s.tmp is removed
//! ```
//!
//! A socket with a relative name is bound in the directory that its file is in now. The library preloaded into criu shows criu the file there in a
//! dump, and makes directories that are gone in a restore (`socket_files` of tranship-preload).

use std::cell::OnceCell;
use std::collections::{BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, linkat, major, minor, open, openat, openat2,
    statat, unlinkat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tranship_sys::process::{take_descriptor, text};
use tranship_sys::unix_socket::{bound_file, is_connection, path};

use crate::irmap::Watch;
use crate::preflight::{Mount, mount_of};

/// What the kernel appends to a name that was removed.
const REMOVED: &[u8] = b" (deleted)";

/// Where the files of a container are.
#[derive(Debug)]
pub struct Places {
    root: OwnedFd,
    /// The mounts that its first process sees.
    mounts: HashSet<u32>,
    pids: Vec<u32>,
    watched: OnceCell<HashSet<(String, u64)>>,
}

/// The file of a socket, as it is.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// It has no name any more, or the one alone that CRIU gives it.
    Usual,
    /// It has others, in a mount namespace that is not the first process's, or cannot be looked at.
    Unknown,
    /// CRIU binds the socket at `place`, of which so many directories are gone; then its file gets these names.
    Named {
        /// All of them, absolute.
        names: Vec<Vec<u8>>,
        /// Where CRIU binds it.
        place: Vec<u8>,
        /// Directories that are gone.
        gone: usize,
    },
    /// It cannot be as it is.
    Lost(Lost),
}

/// Why a file cannot get its names again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lost {
    /// The file is hidden by a mount.
    Hidden {
        /// Its name.
        file: Vec<u8>,
        /// CRIU can bind the socket nevertheless, to a name that leads to it alone.
        is_free: bool,
    },
    /// Something else is where CRIU would bind the socket, or another filesystem.
    Occupied {
        /// Where the file is.
        file: Vec<u8>,
        /// Where CRIU would bind it.
        place: Vec<u8>,
    },
    /// Who watches the directory of a name is told of each that the file gets.
    Watched(Vec<u8>),
    /// It has more names than are found in the directories where it is looked for.
    Elsewhere {
        /// One of its names, or a former one.
        file: Vec<u8>,
        /// CRIU can bind the socket nevertheless.
        is_free: bool,
    },
}

/// A socket whose file is to get names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFile {
    /// A process that has the socket, by its pid in the container.
    pub task: u32,
    /// Under which number.
    pub descriptor: i32,
    names: Vec<Vec<u8>>,
    gone: usize,
}

impl Places {
    /// Those of the container whose first process is `init`, and of whose processes these are the pids.
    ///
    /// # Errors
    /// It has ended.
    pub fn of(init: u32, pids: Vec<u32>) -> io::Result<Self> {
        let mounts = Mount::parse_all(&text(format!("/proc/{init}/mountinfo"))?);
        let mounts = mounts.into_iter().map(|mount| mount.id).collect();
        Ok(Self { root: root(init)?, mounts, pids, watched: OnceCell::new() })
    }

    /// The file of a socket.
    pub fn find(&self, socket: BorrowedFd<'_>) -> Found {
        match self.look(socket).unwrap_or(Found::Unknown) {
            Found::Named { names, place, .. } if names.iter().chain([&place]).any(|name| self.is_heard_of(name)) => {
                Found::Lost(Lost::Watched(place))
            }
            found => found,
        }
    }

    /// Whether somebody is told of what is made at a path.
    fn is_heard_of(&self, path: &[u8]) -> bool {
        self.stat(directory(path)).is_some_and(|directory| self.watched().contains(&identity(&directory)))
    }

    fn look(&self, socket: BorrowedFd<'_>) -> Option<Found> {
        let name = path(socket).ok().filter(|name| !name.is_empty())?;
        let file = bound_file(socket).ok()?;
        let (is, mount, link) = (fstat(&file).ok()?, mount_of(&file)?, link(&file)?);
        if is.st_nlink == 0 {
            return Some(Found::Usual);
        }
        if !self.mounts.contains(&mount) {
            return None;
        }
        let (link, is_removed) = match link.strip_suffix(REMOVED) {
            Some(link) => (link.to_vec(), true),
            None => (link, false),
        };
        let is_at = |path: &[u8]| self.stat(path).is_some_and(|there| same(&there, &is));
        let place = place(&name, &link);
        // CRIU enters the file's directory to bind a relative name.
        let is_entered = name.starts_with(b"/") || self.stat(directory(&link)).is_some();
        let gone = || self.gone(&place, mount, &is).filter(|_| is_entered);
        if !is_removed && !is_at(&link) {
            return Some(Found::Lost(Lost::Hidden { is_free: gone() == Some(0), file: link }));
        }
        let has_one = is.st_nlink == 1 && !is_removed;
        if has_one && is_at(&place) {
            return Some(if is_found(&name, &link) {
                Found::Usual
            } else {
                Found::Named { names: vec![link], place, gone: 0 }
            });
        }
        let names = if has_one { vec![link.clone()] } else { self.names(&is, [&link, &place]) };
        if usize::try_from(is.st_nlink) != Ok(names.len()) {
            return Some(Found::Lost(Lost::Elsewhere { is_free: gone() == Some(0), file: link }));
        }
        Some(match gone() {
            Some(gone) => Found::Named { names, place, gone },
            None => Found::Lost(Lost::Occupied { file: link, place }),
        })
    }

    fn open(&self, path: &[u8]) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat2(&self.root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT).ok()
    }

    fn stat(&self, path: &[u8]) -> Option<Stat> {
        fstat(self.open(path)?).ok()
    }

    /// How many directories of a path are gone; `None` where another file is there, or where the file that `is` cannot get a name from there, on
    /// another mount.
    fn gone(&self, path: &[u8], mount: u32, is: &Stat) -> Option<usize> {
        if self.stat(path).is_some_and(|there| !same(&there, is)) {
            return None;
        }
        let directories = Path::new(OsStr::from_bytes(path)).ancestors().skip(1);
        let (gone, nearest) =
            directories.enumerate().find_map(|(gone, path)| Some((gone, self.open(path.as_os_str().as_bytes())?)))?;
        let is_directory = FileType::from_raw_mode(fstat(&nearest).ok()?.st_mode) == FileType::Directory;
        (is_directory && mount_of(&nearest) == Some(mount)).then_some(gone)
    }

    /// Those names of a file that are in the directories of these paths, but for directories that somebody watches: who does would be told that
    /// they were read.
    fn names(&self, is: &Stat, paths: [&[u8]; 2]) -> Vec<Vec<u8>> {
        let parents: BTreeSet<&Path> = paths.map(|path| Path::new(OsStr::from_bytes(directory(path)))).into();
        let mut found: Vec<(Vec<u8>, (u64, u64))> = Vec::new();
        for parent in parents {
            let read = || -> Option<Vec<OsString>> {
                let directory = self.open(parent.as_os_str().as_bytes())?;
                let of = fstat(&directory).ok()?;
                // A directory that is found by two paths is read once.
                let is_new = found.iter().all(|(_, directory)| *directory != (of.st_dev, of.st_ino));
                if !is_new || self.watched().contains(&identity(&of)) {
                    return None;
                }
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOATIME | OFlags::CLOEXEC;
                let opened = openat(&directory, ".", flags, Mode::empty()).ok()?;
                let entries = Dir::new(opened).ok()?.filter_map(Result::ok);
                Some(entries.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned()).collect())
            };
            let Some(of) = self.stat(parent.as_os_str().as_bytes()) else { continue };
            for path in read().into_iter().flatten().map(|name| parent.join(name).into_os_string().into_vec()) {
                if self.stat(&path).is_some_and(|there| same(&there, is)) {
                    found.push((path, (of.st_dev, of.st_ino)));
                }
            }
        }
        found.into_iter().map(|(path, _)| path).collect()
    }

    /// The files that the container's processes watch by inotify or fanotify.
    fn watched(&self) -> &HashSet<(String, u64)> {
        self.watched.get_or_init(|| {
            let directories = self.pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fdinfo")).ok());
            let infos = directories.flatten().flatten().filter_map(|entry| text(entry.path()).ok());
            let watches = infos.flat_map(|info| Watch::all(&info).collect::<Vec<_>>());
            watches.map(|watch| (watch.device(), watch.inode())).collect()
        })
    }
}

impl SocketFile {
    /// That of a socket, if it is to get names. Connections have none of their own.
    pub fn of(found: &Found, (task, descriptor): (u32, i32), socket: BorrowedFd<'_>) -> Option<Self> {
        match found {
            Found::Named { names, gone, .. } if !is_connection(socket) => {
                Some(Self { task, descriptor, names: names.clone(), gone: *gone })
            }
            _ => None,
        }
    }

    /// Gives the file its names, and removes that which CRIU gave it, in the container whose first process is `init`; `pid` has the socket.
    ///
    /// # Errors
    /// There is no such socket; another file has one of the names; the system's.
    pub fn set(&self, init: u32, pid: u32) -> io::Result<()> {
        let root = root(init)?;
        let socket = take_descriptor(pid, self.descriptor)?;
        let file = bound_file(socket.as_fd())?;
        let (is, place) = (fstat(&file)?, link(&file).ok_or(io::ErrorKind::NotFound)?);
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        for name in &self.names {
            let (directory, name) = parent(&root, name)?;
            match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(there) if same(&there, &is) => continue,
                // That of the socket at the source came with the other files.
                Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::Socket => {
                    unlinkat(&directory, name, AtFlags::empty())?;
                }
                Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
            linkat(CWD, itself.as_str(), &directory, name, AtFlags::SYMLINK_FOLLOW)?;
        }
        if self.names.contains(&place) {
            return Ok(());
        }
        let (directory, name) = parent(&root, &place)?;
        unlinkat(&directory, name, AtFlags::empty())?;
        for path in Path::new(OsStr::from_bytes(&place)).ancestors().skip(1).take(self.gone) {
            let (directory, name) = parent(&root, path.as_os_str().as_bytes())?;
            match unlinkat(&directory, name, AtFlags::REMOVEDIR) {
                // Another socket's name is still there.
                Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn root(init: u32) -> io::Result<OwnedFd> {
    Ok(open(format!("/proc/{init}/root"), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// What the kernel calls a file.
fn link(file: &OwnedFd) -> Option<Vec<u8>> {
    Some(std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?.into_os_string().into_vec())
}

/// The path of the directory that a path is in.
fn directory(path: &[u8]) -> &[u8] {
    Path::new(OsStr::from_bytes(path)).parent().map_or(b"/", |parent| parent.as_os_str().as_bytes())
}

/// The directory of a path, and the name in it.
fn parent<'p>(root: &OwnedFd, path: &'p [u8]) -> io::Result<(OwnedFd, &'p OsStr)> {
    let path = Path::new(OsStr::from_bytes(path));
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((openat2(root, directory, flags, Mode::empty(), ResolveFlags::IN_ROOT)?, name))
}

fn same(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

fn identity(is: &Stat) -> (String, u64) {
    (format!("{}:{}", major(is.st_dev), minor(is.st_dev)), is.st_ino)
}

/// Whether CRIU (util.c, `cut_path_ending`) finds a relative name in the path of a file; it looks for no other.
fn is_found(name: &[u8], path: &[u8]) -> bool {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    name.starts_with(b"/") || path.strip_suffix(name).is_some_and(|directory| directory.ends_with(b"/"))
}

/// Where CRIU binds a socket: a relative name, if it does not find it in the file's path, in the file's directory.
fn place(name: &[u8], link: &[u8]) -> Vec<u8> {
    if name.starts_with(b"/") {
        return name.to_vec();
    }
    if is_found(name, link) {
        return link.to_vec();
    }
    let mut place = PathBuf::from(OsStr::from_bytes(directory(link)));
    for part in Path::new(OsStr::from_bytes(name)).components() {
        match part {
            Component::ParentDir => drop(place.pop()),
            Component::Normal(name) => place.push(name),
            _ => {}
        }
    }
    place.into_os_string().into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_names_are_found_as_criu_finds_them() {
        for name in ["s", "./s", "b/s", "./b/s", "/elsewhere"] {
            assert!(is_found(name.as_bytes(), b"/a/b/s"), "{name}");
        }
        for name in ["../b/s", "t", "xs", "./../b/s", "y/s"] {
            assert!(!is_found(name.as_bytes(), b"/a/b/s"), "{name}");
        }
        assert!(!is_found(b"s", b"/a/bs"));
    }

    #[test]
    fn a_socket_is_bound_where_its_file_is() {
        let places = [
            ("/x/s", "/a/b/t", "/x/s"),
            ("s", "/a/b/s", "/a/b/s"),
            ("s.tmp", "/a/b/s", "/a/b/s.tmp"),
            ("./s", "/a/b/t", "/a/b/s"),
            ("../s", "/a/b/s", "/a/s"),
            ("x/s", "/a/b/s", "/a/b/x/s"),
            ("../../../s", "/a/s", "/s"),
        ];
        for (name, link, expected) in places {
            assert_eq!(place(name.as_bytes(), link.as_bytes()), expected.as_bytes(), "{name} {link}");
        }
    }
}
