//! Waiting for programs, and reading what they print: nothing without end.

use std::io::{self, ErrorKind, Read};
use std::process::{ExitStatus, Output};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::{Program, Started, Stream};
use crate::threads;

/// How long after a process's end its last words may come.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Waits for the end of a program; `None` if it had to be killed, after that time.
///
/// # Errors
/// As [`Started::wait`].
pub fn ended(child: &mut Started, patience: Duration) -> io::Result<Option<ExitStatus>> {
    match child.wait_for(patience)? {
        Some(status) => Ok(Some(status)),
        None => match child.kill().and_then(|()| child.wait()) {
            // How it ended does not matter, as it was killed.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(None),
        },
    }
}

/// What a program prints.
#[derive(Debug)]
pub struct Reading(Receiver<Vec<u8>>);

/// Reads what a process says on one of its streams as it says it. Where there is no thread for that, the process is
/// ended.
///
/// # Errors
/// There is no thread.
pub fn reading<S: Read + Send + 'static>(
    child: &mut Started,
    stream: impl FnOnce(&mut Started) -> Option<S>,
) -> io::Result<Reading> {
    let (sender, receiver) = mpsc::channel();
    let stream = stream(child);
    let read = move || {
        let Some(mut stream) = stream else { return };
        let mut piece = [0; 16 << 10];
        loop {
            match stream.read(&mut piece) {
                Ok(length @ 1..) if sender.send(piece[..length].to_vec()).is_ok() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // What cannot be read was not said: the status tells whether that matters.
                _ => return,
            }
        }
    };
    if let Err(error) = threads::start("reading", read) {
        let _ = child.kill().and_then(|()| child.wait());
        return Err(error);
    }
    Ok(Reading(receiver))
}

impl Reading {
    /// What it has said, when it has ended. A descendant that has the pipe open still is not waited for.
    pub fn said(self) -> Vec<u8> {
        let deadline = Instant::now() + LAST_WORDS;
        let mut said = Vec::new();
        while let Ok(piece) = self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            said.extend(piece);
        }
        said
    }
}

impl Program {
    /// Runs it without input to its end; `None` if it had to be killed, after that time.
    ///
    /// # Errors
    /// It cannot be started, or read.
    pub fn output(&mut self, patience: Duration) -> io::Result<Option<Output>> {
        self.with_usual_umask().stdin(Stream::Null).stdout(Stream::Piped).stderr(Stream::Piped);
        let mut child = self.spawn()?;
        let stdout = reading(&mut child, |child| child.stdout.take())?;
        let stderr = reading(&mut child, |child| child.stderr.take())?;
        let Some(status) = ended(&mut child, patience)? else { return Ok(None) };
        Ok(Some(Output { status, stdout: stdout.said(), stderr: stderr.said() }))
    }
}
