//! Rows of the results: one for each case and system, medians of its runs.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value, json};

use tranship_types::Report;
use tranship_workloads::traffic::Course;

use crate::run::Sample;
use crate::suite::{Case, Suite, System};
use crate::timeline::Slice;

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
    system: System,
    runs: usize,
    /// Quantities by the names that they have in the results.
    quantities: Vec<(&'static str, Spread)>,
    /// The blackouts of all runs in ms, in order of length.
    blackouts: Vec<f64>,
    /// Of the run with the median blackout.
    slices: Vec<Slice>,
    /// Of the same run.
    report: Option<Box<Report>>,
    /// Of the same run.
    course: Option<(f64, Course)>,
    ratio_client_gap: Option<f64>,
}

impl Row {
    /// Makes a row of the runs that succeeded.
    pub fn new(suite: &'static Suite, case: &'static Case, system: System, samples: &[Sample]) -> Self {
        let mut names: Vec<&'static str> = Vec::new();
        for (name, _) in samples.iter().flat_map(|s| &s.figures) {
            if !names.contains(name) {
                names.push(name);
            }
        }
        let spread = |name: &'static str| Some((name, Spread::of(samples.iter().filter_map(|s| s.figure(name)))?));
        let blackout = |sample: &Sample| sample.figure("blackout_ms").unwrap_or(0.0);
        let mut by_blackout: Vec<_> = samples.iter().collect();
        by_blackout.sort_by(|a, b| blackout(a).total_cmp(&blackout(b)));
        let typical = by_blackout.get(samples.len().saturating_sub(1) / 2);
        Self {
            suite: suite.name,
            case,
            system,
            runs: samples.len(),
            quantities: names.into_iter().filter_map(spread).collect(),
            blackouts: by_blackout.iter().filter_map(|sample| sample.figure("blackout_ms")).collect(),
            slices: typical.map_or(Vec::new(), |s| s.slices.clone()),
            report: typical.and_then(|s| s.report.clone()),
            course: typical.and_then(|s| s.course.clone()),
            ratio_client_gap: None,
        }
    }

    /// The case that was measured.
    pub fn case(&self) -> &Case {
        self.case
    }

    /// The system that moved it.
    pub fn system(&self) -> System {
        self.system
    }

    /// How many runs succeeded.
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// A quantity by its name in the results; `None` if no run has shown it.
    pub fn quantity(&self, name: &str) -> Option<Spread> {
        self.quantities.iter().find(|(n, _)| *n == name).map(|(_, spread)| *spread)
    }

    /// The blackouts of all runs in ms, in order of length.
    pub fn blackouts(&self) -> &[f64] {
        &self.blackouts
    }

    /// The blackout in ms that so large a share of the runs did not exceed (nearest rank).
    pub fn blackout_quantile(&self, share: f64) -> Option<f64> {
        let rank = (share * self.blackouts.len() as f64).ceil() as usize;
        self.blackouts.get(rank.saturating_sub(1)).copied()
    }

    /// Tranship's own report of the typical run.
    pub fn report(&self) -> Option<&Report> {
        self.report.as_deref()
    }

    /// What the client received in the typical run, and when its mark was (s since the Unix epoch).
    pub fn course(&self) -> Option<&(f64, Course)> {
        self.course.as_ref()
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
            put(name, number(name, spread.median));
            put(&format!("{name}_min"), number(name, spread.min));
            put(&format!("{name}_max"), number(name, spread.max));
        }
        if let Some(ratio) = self.ratio_client_gap {
            put("ratio_client_gap", number("ratio_client_gap", ratio));
        }
        put("blackouts_ms", json!(self.blackouts.iter().map(|ms| number("", *ms)).collect::<Vec<_>>()));
        put("blackout_slices", json!(self.slices));
        put("ways", json!(self.report.as_ref().map_or(&[][..], |r| &r.ways)));
        put("report", json!(self.report));
        Value::Object(row)
    }
}

/// A quantity as the results have it: bytes are whole, and a hundredth of a ms is far below the noise.
fn number(name: &str, value: f64) -> Value {
    let to = |digits: f64| json!((value * digits).round() / digits);
    match name {
        _ if name.contains("bytes") => json!(value.round() as u64),
        _ if name.ends_with("_share") || name.starts_with("ratio_") => to(1e4),
        _ => to(1e2),
    }
}

/// Adds to the rows of one case how they compare with the row among them of what else moves such a container.
pub fn with_ratios(mut rows: Vec<Row>) -> Vec<Row> {
    let gaps: Vec<_> = rows.iter().map(|row| (row.system, row.quantity("client_gap_ms"))).collect();
    for row in &mut rows {
        let rival = row.system.rival().and_then(|rival| gaps.iter().find(|(system, _)| *system == rival)?.1);
        row.ratio_client_gap = row.quantity("client_gap_ms").zip(rival).map(|(own, peer)| own.median / peer.median);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite;

    fn row(system: usize, gaps: &[f64]) -> Row {
        let suite = suite::find("cold").unwrap();
        let sample = |gap: &f64| Sample {
            figures: vec![("client_gap_ms", *gap), ("blackout_ms", gap - 1.0), ("bytes_wire", 7.4)],
            slices: vec![Slice { name: "dump".into(), ms: *gap }],
            ..Sample::default()
        };
        let samples: Vec<_> = gaps.iter().map(sample).collect();
        Row::new(suite, &suite.cases[0], suite.cases[0].systems[system], &samples)
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
        for name in ["client_gap_ms", "blackout_ms", "bytes_wire"] {
            for end in ["", "_min", "_max"] {
                assert!(value[format!("{name}{end}")].is_number(), "{name}{end}");
            }
        }
        assert_eq!(value["client_gap_ms"], 250.0);
        assert_eq!(value["bytes_wire"], 7);
        assert_eq!(value["ratio_client_gap"], 0.3125);
        assert_eq!(value["blackout_slices"][0]["ms"], 250.0);
        assert!(rows[1].to_json().get("ratio_client_gap").is_none());
    }

    #[test]
    fn quantiles_are_of_the_runs_that_there_were() {
        let gaps: Vec<f64> = (0..30).map(|n| f64::from((n * 7) % 30) + 2.0).collect();
        let all = row(0, &gaps);
        assert_eq!(all.blackout_quantile(0.5), Some(15.0));
        assert_eq!(all.blackout_quantile(0.99), Some(30.0));
        assert_eq!(all.blackouts().len(), 30);
        assert_eq!(row(0, &[]).blackout_quantile(0.5), None);
    }

    #[test]
    fn a_row_without_runs_says_so_and_has_no_figures() {
        let rows = with_ratios(vec![row(0, &[]), row(1, &[800.0])]);
        let value = rows[0].to_json();
        assert_eq!(value["runs"], 0);
        assert!(value.get("client_gap_ms").is_none() && value.get("ratio_client_gap").is_none());
    }

    #[test]
    fn a_quantity_that_only_some_runs_show_is_of_those() {
        let suite = suite::find("cold").unwrap();
        let samples = [
            Sample { figures: vec![("client_gap_ms", 1.0)], ..Sample::default() },
            Sample { figures: vec![("client_gap_ms", 3.0), ("fault_p50_us", 80.0)], ..Sample::default() },
        ];
        let row = Row::new(suite, &suite.cases[0], System::Peer, &samples);
        assert_eq!(row.quantity("client_gap_ms").unwrap().median, 2.0);
        assert_eq!(row.quantity("fault_p50_us").unwrap().median, 80.0);
        assert_eq!(row.quantity("run_ms"), None);
    }
}
