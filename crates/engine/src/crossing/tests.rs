use serde_json::json;
use tranship_types::CarriedTree;

use super::*;
use crate::State;

fn tree(kind: TreeKind, inside: &str, path: &str) -> CarriedTree {
    CarriedTree { kind, inside: inside.into(), path: path.into(), bytes: 0 }
}

fn container(parameters: Value) -> Container {
    Container {
        parameters,
        config: json!({
            "process": {
                "args": ["redis-server", "--save", ""], "cwd": "/data",
                "capabilities": {"bounding": ["CAP_CHOWN", "CAP_NET_RAW"], "effective": ["CAP_CHOWN", "CAP_NET_RAW"]},
            },
            "linux": {"sysctl": {"net.core.somaxconn": "99"}},
            "mounts": [
                {"destination": "/etc/hosts", "type": "bind", "source": "/engine/hosts", "options": ["rbind"]},
                {"destination": "/srv", "type": "bind", "source": "/v/kept/_data", "options": ["rbind"]},
            ],
        }),
        trees: vec![
            tree(TreeKind::WritableLayer, "/", "/layers/1"),
            tree(TreeKind::Volume, "/srv", "/v/kept/_data"),
            tree(TreeKind::Volume, "/cache", "/v/0f3a/_data"),
        ],
        ..Container::at_rest("web", State::Running)
    }
}

fn of_docker() -> Value {
    json!({
        "body": {
            "Hostname": "386536acb019", "Image": "lab:1", "Env": ["A=b"], "Labels": {"tier": "back"}, "Tty": false,
            "Cmd": ["x"], "StopSignal": "SIGINT", "Healthcheck": {"Test": ["CMD-SHELL", "true"]},
            "HostConfig": {
                "NetworkMode": "lab", "IpcMode": "private", "Binds": ["kept:/srv", "/usr:/usr:ro"], "Memory": 5,
                "Tmpfs": {"/tmp": "size=1m", "/run": "noexec"}, "LogConfig": {"Type": "json-file", "Config": {"max-file": "2"}},
                "RestartPolicy": {"Name": "always", "MaximumRetryCount": 0}, "PidsLimit": null, "NanoCpus": 1_500_000_000,
                "Ulimits": [{"Name": "nofile", "Soft": 10, "Hard": 20}], "MaskedPaths": ["/proc/keys"],
            },
        },
        "image": "sha256:1c", "layers": ["sha256:a"], "image_bytes": 7,
        "networks": [{"name": "lab", "driver": "macvlan", "subnets": ["10.0.0.0/24"], "endpoint": {
            "IPAMConfig": {"IPv4Address": "10.0.0.5"}, "MacAddress": "02:42:0a:00:00:05", "Aliases": ["db"],
        }}],
        "volumes": [{"name": "kept", "inside": "/srv", "body": {"Driver": "local", "DriverOpts": null}}],
    })
}

fn causes(result: Result<Value, Vec<Blocker>>) -> Vec<String> {
    result.expect_err("it was not refused").iter().map(ToString::to_string).collect()
}

#[test]
fn podman_is_told_in_its_own_words() {
    let told = parameters(EngineName::Docker, EngineName::Podman, &container(of_docker())).unwrap();
    let (config, host) = (&told["described"]["Config"], &told["described"]["HostConfig"]);
    assert_eq!((&told["image"], &told["image_name"]), (&json!("1c"), &json!("docker.io/library/lab:1")));
    assert_eq!(told["command"], json!(["redis-server", "--save", ""]));
    assert_eq!((&config["WorkingDir"], &config["Cmd"]), (&json!("/data"), &json!(["--save", ""])));
    assert_eq!(told["described"]["EffectiveCaps"], json!(["CAP_CHOWN", "CAP_NET_RAW"]));
    assert_eq!(host["Binds"], json!(["kept:/srv", "/usr:/usr:ro", "0f3a:/cache"]));
    assert_eq!(host["Tmpfs"], json!({"/tmp": "size=1m,noexec,notmpcopyup", "/run": "noexec,notmpcopyup"}));
    assert_eq!(
        (&host["PidsLimit"], &host["CpuQuota"]),
        (&json!(-1), &json!(150_000)),
        "defaults and units are Docker's"
    );
    assert_eq!(
        (&host["Ulimits"][0]["Name"], &host["LogConfig"]["Type"]),
        (&json!("RLIMIT_NOFILE"), &json!("k8s-file"))
    );
    assert_eq!(config["Healthcheck"]["Interval"], 30_000_000_000_u64);
    assert_eq!(
        (&told["networks"][0]["ips"], &told["networks"][0]["mac"]),
        (&json!(["10.0.0.5"]), &json!("02:42:0a:00:00:05"))
    );
    assert_eq!(told["volumes"].as_array().unwrap().len(), 2);
}

#[test]
fn what_podman_would_not_give_is_named() {
    let mut docker = of_docker();
    docker["body"]["Tty"] = true.into();
    docker["body"]["HostConfig"]["Init"] = true.into();
    docker["body"]["HostConfig"]["SecurityOpt"] = json!(["seccomp={}"]);
    docker["body"]["HostConfig"]["LogConfig"] = json!({"Type": "syslog", "Config": {}});
    let mut container = container(docker);
    container.config["mounts"].as_array_mut().unwrap().push(json!({
        "destination": "/sbin/docker-init", "type": "bind", "source": "/usr/bin/docker-init", "options": ["bind"],
    }));
    let found = causes(parameters(EngineName::Docker, EngineName::Podman, &container));
    let words = ["Tty true", "Init true", "option seccomp", "log driver syslog", "at /sbin/docker-init"];
    assert_eq!(found.len(), words.len(), "{found:#?}");
    for word in words {
        assert!(found.iter().any(|cause| cause.contains(word)), "no {word:?} in {found:#?}");
    }
    assert!(causes(parameters(EngineName::Docker, EngineName::Runc, &container))[0].contains("runc cannot take over"));
}

fn of_podman() -> Value {
    json!({
        "image": "1c", "image_name": "localhost/lab:1", "layers": ["sha256:a"], "image_bytes": 7, "command": [], "pod": "",
        "described": {
            "Config": {
                "Hostname": "a9dd", "Env": ["A=b"], "StopSignal": 15, "StopTimeout": 10, "Umask": "0022", "Passwd": true,
                "HealthcheckOnFailureAction": "none", "sdNotifyMode": "container", "CreateCommand": ["podman"],
            },
            "HostConfig": {
                "Binds": ["kept:/srv:rw,rprivate,nosuid,nodev,rbind", "/usr:/usr:ro,rprivate,rbind"], "IpcMode": "shareable",
                "Tmpfs": {"/tmp": "rw,rprivate,nosuid,nodev,tmpcopyup"}, "UTSMode": "private", "PidMode": "private",
                "LogConfig": {"Type": "k8s-file", "Config": null, "Path": "/a", "Tag": "", "Size": "0B"},
                "RestartPolicy": {"Name": "", "MaximumRetryCount": 0}, "PidsLimit": 2048, "Cgroups": "default",
                "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}]},
            },
        },
        "networks": [{"name": "lab", "kind": {"driver": "macvlan", "subnets": ["10.0.0.0/24"]}, "ips": ["10.0.0.5"],
            "mac": "02:42:0a:00:00:05", "aliases": []}],
        "volumes": [{"name": "kept", "inside": "/srv", "local": true}],
    })
}

#[test]
fn docker_is_told_in_its_own_words() {
    let told = parameters(EngineName::Podman, EngineName::Docker, &container(of_podman())).unwrap();
    let (body, host) = (&told["body"], &told["body"]["HostConfig"]);
    assert_eq!((&told["image"], &body["Image"]), (&json!("sha256:1c"), &json!("localhost/lab:1")));
    assert_eq!((&body["Entrypoint"], &body["Cmd"]), (&json!(["redis-server"]), &json!(["--save", ""])));
    assert_eq!((&body["StopSignal"], &host["PidsLimit"]), (&json!("15"), &json!(2048)));
    assert_eq!(body["ExposedPorts"], json!({"80/tcp": {}}));
    assert_eq!(host["Binds"], json!(["kept:/srv", "/usr:/usr:ro"]));
    assert_eq!((&host["Tmpfs"], &host["NetworkMode"]), (&json!({"/tmp": "exec"}), &json!("lab")));
    assert_eq!(host["Sysctls"]["net.ipv4.ip_unprivileged_port_start"], "1024");
    assert_eq!(told["networks"][0]["endpoint"]["IPAMConfig"], json!({"IPv4Address": "10.0.0.5"}));
    assert_eq!(told["volumes"][0]["body"]["Name"], "kept");
}

#[test]
fn what_docker_would_not_give_is_named() {
    let mut podman = of_podman();
    podman["described"]["Config"]["Umask"] = "0077".into();
    podman["described"]["HostConfig"]["UTSMode"] = "host".into();
    podman["described"]["HostConfig"]["Binds"] = json!(["/usr:/usr:ro,noexec"]);
    let found = causes(parameters(EngineName::Podman, EngineName::Docker, &container(podman)));
    assert_eq!(found.len(), 3, "{found:#?}");
    assert!(found[0].contains("UTSMode") && found[1].contains("Umask") && found[2].contains("noexec"), "{found:#?}");
}
