//! A container of Docker's in Podman's words.

use serde_json::{Value, json};

use super::{
    APART, COMMON, COMMON_CONFIG, Refusals, capabilities, copied, is_empty, security, split_bind, texts, volume_at,
};

/// Those of `Config` that are in what the runtime was given, that only the image's makers need, or that are translated.
const CONFIG_APART: [&str; 16] = [
    "ArgsEscaped",
    "AttachStderr",
    "AttachStdin",
    "AttachStdout",
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "Image",
    "MacAddress",
    "OnBuild",
    "Shell",
    "StopSignal",
    "Volumes",
    "WorkingDir",
];
/// Those of `HostConfig` that only Docker has, and that are checked here or say what is the default.
const HOST_APART: [&str; 2] = ["MaskedPaths", "ReadonlyPaths"];
/// What Podman lets containers do by default.
const PODMAN_S: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];
/// Docker's own times for health checks, in ns, where nothing else was said.
const HEALTH: [(&str, u64); 2] = [("Interval", 30_000_000_000), ("Timeout", 30_000_000_000)];

/// The parameters for Podman.
pub(super) fn translate(refusals: &mut Refusals<'_>) -> Value {
    let container = refusals.container;
    let (theirs, process) = (&container.parameters, &container.config["process"]);
    let (config, host) = (&theirs["body"], &theirs["body"]["HostConfig"]);
    refusals.refuse_rest(config, &[&COMMON_CONFIG, &CONFIG_APART, &["HostConfig"]]);
    refusals.refuse_rest(host, &[&COMMON, &APART, &HOST_APART]);

    let mut ours = copied(config, &COMMON_CONFIG);
    ours["Env"] = config["Env"].clone();
    ours["WorkingDir"] = process["cwd"].clone();
    ours["StopSignal"] = config["StopSignal"].clone();
    if !is_empty(&config["Healthcheck"]) {
        ours["Healthcheck"] = health(&config["Healthcheck"]);
    }
    let command = texts(&process["args"]);
    ours["Cmd"] = command.get(1..).unwrap_or_default().into();

    let mut limits = copied(host, &COMMON);
    let effective = texts(&process["capabilities"]["effective"]);
    let bounding = capabilities(container);
    if effective.is_empty() {
        // Of another user than root the next start allows no more than Podman does by itself.
        limits["CapDrop"] = PODMAN_S.into_iter().filter(|one| !bounding.iter().any(|other| other == one)).collect();
    }
    limits["CgroupMode"] = host["CgroupnsMode"].clone();
    limits["RestartPolicy"] = host["RestartPolicy"].clone();
    limits["Binds"] = binds(refusals, host).into();
    limits["Tmpfs"] = tmpfs(&host["Tmpfs"]);
    limits["SecurityOpt"] = security(refusals, &host["SecurityOpt"]).into();
    limits["LogConfig"] = log(refusals, &host["LogConfig"]);
    if is_empty(&host["PidsLimit"]) {
        limits["PidsLimit"] = (-1).into();
    }
    if let Some(cpus) = host["NanoCpus"].as_u64().filter(|cpus| *cpus > 0) {
        (limits["CpuPeriod"], limits["CpuQuota"]) = (100_000.into(), (cpus / 10_000).into());
    }
    if let Some(much) = host["MemorySwappiness"].as_i64().filter(|much| *much >= 0) {
        limits["MemorySwappiness"] = much.into();
    }
    let limit = |limit: &Value| {
        let name = limit["Name"].as_str().unwrap_or_default().to_uppercase();
        json!({"Name": format!("RLIMIT_{name}"), "Soft": limit["Soft"], "Hard": limit["Hard"]})
    };
    limits["Ulimits"] = host["Ulimits"].as_array().into_iter().flatten().map(limit).collect();

    let networks = theirs["networks"].as_array().into_iter().flatten().map(|network| {
        let endpoint = &network["endpoint"];
        let address = |key: &str| endpoint["IPAMConfig"][key].as_str().map(str::to_owned);
        let ips: Vec<String> = ["IPv4Address", "IPv6Address"].into_iter().filter_map(address).collect();
        json!({
            "name": network["name"], "kind": {"driver": network["driver"], "subnets": network["subnets"]},
            "ips": ips,
            "mac": endpoint["MacAddress"].as_str().unwrap_or_default(), "aliases": texts(&endpoint["Aliases"]),
        })
    });
    let (networks, volumes) = (networks.collect::<Vec<_>>(), volumes(refusals));
    let sysctls = container.config["linux"]["sysctl"].as_object().cloned().unwrap_or_default();
    json!({
        "image": theirs["image"].as_str().unwrap_or_default().trim_start_matches("sha256:"),
        "image_name": full_name(config["Image"].as_str().unwrap_or_default()),
        "layers": theirs["layers"], "image_bytes": theirs["image_bytes"],
        "described": {
            "Config": ours, "HostConfig": limits,
            "BoundingCaps": if effective.is_empty() { Value::Null } else { bounding.into() }, "EffectiveCaps": effective,
        },
        "command": command,
        "sysctls": sysctls,
        "pod": "", "networks": networks, "volumes": volumes, "foreign": true,
    })
}

/// The name in full, as Podman takes in what Docker has saved under it.
fn full_name(name: &str) -> String {
    let first = name.split('/').next().unwrap_or_default();
    let registry = name.contains('/') && (first.contains(['.', ':']) || first == "localhost");
    let name = match (registry, name.contains('/')) {
        (true, _) => name.to_owned(),
        (false, true) => format!("docker.io/{name}"),
        (false, false) => format!("docker.io/library/{name}"),
    };
    let tagged = name.rsplit('/').next().is_some_and(|last| last.contains([':', '@']));
    if tagged { name } else { name + ":latest" }
}

/// Binds and volumes as `--volume` takes them; those that Docker has named, too.
fn binds(refusals: &mut Refusals<'_>, host: &Value) -> Vec<String> {
    let mut binds = texts(&host["Binds"]);
    for mount in host["Mounts"].as_array().into_iter().flatten() {
        let text = |key: &str| mount[key].as_str().unwrap_or_default();
        let special = ["BindOptions", "VolumeOptions", "TmpfsOptions"].iter().any(|key| !is_empty(&mount[*key]));
        if special || !matches!(text("Type"), "bind" | "volume") {
            refusals.refuse(&format!("the mount {mount}"), "name it by --volume or --tmpfs when it is started");
            continue;
        }
        let source = match text("Source") {
            "" => volume_at(refusals.container, text("Target")).unwrap_or_default(),
            source => source,
        };
        let end = if mount["ReadOnly"] == true { ":ro" } else { "" };
        binds.push(format!("{source}:{}{end}", text("Target")));
    }
    // What has only a place in the container is a volume without a name that the user knows.
    binds.retain(|bind| split_bind(bind).is_some());
    let places: Vec<String> =
        binds.iter().filter_map(|bind| split_bind(bind)).map(|(_, inside, _)| inside.to_owned()).collect();
    let trees = refusals.container.trees.iter().filter_map(|tree| tree.inside.to_str());
    let nameless = trees.filter(|inside| !places.iter().any(|place| place == inside));
    binds.extend(nameless.filter_map(|inside| Some(format!("{}:{inside}", volume_at(refusals.container, inside)?))));
    binds
}

/// Every volume, by the name that it has in Docker.
fn volumes(refusals: &mut Refusals<'_>) -> Vec<Value> {
    let container = refusals.container;
    let named = container.parameters["volumes"].as_array().into_iter().flatten();
    for volume in named.filter(|volume| volume["body"]["Driver"] != "local" || !is_empty(&volume["body"]["DriverOpts"]))
    {
        refusals.refuse(&format!("volume {} by a driver or with options", volume["name"]), "give it a plain volume");
    }
    let volume = |inside: &str| Some(json!({"name": volume_at(container, inside)?, "inside": inside, "local": true}));
    container.trees.iter().filter_map(|tree| volume(tree.inside.to_str()?)).collect()
}

/// Podman would copy what the image has there, and let programs be run from it.
fn tmpfs(mounts: &Value) -> Value {
    let options = |options: &Value| {
        let options = options.as_str().unwrap_or_default();
        let says = options.split(',').any(|option| option == "exec" || option == "noexec");
        let more = if says { "notmpcopyup" } else { "noexec,notmpcopyup" };
        if options.is_empty() { more.to_owned() } else { format!("{options},{more}") }
    };
    let mounts = mounts.as_object().into_iter().flatten();
    mounts.map(|(inside, said)| (inside.clone(), options(said).into())).collect::<serde_json::Map<_, _>>().into()
}

fn log(refusals: &mut Refusals<'_>, log: &Value) -> Value {
    // Without `max-size` nothing is rotated, however many files there may be: Docker gives two to a container that it has taken in.
    let rotates = !log["Config"]["max-size"].is_null();
    let options = log["Config"].as_object();
    if options.is_some_and(|options| options.keys().any(|option| rotates || option != "max-file")) {
        refusals.refuse("options of its log", "start it without them");
    }
    let driver = match log["Type"].as_str().unwrap_or_default() {
        "json-file" | "local" => "k8s-file",
        driver @ ("journald" | "none") => driver,
        other => {
            refusals.refuse(&format!("the log driver {other}"), "start it with the log driver json-file or journald");
            other
        }
    };
    json!({"Type": driver})
}

fn health(check: &Value) -> Value {
    let mut check = check.clone();
    for (key, usual) in HEALTH {
        if is_empty(&check[key]) {
            check[key] = usual.into();
        }
    }
    if is_empty(&check["Retries"]) {
        check["Retries"] = 3.into();
    }
    check
}
