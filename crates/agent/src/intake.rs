//! Whether CRIU's images may still come: not any more once they are checked.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tranship_coordinator::Failure;

#[derive(Debug, Default)]
struct State {
    /// Links that are sending some.
    senders: usize,
    is_closed: bool,
}

/// The way in for images of one migration.
#[derive(Debug, Default)]
pub struct Intake(Mutex<State>);

/// Held while images come.
#[derive(Debug)]
pub struct Sender<'a>(&'a Intake);

impl Intake {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets images in.
    ///
    /// # Errors
    /// If they have been checked.
    pub fn enter(&self) -> Result<Sender<'_>, Failure> {
        let mut state = self.state();
        if state.is_closed {
            return Err(Failure::new("images that come after those were checked are not taken"));
        }
        state.senders += 1;
        Ok(Sender(self))
    }

    /// Lets none in any more.
    ///
    /// # Errors
    /// If some are still coming.
    pub fn close(&self) -> Result<(), Failure> {
        let mut state = self.state();
        if state.senders > 0 {
            return Err(Failure::new("images are still coming on another link, so they cannot be checked"));
        }
        state.is_closed = true;
        Ok(())
    }
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        self.0.state().senders -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_comes_once_it_is_closed_and_it_is_not_closed_while_something_comes() {
        let intake = Intake::default();
        let sender = intake.enter().unwrap();
        assert!(intake.close().is_err());
        drop(sender);
        intake.close().unwrap();
        assert!(intake.enter().is_err());
        intake.close().unwrap();
    }
}
