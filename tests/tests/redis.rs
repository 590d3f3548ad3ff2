//! A Redis that moves to and fro under a client which checks every reply on one connection.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, connection_alive, exactly_one_runs, move_container, nothing_left, remove, scenarios};
use tranship_lab::{CounterClient, REDIS_PORT, Redis, RunOptions, redis_command};

const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
const MOVES: usize = 20;
const KEYS: u64 = 100_000;

fn every_reply_is_right_over_twenty_moves_on_one_connection(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    counter.pause()?;
    let before = redis.verify_without("counter")?;
    counter.resume()?;

    let (mut from, mut to) = ("a", "b");
    let mut slowest: f64 = 0.0;
    for n in 1..=MOVES {
        counter.mark()?;
        let report = move_container(lab, from, NAME, to).with_context(|| format!("move {n}"))?;
        let seen = connection_alive(&mut counter).with_context(|| format!("after move {n}"))?;
        slowest = slowest.max(seen.since_mark.longest.ms);
        ensure!(exactly_one_runs(lab, NAME)? == to, "move {n} left the container where it was");
        nothing_left(lab, from, NAME).with_context(|| format!("after move {n}"))?;
        eprintln!(
            "move {n} {from} → {to}: client gap {:.0} ms, blackout {:.0} ms, total {:.0} ms",
            seen.since_mark.longest.ms,
            report.blackout_ms.unwrap_or_default(),
            report.total_ms.unwrap_or_default()
        );
        (from, to) = (to, from);
    }

    counter.pause()?;
    // This connection has been idle through all of the moves.
    let after = redis.verify_without("counter").context("on the connection that was idle")?;
    ensure!(after == before, "keys and checksum were {before:?} and are {after:?}");
    counter.resume()?;
    let last = counter.stop()?;
    ensure!(last.error.is_none() && last.same_connection, "the counter ended badly: {last:?}");
    ensure!(
        last.value == last.total.replies.cast_signed(),
        "{} replies, but the counter is {}",
        last.total.replies,
        last.value
    );
    eprintln!("{} replies, all right; the longest gap was {slowest:.0} ms", last.total.replies);
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[(
        "every_reply_is_right_over_twenty_moves_on_one_connection",
        every_reply_is_right_over_twenty_moves_on_one_connection,
    )])
}
