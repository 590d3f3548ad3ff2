//! Nodes on one machine: network, mount and pid namespaces that stand for hosts, for trying things out, tests, the demo
//! and benchmarks.
//!
//! ```text
//!             node a                    node b                   client
//!   init ─ transhipd ─ runc   init ─ transhipd ─ runc   init ─ counter, psql, curl …
//!   own: network, /run, /tmp, /srv, /sys, /etc/tranship, /var/lib/{tranship,containers,cni}, processes, cgroup parent
//!   shared: the kernel, and the rest of the host's files; the working copy, wherever it is
//! ```
//!
//! ```no_run
//! use std::time::Duration;
//! use tranship_lab::{CounterClient, Lab, Redis, RunOptions, UpOptions, redis_command};
//!
//! # fn main() -> tranship_lab::Result<()> {
//! let lab = Lab::up(&UpOptions::default())?;
//! let ip = "10.77.0.10".parse().unwrap();
//! lab.run("a", "redis", &RunOptions::new(ip, redis_command()))?;
//! let redis = Redis::connect(&lab, ip, Duration::from_secs(5))?;
//! let mut counter = CounterClient::start(&lab, (ip, 6379).into(), "counter", Duration::from_micros(500))?;
//! counter.mark()?;
//! lab.move_container("a", "redis", "b")?;
//! let seen = counter.wait_replies(100, Duration::from_secs(5))?;
//! println!("client gap: {:.1} ms", seen.since_mark.longest.ms);
//! lab.down()
//! # }
//! ```

mod agent;
mod amount;
mod cgroup;
mod container;
mod containerd;
mod counter;
mod daemon;
mod docker;
mod down;
mod error;
mod hold;
mod lab;
mod podman;
mod process;
mod program;
mod redis;
pub mod resp;
mod rootfs;
mod snapshot;
mod spec;
mod state;
mod supervised;
mod switch;

pub use agent::report_of;
pub use amount::{Rate, parse_size};
pub use container::runc_root;
pub use containerd::CLIENT as CTR;
pub use counter::{CounterClient, CounterReport, Gap, LISTED_GAP_MS, Window, count};
pub use docker::{CLIENT as DOCKER, DOCKER_DATA};
pub use down::{take_down, take_down_own};
pub use error::{LabError, Result};
pub use hold::hold;
pub use lab::{Lab, UpOptions};
pub use podman::PROGRAM as PODMAN;
pub use process::{patience, slowness};
pub use program::{find_program, program_directory, working_copies};
pub use redis::{REDIS_PORT, Redis, redis_command};
pub use snapshot::Snapshot;
pub use spec::RunOptions;
pub use state::CLIENT;
pub use supervised::no_systemd;
