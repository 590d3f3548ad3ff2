//! A container that CNI has attached: what the plugins keep about it moves with it. The plugins are Debian's.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tranship_e2e::{
    Moving, Stage, exactly_one_runs, is_gone, move_container, refused_move, remove, restart_agent, wait_until,
};
use tranship_lab::{CLIENT, Lab};
use tranship_types::Mode;
use tranship_workloads::traffic::{Stream, TRAFFIC_PORT, Way};

use super::places::{RATE, go_on};
use super::{NAME, PATIENCE, connect, run};

const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 53);
const NETWORK: &str = "lan";
/// By what name it was attached, which is not the container's.
const ID: &str = "attached-9";
/// In whose name a node keeps the address of one that has left it.
const HOLDER: &str = "tranship-holds-";
const PUBLISHED: u16 = 8080;
const RESERVATIONS: &str = "/var/lib/cni/networks/lan";
const RESULT: &str = "/var/lib/cni/results/lan-attached-9-eth0";

fn network() -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": NETWORK,
        "plugins": [
            {"type": "bridge", "bridge": "br0", "ipam": {"type": "host-local", "ranges": [[
                {"subnet": "10.77.0.0/24", "rangeStart": IP.to_string(), "rangeEnd": IP.to_string()}
            ]]}},
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "firewall", "backend": "iptables"},
        ],
    })
}

fn ports() -> Value {
    json!([{"hostPort": PUBLISHED, "containerPort": TRAFFIC_PORT, "protocol": "tcp"}])
}

/// What a plugin says to a verb.
fn call(lab: &Lab, node: &str, verb: &str, plugin: &str, input: &Value) -> Result<String> {
    call_for("eth0", lab, node, verb, plugin, input)
}

/// The same for another interface.
fn call_for(interface: &str, lab: &Lab, node: &str, verb: &str, plugin: &str, input: &Value) -> Result<String> {
    let script = format!(
        "printf %s '{input}' | CNI_COMMAND={verb} CNI_CONTAINERID={ID} CNI_IFNAME={interface} \
         CNI_NETNS=/run/netns/{NAME} CNI_PATH=/usr/lib/cni /usr/lib/cni/{plugin}"
    );
    lab.check(node, &["sh", "-c", &script]).with_context(|| format!("{plugin} {verb} on {node}"))
}

/// What the plugin portmap is given by libcni.
fn portmap(result: &Value) -> Value {
    json!({
        "cniVersion": "0.4.0", "name": NETWORK, "type": "portmap", "capabilities": {"portMappings": true},
        "runtimeConfig": {"portMappings": ports()}, "prevResult": result,
    })
}

/// What the plugin firewall is given.
fn firewall(result: &Value) -> Value {
    json!({"cniVersion": "0.4.0", "name": NETWORK, "type": "firewall", "backend": "iptables", "prevResult": result})
}

fn host_local() -> Value {
    json!({"cniVersion": "0.4.0", "name": NETWORK, "ipam": network()["plugins"][0]["ipam"]})
}

/// In base64, as libcni caches a configuration.
fn encoded(lab: &Lab, value: &Value) -> Result<String> {
    let text = lab.check(CLIENT, &["sh", "-c", &format!("printf %s '{value}' | base64 -w 0")])?;
    Ok(text.trim().to_owned())
}

/// Attaches the container as libcni does; its interface is there.
fn attach(lab: &Lab, node: &str) -> Result<()> {
    call(lab, node, "ADD", "host-local", &host_local())?;
    let result = json!({
        "cniVersion": "0.4.0",
        "interfaces": [
            {"name": "br0", "mac": "02:00:00:00:00:01"},
            {"name": "veth12345678", "mac": "02:00:00:00:00:02"},
            {"name": "eth0", "mac": "02:00:00:00:00:03", "sandbox": format!("/var/run/netns/{NAME}")},
        ],
        "ips": [{"version": "4", "interface": 2, "address": format!("{IP}/24")}],
        "dns": {},
    });
    call(lab, node, "ADD", "portmap", &portmap(&result))?;
    call(lab, node, "ADD", "firewall", &firewall(&result))?;
    let config = encoded(lab, &network())?;
    let cached = json!({
        "kind": "cniCacheV1", "containerId": ID, "config": config, "ifName": "eth0", "networkName": NETWORK,
        "capabilityArgs": {"portMappings": ports()}, "result": result,
    });
    let path = lab.path(node, RESULT)?;
    fs::create_dir_all(path.parent().context("a file has a directory")?)?;
    Ok(fs::write(path, cached.to_string())?)
}

/// Takes back on a node what `attach`, or a move, has made there.
fn detach(lab: &Lab, node: &str) -> Result<()> {
    let cached: Value = serde_json::from_slice(&fs::read(lab.path(node, RESULT)?)?)?;
    call(lab, node, "DEL", "firewall", &firewall(&cached["result"]))?;
    call(lab, node, "DEL", "portmap", &portmap(&cached["result"]))?;
    call(lab, node, "DEL", "host-local", &host_local())?;
    Ok(fs::remove_file(lab.path(node, RESULT)?)?)
}

/// Whether a node's CNI knows the container: altogether, or not at all.
fn knows(lab: &Lab, node: &str) -> Result<bool> {
    let reserved = fs::read_to_string(lab.path(node, format!("{RESERVATIONS}/{IP}"))?).ok();
    let reserved = reserved.filter(|text| !text.starts_with(HOLDER));
    let cached = lab.path(node, RESULT)?.exists();
    let rules = lab.check(node, &["iptables", "-t", "nat", "-S"])?;
    let published = rules.lines().filter(|rule| rule.contains(ID)).count();
    let filter = lab.check(node, &["iptables", "-S"])?;
    let both_ways = [format!("-s {IP}/32"), format!("-d {IP}/32")];
    let let_through = both_ways.iter().filter(|way| filter.lines().any(|rule| rule.contains(*way))).count();
    match (reserved.as_deref(), cached, published, let_through) {
        (Some(text), true, 1.., 2) => {
            ensure!(text == format!("{ID}\r\neth0"), "on {node} the reservation says {text:?}");
            Ok(true)
        }
        (None, false, 0, 0) => Ok(false),
        other => anyhow::bail!("CNI on {node} knows half of it: {other:?}\n{rules}\n{filter}"),
    }
}

fn is_known_on(lab: &Lab, node: &str) -> Result<()> {
    for each in ["a", "b"] {
        ensure!(knows(lab, each)? == (each == node), "{each}, where it should be on {node}");
    }
    Ok(())
}

/// A connection from a node to the port that it publishes.
fn published(lab: &Lab, node: &str) -> Result<Stream> {
    let to: SocketAddr = (lab.address(node)?, PUBLISHED).into();
    let stream = lab.connect(node, to, Duration::from_secs(2)).with_context(|| format!("published on {node}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Stream::begin(stream, Way::Both, Some(RATE), &[])
}

pub(super) fn attached(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, true)?;
    attach(lab, "a")?;
    is_known_on(lab, "a")?;
    let streams = [Stream::begin(connect(lab, IP)?, Way::Both, Some(RATE), &[])?, published(lab, "a")?];
    go_on(&streams)?;

    // The address is somebody else's there: refused, and nothing has changed.
    let taken = lab.path("b", format!("{RESERVATIONS}/{IP}"))?;
    fs::create_dir_all(taken.parent().context("a file has a directory")?)?;
    fs::write(&taken, "another\r\neth0")?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    let words = format!("{IP} to container another already");
    ensure!(refusal.text.contains(&words) || refusal.sentence.contains(&words), "{refusal:?}");
    ensure!(fs::read_to_string(&taken)?.starts_with("another"), "the reservation of another container is gone");
    fs::remove_file(&taken)?;
    is_known_on(lab, "a")?;

    // A move that fails in the freeze.
    restart_agent(lab, "b", "destination.restore.after.error")?;
    ensure!(move_container(lab, "a", NAME, "b").is_err(), "the move did not fail");
    restart_agent(lab, "b", "")?;
    ensure!(exactly_one_runs(lab, NAME)? == "a", "it is not on a");
    is_known_on(lab, "a")?;
    go_on(&streams).context("after a move that failed")?;

    // What a destination leaves that dies and loses its journal.
    restart_agent(lab, "b", "destination.restore.after.die")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Cold, &[])?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    lab.check("b", &["sh", "-c", "rm /var/lib/tranship/journal/* /run/tranship/migrations/*/begin"])?;
    lab.start_agent("b", &[])?;
    ensure!(!moving.end()?.success, "the move went on without its agent");
    ensure!(knows(lab, "b")?, "the dead agent has left nothing that the doctor could find");
    lab.check("b", &["tranship", "doctor", "--fix"])?;
    is_known_on(lab, "a")?;
    go_on(&streams).context("after the doctor")?;

    super::moves(lab, NAME, "a", "b")?;
    is_known_on(lab, "b")?;
    // That through the port of the node which it has left goes on as well: the kernel there knows the connection.
    go_on(&streams).context("after the move")?;
    let new = published(lab, "b")?;
    go_on(std::slice::from_ref(&new)).context("at the new node's port")?;
    let left: SocketAddr = (lab.address("a")?, PUBLISHED).into();
    ensure!(lab.connect("a", left, Duration::from_secs(2)).is_err(), "the old node's port is still published");

    super::moves(lab, NAME, "b", "a")?;
    is_known_on(lab, "a")?;
    go_on(&streams).context("after the move back")?;
    go_on(std::slice::from_ref(&new)).context("after the move back")?;
    super::places::end(streams.into_iter().chain([new]).collect())?;
    detach(lab, "a")?;
    ensure!(!knows(lab, "a")?, "the plugins' DEL has left something");
    remove(lab, NAME)
}

/// The same where iptables keeps its rules as it always has, not in nftables.
pub(super) fn attached_with_legacy_iptables(stage: &mut Stage) -> Result<()> {
    const PROGRAMS: [&str; 2] = ["/usr/sbin/xtables-legacy-multi", "/usr/sbin/xtables-nft-multi"];
    for node in ["a", "b"] {
        stage.lab.check(node, &["mount", "--bind", PROGRAMS[0], PROGRAMS[1]])?;
        let version = stage.lab.check(node, &["iptables", "--version"])?;
        ensure!(version.contains("legacy"), "{version}");
    }
    // They may know the one before, at the same address.
    for node in ["a", "b", CLIENT] {
        stage.lab.check(node, &["ip", "neigh", "flush", "all"])?;
    }
    attached(stage)?;
    for node in ["a", "b"] {
        stage.lab.check(node, &["umount", PROGRAMS[1]])?;
    }
    Ok(())
}

/// An interface that a plugin has made itself: at the destination the plugin takes what has come there for its own.
fn made_by(stage: &mut Stage, plugin: &str, bridge: bool) -> Result<()> {
    // Those of one scenario are known to the client for a while, with the hardware addresses that they had.
    let host = if bridge { 54 } else { 55 };
    let (ip, address) = (Ipv4Addr::new(10, 77, 0, host), Ipv4Addr::new(10, 79, 0, host));
    let (key, parent) = if bridge { ("bridge", "br0") } else { ("master", "eth0") };
    const CLIENTS: &str = "10.79.0.100/24";
    const INTERFACE: &str = "eth1";
    let lab = &stage.lab;
    run(lab, "a", NAME, ip, bridge)?;
    lab.check(CLIENT, &["ip", "addr", "add", CLIENTS, "dev", "eth0"])?;
    let range =
        json!([[{"subnet": "10.79.0.0/24", "rangeStart": address.to_string(), "rangeEnd": address.to_string()}]]);
    let config = json!({
        "cniVersion": "0.4.0", "name": NETWORK, "type": plugin, key: parent,
        "ipam": {"type": "host-local", "ranges": range},
    });
    let asks = |node: &str, verb: &str, input: &Value| call_for(INTERFACE, lab, node, verb, plugin, input);
    let result: Value = serde_json::from_str(&asks("a", "ADD", &config)?)?;
    let cached = json!({
        "kind": "cniCacheV1", "containerId": ID, "ifName": INTERFACE, "networkName": NETWORK, "result": result,
        "config": encoded(lab, &json!({"cniVersion": "0.4.0", "name": NETWORK, "plugins": [config]}))?,
    });
    let path = |node: &str| lab.path(node, format!("/var/lib/cni/results/{NETWORK}-{ID}-{INTERFACE}"));
    fs::create_dir_all(path("a")?.parent().context("a file has a directory")?)?;
    fs::write(path("a")?, cached.to_string())?;

    let stream = lab.connect(CLIENT, (address, TRAFFIC_PORT).into(), Duration::from_secs(2))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let streams = [Stream::begin(stream, Way::Both, Some(RATE), &[])?];
    go_on(&streams)?;
    let reserved = |node: &str| {
        let text = fs::read_to_string(lab.path(node, format!("{RESERVATIONS}/{address}"))?);
        Ok::<_, anyhow::Error>(text.is_ok_and(|text| !text.starts_with(HOLDER)))
    };
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        super::moves(lab, NAME, from, to)?;
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
        ensure!(reserved(to)? && !reserved(from)?, "the address is reserved on {to}: {}", reserved(to)?);
        ensure!(!path(from)?.exists(), "the result is still on {from}");
        let moved: Value = serde_json::from_slice(&fs::read(path(to)?)?)?;
        let mut input = config.clone();
        input["prevResult"] = moved["result"].clone();
        asks(to, "CHECK", &input).with_context(|| format!("after the move to {to}"))?;
    }
    super::places::end(streams.into())?;
    asks("b", "DEL", &config)?;
    ensure!(!reserved("b")?, "the plugin's DEL has left the reservation");
    let links = lab.check("b", &["ip", "-n", NAME, "link"])?;
    ensure!(!links.contains(INTERFACE), "the plugin's DEL has left {links}");
    fs::remove_file(path("b")?)?;
    lab.check(CLIENT, &["ip", "addr", "del", CLIENTS, "dev", "eth0"])?;
    remove(lab, NAME)
}

pub(super) fn made_by_macvlan(stage: &mut Stage) -> Result<()> {
    made_by(stage, "macvlan", false)
}

pub(super) fn made_by_bridge(stage: &mut Stage) -> Result<()> {
    made_by(stage, "bridge", true)
}
