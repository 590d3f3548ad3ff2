//! Datagrams that wait in the container's socket, since its program does not read.

use std::net::{Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use tranship_e2e::{Stage, remove};
use tranship_lab::{CLIENT, RunOptions};
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

/// Sends numbers back. One may say how many milliseconds to sleep first; what comes then has room (SO_RCVBUFFORCE).
const ECHO: &str = "
import socket, struct, time
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
echo.bind(('0.0.0.0', 7909))
while True:
    data, client = echo.recvfrom(2048)
    number, pause = struct.unpack_from('<QQ', data)
    time.sleep(pause / 1000)
    echo.sendto(data[:8], client)
";
/// Some 4 MB.
const MANY: u64 = 4000;
/// Those that come when the container has moved, and still does not read.
const LATER: u64 = 200;

pub(super) fn of_thousands(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = RunOptions::new(IP, ["python3", "-c", ECHO]);
    options.capabilities.push("CAP_NET_ADMIN".to_owned());
    lab.run("a", NAME, &options)?;
    let socket = lab.within(CLIENT, None, || {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20))?;
        socket.connect((IP, 7909)).map(|()| socket)
    })??;
    let send = |number: u64, pause: Duration| {
        let mut bytes = [0; 1000];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..16].copy_from_slice(&(pause.as_millis() as u64).to_le_bytes());
        socket.send(&bytes)
    };
    let back = || {
        let mut bytes = [0; 8];
        socket.recv(&mut bytes).map(|_| u64::from_le_bytes(bytes))
    };
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    tranship_e2e::wait_until("the echo", super::PATIENCE, || {
        // One that is refused is one that has not come.
        let _ = send(u64::MAX, Duration::ZERO);
        Ok(back().ok())
    })?;
    while back().is_ok() {}
    let begun = Instant::now();
    let mut expected = 0..;
    let mut say = |count: u64, pause: Duration| -> Result<()> {
        for number in expected.by_ref().take(count as usize) {
            send(number, pause)?;
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    };
    say(1, PAUSE)?;
    say(MANY, Duration::ZERO)?;
    let report = moves(lab, NAME, "a", "b")?;
    say(LATER, Duration::ZERO)?;
    ensure!(begun.elapsed() < PAUSE, "the program has read again before the container had moved");
    eprintln!("blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
    let unread = report.parts.iter().any(|part| part.name == "network: unread datagrams");
    ensure!(unread && !report.ways.iter().any(|way| way.contains("datagrams")), "{report:?}");
    socket.set_read_timeout(Some(2 * PAUSE))?;
    let mut came = Vec::new();
    for number in 0..=MANY + LATER {
        came.push(back().with_context(|| format!("{number} came back, and no more"))?);
    }
    // One may pass another on its way from the client, if that is put on another processor; those that came later would pass thousands.
    let late = came.windows(2).filter(|two| two[0] > two[1]).count();
    let passed = came.iter().zip(0..).map(|(number, place)| number.abs_diff(place)).max();
    ensure!(late <= 4 && passed <= Some(16), "{late} were late, by up to {passed:?}");
    came.sort_unstable();
    ensure!(came.iter().copied().eq(0..=MANY + LATER), "some are lost, and others came twice");
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    ensure!(back().is_err(), "something came back twice");
    remove(lab, NAME)
}
