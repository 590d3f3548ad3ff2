//! Cancelling a migration or a group before its commit point, and what is left to do after it.

use std::sync::Arc;

use tranship_api::{ErrorKind, ServiceError};
use tranship_types::{GroupId, GroupReport, MemberOutcome, Outcome, Phase, Report};

use crate::interrupt::{Cause, Interrupt, Raised};
use crate::node::Node;

fn too_late(cause: String, remedy: impl Into<String>) -> ServiceError {
    ServiceError::new(ErrorKind::TooLate, cause, remedy)
}

/// The migration that is meant: the one with this id, or the one under way of a container of this name.
fn find(node: &Node, named: &str) -> Result<Report, ServiceError> {
    let reports = node.registry.reports();
    let by_id = reports.iter().find(|r| r.id.as_str() == named);
    let under_way = || reports.iter().find(|r| r.container == named && r.outcome == Outcome::Running);
    by_id.or_else(under_way).cloned().ok_or_else(|| {
        ServiceError::new(
            ErrorKind::NotFound,
            format!("no migration {named:?} is known on this node, nor is one of a container of that name under way"),
            "see `tranship status`",
        )
    })
}

/// Cancels a migration. When this returns its steps are being undone; its report tells when that is done.
pub fn cancel(node: &Arc<Node>, named: &str) -> Result<Report, ServiceError> {
    let report = find(node, named)?;
    let Report { id, container, source, destination, .. } = &report;
    let nothing = |at| {
        Err(too_late(format!("migration {id} has ended: {container} runs on node {at}"), "there is nothing to cancel"))
    };
    match report.outcome {
        Outcome::Moved => return Err(ended(&report)),
        Outcome::Ended => {
            let cause =
                format!("migration {id} has ended: {container} was moved to node {destination}, and ended there");
            return Err(too_late(cause, "there is nothing to cancel"));
        }
        Outcome::Failed | Outcome::GivenUp | Outcome::Cancelled => return nothing(source),
        Outcome::Running if *source != node.config.node => {
            let remedy = format!("run `tranship cancel {container}` on node {source}");
            let cause = format!("node {destination} receives {container}; node {source} decides about its move");
            return Err(ServiceError::new(ErrorKind::Blocked, cause, remedy));
        }
        Outcome::Running => {}
    }
    match node.interrupts.get(id).map(|interrupt| interrupt.raise(Cause::Cancelled)) {
        Some(Raised::Now) => {
            tracing::info!(%id, %container, phase = %report.phase, "cancelled");
            Ok(report)
        }
        Some(Raised::Before) => Ok(report),
        Some(Raised::TooLate) | None => Err(past_commit(&node.registry.report(id).unwrap_or(report))),
    }
}

/// Why a migration that has committed is not cancelled, and what can be done instead.
fn past_commit(report: &Report) -> ServiceError {
    let Report { id, container, source, destination, .. } = report;
    if report.outcome == Outcome::Moved {
        return ended(report);
    }
    let state = match report.phase {
        Phase::Damaged => {
            return too_late(
                format!("the journal of migration {id} is damaged, and what was decided is not known"),
                format!("run `tranship recover {id} --keep-here` or `tranship recover {id} --keep-there`"),
            );
        }
        Phase::Undo | Phase::Undone => {
            return too_late(format!("migration {id} is being undone already"), format!("see `tranship status {id}`"));
        }
        Phase::Drain => format!("{container} runs on node {destination}, and its last pages follow"),
        Phase::Release | Phase::Done => {
            format!("{container} runs on node {destination}, and its original is being removed")
        }
        _ => format!("{container} is being resumed on node {destination}"),
    };
    let back = format!("then move it back with `tranship move {container} --to {source}` on node {destination}");
    too_late(
        format!("migration {id} is past its commit point: {state}"),
        format!(
            "wait for it (`tranship status --follow {id}`), {back}; if node {destination} is lost, run `tranship recover {container} \
             --destination-lost`, with --host-is-down if its host is known to be down"
        ),
    )
}

fn ended(report: &Report) -> ServiceError {
    let Report { id, container, source, destination, .. } = report;
    too_late(
        format!("migration {id} has ended: {container} runs on node {destination}"),
        format!("move it back with `tranship move {container} --to {source}` on node {destination}"),
    )
}

/// Cancels what is not decided of a group: members whose migrations have not begun do not begin, those under way are undone. Where all
/// move or none does, all are undone, or it is too late for all.
pub fn cancel_group(node: &Arc<Node>, id: &GroupId) -> Result<GroupReport, ServiceError> {
    let report = node.groups.report(id).ok_or_else(|| ServiceError::no_such_group(id))?;
    if report.outcome != Outcome::Running {
        let moved = report.members.iter().filter(|m| m.outcome == MemberOutcome::Moved).count();
        return Err(too_late(
            format!("group {id} has ended: {moved} of its {} containers have moved", report.members.len()),
            "there is nothing to cancel; move containers back with `tranship move`",
        ));
    }
    // After a restart of the agent there are only those whose migrations had begun.
    let of_members = || report.members.iter().filter_map(|m| node.interrupts.get(m.migration.as_ref()?)).collect();
    let members: Vec<Arc<Interrupt>> = node.interrupts.of_group(id).unwrap_or_else(of_members);
    // What depends on a member that is cancelled is cancelled, too, and not skipped.
    let raised = Interrupt::raise_all(&members, Cause::Cancelled);
    let undone = raised.contains(&Raised::Now) || members.iter().any(|one| one.is_raised());
    if !undone {
        return Err(too_late(
            format!("every container of group {id} that still moves is past its commit point"),
            format!("wait for it (`tranship status --follow {id}`); then move containers back with `tranship move`"),
        ));
    }
    tracing::info!(%id, members = raised.iter().filter(|r| **r == Raised::Now).count(), "group cancelled");
    Ok(report)
}
