//! What there is of a migration with a damaged journal: on this node, and by the other node's answer.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tranship_coordinator::Failure;
use tranship_coordinator::damage::{DestinationRecords, FromDestination, FromSource, Original, Replica, SourceRecords};
use tranship_criu::front;
use tranship_engine::{EngineError, State};
use tranship_transport::Link;
use tranship_types::{BlockerKind, EngineName, MigrationId, NodeName, Outcome, Phase, Report, Side};
use tranship_wire::message::{Known, Request, Response};
use tranship_wire::{Purpose, Versions};

use super::{DamagedMove, First};
use crate::arrivals::{Context, Standing, lock};
use crate::layout::{Layout, Role};
use crate::node::{Node, failed, is_alive};

/// How long a node that takes calls may take to say what it knows.
const ANSWER: Duration = Duration::from_secs(5);
/// How long it may take to undo.
const UNDO: Duration = Duration::from_secs(15);

/// The original here.
pub fn original(node: &Node, id: &MigrationId, first: &First) -> Original {
    let report = Report::deserialize(&first.context).ok();
    let engine = node.engine(report.and_then(|report| report.options.engine).unwrap_or(EngineName::Runc));
    let container = match engine.inspect(&first.container) {
        Ok(container) => container,
        Err(EngineError::NoSuchContainer { .. }) => return Original::Gone,
        Err(_) => return Original::Unknown,
    };
    let layout = Layout::new(&node.config.run_dir, id);
    let held = container.freezer.is_held();
    match std::fs::read_to_string(layout.original()) {
        Ok(made) if made == container.created => {}
        // The note is made before the freeze.
        Err(error)
            if error.kind() == std::io::ErrorKind::NotFound && layout.root().exists() && matches!(held, Ok(false)) => {}
        _ => return Original::Other,
    }
    match (container.state, held) {
        (State::Stopped, _) => Original::Gone,
        (_, Ok(true)) => Original::Frozen,
        (_, Ok(false)) => Original::Runs,
        (_, Err(_)) => Original::Unknown,
    }
}

/// The copy here.
pub fn replica(node: &Node, one: &DamagedMove, first: &First) -> Replica {
    let id = &one.id;
    let layout = Layout::new(&node.config.run_dir, id);
    let resumed = front::resumed_init(&layout.front_socket(Role::Restore));
    // Its engine may have died before it recorded the start.
    if resumed.is_some_and(is_alive) {
        return Replica::Runs;
    }
    let name = Context::deserialize(&first.context).ok().and_then(|context| context.offer.engine.parse().ok());
    let engine = node.engine(name.unwrap_or(EngineName::Runc));
    match engine.inspect(&first.container) {
        Ok(container) if !engine.is_made_from(&container, &node.bundle(&first.container)) => Replica::Gone,
        Ok(container) if container.state == State::Stopped => Replica::Gone,
        // The directory goes only when there is nothing left to do, or with the host's memory, in which the copy was.
        Ok(container) if !layout.root().exists() && (container.state == State::Created || one.is_before_boot()) => {
            Replica::Gone
        }
        Ok(_) if resumed.is_some() || !layout.root().exists() => Replica::Runs,
        Ok(_) => Replica::Held,
        Err(EngineError::NoSuchContainer { .. }) => Replica::Gone,
        Err(_) => Replica::Unknown,
    }
}

/// What the other node knows; `None` if it does not answer.
fn known(node: &Node, id: &MigrationId, first: &First, of: Side) -> Option<Known> {
    let mut link = node.dial(&first.peer, Purpose::Control, Some(id)).ok()?;
    if link.version() < Versions::KNOWN {
        tracing::warn!(%id, peer = %first.peer, "its agent is too old to say what it knows of a migration; update it");
        return None;
    }
    link.set_timeout(Some(ANSWER)).ok()?;
    tranship_wire::write_message(&mut link, &Request::Known { of, container: first.container.clone() }).ok()?;
    match tranship_wire::read_message(&mut link).ok()? {
        Response::Known { known } => Some(known),
        _ => Some(Known::Unknown),
    }
}

/// What the destination knows.
pub fn destination(node: &Node, id: &MigrationId, first: &First) -> FromDestination {
    match known(node, id, first, Side::Destination) {
        None => FromDestination::Silent,
        Some(Known::Nothing) => FromDestination::Nothing,
        Some(Known::NeverReady) => FromDestination::NeverReady,
        Some(Known::Stopped) => FromDestination::Stopped,
        Some(Known::Ready) => FromDestination::Ready,
        Some(Known::Running) => FromDestination::Running,
        Some(Known::Lost) => FromDestination::Lost,
        Some(Known::Undecided | Known::Committed | Known::TakenBack | Known::Unknown) => FromDestination::Unknown,
    }
}

/// What the source knows.
pub fn source(node: &Node, id: &MigrationId, first: &First) -> FromSource {
    match known(node, id, first, Side::Source) {
        None => FromSource::Silent,
        Some(Known::Nothing) => FromSource::Nothing,
        Some(Known::Undecided) => FromSource::Undecided,
        Some(Known::Committed) => FromSource::Committed,
        Some(Known::TakenBack) => FromSource::TakenBack,
        Some(_) => FromSource::Unknown,
    }
}

/// Has the destination abort; when this returns, it lets no copy run any more.
pub fn abort(node: &Node, id: &MigrationId, peer: &NodeName) -> Result<(), Failure> {
    let mut link = node.dial(peer, Purpose::Control, Some(id))?;
    link.set_timeout(Some(UNDO)).map_err(failed)?;
    tranship_wire::write_message(&mut link, &Request::Abort).map_err(failed)?;
    match tranship_wire::read_message(&mut link).map_err(failed)? {
        Response::Aborted { leftovers } if leftovers.is_empty() => Ok(()),
        Response::Aborted { leftovers } => {
            Err(Failure::new(format!("node {peer} has not undone all of it: {}", leftovers.join("; "))))
        }
        Response::Failed { message, .. } => Err(Failure::new(format!("node {peer} does not abort: {message}"))),
        other => Err(failed(format!("node {peer} gave an answer that does not fit: {other:?}"))),
    }
}

/// Answers the other node. Waits for nobody who decides about a damaged journal, since that one may be asking this.
pub fn answer(node: &Arc<Node>, id: &MigrationId, peer: &NodeName, of: Side, container: &str) -> Response {
    let known = match (node.damaged.get(id), of) {
        (Some(one), _) => of_damaged(node, &one, peer, of),
        (None, Side::Source) => of_source(node, id, peer),
        (None, Side::Destination) => of_destination(node, id, container),
    };
    tracing::info!(%id, %peer, ?of, ?known, "another node's journal is damaged, and it asks what is known here");
    Response::Known { known }
}

fn of_damaged(node: &Node, one: &DamagedMove, peer: &NodeName, of: Side) -> Known {
    let Some(first) = one.first.as_ref().filter(|first| first.side == of && first.peer == *peer) else {
        return Known::Unknown;
    };
    match of {
        Side::Source => {
            let own = SourceRecords::of(&one.damaged);
            // That it was committed may have been taken back in what is damaged.
            if own.undone || own.given_up { Known::TakenBack } else { Known::Unknown }
        }
        Side::Destination => {
            let own = DestinationRecords::of(&one.damaged);
            match replica(node, one, first) {
                Replica::Runs => Known::Running,
                Replica::Unknown => Known::Unknown,
                _ if own.running => Known::Unknown,
                _ if own.undone => Known::NeverReady,
                Replica::Held if own.ready => Known::Ready,
                Replica::Held | Replica::Gone => Known::Stopped,
            }
        }
    }
}

fn of_source(node: &Node, id: &MigrationId, peer: &NodeName) -> Known {
    let Some(report) = node.registry.report(id).filter(|report| report.source == node.config.node) else {
        // An agent that lost its state has not decided anything that it could tell.
        let left = Layout::new(&node.config.run_dir, id).root().exists();
        return if left { Known::Unknown } else { Known::Nothing };
    };
    if report.destination != *peer {
        return Known::Unknown;
    }
    match (report.outcome, report.phase) {
        (Outcome::Moved | Outcome::Ended, _) => Known::Committed,
        (Outcome::Failed | Outcome::GivenUp | Outcome::Cancelled, _) => Known::TakenBack,
        (Outcome::Running, Phase::Resume | Phase::Drain | Phase::Release | Phase::Done) => Known::Committed,
        (Outcome::Running, Phase::Undo | Phase::Undone) => Known::TakenBack,
        (Outcome::Running, Phase::Damaged | Phase::Unknown) => Known::Unknown,
        (Outcome::Running, _) => Known::Undecided,
    }
}

fn of_destination(node: &Node, id: &MigrationId, container: &str) -> Known {
    if let Some(found) = node.arrivals.get(id) {
        let arrival = lock(&found);
        return match arrival.standing {
            Standing::Open => Known::NeverReady,
            Standing::Ready | Standing::Running if arrival.run.is_lost() => Known::Lost,
            // Its journal could not be written, or its agent died before that.
            Standing::Ready if arrival.run.was_let_go() => Known::Running,
            Standing::Ready => Known::Ready,
            Standing::Running | Standing::Drained => Known::Running,
        };
    }
    if Layout::new(&node.config.run_dir, id).root().exists() {
        return Known::Unknown;
    }
    if let Some(report) = node.registry.report(id).filter(|report| report.destination == node.config.node) {
        return match report.outcome {
            Outcome::Moved | Outcome::Ended => Known::Running,
            Outcome::Failed | Outcome::GivenUp | Outcome::Cancelled => Known::NeverReady,
            Outcome::Running => Known::Unknown,
        };
    }
    // An engine that does not answer may have it.
    match node.find(container, None) {
        Err(blocker) if blocker.kind == BlockerKind::NoSuchContainer => Known::Nothing,
        _ => Known::Unknown,
    }
}
