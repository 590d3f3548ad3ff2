//! The agents of the nodes: their certificates and configuration, starting them, and killing them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::{Process, arguments, namespace, patience, pids, wait_for};
use crate::program;
use crate::state::{DIRECTORY, Node};
use crate::supervised;

const PORT: u16 = 7077;
const SOCKET: &str = "/run/tranship/agent.sock";
const LOG: &str = "/run/tranship/agent.log";
const PRIVATE_CRIU: &str = "/opt/tranship/criu/criu";
/// How long an agent that is being started may be nowhere to be seen.
const UNSEEN: Duration = Duration::from_secs(4);
const START_LIMIT: Duration = Duration::from_secs(10);

/// Makes a CA and certificates, and gives every node its own together with its configuration.
pub(crate) fn configure(lab: &Lab) -> Result<()> {
    let authority = Path::new(DIRECTORY).join("ca");
    fs::DirBuilder::new().mode(0o700).create(&authority).map_err(LabError::file("make", &authority))?;
    let names = lab.nodes();
    let mut init = Command::new(program::find_program("tranship")?);
    init.arg("init").arg("--dir").arg(&authority);
    init.args(names.iter().flat_map(|name| ["--node", name.as_str()]));
    program::run("making the certificates (tranship init)", &mut init, "")?;

    let nodes: Vec<_> = lab.members().filter(|n| names.contains(&n.name)).collect();
    for node in &nodes {
        let tls = lab.path(&node.name, "/etc/tranship/tls")?;
        fs::DirBuilder::new().mode(0o700).create(&tls).map_err(LabError::file("make", &tls))?;
        for (file, mode) in [("ca.crt", 0o644), ("node.crt", 0o644), ("node.key", 0o600)] {
            let from = authority.join(&node.name).join(file);
            let content = fs::read(&from).map_err(LabError::file("read", from))?;
            write(&tls.join(file), mode, &content)?;
        }
        let file = lab.path(&node.name, "/etc/tranship/agent.toml")?;
        write(&file, 0o644, configuration(node, &nodes, Path::new(PRIVATE_CRIU).exists()).as_bytes())?;
    }
    Ok(())
}

fn write(path: &Path, mode: u32, content: &[u8]) -> Result<()> {
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(mode);
    let written = options.open(path).and_then(|mut file| file.write_all(content));
    written.map_err(LabError::file("write", path))
}

/// The text of a node's agent.toml.
fn configuration(node: &Node, all: &[&Node], private_criu: bool) -> String {
    let Node { name, address, .. } = node;
    let peers: String = all
        .iter()
        .filter(|peer| peer.name != *name)
        .map(|peer| format!("{} = \"{}:{PORT}\"\n", peer.name, peer.address))
        .collect();
    let criu = if private_criu { format!("[criu]\npath = \"{PRIVATE_CRIU}\"\n\n") } else { String::new() };
    format!(
        "node = \"{name}\"\nlisten = \"{address}:{PORT}\"\n\n\
         [tls]\nca = \"/etc/tranship/tls/ca.crt\"\ncert = \"/etc/tranship/tls/node.crt\"\nkey = \"/etc/tranship/tls/node.key\"\n\n\
         [peers]\n{peers}\n[accept]\nbinds = [\"/\"]\nprivileged = true\ncontrol = true\n\n{criu}[runc]\ncgroup_parent = \"{}\"\n\n[podman]\nstorage = \"{}\"\n\n{}",
        crate::cgroup::parent_of(name),
        crate::podman::STORAGE,
        crate::containerd::agent_configuration()
    )
}

impl Lab {
    /// The pid of a node's agent, as the host sees it; `None` if it does not run.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn agent_pid(&self, node: &str) -> Result<Option<u32>> {
        let space = namespace(self.node(node)?.init.pid, "pid");
        let is_agent = |pid: &u32| {
            let arguments = arguments(*pid);
            // The page store and the CRIU front are the same program under other names.
            let named = arguments.first().is_some_and(|a| Path::new(a).file_name().is_some_and(|n| n == "transhipd"));
            named && arguments.get(1).is_none_or(|a| a.starts_with('-')) && Process::of(*pid).is_some()
        };
        Ok(pids().into_iter().filter(|pid| namespace(*pid, "pid") == space).find(is_agent))
    }

    /// Starts a node's agent with additional environment variables, and waits until it answers.
    ///
    /// # Errors
    /// If it runs already, or does not answer within 10 s; the error has the end of its log.
    pub fn start_agent(&self, node: &str, environment: &[(&str, &str)]) -> Result<()> {
        self.start_agent_of(Path::new("transhipd"), node, environment)
    }

    /// The same with another build's agent: `program` is where its `transhipd` is.
    ///
    /// # Errors
    /// As [`start_agent`](Lab::start_agent).
    pub fn start_agent_of(&self, program: &Path, node: &str, environment: &[(&str, &str)]) -> Result<()> {
        if let Some(pid) = self.agent_pid(node)? {
            return Err(LabError::Refused(format!("the agent of node {node} runs already (pid {pid})")));
        }
        if !program.is_absolute() {
            program::find_program("transhipd")?;
            if std::env::var_os(supervised::VARIABLE).is_some() {
                return self.start_units(node, environment, false);
            }
        }
        let (socket, log) = (self.path(node, SOCKET)?, self.path(node, LOG)?);
        let directory = log.parent().unwrap_or(Path::new("/"));
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(directory).map_err(LabError::file("make", directory))?;
        let output = fs::File::options().append(true).create(true).mode(0o600).open(&log);
        let output = output.map_err(LabError::file("open", &log))?;
        let errors = output.try_clone().map_err(LabError::file("open", &log))?;
        let mut command = self.enter(node)?;
        command.args(["setsid", "--fork"]).arg(program).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.status().map_err(LabError::start("nsenter"))?;

        let (begin, mut seen) = (Instant::now(), false);
        let answered = wait_for(START_LIMIT, || {
            let runs = matches!(self.agent_pid(node), Ok(Some(_)));
            // An agent that was seen and is gone has given up, and so has one that nobody saw for long: a busy machine takes its
            // time to start one.
            let gave_up = seen && !runs;
            seen |= runs || begin.elapsed() > patience(UNSEEN);
            if gave_up { Some(false) } else { answers(&socket).then_some(true) }
        });
        if answered == Some(true) {
            return Ok(());
        }
        let log = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let end = lines[lines.len().saturating_sub(12)..].join("\n  ");
        let end = format!("its log in the node, {LOG}, ends:\n  {end}");
        Err(match answered {
            Some(_) => LabError::Refused(format!("the agent of node {node} ended right after its start; {end}")),
            None => LabError::Deadline {
                what: format!("the agent of node {node} did not answer on {SOCKET}"),
                seconds: START_LIMIT.as_secs(),
                detail: format!("; {end}"),
            },
        })
    }

    /// Kills a node's agent with SIGKILL and waits until it is gone. Nothing happens if it does not run.
    ///
    /// # Errors
    /// If there is no such node or the agent does not die within 5 s.
    pub fn kill_agent(&self, node: &str) -> Result<()> {
        let Some(agent) = self.agent_pid(node)?.and_then(Process::of) else { return Ok(()) };
        agent.kill();
        wait_for(Duration::from_secs(5), || (!agent.is_alive()).then_some(())).ok_or_else(|| LabError::Deadline {
            what: format!("the agent of node {node} (pid {}) did not die", agent.pid),
            seconds: 5,
            detail: String::new(),
        })
    }

    /// Moves a container by `tranship move NAME --to NODE --json` in node `from`, and returns the report that it prints
    /// last. Its progress goes where `command`'s stderr goes; see [`move_command`](Lab::move_command).
    ///
    /// # Errors
    /// If the move fails; the text is what `tranship` said.
    pub fn move_container(&self, from: &str, name: &str, to: &str) -> Result<Value> {
        let output = self.move_command(from, name, to)?.stderr(Stdio::piped()).output();
        let output = output.map_err(LabError::start("nsenter"))?;
        let what = format!("moving {name} from {from} to {to}");
        report_of(&program::checked(what, output)?.stdout)
    }

    /// The command that moves a container, for those who want to see its progress: stderr is inherited.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn move_command(&self, from: &str, name: &str, to: &str) -> Result<Command> {
        let mut command = self.command(from, &["tranship", "move", name, "--to", to, "--json"])?;
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(command)
    }
}

/// The report in the output of `tranship move --json`: its last line that is not empty.
///
/// # Errors
/// If that is no JSON.
pub fn report_of(stdout: &[u8]) -> Result<Value> {
    let text = String::from_utf8_lossy(stdout);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    serde_json::from_str(last).map_err(|e| LabError::Program {
        what: "reading the report of `tranship move --json`".into(),
        status: e.to_string(),
        output: text.chars().take(400).collect(),
    })
}

/// Whether an agent answers on this socket, for itself: `/v1/node` would wait for its peers.
fn answers(socket: &Path) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /v1/migrations HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status == *b"HTTP/1.1 200")
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_told_all_others_and_its_own_cgroup_parent() {
        let node = |index| {
            let (name, address) = crate::switch::node(index);
            Node { name, address, init: Process { pid: 1, start: 0 } }
        };
        let (a, b, c) = (node(0), node(1), node(2));
        let text = configuration(&b, &[&a, &b, &c], true);
        assert!(text.contains("listen = \"10.77.0.2:7077\""), "{text}");
        assert!(text.contains("[peers]\na = \"10.77.0.1:7077\"\nc = \"10.77.0.3:7077\"\n"), "{text}");
        assert!(text.contains("[criu]\npath = \"/opt/tranship/criu/criu\""), "{text}");
        assert!(text.contains("[runc]\ncgroup_parent = \"/tranship-lab/b\"\n"), "{text}");
        assert!(!configuration(&a, &[&a, &b], false).contains("criu"));
    }

    #[test]
    fn the_report_is_the_last_line() {
        assert_eq!(report_of(b"begun\n{\"id\":1}\n{\"id\":2}\n\n").unwrap()["id"], 2);
        assert!(report_of(b"").is_err());
    }
}
