//! The migration as a transaction: steps, undo, journal, commit point.
//!
//! ```text
//!   source                                                destination
//!   ──────                                                ───────────
//!   inspect · connect · offer ───────────────────────────▶ check · network · bundle · directory · pager · engine
//!   arm                                                       (everything that can be made before the freeze)
//!   precopy ══ memory, in rounds ═════════════════════════▶
//!   freeze · close-gate
//!   transfer ═══ memory, skeleton ════════════════════════▶ receive · restore (stopped)
//!   await-ready ◀─────────────────────────────────────────── READY, in its journal: from here it only waits
//!   COMMIT, in its journal (fsync): the commit point
//!   deliver ─────────────────────────────────────────────▶ open-gate · resume · announce
//!   release ◀─────────────────────────────────────────────── running
//!   done                                                   drain · tidy · done
//! ```
//!
//! This crate decides what happens and in which order, and what a failure or a restart means; the *ports* ([`SourcePort`],
//! [`DestinationPort`]) do it. Each step has an action and an idempotent undo, and the journal entry precedes the action.
//!
//! Before the commit point any failure undoes every step that was begun, last first. After it the remaining steps are
//! repeated until they succeed. A panic in a step or an undo is such a failure. The source alone decides; a destination
//! that was READY keeps its stopped copy until the source's word reaches it (presumed abort: what the source has no
//! record of was aborted).
//!
//! ```text
//!   COMMIT ──▶ deliver ──▶ drain ──▶ release ──▶ done
//!                 │          │
//!                 └──────────┴─▶ GIVEN UP, in its journal (fsync): everything is undone, the original runs
//!                                  └──▶ void, said until it is heard: the destination undoes everything, too
//! ```
//!
//! The one way back from the commit point is an operator's word that the destination is lost. A destination that begins
//! anew does not let its copy run before the source has said its word once more.

pub mod damage;
mod destination;
mod failure;
mod faults;
#[doc(hidden)]
pub mod fuzz;
pub mod group;
mod journal;
mod panics;
mod source;

pub use destination::{
    DestinationPort, DestinationStep, Standing, abort, begun, commit, drain, make_ready, prepare, standing,
};
pub use failure::Failure;
pub use faults::{Fault, FaultPlan, FaultSpecError, When};
pub use journal::{Damage, Damaged, Journal, JournalError, Record};
pub use panics::{caught, keep_places};
pub use source::{Ending, Retry, SourcePort, SourceStep, migrate, recover};
