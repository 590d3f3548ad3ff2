//! Container engines: what Tranship asks of them, and runc.
//!
//! Engines stay stock. For a dump and for a restore the engine is run by its own command line with the CRIU front on its
//! PATH, so that before and afterwards it is the engine that manages the container.

mod cpu;
mod freezer;
mod runc;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use tranship_types::CarriedTree;

pub use cpu::Cpu;
pub use freezer::{Freezer, FreezerError};
pub use runc::Runc;

/// What an engine says of a container's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Made, not started.
    Created,
    /// Running.
    Running,
    /// Frozen.
    Paused,
    /// Ended.
    Stopped,
}

/// One row of an engine's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The container's name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Pid of its init on this node; 0 where there is none.
    pub init: u32,
    /// When it was made, as the engine writes it (RFC 3339).
    pub created: String,
}

/// What has to be known of a container to move it.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Pid of its init on this node.
    pub init: u32,
    /// When it was made, as the engine writes it: tells it from a later one of the same name.
    pub created: String,
    /// Its OCI configuration, root path absolute.
    pub config: serde_json::Value,
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its cgroup's freezer, through which its processes are also found.
    pub freezer: Freezer,
    /// Its memory cgroup, where there is one.
    pub memory_cgroup: Option<PathBuf>,
    /// Its CPU cgroup, where there is one.
    pub cpu: Option<Cpu>,
    /// The directory trees on disk that it can write to. Which of them move with it depends on the user.
    pub trees: Vec<CarriedTree>,
}

impl Container {
    /// The root filesystem.
    pub fn rootfs(&self) -> PathBuf {
        self.config["root"]["path"].as_str().unwrap_or_default().into()
    }

    /// Its labels: what the OCI configuration calls annotations.
    pub fn labels(&self) -> BTreeMap<String, String> {
        serde_json::from_value(self.config["annotations"].clone()).unwrap_or_default()
    }

    /// The network namespace, if it is one with a name of its own.
    pub fn network_namespace(&self) -> Option<PathBuf> {
        let namespaces = self.config["linux"]["namespaces"].as_array()?;
        let network = namespaces.iter().find(|n| n["type"] == "network")?;
        Some(network["path"].as_str()?.into())
    }

    /// The mounts whose content lies on the node: (source there, destination in the container).
    pub fn binds(&self) -> Vec<(PathBuf, PathBuf)> {
        let is_bind = |mount: &&serde_json::Value| {
            mount["type"] == "bind"
                || mount["options"].as_array().is_some_and(|o| o.iter().any(|o| o == "bind" || o == "rbind"))
        };
        let path = |value: &serde_json::Value| PathBuf::from(value.as_str().unwrap_or_default());
        let mounts = self.config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
        mounts.iter().filter(is_bind).map(|m| (path(&m["source"]), path(&m["destination"]))).collect()
    }

    /// The mount points that the engine hands to CRIU as external: binds, and the files that it masks with /dev/null.
    pub fn external_mounts(&self) -> Vec<PathBuf> {
        let masked = self.config["linux"]["maskedPaths"].as_array().map(Vec::as_slice).unwrap_or_default();
        let masked = masked.iter().filter_map(|path| path.as_str()).map(PathBuf::from);
        self.binds().into_iter().map(|(_, destination)| destination).chain(masked).collect()
    }

    /// All its processes, by their pids on this node.
    pub fn processes(&self) -> Result<Vec<u32>, FreezerError> {
        self.freezer.processes()
    }
}

/// Where a dump or restore happens.
#[derive(Debug, Clone, Copy)]
pub struct Images<'a> {
    /// The images' directory.
    pub images: &'a Path,
    /// CRIU's work directory: logs, and the lazy-pages socket.
    pub work: &'a Path,
    /// The directory that has the CRIU front as `criu`; it comes first on the engine's PATH.
    pub front: &'a Path,
    /// The front's plan.
    pub plan: &'a Path,
}

/// What can go wrong with an engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No such container.
    #[error("there is no container {name:?} in {engine} on this node; `tranship ls` shows those that there are")]
    NoSuchContainer {
        /// The engine.
        engine: &'static str,
        /// The name.
        name: String,
    },
    /// The engine's program cannot be run.
    #[error("{program:?} cannot be run: {source}; install it, or name it in the agent's configuration")]
    Run {
        /// The program.
        program: OsString,
        /// Why.
        source: io::Error,
    },
    /// The engine refused.
    #[error("{engine} could not {what} {name:?}: {why}")]
    Refused {
        /// The engine.
        engine: &'static str,
        /// What was asked.
        what: &'static str,
        /// Of which container.
        name: String,
        /// The engine's own last line.
        why: String,
    },
    /// What it has written cannot be read.
    #[error("{path:?} of container {name:?} cannot be read: {why}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Which container.
        name: String,
        /// Why.
        why: String,
    },
    /// The freezer cannot be used.
    #[error(transparent)]
    Freezer(#[from] FreezerError),
}

/// An engine.
pub trait Engine: Send + Sync {
    /// Its name, e.g. `runc`.
    fn name(&self) -> &'static str;

    /// Whether it can be used, and which version it is.
    fn version(&self) -> Result<String, EngineError>;

    /// Its containers.
    fn list(&self) -> Result<Vec<Summary>, EngineError>;

    /// One of them.
    fn inspect(&self, name: &str) -> Result<Container, EngineError>;

    /// The configuration with which the container is re-created on this node: cgroups below this node's parent, and the
    /// like. `config` comes from the source.
    fn adopt(&self, name: &str, config: serde_json::Value) -> serde_json::Value;

    /// The command that dumps the container through the CRIU front and leaves it as it is.
    fn dump(&self, container: &Container, images: Images<'_>) -> Command;

    /// The command that restores a container through the CRIU front, from a bundle directory made for it.
    fn restore(&self, name: &str, bundle: &Path, images: Images<'_>) -> Command;

    /// Removes a container from the engine, ending what still runs of it. Removing one that is not there is a success.
    fn remove(&self, name: &str) -> Result<(), EngineError>;

    /// What the engine knows of a container that it has restored, in a form of its own; `None` if it knows none.
    fn remember(&self, name: &str) -> Option<Vec<u8>>;

    /// The directory on this node that takes in a tree of container `name` which is arriving here: after the bundle was made, and
    /// before the restore. One of the engine's own (a writable layer, a volume) must be there, made for this container; whatever
    /// is in it is removed.
    fn tree_directory(&self, name: &str, tree: &CarriedTree) -> Result<PathBuf, EngineError> {
        let _ = name;
        Ok(tree.path.clone())
    }

    /// Makes the engine know a container again that it has forgotten although it runs. `known` is what
    /// [`Engine::remember`] gave.
    fn reinstate(&self, name: &str, known: &[u8]) -> Result<(), EngineError>;

    /// Whether anything runs in the cgroups that the configuration (as from [`Engine::adopt`]) names.
    fn occupied(&self, config: &serde_json::Value) -> bool;

    /// Ends whatever runs in the cgroups that the configuration (as from [`Engine::adopt`]) names, and removes those: for
    /// what a restore that was killed has left.
    fn sweep(&self, config: &serde_json::Value) -> Result<(), EngineError>;

    /// Directories of the engine's own below which a killed restore may have left mounts, for this container.
    fn mount_residue(&self, name: &str) -> Vec<PathBuf>;
}
