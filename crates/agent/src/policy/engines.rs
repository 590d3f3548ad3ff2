//! What an offer asks for, in the words of the engine that would make the container.

use std::path::Path;

use serde_json::Value;
use tranship_types::EngineName;
use tranship_wire::message::Offer;

use super::asked::{Asked, USUAL, is_below, list, texts};

/// What of a container of Docker's or Podman's names a namespace that is not its own, in these keys of `HostConfig`.
const MODES: [&str; 6] = ["NetworkMode", "IpcMode", "PidMode", "UTSMode", "CgroupnsMode", "UsernsMode"];

/// What an offered container asks for.
pub fn asked(engine: EngineName, offer: &Offer) -> Asked {
    let network = offer.network_path().map(std::path::PathBuf::as_path);
    match engine {
        EngineName::Runc => Asked::of_oci(&offer.config, network),
        EngineName::Containerd => of_containerd(&offer.parameters, network),
        EngineName::Docker => {
            let mut asked = of_docker(&offer.parameters);
            asked.add_proc_paths(&offer.config["linux"]);
            asked
        }
        EngineName::Podman => {
            let mut asked = of_podman(&offer.parameters["described"]);
            let joined = &offer.parameters["joined"];
            let brings_another = joined["brought"].is_object() && joined["brought"]["name"] != joined["name"];
            if joined.is_object()
                && (brings_another || (!joined["brought"].is_object() && offer.network_owner.is_none()))
            {
                asked.never.push(format!("it joins the pod {}, which it does not bring", joined["name"]));
            }
            if joined["brought"].is_object() {
                let infra = of_podman(&joined["brought"]["infra"]["described"]);
                asked.binds.extend(infra.binds);
                asked.privileged.extend(infra.privileged);
                asked.never.extend(infra.never);
                asked.device_paths.extend(infra.device_paths);
                infra.capabilities.iter().for_each(|name| asked.add_capability(name));
            }
            asked.add_proc_paths(&offer.config["linux"]);
            asked
        }
    }
}

fn of_containerd(parameters: &Value, network: Option<&Path>) -> Asked {
    let mut asked = Asked::of_oci(&parameters["spec"], network);
    // It is the engine's own, made from an image, in the bundle.
    if let Some(root) = asked.root.take().filter(|root| root.as_os_str() != "rootfs") {
        asked.never.push(format!("its root filesystem is {}, which containerd has not made", root.display()));
    }
    let log = parameters["log"].as_str().unwrap_or_default();
    match log.split_once("://") {
        None if log.is_empty() => {}
        // The shim runs it, and reads the container's output from it.
        Some(("binary", rest)) => asked.programs.push(rest.split('?').next().unwrap_or_default().into()),
        Some(("file", rest)) => asked.binds.push((rest.split('?').next().unwrap_or_default().into(), true)),
        _ => asked.never.push(format!("its log goes to {log:?}")),
    }
    let runtime = parameters["runtime"].as_str().unwrap_or_default();
    if runtime.contains('/') {
        asked.never.push(format!("its runtime is the program {runtime:?}"));
    }
    let labels = parameters["labels"].as_object().into_iter().flat_map(serde_json::Map::keys);
    let restarts = labels.filter(|key| key.starts_with("containerd.io/restart."));
    asked.never.extend(restarts.map(|key| format!("it has the label {key:?}")));
    asked
}

fn of_docker(parameters: &Value) -> Asked {
    let host = &parameters["body"]["HostConfig"];
    let mut asked = of_host_config(host);
    for mode in MODES {
        let text = host[mode].as_str().unwrap_or_default();
        if text.starts_with("container:") || text.starts_with("ns:") {
            asked.never.push(format!("its {mode} is {text:?}"));
        }
    }
    if !list(&host["VolumesFrom"]).is_empty() {
        asked.never.push("it takes volumes from another container".to_owned());
    }
    let driver = host["VolumeDriver"].as_str().unwrap_or_default();
    if !matches!(driver, "" | "local") {
        asked.never.push(format!("its volumes have the driver {driver:?}"));
    }
    for volume in list(&parameters["volumes"]) {
        let (body, name) = (&volume["body"], volume["name"].as_str().unwrap_or_default());
        asked.add_volume(name, &body["Driver"], &body["DriverOpts"]);
    }
    for mount in list(&host["Mounts"]) {
        let (kind, source) = (mount["Type"].as_str().unwrap_or_default(), mount["Source"].as_str().unwrap_or_default());
        match kind {
            "bind" => asked.binds.push((source.into(), mount["ReadOnly"] != true)),
            "volume" => {
                let driver = &mount["VolumeOptions"]["DriverConfig"];
                asked.add_volume(source, &driver["Name"], &driver["Options"]);
            }
            "tmpfs" => {}
            _ => asked.never.push(format!("it has a mount of type {kind:?}")),
        }
        if mount["BindOptions"]["Propagation"].as_str().is_some_and(|mode| mode.ends_with("shared")) {
            asked.privileged.push(format!("mounts below {source:?} appear on the node"));
        }
    }
    for (key, protected) in [("ReadonlyPaths", "/proc/sys"), ("MaskedPaths", "/proc/kcore")] {
        if host[key].is_array() && !texts(&host[key]).any(|path| path == protected) {
            asked.privileged.push(format!("its {key} do not have {protected}"));
        }
    }
    asked
}

fn of_podman(described: &Value) -> Asked {
    let mut asked = of_host_config(&described["HostConfig"]);
    asked.add_annotations(&described["Config"]["Annotations"]);
    for set in ["EffectiveCaps", "BoundingCaps"] {
        texts(&described[set]).for_each(|name| asked.add_capability(name));
    }
    for mode in ["IpcMode", "CgroupMode"] {
        let text = described["HostConfig"][mode].as_str().unwrap_or_default();
        // A container of a pod is told so, and gets the pod's.
        if text.starts_with("ns:") {
            asked.never.push(format!("its {mode} is {text:?}"));
        }
    }
    asked
}

/// What is said in the same words by both.
fn of_host_config(host: &Value) -> Asked {
    let mut asked = Asked { seccomp: true, ..Asked::default() };
    if host["Privileged"] == true {
        asked.privileged.push("it is privileged".to_owned());
    }
    for mode in MODES.iter().filter(|mode| host[**mode] == "host") {
        // Podman shows the last two of every container where they are not used.
        if !["UsernsMode", "CgroupnsMode"].contains(mode) {
            asked.privileged.push(format!("its {mode} is that of the node"));
        }
    }
    texts(&host["Binds"]).for_each(|text| asked.add_short_bind(text));
    texts(&host["CapAdd"]).for_each(|name| asked.add_capability(name));
    for option in texts(&host["SecurityOpt"]) {
        asked.add_security(option);
        asked.seccomp &= !(option.starts_with("seccomp") && option.contains("unconfined"));
    }
    let devices = list(&host["Devices"]).iter().filter_map(|device| device["PathOnHost"].as_str());
    asked.device_paths.extend(devices.filter(|path| !USUAL.contains(path)).map(Into::into));
    for key in ["DeviceCgroupRules", "DeviceRequests"] {
        if !list(&host[key]).is_empty() {
            asked.privileged.push(format!("it has {key}"));
        }
    }
    asked.add_annotations(&host["Annotations"]);
    if host["CgroupParent"].as_str().is_some_and(|path| !path.is_empty() && !is_below(path)) {
        asked.never.push(format!("its cgroup is below {}", host["CgroupParent"]));
    }
    asked
}

impl Asked {
    /// A volume that the engine would make. The driver `local` mounts what its options say.
    fn add_volume(&mut self, name: &str, driver: &Value, options: &Value) {
        let driver = driver.as_str().unwrap_or_default();
        if !matches!(driver, "" | "local") {
            self.never.push(format!("volume {name:?} has the driver {driver:?}"));
        }
        let Some(options) = options.as_object().filter(|options| !options.is_empty()) else { return };
        let text = |key: &str| options.get(key).and_then(Value::as_str).unwrap_or_default();
        let (kind, device) = (text("type"), text("device"));
        // These have a directory mounted whatever the type is.
        let binds = text("o").split(',').any(|option| ["bind", "rbind", "move", "remount"].contains(&option.trim()));
        match kind {
            _ if binds => self.binds.push((device.into(), true)),
            "tmpfs" => {}
            // It is limited in size.
            "" if device.is_empty() => {}
            "none" | "" if device.starts_with('/') => self.binds.push((device.into(), true)),
            "nfs" | "nfs4" | "cifs" => {}
            _ => self.never.push(format!("volume {name:?} mounts {device:?} of type {kind:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    #[test]
    fn dockers_words_are_understood() {
        let ordinary = json!({"body": {"HostConfig": {
            "NetworkMode": "lab", "IpcMode": "private", "PidMode": "", "Binds": ["data:/data", "/usr:/usr:ro"], "CapAdd": null,
            "SecurityOpt": null, "Devices": [], "CgroupnsMode": "host", "MaskedPaths": ["/proc/kcore"],
            "ReadonlyPaths": ["/proc/sys"],
        }}, "volumes": [{"name": "data", "body": {"Driver": "local", "DriverOpts": null}}]});
        let expected = Asked { seccomp: true, binds: vec![("/usr".into(), false)], ..Asked::default() };
        assert_eq!(of_docker(&ordinary), expected);

        let hostile = json!({"body": {"HostConfig": {
            "Privileged": true, "PidMode": "host", "NetworkMode": "container:db", "VolumesFrom": ["db"],
            "Binds": ["/:/host"], "CapAdd": ["sys_admin"], "SecurityOpt": ["seccomp=unconfined", "no-new-privileges"],
            "Devices": [{"PathOnHost": "/dev/sda"}], "DeviceCgroupRules": ["c *:* rwm"], "CgroupParent": "/a/../..",
            "Annotations": {"org.criu.config": "/x"}, "MaskedPaths": [], "ReadonlyPaths": [],
            "Mounts": [{"Type": "bind", "Source": "/etc"}, {"Type": "npipe"}, {"Type": "volume", "Source": "v",
                "VolumeOptions": {"DriverConfig": {"Name": "local", "Options": {"type": "none", "o": "bind", "device": "/root"}}}}],
        }}, "volumes": [
            {"name": "w", "body": {"Driver": "local", "DriverOpts": {"type": "ext4", "device": "/dev/sda1"}}},
            {"name": "x", "body": {"Driver": "plugin"}},
        ]});
        let found = of_docker(&hostile);
        let paths = ["/", "/etc", "/root"].map(|path| (PathBuf::from(path), true));
        assert_eq!(found.binds, paths);
        assert_eq!((found.capabilities, found.device_paths), (vec!["SYS_ADMIN".to_owned()], vec!["/dev/sda".into()]));
        assert_eq!((found.privileged.len(), found.never.len(), found.seccomp), (6, 7, false), "{:?}", found.never);
    }

    #[test]
    fn volumes_and_devices_that_are_usual_ask_for_nothing() {
        let volume = |options: Value| {
            let volumes = json!([{"name": "v", "body": {"Driver": "local", "DriverOpts": options}}]);
            of_docker(
                &json!({"body": {"HostConfig": {"Devices": [{"PathOnHost": "/dev/net/tun"}]}}, "volumes": volumes}),
            )
        };
        let nothing = Asked { seccomp: true, ..Asked::default() };
        assert_eq!(volume(json!({"o": "size=10m"})), nothing);
        assert_eq!(volume(json!({"type": "tmpfs", "device": "tmpfs", "o": "size=10m"})), nothing);
        for options in ["bind", "ro,rbind", "remount"] {
            let found = volume(json!({"type": "tmpfs", "device": "/", "o": options}));
            assert_eq!(found.binds, [("/".into(), true)], "{options}");
        }
        let driver = json!({"body": {"HostConfig": {"VolumeDriver": "plugin"}}});
        assert_eq!(of_docker(&driver).never.len(), 1);
    }

    #[test]
    fn podmans_words_are_understood() {
        let described = json!({
            "HostConfig": {"Binds": ["data:/data:rw,rbind", "/srv:/srv:rw"], "CgroupMode": "host", "UsernsMode": "",
                "SecurityOpt": ["label=disable"], "IpcMode": "shareable"},
            "Config": {"Annotations": {"run.oci.hooks.stdout": "/etc/cron.d/x"}},
            "EffectiveCaps": ["CAP_CHOWN", "CAP_SYS_MODULE"],
        });
        let found = of_podman(&described);
        assert_eq!(found.binds, [("/srv".into(), true)]);
        assert_eq!((found.capabilities.len(), found.privileged.len(), found.never.len()), (1, 1, 1));
    }

    #[test]
    fn containerds_words_are_understood() {
        let log = |log: &str| of_containerd(&json!({"spec": {}, "log": log, "runtime": "io.containerd.runc.v2"}), None);
        assert_eq!(log("binary:///bin/sh?-c=id").programs, [PathBuf::from("/bin/sh")]);
        assert_eq!(log("file:///etc/cron.d/x").binds, [("/etc/cron.d/x".into(), true)]);
        assert!(log("").never.is_empty() && log("fifo:///x").never.len() == 1 && log("/etc/x").never.len() == 1);
        let rooted = |root: &str| of_containerd(&json!({"spec": {"root": {"path": root}}}), None).never.len();
        assert_eq!((rooted("rootfs"), rooted("/"), rooted("../rootfs")), (0, 1, 1));
        let odd =
            json!({"spec": {}, "runtime": "/srv/evil", "labels": {"containerd.io/restart.loguri": "binary:///x"}});
        assert_eq!(of_containerd(&odd, None).never.len(), 2);
    }
}
