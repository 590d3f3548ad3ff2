//! Moves that are ended from outside before their commit point: by `tranship cancel`, by --freeze-timeout, by --timeout. The container
//! runs on its node again within moments, with its connections, whatever the move was doing.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_api::ApiError;
use tranship_e2e::{
    Ended, Log, Moving, Stage, connection_alive, copies, exactly_one_runs, move_container, newest_group_report,
    processes, quiet, refused_move_with, remove, restart_agent, scenarios, send, state, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, patience, redis_command, report_of};
use tranship_types::{BlockerKind, GroupReport, MemberOutcome, Mode, Outcome, Phase, Report};

/// A container that is called as a group could be.
const NAME: &str = "g-cancelled";
/// One with much memory and little in it.
const SPARSE: &str = "sparse";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 40);
const KEYS: u64 = 20_000;
/// How long it may take until a move that was ended is undone: a second, and what a busy machine takes.
const UNDONE: Duration = Duration::from_secs(5);
/// For a move that must come to some point.
const LONG: Duration = Duration::from_secs(20);
/// Exit statuses of `tranship cancel`.
const DONE: i32 = 0;
const REFUSED: i32 = 3;

fn start(lab: &Lab) -> Result<(Redis, CounterClient)> {
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_millis(1))?;
    Ok((redis, counter))
}

/// Runs `tranship cancel` on a node; its exit status, what it prints, and how long that took.
fn cancel(lab: &Lab, node: &str, name: &str) -> Result<(i32, Vec<u8>, Duration)> {
    let begun = Instant::now();
    let output = lab.exec(node, &["tranship", "cancel", name, "--json"])?;
    Ok((output.status.code().context("tranship was killed")?, output.stdout, begun.elapsed()))
}

/// Cancels the move of the container, which must end it.
fn cancelled(lab: &Lab, name: &str) -> Result<(Report, Duration)> {
    let (status, printed, took) = cancel(lab, "a", name)?;
    let text = String::from_utf8_lossy(&printed).into_owned();
    ensure!(status == DONE, "cancel ended with {status}: {text}");
    let report: Report = serde_json::from_value(report_of(&printed)?).context(text)?;
    ensure!(
        report.outcome == Outcome::Cancelled && report.phase == Phase::Undone && report.leftovers.is_empty(),
        "the move ended as {report:?}"
    );
    ensure!(report.error.as_deref() == Some("the move was cancelled"), "{:?}", report.error);
    Ok((report, took))
}

/// Checks that a cancel is refused, and that the refusal has these words in it.
fn refused(lab: &Lab, node: &str, name: &str, words: &[&str]) -> Result<()> {
    let (status, printed, _) = cancel(lab, node, name)?;
    let text = String::from_utf8_lossy(&printed).into_owned();
    ensure!(status == REFUSED, "cancel ended with {status}: {text}");
    let ApiError { error } = serde_json::from_value(report_of(&printed)?).context(text)?;
    let sentence = error.to_string();
    ensure!(words.iter().all(|word| sentence.contains(word)), "{words:?} are not in {sentence:?}");
    Ok(())
}

/// Waits until the agent has come to a place of the fault injection.
fn await_injection(log: &Log, times: usize) -> Result<()> {
    wait_until("the move to come to its place", LONG, || {
        Ok((log.text().matches("injected on the").count() >= times).then_some(()))
    })
}

fn failed_with<'a>(ended: &'a Ended, word: &str) -> Result<&'a Report> {
    let report = ended.report.as_ref().context("no report")?;
    ensure!(report.outcome == Outcome::Failed && report.phase == Phase::Undone, "the move ended as {report:?}");
    ensure!(ended.error().contains(word), "{word:?} is not in {:?}", ended.error());
    Ok(report)
}

/// Where a move is cancelled: the place, whether the container is frozen there, and the mode. No two of them follow each other without a step
/// between them: both would be met by one move.
const PLACES: [(&str, bool, Mode); 9] = [
    ("source.inspect.before", false, Mode::Auto),
    ("source.connect.after", false, Mode::Cold),
    ("source.offer.after", false, Mode::Precopy),
    ("source.arm.after", false, Mode::Postcopy),
    ("source.precopy.after", false, Mode::Auto),
    ("source.freeze.after", true, Mode::Cold),
    ("source.close-gate.after", true, Mode::Hybrid),
    ("source.transfer.after", true, Mode::Precopy),
    ("source.commit.before", true, Mode::Cold),
];

fn a_move_is_cancelled_wherever_it_is(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (mut redis, mut counter) = start(lab)?;
    counter.pause()?;
    let truth = redis.verify_without("counter")?;
    counter.resume()?;
    // One after the other: each move comes to the first that was not met yet.
    let places: Vec<String> = PLACES.iter().map(|(place, ..)| format!("{place}.delay-60000")).collect();
    restart_agent(lab, "a", &places.join(","))?;
    let log = Log::mark(lab, "a")?;
    for (number, (place, frozen, mode)) in PLACES.into_iter().enumerate() {
        let moving = Moving::begin(lab, NAME, "a", "b", mode)?;
        await_injection(&log, number + 1).context(place)?;
        if frozen {
            let stopped = || Ok((counter.report()?.waiting_ms > 50.0).then_some(()));
            wait_until("the container to be frozen", LONG, stopped).context(place)?;
        }
        let (_, took) = cancelled(lab, NAME).context(place)?;
        connection_alive(&mut counter).context(place)?;
        let report = moving.end()?.report.context(place)?;
        ensure!(report.outcome == Outcome::Cancelled, "{place}: {report:?}");
        eprintln!("{place}: undone after {:.0} ms", took.as_secs_f64() * 1e3);
        ensure!(took < patience(UNDONE), "{place}: undone after {took:?}");
        ensure!(quiet(lab, NAME).context(place)? == "a", "{place}: it is not on a");
    }
    // While the destination is at work, and its answer is waited for.
    restart_agent(lab, "b", "destination.restore.before.delay-2000")?;
    let log = Log::mark(lab, "b")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
    await_injection(&log, 1)?;
    let (_, took) = cancelled(lab, NAME)?;
    ensure!(took < patience(UNDONE), "undone after {took:?} while the destination is at work");
    connection_alive(&mut counter)?;
    moving.end()?;
    ensure!(quiet(lab, NAME)? == "a");
    counter.pause()?;
    let now = redis.verify_without("counter").context("on the connection that was idle")?;
    ensure!(now == truth, "keys and checksum were {truth:?} and are {now:?}");
    counter.resume()?;
    after_the_commit_point(lab)?;
    connection_alive(&mut counter)?;
    remove(lab, NAME)
}

/// It is refused with what can still be done, and the move goes on.
fn after_the_commit_point(lab: &Lab) -> Result<()> {
    refused(lab, "a", "nobody", &["no migration \"nobody\" is known"])?;
    restart_agent(lab, "a", "source.commit.after.delay-3000")?;
    let log = Log::mark(lab, "a")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
    await_injection(&log, 1)?;
    refused(lab, "a", NAME, &["past its commit point", "wait for it", "tranship recover", "--to a"])?;
    refused(lab, "b", NAME, &["node a decides", "on node a"])?;
    let report = moving.end()?.report.context("no report")?;
    ensure!(report.outcome == Outcome::Moved, "{report:?}");
    refused(lab, "a", report.id.as_str(), &["has ended", "move it back"])?;
    ensure!(quiet(lab, NAME)? == "b");
    Ok(())
}

fn slow(lab: &Lab, how: &str, rate: &str) -> Result<()> {
    let mut command = vec!["tc", "qdisc", how, "dev", "eth0", "root"];
    if how == "add" {
        command.extend(["tbf", "rate", rate, "burst", "16k", "latency", "50ms"]);
    }
    lab.check("a", &command).map(drop)?;
    Ok(())
}

/// Checks that a freeze was ended by its timeout, and soon after that.
fn timed_out(ended: &Ended, limit: Duration, since_freeze: Duration) -> Result<()> {
    failed_with(ended, &format!("frozen for {:.1} s, the limit of --freeze-timeout", limit.as_secs_f64()))?;
    ensure!(since_freeze >= limit, "it was ended after {since_freeze:?}, before its limit");
    ensure!(since_freeze < limit + patience(UNDONE), "it was undone {since_freeze:?} after the freeze");
    Ok(())
}

fn a_freeze_has_a_limit(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (_redis, mut counter) = start(lab)?;
    // The link gets slow in the freeze: its memory would take minutes.
    let limit = Duration::from_secs(2);
    let options = ["--freeze-timeout", "2s"];
    restart_agent(lab, "a", "source.close-gate.before.delay-300")?;
    let log = Log::mark(lab, "a")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Cold, &options)?;
    await_injection(&log, 1)?;
    let frozen = Instant::now();
    slow(lab, "add", "400kbit")?;
    let ended = moving.end();
    let took = frozen.elapsed();
    slow(lab, "del", "")?;
    timed_out(&ended?, limit, took + Duration::from_millis(100))?;
    connection_alive(&mut counter)?;
    ensure!(quiet(lab, NAME)? == "a");

    // The destination's agent is stopped while the container is frozen.
    restart_agent(lab, "b", "destination.restore.before.hold")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Auto, &options)?;
    wait_until("the agent to be held", LONG, || Ok((state(agent) == Some('T')).then_some(())))?;
    let frozen = Instant::now();
    let ended = moving.end();
    let took = frozen.elapsed();
    connection_alive(&mut counter)?;
    send(Signal::SIGCONT, agent)?;
    timed_out(&ended?, limit, took + Duration::from_millis(500))?;
    ensure!(quiet(lab, NAME)? == "a");

    // Somebody has stopped criu, which then never dumps.
    restart_agent(lab, "a", "source.close-gate.after.delay-500")?;
    let log = Log::mark(lab, "a")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Auto, &options)?;
    await_injection(&log, 1)?;
    let frozen = Instant::now();
    let criu = processes(lab, "a")?.into_iter().find(|p| p.kind == "criu").context("no criu waits")?;
    send(Signal::SIGSTOP, criu.pid)?;
    let ended = moving.end()?;
    timed_out(&ended, limit, frozen.elapsed() + Duration::from_millis(100))?;
    connection_alive(&mut counter)?;
    ensure!(quiet(lab, NAME)? == "a");

    // Nor does it end its dump when the time is over: it is killed in the middle, when it has connections in repair mode. It has to
    // come to that in small steps before.
    let (limit, options) = (Duration::from_secs(5), ["--freeze-timeout", "5s"]);
    restart_agent(lab, "a", "source.transfer.before.delay-500")?;
    let log = Log::mark(lab, "a")?;
    let pids = copies(lab, NAME)?.into_iter().next().context("the original")?.pids;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Auto, &options)?;
    await_injection(&log, 1)?;
    let frozen = Instant::now();
    let criu = processes(lab, "a")?.into_iter().find(|p| p.kind == "criu").context("no criu waits")?.pid;
    let begun = until(&format!("process {criu} to dump a connection"), || {
        // In small steps, so that it does not get further.
        send(Signal::SIGCONT, criu)?;
        std::thread::sleep(Duration::from_millis(1));
        send(Signal::SIGSTOP, criu)?;
        dumps_connection(lab)
    });
    let killed = begun.and_then(|()| {
        ensure!(traced_by(&pids, criu), "criu traces none of the tasks");
        until("criu to be killed", || {
            // The agent lets it go on each time.
            let _ = send(Signal::SIGSTOP, criu);
            std::thread::sleep(Duration::from_micros(100));
            Ok(matches!(state(criu), None | Some('Z')))
        })
    });
    let ended = moving.end()?;
    killed?;
    timed_out(&ended, limit, frozen.elapsed() + Duration::from_millis(100))?;
    connection_alive(&mut counter)?;
    ensure!(quiet(lab, NAME)? == "a");
    ensure!(!traced_by(&pids, criu), "its tasks are traced still");

    what_cannot_fit_is_refused(lab)?;
    connection_alive(&mut counter)?;
    remove(lab, NAME)
}

/// Looks all the time whether something has come.
fn until(what: &str, mut has_come: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !has_come()? {
        ensure!(begun.elapsed() < LONG, "waited for {what}");
    }
    Ok(())
}

/// Whether criu has begun to write down a connection on node a.
fn dumps_connection(lab: &Lab) -> Result<bool> {
    let migrations = std::fs::read_dir(lab.path("a", "/run/tranship/migrations")?)?;
    let images = migrations.flatten().filter_map(|one| std::fs::read_dir(one.path().join("images")).ok());
    let is_stream = |image: std::fs::DirEntry| image.file_name().to_string_lossy().starts_with("tcp-stream");
    Ok(images.flatten().flatten().any(is_stream))
}

/// Whether a process traces one of these.
fn traced_by(pids: &[u32], tracer: u32) -> bool {
    let line = format!("TracerPid:\t{tracer}\n");
    let is_traced = |pid| std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|text| text.contains(&line));
    pids.iter().any(is_traced)
}

/// Before the freeze, by what a probe of the link has found; the plan says the same.
fn what_cannot_fit_is_refused(lab: &Lab) -> Result<()> {
    slow(lab, "add", "2mbit")?;
    let options = ["--mode", "cold", "--compress", "off", "--freeze-timeout", "3s"];
    let refusal = refused_move_with(lab, "a", NAME, "b", &options);
    let plan = lab.exec("a", &[&["tranship", "plan", NAME, "--to", "b", "--sample", "500ms"], &options[..]].concat());
    slow(lab, "del", "")?;
    let refusal = refusal?;
    ensure!(refusal.status == REFUSED, "{refusal:?}");
    ensure!(refusal.blockers.iter().any(|b| b.kind == BlockerKind::TooSlow), "{refusal:?}");
    let words = ["MB/s", "--freeze-timeout allows 3.0 s", "--mode hybrid"];
    ensure!(words.iter().all(|word| refusal.sentence.contains(word)), "{}", refusal.sentence);
    let plan = plan?;
    let printed = String::from_utf8_lossy(&plan.stdout).into_owned();
    ensure!(plan.status.code() == Some(REFUSED) && printed.contains("--freeze-timeout allows 3.0 s"), "{printed}");
    ensure!(quiet(lab, NAME)? == "a");
    zeros_fit(lab)
}

/// Pages that hold nothing do not travel: a container that has written zeros to much memory is moved.
fn zeros_fit(lab: &Lab) -> Result<()> {
    let program = "import mmap, time\nflags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n\
                   m = mmap.mmap(-1, 256 << 20, flags)\nfor at in range(0, len(m), 4096):\n m[at] = 1\n m[at] = 0\n\
                   while True: time.sleep(1)";
    let command = ["python3", "-c", program].map(str::to_owned).to_vec();
    lab.run("a", SPARSE, &RunOptions::new(Ipv4Addr::new(10, 77, 0, 43), command))?;
    let copy = copies(lab, SPARSE)?.into_iter().next().context("the container")?;
    let pid = copy.pids.first().context("its process")?;
    wait_until("the zeros to be written", LONG, || {
        let pages = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
        let resident: u64 = pages.split(' ').nth(1).context("no pages")?.parse()?;
        Ok((resident * 4096 > 256 << 20).then_some(()))
    })?;
    slow(lab, "add", "150mbit")?;
    let options = ["--mode", "cold", "--compress", "off", "--freeze-timeout", "6s"];
    let plan = lab.exec("a", &[&["tranship", "plan", SPARSE, "--to", "b", "--sample", "500ms"], &options[..]].concat());
    let moved = lab.exec("a", &[&["tranship", "move", SPARSE, "--to", "b"], &options[..]].concat());
    slow(lab, "del", "")?;
    for output in [plan?, moved?] {
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
    }
    remove(lab, SPARSE)
}

/// A group of two, and the file that describes it.
const GROUP: [(&str, Ipv4Addr); 2] =
    [("group-db", Ipv4Addr::new(10, 77, 0, 41)), ("group-app", Ipv4Addr::new(10, 77, 0, 42))];
const GROUP_FILE: &str = "to: b\ncontainers:\n  group-app: {depends_on: [group-db]}\n  group-db:\n";

fn a_group_is_cancelled(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counters = Vec::new();
    for (name, ip) in GROUP {
        lab.run("a", name, &RunOptions::new(ip, redis_command()))?;
        Redis::connect(lab, ip, Duration::from_secs(10))?.populate(500, "key", 100)?;
        counters.push(CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(1))?);
    }
    std::fs::write(lab.path("a", "/tmp/cancelled.yaml")?, GROUP_FILE)?;
    // One member under way and the other not begun; both frozen; and one held that waits for the other.
    for (place, order) in [
        ("source.precopy.before", None),
        ("source.transfer.before", Some("--atomic")),
        ("source.await-ready.before", Some("--atomic")),
    ] {
        restart_agent(lab, "a", &format!("{place}.delay-60000"))?;
        let log = Log::mark(lab, "a")?;
        let arguments = [&["tranship", "move-group", "--json", "/tmp/cancelled.yaml"], order.as_slice()].concat();
        let mut following = lab.spawn("a", &arguments)?;
        await_injection(&log, 1).context(place)?;
        let id = newest_group_report(lab, "a")?.id;
        let (status, printed, took) = cancel(lab, "a", id.as_str())?;
        let text = String::from_utf8_lossy(&printed).into_owned();
        ensure!(status == DONE, "{place}: cancel ended with {status}: {text}");
        let report: GroupReport = serde_json::from_value(report_of(&printed)?).context(text)?;
        let all = report.members.iter().all(|m| m.outcome == MemberOutcome::Cancelled);
        ensure!(all && report.outcome == Outcome::Cancelled, "{place}: {report:?}");
        eprintln!("{place} {order:?}: undone after {:.0} ms", took.as_secs_f64() * 1e3);
        ensure!(took < patience(UNDONE), "{place}: undone after {took:?}");
        wait_until("move-group to end", LONG, || Ok(following.try_wait()?)).context(place)?;
        for ((name, _), counter) in GROUP.iter().zip(&mut counters) {
            connection_alive(counter).context(place)?;
            ensure!(exactly_one_runs(lab, name)? == "a", "{place}: {name}");
        }
        refused(lab, "a", id.as_str(), &["has ended"])?;
    }
    restart_agent(lab, "a", "")?;
    for (name, _) in GROUP {
        // The next move of each is not kept up by anything.
        move_container(lab, "a", name, "b")?;
        remove(lab, name)?;
    }
    Ok(())
}

fn a_move_has_a_limit(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (_redis, mut counter) = start(lab)?;
    // At this rate the first round takes several seconds.
    let options =
        |on_timeout| ["--timeout", "1s", "--bandwidth", "16mbit", "--compress", "off", "--on-timeout", on_timeout];
    for (on_timeout, mode) in [("undo", Mode::Precopy), ("postcopy", Mode::Precopy)] {
        let begun = Instant::now();
        let ended = Moving::begin_with(lab, NAME, "a", "b", mode, &options(on_timeout))?.end()?;
        let took = begun.elapsed();
        eprintln!("--on-timeout {on_timeout}: ended after {:.1} s", took.as_secs_f64());
        ensure!(took > Duration::from_secs(1) && took < patience(Duration::from_secs(10)), "it took {took:?}");
        connection_alive(&mut counter)?;
        if on_timeout == "undo" {
            failed_with(&ended, "after 1.0 s, the limit of --timeout")?;
            ensure!(quiet(lab, NAME)? == "a");
        } else {
            let report = ended.report.context("no report")?;
            ensure!(report.outcome == Outcome::Moved, "{report:?}");
            ensure!(report.mode_taken == Some(Mode::Hybrid), "{report:?}");
            ensure!(quiet(lab, NAME)? == "b");
        }
    }
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_move_is_cancelled_wherever_it_is", a_move_is_cancelled_wherever_it_is),
        ("a_freeze_has_a_limit", a_freeze_has_a_limit),
        ("a_move_has_a_limit", a_move_has_a_limit),
        ("a_group_is_cancelled", a_group_is_cancelled),
    ])
}
