//! Directories that others enter.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Makes a directory, and those above it that there are not, which everybody may enter and read (mode 0755), whatever the umask
/// of this process is. Directories that exist stay as they are.
///
/// # Errors
/// As mkdir(2) and chmod(2).
pub fn make_public(path: &Path) -> io::Result<()> {
    match DirBuilder::new().create(path) {
        Ok(()) => return fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    let above = path.parent().filter(|above| !above.as_os_str().is_empty()).ok_or(io::ErrorKind::NotFound)?;
    make_public(above)?;
    make_public(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_public_and_what_is_there_stays_as_it_is() {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let directory = tempfile::tempdir().unwrap();
        let (own, deep) = (directory.path().join("own"), directory.path().join("own/a/b"));
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        make_public(&deep).unwrap();
        make_public(&deep).unwrap();
        assert_eq!([&own, deep.parent().unwrap(), &deep].map(mode), [0o700, 0o755, 0o755]);
        fs::write(deep.join("file"), "").unwrap();
        assert!(make_public(&deep.join("file")).is_err());
        assert!(make_public(&deep.join("file/below")).is_err());
    }
}
