use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use tranship_lab::{Lab, RunOptions, find_program};

use crate::guest::Guest;
use crate::runner::wait_until;

/// A torturer in a container, and the one connection on which it tells how it fares.
#[derive(Debug)]
pub struct Torturer {
    guest: Guest,
    line: u64,
    patience: Duration,
}

/// One line of a torturer.
#[derive(Debug, Clone, Deserialize)]
pub struct TortureLine {
    /// Number of the line on this connection.
    pub line: u64,
    /// The first thing that was wrong.
    pub complaint: Option<String>,
    /// How often each thing was done.
    pub counts: BTreeMap<String, u64>,
}

impl TortureLine {
    fn sum(&self, prefix: &str) -> u64 {
        self.counts.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, count)| count).sum()
    }

    /// Pages that were checked.
    pub fn checks(&self) -> u64 {
        self.sum("check.")
    }
}

impl Torturer {
    const PORT: u16 = 7002;

    /// Starts one in a new container on a node, with these arguments.
    ///
    /// # Errors
    /// If the container cannot be started, or nobody listens in it within 20 s.
    pub fn start(lab: &Lab, node: &str, name: &str, ip: Ipv4Addr, arguments: &[String]) -> Result<Self> {
        Self::start_program(lab, "torturer", node, name, ip, arguments)
    }

    /// The same with another program that reports as it does.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_program(
        lab: &Lab,
        program: &str,
        node: &str,
        name: &str,
        ip: Ipv4Addr,
        arguments: &[String],
    ) -> Result<Self> {
        let command = [format!("/opt/{program}")].into_iter().chain(arguments.iter().cloned());
        let mut options = RunOptions::new(ip, command);
        options.binds.push((find_program(program)?, format!("/opt/{program}").into()));
        lab.run(node, name, &options)?;
        Ok(Self { guest: Guest::connect(lab, ip, Self::PORT)?, line: 0, patience: Duration::from_secs(60) })
    }

    /// The latest line, after having checked that no line is missing or came twice and that nobody complains.
    ///
    /// # Errors
    /// If not, or if no line comes for a minute.
    pub fn latest(&mut self) -> Result<TortureLine> {
        let mut latest = None;
        for text in self.guest.lines(self.patience)? {
            let line: TortureLine = serde_json::from_str(&text).with_context(|| format!("it said {text:?}"))?;
            ensure!(line.line == self.line, "line {} came instead of {}", line.line, self.line);
            self.line += 1;
            if let Some(complaint) = line.complaint {
                bail!("the torturer complains: {complaint}");
            }
            latest = Some(line);
        }
        latest.context("no line")
    }

    /// Waits until each thread and process has gone on by so many steps from here, and all pages were checked a few times.
    ///
    /// # Errors
    /// As `latest`; or if one does not within a minute.
    pub fn goes_on(&mut self, steps: u64) -> Result<TortureLine> {
        let begin = self.latest()?;
        let mut behind = String::new();
        let reached = wait_until("the torturer to go on", self.patience, || {
            let line = self.latest()?;
            let more = |name: &str| line.counts.get(name).unwrap_or(&0) - begin.counts.get(name).unwrap_or(&0);
            let due = |name: &String| match name.strip_prefix("step.") {
                Some("phoenix") => 1,
                Some(_) => steps,
                None if name == "deed.checkall" => {
                    3 * begin.counts.keys().filter(|n| n.starts_with("step.")).count() as u64
                }
                None => 0,
            };
            let late: Vec<_> = begin.counts.keys().filter(|name| more(name) < due(name)).cloned().collect();
            behind = late.join(", ");
            Ok(late.is_empty().then_some(line))
        });
        reached.with_context(|| format!("behind: {behind}"))
    }
}
