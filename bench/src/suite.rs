//! The suites: which workloads are measured on which links, for which systems. A new suite is a new entry here; a new
//! kind of workload is a new variant of [`Load`].

use anyhow::{Result, bail};
use tranship_types::Mode;

/// A set of cases, each measured for each of the systems.
#[derive(Debug)]
pub struct Suite {
    /// As `--suite` has it.
    pub name: &'static str,
    /// What it measures, in words.
    pub about: &'static str,
    /// What is moved.
    pub cases: &'static [Case],
    /// What moves it. The peer is among them, so that both are measured in one run.
    pub systems: &'static [System],
}

/// A workload on a link.
#[derive(Debug)]
pub struct Case {
    /// As `--only` and the results have it.
    pub workload: &'static str,
    /// What runs in the container.
    pub load: Load,
    /// The speed of each node's link, as the lab reads it; `None` is as fast as the machine can.
    pub link: Option<&'static str>,
    /// The goal: Tranship's client gap over the peer's is to be at most this.
    pub most_ratio: Option<f64>,
}

impl Case {
    /// The link as the results have it.
    pub fn link_name(&self) -> &'static str {
        self.link.unwrap_or("unshaped")
    }

    /// The workload, with the link if that is a shaped one.
    pub fn name(&self) -> String {
        self.link.map_or(self.workload.to_owned(), |link| format!("{}-{link}", self.workload))
    }
}

/// What runs in the container that is moved.
#[derive(Debug)]
pub enum Load {
    /// Redis with this many keys of 100 bytes each, idle but for the counting client.
    Redis {
        /// How many.
        keys: u64,
    },
}

/// What moves the container.
#[derive(Debug, PartialEq, Eq)]
pub enum System {
    /// `tranship move` in this mode.
    Tranship(Mode),
    /// The plain recipe, bench/peer/recipe.sh.
    Peer,
}

impl System {
    /// As the results have it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tranship(_) => "tranship",
            Self::Peer => "runc+criu",
        }
    }

    /// How memory moves, as the results have it.
    pub fn mode(&self) -> String {
        match self {
            Self::Tranship(mode) => mode.to_string(),
            Self::Peer => Mode::Cold.to_string(),
        }
    }
}

static SUITES: [Suite; 1] = [Suite {
    name: "cold",
    about: "stop-and-copy of a Redis with a connected client, Tranship against the plain runc + CRIU recipe",
    cases: &[
        Case { workload: "redis-1m", load: Load::Redis { keys: 1_000_000 }, link: None, most_ratio: Some(0.5) },
        Case { workload: "redis-4m", load: Load::Redis { keys: 4_000_000 }, link: None, most_ratio: None },
    ],
    systems: &[System::Tranship(Mode::Cold), System::Peer],
}];

/// The suite of this name.
pub fn find(name: &str) -> Result<&'static Suite> {
    let found = SUITES.iter().find(|s| s.name == name);
    match found {
        Some(suite) => Ok(suite),
        None => {
            let names: Vec<_> = SUITES.iter().map(|s| s.name).collect();
            bail!("there is no suite {name:?}; there is {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_measures_the_peer_too() {
        for suite in &SUITES {
            assert!(suite.systems.contains(&System::Peer), "{}", suite.name);
            assert!(suite.systems.iter().any(|s| s.name() == "tranship"), "{}", suite.name);
        }
    }

    #[test]
    fn cases_of_a_suite_have_names_of_their_own() {
        for suite in &SUITES {
            let mut names: Vec<_> = suite.cases.iter().map(Case::name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), suite.cases.len());
        }
    }
}
