//! What cannot heal by itself: a destination that is lost after the commit point is given up by the operator's word, and the
//! original runs again; whatever comes back never runs beside it for longer than it takes to tell it.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_api::ApiError;
use tranship_e2e::{
    Log, Stage, connection_alive, copies, is_gone, move_container, quiet, refused_move, remove, restart_agent,
    scenarios, send, state, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command, report_of, runc_root};
use tranship_types::{Outcome, Phase, Report};

const NAME: &str = "lost";
const KEYS: u64 = 20_000;
const COUNTER: &str = "counter";
/// Noticing that a link is dead, and that no word of the source can arrive any more.
const NOTICED: Duration = Duration::from_secs(60);
/// Exit statuses of `tranship recover`.
const DONE: i32 = 0;
const REFUSED: i32 = 3;

/// A Redis on node a with keys, and what they are.
fn start(lab: &Lab, number: u8) -> Result<(Ipv4Addr, Redis, (u64, String))> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let truth = redis.verify_without(COUNTER)?;
    Ok((ip, redis, truth))
}

fn begin(lab: &Lab, options: &[&str]) -> Result<Child> {
    let arguments = [&["tranship", "move", NAME, "--to", "b", "--json"], options].concat();
    let mut command = lab.command("a", &arguments)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("cannot run tranship")
}

/// Every report that a node has, newest first.
fn reports(lab: &Lab, node: &str) -> Result<Vec<Report>> {
    let mut all = Vec::new();
    for command in ["status", "history"] {
        let text = lab.check(node, &["tranship", command, "--json"])?;
        all.extend(serde_json::from_str::<Vec<Report>>(text.trim()).with_context(|| text.clone())?);
    }
    Ok(all)
}

/// Waits until the newest report of a node satisfies a condition.
fn reported(lab: &Lab, node: &str, what: &str, fits: impl Fn(&Report) -> bool) -> Result<Report> {
    wait_until(what, NOTICED, || Ok(reports(lab, node)?.into_iter().next().filter(&fits)))
}

/// Runs `tranship recover` on node a; its exit status, and what it prints.
fn recover(lab: &Lab, words: &[&str]) -> Result<(i32, Vec<u8>)> {
    let output = lab.exec("a", &[&["tranship", "recover"], words, &["--destination-lost", "--json"]].concat())?;
    Ok((output.status.code().context("tranship was killed")?, output.stdout))
}

/// Checks that it is refused in one sentence with a word in it.
fn refused(lab: &Lab, words: &[&str], why: &str) -> Result<()> {
    let (status, printed) = recover(lab, words)?;
    let text = String::from_utf8_lossy(&printed).into_owned();
    ensure!(status == REFUSED, "status {status}: {text}");
    let ApiError { error } = serde_json::from_value(report_of(&printed)?).context(text)?;
    ensure!(error.message.contains(why) && !error.remedy.is_empty(), "{why:?} not in {error}");
    Ok(())
}

/// Checks that the migration was given up.
fn given_up(lab: &Lab, words: &[&str]) -> Result<Report> {
    let (status, printed) = recover(lab, words)?;
    let text = String::from_utf8_lossy(&printed).into_owned();
    let report: Report = serde_json::from_value(report_of(&printed)?).with_context(|| text.clone())?;
    ensure!(
        status == DONE && report.outcome == Outcome::GivenUp && report.phase == Phase::Undone,
        "status {status}: {text}"
    );
    ensure!(report.leftovers.is_empty(), "{:?}", report.leftovers);
    ensure!(report.error.as_ref().is_some_and(|e| e.contains("given up as lost") && e.contains("is lost")), "{text}");
    Ok(report)
}

/// On which nodes a copy runs. One that criu holds does not: that it was let go is noted beside the migration's things.
fn runs_on(lab: &Lab) -> Result<Vec<String>> {
    let mut nodes = Vec::new();
    for copy in copies(lab, NAME)?.into_iter().filter(|copy| copy.runs) {
        let mut migrations =
            fs::read_dir(lab.path(&copy.node, "/run/tranship/migrations")?).into_iter().flatten().flatten();
        if migrations.all(|entry| entry.path().join("restore.resumed").exists()) {
            nodes.push(copy.node);
        }
    }
    Ok(nodes)
}

/// Kills the agent that is about to die by a fault, or waits until it has.
fn await_death(agent: u32) -> Result<()> {
    wait_until("the agent to die", NOTICED, || Ok(is_gone(agent).then_some(())))
}

/// Begins a move with an agent on node b that dies when it has heard the word to commit, before it lets the copy run.
fn die_before_the_resume(lab: &Lab, mode: &str) -> Result<(Child, Report)> {
    restart_agent(lab, "b", "destination.open-gate.before.die")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = begin(lab, &["--mode", mode])?;
    await_death(agent)?;
    let waits = |r: &Report| r.phase == Phase::Resume && r.error.is_some();
    Ok((moving, reported(lab, "a", "the move to wait", waits)?))
}

/// The destination's host is cut off, in the middle of post-copy; its copy goes on there. The operator says that it is down,
/// which is not true: so it is found out, and ended, when it is back.
fn a_destination_that_is_cut_off_in_postcopy(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (ip, redis, truth) = start(lab, 60)?;
    drop(redis);
    let mut moving = begin(lab, &["--mode", "postcopy", "--bandwidth", "4mbit"])?;
    let drains = |r: &Report| r.phase == Phase::Drain && r.outcome == Outcome::Running;
    let there = reported(lab, "b", "node b to know that it drains", drains)?;
    let here = reported(lab, "a", "node a to know that it drains", drains)?;
    ensure!((&there.id, there.source.as_str()) == (&here.id, "a"), "{there:?}");
    refused(lab, &[NAME], "node b answers: lost runs there")?;

    lab.cut_link("b")?;
    lab.kill_agent("b")?;
    refused(lab, &[NAME], "was heard to run on node b, which does not answer")?;
    let waits = |r: &Report| drains(r) && r.error.is_some();
    reported(lab, "a", "the move to wait", waits)?;
    let status = lab.check("a", &["tranship", "status"])?;
    let hint = format!("tranship recover {} --destination-lost --host-is-down", here.id);
    ensure!(status.contains(&hint), "{hint:?} not in {status}");
    given_up(lab, &[NAME, "--host-is-down"])?;
    ensure!(runs_on(lab)? == ["a", "b"], "the copy that is cut off cannot know: {:?}", runs_on(lab)?);
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10)).context("the original")?;
    ensure!(redis.verify_without(COUNTER)? == truth, "the original's keys have changed");
    moving.wait()?;
    refused(lab, &[here.id.as_str()], "has ended")?;

    lab.start_agent("b", &[])?;
    lab.restore_link("b")?;
    ensure!(quiet(lab, NAME)? == "a", "the copy on node b is not the one to go on");
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10)).context("the original, afterwards")?;
    ensure!(redis.verify_without(COUNTER)? == truth, "the original's keys have changed");
    let told = |r: &Report| r.error.as_ref().is_some_and(|e| e.contains("its copy, which ran, was removed"));
    reported(lab, "a", "the report to say what became of the copy", told)?;
    let there = reported(lab, "b", "the history of node b", |r| r.outcome == Outcome::GivenUp)?;
    ensure!(there.id == here.id && there.error.is_some_and(|e| e.contains("void")), "the history of node b");

    drop(redis);
    move_container(lab, "a", NAME, "b").context("the next move")?;
    remove(lab, NAME)
}

/// A copy that was not let run before its agent died is not let run by the next one, before the source has been asked.
fn a_destination_that_dies_before_the_resume(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (mode, number) in [("cold", 61), ("postcopy", 62)] {
        let (ip, mut redis, truth) = start(lab, number)?;
        let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), COUNTER, Duration::from_millis(5))?;
        let (mut moving, waiting) = die_before_the_resume(lab, mode)?;
        let status = lab.check("a", &["tranship", "status"])?;
        let hint = format!("tranship recover {} --destination-lost` lets", waiting.id);
        ensure!(status.contains(&hint), "{hint:?} not in {status}");
        given_up(lab, &[waiting.id.as_str()]).context(mode)?;
        ensure!(runs_on(lab)? == ["a"], "{:?}", runs_on(lab)?);
        // Nothing ran anywhere else: not even the connections have noticed.
        counter.wait_replies(20, Duration::from_secs(30)).context("the client's connection")?;
        connection_alive(&mut counter)?;
        counter.pause()?;
        ensure!(redis.verify_without(COUNTER)? == truth, "the keys have changed");
        counter.resume()?;
        moving.wait()?;

        let log = Log::mark(lab, "b")?;
        lab.start_agent("b", &[])?;
        ensure!(quiet(lab, NAME)? == "a", "the copy on node b was void");
        ensure!(!log.text().contains(" running"), "node b has let its copy run:\n{}", log.text());
        let ended = reports(lab, "a")?.remove(0);
        ensure!(ended.id == waiting.id && ended.outcome == Outcome::GivenUp, "{ended:?}");
        ensure!(ended.error.is_some_and(|e| !e.contains("ran")), "no copy ran on node b");
        connection_alive(&mut counter)?;
        drop(counter);
        remove(lab, NAME)?;
    }
    Ok(())
}

/// The source's agent is killed when the word is on its disk: the next one goes on from there.
fn a_source_that_dies_while_it_gives_up(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (ip, redis, truth) = start(lab, 63)?;
    drop(redis);
    let (mut moving, waiting) = die_before_the_resume(lab, "precopy")?;
    let agent = lab.agent_pid("a")?.context("the agent of node a")?;
    let arguments = ["tranship", "recover", NAME, "--destination-lost"];
    let mut word = lab.command("a", &arguments)?.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let journal = lab.path("a", format!("/var/lib/tranship/journal/{}.jsonl", waiting.id))?;
    let noted = || Ok(fs::read_to_string(&journal).unwrap_or_default().contains("\"given-up\"").then_some(()));
    wait_until("the word to be in the journal", NOTICED, noted)?;
    send(Signal::SIGKILL, agent)?;
    await_death(agent)?;
    lab.start_agent("a", &[])?;
    reported(lab, "a", "the next agent to end it", |r| r.outcome == Outcome::GivenUp)?;
    ensure!(word.wait()?.success(), "`tranship recover` waits for the agent to come back");
    moving.wait()?;
    ensure!(runs_on(lab)? == ["a"], "{:?}", runs_on(lab)?);
    lab.start_agent("b", &[])?;
    ensure!(quiet(lab, NAME)? == "a", "the copy on node b was void");
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    ensure!(redis.verify_without(COUNTER)? == truth, "the keys have changed");
    remove(lab, NAME)
}

/// CPU time that processes have had so far.
fn cpu_time(pids: &[u32]) -> Duration {
    let nanoseconds = |pid: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
        text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0)
    };
    Duration::from_nanos(pids.iter().map(nanoseconds).sum())
}

/// In the middle of post-copy the original looks like a container that is paused. Who resumes it by hand gets no second copy
/// that runs; who moves it is told that it is being moved.
fn an_original_that_is_resumed_by_hand(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ip = Ipv4Addr::new(10, 77, 0, 66);
    // One of its processes would use every moment that it is let run.
    let command =
        [vec!["sh".into(), "-c".into(), "while :; do :; done & exec \"$@\"".into(), "sh".into()], redis_command()];
    lab.run("a", NAME, &RunOptions::new(ip, command.concat()))?;
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let truth = redis.verify_without(COUNTER)?;
    drop(redis);
    let mut moving = begin(lab, &["--mode", "postcopy", "--bandwidth", "4mbit"])?;
    let drains = |r: &Report| r.phase == Phase::Drain && r.outcome == Outcome::Running;
    let id = reported(lab, "a", "node a to know that it drains", drains)?.id;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let refusal = refused_move(lab, from, NAME, to)?;
        let sentence = format!(
            "{NAME} is being moved already, on node {from} (move {id}); wait for it; see `tranship status {id}`"
        );
        ensure!(refusal.sentence.contains(&sentence), "{sentence:?} is not in {:?}", refusal.sentence);
        let planned = lab.exec(from, &["tranship", "plan", NAME, "--to", to])?;
        let text = String::from_utf8_lossy(&planned.stderr).into_owned();
        ensure!(planned.status.code() == Some(REFUSED) && text.contains(&sentence), "{sentence:?} is not in {text:?}");
    }

    let original = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "a").context("the original")?;
    let before = cpu_time(&original.pids);
    lab.check("a", &["runc", "resume", NAME])?;
    let noticed =
        |r: &Report| r.ways.iter().any(|way| way.contains("somebody resumed") && way.contains("frozen again"));
    reported(lab, "a", "the agent to notice", noticed)?;
    let ran = cpu_time(&original.pids).saturating_sub(before);
    ensure!(original.pids.len() >= 2 && ran < Duration::from_millis(50), "the original ran for {ran:?}: {original:?}");
    ensure!(runs_on(lab)? == ["b"], "{:?}", runs_on(lab)?);

    ensure!(moving.wait()?.success(), "the move");
    ensure!(quiet(lab, NAME)? == "b", "the copy on node b is not the one that runs");
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    ensure!(redis.verify_without(COUNTER)? == truth, "the keys have changed");
    drop(redis);
    remove(lab, NAME)
}

fn what_is_not_in_doubt_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, 64)?;
    refused(lab, &["nobody"], "no migration \"nobody\"")?;
    refused(lab, &[NAME], "no migration")?;
    // Held in the restore: before the commit point.
    restart_agent(lab, "b", "destination.restore.before.hold")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let mut moving = begin(lab, &["--mode", "cold"])?;
    wait_until("the agent to be held", NOTICED, || Ok((state(agent) == Some('T')).then_some(())))?;
    let early = refused(lab, &[NAME], "is not in doubt");
    send(Signal::SIGCONT, agent)?;
    early?;
    ensure!(moving.wait()?.success(), "the move, after that");
    let arrived = reported(lab, "b", "the history of node b", |r| r.outcome == Outcome::Moved)?;
    ensure!((arrived.container.as_str(), arrived.source.as_str()) == (NAME, "a"), "{arrived:?}");
    ensure!(arrived.total_ms.is_some_and(|ms| ms > 0.0), "{arrived:?}");
    refused(lab, &[arrived.id.as_str()], "has ended: lost runs on node b")?;
    remove(lab, NAME)
}

/// Starts one program after the other by vfork, without a pause.
const SPAWNER: &str = "import os\nwhile True: os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)";

/// The file of a container's freezer, which is of version 1.
fn freezer_state(lab: &Lab, node: &str, name: &str) -> Result<PathBuf> {
    let file = lab.path(node, format!("{}/{name}/state.json", runc_root()))?;
    let state: serde_json::Value = serde_json::from_slice(&fs::read(file)?)?;
    let cgroup = state["cgroup_paths"]["freezer"].as_str().context("the container has no freezer of version 1")?;
    Ok(Path::new(cgroup).join("freezer.state"))
}

/// Has a container stay half frozen: one of its processes has begun to wait for a child that it has vforked, just when it was
/// asked to stop, and the child stands still.
fn freeze_by_half(state: &Path) -> Result<()> {
    wait_until("the container to be half frozen", Duration::from_secs(60), || {
        fs::write(state, "FROZEN")?;
        let now = || -> Result<String> { Ok(fs::read_to_string(state)?.trim().to_owned()) };
        let frozen = wait_until("it to stop", Duration::from_secs(2), || Ok((now()? == "FROZEN").then_some(())));
        if frozen.is_err() && now()? == "FREEZING" {
            return Ok(Some(()));
        }
        fs::write(state, "THAWED")?;
        Ok(None)
    })
}

/// While a container is half frozen, runc waits for it whatever it is asked. Where an agent that died in the freeze has left it so, its
/// next one lets it run; where somebody else has, the agent says so.
fn a_container_that_is_left_half_frozen(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    if !Path::new("/sys/fs/cgroup/freezer").exists() {
        println!("skipped: only the freezer of version 1 of cgroups stays half frozen, which is not mounted here");
        return Ok(());
    }
    let ip = Ipv4Addr::new(10, 77, 0, 67);
    let command = ["sh", "-c", "python3 -c \"$0\" & exec \"$@\"", SPAWNER].map(str::to_owned);
    lab.run("a", NAME, &RunOptions::new(ip, [command.to_vec(), redis_command()].concat()))?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), COUNTER, Duration::from_micros(500))?;
    let freezer = freezer_state(lab, "a", NAME)?;

    restart_agent(lab, "a", "source.freeze.before.hold")?;
    let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
    let mut moving = begin(lab, &["--mode", "cold"])?;
    wait_until("the agent to be held", NOTICED, || Ok((state(agent) == Some('T')).then_some(())))?;
    freeze_by_half(&freezer)?;
    restart_agent(lab, "a", "")?;
    let failed = |r: &Report| r.outcome == Outcome::Failed;
    reported(lab, "a", "the move to be undone", failed)?;
    ensure!(!moving.wait()?.success(), "the move of an agent that died is told as a success");
    ensure!(quiet(lab, NAME)? == "a", "it is not where it was");
    connection_alive(&mut counter)?;

    freeze_by_half(&freezer)?;
    let listed = lab.exec("a", &["tranship", "ls"])?;
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    let words = ["did not answer within", "write THAWED to", freezer.to_str().unwrap_or_default()];
    ensure!(!listed.status.success() && words.iter().all(|words| said.contains(words)), "tranship ls says {said:?}");
    fs::write(&freezer, "THAWED")?;
    let report = move_container(lab, "a", NAME, "b").context("when it is thawed")?;
    ensure!(report.outcome == Outcome::Moved, "{report:?}");
    connection_alive(&mut counter)?;
    drop(counter);
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_container_that_is_left_half_frozen", a_container_that_is_left_half_frozen),
        ("what_is_not_in_doubt_is_refused", what_is_not_in_doubt_is_refused),
        ("an_original_that_is_resumed_by_hand", an_original_that_is_resumed_by_hand),
        ("a_destination_that_dies_before_the_resume", a_destination_that_dies_before_the_resume),
        ("a_source_that_dies_while_it_gives_up", a_source_that_dies_while_it_gives_up),
        ("a_destination_that_is_cut_off_in_postcopy", a_destination_that_is_cut_off_in_postcopy),
    ])
}
