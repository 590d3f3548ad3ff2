//! More packets than can be held.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, remove, restart_agent};

use super::kinds::begin_datagrams;
use super::{IP, NAME, moves, run};

/// For how long the restore is delayed: more comes in that time than 1 MiB holds.
const PAUSE_MS: u64 = 3000;
/// More than a program has unread when it is frozen, and fewer than are held.
const FEW: u64 = 1000;

pub(super) fn is_told(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let file = lab.path("a", "/etc/tranship/agent.toml")?;
    let settings = fs::read_to_string(&file)?;
    fs::write(&file, format!("{settings}\n[network]\nhold_mib = 1\n"))?;
    restart_agent(lab, "a", "")?;
    restart_agent(lab, "b", &format!("destination.restore.before.delay-{PAUSE_MS}"))?;

    let datagrams = begin_datagrams(lab, IP)?;
    std::thread::sleep(Duration::from_millis(300));
    let report = moves(lab, NAME, "a", "b")?;
    std::thread::sleep(Duration::from_millis(300));
    let tally = datagrams.end()?;
    let said =
        report.ways.iter().find_map(|way| way.strip_suffix(" packets more than can be held were dropped, the oldest"));
    let said = said.and_then(|way| way.strip_prefix("network: ")).with_context(|| format!("{:?}", report.ways))?;
    eprintln!("{} sent, {} lost {:?}, {said} dropped", tally.sent, tally.lost, tally.lost_range);
    let dropped: u64 = said.parse()?;
    ensure!(
        tally.lost > 0 && tally.lost <= dropped,
        "{} were lost, {dropped} are said to have been dropped",
        tally.lost
    );
    // On a busy machine several come just when the gate is opened, and late: their order is another scenario's.
    ensure!(tally.doubled == 0, "{} doubled", tally.doubled);
    // What was held is without a gap: it is what came last. So the first one lost is the first that came in the blackout, and its
    // echo would have been the first behind the pause.
    let (first, last) = tally.lost_range.context("nothing was lost")?;
    ensure!(last - first + 1 == tally.lost, "{} were lost between {first} and {last}", tally.lost);
    let pause = tally.course.longest_gap_begun(0.0).context("there was no pause")?;
    let before = ((pause - tally.course.begun) * 1e3).round() as usize;
    let before: u64 = tally.course.passed[..before].iter().sum();
    ensure!(
        before <= first && first < before + FEW,
        "{before} came back before the pause, and {first} is the first lost"
    );

    fs::write(&file, settings)?;
    restart_agent(lab, "a", "")?;
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}
