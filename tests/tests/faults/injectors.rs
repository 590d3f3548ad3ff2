//! The short-lived processes of an agent that work inside the container's tasks are killed, or stand still, wherever they are at work. A task
//! that one of them has given other registers is spared: no tracer can be killed there without the task (`crates/sys/src/remote.rs`).

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Moving, copies, restart_agent, send, state, wait_until};
use tranship_lab::Lab;
use tranship_types::{Mode, Side};

use crate::play::Play;

/// Opens the userfaultfds by which writes are found.
const INJECT: &str = "tranship-inject";
/// Puts system calls right that a freeze has interrupted.
const THAW: &str = "tranship-thaw";
const SOON: Duration = Duration::from_secs(20);
/// Moves until one of the processes is caught, each of which works for less than a millisecond.
const ATTEMPTS: u32 = 12;
/// What a tracer has resumed has come to its next stop by then.
const SETTLED: Duration = Duration::from_millis(2);

/// What is done to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Kill,
    /// It stands still for so many ms. After 10 s the agent goes on without it.
    Stop(u64),
}

pub struct Case {
    /// Where the source's agent is held, and what else happens to it there.
    faults: &'static str,
    helper: &'static str,
    what: What,
    mode: Mode,
    /// Where the container must be afterwards; either side where there is none.
    ends_on: Option<Side>,
}

const fn case(faults: &'static str, helper: &'static str, what: What, mode: Mode, ends_on: Option<Side>) -> Case {
    Case { faults, helper, what, mode, ends_on }
}

const S: Option<Side> = Some(Side::Source);
const D: Option<Side> = Some(Side::Destination);
/// The move fails when the container is frozen, and is undone.
const UNDONE: &str = "source.transfer.before.hold,source.transfer.after.error";

pub const CASES: [Case; 7] = [
    case("source.arm.before.hold", INJECT, What::Kill, Mode::Precopy, D),
    case("source.arm.before.hold", INJECT, What::Kill, Mode::Hybrid, D),
    case("source.arm.before.hold", INJECT, What::Stop(1200), Mode::Postcopy, D),
    case("source.arm.before.hold", INJECT, What::Stop(11_000), Mode::Hybrid, None),
    case(UNDONE, THAW, What::Kill, Mode::Hybrid, S),
    case(UNDONE, THAW, What::Kill, Mode::Cold, S),
    case(UNDONE, THAW, What::Stop(1200), Mode::Precopy, S),
];

impl Case {
    pub fn name(&self) -> String {
        let what = match self.what {
            What::Kill => "killed".to_owned(),
            What::Stop(ms) => format!("stopped-{ms}ms"),
        };
        let place = self.faults.split(".hold").next().unwrap_or_default();
        format!("{}-{what}.{place}.{}", self.helper.trim_start_matches("tranship-"), self.mode)
    }

    pub fn play(&self, lab: &Lab, play: &mut Play) -> Result<()> {
        for _ in 0..ATTEMPTS {
            if self.attempt(lab, play)? {
                return Ok(());
            }
        }
        anyhow::bail!("in {ATTEMPTS} moves no {} could be caught", self.helper)
    }

    /// Whether it could be done in a move, whose end fits in any case.
    fn attempt(&self, lab: &Lab, play: &mut Play) -> Result<bool> {
        let (from, to) = play.direction();
        restart_agent(lab, &from, self.faults)?;
        let agent = lab.agent_pid(&from)?.context("the agent has just been started")?;
        let mut moving = Moving::begin(lab, play.name(), &from, &to, self.mode)?;
        wait_until("the agent to be held", SOON, || Ok((state(agent) == Some('T')).then_some(())))?;
        send(Signal::SIGCONT, agent)?;
        let caught = self.catch(lab, play, agent, &mut || moving.goes_on())?;
        let ended = moving.end()?;
        eprintln!("        {}, {}: {}", self.name(), if caught { "caught" } else { "not caught" }, ended.error());
        for copy in copies(lab, play.name())? {
            for pid in copy.pids {
                ensure!(!has_userfaultfd(pid), "process {pid} on node {} has a userfaultfd open", copy.node);
            }
        }
        play.settle(lab, &ended, self.ends_on)?;
        Ok(caught)
    }

    /// Does it to the first such process that can be caught at a moment at which the tasks have their own registers: whether there was one.
    fn catch(&self, lab: &Lab, play: &Play, agent: u32, goes_on: &mut dyn FnMut() -> Result<bool>) -> Result<bool> {
        while goes_on()? {
            let Some(helper) = child(agent, self.helper) else { continue };
            send(Signal::SIGSTOP, helper)?;
            std::thread::sleep(SETTLED);
            if state(helper) != Some('T') {
                continue;
            }
            if let What::Stop(ms) = self.what {
                // The passing of time is what this is about.
                std::thread::sleep(Duration::from_millis(ms));
                return send(Signal::SIGCONT, helper).map(|()| true);
            }
            let tasks: Vec<u32> = copies(lab, play.name())?.into_iter().flat_map(|copy| copy.pids).collect();
            if tasks.iter().all(|pid| has_own_registers(*pid, helper)) {
                let open = tasks.iter().any(|pid| has_userfaultfd(*pid));
                eprintln!("        killed, with a userfaultfd open in the program: {open}");
                return send(Signal::SIGKILL, helper).map(|()| true);
            }
            send(Signal::SIGCONT, helper)?;
        }
        Ok(false)
    }
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// A child of a process, by its name.
fn child(process: u32, name: &str) -> Option<u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten();
    let children: String = tasks.map(|task| text(&format!("{}/children", task.path().display()))).collect();
    let mut children = children.split_whitespace();
    children.find(|pid| text(&format!("/proc/{pid}/comm")).trim() == name)?.parse().ok()
}

/// Whether none of a process's threads has registers that its tracer, which stands still, has given it: those have it in the vdso.
fn has_own_registers(pid: u32, tracer: u32) -> bool {
    let maps = text(&format!("/proc/{pid}/maps"));
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).and_then(|line| line.split(' ').next());
    let Some((start, end)) = vdso.and_then(|range| range.split_once('-')) else { return false };
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let (Some(start), Some(end)) = (number(start), number(end)) else { return false };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().all(|thread| {
        let of_thread = |file: &str| text(&format!("{}/{file}", thread.path().display()));
        if !of_thread("status").lines().any(|line| line == format!("TracerPid:\t{tracer}")) {
            return true;
        }
        let call = of_thread("syscall");
        let place = call.split_whitespace().last().filter(|place| place.starts_with("0x")).and_then(number);
        of_thread("stat").contains(") t ") && place.is_some_and(|place| !(start..end).contains(&place))
    })
}

fn has_userfaultfd(pid: u32) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries
        .into_iter()
        .any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]"))
}
