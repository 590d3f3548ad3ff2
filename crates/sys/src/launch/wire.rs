//! Messages between an agent and its launcher. Both are of the same version: other ones are refused, since requests that are
//! understood in part would start programs with other rights or streams than intended.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket as new_socket};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::{Ending, Request, is_readable};
use crate::descriptor;
use crate::own_process::Task;

/// Version of these messages.
const VERSION: u32 = 1;
/// How long a launcher may be gone: its unit starts it again.
const RESTART: Duration = Duration::from_millis(1500);
/// How long it may take to start a program.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to tell the status of a program that has ended.
const STATUS: Duration = Duration::from_secs(5);
/// Longest request: arguments and environment of a program, which the kernel bounds at 6 MiB.
const LONGEST_REQUEST: u64 = 16 << 20;
/// Longest answer.
const LONGEST_ANSWER: usize = 4096;
/// What to do about a launcher that does not answer.
pub const LAUNCHER_GONE: &str = "start it again: systemctl restart transhipd-launcher";

/// What an agent asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Call {
    /// Whether it answers.
    Ping,
    /// A program; stdin, stdout and stderr come along.
    Start(Request),
    /// Work in a short-lived process; its end of the agent's socket comes along.
    Task(Task),
}

#[derive(Debug, Serialize, Deserialize)]
struct Envelope {
    version: u32,
    call: Call,
}

/// What the launcher answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The program runs; a descriptor that stands for it comes along, and its status follows.
    Started { pid: u32 },
    /// It answers, or the work was begun.
    Done,
    /// It was not done.
    Failed { errno: Option<i32>, why: String },
}

impl Answer {
    /// The answer about something that has failed.
    pub(super) fn failed(error: &io::Error) -> Self {
        let why = error.to_string().chars().take(LONGEST_ANSWER / 8).collect();
        Self::Failed { errno: error.raw_os_error(), why }
    }

    /// Sends it, with the descriptor of a program.
    pub(super) fn send(&self, connection: BorrowedFd<'_>, process: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        descriptor::send(connection, &text, process.as_slice()).map(drop)
    }
}

/// Whether a launcher answers here.
///
/// # Errors
/// Why it does not, with what to do.
pub fn ping(launcher: &Path) -> io::Result<()> {
    ask(launcher, Call::Ping, &[]).map(drop)
}

/// Has the launcher start a program.
pub(super) fn start(launcher: &Path, request: Request, streams: &[OwnedFd; 3]) -> io::Result<(u32, OwnedFd, Ending)> {
    let streams = streams.each_ref().map(AsFd::as_fd);
    let (connection, answer, process) = ask(launcher, Call::Start(request), &streams)?;
    match (answer, process) {
        (Answer::Started { pid }, Some(process)) => Ok((pid, process, Ending::Launcher { connection, status: None })),
        _ => Err(gone(launcher, &"its answer belongs to another request")),
    }
}

/// Has the launcher begin work in a process of its own, which has this end of a socket.
pub(crate) fn begin(launcher: &Path, task: Task, socket: BorrowedFd<'_>) -> io::Result<()> {
    ask(launcher, Call::Task(task), &[socket]).map(drop)
}

fn gone(launcher: &Path, why: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("the launcher at {} does not start programs: {why}; {LAUNCHER_GONE}", launcher.display()))
}

fn ask(launcher: &Path, call: Call, descriptors: &[BorrowedFd<'_>]) -> io::Result<(OwnedFd, Answer, Option<OwnedFd>)> {
    let patience = if let Call::Task(task) = &call { task.patience() } else { PATIENCE };
    let text = serde_json::to_vec(&Envelope { version: VERSION, call })?;
    // A message of a socket would be bounded by the size of its buffer.
    let mut body = File::from(memfd_create("request", MemfdFlags::CLOEXEC)?);
    body.write_all(&text)?;
    let connection = connected(launcher, patience.min(RESTART)).map_err(|error| gone(launcher, &error))?;
    let descriptors: Vec<_> = std::iter::once(body.as_fd()).chain(descriptors.iter().copied()).collect();
    descriptor::send(connection.as_fd(), &[0], &descriptors).map_err(|error| gone(launcher, &error))?;
    if !is_readable(connection.as_fd(), Instant::now() + patience)? {
        return Err(gone(launcher, &format!("it has not answered within {} ms", patience.as_millis())));
    }
    let mut answer = vec![0; LONGEST_ANSWER];
    let (length, descriptors) = descriptor::receive(connection.as_fd(), &mut answer).map_err(|e| gone(launcher, &e))?;
    if length == 0 {
        return Err(gone(launcher, &"it has ended before it answered"));
    }
    match serde_json::from_slice(&answer[..length])? {
        Answer::Failed { errno: Some(errno), .. } => Err(io::Error::from_raw_os_error(errno)),
        Answer::Failed { errno: None, why } => Err(io::Error::other(why)),
        answer => Ok((connection, answer, descriptors.into_iter().next())),
    }
}

/// Connects to a launcher; waits for one that is being started again.
fn connected(launcher: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + patience;
    loop {
        let connection = new_socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        let connected = connect(std::os::fd::AsRawFd::as_raw_fd(&connection), &UnixAddr::new(launcher)?);
        match connected {
            Ok(()) => return Ok(connection),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// The status of a program that has ended, as wait(2) has it.
pub(super) fn status(connection: &OwnedFd) -> io::Result<Option<i32>> {
    const UNKNOWN: &str = "the launcher ended before the program that it had started: nobody knows how that has ended";
    if !is_readable(connection.as_fd(), Instant::now() + STATUS)? {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, UNKNOWN));
    }
    let mut status = [0; 4];
    match descriptor::receive(connection.as_fd(), &mut status) {
        Ok((4, _)) => Ok(Some(i32::from_ne_bytes(status))),
        _ => Err(io::Error::new(io::ErrorKind::BrokenPipe, UNKNOWN)),
    }
}

/// Receives a request, with what came along.
pub(super) fn receive(connection: &OwnedFd) -> io::Result<(Call, Vec<OwnedFd>)> {
    if !is_readable(connection.as_fd(), Instant::now() + PATIENCE)? {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (_, descriptors) = descriptor::receive(connection.as_fd(), &mut [0])?;
    let mut descriptors = descriptors.into_iter();
    let mut body = File::from(descriptors.next().ok_or(io::ErrorKind::UnexpectedEof)?);
    body.rewind()?;
    let mut text = Vec::new();
    body.take(LONGEST_REQUEST).read_to_end(&mut text)?;
    // Of a request of another version, the version at least is understood.
    let version = serde_json::from_slice::<serde_json::Value>(&text)?["version"].as_u64();
    if version != Some(VERSION.into()) {
        return Err(io::Error::other(format!("the launcher is of another version than the agent; {LAUNCHER_GONE}")));
    }
    let Envelope { call, .. } = serde_json::from_slice(&text)?;
    Ok((call, descriptors.collect()))
}
