//! What a container's cgroup counts and gives: memory that is no process's own (tmpfs, shared memory) is charged to it, as
//! before the move, and its share of the CPUs, which is lifted in the blackout, is its own again.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Guest, Moving, Stage, connection_alive, exactly_one_runs, has_limits, is_gone, is_version_2, limits, move_with,
    nothing_left, remove, restart_agent, scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, find_program, redis_command, report_of};
use tranship_types::{Mode, Outcome, Report};

const NAME: &str = "charged";
const PORT: u16 = 7003;
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that `memory-kinds` has of each kind.
const SOME: u64 = 24 << 20;
const KINDS: [&str; 4] = ["tmpfs", "anonymous", "memfd", "segment"];

fn run(lab: &Lab, host: u8) -> Result<Guest> {
    let ip = Ipv4Addr::new(10, 77, 0, host);
    let mut options = RunOptions::new(ip, [&["/opt/memory-kinds"], KINDS.as_slice()].concat());
    options.binds.push((find_program("memory-kinds")?, "/opt/memory-kinds".into()));
    options.memory = Some(512 << 20);
    lab.run("a", NAME, &options)?;
    let mut guest = Guest::connect(lab, ip, PORT)?;
    goes_on(&mut guest)?;
    Ok(guest)
}

fn goes_on(guest: &mut Guest) -> Result<()> {
    guest.lines(PATIENCE)?;
    for _ in 0..5 {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
    }
    Ok(())
}

/// The memory cgroup below which a node's containers are, in version 1 or 2 of cgroups.
fn parent(node: &str) -> PathBuf {
    let below = format!("tranship-lab/{node}");
    let first = Path::new("/sys/fs/cgroup/memory").join(&below);
    if first.exists() { first } else { Path::new("/sys/fs/cgroup").join(below) }
}

/// Bytes of files in memory and of shared memory that are charged to the container on a node.
fn charged(node: &str) -> Result<u64> {
    let path = parent(node).join(NAME).join("memory.stat");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let value = text.lines().find_map(|line| line.strip_prefix("shmem ")).context("no shmem in memory.stat")?;
    Ok(value.parse()?)
}

fn all_of_it_is_charged_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, 71)?;
    let before = charged("a")?;
    ensure!(before >= KINDS.len() as u64 * SOME, "{before} bytes are charged before the first move");
    for mode in ["auto", "cold", "precopy", "postcopy", "hybrid"] {
        let from = exactly_one_runs(lab, NAME)?;
        let to = if from == "a" { "b" } else { "a" };
        let report = move_with(lab, &from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        goes_on(&mut guest).with_context(|| format!("after a move in mode {mode}"))?;
        nothing_left(lab, &from, NAME)?;
        let after = charged(to)?;
        eprintln!("mode {mode}: {after} of {before} bytes, blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        ensure!(after.abs_diff(before) < before / 50, "mode {mode}: {after} bytes are charged, {before} before");
    }
    remove(lab, NAME)
}

fn a_limit_that_is_reached_on_the_destination_fails_the_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, 72)?;
    let limit = ["memory.limit_in_bytes", "memory.max"].map(|name| parent("b").join(name));
    let limit = limit.iter().find(|path| path.exists()).context("the node's cgroup has no limit")?;
    let unlimited = std::fs::read_to_string(limit)?;
    std::fs::write(limit, (2 * SOME).to_string())?;
    let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--mode", "precopy", "--json"]);
    let raised = if unlimited.trim() == "max" { "max" } else { "-1" };
    std::fs::write(limit, raised)?;
    let report: Report = serde_json::from_value(report_of(&output?.stdout)?)?;
    let error = report.error.unwrap_or_default();
    ensure!(report.outcome == Outcome::Failed && error.contains("memory limit"), "{:?}: {error}", report.outcome);
    ensure!(exactly_one_runs(lab, NAME)? == "a", "the container is not where it was");
    goes_on(&mut guest)?;
    nothing_left(lab, "b", NAME)?;
    move_with(lab, "a", NAME, "b", &[]).context("with the limit raised")?;
    goes_on(&mut guest)?;
    remove(lab, NAME)
}

/// A Redis with so little of the CPUs that a restore would take half a second: its client and its limits. `None` where cgroups have no
/// controllers.
fn with_a_small_share(lab: &Lab, host: u8) -> Result<Option<(CounterClient, String)>> {
    if !has_limits() {
        eprintln!("skipped: version 2 of cgroups has no controllers here");
        return Ok(None);
    }
    let ip = Ipv4Addr::new(10, 77, 0, host);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    lab.check("a", &["runc", "update", "--cpu-period", "100000", "--cpu-quota", "5000", "--cpu-share", "2", NAME])?;
    let small = limits_on(lab, "a")?;
    let expected = match is_version_2() {
        true => ["cpu.max 5000 100000\n", "cpu.weight 1\n"],
        false => ["cpu.cfs_quota_us 5000\n", "cpu.shares 2\n"],
    };
    ensure!(expected.iter().all(|line| small.contains(line)), "{small}");
    Ok(Some((CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(50))?, small)))
}

/// Its limits there.
fn limits_on(lab: &Lab, node: &str) -> Result<String> {
    let state: serde_json::Value = serde_json::from_str(&lab.check(node, &["runc", "state", NAME])?)?;
    limits(lab, node, &state["pid"].to_string())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn a_small_share_of_the_cpus_lengthens_no_blackout(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let Some((mut client, small)) = with_a_small_share(lab, 73)? else { return Ok(()) };
    let blackouts = || -> Result<f64> {
        let mut all = Vec::new();
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")] {
            let before = limits_on(lab, from)?;
            all.extend(move_with(lab, from, NAME, to, &[])?.blackout_ms);
            let after = limits_on(lab, to)?;
            ensure!(after == before, "on {from} it had\n{before}and on {to} it has\n{after}");
        }
        Ok(median(all))
    };
    let limited = blackouts()?;
    lab.check("a", &["runc", "update", "--cpu-period", "100000", "--cpu-quota", "-1", "--cpu-share", "1024", NAME])?;
    ensure!(limits_on(lab, "a")? != small, "it has its limit still");
    let free = blackouts()?;
    eprintln!("blackout with 0.05 of a CPU {limited:.0} ms, without a limit {free:.0} ms");
    ensure!(limited < 3.0 * free, "the blackout is {limited:.0} ms with a limit, and {free:.0} ms without");
    connection_alive(&mut client)?;
    drop(client);
    remove(lab, NAME)
}

fn its_share_of_the_cpus_is_given_back_when_a_move_fails(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let Some((mut client, small)) = with_a_small_share(lab, 74)? else { return Ok(()) };
    for (node, fault, at) in [
        ("b", "destination.restore.after.error", "a"),
        ("a", "source.freeze.after.error", "a"),
        ("a", "source.freeze.after.die", "a"),
        ("a", "source.transfer.after.die", "a"),
        ("b", "destination.restore.after.die", "a"),
        ("b", "destination.resume.after.die", "b"),
    ] {
        restart_agent(lab, node, fault)?;
        let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
        let moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
        if fault.ends_with("die") {
            wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
            lab.start_agent(node, &[])?;
        }
        drop(moving.end());
        let settled = || -> Result<bool> {
            let idle =
                |node: &str| -> Result<bool> { Ok(lab.check(node, &["tranship", "status", "--json"])?.trim() == "[]") };
            Ok(idle("a")? && idle("b")? && exactly_one_runs(lab, NAME).is_ok_and(|node| node == at))
        };
        wait_until("the move to be settled", PATIENCE, || Ok(settled()?.then_some(())))?;
        let now = limits_on(lab, at)?;
        ensure!(now == small, "after {fault} it has\n{now}and had\n{small}");
        connection_alive(&mut client).with_context(|| format!("after {fault}"))?;
        restart_agent(lab, node, "")?;
    }
    drop(client);
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_small_share_of_the_cpus_lengthens_no_blackout", a_small_share_of_the_cpus_lengthens_no_blackout),
        (
            "its_share_of_the_cpus_is_given_back_when_a_move_fails",
            its_share_of_the_cpus_is_given_back_when_a_move_fails,
        ),
        ("all_of_it_is_charged_in_every_mode", all_of_it_is_charged_in_every_mode),
        (
            "a_limit_that_is_reached_on_the_destination_fails_the_move",
            a_limit_that_is_reached_on_the_destination_fails_the_move,
        ),
    ])
}
