//! A firewall inside a container's own network namespace.

use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, remove};
use tranship_lab::{CLIENT, Lab};
use tranship_workloads::traffic::{Service, TRAFFIC_PORT};

use super::{IP, NAME, echoes, moves, run};

/// Leads to the container's own port.
const REDIRECTED: u16 = TRAFFIC_PORT + 1;

/// Runs a command inside the container's network namespace.
fn inside(lab: &Lab, node: &str, words: &[&str]) -> Result<String> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let output = lab.within(node, Some(NAME), move || Command::new(&words[0]).args(&words[1..]).output())??;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn connect(lab: &Lab, port: u16, patience: Duration) -> Result<TcpStream> {
    Ok(lab.within(CLIENT, None, move || TcpStream::connect_timeout(&(IP, port).into(), patience))??)
}

/// Whoever is connected goes on because the kernel knows the connection, and nobody else is let in.
pub(super) fn rules_and_what_they_know(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let input = "add chain inet wall input { type filter hook input priority 0; policy drop; }";
    let first = [
        "add table inet wall",
        input,
        "add rule inet wall input meta l4proto { icmp, ipv6-icmp } accept",
        "add rule inet wall input ct state established counter accept",
        &format!("add rule inet wall input tcp dport {TRAFFIC_PORT} ct mark set 0x7 accept"),
        "add chain inet wall pre { type nat hook prerouting priority dstnat; }",
        &format!("add rule inet wall pre tcp dport {REDIRECTED} redirect to :{TRAFFIC_PORT}"),
    ];
    inside(lab, "a", &["nft", &first.join("; ")])?;
    let mut streams = Vec::new();
    for port in [TRAFFIC_PORT, REDIRECTED] {
        let mut stream = connect(lab, port, Duration::from_secs(2)).with_context(|| format!("to port {port}"))?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        stream.write_all(&Service::Echo.to_bytes())?;
        streams.push(stream);
    }
    let mut word = 0;
    let mut all_echo = || {
        streams.iter().enumerate().try_for_each(|(n, stream)| {
            word += 1;
            echoes(stream, word).with_context(|| format!("connection {n} hears nothing"))
        })
    };
    all_echo()?;
    // From now on nothing but the kernel's notes lets them through.
    inside(
        lab,
        "a",
        &["nft", "flush chain inet wall input; add rule inet wall input ct mark 7 ct state established counter accept"],
    )?;
    all_echo()?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = moves(lab, NAME, from, to)?;
        all_echo().with_context(|| format!("after the move to {to}"))?;
        eprintln!("to {to}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        let rules = inside(lab, to, &["nft", "list", "ruleset"])?;
        ensure!(rules.contains("policy drop") && rules.contains(&format!("redirect to :{TRAFFIC_PORT}")), "{rules}");
        ensure!(connect(lab, TRAFFIC_PORT, Duration::from_millis(300)).is_err(), "somebody was let in on {to}");
    }
    remove(lab, NAME)
}
