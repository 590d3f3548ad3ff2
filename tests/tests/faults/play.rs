//! What every case plays with: a small Redis, a client that checks each reply on one connection, and the conditions that
//! must hold when all is quiet again.

use std::fs;
use std::io::Read;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tranship_e2e::{connection_alive, exactly_one_runs, move_container, nothing_left, wait_until};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command, report_of};
use tranship_types::{Outcome, Report, Side};

pub const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
const KEYS: u64 = 500;
const COUNTER: &str = "counter";
/// How long a move may take, with everything that is done to it.
const MOVE_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take until nothing is left to be done.
const QUIET_LIMIT: Duration = Duration::from_secs(20);

/// A container with its client.
pub struct Play {
    redis: Redis,
    counter: CounterClient,
    /// Number of keys, and their checksum.
    truth: (u64, String),
    /// The node that the container is on.
    pub at: String,
}

impl Play {
    pub fn begin(lab: &Lab) -> Result<Self> {
        lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
        let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
        redis.populate(KEYS, "key", 100)?;
        let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), COUNTER, Duration::from_micros(500))?;
        counter.pause()?;
        let truth = redis.verify_without(COUNTER)?;
        counter.resume()?;
        Ok(Self { redis, counter, truth, at: "a".to_owned() })
    }

    /// The nodes of the next move: from where, to where.
    pub fn direction(&self) -> (String, String) {
        let other = if self.at == "a" { "b" } else { "a" };
        (self.at.clone(), other.to_owned())
    }

    /// Waits until nothing is left to be done, checks everything that must hold then, and does a second move.
    pub fn settle(&mut self, lab: &Lab, ended: &Ended, ends_on: Option<Side>) -> Result<()> {
        let (from, to) = self.direction();
        let mut last = String::new();
        let quiet = wait_until("all to be quiet", QUIET_LIMIT, || match unrest(lab) {
            Ok(at) => Ok(Some(at)),
            Err(error) => {
                last = format!("{error:#}");
                Ok(None)
            }
        });
        let at = quiet.map_err(|e| e.context(last))?;
        let seen = self.counter.wait_replies(20, Duration::from_secs(30)).context("the client's connection")?;
        ensure!(seen.error.is_none(), "the client's connection: {seen:?}");
        let seen = connection_alive(&mut self.counter)?;
        ensure!(
            seen.value == seen.total.replies.cast_signed(),
            "{} replies, but the counter is {}",
            seen.total.replies,
            seen.value
        );
        self.counter.pause()?;
        let now = self.redis.verify_without(COUNTER).context("on the connection that was idle")?;
        self.counter.resume()?;
        ensure!(now == self.truth, "keys and checksum were {:?} and are {now:?}", self.truth);
        let error = ended.error();
        if let Some(report) = &ended.report {
            let reported = match report.outcome {
                Outcome::Moved => &to,
                Outcome::Failed => &from,
                Outcome::Running => bail!("the move was not reported to its end: {report:?}"),
            };
            ensure!(*reported == at, "the container is on {at}, but the report says {:?} ({error})", report.outcome);
        }
        ensure!(ended.success == (at == to), "tranship ended with success: {}, but {NAME} is on {at}", ended.success);
        if let Some(side) = ends_on {
            let wanted = if side == Side::Source { &from } else { &to };
            ensure!(*wanted == at, "the container must be on the {side:?}, {wanted}, and is on {at}: {error}");
        }
        self.at = at;
        self.second_move(lab)
    }

    fn second_move(&mut self, lab: &Lab) -> Result<()> {
        let (from, to) = self.direction();
        move_container(lab, &from, NAME, &to).context("the second move")?;
        self.at = to;
        self.counter.wait_replies(20, Duration::from_secs(5)).context("after the second move")?;
        Ok(())
    }

    /// Checks what the client has seen in all, and removes the container.
    pub fn end(self, lab: &Lab) -> Result<u64> {
        let last = self.counter.stop()?;
        ensure!(last.error.is_none() && last.same_connection, "the counter ended badly: {last:?}");
        lab.stop(&self.at, NAME)?;
        Ok(last.total.replies)
    }
}

/// How a move ended.
pub struct Ended {
    /// None where the agent died before it had said that it begins.
    pub report: Option<Report>,
    /// Whether `tranship move` said so by its exit status.
    pub success: bool,
    /// What it printed.
    text: String,
}

impl Ended {
    /// Why the container was not moved, in the words of the report.
    pub fn error(&self) -> &str {
        self.report.as_ref().map_or(self.text.trim(), |report| report.error.as_deref().unwrap_or_default())
    }
}

/// A move under way.
pub struct Moving {
    child: Child,
    output: JoinHandle<Vec<u8>>,
    begun: Instant,
}

impl Moving {
    pub fn begin(lab: &Lab, from: &str, to: &str) -> Result<Self> {
        let mut command = lab.move_command(from, NAME, to)?;
        let mut child = command.stderr(Stdio::null()).spawn().context("cannot run tranship")?;
        let mut stdout = child.stdout.take().context("tranship has no stdout")?;
        let output = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.read_to_end(&mut bytes);
            bytes
        });
        Ok(Self { child, output, begun: Instant::now() })
    }

    /// Whether `tranship` still follows it.
    pub fn goes_on(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits until it has ended, one way or the other.
    pub fn end(mut self) -> Result<Ended> {
        let left = MOVE_LIMIT.saturating_sub(self.begun.elapsed());
        let waited = wait_until("the move to end", left, || Ok(self.child.try_wait()?));
        if waited.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let success = waited?.success();
        let output = self.output.join().unwrap_or_default();
        let text = String::from_utf8_lossy(&output).into_owned();
        let value = report_of(&output).with_context(|| format!("what tranship printed: {text}"))?;
        let report = match value.get("error") {
            Some(error) if error.is_object() => None,
            _ => Some(serde_json::from_value(value).with_context(|| format!("what tranship printed: {text}"))?),
        };
        Ok(Ended { report, success, text })
    }
}

/// Where the container runs, if nothing is left to be done; else, as the error, what is.
fn unrest(lab: &Lab) -> Result<String> {
    let nodes = lab.nodes();
    for node in &nodes {
        for place in ["/var/lib/tranship/journal", "/run/tranship/migrations"] {
            let left = entries(&lab.path(node, place)?);
            ensure!(left.is_empty(), "node {node} has {place}/{}", left.join(", "));
        }
        let left: Vec<String> = processes(lab, node)?.into_iter().map(|p| format!("{} ({})", p.line, p.pid)).collect();
        ensure!(left.is_empty(), "node {node} has processes: {}", left.join(", "));
    }
    let at = exactly_one_runs(lab, NAME)?;
    for node in nodes.iter().filter(|node| **node != at) {
        nothing_left(lab, node, NAME)?;
        let bundle = lab.path(node, format!("/run/tranship/bundles/{NAME}"))?;
        ensure!(!bundle.exists(), "node {node} has a bundle of {NAME}");
    }
    let rules = lab.check(&at, &["ip", "netns", "exec", NAME, "nft", "list", "ruleset"])?;
    ensure!(!rules.contains("tranship"), "the gate on node {at} is not open");
    Ok(at)
}

fn entries(directory: &Path) -> Vec<String> {
    let list = fs::read_dir(directory).into_iter().flatten().flatten();
    list.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A process that lives no longer than a migration.
#[derive(Debug, Clone)]
pub struct Helper {
    pub pid: u32,
    /// What it is: `criu`, `front`, `pager` or `engine`.
    pub kind: &'static str,
    /// Its arguments.
    pub line: String,
}

/// The processes of a node that live no longer than a migration; zombies of them, too.
pub fn processes(lab: &Lab, node: &str) -> Result<Vec<Helper>> {
    // Containers have pid namespaces of their own, and their processes no such names; the node is told by its variable.
    let root = lab.path(node, "/")?;
    let init = root.parent().context("a node has an init process")?.to_owned();
    let space = fs::read_link(init.join("ns/pid")).context("the node's pid namespace")?;
    let mut found = Vec::new();
    for name in entries(Path::new("/proc")) {
        let Ok(pid) = name.parse::<u32>() else { continue };
        let process = Path::new("/proc").join(&name);
        if fs::read_link(process.join("ns/pid")).ok().as_ref() != Some(&space) {
            continue;
        }
        // A process may end while it is looked at.
        let raw = fs::read(process.join("cmdline")).unwrap_or_default();
        let words: Vec<String> =
            raw.split(|b| *b == 0).filter(|w| !w.is_empty()).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let program = words.first().and_then(|w| Path::new(w).file_name()?.to_str()).unwrap_or_default();
        let target = fs::read_link(process.join("exe")).unwrap_or_default();
        let target = target.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        let kind = match program {
            "" if matches!(comm.trim(), "criu" | "runc" | "transhipd" | "runc:[2:INIT]") => "zombie",
            "transhipd" if words.get(1).is_some_and(|w| w == "pager") => "pager",
            "criu" if target == "transhipd" => "front",
            "runc" => "engine",
            // It changes its arguments when it begins to work.
            _ if words.iter().any(|w| w == "swrk" || w.starts_with("criu: ")) => "criu",
            _ => continue,
        };
        let line = if words.is_empty() { comm.trim().to_owned() } else { words.join(" ") };
        found.push(Helper { pid, kind, line });
    }
    Ok(found)
}

/// The end of an agent's log from a mark on.
pub struct Log {
    path: std::path::PathBuf,
    mark: usize,
}

impl Log {
    pub fn mark(lab: &Lab, node: &str) -> Result<Self> {
        let path = lab.path(node, "/run/tranship/agent.log")?;
        let mark = fs::read(&path).map_or(0, |text| text.len());
        Ok(Self { path, mark })
    }

    pub fn text(&self) -> String {
        let bytes = fs::read(&self.path).unwrap_or_default();
        String::from_utf8_lossy(bytes.get(self.mark..).unwrap_or_default()).into_owned()
    }
}

/// The letter of a process's state.
pub fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Whether nothing is left of a process, but for a zombie: a thread that is dying still has the process's sockets.
pub fn is_gone(pid: u32) -> bool {
    let threads = entries(&Path::new("/proc").join(pid.to_string()).join("task")).len();
    threads == 0 || (threads == 1 && state(pid).is_none_or(|s| matches!(s, 'Z' | 'X')))
}

/// Kills a node's agent, and starts one in which a fault will happen.
pub fn restart_agent(lab: &Lab, node: &str, faults: &str) -> Result<()> {
    if let Some(agent) = lab.agent_pid(node)? {
        send(Signal::SIGKILL, agent)?;
        wait_until("the agent to die", Duration::from_secs(5), || Ok(is_gone(agent).then_some(())))?;
    }
    Ok(lab.start_agent(node, &[("TRANSHIP_FAULTS", faults)])?)
}

/// Sends a signal; a process that is gone is no error.
pub fn send(signal: Signal, pid: u32) -> Result<()> {
    match kill(Pid::from_raw(pid.cast_signed()), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot send {signal} to {pid}")),
    }
}
