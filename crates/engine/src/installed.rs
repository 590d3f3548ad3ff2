//! Which engines are installed, whether or not they run.

use std::path::{Path, PathBuf};

/// Where programs are besides PATH.
const PLACES: [&str; 4] = ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"];

/// Whether a program is installed.
pub(crate) fn is_installed(program: &Path) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(PLACES.map(PathBuf::from)).any(|directory| directory.join(program).is_file())
}

/// Why a daemon of a program does not answer that has no socket: cause and remedy, if it is installed.
pub(crate) fn why_no_socket(daemon: &str, unit: &str, socket: &Path) -> Option<(String, String)> {
    let cause = format!("{unit} is installed, but its daemon does not run: there is no {}", socket.display());
    let remedy = format!("start it (`systemctl start {unit}`), or name its socket in the agent's configuration");
    is_installed(Path::new(daemon)).then_some((cause, remedy))
}
