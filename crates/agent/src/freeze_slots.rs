//! Freeze slots: the moves of a node freeze their containers one after the other.
//!
//! Containers that are frozen at the same time share processors and link, and each is frozen for as long as all of them
//! together. A node has two sets of slots: one for the moves that leave it, one for those that arrive. A source takes
//! the slot of its own node, then that of the destination, before the freeze, and gives both back when the container
//! runs and its last pages are in place, or soon after. What is prepared for other moves takes processors, too: it is
//! not begun while a slot is taken, and a slot is used when what has been begun is done.
//!
//! Every wait here is bounded. A slot that has been taken for longer than [`EXPIRES`] does not count, so that a move
//! that is stuck holds up nobody.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tranship_types::{GroupId, MigrationId};

use crate::sync::{Condvar, Mutex, MutexGuard};

/// For how long a slot counts: as long as a container may be frozen, unless the user allows more.
const EXPIRES: Duration = Duration::from_secs(10);
/// For how long it counts when the container runs again.
const LINGERS: Duration = Duration::from_millis(300);
/// How long preparations wait for a slot to be given back, and a slot for preparations to end.
const QUIET: Duration = Duration::from_secs(2);
/// After how long a place at which nobody waits holds up nobody. It stays in the queue.
const ABANDONED: Duration = Duration::from_secs(3);
/// How often it is looked whether the migration was interrupted.
const LOOK: Duration = Duration::from_millis(20);

/// Who takes a slot. The members of a group that moves as a whole are frozen together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    Move(MigrationId),
    Group(GroupId),
}

/// One set of slots.
#[derive(Default)]
pub struct FreezeSlots(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of the next place in the queue.
    next: u64,
    queue: VecDeque<Waiting>,
    /// Slots that are taken, all by one owner.
    taken: Vec<Taken>,
    preparing: usize,
}

/// A place in the queue.
struct Waiting {
    number: u64,
    /// Since when nobody waits at it; `None`: somebody does.
    left: Option<Instant>,
}

struct Taken {
    number: u64,
    owner: Owner,
    /// Until when it counts.
    until: Instant,
}

impl Taken {
    fn counts(&self) -> bool {
        Instant::now() < self.until
    }
}

impl State {
    /// Whether nobody else holds a slot that counts.
    fn is_free_for(&self, owner: &Owner) -> bool {
        self.taken.iter().all(|taken| taken.owner == *owner || !taken.counts())
    }

    /// Whether this place is the first of those that are asked for.
    fn is_first(&self, number: u64) -> bool {
        let asked = |place: &&Waiting| place.left.is_none_or(|left| left.elapsed() < ABANDONED);
        self.queue.iter().find(asked).is_some_and(|place| place.number == number)
    }

    /// Notes whether somebody waits at a place.
    fn note(&mut self, number: u64, left: Option<Instant>) {
        self.queue.iter_mut().filter(|place| place.number == number).for_each(|place| place.left = left);
    }

    fn is_quiet(&self) -> bool {
        !self.taken.iter().any(Taken::counts)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something holds, at most for `patience`, or until `ends`. True if it holds.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        patience: Duration,
        ends: &dyn Fn() -> bool,
        holds: impl Fn(&State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let deadline = Instant::now() + patience;
        loop {
            if holds(&state) {
                return (state, true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || ends() {
                return (state, false);
            }
            state = self.changed.wait_timeout(state, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl FreezeSlots {
    /// Takes a place in the queue.
    pub fn queue(&self, owner: Owner) -> Place {
        let mut state = self.0.state();
        let number = state.next;
        state.next += 1;
        state.queue.push_back(Waiting { number, left: Some(Instant::now()) });
        Place { shared: Arc::clone(&self.0), number, owner }
    }

    /// Whether no slot is taken that counts.
    pub fn is_quiet(&self) -> bool {
        self.0.state().is_quiet()
    }

    /// Waits, for a short time at most or until `ends`, until no container is frozen. Until what it returns is dropped,
    /// others wait for a short time with their freeze.
    pub fn prepare(&self, ends: &dyn Fn() -> bool) -> Preparation {
        let state = self.0.state();
        let (mut state, _) = self.0.wait(state, QUIET, ends, State::is_quiet);
        state.preparing += 1;
        Preparation(Arc::clone(&self.0))
    }
}

/// A place in the queue for a slot; given up on drop.
pub struct Place {
    shared: Arc<Shared>,
    number: u64,
    owner: Owner,
}

impl Place {
    /// Waits for the slot, at most for `patience` or until `ends`. `Err` returns the place, which stays in the queue.
    pub fn wait(self, patience: Duration, ends: &dyn Fn() -> bool) -> Result<Slot, Place> {
        let shared = Arc::clone(&self.shared);
        let together = |state: &State| state.taken.iter().any(|taken| taken.owner == self.owner);
        let is_next = |state: &State| state.is_first(self.number) || together(state);
        let free = |state: &State| is_next(state) && state.is_free_for(&self.owner);
        let mut state = shared.state();
        state.note(self.number, None);
        let (mut state, taken) = shared.wait(state, patience, ends, free);
        if !taken {
            state.note(self.number, Some(Instant::now()));
            drop(state);
            return Err(self);
        }
        state.taken.push(Taken { number: self.number, owner: self.owner.clone(), until: Instant::now() + EXPIRES });
        state.queue.retain(|place| place.number != self.number);
        shared.changed.notify_all();
        let (state, _) = shared.wait(state, QUIET, ends, |state| state.preparing == 0);
        drop(state);
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        Ok(Slot { shared, number })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.state().queue.retain(|place| place.number != self.number);
        self.shared.changed.notify_all();
    }
}

/// A slot; given back on drop.
pub struct Slot {
    shared: Arc<Shared>,
    number: u64,
}

impl Slot {
    /// The container runs. What is left to be done of its move takes processors, and counts for a short time.
    pub fn linger(&self) {
        let mut state = self.shared.state();
        let until = Instant::now() + LINGERS;
        let own = state.taken.iter_mut().filter(|taken| taken.number == self.number);
        own.for_each(|taken| taken.until = taken.until.min(until));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.state().taken.retain(|taken| taken.number != self.number);
        self.shared.changed.notify_all();
    }
}

/// Something that is being prepared.
pub struct Preparation(Arc<Shared>);

impl Drop for Preparation {
    fn drop(&mut self) {
        self.0.state().preparing -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(20);

    fn owner(name: &str) -> Owner {
        Owner::Move(name.parse().expect("a migration's id"))
    }

    fn never() -> bool {
        false
    }

    #[test]
    fn one_at_a_time_in_the_order_of_the_queue() {
        let slots = FreezeSlots::default();
        let [first, second, third] = ["m-1", "m-2", "m-3"].map(|name| slots.queue(owner(name)));
        let second = second.wait(SHORT, &never).err().expect("it is not the first");
        let slot = first.wait(LONG, &never).ok().expect("it is the first");
        let second = second.wait(SHORT, &never).err().expect("the slot is taken");
        drop(second);
        let third = std::thread::spawn(move || third.wait(LONG, &never).is_ok());
        drop(slot);
        assert!(third.join().unwrap(), "who has left the queue is not waited for");
    }

    #[test]
    fn a_group_that_moves_as_a_whole_shares_its_slot() {
        let slots = FreezeSlots::default();
        let group = || Owner::Group(GroupId::from_random([1; 5]));
        let one = slots.queue(group()).wait(LONG, &never).ok().expect("a slot");
        let other = slots.queue(owner("m-1"));
        let two = slots.queue(group()).wait(LONG, &never).ok().expect("the same slot");
        drop(one);
        let other = other.wait(SHORT, &never).err().expect("the other member has the slot");
        drop(two);
        assert!(other.wait(LONG, &never).is_ok());
    }

    #[test]
    fn a_slot_of_a_container_that_runs_again_does_not_count_for_long() {
        let slots = FreezeSlots::default();
        let slot = slots.queue(owner("m-1")).wait(LONG, &never).ok().expect("a slot");
        let begun = Instant::now();
        slot.linger();
        assert!(slots.queue(owner("m-2")).wait(LONG, &never).is_ok());
        assert!(begun.elapsed() >= LINGERS);
    }

    #[test]
    fn a_place_that_nobody_asks_for_holds_up_nobody_and_is_not_lost() {
        let slots = FreezeSlots::default();
        let first = slots.queue(owner("m-1")).wait(SHORT, &|| true).ok().expect("it is free");
        let [abandoned, second] = ["m-2", "m-3"].map(|name| slots.queue(owner(name)));
        let abandoned = abandoned.wait(SHORT, &never).err().expect("the slot is taken");
        drop(first);
        let second = second.wait(SHORT, &never).err().expect("the other place is before it");
        let second = second.wait(LONG, &never).ok().expect("the other place is not asked for");
        drop(second);
        assert!(abandoned.wait(LONG, &never).is_ok(), "it is asked for again");
    }

    #[test]
    fn a_wait_ends_when_the_migration_is_interrupted() {
        let slots = FreezeSlots::default();
        let _slot = slots.queue(owner("m-1")).wait(LONG, &never).ok().expect("a slot");
        let begun = Instant::now();
        assert!(slots.queue(owner("m-2")).wait(LONG, &|| true).is_err());
        drop(slots.prepare(&|| true));
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn nothing_is_prepared_beside_a_frozen_container() {
        let slots = FreezeSlots::default();
        let slot = slots.queue(owner("m-1")).wait(LONG, &never).ok().expect("a slot");
        std::thread::scope(|scope| {
            let prepared = scope.spawn(|| drop(slots.prepare(&never)));
            std::thread::sleep(SHORT);
            assert!(!prepared.is_finished());
            drop(slot);
            prepared.join().unwrap();
        });
    }
}
