use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, Result, ensure};
use tranship_lab::{CLIENT, Lab};

/// A line that no answer has.
const END: &str = "--end--";
/// After how many seconds a client ends by itself: later than any scenario.
const LIMIT: &str = "600";

/// A database's command line client in the client node that is asked one thing after the other. It ends by itself after ten minutes,
/// whatever it waits for, and at the first error, which is then seen on the test's own stderr.
#[derive(Debug)]
pub struct Dialogue {
    child: Child,
    ask: ChildStdin,
    hear: BufReader<ChildStdout>,
    /// What makes it print the line.
    end: &'static str,
}

impl Dialogue {
    /// Starts a client; `end` is what makes it print `--end--` on a line of its own.
    ///
    /// # Errors
    /// If it cannot be started.
    fn start(lab: &Lab, client: &[&str], end: &'static str) -> Result<Self> {
        let mut command = lab.command(CLIENT, &[&["timeout", LIMIT], client].concat())?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", client[0]))?;
        let (ask, hear) = (child.stdin.take().context("no stdin")?, child.stdout.take().context("no stdout")?);
        Ok(Self { child, ask, hear: BufReader::new(hear), end })
    }

    /// psql, as the user `postgres`, which answers with rows in unaligned form.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn with_psql(lab: &Lab, programs: &Path, ip: Ipv4Addr) -> Result<Self> {
        let (psql, ip) = (programs.join("psql").display().to_string(), ip.to_string());
        let client = [&psql, "-h", &ip, "-U", "postgres", "-XqAt", "-v", "ON_ERROR_STOP=1", "postgres"];
        Self::start(lab, &client, "\\echo --end--")
    }

    /// `mariadb`, as the user `lab`, which does not connect a second time.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn with_mariadb(lab: &Lab, ip: Ipv4Addr) -> Result<Self> {
        let ip = ip.to_string();
        let client = ["mariadb", "--no-defaults", "--skip-reconnect", "--host", &ip, "--user", "lab"];
        let form = ["--batch", "--skip-column-names", "--unbuffered"];
        Self::start(lab, &[&client[..], &form].concat(), "SELECT '--end--';")
    }

    /// The rows of the answer, joined by newlines.
    ///
    /// # Errors
    /// If the client has ended, at an error or because the server is gone.
    pub fn ask(&mut self, sql: &str) -> Result<String> {
        writeln!(self.ask, "{sql};\n{}", self.end)?;
        let mut rows = Vec::new();
        loop {
            let mut line = String::new();
            let length = self.hear.read_line(&mut line)?;
            ensure!(length > 0, "the client ended at {sql:?}: {:?}", self.child.wait()?);
            match line.trim_end() {
                END => return Ok(rows.join("\n")),
                row => rows.push(row.to_owned()),
            }
        }
    }
}

impl Drop for Dialogue {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
