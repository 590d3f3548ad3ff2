//! The gate by itself, and creation and removal when something is in the way.

mod lab;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use lab::{Kind, Lab, MAC, until};
use tranship_network::{Gate, NetworkError, capture, create, remove};
use tranship_types::Attachment;

fn gated(kind: Kind) -> (Lab, Gate) {
    let lab = Lab::new(kind);
    let identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    let gate = Gate::prepare(&lab.path("d1"), &["web0".into()]).unwrap();
    (lab, gate)
}

#[test]
fn closing_and_opening_take_less_than_a_millisecond() {
    if !lab::privileged() {
        return;
    }
    for kind in [Kind::Bridge, Kind::Macvlan] {
        let (_lab, mut gate) = gated(kind);
        let mut times: [Vec<Duration>; 2] = Default::default();
        for _ in 0..300 {
            let start = Instant::now();
            gate.open().unwrap();
            times[0].push(start.elapsed());
            assert!(!gate.is_closed().unwrap());
            let start = Instant::now();
            gate.close().unwrap();
            times[1].push(start.elapsed());
            assert!(gate.is_closed().unwrap());
        }
        for (what, mut times) in ["open", "close"].into_iter().zip(times) {
            times.sort_unstable();
            let (median, slow) = (times[150], times[297]);
            println!("{kind:?}: {what}: median {median:?}, 99th percentile {slow:?}");
            assert!(median < Duration::from_millis(1), "{what}: {median:?}");
        }
    }
}

#[test]
fn the_gate_is_idempotent_and_outlives_whoever_closed_it() {
    if !lab::privileged() {
        return;
    }
    let (lab, mut gate) = gated(Kind::Bridge);
    gate.close().unwrap();
    gate.close().unwrap();
    drop(gate);
    let mut gate = Gate::prepare(&lab.path("d1"), &["web0".into()]).unwrap();
    assert!(gate.is_closed().unwrap());
    gate.open().unwrap();
    gate.open().unwrap();
    assert!(!gate.is_closed().unwrap());

    let error = Gate::prepare(&lab.path("d1"), &["web0".into(), "gone0".into()]).err().unwrap().to_string();
    assert!(error.contains("gone0"), "{error}");

    // Someone else's table of that name, with less in it than it should have, is made good.
    lab.ip(&format!("-n {} link add link web0 name web1 type macvlan", lab.name("d1")));
    gate.close().unwrap();
    let mut wider = Gate::prepare(&lab.path("d1"), &["web0".into(), "web1".into()]).unwrap();
    assert!(!wider.is_closed().unwrap());
    wider.close().unwrap();
    assert!(wider.is_closed().unwrap() && gate.is_closed().unwrap());
}

#[test]
fn the_queues_of_connections_inside_stay_as_they_are_while_the_gate_of_a_still_container_is_closed() {
    if !lab::privileged() {
        return;
    }
    let (lab, mut gate) = gated(Kind::Bridge);
    gate.open().unwrap();
    lab.inside("d1", || {
        let pairs = ["127.0.0.1:0", "[::1]:0"].map(|address| {
            let listener = TcpListener::bind(address).unwrap();
            let writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let reader = listener.accept().unwrap().0;
            (writer, reader)
        });
        let none_is_acknowledged = || pairs.iter().all(|(writer, _)| unacknowledged(writer) == 8);
        // They are delayed by 40 ms at first, which may be over on a busy machine.
        until("acknowledgements are delayed", || {
            gate.open().unwrap();
            for (writer, reader) in &pairs {
                // The kernel delays the acknowledgement of what comes after answers: it may go with the next one.
                let exchanges = std::iter::repeat_n([(writer, reader), (reader, writer)], 4).flatten();
                for (mut from, mut to) in exchanges.chain([(writer, reader)]) {
                    from.write_all(b"8 octets").unwrap();
                    to.read_exact(&mut [0; 8]).unwrap();
                }
            }
            gate.close_still().unwrap();
            none_is_acknowledged()
        });
        gate.close_still().unwrap();
        // Segments are sent again after 200.
        std::thread::sleep(Duration::from_millis(300));
        assert!(none_is_acknowledged(), "some were acknowledged behind the closed gate");
        gate.open().unwrap();
        until("everything is acknowledged", || pairs.iter().all(|(writer, _)| unacknowledged(writer) == 0));
    });
}

/// Bytes in a connection's send queue, of the calling thread's namespace.
fn unacknowledged(writer: &TcpStream) -> usize {
    let port = format!(":{:04X}", writer.local_addr().unwrap().port());
    let lists = ["tcp", "tcp6"].map(|list| fs::read_to_string(format!("/proc/thread-self/net/{list}")).unwrap());
    let mut lines = lists.iter().flat_map(|list| list.lines()).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|fields| fields[1].ends_with(&port) && fields[3] == "01").unwrap();
    usize::from_str_radix(line[4].split(':').next().unwrap(), 16).unwrap()
}

#[test]
fn creation_refuses_what_exists_and_undoes_what_fails() {
    if !lab::privileged() {
        return;
    }
    let (lab, mut gate) = gated(Kind::Bridge);
    gate.open().unwrap();
    let identity = lab.identity();
    let again = lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap_err();
    assert!(matches!(again, NetworkError::Exists { .. }), "{again}");
    assert_eq!(lab.inside("a", || capture(&lab.path("d1"))).unwrap(), identity);

    let node = lab.name("b");
    let names = || -> Vec<String> {
        let text = lab.ip(&format!("-n {node} -br link"));
        text.lines().filter_map(|l| Some(l.split_whitespace().next()?.to_owned())).collect()
    };
    let before = names();
    let mut elsewhere = identity.clone();
    elsewhere.interfaces[0].attachment = Attachment::Bridge { bridge: "br7".into() };
    let mut not_a_bridge = identity.clone();
    not_a_bridge.interfaces[0].attachment = Attachment::Bridge { bridge: "eth0".into() };
    for (identity, expected) in [(elsewhere, "no interface br7"), (not_a_bridge, "eth0 is not a bridge")] {
        let error = lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap_err();
        assert!(matches!(error, NetworkError::Attachment { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!lab.path("d2").exists());
    }
    // Fails last of all, after everything else has been made.
    let mut unreachable = identity;
    unreachable.routes[1].gateway = Some("192.0.2.1".parse().unwrap());
    let error = lab.inside("b", || create(&lab.path("d2"), &unreachable)).unwrap_err();
    assert!(error.to_string().contains("add the route"), "{error}");
    assert!(!lab.path("d2").exists());
    assert_eq!(names(), before);
}

#[test]
fn removal_is_idempotent_and_leaves_alone_what_is_no_namespace() {
    if !lab::privileged() {
        return;
    }
    let (lab, _holds_the_namespace) = gated(Kind::Bridge);
    let node = lab.name("a");
    assert!(lab.ip(&format!("-n {node} -br link")).contains("veth"));
    remove(&lab.path("d1")).unwrap();
    assert!(!lab.ip(&format!("-n {node} -br link")).contains("veth"), "gone at once, although a socket is open");
    remove(&lab.path("d1")).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("netns");
    fs::write(&file, "").unwrap();
    remove(&file).unwrap();
    assert!(!file.exists());
    fs::write(&file, "precious").unwrap();
    for error in [remove(&file).unwrap_err(), remove(dir.path()).unwrap_err(), capture(&file).unwrap_err()] {
        assert!(matches!(error, NetworkError::NotANamespace { .. }), "{error}");
    }
    assert!(file.exists());
    assert!(matches!(capture(&dir.path().join("none")).unwrap_err(), NetworkError::Missing { .. }));
}

#[test]
fn what_could_not_be_made_again_is_refused_by_name() {
    if !lab::privileged() {
        return;
    }
    let cases = [
        ("-n D link add vx0 type vxlan id 7 dstport 4789", "-n D link set vx0 up", "interface vx0", "a vxlan"),
        ("-n D link add br9 type bridge", "-n D link set br9 up", "interface br9", "a bridge"),
        (
            "-n D link add v0 type veth peer name v1 netns A",
            "-n D link set v0 up",
            "interface v0",
            "a port of no bridge",
        ),
        ("-n D link add v0 type veth peer name v1", "-n D link set group default up", "interface v", "not on the node"),
        (
            "-n A link add link eth0 name p0 netns D type macvlan mode private",
            "-n D link set p0 up",
            "p0",
            "mode private",
        ),
        ("-n D link set web0 down", "-n D link set lo up", "web0", "down"),
        ("-n D rule add goto 32766 pref 79", "-n D link set lo up", "rule", "priority 79 with action Goto"),
        (
            "-n D rule add lookup 100 suppress_ifgroup 5 pref 79",
            "-n D link set lo up",
            "rule",
            "priority 79 with a condition",
        ),
        ("-n D rule del pref 32767", "-n D link set lo up", "rule", "no policy rule of priority 32767"),
        ("-n D route add blackhole 10.99.0.0/16", "-n D link set lo up", "blackhole", "10.99.0.0/16"),
        ("-n D addr add 10.50.0.1/32 dev web0 scope link", "-n D link set lo up", "10.50.0.1", "a scope of its own"),
    ];
    for (first, second, name, reason) in cases {
        let (lab, mut gate) = gated(Kind::Macvlan);
        gate.open().unwrap();
        // What `create` leaves is not what a container runs with.
        tranship_network::Announcer::prepare(&lab.path("d1"), &lab.identity()).unwrap().announce().unwrap();
        for command in [first, second] {
            let words = command.split(' ').map(|w| match w {
                "D" => lab.name("d1"),
                "A" => lab.name("a"),
                w => w.to_owned(),
            });
            lab.ip(&words.collect::<Vec<_>>().join(" "));
        }
        let error = lab.inside("a", || capture(&lab.path("d1"))).expect_err(first).to_string();
        assert!(error.contains(name) && error.contains(reason), "{first}: {error}");
    }
}

#[test]
fn addresses_that_the_kernel_makes_are_made_again_and_not_captured() {
    if !lab::privileged() {
        return;
    }
    let (lab, mut gate) = gated(Kind::Bridge);
    let own = "fe80::42:aff:fe09:63";
    let show = || lab.ip(&format!("-n {} -6 addr show dev web0", lab.name("d1")));
    assert_eq!(MAC[..3], [2, 0x42, 0xa]);
    until("the kernel's own address is there", || show().contains(own));
    let captured = lab.inside("a", || capture(&lab.path("d1"))).unwrap();
    assert_eq!(captured, lab.identity());
    // One that somebody gave is another matter.
    lab.ip(&format!("-n {} addr add fe80::5/64 dev web0 nodad", lab.name("d1")));
    let captured = lab.inside("a", || capture(&lab.path("d1"))).unwrap();
    assert!(captured.interfaces[0].addresses.contains(&("fe80::5".parse().unwrap(), 64)));
    gate.open().unwrap();
    lab.inside("b", || create(&lab.path("d2"), &captured)).unwrap();
}
