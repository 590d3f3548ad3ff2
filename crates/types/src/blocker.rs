use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{ALLOWABLE, escaped};

/// What kind of thing stands in the way of a move; stable names for programs, the texts are for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum BlockerKind {
    /// No container of that name on this node.
    NoSuchContainer,
    /// The container is there but not running.
    NotRunning,
    /// No node of that name is configured.
    NoSuchNode,
    /// The node does not answer.
    Unreachable,
    /// A certificate is not accepted, by either side.
    Untrusted,
    /// The peer speaks no protocol version that we do.
    Version,
    /// The destination has a container of that name.
    NameTaken,
    /// The destination has too little memory.
    Memory,
    /// The root filesystems differ.
    Rootfs,
    /// A bind mount's source is missing on the destination.
    Mount,
    /// CRIU is missing or fails its check.
    Criu,
    /// The destination's CPU lacks features.
    Cpu,
    /// A descriptor that cannot be carried over.
    Descriptor,
    /// A socket that cannot be carried over.
    Socket,
    /// A process that cannot be carried over (traced, stuck, sharing its memory …).
    Process,
    /// The network attachment cannot be made on the destination.
    Network,
    /// A move of this container is under way.
    Busy,
    /// The engine cannot be used.
    Engine,
    /// What must travel in the freeze takes longer than the freeze may.
    TooSlow,
    /// The destination does not accept such a container from this peer.
    Policy,
    /// A kind that this version does not know: the cause tells what it is.
    #[serde(other)]
    Other,
}

/// One thing that stands in the way of a move, found before anything is touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Blocker {
    /// Stable name of the kind.
    pub kind: BlockerKind,
    /// What is wrong, on what: one sentence part without a full stop, e.g. `stdout of redis-server (pid 812) is the
    /// host file /var/log/x`.
    pub cause: String,
    /// What the user can do, as an imperative without a full stop, e.g. `start the container with stdout on a pipe`.
    pub remedy: String,
    /// Pid of the process at fault, as the node sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Descriptor at fault, in that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<i32>,
    /// The kind under which a user may allow the move to lose this state (`--allow`), if that is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
    /// It passes by itself: the same move may succeed a moment later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub passes: bool,
}

impl Blocker {
    /// A blocker that is not about one process.
    pub fn new(kind: BlockerKind, cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (cause, remedy) = (escaped(&cause.into()), escaped(&remedy.into()));
        Self { kind, cause, remedy, pid: None, fd: None, allow: None, passes: false }
    }

    /// The same, naming the process and, if there is one, the descriptor.
    #[must_use]
    pub fn at(self, pid: u32, fd: Option<i32>) -> Self {
        Self { pid: Some(pid), fd, ..self }
    }

    /// The same, for what passes by itself.
    #[must_use]
    pub fn passing(self) -> Self {
        Self { passes: true, ..self }
    }

    /// The same, for state that the move may lose where the user gives `--allow KIND`; `kind` is one of [`ALLOWABLE`].
    #[must_use]
    pub fn allowable(self, kind: &'static str) -> Self {
        debug_assert!(ALLOWABLE.iter().any(|known| known.name == kind), "{kind} is no kind of ALLOWABLE");
        Self { remedy: format!("{}, or give --allow {kind}", self.remedy), allow: Some(kind.to_owned()), ..self }
    }
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.cause, self.remedy)
    }
}
