//! The lab's network: every node hangs by a veth on one bridge, which has a network namespace of its own so that the
//! host sees nothing of it.
//!
//! ```text
//!    node a          node b          client
//!   eth0 .1         eth0 .2         eth0 .100
//!      │               │               │          10.77.0.0/24
//!    [a]─────────────[b]───────────[client]       ports of bridge br0 in the namespace "switch"
//! ```

use std::fmt::Write;
use std::net::Ipv4Addr;
use std::process::Command;

use crate::amount::Rate;
use crate::error::{LabError, Result};
use crate::program;
use crate::state::{CLIENT, Node, SWITCH};

/// Length of the lab network's prefix.
pub(crate) const PREFIX: u8 = 24;
const NETWORK: [u8; 3] = [10, 77, 0];
const CLIENT_HOST: u8 = 100;
/// Most nodes that a lab can have: a to z.
pub(crate) const MOST_NODES: usize = 26;

/// Name and address of the node of this index; 0 is `a`, 10.77.0.1.
pub(crate) fn node(index: usize) -> (String, Ipv4Addr) {
    let index = u8::try_from(index).unwrap_or(u8::MAX).min(MOST_NODES as u8 - 1);
    (char::from(b'a' + index).to_string(), address(index + 1))
}

/// Name and address of the client node.
pub(crate) fn client() -> (String, Ipv4Addr) {
    (CLIENT.to_owned(), address(CLIENT_HOST))
}

fn address(host: u8) -> Ipv4Addr {
    let [a, b, c] = NETWORK;
    Ipv4Addr::new(a, b, c, host)
}

/// Whether a container could have this address.
pub(crate) fn in_network(ip: Ipv4Addr) -> bool {
    let [a, b, c, host] = ip.octets();
    [a, b, c] == NETWORK && host != 0 && host != 255
}

/// Connects the nodes; all their namespaces exist already.
pub(crate) fn connect(switch: &Node, nodes: &[Node], link: Option<Rate>) -> Result<()> {
    let mut ports =
        "link add name br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0\nlink set br0 up\n".to_owned();
    for node in nodes {
        let (name, pid) = (&node.name, node.init.pid);
        let _ = writeln!(ports, "link add name {name} type veth peer name eth0 netns {pid}");
        let _ = writeln!(ports, "link set dev {name} master br0 up");
    }
    batch("ip", switch, &ports)?;
    for node in nodes {
        let address = node.address;
        batch("ip", node, &format!("link set lo up\naddr add {address}/{PREFIX} dev eth0\nlink set eth0 up\n"))?;
    }
    if let Some(rate) = link {
        let shape = |device: &str| {
            format!("qdisc add dev {device} root tbf rate {}bit burst {} latency 50ms\n", rate.bits, rate.burst())
        };
        batch("tc", switch, &nodes.iter().map(|n| shape(&n.name)).collect::<String>())?;
        for node in nodes {
            batch("tc", node, &shape("eth0"))?;
        }
    }
    Ok(())
}

/// Takes a node's port down or up, at the switch's end.
pub(crate) fn set_port(switch: &Node, name: &str, up: bool) -> Result<()> {
    batch("ip", switch, &format!("link set dev {name} {}\n", if up { "up" } else { "down" }))
}

/// Puts the node's own address on a bridge `br0` that eth0 is a port of, if that has not been done: what `--bridge`
/// containers hang on.
pub(crate) fn ensure_bridge(node: &Node) -> Result<()> {
    let mut listing = in_network_of(node, "ip", &["-json", "-details", "link", "show"])?;
    let output = program::run(format!("listing the interfaces of node {}", node.name), &mut listing, "")?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let find = |name: &str| links.as_array()?.iter().find(|l| l["ifname"] == name);
    if find("br0").is_some() {
        return Ok(());
    }
    let mac = find("eth0").and_then(|l| l["address"].as_str()).unwrap_or_default();
    let address = node.address;
    batch(
        "ip",
        node,
        &format!(
            "link add name br0 address {mac} type bridge forward_delay 0 stp_state 0 mcast_snooping 0\n\
             link set eth0 master br0\naddr del {address}/{PREFIX} dev eth0\naddr add {address}/{PREFIX} dev br0\nlink set br0 up\n"
        ),
    )
}

/// A program in the network namespace of a node, or of the switch, but else on the host.
fn in_network_of(node: &Node, program: &str, arguments: &[&str]) -> Result<Command> {
    if !node.init.is_alive() {
        return Err(LabError::Refused(format!(
            "node {} has died; take the lab down with `tranship-lab down`",
            node.name
        )));
    }
    let mut command = Command::new("nsenter");
    command.arg("--target").arg(node.init.pid.to_string()).args(["--net", "--", program]).args(arguments);
    Ok(command)
}

/// Feeds lines of commands to `ip` or `tc` in a node's network namespace.
fn batch(program: &str, node: &Node, lines: &str) -> Result<()> {
    let place = if node.name == SWITCH { "the switch".to_owned() } else { format!("node {}", node.name) };
    let mut command = in_network_of(node, program, &["-batch", "-"])?;
    program::run(format!("setting up the network of {place}"), &mut command, lines).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_named_by_letters_and_numbered_from_one() {
        assert_eq!(node(0), ("a".to_owned(), Ipv4Addr::new(10, 77, 0, 1)));
        assert_eq!(node(25), ("z".to_owned(), Ipv4Addr::new(10, 77, 0, 26)));
    }

    #[test]
    fn only_host_addresses_of_the_lab_network_are_for_containers() {
        assert!(in_network(Ipv4Addr::new(10, 77, 0, 10)));
        for bad in [Ipv4Addr::new(10, 77, 0, 255), Ipv4Addr::new(10, 77, 0, 0), Ipv4Addr::new(10, 77, 1, 10)] {
            assert!(!in_network(bad), "{bad}");
        }
    }
}
