//! Memory that processes share is moved ahead of the freeze, and how much of it there is does not show in the blackout. So are
//! pages of files that were written in private mappings.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Guest, Stage, exactly_one_runs, nothing_left, remove, scenarios};
use tranship_lab::{Lab, RunOptions, find_program, report_of};
use tranship_types::{Outcome, Report};

const NAME: &str = "shared";
const PORT: u16 = 7000;
const CHECKS: u64 = 110;
const PATIENCE: Duration = Duration::from_secs(60);

fn run(lab: &Lab, animals: &str, mib: u64, ip: Ipv4Addr) -> Result<Guest> {
    let mut options = RunOptions::new(ip, ["/opt/zoo", "--only", animals]);
    options.binds.push((find_program("zoo")?, "/opt/zoo".into()));
    options.environment.push(format!("ZOO_MIB={mib}"));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, ip, PORT)
}

fn moved(lab: &Lab, mode: &str) -> Result<Report> {
    let from = exactly_one_runs(lab, NAME)?;
    let to = if from == "a" { "b" } else { "a" };
    let output = lab.exec(&from, &["tranship", "move", NAME, "--to", to, "--mode", mode, "--json"])?;
    let report: Report = serde_json::from_value(report_of(&output.stdout)?).context("the report")?;
    ensure!(report.outcome == Outcome::Moved, "the move ended as {:?}: {:?}", report.outcome, report.error);
    ensure!(exactly_one_runs(lab, NAME)? == to, "the container is where it was");
    nothing_left(lab, &from, NAME)?;
    Ok(report)
}

fn moved_ahead(lab: &Lab, mode: &str) -> Result<Report> {
    let report = moved(lab, mode)?;
    let ahead = report.ways.iter().any(|way| way.contains("put in place ahead of the restore"));
    ensure!(ahead, "shared memory took another way: {:?}", report.ways);
    Ok(report)
}

fn content_is_right_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let animals = "shared_rewritten,shared_anonymous,memfd,memfd_written,sysv_shm";
    let mut guest = run(lab, animals, 64, Ipv4Addr::new(10, 77, 0, 31))?;
    guest.zoo_goes_on(CHECKS, PATIENCE).context("before the first move")?;
    for mode in ["cold", "precopy", "postcopy", "hybrid", "auto", "precopy"] {
        let report = moved_ahead(lab, mode).with_context(|| format!("mode {mode}"))?;
        guest.zoo_goes_on(CHECKS, PATIENCE).with_context(|| format!("after a move in mode {mode}"))?;
        eprintln!("mode {mode}: blackout {:.0} ms, no complaints", report.blackout_ms.unwrap_or_default());
    }
    remove(lab, NAME)
}

fn a_gigabyte_does_not_show_in_the_blackout(stage: &mut Stage) -> Result<()> {
    const MOVES: usize = 4;
    // How many moves it may take until one meets no other work: suites run side by side.
    const TRIES: usize = 12;
    // To write, send and read a GiB takes a second and more on the machines that this runs on.
    const MORE_MS: f64 = 150.0;
    let lab = &stage.lab;
    let mut of_little = f64::MAX;
    for (mib, host) in [(1, 32), (1024, 33)] {
        let mut guest = run(lab, "shared_rewritten", mib, Ipv4Addr::new(10, 77, 0, host))?;
        let (mut blackouts, mut shortest) = (Vec::new(), f64::MAX);
        while blackouts.len() < MOVES || (shortest - of_little >= MORE_MS && blackouts.len() < TRIES) {
            guest.zoo_goes_on(20, PATIENCE)?;
            let blackout = moved_ahead(lab, "precopy")?.blackout_ms.context("no blackout")?;
            blackouts.push(blackout);
            shortest = shortest.min(blackout);
        }
        guest.zoo_goes_on(CHECKS, PATIENCE).context("after the last move")?;
        eprintln!("{mib} MiB: blackouts of {blackouts:.0?} ms");
        let more = shortest - of_little;
        ensure!(more < MORE_MS, "a GiB makes the blackout longer by {more:.0} ms");
        of_little = shortest;
        remove(lab, NAME)?;
    }
    Ok(())
}

fn written_pages_of_files_are_no_part_of_the_skeleton(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (mib, host) in [(4, 34), (512, 35)] {
        let mut guest = run(lab, "file_map_rewritten", mib, Ipv4Addr::new(10, 77, 0, host))?;
        guest.zoo_goes_on(CHECKS, PATIENCE).context("before the first move")?;
        for mode in ["precopy", "hybrid", "postcopy", "cold"] {
            let report = moved(lab, mode).with_context(|| format!("mode {mode}"))?;
            guest.zoo_goes_on(CHECKS, PATIENCE).with_context(|| format!("after a move in mode {mode}"))?;
            let parts: Vec<_> = report.parts.iter().map(|part| format!("{} {:.0}", part.name, part.ms)).collect();
            let blackout = report.blackout_ms.unwrap_or_default();
            eprintln!("{mib} MiB, mode {mode}: blackout {blackout:.0} ms; {}", parts.join(", "));
            let skeleton = report.skeleton_bytes >> 20;
            ensure!(skeleton < 4, "{skeleton} MiB in criu's images");
        }
        remove(lab, NAME)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("content_is_right_in_every_mode", content_is_right_in_every_mode),
        ("a_gigabyte_does_not_show_in_the_blackout", a_gigabyte_does_not_show_in_the_blackout),
        ("written_pages_of_files_are_no_part_of_the_skeleton", written_pages_of_files_are_no_part_of_the_skeleton),
    ])
}
