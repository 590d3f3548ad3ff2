//! The address of a container of Docker or Podman stays reserved on the node that the container has left.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tranship_e2e::{DOCKER, PODMAN, Stage, configure, connection_alive, move_with, remove, scenarios};
use tranship_lab::{CLIENT, RunOptions, patience};

/// Nodes hold no addresses of engines unless they are told to.
fn nodes_hold_addresses(stage: &mut Stage) -> Result<()> {
    configure(&stage.lab, "[network]\nhold_engine_addresses = true\n")
}

fn docker_reserves_it_until_the_container_comes_back_or_ends(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_address_reserved(&stage.lab)
}

fn docker_reserves_it_unless_it_is_released(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_address_unless_it_is_released(&stage.lab)
}

fn podman_reserves_it_until_the_container_comes_back_or_ends(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_address_reserved(&stage.lab)
}

fn podman_reserves_it_unless_it_is_released(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_address_unless_it_is_released(&stage.lab)
}

/// A holder ends with a daemon that keeps no containers, and is made again; one of a daemon that keeps them stays. A macvlan's neighbours
/// find the container, and not the holder.
fn docker_reserves_it_when_it_is_restarted(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = Ipv4Addr::new(10, 77, 0, 115);
    let mut counter = DOCKER.start(lab, 115, &[], &[])?;
    DOCKER.moves(lab, &mut counter, "a", "b")?;
    DOCKER.is_held(lab, "a", ip)?;
    for live_restore in [true, false] {
        lab.restart_docker("a", live_restore)?;
        DOCKER.is_held(lab, "a", ip).with_context(|| format!("with live-restore {live_restore}"))?;
    }
    let mac = DOCKER.told(lab, "b", "{{range .NetworkSettings.Networks}}{{.MacAddress}}{{end}}")?;
    for node in ["b", CLIENT] {
        lab.check(node, &["ip", "neigh", "flush", "all"])?;
    }
    connection_alive(&mut counter)?;
    let neighbour = lab.check(CLIENT, &["ip", "neigh", "show", &ip.to_string()])?;
    ensure!(neighbour.contains(&mac), "the client's neighbour is {neighbour}, not {mac}");
    DOCKER.moves(lab, &mut counter, "b", "a").context("back again")?;
    drop(counter);
    DOCKER.remove(lab, "a")
}

/// While a daemon hangs, commands end, and containers of runc move; then the address is held as before.
fn a_docker_that_hangs_holds_up_nobody(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = Ipv4Addr::new(10, 77, 0, 116);
    let mut counter = DOCKER.start(lab, 116, &[], &[])?;
    DOCKER.moves(lab, &mut counter, "a", "b")?;
    DOCKER.is_held(lab, "a", ip)?;
    lab.run("a", "plain", &RunOptions::new(Ipv4Addr::new(10, 77, 0, 117), ["sleep", "1000"]))?;
    let signal = |name: &str| lab.check("a", &["sh", "-c", &format!("kill -{name} $(cat /run/docker.pid)")]);
    signal("STOP")?;
    let hung = || -> Result<()> {
        let begun = Instant::now();
        ensure!(lab.check("a", &["tranship", "release"])?.contains(&ip.to_string()));
        let released = lab.exec("a", &["tranship", "release", "--even-if-alive", DOCKER.name])?;
        ensure!(!released.status.success(), "the address was released, though Docker did not answer");
        move_with(lab, "a", "plain", "b", &["--engine", "runc"])?;
        ensure!(begun.elapsed() < patience(Duration::from_secs(40)), "it took {:?}", begun.elapsed());
        Ok(())
    };
    let hung = hung();
    signal("CONT")?;
    hung?;
    DOCKER.is_held(lab, "a", ip)?;
    drop(counter);
    DOCKER.remove(lab, "b")?;
    remove(lab, "plain")
}

fn main() -> ExitCode {
    scenarios(&[
        // The others need it.
        ("nodes_hold_addresses", nodes_hold_addresses),
        (
            "docker_reserves_it_until_the_container_comes_back_or_ends",
            docker_reserves_it_until_the_container_comes_back_or_ends,
        ),
        ("docker_reserves_it_unless_it_is_released", docker_reserves_it_unless_it_is_released),
        ("docker_reserves_it_when_it_is_restarted", docker_reserves_it_when_it_is_restarted),
        ("a_docker_that_hangs_holds_up_nobody", a_docker_that_hangs_holds_up_nobody),
        (
            "podman_reserves_it_until_the_container_comes_back_or_ends",
            podman_reserves_it_until_the_container_comes_back_or_ends,
        ),
        ("podman_reserves_it_unless_it_is_released", podman_reserves_it_unless_it_is_released),
    ])
}
