//! Memory that is no process's own (tmpfs, shared memory) is charged to the container's memory cgroup, as before the
//! move.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Guest, Stage, exactly_one_runs, move_with, nothing_left, remove, scenarios};
use tranship_lab::{Lab, RunOptions, find_program, report_of};
use tranship_types::{Outcome, Report};

const NAME: &str = "charged";
const PORT: u16 = 7003;
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that `memory-kinds` has of each kind.
const SOME: u64 = 24 << 20;
const KINDS: [&str; 4] = ["tmpfs", "anonymous", "memfd", "segment"];

fn run(lab: &Lab, host: u8) -> Result<Guest> {
    let ip = Ipv4Addr::new(10, 77, 0, host);
    let mut options = RunOptions::new(ip, [&["/opt/memory-kinds"], KINDS.as_slice()].concat());
    options.binds.push((find_program("memory-kinds")?, "/opt/memory-kinds".into()));
    options.memory = Some(512 << 20);
    lab.run("a", NAME, &options)?;
    let mut guest = Guest::connect(lab, ip, PORT)?;
    goes_on(&mut guest)?;
    Ok(guest)
}

fn goes_on(guest: &mut Guest) -> Result<()> {
    guest.lines(PATIENCE)?;
    for _ in 0..5 {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
    }
    Ok(())
}

/// The memory cgroup below which a node's containers are, in version 1 or 2 of cgroups.
fn parent(node: &str) -> PathBuf {
    let below = format!("tranship-lab/{node}");
    let first = Path::new("/sys/fs/cgroup/memory").join(&below);
    if first.exists() { first } else { Path::new("/sys/fs/cgroup").join(below) }
}

/// Bytes of files in memory and of shared memory that are charged to the container on a node.
fn charged(node: &str) -> Result<u64> {
    let path = parent(node).join(NAME).join("memory.stat");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let value = text.lines().find_map(|line| line.strip_prefix("shmem ")).context("no shmem in memory.stat")?;
    Ok(value.parse()?)
}

fn all_of_it_is_charged_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, 71)?;
    let before = charged("a")?;
    ensure!(before >= KINDS.len() as u64 * SOME, "{before} bytes are charged before the first move");
    for mode in ["auto", "cold", "precopy", "postcopy", "hybrid"] {
        let from = exactly_one_runs(lab, NAME)?;
        let to = if from == "a" { "b" } else { "a" };
        let report = move_with(lab, &from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        goes_on(&mut guest).with_context(|| format!("after a move in mode {mode}"))?;
        nothing_left(lab, &from, NAME)?;
        let after = charged(to)?;
        eprintln!("mode {mode}: {after} of {before} bytes, blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        ensure!(after.abs_diff(before) < before / 50, "mode {mode}: {after} bytes are charged, {before} before");
    }
    remove(lab, NAME)
}

fn a_limit_that_is_reached_on_the_destination_fails_the_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, 72)?;
    let limit = ["memory.limit_in_bytes", "memory.max"].map(|name| parent("b").join(name));
    let limit = limit.iter().find(|path| path.exists()).context("the node's cgroup has no limit")?;
    let unlimited = std::fs::read_to_string(limit)?;
    std::fs::write(limit, (2 * SOME).to_string())?;
    let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--mode", "precopy", "--json"]);
    let raised = if unlimited.trim() == "max" { "max" } else { "-1" };
    std::fs::write(limit, raised)?;
    let report: Report = serde_json::from_value(report_of(&output?.stdout)?)?;
    let error = report.error.unwrap_or_default();
    ensure!(report.outcome == Outcome::Failed && error.contains("memory limit"), "{:?}: {error}", report.outcome);
    ensure!(exactly_one_runs(lab, NAME)? == "a", "the container is not where it was");
    goes_on(&mut guest)?;
    nothing_left(lab, "b", NAME)?;
    move_with(lab, "a", NAME, "b", &[]).context("with the limit raised")?;
    goes_on(&mut guest)?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("all_of_it_is_charged_in_every_mode", all_of_it_is_charged_in_every_mode),
        (
            "a_limit_that_is_reached_on_the_destination_fails_the_move",
            a_limit_that_is_reached_on_the_destination_fails_the_move,
        ),
    ])
}
