//! The least that a kernel must do: a Redis moves there and back, and in every mode, under a client which checks every reply on one connection.
//! `scripts/test-vm` plays this under kernels of Debian's.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, connection_alive, exactly_one_runs, move_with, nothing_left, remove, scenarios};
use tranship_lab::{CounterClient, REDIS_PORT, Redis, RunOptions, redis_command};

const NAME: &str = "kernel";
const KEYS: u64 = 20_000;

/// Moves a Redis of this address to and fro, once in each of the modes.
fn moves(stage: &Stage, host: u8, bridge: bool, modes: &[&str]) -> Result<()> {
    let (lab, ip) = (&stage.lab, Ipv4Addr::new(10, 77, 0, host));
    lab.run("a", NAME, &RunOptions { bridge, ..RunOptions::new(ip, redis_command()) })?;
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(5))?;
    counter.pause()?;
    let before = redis.verify_without("counter")?;
    counter.resume()?;
    let (mut from, mut to) = ("a", "b");
    for mode in modes {
        let report = move_with(lab, from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        connection_alive(&mut counter).with_context(|| format!("after a move in mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "mode {mode} left the container where it was");
        nothing_left(lab, from, NAME).with_context(|| format!("after a move in mode {mode}"))?;
        let (blackout, total) = (report.blackout_ms.unwrap_or_default(), report.total_ms.unwrap_or_default());
        eprintln!("mode {mode}: blackout {blackout:.0} ms, total {total:.0} ms");
        (from, to) = (to, from);
    }
    counter.pause()?;
    let after = redis.verify_without("counter").context("on the connection that was idle")?;
    ensure!(after == before, "keys and checksum were {before:?} and are {after:?}");
    counter.resume()?;
    let last = counter.stop()?;
    ensure!(last.error.is_none() && last.same_connection, "the counter ended badly: {last:?}");
    remove(lab, NAME)
}

fn a_redis_on_a_macvlan_moves_there_and_back(stage: &mut Stage) -> Result<()> {
    moves(stage, 21, false, &["auto", "auto"])
}

fn a_redis_on_a_bridge_moves_in_every_mode(stage: &mut Stage) -> Result<()> {
    moves(stage, 22, true, &["cold", "precopy", "postcopy", "hybrid"])
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_redis_on_a_macvlan_moves_there_and_back", a_redis_on_a_macvlan_moves_there_and_back),
        ("a_redis_on_a_bridge_moves_in_every_mode", a_redis_on_a_bridge_moves_in_every_mode),
    ])
}
