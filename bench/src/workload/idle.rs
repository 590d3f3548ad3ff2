use anyhow::{Result, bail};
use tranship_lab::{Lab, RunOptions};

use super::{ADDRESS, Workload};
use crate::run::Figures;
use crate::watch::resident;

/// A program that sleeps, and that nobody talks to: what is left of a blackout when there is nothing to move.
pub struct IdleLoad {
    resident_bytes: u64,
}

const COMMAND: [&str; 3] = ["busybox", "sleep", "86399"];

impl IdleLoad {
    /// Starts it.
    pub fn start(lab: &Lab, node: &str, name: &str) -> Result<Self> {
        lab.run(node, name, &RunOptions::new(ADDRESS, COMMAND.map(str::to_owned)))?;
        let begin = std::time::Instant::now();
        loop {
            match resident(&COMMAND) {
                Ok(resident_bytes) => return Ok(Self { resident_bytes }),
                Err(error) if begin.elapsed() > super::LIMIT => return Err(error),
                // runc has told of it, and it executes its program now.
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
            }
        }
    }
}

impl Workload for IdleLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        Ok(())
    }

    /// It is alive, once.
    fn check(&mut self) -> Result<Figures> {
        resident(&COMMAND).map(|_| Figures::new())
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("what sleeps makes no progress")
    }
}
