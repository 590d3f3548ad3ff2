//! What is written down about a lab while it is up, so that any later command finds it, and can take it down even
//! if the `up` that made it was killed halfway.

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::process::{Process, wait_for};

/// The lab's directory on the host. Making it is what reserves the machine for one lab.
pub(crate) const DIRECTORY: &str = "/run/tranship-lab";
/// The skeleton root filesystem, at one path on the host and in all nodes.
pub(crate) const ROOTFS: &str = "/run/tranship-lab/rootfs";
/// Where nodes find the programs.
pub(crate) const BIN: &str = "/run/tranship-lab/bin";
/// Where a node's /run is put together before it is moved over the host's.
pub(crate) const STAGE: &str = "/run/tranship-lab/stage";
/// The name of the namespace that holds the bridge; no node can have it.
pub(crate) const SWITCH: &str = "switch";
/// The name of the node that clients run in.
pub const CLIENT: &str = "client";

/// One node, or the switch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Node {
    pub name: String,
    pub address: Ipv4Addr,
    /// The init process that holds the namespaces.
    pub init: Process,
}

/// The lab as it is written down.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub nodes: Vec<Node>,
    /// Directories outside of `DIRECTORY` that `up` had to make as mount points.
    pub made: Vec<PathBuf>,
    /// The directory on the host's disk that has one for each node, which is its /srv.
    #[serde(default)]
    pub disk: Option<PathBuf>,
    /// The process that brought the lab up.
    pub owner: Option<Process>,
    /// The link's rate in bits a second, where one was given.
    pub link: Option<u64>,
    /// Whether agents were asked for.
    pub agents: bool,
}

impl State {
    /// Reads it; `None` when no lab is up (or one died before it had written anything).
    pub fn load() -> Result<Option<Self>> {
        let path = Path::new(DIRECTORY).join("state.json");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(LabError::file("read", path)(e)),
        };
        serde_json::from_slice(&text).map(Some).map_err(|e| LabError::file("understand", path)(e.into()))
    }

    /// Writes it, whole or not at all.
    pub fn save(&self) -> Result<()> {
        let path = Path::new(DIRECTORY).join("state.json");
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(self).map_err(|e| LabError::file("write", &path)(e.into()))?;
        fs::write(&new, text).map_err(LabError::file("write", &new))?;
        fs::rename(&new, &path).map_err(LabError::file("write", path))
    }
}

/// Held while a lab is being brought up or taken down.
pub(crate) struct Lock(#[allow(dead_code, reason = "held for its drop")] Flock<fs::File>);

impl Lock {
    /// Waits for whoever brings a lab up or takes it down at this moment; `None` if there is no lab.
    pub fn acquire(limit: Duration) -> Result<Option<Self>> {
        if !Path::new(DIRECTORY).exists() {
            return Ok(None);
        }
        let lock = wait_for(limit, || {
            let directory = fs::File::open(DIRECTORY).ok()?;
            Flock::lock(directory, FlockArg::LockExclusiveNonblock).ok()
        });
        match lock {
            Some(lock) => Ok(Some(Self(lock))),
            None if !Path::new(DIRECTORY).exists() => Ok(None),
            None => Err(LabError::Refused(format!(
                "another tranship-lab has been bringing the lab up or down for {} s; wait for it to end",
                limit.as_secs()
            ))),
        }
    }
}
