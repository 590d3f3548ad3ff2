use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::StorageError;

/// The calling thread's mount namespace, which is the one that its unmounts act in.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";

/// Unmounts every mount at or below `path`, the one mounted last first; those in use are detached lazily. Returns how
/// many there were; 0 also if the path is gone.
///
/// # Errors
/// The first mount that cannot be unmounted; the others were tried all the same.
pub fn unmount_below(path: &Path) -> Result<usize, StorageError> {
    let mut unmounted = 0;
    // Mounts may be stacked, and unmounting one may uncover another; so look again until there is none.
    for _ in 0..16 {
        let mounts = below(path)?;
        if mounts.is_empty() {
            return Ok(unmounted);
        }
        let mut failure = None;
        // The kernel lists a mount after the one that it stands on.
        for mount in mounts.iter().rev() {
            match unmount(mount) {
                Ok(()) => unmounted += 1,
                Err(e) => {
                    failure.get_or_insert(StorageError::refused("unmount", mount, e));
                }
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
    }
    Err(StorageError::KeepsComingBack { path: path.to_owned() })
}

fn unmount(mount: &Path) -> nix::Result<()> {
    let flags = MntFlags::UMOUNT_NOFOLLOW;
    match umount2(mount, flags) {
        Err(Errno::EBUSY) => umount2(mount, flags | MntFlags::MNT_DETACH),
        // It went with another one, by propagation.
        Err(Errno::ENOENT) => Ok(()),
        result => result,
    }
}

/// The mount points at or below `path`, in the kernel's order; none if the path is gone. A last component that is a
/// symlink is not followed.
pub(crate) fn below(path: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let Some(real) = real(path)? else { return Ok(Vec::new()) };
    let table = std::fs::read(MOUNTINFO).map_err(|e| StorageError::refused("read", Path::new(MOUNTINFO), e))?;
    Ok(mount_points(&table).filter(|m| m.starts_with(&real)).collect())
}

/// One line of the table of mounts.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// The filesystem's device numbers, as the kernel writes them.
    pub device: String,
    pub point: PathBuf,
    /// The kind of filesystem.
    pub kind: String,
    pub source: String,
    /// The filesystem's own options, separated by commas.
    pub options: String,
}

/// The table of mounts, in the kernel's order: of those with one mount point the last one is seen.
pub(crate) fn table() -> Result<Vec<Mounted>, StorageError> {
    let table = tranship_sys::process::text(MOUNTINFO);
    let table = table.map_err(|e| StorageError::refused("read", Path::new(MOUNTINFO), e))?;
    Ok(table.lines().filter_map(mounted).collect())
}

pub(crate) fn mounted(line: &str) -> Option<Mounted> {
    let (of_mount, of_filesystem) = line.split_once(" - ")?;
    let mut mount = of_mount.split(' ').skip(2);
    let device = mount.next()?.to_owned();
    let point = OsString::from_vec(unescape(mount.nth(1)?.as_bytes())).into();
    let mut filesystem =
        of_filesystem.split(' ').map(|field| tranship_sys::process::escaped(&unescape(field.as_bytes())));
    Some(Mounted { device, point, kind: filesystem.next()?, source: filesystem.next()?, options: filesystem.next()? })
}

/// The path without symlinks, but for its last component.
pub(crate) fn real(path: &Path) -> Result<Option<PathBuf>, StorageError> {
    let directory = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    let name = path.file_name();
    // Without a last name (`/`, `x/..`) there is nothing that must not be followed.
    match if name.is_some() { directory } else { path }.canonicalize() {
        Ok(directory) => Ok(Some(name.map_or(directory.clone(), |name| directory.join(name)))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(StorageError::refused("find", path, e)),
    }
}

/// The fifth field of each line (proc_pid_mountinfo(5)).
pub(crate) fn mount_points(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    table
        .split(|b| *b == b'\n')
        .filter_map(|line| line.split(|b| *b == b' ').nth(4))
        .map(|field| OsString::from_vec(unescape(field)).into())
}

/// A field of the table as text; `None` if it is not UTF-8.
pub(crate) fn unescape_text(field: &str) -> Option<String> {
    String::from_utf8(unescape(field.as_bytes())).ok()
}

/// The kernel writes space, tab, newline and backslash as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = |digits: &[u8]| {
            digits.iter().try_fold(0u32, |value, d| (b'0'..=b'7').contains(d).then(|| value * 8 + u32::from(d - b'0')))
        };
        match (first, tail.get(..3).and_then(octal)) {
            (b'\\', Some(value)) if value < 256 => {
                plain.push(value as u8);
                rest = &tail[3..];
            }
            _ => {
                plain.push(first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn escape(plain: &[u8]) -> Vec<u8> {
        plain
            .iter()
            .flat_map(|b| match b {
                b' ' | b'\t' | b'\n' | b'\\' => format!("\\{b:03o}").into_bytes(),
                b => vec![*b],
            })
            .collect()
    }

    proptest! {
        #[test]
        fn any_name_survives_the_kernels_escaping(name in proptest::collection::vec(any::<u8>(), 0..40)) {
            prop_assert_eq!(unescape(&escape(&name)), name.clone());
            let line = [b"22 1 0:20 / ", &escape(&name)[..], b" rw - proc proc rw"].concat();
            let points: Vec<_> = mount_points(&line).collect();
            prop_assert_eq!(points, vec![PathBuf::from(OsString::from_vec(name))]);
        }
    }

    #[test]
    fn a_line_of_the_table_is_understood() {
        let line =
            "60 28 0:50 / /d/merged\\040x rw,relatime shared:9 - overlay overlay rw,lowerdir=l/A:l/B,upperdir=/u";
        let found = mounted(line).unwrap();
        assert_eq!((found.device.as_str(), found.point.as_path()), ("0:50", Path::new("/d/merged x")));
        assert_eq!((found.kind.as_str(), found.options.as_str()), ("overlay", "rw,lowerdir=l/A:l/B,upperdir=/u"));
        assert!(mounted("60 28 0:50 /").is_none());
    }

    #[test]
    fn a_sibling_with_the_same_beginning_is_not_below() {
        assert!(!Path::new("/run/ab").starts_with("/run/a"));
        assert!(below(Path::new("/proc")).unwrap().contains(&PathBuf::from("/proc")));
        assert_eq!(below(Path::new("/nonexistent/x")).unwrap(), Vec::<PathBuf>::new());
    }
}
