//! Looks at a container before anything is touched: what it is, and what stands in the way.

use std::path::PathBuf;
use std::sync::Arc;

use tranship_coordinator::Failure;
use tranship_criu::{apparmor, cpu, preflight};
use tranship_engine::{AttachedNetwork, Container, Engine, Pod, State};
use tranship_memory::survey::survey;
use tranship_memory::{hugetlb, unreadable};
use tranship_network::{Conntrack, cni, ruleset};
use tranship_sys::process;
use tranship_types::{Blocker, BlockerKind, EngineName, MoveOptions};
use tranship_wire::message::Offer;

use crate::groups::Unit;
use crate::node::Node;
use crate::{held, logs, neighbours, pods, stdio, trees, uncarried};

/// Links that carry pages. Two keep both ends' encryption busy; more bring nothing on one flow's worth of cores.
pub const STREAMS: u8 = 2;

/// What an inspection has found.
pub struct Inspection {
    pub container: Container,
    pub offer: Offer,
    /// What stands in the way on this node.
    pub blockers: Vec<Blocker>,
    /// What the move would lose, as the user allowed it.
    pub allowed: Vec<Blocker>,
    pub findings: preflight::Findings,
    /// The pod that the container moves with.
    pub pod: Option<Pod>,
    /// The other containers that move with it and share namespaces with it, but not what holds the namespaces of a pod.
    pub others: Vec<Container>,
    /// The engine's networks that it is attached to, itself or through its pod.
    pub networks: Vec<AttachedNetwork>,
    /// The container's namespaces, for a last look at who else is in them.
    pub namespaces: preflight::Namespaces,
}

fn blocked(blocker: Blocker) -> Failure {
    Failure { message: blocker.to_string(), blockers: vec![blocker], cancelled: false }
}

fn all_blocked(blockers: Vec<Blocker>) -> Failure {
    Failure::blocked(blockers).unwrap_or_else(|| Failure::new("the other engine cannot have it"))
}

/// The container, if an engine has it and it runs.
pub fn find(node: &Node, name: &str, engine: Option<EngineName>) -> Result<(Arc<dyn Engine>, Container), Failure> {
    let (engine, container) = node.find(name, engine).map_err(blocked)?;
    let (runs, resume) = match engine.name() {
        EngineName::Runc => ("runc", "resume"),
        EngineName::Docker => ("docker", "unpause"),
        EngineName::Podman => ("podman", "unpause"),
        EngineName::Containerd => ("ctr tasks", "resume"),
    };
    let remedy = match container.state {
        State::Running => return Ok((engine, container)),
        State::Paused => format!("resume it first (`{runs} {resume} {name}`)"),
        State::Created => format!("start it first (`{runs} start {name}`)"),
        State::Stopped => "start it again, or remove it".to_owned(),
    };
    let state = format!("{:?}", container.state).to_lowercase();
    Err(blocked(Blocker::new(BlockerKind::NotRunning, format!("container {name} is {state}, not running"), remedy)))
}

/// The same, if nothing has it, either: what is being moved may be stopped for that, or be on its way to or from this node.
pub fn find_free(node: &Node, name: &str, engine: Option<EngineName>) -> Result<(Arc<dyn Engine>, Container), Failure> {
    node.busy_with(name).map_or(Ok(()), |holder| Err(blocked(holder)))?;
    find(node, name, engine)
}

/// Everything that can be found out about a container's move on this node, alone or as a member of a unit.
pub fn inspect(node: &Node, name: &str, options: &MoveOptions, unit: Option<&Unit>) -> Result<Inspection, Failure> {
    let (engine, container) = find(node, name, options.engine)?;
    let criu = node.criu().map_err(blocked)?;
    let subject = preflight::Subject {
        init_pid: container.init,
        pids: container.processes().map_err(|e| Failure::new(e.to_string()))?,
        external_mounts: container.external_mounts(),
        // Where no engine connects them anew, a moved container's pipes would have nobody at their other end.
        stdio_pipes_kept: engine.makes_root(),
        carries_stdio: !engine.makes_root(),
        stdio_noted: container.stdio.clone(),
        compat: criu.compat,
        bpf_maps: criu.carries_bpf_maps(),
        limits_answered: true,
    };
    let (to, mut parameters) = match options.to_engine.filter(|to| *to != engine.name()) {
        Some(other) => (other, engine.parameters_for(other, &container).map_err(all_blocked)?),
        None => (engine.name(), container.parameters.clone()),
    };
    let namespaces = preflight::Namespaces::of(container.init, &subject.pids);
    // They come first, as the cause of others: of a connection to a neighbour, of a group that it has joined.
    let mut others = unit.map_or(Ok(Vec::new()), |unit| unit.containers(node))?;
    let joins = unit.is_some_and(|unit| unit.owner.is_some());
    let members = others.clone();
    let pod = engine.pod(&container).map_err(|e| Failure::new(e.to_string()))?;
    let networks = engine.networks(pod.as_ref().and_then(|pod| pod.infra.as_ref()).unwrap_or(&container));
    let mut blockers = match &pod {
        Some(pod) => {
            pod.join(&mut parameters, !joins);
            others.extend(pod.infra.clone());
            let moved = unit.map(|unit| unit.others.as_slice()).unwrap_or_default();
            if options.to_engine.is_some_and(|to| to != engine.name()) {
                return Err(blocked(of_pod_to_engine(pod, name)));
            }
            // Who stays behind shares its namespaces: that is the same cause.
            if let Some(blocker) = pods::incomplete(pod, name, moved) {
                return Err(blocked(blocker));
            }
            pods::obstacles(pod, &container, &members)
        }
        None => Vec::new(),
    };
    let shared = (others.as_slice(), pods::shared_kinds(pod.as_ref()));
    blockers.extend(neighbours::obstacles(node, &container, &namespaces, preflight::Depth::Threads, shared));
    let of_engine = engine.obstacles(&container);
    // Else the engine knows by which option it is.
    if of_engine.is_empty() {
        blockers.extend(neighbours::of_node(&container, &namespaces));
    }
    let mut findings = preflight::inspect(&subject).map_err(|e| Failure::new(e.to_string()))?;
    blockers.extend(findings.blockers.iter().cloned());
    blockers.extend(stdio::refused(name, &findings.streams));
    findings.changes.extend(stdio::describe(&findings.streams, &options.stdio, node.config.node.as_str()));
    blockers.extend(of_engine);
    blockers.extend(subject.pids.iter().filter_map(|pid| unreadable_memory(*pid)));
    findings.notes.extend(engine.remarks(&container));

    let socket_options = match container.network_namespace() {
        Some(path) => uncarried::newer_options(&container, &path).map_err(|e| Failure::new(e.to_string()))?,
        None => Vec::new(),
    };
    let own_network = container.network_namespace().filter(|_| !namespaces.is_node_s("net"));
    let joined_network = own_network.clone().filter(|_| joins);
    if let Some(path) = own_network.as_ref().filter(|_| !engine.attaches_network())
        && let Err(why) = tranship_network::check_name(path)
    {
        let remedy = "start it in one that `ip netns add NAME` has made";
        blockers.push(Blocker::new(BlockerKind::Network, format!("{why} (of container {name})"), remedy));
    }
    let network = match own_network.filter(|_| !joins) {
        Some(path) => {
            let captured = uncarried::obstacles(&container, &others, &path).and_then(|obstacles| {
                let mut identity = tranship_network::capture(&path)?;
                identity.given_by = engine.attaches_network().then(|| engine.name().to_string());
                identity.given_gateways = networks.iter().flat_map(|network| network.gateways.clone()).collect();
                if !engine.attaches_network() {
                    identity.cni = cni::attachments(name, &path)?;
                    identity.ruleset = ruleset::capture(&path)?;
                    findings.notes.extend(ruleset::remarks(&path)?);
                    // More than can be carried are told now.
                    Conntrack::prepare(&path)?.count()?;
                }
                Ok((obstacles, identity))
            });
            match captured {
                Ok((joined, identity)) => {
                    findings.notes.extend(cni::remarks(&identity.cni));
                    findings.notes.extend(held::remark(node, &*engine, &container, &identity.cni));
                    blockers.extend(joined);
                    Some((path, identity))
                }
                Err(error) => {
                    let text = error.to_string();
                    let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "attach it by macvlan or veth"));
                    blockers.push(Blocker::new(BlockerKind::Network, cause, remedy));
                    None
                }
            }
        }
        None => None,
    };
    // An image is the same wherever its digest is.
    let rootfs = match engine.makes_root() {
        true => serde_json::Value::Null,
        false => {
            let digest = tranship_storage::digest(&container.rootfs(), &mount_points(&container.config));
            let digest = digest.map_err(|e| Failure::new(e.to_string()))?;
            serde_json::to_value(&digest).unwrap_or_default()
        }
    };
    let stdio = if engine.makes_root() { findings.stdio.clone() } else { Vec::new() };
    let choice = trees::choose(&container, options)?;
    blockers.extend(choice.blockers);
    findings.notes.extend(choice.notes);
    let trees = choice.trees;
    blockers.extend(neighbours::of_directories(node, &container, &trees));
    let comes_along = |source: &PathBuf| {
        let source = source.canonicalize().unwrap_or_default();
        trees.iter().any(|tree| tree.path == source)
    };
    let binds = container.binds.iter().filter(|source| !comes_along(source)).cloned().collect();
    let choice = logs::choose(&*engine, &container, (to, &mut parameters), options)?;
    findings.changes.extend(choice.words);
    let huge_pages = hugetlb::needed(&subject.pids)
        .map_err(|e| Failure::new(format!("the mappings of {name} cannot be read: {e}")))?;
    let huge_bytes = hugetlb::private(&subject.pids);
    let offer = Offer {
        container: name.to_owned(),
        engine: to.to_string(),
        mode: options.mode,
        config: container.config.clone(),
        parameters,
        stdio,
        network,
        joined_network,
        network_owner: unit.and_then(|unit| unit.owner.clone()),
        network_shared: !joins && !others.is_empty(),
        shares_memory: pod.is_some() && container.joins_namespace("ipc"),
        memory_bytes: findings.memory_bytes + huge_bytes,
        shared_bytes: findings.shared_bytes + huge_bytes,
        huge_pages: huge_pages.into_iter().collect(),
        rootfs,
        cpu: serde_json::to_value(cpu::features()).unwrap_or_default(),
        binds,
        tmpfs: crate::tmpfs::offered(&container, pod.as_ref().filter(|_| !joins))?,
        trees,
        streams: STREAMS,
        criu: criu.version,
        socket_options,
        renamed_sockets: findings.renamed_sockets,
        tells_last_datagrams: true,
        allow: options.allow,
        streams_of_node: findings.streams.clone(),
        stdio_target: options.stdio.clone(),
        log: choice.log,
        profiles: apparmor::profiles(&subject.pids),
        paths: Vec::new(),
    };
    if !(joins && offer.shares_memory && pod.as_ref().is_some_and(|pod| pod.shared_memory(&container).is_some())) {
        blockers.extend(crate::tmpfs::left_behind(&container, &offer));
    }
    let (blockers, allowed) = options.allow.part(blockers);
    Ok(Inspection { container, offer, blockers, allowed, findings, pod, others: members, networks, namespaces })
}

fn of_pod_to_engine(pod: &Pod, name: &str) -> Blocker {
    let cause = format!("container {name} belongs to pod {}, which another engine does not have", pod.name);
    Blocker::new(BlockerKind::Engine, cause, "leave out --to-engine")
}

/// Memory of a process that cannot be read, and so cannot be sent.
fn unreadable_memory(pid: u32) -> Option<Blocker> {
    let page = survey(&[pid]).ok()?.iter().find_map(unreadable::find)?;
    let (name, address) = (process::name(pid).ok()?, page.address);
    let cause = format!(
        "{name} (pid {pid}) has memory at {address:#x} that cannot be read: it was poisoned, or is kept from others"
    );
    Some(Blocker::new(BlockerKind::Process, cause, "restart the program").at(pid, None))
}

/// What the container has something mounted on, by its OCI configuration. It sees nothing of what its root filesystem has there; and while
/// runc restores another container from the same root filesystem, it mounts that one's binds there on the node.
pub fn mount_points(config: &serde_json::Value) -> Vec<PathBuf> {
    let mounts = config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    mounts.iter().filter_map(|mount| Some(mount["destination"].as_str()?.into())).collect()
}
