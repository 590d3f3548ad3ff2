use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::Lab;

use crate::containers::{exactly_one_runs, nothing_left};
use crate::managed::Managed;
use crate::runner::wait_until;

/// How long it may take until nothing is left to be done.
const QUIET_LIMIT: Duration = Duration::from_secs(20);

/// Waits until nothing is left to be done of any move on any node; says where the container, which runs exactly once, is.
///
/// # Errors
/// If something is left after 20 s, with what it is.
pub fn quiet(lab: &Lab, name: &str) -> Result<String> {
    await_quiet(|| unrest(lab, name))
}

/// The same of a container of another engine than runc.
///
/// # Errors
/// As [`quiet`].
pub fn quiet_under(lab: &Lab, engine: &Managed) -> Result<String> {
    await_quiet(|| {
        no_move_goes_on(lab)?;
        let nodes = lab.nodes();
        let (mut at, mut left) = (Vec::new(), Vec::new());
        for node in &nodes {
            if let Err(there) = engine.is_gone(lab, node) {
                at.push(node);
                left.push(format!("{there:#}"));
            }
        }
        ensure!(at.len() == 1, "{} has something of it on {at:?}: {left:?}", engine.engine);
        engine.shows(lab, at[0])?;
        Ok(at[0].clone())
    })
}

fn await_quiet(look: impl Fn() -> Result<String>) -> Result<String> {
    let mut last = String::new();
    let quiet = wait_until("all to be quiet", QUIET_LIMIT, || match look() {
        Ok(at) => Ok(Some(at)),
        Err(error) => {
            last = format!("{error:#}");
            Ok(None)
        }
    });
    quiet.map_err(|error| error.context(last))
}

/// Checks that nothing is left to be done of any move on any node.
fn no_move_goes_on(lab: &Lab) -> Result<()> {
    for node in &lab.nodes() {
        for place in ["/var/lib/tranship/journal", "/run/tranship/migrations"] {
            let left = entries(&lab.path(node, place)?);
            ensure!(left.is_empty(), "node {node} has {place}/{}", left.join(", "));
        }
        let left: Vec<String> = processes(lab, node)?.into_iter().map(|p| format!("{} ({})", p.line, p.pid)).collect();
        ensure!(left.is_empty(), "node {node} has processes: {}", left.join(", "));
        let doctor = lab.exec(node, &["tranship", "doctor"])?;
        ensure!(doctor.status.success(), "on node {node} is left: {}", String::from_utf8_lossy(&doctor.stdout));
    }
    Ok(())
}

/// Where the container runs, if nothing is left to be done; else, as the error, what is.
fn unrest(lab: &Lab, name: &str) -> Result<String> {
    no_move_goes_on(lab)?;
    let nodes = lab.nodes();
    let at = exactly_one_runs(lab, name)?;
    for node in nodes.iter().filter(|node| **node != at) {
        nothing_left(lab, node, name)?;
        let bundle = lab.path(node, format!("/run/tranship/bundles/{name}"))?;
        ensure!(!bundle.exists(), "node {node} has a bundle of {name}");
    }
    let rules = lab.check(&at, &["ip", "netns", "exec", name, "nft", "list", "ruleset"])?;
    ensure!(!rules.contains("tranship"), "the gate on node {at} is not open");
    Ok(at)
}

fn entries(directory: &Path) -> Vec<String> {
    let list = fs::read_dir(directory).into_iter().flatten().flatten();
    list.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A process that lives no longer than a migration.
#[derive(Debug, Clone)]
pub struct Helper {
    /// As the host numbers it.
    pub pid: u32,
    /// What it is: `criu`, `front`, `pager`, `keeper` (of the pager's descriptors) or `engine`.
    pub kind: &'static str,
    /// Its arguments.
    pub line: String,
}

/// The TLS process of a node's agent.
///
/// # Errors
/// If the node has no agent, or that no TLS process.
pub fn tls_process(lab: &Lab, node: &str) -> Result<u32> {
    let agent = lab.agent_pid(node)?.context("the node has no agent")?;
    let is_child = |pid: &u32| {
        let text = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        text("comm").trim() == "tranship-tls" && text("status").lines().any(|line| line == format!("PPid:\t{agent}"))
    };
    let mut pids = entries(Path::new("/proc")).into_iter().filter_map(|name| name.parse().ok());
    let is_dead = |pid: u32| matches!(crate::state(pid), None | Some('Z'));
    pids.find(|pid| is_child(pid) && !is_dead(*pid)).context("the agent has no TLS process")
}

/// The processes of a node that live no longer than a migration; zombies of them, too.
///
/// # Errors
/// If the node cannot be looked at.
pub fn processes(lab: &Lab, node: &str) -> Result<Vec<Helper>> {
    // Containers have pid namespaces of their own, and their processes no such names; the node is told by its variable.
    let root = lab.path(node, "/")?;
    let init = root.parent().context("a node has an init process")?.to_owned();
    let space = fs::read_link(init.join("ns/pid")).context("the node's pid namespace")?;
    let mut found = Vec::new();
    for name in entries(Path::new("/proc")) {
        let Ok(pid) = name.parse::<u32>() else { continue };
        let process = Path::new("/proc").join(&name);
        if fs::read_link(process.join("ns/pid")).ok().as_ref() != Some(&space) {
            continue;
        }
        // A process may end while it is looked at.
        let raw = fs::read(process.join("cmdline")).unwrap_or_default();
        let words: Vec<String> =
            raw.split(|b| *b == 0).filter(|w| !w.is_empty()).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let program = words.first().and_then(|w| Path::new(w).file_name()?.to_str()).unwrap_or_default();
        let target = fs::read_link(process.join("exe")).unwrap_or_default();
        let target = target.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        let kind = match program {
            "" if matches!(comm.trim(), "criu" | "runc" | "transhipd" | "pager" | "keeper" | "runc:[2:INIT]") => {
                "zombie"
            }
            _ if target == "transhipd" && words.get(1).is_some_and(|w| w == "pager") => match comm.trim() {
                "keeper" => "keeper",
                _ => "pager",
            },
            "criu" if target == "transhipd" => "front",
            "runc" => "engine",
            // It changes its arguments when it begins to work.
            _ if words.iter().any(|w| w == "swrk" || w.starts_with("criu: ")) => "criu",
            _ => continue,
        };
        let line = if words.is_empty() { comm.trim().to_owned() } else { words.join(" ") };
        found.push(Helper { pid, kind, line });
    }
    Ok(found)
}

/// Flips a bit in the checksum of the record of a journal that has these words in it.
///
/// # Errors
/// If there is no such record, or the file cannot be changed.
pub fn flip_record(journal: &Path, words: &str) -> Result<()> {
    let mut text = fs::read(journal)?;
    let at = text.windows(words.len()).position(|part| part == words.as_bytes());
    let at = at.with_context(|| format!("{words} is not in {}", String::from_utf8_lossy(&text)))?;
    let line = text[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    text[line + 3] ^= 1;
    Ok(fs::write(journal, text)?)
}
