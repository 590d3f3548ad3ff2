//! The address of a container of Docker or Podman stays reserved on the node that the container has left.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{DOCKER, PODMAN, Stage, connection_alive, restart_agent, scenarios, wait_until};
use tranship_lab::CLIENT;

/// Nodes hold no addresses of engines unless they are told to.
fn nodes_hold_addresses(stage: &mut Stage) -> Result<()> {
    for node in ["a", "b"] {
        let file = stage.lab.path(node, "/etc/tranship/agent.toml")?;
        let text = fs::read_to_string(&file)?;
        fs::write(&file, text + "\n[network]\nhold_engine_addresses = true\n")?;
        restart_agent(&stage.lab, node, "")?;
    }
    Ok(())
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
        wait_until("the address to be held again", Duration::from_secs(40), || Ok(DOCKER.is_held(lab, "a", ip).ok()))
            .with_context(|| format!("with live-restore {live_restore}: {:?}", DOCKER.is_held(lab, "a", ip)))?;
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
        (
            "podman_reserves_it_until_the_container_comes_back_or_ends",
            podman_reserves_it_until_the_container_comes_back_or_ends,
        ),
        ("podman_reserves_it_unless_it_is_released", podman_reserves_it_unless_it_is_released),
    ])
}
