//! The source's half: it owns the decision.

use std::fmt;

use tranship_types::{Phase, Side};

use crate::{Failure, Fault, FaultPlan, Journal, Record, When, caught};

/// The source's steps, in their order. Those up to `AwaitReady` can be undone; `Deliver`, `Drain` and `Release` come after the
/// commit point and are repeated until they succeed. Those up to `Drain` are undone, too, where an operator gives the migration up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceStep {
    /// Find the container and everything that stands in the way on this node.
    Inspect,
    /// Reach the destination's agent.
    Connect,
    /// Have the destination check, and prepare all that can be prepared.
    Offer,
    /// Have engine, criu and streams waiting.
    Arm,
    /// Send memory in rounds while the container runs (nothing, in mode cold).
    Precopy,
    /// Stop every task. The blackout begins.
    Freeze,
    /// Close the container's network: no packet leaves or arrives.
    CloseGate,
    /// Send memory and skeleton.
    Transfer,
    /// Have the destination's word that it holds a complete, stopped copy.
    AwaitReady,
    /// Have the destination's word that the container runs there.
    Deliver,
    /// Serve the pages that follow the resume (nothing, where all went before), until the destination has every one.
    Drain,
    /// Remove the original.
    Release,
}

impl SourceStep {
    /// What is done before the commit point.
    pub const BEFORE_COMMIT: [SourceStep; 9] = [
        SourceStep::Inspect,
        SourceStep::Connect,
        SourceStep::Offer,
        SourceStep::Arm,
        SourceStep::Precopy,
        SourceStep::Freeze,
        SourceStep::CloseGate,
        SourceStep::Transfer,
        SourceStep::AwaitReady,
    ];
    /// What is done after it.
    pub const AFTER_COMMIT: [SourceStep; 3] = [SourceStep::Deliver, SourceStep::Drain, SourceStep::Release];

    /// Which phase it belongs to.
    pub fn phase(self) -> Phase {
        match self {
            SourceStep::Inspect | SourceStep::Connect => Phase::Plan,
            SourceStep::Offer | SourceStep::Arm => Phase::Prepare,
            SourceStep::Precopy => Phase::Precopy,
            SourceStep::Freeze | SourceStep::CloseGate => Phase::Freeze,
            SourceStep::Transfer => Phase::Transfer,
            SourceStep::AwaitReady => Phase::Ready,
            SourceStep::Deliver => Phase::Resume,
            SourceStep::Drain => Phase::Drain,
            SourceStep::Release => Phase::Release,
        }
    }
}

impl fmt::Display for SourceStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            SourceStep::Inspect => "inspect",
            SourceStep::Connect => "connect",
            SourceStep::Offer => "offer",
            SourceStep::Arm => "arm",
            SourceStep::Precopy => "precopy",
            SourceStep::Freeze => "freeze",
            SourceStep::CloseGate => "close-gate",
            SourceStep::Transfer => "transfer",
            SourceStep::AwaitReady => "await-ready",
            SourceStep::Deliver => "deliver",
            SourceStep::Drain => "drain",
            SourceStep::Release => "release",
        })
    }
}

/// What does the source's steps.
pub trait SourcePort {
    /// Does a step.
    fn run(&mut self, step: SourceStep) -> Result<(), Failure>;

    /// Undoes a step that was begun, whether or not it was done, and whether or not it was undone before.
    fn undo(&mut self, step: SourceStep) -> Result<(), Failure>;

    /// Waits for the decision where others have a part in it: all of them move, or none does. True once it is on the
    /// disk that they do, which from then on counts for this one, too; false where the decision is its own. An error,
    /// or a panic, says that it was not taken, nor ever will be.
    fn agree(&mut self) -> Result<bool, Failure> {
        Ok(false)
    }

    /// The decision that it shares is in its own journal as well.
    fn agreed(&mut self) {}

    /// Tells who watches where the migration stands.
    fn entered(&mut self, phase: Phase);

    /// A step that must not fail did. Returns when it makes sense to try again (a node is back, some time has passed), or
    /// when it shall not be tried again.
    fn try_again(&mut self, step: SourceStep, failure: &Failure) -> Retry;

    /// Lets a fault that was asked for happen, other than an error.
    fn inject(&mut self, fault: Fault);
}

/// What follows the failure of a step that must not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Retry {
    /// Try again.
    Again,
    /// The agent is stopping; its next start shall go on.
    Stop,
    /// The operator's word is that the destination is lost: the original shall run again. It counts only up to
    /// [`SourceStep::Drain`]; after that the original is no more.
    GiveUp(Failure),
}

/// How a migration ended on the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The container runs on the destination, and is gone here.
    Moved,
    /// It runs here; `leftovers` are undos that failed.
    Undone {
        /// Why it was not moved.
        failure: Failure,
        /// What could not be undone, each in a sentence.
        leftovers: Vec<String>,
    },
    /// By the operator's word it runs here again, as it was at the freeze; the destination must be told that its copy is
    /// void.
    GivenUp {
        /// What was said to be lost, and what it costs.
        failure: Failure,
        /// What could not be undone, each in a sentence.
        leftovers: Vec<String>,
    },
    /// The agent is stopping after the commit point; its next start goes on.
    Suspended,
}

impl Ending {
    /// What could not be undone, each in a sentence.
    pub fn leftovers(&self) -> &[String] {
        match self {
            Ending::Undone { leftovers, .. } | Ending::GivenUp { leftovers, .. } => leftovers,
            Ending::Moved | Ending::Suspended => &[],
        }
    }
}

fn pass(port: &mut dyn SourcePort, faults: &FaultPlan, step: impl fmt::Display, when: When) -> Result<(), Failure> {
    faults.pass(Side::Source, step, when, |fault| port.inject(fault))
}

/// Does a step; a panic in it is its failure.
fn perform(port: &mut dyn SourcePort, faults: &FaultPlan, step: SourceStep) -> Result<(), Failure> {
    caught(format_args!("step {step}"), || {
        pass(port, faults, step, When::Before)?;
        port.run(step)?;
        pass(port, faults, step, When::After)
    })
}

/// Runs a migration to its end.
pub fn migrate(port: &mut dyn SourcePort, journal: &mut Journal, faults: &FaultPlan) -> Ending {
    let mut begun = Vec::new();
    match attempt(port, journal, faults, &mut begun) {
        Ok(()) => forward(port, journal, faults, &[]),
        Err(failure) => undo(port, journal, &begun, failure),
    }
}

/// Everything up to and including the commit point. Whatever it returns, `begun` has the steps that were begun.
fn attempt(
    port: &mut dyn SourcePort,
    journal: &mut Journal,
    faults: &FaultPlan,
    begun: &mut Vec<SourceStep>,
) -> Result<(), Failure> {
    let written = |e: crate::JournalError| Failure::new(e.to_string());
    for step in SourceStep::BEFORE_COMMIT {
        journal.append(&Record::Step { step: step.to_string() }).map_err(written)?;
        begun.push(step);
        port.entered(step.phase());
        perform(port, faults, step)?;
    }
    port.entered(Phase::Commit);
    let agreed = caught("the decision", || {
        pass(port, faults, "commit", When::Before)?;
        port.agree()
    });
    if !agreed? {
        return journal.decide(&Record::Commit).map_err(written);
    }
    // From here on nothing leads back.
    match faults.due(Side::Source, "agree", When::After) {
        Some(Fault::Panic) => panic!("an injected panic at agree"),
        Some(fault) => port.inject(fault),
        None => {}
    }
    // Where it cannot be written, the decision that is shared stays, and tells the next agent.
    if journal.decide(&Record::Commit).is_ok() {
        port.agreed();
    }
    Ok(())
}

/// Everything after the commit point that `records` do not say was done; only an operator's word leads back.
fn forward(port: &mut dyn SourcePort, journal: &mut Journal, faults: &FaultPlan, records: &[Record]) -> Ending {
    let entry = |step: SourceStep| Record::Step { step: step.to_string() };
    // A step's entry says that those before it are done, and must not be done again: once the original is being removed,
    // the destination may have forgotten the migration.
    let from = SourceStep::AFTER_COMMIT.into_iter().rposition(|step| records.contains(&entry(step))).unwrap_or(0);
    let mut step_after_commit = caught("the decision", || pass(port, faults, "commit", When::After));
    for step in SourceStep::AFTER_COMMIT.into_iter().skip(from) {
        // Where it cannot be written, a restart does more than it must.
        let _ = journal.append(&entry(step));
        port.entered(step.phase());
        loop {
            let done = std::mem::replace(&mut step_after_commit, Ok(())).and_then(|()| perform(port, faults, step));
            let Err(failure) = done else { break };
            match port.try_again(step, &failure) {
                Retry::GiveUp(failure) if step < SourceStep::Release => match give_up(port, journal, failure) {
                    Ok(ending) => return ending,
                    // Nothing has been done yet, and the word may be said again.
                    Err(failure) => step_after_commit = Err(failure),
                },
                Retry::Again | Retry::GiveUp(_) => {}
                Retry::Stop => return Ending::Suspended,
            }
        }
    }
    // If this cannot be written, a restart finds the decision, and repeats steps that are idempotent.
    let _ = journal.append(&Record::Done);
    port.entered(Phase::Done);
    Ending::Moved
}

/// First of all the decision: after a crash in the middle of undoing, it is undoing that goes on.
fn undo(port: &mut dyn SourcePort, journal: &mut Journal, begun: &[SourceStep], failure: Failure) -> Ending {
    let noted = journal.append(&Record::Undone { failure: failure.clone() });
    let leftovers = noted.err().map(|e| e.to_string()).into_iter().collect();
    Ending::Undone { leftovers: undo_steps(port, journal, begun, leftovers), failure }
}

/// The decision is taken back. An error says that it could not be, and that nothing was done.
fn give_up(port: &mut dyn SourcePort, journal: &mut Journal, failure: Failure) -> Result<Ending, Failure> {
    let decision = Record::GivenUp { failure: failure.clone() };
    journal.decide(&decision).map_err(|e| Failure::new(e.to_string()))?;
    let leftovers = undo_steps(port, journal, &given_up(), Vec::new());
    Ok(Ending::GivenUp { failure, leftovers })
}

/// What is undone of a migration that is given up.
fn given_up() -> Vec<SourceStep> {
    [&SourceStep::BEFORE_COMMIT[..], &[SourceStep::Deliver, SourceStep::Drain]].concat()
}

/// Returns what could not be undone.
fn undo_steps(
    port: &mut dyn SourcePort,
    journal: &mut Journal,
    begun: &[SourceStep],
    mut leftovers: Vec<String>,
) -> Vec<String> {
    port.entered(Phase::Undo);
    for step in begun.iter().rev() {
        // One failure must not keep the others from being undone.
        if let Err(failure) = caught(format_args!("the undo of step {step}"), || port.undo(*step)) {
            leftovers.push(format!("undoing {step}: {failure}"));
        }
    }
    if leftovers.is_empty() {
        // From here on a restart must not touch the container again: it may have been moved elsewhere by then.
        leftovers.extend(journal.append(&Record::Done).err().map(|e| e.to_string()));
    }
    port.entered(Phase::Undone);
    leftovers
}

/// Takes up a migration of which an earlier agent left this journal: forward if it was decided and not given up, else back.
pub fn recover(port: &mut dyn SourcePort, journal: &mut Journal, records: &[Record]) -> Ending {
    let failure = records.iter().find_map(|r| match r {
        Record::Undone { failure } => Some(failure.clone()),
        _ => None,
    });
    let word = records.iter().find_map(|r| match r {
        Record::GivenUp { failure } => Some(failure.clone()),
        _ => None,
    });
    let done = records.contains(&Record::Done);
    if let Some(failure) = word {
        let leftovers = if done { Vec::new() } else { undo_steps(port, journal, &given_up(), Vec::new()) };
        return Ending::GivenUp { failure, leftovers };
    }
    if done {
        return match failure {
            Some(failure) => Ending::Undone { failure, leftovers: Vec::new() },
            None => Ending::Moved,
        };
    }
    if failure.is_none() && records.contains(&Record::Commit) {
        return forward(port, journal, &FaultPlan::default(), records);
    }
    // An entry precedes its action, so that what has none was never begun, and is not to be undone: the container may have
    // been paused by its owner.
    let is_begun = |step: &SourceStep| records.contains(&Record::Step { step: step.to_string() });
    let begun: Vec<SourceStep> = SourceStep::BEFORE_COMMIT.into_iter().filter(is_begun).collect();
    match failure {
        Some(failure) => Ending::Undone { leftovers: undo_steps(port, journal, &begun, Vec::new()), failure },
        None => undo(port, journal, &begun, Failure::new("the agent was restarted in the middle of the migration")),
    }
}
