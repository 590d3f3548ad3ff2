//! Containers that are arriving: their page store while it is filled, and their state for whoever asks next.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tranship_coordinator::{DestinationStep, Failure, Journal};
use tranship_memory::receive::{Carries, Store};
use tranship_network::{HeldFrame, Injector, NetworkError, Queue, Takeover};
use tranship_sys::charge::Charger;
use tranship_types::{MigrationId, NodeName, Outcome, Phase, Progress, Report};
use tranship_wire::URGENT_STREAM;
use tranship_wire::message::Offer;

use crate::claims::Claim;
use crate::copying::Arriving;
use crate::destination::DestinationRun;
use crate::draining::Drain;
use crate::intake::Intake;
use crate::logs;
use crate::node::Node;
use crate::registry::{LiveReport, unix_ms};
use crate::rights::next_offer;

mod slot;

pub use slot::ArrivingSlot;

/// How long the source may take to forward its last packets, from the resume: as long as peers whose packets are lost wait anyway.
pub const LAST_PACKETS: Duration = Duration::from_millis(500);

/// Where an arrival stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Being prepared or restored: a failure or a lost link undoes it.
    Open,
    /// Holds a complete, stopped copy: only the source's word counts.
    Ready,
    /// The word was to commit, and the container runs.
    Running,
    /// Every page is in place, and nothing but the container is left.
    Drained,
}

/// One container that is arriving. Whoever works on it holds its lock.
pub struct Arrival {
    /// Where it comes from: nobody else has a say.
    pub peer: NodeName,
    pub run: DestinationRun,
    pub journal: Option<Journal>,
    pub begun: Vec<DestinationStep>,
    pub standing: Standing,
    /// Until it is drained, no other migration may have the container.
    pub claim: Option<Claim>,
    /// What this node knows of it.
    pub report: LiveReport,
}

/// What a journal keeps of an arrival.
#[derive(Debug, Serialize, Deserialize)]
pub struct Context {
    /// What was offered.
    pub offer: Offer,
    /// When, in ms since the Unix epoch.
    pub began_unix_ms: u64,
}

impl Context {
    /// The report of an arrival that has just begun.
    pub fn report(&self, node: &Node, id: &MigrationId, source: &NodeName) -> Report {
        let (container, here) = (self.offer.container.clone(), node.config.node.clone());
        Report {
            phase: Phase::Prepare,
            progress: Progress { memory_bytes: self.offer.memory_bytes, ..Progress::default() },
            ..Report::new(id.clone(), container, source.clone(), here, self.offer.mode, self.began_unix_ms)
        }
    }
}

impl Arrival {
    /// Puts its end on record.
    pub fn end(&self, phase: Phase, outcome: Outcome, error: Option<String>) {
        self.report.end(|r| {
            (r.phase, r.outcome, r.error) = (phase, outcome, error);
            r.total_ms.get_or_insert(unix_ms().saturating_sub(r.started_unix_ms) as f64);
        });
    }
}

/// All of them.
#[derive(Default)]
pub struct Arrivals(Mutex<ById>);

type ById = HashMap<MigrationId, Entry>;

/// What can be had of an arrival without waiting for whoever works on it.
struct Entry {
    arrival: Arc<Mutex<Arrival>>,
    inbox: Arc<Inbox>,
    peer: NodeName,
    container: String,
    /// The number of its offer.
    offer: u64,
    /// Its network namespace on this node, if that has a name.
    network: Option<PathBuf>,
    /// The pod that it brings, or joins.
    pod: Option<String>,
}

impl Arrivals {
    fn map(&self) -> MutexGuard<'_, ById> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, id: &MigrationId, arrival: Arrival, inbox: Arc<Inbox>) -> Arc<Mutex<Arrival>> {
        let (peer, container) = (arrival.peer.clone(), arrival.run.container().to_owned());
        let (network, pod) = (arrival.run.network_path().cloned(), arrival.run.pod().map(str::to_owned));
        let arrival = Arc::new(Mutex::new(arrival));
        self.map().insert(
            id.clone(),
            Entry { arrival: Arc::clone(&arrival), inbox, peer, container, offer: next_offer(), network, pod },
        );
        arrival
    }

    pub fn get(&self, id: &MigrationId) -> Option<Arc<Mutex<Arrival>>> {
        self.map().get(id).map(|entry| Arc::clone(&entry.arrival))
    }

    pub fn inbox(&self, id: &MigrationId) -> Option<Arc<Inbox>> {
        self.map().get(id).map(|entry| Arc::clone(&entry.inbox))
    }

    /// That of the container of this name.
    pub fn inbox_of(&self, container: &str) -> Option<Arc<Inbox>> {
        self.map().values().find(|entry| entry.container == container).map(|entry| Arc::clone(&entry.inbox))
    }

    /// The number of a migration's offer.
    pub fn offer(&self, id: &MigrationId) -> Option<u64> {
        self.map().get(id).map(|entry| entry.offer)
    }

    /// Whether a container comes from this node, and lives in this network namespace and pod.
    pub fn has_network(&self, (peer, container): (&NodeName, &str), network: &Path, pod: Option<&str>) -> bool {
        let fits = |entry: &Entry| {
            (&entry.peer, entry.container.as_str()) == (peer, container)
                && (entry.network.as_deref(), entry.pod.as_deref()) == (Some(network), pod)
        };
        self.map().values().any(fits)
    }

    /// The node that a migration comes from.
    pub fn peer(&self, id: &MigrationId) -> Option<NodeName> {
        self.map().get(id).map(|entry| entry.peer.clone())
    }

    /// Forgets one that has come to its end, and its journal; `arrival` is its lock.
    pub fn forget(&self, id: &MigrationId, mut arrival: MutexGuard<'_, Arrival>) {
        if let Some(journal) = arrival.journal.take()
            && let Err(error) = journal.close()
        {
            tracing::warn!(%id, %error, "a journal stays behind");
        }
        arrival.claim = None;
        drop(arrival);
        self.map().remove(id);
    }
}

/// Takes an arrival's lock; a thread that panicked with it leaves it usable.
pub fn lock(arrival: &Mutex<Arrival>) -> MutexGuard<'_, Arrival> {
    arrival.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Streams {
    store: Option<Arc<Store>>,
    /// Who may send.
    peer: Option<NodeName>,
    /// Numbers of the streams that have not begun yet.
    expected: Vec<u8>,
    /// Streams that have not named yet all that comes later.
    unnamed: usize,
    /// Streams that have not come to their end yet.
    open: usize,
    /// The source has begun again: everything that comes has been named.
    again: bool,
    failure: Option<Failure>,
    /// The copy is READY: only the source's word to commit or abort counts.
    ready: bool,
}

impl Streams {
    /// Lets whoever waits for the memory for the pages wait no longer.
    fn need_no_memory(&self) {
        if let Some(store) = &self.store {
            store.stop_populating();
        }
    }
}

/// The streams that may begin.
fn numbers(streams: u8) -> Vec<u8> {
    (0..streams).chain([URGENT_STREAM]).collect()
}

/// Where the threads that receive pages put them. Not behind the arrival's lock: they work while that is held.
#[derive(Default)]
pub struct Inbox {
    streams: Mutex<Streams>,
    changed: Condvar,
    /// Has files in memory charged to the container.
    pub charger: Arc<Charger>,
    /// The way in for CRIU's images.
    pub images: Intake,
    /// The content of tmpfs mounts.
    pub tmpfs: Arriving,
    /// The content of directory trees on disk.
    pub trees: Arriving,
    /// What it has logged before.
    pub log: logs::Arriving,
    /// What is known of its drain, once it runs here.
    pub drain: Drain,
    /// What the containers of a pod share, where this one brings it.
    pub pod: Brought,
    /// Its freeze slot on this node.
    pub slot: ArrivingSlot,
    /// The way in for packets that the source has held.
    way_in: Mutex<Option<WayIn>>,
    /// Packets that came from the source before the gate was open: datagrams that no program had read there.
    ahead: Mutex<Queue>,
}

/// What others wait for that a container brings.
#[derive(Default)]
pub struct Brought {
    state: Mutex<Option<Result<(), Failure>>>,
    changed: Condvar,
}

impl Brought {
    /// It is there, or will never be. The first word counts.
    pub fn end(&self, result: Result<(), Failure>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(result);
        self.changed.notify_all();
    }

    /// Waits until it is there.
    pub fn wait(&self, timeout: Duration) -> Result<(), Failure> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(state, timeout, |state| state.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let late = || Err(Failure::new(format!("what the pod's containers share was not there within {timeout:?}")));
        state.clone().unwrap_or_else(late)
    }
}

/// The way in for packets that the source has held.
pub struct WayIn {
    injector: Injector,
    /// What comes by itself, and has to wait until the source has forwarded its last packets.
    takeover: Takeover,
    /// How many bytes of them may wait for the gate to be opened.
    bound: usize,
    /// The source forwards none to groups any more.
    groups_are_here: bool,
    /// The gate is open.
    is_open: bool,
}

impl WayIn {
    pub fn new(injector: Injector, takeover: Takeover, bound: usize) -> Self {
        Self { injector, takeover, bound, groups_are_here: false, is_open: false }
    }

    fn deliver(&mut self, mut frames: Vec<HeldFrame>) -> Result<usize, NetworkError> {
        if self.groups_are_here {
            frames.retain(|frame| !frame.is_to_group());
        }
        self.takeover.note(&frames);
        self.injector.inject(&frames)
    }
}

impl Inbox {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on pages may come, on so many streams and on the one for what was asked for.
    pub fn open(&self, store: Store, peer: &NodeName, streams: u8) {
        let (store, peer) = (Some(Arc::new(store)), Some(peer.clone()));
        let (unnamed, open) = (usize::from(streams), usize::from(streams));
        let mut now = self.streams();
        // The migration may have been called off already.
        let failure = now.failure.take();
        *now = Streams { store, peer, unnamed, open, expected: numbers(streams), failure, ..Streams::default() };
        if now.failure.is_some() {
            now.need_no_memory();
        }
    }

    /// The source begins again, after links broke or this agent was restarted; `store` is then made anew.
    pub fn open_again(
        &self,
        peer: &NodeName,
        count: u8,
        store: impl FnOnce() -> Result<Store, Failure>,
    ) -> Result<(), Failure> {
        let mut streams = self.streams();
        if streams.store.is_none() {
            streams.store = Some(Arc::new(store()?));
        }
        (streams.peer, streams.expected, streams.again) = (Some(peer.clone()), numbers(count), true);
        Ok(())
    }

    /// Lets a stream begin: each of them once, and the source's only. Returns where its pages go, and what they are.
    pub fn begin(&self, peer: &NodeName, stream: u8) -> Result<(Arc<Store>, Carries), Failure> {
        let mut streams = self.streams();
        let expected = streams.expected.iter().position(|s| *s == stream);
        match (expected, &streams.peer, &streams.store) {
            (Some(at), Some(source), Some(store)) if source == peer => {
                let store = Arc::clone(store);
                streams.expected.remove(at);
                let carries = match stream {
                    URGENT_STREAM => Carries::Wanted,
                    _ if streams.again => Carries::Named,
                    _ => Carries::Versions,
                };
                Ok((store, carries))
            }
            _ => Err(Failure::new(format!("node {peer} has no stream {stream} to send"))),
        }
    }

    /// No more pages are wanted.
    pub fn close(&self) {
        let mut streams = self.streams();
        streams.need_no_memory();
        streams.store = None;
        self.changed.notify_all();
    }

    /// Bytes of memory that were promised for files in memory and have not come: what criu carries of them is among its images.
    pub fn files_to_come(&self) -> u64 {
        self.tmpfs.to_come() + self.streams().store.as_ref().map_or(0, |store| store.shared_to_come())
    }

    /// Lets whoever waits for the memory for the pages wait no longer.
    pub fn need_no_memory(&self) {
        self.streams().need_no_memory();
    }

    fn way_in(&self) -> MutexGuard<'_, Option<WayIn>> {
        self.way_in.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way in for packets that the source has held; none is one, too.
    pub fn deliver_by(&self, way_in: Option<WayIn>) {
        *self.way_in() = way_in;
    }

    /// Delivers packets that the source has held, and returns how many; before the gate is open they are kept. Without a way in their senders will
    /// send them again.
    pub fn deliver(&self, frames: Vec<HeldFrame>) -> Result<usize, NetworkError> {
        match &mut *self.way_in() {
            Some(way_in) if way_in.is_open => way_in.deliver(frames),
            Some(way_in) => {
                let mut ahead = self.ahead();
                frames.into_iter().for_each(|frame| ahead.push(frame, way_in.bound));
                Ok(0)
            }
            None => Ok(0),
        }
    }

    /// The gate is open: delivers what has come before. A copy that is restored again needs it again.
    pub fn deliver_ahead(&self) -> Result<usize, NetworkError> {
        let mut way_in = self.way_in();
        let Some(way_in) = &mut *way_in else { return Ok(0) };
        way_in.is_open = true;
        let ahead = self.ahead().frames().cloned().collect();
        way_in.deliver(ahead)
    }

    fn ahead(&self) -> MutexGuard<'_, Queue> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the gate as far as can be: not to packets whose place is behind some that the source has still to forward (then true), which it will tell
    /// if they are to be `in_order`. `None` where there is no way in for these.
    pub fn open_gate(&self, in_order: bool) -> Option<Result<bool, NetworkError>> {
        Some(self.way_in().as_mut()?.takeover.open(in_order))
    }

    /// The source forwards no more but datagrams to groups: the gate is opened to what else comes by itself.
    pub fn take_over_packets(&self, id: &MigrationId) {
        self.take_over(id, Takeover::take_over);
    }

    /// The source forwards no more at all, or is not waited for: the gate is opened.
    pub fn take_over_groups(&self, id: &MigrationId) {
        self.take_over(id, Takeover::take_over_groups);
    }

    fn take_over(&self, id: &MigrationId, how: fn(&mut Takeover, &mut Injector) -> Result<(), NetworkError>) {
        let Some(way_in) = &mut *self.way_in() else { return };
        if let Err(error) = how(&mut way_in.takeover, &mut way_in.injector) {
            tracing::warn!(%id, %error, "packets may be lost");
        }
        way_in.groups_are_here = !way_in.takeover.are_awaited();
        let dropped = self.ahead().dropped() + way_in.takeover.dropped();
        if dropped > 0 {
            tracing::warn!(%id, dropped, "more packets came before the gate was open than can be held; the oldest were dropped");
        }
    }

    /// Whether the gate is still to be opened, when the source has forwarded its last packets.
    pub fn awaits_last_packets(&self) -> bool {
        self.way_in().as_ref().is_some_and(|way_in| way_in.takeover.are_awaited())
    }

    /// Waits until the gate is opened, where that is still to be done.
    pub fn await_takeover(&self) {
        let deadline = Instant::now() + 2 * LAST_PACKETS;
        while self.awaits_last_packets() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The page store.
    pub fn store(&self) -> Result<Arc<Store>, Failure> {
        self.streams().store.clone().ok_or_else(|| Failure::new("there is no page store for this migration"))
    }

    /// One stream has named all that comes later.
    pub fn named(&self) {
        let mut streams = self.streams();
        streams.unnamed = streams.unnamed.saturating_sub(1);
        self.changed.notify_all();
    }

    /// The copy is READY.
    ///
    /// # Errors
    /// If a stream has failed: it will never be complete. (What is lacking of one that is READY, its source sends again.)
    pub fn made_ready(&self) -> Result<(), Failure> {
        let mut streams = self.streams();
        streams.ready = streams.failure.is_none();
        streams.failure.clone().map_or(Ok(()), Err)
    }

    /// Whether the copy is READY, or was.
    pub fn is_ready(&self) -> bool {
        self.streams().ready
    }

    /// One stream has come to its end.
    pub fn ended(&self, result: Result<(), Failure>) {
        let mut streams = self.streams();
        match result {
            Ok(()) => streams.open = streams.open.saturating_sub(1),
            Err(failure) => {
                streams.failure.get_or_insert(failure);
            }
        }
        self.changed.notify_all();
    }

    /// The failure of a stream, if one has failed.
    pub fn failed(&self) -> Option<Failure> {
        self.streams().failure.clone()
    }

    /// Waits until every stream has named all that comes later.
    pub fn wait_named(&self, timeout: Duration) -> Result<(), Failure> {
        self.wait(timeout, |streams| streams.unnamed == 0)
    }

    /// Waits until every stream has come to its end.
    pub fn wait_complete(&self, timeout: Duration) -> Result<(), Failure> {
        self.wait(timeout, |streams| streams.open == 0)
    }

    fn wait(&self, timeout: Duration, until: impl Fn(&Streams) -> bool) -> Result<(), Failure> {
        let deadline = Instant::now() + timeout;
        let mut streams = self.streams();
        loop {
            if let Some(failure) = &streams.failure {
                return Err(failure.clone());
            }
            if until(&streams) {
                return Ok(());
            }
            if streams.store.is_none() {
                return Err(Failure::new("the page store was closed"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(format!("the memory did not arrive within {timeout:?}")));
            }
            streams = self.changed.wait_timeout(streams, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
