//! What runs in the container that is moved, with the client that is connected to it.

mod crowd;
mod idle;
mod iperf;
mod postgres;
mod redis;
pub mod service;
mod setter;
mod stencil;
mod traffic;
mod tree;
mod witness;
mod writer;

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, bail};
use tranship_lab::Lab;
use tranship_types::EngineName;
use tranship_workloads::traffic::Course;

pub use self::redis::make_in_docker;
use crate::run::Figures;
use crate::suite::Load;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
/// How long a workload may take to begin, or a client to get an answer.
const LIMIT: Duration = Duration::from_secs(120);

/// A running workload with its client.
pub trait Workload {
    /// Resident memory before the move, in bytes.
    fn resident_bytes(&self) -> u64;

    /// Begins the stretch of time that the move falls into.
    fn mark(&mut self) -> Result<()>;

    /// Waits until the client is served again, checks that nothing was lost or changed, and tells what was seen since the
    /// mark.
    fn check(&mut self) -> Result<Figures>;

    /// Checks what takes longer than a move, and what no later move could mend: after the last one.
    fn check_all(&mut self) -> Result<()> {
        Ok(())
    }

    /// What it has done so far, in units of its own that grow steadily.
    fn progress(&mut self) -> Result<u64>;

    /// What its client received over time, and when the mark was (s since the Unix epoch), where it has noted that.
    fn course(&mut self) -> Option<(f64, Course)> {
        None
    }
}

/// Starts a workload in a container of this name and waits until it is in its stride.
pub fn start(lab: &Lab, node: &str, name: &str, (load, engine): (&Load, EngineName)) -> Result<Box<dyn Workload>> {
    let measured = match load {
        Load::Redis { .. } => true,
        Load::Volume { .. } => engine == EngineName::Docker,
        _ => engine == EngineName::Runc,
    };
    if !measured {
        bail!("{load:?} is not measured under {engine}");
    }
    Ok(match *load {
        Load::Redis { keys, sets } => Box::new(redis::RedisLoad::start(lab, node, name, engine, keys, sets)?),
        Load::Crowd { containers, keys } => Box::new(crowd::CrowdLoad::start(lab, node, name, containers, keys)?),
        Load::Writer { bytes, rate } => Box::new(writer::WriterLoad::start(lab, node, name, bytes, rate)?),
        Load::Volume { bytes, rate } => Box::new(writer::WriterLoad::start_in_volume(lab, node, name, bytes, rate)?),
        Load::Stencil { iterations } => Box::new(stencil::StencilLoad::start(lab, node, name, iterations)?),
        Load::Postgres { shared_mib, scale } => {
            Box::new(postgres::PostgresLoad::start(lab, node, name, shared_mib, scale)?)
        }
        Load::Tree { children, threads, descriptors } => {
            let counts = [("children", children), ("threads", threads), ("descriptors", descriptors)];
            let arguments = counts.map(|(what, count)| format!("--{what}={count}"));
            Box::new(tree::TreeLoad::start(lab, node, name, ("bench-tree", &arguments))?)
        }
        Load::Tasks { kind, count } => {
            let arguments = [format!("--kind={}", kind.name()), format!("--count={count}")];
            Box::new(tree::TreeLoad::start(lab, node, name, ("bench-tasks", &arguments))?)
        }
        Load::Traffic(traffic) => Box::new(traffic::TrafficLoad::start(lab, node, name, traffic)?),
        Load::Iperf => Box::new(iperf::IperfLoad::start(lab, node, name)?),
        Load::Busybox => Box::new(idle::IdleLoad::start(lab, node, name)?),
    })
}
