//! What Docker and Podman have in common, and in part containerd: both describe a container in the same words, make it anew from its parameters, and have
//! runc run it, with the runtime wrapper in between. What is being made here is noted by its id.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;
use tranship_sys::launch::Program;
use tranship_types::{Blocker, BlockerKind, CarriedTree, TreeKind};

use crate::{Container, Engine, EngineError, EtcFiles, Images, Mark, Runc, State, docker, etc_files, podman};

/// How long a container that was killed, or a start that failed, may take to be over.
const END: Duration = Duration::from_secs(20);

/// Puts what an engine and runc know of a container together, but for its parameters.
pub(crate) fn container(runc: &Runc, name: &str, described: &Value) -> Result<Container, EngineError> {
    let text = |key: &str| described[key].as_str().unwrap_or_default().to_owned();
    let mut container = match runc.inspect(&text("Id")) {
        Ok(container) => container,
        Err(EngineError::NoSuchContainer { .. }) => {
            let state = if described["State"]["Status"] == "created" { State::Created } else { State::Stopped };
            Container::at_rest(&text("Id"), state)
        }
        Err(other) => return Err(other),
    };
    // Docker attaches the network when runc has made the namespace, so that only Docker has a name for it.
    if let Some(path) = described["NetworkSettings"]["SandboxKey"].as_str().filter(|path| !path.is_empty())
        && let Some(namespaces) = container.config["linux"]["namespaces"].as_array_mut()
    {
        namespaces.iter_mut().filter(|n| n["type"] == "network").for_each(|n| n["path"] = path.into());
    }
    if container.config.is_object() {
        let pod = container.config["annotations"].get(etc_files::SANDBOX).cloned();
        container.config["annotations"] = described["Config"]["Labels"].clone();
        if let Some(pod) = pod {
            container.config["annotations"][etc_files::SANDBOX] = pod;
        }
        EtcFiles::add_to(&mut container.config, &container.id);
    }
    let bound = mounts(described).iter().filter(|mount| mount["Type"] == "bind");
    container.binds = bound.filter_map(|mount| mount["Source"].as_str()).map(PathBuf::from).collect();
    container.trees = trees(described);
    (container.name, container.created) = (name.to_owned(), text("Created"));
    Ok(container)
}

/// What a container can write to on disk: its writable layer, its volumes, and the node's directories that it may
/// write to.
fn trees(described: &Value) -> Vec<CarriedTree> {
    let upper = described["GraphDriver"]["Data"]["UpperDir"].as_str();
    let layer = upper.map(|path| CarriedTree {
        kind: TreeKind::WritableLayer,
        inside: "/".into(),
        path: path.into(),
        bytes: 0,
    });
    let tree = |mount: &Value| {
        let kind = match mount["Type"].as_str()? {
            "volume" => TreeKind::Volume,
            "bind" if mount["RW"] == true => TreeKind::Bind,
            _ => return None,
        };
        let path = Path::new(mount["Source"].as_str()?).canonicalize().ok().filter(|path| path.is_dir())?;
        Some(CarriedTree { kind, inside: mount["Destination"].as_str()?.into(), path, bytes: 0 })
    };
    layer.into_iter().chain(mounts(described).iter().filter_map(tree)).collect()
}

fn mounts(described: &Value) -> &[Value] {
    described["Mounts"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// [`Engine::tree_directory`].
pub(crate) fn tree_directory(
    engine: &'static str,
    name: &str,
    described: &Value,
    tree: &CarriedTree,
) -> Result<PathBuf, EngineError> {
    let here = trees(described).into_iter().find(|here| (here.kind, &here.inside) == (tree.kind, &tree.inside));
    let why = || format!("it has no {} at {}", tree.kind, tree.inside.display());
    here.map(|here| here.path).ok_or_else(|| not_made(engine, name, why()))
}

/// What of a container others use by a mode of theirs (`container:ID`).
const MODES: [(&str, &str); 5] = [
    ("NetworkMode", "network"),
    ("PidMode", "PID namespace"),
    ("IpcMode", "IPC namespace"),
    ("UTSMode", "UTS namespace"),
    ("UsernsMode", "user namespace"),
];

/// Containers that the engine would have to start again from this one, which leaves: those among `others`, as it describes them, that use
/// its namespaces and do not run (those that run are found by their processes), take their volumes from it, or are made to depend on it.
pub(crate) fn dependants<'a>(container: &Container, others: impl IntoIterator<Item = &'a Value>) -> Vec<Blocker> {
    let (id, name) = (container.id.as_str(), container.name.as_str());
    let is_it = |word: &str| word == name || (word.len() >= 12 && id.starts_with(word));
    let mut found = Vec::new();
    for other in others.into_iter().filter(|other| other["Id"] != id) {
        let (host, runs) = (&other["HostConfig"], other["State"]["Running"] == true);
        let joined = |mode: &Value| mode.as_str().and_then(|mode| mode.strip_prefix("container:")).is_some_and(is_it);
        let mode = MODES.iter().find(|(key, _)| joined(&host[key])).map(|(_, what)| *what);
        let any = |list: &Value| {
            let words = list.as_array().into_iter().flatten().filter_map(Value::as_str);
            words.into_iter().any(|word| is_it(word.split(':').next().unwrap_or_default()))
        };
        let uses = match mode {
            _ if any(&host["VolumesFrom"]) => format!("takes its volumes from container {name}"),
            Some(_) if runs => continue,
            Some(what) => {
                format!("does not run, and uses the {what} of container {name}, without which it cannot start")
            }
            None if any(&other["Dependencies"]) => format!("depends on container {name}"),
            None => continue,
        };
        let other = other["Name"].as_str().unwrap_or_default().trim_start_matches('/');
        let remedy = format!("remove container {other} first, or make it without that");
        found.push(Blocker::new(BlockerKind::Engine, format!("container {other} {uses}"), remedy));
    }
    found
}

/// The error of a container that an engine could not make.
pub(crate) fn not_made(engine: &'static str, name: &str, why: impl Into<String>) -> EngineError {
    EngineError::Refused { engine, what: "make", name: name.to_owned(), why: why.into() }
}

/// Parameters as they have travelled.
pub(crate) fn parameters<P: DeserializeOwned>(name: &str, parameters: &Value) -> Result<P, EngineError> {
    serde_json::from_value(parameters.clone()).map_err(|e| EngineError::Unreadable {
        path: "parameters".into(),
        name: name.to_owned(),
        why: format!("{e}; update both agents"),
    })
}

/// Blockers; that an engine cannot be asked for them is one, too.
pub(crate) fn or_mend(found: Result<Vec<Blocker>, EngineError>) -> Vec<Blocker> {
    found.unwrap_or_else(|error| {
        let (cause, remedy) = error.told("mend the engine there");
        vec![Blocker::new(BlockerKind::Engine, cause, remedy)]
    })
}

/// The layers of an image, the lowest first, as its description tells them.
pub(crate) fn layers(image: &Value) -> Vec<String> {
    let layers = image["RootFS"]["Layers"].as_array().into_iter().flatten();
    layers.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// How many layers, from the lowest on, two images have in common.
pub(crate) fn in_common(one: &[String], other: &[String]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// What there is to say of a container's published ports, by its `HostConfig`: the engine there publishes them anew, but at an address
/// of the other node.
pub(crate) fn published(name: &str, host_config: &Value) -> Option<String> {
    let bindings = host_config["PortBindings"].as_object().into_iter().flatten();
    let port = |(inside, bound): (&String, &Value)| {
        let outside = bound[0]["HostPort"].as_str().filter(|port| !port.is_empty()).unwrap_or("a free port");
        bound.as_array().is_some_and(|all| !all.is_empty()).then(|| format!("{outside} for {inside}"))
    };
    let mut ports: Vec<String> = bindings.filter_map(port).collect();
    if ports.is_empty() && host_config["PublishAllPorts"] == true {
        ports.push("all that its image names".to_owned());
    }
    (!ports.is_empty()).then(|| {
        format!(
            "ports: container {name} publishes {}; the destination publishes the same at its own address, and connections that \
             came in through this node's address end with the move",
            ports.join(", ")
        )
    })
}

/// What there is to say of a log of so many bytes that stays behind, and is removed with the original. `engine` is the command that
/// shows it.
pub(crate) fn logged(engine: &str, name: &str, bytes: u64) -> Option<String> {
    (bytes > 0).then(|| {
        format!(
            "logs: `{engine} logs {name}` begins with the move on the destination; the {} KiB before it are removed with the \
             original, `{engine} logs {name} > FILE` keeps them",
            bytes.div_ceil(1024)
        )
    })
}

/// The same where the engine logs to the journal.
pub(crate) fn logged_to_journal(engine: &str, name: &str) -> String {
    format!(
        "logs: `{engine} logs {name}` begins with the move on the destination; what was logged before it stays in the journal of \
         this node (`journalctl CONTAINER_NAME={name}`)"
    )
}

/// Devices of a container that this node does not have, by its `HostConfig`.
pub(crate) fn lacking_devices(name: &str, host_config: &Value) -> Vec<Blocker> {
    let devices = host_config["Devices"].as_array().into_iter().flatten();
    let lacking = devices.filter_map(|device| device["PathOnHost"].as_str()).filter(|path| !Path::new(path).exists());
    let blocker = |path: &str| {
        let cause = format!("container {name} has the device {path}, which is not there");
        let remedy = "load its driver there, choose a node that has it, or start the container without it";
        Blocker::new(BlockerKind::Engine, cause, remedy)
    };
    lacking.map(blocker).collect()
}

/// Whether a program is the runtime wrapper.
pub(crate) fn is_wrapper(program: &Path) -> bool {
    program.canonicalize().is_ok_and(|program| program.file_name().is_some_and(|name| name == "transhipd"))
}

/// The id that was noted when the container was made; empty while it is being made.
pub(crate) fn noted(bundle: &Path) -> Option<String> {
    std::fs::read_to_string(bundle.join("id")).ok()
}

/// Notes it. With an empty one, whatever has the container's name from now on is what is being made here: nothing had it before.
pub(crate) fn note(bundle: &Path, id: &str) -> io::Result<()> {
    std::fs::write(bundle.join("id"), id)
}

/// [`Engine::is_made_from`].
pub(crate) fn is_made_from(container: &Container, bundle: &Path) -> bool {
    noted(bundle).is_some_and(|noted| noted.is_empty() || noted == container.id)
}

/// [`Engine::discard`].
pub(crate) fn discard(engine: &impl Engine, name: &str, bundle: &Path) -> Result<(), EngineError> {
    let Some(noted) = noted(bundle) else { return Ok(()) };
    Mark::take_off(&noted);
    engine.remove(if noted.is_empty() { name } else { &noted })
}

/// Forgets which volumes and networks were made for the container that has come by this bundle: they are the user's
/// from now on, and stay when the bundle is discarded.
///
/// # Errors
/// The system's refusal.
pub fn keep_what_was_made(bundle: &Path) -> io::Result<()> {
    [docker::VOLUMES, docker::NETWORKS, podman::VOLUMES, podman::NETWORKS].into_iter().try_for_each(|note| {
        match std::fs::remove_file(bundle.join(note)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    })
}

/// [`Engine::dump`]: runc knows the container by its id.
pub(crate) fn dump(runc: &Runc, container: &Container, images: Images<'_>) -> Program {
    runc.dump(&Container { name: container.id.clone(), ..container.clone() }, images)
}

/// Marks the container that was made for a restore; its id.
pub(crate) fn mark(bundle: &Path, images: Images<'_>, network: Option<&Path>) -> io::Result<String> {
    let id = noted(bundle).unwrap_or_default();
    Mark::new(images, network, bundle).put(&id)?;
    Ok(id)
}

/// [`Engine::end`]: `describe` asks the engine for the container of an id, `kill` has it killed.
pub(crate) fn end(
    engine: &'static str,
    (name, bundle): (&str, &Path),
    runc: &Runc,
    describe: impl Fn(&str) -> Result<Option<Value>, EngineError>,
    kill: impl Fn(&str) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let Some(id) = noted(bundle).filter(|id| !id.is_empty()) else { return Ok(()) };
    Mark::take_off(&id);
    let deadline = Instant::now() + END;
    loop {
        let Some(described) = describe(&id)? else { return Ok(()) };
        if described["State"]["Running"] != true {
            // A start that has failed, or fails now.
            return runc.remove(&id);
        }
        kill(&id)?;
        if Instant::now() > deadline {
            let why = format!("it still runs {} s after it was killed", END.as_secs());
            return Err(EngineError::Refused { engine, what: "end", name: name.to_owned(), why });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// [`Engine::mount_residue`].
pub(crate) fn mount_residue(runc: &Runc, bundle: &Path) -> Vec<PathBuf> {
    noted(bundle).filter(|id| !id.is_empty()).map_or(Vec::new(), |id| runc.mount_residue(&id, bundle))
}

/// A name as a part of a path: only what needs no escape there, which all names of containers, images and networks keep
/// to but for those that cannot exist.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-:/@".contains(&b))
        && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn published_ports_are_told() {
        let bound = json!({"PortBindings": {
            "80/tcp": [{"HostIp": "", "HostPort": "8080"}], "81/udp": [{"HostPort": ""}], "82/tcp": [],
        }});
        let said = published("web", &bound).unwrap();
        assert!(said.contains("publishes 8080 for 80/tcp, a free port for 81/udp;"), "{said}");
        assert_eq!(published("web", &json!({"PortBindings": null, "PublishAllPorts": false})), None);
        assert!(published("web", &json!({"PublishAllPorts": true})).is_some());
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let device = |path: &str| json!({"PathOnHost": path, "PathInContainer": "/dev/x"});
        let found = lacking_devices("web", &json!({"Devices": [device("/dev/null"), device("/dev/none")]}));
        assert!(found.len() == 1 && found[0].cause.contains("/dev/none"), "{found:?}");
        assert!(lacking_devices("web", &json!({"Devices": null})).is_empty());
    }

    #[test]
    fn a_name_cannot_leave_its_part_of_the_path() {
        assert!(is_plain("redis") && is_plain("registry:5000/a/b@sha256:0f"));
        assert!(!is_plain("a?b") && !is_plain("../x") && !is_plain("a b") && !is_plain(""));
    }

    #[test]
    fn containers_that_cannot_do_without_one_are_named() {
        let id = "a9dd338bbeec8892";
        let container = Container { name: "web".into(), id: id.into(), ..Container::at_rest(id, State::Running) };
        let other = |name: &str, runs: bool, host: Value| json!({"Id": name, "Name": format!("/{name}"), "State": {"Running": runs}, "HostConfig": host});
        let mode = |key: &str, of: &str| json!({key: format!("container:{of}")});
        let mut required = other("tail", true, json!({}));
        required["Dependencies"] = json!([id]);
        let mut itself = other("web", false, mode("PidMode", id));
        itself["Id"] = id.into();
        let all = [
            other("one", false, mode("NetworkMode", id)),
            other("two", false, mode("IpcMode", "web")),
            other("three", false, mode("PidMode", "a9dd338bbeec")),
            other("four", true, json!({"VolumesFrom": ["web:ro"]})),
            required,
            // Those that run are found by their processes.
            other("five", true, mode("NetworkMode", id)),
            other("six", false, mode("NetworkMode", "webs")),
            other("seven", false, json!({"NetworkMode": "web", "PidMode": ""})),
            itself,
        ];
        let found: Vec<String> = dependants(&container, &all).iter().map(ToString::to_string).collect();
        let words =
            ["one does not run, and uses the network", "two does not", "three does not", "four takes", "tail depends"];
        assert_eq!(found.len(), words.len(), "{found:#?}");
        assert!(found.iter().zip(words).all(|(said, words)| said.contains(words)), "{found:#?}");
    }
}
