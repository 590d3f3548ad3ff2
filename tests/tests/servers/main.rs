//! Servers that people run under Docker, Podman and containerd move while they are at work: a database with its volume, a web
//! server that is being uploaded to, and an image with a user and the engine's seccomp profile.
//!
//! With `TRANSHIP_ENGINES=all`, as in `make test-engines`, all of them under each engine; else two under Docker.

mod database;
mod hardened;
mod upload;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tranship_e2e::{CONTAINERD, DOCKER, Dialect, Managed, PODMAN, Scenario, move_with, scenarios, wait_until};
use tranship_lab::Lab;

/// An engine, and how a container of it gets a place on disk at `/data` that moves along.
pub struct Site {
    engine: Managed,
    /// Options of `run`.
    place: &'static [&'static str],
    /// Options of `tranship move`.
    moving: &'static [&'static str],
}

const IN_DOCKER: Site = Site { engine: DOCKER, place: &["--volume", "data:/data"], moving: &[] };
const IN_PODMAN: Site = Site { engine: PODMAN, place: &["--volume", "data:/data"], moving: &[] };
/// containerd has no volumes: it is a directory of the node's own.
const IN_CONTAINERD: Site = Site {
    engine: CONTAINERD,
    place: &["--mount", "type=bind,src=/srv/data,dst=/data,options=rbind:rw"],
    moving: &["--with-binds"],
};

impl Site {
    /// Starts a server on node `a`, at the address of this number, with its place on disk.
    fn start(&self, lab: &Lab, number: u8, script: &str) -> Result<()> {
        (self.engine.prepare)(lab)?;
        if matches!(self.engine.dialect, Dialect::Ctr) {
            lab.check("a", &["mkdir", "/srv/data"])?;
        }
        let command = ["sh", "-c", script].map(str::to_owned);
        Ok((self.engine.run)(
            lab,
            "a",
            self.engine.name,
            [10, 77, 0, number].into(),
            self.engine.image,
            self.place,
            &command,
        )?)
    }

    /// Moves the server, and checks that it is there and only there.
    fn moves(&self, lab: &Lab, from: &str, to: &str) -> Result<()> {
        let report = move_with(lab, from, self.engine.name, to, self.moving)
            .with_context(|| format!("from {from} to {to} under {}", self.engine.engine))?;
        let (blackout, total) = (report.blackout_ms.unwrap_or_default(), report.total_ms.unwrap_or_default());
        eprintln!("{} {from} → {to}: blackout {blackout:.0} ms, total {total:.0} ms", self.engine.engine);
        wait_until("the source to be clear", Duration::from_secs(10), || Ok(self.engine.is_gone(lab, from).ok()))
            .with_context(|| format!("{:?}", self.engine.is_gone(lab, from)))?;
        self.engine.shows(lab, to)
    }

    /// Ends the server as a crash does, and starts it again from what is on disk.
    fn crashes_and_starts(&self, lab: &Lab, node: &str) -> Result<()> {
        let name = self.engine.name;
        let order = |arguments: &[&str]| (self.engine.command)(lab, node, arguments);
        let ended = || {
            wait_until("the container to end", Duration::from_secs(10), || {
                Ok(self.engine.pid(lab, node)?.is_none().then_some(()))
            })
        };
        match self.engine.dialect {
            Dialect::Docker => {
                order(&["kill", "--signal", "KILL", name])?;
                ended()?;
                order(&["start", name])?;
            }
            Dialect::Ctr => {
                order(&["tasks", "kill", "--signal", "SIGKILL", name])?;
                ended()?;
                order(&["tasks", "delete", name])?;
                order(&["tasks", "start", "--detach", "--null-io", name])?;
            }
        }
        Ok(())
    }

    /// Removes the server, and its place on both nodes.
    fn end(&self, lab: &Lab, node: &str) -> Result<()> {
        self.engine.remove(lab, node)?;
        for node in ["a", "b"] {
            match self.engine.dialect {
                Dialect::Docker => (self.engine.command)(lab, node, &["volume", "rm", "data"]).map(drop)?,
                Dialect::Ctr => lab.check(node, &["rm", "-rf", "/srv/data"]).map(drop)?,
            }
        }
        self.engine.is_gone(lab, node)
    }
}

fn main() -> ExitCode {
    let mut all: Vec<(&str, Scenario)> = vec![
        ("docker_postgres_loses_nothing_committed", |stage| database::moves_at_work(&stage.lab, &IN_DOCKER, 90)),
        ("docker_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_DOCKER, 92)),
    ];
    if std::env::var("TRANSHIP_ENGINES").is_ok_and(|which| which == "all") {
        let others: [(&str, Scenario); 7] = [
            ("docker_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_DOCKER, 91)),
            ("podman_postgres_loses_nothing_committed", |stage| database::moves_at_work(&stage.lab, &IN_PODMAN, 93)),
            ("podman_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_PODMAN, 94)),
            ("podman_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_PODMAN, 95)),
            ("containerd_postgres_loses_nothing_committed", |stage| {
                database::moves_at_work(&stage.lab, &IN_CONTAINERD, 96)
            }),
            ("containerd_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_CONTAINERD, 97)),
            ("containerd_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_CONTAINERD, 98)),
        ];
        all.extend(others);
    } else {
        println!(
            "skipped: uploads, and servers under Podman and containerd, take minutes; `make test-engines` moves them"
        );
    }
    scenarios(&all)
}
