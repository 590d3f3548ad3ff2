use serde_json::json;

use super::*;

/// What `runc spec` writes, in a network namespace of its own.
fn ordinary() -> Value {
    json!({
        "ociVersion": "1.0.2", "hostname": "web",
        "process": {"args": ["sh"], "capabilities": {"bounding": ["CAP_KILL", "CAP_NET_BIND_SERVICE"]}},
        "root": {"path": "/srv/web", "readonly": true},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
        ],
        "linux": {
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "cgroupsPath": "/web",
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                {"type": "network", "path": "/run/netns/web"},
            ],
            "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

fn asked(config: &Value) -> Asked {
    Asked::of_oci(config, Some(Path::new("/run/netns/web")))
}

#[test]
fn an_ordinary_container_asks_for_nothing() {
    assert_eq!(asked(&ordinary()), Asked { root: Some("/srv/web".into()), ..Asked::default() });
}

#[test]
fn what_would_run_outside_of_the_container_is_found() {
    let mut config = ordinary();
    config["hooks"] =
        json!({"prestart": [{"path": "/bin/sh", "args": ["sh", "-c", "id"]}], "poststop": [{"path": "x"}]});
    let mut found = asked(&config).programs;
    found.sort();
    assert_eq!(found, [PathBuf::from("/bin/sh"), PathBuf::from("x")]);
    config["hooks"] = json!({"prestart": {"path": "/bin/sh"}});
    assert_eq!(asked(&config).never.len(), 1);
    let mut config = ordinary();
    // CRIU reads the file and runs its action-script.
    config["annotations"] = json!({"org.criu.config": "/srv/web/evil.conf", "mine": "x"});
    assert_eq!(asked(&config).never, ["it has the annotation \"org.criu.config\""]);
}

#[test]
fn binds_and_other_filesystems_are_found() {
    let mut config = ordinary();
    config["mounts"] = json!([
        {"destination": "/a", "type": "bind", "source": "/", "options": ["rbind"]},
        {"destination": "/b", "type": "none", "source": "/etc", "options": ["bind", "ro"]},
        {"destination": "/c", "type": "ext4", "source": "/dev/sda1"},
        {"destination": "/d", "type": "overlay", "source": "overlay", "options": ["lowerdir=/etc:/usr"]},
        {"destination": "/e/../../f", "type": "tmpfs"},
    ]);
    let found = asked(&config);
    assert_eq!(found.binds, [(PathBuf::from("/"), true), (PathBuf::from("/etc"), false)]);
    assert_eq!(found.never.len(), 3, "{:?}", found.never);
}

#[test]
fn a_second_proc_and_writable_kernel_filesystems_are_found() {
    let with = |inside: &str, kind: &str, options: Value| {
        let mut config = ordinary();
        config["mounts"] = json!([{"destination": inside, "type": kind, "options": options}]);
        asked(&config).privileged.len()
    };
    for inside in ["/proc", "/proc/", "proc"] {
        assert_eq!(with(inside, "proc", Value::Null), 0, "{inside}");
    }
    assert_eq!(with("/x", "proc", json!(["ro"])), 1);
    for kind in ["sysfs", "cgroup", "cgroup2"] {
        assert_eq!((with("/x", kind, json!(["nosuid"])), with("/x", kind, json!(["ro"]))), (1, 0), "{kind}");
    }
}

#[test]
fn namespaces_of_others_are_found() {
    let change = |change: &dyn Fn(&mut Value)| {
        let mut config = ordinary();
        change(&mut config);
        asked(&config)
    };
    let hosts = change(&|c| c["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "uts"}]));
    assert_eq!(hosts.privileged.len(), 3, "{:?}", hosts.privileged);
    for path in ["/proc/1/ns/net", "/run/netns/../../proc/1/ns/net", "/run/netns/other"] {
        let joined = change(&|c| c["linux"]["namespaces"][4]["path"] = path.into());
        assert_eq!(joined.never.len(), 1, "{path}");
    }
    let joined = change(&|c| c["linux"]["namespaces"][3]["path"] = "/proc/1/ns/mnt".into());
    assert!(joined.never[0].contains("mount namespace"), "{:?}", joined.never);
    assert_eq!(Asked::of_oci(&ordinary(), None).never.len(), 1, "a namespace that the offer does not name");
}

#[test]
fn devices_capabilities_and_bare_proc_are_found() {
    let mut config = ordinary();
    config["linux"]["devices"] =
        json!([{"path": "/dev/x", "type": "b", "major": 8, "minor": 0}, {"path": "/p", "type": "p"}]);
    config["linux"]["resources"]["devices"] = json!([
        {"allow": false, "access": "rwm"}, {"allow": true, "access": "rw", "type": "c", "major": 1, "minor": 3},
        {"allow": true, "access": "m"}, {"allow": true, "access": "rwm"}, {"allow": true, "type": "c", "major": 10, "minor": -1},
    ]);
    config["process"]["capabilities"]["ambient"] = json!(["CAP_SYS_ADMIN", "CAP_NET_ADMIN", "cap_sys_module"]);
    let found = asked(&config);
    assert_eq!(found.devices, [('b', Some(8), Some(0)), ('a', None, None), ('c', Some(10), None)]);
    assert_eq!(found.capabilities, ["SYS_ADMIN", "SYS_MODULE"]);
    config["linux"]["resources"] = json!({});
    assert_eq!(asked(&config).privileged.len(), 0, "the devices are denied here");
    config["linux"]["resources"]["devices"] = json!([{"allow": true, "type": "c", "major": 1, "minor": 3}]);
    config["linux"]["readonlyPaths"] = json!([]);
    config["linux"]["maskedPaths"] = Value::Null;
    assert_eq!(asked(&config).privileged.len(), 4);
}

#[test]
fn what_is_not_known_is_refused() {
    let mut config = ordinary();
    config["linux"]["netDevices"] = json!({"eth0": {}});
    config["vm"] = json!({});
    assert_eq!(asked(&config).never.len(), 2);
    for (path, fits) in [
        ("/a/b", true),
        ("a", true),
        ("system.slice:x:web", true),
        ("/", false),
        ("", false),
        ("/a/../b", false),
        ("../x", false),
    ] {
        assert_eq!(is_below(path), fits, "{path}");
    }
}

#[test]
fn short_binds_are_volumes_or_paths() {
    let mut asked = Asked::default();
    for text in ["data:/data", "/srv:/x", "/usr:/usr:ro,rprivate", "/a:/a:rshared"] {
        asked.add_short_bind(text);
    }
    let binds = [("/srv", true), ("/usr", false), ("/a", true)].map(|(path, writable)| (PathBuf::from(path), writable));
    assert_eq!((asked.binds, asked.privileged.len()), (binds.to_vec(), 1));
}
