//! After a move the container is the destination's engine's own, and the source has neither the container nor has it
//! told the container's peers that it is gone.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Capture, Stage, connection_alive, copies, exactly_one_runs, move_container, nothing_left, refused_move, remove,
    scenarios, second_move_succeeds, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::BlockerKind;

const NAME: &str = "engine";
/// Where the scripts put other runtimes than the machine's own: a runc of the 1.3 series, and a crun with CRIU called runc.
const OTHERS: [&str; 2] = ["/opt/tranship/runc", "/opt/tranship/crun"];
/// Set in the process that plays the scenarios with one of them.
const AGAIN: &str = "TRANSHIP_OTHER_RUNTIME";

/// Each scenario has an address of its own: the client remembers for a while which interface had one.
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number)
}

fn start(lab: &Lab, ip: Ipv4Addr, bridge: bool) -> Result<CounterClient> {
    let options = RunOptions { bridge, ..RunOptions::new(ip, redis_command()) };
    lab.run("a", NAME, &options)?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    Ok(CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?)
}

fn stock_runc_manages_the_moved_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = start(lab, address(30), false)?;
    move_container(lab, "a", NAME, "b")?;
    connection_alive(&mut counter)?;
    nothing_left(lab, "a", NAME)?;

    let there = lab.check("b", &["runc", "list", "--quiet"])?;
    ensure!(there.lines().any(|line| line == NAME), "runc list on the destination shows {there:?}");
    let here = lab.check("a", &["runc", "list", "--quiet"])?;
    ensure!(!here.lines().any(|line| line == NAME), "runc list on the source still shows {NAME}");
    ensure!(lab.check("a", &["runc", "state", NAME]).is_err(), "runc state on the source still knows {NAME}");

    let said = lab.check("b", &["runc", "exec", NAME, "sh", "-c", "hostname; cat /proc/1/comm"])?;
    ensure!(said == format!("{NAME}\nredis-server\n"), "runc exec on the destination says {said:?}");
    lab.check("b", &["runc", "pause", NAME])?;
    ensure!(exactly_one_runs(lab, NAME).is_err(), "a paused container counts as running");
    lab.check("b", &["runc", "resume", NAME])?;
    connection_alive(&mut counter).context("after runc pause and resume on the destination")?;

    lab.check("b", &["runc", "kill", NAME, "KILL"])?;
    wait_until("the killed container to be stopped", Duration::from_secs(10), || {
        Ok(lab.check("b", &["runc", "state", NAME])?.contains("\"status\": \"stopped\"").then_some(()))
    })?;
    lab.check("b", &["runc", "delete", NAME])?;
    ensure!(!lab.check("b", &["runc", "list", "--quiet"])?.contains(NAME), "runc delete left {NAME} there");
    remove(lab, NAME)
}

/// Each of them is where the limits apply, and can be frozen for the next move.
fn every_process_is_in_the_container_s_cgroups(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(address(33), ["sh", "-c", "sleep 1000 & sleep 1000 & wait"]))?;
    let inside = || -> Result<Vec<String>> {
        let pids: Vec<u32> = copies(lab, NAME)?.into_iter().flat_map(|copy| copy.pids).collect();
        Ok(pids.iter().map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cgroup"))).collect::<Result<_, _>>()?)
    };
    wait_until("its three processes", Duration::from_secs(5), || Ok((inside()?.len() == 3).then_some(())))?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        move_container(lab, from, NAME, to)?;
        let cgroups = inside()?;
        ensure!(cgroups.len() == 3, "{} of three processes are in the container's cgroups", cgroups.len());
        ensure!(cgroups.iter().all(|own| *own == cgroups[0]), "not all are in the same cgroups: {cgroups:#?}");
    }
    remove(lab, NAME)
}

/// Counts what the container's address sends that would end a connection, while it moves there and back.
fn no_packet_ends_the_connection(lab: &Lab, ip: Ipv4Addr, bridge: bool) -> Result<()> {
    let mut counter = start(lab, ip, bridge)?;
    let filter = format!("src host {ip} and tcp[tcpflags] & (tcp-rst|tcp-fin) != 0");
    let capture = Capture::begin(&filter)?;
    move_container(lab, "a", NAME, "b")?;
    connection_alive(&mut counter).context("after the first move")?;
    second_move_succeeds(lab, NAME)?;
    connection_alive(&mut counter).context("after the second move")?;
    let seen = capture.end()?;
    ensure!(seen.is_empty(), "packets that end connections passed the switch:\n  {}", seen.join("\n  "));
    nothing_left(lab, "b", NAME)?;
    drop(counter);
    remove(lab, NAME)
}

fn no_rst_or_fin_leaves_the_source_by_macvlan(stage: &mut Stage) -> Result<()> {
    no_packet_ends_the_connection(&stage.lab, address(31), false)
}

fn no_rst_or_fin_leaves_the_source_by_bridge(stage: &mut Stage) -> Result<()> {
    no_packet_ends_the_connection(&stage.lab, address(32), true)
}

/// Plays the scenarios again, with what is called runc in this directory as the nodes' own runtime.
fn again_with(runtime: &str) -> bool {
    if !Path::new(runtime).join("runc").exists() {
        println!(
            "skipped: {runtime}/runc is not there; `scripts/setup-runtimes` installs it where the machine's own is older"
        );
        return true;
    }
    let path = format!("{runtime}:{}", std::env::var("PATH").unwrap_or_default());
    let again = std::env::current_exe().and_then(|own| {
        // crun takes no machine on which both versions of cgroups are mounted.
        let alone = "cd /sys/fs/cgroup && if mountpoint -q unified; then umount unified; mount -t tmpfs none unified; fi; exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", alone, "sh"]).arg(own);
        command.args(std::env::args_os().skip(1)).env("PATH", path).env(AGAIN, "1").status()
    });
    match again {
        Ok(status) => status.success(),
        Err(error) => {
            println!("the scenarios cannot be played again: {error}");
            false
        }
    }
}

/// The restrictions of the container's mounts, by their places.
fn restricted_mounts(lab: &Lab, node: &str) -> Result<BTreeSet<(String, Vec<String>)>> {
    let list = lab.check(node, &["runc", "exec", NAME, "cat", "/proc/self/mountinfo"])?;
    let mount = |line: &str| {
        let mut words = line.split(' ').skip(4);
        let (place, options) = (words.next()?, words.next()?);
        let mut kept: Vec<_> = options.split(',').map(str::to_owned).collect();
        kept.retain(|option| ["ro", "nosuid", "nodev", "noexec"].contains(&option.as_str()));
        Some((place.to_owned(), kept))
    };
    Ok(list.lines().filter_map(mount).collect())
}

/// Also those of directories that are mounted twice, as crun mounts one over all directories that it masks.
fn mounts_stay_restricted(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = RunOptions::new(address(34), ["sleep", "1000"]);
    options.binds = ["/mnt/one", "/mnt/two"].map(|target| ("/usr/share/doc".into(), target.into())).to_vec();
    lab.run("a", NAME, &options)?;
    let before = restricted_mounts(lab, "a")?;
    ensure!(before.iter().filter(|(_, kept)| kept.contains(&"ro".to_owned())).count() > 4, "few are: {before:?}");
    for (from, to) in [("a", "b"), ("b", "a")] {
        move_container(lab, from, NAME, to)?;
        let after = restricted_mounts(lab, to)?;
        let changed: Vec<_> = after.symmetric_difference(&before).collect();
        ensure!(changed.is_empty(), "the move to {to} has changed {changed:#?}");
    }
    remove(lab, NAME)
}

/// What has moved away leaves its name free; the two do not get in each other's way.
fn a_name_that_has_moved_away_is_free(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(address(35), ["sleep", "1000"]))?;
    move_container(lab, "a", NAME, "b")?;
    lab.run("a", NAME, &RunOptions::new(address(36), ["sleep", "2000"]))?;
    let nodes: Vec<String> = copies(lab, NAME)?.into_iter().map(|copy| copy.node).collect();
    ensure!(nodes == ["a", "b"], "they are on {nodes:?}");
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::NameTaken, NAME)?;
    lab.stop("b", NAME)?;
    move_container(lab, "a", NAME, "b")?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    let done = scenarios(&[
        ("stock_runc_manages_the_moved_container", stock_runc_manages_the_moved_container),
        ("every_process_is_in_the_container_s_cgroups", every_process_is_in_the_container_s_cgroups),
        ("mounts_stay_restricted", mounts_stay_restricted),
        ("a_name_that_has_moved_away_is_free", a_name_that_has_moved_away_is_free),
        ("no_rst_or_fin_leaves_the_source_by_macvlan", no_rst_or_fin_leaves_the_source_by_macvlan),
        ("no_rst_or_fin_leaves_the_source_by_bridge", no_rst_or_fin_leaves_the_source_by_bridge),
    ]);
    if done != ExitCode::SUCCESS || std::env::var_os(AGAIN).is_some() {
        return done;
    }
    // Both, whatever the first one brings.
    let all = OTHERS.map(again_with);
    if all == [true; 2] { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
