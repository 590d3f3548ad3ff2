use std::path::{Path, PathBuf};

/// Why something about a container's network could not be done; the text is complete in itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The destination has something at that path already.
    #[error(
        "network namespace {} exists already; delete it with `ip netns delete` if nothing uses it, or give the container another name",
        netns.display()
    )]
    Exists {
        /// The namespace's path.
        netns: PathBuf,
    },
    /// There is no such namespace.
    #[error("there is no network namespace {}; start the container with one of that path", netns.display())]
    Missing {
        /// The namespace's path.
        netns: PathBuf,
    },
    /// The path is no network namespace.
    #[error("{} is not a network namespace; nothing was done to it, look at what it is", netns.display())]
    NotANamespace {
        /// The path.
        netns: PathBuf,
    },
    /// An interface hangs on the node in a way that cannot be made again elsewhere.
    #[error(
        "interface {interface} in network namespace {} is {kind}; only a macvlan in bridge mode and a veth whose other end is a port of a bridge of the node can be moved",
        netns.display()
    )]
    UnsupportedInterface {
        /// The namespace's path.
        netns: PathBuf,
        /// The interface's name.
        interface: String,
        /// What it is, with its article: `a vxlan`.
        kind: String,
    },
    /// Something else in the namespace that would be lost.
    #[error("network namespace {} has {what}, which cannot be moved; {remedy}", netns.display())]
    Unsupported {
        /// The namespace's path.
        netns: PathBuf,
        /// What it has, e.g. `a policy rule of priority 100`.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// What an interface is to hang on is not there.
    #[error("interface {interface} cannot be made: {why}; create {parent} or attach the container to another network")]
    Attachment {
        /// The container's interface.
        interface: String,
        /// The node's interface that is needed.
        parent: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system refused.
    #[error("cannot {what}: {why}{}{remedy}", if remedy.is_empty() { "" } else { "; " })]
    Refused {
        /// What was tried, on what.
        what: String,
        /// The system's reason.
        why: String,
        /// What the user can do, or empty where the reason says it all.
        remedy: &'static str,
    },
}

impl NetworkError {
    #[allow(clippy::needless_pass_by_value, reason = "errors are given away where they end")]
    pub(crate) fn refused(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Refused { what: what.into(), why: why.to_string(), remedy: "" }
    }

    pub(crate) fn not_a_namespace(netns: &Path) -> Self {
        Self::NotANamespace { netns: netns.to_owned() }
    }
}
