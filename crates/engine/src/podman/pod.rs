//! Pods of Podman: containers that share namespaces, which one more container holds, the infra container.
//!
//! A pod moves as a whole. The first container of it brings the pod: it is made anew on the destination, and its infra container is started at once, behind
//! the locked network, because Podman starts the others only while it runs. The others are restored into its namespaces.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind};

use super::Podman;
use super::command::PATIENCE;
use super::parameters::{Parameters, is_word, plain, texts};
use crate::json::list;
use crate::{Container, EngineError, Pod, described, note};

/// In a bundle: the pod that was made with the container.
const NOTE: &str = "pod.json";
/// The namespaces that a pod's containers can share and take along.
const SHARED: [&str; 3] = ["net", "ipc", "uts"];
/// The image of infra containers that Podman makes by itself.
const OWN_IMAGE: &str = "localhost/podman-pause:";
/// What Podman shows of a pod that either moves along or follows from the rest.
const KNOWN: [&str; 18] = [
    "Id",
    "Name",
    "Namespace",
    "Created",
    "CreateCommand",
    "ExitPolicy",
    "State",
    "Hostname",
    "Labels",
    "CreateCgroup",
    "CgroupParent",
    "CgroupPath",
    "CreateInfra",
    "InfraContainerID",
    "InfraConfig",
    "SharedNamespaces",
    "NumContainers",
    "Containers",
];
/// The same, in other letters: the infra container shows it, too.
const KNOWN_OF_INFRA: [&str; 1] = ["mounts"];

/// What makes a pod again on another node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PodParameters {
    pub name: String,
    exit_policy: String,
    labels: BTreeMap<String, String>,
    shared: Vec<String>,
    infra_name: String,
    pub infra: Parameters,
}

/// The pod of a container that moves with all others of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct JoinedPod {
    pub name: String,
    /// What makes the pod, where this container brings it.
    pub brought: Option<Box<PodParameters>>,
    /// What the pod has mounted into each of its containers.
    pub binds: Vec<String>,
}

/// A pod that was made here.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    /// Its id; its name while it is being made.
    pod: String,
    /// The id of its infra container; empty while it is being made.
    infra: String,
    /// Where the content of its `/dev/shm` has been mounted.
    #[serde(default)]
    shared_memory: Option<PathBuf>,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Whether Podman said that it does not know the pod.
fn is_unknown(error: &EngineError) -> bool {
    matches!(error, EngineError::Refused { why, .. } if why.contains("no such pod"))
}

impl PodParameters {
    fn read(pod: &Value, infra: &Container, parameters: Parameters) -> Self {
        Self {
            name: text(&pod["Name"]),
            exit_policy: text(&pod["ExitPolicy"]),
            labels: serde_json::from_value(pod["Labels"].clone()).unwrap_or_default(),
            shared: texts(&pod["SharedNamespaces"]),
            infra_name: infra.name.clone(),
            infra: parameters,
        }
    }

    /// The arguments of podman that make the pod.
    fn create_arguments(&self, image: Option<&str>, cgroup_parent: Option<&Path>) -> Vec<String> {
        let mut all = vec!["pod".to_owned(), "create".to_owned()];
        let mut add = |option: &str, value: &str| all.push(format!("--{option}={value}"));
        add("name", &self.name);
        add("infra-name", &self.infra_name);
        add("share", &self.shared.join(","));
        if !self.exit_policy.is_empty() {
            add("exit-policy", &self.exit_policy);
        }
        self.labels.iter().for_each(|(key, value)| add("label", &format!("{key}={value}")));
        if let Some(image) = image {
            add("infra-image", image);
        }
        self.infra.add_pod_options(cgroup_parent, add);
        all
    }

    /// The image of its infra container, unless Podman makes that by itself.
    fn image(&self) -> Option<&str> {
        let name = self.infra.image_name.as_str();
        (!name.starts_with(OWN_IMAGE)).then_some(name)
    }

    /// What on this node keeps Podman from making it.
    pub fn lacks(&self, podman: &Podman) -> Result<Vec<Blocker>, EngineError> {
        let (name, mut found) = (&self.name, Vec::new());
        if !is_word(name) || !is_word(&self.infra_name) {
            return Err(described::not_made(Podman::NAME, name, "that is no name for a pod"));
        }
        // It says so by its status alone.
        if podman.run(&["pod", "exists", name], "look for the pod", name).is_ok() {
            let cause = format!("Podman there has a pod {name} already");
            found.push(Blocker::new(BlockerKind::NameTaken, cause, "remove or rename one of them"));
        }
        if let Some(image) = self.image().filter(|_| podman.image(&self.infra).is_none()) {
            let cause = format!("Podman there lacks the image {image} of the infra container of pod {name}");
            found.push(Blocker::new(BlockerKind::Rootfs, cause, "bring it there (`podman pull`)"));
        }
        Ok(found)
    }
}

/// What of a pod no other node could give to it.
fn obstacles(pod: &Value, infra: Option<&Container>) -> Vec<Blocker> {
    let name = text(&pod["Name"]);
    let mut found = Vec::new();
    let mut add = |cause: String, remedy: &str| found.push(Blocker::new(BlockerKind::Engine, cause, remedy));
    let Some(infra) = infra else {
        add(format!("pod {name} has no infra container"), "make it with one, or start its containers outside of it");
        return found;
    };
    let shared = texts(&pod["SharedNamespaces"]);
    for kind in shared.iter().filter(|kind| !SHARED.contains(&kind.as_str())) {
        add(
            format!("the containers of pod {name} share the namespace {kind:?}, which does not move with them"),
            "make the pod with `--share net,ipc,uts`",
        );
    }
    if !shared.iter().any(|kind| kind == "net") || pod["InfraConfig"]["HostNetwork"] == true {
        add(format!("the containers of pod {name} share no network of their own"), "make the pod with `--share net`");
    }
    let is_known = |key: &str| KNOWN.contains(&key) || KNOWN_OF_INFRA.contains(&key);
    let others = pod.as_object().into_iter().flatten().filter(|(key, value)| !is_known(key) && !plain(value).is_null());
    for (key, _) in others {
        add(format!("pod {name} has {key} set, which does not move with it"), "make the pod without that");
    }
    let processes = infra.processes().unwrap_or_default();
    let has_sockets = processes.iter().any(|pid| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.filter_map(|entry| entry.path().read_link().ok()).any(|link| link.to_string_lossy().starts_with("socket:"))
    });
    if processes.len() != 1 || has_sockets {
        add(
            format!("the infra container of pod {name} does more than wait, and would be started anew"),
            "make the pod with the infra container that Podman has by default",
        );
    }
    found
}

impl Podman {
    /// [`Engine::pod`](crate::Engine::pod).
    pub(super) fn pod_of(&self, container: &Container) -> Result<Option<Pod>, EngineError> {
        let parameters: Parameters = described::parameters(&container.name, &container.parameters)?;
        let id = parameters.pod();
        if id.is_empty() {
            return Ok(None);
        }
        let pod = self.json(&["pod", "inspect", id], "show the pod", id)?;
        let infra_id = text(&pod["InfraContainerID"]);
        let infra = match infra_id.is_empty() {
            true => None,
            false => {
                let described = self.there(&infra_id)?;
                Some(self.container(&text(&described["Name"]), &described)?)
            }
        };
        let others = list(&pod["Containers"]).iter().filter(|one| one["Id"] != infra_id.as_str());
        let of_infra = infra.as_ref().map(|infra| described::parameters::<Parameters>(&infra.name, &infra.parameters));
        let of_infra = of_infra.transpose()?;
        let both = infra.as_ref().zip(of_infra.clone());
        let brought = both.map(|(infra, parameters)| PodParameters::read(&pod, infra, parameters));
        Ok(Some(Pod {
            name: text(&pod["Name"]),
            members: others.map(|one| text(&one["Name"])).collect(),
            obstacles: obstacles(&pod, infra.as_ref()),
            binds: of_infra.map(|parameters| parameters.binds()).unwrap_or_default(),
            host_name: text(&pod["Hostname"]),
            parameters: serde_json::to_value(brought).unwrap_or_default(),
            infra,
        }))
    }

    /// Forgets the pod that an earlier container of this bundle's name was made with: its user has removed both.
    pub(super) fn forget_pod(bundle: &Path) -> Result<(), EngineError> {
        note::remove(bundle, NOTE).map_err(Self::unmade("the pod"))
    }

    /// Makes a pod, for the container of this bundle, which brings it.
    pub(super) fn make_pod(&self, bundle: &Path, pod: &PodParameters) -> Result<(), EngineError> {
        let name = &pod.name;
        let image = match pod.image() {
            None => None,
            Some(wanted) => {
                let absent = || described::not_made(Self::NAME, name, format!("the image {wanted} is gone"));
                Some(self.image(&pod.infra).ok_or_else(absent)?)
            }
        };
        let note = |pod: &str, infra: &str| {
            let made = Made { pod: pod.to_owned(), infra: infra.to_owned(), shared_memory: None };
            note::write(bundle, NOTE, &made).map_err(Self::unmade(name))
        };
        // Nothing had its name before: whatever has it from now on is what is being made here.
        note(name, "")?;
        let arguments = pod.create_arguments(image.as_deref(), self.runc.cgroup_parent.as_deref());
        self.run(&arguments, "make the pod", name)?;
        let made = self.there(&pod.infra_name)?;
        note(&text(&made["Pod"]), &text(&made["Id"]))?;
        let different = pod.infra.differences(&made);
        if different.is_empty() {
            return Ok(());
        }
        let why = format!(
            "its infra container would be another one there: {}; make the two Podmans' defaults equal",
            different.join(", ")
        );
        Err(described::not_made(Self::NAME, name, why))
    }

    /// Starts the infra container of the pod that was made with the container of this bundle, if there is one: its network goes into the namespace
    /// `network`. Returns whether there is one.
    pub(super) fn start_infra(&self, bundle: &Path, environment: &[(&str, &OsStr)]) -> Result<bool, EngineError> {
        let made: Option<Made> = note::read(bundle, NOTE).map_err(Self::unmade("the pod"))?;
        let Some(made) = made else { return Ok(false) };
        self.run_in(environment, PATIENCE, &["start", &made.infra], "start the infra container of the pod", &made.pod)?;
        Ok(true)
    }

    /// Mounts a tmpfs where the infra container of the pod that was made with the container of this bundle has its `/dev/shm`: Podman takes what is mounted
    /// there when it starts it, and mounts it into the others.
    pub(super) fn mount_shared_memory(&self, bundle: &Path, shared: &Path) -> Result<(), EngineError> {
        let made: Option<Made> = note::read(bundle, NOTE).map_err(Self::unmade("the pod"))?;
        let Some(mut made) = made else { return Ok(()) };
        let failed = |error: io::Error| described::not_made(Self::NAME, &made.pod, format!("its /dev/shm: {error}"));
        let device = |path: &Path| Ok(std::fs::metadata(path)?.dev());
        let described = self.there(&made.infra)?;
        let place = Path::new(described["StaticDir"].as_str().unwrap_or_default()).join("shm");
        tranship_sys::directory::make_public(&place).map_err(failed)?;
        if device(&place).map_err(failed)? == device(shared).map_err(failed)? {
            return Ok(());
        }
        made.shared_memory = Some(place.clone());
        note::write(bundle, NOTE, &made).map_err(Self::unmade(&made.pod))?;
        let (flags, none) = (MsFlags::MS_BIND, None::<&str>);
        mount(Some(shared), &place, none, flags, none)
            .and_then(|()| mount(none, &place, none, MsFlags::MS_PRIVATE, none))
            .map_err(|error| described::not_made(Self::NAME, &made.pod, format!("its /dev/shm: {error}")))
    }

    /// Removes the pod that was made with the container of this bundle, unless it has containers.
    pub(super) fn discard_pod(&self, bundle: &Path) -> Result<(), EngineError> {
        let made: Option<Made> = note::read(bundle, NOTE).map_err(Self::unmade("the pod"))?;
        let Some(made) = made else { return Ok(()) };
        // An infra container that was never started leaves what is mounted there. One that runs has a mount of its own.
        match made
            .shared_memory
            .as_deref()
            .map(|place| umount2(place, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH))
        {
            None | Some(Ok(()) | Err(Errno::EINVAL | Errno::ENOENT)) => self.remove_empty_pod(&made.pod),
            Some(Err(error)) => Err(described::not_made(Self::NAME, &made.pod, format!("its /dev/shm stays: {error}"))),
        }
    }

    /// Removes a pod that has no container but the infra container. One that is not there is no error.
    pub(super) fn remove_empty_pod(&self, pod: &str) -> Result<(), EngineError> {
        if !is_word(pod) {
            return Ok(());
        }
        let is_id = pod.len() == 64 && pod.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = match is_id {
            // Asked for the pod, Podman would wait for the containers of it whose restore is under way.
            true => pod.to_owned(),
            false => match self.json(&["pod", "inspect", pod], "show the pod", pod) {
                Ok(found) => text(&found["Id"]),
                Err(error) if is_unknown(&error) => return Ok(()),
                Err(error) => return Err(error),
            },
        };
        let of_it = |container: &Value| container["Pod"] == id.as_str() && container["IsInfra"] != true;
        let rows = self.rows(PATIENCE)?;
        let mut rows = rows.iter().flat_map(list);
        if rows.any(of_it) || Self::arriving().iter().any(of_it) {
            return Ok(());
        }
        match self.run(&["pod", "rm", "--force", "--time", "0", &id], "remove the pod", pod) {
            Err(error) if !is_unknown(&error) => Err(error),
            _ => Ok(()),
        }
    }
}

/// For the fuzz targets: parameters of a pod that a peer has sent.
pub(crate) fn fuzz(value: &Value) {
    if let Ok(pod) = described::parameters::<PodParameters>("p", value) {
        let _ = (pod.create_arguments(None, None), pod.image());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_pod_cannot_take_along_is_refused() {
        let said = |pod: Value| obstacles(&pod, None).iter().map(ToString::to_string).collect::<String>();
        assert!(said(json!({"Name": "p"})).contains("pod p has no infra container"));
        let infra = Container::at_rest("p-infra", crate::State::Running);
        let said = |pod: Value| obstacles(&pod, Some(&infra)).iter().map(ToString::to_string).collect::<Vec<_>>();
        let plain = json!({"Name": "p", "SharedNamespaces": ["net", "uts", "ipc"], "cpu_quota": 0, "mounts": [{"Type": "bind"}]});
        // One that has ended runs nothing.
        assert_eq!(said(plain.clone()).len(), 1, "{:?}", said(plain.clone()));
        let mut pod = plain;
        pod["SharedNamespaces"] = json!(["pid", "ipc"]);
        pod["memory_limit"] = 1.into();
        let found = said(pod).concat();
        for words in ["\"pid\"", "no network of their own", "memory_limit set"] {
            assert!(found.contains(words), "{words}: {found}");
        }
    }
}
