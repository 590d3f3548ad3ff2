//! The fault matrix: whatever fails on the way, exactly one copy goes on running, under a client that notices nothing but
//! a pause, and the next move succeeds.
//!
//! `TRANSHIP_CASES=source.freeze,destination.ready.after` runs the cases whose names begin so. A case's name ends with its
//! mode; with `TRANSHIP_SEED` set, as in `make soak`, each is played in every mode, else each in one. `TRANSHIP_REPEAT=100`
//! plays all that so many times: for what happens now and then.

mod cases;
mod cells;
mod conditions;
mod injectors;
mod kills;
mod lacking;
mod links;
mod planted;
mod play;
mod tls;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{
    DOCKER, Log, MODES, Managed, Moving, Scenario, Stage, is_gone, restart_agent, scenarios, wait_until, whole_matrices,
};
use tranship_lab::{Lab, UpOptions, patience};
use tranship_types::{Mode, Side};

use cases::Case;
use conditions::Cell;
use play::Play;

/// One thing to try, and its name.
struct Trial {
    name: String,
    run: Box<Run>,
}

type Run = dyn Fn(&Lab, &mut Play) -> Result<()>;

/// Runs all trials on one container, one after the other; one that fails gets the lab made anew for the next.
fn run_all(stage: &mut Stage, trials: &[Trial]) -> Result<()> {
    run_under(stage, None, trials)
}

/// The same with a container of another engine than runc.
fn run_under(stage: &mut Stage, engine: Option<&'static Managed>, trials: &[Trial]) -> Result<()> {
    let wanted = std::env::var("TRANSHIP_CASES").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').map(str::trim).filter(|w| !w.is_empty()).collect();
    let (begun, mut failures, mut done, mut slowest) = (Instant::now(), Vec::new(), 0, 0.0_f64);
    let mut play = None;
    let repeat =
        std::env::var("TRANSHIP_REPEAT").map_or(1, |times| times.parse().expect("TRANSHIP_REPEAT is a number"));
    let all = std::iter::repeat_n(trials, repeat).flatten();
    for trial in all.filter(|t| wanted.is_empty() || wanted.iter().any(|w| t.name.starts_with(w))) {
        let mut on = match play.take() {
            Some(play) => play,
            None => Play::begin(&stage.lab, engine).context("starting the container")?,
        };
        let logs: Vec<_> = stage.lab.nodes().iter().map(|n| Log::mark(&stage.lab, n)).collect::<Result<_>>()?;
        let (from, start) = (on.at.clone(), Instant::now());
        let result = (trial.run)(&stage.lab, &mut on);
        let seconds = start.elapsed().as_secs_f64();
        slowest = slowest.max(seconds);
        done += 1;
        match result {
            Ok(()) => {
                eprintln!("ok      {seconds:5.1} s  {}", trial.name);
                play = Some(on);
            }
            Err(error) => {
                eprintln!("FAILED  {seconds:5.1} s  {} (from {from}): {error:#}", trial.name);
                for (node, log) in stage.lab.nodes().iter().zip(&logs) {
                    eprintln!("--- the agent of node {node} said:");
                    log.text().lines().for_each(|line| eprintln!("    {line}"));
                }
                failures.push(format!("{}: {error:#}", trial.name));
                drop(on);
                renew(stage).context("making the lab anew")?;
            }
        }
    }
    let mut replies = 0;
    if let Some(play) = play {
        replies = play.end(&stage.lab)?;
    }
    eprintln!(
        "{done} cases, {} failed, {:.0} s in all, {slowest:.1} s the slowest; {replies} replies on the last connection",
        failures.len(),
        begun.elapsed().as_secs_f64()
    );
    ensure!(failures.is_empty(), "{} of {done} cases failed:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}

/// Another lab instead of one in which something went wrong.
fn renew(stage: &mut Stage) -> Result<()> {
    // Two labs cannot be up at a time, and dropping the old one would take down the new one.
    let old = std::mem::replace(&mut stage.lab, Lab::attach()?);
    old.down()?;
    stage.lab = Lab::up(&UpOptions { wait: Duration::from_secs(60), ..UpOptions::default() })?;
    Ok(())
}

fn injected(case: &Case) -> Trial {
    let case = case.clone();
    Trial { name: case.name(), run: Box::new(move |lab, play| inject(lab, play, &case)) }
}

fn inject(lab: &Lab, play: &mut Play, case: &Case) -> Result<()> {
    let (from, to) = play.direction();
    let node = if case.side == Side::Source { &from } else { &to };
    restart_agent(lab, node, &case.spec())?;
    let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
    let log = Log::mark(lab, node)?;
    let mut moving = Moving::begin(lab, play.name(), &from, &to, case.mode)?;
    if case.what == "die" {
        await_death(agent, &mut moving)?;
        lab.start_agent(node, &[])?;
    }
    let ended = moving.end()?;
    let fired = || {
        Ok((case.what == "die" || log.text().contains("injected") || ended.error().contains("injected")).then_some(()))
    };
    wait_until("the fault to happen", Duration::from_secs(5), fired)?;
    if case.what == "panic" && case.ends_on == Side::Source {
        let cause = format!("failed internally in step {0}: an injected panic at {0}", case.step);
        ensure!(ended.error().contains(&cause), "the cause is not told: {}", ended.error());
    }
    ensure!(ended.report.is_some() || case.what == "die", "tranship was not answered: {}", ended.error());
    play.settle(lab, &ended, Some(case.ends_on))
}

fn await_death(agent: u32, moving: &mut Moving) -> Result<()> {
    let mut after_end = None;
    while !is_gone(agent) {
        if !moving.goes_on()? && after_end.get_or_insert_with(Instant::now).elapsed() > patience(Duration::from_secs(5))
        {
            bail!("the agent, pid {agent}, did not die");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// In every mode where time does not matter; where it does, a part of them.
fn in_modes(cases: &[Case]) -> Vec<Trial> {
    let every_mode = std::env::var_os("TRANSHIP_SEED").is_some();
    let chosen = if every_mode || whole_matrices() { cases.to_vec() } else { cases::half(cases) };
    cases::in_modes(&chosen, every_mode).iter().map(injected).collect()
}

fn faults_of_the_source(stage: &mut Stage) -> Result<()> {
    run_all(stage, &in_modes(&cases::of_the_source()))
}

fn faults_of_the_destination(stage: &mut Stage) -> Result<()> {
    run_all(stage, &in_modes(&cases::of_the_destination()))
}

/// One for each way in which a move can end, and each kind of thread that works for it.
const PANICS: [&str; 9] = [
    "source.arm.before",
    "source.freeze.after",
    "source.transfer.after",
    "source.deliver.before",
    "source.release.before",
    "destination.engine.after",
    "destination.restore.after",
    "destination.resume.before",
    "destination.drain.before",
];

/// A panic is undone like an error, or repeated, and `tranship` shows where it came from.
fn panics_of_both_sides(stage: &mut Stage) -> Result<()> {
    let mut all = [cases::of_the_source(), cases::of_the_destination()].concat();
    all.retain(|case| case.what == "error" && PANICS.contains(&case.place().as_str()));
    all.iter_mut().for_each(|case| case.what = "panic");
    ensure!(all.len() == PANICS.len(), "not all of {PANICS:?} are in the matrix");
    run_all(stage, &cases::in_modes(&all, false).iter().map(injected).collect::<Vec<_>>())
}

fn agents_that_lack_something(stage: &mut Stage) -> Result<()> {
    let trial = |case: &'static lacking::Case| Trial {
        name: case.name(),
        run: Box::new(move |lab, play| case.play(lab, play)),
    };
    run_all(stage, &lacking::CASES.iter().map(trial).collect::<Vec<_>>())
}

fn processes_that_inject(stage: &mut Stage) -> Result<()> {
    let trial = |case: &'static injectors::Case| Trial {
        name: case.name(),
        run: Box::new(move |lab, play| case.play(lab, play)),
    };
    run_all(stage, &injectors::CASES.iter().map(trial).collect::<Vec<_>>())
}

fn links_that_go_down(stage: &mut Stage) -> Result<()> {
    let trial = |(number, cut): (usize, &'static links::Cut)| {
        let mode = MODES[number % MODES.len()];
        Trial { name: format!("{}.{mode}", cut.name()), run: Box::new(move |lab, play| cut.play(lab, play, mode)) }
    };
    let trials: Vec<_> = links::CUTS.iter().enumerate().map(trial).collect();
    run_all(stage, &trials)
}

fn tls_processes_that_die(stage: &mut Stage) -> Result<()> {
    let trial = |place| Trial {
        name: tls::name(place),
        run: Box::new(move |lab, play| tls::play(lab, play, place, Mode::Hybrid)),
    };
    let in_a_handshake =
        Trial { name: "tls.destination.handshake".to_owned(), run: Box::new(tls::play_in_a_handshake) };
    let trials: Vec<_> = tls::PLACES.into_iter().map(trial).chain([in_a_handshake]).collect();
    run_all(stage, &trials)
}

/// The cells of a part of the matrix; where time matters, those of every run.
fn play_cells(stage: &mut Stage, cells: &'static [Cell]) -> Result<()> {
    let all =
        whole_matrices() || std::env::var_os("TRANSHIP_SEED").is_some() || std::env::var_os("TRANSHIP_CASES").is_some();
    let trial = |cell: &'static Cell| Trial { name: cell.name(), run: Box::new(move |lab, play| cell.play(lab, play)) };
    let trials: Vec<_> = cells.iter().filter(|cell| all || cell.every_run).map(trial).collect();
    run_all(stage, &trials)
}

fn packets_lost_in_one_direction(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::ONE_WAY)
}

fn slow_links(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::SLOW)
}

fn stalled_processes(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::STALLED)
}

fn full_file_systems(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::FULL)
}

fn processes_out_of_memory(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::OUT_OF_MEMORY)
}

fn kills_after_a_restart(stage: &mut Stage) -> Result<()> {
    play_cells(stage, &cells::KILLED_AFTER_RESTART)
}

fn killed_processes(stage: &mut Stage) -> Result<()> {
    let seed = kills::seed();
    eprintln!("TRANSHIP_SEED={seed}");
    let trial = |kill: kills::Kill| Trial { name: kill.name(), run: Box::new(move |lab, play| kill.play(lab, play)) };
    let trials: Vec<_> = kills::drawn(seed).into_iter().map(trial).collect();
    run_all(stage, &trials).with_context(|| format!("TRANSHIP_SEED={seed}"))
}

/// Of the matrix what is another thing under an engine with a daemon: agents that die, and links that break, in each phase.
fn deaths_and_cuts(cases: Vec<Case>) -> Vec<Trial> {
    let chosen: Vec<Case> =
        cases.into_iter().filter(|case| case.when == "before" && matches!(case.what, "die" | "cut")).collect();
    cases::in_modes(&chosen, false).iter().map(injected).collect()
}

fn faults_of_the_source_under_docker(stage: &mut Stage) -> Result<()> {
    run_under(stage, Some(&DOCKER), &deaths_and_cuts(cases::of_the_source()))
}

fn faults_of_the_destination_under_docker(stage: &mut Stage) -> Result<()> {
    run_under(stage, Some(&DOCKER), &deaths_and_cuts(cases::of_the_destination()))
}

/// One for each way in which a move can end.
const FEW: [&str; 5] = [
    "source.transfer.before.die",
    "source.commit.before.die",
    "source.release.before.die",
    "destination.restore.before.die",
    "destination.resume.before.die",
];

fn some_faults_under_docker(stage: &mut Stage) -> Result<()> {
    let all = [cases::of_the_source(), cases::of_the_destination()].concat();
    let chosen: Vec<Case> = all.into_iter().filter(|case| FEW.contains(&case.spec().as_str())).collect();
    ensure!(chosen.len() == FEW.len(), "not all of {FEW:?} are in the matrix");
    run_under(stage, Some(&DOCKER), &deaths_and_cuts(chosen))
}

fn main() -> ExitCode {
    let mut all: Vec<(&str, Scenario)> = vec![
        ("two_lives_at_a_time_are_found", planted::two_lives_at_a_time_are_found),
        ("every_fault_of_the_source", faults_of_the_source),
        ("every_fault_of_the_destination", faults_of_the_destination),
        ("panics_of_both_sides", panics_of_both_sides),
        ("agents_that_lack_something", agents_that_lack_something),
        ("processes_that_inject", processes_that_inject),
        ("links_that_go_down", links_that_go_down),
        ("tls_processes_that_die", tls_processes_that_die),
        ("packets_lost_in_one_direction", packets_lost_in_one_direction),
        ("slow_links", slow_links),
        ("stalled_processes", stalled_processes),
        ("full_file_systems", full_file_systems),
        ("processes_out_of_memory", processes_out_of_memory),
        ("kills_after_a_restart", kills_after_a_restart),
    ];
    // Killed at drawn moments: each run is another one, so it belongs to the soak and not to every test run.
    if std::env::var_os("TRANSHIP_SEED").is_some() {
        all.push(("killed_processes", killed_processes));
    } else {
        println!("skipped: killed_processes draws its moments by chance; `make soak` runs it, or TRANSHIP_SEED=N");
    }
    if whole_matrices() {
        all.push(("docker_faults_of_the_source", faults_of_the_source_under_docker));
        all.push(("docker_faults_of_the_destination", faults_of_the_destination_under_docker));
    } else {
        all.push(("docker_some_faults", some_faults_under_docker));
        println!("skipped: the fault matrix under Docker takes minutes; `make test-engines` plays it");
    }
    if !whole_matrices() && std::env::var_os("TRANSHIP_SEED").is_none() {
        println!("skipped: half of the fault matrix; `make test-all` plays all of it, and `make soak` in every mode");
    }
    scenarios(&all)
}
