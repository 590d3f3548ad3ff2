//! Runs: a lab with a container in it, what the system does with that, over and over, and the checks each time that nothing
//! was lost.

use std::fmt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::{Lab, Rate, UpOptions, report_of};
use tranship_types::{Mode, Outcome, Report};
use tranship_workloads::traffic::Course;

use crate::crowd::Crowd;
use crate::machine::{self, megabytes};
use crate::peer::Recipe;
use crate::suite::{Case, Load, System};
use crate::timeline::{REST, Slice, slices};
use crate::watch::{Watch, Wire};
use crate::workload::Workload;
use crate::{hogs, own, program, tracking, workload};

/// The node that the container starts on, and the other one.
pub const NODES: [&str; 2] = ["a", "b"];
const NAME: &str = "subject";
/// Others test on this machine too, and only one lab can be up.
const LAB_LIMIT: Duration = Duration::from_secs(600);
/// What a run takes beyond its workload's memory twice over: programs, images, page tables.
const SPARE: u64 = 1 << 30;

/// Quantities by the names that they have in the results.
pub type Figures = Vec<(&'static str, f64)>;

/// What moving says about itself.
#[derive(Debug)]
pub struct Moved {
    /// From the command's start to its end, in ms.
    pub total_ms: f64,
    /// From the first task frozen to the last task running, in ms; `None` where nobody tells.
    pub blackout_ms: Option<f64>,
    /// What the blackout was spent on.
    pub slices: Vec<Slice>,
    /// Tranship's own report.
    pub report: Option<Box<Report>>,
}

/// What one run has shown.
#[derive(Debug, Default)]
pub struct Sample {
    /// Quantities; [`docs/benchmarks.md`] says what each one is.
    pub figures: Figures,
    /// What the blackout was spent on.
    pub slices: Vec<Slice>,
    /// Tranship's own report.
    pub report: Option<Box<Report>>,
    /// What the client received over time, and when the move's stretch began (s since the Unix epoch).
    pub course: Option<(f64, Course)>,
}

impl Sample {
    /// A quantity by its name.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (words, name) in
            [("client gap", "client_gap_ms"), ("blackout", "blackout_ms"), ("total", "total_ms"), ("run", "run_ms")]
        {
            if let Some(ms) = self.figure(name) {
                write!(f, "{words} {ms:>8.1} ms  ")?;
            }
        }
        if let Some(bytes) = self.figure("bytes_wire") {
            write!(f, "wire {:>8}  ", megabytes(bytes as u64))?;
        }
        if let (Some(source), Some(destination)) =
            (self.figure("peak_mem_source_bytes"), self.figure("peak_mem_destination_bytes"))
        {
            write!(f, "memory {} + {}  ", megabytes(source as u64), megabytes(destination as u64))?;
        }
        if let Some(report) = &self.report {
            write!(f, "{} rounds {}  ", report.mode_taken.unwrap_or(report.mode), report.rounds.len())?;
        }
        if let (Some(count), Some(p50), Some(p99)) =
            (self.figure("remote_faults"), self.figure("fault_p50_us"), self.figure("fault_p99_us"))
        {
            write!(f, "remote faults {count}, p50 {p50:.0} µs, p99 {p99:.0} µs  ")?;
        }
        if let (Some(wall), Some(cpu)) = (self.figure("tracking_cost_share"), self.figure("tracking_cpu_share")) {
            write!(f, "tracking costs {:.1} %, by CPU time {:.1} %", wall * 100.0, cpu * 100.0)?;
        }
        Ok(())
    }
}

/// A lab with a container in it, which is moved there and back, once a run. Whatever happens, the lab is taken down.
pub struct Stand {
    workload: Box<dyn Workload>,
    lab: Lab,
    case: &'static Case,
    system: System,
    link: Option<Rate>,
    /// Where the container is, and where it goes next.
    way: [&'static str; 2],
    /// What is known of every run, and of the first one alone: how big agents are that have moved nothing yet.
    constant: Figures,
    first: Figures,
}

impl Stand {
    /// Brings the lab up, and the container on node a into its stride.
    pub fn up(case: &'static Case, system: System) -> Result<Self> {
        let link: Option<Rate> = case.link.map(str::parse).transpose()?;
        let (needed, available) = (2 * case.load.memory() + SPARE, machine::available_memory());
        if needed > available {
            bail!("it needs {} of memory, of which {} are to spare", megabytes(needed), megabytes(available));
        }
        // The peer is measured on nodes without anything of Tranship's.
        let agents = system.tranship().is_some();
        let lab = Lab::up(&UpOptions { nodes: 2, link, agents, wait: LAB_LIMIT })?;
        if agents && case.delay_ms > 0 {
            let delay = format!("destination.restore.before.delay-{}", case.delay_ms);
            for node in NODES {
                lab.kill_agent(node)?;
                lab.start_agent(node, &[("TRANSHIP_FAULTS", &delay)])?;
            }
        }
        if let System::Own(engine) = system {
            own::prepare(&lab, engine, NODES[0])?;
        }
        let workload =
            workload::start(&lab, NODES[0], NAME, (&case.load, system.engine())).context("starting the workload")?;
        let constant = vec![("workload_bytes", workload.resident_bytes() as f64)];
        let first = if agents { vec![("agent_rest_bytes", agents_at_rest(&lab)? as f64)] } else { Vec::new() };
        Ok(Self { workload, lab, case, system, link, way: NODES, constant, first })
    }

    /// Performs a run; a move that takes longer than `limit` has failed. After an error there is no telling where the
    /// container is, and the next run needs another stand.
    pub fn measure(&mut self, limit: Duration) -> Result<Sample> {
        let way = self.way;
        let (case, link) = (self.case, self.link);
        let mut sample = match self.system {
            System::Unmoved => {
                self.workload.mark()?;
                Sample { figures: self.workload.check()?, ..Sample::default() }
            }
            System::Tracked => {
                Sample { figures: tracking::measure(way[0], NAME, &mut *self.workload)?, ..Sample::default() }
            }
            System::Tranship(mode) | System::Managed(_, mode) => {
                let mut sample = self.across(|lab| tranship(lab, NAME, way, mode, limit))?;
                if let Some(report) = &sample.report {
                    sample.figures.extend(told(report, link));
                }
                sample
            }
            System::AtOnce(mode) | System::OneByOne(mode) => {
                let at_once = matches!(self.system, System::AtOnce(_));
                let Load::Crowd { containers, .. } = case.load else { bail!("{:?} is no crowd", case.load) };
                let crowd = Crowd { name: NAME, containers, at_once };
                let mut median = 0.0;
                let mut sample = self.across(|lab| {
                    let (moved, of_all) = crowd.perform(lab, way, mode, limit)?;
                    median = of_all;
                    Ok(moved)
                })?;
                sample.figures.push(("blackout_median_ms", median));
                sample
            }
            System::Peer => {
                let recipe = Recipe::prepare(&self.lab, way, NAME, case.delay_ms)?;
                self.across(|_| recipe.perform(limit))?
            }
            System::Own(engine) => self.across(|lab| own::perform(lab, engine, way, NAME, limit))?,
        };
        sample.figures.append(&mut self.first);
        sample.figures.extend(&self.constant);
        Ok(sample)
    }

    /// Watches nodes and workload while the container is moved.
    fn across(&mut self, perform: impl FnOnce(&Lab) -> Result<Moved>) -> Result<Sample> {
        let [source, destination] = self.way;
        machine::touch_memory(self.case.load.memory());
        let hogs = if self.case.loaded { hogs::start(&self.lab, NODES)? } else { Vec::new() };
        self.workload.mark()?;
        let wire = Wire::now(&self.lab, NODES)?;
        let watch = Watch::start(&self.lab, source, destination)?;
        let moved = perform(&self.lab);
        let memory = watch.stop()?;
        let bytes_wire = wire.since(&self.lab)?;
        let moved = moved?;
        self.way = [destination, source];
        // The checks are no part of what is measured, and would take three times as long.
        drop(hogs);
        let mut figures = self.workload.check().context("after the move")?;
        figures.extend(seen(&moved, &figures));
        figures.extend([
            ("bytes_wire", bytes_wire as f64),
            ("peak_mem_bytes", (memory.source + memory.destination) as f64),
            ("peak_mem_source_bytes", memory.source as f64),
            ("peak_mem_destination_bytes", memory.destination as f64),
        ]);
        if moved.report.is_some() {
            figures.extend([
                ("agent_source_bytes", memory.source_agent as f64),
                ("agent_destination_bytes", memory.destination_agent as f64),
                ("pager_bytes", memory.pager as f64),
            ]);
        }
        Ok(Sample { figures, slices: moved.slices, report: moved.report, course: self.workload.course() })
    }

    /// Checks what is not checked after each run.
    pub fn check_all(&mut self) -> Result<()> {
        self.workload.check_all().context("after the last move")
    }

    /// Takes the lab down.
    pub fn down(self) -> Result<()> {
        drop(self.workload);
        self.lab.down().context("taking the lab down failed")
    }
}

/// What the move tells, and what the client saw beyond it.
fn seen(moved: &Moved, client: &Figures) -> Figures {
    let mut figures = vec![("total_ms", moved.total_ms)];
    let Some(blackout_ms) = moved.blackout_ms else { return figures };
    let beyond = |name: &str| client.iter().find(|(n, _)| *n == name).map(|(_, ms)| ms - blackout_ms);
    let beyond = [("gap_beyond_blackout_ms", beyond("client_gap_ms")), ("regained_ms", beyond("without_rate_ms"))];
    let unaccounted = moved.slices.iter().filter(|s| s.name == REST).map(|s| s.ms).sum();
    figures.extend([("blackout_ms", blackout_ms), ("unaccounted_ms", unaccounted)]);
    figures.extend(beyond.into_iter().filter_map(|(name, ms)| Some((name, ms?))));
    figures
}

/// Moves a container by `tranship move`.
pub fn tranship(lab: &Lab, name: &str, [source, destination]: [&str; 2], mode: Mode, limit: Duration) -> Result<Moved> {
    let mut command = lab.move_command(source, name, destination)?;
    command.args(["--mode", &mode.to_string()]).stderr(Stdio::piped());
    let begin = Instant::now();
    let output = program::run(command, limit)?;
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
    let slices = slices(&parts, blackout_ms);
    Ok(Moved { total_ms, blackout_ms: Some(blackout_ms), slices, report: Some(Box::new(report)) })
}

/// What Tranship's report tells beyond what is seen from outside.
fn told(report: &Report, link: Option<Rate>) -> Figures {
    let mut figures = vec![
        ("reported_source_bytes", report.source_extra_bytes as f64),
        ("reported_destination_bytes", report.destination_extra_bytes as f64),
        ("page_bytes", report.progress.moved_bytes as f64),
    ];
    if let Some(first) = report.rounds.first().filter(|round| round.ms > 0.0) {
        let rate = first.bytes as f64 / first.ms * 1e3;
        figures.extend([("rounds", report.rounds.len() as f64), ("first_round_bytes_per_s", rate)]);
        figures.extend(link.map(|link| ("link_share", rate * 8.0 / link.bits as f64)));
    }
    if let Some(faults) = &report.remote_faults {
        figures.extend([
            ("remote_faults", faults.count as f64),
            ("fault_p50_us", faults.p50_us),
            ("fault_p99_us", faults.p99_us),
            ("fault_max_us", faults.max_us),
        ]);
    }
    figures
}

/// Resident memory of the bigger one of the two agents.
fn agents_at_rest(lab: &Lab) -> Result<u64> {
    let mut most = 0;
    for node in NODES {
        let pid = lab.agent_pid(node)?.with_context(|| format!("the agent of node {node} does not run"))?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("cannot read the memory of the agent of node {node} (pid {pid})"))?;
        most = most.max(crate::watch::field(&status, "VmRSS:").unwrap_or(0));
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::{FaultReport, RoundReport};

    #[test]
    fn the_first_round_tells_how_fast_pages_travel() {
        let name = |text: &str| text.parse().unwrap();
        let mut report =
            Report::new("m-0123456789ab".parse().unwrap(), "c".into(), name("a"), name("b"), Mode::Precopy, 0);
        let find = |figures: &Figures, name: &str| figures.iter().find(|f| f.0 == name).map(|f| f.1);
        assert_eq!(find(&told(&report, None), "rounds"), None);
        report.rounds = vec![RoundReport { bytes: 100_000_000, ms: 1000.0, ..RoundReport::default() }];
        let figures = told(&report, Some(Rate { bits: 1_000_000_000 }));
        assert_eq!(find(&figures, "first_round_bytes_per_s"), Some(1e8));
        assert_eq!(find(&figures, "link_share"), Some(0.8));
        assert_eq!(find(&figures, "fault_p50_us"), None);
    }

    #[test]
    fn remote_faults_are_told_where_there_were_any() {
        let name = |text: &str| text.parse().unwrap();
        let mut report =
            Report::new("m-0123456789ab".parse().unwrap(), "c".into(), name("a"), name("b"), Mode::Hybrid, 0);
        report.remote_faults = Some(FaultReport { count: 3, p50_us: 200.0, p99_us: 900.0, ..FaultReport::default() });
        let figures = told(&report, None);
        assert!(figures.contains(&("remote_faults", 3.0)) && figures.contains(&("fault_p99_us", 900.0)), "{figures:?}");
    }
}
