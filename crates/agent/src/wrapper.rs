//! The runtime wrapper: what an engine executes in place of runc. It passes everything on to runc, but for a container
//! that an agent has marked for a restore:
//!
//! ```text
//!  create  ─▶  where the engine does that by hooks: they, against a thread in the namespace that the agent has made: the engine attaches its network
//!              configuration: that namespace, those hooks no more, the limits that the source's cgroups have
//!              /etc/hosts and the like: what the source's have
//!              overlay: set aside, until the files that belong in it are there
//!              runc restore, which waits in the CRIU front for the skeleton; it returns when the tasks run
//!  start   ─▶  takes the mark off; there is nothing left to do
//! ```
//!
//! The `create` of a holder of addresses attaches its network in the same way, and then deletes the interface ([`silence`]).
//!
//! So everything that takes time is done before the freeze. Where there is no agent there is no mark, and this is runc.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use tranship_engine::{
    EtcFiles, Limits, Mark, MountTree, has_cgroups_2, holder_namespace, is_holder, write_as_configured,
};
use tranship_storage::overlay::{Overlay, PointKind};
use tranship_sys::launch::Program;

/// The name that it is called by.
pub const NAME: &str = "tranship-runc";

/// In a bundle's directory, the overlay that the container gets as its root.
pub const OVERLAY: &str = "overlay.json";

/// In a bundle's directory, the path of the configuration from which the engine's runtime makes the
/// container.
const ENGINE_CONFIG: &str = "engine-config";

/// Whether a bundle's directory belongs to a container of an engine that has a bundle of its own for it.
pub fn is_of_engine(bundle: &Path) -> bool {
    bundle.join(ENGINE_CONFIG).exists()
}

/// runc's global options that have no value.
const SWITCHES: [&str; 4] = ["--debug", "--systemd-cgroup", "--help", "--version"];

/// A call of runc, as far as the wrapper has to understand it.
#[derive(Debug, PartialEq, Eq)]
struct Call<'a> {
    /// Options before the command.
    global: &'a [OsString],
    command: &'a str,
    /// What follows the command, but for the id.
    options: &'a [OsString],
    id: &'a str,
}

impl<'a> Call<'a> {
    /// `None`: a call without a container.
    fn parse(arguments: &'a [OsString]) -> Option<Self> {
        let mut at = 0;
        loop {
            let argument = arguments.get(at)?.to_str()?;
            match argument {
                _ if !argument.starts_with('-') => break,
                _ if argument.contains('=') || SWITCHES.contains(&argument) => at += 1,
                _ => at += 2,
            }
        }
        let (last, options) = arguments.get(at + 1..)?.split_last()?;
        Some(Self { global: &arguments[..at], command: arguments[at].to_str()?, options, id: last.to_str()? })
    }

    /// The value of an option of the command.
    fn option(&self, name: &str) -> Option<&'a OsStr> {
        let at = self.options.iter().position(|option| option == name)?;
        self.options.get(at + 1).map(OsString::as_os_str)
    }
}

/// Runs the wrapper with what runc was to be run with. Where it passes something on it does not return.
pub fn run(arguments: &[OsString]) -> anyhow::Result<i32> {
    let call = Call::parse(arguments);
    let creation = call.as_ref().filter(|call| call.command == "create");
    if let Some(call) = creation
        && let Some(namespace) = holder_namespace(call.id).filter(|namespace| namespace.exists())
    {
        silence(call, &namespace)?;
    } else if creation.is_some_and(would_answer) {
        bail!(
            "it holds addresses for a container that has left; only the agent of Tranship starts it, which it does by itself"
        );
    } else if let Some(call) = &call
        && let Some(mark) = Mark::on(call.id)
    {
        match call.command {
            "create" => return restore(call, &mark),
            "start" => {
                // The container is restored: its start has not failed.
                if let Err(error) = put_configuration_back(&mark.bundle) {
                    eprintln!("{NAME}: the mounts of {} are not as they were configured: {error:#}", call.id);
                }
                Mark::take_off(call.id);
                return Ok(0);
            }
            _ => {}
        }
    }
    Err(Command::new(runc()?).args(arguments).exec().into())
}

/// The real runc: the first on PATH that is not this program.
fn runc() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let runc = std::env::split_paths(&path).chain(["/usr/bin", "/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    let mut runc = runc.map(|directory| directory.join("runc"));
    runc.find(|file| file.canonicalize().is_ok_and(|file| file != own)).context("there is no runc on PATH; install it")
}

/// The engine's bundle, the file of the configuration in it, and what that says.
fn configuration(call: &Call<'_>) -> anyhow::Result<(PathBuf, PathBuf, Value)> {
    let bundle = PathBuf::from(call.option("--bundle").context("create without --bundle")?);
    let file = bundle.join("config.json");
    let text = std::fs::read(&file).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok((bundle, file, serde_json::from_slice(&text)?))
}

/// Whether a call is for a holder that would answer for its addresses: its network namespace does not exist yet, or has
/// interfaces. (Podman makes the namespace first; when the agent starts a holder, the stand-in for netavark adds none.)
fn would_answer(call: &Call<'_>) -> bool {
    // What cannot be read here is runc's to refuse.
    configuration(call).is_ok_and(|(_, _, config)| {
        let has_interfaces =
            |path: &str| tranship_network::capture(Path::new(path)).map_or(true, |found| !found.names().is_empty());
        is_holder(&config) && attached_namespace(&config).is_none_or(has_interfaces)
    })
}

/// Has the engine attach a holder's network behind the closed gate of the namespace that the agent has made, and deletes the interface:
/// the engine keeps the address for as long as the holder runs, and nothing answers for it.
fn silence(call: &Call<'_>, namespace: &Path) -> anyhow::Result<()> {
    let (bundle, file, mut config) = configuration(call)?;
    ensure!(!is_attached(&config), "the engine has attached the network before");
    attach(&mut config, namespace, call.id, &bundle)?;
    replace(&file, &config.to_string())?;
    Ok(tranship_network::remove(namespace)?)
}

fn restore(call: &Call<'_>, mark: &Mark) -> anyhow::Result<i32> {
    let (bundle, file, mut config) = configuration(call)?;
    if let Some(namespace) = mark.network.as_ref().filter(|_| !is_attached(&config)) {
        attach(&mut config, namespace, call.id, &bundle)?;
    }
    if let Some(tree) = MountTree::noted(&mark.bundle)? {
        tree.give_to(&mut config, &mark.bundle)?;
    }
    if let Some(limits) = Limits::noted(&mark.bundle)? {
        limits.give_to(&mut config, has_cgroups_2());
    }
    EtcFiles::noted(&mark.bundle)?.write(&config, call.id)?;
    let text = config.to_string();
    replace(&file, &text)?;
    std::fs::write(mark.bundle.join(ENGINE_CONFIG), file.as_os_str().as_encoded_bytes())?;
    // For an agent that has to end what is left of a restore.
    std::fs::write(mark.bundle.join("config.json"), text)?;
    // The agent mounts it again when the container's files are there.
    if let Some(overlay) = Overlay::set_aside(&root(&bundle, &config), mount_points(&config))? {
        std::fs::write(mark.bundle.join(OVERLAY), serde_json::to_vec(&overlay)?)?;
    }
    replace_null_input()?;
    let mut command = Program::new(runc()?);
    command.args(call.global).args(["restore", "--detach"]).args(call.options);
    mark.images().put_front(&mut command);
    Err(command.arg(call.id).exec().into())
}

/// Has the container's input end at once, where it was a pipe and the engine here has none for it:
/// the node's own `/dev/null`, which it would get in its place, could not move on.
fn replace_null_input() -> anyhow::Result<()> {
    let is = rustix::fs::fstat(std::io::stdin())?;
    let device = (rustix::fs::major(is.st_rdev), rustix::fs::minor(is.st_rdev));
    if rustix::fs::FileType::from_raw_mode(is.st_mode) == rustix::fs::FileType::CharacterDevice && device == (1, 3) {
        let (input, _) = nix::unistd::pipe()?;
        nix::unistd::dup2_stdin(&input)?;
    }
    Ok(())
}

/// Writes mounts into the engine's configuration as the user has, once runc has made them where
/// symbolic links lead.
fn put_configuration_back(bundle: &Path) -> anyhow::Result<()> {
    let Some(file) = engine_config(bundle)? else { return Ok(()) };
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    if write_as_configured(&mut config) {
        replace(&file, &config.to_string())?;
    }
    Ok(())
}

/// The configuration from which the engine's runtime makes the container of this bundle. `None`: the
/// wrapper that has made it, of an earlier version, did not change where mounts are.
fn engine_config(bundle: &Path) -> std::io::Result<Option<PathBuf>> {
    match std::fs::read(bundle.join(ENGINE_CONFIG)) {
        Ok(path) => Ok(Some(OsString::from_vec(path).into())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Replaces a file of the engine's as a whole, or not at all, and leaves its mode as it is.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let nascent = file.with_extension("tranship");
    let write = || -> std::io::Result<()> {
        let mut new = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&nascent)?;
        new.write_all(text.as_bytes())?;
        std::fs::set_permissions(&nascent, file.metadata()?.permissions())?;
        std::fs::rename(&nascent, file)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&nascent))).with_context(|| format!("{} stays", file.display()))
}

/// Whether the mounts of the container of this bundle are where its root filesystem has them, once
/// that is complete.
///
/// # Errors
/// A mount that is elsewhere.
pub fn check_mounts(bundle: &Path) -> anyhow::Result<()> {
    let tree = MountTree::noted(bundle)?.filter(MountTree::has_links);
    let (Some(tree), Some(file)) = (tree, engine_config(bundle)?) else { return Ok(()) };
    let config: Value = serde_json::from_slice(&std::fs::read(bundle.join("config.json"))?)?;
    Ok(tree.check_places(&root(file.parent().unwrap_or(bundle), &config))?)
}

/// The root of the container that is made from this configuration in an engine's bundle.
fn root(bundle: &Path, config: &Value) -> PathBuf {
    bundle.join(config["root"]["path"].as_str().unwrap_or("rootfs"))
}

/// Where the container has something mounted in its root itself.
fn mount_points(config: &Value) -> Vec<(PathBuf, PointKind)> {
    let path = |value: &Value| PathBuf::from(value.as_str().unwrap_or_default());
    let mounts = config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let all: Vec<_> = mounts.iter().map(|mount| (path(&mount["destination"]), path(&mount["source"]))).collect();
    let within = |point: &Path| all.iter().any(|(other, _)| other != point && point.starts_with(other));
    let own = all.iter().filter(|(point, _)| point.is_absolute() && !within(point));
    let kind = |source: &Path| if source.is_file() { PointKind::File } else { PointKind::Directory };
    own.map(|(point, source)| (point.clone(), kind(source))).collect()
}

/// Whether the engine has made a network namespace, and attached it, before it calls the runtime.
fn is_attached(config: &Value) -> bool {
    attached_namespace(config).is_some()
}

/// The network namespace that the engine has made, and attached, before it calls the runtime.
fn attached_namespace(config: &Value) -> Option<&str> {
    let namespaces = config["linux"]["namespaces"].as_array();
    namespaces.into_iter().flatten().filter(|n| n["type"] == "network").find_map(|n| n["path"].as_str())
}

/// Has the engine attach its network to the agent's namespace, as its hooks do it in the course of a start, and names
/// that namespace in the configuration. The hooks must not run again: they would in the middle of the restore.
fn attach(config: &mut Value, namespace: &Path, id: &str, bundle: &Path) -> anyhow::Result<()> {
    let annotations = config["annotations"].clone();
    let mut hooks = Vec::new();
    for kind in ["prestart", "createRuntime"] {
        if let Some(Value::Array(of_kind)) = config["hooks"].as_object_mut().and_then(|hooks| hooks.remove(kind)) {
            hooks.extend(of_kind);
        }
    }
    let state = |pid: i32| {
        json!({
            "ociVersion": "1.0.2", "id": id, "status": "creating", "pid": pid, "bundle": bundle, "annotations": annotations,
        })
    };
    let opened = std::fs::File::open(namespace)
        .with_context(|| format!("the network namespace {} cannot be opened", namespace.display()))?;
    std::thread::scope(|scope| {
        let (entered, wait) = std::sync::mpsc::channel();
        let (done, until) = std::sync::mpsc::channel::<()>();
        // A thread has a directory in /proc like a process: it stands for the container's first process, which is not
        // there yet.
        let stand_in = tranship_sys::threads::start_within(scope, "stand-in", move || -> anyhow::Result<()> {
            nix::sched::setns(opened, nix::sched::CloneFlags::CLONE_NEWNET)?;
            entered.send(nix::unistd::gettid().as_raw())?;
            let _ = until.recv();
            Ok(())
        })?;
        let ran = match wait.recv() {
            Ok(pid) => hooks.iter().try_for_each(|hook| run_hook(hook, &state(pid))),
            // The thread says why.
            Err(_) => Ok(()),
        };
        drop(done);
        stand_in.join().map_err(|_| anyhow::anyhow!("the thread in the namespace panicked"))??;
        ran
    })?;
    let path = engines_name(namespace)?.unwrap_or_else(|| namespace.to_owned());
    let namespaces = config.pointer_mut("/linux/namespaces").and_then(Value::as_array_mut);
    let namespaces = namespaces.context("the configuration has no namespaces")?;
    let network = namespaces.iter_mut().find(|n| n["type"] == "network").context("it has no network namespace")?;
    network["path"] = path.to_string_lossy().into_owned().into();
    Ok(())
}

/// Runs one hook (OCI runtime specification, config.md) with the state on its stdin.
fn run_hook(hook: &Value, state: &Value) -> anyhow::Result<()> {
    let texts =
        |key: &str| -> Vec<&str> { hook[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect() };
    let program = hook["path"].as_str().context("a hook without a path")?;
    let mut command = Command::new(program);
    let arguments = texts("args");
    if let Some((name, rest)) = arguments.split_first() {
        command.arg0(name).args(rest);
    }
    command.env_clear().envs(texts("env").into_iter().filter_map(|pair| pair.split_once('=')));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("the hook {program} cannot be run"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read it is judged by its status.
        let _ = stdin.write_all(state.to_string().as_bytes());
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("the hook {program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Another name of the namespace than the agent's, which goes when the migration is done.
fn engines_name(namespace: &Path) -> anyhow::Result<Option<PathBuf>> {
    use std::os::unix::fs::MetadataExt;
    let root = format!("net:[{}]", std::fs::metadata(namespace)?.ino());
    let mounts = tranship_sys::process::text("/proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(3);
        (fields.next()? == root).then(|| fields.next().map(PathBuf::from))?
    });
    let name = points.into_iter().find(|point| point != namespace);
    ensure!(name.as_ref().is_none_or(|name| name.exists()), "the engine's name for the network namespace is gone");
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_call_as_containerd_makes_it_is_understood() {
        let text = "--root /run/docker/runtime-runc/moby --log /l.json --log-format json --systemd-cgroup create --bundle /b \
                    --pid-file /b/init.pid 0f3a";
        let words = arguments(text);
        let call = Call::parse(&words).unwrap();
        assert_eq!((call.command, call.id, call.global.len()), ("create", "0f3a", 7));
        assert_eq!(call.option("--bundle"), Some(OsStr::new("/b")));
        assert_eq!(call.option("--console-socket"), None);
    }

    #[test]
    fn a_namespace_that_the_engine_has_made_is_taken_as_it_is() {
        let config = |network: Value| json!({"linux": {"namespaces": [{"type": "pid"}, network]}});
        assert!(is_attached(&config(json!({"type": "network", "path": "/run/netns/x"}))));
        assert!(!is_attached(&config(json!({"type": "network"}))) && !is_attached(&json!({})));
    }

    #[test]
    fn what_is_mounted_within_another_mount_needs_no_place_in_the_root() {
        let mount = |source: &str, destination: &str| json!({"source": source, "destination": destination});
        let config = json!({"mounts": [
            mount("/proc/version", "/etc/hosts"), mount("tmpfs", "/dev"), mount("shm", "/dev/shm"), mount("/proc", "srv"),
        ]});
        let found = mount_points(&config);
        assert_eq!(found, [("/etc/hosts".into(), PointKind::File), ("/dev".into(), PointKind::Directory)]);
        assert!(mount_points(&json!({})).is_empty());
    }

    #[test]
    fn the_engine_has_its_mounts_back_as_they_were_configured() {
        use std::os::unix::fs::PermissionsExt;
        let (bundle, engine) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        put_configuration_back(bundle.path()).unwrap();
        check_mounts(bundle.path()).unwrap();
        let file = engine.path().join("config.json");
        std::fs::write(bundle.path().join(ENGINE_CONFIG), file.as_os_str().as_encoded_bytes()).unwrap();
        assert!(put_configuration_back(bundle.path()).is_err(), "it is gone");
        let mount = json!({"destination": "/run/x", "configuredDestination": "/var/run/x"});
        let config = json!({"root": {"path": "rootfs"}, "mounts": [mount]});
        std::fs::write(&file, config.to_string()).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();

        std::fs::write(bundle.path().join("config.json"), config.to_string()).unwrap();
        MountTree::of(&config).note(bundle.path()).unwrap();
        std::fs::create_dir_all(engine.path().join("rootfs/var/run")).unwrap();
        let elsewhere = check_mounts(bundle.path()).unwrap_err().to_string();
        assert!(elsewhere.contains("/var/run/x") && elsewhere.contains("/run/x at the source"), "{elsewhere}");
        std::fs::remove_dir(engine.path().join("rootfs/var/run")).unwrap();
        std::fs::create_dir(engine.path().join("rootfs/run")).unwrap();
        std::os::unix::fs::symlink("/run", engine.path().join("rootfs/var/run")).unwrap();
        check_mounts(bundle.path()).unwrap();

        put_configuration_back(bundle.path()).unwrap();
        let now: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(now["mounts"], json!([{"destination": "/var/run/x"}]));
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(engine.path()).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn a_call_without_a_container_is_passed_on() {
        assert_eq!(Call::parse(&arguments("--version")), None);
        assert_eq!(Call::parse(&arguments("features")), None);
        assert_eq!(Call::parse(&arguments("--root /r --debug=true list")), None);
    }
}
