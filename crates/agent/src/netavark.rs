//! What Podman executes in place of netavark when it starts a container that arrives: the network is to go into the namespace that
//! the agent has made, behind a closed gate, and not into the one that Podman has just made. Then this is netavark. For a holder of
//! addresses it only answers: that needs no interface.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

/// The name that it is called by.
pub const NAME: &str = "netavark";

/// Where Podman looks for it.
const DIRECTORIES: [&str; 4] =
    ["/usr/local/libexec/podman", "/usr/local/lib/podman", "/usr/libexec/podman", "/usr/lib/podman"];

/// Answers for a holder as netavark would, and does nothing.
fn answer(arguments: &[OsString]) -> anyhow::Result<i32> {
    let asked = std::io::read_to_string(std::io::stdin())?;
    if arguments.iter().any(|word| word == "setup") {
        let answer = tranship_engine::holder_attached(&serde_json::from_str(&asked)?);
        println!("{}", answer.context("what netavark is asked for cannot be read")?);
    }
    Ok(0)
}

/// Runs with what netavark was to be run with. Does not return if all goes well.
pub fn run(arguments: &[OsString]) -> anyhow::Result<i32> {
    if std::env::var_os(tranship_engine::HOLDER_VARIABLE).is_some() {
        return answer(arguments);
    }
    if let [.., command, namespace] = arguments
        && command == "setup"
        && let Some(made) = std::env::var_os(tranship_engine::NETWORK_VARIABLE)
    {
        tranship_network::rename(Path::new(&made), Path::new(namespace))?;
    }
    let netavark = DIRECTORIES.iter().map(|directory| Path::new(directory).join(NAME)).find(|file| file.exists());
    let netavark = netavark.with_context(|| format!("there is no netavark in {}", DIRECTORIES.join(", ")))?;
    Err(Command::new(netavark).args(arguments).exec().into())
}
