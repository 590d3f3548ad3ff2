//! Letting the held tasks go, and making them again where they were lost.
//!
//! ```text
//!   HELD ──gate opened──▶ released ──▶ RUNNING ──"fill"──▶ the pager drains
//!    │                       │
//!    └───────────┬───────────┘ criu, the front or the pager was killed
//!                ▼
//!     do the tasks run all the same? ──yes──▶ RUNNING
//!                └──no──▶ gate closed, criu and the front ended ──▶ do they run now? ──yes──▶ RUNNING
//!                              └──no──▶ everything swept, restored again from the page store ──▶ HELD
//! ```
//!
//! Until the pager is told to fill, every page is in the store, so that the copy can be made again as often as need be.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_criu::front::{self, FrontHandle, Mark, Order};
use tranship_engine::{Cpu, EngineError, State};
use tranship_memory::pager::{self, PagerHandle};
use tranship_network::{Announcer, Gate};
use tranship_sys::awake::Awake;
use tranship_sys::clock::monotonic_ns;
use tranship_sys::launch::Started;
use tranship_sys::schedule::{self, Standing};

use super::{DestinationRun, RESTORE, RESTORE_END, failed};
use crate::arrivals::LAST_PACKETS;
use crate::cpu_share;
use crate::layout::{Front, Role};
use crate::node;
use tranship_sys::{reserve, threads};

/// How long a pager or a front may take to say how it stands.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a pager may take for that which is at work, on a node that is overloaded, before what it holds counts as
/// lost. One that has ended is noticed at once; to make again what is whole takes an engine that may be as slow.
const SLOW_ANSWER: Duration = Duration::from_secs(10);
/// Descriptors that a copy is found with, or made again.
const DESCRIPTORS: usize = 16;
/// How long an engine may take to note that a container runs.
const STARTING: Duration = Duration::from_secs(3);
/// How often it is asked meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl DestinationRun {
    /// Opens the gate before which the copy is held. Not before one is: packets for connections that nobody has would be
    /// answered by resets.
    pub(super) fn open_gate(&mut self) -> Result<(), Failure> {
        if self.resumed_ns.is_none() && self.layout.root().exists() && !self.holds() {
            if !self.spoilt && self.runs_by_now()? {
                self.resumed_ns = Some(monotonic_ns());
            } else {
                self.restore_again()?;
            }
        }
        self.find_gate()?;
        let start = monotonic_ns();
        let opened = self.let_packets_in();
        self.timeline.note("network: gate opened", start, monotonic_ns());
        opened
    }

    /// Takes the gate of the network that is there, where this agent has none: after a restart of the agent, or after a restore that
    /// could not be done again.
    fn find_gate(&mut self) -> Result<(), Failure> {
        let Some((path, identity)) = self.offer.network.as_ref().filter(|_| self.gate.is_none()) else { return Ok(()) };
        self.gate = Some(Gate::prepare(path, &identity.names()).map_err(failed)?);
        self.announcer = Some(Announcer::prepare(path, identity).map_err(failed)?);
        Ok(())
    }

    /// Opens the gate, and delivers before anything else what programs had not read at the source.
    fn let_packets_in(&mut self) -> Result<(), Failure> {
        self.open_to_packets()?;
        if self.resumed_ns.is_none()
            && let Err(error) = self.inbox.deliver_ahead()
        {
            tracing::warn!(id = %self.id, %error, "datagrams that no program had read may be lost");
        }
        Ok(())
    }

    /// Opens the gate. Packets are the source's to deliver, until it says that it does no more.
    fn open_to_packets(&mut self) -> Result<(), Failure> {
        match self.inbox.open_gate(self.offer.tells_last_datagrams) {
            Some(Ok(_)) => return Ok(()),
            Some(Err(error)) => {
                tracing::warn!(id = %self.id, %error, "packets may come out of order, datagrams to groups twice");
            }
            None => {}
        }
        self.gate.as_mut().map_or(Ok(()), |gate| gate.open().map_err(failed))
    }

    /// Lets the held tasks go, and the pager put every page in place.
    pub(super) fn resume(&mut self) -> Result<(), Failure> {
        if !self.layout.root().exists() {
            // It goes only when there is nothing left to do, or with the host.
            return match self.runs() {
                true => Ok(()),
                false => Err(Failure::new(format!(
                    "the stopped copy of container {} on node {} is lost, its host was restarted; the original is still \
                     frozen on its node",
                    self.offer.container, self.node.config.node
                ))),
            };
        }
        if self.resumed_ns.is_none() {
            self.let_go()?;
        }
        self.give_cpu_share_back();
        self.await_last_packets();
        // From now on pages are put in place and given back; until here everything could have been done again.
        let told = match self.inbox.store() {
            Ok(store) => store.pager().fill(),
            Err(_) => PagerHandle::connect(self.layout.root()).and_then(|pager| pager.fill()),
        };
        match told {
            // It has ended because it was done.
            Err(_) if self.layout.root().join(pager::DRAINED_FILE).exists() => Ok(()),
            Err(error) => {
                // It was killed just when the tasks were let go.
                (self.resumed_ns, self.spoilt) = (None, true);
                Err(failed(error))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Lets criu, which waits in the container's cgroup, have all that there is of the CPUs.
    pub(super) fn lift_cpu_share(&self, criu: u32) {
        let engine = self.restoring.as_ref().map(Started::id);
        let others: Vec<u32> = engine.into_iter().chain([std::process::id()]).collect();
        let lifted = Cpu::of_process(criu, &others).map(|cpu| cpu_share::lift(&self.layout, &cpu));
        if let Some(Err(failure)) = lifted {
            tracing::warn!(id = %self.id, %failure, "the restore may take long: it has no more of the CPUs than the container");
        }
    }

    /// Gives the container, which runs now, what it may have of the CPUs.
    fn give_cpu_share_back(&mut self) {
        if let Err(failure) = cpu_share::give_back(&self.layout) {
            let (name, node) = (&self.offer.container, &self.node.config.node);
            let remark = format!(
                "cpu: {name} has no limit of its CPU time on node {node} any more ({failure}); give it one again"
            );
            tracing::error!(id = %self.id, "{remark}");
            self.remarks.push(remark);
        }
    }

    /// Has the gate opened in time, if the source does not say that it has forwarded its last packets: it may have died.
    fn await_last_packets(&self) {
        if !self.inbox.awaits_last_packets() {
            return;
        }
        let (inbox, id) = (Arc::downgrade(&self.inbox), self.id.clone());
        let started = threads::start("last packets", move || {
            std::thread::sleep(LAST_PACKETS);
            if let Some(inbox) = inbox.upgrade() {
                inbox.take_over_groups(&id);
            }
        });
        if let Err(error) = started {
            tracing::warn!(id = %self.id, %error, "packets may come out of order");
            self.inbox.take_over_groups(&self.id);
        }
    }

    fn let_go(&mut self) -> Result<(), Failure> {
        let start = monotonic_ns();
        if self.holds() && self.release_held() {
            self.timeline.note("resume", start, self.resumed_ns.unwrap_or(start));
            return Ok(());
        }
        if !self.spoilt && self.runs_by_now()? {
            // The word that it runs was lost, the tasks were not.
            self.resumed_ns.get_or_insert_with(monotonic_ns);
            return Ok(());
        }
        self.restore_again()?;
        self.let_packets_in()?;
        if self.resumed_ns.is_some() || self.release_held() {
            return Ok(());
        }
        Err(Failure::new(format!("the container could not be resumed: {}", self.layout.last_words(Role::Restore))))
    }

    /// Whether a complete, stopped copy is held now: by its front, with a pager that has every page.
    fn holds(&mut self) -> bool {
        if self.front.is_none() {
            // After a restart of the agent the front, if it still holds, is found by its socket.
            let held = |mut handle: FrontHandle| match handle.next(ANSWER) {
                Ok(Mark::Held { .. }) => Some(handle),
                _ => None,
            };
            let handle = FrontHandle::connect(&self.layout.front_socket(Role::Restore)).ok().and_then(held);
            self.front = handle.map(|handle| Front { handle, criu: 0, engine: None });
        }
        let quiet = self.front.as_ref().is_some_and(|front| front.handle.is_quiet());
        !self.spoilt && quiet && self.is_awaited() && self.pager_serves_within(SLOW_ANSWER)
    }

    /// Whether the engine waits for its restore, as far as this agent has started that: a copy whose start it has given up, or that was
    /// killed, would not be the engine's.
    pub(super) fn is_awaited(&mut self) -> bool {
        // One that was killed is a zombie for as long as its other threads take to end, and cannot be waited for yet.
        let waits =
            |restoring: &mut Started| matches!(restoring.try_wait(), Ok(None)) && node::is_alive(restoring.id());
        self.restoring.as_mut().is_none_or(waits)
    }

    /// Whether there is a pager that knows of every page.
    pub(super) fn pager_serves(&self) -> bool {
        self.pager_serves_within(ANSWER)
    }

    fn pager_serves_within(&self, patience: Duration) -> bool {
        let status = match self.inbox.store() {
            Ok(store) => store.pager().status(patience),
            Err(_) => PagerHandle::connect(self.layout.root()).and_then(|pager| pager.status(patience)),
        };
        status.is_ok_and(|status| status.named)
    }

    /// Gives the order, and waits until the last task runs. False: the front is gone, or criu is.
    fn release_held(&mut self) -> bool {
        let Some(front) = &mut self.front else { return false };
        let awake = Awake::keep();
        if front.criu != 0 {
            // All tasks wait for it.
            schedule::stand_for(front.criu, Standing::Realtime);
        }
        if front.handle.order(&Order::Release).is_err() {
            return false;
        }
        // While criu lets them go: their first packets find the switches and this node's other containers informed. The
        // announcement is repeated afterwards.
        if let Some(announcer) = &mut self.announcer
            && let Err(error) = announcer.announce()
        {
            tracing::warn!(id = %self.id, %error, "the container was not announced at once");
        }
        let deadline = Instant::now() + RESTORE;
        loop {
            match front.handle.next(deadline.saturating_duration_since(Instant::now())) {
                Ok(Mark::Resumed { at_ns }) => {
                    self.resumed_ns = Some(at_ns);
                    awake.into_iter().for_each(|awake| self.node.sleep_later(awake));
                    return true;
                }
                Ok(Mark::Done { .. }) | Err(_) => return false,
                Ok(_) => {}
            }
        }
    }

    /// Whether the tasks run although nobody said so. Criu tells the pager, and the front notes, just before they are let
    /// go; if criu fails after that it kills them.
    fn runs_by_now(&mut self) -> Result<bool, Failure> {
        if self.layout.root().join(pager::DRAINED_FILE).exists() {
            return Ok(true);
        }
        let noted = front::resumed_init(&self.layout.front_socket(Role::Restore));
        let told = PagerHandle::connect(self.layout.root()).and_then(|pager| pager.status(ANSWER));
        if noted.is_none() && !told.is_ok_and(|status| status.restored) {
            return Ok(false);
        }
        self.reinstate()?;
        Ok(self.engine.inspect(&self.offer.container).is_ok_and(|c| c.state == State::Running))
    }

    /// Keeps what the engine knows of the restored container, for [`Self::reinstate`].
    pub(super) fn remember_engine(&self) -> Result<(), Failure> {
        match self.engine.remember(&self.offer.container) {
            Some(known) => std::fs::write(self.layout.engine_state(), known).map_err(failed),
            None => Ok(()),
        }
    }

    /// Waits for the engine's process that ran the restore. If its front was killed just after it had let the tasks go, the
    /// engine takes the restore for failed, and forgets a container that runs: it is made to know it again.
    pub(super) fn reinstate(&mut self) -> Result<(), Failure> {
        if let Some(restoring) = self.restoring.take() {
            node::reap(restoring, RESTORE_END).map_err(failed)?;
        }
        let name = &self.offer.container;
        let init = front::resumed_init(&self.layout.front_socket(Role::Restore));
        let (Some(init), Ok(known)) = (init, std::fs::read(self.layout.engine_state())) else { return Ok(()) };
        match self.engine.inspect(name) {
            Err(EngineError::NoSuchContainer { .. }) if node::is_alive(init) => {
                tracing::warn!(id = %self.id, container = %name, "the engine took the restore for failed; it is told again");
                self.engine.reinstate(name, &known).map_err(failed)
            }
            _ => Ok(()),
        }
    }

    /// An engine that was killed when the container had begun to run, and before it had noted that, is told. One that takes no word of it
    /// may have removed its own name for the network namespace: it gets that again, so that the container can move on, and it is said.
    pub(super) fn look_for_overlooked(&mut self) -> Result<(), Failure> {
        let name = &self.offer.container;
        // One that an earlier agent had asked to start it may be at that still.
        let deadline = Instant::now() + STARTING;
        while !self.engine.notices(name).map_err(failed)? {
            if Instant::now() < deadline {
                std::thread::sleep(LOOK_AGAIN);
                continue;
            }
            return self.overlooked();
        }
        Ok(())
    }

    /// The engine does not know that the container runs, and will not hear of it.
    fn overlooked(&mut self) -> Result<(), Failure> {
        let name = &self.offer.container;
        let container = self.engine.inspect(name).map_err(failed)?;
        tranship_engine::Mark::take_off(&container.id);
        let theirs = container.network_namespace();
        if let (Some((path, _)), Some(theirs)) = (self.offer.network.as_ref().filter(|(path, _)| path.exists()), theirs)
        {
            tranship_network::rename(path, &theirs).map_err(failed)?;
        }
        let (engine, node) = (self.engine.name(), &self.node.config.node);
        let remark = format!(
            "engine: {engine} on node {node} was killed in the moment of the resume, and takes {name}, which runs, for a container that \
             was never started; move it on, or back: where it goes, it is {engine}'s own again"
        );
        tracing::warn!(id = %self.id, "{remark}");
        self.remarks = vec![remark];
        Ok(())
    }

    /// Makes the held copy again from the page store and the images, behind a closed gate. If its tasks turn out to run when
    /// criu and the front have ended, they are kept, and [`Self::resumed_ns`] is set; the gate is closed then, too.
    fn restore_again(&mut self) -> Result<(), Failure> {
        // They may only seem to be lost, where it could not be asked.
        if !reserve::are_there(DESCRIPTORS) {
            return Err(Failure::new(format!(
                "the agent of node {} has no descriptors left to resume container {} with; {}",
                self.node.config.node,
                self.offer.container,
                reserve::REMEDY
            )));
        }
        tracing::warn!(id = %self.id, "the held tasks are lost; restoring them again");
        // First of all what can fail for good: until then nothing is ended.
        self.revive_pager()?;
        // An engine that was restarted has removed the interfaces with the lost copy, and then there is no gate.
        if self.find_gate().is_ok()
            && let Some(gate) = &mut self.gate
        {
            gate.close().map_err(failed)?;
        }
        let node = &Arc::clone(&self.node).config.node;
        self.front = None;
        self.layout.end_front(Role::Restore, RESTORE_END)?;
        // A criu that stood still goes on with the order to release if it has got it, and the tasks run then.
        if !self.spoilt && self.runs_by_now()? {
            self.resumed_ns.get_or_insert_with(monotonic_ns);
            return Ok(());
        }
        self.sweep_engine().map_err(|failure| Failure::new(format!("on node {node}, {failure}")))?;
        // Those of the lost tasks that were never let go are gone with them: CRIU still had these sockets in repair mode.
        if let Some((path, _)) = self.offer.network.as_ref().filter(|_| !self.offer.network_shared) {
            // Connections of the lost tasks may linger in it, and would stand in the way of the restored ones.
            (self.gate, self.announcer) = (None, None);
            self.inbox.deliver_by(None);
            tranship_network::remove(path).map_err(failed)?;
            self.make_network()?;
        }
        let socket = self.layout.front_socket(Role::Restore);
        for file in [front::resumed_note(&socket), front::queues_note(&socket), socket] {
            let _ = std::fs::remove_file(file);
        }
        self.start_engine()?;
        self.restore()?;
        self.spoilt = false;
        Ok(())
    }

    /// Starts another pager on the same store where the first one was killed.
    fn revive_pager(&mut self) -> Result<(), Failure> {
        if self.pager_serves() {
            return Ok(());
        }
        let store = self.inbox.store().map_err(|_| {
            Failure::new(format!(
                "the memory of container {} was lost on node {} when both its pager and the agent were killed; the original \
                 is still frozen on its node",
                self.offer.container, self.node.config.node
            ))
        })?;
        // Tasks that were made with the lost one must not run: nobody would supply their pages.
        self.spoilt = true;
        if let Some(pager) = self.pager.take() {
            node::reap(pager, Duration::ZERO).map_err(failed)?;
        }
        for socket in [self.layout.root().join(pager::CONTROL_SOCKET), self.layout.work().join(pager::LAZY_SOCKET)] {
            let _ = std::fs::remove_file(socket);
        }
        self.pager = Some(self.layout.start_pager()?);
        PagerHandle::connect(self.layout.root()).and_then(|pager| store.replace_pager(pager)).map_err(failed)
    }
}
