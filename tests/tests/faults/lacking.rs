//! Threads, processes and descriptors that an agent does not have any more from some moment on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Log, Moving, restart_agent, send, state, wait_until};
use tranship_lab::Lab;
use tranship_types::{Mode, Side};

use crate::play::Play;

/// What an agent is out of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lacking {
    /// Threads, and processes, by the limit of its cgroup.
    Threads,
    Descriptors,
}

/// Where an agent runs out of something, and on which side the container goes on meanwhile.
pub struct Case {
    side: Side,
    place: &'static str,
    what: Lacking,
    mode: Mode,
    ends_on: Option<Side>,
}

const fn case(side: Side, place: &'static str, what: Lacking, mode: Mode, ends_on: Option<Side>) -> Case {
    Case { side, place, what, mode, ends_on }
}

/// Before the commit point a move may end either way, unless it cannot do without what is lacking. After it, it ends
/// when nothing is lacking.
pub const CASES: [Case; 11] = [
    case(Side::Source, "source.freeze.before", Lacking::Threads, Mode::Hybrid, None),
    case(Side::Source, "source.freeze.before", Lacking::Descriptors, Mode::Precopy, Some(Side::Source)),
    case(Side::Source, "source.transfer.before", Lacking::Threads, Mode::Precopy, None),
    case(Side::Source, "source.transfer.before", Lacking::Descriptors, Mode::Postcopy, Some(Side::Source)),
    case(Side::Source, "source.deliver.before", Lacking::Threads, Mode::Postcopy, Some(Side::Destination)),
    case(Side::Source, "source.deliver.before", Lacking::Descriptors, Mode::Hybrid, Some(Side::Destination)),
    case(Side::Destination, "destination.engine.before", Lacking::Threads, Mode::Cold, Some(Side::Source)),
    case(Side::Destination, "destination.restore.before", Lacking::Threads, Mode::Hybrid, None),
    case(Side::Destination, "destination.restore.before", Lacking::Descriptors, Mode::Cold, None),
    case(Side::Destination, "destination.resume.before", Lacking::Threads, Mode::Postcopy, Some(Side::Destination)),
    case(Side::Destination, "destination.commit.before", Lacking::Descriptors, Mode::Precopy, Some(Side::Destination)),
];

impl Case {
    pub fn name(&self) -> String {
        format!("{}.without-{:?}.{}", self.place, self.what, self.mode).to_lowercase()
    }

    /// The container goes on while the agent lacks it, `tranship` says how the move ended, and nothing is left.
    pub fn play(&self, lab: &Lab, play: &mut Play) -> Result<()> {
        let (from, to) = play.direction();
        let node = if self.side == Side::Source { &from } else { &to };
        restart_agent(lab, node, &format!("{}.hold", self.place))?;
        let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
        let (log, there) = (Log::mark(lab, &from)?, Log::mark(lab, &to)?);
        let moving = Moving::begin(lab, play.name(), &from, &to, self.mode)?;
        wait_until("the agent to be held", Duration::from_secs(20), || Ok((state(agent) == Some('T')).then_some(())))?;
        let limit = self.limit(agent);
        send(Signal::SIGCONT, agent)?;
        let limit = limit?;
        // Whether it can be told or not: nobody waits for it.
        let asked = lab.exec(node, &["timeout", "10", "tranship", "history"])?;
        ensure!(asked.status.code() != Some(124), "tranship waits for an agent that lacks {:?}", self.what);
        let decided = self.ends_on == Some(Side::Destination);
        let ended = if decided {
            play.goes_on().context("while it is lacking")?;
            drop(limit);
            moving.end()?
        } else {
            let ended = moving.end().context("while it is lacking")?;
            play.goes_on().context("while it is lacking")?;
            drop(limit);
            ended
        };
        eprintln!("        {}: {}", self.name(), ended.error());
        ensure!(ended.report.is_some(), "tranship was not answered: {}", ended.error());
        let remedy = if self.what == Lacking::Threads { "raise TasksMax=" } else { "raise LimitNOFILE=" };
        ensure!(ended.success || ended.error().contains(remedy), "{remedy} is not in the report: {}", ended.error());
        for sign in ["restoring them again", "nothing but the freezer keeps"] {
            ensure!(!log.text().contains(sign) && !there.text().contains(sign), "the log has {sign:?}");
        }
        play.settle(lab, &ended, self.ends_on)
    }

    fn limit(&self, agent: u32) -> Result<Limit> {
        match self.what {
            Lacking::Threads => Limit::of_threads(agent),
            Lacking::Descriptors => Limit::of_descriptors(agent),
        }
    }
}

/// A limit that an agent has reached; lifted on drop.
enum Limit {
    Cgroup { agent: u32, own: PathBuf, above: PathBuf },
    Descriptors { agent: u32, before: String },
}

impl Limit {
    fn of_threads(agent: u32) -> Result<Self> {
        let above = Path::new("/sys/fs/cgroup/pids");
        let above = if above.exists() { above } else { Path::new("/sys/fs/cgroup") };
        let own = above.join("lacking");
        fs::create_dir_all(&own)?;
        let limit = Self::Cgroup { agent, own: own.clone(), above: above.to_owned() };
        fs::write(own.join("pids.max"), "1").context("a cgroup without the controller of pids")?;
        fs::write(own.join("cgroup.procs"), agent.to_string())?;
        Ok(limit)
    }

    /// As if all numbers below the lowest that is free were all that it may have.
    fn of_descriptors(agent: u32) -> Result<Self> {
        let list = fs::read_dir(format!("/proc/{agent}/fd"))?.flatten();
        let open: Vec<usize> = list.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
        let lowest = (0..).find(|number| !open.contains(number)).unwrap_or(0);
        let limits = fs::read_to_string(format!("/proc/{agent}/limits"))?;
        let line = limits.lines().find(|line| line.starts_with("Max open files")).context("no such limit")?;
        let before = line.split_whitespace().nth(3).context("no such limit")?.to_owned();
        prlimit(agent, &lowest.to_string())?;
        Ok(Self::Descriptors { agent, before })
    }
}

fn prlimit(agent: u32, soft: &str) -> Result<()> {
    let status = Command::new("prlimit").args(["--pid", &agent.to_string(), &format!("--nofile={soft}:")]).status()?;
    ensure!(status.success(), "prlimit ended with {status}");
    Ok(())
}

impl Drop for Limit {
    fn drop(&mut self) {
        let lifted = match self {
            Self::Cgroup { agent, own, above } => fs::write(above.join("cgroup.procs"), agent.to_string())
                .and_then(|()| fs::remove_dir(own))
                .context("moving the agent back"),
            Self::Descriptors { agent, before } => prlimit(*agent, before),
        };
        if let Err(error) = lifted {
            eprintln!("the limit is not lifted: {error:#}");
        }
    }
}
