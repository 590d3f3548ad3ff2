//! What cannot be carried is refused before the freeze, by name, unless the user allows the move to lose it.

use std::io::Write;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::Plan;
use tranship_e2e::{
    Guest, Moving, Stage, exactly_one_runs, move_with, refused_move, refused_move_with, remove, restart_agent,
    scenarios, wait_until,
};
use tranship_lab::{Lab, RunOptions, find_program};

const NAME: &str = "refused";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 51);
const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(60);

fn what_is_lost_by_a_move_is_refused_unless_it_is_allowed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let program = find_program("zoo")?;
    let mut options = RunOptions::new(IP, ["/opt/zoo", "--only", "eventfd_semaphore"]);
    options.binds.push((program, "/opt/zoo".into()));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, IP, PORT)?.zoo(PATIENCE)?;

    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.status == 3 && refusal.blockers.len() == 1, "{refusal:#?}");
    let blocker = &refusal.blockers[0];
    ensure!(blocker.allow.as_deref() == Some("eventfd-semaphore") && blocker.pid.is_some(), "{blocker:?}");
    ensure!(blocker.remedy.ends_with(", or give --allow eventfd-semaphore"), "{blocker:?}");
    let other = refused_move_with(lab, "a", NAME, "b", &["--allow", "deadline-scheduling"])?;
    ensure!(other.blockers == refusal.blockers, "another kind was allowed: {other:#?}");
    let unknown = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--allow", "semaphores"])?;
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(unknown.status.code() == Some(2) && said.contains("use one of: "), "{:?}: {said}", unknown.status);

    let allow = ["--allow", "eventfd-semaphore"];
    let dry_run = [&["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"][..], &allow].concat();
    let text = lab.check("a", &dry_run)?;
    let plan: Plan = serde_json::from_str(text.trim()).context(text)?;
    ensure!(plan.blockers.is_empty() && plan.allowed == refusal.blockers, "{plan:#?}");
    let report = move_with(lab, "a", NAME, "b", &allow)?;
    ensure!(report.allowed == refusal.blockers, "the report does not list it: {report:#?}");
    ensure!(exactly_one_runs(lab, NAME)? == "b", "it was not moved");
    remove(lab, NAME)
}

/// Names that are not UTF-8 and have control characters in them, mappings of /dev/zero, a timer slack, an epoll whose target has another
/// descriptor by now: what the program sees of them is the same after each move.
fn odd_states_are_moved_as_they_are(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let command = ["python3", "-c", include_str!("../src/oddities.py")];
    let mounts = ["sp ace", "ta\tb", "back\\slash", "lit\\040eral", "Ж"];
    let mut options = RunOptions::new(IP, command);
    options.tmpfs = mounts.map(|name| Path::new("/run").join(name)).to_vec();
    lab.run("a", NAME, &options)?;
    let state = |node: &str| -> Result<String> {
        // One that was written since.
        let script = "rm -f /tmp/state; until [ -e /tmp/state ]; do sleep 0.01; done; cat /tmp/state";
        Ok(lab.check(node, &["timeout", "20", "runc", "exec", NAME, "sh", "-c", script])?)
    };
    let first = wait_until("the program to be ready", PATIENCE, || Ok(state("a").ok()))?;
    let (mut from, mut to) = ("a", "b");
    for mode in ["auto", "cold", "precopy", "postcopy"] {
        move_with(lab, from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        let now = state(to)?;
        ensure!(now == first, "mode {mode} has changed {first} to {now}");
        (from, to) = (to, from);
    }
    ensure!(first.contains(r#""slack": [123456, 234567]"#) && first.contains(r#""epoll": 1"#), "{first}");
    remove(lab, NAME)
}

/// Has names that are not UTF-8: its own, of a mount point and a file that is open there, of a socket with a relative name, and of one with
/// another name in another directory.
const NOT_UTF8: &str = r#"
import ctypes, os, signal, socket
libc = ctypes.CDLL(None)
libc.prctl(15, b'n\xffme', 0, 0, 0)
os.chdir('/tmp')
os.mkdir(b'm\xff')
assert libc.mount(b'tmpfs', b'm\xff', b'tmpfs', 0, None) == 0
held = os.open(b'/tmp/m\xff/\xfe', os.O_CREAT | os.O_RDWR)
os.write(held, b'content')
relative, renamed = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
relative.bind(b'r\xff')
relative.listen()
renamed.bind(b'/tmp/s\xff')
os.mkdir(b'd\xff')
os.link(b's\xff', b'd\xff/t\xfe')
os.close(os.open('ready', os.O_CREAT | os.O_WRONLY))
while True: signal.pause()
"#;

/// They are carried, or named so that they can be told from others.
fn names_need_not_be_utf8(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = RunOptions::new(IP, ["python3", "-c", NOT_UTF8]);
    options.capabilities.push("CAP_SYS_ADMIN".to_owned());
    lab.run("a", NAME, &options)?;
    ready(lab)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    let [blocker] = refusal.blockers.as_slice() else { anyhow::bail!("{refusal:#?}") };
    for words in [r"of n\377me (pid ", r"is a Unix socket at /tmp/s\377, whose file has other names"] {
        ensure!(blocker.cause.contains(words), "{words} is not in {}", blocker.cause);
    }
    let report = move_with(lab, "a", NAME, "b", &["--allow", "socket-files"])?;
    let text = serde_json::to_string(&report)?;
    ensure!(!text.contains('\u{fffd}'), "what cannot be shown was left out: {text}");
    let read = "import os; print(os.readlink(b'/proc/1/fd/3'), open(b'/tmp/m\\xff/\\xfe').read(), os.listdir(b'/tmp'))";
    let read = lab.check("b", &["runc", "exec", NAME, "python3", "-c", read])?;
    ensure!(read.starts_with(r"b'/tmp/m\xff/\xfe' content ") && read.contains(r"b'r\xff'"), "{read}");
    remove(lab, NAME)
}

/// Gives itself states that /proc does not show; with an argument a child has those that no move may lose.
const HIDDEN: &str = r#"
import ctypes, mmap, os, signal, struct, sys
libc = ctypes.CDLL(None)
if len(sys.argv) > 1 and os.fork() == 0:
    # struct user_desc: the first entry, a segment of one page.
    assert libc.syscall(154, 1, struct.pack('IIII', 0, 0, 1, 0x51), 16) == 0
    # From here on nothing may ask for the time.
    assert libc.prctl(26, 2, 0, 0, 0) == 0
    while True: libc.pause()
libc.prctl(38, 1, 0, 0, 0)
rules = libc.syscall(444, struct.pack('Q', 1 << 9), 8, 0)
assert libc.syscall(446, rules, 0) == 0
os.close(rules)
memory = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert libc.syscall(462, ctypes.c_ulong(address), ctypes.c_ulong(1 << 16), 0) == 0
assert libc.prctl(65, 1, 0, 0, 0) == 0
assert libc.mlockall(2) == 0
os.close(os.open('/tmp/ready', os.O_CREAT | os.O_WRONLY))
while True: signal.pause()
"#;

/// Hides a file that it has open beneath another one.
const HIDING: &str = r#"
import ctypes, os, signal
libc = ctypes.CDLL(None)
for name in '/tmp/open', '/tmp/other': open(name, 'w').close()
hidden = open('/tmp/open')
assert libc.mount(b'/tmp/other', b'/tmp/open', None, 4096, None) == 0
os.close(os.open('/tmp/ready', os.O_CREAT | os.O_WRONLY))
while True: signal.pause()
"#;

fn an_open_file_that_another_one_hides_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = RunOptions::new(IP, ["python3", "-c", HIDING]);
    options.capabilities.push("CAP_SYS_ADMIN".to_owned());
    lab.run("a", NAME, &options)?;
    ready(lab)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    let named = refusal.blockers.iter().filter(|blocker| blocker.cause.contains("is the file that was /tmp/open"));
    ensure!(named.count() == 1 && refusal.blockers.len() == 1, "{refusal:#?}");
    remove(lab, NAME)
}

/// Is sent pipes through a socket, and keeps them; of a reading end it then writes to a file what comes.
const RECEIVER: &str = r#"
import array, os, socket
server = socket.socket(socket.AF_UNIX)
server.bind('\0pipes')
server.listen()
os.close(os.open('/tmp/ready', os.O_CREAT))
kept = []
while True:
    peer = server.accept()[0]
    descriptor = socket.recv_fds(peer, 1, 1)[1][0]
    peer.close()
    kept.append(descriptor)
    os.close(os.open('/tmp/kept', os.O_CREAT))
    with open('/tmp/read', 'wb', 0) as out:
        while data := os.read(descriptor, 100): out.write(data)
"#;

/// Sends its standard input to the program above.
const SENDER: &str = "
import socket
peer = socket.socket(socket.AF_UNIX)
peer.connect('\\0pipes')
socket.send_fds(peer, [b'x'], [0])
";

/// A pipe whose other end is outside of the container, which the program got when it had been inspected.
fn a_pipe_that_leads_out_is_found_in_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", RECEIVER]))?;
    ready(lab)?;
    let (read, write) = std::io::pipe()?;
    let give = |lab: &Lab| -> Result<()> {
        // Else runc would stand between.
        let mut sender = lab.command("a", &["runc", "exec", "--detach", NAME, "python3", "-c", SENDER])?;
        ensure!(sender.stdin(read).status()?.success(), "the pipe cannot be sent");
        let look = ["runc", "exec", NAME, "test", "-e", "/tmp/kept"];
        wait_until("the program to have the pipe", PATIENCE, || Ok(lab.check("a", &look).ok().map(drop)))
    };
    let ended = Moving::begun_from(lab, NAME, ("a", "b"), "source.freeze.before", give)?.end()?;
    ensure!(!ended.success && ended.error().contains("is a pipe whose writing end is held by"), "{ended:?}");
    ensure!(exactly_one_runs(lab, NAME)? == "a", "it was moved");
    restart_agent(lab, "a", "")?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.text.contains("is a pipe whose other end is open outside of the container"), "{refusal:#?}");

    (&write).write_all(b"still here")?;
    let look = ["runc", "exec", NAME, "cat", "/tmp/read"];
    let read = || Ok(lab.check("a", &look).ok().filter(|text| text == "still here").map(drop));
    wait_until("what went through the pipe", PATIENCE, read)?;
    // A pipe whose other end nobody has any more is carried.
    drop(write);
    move_with(lab, "a", NAME, "b", &[])?;
    remove(lab, NAME)
}

/// Waits until a program has made a file that says so.
fn ready(lab: &Lab) -> Result<()> {
    let look = ["runc", "exec", NAME, "test", "-e", "/tmp/ready"];
    wait_until("the program to be ready", PATIENCE, || Ok(lab.check("a", &look).ok().map(drop)))
}

/// Each is named before the freeze, those that may be lost only are if they are allowed to be, and none of it is found at the destination.
fn states_that_proc_does_not_show_are_refused(stage: &mut Stage) -> Result<()> {
    const LOSABLE: [&str; 4] = ["deny-write-execute", "landlock", "lock-future-memory", "sealed-memory"];
    let lab = &stage.lab;
    let start = |arguments: &[&str]| -> Result<()> {
        let command = [&["python3", "-c", HIDDEN][..], arguments].concat();
        let mut options = RunOptions::new(IP, command);
        options.capabilities.push("CAP_IPC_LOCK".to_owned());
        lab.run("a", NAME, &options)?;
        ready(lab)
    };
    start(&["more"])?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    for words in ["PR_SET_TSC", "modify_ldt", "PR_SET_MDWE", "MCL_FUTURE", "Landlock", "mseal"] {
        let named = refusal.blockers.iter().filter(|blocker| blocker.cause.contains(words) && blocker.pid.is_some());
        ensure!(named.count() == 1, "{words} is not named once: {refusal:#?}");
    }
    remove(lab, NAME)?;

    start(&[])?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    let mut kinds: Vec<&str> = refusal.blockers.iter().filter_map(|blocker| blocker.allow.as_deref()).collect();
    kinds.sort_unstable();
    ensure!(kinds == LOSABLE && refusal.blockers.len() == LOSABLE.len(), "{refusal:#?}");
    let allow: Vec<&str> = LOSABLE.iter().flat_map(|kind| ["--allow", kind]).collect();
    let report = move_with(lab, "a", NAME, "b", &allow)?;
    ensure!(report.allowed.len() == LOSABLE.len(), "the report does not list them: {report:#?}");
    move_with(lab, "b", NAME, "a", &[]).context("back, with nothing left to lose")?;
    remove(lab, NAME)
}

/// A container whose memory has been restored, or is still coming, looks unlike one that was started: it is no reason to refuse it.
fn containers_that_have_arrived_are_not_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let redis = ["redis-server", "--save", "", "--appendonly", "no", "--protected-mode", "no"];
    let python = ["python3", "-m", "http.server", "8000"];
    for command in [&redis[..], &python] {
        lab.run("a", NAME, &RunOptions::new(IP, command.iter().copied()))?;
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            move_with(lab, from, NAME, to, &[]).with_context(|| format!("{} from {from} to {to}", command[0]))?;
            let plan = lab.check(to, &["tranship", "move", NAME, "--to", from, "--dry-run", "--json"])?;
            let plan: Plan = serde_json::from_str(plan.trim()).context(plan)?;
            ensure!(plan.blockers.is_empty(), "{}, as soon as it is at {to}: {plan:#?}", command[0]);
        }
        remove(lab, NAME)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("names_need_not_be_utf8", names_need_not_be_utf8),
        (
            "what_is_lost_by_a_move_is_refused_unless_it_is_allowed",
            what_is_lost_by_a_move_is_refused_unless_it_is_allowed,
        ),
        ("odd_states_are_moved_as_they_are", odd_states_are_moved_as_they_are),
        ("an_open_file_that_another_one_hides_is_refused", an_open_file_that_another_one_hides_is_refused),
        ("a_pipe_that_leads_out_is_found_in_the_freeze", a_pipe_that_leads_out_is_found_in_the_freeze),
        ("states_that_proc_does_not_show_are_refused", states_that_proc_does_not_show_are_refused),
        ("containers_that_have_arrived_are_not_refused", containers_that_have_arrived_are_not_refused),
    ])
}
