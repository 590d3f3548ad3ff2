//! `tranship agent`: becomes transhipd.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "transhipd";

/// Replaces this process by the agent. Returns only the reason why it could not, in one sentence.
pub fn become_agent(arguments: &[OsString]) -> String {
    let program = beside_us().unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).args(arguments).exec();
    match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{PROGRAM} is neither beside this program nor on PATH; install it, or run it by its full path")
        }
        _ => format!("cannot execute {}: {error}; check that it is a program for this machine", program.display()),
    }
}

/// The agent that was installed with this very program is preferred: their versions fit.
fn beside_us() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(PROGRAM);
    path.is_file().then_some(path)
}
