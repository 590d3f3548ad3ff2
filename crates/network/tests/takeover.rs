//! The whole way of an identity from one node to another, in network namespaces of the test's own.

mod lab;

use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use lab::{Kind, Lab, V4, V6, echo, until};
use tranship_network::{Announcer, Gate, capture, create, remove, stand_aside};

fn names() -> Vec<String> {
    vec!["web0".into()]
}

/// The container's first life: on node a, speaking.
fn live_on_a(lab: &Lab) {
    let identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    Gate::prepare(&lab.path("d1"), &names()).unwrap().open().unwrap();
    Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce().unwrap();
}

fn moves(kind: Kind) {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(kind);
    live_on_a(&lab);
    let ends = lab.echo_server("d1", 7000);
    let captured = lab.inside("a", || capture(&lab.path("d1"))).unwrap();
    assert_eq!(captured, lab.identity(), "what was made is what is captured");

    let mut four = lab.connect(V4, 7000).unwrap();
    let mut six = lab.connect(V6, 7000).unwrap();
    assert_eq!(lab.learned_port().as_deref(), Some("pa"));

    // A second copy on node b, while the first one is live.
    let at_b = lab.tap("pb");
    let making = Instant::now();
    lab.inside("b", || create(&lab.path("d2"), &captured)).unwrap();
    println!("{kind:?}: create: {:?}", making.elapsed());
    let mut second = Gate::prepare(&lab.path("d2"), &names()).unwrap();
    assert!(second.is_closed().unwrap());
    lab.echo_server("d2", 7000);
    let mut announcer = Announcer::prepare(&lab.path("d2"), &captured).unwrap();
    provoke(&lab, "d2");
    let client = lab.name("c");
    let started = Instant::now();
    // Longer than the second after which the kernel repeats what it sends about a new link.
    while started.elapsed() < Duration::from_millis(1500) {
        lab.ip(&format!("-n {client} neigh flush dev eth0"));
        echo(&mut four, b"still here").unwrap();
        echo(&mut six, b"and here").unwrap();
        assert_eq!(lab.learned_port().as_deref(), Some("pa"));
    }
    assert_eq!(at_b.frames(), Vec::<String>::new(), "the gated copy has sent something");

    // The first one falls silent: no answer, no acknowledgement, and no FIN when its end closes.
    let at_a = lab.tap("pa");
    let mut first = Gate::prepare(&lab.path("d1"), &names()).unwrap();
    let closing = Instant::now();
    first.close().unwrap();
    println!("{kind:?}: close: {:?}", closing.elapsed());
    at_a.frames();
    provoke(&lab, "d1");
    ends.lock().unwrap().iter_mut().for_each(|end| end.write_all(b"unasked").unwrap());
    ends.lock().unwrap()[0].shutdown(Shutdown::Both).unwrap();
    four.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(echo(&mut four, b"anyone?").is_err());
    assert_eq!(at_a.frames(), Vec::<String>::new(), "frames after the gate was closed");

    // The second one takes over.
    let opening = Instant::now();
    second.open().unwrap();
    let opened = opening.elapsed();
    announcer.announce().unwrap();
    println!("{kind:?}: open: {opened:?}, announce: {:?}", opening.elapsed() - opened);
    stand_aside(&lab.path("d1")).unwrap();
    assert!(!second.is_closed().unwrap() && first.is_closed().unwrap());
    assert!(!at_b.frames().is_empty(), "the tap sees what passes");
    until("the switch has learned the new port", || lab.learned_port().as_deref() == Some("pb"));
    let mut four = lab.connect(V4, 7000).unwrap();
    let mut six = lab.connect(V6, 7000).unwrap();
    echo(&mut four, b"hello").unwrap();
    echo(&mut six, b"hello").unwrap();
    assert!(lab.ip(&format!("-n {client} neigh show {V4}")).contains("02:42:0a:09:00:63"));

    drop((first, second, announcer));
    let removing = Instant::now();
    remove(&lab.path("d1")).unwrap();
    println!("{kind:?}: remove: {:?}", removing.elapsed());
    assert_eq!(at_a.frames(), Vec::<String>::new(), "the removal was heard");
    echo(&mut four, b"hello").unwrap();
    remove(&lab.path("d2")).unwrap();
    remove(&lab.path("d2")).unwrap();
    assert!(!lab.path("d2").exists());
    for node in ["a", "b"] {
        let links = lab.ip(&format!("-n {} -br link", lab.name(node)));
        assert!(!links.contains("veth"), "left on node {node}: {links}");
    }
}

/// Makes a namespace want to send whatever it can.
fn provoke(lab: &Lab, namespace: &str) {
    let _ = Announcer::prepare(&lab.path(namespace), &lab.identity()).unwrap().announce();
    lab.inside(namespace, || {
        for to in ["10.9.0.1:9", "10.9.0.200:9", "[fd09::1]:9", "[fd09::200]:9", "[ff02::1%7]:9"] {
            let socket = UdpSocket::bind(if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" }).unwrap();
            let _ = socket.send_to(b"x", to);
        }
        let _ = TcpStream::connect_timeout(&"10.9.0.1:9".parse().unwrap(), Duration::from_millis(50));
    });
}

#[test]
fn a_macvlan_identity_moves_while_its_twin_is_live() {
    moves(Kind::Macvlan);
}

#[test]
fn a_bridged_identity_moves_while_its_twin_is_live() {
    moves(Kind::Bridge);
}

/// Which ports of the switch a group is sent to.
fn ports_of(lab: &Lab, group: &str) -> Vec<String> {
    let output = Command::new("bridge").args(["-n", &lab.name("s"), "mdb", "show", "dev", "sw0"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_group = words.filter(|words| words.contains(&group));
    of_group.filter_map(|words| Some((*words.iter().skip_while(|word| **word != "port").nth(1)?).to_owned())).collect()
}

/// The kernel's own report would come at some time within a second.
fn groups_are_reported(kind: Kind) {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(kind);
    let (v4, v6, only) = ("239.77.0.9", "ff12::77:9", "232.77.0.9");
    lab.ip(&format!(
        "-n {} link set sw0 type bridge mcast_snooping 1 mcast_igmp_version 3 mcast_mld_version 2",
        lab.name("s")
    ));
    let identity = lab.identity();
    lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
    let mut gate = Gate::prepare(&lab.path("d2"), &names()).unwrap();
    let mut announcer = Announcer::prepare(&lab.path("d2"), &identity).unwrap();
    // As a restored container does it: behind the closed gate.
    let own = V4.parse::<Ipv4Addr>().unwrap();
    let members = lab.inside("d2", || {
        let (four, six) = (UdpSocket::bind("0.0.0.0:0").unwrap(), UdpSocket::bind("[::]:0").unwrap());
        four.join_multicast_v4(&v4.parse().unwrap(), &own).unwrap();
        six.join_multicast_v6(&v6.parse().unwrap(), 7).unwrap();
        // struct ip_mreq_source: the group, the interface, the source.
        let source = [only.parse::<Ipv4Addr>().unwrap().octets(), own.octets(), [10, 9, 0, 1]].concat();
        tranship_sys::socket::set_option(four.as_fd(), 0, 39, &source).unwrap();
        (four, six)
    });
    for group in [v4, v6, only] {
        assert!(ports_of(&lab, group).is_empty(), "{group} is known ahead");
    }
    gate.open().unwrap();
    announcer.announce().unwrap();
    // What a bridge passes on it has passed on by now, or does so in the next milliseconds.
    std::thread::sleep(Duration::from_millis(5));
    let known = [v4, v6, only].map(|group| ports_of(&lab, group));
    assert!(known.iter().all(|ports| !ports.is_empty() && ports.iter().all(|port| port == "pb")), "{known:?}");
    drop((members, gate, announcer));
    remove(&lab.path("d2")).unwrap();
}

#[test]
fn a_switch_hears_at_once_of_the_groups_on_a_macvlan() {
    groups_are_reported(Kind::Macvlan);
}

#[test]
fn a_switch_hears_at_once_of_the_groups_on_a_bridge() {
    groups_are_reported(Kind::Bridge);
}

#[test]
fn a_policy_rule_for_a_tunnel_is_refused_by_name() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    lab.inside("a", || create(&lab.path("d1"), &lab.identity())).unwrap();
    lab.ip(&format!("-n {} rule add tun_id 5 lookup 100 pref 88", lab.name("d1")));
    let error = lab.inside("a", || capture(&lab.path("d1"))).unwrap_err().to_string();
    assert!(error.contains("has a policy rule that has the id of a tunnel") && error.contains("delete it"), "{error}");
}
