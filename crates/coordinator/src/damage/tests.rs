use proptest::prelude::*;
use serde_json::Value;
use tranship_types::Side;

use super::*;
use crate::{Damage, Ending, Journal, Standing, standing};

const ORIGINALS: [Original; 5] = [Original::Frozen, Original::Runs, Original::Gone, Original::Other, Original::Unknown];
const REPLICAS: [Replica; 4] = [Replica::Held, Replica::Runs, Replica::Gone, Replica::Unknown];
const DESTINATIONS: [FromDestination; 8] = [
    FromDestination::Silent,
    FromDestination::Nothing,
    FromDestination::NeverReady,
    FromDestination::Stopped,
    FromDestination::Ready,
    FromDestination::Running,
    FromDestination::Lost,
    FromDestination::Unknown,
];
const SOURCES: [FromSource; 6] = [
    FromSource::Silent,
    FromSource::Nothing,
    FromSource::Undecided,
    FromSource::Committed,
    FromSource::TakenBack,
    FromSource::Unknown,
];

fn own_source() -> impl Strategy<Value = SourceRecords> {
    any::<(bool, bool, bool, bool, bool)>().prop_map(|(committed, undone, given_up, released, done)| SourceRecords {
        committed,
        undone,
        given_up,
        released,
        done,
    })
}

proptest! {
    // A few times as many as there are combinations.
    #![proptest_config(ProptestConfig::with_cases(16384))]

    #[test]
    fn a_source_lets_the_original_run_only_where_no_copy_can(
        own in own_source(), here in prop::sample::select(&ORIGINALS), there in prop::sample::select(&DESTINATIONS),
        directory in any::<bool>(),
    ) {
        use FromDestination as There;
        let open = !(own.undone || own.given_up || own.done);
        match source(own, here, there, directory) {
            SourceVerdict::AbortAndUndo => {
                prop_assert!(open && !own.committed && !own.released);
                prop_assert!(matches!(there, There::Nothing | There::NeverReady | There::Stopped | There::Ready));
                prop_assert!(matches!(here, Original::Frozen | Original::Runs));
            }
            SourceVerdict::Undo => prop_assert!(own.undone),
            SourceVerdict::GiveUp => prop_assert!(own.given_up),
            SourceVerdict::Forward => {
                prop_assert!(open && here != Original::Runs && here != Original::Unknown && here != Original::Other);
                let decided = own.released || there == There::Running || (own.committed && there == There::Ready);
                prop_assert!(decided, "a copy is let run that nobody has decided for");
            }
            SourceVerdict::Forget => prop_assert!(!directory && matches!(here, Original::Gone | Original::Other)),
            SourceVerdict::Ended { moved } => prop_assert!(own.done && (!moved || !own.undone)),
            SourceVerdict::Wait(_) => prop_assert!(!own.done || here == Original::Unknown),
        }
    }

    #[test]
    fn a_destination_undoes_no_copy_that_runs_and_lets_none_run_by_itself(
        ready in any::<bool>(), running in any::<bool>(), undone in any::<bool>(), committed in any::<bool>(),
        ended in any::<bool>(), tidied in any::<bool>(),
        here in prop::sample::select(&REPLICAS), there in prop::sample::select(&SOURCES),
    ) {
        let (ready, committed, ended) = (ready || running || committed, committed || running, ended && undone);
        let own = DestinationRecords { ready, committed, running, undone, ended };
        match destination(own, here, there, tidied) {
            DestinationVerdict::Undo => {
                prop_assert!(here != Replica::Unknown);
                let settled = there == FromSource::TakenBack || (there == FromSource::Nothing && !committed);
                prop_assert!(undone || (here != Replica::Runs && !running && settled));
            }
            DestinationVerdict::Running => {
                let removed = here == Replica::Gone && there == FromSource::Committed && tidied;
                prop_assert!(here == Replica::Runs || running || removed);
            }
            DestinationVerdict::Forget => prop_assert!(ended),
            DestinationVerdict::Ready => prop_assert!(ready || there == FromSource::Committed),
            DestinationVerdict::Run => prop_assert!(false, "only the operator can say that"),
            DestinationVerdict::Wait(_) => prop_assert!(!undone || here == Replica::Unknown),
        }
    }
}

#[test]
fn the_operators_word_makes_no_second_copy_run() {
    for here in ORIGINALS {
        for there in DESTINATIONS {
            for down in [false, true] {
                let kept = source_by_word(here, there, true, down);
                let may = match (here, there) {
                    (Original::Unknown, _) | (_, FromDestination::Running) => false,
                    (Original::Gone, _) => there_is_settled(there),
                    _ => true,
                };
                let sure = down || !matches!(there, FromDestination::Silent | FromDestination::Unknown);
                assert_eq!(kept.is_ok(), may && sure, "{here:?} {there:?} {down} {kept:?}");
                let given = source_by_word(here, there, false, down);
                let may = matches!(here, Original::Frozen | Original::Gone | Original::Other);
                let runs = matches!(there, FromDestination::Ready | FromDestination::Running);
                assert_eq!(given.is_ok(), may && runs, "{here:?} {there:?} {down} {given:?}");
            }
        }
    }
    for here in REPLICAS {
        for there in SOURCES {
            let kept = destination_by_word(here, there, true, false);
            assert!(kept != Ok(DestinationVerdict::Run), "not without the word that the source's host is down");
            if here == Replica::Held {
                let down = destination_by_word(here, there, true, true);
                let may_run = matches!(there, FromSource::Silent | FromSource::Nothing);
                assert_eq!(down == Ok(DestinationVerdict::Run), may_run, "{there:?}");
            }
            let removed = destination_by_word(here, there, false, true) == Ok(DestinationVerdict::Undo);
            let decides = matches!(there, FromSource::Committed | FromSource::Undecided);
            let stopped = matches!(here, Replica::Held | Replica::Gone);
            assert_eq!(removed, stopped && !decides, "{here:?} {there:?}");
        }
    }
}

fn damaged(side: Side) -> (Damaged, Record) {
    let (id, peer) = ("m-1".parse().unwrap(), "b".parse().unwrap());
    let begin = Record::Begin { id, side, container: "c".into(), peer, context: Value::Null };
    let damaged = Damaged {
        path: "m-1.jsonl".into(),
        begin: Some(begin.clone()),
        records: vec![begin.clone()],
        damage: Damage::Lost,
        mentions_decision: false,
    };
    (damaged, begin)
}

/// Does all that it is asked to.
struct Willing;

impl crate::SourcePort for Willing {
    fn run(&mut self, _: SourceStep) -> Result<(), Failure> {
        Ok(())
    }
    fn undo(&mut self, _: SourceStep) -> Result<(), Failure> {
        Ok(())
    }
    fn entered(&mut self, _: tranship_types::Phase) {}
    fn try_again(&mut self, _: SourceStep, _: &Failure) -> crate::Retry {
        crate::Retry::Stop
    }
    fn inject(&mut self, _: crate::Fault) {}
}

#[test]
fn a_mended_journal_says_what_the_verdict_is() {
    let directory = tempfile::tempdir().unwrap();
    let (damaged, begin) = damaged(Side::Source);
    let failure = Failure::new("damaged");
    for (verdict, fits) in [
        (SourceVerdict::AbortAndUndo, (|e| matches!(e, Ending::Undone { .. })) as fn(&Ending) -> bool),
        (SourceVerdict::GiveUp, |e| matches!(e, Ending::GivenUp { .. })),
        (SourceVerdict::Forward, |e| *e == Ending::Moved),
    ] {
        let records = source_records(&damaged, begin.clone(), verdict, true, &failure).unwrap();
        let mut journal = Journal::replace(&directory.path().join("m-1.jsonl"), &records).unwrap();
        let ending = crate::recover(&mut Willing, &mut journal, &records);
        assert!(fits(&ending), "{verdict:?}: {ending:?}");
    }
    let (damaged, begin) = self::damaged(Side::Destination);
    for (verdict, directory, stands) in [
        (DestinationVerdict::Undo, true, Standing::Undo),
        (DestinationVerdict::Ready, true, Standing::Ready),
        (DestinationVerdict::Running, true, Standing::Running),
        (DestinationVerdict::Running, false, Standing::Running),
    ] {
        let records = destination_records(&damaged, begin.clone(), verdict, directory, &failure).unwrap();
        assert_eq!(standing(&records), stands);
        let tidied = crate::begun(&records).contains(&DestinationStep::Tidy);
        assert_eq!(tidied, verdict == DestinationVerdict::Running && !directory);
    }
}
