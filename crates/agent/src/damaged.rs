//! Migrations whose journal is damaged or gone: their containers are kept for them until it is known what was decided.
//!
//! ```text
//!   at the start ─▶ claimed, named ─▶ ask the other node ─▶ verdict (coordinator::damage)
//!                        ▲                                    ├─ wait: ask again, or take the operator's word
//!                        └────────────────────────────────────┤
//!                                                             └─ a whole journal that says it, then as after any restart
//! ```

mod ask;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tranship_api::{ErrorKind, Keep, RecoverRequest, ServiceError};
use tranship_coordinator::damage::{
    self, DestinationRecords, DestinationVerdict, FromDestination, FromSource, Original, Replica, SourceRecords,
    SourceVerdict, Wait,
};
use tranship_coordinator::{self as coordinator, Damaged, DestinationStep, Failure, Journal, Record, SourceStep};
use tranship_types::{MigrationId, Mode, NodeName, Outcome, Phase, Report, Side};
use tranship_wire::message::Response;

pub use ask::answer;

use crate::arrivals::{Context, Standing, lock};
use crate::claims::Claim;
use crate::layout::Layout;
use crate::node::Node;
use crate::registry::{LiveReport, unix_ms};
use crate::{moves, peers};

/// From one question to the next.
const AGAIN: Duration = Duration::from_secs(1);
/// What is said where the disk does not take the mended journal.
const NOT_MENDED: &str = "it is known what was decided, but mending failed";

/// All migrations of this agent whose journal is damaged.
#[derive(Default)]
pub struct DamagedMoves(Mutex<HashMap<MigrationId, Arc<DamagedMove>>>);

impl DamagedMoves {
    fn map(&self) -> MutexGuard<'_, HashMap<MigrationId, Arc<DamagedMove>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of them.
    pub fn get(&self, id: &MigrationId) -> Option<Arc<DamagedMove>> {
        self.map().get(id).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<DamagedMove>> {
        self.map().values().cloned().collect()
    }
}

/// What the first record says.
#[derive(Debug, Clone)]
struct First {
    side: Side,
    container: String,
    peer: NodeName,
    context: Value,
}

/// A migration whose journal is damaged.
pub struct DamagedMove {
    id: MigrationId,
    damaged: Damaged,
    /// `None` where no copy of the first record is left.
    first: Option<First>,
    report: Option<LiveReport>,
    /// What stands in the way.
    waits: Mutex<String>,
    /// Whoever decides about it holds this. The claim is absent where another migration has the container.
    state: Mutex<State>,
}

struct State {
    claim: Option<Claim>,
    /// It has a whole journal again.
    is_mended: bool,
}

impl DamagedMove {
    /// Its id.
    pub fn id(&self) -> &MigrationId {
        &self.id
    }

    /// The container, if it is known.
    pub fn container(&self) -> Option<&str> {
        self.first.as_ref().map(|first| first.container.as_str())
    }

    /// The other node, if it is known.
    pub fn peer(&self) -> Option<&NodeName> {
        self.first.as_ref().map(|first| &first.peer)
    }

    /// This node's side, the container, and what the port noted, if that is known.
    pub fn first(&self) -> Option<(Side, &str, &Value)> {
        self.first.as_ref().map(|first| (first.side, first.container.as_str(), &first.context))
    }

    /// Its journal's file.
    pub fn path(&self) -> &Path {
        &self.damaged.path
    }

    /// What is wrong, what it waits for, and what to type.
    pub fn explanation(&self) -> String {
        let (id, damage, path) = (&self.id, &self.damaged.damage, self.damaged.path.display());
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if self.first.is_none() {
            return format!(
                "the journal {path} is damaged: {damage}; which container it is about is not known, so that nothing here is taken for a \
                 leftover: see what is frozen (`tranship ls`), resume or remove it, then delete {path} and restart the agent"
            );
        }
        format!(
            "the journal {path} is damaged: {damage}; {waits}; to decide which copy goes on: `tranship recover {id} --keep-here` or \
             `tranship recover {id} --keep-there`"
        )
    }

    /// Whether the host was started after the migration began.
    fn is_before_boot(&self) -> bool {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let booted = text.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<u64>().ok());
        let began = self.report.as_ref().map(|report| report.read().started_unix_ms);
        booted.zip(began).is_some_and(|(booted, began)| booted * 1000 > began)
    }

    fn wait_for(&self, what: impl Into<String>) {
        let what = what.into();
        let changed = {
            let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *waits, what.clone()) != what
        };
        if changed {
            tracing::warn!(id = %self.id, "{}", self.explanation());
            let error = Some(self.explanation());
            self.report.iter().for_each(|report| report.change(|r| r.error.clone_from(&error)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The damaged journals of this node that no other list has: those that are lost.
pub fn lost(node: &Node) -> Vec<Damaged> {
    let journals = node.journals();
    let mut paths: Vec<PathBuf> = Journal::lost(&journals);
    // The copy beside the migration's other things outlasts the state directory.
    let directory = node.config.run_dir.join("migrations");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = journals.join(entry.file_name()).with_extension("jsonl");
        if entry.path().join(crate::layout::FIRST_RECORD).exists() && !path.exists() && !paths.contains(&path) {
            paths.push(path);
        }
    }
    let kept = |path: &PathBuf| {
        let layout = Layout::new(&node.config.run_dir, &id_of(path)?);
        Some(std::fs::read(layout.first_record()).unwrap_or_default())
    };
    paths.iter().map(|path| Journal::lost_with(path, &kept(path).unwrap_or_default())).collect()
}

fn id_of(path: &Path) -> Option<MigrationId> {
    path.file_stem()?.to_str()?.parse().ok()
}

/// Takes a migration with a damaged journal: its container is claimed when this returns, unless another one has it.
pub fn take_up(node: &Arc<Node>, damaged: Damaged) {
    let Some(id) = id_of(&damaged.path) else {
        return tracing::error!("{damaged}; its name is not that of a migration");
    };
    let layout = Layout::new(&node.config.run_dir, &id);
    let begin = damaged.begin.clone().or_else(|| {
        let copy = std::fs::read(layout.first_record()).ok()?;
        Journal::lost_with(&damaged.path, &copy).begin
    });
    let first = match begin {
        Some(Record::Begin { side, container, peer, context, .. }) => Some(First { side, container, peer, context }),
        _ => None,
    };
    let claim = first.as_ref().map(|first| node.claim(&first.container, &id));
    let waits = match &claim {
        None => "nothing is known of it".to_owned(),
        Some(Ok(_)) => "the other node is being asked".to_owned(),
        Some(Err(other)) => format!("nothing is done about it, since {other}"),
    };
    let mut one = DamagedMove {
        report: None,
        waits: Mutex::new(waits),
        state: Mutex::new(State { claim: claim.and_then(Result::ok), is_mended: false }),
        id: id.clone(),
        damaged,
        first,
    };
    let explanation = one.explanation();
    tracing::error!(%id, container = one.container().unwrap_or("unknown"), "{explanation}");
    one.report = one.first.as_ref().map(|first| {
        let report = first_report(node, &id, first);
        node.registry.begin(Report {
            phase: Phase::Damaged,
            outcome: Outcome::Running,
            error: Some(explanation),
            ..report
        })
    });
    let one = Arc::new(one);
    node.damaged.map().insert(id, Arc::clone(&one));
    if one.lock().claim.is_some() {
        let its_node = Arc::clone(node);
        node.start_patiently("damaged", move || {
            while !one.lock().is_mended {
                let decided = coordinator::caught("a damaged journal", || {
                    decide_alone(&its_node, &one);
                    Ok(())
                });
                decided.err().into_iter().for_each(|failure| one.wait_for(failure.message));
                if !its_node.pause(AGAIN) {
                    return;
                }
            }
        });
    }
}

/// The report of a migration of which no more is known than its first record.
fn first_report(node: &Node, id: &MigrationId, first: &First) -> Report {
    if let Some(kept) = node.registry.report(id) {
        return kept;
    }
    let (here, there) = (node.config.node.clone(), first.peer.clone());
    let plain = |source, destination| {
        Report::new(id.clone(), first.container.clone(), source, destination, Mode::Auto, unix_ms())
    };
    match first.side {
        Side::Source => serde_json::from_value(first.context.clone()).unwrap_or_else(|_| plain(here, there)),
        Side::Destination => match serde_json::from_value::<Context>(first.context.clone()) {
            Ok(context) => context.report(node, id, &there),
            Err(_) => plain(there, here),
        },
    }
}

/// Asks the other node, and acts if that makes the outcome certain.
fn decide_alone(node: &Arc<Node>, one: &DamagedMove) {
    let mut state = one.lock();
    let Some(first) = one.first.as_ref().filter(|_| !state.is_mended && state.claim.is_some()) else { return };
    let has_directory = Layout::new(&node.config.run_dir, &one.id).root().exists();
    let done = match first.side {
        Side::Source => {
            let here = ask::original(node, &one.id, first);
            let there = ask::destination(node, &one.id, first);
            let own = SourceRecords::of(&one.damaged);
            act_as_source(node, one, first, &mut state, (damage::source(own, here, there, has_directory), here, there))
        }
        Side::Destination => {
            let heard = ask::source(node, &one.id, first);
            decide_as_destination(node, one, first, &mut state, heard)
        }
    };
    if let Err(failure) = done {
        drop(state);
        one.wait_for(failure.message);
    }
}

fn decide_as_destination(
    node: &Arc<Node>,
    one: &DamagedMove,
    first: &First,
    state: &mut State,
    heard: FromSource,
) -> Result<(), Failure> {
    let here = ask::replica(node, one, first);
    let verdict = damage::destination(DestinationRecords::of(&one.damaged), here, heard, is_tidied(node, one));
    act_as_destination(node, one, first, state, verdict)
}

/// Whether a destination has nothing left of the migration but the container. That its directory is gone shows it, unless the host was
/// restarted since: then it went with the host's memory.
fn is_tidied(node: &Node, one: &DamagedMove) -> bool {
    let noted = one.damaged.records.contains(&Record::step(DestinationStep::Tidy));
    noted || !(Layout::new(&node.config.run_dir, &one.id).root().exists() || one.is_before_boot())
}

fn waiting(wait: Wait) -> Failure {
    Failure::new(format!("what was decided is not known, and {wait}"))
}

fn act_as_source(
    node: &Arc<Node>,
    one: &DamagedMove,
    first: &First,
    state: &mut State,
    (verdict, here, there): (SourceVerdict, Original, FromDestination),
) -> Result<(), Failure> {
    let damage = &one.damaged.damage;
    let failure = Failure::new(match verdict {
        SourceVerdict::Wait(wait) => return Err(waiting(wait)),
        SourceVerdict::Forget => {
            tracing::warn!(id = %one.id, %damage, "a journal is damaged of which nothing is left on this node; it is removed");
            return forget(node, one, state);
        }
        SourceVerdict::GiveUp => format!(
            "the journal was damaged ({damage}), and by the operator's word the original goes on: what the container may have done on node \
             {}, and told its clients, is lost",
            first.peer
        ),
        _ => format!("the journal was damaged ({damage}); node {} has not let its copy run", first.peer),
    });
    if verdict == SourceVerdict::AbortAndUndo {
        ask::abort(node, &one.id, &first.peer)?;
    }
    let layout = Layout::new(&node.config.run_dir, &one.id);
    let mut records =
        damage::source_records(&one.damaged, begin(node, one, first), verdict, layout.root().exists(), &failure);
    let release = Record::step(SourceStep::Release);
    if let Some(records) = records.as_mut().filter(|records| !records.contains(&release))
        && verdict == SourceVerdict::Forward
        && (here, there) == (Original::Gone, FromDestination::Running)
    {
        // No page can come from it any more. A copy that is held has still to be told that it runs.
        records.push(release);
    }
    let phase = match verdict {
        SourceVerdict::Forward => Phase::Resume,
        SourceVerdict::Ended { .. } => Phase::Done,
        _ => Phase::Undo,
    };
    mend(node, one, state, &records.unwrap_or_default(), phase)
}

fn act_as_destination(
    node: &Arc<Node>,
    one: &DamagedMove,
    first: &First,
    state: &mut State,
    verdict: DestinationVerdict,
) -> Result<(), Failure> {
    let phase = match verdict {
        DestinationVerdict::Wait(wait) => return Err(waiting(wait)),
        DestinationVerdict::Forget => return forget(node, one, state),
        DestinationVerdict::Undo => Phase::Undo,
        DestinationVerdict::Ready | DestinationVerdict::Run => Phase::Ready,
        DestinationVerdict::Running => Phase::Drain,
    };
    let failure = Failure::new(format!("the journal was damaged ({}), and the copy did not run", one.damaged.damage));
    let has_directory = !is_tidied(node, one);
    let records = damage::destination_records(&one.damaged, begin(node, one, first), verdict, has_directory, &failure);
    mend(node, one, state, &records.unwrap_or_default(), phase)?;
    if verdict == DestinationVerdict::Run
        && let Response::Failed { message, .. } = peers::commit(node, &one.id)
    {
        return Err(Failure::new(format!("the copy could not be let run yet, which is tried again: {message}")));
    }
    Ok(())
}

fn begin(node: &Node, one: &DamagedMove, first: &First) -> Record {
    let First { side, container, peer, mut context } = first.clone();
    // A source needs no more of it than what the rest of the record says, too.
    if side == Side::Source && Report::deserialize(&context).is_err() {
        context = serde_json::to_value(first_report(node, &one.id, first)).unwrap_or(context);
    }
    Record::Begin { id: one.id.clone(), side, container, peer, context }
}

/// Gives the migration a whole journal, and goes on with that as after any restart.
fn mend(
    node: &Arc<Node>,
    one: &DamagedMove,
    state: &mut State,
    records: &[Record],
    phase: Phase,
) -> Result<(), Failure> {
    if let Some(Record::Begin { side: Side::Destination, context, .. }) = records.first() {
        Context::deserialize(context).map_err(|_| Failure::new(one.damaged.to_string()))?;
    }
    let journal =
        Journal::replace(&one.damaged.path, records).map_err(|error| Failure::new(format!("{NOT_MENDED}: {error}")))?;
    tracing::warn!(id = %one.id, container = one.container(), ?phase, "a damaged journal is mended");
    state.is_mended = true;
    one.report.iter().for_each(|report| report.change(|r| (r.phase, r.error) = (phase, None)));
    moves::take_up(node, state.claim.take(), journal, records.to_vec());
    // Not before: whoever asks finds it in one of the two lists.
    node.damaged.map().remove(&one.id);
    drop_group(node, one);
    Ok(())
}

/// Removes the damaged journal of a group when all of its migrations have whole ones again.
fn drop_group(node: &Node, one: &DamagedMove) {
    let group = |one: &DamagedMove| one.report.as_ref().and_then(|report| report.read().group);
    let Some(id) = group(one).filter(|id| node.damaged.all().iter().all(|other| group(other).as_ref() != Some(id)))
    else {
        return;
    };
    let path = node.journals().join(format!("{id}.jsonl"));
    if Journal::open(&path).is_err() {
        let _ = Journal::forget_lost(&path);
        let _ = std::fs::remove_file(&path);
    }
}

/// Lets a copy run by the operator's decision, which is in its journal: tries it until the copy runs, or the source has had it removed.
pub fn keep(node: &Arc<Node>, id: &MigrationId) {
    let held = || {
        let found = node.arrivals.get(id)?;
        let arrival = lock(&found);
        let first = First {
            side: Side::Destination,
            container: arrival.run.container().to_owned(),
            peer: arrival.peer.clone(),
            context: Value::Null,
        };
        (arrival.standing == Standing::Ready).then(|| (first, arrival.report.clone()))
    };
    while let Some((first, report)) = held() {
        // The source may be back since, and have its original run.
        let heard = ask::source(node, id, &first);
        let done = match damage::destination_by_word(Replica::Held, heard, true, true) {
            Err(wait) => Err(wait.to_string()),
            Ok(_) => match peers::commit(node, id) {
                Response::Failed { message, .. } => Err(message),
                _ => Ok(()),
            },
        };
        let error =
            done.err().map(|why| format!("the operator decided that the copy here runs, which is tried again: {why}"));
        error.iter().for_each(|error| tracing::warn!(%id, "{error}"));
        report.change(|r| r.error = error);
        if !node.pause(AGAIN) {
            return;
        }
    }
}

/// Nothing is left that it could be about.
fn forget(node: &Arc<Node>, one: &DamagedMove, state: &mut State) -> Result<(), Failure> {
    let absent = |done: std::io::Result<()>| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::new(format!("nothing is left of it here, but it cannot be removed: {error}")))
        }
        _ => Ok(()),
    };
    absent(Journal::forget_lost(&one.damaged.path))?;
    absent(std::fs::remove_file(&one.damaged.path))?;
    (state.is_mended, state.claim) = (true, None);
    node.damaged.map().remove(&one.id);
    let error = format!("the journal was damaged ({}), and nothing is left of it on this node", one.damaged.damage);
    if let Some(report) = &one.report {
        report.end(|r| (r.phase, r.outcome, r.error) = (Phase::Undone, Outcome::Failed, Some(error)));
    }
    Ok(())
}

/// The source has said what it decided: this node's damaged journal, if it is one, is mended by that. A failure says why it is not.
pub fn told(node: &Arc<Node>, id: &MigrationId, word: FromSource) -> Result<(), Failure> {
    let Some(one) = node.damaged.get(id) else { return Ok(()) };
    let mut state = one.lock();
    if state.is_mended {
        return Ok(());
    }
    let in_doubt = || Failure::new(format!("on node {}, {}", node.config.node, one.explanation()));
    let first = one.first.as_ref().filter(|first| first.side == Side::Destination && state.claim.is_some());
    decide_as_destination(node, &one, first.ok_or_else(in_doubt)?, &mut state, word).map_err(|_| in_doubt())
}

/// The operator decides which copy goes on; `None` if the migration's journal is whole.
pub fn recover(node: &Arc<Node>, request: &RecoverRequest) -> Option<Result<Report, ServiceError>> {
    let meant = |one: &Arc<DamagedMove>| {
        one.id.as_str() == request.migration || one.container() == Some(request.migration.as_str())
    };
    // Of two of one container it is the one that has it.
    let all: Vec<_> = node.damaged.all().into_iter().filter(meant).collect();
    let one = all.iter().find(|one| one.lock().claim.is_some()).or(all.first())?;
    Some(decide_by_word(node, one, request))
}

fn decide_by_word(node: &Arc<Node>, one: &DamagedMove, request: &RecoverRequest) -> Result<Report, ServiceError> {
    let blocked = |cause: String, remedy: &str| ServiceError::new(ErrorKind::Blocked, cause, remedy);
    let mut state = one.lock();
    let nothing_known = || blocked(one.explanation(), "see `tranship doctor`");
    let (Some(first), Some(report)) = (&one.first, &one.report) else { return Err(nothing_known()) };
    if state.is_mended {
        return Ok(report.read());
    }
    if state.claim.is_none() {
        let cause = format!("another move has {}, and its journal tells what becomes of it", first.container);
        return Err(blocked(cause, "wait for that one; see `tranship status`"));
    }
    let Some(keep) = request.keep else {
        return Err(blocked(one.explanation(), "say which copy goes on: --keep-here or --keep-there"));
    };
    let keep_here = keep == Keep::Here;
    let refused = |wait: Wait| {
        let cause = format!("{} is not kept {}: {wait}", first.container, if keep_here { "here" } else { "there" });
        let remedy = match wait {
            Wait::Silent | Wait::Unknown if keep_here => {
                "if you know that its host is down, or was restarted since, add --host-is-down; else two copies could run"
            }
            _ => "see `tranship doctor` on both nodes, and decide for the copy that there is",
        };
        blocked(cause, remedy)
    };
    tracing::warn!(id = %one.id, container = %first.container, ?keep, "the operator decides");
    let done = match first.side {
        Side::Source => {
            let here = ask::original(node, &one.id, first);
            let there = ask::destination(node, &one.id, first);
            let verdict = damage::source_by_word(here, there, keep_here, request.host_is_down).map_err(refused)?;
            act_as_source(node, one, first, &mut state, (verdict, here, there))
        }
        Side::Destination => {
            let here = ask::replica(node, one, first);
            let there = ask::source(node, &one.id, first);
            let verdict = damage::destination_by_word(here, there, keep_here, request.host_is_down).map_err(refused)?;
            act_as_destination(node, one, first, &mut state, verdict)
        }
    };
    drop(state);
    done.map_err(|failure| {
        one.wait_for(failure.message.clone());
        let remedy = match failure.message.starts_with(NOT_MENDED) {
            true => "free some space or mend the disk below the agent's state_dir, and try again",
            false => "see `tranship status` and `tranship doctor` on both nodes",
        };
        blocked(failure.message, remedy)
    })?;
    Ok(node.registry.report(&one.id).unwrap_or_else(|| report.read()))
}
