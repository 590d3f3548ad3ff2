//! Memory of kinds that few programs have is as it was after a move in any mode, or the move is refused by name before the freeze.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Guest, Stage, exactly_one_runs, move_with, nothing_left, refused_move, remove, scenarios};
use tranship_lab::{Lab, RunOptions, find_program};

const NAME: &str = "kinds";
const PORT: u16 = 7003;
const PATIENCE: Duration = Duration::from_secs(60);

fn run(lab: &Lab, kinds: &[&str], host: u8) -> Result<Guest> {
    let ip = Ipv4Addr::new(10, 77, 0, host);
    let mut options = RunOptions::new(ip, [&["/opt/memory-kinds"], kinds].concat());
    options.binds.push((find_program("memory-kinds")?, "/opt/memory-kinds".into()));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, ip, PORT)
}

/// Lines that were said after all that had been said until now.
fn goes_on(guest: &mut Guest) -> Result<()> {
    guest.lines(PATIENCE)?;
    for _ in 0..20 {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
    }
    Ok(())
}

/// Moves it to the other node in each mode.
fn right_in_every_mode(lab: &Lab, guest: &mut Guest) -> Result<()> {
    goes_on(guest).context("before the first move")?;
    for mode in ["auto", "cold", "precopy", "postcopy", "hybrid"] {
        let from = exactly_one_runs(lab, NAME)?;
        let to = if from == "a" { "b" } else { "a" };
        let report = move_with(lab, &from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        goes_on(guest).with_context(|| format!("after a move in mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
        nothing_left(lab, &from, NAME)?;
        eprintln!("mode {mode}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
    }
    Ok(())
}

fn guard_pages_stay_guards_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let kinds = ["guard-anon", "guard-shared", "guard-file", "guard-file-shared", "guard-memfd"];
    let mut guest = run(lab, &kinds, 61)?;
    right_in_every_mode(lab, &mut guest)?;
    remove(lab, NAME)
}

fn memory_that_cannot_be_read_is_refused_by_name(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, &["poisoned"], 62)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(
        refusal.sentence.contains("memory-kinds (pid ") && refusal.sentence.contains("cannot be read"),
        "{}",
        refusal.sentence
    );
    goes_on(&mut guest)?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("guard_pages_stay_guards_in_every_mode", guard_pages_stay_guards_in_every_mode),
        ("memory_that_cannot_be_read_is_refused_by_name", memory_that_cannot_be_read_is_refused_by_name),
    ])
}
