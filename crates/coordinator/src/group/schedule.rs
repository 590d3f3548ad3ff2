//! Which member of a group may enter which stage, and when.
//!
//! ```text
//!             all that can be            the link is its own              as nobody else
//!             done ahead                                                  has to do with it
//!   waiting ──▶ prepare ──▶ send ──▶ frozen ──▶ resumed (pages follow) ──▶ release ──▶ moved
//!      └───────────┴─────────┴─────────┴─▶ stopped: it runs where it was
//!           by a failure, or because one that it comes after has stopped
//!
//! all or none:
//!   waiting ──▶ prepare ──▶ send ──▶ settled ──▶ poised ──▶ freezing ──▶ frozen ──▶ locked ──▶ dumped ──▶ held ──▶ resuming ──▶ resumed ──▶ …
//!                                         all settled  all poised                                  all held: the decision
//!      └───────────┴─────────┴──────────┴───────────┴──────────┴───────────┴──────────┴──────────┴─▶ stopped, because any one has
//! ```
//!
//! *Order.* A member sends only once all that it comes after run on the destination: so dependencies are there before their
//! dependents, both are frozen and resumed in that order, and no frozen container ever waits for another one.
//!
//! *Overlap.* While one has the link, the next one is prepared, and the originals of those before are removed.
//! Moves that shared the link would each take as long as all together, and be frozen for longer.
//!
//! *All or none.* Members wait for each other where that costs nothing, while they run: until little is left of each, and again
//! until that little has been sent once more. Then all are frozen, dependents before what they depend on (or in levels
//! of their own), and held until every one is. They are resumed in the other order.
//!
//! *Units.* Members that share a network namespace are one unit. Its member of the lowest rank owns the namespace: it freezes the whole unit and locks
//! the network. The others are frozen once the owner is, are dumped once the network is locked, resume after the owner, and are released before it.
//!
//! *Progress.* Places are given out by rank, and each member comes after lower ranks only: of those that have not ended, the
//! one of the lowest rank waits for no other one. So there is no deadlock, and at each moment some member makes progress,
//! which is why the whole takes no longer than one after the other. Where all wait for all, it is for a stage that each of
//! them comes to by itself.

use tranship_types::{GroupOrder, Mode};

/// How far a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It has not begun.
    Waiting,
    /// It is looked at, and all is prepared that can be, on both nodes.
    Prepare,
    /// Its memory travels while it runs.
    Send,
    /// All or none: little is left of its memory to send.
    Settled,
    /// All or none: that is so for all, and what was written meanwhile is sent.
    Poised,
    /// It is being frozen.
    Freezing,
    /// It is frozen: skeleton and what is left of its memory travel, and are restored.
    Frozen,
    /// All or none: its network is locked, and it is being dumped.
    Locked,
    /// All or none: it is dumped, and restored on the destination.
    Dumped,
    /// All or none: its copy is complete, and waits for the decision.
    Held,
    /// All or none: the decision has been taken, and its copy is let go.
    Resuming,
    /// It runs on the destination; pages may follow.
    Resumed,
    /// Its original is removed.
    Release,
    /// It has ended well.
    Moved,
    /// It has ended, and runs where it was.
    Stopped,
}

/// What may happen at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Members that are being prepared: the more at a time, the longer the link waits for the first of them.
    pub preparing: usize,
    /// Members that share the link: from their first byte to their last page.
    pub links: usize,
    /// Members that are frozen, or about to be.
    pub frozen: usize,
    /// Nothing is prepared beside so many: that takes CPU time from them.
    pub quiet: bool,
    /// Members from prepare to moved: each has memory on the destination twice.
    pub under_way: usize,
    /// All move, or none does.
    pub together: bool,
}

impl Limits {
    /// Those of an order, for moves in this mode.
    pub fn of(order: GroupOrder, mode: Mode) -> Self {
        // Where all memory travels in the freeze, that takes as long as the link needs.
        let quiet = mode != Mode::Cold;
        let most = usize::MAX;
        let unlimited = Self { preparing: most, links: most, frozen: most, quiet, under_way: most, together: false };
        let in_order = Self { preparing: 1, links: 1, ..unlimited };
        match order {
            // One that is released, one that is moved, one that is prepared.
            GroupOrder::Pipelined => Self { frozen: 1, under_way: 3, ..in_order },
            GroupOrder::Sequential => Self { frozen: 1, under_way: 1, ..in_order },
            GroupOrder::AllAtOnce => unlimited,
            GroupOrder::Atomic => Self { together: true, ..in_order },
        }
    }
}

/// The answer to a member that wants to enter a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has entered it.
    Entered,
    /// Ask again after something has happened to any other member, or one has asked for something.
    NotYet,
    /// It never will: the member of this rank has stopped, which it comes after, or without which none moves.
    Never(usize),
}

/// Where each member of a group is. Members are named by their rank.
#[derive(Debug, Clone)]
pub struct Schedule {
    limits: Limits,
    members: Vec<Member>,
    /// All or none: all move.
    decided: bool,
}

#[derive(Debug, Clone)]
struct Member {
    after: Vec<usize>,
    /// All or none: those that are frozen before it.
    stops_after: Vec<usize>,
    /// All or none: the member that owns the network namespace which it shares.
    owner: Option<usize>,
    stage: Stage,
    /// The stage that it has asked for and was not let into.
    asks: Option<Stage>,
    /// It has stopped because another one had.
    in_vain: bool,
}

impl Schedule {
    /// A group of which nobody has begun; for each member the ranks of those that it comes after, all lower than its own.
    pub fn new(after: impl IntoIterator<Item = Vec<usize>>, limits: Limits) -> Self {
        let after: Vec<Vec<usize>> = after.into_iter().collect();
        let dependents = |rank: usize| (0..after.len()).filter(|m| after[*m].contains(&rank)).collect();
        let stops_after: Vec<Vec<usize>> = (0..after.len()).map(dependents).collect();
        let member = |(after, stops_after)| Member {
            after,
            stops_after,
            owner: None,
            stage: Stage::Waiting,
            asks: None,
            in_vain: false,
        };
        Self { limits, members: after.into_iter().zip(stops_after).map(member).collect(), decided: false }
    }

    /// All or none: has members frozen in an order of its own; for each the ranks of those that are frozen before it, without
    /// a circle.
    #[must_use]
    pub fn stopping(mut self, stops_after: Vec<Vec<usize>>) -> Self {
        for (member, stops_after) in self.members.iter_mut().zip(stops_after) {
            member.stops_after = stops_after;
        }
        self
    }

    /// All or none: has members that share a network namespace move as one unit; for each the rank of the member that owns the namespace, which is the
    /// lowest of the unit, or none where it owns its own. A unit is frozen at once, before or after others as its owner's rank is above or below theirs.
    #[must_use]
    pub fn sharing(mut self, owners: &[Option<usize>]) -> Self {
        let owner_of = |rank: usize| owners.get(rank).copied().flatten().unwrap_or(rank);
        let waits: Vec<(usize, usize)> = (0..self.members.len())
            .flat_map(|rank| self.members[rank].stops_after.iter().map(move |first| (rank, *first)))
            .map(|(rank, first)| (owner_of(rank), owner_of(first)))
            .filter(|(rank, first)| rank < first)
            .collect();
        for (rank, member) in self.members.iter_mut().enumerate() {
            member.owner = owners.get(rank).copied().flatten();
            if let Some(owner) = member.owner {
                member.stops_after = vec![owner];
                if !member.after.contains(&owner) {
                    member.after.push(owner);
                }
            } else if owners.iter().any(Option::is_some) {
                let firsts = waits.iter().filter(|(own, _)| *own == rank).map(|(_, first)| *first);
                member.stops_after = firsts.collect();
            }
        }
        self
    }

    /// Lets a member into a stage, if it may enter it now.
    pub fn enter(&mut self, member: usize, stage: Stage) -> Answer {
        let answer = self.answer(member, stage);
        match answer {
            Answer::Entered => {
                self.members[member].stage = stage;
                self.members[member].asks = None;
            }
            Answer::NotYet => self.members[member].asks = Some(stage),
            Answer::Never(_) => {}
        }
        answer
    }

    /// A member has ended: well, or not. One that is known not to end well has ended then.
    pub fn end(&mut self, member: usize, moved: bool) {
        if self.stage(member) == Stage::Stopped {
            return;
        }
        self.members[member].in_vain = !moved && self.stopped_before(member).is_some();
        self.members[member].stage = if moved { Stage::Moved } else { Stage::Stopped };
        self.members[member].asks = None;
    }

    /// Whether a member has stopped because another one had, rather than by itself.
    pub fn is_in_vain(&self, member: usize) -> bool {
        self.members[member].in_vain
    }

    /// All or none: the first member that is not held yet.
    pub fn not_held(&self) -> Option<usize> {
        self.members.iter().position(|m| m.stage < Stage::Held)
    }

    /// All or none: whether it can be decided now that all move. Of one that has stopped there is no copy.
    pub fn is_unanimous(&self) -> bool {
        !self.decided && self.members.iter().all(|m| m.stage == Stage::Held)
    }

    /// All or none: the decision has been taken that all move.
    pub fn decide(&mut self) {
        self.decided = true;
    }

    /// All or none: whether it has been.
    pub fn is_decided(&self) -> bool {
        self.decided
    }

    /// Where a member is.
    pub fn stage(&self, member: usize) -> Stage {
        self.members[member].stage
    }

    /// The rank of one that has stopped, of those without which a member does not move; if there is one that did so by
    /// itself, of that.
    pub fn stopped_before(&self, member: usize) -> Option<usize> {
        let matters = |other: &usize| self.limits.together || self.members[member].after.contains(other);
        let others = (0..self.members.len()).filter(|other| *other != member && matters(other));
        others.filter(|other| self.stage(*other) == Stage::Stopped).min_by_key(|other| self.members[*other].in_vain)
    }

    fn answer(&self, member: usize, stage: Stage) -> Answer {
        // Beyond this a member moves, whatever becomes of others.
        let is_open = if self.limits.together { !self.decided } else { stage <= Stage::Send };
        if is_open && let Some(before) = self.stopped_before(member) {
            return Answer::Never(before);
        }
        if self.may_enter(member, stage) { Answer::Entered } else { Answer::NotYet }
    }

    fn may_enter(&self, member: usize, stage: Stage) -> bool {
        let together = self.limits.together;
        let among =
            |stages: std::ops::RangeInclusive<Stage>| self.members.iter().filter(|m| stages.contains(&m.stage)).count();
        match stage {
            Stage::Prepare => {
                let is_preparing = |m: &&Member| m.stage == Stage::Prepare && m.asks != Some(Stage::Send);
                self.members.iter().filter(is_preparing).count() < self.limits.preparing
                    && among(Stage::Prepare..=Stage::Release) < self.limits.under_way
                    && (!self.limits.quiet || among(Stage::Freezing..=Stage::Resuming) < self.limits.frozen)
                    && self.members[..member].iter().all(|m| m.stage > Stage::Waiting)
            }
            Stage::Send => {
                let may_send = |m: usize| together || self.runs_there(m);
                // Where all wait for all, the link is free as soon as little is left.
                let last = if together { Stage::Send } else { Stage::Resumed };
                may_send(member)
                    && among(Stage::Send..=last) < self.limits.links
                    && !(0..member).any(|m| self.members[m].asks == Some(stage) && may_send(m))
            }
            Stage::Poised => self.members.iter().all(|m| m.stage >= Stage::Settled),
            Stage::Freezing => {
                among(Stage::Freezing..=Stage::Resuming) < self.limits.frozen
                    && (!together || (self.all_poised(member) && self.may_stop(member)))
            }
            Stage::Locked => self.members[member].owner.is_none_or(|owner| self.stage(owner) >= Stage::Locked),
            Stage::Dumped => self.shares_with(member).all(|m| m.stage >= stage || m.asks == Some(stage)),
            Stage::Release if together => {
                self.shares_with(member).all(|m| matches!(m.stage, Stage::Moved | Stage::Stopped))
            }
            Stage::Resuming => {
                self.decided && self.members[member].after.iter().all(|m| self.stage(*m) >= Stage::Resumed)
            }
            _ => true,
        }
    }

    /// The members of the unit that `member` owns.
    fn shares_with(&self, member: usize) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |m| m.owner == Some(member))
    }

    /// Whether nobody but `member` has anything left to do before the freeze.
    fn all_poised(&self, member: usize) -> bool {
        let is_poised = |m: &Member| m.stage >= Stage::Freezing || m.asks == Some(Stage::Freezing);
        self.members.iter().enumerate().all(|(rank, m)| rank == member || is_poised(m))
    }

    /// Whether all are frozen that are before it.
    fn may_stop(&self, member: usize) -> bool {
        self.members[member].stops_after.iter().all(|m| self.stage(*m) >= Stage::Frozen)
    }

    /// Whether all that a member comes after run on the destination.
    fn runs_there(&self, member: usize) -> bool {
        self.members[member].after.iter().all(|m| (Stage::Resumed..=Stage::Moved).contains(&self.stage(*m)))
    }
}
