//! What stands in the way of a container on the node that it would come to, found before anything is touched.

use std::path::{Path, PathBuf};

use tranship_criu::apparmor;
use tranship_criu::cpu::{self, CpuFeatures};
use tranship_engine::{Engine, EngineError};
use tranship_memory::hugetlb;
use tranship_network::cni;
use tranship_storage::TreeDigest;
use tranship_sys::promise::promised;
use tranship_types::{Blocker, BlockerKind, NetworkIdentity};
use tranship_wire::message::Offer;

use crate::inspection::mount_points;
use crate::node::Node;
use crate::{paths, stdio, tmpfs, trees};

/// Memory that a node keeps for itself.
const SPARE_MEMORY: u64 = 64 << 20;

/// Bytes of memory that this node could give to a container: without what others that come have been promised.
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        text.lines().find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    (kib.unwrap_or(0) << 10).saturating_sub(promised().saturating_add(SPARE_MEMORY))
}

/// What stands in the way of this container on this node.
pub fn check(node: &Node, offer: &Offer) -> Vec<Blocker> {
    let here = &node.config.node;
    let name = &offer.container;
    let mut blockers = Vec::new();
    let mut add = |kind, cause: String, remedy: String| blockers.push(Blocker::new(kind, cause, remedy));
    let engine = match offer.engine.parse().map(|name| node.engine(name)) {
        Ok(engine) if engine.is_present() => engine,
        engine => {
            let theirs = &offer.engine;
            let (cause, remedy) = engine.ok().and_then(|engine| engine.why_absent()).unwrap_or_else(|| {
                let cause = format!("container {name} is run by {theirs}, which node {here} does not have");
                (cause, format!("install {theirs} there, or choose a node that runs it"))
            });
            add(BlockerKind::Engine, format!("{cause} (on node {here})"), remedy);
            return blockers;
        }
    };
    let there = engine.inspect(name);
    let taken = there.is_ok();
    match there {
        Err(EngineError::NoSuchContainer { .. }) => {
            if let Some(path) = offer.network.as_ref().map(|(path, _)| place_network(engine.as_ref(), name, path))
                && path.exists()
            {
                add(
                    BlockerKind::NameTaken,
                    format!("node {here} has a network namespace {} already", path.display()),
                    format!("remove it there (`ip netns delete`), or give {name} another one"),
                );
            }
        }
        Ok(_) => add(
            BlockerKind::NameTaken,
            format!("node {here} has a container {name} already"),
            "remove or rename one of them".to_owned(),
        ),
        Err(error) => {
            let (cause, remedy) = error.told("mend the engine there");
            add(BlockerKind::Engine, format!("{cause} (on node {here})"), remedy);
        }
    }
    let config = engine.adopt(name, offer.config.clone());
    if !taken && engine.occupied(&config) {
        let cgroup = config["linux"]["cgroupsPath"].as_str().unwrap_or_default();
        add(
            BlockerKind::Engine,
            format!("processes run already in cgroup {cgroup} on node {here}, which container {name} would use"),
            "end them, or set cgroup_parent in that agent's configuration".to_owned(),
        );
    }
    let available = available_memory();
    let needed = offer.memory_bytes.saturating_add(tmpfs::bytes(offer));
    if needed > available {
        let (need, have) = (needed >> 20, available >> 20);
        add(
            BlockerKind::Memory,
            format!(
                "container {name} has {need} MiB of memory and of files in memory, but node {here} has only {have} MiB to spare"
            ),
            "free some there, or choose another node".to_owned(),
        );
    }
    for &(size, need) in &offer.huge_pages {
        let have = hugetlb::free(size);
        if need > have {
            let kib = size >> 10;
            add(
                BlockerKind::Memory,
                format!(
                    "container {name} has memory in {need} huge pages of {kib} kB, but node {here} has only {have} of them free"
                ),
                format!("reserve more there ({}), or choose another node", hugetlb::setting(size).display()),
            );
        }
    }
    if let Err(blocker) = node.criu() {
        add(blocker.kind, blocker.cause, blocker.remedy);
    }
    if let Ok(theirs) = serde_json::from_value::<CpuFeatures>(offer.cpu.clone()) {
        let missing = theirs.missing_on(&cpu::features());
        if !missing.is_empty() {
            add(
                BlockerKind::Cpu,
                format!("the CPU of node {here} lacks {} that programs in {name} may be using", missing.join(", ")),
                "choose a node whose CPU has them".to_owned(),
            );
        }
    }
    // An engine that makes the container loads its own profile when it does.
    if !(engine.makes_root() && apparmor::is_on())
        && let Some((cause, remedy)) = apparmor::obstacle(&offer.profiles)
    {
        add(BlockerKind::Process, format!("container {name} {cause} (on node {here})"), remedy.to_owned());
    }
    for path in offer.binds.iter().filter(|p| !p.exists()) {
        add(
            BlockerKind::Mount,
            format!("{}, which is mounted into container {name}, does not exist on node {here}", path.display()),
            "provide it there".to_owned(),
        );
    }
    if !engine.attaches_network() {
        blockers.extend(offer.network.iter().filter_map(|(_, identity)| unattachable(identity, node)));
    }
    let attached = offer.network.iter().flat_map(|(_, identity)| cni::obstacles(name, &identity.cni));
    blockers.extend(
        attached.map(|(cause, remedy)| Blocker::new(BlockerKind::Network, format!("{cause} (on node {here})"), remedy)),
    );
    blockers.extend(paths::obstacles(node, offer));
    blockers.extend(stdio::obstacles(node, offer));
    blockers.extend(trees::check(node, engine.as_ref(), offer));
    if engine.makes_root() {
        blockers.extend(engine.missing(name, &offer.parameters));
    } else {
        check_rootfs(node, offer, &mut blockers);
    }
    blockers
}

/// What an interface of the container would be attached to and is not there.
fn unattachable(identity: &NetworkIdentity, node: &Node) -> Option<Blocker> {
    let text = tranship_network::attachable(identity).err()?.to_string();
    let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "see `ip link` there"));
    Some(Blocker::new(BlockerKind::Network, format!("{cause} on node {}", node.config.node), remedy))
}

/// Where the network namespace of a container is on this node until its engine has a name for it; `path` is that on the
/// source.
pub fn place_network(engine: &dyn Engine, container: &str, path: &Path) -> PathBuf {
    match engine.attaches_network() {
        true => Path::new("/run/netns").join(format!("tranship-{container}")),
        false => path.to_owned(),
    }
}

fn check_rootfs(node: &Node, offer: &Offer, blockers: &mut Vec<Blocker>) {
    let here = &node.config.node;
    let root = PathBuf::from(offer.config["root"]["path"].as_str().unwrap_or_default());
    let mut add = |cause: String, remedy: String| blockers.push(Blocker::new(BlockerKind::Rootfs, cause, remedy));
    if !root.is_absolute() || !root.is_dir() {
        let cause = format!("the root filesystem {} does not exist on node {here}", root.display());
        return add(cause, "copy it there, times and owners included (`rsync -aHAX`)".to_owned());
    }
    let theirs: Result<TreeDigest, _> = serde_json::from_value(offer.rootfs.clone());
    match (theirs, tranship_storage::digest(&root, &mount_points(&offer.config))) {
        (Ok(theirs), Ok(ours)) => {
            if let Some(difference) = theirs.difference(&ours) {
                let cause = format!("the root filesystem {} differs on node {here}: {difference}", root.display());
                add(cause, "make them equal, times and owners included (`rsync -aHAX --delete`)".to_owned());
            }
        }
        (Err(error), _) => {
            add(format!("the digest of the root filesystem cannot be read: {error}"), "update both agents".into());
        }
        (_, Err(error)) => add(error.to_string(), format!("mend it on node {here}")),
    }
}
