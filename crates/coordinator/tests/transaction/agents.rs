//! The agents of both ends: what is around the transaction, as little as a real agent can do with.

use std::collections::BTreeSet;

use serde_json::Value;
use tranship_coordinator::{
    Ending, Failure, Journal, Record, Standing, abort, begun, commit, drain, make_ready, migrate, prepare, recover,
    standing,
};
use tranship_types::{MigrationId, NodeName, Side};

use crate::ports::{DestinationEnd, SourceEnd, assert_injected};
use crate::stage::{Heard, Request, Response, Stage};

fn create(stage: &Stage, side: Side) -> Result<Journal, Failure> {
    let id: MigrationId = "m-1".parse().expect("an id");
    let peer: NodeName = "other".parse().expect("a name");
    let context = if stage.case.long == Some(side) { "x".repeat(2000).into() } else { Value::Null };
    let begin = Record::Begin { id: id.clone(), side, container: "c".into(), peer, context };
    Journal::create(&stage.directory(side), &id, &begin).map_err(|e| Failure::new(e.to_string()))
}

fn open(stage: &Stage, side: Side) -> Option<(Journal, Vec<Record>)> {
    let path = Journal::list(&stage.directory(side)).into_iter().next()?;
    Some(Journal::open(&path).expect("a journal can be read whatever happened"))
}

/// The source's agent, from its start until it has nothing left to do.
pub fn source(stage: &Stage) {
    while source_goes_on(stage) {}
}

fn source_goes_on(stage: &Stage) -> bool {
    let mut port = SourceEnd(stage);
    let (journal, ending) = match open(stage, Side::Source) {
        Some((mut journal, records)) => {
            let ending = recover(&mut port, &mut journal, &records);
            (journal, ending)
        }
        None => {
            if !stage.turn(Side::Source, "looks for work", |scene| std::mem::take(&mut scene.asked)) {
                return false;
            }
            let Ok(mut journal) = create(stage, Side::Source) else { return false };
            let ending = migrate(&mut port, &mut journal, &stage.plan);
            (journal, ending)
        }
    };
    if let Ending::Undone { failure, .. } | Ending::GivenUp { failure, .. } = &ending {
        assert_injected(&failure.message);
    }
    stage.turn(Side::Source, format_args!("{ending:?}"), |scene| scene.endings.push(ending.clone()));
    let word = if matches!(ending, Ending::GivenUp { .. }) { Request::Void } else { Request::Abort };
    match ending {
        Ending::Suspended => true,
        Ending::Moved => {
            journal.close().expect("a journal can be removed");
            false
        }
        Ending::Undone { leftovers, .. } | Ending::GivenUp { leftovers, .. } => {
            assert_left_over(stage, Side::Source, &leftovers);
            tell_that_it_was_undone(&port, word);
            if leftovers.is_empty() {
                journal.close().expect("a journal can be removed");
            }
            !leftovers.is_empty()
        }
    }
}

fn tell_that_it_was_undone(port: &SourceEnd<'_>, word: Request) {
    while port.dial().and_then(|()| port.request(word, &Response::Aborted)).is_err() {}
}

/// Nothing is left that is not named. (A restarted source may name what it had not begun.)
fn assert_left_over(stage: &Stage, side: Side, leftovers: &[String]) {
    leftovers.iter().for_each(|line| assert_injected(line));
    let step = |line: &String| Some(line.strip_prefix("undoing ")?.split_once(':')?.0.to_owned());
    let named: BTreeSet<String> = leftovers.iter().filter_map(step).collect();
    let left = stage.turn(side, "looks back", |scene| scene.world.made(side).clone());
    assert!(left.is_subset(&named), "left over: {left:?}, said to be: {named:?}");
}

/// The destination's agent, from its start until both have nothing left to do.
pub fn destination(stage: &Stage) {
    let mut agent = Destination { stage, port: DestinationEnd(stage), link: 0, undoing: false };
    agent.take_up();
    loop {
        let heard = stage.turn(Side::Destination, "listens", |scene| scene.hear(&mut agent.link));
        match heard {
            Heard::Nothing => agent.retry(),
            Heard::Lost => agent.take_up(),
            Heard::Request(request) => {
                let answer = agent.handle(request);
                stage.turn(Side::Destination, format_args!("answers {answer:?}"), |scene| {
                    scene.answer(agent.link, answer.clone());
                });
                if answer == Response::Running {
                    agent.retry();
                }
            }
            Heard::Finished => match open(stage, Side::Destination).map(|(_, records)| standing(&records)) {
                None | Some(Standing::Ended | Standing::Drained) => return,
                Some(Standing::Ready) if !agent.undoing => panic!("it waits for a word that nobody will say"),
                Some(_) => agent.take_up(),
            },
        }
    }
}

struct Destination<'a> {
    stage: &'a Stage,
    port: DestinationEnd<'a>,
    link: usize,
    /// An undo failed, and is to be repeated.
    undoing: bool,
}

impl Destination<'_> {
    /// What is to be done when it starts, or its link broke.
    fn take_up(&mut self) {
        let Some((_, records)) = open(self.stage, Side::Destination) else { return };
        if standing(&records) == Standing::Undo {
            self.abort(&Failure::new("the source is gone"));
        }
        self.retry();
    }

    /// What did not succeed before and must.
    fn retry(&mut self) {
        if self.undoing {
            self.abort(&Failure::new("once more"));
        }
        let Some((mut journal, records)) = open(self.stage, Side::Destination) else { return };
        if standing(&records) == Standing::Running {
            // Whatever fails is repeated when the source asks.
            let drained = drain(&mut self.port, &mut journal, &self.stage.plan);
            drained.err().into_iter().for_each(|failure| assert_injected(&failure.message));
        }
    }

    fn abort(&mut self, why: &Failure) {
        let Some((mut journal, records)) = open(self.stage, Side::Destination) else { return };
        if standing(&records) == Standing::Ended {
            return journal.close().expect("a journal can be removed");
        }
        let leftovers = abort(&mut self.port, &mut journal, &begun(&records), why);
        assert_left_over(self.stage, Side::Destination, &leftovers);
        self.undoing = !leftovers.is_empty();
        if !self.undoing {
            journal.close().expect("a journal can be removed");
        }
        self.stage.turn(Side::Destination, "has undone all it can", |scene| scene.leftovers.extend(leftovers));
    }

    fn handle(&mut self, request: Request) -> Response {
        let plan = &self.stage.plan;
        let found = open(self.stage, Side::Destination);
        let stands = found.as_ref().map(|(_, records)| standing(records));
        let done = match (request, found) {
            (Request::Offer, None) => create(self.stage, Side::Destination)
                .and_then(|mut journal| prepare(&mut self.port, &mut journal, plan, &mut Vec::new()))
                .map(|()| Response::Prepared),
            (Request::Ready, Some((mut journal, records))) if stands == Some(Standing::Undo) => {
                make_ready(&mut self.port, &mut journal, plan, &mut begun(&records)).map(|()| Response::Ready)
            }
            (Request::Commit, Some((mut journal, records))) if stands == Some(Standing::Ready) => {
                let done = commit(&mut self.port, &mut journal, plan, &mut begun(&records));
                done.as_ref().err().into_iter().for_each(|failure| assert_injected(&failure.message));
                return done.map_or_else(|e| Response::Failed(e.message), |()| Response::Running);
            }
            (Request::Commit, Some(_)) if matches!(stands, Some(Standing::Running | Standing::Drained)) => {
                Ok(Response::Running)
            }
            (Request::Abort, found) => {
                let committed = found.is_some_and(|(_, records)| records.contains(&Record::Commit));
                assert!(!committed, "what was committed must not be undone");
                self.abort(&Failure::new("the source says so"));
                Ok(Response::Aborted)
            }
            (Request::Void, _) => {
                self.abort(&Failure::new("the source has given it up"));
                Ok(Response::Aborted)
            }
            (Request::Released, None) => Ok(Response::Drained),
            (Request::Released, Some((journal, _))) if stands == Some(Standing::Drained) => {
                journal.close().expect("a journal can be removed");
                Ok(Response::Drained)
            }
            (Request::Drained, Some(_)) if stands == Some(Standing::Drained) => Ok(Response::Drained),
            (Request::Drained, Some(_)) if stands == Some(Standing::Running) => {
                self.retry();
                return Response::Failed("not every page is in place yet".into());
            }
            (request, found) => panic!("{request:?} must not come to {found:?}"),
        };
        done.unwrap_or_else(|failure| {
            assert_injected(&failure.message);
            self.abort(&failure);
            Response::Failed(failure.message)
        })
    }
}
