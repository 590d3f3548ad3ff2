//! Runs migrations of which this node is the source, and takes up what an earlier agent has left.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use tranship_api::{ErrorKind, MoveRequest, ServiceError};
use tranship_coordinator::{self as coordinator, Damaged, Ending, Failure, Journal, Record};
use tranship_sys::{schedule, threads};
use tranship_types::{MigrationId, MoveOptions, NodeName, Outcome, Phase, Report, Side};

use crate::arrivals::{Arrival, Context, Inbox, Standing};
use crate::claims::Claim;
use crate::destination::DestinationRun;
use crate::groups::{self, Turn};
use crate::interrupt::Interrupt;
use crate::layout::Layout;
use crate::node::{Node, random_bytes};
use crate::plan::refused;
use crate::registry::{LiveReport, unix_ms};
use crate::source::SourceRun;
use crate::{damaged, draining, inspection, undoing};

/// For how long an ended arrival is remembered for a source that has not asked.
const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 3600);
/// For how long the destination is asked how a move has ended, before the report says that it has.
const CONFIRMED: Duration = Duration::from_secs(10);
/// What the report says where there was no answer.
const UNCONFIRMED: &str = "the destination has not confirmed the end of the move";

/// Begins a migration, which runs on a thread of its own; a member of a group takes its turns.
pub fn begin(node: &Arc<Node>, request: &MoveRequest, turn: Option<Turn>) -> Result<Report, ServiceError> {
    let name = &request.container;
    let no_id = |e| ServiceError::new(ErrorKind::Internal, format!("no random bytes: {e}"), "");
    let id = MigrationId::from_random(random_bytes().map_err(no_id)?);
    // Wrong names are answered at once; what takes a look is reported by the migration itself.
    let (engine, _) = inspection::find_free(node, name, request.options.engine).map_err(|f| refused(f, name))?;
    // The name alone may mean another one by the time that an agent is restarted.
    let request = MoveRequest {
        options: MoveOptions { engine: Some(engine.name()), ..request.options.clone() },
        ..request.clone()
    };
    if !node.peers().has(&request.to) {
        return Err(ServiceError::blocked(name, vec![node.unknown_peer(&request.to)]));
    }
    let claim = node.claim(name, &id).map_err(|blocker| ServiceError::blocked(name, vec![blocker]))?;
    start(node, claim, id, &request, turn)
}

fn start(
    node: &Arc<Node>,
    claim: Claim,
    id: MigrationId,
    request: &MoveRequest,
    turn: Option<Turn>,
) -> Result<Report, ServiceError> {
    let source = node.config.node.clone();
    let options = request.options.clone();
    let (container, destination) = (request.container.clone(), request.to.clone());
    let group = turn.as_ref().map(Turn::group);
    let network_owner = turn.as_ref().and_then(Turn::network_owner);
    let report = Report {
        options: options.clone(),
        group,
        network_owner,
        ..Report::new(id, container, source, destination, options.mode, unix_ms())
    };
    // A member of a group may have been cancelled before its migration begins, and has a guard since the group began.
    let interrupt = turn.as_ref().map_or_else(|| Interrupt::new(&options), Turn::interrupt);
    let not_moved = |text: &str| {
        interrupt.undoing();
        let (cause, remedy) = text.split_once("; ").unwrap_or((text, ""));
        ServiceError::new(ErrorKind::Unusable, format!("{} was not moved: {cause}", report.container), remedy)
    };
    let guarded = if turn.is_none() { interrupt.guard() } else { Ok(()) };
    guarded.map_err(|failure| not_moved(&failure.message))?;
    // Without one nothing is begun: who asked is told at once, since the history has no room for it either.
    let journal = Journal::create(&node.journals(), &report.id, &first_record(&report))
        .map_err(|error| not_moved(&error.to_string()))?;
    node.interrupts.insert(&report.id, &interrupt);
    let live = node.registry.begin(report.clone());
    let began = Instant::now();
    let (its_node, its_live, place) = (Arc::clone(node), live.clone(), journal.path().to_owned());
    let its_interrupt = Arc::clone(&interrupt);
    let started = threads::start("move", move || {
        run(&its_node, claim, &its_live, journal, (turn.as_ref(), &its_interrupt), began);
        its_interrupt.undoing();
        its_node.interrupts.remove(&its_live.read().id);
    });
    match started {
        Ok(_) => Ok(report),
        Err(error) => {
            // Nothing has been done yet, so that no record of it is needed.
            let _ = Journal::open(&place).map(|(journal, _)| journal.close());
            interrupt.undoing();
            node.interrupts.remove(&report.id);
            let text = format!("the move of {} was not begun: {error}", report.container);
            live.end(|r| (r.outcome, r.phase, r.error) = (Outcome::Failed, Phase::Undone, Some(text.clone())));
            let (cause, remedy) = text.split_once("; ").unwrap_or((&text, ""));
            Err(ServiceError::new(ErrorKind::Internal, cause, remedy))
        }
    }
}

fn first_record(report: &Report) -> Record {
    Record::Begin {
        id: report.id.clone(),
        side: Side::Source,
        container: report.container.clone(),
        peer: report.destination.clone(),
        context: serde_json::to_value(report).unwrap_or_default(),
    }
}

fn run(
    node: &Arc<Node>,
    claim: Claim,
    live: &LiveReport,
    mut journal: Journal,
    (turn, interrupt): (Option<&Turn>, &Arc<Interrupt>),
    began: Instant,
) {
    let place = journal.path().to_owned();
    let mut claim = Some(claim);
    let mut port = SourceRun::new(node, live.clone(), turn.cloned(), Arc::clone(interrupt));
    let done = coordinator::caught("a migration", || {
        let ending = coordinator::migrate(&mut port, &mut journal, &node.faults);
        conclude(node, &mut claim, live, &mut port, journal, ending, began);
        Ok(())
    });
    let dropped = coordinator::caught("the end of a migration", || {
        drop(port);
        Ok(())
    });
    dropped
        .err()
        .into_iter()
        .for_each(|failure| tracing::error!(id = %live.read().id, %failure, "something may be left"));
    if let Err(failure) = done {
        interrupt.undoing();
        take_up_again(node, claim, live, turn, &place, failure);
    }
}

/// After a panic outside of a migration's steps: goes on by its journal, as an agent that was restarted would.
fn take_up_again(
    node: &Arc<Node>,
    mut claim: Option<Claim>,
    live: &LiveReport,
    turn: Option<&Turn>,
    place: &Path,
    mut failure: Failure,
) {
    let id = live.read().id;
    schedule::stand(schedule::Standing::Ordinary);
    loop {
        tracing::error!(%id, %failure, "the migration is taken up again by its journal");
        let report = live.read();
        let committed =
            matches!(report.phase, Phase::Commit | Phase::Resume | Phase::Drain | Phase::Release | Phase::Done);
        if !place.exists() && report.outcome == Outcome::Running && !committed {
            let error = format!("{failure}; its journal {} is gone: see `tranship doctor`", place.display());
            return live.end(|r| (r.phase, r.outcome, r.error) = (Phase::Undone, Outcome::Failed, Some(error)));
        }
        if !place.exists() || !node.pause(Duration::from_secs(1)) {
            return;
        }
        let done = coordinator::caught("a migration that was taken up again", || {
            let (mut journal, mut records) = Journal::open(place).map_err(|e| Failure::new(e.to_string()))?;
            if !records.contains(&Record::Commit) {
                // What its group has decided, nothing leads back from.
                let decided = turn.is_some_and(|turn| turn.is_shared() && turn.leave(failure.clone()).is_ok());
                let record = if decided { Record::Commit } else { Record::Undone { failure: failure.clone() } };
                if !records.iter().any(|record| matches!(record, Record::Undone { .. })) {
                    let noted = if decided { journal.decide(&record) } else { journal.append(&record) };
                    noted.map_err(|e| Failure::new(e.to_string()))?;
                    records.push(record);
                }
                turn.into_iter().filter(|_| decided).for_each(Turn::handed_down);
            }
            let mut port = SourceRun::taken_up(node, live.clone(), records.contains(&Record::Commit));
            port.turn = turn.cloned();
            let ending = coordinator::recover(&mut port, &mut journal, &records);
            conclude(node, &mut claim, live, &mut port, journal, ending, Instant::now());
            Ok(())
        });
        match done {
            Ok(()) => return,
            Err(next) => failure = next,
        }
    }
}

/// Puts a migration's end on record, and sees to it that the destination learns of an undone one. The container is free
/// from then on.
fn conclude(
    node: &Arc<Node>,
    claim: &mut Option<Claim>,
    live: &LiveReport,
    port: &mut SourceRun,
    mut journal: Journal,
    ending: Ending,
    began: Instant,
) {
    let id = live.read().id;
    let mut ending = ending;
    while !ending.leftovers().is_empty() {
        let leftovers = ending.leftovers();
        tracing::error!(%id, ?leftovers, "could not be undone; it is tried again");
        live.change(|r| r.leftovers = leftovers.to_vec());
        // The container may be stopped still: nothing matters more. If the agent stops, its next start goes on.
        if !node.pause(Duration::from_secs(1)) {
            return;
        }
        match Journal::open(journal.path()) {
            Ok((_, records)) => ending = coordinator::recover(port, &mut journal, &records),
            Err(error) => tracing::error!(%id, %error, "the journal cannot be read"),
        }
    }
    let total_ms = Some(began.elapsed().as_secs_f64() * 1e3);
    match ending {
        Ending::Moved => {
            *claim = None;
            let publish = |confirmed: bool| {
                live.end(|r| {
                    // It may have ended before what had come was put in place.
                    r.outcome = if r.ended.is_some() { Outcome::Ended } else { Outcome::Moved };
                    r.phase = Phase::Done;
                    (r.error, r.waiting) = (None, None);
                    r.total_ms = r.total_ms.or(total_ms);
                    r.ways.retain(|way| *way != UNCONFIRMED);
                    if !confirmed {
                        r.ways.push(UNCONFIRMED.to_owned());
                    }
                });
            };
            // The destination remembers the migration until it has been asked. Its answer is the outcome, so that nothing is said
            // before it, unless that node is silent for long.
            let confirmed = || {
                let done = port.confirm_drained();
                if let Err(failure) = &done {
                    let waiting = port.waits(failure);
                    live.change(|r| r.waiting = Some(waiting));
                }
                done
            };
            let mut told = until_told(node, &id, Some(CONFIRMED), confirmed);
            if told == Told::Late {
                publish(false);
                told = until_told(node, &id, None, || port.confirm_drained());
            }
            match told {
                Told::Heard => {
                    publish(true);
                    close(journal, &id);
                }
                // The next agent asks.
                Told::Stopping | Told::Late => live.save().unwrap_or_else(|error| {
                    tracing::warn!(%id, %error, "the report of a move cannot be kept");
                }),
            }
        }
        Ending::Undone { failure, leftovers } => {
            let original = port.look_at_original();
            *claim = None;
            live.end(|r| {
                (r.original, r.waiting) = (Some(original), None);
                r.outcome = if failure.cancelled { Outcome::Cancelled } else { Outcome::Failed };
                r.phase = Phase::Undone;
                r.error = Some(failure.message);
                r.blockers = failure.blockers;
                r.leftovers = leftovers;
                r.total_ms = r.total_ms.or(total_ms);
            });
            // The container runs here; what is left is that the destination may still hold a stopped copy.
            if until_told(node, &id, None, || port.confirm_undone()) == Told::Heard {
                close(journal, &id);
            }
        }
        Ending::GivenUp { failure, leftovers } => {
            let original = port.look_at_original();
            *claim = None;
            live.end(|r| {
                (r.original, r.waiting) = (Some(original), None);
                r.outcome = Outcome::GivenUp;
                r.phase = Phase::Undone;
                r.error = Some(failure.message);
                r.leftovers = leftovers;
                r.total_ms = r.total_ms.or(total_ms);
            });
            port.give_up();
            if until_told(node, &id, None, || port.confirm_undone()) == Told::Heard {
                if port.stray_removed {
                    tracing::warn!(%id, "the destination has come back, and its copy ran: it was removed");
                    let also = format!(
                        "; node {} has come back, and its copy, which ran, was removed",
                        live.read().destination
                    );
                    live.end(|r| r.error = r.error.take().map(|error| error + &also));
                }
                close(journal, &id);
            }
        }
        Ending::Suspended => {
            live.change(|r| r.error = Some("the agent is stopping; its next start goes on".to_owned()));
        }
    }
}

/// What became of an attempt to tell the destination something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Heard,
    /// It has not answered for as long as it was given.
    Late,
    /// The agent is stopping.
    Stopping,
}

/// Tells the destination something until it has heard, for no longer than `patience`, where that is given.
fn until_told(
    node: &Node,
    id: &MigrationId,
    patience: Option<Duration>,
    mut tell: impl FnMut() -> Result<(), Failure>,
) -> Told {
    let (begun, mut wait) = (Instant::now(), Duration::from_millis(50));
    // Somebody waits for the outcome as long as there is a limit.
    let longest = Duration::from_millis(if patience.is_some() { 500 } else { 5000 });
    while let Err(failure) = tell() {
        tracing::info!(%id, %failure, "the destination does not know yet that it is over");
        if patience.is_some_and(|patience| begun.elapsed() > patience) {
            return Told::Late;
        }
        if !node.pause(wait) {
            return Told::Stopping;
        }
        wait = (wait * 2).min(longest);
    }
    Told::Heard
}

fn close(journal: Journal, id: &MigrationId) {
    if let Err(error) = journal.close() {
        tracing::warn!(%id, %error, "a journal stays behind");
    }
}

/// Takes up everything that an earlier agent has left in its journals. Containers are claimed before this returns; the
/// work itself goes on in threads.
pub fn recover(node: &Arc<Node>) {
    let mut damaged = damaged::lost(node);
    let mut journals = Vec::new();
    for path in Journal::list(&node.journals()) {
        match Journal::open(&path) {
            Ok((journal, records)) if records.is_empty() && has_directory(node, &path) => {
                drop(journal);
                damaged.push(Journal::lost_with(&path, &[]));
            }
            Ok((journal, records)) => match understood(&records) {
                Ok(()) => journals.push((journal, records)),
                Err(error) => damaged.push(Damaged::foreign(&path, records, error)),
            },
            Err(found) => damaged.push(*found),
        }
    }
    groups::hand_down(&mut journals, &mut damaged);
    // Where two are about the same container, the one that was decided tells where it is.
    journals.sort_by_key(|(_, records)| !records.contains(&Record::Commit));
    for (journal, records) in journals {
        match records.first().cloned() {
            Some(Record::Begin { id, side, container, .. }) => {
                tracing::info!(%id, ?side, %container, "taking up a migration of an earlier agent");
                // What has ended only has to be remembered, or told to the other node.
                let ended = match side {
                    Side::Source => records.contains(&Record::Done),
                    Side::Destination => matches!(
                        coordinator::standing(&records),
                        coordinator::Standing::Drained | coordinator::Standing::Ended
                    ),
                };
                let claim = if ended { None } else { node.claim(&container, &id).ok() };
                if claim.is_none() && !ended {
                    tracing::error!(%id, %container, "two journals are about the same container");
                    continue;
                }
                take_up(node, claim, journal, records);
            }
            _ => discard(journal.path()),
        }
    }
    // Those that are whole have their containers by now.
    damaged.into_iter().for_each(|damaged| damaged::take_up(node, damaged));
}

/// Checks that what an agent, perhaps of another version, has kept in a journal is of a form that this one knows.
fn understood(records: &[Record]) -> Result<(), serde_json::Error> {
    match records.first() {
        Some(Record::Begin { side: Side::Source, context, .. }) => Report::deserialize(context).map(drop),
        Some(Record::Begin { side: Side::Destination, context, .. }) => Context::deserialize(context).map(drop),
        _ => Ok(()),
    }
}

/// Whether there is anything of the migration that a journal is named after.
fn has_directory(node: &Node, path: &Path) -> bool {
    let id = path.file_stem().and_then(|stem| stem.to_str()?.parse::<MigrationId>().ok());
    id.is_some_and(|id| Layout::new(&node.config.run_dir, &id).root().exists())
}

/// Goes on with a migration as its journal says.
pub fn take_up(node: &Arc<Node>, claim: Option<Claim>, journal: Journal, records: Vec<Record>) {
    match records.first().cloned() {
        Some(Record::Begin { side: Side::Source, context, .. }) => {
            recover_source(node, claim, journal, records, context);
        }
        Some(Record::Begin { id, peer, context, .. }) => {
            recover_destination(node, claim, &id, &peer, journal, &records, context);
        }
        _ => tracing::error!(path = %journal.path().display(), "a journal that is none of a migration"),
    }
}

/// A journal without a first record: the agent died before it had done anything.
fn discard(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "an empty journal stays behind");
    }
}

fn recover_source(
    node: &Arc<Node>,
    claim: Option<Claim>,
    mut journal: Journal,
    records: Vec<Record>,
    context: serde_json::Value,
) {
    let report: Report = match serde_json::from_value(context) {
        Ok(report) => report,
        Err(error) => return tracing::error!(%error, "a journal's first record cannot be read"),
    };
    // One that has ended already, and only has to tell the other node so, keeps the report that it had.
    let live = node.registry.begin(node.registry.report(&report.id).unwrap_or(report));
    let its_node = Arc::clone(node);
    let id = live.read().id;
    let decided = records.contains(&Record::Commit);
    node.interrupts.insert(&id, &Interrupt::of_earlier_agent(decided));
    node.start_patiently("move", move || {
        let (node, place) = (its_node, journal.path().to_owned());
        let mut claim = claim;
        let done = coordinator::caught("a migration of an earlier agent", || {
            let mut port = SourceRun::taken_up(&node, live.clone(), decided);
            let ending = coordinator::recover(&mut port, &mut journal, &records);
            conclude(&node, &mut claim, &live, &mut port, journal, ending, Instant::now());
            Ok(())
        });
        if let Err(failure) = done {
            take_up_again(&node, claim, &live, None, &place, failure);
        }
        node.interrupts.remove(&id);
    });
}

fn recover_destination(
    node: &Arc<Node>,
    claim: Option<Claim>,
    id: &MigrationId,
    peer: &NodeName,
    journal: Journal,
    records: &[Record],
    context: serde_json::Value,
) {
    let context: Context = match serde_json::from_value(context) {
        Ok(context) => context,
        Err(error) => return tracing::error!(%id, %error, "a journal's first record cannot be read"),
    };
    let inbox = Arc::new(Inbox::default());
    let first = context.report(node, id, peer);
    let mut run = DestinationRun::new(node, id, peer, context.offer, Arc::clone(&inbox));
    let begun = coordinator::begun(records);
    run.tidied = begun.contains(&coordinator::DestinationStep::Tidy);
    let (at, phase) = match coordinator::standing(records) {
        coordinator::Standing::Undo => (Standing::Open, Phase::Undo),
        coordinator::Standing::Ready => (Standing::Ready, Phase::Ready),
        coordinator::Standing::Running => (Standing::Running, Phase::Drain),
        // Remembered until the source has asked, or cannot be interested any more.
        coordinator::Standing::Drained if !journal.older_than(REMEMBERED) => (Standing::Drained, Phase::Done),
        coordinator::Standing::Drained | coordinator::Standing::Ended => return close(journal, id),
    };
    if at == Standing::Running {
        run.open_left_gate();
    }
    if at != Standing::Open {
        // Its pager serves a container: an abort that comes now must not end it as one whose pages never came.
        // Nothing has come to it that could have failed.
        let _ = inbox.made_ready();
    }
    // One that has ended already, and only has to tell the other node so, keeps the report that it had.
    let report = node.registry.begin(node.registry.report(id).unwrap_or(Report { phase, ..first }));
    let arrival = Arrival { peer: peer.clone(), run, journal: Some(journal), begun, standing: at, claim, report };
    if at == Standing::Drained && arrival.report.read().outcome == Outcome::Running {
        // There was no room for it in the history.
        let ended = arrival.report.read().ended.is_some();
        arrival.end(Phase::Done, if ended { Outcome::Ended } else { Outcome::Moved }, None);
    }
    node.arrivals.insert(id, arrival, inbox);
    let undone = records.iter().find_map(|record| match record {
        Record::Undone { failure } => Some(failure.clone()),
        _ => None,
    });
    // The word that the copy is void may have come just before.
    let void = undone.is_some() && records.contains(&Record::Commit);
    let (its_node, id) = (Arc::clone(node), id.clone());
    match at {
        Standing::Open => node.start_patiently("undo", move || {
            let restarted = || Failure::new("the agent was restarted in the middle of the migration");
            let failure = undone.unwrap_or_else(restarted);
            undoing::go_on(&its_node, &id, &failure, void);
        }),
        Standing::Ready if records.contains(&Record::Kept) => {
            node.start_patiently("keep", move || damaged::keep(&its_node, &id));
        }
        Standing::Ready => tracing::info!(%id, %peer, "a stopped copy waits for the source's word"),
        Standing::Running => node.start_patiently("drain", move || {
            if let Some(found) = its_node.arrivals.get(&id) {
                draining::watch(&its_node, &id, &found);
            }
        }),
        Standing::Drained => {}
    }
}
