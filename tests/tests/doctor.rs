//! `tranship doctor`: what moves have left is found and removed, and nothing that a move still owns is taken for it.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::{Leftover, LeftoverKind};
use tranship_e2e::{
    Moving, Stage, connection_alive, copies, exactly_one_runs, is_gone, nothing_left, remove, restart_agent, scenarios,
    wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::Mode;

const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 40);
const PATIENCE: Duration = Duration::from_secs(20);

/// What the doctor finds in a node, or what has become of it. Its exit status must say whether anything is left.
fn doctor(lab: &Lab, node: &str, options: &[&str]) -> Result<Vec<Leftover>> {
    let output = lab.exec(node, &[&["tranship", "doctor", "--json"], options].concat())?;
    let list: Vec<Leftover> = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("doctor said {:?}", String::from_utf8_lossy(&output.stderr)))?;
    let left = list.iter().any(|leftover| !leftover.removed);
    ensure!(output.status.code() == Some(i32::from(left)), "exit status {} with {list:?}", output.status);
    Ok(list)
}

fn is_well(lab: &Lab, node: &str) -> Result<()> {
    let found = doctor(lab, node, &[])?;
    ensure!(found.is_empty(), "on node {node} there is {found:#?}");
    Ok(())
}

fn kinds(list: &[Leftover]) -> Vec<LeftoverKind> {
    list.iter().map(|leftover| leftover.kind).collect()
}

/// Runs Redis on node a; its client, who notices whatever happens to the connection.
fn run(lab: &Lab) -> Result<CounterClient> {
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    Ok(CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_millis(1))?)
}

/// Moves it, kills the agent of `node` where `fault` says, and starts another one that finds neither a journal nor a
/// copy of its first record.
fn die_without_journal(lab: &Lab, node: &str, fault: &str, options: &[&str]) -> Result<()> {
    restart_agent(lab, node, fault)?;
    let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
    let moving = Moving::begin_with(lab, NAME, "a", "b", Mode::Cold, options)?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    lab.check(node, &["sh", "-c", "rm /var/lib/tranship/journal/* /run/tranship/migrations/*/begin"])?;
    lab.start_agent(node, &[])?;
    ensure!(!moving.end()?.success, "the move went on without its agent");
    Ok(())
}

fn nothing_is_found_where_all_is_owned(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut client = run(lab)?;
    restart_agent(lab, "b", "destination.engine.after.delay-500,destination.restore.after.delay-1000")?;
    is_well(lab, "a")?;
    is_well(lab, "b")?;
    let mut moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
    let mut looks = 0;
    while moving.goes_on()? {
        is_well(lab, "a")?;
        is_well(lab, "b")?;
        looks += 1;
    }
    let ended = moving.end()?;
    ensure!(ended.success, "{}", ended.error());
    ensure!(looks > 10, "the move was looked at {looks} times only");
    is_well(lab, "a")?;
    is_well(lab, "b")?;
    connection_alive(&mut client)?;
    client.stop()?;
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}

fn a_held_copy_without_a_journal_is_removed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut client = run(lab)?;
    die_without_journal(lab, "b", "destination.restore.after.die", &[])?;
    wait_until("the container to run again", PATIENCE, || Ok(the_original_runs(lab).ok()))?;
    let found = kinds(&doctor(lab, "b", &[])?);
    ensure!(found.contains(&LeftoverKind::Migration), "found {found:?}");
    let removed = doctor(lab, "b", &["--fix"])?;
    ensure!(removed.iter().all(|leftover| leftover.removed), "{removed:#?}");
    ensure!(kinds(&removed).contains(&LeftoverKind::Namespace), "{removed:#?}");
    is_well(lab, "b")?;
    nothing_left(lab, "b", NAME)?;
    is_well(lab, "a")?;
    ensure!(exactly_one_runs(lab, NAME)? == "a", "{NAME} is not on a");
    connection_alive(&mut client)?;
    client.stop()?;
    remove(lab, NAME)
}

/// Whether the original runs, whatever there is on the other node.
fn the_original_runs(lab: &Lab) -> Result<()> {
    let runs = copies(lab, NAME)?.into_iter().any(|copy| copy.node == "a" && copy.runs);
    ensure!(runs, "{NAME} does not run on a");
    Ok(())
}

fn files_that_were_being_copied_are_removed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    std::fs::create_dir(lab.path("a", "/srv/data")?)?;
    std::fs::write(lab.path("a", "/srv/data/file")?, b"content")?;
    let mut options = RunOptions::new(IP, redis_command());
    options.volumes.push(("/srv/data".into(), "/mnt".into()));
    lab.run("a", NAME, &options)?;
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    // Files are copied from here on; the copy has not taken its place yet.
    die_without_journal(lab, "b", "destination.receive.after.die", &["--with-binds"])?;
    wait_until("the container to run again", PATIENCE, || Ok(the_original_runs(lab).ok()))?;
    let left = lab.check("b", &["ls", "-A", "/srv"])?;
    ensure!(left.contains(".data.tranship-"), "there is no copy: {left:?}");
    let removed = doctor(lab, "b", &["--fix"])?;
    ensure!(removed.iter().all(|leftover| leftover.removed), "{removed:#?}");
    let copy = removed.iter().find(|leftover| leftover.kind == LeftoverKind::Copy);
    ensure!(copy.is_some_and(|leftover| leftover.name.starts_with("/srv/.data.tranship-")), "{removed:#?}");
    let left = lab.check("b", &["ls", "-A", "/srv"])?;
    ensure!(left.is_empty(), "left is {left:?}");
    is_well(lab, "b")?;
    ensure!(lab.check("a", &["cat", "/srv/data/file"])? == "content");
    remove(lab, NAME)?;
    Ok(std::fs::remove_dir_all(lab.path("a", "/srv/data")?)?)
}

fn a_frozen_original_is_left_to_the_operator(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut client = run(lab)?;
    die_without_journal(lab, "a", "source.transfer.before.die", &[])?;
    let fixed = doctor(lab, "a", &["--fix"])?;
    let left: Vec<_> = fixed.iter().filter(|leftover| !leftover.removed).collect();
    ensure!(
        matches!(left[..], [one] if one.kind == LeftoverKind::Container && one.note.contains("runc resume")),
        "left are {left:#?}"
    );
    ensure!(kinds(&fixed).contains(&LeftoverKind::Migration), "{fixed:#?}");
    lab.check("a", &["runc", "resume", NAME])?;
    let fixed = doctor(lab, "a", &["--fix"])?;
    ensure!(kinds(&fixed) == [LeftoverKind::Gate] && fixed[0].removed, "{fixed:#?}");
    is_well(lab, "a")?;
    wait_until("the other node to have undone its part", PATIENCE, || Ok(nothing_left(lab, "b", NAME).ok()))?;
    is_well(lab, "b")?;
    connection_alive(&mut client)?;
    client.stop()?;
    remove(lab, NAME)
}

fn a_stray_userfaultfd_is_named(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    // As an agent opens it; and one that the program uses, with which it has agreed on the version.
    let code = "import ctypes, fcntl, time\nopened = ctypes.CDLL(None).syscall\nstray = opened(323, 1)\nused = opened(323, 1)\n\
                fcntl.ioctl(used, 0xc018aa3f, bytearray(b'\\xaa' + bytes(23)))\nopen('/tmp/ready', 'w')\ntime.sleep(1e6)";
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", code]))?;
    let pid = copies(lab, NAME)?.first().and_then(|copy| copy.pids.first().copied()).context("it does not run")?;
    let ready = format!("/proc/{pid}/root/tmp/ready");
    wait_until("the program to begin", PATIENCE, || Ok(std::fs::exists(&ready)?.then_some(())))?;
    let found = doctor(lab, "a", &["--fix"])?;
    let is_named = |one: &Leftover| {
        one.kind == LeftoverKind::Userfaultfd
            && one.name.starts_with("descriptor 3 of")
            && one.note.contains("close(3)")
    };
    ensure!(matches!(&found[..], [one] if is_named(one)), "{found:#?}");
    remove(lab, NAME)?;
    is_well(lab, "a")
}

fn main() -> ExitCode {
    scenarios(&[
        ("nothing_is_found_where_all_is_owned", nothing_is_found_where_all_is_owned),
        ("a_held_copy_without_a_journal_is_removed", a_held_copy_without_a_journal_is_removed),
        ("files_that_were_being_copied_are_removed", files_that_were_being_copied_are_removed),
        ("a_stray_userfaultfd_is_named", a_stray_userfaultfd_is_named),
        ("a_frozen_original_is_left_to_the_operator", a_frozen_original_is_left_to_the_operator),
    ])
}
