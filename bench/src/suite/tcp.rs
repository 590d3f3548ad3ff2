use tranship_types::Mode;

use super::{Case, Load, Sets, Suite, System, Traffic};
use crate::goal::{Goal, Unit};
use crate::row::Row;

const SYSTEMS: &[System] = &[System::Tranship(Mode::Auto), System::Peer];
const FEW: u32 = 100;
const MANY: u32 = 10_000;

const fn case(workload: &'static str, load: Load, link: Option<&'static str>) -> Case {
    Case { workload, load, link, systems: SYSTEMS, loaded: false, delay_ms: 0 }
}

pub const SUITE: Suite = Suite {
    name: "tcp",
    about: "what clients see of a move beyond the blackout, Tranship against the plain runc + CRIU recipe",
    runs: 10,
    rival_runs: 10,
    cases: &[
        case("request", Load::Redis { keys: 100_000, sets: Sets::Idle }, None),
        case("bulk", Load::Traffic(Traffic::Bulk), Some("1gbit")),
        Case { delay_ms: 3000, ..case("bulk-delay-3s", Load::Traffic(Traffic::Bulk), Some("1gbit")) },
        case("iperf3", Load::Iperf, Some("1gbit")),
        case("conns-100", Load::Traffic(Traffic::Connections(FEW)), None),
        case("conns-10k", Load::Traffic(Traffic::Connections(MANY)), None),
        case("udp", Load::Traffic(Traffic::Datagrams(10_000)), None),
    ],
    goals,
};

fn goals(rows: &[Row]) -> Vec<Goal> {
    let of = |workload: &str, name: &str| {
        rows.iter().find(|r| r.case().workload == workload && r.system().name() == "tranship")?.quantity(name)
    };
    let mut goals = Vec::new();
    if let Some(gap) = of("request", "gap_beyond_blackout_ms") {
        goals.push(Goal::at_most("client gap beyond the blackout, p50", gap.median, 5.0, Unit::Milliseconds));
        goals.push(Goal::at_most("client gap beyond the blackout, longest", gap.max, 20.0, Unit::Milliseconds));
    }
    for (workload, most) in [("bulk", 100.0), ("bulk-delay-3s", 200.0), ("iperf3", 100.0)] {
        let title = format!("{workload}, from the resume to 90 % of its rate");
        let regained = of(workload, "regained_ms");
        goals.extend(regained.map(|s| Goal::at_most(&title, s.median, most, Unit::Milliseconds)));
    }
    for workload in ["conns-100", "conns-10k"] {
        let lost = of(workload, "connections_lost");
        goals.extend(lost.map(|s| Goal::at_most(&format!("connections lost, {workload}"), s.max, 0.0, Unit::Count)));
    }
    if let (Some(few), Some(many)) = (of("conns-100", "blackout_ms"), of("conns-10k", "blackout_ms")) {
        let each = (many.median - few.median) * 1e3 / f64::from(MANY - FEW);
        goals.push(Goal::at_most("blackout for each further connection", each, 15.0, Unit::Microseconds));
    }
    let lost = of("udp", "datagrams_lost");
    goals.extend(lost.map(|s| Goal::at_most("datagrams lost", s.max, 0.0, Unit::Count)));
    goals
}
