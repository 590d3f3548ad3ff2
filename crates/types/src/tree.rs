use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a directory of files is to its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TreeKind {
    /// What it has written over its image: the upper directory of an overlay, which the engine makes anew for it.
    WritableLayer,
    /// A volume that the engine keeps, and makes anew.
    Volume,
    /// A directory of the node itself, which has the same path on every node. It is carried only if the user says so.
    Bind,
}

impl fmt::Display for TreeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TreeKind::WritableLayer => "writable layer",
            TreeKind::Volume => "volume",
            TreeKind::Bind => "directory",
        })
    }
}

/// A directory tree on a node's disk that a container can write to, and that moves with it. `kind` and `inside` tell it from the
/// container's other ones, on both nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CarriedTree {
    /// What it is.
    pub kind: TreeKind,
    /// Where it is mounted in the container; `/` for a writable layer.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub inside: PathBuf,
    /// The directory on the source's node, absolute and without symlinks.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub path: PathBuf,
    /// Bytes of that node's disk that it took when it was looked at; 0 before.
    #[serde(default)]
    pub bytes: u64,
}

impl fmt::Display for CarriedTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.path.display())
    }
}
