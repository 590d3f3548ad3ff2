//! The source's steps, done with the real parts.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tranship_coordinator::{Failure, SourceStep};
use tranship_criu::irmap;
use tranship_criu::preflight::zombies::Zombies;
use tranship_criu::preflight::{Depth, Namespaces};
use tranship_criu::smaps::Smaps;
use tranship_engine::{Container, Engine, OpenFreezer, Pod};
use tranship_memory::compress::Tally;
use tranship_memory::policy::Limits;
use tranship_memory::send::{Outbox, Stream};
use tranship_memory::shared::source::{SharedMemory, Where};
use tranship_memory::tracker::{Round, Tracker};
use tranship_network::{Backlog, Conntrack, Gate, HeldFrame, Hold, NodeConntrack};
use tranship_sys::awake::Awake;
use tranship_sys::clock::monotonic_ns;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads;
use tranship_sys::{breakpoints, reserve};
use tranship_transport::{Connection, Link};
use tranship_types::{Blocker, EngineName, ImageToSend, MigrationId, NodeName, OnTimeout, Waiting};
use tranship_wire::Purpose;
use tranship_wire::message::{Offer, Request, Response};

mod account;
mod control;
mod drain;
mod entered;
mod files;
mod fits;
mod held;
mod original;
mod port;
mod push;
mod release;
mod rounds;
mod shared;
mod showing;
mod skeleton;
mod streams;
mod transfer;
mod turns;
mod undo;
mod unit;

use control::answered;
use entered::Entered;
pub use fits::{pages_rate, too_slow, zeros};
use push::{Demand, Push};

use crate::groups::Turn;
use crate::interrupt::Interrupt;
use crate::layout::{Front, Layout, Role};
use crate::neighbours;
use crate::node::{Node, failed};
use crate::options;
use crate::pods;
use crate::registry::LiveReport;
use crate::stdio;
use crate::timeline::{ClockOffset, Timeline};
use crate::tmpfs;
use crate::unread::Queues;
use crate::{logs, paths, trees};

/// Why a move ends whose container is to have other limits than the destination has been told.
const LIMITS_CHANGED: &str = "limits of the container's cgroup were changed during the move; try again";
/// How long tasks may take to stop.
const FREEZE: Duration = Duration::from_secs(5);
/// How long the destination may take to check and prepare: it may have to read a large tree, or to take much memory.
const PREPARE: Duration = Duration::from_secs(120);
/// How long a silent destination is waited for while the container is frozen.
const FROZEN_PATIENCE: Duration = Duration::from_secs(75);
/// How long a word that was not answered may still arrive: its link gives up in 10 s, also when nobody has it open any more.
const LAST_WORD: Duration = Duration::from_secs(12);

/// One migration on the node that the container leaves.
pub struct SourceRun {
    node: Arc<Node>,
    /// The engine that has the container.
    engine: Arc<dyn Engine>,
    id: MigrationId,
    name: String,
    peer: NodeName,
    report: LiveReport,
    /// Its turns, where it is a member of a group.
    pub turn: Option<Turn>,
    /// What can end it before the commit point.
    interrupt: Arc<Interrupt>,
    /// Its freeze slots.
    slots: turns::Slots,
    /// It has waited, before its freeze, for the others of a group that moves as a whole.
    poised: bool,
    layout: Layout,
    inspection: Option<(Container, Offer)>,
    /// The pod that it moves with.
    pod: Option<Pod>,
    /// The other containers that move with it and share namespaces with it.
    others: Vec<Container>,
    /// The container's namespaces.
    namespaces: Namespaces,
    /// What watches files whose paths criu has to be told.
    watchers: Vec<irmap::Watcher>,
    /// Pipes that lead out of the container and get new other ends on the destination.
    carried_pipes: Vec<String>,
    control: Option<Connection>,
    streams: Vec<Stream<Connection>>,
    /// What of their pages did not travel as it is.
    tally: Arc<Tally>,
    front: Option<Front>,
    gate: Option<Gate>,
    /// The container's freezer, opened before the freeze.
    freezer: Option<OpenFreezer>,
    /// Descriptors for the way back, for as long as that takes.
    reserve: Option<reserve::Use>,
    /// Tells what the kernel tracks of the container's connections.
    conntrack: Option<Conntrack>,
    node_conntrack: Option<NodeConntrack>,
    /// Keeps the packets that reach the closed gate.
    hold: Option<Hold>,
    /// Whether programs in it have joined groups.
    has_groups: bool,
    /// When the gate was closed for the freeze.
    gate_closed: Option<Instant>,
    /// Tells which connections have ended for programs, and not for their peers.
    backlog: Option<Backlog>,
    /// Whether all connections that programs had closed had sent all before the freeze.
    closed_have_finished: bool,
    /// Whether the freeze has found none of them.
    none_is_unfinished: bool,
    /// Has criu set breakpoints without a wait.
    breakpoints: Option<OwnedFd>,
    /// What has watched criu write its images. To close it takes up to 15 ms (fs/notify waits for a grace period of SRCU), which are not the freeze's.
    written: Option<skeleton::Written>,
    /// Nobody waits for a processor to wake up, from the freeze until the container runs and a little longer; but while pages are waited for.
    awake: Option<Awake>,
    /// Packets that were held and not delivered yet.
    held: Vec<HeldFrame>,
    clock: ClockOffset,
    timeline: Timeline,
    frozen_ns: Option<u64>,
    /// When the destination's word came that it is ready, or that of the group: from then on it is this node's to decide.
    ready_ns: Option<u64>,
    limits: Limits,
    /// The watch over the container's memory, where there are rounds. Dropping it takes time for each page.
    tracker: Option<Tracker>,
    /// What criu is told of the tasks' mappings, so that it need not read it from the kernel in the freeze.
    smaps: Smaps,
    /// Zombies that criu need not see, as they were just before the freeze.
    zombies: Zombies,
    /// Memory that tasks share, where the memory plane moves it.
    shared: Option<SharedMemory>,
    /// What the frozen container's memory still has to be sent.
    last_round: Option<Round>,
    /// What was named and is sent after the freeze.
    outbox: Outbox,
    /// By how much the container's CPU time was cut, in percent of what it used: so many CPUs.
    throttled: u8,
    cpus: f64,
    /// What a freeze left fitted the budget.
    converged: bool,
    /// The links for pages that are asked for, until memory is on its way.
    demand: Option<Demand>,
    /// The threads that will send memory.
    crew: Vec<threads::Waiting>,
    /// Memory on its way.
    push: Option<Push>,
    /// The content of its tmpfs mounts, until it is sent.
    files: Option<tmpfs::Leaving>,
    /// Its directory trees on disk.
    trees: Option<trees::Leaving>,
    /// Its log.
    log: Option<logs::Leaving>,
    /// Bytes sent on links that are closed by now.
    wire_bytes: u64,
    /// The destination may know of the migration.
    offered: bool,
    /// When the word to commit was said that the destination has not answered.
    unanswered: Option<Instant>,
    /// The migration was given up after the decision.
    given_up: bool,
    /// Each process of the original may have a SIGSTOP waiting for it.
    stopped_beneath: bool,
    /// The destination has confirmed that nothing is left there.
    undo_confirmed: bool,
    /// There was a copy there that ran beside the original, once the migration was given up.
    pub stray_removed: bool,
    /// The destination has confirmed that every page is in place.
    drain_confirmed: bool,
    /// The destination has been told that the original is no more.
    release_told: bool,
    /// What the destination's last failure waits for.
    awaited: Option<Waiting>,
    /// Whether datagrams may be sent to the destination before it is ready.
    peer_keeps_datagrams: bool,
    /// Whether the container's log may be sent there.
    peer_keeps_log: bool,
    attempts: u32,
    entered: Entered,
}

impl SourceRun {
    pub fn new(node: &Arc<Node>, report: LiveReport, turn: Option<Turn>, interrupt: Arc<Interrupt>) -> Self {
        let first = report.read();
        Self {
            layout: Layout::new(&node.config.run_dir, &first.id),
            engine: Arc::clone(node.engine(first.options.engine.unwrap_or(EngineName::Runc))),
            node: Arc::clone(node),
            id: first.id,
            name: first.container,
            peer: first.destination,
            report,
            turn,
            interrupt,
            slots: turns::Slots::default(),
            poised: false,
            inspection: None,
            pod: None,
            others: Vec::new(),
            namespaces: Namespaces::default(),
            watchers: Vec::new(),
            carried_pipes: Vec::new(),
            control: None,
            streams: Vec::new(),
            tally: Arc::default(),
            front: None,
            gate: None,
            freezer: None,
            reserve: None,
            conntrack: None,
            node_conntrack: None,
            hold: None,
            has_groups: false,
            gate_closed: None,
            backlog: None,
            closed_have_finished: false,
            none_is_unfinished: false,
            breakpoints: None,
            written: None,
            awake: None,
            held: Vec::new(),
            clock: ClockOffset::default(),
            timeline: Timeline::default(),
            frozen_ns: None,
            ready_ns: None,
            limits: options::limits(&first.options),
            tracker: None,
            smaps: Smaps::default(),
            zombies: Zombies::default(),
            shared: None,
            last_round: None,
            outbox: Outbox::default(),
            throttled: 0,
            cpus: 0.0,
            converged: false,
            demand: None,
            crew: Vec::new(),
            push: None,
            files: None,
            trees: None,
            log: None,
            wire_bytes: 0,
            offered: false,
            unanswered: None,
            given_up: false,
            stopped_beneath: false,
            undo_confirmed: false,
            stray_removed: false,
            drain_confirmed: false,
            release_told: false,
            awaited: None,
            peer_keeps_datagrams: false,
            peer_keeps_log: false,
            attempts: 0,
            entered: Entered::default(),
        }
    }

    /// Takes up a migration of an earlier agent, which was decided or not. Whether its offer left, or its word to commit, is not on record.
    pub fn taken_up(node: &Arc<Node>, report: LiveReport, decided: bool) -> Self {
        let run = Self {
            offered: true,
            unanswered: Some(Instant::now()),
            stopped_beneath: decided,
            ..Self::new(node, report, None, Interrupt::of_earlier_agent(decided))
        };
        run.settle_freezer(decided);
        run
    }

    fn inspected(&self) -> Result<&(Container, Offer), Failure> {
        self.inspection.as_ref().ok_or_else(|| Failure::new(format!("container {} was not inspected", self.name)))
    }

    /// Whether the user lets the decision come before the last page is on the destination: in any case, or because the time for the
    /// whole move is over.
    fn may_be_early(&self) -> bool {
        let options = self.report.read().options;
        // Whether an earlier agent was in a hurry is not on record.
        let perhaps = self.inspection.is_none() && options.on_timeout == OnTimeout::Postcopy;
        perhaps || self.interrupt.hurries() || options.may_commit_early()
    }

    /// Whether the decision comes before the last page is on the destination. Where the rounds left little, nothing is
    /// gained by that.
    fn is_early(&self) -> bool {
        self.may_be_early() && !self.converged
    }

    /// The container, also after a restart of the agent, when nothing was inspected.
    fn container(&self) -> Result<Container, Failure> {
        match &self.inspection {
            Some((container, _)) => Ok(container.clone()),
            None => self.engine.inspect(&self.name).map_err(failed),
        }
    }

    fn inspect(&mut self) -> Result<(), Failure> {
        let (node, name, options) = (Arc::clone(&self.node), self.name.clone(), self.report.read().options);
        let unit = self.turn.as_ref().and_then(Turn::unit).cloned();
        let at_once = self.turn.as_ref().map(Turn::at_once).unwrap_or_default();
        // It looks into large trees and asks engines.
        let inspect = || {
            let (node, name, options, unit) = (Arc::clone(&node), name.clone(), options.clone(), unit.clone());
            let (peer, at_once) = (self.peer.clone(), at_once.clone());
            self.interrupt.aside(move || paths::inspect(&node, &name, (&peer, &options), (unit.as_ref(), &at_once)))
        };
        let found = self.inspected_without_entered(inspect)?;
        if !self.node.peers().has(&self.peer) {
            return Err(Failure::blocked(vec![self.node.unknown_peer(&self.peer)]).unwrap_or_else(|| failed("no peer")));
        }
        self.report.change(|r| {
            r.progress.memory_bytes = found.offer.memory_bytes;
            r.ways.extend(self.engine.remarks(&found.container));
            r.ways.extend(found.findings.changes);
            r.allowed.extend(found.allowed);
        });
        if let Some(failure) = Failure::blocked(found.blockers) {
            return Err(failure);
        }
        self.inspection = Some((found.container, found.offer));
        (self.pod, self.others, self.namespaces) = (found.pod, found.others, found.namespaces);
        (self.watchers, self.carried_pipes) = (found.findings.watchers, found.findings.carried_pipes);
        Ok(())
    }

    fn connect(&mut self) -> Result<(), Failure> {
        // Before there is a link that would be silent for as long as that takes.
        self.send_image()?;
        self.control = Some(self.node.dial(&self.peer, Purpose::Control, Some(&self.id))?);
        self.check_version()?;
        let mut trips = Vec::new();
        for _ in 0..8 {
            let sent = monotonic_ns();
            match self.ask(&Request::Clock, PREPARE)? {
                Response::Clock { now_ns } => trips.push((sent, now_ns, monotonic_ns())),
                other => return Err(self.unexpected(&other)),
            }
        }
        self.clock = ClockOffset::from_round_trips(&trips);
        Ok(())
    }

    fn offer(&mut self) -> Result<(), Failure> {
        let offer = Box::new(self.inspected()?.1.clone());
        self.offered = true;
        match self.ask(&Request::Offer(offer), PREPARE)? {
            Response::Prepared { shares_networks: false, .. } if self.joins_network() || self.pod.is_some() => {
                Err(Failure::new(format!(
                    "the agent of node {} is too old to take containers that share a network; update it",
                    self.peer
                )))
            }
            Response::Prepared { shares_memory: false, .. } if self.shares_memory() => Err(Failure::new(format!(
                "the agent of node {} is too old to take the shared memory of a pod; update it",
                self.peer
            ))),
            Response::Prepared { shared, keeps_datagrams, gives_slots, keeps_log, .. } => {
                self.peer_keeps_datagrams = keeps_datagrams;
                self.peer_keeps_log = keeps_log;
                self.slots.of_peer(gives_slots);
                self.claim_attached();
                self.arm_shared(shared)
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Announces addresses that an engine attaches: on a kernel before 6.16 the destination's engine may have announced them while it
    /// made the copy, by a packet socket, which the gate there does not stop yet.
    fn claim_attached(&self) {
        let Some((path, identity)) = self.inspection.as_ref().and_then(|(_, offer)| offer.network.as_ref()) else {
            return;
        };
        if identity.given_by.is_some()
            && let Err(failure) = undo::announce(path)
        {
            tracing::warn!(id = %self.id, %failure, "the network may take the addresses for moved until the container sends");
        }
    }

    fn arm(&mut self) -> Result<(), Failure> {
        let (container, offer) = self.inspected()?.clone();
        let criu = self.node.criu().map_err(|b| failed(b.to_string()))?;
        self.layout.make()?;
        self.layout.keep_first_record(&self.node.journals(), &self.id);
        std::fs::write(self.layout.original(), &container.created).map_err(failed)?;
        self.note_freezer(&container.freezer)?;
        stdio::note(self.layout.root(), &offer.streams_of_node, &offer.stdio_target)?;
        self.freezer = container.freezer.open().ok();
        paths::arm(&self.node, &self.id, &self.peer, &offer, (self.engine.name(), &container))?;
        self.layout.write_plan(Role::Dump, &offer, &criu, (self.node.config.criu.log_level, Vec::new()))?;
        let command = self.layout.with_images(Role::Dump, |images| self.engine.dump(&container, images));
        self.front = Some(self.layout.start_front(Role::Dump, command, Some(&self.interrupt))?);
        for stream in 0..offer.streams {
            let stream = self.page_stream(stream)?;
            self.streams.push(stream);
        }
        self.crew = push::crew(offer.streams)?;
        if self.may_be_early() || self.report.read().options.on_timeout == OnTimeout::Postcopy {
            self.demand = Some(self.open_demand()?);
        }
        self.find_shared(Where::Everywhere)?;
        self.tell_huge_pages()?;
        let brought = self.pod.as_ref().filter(|_| !self.joins_network());
        self.files = tmpfs::Leaving::begin(
            &self.node,
            &self.peer,
            &self.id,
            (&container, brought),
            &offer,
            self.layout.hidden(),
        );
        self.begin_trees(&container, &offer)?;
        self.begin_log(&offer)?;
        self.gate = prepared_gate(&offer)?;
        self.breakpoints = breakpoints::prepare().ok();
        self.enter_unit(&container);
        if let Some((path, identity)) = &offer.network {
            // What an engine attaches has rules of the engine's, which lead to its own sockets.
            if !self.engine.attaches_network() {
                self.conntrack = Some(Conntrack::prepare(path).map_err(failed)?);
            }
            self.node_conntrack = NodeConntrack::prepare(path, identity).inspect_err(skeleton::not_carried).ok();
            match Hold::prepare(path, identity, self.node.config.network.hold_bytes()) {
                Ok(hold) => self.hold = Some(hold),
                Err(error) => self.report.change(|r| r.ways.push(format!("network: packets are not held, {error}"))),
            }
        }
        Ok(())
    }

    fn freeze(&mut self) -> Result<(), Failure> {
        if self.joins_network() {
            self.find_zombies()?;
            return self.frozen_by_owner();
        }
        let (node, looks, kinds) = (Arc::clone(&self.node), self.last_looks()?, pods::shared_kinds(self.pod.as_ref()));
        // Beside what is waited for anyway.
        let look_at_all = move || -> Vec<Blocker> {
            let look = |(container, namespaces, others): &(Container, Namespaces, Vec<Container>)| {
                neighbours::obstacles(&node, container, namespaces, Depth::Processes, (others, kinds))
            };
            looks.iter().flat_map(look).collect()
        };
        let joined = std::thread::scope(|scope| {
            let joined = threads::beside(scope, "neighbours", look_at_all);
            self.let_closed_connections_finish();
            joined.join()
        });
        Failure::blocked(joined).map_or(Ok(()), Err)?;
        self.let_entered_end()?;
        self.find_zombies()?;
        // Those that are opened after this are looked at beside criu's dump.
        let allowed = self.report.read().options.allow;
        let queues = Queues::of(self.unit_containers().iter().chain([&self.inspected()?.0]), &allowed);
        let drained = self.let_backlog_drain();
        let freezer = self.inspected()?.0.freezer.clone();
        self.unthrottle()?;
        self.lift_cpu_share()?;
        // From here on the container waits for this thread and for criu.
        schedule::stand(Standing::Realtime);
        if let Some(front) = &self.front {
            schedule::stand_for(front.criu, Standing::Realtime);
        }
        self.awake = Awake::keep().ok();
        self.freeze_after_stragglers(&freezer, &queues, drained)?;
        self.note_stopped_of_unit()
    }

    fn await_ready(&mut self) -> Result<(), Failure> {
        self.send_unread();
        match self.hear(FROZEN_PATIENCE)? {
            Response::Ready { parts } => {
                self.ready_ns = Some(monotonic_ns());
                if let Some(why) = self.push.as_mut().and_then(Push::broken) {
                    return Err(self.reason(Failure::new(format!("memory could not be sent: {why}"))));
                }
                self.still_frozen()?;
                self.report.change(|r| r.parts.extend(parts));
                Ok(())
            }
            other => Err(self.unexpected(&other)),
        }
    }

    fn deliver(&mut self) -> Result<(), Failure> {
        if self.control.is_none() {
            self.control = Some(self.node.dial(&self.peer, Purpose::Control, Some(&self.id))?);
        }
        let start = self.decided();
        self.unanswered = Some(Instant::now());
        // Behind the word to commit, without waiting for its answer: they are delivered as soon as the tasks run.
        let answer =
            self.say(&Request::Commit).and_then(|()| self.forward_held()).and_then(|()| self.hear(FROZEN_PATIENCE));
        let (resumed_ns, parts) = match answer {
            Ok(Response::Running { resumed_ns, parts }) => (resumed_ns, parts),
            Ok(other) => return Err(self.unexpected(&other)),
            Err(failure) => {
                // Whatever was on its way on this link is not to be taken for the answer to the next try.
                self.control = None;
                return Err(failure);
            }
        };
        self.hand_packets_over()?;
        self.slots.linger();
        self.timeline.note("commit and resume", start, monotonic_ns());
        schedule::stand(Standing::Ordinary);
        self.awake.take().into_iter().for_each(|awake| self.node.sleep_later(awake));
        self.close_images();
        self.account(resumed_ns, parts);
        if let Err(failure) = self.hand_groups_over() {
            tracing::info!(id = %self.id, %failure, "the last datagrams to groups were not delivered");
        }
        Ok(())
    }

    fn perform(&mut self, step: SourceStep) -> Result<(), Failure> {
        match step {
            SourceStep::Inspect => self.inspect(),
            SourceStep::Connect => self.connect(),
            SourceStep::Offer => self.offer(),
            SourceStep::Arm => self.arm(),
            SourceStep::Precopy => self.precopy(),
            SourceStep::Freeze => self.freeze(),
            SourceStep::CloseGate => self.close_gate(),
            SourceStep::Transfer => self.transfer(),
            SourceStep::AwaitReady => self.await_ready(),
            SourceStep::Deliver => self.deliver(),
            SourceStep::Drain => {
                self.leave_streams()?;
                self.drain()
            }
            SourceStep::Release => {
                self.leave_streams()?;
                self.release()
            }
        }
    }
}

impl SourceRun {
    /// Has the original's standard streams go on, as long as it is there.
    fn leave_streams(&self) -> Result<(), Failure> {
        match self.container() {
            Ok(container) => stdio::leave(&self.node, self.layout.root(), &self.peer, &self.id, &container),
            Err(_) => Ok(()),
        }
    }

    /// Why a step failed: where the migration was interrupted, that is the cause, and what the step reports follows from it.
    fn cause(&self, seen: Failure) -> Failure {
        match self.interrupt.failure() {
            Some(cause) => {
                tracing::info!(id = %self.id, %cause, %seen, "interrupted");
                cause
            }
            None => seen,
        }
    }
}

/// Bytes of buffers of one stream: its own, and its link's.
const STREAM_BUFFERS: u32 = 2 << 20;

fn prepared_gate(offer: &Offer) -> Result<Option<Gate>, Failure> {
    let Some((path, identity)) = &offer.network else { return Ok(None) };
    Gate::prepare(path, &identity.names()).map(Some).map_err(failed)
}

/// Result of a check at the destination, which touches nothing there.
pub struct Checked {
    /// What stands in the way there.
    pub blockers: Vec<Blocker>,
    /// Remarks of the destination.
    pub notes: Vec<String>,
    /// The image that the destination lacks; `None` also from older peers, which describe it in `notes`.
    pub image: Option<ImageToSend>,
}

/// Asks the destination for blockers, without touching anything.
pub fn check(node: &Arc<Node>, peer: &NodeName, offer: &Offer) -> Result<Checked, Failure> {
    let mut link = node.dial(peer, Purpose::Control, None)?;
    link.set_timeout(Some(PREPARE)).map_err(failed)?;
    streams::understands_network(link.version(), peer, offer)?;
    tranship_wire::write_message(&mut link, &Request::Check(Box::new(offer.clone()))).map_err(failed)?;
    match answered(peer, tranship_wire::read_message(&mut link).map_err(failed)?)? {
        Response::Checked { blockers, notes, image } => Ok(Checked { blockers, notes, image }),
        other => Err(Failure::new(format!("node {peer} gave an answer that does not fit: {other:?}"))),
    }
}
