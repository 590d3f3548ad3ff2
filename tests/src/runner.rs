use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use libtest_mimic::{Arguments, Completion, Trial};
use tranship_lab::{Lab, Snapshot, UpOptions, find_program, patience, slowness};

/// How long to wait for another test's lab on this machine to be taken down.
const LAB_PATIENCE: Duration = Duration::from_secs(600);
/// How long one scenario may take: several times what the longest one does on a busy machine.
const SCENARIO: Duration = Duration::from_secs(600);
const PROGRAMS: [&str; 5] = ["tranship", "transhipd", "tranship-lab", "zoo", "suites"];
/// In the environment of what runs in namespaces of its own.
const ISOLATED: &str = "TRANSHIP_ISOLATED";

/// What a scenario plays on: a lab with two nodes whose agents run.
#[derive(Debug)]
pub struct Stage {
    /// The lab.
    pub lab: Lab,
}

/// A test: an error or a panic is a failure. It leaves no containers behind.
pub type Scenario = fn(&mut Stage) -> Result<()>;

/// The `main` of a file of tests: runs the scenarios one after the other, in this order, all in one lab that is taken
/// down afterwards; a scenario that fails gets the lab taken down, and the next one a new one. Finally the machine is
/// compared with what it was before.
///
/// All that happens in namespaces of their own (`suites isolate`), so that other labs can be up on this machine.
///
/// Where tests cannot run (not root, programs not built) each is counted as ignored, with the reason; where `CI` is set,
/// it fails instead.
pub fn scenarios(list: &[(&'static str, Scenario)]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    if !arguments.list && hindrance().is_none() && env::var_os(ISOLATED).is_none() {
        eprintln!("{:#}", isolate());
        return ExitCode::FAILURE;
    }
    // The lab is the machine's only one.
    arguments.test_threads = Some(1);
    let stage = Arc::new(Mutex::new(None));
    let before = Arc::new(Mutex::new(None));
    let times = Arc::new(Mutex::new(Vec::new()));
    let mut trials: Vec<_> = list
        .iter()
        .map(|(name, scenario)| {
            let (stage, before, times) = (Arc::clone(&stage), Arc::clone(&before), Arc::clone(&times));
            let (name, scenario) = (*name, *scenario);
            Trial::ignorable_test(name, move || {
                unless_hindered(|| {
                    let _in_time = watch(name);
                    let begun = Instant::now();
                    let result = play(scenario, &stage, &before);
                    times.lock().unwrap_or_else(PoisonError::into_inner).push((begun.elapsed(), name));
                    result
                })
            })
        })
        .collect();
    let last = Arc::clone(&stage);
    trials.push(Trial::ignorable_test("nothing_is_left_of_the_lab", move || {
        unless_hindered(|| {
            take_down(&last)?;
            let before = before.lock().unwrap_or_else(PoisonError::into_inner).take();
            before.map_or(Ok(()), |before: Snapshot| nothing_is_left(&before))
        })
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    for (time, name) in times.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        println!("{:6.1} s  {name}", time.as_secs_f64());
    }
    // A filter may have left out the test that does this.
    if let Err(error) = take_down(&stage) {
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// Whether whole matrices are played, as in `make test-all`; otherwise, where they take minutes, a part of each.
#[must_use]
pub fn whole_matrices() -> bool {
    env::var("TRANSHIP_ENGINES").is_ok_and(|which| which == "all")
}

/// Executes this program again in namespaces of its own; returns only if that fails.
fn isolate() -> anyhow::Error {
    let attempt = || -> Result<std::convert::Infallible> {
        let own = env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(find_program("suites")?);
        command.args(["isolate", "test", "--"]).arg(own).args(env::args_os().skip(1));
        Err(command.exec()).context("cannot execute suites")
    };
    match attempt() {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn take_down(stage: &Mutex<Option<Stage>>) -> Result<()> {
    let stage = stage.lock().unwrap_or_else(PoisonError::into_inner).take();
    stage.map_or(Ok(()), |s| s.lab.down()).context("taking the lab down")
}

fn play(scenario: Scenario, stage: &Mutex<Option<Stage>>, before: &Mutex<Option<Snapshot>>) -> Result<()> {
    let mut on = stage.lock().unwrap_or_else(PoisonError::into_inner);
    if on.is_none() {
        let mut before = before.lock().unwrap_or_else(PoisonError::into_inner);
        wait_for_other_labs()?;
        before.get_or_insert_with(Snapshot::take);
        let lab = Lab::up(&UpOptions { wait: LAB_PATIENCE, ..UpOptions::default() });
        *on = Some(Stage { lab: lab.context("bringing the lab up")? });
    }
    let stage = on.as_mut().context("no stage")?;
    // The stage goes with a scenario that fails or panics: nobody knows in what state it was left.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scenario(stage)));
    match result {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            tell_agents_last_words(stage);
            *on = None;
            Err(error)
        }
        Err(panic) => {
            tell_agents_last_words(stage);
            *on = None;
            drop(on);
            std::panic::resume_unwind(panic)
        }
    }
}

/// Ends the whole run, with what goes on at that moment, unless the sender is dropped in time: a scenario that hangs would
/// hang all that comes after it, and nobody would learn which one it was. (The soak, which has a seed, has
/// none: its scenarios are as long as they are told to be.)
fn watch(name: &'static str) -> Sender<()> {
    let (done, waits) = channel();
    let limit = if env::var_os("TRANSHIP_SEED").is_some() { Duration::MAX } else { SCENARIO.mul_f64(slowness()) };
    std::thread::spawn(move || {
        if waits.recv_timeout(limit) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        eprintln!("scenario {name} did not end within {} s; what runs on this machine:", limit.as_secs());
        // It inherits the error stream, where it belongs.
        let _ = Command::new("sh").args(["-c", "ps -eo pid,ppid,stat,wchan:24,etimes,args >&2"]).status();
        if let Ok(lab) = Lab::attach() {
            for node in lab.nodes() {
                tell_last_words(&lab, &node);
            }
            let _ = lab.down();
        }
        std::process::exit(1);
    });
    done
}

/// Compares the machine with what it was, at a moment when no other lab is up on it.
fn nothing_is_left(before: &Snapshot) -> Result<()> {
    let deadline = Instant::now() + LAB_PATIENCE;
    loop {
        wait_for_other_labs()?;
        let mut left = before.compare();
        left.retain(|thing| !is_of_others(thing));
        if left.is_empty() {
            return Ok(());
        }
        // Another lab may have come and gone meanwhile; what is still there when none is was left by this one.
        let still: Vec<_> = before.compare().into_iter().filter(|thing| left.contains(thing)).collect();
        if (!still.is_empty() && Lab::attach().is_err()) || Instant::now() > deadline {
            bail!("{}", still.join("\n"));
        }
    }
}

/// Whether a difference is the doing of other software on this machine: cgroups deep in directories that no part of a lab,
/// an engine or CRIU makes anything in.
fn is_of_others(difference: &str) -> bool {
    let Some(path) = difference.strip_prefix("cgroup left behind: /sys/fs/cgroup/") else { return false };
    path.split('/').count() > 2 && !["tranship", "runc", "criu"].iter().any(|part| path.contains(part))
}

/// Waits until no other lab is up, so that the snapshot does not show what goes away with it.
fn wait_for_other_labs() -> Result<()> {
    wait_until("another lab on this machine to be taken down", LAB_PATIENCE, || {
        Ok(Lab::attach().is_err().then_some(()))
    })
}

/// Prints the ends of the agents' logs, which are gone with the lab.
fn tell_agents_last_words(stage: &Stage) {
    stage.lab.nodes().iter().for_each(|node| tell_last_words(&stage.lab, node));
}

fn tell_last_words(lab: &Lab, node: &str) {
    let Ok(Ok(text)) = lab.path(node, "/run/tranship/agent.log").map(std::fs::read_to_string) else { return };
    let lines: Vec<_> = text.lines().collect();
    eprintln!("--- the agent of node {node} said last:");
    lines[lines.len().saturating_sub(30)..].iter().for_each(|line| eprintln!("    {line}"));
}

fn unless_hindered(test: impl FnOnce() -> Result<()>) -> Result<Completion, libtest_mimic::Failed> {
    if let Some(why) = hindrance() {
        if env::var_os("CI").is_some() {
            return Err(format!("cannot run here, and must on CI: {why}").into());
        }
        return Ok(Completion::ignored_with(why));
    }
    test().map(|()| Completion::Completed).map_err(|error| format!("{error:#}").into())
}

/// Why end-to-end tests cannot run here.
fn hindrance() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("nodes are namespaces, which needs root".into());
    }
    PROGRAMS.iter().find_map(|name| find_program(name).err()).map(|e| e.to_string())
}

/// Waits until `probe` finds something, looking every 10 ms, at most for `limit`, and [longer](patience) on a busy machine;
/// `what` completes "waited for …".
///
/// # Errors
/// If it does not in time, or the probe fails.
pub fn wait_until<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = probe().with_context(|| format!("while waiting for {what}"))? {
            return Ok(found);
        }
        let waited = begun.elapsed();
        if waited >= limit && waited >= patience(limit) {
            bail!("waited for {what} for {} s", waited.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
