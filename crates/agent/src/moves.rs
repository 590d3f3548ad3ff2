//! Runs migrations of which this node is the source, and takes up what an earlier agent has left.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tranship_api::MoveRequest;
use tranship_coordinator::{self as coordinator, Ending, Failure, Journal, Record};
use tranship_types::{MigrationId, NodeName, Outcome, Phase, Report, Side};

use crate::arrivals::{Arrival, Inbox, Standing};
use crate::destination::DestinationRun;
use crate::node::{Claim, Node};
use crate::peers;
use crate::registry::{LiveReport, unix_ms};
use crate::source::SourceRun;

/// For how long an ended arrival is remembered for a source that has not asked.
const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Starts a migration; it runs on a thread of its own.
pub fn start(node: &Arc<Node>, claim: Claim, id: MigrationId, request: &MoveRequest) -> Report {
    let source = node.config.node.clone();
    let options = request.options;
    let (container, destination) = (request.container.clone(), request.to.clone());
    let report = Report { options, ..Report::new(id, container, source, destination, options.mode, unix_ms()) };
    let live = node.registry.begin(report.clone());
    let node = Arc::clone(node);
    let began = Instant::now();
    std::thread::spawn(move || run(&node, claim, &live, began));
    report
}

fn begin(report: &Report) -> Record {
    Record::Begin {
        id: report.id.clone(),
        side: Side::Source,
        container: report.container.clone(),
        peer: report.destination.clone(),
        context: serde_json::to_value(report).unwrap_or_default(),
    }
}

fn run(node: &Arc<Node>, claim: Claim, live: &LiveReport, began: Instant) {
    let report = live.read();
    let mut journal = match Journal::create(&node.journals(), &report.id, &begin(&report)) {
        Ok(journal) => journal,
        Err(error) => {
            drop(claim);
            return live.end(|r| {
                r.outcome = Outcome::Failed;
                r.phase = Phase::Undone;
                r.error = Some(error.to_string());
                r.total_ms = Some(began.elapsed().as_secs_f64() * 1e3);
            });
        }
    };
    let mut port = SourceRun::new(node, live.clone());
    let ending = coordinator::migrate(&mut port, &mut journal, &node.faults);
    conclude(node, Some(claim), live, &mut port, journal, ending, began);
}

/// Puts a migration's end on record, and sees to it that the destination learns of an undone one.
fn conclude(
    node: &Arc<Node>,
    claim: Option<Claim>,
    live: &LiveReport,
    port: &mut SourceRun,
    mut journal: Journal,
    ending: Ending,
    began: Instant,
) {
    let id = live.read().id;
    let mut ending = ending;
    while let Ending::Undone { leftovers, .. } = &ending
        && !leftovers.is_empty()
    {
        tracing::error!(%id, ?leftovers, "could not be undone; it is tried again");
        live.change(|r| r.leftovers.clone_from(leftovers));
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
            drop(claim);
            live.end(|r| {
                r.outcome = Outcome::Moved;
                r.phase = Phase::Done;
                r.error = None;
                r.total_ms = r.total_ms.or(total_ms);
            });
            // The destination remembers the migration until it has been asked.
            if until_told(node, &id, || port.confirm_drained()) {
                close(journal, &id);
            }
        }
        Ending::Undone { failure, leftovers } => {
            drop(claim);
            live.end(|r| {
                r.outcome = Outcome::Failed;
                r.phase = Phase::Undone;
                r.error = Some(failure.message);
                r.blockers = failure.blockers;
                r.leftovers = leftovers;
                r.total_ms = r.total_ms.or(total_ms);
            });
            // The container runs here; what is left is that the destination may still hold a stopped copy.
            if until_told(node, &id, || port.confirm_abort()) {
                close(journal, &id);
            }
        }
        Ending::Suspended => {
            live.change(|r| r.error = Some("the agent is stopping; its next start goes on".to_owned()));
        }
    }
}

/// Tells the destination something until it has heard; false if the agent is stopping before that.
fn until_told(node: &Node, id: &MigrationId, mut tell: impl FnMut() -> Result<(), Failure>) -> bool {
    let mut wait = Duration::from_millis(50);
    while let Err(failure) = tell() {
        tracing::info!(%id, %failure, "the destination does not know yet that it is over");
        if !node.pause(wait) {
            return false;
        }
        wait = (wait * 2).min(Duration::from_secs(5));
    }
    true
}

fn close(journal: Journal, id: &MigrationId) {
    if let Err(error) = journal.close() {
        tracing::warn!(%id, %error, "a journal stays behind");
    }
}

/// Takes up everything that an earlier agent has left in its journals. Containers are claimed before this returns; the
/// work itself goes on in threads.
pub fn recover(node: &Arc<Node>) {
    let mut journals: Vec<_> =
        Journal::list(&node.journals()).into_iter().map(|path| (Journal::open(&path), path)).collect();
    // Where two are about the same container, the one that was decided tells where it is.
    let decided = |(opened, _): &(Result<(Journal, Vec<Record>), _>, _)| {
        opened.as_ref().is_ok_and(|(_, records)| records.contains(&Record::Commit))
    };
    journals.sort_by_key(|journal| !decided(journal));
    for (opened, path) in journals {
        match opened {
            Ok((journal, records)) => match records.first().cloned() {
                Some(Record::Begin { id, side, container, peer, context }) => {
                    tracing::info!(%id, ?side, %container, "taking up a migration of an earlier agent");
                    // What has ended only has to be remembered, or told to the other node.
                    let ended = records.contains(&Record::Done);
                    let claim = if ended { None } else { node.claim(&container, &id).ok() };
                    if claim.is_none() && !ended {
                        tracing::error!(%id, %container, "two journals are about the same container");
                        continue;
                    }
                    match side {
                        Side::Source => recover_source(node, claim, journal, records, context),
                        Side::Destination => {
                            recover_destination(node, claim, &id, &peer, journal, &records, context);
                        }
                    }
                }
                _ => discard(&path),
            },
            Err(error) => tracing::error!(%error, "a journal cannot be read"),
        }
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
    let node = Arc::clone(node);
    std::thread::spawn(move || {
        let mut port = SourceRun::new(&node, live.clone());
        // Whether the offer left is not on record; asking costs nothing.
        port.offered = true;
        let ending = coordinator::recover(&mut port, &mut journal, &records);
        conclude(&node, claim, &live, &mut port, journal, ending, Instant::now());
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
    let offer = match serde_json::from_value(context) {
        Ok(offer) => offer,
        Err(error) => return tracing::error!(%id, %error, "a journal's first record cannot be read"),
    };
    let inbox = Arc::new(Inbox::default());
    let mut run = DestinationRun::new(node, id, peer, offer, Arc::clone(&inbox));
    let standing = coordinator::standing(records);
    let begun = coordinator::begun(records);
    run.tidied = begun.contains(&coordinator::DestinationStep::Tidy);
    let drains = begun.iter().any(|step| coordinator::DestinationStep::DRAIN.contains(step));
    let at = match standing {
        // It runs, whatever became of it since: the steps of the commit must not be done again.
        coordinator::Standing::Committed if drains => Standing::Running,
        coordinator::Standing::Ready | coordinator::Standing::Committed => Standing::Ready,
        coordinator::Standing::Undo => Standing::Open,
        // Remembered until the source has asked, or cannot be interested any more.
        coordinator::Standing::Ended if records.contains(&Record::Commit) && !journal.older_than(REMEMBERED) => {
            Standing::Drained
        }
        coordinator::Standing::Ended => return close(journal, id),
    };
    if at != Standing::Open {
        // Its pager serves a container: an abort that comes now must not end it as one whose pages never came.
        inbox.made_ready();
    }
    let arrival = Arrival { peer: peer.clone(), run, journal: Some(journal), begun, standing: at, claim };
    node.arrivals.insert(id, arrival, inbox);
    let (node, id) = (Arc::clone(node), id.clone());
    match standing {
        coordinator::Standing::Committed if drains => drop(std::thread::spawn(move || peers::resume_drain(&node, &id))),
        coordinator::Standing::Committed => drop(std::thread::spawn(move || {
            while matches!(peers::commit(&node, &id), tranship_wire::message::Response::Failed { .. })
                && node.pause(Duration::from_secs(1))
            {}
        })),
        coordinator::Standing::Undo => drop(std::thread::spawn(move || {
            let failure = Failure::new("the agent was restarted in the middle of the migration");
            let undo = || match peers::abort(&node, &id, &failure) {
                tranship_wire::message::Response::Aborted { leftovers } => leftovers.is_empty(),
                _ => true,
            };
            while !undo() && node.pause(Duration::from_secs(1)) {}
        })),
        _ => tracing::info!(%id, %peer, "a stopped copy waits for the source's word"),
    }
}
