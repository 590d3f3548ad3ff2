//! What a move would do: blockers on both nodes, and, if time is given for it, a prediction from measurements.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tranship_api::{ErrorKind, MoveRequest, Plan, PlanRequest, ServiceError};
use tranship_coordinator::Failure;
use tranship_criu::preflight::Findings;
use tranship_memory::predict::{self, Costs, Observed, Tasks, predict};
use tranship_memory::sample::sample;
use tranship_memory::tracker::TrackError;
use tranship_types::{MoveOptions, NodeName, Outcome, Report, Side};

use crate::groups::Unit;
use crate::inspection::Inspection;
use crate::node::Node;
use crate::{local_networks, options, paths, probes, source};

/// Rate at which memory is assumed to travel where the link was not measured, in bytes per second.
const ASSUMED_RATE: f64 = 900_000_000.0;
/// From how much on it is said what a container's tasks take of the blackout.
const MANY_TASKS_MS: f64 = 200.0;
/// Earlier moves that count.
const EARLIER: usize = 9;

/// A refusal as the API gives it.
pub fn refused(failure: Failure, container: &str) -> ServiceError {
    if failure.blockers.is_empty() {
        return ServiceError::new(ErrorKind::Internal, failure.message, "");
    }
    ServiceError::blocked(container, failure.blockers)
}

/// A dry run: looks for what stands in the way, measures nothing.
pub fn dry_run(node: &Arc<Node>, request: &MoveRequest) -> Result<Plan, ServiceError> {
    let (mut plan, found) = look(node, &request.container, &request.to, &request.options, Company::default())?;
    if plan.blockers.is_empty() {
        let seen = predict(&assumed(node, &plan, &found), &request.options, options::limits(&request.options));
        plan.estimated_blackout_ms = Some(seen.blackout_ms);
        plan.notes.extend(many_tasks(&found.findings));
    }
    Ok(plan)
}

/// What is said of a container whose tasks alone make a blackout long.
fn many_tasks(findings: &Findings) -> Option<String> {
    let tasks = tasks(findings);
    let ms = tasks.blackout().as_secs_f64() * 1e3;
    (ms > MANY_TASKS_MS).then(|| {
        let Tasks { processes, threads, zombies, depth } = tasks;
        let of =
            |number: usize, name: &str, plural: &str| format!("{number} {}", if number == 1 { name } else { plural });
        format!(
            "its tasks alone take about {ms:.0} ms of the blackout: {} in {} with {}, and {zombies} that have ended",
            of(processes, "process", "processes"),
            of(depth, "level", "levels"),
            of(threads, "thread", "threads"),
        )
    })
}

/// What a plan would measure, for a container that writes nothing and a fast link.
fn assumed(node: &Node, plan: &Plan, found: &Inspection) -> Observed {
    Observed {
        memory: found.findings.memory_bytes + plan.tmpfs_bytes,
        frozen_content: 0,
        looks: Vec::new(),
        looking: Duration::ZERO,
        sampled: Duration::ZERO,
        link_rate: ASSUMED_RATE,
        round_trip: Duration::ZERO,
        costs: costs(&departures(node), &plan.container, tasks(&found.findings)),
    }
}

/// Bytes of files and image that travel before the freeze.
fn bytes_ahead(plan: &Plan) -> u64 {
    plan.trees.iter().map(|tree| tree.bytes).sum::<u64>()
        + plan.log_bytes
        + plan.image.as_ref().map_or(0, |image| image.bytes)
}

/// Looks for what stands in the way; if nothing does, watches the container and probes the link.
pub fn plan(node: &Arc<Node>, request: &PlanRequest) -> Result<Plan, ServiceError> {
    plan_member(node, request, Company::default())
}

/// Who moves with a container.
#[derive(Default)]
pub struct Company<'a> {
    /// The unit that it is a member of.
    pub unit: Option<&'a Unit>,
    /// Those that move to the same node.
    pub others: BTreeSet<String>,
    /// Whether they do so at the same moment.
    pub at_once: bool,
}

/// The same for a container that would move in company.
pub fn plan_member(node: &Arc<Node>, request: &PlanRequest, with: Company<'_>) -> Result<Plan, ServiceError> {
    let name = &request.container;
    let (mut plan, found) = look(node, name, &request.to, &request.options, with)?;
    if !plan.blockers.is_empty() {
        plan.notes.push("nothing was measured, because the container cannot be moved as it is".to_owned());
        return Ok(plan);
    }
    // Two watches over one container would spoil each other.
    let _claim = node.claim_for_plan(name).map_err(|blocker| ServiceError::blocked(name, vec![blocker]))?;
    let time = Duration::from_millis(request.sample_ms.into());
    match measure(node, request, &found, time) {
        Ok(observed) => {
            let seen = predict(&observed, &request.options, options::limits(&request.options));
            let rate = source::pages_rate(seen.link_rate, request.options.compress);
            let limit = request.options.freeze_timeout();
            let too_slow = |bytes| source::too_slow((name, &request.to), bytes, rate, limit);
            if too_slow(seen.freeze_bytes).is_some() {
                // Where all memory travels in the freeze, it is known how much of it is zeros, which do not.
                let pids = found.container.processes().ok().filter(|_| seen.rounds.is_empty()).unwrap_or_default();
                plan.blockers.extend(too_slow(seen.freeze_bytes.saturating_sub(source::zeros(&pids))));
            }
            plan.mode = seen.mode;
            plan.estimated_blackout_ms = Some(seen.blackout_ms);
            plan.estimated_total_ms = Some(seen.total_ms + 1e3 * bytes_ahead(&plan) as f64 / seen.link_rate.max(1.0));
            plan.notes.extend(remarks(&seen, &request.options));
            plan.notes.extend(many_tasks(&found.findings));
            plan.prediction = Some(Box::new(seen));
        }
        Err(failure) => plan.notes.push(format!("no prediction: {failure}")),
    }
    Ok(plan)
}

fn remarks(seen: &tranship_types::Prediction, options: &MoveOptions) -> Vec<String> {
    let mut remarks = Vec::new();
    if seen.throttle_percent > 0 {
        remarks
            .push(format!("it would get up to {} % less CPU time for the rounds to converge", seen.throttle_percent));
    }
    if !seen.converges {
        let much = "the container writes too much for rounds to bring what is left below the blackout budget";
        let used_up = options.max_rounds.is_some_and(|most| seen.rounds.len() as u32 >= most);
        remarks.push(match options.safe {
            true if used_up => format!(
                "the rounds that max_rounds allows ({}) leave more than fits the blackout budget: it would be sent in the freeze",
                seen.rounds.len()
            ),
            _ if seen.later_bytes > 0 => format!("{much}; the rest would follow after the resume"),
            true => format!("{much}: the move would be refused"),
            false => format!("{much}; mode auto would let the rest follow after the resume"),
        });
    }
    remarks
}

fn look(
    node: &Arc<Node>,
    name: &str,
    to: &NodeName,
    options: &MoveOptions,
    Company { unit, others, at_once }: Company<'_>,
) -> Result<(Plan, Inspection), ServiceError> {
    if let Some(holder) = node.busy_with(name) {
        return Err(ServiceError::blocked(name, vec![holder]));
    }
    let none = BTreeSet::new();
    let at_once = if at_once { &others } else { &none };
    let found = paths::inspect(node, name, (to, options), (unit, at_once)).map_err(|f| refused(f, name))?;
    let mut blockers = found.blockers.clone();
    let mut allowed = found.allowed.clone();
    let mut notes = [&found.findings.notes[..], &found.findings.changes].concat();
    let mut image = None;
    if node.peers().has(to) {
        match source::check(node, to, &found.offer) {
            Ok(checked) => {
                let (there, allowed_there) = options.allow.part(checked.blockers);
                blockers.extend(there);
                allowed.extend(allowed_there);
                notes.extend(checked.notes);
                image = checked.image;
            }
            Err(failure) if !failure.blockers.is_empty() => blockers.extend(failure.blockers),
            Err(failure) => return Err(refused(failure, name)),
        }
    } else {
        blockers.push(node.unknown_peer(to));
    }
    let mut local_networks = local_networks::find(node, &found, to, &others).unwrap_or_else(|failure| {
        notes.push(format!("it is not known from which containers the move would part it: {failure}"));
        Vec::new()
    });
    for path in &found.offer.paths {
        match local_networks.iter_mut().find(|network| network.name == path.network) {
            Some(network) => network.kept = true,
            None => {
                notes.push(format!("network {}: those that stay are reached by a VXLAN, not encrypted", path.network));
            }
        }
    }
    let translated_connections = local_networks::translated(&found).unwrap_or_else(|error| {
        notes.push(format!("it is not known which of its connections this node translates: {error}"));
        0
    });
    let findings = &found.findings;
    let huge_bytes = found.offer.huge_pages.iter().map(|(size, pages)| size * pages).sum::<u64>();
    let memory_bytes = findings.memory_bytes + huge_bytes;
    let plan = Plan {
        container: name.to_owned(),
        from: node.config.node.clone(),
        to: to.clone(),
        mode: options.mode,
        memory_bytes,
        tasks: findings.threads as u64,
        tmpfs_bytes: findings.tmpfs_bytes,
        trees: found.offer.trees.clone(),
        log_bytes: found.offer.log.as_ref().map_or(0, |log| log.bytes),
        image,
        estimated_blackout_ms: None,
        estimated_total_ms: None,
        prediction: None,
        blockers,
        allowed,
        local_networks,
        translated_connections,
        notes,
    };
    Ok((plan, found))
}

fn measure(node: &Arc<Node>, request: &PlanRequest, found: &Inspection, time: Duration) -> Result<Observed, Failure> {
    let pids = || found.container.processes().map_err(|e| Sampling(e.to_string()));
    let sample = sample(node.tracking, time, pids, |wait| node.pause(wait)).map_err(|e| Failure::new(e.0))?;
    let link = probes::measure(node, &request.to, found.offer.streams)?;
    let findings = &found.findings;
    let mut costs = costs(&departures(node), &request.container, tasks(findings));
    // The last look is in the freeze.
    costs.blackout = costs.blackout.max(sample.looking);
    Ok(Observed {
        // Shared memory and the content of tmpfs mounts travel ahead too, though writes to them are not watched.
        memory: sample.memory.max(findings.memory_bytes) + findings.tmpfs_bytes,
        frozen_content: 0,
        looks: sample.looks,
        looking: sample.looking,
        sampled: sample.sampled,
        link_rate: link.rate,
        round_trip: link.round_trip,
        costs,
    })
}

fn tasks(findings: &Findings) -> Tasks {
    let processes = findings.tasks.saturating_sub(findings.zombies);
    let threads = findings.threads.saturating_sub(findings.zombies);
    Tasks { processes, threads, zombies: findings.zombies, depth: findings.depth }
}

/// Why a container's writes cannot be watched.
struct Sampling(String);

impl From<TrackError> for Sampling {
    fn from(error: TrackError) -> Self {
        Self(error.to_string())
    }
}

/// Reports of the moves of which this node was the source: those of arrivals tell nothing of what they cost.
fn departures(node: &Node) -> Vec<Report> {
    let mut reports = node.registry.reports();
    reports.retain(|r| r.source == node.config.node);
    reports
}

/// What earlier moves have cost: of this container, or, if there were none, of any, and what so many tasks cost.
fn costs(reports: &[Report], container: &str, tasks: Tasks) -> Costs {
    let moved = |r: &&Report| r.outcome == Outcome::Moved;
    let mut earlier: Vec<&Report> =
        reports.iter().filter(moved).filter(|r| r.container == container).take(EARLIER).collect();
    let is_known = !earlier.is_empty();
    if !is_known {
        earlier = reports.iter().filter(moved).take(EARLIER).collect();
    }
    let mut costs = Costs::default();
    if let Some(ms) = median(earlier.iter().filter_map(|r| blackout_without_memory(r))) {
        costs.blackout = Duration::from_secs_f64(ms / 1e3);
    }
    if !is_known {
        costs.blackout = costs.blackout.max(tasks.blackout());
    }
    let factor = |r: &&Report| {
        let rounds: f64 = r.rounds.iter().map(|round| round.ms).sum();
        let around = r.total_ms? - r.blackout_ms? - rounds;
        Some(
            around
                / 1e3
                / costs.around(r.rounds.first().map_or(r.progress.memory_bytes, |first| first.bytes)).as_secs_f64(),
        )
    };
    // What follows the resume belongs to no such factor.
    let early = |r: &&&Report| !r.mode_taken.unwrap_or(r.mode).may_commit_early();
    if let Some(factor) = median(earlier.iter().filter(early).filter_map(factor)).filter(|f| *f > 0.0) {
        costs.around = costs.around.mul_f64(factor);
        costs.around_per_byte = costs.around_per_byte.mul_f64(factor);
    }
    costs
}

/// The blackout of a move less what memory had to do with it, in ms, where that can be told.
fn blackout_without_memory(report: &Report) -> Option<f64> {
    let blackout = report.blackout_ms?;
    let sent = report.parts.iter().find(|p| p.side == Side::Source && p.name == "memory: sent");
    // After rounds, what was left is known and so is the link; without, the part says how long it took.
    let memory = match report.rounds.iter().max_by_key(|round| round.bytes) {
        Some(largest) => {
            let before: u64 = report.rounds.iter().map(|round| round.bytes).sum();
            let left = report.progress.moved_bytes.saturating_sub(before);
            left as f64 * largest.ms / largest.bytes.max(1) as f64
        }
        None => sent.map_or(0.0, |part| part.ms),
    };
    (memory < blackout / 2.0).then_some(blackout - predict::IN_EACH_OTHERS_WAY * memory)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|v| v.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::{Mode, Part};

    fn moved(container: &str, blackout_ms: f64, memory_ms: f64, total_ms: f64) -> Report {
        let (a, b) = ("a".parse().unwrap(), "b".parse().unwrap());
        let mut report = Report::new("m-1".parse().unwrap(), container.into(), a, b, Mode::Cold, 0);
        report.outcome = Outcome::Moved;
        report.blackout_ms = Some(blackout_ms);
        report.total_ms = Some(total_ms);
        let part = Part { name: "memory: sent".into(), side: Side::Source, start_ms: 1.0, ms: memory_ms };
        report.parts = vec![part];
        report
    }

    #[test]
    fn earlier_moves_of_the_container_tell_what_a_move_costs() {
        let reports =
            [moved("redis", 60.0, 0.0, 200.0), moved("web", 500.0, 0.0, 9000.0), moved("redis", 62.0, 10.0, 204.0)];
        let seen = costs(&reports, "redis", Tasks::default());
        assert_eq!(seen.blackout, Duration::from_millis(60));
        let around = seen.around(0).as_secs_f64();
        assert!((0.139..0.143).contains(&around), "{around}");
        // One that nobody has moved yet is taken for one like the others.
        assert_eq!(costs(&reports, "new", Tasks::default()).blackout, Duration::from_millis(60));
    }

    #[test]
    fn many_tasks_are_foretold_for_a_container_that_has_not_been_moved() {
        let tasks = Tasks { processes: 64, threads: 512, zombies: 0, depth: 2 };
        let of = |name: &str| costs(&[moved("redis", 60.0, 0.0, 200.0)], name, tasks).blackout.as_secs_f64();
        assert!((0.5..0.6).contains(&of("tree")), "{}", of("tree"));
        assert_eq!(of("redis"), 0.06);
    }

    #[test]
    fn a_move_whose_blackout_was_memory_tells_nothing_about_the_rest() {
        assert_eq!(
            costs(&[moved("redis", 1000.0, 950.0, 1500.0)], "redis", Tasks::default()).blackout,
            Costs::default().blackout
        );
        assert_eq!(costs(&[], "redis", Tasks::default()), Costs::default());
        // After rounds it is known how little was left, whatever else went on while that was sent.
        let mut after_rounds = moved("redis", 70.0, 65.0, 500.0);
        after_rounds.rounds = vec![tranship_types::RoundReport { bytes: 1 << 30, ms: 1000.0, dirty_rate: 0.0 }];
        after_rounds.progress.moved_bytes = 1 << 30;
        assert_eq!(costs(&[after_rounds], "redis", Tasks::default()).blackout, Duration::from_millis(70));
    }
}
