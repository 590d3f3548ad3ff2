//! The suites: which workloads are measured on which links, for which systems. A new suite is a new entry here; a new
//! kind of workload is a new variant of [`Load`].

mod blackout;
mod cold;
mod engines;
mod memory;
mod tcp;

use anyhow::{Result, bail};
use tranship_types::{EngineName, Mode};

use crate::goal::Goal;
use crate::row::Row;
use crate::workflow;

/// A set of cases, each measured for each of its systems.
#[derive(Debug)]
pub struct Suite {
    /// As `--suite` has it.
    pub name: &'static str,
    /// What it measures, in words.
    pub about: &'static str,
    /// How often each workload is moved, where nobody says otherwise.
    pub runs: u32,
    /// How often at most by what else moves such containers, which takes longer and whose figures lie closer together.
    pub rival_runs: u32,
    /// What is measured.
    pub cases: &'static [Case],
    /// What is to be reached, as far as the rows say anything of it.
    pub goals: fn(&[Row]) -> Vec<Goal>,
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
    /// What is done with it. Where Tranship moves it, so does the peer, so that both are measured in one run.
    pub systems: &'static [System],
    /// Whether both nodes have as much else to compute as they have cores.
    pub loaded: bool,
    /// How much later than it could the restore begins, in ms.
    pub delay_ms: u64,
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
#[derive(Debug, Clone, Copy)]
pub enum Load {
    /// Redis with so many keys of 100 bytes each, and the counting client.
    Redis {
        /// How many.
        keys: u64,
        /// What else is done to it.
        sets: Sets,
    },
    /// So many of those, each in a container of its own.
    Crowd {
        /// How many.
        containers: u8,
        /// How many keys each has.
        keys: u64,
    },
    /// A memory of pages that do not compress.
    Writer {
        /// Its size in bytes.
        bytes: u64,
        /// How much of it is rewritten, at places drawn at random, in 10^6 bytes a second.
        rate: u64,
    },
    /// A file in a volume, or none.
    Volume {
        /// Its size in bytes.
        bytes: u64,
        /// How much of it is rewritten, at places drawn at random, in 10^6 bytes a second.
        rate: u64,
    },
    /// A computation that writes all of its 200 MB in every iteration.
    Stencil {
        /// How many iterations there are.
        iterations: u64,
    },
    /// PostgreSQL under pgbench.
    Postgres {
        /// Its shared buffers in MiB.
        shared_mib: u32,
        /// pgbench's scale: 100,000 accounts each, about 15 MB.
        scale: u32,
    },
    /// A tree of processes that sleep most of the time.
    Tree {
        /// How many children the first one has.
        children: u32,
        /// Threads of each child.
        threads: u32,
        /// Descriptors of each child: files, pipes, sockets.
        descriptors: u32,
    },
    /// Tasks that do nothing.
    Tasks {
        /// What they are.
        kind: Tasks,
        /// How many there are.
        count: u32,
    },
    /// One process that sleeps, without a client.
    Busybox,
    /// iperf3, which sends to one on the client node.
    Iperf,
    /// A server of numbered traffic with its client, who notices whatever is lost.
    Traffic(Traffic),
}

/// Kinds of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tasks {
    /// Children that have ended, and that nobody has waited for.
    Zombies,
    /// Processes each of which is the child of the one before.
    Nested,
    /// Threads of one process.
    Threads,
    /// Children of one process.
    Processes,
}

impl Tasks {
    /// As the program calls them.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zombies => "zombies",
            Self::Nested => "nested",
            Self::Threads => "threads",
            Self::Processes => "processes",
        }
    }
}

/// What goes between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// A stream to the client, as fast as it goes.
    Bulk,
    /// So many open connections, each asked before the move and after it.
    Connections(u32),
    /// So many datagrams a second, there and back.
    Datagrams(u64),
}

/// SETs over a Redis's whole key space, by a client with several connections that sends several at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sets {
    /// None.
    Idle,
    /// So many a second.
    Rate(u64),
    /// As many as it takes.
    Full,
}

impl Load {
    /// About how much memory it takes, in bytes.
    pub fn memory(&self) -> u64 {
        match *self {
            Load::Redis { keys, .. } => keys * 200,
            Load::Crowd { containers, keys } => u64::from(containers) * (keys * 200 + 10_000_000),
            Load::Writer { bytes, .. } => bytes,
            Load::Stencil { .. } => 200_000_000,
            Load::Postgres { shared_mib, scale } => (u64::from(shared_mib) << 20) + u64::from(scale) * 16_000_000,
            Load::Tree { children, .. } => u64::from(children) * 4_000_000,
            Load::Tasks { count, .. } => u64::from(count) * 1_000_000,
            // What the kernel keeps of the file it gives back when it is needed.
            Load::Busybox | Load::Volume { .. } => 1_000_000,
            Load::Traffic(_) | Load::Iperf => 200_000_000,
        }
    }

    /// Whether it goes on after it has been checked, so that it can be moved again.
    pub fn lasts(&self) -> bool {
        match self {
            Load::Redis { sets, .. } => *sets == Sets::Idle,
            Load::Crowd { .. }
            | Load::Writer { .. }
            | Load::Volume { .. }
            | Load::Tree { .. }
            | Load::Tasks { .. }
            | Load::Busybox
            | Load::Traffic(Traffic::Connections(_)) => true,
            Load::Stencil { .. } | Load::Postgres { .. } | Load::Iperf | Load::Traffic(_) => false,
        }
    }
}

/// What is done with the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// `tranship move` in this mode.
    Tranship(Mode),
    /// The same with a container of an engine above runc.
    Managed(EngineName, Mode),
    /// The plain recipe moves it, bench/peer/recipe.sh.
    Peer,
    /// Its engine moves it, by its own checkpoint and restore.
    Own(EngineName),
    /// It is left alone, to compare with.
    Unmoved,
    /// `tranship move` in this mode of all its containers at the same time.
    AtOnce(Mode),
    /// The same of one after the other.
    OneByOne(Mode),
    /// Its writes are tracked in some stretches of time and not in others; it is not moved.
    Tracked,
}

impl System {
    /// As the results have it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tranship(_) | Self::Managed(EngineName::Runc, _) => "tranship",
            Self::Managed(EngineName::Docker, _) => "tranship docker",
            Self::Managed(EngineName::Podman, _) => "tranship podman",
            Self::Managed(EngineName::Containerd, _) => "tranship containerd",
            Self::Peer | Self::Own(EngineName::Runc) => "runc+criu",
            Self::Own(EngineName::Docker) => "docker's own",
            Self::Own(EngineName::Podman) => "podman's own",
            Self::Own(EngineName::Containerd) => "containerd's own",
            Self::AtOnce(_) => "at once",
            Self::OneByOne(_) => "one by one",
            Self::Unmoved => "unmoved",
            Self::Tracked => "tracked",
        }
    }

    /// How memory moves, as the results have it.
    pub fn mode(&self) -> Option<String> {
        match self {
            Self::Tranship(mode) | Self::Managed(_, mode) | Self::AtOnce(mode) | Self::OneByOne(mode) => {
                Some(mode.to_string())
            }
            Self::Peer | Self::Own(_) => Some(Mode::Cold.to_string()),
            Self::Unmoved | Self::Tracked => None,
        }
    }

    /// The same system, where it is Tranship in this mode.
    pub fn in_mode(self, mode: Option<Mode>) -> Self {
        match (self, mode) {
            (Self::Tranship(_), Some(mode)) => Self::Tranship(mode),
            (Self::Managed(engine, _), Some(mode)) => Self::Managed(engine, mode),
            (Self::AtOnce(_), Some(mode)) => Self::AtOnce(mode),
            (Self::OneByOne(_), Some(mode)) => Self::OneByOne(mode),
            _ => self,
        }
    }

    /// How memory moves, where Tranship moves it.
    pub fn tranship(self) -> Option<Mode> {
        match self {
            Self::Tranship(mode) | Self::Managed(_, mode) | Self::AtOnce(mode) | Self::OneByOne(mode) => Some(mode),
            Self::Peer | Self::Own(_) | Self::Unmoved | Self::Tracked => None,
        }
    }

    /// Whose container it is.
    pub fn engine(self) -> EngineName {
        match self {
            Self::Managed(engine, _) | Self::Own(engine) => engine,
            Self::Tranship(_) | Self::AtOnce(_) | Self::OneByOne(_) | Self::Peer | Self::Unmoved | Self::Tracked => {
                EngineName::Runc
            }
        }
    }

    /// Whether what it has moved can be moved back.
    pub fn returns(self) -> bool {
        match self {
            Self::Tranship(_) | Self::Managed(..) | Self::AtOnce(_) | Self::OneByOne(_) | Self::Peer => true,
            // What is the engine's own leaves a container of the same name behind.
            Self::Own(_) | Self::Unmoved | Self::Tracked => false,
        }
    }

    /// Whether it is there to be compared with.
    pub fn is_rival(self) -> bool {
        matches!(self, Self::Peer | Self::Own(_))
    }

    /// What else moves such a container.
    pub fn rival(self) -> Option<Self> {
        match self {
            Self::Tranship(_) => Some(Self::Peer),
            Self::Managed(engine, _) => Some(Self::Own(engine)),
            _ => None,
        }
    }
}

static SUITES: [Suite; 5] = [cold::SUITE, memory::SUITE, blackout::SUITE, tcp::SUITE, engines::SUITE];

/// The suite of this name.
pub fn find(name: &str) -> Result<&'static Suite> {
    let found = SUITES.iter().find(|s| s.name == name);
    match found {
        Some(suite) => Ok(suite),
        None => {
            let names: Vec<_> = SUITES.iter().map(|s| s.name).chain([workflow::NAME]).collect();
            bail!("there is no suite {name:?}; there are {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_tranship_moves_the_peer_moves_too() {
        for case in SUITES.iter().flat_map(|suite| suite.cases) {
            let has = |name: &str| case.systems.iter().any(|s| s.name() == name);
            assert_eq!(has("tranship"), has("runc+criu"), "{}", case.name());
            assert!(!case.systems.is_empty(), "{}", case.name());
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
