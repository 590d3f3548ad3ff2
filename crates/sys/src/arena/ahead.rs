//! Memory that is taken before it is needed: by several threads, piece by piece from the beginning.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::promise::Promise;

/// What is taken in one go, in bytes. The process's list of mappings is locked meanwhile: 1 ms, where the host has to find the memory first 10.
const PIECE: u64 = 2 << 20;

/// How far it has got.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    state: Mutex<State>,
    progress: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Where the next piece begins that nobody has begun with, in bytes.
    next: u64,
    /// How much is to be taken in all, in bytes.
    end: u64,
    /// Where the pieces begin that somebody has begun with, and their lengths.
    under_way: Vec<(u64, u64)>,
    /// What is still to be taken.
    promise: Promise,
    /// It ended there, with this.
    failed: Option<io::ErrorKind>,
}

impl State {
    /// Up to where all has been taken.
    fn there(&self) -> u64 {
        self.under_way.iter().map(|(start, _)| *start).min().unwrap_or(self.next)
    }
}

impl Ahead {
    /// The first `end` bytes are to be taken.
    pub fn want(&self, end: u64) {
        let mut state = self.state();
        let more = end.saturating_sub(state.end);
        state.end += more;
        state.promise.add(more);
    }

    /// The next piece, `(offset, length)`, to be taken by the caller: `None` if there is none, or another one could not be taken.
    pub fn next(&self) -> Option<(u64, u64)> {
        let mut state = self.state();
        let (start, end) = (state.next, state.end.min(state.next + PIECE));
        if start >= end || state.failed.is_some() {
            return None;
        }
        state.under_way.push((start, end - start));
        state.next = end;
        Some((start, end - start))
    }

    /// How it went with the piece that begins at `start`.
    pub fn done(&self, start: u64, taken: &io::Result<()>) {
        let mut state = self.state();
        match taken {
            Ok(()) => {
                let piece = state
                    .under_way
                    .iter()
                    .position(|(begins, _)| *begins == start)
                    .map(|at| state.under_way.swap_remove(at));
                piece.into_iter().for_each(|(_, len)| state.promise.keep(len));
            }
            // Nobody takes the rest.
            Err(error) => {
                state.failed = Some(error.kind());
                state.promise.end();
            }
        }
        self.progress.notify_all();
    }

    /// Nobody needs more: those who take memory stop, and those who wait for it are told `Interrupted`.
    pub fn cancel(&self) {
        let mut state = self.state();
        state.failed.get_or_insert(io::ErrorKind::Interrupted);
        state.promise.end();
        self.progress.notify_all();
    }

    /// Waits, at most until then, for what is to be taken below `end`: whether it is there.
    pub fn wait(&self, end: u64, until: Option<Instant>) -> io::Result<bool> {
        let mut state = self.state();
        loop {
            if state.there() >= end.min(state.end) {
                return Ok(true);
            }
            if let Some(kind) = state.failed {
                return Err(kind.into());
            }
            state = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => self.progress.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return Ok(false),
                Some(left) => self.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Bytes from the beginning that have been taken.
    pub fn there(&self) -> u64 {
        self.state().there()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Until a thread waits, as a rule.
    const WAITING: Duration = Duration::from_millis(10);

    #[test]
    fn who_needs_memory_waits_until_all_before_it_is_there() {
        let ahead = Ahead::default();
        assert!(ahead.wait(u64::MAX, None).unwrap(), "nothing is to be taken");
        ahead.want(PIECE + 4096);
        let (first, second) = (ahead.next().unwrap(), ahead.next().unwrap());
        assert_eq!((first, second, ahead.next()), ((0, PIECE), (PIECE, 4096), None));
        ahead.done(second.0, &Ok(()));
        let now = || Some(Instant::now());
        assert!(!ahead.wait(1, now()).unwrap() && ahead.there() == 0);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait(u64::MAX, None));
            thread::sleep(WAITING);
            ahead.done(first.0, &Ok(()));
            assert!(waiting.join().unwrap().unwrap());
        });
        assert_eq!(ahead.there(), PIECE + 4096);
    }

    #[test]
    fn who_waits_for_memory_that_nobody_needs_any_more_is_told() {
        let ahead = Ahead::default();
        ahead.want(2 * PIECE);
        let (first, _) = ahead.next().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait(u64::MAX, None));
            thread::sleep(WAITING);
            ahead.cancel();
            assert_eq!(waiting.join().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        });
        assert!(ahead.next().is_none() && ahead.state().promise.left() == 0);
        // What was under way then.
        ahead.done(first, &Ok(()));
        assert!(ahead.wait(PIECE, None).unwrap());
    }

    #[test]
    fn what_cannot_be_taken_is_told_to_who_needs_it_and_to_nobody_else() {
        let ahead = Ahead::default();
        ahead.want(3 * PIECE);
        assert_eq!(ahead.state().promise.left(), 3 * PIECE);
        let (first, second) = (ahead.next().unwrap(), ahead.next().unwrap());
        ahead.done(first.0, &Ok(()));
        ahead.done(second.0, &Err(io::ErrorKind::OutOfMemory.into()));
        assert_eq!(ahead.state().promise.left(), 0, "nobody takes the rest");
        assert!(ahead.next().is_none());
        assert!(ahead.wait(PIECE, None).unwrap());
        assert_eq!(ahead.wait(PIECE + 1, None).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    }
}
