//! The measuring client: one connection that increments a counter in Redis and checks each reply.
//!
//! It is a process of its own in the client node, so that nothing else that the measuring program does delays it:
//!
//! ```text
//! CounterClient ── stdin: {"do":"mark"} ──▶ tranship-lab counter ── INCR key ──▶ Redis
//!               ◀─ stdout: CounterReport ──                      ◀── previous + 1
//! ```

mod worker;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::patience;
use crate::state::CLIENT;
pub use worker::count;

/// A gap longer than this is listed, in ms.
pub const LISTED_GAP_MS: f64 = 20.0;
/// Most gaps that are listed.
const MOST_LISTED: usize = 1000;
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// A time without replies.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Gap {
    /// Between the two consecutive replies, in ms; contains the pace of the counter.
    pub ms: f64,
    /// When the first of the two came, in ms since the Unix epoch (CLOCK_REALTIME).
    pub at_unix_ms: u64,
}

/// What was seen in a stretch of time.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Window {
    /// Right replies.
    pub replies: u64,
    /// The longest gap.
    pub longest: Gap,
    /// The gaps longer than [`LISTED_GAP_MS`], the first 1000 of them.
    pub gaps: Vec<Gap>,
}

impl Window {
    fn add(&mut self, gap: Gap) {
        self.replies += 1;
        if gap.ms > self.longest.ms {
            self.longest = gap;
        }
        if gap.ms > LISTED_GAP_MS && self.gaps.len() < MOST_LISTED {
            self.gaps.push(gap);
        }
    }
}

/// What the counter has seen.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CounterReport {
    /// The last right reply.
    pub value: i64,
    /// Since it began.
    pub total: Window,
    /// Since the last mark.
    pub since_mark: Window,
    /// For how long it has been waiting for the reply that is due, in ms.
    pub waiting_ms: f64,
    /// The error or wrong reply that ended it; it never connects again.
    pub error: Option<String>,
    /// Whether all replies came on the one connection and the server knows it by the id that it had at the beginning.
    pub same_connection: bool,
}

/// What the counter is asked to do; each is answered by a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Request {
    Report,
    Mark,
    Pause,
    Resume,
    Stop,
}

/// A counter that runs in the client node. Killed when dropped.
#[derive(Debug)]
pub struct CounterClient {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<CounterReport>,
}

impl CounterClient {
    /// Connects and begins to count in `key`, one INCR every `interval`.
    ///
    /// # Errors
    /// If the connection cannot be made.
    pub fn start(lab: &Lab, address: SocketAddr, key: &str, interval: Duration) -> Result<Self> {
        let (address, interval) = (address.to_string(), interval.as_micros().to_string());
        let arguments =
            ["tranship-lab", "counter", "--addr", &address, "--key", key, "--interval-us", &interval, "--control"];
        let mut command = lab.command(CLIENT, &arguments)?;
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = command.spawn().map_err(LabError::start("nsenter"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(LabError::Refused("the counter has no pipes".into()));
        };
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let Ok(report) = serde_json::from_str(&line) else { break };
                if sender.send(report).is_err() {
                    break;
                }
            }
        });
        let mut client = Self { child, stdin, answers };
        client.wait_replies(1, Duration::from_secs(10))?;
        Ok(client)
    }

    /// What it has seen so far.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn report(&mut self) -> Result<CounterReport> {
        self.ask(Request::Report)
    }

    /// Begins a new stretch (`since_mark`), and returns what was seen up to now.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn mark(&mut self) -> Result<CounterReport> {
        self.ask(Request::Mark)
    }

    /// Stops sending, with the connection kept, once the reply that is due has come. The pause is no gap.
    ///
    /// # Errors
    /// If it does not answer, or the reply that is due does not come within 5 s.
    pub fn pause(&mut self) -> Result<CounterReport> {
        self.ask(Request::Pause)
    }

    /// Goes on sending.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn resume(&mut self) -> Result<CounterReport> {
        self.ask(Request::Resume)
    }

    /// Ends it, and returns what it has seen.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn stop(mut self) -> Result<CounterReport> {
        self.ask(Request::Stop)
    }

    /// Waits until `more` further replies have come, so that a gap that is not over is seen whole.
    ///
    /// # Errors
    /// If they do not come within `limit` (later on a [busy machine](crate::patience)), or the counter has ended with an error.
    pub fn wait_replies(&mut self, more: u64, limit: Duration) -> Result<CounterReport> {
        let begin = self.report()?;
        let begun = Instant::now();
        loop {
            let report = self.report()?;
            if let Some(error) = &report.error {
                return Err(LabError::Refused(format!("the counter's connection failed: {error}")));
            }
            if report.total.replies >= begin.total.replies + more {
                return Ok(report);
            }
            let waited = begun.elapsed();
            if waited >= limit && waited >= patience(limit) {
                return Err(LabError::Deadline {
                    what: format!("the counter did not get {more} further replies"),
                    seconds: waited.as_secs(),
                    detail: format!("; it has been waiting for {:.0} ms", report.waiting_ms),
                });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn ask(&mut self, request: Request) -> Result<CounterReport> {
        let mut line = serde_json::to_vec(&request).unwrap_or_default();
        line.push(b'\n');
        let written = self.stdin.write_all(&line).and_then(|()| self.stdin.flush());
        written.map_err(LabError::file("write to", "the counter's stdin"))?;
        self.answers.recv_timeout(patience(ANSWER_LIMIT)).map_err(|e| match e {
            RecvTimeoutError::Timeout => LabError::Deadline {
                what: "the counter did not answer".into(),
                seconds: ANSWER_LIMIT.as_secs(),
                detail: String::new(),
            },
            RecvTimeoutError::Disconnected => LabError::Refused("the counter has died; see its message above".into()),
        })
    }
}

impl Drop for CounterClient {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_and_all_long_ones_are_kept() {
        let mut window = Window::default();
        for (i, ms) in [0.5, 30.0, 0.6, 21.0].into_iter().enumerate() {
            window.add(Gap { ms, at_unix_ms: i as u64 });
        }
        assert_eq!(window.replies, 4);
        assert_eq!(window.longest, Gap { ms: 30.0, at_unix_ms: 1 });
        assert_eq!(window.gaps.len(), 2);
    }

    #[test]
    fn requests_are_one_line_of_json() {
        assert_eq!(serde_json::to_string(&Request::Mark).unwrap(), r#"{"do":"mark"}"#);
    }
}
