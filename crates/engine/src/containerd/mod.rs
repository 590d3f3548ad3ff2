//! containerd, for the containers of `ctr` and its like: by its gRPC API; and by runc, which runs its containers.
//!
//! containerd keeps the OCI configuration itself, so that the record of a container is made again as it is, but for the runtime's
//! program, which is the runtime wrapper. Its network namespace was made by whoever ran it; here the agent makes it:
//!
//! ```text
//!  agent ──create──▶ containerd    the record; a snapshot over the same layers
//!  agent ──mark──▶ /run/tranship/restores/NAME
//!  agent ──▶ ctr tasks start ─▶ containerd ─▶ shim ─▶ wrapper create   runc restore, which waits in the front for the whole move
//!                                              └────▶ wrapper start    takes the mark off; the container runs already
//! ```
//!
//! Until then the shim answers nobody: what state the container is in is asked of runc.

mod client;
mod images;
mod messages;
mod parameters;
mod records;

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prost::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_sys::launch::{Program, Stream};
use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName, TreeKind};

use crate::described;
use crate::installed;
use crate::{
    Container, Engine, EngineError, Images, Limits, Mark, MissingImage, MountTree, Runc, State, Summary, TreePlace,
};
use client::Method;
use messages::{
    Any, Filters, Kill, Mounts, Named, OneRecord, Plugins, Record, Records, RuncOptions, Runtime, Snapshot, Task,
    Version,
};
use parameters::Parameters;

const VERSION: Method = ("/containerd.services.version.v1.Version/Version", "tell its version");
const LIST: Method = ("/containerd.services.containers.v1.Containers/List", "list containers in");
const CREATE: Method = ("/containerd.services.containers.v1.Containers/Create", "make");
const DELETE: Method = ("/containerd.services.containers.v1.Containers/Delete", "remove");
const PREPARE: Method = ("/containerd.services.snapshots.v1.Snapshots/Prepare", "make the snapshot");
const REMOVE: Method = ("/containerd.services.snapshots.v1.Snapshots/Remove", "remove the snapshot");
const START: Method = ("/containerd.services.tasks.v1.Tasks/Start", "start");
const KILL: Method = ("/containerd.services.tasks.v1.Tasks/Kill", "end");
const END: Method = ("/containerd.services.tasks.v1.Tasks/Delete", "end");
const PLUGINS: Method = ("/containerd.services.introspection.v1.Introspection/Plugins", "list its plugins");

/// Types of what containerd keeps without knowing it.
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
const OPTIONS_TYPE: &str = "containerd.runc.v1.Options";

/// How long a task that was killed may take to be over.
const PATIENCE: Duration = Duration::from_secs(20);

/// containerd as configured on this node.
#[derive(Debug, Clone)]
pub struct Containerd {
    /// Its API's socket. Where there is none, there is no containerd.
    pub socket: PathBuf,
    /// The namespaces whose containers are moved; empty: all but those of Docker and Kubernetes.
    pub namespaces: Vec<String>,
    /// Its command line, `ctr`.
    pub ctr: PathBuf,
    /// The runtime wrapper, which containers that come are run by.
    pub wrapper: PathBuf,
    /// runc, with the state directory below which it has one for each namespace.
    pub runc: Runc,
}

/// In a bundle: what was made for a container that is coming.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Made {
    namespace: String,
    /// When, as containerd says; empty while it is being made.
    created: String,
    log: String,
}

impl Made {
    fn noted(bundle: &Path) -> Option<Self> {
        serde_json::from_str(&described::noted(bundle)?).ok()
    }

    fn note(&self, bundle: &Path) -> io::Result<()> {
        described::note(bundle, &serde_json::to_string(self)?)
    }

    fn is(&self, created: &str) -> bool {
        self.created.is_empty() || self.created == created
    }
}

fn created(record: &Record) -> String {
    record.created_at.map_or_else(String::new, |at| format!("{}.{:09}", at.seconds, at.nanos))
}

fn options_of(encoded: &[u8], name: &str) -> Result<RuncOptions, EngineError> {
    RuncOptions::decode(encoded).map_err(|e| EngineError::Unreadable {
        path: "runtime options".into(),
        name: name.to_owned(),
        why: e.to_string(),
    })
}

/// The options of a container that is made here. Programs and paths of the source's options are left out: the shim would use them as
/// root.
fn options_here(theirs: &RuncOptions, wrapper: &Path) -> RuncOptions {
    let RuncOptions { no_pivot_root, no_new_keyring, io_uid, io_gid, systemd_cgroup, .. } = *theirs;
    let binary_name = wrapper.to_string_lossy().into_owned();
    RuncOptions { no_pivot_root, no_new_keyring, io_uid, io_gid, systemd_cgroup, binary_name, ..RuncOptions::default() }
}

/// Where the output of a container goes that nobody reads: through pipes of its shim. The node's
/// own /dev/null, which `ctr` has for that (`--null-io`), could not move on.
const NOWHERE: &str = "file:///dev/null";

impl Containerd {
    const NAME: &'static str = "containerd";

    fn refused(what: &'static str, name: &str, why: impl Into<String>) -> EngineError {
        EngineError::Refused { engine: Self::NAME, what, name: name.to_owned(), why: why.into() }
    }

    fn unmade(name: &str) -> impl Fn(io::Error) -> EngineError {
        move |error| described::not_made(Self::NAME, name, error.to_string())
    }

    /// runc as containerd has it run the containers of a namespace. `root`: another state directory than the usual one.
    fn runc(&self, namespace: &str, root: &str) -> Runc {
        let top = if root.is_empty() { &self.runc.root } else { Path::new(root) };
        Runc { root: top.join(namespace), ..self.runc.clone() }
    }

    /// Puts what containerd and runc know of a container together.
    fn container(&self, namespace: &str, record: &Record) -> Result<Container, EngineError> {
        let name = &record.id;
        let parameters = self.parameters(namespace, record)?;
        if !parameters.runtime.starts_with("io.containerd.runc.") {
            let why = format!("{} runs it, whose containers cannot be moved; run it by runc", parameters.runtime);
            return Err(Self::refused("show all of", name, why));
        }
        let runc = self.runc(namespace, &options_of(&parameters.options, name)?.root);
        let mut container = match runc.inspect(name) {
            Ok(container) => container,
            Err(EngineError::NoSuchContainer { .. }) => Container::at_rest(name, State::Created),
            Err(other) => return Err(other),
        };
        if container.config.is_object() {
            container.config["annotations"] = serde_json::to_value(&record.labels).unwrap_or_default();
        }
        let layer = self.layer(namespace, record)?;
        let layer = layer.map(|path| CarriedTree { kind: TreeKind::WritableLayer, inside: "/".into(), path, bytes: 0 });
        container.trees.splice(0..0, layer);
        container.created = created(record);
        container.parameters = serde_json::to_value(parameters).unwrap_or_default();
        Ok(container)
    }

    fn hindrances(&self, container: &Container) -> Result<Vec<Blocker>, EngineError> {
        let parameters: Parameters = described::parameters(&container.name, &container.parameters)?;
        let interfaces = match container.network_namespace() {
            Some(_) => Vec::new(),
            None if container.has_namespace("network") => interfaces(container.init),
            None => Vec::new(),
        };
        let mut found = parameters.obstacles(&container.name, &interfaces);
        if !container.trees.iter().any(|tree| tree.kind == TreeKind::WritableLayer) {
            let cause =
                format!("containerd keeps no directory of what container {} writes over its image", container.name);
            let remedy = "make it from an image, with the snapshotter overlayfs";
            found.push(Blocker::new(BlockerKind::Mount, cause, remedy));
        }
        Ok(found)
    }

    fn lacks(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        let (namespace, image) = (&parameters.namespace, &parameters.image);
        let wrapper = self.wrapper.display();
        if !described::is_wrapper(&self.wrapper) {
            add(
                BlockerKind::Engine,
                format!("{wrapper} there is not the runtime wrapper, which restores containers"),
                format!("make it there (`ln -s /usr/bin/transhipd {wrapper}`)"),
            );
        }
        if self.ctr(namespace, &["version"]).output(PATIENCE).is_err() {
            let ctr = self.ctr.display();
            add(
                BlockerKind::Engine,
                format!("{ctr} cannot be run there, which starts containers"),
                "install it, or name it as `ctr` in `[containerd]` of that agent's configuration".to_owned(),
            );
        }
        if !self.tends(namespace) {
            add(
                BlockerKind::Engine,
                format!("the agent there does not look at containerd's namespace {namespace}"),
                "add it to `namespaces` in `[containerd]` of that agent's configuration".to_owned(),
            );
        }
        if self.is_another(parameters)? {
            add(
                BlockerKind::Rootfs,
                format!("containerd there has another image {image} than that of container {name}"),
                format!(
                    "give it another name there (`ctr -n {namespace} images tag {image} NAME`), and remove it under this one"
                ),
            );
        } else if parameters.layers.is_empty() && !self.has_image(parameters)? {
            add(
                BlockerKind::Rootfs,
                format!("the image {image} of container {name} is not in containerd there, and here not all of it is"),
                format!("bring it to one of them (`ctr -n {namespace} images pull {image}`)"),
            );
        }
        Ok(found)
    }

    /// Where the snapshots are.
    fn root(&self, parameters: &Parameters) -> Result<PathBuf, EngineError> {
        let filter = format!("type==io.containerd.snapshotter.v1,id=={}", parameters.snapshotter);
        let plugins: Plugins = self.call("", PLUGINS, "", Filters { filters: vec![filter] })?.unwrap_or_default();
        let root = plugins.plugins.iter().find_map(|plugin| plugin.exports.get("root"));
        Ok(root.map_or("/var/lib/containerd".into(), PathBuf::from))
    }

    /// `ctr`, for a namespace.
    fn ctr(&self, namespace: &str, arguments: &[&str]) -> Program {
        let mut command = Program::new(&self.ctr);
        command.arg("--address").arg(&self.socket).args(["--namespace", namespace]).args(arguments).current_dir("/");
        command.stdin(Stream::Null);
        command
    }

    /// Ends a container's task, and waits for that.
    fn end_task(&self, namespace: &str, name: &str) -> Result<(), EngineError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // What is over, or is not there, cannot be killed, and need not.
            let kill = Kill { name: name.to_owned(), signal: 9, all: true };
            let killed: Result<Option<()>, _> = self.call(namespace, KILL, name, kill);
            let ended: Result<Option<()>, _> = self.call(namespace, END, name, Named { name: name.to_owned() });
            match (ended, killed) {
                (Ok(_), _) => return Ok(()),
                (Err(error @ EngineError::Silent { .. }), _) => return Err(error),
                (Err(error), _) if Instant::now() > deadline => return Err(error),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Removes a container with its task and its snapshot.
    fn remove_from(&self, namespace: &str, record: &Record) -> Result<(), EngineError> {
        let name = &record.id;
        self.end_task(namespace, name)?;
        if !record.snapshot_key.is_empty() {
            let (snapshotter, key) = (record.snapshotter.clone(), record.snapshot_key.clone());
            self.call::<_, ()>(namespace, REMOVE, name, Snapshot { snapshotter, key, parent: String::new() })?;
        }
        self.call::<_, ()>(namespace, DELETE, name, Named { name: name.clone() }).map(drop)
    }
}

/// A name as containerd takes it, and that is no option of `ctr`.
fn is_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The interfaces in the network namespace of a process that have routes or addresses, but for the loopback.
fn interfaces(pid: u32) -> Vec<String> {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
    let (routes, addresses) = (read("route"), read("if_inet6"));
    let routed = routes.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let addressed = addresses.lines().filter_map(|line| line.split_whitespace().last());
    let names: BTreeSet<&str> = routed.chain(addressed).filter(|name| *name != "lo").collect();
    names.into_iter().map(str::to_owned).collect()
}

impl Engine for Containerd {
    fn name(&self) -> EngineName {
        EngineName::Containerd
    }

    fn is_present(&self) -> bool {
        self.socket.exists()
    }

    fn why_absent(&self) -> Option<(String, String)> {
        installed::why_no_socket("containerd", Self::NAME, &self.socket)
    }

    fn attaches_network(&self) -> bool {
        false
    }

    fn makes_root(&self) -> bool {
        true
    }

    fn version(&self) -> Result<String, EngineError> {
        let version: Version = self.call("", VERSION, "", ())?.unwrap_or_default();
        Ok(version.version)
    }

    fn list(&self) -> Result<Vec<Summary>, EngineError> {
        let mut found = Vec::new();
        for namespace in self.tended()? {
            let records: Records = self.call(&namespace, LIST, "", Filters::default())?.unwrap_or_default();
            for record in records.records {
                let options = record.runtime.as_ref().and_then(|runtime| runtime.options.as_ref());
                let root = options_of(options.map_or(&[], |options| &options.value), &record.id)?.root;
                let there = self.runc(&namespace, &root).inspect(&record.id);
                let (state, init) = there.map_or((State::Created, 0), |container| (container.state, container.init));
                found.push(Summary { created: created(&record), id: record.id.clone(), name: record.id, state, init });
            }
        }
        Ok(found)
    }

    fn inspect(&self, name: &str) -> Result<Container, EngineError> {
        let (namespace, record) = self.there(name)?;
        self.container(&namespace, &record)
    }

    fn obstacles(&self, container: &Container) -> Vec<Blocker> {
        described::or_mend(self.hindrances(container))
    }

    fn missing(&self, name: &str, parameters: &Value) -> Vec<Blocker> {
        described::or_mend(described::parameters(name, parameters).and_then(|p| self.lacks(name, &p)))
    }

    fn adopt(&self, name: &str, config: Value) -> Value {
        self.runc.adopt(name, config)
    }

    fn dump(&self, container: &Container, images: Images<'_>) -> Program {
        let parameters = described::parameters::<Parameters>(&container.name, &container.parameters);
        let place =
            parameters.ok().map(|p| (options_of(&p.options, &container.name).unwrap_or_default().root, p.namespace));
        let (root, namespace) = place.unwrap_or_default();
        described::dump(&self.runc(&namespace, &root), container, images)
    }

    fn create(&self, name: &str, bundle: &Path, config: &Value, parameters: &Value) -> Result<(), EngineError> {
        let parameters: Parameters = described::parameters(name, parameters)?;
        let Parameters { namespace, snapshotter, parent, log, .. } = &parameters;
        if !is_identifier(name) || !is_identifier(namespace) {
            return Err(described::not_made(Self::NAME, name, "that is no name for a container"));
        }
        if self.snapshot(namespace, snapshotter, name)?.is_some() {
            let why =
                format!("there is a snapshot of that name; remove it there (`ctr -n {namespace} snapshots rm {name}`)");
            return Err(described::not_made(Self::NAME, name, why));
        }
        let mut made = Made { namespace: namespace.clone(), created: String::new(), log: log.clone() };
        made.note(bundle).map_err(Self::unmade(name))?;
        Limits::of(config).note(bundle).map_err(Self::unmade(name))?;
        MountTree::of(config).note(bundle).map_err(Self::unmade(name))?;
        let own = options_here(&options_of(&parameters.options, name)?, &self.wrapper);
        let any = |type_url: &str, value| Any { type_url: type_url.to_owned(), value };
        let extension = |(name, (kind, value)): (&String, &(String, Vec<u8>))| (name.clone(), any(kind, value.clone()));
        let record = Record {
            id: name.to_owned(),
            labels: parameters.labels.clone(),
            image: parameters.image.clone(),
            runtime: Some(Runtime {
                name: parameters.runtime.clone(),
                options: Some(any(OPTIONS_TYPE, own.encode_to_vec())),
            }),
            spec: Some(any(SPEC_TYPE, self.adopt(name, parameters.spec.clone()).to_string().into_bytes())),
            snapshotter: snapshotter.clone(),
            snapshot_key: name.to_owned(),
            created_at: None,
            extensions: parameters.extensions.iter().map(extension).collect(),
        };
        // The record first: a snapshot that none names is removed as garbage.
        let answer: Option<OneRecord> = self.call(namespace, CREATE, name, OneRecord { record: Some(record) })?;
        let asked = Snapshot { snapshotter: snapshotter.clone(), key: name.to_owned(), parent: parent.clone() };
        let gone = || described::not_made(Self::NAME, name, format!("its image {} is gone", parameters.image));
        self.call::<_, Mounts>(namespace, PREPARE, name, asked)?.ok_or_else(gone)?;
        made.created = answer.and_then(|answer| answer.record).as_ref().map(created).unwrap_or_default();
        made.note(bundle).map_err(Self::unmade(name))
    }

    fn discard(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        let Some(made) = Made::noted(bundle) else { return Ok(()) };
        Mark::take_off(name);
        match self.record(&made.namespace, name)?.filter(|record| made.is(&created(record))) {
            Some(record) => self.remove_from(&made.namespace, &record),
            None => Ok(()),
        }
    }

    fn is_made_from(&self, container: &Container, bundle: &Path) -> bool {
        Made::noted(bundle).is_some_and(|made| made.is(&container.created))
    }

    fn restore(
        &self,
        name: &str,
        bundle: &Path,
        images: Images<'_>,
        network: Option<&Path>,
    ) -> Result<Program, EngineError> {
        let made = Made::noted(bundle).ok_or_else(|| described::not_made(Self::NAME, name, "its note is gone"))?;
        Mark::new(images, network, bundle).put(name).map_err(Self::unmade(name))?;
        let mut command = self.ctr(&made.namespace, &["tasks", "start", "--detach"]);
        let log = if made.log.is_empty() { NOWHERE } else { &made.log };
        command.args(["--log-uri", log]);
        command.arg(name);
        Ok(command)
    }

    fn end(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        let Some(made) = Made::noted(bundle) else { return Ok(()) };
        Mark::take_off(name);
        self.end_task(&made.namespace, name)?;
        // A start that has failed.
        self.runc(&made.namespace, "").remove(name)
    }

    fn retire(&self, _: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Its shim has made the task, and waits to be told to start it: there the runtime wrapper has nothing left to do.
    fn notices(&self, name: &str) -> Result<bool, EngineError> {
        let Some((namespace, record)) = self.find(name)? else { return Ok(true) };
        if self.task(&namespace, name)?.is_some_and(|task| task.status == Task::CREATED)
            && self.container(&namespace, &record)?.state == State::Running
        {
            self.call::<_, ()>(&namespace, START, name, Named { name: name.to_owned() })?;
        }
        Ok(true)
    }

    fn remove(&self, name: &str) -> Result<(), EngineError> {
        match self.find(name)? {
            Some((namespace, record)) => self.remove_from(&namespace, &record),
            None => Ok(()),
        }
    }

    fn occupied(&self, config: &Value) -> bool {
        self.runc.occupied(config)
    }

    fn missing_image(&self, name: &str, parameters: &Value) -> Result<Option<MissingImage>, EngineError> {
        self.lacking(&described::parameters(name, parameters)?)
    }

    fn save_image(&self, parameters: &Value, missing: &MissingImage, sink: &mut dyn Write) -> Result<(), EngineError> {
        self.export(&described::parameters(&missing.name, parameters)?, missing, sink)
    }

    fn load_image(&self, name: &str, parameters: &Value, archive: &mut dyn Read) -> Result<(), EngineError> {
        self.import(&described::parameters(name, parameters)?, archive)
    }

    fn tree_place(&self, _: &str, parameters: &Value, _: &CarriedTree) -> Result<TreePlace, EngineError> {
        Ok(TreePlace::Below(self.root(&described::parameters("", parameters)?)?))
    }

    fn tree_directory(&self, name: &str, tree: &CarriedTree) -> Result<PathBuf, EngineError> {
        let (namespace, record) = self.there(name)?;
        let layer = self.layer(&namespace, &record)?.filter(|_| tree.kind == TreeKind::WritableLayer);
        layer.ok_or_else(|| {
            described::not_made(Self::NAME, name, format!("it has no {} at {}", tree.kind, tree.inside.display()))
        })
    }

    fn sweep(&self, bundle: &Path) -> Result<(), EngineError> {
        self.runc.sweep(bundle)
    }

    fn mount_residue(&self, name: &str, bundle: &Path) -> Vec<PathBuf> {
        Made::noted(bundle).map_or(Vec::new(), |made| self.runc(&made.namespace, "").mount_residue(name, bundle))
    }
}

/// For the fuzz targets: messages of containerd's, and the parameters that a peer has sent.
pub(crate) fn fuzz(data: &[u8]) {
    fn decoded<M: Message + Default>(data: &[u8]) -> Option<M> {
        let message = M::decode(data).ok()?;
        assert!(message.encoded_len() <= 2 * data.len() + 64);
        Some(message)
    }
    if let Some(record) = decoded::<OneRecord>(data).and_then(|one| one.record) {
        let _ = (created(&record), record.spec.map(|spec| serde_json::from_slice::<Value>(&spec.value)));
    }
    let _ = (decoded::<Records>(data), decoded::<Mounts>(data), decoded::<RuncOptions>(data));
    let _ = (decoded::<messages::ContentPiece>(data), decoded::<messages::OneSnapshot>(data));
    images::fuzz(data);
    if let Ok(parameters) = serde_json::from_slice::<Parameters>(data) {
        let _ = (parameters.obstacles("c", &[]), options_of(&parameters.options, "c"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_option_and_no_path() {
        assert!(is_identifier("web-1.x") && !is_identifier("-n") && !is_identifier("a/b") && !is_identifier(""));
    }

    #[test]
    fn what_is_being_made_is_told_from_what_has_its_name_later() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(Made::noted(bundle.path()), None);
        let mut made = Made { namespace: "default".into(), created: String::new(), log: String::new() };
        made.note(bundle.path()).unwrap();
        assert!(Made::noted(bundle.path()).unwrap().is("1.000000001"));
        made.created = "1.000000001".into();
        made.note(bundle.path()).unwrap();
        let noted = Made::noted(bundle.path()).unwrap();
        assert!(noted.is("1.000000001") && !noted.is("2.000000000"));
    }

    #[test]
    fn options_keep_what_they_had() {
        let had = RuncOptions { systemd_cgroup: true, io_uid: 7, ..RuncOptions::default() };
        assert_eq!(options_of(&had.encode_to_vec(), "web").unwrap(), had);
        assert!(options_of(&[0xff], "web").is_err());
        let hostile =
            RuncOptions { criu_path: "/x".into(), shim_cgroup: "/y".into(), root: "/z".into(), ..had.clone() };
        let here = RuncOptions { binary_name: "/wrapper".into(), ..had };
        assert_eq!(options_here(&hostile, Path::new("/wrapper")), here);
    }
}
