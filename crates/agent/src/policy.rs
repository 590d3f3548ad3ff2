//! Which containers may come from which peer: `accept` of the configuration, checked before anything is looked at or made here.
//!
//! A peer with a valid certificate sends a container's configuration, and engines do as root what that says. So nothing in it may
//! name a program, a directory, a device, a namespace or a cgroup of this node, unless this node's own configuration does
//! (docs/peers.md). CRIU's images are compared with it when they have come ([`tranship_criu::images`]).

mod asked;
mod engines;
mod keys;
mod shape;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tranship_coordinator::Failure;
use tranship_engine::{Container, Engine};
use tranship_types::{Blocker, BlockerKind, EngineName, NodeName, Outcome, Report, StdioKind, StdioStream, TreeKind};
use tranship_wire::message::Offer;

use self::asked::Device;
pub use self::shape::acceptable;
use crate::config::{Accept, AllowedBind, Config, is_plain};
use crate::node::Node;

/// Most blockers of one offer that are told.
const TOLD: usize = 8;
/// Directories of the system, its users and its engines: none of them, nothing below and nothing above may be a container's root
/// filesystem by default.
const SYSTEM: [&str; 23] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/home",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/root",
    "/sbin",
    "/sys",
    "/usr",
    "/var/cache",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/dpkg",
    "/var/lib/kubelet",
    "/var/lib/systemd",
    "/var/lib/tranship",
    "/var/log",
    "/var/spool",
];

/// Why a container may not come from a peer: nothing, if it may.
pub fn check(node: &Node, peer: &NodeName, offer: &Offer) -> Vec<Blocker> {
    let (here, name) = (&node.config.node, &offer.container);
    let blocker = |found: Violation| {
        let cause = format!("node {here} does not accept container {name} from node {peer}: {}", found.what);
        let remedy = match found.rule {
            Some((key, value)) => format!(
                "allow it in node {here}'s agent.toml ({key} = {value} in `accept` of [peers.{peer}]) and reload that agent, or start \
                 the container without"
            ),
            None => "start the container without, which no configuration allows".to_owned(),
        };
        Blocker::new(BlockerKind::Policy, cause, remedy)
    };
    let table = node.peers();
    // One that is no peer any more has no links, but those from before.
    let none = Accept { containers: Vec::new(), ..Accept::default() };
    let accept = table.accept_of(peer).unwrap_or(&none);
    violations(&node.config, accept, offer).into_iter().take(TOLD).map(blocker).collect()
}

/// Whether a container of this name and engine may come from a peer at all, as far as that is known before its offer.
pub fn may_send(node: &Node, peer: &NodeName, engine: EngineName, container: &str) -> bool {
    let table = node.peers();
    let fits = |accept: &Accept| {
        accept.containers.iter().any(|pattern| matches(pattern, container))
            && accept.engines.as_ref().is_none_or(|engines| engines.contains(&engine))
    };
    table.accept_of(peer).is_some_and(fits)
}

/// Whether the network namespace and the pod that a container joins are those of a container that came from the same peer. `offer` has
/// the namespace's path on this node.
///
/// # Errors
/// If they are not: they may be anybody's.
pub fn joins_own(node: &Node, peer: &NodeName, engine: &dyn Engine, offer: &Offer) -> Result<(), Failure> {
    let Some(path) = &offer.joined_network else { return Ok(()) };
    let owner = offer.network_owner.as_deref().unwrap_or_default();
    // One that has come to its end is known by its report, and its engine tells its namespace.
    let came = |report: &Report| {
        (report.container.as_str(), &report.source, &report.destination) == (owner, peer, &node.config.node)
            && report.outcome != Outcome::Failed
    };
    let pod = offer.parameters["joined"]["name"].as_str();
    let is_known = || {
        let of_pod = |container: &Container| {
            let its_own = engine.pod(container).ok().flatten();
            pod == its_own.as_ref().map(|pod| pod.name.as_str())
        };
        let has = |container: Container| container.network_namespace().as_ref() == Some(path) && of_pod(&container);
        node.registry.reports().iter().any(came) && engine.inspect(owner).is_ok_and(has)
    };
    if node.arrivals.has_network((peer, owner), path, pod) || is_known() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "container {} of node {peer} would join the network namespace {}, which no container {owner} of that node has brought; move \
         them together",
        offer.container,
        path.display()
    )))
}

/// What of an offer is not accepted.
#[derive(Debug, PartialEq)]
struct Violation {
    what: String,
    /// The key of `accept` that allows it, and a value of it that does; `None`: nothing does.
    rule: Option<(&'static str, String)>,
}

fn violations(config: &Config, accept: &Accept, offer: &Offer) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut add =
        |what: String, key: &'static str, value: String| found.push(Violation { what, rule: Some((key, value)) });
    let quoted = |text: &dyn std::fmt::Display| format!("[\"{text}\"]");
    if !accept.containers.iter().any(|pattern| matches(pattern, &offer.container)) {
        add("it is none of those that may come".to_owned(), "containers", quoted(&offer.container));
    }
    let Ok(engine) = offer.engine.parse::<EngineName>() else { return found };
    if accept.engines.as_ref().is_some_and(|engines| !engines.contains(&engine)) {
        add(format!("it is run by {engine}"), "engines", quoted(&engine));
    }
    let log = offer.log.as_ref().map_or(0, |log| log.bytes);
    let megabytes = offer.trees.iter().fold(log, |sum, tree| sum.saturating_add(tree.bytes)).div_ceil(1 << 20);
    if let Some(most) = accept.trees_mib.filter(|most| megabytes > *most) {
        add(
            format!("it brings {megabytes} MiB of files on disk, and {most} may come"),
            "trees_mib",
            megabytes.to_string(),
        );
    }
    let mut asked = engines::asked(engine, offer);
    asked.binds.extend(offer.binds.iter().map(|path| (path.clone(), false)));
    let carried = offer.trees.iter().filter(|tree| tree.kind == TreeKind::Bind);
    asked.binds.extend(carried.map(|tree| (tree.path.clone(), true)));
    let is_file = |stream: &&StdioStream| stream.kind == StdioKind::File && offer.stdio_target.is_keep();
    let files = offer.streams_of_node.iter().filter(is_file);
    asked.binds.extend(files.map(|stream| (PathBuf::from(&stream.name), stream.writes)));
    asked.binds.extend(offer.stdio_target.file().map(|path| (path.to_owned(), true)));
    for what in std::mem::take(&mut asked.never) {
        found.push(Violation { what, rule: None });
    }
    let mut add =
        |what: String, key: &'static str, value: String| found.push(Violation { what, rule: Some((key, value)) });
    let mut told: Vec<&Path> = Vec::new();
    for (path, writable) in &asked.binds {
        if !may_be_bound(&accept.binds, path, *writable) && !told.contains(&path.as_path()) {
            told.push(path);
            let suffix = if *writable { "" } else { ":ro" };
            add(
                format!("{} of the node is mounted into it", path.display()),
                "binds",
                quoted(&format!("{}{suffix}", path.display())),
            );
        }
    }
    for program in asked.programs.iter().filter(|program| !accept.programs.contains(program) || !is_plain(program)) {
        let program = program.display();
        add(format!("its configuration has the program {program} run on the node"), "programs", quoted(&program));
    }
    if let Some(root) = asked.root.as_ref().filter(|root| !may_be_root(config, accept, root)) {
        let root = root.display();
        add(format!("its root filesystem is {root}"), "roots", quoted(&root));
    }
    if !accept.privileged {
        for what in &asked.privileged {
            add(what.clone(), "privileged", "true".to_owned());
        }
        for device in asked.devices.iter().filter(|device| !may_be_used(&accept.devices, device)) {
            add(format!("it may use the devices {}", shown(device)), "devices", "[PATH]".to_owned());
        }
        for path in asked.device_paths.iter().filter(|path| !accept.devices.contains(path)) {
            add(format!("it may use the device {}", path.display()), "devices", quoted(&path.display()));
        }
        let allows = |name: &String| accept.capabilities.iter().any(|one| one == "ALL" || one == name);
        for name in asked.capabilities.iter().filter(|name| !allows(name)) {
            add(format!("it has the capability CAP_{name}"), "capabilities", quoted(name));
        }
    }
    if accept.seccomp && !asked.seccomp {
        add("it has no seccomp filter".to_owned(), "seccomp", "false".to_owned());
    }
    found
}

/// Whether a name fits a pattern, in which `*` stands for any characters and `?` for one.
fn matches(pattern: &str, name: &str) -> bool {
    fn fits(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), _) => (0..=name.len()).any(|skipped| fits(rest, &name[skipped..])),
            (Some((b'?', rest)), Some((_, after))) => fits(rest, after),
            (Some((one, rest)), Some((other, after))) => one == other && fits(rest, after),
            _ => false,
        }
    }
    // Several stars in a row mean the same as one, and cost more.
    let mut short = pattern.as_bytes().to_vec();
    short.dedup_by(|one, other| *one == b'*' && *other == b'*');
    fits(&short, name.as_bytes())
}

/// Where a path leads on this node: without the symbolic links of those of its directories that are there.
fn resolved(path: &Path) -> Option<PathBuf> {
    path.ancestors().find_map(|existing| {
        let real = existing.canonicalize().ok()?;
        let rest = path.strip_prefix(existing).ok()?;
        Some(if rest.as_os_str().is_empty() { real } else { real.join(rest) })
    })
}

/// Whether one of `allowed` has this path of the node, or has it below.
fn may_be_bound(allowed: &[AllowedBind], path: &Path, writable: bool) -> bool {
    // A link that leads nowhere would be followed when something is there.
    let is_dangling = || path.ancestors().any(|one| one.is_symlink() && !one.exists());
    if !is_plain(path) || is_dangling() {
        return false;
    }
    let Some(real) = resolved(path) else { return false };
    let has = |one: &AllowedBind| resolved(&one.path).is_some_and(|within| real.starts_with(within));
    allowed.iter().any(|one| (one.writable || !writable) && has(one))
}

/// Whether a directory of the node may be a container's root filesystem.
fn may_be_root(config: &Config, accept: &Accept, root: &Path) -> bool {
    let Some(real) = resolved(root).filter(|_| is_plain(root)) else { return false };
    if !accept.roots.is_empty() {
        return accept.roots.iter().filter_map(|path| resolved(path)).any(|within| real.starts_with(within));
    }
    let own = [&config.state_dir, &config.run_dir, &config.tls.key, &config.socket].map(PathBuf::as_path);
    let system = SYSTEM.map(Path::new).into_iter().chain(own).filter_map(resolved);
    system.into_iter().all(|part| !part.starts_with(&real) && !real.starts_with(&part))
}

fn may_be_used(allowed: &[PathBuf], (kind, major, minor): &Device) -> bool {
    allowed.iter().any(|path| {
        let Ok(found) = path.metadata() else { return false };
        let of_kind = match kind {
            'c' => found.file_type().is_char_device(),
            'b' => found.file_type().is_block_device(),
            _ => false,
        };
        of_kind
            && (Some(nix::sys::stat::major(found.rdev())), Some(nix::sys::stat::minor(found.rdev())))
                == (*major, *minor)
    })
}

fn shown((kind, major, minor): &Device) -> String {
    let number = |number: &Option<u64>| number.map_or_else(|| "*".to_owned(), |number| number.to_string());
    format!("{kind} {}:{}", number(major), number(minor))
}

#[cfg(test)]
#[path = "policy/tests.rs"]
mod tests;
