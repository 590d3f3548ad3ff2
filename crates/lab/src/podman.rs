//! Podman in the nodes: storage and configuration of each node's own, an image that is the same on all of them, and a network on
//! the lab's link.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use crate::cgroup;
use crate::daemon::WRAPPER;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::state::ROOTFS;

/// Podman's command line.
pub const PROGRAM: &str = "/usr/bin/podman";
/// Where a node's agent finds that there is a Podman.
pub(crate) const STORAGE: &str = "/run/containers/data";
const IMAGE: &str = "tranship-lab";
const NETWORK: &str = "lab";
/// What the lab's image needs of the host.
const BINDS: [&str; 6] = ["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp"];
/// That of the lab's nodes.
const SUBNET: &str = "10.77.0.0/24";

/// Programs for `--init`.
const INITS: [&str; 3] = ["/usr/libexec/podman/catatonit", "/usr/bin/tini", "/usr/bin/docker-init"];

/// A node's configuration: its name below /etc/containers, and what is in it.
fn files() -> [(&'static str, String); 3] {
    let storage =
        format!("[storage]\ndriver = \"overlay\"\ngraphroot = \"{STORAGE}\"\nrunroot = \"/run/containers/storage\"\n");
    // Debian's podman only recommends the one that it looks for.
    let init = INITS.iter().find(|path| Path::new(path).exists()).unwrap_or(&INITS[0]);
    let containers = format!(
        "[containers]\ninit_path = \"{init}\"\n\n\
         [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n\n\
         [engine.runtimes]\ntranship = [\"{WRAPPER}\"]\n\n[network]\nnetwork_backend = \"netavark\"\n"
    );
    let policy = "{\"default\": [{\"type\": \"insecureAcceptAnything\"}]}\n".to_owned();
    [("storage.conf", storage), ("containers.conf", containers), ("policy.json", policy)]
}

impl Lab {
    /// Sets Podman up in every node, with runc as its runtime and the runtime wrapper registered as `tranship`, the image
    /// `tranship-lab` (a skeleton for containers with the host's /usr and /etc) and the network `lab`, a macvlan on the
    /// node's link. Where it is set up, nothing changes.
    ///
    /// # Errors
    /// If Debian's podman is not installed, or one of its commands fails.
    pub fn start_podman(&self) -> Result<()> {
        if !Path::new(PROGRAM).exists() {
            return Err(LabError::Refused(format!("{PROGRAM} is not installed; run `make setup`")));
        }
        let mut image: Option<Vec<u8>> = None;
        for node in self.nodes() {
            if self.path(&node, STORAGE)?.exists() {
                continue;
            }
            // Its locks are in /dev/shm, which the nodes have in common.
            self.check(&node, &["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/etc/containers"])?;
            self.check(&node, &["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"])?;
            // Where distributions have it, too, mounts are shared.
            self.check(&node, &["mkdir", "-p", STORAGE])?;
            self.check(&node, &["mount", "--bind", STORAGE, STORAGE])?;
            self.check(&node, &["mount", "--make-shared", STORAGE])?;
            for (name, content) in files() {
                let file = self.path(&node, format!("/etc/containers/{name}"))?;
                fs::write(&file, content).map_err(LabError::file("write", &file))?;
            }
            self.link_wrapper(&node)?;
            let file = self.path(&node, "/run/podman-image.tar")?;
            match &image {
                None => {
                    // An image that is imported twice has two ids: it is imported once.
                    let import = format!("cd / && tar -C {ROOTFS} -c . | {PROGRAM} import - {IMAGE}");
                    self.check(&node, &["sh", "-c", &import])?;
                    self.podman(&node, &["save", "--output", "/run/podman-image.tar", IMAGE])?;
                    image = Some(fs::read(&file).map_err(LabError::file("read", &file))?);
                }
                Some(content) => {
                    fs::write(&file, content).map_err(LabError::file("write", &file))?;
                    self.podman(&node, &["load", "--input", "/run/podman-image.tar"])?;
                }
            }
            let network =
                ["network", "create", "--driver", "macvlan", "--subnet", SUBNET, "-o", "parent=eth0", NETWORK];
            self.podman(&node, &network)?;
        }
        Ok(())
    }

    /// Runs a `podman` command in a node, and returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub fn podman(&self, node: &str, arguments: &[&str]) -> Result<String> {
        // Its directory is one that the node has.
        self.check(node, &[&["env", "--chdir=/", PROGRAM], arguments].concat())
    }

    /// Starts a container in a node's Podman, with the lab's image and network, the host's /usr and /etc, and a tmpfs
    /// on /tmp. `options` are more of those of `podman run`.
    ///
    /// # Errors
    /// Podman's refusal.
    pub fn podman_run(&self, node: &str, name: &str, ip: Ipv4Addr, options: &[&str], command: &[String]) -> Result<()> {
        self.podman_run_image(node, name, ip, IMAGE, options, command)
    }

    /// The same from another image.
    ///
    /// # Errors
    /// As [`podman_run`](Lab::podman_run).
    pub fn podman_run_image(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        self.podman_run_whole(node, name, ip, image, &[&BINDS, options].concat(), command)
    }

    /// The same from an image that has all its files, without the host's.
    ///
    /// # Errors
    /// As [`podman_run`](Lab::podman_run).
    pub fn podman_run_whole(
        &self,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        image: &str,
        options: &[&str],
        command: &[String],
    ) -> Result<()> {
        let (ip, parent) = (ip.to_string(), cgroup::parent_of(node));
        let mut arguments = vec!["run", "--detach", "--name", name, "--network", NETWORK, "--ip", &ip];
        arguments.extend(["--cgroup-parent", &parent]);
        arguments.extend(options);
        arguments.push(image);
        arguments.extend(command.iter().map(String::as_str));
        self.podman(node, &arguments).map(drop)
    }
}
