use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tranship_lab::{CLIENT, Lab, REDIS_PORT, find_program};

use super::ADDRESS;

/// The client in the client node that sets keys: bench-setter. Killed when dropped.
pub struct Setter {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    mark: Option<(Instant, u64)>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    sets: u64,
    failed: bool,
    wrong: Vec<String>,
}

impl Setter {
    /// Begins to set, so many keys a second; 0 for as many as the server takes.
    pub fn start(lab: &Lab, keys: u64, rate: u64) -> Result<Self> {
        let program = find_program("bench-setter")?.display().to_string();
        let address = format!("{ADDRESS}:{REDIS_PORT}");
        let (keys, rate) = (keys.to_string(), rate.to_string());
        let mut command = lab.command(CLIENT, &[&program, "--address", &address, "--keys", &keys, "--rate", &rate])?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start bench-setter in the client node")?;
        let stdin = child.stdin.take().context("bench-setter has no stdin")?;
        let stdout = BufReader::new(child.stdout.take().context("bench-setter has no stdout")?);
        let mut setter = Self { child, stdin, stdout, mark: None };
        setter.sets()?;
        Ok(setter)
    }

    /// How many keys were set so far.
    pub fn sets(&mut self) -> Result<u64> {
        let said = self.ask("report")?;
        if said.failed {
            bail!("a client that sets keys has failed: {}", self.ask("verify")?.wrong.join("; "));
        }
        Ok(said.sets)
    }

    /// Begins a stretch of time.
    pub fn mark(&mut self) -> Result<()> {
        self.mark = Some((Instant::now(), self.sets()?));
        Ok(())
    }

    /// Keys set in a second, on average since the mark.
    pub fn since_mark(&mut self) -> Result<f64> {
        let sets = self.sets()?;
        let (start, before) = self.mark.context("nothing was marked")?;
        Ok((sets - before) as f64 / start.elapsed().as_secs_f64())
    }

    /// Stops setting, and fails if a key that was set is not what it was set to.
    pub fn verify(&mut self) -> Result<()> {
        match self.ask("verify")?.wrong.as_slice() {
            [] => Ok(()),
            wrong => bail!("keys were lost or changed: {}", wrong.join("; ")),
        }
    }

    fn ask(&mut self, what: &str) -> Result<Said> {
        writeln!(self.stdin, "{what}").context("bench-setter has ended")?;
        let mut line = String::new();
        self.stdout.read_line(&mut line).context("bench-setter does not answer")?;
        serde_json::from_str(&line).with_context(|| format!("bench-setter said {line:?}"))
    }
}

impl Drop for Setter {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
