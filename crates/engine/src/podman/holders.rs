//! Holders in Podman, which reserves an address for a container while that runs, whatever its interfaces: those of holders are not even made.

use std::ffi::OsStr;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tranship_types::ReservedAddress;

use super::networks::address;
use super::parameters::{Parameters, is_word};
use super::{Podman, is_unknown};
use crate::holders::{self, Endpoint, Holders, IMAGE, LABEL, NOBODY, PROGRAM, held_for};
use crate::json::{list, said};
use crate::pool::Subnet;
use crate::{Container, EngineError, described};

/// In the environment of `podman` when it starts or removes a holder: netavark's stand-in only answers.
pub const HOLDER_VARIABLE: &str = "TRANSHIP_HOLDER";
/// Where Podman finds the stand-in.
const HELPERS: &str = "/run/tranship/holders";

/// The endpoints of a container that Podman describes. Of one that does not run it shows no addresses but in the command that made it:
/// each in there counts for each network.
fn endpoints(described: &Value) -> Vec<Endpoint> {
    let runs = matches!(described["State"]["Status"].as_str(), Some("running" | "paused"));
    let words = list(&described["Config"]["CreateCommand"]).iter().filter(|_| !runs).filter_map(Value::as_str);
    // ADDRESS, --ip=ADDRESS, --network=NAME:ip=ADDRESS,…
    let made_with = words.flat_map(|word| word.split(',')).filter_map(|part| part.rsplit('=').next()?.parse().ok());
    let made_with: Vec<IpAddr> = made_with.collect();
    let endpoint = |(network, one): (&String, &Value)| {
        let now = [&one["IPAddress"], &one["GlobalIPv6Address"]].into_iter().filter_map(address);
        Some(Endpoint {
            id: described["Id"].as_str()?.to_owned(),
            container: described["Name"].as_str()?.to_owned(),
            holds_for: held_for(&described["Config"]["Labels"]).map(str::to_owned),
            network: network.clone(),
            addresses: now.chain(made_with.iter().copied()).collect(),
            runs,
        })
    };
    described["NetworkSettings"]["Networks"].as_object().into_iter().flatten().filter_map(endpoint).collect()
}

/// Whether a node gives out this address of a network, which Podman describes, by itself.
fn gives_out(network: &Value, ip: IpAddr) -> bool {
    let host_local = said(&network["ipam_options"]["driver"]).is_none_or(|driver| driver == "host-local");
    let has = |one: &Value| said(&one["subnet"]).and_then(Subnet::parse).is_some_and(|subnet| subnet.contains(ip));
    let in_range = |one: &Value| {
        let (first, last) = (address(&one["lease_range"]["start_ip"]), address(&one["lease_range"]["end_ip"]));
        first.is_none_or(|first| first <= ip) && last.is_none_or(|last| ip <= last)
    };
    host_local && list(&network["subnets"]).iter().any(|one| has(one) && in_range(one))
}

/// What netavark's stand-in answers when it is to attach a holder: that all is done as it was asked for. `asked` is what Podman gives to
/// netavark. `None` where that cannot be read.
#[must_use]
pub fn attached(asked: &Value) -> Option<Value> {
    let mut answer = json!({});
    for (name, options) in asked["networks"].as_object()? {
        let subnets = list(&asked["network_info"][name]["subnets"]);
        let ips = list(&options["static_ips"]).iter().filter_map(Value::as_str);
        let net = |ip: &str| {
            let address = ip.parse().ok()?;
            let text = subnets.iter().filter_map(|one| one["subnet"].as_str());
            let (_, length) = text
                .filter(|text| Subnet::parse(text).is_some_and(|subnet| subnet.contains(address)))
                .find_map(|text| text.split_once('/'))?;
            Some(json!({"ipnet": format!("{ip}/{length}")}))
        };
        let nets: Vec<Value> = ips.filter_map(net).collect();
        answer[name] = json!({
            "dns_search_domains": [], "dns_server_ips": [],
            "interfaces": {options["interface_name"].as_str()?: {"mac_address": "02:00:00:00:00:00", "subnets": nets}},
        });
    }
    Some(answer)
}

impl Podman {
    /// Runs a command on a holder, for which netavark only answers.
    fn run_on_holder(&self, arguments: &[&str], what: &'static str, id: &str) -> Result<(), EngineError> {
        let environment = [("CONTAINERS_HELPER_BINARY_DIR", OsStr::new(HELPERS)), (HOLDER_VARIABLE, OsStr::new("1"))];
        self.run_in(&environment, arguments, what, id).map(drop)
    }
}

/// Puts netavark's stand-in where Podman finds it.
fn place(program: &Path) -> io::Result<()> {
    let (directory, new) = (Path::new(HELPERS), Path::new(HELPERS).join("new"));
    std::fs::create_dir_all(directory)?;
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(program, &new)?;
    std::fs::rename(new, directory.join("netavark"))
}

impl Holders for Podman {
    /// A pod's networks are its infra container's: of their addresses none is held.
    fn given_out(&self, container: &Container) -> Result<(Vec<ReservedAddress>, Vec<ReservedAddress>), EngineError> {
        let parameters = described::parameters::<Parameters>(&container.name, &container.parameters)?;
        let (mut given, mut others) = (Vec::new(), Vec::new());
        for network in parameters.attached(&container.name, |_| false) {
            let here = self.network(&network.name);
            for address in network.addresses {
                let reserved = ReservedAddress {
                    network: network.name.clone(),
                    owner: container.name.clone(),
                    interface: String::new(),
                    address,
                };
                if gives_out(&here, address) { given.push(reserved) } else { others.push(reserved) }
            }
        }
        Ok((given, others))
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, EngineError> {
        if !self.storage.exists() {
            return Ok(Vec::new());
        }
        // While one arrives, Podman cannot be asked for it.
        let all = self.all_described()?;
        Ok(all.iter().chain(&Self::arriving()).flat_map(endpoints).collect())
    }

    fn namespace(&self, _: &str) -> Option<PathBuf> {
        None
    }

    fn make_holder(
        &self,
        name: &str,
        (container, network): (&str, &str),
        addresses: &[IpAddr],
    ) -> Result<String, EngineError> {
        if !is_word(network) {
            return Err(described::not_made(Self::NAME, name, format!("{network:?} is no name for a network")));
        }
        if self.image_of(IMAGE).is_null() {
            let image = holders::image().map_err(Self::unmade(name))?;
            self.take_in(&["import", "--quiet", "-", IMAGE], "make the image", IMAGE, &mut image.as_slice())?;
        }
        let ips: Vec<String> = addresses.iter().map(|ip| format!("ip={ip}")).collect();
        let mut arguments = vec!["create".to_owned(), format!("--name={name}"), format!("--label={LABEL}={container}")];
        arguments.push(format!("--network={network}:{}", ips.join(",")));
        arguments.extend(self.runc.cgroup_parent.iter().map(|parent| format!("--cgroup-parent={}", parent.display())));
        arguments.extend(
            [
                "--pull=never",
                "--read-only",
                "--read-only-tmpfs=false",
                "--cap-drop=all",
                "--log-driver=none",
                "--no-hosts",
            ]
            .map(str::to_owned),
        );
        arguments.extend(["--security-opt=no-new-privileges".to_owned(), format!("--user={NOBODY}")]);
        arguments.extend(["--stop-signal=KILL".to_owned(), format!("--entrypoint=[{PROGRAM:?}]"), IMAGE.to_owned()]);
        let said = self.run(&arguments, "make", name)?;
        Ok(String::from_utf8_lossy(&said).lines().next_back().unwrap_or_default().trim().to_owned())
    }

    fn start_holder(&self, id: &str, program: &Path) -> Result<(), EngineError> {
        place(program).map_err(Self::unmade(id))?;
        self.run_on_holder(&["start", id], "start", id)
    }

    fn remove_holder(&self, id: &str) -> Result<(), EngineError> {
        match self.run_on_holder(&["rm", "--force", "--time", "0", id], "remove", id) {
            Err(error) if !is_unknown(&error) => return Err(error),
            _ => {}
        }
        // Podman keeps it for other holders.
        let _ = self.run(&["rmi", IMAGE], "remove the image", IMAGE);
        Ok(())
    }

    fn loses_holders(&self) -> bool {
        false
    }

    /// Podman takes any address.
    fn refuses_choice(&self, _: &EngineError) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_from_descriptions() {
        let described = json!({
            "Id": "1c", "Name": "web", "State": {"Status": "running"}, "Config": {"Labels": {LABEL: "db"}},
            "NetworkSettings": {"Networks": {"lan": {"IPAddress": "10.1.0.2", "GlobalIPv6Address": "", "IPAMConfig": null}}},
        });
        let found = endpoints(&described);
        assert_eq!((found.len(), found[0].runs, found[0].holds_for.as_deref()), (1, true, Some("db")));
        assert_eq!(found[0].addresses, ["10.1.0.2".parse::<IpAddr>().unwrap()]);
        let mut stopped = described.clone();
        stopped["State"]["Status"] = "exited".into();
        stopped["NetworkSettings"]["Networks"]["lan"] = json!({"IPAddress": ""});
        stopped["Config"]["CreateCommand"] =
            json!(["podman", "run", "--network=lan:ip=10.1.0.3,ip=fd00::3,mac=02:00:00:00:00:09"]);
        let made_with: Vec<String> = endpoints(&stopped)[0].addresses.iter().map(ToString::to_string).collect();
        assert_eq!(made_with, ["10.1.0.3", "fd00::3"]);
        assert!(endpoints(&json!({"Id": "1c", "Name": "web"})).is_empty() && endpoints(&Value::Null).is_empty());
    }

    #[test]
    fn a_node_gives_out_the_addresses_of_its_range() {
        let mut network = json!({"subnets": [{"subnet": "10.1.0.0/24"}], "ipam_options": {"driver": "host-local"}});
        let gives = |network: &Value, ip: &str| gives_out(network, ip.parse().unwrap());
        assert!(gives(&network, "10.1.0.9") && !gives(&network, "10.2.0.9"));
        network["subnets"][0]["lease_range"] = json!({"start_ip": "10.1.0.128", "end_ip": "10.1.0.143"});
        assert!(gives(&network, "10.1.0.130") && !gives(&network, "10.1.0.9") && !gives(&network, "10.1.0.144"));
        network["ipam_options"]["driver"] = "dhcp".into();
        assert!(!gives(&network, "10.1.0.130") && !gives(&Value::Null, "10.1.0.130"));
    }

    #[test]
    fn the_stand_in_for_netavark_answers_that_all_is_done() {
        let asked = json!({
            "networks": {"lan": {"static_ips": ["10.1.0.2"], "interface_name": "eth0"}},
            "network_info": {"lan": {"subnets": [{"subnet": "fd00::/64"}, {"subnet": "10.1.0.0/24"}]}},
        });
        let answer = attached(&asked).unwrap();
        assert_eq!(answer["lan"]["interfaces"]["eth0"]["subnets"], json!([{"ipnet": "10.1.0.2/24"}]));
        assert_eq!(attached(&json!({"networks": {"lan": {}}})), None);
        assert_eq!(attached(&Value::Null), None);
    }
}
