//! What a journal can say.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{GroupId, MigrationId, NodeName, Side};

use crate::Failure;

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "record")]
pub enum Record {
    /// The migration began.
    Begin {
        /// Its id.
        id: MigrationId,
        /// Which side of it this node is.
        side: Side,
        /// The container.
        container: String,
        /// The other node.
        peer: NodeName,
        /// What the port needs to take up its work after a restart.
        context: Value,
    },
    /// A group began that moves as a whole or not at all. Its decision counts for each of its migrations, until it is in their
    /// own journals.
    Group {
        /// Its id.
        id: GroupId,
    },
    /// A step is about to be done.
    Step {
        /// Its name.
        step: String,
    },
    /// Destination: a complete, stopped copy is held; only the source's word counts from here on.
    Ready,
    /// Source: the decision. Destination: word of it has come.
    Commit,
    /// Destination: the container runs; only now may the source be told.
    Running,
    /// Destination: an operator has decided that the copy runs, since the source's host is down. It is tried until it succeeds or the
    /// source answers.
    Kept,
    /// Source: an operator has taken the decision back, since the destination is lost. The original runs again.
    GivenUp {
        /// What was said to be lost, and what it costs.
        failure: Failure,
    },
    /// The decision not to move, or that the failure was undone. On the destination also: the source gave the migration up.
    Undone {
        /// Why.
        failure: Failure,
    },
    /// Nothing is left to do.
    Done,
}

impl Record {
    /// A step's entry.
    pub fn step(step: impl std::fmt::Display) -> Self {
        Record::Step { step: step.to_string() }
    }

    /// Whether it is a journal's first record.
    pub fn is_first(&self) -> bool {
        matches!(self, Record::Begin { .. } | Record::Group { .. })
    }
}
