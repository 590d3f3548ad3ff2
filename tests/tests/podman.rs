//! Containers of Podman move from one node to another, and are that node's Podman's own afterwards.

use std::net::Ipv4Addr;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    PODMAN, Stage, connection_alive, nothing_left, quiet_under, refused_move, restart_agent, scenarios, wait_until,
    whole_matrices,
};
use tranship_lab::{Lab, Redis, RunOptions};
use tranship_types::BlockerKind;

const NAME: &str = "cache";
fn podman_manages_the_moved_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let options = [
        "--restart",
        "always",
        "--memory",
        "256m",
        "--env",
        "COLOUR=deep\nblue",
        "--label",
        "tier=back",
        "--cap-drop",
        "CHOWN",
        "--sysctl",
        "net.core.somaxconn=99",
        "--health-cmd",
        "true",
        "--health-interval",
        "disable",
        "--add-host",
        "db:10.77.0.9",
        "--stop-timeout",
        "3",
        "--volume",
        "kept:/srv",
    ];
    let mut counter = PODMAN.start(lab, 70, &options, &[])?;
    let telling = "{{.Config.Hostname}} {{.HostConfig.Memory}} {{.HostConfig.RestartPolicy.Name}} {{.Config.Labels}} \
                   {{.Config.Healthcheck}} {{.Config.StopTimeout}} {{.HostConfig.ExtraHosts}} {{.EffectiveCaps}} {{.Image}} \
                   {{range .NetworkSettings.Networks}}{{.IPAddress}} {{.MacAddress}}{{end}}";
    let before = PODMAN.told(lab, "a", telling)?;
    lab.podman(
        "a",
        &[
            "exec",
            NAME,
            "sh",
            "-c",
            "echo layer > /opt/written; echo volume > /srv/written; echo shared > /dev/shm/kept",
        ],
    )?;
    PODMAN.moves(lab, &mut counter, "a", "b")?;
    let after = PODMAN.told(lab, "b", telling)?;
    ensure!(after == before, "the container was {before}, and is {after}");
    let listed = lab.check("b", &["tranship", "ls"])?;
    let lines: Vec<&str> = listed.lines().filter(|line| line.contains("podman") || line.contains("runc")).collect();
    ensure!(lines.len() == 1 && lines[0].contains(NAME) && lines[0].contains("podman"), "tranship ls says: {listed}");

    let said = lab.podman(
        "b",
        &[
            "exec",
            NAME,
            "sh",
            "-c",
            "cat /proc/1/comm /proc/sys/net/core/somaxconn /opt/written /srv/written /dev/shm/kept; echo $COLOUR",
        ],
    )?;
    ensure!(
        said == "redis-server\n99\nlayer\nvolume\nshared\ndeep blue\n",
        "podman exec on the destination says {said:?}"
    );
    let ip = Ipv4Addr::new(10, 77, 0, 70);
    // A reason for Redis to write a line to its log.
    lab.podman("b", &["exec", NAME, "redis-cli", "debug", "log", "a line after the move"])?;
    wait_until("the line in podman logs", Duration::from_secs(5), || {
        Ok(lab.podman("b", &["logs", NAME])?.contains("a line after the move").then_some(()))
    })?;
    PODMAN.moves(lab, &mut counter, "b", "a").context("back again")?;
    PODMAN.moves(lab, &mut counter, "a", "b").context("and once more")?;

    drop(counter);
    lab.podman("b", &["stop", NAME])?;
    ensure!(PODMAN.names(lab, "b", &[])?.is_empty(), "podman stop on the destination did not stop it");
    lab.podman("b", &["start", NAME])?;
    Redis::connect(lab, ip, Duration::from_secs(10)).context("after podman stop and start on the destination")?;
    PODMAN.remove(lab, "b")?;
    PODMAN.is_gone(lab, "b")
}

fn what_cannot_be_carried_over_is_refused_before_the_freeze(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = PODMAN.start(lab, 71, &[], &[])?;
    let pid = PODMAN.told(lab, "a", "{{.State.Pid}}")?;

    lab.podman("b", &["create", "--name", NAME, "tranship-lab", "sleep", "1"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::NameTaken, "has a container")?;
    lab.podman("b", &["rm", NAME])?;

    lab.check("b", &["sed", "-i", "s/^tranship =/other =/", "/etc/containers/containers.conf"])?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "does not know the runtime tranship")?;
    lab.check("b", &["sed", "-i", "s/^other =/tranship =/", "/etc/containers/containers.conf"])?;

    lab.run("a", NAME, &RunOptions::new(Ipv4Addr::new(10, 77, 0, 72), ["sleep", "1000"]))?;
    refused_move(lab, "a", NAME, "b")?.names(BlockerKind::Engine, "in runc and in podman")?;
    lab.stop("a", NAME)?;

    connection_alive(&mut counter)?;
    ensure!(PODMAN.told(lab, "a", "{{.State.Pid}}")? == pid, "the container is another process");
    PODMAN.moves(lab, &mut counter, "a", "b").context("when nothing is in the way any more")?;
    drop(counter);
    PODMAN.remove(lab, "b")
}

fn a_network_that_is_not_there_is_made(stage: &mut Stage) -> Result<()> {
    PODMAN.makes_a_network_that_is_not_there(&stage.lab, 110)
}

fn a_network_without_a_chosen_subnet_moves(stage: &mut Stage) -> Result<()> {
    PODMAN.moves_from_a_network_without_a_chosen_subnet(&stage.lab)
}

fn addresses_that_collide_are_named(stage: &mut Stage) -> Result<()> {
    PODMAN.names_addresses_that_collide(&stage.lab, 111)
}

fn a_move_that_fails_leaves_the_container_to_its_podman(stage: &mut Stage) -> Result<()> {
    PODMAN.survives_failed_moves(&stage.lab, 73)
}

fn a_decided_move_is_finished_whatever_is_killed(stage: &mut Stage) -> Result<()> {
    PODMAN.finishes_decided_moves(&stage.lab, 74)
}

/// Whatever of the start is killed between the decision and the resume: the copy is made again under a new one.
fn a_start_that_is_killed_at_the_commit_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let programs = [(78, "podman"), (79, "conmon"), (80, "runc")];
    let killed = if whole_matrices() { programs.len() } else { 1 };
    for (number, program) in programs.into_iter().take(killed) {
        let mut counter = PODMAN.start(lab, number, &["--restart", "always"], &[])?;
        let over = "pgrep -x -r D,R,S,T podman > /dev/null || exit 0";
        let kill = format!(
            "kill -KILL $(pgrep -x {program}); for i in $(seq 1000); do {over}; sleep 0.01; done; echo the start goes on; exit 1"
        );
        let meddle = |lab: &Lab| Ok(lab.check("b", &["sh", "-c", &kill]).map(drop)?);
        let ended = PODMAN.moved_while(lab, "source.commit.after", meddle)?;
        let said = format!("with {program} killed: {}", ended.error());
        ensure!(ended.success, "the move did not end well, {said}");
        ensure!(quiet_under(lab, &PODMAN).context(said.clone())? == "b", "it is not where it went, {said}");
        connection_alive(&mut counter).context(said.clone())?;
        PODMAN.moves(lab, &mut counter, "b", "a").context("back again").context(said)?;
        drop(counter);
        PODMAN.remove(lab, "a")?;
    }
    Ok(())
}

/// `podman start` there is stopped before the decision, and killed when the copy has run for a moment: nobody has told Podman that it does, and
/// no other start could be made of what runs. It is said, and the container moves on.
fn a_start_that_is_killed_in_the_resume_is_survived(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = PODMAN.start(lab, 81, &["--restart", "always"], &[])?;
    let signal = |signal: &str| lab.check("b", &["pkill", signal, "-x", "podman"]).map(drop);
    let moving = PODMAN.begun_from(lab, ("a", "b"), "source.commit.after", |_| Ok(signal("-STOP")?))?;
    connection_alive(&mut counter).context("while the start is stopped")?;
    signal("-KILL")?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not end well: {}", ended.error());
    connection_alive(&mut counter)?;
    let ways = ended.report.map(|report| report.ways).unwrap_or_default();
    let words = "takes cache, which runs, for a container that was never started; move it on";
    ensure!(ways.iter().any(|way| way.contains(words)), "no word of it among {ways:?}");
    PODMAN.is_gone(lab, "a")?;
    lab.check("b", &["tranship", "doctor"])?;
    PODMAN.moves(lab, &mut counter, "b", "a").context("on, to where it is Podman's own again")?;
    drop(counter);
    PODMAN.remove(lab, "a")
}

/// A pager that does not answer for a while has lost nothing: the copy is not made again, for which the stopped
/// `podman start` would have to end.
fn a_pager_that_stalls_in_the_resume_is_waited_for(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = PODMAN.start(lab, 82, &["--restart", "always"], &[])?;
    // Not the shell itself, whose words these are, too.
    let stop = "pagers=$(pgrep -f 'transhipd page[r]'); test -n \"$pagers\"; kill -STOP $pagers; pkill -STOP -x podman; \
                { sleep 4; kill -CONT $pagers; } > /dev/null 2>&1 &";
    let meddle = |lab: &Lab| Ok(lab.check("b", &["sh", "-ec", stop]).map(drop)?);
    let log = || Ok::<_, anyhow::Error>(std::fs::read_to_string(lab.path("b", "/run/tranship/agent.log")?)?);
    let before = log()?.len();
    let moving = PODMAN.begun_from(lab, ("a", "b"), "source.commit.after", meddle)?;
    let resumed = wait_until("the copy to go on", Duration::from_secs(15), || Ok(connection_alive(&mut counter).ok()));
    lab.check("b", &["pkill", "-CONT", "-x", "podman"])?;
    resumed?;
    let ended = moving.end()?;
    ensure!(ended.success, "the move did not end well: {}", ended.error());
    let log = log()?;
    let said = log.get(before..).unwrap_or(&log);
    ensure!(!said.contains("the held tasks are lost"), "the copy was made again: {said}");
    PODMAN.moves(lab, &mut counter, "b", "a").context("back again")?;
    drop(counter);
    PODMAN.remove(lab, "a")
}

/// Where the lab puts the containers of node a.
const CGROUP: [&str; 2] = ["--cgroup-parent", "/tranship-lab/a"];

fn an_image_that_is_not_there_is_sent(stage: &mut Stage) -> Result<()> {
    PODMAN.takes_its_image_along(&stage.lab, 77, &CGROUP)
}

fn containers_on_a_bridge_stay_together(stage: &mut Stage) -> Result<()> {
    // Without aardvark-dns, which the lab lacks, Podman resolves no names.
    PODMAN.stays_together_on_a_bridge(&stage.lab, false, &CGROUP)?;
    PODMAN.is_parted_from_nobody_on_a_shared_segment(&stage.lab, 78)
}

fn published_ports_are_published_where_it_goes(stage: &mut Stage) -> Result<()> {
    PODMAN.publishes_its_ports_there(&stage.lab, &CGROUP)
}

/// While a container arrives, `podman start` has it locked: whoever lists does not wait for that.
fn an_arriving_container_is_listed_at_once(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut counter = PODMAN.start(lab, 75, &[], &[])?;
    lab.podman_run("b", "older", Ipv4Addr::new(10, 77, 0, 76), &[], &["sleep".to_owned(), "1000".to_owned()])?;
    restart_agent(lab, "a", "source.freeze.before.hold")?;
    let mut moving = lab.move_command("a", NAME, "b")?.stderr(Stdio::null()).spawn()?;
    let arrives =
        || Ok((!lab.check("b", &["sh", "-c", "ls /run/tranship/restores || true"])?.is_empty()).then_some(()));
    wait_until("the container to arrive", Duration::from_secs(20), arrives)?;
    for _ in 0..5 {
        let listed = lab.check("b", &["timeout", "10", "tranship", "ls"])?;
        ensure!(listed.contains("older") && listed.contains(NAME), "tranship ls says: {listed}");
    }
    restart_agent(lab, "a", "")?;
    moving.wait()?;
    wait_until("the destination to be as it was", Duration::from_secs(30), || Ok(nothing_left(lab, "b", NAME).ok()))?;
    connection_alive(&mut counter)?;
    drop(counter);
    lab.podman("b", &["rm", "--force", "--time", "0", "older"])?;
    PODMAN.is_gone(lab, "b")?;
    PODMAN.remove(lab, "a")
}

fn what_was_written_to_etc_hosts_stays(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_etc_files(&stage.lab, 87)
}

fn inotify_watches_on_an_overlay_move(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_watches(&stage.lab, 89)
}

fn limits_that_were_changed_stay_changed(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_changed_limits(
        &stage.lab,
        84,
        &["update", "--cpu-quota", "70000", "--memory", "200m", "--memory-swap", "300m"],
    )
}

fn mounts_behind_links_of_the_image_move(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_mounts_behind_links(&stage.lab, 92, &[])
}

fn processes_of_exec_are_waited_for(stage: &mut Stage) -> Result<()> {
    PODMAN.waits_for_processes_of_exec(&stage.lab, 93)
}

fn a_command_of_one_word_moves(stage: &mut Stage) -> Result<()> {
    PODMAN.moves_with_a_command_of_one_word(&stage.lab, 95)
}

fn what_people_do_with_a_container_goes_on_after_a_move(stage: &mut Stage) -> Result<()> {
    PODMAN.is_the_engine_s_own_after_a_move(&stage.lab, 96)
}

fn the_node_s_host_name_is_left_behind_where_that_is_allowed(stage: &mut Stage) -> Result<()> {
    PODMAN.moves_with_the_node_s_host_name(&stage.lab, 97)
}

fn posix_semaphores_and_shared_memory_go_on(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_posix_semaphores_and_shared_memory(&stage.lab, 98, &[])
}

fn a_device_that_podman_does_not_know_is_named(stage: &mut Stage) -> Result<()> {
    PODMAN.is_refused_for_its_device(&stage.lab, 101, "device /dev/own, and Podman does not say")
}

fn addresses_and_routes_that_programs_add_move(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_addresses_and_routes_of_its_programs(&stage.lab, 113, 114)
}

fn a_device_of_the_node_is_there_after_a_move(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_device(&stage.lab, 99)
}

fn an_init_of_the_engine_s_moves(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_init(&stage.lab, 103)
}

fn what_becomes_of_logs_is_said(stage: &mut Stage) -> Result<()> {
    PODMAN.says_what_becomes_of_its_logs(&stage.lab, 105, &["--log-driver", "k8s-file"])
}

fn a_log_goes_on_after_a_move(stage: &mut Stage) -> Result<()> {
    PODMAN.keeps_its_log(&stage.lab, 105, (&["--log-driver", "k8s-file"], false))
}

fn main() -> ExitCode {
    if !whole_matrices() {
        println!("skipped: killed starts but that of podman itself; `make test-engines` kills conmon and runc, too");
    }
    scenarios(&[
        ("a_log_goes_on_after_a_move", a_log_goes_on_after_a_move),
        ("what_becomes_of_logs_is_said", what_becomes_of_logs_is_said),
        ("a_device_of_the_node_is_there_after_a_move", a_device_of_the_node_is_there_after_a_move),
        ("addresses_and_routes_that_programs_add_move", addresses_and_routes_that_programs_add_move),
        ("an_init_of_the_engine_s_moves", an_init_of_the_engine_s_moves),
        ("a_device_that_podman_does_not_know_is_named", a_device_that_podman_does_not_know_is_named),
        ("posix_semaphores_and_shared_memory_go_on", posix_semaphores_and_shared_memory_go_on),
        ("what_people_do_with_a_container_goes_on_after_a_move", what_people_do_with_a_container_goes_on_after_a_move),
        (
            "the_node_s_host_name_is_left_behind_where_that_is_allowed",
            the_node_s_host_name_is_left_behind_where_that_is_allowed,
        ),
        ("mounts_behind_links_of_the_image_move", mounts_behind_links_of_the_image_move),
        ("processes_of_exec_are_waited_for", processes_of_exec_are_waited_for),
        ("a_command_of_one_word_moves", a_command_of_one_word_moves),
        ("what_was_written_to_etc_hosts_stays", what_was_written_to_etc_hosts_stays),
        ("inotify_watches_on_an_overlay_move", inotify_watches_on_an_overlay_move),
        ("limits_that_were_changed_stay_changed", limits_that_were_changed_stay_changed),
        ("podman_manages_the_moved_container", podman_manages_the_moved_container),
        (
            "what_cannot_be_carried_over_is_refused_before_the_freeze",
            what_cannot_be_carried_over_is_refused_before_the_freeze,
        ),
        ("a_network_that_is_not_there_is_made", a_network_that_is_not_there_is_made),
        ("a_network_without_a_chosen_subnet_moves", a_network_without_a_chosen_subnet_moves),
        ("addresses_that_collide_are_named", addresses_that_collide_are_named),
        ("a_move_that_fails_leaves_the_container_to_its_podman", a_move_that_fails_leaves_the_container_to_its_podman),
        ("a_decided_move_is_finished_whatever_is_killed", a_decided_move_is_finished_whatever_is_killed),
        ("a_start_that_is_killed_at_the_commit_is_survived", a_start_that_is_killed_at_the_commit_is_survived),
        ("a_start_that_is_killed_in_the_resume_is_survived", a_start_that_is_killed_in_the_resume_is_survived),
        ("a_pager_that_stalls_in_the_resume_is_waited_for", a_pager_that_stalls_in_the_resume_is_waited_for),
        ("an_image_that_is_not_there_is_sent", an_image_that_is_not_there_is_sent),
        ("containers_on_a_bridge_stay_together", containers_on_a_bridge_stay_together),
        ("published_ports_are_published_where_it_goes", published_ports_are_published_where_it_goes),
        ("an_arriving_container_is_listed_at_once", an_arriving_container_is_listed_at_once),
    ])
}
