//! What goes wrong around a move, for real: lost packets, slow links, processes that stand still or are killed for lack
//! of memory, full file systems. Each begins while an agent is held at a place of the coordinator's.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Log, Moving, is_gone, processes, restart_agent, send, state, wait_until};
use tranship_lab::{Lab, patience};
use tranship_types::{Mode, Side};

use crate::play::Play;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// No packet of this node's agent reaches the other one.
    Lost,
    /// The node sends no more than so much.
    Slow(&'static str),
    /// The process of this kind is stopped.
    Stopped(&'static str),
    /// There is no space in the file system of this directory.
    Full(&'static str),
    /// The memory cgroup of the process of this kind has reached its limit.
    OutOfMemory(&'static str),
    /// The agent has died and was started again, then processes of these kinds were killed.
    Restarted(&'static [&'static str]),
}

/// How long it lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// For a time.
    Millis(u64),
    /// Until the source has undone the move.
    Undone,
    /// Until the process is killed by it. It is started again.
    Killed,
    /// Until `tranship move` has ended.
    Ended,
    /// The same, where that takes as long as a restore may take at most.
    Moved,
}

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// Where an agent is held when it begins, as TRANSHIP_FAULTS has it.
    pub place: &'static str,
    /// What goes wrong.
    pub what: What,
    /// On which side.
    pub on: Side,
    pub mode: Mode,
    pub until: Until,
    /// Where the container must be afterwards; either side where there is none.
    pub ends_on: Option<Side>,
    /// What the report of a failed move has in it.
    pub words: &'static [&'static str],
    /// Whether it is part of `make test`.
    pub every_run: bool,
}

/// How long an agent may take to come to a place, or a process to be killed.
const SOON: Duration = Duration::from_secs(20);
/// How long a source may take to give up, and a command of the CLI to be answered.
const RETURNS: Duration = Duration::from_secs(25);
/// How long a move may take whose restore hangs after READY.
const RESTORED: Duration = Duration::from_secs(120);
const UNDONE: Duration = Duration::from_secs(30);
const ANSWER: &str = "10";

impl Cell {
    pub fn name(&self) -> String {
        let what = match self.what {
            What::Lost => "one-way".to_owned(),
            What::Slow(rate) => format!("slow-{rate}"),
            What::Stopped(kind) => format!("stopped-{kind}"),
            What::Full(directory) => format!("full{}", directory.replace('/', "-")),
            What::OutOfMemory(kind) => format!("oom-{kind}"),
            What::Restarted(kinds) => format!("restarted-then-killed-{}", kinds.join("-")),
        };
        let until = match self.until {
            Until::Millis(ms) => format!(".{ms}ms"),
            _ => String::new(),
        };
        format!("{what}.{:?}.{}{until}.{}", self.on, self.place, self.mode).to_lowercase()
    }

    pub fn play(&self, lab: &Lab, play: &mut Play) -> Result<()> {
        let (from, to) = play.direction();
        let here = if self.on == Side::Source { &from } else { &to };
        let there = if self.on == Side::Source { &to } else { &from };
        let held = if self.place.starts_with("source") { &from } else { &to };
        let dies = matches!(self.what, What::Restarted(_));
        restart_agent(lab, held, &format!("{}.{}", self.place, if dies { "die" } else { "hold" }))?;
        let agent = lab.agent_pid(held)?.context("the agent has just been started")?;
        let log = Log::mark(lab, &from)?;
        // Where every page has come there is nothing left to be killed.
        let slow: &[&str] = if dies { &["--bandwidth", "20mbit", "--compress", "off"] } else { &[] };
        let options = [&["--freeze-timeout", "3s"], slow].concat();
        let moving = Moving::begin_with(lab, play.name(), &from, &to, self.mode, &options)?;
        let ended = if let What::Restarted(kinds) = self.what {
            wait_until("the agent to die", SOON, || Ok(is_gone(agent).then_some(())))?;
            self.restart_and_kill(lab, here, there, kinds)?;
            moving.end()?
        } else {
            wait_until("the agent to be held", SOON, || Ok((state(agent) == Some('T')).then_some(())))?;
            let condition = Condition::begin(lab, self.what, here, there);
            if self.what != What::Stopped("agent") || held != here || condition.is_err() {
                send(Signal::SIGCONT, agent)?;
            }
            self.endure(lab, play, condition?, moving, &log, (here, there))?
        };
        eprintln!("        {}: {}", self.name(), ended.error());
        if !ended.success && !self.words.is_empty() {
            ensure!(ended.report.is_some(), "tranship was not answered: {}", ended.error());
            let unnamed = self.words.iter().find(|word| !ended.error().contains(*word));
            ensure!(unnamed.is_none(), "{:?} is not in the report: {}", unnamed, ended.error());
        }
        play.settle(lab, &ended, self.ends_on)
    }

    /// Waits as long as it lasts, and for the end of the move.
    fn endure(
        &self,
        lab: &Lab,
        play: &mut Play,
        condition: Condition<'_>,
        moving: Moving,
        log: &Log,
        (here, there): (&str, &str),
    ) -> Result<tranship_e2e::Ended> {
        let begun = Instant::now();
        // Whoever asks meanwhile is answered; not by an agent that stands still.
        let asked = if self.what == What::Stopped("agent") { there } else { here };
        if !matches!(self.what, What::OutOfMemory("agent")) {
            let status = lab.exec(asked, &["timeout", ANSWER, "tranship", "status"])?;
            ensure!(status.status.code() != Some(124), "tranship status is not answered meanwhile");
        }
        match self.until {
            // The passing of time is what this is about.
            Until::Millis(ms) => std::thread::sleep(Duration::from_millis(ms).saturating_sub(begun.elapsed())),
            Until::Undone => {
                let undone = || Ok(log.text().contains("phase=undone").then_some(()));
                wait_until("the source to give up", UNDONE, undone)?;
                play.goes_on().context("after the source has given up")?;
            }
            Until::Killed => {
                condition.await_death()?;
                drop(condition);
                lab.start_agent(here, &[])?;
                return moving.end();
            }
            Until::Ended | Until::Moved => {
                let limit = patience(if self.until == Until::Moved { RESTORED } else { RETURNS });
                let ended = moving.end_within(limit)?;
                ensure!(begun.elapsed() < limit, "tranship move returned after {:?}", begun.elapsed());
                play.goes_on().context("while it lasts")?;
                drop(condition);
                return Ok(ended);
            }
        }
        drop(condition);
        moving.end()
    }

    /// While the other node's agent, which would go on with the move, stands still.
    fn restart_and_kill(&self, lab: &Lab, here: &str, there: &str, kinds: &[&str]) -> Result<()> {
        let other = lab.agent_pid(there)?.context("the other agent")?;
        // Before the commit point each side undoes its part by itself.
        if self.ends_on == Some(Side::Destination) {
            send(Signal::SIGSTOP, other)?;
        }
        let done = lab.start_agent(here, &[]).map_err(Into::into).and_then(|()| {
            let victims = processes(lab, here)?.into_iter().filter(|p| kinds.contains(&p.kind));
            victims.map(|victim| send(Signal::SIGKILL, victim.pid)).collect::<Result<Vec<_>>>()
        });
        send(Signal::SIGCONT, other)?;
        let killed = done?.len();
        // An agent that undoes its part may have ended them before.
        ensure!(killed > 0 || self.ends_on != Some(Side::Destination), "there is none of {kinds:?}");
        Ok(())
    }
}

/// What goes wrong until this is dropped.
struct Condition<'a> {
    lab: &'a Lab,
    node: String,
    kind: Lifted,
}

/// What ends it.
enum Lifted {
    Table,
    Rate,
    Processes(Vec<u32>),
    Space { directory: &'static str, target: String },
    Group { victim: u32, own: PathBuf, above: PathBuf },
}

impl<'a> Condition<'a> {
    fn begin(lab: &'a Lab, what: What, here: &str, there: &str) -> Result<Self> {
        let of = |node: &str, kind| Self { lab, node: node.to_owned(), kind };
        match what {
            What::Lost => {
                let rules = format!(
                    "add table ip e2e; add chain ip e2e in {{ type filter hook input priority -300; }}; \
                     add rule ip e2e in ip saddr {} drop",
                    lab.address(here)?
                );
                lab.check(there, &["nft", &rules])?;
                Ok(of(there, Lifted::Table))
            }
            What::Slow(rate) => {
                let shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate];
                lab.check(here, &[&shape[..], &["burst", "16k", "latency", "50ms"]].concat())?;
                Ok(of(here, Lifted::Rate))
            }
            What::Stopped(kind) => {
                let victims = victims(lab, here, kind)?;
                victims.iter().try_for_each(|pid| send(Signal::SIGSTOP, *pid))?;
                Ok(of(here, Lifted::Processes(victims)))
            }
            What::Full(directory) => {
                fill(lab, here, directory).map(|target| of(here, Lifted::Space { directory, target }))
            }
            What::OutOfMemory(kind) => {
                let above = Path::new("/sys/fs/cgroup/memory");
                let (above, limit) = match above.exists() {
                    true => (above, "memory.limit_in_bytes"),
                    false => (Path::new("/sys/fs/cgroup"), "memory.max"),
                };
                let victim = *victims(lab, here, kind)?.first().context("no such process")?;
                let own = above.join("out-of-memory");
                fs::create_dir_all(&own)?;
                let condition = of(here, Lifted::Group { victim, own: own.clone(), above: above.to_owned() });
                fs::write(own.join(limit), "0").context("a cgroup without the controller of memory")?;
                fs::write(own.join("cgroup.procs"), victim.to_string())?;
                Ok(condition)
            }
            What::Restarted(_) => bail!("nothing lasts"),
        }
    }

    fn await_death(&self) -> Result<()> {
        let Lifted::Group { victim, .. } = &self.kind else { bail!("nothing is killed by it") };
        wait_until("the process to be killed", SOON, || Ok(is_gone(*victim).then_some(())))
    }

    fn lift(&self) -> Result<()> {
        let Self { lab, node, kind } = self;
        match kind {
            Lifted::Table => lab.check(node, &["nft", "delete table ip e2e"]).map(drop)?,
            Lifted::Rate => lab.check(node, &["tc", "qdisc", "del", "dev", "eth0", "root"]).map(drop)?,
            Lifted::Processes(all) => all.iter().try_for_each(|pid| send(Signal::SIGCONT, *pid))?,
            Lifted::Space { directory, target } => {
                lab.check(node, &["rm", "-f", &filler(directory)])?;
                lab.check(node, &["mount", "-o", "remount,size=50%", target])?;
            }
            Lifted::Group { own, above, .. } => {
                // What it has started is in it, too.
                for pid in fs::read_to_string(own.join("cgroup.procs"))?.lines() {
                    let _ = fs::write(above.join("cgroup.procs"), pid);
                }
                let removed = || Ok(fs::remove_dir(own).is_ok().then_some(()));
                wait_until("the cgroup to be empty", SOON, removed)?;
            }
        }
        Ok(())
    }
}

impl Drop for Condition<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.lift() {
            eprintln!("it is not over: {error:#}");
        }
    }
}

fn victims(lab: &Lab, node: &str, kind: &str) -> Result<Vec<u32>> {
    if kind == "agent" {
        return Ok(vec![lab.agent_pid(node)?.context("there is no agent")?]);
    }
    let found: Vec<u32> = processes(lab, node)?.into_iter().filter(|p| p.kind == kind).map(|p| p.pid).collect();
    ensure!(!found.is_empty(), "node {node} has no {kind}");
    Ok(found)
}

fn filler(directory: &str) -> String {
    format!("{directory}/.filler")
}

/// Fills the file system of a directory; says where it is mounted.
fn fill(lab: &Lab, node: &str, directory: &str) -> Result<String> {
    let used = lab.check(node, &["df", "--output=used,target", "--block-size=1K", directory])?;
    let (used, target) = used.lines().nth(1).and_then(|line| line.trim().split_once(' ')).context(used.clone())?;
    let kib: u64 = used.parse()?;
    let target = target.trim().to_owned();
    lab.check(node, &["mount", "-o", &format!("remount,size={}k", kib + 64), &target])?;
    let (file, out) = (filler(directory), format!("of={}", filler(directory)));
    for block in ["4k", "1"] {
        let written =
            lab.exec(node, &["dd", "if=/dev/zero", &out, &format!("bs={block}"), "oflag=append", "conv=notrunc"])?;
        let full = String::from_utf8_lossy(&written.stderr).contains("No space left");
        ensure!(full, "{file} does not fill {target}: {written:?}");
    }
    Ok(target)
}
