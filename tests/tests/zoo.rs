//! One of everything that a process can own moves again and again, and nothing in it notices.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Guest, Stage, exactly_one_runs, move_container, nothing_left, remove, scenarios};
use tranship_lab::{RunOptions, find_program};

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

fn main() -> ExitCode {
    scenarios(&[("the_zoo_has_no_complaints_over_ten_moves", the_zoo_has_no_complaints_over_ten_moves)])
}
