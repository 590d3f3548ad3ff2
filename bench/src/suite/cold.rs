use tranship_types::Mode;

use super::{Case, Load, Sets, Suite, System};
use crate::goal::{Goal, Unit};
use crate::row::Row;

/// The most resident memory that an agent at rest may have, in bytes.
const MOST_AT_REST: f64 = 20e6;

const SYSTEMS: &[System] = &[System::Tranship(Mode::Cold), System::Peer];

pub const SUITE: Suite = Suite {
    name: "cold",
    about: "stop-and-copy of a Redis with a connected client, Tranship against the plain runc + CRIU recipe",
    runs: 5,
    rival_runs: 5,
    cases: &[
        Case {
            workload: "redis-1m",
            load: Load::Redis { keys: 1_000_000, sets: Sets::Idle },
            link: None,
            systems: SYSTEMS,
            loaded: false,
            delay_ms: 0,
        },
        Case {
            workload: "redis-4m",
            load: Load::Redis { keys: 4_000_000, sets: Sets::Idle },
            link: None,
            systems: SYSTEMS,
            loaded: false,
            delay_ms: 0,
        },
    ],
    goals,
};

fn goals(rows: &[Row]) -> Vec<Goal> {
    let ratio = rows.iter().find(|r| r.case().workload == "redis-1m").and_then(Row::ratio_client_gap);
    let gap = ratio.map(|value| Goal::at_most("client gap of redis-1m against the peer's", value, 0.5, Unit::Times));
    let rest = rows.iter().filter_map(|r| Some(r.quantity("agent_rest_bytes")?.max)).reduce(f64::max);
    let rest = rest.map(|value| Goal::at_most("memory of an agent at rest", value, MOST_AT_REST, Unit::Megabytes));
    gap.into_iter().chain(rest).collect()
}
