//! What a container may have by the OCI configuration that it is made from on this node.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::messages::Extent;
use super::mounts::Flags;

/// Names of capabilities by their numbers (linux/capability.h), without `CAP_`.
pub(super) const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];
const NET_ADMIN: u64 = 1 << 12;
const SYS_ADMIN: u64 = 1 << 21;
const MKNOD: u64 = 1 << 27;
const BPF: u64 = 1 << 39;

/// Paths that runtimes mask or make read-only, and through which root in a container changes the node. Of the others
/// there is no mount where the source's kernel lacks them.
const GUARDED: [&str; 6] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/kcore", "/proc/sys", "/proc/sysrq-trigger"];

/// A security module and the profile that it has for a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Profile {
    /// AppArmor; a program in the container may be in a profile below it (`PROFILE//…`).
    AppArmor(String),
    /// SELinux.
    SeLinux(String),
}

/// A mount of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Configured {
    pub fstype: String,
    pub is_bind: bool,
    pub flags: Flags,
}

/// What a container may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Its peer may send privileged containers: only the images' form is checked.
    pub privileged: bool,
    /// Bits of capabilities that a program in it can come to have.
    pub(super) capabilities: u64,
    pub(super) no_new_privileges: bool,
    pub(super) seccomp: bool,
    /// What this node's kernel would enforce of the configuration.
    pub profile: Option<Profile>,
    /// Kinds of namespaces that it has of its own.
    pub(super) namespaces: Vec<String>,
    /// criu runs in its network namespace, which is there already.
    pub in_network: bool,
    pub(super) maps: (Vec<Extent>, Vec<Extent>),
    pub(super) read_only_root: bool,
    /// By where they are in it.
    pub(super) mounts: HashMap<String, Configured>,
    pub(super) masked: Vec<String>,
    pub(super) read_only: Vec<String>,
    /// Guarded paths that this node has.
    pub guarded: Vec<String>,
    /// External mounts of the memory plane: where they are in it, by their keys.
    pub external: HashMap<String, String>,
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// A path without `.` and repeated or last slashes; relative ones are below the root.
pub(super) fn plain(path: &str) -> String {
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    format!("/{}", parts.join("/"))
}

fn bit(name: &str) -> u64 {
    let name = name.to_ascii_uppercase();
    let name = name.strip_prefix("CAP_").unwrap_or(&name);
    CAPABILITIES.iter().position(|one| *one == name).map_or(0, |number| 1 << number)
}

fn extents(mappings: &Value) -> Vec<Extent> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok()).unwrap_or_default();
    let extent = |one: &Value| Extent {
        first: number(&one["containerID"]),
        outside: number(&one["hostID"]),
        count: number(&one["size"]),
    };
    mappings.as_array().into_iter().flatten().map(extent).collect()
}

impl Allowed {
    /// What an OCI configuration allows.
    pub fn of(config: &Value) -> Self {
        let (process, linux) = (&config["process"], &config["linux"]);
        let sets = ["bounding", "effective", "permitted", "inheritable", "ambient"];
        let names = sets.iter().flat_map(|set| texts(&process["capabilities"][*set]));
        let paths = |key: &str| texts(&linux[key]).map(plain).collect::<Vec<_>>();
        let mount = |mount: &Value| {
            let option = |name: &str| texts(&mount["options"]).any(|option| option == name);
            let fstype = mount["type"].as_str().unwrap_or_default().to_owned();
            let is_bind = fstype == "bind" || option("bind") || option("rbind");
            (
                plain(mount["destination"].as_str().unwrap_or_default()),
                Configured { fstype, is_bind, flags: Flags::of(option) },
            )
        };
        let (masked, read_only) = (paths("maskedPaths"), paths("readonlyPaths"));
        let is_there = |path: &&str| masked.iter().chain(&read_only).any(|own| own == path) && Path::new(path).exists();
        Self {
            capabilities: names.fold(0, |bits, name| bits | bit(name)),
            no_new_privileges: process["noNewPrivileges"] == true,
            seccomp: has_filter(&linux["seccomp"]),
            profile: Profile::of(process),
            namespaces: linux["namespaces"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|one| one["type"].as_str().map(ToOwned::to_owned))
                .collect(),
            maps: (extents(&linux["uidMappings"]), extents(&linux["gidMappings"])),
            read_only_root: config["root"]["readonly"] == true,
            mounts: config["mounts"].as_array().into_iter().flatten().map(mount).collect(),
            guarded: GUARDED.into_iter().filter(is_there).map(ToOwned::to_owned).collect(),
            masked,
            read_only,
            ..Self::default()
        }
    }

    /// Whether it may mount what it likes, or is not compared at all.
    pub(super) fn mounts_freely(&self) -> bool {
        self.privileged || self.capabilities & SYS_ADMIN != 0
    }

    pub(super) fn has_namespace(&self, kind: &str) -> bool {
        self.namespaces.iter().any(|own| own == kind)
    }

    pub(super) fn sets_rules(&self) -> bool {
        self.privileged || self.capabilities & NET_ADMIN != 0
    }

    pub(super) fn makes_devices(&self) -> bool {
        self.privileged || self.capabilities & MKNOD != 0
    }

    pub(super) fn uses_bpf(&self) -> bool {
        self.privileged || self.capabilities & (SYS_ADMIN | BPF) != 0
    }
}

/// Whether an engine gives this profile of AppArmor to containers for which no other is asked for: Docker, or Podman in some version.
fn is_engine_s(profile: &str) -> bool {
    profile == "docker-default" || profile.starts_with("containers-default-")
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AppArmor(name) => write!(f, "the AppArmor profile {name}"),
            Self::SeLinux(label) => write!(f, "the SELinux label {label}"),
        }
    }
}

impl Profile {
    fn of(process: &Value) -> Option<Self> {
        let text = |key: &str| process[key].as_str().filter(|text| !text.is_empty() && *text != "unconfined");
        text("apparmorProfile")
            .map(|name| Self::AppArmor(name.to_owned()))
            .or_else(|| text("selinuxLabel").map(|label| Self::SeLinux(label.to_owned())))
    }

    /// Whether this node's kernel knows such profiles. Where it does not, no container here is confined by one.
    pub fn is_enforced(&self) -> bool {
        let is_on = |path: &str| std::fs::read(path).is_ok_and(|text| text.starts_with(b"Y"));
        match self {
            Self::AppArmor(_) => is_on("/sys/module/apparmor/parameters/enabled"),
            Self::SeLinux(_) => Path::new("/sys/fs/selinux/enforce").exists(),
        }
    }

    /// Whether a task with this profile is confined as the container is: by the same, by one below it, or by another engine's own where the
    /// container has an engine's own.
    pub fn has(&self, label: &str) -> bool {
        match self {
            Self::AppArmor(name) => {
                let below = label.strip_prefix(name.as_str());
                let profile = label.split_once("//").map_or(label, |(profile, _)| profile);
                below.is_some_and(|rest| rest.is_empty() || rest.starts_with("//"))
                    || (is_engine_s(name) && is_engine_s(profile))
            }
            Self::SeLinux(own) => label == own,
        }
    }
}
/// Whether a configuration has a filter of system calls: runtimes take an empty object for none.
fn has_filter(seccomp: &Value) -> bool {
    seccomp["defaultAction"].as_str().is_some_and(|action| !action.is_empty())
        || seccomp["syscalls"].as_array().is_some_and(|rules| !rules.is_empty())
}
