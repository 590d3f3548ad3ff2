use anyhow::Result;
use tranship_lab::Lab;

use super::Workload;
use super::service::Service;
use super::witness::Witness;
use crate::run::Figures;

/// A tree of processes with threads and descriptors: bench-tree.
pub struct TreeLoad {
    service: Service,
    client: Witness,
    resident_bytes: u64,
}

impl TreeLoad {
    /// Starts it: so many children, threads of each and descriptors of each. It listens once all are there.
    pub fn start(lab: &Lab, node: &str, name: &str, counts: [u32; 3]) -> Result<Self> {
        let [children, threads, descriptors] = counts;
        let arguments =
            [format!("--children={children}"), format!("--threads={threads}"), format!("--descriptors={descriptors}")];
        let mut service = Service::run(lab, node, name, "bench-tree", &arguments)?;
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
        // Each child looks at its threads and at what its descriptors hold.
        self.service.text(&["VERIFY"])?;
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        self.service.number("WAKEUPS")
    }
}
