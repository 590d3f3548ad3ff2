//! The demo: a busy Redis moves a → b → a under a connected client.

use std::io::{IsTerminal, Write};
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tranship_lab::{
    CounterClient, Lab, REDIS_PORT, Rate, Redis, RunOptions, Snapshot, UpOptions, redis_command, report_of,
    take_down_own,
};
use tranship_types::{Outcome, Report};

use crate::table::{Findings, grouped, megabytes, ms, of_move};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
const CONTAINER: &str = "redis";
const COUNTER: &str = "counter";
const VALUE_BYTES: u32 = 100;
const INTERVAL: Duration = Duration::from_micros(500);

/// Runs the demo. The exit code is 0 only if every reply, key and connection was right and nothing was left behind.
pub fn demo(keys: u64, link: Option<Rate>) -> Result<ExitCode> {
    let begin = Instant::now();
    say(&bold("Tranship demo: a busy Redis changes nodes under a connected client"));
    say("");
    let before = Arc::new(Snapshot::take());
    let interrupted = clean_up_on_signals(Arc::clone(&before))?;

    let shown = show(keys, link);
    // Once a signal has come, the thread that took it takes the lab down and ends the process.
    while interrupted.load(Ordering::SeqCst) {
        std::thread::park();
    }
    let down = take_down_own().context("taking the lab down");
    let left = before.compare();
    let all_right = match &shown {
        Ok(all_right) => *all_right,
        Err(e) => {
            failed(&format!("{e:#}"));
            false
        }
    };
    if let Err(e) = &down {
        failed(&format!("{e:#}"));
    }
    let clean = tell_leftovers(&left) && down.is_ok();
    say("");
    let seconds = begin.elapsed().as_secs_f64();
    if all_right && clean {
        say(&bold(&format!("All right, after {seconds:.0} s.")));
        return Ok(ExitCode::SUCCESS);
    }
    say(&bold(&format!("The demo failed, after {seconds:.0} s; see above.")));
    Ok(ExitCode::FAILURE)
}

/// On Ctrl-C and its like: takes the lab down, checks that nothing is left, and exits with 128 + the signal's number.
fn clean_up_on_signals(before: Arc<Snapshot>) -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot watch for signals")?;
    let flag = Arc::clone(&interrupted);
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        flag.store(true, Ordering::SeqCst);
        say("");
        say("interrupted; taking the lab down …");
        if let Err(e) = take_down_own() {
            failed(&format!("{e}"));
        }
        tell_leftovers(&before.compare());
        std::process::exit(128 + signal);
    });
    Ok(interrupted)
}

/// The demo between the two snapshots: whether all was right.
fn show(keys: u64, link: Option<Rate>) -> Result<bool> {
    let begin = Instant::now();
    let lab = Lab::up(&UpOptions { link, ..UpOptions::default() })?;
    let speed = link.map_or(String::new(), |rate| format!(", links of {rate}"));
    done(&format!("lab is up: nodes a and b with their agents, and a client{speed}"), begin);

    let begin = Instant::now();
    lab.run("a", CONTAINER, &RunOptions::new(ADDRESS, redis_command()))?;
    let mut redis = Redis::connect(&lab, ADDRESS, Duration::from_secs(10))?;
    redis.populate(keys, "key", VALUE_BYTES)?;
    let resident = redis.resident_bytes()?;
    done(&format!("Redis runs in a runc container on a: {} keys, {}", grouped(keys), megabytes(resident)), begin);

    let begin = Instant::now();
    let mut client = CounterClient::start(&lab, (ADDRESS, REDIS_PORT).into(), COUNTER, INTERVAL)?;
    client.pause()?;
    let (count, checksum) = redis.verify_without(COUNTER)?;
    if count != keys {
        bail!("Redis has {count} keys before the first move, not {keys}");
    }
    client.resume()?;
    done("client increments a counter every 0.5 ms on one connection, and checks each reply", begin);

    let mut all_right = true;
    for (from, to) in [("a", "b"), ("b", "a")] {
        say("");
        client.wait_replies(500, Duration::from_secs(10))?;
        client.mark()?;
        let report = moved(&lab, from, to)?;
        client.wait_replies(200, Duration::from_secs(10)).context("after the move")?;
        let seen = client.pause()?;
        let (count, now) = redis.verify_without(COUNTER).context("checking the keys after the move")?;
        client.resume()?;
        let found = Findings { client: seen, keys: (count, keys), checksums: (now, checksum.clone()) };
        say(&of_move(&report, &found));
        all_right &= found.all_right() && report.leftovers.is_empty();
        for leftover in &report.leftovers {
            failed(leftover);
        }
    }
    say("");
    let last = client.stop()?;
    let same = last.error.is_none() && last.same_connection;
    say(&format!("same connection: {}", if same { "yes" } else { "NO" }));
    say(&format!("replies checked: {}, longest gap {}", grouped(last.total.replies), ms(last.total.longest.ms)));
    if let Some(error) = last.error {
        failed(&error);
    }
    lab.down()?;
    Ok(all_right && same)
}

/// Moves the container; `tranship` shows its progress on stderr meanwhile.
fn moved(lab: &Lab, from: &str, to: &str) -> Result<Report> {
    let output = lab.move_command(from, CONTAINER, to)?.spawn().and_then(std::process::Child::wait_with_output);
    let output = output.context("cannot run tranship")?;
    if !output.status.success() {
        let reason = report_of(&output.stdout).ok().and_then(|r| r["error"].as_str().map(str::to_owned));
        bail!(
            "moving from {from} to {to} failed ({}): {}",
            output.status,
            reason.unwrap_or_else(|| "see above".into())
        );
    }
    let report: Report =
        serde_json::from_value(report_of(&output.stdout)?).context("the report of the move is not one")?;
    if report.outcome != Outcome::Moved {
        bail!("moving from {from} to {to} ended with {:?}: {}", report.outcome, report.error.unwrap_or_default());
    }
    Ok(report)
}

fn tell_leftovers(left: &[String]) -> bool {
    if left.is_empty() {
        say("nothing left behind: namespaces, mounts, cgroups, firewall rules, processes, files");
    }
    for thing in left {
        failed(thing);
    }
    left.is_empty()
}

/// Prints a line. Not println: the demo must clean up even if nobody reads any more.
fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

fn done(what: &str, begin: Instant) {
    say(&format!("  {} {what} ({:.1} s)", styled("✔", "32"), begin.elapsed().as_secs_f64()));
}

fn failed(what: &str) {
    say(&format!("  {} {what}", styled("✘", "31")));
}

fn bold(text: &str) -> String {
    styled(text, "1")
}

/// Text in an ANSI style, on a terminal that wants it.
fn styled(text: &str, style: &str) -> String {
    if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{style}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}
