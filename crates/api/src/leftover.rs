use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something on a node that an operator has to see to: most often what a move has made and no move owns any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leftover {
    /// What it is.
    pub kind: LeftoverKind,
    /// Where it is: a path, or the name of a container.
    pub name: String,
    /// Whether it has been removed.
    pub removed: bool,
    /// It hinders nothing yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warning: bool,
    /// Why the agent does not remove it by itself, or could not, and what to do; empty where it can.
    #[serde(default)]
    pub note: String,
}

/// Kinds of leftovers, in the order in which they are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LeftoverKind {
    /// A migration's journal that is damaged or gone.
    Journal,
    /// A migration's directory, with the mounts below it, its front and its pager.
    Migration,
    /// The mark on a container that an engine was to restore.
    Mark,
    /// A directory tree that was being copied to this node.
    Copy,
    /// The bundle of a container that there is no more, with what its engine has left.
    Bundle,
    /// A network namespace whose gate is closed, and in which there is no container.
    Namespace,
    /// The closed gate of a container that runs.
    Gate,
    /// A container that is frozen behind a closed gate.
    Container,
    /// A userfaultfd in a container's process that was opened there for a move and not closed again.
    Userfaultfd,
    /// A certificate or revocation list that has ended, or ends soon.
    Certificate,
    /// A configuration that was not taken at a reload.
    Configuration,
    /// An address that is held for a container that has left, without a record of that, or that another one has.
    Address,
    /// Standard streams of a container that are not linked with the node that they are of.
    Stream,
    /// A VXLAN device between bridges of two nodes, or a network that is held together by one.
    Path,
    /// A kind that this version does not know: name and note tell what it is.
    #[serde(other)]
    Other,
}

impl std::fmt::Display for LeftoverKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Journal => "damaged journal",
            Self::Migration => "migration",
            Self::Mark => "mark",
            Self::Copy => "copy of files",
            Self::Bundle => "bundle",
            Self::Namespace => "network namespace",
            Self::Gate => "closed gate",
            Self::Container => "frozen container",
            Self::Userfaultfd => "userfaultfd",
            Self::Certificate => "certificate",
            Self::Configuration => "configuration",
            Self::Address => "held address",
            Self::Stream => "standard streams",
            Self::Path => "path between nodes",
            Self::Other => "other",
        })
    }
}
