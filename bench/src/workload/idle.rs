use anyhow::{Context, Result, bail};
use tranship_lab::{Lab, RunOptions};

use super::{ADDRESS, Workload};
use crate::run::Figures;

/// A program that sleeps, and that nobody talks to: what is left of a blackout when there is nothing to move.
pub struct IdleLoad {
    resident_bytes: u64,
}

/// Resident memory of the process on this machine that sleeps so, if there is just one.
fn resident() -> Result<u64> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("cannot list processes")?.flatten() {
        let path = entry.path();
        let Ok(command) = std::fs::read(path.join("cmdline")) else { continue };
        if command.strip_suffix(b"\0") == Some(COMMAND.join("\0").as_bytes()) {
            let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
            found.push(crate::watch::field(&status, "VmRSS:").unwrap_or(0));
        }
    }
    match found.as_slice() {
        [one] => Ok(*one),
        many => bail!("there are {} processes `{}`, not one", many.len(), COMMAND.join(" ")),
    }
}

const COMMAND: [&str; 3] = ["busybox", "sleep", "86399"];

impl IdleLoad {
    /// Starts it.
    pub fn start(lab: &Lab, node: &str, name: &str) -> Result<Self> {
        lab.run(node, name, &RunOptions::new(ADDRESS, COMMAND.map(str::to_owned)))?;
        let begin = std::time::Instant::now();
        loop {
            match resident() {
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
        resident().map(|_| Figures::new())
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("what sleeps makes no progress")
    }
}
