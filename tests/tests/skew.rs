//! Agents of an older build and of today's, on both sides of a move; and journals that an older agent has left, which today's takes over.
//! `make test-skew` builds the older one, and sets `TRANSHIP_OLD_BUILD` to where it is.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Moving, Scenario, Stage, connection_alive, is_gone, quiet, refused_move, remove, scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{Mode, Outcome};

const OLD_BUILD: &str = "TRANSHIP_OLD_BUILD";
const NAME: &str = "skewed";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 86);
const KEYS: u64 = 2000;
const PATIENCE: Duration = Duration::from_secs(40);
/// `auto` is what a user gets, the others are each way in which memory moves.
const MODES: [Mode; 5] = [Mode::Auto, Mode::Precopy, Mode::Postcopy, Mode::Cold, Mode::Hybrid];

/// Which build a node's agent is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    Old,
    Todays,
}
use Build::{Old, Todays};

/// Ends a node's agent, if one runs, and starts one of this build.
fn start(lab: &Lab, node: &str, build: Build, faults: &str) -> Result<()> {
    lab.kill_agent(node)?;
    let file = lab.path(node, "/etc/tranship/agent.toml")?;
    let (text, kept) = (fs::read_to_string(&file)?, file.with_extension("todays"));
    if !kept.exists() {
        fs::write(&kept, &text)?;
    }
    let todays = fs::read_to_string(&kept)?;
    let (text, program) = match build {
        Todays => (todays, PathBuf::from("transhipd")),
        // It knows no section `accept`, accepts everything, and refuses sections that it does not know.
        Old => {
            let sections = todays.split("\n[").filter(|section| !section.starts_with("accept]"));
            let old = std::env::var_os(OLD_BUILD).context("there is no old build")?;
            (sections.collect::<Vec<_>>().join("\n["), Path::new(&old).join("transhipd"))
        }
    };
    fs::write(&file, text)?;
    lab.start_agent_of(&program, node, &[("TRANSHIP_FAULTS", faults)])
        .with_context(|| format!("the agent of node {node}, {build:?}"))
}

/// A Redis on node a under a client, whose keys are known.
struct Skewed {
    redis: Redis,
    counter: CounterClient,
    truth: (u64, String),
}

impl Skewed {
    fn run(lab: &Lab) -> Result<Self> {
        lab.check(tranship_lab::CLIENT, &["ip", "neigh", "flush", "all"])?;
        lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
        let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
        redis.populate(KEYS, "key", 100)?;
        let truth = redis.verify_without("counter")?;
        let counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_millis(2))?;
        Ok(Self { redis, counter, truth })
    }

    /// Checks that the one copy is on this node, that its client noticed nothing but a pause, and that nothing is left of the move.
    fn is_on(&mut self, lab: &Lab, node: &str) -> Result<()> {
        let at = quiet(lab, NAME)?;
        ensure!(at == node, "{NAME} is on node {at}, not on {node}");
        self.counter.wait_replies(20, Duration::from_secs(30)).context("the client's connection")?;
        connection_alive(&mut self.counter)?;
        self.counter.pause()?;
        let now = self.redis.verify_without("counter").context("on the connection that was idle")?;
        ensure!(now == self.truth, "keys and checksum were {:?} and are {now:?}", self.truth);
        self.counter.resume()?;
        Ok(())
    }

    fn end(self, lab: &Lab) -> Result<()> {
        let last = self.counter.stop()?;
        ensure!(last.error.is_none() && last.same_connection, "{last:?}");
        remove(lab, NAME)
    }
}

/// One agent is of the old build: each mode moves a container to it and back from it.
fn moves_in_both_directions(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut skewed = Skewed::run(lab)?;
    start(lab, "b", Old, "")?;
    for mode in MODES {
        for (from, to) in [("a", "b"), ("b", "a")] {
            let what = || format!("{mode}, from {from} to {to}, which of them b has the old build");
            let ended = Moving::begin(lab, NAME, from, to, mode)?.end().with_context(what)?;
            ensure!(ended.success, "{}: {}", what(), ended.error());
            let report = ended.report.with_context(what)?;
            eprintln!("        {}: blackout {:.1?} ms", what(), report.blackout_ms);
            ensure!(report.outcome == Outcome::Moved && report.leftovers.is_empty(), "{}: {report:?}", what());
            skewed.is_on(lab, to).with_context(what)?;
        }
    }
    skewed.end(lab)?;
    start(lab, "b", Todays, "")
}

/// A container with something that only today's build can move is refused, and nothing has happened to it.
fn what_the_old_build_cannot_move_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    // UDP-Lite's option of how much of a datagram is covered by its checksum.
    const PROGRAM: &str = "import socket, time\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)\n\
                           s.setsockopt(136, 10, 20)\ns.bind(('', 7000))\ntime.sleep(100000)";
    start(lab, "b", Old, "")?;
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", PROGRAM]))?;
    wait_until("the socket to be there", PATIENCE, || {
        let list = lab.check("a", &["ip", "netns", "exec", NAME, "cat", "/proc/net/udplite"])?;
        Ok(list.contains(":1B58").then_some(()))
    })?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    for word in ["UDPLITE_SEND_CSCOV", "node b", "version 7", "update its agent"] {
        ensure!(refusal.sentence.contains(word), "{word:?} is not in {}", refusal.sentence);
    }
    ensure!(quiet(lab, NAME)? == "a", "it is not where it was");
    start(lab, "b", Todays, "")?;
    ensure!(Moving::begin(lab, NAME, "a", "b", Mode::Auto)?.end()?.success, "today's build cannot move it, either");
    ensure!(quiet(lab, NAME)? == "b", "it is not on node b");
    remove(lab, NAME)
}

/// Where an agent of the old build dies; today's then takes its journal over.
struct Death {
    node: &'static str,
    place: &'static str,
    mode: Mode,
    /// Which build the other node's agent is of.
    other: Build,
    ends_on: &'static str,
}

const fn death(node: &'static str, place: &'static str, mode: Mode, other: Build, ends_on: &'static str) -> Death {
    Death { node, place, mode, other, ends_on }
}

/// Frozen and undecided; decided; READY; running, with pages still to come.
const DEATHS: [Death; 12] = [
    death("a", "source.precopy.after", Mode::Precopy, Old, "a"),
    death("a", "source.transfer.after", Mode::Hybrid, Old, "a"),
    death("a", "source.transfer.after", Mode::Cold, Todays, "a"),
    death("a", "source.deliver.before", Mode::Hybrid, Old, "b"),
    death("a", "source.drain.before", Mode::Postcopy, Old, "b"),
    death("a", "source.drain.before", Mode::Postcopy, Todays, "b"),
    death("b", "destination.restore.before", Mode::Hybrid, Old, "a"),
    death("b", "destination.ready.after", Mode::Cold, Old, "a"),
    death("b", "destination.commit.after", Mode::Hybrid, Old, "b"),
    death("b", "destination.commit.after", Mode::Postcopy, Todays, "b"),
    death("b", "destination.drain.before", Mode::Postcopy, Old, "b"),
    death("b", "destination.drain.before", Mode::Hybrid, Todays, "b"),
];

impl Death {
    fn play(&self, lab: &Lab) -> Result<()> {
        let other = if self.node == "a" { "b" } else { "a" };
        let mut skewed = Skewed::run(lab)?;
        start(lab, other, self.other, "")?;
        start(lab, self.node, Old, &format!("{}.die", self.place))?;
        let agent = lab.agent_pid(self.node)?.context("the agent has just been started")?;
        let moving = Moving::begin(lab, NAME, "a", "b", self.mode)?;
        wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
        keep_journal(lab, self)?;
        start(lab, self.node, Todays, "")?;
        let ended = moving.end()?;
        skewed.is_on(lab, self.ends_on).with_context(|| ended.error().to_owned())?;
        // Whoever stays behind gets today's build later.
        start(lab, other, Todays, "")?;
        skewed.is_on(lab, self.ends_on)?;
        let to = if self.ends_on == "a" { "b" } else { "a" };
        let again = Moving::begin(lab, NAME, self.ends_on, to, Mode::Auto)?.end()?;
        ensure!(again.success, "the second move: {}", again.error());
        skewed.is_on(lab, to)?;
        skewed.end(lab)
    }
}

/// Copies the journal that the old agent has left to the directory `TRANSHIP_KEEP_JOURNALS`, if there is such a variable: new examples for the
/// unit tests of the journal.
fn keep_journal(lab: &Lab, death: &Death) -> Result<()> {
    let Some(directory) = std::env::var_os("TRANSHIP_KEEP_JOURNALS") else { return Ok(()) };
    for entry in fs::read_dir(lab.path(death.node, "/var/lib/tranship/journal")?)?.flatten() {
        let name = format!("{}.{}.{}", death.place, death.mode, entry.file_name().to_string_lossy());
        fs::copy(entry.path(), Path::new(&directory).join(name))?;
    }
    Ok(())
}

fn journals_of_the_old_build_are_taken_over(stage: &mut Stage) -> Result<()> {
    let wanted = std::env::var("TRANSHIP_CASES").unwrap_or_default();
    let mut failures = Vec::new();
    for death in DEATHS {
        let name = format!("{}.{}.{:?}", death.place, death.mode, death.other).to_lowercase();
        if !name.starts_with(&wanted) {
            continue;
        }
        match death.play(&stage.lab) {
            Ok(()) => eprintln!("ok      {name}"),
            Err(error) => {
                eprintln!("FAILED  {name}: {error:#}");
                failures.push(format!("{name}: {error:#}"));
                // Two labs cannot be up at a time, and dropping the old one would take down the new one.
                std::mem::replace(&mut stage.lab, Lab::attach()?).down()?;
                stage.lab = Lab::up(&tranship_lab::UpOptions { wait: PATIENCE, ..Default::default() })?;
            }
        }
    }
    ensure!(failures.is_empty(), "{} of {}:\n  {}", failures.len(), DEATHS.len(), failures.join("\n  "));
    Ok(())
}

fn main() -> ExitCode {
    let mut all: Vec<(&str, Scenario)> = Vec::new();
    if std::env::var_os(OLD_BUILD).is_some() {
        all.push(("moves_in_both_directions", moves_in_both_directions));
        all.push(("what_the_old_build_cannot_move_is_refused", what_the_old_build_cannot_move_is_refused));
        all.push(("journals_of_the_old_build_are_taken_over", journals_of_the_old_build_are_taken_over));
    } else {
        println!("skipped: an agent of an older build takes minutes to be built; `make test-skew` does it");
    }
    scenarios(&all)
}
