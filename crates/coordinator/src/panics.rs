//! Panics as failures: one in a step fails that step, and no more.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, Once, PoisonError};

use crate::Failure;

/// Panics whose places are kept until somebody has caught them.
const KEPT: usize = 32;

/// The text and the place of the last panics, oldest first. A thread that joins another one passes on the text alone.
static PLACES: Mutex<VecDeque<(String, String)>> = Mutex::new(VecDeque::new());

/// Keeps the place of each panic for [`caught`], beside what the process does about panics already. To be called once,
/// at the start; further calls change nothing.
pub fn keep_places() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let (Some(text), Some(place)) = (text(info.payload()), info.location()) {
                let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
                if places.len() == KEPT {
                    places.pop_front();
                }
                places.push_back((text, format!("{}:{}", place.file(), place.line())));
            }
            before(info);
        }));
    });
}

/// The text of a panic; what was not raised by `panic!` has none.
fn text(payload: &(dyn Any + Send)) -> Option<String> {
    payload.downcast_ref::<&str>().map(ToString::to_string).or_else(|| payload.downcast_ref::<String>().cloned())
}

/// Does `work`, in which a panic is a failure of `what`. The lock of whatever it had locked is poisoned by that, and
/// what it was changing is as it left it: as after an action that failed half way. Unwinding that is no panic (without
/// a text) goes on.
pub fn caught<T>(what: impl fmt::Display, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let payload = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => return done,
        Err(payload) => payload,
    };
    let Some(text) = text(&*payload) else { resume_unwind(payload) };
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = places.iter().rposition(|(of, _)| *of == text).and_then(|at| places.remove(at));
    let place = place.map(|(_, place)| format!(" at {place}")).unwrap_or_default();
    Err(Failure::new(format!("the agent has failed internally in {what}: {text}{place}; please report it")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_failure_with_its_text_and_place() {
        keep_places();
        let failure = caught("step freeze", || -> Result<(), _> { panic!("{} is not there", "it") }).unwrap_err();
        let told = failure.to_string();
        let (cause, place) = told.split_once(" at ").unwrap_or_else(|| panic!("no place in {told}"));
        assert_eq!(cause, "the agent has failed internally in step freeze: it is not there");
        assert!(place.contains("panics.rs:") && place.ends_with("; please report it"), "{told}");
        assert_eq!(caught("step freeze", || Ok(1)), Ok(1));
    }

    #[test]
    fn the_place_of_a_panic_on_another_thread_is_known_too() {
        keep_places();
        let work = || -> Result<(), Failure> {
            let other = std::thread::spawn(|| panic!("on another thread"));
            other.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok(())
        };
        let told = caught("step transfer", work).unwrap_err().to_string();
        assert!(told.contains("transfer: on another thread at ") && told.contains("panics.rs:"), "{told}");
    }

    #[test]
    fn a_lock_of_a_thread_that_panicked_can_be_taken() {
        let lock = Mutex::new(1);
        let failed = caught("step arm", || -> Result<(), _> {
            let _held = lock.lock();
            panic!("with the lock")
        });
        assert!(failed.is_err() && lock.is_poisoned());
        assert_eq!(*lock.lock().unwrap_or_else(PoisonError::into_inner), 1);
    }
}
