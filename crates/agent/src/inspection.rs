//! Looks at a container before anything is touched: what it is, and what stands in the way.

use tranship_coordinator::Failure;
use tranship_criu::{cpu, preflight};
use tranship_engine::{Container, EngineError, State};
use tranship_types::{Blocker, BlockerKind, Mode};
use tranship_wire::message::Offer;

use crate::node::Node;

/// Links that carry pages. Two keep both ends' encryption busy; more bring nothing on one flow's worth of cores.
pub const STREAMS: u8 = 2;

/// What an inspection has found.
pub struct Inspection {
    pub container: Container,
    pub offer: Offer,
    /// What stands in the way on this node.
    pub blockers: Vec<Blocker>,
    pub findings: preflight::Findings,
}

fn blocked(blocker: Blocker) -> Failure {
    Failure { message: blocker.to_string(), blockers: vec![blocker] }
}

/// The container, if the engine has it and it runs.
pub fn find(node: &Node, name: &str) -> Result<Container, Failure> {
    let container = node.engine.inspect(name).map_err(|error| {
        let kind = match error {
            EngineError::NoSuchContainer { .. } => BlockerKind::NoSuchContainer,
            _ => BlockerKind::Engine,
        };
        let text = error.to_string();
        let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "see the engine's own messages"));
        blocked(Blocker::new(kind, cause, remedy))
    })?;
    let remedy = match container.state {
        State::Running => return Ok(container),
        State::Paused => format!("resume it first (`runc resume {name}`)"),
        State::Created => format!("start it first (`runc start {name}`)"),
        State::Stopped => "start it again, or remove it".to_owned(),
    };
    let state = format!("{:?}", container.state).to_lowercase();
    Err(blocked(Blocker::new(BlockerKind::NotRunning, format!("container {name} is {state}, not running"), remedy)))
}

/// Everything that can be found out about a container's move on this node.
pub fn inspect(node: &Node, name: &str, mode: Mode) -> Result<Inspection, Failure> {
    let container = find(node, name)?;
    let criu = node.criu().map_err(blocked)?;
    let subject = preflight::Subject {
        init_pid: container.init,
        pids: container.processes().map_err(|e| Failure::new(e.to_string()))?,
        external_mounts: container.external_mounts(),
        // A moved container's pipes would have nobody at their other end.
        stdio_pipes_kept: false,
        compat: criu.compat,
        limits_answered: true,
    };
    let findings = preflight::inspect(&subject).map_err(|e| Failure::new(e.to_string()))?;
    let mut blockers = findings.blockers.clone();

    let network = match container.network_namespace() {
        Some(path) => match tranship_network::capture(&path) {
            Ok(identity) => Some((path, identity)),
            Err(error) => {
                let text = error.to_string();
                let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "attach it by macvlan or veth"));
                blockers.push(Blocker::new(BlockerKind::Network, cause, remedy));
                None
            }
        },
        None => {
            if shares_network(&container) {
                blockers.push(Blocker::new(
                    BlockerKind::Network,
                    format!("container {name} uses the network of its node, which cannot move with it"),
                    "give it a network namespace of its own",
                ));
            }
            None
        }
    };
    let rootfs = tranship_storage::digest(&container.rootfs(), &[]).map_err(|e| Failure::new(e.to_string()))?;
    let offer = Offer {
        container: name.to_owned(),
        engine: node.engine.name().to_owned(),
        mode,
        config: container.config.clone(),
        network,
        memory_bytes: findings.memory_bytes,
        shared_bytes: findings.shared_bytes,
        rootfs: serde_json::to_value(&rootfs).unwrap_or_default(),
        cpu: serde_json::to_value(cpu::features()).unwrap_or_default(),
        binds: container.binds().into_iter().map(|(source, _)| source).collect(),
        tmpfs: crate::tmpfs::offered(&container)?,
        trees: Vec::new(),
        streams: STREAMS,
        criu: criu.version,
    };
    Ok(Inspection { container, offer, blockers, findings })
}

fn shares_network(container: &Container) -> bool {
    let namespaces = container.config["linux"]["namespaces"].as_array();
    !namespaces.is_some_and(|all| all.iter().any(|n| n["type"] == "network"))
}
