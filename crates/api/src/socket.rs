use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Why the API's socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another agent answers there.
    #[error("an agent listens on {} already; stop it, or give this one another `socket`", .0.display())]
    InUse(PathBuf),
    /// There is a file that is not a socket.
    #[error("{} is there and is no socket; remove it, or set another `socket`", .0.display())]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {}: {source}; check that its directory exists and is writable", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Listens on `path` for root alone (mode 0600), in place of a socket that a dead agent left. To be called within a tokio
/// runtime.
///
/// The socket is made under another name and renamed, so that nobody finds it with wider permissions, and so that a client
/// finds either the old one or one that answers.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let fail = |source| BindError::Io { path: path.to_owned(), source };
    match path.symlink_metadata() {
        Ok(m) if !m.file_type().is_socket() => return Err(BindError::NotASocket(path.to_owned())),
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            return Err(BindError::InUse(path.to_owned()));
        }
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(fail(e)),
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let fresh = path.with_file_name(name);
    match std::fs::remove_file(&fresh) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(fail(e)),
        _ => {}
    }
    let listener = UnixListener::bind(&fresh).map_err(fail)?;
    crate::accept::keep_spare();
    let placed =
        std::fs::set_permissions(&fresh, Permissions::from_mode(0o600)).and_then(|()| std::fs::rename(&fresh, path));
    if let Err(e) = placed {
        // The first error is the one that matters.
        let _ = std::fs::remove_file(&fresh);
        return Err(fail(e));
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_for_root_alone_and_replaces_a_dead_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        drop(bind(&path).unwrap());
        assert!(path.exists(), "a dropped listener leaves its socket");
        let live = bind(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path), Err(BindError::InUse(_))));
        drop(live);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
