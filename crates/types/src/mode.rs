use std::fmt;

use serde::{Deserialize, Serialize};

/// How memory moves relative to the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// Stop-and-copy: freeze, then move everything.
    #[default]
    Cold,
    /// Move memory in rounds while the container runs; freeze when what is left fits the blackout budget, or rounds no
    /// longer help.
    Precopy,
}

impl Mode {
    /// Whether memory travels before the freeze.
    pub fn has_rounds(self) -> bool {
        matches!(self, Mode::Precopy)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mode::Cold => "cold",
            Mode::Precopy => "precopy",
        })
    }
}
