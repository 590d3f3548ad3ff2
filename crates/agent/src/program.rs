//! The agent's own program, as a file that stays as long as migrations need it.
//!
//! Engines execute the CRIU front long after the agent has placed it, perhaps while that agent is dead or its package is being
//! replaced. A link to `/proc/PID/exe` would dangle then, so that the engine found the real criu, or lead to the program of whichever
//! process has the pid by now. So each agent keeps its program in its state directory (a hard link where that is on the same
//! filesystem, else a copy), and compares device and inode before each use.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::sys::statvfs::{FsFlags, statvfs};
use tranship_criu::front;

/// The program of the running process, even where its file has been removed.
const RUNNING: &str = "/proc/self/exe";

static PLACES: OnceLock<Places> = OnceLock::new();

/// Where the program may be kept, and where it is.
#[derive(Debug)]
struct Places {
    directories: Vec<PathBuf>,
    kept: Mutex<Option<Kept>>,
}

/// A program that is kept, and the device and inode of the file that was checked against the running program.
#[derive(Debug)]
struct Kept {
    path: PathBuf,
    checked: (u64, u64),
}

impl Places {
    fn new(directories: Vec<PathBuf>) -> Self {
        Self { directories, kept: Mutex::new(None) }
    }

    /// The file, which is placed anew where it is not the one that was checked.
    fn path(&self) -> io::Result<PathBuf> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(kept) if identity(&kept.path).ok() == Some(kept.checked) => return Ok(kept.path.clone()),
            Some(lost) => {
                tracing::warn!(program = %lost.path.display(), "the agent's program was removed or replaced; placing it again");
            }
            None => {}
        }
        let mut failure = io::Error::other("there is no directory for the agent's program");
        for directory in &self.directories {
            match Kept::keep(directory) {
                Ok(fresh) => {
                    front::add_program(fresh.checked);
                    return Ok(kept.insert(fresh).path.clone());
                }
                Err(error) => {
                    failure = io::Error::new(error.kind(), format!("{} cannot be used: {error}", directory.display()));
                }
            }
        }
        Err(failure)
    }
}

impl Kept {
    /// Keeps the running program below `directory`, which is made if need be.
    fn keep(directory: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        if statvfs(directory)?.flags().contains(FsFlags::ST_NOEXEC) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "its filesystem is mounted with noexec"));
        }
        let path = directory.join("transhipd");
        if !same_content(&path)? {
            place(&path)?;
        }
        Ok(Self { checked: identity(&path)?, path })
    }
}

/// Puts the running program in place of what has the path, in one step.
fn place(path: &Path) -> io::Result<()> {
    let nascent = path.with_extension("new");
    match fs::remove_file(&nascent) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Not possible across filesystems, nor where the file has been removed.
    let linked = fs::canonicalize(RUNNING).and_then(|own| match identity(&own)? == identity(Path::new(RUNNING))? {
        true => fs::hard_link(own, &nascent),
        false => Err(io::ErrorKind::NotFound.into()),
    });
    if linked.is_err() {
        let copied =
            fs::copy(RUNNING, &nascent).and_then(|_| fs::set_permissions(&nascent, fs::Permissions::from_mode(0o700)));
        copied.inspect_err(|_| drop(fs::remove_file(&nascent)))?;
    }
    fs::rename(nascent, path)
}

/// Device and inode.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Whether a file has the content of the running program. False if there is none.
fn same_content(path: &Path) -> io::Result<bool> {
    let mut own = File::open(RUNNING)?;
    let mut other = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let is_program = |file: &fs::Metadata| file.is_file() && file.permissions().mode() & 0o100 != 0;
    let (mine, its) = (own.metadata()?, other.metadata()?);
    if (mine.dev(), mine.ino()) == (its.dev(), its.ino()) {
        return Ok(true);
    }
    if mine.len() != its.len() || !is_program(&its) {
        return Ok(false);
    }
    let (mut a, mut b) = (vec![0; 1 << 18], vec![0; 1 << 18]);
    loop {
        let length = own.read(&mut a)?;
        match other.read_exact(&mut b[..length]) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read?,
        }
        match length {
            0 => return Ok(true),
            _ if a[..length] != b[..length] => return Ok(false),
            _ => {}
        }
    }
}

/// Keeps the program of this process in the first of these directories that has room for it and may have programs. To be called
/// once, when the agent starts; where it fails, [`path`] tries again.
pub fn keep(directories: Vec<PathBuf>) -> io::Result<PathBuf> {
    PLACES.get_or_init(|| Places::new(directories)).path()
}

/// The file in which the program is kept, checked.
pub fn path() -> io::Result<PathBuf> {
    PLACES.get().ok_or_else(|| io::Error::other("the agent's program is not kept"))?.path()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(directory: &Path) -> Places {
        Places::new(vec![PathBuf::from("/proc/tranship"), directory.to_owned()])
    }

    #[test]
    fn a_program_that_was_removed_or_replaced_is_placed_again() {
        let directory = tempfile::tempdir().unwrap();
        let places = places(directory.path());
        let path = places.path().unwrap();
        assert!(same_content(&path).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(same_content(&places.path().unwrap()).unwrap());
        let other = directory.path().join("other");
        fs::write(&other, "another program").unwrap();
        fs::rename(other, &path).unwrap();
        assert!(!same_content(&path).unwrap());
        assert_eq!(places.path().unwrap(), path);
        assert!(same_content(&path).unwrap());
    }

    #[test]
    fn the_same_program_stays_the_same_file_and_another_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = places(directory.path()).path().unwrap();
        let first = identity(&path).unwrap();
        places(directory.path()).path().unwrap();
        assert_eq!(first, identity(&path).unwrap(), "fronts of an agent before this one are known by their program");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "an older program").unwrap();
        places(directory.path()).path().unwrap();
        assert!(same_content(&path).unwrap());
    }
}
