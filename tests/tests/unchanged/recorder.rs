//! Everything that waits to be taken (`recorder.py`) is there afterwards, once, and in its order.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tranship_e2e::{Moving, Stage, exactly_one_runs, remove, restart_agent, wait_until};
use tranship_lab::{Lab, RunOptions};
use tranship_types::Mode;

use super::PATIENCE;

const NAME: &str = "recorder";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 71);
const PROGRAM: &str = include_str!("recorder.py");
/// What a move would be refused for.
const ALLOWED: [&str; 4] = ["--allow", "inotify-events", "--allow", "socket-errors"];
/// What a move that succeeds changes: what the user has allowed it to, and what docs/zoo.md tells of.
const CHANGED: [&str; 11] = [
    "attached_segment_marks",
    "detached_segment_marks",
    "epoll_order",
    "events_unread",
    "file_times_marks",
    "messages_marks",
    "semaphores_marks",
    "udp_error",
    "udp_error_queue",
    "unix_error",
    "unix_error_without_data",
];
/// What a move that fails after the dump changes: nobody can look at a segment that nobody has attached.
const MARKED: &str = "detached_segment_marks";
const FAILURES: [&str; 4] = [
    "source.precopy.after.error",
    "source.freeze.after.error",
    "source.transfer.after.error",
    "destination.restore.after.error",
];

type Found = BTreeMap<String, Value>;

fn ask(lab: &Lab, word: &str) -> Result<Value> {
    let mut connection = lab.connect("client", (IP, 7000).into(), PATIENCE)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    writeln!(connection, "{word}")?;
    let mut text = String::new();
    connection.read_to_string(&mut text)?;
    serde_json::from_str(&text).with_context(|| format!("it answers {word} with {text:?}"))
}

/// Makes everything anew, has something done, and takes everything.
fn taken_after(lab: &Lab, done: impl FnOnce() -> Result<()>) -> Result<Found> {
    ensure!(ask(lab, "fill")? == "ready");
    done()?;
    Ok(serde_json::from_value(ask(lab, "take")?)?)
}

/// One line for each kind that differs.
fn differences(expected: &Found, found: &Found) -> Vec<String> {
    // A kind that is left out has been looked at by the caller.
    let differs = |(kind, value): &(&String, &Value)| found.get(*kind).is_some_and(|now| now != *value);
    let line = |(kind, value): (&String, &Value)| {
        let now = &found[kind];
        format!("{kind}: {now} instead of {value}")
    };
    expected.iter().filter(differs).map(line).collect()
}

/// A move from a to b; the error that it ends with.
fn moved(lab: &Lab) -> Result<String> {
    let ended = Moving::begin_with(lab, NAME, "a", "b", Mode::Auto, &ALLOWED)?.end()?;
    ensure!(ended.success == ended.error().is_empty(), "{ended:?}");
    Ok(ended.error().to_owned())
}

pub(super) fn nothing_that_waits_is_lost_or_out_of_order(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", PROGRAM]))?;
    wait_until("the program to listen", PATIENCE, || Ok(ask(lab, "fill").ok()))?;
    ask(lab, "take")?;
    let expected = taken_after(lab, || Ok(()))?;
    let again = differences(&expected, &taken_after(lab, || Ok(()))?);
    ensure!(again.is_empty(), "without a move: {again:#?}");

    let mut wrong = Vec::new();
    let mut check = |when: &str, found: &Found| {
        wrong.extend(differences(&expected, found).into_iter().map(|difference| format!("{when}: {difference}")));
    };
    // It tells what a move would be refused for.
    let plan = || {
        let planned = lab.exec("a", &["tranship", "plan", NAME, "--to", "b"])?;
        ensure!(matches!(planned.status.code(), Some(0 | 3)), "{planned:?}");
        Ok(())
    };
    check("after a plan", &taken_after(lab, plan)?);
    for failure in FAILURES {
        let node = if failure.starts_with("source") { "a" } else { "b" };
        restart_agent(lab, node, failure)?;
        let fails = || {
            let error = moved(lab)?;
            ensure!(error.contains("injected fault") || error.contains("the destination"), "{failure}: {error}");
            Ok(())
        };
        let mut found = taken_after(lab, fails)?;
        if !["precopy", "freeze"].iter().any(|step| failure.contains(step)) {
            found.remove(MARKED);
        }
        check(failure, &found);
        restart_agent(lab, node, "")?;
    }
    let succeeds = || {
        let error = moved(lab)?;
        ensure!(error.is_empty(), "{error}");
        Ok(())
    };
    let moved = taken_after(lab, succeeds)?;
    ensure!(exactly_one_runs(lab, NAME)? == "b");
    let kept: Found = moved.into_iter().filter(|(kind, _)| !CHANGED.contains(&kind.as_str())).collect();
    check("after a move", &kept);
    ensure!(wrong.is_empty(), "{wrong:#?}");
    remove(lab, NAME)
}
