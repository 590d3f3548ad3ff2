//! Containers of Docker move from one node's daemon to another's, and are that daemon's own afterwards.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Capture, DOCKER, Stage, connection_alive, move_container, processes, quiet_under, refused_move, restart_agent,
    scenarios, wait_until,
};
use tranship_lab::{CounterClient, Lab, Redis, RunOptions};
use tranship_types::BlockerKind;

const NAME: &str = "cache";
/// The source's agent has decided, and has told nobody.
const COMMIT: &str = "source.commit.after";

fn docker_manages_the_moved_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let options = ["--restart", "always", "--memory", "256m", "--env", "COLOUR=blue", "--label", "tier=back"];
    let mut counter = DOCKER.start(lab, 60, &options, &[])?;
    let telling = "{{.Config.Hostname}} {{.HostConfig.Memory}} {{.HostConfig.RestartPolicy.Name}} {{.Config.Labels}} \
                   {{.Config.Env}} {{.Image}} {{range .NetworkSettings.Networks}}{{.IPAddress}} {{.MacAddress}}{{end}}";
    let before = DOCKER.told(lab, "a", telling)?;
    DOCKER.moves(lab, &mut counter, "a", "b")?;
    let after = DOCKER.told(lab, "b", telling)?;
    ensure!(after == before, "the container was {before}, and is {after}");

    let said = lab.docker("b", &["exec", NAME, "cat", "/proc/1/comm"])?;
    ensure!(said == "redis-server\n", "docker exec on the destination says {said:?}");
    let ip = Ipv4Addr::new(10, 77, 0, 60);
    // A reason for Redis to write a line to its log.
    lab.docker("b", &["exec", NAME, "redis-cli", "debug", "log", "a line after the move"])?;
    wait_until("the line in docker logs", Duration::from_secs(5), || {
        Ok(lab.docker("b", &["logs", NAME])?.contains("a line after the move").then_some(()))
    })?;
    DOCKER.moves(lab, &mut counter, "b", "a").context("back again")?;
    DOCKER.moves(lab, &mut counter, "a", "b").context("and once more")?;

    drop(counter);
    lab.docker("b", &["stop", NAME])?;
    ensure!(DOCKER.names(lab, "b", &[])?.is_empty(), "docker stop on the destination did not stop it");
    lab.docker("b", &["start", NAME])?;
    Redis::connect(lab, ip, Duration::from_secs(10)).context("after docker stop and start on the destination")?;
    DOCKER.remove(lab, "b")
}

/// The destination's Docker may have announced them while it made the copy.
fn its_addresses_are_announced_again_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let counter = DOCKER.start(lab, 79, &[], &[])?;
    let capture = Capture::begin("arp and host 10.77.0.79")?;
    let mut seen = Vec::new();
    let ended = DOCKER.moved_while(lab, "source.arm.before", |_| {
        seen = capture.end()?;
        Ok(())
    })?;
    ensure!(ended.success, "the move failed: {}", ended.error());
    let of_itself = |line: &String| line.contains("who-has 10.77.0.79") && line.contains("tell 10.77.0.79");
    ensure!(seen.iter().any(|line| of_itself(line) || line.contains("Announcement 10.77.0.79")), "seen: {seen:?}");
    drop(counter);
    DOCKER.remove(lab, "b")
}

fn what_cannot_be_carried_over_is_refused_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = DOCKER.start(lab, 61, &[], &[])?;
    let pid = DOCKER.told(lab, "a", "{{.State.Pid}}")?;

    lab.docker("b", &["create", "--name", NAME, "tranship-lab", "sleep", "1"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::NameTaken, "has a container")?;
    lab.docker("b", &["rm", NAME])?;

    lab.run("a", NAME, &RunOptions::new(Ipv4Addr::new(10, 77, 0, 62), ["sleep", "1000"]))?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "in runc and in docker")?;
    lab.stop("a", NAME)?;

    connection_alive(&mut counter)?;
    ensure!(DOCKER.told(lab, "a", "{{.State.Pid}}")? == pid, "the container is another process");
    DOCKER.moves(lab, &mut counter, "a", "b").context("when nothing is in the way any more")?;
    drop(counter);
    DOCKER.remove(lab, "b")
}

fn a_network_that_is_not_there_is_made(stage: &mut Stage) -> Result<()> {
    DOCKER.makes_a_network_that_is_not_there(&stage.lab, 110)
}

fn a_network_without_a_chosen_subnet_moves(stage: &mut Stage) -> Result<()> {
    DOCKER.moves_from_a_network_without_a_chosen_subnet(&stage.lab)
}

fn addresses_that_collide_are_named(stage: &mut Stage) -> Result<()> {
    DOCKER.names_addresses_that_collide(&stage.lab, 111)
}

fn a_move_that_fails_leaves_the_container_to_its_docker(stage: &mut Stage) -> Result<()> {
    DOCKER.survives_failed_moves(&stage.lab, 63)
}

fn a_decided_move_is_finished_whatever_is_killed(stage: &mut Stage) -> Result<()> {
    DOCKER.finishes_decided_moves(&stage.lab, 64)
}

fn a_docker_that_is_restarted_in_the_middle_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (number, live_restore) in [(68, false), (69, true)] {
        let mut counter = DOCKER.start(lab, number, &[], &[])?;
        let pid = DOCKER.told(lab, "a", "{{.State.Pid}}")?;
        let ended =
            DOCKER.moved_while(lab, "source.freeze.before", |lab| Ok(lab.restart_docker("b", live_restore)?))?;
        let said = format!("with live-restore {live_restore}: {}", ended.error());
        ensure!(quiet_under(lab, &DOCKER).context(said.clone())? == "a", "it is not where it was, {said}");
        ended.fits("a", "b", "a")?;
        connection_alive(&mut counter).context(said)?;
        ensure!(DOCKER.told(lab, "a", "{{.State.Pid}}")? == pid, "the container is another process");
        DOCKER.moves(lab, &mut counter, "a", "b").context("after the restart")?;
        drop(counter);
        DOCKER.remove(lab, "b")?;
    }
    Ok(())
}

/// The held copy dies with the start that it belongs to, and is made again by the next one.
fn a_docker_that_is_restarted_at_the_commit_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (number, live_restore) in [(70, false), (71, true)] {
        let mut counter = DOCKER.start(lab, number, &["--restart", "always"], &[])?;
        let ended = DOCKER.moved_while(lab, COMMIT, |lab| Ok(lab.restart_docker("b", live_restore)?))?;
        let said = format!("with live-restore {live_restore}: {}", ended.error());
        ensure!(ended.success, "the move did not end well, {said}");
        ensure!(quiet_under(lab, &DOCKER).context(said.clone())? == "b", "it is not where it went, {said}");
        connection_alive(&mut counter).context(said)?;
        DOCKER.moves(lab, &mut counter, "b", "a").context("back again")?;
        drop(counter);
        DOCKER.remove(lab, "a")?;
    }
    Ok(())
}

/// Docker's daemon is stopped before the decision, and killed when the copy has run for a moment: it has no note of that, and no other start
/// could be made of what runs. It is said, and the container moves on.
fn a_docker_that_is_killed_in_the_resume(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (number, live_restore) in [(75, false), (74, true)] {
        let mut counter = DOCKER.start(lab, number, &["--restart", "always"], &[])?;
        lab.restart_docker("b", live_restore)?;
        let stop = |lab: &Lab| Ok(lab.check("b", &["sh", "-c", "kill -STOP $(cat /run/docker.pid)"]).map(drop)?);
        let moving = DOCKER.begun_from(lab, ("a", "b"), COMMIT, stop)?;
        connection_alive(&mut counter).context("while Docker is stopped")?;
        lab.restart_docker("b", live_restore)?;
        let ended = moving.end()?;
        let said = format!("with live-restore {live_restore}: {}", ended.error());
        ensure!(ended.success, "the move did not end well, {said}");
        connection_alive(&mut counter).context(said.clone())?;
        let ways = ended.report.map(|report| report.ways).unwrap_or_default();
        let words = "takes cache, which runs, for a container that was never started; move it on";
        ensure!(ways.iter().any(|way| way.contains(words)), "{said}: no word of it among {ways:?}");
        DOCKER.is_gone(lab, "a").context(said)?;
        lab.check("b", &["tranship", "doctor"])?;
        DOCKER.moves(lab, &mut counter, "b", "a").context("on, to where it is Docker's own again")?;
        drop(counter);
        DOCKER.remove(lab, "a")?;
    }
    Ok(())
}

/// Kills the destination's Docker, and waits until the held copy is lost.
fn lose_docker(lab: &Lab) -> Result<()> {
    lab.kill_docker("b")?;
    wait_until("the held copy to be lost", Duration::from_secs(10), || {
        Ok(processes(lab, "b")?.iter().all(|process| ["pager", "keeper"].contains(&process.kind)).then_some(()))
    })
}

/// Waits until it is told on the source that a move cannot go on without the other node's Docker.
fn waits_for_docker(lab: &Lab) -> Result<()> {
    let mut status = String::new();
    let waits = wait_until("the move to wait for Docker", Duration::from_secs(20), || {
        status = lab.check("a", &["tranship", "status"])?;
        let words = ["cache: after the commit point, still trying: on node b, docker does not answer", "start it"];
        Ok(words.iter().all(|words| status.contains(words)).then_some(()))
    });
    waits.with_context(|| format!("tranship status says: {status}"))
}

fn a_docker_that_is_away_at_the_commit_is_waited_for(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = DOCKER.start(lab, 72, &[], &[])?;
    let moving = DOCKER.begun_from(lab, ("a", "b"), COMMIT, lose_docker)?;
    waits_for_docker(lab)?;
    lab.revive_docker("b")?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not end well: {}", ended.error());
    ensure!(quiet_under(lab, &DOCKER).with_context(|| ended.error().to_owned())? == "b", "it is not where it went");
    connection_alive(&mut counter)?;
    drop(counter);
    DOCKER.remove(lab, "b")
}

/// Where it does not come back, the original can: the copy has never run.
fn a_docker_that_does_not_come_back_can_be_given_up(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = DOCKER.start(lab, 73, &[], &[])?;
    let pid = DOCKER.told(lab, "a", "{{.State.Pid}}")?;
    let moving = DOCKER.begun_from(lab, ("a", "b"), COMMIT, lose_docker)?;
    waits_for_docker(lab)?;
    let recover = ["tranship", "recover", NAME, "--destination-lost"];
    let refused = lab.exec("a", &recover)?;
    ensure!(refused.status.code() == Some(3), "while the agent answers, recover ended with {}", refused.status);
    lab.kill_agent("b")?;
    lab.check("a", &recover)?;
    let ended = moving.end()?;
    ensure!(!ended.success, "a move that was given up is told as a success");
    connection_alive(&mut counter)?;
    ensure!(DOCKER.told(lab, "a", "{{.State.Pid}}")? == pid, "the container is another process");

    lab.start_agent("b", &[])?;
    lab.revive_docker("b")?;
    ensure!(quiet_under(lab, &DOCKER)? == "a", "it is not where it was");
    connection_alive(&mut counter)?;
    DOCKER.moves(lab, &mut counter, "a", "b").context("the next move")?;
    drop(counter);
    DOCKER.remove(lab, "b")
}

fn a_docker_that_is_restarted_on_the_source_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_docker()?;
    lab.restart_docker("a", true)?;
    let mut counter = DOCKER.start(lab, 59, &[], &[])?;
    let ended = DOCKER.moved_while(lab, "source.freeze.before", |lab| Ok(lab.restart_docker("a", true)?))?;
    ensure!(ended.success, "the move failed: {}", ended.error());
    ensure!(quiet_under(lab, &DOCKER)? == "b", "it is not where it went");
    connection_alive(&mut counter)?;
    drop(counter);
    DOCKER.remove(lab, "b")
}

fn an_image_that_is_not_there_is_sent(stage: &mut Stage) -> Result<()> {
    DOCKER.takes_its_image_along(&stage.lab, 67, &[])
}

fn containers_on_a_bridge_stay_together(stage: &mut Stage) -> Result<()> {
    DOCKER.stays_together_on_a_bridge(&stage.lab, true, &[])?;
    DOCKER.is_parted_from_nobody_on_a_shared_segment(&stage.lab, 78)
}

fn published_ports_are_published_where_it_goes(stage: &mut Stage) -> Result<()> {
    DOCKER.publishes_its_ports_there(&stage.lab, &[])
}

/// Redis with its log of every write in a volume.
fn start_durable(lab: &Lab, number: u8, volume: &str) -> Result<CounterClient> {
    let durable = ["--dir", "/data", "--appendonly", "yes", "--appendfsync", "everysec"];
    DOCKER.start(lab, number, &["--volume", volume, "--volume", "/anonymous"], &durable)
}

fn sh(lab: &Lab, node: &str, script: &str) -> Result<String> {
    Ok(lab.docker(node, &["exec", NAME, "sh", "-c", script])?)
}

fn volumes(lab: &Lab, node: &str) -> Result<Vec<String>> {
    let text = lab.docker(node, &["volume", "ls", "--quiet"])?;
    Ok(text.lines().map(str::to_owned).collect())
}

fn what_a_container_has_written_moves_with_it(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.start_docker()?;
    lab.docker("a", &["volume", "create", "--label", "tier=back", "log"])?;
    let mut counter = start_durable(lab, 65, "log:/data")?;
    // Files of its own, some in the place of the image's, and some of the image's gone.
    let script = "echo layer > /opt/written && mkdir /opt/deep && ln -s ../written /opt/deep/link && rmdir /home && \
                  rmdir /var/log && mkdir /var/log && echo log > /var/log/own && echo loose > /anonymous/file && \
                  chown 7:8 /opt/written && truncate -s 1G /opt/sparse && echo shared > /dev/shm/kept";
    sh(lab, "a", script)?;
    let telling = "cat /dev/shm/kept /opt/written /opt/deep/link /var/log/own /anonymous/file; ls -ld /home 2>&1; ls /var/log; \
                   stat -c '%u %g %Y' /opt/written; stat -c '%s %b' /opt/sparse; cat /proc/1/comm";
    let before = sh(lab, "a", telling)?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        DOCKER.moves(lab, &mut counter, from, to)?;
        let after = sh(lab, to, telling)?;
        ensure!(after == before, "it had {before:?}, and has {after:?}");
        sh(lab, to, "echo more >> /opt/more && cat /opt/more")?;
        ensure!(volumes(lab, from)? == ["log"], "the volumes of {from} are {:?}", volumes(lab, from)?);
        ensure!(volumes(lab, to)?.len() == 2, "the volumes of {to} are {:?}", volumes(lab, to)?);
    }
    ensure!(sh(lab, "b", "cat /opt/more")? == "more\nmore\nmore\n", "what it wrote between the moves is not there");
    let label = lab.docker("b", &["volume", "inspect", "--format", "{{.Labels.tier}}", "log"])?;
    ensure!(label.trim() == "back", "the volume's label is {label}");

    // All that was answered is in the log, from which a new Redis starts.
    drop(counter);
    let ip = Ipv4Addr::new(10, 77, 0, 65);
    let get = || -> Result<String> {
        let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
        Ok(format!("{:?}", redis.call(&["GET", "counter"])?))
    };
    let count = get()?;
    lab.docker("b", &["stop", NAME])?;
    lab.docker("b", &["start", NAME])?;
    let said = get()?;
    ensure!(said == count, "the counter was {count}, and is {said}");
    ensure!(sh(lab, "b", "cat /opt/written")? == "layer\n", "the layer is another one after stop and start");
    lab.docker("b", &["rm", "--force", "--volumes", NAME])?;
    DOCKER.release(lab, &[NAME])?;
    for node in ["a", "b"] {
        lab.docker(node, &["volume", "rm", "log"])?;
        ensure!(volumes(lab, node)?.is_empty(), "{:?} is left on {node}", volumes(lab, node)?);
    }
    Ok(())
}

fn volumes_that_are_there_already_are_left_alone(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = start_durable(lab, 66, "log:/data")?;
    let other = ["run", "--detach", "--name", "other", "--network", "none", "--volume", "log:/data"];
    let run = |node: &str, script: &str| -> Result<String> {
        let rest = ["--volume", "/usr:/usr:ro", "tranship-lab", "sh", "-c", script];
        Ok(lab.docker(node, &[&other[..], &rest[..]].concat())?)
    };
    run("b", "echo precious > /data/file && exec sleep 1000")?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Mount, "which container other uses")?;
    wait_until("the file", Duration::from_secs(5), || {
        Ok(lab.docker("b", &["exec", "other", "cat", "/data/file"]).is_ok().then_some(()))
    })?;
    lab.docker("b", &["rm", "--force", "other"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Mount, "exists already, with files in it")?;
    lab.docker("b", &["volume", "rm", "log"])?;

    lab.docker("b", &["volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs", "log"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Mount, "with another options")?;
    lab.docker("b", &["volume", "rm", "log"])?;

    run("a", "exec sleep 1000")?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Mount, "container other has volume log")?;
    lab.docker("a", &["rm", "--force", "other"])?;

    sh(lab, "a", "head -c 8M /dev/urandom > /opt/some")?;
    for fault in ["restore.after.error", "restore.after.die"] {
        restart_agent(lab, "b", &format!("destination.{fault}"))?;
        let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b"])?;
        ensure!(output.status.code() == Some(1), "with {fault} the move ended with {}", output.status);
        connection_alive(&mut counter).with_context(|| format!("after {fault}"))?;
        restart_agent(lab, "b", "")?;
        wait_until("the volumes to be gone", Duration::from_secs(30), || {
            Ok((DOCKER.names(lab, "b", &["--all"])?.is_empty() && volumes(lab, "b")?.is_empty()).then_some(()))
        })
        .with_context(|| format!("after {fault}: {:?}", volumes(lab, "b")))?;
    }
    lab.docker("b", &["volume", "create", "log"])?;
    restart_agent(lab, "b", "destination.restore.after.error")?;
    let output = lab.exec("a", &["tranship", "move", NAME, "--to", "b"])?;
    ensure!(output.status.code() == Some(1), "the move ended with {}", output.status);
    restart_agent(lab, "b", "")?;
    ensure!(volumes(lab, "b")? == ["log"], "one that was there is gone: {:?}", volumes(lab, "b")?);
    DOCKER.moves(lab, &mut counter, "a", "b").context("into a volume that was there, and empty")?;
    drop(counter);
    lab.docker("b", &["rm", "--force", "--volumes", NAME])?;
    DOCKER.release(lab, &[NAME])?;
    for node in ["a", "b"] {
        lab.docker(node, &["volume", "rm", "log"])?;
    }
    Ok(())
}

/// While a shell has its output redirected, it keeps the pipe to Docker under another number, in itself and in its children.
fn a_shell_whose_output_is_redirected_keeps_its_way_to_docker(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    (DOCKER.prepare)(lab)?;
    let script = "until [ -e /tmp/stop ]; do date; sleep 0.1; done > /tmp/out 2>&1; echo the end; echo to stderr >&2; exec sleep 1000";
    let command = ["sh", "-c", script].map(str::to_owned);
    (DOCKER.run)(lab, "a", NAME, Ipv4Addr::new(10, 77, 0, 65), DOCKER.image, &[], &command)?;
    let redirected = |node: &str| lab.docker(node, &["exec", NAME, "readlink", "/proc/1/fd/1"]);
    wait_until("the shell to redirect its output", Duration::from_secs(10), || {
        Ok((redirected("a")? == "/tmp/out\n").then_some(()))
    })?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        move_container(lab, from, NAME, to).with_context(|| format!("from {from} to {to}"))?;
    }
    lab.docker("b", &["exec", NAME, "touch", "/tmp/stop"])?;
    wait_until("what it says in docker logs", Duration::from_secs(10), || {
        let said = lab.docker("b", &["logs", NAME])?;
        Ok(said.contains("the end").then_some(()))
    })?;
    DOCKER.remove(lab, "b")
}

fn what_was_written_to_etc_hosts_stays(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_etc_files(&stage.lab, 86)
}

fn inotify_watches_on_an_overlay_move(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_watches(&stage.lab, 88)
}

fn limits_that_were_changed_stay_changed(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_changed_limits(
        &stage.lab,
        83,
        &["update", "--cpu-quota", "70000", "--memory", "200m", "--memory-swap", "300m"],
    )
}

fn mounts_behind_links_of_the_image_move(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_mounts_behind_links(&stage.lab, 92, &["--init"])
}

fn processes_of_exec_are_waited_for(stage: &mut Stage) -> Result<()> {
    DOCKER.waits_for_processes_of_exec(&stage.lab, 93)
}

/// A check runs for more than a third of the time, and shells come and go with it.
fn health_checks_stand_in_no_way(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let check = ["--health-cmd", "sleep 0.6", "--health-interval", "1s", "--health-retries", "1000"];
    let mut counter = DOCKER.start(lab, 94, &check, &[])?;
    let healthy = |node: &str| {
        wait_until("the health check", Duration::from_secs(10), || {
            Ok((DOCKER.told(lab, node, "{{.State.Health.Status}}")? == "healthy").then_some(()))
        })
    };
    healthy("a")?;
    for round in 0..4 {
        for (from, to) in [("a", "b"), ("b", "a")] {
            DOCKER.moves(lab, &mut counter, from, to).with_context(|| format!("in round {round}"))?;
        }
    }
    healthy("a")?;
    drop(counter);
    DOCKER.remove(lab, "a")
}

fn what_people_do_with_a_container_goes_on_after_a_move(stage: &mut Stage) -> Result<()> {
    DOCKER.is_the_engine_s_own_after_a_move(&stage.lab, 95)
}

fn the_node_s_host_name_is_left_behind_where_that_is_allowed(stage: &mut Stage) -> Result<()> {
    DOCKER.moves_with_the_node_s_host_name(&stage.lab, 96)
}

fn a_device_that_the_destination_lacks_is_named(stage: &mut Stage) -> Result<()> {
    DOCKER.is_refused_for_its_device(&stage.lab, 97, "device /run/own-device, which is not there")
}

fn a_docker_that_does_not_run_is_told_from_one_that_is_not_installed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let counter = DOCKER.start(lab, 98, &[], &[])?;
    drop(counter);
    lab.kill_docker("b")?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "docker does not answer at")?;
    lab.check("b", &["rm", "/run/docker.sock"])?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    refusal.names(BlockerKind::Engine, "docker is installed, but its daemon does not run")?;
    ensure!(refusal.text.contains("systemctl start docker"), "{}", refusal.text);
    lab.revive_docker("b")?;
    move_container(lab, "a", NAME, "b").context("when it runs again")?;
    DOCKER.remove(lab, "b")
}

const COMPOSE_FILE: &str = r#"version: "3.7"
services:
  cache:
    image: tranship-lab
    command: redis-server --save '' --protected-mode no --enable-debug-command yes
    volumes: ["/usr:/usr:ro", "/etc:/etc:ro"]
    tmpfs: /tmp
    networks:
      lab:
        ipv4_address: 10.77.0.99
networks:
  lab:
    external: true
    name: lab
"#;

/// Docker Compose takes a container that has come for its own: ps, logs, up, which makes no other
/// one, and down.
fn a_service_of_compose_is_its_own_after_a_move(stage: &mut Stage) -> Result<()> {
    const SERVICE: &str = "shop_cache_1";
    let lab = &stage.lab;
    lab.start_docker()?;
    for node in ["a", "b"] {
        lab.check(
            node,
            &["sh", "-c", "mkdir -p /run/shop && echo \"$0\" > /run/shop/docker-compose.yml", COMPOSE_FILE],
        )?;
    }
    let compose = |node: &str, arguments: &[&str]| -> Result<String> {
        // What it says of its work is on stderr.
        let shell = ["env", "--chdir=/run/shop", "sh", "-c", "exec docker-compose --no-ansi \"$@\" 2>&1", "sh"];
        Ok(lab.check(node, &[&shell[..], arguments].concat())?)
    };
    compose("a", &["up", "-d"])?;
    let ip = Ipv4Addr::new(10, 77, 0, 99);
    Redis::connect(lab, ip, Duration::from_secs(10))?.call(&["SET", "kept", "yes"])?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        move_container(lab, from, SERVICE, to)?;
        let listed = compose(to, &["ps"])?;
        ensure!(listed.contains(SERVICE) && listed.contains("Up"), "docker-compose ps on {to} says {listed}");
        ensure!(!compose(from, &["ps"])?.contains(SERVICE), "docker-compose ps on {from} still has it");
    }
    lab.docker("b", &["exec", SERVICE, "redis-cli", "debug", "log", "a line after the move"])?;
    wait_until("the line in docker-compose logs", Duration::from_secs(5), || {
        Ok(compose("b", &["logs"])?.contains("a line after the move").then_some(()))
    })?;
    let said = compose("b", &["up", "-d"])?;
    ensure!(said.contains("up-to-date"), "docker-compose up would make another one: {said}");
    let kept = lab.docker("b", &["exec", SERVICE, "redis-cli", "get", "kept"])?;
    ensure!(kept == "yes\n", "after up it has {kept:?}");
    compose("b", &["down"])?;
    ensure!(lab.docker("b", &["ps", "--all", "--quiet"])?.is_empty(), "docker-compose down left something");
    // What the agent had kept of it goes, too.
    ensure!(lab.exec("b", &["tranship", "doctor"])?.status.success(), "the doctor finds something left of it");
    Ok(())
}

fn posix_semaphores_and_shared_memory_go_on(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_posix_semaphores_and_shared_memory(&stage.lab, 112, &[])?;
    DOCKER.keeps_posix_semaphores_and_shared_memory(&stage.lab, 102, &["--ipc", "shareable"])
}

fn addresses_and_routes_that_programs_add_move(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_addresses_and_routes_of_its_programs(&stage.lab, 113, 114)
}

fn a_device_of_the_node_is_there_after_a_move(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_device(&stage.lab, 104)
}

fn an_init_of_the_engine_s_moves(stage: &mut Stage) -> Result<()> {
    DOCKER.keeps_its_init(&stage.lab, 101)
}

fn what_becomes_of_logs_is_said(stage: &mut Stage) -> Result<()> {
    DOCKER.says_what_becomes_of_its_logs(&stage.lab, 106, &[])?;
    DOCKER.says_what_becomes_of_its_logs(&stage.lab, 107, &["--log-driver", "local"])
}

fn a_log_goes_on_after_a_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    DOCKER.keeps_its_log(lab, 106, (&[], false)).context("json-file")?;
    DOCKER.keeps_its_log(lab, 106, (&["--log-driver", "local"], false)).context("local")?;
    let rotating = |driver, size, compress| {
        ["--log-driver", driver, "--log-opt", size, "--log-opt", "max-file=4", "--log-opt", compress]
    };
    DOCKER
        .keeps_its_log(lab, 106, (&rotating("json-file", "max-size=200k", "compress=false"), true))
        .context("json-file that rotates")?;
    DOCKER
        .keeps_its_log(lab, 106, (&rotating("local", "max-size=60k", "compress=true"), true))
        .context("local that compresses")?;
    DOCKER.keeps_a_line_without_an_end(lab, 106)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_log_goes_on_after_a_move", a_log_goes_on_after_a_move),
        ("what_becomes_of_logs_is_said", what_becomes_of_logs_is_said),
        ("a_device_of_the_node_is_there_after_a_move", a_device_of_the_node_is_there_after_a_move),
        ("addresses_and_routes_that_programs_add_move", addresses_and_routes_that_programs_add_move),
        ("an_init_of_the_engine_s_moves", an_init_of_the_engine_s_moves),
        ("posix_semaphores_and_shared_memory_go_on", posix_semaphores_and_shared_memory_go_on),
        ("a_service_of_compose_is_its_own_after_a_move", a_service_of_compose_is_its_own_after_a_move),
        ("what_people_do_with_a_container_goes_on_after_a_move", what_people_do_with_a_container_goes_on_after_a_move),
        (
            "the_node_s_host_name_is_left_behind_where_that_is_allowed",
            the_node_s_host_name_is_left_behind_where_that_is_allowed,
        ),
        ("a_device_that_the_destination_lacks_is_named", a_device_that_the_destination_lacks_is_named),
        (
            "a_docker_that_does_not_run_is_told_from_one_that_is_not_installed",
            a_docker_that_does_not_run_is_told_from_one_that_is_not_installed,
        ),
        ("mounts_behind_links_of_the_image_move", mounts_behind_links_of_the_image_move),
        ("processes_of_exec_are_waited_for", processes_of_exec_are_waited_for),
        ("health_checks_stand_in_no_way", health_checks_stand_in_no_way),
        ("what_was_written_to_etc_hosts_stays", what_was_written_to_etc_hosts_stays),
        ("inotify_watches_on_an_overlay_move", inotify_watches_on_an_overlay_move),
        ("limits_that_were_changed_stay_changed", limits_that_were_changed_stay_changed),
        ("docker_manages_the_moved_container", docker_manages_the_moved_container),
        ("its_addresses_are_announced_again_before_the_freeze", its_addresses_are_announced_again_before_the_freeze),
        (
            "what_cannot_be_carried_over_is_refused_before_the_freeze",
            what_cannot_be_carried_over_is_refused_before_the_freeze,
        ),
        ("a_network_that_is_not_there_is_made", a_network_that_is_not_there_is_made),
        ("a_network_without_a_chosen_subnet_moves", a_network_without_a_chosen_subnet_moves),
        ("addresses_that_collide_are_named", addresses_that_collide_are_named),
        ("a_move_that_fails_leaves_the_container_to_its_docker", a_move_that_fails_leaves_the_container_to_its_docker),
        ("a_decided_move_is_finished_whatever_is_killed", a_decided_move_is_finished_whatever_is_killed),
        ("a_docker_that_is_restarted_in_the_middle_is_survived", a_docker_that_is_restarted_in_the_middle_is_survived),
        ("a_docker_that_is_restarted_at_the_commit_is_survived", a_docker_that_is_restarted_at_the_commit_is_survived),
        ("a_docker_that_is_killed_in_the_resume", a_docker_that_is_killed_in_the_resume),
        ("a_docker_that_is_away_at_the_commit_is_waited_for", a_docker_that_is_away_at_the_commit_is_waited_for),
        ("a_docker_that_does_not_come_back_can_be_given_up", a_docker_that_does_not_come_back_can_be_given_up),
        ("a_docker_that_is_restarted_on_the_source_is_survived", a_docker_that_is_restarted_on_the_source_is_survived),
        ("an_image_that_is_not_there_is_sent", an_image_that_is_not_there_is_sent),
        ("containers_on_a_bridge_stay_together", containers_on_a_bridge_stay_together),
        ("published_ports_are_published_where_it_goes", published_ports_are_published_where_it_goes),
        ("what_a_container_has_written_moves_with_it", what_a_container_has_written_moves_with_it),
        (
            "a_shell_whose_output_is_redirected_keeps_its_way_to_docker",
            a_shell_whose_output_is_redirected_keeps_its_way_to_docker,
        ),
        ("volumes_that_are_there_already_are_left_alone", volumes_that_are_there_already_are_left_alone),
    ])
}
