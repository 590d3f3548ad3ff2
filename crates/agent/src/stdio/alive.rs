//! Whether a holder lives. Its process alone decides that: one that does not answer may be waiting
//! for a slow file, and this agent may lack descriptors.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use tranship_sys::process;

use super::holder;

fn noted(directory: &Path) -> PathBuf {
    directory.join("pid")
}

/// Notes the process of the holder with this directory.
pub fn note(directory: &Path, pid: u32) -> io::Result<()> {
    let start = start(pid)?.unwrap_or_default();
    fs::write(noted(directory), format!("{pid} {start}"))
}

/// The process of the holder with this directory, and when it was started, in ticks since boot.
fn holder_of(directory: &Path) -> io::Result<(u32, u64)> {
    let text = fs::read_to_string(noted(directory))?;
    let numbers = text.split_once(' ').and_then(|(pid, start)| Some((pid.parse().ok()?, start.parse().ok()?)));
    // The agent ended while it wrote that.
    numbers.ok_or_else(|| ErrorKind::NotFound.into())
}

/// The process of the holder with this directory.
pub fn pid(directory: &Path) -> io::Result<u32> {
    Ok(holder_of(directory)?.0)
}

/// Whether the holder with this directory lives.
///
/// # Errors
/// That cannot be told now.
pub fn is_alive(directory: &Path) -> io::Result<bool> {
    match holder_of(directory) {
        Ok((pid, started)) => Ok(start(pid)? == Some(started)),
        Err(error) if error.kind() == ErrorKind::NotFound => match holder::connect(directory) {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(false),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// When a process was started (proc_pid_stat(5)); `None` if it has ended.
fn start(pid: u32) -> io::Result<Option<u64>> {
    let stat = match process::text(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let fields: Vec<&str> = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
    let has_ended = fields.first().is_none_or(|state| ["Z", "X"].contains(state));
    Ok(fields.get(19).filter(|_| !has_ended).and_then(|start| start.parse().ok()))
}

/// Ends the holder with this directory at once.
pub fn kill(directory: &Path) -> io::Result<()> {
    let process = process::descriptor(pid(directory)?)?;
    // The descriptor is of whichever process has the number now.
    if is_alive(directory)? { process::signal(&process, Signal::SIGKILL as i32) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_holder_that_does_not_answer_lives_until_its_process_ends() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        assert!(!is_alive(directory).unwrap());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        note(directory, child.id()).unwrap();
        assert!(is_alive(directory).unwrap());
        kill(directory).unwrap();
        // Whether it is waited for or not.
        while is_alive(directory).unwrap() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        // Its number is another process's by now.
        fs::write(noted(directory), format!("{} 1", std::process::id())).unwrap();
        assert!(!is_alive(directory).unwrap());
    }

    #[test]
    fn one_whose_process_was_not_noted_lives_while_it_listens() {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(holder::socket(directory.path())).unwrap();
        assert!(is_alive(directory.path()).unwrap());
        drop(listener);
        assert!(!is_alive(directory.path()).unwrap());
    }
}
