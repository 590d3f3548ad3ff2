//! Datagrams that no program has read, delivered where the container runs on.

mod lab;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use lab::{Kind, Lab, V4, V6, until};
use nix::sys::socket::{setsockopt, sockopt};
use tranship_network::{Announcer, Backlog, Gate, HELD_BYTES, Injector, Unread, create, unread};

const KINDS: [Kind; 2] = [Kind::Bridge, Kind::Macvlan];
const CLIENT_V4: &str = "10.9.0.1";
const CLIENT_V6: &str = "fd09::1";
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 9, 9, 9);
const PORT: u16 = 7100;

type Received = Vec<(SocketAddr, Vec<u8>)>;

/// A container's sockets, each with what it is for.
struct Sockets(Vec<(&'static str, UdpSocket)>);

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

impl Sockets {
    /// Opens all of them in a container's namespace.
    fn open(lab: &Lab, container: &str) -> Self {
        lab.inside(container, || {
            let bind = |ip: &str, port: u16| UdpSocket::bind(address(ip, port)).unwrap();
            let (connected, group, merging) =
                (bind(V4, PORT + 2), bind("0.0.0.0", PORT + 3), bind("0.0.0.0", PORT + 4));
            connected.connect(address(CLIENT_V4, 7000)).unwrap();
            group.join_multicast_v4(&GROUP, &V4.parse().unwrap()).unwrap();
            setsockopt(&merging, sockopt::UdpGroSegment, &true).unwrap();
            Self(vec![
                ("both families", bind("::", PORT)),
                ("one address", bind(V4, PORT + 1)),
                ("connected", connected),
                ("in a group", group),
                ("merging", merging),
                ("IPv6", bind(V6, PORT + 5)),
                ("looped back", bind("127.0.0.1", PORT + 6)),
                ("looped back, IPv6", bind("::1", PORT + 7)),
                ("its own address", bind(V4, PORT + 8)),
                ("with broadcasts", bind("0.0.0.0", PORT + 9)),
            ])
        })
    }

    fn receive(&self) -> Vec<(&'static str, Received)> {
        let of = |(name, socket): &(&'static str, UdpSocket)| {
            socket.set_nonblocking(true).unwrap();
            let (mut received, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
            while let Ok((length, from)) = socket.recv_from(&mut bytes) {
                received.push((from, bytes[..length].to_vec()));
            }
            (*name, received)
        };
        self.0.iter().map(of).collect()
    }

    /// How many bytes the next datagram of each has, which it keeps.
    fn first(&self) -> Vec<Option<usize>> {
        let of = |(_, socket): &(_, UdpSocket)| {
            socket.set_nonblocking(true).unwrap();
            socket.peek(&mut [0; 1 << 16]).ok()
        };
        self.0.iter().map(of).collect()
    }
}

/// Sends to all of them, from the client's node and from the container itself.
fn send(lab: &Lab, container: &str) {
    lab.inside("c", || {
        let v4 = UdpSocket::bind(address(CLIENT_V4, 7000)).unwrap();
        let v6 = UdpSocket::bind(address(CLIENT_V6, 7000)).unwrap();
        let sizes = [8, 0, 1, 700, 0, 0, 1300, 2000, 9];
        for (n, size) in sizes.into_iter().enumerate() {
            let bytes = vec![n as u8; size];
            for port in [PORT, PORT + 1, PORT + 2] {
                v4.send_to(&bytes, address(V4, port)).unwrap();
            }
            v6.send_to(&bytes, address(V6, PORT)).unwrap();
            v6.send_to(&bytes, address(V6, PORT + 5)).unwrap();
            v4.send_to(&bytes, SocketAddr::new(GROUP.into(), PORT + 3)).unwrap();
        }
        let longest: Vec<u8> = (0..60_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        v4.send_to(&longest, address(V4, PORT + 1)).unwrap();
        v6.send_to(&longest, address(V6, PORT + 5)).unwrap();
        v4.set_broadcast(true).unwrap();
        v4.send_to(b"to all", address("10.9.0.255", PORT + 9)).unwrap();
        let segments = UdpSocket::bind(address(CLIENT_V4, 7001)).unwrap();
        setsockopt(&segments, sockopt::UdpGsoSegment, &500).unwrap();
        segments.send_to(&longest[..1700], address(V4, PORT + 4)).unwrap();
    });
    lab.inside(container, || {
        for (own, port) in [("127.0.0.1", PORT + 6), ("::1", PORT + 7), (V4, PORT + 8)] {
            let sender = UdpSocket::bind(address(own, 7002)).unwrap();
            for size in [5, 0, 30_000, 7] {
                sender.send_to(&vec![7; size], address(own, port)).unwrap();
            }
        }
    });
}

fn to_find(lab: &Lab, container: &str) -> Unread {
    let mut backlog = Backlog::prepare(&lab.path(container)).unwrap();
    unread(&mut backlog, &lab.identity(), &[std::process::id()], HELD_BYTES).unwrap()
}

/// What merged datagrams are to a program that does not have them merged.
fn pieces(received: Vec<(&'static str, Received)>) -> Vec<(&'static str, Received)> {
    let apart = |(name, received): (&'static str, Received)| {
        if name != "merging" {
            return (name, received);
        }
        let each = |(from, bytes): (SocketAddr, Vec<u8>)| {
            bytes.chunks(500).map(|piece| (from, piece.to_vec())).collect::<Vec<_>>()
        };
        (name, received.into_iter().flat_map(each).collect())
    };
    received.into_iter().map(apart).collect()
}

#[test]
fn what_no_program_has_read_is_delivered_elsewhere_and_stays_where_it_is() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let lab = Lab::new(kind);
        let identity = lab.identity();
        for (node, name) in [("a", "d1"), ("b", "d2")] {
            lab.inside(node, || create(&lab.path(name), &identity)).unwrap();
        }
        let mut gates = ["d1", "d2"].map(|name| Gate::prepare(&lab.path(name), &["web0".into()]).unwrap());
        let sockets = ["d1", "d2"].map(|name| Sockets::open(&lab, name));
        assert!(to_find(&lab, "d1").frames.is_empty());

        gates[0].open().unwrap();
        lab.inside("d1", || Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce()).unwrap();
        // Neighbours that look for each other may change the order.
        let (v4, v6) = lab.inside("c", || {
            let bind = |own: &str| UdpSocket::bind(address(own, 0)).unwrap();
            (bind(CLIENT_V4), bind(CLIENT_V6))
        });
        for (client, to) in [(v4, address(V4, PORT + 1)), (v6, address(V6, PORT + 5))] {
            until("the client knows where the container is", || {
                client.send_to(b"where", to).unwrap();
                std::thread::sleep(Duration::from_millis(20));
                sockets[0].receive().iter().any(|(_, received)| !received.is_empty())
            });
        }
        send(&lab, "d1");
        until("all have come", || sockets[0].first().iter().all(Option::is_some));
        std::thread::sleep(Duration::from_millis(200));
        gates[0].close().unwrap();
        let first = sockets[0].first();
        let found = to_find(&lab, "d1");
        assert_eq!(found.left, 0, "{kind:?}");
        assert_eq!(sockets[0].first(), first, "the look has changed where the sockets are read from");
        // Those without content the kernel shows once.
        let with_content = |found: Unread| {
            let lengths = found.frames.into_iter().map(|frame| frame.bytes.len());
            lengths.filter(|length| ![10 + 14 + 20 + 8, 10 + 14 + 40 + 8].contains(length)).collect::<Vec<_>>()
        };
        let again = with_content(to_find(&lab, "d1"));
        assert!(again.len() > 20);
        assert_eq!(
            again,
            with_content(Unread { frames: found.frames.clone(), left: 0 }),
            "the look has taken something"
        );

        gates[1].open().unwrap();
        let mut injector = lab.inside("b", || Injector::prepare(&lab.path("d2"), &identity)).unwrap();
        assert_eq!(injector.inject(&found.frames).unwrap(), found.frames.len());
        until("all have come to the other place", || sockets[1].first().iter().all(Option::is_some));
        std::thread::sleep(Duration::from_millis(200));
        let [here, there] = sockets.map(|sockets| pieces(sockets.receive()));
        let counts: Vec<_> = here.iter().map(|(name, received)| (*name, received.len())).collect();
        println!("{kind:?}: {counts:?}");
        for (here, there) in here.iter().zip(&there) {
            let sizes = |received: &Received| received.iter().map(|(from, b)| (*from, b.len())).collect::<Vec<_>>();
            assert_eq!(sizes(&here.1), sizes(&there.1), "{kind:?}, {}", here.0);
            assert!(here == there, "{kind:?}, {}: other bytes", here.0);
        }
        assert!(here.iter().any(|(name, received)| *name == "merging" && received.len() == 4), "{kind:?}");
    }
}

#[test]
fn what_is_looped_back_from_a_group_or_a_link_is_said_to_be_lost() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Bridge);
    lab.inside("a", || create(&lab.path("d1"), &lab.identity())).unwrap();
    Gate::prepare(&lab.path("d1"), &["web0".into()]).unwrap().open().unwrap();
    let sockets = lab.inside("d1", || {
        let member = UdpSocket::bind(address("0.0.0.0", PORT)).unwrap();
        member.join_multicast_v4(&GROUP, &V4.parse().unwrap()).unwrap();
        member.send_to(b"x", SocketAddr::new(IpAddr::from(GROUP), PORT)).unwrap();
        // What the kernel makes of the MAC.
        let on_the_link = SocketAddrV6::new("fe80::42:aff:fe09:63".parse().unwrap(), PORT, 0, 7);
        until("the link has its address", || UdpSocket::bind(on_the_link).is_ok());
        let own = UdpSocket::bind(on_the_link).unwrap();
        own.send_to(b"x", on_the_link).unwrap();
        [member, own]
    });
    let found = to_find(&lab, "d1");
    assert_eq!((found.frames.len(), found.left), (0, 2));
    for socket in sockets {
        assert_eq!(socket.recv(&mut [0; 4]).unwrap(), 1);
    }
}
