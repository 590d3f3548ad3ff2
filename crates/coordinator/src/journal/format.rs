//! The bytes of a journal: how records become lines, and what can be read of lines that are torn, damaged or missing.
//!
//! ```text
//! CRC SEQ LEN SIZE {"record":…}\n        four numbers of 8 hexadecimal digits, the record as JSON
//! ```
//!
//! `CRC` is the CRC-32 of everything behind it up to the line's end. `SEQ` counts the records from 1. `LEN` is the number of bytes of
//! the JSON. `SIZE` is the length that the file had at least when the line was written, 0 where that is not known: a
//! shorter file was cut off.
//!
//! A crash leaves any part of the last line, and zeros in the place of the rest. That is dropped: its action was not begun. A
//! single wrong byte is never taken for that, since at least two bytes must be missing. A record that may be a decision is not
//! dropped at all where somebody may have acted on it.
//!
//! Lines without the numbers are from before version 2 of the format, and end where the first line with them begins.

use std::fmt;

use tranship_types::Side;

use super::Record;
use crate::SourceStep;

/// Bytes before a line's JSON.
const HEADER: usize = 36;
/// Bytes that a crash must have left out of a line: one may also be a wrong byte.
const TORN: usize = 2;

/// What is wrong with a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// A record does not fit its checksum, or cannot be understood.
    Corrupted {
        /// The record's number, from 1.
        record: u32,
        /// Where it begins, in bytes.
        at: usize,
    },
    /// Records are missing, or are there twice.
    OutOfSequence {
        /// The number of the record that should be there, from 1.
        record: u32,
        /// The number that is there instead.
        found: u32,
    },
    /// The file is shorter than it was made.
    CutOff {
        /// Its length in bytes.
        length: usize,
        /// The length that it had.
        expected: usize,
    },
    /// What was written last is incomplete, and may be a decision.
    TornDecision {
        /// Its number, from 1.
        record: u32,
    },
    /// The file is whole, and what its first record keeps for the agent is not of a form that this version knows.
    Foreign {
        /// Why not.
        error: String,
    },
    /// The file is gone.
    Lost,
    /// The file cannot be read.
    Unreadable {
        /// Why.
        error: String,
    },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Damage::Corrupted { record, at } => write!(f, "record {record}, at byte {at}, is corrupted"),
            Damage::OutOfSequence { record, found } => write!(f, "record {found} is in the place of record {record}"),
            Damage::CutOff { length, expected } => write!(f, "it was cut off at {length} of {expected} bytes"),
            Damage::TornDecision { record } => write!(f, "record {record}, which may be a decision, is incomplete"),
            Damage::Foreign { error } => write!(
                f,
                "an agent of another version has written it ({error}); start that version until the migration has ended, or decide by hand"
            ),
            Damage::Lost => f.write_str("its file is gone"),
            Damage::Unreadable { error } => write!(f, "it cannot be read: {error}"),
        }
    }
}

/// What was read of a journal's bytes.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The records that are whole, in their order; behind damage, too.
    pub records: Vec<Record>,
    /// Where the last record ends, in bytes.
    pub end: usize,
    /// The number of the last record.
    pub sequence: u32,
    /// The length that the file had at least, 0 where that is not known.
    pub size: usize,
    /// What is wrong.
    pub damage: Option<Damage>,
    /// The word of a decision stands in what is damaged.
    pub mentions_decision: bool,
}

/// A record as a line. `size` is called with the line's length, and returns the length that the file has at least.
pub(super) fn line(
    sequence: u32,
    record: &Record,
    size: impl FnOnce(usize) -> usize,
) -> Result<Vec<u8>, serde_json::Error> {
    let json = serde_json::to_vec(record)?;
    let too_long = |_| serde::ser::Error::custom("a record is longer than 4 GiB");
    let length = u32::try_from(json.len()).map_err(too_long)?;
    let size = u32::try_from(size(HEADER + json.len() + 1)).map_err(too_long)?;
    let mut line = format!("00000000 {sequence:08x} {length:08x} {size:08x} ").into_bytes();
    line.extend(json);
    let crc = format!("{:08x}", crc32fast::hash(&line[9..]));
    line[..8].copy_from_slice(crc.as_bytes());
    line.push(b'\n');
    Ok(line)
}

/// A line's numbers.
#[derive(Clone, Copy)]
struct Header {
    crc: u32,
    sequence: u32,
    length: usize,
    size: usize,
}

impl Header {
    fn read(text: &[u8]) -> Option<Self> {
        let number = |at: usize| {
            let digits = text.get(at..at + 8)?;
            let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
            let separated = *text.get(at + 8)? == b' ';
            let digits = std::str::from_utf8(digits).ok().filter(|d| separated && d.as_bytes().iter().all(is_digit))?;
            u32::from_str_radix(digits, 16).ok()
        };
        let (crc, sequence, length, size) = (number(0)?, number(9)?, number(18)?, number(27)?);
        Some(Self { crc, sequence, length: usize::try_from(length).ok()?, size: usize::try_from(size).ok()? })
    }

    /// The whole line's length, if the file can have such a one here.
    fn line(self, left: usize) -> Option<usize> {
        self.length.checked_add(HEADER + 1).filter(|line| *line <= left)
    }
}

/// A line that fits its checksum.
struct Line {
    header: Header,
    record: Record,
    /// Its length in bytes, its end included.
    length: usize,
    /// Its end is what it should be.
    ends: bool,
}

fn read_line(text: &[u8]) -> Option<Line> {
    let header = Header::read(text)?;
    let length = header.line(text.len())?;
    if crc32fast::hash(&text[9..length - 1]) != header.crc {
        return None;
    }
    let record = serde_json::from_slice(&text[HEADER..length - 1]).ok()?;
    Some(Line { header, record, length, ends: text[length - 1] == b'\n' })
}

/// Reads what is there.
pub(super) fn read(text: &[u8]) -> Reading {
    let mut reading = Reading::default();
    let mut is_old = true;
    while reading.damage.is_none() {
        let rest = &text[reading.end..];
        if rest.iter().all(|byte| *byte == 0) {
            break;
        }
        if is_old && rest[0] == b'{' {
            if !read_old(rest, &mut reading) {
                break;
            }
            continue;
        }
        is_old = false;
        let expected = reading.sequence + 1;
        match read_line(rest) {
            Some(line) if line.header.sequence == expected => {
                take(line, &mut reading);
            }
            Some(line) => {
                let found = line.header.sequence;
                reading.damage = Some(Damage::OutOfSequence { record: expected, found });
            }
            None if is_torn(rest, reading.size != 0) => {
                if may_be_decided(&reading.records) {
                    reading.damage = Some(Damage::TornDecision { record: expected });
                }
                break;
            }
            None => reading.damage = Some(Damage::Corrupted { record: expected, at: reading.end }),
        }
    }
    // A file that was cut off can look as if it were torn or corrupted besides.
    if text.len() < reading.size {
        reading.damage = Some(Damage::CutOff { length: text.len(), expected: reading.size });
    }
    if reading.damage.is_some() {
        salvage(text, &mut reading);
    }
    reading
}

fn take(line: Line, reading: &mut Reading) {
    if !line.ends {
        reading.damage = Some(Damage::Corrupted { record: line.header.sequence, at: reading.end });
    }
    reading.end += line.length;
    reading.sequence = line.header.sequence;
    reading.size = line.header.size;
    reading.records.push(line.record);
}

/// Reads a line without numbers; false at the end.
fn read_old(rest: &[u8], reading: &mut Reading) -> bool {
    let text = &rest[..rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len())];
    let Some(end) = text.iter().position(|byte| *byte == b'\n') else { return false };
    match serde_json::from_slice(&text[..end]) {
        Ok(record) => {
            reading.records.push(record);
            reading.sequence += 1;
            reading.end += end + 1;
        }
        Err(_) => reading.damage = Some(Damage::Corrupted { record: reading.sequence + 1, at: reading.end }),
    }
    true
}

/// Reads the lines behind the damage that are whole.
fn salvage(text: &[u8], reading: &mut Reading) {
    let rest = &text[reading.end..];
    let mut damaged = Vec::new();
    let mut at = 0;
    while at < rest.len() {
        // A line begins at the end of another one; where that end is damaged, its length tells.
        if let Some(line) = read_line(&rest[at..]) {
            at += line.length;
            // One that is there twice says nothing new.
            if !reading.records.contains(&line.record) {
                reading.records.push(line.record);
            }
            continue;
        }
        let end = rest[at..].iter().position(|byte| *byte == b'\n').map_or(rest.len(), |end| at + end + 1);
        damaged.extend_from_slice(&rest[at..end]);
        at = end;
    }
    let mentions = |word: &str| damaged.windows(word.len()).any(|window| window == word.as_bytes());
    reading.mentions_decision = mentions("\"commit\"") || mentions("\"given-up\"");
}

/// Whether a crash may have left this: a part of one line, and zeros in the place of the rest; or the file's end, where that
/// was not made before.
fn is_torn(rest: &[u8], is_reserved: bool) -> bool {
    let written = rest.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let zeros = |text: &[u8]| text.iter().filter(|byte| **byte == 0).count();
    let fragment = &rest[..written];
    // One line at most, whose end is the last thing there is of it.
    if fragment[..written.saturating_sub(1)].contains(&b'\n') || !is_of_line(fragment) {
        return false;
    }
    let room = if is_reserved { rest.len() } else { usize::MAX };
    match Header::read(rest) {
        // A length that is wrong by itself makes a whole line look like the beginning of a longer one.
        Some(header) => header.line(room).is_some_and(|line| {
            let missing = if fragment.ends_with(b"\n") { 0 } else { line.saturating_sub(written) };
            written <= line && zeros(fragment) + missing >= TORN
        }),
        None => {
            let header = &rest[..HEADER.min(rest.len())];
            let lacks = header.contains(&0) || (header.len() < HEADER && !is_reserved);
            lacks && (zeros(fragment) >= TORN || !fragment.ends_with(b"\n"))
        }
    }
}

/// Whether each byte of a fragment is zero, or one that a line can have there.
fn is_of_line(fragment: &[u8]) -> bool {
    let fits = |(at, byte): (usize, &u8)| match at {
        8 | 17 | 26 | 35 => *byte == b' ',
        ..HEADER => byte.is_ascii_digit() || (b'a'..=b'f').contains(byte),
        _ => *byte >= b' ' || *byte == b'\n',
    };
    fragment.iter().enumerate().all(|(at, byte)| *byte == 0 || fits((at, byte)))
}

/// Whether the next record may be a decision on which somebody has acted.
fn may_be_decided(records: &[Record]) -> bool {
    match records.first() {
        Some(Record::Begin { side: Side::Source, .. }) => {
            let open = !records.iter().any(|r| matches!(r, Record::Undone { .. } | Record::Done));
            open && records.contains(&Record::step(SourceStep::AwaitReady))
        }
        Some(Record::Group { .. }) => true,
        _ => false,
    }
}
