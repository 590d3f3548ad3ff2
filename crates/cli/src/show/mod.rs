//! What users read, as text: pure functions from the API's answers, so that tests can hold the text itself.

mod evacuation;
mod group;
mod lists;
mod node;
mod plan;
pub mod report;
mod table;
mod trace;

pub use evacuation::{evacuated, evacuation};
pub use group::{bars, group};
pub use lists::{containers, held_addresses, history, kept_paths, leftovers, released, under_way};
pub use node::{node, usable};
pub use plan::{group_plan, plan};
pub use report::{details, ending, failure, report, timing};
pub use trace::trace;

use tranship_api::ErrorBody;
use tranship_types::{Blocker, Outcome, Report};

/// Why a move has failed; nothing for one that has not.
pub fn error_of(report: &Report) -> Option<ErrorBody> {
    let failed = matches!(report.outcome, Outcome::Failed | Outcome::Cancelled | Outcome::GivenUp | Outcome::Ended);
    failed.then(|| match (&report.error, report.blockers.as_slice()) {
        (Some(error), blockers) => split(error, blockers),
        (None, [one, ..]) => {
            ErrorBody { message: one.cause.clone(), remedy: one.remedy.clone(), blockers: report.blockers.clone() }
        }
        (None, []) => split(&failure(report), &[]),
    })
}

/// Why a container cannot be moved.
pub fn error_of_blockers(container: &str, blockers: &[Blocker]) -> ErrorBody {
    let (message, remedy) = match blockers {
        [one] => (one.cause.clone(), one.remedy.clone()),
        many => {
            (format!("{container} cannot be moved: {} things stand in the way", many.len()), "see `blockers`".into())
        }
    };
    ErrorBody { message, remedy, blockers: blockers.to_vec() }
}

/// A sentence `CAUSE; REMEDY` as an error.
pub fn split(sentence: &str, blockers: &[Blocker]) -> ErrorBody {
    let (message, remedy) = sentence.split_once("; ").unwrap_or((sentence, ""));
    ErrorBody { message: message.into(), remedy: remedy.into(), blockers: blockers.to_vec() }
}

/// One line for each blocker, indented: `  pid 812 fd 1: CAUSE; REMEDY`.
pub fn blockers(blockers: &[Blocker]) -> String {
    let line = |b: &Blocker| match (b.pid, b.fd) {
        (Some(pid), Some(fd)) => format!("  pid {pid} fd {fd}: {b}\n"),
        (Some(pid), None) => format!("  pid {pid}: {b}\n"),
        _ => format!("  {b}\n"),
    };
    blockers.iter().map(line).collect()
}

/// State that a move loses, as the user allowed it: `CAUSE (KIND)`.
pub fn allowed(allowed: &Blocker) -> String {
    match &allowed.allow {
        Some(kind) => format!("{} ({kind})", allowed.cause),
        None => allowed.cause.clone(),
    }
}
