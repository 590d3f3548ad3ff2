//! Where the other end of a connection is: on either node, in a container that moves too, behind a router; by which interface and
//! address family it is reached.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{Capture, Moving, Stage, dry_run, exactly_one_runs, refused_move, remove, wait_until};
use tranship_lab::{CLIENT, Lab, RunOptions};
use tranship_types::Mode;
use tranship_workloads::traffic::{Service, Stream, TRAFFIC_PORT, Way};

use super::kinds::{begin_datagrams, end_datagrams};
use super::{IP, NAME, PATIENCE, address, connect, moves, run};

const OTHER: &str = "other";
const BRIDGED_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 35);
const OTHER_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 32);
/// Bytes a second of each stream.
pub(super) const RATE: u32 = 4 << 20;

/// A stream from the client through the container at `by` to the one at `to` and back the same way.
fn chain(lab: &Lab, by: Ipv4Addr, to: Ipv4Addr) -> Result<Stream> {
    let relay = Service::Relay(SocketAddrV4::new(to, TRAFFIC_PORT));
    Stream::begin(connect(lab, by)?, Way::Both, Some(RATE), &[relay])
}

/// Checks that the streams still run.
pub(super) fn go_on(streams: &[Stream]) -> Result<()> {
    std::thread::sleep(Duration::from_millis(300));
    match streams.iter().position(|stream| !stream.goes_on()) {
        Some(n) => bail!("stream {n} has ended"),
        None => Ok(()),
    }
}

pub(super) fn end(streams: Vec<Stream>) -> Result<()> {
    for (n, stream) in streams.into_iter().enumerate() {
        let course = stream.end().with_context(|| format!("stream {n}"))?;
        eprintln!("stream {n}: longest gap {} ms", course.longest_gap_ms());
    }
    Ok(())
}

pub(super) fn peers_on_both_nodes(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    const STAY: [(&str, &str, Ipv4Addr); 2] =
        [("a", "stays-a", Ipv4Addr::new(10, 77, 0, 33)), ("b", "stays-b", Ipv4Addr::new(10, 77, 0, 34))];
    run(lab, "a", NAME, IP, false)?;
    for (node, name, ip) in STAY {
        run(lab, node, name, ip, false)?;
    }
    let mut streams = Vec::new();
    for (_, _, ip) in STAY {
        streams.push(chain(lab, ip, IP)?);
        streams.push(chain(lab, IP, ip)?);
    }
    go_on(&streams)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moves(lab, NAME, from, to)?;
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
    }
    end(streams)?;
    for name in [NAME, STAY[0].1, STAY[1].1] {
        remove(lab, name)?;
    }
    Ok(())
}

/// Moves two containers at the same time, each from one node to another one.
fn move_at_once(lab: &Lab, ways: [(&str, &str, &str); 2]) -> Result<()> {
    let moving = ways.map(|(name, from, to)| Moving::begin(lab, name, from, to, Mode::Auto));
    for ((name, _, to), moving) in ways.into_iter().zip(moving) {
        let ended = moving?.end()?;
        ensure!(ended.success, "{name} was not moved to {to}: {}", ended.error());
        ensure!(exactly_one_runs(lab, name)? == to, "{name} is not on {to}");
    }
    Ok(())
}

pub(super) fn both_ends(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    run(lab, "a", OTHER, OTHER_IP, false)?;
    let resets = Capture::begin(&format!("(host {IP} or host {OTHER_IP}) and tcp[tcpflags] & tcp-rst != 0"))?;
    let streams = vec![chain(lab, IP, OTHER_IP)?, chain(lab, OTHER_IP, IP)?];
    go_on(&streams)?;
    // One leaves, the other follows, one comes back.
    for (name, from, to) in [(NAME, "a", "b"), (OTHER, "a", "b"), (NAME, "b", "a")] {
        moves(lab, name, from, to)?;
        go_on(&streams).with_context(|| format!("after {name} has gone to {to}"))?;
    }
    // They change places, at the same time, and again.
    for (here, there) in [("a", "b"), ("b", "a")] {
        move_at_once(lab, [(NAME, here, there), (OTHER, there, here)])?;
        go_on(&streams).with_context(|| format!("after both have moved, one to {there}"))?;
    }
    // And both the same way.
    moves(lab, OTHER, "b", "a")?;
    go_on(&streams).context("after both are on a again")?;
    move_at_once(lab, [(NAME, "a", "b"), (OTHER, "a", "b")])?;
    go_on(&streams).context("after both have moved to b")?;
    end(streams)?;
    let resets = resets.end()?;
    ensure!(resets.is_empty(), "resets were seen: {resets:#?}");
    remove(lab, NAME)?;
    remove(lab, OTHER)
}

pub(super) fn behind_a_router(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    // The client node forwards between the lab's network and another one, in which there is one host.
    let router = lab.address(CLIENT)?.to_string();
    let ip = |words: &str| lab.check(CLIENT, &[&["ip"], words.split(' ').collect::<Vec<_>>().as_slice()].concat());
    ip("netns add beyond")?;
    ip("link add far type veth peer name eth0 netns beyond")?;
    ip("addr add 10.78.0.1/24 dev far")?;
    ip("link set far up")?;
    ip("-n beyond addr add 10.78.0.2/24 dev eth0")?;
    ip("-n beyond link set eth0 up")?;
    ip("-n beyond route add default via 10.78.0.1")?;
    lab.check(CLIENT, &["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])?;
    lab.check("a", &["ip", "-n", NAME, "route", "add", "10.78.0.0/24", "via", &router])?;

    let limit = Duration::from_secs(2);
    let mut streams = Vec::new();
    for way in [Way::Out, Way::In, Way::Both] {
        let stream = lab.within(CLIENT, Some("beyond"), move || TcpStream::connect_timeout(&address(IP), limit))??;
        streams.push(Stream::begin(stream, way, (way != Way::In).then_some(RATE), &[])?);
    }
    go_on(&streams)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moves(lab, NAME, from, to)?;
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
    }
    end(streams)?;
    ip("netns delete beyond")?;
    remove(lab, NAME)
}

pub(super) fn bridged(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, BRIDGED_IP, true)?;
    let mut streams = vec![Stream::begin(connect(lab, BRIDGED_IP)?, Way::Both, Some(RATE), &[])?];
    // Across a bridge the nodes themselves reach the container.
    for node in ["a", "b"] {
        let stream = lab.connect(node, address(BRIDGED_IP), Duration::from_secs(2))?;
        streams.push(Stream::begin(stream, Way::Both, Some(RATE), &[])?);
    }
    let datagrams = begin_datagrams(lab, BRIDGED_IP)?;
    go_on(&streams)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moves(lab, NAME, from, to)?;
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
    }
    end_datagrams(datagrams, 2)?;
    end(streams)?;
    remove(lab, NAME)
}

/// Two runc containers talk across a bridge. While it leads to the other node, no move parts them; where it ends at the
/// node, the plan names the other.
pub(super) fn on_a_bridge_of_the_node(stage: &mut Stage) -> Result<()> {
    // Not those of the scenarios before: whoever has talked to those remembers where they were.
    let [ip, other_ip] = [36, 39].map(|number| Ipv4Addr::new(10, 77, 0, number));
    let lab = &stage.lab;
    run(lab, "a", NAME, ip, true)?;
    let mut options = RunOptions::new(other_ip, ["sleep", "1000"]);
    options.bridge = true;
    lab.run("a", OTHER, &options)?;
    // The connection is held open by a shell in the other one.
    let hold = format!("exec 3<>/dev/tcp/{ip}/{TRAFFIC_PORT}; exec sleep 1000");
    // The process that stays must not have the pipes of this one.
    let detached = "exec runc exec --detach \"$0\" bash -c \"$1\" < /dev/null > /dev/null 2>&1";
    lab.check("a", &["sh", "-c", detached, OTHER, &hold])?;
    let parted = || Ok::<_, anyhow::Error>(dry_run(lab, "a", NAME, "b")?.local_networks);
    wait_until("the connection", PATIENCE, || {
        let sockets = lab.check("a", &["ip", "netns", "exec", OTHER, "cat", "/proc/net/tcp"])?;
        Ok(sockets.contains(" 01 ").then_some(()))
    })?;
    ensure!(parted()?.is_empty(), "br0 leads to b, and the plan has {:?}", parted()?);
    for node in ["a", "b"] {
        lab.check(node, &["ip", "link", "add", "br9", "type", "bridge"])?;
        lab.check(node, &["ip", "link", "set", "br9", "up"])?;
    }
    let apart = "for name in \"$@\"; do \
                 index=$(ip netns exec $name cat /sys/class/net/eth0/iflink); \
                 ip link set $(ip -o link | sed -n \"s/^$index: \\([^@:]*\\).*/\\1/p\") master br9; done";
    lab.check("a", &["sh", "-c", apart, "sh", NAME, OTHER])?;
    let networks = parted()?;
    let [network] = networks.as_slice() else { bail!("the plan has {networks:?}") };
    let [neighbour] = network.neighbours.as_slice() else { bail!("the plan has {network:?}") };
    ensure!((&*network.bridge, &*network.together) == ("br9", &[NAME.to_owned(), OTHER.to_owned()]), "{network:?}");
    ensure!(
        (&*neighbour.container, neighbour.connections) == (OTHER, 1) && neighbour.names.is_empty(),
        "{neighbour:?}"
    );
    remove(lab, NAME)?;
    remove(lab, OTHER)?;
    ["a", "b"].iter().try_for_each(|node| Ok(lab.check(node, &["ip", "link", "delete", "br9"]).map(drop)?))
}

/// What makes up the network identity of the container on a node, as the usual tools show it.
fn identity(lab: &Lab, node: &str) -> Result<String> {
    const SHOW: &str = "head /sys/class/net/eth?/address /sys/class/net/eth?/mtu; ip -o addr show up | sed 's/ *valid_lft.*//; s/ brd [^ ]*//; s/ tentative//'; ip route; \
                        ip -6 route; ip route show table 100; ip neigh show nud permanent; sysctl net.ipv4.tcp_keepalive_time \
                        net.ipv4.tcp_fin_timeout net.ipv4.conf.eth1.log_martians net.ipv6.conf.eth1.hop_limit";
    Ok(lab.check(node, &["ip", "netns", "exec", NAME, "sh", "-c", SHOW])?)
}

/// Streams over a second interface and over IPv6 on both.
pub(super) fn several_interfaces(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let ip =
        |node: &str, words: &str| lab.check(node, &[&["ip"], words.split(' ').collect::<Vec<_>>().as_slice()].concat());
    ip("a", &format!("link add link eth0 name eth1 netns {NAME} type macvlan mode bridge"))?;
    ip("a", &format!("-n {NAME} link set eth1 mtu 1400 up"))?;
    for (interface, address) in [("eth0", "fd77::31/64"), ("eth1", "10.79.0.31/24"), ("eth1", "fd79::31/64")] {
        let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
        let inside = ["ip", "-n", NAME, "addr", "add", address, "dev", interface];
        lab.check("a", &[&inside, nodad].concat())?;
        let client = address.replace("31/", "100/");
        lab.check(CLIENT, &[&["ip", "addr", "add", &client, "dev", "eth0"], nodad].concat())?;
    }
    // A client of another subnet, to which the container knows no way but by a policy rule.
    ip("a", &format!("-n {NAME} addr add 10.79.0.32/24 dev eth1"))?;
    ip("a", &format!("-n {NAME} route add 10.99.0.0/16 via 10.79.0.100 table 100"))?;
    ip("a", &format!("-n {NAME} rule add from 10.79.0.32 lookup 100 pref 77"))?;
    ip(CLIENT, "addr add 10.99.0.1/32 dev lo")?;
    ip(CLIENT, "route add 10.79.0.32/32 dev eth0 src 10.99.0.1")?;
    ip("a", &format!("-n {NAME} route add 10.98.0.0/16 via 10.79.0.100 metric 7"))?;
    ip("a", &format!("-n {NAME} -6 route add fd98::/64 via fd79::100 metric 7"))?;
    ip("a", &format!("-n {NAME} neigh add 10.79.0.77 lladdr 02:00:00:00:00:77 dev eth1 nud permanent"))?;
    const SETTINGS: [&str; 3] =
        ["net.ipv4.tcp_keepalive_time=1234", "net.ipv4.conf.eth1.log_martians=1", "net.ipv6.conf.eth1.hop_limit=77"];
    lab.check("a", &[&["ip", "netns", "exec", NAME, "sysctl", "-w"][..], &SETTINGS].concat())?;
    // What is set between two moves: one is as in a new namespace again, one is new, one has another value.
    const LATER: [&str; 3] =
        ["net.ipv4.tcp_keepalive_time=7200", "net.ipv4.tcp_fin_timeout=33", "net.ipv6.conf.eth1.hop_limit=78"];
    let mut identity = identity(lab, "a")?;
    for own in ["1400", "10.98.0.0/16", "fd98::/64", "lladdr 02:00:00:00:00:77", "= 1234", "hop_limit = 77"] {
        ensure!(identity.contains(own), "{own} is not in: {identity}");
    }
    let mut streams = Vec::new();
    for to in ["10.77.0.31", "10.79.0.31", "10.79.0.32", "fd77::31", "fd79::31"] {
        let to: IpAddr = to.parse()?;
        let connect = move || TcpStream::connect_timeout(&(to, TRAFFIC_PORT).into(), Duration::from_secs(5));
        let stream = lab.within(CLIENT, None, connect)?.with_context(|| format!("to {to}"))?;
        streams.push(Stream::begin(stream, Way::Both, Some(RATE), &[])?);
    }
    go_on(&streams)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moves(lab, NAME, from, to)?;
        go_on(&streams).with_context(|| format!("after the move to {to}"))?;
        let rules = ip(to, &format!("-n {NAME} rule"))?;
        ensure!(rules.contains("from 10.79.0.32 lookup 100"), "{rules}");
        let here = self::identity(lab, to)?;
        ensure!(here == identity, "on {to} it is\n{here}\nand was\n{identity}");
        if to == "b" {
            lab.check(to, &[&["ip", "netns", "exec", NAME, "sysctl", "-w"][..], &LATER].concat())?;
            identity = self::identity(lab, to)?;
            ensure!(["= 7200", "= 33", "= 78"].iter().all(|value| identity.contains(value)), "{identity}");
        }
    }
    end(streams)?;
    ip(CLIENT, "route del 10.79.0.32/32 dev eth0")?;
    ip(CLIENT, "addr del 10.99.0.1/32 dev lo")?;
    for address in ["fd77::100/64", "10.79.0.100/24", "fd79::100/64"] {
        ip(CLIENT, &format!("addr del {address} dev eth0"))?;
    }
    remove(lab, NAME)
}

/// What is none of the container's processes does not move, so that it is named ahead.
pub(super) fn multicast(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let group = Ipv4Addr::new(239, 77, 0, 1);
    let member = lab.within("a", Some(NAME), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.join_multicast_v4(&group, &IP)?;
        Ok(socket)
    })??;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.text.contains(&format!("the multicast group {group} on eth0")), "{}", refusal.text);
    drop(member);
    moves(lab, NAME, "a", "b")?;
    remove(lab, NAME)
}
