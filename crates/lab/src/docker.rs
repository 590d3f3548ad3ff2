//! Docker in the nodes: a daemon of each node's own, an image that is the same on all of them, and a network on the
//! lab's link.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::cgroup;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::wait_for;
use crate::state::{BIN, ROOTFS};

/// Docker's own client: another one on PATH may be too new for this daemon.
const CLIENT: &str = "/usr/bin/docker";
const DAEMON: &str = "/usr/sbin/dockerd";
/// The runtime wrapper in a node.
const WRAPPER: &str = "/run/tranship-runc";
const LOG: &str = "/run/dockerd.log";
const IMAGE: &str = "tranship-lab";
const NETWORK: &str = "lab";
/// That of the lab's nodes.
const SUBNET: &str = "10.77.0.0/24";
const START_LIMIT: Duration = Duration::from_secs(30);

impl Lab {
    /// Starts a Docker daemon in every node, with the runtime wrapper registered as `tranship`, the image
    /// `tranship-lab` (a skeleton for containers with the host's /usr and /etc) and the network `lab`, a macvlan on the
    /// node's link. Daemons that run stay.
    ///
    /// # Errors
    /// If Debian's docker.io is not installed, or a daemon does not answer within 30 s; the error has the end of its
    /// log.
    pub fn start_docker(&self) -> Result<()> {
        for needed in [CLIENT, DAEMON] {
            if !Path::new(needed).exists() {
                return Err(LabError::Refused(format!("{needed} is not installed; run `make setup`")));
            }
        }
        let nodes = self.nodes();
        if nodes.iter().all(|node| self.docker(node, &["version"]).is_ok()) {
            return Ok(());
        }
        nodes.iter().try_for_each(|node| self.start_daemon(node))?;
        let mut image: Option<Vec<u8>> = None;
        for node in &nodes {
            self.await_daemon(node)?;
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
        let ip = ip.to_string();
        let mut arguments = vec!["run", "--detach", "--name", name, "--network", NETWORK, "--ip", &ip];
        arguments.extend(["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp"]);
        arguments.extend(options);
        arguments.push(IMAGE);
        arguments.extend(command.iter().map(String::as_str));
        self.docker(node, &arguments).map(drop)
    }

    fn start_daemon(&self, node: &str) -> Result<()> {
        let wrapper = self.path(node, WRAPPER)?;
        std::os::unix::fs::symlink(Path::new(BIN).join("transhipd"), &wrapper)
            .map_err(LabError::file("make", &wrapper))?;
        // The machine's own configuration is not this daemon's.
        let file = self.path(node, "/run/docker.json")?;
        fs::write(&file, "{}").map_err(LabError::file("write", &file))?;
        let log = self.path(node, LOG)?;
        let output = fs::File::create(&log).map_err(LabError::file("make", &log))?;
        let errors = output.try_clone().map_err(LabError::file("open", &log))?;
        let (parent, runtime) = (cgroup::parent_of(node), format!("tranship={WRAPPER}"));
        let mut command = self.enter(node)?;
        command.args([
            "setsid",
            "--fork",
            DAEMON,
            "--config-file",
            "/run/docker.json",
            "--data-root",
            "/run/docker-data",
        ]);
        command.args([
            "--exec-root",
            "/run/docker",
            "--pidfile",
            "/run/docker.pid",
            "--host",
            "unix:///run/docker.sock",
        ]);
        command.args(["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", &parent]);
        command.args(["--bridge", "none", "--add-runtime", &runtime]);
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.status().map(drop).map_err(LabError::start("nsenter"))
    }

    fn await_daemon(&self, node: &str) -> Result<()> {
        let answers = || self.docker(node, &["version"]).is_ok().then_some(());
        wait_for(START_LIMIT, answers).ok_or_else(|| {
            let log = self.path(node, LOG).and_then(|p| fs::read_to_string(&p).map_err(LabError::file("read", p)));
            let log = log.unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            LabError::Deadline {
                what: format!("Docker in node {node} did not answer"),
                seconds: START_LIMIT.as_secs(),
                detail: format!("; its log ends:\n  {}", lines[lines.len().saturating_sub(8)..].join("\n  ")),
            }
        })
    }
}
