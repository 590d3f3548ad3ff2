//! Agents that die and links that break while a group moves: each container ends on one node, and the report says on which.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Stage, exactly_one_runs, flip_record, is_gone, newest_group_report, nothing_left, restart_agent, wait_until,
    whole_matrices,
};
use tranship_lab::Lab;
use tranship_types::{GroupId, GroupReport, MemberOutcome, Outcome};

use crate::chain::{CHAIN_FILE, PATIENCE, all_moved, move_group, names, started, tidy, write};

/// How long it may take until all is undone or finished.
const SETTLED: Duration = Duration::from_secs(60);

/// Moves the chain from one node to the other while something goes wrong, of which an agent may die: a new one is then
/// started. Returns what the source's report says once all has ended.
fn disturbed(lab: &Lab, way: (&str, &str), fault: &str, options: &[&str]) -> Result<GroupReport> {
    disturbed_and(lab, way, fault, options, || Ok(()))
}

/// The same, and something more before the new agent is started.
fn disturbed_and(
    lab: &Lab,
    (from, to): (&str, &str),
    fault: &str,
    options: &[&str],
    meddle: impl FnOnce() -> Result<()>,
) -> Result<GroupReport> {
    let at = if fault.starts_with("source") { from } else { to };
    restart_agent(lab, at, fault)?;
    let agent = lab.agent_pid(at)?.context("the agent has just been started")?;
    let file = write(lab, from, CHAIN_FILE)?;
    let command = [&["tranship", "move-group", &file, "--to", to], options].concat();
    let mut client = lab.spawn(from, &command)?;
    if fault.ends_with("die") {
        wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
        meddle()?;
        lab.start_agent(at, &[])?;
    }
    // Whoever follows the group sees its end, too.
    wait_until("the end of the group", SETTLED, || Ok(client.try_wait()?))?;
    let report = newest_group_report(lab, from)?;
    ensure!(report.outcome != Outcome::Running, "{fault}: {report:?}");
    Ok(report)
}

/// Each container is where the report says, once and whole, and nothing of it is left on the other node.
fn as_reported(lab: &Lab, (from, to): (&str, &str), report: &GroupReport) -> Result<()> {
    for own in &report.members {
        let (here, there) = if own.outcome == MemberOutcome::Moved { (to, from) } else { (from, to) };
        let name = own.container.as_str();
        let settled = wait_until("one to run", SETTLED, || {
            let whole = exactly_one_runs(lab, name).is_ok_and(|node| node == here);
            Ok((whole && nothing_left(lab, there, name).is_ok()).then_some(()))
        });
        settled.with_context(|| {
            let (now, left) = (exactly_one_runs(lab, name), nothing_left(lab, there, name));
            format!("{name} is {} by the report, and it is {now:?} and {left:?}: {report:?}", own.outcome)
        })?;
    }
    for node in [from, to] {
        let journals = lab.path(node, "/var/lib/tranship/journal")?;
        wait_until("no journal to be left", SETTLED, || Ok((fs::read_dir(&journals)?.count() == 0).then_some(())))?;
    }
    Ok(())
}

/// The report is right whatever happens, and what is left can be moved afterwards.
pub fn whatever_happens_to_a_pipeline_each_container_is_where_the_report_says(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let way = ("a", "b");
    let faults = [
        "source.transfer.before.die",
        "source.deliver.after.die",
        "destination.restore.before.die",
        "destination.resume.after.die",
        "source.transfer.before.cut",
    ];
    let played = if whole_matrices() { faults.len() } else { 3 };
    for fault in faults.into_iter().take(played) {
        let mut redis = started(lab)?;
        let digest = redis[0].digest()?;
        let report = disturbed(lab, way, fault, &[])?;
        as_reported(lab, way, &report).context(fault)?;
        let outcomes: Vec<_> = report.members.iter().map(|m| m.outcome).collect();
        eprintln!("{fault}: {outcomes:?}, interrupted: {}", report.interrupted);
        ensure!(report.interrupted == (fault.starts_with("source") && fault.ends_with("die")), "{fault}: {report:?}");
        let left: Vec<_> = report.members.iter().filter(|m| m.outcome != MemberOutcome::Moved).collect();
        ensure!(!left.is_empty() || !fault.contains("before"), "{fault}: it has not happened: {report:?}");
        if !left.is_empty() {
            let text = left.iter().map(|m| format!("  {}:\n", m.container)).collect::<String>();
            let file = write(lab, way.0, &format!("to: {}\ncontainers:\n{text}", way.1))?;
            let (status, report, said) = move_group(lab, way.0, &[&file])?;
            all_moved(report, status, &said, left.len()).context(fault)?;
        }
        ensure!(redis[0].digest()? == digest, "{fault}: the data has changed");
        tidy(lab)?;
    }
    Ok(())
}

/// Before the decision: none moves. After it: all do.
pub fn all_move_or_none_whoever_dies(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let digest = redis[0].digest()?;
    let (mut from, mut to) = ("a", "b");
    let faults = [
        ("source.freeze.after.die", false),
        ("source.commit.before.die", false),
        ("source.transfer.before.cut", false),
        ("destination.ready.after.die", false),
        ("source.agree.after.die", true),
        ("source.commit.after.die", true),
        ("destination.commit.before.die", true),
        ("destination.resume.after.die", true),
        ("source.agree.after.panic", true),
    ];
    let every = if whole_matrices() { 1 } else { 2 };
    for (fault, all) in faults.into_iter().step_by(every) {
        let report = disturbed(lab, (from, to), fault, &["--atomic"])?;
        as_reported(lab, (from, to), &report).context(fault)?;
        let outcomes: Vec<_> = report.members.iter().map(|m| m.outcome).collect();
        eprintln!("{fault}: {outcomes:?}");
        ensure!(outcomes.iter().all(|o| (*o == MemberOutcome::Moved) == all), "{fault}: {report:?}");
        ensure!(names().count() == outcomes.len(), "{fault}: {report:?}");
        if all {
            (from, to) = (to, from);
        }
    }
    ensure!(redis[0].digest()? == digest, "the data has changed");
    tidy(lab)
}

/// The group's journal is damaged: its migrations are decided by what their destinations know, all of them in the same way.
pub fn all_move_or_none_where_the_groups_journal_is_damaged(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let digest = redis[0].digest()?;
    for (fault, words, all) in
        [("source.commit.before.die", "\"group\"", false), ("source.agree.after.die", "\"commit\"", true)]
    {
        let journals = lab.path("a", "/var/lib/tranship/journal")?;
        let damage = || {
            let is_group = |path: &Path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                name.starts_with(GroupId::PREFIX) && name.ends_with(".jsonl")
            };
            let mut found = fs::read_dir(&journals)?.flatten().map(|entry| entry.path());
            flip_record(&found.find(|path| is_group(path)).context("the group has no journal")?, words)
        };
        let report = disturbed_and(lab, ("a", "b"), fault, &["--atomic"], damage).context(fault)?;
        as_reported(lab, ("a", "b"), &report).context(fault)?;
        let outcomes: Vec<_> = report.members.iter().map(|m| m.outcome).collect();
        eprintln!("{fault}: {outcomes:?}");
        ensure!(outcomes.iter().all(|o| (*o == MemberOutcome::Moved) == all), "{fault}: {report:?}");
    }
    ensure!(redis[0].digest()? == digest, "the data has changed");
    tidy(lab)
}
