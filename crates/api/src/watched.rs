use std::fmt::{Debug, Display};
use std::hash::Hash;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tranship_types::{GroupId, GroupReport, MigrationId, Outcome, Report};

/// A report of something that is followed from its begin to its end.
pub trait Watched: Debug + Clone + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What the report is of.
    type Id: Debug + Display + Clone + Eq + Hash + Send + Sync;
    /// Where the API has such reports.
    const PATH: &'static str;

    /// Which one it is of.
    fn id(&self) -> &Self::Id;

    /// How it ended, or that it has not.
    fn outcome(&self) -> Outcome;

    /// When it began, in ms since the Unix epoch.
    fn started_unix_ms(&self) -> u64;
}

impl Watched for Report {
    type Id = MigrationId;
    const PATH: &'static str = "/v1/migrations";

    fn id(&self) -> &MigrationId {
        &self.id
    }

    fn outcome(&self) -> Outcome {
        self.outcome
    }

    fn started_unix_ms(&self) -> u64 {
        self.started_unix_ms
    }
}

impl Watched for GroupReport {
    type Id = GroupId;
    const PATH: &'static str = "/v1/groups";

    fn id(&self) -> &GroupId {
        &self.id
    }

    fn outcome(&self) -> Outcome {
        self.outcome
    }

    fn started_unix_ms(&self) -> u64 {
        self.started_unix_ms
    }
}
