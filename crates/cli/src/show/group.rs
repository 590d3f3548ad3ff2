//! The moves of a group, as bars on one clock and as a table.

use tranship_types::{GroupReport, MemberOutcome, Outcome, Phase, Span};

use super::table::{Column, table};
use crate::screen::Paint;
use crate::units::{bytes, duration};

/// How many characters the whole time takes.
const WIDTH: usize = 60;

/// A phase as a bar shows it.
fn letter(phase: Phase) -> char {
    match phase {
        Phase::Plan | Phase::Prepare => '░',
        Phase::Precopy => '▒',
        Phase::Freeze | Phase::Transfer | Phase::Ready | Phase::Commit | Phase::Resume => '█',
        Phase::Drain | Phase::Release | Phase::Done | Phase::Undo | Phase::Undone | Phase::Damaged | Phase::Unknown => {
            '-'
        }
    }
}

const LEGEND: &str = "░ prepare  ▒ pre-copy  █ frozen  - drain, release";

fn bar(spans: &[Span], now_ms: f64) -> String {
    let place = |ms: f64| ((ms / now_ms.max(1.0)) * WIDTH as f64).round() as usize;
    let mut bar = vec![' '; WIDTH];
    // What is short is what matters most: the frozen parts are drawn last, and never too small to be seen.
    let (frozen, other): (Vec<&Span>, Vec<&Span>) = spans.iter().partition(|span| letter(span.phase) == '█');
    for span in other.into_iter().chain(frozen) {
        let end = span.ms.map_or(now_ms, |ms| span.start_ms + ms);
        let from = place(span.start_ms).min(WIDTH - 1);
        let to = place(end).clamp(from + usize::from(letter(span.phase) == '█'), WIDTH);
        bar[from..to].fill(letter(span.phase));
    }
    bar.into_iter().collect()
}

/// The members' bars, on a clock that ends now.
pub fn bars(report: &GroupReport, now_ms: f64) -> String {
    let width = report.members.iter().map(|m| m.container.chars().count()).max().unwrap_or(0);
    let line = |m: &tranship_types::GroupMember| {
        let now = match (m.outcome, m.spans.last()) {
            (MemberOutcome::Running, Some(Span { phase, ms: None, .. })) => phase.to_string(),
            (MemberOutcome::Running, _) => "waits for its turn".to_owned(),
            (outcome, _) => outcome.to_string(),
        };
        format!("{:width$}  {}  {now}\n", m.container, bar(&m.spans, now_ms))
    };
    let bars: String = report.members.iter().map(line).collect();
    format!("{bars}{:width$}  {LEGEND}\n", "")
}

/// How a group has moved, or moves.
pub fn group(report: &GroupReport, paint: Paint) -> String {
    let moved = report.members.iter().filter(|m| m.outcome == MemberOutcome::Moved).count();
    let (all, id) = (report.members.len(), &report.id);
    let took = report.total_ms.map_or(String::new(), |ms| format!(" in {}", duration(ms)));
    let first = match report.outcome {
        Outcome::Running => format!("group {id}: {moved} of {all} containers moved so far, {}", report.order),
        Outcome::Moved => paint.good(&format!("group {id}: all {all} containers moved{took}, {}", report.order)),
        _ => paint.bad(&format!("group {id}: {moved} of {all} containers moved{took}, {}", report.order)),
    };
    let interrupted = if report.interrupted { "the agent was restarted before all had ended\n" } else { "" };
    let ends = report.members.iter().flat_map(|m| &m.spans).map(|s| s.start_ms + s.ms.unwrap_or_default());
    let end = report.total_ms.unwrap_or_else(|| ends.fold(0.0, f64::max));
    let columns = [
        Column::Text("CONTAINER"),
        Column::Number("LEVEL"),
        Column::Text("FROM → TO"),
        Column::Number("BLACKOUT"),
        Column::Number("TOTAL"),
        Column::Number("WIRE"),
        Column::Text("OUTCOME"),
        Column::Text("ID"),
    ];
    let or_nothing = |ms: Option<f64>| ms.map_or("-".to_owned(), duration);
    let row = |m: &tranship_types::GroupMember| {
        vec![
            m.container.clone(),
            m.level.to_string(),
            format!("{} → {}", report.source, m.destination),
            or_nothing(m.blackout_ms),
            or_nothing(m.total_ms()),
            bytes(m.wire_bytes),
            m.outcome.to_string(),
            m.migration.as_ref().map_or("-".to_owned(), ToString::to_string),
        ]
    };
    let why = |m: &tranship_types::GroupMember| Some(format!("  {}: {}\n", m.container, m.error.as_ref()?));
    let table = table("", &columns, report.members.iter().map(row));
    let failures: String = report.members.iter().filter_map(why).collect();
    format!("{first}\n{interrupted}\n{}\n{table}{failures}", bars(report, end))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use tranship_types::{GroupMember, GroupOrder};

    /// Of two containers the first has moved and the second has not.
    pub fn half() -> GroupReport {
        let span = |phase, start_ms, ms| Span { phase, start_ms, ms: Some(ms) };
        let member = |name: &str, outcome, spans| GroupMember {
            container: name.into(),
            destination: "b".parse().unwrap(),
            after: vec![],
            level: 0,
            migration: Some("m-4k7tq0zd".parse().unwrap()),
            outcome,
            error: None,
            blackout_ms: Some(61.0),
            wire_bytes: 1 << 30,
            spans,
        };
        let db = member(
            "db",
            MemberOutcome::Moved,
            vec![
                span(Phase::Plan, 0.0, 100.0),
                span(Phase::Prepare, 100.0, 400.0),
                span(Phase::Precopy, 500.0, 1000.0),
                span(Phase::Freeze, 1500.0, 20.0),
                span(Phase::Transfer, 1520.0, 41.0),
                span(Phase::Release, 1561.0, 439.0),
            ],
        );
        let app = GroupMember {
            after: vec!["db".into()],
            level: 1,
            error: Some("the link broke; move it again".into()),
            blackout_ms: None,
            ..member("app", MemberOutcome::Failed, vec![span(Phase::Plan, 1000.0, 1000.0)])
        };
        GroupReport {
            id: "g-4k7tq0zd".parse().unwrap(),
            source: "a".parse().unwrap(),
            order: GroupOrder::Pipelined,
            outcome: Outcome::Failed,
            started_unix_ms: 1_700_000_000_000,
            total_ms: Some(2000.0),
            members: vec![db, app],
            interrupted: false,
        }
    }

    #[test]
    fn a_group_is_bars_on_one_clock_and_a_table() {
        assert_eq!(
            group(&half(), Paint(false)),
            "\
group g-4k7tq0zd: 1 of 2 containers moved in 2.00 s, pipelined

db   ░░░░░░░░░░░░░░░▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒██-------------  moved
app                                ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  failed
     ░ prepare  ▒ pre-copy  █ frozen  - drain, release

CONTAINER  LEVEL  FROM → TO  BLACKOUT   TOTAL     WIRE  OUTCOME  ID
db             0  a → b       61.0 ms  2.00 s  1.0 GiB  moved    m-4k7tq0zd
app            1  a → b             -  1.00 s  1.0 GiB  failed   m-4k7tq0zd
  app: the link broke; move it again
"
        );
    }
}
