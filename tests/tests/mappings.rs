//! A program changes its mappings all the time, in every way that there is, while it is planned and moved in every mode: no write is
//! lost, and no system call fails that would succeed if nobody watched.
//!
//! `TRANSHIP_SECONDS=600` goes on for so long, `TRANSHIP_SEED=7` repeats a run, `TRANSHIP_MODES=precopy` takes these modes only, and
//! `TRANSHIP_MAPPER="--kinds=shared --without=fork"` is passed on to the program: so one finds out what a failure is about.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Moving, Stage, Torturer, arguments, asked, asked_modes, quiet, remove, scenarios};
use tranship_types::Mode;

const NAME: &str = "mapper";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 61);
/// The seed of a run that is given none: the same in each `make test`.
const SEED: u64 = 5;
/// Deeds of each process between two moves: about half a second.
const STEPS: u64 = 600;

fn every_change_is_carried_and_none_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let seed: u64 = asked("TRANSHIP_SEED", |text| text.parse().ok())?.unwrap_or(SEED);
    let time = asked("TRANSHIP_SECONDS", |text| text.parse().ok())?.map_or(Duration::ZERO, Duration::from_secs);
    let modes = asked_modes()?.unwrap_or_else(|| Mode::ALL.to_vec());
    let arguments = arguments(seed, "TRANSHIP_MAPPER");
    eprintln!("TRANSHIP_SEED={seed}");

    let mut program = Torturer::start_program(lab, "mapper", "a", NAME, IP, &arguments)?;
    program.goes_on(2 * STEPS).context("before the first move")?;
    lab.check("a", &["tranship", "plan", NAME, "--to", "b"])?;
    program.goes_on(STEPS).context("after a plan")?;
    let (begun, mut at) = (Instant::now(), "a");
    for number in 1.. {
        let (mode, to) = (modes[number % modes.len()], if at == "a" { "b" } else { "a" });
        let what = || format!("move {number}, {mode}; TRANSHIP_SEED={seed}");
        let ended = Moving::begin(lab, NAME, at, to, mode)?.end()?;
        let now = quiet(lab, NAME).with_context(what)?;
        ended.fits(at, to, &now).with_context(what)?;
        ensure!(now == to, "{} failed: {}", what(), ended.error());
        program.goes_on(STEPS).with_context(what)?;
        at = to;
        if number >= modes.len() && begun.elapsed() >= time {
            eprintln!("{number} moves, nothing wrong");
            break;
        }
    }
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[("every_change_is_carried_and_none_is_refused", every_change_is_carried_and_none_is_refused)])
}
