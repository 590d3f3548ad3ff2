//! What a container's configuration asks of the node besides a container: read from what a peer has sent, in the words of each engine.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// Capabilities with which a program in the node's user namespace can become root outside of its container (capabilities(7)).
pub const ROOT: [&str; 14] = [
    "AUDIT_CONTROL",
    "BPF",
    "CHECKPOINT_RESTORE",
    "DAC_READ_SEARCH",
    "MAC_ADMIN",
    "MAC_OVERRIDE",
    "PERFMON",
    "SYSLOG",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_MODULE",
    "SYS_PTRACE",
    "SYS_RAWIO",
    "SYS_TIME",
];

/// Filesystems that a container may have mounted: each shows what the container's own namespaces have, or is empty.
const VIRTUAL: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];
/// Parts of /proc through which root in a container without a user namespace changes the node, and which runtimes make read-only.
const PROTECTED: [&str; 2] = ["/proc/sys", "/proc/sysrq-trigger"];
/// The node's memory, which runtimes mask.
const MASKED: &str = "/proc/kcore";
/// Keys of `linux` in an OCI configuration that are known to ask for nothing else.
const LINUX: [&str; 15] = [
    "cgroupsPath",
    "devices",
    "gidMappings",
    "intelRdt",
    "maskedPaths",
    "memoryPolicy",
    "mountLabel",
    "namespaces",
    "personality",
    "readonlyPaths",
    "resources",
    "rootfsPropagation",
    "seccomp",
    "sysctl",
    "uidMappings",
];
/// The same of the whole.
const WHOLE: [&str; 9] =
    ["annotations", "domainname", "hooks", "hostname", "linux", "mounts", "ociVersion", "process", "root"];
/// Annotations that change what a runtime or CRIU does on the node, by how they begin.
const ANNOTATIONS: [&str; 3] = ["org.criu.", "run.oci.", "krun."];

/// Devices that every container may have, by the node's path; TUN belongs to a network namespace.
pub const USUAL: [&str; 8] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/net/tun"];

/// A device: character or block (`c`, `b`, or `a` for both), major and minor number, of which one may be all.
pub type Device = (char, Option<u64>, Option<u64>);

/// What is asked for.
#[derive(Debug, Default, PartialEq)]
pub struct Asked {
    /// Paths of the node, and whether they can be written to.
    pub binds: Vec<(PathBuf, bool)>,
    /// Devices by number.
    pub devices: Vec<Device>,
    /// Devices by the node's path.
    pub device_paths: Vec<PathBuf>,
    /// Capabilities that amount to root, without `CAP_`.
    pub capabilities: Vec<String>,
    /// Programs that are run outside of the container.
    pub programs: Vec<PathBuf>,
    /// What only a privileged container has.
    pub privileged: Vec<String>,
    /// What no peer may ask for.
    pub never: Vec<String>,
    /// There is a filter of system calls, or the engine gives it its own.
    pub seccomp: bool,
    /// The root filesystem, where the configuration names it.
    pub root: Option<PathBuf>,
}

pub fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub fn texts(value: &Value) -> impl Iterator<Item = &str> {
    list(value).iter().filter_map(Value::as_str)
}

fn keys(value: &Value) -> impl Iterator<Item = &String> {
    value.as_object().into_iter().flat_map(serde_json::Map::keys)
}

impl Asked {
    /// What an OCI configuration asks for. The container's network namespace is `network`, if that has a name.
    pub fn of_oci(config: &Value, network: Option<&Path>) -> Self {
        let mut asked = Self { root: config["root"]["path"].as_str().map(PathBuf::from), ..Self::default() };
        let linux = &config["linux"];
        for (part, known) in [(config, WHOLE.as_slice()), (linux, LINUX.as_slice())] {
            let unknown = keys(part).filter(|key| !known.contains(&key.as_str()) && !part[*key].is_null());
            asked.never.extend(unknown.map(|key| format!("its configuration has {key:?}, which is not known here")));
        }
        keys(&config["hooks"]).for_each(|kind| match config["hooks"][kind].as_array() {
            Some(hooks) => asked.programs.extend(hooks.iter().map(|h| h["path"].as_str().unwrap_or_default().into())),
            None => asked.never.push(format!("its hooks {kind:?} are no list")),
        });
        asked.add_annotations(&config["annotations"]);
        list(&config["mounts"]).iter().for_each(|mount| asked.add_mount(mount));
        asked.add_namespaces(linux, network);
        asked.add_devices(linux);
        for set in ["bounding", "effective", "permitted", "inheritable", "ambient"] {
            texts(&config["process"]["capabilities"][set]).for_each(|name| asked.add_capability(name));
        }
        asked.add_proc_paths(linux);
        if linux["cgroupsPath"].as_str().is_some_and(|path| !is_below(path)) {
            asked.never.push(format!("its cgroup is {}", linux["cgroupsPath"]));
        }
        if linux["seccomp"]["listenerPath"].is_string() {
            asked.never.push("its seccomp filter names a socket of the node".to_owned());
        }
        if ["shared", "rshared"].iter().any(|mode| linux["rootfsPropagation"] == *mode) {
            asked.privileged.push("its mounts appear on the node".to_owned());
        }
        asked.seccomp = linux["seccomp"].is_object();
        asked
    }

    pub fn add_annotations(&mut self, annotations: &Value) {
        let found = keys(annotations).filter(|key| ANNOTATIONS.iter().any(|begin| key.starts_with(begin)));
        self.never.extend(found.map(|key| format!("it has the annotation {key:?}")));
    }

    pub fn add_capability(&mut self, name: &str) {
        let name = name.to_ascii_uppercase();
        let name = name.strip_prefix("CAP_").unwrap_or(&name);
        if (ROOT.contains(&name) || name == "ALL") && !self.capabilities.iter().any(|other| other == name) {
            self.capabilities.push(name.to_owned());
        }
    }

    fn add_mount(&mut self, mount: &Value) {
        let option = |name: &str| texts(&mount["options"]).any(|option| option == name);
        let kind = mount["type"].as_str().unwrap_or_default();
        let inside = mount["destination"].as_str().unwrap_or_default();
        if inside.split('/').any(|part| part == "..") {
            self.never.push(format!("it has a mount on {inside:?}"));
        }
        if kind == "bind" || option("bind") || option("rbind") {
            let source = mount["source"].as_str().unwrap_or_default();
            self.binds.push((source.into(), !option("ro") && !option("rro")));
            if option("shared") || option("rshared") {
                self.privileged.push(format!("mounts on {inside:?} appear on the node"));
            }
        } else if !VIRTUAL.contains(&kind) {
            self.never.push(format!("it has a filesystem {kind:?} mounted on {inside:?}"));
        } else if kind == "proc" && Path::new("/").join(inside) != Path::new("/proc") {
            // The paths that are masked and read-only are below /proc.
            self.privileged.push(format!("{inside:?} in it is a second /proc"));
        } else if ["sysfs", "cgroup", "cgroup2"].contains(&kind) && !option("ro") {
            self.privileged.push(format!("the filesystem {kind} on {inside:?} is not read-only in it"));
        }
    }

    fn add_namespaces(&mut self, linux: &Value, network: Option<&Path>) {
        let all = list(&linux["namespaces"]);
        for kind in ["mount", "pid", "ipc", "network", "uts"] {
            if !all.iter().any(|namespace| namespace["type"] == kind) {
                self.privileged.push(format!("it uses the node's {kind} namespace"));
            }
        }
        for namespace in all.iter().filter(|namespace| !namespace["path"].is_null()) {
            let (kind, path) = (namespace["type"].as_str().unwrap_or_default(), namespace["path"].as_str());
            if path == Some("") || (kind == "network" && network.is_some() && path.map(Path::new) == network) {
                continue;
            }
            self.never.push(format!("it joins the {kind} namespace {} of the node", namespace["path"]));
        }
    }

    fn add_devices(&mut self, linux: &Value) {
        let letter = |value: &Value| match value.as_str() {
            Some("c" | "u") => 'c',
            Some("b") => 'b',
            _ => 'a',
        };
        for device in list(&linux["devices"]) {
            match device["type"].as_str() {
                Some("p") => {}
                _ => self.add_device((letter(&device["type"]), device["major"].as_u64(), device["minor"].as_u64())),
            }
        }
        let number = |value: &Value| value.as_i64().filter(|number| *number >= 0).map(i64::unsigned_abs);
        let rules = list(&linux["resources"]["devices"]);
        for rule in rules.iter().filter(|rule| rule["allow"] == true) {
            // To make a node is of no use where it cannot be opened.
            let access = rule["access"].as_str().unwrap_or("rwm");
            if access != "m" {
                self.add_device((letter(&rule["type"]), number(&rule["major"]), number(&rule["minor"])));
            }
        }
        let denies_all = |rule: &Value| {
            rule["allow"] == false
                && letter(&rule["type"]) == 'a'
                && number(&rule["major"]).is_none()
                && number(&rule["minor"]).is_none()
                && ["r", "w", "m"].iter().all(|access| rule["access"].as_str().is_none_or(|text| text.contains(access)))
        };
        // Where there is none, one that denies everything is put there.
        if !rules.first().is_none_or(denies_all) {
            self.privileged
                .push("its cgroup does not deny it the node's devices (`linux.resources.devices`)".to_owned());
        }
    }

    /// Adds a device that not every container has.
    pub fn add_device(&mut self, device: Device) {
        let usual = match device {
            ('c', Some(1), Some(3 | 5 | 7 | 8 | 9)) | ('c', Some(5), Some(0..=2)) | ('c', Some(136..=143), _) => true,
            // TUN belongs to a network namespace.
            ('c', Some(10), Some(200)) => true,
            _ => false,
        };
        if !usual && !self.devices.contains(&device) {
            self.devices.push(device);
        }
    }

    /// What is masked and protected in `/proc`.
    pub fn add_proc_paths(&mut self, linux: &Value) {
        for path in PROTECTED.iter().filter(|path| !texts(&linux["readonlyPaths"]).any(|one| one == **path)) {
            self.privileged.push(format!("{path} is not read-only in it"));
        }
        if !texts(&linux["maskedPaths"]).any(|one| one == MASKED) {
            self.privileged.push(format!("{MASKED} is not masked in it"));
        }
    }

    /// A bind in the words of Docker and Podman: `SOURCE:INSIDE[:OPTIONS]`; where the source is no path it is a volume.
    pub fn add_short_bind(&mut self, text: &str) {
        let mut parts = text.split(':');
        let source = parts.next().unwrap_or_default();
        let options: Vec<&str> = parts.nth(1).unwrap_or_default().split(',').collect();
        if options.iter().any(|option| ["shared", "rshared"].contains(option)) {
            self.privileged.push(format!("mounts below {source:?} appear on the node"));
        }
        if source.starts_with(['/', '.', '~']) {
            self.binds.push((source.into(), !options.contains(&"ro")));
        }
    }

    /// An option of Docker's or Podman's that takes a protection away.
    pub fn add_security(&mut self, option: &str) {
        let weakens = ["unconfined", "disable", "unmask", "proc-opts", "writable-cgroups"];
        if weakens.iter().any(|word| option.contains(word)) {
            self.privileged.push(format!("it has the security option {option:?}"));
        }
    }
}

/// Whether the path of a cgroup leads to one below the root, and nowhere else.
pub fn is_below(path: &str) -> bool {
    let named = |part: &str| part != ".." && part != "." && !part.contains(['\0', '\n']);
    path.split(['/', ':']).all(named) && path.split('/').any(|part| !part.is_empty())
}

#[cfg(test)]
#[path = "asked_tests.rs"]
mod tests;
