//! Directories on disk move with their container, whatever is in them and whoever is writing to them; and if a move fails, the
//! source's are as they were and the destination's clean.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{
    Guest, Moving, Stage, exactly_one_runs, move_with, nothing_left, quiet, remove, restart_agent, scenarios,
    wait_until,
};
use tranship_lab::{Lab, RunOptions, find_program};
use tranship_types::{Mode, Report};

const NAME: &str = "disk";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 22);
const PORT: u16 = 7003;
const PATIENCE: Duration = Duration::from_secs(60);
const SHARED: [&str; 1] = ["--with-binds"];

/// Starts the program that writes and checks, on node a.
fn start(lab: &Lab, mib: u64, rate: u64) -> Result<Guest> {
    let seed = std::env::var("TRANSHIP_SEED").unwrap_or_else(|_| std::process::id().to_string());
    eprintln!("TRANSHIP_SEED={seed}");
    fs::create_dir(lab.path("a", "/srv/data")?)?;
    let (mib, rate) = (mib.to_string(), rate.to_string());
    let mut options = RunOptions::new(IP, ["/opt/disk-files", "/mnt", &mib, &rate, &seed]);
    options.binds.push((find_program("disk-files")?, "/opt/disk-files".into()));
    options.volumes.push(("/srv/data".into(), "/mnt".into()));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, IP, PORT)
}

/// Ends it, and removes what it has written.
fn end(lab: &Lab) -> Result<()> {
    remove(lab, NAME)?;
    for node in ["a", "b"] {
        match fs::remove_dir_all(lab.path(node, "/srv/data")?) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => bail!("/srv/data on {node}: {e}"),
            _ => ensure!(names(lab, node)?.is_empty(), "{:?} is left on {node}", names(lab, node)?),
        }
    }
    Ok(())
}

/// What is in a node's /srv.
fn names(lab: &Lab, node: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(lab.path(node, "/srv")?)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Waits until everything was compared once more.
fn all_is_right(guest: &mut Guest) -> Result<()> {
    // What was on its way says nothing of now.
    guest.lines(PATIENCE)?;
    loop {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
        if line.ends_with(" all") {
            return Ok(());
        }
    }
}

fn ways(report: &Report) -> Vec<&String> {
    report.ways.iter().filter(|way| way.starts_with("files: ")).collect()
}

fn a_directory_moves_to_and_fro_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = start(lab, 64, 5)?;
    all_is_right(&mut guest).context("before the first move")?;
    for (n, mode) in ["auto", "cold", "precopy", "hybrid", "postcopy", "auto"].into_iter().enumerate() {
        let (from, to) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let report = move_with(lab, from, NAME, to, &["--with-binds", "--verify-files", "--mode", mode])
            .with_context(|| format!("{from} → {to}, mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
        nothing_left(lab, from, NAME)?;
        all_is_right(&mut guest).with_context(|| format!("after move {n}, mode {mode}"))?;
        ensure!(
            names(lab, "a")? == ["data"] && names(lab, "b")? == ["data"],
            "{:?} {:?}",
            names(lab, "a"),
            names(lab, "b")
        );
        let found = ways(&report);
        ensure!(found.iter().any(|way| way.contains("compared on both nodes")), "{found:?}");
        eprintln!("move {n}, {mode}: blackout {:.0} ms, {found:?}", report.blackout_ms.unwrap_or_default());
    }
    end(lab)
}

fn what_is_there_already_is_not_touched(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = start(lab, 1, 0)?;
    let refusal = |options: &[&str]| -> Result<String> {
        let mut arguments = vec!["tranship", "move", NAME, "--to", "b"];
        arguments.extend(options);
        let output = lab.exec("a", &arguments)?;
        ensure!(!output.status.success(), "it was moved");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let said = refusal(&[])?;
    ensure!(said.contains("/srv/data") && said.contains("does not exist on node b"), "{said}");
    let there = lab.path("b", "/srv/data")?;
    fs::create_dir(&there)?;
    fs::write(there.join("precious"), b"1")?;
    let said = refusal(&SHARED)?;
    ensure!(said.contains("/srv/data exists already, with files in it (on node b)"), "{said}");
    ensure!(fs::read(there.join("precious"))? == b"1" && names(lab, "b")? == ["data"]);
    fs::remove_file(there.join("precious"))?;
    move_with(lab, "a", NAME, "b", &SHARED)?;
    all_is_right(&mut guest)?;
    // Somebody uses what was left here.
    std::thread::sleep(Duration::from_millis(100));
    fs::write(lab.path("a", "/srv/data/log")?, b"mine now")?;
    let output = lab.exec("b", &["tranship", "move", NAME, "--to", "a", "--with-binds"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("was changed since"), "{said}");
    all_is_right(&mut guest)?;
    end(lab)
}

/// The destination's disk is too small or cannot be written to, which is seen before anything is touched; or it takes no more
/// files, which is not.
fn a_full_disk_fails_the_move_and_leaves_nothing(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = start(lab, 16, 1)?;
    for (options, words) in
        [("size=4m", "only 4 MiB to spare"), ("size=64m,ro", "read-only"), ("size=64m,nr_inodes=4", "No space left")]
    {
        lab.check("b", &["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/srv"])?;
        let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--with-binds"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && said.contains(words) && said.contains("on node b"), "{options}: {said}");
        ensure!(exactly_one_runs(lab, NAME)? == "a");
        wait_until("the destination to be clean", PATIENCE, || Ok(names(lab, "b")?.is_empty().then_some(())))?;
        all_is_right(&mut guest)?;
        lab.check("b", &["umount", "/srv"])?;
    }
    move_with(lab, "a", NAME, "b", &SHARED)?;
    all_is_right(&mut guest)?;
    end(lab)
}

/// A filesystem that a program provides, mounted on a directory: it has one file, `word`, with `hello`.
const FUSE: &str = r#"
import ctypes, os, struct, sys
device = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % device
assert ctypes.CDLL(None).mount(b"shared", sys.argv[1].encode(), b"fuse", 6, options) == 0
word, ok = b"hello", struct.Struct("IiQ")
def attributes(node):
    return struct.pack("6Q10I", node, len(word), 1, *[0] * 6, 0o40755 if node == 1 else 0o100644, 1, *[0] * 3, 4096, 0)
answers = {
    1: lambda node: struct.pack("4Q2I", 2, 0, 1, 1, 0, 0) + attributes(2),
    3: lambda node: struct.pack("Q2I", 1, 0, 0) + attributes(node),
    14: lambda node: bytes(16), 15: lambda node: word, 17: lambda node: struct.pack("5Q10I", *[9] * 5, 4096, 255, 4096, *[0] * 7),
    18: lambda node: b"", 25: lambda node: b"", 27: lambda node: bytes(16), 28: lambda node: b"", 29: lambda node: b"",
    26: lambda node: struct.pack("4I2H2I2H8I", 7, 31, 65536, 0, 0, 0, 65536, 1, *[0] * 10),
}
while True:
    asked = os.read(device, 1 << 18)
    _, kind, number, node = struct.unpack_from("IIQQ", asked)
    if kind in (2, 36, 42):
        continue
    if kind in answers and (kind != 1 or asked[40:] == b"word\0"):
        answer, error = answers[kind](node), 0
    else:
        answer, error = b"", -2 if kind == 1 else -38
    os.write(device, ok.pack(16 + len(answer), error, number) + answer)
"#;

/// A directory on a filesystem that every node has is left where it is, also with `--with-binds`: nothing of it is copied.
fn what_every_node_has_is_left_alone(stage: &mut Stage) -> Result<()> {
    const SHARED_DIRECTORY: &str = "/srv/shared";
    let lab = &stage.lab;
    let mut servers = Vec::new();
    for node in ["a", "b"] {
        fs::create_dir(lab.path(node, SHARED_DIRECTORY)?)?;
        servers.push(lab.spawn(node, &["python3", "-c", FUSE, SHARED_DIRECTORY])?);
        wait_until("the filesystem", PATIENCE, || {
            Ok(lab.exec(node, &["grep", "-q", "hello", "/srv/shared/word"])?.status.success().then_some(()))
        })?;
    }
    let mut options = RunOptions::new(IP, ["sleep", "1000"]);
    options.volumes.push((SHARED_DIRECTORY.into(), "/mnt".into()));
    lab.run("a", NAME, &options)?;
    let plan = lab.check("a", &["tranship", "move", NAME, "--to", "b", "--with-binds", "--dry-run"])?;
    ensure!(plan.contains("is on FUSE or virtiofs, which other nodes see as well: it is left where it is"), "{plan}");
    let report = move_with(lab, "a", NAME, "b", &SHARED)?;
    ensure!(ways(&report).is_empty(), "files were copied: {:?}", ways(&report));
    ensure!(exactly_one_runs(lab, NAME)? == "b", "{NAME} is not on b");
    let said = lab.check("b", &["runc", "exec", NAME, "cat", "/mnt/word"])?;
    ensure!(said == "hello", "the container reads {said:?}");
    remove(lab, NAME)?;
    for (node, mut server) in ["a", "b"].into_iter().zip(servers) {
        lab.check(node, &["umount", SHARED_DIRECTORY])?;
        let _ = server.kill();
        server.wait()?;
        fs::remove_dir(lab.path(node, SHARED_DIRECTORY)?)?;
        ensure!(names(lab, node)?.is_empty(), "{:?} is left on {node}", names(lab, node)?);
    }
    Ok(())
}

/// Agents that die at chosen moments: the files are where the container is, and right; the other node is clean, or has what it had.
fn agents_die(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = start(lab, 16, 3)?;
    let mut at = "a".to_owned();
    for (victim, step) in [
        ("to", "destination.directory.after.die"),
        ("from", "source.precopy.after.die"),
        ("to", "destination.restore.after.die"),
        ("from", "source.transfer.after.die"),
        ("to", "destination.resume.before.die"),
        ("from", "source.deliver.after.die"),
        ("to", "destination.drain.before.die"),
        ("to", "destination.tidy.before.die"),
        ("from", "source.release.before.die"),
    ] {
        let from = at.clone();
        let to = if from == "a" { "b" } else { "a" };
        let node = if victim == "to" { to } else { &from };
        restart_agent(lab, node, step)?;
        let agent = lab.agent_pid(node)?.context("there is no agent")?;
        let moving = Moving::begin_with(lab, NAME, &from, to, Mode::Auto, &SHARED)?;
        wait_until(step, PATIENCE, || Ok(tranship_e2e::is_gone(agent).then_some(())))?;
        lab.start_agent(node, &[])?;
        let ended = moving.end()?;
        at = quiet(lab, NAME)?;
        ended.fits(&from, to, &at)?;
        all_is_right(&mut guest).with_context(|| format!("{step}: {}", ended.error()))?;
        for node in ["a", "b"] {
            let left = || Ok(names(lab, node)?.iter().all(|name| name == "data").then_some(()));
            wait_until("what is only the migration's to be gone", PATIENCE, left)
                .with_context(|| format!("{step}: {:?} on {node}", names(lab, node)))?;
        }
        eprintln!("ok {step}: {from} → {to}, now on {at}");
    }
    end(lab)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_directory_moves_to_and_fro_in_every_mode", a_directory_moves_to_and_fro_in_every_mode),
        ("what_is_there_already_is_not_touched", what_is_there_already_is_not_touched),
        ("a_full_disk_fails_the_move_and_leaves_nothing", a_full_disk_fails_the_move_and_leaves_nothing),
        ("what_every_node_has_is_left_alone", what_every_node_has_is_left_alone),
        ("agents_die", agents_die),
    ])
}
