//! The content of a container's tmpfs mounts: copied ahead while the container runs, and what has changed since in the freeze.
//!
//! ```text
//!  source                                          destination
//!  find ───────── the mounts, in the offer ──────▶ make: one tmpfs for each, below the migration's directory
//!  Source::open   (each tree cloned, watched)
//!  Source::pass ═ operations and content ════════▶ Replica::apply    while the container runs, as often as it pays
//!  ── freeze ──
//!  Source::decide (which mounts CRIU leaves alone)
//!  Source::pass ═ what has changed since ════════▶ Replica::apply, Replica::finish, then criu binds it into the container
//! ```
//!
//! **What has changed?** Inodes are compared by ctime, mtime and size, as git and rsync do, with two gaps that must be closed
//! before a running container's files may be trusted to that:
//!
//! - *The clock's grain.* A change in the same tick as the look at a file leaves no trace in its ctime. So a ctime that was
//!   younger than [`GRAIN`] when it was looked at is not believed in the next pass.
//! - *Shared mappings.* A write to a mapped page of a tmpfs changes no time at all. Such a file has at the freeze a shared
//!   mapping, or is open for reading and writing, or it was closed since: and the kernel tells of the closing (fanotify, on the
//!   whole filesystem). The files of these three kinds are compared chunk by chunk with the hashes of what was sent.
//!
//! A filesystem where nothing happened, by that watch, and nobody can write without its notice, is not walked at all. What the
//! freeze costs therefore grows with the files that are being written, and not with those that are there.
//!
//! **What cannot be done so** stays with CRIU, which makes an archive of the mount in the freeze: mounts that propagate, with
//! options that are not known here, changed while the container was on its way; see [`find`] and [`Source::decide`].

mod content;
mod find;
mod op;
mod replica;
mod source;
mod suspects;
mod tree;
mod watch;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use find::{Options, TmpfsMount, find};
pub use op::{Kind, Name, Op, Time};
pub use replica::{Replica, make};
pub use source::{Decision, Moved, Source};

/// How old a ctime must be to be believed: several ticks of the slowest kernel clock (10 ms).
pub const GRAIN: Duration = Duration::from_millis(50);
/// Most files in one mount; one with more stays with CRIU. Each costs the agent a few hundred bytes.
pub const MAX_FILES: usize = 100_000;

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

/// Why a mount's content could not be copied; the text is complete in itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TmpfsError {
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
    #[error("{} {what}; move fewer of them, or keep them in a volume", point.display())]
    TooMuch {
        /// The mount.
        point: PathBuf,
        /// Of what there is too much.
        what: String,
    },
    /// A file was not what it had been a moment ago, in a container that is frozen.
    #[error("{} changed while the container was frozen: somebody outside of it writes there; stop that, and try again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The link to the peer broke.
    #[error("the content of the tmpfs mounts cannot be sent: {0}")]
    Link(#[source] io::Error),
    /// The peer sent what makes no sense.
    #[error("the source sent something that does not fit to a tmpfs: {0}; update both agents")]
    Nonsense(String),
}

impl TmpfsError {
    fn refused(what: &'static str, path: &Path, why: impl Into<io::Error>) -> Self {
        Self::Refused { what, path: path.to_owned(), why: why.into() }
    }
}
