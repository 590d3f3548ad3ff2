//! A lock for each engine: one thread at a time makes or removes holders in it. Taking the lock has a deadline.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_types::EngineName;

static LOCKED: Mutex<Vec<EngineName>> = Mutex::new(Vec::new());
static UNLOCKED: Condvar = Condvar::new();

fn locked() -> MutexGuard<'static, Vec<EngineName>> {
    LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to make and remove holders in an engine, until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct EngineLock(EngineName);

impl EngineLock {
    /// Waits for the lock, at most for `patience`.
    ///
    /// # Errors
    /// If another thread still has it.
    pub fn take(engine: EngineName, patience: Duration) -> Result<Self, Failure> {
        let wait = UNLOCKED.wait_timeout_while(locked(), patience, |locked| locked.contains(&engine));
        let (mut locked, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if locked.contains(&engine) {
            let why = format!(
                "{engine} has been making or removing containers that hold addresses for over {patience:?}; see \
                 whether it answers (`{engine} ps`)"
            );
            return Err(Failure::new(why));
        }
        locked.push(engine);
        Ok(Self(engine))
    }
}

impl Drop for EngineLock {
    fn drop(&mut self) {
        locked().retain(|engine| *engine != self.0);
        UNLOCKED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time_has_an_engine_and_nobody_waits_without_end() {
        let own = EngineLock::take(EngineName::Docker, Duration::ZERO).unwrap();
        let other = EngineLock::take(EngineName::Podman, Duration::ZERO).unwrap();
        let refused = EngineLock::take(EngineName::Docker, Duration::from_millis(1)).unwrap_err();
        assert!(refused.message.contains("docker has been making or removing"), "{refused}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| EngineLock::take(EngineName::Docker, Duration::from_secs(60)).map(drop));
            drop(own);
            waiting.join().unwrap().unwrap();
        });
        drop(other);
        EngineLock::take(EngineName::Podman, Duration::ZERO).map(drop).unwrap();
    }
}
