use jiff::tz::TimeZone;
use tranship_api::{ContainerInfo, ContainerState, HeldAddresses, KeptPath, Leftover};
use tranship_types::{Outcome, Report};

use super::table::{Column, table};
use crate::progress::{percent, time_left};
use crate::units::{about, bytes, duration, rate, since, when};

const NOTHING: &str = "-";

fn or_nothing<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NOTHING.to_owned(), show)
}

/// `tranship ls`.
pub fn containers(list: &[ContainerInfo], now_unix_ms: u64) -> String {
    if list.is_empty() {
        return "no containers on this node\n".to_owned();
    }
    let columns = [
        Column::Text("NAME"),
        Column::Text("ENGINE"),
        Column::Text("STATE"),
        Column::Number("PID"),
        Column::Number("MEMORY"),
        Column::Number("SINCE"),
    ];
    let state = |c: &ContainerInfo| match (&c.migration, c.state) {
        (Some(id), _) => format!("moving ({id})"),
        (_, ContainerState::Created) => "created".into(),
        (_, ContainerState::Running) => "running".into(),
        (_, ContainerState::Paused) => "paused".into(),
        (_, ContainerState::Stopped) => "stopped".into(),
        (_, ContainerState::Unknown) => "unknown".into(),
    };
    let row = |c: &ContainerInfo| {
        vec![
            c.name.clone(),
            c.engine.clone(),
            state(c),
            or_nothing(c.pid, |p| p.to_string()),
            or_nothing(c.memory_bytes, bytes),
            or_nothing(c.created_unix_ms, |t| since(t, now_unix_ms)),
        ]
    };
    table("", &columns, list.iter().map(row))
}

/// `tranship status` without an id.
pub fn under_way(list: &[Report], now_unix_ms: u64) -> String {
    let mut running = list.iter().filter(|r| r.outcome == Outcome::Running).peekable();
    if running.peek().is_none() {
        return "no move is under way\n".to_owned();
    }
    let columns = [
        Column::Text("ID"),
        Column::Text("CONTAINER"),
        Column::Text("FROM → TO"),
        Column::Text("PHASE"),
        Column::Number("MOVED"),
        Column::Number("OF"),
        Column::Number("DONE"),
        Column::Number("RATE"),
        Column::Number("LEFT"),
        Column::Number("SINCE"),
    ];
    let row = |r: &Report| {
        vec![
            r.id.to_string(),
            r.container.clone(),
            format!("{} → {}", r.source, r.destination),
            r.phase.to_string(),
            bytes(r.progress.moved_bytes),
            bytes(r.progress.memory_bytes),
            or_nothing(percent(r), |done| done),
            rate(r.progress.rate),
            or_nothing(time_left(r), about),
            since(r.started_unix_ms, now_unix_ms),
        ]
    };
    let why = |r: &Report| r.error.as_ref().map(|error| format!("{}: {error}\n", r.container));
    let doubt = |r: &Report| super::report::in_doubt(r).map(|how| why(r).unwrap_or_default() + &how);
    let lines = |r: &Report| [super::report::depends(r), super::report::waits(r, now_unix_ms), doubt(r)];
    let below: String = list.iter().flat_map(lines).flatten().collect();
    table("", &columns, running.map(row)) + &below
}

/// The networks that are held together with other nodes', below `tranship status` without an id.
pub fn kept_paths(list: &[KeptPath]) -> String {
    list.iter().map(|path| format!("{path}\n")).collect()
}

/// `tranship history`.
pub fn history(list: &[Report], zone: &TimeZone) -> String {
    let mut ended = list.iter().filter(|r| r.outcome != Outcome::Running).peekable();
    if ended.peek().is_none() {
        return "no move has ended on this node yet\n".to_owned();
    }
    let columns = [
        Column::Text("ID"),
        Column::Text("CONTAINER"),
        Column::Text("FROM → TO"),
        Column::Text("WHEN"),
        Column::Text("MODE"),
        Column::Number("BLACKOUT"),
        Column::Number("TOTAL"),
        Column::Text("OUTCOME"),
    ];
    let outcome = |r: &Report| match r.outcome {
        Outcome::Running => "running",
        Outcome::Moved => "moved",
        Outcome::GivenUp => "given up",
        Outcome::Ended => "ended there",
        Outcome::Cancelled => "cancelled",
        Outcome::Failed if !r.blockers.is_empty() => "blocked",
        Outcome::Failed => "failed",
    };
    let row = |r: &Report| {
        vec![
            r.id.to_string(),
            r.container.clone(),
            format!("{} → {}", r.source, r.destination),
            when(r.started_unix_ms, zone),
            r.mode_taken.unwrap_or(r.mode).to_string(),
            or_nothing(r.blackout_ms, duration),
            or_nothing(r.total_ms, duration),
            outcome(r).to_owned(),
        ]
    };
    table("", &columns, ended.map(row))
}

/// `tranship doctor`.
pub fn leftovers(list: &[Leftover]) -> String {
    if list.is_empty() {
        return "no move has left anything on this node\n".to_owned();
    }
    let state = |l: &Leftover| match (l.removed, l.note.as_str()) {
        (true, _) => "removed".to_owned(),
        (false, "") => "`tranship doctor --fix` removes it".to_owned(),
        (false, note) => note.to_owned(),
    };
    let columns = [Column::Text("LEFT OVER"), Column::Text("WHERE"), Column::Text("WHAT TO DO")];
    table("", &columns, list.iter().map(|l| vec![l.kind.to_string(), l.name.clone(), state(l)]))
}

fn addresses(held: &HeldAddresses) -> String {
    let each: Vec<_> = held.addresses.iter().map(|one| format!("{} ({})", one.address, one.network)).collect();
    each.join(", ")
}

/// `tranship release`.
pub fn held_addresses(list: &[HeldAddresses], now_unix_ms: u64) -> String {
    if list.is_empty() {
        return "this node holds no address for a container that has left it\n".to_owned();
    }
    let columns = [Column::Text("CONTAINER"), Column::Text("NODE"), Column::Number("SINCE"), Column::Text("HELD HERE")];
    let row = |held: &HeldAddresses| {
        let since = since(held.since_unix_ms, now_unix_ms);
        let not_held = held.not_held.as_ref().map(|why| format!("; not held: {why}"));
        vec![held.container.clone(), held.node.to_string(), since, addresses(held) + &not_held.unwrap_or_default()]
    };
    table("", &columns, list.iter().map(row))
}

/// `tranship release NAME`.
pub fn released(list: &[HeldAddresses]) -> String {
    list.iter().map(|held| format!("released {}, held for {}\n", addresses(held), held.container)).collect()
}

#[cfg(test)]
mod tests {
    use tranship_api::HeldAddress;

    use super::*;
    use crate::show::report::tests::{failed, moved};

    #[test]
    fn containers_in_columns() {
        let mut redis = ContainerInfo {
            name: "redis".into(),
            engine: "runc".into(),
            state: ContainerState::Running,
            pid: Some(812),
            memory_bytes: Some(172_851_200),
            created_unix_ms: Some(1_000_000),
            migration: None,
        };
        let nginx = ContainerInfo {
            name: "nginx-front".into(),
            state: ContainerState::Stopped,
            pid: None,
            memory_bytes: None,
            created_unix_ms: None,
            ..redis.clone()
        };
        assert_eq!(
            containers(&[redis.clone(), nginx], 4_600_000),
            "\
NAME         ENGINE  STATE    PID     MEMORY   SINCE
redis        runc    running  812  164.8 MiB  60 min
nginx-front  runc    stopped    -          -       -
"
        );
        redis.migration = Some("m-1".parse().unwrap());
        assert!(containers(&[redis], 0).contains("moving (m-1)"));
        assert_eq!(containers(&[], 0), "no containers on this node\n");
    }

    #[test]
    fn leftovers_in_columns() {
        let directory = Leftover {
            kind: tranship_api::LeftoverKind::Migration,
            name: "/run/tranship/migrations/m-1".into(),
            removed: false,
            warning: false,
            note: String::new(),
        };
        let gone = Leftover { removed: true, ..directory.clone() };
        let busy = Leftover { note: "its pager is at work; wait for it".into(), ..directory.clone() };
        assert_eq!(
            leftovers(&[directory, gone, busy]),
            "\
LEFT OVER  WHERE                         WHAT TO DO
migration  /run/tranship/migrations/m-1  `tranship doctor --fix` removes it
migration  /run/tranship/migrations/m-1  removed
migration  /run/tranship/migrations/m-1  its pager is at work; wait for it
"
        );
        assert_eq!(leftovers(&[]), "no move has left anything on this node\n");
    }

    #[test]
    fn held_addresses_in_columns() {
        let address = |address: &str| HeldAddress { network: "lan".into(), address: address.parse().unwrap() };
        let held = HeldAddresses {
            container: "redis".into(),
            node: "b".parse().unwrap(),
            migration: "m-1".parse().unwrap(),
            since_unix_ms: 0,
            addresses: vec![address("10.77.0.53"), address("fd77::35")],
            not_held: None,
        };
        let lost = HeldAddresses { not_held: Some("docker does not answer".into()), ..held.clone() };
        assert!(held_addresses(&[lost], 0).ends_with("fd77::35 (lan); not held: docker does not answer\n"));
        assert_eq!(
            held_addresses(std::slice::from_ref(&held), 3_600_000),
            "\
CONTAINER  NODE   SINCE  HELD HERE
redis      b     60 min  10.77.0.53 (lan), fd77::35 (lan)
"
        );
        assert_eq!(released(&[held]), "released 10.77.0.53 (lan), fd77::35 (lan), held for redis\n");
        assert_eq!(held_addresses(&[], 0), "this node holds no address for a container that has left it\n");
    }

    #[test]
    fn history_in_columns() {
        let mut running = moved();
        running.outcome = Outcome::Running;
        assert_eq!(
            history(&[running.clone(), moved(), failed()], &TimeZone::UTC),
            "\
ID          CONTAINER  FROM → TO  WHEN                 MODE  BLACKOUT     TOTAL  OUTCOME
m-4k7tq0zd  redis      a → b      2023-11-14 22:13:20  cold  213.4 ms    1.84 s  moved
m-00000001  redis      a → b      2023-11-14 22:13:20  cold         -  310.0 ms  failed
"
        );
        assert_eq!(history(&[running], &TimeZone::UTC), "no move has ended on this node yet\n");
    }

    #[test]
    fn moves_under_way_in_columns() {
        let mut running = moved();
        running.outcome = Outcome::Running;
        running.phase = tranship_types::Phase::Transfer;
        running.progress.moved_bytes /= 2;
        assert_eq!(
            under_way(&[running, moved()], 1_700_000_003_000),
            "\
ID          CONTAINER  FROM → TO  PHASE        MOVED         OF  DONE         RATE  LEFT  SINCE
m-4k7tq0zd  redis      a → b      transfer  82.4 MiB  164.8 MiB  50 %  112.3 MiB/s   1 s    3 s
"
        );
        assert_eq!(under_way(&[moved()], 0), "no move is under way\n");
    }
}
