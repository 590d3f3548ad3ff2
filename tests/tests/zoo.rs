//! One of everything that a process can own moves again and again, and nothing in it notices.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{
    Guest, Moving, Stage, copies, exactly_one_runs, move_container, nothing_left, remove, scenarios, wait_until,
};
use tranship_lab::{Lab, Redis, RunOptions, find_program, redis_command};
use tranship_types::{Mode, Phase, Report};

const NAME: &str = "zoo";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 20);
const PORT: u16 = 7000;
const MOVES: usize = 10;
/// Checks of every animal between two moves: two seconds' worth, after which what has stopped is noticed.
const CHECKS: u64 = 110;
const PATIENCE: Duration = Duration::from_secs(60);

fn the_zoo_has_no_complaints_over_ten_moves(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let program = find_program("zoo")?;
    let mut options = RunOptions::new(IP, ["/opt/zoo"]);
    options.binds.push((program, "/opt/zoo".into()));
    lab.run("a", NAME, &options)?;
    let mut guest = Guest::connect(lab, IP, PORT)?;
    let first = guest.zoo_goes_on(CHECKS, PATIENCE).context("before the first move")?;
    ensure!(first.checks.len() > 50, "only {} animals are there", first.checks.len());

    let (mut from, mut to) = ("a", "b");
    for n in 1..=MOVES {
        let report = move_container(lab, from, NAME, to).with_context(|| format!("move {n}"))?;
        guest.zoo_goes_on(CHECKS, PATIENCE).with_context(|| format!("after move {n} to {to}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "move {n} left the container where it was");
        nothing_left(lab, from, NAME).with_context(|| format!("after move {n}"))?;
        eprintln!("move {n} {from} → {to}: blackout {:.0} ms, no complaints", report.blackout_ms.unwrap_or_default());
        (from, to) = (to, from);
    }
    let last = guest.zoo(PATIENCE)?;
    ensure!(
        last.checks.len() == first.checks.len(),
        "{} of {} animals are left",
        last.checks.len(),
        first.checks.len()
    );
    remove(lab, NAME)
}

/// What `ps` and the like read of a process, its arguments and its environment, is cut short by the kernel where a page is missing, and
/// not waited for. Everything else is missing here: the link is slow, and the pages follow the resume.
fn arguments_and_environment_are_there_when_it_runs(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let environment = (0..16).map(|n| format!("VARIABLE_{n}={}", "x".repeat(5000))).collect();
    lab.run("a", NAME, &RunOptions { environment, ..RunOptions::new(IP, redis_command()) })?;
    let mut redis = Redis::connect(lab, IP, PATIENCE)?;
    redis.populate(20_000, "key", 100)?;
    let seen = || -> Result<(String, [Vec<u8>; 2])> {
        let running: Vec<_> = copies(lab, NAME)?.into_iter().filter(|copy| copy.runs).collect();
        let [copy] = running.as_slice() else { bail!("not exactly one copy runs: {running:?}") };
        let pid = copy.pids.first().context("it has no process")?;
        let read = |file| std::fs::read(format!("/proc/{pid}/{file}"));
        Ok((copy.node.clone(), [read("cmdline")?, read("environ")?]))
    };
    let (_, before) = seen()?;
    ensure!(before.iter().all(|text| !text.is_empty()) && before[1].len() > 80_000, "{before:?}");

    let mut moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Postcopy, &["--bandwidth", "4mbit"])?;
    let drains = |report: &Report| report.phase == Phase::Drain;
    wait_until("it to run on node b", PATIENCE, || Ok(status(lab)?.iter().any(drains).then_some(())))?;
    let (node, there) = seen()?;
    ensure!(moving.goes_on()?, "every page was there before it was looked at");
    ensure!(node == "b" && there == before, "on {node} it has {} and {} bytes", there[0].len(), there[1].len());
    moving.end()?.fits("a", "b", "b")?;
    ensure!(seen()? == ("b".to_owned(), before), "they have changed");
    remove(lab, NAME)
}

/// The moves that are under way on node a.
fn status(lab: &Lab) -> Result<Vec<Report>> {
    let text = lab.check("a", &["tranship", "status", "--json"])?;
    serde_json::from_str(text.trim()).with_context(|| text.clone())
}

fn main() -> ExitCode {
    scenarios(&[
        ("the_zoo_has_no_complaints_over_ten_moves", the_zoo_has_no_complaints_over_ten_moves),
        ("arguments_and_environment_are_there_when_it_runs", arguments_and_environment_are_there_when_it_runs),
    ])
}
