//! Moves with agents that find writes to memory in another way than the best of this kernel.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    MODES, Moving, Stage, Torturer, connection_alive, exactly_one_runs, quiet, remove, scenarios, track_by,
};
use tranship_lab::{CounterClient, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{Mode, Report};

const REDIS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 11);
const TORTURER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 61);
const KEYS: u64 = 100_000;
const STEPS: u64 = 300;

/// Checks that the report of a move in this mode says that writes were found by content hashes.
fn by_hash(report: Option<&Report>, mode: Mode) -> Result<()> {
    let ways = &report.context("no report")?.ways;
    ensure!(
        mode == Mode::Cold || ways.iter().any(|way| way == "memory: writes are found by hash"),
        "{mode}: the report says {ways:?}"
    );
    Ok(())
}

fn redis_moves_under_writes(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    track_by(lab, "hash")?;
    lab.run("a", "redis", &RunOptions::new(REDIS, redis_command()))?;
    let mut redis = Redis::connect(lab, REDIS, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let mut counter = CounterClient::start(lab, (REDIS, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    counter.pause()?;
    let before = redis.verify_without("counter")?;
    counter.resume()?;
    let (mut from, mut to) = ("a", "b");
    for mode in MODES {
        counter.mark()?;
        let ended = Moving::begin(lab, "redis", from, to, mode)?.end()?;
        ensure!(ended.success, "in mode {mode}: {}", ended.error());
        by_hash(ended.report.as_ref(), mode)?;
        let seen = connection_alive(&mut counter).with_context(|| format!("after mode {mode}"))?;
        ensure!(exactly_one_runs(lab, "redis")? == to, "mode {mode} left the container where it was");
        eprintln!("{mode}: client gap {:.0} ms", seen.since_mark.longest.ms);
        (from, to) = (to, from);
    }
    counter.pause()?;
    let after = redis.verify_without("counter")?;
    ensure!(after == before, "keys and checksum were {before:?} and are {after:?}");
    let last = counter.stop()?;
    ensure!(last.error.is_none() && last.same_connection, "the counter ended badly: {last:?}");
    remove(lab, "redis")
}

fn no_page_of_the_torturer_is_wrong(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    track_by(lab, "hash")?;
    let mut torturer = Torturer::start(lab, "a", "torture", TORTURER, &["--seed=5".to_owned()])?;
    torturer.goes_on(STEPS).context("before the first move")?;
    let (mut from, mut to) = ("a", "b");
    for mode in [Mode::Precopy, Mode::Hybrid, Mode::Precopy, Mode::Auto] {
        let ended = Moving::begin(lab, "torture", from, to, mode)?.end()?;
        let at = quiet(lab, "torture")?;
        ensure!(at == to, "in mode {mode}: {}", ended.error());
        by_hash(ended.report.as_ref(), mode)?;
        let line = torturer.goes_on(STEPS).with_context(|| format!("after mode {mode}"))?;
        eprintln!("{mode}: {} pages checked so far, none wrong", line.checks());
        (from, to) = (to, from);
    }
    remove(lab, "torture")
}

fn main() -> ExitCode {
    scenarios(&[
        ("redis_moves_under_writes", redis_moves_under_writes),
        ("no_page_of_the_torturer_is_wrong", no_page_of_the_torturer_is_wrong),
    ])
}
