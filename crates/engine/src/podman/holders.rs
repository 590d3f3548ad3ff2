//! Holders in Podman, which reserves an address for a container while that runs, whatever its interfaces: those of holders are not even made.

use std::ffi::OsStr;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tranship_types::ReservedAddress;

use super::networks::address;
use super::parameters::{Parameters, is_word};
use super::{Podman, is_unknown};
use crate::holders::{
    self, Endpoint, Holders, Holding, IMAGE, LABEL, MIGRATION, NOBODY, PROGRAM, has_interface, held_for,
};
use crate::json::{list, said};
use crate::pool::Subnet;
use crate::{Container, EngineError, described};

/// In the environment of `podman` when it starts or removes a holder: netavark's stand-in only answers.
pub const HOLDER_VARIABLE: &str = "TRANSHIP_HOLDER";
/// Where Podman finds the stand-in.
const HELPERS: &str = "/run/tranship/holders";

/// How long a command of a list may take: moves wait for it, also those of other engines' containers.
const LIST: Duration = Duration::from_secs(5);
/// How long the making, the start or the removal of a holder may take.
const ORDER: Duration = Duration::from_secs(30);

/// For which container one that Podman describes is a holder.
pub(super) fn holds_for(described: &Value) -> Option<&str> {
    held_for(&described["Config"]["Labels"], &described["ImageName"], &described["Name"])
}

/// Options whose value may be the same word as the image.
const NAMES: [&str; 4] = ["--name", "--hostname", "-h", "--network-alias"];

/// The part of a command before the image, of which Podman knows this name and id: what follows is the container's own.
fn options<'a>(words: &'a [&'a str], image: &str, id: &str) -> &'a [&'a str] {
    let is_image = |word: &str| {
        let of = |name: &str| name == word || name.strip_suffix(word).is_some_and(|before| before.ends_with('/'));
        !word.is_empty()
            && (of(image) || image.strip_suffix(":latest").is_some_and(of) || word.len() >= 12 && id.starts_with(word))
    };
    let is_value = |at: usize| at > 0 && NAMES.contains(&words[at - 1]);
    let end = (0..words.len()).find(|at| is_image(words[*at]) && !is_value(*at));
    &words[..end.unwrap_or(words.len())]
}

/// The addresses that options ask for on a network: `--network=NAME:ip=ADDRESS,…`, of which `--net` is another name, and `--ip`, `--ip6`,
/// which are for the only network.
fn made_with(options: &[&str], network: &str, is_only: bool) -> Vec<IpAddr> {
    let (mut found, mut unnamed, mut named) = (Vec::new(), Vec::new(), Vec::new());
    let mut words = options.iter();
    while let Some(word) = words.next() {
        let (option, value) = word.split_once('=').map_or((*word, None), |(option, value)| (option, Some(value)));
        if !matches!(option, "--network" | "--net" | "--ip" | "--ip6") {
            continue;
        }
        let Some(value) = value.or_else(|| words.next().copied()) else { break };
        if option.starts_with("--ip") {
            unnamed.extend(value.parse::<IpAddr>().ok());
            continue;
        }
        let (name, rest) = value.split_once(':').unwrap_or((value, ""));
        // That of Podman's default network.
        let name = if name == "bridge" { "podman" } else { name };
        named.push(name);
        let pairs = rest.split(',').filter_map(|pair| pair.split_once('=')).filter(|_| name == network);
        found.extend(
            pairs.filter(|(key, _)| matches!(*key, "ip" | "ip6")).filter_map(|(_, ip)| ip.parse::<IpAddr>().ok()),
        );
    }
    if is_only || named == [network] {
        found.append(&mut unnamed);
    }
    found
}

/// The endpoints of a container that Podman describes. Of one that does not run it shows no addresses but in the command that made it.
fn endpoints(described: &Value) -> Vec<Endpoint> {
    let runs = matches!(described["State"]["Status"].as_str(), Some("running" | "paused"));
    let words: Vec<&str> =
        list(&described["Config"]["CreateCommand"]).iter().filter(|_| !runs).filter_map(Value::as_str).collect();
    let [image, id] = ["ImageName", "Image"].map(|key| said(&described[key]).unwrap_or_default());
    let options = options(&words, image, id);
    let networks = described["NetworkSettings"]["Networks"].as_object();
    let is_only = networks.is_some_and(|all| all.len() == 1);
    let holds_for = holds_for(described);
    let answers = holds_for.is_some() && runs && has_interface(&described["State"]["Pid"]);
    let endpoint = |(network, one): (&String, &Value)| {
        let now = [&one["IPAddress"], &one["GlobalIPv6Address"]].into_iter().filter_map(address);
        Some(Endpoint {
            id: described["Id"].as_str()?.to_owned(),
            container: described["Name"].as_str()?.to_owned(),
            holds_for: holds_for.map(str::to_owned),
            migration: holds_for.and_then(|_| said(&described["Config"]["Labels"][MIGRATION])).map(str::to_owned),
            answers,
            network: network.clone(),
            addresses: now.chain(made_with(options, network, is_only)).collect(),
            runs,
        })
    };
    networks.into_iter().flatten().filter_map(endpoint).collect()
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
    /// The runtime wrapper, if this Podman knows it.
    fn wrapper(&self) -> Option<String> {
        // While a container arrives, which it does by this runtime, `podman info` waits for it.
        let knows = || {
            let arguments = ["--runtime", &self.runtime, "info", "--format", "json"];
            let info = self.json_within(LIST, &arguments, "use the runtime", &self.runtime).unwrap_or_default();
            described::is_wrapper(Path::new(info["host"]["ociRuntime"]["path"].as_str().unwrap_or_default()))
        };
        (!Self::arriving().is_empty() || knows()).then(|| self.runtime.clone())
    }

    /// Runs a command on a holder, for which netavark only answers.
    fn run_on_holder(&self, arguments: &[&str], what: &'static str, id: &str) -> Result<(), EngineError> {
        let environment = [("CONTAINERS_HELPER_BINARY_DIR", OsStr::new(HELPERS)), (HOLDER_VARIABLE, OsStr::new("1"))];
        self.run_in(&environment, ORDER, arguments, what, id).map(drop)
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
        if !parameters.pod().is_empty() {
            // Its infra container has the addresses, which does not move.
            return Ok((given, others));
        }
        for network in parameters.attached(&container.name, |_| false) {
            let here = self.network(&network.name);
            let (own, rest) = holders::parted(&container.name, &network, |address| gives_out(&here, address));
            given.extend(own);
            others.extend(rest);
        }
        Ok((given, others))
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, EngineError> {
        if !self.storage.exists() {
            return Ok(Vec::new());
        }
        // While one arrives, Podman cannot be asked for it.
        let all = self.all_described_within(LIST)?;
        Ok(all.iter().chain(&Self::arriving()).flat_map(endpoints).collect())
    }

    fn namespace(&self, _: &str) -> Option<PathBuf> {
        None
    }

    fn make_holder(
        &self,
        name: &str,
        Holding { container, migration, network }: Holding<'_>,
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
        // When a user starts it, netavark attaches it, and then the runtime wrapper refuses it.
        let mut arguments: Vec<String> =
            self.wrapper().into_iter().flat_map(|runtime| ["--runtime".to_owned(), runtime]).collect();
        arguments.extend(["create".to_owned(), format!("--name={name}"), format!("--label={LABEL}={container}")]);
        arguments.push(format!("--label={MIGRATION}={migration}"));
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
        let said = self.run_in(&[], ORDER, &arguments, "make", name)?;
        Ok(String::from_utf8_lossy(&said).lines().next_back().unwrap_or_default().trim().to_owned())
    }

    fn start_holder(&self, id: &str, program: &Path) -> Result<(), EngineError> {
        place(program).map_err(Self::unmade(id))?;
        self.run_on_holder(&["start", id], "start", id)
    }

    fn remove_holder(&self, id: &str) -> Result<(), EngineError> {
        match self.run_on_holder(&["rm", "--force", "--time", "0", id], "remove", id) {
            Err(error) if !is_unknown(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn remove_image(&self) -> Result<bool, EngineError> {
        if !Self::arriving().is_empty() {
            return Ok(false);
        }
        let is_used = || self.endpoints().map(|all| all.iter().any(|one| one.holds_for.is_some()));
        if self.storage.exists() && !self.image_of(IMAGE).is_null() && !is_used()? {
            self.run_in(&[], ORDER, &["rmi", IMAGE], "remove the image", IMAGE)?;
        }
        Ok(true)
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
            "Id": "1c", "Name": "tranship-holds-db.lan.m-1", "State": {"Status": "running"}, "ImageName": format!("localhost/{IMAGE}"),
            "Config": {"Labels": {LABEL: "db"}},
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
    fn only_options_of_a_network_are_its_addresses() {
        let read = |command: &str, network: &str, is_only| -> Vec<String> {
            let words: Vec<&str> = command.split(' ').collect();
            let options = options(&words, "docker.io/library/shop:latest", "1c0ffee1c0ffee");
            made_with(options, network, is_only).iter().map(ToString::to_string).collect()
        };
        let only = |command: &str| read(command, "lan", true);
        assert!(only("podman run -e DB_HOST=10.1.0.3 --add-host=db:10.1.0.4 --dns=10.1.0.5 shop").is_empty());
        assert!(only("podman run --network lan shop --ip 10.1.0.3 --network=lan:ip=10.1.0.4").is_empty());
        assert!(only("podman run 1c0ffee1c0ff --ip=10.1.0.3").is_empty());
        assert_eq!(only("podman run --net lan --ip 10.1.0.3 --ip6=fd00::3 shop"), ["10.1.0.3", "fd00::3"]);
        assert_eq!(
            only("podman run --name shop --network lan:ip=10.1.0.3,ip6=fd00::3 shop:latest"),
            ["10.1.0.3", "fd00::3"]
        );
        let both = "podman run --network=lan:ip=10.1.0.3,mac=02:00:00:00:00:09 --network=wan:ip=10.2.0.3 shop";
        assert_eq!(
            (read(both, "lan", false), read(both, "wan", false)),
            (vec!["10.1.0.3".to_owned()], vec!["10.2.0.3".to_owned()])
        );
        let connected = "podman run --network=lan --ip=10.1.0.3 shop";
        assert_eq!(
            (read(connected, "lan", false), read(connected, "wan", false)),
            (vec!["10.1.0.3".to_owned()], vec![])
        );
        assert_eq!(read("podman run --network bridge:ip=10.88.0.3 shop", "podman", true), ["10.88.0.3"]);
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
