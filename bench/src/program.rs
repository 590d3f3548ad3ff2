//! Running a program to its end, with a limit on its time.

use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Runs a command with what it prints taken up; one that does not end within `limit` is killed.
pub fn run(mut command: Command, limit: Duration) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {name}"))?;
    let stdout = child.stdout.take().map(reader);
    let stderr = child.stderr.take().map(reader);
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("cannot wait for {name}"))? {
            break status;
        }
        if Instant::now() >= deadline {
            // It may end by itself at this moment; in either case it is to be waited for.
            let _ = child.kill();
            let _ = child.wait();
            bail!("{name} did not end within {} s, and was killed", limit.as_secs());
        }
        // The only clock that this rounds is `total_ms`, which is of the order of seconds.
        std::thread::sleep(Duration::from_millis(1));
    };
    let text =
        |reader: Option<std::thread::JoinHandle<Vec<u8>>>| reader.and_then(|r| r.join().ok()).unwrap_or_default();
    Ok(Output { status, stdout: text(stdout), stderr: text(stderr) })
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        // What was read before an error is what there is to show.
        let _ = from.read_to_end(&mut all);
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_and_the_status_come_back() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let output = run(command, Duration::from_secs(10)).unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    }

    #[test]
    fn what_does_not_end_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let error = run(command, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("did not end"), "{error}");
    }
}
