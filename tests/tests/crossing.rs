//! Containers move from Docker to Podman and back, and are each engine's own there.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    DOCKER, Managed, Moving, PODMAN, Stage, connection_alive, is_gone, refused_move_with, restart_agent, scenarios,
    wait_until,
};
use tranship_lab::{CLIENT, CounterClient, Lab, REDIS_PORT, Redis, redis_command};
use tranship_types::{BlockerKind, Mode};

const NAME: &str = "cache";
/// The longest that a client may wait, in ms.
const GAP: f64 = 1500.0;
const LOOK: &str = "cat /srv/written /opt/written /dev/shm/kept /proc/sys/net/core/somaxconn; hostname; grep -E 'Cap(Eff|Bnd)' /proc/1/status";

fn crosses(
    lab: &Lab,
    counter: &mut CounterClient,
    (from, source): (&str, &Managed),
    (to, target): (&str, &Managed),
) -> Result<()> {
    counter.mark()?;
    let engine = target.engine.to_lowercase();
    let ended = Moving::begin_with(lab, NAME, from, to, Mode::Auto, &["--to-engine", &engine])?.end()?;
    ensure!(ended.success, "the move from {} to {} failed: {}", source.engine, target.engine, ended.error());
    let seen = connection_alive(counter).with_context(|| format!("after the move to {}", target.engine))?;
    let gap = seen.since_mark.longest.ms;
    let blackout = ended.report.and_then(|report| report.blackout_ms).unwrap_or_default();
    eprintln!("{} → {}: client gap {gap:.0} ms, blackout {blackout:.0} ms", source.engine, target.engine);
    ensure!(gap < GAP, "the client waited for {gap:.0} ms");
    source.is_gone(lab, from)?;
    let routes = target.execute(lab, to, "ip -4 route show default")?;
    ensure!(routes.lines().count() == 1, "in {} it has the default routes\n{routes}", target.engine);
    target.shows(lab, to)
}

fn a_container_goes_from_docker_to_podman_and_back(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    PODMAN_AND_DOCKER.iter().try_for_each(|engine| (engine.prepare)(lab))?;
    let options = [
        "--volume",
        "kept:/srv",
        "--restart",
        "always",
        "--memory",
        "256m",
        "--label",
        "tier=back",
        "--sysctl",
        "net.core.somaxconn=99",
        "--cap-drop",
        "CHOWN",
    ];
    let mut counter = DOCKER.start(lab, 92, &options, &[])?;
    DOCKER.execute(lab, "a", "echo volume > /srv/written; echo layer > /opt/written; echo shared > /dev/shm/kept")?;
    let before = DOCKER.execute(lab, "a", LOOK)?;
    let telling = "{{.HostConfig.Memory}} {{.HostConfig.RestartPolicy.Name}} {{.Config.Labels.tier}} {{.Config.Hostname}} \
                   {{range .NetworkSettings.Networks}}{{.IPAddress}} {{.MacAddress}}{{end}}";
    let told = DOCKER.told(lab, "a", telling)?;

    crosses(lab, &mut counter, ("a", &DOCKER), ("b", &PODMAN))?;
    ensure!(PODMAN.told(lab, "b", telling)? == told, "it was {told}, and is {}", PODMAN.told(lab, "b", telling)?);
    let after = PODMAN.execute(lab, "b", LOOK)?;
    ensure!(after == before, "in the container there was {before}, and is {after}");
    is_managed(lab, "b", &PODMAN)?;
    PODMAN.moves(lab, &mut counter, "b", "a").context("within Podman")?;
    crosses(lab, &mut counter, ("a", &PODMAN), ("b", &DOCKER))?;
    ensure!(DOCKER.told(lab, "b", telling)? == told, "it was {told}, and is {}", DOCKER.told(lab, "b", telling)?);
    let after = DOCKER.execute(lab, "b", LOOK)?;
    ensure!(after == before, "in the container there was {before}, and is {after}");
    is_managed(lab, "b", &DOCKER)?;
    DOCKER.moves(lab, &mut counter, "b", "a").context("within Docker")?;
    drop(counter);

    let ip = Ipv4Addr::new(10, 77, 0, 92);
    for command in ["stop", "start"] {
        lab.docker("a", &[command, NAME])?;
    }
    Redis::connect(lab, ip, Duration::from_secs(10)).context("after docker stop and start")?;
    let again = DOCKER.execute(lab, "a", LOOK)?;
    ensure!(again.replace("shared\n", "") == before.replace("shared\n", ""), "started again it has {again}");
    DOCKER.remove(lab, "a")?;
    DOCKER.is_gone(lab, "a")
}

const PODMAN_AND_DOCKER: [Managed; 2] = [PODMAN, DOCKER];

/// Logs go on, and commands run in it.
fn is_managed(lab: &Lab, node: &str, engine: &Managed) -> Result<()> {
    let ask = |arguments: &[&str]| (engine.command)(lab, node, arguments);
    ask(&["exec", NAME, "redis-cli", "debug", "log", "a line after the move"])?;
    wait_until("the line in the logs", Duration::from_secs(5), || {
        Ok(ask(&["logs", NAME])?.contains("a line after the move").then_some(()))
    })
}

fn one_that_began_in_podman_goes_to_docker_and_back(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    PODMAN_AND_DOCKER.iter().try_for_each(|engine| (engine.prepare)(lab))?;
    let mut counter = PODMAN.start(lab, 93, &["--volume", "other:/srv"], &[])?;
    PODMAN.execute(lab, "a", "echo volume > /srv/written; echo layer > /opt/written; echo shared > /dev/shm/kept")?;
    let before = PODMAN.execute(lab, "a", LOOK)?;
    crosses(lab, &mut counter, ("a", &PODMAN), ("b", &DOCKER))?;
    ensure!(DOCKER.execute(lab, "b", LOOK)? == before, "in the container there was {before}");
    DOCKER.moves(lab, &mut counter, "b", "a").context("within Docker")?;
    crosses(lab, &mut counter, ("a", &DOCKER), ("b", &PODMAN))?;
    ensure!(PODMAN.execute(lab, "b", LOOK)? == before, "in the container there was {before}");
    is_managed(lab, "b", &PODMAN)?;
    drop(counter);
    for command in ["stop", "start"] {
        lab.podman("b", &[command, NAME])?;
    }
    Redis::connect(lab, Ipv4Addr::new(10, 77, 0, 93), Duration::from_secs(10))
        .context("after podman stop and start")?;
    PODMAN.remove(lab, "b")?;
    PODMAN.is_gone(lab, "b")
}

/// What the container's first process is, and what is started in it.
const WHO: &str = "grep -E '^(Uid|Gid|Groups):' /proc/1/status; id -u; id -g; pwd; cat /tmp/kept";
const TO_PODMAN: [&str; 2] = ["--to-engine", "podman"];
const TO_DOCKER: [&str; 2] = ["--to-engine", "docker"];

/// Moves the container from one node to the other while the agent of one of them dies at a place of its steps, and starts that agent again.
fn crosses_while_one_dies(lab: &Lab, (from, to): (&str, &str), options: &[&str], fault: (&str, &str)) -> Result<bool> {
    let (node, place) = fault;
    restart_agent(lab, node, &format!("{place}.die"))?;
    let agent = lab.agent_pid(node)?.context("the agent has just been started")?;
    let moving = Moving::begin_with(lab, NAME, from, to, Mode::Auto, options)?;
    wait_until("the agent to die", Duration::from_secs(30), || Ok(is_gone(agent).then_some(())))?;
    restart_agent(lab, node, "")?;
    Ok(moving.end()?.success)
}

/// Waits until the container is one engine's on one node, and nothing of it is left to the other.
fn is_at(lab: &Lab, (at, engine): (&str, &Managed), (not, other): (&str, &Managed)) -> Result<()> {
    let look = || engine.shows(lab, at).and_then(|()| other.is_gone(lab, not));
    wait_until("the container to be at one place", Duration::from_secs(40), || Ok(look().ok()))
        .with_context(|| format!("{:?}", look()))
}

fn one_with_a_user_crosses_whoever_dies(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    PODMAN_AND_DOCKER.iter().try_for_each(|engine| (engine.prepare)(lab))?;
    let image = DOCKER.make_image(lab, "a", 1)?;
    let ip = Ipv4Addr::new(10, 77, 0, 95);
    lab.docker_run_image("a", NAME, ip, image, &[], &redis_command())?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    DOCKER.execute(lab, "a", "echo kept > /tmp/kept")?;
    let (pid, before) = (DOCKER.pid(lab, "a")?, DOCKER.execute(lab, "a", WHO)?);
    ensure!(before.contains("Uid:\t1000\t") && before.ends_with("1000\n1000\n/opt\nkept\n"), "it is {before}");

    for fault in [("b", "destination.restore.after"), ("a", "source.await-ready.after")] {
        let moved = crosses_while_one_dies(lab, ("a", "b"), &TO_PODMAN, fault)?;
        ensure!(!moved, "it was moved although the agent died at {fault:?}");
        is_at(lab, ("a", &DOCKER), ("b", &PODMAN)).with_context(|| format!("after {fault:?}"))?;
        connection_alive(&mut counter).with_context(|| format!("after {fault:?}"))?;
        ensure!(DOCKER.pid(lab, "a")? == pid, "after {fault:?} it is another process");
    }
    crosses_while_one_dies(lab, ("a", "b"), &TO_PODMAN, ("a", "source.commit.after"))?;
    is_at(lab, ("b", &PODMAN), ("a", &DOCKER)).context("after the source's agent died at the commit")?;
    connection_alive(&mut counter)?;
    ensure!(PODMAN.execute(lab, "b", WHO)? == before, "it was {before}, and is {}", PODMAN.execute(lab, "b", WHO)?);

    crosses_while_one_dies(lab, ("b", "a"), &TO_DOCKER, ("a", "destination.commit.after"))?;
    is_at(lab, ("a", &DOCKER), ("b", &PODMAN)).context("after the destination's agent died at the commit")?;
    connection_alive(&mut counter)?;
    ensure!(DOCKER.execute(lab, "a", WHO)? == before, "it was {before}, and is {}", DOCKER.execute(lab, "a", WHO)?);

    // A second time, from what the two have made of its parameters.
    crosses(lab, &mut counter, ("a", &DOCKER), ("b", &PODMAN))?;
    crosses(lab, &mut counter, ("b", &PODMAN), ("a", &DOCKER))?;
    drop(counter);
    DOCKER.remove(lab, "a")?;
    [DOCKER, PODMAN].iter().try_for_each(|engine| engine.remove_image(lab, image))
}

fn published_ports_are_the_other_engine_s_there(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    PODMAN_AND_DOCKER.iter().try_for_each(|engine| (engine.prepare)(lab))?;
    let network = ["network", "create", "--driver", "bridge", "--subnet", "10.78.0.0/24", "ports"];
    lab.docker("a", &network)?;
    lab.podman("b", &network)?;
    // Docker has nothing forwarded that it does not know, Podman's neither.
    lab.check("b", &["iptables", "--policy", "FORWARD", "ACCEPT"])?;
    let run = ["run", "--detach", "--name", NAME, "--network", "ports", "--ip", "10.78.0.5", "--publish", "7000:6379"];
    let host = ["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp", "tranship-lab"];
    let redis = redis_command();
    let command: Vec<_> = redis.iter().map(String::as_str).collect();
    lab.docker("a", &[&run[..], &host, &command].concat())?;
    let answers = |node: &str| -> Result<()> {
        let port = (lab.address(node)?, 7000).into();
        wait_until("the published port", Duration::from_secs(10), || {
            Ok(lab.connect(CLIENT, port, Duration::from_secs(1)).ok().map(drop))
        })?;
        let mut counter = CounterClient::start(lab, port, "counter", Duration::from_micros(500))?;
        counter.wait_replies(100, Duration::from_secs(10)).map(drop).with_context(|| format!("at the port of {node}"))
    };
    answers("a").context("before it is moved")?;
    for (from, to, options) in [("a", "b", &TO_PODMAN), ("b", "a", &TO_DOCKER)] {
        let ended = Moving::begin_with(lab, NAME, from, to, Mode::Auto, options)?.end()?;
        ensure!(ended.success, "the move from {from} to {to} failed: {}", ended.error());
        answers(to).with_context(|| format!("after the move from {from} to {to}"))?;
        let old = lab.connect(CLIENT, (lab.address(from)?, 7000).into(), Duration::from_secs(1));
        ensure!(old.is_err(), "{from} still answers at the port");
    }
    DOCKER.remove(lab, "a")?;
    lab.docker("a", &["network", "rm", "ports"])?;
    lab.podman("b", &["network", "rm", "ports"])?;
    Ok(())
}

fn what_the_other_engine_would_not_give_is_refused_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    PODMAN_AND_DOCKER.iter().try_for_each(|engine| (engine.prepare)(lab))?;
    let mut counter =
        DOCKER.start(lab, 94, &["--log-opt", "max-size=1m", "--oom-kill-disable", "--memory", "256m"], &[])?;
    let pid = DOCKER.pid(lab, "a")?;
    refused_move_with(lab, "a", NAME, "b", &["--to-engine", "podman"])?
        .names(BlockerKind::Engine, "options of its log")?;
    refused_move_with(lab, "a", NAME, "b", &["--to-engine", "runc"])?.names(BlockerKind::Engine, "cannot take over")?;
    connection_alive(&mut counter)?;
    ensure!(DOCKER.pid(lab, "a")? == pid, "the container is another process");
    drop(counter);
    DOCKER.remove(lab, "a")
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_container_goes_from_docker_to_podman_and_back", a_container_goes_from_docker_to_podman_and_back),
        ("one_that_began_in_podman_goes_to_docker_and_back", one_that_began_in_podman_goes_to_docker_and_back),
        ("one_with_a_user_crosses_whoever_dies", one_with_a_user_crosses_whoever_dies),
        ("published_ports_are_the_other_engine_s_there", published_ports_are_the_other_engine_s_there),
        (
            "what_the_other_engine_would_not_give_is_refused_before_the_freeze",
            what_the_other_engine_would_not_give_is_refused_before_the_freeze,
        ),
    ])
}
