//! The TLS processes of both agents are killed while one agent is held: links that are open go on, new ones are opened by the TLS
//! processes that follow.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Log, Moving, restart_agent, send, state, tls_process, wait_until};
use tranship_lab::Lab;
use tranship_types::{Mode, Side};

use crate::play::{NAME, Play};

/// Which agent is held, and where: before the freeze, frozen, after COMMIT, in the drain.
pub const PLACES: [(Side, &str); 4] = [
    (Side::Source, "offer.before"),
    (Side::Source, "transfer.before"),
    (Side::Source, "commit.after"),
    (Side::Destination, "drain.before"),
];
/// How soon another one has to be there, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn name((side, place): (Side, &str)) -> String {
    format!("tls.{}.{place}", if side == Side::Source { "source" } else { "destination" })
}

pub fn play(lab: &Lab, play: &mut Play, (side, place): (Side, &str), mode: Mode) -> Result<()> {
    let (from, to) = play.direction();
    let (held, other) = if side == Side::Source { (&from, &to) } else { (&to, &from) };
    let prefix = if side == Side::Source { "source" } else { "destination" };
    restart_agent(lab, held, &format!("{prefix}.{place}.hold"))?;
    let agent = lab.agent_pid(held)?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, &from, &to, mode)?;
    wait_until("the agent to be held", Duration::from_secs(20), || Ok((state(agent) == Some('T')).then_some(())))?;

    let victims = [held, other].map(|node| tls_process(lab, node));
    let [first, second] = victims;
    let (first, second) = (first?, second?);
    send(Signal::SIGKILL, first)?;
    send(Signal::SIGKILL, second)?;
    let follows = |node: &str, before: u32| {
        wait_until("another TLS process", PATIENCE, || Ok(tls_process(lab, node).ok().filter(|pid| *pid != before)))
    };
    follows(other, second)?;
    send(Signal::SIGCONT, agent)?;
    let confined = follows(held, first)?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not go on: {}", ended.error());
    has_nothing(confined)?;
    play.settle(lab, &ended, Some(Side::Destination))
}

/// The destination's TLS process is killed in the middle of the handshake of the link that the source opens: it is opened again by the next one.
pub fn play_in_a_handshake(lab: &Lab, play: &mut Play) -> Result<()> {
    let (from, to) = play.direction();
    restart_agent(lab, &from, "")?;
    restart_agent(lab, &to, "")?;
    let agent = lab.agent_pid(&to)?.context("the agent has just been started")?;
    let log = Log::mark(lab, &to)?;
    let victim = tls_process(lab, &to)?;
    send(Signal::SIGSTOP, victim)?;
    let caller = u32::from_ne_bytes(lab.address(&from)?.octets());
    let moving = Moving::begin(lab, NAME, &from, &to, Mode::Precopy)?;
    let is_calling = || {
        let table = fs::read_to_string(format!("/proc/{agent}/net/tcp"))?;
        Ok(table.lines().any(|line| line.contains(&format!(" {caller:08X}:")) && line.contains(" 01 ")).then_some(()))
    };
    let called = wait_until("the source to call", PATIENCE, is_calling);
    send(Signal::SIGKILL, victim)?;
    called?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not go on: {}", ended.error());
    ensure!(log.text().contains("the TLS process has ended"), "{}", log.text());
    play.settle(lab, &ended, Some(Side::Destination))
}

/// Checks that a TLS process is nobody's, has no capabilities, and has a filter.
fn has_nothing(pid: u32) -> Result<()> {
    let confined = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let fields = [
            "Uid:\t65534\t65534\t65534\t65534",
            "Gid:\t65534\t65534\t65534\t65534",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "CapBnd:\t0000000000000000",
            "CapAmb:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ];
        Ok(fields.iter().all(|field| status.lines().any(|line| line == *field)).then_some(()))
    };
    // It reads its files before it gives all that up.
    wait_until("the TLS process to be confined", PATIENCE, confined)
}
