//! A program is the same after plans, after moves that fail, and after moves: its signals, its descriptors, the system
//! calls in which it waits, and what waits for it.

mod recorder;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use tranship_e2e::{
    Log, Moving, Stage, Torturer, arguments, asked, copies, exactly_one_runs, is_gone, remove, restart_agent,
    scenarios, send, state, wait_until,
};
use tranship_lab::{Lab, RunOptions, find_program};
use tranship_types::Mode;

const NAME: &str = "undisturbed";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 70);
/// How long timed waits last, and how many kinds of them there are.
const SECONDS: u64 = 20;
const TIMED: usize = 18;
/// Waits that a move ends with EINTR: no kernel tells how much is left of their time.
const INTERRUPTED: [&str; 6] =
    ["epoll_timeout", "epoll_pwait2", "semtimedop", "sigtimedwait", "recv_timeout", "accept_timeout"];
/// When the last move begins, at the earliest, after the waits have begun.
const LAST: Duration = Duration::from_secs(12);
const PATIENCE: Duration = Duration::from_secs(20);

/// What is seen of each process, by its pid in the container.
type Seen = BTreeMap<u32, Vec<String>>;

/// The pids on the host of the one copy that there is.
fn pids(lab: &Lab) -> Result<Vec<u32>> {
    Ok(copies(lab, NAME)?.into_iter().next().context("there is no copy")?.pids)
}

fn seen(lab: &Lab) -> Result<Seen> {
    let mut all = Seen::new();
    for pid in pids(lab)? {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:")).context("no NSpid")?;
        let inner = inner.split_whitespace().last().context("no pid")?.parse()?;
        let of_signals = |line: &&str| {
            ["SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "TracerPid"].iter().any(|key| line.starts_with(key))
        };
        let mut lines: Vec<String> = status.lines().filter(of_signals).map(ToOwned::to_owned).collect();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            // The numbers of pipes and sockets are others on another node.
            let kind = std::fs::read_link(entry.path())?.display().to_string();
            let kind = kind.split_once(":[").map_or(kind.as_str(), |(kind, _)| kind);
            lines.push(format!("fd {} {kind}", entry.file_name().display()));
        }
        lines.sort();
        all.insert(inner, lines);
    }
    Ok(all)
}

/// What the program has noticed.
fn noticed(lab: &Lab) -> Result<String> {
    let pid = pids(lab)?.into_iter().next().context("no process")?;
    Ok(std::fs::read_to_string(format!("/proc/{pid}/root/tmp/noticed")).unwrap_or_default())
}

fn start(lab: &Lab, arguments: &[&str], processes: usize) -> Result<()> {
    let mut options = RunOptions::new(IP, [&["/opt/undisturbed"], arguments].concat());
    options.binds.push((find_program("undisturbed")?, "/opt/undisturbed".into()));
    lab.run("a", NAME, &options)?;
    wait_until("all processes to wait", PATIENCE, || {
        let pids = pids(lab)?;
        let waits = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") S "));
        Ok((pids.len() == processes && pids.iter().all(waits)).then_some(()))
    })
}

fn assert_unchanged(lab: &Lab, before: &Seen) -> Result<()> {
    let noticed = noticed(lab)?;
    ensure!(noticed.is_empty(), "it has noticed:\n{noticed}");
    let after = seen(lab)?;
    for (pid, lines) in before {
        let now = after.get(pid).with_context(|| format!("process {pid} is gone"))?;
        ensure!(now == lines, "process {pid} was {lines:#?} and is {now:#?}");
    }
    ensure!(after.len() == before.len(), "there are other processes");
    Ok(())
}

/// After a move: the signals are as they were, and of the system calls only some have noticed anything. One that ends with EINTR changes the
/// blocked signals.
fn assert_moved_unchanged(lab: &Lab, before: &Seen) -> Result<()> {
    let after = seen(lab)?;
    let noticed = noticed(lab)?;
    for (pid, lines) in before {
        let now =
            after.get(pid).with_context(|| format!("process {pid} is gone; it was {lines:#?}; noticed: {noticed}"))?;
        let lines = lines.iter().filter(|line| !line.starts_with("SigBlk"));
        let lost: Vec<_> = lines.filter(|line| !now.contains(line)).collect();
        ensure!(lost.is_empty(), "process {pid} has no more {lost:?}, but {now:#?}");
    }
    let known = |line: &&str| line.split_once(": -1, Interrupted").is_some_and(|(name, _)| INTERRUPTED.contains(&name));
    let others: Vec<_> = noticed.lines().filter(|line| !known(line)).collect();
    ensure!(others.is_empty(), "it has noticed: {others:#?}");
    Ok(())
}

/// Moves that fail before the freeze and in it, each of them at one of its agents.
fn fail(lab: &Lab, failure: &str) -> Result<()> {
    let node = if failure.starts_with("source") { "a" } else { "b" };
    restart_agent(lab, node, failure)?;
    let ended = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?.end()?;
    ensure!(!ended.success, "the move did not fail");
    restart_agent(lab, node, "")
}

fn nothing_is_noticed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    // One for each call, the first one, and three that others wait for.
    start(lab, &[], 34)?;
    let before = seen(lab)?;
    for _ in 0..3 {
        lab.check("a", &["tranship", "plan", NAME, "--to", "b"])?;
        assert_unchanged(lab, &before).context("after a plan")?;
    }
    fail(lab, "source.precopy.after.error")?;
    assert_unchanged(lab, &before).context("after a move that failed before the freeze")?;
    for failure in ["source.freeze.after.error", "source.transfer.after.error", "destination.restore.after.error"] {
        fail(lab, failure)?;
        assert_unchanged(lab, &before).with_context(|| format!("after {failure}"))?;
    }
    let (mut from, mut to) = ("a", "b");
    for mode in [Mode::Auto, Mode::Precopy, Mode::Postcopy] {
        let ended = Moving::begin(lab, NAME, from, to, mode)?.end()?;
        ensure!(ended.success, "{}", ended.error());
        ensure!(exactly_one_runs(lab, NAME)? == to);
        assert_moved_unchanged(lab, &before).with_context(|| format!("after a move in mode {mode}"))?;
        (from, to) = (to, from);
    }
    a_signal_in_the_freeze_ends_pause(lab, from, to)?;
    remove(lab, NAME)
}

/// The kernel would run the handler and let pause(2) return.
fn a_signal_in_the_freeze_ends_pause(lab: &Lab, from: &str, to: &str) -> Result<()> {
    let inner = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some((numbers.split_whitespace().next_back()?.parse::<u32>().ok()?, pid))
    };
    let mut all: Vec<_> = pids(lab)?.into_iter().filter_map(inner).collect();
    all.sort_unstable();
    // The first call in the list is that of the first child.
    let (_, pid) = *all.get(1).context("no process pauses")?;
    restart_agent(lab, from, "source.freeze.after.hold")?;
    let agent = lab.agent_pid(from)?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, from, to, Mode::Cold)?;
    wait_until("the agent to have frozen it", PATIENCE, || Ok((state(agent) == Some('T')).then_some(())))?;
    send(Signal::SIGUSR1, pid)?;
    send(Signal::SIGCONT, agent)?;
    let ended = moving.end()?;
    ensure!(ended.success, "{}", ended.error());
    wait_until("pause to return", PATIENCE, || {
        Ok(noticed(lab)?.lines().any(|line| line.starts_with("pause: -1, Interrupted")).then_some(()))
    })
}

/// A plan, a move that fails before the freeze, one that fails in it, and two moves.
fn waits_end_when_they_should(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let begun = Instant::now();
    start(lab, &[&SECONDS.to_string()], TIMED + 1)?;
    lab.check("a", &["tranship", "plan", NAME, "--to", "b"])?;
    let moved = Instant::now();
    for failure in ["source.precopy.after.error", "destination.restore.after.error"] {
        fail(lab, failure)?;
    }
    let mut moving = moved.elapsed();
    for (from, to) in [("a", "b"), ("b", "a")] {
        if to == "a" {
            std::thread::sleep(LAST.saturating_sub(begun.elapsed()));
        }
        let moved = Instant::now();
        let ended = Moving::begin(lab, NAME, from, to, Mode::Auto)?.end()?;
        ensure!(ended.success, "{}", ended.error());
        moving += moved.elapsed();
    }
    let ended = wait_until("all waits to end", PATIENCE + LAST + Duration::from_secs(SECONDS), || {
        let pid = pids(lab)?.into_iter().next().context("no process")?;
        let text = std::fs::read_to_string(format!("/proc/{pid}/root/tmp/ended")).unwrap_or_default();
        Ok((text.lines().count() == TIMED).then_some(text))
    })?;
    let wrong: Vec<_> = ended.lines().filter(|line| !ended_well(line, moving)).collect();
    ensure!(wrong.is_empty(), "the moves took {moving:?}; of\n{ended}these have not ended as they should: {wrong:#?}");
    remove(lab, NAME)
}

/// Whether a call has ended in time, but for as long as it was frozen, and has returned what it returns when its time is over.
fn ended_well(line: &str, moving: Duration) -> bool {
    let [name, returned, errno, after] = line.split(' ').collect::<Vec<_>>()[..] else { return false };
    let what = match name {
        "futex" | "futex_until" => ("-1", number(Errno::ETIMEDOUT)),
        // A move ends these with EINTR.
        "epoll_wait" | "epoll_pwait2" | "sigtimedwait" | "semtimedop" | "recv" | "accept" => {
            return (returned, errno) == ("-1", &number(Errno::EINTR));
        }
        _ => ("0", errno.to_owned()),
    };
    let (due, slack) = (u128::from(SECONDS) * 1000, (moving + Duration::from_secs(2)).as_millis());
    (returned, errno) == (what.0, &what.1) && after.parse().is_ok_and(|ms: u128| ms >= due && ms <= due + slack)
}

fn number(errno: Errno) -> String {
    (errno as i32).to_string()
}

/// Nothing is left of the agent in the program, which goes on with its own registers; nor is anything in the way of the next move.
fn the_source_s_agent_is_killed_in_precopy(stage: &mut Stage) -> Result<()> {
    const KILLS: u64 = 6;
    /// About as long as the rounds of the torturer last.
    const LATEST_MS: u64 = 400;
    let lab = &stage.lab;
    let seed = asked("TRANSHIP_SEED", |text| text.parse().ok())?.unwrap_or(1);
    eprintln!("seed {seed} (TRANSHIP_SEED)");
    let mut torturer = Torturer::start(lab, "a", "torturer", IP, &arguments(seed, "TRANSHIP_TORTURER"))?;
    torturer.goes_on(1)?;
    for kill in 0..KILLS {
        let from = exactly_one_runs(lab, "torturer")?;
        let to = if from == "a" { "b" } else { "a" };
        // It is not frozen yet at the latest of these moments.
        restart_agent(lab, &from, "source.precopy.after.delay-2000")?;
        let agent = lab.agent_pid(&from)?.context("the agent has just been started")?;
        let mark = Log::mark(lab, &from)?;
        let moving = Moving::begin(lab, "torturer", &from, to, Mode::Precopy)?;
        wait_until("the rounds to begin", PATIENCE, || Ok(mark.text().contains("phase=precopy").then_some(())))?;
        let after = (seed + 1).wrapping_mul(kill + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        std::thread::sleep(Duration::from_millis(after % LATEST_MS));
        send(Signal::SIGKILL, agent)?;
        wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
        restart_agent(lab, &from, "")?;
        ensure!(!moving.end()?.success, "the move went on without its agent");
        torturer.goes_on(1)?;
        for pid in copies(lab, "torturer")?.iter().flat_map(|copy| copy.pids.clone()) {
            let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            let links = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            let strays: Vec<_> = links.filter(|link| link.ends_with("anon_inode:[userfaultfd]")).collect();
            ensure!(strays.is_empty(), "kill {kill}: process {pid} has a userfaultfd");
        }
    }
    let from = exactly_one_runs(lab, "torturer")?;
    let to = if from == "a" { "b" } else { "a" };
    wait_until("the next move", PATIENCE, || {
        Ok(Moving::begin(lab, "torturer", &from, to, Mode::Auto)?.end()?.success.then_some(()))
    })?;
    torturer.goes_on(1)?;
    remove(lab, "torturer")
}

fn main() -> ExitCode {
    scenarios(&[
        ("nothing_is_noticed", nothing_is_noticed),
        ("waits_end_when_they_should", waits_end_when_they_should),
        ("nothing_that_waits_is_lost_or_out_of_order", recorder::nothing_that_waits_is_lost_or_out_of_order),
        ("the_source_s_agent_is_killed_in_precopy", the_source_s_agent_is_killed_in_precopy),
    ])
}
