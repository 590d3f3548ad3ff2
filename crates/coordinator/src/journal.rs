//! The journal of one migration: what was begun and what was decided, so that an agent that was killed at any moment can
//! finish or undo.
//!
//! One JSON object a line, and zeros behind the last one. Steps are written without fsync: a killed agent loses nothing that it
//! wrote, and where the host itself goes down there is no container left to undo anything for. Decisions are synced before
//! anybody acts on them.
//!
//! ```text
//! {"record":"begin",…}\n{"record":"step",…}\n000000000000000000…      made so, and synced, before anything is begun
//!                                            └ the next record overwrites zeros
//! ```
//!
//! The zeros are on the disk from the beginning. So a full disk is found out before the freeze, and a decision, which is synced
//! while the container stands still, changes neither the file's length nor where its blocks are: it is one write and a flush of the
//! device, and does not wait for the filesystem's own journal, into which everybody on the machine writes. A line that a crash has torn,
//! at whatever place, has a zero in it or lacks its end; records never contain one, since JSON escapes it. What does not fit is appended
//! as to any file.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{GroupId, MigrationId, NodeName, Side};

use crate::Failure;

/// Zeros behind a journal's first record, for those that follow, in bytes.
const RESERVED: usize = 16 << 10;

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "record")]
pub enum Record {
    /// The migration began.
    Begin {
        /// Its id.
        id: MigrationId,
        /// Which side of it this node is.
        side: Side,
        /// The container.
        container: String,
        /// The other node.
        peer: NodeName,
        /// What the port needs to take up its work after a restart.
        context: Value,
    },
    /// A group began that moves as a whole or not at all. Its decision counts for each of its migrations, until it is in their
    /// own journals.
    Group {
        /// Its id.
        id: GroupId,
    },
    /// A step is about to be done.
    Step {
        /// Its name.
        step: String,
    },
    /// Destination: a complete, stopped copy is held; only the source's word counts from here on.
    Ready,
    /// Source: the decision. Destination: word of it has come.
    Commit,
    /// Destination: the container runs; only now may the source be told.
    Running,
    /// Source: an operator has taken the decision back, since the destination is lost. The original runs again.
    GivenUp {
        /// What was said to be lost, and what it costs.
        failure: Failure,
    },
    /// The decision not to move, or that the failure was undone. On the destination also: the source gave the migration up.
    Undone {
        /// Why.
        failure: Failure,
    },
    /// Nothing is left to do.
    Done,
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "the journal {path:?} cannot be {what}: {source}; free some space or mend the disk below the agent's state_dir"
)]
pub struct JournalError {
    /// Its file.
    pub path: PathBuf,
    /// What was attempted.
    pub what: &'static str,
    /// Why.
    pub source: io::Error,
}

/// A migration's journal, open for writing.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Where its last record ends.
    end: u64,
}

impl Journal {
    fn failed(path: &Path, what: &'static str) -> impl Fn(io::Error) -> JournalError {
        let path = path.to_owned();
        move |source| JournalError { path: path.clone(), what, source }
    }

    /// Makes a new journal below `directory` with its first record, synced, and space reserved for the rest; `id` is that of a
    /// migration or a group.
    pub fn create(directory: &Path, id: impl fmt::Display, begin: &Record) -> Result<Self, JournalError> {
        let path = directory.join(format!("{id}.jsonl"));
        let failed = Self::failed(&path, "made");
        std::fs::create_dir_all(directory).map_err(&failed)?;
        // For its owner alone: the context may have the container's configuration, and so its environment, in it.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(&failed)?;
        let mut journal = Self { path: path.clone(), file, end: 0 };
        let made = journal.append(begin).and_then(|()| {
            match journal.file.write_all_at(&[0; RESERVED], journal.end) {
                // A limit on the length of files, not on what the disk takes: the lines that fit are written without zeros.
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge => journal.cut(),
                reserved => reserved.map_err(&failed)?,
            }
            journal.file.sync_all().map_err(&failed)?;
            File::open(directory).and_then(|d| d.sync_all()).map_err(&failed)
        });
        if let Err(error) = made {
            // Nothing has been done yet, so that no record of it is needed.
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        Ok(journal)
    }

    /// Opens an existing journal and reads its records. What was torn by a crash is dropped.
    pub fn open(path: &Path) -> Result<(Self, Vec<Record>), JournalError> {
        let failed = Self::failed(path, "read");
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(&failed)?;
        // As bytes: a line may have been torn within a character.
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(&failed)?;
        let whole = whole_lines(&text);
        let end = whole.len() as u64;
        // The next record must have nothing but zeros behind it.
        if text[whole.len()..].iter().any(|byte| *byte != 0) {
            file.set_len(end).map_err(&failed)?;
        }
        let records = records(whole).map_err(|e| failed(e.into()))?;
        Ok((Self { path: path.to_owned(), file, end }, records))
    }

    /// Reads the records of a journal that is somebody else's, who may be writing.
    pub fn read(path: &Path) -> Result<Vec<Record>, JournalError> {
        let failed = Self::failed(path, "read");
        let text = std::fs::read(path).map_err(&failed)?;
        records(whole_lines(&text)).map_err(|e| failed(e.into()))
    }

    /// All journals below a directory, oldest name first.
    pub fn list(directory: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
        let mut found: Vec<PathBuf> = entries;
        found.retain(|p| p.extension().is_some_and(|e| e == "jsonl"));
        found.sort();
        found
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nothing was written to it for so long.
    pub fn older_than(&self, age: Duration) -> bool {
        let modified = self.file.metadata().and_then(|m| m.modified());
        modified.is_ok_and(|at| at.elapsed().is_ok_and(|elapsed| elapsed > age))
    }

    /// Appends a record. On failure the journal is as it was.
    pub fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        let mut line = serde_json::to_vec(record).map_err(|e| Self::failed(&self.path, "written")(e.into()))?;
        line.push(b'\n');
        // A full disk may have taken a part of the line, into which the next one must not run.
        let written = self.file.write_all_at(&line, self.end).inspect_err(|_| self.cut());
        written.map_err(Self::failed(&self.path, "written"))?;
        self.end += line.len() as u64;
        Ok(())
    }

    /// Appends a decision: it is on the disk when this returns. On failure the journal is as it was.
    pub fn decide(&mut self, record: &Record) -> Result<(), JournalError> {
        let whole = self.end;
        self.append(record)?;
        let synced = self.file.sync_data();
        synced.map_err(|error| {
            // A later agent must not find a decision that nobody acted on.
            self.end = whole;
            self.cut();
            Self::failed(&self.path, "synced")(error)
        })
    }

    /// Takes back what was written past the last record, as far as the disk lets us: the failure itself is reported anyway.
    fn cut(&self) {
        let _ = self.file.set_len(self.end);
    }

    /// Ends the journal: nothing is left to do, and nothing to remember.
    pub fn close(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(Self::failed(&self.path, "removed"))
    }
}

/// All up to the end of the last line that is whole, and behind no other that is not.
fn whole_lines(text: &[u8]) -> &[u8] {
    let text = &text[..text.iter().position(|byte| *byte == 0).unwrap_or(text.len())];
    &text[..text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)]
}

fn records(lines: &[u8]) -> serde_json::Result<Vec<Record>> {
    lines.split_inclusive(|byte| *byte == b'\n').map(serde_json::from_slice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(id: &MigrationId) -> Record {
        let (container, peer) = ("c".into(), "b".parse().unwrap());
        Record::Begin { id: id.clone(), side: Side::Source, container, peer, context: Value::Null }
    }

    fn step(name: &str) -> Record {
        Record::Step { step: name.into() }
    }

    #[test]
    fn whatever_of_a_line_a_crash_leaves_the_records_before_it_are_kept_and_others_can_follow() {
        let line = b"{\"record\":\"undone\",\"failure\":{\"message\":\"\xc3\xbc\"}}\n";
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        let mut journal = Journal::create(directory.path(), &id, &begin(&id)).unwrap();
        journal.append(&step("freeze")).unwrap();
        let (before, end) = (std::fs::read(&journal.path).unwrap(), journal.end as usize);
        let parts = (1..=line.len()).flat_map(|end| (0..end).map(move |start| start..end));
        for part in parts.filter(|part| *part != (0..line.len())) {
            let mut torn = before.clone();
            torn[end + part.start..end + part.end].copy_from_slice(&line[part.clone()]);
            std::fs::write(&journal.path, torn).unwrap();
            let (mut journal, records) = Journal::open(&journal.path).unwrap();
            assert_eq!(records, [begin(&id), step("freeze")], "{part:?}");
            journal.append(&Record::Done).unwrap();
            let records = Journal::read(&journal.path).unwrap();
            assert_eq!(records, [begin(&id), step("freeze"), Record::Done], "{part:?}");
        }
    }

    #[test]
    fn a_decision_changes_neither_the_length_of_the_file_nor_where_it_is() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        let mut journal = Journal::create(directory.path(), &id, &begin(&id)).unwrap();
        let size = |journal: &Journal| journal.file.metadata().map(|m| (m.len(), m.blocks())).unwrap();
        let before = size(&journal);
        journal.append(&step("freeze")).unwrap();
        journal.decide(&Record::Commit).unwrap();
        assert_eq!(size(&journal), before);
        let (mut journal, records) = Journal::open(&journal.path).unwrap();
        assert_eq!(records, [begin(&id), step("freeze"), Record::Commit]);
        journal.append(&Record::Done).unwrap();
        assert_eq!(size(&journal), before, "to open it is no reason to make it shorter");
    }

    #[test]
    fn a_journal_may_grow_beyond_what_was_reserved_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        let mut journal = Journal::create(directory.path(), &id, &begin(&id)).unwrap();
        let long = step(&"x".repeat(RESERVED / 3));
        (0..5).for_each(|_| journal.append(&long).unwrap());
        journal.decide(&Record::Commit).unwrap();
        let records = Journal::read(&journal.path).unwrap();
        assert_eq!((records.len(), records.last()), (7, Some(&Record::Commit)));
    }

    #[test]
    fn a_second_journal_of_the_same_migration_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        Journal::create(directory.path(), &id, &Record::Ready).unwrap();
        assert!(Journal::create(directory.path(), &id, &Record::Ready).is_err());
    }
}
