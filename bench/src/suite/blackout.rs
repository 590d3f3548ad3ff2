use tranship_types::Mode;

use super::{Case, Load, Sets, Suite, System, Tasks};
use crate::goal::{Goal, Unit};
use crate::row::Row;

const SYSTEMS: &[System] = &[System::Tranship(Mode::Auto), System::Peer];
/// About 1 GB.
const REDIS: Load = Load::Redis { keys: 5_250_000, sets: Sets::Idle };
/// With their parent 64 processes, and about 1000 descriptors.
const TREE: Load = Load::Tree { children: 63, threads: 8, descriptors: 16 };
/// About 12 MB each.
const CROWD: Load = Load::Crowd { containers: 8, keys: 10_000 };
const PROCESSES: f64 = 64.0;
const BY_TASKS: &[System] = &[System::Tranship(Mode::Precopy), System::Tranship(Mode::Postcopy), System::Peer];

const fn tasks(workload: &'static str, kind: Tasks, count: u32) -> Case {
    Case { systems: BY_TASKS, ..case(workload, Load::Tasks { kind, count }, false) }
}

const fn case(workload: &'static str, load: Load, loaded: bool) -> Case {
    Case { workload, load, link: None, systems: SYSTEMS, loaded, delay_ms: 0 }
}

pub const SUITE: Suite = Suite {
    name: "blackout",
    about: "the distribution of the blackout, Tranship against the plain runc + CRIU recipe",
    runs: 30,
    rival_runs: 5,
    cases: &[
        case("redis-1g", REDIS, false),
        case("tree-64", TREE, false),
        case("busybox", Load::Busybox, false),
        case("redis-1g-loaded", REDIS, true),
        Case {
            systems: &[System::OneByOne(Mode::Auto), System::AtOnce(Mode::Auto)],
            ..case("redis-8-at-once", CROWD, false)
        },
        tasks("tasks-zombies-200", Tasks::Zombies, 200),
        tasks("tasks-zombies-2000", Tasks::Zombies, 2000),
        tasks("tasks-depth-50", Tasks::Nested, 50),
        tasks("tasks-depth-200", Tasks::Nested, 200),
        tasks("tasks-threads-200", Tasks::Threads, 200),
        tasks("tasks-threads-2000", Tasks::Threads, 2000),
        tasks("tasks-processes-16", Tasks::Processes, 16),
        tasks("tasks-processes-64", Tasks::Processes, 64),
    ],
    goals,
};

fn goals(rows: &[Row]) -> Vec<Goal> {
    let find = |workload: &str, system: &str| {
        rows.iter().find(|r| r.case().workload == workload && r.system().name() == system)
    };
    let quantile = |workload: &str, share: f64| find(workload, "tranship")?.blackout_quantile(share);
    let mut goals = Vec::new();
    for (workload, share, words, limit) in [
        ("redis-1g", 0.5, "p50", 80.0),
        ("redis-1g", 0.99, "p99", 150.0),
        ("tree-64", 0.5, "p50", 250.0),
        ("busybox", 0.5, "p50", 60.0),
        ("redis-1g-loaded", 0.99, "p99", 300.0),
    ] {
        let what = format!("blackout of {workload}, {words}");
        goals.extend(quantile(workload, share).map(|ms| Goal::at_most(&what, ms, limit, Unit::Milliseconds)));
    }
    let peer = find("redis-1g", "runc+criu").and_then(|row| row.blackout_quantile(0.5));
    if let (Some(own), Some(peer)) = (quantile("redis-1g", 0.5), peer) {
        goals.push(Goal::at_most("blackout of redis-1g against the peer's", own / peer, 1.0 / 12.0, Unit::Times));
    }
    if let (Some(tree), Some(alone)) = (quantile("tree-64", 0.5), quantile("busybox", 0.5)) {
        let each = (tree - alone) / (PROCESSES - 1.0);
        // What the two limits above leave for each of them.
        goals.push(Goal::at_most("blackout for each further process of eight threads", each, 3.0, Unit::Milliseconds));
    }
    let of_tasks = |workload: &str, mode: Mode| {
        let is_it = |row: &&Row| row.case().workload == workload && row.system() == System::Tranship(mode);
        rows.iter().find(is_it)?.blackout_quantile(0.5)
    };
    for (workload, limit) in [("tasks-zombies-2000", 150.0), ("tasks-depth-200", 500.0)] {
        let what = format!("blackout of {workload}, p50");
        goals.extend(of_tasks(workload, Mode::Precopy).map(|ms| Goal::at_most(&what, ms, limit, Unit::Milliseconds)));
    }
    let threads = [Mode::Postcopy, Mode::Precopy].map(|mode| of_tasks("tasks-threads-2000", mode));
    if let [Some(after), Some(before)] = threads {
        let what = "blackout of 2000 threads in postcopy over that in precopy";
        goals.push(Goal::at_most(what, after / before, 1.2, Unit::Times));
    }
    let of_crowd = |system: &str| find("redis-8-at-once", system)?.blackout_quantile(0.5);
    if let (Some(together), Some(alone)) = (of_crowd("at once"), of_crowd("one by one")) {
        let what = "longest blackout of eight at once over that of one by one";
        goals.push(Goal::at_most(what, together / alone, 2.0, Unit::Times));
    }
    let own = rows.iter().filter(|row| row.system().name() == "tranship");
    let rest = own.filter_map(|row| Some(row.quantity("unaccounted_ms")?.median)).reduce(f64::max);
    goals.extend(rest.map(|ms| Goal::at_most("blackout that no part accounts for", ms, 1.0, Unit::Milliseconds)));
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;

    fn row(workload: &str, system: usize, blackouts: &[f64]) -> Row {
        let case = SUITE.cases.iter().find(|c| c.workload == workload).unwrap();
        let sample =
            |ms: &f64| Sample { figures: vec![("blackout_ms", *ms), ("unaccounted_ms", 0.5)], ..Sample::default() };
        Row::new(&SUITE, case, case.systems[system], &blackouts.iter().map(sample).collect::<Vec<_>>())
    }

    #[test]
    fn each_goal_is_judged_by_its_own_rows() {
        let rows =
            [row("redis-1g", 0, &[40.0, 50.0, 160.0]), row("redis-1g", 1, &[1000.0]), row("busybox", 0, &[30.0])];
        let met: Vec<_> = goals(&rows).iter().map(Goal::is_met).collect();
        // p50, p99, busybox, against the peer's, unaccounted.
        assert_eq!(met, [true, false, true, true, true]);
        assert!(goals(&[]).is_empty());
        let rows = [row("redis-8-at-once", 0, &[40.0]), row("redis-8-at-once", 1, &[90.0])];
        assert_eq!(goals(&rows).iter().map(Goal::is_met).collect::<Vec<_>>(), [false]);
    }
}
