//! The drain on the destination: what is seen of it, by whom, and how it ends.
//!
//! ```text
//!   watch (a thread of its own, for as long as the copy runs and the move is not over)
//!     │ asks the pager, in slices; looks at the container; holds the arrival's lock only to record the end
//!     ▼
//!   Drain (in the arrival's inbox, behind a lock of its own) ──▶ answers to the source, `tranship status`
//! ```
//!
//! An error is never taken for the last page: a pager that does not answer is asked again, for as long as it takes, and that is
//! shown. A drain ends when every page is in place, when the container has ended, or when the source gives the move up. Where
//! the pager and its keeper are gone, with pages missing, the last of these is the only way out: the copy is stopped then.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_coordinator::{self as coordinator, Failure};
use tranship_engine::Container;
use tranship_memory::huge;
use tranship_memory::pager::{self, ControlError, PagerHandle, Status};
use tranship_sys::threads;
use tranship_types::{HugePages, Latencies, MigrationId, Outcome, Phase, WaitKind, Waiting};
use tranship_wire::message::{Account, Response};

use crate::arrivals::{Arrival, Standing, lock};
use crate::layout::Layout;
use crate::node::{self, Node};
use crate::peers::failure_response;
use crate::registry::{LiveReport, unix_ms};

/// How long the pager is waited for until it is said again how many pages are missing.
const SLICE: Duration = Duration::from_millis(250);
/// How long the last processes of a container that ends may take.
const ENDING: Duration = Duration::from_secs(5);
/// How often that is put on record.
const SLOW: Duration = Duration::from_secs(5);
/// How long a pager may take to answer before that is shown. It is asked again all the time.
const ANSWER: Duration = Duration::from_secs(2);
/// For how long nobody listens before pager and keeper are taken for gone.
const GONE: Duration = Duration::from_millis(200);
/// For how long a pager has not answered before the end of the container is taken for the end of the drain all the same.
const MUTE: Duration = Duration::from_secs(3);
/// How long after the first attempt to end the drain that failed the next one is made; each further pause is longer by as much.
const AGAIN: Duration = Duration::from_secs(1);
/// Up to so many times.
const PATIENT: u32 = 10;
/// What gives the original its life back.
const RECOVER: &str = "tranship recover";
/// For how long no page has come before the operator is told what to look at.
const SILENT: Duration = Duration::from_secs(5);

/// What is known of the pages of a copy that runs.
#[derive(Debug)]
pub enum Pages {
    /// Every one is in place. No counters where the pager that had them is gone, as it may be then.
    Drained(Option<Status>),
    /// Some are missing.
    Draining(Status),
    /// That cannot be told.
    Unknown {
        /// Why.
        why: String,
        /// There is no pager any more, nor a keeper that would start one.
        gone: bool,
    },
}

/// Looks at the pages of the migration with this directory; waits up to `patience` for the last of them.
pub fn look(root: &Path, patience: Duration) -> Pages {
    let left = || serde_json::from_slice::<Status>(&std::fs::read(root.join(pager::DRAINED_FILE)).ok()?).ok();
    if let Some(status) = left() {
        return Pages::Drained(Some(status));
    }
    let asked = PagerHandle::connect_within(root, ANSWER).and_then(|pager| match pager.drained(patience) {
        Ok(status) if status.drained => Ok(status),
        _ => pager.status(ANSWER),
    });
    match asked {
        Ok(status) if status.drained => Pages::Drained(Some(status)),
        Ok(status) => Pages::Draining(status),
        // It may have ended just now because it was done.
        Err(error) => left().map_or_else(|| unknown(&error), |status| Pages::Drained(Some(status))),
    }
}

fn unknown(error: &ControlError) -> Pages {
    let why = match error {
        ControlError::Broken(error) | ControlError::Absent { source: error, .. } if is_late(error) => {
            format!("it does not answer within {ANSWER:?}")
        }
        ControlError::Broken(error) | ControlError::Absent { source: error, .. } => error.to_string(),
    };
    Pages::Unknown { why, gone: error.is_gone() }
}

fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock)
}

/// What is known of a drain, for everybody who asks.
#[derive(Debug, Default)]
pub struct Drain {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// It is watched, and not over: the container runs here, or ran until just now.
    watched: bool,
    /// What the pager said last.
    status: Option<Status>,
    /// What is waited for.
    waiting: Option<Waiting>,
    /// Why it cannot go on by itself, or the last attempt to end it has failed.
    failure: Option<Failure>,
    /// The copy's memory is damaged, and it was stopped.
    lost: bool,
    /// The original is no more.
    released: bool,
}

impl Drain {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Whether it goes on; if so, whether the copy is lost.
    pub fn goes_on(&self) -> Option<bool> {
        let state = self.state();
        state.watched.then_some(state.lost)
    }

    /// Waits a moment for the end; if it does not come, the answer to the source.
    fn answer(&self, patience: Duration) -> Option<Response> {
        let state = self.state();
        let waited = self.changed.wait_timeout_while(state, patience, |state| state.watched);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !state.watched {
            return None;
        }
        if let Some(failure) = &state.failure {
            let (message, blockers) = (failure.message.clone(), failure.blockers.clone());
            return Some(Response::Failed { message, blockers, waiting: state.waiting.clone() });
        }
        let status = state.status.clone().unwrap_or_default();
        Some(Response::Draining {
            remote_bytes: status.remote_bytes,
            pending_bytes: status.pending_bytes,
            waiting: status.waiting,
            remote_faults: status.remote_faults,
            waiting_for: state.waiting.clone(),
        })
    }
}

/// What the watch has seen so far, and what follows from it.
struct Watch<'a> {
    node: &'a Arc<Node>,
    id: &'a MigrationId,
    found: &'a Mutex<Arrival>,
    drain: &'a Drain,
    report: LiveReport,
    layout: Layout,
    source: String,
    /// The container's first process on this node, where that was noted.
    init: Option<u32>,
    /// Since when nobody listens.
    gone: Option<Instant>,
    /// Since when the pager has not answered.
    mute: Option<Instant>,
    /// Since when the container has been ending, with nothing missing any more.
    ending: Option<Instant>,
    /// When that was put on record.
    told: Instant,
}

/// How a drain ends.
#[derive(Debug)]
enum End {
    Drained(Option<Status>),
    Ended(String),
}

/// After the resume: watches the drain to its end, however long that takes.
pub fn watch(node: &Arc<Node>, id: &MigrationId, found: &Mutex<Arrival>) {
    let Some(inbox) = node.arrivals.inbox(id) else { return };
    let (report, source) = {
        let arrival = lock(found);
        (arrival.report.clone(), arrival.peer.to_string())
    };
    let layout = Layout::new(&node.config.run_dir, id);
    let init = tranship_criu::front::resumed_init(&layout.front_socket(crate::layout::Role::Restore));
    let remote_bytes = report.read().progress.memory_bytes;
    let Some(_watched) = Watched::begin(&inbox.drain, remote_bytes) else { return };
    let told = Instant::now();
    let (drain, gone, mute) = (&inbox.drain, None, None);
    let mut watch = Watch { node, id, found, drain, report, layout, source, init, gone, mute, ending: None, told };
    loop {
        let watched = coordinator::caught("the drain", || {
            watch.run();
            Ok(())
        });
        let Err(failure) = watched else { break };
        watch.failed(failure);
        if !node.pause(AGAIN) {
            break;
        }
    }
}

/// Says that a drain is watched, until it is dropped: also by a thread that panics.
struct Watched<'a>(&'a Drain);

impl<'a> Watched<'a> {
    /// `None` where somebody watches it already.
    fn begin(drain: &'a Drain, remote_bytes: u64) -> Option<Self> {
        let mut state = drain.state();
        if state.watched {
            return None;
        }
        let status = Some(Status { remote_bytes, ..Status::default() });
        *state = State { watched: true, status, released: state.released, ..State::default() };
        Some(Self(drain))
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.set(|state| (state.watched, state.waiting, state.failure) = (false, None, None));
    }
}

impl Watch<'_> {
    fn run(&mut self) {
        let mut failures = 0;
        loop {
            let (stands, tidied, lost) = {
                let arrival = lock(self.found);
                (arrival.standing == Standing::Running, arrival.run.tidied, arrival.run.is_lost())
            };
            if !stands {
                return;
            }
            if lost {
                self.drain.set(|state| state.lost = true);
            }
            // Of one that was lost with the host's memory, the step that fails says so. An earlier agent may have seen its end.
            let seen = self.report.read().ended.is_some();
            let end = if lost || tidied || seen { Some(End::Drained(None)) } else { self.slice() };
            let mut pause = Duration::ZERO;
            if let Some(end) = end {
                match self.finish(end) {
                    Ok(()) => return,
                    Err(failure) => self.failed(failure),
                }
                failures = PATIENT.min(failures + 1);
                pause = AGAIN * failures;
            }
            if !self.node.pause(pause) {
                return;
            }
        }
    }

    /// One look, which takes a moment; the end, if that has come.
    fn slice(&mut self) -> Option<End> {
        let pages = look(self.layout.root(), SLICE);
        let may_have_ended = match &pages {
            Pages::Unknown { gone, .. } => {
                // Who has lost its pager may have died of the zeros that it read.
                let mute = self.mute.get_or_insert_with(Instant::now).elapsed();
                let state = self.drain.state();
                // Where there is no original any more, there is nothing that would be kept for it.
                mute > MUTE && if *gone || state.lost { state.lost && state.released } else { true }
            }
            _ => true,
        };
        if let Some(how) = may_have_ended.then(|| self.ended(matches!(pages, Pages::Drained(_)))).flatten() {
            return Some(End::Ended(how));
        }
        match pages {
            // A task that is being killed gives up its memory, with the pages that are missing, before it can be seen to have ended.
            Pages::Drained(_)
                if self.init.is_some_and(node::is_ending)
                    && self.ending.get_or_insert_with(Instant::now).elapsed() < ENDING =>
            {
                self.node.pause(SLICE);
            }
            Pages::Drained(status) => return Some(End::Drained(status)),
            Pages::Draining(status) => self.draining(&status),
            Pages::Unknown { gone, why } => {
                let listened = !gone || self.gone.get_or_insert_with(Instant::now).elapsed() < GONE;
                if listened {
                    self.unanswered(&why);
                } else {
                    self.lost();
                }
                // What fails at once must not be tried without a pause.
                self.node.pause(SLICE);
                return None;
            }
        }
        (self.gone, self.mute) = (None, None);
        None
    }

    /// How the container has ended, if it has. Its engine is asked where its first process is not there any more, or at the end.
    fn ended(&self, drained: bool) -> Option<String> {
        let lives = self.init.map(node::is_alive);
        match lives {
            Some(true) => None,
            None if !drained => None,
            _ => lock(self.found).run.ended_there(self.init),
        }
    }

    fn draining(&mut self, status: &Status) {
        let node = &self.node.config.node;
        let kind = if status.trouble.is_some() {
            WaitKind::Disk
        } else if status.remote_bytes > 0 {
            WaitKind::Pages
        } else {
            WaitKind::Placing
        };
        let progress = self.drain.state().status.as_ref().is_none_or(|before| {
            (before.remote_bytes, before.pending_bytes) != (status.remote_bytes, status.pending_bytes)
        });
        let since_unix_ms = self.since(kind, progress);
        let stuck = unix_ms().saturating_sub(since_unix_ms) > SILENT.as_millis() as u64;
        let what = match (&status.trouble, status.waiting) {
            (Some(trouble), _) => format!("space on node {node}: {trouble}"),
            (None, _) if status.remote_bytes == 0 => {
                format!("{} that have come to node {node} to be put in place", mib(status.pending_bytes))
            }
            (None, 0) => format!("{} of pages from node {}", mib(status.remote_bytes), self.source),
            (None, tasks) => {
                format!(
                    "{} of pages from node {}, which {tasks} faults wait for",
                    mib(status.remote_bytes),
                    self.source
                )
            }
        };
        let remedy = match kind {
            WaitKind::Disk => format!("free some space below {} on node {node}", self.node.config.run_dir.display()),
            WaitKind::Pages if stuck => format!(
                "see that node {0} and its agent run, and the link between them; if node {0} is lost for good, these pages are \
                 lost with it: stop the container on node {node}, and start it from its own data",
                self.source
            ),
            _ => String::new(),
        };
        if self.told.elapsed() > SLOW {
            tracing::info!(id = %self.id, ?status, "pages are still missing");
            self.told = Instant::now();
        }
        let waiting = Waiting { kind, what, since_unix_ms, remedy };
        self.show(Some(status), waiting, None);
    }

    /// The pager does not answer, or cannot be asked.
    fn unanswered(&mut self, why: &str) {
        let node = &self.node.config.node;
        let remedy = match why {
            why if why.contains("open files") => {
                format!(
                    "the agent of node {node} has too many files open: raise its limit (LimitNOFILE), or end what uses them"
                )
            }
            _ => format!(
                "see `pgrep -af 'transhipd pager'` on node {node}: if the pager was stopped, `kill -CONT PID` lets it go on"
            ),
        };
        let what = format!("the pager on node {node}, which cannot be asked: {why}");
        tracing::warn!(id = %self.id, why, "the pager cannot be asked; it is tried again");
        let waiting =
            Waiting { kind: WaitKind::Pager, what, since_unix_ms: self.since(WaitKind::Pager, false), remedy };
        self.show(None, waiting, None);
    }

    /// Pager and keeper are gone: what was missing reads as zeros. The copy is kept from going on with that.
    fn lost(&mut self) {
        let (lost, released) = {
            let state = self.drain.state();
            (state.lost, state.released)
        };
        let told = self.report.read().waiting.is_some_and(|waiting| waiting.remedy.contains(RECOVER));
        if lost && told != released {
            return;
        }
        let (node, id) = (&self.node.config.node, self.id);
        let missing = self.drain.state().status.as_ref().map_or(0, |status| status.remote_bytes + status.pending_bytes);
        let stopped = lock(self.found).run.stop_damaged();
        let container = self.report.read().container;
        let copy = match &stopped {
            Ok(true) => "it was stopped".to_owned(),
            Ok(false) => "it has ended".to_owned(),
            Err(failure) => format!("it could not be stopped ({failure})"),
        };
        let what = format!(
            "the pager and its keeper on node {node} were killed while up to {} were not in place: the copy of {container} has \
             lost memory, and {copy}",
            mib(missing)
        );
        let remedy = match released {
            false => format!(
                "`{RECOVER} {id} --destination-lost` on node {} lets the original run again, as it was at the freeze",
                self.source
            ),
            true => format!("the original is no more: end {container} on node {node}, and start it from its own data"),
        };
        let failure = Failure::new(what.clone());
        let since_unix_ms = self.since(WaitKind::PagerGone, false);
        tracing::error!(%id, %what, "the drain cannot go on");
        let waiting = Waiting { kind: WaitKind::PagerGone, what, since_unix_ms, remedy };
        self.show(None, waiting, Some(failure));
        self.drain.set(|state| state.lost = stopped.is_ok());
    }

    /// The last step has failed.
    fn failed(&self, failure: Failure) {
        let since_unix_ms = self.since(WaitKind::Cleanup, false);
        let what = format!("the end of the move on node {}: {}", self.node.config.node, failure.message);
        let waiting = Waiting { kind: WaitKind::Cleanup, what, since_unix_ms, remedy: String::new() };
        self.show(None, waiting, Some(failure));
    }

    /// Since when something of this kind is waited for, without progress.
    fn since(&self, kind: WaitKind, progress: bool) -> u64 {
        let state = self.drain.state();
        let before = state.waiting.as_ref().filter(|waiting| waiting.kind == kind && !progress);
        before.map_or_else(unix_ms, |waiting| waiting.since_unix_ms)
    }

    fn show(&self, status: Option<&Status>, waiting: Waiting, failure: Option<Failure>) {
        let error = failure.as_ref().map(|failure| failure.message.clone());
        self.report.change(|r| {
            (r.waiting, r.error) = (Some(waiting.clone()), error);
            if let Some(status) = status {
                r.progress.remaining_bytes = status.remote_bytes;
                r.progress.moved_bytes = r.progress.memory_bytes.saturating_sub(status.remote_bytes);
                r.progress.remote_faults = status.remote_faults.count();
            }
        });
        self.drain.set(|state| {
            (state.waiting, state.failure) = (Some(waiting), failure);
            if let Some(status) = status {
                state.status = Some(status.clone());
            }
        });
    }

    /// Puts the end on record, and removes what only the migration needed.
    fn finish(&self, end: End) -> Result<(), Failure> {
        let (node, id) = (self.node, self.id);
        let mut arrival = lock(self.found);
        if arrival.standing != Standing::Running {
            return Ok(());
        }
        let Arrival { run, journal: Some(journal), report, .. } = &mut *arrival else { return Ok(()) };
        match end {
            End::Drained(status) => run.drained = status.or(run.drained.take()),
            End::Ended(how) => {
                report.change(|r| r.ended = Some(how));
                // An agent that is restarted in the middle finds nothing else that would tell it.
                if let Err(error) = report.save() {
                    tracing::warn!(%id, %error, "how the container ended cannot be kept");
                }
            }
        }
        let ended = report.read().ended;
        run.ended.clone_from(&ended);
        match coordinator::drain(run, journal, &node.faults) {
            Ok(()) => {
                report.change(|r| {
                    r.ways.extend(run.remarks.clone());
                    r.waiting = None;
                });
                arrival.standing = Standing::Drained;
                arrival.claim = None;
                arrival.end(Phase::Done, if ended.is_some() { Outcome::Ended } else { Outcome::Moved }, None);
                tracing::info!(%id, ?ended, "drained");
                let (list, container) = (std::mem::take(&mut arrival.run.huge_pages), arrival.run.own_container());
                if let Some(container) = container.filter(|_| !list.is_empty() && ended.is_none()) {
                    let (node, report) = (Arc::clone(node), arrival.report.clone());
                    let work = move || make_huge_pages(&node, &container, &list, &report);
                    let started = threads::start("huge pages", work);
                    started
                        .err()
                        .into_iter()
                        .for_each(|error| tracing::warn!(%id, %error, "it gets no huge pages again"));
                }
                Ok(())
            }
            Err(failure) => {
                tracing::error!(%id, %failure, "the migration could not be finished; it is tried again");
                Err(Failure::new(format!("on node {}, {failure}", node.config.node)))
            }
        }
    }
}

/// The container runs, and nobody waits for it: it gets the huge pages again that it had.
fn make_huge_pages(node: &Node, container: &Container, list: &[HugePages], report: &LiveReport) {
    // Until it moves on.
    let go_on = |time| node.pause(time) && node.claimed_by(&container.name).is_none();
    let made = huge::make_anew(list, &container.processes().unwrap_or_default(), go_on);
    report.end(|r| r.huge_pages = Some(made));
}

/// Puts what the source has measured into the report of an arrival, which may have ended already.
pub fn keep_account(node: &Node, id: &MigrationId, account: Account) {
    let Some(report) = node.arrivals.get(id).map(|arrival| lock(&arrival).report.clone()) else { return };
    match report.read().outcome {
        Outcome::Running => report.change(|r| account.put(r)),
        _ => report.end(|r| account.put(r)),
    }
}

/// The source asks whether every page is in place. If the original is `released` it is the last question: with its answer,
/// this node may forget the migration. Until then the source may give it up.
pub fn answer(node: &Arc<Node>, id: &MigrationId, released: bool) -> Response {
    if let Some(one) = node.damaged.get(id) {
        return failure_response(Failure::new(one.explanation()));
    }
    let (Some(found), Some(inbox)) = (node.arrivals.get(id), node.arrivals.inbox(id)) else {
        if released {
            return Response::Drained {
                faults: 0,
                remote_faults: Latencies::default(),
                peak_bytes: 0,
                remarks: Vec::new(),
                ended: None,
            };
        }
        // Whoever does not know it can have lost every page.
        return failure_response(Failure::new(format!("node {} knows no migration {id}", node.config.node)));
    };
    if released {
        inbox.drain.set(|state| state.released = true);
    }
    if let Some(answer) = inbox.drain.answer(SLICE) {
        return answer;
    }
    let arrival = lock(&found);
    match arrival.standing {
        Standing::Drained => {}
        Standing::Running => {
            // The watch is about to begin, or its thread has died.
            let remote_bytes = arrival.report.read().progress.memory_bytes;
            drop(arrival);
            let (its_node, id) = (Arc::clone(node), id.clone());
            node.start_or_lend("drain", move || watch(&its_node, &id, &found));
            let (remote_faults, waiting_for) = (Latencies::default(), None);
            return Response::Draining { remote_bytes, pending_bytes: 0, waiting: 0, remote_faults, waiting_for };
        }
        Standing::Open | Standing::Ready => {
            return failure_response(Failure::new("not every page is in place yet"));
        }
    }
    let (status, remarks) = (arrival.run.drained.clone().unwrap_or_default(), arrival.run.remarks.clone());
    let ended = arrival.report.read().ended;
    if released {
        node.arrivals.forget(id, arrival);
    }
    Response::Drained {
        faults: status.faults,
        remote_faults: status.remote_faults,
        peak_bytes: status.peak_bytes,
        remarks,
        ended,
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests;
