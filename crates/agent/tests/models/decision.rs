//! A migration is decided or interrupted, never both; its deadlines end with it.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tranship_coordinator::Failure;
use tranship_types::MoveOptions;

use crate::interrupt::{Cause, Interrupt, Raised};
use crate::{explore, together};

type Thread = Box<dyn FnOnce() + Send>;

fn interrupt() -> Arc<Interrupt> {
    Interrupt::new(&MoveOptions::default())
}

/// What threads have seen: so many decisions, interruptions, refused interruptions, wake-ups.
#[derive(Default)]
struct Seen {
    decided: AtomicUsize,
    raised: AtomicUsize,
    late: AtomicUsize,
    woken: AtomicUsize,
}

fn one(seen: &AtomicUsize) {
    seen.fetch_add(1, SeqCst);
}

/// Whether the decision, or the failure that keeps from it, is the one that counts.
fn decide(interrupt: &Interrupt, seen: &Seen, decision: impl FnOnce() -> Result<(), Failure>) {
    match decision() {
        Ok(()) => {
            one(&seen.decided);
            assert!(!interrupt.is_raised() && interrupt.check().is_ok());
        }
        Err(_) => assert!(interrupt.is_raised() && interrupt.check().is_err()),
    }
}

fn raise(interrupt: &Interrupt, seen: &Seen) {
    match interrupt.raise(Cause::Cancelled) {
        Raised::Now => one(&seen.raised),
        Raised::TooLate => one(&seen.late),
        Raised::Before => {}
    }
}

pub fn a_decision_or_an_interruption() {
    explore(false, || {
        let (interrupt, seen) = (interrupt(), Arc::new(Seen::default()));
        let start = |work: fn(&Arc<Interrupt>, &Arc<Seen>)| {
            let (interrupt, seen) = (Arc::clone(&interrupt), Arc::clone(&seen));
            Box::new(move || work(&interrupt, &seen)) as Thread
        };
        together(vec![
            start(|interrupt, seen| {
                let woken = Arc::clone(seen);
                interrupt.on_raise(move || one(&woken.woken));
                decide(interrupt, seen, || interrupt.decide());
            }),
            start(|interrupt, seen| raise(interrupt, seen)),
            start(|interrupt, seen| raise(interrupt, seen)),
        ]);
        let [decided, raised, late, woken] =
            [&seen.decided, &seen.raised, &seen.late, &seen.woken].map(|seen| seen.load(SeqCst));
        assert_eq!(decided + raised, 1, "exactly one of them counts");
        assert_eq!(late, 2 * decided, "who comes too late is told so");
        assert_eq!(woken, raised, "what waits is woken once");
    });
}

pub fn a_group_is_decided_as_a_whole_or_not_at_all() {
    explore(false, || {
        let (all, seen) = (Arc::new([interrupt(), interrupt()]), Arc::new(Seen::default()));
        let start = |work: fn(&[Arc<Interrupt>; 2], &Seen)| {
            let (all, seen) = (Arc::clone(&all), Arc::clone(&seen));
            Box::new(move || work(&all, &seen)) as Thread
        };
        together(vec![
            start(|[first, second], seen| match Interrupt::decide_all(&[first, second]) {
                Ok(()) => one(&seen.decided),
                Err((rank, _)) => assert!([first, second][rank].is_raised(), "the one that is named was interrupted"),
            }),
            start(|[_, second], seen| raise(second, seen)),
            start(|all, _| drop(Interrupt::raise_all(all, Cause::Cancelled))),
        ]);
        let raised = all.iter().filter(|one| one.is_raised()).count();
        let decided = seen.decided.load(SeqCst);
        assert_eq!(raised, 2 * (1 - decided), "all are decided, or all are interrupted");
    });
}

/// The thread that keeps the deadlines ends when the migration is decided, interrupted or undone, without waiting for a deadline; one
/// that has passed before interrupts.
pub fn deadlines_end_with_the_migration() {
    explore(false, || {
        for end in [
            |one: &Interrupt| drop(one.decide()),
            |one: &Interrupt| assert_ne!(one.raise(Cause::Cancelled), Raised::TooLate),
            Interrupt::undoing,
        ] {
            let one = interrupt();
            let [keeper, ender, freezer] = [(); 3].map(|()| Arc::clone(&one));
            together(vec![
                Box::new(move || keeper.keep_deadlines()),
                Box::new(move || freezer.freezes()),
                Box::new(move || end(&ender)),
            ]);
        }
        let passed = Interrupt::new(&MoveOptions { freeze_timeout_ms: Some(0), ..MoveOptions::default() });
        let [keeper, freezer] = [(); 2].map(|()| Arc::clone(&passed));
        together(vec![Box::new(move || keeper.keep_deadlines()), Box::new(move || freezer.freezes())]);
        assert!(passed.is_raised() && passed.decide().is_err());
    });
}
