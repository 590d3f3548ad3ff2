//! Docker in the nodes: a daemon of each node's own, an image that is the same on all of them, and a network on the
//! lab's link.

use std::env;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::cgroup;
use crate::daemon::WRAPPER;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::state::ROOTFS;

/// Docker's own client: another one on PATH may be too new for this daemon.
pub const CLIENT: &str = "/usr/bin/docker";
const DAEMON: &str = "/usr/sbin/dockerd";
const CONFIG: &str = "/run/docker.json";
/// Where a node's Docker daemon keeps all that it has.
pub const DOCKER_DATA: &str = "/run/docker-data";
const LOG: &str = "/run/dockerd.log";
/// A containerd that is there before Docker, as Debian has it: one that Docker starts by itself has 15 s for that, too little for an emulated
/// processor.
const CONTAINERD: &str = "/usr/bin/containerd";
const CONTAINERD_CONFIG: &str = "/run/docker-containerd.toml";
const CONTAINERD_SOCKET: &str = "/run/docker-containerd/containerd.sock";
const CONTAINERD_LOG: &str = "/run/docker-containerd.log";
/// Where this is in the environment, Docker gets such a containerd.
const APART: &str = "TRANSHIP_CONTAINERD_APART";
const IMAGE: &str = "tranship-lab";
const NETWORK: &str = "lab";
/// What the lab's image needs of the host.
const BINDS: [&str; 6] = ["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp"];
/// That of the lab's nodes.
const SUBNET: &str = "10.77.0.0/24";

impl Lab {
    /// Starts a Docker daemon in every node, with the runtime wrapper registered as `tranship`, the image
    /// `tranship-lab` (a skeleton for containers with the host's /usr and /etc) and the network `lab`, a macvlan on the
    /// node's link. Daemons that run stay.
    ///
    /// # Errors
    /// If Debian's docker.io is not installed, or a daemon does not answer within 30 s; the error has the end of its
    /// log.
    pub fn start_docker(&self) -> Result<()> {
        self.start_dockers("{}", None)
    }

    /// The same, where the daemons know `docker checkpoint`, and find criu on this PATH. In their nodes criu keeps established TCP
    /// connections, for which Docker has no option.
    ///
    /// # Errors
    /// As [`start_docker`](Lab::start_docker); or if a node's view of /etc cannot be changed.
    pub fn start_docker_with_checkpoints(&self, path: &str) -> Result<()> {
        self.keep_connections()?;
        self.start_dockers("{\"experimental\": true}", Some(path))
    }

    fn start_dockers(&self, configuration: &str, path: Option<&str>) -> Result<()> {
        for needed in [CLIENT, DAEMON, CONTAINERD] {
            if !Path::new(needed).exists() {
                return Err(LabError::Refused(format!("{needed} is not installed; run `make setup`")));
            }
        }
        let nodes = self.nodes();
        if nodes.iter().all(|node| self.docker(node, &["version"]).is_ok()) {
            return Ok(());
        }
        for node in &nodes {
            let file = self.path(node, CONFIG)?;
            fs::write(&file, configuration).map_err(LabError::file("write", &file))?;
            if env::var_os(APART).is_some() {
                self.start_containerd_of_docker(node, path)?;
            }
            self.start_dockerd(node, path)?;
        }
        let mut image: Option<Vec<u8>> = None;
        for node in &nodes {
            self.await_daemon(node, "Docker", LOG, || self.docker(node, &["version"]).is_ok())?;
            let file = self.path(node, "/run/image.tar")?;
            match &image {
                None => {
                    // An image that is imported twice has two digests: it is imported once.
                    let import = format!("tar -C {ROOTFS} -c . | {CLIENT} import - {IMAGE}");
                    self.check(node, &["sh", "-c", &import])?;
                    self.docker(node, &["save", "-o", "/run/image.tar", IMAGE])?;
                    image = Some(fs::read(&file).map_err(LabError::file("read", &file))?);
                }
                Some(content) => {
                    fs::write(&file, content).map_err(LabError::file("write", &file))?;
                    self.docker(node, &["load", "-i", "/run/image.tar"])?;
                }
            }
            let network =
                ["network", "create", "--driver", "macvlan", "--subnet", SUBNET, "-o", "parent=eth0", NETWORK];
            self.docker(node, &network)?;
        }
        Ok(())
    }

    /// Runs a `docker` command in a node, and returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub fn docker(&self, node: &str, arguments: &[&str]) -> Result<String> {
        self.check(node, &[&[CLIENT], arguments].concat())
    }

    /// Starts a container in a node's Docker, with the lab's image and network, the host's /usr and /etc, and a tmpfs
    /// on /tmp. `options` are more of those of `docker run`.
    ///
    /// # Errors
    /// Docker's refusal.
    pub fn docker_run(&self, node: &str, name: &str, ip: Ipv4Addr, options: &[&str], command: &[String]) -> Result<()> {
        self.docker_run_image(node, name, ip, IMAGE, options, command)
    }

    /// The same from another image.
    ///
    /// # Errors
    /// As [`docker_run`](Lab::docker_run).
    pub fn docker_run_image(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.docker_run_whole(node, name, ip, image, &[&BINDS, options].concat(), command)
    }

    /// The same from an image that has all its files, without the host's.
    ///
    /// # Errors
    /// As [`docker_run`](Lab::docker_run).
    pub fn docker_run_whole(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.docker_make(node, &["run", "--detach"], (name, ip, image), options, command)
    }

    /// Makes the container that [`docker_run`](Lab::docker_run) would start.
    ///
    /// # Errors
    /// Docker's refusal.
    pub fn docker_create(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.docker_make(node, &["create"], (name, ip, IMAGE), &[&BINDS, options].concat(), command)
    }

    fn docker_make(
        &self,
        node: &str,
        verb: &[&str],
        (name, ip, image): (&str, Ipv4Addr, &str),
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        let ip = ip.to_string();
        let mut arguments = [verb, &["--name", name, "--network", NETWORK, "--ip", &ip], options].concat();
        arguments.push(image);
        arguments.extend(command.iter().map(String::as_str));
        self.docker(node, &arguments).map(drop)
    }

    /// Kills a node's Docker daemon, and starts it again with this configuration; `live-restore` says whether its containers go on.
    ///
    /// # Errors
    /// If none runs, or it does not answer within 30 s; the error has the end of its log.
    pub fn restart_docker(&self, node: &str, live_restore: bool) -> Result<()> {
        self.kill_docker(node)?;
        let file = self.path(node, CONFIG)?;
        fs::write(&file, format!("{{\"live-restore\": {live_restore}}}")).map_err(LabError::file("write", &file))?;
        self.revive_docker(node)
    }

    /// Kills a node's Docker daemon.
    ///
    /// # Errors
    /// If none runs.
    pub fn kill_docker(&self, node: &str) -> Result<()> {
        // A containerd that it has started dies with it.
        self.check(node, &["sh", "-c", "kill -KILL $(cat /run/docker.pid) && rm /run/docker.pid"]).map(drop)
    }

    /// Starts a node's Docker daemon again after [`kill_docker`](Lab::kill_docker).
    ///
    /// # Errors
    /// If it does not answer within 30 s, twice where its containerd was late; the error has the end of its log.
    pub fn revive_docker(&self, node: &str) -> Result<()> {
        let start = || {
            self.start_dockerd(node, None)?;
            self.await_daemon(node, "Docker", LOG, || self.docker(node, &["version"]).is_ok())
        };
        match start() {
            // On a busy machine; systemd starts it again then.
            Err(LabError::Deadline { ref detail, .. }) if detail.contains("timeout waiting for containerd") => start(),
            other => other,
        }
    }

    fn start_containerd_of_docker(&self, node: &str, path: Option<&str>) -> Result<()> {
        let configuration = "version = 2\nroot = \"/run/docker-containerd/root\"\nstate = \"/run/docker-containerd/state\"\n\
                             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
        let file = self.path(node, CONTAINERD_CONFIG)?;
        fs::write(&file, configuration).map_err(LabError::file("write", &file))?;
        let path = path.map(|path| format!("PATH={path}"));
        let mut daemon = vec!["env"];
        daemon.extend(path.as_deref());
        daemon.extend([CONTAINERD, "--config", CONTAINERD_CONFIG, "--address", CONTAINERD_SOCKET]);
        self.start_daemon(node, &daemon, CONTAINERD_LOG)?;
        let socket = self.path(node, CONTAINERD_SOCKET)?;
        self.await_daemon(node, "Docker's containerd", CONTAINERD_LOG, || UnixStream::connect(&socket).is_ok())
    }

    fn start_dockerd(&self, node: &str, path: Option<&str>) -> Result<()> {
        self.link_wrapper(node)?;
        let (parent, runtime) = (cgroup::parent_of(node), format!("tranship={WRAPPER}"));
        let path = path.map(|path| format!("PATH={path}"));
        let mut daemon = vec!["env"];
        daemon.extend(path.as_deref());
        // The machine's own configuration is not this daemon's.
        daemon.extend([DAEMON, "--config-file", CONFIG, "--data-root", DOCKER_DATA]);
        daemon.extend(["--exec-root", "/run/docker", "--pidfile", "/run/docker.pid"]);
        daemon.extend(["--host", "unix:///run/docker.sock", "--exec-opt", "native.cgroupdriver=cgroupfs"]);
        if self.path(node, CONTAINERD_SOCKET)?.exists() {
            daemon.extend(["--containerd", CONTAINERD_SOCKET]);
        }
        daemon.extend(["--cgroup-parent", &parent, "--bridge", "none", "--add-runtime", &runtime]);
        self.start_daemon(node, &daemon, LOG)
    }
}
