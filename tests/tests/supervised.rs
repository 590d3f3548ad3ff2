//! An agent under a service manager (sd_notify(3)): it says when it is ready, that it is alive as long as it is, and
//! that it stops; and nobody else finds the manager's socket.

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tranship_e2e::{
    Moving, Stage, is_gone, processes, quiet, remove, restart_agent, scenarios, send, state, wait_until,
};
use tranship_lab::{Lab, Redis, RunOptions, redis_command};
use tranship_types::Mode;

const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 41);
/// Where the manager listens, in a node.
const SOCKET: &str = "/run/manager";
const PATIENCE: Duration = Duration::from_secs(20);
/// Within what time the manager is to hear that the agent is alive.
const WATCHDOG: Duration = Duration::from_secs(2);

/// A service manager, as far as its socket goes.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    /// Ends the agent of a node, and starts one that has this manager.
    fn start(lab: &Lab, node: &str, faults: &str) -> Result<Self> {
        let agent = lab.agent_pid(node)?.context("the lab has started an agent")?;
        send(Signal::SIGKILL, agent)?;
        wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
        let path = lab.path(node, SOCKET)?;
        let socket = UnixDatagram::bind(&path).context("the manager's socket")?;
        let within = WATCHDOG.as_micros().to_string();
        let environment = [("NOTIFY_SOCKET", SOCKET), ("WATCHDOG_USEC", within.as_str()), ("TRANSHIP_FAULTS", faults)];
        lab.start_agent(node, &environment)?;
        Ok(Self { socket, path })
    }

    /// What comes next within so much time.
    fn hears(&self, patience: Duration) -> Result<Option<String>> {
        self.socket.set_read_timeout(Some(patience))?;
        let mut text = [0; 200];
        match self.socket.recv(&mut text) {
            Ok(length) => Ok(Some(String::from_utf8_lossy(&text[..length]).into_owned())),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn awaits(&self, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match self.hears(PATIENCE)? {
                Some(heard) if heard == wanted => return Ok(()),
                Some(heard) if heard == "WATCHDOG=1" => {}
                other => bail!("{wanted} was to come, and not {other:?}"),
            }
        }
        bail!("{wanted} has not come");
    }

    /// Nothing comes for as long as the manager waits. What was under way may come first.
    fn hears_nothing(&self) -> Result<()> {
        while self.hears(WATCHDOG / 4)?.is_some() {}
        let heard = self.hears(WATCHDOG)?;
        ensure!(heard.is_none(), "{heard:?} comes from an agent that hangs");
        Ok(())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The threads of an agent that answer its API; any of them may.
fn answering(agent: u32) -> Result<Vec<Pid>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{agent}/task"))?.flatten() {
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.starts_with("tokio") {
            found.push(Pid::from_raw(thread.file_name().to_string_lossy().parse()?));
        }
    }
    ensure!(!found.is_empty(), "the agent has no thread of tokio's");
    Ok(found)
}

/// Keeps an agent's API from answering, while the rest of it goes on.
fn while_the_api_hangs(agent: u32, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let threads = answering(agent)?;
    for thread in &threads {
        ptrace::seize(*thread, ptrace::Options::empty())?;
        ptrace::interrupt(*thread)?;
        waitpid(*thread, Some(WaitPidFlag::__WALL))?;
    }
    let done = work();
    threads.into_iter().try_for_each(|thread| ptrace::detach(thread, None))?;
    done
}

fn it_is_said_whether_it_lives(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let manager = Manager::start(lab, "a", "")?;
    let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
    ensure!(manager.hears(PATIENCE)?.as_deref() == Some("READY=1"), "READY=1 was to come first");
    manager.awaits("WATCHDOG=1")?;
    manager.awaits("WATCHDOG=1")?;
    send(Signal::SIGSTOP, agent)?;
    let silent = manager.hears_nothing();
    send(Signal::SIGCONT, agent)?;
    silent.context("a stopped agent")?;
    manager.awaits("WATCHDOG=1")?;
    while_the_api_hangs(agent, || manager.hears_nothing())?;
    manager.awaits("WATCHDOG=1").context("after its API has answered again")?;
    let log = fs::read_to_string(lab.path("a", "/run/tranship/agent.log")?)?;
    ensure!(!log.contains("a caller was turned away"), "the agent calls itself a stranger: {log}");
    send(Signal::SIGTERM, agent)?;
    manager.awaits("STOPPING=1")?;
    wait_until("the agent to stop", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    drop(manager);
    Ok(lab.start_agent("a", &[])?)
}

fn nobody_else_finds_its_socket(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    let manager = Manager::start(lab, "b", "destination.restore.after.hold")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Cold)?;
    wait_until("the agent to be held", PATIENCE, || Ok((state(agent) == Some('T')).then_some(())))?;
    let helpers = processes(lab, "b")?;
    send(Signal::SIGCONT, agent)?;
    for kind in ["engine", "front", "criu", "pager", "keeper"] {
        ensure!(helpers.iter().any(|helper| helper.kind == kind), "no {kind} in {helpers:?}");
    }
    for helper in helpers.iter().filter(|helper| ["pager", "keeper"].contains(&helper.kind)) {
        let status = fs::read_to_string(format!("/proc/{}/status", helper.pid))?;
        // CAP_IPC_LOCK, CAP_SYS_NICE, CAP_PERFMON and CAP_BPF.
        let bounded = format!("CapBnd:\t{:016x}", (1u64 << 14) | (1 << 23) | (1 << 38) | (1 << 39));
        for field in [&bounded, "NoNewPrivs:\t1", "Seccomp:\t2"] {
            ensure!(status.lines().any(|line| line == field), "{} lacks {field:?}: {status}", helper.line);
        }
    }
    for helper in &helpers {
        let environment = fs::read(format!("/proc/{}/environ", helper.pid)).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        for name in ["NOTIFY_SOCKET=", "WATCHDOG_USEC="] {
            ensure!(!environment.contains(name), "{} has {name}: {environment:?}", helper.line);
        }
    }
    let ended = moving.end()?;
    ensure!(ended.success, "{}", ended.error());
    Redis::connect(lab, IP, Duration::from_secs(10))?;
    ensure!(quiet(lab, NAME)? == "b", "the container is not on node b");
    drop(manager);
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}

/// What `systemd-analyze security` finds exposed is explained in the documentation, setting by setting.
/// The version of systemd whose settings the documentation explains: that of Debian 12.
const EXPLAINED: u32 = 252;

fn exposures_of_the_unit_are_explained(_: &mut Stage) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--json=short"]).arg(root.join("packaging/transhipd.service"));
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("skipped: there is no systemd-analyze (Debian package systemd)");
            return Ok(());
        }
        output => output.context("systemd-analyze")?,
    };
    let version = Command::new("systemd-analyze").arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout)
        .split_whitespace()
        .nth(1)
        .and_then(|number| number.parse::<u32>().ok());
    let newer = version.is_some_and(|version| version > EXPLAINED);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("systemd-analyze: {}", String::from_utf8_lossy(&output.stderr)))?;
    let explained = fs::read_to_string(root.join("docs/decisions/split-by-privilege.md"))?;
    let (mut exposed, mut missing) = (0, Vec::new());
    for one in found.as_array().context("no list")?.iter().filter(|one| one["exposure"].is_string()) {
        let setting = one["name"].as_str().and_then(|name| name.split('=').next()).unwrap_or_default();
        exposed += 1;
        if !explained.contains(&format!("`{setting}=`")) {
            missing.push(setting);
        }
    }
    ensure!(exposed > 10, "systemd-analyze has found next to nothing");
    // Later versions of systemd know more settings.
    if newer && !missing.is_empty() {
        println!("skipped: settings of systemd beyond {EXPLAINED}: {}", missing.join(", "));
        return Ok(());
    }
    ensure!(missing.is_empty(), "not explained: {}", missing.join(", "));
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("exposures_of_the_unit_are_explained", exposures_of_the_unit_are_explained),
        ("it_is_said_whether_it_lives", it_is_said_whether_it_lives),
        ("nobody_else_finds_its_socket", nobody_else_finds_its_socket),
    ])
}
