//! What cannot be done is said in one sentence before anything is frozen, and the container does not notice.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tranship_e2e::{
    Refusal, Stage, connection_alive, exactly_one_runs, refused_move, remove, scenarios, second_move_succeeds,
    wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, find_program, redis_command, report_of};
use tranship_types::BlockerKind;

const NAME: &str = "wronged";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
/// Where a lab's agents listen.
const AGENT_PORT: u16 = 7077;

/// Exit statuses of `tranship move`.
const USAGE: i32 = 2;
const BLOCKED: i32 = 3;
const NO_AGENT: i32 = 4;

/// Runs a Redis with a busy client on node a, does something wrong to it, and checks that neither has noticed: the same
/// copy runs, on the same connection, without a gap as long as a freeze makes one.
fn unharmed(lab: &Lab, options: &RunOptions, wrong: impl FnOnce() -> Result<()>) -> Result<()> {
    lab.run("a", NAME, options)?;
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let pid = container_pid(lab)?;
    wrong()?;
    connection_alive(&mut counter)?;
    ensure!(exactly_one_runs(lab, NAME)? == "a", "the container is on another node");
    ensure!(container_pid(lab)? == pid, "the container is another process");
    drop(counter);
    remove(lab, NAME)
}

fn container_pid(lab: &Lab) -> Result<String> {
    let state = lab.check("a", &["runc", "state", NAME])?;
    let line = state.lines().find(|line| line.contains("\"pid\"")).map(str::to_owned);
    line.with_context(|| format!("runc state says {state}"))
}

fn redis() -> RunOptions {
    RunOptions::new(IP, redis_command())
}

/// Checks a refusal: its exit status, the one blocker's kind, and that it is one sentence with these words in it.
fn expect(refusal: &Refusal, status: i32, kind: Option<BlockerKind>, words: &[&str]) -> Result<()> {
    let Refusal { sentence, text, blockers, .. } = refusal;
    let seen = format!("{refusal:#?}");
    ensure!(refusal.status == status, "exit status {} instead of {status}: {seen}", refusal.status);
    let kinds: Vec<_> = blockers.iter().map(|b| b.kind).collect();
    ensure!(kinds == Vec::from_iter(kind), "blockers {kinds:?} instead of {kind:?}: {seen}");
    ensure!(!sentence.contains('\n') && (20..400).contains(&sentence.len()), "no sentence: {seen}");
    for blocker in blockers {
        ensure!(!blocker.cause.is_empty() && !blocker.remedy.is_empty(), "no cause or no remedy: {seen}");
    }
    let missing: Vec<_> = words.iter().filter(|word| !sentence.contains(*word)).collect();
    ensure!(missing.is_empty(), "{missing:?} not in {sentence:?}: {seen}");
    ensure!(words.iter().all(|word| text.contains(word)), "people do not see all of {words:?}: {seen}");
    for debris in ["Error {", "Some(", "panicked"] {
        ensure!(!text.contains(debris), "{debris:?} is nothing for people: {seen}");
    }
    Ok(())
}

/// The usual case: moving to b is refused because of what `kind` says.
fn blocked(lab: &Lab, kind: BlockerKind, words: &[&str]) -> Result<()> {
    expect(&refused_move(lab, "a", NAME, "b")?, BLOCKED, Some(kind), words)
}

fn no_such_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        let refusal = refused_move(lab, "a", "nobody", "b")?;
        expect(&refusal, BLOCKED, Some(BlockerKind::NoSuchContainer), &["nobody", "`tranship ls`"])?;
        let refusal = refused_move(lab, "a", "wrongde", "b")?;
        expect(&refusal, BLOCKED, Some(BlockerKind::NoSuchContainer), &["wrongde", "did you mean wronged?"])
    })
}

fn no_such_node(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        let refusal = refused_move(lab, "a", NAME, "nowhere")?;
        expect(&refusal, BLOCKED, Some(BlockerKind::NoSuchNode), &["nowhere"])?;
        let refusal = refused_move(lab, "a", NAME, "a")?;
        expect(&refusal, BLOCKED, Some(BlockerKind::NoSuchNode), &["a is this node"])
    })
}

fn names_that_cannot_be(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let long = "a".repeat(3000);
    let names = [("../etc", "b", "../etc"), (NAME, "../b", "../b"), ("", "b", "container"), (&long, "b", "too long")];
    for (name, to, word) in names {
        let output = lab.exec("a", &["tranship", "move", name, "--to", to])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(USAGE), "{name:?} to {to:?}: {} {said}", output.status);
        ensure!(said.contains(word) && said.len() < 500, "{name:?} to {to:?}: {said}");
    }
    Ok(())
}

fn node_unreachable(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.cut_link("b")?;
        let refused = blocked(lab, BlockerKind::Unreachable, &["b"]);
        lab.restore_link("b")?;
        refused.context("the link was cut")?;
        lab.kill_agent("b")?;
        let refused = blocked(lab, BlockerKind::Unreachable, &["b", "refused", "check that its agent runs"]);
        lab.start_agent("b", &[])?;
        refused.context("its agent was killed")
    })
}

/// Gives files of a node another content while `during` runs, with the node's agent restarted before and after.
fn with_files(lab: &Lab, node: &str, files: &[(&str, Vec<u8>)], during: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut before = Vec::new();
    for (path, _) in files {
        before.push(fs::read(lab.path(node, path)?)?);
    }
    let restart_with = |contents: &mut dyn Iterator<Item = &Vec<u8>>| -> Result<()> {
        for ((path, _), content) in files.iter().zip(contents) {
            fs::write(lab.path(node, path)?, content)?;
        }
        lab.kill_agent(node)?;
        Ok(lab.start_agent(node, &[])?)
    };
    let result = restart_with(&mut files.iter().map(|(_, content)| content)).and_then(|()| during());
    restart_with(&mut before.iter()).context("putting things back")?;
    result
}

fn not_among_its_peers(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let file = "/etc/tranship/agent.toml";
    let text = fs::read_to_string(lab.path("b", file)?)?;
    let without: String =
        text.lines().filter(|line| !line.starts_with("a = ")).map(|line| format!("{line}\n")).collect();
    ensure!(without.len() < text.len(), "node a is not found in {text}");
    unharmed(lab, &redis(), || {
        with_files(lab, "b", &[(file, without.into_bytes())], || {
            let words = ["node b does not have node a among its peers", "add a to [peers] in the configuration of b"];
            blocked(lab, BlockerKind::Unreachable, &words)
        })
    })
}

/// What the container's interface is attached to is missing on the destination: known to a dry run, too.
fn interface_missing_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.check("b", &["ip", "link", "set", "dev", "eth0", "name", "eth9"])?;
        let refused = blocked(lab, BlockerKind::Network, &["there is no interface eth0 on node b", "create eth0"]);
        let planned = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--dry-run"]);
        lab.check("b", &["ip", "link", "set", "dev", "eth9", "name", "eth0"])?;
        refused?;
        let planned = planned?;
        let text = String::from_utf8_lossy(&planned.stdout).into_owned();
        ensure!(
            planned.status.code() == Some(BLOCKED) && text.contains("there is no interface eth0 on node b"),
            "{text}"
        );
        Ok(())
    })
}

fn certificate_not_trusted(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.check("b", &["tranship", "init", "--dir", "/tmp/other", "--node", "b"])?;
    let mut files = Vec::new();
    for name in ["ca.crt", "node.crt", "node.key"] {
        let content = fs::read(lab.path("b", format!("/tmp/other/b/{name}"))?)?;
        files.push((format!("/etc/tranship/tls/{name}"), content));
    }
    let files: Vec<_> = files.iter().map(|(path, content)| (path.as_str(), content.clone())).collect();
    let result = unharmed(lab, &redis(), || {
        with_files(lab, "b", &files, || blocked(lab, BlockerKind::Untrusted, &["b", "certificate"]))
    });
    lab.check("b", &["rm", "-r", "--one-file-system", "/tmp/other"])?;
    result
}

/// An agent does not start with a configuration that cannot be right, and says where it is wrong.
fn configuration_that_is_wrong(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let right = fs::read_to_string(lab.path("b", "/etc/tranship/agent.toml")?)?;
    let key = "/etc/tranship/tls/node.key";
    let start = |content: &str, words: &[&str]| -> Result<()> {
        fs::write(lab.path("b", "/tmp/agent.toml")?, content)?;
        let output = lab.exec("b", &["timeout", "5", "transhipd", "--config", "/tmp/agent.toml"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{}: {said}", output.status);
        let missing: Vec<_> = words.iter().filter(|word| !said.contains(*word)).collect();
        ensure!(said.lines().count() == 1 && missing.is_empty(), "{missing:?} not in {said:?}");
        Ok(())
    };
    for (path, words) in [("/tmp/none.toml", "does not exist"), ("/tmp", "is a directory; name a file with --config")] {
        let output = lab.exec("b", &["timeout", "5", "transhipd", "--config", path])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && said.contains(words), "{path}: {said}");
    }
    start(&format!("nod = 1\n{right}"), &["/tmp/agent.toml", "line 1", "unknown field `nod`"])?;
    start(&right.replace(":7077", ":seven"), &["/tmp/agent.toml", "listen", "\"seven\"", "write host:port"])?;
    start(&right.replace(key, "/tmp/no.key"), &["/tmp/no.key: No such file or directory", "; run `tranship init`"])?;
    lab.check("b", &["chmod", "640", key])?;
    let refused = start(&right, &["[tls] key", "mode 640", &format!("`chmod 600 {key}`")]);
    lab.check("b", &["chmod", "600", key])?;
    refused?;
    lab.check("b", &["rm", "/tmp/agent.toml"])?;
    Ok(())
}

fn same_name_exists_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.run("b", NAME, &RunOptions::new(Ipv4Addr::new(10, 77, 0, 51), ["sleep", "1000"]))?;
        let refused = blocked(lab, BlockerKind::NameTaken, &["b", NAME]);
        lab.stop("b", NAME)?;
        refused
    })
}

/// Shows another text to node b where its kernel's would be.
fn with_proc_file(lab: &Lab, path: &str, content: &str, during: impl FnOnce() -> Result<()>) -> Result<()> {
    let stand_in = "/tmp/stand-in";
    fs::write(lab.path("b", stand_in)?, content)?;
    lab.check("b", &["mount", "--bind", stand_in, path])?;
    let result = during();
    lab.check("b", &["umount", path])?;
    fs::remove_file(lab.path("b", stand_in)?)?;
    result
}

fn too_little_memory_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        Redis::connect(lab, IP, Duration::from_secs(5))?.populate(200_000, "key", 100)?;
        let scarce = "MemTotal:        1000000 kB\nMemFree:            1000 kB\nMemAvailable:       2000 kB\n";
        with_proc_file(lab, "/proc/meminfo", scarce, || blocked(lab, BlockerKind::Memory, &["b", NAME, "MiB"]))
    })
}

fn cpu_features_missing_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let has = fs::read_to_string("/proc/cpuinfo")?;
    let less = has.replace(" avx2 ", " ").replace(" sse4_2 ", " ").replace(" asimd ", " ");
    ensure!(less != has, "this CPU has none of the features that the test could hide");
    unharmed(lab, &redis(), || {
        with_proc_file(lab, "/proc/cpuinfo", &less, || blocked(lab, BlockerKind::Cpu, &["b", "CPU"]))
    })
}

fn rootfs_differs(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    // A root of its own on each node, in the node's own /tmp.
    for (node, text) in [("a", "one\n"), ("b", "another\n")] {
        lab.check(node, &["mkdir", "-p", "/tmp/root"])?;
        for directory in ["bin", "dev", "etc", "lib", "lib64", "proc", "run", "sys", "tmp", "usr"] {
            lab.check(node, &["mkdir", "-p", &format!("/tmp/root/{directory}")])?;
        }
        fs::write(lab.path(node, "/tmp/root/etc/version")?, text)?;
    }
    let mut options = redis();
    options.rootfs = Some("/tmp/root".into());
    options.tmpfs = vec!["/tmp".into()];
    options.binds = ["/usr", "/lib", "/lib64", "/bin"].map(|d| (d.into(), d.into())).to_vec();
    let result = unharmed(lab, &options, || blocked(lab, BlockerKind::Rootfs, &["b", "/tmp/root"]));
    for node in ["a", "b"] {
        lab.check(node, &["rm", "-r", "--one-file-system", "/tmp/root"])?;
    }
    result
}

fn bind_mount_missing_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.check("a", &["mkdir", "/tmp/volume"])?;
    let mut options = redis();
    options.binds.push(("/tmp/volume".into(), "/opt/volume".into()));
    let result = unharmed(lab, &options, || blocked(lab, BlockerKind::Mount, &["b", "/tmp/volume"]));
    lab.check("a", &["rmdir", "/tmp/volume"])?;
    result
}

fn criu_fails_its_check_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let configuration = fs::read_to_string(lab.path("b", "/etc/tranship/agent.toml")?)?;
    let kept: Vec<_> = configuration.lines().filter(|l| *l != "[criu]" && !l.starts_with("path = ")).collect();
    let with = |criu: &str| format!("{}\n[criu]\npath = \"{criu}\"\n", kept.join("\n"));
    unharmed(lab, &redis(), || {
        for criu in ["/bin/false", "/opt/nothing/criu"] {
            with_files(lab, "b", &[("/etc/tranship/agent.toml", with(criu).into_bytes())], || {
                blocked(lab, BlockerKind::Criu, &["b", criu]).with_context(|| criu.to_owned())
            })?;
        }
        Ok(())
    })
}

fn a_process_writes_to_a_host_file(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.check("a", &["sh", "-c", &exec_in_container("sleep 1000", "/tmp/host-file")])?;
        wait_until("the process to be seen", Duration::from_secs(10), || {
            Ok(plan(lab)?.contains("sleep").then_some(()))
        })?;
        let refusal = refused_move(lab, "a", NAME, "b")?;
        expect(&refusal, BLOCKED, Some(BlockerKind::Descriptor), &["sleep", "stdout", "/tmp/host-file"])?;
        let blocker = refusal.blockers.first().context("no blocker")?;
        ensure!(blocker.fd == Some(1) && blocker.pid.is_some(), "the blocker is {blocker:?}");
        Ok(())
    })
}

/// A shell command for the node that starts a process in the container which belongs to the container alone (its parent
/// is the container's first process), but for its stdout.
fn exec_in_container(command: &str, stdout: &str) -> String {
    let inside = format!("exec {command} </dev/null 2>/dev/null");
    format!("exec runc exec --detach {NAME} setsid --fork sh -c '{inside}' </dev/null >{stdout} 2>/dev/null")
}

fn a_process_has_an_io_uring(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = redis();
    options.binds.push((find_program("zoo")?, "/opt/zoo".into()));
    unharmed(lab, &options, || {
        lab.check("a", &["sh", "-c", &exec_in_container("/opt/zoo --only io_uring >/dev/null", "/dev/null")])?;
        wait_until("the program to have its io_uring", Duration::from_secs(10), || {
            Ok(plan(lab)?.contains("io_uring").then_some(()))
        })?;
        let refusal = refused_move(lab, "a", NAME, "b")?;
        ensure!(refusal.status == BLOCKED, "{refusal:#?}");
        let blocker = refusal.blockers.iter().find(|b| b.kind == BlockerKind::Descriptor);
        let blocker = blocker.with_context(|| format!("no descriptor is blamed: {refusal:#?}"))?;
        ensure!(blocker.cause.contains("zoo") && blocker.cause.contains("io_uring"), "the cause is {blocker:?}");
        ensure!(blocker.pid.is_some() && blocker.fd.is_some(), "the blocker is {blocker:?}");
        Ok(())
    })
}

/// What a dry run prints; it touches nothing, so it may be asked again and again.
fn plan(lab: &Lab) -> Result<String> {
    let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"])?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn container_is_paused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.check("a", &["runc", "pause", NAME])?;
        let refused = blocked(lab, BlockerKind::NotRunning, &[NAME, "paused"]);
        lab.check("a", &["runc", "resume", NAME])?;
        refused
    })
}

fn agent_is_not_running(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    unharmed(lab, &redis(), || {
        lab.kill_agent("a")?;
        let refused = refused_move(lab, "a", NAME, "b").and_then(|r| expect(&r, NO_AGENT, None, &["agent"]));
        lab.start_agent("a", &[])?;
        refused
    })
}

/// Whoever asks is told after a second that there is no answer yet, and has it when there is one.
fn an_agent_that_hangs_is_said_to_hang(stage: &mut Stage) -> Result<()> {
    let questions: [(&[&str], i32); 3] =
        [(&["ls"], 0), (&["plan", "nobody", "--to", "b"], BLOCKED), (&["move", "nobody", "--to", "b"], BLOCKED)];
    questions.iter().try_for_each(|(question, status)| {
        asked_while_it_hangs(&stage.lab, question, *status).with_context(|| question.join(" "))
    })
}

fn asked_while_it_hangs(lab: &Lab, question: &[&str], status: i32) -> Result<()> {
    let agent = Pid::from_raw(lab.agent_pid("a")?.context("there is no agent")?.try_into()?);
    kill(agent, Signal::SIGSTOP)?;
    let asked = Instant::now();
    let mut command = lab.command("a", &[&["tranship"], question].concat())?;
    let mut asking = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (tell, told) = mpsc::channel();
    let stderr = asking.stderr.take().context("it has a standard error")?;
    std::thread::spawn(move || BufReader::new(stderr).lines().try_for_each(|line| tell.send(line.unwrap_or_default())));
    let said = || loop {
        match told.recv_timeout(Duration::from_secs(10)) {
            // A plan takes some seconds anyway, and reports that first.
            Ok(line) if line.contains("to measure") => {}
            said => break said,
        }
    };
    let said = said();
    let after = asked.elapsed();
    let waits = asking.try_wait();
    kill(agent, Signal::SIGCONT)?;
    let output = asking.wait_with_output()?;
    let said = said.context("nothing was said while the agent hung")?;
    ensure!(said.contains("the agent has not answered yet"), "it says {said:?}");
    ensure!(after >= Duration::from_millis(900) && waits?.is_none(), "it says so after {after:?}");
    ensure!(output.status.code() == Some(status), "it ended with {} when the agent had answered", output.status);
    ensure!(told.iter().all(|line| !line.contains("has not answered")), "it has said so again");
    Ok(())
}

/// Two moves at once: one of them, whichever was first, goes through, and the other is told to wait.
fn a_move_is_under_way_already(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &redis())?;
    Redis::connect(lab, IP, Duration::from_secs(10))?.populate(1_000_000, "key", 100)?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let begin = || -> Result<_> {
        let mut command = lab.move_command("a", NAME, "b")?;
        Ok(command.stderr(Stdio::piped()).spawn()?)
    };
    let (one, other) = (begin()?, begin()?);
    let (one, other) = (one.wait_with_output()?, other.wait_with_output()?);
    let (moved, refused) = match (one.status.code(), other.status.code()) {
        (Some(0), Some(BLOCKED)) => (one, other),
        (Some(BLOCKED), Some(0)) => (other, one),
        statuses => bail!("two moves at once ended with {statuses:?}: {one:?} {other:?}"),
    };
    ensure!(report_of(&moved.stdout)?["outcome"] == "moved", "{}", String::from_utf8_lossy(&moved.stdout));
    let error = &report_of(&refused.stdout)?["error"];
    ensure!(error["blockers"][0]["kind"] == "busy", "the other move was refused with {error}");
    let sentence = error["blockers"][0]["cause"].as_str().unwrap_or_default();
    ensure!(sentence.contains(NAME) && sentence.contains("moved"), "the cause is {sentence:?}");
    connection_alive(&mut counter)?;
    ensure!(exactly_one_runs(lab, NAME)? == "b", "the container is not on the destination");
    let refusal = refused_move(lab, "a", NAME, "b")?;
    expect(&refusal, BLOCKED, Some(BlockerKind::NoSuchContainer), &[NAME, "it was moved to node b"])?;
    drop(counter);
    remove(lab, NAME)
}

/// Strangers that connect and stay silent, far more of them than there are places, neither keep a peer out nor delay it: not even those
/// from the peer's own address.
fn strangers_who_stay_silent(stage: &mut Stage) -> Result<()> {
    const AT_A_TIME: usize = 300;
    const AT_MOST: usize = 20_000;
    let lab = &stage.lab;
    lab.run("a", NAME, &redis())?;
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let agent = SocketAddr::from((lab.address("b")?, AGENT_PORT));
    let (stop, made) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let strangers = scope.spawn(|| -> Result<()> {
            let mut open = VecDeque::new();
            while !stop.load(Ordering::Relaxed) && made.load(Ordering::Relaxed) < AT_MOST {
                open.push_back(lab.connect("a", agent, Duration::from_secs(5))?);
                open.drain(..open.len().saturating_sub(AT_A_TIME));
                made.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        let moved = wait_until("enough strangers", Duration::from_secs(60), || {
            let enough = made.load(Ordering::Relaxed) >= AT_A_TIME || strangers.is_finished();
            Ok(enough.then_some(()))
        })
        .and_then(|()| Ok(lab.move_container("a", NAME, "b")?));
        stop.store(true, Ordering::Relaxed);
        strangers.join().map_err(|_| anyhow::anyhow!("the strangers panicked"))??;
        let report = moved?;
        ensure!(report["outcome"] == "moved", "{report}");
        Ok(())
    })?;
    connection_alive(&mut counter)?;
    ensure!(exactly_one_runs(lab, NAME)? == "b", "the container is not on the destination");
    drop(counter);
    remove(lab, NAME)
}

/// While runc restores a container it mounts that one's binds on the node, in a root filesystem that others may have as well.
fn a_restore_beside_mounts_in_the_same_root(stage: &mut Stage) -> Result<()> {
    const MOUNTED: &str = "/run/tranship-lab/rootfs/usr";
    let lab = &stage.lab;
    lab.run("a", NAME, &redis())?;
    lab.check("b", &["mount", "--bind", "/usr", MOUNTED])?;
    let moved = second_move_succeeds(lab, NAME);
    lab.check("b", &["umount", MOUNTED])?;
    moved?;
    remove(lab, NAME)
}

/// After all of this the nodes are as good as new.
fn then_the_right_use_succeeds(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &redis())?;
    let mut client = Redis::connect(lab, IP, Duration::from_secs(10))?;
    second_move_succeeds(lab, NAME)?;
    client.call(&["PING"])?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("no_such_container", no_such_container),
        ("no_such_node", no_such_node),
        ("names_that_cannot_be", names_that_cannot_be),
        ("node_unreachable", node_unreachable),
        ("not_among_its_peers", not_among_its_peers),
        ("interface_missing_there", interface_missing_there),
        ("certificate_not_trusted", certificate_not_trusted),
        ("configuration_that_is_wrong", configuration_that_is_wrong),
        ("same_name_exists_there", same_name_exists_there),
        ("too_little_memory_there", too_little_memory_there),
        ("cpu_features_missing_there", cpu_features_missing_there),
        ("rootfs_differs", rootfs_differs),
        ("bind_mount_missing_there", bind_mount_missing_there),
        ("criu_fails_its_check_there", criu_fails_its_check_there),
        ("a_process_writes_to_a_host_file", a_process_writes_to_a_host_file),
        ("a_process_has_an_io_uring", a_process_has_an_io_uring),
        ("container_is_paused", container_is_paused),
        ("agent_is_not_running", agent_is_not_running),
        ("an_agent_that_hangs_is_said_to_hang", an_agent_that_hangs_is_said_to_hang),
        ("a_move_is_under_way_already", a_move_is_under_way_already),
        ("strangers_who_stay_silent", strangers_who_stay_silent),
        ("a_restore_beside_mounts_in_the_same_root", a_restore_beside_mounts_in_the_same_root),
        ("then_the_right_use_succeeds", then_the_right_use_succeeds),
    ])
}
