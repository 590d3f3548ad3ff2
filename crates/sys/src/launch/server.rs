//! The launcher's side: takes requests from the agent alone, and starts what it may have started.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind as bind_to, connect, getsockopt, listen, socket, sockopt,
};

use super::Request;
use super::wire::{self, Answer, Call};
use crate::own_process;
use crate::{descriptor, process, threads};

/// How long no connection is taken after one could not be, as where descriptors are lacking.
const PAUSE: Duration = Duration::from_millis(50);

/// Says why a process may not have a program started.
pub type Check = Box<dyn Fn(u32, &Request) -> Result<(), String> + Send + Sync>;

/// Who may ask, and for which programs.
pub struct Rules {
    /// The systemd unit in whose cgroup the agent is; `None`: any process of root may ask.
    pub unit: Option<String>,
    /// Which programs.
    pub program: Check,
}

impl std::fmt::Debug for Rules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rules").field("unit", &self.unit).finish_non_exhaustive()
    }
}

/// Listens on `path` for root alone, in place of a socket that a dead launcher has left.
///
/// # Errors
/// `AddrInUse`: a launcher answers there. Else the system's.
pub fn bind(path: &Path) -> io::Result<OwnedFd> {
    let new = || socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None);
    if connect(new()?.as_raw_fd(), &UnixAddr::new(path)?).is_ok() {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("a launcher listens on {} already", path.display()),
        ));
    }
    // Under another name first, so that nobody finds it with wider permissions.
    let fresh = path.with_extension(std::process::id().to_string());
    let _ = std::fs::remove_file(&fresh);
    let listener = new()?;
    bind_to(listener.as_raw_fd(), &UnixAddr::new(&fresh)?)?;
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
    listen(&listener, Backlog::MAXCONN)?;
    std::fs::rename(&fresh, path).inspect_err(|_| drop(std::fs::remove_file(&fresh)))?;
    Ok(listener)
}

/// Answers requests until the process ends. Does not return.
pub fn serve(listener: &OwnedFd, rules: Rules) -> ! {
    let rules = Arc::new(rules);
    loop {
        match descriptor::accept(listener.as_fd()) {
            Ok(connection) => {
                let (rules, answered) = (Arc::clone(&rules), connection.try_clone());
                let started = threads::start("launch", move || answer(&connection, &rules));
                if let (Err(error), Ok(connection)) = (started, answered) {
                    drop(Answer::failed(&io::Error::other(error.to_string())).send(connection.as_fd(), None));
                }
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Answers one request, and tells the status of the program in the end.
fn answer(connection: &OwnedFd, rules: &Rules) {
    // Whoever has asked may have died; a program that was started goes on.
    let refused = |error: &io::Error| drop(Answer::failed(error).send(connection.as_fd(), None));
    let asked = asking(connection, rules).and_then(|pid| Ok((pid, wire::receive(connection)?)));
    let (pid, (call, descriptors)) = match asked {
        Ok(asked) => asked,
        Err(error) => return refused(&error),
    };
    match call {
        Call::Ping => drop(Answer::Done.send(connection.as_fd(), None)),
        Call::Start(request) => {
            if let Err(error) = start(connection, rules, pid, request, descriptors) {
                refused(&error);
            }
        }
        Call::Task(task) => {
            let Some(socket) = descriptors.into_iter().next() else { return };
            match own_process::fork_for(&task, socket.as_fd()) {
                Ok(worker) => {
                    drop(Answer::Done.send(connection.as_fd(), None));
                    own_process::reap(worker);
                }
                Err(error) => refused(&error),
            }
        }
    }
}

/// The pid of who asks.
fn asking(connection: &OwnedFd, rules: &Rules) -> io::Result<u32> {
    let denied = |why: String| io::Error::new(io::ErrorKind::PermissionDenied, why);
    let peer = getsockopt(connection, sockopt::PeerCredentials)?;
    if peer.uid() != 0 {
        return Err(denied("the launcher starts programs for root alone".to_owned()));
    }
    let pid = peer.pid().cast_unsigned();
    if let Some(unit) = &rules.unit {
        let cgroups = process::text(format!("/proc/{pid}/cgroup"))?;
        if !is_of_unit(&cgroups, unit) {
            return Err(denied(format!("the launcher starts programs for the unit {unit} alone")));
        }
    }
    Ok(pid)
}

/// Whether a process with this `/proc/PID/cgroup` belongs to a unit.
fn is_of_unit(cgroups: &str, unit: &str) -> bool {
    let systemds = |line: &str| {
        let (hierarchy, path) = line.split_once(':')?.1.split_once(':')?;
        // Version 2, or the hierarchy that systemd has for itself.
        ["", "name=systemd"].contains(&hierarchy).then(|| path.rsplit('/').next() == Some(unit))
    };
    cgroups.lines().filter_map(systemds).any(|is_its| is_its)
}

fn start(connection: &OwnedFd, rules: &Rules, pid: u32, request: Request, streams: Vec<OwnedFd>) -> io::Result<()> {
    (rules.program)(pid, &request).map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))?;
    let streams: [OwnedFd; 3] = streams.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut child = request.spawn(streams)?;
    let started = Answer::Started { pid: child.id() };
    let told =
        process::descriptor(child.id()).and_then(|process| started.send(connection.as_fd(), Some(process.as_fd())));
    if let Err(error) = told {
        // Nobody knows of it.
        let _ = child.kill();
        child.wait()?;
        return Err(error);
    }
    let status = child.wait()?;
    // The agent may have died meanwhile.
    let _ = descriptor::send(connection.as_fd(), &status.into_raw().to_ne_bytes(), &[]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_s_processes_are_told_by_their_unit() {
        let is_agent = |text: &str| is_of_unit(text, "transhipd.service");
        assert!(is_agent("0::/system.slice/transhipd.service\n"));
        assert!(is_agent("4:memory:/x\n1:name=systemd:/system.slice/transhipd.service\n0::/\n"));
        assert!(!is_agent("0::/system.slice/transhipd-launcher.service\n"));
        assert!(!is_agent("0::/system.slice/transhipd.service/container\n"));
        assert!(!is_agent("4:memory:/system.slice/transhipd.service\n0::/docker/1\n"));
    }
}
