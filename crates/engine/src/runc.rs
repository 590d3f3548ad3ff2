//! runc, and crun, which has runc's command line and writes other files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use tranship_sys::launch::Program;
use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName, TreeKind};

use crate::freezer;
use crate::json::section;
use crate::{Container, Cpu, Engine, EngineError, Freezer, Images, State, Summary};
use crate::{limits, mounts};

/// runc as configured on this node.
#[derive(Debug, Clone)]
pub struct Runc {
    /// Its program.
    pub path: PathBuf,
    /// Its state directory (`--root`).
    pub root: PathBuf,
    /// Where restored containers' cgroups are put; `None` leaves them where the configuration says.
    pub cgroup_parent: Option<PathBuf>,
    /// Whether the program is crun.
    pub is_crun: bool,
}

/// How long it may take for one command; to end a container takes it ten seconds at most.
const PATIENCE: Duration = Duration::from_secs(20);
/// A bundle's configuration. crun also keeps a copy of it among what it knows of the container.
const CONFIG: &str = "config.json";
/// What runc knows of a container.
const STATE: &str = "state.json";
/// Where the cgroup hierarchies are mounted, or the one of version 2 is.
const HIERARCHIES: &str = "/sys/fs/cgroup";
/// What crun knows of a container.
const STATUS: &str = "status";
/// What crun's version begins with.
const CRUN: &str = "crun version ";

#[derive(Deserialize)]
pub(crate) struct Row {
    id: String,
    pid: u32,
    status: State,
    bundle: PathBuf,
    #[serde(default)]
    created: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Runc {
    const NAME: &'static str = "runc";

    /// The program at `path`, with its own default for the state directory where none is given.
    pub fn new(path: PathBuf, root: Option<PathBuf>, cgroup_parent: Option<PathBuf>) -> Self {
        let said = Program::new(&path).arg("--version").output(PATIENCE);
        let is_crun = said.ok().flatten().is_some_and(|said| said.stdout.starts_with(CRUN.as_bytes()));
        let root = root.unwrap_or_else(|| if is_crun { "/run/crun" } else { "/run/runc" }.into());
        Self { path, root, cgroup_parent, is_crun }
    }

    fn command(&self) -> Program {
        let mut command = Program::new(&self.path);
        command.arg("--root").arg(&self.root);
        command
    }

    /// Runs to the end; the output on success, else the last line of what it said.
    fn run(&self, command: &mut Program, what: &'static str, name: &str) -> Result<Vec<u8>, EngineError> {
        let output = command.output(PATIENCE);
        let output = output.map_err(|source| EngineError::Run { program: self.path.clone().into(), source })?;
        let why = match output {
            Some(output) if output.status.success() => return Ok(output.stdout),
            Some(output) => last_words(&output.stderr),
            None => self.why_silent(),
        };
        Err(EngineError::Refused { engine: Self::NAME, what, name: name.to_owned(), why })
    }

    /// What it waits for that has not answered in time, as far as that can be seen.
    fn why_silent(&self) -> String {
        let seconds = PATIENCE.as_secs();
        let names = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let cgroups = names.filter_map(|entry| self.freezer(entry.file_name().to_str()?).ok());
        match cgroups.into_iter().find(|freezer| freezer.is_half_frozen().is_ok_and(|half| half)) {
            Some(Freezer::V1(path)) => format!(
                "it did not answer within {seconds} s, since it waits for a container of which some tasks are frozen and others are not; \
                 write THAWED to {}",
                path.join("freezer.state").display()
            ),
            Some(Freezer::V2(path)) => format!(
                "it did not answer within {seconds} s, since it waits for a container of which some tasks are frozen and others are not; \
                 write 0 to {}",
                path.join("cgroup.freeze").display()
            ),
            None => format!("it did not answer within {seconds} s; see what it waits for (`ps -o wchan -C runc`)"),
        }
    }

    fn row(&self, name: &str) -> Result<Row, EngineError> {
        match self.run(self.command().arg("state").arg(name), "show", name) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| self.unreadable("runc state", name, &e.to_string())),
            Err(EngineError::Refused { why, .. }) if why.contains("does not exist") => {
                Err(EngineError::NoSuchContainer { engine: Self::NAME, name: name.to_owned() })
            }
            Err(other) => Err(other),
        }
    }

    fn unreadable(&self, path: impl Into<PathBuf>, name: &str, why: &str) -> EngineError {
        EngineError::Unreadable { path: path.into(), name: name.to_owned(), why: why.to_owned() }
    }

    fn unwritable(&self, path: &Path, name: &str, error: &std::io::Error) -> EngineError {
        let why = format!("{} cannot be written: {error}", path.display());
        EngineError::Refused { engine: Self::NAME, what: "make", name: name.to_owned(), why }
    }

    /// The container's cgroups: by controller, and by no name that of version 2.
    fn cgroups(&self, name: &str) -> Result<HashMap<String, PathBuf>, EngineError> {
        let (state, status) = (self.root.join(name).join(STATE), self.root.join(name).join(STATUS));
        match status.exists() {
            true => Ok(crun_s_cgroups(&self.json(&status, name)?, Path::new(HIERARCHIES))),
            false => Ok(runc_s_cgroups(&self.json(&state, name)?)),
        }
    }

    /// The container's freezer, by what runc has written down: runc itself is not asked.
    fn freezer(&self, name: &str) -> Result<Freezer, EngineError> {
        self.freezer_of(name, &self.cgroups(name)?)
    }

    fn freezer_of(&self, name: &str, cgroups: &HashMap<String, PathBuf>) -> Result<Freezer, EngineError> {
        match (cgroups.get("freezer"), cgroups.get("")) {
            (Some(path), _) => Ok(Freezer::V1(path.clone())),
            (None, Some(path)) => Ok(Freezer::V2(path.clone())),
            (None, None) => {
                let why = "it names no cgroup in which the container can be frozen";
                Err(self.unreadable(self.root.join(name), name, why))
            }
        }
    }

    /// What runc or crun has noted of the standard streams.
    fn stdio(&self, name: &str) -> Vec<String> {
        let noted = [STATE, STATUS].into_iter().find_map(|file| self.json(&self.root.join(name).join(file), name).ok());
        noted.and_then(|noted| serde_json::from_value(noted["external_descriptors"].clone()).ok()).unwrap_or_default()
    }

    fn json(&self, path: &Path, name: &str) -> Result<Value, EngineError> {
        let text = std::fs::read(path).map_err(|e| self.unreadable(path, name, &e.to_string()))?;
        serde_json::from_slice(&text).map_err(|e| self.unreadable(path, name, &e.to_string()))
    }
}

/// A path of a configuration, relative to the bundle, as an absolute one. Another node accepts none with `.` and `..`.
fn within(bundle: &Path, path: &str) -> String {
    let full = bundle.join(path);
    let is_plain = !full.to_string_lossy().split('/').any(|part| part == "." || part == "..");
    let plain = if is_plain { full } else { full.canonicalize().unwrap_or(full) };
    plain.to_string_lossy().into_owned()
}

/// Whether annotations are those of a container that Podman has made.
fn is_podman_s(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get("io.container.manager").is_some_and(|manager| manager == "libpod")
}

/// The version in what `runc --version` says, or why that program cannot be used.
pub(crate) fn version_in(text: &str) -> Result<String, String> {
    let line = text.lines().next().unwrap_or_default();
    if line.starts_with(CRUN) {
        return match text.split_whitespace().any(|feature| feature == "+CRIU") {
            true => Ok(line.to_owned()),
            false => Err(format!("it is {line:?}, built without CRIU; install one with it, or runc")),
        };
    }
    line.strip_prefix("runc version ").map(ToOwned::to_owned).ok_or_else(|| {
        format!("it says that it is {line:?}, whose containers Tranship cannot move; set `path` in `[runc]` to a runc")
    })
}

/// The cgroups that runc has written down: by controller, and by no name that of version 2.
pub(crate) fn runc_s_cgroups(state: &Value) -> HashMap<String, PathBuf> {
    serde_json::from_value(state["cgroup_paths"].clone()).unwrap_or_default()
}

/// Whether this node has the controllers of cgroups in version 2.
pub fn has_cgroups_2() -> bool {
    is_version_2(Path::new(HIERARCHIES))
}

fn is_version_2(hierarchies: &Path) -> bool {
    hierarchies.join("cgroup.controllers").exists()
}

/// The cgroups below `hierarchies` of a container of crun's, which writes down one path for all controllers.
pub(crate) fn crun_s_cgroups(status: &Value, hierarchies: &Path) -> HashMap<String, PathBuf> {
    let Some(path) = status["cgroup-path"].as_str().map(|path| path.trim_start_matches('/')) else {
        return HashMap::new();
    };
    if is_version_2(hierarchies) {
        return HashMap::from([(String::new(), hierarchies.join(path))]);
    }
    let controllers = ["freezer", "memory", "cpu", "cpuacct", "pids", "cpuset", "blkio", "hugetlb", "net_cls"];
    controllers.map(|name| (name.to_owned(), hierarchies.join(name).join(path))).into()
}

/// The last line that a program said, without runc's decoration.
fn last_words(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    let message = line.split_once("msg=").map_or(line, |(_, message)| message);
    message.trim().trim_matches('"').to_owned()
}

impl Engine for Runc {
    fn name(&self) -> EngineName {
        EngineName::Runc
    }

    fn is_present(&self) -> bool {
        true
    }

    fn attaches_network(&self) -> bool {
        false
    }

    fn makes_root(&self) -> bool {
        false
    }

    fn obstacles(&self, container: &Container) -> Vec<Blocker> {
        let of_podman = is_podman_s(&container.labels()).then(|| {
            let cause = format!("{} is a container of Podman's, which would lose it", container.name);
            Blocker::new(BlockerKind::Engine, cause, "move it by the name that it has in `podman ps`")
        });
        of_podman.into_iter().collect()
    }

    fn missing(&self, _: &str, _: &Value) -> Vec<Blocker> {
        Vec::new()
    }

    fn version(&self) -> Result<String, EngineError> {
        let text = self.run(Program::new(&self.path).arg("--version"), "tell its version", "")?;
        version_in(&String::from_utf8_lossy(&text)).map_err(|why| EngineError::Refused {
            engine: Self::NAME,
            what: "be run as",
            name: self.path.display().to_string(),
            why,
        })
    }

    fn list(&self) -> Result<Vec<Summary>, EngineError> {
        if !self.root.exists() {
            return Ok(Vec::new());
        }
        let text = self.run(self.command().args(["list", "--format", "json"]), "list containers in", "")?;
        let rows: Option<Vec<Row>> =
            serde_json::from_slice(&text).map_err(|e| self.unreadable("runc list", "", &e.to_string()))?;
        let summary =
            |r: Row| Summary { id: r.id.clone(), name: r.id, state: r.status, init: r.pid, created: r.created };
        // Podman has its containers in the same place.
        let own = rows.unwrap_or_default().into_iter().filter(|row| !is_podman_s(&row.annotations));
        Ok(own.map(summary).collect())
    }

    fn inspect(&self, name: &str) -> Result<Container, EngineError> {
        let row = self.row(name)?;
        let mut config = self.json(&row.bundle.join(CONFIG), name)?;
        let root = config["root"]["path"].as_str().unwrap_or("rootfs").to_owned();
        config["root"]["path"] = within(&row.bundle, &root).into();
        for mount in config.pointer_mut("/mounts").and_then(Value::as_array_mut).into_iter().flatten() {
            if mounts::binds(mount)
                && let Some(source) = mount["source"].as_str().map(|source| within(&row.bundle, source))
            {
                mount["source"] = source.into();
            }
        }
        if row.pid > 0 {
            mounts::follow_links(&mut config, row.pid);
        }
        let cgroups = self.cgroups(name)?;
        limits::update(&mut config, &cgroups);
        let cgroup = |controller: &str| cgroups.get(controller).cloned();
        let freezer = self.freezer_of(name, &cgroups)?;
        let memory_cgroup = if matches!(freezer, Freezer::V1(_)) { cgroup("memory") } else { cgroup("") };
        let cpu = match (cgroup("cpu"), cgroup("cpuacct"), cgroup("")) {
            (Some(limits), Some(accounting), _) => Some(Cpu::V1(limits, accounting)),
            (_, _, Some(path)) => Cpu::of_version_2(path),
            _ => None,
        };
        let (state, init, created, bundle) = (row.status, row.pid, row.created, row.bundle);
        let (name, id) = (name.to_owned(), name.to_owned());
        let (trees, parameters) = (writable_binds(&config), Value::Null);
        let mut container = Container {
            stdio: self.stdio(&name),
            name,
            id,
            state,
            init,
            created,
            config,
            parameters,
            bundle,
            freezer,
            memory_cgroup,
            cgroups,
            cpu,
            trees,
            binds: Vec::new(),
        };
        container.binds = container.bind_mounts().into_iter().map(|(source, _)| source).collect();
        Ok(container)
    }

    fn adopt(&self, name: &str, mut config: Value) -> Value {
        if !has_cgroups_2()
            && let Some(resources) = config.pointer_mut("/linux/resources").and_then(Value::as_object_mut)
        {
            resources.remove("unified");
        }
        let resources = section(section(&mut config, "linux"), "resources");
        if resources["devices"].as_array().is_none_or(Vec::is_empty) {
            // runc denies them by itself, crun does not.
            resources["devices"] = serde_json::json!([{"allow": false, "access": "rwm"}]);
        }
        if let Some(parent) = &self.cgroup_parent {
            section(&mut config, "linux")["cgroupsPath"] = parent.join(name).to_string_lossy().into_owned().into();
        } else if self.is_crun && config["linux"]["cgroupsPath"].is_null() {
            section(&mut config, "linux")["cgroupsPath"] = format!("/{name}").into();
        }
        config
    }

    fn dump(&self, container: &Container, images: Images<'_>) -> Program {
        let mut command = self.command();
        command.args(["checkpoint", "--leave-running"]);
        images.put_front(&mut command);
        command.arg(&container.name);
        command
    }

    fn create(&self, name: &str, bundle: &Path, config: &Value, _: &Value) -> Result<(), EngineError> {
        let file = bundle.join(CONFIG);
        std::fs::write(&file, config.to_string()).map_err(|e| self.unwritable(&file, name, &e))
    }

    fn discard(&self, _: &str, _: &Path) -> Result<(), EngineError> {
        Ok(())
    }

    fn is_made_from(&self, container: &Container, bundle: &Path) -> bool {
        container.bundle == bundle
    }

    fn restore(&self, name: &str, bundle: &Path, images: Images<'_>, _: Option<&Path>) -> Result<Program, EngineError> {
        let mut command = self.command();
        command.args(["restore", "--detach", "--bundle"]).arg(bundle);
        images.put_front(&mut command);
        command.arg(name);
        if self.is_crun {
            // When everything is restored it puts the first process into its cgroups, and no other: so they are born there.
            let config = self.json(&bundle.join(CONFIG), name)?;
            let cgroups = freezer::make(Path::new(config["linux"]["cgroupsPath"].as_str().unwrap_or(name)))?;
            command.in_cgroups(cgroups);
        }
        Ok(command)
    }

    fn end(&self, name: &str, _: &Path) -> Result<(), EngineError> {
        self.remove(name)
    }

    fn retire(&self, _: &str) -> Result<(), EngineError> {
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), EngineError> {
        match self.run(self.command().args(["delete", "--force"]).arg(name), "remove", name) {
            Err(EngineError::Refused { why, .. }) if why.contains("does not exist") => Ok(()),
            other => other.map(drop),
        }
    }

    fn remember(&self, name: &str) -> Option<Vec<u8>> {
        let directory = self.root.join(name);
        let known = |file: &str| Some((file.to_owned(), std::fs::read_to_string(directory.join(file)).ok()?));
        let files: BTreeMap<String, String> = [CONFIG, STATE, STATUS].into_iter().filter_map(known).collect();
        (!files.is_empty()).then(|| serde_json::to_vec(&files).unwrap_or_default())
    }

    fn reinstate(&self, name: &str, known: &[u8]) -> Result<(), EngineError> {
        use std::os::unix::fs::DirBuilderExt;
        let directory = self.root.join(name);
        let make = || -> std::io::Result<()> {
            let files: BTreeMap<String, String> = serde_json::from_slice(known)?;
            std::fs::DirBuilder::new().recursive(true).mode(0o711).create(&directory)?;
            for (file, text) in files.iter().filter(|(file, _)| [CONFIG, STATE, STATUS].contains(&file.as_str())) {
                let nascent = directory.join("tranship.nascent");
                std::fs::write(&nascent, text)?;
                std::fs::rename(nascent, directory.join(file))?;
            }
            Ok(())
        };
        make().map_err(|e| self.unreadable(directory, name, &e.to_string()))
    }

    fn occupied(&self, config: &Value) -> bool {
        config["linux"]["cgroupsPath"].as_str().is_some_and(|path| freezer::occupied(Path::new(path)))
    }

    fn sweep(&self, bundle: &Path) -> Result<(), EngineError> {
        // None was written before there was anything to end.
        let Ok(text) = std::fs::read(bundle.join(CONFIG)) else { return Ok(()) };
        let config: Value = serde_json::from_slice(&text)
            .map_err(|e| self.unreadable(bundle.join(CONFIG), &bundle.to_string_lossy(), &e.to_string()))?;
        let Some(path) = config["linux"]["cgroupsPath"].as_str() else { return Ok(()) };
        Ok(freezer::sweep(Path::new(path))?)
    }

    fn mount_residue(&self, name: &str, _: &Path) -> Vec<PathBuf> {
        vec![self.root.join(name)]
    }
}

/// The node's directories that are mounted into the container to be written to.
pub(crate) fn writable_binds(config: &Value) -> Vec<CarriedTree> {
    let mounts = config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let writable = |mount: &&Value| {
        let has = |option: &str| mount["options"].as_array().is_some_and(|all| all.iter().any(|o| o == option));
        mounts::binds(mount) && !has("ro")
    };
    let tree = |mount: &Value| {
        let path = Path::new(mount["source"].as_str()?).canonicalize().ok().filter(|path| path.is_dir())?;
        Some(CarriedTree { kind: TreeKind::Bind, inside: mount["destination"].as_str()?.into(), path, bytes: 0 })
    };
    mounts.iter().filter(writable).filter_map(tree).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runc_s_last_words_are_plain() {
        let said = b"time=\"x\" level=warning msg=\"a\"\ntime=\"x\" level=error msg=\"container does not exist\"\n\n";
        assert_eq!(last_words(said), "container does not exist");
        assert_eq!(last_words(b""), "it said nothing");
    }

    #[test]
    fn another_runtime_is_not_taken_for_runc() {
        assert_eq!(version_in("runc version 1.3.6+ds1\ncommit: x\n"), Ok("1.3.6+ds1".to_owned()));
        let why = version_in("youki version 0.5.1\n").unwrap_err();
        assert!(why.contains("youki version 0.5.1") && why.contains("[runc]"), "{why}");
        let features = "commit: x\n+SYSTEMD +SECCOMP +CRIU +YAJL\n";
        assert_eq!(version_in(&format!("crun version 1.28\n{features}")), Ok("crun version 1.28".to_owned()));
        let why = version_in("crun version 1.8.1\ncommit: x\n+SYSTEMD +SECCOMP\n").unwrap_err();
        assert!(why.contains("without CRIU"), "{why}");
    }

    #[test]
    fn crun_s_one_path_stands_for_all_cgroups() {
        let status = serde_json::json!({"pid": 7, "cgroup-path": "/tranship-lab/b/redis"});
        let hierarchies = tempfile::tempdir().unwrap();
        let found = crun_s_cgroups(&status, hierarchies.path());
        assert_eq!(found["freezer"], hierarchies.path().join("freezer/tranship-lab/b/redis"));
        std::fs::write(hierarchies.path().join("cgroup.controllers"), "").unwrap();
        let found = crun_s_cgroups(&status, hierarchies.path());
        assert_eq!(found, HashMap::from([(String::new(), hierarchies.path().join("tranship-lab/b/redis"))]));
        assert!(crun_s_cgroups(&serde_json::json!({}), hierarchies.path()).is_empty());
    }

    #[test]
    fn a_restored_container_goes_below_this_node_s_cgroup() {
        let runc = Runc::new("no such runc".into(), None, Some("/tranship-lab/b".into()));
        let config = serde_json::json!({"linux": {"cgroupsPath": "/tranship-lab/a/redis"}});
        let linux = &runc.adopt("redis", config)["linux"];
        assert_eq!(linux["cgroupsPath"], "/tranship-lab/b/redis");
        assert_eq!(linux["resources"]["devices"], serde_json::json!([{"allow": false, "access": "rwm"}]));
    }

    #[test]
    fn paths_in_a_bundle_become_absolute_and_plain() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let bundle = top.join("bundle");
        std::fs::create_dir_all(top.join("root")).unwrap();
        std::fs::create_dir_all(bundle.join("root")).unwrap();
        let at = |path: &Path| path.to_string_lossy().into_owned();
        assert_eq!(within(&bundle, "./root"), at(&bundle.join("root")));
        assert_eq!(within(&bundle, "../root"), at(&top.join("root")));
        assert_eq!(
            (within(&bundle, "root"), within(&bundle, "/srv/x")),
            (at(&bundle.join("root")), "/srv/x".to_owned())
        );
    }
}
