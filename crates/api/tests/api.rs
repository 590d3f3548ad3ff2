//! The API over a real Unix socket, with a service that answers from a script.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tranship_api::{
    AgentService, Begun, Client, ClientError, Companions, ContainerInfo, ContainerState, ErrorKind, GroupPlan,
    GroupRequest, HeldAddress, HeldAddresses, KeptContainer, KeptPath, Leftover, LeftoverKind, MemberPlan, MoveRequest,
    NodeInfo, PassedAnswer, PassedCall, PeerInfo, PeerState, Plan, PlanRequest, RecoverRequest, ServiceError, ToolInfo,
    bind, router, serve,
};
use tranship_types::{
    Blocker, BlockerKind, GroupId, GroupOrder, GroupReport, MigrationId, Mode, NodeName, Outcome, Phase, Report,
};

#[derive(Default)]
struct Script {
    migrations: Mutex<HashMap<MigrationId, watch::Receiver<Report>>>,
}

fn id(text: &str) -> MigrationId {
    text.parse().unwrap()
}

fn running(text: &str) -> Report {
    Report::new(id(text), "redis".into(), "a".parse().unwrap(), "b".parse().unwrap(), Mode::Cold, 1_700_000_000_000)
}

fn group(text: &str, outcome: Outcome) -> GroupReport {
    GroupReport {
        id: text.parse().unwrap(),
        source: "a".parse().unwrap(),
        order: GroupOrder::Pipelined,
        outcome,
        started_unix_ms: 0,
        total_ms: None,
        members: Vec::new(),
        interrupted: false,
    }
}

fn node() -> NodeInfo {
    let tool = |name: &str| ToolInfo { name: name.into(), path: None, version: Some("4.1.1".into()), problem: None };
    let address = "10.77.0.2:7077".into();
    NodeInfo {
        name: "a".parse().unwrap(),
        version: "0.1.0".into(),
        listen: "10.77.0.1:7077".into(),
        criu: tool("criu"),
        engines: vec![tool("runc")],
        peers: vec![PeerInfo { name: "b".parse().unwrap(), address, state: PeerState::Unknown, problem: None }],
    }
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

impl AgentService for Script {
    fn node(&self) -> Result<NodeInfo, ServiceError> {
        Ok(node())
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
            memory_bytes: Some(165 << 20),
            created_unix_ms: None,
            migration: None,
        }])
    }

    fn companions(&self, to: &[NodeName]) -> Result<Vec<Companions>, ServiceError> {
        let containers = vec!["redis".to_owned(), to[0].to_string()];
        Ok(vec![Companions { as_a_whole: vec![containers.clone()], containers, made_anew: Vec::new() }])
    }

    fn begin_move(&self, request: MoveRequest) -> Result<Begun, ServiceError> {
        let blocked =
            |kind| Err(ServiceError::blocked(&request.container, vec![Blocker::new(kind, "cause", "remedy")]));
        match request.container.as_str() {
            "nobody" => blocked(BlockerKind::NoSuchContainer),
            "busy" => blocked(BlockerKind::Busy),
            "stdout" => blocked(BlockerKind::Descriptor),
            "no-criu" => Err(ServiceError::new(ErrorKind::Unusable, "criu is missing", "install it")),
            "panic" => panic!("on purpose"),
            _ if request.dry_run => Ok(Begun::Planned(Box::new(Plan {
                container: request.container,
                from: "a".parse().unwrap(),
                to: request.to,
                mode: request.options.mode,
                memory_bytes: 4096,
                tasks: 4,
                tmpfs_bytes: 0,
                log_bytes: 0,
                trees: vec![],
                image: None,
                estimated_blackout_ms: Some(200.0),
                estimated_total_ms: None,
                prediction: None,
                blockers: vec![],
                allowed: vec![],
                local_networks: vec![],
                translated_connections: 0,
                notes: vec![],
            }))),
            _ => Ok(Begun::Started(Box::new(running("m-1")))),
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

    fn cancel(&self, named: &str) -> Result<Report, ServiceError> {
        match named {
            "m-late" => Err(ServiceError::new(ErrorKind::TooLate, "it is past its commit point", "wait for it")),
            "web 1%" => Ok(running("m-2")),
            _ => Err(ServiceError::new(ErrorKind::NotFound, "no such migration", "")),
        }
    }

    fn cancel_group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        match id.as_str() {
            "g-1" => Ok(group("g-1", Outcome::Running)),
            _ => Err(ServiceError::no_such_group(id)),
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
        match request.host_is_down {
            true => self.report(&id(&request.migration)),
            false => {
                Err(ServiceError::new(ErrorKind::Blocked, "redis was heard to run on node b", "add --host-is-down"))
            }
        }
    }

    fn leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        let name = "/run/netns/redis".to_owned();
        Ok(vec![Leftover { kind: LeftoverKind::Namespace, name, removed: false, warning: false, note: String::new() }])
    }

    fn remove_leftovers(&self) -> Result<Vec<Leftover>, ServiceError> {
        let mut all = self.leftovers()?;
        all.iter_mut().for_each(|leftover| leftover.removed = true);
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
        Ok(vec![running("m-2"), running("m-1")])
    }

    fn report(&self, id: &MigrationId) -> Result<Report, ServiceError> {
        self.watch(id).map(|w| w.borrow().clone())
    }

    fn watch(&self, id: &MigrationId) -> Result<watch::Receiver<Report>, ServiceError> {
        self.migrations.lock().unwrap().get(id).cloned().ok_or_else(|| ServiceError::no_such_migration(id))
    }

    fn begin_group(&self, request: GroupRequest) -> Result<GroupReport, ServiceError> {
        match request.to {
            Some(_) => Ok(group("g-1", Outcome::Running)),
            None => Err(ServiceError::new(ErrorKind::Invalid, "redis has no destination", "name one")),
        }
    }

    fn groups(&self) -> Result<Vec<GroupReport>, ServiceError> {
        Ok(vec![group("g-1", Outcome::Moved)])
    }

    fn group(&self, id: &GroupId) -> Result<GroupReport, ServiceError> {
        self.watch_group(id).map(|w| w.borrow().clone())
    }

    fn watch_group(&self, id: &GroupId) -> Result<watch::Receiver<GroupReport>, ServiceError> {
        match id.as_str() {
            "g-1" => Ok(watch::channel(group("g-1", Outcome::Moved)).1),
            _ => Err(ServiceError::no_such_group(id)),
        }
    }
}

struct Agent {
    service: Arc<Script>,
    client: Client,
    _stop: tokio::sync::oneshot::Sender<()>,
    _dir: tempfile::TempDir,
}

fn agent() -> Agent {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let service = Arc::new(Script::default());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(serve(bind(&socket).unwrap(), router(service.clone()), async {
        let _ = stopped.await;
    }));
    Agent { service, client: Client::new(socket), _stop: stop, _dir: dir }
}

impl Agent {
    fn migration(&self, first: Report) -> watch::Sender<Report> {
        let id = first.id.clone();
        let (sender, receiver) = watch::channel(first);
        self.service.migrations.lock().unwrap().insert(id, receiver);
        sender
    }

    /// Sends `request` as it stands and returns the whole answer.
    async fn raw(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.client.socket()).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

fn request(container: &str, dry_run: bool) -> MoveRequest {
    MoveRequest { dry_run, ..MoveRequest::new(container, "b".parse().unwrap()) }
}

#[tokio::test]
async fn what_the_service_says_arrives() {
    let agent = agent();
    assert_eq!(agent.client.node().await.unwrap(), node());
    assert_eq!(agent.client.containers().await.unwrap()[0].pid, Some(812));
    let companions = agent.client.companions(&["c".parse().unwrap(), "b".parse().unwrap()]).await.unwrap();
    assert_eq!(companions[0].containers, ["redis", "c"]);
    assert_eq!(agent.client.reports().await.unwrap(), [running("m-2"), running("m-1")]);
    let _sender = agent.migration(running("m-1"));
    assert_eq!(agent.client.report(&id("m-1")).await.unwrap(), running("m-1"));
    assert_eq!(
        agent.client.begin_move(&request("redis", false)).await.unwrap(),
        Begun::Started(Box::new(running("m-1")))
    );
    assert!(
        matches!(agent.client.begin_move(&request("redis", true)).await.unwrap(), Begun::Planned(p) if p.tasks == 4)
    );
    assert!(
        agent
            .raw("GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .contains("\"openapi\":\"3.")
    );
}

#[tokio::test]
async fn refusals_have_their_status_and_their_blockers() {
    let agent = agent();
    for (container, expected) in [("nobody", 404), ("busy", 409), ("stdout", 422), ("no-criu", 503), ("panic", 500)] {
        match agent.client.begin_move(&request(container, false)).await {
            Err(e @ ClientError::Refused { .. }) => {
                assert!(!e.is_unreachable());
                let ClientError::Refused { status, body } = e else { unreachable!() };
                assert_eq!((status, body.blockers.len()), (expected, usize::from(status < 500)), "{container}");
                assert!(!body.remedy.is_empty());
            }
            other => panic!("{container}: {other:?}"),
        }
    }
    let unknown = agent.client.report(&id("m-9")).await.unwrap_err();
    assert_eq!(unknown.to_string(), "this node knows no migration m-9; see `tranship history` for those that it knows");
}

#[tokio::test]
async fn a_migration_is_given_up_or_the_refusal_says_why() {
    let agent = agent();
    let _sender = agent.migration(running("m-1"));
    let mut request = RecoverRequest { migration: "m-1".into(), host_is_down: true, keep: None };
    assert_eq!(agent.client.recover(&request).await.unwrap(), running("m-1"));
    request.host_is_down = false;
    match agent.client.recover(&request).await {
        Err(ClientError::Refused { status: 422, body }) => assert_eq!(body.remedy, "add --host-is-down"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_migration_or_group_is_cancelled_or_the_refusal_says_why() {
    let agent = agent();
    assert_eq!(agent.client.cancel("web 1%").await.unwrap(), running("m-2"));
    assert_eq!(agent.client.cancel_group(&"g-1".parse().unwrap()).await.unwrap(), group("g-1", Outcome::Running));
    for (named, expected) in [("m-late", 409), ("nobody", 404)] {
        match agent.client.cancel(named).await {
            Err(ClientError::Refused { status, .. }) => assert_eq!(status, expected, "{named}"),
            other => panic!("{named}: {other:?}"),
        }
    }
    let unknown = agent.client.cancel_group(&"g-2".parse().unwrap()).await;
    assert!(matches!(unknown, Err(ClientError::Refused { status: 404, .. })), "{unknown:?}");
}

#[tokio::test]
async fn held_addresses_are_listed_and_released() {
    let agent = agent();
    assert_eq!(agent.client.held_addresses().await.unwrap(), [held()]);
    assert_eq!(agent.client.release("redis", false).await.unwrap(), [held()]);
    assert_eq!(agent.client.release("alive", true).await.unwrap(), [held()]);
    for (container, expected) in [("alive", 422), ("no/body", 404)] {
        let Err(ClientError::Refused { status, .. }) = agent.client.release(container, false).await else { panic!() };
        assert_eq!(status, expected, "{container}");
    }
}

#[tokio::test]
async fn kept_paths_are_listed() {
    assert_eq!(agent().client.kept_paths().await.unwrap(), [kept()]);
}

#[tokio::test]
async fn leftovers_are_listed_and_removed() {
    let agent = agent();
    let found = agent.client.leftovers().await.unwrap();
    assert_eq!(found.iter().map(|l| (l.kind, l.removed)).collect::<Vec<_>>(), [(LeftoverKind::Namespace, false)]);
    let removed = agent.client.remove_leftovers().await.unwrap();
    assert_eq!(removed, found.into_iter().map(|l| Leftover { removed: true, ..l }).collect::<Vec<_>>());
}

#[tokio::test]
async fn nonsense_is_refused_in_the_form_of_every_other_error() {
    let agent = agent();
    let post = |body: &str| {
        format!(
            "POST /v1/migrations HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for (sent, status) in [
        (post("{"), "400"),
        (post(r#"{"container":"redis","to":"b","dryrun":true}"#), "400"),
        (post(r#"{"container":"redis","to":"../b"}"#), "400"),
        (post(&format!(r#"{{"container":"{}","to":"b"}}"#, "x".repeat(100_000))), "400"),
        ("GET /v1/nodes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(), "404"),
        ("GET /v1/migrations/..%2f HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(), "404"),
        ("DELETE /v1/node HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(), "405"),
    ] {
        let answer = agent.raw(&sent).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{sent:.80}: {answer}");
        assert!(answer.contains(r#"{"error":{"message":"#), "{answer}");
    }
}

#[tokio::test]
async fn a_follower_sees_the_changes_and_the_end() {
    let agent = agent();
    let sender = agent.migration(running("m-1"));
    let mut events = agent.client.events::<Report>(&id("m-1")).await.unwrap();
    assert_eq!(events.next().await.unwrap().phase, Phase::Plan);
    sender.send_modify(|r| r.phase = Phase::Freeze);
    assert_eq!(events.next().await.unwrap().phase, Phase::Freeze);
    sender.send_modify(|r| (r.phase, r.outcome) = (Phase::Done, Outcome::Moved));
    drop(sender);
    assert_eq!(events.next().await.unwrap().outcome, Outcome::Moved);
    assert!(matches!(events.next().await, Err(ClientError::Lost { .. })));
}

#[tokio::test]
async fn a_migration_that_ended_long_ago_can_be_followed() {
    let agent = agent();
    let mut report = running("m-1");
    report.outcome = Outcome::Failed;
    drop(agent.migration(report.clone()));
    let mut seen = 0;
    assert_eq!(agent.client.follow::<Report>(&id("m-1"), |_| seen += 1).await.unwrap(), report);
    assert_eq!(seen, 1);
}

#[tokio::test]
async fn an_agent_that_stops_reporting_is_noticed() {
    let agent = agent();
    drop(agent.migration(running("m-1")));
    let error = agent.client.follow::<Report>(&id("m-1"), |_| {}).await.unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }) && error.is_unreachable());
}

/// The reader connects, reads nothing while ten thousand reports of 4 KiB pass by, and then reads all there is.
#[tokio::test]
async fn a_slow_reader_misses_reports_but_not_the_last() {
    let agent = agent();
    let sender = agent.migration(running("m-1"));
    let mut stream = UnixStream::connect(agent.client.socket()).await.unwrap();
    stream.write_all(b"GET /v1/migrations/m-1/events HTTP/1.0\r\nhost: x\r\n\r\n").await.unwrap();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with('{') {
        line.clear();
        stream.read_line(&mut line).await.unwrap();
    }
    for n in 0..10_000 {
        sender.send_modify(|r| {
            r.progress.moved_bytes = n;
            r.ways = vec!["w".repeat(4096)];
        });
        tokio::task::yield_now().await;
    }
    sender.send_modify(|r| r.outcome = Outcome::Moved);
    let mut rest = String::new();
    tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut rest)).await.unwrap().unwrap();
    let reports: Vec<Report> = rest.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(reports.len() < 1000, "{} reports were kept for the reader", reports.len());
    assert_eq!(reports.last().unwrap().outcome, Outcome::Moved);
    assert_eq!(reports.last().unwrap().progress.moved_bytes, 9_999);
}

#[tokio::test]
async fn no_agent_is_told_from_an_agent_that_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let client = Client::new(&socket);
    let missing = client.node().await.unwrap_err();
    assert!(matches!(missing, ClientError::NotRunning(_)) && missing.is_unreachable());
    assert!(missing.to_string().contains("systemctl start transhipd"), "{missing}");
    drop(bind(&socket).unwrap());
    assert!(matches!(client.node().await, Err(ClientError::NotRunning(_))));
}

#[tokio::test]
async fn followers_do_not_keep_a_stopping_agent() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let service = Arc::new(Script::default());
    let (sender, receiver) = watch::channel(running("m-1"));
    service.migrations.lock().unwrap().insert(id("m-1"), receiver);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(serve(bind(&socket).unwrap(), router(service), async {
        let _ = stopped.await;
    }));
    let mut events = Client::new(&socket).events::<Report>(&id("m-1")).await.unwrap();
    events.next().await.unwrap();
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(10), serving).await.unwrap().unwrap().unwrap();
    drop(sender);
}

#[test]
fn programs_without_a_runtime_have_their_client() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let agent = runtime.block_on(async { agent() });
    let client = tranship_api::blocking::Client::new(agent.client.socket()).unwrap();
    assert_eq!(client.node().unwrap(), node());
    let sender = agent.migration(running("m-1"));
    sender.send_modify(|r| r.outcome = Outcome::Moved);
    assert_eq!(client.follow(&id("m-1"), |_| {}).unwrap().outcome, Outcome::Moved);
}

#[tokio::test]
async fn a_group_is_begun_refused_looked_at_and_followed() {
    let agent = agent();
    let to = Some("b".parse().unwrap());
    let request = GroupRequest { to, ..GroupRequest::default() };
    let begun = agent.client.begin_group(&request).await.unwrap();
    assert_eq!(begun.outcome, Outcome::Running);
    let refused = agent.client.begin_group(&GroupRequest::default()).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 400, .. }), "{refused}");
    assert_eq!(agent.client.follow(&begun.id, |_: &GroupReport| {}).await.unwrap().outcome, Outcome::Moved);
    assert_eq!(agent.client.group(&begun.id).await.unwrap(), agent.client.groups().await.unwrap()[0]);
    let unknown = agent.client.group(&"g-2".parse().unwrap()).await.unwrap_err();
    assert!(unknown.to_string().contains("knows no group g-2"), "{unknown}");
}
