//! Docker's networks: made where a container moves to and they are not there, compared and refused where they do not fit.

use std::net::IpAddr;
use std::path::Path;

use serde_json::{Value, json};
use tranship_types::{Blocker, BlockerKind};

use super::parameters::{Network, Parameters, list, said, subnets};
use super::{Docker, refused, unnoted};
use crate::described::is_plain;
use crate::pool::{Subnet, host_name};
use crate::{Engine, EngineError};

/// In a bundle: which networks were made for the container.
const NETWORKS: &str = "networks";
/// The drivers whose networks are a node's own.
const DRIVERS: [&str; 3] = ["bridge", "macvlan", "ipvlan"];

/// The body of `POST /networks/create` that makes a network again on another node, from its description (`GET
/// /networks/ID`) and a running container's endpoint on it. Null where another node cannot make it from that: Swarm's
/// networks, other IPAM drivers, networks that take their configuration from another one, Docker's default networks.
pub(super) fn creation(network: &Value, endpoint: &Value) -> Value {
    let driver = network["Driver"].as_str().unwrap_or_default();
    let is_default = matches!(network["Name"].as_str(), None | Some("bridge" | "host" | "none"));
    let from_another = network["ConfigOnly"] == true || said(&network["ConfigFrom"]["Network"]).is_some();
    let ipam = &network["IPAM"];
    let usual = network["Scope"] == "local" && ipam["Driver"] == "default" && DRIVERS.contains(&driver);
    if is_default || from_another || !usual {
        return Value::Null;
    }
    let pools = list(&ipam["Config"]).iter().filter_map(|pool| {
        let text = pool["Subnet"].as_str()?;
        let subnet = Subnet::parse(text)?;
        let mut pool = pool.clone();
        // Docker takes the lowest address of a range for a gateway that nobody has named.
        let named = [&pool["Gateway"], &endpoint["Gateway"], &endpoint["IPv6Gateway"]];
        let named = named.into_iter().filter_map(address).find(|gateway| subnet.contains(*gateway));
        let range = pool["IPRange"].as_str().and_then(Subnet::parse).unwrap_or(subnet);
        pool["Gateway"] = named.unwrap_or_else(|| range.first_host()).to_string().into();
        Some(pool)
    });
    let mut body = json!({
        "Name": network["Name"], "CheckDuplicate": true, "Driver": driver, "Options": network["Options"],
        "Labels": network["Labels"], "Internal": network["Internal"], "Attachable": network["Attachable"],
        "EnableIPv6": network["EnableIPv6"],
        "IPAM": {"Driver": "default", "Options": ipam["Options"], "Config": pools.collect::<Vec<_>>()},
    });
    if network["EnableIPv4"].is_boolean() {
        body["EnableIPv4"] = network["EnableIPv4"].clone();
    }
    body
}

/// An address that Docker writes alone or with its prefix length.
fn address(value: &Value) -> Option<IpAddr> {
    said(value)?.split('/').next()?.parse().ok()
}

/// The addresses that a container has on a network, by the settings that are asked for it.
fn wanted(network: &Network) -> Vec<IpAddr> {
    let fixed = &network.endpoint["IPAMConfig"];
    [&fixed["IPv4Address"], &fixed["IPv6Address"]].into_iter().filter_map(address).collect()
}

/// A body that makes a network, with an address range of this node's own in each subnet, apart from these addresses.
fn with_own_ranges(mut body: Value, wanted: &[IpAddr], node: &str) -> Value {
    for pool in body.pointer_mut("/IPAM/Config").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(subnet) = pool["Subnet"].as_str().and_then(Subnet::parse) else { continue };
        let reserved = pool["AuxiliaryAddresses"].as_object().into_iter().flatten().filter_map(|(_, one)| address(one));
        let mut fixed: Vec<IpAddr> = reserved.chain(address(&pool["Gateway"])).collect();
        fixed.extend(wanted);
        let theirs: Vec<Subnet> = pool["IPRange"].as_str().and_then(Subnet::parse).into_iter().collect();
        match subnet.range_of(node, &fixed, &theirs) {
            Some(range) => pool["IPRange"] = range.to_string().into(),
            None => drop(pool.as_object_mut().and_then(|pool| pool.remove("IPRange"))),
        }
    }
    body
}

/// Whether a Docker of this version takes chosen addresses on networks whose subnets nobody has chosen.
fn takes_any_address(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    (parts.next(), parts.next()) >= (Some(29), Some(1))
}

/// Whether Docker may have chosen the subnets of a network itself: it does not tell. It then names the gateway, and there is no range
/// and no reserved address.
fn may_be_chosen_by_docker(network: &Value) -> bool {
    let alone = |pool: &Value| {
        said(&pool["IPRange"]).is_none() && pool["AuxiliaryAddresses"].as_object().is_none_or(serde_json::Map::is_empty)
    };
    list(&network["IPAM"]["Config"]).iter().all(|pool| said(&pool["Gateway"]).is_some() && alone(pool))
}

/// Who has an address on a network that Docker describes: a running container, or the network itself.
fn owner(network: &Value, wanted: IpAddr, except: &str) -> Option<String> {
    let containers = network["Containers"].as_object().into_iter().flatten();
    let mut others = containers.map(|(_, one)| one).filter(|one| one["Name"] != except);
    let has = |one: &Value| ["IPv4Address", "IPv6Address"].iter().any(|key| address(&one[*key]) == Some(wanted));
    if let Some(other) = others.find(|one| has(one)) {
        return Some(format!("container {}", other["Name"].as_str().unwrap_or_default()));
    }
    list(&network["IPAM"]["Config"]).iter().find_map(|pool| {
        let reserved = pool["AuxiliaryAddresses"].as_object().into_iter().flatten();
        match address(&pool["Gateway"]) == Some(wanted) {
            true => Some("the gateway".to_owned()),
            false => reserved
                .into_iter()
                .find_map(|(name, one)| (address(one)? == wanted).then(|| format!("{name} (reserved)"))),
        }
    })
}

impl Docker {
    /// What of the container's networks keeps it from coming here.
    pub(super) fn network_obstacles(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        for network in &parameters.networks {
            match self.network(&network.name)? {
                Some(here) if here["Driver"] == network.driver.as_str() && subnets(&here) == network.subnets => {
                    found.extend(self.taken_addresses(name, network, &here));
                }
                Some(here) => found.push(another(network, &here)),
                None if network.creation.is_null() => found.push(not_made(network)),
                None => found.extend(self.unmakeable(network)?),
            }
        }
        Ok(found)
    }

    /// Makes the container's networks that are not there, and notes which these are.
    pub(super) fn make_networks(&self, name: &str, bundle: &Path, parameters: &Parameters) -> Result<(), EngineError> {
        let mut made = String::new();
        for network in &parameters.networks {
            if let Some(here) = self.network(&network.name)? {
                self.choose_subnet(&here, &wanted(network))?;
                continue;
            }
            if network.creation.is_null() {
                continue;
            }
            let before = made.clone();
            made.push_str(&network.name);
            made.push('\n');
            std::fs::write(bundle.join(NETWORKS), &made).map_err(|e| unnoted(name, &e))?;
            let body = with_own_ranges(network.creation.clone(), &wanted(network), &host_name());
            let answer = self.call("POST", "/networks/create", Some(&body))?;
            match answer.status {
                201 => {}
                // The move of another container has made it meanwhile.
                409 if self.network(&network.name)?.is_some() => {
                    made = before;
                    std::fs::write(bundle.join(NETWORKS), &made).map_err(|e| unnoted(name, &e))?;
                }
                _ => return Err(refused("make network", &network.name, &answer)),
            }
        }
        Ok(())
    }

    /// Makes a network again with the subnets that it has, now chosen ones, where this Docker takes a chosen address only on such a network
    /// and no container refers to it.
    fn choose_subnet(&self, here: &Value, wanted: &[IpAddr]) -> Result<(), EngineError> {
        let (name, body) = (here["Name"].as_str().unwrap_or_default(), creation(here, &Value::Null));
        if body.is_null()
            || wanted.is_empty()
            || !may_be_chosen_by_docker(here)
            || takes_any_address(&self.version()?)
            || !self.filtered("network", name)?.is_empty()
        {
            return Ok(());
        }
        self.order("make network anew", name, "DELETE", &format!("/networks/{name}"))?;
        let body = with_own_ranges(body, wanted, &host_name());
        let answer = self.call("POST", "/networks/create", Some(&body))?;
        if answer.status == 201 { Ok(()) } else { Err(refused("make network anew", name, &answer)) }
    }

    /// Removes the networks that were made for a container which does not come, if no other has been put on them.
    pub(super) fn remove_networks(&self, bundle: &Path) -> Result<(), EngineError> {
        let made = std::fs::read_to_string(bundle.join(NETWORKS)).unwrap_or_default();
        made.lines().filter(|network| is_plain(network)).try_for_each(|network| {
            match self.filtered("network", network)?.is_empty() {
                true => self.order("remove network", network, "DELETE", &format!("/networks/{network}")),
                false => Ok(()),
            }
        })
    }

    /// A network by its name; `None` if there is none.
    fn network(&self, name: &str) -> Result<Option<Value>, EngineError> {
        if !is_plain(name) || name.contains('/') {
            return Ok(None);
        }
        // Docker also takes the beginning of an id for a name.
        Ok(self.get(&format!("/networks/{name}"))?.filter(|network| network["Name"] == name))
    }

    fn taken_addresses(&self, name: &str, network: &Network, here: &Value) -> Vec<Blocker> {
        let taken = |ip: IpAddr| {
            let owner = owner(here, ip, name)?;
            let cause = format!(
                "address {ip} of container {name} is that of {owner} in Docker's network {} there",
                network.name
            );
            let remedy = "stop that container, or give one of them another address (`docker network disconnect`, `connect --ip`)";
            Some(Blocker::new(BlockerKind::Network, cause, remedy))
        };
        wanted(network).into_iter().filter_map(taken).collect()
    }

    /// What keeps this Docker from making a network that it does not have.
    fn unmakeable(&self, network: &Network) -> Result<Vec<Blocker>, EngineError> {
        let (mut found, name) = (Vec::new(), &network.name);
        let mut add = |cause: String, remedy: String| found.push(Blocker::new(BlockerKind::Network, cause, remedy));
        let all = self.get("/networks")?.unwrap_or_default();
        let ours: Vec<Subnet> = network.subnets.iter().filter_map(|subnet| Subnet::parse(subnet)).collect();
        for other in list(&all) {
            let theirs = other["Name"].as_str().unwrap_or_default();
            let pools = subnets(other);
            let overlaps =
                |pool: &&String| Subnet::parse(pool).is_some_and(|pool| ours.iter().any(|our| our.overlaps(&pool)));
            if let Some(pool) = pools.iter().find(overlaps) {
                let cause = format!(
                    "network {name} ({}) cannot be made there: Docker's network {theirs} has {pool} there, which overlaps",
                    network.subnets.join(", ")
                );
                add(
                    cause,
                    format!(
                        "remove that network there (`docker network rm {theirs}`), or choose another subnet for one of them"
                    ),
                );
            }
        }
        let options = &network.creation["Options"];
        if let Some(parent) = said(&options["parent"]).filter(|_| network.driver != "bridge") {
            // Docker makes the interface of a VLAN by itself.
            let existing = parent.split('.').next().unwrap_or(parent);
            if nix::net::if_::if_nametoindex(existing).is_err() {
                add(
                    format!("network {name} cannot be made there: there is no interface {existing}, its parent"),
                    format!(
                        "make the network there with another parent (`docker network create --driver {} --subnet {} -o parent=… {name}`)",
                        network.driver,
                        network.subnets.join(" --subnet ")
                    ),
                );
            }
        }
        Ok(found)
    }
}

fn another(network: &Network, here: &Value) -> Blocker {
    let (name, driver, ours) = (&network.name, &network.driver, network.subnets.join(", "));
    let (theirs, their_driver) = (subnets(here).join(", "), here["Driver"].as_str().unwrap_or_default());
    let cause = format!(
        "Docker there has no network {name} by {driver} with subnet {ours}, but one of that name by {their_driver} with {theirs}"
    );
    Blocker::new(
        BlockerKind::Network,
        cause,
        format!("remove it there (`docker network rm {name}`), if nobody needs it"),
    )
}

fn not_made(network: &Network) -> Blocker {
    let (name, driver, subnets) = (&network.name, &network.driver, network.subnets.join(", "));
    let cause = format!("Docker there has no network {name} by {driver} with subnet {subnets}");
    let options = network.subnets.join(" --subnet ");
    Blocker::new(
        BlockerKind::Network,
        cause,
        format!("make it there (`docker network create --driver {driver} --subnet {options} {name}`)"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described() -> Value {
        json!({
            "Name": "shop_default", "Id": "4f", "Scope": "local", "Driver": "bridge", "EnableIPv6": false,
            "IPAM": {"Driver": "default", "Options": null, "Config": [{"Subnet": "172.18.0.0/16"}]},
            "Internal": false, "Attachable": true, "ConfigFrom": {"Network": ""}, "ConfigOnly": false,
            "Containers": {
                "1c": {"Name": "web", "IPv4Address": "172.18.0.2/16", "IPv6Address": ""},
                "2d": {"Name": "db", "IPv4Address": "172.18.0.3/16", "IPv6Address": ""},
            },
            "Options": {"com.docker.network.bridge.name": "shop0"}, "Labels": {"com.docker.compose.network": "default"},
        })
    }

    fn network(described: &Value) -> Network {
        let endpoint = json!({"Gateway": "172.18.0.9"});
        Network {
            name: "shop_default".to_owned(),
            driver: "bridge".to_owned(),
            subnets: subnets(described),
            creation: creation(described, &endpoint),
            endpoint: json!({"IPAMConfig": {"IPv4Address": "172.18.0.2"}}),
        }
    }

    #[test]
    fn a_network_is_made_again_with_a_subnet_that_was_not_chosen() {
        let body = with_own_ranges(network(&described()).creation, &[], "b");
        for key in ["Name", "Driver", "Options", "Labels", "Internal", "Attachable", "EnableIPv6"] {
            assert_eq!(body[key], described()[key], "{key}");
        }
        let pool = &body["IPAM"]["Config"][0];
        assert_eq!((&pool["Subnet"], &pool["Gateway"]), (&json!("172.18.0.0/16"), &json!("172.18.0.9")));
        let range = Subnet::parse(pool["IPRange"].as_str().unwrap()).unwrap();
        assert!(Subnet::parse("172.18.128.0/17").unwrap().overlaps(&range), "{range}");
    }

    #[test]
    fn the_next_node_gets_another_range_and_the_same_gateway() {
        let second = with_own_ranges(network(&described()).creation, &[], "b");
        let third = with_own_ranges(second.clone(), &[], "b");
        let [second, third] = [second, third].map(|body| body["IPAM"]["Config"][0].clone());
        assert_eq!(second["Gateway"], third["Gateway"]);
        assert_ne!(second["IPRange"], third["IPRange"]);
        let sent = with_own_ranges("no network".into(), &wanted(&network(&described())), "b");
        assert_eq!(sent, "no network");
    }

    #[test]
    fn docker_may_have_chosen_a_subnet_whose_gateway_alone_it_tells() {
        let mut network = described();
        assert!(!may_be_chosen_by_docker(&network));
        network["IPAM"]["Config"][0]["Gateway"] = "172.18.0.1".into();
        assert!(may_be_chosen_by_docker(&network));
        network["IPAM"]["Config"][0]["IPRange"] = "172.18.64.0/20".into();
        assert!(!may_be_chosen_by_docker(&network));
        assert!(takes_any_address("29.1.0") && takes_any_address("30.0.1"));
        assert!(!takes_any_address("20.10.24+dfsg1") && !takes_any_address("29.0.4") && !takes_any_address(""));
    }

    #[test]
    fn a_gateway_that_nobody_knows_is_the_lowest_address() {
        let mut range = described();
        assert_eq!(creation(&range, &Value::Null)["IPAM"]["Config"][0]["Gateway"], "172.18.0.1");
        range["IPAM"]["Config"][0]["IPRange"] = "172.18.64.0/20".into();
        assert_eq!(creation(&range, &Value::Null)["IPAM"]["Config"][0]["Gateway"], "172.18.64.1");
    }

    #[test]
    fn networks_of_more_than_a_node_are_not_made() {
        for (key, value) in [
            ("Scope", json!("swarm")),
            ("Driver", json!("overlay")),
            ("ConfigFrom", json!({"Network": "base"})),
            ("ConfigOnly", json!(true)),
            ("Name", json!("bridge")),
            ("IPAM", json!({"Driver": "null", "Config": []})),
        ] {
            let mut other = described();
            other[key] = value;
            assert!(creation(&other, &Value::Null).is_null(), "{key}");
        }
    }

    #[test]
    fn the_owner_of_an_address_is_named() {
        let mut network = described();
        network["IPAM"]["Config"][0]["Gateway"] = "172.18.0.1".into();
        network["IPAM"]["Config"][0]["AuxiliaryAddresses"] = json!({"router": "172.18.0.7"});
        let owner = |ip: &str, except: &str| owner(&network, ip.parse().unwrap(), except);
        assert_eq!(owner("172.18.0.3", "web").as_deref(), Some("container db"));
        assert_eq!(owner("172.18.0.2", "web"), None);
        assert_eq!(owner("172.18.0.1", "web").as_deref(), Some("the gateway"));
        assert_eq!(owner("172.18.0.7", "web").as_deref(), Some("router (reserved)"));
        assert_eq!(owner("172.18.0.30", "web"), None);
    }
}
