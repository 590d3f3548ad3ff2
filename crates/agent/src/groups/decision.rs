//! The one decision of a group that moves as a whole or not at all, and how it comes to all of its migrations.
//!
//! ```text
//!   the group's journal:  group ─▶ COMMIT (fsync): all move
//!                                     │ handed down
//!   each migration's own journal:     └─▶ COMMIT (fsync); once all have it, the group's journal is removed
//! ```
//!
//! It is taken when every copy is held, and before any of them is told. An agent that is restarted hands it down first of all,
//! so that each migration then goes on by its own journal: forward if the group had decided, else back.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tranship_coordinator::{Journal, JournalError, Record};
use tranship_types::{GroupId, Report};

/// A group's decision, while its migrations run.
pub struct Decision(Mutex<Option<Kept>>);

struct Kept {
    journal: Journal,
    /// Migrations whose own journals do not have it.
    lacking: usize,
}

impl Decision {
    /// Makes the record of a group of so many members, undecided. There is room in it for the decision.
    pub fn create(journals: &Path, id: &GroupId, members: usize) -> Result<Self, JournalError> {
        let journal = Journal::create(journals, id, &Record::Group { id: id.clone() })?;
        Ok(Self(Mutex::new(Some(Kept { journal, lacking: members }))))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Option<Kept>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// All move: it is on the disk when this returns. After an error nothing has been decided, nor ever will be.
    pub fn take(&self) -> Result<(), JournalError> {
        self.change(|kept| {
            let taken = kept.as_mut().map_or(Ok(()), |kept| kept.journal.decide(&Record::Commit));
            taken.inspect_err(|_| close(kept.take()))
        })
    }

    /// One more migration has it in its own journal.
    pub fn handed_down(&self) {
        self.change(|kept| {
            if let Some(Kept { lacking, .. }) = kept {
                *lacking -= 1;
                if *lacking == 0 {
                    close(kept.take());
                }
            }
        });
    }

    /// Nobody moves, and nobody will ask.
    pub fn drop_undecided(&self) {
        self.change(|kept| close(kept.take()));
    }
}

fn close(kept: Option<Kept>) {
    if let Some(Err(error)) = kept.map(|kept| kept.journal.close()) {
        tracing::warn!(%error, "a group's journal stays behind");
    }
}

/// A journal that an earlier agent has left, with its records.
pub type Found = (Journal, Vec<Record>);

/// Takes the groups' journals out of those that an earlier agent has left, and hands down what was decided.
pub fn hand_down(journals: &mut Vec<Found>) {
    let group_of = |records: &[Record]| match records.first() {
        Some(Record::Group { id }) => Some(id.clone()),
        _ => None,
    };
    for (journal, records) in journals.extract_if(.., |(_, records)| group_of(records).is_some()).collect::<Vec<_>>() {
        let decided = group_of(&records).filter(|_| records.contains(&Record::Commit));
        tracing::info!(path = %journal.path().display(), decided = decided.is_some(), "taking up a group's decision");
        let mut all = true;
        for (own, records) in
            journals.iter_mut().filter(|(_, records)| decided.is_some() && is_of(records, decided.as_ref()))
        {
            if records.contains(&Record::Commit) {
                continue;
            }
            if let Err(error) = own.decide(&Record::Commit) {
                tracing::warn!(%error, "a decision stays in the group's journal alone");
                all = false;
            }
            records.push(Record::Commit);
        }
        if all && let Err(error) = journal.close() {
            tracing::warn!(%error, "a group's journal stays behind");
        }
    }
}

/// Whether a journal is that of a migration of this group.
fn is_of(records: &[Record], group: Option<&GroupId>) -> bool {
    let Some(Record::Begin { context, .. }) = records.first() else { return false };
    serde_json::from_value::<Report>(context.clone()).is_ok_and(|report| report.group.as_ref() == group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::{Mode, Side};

    fn member(directory: &Path, id: &str, group: Option<&GroupId>) -> Journal {
        let (a, b) = ("a".parse().unwrap(), "b".parse().unwrap());
        let id: tranship_types::MigrationId = id.parse().unwrap();
        let mut report = Report::new(id.clone(), id.to_string(), a, b, Mode::Auto, 0);
        report.group = group.cloned();
        let begin = Record::Begin {
            id: id.clone(),
            side: Side::Source,
            container: report.container.clone(),
            peer: report.destination.clone(),
            context: serde_json::to_value(&report).unwrap(),
        };
        Journal::create(directory, &id, &begin).unwrap()
    }

    fn found(directory: &Path) -> Vec<Found> {
        Journal::list(directory).iter().map(|path| Journal::open(path).unwrap()).collect()
    }

    /// Which of the journals say that it was decided.
    fn decided(directory: &Path) -> Vec<bool> {
        found(directory).iter().map(|(_, records)| records.contains(&Record::Commit)).collect()
    }

    #[test]
    fn what_a_group_has_decided_counts_for_all_of_it_and_for_nobody_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let group: GroupId = "g-1".parse().unwrap();
        let decision = Decision::create(at, &group, 2).unwrap();
        member(at, "m-1", Some(&group)).decide(&Record::Commit).unwrap();
        member(at, "m-2", Some(&group));
        member(at, "m-3", None);
        member(at, "m-4", Some(&"g-2".parse().unwrap()));
        decision.take().unwrap();
        let mut journals = found(at);
        hand_down(&mut journals);
        assert_eq!(journals.len(), 4, "the group's is none of a migration");
        assert_eq!(decided(at), [true, true, false, false], "and is not needed any more");
    }

    #[test]
    fn what_a_group_has_not_decided_is_undone() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let group: GroupId = "g-1".parse().unwrap();
        Decision::create(at, &group, 1).unwrap();
        member(at, "m-1", Some(&group));
        hand_down(&mut found(at));
        assert_eq!(decided(at), [false]);
    }

    #[test]
    fn the_record_stays_until_all_have_it() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let decision = Decision::create(at, &"g-1".parse().unwrap(), 2).unwrap();
        decision.take().unwrap();
        decision.handed_down();
        assert_eq!(decided(at), [true]);
        decision.handed_down();
        assert_eq!(found(at).len(), 0);
    }
}
