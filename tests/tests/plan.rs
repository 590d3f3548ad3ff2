//! `tranship plan`: what it foretells is what then happens, and it leaves no trace in the container; and what is seen of a move
//! while it happens.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tranship_api::Plan;
use tranship_e2e::{Stage, exactly_one_runs, remove, scenarios, wait_until};
use tranship_lab::{Lab, Redis, RunOptions, redis_command};
use tranship_types::{Outcome, Report};

const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 12);
const KEYS: u64 = 300_000;
/// Pairs of a prediction and the move after it; their median counts.
const PAIRS: usize = 5;
/// How often times are measured until they agree.
const ATTEMPTS: usize = 3;
/// How far a prediction may be off.
const OFF: f64 = 0.3;
/// What two cores that also run both nodes and the client are allowed to add to a time, in ms.
const NOISE_MS: f64 = 60.0;
/// SETs a second of the busy Redis.
const SETS: u64 = 4000;

fn started(lab: &Lab) -> Result<Redis> {
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    Ok(redis)
}

fn plan(lab: &Lab, from: &str, to: &str, more: &[&str]) -> Result<(i32, Value)> {
    let command = [&["tranship", "plan", NAME, "--to", to, "--json"], more].concat();
    let output = lab.exec(from, &command)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = serde_json::from_str(&text).with_context(|| format!("{text:?} of {command:?}"))?;
    Ok((output.status.code().unwrap_or(-1), value))
}

fn moved(lab: &Lab, from: &str, to: &str, mode: &str) -> Result<Report> {
    let value = lab.check(from, &["tranship", "move", NAME, "--to", to, "--mode", mode, "--json"])?;
    let report: Report = serde_json::from_str(&value).context("the report")?;
    ensure!(report.outcome == Outcome::Moved, "{report:?}");
    Ok(report)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Holds what was foretold against what happened, pair by pair, and judges by the medians. A plan measures a machine that may be
/// less busy than the one on which the move then runs, so that times are measured again, twice, where they do not agree.
fn foretold_and_seen(lab: &Lab, mode: &str) -> Result<()> {
    let mut judged = Ok(());
    for _ in 0..ATTEMPTS {
        let [bytes, memory, blackout, total] = foretold_and_happened(lab, mode)?;
        agree(mode, "bytes", bytes, 0.0)?;
        agree(mode, "memory needed", memory, 0.0)?;
        judged = agree(mode, "blackout", blackout, NOISE_MS).and_then(|()| agree(mode, "total", total, NOISE_MS * 5.0));
        if judged.is_ok() {
            break;
        }
    }
    judged
}

fn agree(mode: &str, what: &str, (foretold, happened): (f64, f64), noise: f64) -> Result<()> {
    let off = (foretold - happened).abs();
    ensure!(off <= happened * OFF + noise, "{what}: {foretold:.0} was foretold, {happened:.0} happened ({mode})");
    Ok(())
}

/// What was foretold and what happened of bytes, memory needed, blackout and total (ms), as medians of some plans and moves.
fn foretold_and_happened(lab: &Lab, mode: &str) -> Result<[(f64, f64); 4]> {
    let mut numbers: [(Vec<f64>, Vec<f64>); 4] = Default::default();
    for n in 1..=PAIRS {
        let from = exactly_one_runs(lab, NAME)?;
        let to = if from == "a" { "b" } else { "a" };
        let (status, value) = plan(lab, &from, to, &["--mode", mode, "--sample", "1s"])?;
        ensure!(status == 0, "plan {n}: status {status}, {value}");
        let plan: Plan = serde_json::from_value(value)?;
        let seen = plan.prediction.with_context(|| format!("plan {n} has no prediction: {:?}", plan.notes))?;
        let report = moved(lab, &from, to, mode)?;
        ensure!(seen.mode == report.mode_taken.unwrap_or(report.mode), "{} was foretold, {report:?}", seen.mode);
        let (blackout, total) = (report.blackout_ms.unwrap_or_default(), report.total_ms.unwrap_or_default());
        let pairs = [
            (seen.bytes as f64, report.progress.moved_bytes as f64),
            (seen.destination_bytes as f64, report.destination_extra_bytes as f64),
            (seen.blackout_ms, blackout),
            (seen.total_ms, total),
        ];
        eprintln!(
            "{mode} {n}: {} rounds foretold, {} seen; {:.0} and {:.0} MB, blackout {:.0} and {blackout:.0} ms, total {:.0} and {total:.0} ms",
            seen.rounds.len(),
            report.rounds.len(),
            pairs[0].0 / 1e6,
            pairs[0].1 / 1e6,
            seen.blackout_ms,
            seen.total_ms,
        );
        for (number, (foretold, happened)) in numbers.iter_mut().zip(pairs) {
            number.0.push(foretold);
            number.1.push(happened);
        }
    }
    Ok(numbers.map(|(foretold, happened)| (median(foretold), median(happened))))
}

fn an_idle_redis_moves_as_foretold(stage: &mut Stage) -> Result<()> {
    started(&stage.lab)?;
    foretold_and_seen(&stage.lab, "precopy")?;
    foretold_and_seen(&stage.lab, "cold")?;
    remove(&stage.lab, NAME)
}

/// `move --dry-run` and `plan` of a container at rest foretell the same blackout, before its first move and after some.
fn a_dry_run_agrees_with_a_plan(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    for (mode, round) in [("auto", 0), ("cold", 0), ("auto", 1)] {
        if round > 0 {
            moved(lab, "a", "b", mode)?;
            moved(lab, "b", "a", mode)?;
        }
        let (_, planned) = plan(lab, "a", "b", &["--mode", mode])?;
        let dry = lab.check("a", &["tranship", "move", NAME, "--to", "b", "--mode", mode, "--dry-run", "--json"])?;
        let dry: Value = serde_json::from_str(&dry).context("the dry run")?;
        let blackout =
            |of: &Value| of["estimated_blackout_ms"].as_f64().with_context(|| format!("no blackout in {of}"));
        let (planned, dry) = (blackout(&planned)?, blackout(&dry)?);
        let apart = (planned - dry).abs();
        // The plan has measured the link, which counts where memory is sent in the freeze.
        let allowed = if mode == "cold" { 0.7 * planned } else { 0.05 * planned };
        ensure!(apart <= allowed, "{mode}: a plan foretells {planned} ms, a dry run {dry} ms");
    }
    remove(lab, NAME)
}

fn a_redis_under_sets_moves_as_foretold(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<u64> {
            let (start, mut sets) = (Instant::now(), 0u64);
            while !stop.load(Ordering::Relaxed) {
                let due = (start.elapsed().as_secs_f64() * SETS as f64) as u64;
                while sets < due && !stop.load(Ordering::Relaxed) {
                    // Spread over all keys without a pattern that memory would like.
                    let key = format!("key:{}", sets.wrapping_mul(0x9e37_79b9_7f4a_7c15) % KEYS);
                    redis.call(&["SET", &key, &"x".repeat(100)])?;
                    sets += 1;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(sets)
        });
        let judged = foretold_and_seen(lab, "precopy");
        stop.store(true, Ordering::Relaxed);
        let sets = writer.join().expect("the writer does not panic")?;
        ensure!(sets > 0, "nothing was written");
        judged
    })?;
    remove(lab, NAME)
}

/// What could be seen of a watch in a process: descriptors, mappings, flags of mappings, a tracer.
fn traces(lab: &Lab) -> Result<(usize, usize, usize, String)> {
    let list: Value = serde_json::from_str(&lab.check("a", &["tranship", "ls", "--json"])?)?;
    let pid = list[0]["pid"].as_u64().with_context(|| format!("no pid in {list}"))?;
    let read = |file: &str| lab.check("a", &["cat", &format!("/proc/{pid}/{file}")]);
    let (maps, smaps, status) = (read("maps")?, read("smaps")?, read("status")?);
    let watched = smaps.lines().filter(|l| l.starts_with("VmFlags:") && l.split(' ').any(|f| f == "uw" || f == "um"));
    let tracer = status.lines().find(|l| l.starts_with("TracerPid")).unwrap_or_default().to_owned();
    let descriptors = lab.check("a", &["ls", &format!("/proc/{pid}/fd")])?;
    Ok((descriptors.lines().count(), maps.lines().count(), watched.count(), tracer))
}

fn a_plan_leaves_no_trace(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let (before, digest) = (traces(lab)?, redis.digest()?);
    for _ in 0..3 {
        ensure!(plan(lab, "a", "b", &["--mode", "precopy"])?.0 == 0);
    }
    let after = traces(lab)?;
    ensure!(before == after, "descriptors, mappings, watched ones, tracer were {before:?} and are {after:?}");
    ensure!(redis.digest()? == digest, "the data has changed");
    ensure!(exactly_one_runs(lab, NAME)? == "a");
    let left = lab.check("b", &["tranship", "history", "--json"])?;
    ensure!(left.trim() == "[]" || !left.contains("\"running\""), "{left}");
    remove(lab, NAME)
}

/// What is seen of a move while it lasts: a line each second, and in each more has arrived, also within a round.
fn progress_moves_within_a_round(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    drop(started(lab)?);
    let command =
        ["tranship", "move", NAME, "--to", "b", "--mode", "precopy", "--compress", "off", "--bandwidth", "100mbit"];
    let text = lab.check("a", &command)?;
    let amounts: Vec<_> = text
        .lines()
        .filter(|line| line.contains(" left of round 1"))
        .filter_map(|line| line.split_whitespace().nth(3)?.parse::<f64>().ok())
        .collect();
    ensure!(amounts.len() >= 2 && amounts.is_sorted_by(|before, after| before < after), "{amounts:?} in:\n{text}");
    ensure!(exactly_one_runs(lab, NAME)? == "b");
    remove(lab, NAME)
}

fn a_plan_lists_blockers_and_gives_way_to_nobody(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    let (status, value) = plan(lab, "a", "c", &[])?;
    ensure!(status == 3 && value["blockers"][0]["kind"] == "no-such-node", "{status}: {value}");
    ensure!(value.get("prediction").is_none(), "{value}");

    let (status, value) = plan(lab, "a", "b", &["--mode", "postcopy", "--safe"]).unwrap_or((2, Value::Null));
    ensure!(status == 2, "{status}: {value}");

    // While one is watching, a second watch would spoil both, and a move would begin with a watched container.
    let start = || lab.spawn("a", &["tranship", "plan", NAME, "--to", "b", "--sample", "60s", "--json"]);
    let mut long = start()?;
    let refused = wait_until("the refusal of a second plan", Duration::from_secs(30), || {
        if long.try_wait()?.is_some() {
            // It was itself refused, because of the short one.
            long = start()?;
        }
        let (status, value) = plan(lab, "a", "b", &["--sample", "100ms"])?;
        Ok((status == 3).then_some(value))
    });
    long.kill()?;
    long.wait()?;
    let message = refused?.to_string();
    if !message.contains("being watched for a plan") {
        bail!("{message}");
    }
    Ok(())
}

/// The lab's root filesystem is on a tmpfs, whose files are not the container's to take along.
fn a_root_on_a_tmpfs_is_no_content(stage: &mut Stage) -> Result<()> {
    const BALLAST: &str = "/run/ballast";
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["sleep", "1000"]))?;
    std::fs::write(BALLAST, vec![1; 64 << 20])?;
    let planned = plan(lab, "a", "b", &["--sample", "100ms"]);
    std::fs::remove_file(BALLAST)?;
    let (status, value) = planned?;
    let plan: Plan = serde_json::from_value(value)?;
    ensure!(status == 0 && plan.tmpfs_bytes < 32 << 20, "{status}: {} bytes of tmpfs", plan.tmpfs_bytes);
    remove(lab, NAME)
}

/// Of a container that was never moved a plan and a dry run know how many tasks it has. On a busy machine each costs more than foretold.
fn what_many_tasks_take_is_foretold(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let script = "import threading, time\nthreading.stack_size(65536)\n\
                  for _ in range(600): threading.Thread(target=time.sleep, args=(1e6,)).start()";
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", script].map(str::to_owned)))?;
    let shown: Plan = wait_until("all threads", Duration::from_secs(20), || {
        let plan: Plan = serde_json::from_value(plan(lab, "a", "b", &[])?.1)?;
        Ok(Some(plan).filter(|plan| plan.tasks > 600))
    })?;
    let dry = lab.check("a", &["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"])?;
    let dry: Plan = serde_json::from_str(&dry).context(dry)?;
    for plan in [&shown, &dry] {
        let words = "1 process in 1 level with 601 threads, and 0 that have ended";
        ensure!(plan.notes.iter().any(|note| note.contains(words)), "{:?}", plan.notes);
    }
    let foretold = shown.estimated_blackout_ms.context("no blackout is foretold")?;
    let seen = moved(lab, "a", "b", "auto")?.blackout_ms.context("no blackout")?;
    eprintln!("foretold {foretold:.0} ms, seen {seen:.0} ms");
    ensure!(foretold > 200.0 && foretold < 2.0 * seen && seen < 5.0 * foretold, "foretold {foretold}, seen {seen}");
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        // Before any move tells this node what a blackout takes.
        ("what_many_tasks_take_is_foretold", what_many_tasks_take_is_foretold),
        ("a_root_on_a_tmpfs_is_no_content", a_root_on_a_tmpfs_is_no_content),
        ("an_idle_redis_moves_as_foretold", an_idle_redis_moves_as_foretold),
        ("a_dry_run_agrees_with_a_plan", a_dry_run_agrees_with_a_plan),
        ("a_redis_under_sets_moves_as_foretold", a_redis_under_sets_moves_as_foretold),
        ("a_plan_leaves_no_trace", a_plan_leaves_no_trace),
        ("progress_moves_within_a_round", progress_moves_within_a_round),
        ("a_plan_lists_blockers_and_gives_way_to_nobody", a_plan_lists_blockers_and_gives_way_to_nobody),
    ])
}
