//! What to do about a migration whose journal is damaged: from what is left of the journal, what there is on this node and what
//! the other node knows. No I/O.
//!
//! ```text
//!   source, original frozen      destination   runs it ─────────────▶ forward
//!                                              holds a copy, READY ─▶ forward if COMMIT is known here, else abort there, then undo
//!                                              was never ready ─────▶ undo, unless COMMIT is known here
//!                                              anything else ───────▶ wait for an answer, or for the operator
//!   destination, copy runs       source        whatever it knows ───▶ it runs
//!   destination, copy is held    source        committed ───────────▶ READY: the source says COMMIT again
//!                                              undone, no record ───▶ undo
//!                                              anything else ───────▶ READY if that is known here, else wait
//! ```
//!
//! The rule behind it: a copy is let run, or an original, only where it is certain that the other one does not run and will not,
//! or by the operator's word.

use std::fmt;

use crate::{Damaged, DestinationStep, Failure, Record, SourceStep};

/// What is left of a source's journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SourceRecords {
    /// COMMIT, or the word of it in what is damaged.
    pub committed: bool,
    /// It was undone.
    pub undone: bool,
    /// It was given up after COMMIT.
    pub given_up: bool,
    /// The destination has said that the container runs there, and has every page.
    pub released: bool,
    /// Nothing was left to do.
    pub done: bool,
}

impl SourceRecords {
    /// Reads what is left.
    pub fn of(damaged: &Damaged) -> Self {
        let records = &damaged.records;
        Self {
            committed: damaged.mentions_decision
                || records.contains(&Record::Commit)
                || SourceStep::AFTER_COMMIT.iter().any(|step| records.contains(&Record::step(step))),
            undone: records.iter().any(|r| matches!(r, Record::Undone { .. })),
            given_up: records.iter().any(|r| matches!(r, Record::GivenUp { .. })),
            released: records.contains(&Record::step(SourceStep::Release)),
            done: records.contains(&Record::Done),
        }
    }
}

/// What is left of a destination's journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DestinationRecords {
    /// READY.
    pub ready: bool,
    /// Word of COMMIT had come, or is in what is damaged.
    pub committed: bool,
    /// The container ran.
    pub running: bool,
    /// It was undone.
    pub undone: bool,
    /// It was undone, and nothing was left to do.
    pub ended: bool,
}

impl DestinationRecords {
    /// Reads what is left.
    pub fn of(damaged: &Damaged) -> Self {
        let records = &damaged.records;
        let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
        let running = has(|r| matches!(r, Record::Running | Record::Done));
        Self {
            ready: running || has(|r| matches!(r, Record::Ready | Record::Commit)),
            committed: running || damaged.mentions_decision || records.contains(&Record::Commit),
            running,
            undone: has(|r| matches!(r, Record::Undone { .. })),
            ended: has(|r| matches!(r, Record::Undone { .. })) && records.last() == Some(&Record::Done),
        }
    }
}

/// The original, on the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Original {
    /// It is there, frozen.
    Frozen,
    /// It is there, and nobody keeps it from running.
    Runs,
    /// It is not there any more, or has ended.
    Gone,
    /// Another container has its name, or one of which nobody can tell whether it is the original.
    Other,
    /// The engine does not answer.
    Unknown,
}

/// The copy, on the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replica {
    /// It is held, or being made, and was never let go.
    Held,
    /// It was let go.
    Runs,
    /// There is none.
    Gone,
    /// The engine does not answer.
    Unknown,
}

/// What a source hears of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromDestination {
    /// No answer.
    Silent,
    /// It has no record of the migration, nor a container of that name.
    Nothing,
    /// No copy was ever ready, or it was undone.
    NeverReady,
    /// A copy that does not run; whether it was ready is not known there either.
    Stopped,
    /// A complete copy that does not run.
    Ready,
    /// The container runs there.
    Running,
    /// The copy was lost with its host's memory.
    Lost,
    /// It does not know.
    Unknown,
}

/// What a destination hears of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromSource {
    /// No answer.
    Silent,
    /// It has no record of the migration: it was aborted.
    Nothing,
    /// It goes on, undecided.
    Undecided,
    /// COMMIT.
    Committed,
    /// It was undone, or given up.
    TakenBack,
    /// It does not know.
    Unknown,
}

/// What a source does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceVerdict {
    /// Have the destination abort, and when it has confirmed that, undo.
    AbortAndUndo,
    /// Undo: it was decided before the damage.
    Undo,
    /// Undo, and tell the destination that its copy is void.
    GiveUp,
    /// Go on after COMMIT.
    Forward,
    /// It has ended; the destination may have to be told.
    Ended {
        /// The container was moved; else it was undone.
        moved: bool,
    },
    /// There is nothing left on this node that it could be about.
    Forget,
    /// Nothing, yet.
    Wait(Wait),
}

/// What a destination does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DestinationVerdict {
    /// Undo.
    Undo,
    /// Wait for the source's word, as after READY.
    Ready,
    /// Let it run by the operator's word: its source's host is down.
    Run,
    /// It runs.
    Running,
    /// It was undone, and nothing is left: what has the container's name now came in another way.
    Forget,
    /// Nothing, yet.
    Wait(Wait),
}

/// What stands in the way of a verdict, or of the operator's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The engine here does not answer.
    Engine,
    /// Another container has the name.
    OtherContainer,
    /// The other node does not answer.
    Silent,
    /// The other node does not know either.
    Unknown,
    /// The other node has not decided.
    Undecided,
    /// There is no copy on this node, and it may have been stopped by its owner.
    GoneHere,
    /// There is no copy on the other node that could run.
    NoneThere,
    /// It runs here.
    RunsHere,
    /// It runs there.
    RunsThere,
    /// COMMIT is known here, but the other node has never been ready.
    Contradiction,
    /// The source can still commit it.
    SourceDecides,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wait::Engine => "the engine on this node does not answer",
            Wait::OtherContainer => "a container of that name is here that may be another one",
            Wait::Silent => "the other node does not answer",
            Wait::Unknown => "the other node does not know either",
            Wait::Undecided => "the other node has not decided yet",
            Wait::GoneHere => "the container is not on this node any more, and its owner may have stopped it",
            Wait::NoneThere => "the other node has no copy that could run",
            Wait::RunsHere => "the container runs on this node",
            Wait::RunsThere => "the container runs on the other node",
            Wait::Contradiction => "the move was committed, but the other node has no copy that could run",
            Wait::SourceDecides => "its source can still commit it by itself",
        })
    }
}

/// What a source does by itself.
pub fn source(own: SourceRecords, here: Original, there: FromDestination, has_directory: bool) -> SourceVerdict {
    use FromDestination as There;
    use SourceVerdict as V;
    // No step after COMMIT is without it.
    let own = SourceRecords { committed: own.committed || own.released, ..own };
    match here {
        Original::Unknown => return V::Wait(Wait::Engine),
        Original::Gone | Original::Other if !has_directory && there_is_settled(there) && !own.done => return V::Forget,
        Original::Other if !own.done => return V::Wait(Wait::OtherContainer),
        _ => {}
    }
    if own.done {
        let is_here = matches!(here, Original::Frozen | Original::Runs);
        return V::Ended { moved: !own.undone && !own.given_up && own.committed && !is_here };
    }
    if own.given_up {
        return V::GiveUp;
    }
    if own.undone {
        return V::Undo;
    }
    match (there, here) {
        _ if own.released && here != Original::Runs => V::Forward,
        (There::Silent, _) => V::Wait(Wait::Silent),
        (There::Unknown, _) => V::Wait(Wait::Unknown),
        (There::Running, Original::Runs) => V::Wait(Wait::RunsThere),
        (There::Running, _) => V::Forward,
        (There::Lost, _) => V::Wait(Wait::NoneThere),
        (_, Original::Gone) => V::Wait(Wait::GoneHere),
        (There::Ready, Original::Frozen) if own.committed => V::Forward,
        (There::Stopped, _) if own.committed => V::Wait(Wait::Unknown),
        (_, Original::Runs) if own.committed => V::Wait(Wait::RunsHere),
        (There::Nothing | There::NeverReady, _) if own.committed => V::Wait(Wait::Contradiction),
        (There::Ready | There::Stopped | There::Nothing | There::NeverReady, _) => V::AbortAndUndo,
    }
}

/// Whether nothing on the destination waits for the source's word.
fn there_is_settled(there: FromDestination) -> bool {
    use FromDestination as There;
    matches!(there, There::Nothing | There::NeverReady | There::Running | There::Lost)
}

/// What a source does by the operator's word that the copy here goes on, or the one there.
///
/// # Errors
/// Why that is refused.
pub fn source_by_word(
    here: Original,
    there: FromDestination,
    keep_here: bool,
    host_is_down: bool,
) -> Result<SourceVerdict, Wait> {
    use FromDestination as There;
    match (here, there) {
        (Original::Unknown, _) => Err(Wait::Engine),
        // Where there is no copy either, what is left is to be tidied up.
        (Original::Gone, There::Nothing | There::NeverReady | There::Lost) if keep_here => Ok(SourceVerdict::GiveUp),
        (Original::Gone, _) if keep_here => Err(Wait::GoneHere),
        (_, There::Running) if keep_here => Err(Wait::RunsThere),
        (_, There::Silent) if keep_here && !host_is_down => Err(Wait::Silent),
        (_, There::Unknown) if keep_here && !host_is_down => Err(Wait::Unknown),
        (_, _) if keep_here => Ok(SourceVerdict::GiveUp),
        (Original::Runs, _) => Err(Wait::RunsHere),
        (_, There::Running | There::Ready) => Ok(SourceVerdict::Forward),
        (_, There::Silent) => Err(Wait::Silent),
        (_, There::Unknown | There::Stopped) => Err(Wait::Unknown),
        (_, There::Nothing | There::NeverReady | There::Lost) => Err(Wait::NoneThere),
    }
}

/// What a destination does by itself; `tidied`: nothing of the migration but the container can be left here.
pub fn destination(own: DestinationRecords, here: Replica, there: FromSource, tidied: bool) -> DestinationVerdict {
    use DestinationVerdict as V;
    match (here, there) {
        (Replica::Unknown, _) => V::Wait(Wait::Engine),
        _ if own.ended => V::Forget,
        _ if own.undone => V::Undo,
        (Replica::Runs, _) => V::Running,
        _ if own.running => V::Running,
        // The source has lost its state: this may be the last copy.
        (_, FromSource::Nothing) if own.committed => V::Wait(Wait::Unknown),
        (_, FromSource::TakenBack | FromSource::Nothing) => V::Undo,
        // It ran, and its owner has removed it since.
        (Replica::Gone, FromSource::Committed) if tidied => V::Running,
        (_, FromSource::Committed) => V::Ready,
        _ if own.ready => V::Ready,
        (_, FromSource::Undecided) => V::Wait(Wait::Undecided),
        (_, FromSource::Silent) => V::Wait(Wait::Silent),
        (_, FromSource::Unknown) => V::Wait(Wait::Unknown),
    }
}

/// What a destination does by the operator's word that the copy here goes on, or the original there.
///
/// # Errors
/// Why that is refused.
pub fn destination_by_word(
    here: Replica,
    there: FromSource,
    keep_here: bool,
    host_is_down: bool,
) -> Result<DestinationVerdict, Wait> {
    use DestinationVerdict as V;
    match (here, there) {
        (Replica::Unknown, _) => Err(Wait::Engine),
        (Replica::Runs, _) if keep_here => Ok(V::Running),
        (Replica::Runs, _) => Err(Wait::RunsHere),
        (Replica::Gone, _) if keep_here => Err(Wait::GoneHere),
        (_, FromSource::Undecided) => Err(Wait::SourceDecides),
        (_, FromSource::Committed) if keep_here => Ok(V::Ready),
        (_, FromSource::Committed) => Err(Wait::SourceDecides),
        (_, _) if !keep_here => Ok(V::Undo),
        (_, FromSource::TakenBack) => Err(Wait::RunsThere),
        (_, FromSource::Silent | FromSource::Nothing) if host_is_down => Ok(V::Run),
        (_, FromSource::Nothing) => Err(Wait::Unknown),
        (_, FromSource::Silent) => Err(Wait::Silent),
        (_, FromSource::Unknown) => Err(Wait::Unknown),
    }
}

/// The records of a source's whole journal that says what the verdict is; `None` where there is nothing to write. Steps that may have been begun
/// count as begun: their undo can be repeated. COMMIT stands before an undo, since the original may have been kept from
/// running as it is after COMMIT.
pub fn source_records(
    damaged: &Damaged,
    begin: Record,
    verdict: SourceVerdict,
    has_directory: bool,
    failure: &Failure,
) -> Option<Vec<Record>> {
    // Without the migration's directory nothing was done to the container.
    let last = if has_directory { SourceStep::AwaitReady } else { SourceStep::Offer };
    let steps = SourceStep::BEFORE_COMMIT.into_iter().filter(|step| *step <= last).map(Record::step);
    let mut records: Vec<Record> = [begin].into_iter().chain(steps).collect();
    let known = |wanted: fn(&Record) -> bool| damaged.records.iter().find(|r| wanted(r)).cloned();
    let failure = failure.clone();
    match verdict {
        SourceVerdict::AbortAndUndo | SourceVerdict::Undo => {
            let undone = known(|r| matches!(r, Record::Undone { .. })).unwrap_or(Record::Undone { failure });
            records.extend(has_directory.then_some(Record::Commit).into_iter().chain([undone]));
        }
        SourceVerdict::GiveUp => {
            let given_up = known(|r| matches!(r, Record::GivenUp { .. })).unwrap_or(Record::GivenUp { failure });
            records.extend([Record::Commit, given_up]);
        }
        SourceVerdict::Forward => {
            let after = SourceStep::AFTER_COMMIT.map(Record::step);
            records.push(Record::Commit);
            records.extend(after.into_iter().filter(|step| damaged.records.contains(step)));
        }
        SourceVerdict::Ended { moved } => {
            let back = |r: &Record| matches!(r, Record::Undone { .. } | Record::GivenUp { .. });
            let undone = known(back).unwrap_or(Record::Undone { failure });
            records.extend([if moved { Record::Commit } else { undone }, Record::Done]);
        }
        SourceVerdict::Forget | SourceVerdict::Wait(_) => return None,
    }
    Some(records)
}

/// The same of a destination.
pub fn destination_records(
    damaged: &Damaged,
    begin: Record,
    verdict: DestinationVerdict,
    has_directory: bool,
    failure: &Failure,
) -> Option<Vec<Record>> {
    let steps = |steps: &[DestinationStep]| steps.iter().map(Record::step).collect::<Vec<_>>();
    let mut records = [vec![begin], steps(&DestinationStep::PREPARE), steps(&DestinationStep::MAKE_READY)].concat();
    match verdict {
        DestinationVerdict::Undo => {
            let undone = damaged.records.iter().find(|r| matches!(r, Record::Undone { .. })).cloned();
            records.push(undone.unwrap_or(Record::Undone { failure: failure.clone() }));
        }
        DestinationVerdict::Ready => records.push(Record::Ready),
        DestinationVerdict::Run => records.extend([Record::Ready, Record::Kept]),
        DestinationVerdict::Running => {
            records.extend([Record::Ready, Record::Commit]);
            records.extend(steps(&DestinationStep::COMMIT));
            records.push(Record::Running);
            // What only the migration needed is removed last.
            if !has_directory {
                records.extend(steps(&DestinationStep::DRAIN));
            }
            records.extend(damaged.records.contains(&Record::Done).then_some(Record::Done));
        }
        DestinationVerdict::Forget | DestinationVerdict::Wait(_) => return None,
    }
    Some(records)
}

#[cfg(test)]
mod tests;
