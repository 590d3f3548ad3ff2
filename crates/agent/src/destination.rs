//! The destination's steps, done with the real parts.

mod ended;
mod images;
mod preflight;
mod restore;
mod resume;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tranship_coordinator::{DestinationPort, DestinationStep, Failure, Fault};
use tranship_criu::front;
use tranship_criu::images::Allowed;
use tranship_engine::{Container, Engine, EngineError, LogFiles, State};
use tranship_memory::pager::{self, PagerHandle};
use tranship_memory::receive::Store;
use tranship_network::{Announcer, Gate, Injector, NetworkError, Takeover, cni};
use tranship_storage::carried::{self, Target};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::launch::Started;
use tranship_sys::{breakpoints, reserve};
use tranship_types::{EngineName, HugePages, MigrationId, NetworkIdentity, NodeName};
use tranship_wire::message::Offer;

pub use self::preflight::{available_memory, check, place_network};
use crate::arrivals::{Inbox, WayIn};
use crate::draining::{self, Pages};
use crate::held;
use crate::layout::{Front, Layout, Role};
use crate::logs;
use crate::node::{self, Node, failed};
use crate::paths;
use crate::policy;
use crate::space;
use crate::stdio;
use crate::timeline::Timeline;
use crate::tmpfs;
use crate::trees::{self, Note};

/// How long a restore may take.
const RESTORE: Duration = Duration::from_secs(60);
/// How long a restore that is no longer wanted may take to end.
const RESTORE_END: Duration = Duration::from_secs(20);
/// Held from when it is looked how much memory there is until some of it is promised.
static PROMISING: Mutex<()> = Mutex::new(());

/// One migration on the node that the container goes to.
pub struct DestinationRun {
    node: Arc<Node>,
    /// The engine that gets the container.
    engine: Arc<dyn Engine>,
    id: MigrationId,
    peer: NodeName,
    offer: Offer,
    layout: Layout,
    inbox: Arc<Inbox>,
    /// The places of its directory trees, until they have taken them. An engine that starts a container does not tell of it.
    targets: Vec<Target>,
    /// The files of its log, for the same reason.
    log: Option<LogFiles>,
    front: Option<Front>,
    /// The process that has the engine restore, until it has been waited for.
    restoring: Option<Started>,
    /// What its images may have, from when its engine has been started until they are checked.
    allowed: Option<Allowed>,
    pager: Option<Started>,
    gate: Option<Gate>,
    announcer: Option<Announcer>,
    /// The network namespace turned out to be there already: it is somebody else's.
    foreign_network: bool,
    cut: Option<tranship_transport::Closer>,
    /// Has criu set breakpoints without a wait.
    breakpoints: Option<OwnedFd>,
    pub timeline: Timeline,
    /// The copy that was let go read zeros where there was content, and must be made again.
    spoilt: bool,
    /// When the last task was let go.
    pub resumed_ns: Option<u64>,
    pub drained: Option<pager::Status>,
    /// How it ended here, if it did before its last pages had come.
    pub ended: Option<String>,
    /// What the source's user has to know of how it went here.
    pub remarks: Vec<String>,
    /// Where it had transparent huge pages on the source.
    pub huge_pages: Vec<HugePages>,
    /// Not READY before every page has come.
    pub all_pages: bool,
    /// What only the migration needed has been, or is being, removed.
    pub tidied: bool,
}

impl DestinationRun {
    pub fn new(node: &Arc<Node>, id: &MigrationId, peer: &NodeName, mut offer: Offer, inbox: Arc<Inbox>) -> Self {
        let engine = Arc::clone(node.engine(offer.engine.parse().unwrap_or(EngineName::Runc)));
        if let Some((path, _)) = &mut offer.network {
            *path = place_network(engine.as_ref(), &offer.container, path);
        }
        if let (Some(path), Some(owner)) = (&mut offer.joined_network, &offer.network_owner) {
            *path = place_network(engine.as_ref(), owner, path);
        }
        Self {
            engine,
            layout: Layout::new(&node.config.run_dir, id),
            node: Arc::clone(node),
            id: id.clone(),
            peer: peer.clone(),
            offer,
            inbox,
            targets: Vec::new(),
            log: None,
            front: None,
            restoring: None,
            allowed: None,
            pager: None,
            gate: None,
            announcer: None,
            foreign_network: false,
            cut: None,
            breakpoints: None,
            timeline: Timeline::default(),
            spoilt: false,
            resumed_ns: None,
            drained: None,
            ended: None,
            remarks: Vec::new(),
            huge_pages: Vec::new(),
            all_pages: true,
            tidied: false,
        }
    }

    /// The link that an injected fault cuts.
    pub fn cut_by(&mut self, closer: tranship_transport::Closer) {
        self.cut = Some(closer);
    }

    pub fn container(&self) -> &str {
        &self.offer.container
    }

    pub fn images(&self) -> PathBuf {
        self.layout.images()
    }

    /// Its network namespace on this node, if that has a name.
    pub fn network_path(&self) -> Option<&PathBuf> {
        self.offer.network_path()
    }

    /// The pod that it brings, or joins.
    pub fn pod(&self) -> Option<&str> {
        self.offer.parameters["joined"]["name"].as_str()
    }

    fn bundle(&self) -> PathBuf {
        self.node.bundle(&self.offer.container)
    }

    /// The copy, if the engine knows it; not what somebody else has made of its name.
    pub fn own_container(&self) -> Option<Container> {
        self.engine.inspect(&self.offer.container).ok().filter(|c| self.engine.is_made_from(c, &self.bundle()))
    }

    /// Whether the copy runs, or is held.
    pub fn runs(&self) -> bool {
        self.own_container().is_some_and(|container| container.state == State::Running)
    }

    /// Whether the copy runs, and is not just held: the engine cannot tell these apart.
    pub fn was_let_go(&self) -> bool {
        let noted = || front::resumed_init(&self.layout.front_socket(Role::Restore)).is_some();
        (self.resumed_ns.is_some() || !self.layout.root().exists() || noted()) && self.runs()
    }

    /// Whether what it needs to run, or to go on running, was lost with the host's memory.
    pub fn is_lost(&self) -> bool {
        !self.tidied && !self.layout.root().exists()
    }

    fn make_network(&mut self) -> Result<(), Failure> {
        if let Some(path) = self.offer.joined_network.as_ref().filter(|path| !path.exists()) {
            return Err(Failure::new(format!(
                "the network namespace {} of container {} is not on node {}: the container that brings it has not come; move them \
                 together again",
                path.display(),
                self.offer.container,
                self.node.config.node
            )));
        }
        policy::joins_own(&self.node, &self.peer, &*self.engine, &self.offer)?;
        let Some((path, identity)) = &self.offer.network else { return Ok(()) };
        let made = match self.engine.attaches_network() {
            true => tranship_network::reserve(path, &identity.names()),
            false => tranship_network::create(path, identity),
        };
        made.map_err(|error| {
            self.foreign_network = matches!(error, NetworkError::Exists { .. });
            failed(error)
        })?;
        if self.engine.attaches_network() {
            return Ok(());
        }
        cni::attach(path, &self.offer.container, identity).map_err(failed)?;
        self.prepare_network()
    }

    /// Takes the gate of a network that is there, and is closed.
    fn prepare_network(&mut self) -> Result<(), Failure> {
        let Some((path, identity)) = &self.offer.network else { return Ok(()) };
        paths::arrive(&self.node, &self.id, (&self.peer, self.engine.name()), &self.offer, path)?;
        self.gate = Some(Gate::prepare(path, &identity.names()).map_err(failed)?);
        self.announcer = Some(Announcer::prepare(path, identity).map_err(failed)?);
        let bound = self.node.config.network.hold_bytes();
        let way_in = Injector::prepare(path, identity)
            .and_then(|way| Ok(WayIn::new(way, Takeover::prepare(path, identity, bound)?, bound)));
        match way_in {
            Ok(way_in) => self.inbox.deliver_by(Some(way_in)),
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "packets that arrive in the blackout will be sent again");
            }
        }
        Ok(())
    }

    /// After a restart of the agent: the one before may have left the gate closed to packets, for whose order nobody cares any more.
    pub fn open_left_gate(&self) {
        let Some((path, identity)) = self.offer.network.as_ref().filter(|(path, _)| path.exists()) else { return };
        if let Err(error) = Gate::prepare(path, &identity.names()).and_then(|mut gate| gate.open()) {
            tracing::warn!(id = %self.id, %error, "packets may be kept out");
        }
    }

    /// Takes over what the engine has attached: the same addresses, behind the closed gate. A restore sets no sysctls.
    fn take_attached(&mut self) -> Result<(), Failure> {
        let Some((path, identity)) = &self.offer.network else { return Ok(()) };
        let attached = tranship_network::capture(path).map_err(failed)?;
        tranship_network::stand_aside(path).map_err(failed)?;
        if let Some(what) = differs(identity, &attached) {
            let (engine, node) = (self.engine.name(), &self.node.config.node);
            return Err(Failure::new(format!(
                "{engine} on node {node} has attached {} with {what}",
                self.offer.container
            )));
        }
        tranship_network::close_attached(path, &identity.names()).map_err(failed)?;
        let by_another = identity.given_by.as_ref().is_some_and(|engine| *engine != self.offer.engine);
        tranship_network::configure(path, identity, &attached, by_another).map_err(failed)?;
        self.prepare_network()
    }

    fn make_bundle(&self) -> Result<(), Failure> {
        let config = self.engine.adopt(&self.offer.container, self.offer.config.clone());
        let bundle = self.bundle();
        std::fs::create_dir_all(&bundle)
            .map_err(|e| Failure::new(format!("the bundle {} cannot be made: {e}", bundle.display())))?;
        let create = || self.engine.create(&self.offer.container, &bundle, &config, &self.offer.parameters);
        held::beside(&self.node, &*self.engine, create).map_err(failed)
    }

    fn start_pager(&mut self) -> Result<(), Failure> {
        self.pager = Some(self.layout.start_pager()?);
        let handle = PagerHandle::connect(self.layout.root()).map_err(failed)?;
        // Two arrivals at once must not both find the same memory.
        let _one_at_a_time = PROMISING.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, files) = (self.offer.memory_bytes, tmpfs::bytes(&self.offer));
        let capacity = Store::capacity_for(memory, available_memory().saturating_sub(files));
        let store = Store::new(capacity.map_err(|e| self.no_memory(&e))?, handle).map_err(failed)?;
        let store = store.charged_by(Arc::clone(&self.inbox.charger));
        let shared = self.offer.shared_bytes.min(memory);
        store.populate(memory - shared, shared).map_err(failed)?;
        self.inbox.tmpfs.promise(files);
        self.inbox.open(store, &self.peer, self.offer.streams);
        Ok(())
    }

    /// The memory for the pages cannot be taken.
    pub fn no_memory(&self, error: &std::io::Error) -> Failure {
        Failure::new(format!(
            "node {} has not enough memory for the {} MiB of container {}: {error}; free some, or choose another node",
            self.node.config.node,
            self.offer.memory_bytes >> 20,
            self.offer.container
        ))
    }

    fn start_engine(&mut self) -> Result<(), Failure> {
        let criu = self.node.criu().map_err(|b| failed(b.to_string()))?;
        let stdio::Prepared { given, files, remarks } = stdio::prepare(&self.node, &self.peer, &self.id, &self.offer)?;
        self.remarks.retain(|remark| !remarks.contains(remark));
        self.remarks.extend(remarks);
        self.layout.write_plan(Role::Restore, &self.offer, &criu, (self.node.config.criu.log_level, given))?;
        let (name, bundle) = (&self.offer.container, self.bundle());
        // An engine reads what it noted in the images before criu has written any: which pipes it connects anew.
        let descriptors = self.layout.images().join("descriptors.json");
        if !descriptors.exists() {
            let none = || vec!["/dev/null".to_owned(); 3];
            let stdio = Some(self.offer.stdio.clone()).filter(|all| !all.is_empty()).unwrap_or_else(none);
            std::fs::write(descriptors, serde_json::to_vec(&stdio).map_err(failed)?).map_err(failed)?;
        }
        if let Some(shared) = tmpfs::of_pod(&self.layout, &self.offer)? {
            self.engine.share_memory(&bundle, &shared).map_err(failed)?;
        }
        let network = self.offer.network.as_ref().map(|(path, _)| path.as_path());
        if let Some((_, identity)) = &self.offer.network {
            held::make_way(&self.node, &*self.engine, name, &identity.addresses())?;
        }
        let restore = |images: tranship_engine::Images<'_>| self.engine.restore(name, &bundle, images, network);
        let command = self.layout.with_images(Role::Restore, restore).map_err(failed)?;
        let mut front = self.layout.start_front(Role::Restore, command, None)?;
        // The front has taken them.
        drop(files);
        self.restoring = front.engine.take();
        self.lift_cpu_share(front.criu);
        self.front = Some(front);
        let allocator = front::allocator_socket(&self.layout.front_socket(Role::Restore));
        self.inbox
            .charger
            .connect(&allocator)
            .map_err(|e| failed(format!("the CRIU front cannot allocate memory: {e}")))?;
        if self.engine.attaches_network() {
            self.take_attached()?;
        }
        let allowed = self.allowed()?;
        self.check_profiles(&allowed)?;
        self.allowed = Some(allowed);
        self.breakpoints = breakpoints::prepare().ok();
        // It was taken beside the engine's start.
        let there = match self.inbox.store() {
            Ok(store) => store.populated(self.offer.mode.has_rounds()),
            // A restore that is done again after a restart of the agent: the pager has all of it.
            Err(_) if self.pager_serves() => Ok(()),
            Err(failure) => return Err(failure),
        };
        there.map_err(|e| self.inbox.failed().unwrap_or_else(|| self.no_memory(&e)))
    }

    /// Nothing is waited for here: who has this done has seen that every page is in place, or that the container has ended.
    fn drain(&mut self) -> Result<(), Failure> {
        if self.is_lost() {
            return Err(Failure::new(format!(
                "container {} is lost on node {}, whose host was restarted before every page was there; the original is \
                 still frozen on its node",
                self.offer.container, self.node.config.node
            )));
        }
        if self.tidied {
            return Ok(());
        }
        // Whoever asks whether it has drained may then remove the files that it was copied from.
        let targets = trees::targets_left(&*self.engine, &self.id, &self.offer)?;
        targets.iter().try_for_each(|target| carried::flush(target.path())).map_err(failed)?;
        if self.ended.is_none() && self.drained.as_ref().is_none_or(|status| !status.drained) {
            match draining::look(self.layout.root(), Duration::ZERO) {
                Pages::Drained(status) => self.drained = status,
                Pages::Draining(status) => {
                    let missing = status.remote_bytes + status.pending_bytes;
                    return Err(Failure::new(format!("{missing} bytes of its memory are not in place yet")));
                }
                Pages::Unknown { why, .. } => {
                    return Err(Failure::new(format!("whether every page is in place cannot be told: {why}")));
                }
            }
        }
        self.end_pager()
    }

    fn tidy(&mut self) -> Result<(), Failure> {
        self.tidied = true;
        self.front = None;
        stdio::begin(&self.node, &self.id);
        self.inbox.await_takeover();
        (self.gate, self.announcer, self.breakpoints) = (None, None, None);
        self.reinstate()?;
        // Of one that has ended there may be nothing left that the engine could tell.
        if self.ended.is_none() {
            self.look_for_overlooked()?;
        }
        let targets = trees::targets_left(&*self.engine, &self.id, &self.offer)?;
        for target in &targets {
            if let Some(before) = target.settle().map_err(failed)? {
                let (path, before) = (target.path().display(), before.display());
                let remark = format!("files were put into {path} after it was looked at: they are in {before}");
                tracing::warn!(id = %self.id, remark);
                self.remarks.push(remark);
            }
        }
        Note::remove(&self.node, &self.id)?;
        self.inbox.slot.give_back();
        self.inbox.close();
        if let Some((path, _)) = self.offer.network.as_ref().filter(|_| self.engine.attaches_network()) {
            tranship_network::unname(path).map_err(failed)?;
        }
        if let Some((_, identity)) = &self.offer.network {
            held::returned(&self.node, &self.offer.container, identity);
            let came = (self.offer.container.as_str(), identity.addresses());
            paths::arrived(&self.node, &self.id, (&self.peer, self.engine.name()), came);
        }
        self.layout.remove()?;
        self.reap_pager()
    }

    /// Ends a void copy that may run, so that not one packet of its end gets out: its clients may be the original's by
    /// now.
    fn silence(&mut self) -> Result<(), Failure> {
        // Nobody is to open its gate again, to groups neither.
        self.inbox.deliver_by(None);
        let copy = self.own_container();
        if copy.is_some() {
            self.engine.retire(&self.offer.container).map_err(failed)?;
        }
        // Its engine may have another name for the namespace, which lasts.
        let named = copy.as_ref().and_then(Container::network_namespace);
        if let Some((path, identity)) = &self.offer.network
            && let Some(path) = [Some(path.clone()), named].into_iter().flatten().find(|path| path.exists())
        {
            Gate::prepare(&path, &identity.names()).and_then(|mut gate| gate.close()).map_err(failed)?;
        }
        if let Some(path) = self.offer.joined_network.as_ref().filter(|path| path.exists()) {
            let names = tranship_network::capture(path).map_err(failed)?.names();
            Gate::prepare(path, &names).and_then(|mut gate| gate.close()).map_err(failed)?;
        }
        copy.map_or(Ok(()), |container| container.freezer.kill_frozen(RESTORE_END).map_err(failed))
    }

    /// Removes what an engine or criu that were killed have left of the container.
    fn sweep_engine(&mut self) -> Result<(), Failure> {
        self.front = None;
        self.layout.end_front(Role::Restore, RESTORE_END)?;
        if let Some(restoring) = self.restoring.take() {
            node::reap(restoring, RESTORE_END).map_err(failed)?;
        }
        sweep(&*self.engine, &self.offer.container, &self.bundle())
    }

    fn perform(&mut self, step: DestinationStep) -> Result<(), Failure> {
        match step {
            DestinationStep::Check => {
                let refused = policy::check(&self.node, &self.peer, &self.offer);
                Failure::blocked(refused).map_or(Ok(()), Err)?;
                let (blockers, _) = self.offer.allow.part(check(&self.node, &self.offer));
                Failure::blocked(blockers).map_or(Ok(()), Err)
            }
            DestinationStep::Network => self.make_network(),
            DestinationStep::Bundle => self.make_bundle(),
            DestinationStep::Directory => {
                self.layout.make()?;
                self.layout.keep_first_record(&self.node.journals(), &self.id);
                tmpfs::open(&self.inbox, &self.layout, &self.offer, &self.peer)?;
                self.targets = trees::targets(&*self.engine, &self.id, &self.offer)?;
                Note::write(&self.node, &self.id, &self.targets, &self.offer)?;
                self.log = logs::place(&*self.engine, &self.offer)?;
                self.targets.iter().try_for_each(Target::stage).map_err(failed)
            }
            DestinationStep::Pager => self.start_pager(),
            DestinationStep::Engine => {
                self.start_engine()?;
                self.inbox.log.open(self.log.take(), &self.peer);
                trees::open(&self.inbox.trees, &self.targets, &self.offer, &self.peer)
            }
            // The files came with the request that leads here; memory comes on links of its own.
            DestinationStep::Receive => self.inbox.failed().map_or(Ok(()), Err),
            DestinationStep::Restore => {
                let restored = self.restore();
                // Who waits for what it brings shall not go on waiting.
                restored.as_ref().err().into_iter().for_each(|failure| self.inbox.pod.end(Err(failure.clone())));
                restored
            }
            DestinationStep::OpenGate => self.open_gate(),
            DestinationStep::Resume => {
                self.resume()?;
                stdio::begin(&self.node, &self.id);
                Ok(())
            }
            DestinationStep::Announce => match &mut self.announcer {
                Some(announcer) => announcer.announce().map_err(failed),
                None => Ok(()),
            },
            DestinationStep::Drain => self.drain(),
            DestinationStep::Tidy => self.tidy(),
        }
    }
}

impl DestinationPort for DestinationRun {
    fn run(&mut self, step: DestinationStep) -> Result<(), Failure> {
        let start = monotonic_ns();
        // The container waits for these.
        let _reserve = DestinationStep::COMMIT.contains(&step).then(reserve::open_if_needed);
        let done = self.perform(step).map_err(|failure| space::explained(&self.node, self.node.lacking(failure)));
        // Those in the blackout tell of what they do in finer parts.
        if DestinationStep::PREPARE.contains(&step) {
            self.timeline.note(format!("prepare: {step}"), start, monotonic_ns());
        }
        done
    }

    fn undo(&mut self, step: DestinationStep) -> Result<(), Failure> {
        let _reserve = reserve::open_if_needed();
        match step {
            DestinationStep::OpenGate => self.silence(),
            DestinationStep::Engine => {
                stdio::end(&stdio::of_arrived(&self.node, self.id.as_str()));
                // An engine removes a bridge that has no ports any more.
                paths::undo(&self.node, &self.id)?;
                self.sweep_engine()
            }
            DestinationStep::Pager => {
                self.inbox.close();
                if let Ok(pager) = PagerHandle::connect(self.layout.root()) {
                    pager.quit().map_err(failed)?;
                }
                self.pager.take().map_or(Ok(()), |pager| node::reap(pager, RESTORE_END)).map_err(failed)
            }
            DestinationStep::Directory => {
                self.inbox.tmpfs.close();
                self.inbox.trees.close();
                self.inbox.log.close();
                self.inbox.pod.end(Err(failed("the migration was undone")));
                let targets = trees::targets_left(&*self.engine, &self.id, &self.offer)?;
                targets.iter().try_for_each(Target::undo).map_err(failed)?;
                Note::remove(&self.node, &self.id)?;
                self.layout.remove()
            }
            DestinationStep::Bundle => {
                self.engine.discard(&self.offer.container, &self.bundle()).map_err(failed)?;
                tranship_storage::remove_tree(&self.bundle()).map_err(failed)
            }
            DestinationStep::Network => {
                (self.gate, self.announcer) = (None, None);
                self.inbox.deliver_by(None);
                paths::undo(&self.node, &self.id)?;
                match &self.offer.network {
                    Some(_) if self.foreign_network => Ok(()),
                    Some((path, identity)) => {
                        let held = held::hold_again(&self.node, &self.offer.container, identity);
                        cni::detach(path, &identity.cni).map_err(failed)?;
                        tranship_network::remove(path).map_err(failed).and(held)
                    }
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn inject(&mut self, fault: Fault) {
        tracing::warn!(?fault, "injected on the destination");
        match fault {
            Fault::Die => node::die(),
            Fault::Hold => node::hold(),
            Fault::KillCriu => {
                if let Some(front) = &self.front {
                    node::kill(front.criu);
                }
            }
            Fault::Cut => self.cut.iter().for_each(tranship_transport::Closer::close),
            Fault::Delay(time) => std::thread::sleep(time),
            Fault::Error | Fault::Panic => {}
        }
    }
}

/// Removes what an engine has left of the container that was made from a bundle here; not what somebody else has made of its
/// name meanwhile.
pub fn sweep(engine: &dyn Engine, name: &str, bundle: &Path) -> Result<(), Failure> {
    let ended = match engine.inspect(name) {
        Ok(container) if !engine.is_made_from(&container, bundle) => return Ok(()),
        _ => engine.end(name, bundle).map_err(failed),
    };
    engine.sweep(bundle).map_err(failed)?;
    for path in engine.mount_residue(name, bundle) {
        if path.exists() {
            tranship_storage::unmount_below(&path).map_err(failed)?;
            tranship_storage::remove_tree(&path).map_err(failed)?;
        }
    }
    // What runc could not remove was removed above; if it still knows the container, that is an error.
    match engine.inspect(name) {
        Err(EngineError::NoSuchContainer { .. }) => Ok(()),
        _ => ended,
    }
}

/// In what the network that an engine has attached is not the one that was asked for. Addresses that programs have added come later.
fn differs(asked: &NetworkIdentity, attached: &NetworkIdentity) -> Option<String> {
    if asked.names() != attached.names() {
        return Some(format!("the interfaces {:?}, not {:?}", attached.names(), asked.names()));
    }
    let pairs = asked.interfaces.iter().zip(&attached.interfaces);
    for (asked, attached) in pairs {
        let is_asked = attached.addresses.iter().all(|address| asked.addresses.contains(address));
        if asked.mac != attached.mac || !is_asked {
            return Some(format!(
                "{:?} and MAC {:02x?} on {}, not {:?} and {:02x?}",
                attached.addresses, attached.mac, asked.name, asked.addresses, asked.mac
            ));
        }
    }
    None
}
