//! Freeze slots: one freeze at a time, in the order of the queue, and nobody waits for ever.

use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use crate::freeze_slots::{FreezeSlots, Owner, Place};
use crate::slot::ArrivingSlot;
use crate::{LONG, explore, together};

type Thread = Box<dyn FnOnce() + Send>;

fn owner(number: usize) -> Owner {
    Owner::Move(format!("m-{number}").parse().expect("an id"))
}

fn never() -> bool {
    false
}

/// How many containers are frozen.
#[derive(Default)]
struct Frozen(AtomicUsize);

impl Frozen {
    fn freeze(&self) {
        assert_eq!(self.0.fetch_add(1, SeqCst), 0, "two freeze at once");
        shuttle::thread::yield_now();
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Waits for the slot, and freezes.
fn freeze(place: Place, frozen: &Frozen) {
    let slot = place.wait(LONG, &never).ok().expect("the slot");
    frozen.freeze();
    slot.linger();
    drop(slot);
}

pub fn one_freezes_at_a_time_and_each_gets_its_slot() {
    explore(false, || {
        let (slots, frozen) = (Arc::new(FreezeSlots::default()), Arc::new(Frozen::default()));
        let one = |number| {
            let (slots, frozen) = (Arc::clone(&slots), Arc::clone(&frozen));
            Box::new(move || freeze(slots.queue(owner(number)), &frozen)) as Thread
        };
        together((1..=4).map(one).collect());
    });
}

pub fn slots_are_given_in_the_order_of_the_queue() {
    explore(false, || {
        let (slots, order) = (FreezeSlots::default(), Arc::new(Mutex::new(Vec::new())));
        let one = |number| {
            let (place, order) = (slots.queue(owner(number)), Arc::clone(&order));
            Box::new(move || {
                let slot = place.wait(LONG, &never).ok().expect("the slot");
                order.lock().unwrap().push(number);
                drop(slot);
            }) as Thread
        };
        together((1..=4).map(one).collect());
        assert_eq!(*order.lock().unwrap(), [1, 2, 3, 4]);
    });
}

/// One of those who wait is interrupted, another one never waits: both leave, and those behind them get the slot.
pub fn a_place_that_is_given_up_makes_room() {
    explore(false, || {
        let (slots, frozen) = (FreezeSlots::default(), Arc::new(Frozen::default()));
        let places: Vec<Place> = (1..=4).map(|number| slots.queue(owner(number))).collect();
        let one = |(number, place): (usize, Place)| {
            let frozen = Arc::clone(&frozen);
            Box::new(move || match number {
                1 => match place.wait(LONG, &|| true) {
                    Ok(slot) => {
                        frozen.freeze();
                        drop(slot);
                    }
                    Err(place) => drop(place),
                },
                2 => drop(place),
                _ => freeze(place, &frozen),
            }) as Thread
        };
        together(places.into_iter().enumerate().map(one).collect());
    });
}

pub fn nothing_is_prepared_beside_a_freeze() {
    explore(false, || {
        let (slots, frozen) = (Arc::new(FreezeSlots::default()), Arc::new(Frozen::default()));
        let one = |number| {
            let (slots, frozen) = (Arc::clone(&slots), Arc::clone(&frozen));
            Box::new(move || match number {
                // A preparation excludes a freeze as another freeze does, and no other preparation.
                1 => {
                    let prepared = slots.prepare(&never);
                    frozen.freeze();
                    drop(prepared);
                }
                _ => freeze(slots.queue(owner(number)), &frozen),
            }) as Thread
        };
        together((1..=3).map(one).collect());
    });
}

/// An arrival that has ended while its source asked for the slot does not hold it, or a place, for others to wait for.
pub fn an_arrival_gives_its_slot_back_for_good() {
    explore(true, || {
        let (slots, arrival) = (Arc::new(FreezeSlots::default()), Arc::new(ArrivingSlot::default()));
        let over = Arc::new(AtomicBool::new(false));
        let first = slots.queue(owner(1)).wait(LONG, &never).ok().expect("a slot that is free");
        let ask = {
            let (slots, arrival, over) = (Arc::clone(&slots), Arc::clone(&arrival), Arc::clone(&over));
            Box::new(move || {
                let ended_before = over.load(SeqCst);
                assert!(!(arrival.take(|| slots.queue(owner(2))) && ended_before), "taken after the end");
            }) as Thread
        };
        let end = {
            let (arrival, over) = (Arc::clone(&arrival), Arc::clone(&over));
            Box::new(move || {
                arrival.give_back();
                over.store(true, SeqCst);
            }) as Thread
        };
        together(vec![ask, end, Box::new(move || drop(first))]);
        assert!(!arrival.take(|| slots.queue(owner(2))));
        let next = slots.queue(owner(3)).wait(LONG, &|| true);
        assert!(next.is_ok(), "the arrival that has ended holds the slot or a place before it");
    });
}
