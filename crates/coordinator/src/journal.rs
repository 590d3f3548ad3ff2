//! The journal of one migration: what was begun and what was decided, so that an agent that was killed at any moment can
//! finish or undo.
//!
//! One JSON object a line. Steps are appended without fsync: a killed agent loses nothing that it wrote, and where the host
//! itself goes down there is no container left to undo anything for. Decisions are synced before anybody acts on them, and
//! the space for them is reserved beforehand, so that a full disk is found out before the freeze.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{GroupId, MigrationId, NodeName, Side};

use crate::Failure;

/// Bytes reserved for a journal beyond its first record.
const RESERVED: i64 = 16 << 10;

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

/// A migration's journal, open for appending.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
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
        let options = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path);
        let file = options.map_err(&failed)?;
        let mut journal = Self { path: path.clone(), file };
        let made = journal.append(begin).and_then(|()| {
            let len = journal.file.metadata().map_err(&failed)?.len();
            match fallocate(&journal.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, len as i64, RESERVED) {
                // A filesystem that cannot reserve is used as it is.
                Ok(()) | Err(nix::errno::Errno::EOPNOTSUPP) => {}
                Err(error) => return Err(failed(error.into())),
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

    /// Opens an existing journal and reads its records. A last line that was torn by a crash is dropped.
    pub fn open(path: &Path) -> Result<(Self, Vec<Record>), JournalError> {
        let failed = Self::failed(path, "read");
        let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(&failed)?;
        // As bytes: a line may have been torn within a character.
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(&failed)?;
        let whole = whole_lines(&text);
        if whole.len() < text.len() {
            file.set_len(whole.len() as u64).map_err(&failed)?;
        }
        let records = records(whole).map_err(|e| failed(e.into()))?;
        Ok((Self { path: path.to_owned(), file }, records))
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
        let whole = self.length()?;
        // A full disk may have taken a part of the line, into which the next one must not run.
        self.file.write_all(&line).inspect_err(|_| self.cut(whole)).map_err(Self::failed(&self.path, "written"))
    }

    /// Appends a decision: it is on the disk when this returns. On failure the journal is as it was.
    pub fn decide(&mut self, record: &Record) -> Result<(), JournalError> {
        let whole = self.length()?;
        self.append(record)?;
        // A later agent must not find a decision that nobody acted on.
        self.file.sync_data().inspect_err(|_| self.cut(whole)).map_err(Self::failed(&self.path, "synced"))
    }

    fn length(&self) -> Result<u64, JournalError> {
        self.file.metadata().map(|m| m.len()).map_err(Self::failed(&self.path, "examined"))
    }

    /// Takes back what was written past `whole`, as far as the disk lets us: the failure itself is reported anyway.
    fn cut(&self, whole: u64) {
        let _ = self.file.set_len(whole);
    }

    /// Ends the journal: nothing is left to do, and nothing to remember.
    pub fn close(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(Self::failed(&self.path, "removed"))
    }
}

/// All up to the last line's end.
fn whole_lines(text: &[u8]) -> &[u8] {
    &text[..text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)]
}

fn records(lines: &[u8]) -> serde_json::Result<Vec<Record>> {
    lines.split_inclusive(|byte| *byte == b'\n').map(serde_json::from_slice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_last_line_is_dropped_and_the_rest_kept() {
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        let begin = Record::Begin {
            id: id.clone(),
            side: Side::Source,
            container: "c".into(),
            peer: "b".parse().unwrap(),
            context: Value::Null,
        };
        let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
        journal.append(&Record::Step { step: "freeze".into() }).unwrap();
        journal.file.write_all("{\"record\":\"undone\",\"failure\":\"ü".as_bytes().split_last().unwrap().1).unwrap();
        let path = Journal::list(directory.path()).remove(0);
        let (mut journal, records) = Journal::open(&path).unwrap();
        assert_eq!(records, [begin, Record::Step { step: "freeze".into() }]);
        journal.decide(&Record::Commit).unwrap();
        assert_eq!(Journal::open(&path).unwrap().1.last(), Some(&Record::Commit));
    }

    #[test]
    fn a_second_journal_of_the_same_migration_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let id: MigrationId = "m-1".parse().unwrap();
        Journal::create(directory.path(), &id, &Record::Ready).unwrap();
        assert!(Journal::create(directory.path(), &id, &Record::Ready).is_err());
    }
}
