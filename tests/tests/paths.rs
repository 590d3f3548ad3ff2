//! A container that moves off a bridge of its node goes on talking to those that stay (`--keep-path`).

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tranship_e2e::{ASK, DOCKER, ECHO, PODMAN, Stage, Talk, configure, remove, restart_agent, scenarios};
use tranship_lab::RunOptions;

/// Nodes have no bridges of theirs joined unless they are told to.
fn nodes_allow_paths(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    configure(lab, "[network]\nallow_paths = true\n")?;
    // Paths that are there keep their own.
    let file = lab.path("b", "/etc/tranship/agent.toml")?;
    std::fs::write(&file, std::fs::read_to_string(&file)? + "path_port = 7078\n")?;
    restart_agent(lab, "b", "")
}

fn docker_keeps_the_path_to_those_that_stay(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_path(&stage.lab, true, &[], |talk: &Talk| {
        // A daemon that is away, as at boot, has its containers still.
        talk.lab.check("b", &["mv", "/run/docker.sock", "/run/docker.away"])?;
        let turns = Instant::now() + Duration::from_secs(25);
        while Instant::now() < turns {
            for node in ["a", "b"] {
                let devices = talk.lab.check(node, &["ip", "-o", "link", "show", "type", "vxlan"])?;
                ensure!(devices.contains("tship-"), "node {node} has no path any more");
            }
            sleep(Duration::from_millis(500));
        }
        talk.lab.check("b", &["mv", "/run/docker.away", "/run/docker.sock"])?;
        talk.goes_on("b")?;
        talk.is_kept()
    })
}

fn podman_keeps_the_path_to_those_that_stay(stage: &mut Stage) -> Result<()> {
    // Without aardvark-dns, which the lab lacks, Podman resolves no names.
    PODMAN.keeps_its_path(&stage.lab, false, &["--cgroup-parent"], |_| Ok(()))
}

/// The same for runc, on bridges that somebody has made by hand and that have no addresses.
fn runc_keeps_the_path_to_those_that_stay(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (name, number, command) in [("db", 40, vec!["-c", ECHO]), ("app", 41, vec!["-c", ASK, "10.77.0.40"])] {
        let command = [vec!["python3"], command].concat();
        let mut options = RunOptions::new(Ipv4Addr::new(10, 77, 0, number), command);
        options.bridge = true;
        lab.run("a", name, &options)?;
    }
    for node in ["a", "b"] {
        lab.check(node, &["ip", "link", "add", "br9", "type", "bridge"])?;
        lab.check(node, &["ip", "link", "set", "br9", "up"])?;
    }
    let apart = "for name in app db; do \
                 index=$(ip netns exec $name cat /sys/class/net/eth0/iflink); \
                 ip link set $(ip -o link | sed -n \"s/^$index: \\([^@:]*\\).*/\\1/p\") master br9; done";
    lab.check("a", &["sh", "-c", apart])?;
    let exec = |node: &str, name: &str, command: &[&str]| lab.check(node, &[&["runc", "exec", name], command].concat());
    Talk { lab, exec: &exec }.goes_on_with_its_path_kept(|| Ok(()))?;
    remove(lab, "app")?;
    remove(lab, "db")?;
    ["a", "b"].iter().try_for_each(|node| Ok(lab.check(node, &["ip", "link", "delete", "br9"]).map(drop)?))
}

fn main() -> ExitCode {
    scenarios(&[
        // The others need it.
        ("nodes_allow_paths", nodes_allow_paths),
        ("runc_keeps_the_path_to_those_that_stay", runc_keeps_the_path_to_those_that_stay),
        ("docker_keeps_the_path_to_those_that_stay", docker_keeps_the_path_to_those_that_stay),
        ("podman_keeps_the_path_to_those_that_stay", podman_keeps_the_path_to_those_that_stay),
    ])
}
