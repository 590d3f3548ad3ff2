//! The container's own firewall: rules that are listed the same way when they were made again, and connections that stay known.

mod lab;

use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::Instant;

use lab::{Kind, Lab, V4, echo};
use tranship_network::{Announcer, Conntrack, Gate, NodeConntrack, create, ruleset, stand_aside, track, track_on_node};

/// One of each kind of thing that there is.
const RULES: &str = r#"
table inet filter {
    counter refused { packets 5 bytes 300 }
    quota monthly { 10 mbytes used 3 mbytes }
    set friends { type ipv4_addr . inet_service; flags interval; elements = { 10.9.0.0/24 . 7000-7001, 10.8.0.1 . 22 } }
    set seen { type ipv4_addr; size 1024; flags dynamic,timeout; timeout 1h; }
    map doors { type inet_service : verdict; elements = { 22 : jump inner, 53 : accept } }
    chain inner { counter packets 7 bytes 420 accept; }
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept comment "known"
        iifname "lo" accept
        tcp dport vmap @doors
        ip saddr . tcp dport @friends counter packets 1 bytes 60 accept
        tcp dport { 80, 443, 8000-8100 } ip saddr 10.0.0.0/8 limit rate 10/second burst 5 packets accept
        meta mark set ct mark and 0xff
        update @seen { ip saddr }
        quota name "monthly" counter name "refused" drop
    }
}
table ip nat {
    chain prerouting { type nat hook prerouting priority dstnat; tcp dport 7100 redirect to :7000; }
    chain postrouting { type nat hook postrouting priority srcnat; oifname "web0" ip daddr 10.50.0.0/16 masquerade; }
}
table netdev early {
    chain in { type filter hook ingress device "web0" priority 0; policy accept; ip protocol 99 drop; }
}
"#;

fn inside(lab: &Lab, short: &str, command: &[&str], input: &str) -> String {
    let name = lab.name(short);
    let mut child = Command::new("ip")
        .args(["netns", "exec", &name])
        .args(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{command:?} failed");
    String::from_utf8(out.stdout).unwrap()
}

/// What `nft` lists but for the gate, and but for how long an element of a set still stays.
fn rules(lab: &Lab, short: &str) -> String {
    let all = inside(lab, short, &["nft", "-s", "list", "ruleset"], "");
    let mut tables: Vec<_> =
        all.split_inclusive("\n}\n").filter(|table| !table.contains("table netdev tranship")).collect();
    tables.sort_unstable();
    tables.concat()
}

#[test]
fn rules_are_listed_as_before_when_they_were_made_again() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let mut identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    assert_eq!(ruleset::capture(&lab.path("d1")).unwrap(), "", "the gate is not the container's");
    inside(&lab, "d1", &["nft", "-f", "-"], RULES);
    // Matches and targets of iptables, which the kernel wants to know the protocol of.
    for rule in [
        "-A INPUT -p tcp -m tcp --tcp-flags SYN,ACK SYN -m conntrack --ctstate NEW -m limit --limit 3/min -j ACCEPT",
        "-A INPUT -p udp -m multiport --dports 53,67 -m comment --comment names -j REJECT",
        "-t mangle -A POSTROUTING ! -p udp -j MARK --set-mark 7",
    ] {
        inside(&lab, "d1", &[&["iptables-nft"], rule.split(' ').collect::<Vec<_>>().as_slice()].concat(), "");
    }
    identity.ruleset = ruleset::capture(&lab.path("d1")).unwrap();
    lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
    let (before, after) = (rules(&lab, "d1"), rules(&lab, "d2"));
    assert!(before.contains("redirect to :7000") && before.contains("10.8.0.1 . 22"), "{before}");
    assert_eq!(after, before);
    let counters = |short| inside(&lab, short, &["nft", "list", "counters"], "");
    assert!(counters("d2").contains("packets 5 bytes 300"), "{}", counters("d2"));
    // Each of them is its own: what is deleted on one node stays on the other.
    inside(&lab, "d2", &["nft", "flush", "ruleset"], "");
    assert_eq!(rules(&lab, "d1"), before);
}

#[test]
fn a_kernel_that_does_not_take_a_rule_leaves_nothing() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let mut identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    inside(&lab, "d1", &["nft", "-f", "-"], "table ip t { chain c { type filter hook input priority 0; }; }");
    let whole = ruleset::capture(&lab.path("d1")).unwrap();
    // A chain without its table.
    let (_, rest) = whole.split_at(whole.len() / 2 / 4 * 4);
    for bad in [rest, "%"] {
        bad.clone_into(&mut identity.ruleset);
        let refusal = lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap_err().to_string();
        assert!(refusal.contains("make the rules of nftables"), "{refusal}");
        assert!(!lab.path("d2").exists());
    }
}

/// Connections that nothing but conntrack lets through: to the container's port, and to one that is redirected to it.
#[test]
fn tracked_connections_are_known_where_their_rules_were_made_again() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let mut identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    let mut gate = Gate::prepare(&lab.path("d1"), &["web0".into()]).unwrap();
    gate.open().unwrap();
    Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce().unwrap();
    let mut tracked = Conntrack::prepare(&lab.path("d1")).unwrap();
    lab.echo_server("d1", 7000);
    let mut untracked = lab.connect_from("c", V4, 7000).unwrap();
    echo(&mut untracked, b"nobody looks").unwrap();
    assert_eq!(tracked.count().unwrap(), 0, "without rules nothing is tracked");

    inside(&lab, "d1", &["nft", "-f", "-"], RULES);
    let mut streams = [7000, 7100].map(|port| lab.connect_from("c", V4, port).unwrap());
    for stream in &mut streams {
        echo(stream, b"hello").unwrap();
    }
    assert!(tracked.count().unwrap() >= 2);
    gate.close().unwrap();
    let begun = Instant::now();
    let entries = tracked.entries().unwrap();
    let read = begun.elapsed();
    identity.ruleset = ruleset::capture(&lab.path("d1")).unwrap();
    lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
    stand_aside(&lab.path("d1")).unwrap();
    let begun = Instant::now();
    let count = track(&lab.path("d2"), &entries).unwrap();
    println!("{count} tracked connections: read in {read:?}, made known in {:?}", begun.elapsed());
    assert!(count >= 2);

    // They are as they were: the same state, marks and translations; only how long each stays is less by now.
    let list = |short| {
        let all = inside(&lab, short, &["cat", "/proc/self/net/nf_conntrack"], "");
        let words = |line: &str| {
            let words: Vec<_> =
                line.split_whitespace().enumerate().filter(|(n, _)| *n != 4).map(|(_, w)| w.to_owned()).collect();
            words.join(" ")
        };
        let mut lines: Vec<_> = all.lines().filter(|line| line.contains("tcp")).map(words).collect();
        lines.sort();
        lines
    };
    let (before, after) = (list("d1"), list("d2"));
    assert!(before.iter().any(|line| line.contains("dport=7100") && line.contains("sport=7000")), "{before:#?}");
    assert_eq!(after, before);
    assert!(
        track(&lab.path("d2"), &entries[..entries.len().min(20)]).is_ok_and(|count| count == 0),
        "what is cut is not made"
    );
}

#[test]
fn thousands_of_tracked_connections_are_made_known() {
    const COUNT: usize = 5000;
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
    let mut gate = Gate::prepare(&lab.path("d1"), &["web0".into()]).unwrap();
    gate.open().unwrap();
    Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce().unwrap();
    let rules = "table ip t { chain c { type filter hook input priority 0; ct state new counter accept; }; }";
    inside(&lab, "d1", &["nft", "-f", "-"], rules);
    // Each client has a port of its own; nobody answers but with an error.
    let send = || {
        for port in 10_000..10_000 + COUNT as u16 {
            UdpSocket::bind(("10.9.0.1", port)).unwrap().send_to(b"x", (V4, 9)).unwrap();
        }
    };
    let mut tracked = Conntrack::prepare(&lab.path("d1")).unwrap();
    let deadline = Instant::now() + std::time::Duration::from_secs(5);
    while (tracked.count().unwrap() as usize) < COUNT {
        assert!(Instant::now() < deadline, "{} are tracked", tracked.count().unwrap());
        // Some are lost on a busy machine.
        lab.inside("c", send);
    }
    gate.close().unwrap();
    let begun = Instant::now();
    let entries = tracked.entries().unwrap();
    let read = begun.elapsed();
    let begun = Instant::now();
    let count = track(&lab.path("d2"), &entries).unwrap();
    println!(
        "{count} tracked connections: {} bytes, read in {read:?}, made known in {:?}",
        entries.len(),
        begun.elapsed()
    );
    assert_eq!(count, COUNT);
    assert_eq!(Conntrack::prepare(&lab.path("d2")).unwrap().count().unwrap() as usize, COUNT);
}

/// The node's own notes are found by the container's sockets, the translated ones are left alone, and they are made known to another node.
#[test]
fn what_a_node_tracks_of_a_containers_connections_is_made_known_to_another() {
    const COUNT: usize = 2000;
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let mut identity = lab.identity();
    let loopback = std::net::Ipv4Addr::LOCALHOST;
    identity.interfaces[0].addresses = vec![(loopback.into(), 8)];
    // The node's namespace is the container's, too: so it sees its connections.
    let node = lab.path("a");
    let count = |short| Conntrack::prepare(&lab.path(short)).unwrap().count().unwrap() as usize;
    for short in ["a", "b"] {
        lab.ip(&format!("-n {} link set lo up", lab.name(short)));
    }
    let notes = || NodeConntrack::prepare(&node, &identity).unwrap();
    assert!(!lab.inside("a", || notes().any().unwrap()), "without rules nothing is tracked");
    let rules = "table ip t { chain c { type filter hook input priority 0; ct state new counter accept; }; \
                 chain n { type nat hook output priority -100; tcp dport 7200 redirect to :7100; }; }";
    inside(&lab, "a", &["nft", "-f", "-"], rules);
    let (entries, took, _connections) = lab.inside("a", || {
        let listener = TcpListener::bind((loopback, 7100)).unwrap();
        let mut pairs = Vec::new();
        for port in std::iter::repeat_n(7100, COUNT).chain([7200]) {
            pairs.push((TcpStream::connect((loopback, port)).unwrap(), listener.accept().unwrap()));
        }
        let mut notes = notes();
        assert!(notes.any().unwrap());
        let begun = Instant::now();
        let mut entries = Vec::new();
        notes.entries(&mut entries).unwrap();
        (entries, begun.elapsed(), pairs)
    });
    assert_eq!(count("a"), COUNT + 1);
    let begun = Instant::now();
    // Each was found by both of its ends.
    assert_eq!(lab.inside("b", || track_on_node(&identity, &entries)).unwrap(), 2 * COUNT);
    println!("{COUNT} connections, asked for twice: {took:?}, made known in {:?}", begun.elapsed());
    assert_eq!(count("b"), COUNT);
    let listed = inside(&lab, "b", &["cat", "/proc/self/net/nf_conntrack"], "");
    assert!(listed.lines().all(|line| line.contains("ESTABLISHED") && !line.contains("dport=7200")), "{listed}");
}
