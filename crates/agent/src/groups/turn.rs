//! A member's turns, and what is told of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_coordinator::group::{Answer, Schedule, Stage};
use tranship_criu::preflight::Namespaces;
use tranship_engine::{Container, Freezer};
use tranship_types::{
    GroupId, GroupMember, GroupReport, MemberOutcome, MigrationId, MoveOptions, Outcome, Phase, Report, Span,
};

use super::decision::Decision;
use super::units::Unit;
use crate::interrupt::Interrupt;
use crate::layout::Layout;
use crate::node::failed;
use crate::registry::Live;

/// For how long at most a member sleeps between two questions.
const FOREVER: Duration = Duration::from_secs(3600);

/// What the members of one group share.
struct Group {
    began: Instant,
    live: Live<GroupReport>,
    schedule: Mutex<Schedule>,
    changed: Condvar,
    /// Where all move, or none does.
    decision: Option<Decision>,
    /// The unit of each member, by rank.
    units: Vec<Option<Unit>>,
    /// Members of units that are prepared, by rank.
    prepared: Mutex<Prepared>,
    /// What can end each member's migration, by rank.
    interrupts: Vec<Arc<Interrupt>>,
}

/// A member of a unit, for the one that owns its network.
#[derive(Clone)]
pub struct UnitMember {
    pub container: Container,
    pub layout: Layout,
    pub namespaces: Namespaces,
}

/// What members of units know of each other. Nobody is frozen or thawed by another member but under its lock.
#[derive(Default)]
struct Prepared {
    members: BTreeMap<usize, UnitMember>,
    /// Those that have been thawed for good.
    left: BTreeSet<usize>,
    /// When units were frozen, by their owners' ranks.
    frozen_ns: BTreeMap<usize, u64>,
}

/// One member's place in its group.
#[derive(Clone)]
pub struct Turn {
    group: Arc<Group>,
    rank: usize,
}

impl Turn {
    /// Those of all members of a group, by rank. The report is kept, for an agent that follows this one.
    pub fn of_all(
        report: &GroupReport,
        live: Live<GroupReport>,
        (schedule, units): (Schedule, Vec<Option<Unit>>),
        decision: Option<Decision>,
        options: &MoveOptions,
    ) -> std::io::Result<Vec<Turn>> {
        if let Err(error) = live.save() {
            live.end(|r| conclude(r, None));
            decision.iter().for_each(Decision::drop_undecided);
            return Err(error);
        }
        let (schedule, changed) = (Mutex::new(schedule), Condvar::new());
        let group = Arc::new(Group {
            began: Instant::now(),
            live,
            schedule,
            changed,
            decision,
            units,
            prepared: Mutex::default(),
            interrupts: report.members.iter().map(|_| Interrupt::new(options)).collect(),
        });
        for interrupt in &group.interrupts {
            let group = Arc::downgrade(&group);
            interrupt.on_raise(move || {
                if let Some(group) = group.upgrade() {
                    // With the lock: a member that has just looked, and is about to wait, is woken, too.
                    let _schedule = group.schedule.lock().unwrap_or_else(PoisonError::into_inner);
                    group.changed.notify_all();
                }
            });
        }
        Ok((0..report.members.len()).map(|rank| Turn { group: Arc::clone(&group), rank }).collect())
    }

    /// What can end its migration before the commit point, or keep it from beginning.
    pub fn interrupt(&self) -> Arc<Interrupt> {
        Arc::clone(&self.group.interrupts[self.rank])
    }

    /// Those of all members, by rank.
    pub fn interrupts(&self) -> Vec<Arc<Interrupt>> {
        self.group.interrupts.clone()
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.group.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> f64 {
        self.group.began.elapsed().as_secs_f64() * 1e3
    }

    /// Enters a stage once it may be entered; false if that is not so after `patience`. An error says that it never will.
    pub fn enter(&self, stage: Stage, patience: Duration) -> Result<bool, Failure> {
        let deadline = Instant::now() + patience;
        let mut schedule = self.schedule();
        // What this one asks for matters to others, too.
        self.group.changed.notify_all();
        loop {
            self.group.interrupts[self.rank].check()?;
            match schedule.enter(self.rank, stage) {
                Answer::Entered => break,
                Answer::Never(before) => return Err(self.in_vain(before)),
                Answer::NotYet => {}
            }
            self.spends_on(None);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            schedule = self.group.changed.wait_timeout(schedule, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(schedule);
        self.group.changed.notify_all();
        Ok(true)
    }

    /// Enters a stage, however long that takes. An error says that it never will.
    pub fn wait(&self, stage: Stage) -> Result<(), Failure> {
        while !self.enter(stage, FOREVER)? {}
        Ok(())
    }

    fn name(&self, rank: usize) -> String {
        self.group.live.read().members[rank].container.clone()
    }

    fn in_vain(&self, other: usize) -> Failure {
        let name = self.name(other);
        Failure::new(match self.is_shared() {
            true => format!("container {name} has not moved, and all of the group move or none does"),
            false => format!("container {name}, which is to move before it, has not moved"),
        })
    }

    /// The group that it is in.
    pub fn group(&self) -> GroupId {
        self.group.live.read().id
    }

    /// The other members that move to the same node at the same moment.
    pub fn at_once(&self) -> BTreeSet<String> {
        let report = self.group.live.read();
        let own = &report.members[self.rank];
        let moves_along = |one: &&GroupMember| one.destination == own.destination && one.container != own.container;
        let all = report.members.iter().filter(|_| self.is_shared()).filter(moves_along);
        all.map(|one| one.container.clone()).collect()
    }

    /// Its unit, if it shares its network namespace with others.
    pub fn unit(&self) -> Option<&Unit> {
        self.group.units.get(self.rank)?.as_ref()
    }

    /// The container whose migration moves the network namespace that this one shares.
    pub fn network_owner(&self) -> Option<String> {
        self.unit()?.owner.clone()
    }

    fn prepared(&self) -> MutexGuard<'_, Prepared> {
        self.group.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks of the other members of the unit, if this one owns its network.
    fn unit_ranks(&self) -> Vec<usize> {
        let Some(Unit { owner: None, others, .. }) = self.unit() else { return Vec::new() };
        let report = self.group.live.read();
        let is_other = |rank: &usize| others.contains(&report.members[*rank].container);
        (0..report.members.len()).filter(is_other).collect()
    }

    /// A member of a unit is prepared.
    pub fn enters_unit(&self, member: UnitMember) {
        if self.unit().is_some() {
            self.prepared().members.insert(self.rank, member);
        }
    }

    /// It is about to be thawed, and is not to be frozen again.
    pub fn leaves_unit(&self) {
        if self.unit().is_some() {
            self.prepared().left.insert(self.rank);
        }
    }

    /// The other members of the unit, if this one owns its network.
    pub fn unit_members(&self) -> Vec<UnitMember> {
        let ranks = self.unit_ranks();
        let prepared = self.prepared();
        ranks.iter().filter_map(|rank| prepared.members.get(rank).cloned()).collect()
    }

    /// Freezes the other members of the unit, which have asked for that; returns their freezers.
    pub fn freeze_unit(&self, timeout: Duration) -> Result<Vec<Freezer>, Failure> {
        let ranks = self.unit_ranks();
        let prepared = self.prepared();
        let freeze = |rank: usize| match prepared.members.get(&rank).filter(|_| !prepared.left.contains(&rank)) {
            Some(member) => {
                let freezer = member.container.freezer.clone();
                freezer.freeze(timeout).map(|()| freezer).map_err(failed)
            }
            None => Err(self.in_vain(rank)),
        };
        ranks.into_iter().map(freeze).collect()
    }

    /// Thaws them; those that have left are thawed already.
    pub fn thaw_unit(&self) -> Result<(), Failure> {
        let ranks = self.unit_ranks();
        let prepared = self.prepared();
        let here = ranks.iter().filter(|rank| !prepared.left.contains(rank));
        here.filter_map(|rank| prepared.members.get(rank))
            .try_for_each(|member| member.container.freezer.thaw().map_err(failed))
    }

    /// The unit that this member owns is frozen, since then.
    pub fn unit_frozen(&self, at_ns: u64) {
        self.prepared().frozen_ns.insert(self.rank, at_ns);
    }

    /// Since when the unit is frozen.
    pub fn unit_frozen_ns(&self) -> Option<u64> {
        let owner = self.network_owner()?;
        let rank = self.group.live.read().members.iter().position(|member| member.container == owner)?;
        self.prepared().frozen_ns.get(&rank).copied()
    }

    /// Whether all of the group move, or none does.
    pub fn is_shared(&self) -> bool {
        self.group.decision.is_some()
    }

    /// A copy of this member is held: waits until that is so for all, when the last one takes the decision for all. False if
    /// that has not come after `patience`; an error says that it never will: nobody moves, as is certain from then on.
    pub fn agree(&self, patience: Duration) -> Result<bool, Failure> {
        if !self.enter(Stage::Held, Duration::ZERO)? {
            return Ok(false);
        }
        let mut schedule = self.schedule();
        if schedule.is_unanimous() {
            let all: Vec<&Interrupt> = self.group.interrupts.iter().map(|one| &**one).collect();
            match Interrupt::decide_all(&all) {
                Ok(()) => {}
                Err((rank, failure)) if rank == self.rank => return Err(self.stop(schedule, failure)),
                Err((rank, _)) => {
                    schedule.end(rank, false);
                    let failure = self.in_vain(rank);
                    return Err(self.stop(schedule, failure));
                }
            }
        }
        if schedule.is_unanimous()
            && let Some(Err(error)) = self.group.decision.as_ref().map(Decision::take)
        {
            return Err(self.stop(schedule, Failure::new(error.to_string())));
        }
        if schedule.is_unanimous() {
            schedule.decide();
            self.group.changed.notify_all();
        }
        let interrupt = &self.group.interrupts[self.rank];
        let open = |schedule: &mut Schedule| {
            !schedule.is_decided() && schedule.stopped_before(self.rank).is_none() && !interrupt.is_raised()
        };
        let waited = self.group.changed.wait_timeout_while(schedule, patience, open);
        schedule = waited.unwrap_or_else(PoisonError::into_inner).0;
        if let Err(failure) = interrupt.check() {
            return Err(self.stop(schedule, failure));
        }
        match schedule.stopped_before(self.rank).filter(|_| !schedule.is_decided()) {
            None => Ok(schedule.is_decided()),
            Some(other) => Err(self.stop(schedule, self.in_vain(other))),
        }
    }

    /// A member that is held gives up, unless all have been decided to move meanwhile.
    pub fn leave(&self, failure: Failure) -> Result<(), Failure> {
        let schedule = self.schedule();
        if schedule.is_decided() { Ok(()) } else { Err(self.stop(schedule, failure)) }
    }

    /// Who is waited for, where this one is held.
    pub fn not_held(&self) -> Option<String> {
        let late = self.schedule().not_held();
        late.map(|rank| self.name(rank))
    }

    /// The decision is in this member's own journal.
    pub fn handed_down(&self) {
        self.group.decision.iter().for_each(Decision::handed_down);
    }

    /// It will not move: those that depend on it need not wait for all to be undone.
    pub fn stops(&self) {
        let _ = self.stop(self.schedule(), Failure::new(""));
    }

    fn stop(&self, mut schedule: MutexGuard<'_, Schedule>, failure: Failure) -> Failure {
        schedule.end(self.rank, false);
        self.group.changed.notify_all();
        failure
    }

    /// From now on its time is spent on this phase, or on waiting.
    pub fn spends_on(&self, phase: impl Into<Option<Phase>>) {
        let (now, phase) = (self.now_ms(), phase.into());
        self.group.live.change(|r| spends_on(&mut r.members[self.rank].spans, now, phase));
    }

    /// Its migration has begun.
    pub fn begun(&self, id: &MigrationId) {
        self.group.live.change(|r| {
            let member = &mut r.members[self.rank];
            (member.migration, member.outcome) = (Some(id.clone()), MemberOutcome::Running);
        });
        if let Err(error) = self.group.live.save() {
            tracing::warn!(%error, "the group's record cannot be written");
        }
    }

    /// Its migration has ended.
    pub fn ended(&self, report: &Report) {
        self.end(report.outcome == Outcome::Moved, |member| take_over(member, report));
    }

    /// It does not begin, because of another member, or because it was interrupted before.
    pub fn not_begun(&self, why: Failure) {
        let outcome = match (self.interrupt().is_raised(), why.cancelled) {
            (_, true) => MemberOutcome::Cancelled,
            (true, false) => MemberOutcome::Failed,
            (false, false) => MemberOutcome::Skipped,
        };
        self.end(false, |member| (member.outcome, member.error) = (outcome, Some(why.message)));
    }

    /// It could not begin.
    pub fn refused(&self, why: String) {
        self.end(false, |member| (member.outcome, member.error) = (MemberOutcome::Failed, Some(why)));
    }

    fn end(&self, moved: bool, change: impl FnOnce(&mut GroupMember)) {
        let mut schedule = self.schedule();
        schedule.end(self.rank, moved);
        // One that was prepared, and undone because there was no turn for it, has not failed by itself.
        let in_vain = schedule.is_in_vain(self.rank);
        self.spends_on(None);
        self.group.live.change(|r| {
            let member = &mut r.members[self.rank];
            change(member);
            if in_vain && member.outcome == MemberOutcome::Failed {
                member.outcome = MemberOutcome::Skipped;
            }
        });
        self.group.changed.notify_all();
        let report = self.group.live.read();
        if report.members.iter().all(|m| !matches!(m.outcome, MemberOutcome::Waiting | MemberOutcome::Running)) {
            self.group.live.end(|r| conclude(r, Some(self.now_ms())));
            if !schedule.is_decided() {
                self.group.decision.iter().for_each(Decision::drop_undecided);
            }
            tracing::info!(id = %report.id, "the group has ended");
        } else if let Err(error) = self.group.live.save() {
            tracing::warn!(%error, "the group's record cannot be written");
        }
    }
}

/// What the report of a migration that has ended tells of a member.
pub fn take_over(member: &mut GroupMember, report: &Report) {
    member.outcome = report.outcome.into();
    member.error.clone_from(&report.error);
    member.blackout_ms = report.blackout_ms;
    member.wire_bytes = report.progress.wire_bytes;
}

/// All members have ended.
pub fn conclude(report: &mut GroupReport, total_ms: Option<f64>) {
    let has = |outcome| report.members.iter().any(|m| m.outcome == outcome);
    report.outcome = match report.members.iter().all(|m| m.outcome == MemberOutcome::Moved) {
        true => Outcome::Moved,
        false if has(MemberOutcome::Cancelled) => Outcome::Cancelled,
        false => Outcome::Failed,
    };
    report.total_ms = total_ms;
}

/// Ends what time was spent on, and begins to spend it on something else.
fn spends_on(spans: &mut Vec<Span>, now: f64, phase: Option<Phase>) {
    if let Some(last) = spans.last_mut().filter(|last| last.ms.is_none()) {
        if phase == Some(last.phase) {
            return;
        }
        last.ms = Some(now - last.start_ms);
    }
    if let Some(phase) = phase {
        spans.push(Span { phase, start_ms: now, ms: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_spent_on_one_phase_after_the_other_or_on_waiting() {
        let mut spans = Vec::new();
        for (now, phase) in [
            (1.0, Some(Phase::Plan)),
            (2.0, Some(Phase::Prepare)),
            (3.0, Some(Phase::Prepare)),
            (5.0, None),
            (6.0, None),
            (9.0, Some(Phase::Precopy)),
            (11.0, None),
        ] {
            spends_on(&mut spans, now, phase);
        }
        let seen: Vec<_> = spans.iter().map(|s| (s.phase, s.start_ms, s.ms)).collect();
        let expected =
            [(Phase::Plan, 1.0, Some(1.0)), (Phase::Prepare, 2.0, Some(3.0)), (Phase::Precopy, 9.0, Some(2.0))];
        assert_eq!(seen, expected);
    }
}
