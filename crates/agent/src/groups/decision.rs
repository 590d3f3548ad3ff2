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

use tranship_coordinator::{Damaged, Journal, JournalError, Record};
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

/// Takes the groups' journals out of those that an earlier agent has left, and hands down what was decided, also to migrations whose
/// journals are damaged. What a group has decided whose journal is damaged counts where a journal of its migrations has it; else it is
/// not known of any of them.
pub fn hand_down(journals: &mut Vec<Found>, damaged: &mut Vec<Damaged>) {
    let group_of = |records: &[Record]| match records.first() {
        Some(Record::Group { id }) => Some(id.clone()),
        _ => None,
    };
    for (journal, records) in journals.extract_if(.., |(_, records)| group_of(records).is_some()).collect::<Vec<_>>() {
        let decided = group_of(&records).filter(|_| records.contains(&Record::Commit));
        tracing::info!(path = %journal.path().display(), decided = decided.is_some(), "taking up a group's decision");
        let mut all = true;
        for own in damaged.iter_mut().filter(|own| decided.is_some() && is_member(own.begin.as_ref(), decided.as_ref()))
        {
            // Until it is mended it has it from the group's.
            own.records.push(Record::Commit);
            all = false;
        }
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
    for group in damaged.extract_if(.., |damaged| damaged.id().starts_with(GroupId::PREFIX)).collect::<Vec<_>>() {
        hand_down_damaged(&group, journals, damaged);
    }
}

/// Hands down what is known of the decision of a group whose journal is damaged.
fn hand_down_damaged(group: &Damaged, journals: &mut Vec<Found>, damaged: &mut Vec<Damaged>) {
    let id: Option<GroupId> = group.id().parse().ok();
    let is_of = |records: &[Record]| id.is_some() && is_of(records, id.as_ref());
    let has_it = |records: &[Record]| records.contains(&Record::Commit);
    let decided = has_it(&group.records) || journals.iter().any(|(_, records)| is_of(records) && has_it(records));
    tracing::error!("{group}; its decision {}", if decided { "is known" } else { "is not known" });
    let open = |(_, records): &mut Found| {
        let ended = records.iter().any(|r| matches!(r, Record::Undone { .. } | Record::Done));
        is_of(records) && !has_it(records) && !ended
    };
    let (mut all, mut unknown) = (true, Vec::new());
    for (mut own, mut records) in journals.extract_if(.., open).collect::<Vec<_>>() {
        if decided {
            all &= own.decide(&Record::Commit).is_ok();
            records.push(Record::Commit);
            journals.push((own, records));
        } else {
            let (path, begin, damage) = (own.path().to_owned(), records.first().cloned(), group.damage.clone());
            let mentions_decision = group.mentions_decision;
            unknown.push(Damaged { path, begin, records, damage, mentions_decision });
        }
    }
    for own in damaged.iter_mut().filter(|own| decided && is_member(own.begin.as_ref(), id.as_ref())) {
        own.records.push(Record::Commit);
        all = false;
    }
    if all && unknown.is_empty() {
        let _ = Journal::forget_lost(&group.path);
        let _ = std::fs::remove_file(&group.path);
    }
    damaged.extend(unknown);
}

/// Whether a journal is that of a migration of this group.
fn is_of(records: &[Record], group: Option<&GroupId>) -> bool {
    is_member(records.first(), group)
}

fn is_member(begin: Option<&Record>, group: Option<&GroupId>) -> bool {
    let Some(Record::Begin { context, .. }) = begin else { return false };
    serde_json::from_value::<Report>(context.clone()).is_ok_and(|report| report.group.as_ref() == group)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

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
        hand_down(&mut journals, &mut Vec::new());
        assert_eq!(journals.len(), 4, "the group's is none of a migration");
        assert_eq!(decided(at), [true, true, false, false], "and is not needed any more");
    }

    /// Flips a bit in the first record of a journal.
    fn damage(path: &Path) -> Damaged {
        let mut text = std::fs::read(path).unwrap();
        text[40] ^= 1;
        std::fs::write(path, text).unwrap();
        *Journal::open(path).unwrap_err()
    }

    #[test]
    fn what_a_group_has_decided_counts_for_a_member_whose_journal_is_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let group: GroupId = "g-1".parse().unwrap();
        let decision = Decision::create(at, &group, 2).unwrap();
        decision.take().unwrap();
        let mut damaged = vec![damage(member(at, "m-1", Some(&group)).path()), damage(member(at, "m-2", None).path())];
        member(at, "m-3", Some(&group));
        let whole = |path: &PathBuf| Journal::open(path).ok();
        let mut journals: Vec<_> = Journal::list(at).iter().filter_map(whole).collect();
        hand_down(&mut journals, &mut damaged);
        let know: Vec<_> = damaged.iter().map(|one| one.records.contains(&Record::Commit)).collect();
        assert_eq!(know, [true, false]);
        assert!(journals[0].1.contains(&Record::Commit), "and for the others");
        assert!(at.join("g-1.jsonl").exists(), "until the damaged one is mended");
    }

    #[test]
    fn where_a_groups_journal_is_damaged_its_members_know_the_decision_or_nobody_does() {
        for decided in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let at = directory.path();
            let group: GroupId = "g-1".parse().unwrap();
            Decision::create(at, &group, 2).unwrap();
            let mut damaged = vec![damage(&at.join("g-1.jsonl"))];
            let mut first = member(at, "m-1", Some(&group));
            if decided {
                first.decide(&Record::Commit).unwrap();
            }
            member(at, "m-2", Some(&group));
            member(at, "m-3", None);
            let mut journals: Vec<_> = Journal::list(at).iter().filter_map(|path| Journal::open(path).ok()).collect();
            hand_down(&mut journals, &mut damaged);
            let open: Vec<_> = damaged.iter().map(Damaged::id).collect();
            assert_eq!(open, if decided { vec![] } else { vec!["m-1", "m-2"] }, "they are asked about");
            let know = journals.iter().filter(|(_, records)| records.contains(&Record::Commit)).count();
            assert_eq!((journals.len(), know), if decided { (3, 2) } else { (1, 0) });
        }
    }

    #[test]
    fn what_a_group_has_not_decided_is_undone() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let group: GroupId = "g-1".parse().unwrap();
        Decision::create(at, &group, 1).unwrap();
        member(at, "m-1", Some(&group));
        hand_down(&mut found(at), &mut Vec::new());
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
