//! An agent that does what a test tells it to, behind the real server on a real socket.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tranship_api::{
    AgentService, Begun, Companions, ContainerInfo, ContainerState, ErrorKind, GroupContainer, GroupPlan, GroupRequest,
    HeldAddress, HeldAddresses, KeptContainer, KeptPath, Leftover, LeftoverKind, MemberPlan, MoveRequest, NodeInfo,
    PassedAnswer, PassedCall, PeerInfo, PeerState, Plan, PlanRequest, Problem, RecoverRequest, ServiceError, ToolInfo,
    bind, router, serve,
};
use tranship_types::{
    Blocker, BlockerKind, GroupId, GroupMember, GroupReport, MemberOutcome, MigrationId, Mode, NodeName, Outcome,
    Phase, Report, Span,
};

pub const ID: &str = "m-4k7tq0zd";
const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Service {
    migrations: Mutex<HashMap<MigrationId, watch::Sender<Report>>>,
}

fn kept() -> KeptPath {
    let container = KeptContainer { container: "app".into(), node: "b".parse().unwrap() };
    KeptPath {
        network: "shop".into(),
        bridge: "br-15a3".into(),
        peer: "b".parse().unwrap(),
        device: "tship-00000a".into(),
        containers: vec![container],
        trouble: None,
    }
}

fn held() -> HeldAddresses {
    HeldAddresses {
        container: "redis".into(),
        node: "b".parse().unwrap(),
        migration: "m-1".parse().unwrap(),
        since_unix_ms: 1_700_000_000_000,
        addresses: vec![HeldAddress { network: "lan".into(), address: "10.77.0.53".parse().unwrap() }],
        not_held: None,
    }
}

impl AgentService for Service {
    fn node(&self) -> Result<NodeInfo, ServiceError> {
        let problem = Problem { cause: "`criu check` fails".into(), remedy: "install criu 4.1.1 or later".into() };
        Ok(NodeInfo {
            name: "a".parse().unwrap(),
            version: "0.1.0".into(),
            listen: "10.77.0.1:7077".into(),
            criu: ToolInfo { name: "criu".into(), path: None, version: None, problem: Some(problem) },
            engines: vec![],
            peers: ["b", "c"].map(peer).into(),
        })
    }

    fn peers(&self) -> Result<Vec<NodeName>, ServiceError> {
        Ok(["b", "c"].map(|name| name.parse().unwrap()).into())
    }

    fn pass_on(&self, _: &NodeName, _: PassedCall) -> Result<Option<PassedAnswer>, ServiceError> {
        Ok(None)
    }

    fn containers(&self) -> Result<Vec<ContainerInfo>, ServiceError> {
        Ok(vec![ContainerInfo {
            name: "redis".into(),
            engine: "runc".into(),
            state: ContainerState::Running,
            pid: Some(812),
            memory_bytes: Some(4096),
            created_unix_ms: None,
            migration: None,
        }])
    }

    fn companions(&self, _: &[NodeName]) -> Result<Vec<Companions>, ServiceError> {
        Ok(Vec::new())
    }

    fn begin_move(&self, request: MoveRequest) -> Result<Begun, ServiceError> {
        let blocker =
            Blocker::new(BlockerKind::Descriptor, "stdout is the host file /var/log/x", "use a pipe").at(812, Some(1));
        match request.container.as_str() {
            "blocked" => Err(ServiceError::blocked("blocked", vec![blocker])),
            "nobody" => {
                let cause = "node a has no container \"nobody\"";
                let blocker = Blocker::new(BlockerKind::NoSuchContainer, cause, "see `tranship ls`");
                Err(ServiceError::blocked("nobody", vec![blocker]))
            }
            container if request.dry_run => Ok(Begun::Planned(Box::new(Plan {
                container: container.into(),
                from: "a".parse().unwrap(),
                to: request.to,
                mode: request.options.mode,
                memory_bytes: 4096,
                tasks: 4,
                tmpfs_bytes: 0,
                log_bytes: 0,
                trees: vec![],
                image: None,
                estimated_blackout_ms: None,
                estimated_total_ms: None,
                prediction: None,
                blockers: if container == "plan-blocked" { vec![blocker] } else { vec![] },
                allowed: vec![],
                local_networks: vec![],
                translated_connections: 0,
                notes: vec![],
            }))),
            _ => {
                let report = begun();
                self.migrations.lock().unwrap().insert(report.id.clone(), watch::Sender::new(report.clone()));
                Ok(Begun::Started(Box::new(report)))
            }
        }
    }

    fn plan(&self, request: PlanRequest) -> Result<Plan, ServiceError> {
        let request =
            MoveRequest { dry_run: true, options: request.options, ..MoveRequest::new(request.container, request.to) };
        match self.begin_move(request)? {
            Begun::Planned(plan) => Ok(*plan),
            Begun::Started(report) => panic!("a plan has begun {report:?}"),
        }
    }

    fn plan_group(&self, request: GroupRequest) -> Result<GroupPlan, ServiceError> {
        let planned = |name: &String| {
            let to = request.to.clone().unwrap();
            let plan = self.plan(PlanRequest::new(name.clone(), to.clone()))?;
            let (container, blockers) = (name.clone(), plan.blockers.clone());
            Ok(MemberPlan { container, to, after: vec![], level: 0, blockers, plan: Some(plan) })
        };
        let members = request.containers.keys().map(planned).collect::<Result<_, ServiceError>>()?;
        Ok(GroupPlan { from: "a".parse().unwrap(), order: request.order, members })
    }

    fn recover(&self, request: RecoverRequest) -> Result<Report, ServiceError> {
        if !request.host_is_down {
            let cause = "redis was heard to run on node b, which does not answer now";
            return Err(ServiceError::new(ErrorKind::Blocked, cause, "add --host-is-down"));
        }
        self.report(&ID.parse().unwrap())
    }

    fn cancel(&self, named: &str) -> Result<Report, ServiceError> {
        match named {
            "late" | "m-late" => Err(ServiceError::new(
                ErrorKind::TooLate,
                "migration m-late is past its commit point: late runs on node b, and its last pages follow",
                "wait for it",
            )),
            "nobody" => {
                let cause = "no migration \"nobody\" is known";
                Err(ServiceError::new(ErrorKind::NotFound, cause, "see `tranship status`"))
            }
            _ => self.report(&ID.parse().unwrap()),
        }
    }

    fn cancel_group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        self.group(id)
    }

    fn leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        let leftover = |kind, name: &str, note: &str| Leftover {
            kind,
            name: name.to_owned(),
            removed: false,
            warning: false,
            note: note.to_owned(),
        };
        let frozen = "it may run elsewhere; `runc resume redis` if not";
        Ok(vec![
            leftover(LeftoverKind::Migration, "/run/tranship/migrations/m-1", ""),
            leftover(LeftoverKind::Container, "redis", frozen),
        ])
    }

    fn remove_leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        let mut all = self.leftovers()?;
        all.iter_mut().for_each(|leftover| leftover.removed = leftover.note.is_empty());
        Ok(all)
    }

    fn held_addresses(&self) -> Result<Vec<HeldAddresses>, ServiceError> {
        Ok(vec![held()])
    }

    fn kept_paths(&self) -> Result<Vec<KeptPath>, ServiceError> {
        Ok(vec![kept()])
    }

    fn release(&self, container: &str, even_if_alive: bool) -> Result<Vec<HeldAddresses>, ServiceError> {
        let refused = |kind| Err(ServiceError::new(kind, format!("{container} is refused"), "use --even-if-alive"));
        match container {
            "redis" => Ok(vec![held()]),
            "alive" if !even_if_alive => refused(ErrorKind::Blocked),
            "alive" => Ok(vec![held()]),
            _ => refused(ErrorKind::NotFound),
        }
    }

    fn reports(&self) -> Result<Vec<Report>, ServiceError> {
        Ok(self.migrations.lock().unwrap().values().map(|m| m.borrow().clone()).collect())
    }

    fn report(&self, id: &MigrationId) -> Result<Report, ServiceError> {
        self.watch(id).map(|w| w.borrow().clone())
    }

    fn watch(&self, id: &MigrationId) -> Result<watch::Receiver<Report>, ServiceError> {
        let migrations = self.migrations.lock().unwrap();
        migrations.get(id).map(watch::Sender::subscribe).ok_or_else(|| ServiceError::no_such_migration(id))
    }

    fn begin_group(&self, request: GroupRequest) -> Result<GroupReport, ServiceError> {
        if request.containers.contains_key("nobody") {
            let cause = "node a has no container \"nobody\"";
            let blocker = Blocker::new(BlockerKind::NoSuchContainer, cause, "see `tranship ls`");
            return Err(ServiceError::blocked("nobody", vec![blocker]));
        }
        Ok(group(&request))
    }

    fn groups(&self) -> Result<Vec<GroupReport>, ServiceError> {
        Ok(Vec::new())
    }

    fn group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        Err(ServiceError::no_such_group(id))
    }

    fn watch_group(&self, id: &GroupId) -> Result<watch::Receiver<GroupReport>, ServiceError> {
        Err(ServiceError::no_such_group(id))
    }
}

fn peer(name: &str) -> PeerInfo {
    PeerInfo { name: name.parse().unwrap(), address: format!("{name}:7077"), state: PeerState::Up, problem: None }
}

/// A group whose containers have moved already, but for those that are called "broken".
fn group(request: &GroupRequest) -> GroupReport {
    let member = |(name, container): (&String, &GroupContainer)| GroupMember {
        container: name.clone(),
        destination: container.to.clone().or(request.to.clone()).unwrap(),
        after: container.depends_on.iter().cloned().collect(),
        level: container.depends_on.len(),
        migration: Some(ID.parse().unwrap()),
        outcome: if name == "broken" { MemberOutcome::Failed } else { MemberOutcome::Moved },
        error: (name == "broken").then(|| "the link broke".to_owned()),
        blackout_ms: Some(61.0),
        wire_bytes: 0,
        spans: vec![Span { phase: Phase::Precopy, start_ms: 0.0, ms: Some(1000.0) }],
    };
    let members: Vec<_> = request.containers.iter().map(member).collect();
    let moved = members.iter().all(|m| m.outcome == MemberOutcome::Moved);
    GroupReport {
        id: "g-4k7tq0zd".parse().unwrap(),
        source: "a".parse().unwrap(),
        order: request.order,
        outcome: if moved { Outcome::Moved } else { Outcome::Failed },
        started_unix_ms: 0,
        total_ms: Some(1000.0),
        members,
        interrupted: false,
    }
}

fn begun() -> Report {
    let now = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
    Report::new(ID.parse().unwrap(), "redis".into(), "a".parse().unwrap(), "b".parse().unwrap(), Mode::Cold, now)
}

impl Service {
    /// Puts a migration there that has just begun.
    pub fn begin(&self) {
        self.migrations.lock().unwrap().insert(ID.parse().unwrap(), watch::Sender::new(begun()));
    }

    /// Waits until somebody has begun and follows the migration, then changes its report.
    pub fn change(&self, change: impl FnOnce(&mut Report)) {
        let id: MigrationId = ID.parse().unwrap();
        until("somebody follows", || self.migrations.lock().unwrap().get(&id).is_some_and(|m| m.receiver_count() > 0));
        self.migrations.lock().unwrap()[&id].send_modify(change);
    }

    /// The report becomes that of a move that went well.
    pub fn succeed(&self) {
        self.change(succeeded);
    }

    /// The same where nobody follows.
    pub fn succeed_unwatched(&self) {
        self.migrations.lock().unwrap()[&ID.parse().unwrap()].send_modify(succeeded);
    }
}

fn succeeded(report: &mut Report) {
    (report.phase, report.outcome) = (Phase::Done, Outcome::Moved);
    (report.total_ms, report.blackout_ms, report.blackout_error_ms) = (Some(1840.0), Some(213.4), Some(0.2));
}

/// Waits for `condition`, with a deadline.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < DEADLINE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub struct Agent {
    pub service: Arc<Service>,
    runtime: Option<Runtime>,
    dir: tempfile::TempDir,
}

impl Agent {
    pub fn start() -> Self {
        let mut agent =
            Self { service: Arc::new(Service::default()), runtime: None, dir: tempfile::tempdir().unwrap() };
        agent.serve();
        agent
    }

    /// Serves (again): what went on while nobody served is kept, as an agent keeps it in its journal.
    pub fn serve(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(async { bind(&self.socket()).unwrap() });
        runtime.spawn(serve(listener, router(self.service.clone()), std::future::pending()));
        self.runtime = Some(runtime);
    }

    /// Dies: every connection breaks.
    pub fn die(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
        until("the connections are gone", || {
            self.service.migrations.lock().unwrap().values().all(|m| m.receiver_count() == 0)
        });
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    pub fn command(&self, arguments: &str) -> Command {
        tranship(&self.socket(), arguments)
    }

    pub fn run(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }
}

pub fn tranship(socket: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tranship"));
    command.env("TRANSHIP_SOCKET", socket).env("TZ", "UTC").args(arguments.split_whitespace());
    command
}

pub fn out(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub fn err(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}
