//! Pods of Podman move as a whole, and are the destination's Podman's pods afterwards.

use std::fs;
use std::net::Ipv4Addr;
use std::process::{Child, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::GroupPlan;
use tranship_e2e::{
    Dialogue, Stage, connection_alive, is_gone, make_pgbench_tables, newest_group_report, nothing_left, pgbench,
    postgres_accepts, postgres_programs, refused_move, restart_agent, scenarios, wait_until, whole_matrices,
};
use tranship_lab::{CLIENT, CounterClient, Lab, REDIS_PORT, Redis, redis_command};
use tranship_types::{BlockerKind, GroupReport, Outcome};

const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 90);
const REPLICA_PORT: u16 = 6380;
const FILE: &str = "containers:\n  kv:\n  replica:\n";
/// Uses all that containers of a pod share besides their network.
const OBJECTS: &str = include_str!("pods/objects.py");
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
    let mounted = lab.check(node, &["cat", "/proc/self/mountinfo"])?;
    let left: Vec<&str> = mounted.lines().filter(|line| line.contains("overlay-containers")).collect();
    ensure!(left.is_empty(), "mounted on {node}: {left:?}");
    nothing_left(lab, node, "kv")?;
    nothing_left(lab, node, "replica")
}

fn all_run(lab: &Lab, node: &str, other: &str) -> Result<()> {
    let running = lab.podman(node, &["ps", "--format", "{{.Names}}"])?;
    ensure!(["kv", "replica", "infra"].iter().all(|name| running.contains(name)), "on {node} there run {running}");
    gone(lab, other)
}

fn moves(lab: &Lab, from: &str, to: &str, options: &[&str]) -> Result<GroupReport> {
    moves_those(lab, FILE, from, to, options)
}

fn moves_those(lab: &Lab, file: &str, from: &str, to: &str, options: &[&str]) -> Result<GroupReport> {
    fs::write(lab.path(from, "/tmp/pod.yaml")?, file)?;
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
    let text = lab.check("a", &["tranship", "evacuate", "--to", "b"])?;
    ensure!(text.contains("\n3 of 3 containers were moved from a\n"), "{text}");
    shop.is_whole().context("evacuated")?;
    all_run(lab, "b", "a").context("evacuated")?;
    drop(shop);
    remove(lab, "b")?;
    gone(lab, "b")
}

/// Before the decision all stay; after it all move.
fn a_pod_is_on_one_node_whoever_dies(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_podman()?;
    let mut shop = Shop::open(lab)?;
    let (mut from, mut to) = ("a", "b");
    let faults = [
        ("destination.restore.after.error", false),
        ("source.agree.after.die", true),
        ("destination.bundle.after.die", false),
        ("destination.open-gate.after.die", true),
    ];
    let played = if whole_matrices() { faults.len() } else { 2 };
    for (fault, moved) in faults.into_iter().take(played) {
        let at = if fault.starts_with("source") { from } else { to };
        restart_agent(lab, at, fault)?;
        // While it dies nobody finds it any more.
        let agent = lab.agent_pid(at)?.context("the agent does not run")?;
        fs::write(lab.path(from, "/tmp/pod.yaml")?, FILE)?;
        let mut client = lab.spawn(from, &["tranship", "move-group", "/tmp/pod.yaml", "--to", to, "--atomic"])?;
        if fault.ends_with("die") {
            wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))
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

/// Two programs that use all that containers of a pod share, each in its own container.
struct Sharers;

impl Sharers {
    const FILE: &str = "containers:\n  front:\n  back:\n";

    fn open(lab: &Lab) -> Result<Self> {
        make_pod(lab, &["--shm-size", "96m"])?;
        let command = |role: &str| ["python3", "-c", OBJECTS, role].map(str::to_owned);
        run_in_pod(lab, "a", "front", &[], &["sleep".to_owned(), "inf".to_owned()])?;
        lab.podman("a", &["exec", "front", "python3", "-c", OBJECTS, "make"])?;
        lab.podman("a", &["rm", "--force", "--time", "0", "front"])?;
        for role in ["front", "back"] {
            run_in_pod(lab, "a", role, &[], &command(role))?;
        }
        let sharers = Self;
        sharers.go_on(lab, "a")?;
        Ok(sharers)
    }

    /// They count on, and have nothing to complain of.
    fn go_on(&self, lab: &Lab, node: &str) -> Result<()> {
        let count = || -> Result<u64> {
            let said = lab.podman(node, &["exec", "back", "python3", "-c", OBJECTS, "check"])?;
            let (count, complaints) = said.trim_end().split_once(' ').unwrap_or((said.trim_end(), ""));
            ensure!(complaints.is_empty(), "{complaints}");
            count.parse().with_context(|| said)
        };
        let before = count()?;
        wait_until("the containers to count on", PATIENCE, || Ok((count()? > before + 20).then_some(())))
    }

    /// Keys, ids, modes, sizes and owners of all objects, and how often segments are attached.
    fn objects(lab: &Lab, node: &str) -> Result<String> {
        let columns = [("shm", "1-4,7-9"), ("sem", "1-6"), ("msg", "1-3,8-9")];
        let look = |(kind, columns): &(&str, &str)| {
            format!("sed 's/^ *//; s/  */ /g' /proc/sysvipc/{kind} | cut -d ' ' -f {columns}; ")
        };
        let looks = columns.iter().map(look).collect::<String>() + "df -k /dev/shm | tail -1";
        Ok(lab.podman(node, &["exec", "front", "sh", "-c", &looks])?)
    }
}

fn what_the_containers_share_moves_with_them(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_podman()?;
    let sharers = Sharers::open(lab)?;
    let before = Sharers::objects(lab, "a")?;
    for (from, to, mode) in [("a", "b", "auto"), ("b", "a", "postcopy"), ("a", "b", "cold")] {
        let report = moves_those(lab, Sharers::FILE, from, to, &["--mode", mode])?;
        ensure!(report.outcome == Outcome::Moved, "{mode}: {report:#?}");
        for own in &report.members {
            eprintln!("{mode}: {}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
        }
        sharers.go_on(lab, to).context(mode)?;
        let after = Sharers::objects(lab, to)?;
        ensure!(after == before, "{after}\ninstead of\n{before}");
        gone(lab, from)?;
    }
    // One that fails changes nothing; one whose destination is made again when the decision has been taken, neither.
    for (fault, to) in [
        ("destination.engine.before.error", "b"),
        ("destination.restore.after.error", "b"),
        ("destination.open-gate.before.kill-criu", "a"),
    ] {
        let moved = to == "a";
        restart_agent(lab, "a", fault)?;
        let report = moves_those(lab, Sharers::FILE, "b", "a", &[])?;
        ensure!((report.outcome == Outcome::Moved) == moved, "{fault}: {report:#?}");
        restart_agent(lab, "a", "")?;
        sharers.go_on(lab, to).context(fault)?;
        let after = Sharers::objects(lab, to)?;
        ensure!(after == before, "{fault}: {after}\ninstead of\n{before}");
        gone(lab, if moved { "b" } else { "a" }).context(fault)?;
    }
    remove(lab, "a")?;
    gone(lab, "a")
}

/// pgbench in the client node, for as long as it is wanted.
struct Pgbench(Child);

impl Drop for Pgbench {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// PostgreSQL has a segment, which it finds its own processes by, and files in /dev/shm.
fn a_database_in_a_pod_moves_under_load(stage: &mut Stage) -> Result<()> {
    const MEMBERS: &str = "containers:\n  db:\n  kv:\n";
    let lab = &stage.lab;
    lab.start_podman()?;
    let programs = postgres_programs()?;
    let user = nix::unistd::User::from_name("postgres")?.context("there is no user postgres")?;
    make_pod(lab, &[])?;
    let bin = programs.display();
    // The image is root's alone, and knows no users. The database's buffers, too, are in a segment.
    let (uid, gid) = (user.uid, user.gid);
    let script = format!(
        "exec 2>&1; echo 'postgres:x:{uid}:{gid}::/tmp:/bin/sh' > /etc/passwd; chmod a+rx / /etc; chmod a+r /etc/passwd; \
         exec setpriv --reuid={uid} --regid={gid} --clear-groups sh -c \" \
         {bin}/initdb --pgdata=/tmp/data --auth=trust --username=postgres --no-sync && \
         echo 'host all all 10.77.0.0/24 trust' >> /tmp/data/pg_hba.conf && \
         exec {bin}/postgres -D /tmp/data -c listen_addresses='*' -c unix_socket_directories=/tmp \
         -c shared_memory_type=sysv -c dynamic_shared_memory_type=posix -c shared_buffers=32MB\""
    );
    run_in_pod(lab, "a", "db", &[], &["sh".to_owned(), "-c".to_owned(), script])?;
    run_in_pod(lab, "a", "kv", &[], &redis_command())?;
    wait_until("PostgreSQL to accept connections", PATIENCE, || postgres_accepts(lab, &programs, IP))
        .with_context(|| lab.podman("a", &["logs", "db"]).unwrap_or_else(|error| error.to_string()))?;
    make_pgbench_tables(lab, &programs, IP)?;
    let mut load = Pgbench(lab.spawn(CLIENT, &pgbench(&programs, IP, &["-c", "4", "-j", "2", "-T", "3600"]))?);
    let count = "SELECT count(*) FROM pgbench_history";
    for (from, to) in [("a", "b"), ("b", "a")] {
        let mut inside = Dialogue::with_psql(lab, &programs, IP)?;
        inside.ask("BEGIN")?;
        let identity = inside.ask("SELECT pg_backend_pid(), txid_current()")?;
        let report = moves_those(lab, MEMBERS, from, to, &[])?;
        ensure!(report.outcome == Outcome::Moved, "{report:#?}");
        let now = inside.ask("SELECT pg_backend_pid(), txid_current()")?;
        ensure!(now == identity, "on {to} the transaction is {now} instead of {identity}");
        inside.ask("COMMIT")?;
        let before = inside.ask(count)?;
        wait_until("pgbench to go on", PATIENCE, || Ok((inside.ask(count)? != before).then_some(())))?;
        ensure!(load.0.try_wait()?.is_none(), "pgbench has ended");
        // A query in parallel makes a file in /dev/shm.
        inside.ask("SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0")?;
        inside.ask("SELECT count(*), sum(abalance) FROM pgbench_accounts")?;
        gone(lab, from)?;
    }
    drop(load);
    let mut outside = Dialogue::with_psql(lab, &programs, IP)?;
    let sums = outside.ask(
        "SELECT (SELECT sum(abalance) FROM pgbench_accounts) - (SELECT sum(delta) FROM pgbench_history), \
                (SELECT sum(tbalance) FROM pgbench_tellers) - (SELECT sum(delta) FROM pgbench_history)",
    )?;
    ensure!(sums == "0|0", "pgbench's sums differ by {sums}");
    drop(outside);
    remove(lab, "a")?;
    gone(lab, "a")
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
    lab.podman("a", &["exec", "kv", "touch", "/dev/mqueue/letters"])?;
    names(BlockerKind::Process, "shares with others has POSIX message queues")?;
    lab.podman("a", &["exec", "kv", "rm", "/dev/mqueue/letters"])?;
    // A file without a name, which CRIU would give to each of them anew.
    for name in ["one", "two"] {
        let script = "exec 3<>/dev/shm/gone 4<>/dev/shm/$0; ln /dev/shm/$0 /dev/shm/$0-too; rm /dev/shm/$0; sleep 1000";
        let holds = ["sh", "-c", script, name].map(str::to_owned);
        run_in_pod(lab, "a", name, &[], &holds)?;
    }
    for name in ["one", "two"] {
        let other = format!("until [ -e /dev/shm/{name}-too ] && ! [ -e /dev/shm/{name} ]; do sleep 0.1; done");
        lab.podman("a", &["exec", name, "sh", "-c", &other])?;
    }
    lab.podman("a", &["exec", "two", "rm", "/dev/shm/gone"])?;
    fs::write(lab.path("a", "/tmp/pod.yaml")?, "containers:\n  kv:\n  one:\n  two:\n")?;
    let dry_run = ["tranship", "move-group", "/tmp/pod.yaml", "--to", "b", "--atomic", "--dry-run", "--json"];
    let plan: GroupPlan = serde_json::from_slice(&lab.exec("a", &dry_run)?.stdout)?;
    let said: String = plan.members.iter().flat_map(|member| &member.blockers).map(ToString::to_string).collect();
    ensure!(said.contains("one and two share a file in /dev/shm that has been removed"), "{plan:#?}");
    ensure!(said.contains("container two uses a file in /dev/shm by a name that is gone"), "{plan:#?}");
    lab.podman("a", &["rm", "--force", "--time", "0", "one", "two"])?;
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
    if !whole_matrices() {
        println!("skipped: two of four faults of a whole pod; `make test-all` plays all");
    }
    scenarios(&[
        ("a_pod_moves_as_a_whole", a_pod_moves_as_a_whole),
        ("what_the_containers_share_moves_with_them", what_the_containers_share_moves_with_them),
        ("a_database_in_a_pod_moves_under_load", a_database_in_a_pod_moves_under_load),
        ("what_a_pod_cannot_take_along_is_named", what_a_pod_cannot_take_along_is_named),
        ("a_pod_is_on_one_node_whoever_dies", a_pod_is_on_one_node_whoever_dies),
    ])
}
