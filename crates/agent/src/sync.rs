//! Locks of the modules whose thread schedules are explored by `tests/models.rs`, which has types of the same names in this place.

pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};
