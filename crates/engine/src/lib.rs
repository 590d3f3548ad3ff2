//! Container engines: what Tranship asks of them, and runc, Docker, Podman and containerd.
//!
//! Engines stay stock, and manage their containers: dump and restore run an engine's own command line, with the CRIU front on its PATH.

mod archive;
mod attached;
mod containerd;
mod cpu;
mod crossing;
mod described;
mod docker;
mod etc_files;
mod freezer;
#[doc(hidden)]
pub mod fuzz;
mod holders;
mod installed;
mod json;
mod limits;
mod links;
mod logs;
mod mark;
mod mounts;
mod note;
mod podman;
mod pool;
mod runc;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_sys::launch::Program;
use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName};

pub use attached::AttachedNetwork;
pub use containerd::Containerd;
pub use cpu::{Cpu, Share};
pub use described::keep_what_was_made;
pub use docker::{Docker, start as start_docker};
pub use etc_files::{EtcFiles, name_beyond};
pub use freezer::{Freezer, FreezerError, OpenFreezer};
pub use holders::{Endpoint, Holders, Holding, holder_namespace, is_holder, is_holder_namespace};
pub use limits::{Limits, others_were_changed as other_limits_were_changed, were_changed as limits_were_changed};
pub use logs::LogFiles;
pub use mark::Mark;
pub use mounts::{MountTree, behind_links, misplaced as misplaced_mount, write_as_configured};
pub use podman::{HOLDER_VARIABLE, NETWORK_VARIABLE, Podman, holder_attached};
pub use runc::{Runc, has_cgroups_2};

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
    /// As [`Container::id`].
    pub id: String,
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
    /// What its engine calls it: for runc the name, elsewhere an id that no other container ever has.
    pub id: String,
    /// Its state.
    pub state: State,
    /// Pid of its init on this node; 0 where there is none.
    pub init: u32,
    /// When it was made, as the engine writes it: tells it from a later one of the same name.
    pub created: String,
    /// Its OCI configuration, root path absolute. Null where it does not run, and the engine keeps none.
    pub config: Value,
    /// What the engine needs besides to make it again on another node; null for runc.
    pub parameters: Value,
    /// What its standard streams were when it was started, as its OCI runtime has noted it: `pipe:[INODE]` or a path. Those of a
    /// restored container are those that it had where it was started. Empty where the runtime notes nothing.
    pub stdio: Vec<String>,
    /// Paths of the node that are mounted into it, and that another node must have.
    pub binds: Vec<PathBuf>,
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its cgroup's freezer, through which its processes are also found.
    pub freezer: Freezer,
    /// The directories of its cgroups by controller, and by no name that of version 2. None where its limits are not known.
    pub cgroups: HashMap<String, PathBuf>,
    /// Its memory cgroup, where there is one.
    pub memory_cgroup: Option<PathBuf>,
    /// Its CPU cgroup, where there is one.
    pub cpu: Option<Cpu>,
    /// The directory trees on disk that it can write to. Which of them move with it depends on the user.
    pub trees: Vec<CarriedTree>,
}

impl Container {
    /// One that does not run: nothing but its name, which is its id too, and its state.
    fn at_rest(name: &str, state: State) -> Self {
        Self {
            name: name.to_owned(),
            id: name.to_owned(),
            state,
            init: 0,
            created: String::new(),
            config: Value::Null,
            parameters: Value::Null,
            stdio: Vec::new(),
            binds: Vec::new(),
            bundle: PathBuf::new(),
            freezer: Freezer::of_nothing(),
            cgroups: HashMap::new(),
            memory_cgroup: None,
            cpu: None,
            trees: Vec::new(),
        }
    }

    /// The root filesystem.
    pub fn rootfs(&self) -> PathBuf {
        self.config["root"]["path"].as_str().unwrap_or_default().into()
    }

    /// Its labels: what the OCI configuration calls annotations.
    pub fn labels(&self) -> BTreeMap<String, String> {
        serde_json::from_value(self.config["annotations"].clone()).unwrap_or_default()
    }

    /// Whether it has joined a namespace of this kind that was made for others, too.
    pub fn joins_namespace(&self, kind: &str) -> bool {
        let namespaces = self.config["linux"]["namespaces"].as_array();
        namespaces.is_some_and(|all| all.iter().any(|n| n["type"] == kind && n["path"].is_string()))
    }

    /// Whether it has a namespace of this kind (as in the OCI configuration) of its own, or one that it has joined, and
    /// not the node's.
    pub fn has_namespace(&self, kind: &str) -> bool {
        let namespaces = self.config["linux"]["namespaces"].as_array();
        namespaces.is_some_and(|all| all.iter().any(|n| n["type"] == kind))
    }

    /// The network namespace, if it is one with a name of its own.
    pub fn network_namespace(&self) -> Option<PathBuf> {
        let namespaces = self.config["linux"]["namespaces"].as_array()?;
        let network = namespaces.iter().find(|n| n["type"] == "network")?;
        Some(network["path"].as_str()?.into())
    }

    /// The mounts whose content lies on the node, the engine's own among them: (source there, destination in the
    /// container).
    pub fn bind_mounts(&self) -> Vec<(PathBuf, PathBuf)> {
        let path = |value: &Value| PathBuf::from(value.as_str().unwrap_or_default());
        let mounts = self.config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
        mounts.iter().filter(|m| mounts::binds(m)).map(|m| (path(&m["source"]), path(&m["destination"]))).collect()
    }

    /// Where the container has the tmpfs for `/dev/shm` that Docker and Podman mount for one container alone, among what they keep
    /// of it: its content is the container's.
    pub fn own_shared_memory(&self) -> Option<PathBuf> {
        self.shared_memory_of(&self.id)
    }

    /// Where it has that tmpfs of the container with this id.
    fn shared_memory_of(&self, id: &str) -> Option<PathBuf> {
        let of_this_one = |source: &Path| source.ends_with("shm") && source.iter().any(|part| part == id);
        let found = self.bind_mounts().into_iter().find(|(source, _)| of_this_one(source));
        found.map(|(_, inside)| inside).filter(|inside| inside == Path::new("/dev/shm"))
    }

    /// The mount points that the engine hands to CRIU as external: binds, and the files that it masks with /dev/null.
    pub fn external_mounts(&self) -> Vec<PathBuf> {
        let masked = self.config["linux"]["maskedPaths"].as_array().map(Vec::as_slice).unwrap_or_default();
        let masked = masked.iter().filter_map(|path| path.as_str()).map(PathBuf::from);
        self.bind_mounts().into_iter().map(|(_, destination)| destination).chain(masked).collect()
    }

    /// All its processes, by their pids on this node.
    pub fn processes(&self) -> Result<Vec<u32>, FreezerError> {
        self.freezer.processes()
    }
}

/// Containers that share namespaces, which one more container holds.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// The container that holds the namespaces, and does nothing.
    pub infra: Option<Container>,
    /// All others, by their names.
    pub members: Vec<String>,
    /// What of it no other node could give to it.
    pub obstacles: Vec<Blocker>,
    /// The host name of its containers.
    pub host_name: String,
    /// What it has mounted into each of them, as its engine writes it.
    binds: Vec<String>,
    /// What makes it again on another node.
    parameters: Value,
}

impl Pod {
    /// One of these containers, for tests.
    #[doc(hidden)]
    pub fn for_test(name: &str, members: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            infra: None,
            members: members.iter().map(|one| (*one).to_owned()).collect(),
            obstacles: Vec::new(),
            host_name: name.to_owned(),
            binds: Vec::new(),
            parameters: Value::Null,
        }
    }

    /// Where a container of it has the tmpfs for `/dev/shm` that all of them have.
    pub fn shared_memory(&self, container: &Container) -> Option<PathBuf> {
        container.shared_memory_of(&self.infra.as_ref()?.id)
    }

    /// Has the parameters of a container of it be those of one that moves with all others. One of them brings the pod itself.
    pub fn join(&self, parameters: &mut Value, brings: bool) {
        let brought = if brings { self.parameters.clone() } else { Value::Null };
        parameters["joined"] = serde_json::json!({"name": self.name, "binds": self.binds, "brought": brought});
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

impl Images<'_> {
    /// Has a command of runc's for a checkpoint or restore use them, through the front.
    pub fn put_front(&self, command: &mut Program) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut with_front = self.front.as_os_str().to_owned();
        with_front.push(":");
        with_front.push(path);
        command.env("PATH", with_front).env("TRANSHIP_FRONT", self.plan);
        command.arg("--image-path").arg(self.images).arg("--work-path").arg(self.work);
        command.args(["--tcp-established", "--file-locks", "--ext-unix-sk"]);
    }
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
    /// The engine's daemon does not answer.
    #[error(
        "{engine} does not answer at {socket:?}: {source}; start it (`systemctl start {engine}`), or name its socket in the agent's \
         configuration"
    )]
    Silent {
        /// The engine.
        engine: &'static str,
        /// Where its daemon should listen.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The freezer cannot be used.
    #[error(transparent)]
    Freezer(#[from] FreezerError),
}

impl EngineError {
    /// Cause and remedy; `otherwise` where it has no remedy of its own. What an engine reports may
    /// have semicolons, too.
    pub fn told(&self, otherwise: &str) -> (String, String) {
        let text = self.to_string();
        let (cause, remedy) = text.rsplit_once("; ").unwrap_or((&text, otherwise));
        (cause.to_owned(), remedy.to_owned())
    }
}

/// Where a tree of an engine's own will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreePlace {
    /// In this directory, which is there already.
    There(PathBuf),
    /// In a directory that the engine will make, below this one.
    Below(PathBuf),
}

/// An image that a node lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingImage {
    /// What it is called on the source.
    pub name: String,
    /// Whether it may be called so on this node, too: no other one is.
    pub may_be_named: bool,
    /// Bytes of all its layers, unpacked.
    pub bytes: u64,
    /// How many layers it has.
    pub layers: usize,
    /// How many of them are on this node: the first ones, where `known` does not name them.
    pub known_layers: usize,
    /// Their digests, where layers are told by these.
    #[serde(default)]
    pub known: Vec<String>,
    /// Whether the archive has to have an empty file for each of them.
    #[serde(default)]
    pub known_as_empty: bool,
    /// Where the engine keeps images.
    pub directory: PathBuf,
}

fn without_images(engine: EngineName, name: &str) -> EngineError {
    let why = "it makes its containers from no image".to_owned();
    EngineError::Refused { engine: engine.as_str(), what: "take the image of", name: name.to_owned(), why }
}

fn without_trees(engine: EngineName, name: &str, tree: &CarriedTree) -> EngineError {
    let (engine, name, why) = (engine.as_str(), name.to_owned(), format!("it has no {} of its own", tree.kind));
    EngineError::Refused { engine, what: "take in the files of", name, why }
}

/// An engine.
pub trait Engine: Send + Sync {
    /// Its name.
    fn name(&self) -> EngineName;

    /// Whether there is anything of it on this node.
    fn is_present(&self) -> bool;

    /// Why there is nothing of it on this node although its program is installed: cause and remedy.
    fn why_absent(&self) -> Option<(String, String)> {
        None
    }

    /// Whether it can be used, and which version it is.
    fn version(&self) -> Result<String, EngineError>;

    /// Its containers.
    fn list(&self) -> Result<Vec<Summary>, EngineError>;

    /// One of them.
    fn inspect(&self, name: &str) -> Result<Container, EngineError>;

    /// Whether it attaches its containers to the network by itself when it starts them.
    fn attaches_network(&self) -> bool;

    /// Whether it makes the root filesystem by itself, from an image.
    fn makes_root(&self) -> bool;

    /// What of the container's own keeps the engine from making it again elsewhere.
    fn obstacles(&self, container: &Container) -> Vec<Blocker>;

    /// The pod that the container belongs to, if any.
    ///
    /// # Errors
    /// If the engine cannot show it.
    fn pod(&self, container: &Container) -> Result<Option<Pod>, EngineError> {
        let _ = container;
        Ok(None)
    }

    /// What of the container's own will be another way after a move, which hinders none.
    fn remarks(&self, container: &Container) -> Vec<String> {
        let _ = container;
        Vec::new()
    }

    /// The files of the container's log, if the engine keeps it in files that another node's engine can be given. From [`Engine::create`] on, but not
    /// while the engine starts the container.
    ///
    /// # Errors
    /// If the engine cannot be asked.
    fn log(&self, name: &str) -> Result<Option<LogFiles>, EngineError> {
        let _ = name;
        Ok(None)
    }

    /// Whether the engine has written all that the container, which has been killed, had logged.
    ///
    /// # Errors
    /// If the engine cannot be asked.
    fn log_has_ended(&self, name: &str) -> Result<bool, EngineError> {
        let _ = name;
        Ok(true)
    }

    /// Has the container that is made from these parameters, which are this engine's, show a rotated log file.
    fn show_rotated_log(&self, parameters: &mut Value) {
        let _ = parameters;
    }

    /// What becomes of the container's log where it stays behind.
    fn log_left(&self, container: &Container) -> Option<String> {
        let _ = container;
        None
    }

    /// The engine's networks that the container is attached to. An engine that attaches none has none.
    fn networks(&self, container: &Container) -> Vec<AttachedNetwork> {
        let _ = container;
        Vec::new()
    }

    /// The engine's holders of addresses; `None` where it has no IPAM of its own.
    fn holders(&self) -> Option<&dyn Holders> {
        None
    }

    /// The parameters with which another engine makes a container like this one, which is this engine's.
    ///
    /// # Errors
    /// What that engine could not give it.
    fn parameters_for(&self, other: EngineName, container: &Container) -> Result<Value, Vec<Blocker>> {
        let cause = format!("container {} is {}'s, which {other} cannot take over", container.name, self.name());
        Err(vec![Blocker::new(BlockerKind::Engine, cause, "leave out --to-engine")])
    }

    /// What on this node keeps the engine from making a container of these parameters, which come from the source.
    fn missing(&self, name: &str, parameters: &Value) -> Vec<Blocker>;

    /// The configuration with which the container is re-created on this node: cgroups below this node's parent, and the
    /// like. `config` comes from the source.
    /// An engine that makes it from its parameters alone leaves it as it is.
    fn adopt(&self, name: &str, config: Value) -> Value {
        let _ = name;
        config
    }

    /// The command that dumps the container through the CRIU front and leaves it as it is.
    fn dump(&self, container: &Container, images: Images<'_>) -> Program;

    /// Makes what a restore starts from, and notes it in the directory `bundle`, which is there. `config` is as from
    /// [`Engine::adopt`], `parameters` come from the source.
    fn create(&self, name: &str, bundle: &Path, config: &Value, parameters: &Value) -> Result<(), EngineError>;

    /// Removes what [`Engine::create`] has made, but for the directory. What is not there is no error.
    fn discard(&self, name: &str, bundle: &Path) -> Result<(), EngineError>;

    /// Whether the container is the one that [`Engine::create`] made with this directory.
    fn is_made_from(&self, container: &Container, bundle: &Path) -> bool;

    /// The command that restores a container through the CRIU front, from what [`Engine::create`] made. The engine's
    /// network, where it attaches by itself, goes into the namespace `network`.
    fn restore(
        &self,
        name: &str,
        bundle: &Path,
        images: Images<'_>,
        network: Option<&Path>,
    ) -> Result<Program, EngineError>;

    /// Has the pod that [`Engine::create`] made with this directory take the tmpfs that is mounted at `shared` for the `/dev/shm` of its containers, before
    /// [`Engine::restore`] starts it. May be repeated.
    fn share_memory(&self, bundle: &Path, shared: &Path) -> Result<(), EngineError> {
        let _ = (bundle, shared);
        Ok(())
    }

    /// Ends what runs of a container that was restored, or half so, and leaves what [`Engine::create`] made. What is
    /// not there is no error.
    fn end(&self, name: &str, bundle: &Path) -> Result<(), EngineError>;

    /// Has the engine leave the container alone when its processes end, which are about to be killed.
    fn retire(&self, name: &str) -> Result<(), EngineError>;

    /// Has the engine notice a container that runs and that it takes for one that was never started: it was killed when the container had
    /// begun to run, and before it had noted that. False: it cannot be brought to.
    fn notices(&self, name: &str) -> Result<bool, EngineError> {
        let _ = name;
        Ok(true)
    }

    /// Removes a container from the engine, ending what still runs of it. Removing one that is not there is a success.
    fn remove(&self, name: &str) -> Result<(), EngineError>;

    /// What the engine knows of a container that it has restored, in a form of its own; `None` if it knows none.
    fn remember(&self, name: &str) -> Option<Vec<u8>> {
        let _ = name;
        None
    }

    /// The image that a container of these parameters, which come from the source, is made from and that is not on this node.
    fn missing_image(&self, name: &str, parameters: &Value) -> Result<Option<MissingImage>, EngineError> {
        let _ = (name, parameters);
        Ok(None)
    }

    /// Writes the image that another node lacks as an archive, without the layers that are there.
    fn save_image(&self, parameters: &Value, missing: &MissingImage, sink: &mut dyn Write) -> Result<(), EngineError> {
        let _ = (parameters, sink);
        Err(without_images(self.name(), &missing.name))
    }

    /// Takes in such an archive; without its end nothing of it is kept.
    fn load_image(&self, name: &str, parameters: &Value, archive: &mut dyn Read) -> Result<(), EngineError> {
        let _ = (parameters, archive);
        Err(without_images(self.name(), name))
    }

    /// Where on this node a tree of the engine's own (a writable layer, a volume) will be, as far as that is known before
    /// [`Engine::create`]. `parameters` come from the source.
    fn tree_place(&self, name: &str, parameters: &Value, tree: &CarriedTree) -> Result<TreePlace, EngineError> {
        let _ = parameters;
        Err(without_trees(self.name(), name, tree))
    }

    /// The directory on this node that takes in a tree of the engine's own of container `name`, which is arriving here: after
    /// [`Engine::create`], and until the container is removed. What is in it gives way.
    fn tree_directory(&self, name: &str, tree: &CarriedTree) -> Result<PathBuf, EngineError> {
        Err(without_trees(self.name(), name, tree))
    }

    /// Makes the engine know a container again that it has forgotten although it runs. `known` is what
    /// [`Engine::remember`] gave.
    fn reinstate(&self, name: &str, known: &[u8]) -> Result<(), EngineError> {
        let _ = (name, known);
        Ok(())
    }

    /// Whether anything runs in the cgroups that the configuration (as from [`Engine::adopt`]) names.
    /// Where the engine names them itself, nothing does.
    fn occupied(&self, config: &Value) -> bool {
        let _ = config;
        false
    }

    /// Ends whatever runs in the cgroups of the copy that is made from `bundle`, and removes those: for what a restore
    /// that was killed has left.
    fn sweep(&self, bundle: &Path) -> Result<(), EngineError>;

    /// Directories of the engine's own below which a killed restore may have left mounts, for the copy that is made
    /// from `bundle`.
    fn mount_residue(&self, name: &str, bundle: &Path) -> Vec<PathBuf>;
}
