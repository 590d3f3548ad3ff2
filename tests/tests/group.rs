//! Groups of containers that are connected to each other move in order, and whatever becomes of one, the report says so.

use std::fs;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Stage, connection_alive, copies, exactly_one_runs, nothing_left, remove, restart_agent, scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{GroupMember, GroupReport, MemberOutcome, Outcome, Phase};

/// A Redis, a replica of it, and a replica of that: each level is connected to the one below.
const CHAIN: [(&str, Ipv4Addr); 3] = [
    ("shop-db", Ipv4Addr::new(10, 77, 0, 60)),
    ("shop-app", Ipv4Addr::new(10, 77, 0, 61)),
    ("shop-web", Ipv4Addr::new(10, 77, 0, 62)),
];
/// One that depends on nobody.
const ASIDE: (&str, Ipv4Addr) = ("aside", Ipv4Addr::new(10, 77, 0, 63));
const KEYS: u64 = 100_000;
const PATIENCE: Duration = Duration::from_secs(30);

const CHAIN_FILE: &str = "\
to: b
containers:
  shop-web: {depends_on: [shop-app]}
  shop-app: {depends_on: [shop-db]}
  shop-db:
  aside:
";

/// Starts the chain on node a, with the labels that Compose would give to it, and the one aside.
fn started(lab: &Lab) -> Result<Vec<Redis>> {
    let mut all = Vec::new();
    let mut below: Option<(&str, Ipv4Addr)> = None;
    for (name, ip) in CHAIN {
        let mut command = redis_command();
        if let Some((_, ip)) = below {
            command.extend(["--replicaof", &ip.to_string(), &REDIS_PORT.to_string()].map(str::to_owned));
        }
        let service = |name: &str| name.trim_start_matches("shop-").to_owned();
        let mut labels = vec![
            ("com.docker.compose.project".to_owned(), "shop".to_owned()),
            ("com.docker.compose.service".to_owned(), service(name)),
        ];
        if let Some((below, _)) = below {
            let depends_on = format!("{}:service_started:false", service(below));
            labels.push(("com.docker.compose.depends_on".to_owned(), depends_on));
        }
        lab.run("a", name, &RunOptions { labels, ..RunOptions::new(ip, command) })?;
        let mut redis = Redis::connect(lab, ip, PATIENCE)?;
        if below.is_none() {
            redis.populate(KEYS, "key", 100)?;
        } else {
            wait_until("the replica", PATIENCE, || {
                Ok((field(&mut redis, "master_link_status")? == "up").then_some(()))
            })?;
        }
        all.push(redis);
        below = Some((name, ip));
    }
    lab.run("a", ASIDE.0, &RunOptions::new(ASIDE.1, redis_command()))?;
    Redis::connect(lab, ASIDE.1, PATIENCE)?.populate(KEYS, "key", 100)?;
    Ok(all)
}

fn field(redis: &mut Redis, name: &str) -> Result<String> {
    let tranship_lab::resp::Reply::Bulk(Some(text)) = redis.call(&["INFO", "everything"])? else {
        anyhow::bail!("INFO gives no text")
    };
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find_map(|l| l.strip_prefix(&format!("{name}:")).map(str::to_owned));
    line.with_context(|| format!("INFO has no {name}: {text}"))
}

/// How often replicas had to connect anew, which is once if no connection ever broke: by database and replica.
fn connects(redis: &mut [Redis]) -> Result<Vec<String>> {
    let of = |redis: &mut Redis| Ok(field(redis, "sync_full")? + "+" + &field(redis, "sync_partial_ok")?);
    redis.iter_mut().map(of).collect()
}

/// Moves a group; gives the exit status, the report where there is one, and all that was printed.
fn move_group(lab: &Lab, node: &str, arguments: &[&str]) -> Result<(i32, Option<GroupReport>, String)> {
    let command = [&["tranship", "move-group", "--json"], arguments].concat();
    let output = lab.exec(node, &command)?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let status = output.status.code().context("killed")?;
    Ok((status, serde_json::from_str(&out).ok(), format!("{out}{err}")))
}

fn write(lab: &Lab, node: &str, text: &str) -> Result<String> {
    let inside = "/tmp/group.yaml";
    fs::write(lab.path(node, inside)?, text).context("the group file")?;
    Ok(inside.to_owned())
}

fn member<'a>(report: &'a GroupReport, name: &str) -> Result<&'a GroupMember> {
    report.members.iter().find(|m| m.container == name).with_context(|| format!("no {name} in {report:?}"))
}

/// When a member was frozen, and when it ran again, in ms.
fn frozen(member: &GroupMember) -> Result<(f64, f64)> {
    let begin = member.spans.iter().find(|s| s.phase == Phase::Freeze).context("it was not frozen")?;
    let end = member.spans.iter().find(|s| s.phase == Phase::Resume).context("it did not resume")?;
    Ok((begin.start_ms, end.start_ms + end.ms.context("it has not resumed")?))
}

/// Each was frozen only after those that it depends on ran on the destination.
fn in_order(report: &GroupReport) -> Result<()> {
    for own in &report.members {
        for before in &own.after {
            let (first, then) = (frozen(member(report, before)?)?, frozen(own)?);
            ensure!(first.1 <= then.0, "{} was frozen before {before} ran: {first:?}, {then:?}", own.container);
        }
    }
    Ok(())
}

fn all_moved(report: Option<GroupReport>, status: i32, said: &str, names: usize) -> Result<GroupReport> {
    let report = report.with_context(|| said.to_owned())?;
    ensure!(status == 0 && report.outcome == Outcome::Moved && report.members.len() == names, "{status}: {said}");
    in_order(&report)?;
    for own in &report.members {
        eprintln!("{}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
    }
    Ok(report)
}

fn tidy(lab: &Lab) -> Result<()> {
    CHAIN.iter().chain([&ASIDE]).try_for_each(|(name, _)| remove(lab, name))
}

fn connected_containers_move_in_order_and_stay_connected(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let mut counter =
        CounterClient::start(lab, (CHAIN[0].1, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let before = connects(&mut redis)?;

    let file = write(lab, "a", CHAIN_FILE)?;
    let (status, report, said) = move_group(lab, "a", &[&file])?;
    let report = all_moved(report, status, &said, 4)?;
    connection_alive(&mut counter)?;
    for (name, _) in CHAIN.iter().chain([&ASIDE]) {
        ensure!(exactly_one_runs(lab, name)? == "b", "{name} is not on b");
        nothing_left(lab, "a", name)?;
    }
    // The stages of different moves have overlapped.
    let (db, app) = (member(&report, "shop-db")?, member(&report, "shop-app")?);
    ensure!(app.spans[0].start_ms < frozen(db)?.0, "nothing of {app:?} was done before {db:?} was frozen");

    // And back: found by Compose's labels, which say the same, one after the other.
    let (status, report, said) =
        move_group(lab, "b", &["--compose-project", "shop", "--to", "a", "--sequential", "--mode", "precopy"])?;
    let report = all_moved(report, status, &said, 3)?;
    let names: Vec<_> = report.members.iter().map(|m| (m.container.as_str(), m.level)).collect();
    ensure!(names == [("shop-db", 0), ("shop-app", 1), ("shop-web", 2)], "{names:?}");
    for pair in report.members.windows(2) {
        let end = pair[0].spans.last().and_then(|s| Some(s.start_ms + s.ms?)).context("no end")?;
        ensure!(end <= pair[1].spans[0].start_ms, "{pair:?} overlap");
    }

    connection_alive(&mut counter)?;
    let last = counter.stop()?;
    ensure!(last.error.is_none() && last.same_connection, "{last:?}");
    let after = connects(&mut redis)?;
    ensure!(after == before, "the replicas had connected {before:?} times, and now {after:?}");
    // What the counter has counted comes through all levels.
    let value = last.value.to_string();
    wait_until("the last replica to have the counter", PATIENCE, || {
        let reply = redis[2].call(&["GET", "counter"])?;
        Ok((reply == tranship_lab::resp::Reply::Bulk(Some(value.clone().into_bytes()))).then_some(()))
    })?;
    let status = lab.check("b", &["tranship", "status", report.id.as_str()]);
    ensure!(status.is_ok(), "node b, which the group has left, does not know it: {status:?}");
    tidy(lab)
}

fn one_that_fails_stops_what_depends_on_it_and_nothing_else(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    // Somebody has the name there.
    lab.check("b", &["ip", "netns", "add", "shop-app"])?;
    let file = write(lab, "a", CHAIN_FILE)?;
    let (status, report, said) = move_group(lab, "a", &[&file])?;
    lab.check("b", &["ip", "netns", "delete", "shop-app"])?;
    let report = report.with_context(|| said.clone())?;
    ensure!(status == 1 && report.outcome == Outcome::Failed, "{status}: {said}");
    ensure!(said.contains("2 of 4 containers were not moved"), "{said}");
    for (name, outcome, node, word) in [
        ("shop-db", MemberOutcome::Moved, "b", ""),
        ("aside", MemberOutcome::Moved, "b", ""),
        ("shop-app", MemberOutcome::Failed, "a", "network namespace"),
        ("shop-web", MemberOutcome::Skipped, "a", "shop-app, which is to move before it, has not moved"),
    ] {
        let own = member(&report, name)?;
        ensure!(own.outcome == outcome && own.error.as_deref().unwrap_or_default().contains(word), "{own:?}");
        ensure!(exactly_one_runs(lab, name)? == node, "{name} is not on {node}");
    }
    // Those that are left can be moved now that the name is free.
    let left = write(lab, "a", "containers:\n  shop-web: {depends_on: [shop-app]}\n  shop-app:\n")?;
    let (status, report, said) = move_group(lab, "a", &[&left, "--to", "b"])?;
    all_moved(report, status, &said, 2)?;
    tidy(lab)
}

fn wrong_groups_are_refused_before_anything_is_touched(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    started(lab)?;
    let history = || lab.check("a", &["tranship", "history", "--json"]);
    let before = history()?;
    let refused = |text: &str, more: &[&str], expected: i32, word: &str| -> Result<()> {
        let file = write(lab, "a", text)?;
        let (status, report, said) = move_group(lab, "a", &[&[file.as_str()], more].concat())?;
        ensure!(status == expected && report.is_none() && said.contains(word), "{text}: {status}, {said}");
        Ok(())
    };
    let circle = "containers:\n  shop-db: {depends_on: [shop-web]}\n  shop-web: {depends_on: [shop-db]}\n";
    refused(circle, &["--to", "b"], 2, "shop-db → shop-web → shop-db depend on each other in a circle")?;
    refused("containers:\n  shop-db: {depends_on: [shop-web]}\n", &["--to", "b"], 2, "which is not in the group")?;
    refused("containers:\n  shop-db:\n", &[], 2, "shop-db has no destination")?;
    refused("containers:\n  shop-db:\n  shop-db:\n", &["--to", "b"], 2, "shop-db")?;
    refused("containers:\n  shop-db:\n", &["--to", "b", "--map", "other=b"], 2, "other, which is not in the group")?;
    refused("containers:\n  shop-db:\n  nobody:\n", &["--to", "b"], 3, "nobody")?;
    refused("containers:\n  shop-db: {to: z}\n", &["--to", "b"], 3, "no node z")?;
    let (status, _, said) = move_group(lab, "a", &["--label", "no=such", "--to", "b"])?;
    ensure!(status == 3 && said.contains("no running container on node a has no=such"), "{status}: {said}");
    for (name, _) in CHAIN {
        ensure!(exactly_one_runs(lab, name)? == "a", "{name} was moved");
    }
    ensure!(history()? == before, "something was begun");
    tidy(lab)
}

fn an_agent_that_dies_in_the_middle_leaves_each_container_on_one_node(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut redis = started(lab)?;
    let digest = redis[2].digest()?;
    // It dies when the first member has been frozen; the others wait for their turns.
    restart_agent(lab, "a", "source.transfer.before.die")?;
    let file = write(lab, "a", CHAIN_FILE)?;
    let mut client = lab.spawn("a", &["tranship", "move-group", &file])?;
    wait_until("the agent to die", PATIENCE, || {
        let gone = lab.agent_pid("a")?.is_none_or(tranship_e2e::is_gone);
        Ok(gone.then_some(()))
    })?;
    lab.start_agent("a", &[])?;
    // Whoever follows the group sees its end, too.
    wait_until("the end of the group", PATIENCE, || Ok(client.try_wait()?))?;
    for (name, _) in CHAIN.iter().chain([&ASIDE]) {
        wait_until("one to run", PATIENCE, || Ok(exactly_one_runs(lab, name).ok()))?;
        let all = copies(lab, name)?;
        ensure!(all.iter().all(|copy| copy.node == "a"), "{all:?}");
    }
    // Scenarios before this one may have moved groups, too.
    let kept = fs::read_dir(lab.path("a", "/var/lib/tranship/groups")?).context("the groups' reports")?;
    let read = |entry: std::io::Result<fs::DirEntry>| -> Result<GroupReport> {
        Ok(serde_json::from_slice(&fs::read(entry?.path())?)?)
    };
    let reports: Vec<GroupReport> = kept.map(read).collect::<Result<_>>()?;
    let report = reports.iter().find(|r| r.interrupted).context("no group was interrupted")?;
    ensure!(report.outcome == Outcome::Failed, "{report:?}");
    let outcomes: Vec<_> = report.members.iter().map(|m| m.outcome).collect();
    ensure!(outcomes.iter().all(|o| matches!(o, MemberOutcome::Failed | MemberOutcome::Skipped)), "{outcomes:?}");

    let (status, report, said) = move_group(lab, "a", &[&file])?;
    all_moved(report, status, &said, 4)?;
    ensure!(redis[2].digest()? == digest, "the data has changed");
    tidy(lab)
}

fn main() -> ExitCode {
    scenarios(&[
        (
            "connected_containers_move_in_order_and_stay_connected",
            connected_containers_move_in_order_and_stay_connected,
        ),
        (
            "one_that_fails_stops_what_depends_on_it_and_nothing_else",
            one_that_fails_stops_what_depends_on_it_and_nothing_else,
        ),
        ("wrong_groups_are_refused_before_anything_is_touched", wrong_groups_are_refused_before_anything_is_touched),
        (
            "an_agent_that_dies_in_the_middle_leaves_each_container_on_one_node",
            an_agent_that_dies_in_the_middle_leaves_each_container_on_one_node,
        ),
    ])
}
