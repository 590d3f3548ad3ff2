//! After a move the container is the destination's engine's own, and the source has neither the container nor has it
//! told the container's peers that it is gone.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Capture, Stage, connection_alive, exactly_one_runs, move_container, nothing_left, remove, scenarios,
    second_move_succeeds, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};

const NAME: &str = "engine";
/// Where scripts/setup-runc puts a runc of the 1.3 series if the machine's own is older.
const NEWER_RUNC: &str = "/opt/tranship/runc";
/// Set in the process that plays the scenarios with it.
const AGAIN: &str = "TRANSHIP_NEWER_RUNC";

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

/// Plays the scenarios again, with the newer runc as the nodes' own.
fn again_with_newer_runc() -> ExitCode {
    let newer = Path::new(NEWER_RUNC);
    if !newer.join("runc").exists() {
        println!(
            "skipped: {NEWER_RUNC}/runc is not there; `scripts/setup-runc` installs it where runc is older than 1.3"
        );
        return ExitCode::SUCCESS;
    }
    let path = format!("{NEWER_RUNC}:{}", std::env::var("PATH").unwrap_or_default());
    let again = std::env::current_exe()
        .and_then(|own| Command::new(own).args(std::env::args_os().skip(1)).env("PATH", path).env(AGAIN, "1").status());
    match again {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            println!("the scenarios cannot be played again: {error}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let done = scenarios(&[
        ("stock_runc_manages_the_moved_container", stock_runc_manages_the_moved_container),
        ("no_rst_or_fin_leaves_the_source_by_macvlan", no_rst_or_fin_leaves_the_source_by_macvlan),
        ("no_rst_or_fin_leaves_the_source_by_bridge", no_rst_or_fin_leaves_the_source_by_bridge),
    ]);
    if done != ExitCode::SUCCESS || std::env::var_os(AGAIN).is_some() {
        return done;
    }
    again_with_newer_runc()
}
