//! Sockets of many kinds move as they are, or are refused before the freeze, by name.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::Plan;
use tranship_e2e::{Stage, exactly_one_runs, move_container, move_with, refused_move, remove, scenarios, wait_until};
use tranship_lab::{Lab, RunOptions};

const NAME: &str = "sockets";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 52);
const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(60);
const KINDS: &str = include_str!("kinds.py");

/// What may be lost where the user allows it, and the kinds of sockets that are refused for that.
const ALLOWED: [(&str, &[&str]); 6] = [
    ("closed-connections", &[CLOSED]),
    ("datagram-senders", &["sender_of_unix_datagram"]),
    ("peer-credentials", &["credentials_of_dead_process"]),
    (
        "socket-errors",
        &["error_of_reset_connection", "error_queue_of_connection", "udp_error_queue", "error_of_unix_connection"],
    ),
    ("unfinished-datagrams", &["unfinished_datagram_4", "unfinished_datagram_6"]),
    ("urgent-data", &["urgent_byte", "urgent_byte_of_unix_connection"]),
];

/// No process has such a connection any more.
const CLOSED: &str = "closed_connection";

/// The program that has the sockets, and a connection to it.
struct Kinds {
    lines: BufReader<TcpStream>,
    /// What each kind says, by name.
    ready: BTreeMap<String, String>,
}

impl Kinds {
    fn run(lab: &Lab, which: &str) -> Result<Self> {
        let mut options = RunOptions::new(IP, ["python3", "-c", KINDS, which]);
        options.capabilities.push("CAP_NET_ADMIN".into());
        lab.run("a", NAME, &options)?;
        let connection = wait_until("the sockets to be there", PATIENCE, || {
            Ok(lab.connect("client", (IP, PORT).into(), Duration::from_secs(1)).ok())
        })?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let mut kinds = Self { lines: BufReader::new(connection), ready: BTreeMap::new() };
        kinds.ready = kinds.line()?;
        for (kind, said) in &kinds.ready {
            ensure!(said == "ready", "{kind} {said}");
        }
        Ok(kinds)
    }

    fn line(&mut self) -> Result<BTreeMap<String, String>> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        serde_json::from_str(&line).context(line)
    }

    /// Every one is as it was when it was made.
    fn are_right(&mut self) -> Result<()> {
        self.lines.get_mut().write_all(b"?")?;
        let found = self.line()?;
        let wrong: Vec<_> = found.iter().filter(|(_, said)| *said != "ok").collect();
        ensure!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    }
}

/// By what a blocker names a kind: the name of its process.
fn process(kind: &str) -> &str {
    match kind {
        CLOSED => "that its program has closed",
        _ => &kind[..kind.len().min(15)],
    }
}

fn sockets_of_many_kinds_move_as_they_are(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut kinds = Kinds::run(lab, "carried")?;
    kinds.are_right().context("before the move")?;
    let text = lab.check("a", &["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"])?;
    let plan: Plan = serde_json::from_str(text.trim()).context(text)?;
    ensure!(plan.blockers.is_empty(), "{:#?}", plan.blockers);
    let told = plan.notes.iter().filter(|note| note.contains("will listen for plain TCP")).count();
    ensure!(told == 3, "multipath listeners: {:?}", plan.notes);
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = move_container(lab, from, NAME, to)?;
        kinds.are_right().with_context(|| format!("after the move to {to}"))?;
        let told = report.ways.iter().any(|way| way.contains("will listen for plain TCP"));
        ensure!(told == (from == "a"), "multipath listeners: {:?}", report.ways);
    }
    remove(lab, NAME)
}

fn other_kinds_are_refused_by_name_and_not_touched(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut kinds = Kinds::run(lab, "refused")?;
    kinds.are_right().context("before the move")?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.status == 3, "{refusal:#?}");
    for kind in kinds.ready.keys() {
        let named = refusal.blockers.iter().find(|blocker| blocker.cause.contains(process(kind)));
        let blocker = named.with_context(|| format!("{kind} is not refused: {:#?}", refusal.blockers))?;
        let allowed = ALLOWED.iter().find(|(_, kinds)| kinds.contains(&kind.as_str())).map(|(name, _)| *name);
        ensure!(blocker.allow.as_deref() == allowed, "{kind}: {blocker:?}");
        ensure!(blocker.pid.is_some() != (kind == CLOSED), "{kind}: {blocker:?}");
    }
    for blocker in &refusal.blockers {
        let known = kinds.ready.keys().any(|kind| blocker.cause.contains(process(kind)));
        ensure!(known, "{blocker:?}");
    }
    kinds.are_right().context("after the refusal")?;
    remove(lab, NAME)
}

fn what_the_user_allows_is_lost_and_told(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let which: Vec<_> = ALLOWED.iter().flat_map(|(_, kinds)| *kinds).copied().collect();
    let _kinds = Kinds::run(lab, &which.join(","))?;
    let options: Vec<_> = ALLOWED.iter().flat_map(|(name, _)| ["--allow", *name]).collect();
    let report = move_with(lab, "a", NAME, "b", &options)?;
    for kind in which {
        let told = report.allowed.iter().any(|blocker| blocker.cause.contains(process(kind)));
        ensure!(told, "{kind} is not in the report: {:#?}", report.allowed);
    }
    ensure!(exactly_one_runs(lab, NAME)? == "b", "it was not moved");
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("sockets_of_many_kinds_move_as_they_are", sockets_of_many_kinds_move_as_they_are),
        ("other_kinds_are_refused_by_name_and_not_touched", other_kinds_are_refused_by_name_and_not_touched),
        ("what_the_user_allows_is_lost_and_told", what_the_user_allows_is_lost_and_told),
    ])
}
