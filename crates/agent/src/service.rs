//! The API's calls.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tranship_api::{
    AgentService, Begun, Companions, ContainerInfo, ContainerState, ErrorKind, GroupPlan, GroupRequest, HeldAddresses,
    KeptPath, Leftover, MoveRequest, NodeInfo, PassedAnswer, PassedCall, PeerInfo, PeerState, Plan, PlanRequest,
    Problem, RecoverRequest, ServiceError, ToolInfo,
};
use tranship_engine::{Engine, EngineError, State, Summary};
use tranship_sys::launch;
use tranship_sys::threads::{self, Beside};
use tranship_types::{Blocker, GroupId, GroupReport, MigrationId, NodeName, Report};
use tranship_wire::Purpose;

use crate::node::Node;
use crate::registry::unix_ms;
use crate::{cancel, companions, control, doctor, groups, held, moves, options, paths, plan, recovery, stdio};

/// The agent as its API sees it.
pub struct Service(pub Arc<Node>);

fn problem(blocker: Blocker) -> Problem {
    Problem { cause: blocker.cause, remedy: blocker.remedy }
}

/// An engine that does not answer as it should.
pub fn unusable(error: &EngineError) -> ServiceError {
    let (cause, remedy) = error.told("");
    ServiceError::new(ErrorKind::Unusable, cause, remedy)
}

impl Service {
    fn engine_info(engine: &dyn Engine) -> ToolInfo {
        let name = engine.name().to_string();
        match engine.version() {
            Ok(version) => ToolInfo { name, path: None, version: Some(version), problem: None },
            Err(error) => {
                let (cause, remedy) = error.told("install it (`make setup`)");
                let problem = Some(Problem { cause, remedy });
                ToolInfo { name, path: None, version: None, problem }
            }
        }
    }

    fn container_info(&self, engine: &dyn Engine, summary: Summary) -> ContainerInfo {
        let pids = engine.inspect(&summary.name).ok().and_then(|c| c.processes().ok()).unwrap_or_default();
        ContainerInfo {
            engine: engine.name().to_string(),
            state: match summary.state {
                State::Created => ContainerState::Created,
                State::Running => ContainerState::Running,
                State::Paused => ContainerState::Paused,
                State::Stopped => ContainerState::Stopped,
            },
            pid: (summary.init != 0).then_some(summary.init),
            memory_bytes: (!pids.is_empty()).then(|| memory_of(&pids)),
            created_unix_ms: created_ms(summary.init),
            migration: self.0.claimed_by(&summary.name),
            name: summary.name,
        }
    }

    fn criu_info(&self) -> ToolInfo {
        let name = "criu".to_owned();
        match self.0.criu() {
            Ok(criu) => {
                let path = Some(criu.path.to_string_lossy().into_owned());
                ToolInfo { name, path, version: Some(criu.version), problem: None }
            }
            Err(blocker) => ToolInfo { name, path: None, version: None, problem: Some(problem(blocker)) },
        }
    }

    /// What an operator has to see to besides.
    fn notices(&self) -> Vec<Leftover> {
        let mut all = self.0.live.notices((unix_ms() / 1000) as i64);
        all.extend(stdio::notices(&self.0));
        all.extend(held::notices(&self.0));
        all.extend(paths::notices(&self.0));
        all
    }

    fn peer_info(&self, name: &NodeName, address: &str) -> PeerInfo {
        let (state, problem) = match self.0.dial(name, Purpose::Control, None) {
            Ok(_) => (PeerState::Up, None),
            Err(failure) => (PeerState::Down, failure.blockers.into_iter().next().map(problem)),
        };
        PeerInfo { name: name.clone(), address: address.to_owned(), state, problem }
    }
}

/// Resident memory of a container's processes in bytes: proportional shares, so that shared pages count once.
fn memory_of(pids: &[u32]) -> u64 {
    let share = |pid: &u32| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("Pss:"))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
    };
    pids.iter().filter_map(share).sum()
}

impl AgentService for Service {
    fn node(&self) -> Result<NodeInfo, ServiceError> {
        let (config, table) = (&self.0.config, self.0.peers());
        let peers = std::thread::scope(|scope| {
            let asked: Vec<_> = table
                .all()
                .map(|(name, address)| threads::beside(scope, "ask", || self.peer_info(name, address)))
                .collect();
            asked.into_iter().map(Beside::join).collect()
        });
        Ok(NodeInfo {
            name: config.node.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            listen: config.listen.clone(),
            criu: self.criu_info(),
            engines: self.0.engines().map(|engine| Self::engine_info(engine.as_ref())).collect(),
            peers,
        })
    }

    fn peers(&self) -> Result<Vec<NodeName>, ServiceError> {
        Ok(self.0.peers().all().map(|(name, _)| name.clone()).collect())
    }

    fn pass_on(&self, node: &NodeName, call: PassedCall) -> Result<Option<PassedAnswer>, ServiceError> {
        control::pass_on(&self.0, node, call)
    }

    fn containers(&self) -> Result<Vec<ContainerInfo>, ServiceError> {
        let mut all = Vec::new();
        for engine in self.0.engines() {
            let list = engine.list().map_err(|error| unusable(&error))?;
            all.extend(list.into_iter().map(|summary| self.container_info(engine.as_ref(), summary)));
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn companions(&self, to: &[NodeName]) -> Result<Vec<Companions>, ServiceError> {
        companions::find(&self.0, to)
    }

    fn begin_move(&self, request: MoveRequest) -> Result<Begun, ServiceError> {
        let node = &self.0;
        options::check(&request.options)?;
        if request.dry_run {
            return plan::dry_run(node, &request).map(|plan| Begun::Planned(Box::new(plan)));
        }
        moves::begin(node, &request, None).map(|report| Begun::Started(Box::new(report)))
    }

    fn plan(&self, request: PlanRequest) -> Result<Plan, ServiceError> {
        options::check(&request.options)?;
        plan::plan(&self.0, &request)
    }

    fn recover(&self, request: RecoverRequest) -> Result<Report, ServiceError> {
        recovery::recover(&self.0, &request)
    }

    fn cancel(&self, named: &str) -> Result<Report, ServiceError> {
        cancel::cancel(&self.0, named)
    }

    fn cancel_group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        cancel::cancel_group(&self.0, id)
    }

    fn leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        if let Some(launcher) = launch::launcher() {
            launch::ping(launcher).map_err(|error| {
                let text = error.to_string();
                let (cause, remedy) = text.split_once("; ").unwrap_or((&text, launch::LAUNCHER_GONE));
                ServiceError::new(ErrorKind::Unusable, cause, remedy)
            })?;
        }
        let left = doctor::leftovers(&self.0).map_err(|error| unusable(&error))?;
        Ok([self.notices(), left].concat())
    }

    fn remove_leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        let left = doctor::remove_leftovers(&self.0).map_err(|error| unusable(&error))?;
        Ok([self.notices(), left].concat())
    }

    fn held_addresses(&self) -> Result<Vec<HeldAddresses>, ServiceError> {
        held::list(&self.0).map_err(|failure| ServiceError::new(ErrorKind::Internal, failure.message, ""))
    }

    fn release(&self, container: &str, even_if_alive: bool) -> Result<Vec<HeldAddresses>, ServiceError> {
        let released = held::release(&self.0, container, even_if_alive);
        paths::release(&self.0, container, released)
    }

    fn kept_paths(&self) -> Result<Vec<KeptPath>, ServiceError> {
        paths::list(&self.0).map_err(|failure| ServiceError::new(ErrorKind::Internal, failure.message, ""))
    }

    fn reports(&self) -> Result<Vec<Report>, ServiceError> {
        Ok(self.0.registry.reports())
    }

    fn report(&self, id: &MigrationId) -> Result<Report, ServiceError> {
        self.0.registry.report(id).ok_or_else(|| ServiceError::no_such_migration(id))
    }

    fn watch(&self, id: &MigrationId) -> Result<watch::Receiver<Report>, ServiceError> {
        self.0.registry.watch(id).ok_or_else(|| ServiceError::no_such_migration(id))
    }

    fn begin_group(&self, request: GroupRequest) -> Result<GroupReport, ServiceError> {
        options::check(&request.options)?;
        groups::begin(&self.0, &request)
    }

    fn plan_group(&self, request: GroupRequest) -> Result<GroupPlan, ServiceError> {
        options::check(&request.options)?;
        groups::plan(&self.0, &request)
    }

    fn groups(&self) -> Result<Vec<GroupReport>, ServiceError> {
        Ok(self.0.groups.reports())
    }

    fn group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        self.0.groups.report(id).ok_or_else(|| ServiceError::no_such_group(id))
    }

    fn watch_group(&self, id: &GroupId) -> Result<watch::Receiver<GroupReport>, ServiceError> {
        self.0.groups.watch(id).ok_or_else(|| ServiceError::no_such_group(id))
    }
}

/// When a process was started, in ms since the Unix epoch.
fn created_ms(pid: u32) -> Option<u64> {
    let modified = std::fs::metadata(format!("/proc/{pid}")).ok()?.modified().ok()?;
    modified.duration_since(std::time::UNIX_EPOCH).ok().map(|d: Duration| d.as_millis() as u64)
}
