//! Programs that the agent starts: by itself, or through the launcher.
//!
//! Containers descend from engines and criu. If the agent started these itself, restored containers would inherit the agent's seccomp
//! filter, `no_new_privs` and capability bounding set. A confined agent therefore has another process start them: the launcher
//! (`transhipd launcher`), which has a unit of its own. An agent without one (started by hand, in a lab) starts them itself; all else
//! is the same.
//!
//! ```text
//!  agent                                      launcher
//!    │  connection for each program              │
//!    ├─ request, stdin, stdout, stderr ─────────▶│ checks who asks, and for what; starts the program
//!    │◀──────────────────────────── pid, pidfd ──┤
//!    │                                           │ waits for its end
//!    │◀──────────────────────────────── status ──┤
//! ```
//!
//! The death of the agent ends no program, nor does that of the launcher; the launcher that follows it does not know the status of
//! programs that were started before.

mod output;
pub mod server;
mod wire;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{process, threads};
pub use output::{Reading, ended, reading};
pub use wire::{LAUNCHER_GONE, ping};
pub(crate) use wire::{PATIENCE, begin};

/// The launcher's socket, if this process has one.
static LAUNCHER: OnceLock<PathBuf> = OnceLock::new();

/// Has all programs be started through the launcher that listens here. To be called once, before the first is started.
pub fn through(socket: PathBuf) {
    // A second call changes nothing.
    let _ = LAUNCHER.set(socket);
}

/// The launcher's socket, if programs are started through one.
pub fn launcher() -> Option<&'static Path> {
    LAUNCHER.get().map(PathBuf::as_path)
}

/// What a program gets as one of its standard streams.
#[derive(Debug, Default)]
pub enum Stream {
    /// That of this process.
    #[default]
    Inherit,
    /// `/dev/null`.
    Null,
    /// A new pipe, the other end of which is in [`Started`].
    Piped,
    /// This file.
    File(OwnedFd),
}

impl<F: Into<OwnedFd>> From<F> for Stream {
    fn from(file: F) -> Self {
        Self::File(file.into())
    }
}

/// A program to be started: as [`Command`], for the part of it that can be sent to the launcher.
#[derive(Debug)]
pub struct Program {
    program: OsString,
    name: Option<OsString>,
    arguments: Vec<OsString>,
    /// Changes of this process's environment; `None`: the variable is not set.
    environment: BTreeMap<OsString, Option<OsString>>,
    is_environment_cleared: bool,
    directory: Option<PathBuf>,
    streams: [Stream; 3],
    leads_session: bool,
    has_usual_umask: bool,
    cgroups: Vec<PathBuf>,
}

impl Program {
    /// A program, by its path, or by its name where it is on PATH.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            name: None,
            arguments: Vec::new(),
            environment: BTreeMap::new(),
            is_environment_cleared: false,
            directory: None,
            streams: Default::default(),
            leads_session: false,
            has_usual_umask: false,
            cgroups: Vec::new(),
        }
    }

    /// The program that this process runs, also where its file was replaced.
    pub fn own() -> Self {
        // Not /proc/self: the launcher may run another version.
        Self::new(format!("/proc/{}/exe", std::process::id()))
    }

    /// The path or name that it was made with.
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// Sets what the program finds as its own name.
    pub fn arg0(&mut self, name: impl AsRef<OsStr>) -> &mut Self {
        self.name = Some(name.as_ref().to_owned());
        self
    }

    /// Adds an argument.
    pub fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args(&mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Sets a variable of its environment.
    pub fn env(&mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> &mut Self {
        self.environment.insert(name.as_ref().to_owned(), Some(value.as_ref().to_owned()));
        self
    }

    /// Sets variables of its environment.
    pub fn envs<N: AsRef<OsStr>, V: AsRef<OsStr>>(&mut self, all: impl IntoIterator<Item = (N, V)>) -> &mut Self {
        for (name, value) in all {
            self.env(name, value);
        }
        self
    }

    /// Leaves a variable out of its environment.
    pub fn env_remove(&mut self, name: impl AsRef<OsStr>) -> &mut Self {
        self.environment.insert(name.as_ref().to_owned(), None);
        self
    }

    /// Gives it nothing of this process's environment.
    pub fn env_clear(&mut self) -> &mut Self {
        self.environment.clear();
        self.is_environment_cleared = true;
        self
    }

    /// Sets its working directory.
    pub fn current_dir(&mut self, directory: impl AsRef<Path>) -> &mut Self {
        self.directory = Some(directory.as_ref().to_owned());
        self
    }

    /// Sets its standard input.
    pub fn stdin(&mut self, stream: impl Into<Stream>) -> &mut Self {
        self.streams[0] = stream.into();
        self
    }

    /// Sets its standard output.
    pub fn stdout(&mut self, stream: impl Into<Stream>) -> &mut Self {
        self.streams[1] = stream.into();
        self
    }

    /// Sets its standard error.
    pub fn stderr(&mut self, stream: impl Into<Stream>) -> &mut Self {
        self.streams[2] = stream.into();
        self
    }

    /// As [`process::detach`].
    pub fn detach(&mut self) -> &mut Self {
        self.leads_session = true;
        self
    }

    /// As [`process::with_usual_umask`].
    pub fn with_usual_umask(&mut self) -> &mut Self {
        self.has_usual_umask = true;
        self
    }

    /// As [`process::in_cgroups`].
    pub fn in_cgroups(&mut self, cgroups: Vec<PathBuf>) -> &mut Self {
        self.cgroups = cgroups;
        self
    }

    /// Starts it. Its streams are given away; another start would inherit those of this process.
    ///
    /// # Errors
    /// It cannot be executed; or the launcher does not answer, or refuses. A limit of processes that was reached is named with a remedy.
    pub fn spawn(&mut self) -> io::Result<Started> {
        let (request, streams) = (self.request(), std::mem::take(&mut self.streams));
        let (mut given, mut kept) = (Vec::new(), Kept::default());
        for (number, stream) in streams.into_iter().enumerate() {
            given.push(kept.open(number, stream)?);
        }
        let given: [OwnedFd; 3] = given.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let (pid, process, ending) = match launcher() {
            Some(socket) => wire::start(socket, request, &given)?,
            None => {
                let mut child = request.spawn(given)?;
                let descriptor = process::descriptor(child.id()).inspect_err(|_| {
                    // Nobody would know of it.
                    let _ = child.kill().and_then(|()| child.wait());
                })?;
                (child.id(), descriptor, Ending::Child(child))
            }
        };
        let Kept { stdin, stdout, stderr } = kept;
        Ok(Started { pid, process, ending, stdin, stdout, stderr })
    }

    /// Executes it in place of this process, with this process's streams; returns where that fails, with the reason.
    pub fn exec(&self) -> io::Error {
        match self.request().command() {
            Ok(mut command) => command.exec(),
            Err(error) => error,
        }
    }

    fn request(&self) -> Request {
        let mut environment: BTreeMap<OsString, OsString> = BTreeMap::new();
        if !self.is_environment_cleared {
            environment.extend(std::env::vars_os());
        }
        for (name, value) in &self.environment {
            match value {
                Some(value) => environment.insert(name.clone(), value.clone()),
                None => environment.remove(name),
            };
        }
        Request {
            program: self.program.clone(),
            name: self.name.clone(),
            arguments: self.arguments.clone(),
            environment: environment.into_iter().collect(),
            directory: self.directory.clone().map(PathBuf::into_os_string),
            leads_session: self.leads_session,
            has_usual_umask: self.has_usual_umask,
            cgroups: self.cgroups.iter().cloned().map(PathBuf::into_os_string).collect(),
        }
    }
}

/// A program as it is sent to the launcher, but for its streams.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Request {
    /// The path, or the name where it is on the PATH of `environment`.
    pub program: OsString,
    name: Option<OsString>,
    /// What follows its name.
    pub arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    directory: Option<OsString>,
    leads_session: bool,
    has_usual_umask: bool,
    cgroups: Vec<OsString>,
}

impl Request {
    fn spawn(self, [stdin, stdout, stderr]: [OwnedFd; 3]) -> io::Result<Child> {
        let mut command = self.command()?;
        command.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
        command.spawn().map_err(threads::explained)
    }

    fn command(self) -> io::Result<Command> {
        let mut command = Command::new(&self.program);
        if let Some(name) = &self.name {
            command.arg0(name);
        }
        command.args(&self.arguments).env_clear().envs(self.environment);
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        if self.leads_session {
            process::detach(&mut command);
        }
        if self.has_usual_umask {
            process::with_usual_umask(&mut command);
        }
        let cgroups: Vec<PathBuf> = self.cgroups.into_iter().map(PathBuf::from).collect();
        process::in_cgroups(&mut command, &cgroups)?;
        Ok(command)
    }
}

/// Ends of pipes that stay here.
#[derive(Debug, Default)]
struct Kept {
    stdin: Option<PipeWriter>,
    stdout: Option<PipeReader>,
    stderr: Option<PipeReader>,
}

impl Kept {
    fn open(&mut self, number: usize, stream: Stream) -> io::Result<OwnedFd> {
        match stream {
            Stream::File(file) => Ok(file),
            Stream::Null => Ok(File::options().read(true).write(true).open("/dev/null")?.into()),
            Stream::Inherit => match number {
                0 => io::stdin().as_fd().try_clone_to_owned(),
                1 => io::stdout().as_fd().try_clone_to_owned(),
                _ => io::stderr().as_fd().try_clone_to_owned(),
            },
            Stream::Piped => {
                let (reader, writer) = io::pipe()?;
                match number {
                    0 => {
                        self.stdin = Some(writer);
                        return Ok(reader.into());
                    }
                    1 => self.stdout = Some(reader),
                    _ => self.stderr = Some(reader),
                }
                Ok(writer.into())
            }
        }
    }
}

/// Who tells how a program has ended.
#[derive(Debug)]
enum Ending {
    Child(Child),
    Launcher { connection: OwnedFd, status: Option<ExitStatus> },
}

/// A program that was started: as [`Child`]. It goes on when this is dropped.
#[derive(Debug)]
pub struct Started {
    pid: u32,
    process: OwnedFd,
    ending: Ending,
    /// The writing end of its standard input.
    pub stdin: Option<PipeWriter>,
    /// The reading end of its standard output.
    pub stdout: Option<PipeReader>,
    /// The reading end of its standard error.
    pub stderr: Option<PipeReader>,
}

impl Started {
    /// Its pid.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// The descriptor that stands for it (pidfd).
    pub fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// `BrokenPipe`: it has ended after the launcher that had started it, so that nobody knows how. Else the system's.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.wait_for(Duration::ZERO)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        drop(self.stdin.take());
        loop {
            if let Some(status) = self.wait_for(Duration::from_secs(3600))? {
                return Ok(status);
            }
        }
    }

    /// Waits for its end, for so long at most; `None` if it has not come.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    pub fn wait_for(&mut self, patience: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + patience;
        match &mut self.ending {
            Ending::Child(child) => process::end_of(child, patience),
            Ending::Launcher { status: Some(status), .. } => Ok(Some(*status)),
            Ending::Launcher { connection, status } => {
                if !is_readable(self.process.as_fd(), deadline)? {
                    return Ok(None);
                }
                // The launcher tells it the moment that it has noticed.
                *status = wire::status(connection)?.map(ExitStatus::from_raw);
                Ok(*status)
            }
        }
    }

    /// Kills it; no error where it has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn kill(&mut self) -> io::Result<()> {
        match process::signal(&self.process, libc::SIGKILL) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            done => done,
        }
    }
}

/// Whether there is something to read before the deadline: of a pidfd, the end of its process.
fn is_readable(descriptor: BorrowedFd<'_>, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(descriptor, PollFlags::POLLIN)], limit) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
