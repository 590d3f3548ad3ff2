//! All containers move, or none does.

use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Moving, Stage, connection_alive, exactly_one_runs, newest_group_report, nothing_left, remove, restart_agent,
    wait_until,
};
use tranship_lab::{CounterClient, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{GroupReport, MemberOutcome, Mode, Outcome, Phase, Report};

use crate::chain::{
    CHAIN, CHAIN_FILE, PATIENCE, connects, frozen, member, move_group, names, started, still_connected, tidy, write,
};

/// Those that others depend on were frozen after them and resumed before them, and nobody ran before a copy of everybody was
/// ready.
fn nested(report: &GroupReport) -> Result<()> {
    let held = report.members.iter().filter_map(|m| m.spans.iter().find(|s| s.phase == Phase::Ready));
    let last_held = held.map(|span| span.start_ms).fold(0.0, f64::max);
    for own in &report.members {
        let (begin, end) = frozen(own)?;
        ensure!(end >= last_held, "{} ran before all were ready: {report:?}", own.container);
        for before in &own.after {
            let other = frozen(member(report, before)?)?;
            ensure!(begin <= other.0 && other.1 <= end, "{} is not within that of {before}: {report:?}", own.container);
        }
    }
    Ok(())
}

pub fn all_move_together_and_stay_connected(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let mut counter =
        CounterClient::start(lab, (CHAIN[0].1, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let before = connects(&mut redis)?;
    let (mut from, mut to) = ("a", "b");
    for mode in ["auto", "precopy", "postcopy", "cold"] {
        let file = write(lab, from, CHAIN_FILE)?;
        let (status, report, said) = move_group(lab, from, &[&file, "--atomic", "--to", to, "--mode", mode])?;
        let report = report.with_context(|| said.clone())?;
        ensure!(status == 0 && report.outcome == Outcome::Moved, "{mode}: {status}: {said}");
        for own in &report.members {
            eprintln!("{mode}: {}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
        }
        nested(&report).context(mode)?;
        connection_alive(&mut counter).context(mode)?;
        for name in names() {
            ensure!(exactly_one_runs(lab, name)? == to, "{mode}: {name} is not on {to}");
            nothing_left(lab, from, name)?;
        }
        (from, to) = (to, from);
    }
    // In levels of their own for stopping.
    let file = write(lab, from, &format!("{CHAIN_FILE}stop_levels: [[shop-app], [aside, shop-db], [shop-web]]\n"))?;
    let (status, _, said) = move_group(lab, from, &[&file, "--to", to])?;
    ensure!(status == 2 && said.contains("levels for stopping have no meaning"), "{status}: {said}");
    let (status, report, said) = move_group(lab, from, &[&file, "--atomic", "--to", to])?;
    let report = report.with_context(|| said.clone())?;
    ensure!(status == 0 && report.outcome == Outcome::Moved, "{status}: {said}");
    let begin = |name: &str| Ok::<_, anyhow::Error>(frozen(member(&report, name)?)?.0);
    let (app, aside, db, web) = (begin("shop-app")?, begin("aside")?, begin("shop-db")?, begin("shop-web")?);
    ensure!(app < aside && app < db && aside < web && db < web, "{report:?}");
    still_connected(counter, &mut redis, &before)?;
    tidy(lab)
}

pub fn one_that_cannot_move_keeps_all_where_they_are(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let before = connects(&mut redis)?;
    // Somebody has the name there.
    lab.check("b", &["ip", "netns", "add", "shop-app"])?;
    let file = write(lab, "a", CHAIN_FILE)?;
    let (status, report, said) = move_group(lab, "a", &[&file, "--atomic"])?;
    lab.check("b", &["ip", "netns", "delete", "shop-app"])?;
    let report = report.with_context(|| said.clone())?;
    ensure!(status == 1 && report.outcome == Outcome::Failed, "{status}: {said}");
    ensure!(said.contains("4 of 4 containers were not moved"), "{said}");
    for own in &report.members {
        let (outcome, word) = match own.container.as_str() {
            "shop-app" => (MemberOutcome::Failed, "network namespace"),
            _ => (MemberOutcome::Skipped, "shop-app has not moved, and all of the group move or none does"),
        };
        ensure!(own.outcome == outcome && own.error.as_deref().unwrap_or_default().contains(word), "{own:?}");
        ensure!(own.blackout_ms.is_none(), "{} was frozen in vain", own.container);
        ensure!(exactly_one_runs(lab, &own.container)? == "a", "{} is not on a", own.container);
        nothing_left(lab, "b", &own.container)?;
    }
    ensure!(connects(&mut redis)? == before, "the replicas have connected anew");
    tidy(lab)
}

/// Another container is frozen, for long: the group, which has begun, freezes none of its containers before that one runs.
pub fn all_wait_for_freeze_slots(stage: &mut Stage) -> Result<()> {
    const OTHER: (&str, Ipv4Addr) = ("other", Ipv4Addr::new(10, 77, 0, 64));
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let before = connects(&mut redis)?;
    lab.run("a", OTHER.0, &RunOptions::new(OTHER.1, redis_command()))?;
    Redis::connect(lab, OTHER.1, PATIENCE)?;
    let counter = CounterClient::start(lab, (CHAIN[0].1, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    // Longer than preparations wait for a slot, and no longer than a slot counts.
    restart_agent(lab, "a", "source.transfer.before.delay-7000")?;
    let moving = Moving::begin(lab, OTHER.0, "a", "b", Mode::Cold)?;
    let is_frozen = || -> Result<bool> {
        let text = lab.check("a", &["tranship", "status", "--json"])?;
        let under_way: Vec<Report> = serde_json::from_str(text.trim())?;
        Ok(under_way.iter().any(|r| r.container == OTHER.0 && matches!(r.phase, Phase::Freeze | Phase::Transfer)))
    };
    wait_until("the other one to be frozen", PATIENCE, || Ok(is_frozen()?.then_some(())))?;
    let file = write(lab, "a", CHAIN_FILE)?;
    let mut client = lab.spawn("a", &["tranship", "move-group", &file, "--atomic"])?;
    let mut last_seen = SystemTime::now();
    wait_until("the other one to run", PATIENCE, || {
        let now = SystemTime::now();
        let frozen = is_frozen()?;
        last_seen = if frozen { now } else { last_seen };
        Ok((!frozen).then_some(()))
    })?;
    ensure!(moving.end()?.success, "the other one has not moved");
    let status = wait_until("the end of the group", 2 * PATIENCE, || Ok(client.try_wait()?))?;
    let report = newest_group_report(lab, "a")?;
    ensure!(status.success() && report.outcome == Outcome::Moved, "{report:?}");
    let last_seen =
        last_seen.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64() * 1e3 - report.started_unix_ms as f64;
    let begun = report.members.iter().flat_map(|own| &own.spans).map(|span| span.start_ms).fold(f64::MAX, f64::min);
    ensure!(begun < last_seen, "the group was begun at {begun}, after {last_seen}: it did not wait");
    for own in &report.members {
        let begin = frozen(own)?.0;
        ensure!(begin >= last_seen, "{} was frozen at {begin}, and another one until {last_seen}", own.container);
    }
    nested(&report)?;
    still_connected(counter, &mut redis, &before)?;
    remove(lab, OTHER.0)?;
    tidy(lab)
}
