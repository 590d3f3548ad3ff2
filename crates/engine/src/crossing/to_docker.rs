//! A container of Podman's in Docker's words.

use serde_json::{Map, Value, json};

use super::{APART, COMMON, COMMON_CONFIG, Refusals, capabilities, copied, is_empty, security, split_bind, texts};

/// Those of `Config` that are in what the runtime was given, that only the image's makers need, or that are translated.
const CONFIG_APART: [&str; 18] = [
    "Annotations",
    "AttachStderr",
    "AttachStdin",
    "AttachStdout",
    "Cmd",
    "CreateCommand",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "HealthcheckOnFailureAction",
    "Image",
    "OnBuild",
    "Passwd",
    "StopSignal",
    "Umask",
    "Volumes",
    "WorkingDir",
];
/// Those of `HostConfig` whose one value is the default in both engines.
const USUAL: [(&str, &str); 3] = [("UTSMode", "private"), ("PidMode", "private"), ("UsernsMode", "host")];
/// Options of Podman's mounts that Docker has as its defaults, that only matter when a container is made, or that it cannot be told.
const UNTOLD: [&str; 12] = [
    "rw",
    "rbind",
    "bind",
    "rprivate",
    "private",
    "nosuid",
    "nodev",
    "tmpcopyup",
    "notmpcopyup",
    "exec",
    "copy",
    "nocopy",
];

/// The parameters for Docker.
pub(super) fn translate(refusals: &mut Refusals<'_>) -> Value {
    let container = refusals.container;
    let (theirs, process) = (&container.parameters, &container.config["process"]);
    let (config, host) = (&theirs["described"]["Config"], &theirs["described"]["HostConfig"]);
    refuse_what_only_podman_has(refusals, config, host);

    let mut body = copied(config, &COMMON_CONFIG);
    let command = texts(&process["args"]);
    let (program, arguments) = command.split_at(command.len().min(1));
    (body["Entrypoint"], body["Cmd"]) = (program.into(), arguments.into());
    body["WorkingDir"] = process["cwd"].clone();
    body["ExposedPorts"] = exposed(config, host);
    body["Env"] = config["Env"].clone();
    body["Image"] = theirs["image_name"].clone();
    match &config["StopSignal"] {
        Value::Number(number) => body["StopSignal"] = number.to_string().into(),
        other => body["StopSignal"] = other.clone(),
    }
    if !is_empty(&config["Healthcheck"]) {
        body["Healthcheck"] = config["Healthcheck"].clone();
    }

    let mut limits = copied(host, &COMMON);
    limits["CapDrop"] = json!(["ALL"]);
    limits["CapAdd"] = capabilities(container).into();
    limits["CgroupnsMode"] = host["CgroupMode"].clone();
    limits["Binds"] = binds(refusals, &host["Binds"]).into();
    limits["Tmpfs"] = tmpfs(&host["Tmpfs"]);
    limits["LogConfig"] = log(refusals, &host["LogConfig"]);
    limits["SecurityOpt"] = security(refusals, &host["SecurityOpt"]).into();
    if !is_empty(&host["RestartPolicy"]["Name"]) {
        limits["RestartPolicy"] = host["RestartPolicy"].clone();
    }
    let limit = |limit: &Value| {
        let name = limit["Name"].as_str().unwrap_or_default().trim_start_matches("RLIMIT_").to_lowercase();
        json!({"Name": name, "Soft": limit["Soft"], "Hard": limit["Hard"]})
    };
    limits["Ulimits"] = host["Ulimits"].as_array().into_iter().flatten().map(limit).collect();
    // Docker lets unprivileged programs have all ports where nothing else is said.
    let mut sysctls = Map::from_iter([("net.ipv4.ip_unprivileged_port_start".to_owned(), "1024".into())]);
    sysctls.extend(container.config["linux"]["sysctl"].as_object().cloned().unwrap_or_default());
    limits["Sysctls"] = sysctls.into();

    let networks: Vec<Value> = theirs["networks"].as_array().into_iter().flatten().map(network).collect();
    let first = networks.first();
    limits["NetworkMode"] = first.map_or_else(|| "none".into(), |network| network["name"].clone());
    body["MacAddress"] = first.map_or(Value::Null, |network| network["endpoint"]["MacAddress"].clone());
    body["HostConfig"] = limits;
    let volumes = theirs["volumes"].as_array().into_iter().flatten().map(|volume| {
        let body = json!({"Name": volume["name"], "Driver": "local", "DriverOpts": null, "Labels": null});
        json!({"name": volume["name"], "inside": volume["inside"], "body": body})
    });
    let volumes: Vec<Value> = volumes.collect();
    json!({
        "body": body,
        "image": format!("sha256:{}", theirs["image"].as_str().unwrap_or_default()),
        "layers": theirs["layers"], "image_bytes": theirs["image_bytes"],
        "networks": networks, "volumes": volumes,
    })
}

fn refuse_what_only_podman_has(refusals: &mut Refusals<'_>, config: &Value, host: &Value) {
    refusals.refuse_rest(config, &[&COMMON_CONFIG, &CONFIG_APART, &["sdNotifyMode"]]);
    let usual: Vec<&str> = USUAL.iter().filter(|(key, value)| host[*key] == *value).map(|(key, _)| *key).collect();
    refusals.refuse_rest(host, &[&COMMON, &APART, &usual]);
    for (key, usual) in [("Umask", "0022"), ("HealthcheckOnFailureAction", "none")] {
        if !is_empty(&config[key]) && config[key] != usual {
            refusals.refuse(&format!("{key} {}", config[key]), "start it without");
        }
    }
    if config["Healthcheck"]["Interval"].as_u64() == Some(0) {
        refusals.refuse("a health check that nobody makes by the clock", "give it an interval");
    }
    if host["MemorySwappiness"].as_i64().is_some_and(|much| much > 0) {
        refusals.refuse("its own swappiness", "start it without");
    }
    if config["Annotations"]["io.podman.annotations.init"] == "TRUE" {
        refusals.refuse("an init of Podman's", "start it without --init");
    }
}

fn network(network: &Value) -> Value {
    let mut addresses = json!({});
    for ip in texts(&network["ips"]) {
        let key = if ip.contains(':') { "IPv6Address" } else { "IPv4Address" };
        addresses[key] = ip.into();
    }
    json!({
        "name": network["name"], "driver": network["kind"]["driver"], "subnets": network["kind"]["subnets"],
        "endpoint": {"IPAMConfig": addresses, "MacAddress": network["mac"], "Aliases": network["aliases"]},
    })
}

fn told(options: &str) -> impl Iterator<Item = &str> {
    options.split(',').filter(|option| !option.is_empty() && !UNTOLD.contains(option))
}

fn binds(refusals: &mut Refusals<'_>, binds: &Value) -> Vec<String> {
    let mut said = Vec::new();
    for bind in texts(binds) {
        let Some((source, inside, options)) = split_bind(&bind) else { continue };
        let options: Vec<&str> = told(options).collect();
        if let Some(option) = options.iter().find(|option| !matches!(**option, "ro" | "z" | "Z" | "rslave" | "rshared"))
        {
            refusals.refuse(&format!("the option {option} of the mount at {inside}"), "start it without");
        }
        let colon = if options.is_empty() { "" } else { ":" };
        said.push(format!("{source}:{inside}{colon}{}", options.join(",")));
    }
    said
}

/// Of the ports that are to be published Docker publishes those that are exposed, too.
fn exposed(config: &Value, host: &Value) -> Value {
    let mut ports = config["ExposedPorts"].as_object().cloned().unwrap_or_default();
    let published = host["PortBindings"].as_object().into_iter().flatten();
    ports.extend(published.map(|(port, _)| (port.clone(), json!({}))));
    ports.into()
}

/// Docker would let no program be run from it.
fn tmpfs(mounts: &Value) -> Value {
    let options = |said: &Value| {
        let said = said.as_str().unwrap_or_default();
        let kept = told(said).collect::<Vec<_>>();
        let exec = if kept.contains(&"noexec") { None } else { Some("exec") };
        kept.into_iter().chain(exec).collect::<Vec<_>>().join(",")
    };
    let mounts = mounts.as_object().into_iter().flatten();
    mounts.map(|(inside, said)| (inside.clone(), options(said).into())).collect::<Map<_, _>>().into()
}

fn log(refusals: &mut Refusals<'_>, log: &Value) -> Value {
    if !is_empty(&log["Tag"]) || !matches!(log["Size"].as_str(), None | Some("" | "0B")) {
        refusals.refuse("options of its log", "start it without them");
    }
    let driver = match log["Type"].as_str().unwrap_or_default() {
        "k8s-file" | "json-file" => "json-file",
        driver @ ("journald" | "none") => driver,
        other => {
            refusals.refuse(&format!("the log driver {other}"), "start it with the log driver k8s-file or journald");
            other
        }
    };
    json!({"Type": driver})
}
