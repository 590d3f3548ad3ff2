//! Podman's networks: made where a container moves to and they are not there, compared and refused where they do not
//! fit.

use std::net::IpAddr;
use std::path::Path;

use nix::net::if_::if_nametoindex;
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind};

use super::Podman;
use super::holders::holds_for;
use super::parameters::{Network, Parameters, is_word};
use crate::EngineError;
use crate::json::{list, said};
use crate::pool::{DRIVERS, Subnet, host_name, subnets_of_node};

/// In a bundle: which networks were made for the container.
pub(crate) const NETWORKS: &str = "podman-networks";

pub(super) fn address(value: &Value) -> Option<IpAddr> {
    said(value)?.parse().ok()
}

/// The arguments of `podman` that make a network again on node `node`, with an address range of the node's own in each
/// subnet apart from the addresses `wanted`. `described` is what the source's `podman network inspect` tells. `None`
/// where another node cannot make it from that: other drivers or IPAM drivers, static routes.
fn creation(described: &Value, wanted: &[IpAddr], node: &str) -> Option<Vec<String>> {
    let (name, driver) = (said(&described["name"])?, said(&described["driver"])?);
    let host_local = said(&described["ipam_options"]["driver"]).is_none_or(|driver| driver == "host-local");
    let subnets = list(&described["subnets"]);
    let usual = host_local && DRIVERS.contains(&driver) && list(&described["routes"]).is_empty();
    if !is_word(name) || name == "podman" || subnets.is_empty() || !usual {
        return None;
    }
    let mut all = ["network", "create", "--driver", driver].map(str::to_owned).to_vec();
    let mut add = |option: &str, value: &str| all.push(format!("--{option}={value}"));
    // Podman pairs the options of several subnets by their order.
    let all_have_gateways = subnets.iter().all(|one| address(&one["gateway"]).is_some());
    let mut ranges = Vec::new();
    for one in subnets {
        let subnet = Subnet::parse(said(&one["subnet"])?)?;
        add("subnet", &subnet.to_string());
        let gateway = address(&one["gateway"]);
        if let Some(gateway) = gateway.filter(|_| all_have_gateways) {
            add("gateway", &gateway.to_string());
        }
        let fixed: Vec<IpAddr> = wanted.iter().copied().chain(gateway).collect();
        let theirs = address(&one["lease_range"]["start_ip"]).map(Subnet::of_one);
        ranges.push(subnet.range_of(node, &fixed, theirs.as_slice()));
    }
    if ranges.iter().all(Option::is_some) {
        ranges.iter().flatten().for_each(|range| add("ip-range", &range.to_string()));
    }
    for (option, all) in [("label", &described["labels"]), ("opt", &described["options"])] {
        for (key, value) in all.as_object().into_iter().flatten() {
            add(option, &format!("{key}={}", value.as_str()?));
        }
    }
    for server in list(&described["network_dns_servers"]) {
        add("dns", &address(server)?.to_string());
    }
    if let Some(parent) = parent(described) {
        add("opt", &format!("parent={parent}"));
    }
    if described["internal"] == true {
        all.push("--internal".to_owned());
    }
    if driver == "bridge" && described["dns_enabled"] == false {
        all.push("--disable-dns".to_owned());
    }
    all.push(name.to_owned());
    Some(all)
}

/// Of what `podman network inspect` tells, what [`creation`] and the comparison of networks use: the rest is of the node.
pub(super) fn portable(described: &Value) -> Value {
    const KEYS: [&str; 11] = [
        "name",
        "driver",
        "network_interface",
        "internal",
        "dns_enabled",
        "network_dns_servers",
        "subnets",
        "routes",
        "labels",
        "options",
        "ipam_options",
    ];
    let of = |key: &str| Some((key.to_owned(), described.get(key)?.clone()));
    Value::Object(KEYS.into_iter().filter_map(of).collect())
}

/// Whether it takes its parent interface from the node.
fn takes_parent(described: &Value) -> bool {
    described["options"]["mode"] == "passthru"
}

/// The node's interface on which the interfaces of a network's containers are.
fn parent(described: &Value) -> Option<&str> {
    said(&described["network_interface"]).filter(|_| described["driver"] != "bridge")
}

/// Whether what another node has offered is the network that it names, and leaves the node its interface.
fn is_as_named(network: &Network) -> bool {
    let described = &network.described;
    let is_named = said(&described["name"]) == Some(network.name.as_str());
    is_named && Network::kind(described) == network.kind && !takes_parent(described)
}

fn blocker(cause: String, remedy: String) -> Blocker {
    Blocker::new(BlockerKind::Network, cause, remedy)
}

/// The addresses of a container on a network that others have there which run.
fn taken_addresses<'a>(name: &str, network: &Network, others: impl Iterator<Item = &'a Value>) -> Vec<Blocker> {
    let mut found = Vec::new();
    let running = others.filter(|other| other["State"]["Running"] == true && other["Name"] != name);
    for other in running {
        let held = holds_for(other);
        if held == Some(name) {
            continue;
        }
        let endpoint = &other["NetworkSettings"]["Networks"][&network.name];
        let theirs = [&endpoint["IPAddress"], &endpoint["GlobalIPv6Address"]].map(address);
        for ip in network.addresses().iter().filter(|ip| theirs.contains(&Some(**ip))) {
            let (owner, remedy) = match held {
                Some(other) => (
                    format!("{other}, which has left that node"),
                    format!("give one of them another address; where {other} is gone, `tranship release {other}` there"),
                ),
                None => (
                    other["Name"].as_str().unwrap_or_default().to_owned(),
                    "stop that container, or give one of them another address (`podman network disconnect`, `connect --ip`)"
                        .to_owned(),
                ),
            };
            let network = &network.name;
            let cause = format!(
                "address {ip} of container {name} is that of container {owner} in Podman's network {network} there"
            );
            found.push(blocker(cause, remedy));
        }
    }
    found
}

impl Podman {
    /// What of the container's networks, and of its pod's, keeps it from coming here.
    pub(super) fn network_obstacles(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        // Asked for once, and where a network is here.
        let mut others = None;
        for network in parameters.all_networks() {
            let here = if is_word(&network.name) { self.network(&network.name) } else { Value::Null };
            let (kind, wanted) = (&network.kind, &network.name);
            if Network::kind(&here) == *kind {
                if others.is_none() {
                    others = Some(self.all_described()?);
                }
                found.extend(taken_addresses(name, network, others.iter().flatten()));
            } else if !here.is_null() {
                let theirs = Network::kind(&here);
                found.push(blocker(
                    format!(
                        "Podman there has no network {wanted} that is {kind}, but one of that name that is {theirs}"
                    ),
                    format!("remove it there (`podman network rm {wanted}`), if nobody needs it"),
                ));
            } else if takes_parent(&network.described) {
                found.push(blocker(
                    format!(
                        "Podman there has no network {wanted} that is {kind}, and Tranship makes none in mode passthru: it \
                         takes its parent interface from the node"
                    ),
                    format!("make it there (`podman network create {}-o mode=passthru -o parent=… {wanted}`)", kind.options()),
                ));
            } else if !is_as_named(network)
                || creation(&network.described, &network.addresses(), &host_name()).is_none()
            {
                found.push(blocker(
                    format!("Podman there has no network {wanted} that is {kind}"),
                    format!("make it there like that (`podman network create {}{wanted}`)", kind.options()),
                ));
            } else {
                found.extend(self.unmakeable(network)?);
            }
        }
        Ok(found)
    }

    /// Makes the networks of a container, and of its pod, that are not there, and notes which these are.
    pub(super) fn make_networks(&self, name: &str, bundle: &Path, parameters: &Parameters) -> Result<(), EngineError> {
        let mut made = String::new();
        for network in parameters.all_networks().filter(|network| is_word(&network.name) && is_as_named(network)) {
            if !self.network(&network.name).is_null() {
                continue;
            }
            let Some(arguments) = creation(&network.described, &network.addresses(), &host_name()) else { continue };
            let before = made.clone();
            made.push_str(&network.name);
            made.push('\n');
            std::fs::write(bundle.join(NETWORKS), &made).map_err(Self::unmade(name))?;
            match self.run(&arguments, "make the network", &network.name) {
                Ok(_) => {}
                // The move of another container has made it meanwhile.
                Err(_) if !self.network(&network.name).is_null() => {
                    made = before;
                    std::fs::write(bundle.join(NETWORKS), &made).map_err(Self::unmade(name))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes the networks that were made for a container which does not come, if no other has been put on them.
    pub(super) fn remove_networks(&self, bundle: &Path) -> Result<(), EngineError> {
        let made = std::fs::read_to_string(bundle.join(NETWORKS)).unwrap_or_default();
        made.lines().filter(|network| is_word(network) && !self.network(network).is_null()).try_for_each(|network| {
            match self.run(&["network", "rm", network], "remove the network", network) {
                Err(EngineError::Refused { why, .. })
                    if why.contains("being used") || why.contains("associated containers") =>
                {
                    Ok(())
                }
                other => other.map(drop),
            }
        })
    }

    /// What keeps this Podman from making a network that it does not have.
    fn unmakeable(&self, network: &Network) -> Result<Vec<Blocker>, EngineError> {
        let (mut found, name) = (Vec::new(), &network.name);
        let subnets = |described: &Value| -> Vec<Subnet> {
            let texts = list(&described["subnets"]).iter().filter_map(|one| one["subnet"].as_str());
            texts.filter_map(Subnet::parse).collect()
        };
        let ours = subnets(&network.described);
        let overlaps = |theirs: &&Subnet| ours.iter().any(|our| our.overlaps(theirs));
        let all = self.json(&["network", "ls", "--format", "json"], "list the networks", name)?;
        let mut theirs: Vec<&str> = Vec::new();
        for other in list(&all) {
            let other_name = other["name"].as_str().unwrap_or_default();
            if let Some(pool) = subnets(other).iter().find(overlaps) {
                theirs.extend(said(&other["network_interface"]));
                found.push(blocker(
                    format!(
                        "network {name} ({}) cannot be made there: Podman's network {other_name} has {pool} there, which overlaps",
                        network.kind
                    ),
                    format!("remove that network there (`podman network rm {other_name}`), or choose another subnet for one of them"),
                ));
            }
        }
        // Podman takes no subnet of the node's own for a bridge.
        if network.described["driver"] == "bridge" {
            for (interface, pool) in
                subnets_of_node().iter().filter(|(name, pool)| !theirs.contains(&&**name) && overlaps(&pool))
            {
                found.push(blocker(
                    format!(
                        "network {name} ({}) cannot be made there: interface {interface} of the node has {pool}, which overlaps",
                        network.kind
                    ),
                    "remove that address there, or choose another subnet for the network".to_owned(),
                ));
            }
        }
        if let Some(parent) = parent(&network.described).filter(|parent| if_nametoindex(*parent).is_err()) {
            let options = network.kind.options();
            found.push(blocker(
                format!("network {name} cannot be made there: there is no interface {parent}, its parent"),
                format!(
                    "make the network there with another parent (`podman network create {options}-o parent=… {name}`)"
                ),
            ));
        }
        Ok(found)
    }
}

/// For the fuzz targets: a description that a peer has sent.
pub(super) fn fuzz(described: &Value) {
    let _ = creation(described, &[], "b");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn described() -> Value {
        json!({
            "name": "shop", "driver": "macvlan", "network_interface": "eth0", "internal": false, "dns_enabled": false,
            "subnets": [{"subnet": "10.77.0.0/24", "gateway": "10.77.0.1"}], "labels": {"tier": "back"},
            "options": {"mtu": "1400"}, "network_dns_servers": ["10.77.0.9"], "ipam_options": {"driver": "host-local"},
        })
    }

    #[test]
    fn a_network_is_made_again_with_a_range_of_the_node_s_own() {
        let all = creation(&described(), &[], "b").unwrap();
        for option in [
            "--subnet=10.77.0.0/24",
            "--gateway=10.77.0.1",
            "--label=tier=back",
            "--opt=mtu=1400",
            "--opt=parent=eth0",
            "--dns=10.77.0.9",
        ] {
            assert!(all.iter().any(|one| one == option), "no {option} in {all:?}");
        }
        assert_eq!(creation(&portable(&described()), &[], "b").unwrap(), all);
        let range = all.iter().find_map(|one| one.strip_prefix("--ip-range=")).and_then(Subnet::parse).unwrap();
        assert!(Subnet::parse("10.77.0.128/25").unwrap().overlaps(&range), "{range}");
        assert_eq!(all.last().unwrap(), "shop");
        let mut theirs = described();
        theirs["subnets"][0]["lease_range"]["start_ip"] = range.first_host().to_string().into();
        let other = creation(&theirs, &[], "b").unwrap();
        assert!(!other.contains(&format!("--ip-range={range}")), "both nodes have {range}");
    }

    #[test]
    fn the_interface_of_a_bridge_is_the_node_s_own() {
        let mut bridge = described();
        (bridge["driver"], bridge["internal"]) = ("bridge".into(), true.into());
        bridge["subnets"][0]["gateway"] = Value::Null;
        let all = creation(&bridge, &[], "b").unwrap();
        assert!(!all.iter().any(|one| one.contains("parent=") || one.contains("--gateway")), "{all:?}");
        assert!(all.contains(&"--internal".to_owned()) && all.contains(&"--disable-dns".to_owned()), "{all:?}");
    }

    #[test]
    fn what_is_no_network_of_one_node_is_not_made() {
        for (key, value) in [
            ("name", json!("--all")),
            ("driver", json!("own")),
            ("ipam_options", json!({"driver": "dhcp"})),
            ("routes", json!([{"destination": "10.0.0.0/8"}])),
            ("subnets", json!([])),
            ("options", json!({"mtu": 1400})),
            ("network_dns_servers", json!(["--driver=own"])),
        ] {
            let mut other = described();
            other[key] = value;
            assert_eq!(creation(&other, &[], "b"), None, "{key}");
        }
        assert_eq!(creation(&Value::Null, &[], "b"), None);
    }
}
