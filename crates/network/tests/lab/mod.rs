//! Two nodes and a client on a switch, each a network namespace of its own; gone when the value is dropped.
//!
//! ```text
//!   node a (br0 or macvlan on eth0)   node b (the same)      client
//!        └─ eth0                          └─ eth0              └─ eth0 10.9.0.1/24 fd09::1/64
//!   switch: pa ─────────── sw0 ─────────── pb ─────────────────── pc
//! ```

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, SockaddrLike, bind, recvfrom, socket,
};
use tranship_types::{
    Attachment, Interface, MAIN_TABLE, Neighbour, NetworkIdentity, Route, Rule, RuleVerdict, ScopedAddress,
};

static COUNTER: AtomicU32 = AtomicU32::new(0);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Macvlan,
    Bridge,
}

/// Each test file uses a part of this.
#[allow(dead_code, reason = "shared by several test programs")]
pub struct Lab {
    prefix: String,
    pub kind: Kind,
}

pub const MAC: [u8; 6] = [0x02, 0x42, 0x0a, 0x09, 0x00, 0x63];
pub const V4: &str = "10.9.0.99";
pub const V6: &str = "fd09::99";

/// Whether namespaces can be made here; says so if not.
pub fn privileged() -> bool {
    let root = nix::unistd::geteuid().is_root() && Command::new("ip").arg("-V").output().is_ok();
    if !root {
        eprintln!("skipped: needs root and the ip command to make network namespaces");
    }
    root
}

#[allow(dead_code, reason = "shared by several test programs")]
impl Lab {
    pub fn new(kind: Kind) -> Self {
        let prefix = format!("trt{}x{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let lab = Self { prefix, kind };
        for name in ["s", "a", "b", "c"] {
            lab.ip(&format!("netns add {}", lab.name(name)));
        }
        let (s, a, b, c) = (lab.name("s"), lab.name("a"), lab.name("b"), lab.name("c"));
        lab.ip(&format!("-n {s} link add sw0 type bridge mcast_snooping 0"));
        lab.ip(&format!("-n {s} link set sw0 up"));
        for (port, node) in [("pa", &a), ("pb", &b), ("pc", &c)] {
            lab.ip(&format!("-n {s} link add {port} type veth peer name eth0 netns {node}"));
            lab.ip(&format!("-n {s} link set {port} master sw0 up"));
            lab.ip(&format!("-n {node} link set lo up"));
            lab.ip(&format!("-n {node} link set eth0 up"));
        }
        if kind == Kind::Bridge {
            for node in [&a, &b] {
                lab.ip(&format!("-n {node} link add br0 type bridge mcast_snooping 0"));
                lab.ip(&format!("-n {node} link set eth0 master br0"));
                lab.ip(&format!("-n {node} link set br0 up"));
            }
        }
        lab.ip(&format!("-n {c} addr add 10.9.0.1/24 dev eth0"));
        lab.ip(&format!("-n {c} addr add fd09::1/64 dev eth0 nodad"));
        lab
    }

    /// The name of one of the lab's namespaces; those beginning with `d` are containers'.
    pub fn name(&self, short: &str) -> String {
        format!("{}{short}", self.prefix)
    }

    pub fn path(&self, short: &str) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.name(short)))
    }

    pub fn ip(&self, arguments: &str) -> String {
        let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `work` inside one of the lab's namespaces.
    pub fn inside<T: Send>(&self, short: &str, work: impl FnOnce() -> T + Send) -> T {
        let file = File::open(self.path(short)).unwrap();
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&file, CloneFlags::CLONE_NEWNET).unwrap();
                    work()
                })
                .join()
                .unwrap_or_else(|p| std::panic::resume_unwind(p))
        })
    }

    pub fn identity(&self) -> NetworkIdentity {
        let attachment = match self.kind {
            Kind::Macvlan => Attachment::Macvlan { parent: "eth0".into() },
            Kind::Bridge => Attachment::Bridge { bridge: "br0".into() },
        };
        let route = |destination, gateway: &str, onlink| Route {
            destination,
            gateway: Some(gateway.parse().unwrap()),
            interface: "web0".into(),
            metric: 0,
            preferred_source: None,
            onlink,
            table: MAIN_TABLE,
        };
        let neighbour = |address: &str, mac, permanent| Neighbour {
            address: address.parse().unwrap(),
            mac,
            interface: "web0".into(),
            permanent,
        };
        NetworkIdentity {
            interfaces: vec![Interface {
                name: "web0".into(),
                index: 7,
                mac: MAC,
                mtu: 1400,
                addresses: vec![(V4.parse().unwrap(), 24), (V6.parse().unwrap(), 64)],
                attachment,
            }],
            // In the order in which the kernel lists them.
            routes: vec![
                Route { table: 100, ..route(Some(("10.99.0.0".parse().unwrap(), 16)), "10.9.0.1", false) },
                route(None, "10.9.0.1", false),
                Route {
                    preferred_source: Some(V4.parse().unwrap()),
                    ..route(Some(("10.77.0.0".parse().unwrap(), 16)), "10.88.0.1", true)
                },
                Route { table: 100_000, metric: 1024, ..route(None, "fd09::1", false) },
                Route { metric: 1024, ..route(None, "fd09::1", false) },
            ],
            rules: vec![
                Rule { source: Some((V4.parse().unwrap(), 32)), ..Rule::to_table(77, 100) },
                Rule {
                    mark: Some((7, 0xff)),
                    outgoing: Some("web0".into()),
                    destination_ports: Some((53, 53)),
                    protocol: Some(17),
                    ..Rule::to_table(77, 100)
                },
                Rule {
                    incoming: Some("lo".into()),
                    inverted: true,
                    verdict: RuleVerdict::Prohibit,
                    ..Rule::to_table(78, 0)
                },
                Rule { ipv6: true, users: Some((5, 9)), suppressed: Some(0), ..Rule::to_table(99, 100_000) },
            ],
            neighbours: vec![
                neighbour("10.9.0.50", [2, 0, 0, 0, 0, 50], true),
                neighbour("fd09::50", [2, 0, 0, 0, 0, 51], true),
                neighbour("10.9.0.60", [2, 0, 0, 0, 0, 60], false),
            ],
            sysctls: [
                ("ipv4/conf/web0/rp_filter", "2"),
                ("ipv4/tcp_keepalive_time", "77"),
                ("ipv6/conf/web0/accept_ra", "0"),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
            loopback: [("10.99.9.8", 32, 254), ("10.99.9.9", 32, 0), ("127.0.0.2", 8, 254), ("fd99::9", 128, 0)]
                .map(|(address, prefix, scope)| ScopedAddress { address: address.parse().unwrap(), prefix, scope })
                .into(),
            more_sysctls: [("unix/max_dgram_qlen".to_owned(), "77".to_owned())].into(),
            ..NetworkIdentity::default()
        }
    }

    /// Which port of the switch the container's MAC was last seen at.
    pub fn learned_port(&self) -> Option<String> {
        let output = Command::new("bridge").args(["-n", &self.name("s"), "fdb", "show", "br", "sw0"]).output().unwrap();
        let mac = MAC.map(|b| format!("{b:02x}")).join(":");
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|l| l.starts_with(&mac))?;
        Some(line.split_whitespace().nth(2)?.to_owned())
    }

    /// An echo server on all addresses of a namespace; it ends with the process. Returns its ends of the connections.
    pub fn echo_server(&self, short: &str, port: u16) -> Arc<Mutex<Vec<TcpStream>>> {
        let listener = self.inside(short, || TcpListener::bind(("::", port)).unwrap());
        let streams = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&streams);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                all.lock().unwrap().push(stream.try_clone().unwrap());
                std::thread::spawn(move || {
                    let mut buffer = [0; 1024];
                    while let Ok(n @ 1..) = stream.read(&mut buffer) {
                        if stream.write_all(&buffer[..n]).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        streams
    }

    pub fn connect(&self, address: &str, port: u16) -> std::io::Result<TcpStream> {
        self.connect_from("c", address, port)
    }

    pub fn connect_from(&self, short: &str, address: &str, port: u16) -> std::io::Result<TcpStream> {
        let address = SocketAddr::new(address.parse::<IpAddr>().unwrap(), port);
        let stream = self.inside(short, || TcpStream::connect_timeout(&address, Duration::from_secs(5)))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(stream)
    }

    /// Listens at one of the switch's ports for frames that come in there with the container's MAC as their source.
    pub fn tap(&self, port: &str) -> Tap {
        self.inside("s", || {
            let device = getifaddrs().unwrap().find(|i| {
                i.interface_name == port && i.address.is_some_and(|a| a.family() == Some(AddressFamily::Packet))
            });
            let device = *device.unwrap().address.unwrap().as_link_addr().unwrap();
            let fd =
                socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK, SockProtocol::EthAll).unwrap();
            bind(fd.as_raw_fd(), &device).unwrap();
            let tap = Tap(fd);
            tap.frames();
            tap
        })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let names = std::fs::read_dir("/run/netns").into_iter().flatten().flatten().map(|e| e.file_name());
        for name in names.filter(|n| n.to_string_lossy().starts_with(&self.prefix)) {
            let _ = Command::new("ip").args(["netns", "delete"]).arg(name).status();
        }
    }
}

const PACKET_OUTGOING: u8 = 4;

/// Frames that came in at a port.
pub struct Tap(OwnedFd);

impl Tap {
    /// What came since the last call with the container's MAC as its source, as text.
    pub fn frames(&self) -> Vec<String> {
        let mut frames = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok((n, Some(from))) = recvfrom::<LinkAddr>(self.0.as_raw_fd(), &mut buffer) {
            let leaves_the_switch = from.pkttype() == PACKET_OUTGOING;
            if !leaves_the_switch && n >= 14 && buffer[6..12] == MAC {
                frames.push(buffer[..n.min(60)].iter().map(|b| format!("{b:02x}")).collect());
            }
        }
        frames
    }
}

#[allow(dead_code, reason = "shared by several test programs")]
/// One question and its answer.
pub fn echo(stream: &mut TcpStream, text: &[u8]) -> std::io::Result<()> {
    stream.write_all(text)?;
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    if answer == text { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

#[allow(dead_code, reason = "shared by several test programs")]
/// Waits for a condition.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "still not: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
