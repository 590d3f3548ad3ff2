//! Journals that are damaged, cut off or gone while a container is frozen: the container is kept and named, the other node is asked, and
//! where that does not tell what was decided, the operator does.

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_api::{ApiError, Leftover, LeftoverKind};
use tranship_e2e::{
    Log, Moving, Stage, connection_alive, copies, flip_record, is_gone, nothing_left, quiet, refused_move, remove,
    restart_agent, scenarios, send, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command, report_of};
use tranship_types::{Mode, Outcome, Phase, Report};

const NAME: &str = "kept";
const JOURNALS: &str = "/var/lib/tranship/journal";
const PATIENCE: Duration = Duration::from_secs(40);
/// Exit statuses of `tranship recover`.
const DONE: i32 = 0;
const REFUSED: i32 = 3;

/// Runs Redis on node a; its client, who notices whatever happens to the connection.
fn run(lab: &Lab, number: u8) -> Result<CounterClient> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    lab.run("a", NAME, &RunOptions::new(ip, redis_command()))?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    Ok(CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(5))?)
}

/// Moves it to node b until an agent dies of a fault.
fn move_until_death(lab: &Lab, node: &str, fault: &str) -> Result<Moving> {
    restart_agent(lab, node, fault)?;
    let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Cold)?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    Ok(moving)
}

/// A node's only journal.
fn journal(lab: &Lab, node: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(lab.path(node, JOURNALS)?)?.flatten().map(|entry| entry.path());
    let mut found: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "jsonl")).collect();
    ensure!(found.len() == 1, "node {node} has the journals {found:?}");
    Ok(found.remove(0))
}

/// Flips a bit in the checksum of the record that has these words in it.
fn flip(lab: &Lab, node: &str, words: &str) -> Result<()> {
    flip_record(&journal(lab, node)?, words)
}

/// What a node shows as under way.
fn status(lab: &Lab, node: &str) -> Result<Vec<Report>> {
    let text = lab.check(node, &["tranship", "status", "--json"])?;
    serde_json::from_str(text.trim()).context(text)
}

/// Checks that a node keeps the container for a migration with a damaged journal, and says so wherever one looks.
fn is_named(lab: &Lab, node: &str, log: &Log) -> Result<Report> {
    let under_way = status(lab, node)?;
    let [report] = &under_way[..] else { anyhow::bail!("under way are {under_way:#?}") };
    let error = report.error.clone().unwrap_or_default();
    let hint = format!("tranship recover {} --keep-here", report.id);
    ensure!((report.container.as_str(), report.phase) == (NAME, Phase::Damaged), "{report:?}");
    ensure!(error.contains("is damaged: ") && error.contains(&hint), "{error}");
    let shown = lab.check(node, &["tranship", "status"])?;
    ensure!(shown.contains("damaged") && shown.contains(&hint), "{shown}");
    for options in [&["--json"][..], &["--json", "--fix"]] {
        let output = lab.exec(node, &[&["tranship", "doctor"], options].concat())?;
        let found: Vec<Leftover> = serde_json::from_slice(&output.stdout)?;
        let [one] = &found[..] else { anyhow::bail!("doctor finds {found:#?}") };
        ensure!(one.kind == LeftoverKind::Journal && one.name.contains(NAME) && !one.removed, "{one:?}");
        ensure!(one.note.contains(&hint), "{one:?}");
    }
    ensure!(log.text().contains("is damaged: ") && log.text().contains(&hint), "{}", log.text());
    let other = if node == "a" { "b" } else { "a" };
    let refusal = refused_move(lab, node, NAME, other)?;
    ensure!(refusal.sentence.contains("the journal of move") || node == "b", "{}", refusal.sentence);
    Ok(report.clone())
}

/// Has the operator decide; the exit status, and what was printed.
fn recover(lab: &Lab, node: &str, words: &[&str]) -> Result<(i32, serde_json::Value)> {
    let output = lab.exec(node, &[&["tranship", "recover", NAME, "--json"], words].concat())?;
    Ok((output.status.code().context("tranship was killed")?, report_of(&output.stdout)?))
}

fn refused(lab: &Lab, node: &str, words: &[&str], why: &str) -> Result<()> {
    let (status, printed) = recover(lab, node, words)?;
    ensure!(status == REFUSED, "status {status}: {printed}");
    let ApiError { error } = serde_json::from_value(printed)?;
    ensure!(error.message.contains(why) && !error.remedy.is_empty(), "{why:?} not in {error}");
    Ok(())
}

/// Which nodes have a copy that may run; one that criu holds counts as well.
fn runs_on(lab: &Lab) -> Result<Vec<String>> {
    Ok(copies(lab, NAME)?.into_iter().filter(|copy| copy.runs).map(|copy| copy.node).collect())
}

/// Waits until nothing is left to be done, and the container and its client go on.
fn ends_on(lab: &Lab, node: &str, mut client: CounterClient) -> Result<()> {
    wait_until("the migration to end", PATIENCE, || Ok(status(lab, node)?.is_empty().then_some(())))?;
    let at = quiet(lab, NAME)?;
    ensure!(at == node, "{NAME} runs on {at}");
    client.wait_replies(20, Duration::from_secs(30)).context("the client's connection")?;
    connection_alive(&mut client)?;
    client.stop()?;
    restart_agent(lab, "a", "")?;
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}

/// One bit of the source's journal flips while the container is frozen: before the decision the destination's answer undoes it.
fn a_flipped_bit_before_the_decision(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 80)?;
    let moving = move_until_death(lab, "a", "source.transfer.after.die")?;
    lab.kill_agent("b")?;
    flip(lab, "a", "\"close-gate\"")?;
    let log = Log::mark(lab, "a")?;
    lab.start_agent("a", &[])?;
    wait_until("it to be told what it waits for", PATIENCE, || {
        Ok(status(lab, "a")?
            .iter()
            .any(|r| r.error.as_ref().is_some_and(|e| e.contains("does not answer")))
            .then_some(()))
    })?;
    let report = is_named(lab, "a", &log)?;
    ensure!(!runs_on(lab)?.contains(&"a".to_owned()), "the original runs before the destination was asked");
    lab.start_agent("b", &[])?;
    wait_until("the original alone to run", PATIENCE, || Ok((runs_on(lab)? == ["a"]).then_some(())))?;
    let text = lab.check("a", &["tranship", "status", report.id.as_str(), "--json"])?;
    let ended: Report = serde_json::from_str(text.trim()).context(text)?;
    ensure!(ended.phase != Phase::Damaged && ended.outcome != Outcome::Moved, "{ended:?}");
    ensure!(!moving.end()?.success, "the move was undone");
    ends_on(lab, "a", client)
}

/// The record of the decision itself is damaged, or cut off: the destination, which is ready or runs it, gets its word.
fn a_decision_that_is_damaged(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 81)?;
    let moving = move_until_death(lab, "a", "source.deliver.before.die")?;
    flip(lab, "a", "\"commit\"")?;
    lab.start_agent("a", &[])?;
    ends_on(lab, "b", client).context("flipped before the destination had heard of it")?;
    drop(moving);

    let client = run(lab, 82)?;
    let moving = move_until_death(lab, "a", "source.deliver.after.die")?;
    let path = journal(lab, "a")?;
    let text = fs::read(&path)?;
    let written = text.iter().position(|byte| *byte == 0).context("there are zeros")?;
    fs::write(&path, &text[..written / 2])?;
    lab.start_agent("a", &[])?;
    ends_on(lab, "b", client).context("cut off while the container runs there")?;
    drop(moving);
    Ok(())
}

/// The destination does not know any more whether it is ready; the source says what it decided.
fn a_destination_that_has_forgotten(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 83)?;
    let moving = move_until_death(lab, "b", "destination.open-gate.before.die")?;
    flip(lab, "b", "\"ready\"")?;
    let log = Log::mark(lab, "b")?;
    lab.start_agent("b", &[])?;
    ends_on(lab, "b", client)?;
    ensure!(log.text().contains("is damaged: "), "{}", log.text());
    ensure!(moving.end()?.success, "the move went on");
    Ok(())
}

/// Writes a journal anew as an agent would that knows other outcomes of a move than ours: in lines without checksums.
fn write_as_another_version(lab: &Lab, node: &str) -> Result<()> {
    /// Of the numbers before each record.
    const NUMBERS: usize = 36;
    let path = journal(lab, node)?;
    let text = fs::read(&path)?;
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| line.get(NUMBERS..)).filter(|line| line[0] == b'{');
    let records: Vec<_> = lines.map(|line| String::from_utf8_lossy(line).into_owned()).collect();
    let (known, other) = ("\"outcome\":\"running\"", "\"outcome\":\"hovering\"");
    let first = records.first().filter(|first| first.contains(known)).context("no outcome in the first record")?;
    let all = [&[first.replace(known, other)], &records[1..]].concat();
    fs::remove_file(path.with_extension("begin"))?;
    Ok(fs::write(&path, all.join("\n") + "\n")?)
}

/// What the source's first record keeps is of a version that this agent does not know: that is said, and the destination's answer undoes it.
fn a_record_of_another_version(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 86)?;
    let moving = move_until_death(lab, "a", "source.transfer.after.die")?;
    lab.kill_agent("b")?;
    write_as_another_version(lab, "a")?;
    let log = Log::mark(lab, "a")?;
    lab.start_agent("a", &[])?;
    wait_until("it to be told", PATIENCE, || Ok((!status(lab, "a")?.is_empty()).then_some(())))?;
    let report = is_named(lab, "a", &log)?;
    let error = report.error.unwrap_or_default();
    ensure!(error.contains("an agent of another version has written it") && error.contains("hovering"), "{error}");
    ensure!(!runs_on(lab)?.contains(&"a".to_owned()), "the original runs before the destination was asked");
    lab.start_agent("b", &[])?;
    wait_until("the original alone to run", PATIENCE, || Ok((runs_on(lab)? == ["a"]).then_some(())))?;
    ensure!(!moving.end()?.success, "the move was undone");
    ends_on(lab, "a", client)
}

/// Everything in the source's state directory is gone, and the destination is down: only the operator can say that the original, whose processes
/// have a SIGSTOP waiting for them, goes on.
fn a_lost_journal(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 84)?;
    let moving = move_until_death(lab, "b", "destination.open-gate.before.die")?;
    let waits = |r: &Report| r.phase == Phase::Resume && r.error.is_some();
    wait_until("the move to wait", PATIENCE, || Ok(status(lab, "a")?.iter().any(waits).then_some(())))?;
    lab.kill_agent("a")?;
    lab.check("a", &["sh", "-c", &format!("rm {JOURNALS}/*")])?;
    let log = Log::mark(lab, "a")?;
    lab.start_agent("a", &[])?;
    is_named(lab, "a", &log)?;
    refused(lab, "a", &["--keep-there"], "does not answer")?;
    refused(lab, "a", &["--keep-here"], "does not answer")?;
    refused(lab, "a", &["--destination-lost"], "is damaged")?;
    let (status, printed) = recover(lab, "a", &["--keep-here", "--host-is-down"])?;
    let report: Report = serde_json::from_value(printed)?;
    ensure!(status == DONE && report.outcome == Outcome::GivenUp, "status {status}: {report:?}");
    ensure!(runs_on(lab)?.contains(&"a".to_owned()), "the original does not run");
    lab.start_agent("b", &[])?;
    drop(moving);
    ends_on(lab, "a", client)
}

/// Both journals are damaged. The operator has the copy removed; the source hears that, and undoes.
fn both_are_damaged(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 85)?;
    let moving = move_until_death(lab, "a", "source.commit.before.die")?;
    refused(lab, "b", &["--keep-there"], "can still commit it by itself")?;
    lab.kill_agent("b")?;
    flip(lab, "b", "\"ready\"")?;
    let log = Log::mark(lab, "b")?;
    lab.start_agent("b", &[])?;
    is_named(lab, "b", &log)?;
    refused(lab, "b", &["--keep-here"], "does not answer")?;
    let (status, printed) = recover(lab, "b", &["--keep-there"])?;
    ensure!(status == DONE, "status {status}: {printed}");
    wait_until("the copy to be removed", PATIENCE, || Ok(nothing_left(lab, "b", NAME).ok()))?;
    let path = journal(lab, "a")?;
    let text = fs::read(&path)?;
    fs::write(&path, &text[..text.len() - 100])?;
    lab.start_agent("a", &[])?;
    drop(moving);
    ends_on(lab, "a", client)
}

/// Waits until a node tells what a move waits for.
fn waits_for(lab: &Lab, node: &str, why: &str) -> Result<()> {
    let told = |r: &Report| r.error.as_ref().is_some_and(|error| error.contains(why));
    wait_until(why, PATIENCE, || Ok(status(lab, node)?.iter().any(told).then_some(())))
}

/// The engine does not answer while it is decided: that is not taken for a container that is gone, nor does a word of the operator's help.
fn an_engine_that_does_not_answer(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 87)?;
    let moving = move_until_death(lab, "a", "source.transfer.after.die")?;
    flip(lab, "a", "\"close-gate\"")?;
    let runc = lab.check("a", &["sh", "-c", "readlink -f $(command -v runc)"])?;
    lab.check("a", &["mount", "--bind", "/bin/false", runc.trim()])?;
    let answered = || -> Result<()> {
        lab.start_agent("a", &[])?;
        waits_for(lab, "a", "the engine on this node does not answer")?;
        for words in [&["--keep-here"][..], &["--keep-there"], &["--keep-here", "--host-is-down"]] {
            refused(lab, "a", words, "the engine on this node does not answer")?;
        }
        Ok(())
    };
    let done = answered();
    lab.check("a", &["umount", runc.trim()])?;
    done?;
    drop(moving);
    ends_on(lab, "a", client)
}

/// The owner has removed the frozen original, and the source's journal is gone: the operator has the copy run that is held.
fn the_other_copy_goes_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 88)?;
    let moving = move_until_death(lab, "a", "source.deliver.before.die")?;
    lab.check("a", &["sh", "-c", &format!("rm {JOURNALS}/*")])?;
    let original = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "a").context("the original")?;
    original.pids.iter().try_for_each(|pid| send(Signal::SIGKILL, *pid))?;
    lab.check("a", &["runc", "resume", NAME])?;
    wait_until("the original to end", PATIENCE, || Ok(original.pids.iter().all(|pid| is_gone(*pid)).then_some(())))?;
    lab.check("a", &["runc", "delete", "--force", NAME])?;
    lab.start_agent("a", &[])?;
    waits_for(lab, "a", "the container is not on this node any more")?;
    refused(lab, "a", &["--keep-here"], "the container is not on this node any more")?;
    let (exit, printed) = recover(lab, "a", &["--keep-there"])?;
    ensure!(exit == DONE, "status {exit}: {printed}");
    drop(moving);
    wait_until("the migration to end", PATIENCE, || Ok(status(lab, "a")?.is_empty().then_some(())))?;
    // Whoever removes a container leaves its network namespace.
    lab.check("a", &["tranship", "doctor", "--fix"])?;
    ends_on(lab, "b", client)
}

/// No file can be made where journals are: what is known of the outcome is told, and done as soon as it can be written down.
fn a_journal_that_cannot_be_mended(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let client = run(lab, 89)?;
    let moving = move_until_death(lab, "a", "source.transfer.after.die")?;
    flip(lab, "a", "\"close-gate\"")?;
    lab.check("a", &["mount", "--bind", JOURNALS, JOURNALS])?;
    lab.check("a", &["mount", "-o", "remount,bind,ro", JOURNALS])?;
    let told = || -> Result<()> {
        lab.start_agent("a", &[])?;
        waits_for(lab, "a", "it is known what was decided, but mending failed")?;
        waits_for(lab, "a", "Read-only file system (os error 30); free some space or mend the disk")?;
        refused(lab, "a", &["--keep-here", "--host-is-down"], "mending failed")?;
        ensure!(!runs_on(lab)?.contains(&"a".to_owned()), "the original runs, and nothing says that it may");
        Ok(())
    };
    let done = told();
    lab.check("a", &["umount", JOURNALS])?;
    done?;
    drop(moving);
    ends_on(lab, "a", client)
}

/// The disk does not take the decision (EIO of fsync): there is none, and both nodes undo.
fn a_decision_that_cannot_be_synced(stage: &mut Stage) -> Result<()> {
    const DISK: &str = "/run/disk";
    let lab = &stage.lab;
    let mut client = run(lab, 90)?;
    lab.kill_agent("a")?;
    // A disk whose blocks lie in a file: where that gets no memory, the disk has an error.
    let state = "/var/lib/tranship";
    let disk = format!(
        "mkdir -p {DISK} && mount -t tmpfs -o size=24m none {DISK} && truncate -s 16m {DISK}/image && \
         mkfs.ext4 -q -O ^has_journal {DISK}/image && mount -o loop {DISK}/image {state}"
    );
    lab.check("a", &["sh", "-c", &disk])?;
    let broken = |lab: &Lab| {
        let fail = format!(
            "fallocate --punch-hole --offset 0 --length 16M {DISK}/image; dd if=/dev/zero of={DISK}/filler bs=4k"
        );
        let said = lab.exec("a", &["sh", "-c", &fail])?;
        let said = String::from_utf8_lossy(&said.stderr);
        ensure!(said.contains("No space left"), "{said}");
        Ok(())
    };
    let ended = Moving::begun_from(lab, NAME, ("a", "b"), "source.commit.before", broken).and_then(Moving::end);
    let went_on = client.wait_replies(20, Duration::from_secs(30)).context("the client's connection");
    lab.kill_agent("a")?;
    lab.check("a", &["sh", "-c", &format!("umount {state}; umount {DISK}")])?;
    let ended = ended?;
    went_on?;
    ensure!(!ended.success, "a move whose decision is nowhere has succeeded");
    for word in ["cannot be synced", "free some space or mend the disk"] {
        ensure!(ended.error().contains(word), "{word:?} is not in {}", ended.error());
    }
    lab.start_agent("a", &[])?;
    ends_on(lab, "a", client)
}

/// The source is down, the destination's journal is damaged, and the operator decides for the copy there. The agent dies of letting it run: the next one
/// knows what was decided, and needs nobody to say it again.
fn a_decision_that_outlives_the_agent(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut client = run(lab, 86)?;
    let moving = move_until_death(lab, "a", "source.deliver.before.die")?;
    lab.kill_agent("b")?;
    flip(lab, "b", "\"ready\"")?;
    lab.start_agent("b", &[("TRANSHIP_FAULTS", "destination.resume.before.die")])?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    refused(lab, "b", &["--keep-here"], "does not answer")?;
    // The answer is lost with the agent.
    lab.exec("b", &["tranship", "recover", NAME, "--keep-here", "--host-is-down"])?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    lab.start_agent("b", &[])?;
    client.wait_replies(20, PATIENCE).context("the copy does not run")?;
    ensure!(runs_on(lab)? == ["b"], "the copies on {:?} run", runs_on(lab)?);
    drop(moving);
    lab.start_agent("a", &[])?;
    ends_on(lab, "b", client)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_flipped_bit_before_the_decision", a_flipped_bit_before_the_decision),
        ("a_decision_that_is_damaged", a_decision_that_is_damaged),
        ("a_destination_that_has_forgotten", a_destination_that_has_forgotten),
        ("a_record_of_another_version", a_record_of_another_version),
        ("a_lost_journal", a_lost_journal),
        ("both_are_damaged", both_are_damaged),
        ("an_engine_that_does_not_answer", an_engine_that_does_not_answer),
        ("the_other_copy_goes_on", the_other_copy_goes_on),
        ("a_journal_that_cannot_be_mended", a_journal_that_cannot_be_mended),
        ("a_decision_that_cannot_be_synced", a_decision_that_cannot_be_synced),
        ("a_decision_that_outlives_the_agent", a_decision_that_outlives_the_agent),
    ])
}
