//! Which member of a group may enter which stage, and when.
//!
//! ```text
//!             what its destination       the link is its own              as nobody else
//!             can make ahead                                              has to do with it
//!   waiting ──▶ prepare ──▶ send ──▶ frozen ──▶ resumed (pages follow) ──▶ release ──▶ moved
//!      └───────────┴─────────┴─────────┴─▶ stopped: it runs where it was
//!           by a failure, or because one that it comes after has stopped
//! ```
//!
//! *Order.* A member sends only once all that it comes after run on the destination: so dependencies are there before their
//! dependents, both are frozen and resumed in that order, and no frozen container ever waits for another one.
//!
//! *Overlap.* While one has the link, the next one's destination is prepared, and the originals of those before are removed.
//! Moves that shared the link would each take as long as all together, and be frozen for longer.
//!
//! *Progress.* Places are given out by rank, and each member comes after lower ranks only: of those that have not ended, the
//! one of the lowest rank waits for no other one. So there is no deadlock, and at each moment some member makes progress,
//! which is why the whole takes no longer than one after the other.

use tranship_types::GroupOrder;

/// How far a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It has not begun.
    Waiting,
    /// It is looked at, and its destination prepared.
    Prepare,
    /// Its memory travels while it runs.
    Send,
    /// It is frozen: skeleton and what is left of its memory travel, and are restored.
    Frozen,
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
    /// Members that share the link: from their first byte to their last page.
    pub links: usize,
    /// Members that are frozen. Nor is a destination prepared beside so many: that takes CPU time from them.
    pub frozen: usize,
    /// Members from prepare to moved: each has memory on the destination twice.
    pub under_way: usize,
}

impl Limits {
    /// Those of an order.
    pub fn of(order: GroupOrder) -> Self {
        match order {
            // One that is released, one that is moved, one that is prepared.
            GroupOrder::Pipelined => Self { links: 1, frozen: 1, under_way: 3 },
            GroupOrder::Sequential => Self { links: 1, frozen: 1, under_way: 1 },
            GroupOrder::AllAtOnce => Self { links: usize::MAX, frozen: usize::MAX, under_way: usize::MAX },
        }
    }
}

/// The answer to a member that wants to enter a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has entered it.
    Entered,
    /// Ask again after something has happened to any other member.
    NotYet,
    /// It never will: the member of this rank, which it comes after, has stopped.
    Never(usize),
}

/// Where each member of a group is. Members are named by their rank.
#[derive(Debug, Clone)]
pub struct Schedule {
    limits: Limits,
    members: Vec<Member>,
}

#[derive(Debug, Clone)]
struct Member {
    after: Vec<usize>,
    stage: Stage,
    /// The stage that it has asked for and was not let into.
    asks: Option<Stage>,
}

impl Schedule {
    /// A group of which nobody has begun; for each member the ranks of those that it comes after, all lower than its own.
    pub fn new(after: impl IntoIterator<Item = Vec<usize>>, limits: Limits) -> Self {
        let member = |after| Member { after, stage: Stage::Waiting, asks: None };
        Self { limits, members: after.into_iter().map(member).collect() }
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

    /// A member has ended: well, or not.
    pub fn end(&mut self, member: usize, moved: bool) {
        self.members[member].stage = if moved { Stage::Moved } else { Stage::Stopped };
        self.members[member].asks = None;
    }

    /// Where a member is.
    pub fn stage(&self, member: usize) -> Stage {
        self.members[member].stage
    }

    /// The rank of one that has stopped, of those that a member comes after.
    pub fn stopped_before(&self, member: usize) -> Option<usize> {
        self.members[member].after.iter().copied().find(|before| self.stage(*before) == Stage::Stopped)
    }

    fn answer(&self, member: usize, stage: Stage) -> Answer {
        if stage <= Stage::Send
            && let Some(before) = self.stopped_before(member)
        {
            return Answer::Never(before);
        }
        let among =
            |stages: std::ops::RangeInclusive<Stage>| self.members.iter().filter(|m| stages.contains(&m.stage)).count();
        let is_free = match stage {
            Stage::Prepare => {
                among(Stage::Prepare..=Stage::Release) < self.limits.under_way
                    && among(Stage::Frozen..=Stage::Frozen) < self.limits.frozen
                    && self.members[..member].iter().all(|m| m.stage > Stage::Waiting)
            }
            Stage::Send => {
                self.runs_there(member)
                    && among(Stage::Send..=Stage::Resumed) < self.limits.links
                    && !(0..member).any(|m| self.members[m].asks == Some(stage) && self.runs_there(m))
            }
            Stage::Frozen => among(stage..=stage) < self.limits.frozen,
            _ => true,
        };
        if is_free { Answer::Entered } else { Answer::NotYet }
    }

    /// Whether all that a member comes after run on the destination.
    fn runs_there(&self, member: usize) -> bool {
        self.members[member].after.iter().all(|m| (Stage::Resumed..=Stage::Moved).contains(&self.stage(*m)))
    }
}
