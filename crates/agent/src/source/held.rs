//! Packets that reached the closed gate.

use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_engine::Freezer;
use tranship_network::{Backlog, HeldFrame, Hold, Injector, NetworkError, Unread};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::threads;
use tranship_types::{Blocker, BlockerKind};
use tranship_wire::message::Request;

use super::{FREEZE, SourceRun};
use crate::node::failed;
use crate::unread::Queues;

/// Bytes of packets in one message: as text they are a third longer, and a message holds 1 MiB.
const HELD_MESSAGE: usize = 512 << 10;

/// How long programs may take to accept the connections that have come before the freeze.
const ACCEPT: Duration = Duration::from_millis(150);
/// How long connections that had been asked for by then may take to be made: a round trip to the client.
const HANDSHAKE: Duration = Duration::from_millis(200);
/// How long connections that programs have closed may take to send what is left: while the container runs, and in the freeze.
const FINISH: Duration = Duration::from_secs(1);
const FINISH_FROZEN: Duration = Duration::from_millis(10);
/// How long those that were closed in the last moment may take, once, before the container is frozen again.
const FINISH_JUST_CLOSED: Duration = Duration::from_millis(150);

/// What `--allow` calls connections that cannot send all before the freeze.
const CLOSED_CONNECTIONS: &str = "closed-connections";

/// No processor carries a packet past the gate for longer, also where it is a virtual one.
const CARRIED: Duration = Duration::from_millis(50);

/// How long a switch may take to act on a report of a membership, and how often what comes here meanwhile is forwarded.
const LEARNED: Duration = Duration::from_millis(20);
const HEARD: Duration = Duration::from_millis(4);

/// How often the container is frozen at most, where packets come between its last look at them and the freeze.
const ATTEMPTS: u32 = 3;

/// How often it is frozen at most, where a program has inotify events that it has not read each time; and how long it runs then to read them.
const EVENTS: u32 = 20;
const READ: Duration = Duration::from_millis(20);

/// How often it is frozen at most, where one of its threads waits for a vforked child each time; and how long it runs then until none does.
const VFORKS: u32 = 20;
const EXEC: Duration = Duration::from_millis(20);

impl SourceRun {
    /// Lets the kernel bring to their end the connections that programs have closed, while the container runs: nobody has
    /// them, so that CRIU does not carry them, and their peers would wait for the rest for ever. Where there is always one,
    /// those that are left in the freeze are few.
    pub(super) fn let_closed_connections_finish(&mut self) {
        let Some((path, _)) = self.inspection.as_ref().and_then(|(_, offer)| offer.network.clone()) else { return };
        match Backlog::prepare(&path) {
            Ok(backlog) => self.backlog = Some(backlog),
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "what waits between programs and the network is not looked at");
                return;
            }
        }
        self.closed_have_finished = self.unfinished_after(FINISH, Duration::from_millis(1)) == 0;
    }

    /// The same in the freeze, before the gate is closed: programs close no more of them. What was sent and only lacks its acknowledgement is
    /// with the peer, or on its way to it.
    pub(super) fn let_last_connections_finish(&mut self) -> Result<(), Failure> {
        // Of each look the kernel walks through all connections of the node.
        if self.none_is_unfinished || self.unfinished_after(FINISH_FROZEN, Duration::from_micros(100)) == 0 {
            return Ok(());
        }
        let left = self.backlog.as_mut().map_or(Ok(0), Backlog::unsent).map_err(failed)?;
        if left == 0 {
            return Ok(());
        }
        let cause = format!("{left} connections that programs have closed have not sent all that was written to them");
        let remedy = "try again when their peers have taken it";
        let blocker = Blocker::new(BlockerKind::Socket, cause, remedy).passing().allowable(CLOSED_CONNECTIONS);
        let (blockers, allowed) = self.report.read().options.allow.part(vec![blocker]);
        self.report.change(|r| r.allowed.extend(allowed));
        Failure::blocked(blockers).map_or(Ok(()), Err)
    }

    /// Whether one of them has something that was never sent, or was lost on its way. A look that fails is repeated before the gate is closed.
    fn have_unsent(&mut self) -> bool {
        let Some(backlog) = &mut self.backlog else { return false };
        let unfinished = backlog.unfinished();
        self.none_is_unfinished = matches!(unfinished, Ok(0));
        let unsent = unfinished.and_then(|left| if left == 0 { Ok(0) } else { backlog.unsent() });
        unsent.is_ok_and(|left| left > 0)
    }

    /// How many of them there still are when there are none, or after so long a time; `look` lies between two looks.
    fn unfinished_after(&mut self, patience: Duration, look: Duration) -> u32 {
        let Some(backlog) = &mut self.backlog else { return 0 };
        let deadline = Instant::now() + patience;
        loop {
            match backlog.unfinished() {
                Ok(0) => return 0,
                Ok(left) if Instant::now() >= deadline || self.interrupt.is_raised() => return left,
                Ok(_) => std::thread::sleep(look),
                Err(error) => {
                    tracing::warn!(id = %self.id, %error, "connections that programs have closed are not looked at");
                    return 0;
                }
            }
        }
    }

    /// Keeps new connections and datagrams waiting at the gate until those connections that have begun are made, and programs
    /// have accepted them: CRIU can carry neither what waits to be accepted nor what waits for its handshake's end. An idle container is not
    /// kept waiting. Returns whether nothing is left.
    pub(super) fn let_backlog_drain(&mut self) -> bool {
        let (Some(hold), Some(gate), Some(backlog)) = (&mut self.hold, &mut self.gate, &mut self.backlog) else {
            return false;
        };
        let mut drain = || -> Result<(u32, u32), NetworkError> {
            hold.begin()?;
            gate.close_to_newcomers()?;
            let begun = Instant::now();
            // When the last of them was made, as far as is known.
            let mut made = begun;
            loop {
                // What passes meanwhile must not fill the hold.
                hold.collect();
                // In this order: a connection that is made waits to be accepted.
                let left = (backlog.handshakes()?, backlog.waiting()?);
                if left.0 > 0 {
                    made = Instant::now();
                }
                let over = match left.0 {
                    0 => made.elapsed() >= ACCEPT,
                    _ => begun.elapsed() >= HANDSHAKE,
                };
                if left == (0, 0) || over {
                    return Ok(left);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        };
        match drain() {
            Ok((handshakes, waiting)) => {
                if handshakes > 0 {
                    self.report.change(|r| r.ways.push(format!("network: {handshakes} connections were in the middle of their handshake; their clients have to ask again")));
                }
                if waiting > 0 {
                    self.report_lost(waiting);
                }
                (handshakes, waiting) == (0, 0)
            }
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "what waits to be accepted is not looked at");
                false
            }
        }
    }

    /// Freezes the container. If nothing waited before (`drained`) and something does now, the container runs on until that is
    /// taken: it is what another processor was carrying past the gate while it was closed to newcomers. That takes microseconds
    /// as a rule, and milliseconds where the processor is a virtual one. It runs on, too, while a program has not read its inotify events.
    pub(super) fn freeze_after_stragglers(
        &mut self,
        freezer: &Freezer,
        queues: &Queues,
        mut drained: bool,
    ) -> Result<(), Failure> {
        let (mut left, mut left_for_events) = (ATTEMPTS, EVENTS);
        let is_allowed = self.report.read().options.allow.permits(CLOSED_CONNECTIONS);
        // Of those that were closed long before, it was waited for already; the gate is closed to newcomers meanwhile.
        let mut may_wait = self.closed_have_finished && !is_allowed;
        loop {
            let (start, frozen) = self.freeze_between_vforks(freezer)?;
            if let Some(unread) = queues.unread() {
                self.thaw_unit(freezer)?;
                left_for_events -= 1;
                if left_for_events == 0 {
                    return Failure::blocked(vec![unread]).map_or(Ok(()), Err);
                }
                let deadline = Instant::now() + READ;
                while queues.unread().is_some() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_micros(200));
                }
                continue;
            }
            if may_wait && self.have_unsent() {
                tracing::info!(id = %self.id, "connections that programs have just closed have not sent all; the container runs until they have");
                self.thaw_unit(freezer)?;
                self.none_is_unfinished = false;
                may_wait = false;
                self.unfinished_after(FINISH_JUST_CLOSED, Duration::from_millis(5));
                continue;
            }
            left -= 1;
            let waiting = if drained { self.waiting_in_the_freeze() } else { 0 };
            if waiting == 0 || left == 0 {
                self.timeline.note("freeze", start, frozen);
                self.timeline.note("network: looked for what waits", frozen, monotonic_ns());
                if waiting > 0 {
                    self.report_lost(waiting);
                }
                return Ok(());
            }
            tracing::info!(id = %self.id, waiting, "packets came at the last moment; the container takes them first");
            self.thaw_unit(freezer)?;
            self.none_is_unfinished = false;
            drained = self.let_backlog_drain();
        }
    }

    /// Freezes the container at a moment at which none of its threads waits for a child that it has vforked, as shells do for each program that they
    /// start: CRIU could not stop it. Says from when to when that took.
    fn freeze_between_vforks(&mut self, freezer: &Freezer) -> Result<(u64, u64), Failure> {
        for _ in 0..VFORKS {
            self.interrupt.check()?;
            let start = monotonic_ns();
            self.frozen_ns = Some(start);
            self.interrupt.freezes();
            freezer.freeze(FREEZE.min(self.interrupt.freeze_left())).map_err(failed)?;
            let others = self.freeze_unit()?;
            if self.thaw_for_entered(freezer)? {
                continue;
            }
            let Some(waits) = [freezer].into_iter().chain(&others).find_map(|one| match one.is_vforking() {
                Ok(false) => None,
                Ok(true) => Some(Ok(one)),
                Err(error) => Some(Err(failed(error))),
            }) else {
                let frozen = monotonic_ns();
                self.turn.iter().for_each(|turn| turn.unit_frozen(start));
                return Ok((start, frozen));
            };
            let waits = waits?;
            self.thaw_unit(freezer)?;
            waits.await_vforks(EXEC).map_err(failed)?;
        }
        let cause = format!(
            "whenever the container was frozen, {VFORKS} times, a process waited for a child that it had vforked, or one had been started by exec"
        );
        let blocker = Blocker::new(BlockerKind::Process, cause, "try again when fewer programs are started").passing();
        Failure::blocked(vec![blocker]).map_or(Ok((0, 0)), Err)
    }

    fn waiting_in_the_freeze(&mut self) -> u32 {
        self.backlog.as_mut().and_then(|backlog| backlog.waiting().ok()).unwrap_or(0)
    }

    /// Puts into the report what waits, and no program took.
    pub(super) fn report_lost(&self, waiting: u32) {
        self.report.change(|r| {
            r.ways.push(format!(
                "network: {waiting} connections that no program has accepted in time; what waits there is lost"
            ));
        });
    }

    /// Sends the destination the datagrams that no program has read, while it restores: CRIU has dumped the sockets without them. Here they stay
    /// in their queues, in case the container goes on here.
    pub(super) fn send_unread(&mut self) {
        let unit = self.unit_containers();
        let Some((container, offer)) = &self.inspection else { return };
        let (Some(backlog), Some((_, identity))) = (&mut self.backlog, &offer.network) else { return };
        let start = monotonic_ns();
        let mut pids = container.processes().unwrap_or_default();
        pids.extend(unit.iter().flat_map(|other| other.processes().unwrap_or_default()));
        let Unread { mut frames, left } =
            match tranship_network::unread(backlog, identity, &pids, self.node.config.network.hold_bytes()) {
                Ok(unread) => unread,
                Err(error) => {
                    tracing::warn!(id = %self.id, %error, "datagrams that no program has read are not looked for");
                    return;
                }
            };
        if left > 0 {
            self.report.change(|r| {
                r.ways.push(format!(
                    "network: {left} sockets have datagrams that no program has read and that cannot be delivered elsewhere; they are lost"
                ));
            });
        }
        if frames.is_empty() {
            return;
        }
        let count = frames.len();
        if !self.peer_keeps_datagrams {
            let peer = &self.peer;
            self.report.change(|r| {
                r.ways.push(format!(
                    "network: {count} datagrams that no program has read; the agent of node {peer} is too old to keep them, they are lost"
                ));
            });
            return;
        }
        match self.say_held(&mut frames) {
            Ok(()) => tracing::debug!(id = %self.id, count, "unread datagrams sent"),
            // Whoever waits for the answer on the same link will say so.
            Err(failure) => tracing::warn!(id = %self.id, %failure, count, "unread datagrams were not sent"),
        }
        self.timeline.note("network: unread datagrams", start, monotonic_ns());
    }

    /// First the survey, then the gate: what is on its way to the container meanwhile is still taken in by its sockets, which
    /// criu has not looked at yet, and travels with them. A client that waits for one answer has nothing to send again.
    pub(super) fn close_gate(&mut self) -> Result<(), Failure> {
        self.survey()?;
        let surveyed = monotonic_ns();
        self.let_last_connections_finish()?;
        self.timeline.note("network: connections ended", surveyed, monotonic_ns());
        if let Some(hold) = &mut self.hold
            && let Err(error) = hold.begin()
        {
            tracing::warn!(id = %self.id, %error, "packets are not held");
            self.hold = None;
        }
        let Some(gate) = &mut self.gate else { return Ok(()) };
        self.timeline.time("network: gate closed", || gate.close_still()).map_err(failed)?;
        self.gate_closed = Some(Instant::now());
        Ok(())
    }

    /// Opens the original's gate, which goes on here after all. Where datagrams were held, what was held is delivered before what comes then.
    pub(super) fn open_gate_in_order(&mut self) -> Result<(), Failure> {
        self.take_before_opening();
        let Some(gate) = &mut self.gate else { return Ok(()) };
        let network = self.inspection.as_ref().and_then(|(_, offer)| offer.network.as_ref());
        if let (Some(hold), Some((path, identity))) = (&mut self.hold, network)
            && self.held.iter().any(HeldFrame::is_datagram)
            && let Ok(mut way_in) = Injector::prepare(path, identity)
        {
            match tranship_network::reopen(gate, hold, &self.held, &mut way_in) {
                Ok(()) => {
                    self.held.clear();
                    self.hold.take().iter().for_each(|hold| self.report_dropped(hold));
                    return Ok(());
                }
                Err(error) => tracing::warn!(id = %self.id, %error, "datagrams may be lost, or out of order"),
            }
        }
        gate.open().map_err(failed)
    }

    /// Takes what was held, for the original, right before its gate is opened. What another processor may have been carrying past
    /// the gate when it closed is left to the hold, which finds out; where it has datagrams, it is waited for.
    fn take_before_opening(&mut self) {
        let (Some(hold), Some(closed)) = (&mut self.hold, self.gate_closed) else { return };
        if hold.has_datagrams() {
            std::thread::sleep(CARRIED.saturating_sub(closed.elapsed()));
        }
        if closed.elapsed() >= CARRIED {
            self.held.extend(hold.take());
        }
    }

    /// Delivers the held packets to the original, which goes on here after all. The gate is open.
    pub(super) fn deliver_here(&mut self) {
        let Some(mut hold) = self.hold.take() else { return };
        let Some((path, identity)) = self.inspection.as_ref().and_then(|(_, offer)| offer.network.as_ref()) else {
            return;
        };
        // In their order; the way in is made only if it is needed, since its end waits for grace periods of the kernel.
        let mut way_in = None;
        let mut deliver = |frames: Vec<HeldFrame>| match (frames.is_empty(), &mut way_in) {
            (true, _) => Ok(0),
            (false, Some(way_in)) => Injector::inject(way_in, &frames),
            (false, none) => none.insert(Injector::prepare(path, identity)?).inject(&frames),
        };
        let delivered = deliver(std::mem::take(&mut self.held)).and_then(|_| deliver(hold.finish()));
        if let Err(error) = delivered {
            tracing::warn!(id = %self.id, %error, "held packets could not be delivered; they will be sent again");
        }
        self.report_dropped(&hold);
        // So does the end of each of its sockets, and the container is frozen still.
        let _ = threads::start("hold", move || drop(hold));
    }

    /// Puts into the report how many packets were more than can be held.
    pub(super) fn report_dropped(&self, hold: &Hold) {
        if hold.dropped() > 0 {
            let way = format!("network: {} packets more than can be held were dropped, the oldest", hold.dropped());
            self.report.change(|r| r.ways.push(way));
        }
    }

    /// Sends the packets that were held since the last time to where the container is now.
    pub(super) fn forward_held(&mut self) -> Result<(), Failure> {
        // What the last try has left is sent first: as long as that fails the rest stays in the hold, which has a bound.
        self.say_taken()?;
        if let Some(hold) = &mut self.hold {
            self.held = hold.take();
        }
        self.say_taken()
    }

    fn say_taken(&mut self) -> Result<(), Failure> {
        let mut held = std::mem::take(&mut self.held);
        let said = self.say_held(&mut held);
        self.held = held;
        said
    }

    /// Sends packets to where the container is to be delivered, and takes away what was sent.
    fn say_held(&mut self, held: &mut Vec<HeldFrame>) -> Result<(), Failure> {
        while !held.is_empty() {
            let mut bytes = 0;
            let fits = |frame: &&HeldFrame| {
                bytes += frame.bytes.len();
                bytes <= HELD_MESSAGE
            };
            let count = held.iter().take_while(fits).count().max(1);
            let frames = serde_json::to_value(&held[..count]).unwrap_or_default();
            self.say(&Request::Held { frames, last_datagrams: false, last_to_groups: false })?;
            held.drain(..count);
        }
        Ok(())
    }

    /// Forwards what came here until the container was announced there. What comes now comes there by itself, and is behind that; but what is
    /// to groups, or comes from this node.
    pub(super) fn hand_packets_over(&mut self) -> Result<(), Failure> {
        self.forward_held()?;
        self.say_last_packets(false)
    }

    /// Says that no packets follow any more, or none but datagrams to groups.
    fn say_last_packets(&mut self, last_to_groups: bool) -> Result<(), Failure> {
        let frames = serde_json::Value::Array(Vec::new());
        self.say(&Request::Held { frames, last_datagrams: true, last_to_groups })
    }

    /// Has the destination hear datagrams to groups by itself: its switch has been told that there is a member now. Until then they
    /// are forwarded.
    pub(super) fn hand_groups_over(&mut self) -> Result<(), Failure> {
        if !self.has_groups || self.hold.is_none() {
            return Ok(());
        }
        for _ in 0..LEARNED.as_millis() / HEARD.as_millis() {
            std::thread::sleep(HEARD);
            self.forward_held()?;
        }
        self.say_last_packets(true)?;
        if let Some(hold) = &mut self.hold {
            hold.leave_groups();
        }
        Ok(())
    }
}
