use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

use super::*;

const HERE: &str = "/proc/thread-self/ns/net";

/// One of each sort: TCP, UDP and raw, of both families, Unix and packet sockets.
fn new_sockets() -> Vec<OwnedFd> {
    let kinds = [(libc::SOCK_STREAM, 0), (libc::SOCK_DGRAM, 0), (libc::SOCK_RAW, 89)];
    let families = [libc::AF_INET, libc::AF_INET6];
    let all = families.into_iter().flat_map(|family| kinds.map(|(kind, protocol)| (family, kind, protocol)));
    let unix = [libc::SOCK_STREAM, libc::SOCK_DGRAM].map(|kind| (libc::AF_UNIX, kind, 0));
    let packet = (libc::AF_PACKET, libc::SOCK_RAW, 0);
    all.chain(unix)
        .chain([packet])
        .map(|(family, kind, protocol)| socket::new(family, kind, protocol).unwrap())
        .collect()
}

fn open(socket: &dyn AsRawFd) -> OpenSocket {
    OpenSocket { pid: std::process::id(), task: 7, descriptor: socket.as_raw_fd() }
}

/// What a look at this process finds of these sockets.
fn look(sockets: &[&dyn AsRawFd]) -> Vec<SocketState> {
    let open: Vec<_> = sockets.iter().map(|socket| open(*socket)).collect();
    socket_states(Path::new(HERE), &open).unwrap().sockets
}

#[test]
fn every_option_can_be_set_to_what_it_can_be() {
    let mut met = HashSet::new();
    for socket in new_sockets() {
        for choice in ALL {
            let Some(value) = choice.value(socket.as_fd()).filter(|_| choice.kind != Kind::OneWay) else {
                continue;
            };
            let set = |value: &[u8]| socket::set_option(socket.as_fd(), choice.level, choice.name, value);
            match set(&value) {
                Ok(()) => drop(met.insert(choice.text)),
                // One that such a socket can never have had set.
                Err(error) => {
                    let other: Vec<u8> = value.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == 0)).collect();
                    assert!(set(&other).is_err(), "{} to {:?}: {error}", choice.text, &value[..]);
                }
            }
        }
        assert_eq!(look(&[&socket]), [], "{:?}", sort(socket.as_fd()));
    }
    assert!(met.len() > 60, "this kernel has {} of the options only: {met:?}", met.len());
}

#[test]
fn options_and_memberships_are_found_and_given_to_other_sockets() {
    let any = (Ipv4Addr::UNSPECIFIED, 0);
    let (udp, udp6) = (UdpSocket::bind(any).unwrap(), UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap());
    let tcp = std::net::TcpListener::bind(any).unwrap();
    let (v4, v6) = (Ipv4Addr::new(239, 77, 1, 3), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0x77, 0x4321));
    udp.join_multicast_v4(&v4, &Ipv4Addr::LOCALHOST).unwrap();
    udp.set_multicast_ttl_v4(7).unwrap();
    udp6.join_multicast_v6(&v6, 1).unwrap();
    let set = |socket: BorrowedFd<'_>, text: &str, value: &[u8]| {
        let choice = ALL.iter().find(|choice| choice.text == text).unwrap();
        socket::set_option(socket, choice.level, choice.name, value).unwrap();
    };
    set(udp6.as_fd(), "IPV6_MULTICAST_IF", &1u32.to_ne_bytes());
    set(udp.as_fd(), "IP_UNICAST_IF", &1u32.to_be_bytes());
    set(tcp.as_fd(), "TCP_USER_TIMEOUT", &12345u32.to_ne_bytes());
    set(tcp.as_fd(), "TCP_CONGESTION", b"reno");
    set(tcp.as_fd(), "TCP_FASTOPEN", &9u32.to_ne_bytes());
    // Heard but from one, and from one only.
    let (group, source) = (Ipv4Addr::new(232, 77, 1, 4), Ipv4Addr::new(127, 0, 0, 9));
    let only = Membership::only("lo", group.into(), source.into());
    multicast::join(udp6.as_fd(), &only, 1).unwrap();
    let old = look(&[&udp, &udp6, &tcp]);
    assert_eq!(
        old.iter().map(|s| (s.options.len(), s.memberships.len())).collect::<Vec<_>>(),
        [(2, 1), (1, 2), (3, 0)],
        "{old:?}"
    );
    assert!(old[1].memberships.contains(&only), "{old:?}");

    let (new, new6) = (UdpSocket::bind(any).unwrap(), UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap());
    let new_tcp = std::net::TcpListener::bind(any).unwrap();
    let numbers = [new.as_raw_fd(), new6.as_raw_fd(), new_tcp.as_raw_fd()];
    let mut states = old;
    states.iter_mut().zip(numbers).for_each(|(state, number)| state.descriptor = number);
    let text = serde_json::to_string(&states).unwrap();
    let states: Vec<SocketState> = serde_json::from_str(&text).unwrap();
    let give =
        |states: &[SocketState]| set_socket_states(Path::new(HERE), states, |task| (task == 7).then(std::process::id));
    give(&states).unwrap();
    assert_eq!(look(&[&new, &new6, &new_tcp]), states);

    // What a peer could ask for besides.
    let mut other = states[0].clone();
    other.memberships.clear();
    (other.options[0].level, other.options[0].name) = (1, 26);
    assert!(give(&[other]).unwrap_err().to_string().contains("none of those that are carried"));
    let mut gone = states[0].clone();
    gone.task = 8;
    assert!(give(&[gone]).unwrap_err().to_string().contains("no such process"));
}

#[test]
fn a_group_that_no_process_of_the_container_has_joined_is_named() {
    let group = Ipv4Addr::new(239, 77, 1, 5);
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
    let unclaimed = |sockets: &[OpenSocket]| {
        let expected = ("lo".to_owned(), group.into());
        let ahead = unclaimed_groups(Path::new(HERE), || sockets.to_vec()).unwrap().contains(&expected);
        let found = socket_states(Path::new(HERE), sockets).unwrap();
        assert_eq!(ahead, found.unclaimed.contains(&expected));
        ahead
    };
    assert!(unclaimed(&[]));
    assert!(!unclaimed(&[open(&socket)]));
}

#[test]
fn many_sockets_are_looked_at_by_several_threads_and_each_is_found() {
    let sockets: Vec<_> = (0..500).map(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()).collect();
    sockets.iter().enumerate().for_each(|(n, socket)| socket.set_ttl(1 + (n % 250) as u32).unwrap());
    let open: Vec<_> = sockets.iter().map(|socket| open(socket)).collect();
    let begun = std::time::Instant::now();
    let found = socket_states(Path::new(HERE), &open).unwrap().sockets;
    println!("{:?} for each of {} sockets", begun.elapsed() / 500, sockets.len());
    let numbers: HashSet<_> = found.iter().map(|state| state.descriptor).collect();
    // The one with a new socket's own is none of them.
    let expected: HashSet<_> =
        sockets.iter().filter(|socket| socket.ttl().unwrap() != 64).map(AsRawFd::as_raw_fd).collect();
    assert_eq!(numbers, expected);
    assert!(found.iter().all(|state| state.options.len() == 1 && state.memberships.is_empty()));
}

#[test]
fn options_that_older_nodes_refuse_are_in_a_list_of_their_own() {
    let set = |socket: &OwnedFd, text: &str, value: i32| {
        let choice = ALL.iter().find(|choice| choice.text == text).unwrap();
        socket::set_option(socket.as_fd(), choice.level, choice.name, &value.to_ne_bytes()).unwrap();
    };
    let here = Path::new(HERE);
    let sockets = [socket::new(libc::AF_PACKET, libc::SOCK_DGRAM, 0), socket::new(libc::AF_INET6, libc::SOCK_RAW, 89)];
    let sockets = sockets.map(Result::unwrap);
    let open = sockets.each_ref().map(|socket| open(socket));
    assert_eq!(newer_options(here, &open).unwrap(), [] as [&str; 0]);
    // The values that a new packet socket has are known from then on.
    let packet = (libc::AF_PACKET, libc::SOCK_DGRAM, 0);
    assert!(Arc::ptr_eq(&defaults(packet), &defaults(packet)));

    set(&sockets[0], "PACKET_IGNORE_OUTGOING", 1);
    set(&sockets[0], "SO_PRIORITY", 3);
    set(&sockets[1], "IPV6_CHECKSUM", 2);
    assert_eq!(newer_options(here, &open).unwrap(), ["IPV6_CHECKSUM", "PACKET_IGNORE_OUTGOING"]);
    let found = socket_states(here, &open).unwrap().sockets;
    let numbers: Vec<_> = found.iter().map(|state| (state.options.len(), state.more_options.len())).collect();
    assert_eq!(numbers, [(1, 1), (0, 1)], "{found:?}");

    let new = [socket::new(libc::AF_PACKET, libc::SOCK_DGRAM, 0), socket::new(libc::AF_INET6, libc::SOCK_RAW, 89)];
    let new = new.map(Result::unwrap);
    let mut states = found;
    states.iter_mut().zip(&new).for_each(|(state, socket)| state.descriptor = socket.as_raw_fd());
    let states: Vec<SocketState> = serde_json::from_str(&serde_json::to_string(&states).unwrap()).unwrap();
    set_socket_states(here, &states, |_| Some(std::process::id())).unwrap();
    assert_eq!(look(&[&new[0], &new[1]]), states);
}
