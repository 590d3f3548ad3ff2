//! containerd in the nodes: a daemon of each node's own, and an image that is the same on all of them. Its containers are
//! attached as runc's are: by whoever runs them.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use crate::cgroup;
use crate::daemon::WRAPPER;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::spec::network_namespace;
use crate::state::ROOTFS;

/// containerd's command line.
pub const CLIENT: &str = "/usr/bin/ctr";
const DAEMON: &str = "/usr/bin/containerd";
const CONFIG: &str = "/run/containerd.toml";
const PID: &str = "/run/containerd.pid";
const LOG: &str = "/run/containerd.log";
const IMAGE: &str = "docker.io/library/tranship-lab:latest";
const ARCHIVE: &str = "/run/containerd-image/image.tar";
/// What the lab's image needs of the host.
const BINDS: [&str; 6] = [
    "--mount",
    "type=bind,src=/usr,dst=/usr,options=rbind:ro",
    "--mount",
    "type=bind,src=/etc,dst=/etc,options=rbind:ro",
    "--mount",
    "type=tmpfs,src=tmpfs,dst=/tmp,options=nosuid:nodev",
];

/// An archive of an image with one layer, the lab's skeleton, in the form that `docker save` writes.
const PACK: &str = r#"mkdir -p /run/containerd-image && cd /run/containerd-image && tar -C "$0" -cf layer.tar . &&
    layer=$(sha256sum layer.tar | cut -d' ' -f1) &&
    echo '{"architecture": "'$(dpkg --print-architecture)'", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:'$layer'"]}}' > config.json &&
    echo '[{"Config": "config.json", "RepoTags": ["'"$1"'"], "Layers": ["layer.tar"]}]' > manifest.json &&
    tar -cf image.tar config.json layer.tar manifest.json"#;

fn configuration() -> String {
    let unused = ["aufs", "btrfs", "devmapper", "zfs"].map(|name| format!("\"io.containerd.snapshotter.v1.{name}\""));
    format!(
        "version = 2\nroot = \"/run/containerd-data\"\nstate = \"/run/containerd\"\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\", {}]\n",
        unused.join(", ")
    )
}

impl Lab {
    /// Starts containerd in every node, with the image `tranship-lab` (a skeleton for containers with the host's /usr and
    /// /etc). Daemons that run stay.
    ///
    /// # Errors
    /// If Debian's docker.io, which containerd comes with, is not installed, or a daemon does not answer within 30 s; the
    /// error has the end of its log.
    pub fn start_containerd(&self) -> Result<()> {
        self.start_containerds(None)
    }

    /// The same, where the daemons find criu on this PATH. In their nodes criu keeps established TCP connections, for which `ctr` has
    /// no option.
    ///
    /// # Errors
    /// As [`start_containerd`](Lab::start_containerd); or if a node's view of /etc cannot be changed.
    pub fn start_containerd_with_checkpoints(&self, path: &str) -> Result<()> {
        self.keep_connections()?;
        self.start_containerds(Some(path))
    }

    fn start_containerds(&self, path: Option<&str>) -> Result<()> {
        for needed in [CLIENT, DAEMON] {
            if !Path::new(needed).exists() {
                return Err(LabError::Refused(format!("{needed} is not installed; run `make setup`")));
            }
        }
        let nodes = self.nodes();
        if nodes.iter().all(|node| self.ctr(node, &["version"]).is_ok()) {
            return Ok(());
        }
        for node in &nodes {
            self.link_wrapper(node)?;
            let file = self.path(node, CONFIG)?;
            fs::write(&file, configuration()).map_err(LabError::file("write", &file))?;
            self.launch(node, path)?;
        }
        for (index, node) in nodes.iter().enumerate() {
            self.await_containerd(node)?;
            if index == 0 {
                self.check(node, &["sh", "-c", PACK, ROOTFS, IMAGE])?;
            } else {
                let (from, to) = (self.path(&nodes[0], ARCHIVE)?, self.path(node, ARCHIVE)?);
                let directory = to.parent().unwrap_or(Path::new("/"));
                fs::create_dir_all(directory).map_err(LabError::file("make", directory))?;
                fs::copy(&from, &to).map_err(LabError::file("write", &to))?;
            }
            self.ctr(node, &["images", "import", ARCHIVE])?;
        }
        Ok(())
    }

    /// Kills a node's containerd, and starts it again; its containers go on.
    ///
    /// # Errors
    /// If none runs, or it does not answer within 30 s; the error has the end of its log.
    pub fn restart_containerd(&self, node: &str) -> Result<()> {
        self.check(node, &["sh", "-c", &format!("kill -KILL $(cat {PID})")])?;
        self.launch(node, None)?;
        self.await_containerd(node)
    }

    fn launch(&self, node: &str, path: Option<&str>) -> Result<()> {
        let path = path.map(|path| format!("PATH={path}"));
        let script = format!("echo $$ > {PID} && exec {DAEMON} --config {CONFIG}");
        let mut daemon = vec!["env"];
        daemon.extend(path.as_deref());
        daemon.extend(["sh", "-c", &script]);
        self.start_daemon(node, &daemon, LOG)
    }

    fn await_containerd(&self, node: &str) -> Result<()> {
        self.await_daemon(node, "containerd", LOG, || self.ctr(node, &["version"]).is_ok())
    }

    /// Runs a `ctr` command in a node, and returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub fn ctr(&self, node: &str, arguments: &[&str]) -> Result<String> {
        // Its directory is one that the node has.
        self.check(node, &[&["env", "--chdir=/", CLIENT], arguments].concat())
    }

    /// Starts a container in a node's containerd, with the lab's image, a macvlan on the node's link, the host's /usr and
    /// /etc, and a tmpfs on /tmp; what it says goes to /run/NAME.log. `options` are more of those of `ctr run`.
    ///
    /// # Errors
    /// The refusal of containerd, or of what attaches it.
    pub fn ctr_run(&self, node: &str, name: &str, ip: Ipv4Addr, options: &[&str], command: &[String]) -> Result<()> {
        self.ctr_run_image(node, name, ip, IMAGE, options, command)
    }

    /// The same from another image.
    ///
    /// # Errors
    /// As [`ctr_run`](Lab::ctr_run).
    pub fn ctr_run_image(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.ctr_run_whole(node, name, ip, image, &[&BINDS, options].concat(), command)
    }

    /// The same from an image that has all its files, without the host's.
    ///
    /// # Errors
    /// As [`ctr_run`](Lab::ctr_run).
    pub fn ctr_run_whole(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.make_network(self.node(node)?, name, "macvlan", ip)?;
        let network = format!("network:{}", network_namespace(name));
        let (group, log) = (format!("{}/{name}", cgroup::parent_of(node)), format!("file:///run/{name}.log"));
        let mut arguments = vec!["run", "--detach", "--log-uri", &log, "--with-ns", &network, "--cgroup", &group];
        arguments.extend(options);
        arguments.extend([image, name]);
        arguments.extend(command.iter().map(String::as_str));
        self.ctr(node, &arguments).map(drop)
    }

    /// Removes a container from a node's containerd, with its network namespace.
    ///
    /// # Errors
    /// If there is none, or something of it cannot be removed.
    pub fn ctr_remove(&self, node: &str, name: &str) -> Result<()> {
        // It may have ended by itself.
        let _ = self.ctr(node, &["tasks", "delete", "--force", name]);
        self.ctr(node, &["containers", "delete", name])?;
        self.remove_network(self.node(node)?, name, "macvlan")
    }
}

/// The part of an agent's configuration that says where the runtime wrapper is.
pub(crate) fn agent_configuration() -> String {
    format!("[containerd]\nwrapper = \"{WRAPPER}\"\n")
}
