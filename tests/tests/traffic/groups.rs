//! Streams of datagrams to multicast groups that the container has joined, from a client outside.

use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt};
use tranship_e2e::{Moving, Stage, exactly_one_runs, is_member, remove, restart_agent, snooping, wait_until};
use tranship_lab::{CLIENT, Lab};
use tranship_types::Mode;
use tranship_workloads::traffic::{Datagrams, TRAFFIC_PORT};

use super::kinds::late;
use super::{IP, NAME, PATIENCE, moves, run_in_groups};

/// Datagrams a second in each of the groups.
const RATE: u64 = 1000;
/// How often a gate is opened to groups.
const OPENINGS: u64 = 4;
/// Each with the address that it is sent from, the container's own to which the answers are due, and the sender's port.
const GROUPS: [(&str, &str, &str, u16); 2] =
    [("239.77.0.5", "10.77.0.100", "10.77.0.31", 7905), ("ff12::77:5", "fd77::100", "fd77::31", 7906)];

/// Two sockets of the client with one address: one sends to the group, the other one hears the container's answers.
pub(super) fn sockets(lab: &Lab, (group, from, to, port): (&str, &str, &str, u16)) -> Result<(UdpSocket, UdpSocket)> {
    let (group, from, to): (IpAddr, IpAddr, IpAddr) = (group.parse()?, from.parse()?, to.parse()?);
    let pair = lab.within(CLIENT, None, move || {
        let open = |to: SocketAddr| {
            let family = if from.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            setsockopt(&fd, sockopt::ReuseAddr, &true)?;
            setsockopt(&fd, sockopt::RcvBuf, &(4 << 20))?;
            bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, port)))?;
            let socket = UdpSocket::from(fd);
            socket.connect(to)?;
            Ok::<_, std::io::Error>(socket)
        };
        let group = match group {
            IpAddr::V4(_) => SocketAddr::new(group, TRAFFIC_PORT),
            IpAddr::V6(group) => SocketAddrV6::new(group, TRAFFIC_PORT, 0, if_nametoindex("eth0")?).into(),
        };
        Ok((open(group)?, open(SocketAddr::new(to, TRAFFIC_PORT))?))
    });
    Ok(pair??)
}

/// Moves the container there and back while something goes on, each time after a move that fails; with pauses between.
pub(super) fn failing_and_moving(lab: &Lab, pause: Duration) -> Result<()> {
    let pause = || std::thread::sleep(pause);
    pause();
    [("a", "b"), ("b", "a")].iter().try_for_each(|(from, to)| {
        fails(lab, from, to).context("a move that fails")?;
        pause();
        let report = moves(lab, NAME, from, to)?;
        eprintln!("{from} → {to}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        pause();
        Ok(())
    })
}

/// A move that the destination fails when it has restored, so that the container goes on where it was.
pub(super) fn fails(lab: &Lab, from: &str, to: &str) -> Result<()> {
    restart_agent(lab, to, "destination.restore.after.error")?;
    let ended = Moving::begin(lab, NAME, from, to, Mode::Auto)?.end()?;
    ensure!(!ended.success && exactly_one_runs(lab, NAME)? == from, "the move was to fail: {}", ended.error());
    restart_agent(lab, to, "")
}

fn streams_arrive(stage: &mut Stage, listens: bool) -> Result<()> {
    let lab = &stage.lab;
    let v6 = ["fd77::100/64", "dev", "eth0", "nodad"];
    lab.check(CLIENT, &[&["ip", "addr", "add"][..], &v6].concat())?;
    snooping(listens)?;
    run_in_groups(lab, "a", (NAME, IP), false, &GROUPS.map(|(group, ..)| group))?;
    lab.check("a", &["ip", "-n", NAME, "addr", "add", "fd77::31/64", "dev", "eth0", "nodad"])?;
    if listens {
        for (group, ..) in GROUPS {
            wait_until("the switch to know the member", PATIENCE, || Ok(is_member(group, "a")?.then_some(())))?;
        }
        // It begins to heed what it knows.
        std::thread::sleep(Duration::from_secs(1));
    }
    let begin = |group| sockets(lab, group).and_then(|(to, from)| Datagrams::begin_between(to, from, RATE));
    let streams = GROUPS.into_iter().map(begin).collect::<Result<Vec<_>>>()?;
    let moved = failing_and_moving(lab, Duration::from_millis(400));
    for (stream, (group, ..)) in streams.into_iter().zip(GROUPS) {
        let tally = stream.end()?;
        eprintln!(
            "{group}: {} datagrams, {} lost {:?}, {} doubled, {} out of order, longest gap {} ms",
            tally.sent,
            tally.lost,
            tally.lost_range,
            tally.doubled,
            tally.reordered,
            tally.course.longest_gap_ms()
        );
        let wrong = (tally.lost, tally.doubled, tally.reordered);
        ensure!(
            wrong.0 + wrong.1 == 0 && wrong.2 <= late(RATE, OPENINGS),
            "to {group}, lost, doubled, out of order: {wrong:?} of {}",
            tally.sent
        );
    }
    moved?;
    snooping(false)?;
    lab.check(CLIENT, &[&["ip", "addr", "del"][..], &v6[..3]].concat())?;
    remove(lab, NAME)
}

/// The switch sends a group's datagrams to the ports at which it has heard of a member, and nowhere else.
pub(super) fn through_a_switch_that_listens(stage: &mut Stage) -> Result<()> {
    streams_arrive(stage, true)
}

/// Both places of the container hear them at any time.
pub(super) fn through_any_other_switch(stage: &mut Stage) -> Result<()> {
    streams_arrive(stage, false)
}
