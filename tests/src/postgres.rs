use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout};

use anyhow::{Context, Result, ensure};
use tranship_lab::{CLIENT, Lab};

/// A psql that is asked one thing after the other.
#[derive(Debug)]
pub struct Psql {
    child: Child,
    ask: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Psql {
    /// Connects from the client node. It ends by itself after two minutes, whatever it waits for.
    ///
    /// # Errors
    /// If psql cannot be started.
    pub fn start(lab: &Lab, programs: &Path, ip: Ipv4Addr) -> Result<Self> {
        let psql = programs.join("psql").display().to_string();
        let ip = ip.to_string();
        let arguments =
            ["timeout", "120", &psql, "-h", &ip, "-U", "postgres", "-XqAt", "-v", "ON_ERROR_STOP=1", "postgres"];
        let mut command = lab.command(CLIENT, &arguments)?;
        // Errors end psql, and are then seen on the test's own stderr.
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = command.spawn().context("cannot start psql")?;
        let (ask, hear) = (child.stdin.take().context("no stdin")?, child.stdout.take().context("no stdout")?);
        Ok(Self { child, ask, hear: BufReader::new(hear) })
    }

    /// The rows of the answer, in unaligned form, joined by newlines.
    ///
    /// # Errors
    /// If psql has ended, at an error or because the server is gone.
    pub fn ask(&mut self, sql: &str) -> Result<String> {
        writeln!(self.ask, "{sql};\n\\echo --end--")?;
        let mut rows = Vec::new();
        loop {
            let mut line = String::new();
            let length = self.hear.read_line(&mut line)?;
            ensure!(length > 0, "psql ended at {sql:?}: {:?}", self.child.wait()?);
            match line.trim_end() {
                "--end--" => return Ok(rows.join("\n")),
                row => rows.push(row.to_owned()),
            }
        }
    }
}

impl Drop for Psql {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The directory of the newest PostgreSQL's programs.
///
/// # Errors
/// If there is none.
pub fn postgres_programs() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed; run `make setup`")?;
    let mut found: Vec<_> =
        versions.flatten().map(|e| e.path().join("bin")).filter(|p| p.join("postgres").exists()).collect();
    found.sort();
    found.pop().context("there is no PostgreSQL below /usr/lib/postgresql")
}
