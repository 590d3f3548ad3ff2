//! The journal of one migration: what was begun and what was decided, so that an agent that was killed at any moment can
//! finish or undo.
//!
//! One record a line, each with a checksum, its number and its length (`journal/format.rs`), and zeros behind the last one. Steps
//! are written without fsync: a killed agent loses nothing that it wrote, and where the host itself goes down there is no container left to undo
//! anything for. Decisions are synced before anybody acts on them.
//!
//! ```text
//! ID.jsonl   begin\n step\n step\n 0000000000000000…      made so, and synced, before anything is begun
//!                                  └ the next record overwrites zeros
//! ID.begin   begin\n                                      the same first record again
//! ```
//!
//! The zeros are on the disk from the beginning. So a full disk is found out before the freeze, and a decision, which is synced
//! while the container stands still, changes neither the file's length nor where its blocks are: it is one write and a flush of the
//! device, and does not wait for the filesystem's own journal, into which everybody on the machine writes. They also give the file a
//! length that is known, so that one that was cut off is not taken for one that ends there.
//!
//! What a crash leaves of the last line is dropped. Everything else that is not as it was written is [`Damaged`]: the container and the other
//! node are known from the copy of the first record, and whoever reads it must not guess what was decided.

mod format;
mod record;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tranship_types::Side;

pub use format::Damage;
pub use record::Record;

use format::Reading;

/// Zeros behind a journal's first record, for those that follow, in bytes.
const RESERVED: usize = 16 << 10;
/// What the files' names end with: the journal, and the copy of its first record.
const JOURNAL: &str = "jsonl";
const FIRST: &str = "begin";
/// And a damaged journal, beside the one that took its place.
const KEPT: &str = "damaged";

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

/// A journal that does not say any more what was decided.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("the journal {path:?} is damaged: {damage}")]
pub struct Damaged {
    /// Its file.
    pub path: PathBuf,
    /// Its first record, from whichever place has it; `None` if none has.
    pub begin: Option<Record>,
    /// The records that are whole, the first one among them if it is. Others may be missing between and behind them.
    pub records: Vec<Record>,
    /// What is wrong.
    pub damage: Damage,
    /// The word of a decision stands in what is damaged.
    pub mentions_decision: bool,
}

impl Damaged {
    /// Of a whole journal, whose first record has a context that is not understood.
    pub fn foreign(path: &Path, records: Vec<Record>, error: impl fmt::Display) -> Self {
        let (begin, damage) = (records.first().cloned(), Damage::Foreign { error: error.to_string() });
        Self { path: path.to_owned(), begin, records, damage, mentions_decision: false }
    }

    /// Of a journal whose file could not be read at all.
    fn unread(path: &Path, damage: Damage) -> Self {
        let begin = first_record(&path.with_extension(FIRST));
        Self { path: path.to_owned(), begin, records: Vec::new(), damage, mentions_decision: false }
    }

    /// The id that its file is named after.
    pub fn id(&self) -> String {
        self.path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Which side of the migration this node is, as far as is known.
    pub fn side(&self) -> Option<Side> {
        match &self.begin {
            Some(Record::Begin { side, .. }) => Some(*side),
            _ => None,
        }
    }
}

/// A migration's journal, open for writing.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Where its last record ends.
    end: u64,
    /// The number of its last record.
    sequence: u32,
    /// How long the file is at least; 0 where that is not known.
    size: u64,
}

fn failed(path: &Path, what: &'static str) -> impl Fn(io::Error) -> JournalError + use<> {
    let path = path.to_owned();
    move |source| JournalError { path: path.clone(), what, source }
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory).and_then(|d| d.sync_all())
}

/// For its owner alone: the context may have the container's configuration, and so its environment, in it.
fn make_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Makes a directory that stays, also where the host goes down.
fn make_directory(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(directory)?;
    directory.parent().map_or(Ok(()), sync_directory)
}

impl Journal {
    /// Makes a new journal below `directory` with its first record, synced, and space reserved for the rest; `id` is that of a
    /// migration or a group.
    pub fn create(directory: &Path, id: impl fmt::Display, begin: &Record) -> Result<Self, JournalError> {
        let path = directory.join(format!("{id}.{JOURNAL}"));
        let failed = failed(&path, "made");
        make_directory(directory).map_err(&failed)?;
        let file = make_file(&path).map_err(&failed)?;
        let mut journal = Self { path: path.clone(), file, end: 0, sequence: 0, size: 0 };
        let made = journal
            .fill(std::slice::from_ref(begin))
            .and_then(|()| journal.keep_first(begin).map_err(&failed))
            .and_then(|()| sync_directory(directory).map_err(&failed));
        if let Err(error) = made {
            // Nothing has been done yet, so that no record of it is needed.
            let _ = std::fs::remove_file(path.with_extension(FIRST));
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        Ok(journal)
    }

    /// Puts a journal with these records in the place of one that is damaged or lost, which is kept beside it as `ID.damaged` until it
    /// is closed. A crash leaves either the one or the other.
    pub fn replace(path: &Path, records: &[Record]) -> Result<Self, JournalError> {
        let failed = failed(path, "mended");
        let directory = path.parent().unwrap_or(Path::new("."));
        make_directory(directory).map_err(&failed)?;
        let (nascent, kept) = (path.with_extension("nascent"), path.with_extension(KEPT));
        let unless_absent = |done: io::Result<()>| match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        // Of an earlier attempt.
        unless_absent(std::fs::remove_file(&nascent)).map_err(&failed)?;
        let file = make_file(&nascent).map_err(&failed)?;
        let mut journal = Self { path: path.to_owned(), file, end: 0, sequence: 0, size: 0 };
        let replaced = journal.fill(records).and_then(|()| {
            // A second name, so that the journal's own name is never without a file.
            match unless_absent(std::fs::hard_link(path, &kept)) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
                _ => {}
            }
            std::fs::rename(&nascent, path).map_err(&failed)?;
            if let Some(begin) = records.first() {
                unless_absent(std::fs::remove_file(path.with_extension(FIRST))).map_err(&failed)?;
                journal.keep_first(begin).map_err(&failed)?;
            }
            sync_directory(directory).map_err(&failed)
        });
        replaced.inspect_err(|_| drop(std::fs::remove_file(&nascent)))?;
        Ok(journal)
    }

    /// Writes the first records, and zeros for those that follow, and syncs them.
    fn fill(&mut self, records: &[Record]) -> Result<(), JournalError> {
        let failed = failed(&self.path, "made");
        let lines = |size: usize| -> Result<Vec<u8>, JournalError> {
            let line = |(at, record)| format::line(number(at), record, |_| size).map_err(|e| failed(e.into()));
            records.iter().enumerate().map(line).collect::<Result<Vec<_>, _>>().map(|lines| lines.concat())
        };
        let mut text = lines(0)?;
        let size = text.len() + RESERVED;
        text = lines(size)?;
        text.resize(size, 0);
        let written = match self.file.write_all_at(&text, 0) {
            // A limit on the length of files, not on what the disk takes: the lines that fit are written without zeros.
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                text = lines(0)?;
                self.file.set_len(0).and_then(|()| self.file.write_all_at(&text, 0))
            }
            written => written.inspect(|()| self.size = size as u64),
        };
        written.and_then(|()| self.file.sync_all()).map_err(&failed)?;
        self.end = if self.size == 0 { text.len() } else { text.len() - RESERVED } as u64;
        self.sequence = number(records.len()) - 1;
        Ok(())
    }

    /// Writes the first record to its second place.
    fn keep_first(&self, begin: &Record) -> io::Result<()> {
        let file = make_file(&self.path.with_extension(FIRST))?;
        file.write_all_at(&format::line(1, begin, |_| 0)?, 0)?;
        file.sync_all()
    }

    /// Opens an existing journal and reads its records. What was torn by a crash is dropped. One that can be read and not
    /// written is opened all the same: whoever appends to it learns that.
    pub fn open(path: &Path) -> Result<(Self, Vec<Record>), Box<Damaged>> {
        let opened = OpenOptions::new().read(true).write(true).open(path).or_else(|error| match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => File::open(path),
            _ => Err(error),
        });
        let mut file = opened.map_err(|error| unreadable(path, &error))?;
        let (text, reading) = read_file(path, &mut file)?;
        let end = reading.end as u64;
        // The next record must have nothing but zeros behind it.
        let torn = text[reading.end..].iter().any(|byte| *byte != 0);
        let size = if reading.size == 0 { 0 } else { text.len() as u64 };
        let journal = Self { path: path.to_owned(), file, end, sequence: reading.sequence, size };
        if torn {
            journal.cut();
        }
        Ok((journal, reading.records))
    }

    /// Reads the records of a journal that is somebody else's, who may be writing.
    pub fn read(path: &Path) -> Result<Vec<Record>, Box<Damaged>> {
        let mut file = File::open(path).map_err(|error| unreadable(path, &error))?;
        read_file(path, &mut file).map(|(_, reading)| reading.records)
    }

    /// All journals below a directory, oldest name first.
    pub fn list(directory: &Path) -> Vec<PathBuf> {
        named(directory, JOURNAL)
    }

    /// The journals below a directory whose file is gone, and of whose first record there is a copy: where each was.
    pub fn lost(directory: &Path) -> Vec<PathBuf> {
        let paths = named(directory, FIRST).into_iter().map(|path| path.with_extension(JOURNAL));
        paths.filter(|path| std::fs::symlink_metadata(path).is_err()).collect()
    }

    /// A lost journal, of which these bytes are a copy of the first record, as [`Self::first_line`] has them.
    pub fn lost_with(path: &Path, first: &[u8]) -> Damaged {
        let lost = Damaged::unread(path, Damage::Lost);
        Damaged { begin: lost.begin.or_else(|| first_of(first)), ..lost }
    }

    /// The bytes of the copy of a journal's first record, to be kept at a third place.
    pub fn first_line(directory: &Path, id: impl fmt::Display) -> io::Result<Vec<u8>> {
        std::fs::read(directory.join(format!("{id}.{FIRST}")))
    }

    /// Removes what is left of a journal that is lost, and of which nothing is needed any more.
    pub fn forget_lost(path: &Path) -> io::Result<()> {
        std::fs::remove_file(path.with_extension(FIRST))
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
        let failed = failed(&self.path, "written");
        let (end, size, number) = (self.end, self.size, self.sequence + 1);
        let fits = |line: usize| size == 0 || end + line as u64 <= size;
        let make = |size: u64| {
            format::line(number, record, |_| usize::try_from(size).unwrap_or(0)).map_err(|e| failed(e.into()))
        };
        let mut line = make(size)?;
        if !fits(line.len()) {
            self.grow(line.len());
            line = make(self.size)?;
        }
        // A full disk may have taken a part of the line, into which the next one must not run.
        self.file.write_all_at(&line, self.end).inspect_err(|_| self.cut()).map_err(&failed)?;
        self.end += line.len() as u64;
        self.sequence += 1;
        Ok(())
    }

    /// Reserves space for a line that does not fit any more, and for others. Where there is none, the length is not known from then on.
    fn grow(&mut self, line: usize) {
        let zeros = vec![0; line + RESERVED];
        match self.file.write_all_at(&zeros, self.size) {
            Ok(()) => self.size += zeros.len() as u64,
            Err(_) => self.size = 0,
        }
    }

    /// Appends a decision: it is on the disk when this returns. On failure the journal is as it was.
    pub fn decide(&mut self, record: &Record) -> Result<(), JournalError> {
        let whole = (self.end, self.sequence);
        self.append(record)?;
        let synced = self.file.sync_data();
        synced.map_err(|error| {
            // A later agent must not find a decision that nobody acted on.
            (self.end, self.sequence) = whole;
            self.cut();
            failed(&self.path, "synced")(error)
        })
    }

    /// Takes back what was written past the last record, as far as the disk lets us: the failure itself is reported anyway.
    fn cut(&self) {
        let _ = match self.size.checked_sub(self.end) {
            // The file keeps its length, by which one that was cut off is told.
            Some(left) if left > 0 => {
                let zeros = vec![0; usize::try_from(left).unwrap_or(0)];
                self.file.write_all_at(&zeros, self.end).and_then(|()| self.file.set_len(self.size))
            }
            _ => self.file.set_len(self.end),
        };
    }

    /// Ends the journal: nothing is left to do, and nothing to remember.
    pub fn close(self) -> Result<(), JournalError> {
        // In this order: the copy alone says that a journal was lost.
        for extension in [FIRST, KEPT] {
            match std::fs::remove_file(self.path.with_extension(extension)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(&self.path, "removed")(error));
                }
                _ => {}
            }
        }
        std::fs::remove_file(&self.path).map_err(failed(&self.path, "removed"))
    }
}

/// A record's number, from its place in a list.
fn number(at: usize) -> u32 {
    u32::try_from(at + 1).unwrap_or(u32::MAX)
}

fn named(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    let mut found: Vec<PathBuf> = entries;
    found.retain(|p| p.extension().is_some_and(|e| e == extension));
    found.sort();
    found
}

fn unreadable(path: &Path, error: &io::Error) -> Box<Damaged> {
    let damage = match error.kind() {
        io::ErrorKind::NotFound => Damage::Lost,
        _ => Damage::Unreadable { error: error.to_string() },
    };
    Box::new(Damaged::unread(path, damage))
}

/// The copy of a first record, if it is whole.
fn first_record(path: &Path) -> Option<Record> {
    first_of(&std::fs::read(path).ok()?)
}

fn first_of(text: &[u8]) -> Option<Record> {
    let reading = format::read(text);
    reading.records.into_iter().next().filter(|record| reading.damage.is_none() && record.is_first())
}

fn read_file(path: &Path, file: &mut File) -> Result<(Vec<u8>, Reading), Box<Damaged>> {
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|error| unreadable(path, &error))?;
    let mut reading = format::read(&text);
    let copy = path.with_extension(FIRST);
    // The first record was just being written when an agent died: the copy follows it, and everything else follows the copy.
    if reading.damage.is_some() && reading.records.is_empty() && !text.contains(&b'\n') && !copy.exists() {
        reading = Reading::default();
    }
    // The copy is made when the first record is on the disk.
    if reading.damage.is_none() && reading.records.is_empty() && copy.exists() {
        let expected = RESERVED;
        reading.damage = Some(match text.len() < expected {
            true => Damage::CutOff { length: text.len(), expected },
            false => Damage::Corrupted { record: 1, at: 0 },
        });
    }
    match reading.damage {
        None => Ok((text, reading)),
        Some(damage) => {
            let Reading { records, mentions_decision, .. } = reading;
            let own = records.first().filter(|record| record.is_first()).cloned();
            let begin = own.or_else(|| first_record(&copy));
            Err(Box::new(Damaged { path: path.to_owned(), begin, records, damage, mentions_decision }))
        }
    }
}

/// For the fuzz targets: reads a journal of any bytes. One without damage can be written again, and is the same then.
pub fn fuzz(data: &[u8]) {
    let reading = format::read(data);
    assert!(reading.end <= data.len() && reading.records.len() <= data.len() / 8);
    let _ = first_of(data);
    if reading.damage.is_some() {
        return;
    }
    let lines = reading.records.iter().zip(1..).map(|(record, number)| format::line(number, record, |_| 0));
    let text: Vec<u8> = lines.map(|line| line.expect("a record is plain data")).collect::<Vec<_>>().concat();
    let again = format::read(&text);
    assert_eq!((again.damage, again.end, again.records.len()), (None, text.len(), reading.records.len()));
    for (record, before) in again.records.iter().zip(&reading.records) {
        // Of a number with a fraction that is part of a context the last bit may differ.
        assert!(record == before || matches!(record, Record::Begin { .. }), "{record:?}");
    }
}
