//! The command line as an operator uses it: from any node, for a whole node, and on the node that a container has come to.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use tranship_e2e::{
    Log, Stage, connection_alive, exactly_one_runs, move_container, remove, run_beside, scenarios, send, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, RunOptions, redis_command};
use tranship_types::{Mode, Report};

const NAME: &str = "operated";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 44);
const SLEEP: [&str; 2] = ["sleep", "3600"];
const CONFIGURATION: &str = "/etc/tranship/agent.toml";
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `tranship` on a node; its exit status, and what it prints on both streams.
fn tranship(lab: &Lab, node: &str, arguments: &[&str]) -> Result<(i32, String, String)> {
    let output = lab.exec(node, &[&["tranship"], arguments].concat())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code().context("tranship was killed")?, text(&output.stdout), text(&output.stderr)))
}

/// The same, which must end well; the JSON that it prints.
fn done(lab: &Lab, node: &str, arguments: &[&str]) -> Result<Value> {
    let (status, printed, said) = tranship(lab, node, arguments)?;
    ensure!(status == 0, "{arguments:?} ended with {status}: {printed}{said}");
    serde_json::from_str(&printed).with_context(|| format!("{arguments:?} printed {printed}"))
}

/// The destination's report has mode, blackout and parts as the source's has them.
fn both_nodes_have_the_account(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let report = move_container(lab, "a", NAME, "b")?;
    let there = wait_until("the destination to have the account", PATIENCE, || {
        let there: Report = serde_json::from_value(done(lab, "b", &["status", NAME, "--json"])?)?;
        Ok(there.blackout_ms.is_some().then_some(there))
    })?;
    ensure!(there.id == report.id && there.blackout_ms == report.blackout_ms, "{there:?} is not {report:?}");
    ensure!(there.mode == Mode::Auto && there.mode_taken == report.mode_taken, "{there:?} is not {report:?}");
    let names: Vec<&str> = there.parts.iter().map(|part| part.name.as_str()).collect();
    ensure!(["freeze", "skeleton: restore", "resume"].iter().all(|name| names.contains(name)), "{names:?}");
    let (status, timing, said) = tranship(lab, "b", &["status", NAME, "--timing"])?;
    ensure!(status == 0 && timing.contains("restore") && timing.contains("blackout"), "{timing}{said}");
    let blackout = format!("{:.1} ms", report.blackout_ms.context("no blackout")?);
    let (_, history, _) = tranship(lab, "b", &["history", "-n", "1", "--container", NAME])?;
    ensure!(history.contains(&blackout), "{blackout} is not in {history}");
    ensure!(done(lab, "b", &["history", "--container", "another", "--json"])? == Value::Array(Vec::new()));
    remove(lab, NAME)
}

/// Every command works for another node, if that one allows it.
fn a_node_is_controlled_from_another(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let listed = done(lab, "b", &["ls", "--node", "a", "--json"])?;
    ensure!(listed[0]["name"] == NAME, "{listed}");
    ensure!(done(lab, "b", &["ls", "--json"])?.as_array().is_some_and(Vec::is_empty));
    let plan = done(lab, "b", &["move", NAME, "--from", "a", "--to", "b", "--dry-run", "--json"])?;
    ensure!(plan["from"] == "a" && plan["blockers"].as_array().is_some_and(Vec::is_empty), "{plan}");
    let moved = done(lab, "b", &["move", NAME, "--from", "a", "--to", "b", "--json"])?;
    ensure!(moved["outcome"] == "moved" && exactly_one_runs(lab, NAME)? == "b", "{moved}");
    // The node itself may be named.
    let back = done(lab, "b", &["move", NAME, "--from", "b", "--to", "a", "--output", "json"])?;
    ensure!(back["schema_version"] == 1 && back["data"]["outcome"] == "moved", "{back}");

    let right = fs::read_to_string(lab.path("a", CONFIGURATION)?)?;
    reload(lab, "a", &right.replace("control = true\n", ""))?;
    for arguments in [&["move", NAME, "--from", "a", "--to", "b", "--json"][..], &["ls", "--node", "a", "--json"]] {
        let (status, printed, said) = tranship(lab, "b", arguments)?;
        let error: Value = serde_json::from_str(&printed)?;
        ensure!(status == if arguments[0] == "move" { 3 } else { 1 }, "{status}: {printed}{said}");
        ensure!(error["error"]["message"] == "node a does not let node b control it", "{printed}");
        ensure!(error["error"]["remedy"].as_str().is_some_and(|r| r.contains("control = true")), "{printed}");
    }
    ensure!(exactly_one_runs(lab, NAME)? == "a");
    reload(lab, "a", &right)?;
    let (status, _, said) = tranship(lab, "b", &["ls", "--node", "nowhere"])?;
    ensure!(status == 1 && said.contains("there is no node nowhere"), "{status}: {said}");
    remove(lab, NAME)
}

/// All that runs on a node goes, two at a time; what cannot go is listed and stays, and is tried again by the next command.
fn a_node_is_evacuated(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let names = ["first", "second", "third"];
    for (number, name) in names.iter().enumerate() {
        let ip = Ipv4Addr::new(10, 77, 0, 45 + u8::try_from(number)?);
        lab.run("a", name, &RunOptions::new(ip, SLEEP))?;
    }
    // Another container of that name is in the way of the third.
    lab.run("b", "third", &RunOptions::new(Ipv4Addr::new(10, 77, 0, 49), SLEEP))?;
    let (status, looked, said) = tranship(lab, "b", &["evacuate", "a", "--to", "b", "--dry-run"])?;
    ensure!(status == 3 && looked.contains("2 of 3 containers can be moved from a, 1 cannot"), "{looked}{said}");

    let (status, printed, said) = tranship(lab, "b", &["evacuate", "a", "--to", "b", "--json"])?;
    ensure!(status == 1, "{status}: {printed}{said}");
    let rows: Vec<Value> = serde_json::from_str(&printed)?;
    for row in &rows {
        let expected = if row["container"] == "third" { "blocked" } else { "moved" };
        ensure!(row["fate"] == expected, "{row}");
    }
    ensure!(rows.len() == 3 && exactly_one_runs(lab, "first")? == "b" && exactly_one_runs(lab, "second")? == "b");

    lab.check("b", &["runc", "delete", "-f", "third"])?;
    lab.check("b", &["ip", "netns", "delete", "third"])?;
    let (status, printed, said) = tranship(lab, "a", &["evacuate", "--to", "b"])?;
    ensure!(status == 0 && printed.contains("1 of 1 containers were moved from a"), "{status}: {printed}{said}");
    let (status, printed, _) = tranship(lab, "a", &["evacuate", "--to", "b"])?;
    ensure!(status == 0 && printed == "no containers on a\n", "{status}: {printed}");
    names.iter().try_for_each(|name| remove(lab, name))
}

/// Containers that share a network namespace leave a node together, or not at all.
fn what_belongs_together_leaves_together(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = Ipv4Addr::new(10, 77, 0, 48);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    lab.run("a", "alone", &RunOptions::new(Ipv4Addr::new(10, 77, 0, 47), SLEEP))?;
    run_beside(lab, NAME, "side", &SLEEP.map(str::to_owned), |_| {})?;
    let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;

    let (status, looked, said) = tranship(lab, "a", &["evacuate", "--to", "b", "--dry-run"])?;
    ensure!(status == 0 && looked.contains("3 of 3 containers can be moved from a"), "{looked}{said}");
    ensure!(looked.contains("TOGETHER WITH"), "{looked}");
    // One of them cannot go, and so both stay.
    lab.check("b", &["mkdir", "-p", "/run/containers"])?;
    lab.run("b", "side", &RunOptions::new(Ipv4Addr::new(10, 77, 0, 49), SLEEP))?;
    let rows = |(status, printed, said): (i32, String, String), expected: i32| -> Result<Vec<Value>> {
        ensure!(status == expected, "{status}: {printed}{said}");
        serde_json::from_str(&printed).with_context(|| printed.clone())
    };
    let stay = rows(tranship(lab, "a", &["evacuate", "--to", "b", "--json"])?, 1)?;
    for row in &stay {
        let (fate, words) = match row["container"].as_str().unwrap_or_default() {
            "alone" => ("moved", ""),
            "side" => ("blocked", "node b has a container side already"),
            _ => ("failed", "container side has not moved"),
        };
        let why = row["error"]["message"].as_str().unwrap_or_default();
        ensure!(row["fate"] == fate && why.contains(words), "{row}");
    }
    ensure!(stay.len() == 3 && exactly_one_runs(lab, NAME)? == "a", "{stay:?}");
    connection_alive(&mut counter)?;

    lab.check("b", &["runc", "delete", "-f", "side"])?;
    lab.check("b", &["ip", "netns", "delete", "side"])?;
    let moved = rows(tranship(lab, "b", &["evacuate", "a", "--to", "b", "--json"])?, 0)?;
    for row in &moved {
        ensure!(row["fate"] == "moved" && row["together_with"].as_array().is_some_and(|with| with.len() == 1), "{row}");
    }
    ensure!(moved.len() == 2 && exactly_one_runs(lab, NAME)? == "b" && exactly_one_runs(lab, "side")? == "b");
    connection_alive(&mut counter)?;
    drop(counter);
    lab.check("b", &["runc", "delete", "-f", "side"])?;
    [NAME, "alone"].iter().try_for_each(|name| remove(lab, name))
}

fn reload(lab: &Lab, node: &str, text: &str) -> Result<()> {
    let log = Log::mark(lab, node)?;
    fs::write(lab.path(node, CONFIGURATION)?, text)?;
    send(Signal::SIGHUP, lab.agent_pid(node)?.context("there is no agent")?)?;
    wait_until("the agent to have read its configuration", PATIENCE, || {
        Ok(log.text().contains("was read again").then_some(()))
    })
}

fn main() -> ExitCode {
    scenarios(&[
        ("both_nodes_have_the_account", both_nodes_have_the_account),
        ("a_node_is_controlled_from_another", a_node_is_controlled_from_another),
        ("a_node_is_evacuated", a_node_is_evacuated),
        ("what_belongs_together_leaves_together", what_belongs_together_leaves_together),
    ])
}
