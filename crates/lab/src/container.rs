//! Stock runc containers in nodes, attached to the lab network through the CNI plugins.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::program;
use crate::spec::{ATTACHMENT_ANNOTATION, IP_ANNOTATION, RunOptions, config, network_namespace};
use crate::state::{Node, ROOTFS};
use crate::switch::PREFIX;
use crate::{cgroup, rootfs, switch};

const PLUGINS: &str = "/usr/lib/cni";
const BUNDLES: &str = "/run/containers";
/// The bundles of containers that were moved here.
const MOVED: &str = "/run/tranship/bundles";

impl Lab {
    /// Starts a container in a node: network namespace, CNI attachment, bundle, `runc run --detach`. What a failure
    /// leaves half done is undone.
    ///
    /// # Errors
    /// If the name or the address is taken, or a step fails.
    pub fn run(&self, node: &str, name: &str, options: &RunOptions) -> Result<()> {
        self.run_with(node, name, options, [Stdio::null(), Stdio::null(), Stdio::null()])
    }

    /// The same with stdin, stdout and stderr of its own.
    ///
    /// # Errors
    /// As [`Lab::run`].
    pub fn run_with(&self, node: &str, name: &str, options: &RunOptions, stdio: [Stdio; 3]) -> Result<()> {
        let place = self.node(node)?;
        self.validate(place, name, options)?;
        if options.bridge {
            self.ensure_bridges(node)?;
        }
        let begun = self.begin(place, name, options, stdio);
        if begun.is_err() {
            // The first error is the one to tell; what cannot be undone goes with the node.
            let _ = self.remove(place, name, options.attachment());
        }
        begun
    }

    fn begin(&self, node: &Node, name: &str, options: &RunOptions, stdio: [Stdio; 3]) -> Result<()> {
        self.make_network(node, name, options.attachment(), options.ip)?;
        let bundle = format!("{BUNDLES}/{name}");
        let directory = self.path(&node.name, &bundle)?;
        if directory.exists() {
            self.remove_bundles(&node.name, name)?;
        }
        fs::create_dir(&directory).map_err(LabError::file("make the bundle", &directory))?;
        let text = config(name, &cgroup::parent_of(&node.name), options);
        let file = directory.join("config.json");
        fs::write(&file, format!("{text:#}\n")).map_err(LabError::file("write", &file))?;

        // The container inherits runc's stdio, so what runc has to say must come by another way.
        let log = format!("{BUNDLES}/.{name}.log");
        let mut runc = self.command(
            &node.name,
            &["runc", "--root", runc_root(), "--log", &log, "run", "--detach", "--bundle", &bundle, name],
        )?;
        let [stdin, stdout, stderr] = stdio;
        runc.stdin(stdin).stdout(stdout).stderr(stderr);
        let status = runc.status().map_err(LabError::start("nsenter"))?;
        let log = self.path(&node.name, &log)?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(log);
        if status.success() {
            return Ok(());
        }
        let program = options.command.first().map_or("", String::as_str);
        if said.contains("executable file not found") || said.contains(&format!("stat {program}: no such file")) {
            let root = options.rootfs.as_deref().map_or("the host's /usr".to_owned(), |r| r.display().to_string());
            return Err(LabError::Refused(format!(
                "{program} is not in the container's root filesystem ({root}); install it there or give its full path"
            )));
        }
        Err(LabError::Program {
            what: format!("runc run {name} in node {}", node.name),
            status: status.to_string(),
            output: said,
        })
    }

    /// Removes a container with its processes, network namespace and bundle; also one that was moved to this node.
    ///
    /// # Errors
    /// If there is no such container or something of it cannot be removed.
    pub fn stop(&self, node: &str, name: &str) -> Result<()> {
        let place = self.node(node)?;
        valid_name(name)?;
        let attachment = match self.container_state(place, name) {
            Some(state) => label(&state, ATTACHMENT_ANNOTATION).unwrap_or_else(|| "macvlan".into()),
            None if self.remains(place, name)? => "macvlan".into(),
            None => {
                let there = self.containers(place).join(", ");
                return Err(LabError::Refused(format!(
                    "node {node} has no container {name:?}; it has {}",
                    if there.is_empty() { "none" } else { &there }
                )));
            }
        };
        self.remove(place, name, &attachment)
    }

    fn remove(&self, node: &Node, name: &str, attachment: &str) -> Result<()> {
        let on = node.name.as_str();
        let mut errors = Vec::new();
        let mut attempt = |result: Result<()>| errors.extend(result.err());
        if self.path(on, runc_root())?.join(name).exists() {
            attempt(self.check(on, &["runc", "--root", runc_root(), "delete", "--force", name]).map(drop));
        }
        attempt(self.remove_network(node, name, attachment));
        attempt(self.remove_bundles(on, name));
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    /// Makes a network namespace for a container, and attaches it.
    pub(crate) fn make_network(&self, node: &Node, name: &str, attachment: &str, ip: Ipv4Addr) -> Result<()> {
        self.check(&node.name, &["ip", "netns", "add", name])?;
        self.check(&node.name, &["ip", "-n", name, "link", "set", "lo", "up"])?;
        self.cni(node, name, "ADD", attachment, Some(ip))
    }

    /// Removes a container's network namespace, if there is one.
    pub(crate) fn remove_network(&self, node: &Node, name: &str, attachment: &str) -> Result<()> {
        if !self.path(&node.name, network_namespace(name))?.exists() {
            return Ok(());
        }
        let detached = self.cni(node, name, "DEL", attachment, None);
        self.check(&node.name, &["ip", "netns", "delete", name]).and(detached)
    }

    fn validate(&self, node: &Node, name: &str, options: &RunOptions) -> Result<()> {
        let refuse = |text: String| Err(LabError::Refused(text));
        valid_name(name)?;
        if node.name == crate::CLIENT {
            return refuse("the client node has no container engine; run containers on a, b, …".into());
        }
        if options.command.is_empty() {
            return refuse("say what to run: tranship-lab run NODE NAME --ip ADDR -- CMD…".into());
        }
        program::require("runc")?;
        for plugin in [options.attachment(), "static"] {
            if !Path::new(PLUGINS).join(plugin).exists() {
                return refuse(format!("the CNI plugin {PLUGINS}/{plugin} is not installed; run `make setup`"));
            }
        }
        if self.is_there(node, name)? {
            return refuse(format!(
                "node {} has a container {name:?} already; choose another name or say `tranship-lab stop {} {name}`",
                node.name, node.name
            ));
        }
        if let Some(owner) = self.owner_of(options.ip) {
            return refuse(format!("address {} is taken by {owner}; choose another", options.ip));
        }
        if !switch::in_network(options.ip) {
            return refuse(format!("address {} is not in the lab's network; choose one of 10.77.0.1-254", options.ip));
        }
        let mounts = options.tmpfs.iter().map(|target| (None, target));
        let shown = options.binds.iter().chain(&options.volumes);
        for (source, target) in mounts.chain(shown.map(|(source, target)| (Some(source), target))) {
            let outside = source.map(|s| self.path(&node.name, s)).transpose()?;
            if let (Some(source), Some(false)) = (source, outside.as_ref().map(|p| p.exists())) {
                return refuse(format!("{} does not exist in node {}{PRIVATE}", source.display(), node.name));
            }
            if options.rootfs.is_none() {
                rootfs::ensure_mount_point(Path::new(ROOTFS), target, outside.is_some_and(|p| p.is_file()))?;
            }
        }
        match &options.rootfs {
            Some(root) if !root.is_absolute() => {
                refuse(format!("--rootfs {} must be an absolute path", root.display()))
            }
            Some(root) if !self.path(&node.name, root)?.is_dir() => {
                refuse(format!("--rootfs {} is no directory in node {}{PRIVATE}", root.display(), node.name))
            }
            _ => Ok(()),
        }
    }

    /// Whether there is a container of this name, or one is on its way: its network is made before it.
    fn is_there(&self, node: &Node, name: &str) -> Result<bool> {
        let places = [format!("{}/{name}", runc_root()), network_namespace(name)];
        Ok(places.iter().map(|p| self.path(&node.name, p)).collect::<Result<Vec<_>>>()?.iter().any(|p| p.exists()))
    }

    /// Whether there is anything of a container of this name; one that has moved away leaves its bundle.
    fn remains(&self, node: &Node, name: &str) -> Result<bool> {
        Ok(self.is_there(node, name)? || self.path(&node.name, format!("{BUNDLES}/{name}"))?.exists())
    }

    /// Removes what a container that is gone was made of here.
    fn remove_bundles(&self, node: &str, name: &str) -> Result<()> {
        let bundles = [BUNDLES, MOVED].map(|bundles| format!("{bundles}/{name}"));
        self.check(node, &["rm", "-rf", "--one-file-system", &bundles[0], &bundles[1]]).map(drop)
    }

    /// The names of the containers that runc knows in a node.
    fn containers(&self, node: &Node) -> Vec<String> {
        let entries = self.path(&node.name, runc_root()).ok().and_then(|root| fs::read_dir(root).ok());
        entries.into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
    }

    /// What runc (or crun, called so) has written down about a container.
    fn container_state(&self, node: &Node, name: &str) -> Option<Value> {
        let directory = self.path(&node.name, runc_root()).ok()?.join(name);
        let text = fs::read(directory.join("state.json")).or_else(|_| fs::read(directory.join("config.json")));
        serde_json::from_slice(&text.ok()?).ok()
    }

    /// Who has an address: a node or a container.
    fn owner_of(&self, ip: Ipv4Addr) -> Option<String> {
        for node in self.members() {
            if node.address == ip {
                return Some(format!("node {}", node.name));
            }
            let has = |name: &String| {
                let state = self.container_state(node, name);
                state.and_then(|s| label(&s, IP_ANNOTATION)).is_some_and(|text| text == ip.to_string())
            };
            if let Some(name) = self.containers(node).into_iter().find(has) {
                return Some(format!("container {name} on node {}", node.name));
            }
        }
        None
    }

    /// Makes the bridge `br0` on the node, and on all others where that is possible, so that containers can move there.
    fn ensure_bridges(&self, node: &str) -> Result<()> {
        for name in self.nodes() {
            match switch::ensure_bridge(self.node(&name)?) {
                // A device cannot carry macvlans and be a bridge's port at once.
                Err(LabError::Program { output, .. }) if output.contains("busy") => {
                    if name == node {
                        return Err(LabError::Refused(format!(
                            "eth0 of node {node} carries macvlan containers, so it cannot be a bridge's port; stop them first"
                        )));
                    }
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Calls a CNI plugin for the container's eth0.
    fn cni(&self, node: &Node, name: &str, verb: &str, attachment: &str, ip: Option<Ipv4Addr>) -> Result<()> {
        let mut command = self.command(&node.name, &[format!("{PLUGINS}/{attachment}")])?;
        command.envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", name), ("CNI_IFNAME", "eth0"), ("CNI_PATH", PLUGINS)]);
        command.env("CNI_NETNS", network_namespace(name));
        let what = format!("CNI {verb} of {attachment} for container {name} in node {}", node.name);
        match program::run(what, &mut command, &cni_config(attachment, ip).to_string()) {
            // A device cannot be a bridge's port and carry macvlans at once.
            Err(LabError::Program { output, .. }) if attachment == "macvlan" && output.contains("busy") => {
                Err(LabError::Refused(format!(
                    "eth0 of node {} is a port of the bridge br0 and cannot carry macvlans any more; give --bridge too",
                    node.name
                )))
            }
            other => other.map(drop),
        }
    }
}

/// The state directory of the machine's runc: its own default, also where crun goes by that name.
pub fn runc_root() -> &'static str {
    static IS_CRUN: LazyLock<bool> = LazyLock::new(|| {
        Command::new("runc").arg("--version").output().is_ok_and(|said| said.stdout.starts_with(b"crun"))
    });
    if *IS_CRUN { "/run/crun" } else { "/run/runc" }
}

const PRIVATE: &str = " (a node's /run and /tmp are its own)";

fn valid_name(name: &str) -> Result<()> {
    let usable = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if name.len() <= 63 && name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.bytes().all(usable) {
        return Ok(());
    }
    Err(LabError::Refused(format!(
        "{name:?} is no container name; use up to 63 letters, digits, '-', '_' and '.', a letter or digit first"
    )))
}

/// A label in what runc has written down; it keeps a config's annotations as `NAME=VALUE`. crun keeps the config.
fn label(state: &Value, name: &str) -> Option<String> {
    if let Some(value) = state["annotations"][name].as_str() {
        return Some(value.to_owned());
    }
    let labels = state["config"]["labels"].as_array()?;
    let value = labels.iter().find_map(|l| l.as_str()?.strip_prefix(name)?.strip_prefix('='));
    value.map(str::to_owned)
}

/// The network configuration that a plugin reads.
fn cni_config(attachment: &str, ip: Option<Ipv4Addr>) -> Value {
    let addresses: Vec<_> = ip.iter().map(|ip| json!({"address": format!("{ip}/{PREFIX}")})).collect();
    let mut config = json!({
        "cniVersion": "0.4.0",
        "name": "tranship-lab",
        "type": attachment,
        "ipam": {"type": "static", "addresses": addresses},
    });
    if attachment == "bridge" {
        config["bridge"] = json!("br0");
    } else {
        config["master"] = json!("eth0");
        config["mode"] = json!("bridge");
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lab_finds_its_address_among_runcs_labels() {
        let state = json!({"config": {"labels": ["bundle=/x", "tranship-lab.ip=10.77.0.10"]}});
        assert_eq!(label(&state, IP_ANNOTATION).as_deref(), Some("10.77.0.10"));
        assert_eq!(label(&json!({}), IP_ANNOTATION), None);
    }

    #[test]
    fn both_attachments_have_a_static_address() {
        let ip = Some(Ipv4Addr::new(10, 77, 0, 10));
        assert_eq!(cni_config("macvlan", ip)["ipam"]["addresses"][0]["address"], "10.77.0.10/24");
        assert_eq!(cni_config("macvlan", ip)["master"], "eth0");
        assert_eq!(cni_config("bridge", ip)["bridge"], "br0");
    }

    #[test]
    fn names_that_could_leave_a_directory_are_refused() {
        for bad in ["", "..", "a/b", "-x", ".x", "ä"] {
            assert!(valid_name(bad).is_err(), "{bad:?}");
        }
        assert!(valid_name("redis-1.x").is_ok());
    }
}
