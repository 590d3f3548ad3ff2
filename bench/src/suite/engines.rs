use tranship_types::{EngineName, Mode};

use super::{Case, Load, Sets, Suite, System};
use crate::goal::{Goal, Unit};
use crate::row::Row;

const DOCKER: System = System::Managed(EngineName::Docker, Mode::Auto);
const PODMAN: System = System::Managed(EngineName::Podman, Mode::Auto);
const CONTAINERD: System = System::Managed(EngineName::Containerd, Mode::Auto);
const OWN: System = System::Own;

/// How much longer than under runc alone the blackout under another engine may be, in ms.
const BEYOND_RUNC: f64 = 60.0;

pub const SUITE: Suite = Suite {
    name: "engines",
    about: "the same Redis under runc, Docker, Podman and containerd, and by Podman's own checkpoint and restore",
    runs: 5,
    rival_runs: 5,
    cases: &[Case {
        workload: "redis-100m",
        load: Load::Redis { keys: 500_000, sets: Sets::Idle },
        link: None,
        systems: &[System::Tranship(Mode::Auto), DOCKER, PODMAN, CONTAINERD, System::Peer, OWN],
        loaded: false,
        delay_ms: 0,
    }],
    goals,
};

fn goals(rows: &[Row]) -> Vec<Goal> {
    let of = |system: System, name: &str| {
        let is_it = |row: &&Row| row.system().name() == system.name();
        rows.iter().find(is_it).and_then(|row| row.quantity(name)).map(|spread| spread.median)
    };
    let mut goals = Vec::new();
    if let Some(runc) = of(System::Tranship(Mode::Auto), "blackout_ms") {
        for (engine, system) in [("Docker", DOCKER), ("Podman", PODMAN), ("containerd", CONTAINERD)] {
            let what = format!("blackout under {engine} beyond that under runc");
            let beyond = of(system, "blackout_ms").map(|ms| ms - runc);
            goals.extend(beyond.map(|ms| Goal::at_most(&what, ms, BEYOND_RUNC, Unit::Milliseconds)));
        }
    }
    if let (Some(own), Some(podman)) = (of(OWN, "client_gap_ms"), of(PODMAN, "client_gap_ms")) {
        let what = "client gap under Podman against its own checkpoint and restore";
        goals.push(Goal::at_most(what, podman / own, 0.5, Unit::Times));
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;

    fn row(system: System, figures: &[(&'static str, f64)]) -> Row {
        Row::new(&SUITE, &SUITE.cases[0], system, &[Sample { figures: figures.to_vec(), ..Sample::default() }])
    }

    #[test]
    fn engines_are_judged_against_runc_of_the_same_run() {
        let rows = [
            row(System::Tranship(Mode::Auto), &[("blackout_ms", 50.0)]),
            row(DOCKER, &[("blackout_ms", 105.0)]),
            row(PODMAN, &[("blackout_ms", 120.0), ("client_gap_ms", 130.0)]),
            row(CONTAINERD, &[("blackout_ms", 55.0)]),
            row(System::Peer, &[("blackout_ms", 500.0), ("client_gap_ms", 510.0)]),
            row(OWN, &[("client_gap_ms", 1300.0)]),
        ];
        let found: Vec<_> = goals(&rows).iter().map(|goal| (goal.value, goal.is_met())).collect();
        assert_eq!(found, [(55.0, true), (70.0, false), (5.0, true), (0.1, true)]);
        assert!(goals(&rows[1..2]).is_empty(), "nothing to compare with");
    }
}
