//! After the resume: until the last page is in place.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tranship_coordinator::{self as coordinator, Failure};
use tranship_engine::Container;
use tranship_memory::huge;
use tranship_sys::threads;
use tranship_types::{HugePages, Latencies, MigrationId, Outcome, Phase};
use tranship_wire::message::Response;

use super::{arrival, failure_response};
use crate::arrivals::{Arrival, Standing, lock};
use crate::demand;
use crate::node::Node;
use crate::registry::LiveReport;

/// How often it is said how many pages are missing after the resume.
const SAY_DRAINING: Duration = Duration::from_millis(250);
/// How often that is put on record.
const SLOW_DRAIN: Duration = Duration::from_secs(5);

/// After the resume: waits for the last page, however long that takes, without keeping anybody from the arrival.
pub(super) fn drain_in_time(node: &Arc<Node>, id: &MigrationId, found: &Mutex<Arrival>) {
    let report = lock(found).report.clone();
    let mut told = Instant::now();
    while let Some(status) = demand::still_draining(node, id, SAY_DRAINING) {
        if told.elapsed() > SLOW_DRAIN {
            tracing::info!(%id, ?status, "pages are still missing");
            told = Instant::now();
        }
        report.change(|r| {
            r.progress.remaining_bytes = status.remote_bytes;
            r.progress.moved_bytes = r.progress.memory_bytes.saturating_sub(status.remote_bytes);
            r.progress.remote_faults = status.remote_faults.count();
        });
        if !node.pause(Duration::ZERO) {
            return;
        }
    }
    // The source hears of a failure when it asks.
    let _ = coordinator::caught("the drain", || drain(node, id, found));
}

/// Puts it on record that the last page is in place, and removes what only the migration needed.
fn drain(node: &Arc<Node>, id: &MigrationId, found: &Mutex<Arrival>) -> Result<(), Failure> {
    let mut arrival = lock(found);
    if arrival.standing != Standing::Running {
        return Ok(());
    }
    let Arrival { run, journal: Some(journal), report, .. } = &mut *arrival else { return Ok(()) };
    match coordinator::drain(run, journal, &node.faults) {
        Ok(()) => {
            report.change(|r| r.ways.extend(run.remarks.clone()));
            arrival.standing = Standing::Drained;
            arrival.claim = None;
            arrival.end(Phase::Done, Outcome::Moved, None);
            tracing::info!(%id, "drained");
            let (list, container) = (std::mem::take(&mut arrival.run.huge_pages), arrival.run.own_container());
            if let Some(container) = container.filter(|_| !list.is_empty()) {
                let (node, report) = (Arc::clone(node), arrival.report.clone());
                let started = threads::start("huge pages", move || make_huge_pages(&node, &container, &list, &report));
                started.err().into_iter().for_each(|error| tracing::warn!(%id, %error, "it gets no huge pages again"));
            }
        }
        Err(failure) => {
            tracing::error!(%id, %failure, "the migration could not be finished; it is tried again when the source asks");
            return Err(Failure::new(format!("on node {}, {failure}", node.config.node)));
        }
    }
    Ok(())
}

/// The container runs, and nobody waits for it: it gets the huge pages again that it had.
fn make_huge_pages(node: &Node, container: &Container, list: &[HugePages], report: &LiveReport) {
    // Until it moves on.
    let go_on = |time| node.pause(time) && node.claimed_by(&container.name).is_none();
    let made = huge::make_anew(list, &container.processes().unwrap_or_default(), go_on);
    report.end(|r| r.huge_pages = Some(made));
}

/// The source asks whether every page is in place. If the original is `released` it is the last question: with its answer,
/// this node may forget the migration. Until then the source may give it up.
pub(super) fn drained(node: &Arc<Node>, id: &MigrationId, released: bool) -> Response {
    let found = match arrival(node, id) {
        Ok(found) => found,
        Err(_) if released => {
            return Response::Drained {
                faults: 0,
                remote_faults: Latencies::default(),
                peak_bytes: 0,
                remarks: Vec::new(),
            };
        }
        // Whoever does not know it can have lost every page.
        Err(failure) => return failure_response(failure),
    };
    if let Some(status) = demand::still_draining(node, id, SAY_DRAINING) {
        return Response::Draining {
            remote_bytes: status.remote_bytes,
            pending_bytes: status.pending_bytes,
            waiting: status.waiting,
            remote_faults: status.remote_faults,
        };
    }
    let done = drain(node, id, &found);
    let arrival = lock(&found);
    if arrival.standing != Standing::Drained {
        return failure_response(done.err().unwrap_or_else(|| Failure::new("not every page is in place yet")));
    }
    let (status, remarks) = (arrival.run.drained.clone().unwrap_or_default(), arrival.run.remarks.clone());
    if released {
        node.arrivals.forget(id, arrival);
    }
    Response::Drained {
        faults: status.faults,
        remote_faults: status.remote_faults,
        peak_bytes: status.peak_bytes,
        remarks,
    }
}

/// Goes on draining after a restart.
pub fn resume_drain(node: &Arc<Node>, id: &MigrationId) {
    if let Some(found) = node.arrivals.get(id) {
        drain_in_time(node, id, &found);
    }
}
