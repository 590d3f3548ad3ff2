//! Datagrams that wait in the container's socket, since its program does not read.

use std::net::{Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tranship_e2e::{Stage, remove};
use tranship_lab::CLIENT;
use tranship_workloads::traffic::{Datagrams, TRAFFIC_PORT};

use super::groups::{fails, sockets};
use super::{IP, NAME, moves, run_in_groups};

/// Datagrams a second of each client: what comes in two moves has room in the sockets.
const RATE: u64 = 20;
/// For how long it does not read: longer than a move that fails and one that does not.
const PAUSE: Duration = Duration::from_secs(12);
const GROUP: (&str, &str, &str, u16) = ("239.77.0.6", "10.77.0.100", "10.77.0.31", 7907);
const V6: [&str; 4] = ["fd77::100/64", "dev", "eth0", "nodad"];

pub(super) fn by_a_program_that_sleeps(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.check(CLIENT, &[&["ip", "addr", "add"][..], &V6].concat())?;
    run_in_groups(lab, "a", (NAME, IP), false, &[GROUP.0])?;
    lab.check("a", &["ip", "-n", NAME, "addr", "add", "fd77::36/64", "dev", "eth0", "nodad"])?;
    let v4 = lab.within(CLIENT, None, || {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect((IP, TRAFFIC_PORT)).map(|()| socket)
    })??;
    let v6 = lab.within(CLIENT, None, || {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
        socket.connect(("fd77::36", TRAFFIC_PORT)).map(|()| socket)
    })??;
    let tells = v4.try_clone()?;
    let (to_group, answers) = sockets(lab, GROUP)?;
    let clients = [
        ("IPv4", Datagrams::begin(v4, RATE)?),
        ("IPv6", Datagrams::begin(v6, RATE)?),
        ("a group", Datagrams::begin_between(to_group, answers, RATE)?),
    ];
    let pause = || std::thread::sleep(Duration::from_millis(300));
    pause();
    for (from, to) in [("a", "b"), ("b", "a")] {
        let begun = Instant::now();
        tells.send(&(PAUSE.as_millis() as u32).to_le_bytes())?;
        pause();
        fails(lab, from, to)?;
        let report = moves(lab, NAME, from, to)?;
        ensure!(begun.elapsed() < PAUSE, "the program has read again before the container had moved");
        let unread = report.parts.iter().any(|part| part.name == "network: unread datagrams");
        ensure!(unread, "there were none that it had not read: {:?}", report.parts);
        ensure!(!report.ways.iter().any(|way| way.contains("datagrams")), "{:?}", report.ways);
        std::thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
        pause();
    }
    for (what, client) in clients {
        let tally = client.end()?;
        ensure!(
            (tally.lost, tally.doubled, tally.reordered) == (0, 0, 0),
            "by {what}, of {}: {} lost {:?}, {} doubled, {} out of order",
            tally.sent,
            tally.lost,
            tally.lost_range,
            tally.doubled,
            tally.reordered
        );
    }
    lab.check(CLIENT, &[&["ip", "addr", "del"][..], &V6[..3]].concat())?;
    remove(lab, NAME)
}
