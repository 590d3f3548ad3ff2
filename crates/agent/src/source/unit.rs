//! Containers that share a network namespace, and move as one unit.
//!
//! ```text
//!   owner    close to newcomers ─▶ freeze all ─▶ lock the network ─▶ dump ─▶ unread datagrams of all ─▶ … ─▶ unlock, resume
//!   others                              └─ frozen ─▶ survey ───────────┴─▶ dump ───────┘            … ─▶ resume
//! ```
//!
//! The owner's migration moves the namespace: identity, lock, packet buffer, connection tracking. The others' offers name its path. A connection between two
//! members loses nothing, because neither the interfaces nor loopback pass a segment from the first dump until the last restore.

use tranship_coordinator::Failure;
use tranship_criu::preflight::Namespaces;
use tranship_engine::{Container, Freezer};
use tranship_memory::shared::source::Segments;
use tranship_sys::awake::Awake;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::segment;

use super::{FREEZE, SourceRun, failed, original};
use crate::groups::{Turn, UnitMember};

impl SourceRun {
    /// Whether another container's migration moves the network namespace that this one lives in. Also known after a restart of the agent.
    pub(super) fn joins_network(&self) -> bool {
        self.report.read().network_owner.is_some()
    }

    /// Everything is prepared: the owner may freeze it.
    pub(super) fn enter_unit(&self, container: &Container) {
        if let Some(turn) = &self.turn {
            turn.enters_unit(UnitMember {
                container: container.clone(),
                layout: self.layout.clone(),
                namespaces: self.namespaces.clone(),
            });
        }
    }

    /// The other members of the unit, if this one owns its network.
    fn unit(&self) -> Vec<UnitMember> {
        self.turn.as_ref().map(Turn::unit_members).unwrap_or_default()
    }

    /// Their containers, and the one that holds the namespaces of a pod.
    pub(super) fn unit_containers(&self) -> Vec<Container> {
        self.unit().into_iter().map(|member| member.container).chain(self.infra()).collect()
    }

    /// Whether `/dev/shm` and the IPC namespace are those of its pod.
    pub(super) fn shares_memory(&self) -> bool {
        self.inspection.as_ref().is_some_and(|(_, offer)| offer.shares_memory)
    }

    /// The processes of the other containers of the pod, where this one's move brings what they share.
    pub(super) fn others_in_memory(&self) -> Vec<u32> {
        let brings = self.shares_memory() && !self.joins_network();
        self.others.iter().filter(|_| brings).flat_map(|other| other.processes().unwrap_or_default()).collect()
    }

    /// Which segments its move brings. `others` are the processes of [`Self::others_in_memory`], `there` the segments of [`Self::shared_segments`].
    pub(super) fn segments(&self, others: Vec<u32>, there: Vec<u64>) -> Segments {
        match (self.shares_memory(), self.joins_network()) {
            (false, _) => Segments::Own,
            (true, false) => Segments::OfAll(others),
            (true, true) => Segments::BroughtByAnother(there),
        }
    }

    /// The segments in the IPC namespace that it shares with the others of its pod.
    pub(super) fn shared_segments(&self) -> Result<Vec<u64>, Failure> {
        match self.shares_memory() {
            true => segment::ids(self.inspected()?.0.init).map_err(failed),
            false => Ok(Vec::new()),
        }
    }

    fn infra(&self) -> Option<Container> {
        self.pod.as_ref()?.infra.clone()
    }

    /// What is looked at right before the freeze: each container of the unit, its namespaces, and the others.
    pub(super) fn last_looks(&self) -> Result<Vec<(Container, Namespaces, Vec<Container>)>, Failure> {
        let mut all = vec![(self.inspected()?.0.clone(), self.namespaces.clone())];
        all.extend(self.unit().into_iter().map(|member| (member.container, member.namespaces)));
        let others = |name: &str| {
            let members = all.iter().map(|(one, _)| one).filter(|one| one.name != name).cloned();
            members.chain(self.infra()).collect()
        };
        Ok(all.iter().map(|(one, namespaces)| (one.clone(), namespaces.clone(), others(&one.name))).collect())
    }

    /// Notes for each of the others which processes a signal has stopped.
    pub(super) fn note_stopped_of_unit(&self) -> Result<(), Failure> {
        self.unit().iter().try_for_each(|member| original::note_stopped(&member.container.freezer, &member.layout))
    }

    /// Freezes the others; returns their freezers.
    pub(super) fn freeze_unit(&self) -> Result<Vec<Freezer>, Failure> {
        self.turn.as_ref().map_or(Ok(Vec::new()), |turn| turn.freeze_unit(FREEZE))
    }

    /// Thaws all.
    pub(super) fn thaw_unit(&self, own: &Freezer) -> Result<(), Failure> {
        self.turn.as_ref().map_or(Ok(()), Turn::thaw_unit)?;
        own.thaw().map_err(failed)
    }

    /// The network's owner has frozen this container with its own.
    pub(super) fn frozen_by_owner(&mut self) -> Result<(), Failure> {
        self.interrupt.freezes();
        self.unthrottle()?;
        self.lift_cpu_share()?;
        schedule::stand(Standing::Realtime);
        if let Some(front) = &self.front {
            schedule::stand_for(front.criu, Standing::Realtime);
        }
        self.awake = Awake::keep().ok();
        self.frozen_ns = self.turn.as_ref().and_then(Turn::unit_frozen_ns);
        self.still_frozen()
    }
}
