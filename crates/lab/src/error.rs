use std::io;
use std::path::PathBuf;

/// What can go wrong with a lab. The texts name the thing and, where there is one, the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The request cannot be met; the text is one sentence that says why and what to do.
    #[error("{0}")]
    Refused(String),
    /// A program that was run failed.
    #[error("{what} failed ({status}): {output}")]
    Program {
        /// What was run, and where.
        what: String,
        /// How it ended.
        status: String,
        /// What it said, trimmed.
        output: String,
    },
    /// Something on a file failed.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried, e.g. "read".
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot run {program}; is it installed? `make setup` installs what the lab needs")]
    Start {
        /// Its name.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// A connection into the lab's network failed.
    #[error("cannot talk to {address} from node {node}")]
    Connection {
        /// The node that the connection begins in.
        node: String,
        /// Where to.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// Something did not happen in time.
    #[error("{what} within {seconds} s{detail}")]
    Deadline {
        /// What was waited for, as "X did not …".
        what: String,
        /// For how long.
        seconds: u64,
        /// What is known besides; begins with punctuation, or is empty.
        detail: String,
    },
    /// Taking the lab down left something behind.
    #[error("the lab left something behind: {}", .0.join("; "))]
    Leftovers(Vec<String>),
}

impl LabError {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    pub(crate) fn start(program: &str) -> impl FnOnce(io::Error) -> Self {
        let program = program.to_owned();
        move |source| Self::Start { program, source }
    }
}

/// A result of the lab.
pub type Result<T, E = LabError> = std::result::Result<T, E>;
