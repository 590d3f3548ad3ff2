//! Pods of Podman move as a whole, and are the destination's Podman's pods afterwards.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::GroupPlan;
use tranship_e2e::{
    Stage, connection_alive, is_gone, newest_group_report, nothing_left, refused_move, restart_agent, scenarios,
    wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, redis_command};
use tranship_types::{BlockerKind, GroupReport, Outcome};

const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 90);
const REPLICA_PORT: u16 = 6380;
const FILE: &str = "containers:\n  kv:\n  replica:\n";
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take until all is undone or finished.
const SETTLED: Duration = Duration::from_secs(90);

/// A pod of a Redis and a replica of it, which is connected over the loopback interface, with their clients.
struct Shop {
    counters: [CounterClient; 2],
    redis: Redis,
    connects: (String, String),
}

fn make_pod(lab: &Lab, options: &[&str]) -> Result<()> {
    let ip = IP.to_string();
    let common = ["pod", "create", "--name", "shop", "--network", "lab", "--ip", &ip, "--hostname", "shop.local"];
    let infra = ["--infra-image", "tranship-lab", "--infra-command", "/usr/bin/sleep inf"];
    let rest = ["--cgroup-parent", "/tranship-lab/a", "--volume", "/usr:/usr:ro", "--label", "tier=front"];
    lab.podman("a", &[&common[..], &infra, &rest, options].concat()).map(drop).map_err(Into::into)
}

fn run_in_pod(lab: &Lab, node: &str, name: &str, options: &[&str], command: &[String]) -> Result<()> {
    let begin = ["run", "--detach", "--pod", "shop", "--name", name, "--tmpfs", "/tmp"];
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    lab.podman(node, &[&begin[..], options, &["tranship-lab"], &command].concat()).map(drop).map_err(Into::into)
}

fn replica_command() -> Vec<String> {
    let port = |word: String| if word == REDIS_PORT.to_string() { REPLICA_PORT.to_string() } else { word };
    let mut command: Vec<String> = redis_command().into_iter().map(port).collect();
    command.extend(["--replicaof", "127.0.0.1", &REDIS_PORT.to_string()].map(str::to_owned));
    command.extend(["--replica-read-only", "no"].map(str::to_owned));
    command
}

fn online(redis: &mut Redis) -> Result<()> {
    wait_until("the replica to be connected", PATIENCE, || {
        Ok(redis.info("slave0").is_ok_and(|one| one.contains("state=online")).then_some(()))
    })
}

impl Shop {
    fn open(lab: &Lab) -> Result<Self> {
        make_pod(lab, &[])?;
        run_in_pod(lab, "a", "kv", &[], &redis_command())?;
        let mut redis = Redis::connect(lab, IP, PATIENCE)?;
        redis.populate(20_000, "key", 100)?;
        run_in_pod(lab, "a", "replica", &[], &replica_command())?;
        online(&mut redis)?;
        let counter =
            |port| CounterClient::start(lab, (IP, port).into(), &format!("counter-{port}"), Duration::from_micros(500));
        let connects = (redis.info("sync_full")?, redis.info("sync_partial_ok")?);
        Ok(Self { counters: [counter(REDIS_PORT)?, counter(REPLICA_PORT)?], redis, connects })
    }

    /// All connections of clients and between the containers are those that they were.
    fn is_whole(&mut self) -> Result<()> {
        for counter in &mut self.counters {
            connection_alive(counter)?;
        }
        online(&mut self.redis)?;
        let connects = (self.redis.info("sync_full")?, self.redis.info("sync_partial_ok")?);
        ensure!(connects == self.connects, "the replica connected anew: {connects:?} after {:?}", self.connects);
        Ok(())
    }
}

/// What of the pod has to be the same after a move.
fn told(lab: &Lab, node: &str) -> Result<String> {
    let looks = "hostname; cat /etc/hosts /etc/resolv.conf; df -k /dev/shm | tail -1";
    let mut all = String::new();
    for name in ["kv", "replica"] {
        all += &lab.podman(node, &["exec", name, "sh", "-c", looks])?;
    }
    all += &lab.podman(node, &["pod", "inspect", "shop", "--format", "{{.Hostname}} {{.Labels}}"])?;
    Ok(all)
}

fn gone(lab: &Lab, node: &str) -> Result<()> {
    let there = lab.podman(node, &["ps", "--all", "--format", "{{.Names}}"])?;
    let pods = lab.podman(node, &["pod", "ps", "--format", "{{.Name}}"])?;
    ensure!(there.is_empty() && pods.is_empty(), "Podman on {node} still has {there}{pods}");
    let left = lab.check(node, &["sh", "-c", "runc list -q; ls -d /run/netns/netns-* 2>/dev/null; true"])?;
    ensure!(left.is_empty(), "left on {node}: {left}");
    let cgroups = format!("find /sys/fs/cgroup -path '*/tranship-lab/{node}/*' -name 'libpod-*' -print");
    let left = lab.check(node, &["sh", "-c", &cgroups])?;
    ensure!(left.is_empty(), "cgroups left on {node}: {left}");
    nothing_left(lab, node, "kv")?;
    nothing_left(lab, node, "replica")
}

fn all_run(lab: &Lab, node: &str, other: &str) -> Result<()> {
    let running = lab.podman(node, &["ps", "--format", "{{.Names}}"])?;
    ensure!(["kv", "replica", "infra"].iter().all(|name| running.contains(name)), "on {node} there run {running}");
    gone(lab, other)
}

fn moves(lab: &Lab, from: &str, to: &str, options: &[&str]) -> Result<GroupReport> {
    fs::write(lab.path(from, "/tmp/pod.yaml")?, FILE)?;
    let command = ["tranship", "move-group", "/tmp/pod.yaml", "--to", to, "--atomic", "--json"];
    let output = lab.exec(from, &[&command, options].concat())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).with_context(|| said)
}

fn remove(lab: &Lab, node: &str) -> Result<()> {
    lab.podman(node, &["pod", "rm", "--force", "--time", "0", "shop"]).map(drop).map_err(Into::into)
}

fn a_pod_moves_as_a_whole(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_podman()?;
    let mut shop = Shop::open(lab)?;
    let before = told(lab, "a")?;
    let refusal = refused_move(lab, "a", "kv", "b")?;
    refusal.names(BlockerKind::Engine, "container kv belongs to pod shop, which moves as a whole: with it replica")?;
    ensure!(refusal.text.contains("move-group --atomic"), "{}", refusal.text);
    fs::write(lab.path("a", "/tmp/pod.yaml")?, FILE)?;
    let dry_run = ["tranship", "move-group", "/tmp/pod.yaml", "--to", "b", "--atomic", "--dry-run", "--json"];
    let plan: GroupPlan = serde_json::from_slice(&lab.exec("a", &dry_run)?.stdout)?;
    ensure!(plan.members.iter().all(|member| member.blockers.is_empty()), "{plan:#?}");
    for (from, to, mode) in [("a", "b", "auto"), ("b", "a", "postcopy")] {
        let report = moves(lab, from, to, &["--mode", mode])?;
        ensure!(report.outcome == Outcome::Moved, "{mode}: {report:#?}");
        for own in &report.members {
            eprintln!("{mode}: {}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
        }
        shop.is_whole().context(mode)?;
        all_run(lab, to, from).context(mode)?;
        let after = told(lab, to)?;
        ensure!(after == before, "{after}\ninstead of\n{before}");
        // What joins the pod later is in the same namespaces.
        let ping: Vec<String> = ["redis-cli", "-p", "6380", "ping"].map(str::to_owned).into();
        let joined = ["run", "--rm", "--pod", "shop", "tranship-lab"];
        let said = lab.podman(to, &[&joined[..], &ping.iter().map(String::as_str).collect::<Vec<_>>()].concat())?;
        ensure!(said.contains("PONG"), "{said}");
    }
    drop(shop);
    remove(lab, "a")?;
    gone(lab, "a")
}

/// Before the decision all stay; after it all move.
fn a_pod_is_on_one_node_whoever_dies(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_podman()?;
    let mut shop = Shop::open(lab)?;
    let (mut from, mut to) = ("a", "b");
    for (fault, moved) in [
        ("destination.bundle.after.die", false),
        ("destination.restore.after.error", false),
        ("source.agree.after.die", true),
        ("destination.open-gate.after.die", true),
    ] {
        let at = if fault.starts_with("source") { from } else { to };
        restart_agent(lab, at, fault)?;
        fs::write(lab.path(from, "/tmp/pod.yaml")?, FILE)?;
        let mut client = lab.spawn(from, &["tranship", "move-group", "/tmp/pod.yaml", "--to", to, "--atomic"])?;
        if fault.ends_with("die") {
            wait_until("the agent to die", PATIENCE, || Ok(lab.agent_pid(at)?.is_none_or(is_gone).then_some(())))
                .with_context(|| format!("{fault}: {:?}", newest_group_report(lab, from)))?;
            lab.start_agent(at, &[])?;
        }
        wait_until("the end of the group", SETTLED, || Ok(client.try_wait()?)).context(fault)?;
        let (here, there) = if moved { (to, from) } else { (from, to) };
        wait_until("the pod to be on one node", SETTLED, || Ok(all_run(lab, here, there).ok()))
            .with_context(|| format!("{fault}: {:?}", all_run(lab, here, there)))?;
        shop.is_whole().context(fault)?;
        restart_agent(lab, at, "")?;
        (from, to) = (here, there);
    }
    drop(shop);
    remove(lab, from)
}

fn what_a_pod_cannot_take_along_is_named(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_podman()?;
    make_pod(lab, &["--infra-name", "shop-infra"])?;
    let names = |kind, words: &str| refused_move(lab, "a", "kv", "b")?.names(kind, words).map(drop);
    run_in_pod(lab, "a", "kv", &[], &redis_command())?;
    let mut redis = Redis::connect(lab, IP, PATIENCE)?;
    redis.populate(100, "key", 100)?;

    refused_move(lab, "a", "shop-infra", "b")?.names(BlockerKind::Engine, "holds the namespaces of pod shop")?;
    lab.podman("a", &["exec", "kv", "sh", "-c", "echo x > /dev/shm/segment"])?;
    names(BlockerKind::Mount, "has files in /dev/shm, which is not its own")?;
    lab.podman("a", &["exec", "kv", "rm", "/dev/shm/segment"])?;
    let queue = lab.podman("a", &["exec", "kv", "ipcmk", "--queue"])?;
    names(BlockerKind::Process, "shares with others has System V message queues")?;
    let id = queue.split_whitespace().next_back().context("ipcmk says nothing")?;
    lab.podman("a", &["exec", "kv", "ipcrm", "--queue-id", id])?;
    lab.podman("b", &["pod", "create", "--name", "shop", "--infra=false"])?;
    names(BlockerKind::NameTaken, "has a pod shop already")?;
    lab.podman("b", &["pod", "rm", "shop"])?;
    // One that does not run belongs to it, too.
    lab.podman("a", &["create", "--pod", "shop", "--name", "cron", "tranship-lab", "sleep", "1"])?;
    names(BlockerKind::Engine, "moves as a whole: with it cron")?;
    lab.podman("a", &["rm", "cron"])?;

    // A pod with one container moves like a container.
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    lab.check("a", &["tranship", "move", "kv", "--to", "b"])?;
    connection_alive(&mut counter)?;
    drop(counter);
    gone(lab, "a")?;
    lab.podman("b", &["pod", "inspect", "shop"])?;
    remove(lab, "b")?;
    gone(lab, "b")
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_pod_moves_as_a_whole", a_pod_moves_as_a_whole),
        ("what_a_pod_cannot_take_along_is_named", what_a_pod_cannot_take_along_is_named),
        ("a_pod_is_on_one_node_whoever_dies", a_pod_is_on_one_node_whoever_dies),
    ])
}
