//! Models of the agent's locks: their own source, with locks whose schedules shuttle chooses at random. Each model is run with
//! many schedules; a deadlock, a wait that nothing ends, or a failed assertion prints the schedule that leads to it.
//!
//! Without libtest's harness, so that the unit tests of the modules, which need real threads, are not part of this.

// Models use a part of their modules, and the modules' tests are not there.
#![allow(dead_code, unused_imports)]

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use shuttle::thread;

#[path = "../src/claims.rs"]
mod claims;
#[path = "../src/freeze_slots.rs"]
mod freeze_slots;
#[path = "../src/interrupt.rs"]
mod interrupt;
#[path = "../src/registry.rs"]
mod registry;
#[path = "../src/arrivals/slot.rs"]
mod slot;
#[path = "models/sync.rs"]
mod sync;

#[path = "models/decision.rs"]
mod decision_model;
#[path = "models/reports.rs"]
mod reports_model;
#[path = "models/slots.rs"]
mod slots_model;

use claims::{Claims, Holder};

/// Schedules of each model.
const SCHEDULES: usize = 2000;
/// Longer than any model takes.
const LONG: Duration = Duration::from_secs(3600);

thread_local! {
    /// Whether a wait with a timeout may come to it ([`sync::Condvar`]).
    static TIMEOUTS: Cell<bool> = const { Cell::new(false) };
}

/// Runs a model with many schedules, in half of which the scheduler prefers some threads for long (PCT), so that rare orders occur.
fn explore(timeouts: bool, model: impl Fn() + Send + Sync + Clone + 'static) {
    TIMEOUTS.set(timeouts);
    shuttle::check_random(model.clone(), SCHEDULES / 2);
    // Where waits look at something again and again, a thread that is preferred for long would do that for ever.
    if timeouts { shuttle::check_random(model, SCHEDULES / 2) } else { shuttle::check_pct(model, SCHEDULES / 2, 3) }
}

/// Starts a thread for each of these, and waits for all.
fn together(all: Vec<Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = all.into_iter().map(thread::spawn).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a thread of the model"));
}

/// One of those who ask at once has a container, and it is free when that one is gone.
fn a_container_has_one_holder() {
    explore(false, || {
        let claims = Arc::new(Claims::default());
        let holders = Arc::new(shuttle::sync::atomic::AtomicUsize::new(0));
        let ask = |number: usize| {
            let (claims, holders) = (Arc::clone(&claims), Arc::clone(&holders));
            let holder = Holder::Migration(format!("m-{number}").parse().expect("an id"));
            Box::new(move || match claims.take("kv", holder.clone()) {
                Ok(claim) => {
                    use shuttle::sync::atomic::Ordering::SeqCst;
                    assert_eq!(holders.fetch_add(1, SeqCst), 0, "two have the container");
                    assert_eq!(claims.holder("kv"), Some(holder));
                    holders.fetch_sub(1, SeqCst);
                    drop(claim);
                }
                Err(other) => assert_ne!(other, holder, "the one that is named is another one"),
            }) as Box<dyn FnOnce() + Send>
        };
        together((1..=3).map(ask).collect());
        assert_eq!(claims.holder("kv"), None);
    });
}

fn main() {
    let models: [(&str, fn()); 10] = [
        ("a_container_has_one_holder", a_container_has_one_holder),
        ("one_freezes_at_a_time_and_each_gets_its_slot", slots_model::one_freezes_at_a_time_and_each_gets_its_slot),
        ("slots_are_given_in_the_order_of_the_queue", slots_model::slots_are_given_in_the_order_of_the_queue),
        ("a_place_that_is_given_up_makes_room", slots_model::a_place_that_is_given_up_makes_room),
        ("nothing_is_prepared_beside_a_freeze", slots_model::nothing_is_prepared_beside_a_freeze),
        ("an_arrival_gives_its_slot_back_for_good", slots_model::an_arrival_gives_its_slot_back_for_good),
        ("a_decision_or_an_interruption", decision_model::a_decision_or_an_interruption),
        ("a_group_is_decided_as_a_whole_or_not_at_all", decision_model::a_group_is_decided_as_a_whole_or_not_at_all),
        ("deadlines_end_with_the_migration", decision_model::deadlines_end_with_the_migration),
        ("no_change_of_a_report_is_lost", reports_model::no_change_of_a_report_is_lost),
    ];
    let run = |model: fn()| move || std::panic::catch_unwind(model).map_err(|_| "see above".into());
    let trials = models.into_iter().map(|(name, model)| Trial::test(name, run(model)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
