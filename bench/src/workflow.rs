//! The suite workflow: six containers on three levels move as one group, one after the other, all at once, and pipelined,
//! with and without pre-copy. That of one after the other is what each takes alone.

use std::fs;
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tranship_lab::{Lab, UpOptions};
use tranship_types::{GroupOrder, GroupReport, Mode, Outcome};

use crate::goal::{Goal, Unit};
use crate::run::NODES;
use crate::workload::service::Service;
use crate::{Arguments, clean_up_on_signals, gantt, machine, program, row::Spread, say};

/// As `--suite` has it.
pub const NAME: &str = "workflow";
/// The containers with their levels and memory in MB; after the published workflow.
const CONTAINERS: [(&str, usize, u64); 6] =
    [("db", 0, 1300), ("cache", 0, 400), ("app-1", 1, 800), ("app-2", 1, 600), ("web-1", 2, 200), ("web-2", 2, 300)];
const LINK: &str = "1gbit";
/// 10^6 bytes a second that each of them writes.
const RATE: u64 = 2;
const ORDERS: [GroupOrder; 3] = [GroupOrder::Sequential, GroupOrder::AllAtOnce, GroupOrder::Pipelined];
const MODES: [Mode; 2] = [Mode::Cold, Mode::Precopy];
const LAB_LIMIT: Duration = Duration::from_secs(600);

/// A mode and an order, with the reports of their runs.
struct Measured {
    mode: Mode,
    order: GroupOrder,
    reports: Vec<GroupReport>,
}

/// Runs the suite; `false` if a run failed, which the output says.
pub fn perform(arguments: &Arguments) -> Result<bool> {
    let out = &arguments.out;
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let interrupted = clean_up_on_signals()?;
    let runs = arguments.runs.unwrap_or(1);
    say(&format!("suite {NAME}: a group of six containers on three levels, link {LINK}; {runs} runs each"));
    let wanted = |mode: &Mode| arguments.mode.is_none_or(|only| only == *mode);
    let mut all: Vec<_> = MODES
        .into_iter()
        .filter(wanted)
        .flat_map(|mode| ORDERS.map(|order| Measured { mode, order, reports: Vec::new() }))
        .filter(|m| name(m.mode, m.order).starts_with(&arguments.only))
        .collect();
    ensure!(!all.is_empty(), "there is no such workload; there are cold-… and precopy-…, each with one of the orders");
    let (mut failures, limit) = (Vec::new(), Duration::from_secs(arguments.move_limit));
    for run in 1..=runs {
        for measured in &mut all {
            let what = format!("{:<20} run {run}/{runs}", name(measured.mode, measured.order));
            match moved(measured.mode, measured.order, limit, &interrupted) {
                Ok(report) => {
                    say(&format!("  {what}  {}", line(&report)));
                    measured.reports.push(report);
                }
                Err(e) => {
                    say(&format!("  {what}  FAILED: {e:#}"));
                    failures.push(
                        json!({"workload": name(measured.mode, measured.order), "run": run, "error": format!("{e:#}")}),
                    );
                }
            }
        }
    }
    let goals = goals(&all);
    goals.iter().for_each(|goal| say(&format!("  {goal}")));
    let results = json!({
        "suite": NAME,
        "date": jiff::Timestamp::now().to_string(),
        "machine": machine::describe(),
        "link": LINK,
        "goals": goals.iter().map(Goal::to_json).collect::<Vec<Value>>(),
        "rows": all.iter().filter_map(row).collect::<Vec<Value>>(),
        "failures": failures,
    });
    let file = out.join("results.json");
    fs::write(&file, format!("{results:#}\n")).with_context(|| format!("cannot write {}", file.display()))?;
    say(&format!("results: {}", file.display()));
    for mode in MODES {
        let of_mode: Vec<_> = all.iter().filter(|m| m.mode == mode).filter_map(|m| m.reports.last()).collect();
        if !of_mode.is_empty() {
            let chart = out.join(format!("{NAME}-{mode}.svg"));
            gantt::draw(&chart, &format!("six containers on three levels, mode {mode}, link {LINK}"), &of_mode)?;
            say(&format!("chart:   {}", chart.display()));
        }
    }
    Ok(failures.is_empty())
}

fn name(mode: Mode, order: GroupOrder) -> String {
    format!("{mode}-{order}")
}

/// One run: a lab of its own, the containers on node a, the move, and a look at every page afterwards.
fn moved(mode: Mode, order: GroupOrder, limit: Duration, interrupted: &AtomicBool) -> Result<GroupReport> {
    let lab = Lab::up(&UpOptions { nodes: 2, link: Some(LINK.parse()?), agents: true, wait: LAB_LIMIT })?;
    let report = in_lab(&lab, mode, order, limit);
    // Once a signal has come, the thread that took it takes the lab down and ends the process.
    while interrupted.load(Ordering::SeqCst) {
        std::thread::park();
    }
    let report = report?;
    lab.down().context("the run was measured, but taking the lab down failed")?;
    Ok(report)
}

fn in_lab(lab: &Lab, mode: Mode, order: GroupOrder, limit: Duration) -> Result<GroupReport> {
    let mut services = Vec::new();
    for (number, (name, _, mb)) in (10..).zip(CONTAINERS) {
        let arguments = [format!("--size={}", mb * 1_000_000), format!("--rate={RATE}")];
        let address = Ipv4Addr::new(10, 77, 0, number);
        services.push(Service::run_at(address, lab, NODES[0], name, "bench-writer", &arguments)?);
    }
    let file = "/tmp/workflow.yaml";
    fs::write(lab.path(NODES[0], file)?, group_file()).context("the group file")?;
    let mut command =
        lab.command(NODES[0], &["tranship", "move-group", file, "--json", "--mode", &mode.to_string()])?;
    match order {
        GroupOrder::Pipelined => {}
        other => drop(command.arg(format!("--{other}"))),
    }
    command.stderr(Stdio::piped());
    let output = program::run(command, limit)?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let report: GroupReport = serde_json::from_slice(&output.stdout).with_context(said)?;
    if report.outcome != Outcome::Moved {
        let why: Vec<_> = report.members.iter().filter_map(|m| m.error.as_ref()).collect();
        bail!("the group ended as {:?}: {why:?}", report.outcome);
    }
    for service in &mut services {
        // On the connection that it had before the move.
        service.text(&["VERIFY"]).context("after the move")?;
    }
    Ok(report)
}

fn group_file() -> String {
    let names = |level: usize| {
        let names: Vec<_> = CONTAINERS.iter().filter(|c| c.1 == level).map(|c| c.0).collect();
        names.join(", ")
    };
    let containers: String = CONTAINERS.iter().map(|c| format!("  {}:\n", c.0)).collect();
    format!("to: {}\ncontainers:\n{containers}levels: [[{}], [{}], [{}]]\n", NODES[1], names(0), names(1), names(2))
}

fn wire(report: &GroupReport) -> f64 {
    report.members.iter().map(|m| m.wire_bytes as f64).sum()
}

fn line(report: &GroupReport) -> String {
    let blackouts: Vec<_> =
        report.members.iter().map(|m| format!("{} {:.0}", m.container, m.blackout_ms.unwrap_or(f64::NAN))).collect();
    let total = report.total_ms.unwrap_or(f64::NAN);
    format!(
        "total {total:.0} ms  wire {}  blackouts in ms: {}",
        machine::megabytes(wire(report) as u64),
        blackouts.join(", ")
    )
}

/// Median of a figure of the runs.
fn median(measured: &Measured, figure: impl Fn(&GroupReport) -> Option<f64>) -> Option<f64> {
    Spread::of(measured.reports.iter().filter_map(figure)).map(|spread| spread.median)
}

fn blackout(report: &GroupReport, container: &str) -> Option<f64> {
    report.members.iter().find(|m| m.container == container)?.blackout_ms
}

/// The time that the link needs for what was sent, in ms.
fn link_ms(report: &GroupReport) -> f64 {
    wire(report) * 8.0 / 1e9 * 1e3
}

fn goals(all: &[Measured]) -> Vec<Goal> {
    let find = |mode, order| all.iter().find(|m| m.mode == mode && m.order == order && !m.reports.is_empty());
    let mut goals = Vec::new();
    for mode in MODES {
        let (Some(alone), Some(pipelined)) = (find(mode, GroupOrder::Sequential), find(mode, GroupOrder::Pipelined))
        else {
            continue;
        };
        let total = |m: &Measured| median(m, |r| r.total_ms).unwrap_or(f64::NAN);
        if mode == Mode::Cold {
            let ratio = total(pipelined) / total(alone);
            goals.push(Goal::at_most("cold: pipelined over one after the other", ratio, 0.5, Unit::Times));
        }
        let over_link = median(pipelined, |r| Some(r.total_ms? / link_ms(r))).unwrap_or(f64::NAN);
        let what = format!("{mode}: pipelined over what the link needs for its bytes");
        goals.push(Goal::at_most(&what, over_link, 1.1, Unit::Times));
        let longer =
            |name: &str| Some(median(pipelined, |r| blackout(r, name))? / median(alone, |r| blackout(r, name))?);
        let longest = CONTAINERS.iter().filter_map(|(name, ..)| longer(name)).fold(f64::NAN, f64::max);
        goals.push(Goal::at_most(&format!("{mode}: longest blackout over that alone"), longest, 1.2, Unit::Times));
    }
    goals
}

fn row(measured: &Measured) -> Option<Value> {
    let total = median(measured, |r| r.total_ms)?;
    let blackouts: serde_json::Map<String, Value> = CONTAINERS
        .iter()
        .map(|(name, ..)| ((*name).to_owned(), json!(median(measured, |r| blackout(r, name)))))
        .collect();
    Some(json!({
        "mode": measured.mode,
        "order": measured.order,
        "runs": measured.reports.len(),
        "total_ms": total,
        "link_ms": median(measured, |r| Some(link_ms(r))),
        "blackouts_ms": blackouts,
        "reports": measured.reports,
    }))
}
