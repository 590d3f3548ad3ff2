//! Each container moves for itself, in order.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::GroupPlan;
use tranship_e2e::{Stage, connection_alive, exactly_one_runs, nothing_left};
use tranship_lab::{CounterClient, Lab, REDIS_PORT};
use tranship_types::{BlockerKind, MemberOutcome, Outcome};

use crate::chain::{
    ASIDE, CHAIN, CHAIN_FILE, all_moved, connects, frozen, member, move_group, started, still_connected, tidy, write,
};

pub fn connected_containers_move_in_order_and_stay_connected(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let mut counter =
        CounterClient::start(lab, (CHAIN[0].1, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let before = connects(&mut redis)?;

    let file = write(lab, "a", CHAIN_FILE)?;
    let (status, report, said) = move_group(lab, "a", &[&file])?;
    let report = all_moved(report, status, &said, 4)?;
    connection_alive(&mut counter)?;
    for (name, _) in CHAIN.iter().chain([&ASIDE]) {
        ensure!(exactly_one_runs(lab, name)? == "b", "{name} is not on b");
        nothing_left(lab, "a", name)?;
    }
    // The stages of different moves have overlapped.
    let (db, app) = (member(&report, "shop-db")?, member(&report, "shop-app")?);
    ensure!(app.spans[0].start_ms < frozen(db)?.0, "nothing of {app:?} was done before {db:?} was frozen");

    // And back: found by Compose's labels, which say the same, one after the other.
    let (status, report, said) =
        move_group(lab, "b", &["--compose-project", "shop", "--to", "a", "--sequential", "--mode", "precopy"])?;
    let report = all_moved(report, status, &said, 3)?;
    let names: Vec<_> = report.members.iter().map(|m| (m.container.as_str(), m.level)).collect();
    ensure!(names == [("shop-db", 0), ("shop-app", 1), ("shop-web", 2)], "{names:?}");
    for pair in report.members.windows(2) {
        let end = pair[0].spans.last().and_then(|s| Some(s.start_ms + s.ms?)).context("no end")?;
        ensure!(end <= pair[1].spans[0].start_ms, "{pair:?} overlap");
    }

    connection_alive(&mut counter)?;
    still_connected(counter, &mut redis, &before)?;
    let status = lab.check("b", &["tranship", "status", report.id.as_str()]);
    ensure!(status.is_ok(), "node b, which the group has left, does not know it: {status:?}");
    tidy(lab)
}

pub fn one_that_fails_stops_what_depends_on_it_and_nothing_else(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    // Somebody has the name there.
    lab.check("b", &["ip", "netns", "add", "shop-app"])?;
    let file = write(lab, "a", CHAIN_FILE)?;
    let (status, report, said) = move_group(lab, "a", &[&file])?;
    lab.check("b", &["ip", "netns", "delete", "shop-app"])?;
    let report = report.with_context(|| said.clone())?;
    ensure!(status == 1 && report.outcome == Outcome::Failed, "{status}: {said}");
    ensure!(said.contains("2 of 4 containers were not moved"), "{said}");
    for (name, outcome, node, word) in [
        ("shop-db", MemberOutcome::Moved, "b", ""),
        ("aside", MemberOutcome::Moved, "b", ""),
        ("shop-app", MemberOutcome::Failed, "a", "network namespace"),
        ("shop-web", MemberOutcome::Skipped, "a", "shop-app, which is to move before it, has not moved"),
    ] {
        let own = member(&report, name)?;
        ensure!(own.outcome == outcome && own.error.as_deref().unwrap_or_default().contains(word), "{own:?}");
        ensure!(exactly_one_runs(lab, name)? == node, "{name} is not on {node}");
    }
    // Those that are left can be moved now that the name is free.
    let left = write(lab, "a", "containers:\n  shop-web: {depends_on: [shop-app]}\n  shop-app:\n")?;
    let (status, report, said) = move_group(lab, "a", &[&left, "--to", "b"])?;
    all_moved(report, status, &said, 2)?;
    tidy(lab)
}

pub fn wrong_groups_are_refused_before_anything_is_touched(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    let history = || lab.check("a", &["tranship", "history", "--json"]);
    let before = history()?;
    let refused = |text: &str, more: &[&str], expected: i32, word: &str| -> Result<()> {
        let file = write(lab, "a", text)?;
        let (status, report, said) = move_group(lab, "a", &[&[file.as_str()], more].concat())?;
        ensure!(status == expected && report.is_none() && said.contains(word), "{text}: {status}, {said}");
        Ok(())
    };
    let circle = "containers:\n  shop-db: {depends_on: [shop-web]}\n  shop-web: {depends_on: [shop-db]}\n";
    refused(circle, &["--to", "b"], 2, "shop-db → shop-web → shop-db depend on each other in a circle")?;
    refused("containers:\n  shop-db: {depends_on: [shop-web]}\n", &["--to", "b"], 2, "which is not in the group")?;
    refused("containers:\n  shop-db:\n", &[], 2, "shop-db has no destination")?;
    refused("containers:\n  shop-db:\n  shop-db:\n", &["--to", "b"], 2, "shop-db")?;
    refused("containers:\n  shop-db:\n", &["--to", "b", "--map", "other=b"], 2, "other, which is not in the group")?;
    refused("containers:\n  shop-db:\n  nobody:\n", &["--to", "b"], 3, "nobody")?;
    refused("containers:\n  shop-db: {to: z}\n", &["--to", "b"], 3, "no node z")?;
    let (status, _, said) = move_group(lab, "a", &["--label", "no=such", "--to", "b"])?;
    ensure!(status == 3 && said.contains("no running container on node a has no=such"), "{status}: {said}");
    foretold(lab)?;
    for (name, _) in CHAIN {
        ensure!(exactly_one_runs(lab, name)? == "a", "{name} was moved");
    }
    ensure!(history()? == before, "something was begun");
    tidy(lab)
}

/// What a group's moves would take is told of each, in their order; one that cannot move keeps nobody from being looked at.
fn foretold(lab: &Lab) -> Result<()> {
    let file = write(lab, "a", "containers:\n  shop-web: {depends_on: [shop-db]}\n  shop-db:\n  shop-app: {to: z}\n")?;
    let output = lab.exec("a", &["tranship", "move-group", &file, "--to", "b", "--dry-run", "--json"])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.code() == Some(3), "{}: {said}", output.status);
    let plan: GroupPlan = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
    let place =
        |name: &str| plan.members.iter().position(|m| m.container == name).with_context(|| format!("{name}: {said}"));
    let (db, web, app) = (place("shop-db")?, place("shop-web")?, place("shop-app")?);
    ensure!(db < web && plan.members[web].after == ["shop-db"] && plan.members.len() == 3, "{said}");
    for member in [db, web].map(|at| &plan.members[at]) {
        let seen = member.plan.as_ref().and_then(|plan| plan.prediction.as_ref());
        ensure!(member.blockers.is_empty() && seen.is_some_and(|seen| seen.total_ms > 0.0), "{member:?}");
    }
    let blockers = &plan.members[app].blockers;
    ensure!(blockers.len() == 1 && blockers[0].kind == BlockerKind::NoSuchNode, "{blockers:?}");
    Ok(())
}
