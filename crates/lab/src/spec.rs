//! The config.json of a container, as the OCI runtime specification has it and close to what `runc spec` writes.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::rootfs::MERGED;
use crate::state::ROOTFS;

/// Annotation that says which address the lab gave to a container; runc keeps annotations as labels.
pub(crate) const IP_ANNOTATION: &str = "tranship-lab.ip";
/// Annotation that says how the container hangs on the node: `macvlan` or `bridge`.
pub(crate) const ATTACHMENT_ANNOTATION: &str = "tranship-lab.attachment";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// What to run in a container, and with what.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The container's address in the lab network.
    pub ip: Ipv4Addr,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its root filesystem, read-only, as the node sees it. Without one, it is a skeleton with the host's /usr and /etc
    /// read-only and a tmpfs on /tmp and /run.
    pub rootfs: Option<PathBuf>,
    /// Directories to mount an empty tmpfs on, mode 1777.
    pub tmpfs: Vec<PathBuf>,
    /// Files or directories of the node to show in the container, read-only: (in the node, in the container).
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// The node's directories or files to show in the container to be written to, in the same way. A node's /srv is a directory of
    /// its own on the host's disk.
    pub volumes: Vec<(PathBuf, PathBuf)>,
    /// Attach by a veth to the node's bridge `br0` instead of a macvlan on its `eth0`.
    pub bridge: bool,
    /// Limit on its memory in bytes.
    pub memory: Option<u64>,
    /// User and group id to run as.
    pub user: (u32, u32),
    /// Environment variables besides PATH, `NAME=VALUE`.
    pub environment: Vec<String>,
    /// Capabilities besides the usual ones, as `CAP_NAME`.
    pub capabilities: Vec<String>,
    /// Labels: annotations in the OCI configuration.
    pub labels: Vec<(String, String)>,
    /// The AppArmor profile that confines it.
    pub apparmor: Option<String>,
}

impl RunOptions {
    /// Runs `command` at `ip` with the defaults: skeleton root filesystem, macvlan, user root.
    pub fn new<S: Into<String>>(ip: Ipv4Addr, command: impl IntoIterator<Item = S>) -> Self {
        Self {
            ip,
            command: command.into_iter().map(Into::into).collect(),
            rootfs: None,
            tmpfs: Vec::new(),
            binds: Vec::new(),
            volumes: Vec::new(),
            bridge: false,
            memory: None,
            user: (0, 0),
            environment: Vec::new(),
            capabilities: Vec::new(),
            labels: Vec::new(),
            apparmor: None,
        }
    }

    pub(crate) fn attachment(&self) -> &'static str {
        if self.bridge { "bridge" } else { "macvlan" }
    }
}

/// Makes the config.json of container `name` whose cgroup is below `cgroup_parent`.
pub(crate) fn config(name: &str, cgroup_parent: &str, options: &RunOptions) -> Value {
    let capabilities: Vec<_> =
        CAPABILITIES.iter().map(|c| (*c).to_owned()).chain(options.capabilities.iter().cloned()).collect();
    let environment: Vec<_> = [PATH, "HOME=/root", "LANG=C.UTF-8"]
        .map(str::to_owned)
        .into_iter()
        .chain(options.environment.clone())
        .collect();
    let own = [(IP_ANNOTATION, options.ip.to_string()), (ATTACHMENT_ANNOTATION, options.attachment().to_owned())];
    let own = own.map(|(key, value)| (key.to_owned(), value));
    let annotations: BTreeMap<String, String> = own.into_iter().chain(options.labels.clone()).collect();
    let apparmor = options.apparmor.as_deref().unwrap_or_default();
    let mut resources = json!({"devices": [{"allow": false, "access": "rwm"}]});
    if let Some(bytes) = options.memory {
        resources["memory"] = json!({"limit": bytes});
    }
    json!({
        "ociVersion": "1.0.2",
        "hostname": name,
        "annotations": annotations,
        "process": {
            "terminal": false,
            "user": {"uid": options.user.0, "gid": options.user.1},
            "args": options.command,
            "env": environment,
            "cwd": "/",
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
            "noNewPrivileges": false,
            "apparmorProfile": apparmor,
        },
        "root": {"path": options.rootfs.as_deref().unwrap_or(Path::new(ROOTFS)), "readonly": true},
        "mounts": mounts(options),
        "linux": {
            "cgroupsPath": format!("{cgroup_parent}/{name}"),
            "resources": resources,
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network", "path": network_namespace(name)},
            ],
            "maskedPaths": [
                "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
                "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware", "/proc/scsi",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

/// Where a container's network namespace is, in its node.
pub(crate) fn network_namespace(name: &str) -> String {
    format!("/run/netns/{name}")
}

fn mounts(options: &RunOptions) -> Vec<Value> {
    let mount = |target: &str, kind: &str, flags: &[&str]| json!({"destination": target, "type": kind, "source": kind, "options": flags});
    let bound = |source: &Path, target: &Path, mode: &str| json!({"destination": target, "type": "bind", "source": source, "options": ["bind", mode, "nodev"]});
    let bind = |source: &Path, target: &Path| bound(source, target, "ro");
    let mut all = vec![
        mount("/proc", "proc", &[]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
            "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]}),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ];
    if options.rootfs.is_none() {
        let own = MERGED.iter().map(|name| Path::new("/").join(name)).filter(|p| p.is_dir() && !p.is_symlink());
        let shared = ["/usr", "/etc"].map(PathBuf::from).into_iter().chain(own);
        all.extend(shared.map(|directory| bind(&directory, &directory)));
        all.push(mount("/tmp", "tmpfs", &["nosuid", "nodev", "mode=1777"]));
        all.push(mount("/run", "tmpfs", &["nosuid", "nodev", "mode=755"]));
    }
    for directory in &options.tmpfs {
        all.retain(|m| m["destination"] != json!(directory));
        all.push(json!({"destination": directory, "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "nodev", "mode=1777"]}));
    }
    all.extend(options.binds.iter().map(|(source, target)| bind(source, target)));
    all.extend(options.volumes.iter().map(|(source, target)| bound(source, target, "rw")));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> RunOptions {
        RunOptions::new(Ipv4Addr::new(10, 77, 0, 10), ["sleep", "1"])
    }

    fn destinations(config: &Value) -> Vec<&str> {
        config["mounts"].as_array().unwrap().iter().map(|m| m["destination"].as_str().unwrap()).collect()
    }

    #[test]
    fn the_skeleton_shows_usr_and_etc_read_only_and_no_cgroups() {
        let config = config("web", "/tranship-lab/a", &options());
        assert_eq!(config["root"], json!({"path": "/run/tranship-lab/rootfs", "readonly": true}));
        let usr = config["mounts"].as_array().unwrap().iter().find(|m| m["destination"] == "/usr").unwrap();
        assert!(usr["options"].as_array().unwrap().contains(&json!("ro")));
        assert!(!destinations(&config).iter().any(|d| d.contains("cgroup")));
        assert_eq!(config["linux"]["cgroupsPath"], "/tranship-lab/a/web");
        assert_eq!(config["process"]["terminal"], false);
    }

    #[test]
    fn the_network_namespace_is_external() {
        let config = config("web", "/p", &options());
        let spaces = config["linux"]["namespaces"].as_array().unwrap();
        assert!(spaces.contains(&json!({"type": "network", "path": "/run/netns/web"})));
        assert_eq!(spaces.len(), 5);
    }

    #[test]
    fn a_root_of_ones_own_gets_nothing_of_the_host() {
        let options = RunOptions { rootfs: Some("/srv/image".into()), tmpfs: vec!["/data".into()], ..options() };
        let config = config("web", "/p", &options);
        let destinations = destinations(&config);
        assert!(!destinations.contains(&"/usr") && !destinations.contains(&"/tmp"));
        assert!(destinations.contains(&"/data"));
    }

    #[test]
    fn a_tmpfs_replaces_the_default_one_at_its_place() {
        let config = config("web", "/p", &RunOptions { tmpfs: vec!["/run".into()], ..options() });
        let runs = config["mounts"].as_array().unwrap().iter().filter(|m| m["destination"] == "/run");
        assert_eq!(runs.map(|m| m["options"][2].as_str().unwrap()).collect::<Vec<_>>(), ["mode=1777"]);
    }

    #[test]
    fn limits_appear_only_when_asked_for() {
        assert!(config("w", "/p", &options())["linux"]["resources"].get("memory").is_none());
        let limited = config("w", "/p", &RunOptions { memory: Some(1 << 30), ..options() });
        assert_eq!(limited["linux"]["resources"]["memory"]["limit"], 1 << 30);
    }
}
