//! Compressed pages come out as they were, `auto` finds out where they are worth it, and where the destination cannot take
//! memory its reason reaches the user.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    Moving, Stage, Torturer, exactly_one_runs, move_with, nothing_left, remove, restart_agent, scenarios, send, state,
    wait_until,
};
use tranship_lab::{Lab, Redis, RunOptions, redis_command};
use tranship_types::{Compressed, Mode, Report};

const NAME: &str = "packed";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 22);
const KEYS: u64 = 500_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Moves it, and says how much of its memory was compressed with either codec.
fn moved(lab: &Lab, (from, to): (&str, &str), mode: &str, compress: &str) -> Result<(Report, Compressed, Compressed)> {
    let report = move_with(lab, from, NAME, to, &["--mode", mode, "--compress", compress])
        .with_context(|| format!("{from} → {to}, mode {mode}, --compress {compress}"))?;
    ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
    nothing_left(lab, from, NAME)?;
    let (lz4, zstd) = (report.progress.lz4, report.progress.zstd);
    eprintln!(
        "{from} → {to}, mode {mode}, --compress {compress}: {} bytes on the wire, {lz4:?} with lz4, {zstd:?} with zstd",
        report.progress.wire_bytes
    );
    Ok((report, lz4, zstd))
}

fn every_key_arrives_with_each_codec(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let before = redis.digest()?;
    for (n, (mode, compress)) in
        [("precopy", "lz4"), ("hybrid", "zstd"), ("cold", "zstd"), ("postcopy", "lz4"), ("precopy", "off")]
            .into_iter()
            .enumerate()
    {
        let way = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let (report, lz4, zstd) = moved(lab, way, mode, compress)?;
        let (memory, wire) = (report.progress.memory_bytes, report.progress.wire_bytes);
        let (used, unused) = if compress == "lz4" { (lz4, zstd) } else { (zstd, lz4) };
        ensure!(unused == Compressed::default(), "{unused:?} with a codec that was not asked for");
        if compress == "off" {
            ensure!(used == Compressed::default() && wire > memory / 2, "{used:?}, {wire} of {memory} bytes");
        } else {
            ensure!(used.page_bytes > memory / 2 && used.wire_bytes < used.page_bytes / 3, "{used:?} of {memory}");
            ensure!(wire < memory / 2, "{wire} bytes on the wire for {memory} bytes of memory");
        }
        ensure!(redis.digest()? == before, "the keys are others than before");
    }
    remove(lab, NAME)
}

fn no_page_is_ever_wrong(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut torturer = Torturer::start(lab, "a", NAME, IP, &["--seed=5".to_owned()])?;
    torturer.goes_on(500)?;
    for (n, (mode, compress)) in
        [("precopy", "zstd"), ("hybrid", "lz4"), ("postcopy", "zstd"), ("cold", "lz4")].into_iter().enumerate()
    {
        let way = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let (_, lz4, zstd) = moved(lab, way, mode, compress)?;
        ensure!(lz4.page_bytes + zstd.page_bytes > 0, "nothing was compressed");
        torturer.goes_on(500).with_context(|| format!("after move {n}, mode {mode}, --compress {compress}"))?;
    }
    remove(lab, NAME)
}

/// Whether the link is the bottleneck on a fast one depends on what else this machine does; a slow one always is.
fn auto_compresses_what_gets_smaller_over_a_slow_link(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for node in ["a", "b"] {
        let slow =
            ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "256k", "latency", "50ms"];
        lab.check(node, &slow)?;
    }
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, Duration::from_secs(10))?.populate(KEYS, "key", 100)?;
    let (report, lz4, zstd) = moved(lab, ("a", "b"), "precopy", "auto")?;
    let (memory, wire) = (report.progress.memory_bytes, report.progress.wire_bytes);
    ensure!(lz4.page_bytes + zstd.page_bytes > memory / 4, "{lz4:?} and {zstd:?} of {memory}");
    ensure!(wire < memory * 3 / 4, "{wire} bytes on the wire for {memory} bytes of memory");
    remove(lab, NAME)?;

    lab.run(
        "a",
        NAME,
        &RunOptions::new(IP, ["sh", "-c", "dd if=/dev/urandom bs=64M count=1 iflag=fullblock | sleep 1000000"]),
    )?;
    wait_for_dd(lab, 60 << 10)?;
    let (report, lz4, zstd) = moved(lab, ("a", "b"), "precopy", "auto")?;
    let memory = report.progress.memory_bytes;
    ensure!(lz4.page_bytes + zstd.page_bytes < memory / 10, "{lz4:?} and {zstd:?} of {memory} bytes of noise");
    let named = report.parts.iter().find(|part| part.name == "memory: all named").context("nothing was named")?;
    // Sockets take 16 MB at once, for which this link needs more than half a second.
    ensure!(named.ms < 200.0, "the container was frozen before the last round had arrived: {named:?}");
    for node in ["a", "b"] {
        lab.check(node, &["tc", "qdisc", "del", "dev", "eth0", "root"])?;
    }
    remove(lab, NAME)
}

/// Waits until the container's `dd` has so many KiB of memory.
fn wait_for_dd(lab: &Lab, kib: u64) -> Result<()> {
    let script = "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = dd ] && grep VmRSS $p/status; done";
    wait_until("dd to have its memory", PATIENCE, || {
        let found = lab.exec("a", &["runc", "exec", NAME, "sh", "-c", script])?;
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        let has: u64 = text.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok((has >= kib).then_some(()))
    })
}

/// A container that grows by more than anybody could have foreseen, after the destination has made room for it.
fn the_destinations_reason_reaches_the_user(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (mode, held_at) in [(Mode::Precopy, "source.precopy.before.hold"), (Mode::Cold, "source.freeze.before.hold")] {
        let script = "while ! test -e /tmp/go; do sleep 0.1; done; \
                      yes | dd bs=1200M count=1 iflag=fullblock | sleep 1000000";
        lab.run("a", NAME, &RunOptions::new(IP, ["sh", "-c", script]))?;
        restart_agent(lab, "a", held_at)?;
        let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
        let moving = Moving::begin(lab, NAME, "a", "b", mode)?;
        wait_until("the agent to be held", Duration::from_secs(20), || Ok((state(agent) == Some('T')).then_some(())))?;
        lab.check("a", &["runc", "exec", NAME, "touch", "/tmp/go"])?;
        wait_for_dd(lab, 1190 << 10)?;
        send(Signal::SIGCONT, agent)?;
        let ended = moving.end()?;
        let error = ended.error();
        eprintln!("{mode}: {error}");
        ensure!(!ended.success, "the container was moved");
        ensure!(error.contains("the page store of") && error.contains("(on node b)"), "the user is told: {error}");
        ensure!(exactly_one_runs(lab, NAME)? == "a", "{NAME} does not run on a");
        nothing_left(lab, "b", NAME)?;
        remove(lab, NAME)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("every_key_arrives_with_each_codec", every_key_arrives_with_each_codec),
        ("no_page_is_ever_wrong", no_page_is_ever_wrong),
        ("auto_compresses_what_gets_smaller_over_a_slow_link", auto_compresses_what_gets_smaller_over_a_slow_link),
        ("the_destinations_reason_reaches_the_user", the_destinations_reason_reaches_the_user),
    ])
}
