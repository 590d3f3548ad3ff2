//! What cannot be carried is refused before the freeze, by name, unless the user allows the move to lose it.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::Plan;
use tranship_e2e::{Guest, Stage, exactly_one_runs, move_with, refused_move, refused_move_with, remove, scenarios};
use tranship_lab::{RunOptions, find_program};

const NAME: &str = "refused";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 51);
const PORT: u16 = 7000;
const PATIENCE: Duration = Duration::from_secs(60);

fn what_is_lost_by_a_move_is_refused_unless_it_is_allowed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let program = find_program("zoo")?;
    let mut options = RunOptions::new(IP, ["/opt/zoo", "--only", "eventfd_semaphore"]);
    options.binds.push((program, "/opt/zoo".into()));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, IP, PORT)?.zoo(PATIENCE)?;

    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.status == 3 && refusal.blockers.len() == 1, "{refusal:#?}");
    let blocker = &refusal.blockers[0];
    ensure!(blocker.allow.as_deref() == Some("eventfd-semaphore") && blocker.pid.is_some(), "{blocker:?}");
    ensure!(blocker.remedy.ends_with(", or give --allow eventfd-semaphore"), "{blocker:?}");
    let other = refused_move_with(lab, "a", NAME, "b", &["--allow", "deadline-scheduling"])?;
    ensure!(other.blockers == refusal.blockers, "another kind was allowed: {other:#?}");
    let unknown = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--allow", "semaphores"])?;
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(unknown.status.code() == Some(2) && said.contains("use one of: "), "{:?}: {said}", unknown.status);

    let allow = ["--allow", "eventfd-semaphore"];
    let dry_run = [&["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"][..], &allow].concat();
    let text = lab.check("a", &dry_run)?;
    let plan: Plan = serde_json::from_str(text.trim()).context(text)?;
    ensure!(plan.blockers.is_empty() && plan.allowed == refusal.blockers, "{plan:#?}");
    let report = move_with(lab, "a", NAME, "b", &allow)?;
    ensure!(report.allowed == refusal.blockers, "the report does not list it: {report:#?}");
    ensure!(exactly_one_runs(lab, NAME)? == "b", "it was not moved");
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[(
        "what_is_lost_by_a_move_is_refused_unless_it_is_allowed",
        what_is_lost_by_a_move_is_refused_unless_it_is_allowed,
    )])
}
