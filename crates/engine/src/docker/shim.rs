//! containerd's shims, as far as they are left of starts that were lost.
//!
//! Docker's containerd has a shim for each task, which outlives it. Where containerd ends in the middle of a start the shim has a task that
//! was never created: containerd 1.6 takes it for one that is there when it runs again, Docker cannot delete it, and each further start of the
//! container is refused ("already exists"). (Later ones end such shims by themselves.) Of a shim that dies containerd removes what is left.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Docker;
use crate::EngineError;

/// How long a shim may take to end by itself.
const END: Duration = Duration::from_millis(500);
/// How long containerd may take to remove what is left of one.
const REMOVAL: Duration = Duration::from_secs(10);

/// More than the arguments of any shim, in bytes.
const LONGEST: u64 = 64 << 10;

/// Ends what containerd keeps of a start that Docker has lost.
pub(super) fn end_left(name: &str, id: &str) -> Result<(), EngineError> {
    let why = |error: io::Error| EngineError::Refused {
        engine: Docker::NAME,
        what: "end",
        name: name.to_owned(),
        why: error.to_string(),
    };
    end_shims(id).map_err(why)
}

/// Ends the shims of a container that does not run and that nobody is starting, and waits until containerd has removed what they leave.
///
/// # Errors
/// If one cannot be ended, or containerd removes nothing for 10 s.
fn end_shims(container: &str) -> io::Result<()> {
    if await_true(END, || shims(container).is_empty()) {
        return Ok(());
    }
    for (pid, bundle) in shims(container) {
        tracing::warn!(container, %pid, "a start that was lost has left a shim, which is ended");
        match kill(pid, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error.into()),
        }
        if !await_true(REMOVAL, || !bundle.exists()) {
            let why = format!("containerd has not removed {} within {REMOVAL:?}; restart it", bundle.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
    }
    Ok(())
}

fn await_true(limit: Duration, fits: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        match fits() {
            true => return true,
            false if Instant::now() > deadline => return false,
            false => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// The shims of a container, each with its bundle, in which it runs.
fn shims(container: &str) -> Vec<(Pid, PathBuf)> {
    let shim = |entry: std::fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        // A program in a container calls itself whatever it likes, at whatever length.
        let namespace = |process: &Path| std::fs::read_link(process.join("ns/pid")).ok();
        (namespace(&entry.path())? == namespace(Path::new("/proc/self"))?).then_some(())?;
        let mut arguments = Vec::new();
        File::open(entry.path().join("cmdline")).ok()?.take(LONGEST).read_to_end(&mut arguments).ok()?;
        is_of(&arguments, container).then_some(())?;
        Some((Pid::from_raw(pid), std::fs::read_link(entry.path().join("cwd")).ok()?))
    };
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(shim).collect()
}

/// Whether these are the arguments of a shim of a container.
fn is_of(arguments: &[u8], container: &str) -> bool {
    let words: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
    let program = str::from_utf8(words[0]).ok().and_then(|path| Path::new(path).file_name()?.to_str());
    program.is_some_and(|name| name.starts_with("containerd-shim"))
        && words.windows(2).any(|pair| pair == [b"-id".as_slice(), container.as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_is_told_by_its_program_and_the_container_s_id() {
        let line = b"/usr/bin/containerd-shim-runc-v2\0-namespace\0moby\0-id\0d095\0-address\0/run/docker/containerd/containerd.sock\0";
        assert!(is_of(line, "d095") && !is_of(line, "d09") && !is_of(line, "moby"));
        assert!(!is_of(b"vi\0-id\0d095\0", "d095") && !is_of(b"", "d095"));
    }
}
