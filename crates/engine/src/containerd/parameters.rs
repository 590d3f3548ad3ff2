//! What is needed to make a container of containerd's again on another node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind};

use super::images::Layer;

/// By which containerd's restart monitor knows what it is to start again.
const RESTART: &str = "containerd.io/restart.status";

/// A container's record, but for what belongs to one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Parameters {
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    pub image: String,
    /// Empty where the name stands for nothing on the source any more.
    pub image_digest: String,
    /// The image's layers, the lowest first; empty where the source does not have all of them itself.
    #[serde(default)]
    pub layers: Vec<Layer>,
    pub snapshotter: String,
    /// What the snapshot lies over. It is named for its content: the digest of the image's layers.
    pub parent: String,
    pub runtime: String,
    /// The runtime's options, as they are encoded.
    pub options: Vec<u8>,
    /// The OCI configuration, as containerd keeps it.
    pub spec: Value,
    /// Where the shim writes what the container says, as a URI; empty: nowhere, or to whoever has attached.
    pub log: String,
    /// Type and value of each.
    pub extensions: BTreeMap<String, (String, Vec<u8>)>,
}

impl Parameters {
    /// What of these keeps the container from being made again elsewhere. `interfaces` are those of its network
    /// namespace, where that has no name.
    pub fn obstacles(&self, name: &str, interfaces: &[String]) -> Vec<Blocker> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: &str| found.push(Blocker::new(kind, cause, remedy));
        if self.spec["process"]["terminal"] == true {
            let cause = format!("container {name} has a terminal, whose other end is on this node");
            add(BlockerKind::Engine, cause, "start it without `--tty`");
        }
        if self.spec["hooks"].as_object().is_some_and(|hooks| !hooks.is_empty()) {
            let cause = format!("container {name} has hooks, which were run on this node when it started");
            add(BlockerKind::Engine, cause, "start it without, in a network namespace that was made for it");
        }
        if self.labels.contains_key(RESTART) {
            let cause = format!("containerd would start container {name} again by itself ({RESTART})");
            add(BlockerKind::Engine, cause, "take that label off (`ctr containers label`)");
        }
        let namespaces = self.spec["linux"]["namespaces"].as_array().map(Vec::as_slice).unwrap_or_default();
        for shared in namespaces.iter().filter(|n| n["type"] != "network" && n["path"].is_string()) {
            let (kind, path) = (shared["type"].as_str().unwrap_or_default(), &shared["path"]);
            let cause = format!("container {name} has joined the {kind} namespace {path} of this node");
            add(BlockerKind::Engine, cause, "give it one of its own");
        }
        if !interfaces.is_empty() {
            let cause = format!("the network namespace of container {name} has {}, but no name", interfaces.join(", "));
            add(
                BlockerKind::Network,
                cause,
                "make one by `ip netns add`, attach that, and start it with `--with-ns network:/run/netns/NAME`",
            );
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parameters() -> Parameters {
        let spec = json!({"process": {"terminal": false}, "linux": {"namespaces": [
            {"type": "pid"}, {"type": "network", "path": "/run/netns/web"},
        ]}});
        Parameters {
            namespace: "default".into(),
            labels: BTreeMap::new(),
            image: "docker.io/library/web:1".into(),
            image_digest: "sha256:0f".into(),
            layers: Vec::new(),
            snapshotter: "overlayfs".into(),
            parent: "sha256:1f".into(),
            runtime: "io.containerd.runc.v2".into(),
            options: Vec::new(),
            spec,
            log: String::new(),
            extensions: BTreeMap::new(),
        }
    }

    #[test]
    fn what_belongs_to_one_node_alone_is_an_obstacle() {
        assert_eq!(parameters().obstacles("web", &[]), []);
        let mut bound = parameters();
        bound.spec["process"]["terminal"] = true.into();
        bound.spec["hooks"] = json!({"createRuntime": [{"path": "/usr/bin/nerdctl"}]});
        bound.spec["linux"]["namespaces"][0]["path"] = "/proc/7/ns/pid".into();
        bound.labels.insert(RESTART.to_owned(), "running".to_owned());
        let found: Vec<String> = bound.obstacles("web", &["eth0".to_owned()]).iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 5, "{found:#?}");
        for words in ["terminal", "hooks", "pid namespace", "restart.status", "has eth0, but no name"] {
            assert!(found.iter().any(|blocker| blocker.contains(words)), "no {words:?} in {found:#?}");
        }
    }
}
