//! A container that moves off a bridge of its node goes on talking to those that stay (`--keep-path`).

use std::net::Ipv4Addr;
use std::process::ExitCode;

use anyhow::Result;
use tranship_e2e::{ASK, DOCKER, ECHO, PODMAN, Stage, Talk, configure, remove, scenarios};
use tranship_lab::RunOptions;

/// Nodes have no bridges of theirs joined unless they are told to.
fn nodes_allow_paths(stage: &mut Stage) -> Result<()> {
    configure(&stage.lab, "[network]\nallow_paths = true\n")
}

fn docker_keeps_the_path_to_those_that_stay(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_path(&stage.lab, true, &[])
}

fn podman_keeps_the_path_to_those_that_stay(stage: &mut Stage) -> Result<()> {
    // Without aardvark-dns, which the lab lacks, Podman resolves no names.
    PODMAN.keeps_its_path(&stage.lab, false, &["--cgroup-parent"])
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
