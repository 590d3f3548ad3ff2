//! Four containers, three of which are connected, and what their moves as a group are held to.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{remove, wait_until};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{GroupMember, GroupReport, Outcome, Phase};

/// A Redis, a replica of it, and a replica of that: each level is connected to the one below.
pub const CHAIN: [(&str, Ipv4Addr); 3] = [
    ("shop-db", Ipv4Addr::new(10, 77, 0, 60)),
    ("shop-app", Ipv4Addr::new(10, 77, 0, 61)),
    ("shop-web", Ipv4Addr::new(10, 77, 0, 62)),
];
/// One that depends on nobody.
pub const ASIDE: (&str, Ipv4Addr) = ("aside", Ipv4Addr::new(10, 77, 0, 63));
const KEYS: u64 = 100_000;
pub const PATIENCE: Duration = Duration::from_secs(30);

pub const CHAIN_FILE: &str = "\
to: b
containers:
  shop-web: {depends_on: [shop-app]}
  shop-app: {depends_on: [shop-db]}
  shop-db:
  aside:
";

/// Starts the chain on node a, with the labels that Compose would give to it, and the one aside.
pub fn started(lab: &Lab) -> Result<Vec<Redis>> {
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
            wait_until("the replica", PATIENCE, || Ok((redis.info("master_link_status")? == "up").then_some(())))?;
        }
        all.push(redis);
        below = Some((name, ip));
    }
    lab.run("a", ASIDE.0, &RunOptions::new(ASIDE.1, redis_command()))?;
    Redis::connect(lab, ASIDE.1, PATIENCE)?.populate(KEYS, "key", 100)?;
    Ok(all)
}

/// How often replicas had to connect anew, which is once if no connection ever broke: by database and replica.
pub fn connects(redis: &mut [Redis]) -> Result<Vec<String>> {
    let of = |redis: &mut Redis| Ok(redis.info("sync_full")? + "+" + &redis.info("sync_partial_ok")?);
    redis.iter_mut().map(of).collect()
}

/// Moves a group; gives the exit status, the report where there is one, and all that was printed.
pub fn move_group(lab: &Lab, node: &str, arguments: &[&str]) -> Result<(i32, Option<GroupReport>, String)> {
    let command = [&["tranship", "move-group", "--json"], arguments].concat();
    let output = lab.exec(node, &command)?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let status = output.status.code().context("killed")?;
    Ok((status, serde_json::from_str(&out).ok(), format!("{out}{err}")))
}

pub fn write(lab: &Lab, node: &str, text: &str) -> Result<String> {
    let inside = "/tmp/group.yaml";
    fs::write(lab.path(node, inside)?, text).context("the group file")?;
    Ok(inside.to_owned())
}

pub fn member<'a>(report: &'a GroupReport, name: &str) -> Result<&'a GroupMember> {
    report.members.iter().find(|m| m.container == name).with_context(|| format!("no {name} in {report:?}"))
}

/// When a member was frozen, and when it ran again, in ms.
pub fn frozen(member: &GroupMember) -> Result<(f64, f64)> {
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

pub fn all_moved(report: Option<GroupReport>, status: i32, said: &str, names: usize) -> Result<GroupReport> {
    let report = report.with_context(|| said.to_owned())?;
    ensure!(status == 0 && report.outcome == Outcome::Moved && report.members.len() == names, "{status}: {said}");
    in_order(&report)?;
    for own in &report.members {
        eprintln!("{}: blackout {:.0} ms", own.container, own.blackout_ms.context("no blackout")?);
    }
    Ok(report)
}

/// All names.
pub fn names() -> impl Iterator<Item = &'static str> {
    CHAIN.iter().chain([&ASIDE]).map(|(name, _)| *name)
}

pub fn tidy(lab: &Lab) -> Result<()> {
    names().try_for_each(|name| remove(lab, name))
}

/// That the client's connection has lasted, that no replica had to connect anew (`before` is what [`connects`] said), and that
/// what the client has counted comes through all levels.
pub fn still_connected(counter: CounterClient, redis: &mut [Redis], before: &[String]) -> Result<()> {
    let last = counter.stop()?;
    ensure!(last.error.is_none() && last.same_connection, "{last:?}");
    let after = connects(redis)?;
    ensure!(after == before, "the replicas had connected {before:?} times, and now {after:?}");
    let value = last.value.to_string();
    wait_until("the last replica to have the counter", PATIENCE, || {
        let reply = redis[2].call(&["GET", "counter"])?;
        Ok((reply == tranship_lab::resp::Reply::Bulk(Some(value.clone().into_bytes()))).then_some(()))
    })?;
    Ok(())
}
