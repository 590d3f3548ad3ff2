use std::fmt;

use serde::{Deserialize, Serialize};
use tranship_types::Blocker;

/// Why a step failed, ready to be shown: one sentence, and what was found in the way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What failed, on what, why, and what the user can do.
    pub message: String,
    /// Blockers, where they were the reason.
    #[serde(default)]
    pub blockers: Vec<Blocker>,
    /// The move did not fail by itself: somebody cancelled it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancelled: bool,
}

impl Failure {
    /// A failure in words.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), blockers: Vec::new(), cancelled: false }
    }

    /// The failure of a move that was cancelled.
    pub fn cancelled(message: impl Into<String>) -> Self {
        Self { cancelled: true, ..Self::new(message) }
    }

    /// A failure because of blockers; `None` if there are none.
    pub fn blocked(blockers: Vec<Blocker>) -> Option<Self> {
        let message = match blockers.as_slice() {
            [] => return None,
            [only] => only.to_string(),
            [first, rest @ ..] => format!("{first} (and {} more in the way)", rest.len()),
        };
        Some(Self { message, blockers, cancelled: false })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// Any error becomes a failure with its whole chain of causes in one sentence.
impl From<Box<dyn std::error::Error>> for Failure {
    fn from(error: Box<dyn std::error::Error>) -> Self {
        Self::new(error.to_string())
    }
}
