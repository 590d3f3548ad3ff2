//! What of a container's description by Docker makes it again on another node.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tranship_types::{Blocker, BlockerKind};

use super::networks;
use crate::attached::gateways;
use crate::json::{list, said, section};
use crate::{AttachedNetwork, described};

/// The parameters of a container, as they travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Parameters {
    /// The body of `POST /containers/create`, but for networks and runtime.
    pub body: Value,
    /// The image's digest.
    pub image: String,
    /// The digests of its layers, the lowest first; none if the source does not have it any more.
    #[serde(default)]
    pub layers: Vec<String>,
    /// Bytes of them all.
    #[serde(default)]
    pub image_bytes: u64,
    /// The AppArmor profile that confines it; empty where its node has no AppArmor.
    #[serde(default)]
    pub apparmor: String,
    /// Its networks, that of its `NetworkMode` first.
    pub networks: Vec<Network>,
    /// Its volumes that have names of their own.
    #[serde(default)]
    pub volumes: Vec<Volume>,
}

/// A volume that a container was given by its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Volume {
    pub name: String,
    /// Where it is mounted in the container.
    pub inside: PathBuf,
    /// The body of `POST /volumes/create`: name, driver, its options, labels.
    pub body: Value,
}

impl Volume {
    /// In what a volume of this name that is there already is another one.
    pub fn difference(&self, there: &Value) -> Option<&'static str> {
        let options = |value: &Value| value.as_object().filter(|all| !all.is_empty()).cloned();
        match () {
            () if there["Driver"] != self.body["Driver"] => Some("driver"),
            () if options(&there["Options"]) != options(&self.body["DriverOpts"]) => Some("options"),
            () => None,
        }
    }
}

/// A network that a container is attached to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Network {
    pub name: String,
    pub driver: String,
    pub subnets: Vec<String>,
    /// The body of `POST /networks/create` that makes it on another node; null where that is not possible, and from an
    /// older peer or another engine.
    #[serde(default)]
    pub creation: Value,
    /// `EndpointSettings`: addresses and aliases.
    pub endpoint: Value,
    /// The gateways that Docker has given the container there; empty from an older peer or another engine.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
}

fn texts<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    list(value).iter().filter_map(|item| item[key].as_str()).collect()
}

/// The subnets of a network, as `GET /networks/ID` tells them.
pub(super) fn subnets(network: &Value) -> Vec<String> {
    texts(&network["IPAM"]["Config"], "Subnet").into_iter().map(str::to_owned).collect()
}

impl Parameters {
    /// Those of a container that Docker has described (`GET /containers/ID/json`). `describe` gives the description of
    /// a network, a volume or an image at its path of Docker's API.
    pub fn read<E>(container: &Value, mut describe: impl FnMut(&str) -> Result<Value, E>) -> Result<Self, E> {
        let mut body = container["Config"].clone();
        *section(&mut body, "HostConfig") = container["HostConfig"].clone();
        let first = container["HostConfig"]["NetworkMode"].as_str().unwrap_or_default();
        let short_id = container["Id"].as_str().and_then(|id| id.get(..12)).unwrap_or_default();
        let mut networks = Vec::new();
        let attached = container["NetworkSettings"]["Networks"].as_object();
        for (name, endpoint) in attached.into_iter().flatten() {
            let network = describe(&format!("/networks/{}", said(&endpoint["NetworkID"]).unwrap_or(name)))?;
            if let Some(mac) = said(&endpoint["MacAddress"]).filter(|_| name == first) {
                body["MacAddress"] = mac.into();
            }
            networks.push(Network {
                name: name.clone(),
                driver: network["Driver"].as_str().unwrap_or_default().to_owned(),
                subnets: subnets(&network),
                creation: networks::creation(&network, endpoint),
                endpoint: settings(endpoint, short_id),
                gateways: gateways(endpoint),
            });
        }
        networks.sort_by_key(|network| network.name != first);
        let image = container["Image"].as_str().unwrap_or_default().to_owned();
        let mut volumes = Vec::new();
        for (name, inside) in named_volumes(container) {
            let volume = describe(&format!("/volumes/{name}"))?;
            let body = json!({
                "Name": name, "Driver": volume["Driver"], "DriverOpts": volume["Options"], "Labels": volume["Labels"],
            });
            volumes.push(Volume { name: name.to_owned(), inside: inside.into(), body });
        }
        let image_here = describe(&format!("/images/{image}/json"))?;
        let (layers, image_bytes) = (described::layers(&image_here), image_here["Size"].as_u64().unwrap_or_default());
        let apparmor = container["AppArmorProfile"].as_str().unwrap_or_default().to_owned();
        Ok(Self { body, image, layers, image_bytes, apparmor, networks, volumes })
    }

    /// The body with which the container is made: `image` is what the image is called there, `runtime` which runtime
    /// starts it.
    pub fn create_body(&self, image: &str, runtime: &str) -> Value {
        let mut body = self.body.clone();
        // Another node has sent it.
        section(&mut body, "HostConfig")["Runtime"] = runtime.into();
        body["Image"] = image.into();
        // Docker takes no name for one that has its node's.
        if body["HostConfig"]["UTSMode"] == "host" {
            (body["Hostname"], body["Domainname"]) = (Value::Null, Value::Null);
        }
        if let Some(first) = self.networks.first() {
            body["NetworkingConfig"] = json!({"EndpointsConfig": {&first.name: first.endpoint}});
        }
        body
    }

    /// Whether a node lacks its AppArmor profile. `loaded` are the kernel's profiles there, each on a line with its mode in brackets
    /// (`apparmor/profiles` in securityfs); `None` where it has no AppArmor.
    pub fn lacks_profile(&self, loaded: Option<&str>) -> bool {
        let is_loaded = |loaded: &str| {
            loaded.lines().filter_map(|line| line.rsplit_once(" (")).any(|(name, _)| name == self.apparmor)
        };
        !matches!(self.apparmor.as_str(), "" | "unconfined") && !loaded.is_some_and(is_loaded)
    }

    /// What there is to say of its published ports.
    pub fn remarks(&self, name: &str) -> Vec<String> {
        described::published(name, &self.body["HostConfig"]).into_iter().collect()
    }

    /// Its networks. Docker's resolver serves all of them but the default bridge.
    pub fn attached(&self, name: &str) -> Vec<AttachedNetwork> {
        let attached = |network: &Network| {
            let addresses = ["IPv4Address", "IPv6Address"].map(|key| said(&network.endpoint["IPAMConfig"][key]));
            let aliases = list(&network.endpoint["Aliases"]).iter().filter_map(Value::as_str);
            let resolved = network.name != "bridge";
            let names = std::iter::once(name).chain(aliases).filter(|_| resolved);
            AttachedNetwork::new(&network.name, addresses.into_iter().flatten(), network.gateways.clone(), names)
        };
        self.networks.iter().map(attached).collect()
    }

    /// What no other node could give to the container.
    pub fn obstacles(&self, name: &str) -> Vec<Blocker> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: &str| found.push(Blocker::new(kind, cause, remedy));
        let host = &self.body["HostConfig"];
        for (key, what) in [("NetworkMode", "network"), ("IpcMode", "IPC namespace"), ("PidMode", "pid namespace")] {
            let mode = host[key].as_str().unwrap_or_default();
            if mode == "host" || mode.starts_with("container:") {
                add(
                    BlockerKind::Engine,
                    format!("container {name} uses the {what} of {mode}, which cannot move with it"),
                    "start it with one of its own",
                );
            }
        }
        if self.networks.iter().any(|network| network.name == "bridge") {
            add(
                BlockerKind::Network,
                format!("container {name} is on Docker's default bridge, where no container can keep its address"),
                "put it on a network of your own (`docker network create`)",
            );
        }
        for volume in list(&host["VolumesFrom"]) {
            add(
                BlockerKind::Mount,
                format!("container {name} takes its volumes from container {}", volume.as_str().unwrap_or_default()),
                "name the volumes themselves when it is started",
            );
        }
        found
    }
}

/// The volumes that the user has named, and where they are mounted. Docker gives the others random names.
fn named_volumes(container: &Value) -> impl Iterator<Item = (&str, &str)> {
    let host = &container["HostConfig"];
    let named = move |name: &str| {
        let by_bind = |bind: &Value| bind.as_str().is_some_and(|bind| bind.split(':').next() == Some(name));
        list(&host["Binds"]).iter().any(by_bind) || list(&host["Mounts"]).iter().any(|mount| mount["Source"] == name)
    };
    let volumes = list(&container["Mounts"]).iter().filter(|mount| mount["Type"] == "volume");
    let names = volumes.filter_map(|mount| Some((mount["Name"].as_str()?, mount["Destination"].as_str()?)));
    names.filter(move |(name, _)| named(name))
}

/// The settings under which an endpoint has the addresses that it has now.
fn settings(endpoint: &Value, short_id: &str) -> Value {
    let mut fixed = json!({});
    for (from, to) in [("IPAddress", "IPv4Address"), ("GlobalIPv6Address", "IPv6Address")] {
        // Of a container that Docker has never started it knows only what it was made with.
        if let Some(address) = said(&endpoint[from]).or_else(|| said(&endpoint["IPAMConfig"][to])) {
            fixed[to] = address.into();
        }
    }
    // Docker adds the id's beginning by itself.
    let aliases: Vec<&Value> = list(&endpoint["Aliases"]).iter().filter(|alias| *alias != short_id).collect();
    json!({
        "IPAMConfig": fixed,
        "MacAddress": endpoint["MacAddress"],
        "Aliases": aliases,
        "Links": endpoint["Links"],
        "DriverOpts": endpoint["DriverOpts"],
    })
}

/// For the fuzz targets: a description by Docker, and parameters that a peer has sent.
pub(crate) fn fuzz(value: &Value) {
    let _ = Parameters::read(value, |_| Ok::<_, ()>(value.clone()));
    if let Ok(parameters) = described::parameters::<Parameters>("c", value) {
        let body = parameters.create_body("image", "tranship");
        assert_eq!(body["HostConfig"]["Runtime"], "tranship");
        let _ = (parameters.remarks("c"), parameters.obstacles("c"), parameters.lacks_profile(Some("a (enforce)")));
        for volume in &parameters.volumes {
            let _ = volume.difference(value);
        }
        assert_eq!(
            serde_json::from_value::<Parameters>(serde_json::to_value(&parameters).unwrap()).unwrap(),
            parameters
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described() -> Value {
        json!({
            "Id": "386536acb019057b", "Image": "sha256:1c",
            "Config": {"Hostname": "386536acb019", "Image": "lab:1", "Cmd": ["redis-server"]},
            "HostConfig": {
                "NetworkMode": "lab", "Runtime": "runc", "IpcMode": "private", "Binds": ["db:/data", "/srv:/srv"],
            },
            "Mounts": [
                {"Type": "volume", "Name": "db", "Destination": "/data", "Source": "/v/db/_data"},
                {"Type": "volume", "Name": "0f3a", "Destination": "/cache", "Source": "/v/0f3a/_data"},
                {"Type": "bind", "Source": "/srv", "Destination": "/srv"},
            ],
            "NetworkSettings": {"Networks": {
                "extra": {"NetworkID": "n2", "IPAddress": "10.9.0.2", "MacAddress": "02:42:0a:09:00:02", "Aliases": ["db"]},
                "lab": {"NetworkID": "n1", "IPAddress": "10.77.0.10", "MacAddress": "02:42:0a:4d:00:0a",
                    "Aliases": ["386536acb019"], "GlobalIPv6Address": ""},
            }},
        })
    }

    fn parameters(container: &Value) -> Parameters {
        let describe = |path: &str| -> Result<Value, ()> {
            Ok(match path.strip_prefix("/networks/") {
                Some(id) => json!({"Driver": "macvlan", "IPAM": {"Config": [{"Subnet": format!("10.{id}/24")}]}}),
                None if path.starts_with("/images/") => json!({"Size": 7, "RootFS": {"Layers": ["sha256:a"]}}),
                None => json!({"Driver": "local", "Options": null, "Labels": {"tier": "back"}}),
            })
        };
        Parameters::read(container, describe).unwrap()
    }

    #[test]
    fn a_container_is_made_again_with_its_addresses() {
        let parameters = parameters(&described());
        assert_eq!(parameters.image, "sha256:1c");
        assert_eq!((parameters.layers.as_slice(), parameters.image_bytes), (&["sha256:a".to_owned()][..], 7));
        assert_eq!(parameters.networks[0].name, "lab", "that of its mode comes first");
        assert_eq!(parameters.networks[0].subnets, ["10.n1/24"]);
        let body = parameters.create_body("lab:1", "tranship");
        assert_eq!(body["Hostname"], "386536acb019");
        assert_eq!(body["MacAddress"], "02:42:0a:4d:00:0a");
        assert_eq!(body["HostConfig"]["Runtime"], "tranship");
        let endpoint = &body["NetworkingConfig"]["EndpointsConfig"]["lab"];
        assert_eq!(endpoint["IPAMConfig"], json!({"IPv4Address": "10.77.0.10"}));
        assert_eq!(endpoint["Aliases"], json!([]), "the old id's beginning is no alias of the new one");
        assert_eq!(parameters.networks[1].endpoint["Aliases"], json!(["db"]));
        assert!(parameters.obstacles("web").is_empty());
    }

    #[test]
    fn others_find_it_by_its_name_and_aliases() {
        let attached = parameters(&described()).attached("web");
        assert_eq!(
            (&*attached[0].name, attached[0].addresses.as_slice()),
            ("lab", &["10.77.0.10".parse().unwrap()][..])
        );
        assert_eq!(attached[0].names, ["web"]);
        assert_eq!(attached[1].names, ["web", "db"]);
    }

    #[test]
    fn a_container_that_docker_has_never_started_keeps_the_addresses_that_it_was_made_with() {
        let mut container = described();
        container["Config"]["MacAddress"] = json!("02:42:0a:4d:00:0b");
        let made_with = json!({"IPv4Address": "10.77.0.11"});
        container["NetworkSettings"]["Networks"]["lab"] =
            json!({"NetworkID": "", "IPAddress": "", "MacAddress": "", "IPAMConfig": made_with});
        let parameters = parameters(&container);
        assert_eq!(
            (parameters.networks[0].driver.as_str(), &*parameters.networks[0].subnets),
            ("macvlan", &["10.lab/24".into()][..])
        );
        let body = parameters.create_body("lab:1", "tranship");
        assert_eq!(body["MacAddress"], "02:42:0a:4d:00:0b");
        assert_eq!(body["NetworkingConfig"]["EndpointsConfig"]["lab"]["IPAMConfig"], made_with);
    }

    #[test]
    fn a_profile_of_apparmor_goes_along_and_is_missed_where_it_is_not_loaded() {
        let mut container = described();
        assert!(!parameters(&container).lacks_profile(None), "what is not confined needs no profile");
        container["HostConfig"]["SecurityOpt"] = json!(["apparmor=strict"]);
        container["AppArmorProfile"] = "strict".into();
        let parameters = parameters(&container);
        assert_eq!(
            parameters.create_body("lab:1", "tranship")["HostConfig"]["SecurityOpt"],
            json!(["apparmor=strict"])
        );
        assert!(parameters.lacks_profile(None) && parameters.lacks_profile(Some("strict-er (enforce)\n")));
        assert!(!parameters.lacks_profile(Some("docker-default (enforce)\nstrict (complain)\n")));
    }

    #[test]
    fn volumes_are_made_again_by_the_names_that_the_user_gave_them() {
        let volumes = parameters(&described()).volumes;
        assert_eq!(volumes.len(), 1, "{volumes:?}");
        assert_eq!((volumes[0].name.as_str(), &volumes[0].body["Labels"]["tier"]), ("db", &json!("back")));
        assert_eq!(volumes[0].difference(&json!({"Driver": "local", "Options": {}})), None);
        assert_eq!(volumes[0].difference(&json!({"Driver": "nfs"})), Some("driver"));
        assert_eq!(volumes[0].difference(&json!({"Driver": "local", "Options": {"o": "bind"}})), Some("options"));
    }

    #[test]
    fn what_belongs_to_one_node_alone_is_an_obstacle() {
        let mut container = described();
        container["HostConfig"]["PidMode"] = "host".into();
        container["HostConfig"]["VolumesFrom"] = json!(["data"]);
        let networks = container["NetworkSettings"]["Networks"].as_object_mut().unwrap();
        let moved = networks.remove("extra").unwrap();
        networks.insert("bridge".into(), moved);
        let obstacles = parameters(&container).obstacles("web");
        let texts: Vec<String> = obstacles.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        assert!(texts[0].contains("pid namespace of host") && texts[1].contains("default bridge"), "{texts:?}");
    }
}
