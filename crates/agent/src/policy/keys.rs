//! Keys of JSON that an engine reads as other keys: Go's encoding/json ignores the case of letters, and the rules of `accept` do not.

use serde_json::Value;

/// Keys of an OCI configuration that the rules read, or that are set here.
const OCI: [&str; 54] = [
    "access",
    "allow",
    "ambient",
    "annotations",
    "apparmorProfile",
    "args",
    "bounding",
    "capabilities",
    "cgroupsPath",
    "createContainer",
    "createRuntime",
    "destination",
    "devices",
    "domainname",
    "effective",
    "gid",
    "gidMappings",
    "hooks",
    "hostname",
    "inheritable",
    "intelRdt",
    "linux",
    "listenerPath",
    "major",
    "maskedPaths",
    "memoryPolicy",
    "minor",
    "mountLabel",
    "mounts",
    "namespaces",
    "ociVersion",
    "options",
    "path",
    "permitted",
    "personality",
    "poststart",
    "poststop",
    "prestart",
    "process",
    "readonlyPaths",
    "resources",
    "root",
    "rootfsPropagation",
    "seccomp",
    "selinuxLabel",
    "source",
    "startContainer",
    "sysctl",
    "terminal",
    "type",
    "uid",
    "uidMappings",
    "unified",
    "user",
];
/// Keys of it below which names are free.
const OCI_FREE: [&str; 4] = ["annotations", "rdma", "sysctl", "unified"];
/// The same of the bodies with which Docker makes a container and a volume.
const DOCKER: [&str; 44] = [
    "Annotations",
    "BindOptions",
    "Binds",
    "CapAdd",
    "Cgroup",
    "CgroupParent",
    "CgroupnsMode",
    "ClusterVolumeSpec",
    "Config",
    "DeviceCgroupRules",
    "DeviceRequests",
    "Devices",
    "Driver",
    "DriverConfig",
    "DriverOpts",
    "EndpointsConfig",
    "HostConfig",
    "Image",
    "IpcMode",
    "Labels",
    "MacAddress",
    "MaskedPaths",
    "Mounts",
    "Name",
    "NetworkMode",
    "NetworkingConfig",
    "Options",
    "PathInContainer",
    "PathOnHost",
    "PidMode",
    "Privileged",
    "Propagation",
    "ReadOnly",
    "ReadonlyPaths",
    "Runtime",
    "SecurityOpt",
    "Source",
    "Type",
    "UTSMode",
    "UsernsMode",
    "VolumeDriver",
    "VolumeOptions",
    "Volumes",
    "VolumesFrom",
];
/// As [`OCI_FREE`]; `Config` is that of the log's driver.
const DOCKER_FREE: [&str; 12] = [
    "Annotations",
    "Config",
    "DriverOpts",
    "EndpointsConfig",
    "ExposedPorts",
    "Labels",
    "Options",
    "PortBindings",
    "StorageOpt",
    "Sysctls",
    "Tmpfs",
    "Volumes",
];

/// A key of an OCI configuration that a runtime takes for another one, and that one.
pub fn of_oci(config: &Value) -> Option<(&str, &'static str)> {
    mistaken(config, &OCI, &OCI_FREE)
}

/// The same of a body of Docker's API.
pub fn of_docker(body: &Value) -> Option<(&str, &'static str)> {
    mistaken(body, &DOCKER, &DOCKER_FREE)
}

/// As `encoding/json` compares keys. Two letters outside of ASCII have a case in it: K (U+212A) and ſ (U+017F).
fn fold(key: &str) -> impl Iterator<Item = char> + '_ {
    key.chars().map(|letter| match letter {
        '\u{212a}' => 'k',
        '\u{17f}' => 's',
        other => other.to_ascii_lowercase(),
    })
}

fn mistaken<'a>(value: &'a Value, known: &[&'static str], free: &[&str]) -> Option<(&'a str, &'static str)> {
    if let Value::Array(all) = value {
        return all.iter().find_map(|one| mistaken(one, known, free));
    }
    let mut members = value.as_object()?.iter();
    members.find_map(|(key, below)| {
        let is_like = |one: &&&'static str| **one != key && fold(one).eq(fold(key));
        match known.iter().find(is_like) {
            Some(other) => Some((key.as_str(), *other)),
            None if free.contains(&key.as_str()) => None,
            None => mistaken(below, known, free),
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_in_other_letters_are_found() {
        for (config, key) in [
            (json!({"Linux": {}}), "Linux"),
            (json!({"linux": {"namespaces": [{"type": "pid"}, {"type": "mount", "Path": "/proc/1/ns/mnt"}]}}), "Path"),
            (json!({"mounts": [{"destination": "/x", "type": "tmpfs", "Options": ["bind"]}]}), "Options"),
            (json!({"linux": {"devices": [{"type": "p", "tYpe": "b"}]}}), "tYpe"),
            (json!({"process": {"Capabilities": {}}}), "Capabilities"),
            (json!({"hoo\u{212a}s": {}}), "hoo\u{212a}s"),
            (json!({"linux": {"name\u{17f}paces": []}}), "name\u{17f}paces"),
        ] {
            assert_eq!(of_oci(&config).map(|(key, _)| key), Some(key), "{config}");
        }
        for (body, key) in [
            (json!({"hostconfig": {"Privileged": true}}), "hostconfig"),
            (json!({"HostConfig": {"privileged": true}}), "privileged"),
            (
                json!({"HostConfig": {"Mounts": [{"Type": "volume", "VolumeOptions": {"driverConfig": {}}}]}}),
                "driverConfig",
            ),
            (json!({"Name": "v", "driveropts": {"device": "/"}}), "driveropts"),
        ] {
            assert_eq!(of_docker(&body).map(|(key, _)| key), Some(key), "{body}");
        }
    }

    #[test]
    fn free_names_and_other_keys_are_left_alone() {
        let config = json!({"annotations": {"Linux": "x"}, "linux": {
            "sysctl": {"Path": "1"}, "resources": {"unified": {"Type": "1"}, "devices": [{"allow": false, "access": "rwm"}]},
        }});
        assert_eq!(of_oci(&config), None);
        let body = json!({"Labels": {"hostconfig": "x"}, "HostConfig": {
            "LogConfig": {"Type": "gelf", "Config": {"labels": "a"}}, "Tmpfs": {"/type": ""}, "Sysctls": {"name": "1"},
            "Mounts": [{"Type": "volume", "VolumeOptions": {"DriverConfig": {"Options": {"type": "tmpfs"}}}}],
        }});
        assert_eq!(of_docker(&body), None);
    }
}
