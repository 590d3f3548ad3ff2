//! The destination's half: it does what the source says, and once READY, nothing else.

use std::fmt;
use std::str::FromStr;

use tranship_types::{Phase, Side};

use crate::{Failure, Fault, FaultPlan, Journal, Record, When, caught};

/// The destination's steps, in their order. Those up to `Restore` can be undone by a failure, those up to `Announce` by the
/// source's word that the copy is void.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DestinationStep {
    /// Whether the container can live here.
    Check,
    /// The network namespace, its gate closed.
    Network,
    /// The bundle for the engine.
    Bundle,
    /// The migration's directory in memory.
    Directory,
    /// The page store and its pager.
    Pager,
    /// Engine and criu, waiting.
    Engine,
    /// Memory and skeleton.
    Receive,
    /// All tasks restored, and held, stopped.
    Restore,
    /// Let packets through.
    OpenGate,
    /// Let the tasks run. The blackout ends.
    Resume,
    /// Tell the network where the container is now.
    Announce,
    /// Every page where it belongs.
    Drain,
    /// Remove what only the migration needed.
    Tidy,
}

impl DestinationStep {
    /// On the source's offer.
    pub const PREPARE: [DestinationStep; 6] = [
        DestinationStep::Check,
        DestinationStep::Network,
        DestinationStep::Bundle,
        DestinationStep::Directory,
        DestinationStep::Pager,
        DestinationStep::Engine,
    ];
    /// While the source is frozen.
    pub const MAKE_READY: [DestinationStep; 2] = [DestinationStep::Receive, DestinationStep::Restore];
    /// On the source's decision.
    pub const COMMIT: [DestinationStep; 3] =
        [DestinationStep::OpenGate, DestinationStep::Resume, DestinationStep::Announce];
    /// Afterwards.
    pub const DRAIN: [DestinationStep; 2] = [DestinationStep::Drain, DestinationStep::Tidy];

    /// Which phase it belongs to.
    pub fn phase(self) -> Phase {
        match self {
            step if Self::PREPARE.contains(&step) => Phase::Prepare,
            step if Self::MAKE_READY.contains(&step) => Phase::Transfer,
            step if Self::COMMIT.contains(&step) => Phase::Resume,
            _ => Phase::Release,
        }
    }
}

impl fmt::Display for DestinationStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DestinationStep::Check => "check",
            DestinationStep::Network => "network",
            DestinationStep::Bundle => "bundle",
            DestinationStep::Directory => "directory",
            DestinationStep::Pager => "pager",
            DestinationStep::Engine => "engine",
            DestinationStep::Receive => "receive",
            DestinationStep::Restore => "restore",
            DestinationStep::OpenGate => "open-gate",
            DestinationStep::Resume => "resume",
            DestinationStep::Announce => "announce",
            DestinationStep::Drain => "drain",
            DestinationStep::Tidy => "tidy",
        })
    }
}

/// What does the destination's steps.
pub trait DestinationPort {
    /// Does a step. Those of `COMMIT` and `DRAIN` may be done again after a restart and must then succeed.
    fn run(&mut self, step: DestinationStep) -> Result<(), Failure>;

    /// Undoes a step that was begun, whether or not it was done, and whether or not it was undone before. Those of `COMMIT`
    /// are undone only where the source has given the migration up; not one packet of the copy's end may get out.
    fn undo(&mut self, step: DestinationStep) -> Result<(), Failure>;

    /// Lets a fault that was asked for happen, other than an error.
    fn inject(&mut self, fault: Fault);
}

impl FromStr for DestinationStep {
    type Err = ();

    /// Reads a step's name as the journal has it.
    fn from_str(name: &str) -> Result<Self, ()> {
        [&Self::PREPARE[..], &Self::MAKE_READY, &Self::COMMIT, &Self::DRAIN]
            .concat()
            .into_iter()
            .find(|step| step.to_string() == name)
            .ok_or(())
    }
}

/// Where a destination stands by its journal, after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not READY, or given up by the source: to be undone.
    Undo,
    /// READY: wait for the source's word. If it had come to commit, but the container does not run yet as far as is known,
    /// the source says it again; it may have been given up meanwhile.
    Ready,
    /// The container runs here.
    Running,
    /// It does, and nothing is left to do.
    Drained,
    /// Nothing is left of it here.
    Ended,
}

/// Reads where a destination stands.
pub fn standing(records: &[Record]) -> Standing {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    // What had drained may have been given up after that.
    let undone = records.iter().position(|r| matches!(r, Record::Undone { .. }));
    if let Some(at) = undone {
        if records[at..].contains(&Record::Done) { Standing::Ended } else { Standing::Undo }
    } else if has(|r| matches!(r, Record::Done)) {
        Standing::Drained
    } else if has(|r| matches!(r, Record::Running)) {
        Standing::Running
    } else if has(|r| matches!(r, Record::Ready)) {
        Standing::Ready
    } else {
        Standing::Undo
    }
}

fn pass(
    port: &mut dyn DestinationPort,
    faults: &FaultPlan,
    step: impl fmt::Display,
    when: When,
) -> Result<(), Failure> {
    let place = step.to_string();
    caught(format_args!("step {place}"), || faults.pass(Side::Destination, step, when, |fault| port.inject(fault)))
}

fn run(
    port: &mut dyn DestinationPort,
    journal: &mut Journal,
    faults: &FaultPlan,
    steps: &[DestinationStep],
    begun: &mut Vec<DestinationStep>,
) -> Result<(), Failure> {
    for step in steps {
        let noted = journal.append(&Record::Step { step: step.to_string() });
        // After the commit point nothing may keep the container from running, not even a full disk.
        if step.phase() < Phase::Commit {
            noted.map_err(|e| Failure::new(e.to_string()))?;
        }
        begun.push(*step);
        pass(port, faults, step, When::Before)?;
        caught(format_args!("step {step}"), || port.run(*step))?;
        pass(port, faults, step, When::After)?;
    }
    Ok(())
}

/// On the source's offer: everything that can be made before the freeze. Whatever it returns, `begun` has the steps that
/// were begun; on failure the caller gives them to [`abort`].
pub fn prepare(
    port: &mut dyn DestinationPort,
    journal: &mut Journal,
    faults: &FaultPlan,
    begun: &mut Vec<DestinationStep>,
) -> Result<(), Failure> {
    run(port, journal, faults, &DestinationStep::PREPARE, begun)
}

/// While the source is frozen: receives and restores. When it returns `Ok`, READY is in the journal and may be said. On
/// failure the caller calls [`abort`].
pub fn make_ready(
    port: &mut dyn DestinationPort,
    journal: &mut Journal,
    faults: &FaultPlan,
    begun: &mut Vec<DestinationStep>,
) -> Result<(), Failure> {
    run(port, journal, faults, &DestinationStep::MAKE_READY, begun)?;
    pass(port, faults, "ready", When::Before)?;
    // Not synced: if this host goes down, the stopped copy is gone with it, and no READY can be kept.
    journal.append(&Record::Ready).map_err(|e| Failure::new(e.to_string()))?;
    pass(port, faults, "ready", When::After)
}

/// On the source's decision. It may be called again, also after a restart, until it succeeds. When it returns `Ok`, it is
/// in the journal that the container runs, and the source may be told.
pub fn commit(
    port: &mut dyn DestinationPort,
    journal: &mut Journal,
    faults: &FaultPlan,
    begun: &mut Vec<DestinationStep>,
) -> Result<(), Failure> {
    pass(port, faults, "commit", When::Before)?;
    // If it cannot be written here it still stands in the source's journal, and the container must not wait for it.
    let _ = journal.append(&Record::Commit);
    pass(port, faults, "commit", When::After)?;
    run(port, journal, faults, &DestinationStep::COMMIT, begun)?;
    // But the source says its word only until it has heard that the container runs: an agent that was restarted and found
    // nothing of that here would wait for ever.
    journal.append(&Record::Running).map_err(|e| Failure::new(e.to_string()))
}

/// Afterwards: waits for the last page and removes what only the migration needed.
pub fn drain(port: &mut dyn DestinationPort, journal: &mut Journal, faults: &FaultPlan) -> Result<(), Failure> {
    run(port, journal, faults, &DestinationStep::DRAIN, &mut Vec::new())?;
    journal.append(&Record::Done).map_err(|e| Failure::new(e.to_string()))
}

/// The steps that a journal says were begun.
pub fn begun(records: &[Record]) -> Vec<DestinationStep> {
    let step = |record: &Record| match record {
        Record::Step { step } => step.parse().ok(),
        _ => None,
    };
    records.iter().filter_map(step).collect()
}

/// Undoes the steps that were begun, last first; what it returns could not be undone. Once the decision was to commit it is
/// called only if the source has given the migration up, and says that this copy is void: a running one is ended.
pub fn abort(
    port: &mut dyn DestinationPort,
    journal: &mut Journal,
    begun: &[DestinationStep],
    failure: &Failure,
) -> Vec<String> {
    let undone = Record::Undone { failure: failure.clone() };
    let mut leftovers: Vec<String> = journal.append(&undone).err().map(|e| e.to_string()).into_iter().collect();
    for step in begun.iter().rev() {
        if let Err(failure) = caught(format_args!("the undo of step {step}"), || port.undo(*step)) {
            leftovers.push(format!("undoing {step}: {failure}"));
        }
    }
    if leftovers.is_empty() {
        leftovers.extend(journal.append(&Record::Done).err().map(|e| e.to_string()));
    }
    leftovers
}
