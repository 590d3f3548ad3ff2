//! One run: a lab of its own, a fresh container on node a, one move to node b, and the checks that nothing was lost.

use std::fmt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::{Lab, UpOptions, report_of};
use tranship_types::{Mode, Outcome, Report};

use crate::machine::megabytes;
use crate::suite::{Case, System};
use crate::timeline::{Slice, slices};
use crate::watch::{Watch, Wire};
use crate::workload::Workload;
use crate::{peer, program};

/// The node that the container leaves.
pub const SOURCE: &str = "a";
/// The node that the container goes to.
pub const DESTINATION: &str = "b";
/// Others test on this machine too, and only one lab can be up.
const LAB_LIMIT: Duration = Duration::from_secs(600);
/// No move takes that long; one that does has failed.
pub const MOVE_LIMIT: Duration = Duration::from_secs(300);

/// What moving says about itself.
#[derive(Debug)]
pub struct Moved {
    /// From the command's start to its end, in ms.
    pub total_ms: f64,
    /// From the first task frozen to the last task running, in ms.
    pub blackout_ms: f64,
    /// What the blackout was spent on.
    pub slices: Vec<Slice>,
    /// Most memory held on source and destination, as the system itself has counted it, in bytes.
    pub own_count: Option<(u64, u64)>,
    /// Which ways were taken, as the report has them.
    pub ways: Vec<String>,
}

/// What one run has shown.
#[derive(Debug)]
pub struct Sample {
    /// The move.
    pub moved: Moved,
    /// Longest time between two replies to the client across the move, in ms.
    pub client_gap_ms: f64,
    /// All the client's gaps of more than 20 ms together, in ms: more than the longest where there were several.
    pub client_stalls_ms: f64,
    /// Bytes that both nodes sent.
    pub bytes_wire: u64,
    /// Most extra memory on the source and on the destination, in bytes.
    pub peak_memory: (u64, u64),
    /// Resident memory of the bigger agent before the move, in bytes; `None` where there are no agents.
    pub agent_rest_bytes: Option<u64>,
    /// Resident memory of the workload, in bytes.
    pub workload_bytes: u64,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, destination) = self.peak_memory;
        write!(
            f,
            "client gap {:>7.1} ms  blackout {:>7.1} ms  total {:>7.1} ms  wire {:>8}  memory {} + {}",
            self.client_gap_ms,
            self.moved.blackout_ms,
            self.moved.total_ms,
            megabytes(self.bytes_wire),
            megabytes(source),
            megabytes(destination),
        )
    }
}

/// Performs a run. Whatever happens, the lab is taken down.
pub fn perform(case: &Case, system: &System) -> Result<Sample> {
    let link = case.link.map(str::parse).transpose()?;
    // The peer is measured on nodes without anything of Tranship's.
    let agents = *system != System::Peer;
    let lab = Lab::up(&UpOptions { nodes: 2, link, agents, wait: LAB_LIMIT })?;
    let sample = measured(&lab, case, system)?;
    lab.down().context("the move was measured, but taking the lab down failed")?;
    Ok(sample)
}

fn measured(lab: &Lab, case: &Case, system: &System) -> Result<Sample> {
    const NAME: &str = "subject";
    let mut workload = Workload::start(lab, SOURCE, NAME, &case.load).context("starting the workload")?;
    let (prepared, agent_rest_bytes) = match system {
        System::Tranship(mode) => (Prepared::Tranship(*mode), Some(agents_at_rest(lab)?)),
        System::Peer => (Prepared::Peer(peer::Recipe::prepare(lab, SOURCE, DESTINATION, NAME)?), None),
    };

    workload.mark()?;
    let wire = Wire::now(lab, [SOURCE, DESTINATION])?;
    let watch = Watch::start(lab, SOURCE, DESTINATION)?;
    let moved = match prepared {
        Prepared::Tranship(mode) => tranship(lab, NAME, mode),
        Prepared::Peer(recipe) => recipe.perform(),
    };
    let peak_memory = watch.stop()?;
    let bytes_wire = wire.since(lab)?;
    let moved = moved?;
    let seen = workload.check().context("after the move")?;
    Ok(Sample {
        moved,
        client_gap_ms: seen.longest_gap_ms,
        client_stalls_ms: seen.stalls_ms,
        bytes_wire,
        peak_memory,
        agent_rest_bytes,
        workload_bytes: workload.resident_bytes(),
    })
}

enum Prepared {
    Tranship(Mode),
    Peer(peer::Recipe),
}

fn tranship(lab: &Lab, name: &str, mode: Mode) -> Result<Moved> {
    let mut command = lab.move_command(SOURCE, name, DESTINATION)?;
    command.args(["--mode", &mode.to_string()]).stderr(Stdio::piped());
    let begin = Instant::now();
    let output = program::run(command, MOVE_LIMIT)?;
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let (said, printed) = (said.trim(), String::from_utf8_lossy(&output.stdout));
        bail!("tranship move failed ({}): {}", output.status, if said.is_empty() { printed.trim() } else { said });
    }
    let report: Report =
        serde_json::from_value(report_of(&output.stdout)?).context("the report of the move is none")?;
    if report.outcome != Outcome::Moved {
        bail!("the move ended as {:?}: {}", report.outcome, report.error.unwrap_or_default());
    }
    if !report.leftovers.is_empty() {
        bail!("the move left something behind: {}", report.leftovers.join("; "));
    }
    let blackout_ms = report.blackout_ms.context("the report of the move has no blackout")?;
    let parts: Vec<_> = report.parts.iter().map(|p| (p.name.clone(), p.start_ms, p.start_ms + p.ms)).collect();
    Ok(Moved {
        total_ms,
        blackout_ms,
        slices: slices(&parts, blackout_ms),
        own_count: Some((report.source_extra_bytes, report.destination_extra_bytes)),
        ways: report.ways,
    })
}

/// Resident memory of the bigger one of the two agents.
fn agents_at_rest(lab: &Lab) -> Result<u64> {
    let mut most = 0;
    for node in [SOURCE, DESTINATION] {
        let pid = lab.agent_pid(node)?.with_context(|| format!("the agent of node {node} does not run"))?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("cannot read the memory of the agent of node {node} (pid {pid})"))?;
        most = most.max(crate::watch::field(&status, "VmRSS:").unwrap_or(0));
    }
    Ok(most)
}
