use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tranship_lab::Lab;

use crate::runner::wait_until;

/// The end of an agent's log from a mark on.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    mark: usize,
}

impl Log {
    /// Marks its end now.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn mark(lab: &Lab, node: &str) -> Result<Self> {
        let path = lab.path(node, "/run/tranship/agent.log")?;
        let mark = fs::read(&path).map_or(0, |text| text.len());
        Ok(Self { path, mark })
    }

    /// What was written since.
    pub fn text(&self) -> String {
        let bytes = fs::read(&self.path).unwrap_or_default();
        String::from_utf8_lossy(bytes.get(self.mark..).unwrap_or_default()).into_owned()
    }
}

/// The letter of a process's state.
pub fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Whether nothing is left of a process, but for a zombie: a thread that is dying still has the process's sockets.
pub fn is_gone(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads == 0 || (threads == 1 && state(pid).is_none_or(|s| matches!(s, 'Z' | 'X')))
}

/// Kills a node's agent, and starts one in which faults will happen, as TRANSHIP_FAULTS has them.
///
/// # Errors
/// If the old one does not die or the new one does not answer.
pub fn restart_agent(lab: &Lab, node: &str, faults: &str) -> Result<()> {
    if let Some(agent) = lab.agent_pid(node)? {
        send(Signal::SIGKILL, agent)?;
        wait_until("the agent to die", Duration::from_secs(5), || Ok(is_gone(agent).then_some(())))?;
    }
    Ok(lab.start_agent(node, &[("TRANSHIP_FAULTS", faults)])?)
}

/// Adds this to the configuration of each node's agent, and starts it again.
///
/// # Errors
/// If a configuration cannot be written, or an agent does not start with it.
pub fn configure(lab: &Lab, more: &str) -> Result<()> {
    for node in lab.nodes() {
        let file = lab.path(&node, "/etc/tranship/agent.toml")?;
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        fs::write(&file, format!("{text}\n{more}")).with_context(|| format!("cannot write {}", file.display()))?;
        restart_agent(lab, &node, "")?;
    }
    Ok(())
}

/// Has the agents of all nodes find writes to memory in this way (`[memory] tracker`), from now on.
///
/// # Errors
/// If a configuration cannot be written, or an agent does not start with it.
pub fn track_by(lab: &Lab, tracker: &str) -> Result<()> {
    for node in lab.nodes() {
        let file = lab.path(&node, "/etc/tranship/agent.toml")?;
        let mut text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        // A scenario before this one on the same stage may have chosen.
        text.truncate(text.find("\n[memory]\n").unwrap_or(text.len()));
        text.push_str(&format!("\n[memory]\ntracker = \"{tracker}\"\n"));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        restart_agent(lab, &node, "")?;
    }
    Ok(())
}

/// Sends a signal; a process that is gone is no error.
///
/// # Errors
/// If there is no permission.
pub fn send(signal: Signal, pid: u32) -> Result<()> {
    match kill(Pid::from_raw(pid.cast_signed()), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot send {signal} to {pid}")),
    }
}
