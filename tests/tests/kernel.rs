//! The least that a kernel must do: a Redis moves there and back, and in every mode, under a client which checks every reply on one connection.
//! `scripts/test-vm` plays this under kernels of Debian's.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, connection_alive, copies, exactly_one_runs, move_with, nothing_left, remove, scenarios};
use tranship_lab::{CounterClient, REDIS_PORT, Redis, RunOptions, redis_command};

const NAME: &str = "kernel";
const KEYS: u64 = 20_000;

/// A profile as engines give their containers.
const PROFILE: &str = "tranship-lab-kernel";
const RULES: &str = "flags=(attach_disconnected,mediate_deleted) {
  network,
  capability,
  file,
  umount,
  signal (receive) peer=unconfined,
  signal (send,receive) peer=tranship-lab-kernel,
  ptrace (trace,read,tracedby,readby) peer=tranship-lab-kernel,
  deny mount,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,
  deny /sys/firmware/** rwklx,
}
";

/// Moves a Redis of this address to and fro, once in each of the modes. Before the first and after each, `check` looks at its processes.
fn moves(stage: &Stage, options: &RunOptions, modes: &[&str], check: impl Fn(u32) -> Result<()>) -> Result<()> {
    let (lab, ip) = (&stage.lab, options.ip);
    lab.run("a", NAME, options)?;
    let all = || copies(lab, NAME)?.iter().flat_map(|copy| &copy.pids).try_for_each(|pid| check(*pid));
    all()?;
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
        all().with_context(|| format!("after a move in mode {mode}"))?;
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

fn at(host: u8) -> RunOptions {
    RunOptions::new(Ipv4Addr::new(10, 77, 0, host), redis_command())
}

fn a_redis_on_a_macvlan_moves_there_and_back(stage: &mut Stage) -> Result<()> {
    moves(stage, &at(21), &["auto", "auto"], |_| Ok(()))
}

fn a_redis_on_a_bridge_moves_in_every_mode(stage: &mut Stage) -> Result<()> {
    moves(stage, &RunOptions { bridge: true, ..at(22) }, &["cold", "precopy", "postcopy", "hybrid"], |_| Ok(()))
}

fn a_container_that_apparmor_confines_moves_and_stays_confined(stage: &mut Stage) -> Result<()> {
    let is_on = |text: String| text.starts_with('Y');
    if !fs::read_to_string("/sys/module/apparmor/parameters/enabled").is_ok_and(is_on) {
        eprintln!("skipped: this kernel does not enforce profiles of AppArmor; `make test-vm` has kernels that do");
        return Ok(());
    }
    let load = "printf '%s' \"$0\" > /run/profile && apparmor_parser --replace --skip-cache /run/profile";
    stage.lab.check("a", &["sh", "-c", load, &format!("profile {PROFILE} {RULES}")])?;
    let options = RunOptions { apparmor: Some(PROFILE.into()), ..at(23) };
    moves(stage, &options, &["precopy", "postcopy"], |pid| {
        let label = fs::read_to_string(format!("/proc/{pid}/attr/current"))?;
        ensure!(label.trim_end() == format!("{PROFILE} (enforce)"), "process {pid} is confined as {label:?}");
        Ok(())
    })
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_redis_on_a_macvlan_moves_there_and_back", a_redis_on_a_macvlan_moves_there_and_back),
        ("a_redis_on_a_bridge_moves_in_every_mode", a_redis_on_a_bridge_moves_in_every_mode),
        (
            "a_container_that_apparmor_confines_moves_and_stays_confined",
            a_container_that_apparmor_confines_moves_and_stays_confined,
        ),
    ])
}
