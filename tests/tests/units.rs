//! Containers that share a network namespace move together, or not at all.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tranship_api::GroupPlan;
use tranship_e2e::{
    Stage, connection_alive, exactly_one_runs, is_gone, newest_group_report, nothing_left, refused_move, restart_agent,
    run_beside, scenarios, wait_until, whole_matrices,
};
use tranship_lab::{CLIENT, CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{BlockerKind, GroupReport, MemberOutcome, Outcome};

/// A Redis, a replica of it that is connected over the loopback interface, and a program that has unread datagrams. The first one by name moves the network,
/// which has been made for the second one.
const UNIT: [&str; 3] = ["app", "db", "queue"];
const NETWORK: &str = "db";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 80);
const REPLICA_PORT: u16 = 6380;
const QUEUE_PORT: u16 = 7000;
const FILE: &str = "containers:\n  app:\n  db:\n  queue:\n";
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take until all is undone or finished.
const SETTLED: Duration = Duration::from_secs(90);

/// Reads and sends back what has come, whenever it gets a signal.
const QUEUE: &str = "
import signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('0.0.0.0', 7000))
s.setblocking(False)
while True:
    signal.sigwait([signal.SIGUSR1])
    while True:
        try:
            data, sender = s.recvfrom(100)
        except BlockingIOError:
            break
        s.sendto(data, sender)
";

/// The unit and its clients.
struct Unit {
    counters: [CounterClient; 2],
    redis: Redis,
    sender: UdpSocket,
    /// How often the replica has connected.
    connects: (String, String),
}

fn counter(lab: &Lab, port: u16) -> Result<CounterClient> {
    Ok(CounterClient::start(lab, (IP, port).into(), &format!("counter-{port}"), Duration::from_micros(500))?)
}

impl Unit {
    fn start(lab: &Lab) -> Result<Self> {
        lab.run("a", NETWORK, &RunOptions::new(IP, redis_command()))?;
        let mut redis = Redis::connect(lab, IP, PATIENCE)?;
        redis.populate(50_000, "key", 100)?;
        let mut replica: Vec<String> = redis_command()
            .into_iter()
            .map(|word| if word == REDIS_PORT.to_string() { REPLICA_PORT.to_string() } else { word })
            .collect();
        replica.extend(["--replicaof", "127.0.0.1", &REDIS_PORT.to_string()].map(str::to_owned));
        replica.extend(["--replica-read-only", "no"].map(str::to_owned));
        run_beside(lab, NETWORK, "app", &replica, |_| {})?;
        run_beside(lab, NETWORK, "queue", &["/usr/bin/python3", "-c", QUEUE].map(str::to_owned), |_| {})?;
        wait_until("the replica to be connected", PATIENCE, || {
            Ok(redis.info("slave0").is_ok_and(|one| one.contains("state=online")).then_some(()))
        })?;
        wait_until("the queue to be open", PATIENCE, || {
            let open = lab.check("a", &["nsenter", "--net=/run/netns/db", "ss", "-Hlun"])?;
            Ok(open.contains(":7000").then_some(()))
        })?;
        let sender = lab.within(CLIENT, None, || {
            let socket = UdpSocket::bind(("0.0.0.0", 0))?;
            socket.connect(SocketAddr::from((IP, QUEUE_PORT)))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })??;
        let connects = Self::connects(&mut redis)?;
        Ok(Self { counters: [counter(lab, REDIS_PORT)?, counter(lab, REPLICA_PORT)?], redis, sender, connects })
    }

    fn connects(redis: &mut Redis) -> Result<(String, String)> {
        Ok((redis.info("sync_full")?, redis.info("sync_partial_ok")?))
    }

    /// Sends datagrams that nobody reads until [`Self::read`].
    fn send(&self) -> Result<()> {
        (0..10u8).try_for_each(|number| self.sender.send(&[number]).map(drop)).map_err(Into::into)
    }

    /// What was sent is read on a node: all of it, once, in order.
    fn read(&self, lab: &Lab, node: &str) -> Result<()> {
        lab.check(node, &["runc", "kill", "queue", "USR1"])?;
        let mut buffer = [0; 100];
        for number in 0..10u8 {
            let got = self.sender.recv(&mut buffer).with_context(|| format!("datagram {number}"))?;
            ensure!(buffer[..got] == [number], "datagram {number} is {:?}", &buffer[..got]);
        }
        Ok(())
    }

    /// All connections of clients and between the members are those that they were.
    fn is_whole(&mut self) -> Result<()> {
        for counter in &mut self.counters {
            connection_alive(counter)?;
        }
        wait_until("the replica to be connected", PATIENCE, || {
            Ok(self.redis.info("slave0").is_ok_and(|one| one.contains("state=online")).then_some(()))
        })?;
        let connects = Self::connects(&mut self.redis)?;
        ensure!(connects == self.connects, "the replica connected anew: {connects:?} after {:?}", self.connects);
        Ok(())
    }

    fn end(self, lab: &Lab, node: &str) -> Result<()> {
        drop(self);
        for name in UNIT {
            lab.check(node, &["runc", "delete", "--force", name])?;
        }
        lab.check(node, &["ip", "netns", "delete", NETWORK])?;
        for node in ["a", "b"] {
            lab.check(node, &["rm", "-rf", "/run/containers/app", "/run/containers/queue"])?;
        }
        tranship_e2e::remove(lab, NETWORK)
    }
}

fn write(lab: &Lab, node: &str) -> Result<&'static str> {
    fs::write(lab.path(node, "/tmp/unit.yaml")?, FILE)?;
    Ok("/tmp/unit.yaml")
}

fn moves(lab: &Lab, from: &str, options: &[&str]) -> Result<GroupReport> {
    let file = write(lab, from)?;
    let output = lab.exec(from, &[&["tranship", "move-group", file, "--atomic", "--json"], options].concat())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).with_context(|| said)
}

fn all_are_on(lab: &Lab, node: &str, other: &str) -> Result<()> {
    for name in UNIT {
        ensure!(exactly_one_runs(lab, name)? == node, "{name} is not on {node}");
        nothing_left(lab, other, name)?;
    }
    Ok(())
}

fn containers_that_share_a_network_move_together(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut unit = Unit::start(lab)?;
    // One by one is refused, and the refusal names the way.
    let refusal = refused_move(lab, "a", "app", "b")?;
    refusal.names(BlockerKind::Network, "of container db shares the network namespace of container app")?;
    ensure!(refusal.text.contains("move the two together (`tranship move-group --atomic`)"), "{}", refusal.text);
    let file = write(lab, "a")?;
    let plan = lab.exec("a", &["tranship", "move-group", file, "--to", "b", "--atomic", "--dry-run", "--json"])?;
    let plan: GroupPlan = serde_json::from_slice(&plan.stdout)?;
    ensure!(plan.members.iter().all(|member| member.blockers.is_empty()), "{plan:#?}");
    let plan = lab.exec("a", &["tranship", "move-group", file, "--to", "b", "--dry-run", "--json"])?;
    let plan: GroupPlan = serde_json::from_slice(&plan.stdout)?;
    ensure!(plan.members.iter().all(|member| !member.blockers.is_empty()), "{plan:#?}");
    let (mut from, mut to) = ("a", "b");
    let modes: &[&str] =
        if whole_matrices() { &["auto", "precopy", "postcopy", "cold", "auto"] } else { &["auto", "postcopy"] };
    for mode in modes.iter().copied() {
        unit.send()?;
        let report = moves(lab, from, &["--to", to, "--mode", mode])?;
        ensure!(report.outcome == Outcome::Moved, "{mode}: {report:#?}");
        for own in &report.members {
            eprintln!("{mode}: {}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
        }
        unit.is_whole().context(mode)?;
        unit.read(lab, to).context(mode)?;
        all_are_on(lab, to, from).context(mode)?;
        (from, to) = (to, from);
    }
    unit.end(lab, from)
}

fn who_shares_more_or_is_not_in_the_group_is_named(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut unit = Unit::start(lab)?;
    let mut entered = lab.spawn("a", &["nsenter", "--net=/run/netns/db", "sleep", "1000"])?;
    let report = moves(lab, "a", &["--to", "b"])?;
    let _ = entered.kill();
    let _ = entered.wait();
    let said = format!("{report:?}");
    ensure!(said.contains("(sleep) shares the network namespace"), "{report:#?}");
    fs::write(lab.path("a", "/tmp/part.yaml")?, "containers:\n  app:\n  db:\n")?;
    lab.exec("a", &["tranship", "move-group", "/tmp/part.yaml", "--to", "b", "--atomic", "--json"])?;
    let report = newest_group_report(lab, "a")?;
    ensure!(format!("{report:?}").contains("of container queue shares the network namespace"), "{report:#?}");
    let state: Value = serde_json::from_str(&lab.check("a", &["runc", "state", "app"])?)?;
    let ipc = json!({"type": "ipc", "path": format!("/proc/{}/ns/ipc", state["pid"])});
    run_beside(lab, NETWORK, "more", &["sleep", "1000"].map(str::to_owned), |config| {
        let namespaces = config["linux"]["namespaces"].as_array_mut().expect("namespaces are a list");
        namespaces.retain(|namespace| namespace["type"] != "ipc");
        namespaces.push(ipc);
    })?;
    fs::write(lab.path("a", "/tmp/more.yaml")?, format!("{FILE}  more:\n"))?;
    lab.exec("a", &["tranship", "move-group", "/tmp/more.yaml", "--to", "b", "--atomic", "--json"])?;
    let report = newest_group_report(lab, "a")?;
    lab.check("a", &["runc", "delete", "--force", "more"])?;
    lab.check("a", &["rm", "-r", "/run/containers/more"])?;
    ensure!(format!("{report:?}").contains("of container more shares the network and IPC namespaces"), "{report:#?}");
    unit.is_whole()?;
    all_are_on(lab, "a", "b")?;
    unit.end(lab, "a")
}

/// Before the decision all stay; after it all move.
fn exactly_one_unit_lives_whoever_dies(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut unit = Unit::start(lab)?;
    let (mut from, mut to) = ("a", "b");
    let steps = [
        ("source.freeze.before.die", false),
        ("source.freeze.after.die", false),
        ("source.close-gate.after.die", false),
        ("source.transfer.after.die", false),
        ("source.transfer.before.cut", false),
        ("source.transfer.after.error", false),
        ("source.await-ready.after.error", false),
        ("source.commit.before.die", false),
        ("destination.network.after.die", false),
        ("destination.restore.before.die", false),
        ("destination.restore.after.error", false),
        ("destination.ready.after.die", false),
        ("source.agree.after.die", true),
        ("source.commit.after.die", true),
        ("source.deliver.after.die", true),
        ("source.drain.after.die", true),
        ("source.release.before.die", true),
        ("source.release.after.die", true),
        ("destination.commit.before.die", true),
        ("destination.open-gate.after.die", true),
        ("destination.resume.before.kill-criu", true),
        ("destination.resume.after.die", true),
        ("destination.tidy.before.die", true),
    ];
    // One of four in `make test`.
    let every = if whole_matrices() { 1 } else { 4 };
    for (fault, all) in steps.into_iter().step_by(every) {
        let at = if fault.starts_with("source") { from } else { to };
        restart_agent(lab, at, fault)?;
        let agent = lab.agent_pid(at)?.context("the agent has just been started")?;
        let file = write(lab, from)?;
        let mut client = lab.spawn(from, &["tranship", "move-group", file, "--to", to, "--atomic"])?;
        if fault.ends_with("die") {
            wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(()))).context(fault)?;
            lab.start_agent(at, &[])?;
        }
        wait_until("the end of the group", SETTLED, || Ok(client.try_wait()?)).context(fault)?;
        let (here, there) = if all { (to, from) } else { (from, to) };
        wait_until("the unit to be on one node", SETTLED, || Ok(all_are_on(lab, here, there).ok())).with_context(
            || format!("{fault}: {:?}: {:?}", all_are_on(lab, here, there), newest_group_report(lab, from)),
        )?;
        let outcomes: Vec<_> = newest_group_report(lab, from)?.members.iter().map(|member| member.outcome).collect();
        eprintln!("{fault}: {outcomes:?}");
        ensure!(outcomes.iter().all(|one| (*one == MemberOutcome::Moved) == all), "{fault}: {outcomes:?}");
        unit.is_whole().context(fault)?;
        restart_agent(lab, at, "")?;
        (from, to) = (here, there);
    }
    unit.end(lab, from)
}

/// A destination that is lost is given up for the whole unit, by one word.
fn a_unit_is_given_up_as_a_whole(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut unit = Unit::start(lab)?;
    restart_agent(lab, "b", "destination.open-gate.before.die")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let file = write(lab, "a")?;
    let mut client = lab.spawn("a", &["tranship", "move-group", file, "--to", "b", "--atomic"])?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    wait_until("all to be given up", SETTLED, || {
        let given_up = lab.exec("a", &["tranship", "recover", "queue", "--destination-lost", "--json"])?;
        Ok(given_up.status.success().then_some(()))
    })?;
    wait_until("the end of the group", SETTLED, || Ok(client.try_wait()?))?;
    let outcomes: Vec<_> = newest_group_report(lab, "a")?.members.iter().map(|member| member.outcome).collect();
    ensure!(outcomes.iter().all(|one| *one == MemberOutcome::GivenUp), "{outcomes:?}");
    unit.is_whole()?;
    lab.start_agent("b", &[])?;
    wait_until("the copies to be removed", SETTLED, || Ok(all_are_on(lab, "a", "b").ok()))
        .with_context(|| format!("{:?}", all_are_on(lab, "a", "b")))?;
    unit.is_whole()?;
    unit.end(lab, "a")
}

fn main() -> ExitCode {
    scenarios(&[
        ("containers_that_share_a_network_move_together", containers_that_share_a_network_move_together),
        ("who_shares_more_or_is_not_in_the_group_is_named", who_shares_more_or_is_not_in_the_group_is_named),
        ("a_unit_is_given_up_as_a_whole", a_unit_is_given_up_as_a_whole),
        ("exactly_one_unit_lives_whoever_dies", exactly_one_unit_lives_whoever_dies),
    ])
}
