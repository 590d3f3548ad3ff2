//! Servers that people run under Docker, Podman and containerd move while they are at work: databases and a store of documents with their
//! volumes, web servers that are being read from and uploaded to, and an image with a user and the engine's seccomp profile.
//!
//! With `TRANSHIP_ENGINES=all`, as in `make test-engines`, all of them under each engine; else all but one under Docker.

mod database;
mod documents;
mod hardened;
mod httpd;
mod image;
mod mariadb;
mod upload;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tranship_e2e::{
    CONTAINERD, DOCKER, Dialect, Managed, PODMAN, Scenario, move_with, scenarios, wait_until, whole_matrices,
};
use tranship_lab::Lab;

use crate::image::Image;

/// An engine, and how files on disk move with a container of it.
pub struct Site {
    engine: Managed,
    /// Options of `tranship move`.
    moving: &'static [&'static str],
}

const IN_DOCKER: Site = Site { engine: DOCKER, moving: &[] };
const IN_PODMAN: Site = Site { engine: PODMAN, moving: &[] };
/// containerd has no volumes: there it is a directory of the node's own.
const IN_CONTAINERD: Site = Site { engine: CONTAINERD, moving: &["--with-binds"] };

impl Site {
    /// Starts a server on node `a`, at the address of this number, from an image that has been made there; `more` are options of `run`. Its
    /// data have a place on disk that moves along; what else the image has of volumes is anonymous.
    fn start_image(&self, lab: &Lab, number: u8, image: &Image, more: &[&str]) -> Result<()> {
        let engine = &self.engine;
        let place = self.place(lab, image.volumes[0], image.owner.1)?;
        let options: Vec<_> = place.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Ok((engine.run_whole)(lab, "a", engine.name, [10, 77, 0, number].into(), image.name, &options, &[])?)
    }

    /// Options of `run` for a place on disk that moves along.
    fn place(&self, lab: &Lab, inside: &str, owner: u32) -> Result<[String; 2]> {
        Ok(match self.engine.dialect {
            Dialect::Docker => ["--volume".to_owned(), format!("data:{inside}")],
            Dialect::Ctr => {
                lab.check("a", &["install", "--directory", "--owner", &owner.to_string(), "/srv/data"])?;
                ["--mount".to_owned(), format!("type=bind,src=/srv/data,dst={inside},options=rbind:rw")]
            }
        })
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
        self.ends_and_starts(lab, node, "SIGKILL")
    }

    /// Stops the server as the engine does, and starts it again.
    fn stops_and_starts(&self, lab: &Lab, node: &str) -> Result<()> {
        match self.engine.dialect {
            Dialect::Docker => {
                for order in ["stop", "start"] {
                    (self.engine.command)(lab, node, &[order, self.engine.name])?;
                }
                Ok(())
            }
            Dialect::Ctr => self.ends_and_starts(lab, node, "SIGTERM"),
        }
    }

    fn ends_and_starts(&self, lab: &Lab, node: &str, signal: &str) -> Result<()> {
        let name = self.engine.name;
        let order = |arguments: &[&str]| (self.engine.command)(lab, node, arguments);
        let ended = || {
            wait_until("the container to end", Duration::from_secs(10), || {
                Ok(self.engine.pid(lab, node)?.is_none().then_some(()))
            })
        };
        match self.engine.dialect {
            Dialect::Docker => {
                order(&["kill", "--signal", signal, name])?;
                ended()?;
                order(&["start", name])?;
            }
            Dialect::Ctr => {
                order(&["tasks", "kill", "--signal", signal, name])?;
                ended()?;
                order(&["tasks", "delete", name])?;
                order(&["tasks", "start", "--detach", "--null-io", name])?;
            }
        }
        Ok(())
    }

    /// Checks that commands run in the container, as its user, and that what its first process says is in the engine's log.
    fn is_managed(&self, lab: &Lab, node: &str, line: &str) -> Result<()> {
        self.engine.execute(lab, node, &format!("echo {line} >> /proc/1/fd/1"))?;
        wait_until("the line in the log", Duration::from_secs(5), || {
            Ok(self.log(lab, node)?.contains(line).then_some(()))
        })
    }

    /// What the server has said last.
    fn log(&self, lab: &Lab, node: &str) -> Result<String> {
        let name = self.engine.name;
        let script = match self.engine.dialect {
            Dialect::Docker => format!("cd / && {} logs {name} 2>&1 | tail -n 15", self.engine.engine.to_lowercase()),
            Dialect::Ctr => format!("tail -n 15 /run/{name}.log"),
        };
        Ok(lab.check(node, &["sh", "-c", &script])?)
    }

    /// Waits until the server answers.
    fn answers(&self, lab: &Lab, node: &str, probe: impl FnMut() -> Result<Option<()>>) -> Result<()> {
        wait_until("the server to answer", Duration::from_secs(40), probe)
            .with_context(|| format!("it says: {:?}", self.log(lab, node)))
    }

    /// Removes the server, and its places on both nodes.
    fn end(&self, lab: &Lab, node: &str) -> Result<()> {
        self.engine.remove(lab, node)?;
        for node in ["a", "b"] {
            match self.engine.dialect {
                Dialect::Docker => {
                    (self.engine.command)(lab, node, &["volume", "rm", "data"])?;
                    (self.engine.command)(lab, node, &["volume", "prune", "--force"])?;
                }
                Dialect::Ctr => lab.check(node, &["rm", "-rf", "--one-file-system", "/srv/data"]).map(drop)?,
            }
        }
        self.engine.is_gone(lab, node)
    }
}

fn main() -> ExitCode {
    let mut all: Vec<(&str, Scenario)> = vec![
        ("docker_postgres_loses_nothing_committed", |stage| database::moves_at_work(&stage.lab, &IN_DOCKER, 90)),
        ("docker_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_DOCKER, 92)),
        ("docker_mariadb_loses_no_transaction", |stage| mariadb::moves_at_work(&stage.lab, &IN_DOCKER, 80)),
        ("docker_basex_keeps_its_documents", |stage| documents::are_kept(&stage.lab, &IN_DOCKER, 81)),
        ("docker_httpd_ends_what_it_has_begun", |stage| httpd::ends_what_it_has_begun(&stage.lab, &IN_DOCKER, 82)),
    ];
    if whole_matrices() {
        let others: [(&str, Scenario); 13] = [
            ("docker_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_DOCKER, 91)),
            ("podman_postgres_loses_nothing_committed", |stage| database::moves_at_work(&stage.lab, &IN_PODMAN, 93)),
            ("podman_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_PODMAN, 94)),
            ("podman_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_PODMAN, 95)),
            ("podman_mariadb_loses_no_transaction", |stage| mariadb::moves_at_work(&stage.lab, &IN_PODMAN, 83)),
            ("podman_basex_keeps_its_documents", |stage| documents::are_kept(&stage.lab, &IN_PODMAN, 84)),
            ("podman_httpd_ends_what_it_has_begun", |stage| httpd::ends_what_it_has_begun(&stage.lab, &IN_PODMAN, 85)),
            ("containerd_postgres_loses_nothing_committed", |stage| {
                database::moves_at_work(&stage.lab, &IN_CONTAINERD, 96)
            }),
            ("containerd_upload_arrives_whole", |stage| upload::arrives_whole(&stage.lab, &IN_CONTAINERD, 97)),
            ("containerd_user_and_seccomp_hold", |stage| hardened::is_as_before(&stage.lab, &IN_CONTAINERD, 98)),
            ("containerd_mariadb_loses_no_transaction", |stage| mariadb::moves_at_work(&stage.lab, &IN_CONTAINERD, 86)),
            ("containerd_basex_keeps_its_documents", |stage| documents::are_kept(&stage.lab, &IN_CONTAINERD, 87)),
            ("containerd_httpd_ends_what_it_has_begun", |stage| {
                httpd::ends_what_it_has_begun(&stage.lab, &IN_CONTAINERD, 88)
            }),
        ];
        all.extend(others);
    } else {
        println!(
            "skipped: uploads to nginx, and servers under Podman and containerd, take minutes; `make test-engines` moves them"
        );
    }
    scenarios(&all)
}
