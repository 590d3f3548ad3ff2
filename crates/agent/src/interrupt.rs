//! Ends a migration from outside: a cancel, the freeze timeout, the timeout of the whole move.
//!
//! ```text
//!              ┌─▶ decided      the step to the commit point: nothing ends it any more
//!   running ───┼─▶ interrupted  every wait of the source ends, the step that runs fails, the ordinary undo follows
//!              └─▶ undoing      it failed by itself, or was interrupted and is being undone
//! ```
//!
//! The first transition excludes the others: one lock decides between the commit point and an interruption.
//!
//! Links that are opened while the migration is running are registered here. An interruption resets them, so that a read or write on
//! them returns at once. Waits on condition variables are woken, and loops look at [`Interrupt::check`]. Undoing opens links of its own,
//! which nothing interrupts.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads;
use tranship_transport::Closer;
use tranship_types::{GroupId, MigrationId, MoveOptions, OnTimeout};

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How often a wait that nothing can wake looks whether it is to end.
pub const LOOK: Duration = Duration::from_millis(20);

/// Why a migration is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Somebody cancelled it.
    Cancelled,
    /// The container was frozen for as long as is allowed.
    FreezeTimeout(Duration),
    /// The time for the whole move is over.
    Timeout(Duration),
}

impl Cause {
    /// The failure of the step that it interrupts.
    pub fn failure(self) -> Failure {
        match self {
            Cause::Cancelled => Failure::cancelled("the move was cancelled"),
            Cause::FreezeTimeout(limit) => Failure::new(format!(
                "the container had been frozen for {:.1} s, the limit of --freeze-timeout; use a mode in which little memory travels in the \
                 freeze (--mode hybrid or postcopy), or a larger --freeze-timeout",
                limit.as_secs_f64()
            )),
            Cause::Timeout(limit) => Failure::new(format!(
                "the move had not come to its commit point after {:.1} s, the limit of --timeout; give it more time, or add --on-timeout \
                 postcopy",
                limit.as_secs_f64()
            )),
        }
    }
}

/// What a request to interrupt came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Raised {
    /// The migration will be undone because of this.
    Now,
    /// It is being undone, because it was interrupted or failed before.
    Before,
    /// It is decided.
    TooLate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    Running,
    Interrupted(Cause),
    Decided,
    Undoing,
}

struct Deadline {
    at: Instant,
    limit: Duration,
}

struct State {
    stand: Stand,
    freeze: Option<Deadline>,
    whole: Option<Deadline>,
    links: Vec<Closer>,
    wakers: Vec<Arc<dyn Fn() + Send + Sync>>,
}

/// The links of a migration, and what wakes its other waits.
type Waits = (Vec<Closer>, Vec<Arc<dyn Fn() + Send + Sync>>);

/// What can end a migration before its commit point.
pub struct Interrupt {
    state: Mutex<State>,
    changed: Condvar,
    /// For loops that look often.
    raised: AtomicBool,
    /// The time for the whole move is over, and the pages that are left are to follow the resume.
    hurries: AtomicBool,
    freeze_timeout: Duration,
    on_timeout: OnTimeout,
}

impl Interrupt {
    /// That of a migration with these options, which begins now.
    pub fn new(options: &MoveOptions) -> Arc<Self> {
        let whole = options.timeout().map(|limit| Deadline { at: Instant::now() + limit, limit });
        let (freeze, links, wakers) = (None, Vec::new(), Vec::new());
        Arc::new(Self {
            state: Mutex::new(State { stand: Stand::Running, freeze, whole, links, wakers }),
            changed: Condvar::new(),
            raised: AtomicBool::new(false),
            hurries: AtomicBool::new(false),
            freeze_timeout: options.freeze_timeout(),
            on_timeout: options.on_timeout,
        })
    }

    /// That of a migration which an earlier agent has left: it is decided, or is undone anyway.
    pub fn of_earlier_agent(decided: bool) -> Arc<Self> {
        let interrupt = Self::new(&MoveOptions::default());
        interrupt.state().stand = if decided { Stand::Decided } else { Stand::Undoing };
        interrupt
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that keeps the deadlines. It is there before the freeze, and ends with the decision or the undo.
    pub fn guard(self: &Arc<Self>) -> Result<(), Failure> {
        let interrupt = Arc::clone(self);
        let started = threads::start("deadline", move || {
            // It does little, and a frozen container may depend on that.
            schedule::stand(Standing::Realtime);
            interrupt.keep_deadlines();
        });
        started.map(drop).map_err(|e| Failure::new(format!("nothing can keep the deadlines of the move: {e}")))
    }

    /// Interrupts the migration at its deadlines; returns when it is decided, interrupted or undone.
    pub fn keep_deadlines(&self) {
        let mut state = self.state();
        while state.stand == Stand::Running {
            let now = Instant::now();
            let passed = |deadline: &Option<Deadline>| deadline.as_ref().filter(|d| d.at <= now).map(|d| d.limit);
            let cause = match (passed(&state.freeze), passed(&state.whole)) {
                (Some(limit), _) => Some(Cause::FreezeTimeout(limit)),
                (None, Some(limit)) => Some(Cause::Timeout(limit)),
                (None, None) => None,
            };
            match cause {
                Some(Cause::Timeout(_)) if self.on_timeout == OnTimeout::Postcopy => {
                    state.whole = None;
                    self.hurries.store(true, Ordering::Release);
                    let (links, wakers) = (state.links.clone(), state.wakers.clone());
                    drop(state);
                    links.iter().for_each(Closer::lift_pace);
                    wakers.iter().for_each(|wake| wake());
                    state = self.state();
                }
                Some(cause) => {
                    drop(state);
                    self.raise(cause);
                    return;
                }
                None => {
                    let next = [&state.freeze, &state.whole].into_iter().flatten().map(|d| d.at).min();
                    state = match next {
                        Some(at) => {
                            let left = at.saturating_duration_since(now);
                            self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                        }
                        None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    };
                }
            }
        }
    }

    /// Interrupts the migration, unless it is decided: when this returns, every wait of it ends.
    pub fn raise(&self, cause: Cause) -> Raised {
        self.mark(cause).map_or_else(|not| not, |waits| self.end(&waits))
    }

    /// Interrupts several migrations, each of which may depend on those before it. Their waits end when all are marked, and
    /// the last is marked first: one whose predecessor fails would take that for the cause.
    pub fn raise_all(all: &[Arc<Self>], cause: Cause) -> Vec<Raised> {
        let marked: Vec<_> = all.iter().rev().map(|one| (one, one.mark(cause))).collect();
        marked.into_iter().map(|(one, marked)| marked.map_or_else(|not| not, |waits| one.end(&waits))).collect()
    }

    /// Marks it as interrupted; what it waits for then.
    fn mark(&self, cause: Cause) -> Result<Waits, Raised> {
        let mut state = self.state();
        match state.stand {
            Stand::Running => state.stand = Stand::Interrupted(cause),
            Stand::Interrupted(_) | Stand::Undoing => return Err(Raised::Before),
            Stand::Decided => return Err(Raised::TooLate),
        }
        self.raised.store(true, Ordering::Release);
        Ok((std::mem::take(&mut state.links), std::mem::take(&mut state.wakers)))
    }

    /// Ends its waits.
    fn end(&self, (links, wakers): &Waits) -> Raised {
        self.changed.notify_all();
        links.iter().for_each(Closer::reset);
        wakers.iter().for_each(|wake| wake());
        Raised::Now
    }

    /// Whether it was interrupted.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Whether rounds are to end, and the pages that are left to follow the resume, because the time for the whole move is over.
    pub fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Acquire)
    }

    /// Why it was interrupted.
    pub fn failure(&self) -> Option<Failure> {
        match self.state().stand {
            Stand::Interrupted(cause) => Some(cause.failure()),
            _ => None,
        }
    }

    /// An error if it was interrupted.
    pub fn check(&self) -> Result<(), Failure> {
        match self.is_raised() {
            true => self.failure().map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    /// The decision of one migration. After this nothing interrupts it.
    ///
    /// # Errors
    /// It was interrupted before.
    pub fn decide(&self) -> Result<(), Failure> {
        Self::decide_all(&[self]).map_err(|(_, failure)| failure)
    }

    /// The decision of several, of which all are decided or none is.
    ///
    /// # Errors
    /// One that was interrupted before, by its place in the list.
    pub fn decide_all(all: &[&Self]) -> Result<(), (usize, Failure)> {
        // Everybody else holds one of these locks at a time.
        let mut states: Vec<_> = all.iter().map(|one| one.state()).collect();
        for (place, state) in states.iter().enumerate() {
            if let Stand::Interrupted(cause) = state.stand {
                return Err((place, cause.failure()));
            }
        }
        states.iter_mut().for_each(|state| state.decided());
        drop(states);
        all.iter().for_each(|one| one.changed.notify_all());
        Ok(())
    }

    /// It is being undone, or has ended, for whatever reason: nothing interrupts that. A decision stays one.
    pub fn undoing(&self) {
        let mut state = self.state();
        if state.stand != Stand::Decided {
            state.stand = Stand::Undoing;
        }
        (state.links, state.wakers) = (Vec::new(), Vec::new());
        drop(state);
        self.changed.notify_all();
    }

    /// The same where the decision could not be written: there is none.
    pub fn not_decided(&self) {
        self.state().stand = Stand::Undoing;
        self.undoing();
    }

    /// The container is about to be frozen: from the first time on its time counts.
    pub fn freezes(&self) {
        let limit = self.freeze_timeout;
        self.state().freeze.get_or_insert_with(|| Deadline { at: Instant::now() + limit, limit });
        self.changed.notify_all();
    }

    /// How much longer the container may be frozen.
    pub fn freeze_left(&self) -> Duration {
        let state = self.state();
        state.freeze.as_ref().map_or(self.freeze_timeout, |d| d.at.saturating_duration_since(Instant::now()))
    }

    /// How long the container may be frozen in all.
    pub fn freeze_timeout(&self) -> Duration {
        self.freeze_timeout
    }

    /// Has something called when it is interrupted: at once, if it was before.
    pub fn on_raise(&self, wake: impl Fn() + Send + Sync + 'static) {
        let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(wake);
        let mut state = self.state();
        match state.stand {
            Stand::Running => state.wakers.push(wake),
            Stand::Interrupted(_) => {
                drop(state);
                wake();
            }
            Stand::Decided | Stand::Undoing => {}
        }
    }

    /// Has a link reset when it is interrupted.
    pub fn register(&self, link: Closer) -> Result<(), Failure> {
        let mut state = self.state();
        match state.stand {
            Stand::Running => state.links.push(link),
            Stand::Interrupted(cause) => return Err(cause.failure()),
            Stand::Decided | Stand::Undoing => {}
        }
        Ok(())
    }

    fn may_be_raised(&self) -> bool {
        matches!(self.state().stand, Stand::Running | Stand::Interrupted(_))
    }

    /// Waits for so long, or until it is interrupted.
    pub fn delay(&self, time: Duration) {
        let is_open = |state: &mut State| !matches!(state.stand, Stand::Interrupted(_));
        let waited = self.changed.wait_timeout_while(self.state(), time, is_open);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Does on a thread of its own what cannot be interrupted, changes nothing, and may take long: an interruption does not wait for
    /// its end. Not in the freeze: a new thread waits for a processor.
    pub fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        self.check()?;
        let (sender, done) = mpsc::channel();
        threads::start("aside", move || drop(sender.send(work()))).map_err(|e| Failure::new(e.to_string()))?;
        loop {
            match done.recv_timeout(LOOK) {
                Ok(result) => return self.check().and(result),
                Err(RecvTimeoutError::Timeout) => self.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("a part of the agent failed; see its log, and report this as a bug"));
                }
            }
        }
    }
}

impl State {
    fn decided(&mut self) {
        self.stand = Stand::Decided;
        (self.links, self.wakers) = (Vec::new(), Vec::new());
    }
}

/// Those of the migrations of which this node is the source and that have not ended, and of all members of groups.
#[derive(Default)]
pub struct Interrupts {
    migrations: Mutex<HashMap<MigrationId, Arc<Interrupt>>>,
    groups: Mutex<HashMap<GroupId, Vec<Arc<Interrupt>>>>,
}

impl Interrupts {
    fn map(&self) -> MutexGuard<'_, HashMap<MigrationId, Arc<Interrupt>>> {
        self.migrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<GroupId, Vec<Arc<Interrupt>>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds those of a group's members, also of members whose migrations have not begun.
    pub fn insert_group(&self, id: &GroupId, members: Vec<Arc<Interrupt>>) {
        self.groups().insert(id.clone(), members);
    }

    /// The group has ended.
    pub fn remove_group(&self, id: &GroupId) {
        self.groups().remove(id);
    }

    /// Those of a group's members.
    pub fn of_group(&self, id: &GroupId) -> Option<Vec<Arc<Interrupt>>> {
        self.groups().get(id).cloned()
    }

    /// Adds that of a migration.
    pub fn insert(&self, id: &MigrationId, interrupt: &Arc<Interrupt>) {
        self.map().insert(id.clone(), Arc::clone(interrupt));
    }

    /// The migration has ended.
    pub fn remove(&self, id: &MigrationId) {
        self.map().remove(id);
    }

    /// That of a migration.
    pub fn get(&self, id: &MigrationId) -> Option<Arc<Interrupt>> {
        self.map().get(id).cloned()
    }

    /// That of a migration that may still be interrupted, or was, and is not being undone yet.
    pub fn guarding(&self, id: &MigrationId) -> Option<Arc<Interrupt>> {
        self.get(id).filter(|interrupt| interrupt.may_be_raised())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn options(freeze_ms: u32, whole_ms: Option<u32>, on_timeout: OnTimeout) -> MoveOptions {
        MoveOptions { freeze_timeout_ms: Some(freeze_ms), timeout_ms: whole_ms, on_timeout, ..MoveOptions::default() }
    }

    fn until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn of_a_cancel_and_a_decision_exactly_one_counts() {
        let (mut cancelled, mut decided) = (0, 0);
        for _ in 0..2000 {
            let interrupt = Interrupt::new(&MoveOptions::default());
            let barrier = std::sync::Barrier::new(2);
            let (raised, decision) = std::thread::scope(|scope| {
                let raised = scope.spawn(|| {
                    barrier.wait();
                    interrupt.raise(Cause::Cancelled)
                });
                barrier.wait();
                let decision = interrupt.decide();
                (raised.join().unwrap(), decision)
            });
            match (raised, decision) {
                (Raised::Now, Err(failure)) => {
                    assert!(failure.cancelled);
                    cancelled += 1;
                }
                (Raised::TooLate, Ok(())) => decided += 1,
                both => panic!("{both:?}"),
            }
        }
        assert_eq!(cancelled + decided, 2000);
    }

    #[test]
    fn of_a_group_all_are_decided_or_none_is() {
        for round in 0..500 {
            let all: Vec<_> = (0..3).map(|_| Interrupt::new(&MoveOptions::default())).collect();
            let barrier = std::sync::Barrier::new(2);
            let victim = &all[round % 3];
            let (raised, decision) = std::thread::scope(|scope| {
                let raised = scope.spawn(|| {
                    barrier.wait();
                    victim.raise(Cause::Cancelled)
                });
                barrier.wait();
                let decision = Interrupt::decide_all(&all.iter().map(|one| &**one).collect::<Vec<_>>());
                (raised.join().unwrap(), decision)
            });
            match (raised, decision) {
                (Raised::Now, Err((place, _))) => {
                    assert_eq!(place, round % 3);
                    // The others were not decided with it.
                    assert!(all.iter().all(|one| one.raise(Cause::Cancelled) != Raised::TooLate));
                }
                (Raised::TooLate, Ok(())) => {
                    assert!(all.iter().all(|one| one.raise(Cause::Cancelled) == Raised::TooLate));
                }
                both => panic!("{both:?}"),
            }
        }
    }

    #[test]
    fn the_freeze_deadline_counts_from_the_first_freeze_and_not_after_the_decision() {
        let interrupt = Interrupt::new(&options(150, None, OnTimeout::Undo));
        interrupt.guard().unwrap();
        interrupt.delay(Duration::from_millis(300));
        assert!(interrupt.check().is_ok(), "it was not frozen yet");
        interrupt.freezes();
        let first = interrupt.freeze_left();
        interrupt.delay(Duration::from_millis(20));
        interrupt.freezes();
        assert!(interrupt.freeze_left() < first, "a later attempt begins nothing anew");
        until("the deadline is kept", || interrupt.is_raised());
        let failure = interrupt.decide().unwrap_err();
        assert!(failure.message.contains("0.1 s") && failure.message.contains("--freeze-timeout"), "{failure}");
        assert!(!failure.cancelled);

        let decided = Interrupt::new(&options(100, None, OnTimeout::Undo));
        decided.guard().unwrap();
        decided.freezes();
        decided.decide().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert!(!decided.is_raised() && decided.check().is_ok());
    }

    #[test]
    fn the_time_for_the_whole_ends_it_or_its_rounds() {
        let undone = Interrupt::new(&options(60_000, Some(100), OnTimeout::Undo));
        undone.guard().unwrap();
        until("it is undone", || undone.is_raised());
        assert!(undone.failure().unwrap().message.contains("--timeout"));

        let hurried = Interrupt::new(&options(100, Some(100), OnTimeout::Postcopy));
        hurried.guard().unwrap();
        until("its rounds end", || hurried.hurries());
        assert!(hurried.check().is_ok());
        hurried.freezes();
        until("its freeze has its own limit", || hurried.is_raised());
        assert!(hurried.failure().unwrap().message.contains("--freeze-timeout"));
    }

    #[test]
    fn what_waits_is_woken_and_nothing_is_after_the_undo_has_begun() {
        let interrupt = Interrupt::new(&MoveOptions::default());
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        interrupt.on_raise(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        std::thread::scope(|scope| {
            let (held, hold) = mpsc::channel::<()>();
            let waits = scope.spawn(|| {
                interrupt.aside(move || {
                    let _ = hold.recv();
                    Ok(())
                })
            });
            assert_eq!(interrupt.raise(Cause::Cancelled), Raised::Now);
            assert!(waits.join().unwrap().unwrap_err().cancelled);
            drop(held);
        });
        let count = Arc::clone(&woken);
        interrupt.on_raise(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(woken.load(Ordering::Relaxed), 2, "also what comes late");
        interrupt.undoing();
        assert!(interrupt.failure().is_none());
        assert_eq!(interrupt.raise(Cause::Cancelled), Raised::Before);
        assert!(interrupt.aside(|| Ok(1)).is_ok());
    }
}
