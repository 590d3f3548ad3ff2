//! The options of `podman create` that make a container again.

use std::path::Path;

use serde_json::{Value, json};

use super::{Network, Parameters, entries, list, texts};

/// Where Podman puts containers' cgroups by itself.
const DEFAULT_PARENTS: [&str; 3] = ["", "/libpod_parent", "machine.slice"];

impl Parameters {
    /// The arguments of podman, from `create` on, that make the container with name and addresses. `image` is what the image
    /// is called there; its cgroup is put below `cgroup_parent`, if one is given.
    pub(in crate::podman) fn create_arguments(
        &self,
        name: &str,
        image: &str,
        cgroup_parent: Option<&Path>,
    ) -> Vec<String> {
        let (config, host) = (&self.described["Config"], &self.described["HostConfig"]);
        let mut all: Vec<String> = ["create", "--pull=never", "--http-proxy=false"].map(str::to_owned).to_vec();
        let mut add = |option: &str, value: &str| all.push(format!("--{option}={value}"));
        add("name", name);
        if let Some(pod) = &self.joined {
            add("pod", &pod.name);
        }
        let of_pod = |key: &str| self.joined.is_some() && OF_PODS.contains(&key);
        if self.has_host_name_of_node() {
            add("uts", "host");
        }
        let of_node = |key: &str| key == "Hostname" && self.has_host_name_of_node();
        for (from, key, option) in TEXTS.into_iter().filter(|(_, key, _)| !of_pod(key) && !of_node(key)) {
            match &self.described[from][key] {
                Value::String(text) if !text.is_empty() => add(option, text),
                Value::Number(number) if number.as_i64() != Some(0) => add(option, &number.to_string()),
                _ => {}
            }
        }
        if host["MemorySwappiness"].as_i64().is_some_and(|much| much >= 0) {
            add("memory-swappiness", &host["MemorySwappiness"].to_string());
        }
        for (from, key, option) in SWITCHES {
            if self.described[from][key] == true {
                add(option, "true");
            }
        }
        // Podman gives it to each container of a pod, once more where it was given to it.
        let given = match self.joined.is_some() {
            true => format!("HOSTNAME={}", config["Hostname"].as_str().unwrap_or_default()),
            false => String::new(),
        };
        let from_pod = self.joined.as_ref().map(|pod| pod.binds.as_slice()).unwrap_or_default();
        for (from, key, option) in LISTS.into_iter().filter(|(_, key, _)| !of_pod(key)) {
            let own =
                texts(&self.described[from][key]).into_iter().filter(|text| !from_pod.contains(text) && *text != given);
            own.for_each(|text| add(option, &text));
        }
        for (key, value) in entries(&config["Labels"]) {
            add("label", &format!("{key}={}", value.as_str().unwrap_or_default()));
        }
        for (inside, options) in entries(&host["Tmpfs"]) {
            let options = options.as_str().unwrap_or_default();
            let copies = options.split(',').any(|option| option.ends_with("tmpcopyup"));
            add("tmpfs", &format!("{inside}:{options}{}", if copies { "" } else { ",notmpcopyup" }));
        }
        if host["PidsLimit"].as_i64().is_none_or(|most| most == 0) {
            add("pids-limit", "-1");
        }
        // What Podman shows as added and dropped it counts from another list than its options do. To another user than root an option
        // would give what root has.
        let root_s = texts(&self.described["EffectiveCaps"]);
        if host["Privileged"] == true || root_s.is_empty() {
            texts(&host["CapAdd"]).iter().for_each(|text| add("cap-add", text));
            texts(&host["CapDrop"]).iter().for_each(|text| add("cap-drop", text));
        } else {
            add("cap-drop", "ALL");
            root_s.iter().for_each(|text| add("cap-add", text));
        }
        for (key, value) in entries(&config["Annotations"]).filter(|(key, _)| !is_podman_s(key)) {
            add("annotation", &format!("{key}={}", value.as_str().unwrap_or_default()));
        }
        self.sysctls.iter().for_each(|(key, value)| add("sysctl", &format!("{key}={value}")));
        let restart = &host["RestartPolicy"];
        match (restart["Name"].as_str().unwrap_or_default(), restart["MaximumRetryCount"].as_u64().unwrap_or(0)) {
            ("", _) => {}
            (policy, 0) => add("restart", policy),
            (policy, most) => add("restart", &format!("{policy}:{most}")),
        }
        for limit in list(&host["Ulimits"]) {
            let name = limit["Name"].as_str().unwrap_or_default().trim_start_matches("RLIMIT_").to_lowercase();
            add("ulimit", &format!("{name}={}:{}", limit["Soft"], limit["Hard"]));
        }
        for device in list(&host["Devices"]) {
            let text = |key: &str| device[key].as_str().unwrap_or_default();
            let parts = [text("PathOnHost"), text("PathInContainer"), text("CgroupPermissions")];
            add("device", parts.join(":").trim_end_matches(':'));
        }
        if self.joined.is_none() {
            self.add_ports(&mut add);
        }
        let log = &host["LogConfig"];
        for (key, option) in [("Tag", "tag"), ("Size", "max-size")] {
            if let Some(value) = log[key].as_str().filter(|value| !matches!(*value, "" | "0B")) {
                add("log-opt", &format!("{option}={value}"));
            }
        }
        add("log-driver", log["Type"].as_str().unwrap_or("k8s-file"));
        let own = host["CgroupParent"].as_str().filter(|parent| !DEFAULT_PARENTS.contains(parent)).map(Path::new);
        if let Some(parent) = cgroup_parent.or(own).filter(|_| self.joined.is_none()) {
            add("cgroup-parent", &parent.to_string_lossy());
        }
        if host["Cgroups"] == "disabled" {
            add("cgroups", "disabled");
        }
        if config["Passwd"] == false {
            add("passwd", "false");
        }
        health_options(config).iter().for_each(|(option, value)| add(option, value));
        if self.networks.is_empty() && self.joined.is_none() {
            add("network", "none");
        }
        // An init of Podman's own comes before the entry point.
        let own_init = config["Annotations"]["io.podman.annotations.init"] == "TRUE";
        if own_init {
            add("init", "true");
        }
        let (arguments, begin) = (texts(&config["Cmd"]), if own_init { 2 } else { 0 });
        let end = self.command.len().saturating_sub(arguments.len());
        add("entrypoint", &json!(self.command.get(begin..end).unwrap_or_default()).to_string());
        if self.joined.is_none() {
            all.extend(self.networks.iter().map(Network::option));
        }
        all.push(image.to_owned());
        all.extend(arguments);
        all
    }

    fn add_ports(&self, mut add: impl FnMut(&str, &str)) {
        for (port, bindings) in entries(&self.described["HostConfig"]["PortBindings"]) {
            for binding in list(bindings) {
                let host_port = binding["HostPort"].as_str().unwrap_or_default();
                match binding["HostIp"].as_str().unwrap_or_default() {
                    "" => add("publish", &format!("{host_port}:{port}")),
                    ip if ip.contains(':') => add("publish", &format!("[{ip}]:{host_port}:{port}")),
                    ip => add("publish", &format!("{ip}:{host_port}:{port}")),
                }
            }
        }
    }

    /// Adds the options of `podman pod create` that give a pod what this container has, which is its infra container.
    pub(in crate::podman) fn add_pod_options(&self, cgroup_parent: Option<&Path>, mut add: impl FnMut(&str, &str)) {
        let (config, host) = (&self.described["Config"], &self.described["HostConfig"]);
        if let Some(host_name) = config["Hostname"].as_str().filter(|name| !name.is_empty()) {
            add("hostname", host_name);
        }
        // The pod has a cgroup below this.
        let own = host["CgroupParent"].as_str().map(Path::new).and_then(Path::parent);
        let own = own.filter(|parent| !DEFAULT_PARENTS.contains(&parent.to_string_lossy().as_ref()));
        if let Some(parent) = cgroup_parent.or(own) {
            add("cgroup-parent", &parent.to_string_lossy());
        }
        for (from, key, option) in LISTS.into_iter().filter(|(_, key, _)| IN_PODS.contains(key)) {
            texts(&self.described[from][key]).iter().for_each(|text| add(option, text));
        }
        self.add_ports(&mut add);
        self.sysctls.iter().for_each(|(key, value)| add("sysctl", &format!("{key}={value}")));
        if host["ShmSize"].as_u64().is_some_and(|size| size != DEFAULT_SHM_SIZE) {
            add("shm-size", &host["ShmSize"].to_string());
        }
        if self.command != DEFAULT_INFRA {
            add("infra-command", &self.command.join(" "));
        }
        match self.networks.is_empty() {
            true => add("network", "none"),
            false => {
                for option in self.networks.iter().map(Network::option) {
                    add("network", option.trim_start_matches("--network="));
                }
            }
        }
    }
}

/// What of a container in a pod is the pod's.
const OF_PODS: [&str; 7] = ["Hostname", "IpcMode", "ShmSize", "Dns", "DnsOptions", "DnsSearch", "ExtraHosts"];
/// The lists among them, and the mounts that each container gets from the pod.
const IN_PODS: [&str; 5] = ["Binds", "Dns", "DnsOptions", "DnsSearch", "ExtraHosts"];
/// Bytes of `/dev/shm` where nobody has said how many.
const DEFAULT_SHM_SIZE: u64 = 65_536_000;
/// What Podman's own infra containers run.
const DEFAULT_INFRA: [&str; 2] = ["/catatonit", "-P"];

/// Options whose value is a text or a number: from which part, under which key. Empty and 0 mean that it was not given.
const TEXTS: [(&str, &str, &str); 23] = [
    ("Config", "Hostname", "hostname"),
    ("Config", "User", "user"),
    ("Config", "WorkingDir", "workdir"),
    ("Config", "StopSignal", "stop-signal"),
    ("Config", "StopTimeout", "stop-timeout"),
    ("Config", "Timeout", "timeout"),
    ("Config", "Timezone", "tz"),
    ("Config", "Umask", "umask"),
    ("Config", "sdNotifyMode", "sdnotify"),
    ("HostConfig", "IpcMode", "ipc"),
    ("HostConfig", "CgroupMode", "cgroupns"),
    ("HostConfig", "ShmSize", "shm-size"),
    ("HostConfig", "OomScoreAdj", "oom-score-adj"),
    ("HostConfig", "Memory", "memory"),
    ("HostConfig", "MemorySwap", "memory-swap"),
    ("HostConfig", "MemoryReservation", "memory-reservation"),
    ("HostConfig", "CpuShares", "cpu-shares"),
    ("HostConfig", "CpuPeriod", "cpu-period"),
    ("HostConfig", "CpuQuota", "cpu-quota"),
    ("HostConfig", "CpusetCpus", "cpuset-cpus"),
    ("HostConfig", "CpusetMems", "cpuset-mems"),
    ("HostConfig", "BlkioWeight", "blkio-weight"),
    ("HostConfig", "PidsLimit", "pids-limit"),
];

/// Options that are given where this is true.
const SWITCHES: [(&str, &str, &str); 6] = [
    ("Config", "Tty", "tty"),
    ("Config", "OpenStdin", "interactive"),
    ("HostConfig", "AutoRemove", "rm"),
    ("HostConfig", "Privileged", "privileged"),
    ("HostConfig", "ReadonlyRootfs", "read-only"),
    ("HostConfig", "OomKillDisable", "oom-kill-disable"),
];

/// Options that are given once for each of these.
const LISTS: [(&str, &str, &str); 8] = [
    ("Config", "Env", "env"),
    ("HostConfig", "Binds", "volume"),
    ("HostConfig", "Dns", "dns"),
    ("HostConfig", "DnsOptions", "dns-option"),
    ("HostConfig", "DnsSearch", "dns-search"),
    ("HostConfig", "ExtraHosts", "add-host"),
    ("HostConfig", "GroupAdd", "group-add"),
    ("HostConfig", "SecurityOpt", "security-opt"),
];

/// Whether an annotation is one that Podman adds by itself.
fn is_podman_s(annotation: &str) -> bool {
    ["io.podman.", "io.container.manager", "io.kubernetes.cri-o.", "org.opencontainers.image.stopSignal"]
        .iter()
        .any(|begin| annotation.starts_with(begin))
}

/// The options for the health check.
fn health_options(config: &Value) -> Vec<(&'static str, String)> {
    let check = &config["Healthcheck"];
    let test = texts(&check["Test"]);
    let command = match test.split_first() {
        None => return Vec::new(),
        Some((kind, _)) if kind == "NONE" => return vec![("no-healthcheck", "true".to_owned())],
        Some((kind, rest)) if kind == "CMD-SHELL" => rest.join(" "),
        Some((_, rest)) => json!(rest).to_string(),
    };
    let time = |key: &str, none: &str| check[key].as_u64().map_or_else(|| none.to_owned(), |ns| format!("{ns}ns"));
    let mut options = vec![
        ("health-cmd", command),
        ("health-interval", time("Interval", "disable")),
        ("health-timeout", time("Timeout", "30s")),
        ("health-start-period", time("StartPeriod", "0s")),
    ];
    options.extend(check["Retries"].as_u64().map(|retries| ("health-retries", retries.to_string())));
    let action = config["HealthcheckOnFailureAction"].as_str().filter(|action| !matches!(*action, "" | "none"));
    options.extend(action.map(|action| ("health-on-failure", action.to_owned())));
    options
}
