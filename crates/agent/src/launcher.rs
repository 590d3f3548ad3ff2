//! `transhipd launcher`: starts the programs from which containers descend, for an agent that is confined
//! ([`tranship_sys::launch`]).
//!
//! It takes requests from root alone, with `--unit` from that unit's processes alone, and starts the programs of the agent's
//! configuration and no others. It reads nothing from peers or containers.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use clap::Parser;
use tranship_sys::launch::Request;
use tranship_sys::launch::server::{self, Rules};
use tranship_sys::process;

use crate::config::Config;
use crate::notify::Manager;
use crate::{stdio, tls};

/// The argument with which `transhipd` is the launcher.
pub const ARGUMENT: &str = "launcher";
/// What `transhipd` may be started as.
const OWN: [&str; 4] = ["pager", tls::ARGUMENT, stdio::ARGUMENT, "start-in-docker"];

/// Starts engines, criu and Tranship's own processes for an agent that is confined.
#[derive(Debug, Parser)]
#[command(name = "transhipd launcher")]
struct Arguments {
    /// The agent's configuration file.
    #[arg(long, default_value = "/etc/tranship/agent.toml", value_name = "FILE")]
    config: PathBuf,
    /// Where to listen.
    #[arg(long, default_value = "/run/tranship/launcher.sock", value_name = "SOCKET")]
    socket: PathBuf,
    /// The systemd unit that alone may ask.
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
}

/// Does not return if all goes well.
pub fn run(arguments: &[std::ffi::OsString]) -> anyhow::Result<i32> {
    let Arguments { config, socket, unit } = Arguments::parse_from(&arguments[1..]);
    let manager = Manager::take();
    process::set_name(c"tranship-launch");
    process::protect_secrets();
    let allowed = Allowed { current: Mutex::new(Config::load(&config)?), file: config };
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("{} cannot be made", directory.display()))?;
    }
    let listener = server::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    manager.tell("READY=1");
    server::serve(&listener, Rules { unit, program: Box::new(move |pid, request| allowed.check(pid, request)) })
}

/// The programs that may be started.
struct Allowed {
    file: PathBuf,
    current: Mutex<Config>,
}

impl Allowed {
    fn check(&self, asking: u32, request: &Request) -> Result<(), String> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if is_allowed(&current, asking, request) {
            return Ok(());
        }
        // The agent may have been started again with another configuration.
        *current = Config::load(&self.file).map_err(|error| error.to_string())?;
        match is_allowed(&current, asking, request) {
            true => Ok(()),
            false => Err(format!(
                "the launcher does not start {}; name it in {} as the engine's program",
                request.program.display(),
                self.file.display()
            )),
        }
    }
}

fn is_allowed(config: &Config, asking: u32, request: &Request) -> bool {
    let program = Path::new(&request.program);
    let engines = [&config.runc.path, &config.podman.path, &config.containerd.ctr];
    let is_criu = match &config.criu.path {
        Some(path) => program == path,
        None => program.is_absolute() && program.file_name() == Some(OsStr::new("criu")),
    };
    let kept = [&config.state_dir, &config.run_dir].map(|directory| directory.join("program/transhipd"));
    let is_own = program == Path::new(&format!("/proc/{asking}/exe")) || kept.iter().any(|kept| program == kept);
    let is_own_part = || request.arguments.first().is_some_and(|first| OWN.iter().any(|part| first == part));
    engines.contains(&&program.to_owned())
        || is_criu
        || is_own && is_own_part()
        || tranship_network::cni::is_plugin(program)
}
