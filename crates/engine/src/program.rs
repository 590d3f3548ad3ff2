//! Programs of engines: none is waited for without end.

use std::io::{self, ErrorKind, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use tranship_sys::{process, threads};

/// How long after a process's end its last words may come.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Waits for the end of a command; `None` if it had to be ended.
pub(crate) fn ended(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    match process::end_of(child, patience)? {
        Some(status) => Ok(Some(status)),
        None => child.kill().and_then(|()| child.wait()).map(|_| None),
    }
}

/// What a process says.
pub(crate) struct Reading(Receiver<Vec<u8>>);

/// Reads what a process says on one of its streams as it says it. Where there is no thread for that, the process is
/// ended.
pub(crate) fn reading<S: Read + Send + 'static>(
    child: &mut Child,
    stream: impl FnOnce(&mut Child) -> Option<S>,
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
    pub(crate) fn said(self) -> Vec<u8> {
        let deadline = Instant::now() + LAST_WORDS;
        let mut said = Vec::new();
        while let Ok(piece) = self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            said.extend(piece);
        }
        said
    }
}

/// Runs a command without input to its end; `None` if it had to be ended.
pub(crate) fn output(command: &mut Command, patience: Duration) -> io::Result<Option<Output>> {
    let command = process::with_usual_umask(command);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(threads::explained)?;
    let stdout = reading(&mut child, |child| child.stdout.take())?;
    let stderr = reading(&mut child, |child| child.stderr.take())?;
    let Some(status) = ended(&mut child, patience)? else { return Ok(None) };
    Ok(Some(Output { status, stdout: stdout.said(), stderr: stderr.said() }))
}
