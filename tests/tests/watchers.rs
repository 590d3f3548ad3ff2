//! Who watches files, or holds leases on them, is told nothing of a plan, a move or a failed one; limits that were changed stay changed.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Moving, Stage, exactly_one_runs, has_limits, is_version_2, limits, move_with, refused_move, remove, restart_agent,
    scenarios, set_limit, wait_until,
};
use tranship_lab::{Lab, RunOptions};

const NAME: &str = "watcher";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 52);
const PATIENCE: Duration = Duration::from_secs(60);

/// Watches files in /tmp in the ways that its arguments name, and tells on port 7000 what it was told.
const WATCHER: &str = r#"
import ctypes, fcntl, os, signal, socket, sys
want = sys.argv[1:]
if os.fork():
    while True: signal.pause()
libc = ctypes.CDLL(None)
os.makedirs('/tmp/o/d')
for name in 'frw': open('/tmp/o/d/' + name, 'w').write('x' * 100000)
signals = []
signal.signal(signal.SIGIO, lambda number, _: signals.append(number))
queue = libc.inotify_init1(os.O_NONBLOCK)
for path in ['/tmp', '/dev/shm', '/dev/pts', '/tmp/o', '/tmp/o/d', '/tmp/o/d/f']: libc.inotify_add_watch(queue, path.encode(), 0xfff)
lease = os.open('/tmp/o/d/r', os.O_RDONLY)
fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_RDLCK)
if 'write-lease' in want:
    held = os.open('/tmp/o/d/w', os.O_WRONLY)
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
if 'signals' in want:
    directory = os.open('/tmp/o/d', os.O_RDONLY)
    fcntl.fcntl(directory, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
def drain():
    try: return os.read(queue, 65536)
    except BlockingIOError: return b''
drain()
signals.clear()
server = socket.socket()
server.bind(('', 7000))
server.listen()
while True:
    peer = server.accept()[0]
    times = [os.stat('/tmp/o/d/' + name).st_atime_ns for name in 'frw']
    peer.sendall(repr((drain(), signals, fcntl.fcntl(lease, fcntl.F_GETLEASE), times)).encode())
    peer.close()
    if 'unread' in want: open('/tmp/o/d/new', 'w').close()
"#;

/// Makes a file every other ms, and reads what inotify tells of them only now and then; tells on port 7000 how many it has made, and of
/// how many it was told.
const BUSY: &str = r#"
import ctypes, os, socket, struct, threading, time
libc = ctypes.CDLL(None)
os.mkdir('/tmp/d')
queue = libc.inotify_init1(0)
libc.inotify_add_watch(queue, b'/tmp/d', 0x100)
made = told = 0
stop = False
def make():
    global made
    while not stop:
        name = f'/tmp/d/{made % 2}'
        open(name, 'w').close()
        os.unlink(name)
        made += 1
        time.sleep(0.002)
def read():
    global told
    while True:
        data, at = os.read(queue, 65536), 0
        while at < len(data):
            told, at = told + 1, at + 16 + struct.unpack_from('I', data, at + 12)[0]
        time.sleep(0.001)
maker = threading.Thread(target=make)
maker.start()
threading.Thread(target=read, daemon=True).start()
server = socket.socket()
server.bind(('', 7000))
server.listen()
server.accept()
peer = server.accept()[0]
stop = True
maker.join()
deadline = time.time() + 10
while told != made and time.time() < deadline: time.sleep(0.01)
peer.sendall(f'{made} {told}'.encode())
peer.close()
time.sleep(1000)
"#;

/// Has a packet wait in a socket of the kind that its argument names; tells on port 7000 whether it does.
const PACKETS: &str = r#"
import select, socket, sys
if sys.argv[1] == 'raw':
    waits = socket.socket(socket.AF_INET, socket.SOCK_RAW, 89)
    waits.sendto(b'packet', ('127.0.0.1', 0))
elif sys.argv[1] == 'udplite':
    waits = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)
    waits.bind(('127.0.0.1', 0))
    waits.sendto(b'packet', waits.getsockname())
else:
    waits = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    waits.bind(('lo', 3))
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'packet', ('127.0.0.1', 9))
server = socket.socket()
server.bind(('', 7000))
server.listen()
while True:
    peer = server.accept()[0]
    peer.sendall(str(len(select.select([waits], [], [], 0)[0])).encode())
    peer.close()
"#;

/// Adds a key to the keyring that its argument names; tells on port 7000 how many keys it finds there.
const KEYS: &str = r#"
import ctypes, platform, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
add_key, keyctl = {'x86_64': (248, 250), 'aarch64': (217, 219)}[platform.machine()]
ring = {'thread': -1, 'process': -2, 'session': -3}[sys.argv[1]]
assert libc.syscall(add_key, b'user', b'ticket', b'secret', 6, ring) > 0, ctypes.get_errno()
server = socket.socket()
server.bind(('', 7000))
server.listen()
while True:
    peer = server.accept()[0]
    found = libc.syscall(keyctl, 11, ring, None, 0)
    peer.sendall(str(found // 4 if found >= 0 else -ctypes.get_errno()).encode())
    peer.close()
"#;

fn start(lab: &Lab, ways: &[&str]) -> Result<()> {
    start_program(lab, WATCHER, ways)
}

fn start_program(lab: &Lab, program: &str, ways: &[&str]) -> Result<()> {
    let command = [&["python3", "-c", program][..], ways].concat();
    lab.run("a", NAME, &RunOptions::new(IP, command))?;
    let listens = || lab.exec("client", &["bash", "-c", "</dev/tcp/10.77.0.52/7000"]);
    wait_until("the program to listen", PATIENCE, || Ok(listens()?.status.success().then_some(())))
}

/// What the program was told of its files, whether its lease holds, and when its files were read.
fn told(lab: &Lab) -> Result<String> {
    Ok(lab.check("client", &["bash", "-c", "cat </dev/tcp/10.77.0.52/7000"])?)
}

fn neither_a_plan_nor_a_failed_move_nor_a_move_is_noticed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, &[])?;
    let before = told(lab)?;
    ensure!(before.starts_with("(b'', [], 0, "), "{before}");
    let unchanged = |when: &str| -> Result<()> {
        let now = told(lab)?;
        ensure!(now == before, "{when}: {now} instead of {before}");
        Ok(())
    };
    lab.check("a", &["tranship", "plan", NAME, "--to", "b"])?;
    unchanged("after a plan")?;

    restart_agent(lab, "a", "source.commit.before.error")?;
    let failed = lab.exec("a", &["tranship", "move", NAME, "--to", "b"])?;
    ensure!(!failed.status.success() && exactly_one_runs(lab, NAME)? == "a", "{failed:?}");
    unchanged("after a failed move")?;

    restart_agent(lab, "a", "")?;
    move_with(lab, "a", NAME, "b", &[])?;
    ensure!(exactly_one_runs(lab, NAME)? == "b", "it was not moved");
    unchanged("after a move")?;
    remove(lab, NAME)
}

fn limits_that_were_changed_stay_changed(stage: &mut Stage) -> Result<()> {
    if !has_limits() {
        eprintln!("skipped: version 2 of cgroups has no controllers here");
        return Ok(());
    }
    let lab = &stage.lab;
    start(lab, &[])?;
    let update = ["--pids-limit", "10", "--cpu-quota", "50000", "--cpu-period", "100000", "--memory", "104857600"];
    let more = ["--memory-swap", "209715200", "--cpu-share", "512", "--cpuset-cpus", "0"];
    lab.check("a", &[&["runc", "update"][..], &update, &more, &[NAME]].concat())?;
    let pid = |node: &str| -> Result<String> {
        let state: serde_json::Value = serde_json::from_str(&lab.check(node, &["runc", "state", NAME])?)?;
        Ok(state["pid"].to_string())
    };
    let reservation = ["memory.soft_limit_in_bytes", "memory.low"];
    set_limit(lab, "a", &pid("a")?, ("memory", &reservation), "52428800")?;
    // Version 2 has none of its own for a cgroup.
    if !is_version_2() {
        set_limit(lab, "a", &pid("a")?, ("memory", &["memory.swappiness"]), "7")?;
    }
    let before = limits(lab, "a", &pid("a")?)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        move_with(lab, from, NAME, to, &[])?;
        let now = limits(lab, to, &pid(to)?)?;
        ensure!(now == before, "the limits were\n{before}\nand on {to} they are\n{now}");
    }
    let expected = match is_version_2() {
        true => ["pids.max 10\n", "cpu.max 50000 100000\n", "memory.swap.max 104857600\n", "memory.low 52428800\n"],
        false => {
            ["pids.max 10\n", "cpu.cfs_quota_us 50000\n", "memory.memsw.limit_in_bytes 209715200\n", "swappiness 7\n"]
        }
    };
    ensure!(expected.iter().all(|line| before.contains(line)), "{before}");
    told(lab).context("the program does not answer")?;

    // The destination has made the container when they are changed.
    let change = |lab: &Lab| Ok(lab.check("a", &["runc", "update", "--pids-limit", "11", NAME]).map(drop)?);
    let moving = Moving::begun_from(lab, NAME, ("a", "b"), "source.freeze.before", change)?;
    let ended = moving.end()?;
    ensure!(!ended.success && ended.error().contains("limits of the container's cgroup were changed"), "{ended:?}");
    restart_agent(lab, "a", "")?;
    move_with(lab, "a", NAME, "b", &[]).context("with the limits as they are now")?;
    ensure!(limits(lab, "b", &pid("b")?)?.contains("pids.max 11\n"), "{}", limits(lab, "b", &pid("b")?)?);
    remove(lab, NAME)
}

fn what_would_be_lost_or_broken_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start(lab, &["write-lease", "signals", "unread"])?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    let allowed: Vec<_> = refusal.blockers.iter().map(|b| b.allow.as_deref().unwrap_or_default()).collect();
    for kind in ["", "directory-signals", "inotify-events"] {
        ensure!(allowed.contains(&kind), "{refusal:#?}");
    }
    let lease = refusal.blockers.iter().find(|b| b.allow.is_none()).context("no blocker is the lease")?;
    ensure!(lease.cause.contains("a write lease on /tmp/o/d/w") && allowed.len() == 3, "{refusal:#?}");
    let signals = told(lab)?;
    ensure!(signals.contains(", [], 0, "), "a refusal broke the lease, or raised a signal: {signals}");
    remove(lab, NAME)?;

    start(lab, &["unread"])?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.blockers.len() == 1 && refusal.text.contains("inotify events that wait unread"), "{refusal:#?}");
    let report = move_with(lab, "a", NAME, "b", &["--allow", "inotify-events"])?;
    ensure!(report.allowed == refusal.blockers, "the report does not list them: {report:#?}");
    remove(lab, NAME)
}

/// Most freezes find events that wait; the program is let run until it has read them.
fn no_event_of_a_busy_watcher_is_lost(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    start_program(lab, BUSY, &[])?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        move_with(lab, from, NAME, to, &[])?;
    }
    let counts = told(lab)?;
    let (made, seen) = counts.split_once(' ').with_context(|| format!("{counts:?}"))?;
    ensure!(made == seen, "{made} files were made, and the program was told of {seen}");
    remove(lab, NAME)
}

fn unread_packets_are_refused_unless_they_may_be_lost(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for kind in ["raw", "packet", "udplite"] {
        let capabilities = vec!["CAP_NET_RAW".to_owned()];
        let command = ["python3", "-c", PACKETS, kind];
        lab.run("a", NAME, &RunOptions { capabilities, ..RunOptions::new(IP, command) })?;
        wait_until("the program to answer", PATIENCE, || Ok(told(lab).ok()))?;
        let refusal = refused_move(lab, "a", NAME, "b").context(kind)?;
        let is_named = refusal.text.contains("has packets that wait unread");
        ensure!(refusal.blockers.len() == 1 && is_named, "{kind}: {refusal:#?}");
        ensure!(told(lab)? == "1", "{kind}: a refusal has taken the packet");
        let report = move_with(lab, "a", NAME, "b", &["--allow", "unread-packets"])?;
        ensure!(report.allowed.len() <= 1 && told(lab)? == "0", "{kind}: {report:#?}");
        // Nothing waits any more.
        move_with(lab, "b", NAME, "a", &[]).context(kind)?;
        remove(lab, NAME)?;
    }
    Ok(())
}

fn keys_are_refused_unless_they_may_be_lost(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for ring in ["thread", "process", "session"] {
        start_program(lab, KEYS, &[ring])?;
        let refusal = refused_move(lab, "a", NAME, "b")?;
        let words = format!("has keys in its {ring} keyring");
        ensure!(refusal.blockers.len() == 1 && refusal.text.contains(&words), "{refusal:#?}");
        ensure!(told(lab)? == "1", "a refusal has changed the keyring");
        if ring == "session" {
            move_with(lab, "a", NAME, "b", &["--allow", "keyrings"])?;
            ensure!(told(lab)? == "0", "the container has keys of the node's: {}", told(lab)?);
            move_with(lab, "b", NAME, "a", &[])?;
        }
        remove(lab, NAME)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("keys_are_refused_unless_they_may_be_lost", keys_are_refused_unless_they_may_be_lost),
        ("no_event_of_a_busy_watcher_is_lost", no_event_of_a_busy_watcher_is_lost),
        (
            "neither_a_plan_nor_a_failed_move_nor_a_move_is_noticed",
            neither_a_plan_nor_a_failed_move_nor_a_move_is_noticed,
        ),
        ("unread_packets_are_refused_unless_they_may_be_lost", unread_packets_are_refused_unless_they_may_be_lost),
        ("limits_that_were_changed_stay_changed", limits_that_were_changed_stay_changed),
        ("what_would_be_lost_or_broken_is_refused", what_would_be_lost_or_broken_is_refused),
    ])
}
