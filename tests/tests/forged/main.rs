//! Images of CRIU that were forged: a compromised peer sends the configuration of an ordinary container, and
//! images that give it more.

use std::fs;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    Ended, Moving, Stage, connection_alive, quiet, remove, restart_agent, scenarios, second_move_succeeds, send, state,
    wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{BlockerKind, Mode};

const NAME: &str = "forged";
const IP: std::net::Ipv4Addr = std::net::Ipv4Addr::new(10, 77, 0, 78);
const CONFIGURATION: &str = "/etc/tranship/agent.toml";
const FORGE: &str = include_str!("forge.py");
const PATIENCE: Duration = Duration::from_secs(30);
/// Changes of images, with what a refusal has to name.
const CHANGES: [(&str, &str); 4] = [
    ("capability", "give process 1 (redis-server) CAP_SYS_ADMIN, which its configuration does not"),
    ("mount", "have a mount at /mnt with flags that no mount has"),
    ("pid-namespace", "leave it in the node's pid namespace"),
    ("file", "have a file autofs-9.img"),
];

/// Moves the container from node a to node b, whose agent finds images that have been changed since they came.
fn move_forged(lab: &Lab, change: &str) -> Result<Ended> {
    restart_agent(lab, "b", "destination.restore.before.hold")?;
    let agent = lab.agent_pid("b")?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
    wait_until("the agent to be held", PATIENCE, || Ok((state(agent) == Some('T')).then_some(())))?;
    let migrations = fs::read_dir(lab.path("b", "/run/tranship/migrations")?)?;
    let images: Vec<_> =
        migrations.flatten().map(|one| one.path().join("images")).filter(|path| path.exists()).collect();
    let [images] = images.as_slice() else { anyhow::bail!("the images are in {images:?}") };
    let forged = Command::new("python3").args(["-c", FORGE]).arg(images).arg(change).status()?;
    send(Signal::SIGCONT, agent)?;
    let ended = moving.end();
    ensure!(forged.success(), "{change}: {forged}");
    ended
}

/// Has node b take nothing but ordinary containers, or privileged ones too.
fn accept(lab: &Lab, privileged: bool) -> Result<()> {
    let text = fs::read_to_string(lab.path("b", CONFIGURATION)?)?;
    let own = |line: &&str| line.starts_with("privileged = ");
    let line =
        text.lines().find(own).context("the lab's configuration does not say whether containers may be privileged")?;
    Ok(fs::write(lab.path("b", CONFIGURATION)?, text.replacen(line, &format!("privileged = {privileged}"), 1))?)
}

/// What a forged image says is refused by name before anything of it runs: the container goes on where it was,
/// and moves as it is afterwards.
fn forged_images_are_refused_by_name(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    accept(lab, false)?;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, PATIENCE)?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    for (change, words) in CHANGES {
        let ended = move_forged(lab, change)?;
        let error = ended.error().to_owned();
        let start = format!("cannot restore {NAME} on node b: the images that node a sent {words}");
        ensure!(error.contains(&start), "{change}: {start:?} not in {error:?}");
        let blockers = ended.report.map(|report| report.blockers).unwrap_or_default();
        ensure!(blockers.iter().any(|one| one.kind == BlockerKind::Policy), "{change}: {blockers:?}");
        ensure!(quiet(lab, NAME)? == "a", "{change}: the container is not on node a");
        connection_alive(&mut counter).with_context(|| change.to_owned())?;
    }
    restart_agent(lab, "b", "")?;
    second_move_succeeds(lab, NAME)?;
    connection_alive(&mut counter)?;
    accept(lab, true)?;
    restart_agent(lab, "b", "")?;
    drop(counter);
    remove(lab, NAME)
}

/// What such a change does where nothing is compared: the images are forged in earnest.
fn a_peer_of_privileged_containers_may_give_them_more(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, PATIENCE)?;
    let ended = move_forged(lab, "capability")?;
    ensure!(ended.success, "{}", ended.error());
    ensure!(quiet(lab, NAME)? == "b");
    let status = lab.check("b", &["sh", "-c", "cat /proc/$(pgrep -x redis-server | head -n 1)/status"])?;
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:")).context("no CapEff")?;
    ensure!(u64::from_str_radix(bits.trim(), 16)? >> 21 & 1 == 1, "it has the capabilities {bits}");
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("forged_images_are_refused_by_name", forged_images_are_refused_by_name),
        ("a_peer_of_privileged_containers_may_give_them_more", a_peer_of_privileged_containers_may_give_them_more),
    ])
}
