//! Docker, by its HTTP API; and by runc, which runs its containers.
//!
//! A container is made anew on the destination with the parameters that it has on the source, and started. Its runtime
//! there is the runtime wrapper, which finds the mark of a restore on it:
//!
//! ```text
//!  agent ──create──▶ Docker        bundle/id            the container, not started
//!  agent ──mark──▶ /run/tranship/restores/ID
//!  agent ──start──▶ Docker ─▶ containerd ─▶ wrapper create   network attached; then runc restore, which waits in the front
//!                     │                        │
//!                     │   the whole move       ▼
//!                     ◀─────────────────── restored, and let go
//!                     └──────────────────▶ wrapper start     takes the mark off; the container runs already
//! ```
//!
//! The runtime is named in the container's own configuration, so that no Docker without the wrapper can start it by
//! mistake, as a second copy with the same addresses.

mod holders;
mod http;
mod log;
mod networks;
mod parameters;
mod shim;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use serde_json::{Value, json};
use tranship_sys::launch::Program;
use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName, TreeKind};

use crate::archive::{self, Known};
use crate::crossing;
use crate::described::{self, is_plain};
use crate::holders::held_for;
use crate::installed;
use crate::logs::LogFiles;
use crate::{
    AttachedNetwork, Container, Engine, EngineError, EtcFiles, Holders, Images, Limits, Mark, MissingImage, MountTree,
    Runc, State, Summary, TreePlace,
};
use http::Answer;
pub(crate) use networks::NETWORKS;
use parameters::Parameters;

/// How long Docker may take for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to pack or unpack a part of an image.
const UNPACK: Duration = Duration::from_secs(600);
/// The AppArmor profiles that the kernel has.
const PROFILES: &str = "/sys/kernel/security/apparmor/profiles";
/// Where it is noted which volumes were made for a container that is coming.
pub(crate) const VOLUMES: &str = "docker-volumes";

/// Docker as configured on this node.
#[derive(Debug, Clone)]
pub struct Docker {
    /// Its API's socket.
    pub socket: PathBuf,
    /// The runtime under which the runtime wrapper is registered with it.
    pub runtime: String,
    /// runc, with Docker's state directory.
    pub runc: Runc,
}

/// Whether Docker takes a container for one that was never started.
fn was_never_started(described: &Value) -> bool {
    described["State"]["Status"] == "created"
}

/// Has Docker start a container, and waits for as long as that takes.
///
/// # Errors
/// Docker's own words, where it could not.
pub fn start(socket: &Path, id: &str) -> io::Result<()> {
    let answer = http::call(socket, "POST", &format!("/containers/{id}/start"), None, None)?;
    match answer.status {
        200..=299 | 304 => Ok(()),
        _ => Err(io::Error::other(with_remedy(answer.message()))),
    }
}

/// Docker's message, with what to do where it takes no chosen address on a network.
fn with_remedy(message: String) -> String {
    match message.contains("user configured subnets") {
        true => format!(
            "{message}; remove the containers that are on that network there, also those that are stopped: the next move makes it with a \
             chosen subnet; or install Docker 29.1 or later there"
        ),
        false => message,
    }
}

impl Docker {
    const NAME: &'static str = "docker";

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, EngineError> {
        self.call_within(PATIENCE, method, path, body)
    }

    fn call_within(
        &self,
        patience: Duration,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, EngineError> {
        let silent = |source| EngineError::Silent { engine: Self::NAME, socket: self.socket.clone(), source };
        http::call(&self.socket, method, path, body, Some(patience)).map_err(silent)
    }

    /// What there is at a path; `None` if nothing is.
    fn get(&self, path: &str) -> Result<Option<Value>, EngineError> {
        let answer = self.call("GET", path, None)?;
        match answer.status {
            200 => Ok(Some(answer.body)),
            404 => Ok(None),
            _ => Err(refused("show", path, &answer)),
        }
    }

    /// Has something done to a container; one that is not there, or is so already, is a success.
    fn order(&self, what: &'static str, name: &str, method: &str, path: &str) -> Result<(), EngineError> {
        let answer = self.call(method, path, None)?;
        match answer.status {
            200..=299 | 304 | 404 => Ok(()),
            _ => Err(refused(what, name, &answer)),
        }
    }

    /// Docker's description of a container by its name or id.
    fn described(&self, name: &str) -> Result<Option<Value>, EngineError> {
        if !is_plain(name) || name.contains('/') {
            return Ok(None);
        }
        let found = self.get(&format!("/containers/{name}/json"))?;
        // Docker also takes the beginning of an id for a name.
        let found = found.filter(|c| c["Name"].as_str() == Some(&format!("/{name}")) || c["Id"] == name);
        Ok(found.filter(|c| held_for(&c["Config"]["Labels"], &c["Config"]["Image"], &c["Name"]).is_none()))
    }

    fn there(&self, name: &str) -> Result<Value, EngineError> {
        self.described(name)?.ok_or_else(|| EngineError::NoSuchContainer { engine: Self::NAME, name: name.to_owned() })
    }

    /// What the image is called here: by its name, if that means the same image here, else by its digest.
    fn image(&self, parameters: &Parameters) -> Result<Option<String>, EngineError> {
        for name in [parameters.body["Image"].as_str().unwrap_or_default(), &parameters.image] {
            if is_plain(name)
                && let Some(image) = self.get(&format!("/images/{name}/json"))?
                && image["Id"] == parameters.image
            {
                return Ok(Some(name.to_owned()));
            }
        }
        Ok(None)
    }

    /// Makes the container's volumes that are not there, as they are on the source, and notes which these are.
    fn make_volumes(&self, name: &str, bundle: &Path, parameters: &Parameters) -> Result<(), EngineError> {
        let mut made = String::new();
        for volume in &parameters.volumes {
            if !is_plain(&volume.name) || volume.name.contains('/') {
                let why = format!("{:?} is no name for a volume", volume.name);
                return Err(EngineError::Refused { engine: Self::NAME, what: "make", name: name.to_owned(), why });
            }
            if self.volume(&volume.name)?.is_none() {
                made.push_str(&volume.name);
                made.push('\n');
                std::fs::write(bundle.join(VOLUMES), &made).map_err(|e| unnoted(name, &e))?;
                let answer = self.call("POST", "/volumes/create", Some(&volume.body))?;
                if answer.status != 201 {
                    return Err(refused("make volume", &volume.name, &answer));
                }
            }
        }
        Ok(())
    }

    /// How many of these layers, from the lowest on, some image here has.
    fn known_layers(&self, wanted: &[String]) -> Result<usize, EngineError> {
        let images = self.get("/images/json?all=1")?.unwrap_or_default();
        let mut known = 0;
        for id in images.as_array().into_iter().flatten().filter_map(|image| image["Id"].as_str()) {
            let here = described::layers(&self.get(&format!("/images/{id}/json"))?.unwrap_or_default());
            known = known.max(described::in_common(wanted, &here));
        }
        Ok(known)
    }

    fn root(&self) -> Result<PathBuf, EngineError> {
        let info = self.get("/info")?.unwrap_or_default();
        Ok(info["DockerRootDir"].as_str().unwrap_or("/var/lib/docker").into())
    }

    /// Whether the runtime that Docker knows by the configured name is the runtime wrapper.
    fn has_wrapper(&self) -> Result<bool, EngineError> {
        let info = self.get("/info")?.unwrap_or_default();
        let path = info["Runtimes"][&self.runtime]["path"].as_str().unwrap_or_default();
        Ok(described::is_wrapper(Path::new(path)))
    }

    fn lacks(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        if !self.has_wrapper()? {
            let runtime = &self.runtime;
            add(
                BlockerKind::Engine,
                format!("Docker there does not know the runtime {runtime}, which restores containers"),
                format!(
                    "add {{\"runtimes\": {{\"{runtime}\": {{\"path\": \"/usr/lib/tranship/tranship-runc\"}}}}}} to its \
                     /etc/docker/daemon.json, and reload it (`systemctl reload docker`)"
                ),
            );
        }
        if parameters.layers.is_empty() && self.image(parameters)?.is_none() {
            let image = parameters.body["Image"].as_str().unwrap_or_default();
            add(
                BlockerKind::Rootfs,
                format!("the image {image} ({}) of container {name} is in neither Docker any more", parameters.image),
                "bring it to one of them (`docker pull`)".to_owned(),
            );
        }
        if parameters.lacks_profile(std::fs::read_to_string(PROFILES).ok().as_deref()) {
            let profile = &parameters.apparmor;
            add(
                BlockerKind::Engine,
                format!("container {name} is confined by the AppArmor profile {profile}, which is not loaded there"),
                "load it there (`apparmor_parser`), or start the container with --security-opt apparmor=unconfined"
                    .to_owned(),
            );
        }
        found.extend(self.network_obstacles(name, parameters)?);
        found.extend(described::lacking_devices(name, &parameters.body["HostConfig"]));
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        for volume in &parameters.volumes {
            let name = &volume.name;
            let Some(there) = self.volume(name)? else { continue };
            let remedy = format!("remove it there (`docker volume rm {name}`), if nobody needs it");
            if let Some(what) = volume.difference(&there) {
                add(
                    BlockerKind::Mount,
                    format!("Docker there has a volume {name} already, with another {what}"),
                    remedy,
                );
            } else if let Some(user) = self.users(name)?.first() {
                let cause = format!("Docker there has a volume {name} already, which container {user} uses");
                add(BlockerKind::Mount, cause, remedy);
            }
        }
        Ok(found)
    }

    fn volume(&self, name: &str) -> Result<Option<Value>, EngineError> {
        if is_plain(name) { self.get(&format!("/volumes/{name}")) } else { Ok(None) }
    }

    /// The containers that have a volume of this name, whether they run or not.
    fn users(&self, volume: &str) -> Result<Vec<String>, EngineError> {
        self.filtered("volume", volume)
    }

    /// The containers that a filter of Docker's (`docker ps --filter KEY=VALUE`) names, whether they run or not.
    fn filtered(&self, key: &str, value: &str) -> Result<Vec<String>, EngineError> {
        // {"KEY":["VALUE"]}
        let filter = format!("%7B%22{key}%22%3A%5B%22{value}%22%5D%7D");
        let rows = self.get(&format!("/containers/json?all=1&filters={filter}"))?.unwrap_or_default();
        let name = |row: &Value| Some(row["Names"][0].as_str()?.trim_start_matches('/').to_owned());
        Ok(rows.as_array().into_iter().flatten().filter_map(name).collect())
    }

    /// Whoever else uses the container's volumes or namespaces, and stays behind; and a storage that has no layers of their own.
    fn hindrances(&self, container: &Container, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        let mut add = |cause: String, remedy: &str| found.push(Blocker::new(BlockerKind::Mount, cause, remedy));
        for volume in parameters.volumes.iter().filter(|volume| is_plain(&volume.name)) {
            if let Some(user) = self.users(&volume.name)?.iter().find(|user| **user != container.name) {
                let cause = format!(
                    "container {user} has volume {} of {}, too, and would lose it",
                    volume.name, container.name
                );
                add(cause, "remove that container first, or give each a volume of its own");
            }
        }
        if !container.trees.iter().any(|tree| tree.kind == TreeKind::WritableLayer) {
            let cause = format!("Docker keeps no directory of what container {} writes over its image", container.name);
            add(cause, "have Docker use the storage driver overlay2");
        }
        found.extend(described::dependants(container, &self.all_described()?));
        Ok(found)
    }

    /// Docker's descriptions of all containers but arriving ones, which Docker does not describe until they run.
    fn all_described(&self) -> Result<Vec<Value>, EngineError> {
        let rows = self.get("/containers/json?all=1")?.unwrap_or_default();
        let ids = rows.as_array().into_iter().flatten().filter_map(|row| row["Id"].as_str());
        let ids = ids.filter(|id| Mark::on(id).is_none());
        // One that has gone meanwhile has none.
        ids.filter_map(|id| self.get(&format!("/containers/{id}/json")).transpose()).collect()
    }

    /// Puts what Docker and runc know of a container together.
    fn container(&self, name: &str, described: &Value) -> Result<Container, EngineError> {
        let parameters = Parameters::read(described, |path| self.get(path).map(Option::unwrap_or_default))?;
        let mut container = described::container(&self.runc, name, described)?;
        container.parameters = serde_json::to_value(parameters).unwrap_or_default();
        Ok(container)
    }
}

fn refused(what: &'static str, name: &str, answer: &Answer) -> EngineError {
    EngineError::Refused { engine: Docker::NAME, what, name: name.to_owned(), why: answer.message() }
}

fn unpacked(what: &'static str, image: &str, error: &io::Error) -> EngineError {
    EngineError::Refused { engine: Docker::NAME, what, name: image.to_owned(), why: error.to_string() }
}

fn unnoted(name: &str, error: &io::Error) -> EngineError {
    described::not_made(Docker::NAME, name, error.to_string())
}

impl Engine for Docker {
    fn name(&self) -> EngineName {
        EngineName::Docker
    }

    fn is_present(&self) -> bool {
        self.socket.exists()
    }

    fn why_absent(&self) -> Option<(String, String)> {
        installed::why_no_socket("dockerd", Self::NAME, &self.socket)
    }

    fn attaches_network(&self) -> bool {
        true
    }

    fn makes_root(&self) -> bool {
        true
    }

    fn version(&self) -> Result<String, EngineError> {
        let version = self.get("/version")?.unwrap_or_default();
        Ok(version["Version"].as_str().unwrap_or_default().to_owned())
    }

    fn list(&self) -> Result<Vec<Summary>, EngineError> {
        let rows = self.get("/containers/json?all=1")?.unwrap_or_default();
        let summary = |row: &Value| {
            let state = match row["State"].as_str()? {
                "created" => State::Created,
                "running" | "restarting" => State::Running,
                "paused" => State::Paused,
                _ => State::Stopped,
            };
            let name = row["Names"][0].as_str()?.trim_start_matches('/').to_owned();
            let id = row["Id"].as_str()?.to_owned();
            let init = self.runc.inspect(&id).map_or(0, |container| container.init);
            Some(Summary { name, id, state, init, created: row["Created"].to_string() })
        };
        let is_own = |row: &&Value| held_for(&row["Labels"], &holders::image_of(row), &row["Names"][0]).is_none();
        let own = rows.as_array().into_iter().flatten().filter(is_own);
        Ok(own.filter_map(summary).collect())
    }

    fn inspect(&self, name: &str) -> Result<Container, EngineError> {
        let described = self.there(name)?;
        self.container(name, &described)
    }

    fn obstacles(&self, container: &Container) -> Vec<Blocker> {
        let found =
            described::parameters::<Parameters>(&container.name, &container.parameters).and_then(|parameters| {
                let mut found = parameters.obstacles(&container.name);
                found.extend(self.hindrances(container, &parameters)?);
                found.extend(EtcFiles::obstacles(container));
                Ok(found)
            });
        described::or_mend(found)
    }

    fn remarks(&self, container: &Container) -> Vec<String> {
        described::parameters::<Parameters>(&container.name, &container.parameters)
            .map_or_else(|_| Vec::new(), |parameters| parameters.remarks(&container.name))
    }

    fn holders(&self) -> Option<&dyn Holders> {
        Some(self)
    }

    fn log(&self, name: &str) -> Result<Option<LogFiles>, EngineError> {
        Ok(log::files(&self.there(name)?, &self.root()?))
    }

    /// dockerd writes a line without an end when it has read the end of the stream, and then has the container stopped.
    fn log_has_ended(&self, name: &str) -> Result<bool, EngineError> {
        Ok(self.described(name)?.is_none_or(|described| described["State"]["Running"] != true))
    }

    fn show_rotated_log(&self, parameters: &mut Value) {
        log::show_rotated(&mut parameters["body"]["HostConfig"]["LogConfig"]);
    }

    fn log_left(&self, container: &Container) -> Option<String> {
        log::left(&container.name, &self.described(&container.name).ok()??, &self.root().ok()?)
    }

    fn networks(&self, container: &Container) -> Vec<AttachedNetwork> {
        described::parameters::<Parameters>(&container.name, &container.parameters)
            .map_or_else(|_| Vec::new(), |parameters| parameters.attached(&container.name))
    }

    fn parameters_for(&self, other: EngineName, container: &Container) -> Result<Value, Vec<Blocker>> {
        crossing::parameters(EngineName::Docker, other, container)
    }

    fn missing(&self, name: &str, parameters: &Value) -> Vec<Blocker> {
        let lacks =
            described::parameters::<Parameters>(name, parameters).and_then(|parameters| self.lacks(name, &parameters));
        described::or_mend(lacks)
    }

    fn dump(&self, container: &Container, images: Images<'_>) -> Program {
        described::dump(&self.runc, container, images)
    }

    fn create(&self, name: &str, bundle: &Path, config: &Value, parameters: &Value) -> Result<(), EngineError> {
        let parameters = described::parameters::<Parameters>(name, parameters)?;
        if !is_plain(name) {
            let why = "that is no name for a container".to_owned();
            return Err(EngineError::Refused { engine: Self::NAME, what: "make", name: name.to_owned(), why });
        }
        let image = self.image(&parameters)?.unwrap_or_else(|| parameters.image.clone());
        described::note(bundle, "").map_err(|e| unnoted(name, &e))?;
        MountTree::of(config).note(bundle).map_err(|e| unnoted(name, &e))?;
        Limits::of(config).note(bundle).map_err(|e| unnoted(name, &e))?;
        EtcFiles::of(config).note(bundle).map_err(|e| unnoted(name, &e))?;
        self.make_volumes(name, bundle, &parameters)?;
        let _making = networks::MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        self.make_networks(name, bundle, &parameters)?;
        let body = parameters.create_body(&image, &self.runtime);
        let answer = self.call("POST", &format!("/containers/create?name={name}"), Some(&body))?;
        let id = answer.body["Id"].as_str().filter(|_| answer.status == 201);
        let id = id.ok_or_else(|| refused("make", name, &answer))?;
        described::note(bundle, id).map_err(|e| unnoted(name, &e))?;
        for network in parameters.networks.iter().skip(1) {
            let body = json!({"Container": id, "EndpointConfig": network.endpoint});
            let answer = self.call("POST", &format!("/networks/{}/connect", network.name), Some(&body))?;
            if answer.status != 200 {
                return Err(refused("connect", name, &answer));
            }
        }
        Ok(())
    }

    fn discard(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        described::discard(self, name, bundle)?;
        self.remove_networks(bundle)?;
        let made = std::fs::read_to_string(bundle.join(VOLUMES)).unwrap_or_default();
        made.lines().try_for_each(|volume| match self.users(volume)?.is_empty() {
            true => self.order("remove volume", volume, "DELETE", &format!("/volumes/{volume}")),
            // Somebody has given it to another container meanwhile.
            false => Ok(()),
        })
    }

    fn is_made_from(&self, container: &Container, bundle: &Path) -> bool {
        described::is_made_from(container, bundle)
    }

    fn restore(
        &self,
        name: &str,
        bundle: &Path,
        images: Images<'_>,
        network: Option<&Path>,
    ) -> Result<Program, EngineError> {
        let id = described::mark(bundle, images, network).map_err(|e| unnoted(name, &e))?;
        let mut command = Program::own();
        command.arg("start-in-docker").arg(&self.socket).arg(id);
        Ok(command)
    }

    fn end(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        let kill = |id: &str| self.order("end", name, "POST", &format!("/containers/{id}/kill"));
        described::end(Self::NAME, (name, bundle), &self.runc, |id| self.described(id), kill)?;
        described::noted(bundle).filter(|id| !id.is_empty()).map_or(Ok(()), |id| shim::end_left(name, &id))
    }

    fn notices(&self, name: &str) -> Result<bool, EngineError> {
        let Some(described) = self.described(name)?.filter(was_never_started) else { return Ok(true) };
        Ok(self.container(name, &described)?.state != State::Running)
    }

    fn retire(&self, name: &str) -> Result<(), EngineError> {
        let Some(described) = self.described(name)? else { return Ok(()) };
        let policy = described["HostConfig"]["RestartPolicy"]["Name"].as_str().unwrap_or_default();
        if matches!(policy, "" | "no") {
            return Ok(());
        }
        let never = json!({"RestartPolicy": {"Name": "no"}});
        let answer = self.call("POST", &format!("/containers/{name}/update"), Some(&never))?;
        if answer.status == 200 { Ok(()) } else { Err(refused("retire", name, &answer)) }
    }

    /// Its volumes without a name of their own go with it.
    fn remove(&self, name: &str) -> Result<(), EngineError> {
        let overlooked = self.described(name)?.filter(was_never_started);
        self.order("remove", name, "DELETE", &format!("/containers/{name}?force=1&v=1"))?;
        let Some(id) = overlooked.as_ref().and_then(|described| described["Id"].as_str()) else { return Ok(()) };
        shim::end_left(name, id)
    }

    fn missing_image(&self, name: &str, parameters: &Value) -> Result<Option<MissingImage>, EngineError> {
        let parameters = described::parameters::<Parameters>(name, parameters)?;
        if parameters.layers.is_empty() || self.image(&parameters)?.is_some() {
            return Ok(None);
        }
        let image = parameters.body["Image"].as_str().unwrap_or_default();
        Ok(Some(MissingImage {
            name: image.to_owned(),
            may_be_named: is_plain(image) && self.get(&format!("/images/{image}/json"))?.is_none(),
            bytes: parameters.image_bytes,
            layers: parameters.layers.len(),
            known_layers: self.known_layers(&parameters.layers)?,
            known: Vec::new(),
            known_as_empty: false,
            directory: self.root()?,
        }))
    }

    fn save_image(&self, parameters: &Value, missing: &MissingImage, sink: &mut dyn Write) -> Result<(), EngineError> {
        let parameters = described::parameters::<Parameters>(&missing.name, parameters)?;
        let name = self.image(&parameters)?.filter(|_| missing.may_be_named).unwrap_or(parameters.image);
        let archive = || http::download(&self.socket, &format!("/images/{name}/get"), UNPACK);
        // Which file of an archive is which layer is said at its end.
        let send = |sink: &mut dyn Write| match missing.known_layers {
            0 => io::copy(&mut archive()?, sink).map(drop),
            known => {
                let layers = archive::first_layers(archive()?, known)?;
                archive::copy_without(archive()?, (&layers, Known::in_archive(missing)), sink)
            }
        };
        send(sink).map_err(|error| unpacked("save the image", &missing.name, &error))
    }

    fn load_image(&self, name: &str, parameters: &Value, archive: &mut dyn Read) -> Result<(), EngineError> {
        let parameters = described::parameters::<Parameters>(name, parameters)?;
        let image = parameters.body["Image"].as_str().unwrap_or(&parameters.image);
        let loaded = http::upload(&self.socket, "/images/load?quiet=1", archive, UNPACK);
        loaded.map_err(|error| unpacked("load the image", image, &error))?;
        match self.image(&parameters)? {
            Some(_) => Ok(()),
            None => Err(unpacked("load the image", image, &io::Error::other("it has another digest there"))),
        }
    }

    fn tree_place(&self, name: &str, parameters: &Value, tree: &CarriedTree) -> Result<TreePlace, EngineError> {
        let parameters = described::parameters::<Parameters>(name, parameters)?;
        let named =
            parameters.volumes.iter().find(|volume| tree.kind == TreeKind::Volume && volume.inside == tree.inside);
        let there = named.map_or(Ok(None), |volume| self.volume(&volume.name))?;
        if let Some(path) = there.as_ref().and_then(|volume| volume["Mountpoint"].as_str()) {
            return Ok(TreePlace::There(path.into()));
        }
        Ok(TreePlace::Below(self.root()?))
    }

    fn tree_directory(&self, name: &str, tree: &CarriedTree) -> Result<PathBuf, EngineError> {
        described::tree_directory(Self::NAME, name, &self.there(name)?, tree)
    }

    fn sweep(&self, bundle: &Path) -> Result<(), EngineError> {
        self.runc.sweep(bundle)
    }

    fn mount_residue(&self, _: &str, bundle: &Path) -> Vec<PathBuf> {
        described::mount_residue(&self.runc, bundle)
    }
}

/// For the fuzz targets: an answer of Docker's, and what it describes.
pub(crate) fn fuzz(answer: &[u8]) {
    if let Some(answer) = http::parse(answer) {
        let _ = answer.message();
        parameters::fuzz(&answer.body);
    }
}

/// For the fuzz targets: a description, or parameters.
pub(crate) fn fuzz_parameters(value: &Value) {
    parameters::fuzz(value);
}
