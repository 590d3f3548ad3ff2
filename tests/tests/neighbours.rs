//! Who shares a container's namespaces is not harmed by its move: the move is refused before the freeze, by the neighbour's name.

use std::net::Ipv4Addr;
use std::process::{Child, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tranship_api::Plan;
use tranship_e2e::{
    DOCKER, Log, Managed, Moving, PODMAN, Stage, connection_alive, move_container, move_with, refused_move,
    refused_move_with, remove, run_beside, scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{BlockerKind, Mode, Outcome};

const NAME: &str = "web";
/// The neighbour of it.
const SIDE: &str = "side";
const SIDE_PORT: u16 = 6380;

/// A process in a node, killed on drop.
struct InNode(Child);

impl Drop for InNode {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn counter(lab: &Lab, ip: Ipv4Addr, port: u16) -> Result<CounterClient> {
    Ok(CounterClient::start(lab, (ip, port).into(), "counter", Duration::from_micros(500))?)
}

fn redis_at(port: u16) -> Vec<String> {
    redis_command()
        .into_iter()
        .map(|word| if word == REDIS_PORT.to_string() { port.to_string() } else { word })
        .collect()
}

fn init_of(lab: &Lab, name: &str) -> Result<String> {
    let state: Value = serde_json::from_str(&lab.check("a", &["runc", "state", name])?)?;
    Ok(state["pid"].to_string())
}

fn end_beside(lab: &Lab, name: &str) -> Result<()> {
    lab.check("a", &["runc", "delete", "--force", name])?;
    lab.check("a", &["rm", "-r", &format!("/run/containers/{name}")]).map(drop).map_err(Into::into)
}

/// Starts Redis as `web` on node a.
fn web(lab: &Lab, number: u8) -> Result<Ipv4Addr> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    Ok(ip)
}

/// Checks that a move and a dry run are refused, and that the first thing that is said has these words.
fn refused(lab: &Lab, name: &str, kind: BlockerKind, words: &[&str]) -> Result<()> {
    let dry_run = lab.exec("a", &["tranship", "move", name, "--to", "b", "--dry-run", "--json"])?;
    let plan: Plan = serde_json::from_slice(&dry_run.stdout)?;
    for blockers in [plan.blockers, refused_move(lab, "a", name, "b")?.blockers] {
        let first = blockers.first().context("no blocker")?;
        let missing: Vec<_> = words.iter().filter(|word| !first.to_string().contains(*word)).collect();
        ensure!(missing.is_empty() && first.kind == kind, "{missing:?} is not in {first:?}");
    }
    Ok(())
}

fn two_containers_of_runc_in_one_network_namespace_are_refused_one_by_one(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = web(lab, 70)?;
    run_beside(lab, NAME, SIDE, &redis_at(SIDE_PORT), |_| {})?;
    let mut own = counter(lab, ip, REDIS_PORT)?;
    let mut its = wait_until("the neighbour to listen", Duration::from_secs(10), || {
        Ok(lab.check("a", &["nsenter", "--net=/run/netns/web", "ss", "-Hltn"])?.contains(":6380").then_some(()))
    })
    .and_then(|()| counter(lab, ip, SIDE_PORT))?;
    refused(
        lab,
        NAME,
        BlockerKind::Network,
        &["(redis-server) of container side shares the network namespace", "stop"],
    )?;
    refused(lab, SIDE, BlockerKind::Network, &["of container web shares the network namespace of container side"])?;
    connection_alive(&mut own)?;
    connection_alive(&mut its).context("the neighbour's connection")?;
    drop(its);
    end_beside(lab, SIDE)?;
    move_container(lab, "a", NAME, "b").context("when it is alone")?;
    connection_alive(&mut own)?;
    drop(own);
    remove(lab, NAME)
}

fn every_kind_of_namespace_that_is_shared_is_named(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = web(lab, 71)?;
    let mut own = counter(lab, ip, REDIS_PORT)?;
    let pid = init_of(lab, NAME)?;
    let sleep: Vec<String> = ["sleep", "1000"].map(str::to_owned).into();
    for (kind, link, of_sentence) in [("pid", "pid", "PID"), ("ipc", "ipc", "IPC"), ("uts", "uts", "UTS")] {
        run_beside(lab, NAME, SIDE, &sleep, |config| {
            config["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "network"}, {"type": kind, "path": format!("/proc/{pid}/ns/{link}")}]);
            if kind != "uts" {
                config["hostname"] = Value::Null;
                config["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "uts"}));
            }
        })?;
        let words = format!("of container side shares the {of_sentence} namespace of container web");
        let found = refused(lab, NAME, BlockerKind::Process, &[&words]);
        end_beside(lab, SIDE)?;
        found?;
    }
    let enter = |options: &[&str]| -> Result<InNode> {
        let target = ["nsenter", "--target", &pid];
        Ok(InNode(lab.spawn("a", &[&target[..], options, &["sleep", "1000"]].concat())?))
    };
    for (option, words) in [
        ("--net", "(sleep) shares the network namespace of container web, and would lose it; end it"),
        ("--mount", "(sleep) shares the mount namespace"),
        ("--uts", "(sleep) shares the UTS namespace"),
    ] {
        let _entered = enter(&[option])?;
        let kind = if option == "--net" { BlockerKind::Network } else { BlockerKind::Process };
        wait_until("it to be refused", Duration::from_secs(10), || Ok(refused(lab, NAME, kind, &[words]).ok()))
            .with_context(|| format!("{option}: {:?}", refused(lab, NAME, kind, &[words])))?;
    }
    connection_alive(&mut own)?;
    move_container(lab, "a", NAME, "b").context("when it is alone")?;
    connection_alive(&mut own)?;
    drop(own);
    remove(lab, NAME)
}

fn a_neighbour_that_comes_during_the_move_stops_it_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = web(lab, 72)?;
    Redis::connect(lab, ip, Duration::from_secs(10))?.populate(200_000, "key", 100)?;
    let mut own = counter(lab, ip, REDIS_PORT)?;
    let log = Log::mark(lab, "b")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Precopy, &["--bandwidth", "48mbit"])?;
    wait_until("the destination to be prepared", Duration::from_secs(20), || {
        Ok(lab.path("b", "/run/netns/web")?.exists().then_some(()))
    })
    .with_context(|| log.text())?;
    let entered = InNode(lab.spawn("a", &["nsenter", "--net=/run/netns/web", "sleep", "1000"])?);
    let ended = moving.end()?;
    drop(entered);
    let report = ended.report.as_ref().context("no report")?;
    ensure!(
        report.outcome == Outcome::Failed && report.blackout_ms.is_none(),
        "it was not stopped before the freeze: {report:?}"
    );
    ensure!(ended.error().contains("(sleep) shares the network namespace"), "it says {:?}", ended.error());
    connection_alive(&mut own)?;
    move_container(lab, "a", NAME, "b").context("when it is alone")?;
    connection_alive(&mut own)?;
    drop(own);
    remove(lab, NAME)
}

fn what_is_the_node_s_own_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    web(lab, 73)?;
    let sleep: Vec<String> = ["sleep", "1000"].map(str::to_owned).into();
    for (kind, words) in [
        ("network", "container side uses the network of its node"),
        ("pid", "container side uses the PID namespace of its node"),
        ("uts", "container side uses the UTS namespace of its node"),
    ] {
        run_beside(lab, NAME, SIDE, &sleep, |config| {
            config["hostname"] = Value::Null;
            let kinds = ["mount", "network", "pid", "ipc", "uts"].into_iter().filter(|one| *one != kind);
            config["linux"]["namespaces"] = kinds.map(|kind| json!({"type": kind})).collect();
        })?;
        let refusal = refused_move(lab, "a", SIDE, "b");
        end_beside(lab, SIDE)?;
        let refusal = refusal?;
        ensure!(refusal.blockers.iter().any(|blocker| blocker.cause.contains(words)), "no {words:?}: {refusal:#?}");
    }
    // Also by a path.
    run_beside(lab, NAME, SIDE, &sleep, |config| {
        config["linux"]["namespaces"] = json!([
            {"type": "mount"}, {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network", "path": "/proc/self/ns/net"},
        ]);
    })?;
    let refusal = refused_move(lab, "a", SIDE, "b");
    end_beside(lab, SIDE)?;
    refusal?.names(BlockerKind::Network, "container side uses the network of its node")?;
    remove(lab, NAME)
}

fn a_directory_that_another_container_has_does_not_move_away_from_it(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.check("a", &["mkdir", "-p", "/srv/data/part", "/srv/other"])?;
    let volume = |path: &str| vec![(path.into(), "/data".into())];
    let options = RunOptions::new(Ipv4Addr::new(10, 77, 0, 76), redis_command());
    lab.run("a", NAME, &RunOptions { volumes: volume("/srv/data"), ..options })?;
    let sleep: Vec<String> = ["sleep", "1000"].map(str::to_owned).into();
    let beside = |directory: &str| {
        run_beside(lab, NAME, SIDE, &sleep, |config| {
            config["linux"]["namespaces"] =
                ["mount", "network", "pid", "ipc", "uts"].map(|kind| json!({"type": kind})).into();
            for mount in
                config["mounts"].as_array_mut().into_iter().flatten().filter(|mount| mount["destination"] == "/data")
            {
                mount["source"] = directory.into();
            }
        })
    };
    for directory in ["/srv/data", "/srv/data/part"] {
        beside(directory)?;
        let refusal = refused_move_with(lab, "a", NAME, "b", &["--with-binds"]);
        end_beside(lab, SIDE)?;
        refusal?
            .names(BlockerKind::Mount, "(sleep) of container side has the directory /data of container web, too")?;
    }
    beside("/srv/other")?;
    let moved = move_with(lab, "a", NAME, "b", &["--with-binds"]);
    end_beside(lab, SIDE)?;
    moved.context("when each has one of its own")?;
    remove(lab, NAME)
}

/// Containers of an engine that have joined another one's namespaces, whether they run or not.
fn joined_by_mode(lab: &Lab, engine: &Managed, number: u8, more: &[&str]) -> Result<()> {
    let mut own = engine.start(lab, number, &[], &[])?;
    let of = format!("container:{}", engine.name);
    let command = |arguments: &[&str]| (engine.command)(lab, "a", arguments).map_err(anyhow::Error::from);
    let beside = |verb: &[&str], option: &str| -> Result<()> {
        let options = ["--name", SIDE, option, &of, "--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro"];
        command(&[verb, &options, more, &[engine.image, "sleep", "1000"]].concat()).map(drop)
    };
    for (option, shared, used) in [("--network", "network", "network"), ("--pid", "PID", "PID namespace")] {
        beside(&["run", "--detach"], option).with_context(|| option.to_owned())?;
        let words = format!("of container {SIDE} shares the {shared} namespace of container {}", engine.name);
        let running = refused_move(lab, "a", engine.name, "b");
        command(&["rm", "--force", SIDE])?;
        let running = running?;
        ensure!(
            running.blockers.first().is_some_and(|first| first.cause.contains(&words)),
            "no {words:?}: {running:#?}"
        );

        beside(&["create"], option)?;
        let made = refused_move(lab, "a", engine.name, "b");
        command(&["rm", "--force", SIDE])?;
        made?.names(BlockerKind::Engine, &format!("container {SIDE} does not run, and uses the {used} of"))?;
    }
    connection_alive(&mut own)?;
    engine.moves(lab, &mut own, "a", "b").context("when it is alone")?;
    drop(own);
    engine.remove(lab, "b")
}

fn a_container_of_docker_that_others_have_joined_is_refused(stage: &mut Stage) -> Result<()> {
    joined_by_mode(&stage.lab, &DOCKER, 74, &[])
}

fn a_container_of_podman_that_others_have_joined_is_refused(stage: &mut Stage) -> Result<()> {
    joined_by_mode(&stage.lab, &PODMAN, 75, &["--cgroup-parent", "/tranship-lab/a"])
}

fn main() -> ExitCode {
    scenarios(&[
        (
            "two_containers_of_runc_in_one_network_namespace_are_refused_one_by_one",
            two_containers_of_runc_in_one_network_namespace_are_refused_one_by_one,
        ),
        ("every_kind_of_namespace_that_is_shared_is_named", every_kind_of_namespace_that_is_shared_is_named),
        (
            "a_neighbour_that_comes_during_the_move_stops_it_before_the_freeze",
            a_neighbour_that_comes_during_the_move_stops_it_before_the_freeze,
        ),
        ("what_is_the_node_s_own_is_refused", what_is_the_node_s_own_is_refused),
        (
            "a_directory_that_another_container_has_does_not_move_away_from_it",
            a_directory_that_another_container_has_does_not_move_away_from_it,
        ),
        (
            "a_container_of_docker_that_others_have_joined_is_refused",
            a_container_of_docker_that_others_have_joined_is_refused,
        ),
        (
            "a_container_of_podman_that_others_have_joined_is_refused",
            a_container_of_podman_that_others_have_joined_is_refused,
        ),
    ])
}
