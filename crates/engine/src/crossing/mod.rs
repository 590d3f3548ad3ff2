//! From one engine to another that describes containers in nearly the same words: Docker and Podman.
//!
//! What the one has written down of a container is told to the other in its own words, from which that makes the container again. What has
//! the same name and meaning is copied; what is said otherwise is translated; of all the rest whatever is not empty is refused, so
//! that nothing is lost unnoticed. What an engine does by default is made explicit (capabilities, command, sysctls, limits), because the
//! other's default is another one.

mod to_docker;
mod to_podman;

use serde_json::{Map, Value};
use tranship_types::{Blocker, BlockerKind, EngineName, TreeKind};

use crate::Container;

/// Parameters of `HostConfig` that are the same in both engines, in name and meaning.
const COMMON: [&str; 23] = [
    "AutoRemove",
    "BlkioWeight",
    "CpuPeriod",
    "CpuQuota",
    "CpuShares",
    "CpusetCpus",
    "CpusetMems",
    "Devices",
    "Dns",
    "DnsOptions",
    "DnsSearch",
    "ExtraHosts",
    "GroupAdd",
    "IpcMode",
    "Memory",
    "MemoryReservation",
    "MemorySwap",
    "OomKillDisable",
    "OomScoreAdj",
    "PidsLimit",
    "PortBindings",
    "ReadonlyRootfs",
    "ShmSize",
];

/// Those of `HostConfig` that belong to a node, follow from others, or are translated.
const APART: [&str; 23] = [
    "Binds",
    "CapAdd",
    "CapDrop",
    "Cgroup",
    "CgroupManager",
    "CgroupMode",
    "CgroupnsMode",
    "CgroupParent",
    "Cgroups",
    "ConsoleSize",
    "ContainerIDFile",
    "Isolation",
    "LogConfig",
    "MemorySwappiness",
    "Mounts",
    "NanoCpus",
    "NetworkMode",
    "RestartPolicy",
    "Runtime",
    "SecurityOpt",
    "Sysctls",
    "Tmpfs",
    "Ulimits",
];

/// Those of `Config` that both call the same.
const COMMON_CONFIG: [&str; 4] = ["Hostname", "User", "StopTimeout", "Labels"];

/// What stands in a container's way to another engine, as it is found.
struct Refusals<'a> {
    container: &'a Container,
    to: EngineName,
    found: Vec<Blocker>,
}

impl Refusals<'_> {
    fn refuse(&mut self, what: &str, remedy: &str) {
        let cause = format!("container {} has {what}, which it would not have in {}", self.container.name, self.to);
        self.found.push(Blocker::new(BlockerKind::Engine, cause, remedy));
    }

    /// Refuses all of a description's part that is said and that nobody knows how to say there.
    fn refuse_rest(&mut self, part: &Value, known: &[&[&str]]) {
        for (key, value) in part.as_object().into_iter().flatten() {
            if !known.iter().any(|known| known.contains(&key.as_str())) && !is_empty(value) {
                self.refuse(&format!("{key} {value}"), "start it without, or leave out --to-engine");
            }
        }
    }

    /// Refuses what the engine itself binds into the container, and the other does not.
    fn refuse_mounts(&mut self) {
        const BOTH: [&str; 5] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm", "/run/.containerenv"];
        let users = |inside: &str| {
            let trees = self.container.trees.iter().map(|tree| tree.inside.as_path());
            trees.into_iter().any(|tree| tree.to_str() == Some(inside))
        };
        let all = self.container.bind_mounts();
        let own = all.iter().filter(|(source, inside)| {
            let inside = inside.to_string_lossy();
            !BOTH.contains(&&*inside) && !users(&inside) && !self.container.binds.contains(source)
        });
        let own: Vec<String> = own.map(|(_, inside)| inside.display().to_string()).collect();
        own.iter()
            .for_each(|inside| self.refuse(&format!("a mount of its engine's at {inside}"), "leave out --to-engine"));
    }
}

/// The parameters by which `to` makes a container of `from` again.
///
/// # Errors
/// What `to` could not give it.
pub(crate) fn parameters(from: EngineName, to: EngineName, container: &Container) -> Result<Value, Vec<Blocker>> {
    let mut refusals = Refusals { container, to, found: Vec::new() };
    let parameters = match (from, to) {
        (EngineName::Docker, EngineName::Podman) => to_podman::translate(&mut refusals),
        (EngineName::Podman, EngineName::Docker) => to_docker::translate(&mut refusals),
        _ => {
            let cause = format!("container {} is {from}'s, which {to} cannot take over", container.name);
            let remedy = "leave out --to-engine; only Docker and Podman take over from each other";
            return Err(vec![Blocker::new(BlockerKind::Engine, cause, remedy)]);
        }
    };
    refusals.refuse_mounts();
    if refusals.found.is_empty() { Ok(parameters) } else { Err(refusals.found) }
}

/// Whether a description says nothing by this.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) => false,
    }
}

fn copied(part: &Value, keys: &[&str]) -> Value {
    let said = keys.iter().filter(|key| !is_empty(&part[**key]));
    said.map(|key| ((*key).to_owned(), part[*key].clone())).collect::<Map<_, _>>().into()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The capabilities that it was given at most, as its runtime has got them.
fn capabilities(container: &Container) -> Vec<String> {
    texts(&container.config["process"]["capabilities"]["bounding"])
}

/// A volume's name, by the tree that it is.
fn volume_at<'a>(container: &'a Container, inside: &str) -> Option<&'a str> {
    let mut volumes = container.trees.iter().filter(|tree| tree.kind == TreeKind::Volume);
    let volume = volumes.find(|tree| tree.inside.to_str() == Some(inside))?;
    volume.path.parent()?.file_name()?.to_str()
}

/// The options of a bind: what follows the place in the container.
fn split_bind(bind: &str) -> Option<(&str, &str, &str)> {
    let mut parts = bind.splitn(3, ':');
    Some((parts.next()?, parts.next()?, parts.next().unwrap_or_default()))
}

/// The security options that both know; the others are refused.
fn security(refusals: &mut Refusals<'_>, options: &Value) -> Vec<String> {
    let known = |option: &str| matches!(option, "seccomp=unconfined" | "no-new-privileges" | "label=disable");
    let (kept, other): (Vec<_>, Vec<_>) = texts(options).into_iter().partition(|option| known(option));
    for option in other {
        let name = option.split('=').next().unwrap_or_default();
        refusals.refuse(&format!("the security option {name}"), "leave out --to-engine");
    }
    kept
}

#[cfg(test)]
mod tests;
