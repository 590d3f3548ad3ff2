//! The engines' own ways to move a container: Podman's checkpoint to a file, the file to the other node, its restore there; Docker's
//! checkpoint, its directory to the other daemon's files, where Docker looks for it, and a start from it; `ctr`'s checkpoint as an
//! image, which is exported there and imported here.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::{DOCKER_DATA, Lab};
use tranship_types::EngineName;

use crate::peer::path_with_criu;
use crate::program;
use crate::run::Moved;
use crate::timeline::slices;
use crate::workload::make_in_docker;

const PODMAN: &str = "/usr/bin/podman";
const ARCHIVE: &str = "/run/checkpoint.tar";
const DOCKER: &str = "/usr/bin/docker";
const CTR: &str = "/usr/bin/ctr";
const IMAGE: &str = "checkpoint/of:it";
const CHECKPOINT: &str = "checkpoint";
const PORT: u16 = 7070;

/// A way to move a container, as scripts for the two nodes.
struct Way {
    checkpoint: String,
    /// Writes to the link what the checkpoint has made.
    send: String,
    /// Reads it from there.
    receive: String,
    restore: String,
}

/// Sees to it that this engine can take checkpoints. To be called before a container is started.
pub fn prepare(lab: &Lab, engine: EngineName, node: &str) -> Result<()> {
    let path = path_with_criu(&lab.command(node, &["true"])?);
    match engine {
        EngineName::Docker => lab.start_docker_with_checkpoints(&path)?,
        EngineName::Containerd => lab.start_containerd_with_checkpoints(&path)?,
        EngineName::Podman | EngineName::Runc => {}
    }
    Ok(())
}

/// Has the engine checkpoint the container on one node and restore it on the other. Kindly, nothing is compressed or on a disk, and
/// a container that has to be there is made before the freeze. A step that has not ended within `limit` has failed.
pub fn perform(
    lab: &Lab,
    engine: EngineName,
    [source, destination]: [&str; 2],
    name: &str,
    limit: Duration,
) -> Result<Moved> {
    let way = match engine {
        EngineName::Podman => podman(name),
        EngineName::Docker => docker(lab, [source, destination], name)?,
        EngineName::Containerd => containerd(lab, [source, destination], name)?,
        EngineName::Runc => bail!("{engine} has no checkpoint and restore but the recipe's"),
    };
    let address = lab.address(destination)?;
    let send = format!("{} > /dev/tcp/{address}/{PORT}", way.send);
    let receive = format!("busybox nc -l -p {PORT} | {}", way.receive);

    let mut receiver = in_node(lab, destination, &receive)?.spawn()?;
    let begin = Instant::now();
    let mut parts = Vec::new();
    for (step, node, script) in
        [("checkpoint", source, &way.checkpoint), ("copy", source, &send), ("restore", destination, &way.restore)]
    {
        let from = begin.elapsed();
        let output = program::run(in_node(lab, node, script)?, limit)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("the {step} of {engine}'s own failed: {}", said.trim());
        }
        if step == "copy" {
            receiver.wait()?;
        }
        parts.push((step.to_owned(), from.as_secs_f64() * 1e3, begin.elapsed().as_secs_f64() * 1e3));
    }
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    // Engines tell nobody when they freeze and resume: what the client sees is the measure.
    Ok(Moved { total_ms, blackout_ms: None, slices: slices(&parts, total_ms), report: None })
}

fn podman(name: &str) -> Way {
    Way {
        checkpoint: format!(
            "exec {PODMAN} container checkpoint --tcp-established --compress none --export {ARCHIVE} {name}"
        ),
        send: format!("exec cat {ARCHIVE}"),
        receive: format!("cat > {ARCHIVE}"),
        restore: format!("exec {PODMAN} container restore --tcp-established --import {ARCHIVE}"),
    }
}

/// Docker takes a checkpoint from nowhere but its own files, of a container that it has.
fn docker(lab: &Lab, [source, destination]: [&str; 2], name: &str) -> Result<Way> {
    make_in_docker(lab, destination, name).context("making the container on the destination")?;
    let checkpoints = |node: &str| -> Result<String> {
        let id = lab.docker(node, &["inspect", "--format", "{{.Id}}", name])?;
        Ok(format!("{DOCKER_DATA}/containers/{}/checkpoints", id.trim()))
    };
    let (from, to) = (checkpoints(source)?, checkpoints(destination)?);
    lab.check(destination, &["mkdir", "-p", &to])?;
    Ok(Way {
        checkpoint: format!("exec {DOCKER} checkpoint create {name} {CHECKPOINT}"),
        send: format!("exec tar -C {from} -c {CHECKPOINT}"),
        receive: format!("tar -C {to} -x"),
        restore: format!("exec {DOCKER} start --checkpoint {CHECKPOINT} {name}"),
    })
}

/// `ctr` leaves the container running: so its network is cut off before the checkpoint, and it is killed after it. On the destination
/// the namespace with its address and MAC is there before, and answers nobody until the restore is done.
fn containerd(lab: &Lab, [source, destination]: [&str; 2], name: &str) -> Result<Way> {
    let tell = |show: &str| -> Result<String> {
        let said = lab.check(source, &["sh", "-c", &format!("ip -n {name} -o {show} dev eth0")])?;
        Ok(said
            .split_whitespace()
            .skip_while(|word| !matches!(*word, "link/ether" | "inet"))
            .nth(1)
            .unwrap_or_default()
            .to_owned())
    };
    let (mac, address) = (tell("link show")?, tell("-4 addr show")?);
    let ready = format!(
        "ip netns add {name} && ip -n {name} link set lo up && \
         ip link add link eth0 name eth0 address {mac} netns {name} type macvlan mode bridge && \
         ip -n {name} addr add {address} dev eth0 && ip netns exec {name} \
         nft 'add table ip mute; add chain ip mute in {{ type filter hook input priority 0; policy drop; }}'"
    );
    lab.check(destination, &["sh", "-c", &ready])?;
    Ok(Way {
        checkpoint: format!(
            "ip -n {name} link set eth0 down && {CTR} containers checkpoint --task --image --rw {name} {IMAGE} && \
             exec {CTR} tasks delete --force {name}"
        ),
        send: format!("{CTR} images export --skip-manifest-json - {IMAGE}"),
        receive: format!("{CTR} images import --no-unpack -"),
        restore: format!(
            "ip -n {name} link set eth0 up && {CTR} containers restore --live --rw {name} {IMAGE} && \
             exec ip netns exec {name} nft delete table ip mute"
        ),
    })
}

fn in_node(lab: &Lab, node: &str, script: &str) -> Result<Command> {
    let mut command = lab.command(node, &["env", "--chdir=/", "bash", "-c", script])?;
    let path = path_with_criu(&command);
    command.env("PATH", path);
    Ok(command)
}
