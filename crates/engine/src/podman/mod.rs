//! Podman, by its command line; and by runc, which runs its containers.
//!
//! A container is made anew on the destination with the parameters that it has on the source, and started. Podman has no
//! daemon: it is a process of its own that starts a container, and it attaches the network before it calls the runtime:
//!
//! ```text
//!  agent ──create──▶ podman        what it has made is compared with what was wanted
//!  agent ──mark──▶ /run/tranship/restores/ID
//!  agent ──▶ podman start ─▶ netavark (transhipd): puts the agent's namespace, gate closed, in place of Podman's; then netavark
//!                  └─▶ conmon ─▶ wrapper create    runc restore, which waits in the front for the whole move
//!                          └──▶ wrapper start      takes the mark off; the container runs already
//! ```
//!
//! All the while `podman start` has the container locked, and whoever asks Podman for it waits. So what is arriving is known by what
//! was noted when it was made.

mod command;
mod holders;
mod networks;
mod parameters;
mod pod;

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tranship_sys::launch::Program;
use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName, TreeKind};

use crate::archive::{self, Known};
use crate::holders::held_for;
use crate::logs::LogFiles;
use crate::{
    AttachedNetwork, Container, Engine, EngineError, EtcFiles, Holders, Images, Limits, Mark, MissingImage, MountTree,
    Pod, Runc, State, Summary, TreePlace,
};
use crate::{crossing, described, installed, mounts};
use command::{PATIENCE, is_unknown};
use holders::holds_for;
pub use holders::{HOLDER_VARIABLE, attached as holder_attached};
pub(crate) use networks::NETWORKS;
use parameters::{Parameters, is_word};

/// The first version that lets its helper programs be chosen.
const OLDEST: (u32, u32) = (4, 3);
/// In a bundle: which volumes were made for the container.
pub(crate) const VOLUMES: &str = "podman-volumes";
/// In a bundle: Podman's description of the container that was made with it.
const DESCRIPTION: &str = "podman.json";

/// In the environment of `podman start`: the network namespace that the container's network goes into. There is none where it has
/// no network.
pub const NETWORK_VARIABLE: &str = "TRANSHIP_NETWORK";

/// Podman as configured on this node.
#[derive(Debug, Clone)]
pub struct Podman {
    /// Its program.
    pub path: PathBuf,
    /// Its storage; where there is none, there is no Podman.
    pub storage: PathBuf,
    /// The runtime under which the runtime wrapper is registered with it.
    pub runtime: String,
    /// runc, with the state directory that it has under Podman.
    pub runc: Runc,
}

impl Podman {
    const NAME: &'static str = "podman";

    /// The descriptions of the containers whose restore is under way, by age.
    fn arriving() -> Vec<Value> {
        let read = |bundle: PathBuf| serde_json::from_slice(&std::fs::read(bundle.join(DESCRIPTION)).ok()?).ok();
        let mut found: Vec<Value> = Mark::all().into_iter().map(|(_, mark)| mark.bundle).filter_map(read).collect();
        found.sort_by_key(|description| description["Created"].to_string());
        found
    }

    /// Podman's description of a container by its name or id.
    fn described(&self, name: &str) -> Result<Option<Value>, EngineError> {
        if !is_word(name) {
            return Ok(None);
        }
        let is_it = |container: &Value| container["Name"] == name || container["Id"] == name;
        let is_holder = |container: &Value| holds_for(container).is_some();
        if let Some(arriving) = Self::arriving().into_iter().find(is_it) {
            return Ok(Some(arriving));
        }
        match self.json(&["container", "inspect", name], "show", name) {
            // It also takes the beginning of an id for a name.
            Ok(mut found) => Ok(Some(found[0].take()).filter(|one| is_it(one) && !is_holder(one))),
            Err(error) if is_unknown(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn there(&self, name: &str) -> Result<Value, EngineError> {
        self.described(name)?.ok_or_else(|| EngineError::NoSuchContainer { engine: Self::NAME, name: name.to_owned() })
    }

    /// Notes which of the container's volumes are not there, and makes them.
    fn make_volumes(&self, name: &str, bundle: &Path, parameters: &Parameters) -> Result<(), EngineError> {
        let mut made = String::new();
        for volume in parameters.volumes.iter().filter(|volume| self.volume(&volume.name).is_null()) {
            if !is_word(&volume.name) {
                return Err(described::not_made(
                    Self::NAME,
                    name,
                    format!("{:?} is no name for a volume", volume.name),
                ));
            }
            made.push_str(&volume.name);
            made.push('\n');
            std::fs::write(bundle.join(VOLUMES), &made).map_err(Self::unmade(name))?;
            self.run(&["volume", "create", &volume.name], "make the volume", &volume.name)?;
        }
        Ok(())
    }

    /// Whoever else uses the container's volumes, and stays behind.
    fn sharers(&self, container: &Container, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        for volume in parameters.volumes.iter().filter(|volume| is_word(&volume.name)) {
            if let Some(user) = self.users(&volume.name)?.iter().find(|user| **user != container.name) {
                let cause = format!("container {user} has volume {} of {}, too", volume.name, container.name);
                let remedy = "remove that container first, or give each a volume of its own";
                found.push(Blocker::new(BlockerKind::Mount, cause, remedy));
            }
        }
        Ok(found)
    }

    /// What the image is called here: by its name, if that means the same image here, else by its digest.
    fn image(&self, parameters: &Parameters) -> Option<String> {
        let mut names = [&parameters.image_name, &parameters.image].into_iter();
        names.find(|name| self.image_of(name)["Id"] == parameters.image.as_str()).cloned()
    }

    /// What of this Podman itself keeps containers from coming to it.
    fn unfit(&self) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        let info =
            self.json(&["--runtime", &self.runtime, "info", "--format", "json"], "use the runtime", &self.runtime);
        let info = match info {
            Err(EngineError::Refused { .. }) => Value::Null,
            other => other?,
        };
        if !described::is_wrapper(Path::new(info["host"]["ociRuntime"]["path"].as_str().unwrap_or_default())) {
            let runtime = &self.runtime;
            add(
                BlockerKind::Engine,
                format!("Podman there does not know the runtime {runtime}, which restores containers"),
                format!(
                    "add `{runtime} = [\"/usr/lib/tranship/tranship-runc\"]` to [engine.runtimes] in its containers.conf"
                ),
            );
        } else {
            let version = info["version"]["Version"].as_str().unwrap_or_default();
            if version_of(version).is_none_or(|version| version < OLDEST) {
                let cause = format!("Podman there is {version}, and is too old to have containers come to it");
                add(BlockerKind::Engine, cause, format!("install {}.{} or later", OLDEST.0, OLDEST.1));
            }
            if info["host"]["networkBackend"] != "netavark" {
                let cause = "Podman there attaches containers by CNI, not by netavark".to_owned();
                add(
                    BlockerKind::Network,
                    cause,
                    "set network_backend = \"netavark\" in its containers.conf".to_owned(),
                );
            }
        }
        Ok(found)
    }

    fn lacks(&self, name: &str, parameters: &Parameters) -> Result<Vec<Blocker>, EngineError> {
        let mut found = Vec::new();
        // While one arrives, `podman info` waits for it; and it arrives by this runtime.
        if Self::arriving().is_empty() {
            found.extend(self.unfit()?);
        }
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        if parameters.layers.is_empty() && self.image(parameters).is_none() {
            let (image, id) = (&parameters.image_name, &parameters.image);
            add(
                BlockerKind::Rootfs,
                format!("the image {image} ({id}) of container {name} is in neither Podman any more"),
                "bring it to one of them (`podman pull`)".to_owned(),
            );
        }
        found.extend(described::lacking_devices(name, parameters.host_config()));
        if let Some(brought) = parameters.joined.as_ref().and_then(|joined| joined.brought.as_ref()) {
            found.extend(brought.lacks(self)?);
        }
        found.extend(self.network_obstacles(name, parameters)?);
        let mut add = |kind, cause: String, remedy: String| found.push(Blocker::new(kind, cause, remedy));
        for volume in parameters.volumes.iter().filter(|volume| !self.volume(&volume.name).is_null()) {
            let name = &volume.name;
            if let Some(user) = self.users(name)?.first() {
                add(
                    BlockerKind::Mount,
                    format!("Podman there has a volume {name} already, which container {user} uses"),
                    format!("remove it there (`podman volume rm {name}`), if nobody needs it"),
                );
            }
        }
        if parameters.foreign && !parameters.volumes.is_empty() {
            found.extend(mounts::not_followed(&self.storage));
        }
        Ok(found)
    }

    /// Puts what Podman and runc know of a container together.
    fn container(&self, name: &str, described: &Value) -> Result<Container, EngineError> {
        let mut container = described::container(&self.runc, name, described)?;
        if described["State"]["Running"] == true && container.config.is_null() {
            let runtime = described["OCIRuntime"].as_str().unwrap_or("another runtime than runc");
            return Err(EngineError::Refused {
                engine: Self::NAME,
                what: "show all of",
                name: name.to_owned(),
                why: format!(
                    "{runtime} runs it, whose containers cannot be moved; make it with `podman --runtime runc`"
                ),
            });
        }
        let parameters = Parameters::read(
            described,
            &container.config,
            |name| self.network(name),
            |name| self.volume(name),
            |name| self.image_of(name),
        );
        container.parameters = serde_json::to_value(parameters).unwrap_or_default();
        Ok(container)
    }

    /// How many of these layers, from the lowest on, some image here has.
    fn known_layers(&self, wanted: &[String]) -> Result<usize, EngineError> {
        let ids = self.run(&["images", "--all", "--quiet", "--no-trunc"], "list images in", "")?;
        let ids = String::from_utf8_lossy(&ids).lines().map(str::to_owned).collect::<Vec<_>>();
        if ids.is_empty() {
            return Ok(0);
        }
        let arguments: Vec<&str> = ["image", "inspect"].into_iter().chain(ids.iter().map(String::as_str)).collect();
        let images = self.json(&arguments, "show the images", "")?;
        let images = images.as_array().into_iter().flatten();
        Ok(images.map(|image| described::in_common(wanted, &described::layers(image))).max().unwrap_or(0))
    }

    fn unmade(name: &str) -> impl Fn(io::Error) -> EngineError {
        move |error| described::not_made(Self::NAME, name, error.to_string())
    }
}

/// Whether Podman takes a container for one that was never started.
fn was_never_started(described: &Value) -> bool {
    matches!(described["State"]["Status"].as_str(), Some("created" | "configured" | "initialized"))
}

/// Major and minor number of a version.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Whether Podman's resolver, where one is installed, serves a network on this node: netavark gives it a file for each.
fn is_resolved(network: &str) -> bool {
    let served = Path::new("/run/containers/networks/aardvark-dns");
    // The resolver's mark of a network without a way out.
    is_word(network) && (served.join(network).exists() || served.join(format!("{network}%int")).exists())
}

impl Engine for Podman {
    fn name(&self) -> EngineName {
        EngineName::Podman
    }

    fn is_present(&self) -> bool {
        self.storage.exists()
    }

    fn why_absent(&self) -> Option<(String, String)> {
        let storage = self.storage.display();
        let cause = format!("podman is installed, but was never used: there is no {storage}");
        let remedy = "run `podman info` once, or name its storage in the agent's configuration".to_owned();
        installed::is_installed(&self.path).then_some((cause, remedy))
    }

    fn attaches_network(&self) -> bool {
        true
    }

    fn makes_root(&self) -> bool {
        true
    }

    fn version(&self) -> Result<String, EngineError> {
        let said = self.run(&["--version"], "tell its version", "")?;
        Ok(String::from_utf8_lossy(&said).trim().trim_start_matches("podman version ").to_owned())
    }

    fn list(&self) -> Result<Vec<Summary>, EngineError> {
        let arriving = Self::arriving();
        let mut found = Vec::new();
        for rows in self.rows(PATIENCE)? {
            let is_own = |row: &&Value| held_for(&row["Labels"], &row["Image"], &row["Names"][0]).is_none();
            let own = rows.as_array().into_iter().flatten().filter(is_own);
            found.extend(own.filter_map(|row| {
                let state = match row["State"].as_str()? {
                    "created" | "configured" | "initialized" => State::Created,
                    "running" | "stopping" => State::Running,
                    "paused" => State::Paused,
                    _ => State::Stopped,
                };
                let init = row["Pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
                let name = row["Names"][0].as_str()?.to_owned();
                let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
                Some(Summary { name, id: text("Id"), state, init, created: text("CreatedAt") })
            }));
        }
        for container in &arriving {
            let name = container["Name"].as_str().unwrap_or_default();
            let Container { name, id, state, init, created, .. } = self.container(name, container)?;
            found.push(Summary { name, id, state, init, created });
        }
        Ok(found)
    }

    fn inspect(&self, name: &str) -> Result<Container, EngineError> {
        let described = self.there(name)?;
        self.container(name, &described)
    }

    fn obstacles(&self, container: &Container) -> Vec<Blocker> {
        let found =
            described::parameters::<Parameters>(&container.name, &container.parameters).and_then(|parameters| {
                let mut found = parameters.obstacles(&container.name);
                found.extend(self.sharers(container, &parameters)?);
                found.extend(EtcFiles::obstacles(container));
                found.extend(described::dependants(container, &self.all_described()?));
                Ok(found)
            });
        described::or_mend(found)
    }

    fn pod(&self, container: &Container) -> Result<Option<Pod>, EngineError> {
        self.pod_of(container)
    }

    fn remarks(&self, container: &Container) -> Vec<String> {
        described::parameters::<Parameters>(&container.name, &container.parameters)
            .map_or_else(|_| Vec::new(), |parameters| parameters.remarks(&container.name))
    }

    /// Of a log that a user has put elsewhere Podman removes nothing, so that an earlier stay's may be there.
    fn log(&self, name: &str) -> Result<Option<LogFiles>, EngineError> {
        let container = self.inspect(name)?;
        let log = described::parameters::<Parameters>(name, &container.parameters)?.log();
        Ok(log.filter(|log| log.current.starts_with(&self.storage)))
    }

    fn log_left(&self, container: &Container) -> Option<String> {
        let parameters = described::parameters::<Parameters>(&container.name, &container.parameters).ok()?;
        parameters.log_left(&container.name)
    }

    fn holders(&self) -> Option<&dyn Holders> {
        Some(self)
    }

    fn networks(&self, container: &Container) -> Vec<AttachedNetwork> {
        described::parameters::<Parameters>(&container.name, &container.parameters)
            .map_or_else(|_| Vec::new(), |parameters| parameters.attached(&container.name, is_resolved))
    }

    fn parameters_for(&self, other: EngineName, container: &Container) -> Result<Value, Vec<Blocker>> {
        crossing::parameters(EngineName::Podman, other, container)
    }

    fn missing(&self, name: &str, parameters: &Value) -> Vec<Blocker> {
        described::or_mend(described::parameters(name, parameters).and_then(|p| self.lacks(name, &p)))
    }

    fn dump(&self, container: &Container, images: Images<'_>) -> Program {
        described::dump(&self.runc, container, images)
    }

    fn create(&self, name: &str, bundle: &Path, config: &Value, parameters: &Value) -> Result<(), EngineError> {
        let parameters: Parameters = described::parameters(name, parameters)?;
        if !is_word(name) {
            return Err(described::not_made(Self::NAME, name, "that is no name for a container"));
        }
        let absent = || described::not_made(Self::NAME, name, format!("its image {} is gone", parameters.image_name));
        let image = self.image(&parameters).ok_or_else(absent)?;
        described::note(bundle, "").map_err(Self::unmade(name))?;
        Self::forget_pod(bundle)?;
        MountTree::of(config).note(bundle).map_err(Self::unmade(name))?;
        Limits::of(config).note(bundle).map_err(Self::unmade(name))?;
        EtcFiles::of(config).note(bundle).map_err(Self::unmade(name))?;
        self.make_volumes(name, bundle, &parameters)?;
        self.make_networks(name, bundle, &parameters)?;
        if let Some(brought) = parameters.joined.as_ref().and_then(|joined| joined.brought.as_ref()) {
            self.make_pod(bundle, brought)?;
        }
        let mut arguments = vec!["--runtime".to_owned(), self.runtime.clone()];
        arguments.extend(parameters.create_arguments(name, &image, self.runc.cgroup_parent.as_deref()));
        let said = self.run(&arguments, "make", name)?;
        let id = String::from_utf8_lossy(&said).lines().next_back().unwrap_or_default().trim().to_owned();
        described::note(bundle, &id).map_err(Self::unmade(name))?;
        let made = self.there(&id)?;
        let different = parameters.differences(&made);
        if !different.is_empty() {
            let why = format!(
                "it would be another one there: {}; make the two Podmans' defaults equal",
                different.join(", ")
            );
            return Err(described::not_made(Self::NAME, name, why));
        }
        std::fs::write(bundle.join(DESCRIPTION), made.to_string()).map_err(Self::unmade(name))
    }

    fn discard(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        described::discard(self, name, bundle)?;
        self.discard_pod(bundle)?;
        self.remove_networks(bundle)?;
        let made = std::fs::read_to_string(bundle.join(VOLUMES)).unwrap_or_default();
        made.lines().filter(|volume| !self.volume(volume).is_null()).try_for_each(|volume| {
            match self.users(volume)?.is_empty() {
                true => self.run(&["volume", "rm", volume], "remove the volume", volume).map(drop),
                // Somebody has given it to another container meanwhile.
                false => Ok(()),
            }
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
        // The front's program, which knows by its name what it is to do.
        match std::os::unix::fs::symlink("criu", images.front.join("netavark")) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(Self::unmade(name)(error)),
            _ => {}
        }
        let mut environment = vec![("CONTAINERS_HELPER_BINARY_DIR", images.front.as_os_str())];
        environment.extend(network.map(|path| (NETWORK_VARIABLE, path.as_os_str())));
        // The network of a pod is its infra container's.
        let network = if self.start_infra(bundle, &environment)? { None } else { network };
        let id = described::mark(bundle, images, network).map_err(Self::unmade(name))?;
        let mut command = Program::new(&self.path);
        command.args(["start", &id]).current_dir("/").envs(environment);
        Ok(command)
    }

    fn share_memory(&self, bundle: &Path, shared: &Path) -> Result<(), EngineError> {
        self.mount_shared_memory(bundle, shared)
    }

    fn end(&self, name: &str, bundle: &Path) -> Result<(), EngineError> {
        let kill = |id: &str| match self.run(&["kill", "--signal", "KILL", id], "end", name) {
            // It has ended by itself.
            Err(EngineError::Refused { why, .. }) if why.contains("can only kill running") => Ok(()),
            other => other.map(drop),
        };
        described::end(Self::NAME, (name, bundle), &self.runc, |id| self.described(id), kill)
    }

    fn retire(&self, name: &str) -> Result<(), EngineError> {
        let Some(described) = self.described(name)? else { return Ok(()) };
        let (Some(id), Some(monitor)) = (described["Id"].as_str(), described["State"]["ConmonPid"].as_i64()) else {
            return Ok(());
        };
        // It is conmon that has Podman clean up after the container, and start it again.
        let arguments = std::fs::read(format!("/proc/{monitor}/cmdline")).unwrap_or_default();
        if monitor > 0 && arguments.split(|byte| *byte == 0).any(|argument| argument == id.as_bytes()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(monitor as i32), nix::sys::signal::Signal::SIGKILL);
        }
        Ok(())
    }

    fn notices(&self, name: &str) -> Result<bool, EngineError> {
        let Some(described) = self.described(name)?.filter(was_never_started) else { return Ok(true) };
        Ok(self.container(name, &described)?.state != State::Running)
    }

    fn remove(&self, name: &str) -> Result<(), EngineError> {
        let Some(described) = self.described(name)? else { return Ok(()) };
        match self.run(&["rm", "--force", "--time", "0", name], "remove", name) {
            Err(error) if !is_unknown(&error) => return Err(error),
            _ => {}
        }
        // Where its monitor was killed, nobody has done this.
        self.runc.remove(described["Id"].as_str().unwrap_or_default())?;
        match described["Pod"].as_str() {
            Some(pod) => self.remove_empty_pod(pod),
            None => Ok(()),
        }
    }

    fn missing_image(&self, name: &str, parameters: &Value) -> Result<Option<MissingImage>, EngineError> {
        let parameters: Parameters = described::parameters(name, parameters)?;
        if parameters.layers.is_empty() || self.image(&parameters).is_some() {
            return Ok(None);
        }
        Ok(Some(MissingImage {
            may_be_named: is_word(&parameters.image_name) && self.image_of(&parameters.image_name).is_null(),
            bytes: parameters.image_bytes,
            layers: parameters.layers.len(),
            known_layers: self.known_layers(&parameters.layers)?,
            known: Vec::new(),
            known_as_empty: true,
            directory: self.storage.clone(),
            name: parameters.image_name,
        }))
    }

    fn save_image(&self, parameters: &Value, missing: &MissingImage, sink: &mut dyn Write) -> Result<(), EngineError> {
        let parameters: Parameters = described::parameters(&missing.name, parameters)?;
        let name = self.image(&parameters).filter(|_| missing.may_be_named).unwrap_or(parameters.image);
        // Of the formats only this one keeps the image's id. Which of its files is which layer is said at its end.
        let save = |take: &mut dyn FnMut(&mut dyn Read) -> io::Result<()>| {
            self.give_out(&["save", "--quiet", "--format=docker-archive", &name], "save the image", &missing.name, take)
        };
        let mut layers = HashSet::new();
        if missing.known_layers > 0 {
            save(&mut |archive| archive::first_layers(archive, missing.known_layers).map(|found| layers = found))?;
        }
        save(&mut |archive| archive::copy_without(archive, (&layers, Known::in_archive(missing)), sink))
    }

    fn load_image(&self, name: &str, parameters: &Value, archive: &mut dyn Read) -> Result<(), EngineError> {
        let parameters: Parameters = described::parameters(name, parameters)?;
        let (what, image) = ("load the image", &parameters.image_name);
        self.take_in(&["load", "--quiet"], what, image, archive)?;
        let other = || EngineError::Refused {
            engine: Self::NAME,
            what,
            name: image.clone(),
            why: "it has another id there".to_owned(),
        };
        self.image(&parameters).map(drop).ok_or_else(other)
    }

    fn tree_place(&self, name: &str, parameters: &Value, tree: &CarriedTree) -> Result<TreePlace, EngineError> {
        let parameters: Parameters = described::parameters(name, parameters)?;
        let mut volumes = parameters.volumes.iter();
        let volume = volumes.find(|volume| tree.kind == TreeKind::Volume && volume.inside == tree.inside);
        let there = volume.map(|volume| self.volume(&volume.name)).unwrap_or_default();
        Ok(match there["Mountpoint"].as_str() {
            Some(path) => TreePlace::There(path.into()),
            None => TreePlace::Below(self.storage.clone()),
        })
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

/// For the fuzz targets: a description, or parameters.
pub(crate) fn fuzz_parameters(value: &Value) {
    parameters::fuzz(value);
    pod::fuzz(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_their_numbers() {
        assert!(version_of("4.10.0-dev") > Some(OLDEST) && version_of("4.2.1") < Some(OLDEST));
        assert_eq!(version_of("unknown"), None);
    }
}
