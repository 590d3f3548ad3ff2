//! Podman's own way to move a container: its checkpoint to a file, the file to the other node, its restore there. (Docker has none:
//! it refuses a checkpoint that was made elsewhere, unless somebody copies it among the daemon's own files.)

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tranship_lab::Lab;

use crate::peer::path_with_criu;
use crate::program;
use crate::run::Moved;
use crate::timeline::slices;

const PODMAN: &str = "/usr/bin/podman";
const ARCHIVE: &str = "/run/checkpoint.tar";
const PORT: u16 = 7070;

/// Has Podman checkpoint the container on one node and restore it on the other. Kindly, the archive is neither compressed nor on a
/// disk. A step that has not ended within `limit` has failed.
pub fn perform(lab: &Lab, [source, destination]: [&str; 2], name: &str, limit: Duration) -> Result<Moved> {
    let address = lab.address(destination)?;
    let checkpoint =
        format!("exec {PODMAN} container checkpoint --tcp-established --compress none --export {ARCHIVE} {name}");
    let send = format!("exec cat {ARCHIVE} > /dev/tcp/{address}/{PORT}");
    let receive = format!("exec busybox nc -l -p {PORT} > {ARCHIVE}");
    let restore = format!("exec {PODMAN} container restore --tcp-established --import {ARCHIVE}");

    let mut receiver = in_node(lab, destination, &receive)?.spawn()?;
    let begin = Instant::now();
    let mut parts = Vec::new();
    for (step, node, script) in
        [("checkpoint", source, &checkpoint), ("copy", source, &send), ("restore", destination, &restore)]
    {
        let from = begin.elapsed();
        let output = program::run(in_node(lab, node, script)?, limit)?;
        if !output.status.success() {
            bail!("Podman's own {step} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        if step == "copy" {
            receiver.wait()?;
        }
        parts.push((step.to_owned(), from.as_secs_f64() * 1e3, begin.elapsed().as_secs_f64() * 1e3));
    }
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    // Podman tells nobody when it freezes and resumes: what the client sees is the measure.
    Ok(Moved { total_ms, blackout_ms: None, slices: slices(&parts, total_ms), report: None })
}

fn in_node(lab: &Lab, node: &str, script: &str) -> Result<Command> {
    let mut command = lab.command(node, &["env", "--chdir=/", "bash", "-c", script])?;
    let path = path_with_criu(&command);
    command.env("PATH", path);
    Ok(command)
}
