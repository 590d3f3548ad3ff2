use tranship_types::{EngineName, Mode};

use super::{Case, Load, Sets, Suite, System};
use crate::goal::{Goal, Unit};
use crate::row::Row;

const DOCKER: System = System::Managed(EngineName::Docker, Mode::Auto);
const PODMAN: System = System::Managed(EngineName::Podman, Mode::Auto);
const CONTAINERD: System = System::Managed(EngineName::Containerd, Mode::Auto);
const REDIS: &str = "redis-100m";
const NONE: &str = "volume-none";
const VOLUME: &str = "volume-5g";
const OWN_OF_DOCKER: System = System::Own(EngineName::Docker);
const OWN_OF_PODMAN: System = System::Own(EngineName::Podman);
const OWN_OF_CONTAINERD: System = System::Own(EngineName::Containerd);

/// How much longer than under runc alone the blackout under another engine may be, in ms.
const BEYOND_RUNC: f64 = 60.0;
/// How much longer than without a volume the blackout with one may be, in ms.
const BEYOND_NONE: f64 = 150.0;

const fn volume(workload: &'static str, bytes: u64, rate: u64) -> Case {
    Case { workload, load: Load::Volume { bytes, rate }, link: None, systems: &[DOCKER], loaded: false, delay_ms: 0 }
}

pub const SUITE: Suite = Suite {
    name: "engines",
    about: "the same Redis under runc, Docker, Podman and containerd, and by what these engines have of their own; a volume",
    runs: 5,
    rival_runs: 5,
    cases: &[
        Case {
            workload: REDIS,
            load: Load::Redis { keys: 500_000, sets: Sets::Idle },
            link: None,
            systems: &[
                System::Tranship(Mode::Auto),
                DOCKER,
                PODMAN,
                CONTAINERD,
                System::Peer,
                OWN_OF_DOCKER,
                OWN_OF_PODMAN,
                OWN_OF_CONTAINERD,
            ],
            loaded: false,
            delay_ms: 0,
        },
        volume(NONE, 0, 0),
        volume(VOLUME, 5_000_000_000, 20),
    ],
    goals,
};

fn goals(rows: &[Row]) -> Vec<Goal> {
    let of_workload = |workload: &str, system: System, name: &str| {
        let is_it = |row: &&Row| row.case().workload == workload && row.system().name() == system.name();
        rows.iter().find(is_it).and_then(|row| row.quantity(name)).map(|spread| spread.median)
    };
    let of = |system: System, name: &str| of_workload(REDIS, system, name);
    let mut goals = Vec::new();
    if let Some(runc) = of(System::Tranship(Mode::Auto), "blackout_ms") {
        for (engine, system) in [("Docker", DOCKER), ("Podman", PODMAN), ("containerd", CONTAINERD)] {
            let what = format!("blackout under {engine} beyond that under runc");
            let beyond = of(system, "blackout_ms").map(|ms| ms - runc);
            goals.extend(beyond.map(|ms| Goal::at_most(&what, ms, BEYOND_RUNC, Unit::Milliseconds)));
        }
    }
    for (engine, system, own) in [
        ("Docker", DOCKER, OWN_OF_DOCKER),
        ("Podman", PODMAN, OWN_OF_PODMAN),
        ("containerd", CONTAINERD, OWN_OF_CONTAINERD),
    ] {
        if let (Some(own), Some(ours)) = (of(own, "client_gap_ms"), of(system, "client_gap_ms")) {
            let what = format!("client gap under {engine} against its own checkpoint and restore");
            goals.push(Goal::at_most(&what, ours / own, 0.5, Unit::Times));
        }
    }
    let blackout = |workload: &str| of_workload(workload, DOCKER, "blackout_ms");
    if let (Some(volume), Some(none)) = (blackout(VOLUME), blackout(NONE)) {
        let what = "blackout with 5 GB of volume, written at 20 MB/s, beyond that without";
        goals.push(Goal::at_most(what, volume - none, BEYOND_NONE, Unit::Milliseconds));
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;

    fn row_of(case: usize, system: System, figures: &[(&'static str, f64)]) -> Row {
        Row::new(&SUITE, &SUITE.cases[case], system, &[Sample { figures: figures.to_vec(), ..Sample::default() }])
    }

    fn row(system: System, figures: &[(&'static str, f64)]) -> Row {
        row_of(0, system, figures)
    }

    #[test]
    fn a_volume_is_judged_against_none() {
        let rows = [row_of(1, DOCKER, &[("blackout_ms", 50.0)]), row_of(2, DOCKER, &[("blackout_ms", 220.0)])];
        let found: Vec<_> = goals(&rows).iter().map(|goal| (goal.value, goal.is_met())).collect();
        assert_eq!(found, [(170.0, false)]);
        assert!(goals(&rows[1..]).is_empty(), "nothing to compare with");
    }

    #[test]
    fn engines_are_judged_against_runc_of_the_same_run() {
        let rows = [
            row(System::Tranship(Mode::Auto), &[("blackout_ms", 50.0)]),
            row(DOCKER, &[("blackout_ms", 105.0), ("client_gap_ms", 120.0)]),
            row(PODMAN, &[("blackout_ms", 120.0), ("client_gap_ms", 130.0)]),
            row(CONTAINERD, &[("blackout_ms", 55.0), ("client_gap_ms", 60.0)]),
            row(System::Peer, &[("blackout_ms", 500.0), ("client_gap_ms", 510.0)]),
            row(OWN_OF_PODMAN, &[("client_gap_ms", 1300.0)]),
            row(OWN_OF_DOCKER, &[("client_gap_ms", 150.0)]),
            row(OWN_OF_CONTAINERD, &[("client_gap_ms", 600.0)]),
        ];
        let found: Vec<_> = goals(&rows).iter().map(|goal| (goal.value, goal.is_met())).collect();
        assert_eq!(found, [(55.0, true), (70.0, false), (5.0, true), (0.8, false), (0.1, true), (0.1, true)]);
        assert!(goals(&rows[1..2]).is_empty(), "nothing to compare with");
    }
}
