//! The skeleton of a root filesystem that containers without a `--rootfs` of their own get: empty directories to mount
//! on and the links of a merged /usr. It is one directory that all nodes see, so it is equal on all of them.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path};

use crate::error::{LabError, Result};

const DIRECTORIES: [(&str, u32); 15] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
];
/// What is a link into /usr on a merged system, and a directory of its own elsewhere.
pub(crate) const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// What containers find there from the host or as a file system of its own: nothing in the skeleton shows through.
const COVERED: [&str; 7] = ["dev", "etc", "proc", "run", "sys", "tmp", "usr"];

/// Makes the skeleton.
pub(crate) fn make(top: &Path) -> Result<()> {
    for (name, mode) in DIRECTORIES {
        let path = top.join(name);
        fs::create_dir_all(&path)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)))
            .map_err(LabError::file("make", &path))?;
    }
    symlink("/run", top.join("var/run")).map_err(LabError::file("make", top.join("var/run")))?;
    for name in MERGED {
        let path = top.join(name);
        if let Ok(target) = fs::read_link(Path::new("/").join(name)) {
            symlink(target, &path).map_err(LabError::file("make", &path))?;
        } else if Path::new("/").join(name).is_dir() {
            fs::create_dir(&path).map_err(LabError::file("make", &path))?;
        }
    }
    Ok(())
}

/// Makes the place in the skeleton that something is mounted on in a container. `file` says that a file is.
pub(crate) fn ensure_mount_point(top: &Path, inside: &Path, file: bool) -> Result<()> {
    let mut parts = inside.components().filter(|c| !matches!(c, Component::RootDir)).peekable();
    let usable = inside.is_absolute() && parts.clone().all(|c| matches!(c, Component::Normal(_)));
    let Some(Component::Normal(first)) = parts.peek().copied().filter(|_| usable) else {
        return Err(LabError::Refused(format!("{} cannot be a mount point; give an absolute path", inside.display())));
    };
    if COVERED.iter().any(|c| first == *c) {
        // Below the host's directories it must exist; on a tmpfs the engine makes it.
        let writable = first == "tmp" || first == "run" || first == "dev";
        return if writable || inside.exists() {
            Ok(())
        } else {
            Err(LabError::Refused(format!(
                "{} does not exist on the host, whose /{} the container sees read-only; mount elsewhere or give a --rootfs",
                inside.display(),
                first.to_string_lossy()
            )))
        };
    }
    let mut path = top.to_owned();
    path.extend(parts);
    let directory = if file { path.parent().unwrap_or(top) } else { &path };
    fs::create_dir_all(directory).map_err(LabError::file("make the mount point", directory))?;
    if file {
        match fs::File::create_new(&path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                return Err(LabError::file("make the mount point", path)(e));
            }
            _ => {}
        }
    }
    Ok(())
}
