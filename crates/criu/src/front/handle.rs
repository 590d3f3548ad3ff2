//! The agent's end of a front, and what can be learnt of one that is gone.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

use super::{Mark, Order};

pub(super) fn criu_note(socket: &Path) -> PathBuf {
    socket.with_extension("criu")
}

/// Whether the real criu of the front with this socket is at work, also without its front: one whose front was killed goes
/// on until it has something to say.
pub fn criu_lives(socket: &Path) -> bool {
    let note = std::fs::read_to_string(criu_note(socket)).unwrap_or_default();
    note.split_once(' ').is_some_and(|(pid, started)| start_of(pid).is_some_and(|now| now == started))
}

/// Sends a signal to the real criu of the front with this socket, if it is there.
pub fn signal_criu(socket: &Path, signal: Signal) {
    let note = std::fs::read_to_string(criu_note(socket)).unwrap_or_default();
    let pid = note.split_once(' ').and_then(|(pid, _)| pid.parse().ok());
    // The descriptor first: then it is that of the process whose start is looked at.
    if let Some(process) = pid.and_then(|pid| tranship_sys::process::descriptor(pid).ok())
        && criu_lives(socket)
    {
        let _ = tranship_sys::process::signal(&process, signal as i32);
    }
}

/// When a process was started (field 22 of proc_pid_stat(5)), which tells it from a later one with its pid; criu changes its
/// arguments. `None` if it is gone, or a zombie.
pub(super) fn start_of(pid: &str) -> Option<String> {
    let stat = tranship_sys::process::text(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18).map(ToOwned::to_owned))?
}

/// The socket beside a restore front's socket at which its allocator listens, while it waits for an order.
pub fn allocator_socket(socket: &Path) -> PathBuf {
    socket.with_extension("memory")
}

/// The file beside a restore front's socket that says that its tasks run, whatever becomes of the front.
pub fn resumed_note(socket: &Path) -> PathBuf {
    socket.with_extension("resumed")
}

/// The pid of the restored init, if the tasks of the front with this socket were let go.
pub fn resumed_init(socket: &Path) -> Option<u32> {
    std::fs::read_to_string(resumed_note(socket)).ok()?.trim().parse().ok()
}

/// The agent's end of a front.
#[derive(Debug)]
pub struct FrontHandle {
    stream: BufReader<UnixStream>,
}

/// What an agent can fail at with a front.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// No front came, or it is gone.
    #[error("the CRIU front does not answer at {path:?}: {source}")]
    Absent {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It broke off, or time was up.
    #[error("{}", broken(.0))]
    Broken(#[from] io::Error),
}

/// What became of a front, and what to do.
fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            "the CRIU front did not answer in time; see whether it or criu is stopped, and try again".to_owned()
        }
        _ => format!("the CRIU front has ended ({error}), it may have been killed; try again"),
    }
}

impl AsFd for FrontHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

impl FrontHandle {
    /// Connects to a front that is known to listen.
    pub fn connect(path: &Path) -> Result<Self, HandleError> {
        let stream =
            UnixStream::connect(path).map_err(|source| HandleError::Absent { path: path.to_owned(), source })?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// The next mark; fails when `timeout` has passed.
    pub fn next(&mut self, timeout: Duration) -> Result<Mark, HandleError> {
        self.stream.get_ref().set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line).map_err(io::Error::from)?)
    }

    /// Whether it is there and has nothing to say: so it is while a front waits for an order.
    pub fn is_quiet(&self) -> bool {
        let mut fds = [PollFd::new(self.stream.get_ref().as_fd(), PollFlags::POLLIN)];
        self.stream.buffer().is_empty() && matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
    }

    /// Lets a front go on that somebody has stopped.
    pub fn wake(&self) {
        let stream = self.stream.get_ref();
        let Ok(front) = getsockopt(stream, PeerCredentials) else { return };
        let Ok(process) = tranship_sys::process::descriptor(front.pid().cast_unsigned()) else { return };
        // As long as its end of the connection is open, the number is not that of another process.
        let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        if matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0)) {
            let _ = tranship_sys::process::signal(&process, Signal::SIGCONT as i32);
        }
    }

    /// Gives an order.
    pub fn order(&mut self, order: &Order) -> Result<(), HandleError> {
        let mut line = serde_json::to_vec(order).expect("an order is plain data");
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }
}
