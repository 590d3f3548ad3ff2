//! Holders in Docker, which reserves an address for a container while that runs.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tranship_types::ReservedAddress;

use super::networks::{address, range_of};
use super::parameters::Parameters;
use super::{Docker, UNPACK, http, refused, unpacked};
use crate::holders::{
    self, Endpoint, Holders, Holding, IMAGE, LABEL, MIGRATION, NOBODY, PROGRAM, has_interface, held_for,
};
use crate::json::said;
use crate::mark::Mark;
use crate::pool::{hash, host_name};
use crate::{Container, EngineError, described, holder_namespace};

/// How long a list may take: moves wait for it, also those of other engines' containers.
const LIST: Duration = Duration::from_secs(5);
/// How long the making, the start or the removal of a holder may take.
const ORDER: Duration = Duration::from_secs(30);

/// The image's name in a row of `GET /containers/json`. Docker shows the image's id where the name means another image
/// by now, or none; a holder is then recognised by its program.
pub(super) fn image_of(row: &Value) -> Value {
    let is_id = row["Image"].as_str().is_some_and(|image| image.starts_with("sha256:"));
    if is_id && row["Command"] == PROGRAM { IMAGE.into() } else { row["Image"].clone() }
}

/// The endpoints of a container, as a row of `GET /containers/json` shows them.
fn endpoints(row: &Value) -> Vec<Endpoint> {
    let runs = matches!(row["State"].as_str(), Some("running" | "paused"));
    let holds_for = held_for(&row["Labels"], &image_of(row), &row["Names"][0]);
    let endpoint = |(network, one): (&String, &Value)| {
        let fixed = &one["IPAMConfig"];
        let has = [(&one["IPAddress"], &fixed["IPv4Address"]), (&one["GlobalIPv6Address"], &fixed["IPv6Address"])];
        Some(Endpoint {
            id: row["Id"].as_str()?.to_owned(),
            container: row["Names"][0].as_str()?.trim_start_matches('/').to_owned(),
            holds_for: holds_for.map(str::to_owned),
            migration: holds_for.and_then(|_| said(&row["Labels"][MIGRATION])).map(str::to_owned),
            answers: false,
            network: network.clone(),
            addresses: has.iter().filter_map(|(now, made_with)| address(now).or_else(|| address(made_with))).collect(),
            runs,
        })
    };
    row["NetworkSettings"]["Networks"].as_object().into_iter().flatten().filter_map(endpoint).collect()
}

/// The body of `POST /containers/create` for a holder with this MAC.
fn creation(runtime: &str, holds: Holding<'_>, addresses: &[IpAddr], mac: &str) -> Value {
    let Holding { container, migration, network } = holds;
    let mut fixed = json!({});
    for ip in addresses {
        fixed[if ip.is_ipv4() { "IPv4Address" } else { "IPv6Address" }] = ip.to_string().into();
    }
    json!({
        "Image": IMAGE, "Entrypoint": [PROGRAM], "Cmd": [], "User": NOBODY, "StopSignal": "SIGKILL",
        "Labels": {LABEL: container, MIGRATION: migration}, "MacAddress": mac,
        "HostConfig": {
            "NetworkMode": network, "Runtime": runtime, "ReadonlyRootfs": true, "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"], "IpcMode": "none", "Init": false, "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
        },
        "NetworkingConfig": {"EndpointsConfig": {network: {"IPAMConfig": fixed, "MacAddress": mac}}},
    })
}

/// A MAC of a holder's own: Docker would give it that of the container that it holds addresses for.
fn mac(holder: &str) -> String {
    let [a, b, c, d, e, ..] = hash(&format!("{} {holder}", host_name())).to_be_bytes();
    format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}")
}

impl Docker {
    /// Makes the image of holders, if it is not there.
    fn make_image(&self) -> Result<(), EngineError> {
        if self.get(&format!("/images/{IMAGE}/json"))?.is_some() {
            return Ok(());
        }
        let (repository, tag) = IMAGE.split_once(':').unwrap_or((IMAGE, "latest"));
        let path = format!("/images/create?fromSrc=-&repo={repository}&tag={tag}");
        let made = holders::image().and_then(|image| http::upload(&self.socket, &path, &mut image.as_slice(), UNPACK));
        made.map_err(|error| unpacked("make the image", IMAGE, &error))
    }
}

impl Holders for Docker {
    fn given_out(&self, container: &Container) -> Result<(Vec<ReservedAddress>, Vec<ReservedAddress>), EngineError> {
        let parameters = described::parameters::<Parameters>(&container.name, &container.parameters)?;
        let (mut given, mut others) = (Vec::new(), Vec::new());
        for network in parameters.attached(&container.name) {
            let here = self.network(&network.name)?.unwrap_or_default();
            let (own, rest) = holders::parted(&container.name, &network, |address| range_of(&here, address).is_some());
            given.extend(own);
            others.extend(rest);
        }
        Ok((given, others))
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, EngineError> {
        let rows = self.call_within(LIST, "GET", "/containers/json?all=1", None)?.body;
        let mut found: Vec<Endpoint> = rows.as_array().into_iter().flatten().flat_map(endpoints).collect();
        for holder in found.iter_mut().filter(|one| one.holds_for.is_some() && one.runs) {
            // One that is just being removed, or that Docker keeps locked, says nothing of the others.
            let described = self.call_within(LIST, "GET", &format!("/containers/{}/json", holder.id), None);
            holder.answers = described.is_ok_and(|described| has_interface(&described.body["State"]["Pid"]));
        }
        Ok(found)
    }

    fn make_holder(&self, name: &str, holds: Holding<'_>, addresses: &[IpAddr]) -> Result<String, EngineError> {
        if !described::is_plain(name) {
            return Err(described::not_made(Self::NAME, name, "that is no name for a container"));
        }
        if !self.has_wrapper()? {
            let why = format!(
                "Docker does not know the runtime {}, which keeps holders mute; register it as for containers that come",
                self.runtime
            );
            return Err(described::not_made(Self::NAME, name, why));
        }
        self.make_image()?;
        let body = creation(&self.runtime, holds, addresses, &mac(name));
        let answer = self.call_within(ORDER, "POST", &format!("/containers/create?name={name}"), Some(&body))?;
        let id = answer.body["Id"].as_str().filter(|_| answer.status == 201);
        id.map(str::to_owned).ok_or_else(|| refused("make", name, &answer))
    }

    fn namespace(&self, id: &str) -> Option<PathBuf> {
        holder_namespace(id)
    }

    fn start_holder(&self, id: &str, _: &Path) -> Result<(), EngineError> {
        let answer = self.call_within(ORDER, "POST", &format!("/containers/{id}/start"), None)?;
        if answer.status == 204 { Ok(()) } else { Err(refused("start", id, &answer)) }
    }

    fn remove_holder(&self, id: &str) -> Result<(), EngineError> {
        let answer = self.call_within(ORDER, "DELETE", &format!("/containers/{id}?force=1&v=1"), None)?;
        if matches!(answer.status, 200..=299 | 404) { Ok(()) } else { Err(refused("remove", id, &answer)) }
    }

    /// Docker locks each container in turn before it removes an image (moby, `checkImageDeleteConflict`), and keeps a
    /// container locked while it starts: an arriving one until its move has committed. A removal during a move would
    /// wait for that move, which may wait for the caller in turn.
    fn remove_image(&self) -> Result<bool, EngineError> {
        if !Mark::all().is_empty() {
            return Ok(false);
        }
        if self.endpoints()?.iter().all(|one| one.holds_for.is_none()) {
            let answer = self.call_within(LIST, "DELETE", &format!("/images/{IMAGE}"), None)?;
            // In use: a holder on no network.
            if !matches!(answer.status, 200..=299 | 404 | 409) {
                return Err(refused("remove the image", IMAGE, &answer));
            }
        }
        Ok(true)
    }

    fn loses_holders(&self) -> bool {
        true
    }

    fn refuses_choice(&self, error: &EngineError) -> bool {
        error.to_string().contains("user configured subnets")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_from_a_list() {
        let row = |state: &str, labels: Value, endpoint: Value| {
            json!({"Id": "1c", "Names": ["/tranship-holds-x"], "State": state, "Labels": labels, "Image": IMAGE,
                "NetworkSettings": {"Networks": {"lan": endpoint}}})
        };
        let has = |row: &Value| {
            let one = endpoints(row).remove(0);
            (one.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), one.runs, one.holds_for)
        };
        let running = json!({"IPAddress": "10.1.0.2", "GlobalIPv6Address": "fd00::2", "IPAMConfig": null});
        assert_eq!(
            has(&row("running", json!({}), running)),
            (vec!["10.1.0.2".to_owned(), "fd00::2".into()], true, None)
        );
        let stopped = json!({"IPAddress": "", "GlobalIPv6Address": "", "IPAMConfig": {"IPv4Address": "10.1.0.3"}});
        let holder = row("exited", json!({LABEL: "db"}), stopped);
        assert_eq!(has(&holder), (vec!["10.1.0.3".to_owned()], false, Some("db".to_owned())));
        // The image's name has been taken away from it.
        let mut unnamed = holder.clone();
        unnamed["Image"] = "sha256:4f".into();
        assert_eq!(has(&unnamed).2, None);
        unnamed["Command"] = PROGRAM.into();
        assert_eq!(has(&unnamed).2.as_deref(), Some("db"));
        assert!(endpoints(&json!({"Id": "1c", "Names": ["/web"], "NetworkSettings": {"Networks": {}}})).is_empty());
        assert!(endpoints(&json!([])).is_empty());
    }

    #[test]
    fn a_holder_has_nothing_but_addresses_and_a_mac_of_its_own() {
        let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let holds = Holding { container: "web", migration: "m-1", network: "lan" };
        let body = creation("tranship", holds, &addresses, &mac(&holds.name()));
        let endpoint = &body["NetworkingConfig"]["EndpointsConfig"]["lan"];
        assert_eq!(endpoint["IPAMConfig"], json!({"IPv4Address": "10.1.0.2", "IPv6Address": "fd00::2"}));
        let held_for = held_for(&body["Labels"], &body["Image"], &json!(holds.name()));
        assert_eq!((&body["HostConfig"]["Runtime"], held_for), (&json!("tranship"), Some("web")));
        assert_eq!(body["Labels"][MIGRATION], "m-1");
        assert!(mac("x").starts_with("02:") && mac("x") != mac("y") && endpoint["MacAddress"] == body["MacAddress"]);
    }
}
