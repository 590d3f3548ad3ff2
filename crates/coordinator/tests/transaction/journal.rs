//! What a journal keeps, and what is read from one.

use std::os::fd::AsRawFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;
use tranship_coordinator::{
    DestinationPort, DestinationStep, Ending, Failure, Fault, FaultPlan, Journal, Record, Retry, SourcePort,
    SourceStep, Standing, begun, commit, drain, make_ready, migrate, prepare, recover, standing,
};
use tranship_types::{MigrationId, Phase, Side};

fn begin(side: Side) -> (MigrationId, Record) {
    let id: MigrationId = "m-1".parse().unwrap();
    let peer = "b".parse().unwrap();
    (id.clone(), Record::Begin { id, side, container: "c".into(), peer, context: Value::Null })
}

/// Writes down what it is asked to do, and does it well.
#[derive(Default)]
struct Scribe(Vec<String>);

/// The same, where the decision is one that it shares with others, who are for it.
#[derive(Default)]
struct Member(Scribe);

impl SourcePort for Member {
    fn run(&mut self, step: SourceStep) -> Result<(), Failure> {
        SourcePort::run(&mut self.0, step)
    }
    fn undo(&mut self, step: SourceStep) -> Result<(), Failure> {
        SourcePort::undo(&mut self.0, step)
    }
    fn agree(&mut self) -> Result<bool, Failure> {
        self.0.0.push("agree".to_owned());
        Ok(true)
    }
    fn agreed(&mut self) {
        self.0.0.push("agreed".to_owned());
    }
    fn entered(&mut self, _: Phase) {}
    fn try_again(&mut self, _: SourceStep, _: &Failure) -> Retry {
        Retry::Again
    }
    fn inject(&mut self, _: Fault) {}
}

#[test]
fn a_shared_decision_counts_also_where_it_cannot_be_written_down_here() {
    let memory = memfd_create("journal", MFdFlags::empty()).unwrap();
    let written = format!("/proc/self/fd/{}", memory.as_raw_fd());
    for (path, is_written) in [(written.as_str(), true), ("/dev/null", false)] {
        let (mut journal, _) = Journal::open(path.as_ref()).unwrap();
        let mut port = Member::default();
        assert_eq!(migrate(&mut port, &mut journal, &FaultPlan::default()), Ending::Moved);
        let after = port.0.0.split_off(SourceStep::BEFORE_COMMIT.len());
        let agreed: &[&str] = if is_written { &["agree", "agreed"] } else { &["agree"] };
        assert_eq!(after, [agreed, &["deliver", "drain", "release"]].concat());
    }
}

impl SourcePort for Scribe {
    fn run(&mut self, step: SourceStep) -> Result<(), Failure> {
        self.0.push(step.to_string());
        Ok(())
    }
    fn undo(&mut self, step: SourceStep) -> Result<(), Failure> {
        self.0.push(format!("undo {step}"));
        Ok(())
    }
    fn entered(&mut self, _: Phase) {}
    fn try_again(&mut self, _: SourceStep, _: &Failure) -> Retry {
        Retry::Again
    }
    fn inject(&mut self, _: Fault) {}
}

impl DestinationPort for Scribe {
    fn run(&mut self, step: DestinationStep) -> Result<(), Failure> {
        self.0.push(step.to_string());
        Ok(())
    }
    fn undo(&mut self, step: DestinationStep) -> Result<(), Failure> {
        self.0.push(format!("undo {step}"));
        Ok(())
    }
    fn inject(&mut self, _: Fault) {}
}

#[test]
fn a_decision_that_is_not_on_the_disk_is_not_acted_on() {
    // What is written here succeeds, and is never on a disk: to sync it fails.
    let (mut journal, _) = Journal::open("/dev/null".as_ref()).unwrap();
    let mut port = Scribe::default();
    let Ending::Undone { failure, leftovers } = migrate(&mut port, &mut journal, &FaultPlan::default()) else {
        panic!("it was moved")
    };
    assert!(failure.message.contains("cannot be synced"), "{failure}");
    assert_eq!(leftovers.len(), 0);
    let forward = SourceStep::BEFORE_COMMIT.iter().map(ToString::to_string);
    let back = SourceStep::BEFORE_COMMIT.iter().rev().map(|step| format!("undo {step}"));
    assert_eq!(port.0, forward.chain(back).collect::<Vec<_>>());
}

#[test]
fn a_full_disk_keeps_no_committed_container_from_running_but_the_source_from_forgetting_it() {
    let full = memfd_create("full", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    fcntl(&full, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_GROW)).unwrap();
    let (mut journal, _) = Journal::open(format!("/proc/self/fd/{}", full.as_raw_fd()).as_ref()).unwrap();
    let mut port = Scribe::default();
    let failure = commit(&mut port, &mut journal, &FaultPlan::default(), &mut Vec::new()).unwrap_err();
    assert!(failure.message.contains("cannot be written"), "{failure}");
    assert_eq!(port.0, DestinationStep::COMMIT.map(|step| step.to_string()));
}

#[test]
fn an_undone_decision_is_undone() {
    // A decision that could not be synced, nor taken back: nobody has acted on it.
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    let records = [begin, Record::Commit, Record::Undone { failure: Failure::new("no") }];
    let mut port = Scribe::default();
    assert!(matches!(recover(&mut port, &mut journal, &records), Ending::Undone { .. }));
    assert!(port.0.iter().all(|what| what.starts_with("undo ")), "{:?}", port.0);
}

#[test]
fn without_a_journal_nothing_is_begun() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a file");
    std::fs::write(&file, "").unwrap();
    let (id, begin) = begin(Side::Source);
    let error = Journal::create(&file, &id, &begin).unwrap_err().to_string();
    assert!(error.contains("cannot be made"), "{error}");
}

#[test]
fn a_journal_torn_in_its_first_line_says_that_nothing_was_begun() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m-1.jsonl");
    std::fs::write(&path, b"{\"record\":\"begin\",\"id\":\"m-1\",\"container\":\"\xc3").unwrap();
    let (_, records) = Journal::open(&path).unwrap();
    assert_eq!(records, []);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn a_damaged_journal_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m-1.jsonl");
    std::fs::write(&path, "{\"record\":\"commit\"}\nnonsense\n{\"record\":\"done\"}\n").unwrap();
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("m-1.jsonl") && error.contains("is damaged: record 2"), "{error}");
}

#[test]
fn every_record_comes_back_whatever_is_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Source);
    let failure = Failure::new("a\nb\r\n\u{2028}ü\0\"");
    let rest = [
        Record::Step { step: "freeze".into() },
        Record::Ready,
        Record::Commit,
        Record::Running,
        Record::GivenUp { failure: failure.clone() },
        Record::Undone { failure },
        Record::Done,
    ];
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    rest.iter().for_each(|record| journal.append(record).unwrap());
    let path = Journal::list(directory.path()).remove(0);
    let (journal, records) = Journal::open(&path).unwrap();
    assert_eq!(records, [&[begin], &rest[..]].concat());
    journal.close().unwrap();
    assert!(Journal::list(directory.path()).is_empty());
}

#[test]
fn at_each_length_of_a_destinations_journal_it_stands_where_it_should() {
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Destination);
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    let (mut port, plan, mut steps) = (Scribe::default(), FaultPlan::default(), Vec::new());
    prepare(&mut port, &mut journal, &plan, &mut steps).unwrap();
    make_ready(&mut port, &mut journal, &plan, &mut steps).unwrap();
    assert_eq!(steps, [&DestinationStep::PREPARE[..], &DestinationStep::MAKE_READY].concat());
    commit(&mut port, &mut journal, &plan, &mut steps).unwrap();
    assert!(steps.ends_with(&DestinationStep::COMMIT));
    drain(&mut port, &mut journal, &plan).unwrap();

    let (_, records) = Journal::open(&Journal::list(directory.path()).remove(0)).unwrap();
    assert_eq!(begun(&records).iter().map(ToString::to_string).collect::<Vec<_>>(), port.0);
    let mut expected = Standing::Undo;
    for (at, record) in records.iter().enumerate() {
        expected = match record {
            Record::Ready => Standing::Ready,
            Record::Running => Standing::Running,
            Record::Done => Standing::Drained,
            _ => expected,
        };
        assert_eq!(standing(&records[..=at]), expected, "after {record:?}");
        let undone = [&records[..=at], &[Record::Undone { failure: Failure::new("") }]].concat();
        // Also after the commit point: where the source has given it up.
        assert_eq!(standing(&undone), Standing::Undo, "undone after {record:?}");
        assert_eq!(standing(&[&undone[..], &[Record::Done]].concat()), Standing::Ended);
    }
}

#[test]
fn a_source_goes_forward_only_from_a_decision() {
    let plan = FaultPlan::default();
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    assert_eq!(migrate(&mut Scribe::default(), &mut journal, &plan), Ending::Moved);
    let (_, records) = Journal::open(&Journal::list(directory.path()).remove(0)).unwrap();
    let decision = records.iter().position(|r| *r == Record::Commit).expect("a decision");
    for len in 1..=records.len() {
        let mut port = Scribe::default();
        let ending = recover(&mut port, &mut journal, &records[..len]);
        if len <= decision {
            assert!(matches!(&ending, Ending::Undone { leftovers, .. } if leftovers.is_empty()), "{ending:?}");
            assert!(port.0.iter().all(|what| what.starts_with("undo ")), "{:?}", port.0);
        } else {
            assert_eq!(ending, Ending::Moved);
            // From the step that was begun last: what came before it was done.
            let entry = |step: &SourceStep| Record::Step { step: step.to_string() };
            let from =
                SourceStep::AFTER_COMMIT.iter().rposition(|step| records[..len].contains(&entry(step))).unwrap_or(0);
            let ended = records[..len].contains(&Record::Done);
            let left = if ended { &[] } else { &SourceStep::AFTER_COMMIT[from..] };
            assert_eq!(port.0, left.iter().map(ToString::to_string).collect::<Vec<_>>(), "with {len} records");
        }
    }
}

#[test]
fn what_was_undone_is_not_undone_again_by_a_later_agent() {
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    let plan = FaultPlan::parse("source.transfer.after.error").unwrap();
    assert!(matches!(migrate(&mut Scribe::default(), &mut journal, &plan), Ending::Undone { .. }));
    let (_, records) = Journal::open(&Journal::list(directory.path()).remove(0)).unwrap();
    let mut port = Scribe::default();
    let Ending::Undone { failure, leftovers } = recover(&mut port, &mut journal, &records) else { panic!("it moved") };
    assert!(failure.message.contains("transfer"), "the first cause is the one that is told: {failure}");
    // The container may be somewhere else by now.
    assert!(port.0.is_empty() && leftovers.is_empty(), "{:?}", port.0);
}

#[test]
fn what_was_given_up_is_undone_once_by_whichever_agent() {
    let directory = tempfile::tempdir().unwrap();
    let (id, begin) = begin(Side::Source);
    let mut journal = Journal::create(directory.path(), &id, &begin).unwrap();
    let failure = Failure::new("node b is lost");
    let given_up = [begin, Record::Commit, Record::GivenUp { failure: failure.clone() }];
    let ended = Ending::GivenUp { failure, leftovers: Vec::new() };

    let mut port = Scribe::default();
    assert_eq!(recover(&mut port, &mut journal, &given_up), ended);
    let undone = SourceStep::BEFORE_COMMIT.into_iter().chain([SourceStep::Deliver, SourceStep::Drain]);
    let undone: Vec<_> = undone.map(|step| format!("undo {step}")).collect();
    assert_eq!(port.0, undone.into_iter().rev().collect::<Vec<_>>());

    let mut port = Scribe::default();
    assert_eq!(recover(&mut port, &mut journal, &[&given_up[..], &[Record::Done]].concat()), ended);
    assert!(port.0.is_empty(), "{:?}", port.0);
}

/// Fails at one step until it is given up.
struct GivesUp(Scribe, SourceStep);

impl SourcePort for GivesUp {
    fn run(&mut self, step: SourceStep) -> Result<(), Failure> {
        SourcePort::run(&mut self.0, step)?;
        if step == self.1 { Err(Failure::new("no answer")) } else { Ok(()) }
    }
    fn undo(&mut self, step: SourceStep) -> Result<(), Failure> {
        SourcePort::undo(&mut self.0, step)
    }
    fn entered(&mut self, _: Phase) {}
    fn try_again(&mut self, _: SourceStep, failure: &Failure) -> Retry {
        match failure.message.as_str() {
            "no answer" => Retry::GiveUp(Failure::new("node b is lost")),
            _ => Retry::Stop,
        }
    }
    fn inject(&mut self, _: Fault) {}
}

#[test]
fn giving_up_is_not_begun_before_it_is_on_the_disk() {
    // What is written here succeeds, and is never on a disk: to sync it fails.
    let (mut journal, _) = Journal::open("/dev/null".as_ref()).unwrap();
    let mut port = GivesUp(Scribe::default(), SourceStep::Deliver);
    assert_eq!(recover(&mut port, &mut journal, &[begin(Side::Source).1, Record::Commit]), Ending::Suspended);
    assert_eq!(port.0.0, ["deliver"]);
}
