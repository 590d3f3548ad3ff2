use anyhow::Result;
use tranship_lab::Lab;

use super::Workload;
use super::service::Service;
use super::witness::Witness;
use crate::run::Figures;

/// Tasks that do next to nothing: bench-tree, a tree of processes with threads and descriptors, or bench-tasks, many of one kind.
pub struct TreeLoad {
    service: Service,
    client: Witness,
    resident_bytes: u64,
}

impl TreeLoad {
    /// Starts the program. It listens once all tasks are there.
    pub fn start(lab: &Lab, node: &str, name: &str, (program, arguments): (&str, &[String])) -> Result<Self> {
        let mut service = Service::run(lab, node, name, program, arguments)?;
        let resident_bytes = service.number("RESIDENT")?;
        let client = Witness::start(lab)?;
        Ok(Self { service, client, resident_bytes })
    }
}

impl Workload for TreeLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        self.client.mark()
    }

    fn check(&mut self) -> Result<Figures> {
        let figures = self.client.check()?;
        // Whether all tasks are there, with what their descriptors hold.
        self.service.text(&["VERIFY"])?;
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        self.service.number("WAKEUPS")
    }
}
