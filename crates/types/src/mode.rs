use std::fmt;

use serde::{Deserialize, Serialize};

/// How memory moves relative to the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// By measurement: rounds while the container runs; if what is left will not fit the blackout budget, the rest follows
    /// the resume.
    #[default]
    Auto,
    /// Stop-and-copy: freeze, then move everything.
    Cold,
    /// Move memory in rounds while the container runs; freeze when what is left fits the blackout budget, or rounds no
    /// longer help. Every page is on the destination before the decision.
    Precopy,
    /// Freeze at once, and move memory after the container runs on the destination: what it touches first.
    Postcopy,
    /// One round while the container runs, more while they help; what is left at the freeze follows the resume.
    Hybrid,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 5] = [Mode::Auto, Mode::Cold, Mode::Precopy, Mode::Postcopy, Mode::Hybrid];

    /// What a mode comes to: with rounds or, where the kernel cannot track writes, without; committing early or not.
    #[must_use]
    pub fn taken(rounds: bool, early: bool) -> Mode {
        match (rounds, early) {
            (true, true) => Mode::Hybrid,
            (true, false) => Mode::Precopy,
            (false, true) => Mode::Postcopy,
            (false, false) => Mode::Cold,
        }
    }

    /// Whether memory travels before the freeze.
    pub fn has_rounds(self) -> bool {
        matches!(self, Mode::Auto | Mode::Precopy | Mode::Hybrid)
    }

    /// Whether the decision may come before the last page is on the destination, so that the container then depends on
    /// both nodes until it has.
    pub fn may_commit_early(self) -> bool {
        matches!(self, Mode::Auto | Mode::Postcopy | Mode::Hybrid)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mode::Auto => "auto",
            Mode::Cold => "cold",
            Mode::Precopy => "precopy",
            Mode::Postcopy => "postcopy",
            Mode::Hybrid => "hybrid",
        })
    }
}
