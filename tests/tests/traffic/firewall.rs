//! Firewalls that go by states: inside a container's own network namespace, and on the nodes that forward to it.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, remove};
use tranship_lab::{CLIENT, Lab};
use tranship_workloads::traffic::{Service, Stream, TRAFFIC_PORT, Way};

use super::places::go_on;
use super::{IP, NAME, PATIENCE, echoes, moves, run};

/// Leads to the container's own port.
const REDIRECTED: u16 = TRAFFIC_PORT + 1;

/// Runs a command inside the container's network namespace.
fn inside(lab: &Lab, node: &str, words: &[&str]) -> Result<String> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let output = lab.within(node, Some(NAME), move || Command::new(&words[0]).args(&words[1..]).output())??;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn connect(lab: &Lab, to: impl Into<IpAddr>, port: u16, patience: Duration) -> Result<TcpStream> {
    let to = SocketAddr::new(to.into(), port);
    lab.within(CLIENT, None, move || TcpStream::connect_timeout(&to, patience))?.with_context(|| format!("to {to}"))
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
        let mut stream = connect(lab, IP, port, PATIENCE)?;
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
        ensure!(connect(lab, IP, TRAFFIC_PORT, Duration::from_millis(300)).is_err(), "somebody was let in on {to}");
    }
    remove(lab, NAME)
}

/// Of what the container sends through a node that knows the connection.
const LONGEST_GAP: Duration = Duration::from_secs(1);

/// Nodes that let through what belongs to connections that they know, and nothing else but neighbours' questions.
const KNOWN_ALONE: &str = "flush chain inet wall pass; add rule inet wall pass meta l4proto ipv6-icmp accept; \
                           add rule inet wall pass ct state established counter accept";

/// Connections over either address family, some that the client asks on and some on which the container sends by itself, through nodes that have no other rule for them than that they are known.
pub(super) fn what_nodes_know_that_filter_what_they_forward(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    // One of its own: the client still knows the hardware addresses of those before.
    const FILTERED_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 38);
    const IPV6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x38);
    run(lab, "a", NAME, FILTERED_IP, true)?;
    for (node, words) in [
        ("a", format!("ip -n {NAME} addr add {IPV6}/64 dev eth0 nodad")),
        (CLIENT, "ip addr add fd77::100/64 dev eth0 nodad".to_owned()),
    ] {
        lab.check(node, &words.split(' ').collect::<Vec<_>>())?;
    }
    for node in ["a", "b"] {
        for family in ["iptables", "ip6tables"] {
            lab.check(node, &["sysctl", "-qw", &format!("net.bridge.bridge-nf-call-{family}=1")])?;
        }
        let pass = "add chain inet wall pass { type filter hook forward priority 0; policy drop; }";
        lab.check(node, &["nft", &format!("add table inet wall; {pass}; {KNOWN_ALONE}")])?;
    }
    lab.check("a", &["nft", "add rule inet wall pass ct state new accept"])?;
    let mut echo = Vec::new();
    let mut streams = Vec::new();
    for address in [IpAddr::from(FILTERED_IP), IPV6.into()] {
        let mut stream = connect(lab, address, TRAFFIC_PORT, PATIENCE)?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        stream.write_all(&Service::Echo.to_bytes())?;
        echo.push(stream);
        streams.push(Stream::begin(connect(lab, address, TRAFFIC_PORT, PATIENCE)?, Way::In, None, &[])?);
    }
    let mut word = 0;
    let mut all_echo = || {
        echo.iter().try_for_each(|stream| {
            word += 1;
            echoes(stream, word)
        })
    };
    all_echo()?;
    go_on(&streams)?;
    lab.check("a", &["nft", KNOWN_ALONE])?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        // Its counters begin anew.
        lab.check(to, &["nft", KNOWN_ALONE])?;
        let report = moves(lab, NAME, from, to)?;
        eprintln!("to {to}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
        all_echo().with_context(|| format!("after the move to {to}"))?;
        let let_through = lab.check(to, &["nft", "list", "ruleset"])?;
        ensure!(
            let_through.contains("established counter packets") && !let_through.contains("packets 0"),
            "{let_through}"
        );
        let stranger = connect(lab, FILTERED_IP, TRAFFIC_PORT, Duration::from_millis(300));
        ensure!(stranger.is_err(), "somebody was let in on {to}");
    }
    for (n, stream) in streams.into_iter().enumerate() {
        let gap = Duration::from_millis(stream.end().with_context(|| format!("stream {n}"))?.longest_gap_ms() as u64);
        eprintln!("stream {n}: longest gap {gap:?}");
        ensure!(gap < LONGEST_GAP, "stream {n}: nothing came for {gap:?}");
    }
    for node in ["a", "b"] {
        lab.check(node, &["nft", "delete table inet wall"])?;
        for family in ["iptables", "ip6tables"] {
            lab.check(node, &["sysctl", "-qw", &format!("net.bridge.bridge-nf-call-{family}=0")])?;
        }
    }
    lab.check(CLIENT, &["ip", "addr", "del", "fd77::100/64", "dev", "eth0"])?;
    remove(lab, NAME)
}
