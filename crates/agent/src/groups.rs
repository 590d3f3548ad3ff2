//! Moves groups of containers: each member is an ordinary migration that waits for its turns.
//!
//! ```text
//!   request ─▶ members (named, or found by a label) ─▶ order ─▶ a thread for each member
//!                                                                  │ waits to prepare
//!                                                                  ▼
//!                                   schedule ◀── its turns ── migration, with its own journal
//! ```
//!
//! A group decides nothing that a migration has to remember (but for one that moves as a whole: [`decision`]), so that an
//! agent's restart needs no more than the migrations' journals: each of those is finished or undone, those that had not
//! begun do not begin, and the report says so.

mod decision;
mod members;
mod turn;
mod units;

use std::collections::BTreeSet;
use std::sync::Arc;

use tranship_api::{ErrorKind, GroupPlan, GroupRequest, MemberPlan, MoveRequest, PlanRequest, ServiceError};
use tranship_coordinator as coordinator;
use tranship_coordinator::group::{self, Limits, OrderError, Ranked, Schedule, Stage};
use tranship_sys::threads;
use tranship_types::{GroupId, GroupMember, GroupOrder, GroupReport, MemberOutcome, NodeName, Outcome};

use decision::Decision;
pub use decision::hand_down;
pub use turn::{Turn, UnitMember};
pub use units::Unit;

use crate::node::{Node, random_bytes};
use crate::registry::unix_ms;
use crate::{inspection, moves, plan};

/// For how long each container of a group is watched for a plan, in ms.
const SAMPLE_MS: u32 = 1000;

/// Who moves after whom, and where to.
struct Arranged {
    ranked: Vec<Ranked>,
    /// In the same order.
    destinations: Vec<NodeName>,
    /// Whom each is frozen after, where that has been said.
    stops_after: Option<Vec<Vec<usize>>>,
}

impl Arranged {
    /// The names of those that move to a node.
    fn going_to(&self, node: &NodeName) -> BTreeSet<String> {
        let there = self.ranked.iter().zip(&self.destinations).filter(|(_, to)| *to == node);
        there.map(|(member, _)| member.name.clone()).collect()
    }

    /// The names of those that a member moves after.
    fn after(&self, own: &Ranked) -> Vec<String> {
        own.after.iter().map(|rank| self.ranked[*rank].name.clone()).collect()
    }
}

fn arrange(node: &Node, request: &GroupRequest) -> Result<Arranged, ServiceError> {
    let found = members::find(node, request)?;
    let depends_on = found.iter().map(|(name, member)| (name.clone(), member.depends_on.clone())).collect();
    let no_order = |error: OrderError| {
        let text = error.to_string();
        let (cause, remedy) = text.split_once("; ").unwrap_or((&text, ""));
        ServiceError::new(ErrorKind::Invalid, cause, remedy)
    };
    let ranked = group::rank(&depends_on, &request.levels).map_err(no_order)?;
    let stops_after = match (request.stop_levels.as_slice(), request.order) {
        ([], _) => None,
        (levels, GroupOrder::Atomic) => Some(group::in_levels(&ranked, levels).map_err(no_order)?),
        (_, order) => {
            let cause = format!("levels for stopping have no meaning in a group that moves {order}");
            return Err(ServiceError::new(ErrorKind::Invalid, cause, "add --atomic, or leave stop_levels out"));
        }
    };
    let to = |own: &Ranked| members::destination(request, &own.name, &found[&own.name]);
    let destinations = ranked.iter().map(to).collect::<Result<_, _>>()?;
    Ok(Arranged { ranked, destinations, stops_after })
}

/// Foretells how a group would move: a plan for each of its containers, one after the other, since they would be in each
/// other's way on the link.
pub fn plan(node: &Arc<Node>, request: &GroupRequest) -> Result<GroupPlan, ServiceError> {
    let arranged = arrange(node, request)?;
    let mut members = Vec::new();
    let units = units(node, request, &arranged);
    for (rank, (own, to)) in arranged.ranked.iter().zip(&arranged.destinations).enumerate() {
        let wish = PlanRequest {
            sample_ms: SAMPLE_MS,
            options: request.options.clone(),
            ..PlanRequest::new(own.name.clone(), to.clone())
        };
        let (unit, at_once) = (units[rank].as_ref(), request.order == GroupOrder::Atomic);
        let company = plan::Company { unit, others: arranged.going_to(to), at_once };
        let (blockers, plan) = match plan::plan_member(node, &wish, company) {
            Ok(plan) => (plan.blockers.clone(), Some(plan)),
            Err(error) if !error.body.blockers.is_empty() => (error.body.blockers, None),
            Err(error) => return Err(error),
        };
        let (container, to, after) = (own.name.clone(), to.clone(), arranged.after(own));
        members.push(MemberPlan { container, to, after, level: own.level, blockers, plan });
    }
    Ok(GroupPlan { from: node.config.node.clone(), order: request.order, members })
}

/// Begins to move a group; refuses, before anything is touched, what can be seen not to work.
pub fn begin(node: &Arc<Node>, request: &GroupRequest) -> Result<GroupReport, ServiceError> {
    let internal = |what: &str, e: &std::io::Error| ServiceError::new(ErrorKind::Internal, format!("{what}: {e}"), "");
    let arranged = arrange(node, request)?;
    let mut listed = Vec::new();
    for (own, destination) in arranged.ranked.iter().zip(&arranged.destinations) {
        let name = &own.name;
        inspection::find_free(node, name, request.options.engine).map_err(|f| plan::refused(f, name))?;
        if !node.peers().has(destination) {
            return Err(ServiceError::blocked(name, vec![node.unknown_peer(destination)]));
        }
        listed.push(GroupMember {
            container: name.clone(),
            destination: destination.clone(),
            after: arranged.after(own),
            level: own.level,
            migration: None,
            outcome: MemberOutcome::Waiting,
            error: None,
            blackout_ms: None,
            wire_bytes: 0,
            spans: Vec::new(),
        });
    }
    let report = GroupReport {
        id: GroupId::from_random(random_bytes().map_err(|e| internal("no random bytes", &e))?),
        source: node.config.node.clone(),
        order: request.order,
        outcome: Outcome::Running,
        started_unix_ms: unix_ms(),
        total_ms: None,
        members: listed,
        interrupted: false,
    };
    let decision = match request.order {
        GroupOrder::Atomic => Some(Decision::create(&node.journals(), &report.id, report.members.len())),
        _ => None,
    };
    let decision = decision.transpose().map_err(|e| ServiceError::new(ErrorKind::Internal, e.to_string(), ""))?;
    let units = units(node, request, &arranged);
    let schedule = schedule(request, &arranged.ranked, arranged.stops_after);
    let owner = |unit: &Option<Unit>| {
        let owner = unit.as_ref()?.owner.as_ref()?;
        arranged.ranked.iter().position(|own| own.name == *owner)
    };
    let schedule = schedule.sharing(&units.iter().map(owner).collect::<Vec<_>>());
    start(node, request, (schedule, units), (report.clone(), decision))
        .map_err(|e| internal("the group's record cannot be written, free some space", &e))?;
    Ok(report)
}

fn schedule(request: &GroupRequest, ranked: &[Ranked], stops_after: Option<Vec<Vec<usize>>>) -> Schedule {
    // In no order, nobody comes after anybody.
    let after = |own: &Ranked| match request.order {
        GroupOrder::AllAtOnce => Vec::new(),
        GroupOrder::Pipelined | GroupOrder::Sequential | GroupOrder::Atomic => own.after.clone(),
    };
    let schedule = Schedule::new(ranked.iter().map(after), Limits::of(request.order, request.options.mode));
    match stops_after {
        Some(stops_after) => schedule.stopping(stops_after),
        None => schedule,
    }
}

/// The unit of each member. Only what moves as a whole can share anything.
fn units(node: &Node, request: &GroupRequest, arranged: &Arranged) -> Vec<Option<Unit>> {
    let members: Vec<_> = arranged.ranked.iter().map(|own| own.name.as_str()).zip(&arranged.destinations).collect();
    match request.order {
        GroupOrder::Atomic => units::find(node, &members, request.options.engine),
        _ => vec![None; members.len()],
    }
}

fn start(
    node: &Arc<Node>,
    request: &GroupRequest,
    (schedule, units): (Schedule, Vec<Option<Unit>>),
    (report, decision): (GroupReport, Option<Decision>),
) -> std::io::Result<()> {
    let turns =
        Turn::of_all(&report, node.groups.begin(report.clone()), (schedule, units), decision, &request.options)?;
    tracing::info!(id = %report.id, members = turns.len(), order = %report.order, "a group begins to move");
    if let Some(first) = turns.first() {
        node.interrupts.insert_group(&report.id, first.interrupts());
    }
    for (turn, member) in turns.into_iter().zip(report.members) {
        let wish =
            MoveRequest { options: request.options.clone(), ..MoveRequest::new(member.container, member.destination) };
        let (its_node, its_turn) = (Arc::clone(node), turn.clone());
        let started = threads::start("member", move || {
            let run = coordinator::caught("a member of a group", || {
                run(&its_node, &its_turn, &wish);
                Ok(())
            });
            run.err().into_iter().for_each(|failure| its_turn.refused(failure.message));
            has_ended(&its_node, &its_turn);
        });
        if let Err(error) = started {
            turn.refused(error.to_string());
            has_ended(node, &turn);
        }
    }
    Ok(())
}

/// Nothing interrupts a member any more that has ended, nor its group after the last one.
fn has_ended(node: &Node, turn: &Turn) {
    turn.interrupt().undoing();
    let id = turn.group();
    if node.groups.report(&id).is_none_or(|report| report.outcome != Outcome::Running) {
        node.interrupts.remove_group(&id);
    }
}

/// One member from its first turn to its end.
fn run(node: &Arc<Node>, turn: &Turn, wish: &MoveRequest) {
    if let Err(failure) = turn.interrupt().guard().and_then(|()| turn.wait(Stage::Prepare)) {
        return turn.not_begun(failure);
    }
    let begun = match moves::begin(node, wish, Some(turn.clone())) {
        Ok(report) => report,
        Err(error) => return turn.refused(error.to_string()),
    };
    turn.begun(&begun.id);
    match node.registry.wait(&begun.id) {
        // The agent is stopping.
        Some(report) if report.outcome == Outcome::Running => {}
        Some(report) => turn.ended(&report),
        None => turn.refused("it failed at once, and its report could not be written; free some space".to_owned()),
    }
}

/// Takes up the groups that an earlier agent has left: their migrations are taken up by themselves, and waited for.
pub fn recover(node: &Arc<Node>) {
    for report in node.groups.reports() {
        if report.outcome != Outcome::Running {
            continue;
        }
        tracing::info!(id = %report.id, "a group was interrupted by the agent's end");
        let live = node.groups.begin(GroupReport { interrupted: true, ..report.clone() });
        let its_node = Arc::clone(node);
        node.start_patiently("group", move || {
            let node = its_node;
            for (rank, member) in report.members.iter().enumerate() {
                let ended = match (member.outcome, &member.migration) {
                    (MemberOutcome::Running, Some(id)) => node.registry.wait(id),
                    (MemberOutcome::Running | MemberOutcome::Waiting, _) => None,
                    _ => continue,
                };
                live.change(|r| match &ended {
                    Some(report) => turn::take_over(&mut r.members[rank], report),
                    None => {
                        r.members[rank].outcome = MemberOutcome::Skipped;
                        r.members[rank].error = Some(RESTARTED.to_owned());
                    }
                });
            }
            // If an agent stops before they have ended, the next one waits again.
            if live.read().members.iter().all(|m| m.outcome != MemberOutcome::Running) {
                live.end(|r| turn::conclude(r, None));
            }
        });
    }
}

/// Why a member has not begun.
const RESTARTED: &str = "the agent was restarted before its turn; move it again";
