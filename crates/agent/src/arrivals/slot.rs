//! The freeze slot of an arrival.

use std::sync::PoisonError;
use std::time::Duration;

use crate::freeze_slots::{Place, Slot};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// The freeze slot of an arrival, or its place in the queue.
#[derive(Default)]
pub struct ArrivingSlot {
    slot: Mutex<Option<Result<Slot, Place>>>,
    /// It was given back for good.
    over: AtomicBool,
}

impl ArrivingSlot {
    /// Waits in the queue for a second at most, and with the slot for preparations to end; true if it is taken.
    pub fn take(&self, queue: impl FnOnce() -> Place) -> bool {
        const WAIT: Duration = Duration::from_secs(1);
        let over = || self.over.load(Ordering::Acquire);
        let mut slot = self.slot();
        if over() {
            return false;
        }
        let now = match slot.take().unwrap_or_else(|| Err(queue())) {
            Err(place) => place.wait(WAIT, &over),
            taken => taken,
        };
        slot.insert(now).is_ok()
    }

    /// The container runs: a place in the queue is given up.
    pub fn linger(&self) {
        let mut slot = self.slot();
        match &*slot {
            Some(Ok(taken)) => taken.linger(),
            _ => *slot = None,
        }
    }

    /// Gives it back, or the place up, for good. A wait for it ends.
    pub fn give_back(&self) {
        self.over.store(true, Ordering::Release);
        *self.slot() = None;
    }

    fn slot(&self) -> MutexGuard<'_, Option<Result<Slot, Place>>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::freeze_slots::{FreezeSlots, Owner};

    const LONG: Duration = Duration::from_secs(20);

    fn owner(name: &str) -> Owner {
        Owner::Move(name.parse().expect("a migration's id"))
    }

    #[test]
    fn an_arrival_that_runs_or_has_ended_keeps_no_place() {
        let slots = FreezeSlots::default();
        let [running, ended, next] = [(); 3].map(|()| ArrivingSlot::default());
        let first = slots.queue(owner("m-1")).wait(LONG, &|| false).ok().expect("a slot");
        assert!(!running.take(|| slots.queue(owner("m-2"))), "the slot is taken");
        assert!(!ended.take(|| slots.queue(owner("m-3"))), "the slot is taken");
        running.linger();
        ended.give_back();
        drop(first);
        assert!(!ended.take(|| slots.queue(owner("m-3"))), "it was given back for good");
        assert!(next.take(|| slots.queue(owner("m-4"))), "nobody is before it");
    }
}
