use tranship_types::Mode;

use super::{Case, Load, Sets, Suite, System};
use crate::goal::{Goal, Unit};
use crate::row::Row;

const GBIT: Option<&str> = Some("1gbit");
const MOVED: &[System] = &[System::Tranship(Mode::Auto), System::Peer];
const COMPARED: &[System] = &[System::Unmoved, System::Tranship(Mode::Auto), System::Peer];
const TRACKED: &[System] = &[System::Tracked];

/// How many SETs a second keep a Redis busy: a page or two each, so that within seconds all of it is rewritten.
const BUSY: Sets = Sets::Rate(40_000);
/// About half a minute of work for two cores. Class B of NPB's BT, SP and LU, whose size the stencil has, are 0.4 to 0.7 million million
/// operations: longer on as many cores.
const WORK: Load = Load::Stencil { iterations: 3000 };

const fn moved(workload: &'static str, load: Load, link: Option<&'static str>) -> Case {
    Case { workload, load, link, systems: MOVED, loaded: false, delay_ms: 0 }
}

const fn redis(keys: u64, sets: Sets) -> Load {
    Load::Redis { keys, sets }
}

const fn writer(rate: u64) -> Load {
    Load::Writer { bytes: 4 << 30, rate }
}

const POSTGRES: Load = Load::Postgres { shared_mib: 1024, scale: 60 };

pub const SUITE: Suite = Suite {
    name: "memory",
    about: "blackout, throughput and cost against size and dirty rate, Tranship against the plain runc + CRIU recipe",
    runs: 5,
    rival_runs: 5,
    cases: &[
        moved("redis-idle-1m", redis(1_000_000, Sets::Idle), None),
        moved("redis-idle-4m", redis(4_000_000, Sets::Idle), None),
        moved("redis-idle-10m", redis(10_000_000, Sets::Idle), None),
        moved("redis-set-1m", redis(1_000_000, BUSY), None),
        moved("redis-set-2m", redis(2_000_000, BUSY), None),
        moved("writer-4g-idle", writer(0), None),
        moved("writer-4g-50", writer(50), None),
        moved("writer-4g-200", writer(200), None),
        moved("writer-4g-800", writer(800), None),
        Case { workload: "stencil", load: WORK, link: None, systems: COMPARED, loaded: false, delay_ms: 0 },
        moved("postgres", POSTGRES, None),
        moved("redis-idle-1m", redis(1_000_000, Sets::Idle), GBIT),
        moved("redis-idle-4m", redis(4_000_000, Sets::Idle), GBIT),
        moved("redis-idle-10m", redis(10_000_000, Sets::Idle), GBIT),
        moved("redis-set-1m", redis(1_000_000, BUSY), GBIT),
        moved("redis-set-2m", redis(2_000_000, BUSY), GBIT),
        moved("writer-4g-idle", writer(0), GBIT),
        moved("writer-4g-50", writer(50), GBIT),
        moved("writer-4g-200", writer(200), GBIT),
        moved("writer-4g-800", writer(800), GBIT),
        Case { workload: "stencil", load: WORK, link: GBIT, systems: COMPARED, loaded: false, delay_ms: 0 },
        moved("postgres", POSTGRES, GBIT),
        Case {
            workload: "tracking-stencil",
            load: Load::Stencil { iterations: 1_000_000 },
            link: None,
            systems: TRACKED,
            loaded: false,
            delay_ms: 0,
        },
        Case {
            workload: "tracking-redis",
            load: redis(1_000_000, Sets::Full),
            link: None,
            systems: TRACKED,
            loaded: false,
            delay_ms: 0,
        },
    ],
    goals,
};

/// Workloads that differ in size or dirty rate alone, by what their names begin with, smallest first.
const FAMILIES: [&str; 3] = ["redis-idle-", "redis-set-", "writer-4g-"];
const LINKS: [&str; 2] = ["unshaped", "1gbit"];

fn goals(rows: &[Row]) -> Vec<Goal> {
    let mut goals = Vec::new();
    for link in LINKS {
        let own: Vec<&Row> = rows.iter().filter(|r| r.case().link_name() == link).collect();
        goals.extend(of_link(&own, link));
    }
    for (workload, limit) in [("tracking-stencil", 0.02), ("tracking-redis", 0.03)] {
        let row = rows.iter().find(|r| r.case().workload == workload);
        let cost = row.and_then(|r| r.quantity("tracking_cost_share"));
        goals
            .extend(cost.map(|c| Goal::at_most(&format!("{workload}: throughput lost"), c.median, limit, Unit::Share)));
    }
    for (name, words) in [
        ("agent_source_bytes", "memory of the source's agent, beyond the page store"),
        ("agent_destination_bytes", "memory of the destination's agent, beyond the page store"),
        ("pager_bytes", "memory of the pager, beyond the page store"),
    ] {
        let most = rows.iter().filter_map(|r| Some(r.quantity(name)?.max)).reduce(f64::max);
        goals.extend(most.map(|value| Goal::at_most(words, value, 64e6, Unit::Megabytes)));
    }
    goals
}

fn of_link(rows: &[&Row], link: &str) -> Vec<Goal> {
    let find = |workload: &str, system: &str| {
        rows.iter().find(|r| r.case().workload == workload && r.system().name() == system).copied()
    };
    let median = |row: &Row, name: &str| row.quantity(name).map(|s| s.median);
    let own = |workload: &str, name: &str| median(find(workload, "tranship")?, name);
    let mut goals = Vec::new();
    for family in FAMILIES {
        let members: Vec<_> = rows
            .iter()
            .filter(|r| r.case().workload.starts_with(family) && r.system().name() == "tranship")
            .filter_map(|r| Some((r.case().workload, median(r, "blackout_ms")?)))
            .collect();
        if let [(small, first), .., (big, last)] = members.as_slice() {
            let what = format!("blackout of {big} beyond that of {small}, {link}");
            goals.push(Goal::at_most(&what, last - first, 10.0, Unit::Milliseconds));
        }
    }
    if link == "1gbit" {
        if let (Some(busy), Some(idle)) = (own("writer-4g-800", "blackout_ms"), own("writer-4g-idle", "blackout_ms")) {
            goals.push(Goal::at_most(
                "blackout of writer-4g-800 against the idle one, 1gbit",
                busy / idle,
                1.2,
                Unit::Times,
            ));
        }
        if let Some(share) = own("writer-4g-idle", "link_share") {
            goals.push(Goal::at_least("share of the link that carries pages, 1gbit", share, 0.95, Unit::Share));
        }
    } else if let Some(rate) = own("writer-4g-idle", "first_round_bytes_per_s") {
        goals.push(Goal::at_least("wire and page store, unshaped", rate, 1e9, Unit::GigabytesPerSecond));
    }
    if let Some(ratio) = find("redis-idle-10m", "tranship").and_then(Row::ratio_client_gap) {
        goals.push(Goal::at_most(
            &format!("client gap of redis-idle-10m against the peer's, {link}"),
            ratio,
            0.2,
            Unit::Times,
        ));
    }
    if let (Some(moved), Some(blackout), Some(unmoved)) = (
        own("stencil", "run_ms"),
        own("stencil", "blackout_ms"),
        find("stencil", "unmoved").and_then(|r| median(r, "run_ms")),
    ) {
        let beyond = moved - blackout - unmoved;
        let what = format!(
            "stencil's run time with one move beyond none and the blackout, {link}: {beyond:.0} ms of {:.1} s",
            unmoved / 1e3
        );
        goals.push(Goal::at_most(&what, beyond / unmoved, 0.03, Unit::Share));
    }
    // The worst of all workloads: no remote fault of any of them may take longer.
    for (name, words, limit) in [("fault_p50_us", "p50", 300.0), ("fault_p99_us", "p99", 3000.0)] {
        let worst = rows.iter().filter_map(|r| median(r, name)).reduce(f64::max);
        goals.extend(
            worst.map(|us| Goal::at_most(&format!("remote fault, {words}, {link}"), us, limit, Unit::Microseconds)),
        );
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;

    fn row(workload: &str, link: Option<&str>, system: &str, figures: &[(&'static str, f64)]) -> Row {
        let case = SUITE.cases.iter().find(|c| c.workload == workload && c.link == link).unwrap();
        let system = case.systems.iter().find(|s| s.name() == system).unwrap();
        Row::new(&SUITE, case, *system, &[Sample { figures: figures.to_vec(), ..Sample::default() }])
    }

    #[test]
    fn a_subset_is_judged_by_what_it_has() {
        assert!(goals(&[]).is_empty());
        let alone = row("writer-4g-800", GBIT, "tranship", &[("blackout_ms", 90.0)]);
        assert!(goals(&[alone]).is_empty(), "nothing to compare with");
    }

    #[test]
    fn the_busy_writer_is_compared_with_the_idle_one_of_the_same_link() {
        let rows = [
            row("writer-4g-idle", None, "tranship", &[("blackout_ms", 10.0)]),
            row("writer-4g-idle", GBIT, "tranship", &[("blackout_ms", 80.0), ("link_share", 0.951)]),
            row("writer-4g-idle", GBIT, "runc+criu", &[("blackout_ms", 40_000.0)]),
            row("writer-4g-800", GBIT, "tranship", &[("blackout_ms", 92.0)]),
        ];
        let found: Vec<_> = goals(&rows).iter().map(|g| (g.value, g.is_met())).collect();
        assert_eq!(found, [(12.0, false), (1.15, true), (0.951, true)]);
    }

    #[test]
    fn the_blackout_is_no_part_of_what_the_move_adds_to_a_run() {
        let rows = [
            row("stencil", None, "unmoved", &[("run_ms", 10_000.0)]),
            row("stencil", None, "tranship", &[("run_ms", 10_300.0), ("blackout_ms", 100.0)]),
        ];
        let found = goals(&rows);
        assert_eq!(found.len(), 1);
        assert!((found[0].value - 0.02).abs() < 1e-9 && found[0].is_met());
    }

    #[test]
    fn faults_and_memory_are_judged_by_the_worst() {
        let rows = [
            row("redis-set-1m", None, "tranship", &[("fault_p50_us", 100.0), ("pager_bytes", 3e6)]),
            row("redis-set-2m", None, "tranship", &[("fault_p50_us", 400.0), ("pager_bytes", 70e6)]),
        ];
        let found: Vec<_> = goals(&rows).iter().map(|g| (g.value, g.is_met())).collect();
        assert_eq!(found, [(400.0, false), (70e6, false)]);
    }
}
