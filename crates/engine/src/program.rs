//! Programs of engines: none is waited for without end.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use tranship_sys::process;

/// Waits for the end of a command; `None` if it had to be ended.
pub(crate) fn ended(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    match process::end_of(child, patience)? {
        Some(status) => Ok(Some(status)),
        None => child.kill().and_then(|()| child.wait()).map(|_| None),
    }
}

/// What a process said, read as it says it.
pub(crate) fn reading(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut said = Vec::new();
        // What cannot be read was not said: the status tells whether that matters.
        let _ = stream.map(|mut stream| stream.read_to_end(&mut said));
        said
    })
}

/// Runs a command without input to its end; `None` if it had to be ended.
pub(crate) fn output(command: &mut Command, patience: Duration) -> io::Result<Option<Output>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr) = (reading(child.stdout.take()), reading(child.stderr.take()));
    // Of one that was ended a descendant may have the pipes open still.
    let Some(status) = ended(&mut child, patience)? else { return Ok(None) };
    let said = |reader: std::thread::JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
    Ok(Some(Output { status, stdout: said(stdout), stderr: said(stderr) }))
}
