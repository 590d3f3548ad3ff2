//! Docker's networks: made where a container moves to and they are not there, compared and refused where they do not
//! fit.

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};
use tranship_types::{Blocker, BlockerKind};

use super::parameters::{Network, Parameters, subnets};
use super::{Docker, refused, unnoted};
use crate::described::is_plain;
use crate::holders::{Endpoint, Holders};
use crate::json::{list, said};
use crate::pool::{DRIVERS, Subnet, host_name, subnets_of_node};
use crate::{Engine, EngineError};

/// In a bundle: which networks were made for the container.
pub(crate) const NETWORKS: &str = "docker-networks";
/// Held while networks are made or removed: containers that arrive together have the same networks, and one that is not
/// there yet does not show that it will be on them.
pub(super) static MAKING: Mutex<()> = Mutex::new(());

/// The body of `POST /networks/create` that makes a network again on another node, from its description (`GET
/// /networks/ID`) and a running container's endpoint on it. Null where another node cannot make it from that: Swarm's
/// networks, other IPAM drivers, networks that take their configuration from another one, Docker's default networks.
pub(super) fn creation(network: &Value, endpoint: &Value) -> Value {
    let driver = network["Driver"].as_str().unwrap_or_default();
    let is_default = matches!(network["Name"].as_str(), None | Some("bridge" | "host" | "none"));
    let from_another = network["ConfigOnly"] == true || said(&network["ConfigFrom"]["Network"]).is_some();
    let ipam = &network["IPAM"];
    let has_options = ipam["Options"].as_object().is_some_and(|all| !all.is_empty());
    let usual = network["Scope"] == "local" && ipam["Driver"] == "default" && DRIVERS.contains(&driver) && !has_options;
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
        "IPAM": {"Driver": "default", "Config": pools.collect::<Vec<_>>()},
    });
    if network["EnableIPv4"].is_boolean() {
        body["EnableIPv4"] = network["EnableIPv4"].clone();
    }
    body
}

/// Whether a text is the name of a network, and nothing else in a path of Docker's.
fn is_name(text: &str) -> bool {
    is_plain(text) && !text.contains('/')
}

/// The body that makes a network which another node has offered: what it offers is not passed on unread. `None` where
/// this one would not have offered it.
fn offered(network: &Network) -> Option<Value> {
    let theirs = &network.creation;
    let texts = |value: &Value| match value {
        Value::Null => true,
        Value::Object(all) => all.values().all(Value::is_string),
        _ => false,
    };
    let pools = theirs["IPAM"]["Config"].as_array()?;
    let is_pool = |pool: &Value| {
        let range =
            |key: &str| pool[key].is_null() || said(&pool[key]).is_none_or(|text| Subnet::parse(text).is_some());
        let known = ["Subnet", "IPRange", "Gateway", "AuxiliaryAddresses"];
        let keys = pool.as_object().is_some_and(|all| all.keys().all(|key| known.contains(&key.as_str())));
        let gateway = said(&pool["Gateway"]).is_none() || address(&pool["Gateway"]).is_some();
        keys && range("IPRange") && gateway && texts(&pool["AuxiliaryAddresses"])
    };
    let are_those_named = subnets(theirs) == network.subnets && pools.len() == network.subnets.len();
    let is_driver = DRIVERS.contains(&network.driver.as_str());
    // Such a network takes the parent away from the node.
    let takes_parent = theirs["Options"]["macvlan_mode"] == "passthru";
    let is_whole = is_name(&network.name) && is_driver && are_those_named && pools.iter().all(is_pool);
    if !is_whole || takes_parent || !texts(&theirs["Options"]) || !texts(&theirs["Labels"]) {
        return None;
    }
    let mut body = json!({
        "Name": network.name, "CheckDuplicate": true, "Driver": network.driver, "Options": theirs["Options"],
        "Labels": theirs["Labels"], "IPAM": {"Driver": "default", "Config": pools},
    });
    for key in ["Internal", "Attachable", "EnableIPv4", "EnableIPv6"] {
        if theirs[key].is_boolean() {
            body[key] = theirs[key].clone();
        }
    }
    Some(body)
}

/// An address that Docker writes alone or with its prefix length.
pub(super) fn address(value: &Value) -> Option<IpAddr> {
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
        // On a network without a gateway a container has the address that would be its.
        if address(&pool["Gateway"]).is_some_and(|gateway| wanted.contains(&gateway)) {
            pool.as_object_mut().and_then(|pool| pool.remove("Gateway"));
        }
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

/// Whether Docker may have chosen the subnets of a network itself: it does not tell. It then names the gateway, and
/// there is no range and no reserved address.
fn may_be_chosen_by_docker(network: &Value) -> bool {
    let alone = |pool: &Value| {
        said(&pool["IPRange"]).is_none() && pool["AuxiliaryAddresses"].as_object().is_none_or(serde_json::Map::is_empty)
    };
    list(&network["IPAM"]["Config"]).iter().all(|pool| said(&pool["Gateway"]).is_some() && alone(pool))
}

/// The range of a network that Docker describes from which its node gives out this address by itself. `None` where no range of this node's
/// has it.
pub(super) fn range_of(network: &Value, address: IpAddr) -> Option<Subnet> {
    let is_of_node = network["Scope"] == "local" && network["IPAM"]["Driver"] == "default";
    let pools = list(&network["IPAM"]["Config"]).iter().filter(|_| is_of_node);
    let range = |pool: &Value| said(&pool["IPRange"]).or(said(&pool["Subnet"])).and_then(Subnet::parse);
    let subnet = |pool: &Value| said(&pool["Subnet"]).and_then(Subnet::parse);
    let mut its_own = pools.filter(|pool| subnet(pool).is_some_and(|subnet| subnet.contains(address)));
    its_own.find_map(range).filter(|range| range.contains(address))
}

/// Who has an address on a network that Docker describes.
#[derive(Debug, PartialEq, Eq)]
enum Owner {
    /// A running container.
    Container(String),
    /// A container that has left this node, which holds its addresses.
    Held(String),
    /// The network itself, for this.
    Network(String),
}

/// Who has an address on a network that Docker describes, other than the container `except`, for whom it may also be held.
fn owner(network: &Value, endpoints: &[Endpoint], wanted: IpAddr, except: &str) -> Option<Owner> {
    let there = endpoints.iter().filter(|one| one.runs && network["Name"] == one.network.as_str());
    let mut others = there.filter(|one| one.holds_for.as_ref().unwrap_or(&one.container) != except);
    if let Some(other) = others.find(|one| one.addresses.contains(&wanted)) {
        let held = other.holds_for.clone().map(Owner::Held);
        return Some(held.unwrap_or_else(|| Owner::Container(other.container.clone())));
    }
    list(&network["IPAM"]["Config"]).iter().find_map(|pool| {
        let reserved = pool["AuxiliaryAddresses"].as_object().into_iter().flatten();
        match address(&pool["Gateway"]) == Some(wanted) {
            true => Some(Owner::Network("the gateway".to_owned())),
            false => reserved.into_iter().find_map(|(name, one)| {
                (address(one)? == wanted).then(|| Owner::Network(format!("{name} (reserved)")))
            }),
        }
    })
}

/// The container's addresses on a network that others have here.
fn taken_addresses(name: &str, network: &Network, here: &Value, endpoints: &[Endpoint]) -> Vec<Blocker> {
    let taken = |ip: IpAddr| {
        let (owner, remedy) = match owner(here, endpoints, ip, name)? {
            Owner::Held(other) => (
                format!("container {other}, which has left that node"),
                format!("give one of them another address; where {other} is gone, `tranship release {other}` there"),
            ),
            Owner::Container(other) => (
                format!("container {other}"),
                "stop that container, or give one of them another address (`docker network disconnect`, `connect --ip`)"
                    .to_owned(),
            ),
            Owner::Network(what) => (what, "give the container another address".to_owned()),
        };
        let cause =
            format!("address {ip} of container {name} is that of {owner} in Docker's network {} there", network.name);
        Some(Blocker::new(BlockerKind::Network, cause, remedy))
    };
    wanted(network).into_iter().filter_map(taken).collect()
}

impl Docker {
    /// What of the container's networks keeps it from coming here.
    pub(super) fn network_obstacles(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        let endpoints = self.endpoints()?;
        for network in &parameters.networks {
            match self.network(&network.name)? {
                Some(here) if here["Driver"] == network.driver.as_str() && subnets(&here) == network.subnets => {
                    found.extend(taken_addresses(name, network, &here, &endpoints));
                }
                Some(here) => found.push(another(network, &here)),
                None if offered(network).is_none() => found.push(not_made(network)),
                None => found.extend(self.unmakeable(network)?),
            }
        }
        Ok(found)
    }

    /// Makes the container's networks that are not there, and notes which these are. The caller holds [`MAKING`] until
    /// the container is on them.
    pub(super) fn make_networks(&self, name: &str, bundle: &Path, parameters: &Parameters) -> Result<(), EngineError> {
        let mut made = String::new();
        for network in &parameters.networks {
            if let Some(here) = self.network(&network.name)? {
                self.choose_subnet(&here, &wanted(network))?;
                continue;
            }
            let Some(body) = offered(network) else { continue };
            let note = |made: &str| std::fs::write(bundle.join(NETWORKS), made).map_err(|e| unnoted(name, &e));
            let with_it = format!("{made}{}\n", network.name);
            note(&with_it)?;
            if self.make_network(&network.name, &with_own_ranges(body, &wanted(network), &host_name()))? {
                made = with_it;
            } else {
                note(&made)?;
            }
        }
        Ok(())
    }

    /// Makes a network; false if somebody has done so meanwhile.
    fn make_network(&self, name: &str, body: &Value) -> Result<bool, EngineError> {
        let answer = self.call("POST", "/networks/create", Some(body))?;
        match answer.status {
            201 => Ok(true),
            _ if self.network(name)?.is_some() => Ok(false),
            _ => Err(refused("make network", name, &answer)),
        }
    }

    /// Makes a network again with the subnets that it has, now chosen ones, where this Docker takes a chosen address
    /// only on such a network and no container refers to it.
    fn choose_subnet(&self, here: &Value, wanted: &[IpAddr]) -> Result<(), EngineError> {
        let (name, body) = (here["Name"].as_str().unwrap_or_default(), creation(here, &Value::Null));
        let id = here["Id"].as_str().unwrap_or_default();
        if body.is_null() || wanted.is_empty() || !may_be_chosen_by_docker(here) || takes_any_address(&self.version()?)
        {
            return Ok(());
        }
        let there: Vec<Endpoint> = self.endpoints()?.into_iter().filter(|one| one.network == name).collect();
        if there.iter().any(|one| one.holds_for.is_none()) {
            return Ok(());
        }
        // The agent has them made again.
        there.iter().try_for_each(|holder| self.remove_holder(&holder.id))?;
        // Where Docker does not remove it, somebody has it; then the start says what Docker thinks of the address.
        if self.call("DELETE", &format!("/networks/{id}"), None)?.status != 204 {
            return Ok(());
        }
        // What was there must be there again.
        self.make_network(name, &body).or_else(|_| self.make_network(name, &body)).map(drop)
    }

    /// Removes the networks that were made for a container which does not come, if no other has been put on them.
    pub(super) fn remove_networks(&self, bundle: &Path) -> Result<(), EngineError> {
        let made = std::fs::read_to_string(bundle.join(NETWORKS)).unwrap_or_default();
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        made.lines().try_for_each(|name| {
            let Some(network) = self.network(name)? else { return Ok(()) };
            let id = network["Id"].as_str().unwrap_or_default();
            match self.filtered("network", name)?.is_empty() {
                true => self.order("remove network", name, "DELETE", &format!("/networks/{id}")),
                false => Ok(()),
            }
        })
    }

    /// A network by its name; `None` if there is none.
    pub(super) fn network(&self, name: &str) -> Result<Option<Value>, EngineError> {
        if !is_name(name) {
            return Ok(None);
        }
        // Docker also takes the beginning of an id for a name.
        Ok(self.get(&format!("/networks/{name}"))?.filter(|network| network["Name"] == name))
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
        let is_there = |interface: &str| nix::net::if_::if_nametoindex(interface).is_ok();
        if network.driver == "bridge" {
            // Docker would take them, and the node's own way there would be gone.
            let of_node = subnets_of_node().into_iter();
            for (interface, theirs) in of_node.filter(|(_, theirs)| ours.iter().any(|our| our.overlaps(theirs))) {
                add(
                    format!(
                        "network {name} ({}) cannot be made there: {theirs} of interface {interface} overlaps",
                        network.subnets.join(", ")
                    ),
                    "choose another subnet for the network".to_owned(),
                );
            }
            if let Some(bridge) = said(&options["com.docker.network.bridge.name"]).filter(|bridge| is_there(bridge)) {
                add(
                    format!("network {name} cannot be made there: its bridge {bridge} is there already"),
                    format!("remove that interface (`ip link delete {bridge}`), if nobody needs it"),
                );
            }
        }
        if let Some(parent) = said(&options["parent"]).filter(|_| network.driver != "bridge") {
            // Docker makes the interface of a VLAN by itself.
            let existing = parent.rsplit_once('.').map_or(parent, |(existing, _)| existing);
            if !is_there(parent) && !is_there(existing) {
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
            gateways: Vec::new(),
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
    fn what_a_peer_offers_is_no_more_than_a_network() {
        let whole = network(&described());
        let body = offered(&whole).unwrap();
        assert_eq!(body["IPAM"], whole.creation["IPAM"]);
        let changed = |change: fn(&mut Network)| {
            let mut network = network(&described());
            change(&mut network);
            offered(&network)
        };
        let refused: [fn(&mut Network); 8] = [
            |n| n.name = "x/connect HTTP/1.1\r\n\r\nPOST /containers/create".to_owned(),
            |n| n.name = "x\nvictim".to_owned(),
            |n| n.driver = "plugin".to_owned(),
            |n| n.subnets = vec!["10.9.0.0/24".to_owned()],
            |n| n.creation["IPAM"]["Config"][0]["Subnet"] = "0.0.0.0/1".into(),
            |n| n.creation["IPAM"]["Config"][0]["Other"] = "1".into(),
            |n| n.creation["Options"] = json!({"macvlan_mode": "passthru", "parent": "eth0"}),
            |n| n.creation["Options"] = json!({"parent": {"a": "b"}}),
        ];
        for change in refused {
            assert_eq!(changed(change), None);
        }
        let other = changed(|n| {
            n.creation["Name"] = "victim".into();
            n.creation["Driver"] = "plugin".into();
            n.creation["Scope"] = "swarm".into();
        });
        let other = other.unwrap();
        assert_eq!(
            (&other["Name"], &other["Driver"], &other["Scope"]),
            (&json!("shop_default"), &json!("bridge"), &Value::Null)
        );
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
        let endpoint = |container: &str, holds_for: Option<&str>, ip: &str, runs| Endpoint {
            id: container.to_owned(),
            container: container.to_owned(),
            holds_for: holds_for.map(str::to_owned),
            migration: None,
            answers: false,
            network: "shop_default".to_owned(),
            addresses: vec![ip.parse().unwrap()],
            runs,
        };
        let mut endpoints = vec![endpoint("web", None, "172.18.0.2", true), endpoint("db", None, "172.18.0.3", true)];
        endpoints.push(endpoint("holder", Some("mail"), "172.18.0.8", true));
        endpoints.push(endpoint("ended", None, "172.18.0.9", false));
        let elsewhere = Endpoint { network: "another".to_owned(), ..endpoint("other", None, "172.18.0.30", true) };
        endpoints.push(elsewhere);
        let owner = |ip: &str, except: &str| owner(&network, &endpoints, ip.parse().unwrap(), except);
        assert_eq!(owner("172.18.0.9", "web"), None);
        assert_eq!(owner("172.18.0.3", "web"), Some(Owner::Container("db".to_owned())));
        assert_eq!(owner("172.18.0.2", "web"), None);
        assert_eq!(owner("172.18.0.1", "web"), Some(Owner::Network("the gateway".to_owned())));
        assert_eq!(owner("172.18.0.7", "web"), Some(Owner::Network("router (reserved)".to_owned())));
        assert_eq!(owner("172.18.0.30", "web"), None);
        assert_eq!(owner("172.18.0.8", "web"), Some(Owner::Held("mail".to_owned())));
        assert_eq!(owner("172.18.0.8", "mail"), None, "held for itself");
    }

    #[test]
    fn a_node_gives_out_the_addresses_of_its_range() {
        let mut network = described();
        let range = |network: &Value, ip: &str| range_of(network, ip.parse().unwrap()).map(|range| range.to_string());
        assert_eq!(range(&network, "172.18.9.9").as_deref(), Some("172.18.0.0/16"));
        assert_eq!(range(&network, "172.19.0.1"), None);
        network["IPAM"]["Config"][0]["IPRange"] = "172.18.64.0/20".into();
        assert_eq!(range(&network, "172.18.65.1").as_deref(), Some("172.18.64.0/20"));
        assert_eq!(range(&network, "172.18.9.9"), None);
        network["Scope"] = "swarm".into();
        assert_eq!(range(&network, "172.18.65.1"), None);
    }
}
