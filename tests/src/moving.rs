use std::io::Read;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use tranship_lab::{Lab, patience, report_of};
use tranship_types::{Mode, Outcome, Report};

use crate::agents::{restart_agent, send, state};
use crate::runner::wait_until;

/// The modes that moves are tested in, in turn: each once. (`auto` chooses among what they do.)
pub const MODES: [Mode; 4] = [Mode::Precopy, Mode::Cold, Mode::Hybrid, Mode::Postcopy];

/// How long a move may take, with everything that is done to it.
const MOVE_LIMIT: Duration = Duration::from_secs(60);

/// How a move ended.
#[derive(Debug)]
pub struct Ended {
    /// None where the agent died before it had said that it begins.
    pub report: Option<Report>,
    /// Whether `tranship move` said so by its exit status.
    pub success: bool,
    /// That status; none where a signal has ended it.
    pub status: Option<i32>,
    /// What it printed.
    text: String,
}

impl Ended {
    /// Why the container was not moved, in the words of the report.
    pub fn error(&self) -> &str {
        self.report.as_ref().map_or(self.text.trim(), |report| report.error.as_deref().unwrap_or_default())
    }

    /// Checks that what was said of the move fits where the container, which was moved `from` one node `to` another, is.
    ///
    /// # Errors
    /// If it does not.
    pub fn fits(&self, from: &str, to: &str, at: &str) -> Result<()> {
        let error = self.error();
        if let Some(report) = &self.report {
            let reported = match report.outcome {
                Outcome::Moved => to,
                Outcome::Failed | Outcome::GivenUp | Outcome::Cancelled => from,
                Outcome::Ended => bail!("the container has ended: {:?}", report.ended),
                Outcome::Running => bail!("the move was not reported to its end: {report:?}"),
            };
            ensure!(reported == at, "the container is on {at}, but the report says {:?} ({error})", report.outcome);
        }
        ensure!(
            self.success == (at == to),
            "tranship ended with success: {}, but the container is on {at}: {error}",
            self.success
        );
        Ok(())
    }
}

/// A move under way.
#[derive(Debug)]
pub struct Moving {
    child: Child,
    output: JoinHandle<Vec<u8>>,
    begun: Instant,
}

impl Moving {
    /// Begins to move a container.
    ///
    /// # Errors
    /// If `tranship` cannot be run.
    pub fn begin(lab: &Lab, name: &str, from: &str, to: &str, mode: Mode) -> Result<Self> {
        Self::begin_with(lab, name, from, to, mode, &[])
    }

    /// The same with more options for `tranship move`.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_with(lab: &Lab, name: &str, from: &str, to: &str, mode: Mode, options: &[&str]) -> Result<Self> {
        let mode = mode.to_string();
        let mut arguments = vec!["tranship", "move", name, "--to", to, "--mode", &mode, "--json"];
        arguments.extend(options);
        let mut command = lab.command(from, &arguments)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot run tranship")?;
        let mut stdout = child.stdout.take().context("tranship has no stdout")?;
        let output = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.read_to_end(&mut bytes);
            bytes
        });
        Ok(Self { child, output, begun: Instant::now() })
    }

    /// Begins to move a container, and does something while the source's agent is held at a place of the coordinator's.
    ///
    /// # Errors
    /// As [`Self::begin`]; if the move does not get there, or that is not done.
    pub fn begun_from(
        lab: &Lab,
        name: &str,
        (from, to): (&str, &str),
        place: &str,
        meddle: impl FnOnce(&Lab) -> Result<()>,
    ) -> Result<Self> {
        restart_agent(lab, from, &format!("{place}.hold"))?;
        let agent = lab.agent_pid(from)?.context("the agent has just been started")?;
        let moving = Self::begin(lab, name, from, to, Mode::Auto)?;
        wait_until("the agent to be held", Duration::from_secs(20), || Ok((state(agent) == Some('T')).then_some(())))?;
        let meddled = meddle(lab);
        send(Signal::SIGCONT, agent)?;
        meddled.map(|()| moving)
    }

    /// Whether `tranship` still follows it.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn goes_on(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits until it has ended, one way or the other.
    ///
    /// # Errors
    /// If it does not within a minute, or `tranship` does not print what it must.
    pub fn end(self) -> Result<Ended> {
        self.end_within(patience(MOVE_LIMIT))
    }

    /// The same with another limit, from the beginning of the move.
    ///
    /// # Errors
    /// As [`Self::end`].
    pub fn end_within(mut self, limit: Duration) -> Result<Ended> {
        let left = limit.saturating_sub(self.begun.elapsed());
        let waited = wait_until("the move to end", left, || Ok(self.child.try_wait()?));
        if waited.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let waited = waited?;
        let (success, status) = (waited.success(), waited.code());
        let output = self.output.join().unwrap_or_default();
        let text = String::from_utf8_lossy(&output).into_owned();
        let value = report_of(&output).with_context(|| format!("what tranship printed: {text}"))?;
        let report = match value.get("error") {
            Some(error) if error.is_object() => None,
            _ => Some(serde_json::from_value(value).with_context(|| format!("what tranship printed: {text}"))?),
        };
        Ok(Ended { report, success, status, text })
    }
}
