//! Containers move from Docker to Podman and back, and are each engine's own there.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    DOCKER, Managed, Moving, PODMAN, Stage, connection_alive, refused_move_with, scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, Redis};
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
        (
            "what_the_other_engine_would_not_give_is_refused_before_the_freeze",
            what_the_other_engine_would_not_give_is_refused_before_the_freeze,
        ),
    ])
}
