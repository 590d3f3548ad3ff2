//! The agent's configuration file.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Deserializer, de::Error};
use tranship_memory::tracker::Method;
use tranship_types::NodeName;

mod check;
mod peers;

pub use peers::{Accept, AllowedBind, Peer, is_plain};

/// `/etc/tranship/agent.toml`; see `packaging/agent.toml` for an example with explanations.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// This node's name; its certificate must say the same.
    pub node: NodeName,
    /// Where to listen for other agents, `host:port`.
    pub listen: String,
    /// The API's socket.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// For what lives as long as a migration, in memory.
    #[serde(default = "default_run_dir")]
    pub run_dir: PathBuf,
    /// For journals and history.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// Certificates.
    pub tls: Tls,
    /// The other nodes and where their agents listen.
    #[serde(default)]
    pub peers: BTreeMap<NodeName, Peer>,
    /// What may come from peers that say nothing else.
    #[serde(default)]
    pub accept: Accept,
    /// CRIU.
    #[serde(default)]
    pub criu: CriuConfig,
    /// runc.
    #[serde(default)]
    pub runc: RuncConfig,
    /// Docker.
    #[serde(default)]
    pub docker: DockerConfig,
    /// Podman.
    #[serde(default)]
    pub podman: PodmanConfig,
    /// containerd.
    #[serde(default)]
    pub containerd: ContainerdConfig,
    /// The memory plane.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// The network.
    #[serde(default)]
    pub network: NetworkConfig,
}

/// Certificates, as `tranship init` makes them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The authority that both sides trust.
    pub ca: PathBuf,
    /// This node's certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Certificates that the CA has revoked.
    #[serde(default)]
    pub crl: Option<PathBuf>,
}

/// CRIU.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriuConfig {
    /// The program; found by itself if not given.
    pub path: Option<PathBuf>,
    /// How much it logs, 0–4.
    pub log_level: Option<i32>,
}

/// runc, or crun.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuncConfig {
    /// The program.
    pub path: PathBuf,
    /// Its state directory; the program's own default if not given.
    pub root: Option<PathBuf>,
    /// Where restored containers' cgroups are put; not given: where their configuration says.
    pub cgroup_parent: Option<PathBuf>,
}

impl Default for RuncConfig {
    fn default() -> Self {
        Self { path: "runc".into(), root: None, cgroup_parent: None }
    }
}

/// Docker.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DockerConfig {
    /// Its API's socket. Where there is none, there is no Docker.
    pub socket: PathBuf,
    /// The runtime under which the runtime wrapper is registered with it.
    pub runtime: String,
    /// The state directory that it gives to runc.
    pub runc_root: PathBuf,
}

impl Default for DockerConfig {
    fn default() -> Self {
        Self {
            socket: "/run/docker.sock".into(),
            runtime: "tranship".into(),
            runc_root: "/run/docker/runtime-runc/moby".into(),
        }
    }
}

/// Podman.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PodmanConfig {
    /// The program.
    pub path: PathBuf,
    /// Its storage. Where there is none, there is no Podman.
    pub storage: PathBuf,
    /// The runtime under which the runtime wrapper is registered with it.
    pub runtime: String,
    /// The state directory that runc has under it.
    pub runc_root: PathBuf,
}

impl Default for PodmanConfig {
    fn default() -> Self {
        Self {
            path: "podman".into(),
            storage: "/var/lib/containers/storage".into(),
            runtime: "tranship".into(),
            runc_root: "/run/runc".into(),
        }
    }
}

/// containerd.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContainerdConfig {
    /// Its API's socket. Where there is none, there is no containerd.
    pub socket: PathBuf,
    /// The namespaces whose containers are moved; empty: all but Docker's and Kubernetes'.
    pub namespaces: Vec<String>,
    /// Its command line.
    pub ctr: PathBuf,
    /// The runtime wrapper, which containers that come are run by.
    pub wrapper: PathBuf,
    /// The state directory that its shims give to runc, without the namespace.
    pub runc_root: PathBuf,
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self {
            socket: "/run/containerd/containerd.sock".into(),
            namespaces: Vec::new(),
            ctr: "ctr".into(),
            wrapper: "/usr/lib/tranship/tranship-runc".into(),
            runc_root: "/run/containerd/runc".into(),
        }
    }
}

/// The network.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// How much of what arrives in a blackout is held for each interface of a container, in MiB.
    #[serde(deserialize_with = "hold_mib")]
    pub hold_mib: usize,
    /// Whether the addresses of a container that has left stay reserved on this node.
    pub hold_addresses: bool,
    /// Whether this is also so of addresses that Docker and Podman have given: containers that do nothing else hold those.
    pub hold_engine_addresses: bool,
    /// Whether moves keep the path to those that stay on a bridge of a node, where they are not told.
    pub keep_path: bool,
    /// Whether the bridges of this node may be joined with another node's.
    pub allow_paths: bool,
    /// The UDP port of the VXLAN devices that keep paths.
    pub path_port: u16,
}

/// The UDP port of VXLAN devices: the number that agents listen at by TCP in all examples.
const PATH_PORT: u16 = 7077;
/// More is more than any peers send in a blackout, and a mistake.
const MOST_HELD_MIB: usize = 1024;

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            hold_mib: tranship_network::HELD_BYTES >> 20,
            hold_addresses: true,
            hold_engine_addresses: false,
            keep_path: false,
            allow_paths: false,
            path_port: PATH_PORT,
        }
    }
}

impl NetworkConfig {
    /// The same in bytes.
    pub fn hold_bytes(&self) -> usize {
        self.hold_mib << 20
    }
}

fn hold_mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let mib = usize::deserialize(deserializer)?;
    match mib {
        1..=MOST_HELD_MIB => Ok(mib),
        _ => Err(D::Error::custom(format!("[network] hold_mib is {mib}; it takes 1 to {MOST_HELD_MIB} MiB"))),
    }
}

/// The memory plane.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// How the rounds of pre-copy find what was written; `None` (`"auto"`): by the best way that this kernel has.
    #[serde(deserialize_with = "method_or_auto")]
    pub tracker: Option<Method>,
}

impl MemoryConfig {
    /// How writes are found on this node. Tries the kernel.
    pub fn method(&self) -> anyhow::Result<Method> {
        let Some(method) = self.tracker else { return Ok(Method::best()) };
        let available = method.available().map_err(anyhow::Error::msg);
        available.with_context(|| format!("[memory] tracker is {method}; \"auto\" takes the best that works here"))?;
        Ok(method)
    }
}

fn method_or_auto<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Option<Method>, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "auto" => Ok(None),
        name => name.parse().map(Some).map_err(D::Error::custom),
    }
}

fn default_socket() -> PathBuf {
    "/run/tranship/agent.sock".into()
}

fn default_run_dir() -> PathBuf {
    "/run/tranship".into()
}

fn default_state_dir() -> PathBuf {
    "/var/lib/tranship".into()
}

impl Config {
    /// Reads and checks the file.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let (why, remedy) = match error.kind() {
                ErrorKind::NotFound => {
                    let remedy = "make certificates with `tranship init`, and the file from packaging/agent.toml";
                    ("does not exist".to_owned(), remedy)
                }
                ErrorKind::IsADirectory => ("is a directory".to_owned(), "name a file with --config"),
                ErrorKind::InvalidData => ("is not a text file (UTF-8)".to_owned(), "write it as packaging/agent.toml"),
                _ => (format!("cannot be read: {error}"), "check its owner and mode"),
            };
            anyhow::anyhow!("the configuration {} {why}; {remedy}", path.display())
        })?;
        Self::read(&text).map_err(|why| anyhow::anyhow!("the configuration {} is not right, {why}", path.display()))
    }

    /// The keys in which `other` differs and whose change takes a restart of the agent.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let all = [
            ("node", self.node == other.node),
            ("listen", self.listen == other.listen),
            ("socket", self.socket == other.socket),
            ("run_dir", self.run_dir == other.run_dir),
            ("state_dir", self.state_dir == other.state_dir),
            ("[criu]", self.criu == other.criu),
            ("[runc]", self.runc == other.runc),
            ("[docker]", self.docker == other.docker),
            ("[podman]", self.podman == other.podman),
            ("[containerd]", self.containerd == other.containerd),
            ("[memory]", self.memory == other.memory),
            ("[network]", self.network == other.network),
        ];
        all.into_iter().filter(|(_, same)| !same).map(|(key, _)| key).collect()
    }

    /// Reads and checks its text; what is wrong is said with its place, and with what to do.
    pub fn read(text: &str) -> Result<Self, String> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            let message = error.message().trim_end().replace('\n', ", ");
            format!("line {line}: {message}; packaging/agent.toml explains every key")
        })?;
        check::check(&config)?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packaged_example_is_valid() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/agent.toml");
        Config::load(&path).unwrap();
    }

    #[test]
    fn how_much_is_held_can_be_chosen_within_reason() {
        let read = |text: &str| toml::from_str::<NetworkConfig>(text).map(|network| network.hold_bytes());
        assert_eq!(read(""), Ok(tranship_network::HELD_BYTES));
        assert_eq!(read("hold_mib = 64"), Ok(64 << 20));
        for wrong in [0, MOST_HELD_MIB + 1] {
            let error = read(&format!("hold_mib = {wrong}")).unwrap_err().to_string();
            assert!(error.contains(&format!("hold_mib is {wrong}; it takes 1 to 1024 MiB")), "{error}");
        }
    }

    #[test]
    fn how_writes_are_tracked_can_be_chosen() {
        let read = |text: &str| toml::from_str::<MemoryConfig>(text).map(|memory| memory.tracker);
        assert_eq!((read(""), read("tracker = \"auto\"")), (Ok(None), Ok(None)));
        for method in Method::ALL {
            assert_eq!(read(&format!("tracker = \"{method}\"")), Ok(Some(method)));
        }
        let error = read("tracker = \"magic\"").unwrap_err().to_string();
        assert!(error.contains("\"magic\"") && error.contains("write-protect, soft-dirty, hash"), "{error}");
    }
}
