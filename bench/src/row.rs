//! Rows of the results: one for each case and system, medians of its runs.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::run::Sample;
use crate::suite::{Case, Suite, System};
use crate::timeline::Slice;

/// The most resident memory that an agent at rest may have, in bytes.
const MOST_AT_REST: f64 = 20e6;

/// Median and range of one quantity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Median; of an even number of values the mean of the two in the middle.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// `None` of no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<_> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median: f64::midpoint(low, high), min, max })
    }
}

/// A run that failed.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// The workload, with its link.
    pub workload: String,
    /// The system.
    pub system: &'static str,
    /// Which run.
    pub run: u32,
    /// Why.
    pub error: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} run {}: {}", self.workload, self.system, self.run, self.error)
    }
}

/// One row.
#[derive(Debug)]
pub struct Row {
    suite: &'static str,
    case: &'static Case,
    system: &'static System,
    runs: usize,
    /// Quantities by the names that they have in the results.
    quantities: Vec<(&'static str, Option<Spread>)>,
    /// Of the run with the median blackout.
    slices: Vec<Slice>,
    ways: Vec<String>,
    ratio_client_gap: Option<f64>,
}

impl Row {
    /// Makes a row of the runs that succeeded.
    pub fn new(suite: &'static Suite, case: &'static Case, system: &'static System, samples: &[Sample]) -> Self {
        let spread = |of: &dyn Fn(&Sample) -> f64| Spread::of(samples.iter().map(of));
        let mut quantities = vec![
            ("client_gap_ms", spread(&|s| s.client_gap_ms)),
            ("client_stalls_ms", spread(&|s| s.client_stalls_ms)),
            ("blackout_ms", spread(&|s| s.moved.blackout_ms)),
            ("total_ms", spread(&|s| s.moved.total_ms)),
            ("bytes_wire", spread(&|s| s.bytes_wire as f64)),
            ("peak_mem_bytes", spread(&|s| (s.peak_memory.0 + s.peak_memory.1) as f64)),
            ("peak_mem_source_bytes", spread(&|s| s.peak_memory.0 as f64)),
            ("peak_mem_destination_bytes", spread(&|s| s.peak_memory.1 as f64)),
            ("workload_bytes", spread(&|s| s.workload_bytes as f64)),
        ];
        if *system != System::Peer {
            let own = |side: fn((u64, u64)) -> u64| {
                Spread::of(samples.iter().filter_map(|s| s.moved.own_count).map(|c| side(c) as f64))
            };
            let rest = Spread::of(samples.iter().filter_map(|s| s.agent_rest_bytes).map(|bytes| bytes as f64));
            quantities.push(("agent_rest_bytes", rest));
            quantities.push(("reported_source_bytes", own(|c| c.0)));
            quantities.push(("reported_destination_bytes", own(|c| c.1)));
        }
        let mut by_blackout: Vec<_> = samples.iter().collect();
        by_blackout.sort_by(|a, b| a.moved.blackout_ms.total_cmp(&b.moved.blackout_ms));
        let typical = by_blackout.get(samples.len().saturating_sub(1) / 2);
        Self {
            suite: suite.name,
            case,
            system,
            runs: samples.len(),
            quantities,
            slices: typical.map_or(Vec::new(), |s| s.moved.slices.clone()),
            ways: typical.map_or(Vec::new(), |s| s.moved.ways.clone()),
            ratio_client_gap: None,
        }
    }

    /// The case that was measured.
    pub fn case(&self) -> &Case {
        self.case
    }

    /// The system that moved it.
    pub fn system(&self) -> &System {
        self.system
    }

    /// How many runs succeeded.
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// A quantity by its name in the results; `None` if no run succeeded.
    pub fn quantity(&self, name: &str) -> Option<Spread> {
        self.quantities.iter().find(|(n, _)| *n == name)?.1
    }

    /// What the blackout of the typical run was spent on.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Tranship's client gap over the peer's, on rows of Tranship's.
    pub fn ratio_client_gap(&self) -> Option<f64> {
        self.ratio_client_gap
    }

    /// The row as results.json has it.
    pub fn to_json(&self) -> Value {
        let mut row = Map::new();
        let mut put = |name: &str, value: Value| row.insert(name.to_owned(), value);
        put("suite", json!(self.suite));
        put("system", json!(self.system.name()));
        put("mode", json!(self.system.mode()));
        put("workload", json!(self.case.workload));
        put("link", json!(self.case.link_name()));
        put("runs", json!(self.runs));
        for (name, spread) in &self.quantities {
            // Bytes are whole; a hundredth of a ms is far below the noise.
            let number = |value: f64| {
                if name.ends_with("_ms") { json!((value * 1e2).round() / 1e2) } else { json!(value.round() as u64) }
            };
            put(name, spread.map_or(Value::Null, |s| number(s.median)));
            put(&format!("{name}_min"), spread.map_or(Value::Null, |s| number(s.min)));
            put(&format!("{name}_max"), spread.map_or(Value::Null, |s| number(s.max)));
        }
        if *self.system != System::Peer {
            put("ratio_client_gap", self.ratio_client_gap.map_or(Value::Null, |r| json!((r * 1e4).round() / 1e4)));
        }
        put("blackout_slices", json!(self.slices));
        put("ways", json!(self.ways));
        Value::Object(row)
    }

    /// Whether the goals that this row is to meet are met, a sentence each.
    pub fn verdicts(&self) -> Vec<String> {
        let judge = |met: bool| if met { "met" } else { "MISSED" };
        let mut all = Vec::new();
        if let (Some(ratio), Some(most)) = (self.ratio_client_gap, self.case.most_ratio) {
            let name = self.case.name();
            all.push(format!(
                "goal {}: client gap of {name} is {ratio:.2} of the peer's, at most {most}",
                judge(ratio <= most)
            ));
        }
        if let Some(rest) = self.quantity("agent_rest_bytes") {
            let (most, limit) = (rest.max / 1e6, MOST_AT_REST / 1e6);
            all.push(format!(
                "goal {}: an agent at rest has {most:.1} MB, at most {limit:.0}",
                judge(rest.max <= MOST_AT_REST)
            ));
        }
        all
    }
}

/// Adds to the rows of one case how they compare with the peer's row among them.
pub fn with_ratios(mut rows: Vec<Row>) -> Vec<Row> {
    let peer = rows.iter().find(|r| *r.system == System::Peer).and_then(|r| r.quantity("client_gap_ms"));
    for row in rows.iter_mut().filter(|r| *r.system != System::Peer) {
        row.ratio_client_gap = row.quantity("client_gap_ms").zip(peer).map(|(own, peer)| own.median / peer.median);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Moved;
    use crate::suite;

    fn sample(gap: f64) -> Sample {
        let moved = Moved {
            total_ms: 1000.0,
            blackout_ms: gap - 1.0,
            slices: vec![Slice { name: "dump".into(), ms: gap }],
            own_count: None,
            ways: Vec::new(),
        };
        Sample {
            moved,
            client_gap_ms: gap,
            client_stalls_ms: gap,
            bytes_wire: 7,
            peak_memory: (1, 2),
            agent_rest_bytes: Some(9_000_000),
            workload_bytes: 1,
        }
    }

    fn row(system: usize, gaps: &[f64]) -> Row {
        let suite = suite::find("cold").unwrap();
        Row::new(suite, &suite.cases[0], &suite.systems[system], &gaps.iter().copied().map(sample).collect::<Vec<_>>())
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(Spread::of([4.0, 1.0, 3.0, 2.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn a_row_has_the_schema() {
        let rows = with_ratios(vec![row(0, &[300.0, 200.0, 250.0]), row(1, &[800.0, 500.0, 1000.0])]);
        let value = rows[0].to_json();
        for name in ["suite", "system", "mode", "workload", "link", "runs"] {
            assert!(!value[name].is_null(), "{name}");
        }
        for name in ["client_gap_ms", "blackout_ms", "total_ms", "bytes_wire", "peak_mem_bytes", "agent_rest_bytes"] {
            for end in ["", "_min", "_max"] {
                assert!(value[format!("{name}{end}")].is_number(), "{name}{end}");
            }
        }
        assert_eq!(value["client_gap_ms"], 250.0);
        assert_eq!(value["ratio_client_gap"], 0.3125);
        assert_eq!(value["blackout_slices"][0]["ms"], 250.0);
        assert!(rows[1].to_json().get("ratio_client_gap").is_none());
        assert!(rows[0].verdicts().iter().all(|v| v.starts_with("goal met")));
    }

    #[test]
    fn a_row_without_runs_says_so_and_has_no_figures() {
        let rows = with_ratios(vec![row(0, &[]), row(1, &[800.0])]);
        let value = rows[0].to_json();
        assert_eq!(value["runs"], 0);
        assert!(value["client_gap_ms"].is_null() && value["ratio_client_gap"].is_null());
    }
}
