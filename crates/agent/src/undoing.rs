//! The destination's way back: a failure before the decision, the source's word that it is off, or that a copy which may
//! run is void.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tranship_coordinator::damage::FromSource;
use tranship_coordinator::{self as coordinator, Failure};
use tranship_types::{MigrationId, Outcome, Phase};
use tranship_wire::message::{Holding, Response};

use crate::arrivals::{Arrival, Standing, lock};
use crate::damaged;
use crate::demand;
use crate::layout::Layout;
use crate::node::Node;
use crate::peers::failure_response;

/// Lets whoever waits for memory under the arrival's lock wait no longer; neither a criu whose tasks wait for pages that
/// nobody will send, and which nobody will need.
fn interrupt(node: &Node, id: &MigrationId, failure: &Failure) {
    if let Some(inbox) = node.arrivals.inbox(id) {
        inbox.tmpfs.fail(failure);
        inbox.trees.fail(failure);
        inbox.log.fail(failure);
        inbox.ended(Err(failure.clone()));
        inbox.need_no_memory();
        if !inbox.is_ready() {
            demand::give_up(node, id);
        }
    }
}

/// The source's word that a migration which was not decided is off.
pub fn called_off(node: &Arc<Node>, id: &MigrationId) -> Response {
    let failure = Failure::new("the source gave the migration up");
    interrupt(node, id, &failure);
    abort(node, id, &failure)
}

/// The word, or the need, to undo before the decision. What nobody knows was undone before.
pub fn abort(node: &Arc<Node>, id: &MigrationId, failure: &Failure) -> Response {
    if let Err(failure) = damaged::told(node, id, FromSource::TakenBack) {
        return failure_response(failure);
    }
    let Some(found) = node.arrivals.get(id) else {
        // Without its journal nobody knows what there is of it.
        let root = Layout::new(&node.config.run_dir, id).root().to_owned();
        return match root.exists() {
            true => failure_response(Failure::new(format!(
                "node {} has no journal of migration {id}, but {} is there; see `tranship doctor` there",
                node.config.node,
                root.display()
            ))),
            false => Response::Aborted { leftovers: Vec::new() },
        };
    };
    node.arrivals.inbox(id).iter().for_each(|inbox| inbox.slot.give_back());
    let arrival = lock(&found);
    let runs = match arrival.standing {
        Standing::Open => false,
        Standing::Ready => arrival.run.was_let_go(),
        Standing::Running | Standing::Drained => true,
    };
    if runs {
        return failure_response(Failure::new("the container runs here already"));
    }
    Response::Aborted { leftovers: undo(node, id, arrival, failure, false) }
}

/// The link to the source of a migration that was open has ended.
pub fn link_lost(node: &Arc<Node>, id: &MigrationId) {
    let failure = Failure::new("the link to the source was lost");
    let undone = coordinator::caught("undoing", || {
        abort(node, id, &failure);
        Ok(())
    });
    undone
        .err()
        .into_iter()
        .for_each(|failure| tracing::error!(%id, %failure, "it is tried again when the source asks"));
}

/// The source's word that the migration was given up after the decision: the original runs again, and the copy must not,
/// whatever has become of it.
pub fn void(node: &Arc<Node>, id: &MigrationId) -> Response {
    if let Err(failure) = damaged::told(node, id, FromSource::TakenBack) {
        return failure_response(failure);
    }
    let Some(found) = node.arrivals.get(id) else { return Response::Voided { ran: false, leftovers: Vec::new() } };
    let failure = Failure::new(format!(
        "the operator of the source has given node {} up as lost, and the container runs there again: the copy here was void, \
         and is removed",
        node.config.node
    ));
    interrupt(node, id, &failure);
    let mut arrival = lock(&found);
    if arrival.standing == Standing::Drained {
        if is_superseded(node, &arrival) {
            // It was that copy once; what bears its name now came here in another way.
            node.arrivals.forget(id, arrival);
            return Response::Voided { ran: false, leftovers: Vec::new() };
        }
        arrival.claim = match node.claim(arrival.run.container(), id) {
            Ok(claim) => Some(claim),
            Err(blocker) => return failure_response(Failure::new(blocker.to_string())),
        };
    }
    let ran = arrival.run.was_let_go();
    // What drains it finds it changed, and lets it be; if the link breaks it is undone all the same.
    arrival.standing = Standing::Open;
    Response::Voided { ran, leftovers: undo(node, id, arrival, &failure, true) }
}

/// Whether the container was moved here, or from here, again.
fn is_superseded(node: &Node, arrival: &Arrival) -> bool {
    let own = arrival.report.read();
    node.registry.reports().iter().any(|r| {
        r.container == own.container
            && r.id != own.id
            && matches!(r.outcome, Outcome::Moved | Outcome::Ended)
            && r.started_unix_ms >= own.started_unix_ms
    })
}

/// What an earlier agent has begun to undo, or left open, is undone until nothing is left.
pub fn go_on(node: &Arc<Node>, id: &MigrationId, failure: &Failure, void: bool) {
    while let Some(found) = node.arrivals.get(id) {
        let undone = coordinator::caught("undoing", || Ok(undo(node, id, lock(&found), failure, void).is_empty()));
        if undone == Ok(true) || !node.pause(Duration::from_secs(1)) {
            return;
        }
    }
}

/// Undoes all that was begun, and forgets the migration; returns what could not be undone.
fn undo(
    node: &Node,
    id: &MigrationId,
    mut arrival: MutexGuard<'_, Arrival>,
    failure: &Failure,
    void: bool,
) -> Vec<String> {
    let Arrival { run, journal: Some(journal), begun, report, .. } = &mut *arrival else { return Vec::new() };
    tracing::info!(%id, container = run.container(), %failure, "undoing");
    report.change(|r| r.phase = Phase::Undo);
    let leftovers = coordinator::abort(run, journal, begun, failure);
    if leftovers.is_empty() {
        let outcome = if void { Outcome::GivenUp } else { Outcome::Failed };
        arrival.end(Phase::Undone, outcome, Some(failure.message.clone()));
        node.arrivals.forget(id, arrival);
    } else {
        tracing::error!(%id, ?leftovers, "could not be undone; it will be tried again");
        report.change(|r| r.leftovers.clone_from(&leftovers));
    }
    leftovers
}

/// What there is here of the container.
pub fn holding(node: &Node, id: &MigrationId) -> Response {
    if let Some(one) = node.damaged.get(id) {
        return failure_response(Failure::new(one.explanation()));
    }
    // While the drain goes on, nobody need wait for who works on the arrival.
    if let Some(lost) = node.arrivals.inbox(id).and_then(|inbox| inbox.drain.goes_on()) {
        return Response::Holding { holding: if lost { Holding::Lost } else { Holding::Running } };
    }
    let holding = node.arrivals.get(id).map_or(Holding::Nothing, |found| {
        let arrival = lock(&found);
        match arrival.standing {
            Standing::Ready | Standing::Running if arrival.run.is_lost() => Holding::Lost,
            Standing::Open | Standing::Ready => Holding::Stopped,
            Standing::Running | Standing::Drained => Holding::Running,
        }
    });
    Response::Holding { holding }
}
