//! What engines need in the nodes: their daemons, and the runtime wrapper.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::wait_for;
use crate::state::BIN;

/// The runtime wrapper in a node.
pub(crate) const WRAPPER: &str = "/run/tranship-runc";
/// A node's own layer over the host's /etc, with what criu is to do for runc.
const KEEP_CONNECTIONS: &str = "mkdir /run/etc /run/etc/upper /run/etc/work &&
    mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work overlay /etc &&
    mkdir /etc/criu && echo tcp-established > /etc/criu/runc.conf";
const START_LIMIT: Duration = Duration::from_secs(30);

impl Lab {
    /// Makes the runtime wrapper in a node, if it is not there.
    pub(crate) fn link_wrapper(&self, node: &str) -> Result<()> {
        let wrapper = self.path(node, WRAPPER)?;
        match std::os::unix::fs::symlink(Path::new(BIN).join("transhipd"), &wrapper) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(LabError::file("make", &wrapper)(e)),
            _ => Ok(()),
        }
    }

    /// Has criu keep established TCP connections whenever a runc of these nodes calls it, for engines that have no option for that.
    pub(crate) fn keep_connections(&self) -> Result<()> {
        self.nodes().iter().try_for_each(|node| self.check(node, &["sh", "-c", KEEP_CONNECTIONS]).map(drop))
    }

    /// Starts a daemon in a node; what it says goes to the file `log` there.
    pub(crate) fn start_daemon(&self, node: &str, daemon: &[&str], log: &str) -> Result<()> {
        let log = self.path(node, log)?;
        let output = fs::File::create(&log).map_err(LabError::file("make", &log))?;
        let errors = output.try_clone().map_err(LabError::file("open", &log))?;
        let mut command = self.enter(node)?;
        command.args(["setsid", "--fork"]).args(daemon);
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.status().map(drop).map_err(LabError::start("nsenter"))
    }

    /// Waits until a daemon answers.
    pub(crate) fn await_daemon(&self, node: &str, what: &str, log: &str, answers: impl Fn() -> bool) -> Result<()> {
        wait_for(START_LIMIT, || answers().then_some(())).ok_or_else(|| {
            let log = self.path(node, log).and_then(|p| fs::read_to_string(&p).map_err(LabError::file("read", p)));
            let log = log.unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            LabError::Deadline {
                what: format!("{what} in node {node} did not answer"),
                seconds: START_LIMIT.as_secs(),
                detail: format!("; its log ends:\n  {}", lines[lines.len().saturating_sub(8)..].join("\n  ")),
            }
        })
    }
}
