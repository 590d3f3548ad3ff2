//! The agents of both ends: what is around the transaction, as little as a real agent can do with.

use std::collections::BTreeSet;

use serde_json::Value;
use tranship_coordinator::{
    Ending, Failure, Journal, Record, Standing, abort, begun, commit, drain, make_ready, migrate, prepare, recover,
    standing,
};
use tranship_types::{MigrationId, NodeName, Side};

use crate::ports::{DestinationEnd, SourceEnd, assert_injected};
use crate::stage::{Heard, Request, Response, Scene, Stage, Word, number_of};
use crate::world::MIGRATIONS;

fn create(stage: &Stage, side: Side, migration: usize) -> Result<Journal, Failure> {
    let id: MigrationId = format!("m-{migration}").parse().expect("an id");
    let peer: NodeName = "other".parse().expect("a name");
    let context = if stage.case.long == Some(side) { "x".repeat(2000).into() } else { Value::Null };
    let begin = Record::Begin { id: id.clone(), side, container: "c".into(), peer, context };
    Journal::create(&stage.directory(side), &id, &begin).map_err(|e| Failure::new(e.to_string()))
}

/// The migrations of which there are journals.
fn known(stage: &Stage, side: Side) -> Vec<usize> {
    Journal::list(&stage.directory(side)).iter().map(|path| number_of(path)).collect()
}

fn open(stage: &Stage, side: Side, migration: usize) -> Option<(Journal, Vec<Record>)> {
    let paths = Journal::list(&stage.directory(side));
    let path = paths.iter().find(|path| number_of(path) == migration)?;
    Some(Journal::open(path).expect("a journal can be read whatever happened"))
}

/// The source's agent, from its start until it has nothing left to do.
pub fn source(stage: &Stage) {
    while source_goes_on(stage) {}
}

fn source_goes_on(stage: &Stage) -> bool {
    let begun = known(stage, Side::Source).into_iter().next();
    let (port, journal, ending) =
        match begun.and_then(|migration| Some((migration, open(stage, Side::Source, migration)?))) {
            Some((migration, (mut journal, records))) => {
                let mut port = SourceEnd(stage, migration);
                let ending = recover(&mut port, &mut journal, &records);
                (port, journal, ending)
            }
            None => {
                let asked = stage.turn(Side::Source, "looks for work", Scene::begin);
                let Some(migration) = asked else { return false };
                let Ok(mut journal) = create(stage, Side::Source, migration) else { return false };
                let mut port = SourceEnd(stage, migration);
                let ending = migrate(&mut port, &mut journal, &stage.plan);
                (port, journal, ending)
            }
        };
    if let Ending::Undone { failure, .. } | Ending::GivenUp { failure, .. } = &ending {
        assert_injected(&failure.message);
    }
    stage.turn(Side::Source, format_args!("{ending:?}"), |scene| scene.endings.push(ending.clone()));
    let is_undone = matches!(ending, Ending::Undone { .. });
    let word = if matches!(ending, Ending::GivenUp { .. }) { Request::Void } else { Request::Abort };
    match ending {
        Ending::Suspended => true,
        Ending::Moved => {
            journal.close().expect("a journal can be removed");
            false
        }
        Ending::Undone { leftovers, .. } | Ending::GivenUp { leftovers, .. } => {
            assert_left_over(stage, Side::Source, port.1, &leftovers);
            tell_that_it_was_undone(&port, word);
            if !leftovers.is_empty() {
                return true;
            }
            journal.close().expect("a journal can be removed");
            let again = stage.case.again && is_undone;
            stage.turn(Side::Source, "has undone all", |scene| {
                scene.asked |= again && scene.migrations < MIGRATIONS;
                scene.asked
            })
        }
    }
}

fn tell_that_it_was_undone(port: &SourceEnd<'_>, word: Request) {
    while port.dial().and_then(|()| port.request(word, &Response::Aborted)).is_err() {}
}

/// Nothing is left that is not named. (A restarted source may name what it had not begun.)
fn assert_left_over(stage: &Stage, side: Side, migration: usize, leftovers: &[String]) {
    leftovers.iter().for_each(|line| assert_injected(line));
    let step = |line: &String| Some(line.strip_prefix("undoing ")?.split_once(':')?.0.to_owned());
    let named: BTreeSet<String> = leftovers.iter().filter_map(step).collect();
    let left = stage.turn(side, "looks back", |scene| scene.world.made(side, migration).clone());
    assert!(left.is_subset(&named), "left over: {left:?}, said to be: {named:?}");
}

/// The destination's agent, from its start until both have nothing left to do.
pub fn destination(stage: &Stage) {
    let mut agent = Destination { stage, link: 0, undoing: BTreeSet::new() };
    agent.take_up();
    loop {
        let heard = stage.turn(Side::Destination, "listens", |scene| scene.hear(&mut agent.link));
        match heard {
            Heard::Nothing => agent.retry(),
            Heard::Lost => agent.take_up(),
            Heard::Request(word) => {
                let answer = agent.handle(word);
                stage.turn(Side::Destination, format_args!("answers {answer:?}"), |scene| {
                    scene.answer(agent.link, answer.clone());
                });
                if answer == Response::Running {
                    agent.retry();
                }
            }
            Heard::Late(word) => {
                let answer = agent.handle(word);
                stage.turn(Side::Destination, format_args!("tells nobody of {word:?}: {answer:?}"), |scene| {
                    scene.answer(0, answer.clone());
                });
                // The link on which it came is no more.
                agent.lost(word.0);
            }
            Heard::Finished => {
                let all = known(stage, Side::Destination);
                let stands = |migration: &usize| Some(standing(&open(stage, Side::Destination, *migration)?.1));
                let is_over = |stands: Standing| matches!(stands, Standing::Ended | Standing::Drained);
                if all.iter().filter_map(stands).all(is_over) {
                    return;
                }
                let waits = all.iter().any(|of| stands(of) == Some(Standing::Ready) && !agent.undoing.contains(of));
                assert!(!waits, "it waits for a word that nobody will say");
                agent.take_up();
            }
        }
    }
}

struct Destination<'a> {
    stage: &'a Stage,
    link: usize,
    /// Migrations of which an undo failed, and is to be repeated.
    undoing: BTreeSet<usize>,
}

impl Destination<'_> {
    /// What is to be done when it starts, or its link broke.
    fn take_up(&mut self) {
        for migration in known(self.stage, Side::Destination) {
            self.lost(migration);
        }
        self.retry();
    }

    /// The link of a migration is no more: whoever is READY waits for the word, everybody else is undone.
    fn lost(&mut self, migration: usize) {
        let Some((_, records)) = open(self.stage, Side::Destination, migration) else { return };
        if standing(&records) == Standing::Undo {
            self.abort(migration, &Failure::new("the source is gone"));
        }
    }

    /// What did not succeed before and must.
    fn retry(&mut self) {
        for migration in self.undoing.clone() {
            self.abort(migration, &Failure::new("once more"));
        }
        for migration in known(self.stage, Side::Destination) {
            let Some((mut journal, records)) = open(self.stage, Side::Destination, migration) else { continue };
            if standing(&records) == Standing::Running {
                // Whatever fails is repeated when the source asks.
                let drained = drain(&mut DestinationEnd(self.stage, migration), &mut journal, &self.stage.plan);
                drained.err().into_iter().for_each(|failure| assert_injected(&failure.message));
            }
        }
    }

    fn abort(&mut self, migration: usize, why: &Failure) {
        let Some((mut journal, records)) = open(self.stage, Side::Destination, migration) else { return };
        if standing(&records) == Standing::Ended {
            return journal.close().expect("a journal can be removed");
        }
        let mut port = DestinationEnd(self.stage, migration);
        let leftovers = abort(&mut port, &mut journal, &begun(&records), why);
        assert_left_over(self.stage, Side::Destination, migration, &leftovers);
        if leftovers.is_empty() {
            self.undoing.remove(&migration);
            journal.close().expect("a journal can be removed");
        } else {
            self.undoing.insert(migration);
        }
        self.stage.turn(Side::Destination, "has undone all it can", |scene| scene.leftovers.extend(leftovers));
    }

    fn handle(&mut self, (migration, request): Word) -> Response {
        let plan = &self.stage.plan;
        let port = &mut DestinationEnd(self.stage, migration);
        let others = known(self.stage, Side::Destination).into_iter().any(|other| other != migration);
        let found = open(self.stage, Side::Destination, migration);
        let stands = found.as_ref().map(|(_, records)| standing(records));
        let done = match (request, found) {
            // The container has been promised to another migration.
            (Request::Offer, None) if others => return Response::Failed("another migration has the container".into()),
            (Request::Offer, None) => create(self.stage, Side::Destination, migration)
                .and_then(|mut journal| prepare(port, &mut journal, plan, &mut Vec::new()))
                .map(|()| Response::Prepared),
            (Request::Ready, Some((mut journal, records))) if stands == Some(Standing::Undo) => {
                make_ready(port, &mut journal, plan, &mut begun(&records)).map(|()| Response::Ready)
            }
            (Request::Commit, Some((mut journal, records))) if stands == Some(Standing::Ready) => {
                let done = commit(port, &mut journal, plan, &mut begun(&records));
                done.as_ref().err().into_iter().for_each(|failure| assert_injected(&failure.message));
                return done.map_or_else(|e| Response::Failed(e.message), |()| Response::Running);
            }
            (Request::Commit, Some(_)) if matches!(stands, Some(Standing::Running | Standing::Drained)) => {
                Ok(Response::Running)
            }
            (Request::Abort, found) => {
                let committed = found.is_some_and(|(_, records)| records.contains(&Record::Commit));
                assert!(!committed, "what was committed must not be undone");
                self.abort(migration, &Failure::new("the source says so"));
                Ok(Response::Aborted)
            }
            (Request::Void, _) => {
                self.abort(migration, &Failure::new("the source has given it up"));
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
            // Words that come late meet what others have made of the migration.
            (request, _) if self.stage.case.late => {
                return Response::Failed(format!("{request:?} does not come to {stands:?}"));
            }
            (request, found) => panic!("{request:?} must not come to {found:?}"),
        };
        done.unwrap_or_else(|failure| {
            assert_injected(&failure.message);
            self.abort(migration, &failure);
            Response::Failed(failure.message)
        })
    }
}
