use std::io;
use std::path::{Path, PathBuf};

/// Why something could not be done to files; the text is complete in itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The system refused.
    #[error("cannot {what} {}: {why}", path.display())]
    Refused {
        /// What was tried, e.g. `read the directory`.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        why: io::Error,
    },
    /// Something is mounted where a deletion would go.
    #[error("cannot delete {}: {} is a mount point; unmount it first", path.display(), mount_point.display())]
    Mounted {
        /// What was to be deleted.
        path: PathBuf,
        /// The mount point at or below it.
        mount_point: PathBuf,
    },
    /// The tree is nested too deeply to be walked safely.
    #[error("cannot walk {}: directories are nested deeper than {limit} levels; shorten the tree", path.display())]
    TooDeep {
        /// Where the limit was reached.
        path: PathBuf,
        /// The limit in levels.
        limit: usize,
    },
    /// Mounts came back as often as they were unmounted.
    #[error("cannot unmount {}: something keeps mounting it again; stop that first", path.display())]
    KeepsComingBack {
        /// The mount point.
        path: PathBuf,
    },
}

impl StorageError {
    pub(crate) fn refused(what: &'static str, path: &Path, why: impl Into<io::Error>) -> Self {
        Self::Refused { what, path: path.to_owned(), why: why.into() }
    }
}

/// Directories below the starting point that a walk descends at most: each level costs a descriptor and stack.
pub(crate) const DEPTH_LIMIT: usize = 400;
