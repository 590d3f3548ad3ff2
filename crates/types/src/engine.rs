use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A container engine that Tranship moves containers of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum EngineName {
    /// runc, by its own command line.
    Runc,
    /// Docker.
    Docker,
    /// Podman.
    Podman,
    /// containerd, for the containers of `ctr`.
    Containerd,
}

impl EngineName {
    /// All of them.
    pub const ALL: [EngineName; 4] = [EngineName::Runc, EngineName::Docker, EngineName::Podman, EngineName::Containerd];

    /// As users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            EngineName::Runc => "runc",
            EngineName::Docker => "docker",
            EngineName::Podman => "podman",
            EngineName::Containerd => "containerd",
        }
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for EngineName {
    type Err = String;

    /// Reads a name as [`EngineName::as_str`] writes it; the error names those that there are.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|engine| engine.as_str() == text).ok_or_else(|| {
            let known = Self::ALL.map(Self::as_str).join(", ");
            format!("there is no engine {text:?}; use one of {known}")
        })
    }
}
