use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tranship_api::ApiError;
use tranship_lab::{CounterClient, CounterReport, Lab, report_of, slowness};
use tranship_types::{Blocker, GroupReport, Outcome, Phase, Report};

use crate::containers::exactly_one_runs;

/// Moves a container, and returns the report.
///
/// # Errors
/// If the move fails, says that something was left over, or has a report that cannot be right.
pub fn move_container(lab: &Lab, from: &str, name: &str, to: &str) -> Result<Report> {
    move_with(lab, from, name, to, &[])
}

/// The same with options for `tranship move`.
///
/// # Errors
/// As [`move_container`].
pub fn move_with(lab: &Lab, from: &str, name: &str, to: &str, options: &[&str]) -> Result<Report> {
    let mut command = lab.move_command(from, name, to)?;
    command.args(options);
    // Where the processor is emulated a freeze may take longer than the usual limit of 10 s.
    if slowness() > 2.0 && !options.contains(&"--freeze-timeout") {
        command.arg("--freeze-timeout").arg(format!("{:.0}s", 10.0 * slowness()));
    }
    let output = command.stderr(Stdio::piped()).output()?;
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Report = serde_json::from_value(report_of(&output.stdout).with_context(said)?).with_context(said)?;
    ensure!(report.outcome == Outcome::Moved, "the move ended as {:?}: {:?}", report.outcome, report.error);
    ensure!(report.leftovers.is_empty(), "the move left something over: {}", report.leftovers.join("; "));
    let (blackout, total) = (report.blackout_ms, report.total_ms);
    ensure!(
        matches!((blackout, total), (Some(b), Some(t)) if b > 0.0 && b <= t),
        "a blackout of {blackout:?} ms in a total of {total:?} ms cannot be"
    );
    Ok(report)
}

/// What `tranship move` said when it refused.
#[derive(Debug)]
pub struct Refusal {
    /// Its exit status: 3 for a blocked move, 4 if the agent cannot be reached, 2 if the command makes no sense.
    pub status: i32,
    /// What people saw, on stderr.
    pub text: String,
    /// The one sentence, for programs.
    pub sentence: String,
    /// What stands in the way.
    pub blockers: Vec<Blocker>,
}

/// Asks for a move that must be refused before anything is frozen.
///
/// # Errors
/// If it was not refused, or only after the freeze, or the refusal is not said as it should be.
pub fn refused_move(lab: &Lab, from: &str, name: &str, to: &str) -> Result<Refusal> {
    refused_move_with(lab, from, name, to, &[])
}

/// The same with options for `tranship move`.
///
/// # Errors
/// As [`refused_move`].
pub fn refused_move_with(lab: &Lab, from: &str, name: &str, to: &str, options: &[&str]) -> Result<Refusal> {
    let output = lab.exec(from, &[&["tranship", "move", name, "--to", to, "--json"], options].concat())?;
    let (stdout, text) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr).into_owned());
    let status = output.status.code().with_context(|| format!("tranship ended with {}", output.status))?;
    let lines: Vec<_> = stdout.lines().filter(|line| !line.trim().is_empty()).collect();
    let [line] = lines.as_slice() else { bail!("not one line of JSON but {stdout:?}; status {status}, {text:?}") };
    let value: Value = serde_json::from_str(line).with_context(|| format!("{line:?}; status {status}, {text:?}"))?;
    // An agent refuses what it sees by itself at once; what takes a look at the other node is a move that was undone
    // before it touched anything.
    if value.get("error").is_some_and(Value::is_object) {
        let ApiError { error } = serde_json::from_value(value).with_context(|| format!("the error {line}"))?;
        return Ok(Refusal { status, text, sentence: error.to_string(), blockers: error.blockers });
    }
    let report: Report = serde_json::from_value(value).with_context(|| format!("the report {line}"))?;
    ensure!(
        report.outcome == Outcome::Failed && report.phase == Phase::Undone && report.leftovers.is_empty(),
        "the move of {name} was not refused: status {status}, {line}"
    );
    let touched = report.blackout_ms.is_some() || report.progress.moved_bytes > 0 || report.skeleton_bytes > 0;
    ensure!(!touched, "the move of {name} was refused after the freeze: {line}");
    let sentence = report.error.with_context(|| format!("a failed move without an error: {line}"))?;
    Ok(Refusal { status, text, sentence, blockers: report.blockers })
}

/// Checks that the counter goes on on its one connection: 100 further right replies within 5 s.
///
/// # Errors
/// If not.
pub fn connection_alive(counter: &mut CounterClient) -> Result<CounterReport> {
    let report = counter.wait_replies(100, Duration::from_secs(5))?;
    ensure!(report.same_connection && report.error.is_none(), "it is not the same connection any more: {report:?}");
    Ok(report)
}

/// Moves the container from where it runs to the other of two nodes and checks that it runs there and nowhere else; says
/// where it is now.
///
/// # Errors
/// If not.
pub fn second_move_succeeds(lab: &Lab, name: &str) -> Result<String> {
    let from = exactly_one_runs(lab, name).context("before the second move")?;
    let to = lab.nodes().into_iter().find(|node| *node != from).context("there is no other node")?;
    move_container(lab, &from, name, &to).context("the second move")?;
    let now = exactly_one_runs(lab, name).context("after the second move")?;
    ensure!(now == to, "after the second move {name} runs on {now}, not on {to}");
    Ok(now)
}

/// The newest of the groups' reports that a node has kept.
///
/// # Errors
/// If there is none, or one cannot be read.
pub fn newest_group_report(lab: &Lab, node: &str) -> Result<GroupReport> {
    let kept = fs::read_dir(lab.path(node, "/var/lib/tranship/groups")?).context("the groups' reports")?;
    let read = |entry: std::io::Result<fs::DirEntry>| -> Result<GroupReport> {
        Ok(serde_json::from_slice(&fs::read(entry?.path())?)?)
    };
    let reports: Vec<GroupReport> = kept.map(read).collect::<Result<_>>()?;
    reports.into_iter().max_by_key(|report| report.started_unix_ms).context("no group was moved")
}
