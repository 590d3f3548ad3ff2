//! What is read of journals that are torn, damaged, cut off and lost.

use proptest::prelude::*;
use serde_json::Value;
use tranship_types::{GroupId, MigrationId};

use super::*;
use crate::{DestinationStep, Failure, SourceStep};

/// Zeros behind the records, where files are made by hand.
const ROOM: usize = 200;

fn id() -> MigrationId {
    "m-1".parse().unwrap()
}

fn begin(side: Side) -> Record {
    let (container, peer) = ("c".into(), "b".parse().unwrap());
    Record::Begin { id: id(), side, container, peer, context: Value::String("a commit\n".into()) }
}

fn step(name: &str) -> Record {
    Record::step(name)
}

fn why() -> Failure {
    Failure::new("why \u{fc} not")
}

/// All that a source can have in its journal; it has one of them, up to some record.
fn sources() -> Vec<Vec<Record>> {
    let start = || [begin(Side::Source)].into_iter().chain(SourceStep::BEFORE_COMMIT.map(Record::step));
    let after = SourceStep::AFTER_COMMIT.map(Record::step);
    let (undone, given_up) = (Record::Undone { failure: why() }, Record::GivenUp { failure: why() });
    vec![
        start().chain([Record::Commit]).chain(after.clone()).chain([Record::Done]).collect(),
        start().chain([undone, Record::Done]).collect(),
        start().chain([Record::Commit, after[0].clone(), given_up, Record::Done]).collect(),
    ]
}

fn destinations() -> Vec<Vec<Record>> {
    let steps = |steps: &[DestinationStep]| steps.iter().map(Record::step).collect::<Vec<_>>();
    let ready = [
        vec![begin(Side::Destination)],
        steps(&DestinationStep::PREPARE),
        steps(&DestinationStep::MAKE_READY),
        vec![Record::Ready],
    ]
    .concat();
    let running = [vec![Record::Commit], steps(&DestinationStep::COMMIT), vec![Record::Running]].concat();
    let drained = [steps(&DestinationStep::DRAIN), vec![Record::Done]].concat();
    vec![
        [ready.clone(), running.clone(), drained.clone()].concat(),
        [ready.clone(), vec![Record::Kept], running, drained].concat(),
        [ready, vec![Record::Undone { failure: why() }, Record::Done]].concat(),
    ]
}

fn groups() -> Vec<Vec<Record>> {
    let id: GroupId = "g-1".parse().unwrap();
    vec![vec![Record::Group { id }, Record::Commit]]
}

fn all() -> Vec<Vec<Record>> {
    [sources(), destinations(), groups()].concat()
}

/// A file with these records, and where the last of them begins.
fn file(records: &[Record]) -> (Vec<u8>, usize) {
    let lines = |size: usize| -> Vec<Vec<u8>> {
        let line = |(at, record)| format::line(number(at), record, |_| size).unwrap();
        records.iter().enumerate().map(line).collect()
    };
    let size = lines(0).concat().len() + ROOM;
    let lines = lines(size);
    let last = lines.iter().map(Vec::len).sum::<usize>() - lines.last().map_or(0, Vec::len);
    let mut text = lines.concat();
    text.resize(size, 0);
    (text, last)
}

/// Whether these are some of the others, in their order.
fn are_among(some: &[Record], others: &[Record]) -> bool {
    let mut others = others.iter();
    some.iter().all(|record| others.any(|other| other == record))
}

/// A journal that was changed is never taken for another one.
fn is_right(text: &[u8], records: &[Record], what: impl fmt::Display) {
    let reading = format::read(text);
    match &reading.damage {
        None => assert_eq!(reading.records, records, "{what}"),
        Some(damage) => assert!(are_among(&reading.records, records), "{what}: {damage}: {:?}", reading.records),
    }
}

#[test]
fn a_bit_that_is_wrong_at_any_place_of_a_journal_of_any_length_is_found() {
    for records in all() {
        for length in 1..=records.len() {
            let records = &records[..length];
            let (text, last) = file(records);
            for at in 0..text.len() {
                // In what was read in the shorter ones one of them is enough.
                let bits = if at < last { at % 8..at % 8 + 1 } else { 0..8 };
                for bit in bits {
                    let mut flipped = text.clone();
                    flipped[at] ^= 1 << bit;
                    is_right(&flipped, records, format_args!("bit {bit} of byte {at} after {length} records"));
                }
            }
        }
    }
}

#[test]
fn a_byte_that_is_wrong_in_the_last_record_is_found_whatever_it_is() {
    for records in all() {
        let (text, last) = file(&records);
        for at in last..text.len() - ROOM {
            for byte in (0..=255).filter(|byte| *byte != text[at]) {
                let mut wrong = text.clone();
                wrong[at] = byte;
                let reading = format::read(&wrong);
                assert!(reading.damage.is_some(), "{byte} at {at}: {:?}", reading.records);
                assert!(are_among(&reading.records, &records), "{byte} at {at}: {:?}", reading.records);
            }
        }
    }
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_found() {
    for records in all() {
        for length in 1..=records.len() {
            let (text, _) = file(&records[..length]);
            // In the first record it is the copy of that record which tells.
            let first = format::line(1, &records[0], |_| 0).unwrap().len();
            for end in first..text.len() {
                let reading = format::read(&text[..end]);
                assert!(reading.damage.is_some(), "at {end} after {length} records: {:?}", reading.records);
                assert!(are_among(&reading.records, &records[..length]), "at {end} after {length} records");
            }
        }
    }
}

#[test]
fn a_record_that_is_missing_or_there_twice_is_found() {
    for records in all() {
        let line = |at: usize| format::line(number(at), &records[at], |_| 0).unwrap();
        let lines: Vec<_> = (0..records.len()).map(line).collect();
        for at in 0..lines.len() {
            let twice = [&lines[..=at], &lines[at..]].concat().concat();
            let reading = format::read(&twice);
            assert!(matches!(reading.damage, Some(Damage::OutOfSequence { .. })), "{:?}", reading.damage);
            assert_eq!(reading.records, records);
            let missing = [&lines[..at], &lines[at + 1..]].concat().concat();
            // The last one alone may have never been there.
            let found = format::read(&missing).damage.is_some();
            assert_eq!(found, at + 1 < lines.len(), "without record {}", at + 1);
        }
    }
}

#[test]
fn whatever_of_a_line_a_crash_leaves_the_records_before_it_are_kept_and_others_can_follow() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = Journal::create(directory.path(), id(), &begin(Side::Source)).unwrap();
    journal.append(&step("freeze")).unwrap();
    let (before, end) = (std::fs::read(&journal.path).unwrap(), journal.end as usize);
    let undone = Record::Undone { failure: why() };
    let line = format::line(3, &undone, |_| before.len()).unwrap();
    let parts = (1..=line.len()).flat_map(|end| (0..end).map(move |start| start..end));
    for part in parts.filter(|part| *part != (0..line.len())) {
        let mut torn = before.clone();
        torn[end + part.start..end + part.end].copy_from_slice(&line[part.clone()]);
        std::fs::write(&journal.path, &torn).unwrap();
        match Journal::open(&journal.path) {
            Ok((mut journal, records)) => {
                assert_eq!(records, [begin(Side::Source), step("freeze")], "{part:?}");
                journal.append(&Record::Done).unwrap();
                let records = Journal::read(&journal.path).unwrap();
                assert_eq!(records, [begin(Side::Source), step("freeze"), Record::Done], "{part:?}");
            }
            // A single byte that is missing can be one that is wrong.
            Err(damaged) => assert!(part.len() + 1 == line.len(), "{part:?}: {damaged}"),
        }
    }
}

#[test]
fn what_is_torn_where_a_decision_belongs_is_not_dropped() {
    for (records, side) in
        [(&sources()[0][..10], "a source"), (&sources()[0][..12], "it after COMMIT"), (&groups()[0][..1], "a group")]
    {
        let (mut text, _) = file(records);
        let end = text.len() - ROOM;
        text[end..end + 20]
            .copy_from_slice(&format::line(number(records.len()), &Record::Commit, |_| 0).unwrap()[..20]);
        let reading = format::read(&text);
        assert!(matches!(reading.damage, Some(Damage::TornDecision { .. })), "of {side}: {:?}", reading.damage);
        assert_eq!(reading.records, records);
    }
    let (mut text, _) = file(&sources()[0][..9]);
    let end = text.len() - ROOM;
    text[end] = b'7';
    assert_eq!(format::read(&text).damage, None, "a step that was not begun");
}

#[test]
fn the_word_of_a_decision_is_seen_in_what_is_damaged_and_nowhere_else() {
    let records = &sources()[0][..11];
    let (text, last) = file(records);
    let with = |at: usize| {
        let mut text = text.clone();
        text[at] ^= 1;
        format::read(&text)
    };
    let reading = with(last + 1);
    assert!(reading.mentions_decision && !reading.records.contains(&Record::Commit), "{reading:?}");
    let reading = with(last - 3);
    assert!(!reading.mentions_decision && reading.records.contains(&Record::Commit), "{reading:?}");
}

#[test]
fn a_journal_of_the_version_before_is_read_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m-1.jsonl");
    let records = &sources()[0][..5];
    let old: String = records.iter().map(|r| serde_json::to_string(r).unwrap() + "\n").collect();
    for tail in [0, 300] {
        std::fs::write(&path, [old.as_bytes(), &vec![0; tail]].concat()).unwrap();
        let (mut journal, read) = Journal::open(&path).unwrap();
        assert_eq!(read, records);
        journal.append(&step("freeze")).unwrap();
        journal.decide(&Record::Commit).unwrap();
        let (mut journal, read) = Journal::open(&path).unwrap();
        assert_eq!(read, [records, &[step("freeze"), Record::Commit]].concat());
        journal.append(&Record::Done).unwrap();
        assert_eq!(Journal::read(&path).unwrap().len(), 8);
    }
    std::fs::write(&path, &old.as_bytes()[..old.len() - 3]).unwrap();
    assert_eq!(Journal::read(&path).unwrap(), records[..4], "torn");
    std::fs::write(&path, old.replace("record\":\"step", "record\":\"stop")).unwrap();
    let damaged = Journal::read(&path).unwrap_err();
    assert_eq!((damaged.begin, damaged.records), (Some(records[0].clone()), vec![records[0].clone()]));
}

#[test]
fn the_container_is_known_whatever_is_wrong_with_the_journal() {
    let directory = tempfile::tempdir().unwrap();
    let begin = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), id(), &begin).unwrap();
    journal.append(&step("inspect")).unwrap();
    let path = journal.path().to_owned();
    let text = std::fs::read(&path).unwrap();
    let is_known = |damage: fn(&Damage) -> bool| {
        let damaged = Journal::open(&path).unwrap_err();
        assert!(damage(&damaged.damage), "{damaged}");
        assert_eq!((damaged.begin.as_ref(), damaged.id().as_str()), (Some(&begin), "m-1"), "{damaged}");
    };
    let mut flipped = text.clone();
    flipped[50] ^= 4;
    std::fs::write(&path, &flipped).unwrap();
    is_known(|damage| matches!(damage, Damage::Corrupted { record: 1, .. }));
    for end in [0, 1, 40, 200, text.len() - 1] {
        std::fs::write(&path, &text[..end]).unwrap();
        is_known(|damage| matches!(damage, Damage::CutOff { .. } | Damage::Corrupted { .. }));
    }
    std::fs::write(&path, vec![0; text.len()]).unwrap();
    is_known(|damage| matches!(damage, Damage::Corrupted { .. }));
    std::fs::remove_file(&path).unwrap();
    is_known(|damage| *damage == Damage::Lost);
    assert_eq!(Journal::lost(directory.path()), std::slice::from_ref(&path));
    std::fs::create_dir(&path).unwrap();
    is_known(|damage| matches!(damage, Damage::Unreadable { .. }));
}

#[test]
fn a_journal_that_an_agent_was_just_making_says_that_nothing_was_begun() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m-1.jsonl");
    let line = format::line(1, &begin(Side::Source), |line| line + RESERVED).unwrap();
    for end in 0..line.len() - 1 {
        std::fs::write(&path, &line[..end]).unwrap();
        assert_eq!(Journal::read(&path).unwrap(), [], "{end} bytes");
    }
}

#[test]
fn a_mended_journal_takes_the_place_of_the_damaged_one_whenever_the_agent_dies() {
    let directory = tempfile::tempdir().unwrap();
    let at = |extension: &str| directory.path().join("m-1").with_extension(extension);
    let begin = begin(Side::Source);
    Journal::create(directory.path(), id(), &begin).unwrap();
    let whole = std::fs::read(at(JOURNAL)).unwrap();
    let damaged = &whole[..60];
    let mended = [begin.clone(), step("inspect"), Record::Commit];
    // What an agent that died before the last rename has left.
    for left in [&[][..], &["nascent"], &["nascent", "damaged"]] {
        std::fs::write(at(JOURNAL), damaged).unwrap();
        left.iter().for_each(|extension| std::fs::write(at(extension), damaged).unwrap());
        assert_eq!(Journal::open(&at(JOURNAL)).unwrap_err().begin, Some(begin.clone()));
        let mut journal = Journal::replace(&at(JOURNAL), &mended).unwrap();
        journal.append(&Record::Done).unwrap();
        let records = Journal::read(&at(JOURNAL)).unwrap();
        assert_eq!(records, [&mended[..], &[Record::Done]].concat());
        assert_eq!(std::fs::read(at("damaged")).unwrap(), damaged);
        assert!(!at("nascent").exists() && Journal::lost(directory.path()).is_empty());
        std::fs::remove_file(at("damaged")).unwrap();
    }
    std::fs::remove_file(at(JOURNAL)).unwrap();
    std::fs::remove_file(at(FIRST)).unwrap();
    Journal::replace(&at(JOURNAL), &mended).unwrap().close().unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "one that was lost is not kept");
}

#[test]
fn a_decision_changes_neither_the_length_of_the_file_nor_where_it_is() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let begin = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), id(), &begin).unwrap();
    let size = |journal: &Journal| journal.file.metadata().map(|m| (m.len(), m.blocks())).unwrap();
    let before = size(&journal);
    journal.append(&step("freeze")).unwrap();
    journal.decide(&Record::Commit).unwrap();
    assert_eq!(size(&journal), before);
    let (mut journal, records) = Journal::open(&journal.path).unwrap();
    assert_eq!(records, [begin, step("freeze"), Record::Commit]);
    journal.append(&Record::Done).unwrap();
    assert_eq!(size(&journal), before, "to open it is no reason to make it shorter");
    journal.end -= 10;
    journal.cut();
    assert_eq!(size(&journal), before, "nor is a failure");
}

#[test]
fn a_journal_may_grow_beyond_what_was_reserved_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = Journal::create(directory.path(), id(), &begin(Side::Source)).unwrap();
    let long = step(&"x".repeat(RESERVED / 3));
    (0..5).for_each(|_| journal.append(&long).unwrap());
    journal.decide(&Record::Commit).unwrap();
    let records = Journal::read(&journal.path).unwrap();
    assert_eq!((records.len(), records.last()), (7, Some(&Record::Commit)));
    let text = std::fs::read(&journal.path).unwrap();
    for end in [journal.end as usize, text.len() - 1, text.len() / 2] {
        std::fs::write(&journal.path, &text[..end]).unwrap();
        assert!(matches!(Journal::read(&journal.path).unwrap_err().damage, Damage::CutOff { .. }), "cut off at {end}");
    }
}

#[test]
fn a_second_journal_of_the_same_migration_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    Journal::create(directory.path(), id(), &Record::Ready).unwrap();
    assert!(Journal::create(directory.path(), id(), &Record::Ready).is_err());
    assert!(Journal::open(&directory.path().join("m-1.jsonl")).is_ok(), "and does the first one no harm");
}

proptest! {
    /// A whole block of the disk that reads as something else.
    #[test]
    fn a_stretch_that_is_wrong_is_found(which in 0_usize..6, start in 0_usize..2000, noise in prop::collection::vec(1_u8.., 2..600)) {
        let records = &all()[which];
        let (text, _) = file(records);
        let start = start % (text.len() - ROOM);
        let mut wrong = text.clone();
        wrong[start..].iter_mut().zip(&noise).for_each(|(byte, noise)| *byte ^= noise);
        let reading = format::read(&wrong);
        prop_assert!(are_among(&reading.records, records), "{:?}", reading.records);
        prop_assert!(reading.damage.is_some() || reading.records == *records, "{:?}", reading.records);
    }
}
