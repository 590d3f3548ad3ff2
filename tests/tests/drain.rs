//! Every state of a drain has an exit, and what is reported of it is true: whatever stalls, fills up or dies while pages follow a
//! container that runs on its destination.

use std::fs;
use std::net::Ipv4Addr;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_api::ApiError;
use tranship_e2e::{
    Moving, Stage, copies, exactly_one_runs, is_gone, nothing_left, processes, quiet, remove, restart_agent, scenarios,
    send, state, wait_until,
};
use tranship_lab::{Lab, Redis, RunOptions, redis_command, report_of};
use tranship_types::{Mode, Original, Outcome, Phase, Report, WaitKind};

const NAME: &str = "drained";
const KEYS: u64 = 40_000;
const COUNTER: &str = "counter";
/// Within how long the operator must be told.
const TOLD: Duration = Duration::from_secs(15);
/// Slow enough that pages follow for some seconds.
const SLOW: [&str; 4] = ["--bandwidth", "20mbit", "--compress", "off"];
/// Longer than any single answer of a pager may take.
const STALL: Duration = Duration::from_secs(8);

/// A Redis on node a with keys, and what they are.
fn start(lab: &Lab, number: u8) -> Result<(Ipv4Addr, (u64, String))> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    Ok((ip, redis.verify_without(COUNTER)?))
}

fn verify(lab: &Lab, (ip, truth): &(Ipv4Addr, (u64, String))) -> Result<()> {
    let mut redis = Redis::connect(lab, *ip, Duration::from_secs(10))?;
    ensure!(redis.verify_without(COUNTER)? == *truth, "the keys have changed");
    Ok(())
}

/// The move has ended well: the keys are right, and the container is on node b, where it is removed.
fn has_moved(lab: &Lab, truth: &(Ipv4Addr, (u64, String))) -> Result<()> {
    verify(lab, truth)?;
    ensure!(quiet(lab, NAME)? == "b", "the container is not on node b");
    remove(lab, NAME)
}

/// The newest report of a node, once it satisfies a condition.
fn reported(lab: &Lab, node: &str, what: &str, limit: Duration, fits: impl Fn(&Report) -> bool) -> Result<Report> {
    let mut last = None;
    let found = wait_until(what, limit, || {
        let mut all = Vec::new();
        for command in ["status", "history"] {
            let text = lab.check(node, &["tranship", command, "--json"])?;
            all.extend(serde_json::from_str::<Vec<Report>>(text.trim()).with_context(|| text.clone())?);
        }
        last = all.first().map(|r| format!("{:?} {:?} {:?} {:?}", r.phase, r.outcome, r.waiting, r.error));
        Ok(all.into_iter().next().filter(&fits))
    });
    found.with_context(|| format!("the last report of node {node}: {last:?}"))
}

/// Begins a move whose pages follow slowly, and waits until both nodes know that they do.
fn begin(lab: &Lab) -> Result<(Moving, Report)> {
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Postcopy, &SLOW)?;
    let drains = |r: &Report| r.phase == Phase::Drain && r.outcome == Outcome::Running;
    reported(lab, "b", "node b to know that it drains", TOLD, drains)?;
    let report = reported(lab, "a", "node a to know that it drains", TOLD, drains)?;
    Ok((moving, report))
}

/// The pids of the pager and of its keeper.
fn pagers(lab: &Lab) -> Result<Vec<u32>> {
    let found = processes(lab, "b")?.into_iter().filter(|p| ["pager", "keeper"].contains(&p.kind));
    let found: Vec<u32> = found.map(|p| p.pid).collect();
    ensure!(found.len() == 2, "pager and keeper: {found:?}");
    Ok(found)
}

fn waits_for(r: &Report, kind: WaitKind) -> bool {
    r.outcome == Outcome::Running && r.waiting.as_ref().is_some_and(|waiting| waiting.kind == kind)
}

/// The pager stands still for a while. Both nodes tell what is waited for, a page that has come is not lost, and the move ends.
fn a_pager_that_stands_still_is_waited_for_and_named(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 70)?;
    let (moving, report) = begin(lab)?;
    let begun = Instant::now();
    let pagers = pagers(lab)?;
    pagers.iter().try_for_each(|pid| send(Signal::SIGSTOP, *pid))?;
    let told = || -> Result<()> {
        for node in ["a", "b"] {
            reported(lab, node, "the pager to be named", STALL, |r| waits_for(r, WaitKind::Pager))?;
            for words in [&["tranship", "status"][..], &["tranship", "status", report.id.as_str()]] {
                let text = lab.check(node, words)?;
                ensure!(text.contains("waits for the pager on node b") && text.contains("kill -CONT"), "{text}");
            }
        }
        // While that lasts the destination answers whoever asks what it has.
        let refused = lab.exec("a", &["tranship", "recover", NAME, "--destination-lost", "--json"])?;
        let ApiError { error } = serde_json::from_value(report_of(&refused.stdout)?)?;
        ensure!(error.message.contains("runs there, and the move goes on"), "{error}");
        // The passing of time is what this is about.
        std::thread::sleep(STALL.saturating_sub(begun.elapsed()));
        Ok(())
    };
    let told = told();
    pagers.iter().try_for_each(|pid| send(Signal::SIGCONT, *pid))?;
    told?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move: {}", ended.error());
    ensure!(ended.report.is_some_and(|r| r.waiting.is_none()), "it waits for something still");
    has_moved(lab, &truth)
}

/// The destination's agent can open no more files. That is no last page either: it is told, and the move ends when it can again.
fn an_agent_at_its_limit_of_open_files_takes_nothing_for_drained(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 76)?;
    let (moving, _) = begin(lab)?;
    let agent = lab.agent_pid("b")?.context("the agent of node b")?.to_string();
    let limit = |files: &str| -> Result<()> {
        let set = Command::new("prlimit").args(["--pid", &agent, &format!("--nofile={files}:")]).status()?;
        ensure!(set.success(), "prlimit: {set}");
        Ok(())
    };
    let before = fs::read_to_string(format!("/proc/{agent}/limits"))?;
    let before = before.lines().find(|line| line.starts_with("Max open files")).context("no limit")?;
    let before = before.split_whitespace().nth(3).context("no limit")?.to_owned();
    limit("3")?;
    let told = reported(lab, "a", "the limit to be told", TOLD, |r| {
        waits_for(r, WaitKind::Pager) && r.waiting.as_ref().is_some_and(|w| w.remedy.contains("LimitNOFILE"))
    });
    limit(&before)?;
    told?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move: {}", ended.error());
    has_moved(lab, &truth)
}

/// The container is killed on the destination while pages are missing: that is how the move ends, on both nodes.
fn a_container_that_is_killed_in_the_drain_has_not_just_moved(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, 71)?;
    let (moving, report) = begin(lab)?;
    let copy = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "b").context("the copy")?;
    copy.pids.iter().try_for_each(|pid| send(Signal::SIGKILL, *pid))?;
    for node in ["a", "b"] {
        let ended = reported(lab, node, "the container's end to be told", TOLD, |r| r.outcome == Outcome::Ended)?;
        ensure!(ended.phase == Phase::Done && ended.error.is_none(), "{ended:?}");
        ensure!(ended.ended.as_ref().is_some_and(|how| how.contains("ended on node b")), "{:?}", ended.ended);
        let text = lab.check(node, &["tranship", "status", report.id.as_str()])?;
        ensure!(text.contains("was moved from a to b, and ended there before its last pages had come"), "{text}");
        ensure!(lab.check(node, &["tranship", "history"])?.contains("ended there"), "the history of node {node}");
    }
    let ended = moving.end()?;
    ensure!(ended.status == Some(5), "tranship move ended with {ended:?}");
    nothing_left(lab, "a", NAME)?;
    let left = copies(lab, NAME)?;
    ensure!(left.iter().all(|copy| copy.node == "b" && !copy.runs && copy.pids.is_empty()), "{left:?}");
    for node in ["a", "b"] {
        let empty = || {
            let journals = fs::read_dir(lab.path(node, "/var/lib/tranship/journal")?)?.count();
            let migrations = fs::read_dir(lab.path(node, "/run/tranship/migrations")?)?.count();
            Ok((journals == 0 && migrations == 0 && processes(lab, node)?.is_empty()).then_some(()))
        };
        wait_until("nothing to be left", TOLD, empty).with_context(|| format!("node {node}"))?;
    }
    remove(lab, NAME)
}

/// What the pager and the agent write fits, or is written when there is space again.
fn a_full_run_directory_does_not_keep_a_drain_from_its_end(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 72)?;
    let (mut moving, _) = begin(lab)?;
    let (directory, file) = ("/run/tranship/migrations", "/run/tranship/migrations/.full");
    let used = lab.check("b", &["df", "--output=used,target", "--block-size=1K", directory])?;
    let (used, target) = used.lines().nth(1).and_then(|line| line.trim().split_once(' ')).context(used.clone())?;
    let kib: u64 = used.parse()?;
    let full = format!("remount,size={}k", kib + 64);
    let mut fill = || -> Result<()> {
        lab.check("b", &["mount", "-o", &full, target.trim()])?;
        let written = lab.exec("b", &["dd", "if=/dev/zero", &format!("of={file}"), "bs=4k"])?;
        ensure!(String::from_utf8_lossy(&written.stderr).contains("No space left"), "{written:?}");
        let text = lab.exec("b", &["dd", "if=/dev/zero", &format!("of={file}2"), "bs=4k", "count=1"])?;
        ensure!(!text.status.success(), "there is space left");
        ensure!(moving.goes_on()?, "the drain was over before the directory was full");
        Ok(())
    };
    let filled = fill();
    let ended = filled.and_then(|()| moving.end());
    lab.check("b", &["rm", "-f", file, &format!("{file}2")])?;
    lab.check("b", &["mount", "-o", "remount,size=50%", target.trim()])?;
    let ended = ended?;
    ensure!(ended.success, "the move: {}", ended.error());
    has_moved(lab, &truth)
}

/// Pager and keeper are killed for good, and what had not come is lost. The copy does not go on with zeros, both nodes tell soon,
/// and the operator's word gives the original its life back.
fn a_copy_that_has_lost_its_pager_is_given_up(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 73)?;
    let (moving, report) = begin(lab)?;
    let pagers = pagers(lab)?;
    let begun = Instant::now();
    // Neither shall start the other one again.
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        pagers.iter().try_for_each(|pid| send(signal, *pid))?;
    }
    let recover = format!("tranship recover {} --destination-lost", report.id);
    for node in ["a", "b"] {
        let left = TOLD.saturating_sub(begun.elapsed());
        let waiting = reported(lab, node, "the loss to be told", left, |r| waits_for(r, WaitKind::PagerGone))?;
        let waiting = waiting.waiting.context("it waits")?;
        let ends = ["lost memory, and it was stopped", "lost memory, and it has ended"];
        ensure!(ends.iter().any(|end| waiting.what.contains(end)), "{waiting:?}");
        ensure!(waiting.remedy.contains(&recover), "{waiting:?}");
        let text = lab.check(node, &["tranship", "status"])?;
        ensure!(text.contains(&recover) && !text.contains("--host-is-down"), "{text}");
    }
    let copy = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "b").context("the copy")?;
    ensure!(!copy.runs, "the copy goes on with zeros: {copy:?}");
    let text = lab.check("a", &["tranship", "recover", report.id.as_str(), "--destination-lost"])?;
    ensure!(text.contains("it runs on a again, as it was at the freeze"), "{text}");
    ensure!(!moving.end()?.success, "the move was given up");
    ensure!(quiet(lab, NAME)? == "a", "the original is not the one that runs");
    verify(lab, &truth)?;
    remove(lab, NAME)
}

/// A journal that cannot be made refuses the move, with its cause; nobody loses sight of anything.
fn a_journal_that_cannot_be_made_refuses_the_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 74)?;
    let place = "/var/lib/tranship";
    lab.check("a", &["mount", "-t", "tmpfs", "-o", "ro", "none", place])?;
    let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b"]);
    lab.check("a", &["umount", place])?;
    let output = output?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(3), "{:?}: {text}", output.status);
    for word in ["was not moved: the journal", "cannot be made", "Read-only file system", "free some space"] {
        ensure!(text.contains(word), "{word:?} is not in {text}");
    }
    ensure!(exactly_one_runs(lab, NAME)? == "a", "the container was touched");
    verify(lab, &truth)?;
    remove(lab, NAME)
}

/// The container ends while its move is being undone: what is said of it is what it is.
fn a_container_that_ends_in_a_move_is_not_called_unharmed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, 75)?;
    let kill = |lab: &Lab| -> Result<()> {
        let original = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "a").context("the original")?;
        original.pids.iter().try_for_each(|pid| send(Signal::SIGKILL, *pid))?;
        wait_until("it to die", TOLD, || {
            Ok(original.pids.iter().all(|pid| matches!(state(*pid), None | Some('Z'))).then_some(()))
        })
    };
    let moving = Moving::begun_from(lab, NAME, ("a", "b"), "source.freeze.before", kill)?;
    let ended = moving.end()?;
    restart_agent(lab, "a", "")?;
    let report = ended.report.context("a report")?;
    ensure!(report.outcome == Outcome::Failed && report.original == Some(Original::Stopped), "{report:?}");
    let text = lab.check("a", &["tranship", "status", report.id.as_str()])?;
    ensure!(text.contains("was not moved to b; it has ended on a") && !text.contains("unharmed"), "{text}");
    remove(lab, NAME)
}

/// A move in rounds that came to its decision early, because its time was over, and whose agent dies then: the next one must not
/// take the original for one whose pages have all gone.
fn an_agent_that_dies_after_a_hurried_decision(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 78)?;
    restart_agent(lab, "a", "source.drain.before.die")?;
    let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
    let options = [&["--timeout", "1s", "--on-timeout", "postcopy"][..], &SLOW].concat();
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Precopy, &options)?;
    wait_until("the agent to die", Duration::from_secs(30), || Ok(is_gone(agent).then_some(())))?;
    lab.start_agent("a", &[])?;
    let ended = moving.end()?;
    let report = ended.report.context("no report")?;
    ensure!(report.outcome == Outcome::Moved, "{report:?}");
    has_moved(lab, &truth)
}

/// The pager cannot write that every page is in place, and the agent dies before it has tidied up. The next agent asks the pager, and
/// does not take the copy for one that has lost memory.
fn a_pager_without_its_last_word_outlives_the_agent(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let truth = start(lab, 79)?;
    restart_agent(lab, "b", "destination.drain.after.die")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let (moving, report) = begin(lab)?;
    // No file can be written where a directory is.
    let nascent = format!("/run/tranship/migrations/{}/drained.nascent", report.id);
    lab.check("b", &["sh", "-c", &format!("rm {nascent} && mkdir {nascent}")])?;
    wait_until("the agent to die", Duration::from_secs(30), || Ok(is_gone(agent).then_some(())))?;
    lab.start_agent("b", &[])?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move: {}", ended.error());
    wait_until("the pager to end", TOLD, || {
        Ok(processes(lab, "b")?.iter().all(|p| !["pager", "keeper"].contains(&p.kind)).then_some(()))
    })?;
    has_moved(lab, &truth)
}

/// The container ends on the destination, whose agent is not there to tell: nothing is said to have moved before it has.
fn the_end_of_a_move_is_told_when_it_is_known(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, 77)?;
    restart_agent(lab, "b", "destination.drain.before.die")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Cold)?;
    wait_until("the agent to die", Duration::from_secs(30), || Ok(is_gone(agent).then_some(())))?;
    let copy = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "b").context("the copy")?;
    copy.pids.iter().try_for_each(|pid| send(Signal::SIGKILL, *pid))?;
    lab.start_agent("b", &[])?;
    let ended = moving.end()?;
    ensure!(ended.status == Some(5), "tranship move ended with {ended:?}");
    ensure!(ended.report.context("no report")?.outcome == Outcome::Ended);
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_pager_that_stands_still_is_waited_for_and_named", a_pager_that_stands_still_is_waited_for_and_named),
        (
            "an_agent_at_its_limit_of_open_files_takes_nothing_for_drained",
            an_agent_at_its_limit_of_open_files_takes_nothing_for_drained,
        ),
        (
            "a_container_that_is_killed_in_the_drain_has_not_just_moved",
            a_container_that_is_killed_in_the_drain_has_not_just_moved,
        ),
        (
            "a_full_run_directory_does_not_keep_a_drain_from_its_end",
            a_full_run_directory_does_not_keep_a_drain_from_its_end,
        ),
        ("a_copy_that_has_lost_its_pager_is_given_up", a_copy_that_has_lost_its_pager_is_given_up),
        ("a_journal_that_cannot_be_made_refuses_the_move", a_journal_that_cannot_be_made_refuses_the_move),
        (
            "a_container_that_ends_in_a_move_is_not_called_unharmed",
            a_container_that_ends_in_a_move_is_not_called_unharmed,
        ),
        ("a_pager_without_its_last_word_outlives_the_agent", a_pager_without_its_last_word_outlives_the_agent),
        ("the_end_of_a_move_is_told_when_it_is_known", the_end_of_a_move_is_told_when_it_is_known),
        ("an_agent_that_dies_after_a_hurried_decision", an_agent_that_dies_after_a_hurried_decision),
    ])
}
