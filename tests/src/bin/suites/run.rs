//! Runs suites side by side, those that failed once more alone, and shows what came of it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cgroups;
use crate::discovery::{Kind, Suite};
use crate::table::{Counts, Row, cpu_seconds, end, failures, skips, table};

/// Where the logs are.
const LOGS: &str = "target/suites";
/// How often the suites that are still running are named.
const PROGRESS: Duration = Duration::from_secs(60);
/// How many lines of a log that failed are shown.
const SHOWN: usize = 80;
/// How much later than a suite's process 1 this program gives up.
const GRACE: Duration = Duration::from_secs(60);

/// What came of one run of a suite.
struct Outcome {
    success: bool,
    seconds: f64,
    log: PathBuf,
    text: String,
    counts: Counts,
}

enum Event {
    Started(String),
    Ended(String, Result<Outcome>),
}

/// Runs all, `jobs` at a time, and beside them one that mostly waits. Succeeds if each suite passes, at the latest when it is run
/// once more alone.
pub fn all(suites: Vec<Suite>, jobs: usize, limit: Duration) -> Result<ExitCode> {
    let begun = Instant::now();
    let root = nix::unistd::geteuid().is_root();
    if root {
        cgroups::remove_stale()?;
    }
    fs::create_dir_all(LOGS).with_context(|| format!("cannot make {LOGS}"))?;
    let kinds: BTreeMap<String, Suite> = suites.iter().map(|suite| (suite.name.clone(), suite.clone())).collect();
    println!("{} suites, {jobs} at a time and one that mostly waits; their logs are in {LOGS}", suites.len());
    let outcomes = side_by_side(suites, jobs, limit, begun)?;

    let (mut rows, mut unsteady, mut broken) = (Vec::new(), String::new(), String::new());
    for (name, first) in outcomes {
        let mut row = Row {
            suite: name.clone(),
            result: "ok",
            seconds: first.seconds,
            cpu: cpu_seconds(&first.text),
            counts: first.counts,
        };
        if !first.success {
            println!("{name} failed; running it once more, alone");
            let kept = first.log.with_extension("first.log");
            fs::rename(&first.log, &kept).with_context(|| format!("cannot rename {}", first.log.display()))?;
            let again = play(&kinds[&name], limit)?;
            println!("{}", line(&name, &again));
            tell_failures(&name, &again);
            row.counts = again.counts;
            row.seconds += again.seconds;
            if again.success {
                row.result = "flaky";
                let _ = write!(unsteady, "flaky: {name}\n{}", end(&first.text, SHOWN));
            } else {
                row.result = "FAILED";
                // One that was killed counted none.
                row.counts.failed = row.counts.failed.max(1);
                for (which, outcome) in [(&kept, &first), (&again.log, &again)] {
                    let _ = write!(broken, "failed: {name}, {}:\n{}", which.display(), end(&outcome.text, SHOWN));
                }
            }
        }
        rows.push(row);
    }
    print!("\n{unsteady}{broken}\n{}\n", table(&rows));
    let (passed, failed) = rows.iter().fold((0, 0), |(p, f), row| (p + row.counts.passed, f + row.counts.failed));
    println!("{:.0} s in all", begun.elapsed().as_secs_f64());
    println!("{passed} passed, {failed} failed");
    Ok(if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The outcomes by the suites' names.
fn side_by_side(suites: Vec<Suite>, jobs: usize, limit: Duration, begun: Instant) -> Result<BTreeMap<String, Outcome>> {
    let (total, waiting) = (suites.len(), Mutex::new(VecDeque::from(suites)));
    let (sender, events) = channel();
    let mut outcomes = BTreeMap::new();
    thread::scope(|scope| {
        // One more takes those that mostly wait.
        for takes in
            (0..jobs).map(|_| any as fn(&Suite) -> bool).chain((jobs > 1).then_some(waits as fn(&Suite) -> bool))
        {
            let (waiting, sender) = (&waiting, sender.clone());
            scope.spawn(move || work(waiting, takes, &sender, limit));
        }
        drop(sender);
        let mut running: BTreeMap<String, Instant> = BTreeMap::new();
        loop {
            match events.recv_timeout(PROGRESS) {
                Ok(Event::Started(name)) => drop(running.insert(name, Instant::now())),
                Ok(Event::Ended(name, outcome)) => {
                    running.remove(&name);
                    let outcome = outcome.with_context(|| format!("cannot run {name}"))?;
                    println!("{}", line(&name, &outcome));
                    tell_failures(&name, &outcome);
                    skips(&outcome.text).iter().for_each(|skip| println!("{skip}"));
                    outcomes.insert(name, outcome);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let names: Vec<_> = running
                        .iter()
                        .map(|(name, since)| format!("{name} ({} s)", since.elapsed().as_secs()))
                        .collect();
                    let (done, seconds) = (outcomes.len(), begun.elapsed().as_secs());
                    println!("... {done} of {total} done after {seconds} s; running: {}", names.join(", "));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(outcomes),
            }
        }
    })
}

/// Runs the suites that it takes, in their order, until none is left.
fn work(waiting: &Mutex<VecDeque<Suite>>, takes: fn(&Suite) -> bool, events: &Sender<Event>, limit: Duration) {
    loop {
        let next = {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.iter().position(takes).and_then(|place| waiting.remove(place))
        };
        let Some(suite) = next else { return };
        // Nobody listens any more after an error.
        if events.send(Event::Started(suite.name.clone())).is_err() {
            return;
        }
        let outcome = play(&suite, limit);
        if events.send(Event::Ended(suite.name, outcome)).is_err() {
            return;
        }
    }
}

fn any(_: &Suite) -> bool {
    true
}

fn waits(suite: &Suite) -> bool {
    suite.waits
}

fn line(name: &str, outcome: &Outcome) -> String {
    let Counts { passed, failed, skipped } = outcome.counts;
    let word = if outcome.success { "ok    " } else { "FAILED" };
    let seconds = outcome.seconds;
    format!("{word} {seconds:6.1} s  {name}: {passed} passed, {failed} failed, {skipped} skipped")
}

/// Says which tests of a suite failed, so that also a run that is ended before its table is there tells why.
fn tell_failures(name: &str, outcome: &Outcome) {
    if outcome.success {
        return;
    }
    let failures = failures(&outcome.text);
    failures.iter().for_each(|failure| println!("failed in {name}: {failure}"));
    if failures.is_empty() {
        println!("failed in {name}: no test says so: its log is {}", outcome.log.display());
    }
}

/// Runs a suite to its end.
fn play(suite: &Suite, limit: Duration) -> Result<Outcome> {
    let log = Path::new(LOGS).join(format!("{}.log", suite.name));
    let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let begun = Instant::now();
    let mut command = command(suite, limit)?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", suite.name))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > limit + GRACE {
            // Its parent's death ends all of the suite.
            let _ = child.kill();
            break child.wait()?;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let seconds = begun.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let counts = Counts::of(&text);
    Ok(Outcome { success: status.success(), seconds, log, text, counts })
}

/// The command that runs a suite.
fn command(suite: &Suite, limit: Duration) -> Result<Command> {
    let Kind::Programs { programs, cgroup2, variable, arguments } = &suite.kind else {
        let mut cargo = Command::new("timeout");
        cargo.arg(limit.as_secs().to_string()).args(["cargo", "test", "--release", "--workspace", "--doc"]);
        return Ok(cargo);
    };
    let mut script = String::from("status=0\n");
    for program in programs {
        let arguments = arguments.join(" ");
        let (directory, path) = (quoted(&program.directory), quoted(&program.path));
        let _ = writeln!(script, "cd {directory} && echo '# '{path} && {path} {arguments} || status=1");
    }
    script.push_str("exit $status\n");
    let mut command;
    if nix::unistd::geteuid().is_root() {
        command = Command::new(crate::own_program().context("cannot find this program")?);
        command.args(["isolate", "--limit", &limit.as_secs().to_string()]);
        if *cgroup2 {
            command.arg("--cgroup2");
        }
        command.args([&suite.name.replace('+', "-"), "--", "sh", "-c", &script]);
    } else {
        command = Command::new("timeout");
        command.args([&limit.as_secs().to_string(), "sh", "-c", &script]);
    }
    command.envs(variable.iter().map(|name| (name, "1")));
    Ok(command)
}

/// A path as one word of a shell's.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}
