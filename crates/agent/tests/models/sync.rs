//! The locks of `src/sync.rs`, with schedules that shuttle chooses.

use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError};
use std::time::Duration;

use shuttle::sync;
pub use shuttle::sync::atomic;

/// A mutex whose guards know it, which [`Condvar::wait_timeout`] needs.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// The lock of a [`Mutex`].
pub struct MutexGuard<'a, T> {
    guard: sync::MutexGuard<'a, T>,
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// An error is the panic of another thread, which ends the model anyway.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { guard, mutex: self })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// A condition variable. shuttle's never times out, so that a lost wake-up is a deadlock, which shuttle reports. Where a model has
/// timeouts ([`crate::TIMEOUTS`]), each wait with one comes to it after other threads have run.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    pub fn wait<'a, T>(&self, MutexGuard { guard, mutex }: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { guard, mutex })
    }

    /// The guard, and whether the time was over.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        _time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        if !crate::TIMEOUTS.get() {
            return self.wait(guard).map(|guard| (guard, false)).map_err(|_| unreachable!("a guard always comes"));
        }
        let mutex = guard.mutex;
        drop(guard);
        shuttle::thread::yield_now();
        mutex.lock().map(|guard| (guard, true)).map_err(|_| unreachable!("a guard always comes"))
    }

    /// The same, until `waits` does not hold any more.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut waits: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        while waits(&mut guard) {
            let (again, ended) =
                self.wait_timeout(guard, time).unwrap_or_else(|_| unreachable!("a guard always comes"));
            guard = again;
            if ended {
                return Ok((guard, true));
            }
        }
        Ok((guard, false))
    }
}
