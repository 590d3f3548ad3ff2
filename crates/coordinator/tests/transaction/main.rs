//! The transaction under every failure that can be thought of: both agents' halves run against a fake [world](world)
//! and a fake link, one action at a time, and after each of them the invariants of the design are checked.
//!
//! ```text
//!   agents::source ──SourcePort──▶┐                          ┌◀──DestinationPort── agents::destination
//!        │  journal on disk       │        stage             │      journal on disk  │
//!        │                        └▶ world, link, mishaps ◀──┘                       │
//!        └──────── requests ────────▶ the link on the stage ◀──────── answers ───────┘
//! ```
//!
//! Which agent acts next is drawn by a seed, so that a run can be repeated. A mishap happens just before an action: an
//! agent dies (and starts again some time later, with nothing but its journal), or the link is cut.

mod agents;
mod chance;
mod deaths;
mod each_step;
mod full_disk;
mod journal;
mod links;
mod ports;
mod stage;
mod world;
