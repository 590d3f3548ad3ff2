//! Agents that are confined by their packaged units, under a real systemd: what they do, and what they start.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    Moving, Stage, exactly_one_runs, is_gone, move_container, quiet, refused_move, remove, scenarios, send, wait_until,
};
use tranship_lab::{Lab, Redis, RunOptions, no_systemd, redis_command};
use tranship_types::Mode;

const NAME: &str = "confined";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 43);
const PATIENCE: Duration = Duration::from_secs(20);
/// The settings of the unit that systemd-analyze rates, times ten: worse ones fail.
const EXPOSURE: &str = "59";
const LAUNCHER: &str = "transhipd-launcher.service";

/// Enters states that /proc does not show, and writes down which; not each kernel has I/O ports for programs.
const HIDDEN: &str = "import ctypes, struct, time
libc = ctypes.CDLL(None)
states = ['ldt']
assert libc.syscall(154, 1, struct.pack('IIII', 0, 0, 0xfffff, 0x51), 16) == 0
if libc.ioperm(0x80, 1, 1) == 0: states.append('ports')
with open('/tmp/new', 'w') as file: file.write(' '.join(states))
import os
os.rename('/tmp/new', '/tmp/ready')
time.sleep(1000)";

/// Has a message queue of another user's with room for 777 bytes, and prints its room each time that it is asked.
const QUEUE: &str = "import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None)
queue = libc.msgget(4711, 0o1600)
status = ctypes.create_string_buffer(256)
def room(): assert libc.msgctl(queue, 2, status) == 0; return struct.unpack_from('Q', status, 88)[0]
room()
struct.pack_into('Q', status, 88, 777)
struct.pack_into('II', status, 4, 1234, 1234)
assert libc.msgctl(queue, 1, status) == 0
while True:
    with open('/tmp/new', 'w') as file: file.write(str(room()))
    os.rename('/tmp/new', '/tmp/ready')
    time.sleep(0.05)";

/// Has the agents of both nodes run by their units; `false` where there is no systemd.
fn by_units(lab: &Lab, faults: [&str; 2]) -> Result<bool> {
    if let Some(why) = no_systemd() {
        println!("skipped: {why}");
        return Ok(false);
    }
    for (node, faults) in ["a", "b"].into_iter().zip(faults) {
        let _ = lab.manager(node, &["stop", "transhipd.service"]);
        lab.kill_agent(node)?;
        lab.start_units(node, &[("TRANSHIP_FAULTS", faults)], true)?;
    }
    Ok(true)
}

/// Has both agents run as in other labs.
fn by_themselves(lab: &Lab) -> Result<()> {
    for node in ["a", "b"] {
        lab.manager(node, &["stop", "transhipd.service", LAUNCHER])?;
        lab.start_agent(node, &[])?;
    }
    Ok(())
}

fn main_pid(lab: &Lab, node: &str, unit: &str) -> Result<u32> {
    let text = lab.manager(node, &["show", "--property=MainPID", "--value", unit])?;
    // As the node sees it.
    let within: u32 = text.trim().parse().with_context(|| text.clone())?;
    ensure!(within != 0, "{unit} does not run on node {node}");
    let is_it = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let name = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        name.and_then(|pids| pids.split_whitespace().last()?.parse().ok()) == Some(within)
    };
    let of_node = fs::read_link(lab.path(node, format!("/proc/{within}/ns/pid"))?)?;
    let all = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut all = all.filter(|pid: &u32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns == of_node));
    all.find(is_it).context("the process is not in /proc")
}

/// What programs inherit: bounds, filters, and whether they may gain privileges.
fn rights(pid: u32) -> Result<Vec<String>> {
    Ok(rights_of(&fs::read_to_string(format!("/proc/{pid}/status"))?))
}

fn rights_of(status: &str) -> Vec<String> {
    let fields = ["CapBnd:", "NoNewPrivs:", "Seccomp:"];
    status.lines().filter(|line| fields.iter().any(|field| line.starts_with(field))).map(str::to_owned).collect()
}

/// The container's first process, as the node sees it.
fn first_process(lab: &Lab, node: &str) -> Result<u64> {
    let state: serde_json::Value = serde_json::from_str(&lab.check(node, &["runc", "state", NAME])?)?;
    state["pid"].as_u64().context("no pid")
}

fn rights_in(lab: &Lab, node: &str, pid: u64) -> Result<Vec<String>> {
    Ok(rights_of(&lab.check(node, &["cat", &format!("/proc/{pid}/status")])?))
}

fn the_unit_is_rated_better_than_six(_: &mut Stage) -> Result<()> {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/transhipd.service");
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--no-pager", "--threshold", EXPOSURE, unit]);
    let output = match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: there is no systemd-analyze (Debian package systemd)");
            return Ok(());
        }
        output => output?,
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{text}");
    Ok(())
}

/// Both agents on a privileged port, so that each needs CAP_NET_BIND_SERVICE.
fn containers_move_and_inherit_nothing(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let configurations = ["a", "b"].map(|node| lab.path(node, "/etc/tranship/agent.toml"));
    for file in configurations {
        let file = file?;
        fs::write(&file, fs::read_to_string(&file)?.replace(":7077\"", ":707\""))?;
    }
    if !by_units(lab, ["", ""])? {
        return Ok(());
    }
    let agent = rights(main_pid(lab, "a", "transhipd.service")?)?;
    let launcher = rights(main_pid(lab, "a", LAUNCHER)?)?;
    ensure!(agent[1..] == ["NoNewPrivs:\t1", "Seccomp:\t2"] && agent[0] != launcher[0], "{agent:?} {launcher:?}");
    ensure!(launcher[1..] == ["NoNewPrivs:\t0", "Seccomp:\t0"], "{launcher:?}");
    let mounts = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let of_agent = mounts(main_pid(lab, "a", "transhipd.service")?)?;
    ensure!(of_agent == mounts(main_pid(lab, "a", LAUNCHER)?)?, "the unit has a mount namespace of its own");

    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, PATIENCE)?;
    redis.populate(5000, "key", 100)?;
    let before = rights_in(lab, "a", first_process(lab, "a")?)?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        move_container(lab, from, NAME, to)?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "it does not run on {to}");
        let after = rights_in(lab, to, first_process(lab, to)?)?;
        ensure!(after == before, "{before:?} became {after:?}");
    }
    remove(lab, NAME)
}

/// What is learned from processes in these states must not be learned from a process that the agent's filter keeps from them.
fn hidden_states_are_seen(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    if !by_units(lab, ["", ""])? {
        return Ok(());
    }
    let mut options = RunOptions::new(IP, ["python3", "-c", HIDDEN]);
    options.capabilities.push("CAP_SYS_RAWIO".to_owned());
    lab.run("a", NAME, &options)?;
    let ready = || Ok(lab.check("a", &["runc", "exec", NAME, "cat", "/tmp/ready"]).ok());
    let entered = wait_until("the program to be ready", PATIENCE, ready)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    for (state, words) in [("ports", "may use I/O ports (ioperm)"), ("ldt", "has a local descriptor table")] {
        if !entered.contains(state) {
            println!("skipped: this kernel has no {state}");
            continue;
        }
        ensure!(refusal.blockers.iter().any(|b| b.cause.contains(words)), "no {words:?} among {:#?}", refusal.blockers);
    }
    remove(lab, NAME)
}

/// The agent may enter no IPC namespace, and owns none of the objects there: the launcher's tasks do.
fn room_of_message_queues_is_carried(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    if !by_units(lab, ["", ""])? {
        return Ok(());
    }
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", QUEUE]))?;
    let room = |node: &str| {
        let ready = || Ok(lab.check(node, &["runc", "exec", NAME, "cat", "/tmp/ready"]).ok());
        wait_until("the program to tell the room", PATIENCE, ready)
    };
    ensure!(room("a")? == "777", "the room is {} before the move", room("a")?);
    move_container(lab, "a", NAME, "b")?;
    lab.check("b", &["runc", "exec", NAME, "rm", "-f", "/tmp/ready"])?;
    ensure!(room("b")? == "777", "the room is {} after the move", room("b")?);
    remove(lab, NAME)
}

/// A launcher that is killed is started again; a second one, or a second agent, changes nothing; one that is stopped is named.
fn a_launcher_comes_back_and_is_missed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    if !by_units(lab, ["", ""])? {
        return Ok(());
    }
    for arguments in [&["transhipd", "launcher"][..], &["transhipd", "--launcher", "/run/tranship/launcher.sock"]] {
        let output = lab.exec("a", arguments)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "a second {arguments:?} runs: {text}");
    }
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, PATIENCE)?;
    for node in ["a", "b"] {
        send(Signal::SIGKILL, main_pid(lab, node, LAUNCHER)?)?;
    }
    move_container(lab, "a", NAME, "b")?;
    lab.manager("b", &["stop", LAUNCHER])?;
    let doctor = lab.exec("b", &["tranship", "doctor"])?;
    let text = String::from_utf8_lossy(&doctor.stderr).into_owned();
    ensure!(!doctor.status.success() && text.contains("systemctl restart transhipd-launcher"), "{text}");
    lab.manager("b", &["start", LAUNCHER])?;
    ensure!(lab.exec("b", &["tranship", "doctor"])?.status.signal().is_none());
    move_container(lab, "b", NAME, "a")?;
    remove(lab, NAME)
}

/// Agents and launchers die in the middle of moves; the container runs on one side.
fn deaths_in_moves_are_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    if !by_units(lab, ["", ""])? {
        return Ok(());
    }
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut redis = Redis::connect(lab, IP, PATIENCE)?;
    redis.populate(20_000, "key", 100)?;
    let cases = [
        ("source.transfer.after", "a", "transhipd.service"),
        ("destination.restore.after", "b", "transhipd.service"),
        ("source.transfer.after", "a", LAUNCHER),
        ("destination.restore.after", "b", LAUNCHER),
    ];
    for (place, node, unit) in cases {
        let faults = format!("{place}.hold");
        by_units(lab, if node == "a" { [&faults, ""] } else { ["", &faults] })?;
        let from = exactly_one_runs(lab, NAME)?;
        if from == "b" {
            move_container(lab, "b", NAME, "a")?;
        }
        let agent = main_pid(lab, node, "transhipd.service")?;
        let moving = Moving::begin(lab, NAME, "a", "b", Mode::Precopy)?;
        wait_until("the agent to be held", PATIENCE, || Ok((tranship_e2e::state(agent) == Some('T')).then_some(())))?;
        let killed = main_pid(lab, node, unit)?;
        send(Signal::SIGKILL, killed)?;
        wait_until("it to die", PATIENCE, || Ok(is_gone(killed).then_some(())))?;
        send(Signal::SIGCONT, agent)?;
        let ended = moving.end()?;
        let at = quiet(lab, NAME).with_context(|| format!("{unit} killed at {place}: {}", ended.error()))?;
        Redis::connect(lab, IP, PATIENCE).with_context(|| format!("{unit} killed at {place}, on {at}"))?;
    }
    by_units(lab, ["", ""])?;
    remove(lab, NAME)?;
    by_themselves(lab)
}

fn main() -> ExitCode {
    scenarios(&[
        ("the_unit_is_rated_better_than_six", the_unit_is_rated_better_than_six),
        ("containers_move_and_inherit_nothing", containers_move_and_inherit_nothing),
        ("hidden_states_are_seen", hidden_states_are_seen),
        ("room_of_message_queues_is_carried", room_of_message_queues_is_carried),
        ("a_launcher_comes_back_and_is_missed", a_launcher_comes_back_and_is_missed),
        ("deaths_in_moves_are_survived", deaths_in_moves_are_survived),
    ])
}
