//! A test of the test: the original is thawed by hand while its copy runs, and that is seen.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Moving, Stage, copies, restart_agent, send, state, wait_until};
use tranship_types::Mode;

use crate::play::{NAME, Play};

const SOON: Duration = Duration::from_secs(20);

pub fn two_lives_at_a_time_are_found(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut play = Play::begin(lab, None)?;
    play.lived_once().context("before the move")?;
    restart_agent(lab, "a", "source.release.before.hold")?;
    let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Cold)?;
    wait_until("the agent to be held", SOON, || Ok((state(agent) == Some('T')).then_some(())))?;
    play.goes_on().context("the copy runs on node b")?;
    play.lived_once().context("the original is frozen")?;

    let original = copies(lab, NAME)?.into_iter().find(|copy| copy.node == "a").context("there is no original")?;
    ensure!(!original.runs, "the original runs before it is thawed: {original:?}");
    let cgroup = format!("tranship-lab/a/{NAME}");
    for (root, file, word) in [
        ("/sys/fs/cgroup/freezer", "freezer.state", "THAWED"),
        ("/sys/fs/cgroup/unified", "cgroup.freeze", "0"),
        ("/sys/fs/cgroup", "cgroup.freeze", "0"),
    ] {
        let path = Path::new(root).join(&cgroup).join(file);
        if path.exists() {
            fs::write(&path, word).with_context(|| path.display().to_string())?;
        }
    }
    original.pids.iter().try_for_each(|pid| send(Signal::SIGCONT, *pid))?;
    let found = wait_until("the two lives to be found", SOON, || Ok(play.lived_once().err()));
    send(Signal::SIGCONT, agent)?;
    let found = format!("{:#}", found?);
    ensure!(found.contains("ran at the same time") && found.matches("pid ").count() == 2, "{found}");
    eprintln!("        {found}");
    // The two have answered the same client: what is left of this is of no use to others.
    drop((play, moving));
    crate::renew(stage)
}
