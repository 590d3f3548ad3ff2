//! Containers that `ctr` has started move from one node's containerd to another's, and are that one's own afterwards.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{CONTAINERD, Stage, connection_alive, quiet_under, refused_move, scenarios, wait_until};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis};
use tranship_types::BlockerKind;

const NAME: &str = "cache.1";
const IMAGE: &str = "docker.io/library/tranship-lab:latest";

/// What containerd has written down of the container, but for times.
fn record(lab: &Lab, node: &str) -> Result<serde_json::Value> {
    let mut record: serde_json::Value = serde_json::from_str(&lab.ctr(node, &["containers", "info", NAME])?)?;
    for own in ["CreatedAt", "UpdatedAt", "Runtime"] {
        record[own].take();
    }
    record["Spec"]["linux"]["cgroupsPath"].take();
    Ok(record)
}

fn containerd_manages_the_moved_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let options =
        ["--memory-limit", "268435456", "--env", "COLOUR=blue", "--label", "tier=back", "--cap-drop", "CAP_CHOWN"];
    let mut counter = CONTAINERD.start(lab, 80, &options, &[])?;
    let execute = |node: &str, command: &str| {
        lab.ctr(node, &["tasks", "exec", "--exec-id", "one", NAME, "/bin/sh", "-c", command])
    };
    execute("a", "echo layer > /opt/written; echo memory > /tmp/written")?;
    let before = record(lab, "a")?;
    CONTAINERD.moves(lab, &mut counter, "a", "b")?;
    let after = record(lab, "b")?;
    ensure!(after == before, "the container was {before:#}, and is {after:#}");
    let listed = lab.check("b", &["tranship", "ls"])?;
    let lines: Vec<&str> = listed.lines().filter(|line| line.contains(NAME)).collect();
    ensure!(
        lines.len() == 1 && lines[0].contains("containerd") && lines[0].contains("running"),
        "tranship ls says: {listed}"
    );

    let said = execute("b", "cat /proc/1/comm /opt/written /tmp/written; echo $COLOUR")?;
    ensure!(said == "redis-server\nlayer\nmemory\nblue\n", "ctr tasks exec on the destination says {said:?}");
    execute("b", "redis-cli debug log 'a line after the move'")?;
    let log = lab.path("b", format!("/run/{NAME}.log"))?;
    wait_until("the line in the log", Duration::from_secs(5), || {
        Ok(std::fs::read_to_string(&log).unwrap_or_default().contains("a line after the move").then_some(()))
    })?;
    CONTAINERD.moves(lab, &mut counter, "b", "a").context("back again")?;
    CONTAINERD.moves(lab, &mut counter, "a", "b").context("and once more")?;

    drop(counter);
    lab.ctr("b", &["tasks", "kill", "--signal", "SIGTERM", NAME])?;
    wait_until("the container to end", Duration::from_secs(10), || {
        Ok(CONTAINERD.pid(lab, "b")?.is_none().then_some(()))
    })?;
    lab.ctr("b", &["tasks", "delete", NAME])?;
    lab.ctr("b", &["tasks", "start", "--detach", "--null-io", NAME])?;
    Redis::connect(lab, Ipv4Addr::new(10, 77, 0, 80), Duration::from_secs(10))
        .context("after an end and a start there")?;
    let said = execute("b", "cat /opt/written")?;
    ensure!(said == "layer\n", "started again on the destination, it has {said:?}");
    CONTAINERD.remove(lab, "b")?;
    CONTAINERD.is_gone(lab, "b")
}

fn what_cannot_be_carried_over_is_refused_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = CONTAINERD.start(lab, 81, &[], &[])?;
    let pid = CONTAINERD.pid(lab, "a")?;

    lab.ctr("b", &["containers", "create", IMAGE, NAME, "sleep", "1"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::NameTaken, "has a container")?;
    lab.ctr("b", &["containers", "delete", NAME])?;

    let lower = "/run/containerd-image/layer.tar";
    std::fs::copy(lab.path("a", lower)?, lab.path("b", lower)?)?;
    let own = CONTAINERD.make_image(lab, "b", 1)?;
    lab.ctr("b", &["images", "tag", IMAGE, "kept"])?;
    lab.ctr("b", &["images", "tag", "--force", own, IMAGE])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Rootfs, "containerd there has another image")?;
    lab.ctr("b", &["images", "tag", "--force", "kept", IMAGE])?;
    lab.ctr("b", &["images", "delete", "kept"])?;
    CONTAINERD.remove_image(lab, own)?;

    lab.check("b", &["mv", "/run/tranship-runc", "/run/elsewhere"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "is not the runtime wrapper")?;
    lab.check("b", &["mv", "/run/elsewhere", "/run/tranship-runc"])?;

    lab.ctr("a", &["--namespace", "other", "images", "import", "/run/containerd-image/image.tar"])?;
    lab.ctr("a", &["--namespace", "other", "containers", "create", IMAGE, NAME, "sleep", "1"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "the namespaces default and other both have one")?;
    lab.ctr("a", &["--namespace", "other", "containers", "delete", NAME])?;

    connection_alive(&mut counter)?;
    ensure!(CONTAINERD.pid(lab, "a")? == pid, "the container is another process");
    CONTAINERD.moves(lab, &mut counter, "a", "b").context("when nothing is in the way any more")?;
    drop(counter);
    CONTAINERD.remove(lab, "b")
}

/// A container that cannot move for what it is.
fn refused_for_what_it_is(lab: &Lab, options: &[&str], kind: BlockerKind, words: &str) -> Result<()> {
    let mount = ["--mount", "type=bind,src=/usr,dst=/usr,options=rbind:ro"];
    let fixed = ["run", "--detach", "--null-io", "--cgroup", "/tranship-lab/a/fixed"];
    lab.ctr("a", &[&fixed, &mount[..], options, &[IMAGE, "fixed", "sleep", "1000"]].concat())?;
    let refused = refused_move(lab, "a", "fixed", "b")?.names(kind, words).with_context(|| format!("with {options:?}"));
    lab.ctr_remove("a", "fixed")?;
    refused
}

fn what_belongs_to_the_node_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_containerd()?;
    refused_for_what_it_is(lab, &["--net-host"], BlockerKind::Network, "uses the network of its node")?;
    let restarting = ["--label", "containerd.io/restart.status=running"];
    refused_for_what_it_is(lab, &restarting, BlockerKind::Engine, "would start container fixed again")?;
    let joined = ["--with-ns", "ipc:/proc/1/ns/ipc"];
    refused_for_what_it_is(lab, &joined, BlockerKind::Engine, "has joined the ipc namespace")
}

fn a_move_that_fails_leaves_the_container_to_its_containerd(stage: &mut Stage) -> Result<()> {
    CONTAINERD.survives_failed_moves(&stage.lab, 83)
}

fn a_decided_move_is_finished_whatever_is_killed(stage: &mut Stage) -> Result<()> {
    CONTAINERD.finishes_decided_moves(&stage.lab, 84)
}

fn an_image_that_is_not_there_is_sent(stage: &mut Stage) -> Result<()> {
    CONTAINERD.takes_its_image_along(&stage.lab, 87, &[])
}

/// The start there is lost with the daemon, and the restore with it.
fn a_containerd_that_is_restarted_in_the_middle_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = CONTAINERD.start(lab, 85, &[], &[])?;
    let pid = CONTAINERD.pid(lab, "a")?;
    let ended = CONTAINERD.moved_while(lab, "source.freeze.before", |lab| Ok(lab.restart_containerd("b")?))?;
    ensure!(quiet_under(lab, &CONTAINERD).with_context(|| ended.error().to_owned())? == "a", "it is not where it was");
    ended.fits("a", "b", "a")?;
    connection_alive(&mut counter)?;
    ensure!(CONTAINERD.pid(lab, "a")? == pid, "the container is another process");
    CONTAINERD.moves(lab, &mut counter, "a", "b").context("after the restart")?;
    // On the source its containers go on, and so does the move.
    let ended =
        CONTAINERD.moved_from(lab, ("b", "a"), "source.freeze.before", |lab| Ok(lab.restart_containerd("b")?))?;
    ensure!(ended.success, "the move failed: {}", ended.error());
    ensure!(quiet_under(lab, &CONTAINERD)? == "a", "it is not where it went");
    connection_alive(&mut counter)?;
    drop(counter);
    CONTAINERD.remove(lab, "a")
}

/// The held copy dies with the start that it belongs to, and is made again by the next one.
fn a_containerd_that_is_restarted_at_the_commit_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = CONTAINERD.start(lab, 88, &[], &[])?;
    let ended = CONTAINERD.moved_while(lab, "source.commit.after", |lab| Ok(lab.restart_containerd("b")?))?;
    ensure!(ended.success, "the move did not end well: {}", ended.error());
    ensure!(quiet_under(lab, &CONTAINERD)? == "b", "it is not where it went");
    connection_alive(&mut counter)?;
    CONTAINERD.moves(lab, &mut counter, "b", "a").context("back again")?;
    drop(counter);
    CONTAINERD.remove(lab, "a")
}

/// containerd is stopped before the decision, and killed when the copy has run for a moment: it has not noted that it does.
fn a_containerd_that_is_killed_in_the_resume_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = CONTAINERD.start(lab, 89, &[], &[])?;
    let stop = |lab: &Lab| Ok(lab.check("b", &["sh", "-c", "kill -STOP $(cat /run/containerd.pid)"]).map(drop)?);
    let moving = CONTAINERD.begun_from(lab, ("a", "b"), "source.commit.after", stop)?;
    connection_alive(&mut counter).context("while containerd is stopped")?;
    lab.restart_containerd("b")?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not end well: {}", ended.error());
    ensure!(quiet_under(lab, &CONTAINERD)? == "b", "it is not where it went");
    connection_alive(&mut counter)?;
    CONTAINERD.moves(lab, &mut counter, "b", "a").context("back again")?;
    drop(counter);
    CONTAINERD.remove(lab, "a")
}

fn limits_that_were_changed_stay_changed(stage: &mut Stage) -> Result<()> {
    CONTAINERD.keeps_changed_limits(&stage.lab, 85, &[])
}

/// `ctr tasks start --detach` makes FIFOs for its output, which nobody reads once it has ended.
fn a_container_with_fifos_moves_more_than_once(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    drop(CONTAINERD.start(lab, 90, &[], &[])?);
    lab.ctr("a", &["tasks", "kill", "--signal", "KILL", CONTAINERD.name])?;
    wait_until("the task to end", Duration::from_secs(10), || {
        Ok(lab.ctr("a", &["tasks", "ls"])?.contains("STOPPED").then_some(()))
    })?;
    lab.ctr("a", &["tasks", "delete", CONTAINERD.name])?;
    lab.ctr("a", &["tasks", "start", "--detach", CONTAINERD.name])?;
    let address = (Ipv4Addr::new(10, 77, 0, 90), REDIS_PORT);
    Redis::connect(lab, address.0, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, address.into(), "counter", Duration::from_micros(500))?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        CONTAINERD.moves(lab, &mut counter, from, to)?;
    }
    drop(counter);
    CONTAINERD.remove(lab, "b")
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_container_with_fifos_moves_more_than_once", a_container_with_fifos_moves_more_than_once),
        ("limits_that_were_changed_stay_changed", limits_that_were_changed_stay_changed),
        ("containerd_manages_the_moved_container", containerd_manages_the_moved_container),
        (
            "what_cannot_be_carried_over_is_refused_before_the_freeze",
            what_cannot_be_carried_over_is_refused_before_the_freeze,
        ),
        ("what_belongs_to_the_node_is_refused", what_belongs_to_the_node_is_refused),
        (
            "a_move_that_fails_leaves_the_container_to_its_containerd",
            a_move_that_fails_leaves_the_container_to_its_containerd,
        ),
        ("a_decided_move_is_finished_whatever_is_killed", a_decided_move_is_finished_whatever_is_killed),
        ("an_image_that_is_not_there_is_sent", an_image_that_is_not_there_is_sent),
        (
            "a_containerd_that_is_restarted_in_the_middle_is_survived",
            a_containerd_that_is_restarted_in_the_middle_is_survived,
        ),
        (
            "a_containerd_that_is_restarted_at_the_commit_is_survived",
            a_containerd_that_is_restarted_at_the_commit_is_survived,
        ),
        (
            "a_containerd_that_is_killed_in_the_resume_is_survived",
            a_containerd_that_is_killed_in_the_resume_is_survived,
        ),
    ])
}
