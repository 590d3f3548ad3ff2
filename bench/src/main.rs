//! Benchmarks: Tranship and the plain runc + CRIU recipe, side by side in one run, in the lab.
//!
//! ```text
//! suite = cases, each with its systems                                            (suite.rs)
//!   the systems take turns: lab up → workload on a → some runs → lab down         (turns.rs)
//!   each run: watch → move to the other node → check                              (run.rs, workload/)
//!   all runs of a case → one row for each system                                  (row.rs)
//! suite workflow = a group of containers, moved in each order                   (workflow.rs, gantt.rs)
//! rows → results.json, a table, goals, charts      (table.rs, goal.rs, chart.rs, curve.rs, histogram.rs, course.rs)
//! ```

mod chart;
mod course;
mod crowd;
mod curve;
mod gantt;
mod goal;
mod histogram;
mod hogs;
mod machine;
mod own;
mod peer;
mod program;
mod row;
mod run;
mod suite;
mod table;
mod throughput;
mod timeline;
mod tracking;
mod turns;
mod watch;
mod workflow;
mod workload;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tranship_lab::take_down_own;
use tranship_types::Mode;

use crate::goal::Goal;
use crate::row::{Failure, Row};
use crate::suite::{Case, Suite, System};

/// Measures Tranship and the plain runc + CRIU recipe side by side, in one run, on nodes made of namespaces.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    /// What to measure
    #[arg(long, default_value = "cold")]
    suite: String,
    /// Directory for results.json and the charts; made if it is not there
    #[arg(long, value_name = "DIR", default_value = "bench/out")]
    out: PathBuf,
    /// Only workloads whose name, with the link behind it where that is shaped, begins so
    #[arg(long, value_name = "WORKLOAD-PREFIX", default_value = "")]
    only: String,
    /// Runs of each workload and system; default: the suite's own number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Runs of what Tranship is compared with; default: as many as of Tranship, but at most the suite's own number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    peer_runs: Option<u32>,
    /// Only systems whose name begins so: tranship, runc+criu, docker's own, podman's own, containerd's own, at once, one by one, unmoved, tracked (then there may be nothing to compare with)
    #[arg(long, value_name = "SYSTEM-PREFIX", default_value = "")]
    system: String,
    /// Only links of this rate, as the results have it: 1gbit, or unshaped
    #[arg(long, value_name = "LINK")]
    link: Option<String>,
    /// How Tranship moves memory, where the suite would have it otherwise
    #[arg(long, value_name = "MODE", value_parser = mode)]
    mode: Option<Mode>,
    /// A move that takes longer than this has failed, in s
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    move_limit: u64,
}

/// A mode by its name.
fn mode(name: &str) -> Result<Mode, String> {
    let found = Mode::ALL.into_iter().find(|mode| mode.to_string() == name);
    found.ok_or_else(|| format!("there are {}", Mode::ALL.map(|mode| mode.to_string()).join(", ")))
}

fn main() -> ExitCode {
    match perform(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "tranship-bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a suite; `false` if a run failed, which the output says.
fn perform(arguments: &Arguments) -> Result<bool> {
    if arguments.suite == workflow::NAME {
        return workflow::perform(arguments);
    }
    let suite = suite::find(&arguments.suite)?;
    let cases = chosen(suite, arguments)?;
    fs::create_dir_all(&arguments.out).with_context(|| format!("cannot make {}", arguments.out.display()))?;
    let interrupted = clean_up_on_signals()?;
    let runs = arguments.runs.unwrap_or(suite.runs);
    let rival_runs = arguments.peer_runs.unwrap_or(runs.min(suite.rival_runs));
    let of_rivals =
        if rival_runs == runs { String::new() } else { format!(", {rival_runs} of what it is compared with") };
    say(&format!("suite {}: {}; {runs} runs each{of_rivals}", suite.name, suite.about));

    let limit = Duration::from_secs(arguments.move_limit);
    let (mut rows, mut failures, mut charts) = (Vec::new(), Vec::new(), Vec::new());
    for (case, systems) in &cases {
        let runs = |system: &System| (*system, if system.is_rival() { rival_runs } else { runs });
        let runs: Vec<_> = systems.iter().map(runs).collect();
        let (samples, failed) = turns::measure(case, &runs, limit, &interrupted);
        failures.extend(failed);
        let of_case: Vec<_> = systems.iter().zip(&samples).map(|(s, all)| Row::new(suite, case, *s, all)).collect();
        let of_case = row::with_ratios(of_case);
        charts.extend(chart::draw(&arguments.out, suite, case, &of_case)?);
        charts.extend(throughput::draw(&arguments.out, suite, case, &of_case)?);
        rows.extend(of_case);
        // Written after each case, so that hours of measuring do not hang on the last one.
        write_results(&arguments.out, suite, &rows, &failures)?;
    }
    charts.extend(curve::draw(&arguments.out, suite, &rows)?);
    charts.extend(histogram::draw(&arguments.out, suite, &rows)?);
    charts.extend(course::draw(&arguments.out, suite, &rows)?);
    say(&table::of_rows(&rows));
    for goal in (suite.goals)(&rows) {
        say(&format!("  {goal}"));
    }
    for failure in &failures {
        say(&format!("  failed: {failure}"));
    }
    say(&format!("results: {}", arguments.out.join("results.json").display()));
    charts.iter().for_each(|chart| say(&format!("chart:   {}", chart.display())));
    Ok(failures.is_empty())
}

/// The cases that were asked for, each with the systems that were.
fn chosen(suite: &'static Suite, arguments: &Arguments) -> Result<Vec<(&'static Case, Vec<System>)>> {
    let wanted = |case: &Case| {
        case.name().starts_with(&arguments.only)
            && arguments.link.as_deref().is_none_or(|link| link == case.link_name())
    };
    let cases: Vec<_> = suite.cases.iter().filter(|c| wanted(c)).collect();
    if cases.is_empty() {
        let names: Vec<_> = suite.cases.iter().map(Case::name).collect();
        bail!("suite {} has no workload {:?}… on such a link; it has {}", suite.name, arguments.only, names.join(", "));
    }
    let of_case = |case: &'static Case| {
        let systems = case.systems.iter().filter(|s| s.name().starts_with(&arguments.system));
        (case, systems.map(|s| s.in_mode(arguments.mode)).collect::<Vec<_>>())
    };
    let chosen: Vec<_> = cases.into_iter().map(of_case).filter(|(_, systems)| !systems.is_empty()).collect();
    if chosen.is_empty() {
        bail!(
            "no system {:?}… takes part there; there are tranship, runc+criu, docker's own, podman's own, containerd's own, at once, one by one, unmoved and tracked",
            arguments.system
        );
    }
    Ok(chosen)
}

fn write_results(directory: &Path, suite: &Suite, rows: &[Row], failures: &[Failure]) -> Result<()> {
    let file = directory.join("results.json");
    let results = json!({
        "suite": suite.name,
        "date": jiff::Timestamp::now().to_string(),
        "machine": machine::describe(),
        "goals": (suite.goals)(rows).iter().map(Goal::to_json).collect::<Vec<Value>>(),
        "rows": rows.iter().map(Row::to_json).collect::<Vec<Value>>(),
        "failures": failures,
    });
    fs::write(&file, format!("{results:#}\n")).with_context(|| format!("cannot write {}", file.display()))
}

/// On Ctrl-C and its like: takes the lab down and exits with 128 + the signal's number.
fn clean_up_on_signals() -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot watch for signals")?;
    let flag = Arc::clone(&interrupted);
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        flag.store(true, Ordering::SeqCst);
        say("interrupted; taking the lab down …");
        if let Err(e) = take_down_own() {
            say(&format!("{e:#}"));
        }
        std::process::exit(128 + signal);
    });
    Ok(interrupted)
}

/// Prints a line. Not println: what was begun is finished and tidied up even if nobody reads any more.
fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}
