//! The content of directory trees: copied ahead while a container runs, and what has changed since in the freeze. What is common
//! to [`crate::tmpfs`] and [`crate::carried`].
//!
//! ```text
//!  source                                             destination
//!  Original::new   (each tree cloned, watched)
//!  Original::pass ═ operations and content ════════▶ Replica::apply    while the container runs, as often as it pays
//!  ── freeze ──
//!  Original::pass ═ what has changed since ════════▶ Replica::apply
//! ```
//!
//! **What has changed?** Inodes are compared by ctime, mtime and size, as git and rsync do, with two gaps that must be closed
//! before a running container's files may be trusted to that:
//!
//! - *The clock's grain.* A change in the same tick as the look at a file leaves no trace in its ctime. So a ctime that was
//!   younger than [`GRAIN`] when it was looked at is not believed in the next pass.
//! - *Shared mappings.* A write to a mapped page of a file on a disk changes the times once, until the page is written back. So a
//!   file with a shared mapping at one look is compared again at the next one. In a tmpfs it changes no time at all. There
//!   a file is compared if it has a shared mapping, had one at the last look, or got one since, which the kernel tells
//!   ([`tranship_sys::mapping_log`]). Where it does not, such a file has at the freeze a shared mapping, or is open for reading and
//!   writing, or it was closed since, and the kernel tells of the closing (fanotify, on the whole filesystem). To compare is to
//!   hash a file chunk by chunk, and see what is not as it was sent.
//!
//! **Where in a file?** A file that changed is compared chunk by chunk, which takes time for all of it. Where the kernel says which
//! parts of files are written ([`Trail`]), only those are read: to the chunk if it is written by calls alone, else to the folio of the
//! page cache. In a tmpfs it says so of calls ([`Calls`]): there those parts are read of a file that has no shared mapping.
//!
//! A tmpfs where nothing happened, by that watch and what is told of calls, and nobody can write without notice, is not walked at all.

mod calls;
mod chunks;
mod content;
#[doc(hidden)]
pub mod fuzz;
mod op;
mod original;
mod reader;
mod replica;
mod suspects;
mod trail;
mod tree;
mod watch;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use calls::Calls;
pub use op::{Kind, Name, Op, Time};
pub use original::Moved;
pub(crate) use original::{Original, Place, extended};
pub use replica::Replica;
pub(crate) use replica::{Copy, Limits};
pub(crate) use suspects::{Device, Layer, Use, look as look_for_suspects};
pub(crate) use trail::Trail;
pub(crate) use tree::{Node, Tree, look, open_beneath};

/// How old a ctime must be to be believed: several ticks of the slowest kernel clock (10 ms).
pub const GRAIN: Duration = Duration::from_millis(50);

/// Extended attributes that say something of the host, or of this copy, and not of the file: labels of its security policy, where
/// overlayfs has copied a file up from, and our own marks.
pub(crate) const OWN_ATTRIBUTES: [&[u8]; 4] =
    [b"security.selinux", b"trusted.overlay.origin", b"trusted.overlay.uuid", crate::carried::MARK.as_bytes()];

/// Where a source's operations go: to the peer.
pub trait Sink {
    /// The next operation.
    ///
    /// # Errors
    /// Those of the link.
    fn op(&mut self, op: &Op) -> io::Result<()>;

    /// Content of the file that [`Op::Content`] named last, 1 MiB at most.
    ///
    /// # Errors
    /// Those of the link.
    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Why a tree's content could not be copied; the text is complete in itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
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
    /// More than this code will hold in memory.
    #[error("{} {what}; move fewer of them, or keep them where both nodes see them", point.display())]
    TooMuch {
        /// The mount or directory.
        point: PathBuf,
        /// Of what there is too much.
        what: String,
    },
    /// It is not of a kind that can be copied.
    #[error("{} {why}", path.display())]
    Unfit {
        /// The mount or directory.
        path: PathBuf,
        /// Why, and what to do.
        why: &'static str,
    },
    /// A file was not what it had been a moment ago, in a container that is frozen.
    #[error("{} changed while the container was frozen: somebody outside of it writes there; stop that, and try again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// To open a file would break the lease of a process.
    #[error(
        "process {holder} holds a write lease on {} (fcntl F_SETLEASE), which reading the file would break; have the program give it \
         up, or keep the file where both nodes see it",
        path.display()
    )]
    Leased {
        /// The file.
        path: PathBuf,
        /// Pid of the process on this node.
        holder: u32,
    },
    /// The link to the peer broke.
    #[error("files cannot be sent: {0}")]
    Link(#[source] io::Error),
    /// The peer sent what makes no sense.
    #[error("the source sent something that does not fit to its files: {0}; update both agents")]
    Nonsense(String),
}

impl CopyError {
    pub(crate) fn refused(what: &'static str, path: &Path, why: impl Into<io::Error>) -> Self {
        Self::Refused { what, path: path.to_owned(), why: why.into() }
    }
}

pub(crate) fn nonsense(what: impl Into<String>) -> CopyError {
    CopyError::Nonsense(what.into())
}
