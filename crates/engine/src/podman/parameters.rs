//! What of a container's description by Podman makes it again on another node: the options of `podman create`, and a comparison of
//! what came of them with what was wanted.

mod options;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tranship_types::{Blocker, BlockerKind};

use super::networks::portable;
use super::pod::JoinedPod;
use crate::AttachedNetwork;
use crate::attached::gateways;
use crate::described::{self, is_plain};
use crate::json::list;
use crate::logs::LogFiles;

/// What of `HostConfig` and `Config` differs between two containers that are the same: paths of the node, what follows from
/// something else, and how it was made.
const OF_THE_NODE: [&str; 12] = [
    "CgroupParent",
    "CgroupManager",
    "ContainerIDFile",
    "Runtime",
    "ConsoleSize",
    "LogConfig",
    "PublishAllPorts",
    "NanoCpus",
    "Annotations",
    "CreateCommand",
    "Image",
    "Volumes",
];

/// What Podman writes down in other words than those by which it was told.
const IN_OTHER_WORDS: [&str; 10] = [
    "Env",
    "CapAdd",
    "CapDrop",
    "Binds",
    "Tmpfs",
    "StopSignal",
    "Healthcheck",
    "IpcMode",
    "PidsLimit",
    "RestartPolicy",
];

/// The parameters of a container, as they travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Parameters {
    /// The image's id, which is a digest.
    pub image: String,
    pub image_name: String,
    /// The digests of its layers, the lowest first; none if the source does not have it any more.
    #[serde(default)]
    pub layers: Vec<String>,
    /// Bytes of them all.
    #[serde(default)]
    pub image_bytes: u64,
    /// `Config`, `HostConfig` and capabilities, as `podman inspect` shows them.
    described: Value,
    /// The command that it runs: entry point and arguments.
    command: Vec<String>,
    sysctls: BTreeMap<String, String>,
    /// The id of the pod that it belongs to; empty for none.
    pod: String,
    /// Whether it holds the pod's namespaces.
    #[serde(default)]
    is_infra: bool,
    /// The same pod, where all of it moves.
    #[serde(default)]
    pub joined: Option<JoinedPod>,
    pub networks: Vec<Network>,
    pub volumes: Vec<Volume>,
    /// Devices of the node, by their paths in the container, of which Podman does not say where the node has them: it
    /// looks for their numbers in `/dev`.
    #[serde(default)]
    unknown_devices: Vec<String>,
    /// Whether the container was another engine's, which describes it in other words: only what it says in the same is compared.
    #[serde(default)]
    pub foreign: bool,
}

/// A volume of a container, also one that Podman has named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Volume {
    pub name: String,
    /// Where it is mounted in the container.
    pub inside: PathBuf,
    /// Whether it is a directory of the node's and nothing else.
    local: bool,
}

/// A network that a container is attached to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Network {
    pub name: String,
    pub kind: NetworkKind,
    /// The network as `podman network inspect` shows it, which makes it again on another node; null from an older peer
    /// or another engine.
    #[serde(default)]
    pub described: Value,
    ips: Vec<String>,
    mac: String,
    aliases: Vec<String>,
    /// The gateways that Podman has given the container there; empty from an older peer or another engine.
    #[serde(default)]
    gateways: Vec<IpAddr>,
}

/// What has to be the same of a network on both nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NetworkKind {
    driver: String,
    subnets: Vec<String>,
}

impl NetworkKind {
    /// The options that make such a network, each with a space behind it.
    pub fn options(&self) -> String {
        let subnets: String = self.subnets.iter().map(|subnet| format!("--subnet {subnet} ")).collect();
        format!("--driver {} {subnets}", self.driver)
    }
}

impl fmt::Display for NetworkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a {} with subnet {}", self.driver, self.subnets.join(", "))
    }
}

/// Whether a text can be an argument that is no option, and a name of something.
pub(super) fn is_word(text: &str) -> bool {
    is_plain(text) && !text.starts_with('-')
}

pub(super) fn texts(value: &Value) -> Vec<String> {
    list(value).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

impl Network {
    /// What of a network's description by Podman has to be the same on both nodes.
    pub fn kind(network: &Value) -> NetworkKind {
        let subnets = list(&network["subnets"]).iter().filter_map(|subnet| subnet["subnet"].as_str());
        NetworkKind {
            driver: network["driver"].as_str().unwrap_or_default().to_owned(),
            subnets: subnets.map(str::to_owned).collect(),
        }
    }

    /// The addresses that the container has on it.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().filter_map(|ip| ip.parse().ok()).collect()
    }

    fn option(&self) -> String {
        let (mut option, mut before) = (format!("--network={}", self.name), ':');
        let mut add = |key: &str, value: &str| {
            option.extend([&before.to_string(), key, "=", value]);
            before = ',';
        };
        self.ips.iter().for_each(|ip| add("ip", ip));
        add("mac", &self.mac);
        self.aliases.iter().for_each(|alias| add("alias", alias));
        option
    }
}

impl Parameters {
    /// Those of a container as `podman container inspect` describes it, with its OCI configuration. `network`, `volume` and
    /// `image` give the descriptions of those by their names.
    pub fn read(
        container: &Value,
        config: &Value,
        network: impl Fn(&str) -> Value,
        volume: impl Fn(&str) -> Value,
        image: impl Fn(&str) -> Value,
    ) -> Self {
        let text = |key: &str| container[key].as_str().unwrap_or_default().to_owned();
        let id = text("Id");
        let attached = entries(&container["NetworkSettings"]["Networks"]).map(|(name, endpoint)| {
            let description = network(name);
            let ip = ["IPAddress", "GlobalIPv6Address"].map(|key| endpoint[key].as_str().unwrap_or_default());
            Network {
                name: name.clone(),
                kind: Network::kind(&description),
                described: portable(&description),
                ips: ip.into_iter().filter(|ip| !ip.is_empty()).map(str::to_owned).collect(),
                mac: endpoint["MacAddress"].as_str().unwrap_or_default().to_owned(),
                // Podman adds the id's beginning by itself.
                aliases: texts(&endpoint["Aliases"]).into_iter().filter(|alias| !id.starts_with(alias)).collect(),
                gateways: gateways(endpoint),
            }
        });
        let mounts = list(&container["Mounts"]).iter().filter(|mount| mount["Type"] == "volume");
        let volumes = mounts.filter_map(|mount| {
            let name = mount["Name"].as_str()?.to_owned();
            let description = volume(&name);
            let local = description["Driver"] == "local" && plain(&description["Options"]).is_null();
            Some(Volume { name, inside: mount["Destination"].as_str()?.into(), local })
        });
        let sysctls = entries(&config["linux"]["sysctl"]);
        let image = image(&text("Image"));
        Self {
            image: text("Image"),
            layers: described::layers(&image),
            image_bytes: image["Size"].as_u64().unwrap_or_default(),
            image_name: text("ImageName"),
            described: json!({
                "Config": container["Config"], "HostConfig": container["HostConfig"],
                "EffectiveCaps": container["EffectiveCaps"], "BoundingCaps": container["BoundingCaps"],
            }),
            command: command(container, &config["process"]["args"]),
            sysctls: sysctls.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect(),
            pod: text("Pod"),
            is_infra: container["IsInfra"] == true,
            joined: None,
            networks: attached.collect(),
            volumes: volumes.collect(),
            unknown_devices: unknown_devices(&container["HostConfig"], &config["linux"]["devices"]),
            foreign: false,
        }
    }

    /// Its networks. `resolves` says of a network's name whether names are resolved there.
    pub fn attached(&self, name: &str, resolves: impl Fn(&str) -> bool) -> Vec<AttachedNetwork> {
        let attached = |network: &Network| {
            let aliases = network.aliases.iter().map(String::as_str);
            let resolved = resolves(&network.name);
            let names = std::iter::once(name).chain(aliases).filter(|_| resolved);
            AttachedNetwork::new(&network.name, network.ips.iter().map(String::as_str), network.gateways.clone(), names)
        };
        self.networks.iter().map(attached).collect()
    }

    /// What of a container that was made from these parameters is not as it was wanted.
    pub fn differences(&self, made: &Value) -> Vec<String> {
        let mut found = Vec::new();
        let mut compare = |what: &str, wanted: &Value, is: &Value| {
            let [wanted, is] = [wanted, is].map(plain);
            if wanted != is {
                found.push(format!("{what} is {is} instead of {wanted}"));
            }
        };
        for part in ["Config", "HostConfig"] {
            let excepted = |key: &str| {
                OF_THE_NODE.contains(&key)
                    || (self.foreign && IN_OTHER_WORDS.contains(&key))
                    || self.is_of_pod(&self.described[part][key])
                    || (key == "Hostname" && self.has_host_name_of_node())
                    // A container that has run has more in it.
                    || (self.is_infra && key == "Env")
            };
            for (key, wanted) in entries(&self.described[part]).filter(|(key, _)| !excepted(key)) {
                compare(key, &self.own(key, wanted), &self.own(key, &made[part][key]));
            }
        }
        let log = |container: &Value| container["HostConfig"]["LogConfig"]["Type"].clone();
        compare("log driver", &log(&self.described), &log(made));
        for key in ["EffectiveCaps", "BoundingCaps"].into_iter().filter(|key| !self.described[*key].is_null()) {
            compare(key, &self.described[key], &made[key]);
        }
        let command = shown_command(made);
        if self.command != command && [&self.command[..], &self.command].concat() != command {
            found.push(format!("its command is {command:?} instead of {:?}", self.command));
        }
        found
    }

    /// The networks that it needs: its own, or those of the pod that it brings. A container of a pod shows the pod's as
    /// its own, which are the infra container's.
    pub fn all_networks(&self) -> impl Iterator<Item = &Network> {
        let networks = match &self.joined {
            None => &self.networks[..],
            Some(joined) => joined.brought.as_ref().map_or(&[][..], |pod| &pod.infra.networks),
        };
        networks.iter()
    }

    /// The id of the pod that it belongs to; empty for none.
    pub fn pod(&self) -> &str {
        &self.pod
    }

    /// `HostConfig`, as `podman inspect` shows it.
    pub fn host_config(&self) -> &Value {
        &self.described["HostConfig"]
    }

    /// The directories that are mounted into it, as `podman inspect` shows them.
    pub fn binds(&self) -> Vec<String> {
        texts(&self.described["HostConfig"]["Binds"])
    }

    /// A value without what Podman adds when it starts a container of a pod: the host name in its environment.
    fn own(&self, key: &str, value: &Value) -> Value {
        match self.joined.is_some() && key == "Env" {
            true => texts(value).into_iter().filter(|text| !text.starts_with("HOSTNAME=")).collect(),
            false => value.clone(),
        }
    }

    /// Whether its host name is the node's, wherever it is.
    fn has_host_name_of_node(&self) -> bool {
        self.described["HostConfig"]["UTSMode"] == "host"
    }

    /// Whether a mode (`container:ID`) means a namespace of its pod's.
    fn is_of_pod(&self, mode: &Value) -> bool {
        !self.pod.is_empty() && mode.as_str().is_some_and(|mode| mode.starts_with("container:"))
    }

    /// What there is to say of its published ports.
    pub fn remarks(&self, name: &str) -> Vec<String> {
        described::published(name, &self.described["HostConfig"]).into_iter().collect()
    }

    /// The files of its log: conmon appends to one, which Podman reads. `None` for drivers that keep it elsewhere.
    pub fn log(&self) -> Option<LogFiles> {
        let log = &self.described["HostConfig"]["LogConfig"];
        let driver = log["Type"].as_str().filter(|driver| matches!(*driver, "k8s-file" | "json-file"))?.to_owned();
        let current = log["Path"].as_str().filter(|path| !path.is_empty())?.into();
        Some(LogFiles { driver, current, most: 1, max_bytes: None, compressed: false })
    }

    /// What becomes of its log where that stays behind.
    pub fn log_left(&self, name: &str) -> Option<String> {
        match self.described["HostConfig"]["LogConfig"]["Type"].as_str()? {
            "journald" => Some(described::logged_to_journal("podman", name)),
            _ => described::logged("podman", name, self.log()?.bytes()),
        }
    }

    /// What no other node could give to the container.
    pub fn obstacles(&self, name: &str) -> Vec<Blocker> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: &str| found.push(Blocker::new(kind, cause, remedy));
        let host = &self.described["HostConfig"];
        for (key, what, own) in [
            ("NetworkMode", "network", ["bridge", "none"]),
            ("IpcMode", "IPC namespace", ["shareable", "private"]),
            ("PidMode", "pid namespace", ["private", ""]),
            // Whether the user allows another node's host name is asked elsewhere.
            ("UTSMode", "host name", ["private", "host"]),
            ("UsernsMode", "user namespace", ["", "host"]),
        ] {
            let mode = host[key].as_str().unwrap_or_default();
            // Whether all of the pod moves is known to who asks for that.
            let is_of_pod = ["NetworkMode", "IpcMode", "UTSMode"].contains(&key) && self.is_of_pod(&host[key]);
            let is_own = own.contains(&mode) || (key == "UTSMode" && mode.is_empty());
            if !is_own && !is_of_pod {
                let cause = format!("container {name} uses the {what} {mode:?}, which cannot move with it");
                let remedy = match mode.starts_with("container:") && key != "PidMode" && key != "UsernsMode" {
                    true => "start it with one of its own, or both containers in a pod, which moves as a whole",
                    false => "start it with one of its own",
                };
                add(BlockerKind::Engine, cause, remedy);
            }
        }
        if self.image.is_empty() {
            let cause = format!("container {name} was made from a directory and not from an image");
            add(BlockerKind::Rootfs, cause, "make an image of the directory (`podman import`)");
        }
        for volume in self.volumes.iter().filter(|volume| !volume.local) {
            let cause = format!("volume {} of container {name} has a driver or options of its own", volume.name);
            add(BlockerKind::Mount, cause, "give it a plain volume, or mount what it stands for on both nodes");
        }
        for device in &self.unknown_devices {
            let cause = format!(
                "container {name} has the device {device}, and Podman does not say which device of the node that is"
            );
            add(
                BlockerKind::Engine,
                cause,
                "make the device in the node's /dev, where Podman looks for it, or start the container without it",
            );
        }
        if !list(&self.described["Config"]["Secrets"]).is_empty() {
            let cause = format!("container {name} uses secrets, which Podman keeps on this node");
            add(BlockerKind::Engine, cause, "mount them as files that both nodes have");
        }
        found
    }
}

/// The devices of a runtime's configuration that Podman does not show. It shows none of a container that has all.
fn unknown_devices(host: &Value, devices: &Value) -> Vec<String> {
    let known: Vec<_> = list(&host["Devices"]).iter().map(|device| &device["PathInContainer"]).collect();
    let unknown = list(devices).iter().map(|device| &device["path"]).filter(|path| !known.contains(path));
    unknown.filter(|_| host["Privileged"] != true).filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The command that a container runs, by the configuration of its runtime where there is one.
fn command(container: &Value, arguments: &Value) -> Vec<String> {
    Some(texts(arguments)).filter(|all| !all.is_empty()).unwrap_or_else(|| shown_command(container))
}

/// The command that `podman inspect` shows: one of a single word is there twice, as `Path` and in
/// `Args`.
fn shown_command(container: &Value) -> Vec<String> {
    [vec![container["Path"].as_str().unwrap_or_default().to_owned()], texts(&container["Args"])].concat()
}

/// A value such that two that mean the same are equal: what is empty is null, and lists are in order.
pub(super) fn plain(value: &Value) -> Value {
    match value {
        Value::Bool(false) => Value::Null,
        Value::Number(number) if number.as_f64() == Some(0.0) => Value::Null,
        Value::String(text) if text.is_empty() => Value::Null,
        Value::Array(items) => {
            let mut items: Vec<Value> = items.iter().map(plain).collect();
            items.sort_by_key(Value::to_string);
            if items.is_empty() { Value::Null } else { items.into() }
        }
        Value::Object(fields) => {
            let fields =
                fields.iter().map(|(key, value)| (key.clone(), plain(value))).filter(|(_, value)| !value.is_null());
            let fields: serde_json::Map<_, _> = fields.collect();
            if fields.is_empty() { Value::Null } else { fields.into() }
        }
        other => other.clone(),
    }
}

/// For the fuzz targets: a description by Podman, and parameters that a peer has sent.
pub(crate) fn fuzz(value: &Value) {
    let read = Parameters::read(value, value, |_| value.clone(), |_| value.clone(), |_| value.clone());
    let sent = described::parameters::<Parameters>("c", value);
    for parameters in [Some(read), sent.ok()].into_iter().flatten() {
        let _ = parameters.create_arguments("c", "image", None);
        parameters.all_networks().for_each(|network| super::networks::fuzz(&network.described));
        let _ = (parameters.differences(value), parameters.remarks("c"), parameters.obstacles("c"), parameters.binds());
        assert_eq!(
            serde_json::from_value::<Parameters>(serde_json::to_value(&parameters).unwrap()).unwrap(),
            parameters
        );
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn described() -> Value {
        json!({
            "Id": "a9dd338bbeec8892", "Image": "f88f", "ImageName": "localhost/lab:1", "Pod": "",
            "Path": "sh", "Args": ["-c", "exec redis-server"], "EffectiveCaps": ["CAP_CHOWN"],
            "Config": {
                "Hostname": "a9dd338bbeec", "Env": ["A=b\nc"], "Cmd": ["exec redis-server"], "Labels": {"tier": "back"},
                "Annotations": {"io.podman.annotations.init": "FALSE", "own": "x"}, "StopSignal": 15, "Tty": false,
                "Healthcheck": {"Test": ["CMD-SHELL", "true"], "Timeout": 30_000_000_000_u64, "Retries": 3},
            },
            "HostConfig": {
                "NetworkMode": "bridge", "IpcMode": "shareable", "PidMode": "private", "UTSMode": "private",
                "CgroupParent": "/lab/a", "Memory": 268_435_456, "CpuQuota": 0, "Runtime": "oci",
                "Binds": ["data:/data:rw,rbind"], "Tmpfs": {"/tmp": "rw"},
                "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 3},
                "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}]},
                "Ulimits": [{"Name": "RLIMIT_NOFILE", "Soft": 1000, "Hard": 2000}],
                "LogConfig": {"Type": "k8s-file", "Path": "/a", "Size": "0B"},
            },
            "NetworkSettings": {"Networks": {"lab": {
                "IPAddress": "10.77.0.60", "GlobalIPv6Address": "", "MacAddress": "5a:8f:a0:00:06:41",
                "Aliases": ["a9dd338bbeec", "db"],
            }}},
        })
    }

    fn parameters(container: &Value) -> Parameters {
        let config = json!({"linux": {"sysctl": {"net.core.somaxconn": "99"}}});
        let network = |_: &str| json!({"driver": "macvlan", "subnets": [{"subnet": "10.77.0.0/24"}]});
        let image = |_: &str| json!({"Size": 7, "RootFS": {"Layers": ["sha256:a"]}});
        Parameters::read(container, &config, network, |_| json!({"Driver": "local", "Options": {}}), image)
    }

    #[test]
    fn others_find_it_by_its_name_and_aliases_where_names_are_resolved() {
        let of = |resolved| parameters(&described()).attached("web", |_| resolved).remove(0);
        let attached = of(true);
        assert_eq!((&*attached.name, &*attached.addresses), ("lab", &["10.77.0.60".parse().unwrap()][..]));
        assert_eq!((attached.names, of(false).names), (vec!["web".to_owned(), "db".to_owned()], Vec::new()));
    }

    #[test]
    fn a_container_is_made_again_with_its_options_and_addresses() {
        let parameters = parameters(&described());
        assert_eq!((parameters.layers.as_slice(), parameters.image_bytes), (&["sha256:a".to_owned()][..], 7));
        let all = parameters.create_arguments("web", "f88f", Some(Path::new("/lab/b")));
        let wanted = [
            "--name=web",
            "--hostname=a9dd338bbeec",
            "--env=A=b\nc",
            "--label=tier=back",
            "--annotation=own=x",
            "--stop-signal=15",
            "--memory=268435456",
            "--volume=data:/data:rw,rbind",
            "--tmpfs=/tmp:rw,notmpcopyup",
            "--pids-limit=-1",
            "--cap-drop=ALL",
            "--cap-add=CAP_CHOWN",
            "--restart=on-failure:3",
            "--publish=8080:80/tcp",
            "--ulimit=nofile=1000:2000",
            "--sysctl=net.core.somaxconn=99",
            "--cgroup-parent=/lab/b",
            "--health-interval=disable",
            "--health-timeout=30000000000ns",
            "--entrypoint=[\"sh\",\"-c\"]",
            "--network=lab:ip=10.77.0.60,mac=5a:8f:a0:00:06:41,alias=db",
        ];
        for option in wanted {
            assert!(all.iter().any(|one| one == option), "no {option:?} in {all:#?}");
        }
        assert!(!all.iter().any(|one| one.starts_with("--cpu-quota") || one.starts_with("--tty")), "{all:#?}");
        assert_eq!(all[all.len() - 2..], ["f88f", "exec redis-server"]);
    }

    #[test]
    fn what_was_made_otherwise_is_named() {
        let parameters = parameters(&described());
        let mut made = described();
        made["Id"] = "other".into();
        made["HostConfig"]["CgroupParent"] = "/lab/b".into();
        made["HostConfig"]["CapAdd"] = json!([]);
        assert_eq!(parameters.differences(&made), [""; 0]);
        made["HostConfig"]["Memory"] = 1.into();
        made["Args"] = json!(["-c"]);
        let found = parameters.differences(&made);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("Memory is 1 instead of 268435456"), "{found:?}");
    }

    #[test]
    fn what_belongs_to_one_node_alone_is_an_obstacle() {
        assert!(parameters(&described()).obstacles("web").is_empty());
        let mut container = described();
        container["HostConfig"]["NetworkMode"] = "host".into();
        let found: Vec<String> = parameters(&container).obstacles("web").iter().map(ToString::to_string).collect();
        assert!(found.len() == 1 && found[0].contains("network \"host\""), "{found:?}");
        let mut member = described();
        member["HostConfig"]["NetworkMode"] = "container:a1".into();
        assert_eq!(parameters(&member).obstacles("web").len(), 1);
        member["Pod"] = "p".into();
        assert!(parameters(&member).obstacles("web").is_empty());
        member["HostConfig"]["PidMode"] = "container:a1".into();
        assert_eq!(parameters(&member).obstacles("web").len(), 1);
    }

    #[test]
    fn a_name_is_no_option() {
        assert!(is_word("web-1") && !is_word("-f") && !is_word("--all"));
    }
}
