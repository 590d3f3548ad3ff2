use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, statfs};
use serde_json::{Value, json};
use tranship_lab::{Lab, runc_root};

use crate::runner::wait_until;

/// How long an agent may take to tidy up what no move waits for.
const TIDIED: Duration = Duration::from_secs(5);

/// What there is of a container on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// The node.
    pub node: String,
    /// What runc says: "running", "paused", "stopped"; `None` if it knows no such container.
    pub runc_status: Option<String>,
    /// The processes in the container's cgroup on that node, as the host numbers them.
    pub pids: Vec<u32>,
    /// Whether at least one of them may run: it is neither stopped nor frozen.
    pub runs: bool,
}

/// What there is of a container, on every node that has anything of it.
///
/// # Errors
/// If a node cannot be asked.
pub fn copies(lab: &Lab, name: &str) -> Result<Vec<Copy>> {
    let mut found = Vec::new();
    for node in lab.nodes() {
        let runc_status = runc_list(lab, &node)?.into_iter().find(|(id, _)| id == name).map(|(_, status)| status);
        let pids = processes(&node, name)?;
        let runs = pids.iter().any(|pid| may_run(*pid));
        if runc_status.is_some() || !pids.is_empty() {
            found.push(Copy { node, runc_status, pids, runs });
        }
    }
    Ok(found)
}

/// Checks that one copy of the container runs and that there is nothing of it on any other node; says where it runs.
///
/// # Errors
/// If not, with what was found.
pub fn exactly_one_runs(lab: &Lab, name: &str) -> Result<String> {
    let found = copies(lab, name)?;
    match found.as_slice() {
        [one] if one.runs && one.runc_status.as_deref() == Some("running") => Ok(one.node.clone()),
        _ => bail!("not exactly one copy of {name} runs: {found:#?}"),
    }
}

/// Checks that a node, which has not got the container `name`, has nothing that a migration of it could have left. What the node's agent does after it
/// has told the outcome is waited for.
///
/// # Errors
/// If there is something, with all of it.
pub fn nothing_left(lab: &Lab, node: &str, name: &str) -> Result<()> {
    let mut left = Vec::new();
    wait_until("nothing to be left", TIDIED, || {
        left = all_left(lab, node, name)?;
        Ok(left.is_empty().then_some(()))
    })
    .with_context(|| format!("node {node} still has something of {name}:\n  {}", left.join("\n  ")))
}

fn all_left(lab: &Lab, node: &str, name: &str) -> Result<Vec<String>> {
    let mut left: Vec<String> = Vec::new();
    left.extend(copies(lab, name)?.into_iter().filter(|c| c.node == node).map(|c| format!("{c:?}")));
    let mut look = |path: String| -> Result<()> {
        if lab.path(node, &path)?.symlink_metadata().is_ok() {
            left.push(format!("{path} exists"));
        }
        Ok(())
    };
    look(format!("{}/{name}", runc_root()))?;
    look(format!("/run/netns/{name}"))?;
    look(format!("/run/netns/tranship-{name}"))?;
    for directory in ["/run/tranship/migrations", "/run/tranship/restores"] {
        let there = entries(&lab.path(node, directory)?)?;
        left.extend(there.into_iter().map(|entry| format!("{directory}/{entry} exists")));
    }
    let group = format!("/tranship-lab/{node}/{name}");
    left.extend(cgroups(&group).into_iter().map(|path| format!("cgroup {path}")));
    let mounts = lab.check(node, &["cat", "/proc/self/mountinfo"])?;
    let suspicious =
        |line: &&str| ["/run/tranship/", "criu", &format!("/run/netns/{name} ")].iter().any(|p| line.contains(*p));
    left.extend(mounts.lines().filter(suspicious).map(|line| format!("mount {line}")));
    let rules = lab.check(node, &["nft", "list", "ruleset"])?;
    left.extend(rules.lines().filter(|line| line.contains("tranship")).map(|line| format!("firewall: {line}")));
    let links = lab.check(node, &["ip", "-o", "link", "show"])?;
    let own = |line: &&str| {
        !["lo", "eth0", "br0"]
            .iter()
            .any(|own| line.split(": ").nth(1).is_some_and(|n| n.split('@').next() == Some(*own)))
    };
    left.extend(links.lines().filter(own).map(|line| format!("interface {line}")));
    let processes = lab.check(node, &["ps", "-eo", "pid,args"])?;
    let strange = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let program = words.next().and_then(|p| Path::new(p).file_name()?.to_str()).unwrap_or_default();
        program == "criu"
            || program == "runc"
            || (["transhipd", "exe"].contains(&program) && words.next() == Some("pager"))
    };
    left.extend(processes.lines().filter(strange).map(|line| format!("process {}", line.trim())));
    Ok(left)
}

/// Removes a container from wherever it is now, with what belongs to its owner on the nodes that it has left: bundles.
///
/// # Errors
/// If something of it cannot be removed.
pub fn remove(lab: &Lab, name: &str) -> Result<()> {
    for node in lab.nodes() {
        let places =
            [format!("{}/{name}", runc_root()), format!("/run/netns/{name}"), format!("/run/containers/{name}")];
        let paths: Vec<_> = places.iter().map(|place| lab.path(&node, place)).collect::<Result<_, _>>()?;
        if paths.iter().any(|path| path.symlink_metadata().is_ok()) {
            lab.stop(&node, name)?;
        }
    }
    Ok(())
}

/// The containers that stock runc lists in a node: id and status.
fn runc_list(lab: &Lab, node: &str) -> Result<Vec<(String, String)>> {
    let text = lab.check(node, &["runc", "list", "--format", "json"])?;
    let list: Value = serde_json::from_str(&text).with_context(|| format!("runc list in node {node} said {text:?}"))?;
    let field = |container: &Value, name: &str| container[name].as_str().unwrap_or_default().to_owned();
    Ok(list.as_array().into_iter().flatten().map(|c| (field(c, "id"), field(c, "status"))).collect())
}

fn entries(directory: &Path) -> Result<Vec<String>> {
    match fs::read_dir(directory) {
        Ok(list) => list.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", directory.display())),
    }
}

/// The directories of a cgroup in all hierarchies. (Where none is mounted, crun leaves directories and files that look like one.)
fn cgroups(group: &str) -> Vec<String> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|e| e.path());
    let all = hierarchies.chain([Path::new("/sys/fs/cgroup").to_owned()]).map(|h| format!("{}{group}", h.display()));
    let is_cgroup = |path: &String| {
        statfs(path.as_str())
            .is_ok_and(|found| [CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC].contains(&found.filesystem_type()))
    };
    all.filter(is_cgroup).collect()
}

/// The processes in a container's cgroup, in whichever hierarchy.
fn processes(node: &str, name: &str) -> Result<Vec<u32>> {
    let group = format!("/tranship-lab/{node}/{name}");
    let inside = |line: &str| {
        let path = line.splitn(3, ':').nth(2).unwrap_or_default();
        path.strip_prefix(&group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut found = Vec::new();
    for name in entries(Path::new("/proc"))? {
        let Ok(pid) = name.parse::<u32>() else { continue };
        // A process may end while it is looked at.
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        if text.lines().any(inside) && state(pid) != Some('Z') {
            found.push(pid);
        }
    }
    Ok(found)
}

/// The letter that the kernel gives to the state of a process.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

fn may_run(pid: u32) -> bool {
    let frozen = || {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        groups.lines().any(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (kind, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
            let read = |file: String| fs::read_to_string(file).unwrap_or_default();
            match kind {
                // Not there, where version 2 alone is mounted.
                "freezer" => read(format!("/sys/fs/cgroup/freezer{path}/freezer.state")).starts_with("FR"),
                "" => ["", "/unified"].iter().any(|mount| {
                    read(format!("/sys/fs/cgroup{mount}{path}/cgroup.events")).lines().any(|line| line == "frozen 1")
                }),
                _ => false,
            }
        })
    };
    !matches!(state(pid), None | Some('T' | 't' | 'Z' | 'X')) && !frozen()
}

/// Runs another runc container in node a, like the one that is called `model` but for its command, and for what `change` changes in
/// its configuration.
///
/// # Errors
/// If there is no such model, or runc fails.
pub fn run_beside(
    lab: &Lab,
    model: &str,
    name: &str,
    command: &[String],
    change: impl FnOnce(&mut Value),
) -> Result<()> {
    let state: Value = serde_json::from_str(&lab.check("a", &["runc", "state", model])?)?;
    let bundle = state["bundle"].as_str().context("no bundle")?;
    let mut config: Value = serde_json::from_slice(&fs::read(lab.path("a", format!("{bundle}/config.json"))?)?)?;
    config["process"]["args"] = json!(command);
    let cgroup = config["linux"]["cgroupsPath"].as_str().context("no cgroup")?.replace(model, name);
    config["linux"]["cgroupsPath"] = cgroup.into();
    change(&mut config);
    let directory = format!("/run/containers/{name}");
    fs::create_dir_all(lab.path("a", &directory)?)?;
    fs::write(lab.path("a", format!("{directory}/config.json"))?, config.to_string())?;
    let mut run = lab.command("a", &["runc", "run", "--detach", "--bundle", &directory, name])?;
    let status = run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    ensure!(status.success(), "runc run {name}: {status}");
    Ok(())
}
