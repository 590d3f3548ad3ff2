use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use anyhow::Result;

/// Time between two checks.
const TICK: Duration = Duration::from_millis(20);

/// Runs `check` every 20 ms, with a tick number that begins at `first`, and sends everybody who connects a line for each: `ok TICK`, or
/// `bad TICK: ERROR`. The first error is final: nothing is checked any more.
///
/// # Errors
/// If the listener cannot be made non-blocking.
pub fn serve_status(listener: &TcpListener, first: u64, mut check: impl FnMut(u64) -> Result<()>) -> Result<()> {
    listener.set_nonblocking(true)?;
    let mut connections: Vec<TcpStream> = Vec::new();
    let mut complaint: Option<String> = None;
    for tick in first.. {
        if complaint.is_none() {
            complaint = check(tick).err().map(|error| format!("{error:#}"));
        }
        let line = match &complaint {
            None => format!("ok {tick}\n"),
            Some(why) => format!("bad {tick}: {why}\n"),
        };
        connections.extend(listener.accept().ok().map(|(stream, _)| stream));
        connections.retain_mut(|stream| stream.write_all(line.as_bytes()).is_ok());
        std::thread::sleep(TICK);
    }
    Ok(())
}
