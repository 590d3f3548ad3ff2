//! The operator's word that a destination is lost for good, and when it is refused.
//!
//! ```text
//!   before the decision ──────────▶ refused: it is undone by itself
//!   resume, drain: what does the destination say?
//!     ├─ a copy runs, or is held ─▶ refused: the move goes on by itself
//!     ├─ its copy is lost ────────▶ given up
//!     ├─ it knows nothing of it ──▶ given up if the operator knows that its host was down
//!     └─ nothing ─────────────────▶ given up; if the container was heard to run there, likewise
//!   release, ended ───────────────▶ refused: there is no original any more, or it runs
//! ```
//!
//! The word is left here for the thread that has the migration, which takes it when its next attempt fails. A destination
//! that answers meanwhile makes it void.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tranship_api::{ErrorKind, RecoverRequest, ServiceError};
use tranship_coordinator::Failure;
use tranship_transport::Link;
use tranship_types::{MigrationId, Outcome, Phase, Report};
use tranship_wire::Purpose;
use tranship_wire::message::{Holding, Request, Response};

use crate::damaged;
use crate::node::{Node, failed};

/// How long a destination that takes calls may take to say what it holds.
const ANSWER: Duration = Duration::from_secs(5);

/// Words that no migration has taken yet, each with the phase in which it was said.
#[derive(Debug, Default)]
pub struct Words(Mutex<HashMap<MigrationId, (Phase, Failure)>>);

impl Words {
    fn map(&self) -> MutexGuard<'_, HashMap<MigrationId, (Phase, Failure)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the word for a migration; one that was said in another phase counts no more.
    pub fn take(&self, id: &MigrationId, phase: Phase) -> Option<Failure> {
        self.map().remove(id).filter(|(said_in, _)| *said_in == phase).map(|(_, failure)| failure)
    }

    /// The destination has answered.
    pub fn forget(&self, id: &MigrationId) {
        self.map().remove(id);
    }
}

fn refused(cause: String, remedy: impl Into<String>) -> ServiceError {
    ServiceError::new(ErrorKind::Blocked, cause, remedy)
}

/// The migration that is meant: by its id, or the one under way of a container.
fn find(node: &Node, named: &str) -> Result<Report, ServiceError> {
    let meant = |r: &Report| r.id.as_str() == named || (r.container == named && r.outcome == Outcome::Running);
    node.registry.reports().into_iter().find(meant).ok_or_else(|| {
        ServiceError::new(
            ErrorKind::NotFound,
            format!("no migration {named:?} is known on this node, nor is one of a container of that name under way"),
            "see `tranship status`",
        )
    })
}

/// The migrations that share one network namespace with this one, this one among them: none of them is given up alone.
fn unit(node: &Node, report: &Report) -> Vec<Report> {
    let owner = |r: &Report| r.network_owner.clone().unwrap_or_else(|| r.container.clone());
    // One that was decided before has ended.
    let open = |r: &Report| r.outcome == Outcome::Running && r.group.is_some() && r.group == report.group;
    let is_in = |r: &Report| r.id == report.id || (open(r) && owner(r) == owner(report));
    node.registry.reports().into_iter().filter(is_in).collect()
}

/// Gives up the destination of a migration that waits for it after the commit point; the original then runs again. So do those that share its network.
pub fn recover(node: &Arc<Node>, request: &RecoverRequest) -> Result<Report, ServiceError> {
    if let Some(decided) = damaged::recover(node, request) {
        return decided;
    }
    let report = find(node, &request.migration)?;
    if request.keep.is_some() {
        return Err(is_whole(node, &report));
    }
    let unit = unit(node, &report);
    let words: Vec<Failure> = unit.iter().map(|one| may_give_up(node, one, request)).collect::<Result<_, _>>()?;
    for (Report { id, container, destination, phase, .. }, failure) in unit.iter().zip(words) {
        tracing::warn!(%id, %container, %destination, "the operator says that the destination is lost");
        node.words.map().insert(id.clone(), (*phase, failure));
    }
    Ok(report)
}

/// Why nobody has to say which copy goes on.
fn is_whole(node: &Node, report: &Report) -> ServiceError {
    let Report { id, container, source, destination, .. } = report;
    match (report.outcome, *source == node.config.node) {
        (Outcome::Running, true) => refused(
            format!("the journal of migration {id} is whole, and tells what becomes of {container}"),
            format!("if node {destination} is lost for good, use --destination-lost"),
        ),
        (Outcome::Running, false) => refused(
            format!(
                "the journal of migration {id} is whole, and node {source} can still commit it by itself or undo it: {container} goes on \
                 where that is decided"
            ),
            format!("see `tranship status {id}` on node {source}"),
        ),
        _ => refused(format!("migration {id} has ended, and its journal was whole"), "there is nothing to recover"),
    }
}

/// Whether a migration can be given up: why it then will have failed.
fn may_give_up(node: &Arc<Node>, report: &Report, request: &RecoverRequest) -> Result<Failure, ServiceError> {
    let Report { id, container, source, destination, .. } = report;
    let nothing = |cause: String| Err(refused(cause, "there is nothing to recover"));
    match (report.outcome, report.phase) {
        (Outcome::Moved, _) => {
            return nothing(format!("migration {id} has ended: {container} runs on node {destination}"));
        }
        (Outcome::Ended, _) => {
            return nothing(format!(
                "migration {id} has ended: {container} was moved to node {destination}, and ended there"
            ));
        }
        (Outcome::Failed | Outcome::GivenUp | Outcome::Cancelled, _) => {
            return nothing(format!("migration {id} has ended: {container} runs on node {source}"));
        }
        _ if *source != node.config.node => {
            let remedy = format!("run `tranship recover` on node {source}");
            return Err(refused(format!("the original of {container} is on node {source}"), remedy));
        }
        (Outcome::Running, Phase::Resume | Phase::Drain) => {}
        (Outcome::Running, Phase::Release | Phase::Done) => {
            return nothing(format!("{container} runs on node {destination}, and its original is being removed"));
        }
        (Outcome::Running, Phase::Damaged) => {
            let remedy = format!("decide that first: `tranship recover {id} --keep-here` or `--keep-there`");
            return Err(refused(format!("the journal of migration {id}, of {container}, is damaged"), remedy));
        }
        (Outcome::Running, phase) => {
            let cause = format!(
                "migration {id} is not in doubt ({phase}): before the commit point it undoes itself if it fails"
            );
            return Err(refused(cause, format!("wait for it; `tranship status {id}` shows how far it is")));
        }
    }
    let ran = report.phase == Phase::Drain;
    let unsure = match ask(node, report)? {
        Some(Holding::Running) => {
            return nothing(format!(
                "node {destination} answers: {container} runs there, and the move goes on by itself"
            ));
        }
        Some(Holding::Stopped) => {
            return nothing(format!(
                "node {destination} answers: it holds the copy of {container}, and will let it run"
            ));
        }
        Some(Holding::Lost) => None,
        Some(Holding::Nothing) => Some(format!("node {destination} answers, but knows nothing of migration {id}")),
        None if ran => Some(format!("{container} was heard to run on node {destination}, which does not answer now")),
        None => None,
    };
    if let Some(cause) = unsure.filter(|_| !request.host_is_down) {
        let remedy =
            "if you know that its host is down, or was restarted since, add --host-is-down; else two copies would run";
        return Err(refused(cause, remedy));
    }
    let may = if ran { "" } else { "may have " };
    Ok(Failure::new(format!(
        "node {destination} was given up as lost by the operator's word: {container} goes on as it was when it was frozen, and \
         what it {may}done there since, and told its clients, is lost"
    )))
}

/// What the destination says that it holds; `None` if it does not answer at all.
fn ask(node: &Node, report: &Report) -> Result<Option<Holding>, ServiceError> {
    let Ok(mut link) = node.dial(&report.destination, Purpose::Control, Some(&report.id)) else { return Ok(None) };
    let mut ask = || -> Result<Holding, Failure> {
        link.set_timeout(Some(ANSWER)).map_err(failed)?;
        tranship_wire::write_message(&mut link, &Request::Holding).map_err(failed)?;
        match tranship_wire::read_message(&mut link).map_err(failed)? {
            Response::Holding { holding } => Ok(holding),
            other => Err(failed(format!("an answer that does not fit: {other:?}"))),
        }
    };
    ask().map(Some).map_err(|failure| {
        let cause = format!("node {} takes calls, but does not say what it holds ({failure})", report.destination);
        refused(cause, "try again in a moment")
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use tranship_coordinator::{Journal, Record};
    use tranship_types::Side;

    use super::*;
    use crate::arrivals::Context;

    #[test]
    fn a_word_is_taken_once_and_only_in_the_phase_in_which_it_was_said() {
        let (words, id): (_, MigrationId) = (Words::default(), "m-1".parse().unwrap());
        let word = (Phase::Resume, Failure::new("lost"));
        words.map().insert(id.clone(), word.clone());
        assert_eq!(words.take(&id, Phase::Resume), Some(word.1.clone()));
        assert_eq!(words.take(&id, Phase::Resume), None);
        words.map().insert(id.clone(), word);
        assert_eq!(words.take(&id, Phase::Drain), None);
        assert_eq!(words.take(&id, Phase::Resume), None);
    }

    /// Journals of agents of wire version 7, whose lines have no checksums: `scripts/old-build`, `TRANSHIP_KEEP_JOURNALS` (tests/tests/skew.rs).
    const OLD_JOURNALS: [(&str, &str, Record); 4] = [
        ("source frozen", include_str!("recovery/old_journals/source-frozen.jsonl"), Record::Ready),
        ("source committed", include_str!("recovery/old_journals/source-committed.jsonl"), Record::Commit),
        ("destination ready", include_str!("recovery/old_journals/destination-ready.jsonl"), Record::Ready),
        ("destination running", include_str!("recovery/old_journals/destination-running.jsonl"), Record::Running),
    ];

    #[test]
    fn journals_of_older_agents_are_taken_up() {
        let directory = tempfile::tempdir().unwrap();
        for (name, text, decisive) in OLD_JOURNALS {
            let path = directory.path().join("m-old00001.jsonl");
            std::fs::write(&path, [text.as_bytes(), &[0; 16 << 10]].concat()).unwrap();
            let (mut journal, records) = Journal::open(&path).unwrap();
            assert_eq!(records.len(), text.lines().count(), "{name}");
            assert_eq!(records.contains(&decisive), !name.ends_with("frozen"), "{name}");
            let Some(Record::Begin { id, side, container, context, .. }) = records.first().cloned() else {
                panic!("{name}: {records:?}")
            };
            assert_eq!((id.as_str(), container.as_str()), ("m-old00001", "app"), "{name}");
            // What the agent needs of it to go on.
            match side {
                Side::Source => assert_eq!(Report::deserialize(&context).unwrap().container, "app", "{name}"),
                Side::Destination => {
                    let context = Context::deserialize(&context).unwrap();
                    assert_eq!((context.offer.container.as_str(), context.offer.engine.as_str()), ("app", "runc"));
                }
            }
            // It goes on in today's lines.
            journal.append(&Record::Done).unwrap();
            assert_eq!(Journal::read(&path).unwrap(), [records, vec![Record::Done]].concat(), "{name}");
        }
    }
}
