//! The pager: the destination's page store and fault server, as a process of its own.
//!
//! It holds the pages of a container that is being restored and supplies them through userfaultfd, on demand first, then
//! all the rest. The agent fills the store and may die at any time afterwards: the restored tasks do not notice.
//!
//! ```text
//!   agent ──control socket── pager ──lazy-pages.socket── criu (hands over one userfaultfd for each task)
//!                              │
//!                         userfaultfds ── restored tasks
//! ```
//!
//! The life of one address space here:
//!
//! ```text
//!   ABSENT ──its userfaultfd arrives──▶ SERVED ──the agent says "the tasks run"──▶ FILLING ──nothing left──▶ closed
//!               (faults are answered from the store; a page that was named as coming later is asked for,
//!                and the fault waits until it has come; one that was neither sent nor named is zero)
//! ```
//!
//! Until the agent says that the tasks run, nothing is taken out of the store: if criu dies before that, the restore can be
//! done again from the same pages. Only then are they put in place beyond what is asked for (and the few that came last), and
//! given back to the system as they are, so that a node never holds the container's memory twice.
//!
//! When a pager ends before its time (it panics, cannot go on, or is killed), a keeper has its userfaultfds open, so that no task reads zeros where there was
//! content, and starts another pager, which takes over what the first one knew.

use std::io::Write;

mod around;
mod control;
#[doc(hidden)]
pub mod fuzz;
mod guards;
mod inputs;
mod keeper;
mod newest;
mod objects;
mod remote;
mod serve;
mod space;
mod takeover;

pub use control::{ControlError, PagerHandle, Status, StoredExtent};
pub use keeper::keep;
pub use serve::{PagerError, run};

/// Name of the control socket in a migration's directory.
pub const CONTROL_SOCKET: &str = "pager.sock";
/// Name of the socket in criu's work directory; CRIU's own constant.
pub const LAZY_SOCKET: &str = "lazy-pages.socket";
/// Name of the file that the pager leaves in a migration's directory when every page is where it belongs.
pub const DRAINED_FILE: &str = "drained.json";
/// Name of the table of shared memory that the pager keeps in a migration's directory, for the library that is preloaded
/// into criu. A line is `KEY file|segment PATH`: the object's name in criu's images, and the file with its content.
pub const SHARED_TABLE: &str = "shared";

/// Writes a line to the log. One that cannot be written, as on a full disk, is lost: `eprintln` would panic.
fn log(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "transhipd pager: {line}");
}
