//! Packets that reach a closed gate, delivered where the container runs on.

mod lab;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lab::{Kind, Lab, V4, V6, echo, until};
use nix::sys::socket::{setsockopt, sockopt};
use tranship_network::{Announcer, Gate, HELD_BYTES, HeldFrame, Hold, Injector, create, stand_aside};

const KINDS: [Kind; 2] = [Kind::Bridge, Kind::Macvlan];

struct Live {
    lab: Lab,
    gate: Gate,
    hold: Hold,
    injector: Injector,
}

fn gate(lab: &Lab, name: &str) -> Gate {
    Gate::prepare(&lab.path(name), &["web0".into()]).unwrap()
}

fn injector(lab: &Lab, node: &str, name: &str) -> Injector {
    lab.inside(node, || Injector::prepare(&lab.path(name), &lab.identity())).unwrap()
}

fn holding(lab: &Lab) -> Hold {
    Hold::prepare(&lab.path("d1"), &lab.identity(), HELD_BYTES).unwrap()
}

/// A container on node a, speaking.
fn live(kind: Kind) -> Live {
    let lab = Lab::new(kind);
    let identity = lab.identity();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    let mut gate = gate(&lab, "d1");
    gate.open().unwrap();
    Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce().unwrap();
    let hold = holding(&lab);
    let injector = injector(&lab, "a", "d1");
    Live { lab, gate, hold, injector }
}

impl Live {
    fn close(&mut self) {
        let start = Instant::now();
        self.hold.begin().unwrap();
        let begun = start.elapsed();
        self.gate.close().unwrap();
        println!("{:?}: begin {begun:?}, and the gate closed {:?}", self.lab.kind, start.elapsed());
    }

    /// What is held, as soon as a segment that ends with this is.
    fn held_with(&mut self, end: &[u8]) -> Vec<HeldFrame> {
        let mut held = Vec::new();
        until("the segment is held", || {
            held.extend(self.hold.take());
            held.iter().any(|f| f.bytes.ends_with(end))
        });
        held
    }

    fn inject(&mut self, frames: &[HeldFrame]) {
        let start = Instant::now();
        assert_eq!(self.injector.inject(frames).unwrap(), frames.len());
        println!("{:?}: {} frames delivered in {:?}", self.lab.kind, frames.len(), start.elapsed());
    }
}

/// What the client's TCP says that it has sent more than once.
fn retransmissions(lab: &Lab) -> Vec<String> {
    let output = Command::new("ss").args(["-N", &lab.name("c"), "-tinH"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("rto:"), "{text}");
    text.split_whitespace()
        .filter(|w| w.starts_with("retrans:") || w.starts_with("bytes_retrans"))
        .map(Into::into)
        .collect()
}

/// Nothing of what was delivered went out to the switch, which would then look for the client at another port.
fn assert_nothing_leaked(lab: &Lab) {
    let text = lab.ip(&format!("-n {} -br link show dev eth0", lab.name("c")));
    let mac = text.split_whitespace().nth(2).unwrap();
    let output = Command::new("bridge").args(["-n", &lab.name("s"), "fdb", "show", "br", "sw0"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|l| l.starts_with(mac)).expect("the switch knows the client");
    assert!(line.contains("dev pc"), "{line}");
}

#[test]
fn a_connection_goes_on_at_the_source_without_a_retransmission() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let mut live = live(kind);
        live.lab.echo_server("d1", 7000);
        for address in [V4, V6] {
            let mut stream = live.lab.connect(address, 7000).unwrap();
            echo(&mut stream, b"before").unwrap();
            live.hold = holding(&live.lab);
            live.close();
            stream.write_all(b"while it is closed").unwrap();
            let mut held = live.held_with(b"while it is closed");
            live.gate.open().unwrap();
            held.extend(live.hold.take());
            // As it travels from agent to agent.
            let text = serde_json::to_string(&held).unwrap();
            assert_eq!(serde_json::from_str::<Vec<HeldFrame>>(&text).unwrap(), held);
            live.inject(&held);
            let mut answer = [0; 18];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"while it is closed");
            assert_eq!(retransmissions(&live.lab), Vec::<String>::new(), "{kind:?}");
            assert_eq!(live.hold.dropped(), 0);
        }
        assert_nothing_leaked(&live.lab);
    }
}

#[test]
fn a_gate_that_is_closed_to_packets_lets_pass_what_is_delivered_and_lets_neighbours_be_found() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let mut live = live(kind);
        live.lab.echo_server("d1", 7000);
        for address in [V4, V6] {
            let mut stream = live.lab.connect(address, 7000).unwrap();
            echo(&mut stream, b"before").unwrap();
            live.hold = holding(&live.lab);
            live.hold.begin().unwrap();
            live.gate.open_but_to_packets().unwrap();
            live.lab.ip(&format!("-n {} neigh flush dev eth0", live.lab.name("c")));
            // It leaves the client only when the container has said where it is.
            stream.write_all(b"kept").unwrap();
            let held = live.held_with(b"kept");
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            stream.read(&mut [0; 4]).unwrap_err();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            live.inject(&held);
            let mut answer = [0; 4];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"kept");
            live.gate.open().unwrap();
            echo(&mut stream, b"after").unwrap();
        }
        assert_nothing_leaked(&live.lab);
    }
}

#[test]
fn large_frames_with_unfinished_checksums_arrive_whole() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let mut live = live(kind);
        live.lab.echo_server("d1", 7000);
        let mut stream = live.lab.connect(V4, 7000).unwrap();
        // Opens the congestion window, so that large bursts are sent at once.
        let warm = vec![7; 100_000];
        let exchange = |stream: &mut std::net::TcpStream, data: &[u8]| {
            let (mut writer, mut answer) = (stream.try_clone().unwrap(), vec![0; data.len()]);
            std::thread::scope(|scope| {
                scope.spawn(move || writer.write_all(data).unwrap());
                stream.read_exact(&mut answer).unwrap();
            });
            assert!(answer == data, "the data is not what was sent");
        };
        exchange(&mut stream, &warm);
        live.close();
        let data: Vec<u8> = (0..200_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        let mut held = Vec::new();
        std::thread::scope(|scope| {
            let data = &data;
            let stream = &mut stream;
            let reader = scope.spawn(move || exchange(stream, data));
            until("large frames are held", || {
                held.extend(live.hold.take());
                held.iter().filter(|f| f.bytes.len() > 4_000).count() >= 1
            });
            live.gate.open().unwrap();
            held.extend(live.hold.take());
            println!("{kind:?}: lengths {:?}", held.iter().map(|f| f.bytes.len()).collect::<Vec<_>>());
            live.inject(&held);
            reader.join().unwrap();
        });
        println!("{kind:?}: {:?}", retransmissions(&live.lab));
        assert_nothing_leaked(&live.lab);
    }
}

#[test]
fn who_connects_meanwhile_is_let_in_at_the_destination() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        for knows_the_neighbour in [true, false] {
            let mut live = live(kind);
            let lab = &live.lab;
            let identity = lab.identity();
            lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
            lab.echo_server("d1", 7000);
            lab.echo_server("d2", 7000);
            let (mut second, mut into) = (gate(lab, "d2"), injector(lab, "b", "d2"));
            let mut announcer = Announcer::prepare(&lab.path("d2"), &identity).unwrap();
            echo(&mut lab.connect(V4, 7000).unwrap(), b"hello").unwrap();
            live.hold.begin().unwrap();
            live.gate.close().unwrap();
            if !knows_the_neighbour {
                lab.ip(&format!("-n {} neigh flush dev eth0", lab.name("c")));
            }
            let start = Instant::now();
            let took = std::thread::scope(|scope| {
                let client = scope.spawn(|| {
                    let stream = lab.connect(V4, 7000);
                    (stream, start.elapsed())
                });
                let mut held = Vec::new();
                // A SYN or a request for the address.
                until("something is held", || {
                    held.extend(live.hold.take());
                    held.iter().any(|f| f.bytes.len() >= 52)
                });
                second.open().unwrap();
                announcer.announce().unwrap();
                held.extend(live.hold.take());
                assert_eq!(into.inject(&held).unwrap(), held.len());
                // What was held first may have been the end of the connection before.
                while !client.is_finished() {
                    into.inject(&live.hold.take()).unwrap();
                    std::thread::yield_now();
                }
                let (stream, took) = client.join().unwrap();
                echo(&mut stream.unwrap(), b"hello").unwrap();
                took
            });
            // The kernel sends a SYN and a request for an address again after a second.
            println!("{kind:?}: connected after {took:?}");
            assert!(took < Duration::from_millis(900), "{kind:?}: {took:?}");
            assert_nothing_leaked(lab);
        }
    }
}

/// Numbered datagrams from the client, as many as go, and what arrives of them.
#[derive(Default)]
struct Numbered {
    sent: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    sender: Option<std::thread::JoinHandle<()>>,
    arrived: Arc<Mutex<HashMap<u64, u32>>>,
}

impl Numbered {
    fn receive_in(&self, lab: &Lab, name: &str) {
        let socket = lab.inside(name, || UdpSocket::bind((V4, 7777)).unwrap());
        setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let (arrived, over) = (Arc::clone(&self.arrived), Arc::clone(&self.over));
        std::thread::spawn(move || {
            let mut bytes = [0; 8];
            while !over.load(Ordering::SeqCst) {
                if socket.recv(&mut bytes).is_ok() {
                    *arrived.lock().unwrap().entry(u64::from_be_bytes(bytes)).or_default() += 1;
                }
            }
        });
    }

    fn send_from(&mut self, lab: &Lab) {
        let socket = lab.inside("c", || UdpSocket::bind("0.0.0.0:0").unwrap());
        socket.connect((V4, 7777)).unwrap();
        let (sent, stop) = (Arc::clone(&self.sent), Arc::clone(&self.stop));
        self.sender = Some(std::thread::spawn(move || {
            let mut next = Instant::now();
            while !stop.load(Ordering::SeqCst) {
                // A datagram each 20 µs: what the closing gate takes is then never between two of them.
                while Instant::now() < next {
                    std::hint::spin_loop();
                }
                next = Instant::now() + Duration::from_micros(20);
                socket.send(&sent.load(Ordering::SeqCst).to_be_bytes()).unwrap();
                sent.fetch_add(1, Ordering::SeqCst);
            }
        }));
    }

    fn more(&self, count: u64) {
        let goal = self.sent.load(Ordering::SeqCst) + count;
        until("more datagrams were sent", || self.sent.load(Ordering::SeqCst) >= goal);
    }

    fn all_arrived(&self) -> bool {
        self.arrived.lock().unwrap().len() as u64 == self.sent.load(Ordering::SeqCst)
    }

    fn end(self, meanwhile: impl FnMut()) {
        let (lost, doubled) = self.tally(meanwhile);
        assert!(lost.is_empty() && doubled.is_empty(), "lost {lost:?}, doubled {doubled:?}");
    }

    /// Sends no more; which were lost, and which came more than once.
    fn tally(mut self, mut meanwhile: impl FnMut()) -> (Vec<u64>, Vec<u64>) {
        self.stop.store(true, Ordering::SeqCst);
        self.sender.take().unwrap().join().unwrap();
        let deadline = Instant::now() + Duration::from_secs(3);
        while !self.all_arrived() && Instant::now() < deadline {
            meanwhile();
            std::thread::yield_now();
        }
        self.over.store(true, Ordering::SeqCst);
        let (sent, arrived) = (self.sent.load(Ordering::SeqCst), self.arrived.lock().unwrap());
        let lost: Vec<u64> = (0..sent).filter(|n| !arrived.contains_key(n)).collect();
        let doubled: Vec<u64> = arrived.iter().filter(|(_, count)| **count > 1).map(|(n, _)| *n).collect();
        println!("{sent} sent, {} lost, {} doubled", lost.len(), doubled.len());
        (lost, doubled)
    }
}

#[test]
fn no_datagram_is_lost_or_doubled_by_a_move() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let mut live = live(kind);
        let lab = &live.lab;
        let identity = lab.identity();
        lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
        let (mut second, mut into) = (gate(lab, "d2"), injector(lab, "b", "d2"));
        let mut announcer = Announcer::prepare(&lab.path("d2"), &identity).unwrap();
        let mut numbered = Numbered::default();
        numbered.receive_in(lab, "d1");
        numbered.receive_in(lab, "d2");
        numbered.send_from(lab);
        numbered.more(500);
        live.hold.begin().unwrap();
        live.gate.close().unwrap();
        numbered.more(500);
        let first = live.hold.take();
        second.open().unwrap();
        announcer.announce().unwrap();
        stand_aside(&lab.path("d1")).unwrap();
        let second_part = live.hold.take();
        let start = Instant::now();
        into.inject(&first).unwrap();
        let took = start.elapsed();
        println!("{kind:?}: {} frames in {took:?}", first.len());
        into.inject(&second_part).unwrap();
        numbered.more(500);
        numbered.end(|| {
            into.inject(&live.hold.take()).unwrap();
        });
        assert!(!first.is_empty() && live.hold.dropped() == 0);
        assert_nothing_leaked(lab);
    }
}

#[test]
fn no_datagram_is_lost_or_doubled_by_a_move_that_fails() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        // With a long way from the hold's first point to its second there is always a frame between the two.
        for slow in [false, true] {
            let mut live = live(kind);
            if slow {
                slow_down(&live.lab, "d1");
            }
            let mut numbered = Numbered::default();
            numbered.receive_in(&live.lab, "d1");
            numbered.send_from(&live.lab);
            let mut longest = Duration::ZERO;
            for _ in 0..10 {
                live.hold = holding(&live.lab);
                numbered.more(100);
                live.hold.begin().unwrap();
                live.gate.close().unwrap();
                numbered.more(100);
                live.gate.open().unwrap();
                let start = Instant::now();
                let held = live.hold.finish();
                longest = longest.max(start.elapsed());
                assert!(held.len() >= if slow { 1 } else { 50 }, "{}", held.len());
                live.injector.inject(&held).unwrap();
                assert_eq!(live.hold.dropped(), 0);
            }
            println!("{kind:?}: the hold is finished after {longest:?} at most");
            numbered.end(|| {});
        }
    }
}

/// How many IPv4 packets have come past the gate of a namespace.
fn received(lab: &Lab, name: &str) -> u64 {
    let text = lab.inside(name, || std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
    let mut lines = text.lines().filter(|line| line.starts_with("Ip:")).map(str::split_whitespace);
    let (names, numbers) = (lines.next().unwrap(), lines.next().unwrap());
    names.zip(numbers).find(|(name, _)| *name == "InReceives").unwrap().1.parse().unwrap()
}

/// How many bytes wait in the packet sockets of a namespace.
fn in_the_kernel(lab: &Lab, name: &str) -> usize {
    let text = lab.inside(name, || std::fs::read_to_string("/proc/thread-self/net/packet").unwrap());
    let sockets = text.lines().skip(1).map(|line| line.split_whitespace().nth(6).unwrap());
    sockets.map(|bytes| bytes.parse::<usize>().unwrap()).sum()
}

/// A long chain before the gate: whatever the gate does, there is a frame on its way to it.
fn slow_down(lab: &Lab, name: &str) {
    let rules = "meta mark set 1\n".repeat(10_000);
    let chain = format!("chain slow {{ type filter hook ingress device web0 priority -2000; policy accept;\n{rules}}}");
    let mut nft = Command::new("ip")
        .args(["netns", "exec", &lab.name(name), "nft", "-f", "-"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    nft.stdin.take().unwrap().write_all(format!("table netdev slow {{ {chain}\n}}").as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
}

#[test]
fn no_datagram_slips_through_between_the_stages_of_a_closing_gate() {
    if !lab::privileged() {
        return;
    }
    for kind in KINDS {
        let mut live = live(kind);
        slow_down(&live.lab, "d1");
        let mut numbered = Numbered::default();
        numbered.receive_in(&live.lab, "d1");
        numbered.send_from(&live.lab);
        numbered.more(100);
        let settle = || {
            let mut before = None;
            until("nothing comes any more", || {
                std::thread::sleep(Duration::from_millis(2));
                let now = Some(received(&live.lab, "d1"));
                std::mem::replace(&mut before, now) == now
            });
        };
        // On a busy machine the sender is not always given the processor while the gate is closed.
        let (mut round, mut rounds_with_any) = (0, 0);
        while round < 20 || (rounds_with_any < 5 && round < 500) {
            round += 1;
            live.hold = holding(&live.lab);
            live.hold.begin().unwrap();
            live.gate.close_to_newcomers().unwrap();
            live.gate.close_to_newcomers().unwrap();
            settle();
            let before = received(&live.lab, "d1");
            live.gate.close().unwrap();
            settle();
            assert_eq!(received(&live.lab, "d1"), before, "{kind:?}, round {round}: passed a gate that was never open");
            live.gate.open().unwrap();
            let held = live.hold.finish();
            rounds_with_any += u32::from(!held.is_empty());
            live.injector.inject(&held).unwrap();
            assert_eq!(live.hold.dropped(), 0);
        }
        assert!(rounds_with_any >= 5, "{rounds_with_any}");
        numbered.end(|| {});
    }
}

#[test]
fn beyond_the_bound_the_oldest_are_dropped_and_counted() {
    if !lab::privileged() {
        return;
    }
    const BOUND: usize = 1 << 20;
    const SENT: u64 = 10_000;
    for kind in KINDS {
        let mut live = live(kind);
        live.hold = Hold::prepare(&live.lab.path("d1"), &live.lab.identity(), BOUND).unwrap();
        let socket = live.lab.inside("c", || UdpSocket::bind("0.0.0.0:0").unwrap());
        socket.connect((V4, 7777)).unwrap();
        // The neighbour is known from here on.
        echo_reachable(&live.lab);
        live.close();
        // Ten times as many as the kernel keeps in as much memory, and nobody asks for them meanwhile. They come as fast as the thread
        // makes room, which on a busy machine waits for a processor.
        for number in 0..SENT {
            socket.send(&number.to_be_bytes()).unwrap();
            if number % 100 == 0 {
                until("the kernel has room", || in_the_kernel(&live.lab, "d1") < BOUND * 3 / 4);
            }
        }
        let mut datagrams = Vec::new();
        until("the last one is there", || {
            let numbers = live.hold.take().into_iter().filter_map(|frame| frame.bytes.last_chunk().copied());
            datagrams.extend(numbers.map(u64::from_be_bytes).filter(|number| *number < SENT));
            datagrams.last() == Some(&(SENT - 1))
        });
        let (kept, dropped) = (datagrams.len() as u64, live.hold.dropped());
        println!("{kind:?}: {kept} held, {dropped} dropped");
        assert_eq!(
            datagrams,
            (SENT - kept..SENT).collect::<Vec<_>>(),
            "those held are not the last ones, in their order"
        );
        assert!(BOUND as u64 / 200 < kept && kept < BOUND as u64 / 100, "{kept}");
        // Something else may have come, too.
        assert!((SENT..SENT + 100).contains(&(kept + dropped)), "{kept} held and {dropped} dropped of {SENT}");
    }
}

fn echo_reachable(lab: &Lab) {
    lab.echo_server("d1", 7000);
    echo(&mut lab.connect(V4, 7000).unwrap(), b"hello").unwrap();
}
