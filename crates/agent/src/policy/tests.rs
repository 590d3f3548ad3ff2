use serde_json::{Value, json};
use tranship_types::{CarriedTree, Interface, NetworkIdentity};

use super::*;

fn config() -> Config {
    toml::from_str(include_str!("../../../../packaging/agent.toml")).unwrap()
}

fn offer() -> Offer {
    let root = std::env::temp_dir();
    serde_json::from_value(json!({
        "container": "web", "engine": "runc", "mode": "auto", "network": ["/run/netns/web", {"interfaces": [], "routes": []}],
        "memory_bytes": 1, "shared_bytes": 0, "rootfs": null, "cpu": null, "binds": [], "streams": 1, "criu": "",
        "config": {
            "root": {"path": root}, "mounts": [],
            "linux": {
                "resources": {"devices": [{"allow": false, "access": "rwm"}]}, "cgroupsPath": "/web",
                "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                    {"type": "network", "path": "/run/netns/web"}],
                "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
            },
        },
    }))
    .unwrap()
}

/// The keys of `accept` that would allow what was found; `-` where nothing does.
fn found(accept: &Accept, offer: &Offer) -> Vec<&'static str> {
    violations(&config(), accept, offer).into_iter().map(|one| one.rule.map_or("-", |(key, _)| key)).collect()
}

fn bound(source: &Path) -> Offer {
    let mut offer = offer();
    offer.config["mounts"] = json!([{"destination": "/x", "type": "bind", "source": source, "options": ["ro"]}]);
    offer
}

#[test]
fn an_ordinary_container_is_accepted_and_others_name_the_rule() {
    let accept = Accept::default();
    assert_eq!(found(&accept, &offer()), [""; 0]);
    let mut hostile = bound(Path::new("/etc"));
    hostile.config["hooks"] = json!({"poststop": [{"path": "/bin/sh"}]});
    hostile.config["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    hostile.config["linux"]["devices"] = json!([{"type": "b", "major": 8, "minor": 0}]);
    hostile.config["root"]["path"] = "/".into();
    hostile.config["linux"]["namespaces"][0] = Value::Null;
    hostile.config["annotations"] = json!({"org.criu.config": "/x"});
    let all = ["-", "binds", "programs", "roots", "privileged", "devices", "capabilities"];
    assert_eq!(found(&accept, &hostile), all);
    let some = Accept { privileged: true, roots: vec!["/".into()], ..Accept::default() };
    assert_eq!(found(&some, &hostile), ["-", "binds", "programs"]);
    let more = Accept { binds: vec!["/etc:ro".parse().unwrap()], programs: vec!["/bin/sh".into()], ..some };
    assert_eq!(found(&more, &hostile), ["-"]);
}

#[test]
fn names_engines_and_sizes_are_chosen() {
    let only = |containers: &[&str]| Accept {
        containers: containers.iter().map(|one| (*one).to_owned()).collect(),
        ..Accept::default()
    };
    assert_eq!(found(&only(&["db", "w*"]), &offer()), [""; 0]);
    assert_eq!(found(&only(&["db"]), &offer()), ["containers"]);
    assert_eq!(found(&only(&[]), &offer()), ["containers"]);
    let docker = Accept { engines: Some(vec![EngineName::Docker]), ..Accept::default() };
    assert_eq!(found(&docker, &offer()), ["engines"]);
    let mut big = offer();
    big.trees = vec![CarriedTree { kind: TreeKind::Volume, inside: "/d".into(), path: "/v".into(), bytes: 3 << 20 }];
    assert_eq!(found(&Accept { trees_mib: Some(3), ..Accept::default() }, &big), [""; 0]);
    assert_eq!(found(&Accept { trees_mib: Some(2), ..Accept::default() }, &big), ["trees_mib"]);
    assert_eq!(found(&Accept { seccomp: true, ..Accept::default() }, &offer()), ["seccomp"]);
    for (pattern, name, fits) in [
        ("*", "", true),
        ("a*c", "abbc", true),
        ("a*c", "abb", false),
        ("a?", "ab", true),
        ("a?", "a", false),
        ("****x", "yx", true),
    ] {
        assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
    }
}

#[test]
fn a_bind_leads_into_an_allowed_directory_or_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let allowed = directory.path().join("allowed");
    std::fs::create_dir_all(allowed.join("sub")).unwrap();
    std::fs::create_dir(directory.path().join("allowed-not")).unwrap();
    std::os::unix::fs::symlink("/etc", allowed.join("link")).unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all", allowed.join("dangling")).unwrap();
    let accept = |text: String| Accept { binds: vec![text.parse().unwrap()], ..Accept::default() };
    let writable = accept(allowed.display().to_string());
    for good in ["", "sub", "new/er"] {
        assert_eq!(found(&writable, &bound(&allowed.join(good))), [""; 0], "{good}");
    }
    for bad in ["link", "link/cron.d", "dangling", "dangling/x", "../allowed-not", "sub/../../x"] {
        assert_eq!(found(&writable, &bound(&allowed.join(bad))), ["binds"], "{bad}");
    }
    assert_eq!(found(&writable, &bound(&directory.path().join("allowed-not"))), ["binds"]);
    let tree = |path: &Path| {
        let mut offer = offer();
        offer.trees = vec![CarriedTree { kind: TreeKind::Bind, inside: "/d".into(), path: path.into(), bytes: 0 }];
        offer
    };
    assert_eq!(found(&writable, &tree(&allowed.join("data"))), [""; 0]);
    assert_eq!(found(&accept(format!("{}:ro", allowed.display())), &tree(&allowed.join("data"))), ["binds"]);
    assert_eq!(found(&writable, &tree(Path::new("/etc/cron.d"))), ["binds"]);
}

#[test]
fn roots_are_not_of_the_system() {
    let (config, accept) = (config(), Accept::default());
    for bad in [
        "/",
        "/etc",
        "/usr/share",
        "/root/x",
        "/var",
        "/home/x",
        "/var/log/x",
        "/var/lib/docker/x",
        "/run/tranship/bundles",
        "/srv/../etc",
        "srv",
    ] {
        assert!(!may_be_root(&config, &accept, Path::new(bad)), "{bad}");
    }
    for good in ["/srv/web", "/opt/images/web", "/var/lib/images"] {
        assert!(may_be_root(&config, &accept, Path::new(good)), "{good}");
    }
}

#[test]
fn devices_are_compared_by_number() {
    let mut offer = offer();
    offer.config["linux"]["devices"] = json!([{"type": "c", "major": 1, "minor": 11}]);
    assert_eq!(found(&Accept::default(), &offer), ["devices"]);
    let has = |path: &str| Accept { devices: vec![path.into()], ..Accept::default() };
    assert_eq!(found(&has("/dev/null"), &offer), ["devices"]);
    offer.config["linux"]["devices"] = json!([{"type": "b", "major": 1, "minor": 3}]);
    assert_eq!(found(&has("/dev/null"), &offer), ["devices"], "a block device of the same number");
}

#[test]
fn what_no_offer_may_have() {
    let changed = |change: &dyn Fn(&mut Offer)| {
        let mut offer = offer();
        change(&mut offer);
        acceptable(&offer).map_err(|failure| failure.message)
    };
    changed(&|_| {}).unwrap();
    let tree = |path: &str, inside: &str| CarriedTree {
        kind: TreeKind::Bind,
        inside: inside.into(),
        path: path.into(),
        bytes: 0,
    };
    let refused = |change: &dyn Fn(&mut Offer), words: &str| {
        let why = changed(change).unwrap_err();
        assert!(why.contains(words), "{words:?} not in {why}");
    };
    for name in ["", "../etc", "a/b", ".hidden", "a b", "a\0b"] {
        refused(&|o| o.container = name.to_owned(), "its name");
        refused(&|o| o.network_owner = Some(name.to_owned()), "brings its network");
    }
    refused(&|o| o.joined_network = Some("/run/netns/db".into()), "no container brings");
    refused(&|o| o.config["linux"]["cgroupsPath"] = "/a/../../b".into(), "leads upwards");
    refused(&|o| o.config["linux"]["namespaces"][0]["Path"] = "/proc/1/ns/pid".into(), "takes for \"path\"");
    refused(&|o| o.parameters = json!({"spec": {"Hooks": {}}}), "takes for \"hooks\"");
    refused(&|o| o.parameters = json!({"body": {"hostConfig": {}}}), "takes for \"HostConfig\"");
    refused(&|o| o.parameters = json!({"volumes": [{"body": {"driverOpts": {}}}]}), "takes for \"DriverOpts\"");
    for (written, place) in [("/data", "/proc/sys"), ("/proc", "/etc"), ("/data", "/x/../etc")] {
        let mount = json!({"destination": place, "configuredDestination": written, "type": "bind", "source": "/srv"});
        refused(&|o| o.config["mounts"] = json!([mount]), "no link of its image can lead");
    }
    for path in ["/proc/1/ns/net", "/run/netns/../x", "/etc/passwd"] {
        refused(&|o| o.network.as_mut().unwrap().0 = path.into(), "network namespace");
    }
    refused(&|o| o.trees = (0..257).map(|n| tree(&format!("/srv/{n}"), &format!("/{n}"))).collect(), "mount fewer");
    for path in ["srv", "/srv/../etc", "/", "/srv/."] {
        refused(&|o| o.trees = vec![tree(path, "/x")], "without . and ..");
    }
    refused(&|o| o.trees = vec![tree("/srv/a", "/x"), tree("/srv/a/b", "/y")], "one in the other");
    refused(&|o| o.trees = vec![tree("/srv/a", "/x"), tree("/srv/b", "/x")], "one in the other");
    for name in ["", "..", "a/b", "eth0\n", "sixteen-chars-xx"] {
        let interface = |name: &str| Interface {
            name: "eth0".to_owned(),
            index: 2,
            mac: [0; 6],
            mtu: 1500,
            addresses: Vec::new(),
            attachment: tranship_types::Attachment::Macvlan { parent: name.to_owned() },
        };
        let identity = NetworkIdentity { interfaces: vec![interface(name)], ..NetworkIdentity::default() };
        refused(&|o| o.network.as_mut().unwrap().1 = identity.clone(), "no name of an interface");
    }
    changed(&|o| o.trees = (0..256).map(|n| tree(&format!("/srv/{n}"), &format!("/{n}"))).collect()).unwrap();
}

#[test]
fn files_for_standard_streams_must_be_allowed() {
    let mut offer = offer();
    offer.streams_of_node = vec![
        serde_json::from_value(json!({
            "kind": "file", "name": "/etc/cron.d/x", "numbers": [1], "reads": false, "writes": true, "flags": 1,
        }))
        .unwrap(),
    ];
    let allowing = |path: &str| Accept { binds: vec![path.parse().unwrap()], ..Accept::default() };
    assert_eq!(found(&Accept::default(), &offer), ["binds"]);
    assert_eq!(found(&allowing("/etc:ro"), &offer), ["binds"]);
    assert_eq!(found(&allowing("/etc"), &offer), [""; 0]);
    offer.stdio_target = "file:/usr/x".parse().unwrap();
    assert_eq!(found(&allowing("/etc"), &offer), ["binds"]);
    assert_eq!(found(&allowing("/usr"), &offer), [""; 0]);
    let stream = offer.streams_of_node[0].clone();
    offer.streams_of_node = vec![stream; 17];
    assert!(acceptable(&offer).is_err());
}
