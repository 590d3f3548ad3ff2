//! Locks, in one place.

pub use std::sync::{Mutex, MutexGuard};
