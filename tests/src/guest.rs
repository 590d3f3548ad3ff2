use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use tranship_lab::{CLIENT, Lab};

use crate::runner::wait_until;

/// A TCP connection from the client node on which a server sends lines; it is made once and never again.
#[derive(Debug)]
pub struct Guest {
    lines: Receiver<Result<String, String>>,
    zoo_line: u64,
}

/// One line of the zoo program.
#[derive(Debug, Clone, Deserialize)]
pub struct ZooLine {
    /// Number of the line on this connection.
    pub line: u64,
    /// How often the keeper has looked after its cages.
    pub tick: u64,
    /// What is not as it was.
    pub complaints: Vec<String>,
    /// How often each animal was found in order.
    pub checks: BTreeMap<String, u64>,
}

impl Guest {
    /// Connects, waiting up to 20 s until the server listens.
    ///
    /// # Errors
    /// If it does not.
    pub fn connect(lab: &Lab, ip: Ipv4Addr, port: u16) -> Result<Self> {
        let address = SocketAddr::from((ip, port));
        let stream = wait_until(&format!("{address} to answer"), Duration::from_secs(20), || {
            Ok(lab.connect(CLIENT, address, Duration::from_secs(1)).ok())
        })?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines() {
                if sender.send(line.map_err(|e| e.to_string())).is_err() {
                    return;
                }
            }
        });
        Ok(Self { lines, zoo_line: 0 })
    }

    /// The next line.
    ///
    /// # Errors
    /// If the connection ends or fails, or none comes within `limit`.
    pub fn line(&mut self, limit: Duration) -> Result<String> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => line.map_err(anyhow::Error::msg).context("the connection failed"),
            Err(RecvTimeoutError::Timeout) => bail!("no line came for {} s", limit.as_secs()),
            Err(RecvTimeoutError::Disconnected) => bail!("the connection was closed by the server"),
        }
    }

    /// All lines that have come; waits for the first.
    ///
    /// # Errors
    /// As `line`.
    pub fn lines(&mut self, limit: Duration) -> Result<Vec<String>> {
        let mut lines = vec![self.line(limit)?];
        loop {
            match self.lines.try_recv() {
                Ok(line) => lines.push(line.map_err(anyhow::Error::msg).context("the connection failed")?),
                Err(TryRecvError::Empty) => return Ok(lines),
                Err(TryRecvError::Disconnected) => bail!("the connection was closed by the server"),
            }
        }
    }

    /// The latest line of a zoo, after having checked that no line is missing or came twice.
    ///
    /// # Errors
    /// As `line`, and if a line is not the one that is due.
    pub fn zoo(&mut self, limit: Duration) -> Result<ZooLine> {
        let mut latest = None;
        for text in self.lines(limit)? {
            let line: ZooLine = serde_json::from_str(&text).with_context(|| format!("the zoo said {text:?}"))?;
            ensure!(line.line == self.zoo_line, "line {} came instead of {}", line.line, self.zoo_line);
            self.zoo_line += 1;
            latest = Some(line);
        }
        latest.context("no line")
    }

    /// Waits until every animal was checked `more` times since now, and returns the last line.
    ///
    /// # Errors
    /// As `zoo`; if an animal complains; or if one is not checked in time.
    pub fn zoo_goes_on(&mut self, more: u64, limit: Duration) -> Result<ZooLine> {
        let begin = self.zoo(limit)?.checks;
        let mut behind = Vec::new();
        let reached = wait_until("every animal to be checked", limit, || {
            let line = self.zoo(limit)?;
            ensure!(line.complaints.is_empty(), "the zoo complains:\n  {}", line.complaints.join("\n  "));
            behind = begin
                .iter()
                .filter(|(name, n)| line.checks.get(*name) < Some(&(*n + more)))
                .map(|(n, _)| n.clone())
                .collect();
            Ok(behind.is_empty().then_some(line))
        });
        reached.with_context(|| format!("not checked: {}", behind.join(", ")))
    }
}
