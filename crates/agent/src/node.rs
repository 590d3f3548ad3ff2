//! What all migrations of this agent share.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tranship_coordinator::{Failure, FaultPlan};
use tranship_criu::find::Criu;
use tranship_engine::{Container, Engine, EngineError};
use tranship_memory::tracker::Method;
use tranship_sys::awake::Awake;
use tranship_sys::mapping_flags::FlagsReader;
use tranship_sys::thread_memory::ThreadMemory;
use tranship_sys::{reserve, restart_blocks, threads};
use tranship_transport::{Connection, Connector, Link};
use tranship_types::{
    Blocker, BlockerKind, EngineName, GroupReport, MigrationId, NodeName, Report, check_container_name,
};
use tranship_wire::{Hello, Purpose};

use crate::absent;
use crate::arrivals::Arrivals;
use crate::claims::{Claim, Claims, Holder};
use crate::config::Config;
use crate::damaged::DamagedMoves;
use crate::freeze_slots::FreezeSlots;
use crate::interrupt::Interrupts;
use crate::live::{Live, PeerTable};
use crate::notify::Liveness;
use crate::recovery::Words;
use crate::registry::Registry;

/// Where in the state directory the reports of moves are kept.
const HISTORY: &str = "history";

/// How long a peer may take to answer a call.
const DIAL: Duration = Duration::from_secs(5);
/// How long processors stay awake when a container runs again: its clients have waited, and each answer of the first ones brings the next request.
const AWAKE: Duration = Duration::from_millis(50);

/// This node.
pub struct Node {
    pub config: Config,
    pub live: Live,
    engines: Vec<Arc<dyn Engine>>,
    pub connector: Connector,
    pub registry: Arc<Registry<Report>>,
    pub groups: Arc<Registry<GroupReport>>,
    pub arrivals: Arrivals,
    /// Of the containers that leave this node, and of those that arrive.
    pub leaving_slots: FreezeSlots,
    pub arriving_slots: FreezeSlots,
    pub words: Words,
    pub damaged: DamagedMoves,
    pub interrupts: Interrupts,
    pub faults: FaultPlan,
    pub liveness: Liveness,
    /// Connections with holders of standard streams.
    pub relays: crate::stdio::Sessions,
    /// Tells the flags of mappings, where the kernel lets that be asked for.
    pub mapping_flags: Option<FlagsReader>,
    /// Reads which memory each restored thread uses first, where the kernel allows it.
    pub thread_memory: Option<ThreadMemory>,
    /// How writes to memory are found.
    pub tracking: Method,
    /// Containers that a migration of this node has to do with.
    busy: Arc<Claims>,
    stopping: (Mutex<bool>, Condvar),
    /// Ends what lasts for some time and nobody waits for.
    timers: tokio::runtime::Handle,
}

impl Node {
    /// The directory of the reports of moves that have ended, and of what belongs to them.
    pub fn history(&self) -> PathBuf {
        self.config.state_dir.join(HISTORY)
    }

    pub fn new(
        (config, live): (Config, Live),
        engines: Vec<Arc<dyn Engine>>,
        connector: Connector,
        faults: FaultPlan,
        tracking: Method,
        timers: tokio::runtime::Handle,
    ) -> Arc<Self> {
        if let Err(error) = restart_blocks::description() {
            tracing::info!(%error, "sleeps and the like fail with EINTR in restored programs: restart blocks cannot be read by BPF");
        }
        Arc::new(Self {
            registry: Registry::new(config.state_dir.join(HISTORY)),
            groups: Registry::new(config.state_dir.join("groups")),
            config,
            live,
            engines,
            connector,
            arrivals: Arrivals::default(),
            leaving_slots: FreezeSlots::default(),
            arriving_slots: FreezeSlots::default(),
            words: Words::default(),
            damaged: DamagedMoves::default(),
            interrupts: Interrupts::default(),
            faults,
            liveness: Liveness::default(),
            relays: crate::stdio::Sessions::default(),
            mapping_flags: FlagsReader::load()
                .inspect_err(
                    |error| tracing::info!(%error, "criu reads smaps itself: mappings' flags cannot be read by BPF"),
                )
                .ok(),
            thread_memory: ThreadMemory::load()
                .inspect_err(|error| {
                    tracing::info!(%error, "in post-copy each restored thread requests its first page: BPF cannot read where it is");
                })
                .ok(),
            tracking,
            busy: Arc::default(),
            stopping: (Mutex::new(false), Condvar::new()),
            timers,
        })
    }

    /// The peers as they are configured now.
    pub fn peers(&self) -> Arc<PeerTable> {
        self.live.peers()
    }

    /// Whether no container is being frozen, neither one that leaves nor one that arrives.
    pub fn is_quiet(&self) -> bool {
        self.leaving_slots.is_quiet() && self.arriving_slots.is_quiet()
    }

    /// The runtime of the API.
    pub fn timers(&self) -> &tokio::runtime::Handle {
        &self.timers
    }

    /// The engines of which there is anything on this node.
    pub fn engines(&self) -> impl Iterator<Item = &Arc<dyn Engine>> {
        self.engines.iter().filter(|engine| engine.is_present())
    }

    /// All engines, whether or not there is anything of them.
    pub fn all_engines(&self) -> impl Iterator<Item = &Arc<dyn Engine>> {
        self.engines.iter()
    }

    /// The engine of this name, whether or not there is anything of it.
    pub fn engine(&self, name: EngineName) -> &Arc<dyn Engine> {
        self.engines.iter().find(|engine| engine.name() == name).unwrap_or(&self.engines[0])
    }

    /// The container of this name, in `engine` or in whichever has it.
    pub fn find(&self, name: &str, engine: Option<EngineName>) -> Result<(Arc<dyn Engine>, Container), Blocker> {
        if let Err(wrong) = check_container_name(name) {
            return Err(Blocker::new(
                BlockerKind::NoSuchContainer,
                wrong.to_string(),
                "`tranship ls` shows those that there are",
            ));
        }
        let mut found = Vec::new();
        let mut trouble = None;
        for one in self.engines().filter(|one| engine.is_none_or(|name| one.name() == name)) {
            match one.inspect(name) {
                Ok(container) => found.push((Arc::clone(one), container)),
                Err(EngineError::NoSuchContainer { .. }) => {}
                Err(error) => trouble = Some(error),
            }
        }
        let names =
            |engines: Vec<EngineName>| engines.into_iter().map(EngineName::as_str).collect::<Vec<_>>().join(" and in ");
        match (found.len(), trouble) {
            (1, _) => Ok(found.remove(0)),
            (0, Some(error)) => {
                let (cause, remedy) = error.told("see the engine's own messages");
                Err(Blocker::new(BlockerKind::Engine, cause, remedy))
            }
            (0, None) => {
                let asked = engine.map_or_else(|| self.engines().map(|e| e.name()).collect(), |name| vec![name]);
                let place = names(asked).replace(" and in ", " or ");
                Err(absent::no_such_container(self, name, &place))
            }
            _ => {
                let both = names(found.iter().map(|(engine, _)| engine.name()).collect());
                let cause = format!("there is a container {name} in {both} on node {}", self.config.node);
                Err(Blocker::new(BlockerKind::Engine, cause, "say which by --engine"))
            }
        }
    }

    /// Takes a container for a migration, unless another one has it.
    pub fn claim(&self, container: &str, id: &MigrationId) -> Result<Claim, Blocker> {
        self.take(container, Holder::Migration(id.clone()))
    }

    /// Takes a container for the time that a plan watches it.
    pub fn claim_for_plan(&self, container: &str) -> Result<Claim, Blocker> {
        self.take(container, Holder::Plan)
    }

    fn take(&self, container: &str, holder: Holder) -> Result<Claim, Blocker> {
        self.busy.take(container, holder).map_err(|other| self.busy_blocker(container, &other))
    }

    fn busy_blocker(&self, container: &str, holder: &Holder) -> Blocker {
        let node = &self.config.node;
        let (cause, remedy) = match holder {
            Holder::Migration(id) if self.damaged.get(id).is_some() => (
                format!("the journal of move {id} of {container} is damaged on node {node}"),
                format!("see `tranship status {id}`; `tranship recover {id} --keep-here` or --keep-there decides"),
            ),
            Holder::Migration(id) => (
                format!("{container} is being moved already, on node {node} (move {id})"),
                format!("wait for it; see `tranship status {id}`"),
            ),
            Holder::Plan => (
                format!("{container} is being watched for a plan on node {node}"),
                "try again in a few seconds".to_owned(),
            ),
        };
        Blocker::new(BlockerKind::Busy, cause, remedy)
    }

    /// The blocker that a container is, if something has it.
    pub fn busy_with(&self, container: &str) -> Option<Blocker> {
        self.busy.holder(container).map(|holder| self.busy_blocker(container, &holder))
    }

    /// The migration that has a container.
    pub fn claimed_by(&self, container: &str) -> Option<MigrationId> {
        match self.busy.holder(container) {
            Some(Holder::Migration(id)) => Some(id),
            _ => None,
        }
    }

    /// The criu that works here.
    pub fn criu(&self) -> Result<Criu, Blocker> {
        tranship_criu::find::find(self.config.criu.path.as_deref()).map_err(|missing| {
            let text = missing.to_string();
            let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "run `make setup`"));
            Blocker::new(BlockerKind::Criu, format!("{cause} (on node {})", self.config.node), remedy)
        })
    }

    /// Calls a peer's agent.
    pub fn dial(
        &self,
        peer: &NodeName,
        purpose: Purpose,
        migration: Option<&MigrationId>,
    ) -> Result<Connection, Failure> {
        self.dial_within(DIAL, peer, purpose, migration)
    }

    /// Calls a peer's agent, which is to answer in this time. Before the commit point of a migration of which this node is the source,
    /// whatever interrupts the migration ends the call, and resets the link.
    pub fn dial_within(
        &self,
        patience: Duration,
        peer: &NodeName,
        purpose: Purpose,
        migration: Option<&MigrationId>,
    ) -> Result<Connection, Failure> {
        let table = self.peers();
        let address = table.address(peer).ok_or_else(|| self.no_such_node(peer))?;
        let hello = Hello::new(self.config.node.clone(), purpose, migration.cloned());
        let Some(interrupt) = migration.and_then(|id| self.interrupts.guarding(id)) else {
            return call(&self.connector, (peer, address), &hello, patience);
        };
        let (connector, peer, address) = (self.connector.clone(), peer.clone(), address.to_owned());
        let link = interrupt.aside(move || call(&connector, (&peer, &address), &hello, patience))?;
        interrupt.register(link.closer())?;
        Ok(link)
    }

    fn no_such_node(&self, peer: &NodeName) -> Failure {
        let blocker = self.unknown_peer(peer);
        Failure { message: blocker.to_string(), blockers: vec![blocker], cancelled: false }
    }

    /// The blocker for a node that is not configured.
    pub fn unknown_peer(&self, peer: &NodeName) -> Blocker {
        let table = self.peers();
        let known: Vec<&str> = table.all().map(|(name, _)| name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let cause = if *peer == self.config.node {
            format!("{peer} is this node itself")
        } else {
            format!("there is no node {peer} in the configuration of node {}", self.config.node)
        };
        Blocker::new(BlockerKind::NoSuchNode, cause, format!("name one of its peers ({known}), or add it to [peers]"))
    }

    /// Where the bundles of restored containers are: the engine's state refers to them as long as the container lives.
    pub fn bundle(&self, container: &str) -> PathBuf {
        self.config.run_dir.join("bundles").join(container)
    }

    pub fn journals(&self) -> PathBuf {
        self.config.state_dir.join("journal")
    }

    /// Waits for some time; false if the agent is stopping.
    pub fn pause(&self, time: Duration) -> bool {
        let (lock, condition) = &self.stopping;
        let stopping = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let (stopping, _) =
            condition.wait_timeout_while(stopping, time, |s| !*s).unwrap_or_else(PoisonError::into_inner);
        !*stopping
    }

    /// Adds to a failure what may be behind it: no descriptor can be opened any more.
    pub fn lacking(&self, mut failure: Failure) -> Failure {
        if !reserve::are_there(1) && !failure.message.contains(reserve::REMEDY) {
            let node = &self.config.node;
            failure.message +=
                &format!(" (the agent of node {node} has no file descriptors left); {}", reserve::REMEDY);
        }
        failure
    }

    /// Starts a thread for what must be done, and waits until there is one to be had, or the agent stops.
    pub fn start_patiently(&self, name: &str, mut work: impl FnOnce() + Send + 'static) {
        while let Err(refused) = threads::start_or_back(name, work) {
            tracing::error!(name, error = %refused.error, "it is tried again");
            if !self.pause(Duration::from_millis(200)) {
                return;
            }
            work = refused.work;
        }
    }

    /// Starts a thread for what goes on in the background. Where there is none, one of those that answer calls of the API is lent.
    pub fn start_or_lend(&self, name: &str, work: impl FnOnce() + Send + 'static) {
        if let Err(refused) = threads::start_or_back(name, work) {
            tracing::warn!(name, error = %refused.error, "a thread of the API is used for it");
            drop(self.timers.spawn_blocking(refused.work));
        }
    }

    /// Lets processors sleep again when a container that has just been resumed has served those that waited. Does not wait for that.
    pub fn sleep_later(&self, awake: Awake) {
        self.timers.spawn(async move {
            tokio::time::sleep(AWAKE).await;
            drop(awake);
        });
    }

    /// Tells everything that waits that the agent is stopping.
    pub fn stop(&self) {
        *self.stopping.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopping.1.notify_all();
    }
}

/// Calls an agent; what keeps it from answering is a blocker.
fn call(
    connector: &Connector,
    (peer, address): (&NodeName, &str),
    hello: &Hello,
    patience: Duration,
) -> Result<Connection, Failure> {
    use tranship_transport::TransportError as E;
    connector.connect(peer, address, hello, patience).map_err(|error| {
        let kind = match &error {
            E::Untrusted { .. } | E::WrongNode { .. } => BlockerKind::Untrusted,
            E::Version { .. } => BlockerKind::Version,
            _ => BlockerKind::Unreachable,
        };
        let text = sentence(&error);
        let (cause, remedy) = text.split_once("; ").unwrap_or((&text, "check that its agent runs and can be reached"));
        let blocker = Blocker::new(kind, cause, remedy);
        Failure { message: blocker.to_string(), blockers: vec![blocker], cancelled: false }
    })
}

/// What went wrong below, as a step's failure.
pub fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(error.to_string())
}

/// An error with its causes in one sentence: what failed, why, and, after a semicolon, what to do about it.
pub fn sentence(error: &(dyn std::error::Error + 'static)) -> String {
    let outer = error.to_string();
    let (what, remedy) = outer.split_at(outer.find("; ").unwrap_or(outer.len()));
    let mut said = what.to_owned();
    for cause in std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string) {
        // Some say what their causes are by themselves.
        if !said.contains(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said + remedy
}

/// What an id is made of that no other migration or group has.
pub fn random_bytes() -> std::io::Result<[u8; 5]> {
    use std::io::Read;
    let mut bytes = [0; 5];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Lets an injected fault happen that needs no more than this process.
pub fn die() -> ! {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    // SIGKILL cannot be blocked; this is for the type only.
    std::process::abort()
}

/// Lets an injected fault happen: this process stops until it is sent SIGCONT.
pub fn hold() {
    // To this very thread: one that is sent to the process may take effect only after some more steps.
    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP);
}

/// Whether a process lives: it is there, and no zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = tranship_sys::process::text(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Whether a process has ended, or has given up its memory to do so.
pub fn is_ending(pid: u32) -> bool {
    let statm = tranship_sys::process::text(format!("/proc/{pid}/statm")).unwrap_or_default();
    !is_alive(pid) || statm.starts_with("0 ")
}

/// Waits for a child that is about to end; one that does not in time is killed.
pub fn reap(mut child: tranship_sys::launch::Started, patience: Duration) -> std::io::Result<()> {
    let deadline = std::time::Instant::now() + patience;
    loop {
        if has_ended(child.try_wait())? {
            return Ok(());
        }
        if std::time::Instant::now() > deadline {
            child.kill()?;
            return has_ended(child.wait().map(Some)).map(drop);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a program has ended, if only that matters: nobody may know how, where its launcher has ended before it.
fn has_ended(status: std::io::Result<Option<std::process::ExitStatus>>) -> std::io::Result<bool> {
    match status {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(true),
        status => Ok(status?.is_some()),
    }
}

/// SIGKILL for a process that this agent knows by its pid; one that is gone is no error.
pub fn kill(pid: u32) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Node {
        /// Node a, with its state in a directory and these lines in its configuration. Nobody listens.
        pub fn for_test(directory: &std::path::Path, more: &str, engines: Vec<Arc<dyn Engine>>) -> Arc<Self> {
            use tranship_transport::{Files, Identity, pki};
            let pki = directory.join("pki");
            pki::init(&pki, &["a".parse().unwrap()], false).unwrap();
            let [ca, cert, key] = ["ca.crt", "node.crt", "node.key"].map(|file| pki.join("a").join(file));
            let identity = || Identity::load_files(&Files { ca: &ca, cert: &cert, key: &key, crl: None }).unwrap();
            let text = format!(
                "node = \"a\"\nlisten = \"127.0.0.1:0\"\nrun_dir = {directory:?}\nstate_dir = {directory:?}\n\
                 [tls]\nca = {ca:?}\ncert = {cert:?}\nkey = {key:?}\n{more}\n"
            );
            let config: Config = toml::from_str(&text).unwrap();
            let live = Live::new(directory.join("agent.toml"), &config, Box::new(identity()));
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let timers = runtime.handle().clone();
            // For as long as the test runs.
            std::mem::forget(runtime);
            let faults = FaultPlan::parse("").unwrap();
            Self::new((config, live), engines, Connector::new(identity()), faults, Method::best(), timers)
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{what}")]
    struct Trouble {
        what: &'static str,
        #[source]
        source: std::io::Error,
    }

    #[test]
    fn a_sentence_has_its_causes_before_its_remedy() {
        let trouble = |what| sentence(&Trouble { what, source: std::io::Error::other("no room") });
        assert_eq!(trouble("the file cannot be kept; make room"), "the file cannot be kept: no room; make room");
        assert_eq!(trouble("the file cannot be kept"), "the file cannot be kept: no room");
        assert_eq!(
            trouble("the file cannot be kept: no room; make some"),
            "the file cannot be kept: no room; make some"
        );
    }
}
