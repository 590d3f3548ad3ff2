//! Addresses of a container that has left stay reserved in the CNI of its node for as long as it lives elsewhere.

use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tranship_e2e::{Stage, exactly_one_runs, move_container, refused_move, remove, restart_agent, wait_until};
use tranship_lab::{CLIENT, Lab};

use super::{NAME, PATIENCE, run};

const NETWORK: &str = "held";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 56);
const LAST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 59);
const RESERVATIONS: &str = "/var/lib/cni/networks/held";
/// Nodes are asked every 10 s.
const ASKED: Duration = Duration::from_secs(40);

/// What host-local answers when it is to attach or detach a container of this name: the address, or its error.
fn host_local(lab: &Lab, node: &str, verb: &str, container: &str) -> Result<Result<String, String>> {
    let range = json!([[{"subnet": "10.77.0.0/24", "rangeStart": IP, "rangeEnd": LAST}]]);
    let input = json!({"cniVersion": "0.4.0", "name": NETWORK, "ipam": {"type": "host-local", "ranges": range}});
    let script = format!(
        "printf %s '{input}' | CNI_COMMAND={verb} CNI_CONTAINERID={container} CNI_IFNAME=eth0 \
         CNI_NETNS=/run/netns/{container} CNI_PATH=/usr/lib/cni /usr/lib/cni/host-local"
    );
    let output = lab.exec(node, &["sh", "-c", &script])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Ok(Err(text));
    }
    let result: Value = serde_json::from_str(&text).unwrap_or_default();
    Ok(Ok(result["ips"][0]["address"].as_str().unwrap_or_default().to_owned()))
}

fn added(lab: &Lab, node: &str, container: &str) -> Result<String> {
    host_local(lab, node, "ADD", container)?.map_err(anyhow::Error::msg)
}

fn deleted(lab: &Lab, node: &str, container: &str) -> Result<()> {
    host_local(lab, node, "DEL", container)?.map(drop).map_err(anyhow::Error::msg)
}

/// In whose name the container's address is reserved on a node; nothing where it is free.
fn owner(lab: &Lab, node: &str) -> Result<String> {
    let text = fs::read_to_string(lab.path(node, format!("{RESERVATIONS}/{IP}"))?).unwrap_or_default();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn is_held(lab: &Lab, node: &str) -> Result<()> {
    let owner = owner(lab, node)?;
    ensure!(owner == format!("tranship-holds-{NAME}"), "on {node} the address is reserved for {owner:?}");
    Ok(())
}

fn is_own(lab: &Lab, node: &str) -> Result<()> {
    let owner = owner(lab, node)?;
    ensure!(owner == NAME, "on {node} the address is reserved for {owner:?}");
    Ok(())
}

/// The nodes that have the container by what a node says it holds in this network. What others have left goes by itself.
fn listed(lab: &Lab, node: &str) -> Result<Vec<String>> {
    let list: Vec<Value> = serde_json::from_str(&lab.check(node, &["tranship", "release", "--json"])?)?;
    let is_own = |one: &&Value| one["container"] == NAME && one["addresses"][0]["network"] == NETWORK;
    let own = list.iter().filter(is_own);
    Ok(own.map(|one| one["node"].as_str().unwrap_or_default().to_owned()).collect())
}

fn set_holding(lab: &Lab, node: &str, on: bool) -> Result<()> {
    const OFF: &str = "\n[network]\nhold_addresses = false\n";
    let file = lab.path(node, "/etc/tranship/agent.toml")?;
    let text = fs::read_to_string(&file)?.replace(OFF, "");
    fs::write(&file, if on { text } else { text + OFF })?;
    restart_agent(lab, node, "")
}

/// The network's directory on both nodes as if nothing had been.
fn forget(lab: &Lab) -> Result<()> {
    for node in ["a", "b"] {
        lab.check(node, &["rm", "-rf", RESERVATIONS])?;
        let own = format!("! grep -l '\"network\":\"{NETWORK}\"' /var/lib/tranship/held/*.json");
        lab.check(node, &["sh", "-c", &own]).context(node.to_owned())?;
    }
    Ok(())
}

/// The next containers on the node that it has left get other addresses; it comes back to its own.
pub(super) fn until_it_comes_back(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for node in ["a", "b", CLIENT] {
        lab.check(node, &["ip", "neigh", "flush", "all"])?;
    }
    ensure!(added(lab, "a", NAME)? == format!("{IP}/24"), "host-local gave another address");
    run(lab, "a", NAME, IP, true)?;
    let plan = lab.check("a", &["tranship", "move", NAME, "--to", "b", "--dry-run"])?;
    let words = format!("node a keeps {IP} of CNI's network {NETWORK} reserved for it");
    ensure!(plan.contains(&words), "{plan}");

    move_container(lab, "a", NAME, "b")?;
    is_held(lab, "a")?;
    is_own(lab, "b")?;
    ensure!(listed(lab, "a")? == ["b"] && listed(lab, "b")?.is_empty());
    let given: Vec<String> = ["n1", "n2", "n3"].iter().map(|next| added(lab, "a", next)).collect::<Result<_, _>>()?;
    ensure!(given.iter().all(|address| !address.starts_with(&IP.to_string())), "the next ones have {given:?}");
    let full = host_local(lab, "a", "ADD", "n4")?;
    ensure!(
        full.as_ref().is_err_and(|said| said.contains("no IP addresses available")),
        "the range has more: {full:?}"
    );
    ["n1", "n2", "n3"].iter().try_for_each(|next| deleted(lab, "a", next))?;

    // What somebody has removed is held again.
    fs::remove_file(lab.path("a", format!("{RESERVATIONS}/{IP}"))?)?;
    restart_agent(lab, "a", "")?;
    is_held(lab, "a")?;

    // Somebody else got it nevertheless: both owners are named, and the container is not taken back.
    let file = lab.path("a", format!("{RESERVATIONS}/{IP}"))?;
    fs::write(&file, "another\r\neth0")?;
    let found = lab.check("a", &["tranship", "doctor"])?;
    ensure!(found.contains(&format!("container {NAME} on node b and container another on this one")), "{found}");
    let refusal = refused_move(lab, "b", NAME, "a")?;
    ensure!(refusal.text.contains(&format!("{IP} to container another already")), "{refusal:?}");
    fs::remove_file(&file)?;
    wait_until("the address to be held again", ASKED, || Ok(is_held(lab, "a").ok()))?;

    // It does not come back after all.
    restart_agent(lab, "a", "destination.restore.after.error")?;
    ensure!(move_container(lab, "b", NAME, "a").is_err(), "the move did not fail");
    ensure!(exactly_one_runs(lab, NAME)? == "b", "it is not on b");
    is_held(lab, "a")?;
    is_own(lab, "b")?;
    restart_agent(lab, "a", "")?;

    move_container(lab, "b", NAME, "a")?;
    is_own(lab, "a")?;
    is_held(lab, "b")?;
    ensure!(listed(lab, "a")?.is_empty() && listed(lab, "b")? == ["a"]);

    // It ends: its owner has CNI detach it.
    remove(lab, NAME)?;
    deleted(lab, "a", NAME)?;
    let begun = Instant::now();
    wait_until("b to release the address", ASKED, || Ok(owner(lab, "b")?.is_empty().then_some(())))?;
    eprintln!("released after {:?}", begun.elapsed());
    ensure!(listed(lab, "b")?.is_empty(), "b lists it still");
    forget(lab)
}

/// Agents that die, holding that is turned off, and what is released by command.
pub(super) fn unless_it_is_released(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for node in ["a", "b", CLIENT] {
        lab.check(node, &["ip", "neigh", "flush", "all"])?;
    }
    added(lab, "a", NAME)?;
    run(lab, "a", NAME, IP, true)?;

    // The node's agent dies when the original is gone; the next one knows what it holds.
    restart_agent(lab, "a", "source.release.after.die")?;
    let _ = move_container(lab, "a", NAME, "b");
    lab.start_agent("a", &[])?;
    wait_until("the move to end", PATIENCE, || {
        let status = lab.check("a", &["tranship", "status", NAME])?;
        Ok(status.contains("moved").then_some(()))
    })?;
    is_held(lab, "a")?;
    is_own(lab, "b")?;

    // It lives there, and its node says so.
    let refused = lab.exec("a", &["tranship", "release", NAME])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && said.contains("on node b"), "{said}");
    is_held(lab, "a")?;
    let released = lab.check("a", &["tranship", "release", NAME, "--even-if-alive"])?;
    ensure!(released.contains(&IP.to_string()) && owner(lab, "a")?.is_empty(), "{released}");
    ensure!(!lab.exec("a", &["tranship", "release", NAME])?.status.success(), "it is released twice");

    // A reservation whose record is gone.
    fs::write(lab.path("a", format!("{RESERVATIONS}/{LAST}"))?, "tranship-holds-nobody\r\neth0")?;
    let found = lab.exec("a", &["tranship", "doctor"])?;
    let text = String::from_utf8_lossy(&found.stdout).into_owned();
    ensure!(!found.status.success() && text.contains("held for nobody"), "{text}");
    lab.check("a", &["tranship", "doctor", "--fix"])?;
    ensure!(!lab.path("a", format!("{RESERVATIONS}/{LAST}"))?.exists(), "the doctor left it");

    // Turned off: b gives the address away, but says where the container went.
    set_holding(lab, "b", false)?;
    move_container(lab, "b", NAME, "a")?;
    ensure!(owner(lab, "b")?.is_empty() && listed(lab, "b")?.is_empty(), "b holds it");
    is_own(lab, "a")?;
    set_holding(lab, "b", true)?;
    move_container(lab, "a", NAME, "b")?;
    is_held(lab, "a")?;

    // Its node's agent dies when it has come back, before it has noted that.
    restart_agent(lab, "a", "destination.tidy.before.die")?;
    let _ = move_container(lab, "b", NAME, "a");
    lab.start_agent("a", &[])?;
    wait_until("a to forget what it held", PATIENCE, || Ok(listed(lab, "a")?.is_empty().then_some(())))?;
    is_own(lab, "a")?;
    is_held(lab, "b")?;
    wait_until("the move to end", PATIENCE, || {
        Ok((!lab.check("b", &["tranship", "status"])?.contains(NAME)).then_some(()))
    })?;
    move_container(lab, "a", NAME, "b")?;
    is_held(lab, "a")?;

    // A node that is gone for good.
    lab.kill_agent("b")?;
    lab.check("a", &["tranship", "release", NAME])?;
    ensure!(owner(lab, "a")?.is_empty(), "a holds it still");
    lab.start_agent("b", &[])?;
    remove(lab, NAME)?;
    deleted(lab, "b", NAME)?;
    forget(lab)
}
