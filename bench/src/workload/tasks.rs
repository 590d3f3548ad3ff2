use anyhow::{Result, bail};
use tranship_lab::Lab;

use super::Workload;
use super::service::Service;
use super::witness::Witness;
use crate::run::Figures;
use crate::suite::Tasks;

/// Many tasks of one kind, which do nothing: bench-tasks.
pub struct TasksLoad {
    service: Service,
    client: Witness,
    resident_bytes: u64,
}

impl TasksLoad {
    /// Starts so many. It listens once all are there.
    pub fn start(lab: &Lab, node: &str, name: &str, kind: Tasks, count: u32) -> Result<Self> {
        let arguments = [format!("--kind={}", kind.name()), format!("--count={count}")];
        let mut service = Service::run(lab, node, name, "bench-tasks", &arguments)?;
        let resident_bytes = service.number("RESIDENT")?;
        let client = Witness::start(lab)?;
        Ok(Self { service, client, resident_bytes })
    }
}

impl Workload for TasksLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        self.client.mark()
    }

    fn check(&mut self) -> Result<Figures> {
        let figures = self.client.check()?;
        self.service.text(&["VERIFY"])?;
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("tasks that sleep make no progress")
    }
}
