//! What end-to-end scenarios have in common: a lab for each test binary, tests that run one after the other and never
//! pass in silence, and the assertions that hold after every move.
//!
//! ```no_run
//! use std::process::ExitCode;
//! use tranship_e2e::{Stage, exactly_one_runs, move_container, scenarios};
//!
//! fn moves(stage: &mut Stage) -> anyhow::Result<()> {
//!     // … stage.lab.run("a", "web", …)
//!     let report = move_container(&stage.lab, "a", "web", "b")?;
//!     assert_eq!(exactly_one_runs(&stage.lab, "web")?, "b");
//!     Ok(())
//! }
//!
//! fn main() -> ExitCode {
//!     scenarios(&[("a_container_moves", moves)])
//! }
//! ```

mod agents;
mod asked;
mod bridged;
mod computation;
mod containers;
mod dialogue;
mod engines;
mod guest;
mod holders;
mod kept;
mod limits;
mod lives;
mod managed;
mod moves;
mod moving;
mod networks;
mod postgres;
mod quiet;
mod runner;
mod setups;
mod status;
mod switch;
mod torture;

pub use agents::{Log, configure, is_gone, restart_agent, send, state, track_by};
pub use asked::{arguments, asked, asked_modes};
pub use bridged::dry_run;
pub use computation::{Computation, Progress};
pub use containers::{Copy, copies, exactly_one_runs, nothing_left, remove, run_beside};
pub use dialogue::Dialogue;
pub use engines::{CONTAINERD, DOCKER, HOLDS, PODMAN, containers_of};
pub use guest::{Guest, ZooLine};
pub use kept::{ASK, ECHO, Talk};
pub use limits::{has_limits, is_version_2, limits, set_limit};
pub use lives::Lives;
pub use managed::{Dialect, Managed, Run};
pub use moves::{
    Refusal, connection_alive, move_container, move_with, newest_group_report, refused_move, refused_move_with,
    second_move_succeeds,
};
pub use moving::{Ended, MODES, Moving};
pub use postgres::{make_pgbench_tables, pgbench, postgres_accepts, postgres_programs};
pub use quiet::{Helper, flip_record, processes, quiet, quiet_under, tls_process};
pub use runner::{Scenario, Stage, scenarios, wait_until, whole_matrices};
pub use status::serve_status;
pub use switch::{Capture, is_member, snooping};
pub use torture::{TortureLine, Torturer};
