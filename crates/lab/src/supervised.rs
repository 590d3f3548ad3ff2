//! Agents under systemd, confined as packaged: a manager in each node (`systemd --user`, which needs not be process 1) starts the units
//! of `packaging/`.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::cgroup;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::wait_for;
use crate::state::BIN;

/// Set, to anything, where all agents are to be started so.
pub(crate) const VARIABLE: &str = "TRANSHIP_UNITS";
const SYSTEMD: &str = "/lib/systemd/systemd";
/// The units, in a node.
const UNITS: &str = "/run/units";
const AGENT: &str = "transhipd.service";
const LAUNCHER: &str = "transhipd-launcher.service";
/// What the manager wants to be there before it starts a unit.
const TARGETS: [&str; 2] = ["basic.target", "shutdown.target"];
/// The packaged units.
const PACKAGED: [(&str, &str); 2] = [
    (AGENT, include_str!("../../../packaging/transhipd.service")),
    (LAUNCHER, include_str!("../../../packaging/transhipd-launcher.service")),
];
const START_LIMIT: Duration = Duration::from_secs(30);

/// Why agents cannot be started so on this machine, if so.
pub fn no_systemd() -> Option<&'static str> {
    (!Path::new(SYSTEMD).exists()).then_some("there is no systemd here (Debian package systemd)")
}

impl Lab {
    /// Starts a node's agent and launcher by their units, with additional environment variables for the agent. Where `restarts`, the
    /// manager starts an agent again that has ended, as packaged.
    ///
    /// # Errors
    /// If the manager does not start, or the agent is not ready within 30 s.
    pub fn start_units(&self, node: &str, environment: &[(&str, &str)], restarts: bool) -> Result<()> {
        self.write_units(node, environment, restarts)?;
        self.start_manager(node)?;
        self.manager(node, &["daemon-reload"])?;
        self.manager(node, &["start", AGENT]).map(drop)
    }

    /// Runs a command of the manager's (systemctl(1)) in a node; what it prints.
    ///
    /// # Errors
    /// Also if the command fails.
    pub fn manager(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let command = [&["env", "XDG_RUNTIME_DIR=/run", "systemctl", "--user", "--no-pager"], arguments].concat();
        self.check(node, &command)
    }

    fn write_units(&self, node: &str, environment: &[(&str, &str)], restarts: bool) -> Result<()> {
        let directory = self.path(node, UNITS)?;
        fs::create_dir_all(&directory).map_err(LabError::file("make", &directory))?;
        let write = |name: &str, text: &str| {
            let file = directory.join(name);
            fs::write(&file, text).map_err(LabError::file("write", file))
        };
        TARGETS.iter().try_for_each(|target| write(target, "[Unit]\nDefaultDependencies=no\n"))?;
        for (name, text) in PACKAGED {
            let mut text = text.replace("/usr/bin/transhipd", &format!("{BIN}/transhipd"));
            // The packaged directories of a system's unit; a user's would be in a home directory.
            text.push_str("\n[Service]\nStateDirectory=\nConfigurationDirectory=\n");
            for (variable, value) in environment.iter().copied().chain([("PATH", &*Self::search_path())]) {
                text.push_str(&format!("Environment=\"{variable}={value}\"\n"));
            }
            text.push_str(
                "StandardOutput=append:/run/tranship/agent.log\nStandardError=append:/run/tranship/agent.log\n",
            );
            if name == AGENT && !restarts {
                text.push_str("Restart=no\n");
            }
            write(name, &text)?;
        }
        Ok(())
    }

    fn start_manager(&self, node: &str) -> Result<()> {
        let socket = self.path(node, "/run/systemd/private")?;
        let answers = || UnixStream::connect(&socket).is_ok();
        if answers() {
            return Ok(());
        }
        let log = self.path(node, "/run/manager.log")?;
        let output = fs::File::create(&log).map_err(LabError::file("make", &log))?;
        // It makes its cgroups below the one that it is in; and looks for the directory of a system that was booted by systemd, which
        // engines must not find.
        let join: Vec<String> = cgroup::hierarchies()
            .iter()
            .map(|root| format!("echo $$ > {}{}/cgroup.procs", root.display(), cgroup::parent_of(node)))
            .collect();
        let script = format!(
            "mkdir -p /run/systemd/system /run/tranship && {} && exec env XDG_RUNTIME_DIR=/run SYSTEMD_UNIT_PATH={UNITS} HOME=/root \
             SYSTEMD_LOG_TARGET=console {SYSTEMD} --user --unit=basic.target",
            join.join(" && ")
        );
        let mut command = self.enter(node)?;
        command.args(["setsid", "--fork", "sh", "-c", &script]);
        let errors = output.try_clone().map_err(LabError::file("open", &log))?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.status().map_err(LabError::start("nsenter"))?;
        let started = wait_for(START_LIMIT, || answers().then_some(()));
        let _ = fs::remove_dir(self.path(node, "/run/systemd/system")?);
        started.ok_or_else(|| LabError::Deadline {
            what: format!("systemd in node {node} did not answer"),
            seconds: START_LIMIT.as_secs(),
            detail: fs::read_to_string(&log).unwrap_or_default(),
        })
    }
}
