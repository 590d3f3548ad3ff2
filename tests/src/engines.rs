//! The engines besides runc, with a container of each for scenarios to move.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::Lab;

use crate::containers::nothing_left;
use crate::managed::{Dialect, Managed};
use crate::moving::{Ended, Moving};
use crate::runner::wait_until;

/// The label of a container that holds addresses of another one that has left its node: that one's name.
pub const HOLDS: &str = "tranship.holds-addresses-for";

/// Docker, and a container of its own.
pub const DOCKER: Managed = Managed {
    engine: "Docker",
    dialect: Dialect::Docker,
    name: "cache",
    image: "tranship-lab",
    prepare: Lab::start_docker,
    command: Lab::docker,
    run: Lab::docker_run_image,
    run_whole: Lab::docker_run_whole,
    is_gone: gone_from_docker,
};

/// Podman, and a container of its own.
pub const PODMAN: Managed = Managed {
    engine: "Podman",
    dialect: Dialect::Docker,
    name: "cache",
    image: "tranship-lab",
    prepare: Lab::start_podman,
    command: Lab::podman,
    run: Lab::podman_run_image,
    run_whole: Lab::podman_run_whole,
    is_gone: gone_from_podman,
};

/// containerd, and a container of its own.
pub const CONTAINERD: Managed = Managed {
    engine: "containerd",
    dialect: Dialect::Ctr,
    name: "cache.1",
    image: "docker.io/library/tranship-lab:latest",
    prepare: Lab::start_containerd,
    command: Lab::ctr,
    run: Lab::ctr_run_image,
    run_whole: Lab::ctr_run_whole,
    is_gone: gone_from_containerd,
};

/// The names of all containers of Docker's or Podman's on a node but those that hold addresses of others.
///
/// # Errors
/// The engine's refusal.
pub fn containers_of(engine: &Managed, lab: &Lab, node: &str) -> Result<String> {
    let (all, filter) = (["--all"], format!("label={HOLDS}"));
    let holders = engine.names(lab, node, &[&all[..], &["--filter", &filter]].concat())?;
    let all = engine.names(lab, node, &all)?;
    Ok(all.lines().filter(|name| holders.lines().all(|holder| holder != *name)).collect::<Vec<_>>().join("\n"))
}

fn gone_from_docker(lab: &Lab, node: &str, name: &str) -> Result<()> {
    let there = containers_of(&DOCKER, lab, node)?;
    ensure!(there.is_empty(), "Docker on {node} still has {there}");
    nothing_left(lab, node, name)
}

/// Neither in Podman nor in runc, no network namespace of it, no cgroup.
fn gone_from_podman(lab: &Lab, node: &str, name: &str) -> Result<()> {
    let there = containers_of(&PODMAN, lab, node)?;
    ensure!(there.is_empty(), "Podman on {node} still has {there}");
    let filter = format!("label={HOLDS}");
    let ids = lab.podman(node, &["ps", "--all", "--no-trunc", "--quiet", "--filter", &filter])?;
    let mut own: Vec<String> = ids.lines().map(str::to_owned).collect();
    for id in ids.lines() {
        own.push(lab.podman(node, &["inspect", "--format", "{{.NetworkSettings.SandboxKey}}", id])?.trim().to_owned());
    }
    let others = |text: String| -> Vec<String> {
        text.lines().filter(|line| !own.iter().any(|own| line.contains(own.as_str()))).map(str::to_owned).collect()
    };
    let left = others(lab.check(node, &["sh", "-c", "runc list -q; ls -d /run/netns/netns-* 2>/dev/null; true"])?);
    ensure!(left.is_empty(), "left on {node}: {left:?}");
    let cgroups = format!("find /sys/fs/cgroup -path '*/tranship-lab/{node}/libpod-*' -prune -print");
    let left = others(lab.check(node, &["sh", "-c", &cgroups])?);
    ensure!(left.is_empty(), "cgroups left on {node}: {left:?}");
    nothing_left(lab, node, name)
}

/// Neither in containerd nor in runc, no snapshot, no shim.
fn gone_from_containerd(lab: &Lab, node: &str, name: &str) -> Result<()> {
    for question in [["containers", "ls", "-q"], ["tasks", "ls", "-q"]] {
        let there = lab.ctr(node, &question)?;
        ensure!(there.is_empty(), "{} on {node}: {there}", question[0]);
    }
    let snapshots = lab.ctr(node, &["snapshots", "ls"])?;
    ensure!(!snapshots.contains("Active"), "snapshots left on {node}: {snapshots}");
    let look = "find /run/containerd/runc /run/containerd/io.*.v2.task -path \"*/$0*\" | head -20";
    let left = lab.check(node, &["sh", "-c", look, name])?;
    ensure!(left.is_empty(), "left on {node}: {left}");
    wait_until("the shim to end", Duration::from_secs(5), || {
        Ok(lab.check(node, &["sh", "-c", "pgrep -a containerd-shim || true"])?.is_empty().then_some(()))
    })?;
    nothing_left(lab, node, name)
}

/// An archive of the lab's image with one more layer, in the form that `docker save` writes.
const PACK: &str = r#"set -e; cd /run/containerd-image; mkdir -p more/opt; head -c "$0M" /dev/urandom > more/opt/own; chmod 644 more/opt/own
    tar -C more -cf own.tar .; lower=$(sha256sum layer.tar | cut -d' ' -f1); upper=$(sha256sum own.tar | cut -d' ' -f1)
    echo '{"architecture": "'$(dpkg --print-architecture)'", "os": "linux", "config": {"User": "1000:1000", "WorkingDir": "/opt"},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:'$lower'", "sha256:'$upper'"]}}' > own.json
    echo '[{"Config": "own.json", "RepoTags": ["'"$1"'"], "Layers": ["layer.tar", "own.tar"]}]' > manifest.json
    tar -cf own-image.tar own.json layer.tar own.tar manifest.json; rm -r more own.tar"#;

impl Managed {
    /// Makes an image on a node: the lab's with one more layer, `/opt/own` of so many MiB that no other image has; it names the user 1000
    /// and the directory `/opt`. Says what it is called.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn make_image(&self, lab: &Lab, node: &str, mib: u32) -> Result<&'static str> {
        let engine = |arguments: &[&str]| (self.command)(lab, node, arguments);
        let mib = mib.to_string();
        match self.dialect {
            Dialect::Docker => {
                engine(&["create", "--name", "base", "--volume", "/usr:/usr:ro", self.image, "true"])?;
                lab.check(node, &["sh", "-c", "head -c \"$0M\" /dev/urandom > /run/own", &mib])?;
                engine(&["cp", "/run/own", "base:/opt/own"])?;
                engine(&["commit", "--change", "USER 1000:1000", "--change", "WORKDIR /opt", "base", "own:1"])?;
                engine(&["rm", "base"])?;
                Ok("own:1")
            }
            Dialect::Ctr => {
                const NAME: &str = "docker.io/library/own:1";
                lab.check(node, &["sh", "-c", PACK, &mib, NAME])?;
                engine(&["images", "import", "/run/containerd-image/own-image.tar"])?;
                Ok(NAME)
            }
        }
    }

    /// Moves the container from `a` to `b`, and does something while the agent of `a` is held at a place of its steps; says how that ended.
    ///
    /// # Errors
    /// If the move does not come to that place, or not to an end.
    pub fn moved_while(&self, lab: &Lab, place: &str, meddle: impl FnOnce(&Lab) -> Result<()>) -> Result<Ended> {
        self.moved_from(lab, ("a", "b"), place, meddle)
    }

    /// The same from another node to another.
    ///
    /// # Errors
    /// As [`Self::moved_while`].
    pub fn moved_from(
        &self,
        lab: &Lab,
        nodes: (&str, &str),
        place: &str,
        meddle: impl FnOnce(&Lab) -> Result<()>,
    ) -> Result<Ended> {
        self.begun_from(lab, nodes, place, meddle)?.end()
    }

    /// The same, without waiting for the end.
    ///
    /// # Errors
    /// If the move does not come to that place.
    pub fn begun_from(
        &self,
        lab: &Lab,
        (from, to): (&str, &str),
        place: &str,
        meddle: impl FnOnce(&Lab) -> Result<()>,
    ) -> Result<Moving> {
        Moving::begun_from(lab, self.name, (from, to), place, meddle)
    }

    /// What an engine has of images: theirs, and their parts.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn images(&self, lab: &Lab, node: &str) -> Result<String> {
        let ask = |arguments: &[&str]| (self.command)(lab, node, arguments);
        Ok(match self.dialect {
            Dialect::Docker => ask(&["images", "--all", "--quiet"])?,
            Dialect::Ctr => ask(&["images", "ls", "-q"])? + &ask(&["content", "ls", "-q"])?,
        })
    }

    /// What an image's name stands for on a node.
    ///
    /// # Errors
    /// If there is no such image.
    pub fn image_id(&self, lab: &Lab, node: &str, image: &str) -> Result<String> {
        let ask = |arguments: &[&str]| (self.command)(lab, node, arguments);
        Ok(match self.dialect {
            Dialect::Docker => ask(&["image", "inspect", "--format", "{{.Id}} {{.RepoTags}}", image])?,
            Dialect::Ctr => {
                let list = ask(&["images", "ls"])?;
                let row =
                    list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find(|row| row[0] == image);
                row.and_then(|row| row.get(2).map(ToString::to_string)).context("there is no such image")?
            }
        })
    }

    /// Removes an image from both nodes, where it is.
    ///
    /// # Errors
    /// If an engine cannot.
    pub fn remove_image(&self, lab: &Lab, image: &str) -> Result<()> {
        let remove: &[&str] = match self.dialect {
            Dialect::Docker => &["rmi", "--force", image],
            Dialect::Ctr => &["images", "rm", "--sync", image],
        };
        let there = |node: &str| -> Result<bool> {
            Ok(match self.dialect {
                Dialect::Docker => (self.command)(lab, node, &["image", "inspect", image]).is_ok(),
                Dialect::Ctr => (self.command)(lab, node, &["images", "ls", "-q"])?.lines().any(|line| line == image),
            })
        };
        ["a", "b"].iter().try_for_each(|node| {
            if there(node)? {
                (self.command)(lab, node, remove)?;
            }
            Ok(())
        })
    }
}
