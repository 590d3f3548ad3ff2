//! A move as a trace in the Chrome format, which Perfetto and `chrome://tracing` show.

use serde_json::{Value, json};
use tranship_types::{Part, Report, Side};

/// The parts of one side in lanes, such that those of one lane nest and do not cross.
fn lanes<'a>(parts: impl Iterator<Item = &'a Part>) -> Vec<Vec<&'a Part>> {
    let mut all: Vec<&Part> = parts.collect();
    // Of two that begin together, the longer one holds the other.
    all.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms).then(b.ms.total_cmp(&a.ms)));
    let end = |part: &Part| part.start_ms + part.ms;
    let mut lanes: Vec<Vec<&Part>> = Vec::new();
    for part in all {
        let crosses = |other: &&Part| end(other) > part.start_ms && end(other) < end(part);
        match lanes.iter_mut().find(|lane| !lane.iter().any(crosses)) {
            Some(lane) => lane.push(part),
            None => lanes.push(vec![part]),
        }
    }
    lanes
}

/// The trace: one process for each node and one for the container itself; times in µs from the earliest part on.
pub fn trace(r: &Report) -> String {
    let first = r.parts.iter().map(|part| part.start_ms).fold(0.0, f64::min);
    let event = |process: u32, lane: usize, name: &str, start_ms: f64, ms: f64| {
        let (ts, dur) = ((start_ms - first) * 1e3, ms * 1e3);
        json!({"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": process, "tid": lane})
    };
    let process = |number: u32, name: String| json!({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}});
    let mut events = vec![process(0, r.container.clone())];
    if let Some(blackout) = r.blackout_ms {
        events.push(event(0, 0, "blackout", 0.0, blackout));
    }
    for (number, side, node) in [(1, Side::Source, &r.source), (2, Side::Destination, &r.destination)] {
        events.push(process(number, format!("node {node}")));
        for (lane, parts) in lanes(r.parts.iter().filter(|part| part.side == side)).iter().enumerate() {
            events.extend(parts.iter().map(|part| event(number, lane, &part.name, part.start_ms, part.ms)));
        }
    }
    let about = json!({"move": r.id, "clock_error_ms": r.blackout_error_ms});
    let whole: Value = json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about});
    format!("{whole}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::report::tests::moved;

    #[test]
    fn every_part_is_an_event_that_begins_at_zero_or_later() {
        let report = moved();
        let trace: Value = serde_json::from_str(&trace(&report)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let drawn: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(drawn.len(), report.parts.len() + 1);
        assert!(drawn.iter().all(|e| e["ts"].as_f64().unwrap() >= 0.0));
        let blackout = drawn.iter().find(|e| e["name"] == "blackout").unwrap();
        let freeze = drawn.iter().find(|e| e["name"] == "freeze").unwrap();
        assert_eq!(blackout["ts"], freeze["ts"]);
    }

    #[test]
    fn what_crosses_is_in_another_lane() {
        let part = |start_ms, ms| Part { name: "x".into(), side: Side::Source, start_ms, ms };
        let parts = [part(0.0, 10.0), part(2.0, 3.0), part(4.0, 9.0), part(20.0, 1.0)];
        let found: Vec<usize> = lanes(parts.iter()).iter().map(Vec::len).collect();
        assert_eq!(found, [3, 1]);
    }
}
