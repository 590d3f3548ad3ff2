//! Networks of engines that a destination lacks, and addresses that have another owner there: the same for Docker and
//! Podman.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tranship_lab::{Lab, redis_command};
use tranship_types::BlockerKind;

use crate::agents::restart_agent;
use crate::managed::Managed;
use crate::moves::{connection_alive, move_container, refused_move};

/// What makes the lab's network.
const LAB: [&str; 9] =
    ["network", "create", "--driver", "macvlan", "--subnet", "10.77.0.0/24", "-o", "parent=eth0", "lab"];
/// A network as Compose makes it: the engine chooses the subnet.
const CHOSEN_BY_ENGINE: [&str; 5] =
    ["network", "create", "--label", "com.docker.compose.network=default", "shop_default"];
const ADDRESS: &str = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.MacAddress}}{{end}}";
const MOUNTS: [&str; 6] = ["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp"];

/// What an engine tells of a network.
#[derive(Debug, PartialEq, Eq)]
struct Described {
    subnet: Value,
    gateway: Value,
    labels: Value,
}

impl Managed {
    /// The network, and whether the node has a range of addresses of its own on it.
    fn network(&self, lab: &Lab, node: &str, name: &str) -> Result<(Described, bool)> {
        let text = (self.command)(lab, node, &["network", "inspect", name])?;
        let all: Value = serde_json::from_str(&text)?;
        let one = &all[0];
        let (pool, keys, labels) = match self.engine {
            "Docker" => (&one["IPAM"]["Config"][0], ["Subnet", "Gateway", "IPRange"], &one["Labels"]),
            _ => (&one["subnets"][0], ["subnet", "gateway", "lease_range"], &one["labels"]),
        };
        let [subnet, gateway, range] = keys.map(|key| pool[key].clone());
        Ok((Described { subnet, gateway, labels: labels.clone() }, !range.is_null()))
    }

    fn has_network(&self, lab: &Lab, node: &str, name: &str) -> Result<bool> {
        let names = (self.command)(lab, node, &["network", "ls", "--format", "{{.Name}}"])?;
        Ok(names.lines().any(|line| line == name))
    }

    /// Runs a container on a network, with an address that the engine chooses, where the lab puts those of the node.
    pub(crate) fn run_on(&self, lab: &Lab, node: &str, (name, network): (&str, &str), command: &[&str]) -> Result<()> {
        let mut run = vec!["run", "--detach", "--name", name, "--network", network];
        run.extend(MOUNTS);
        let parent = format!("/tranship-lab/{node}");
        // Docker's daemon is there already.
        if self.engine != "Docker" {
            run.extend(["--cgroup-parent", &parent]);
        }
        run.push(self.image);
        (self.command)(lab, node, &[&run, command].concat()).map(drop).map_err(Into::into)
    }

    /// Starts a container that does nothing on a network, with an address that the engine chooses; the address.
    pub(crate) fn start_next(&self, lab: &Lab, node: &str, network: &str) -> Result<Ipv4Addr> {
        self.run_on(lab, node, ("next", network), &["sleep", "1000"])?;
        let told = (self.command)(lab, node, &["inspect", "--format", ADDRESS, "next"])?;
        Ok(told.split_whitespace().next().context("next has no address")?.parse()?)
    }

    /// A network that the destination lacks is made there; the node gives out other addresses than the source, and the
    /// connections go on. What was made for a move that fails is removed. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn makes_a_network_that_is_not_there(&self, lab: &Lab, number: u8) -> Result<()> {
        let engine = |node: &str, arguments: &[&str]| (self.command)(lab, node, arguments);
        let mut counter = self.start(lab, number, &[], &[])?;
        engine("b", &["network", "rm", "lab"])?;

        restart_agent(lab, "b", "destination.engine.after.error")?;
        let output = lab.exec("a", &["tranship", "move", self.name, "--to", "b"])?;
        ensure!(output.status.code() == Some(1), "with a fault the move ended with {}", output.status);
        connection_alive(&mut counter)?;
        restart_agent(lab, "b", "")?;
        ensure!(!self.has_network(lab, "b", "lab")?, "the network of the move that failed is there");

        self.moves(lab, &mut counter, "a", "b")?;
        let ((made, has_range), (original, _)) = (self.network(lab, "b", "lab")?, self.network(lab, "a", "lab")?);
        ensure!(made.subnet == original.subnet && has_range, "on b the network is {made:?}, on a {original:?}");
        let next = self.start_next(lab, "b", "lab")?;
        ensure!(next.octets()[3] >= 128, "the next container on b has {next}");
        engine("b", &["rm", "--force", "next"])?;
        self.moves(lab, &mut counter, "b", "a").context("back again")?;
        self.moves(lab, &mut counter, "a", "b").context("once more")?;
        drop(counter);
        // The user removes the container, and then the agent what it has kept beside it.
        engine("b", &["rm", "--force", self.name])?;
        lab.check("b", &["tranship", "doctor"])?;
        ensure!(self.has_network(lab, "b", "lab")?, "the network went with the container");
        engine("b", &["network", "rm", "lab"])?;
        engine("b", &LAB).map(drop).map_err(Into::into)
    }

    /// A container on a network whose subnet the engine has chosen moves there and back, with its address.
    ///
    /// # Errors
    /// If not.
    pub fn moves_from_a_network_without_a_chosen_subnet(&self, lab: &Lab) -> Result<()> {
        (self.prepare)(lab)?;
        let engine = |node: &str, arguments: &[&str]| (self.command)(lab, node, arguments);
        engine("a", &CHOSEN_BY_ENGINE)?;
        let redis = redis_command();
        let command: Vec<&str> = redis.iter().map(String::as_str).collect();
        // Another one has the lowest address, which is free when this one leaves.
        self.run_on(lab, "a", ("first", "shop_default"), &["sleep", "1000"])?;
        self.run_on(lab, "a", (self.name, "shop_default"), &command)?;
        engine("a", &["rm", "--force", "first"])?;
        let before = self.told(lab, "a", ADDRESS)?;
        let set = "for n in 1 2 3 4 5 6 7 8 9; do redis-cli set kept moved && break; sleep 1; done";
        self.execute(lab, "a", set)?;
        let (original, _) = self.network(lab, "a", "shop_default")?;
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            move_container(lab, from, self.name, to).with_context(|| format!("from {from} to {to}"))?;
            let now = self.told(lab, to, ADDRESS)?;
            ensure!(now == before, "its address was {before}, and on {to} it is {now}");
            let kept = self.execute(lab, to, "redis-cli get kept")?;
            ensure!(kept.trim() == "moved", "on {to} Redis has {kept:?}");
            let (network, has_range) = self.network(lab, to, "shop_default")?;
            ensure!(
                network == original && (has_range || to == "a"),
                "on {to} the network is {network:?}, not {original:?}"
            );
        }
        let next = self.start_next(lab, "b", "shop_default")?;
        ensure!(!before.starts_with(&format!("{next} ")), "another container on b has its address, {next}");
        engine("b", &["rm", "--force", "next"])?;
        engine("b", &["restart", "--time", "1", self.name])?;
        let now = self.told(lab, "b", ADDRESS)?;
        ensure!(now == before, "its address was {before}, and after a restart it is {now}");
        self.remove(lab, "b")?;
        ["a", "b"].iter().try_for_each(|node| Ok(engine(node, &["network", "rm", "shop_default"]).map(drop)?))
    }

    /// What would collide is named before the freeze: an address that another container has there, a subnet that
    /// overlaps, a network of the same name that is another one. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn names_addresses_that_collide(&self, lab: &Lab, number: u8) -> Result<()> {
        let engine = |node: &str, arguments: &[&str]| (self.command)(lab, node, arguments);
        let counter = self.start(lab, number, &[], &[])?;
        drop(counter);
        let ip = Ipv4Addr::new(10, 77, 0, number);
        let sleep = ["sleep", "1000"].map(str::to_owned);
        (self.run)(lab, "b", "other", ip, self.image, &[], &sleep)?;
        let taken = format!("address {ip} of container {} is that of container other", self.name);
        refused_move(lab, "a", self.name, "b")?.names(BlockerKind::Network, &taken)?;
        engine("b", &["rm", "--force", "other"])?;

        engine("b", &["network", "rm", "lab"])?;
        let wide =
            ["network", "create", "--driver", "macvlan", "--subnet", "10.77.0.0/16", "-o", "parent=eth0", "wide"];
        engine("b", &wide)?;
        let overlaps = "network wide has 10.77.0.0/16 there, which overlaps";
        refused_move(lab, "a", self.name, "b")?.names(BlockerKind::Network, overlaps)?;
        engine("b", &["network", "rm", "wide"])?;
        engine("b", &["network", "create", "--subnet", "10.79.0.0/24", "lab"])?;
        refused_move(lab, "a", self.name, "b")?.names(BlockerKind::Network, "no network lab")?;
        engine("b", &["network", "rm", "lab"])?;
        engine("b", &LAB)?;
        move_container(lab, "a", self.name, "b").context("when nothing is in the way any more")?;
        self.remove(lab, "b")
    }
}
